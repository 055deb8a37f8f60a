"""How the code that Inductor generates calls the kernels: by Python functions that stand beside the operators.

`torch.ops.flexsn.call_forward` is what `torch.ops.flexsn.forward` does, past PyTorch's dispatcher; `site_forward()` makes a site, a
function for one place in generated code, whose operands are of the same kinds in every call: its launch is looked up once.
Generated code lies in PyTorch's caches on disk, so both are there as soon as flexsn is imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._ir.roles import Kind, roles
from .._operator.library import KERNEL_OPERATORS, WHEN_TRACED, Operands, by_role, settle_backward, settle_forward
from .._operator.no_gradient import refuse_forward_mode
from .._program.cache import program_from
from .._runtime.launch import Launch
from .._torch.autograd import forward_ad_level
from .._torch.availability import INDUCTOR, moved
from . import prologue_fusion
from .inductor import lower_to_calls

Settle = Callable[..., tuple[Launch, Operands]]


def _of_forward(program: str, inputs: Operands, states: Operands, params: Operands, *others: Any) -> Operands:
    return (*inputs, *states)


def _of_backward(
    program: str, inputs: Operands, states: Operands, params: Operands, checkpoints: Operands, cotangents: Operands, *others: Any
) -> Operands:
    return (*inputs, *states, *checkpoints, *cotangents)


def _site(settle: Settle, operands_of: Callable[..., Operands], keeps: bool = True) -> Callable[..., list[Tensor]]:
    """Return a site; if it `keeps` nothing, what any place may call."""
    kept: Callable[[Operands], list[Tensor]] | None = None

    def call(*args: Any) -> list[Tensor]:
        nonlocal kept
        given, params = operands_of(*args), args[3]
        if forward_ad_level() >= 0:
            refuse_forward_mode(program_from(args[0], args[1][0].device).sig.core, (*given, *params))
        if kept is not None:
            return kept((*given, *params) if params else given)
        launch, operands = settle(given, *args)
        if keeps and operands is given and _takes(launch, params):
            kept = launch.fixed((*given, *params))
        return launch(operands, by_role(params))

    return call


def _takes(launch: Launch, params: Operands) -> bool:
    """Return whether it takes all of the params, in their order."""
    return launch.params == roles(Kind.PARAM, len(params))


for _name, _settle, _operands in (("forward", settle_forward, _of_forward), ("backward", settle_backward, _of_backward)):
    setattr(torch.ops.flexsn, f"call_{_name}", _site(_settle, _operands, keeps=False))
    setattr(torch.ops.flexsn, f"site_{_name}", functools.partial(_site, _settle, _operands))


# --- Inductor -----------------------------------------------------------------------------------------------------------------
def prepare_inductor() -> None:
    """Where Inductor was imported, tell it how to lower the operators, and to rewrite the graphs that hold them.

    Whatever leads to a compiled graph, a trace meets the operators in it before Inductor does: in a call that Dynamo saw, in a
    program that was exported elsewhere, in a package of AOTInductor.
    """
    if "torch._inductor.lowering" in sys.modules:
        _tell_inductor()


@functools.cache
def _tell_inductor() -> None:
    if not moved(INDUCTOR):
        lower_to_calls(KERNEL_OPERATORS, torch.ops.flexsn.carry.default)
        prologue_fusion.register()


WHEN_TRACED.append(prepare_inductor)
