"""A program without its gradient: the rule of `flexsn::forward` for autograd, which meets it only where the formula around it
(`autograd.py`) is gone, after `run_decompositions()`; and what any call does whose exported program, or operator, holds no gradient. It
runs, and raises where a gradient is asked for, also in a trace: never zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._program.cache import program_from
from .._torch.autograd import forward_ad_level, skipping_autograd
from .._torch.compiling import unseen_by_dynamo
from .._torch.transforms import has_tangent, transforms_active
from ..errors import ForwardModeError, MissingGradientError
from .library import LIBRARY, TAGS


def no_forward_mode(core: str) -> ForwardModeError:
    return ForwardModeError("is differentiated in forward mode, which the fused operator does not do", core=core)


def refuse_forward_mode(core: str, tensors: Sequence[Tensor | None]) -> None:
    if forward_ad_level() >= 0 and any(t is not None and has_tangent(t) for t in tensors):
        raise no_forward_mode(core)


class WithoutGradient(torch.autograd.Function):
    """What holds no gradient runs where something requires grad, and is told from what has none: an exported program, or with a `hint`
    an operator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(run_it: Callable[..., Sequence[Tensor]], core: str, hint: str, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(run_it(*tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _, ctx.core, ctx.hint, *tensors = inputs
        ctx.there = [t is not None for t in tensors]
        ctx.save_for_backward(*[t for t in tensors if t is not None])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for t in output if not t.is_floating_point()])

    @staticmethod
    @unseen_by_dynamo
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        if transforms_active():
            refuse_missing_gradient(ctx.core, ctx.hint)
        saved = iter(ctx.saved_tensors)
        tensors = [next(saved) if there else None for there in ctx.there]
        given = [g for g in grads if g is not None]
        needs = zip(tensors, ctx.needs_input_grad[3:], strict=True)
        missing = torch.ops.flexsn.no_gradient
        return None, None, None, *[missing(ctx.core, t, given, ctx.hint) if t is not None and need else None for t, need in needs]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise no_forward_mode(ctx.core)


def refuse_missing_gradient(core: str, hint: str = "") -> NoReturn:
    if hint:
        raise MissingGradientError("is differentiated by an operator that has no gradient", core=core, hint=hint)
    raise MissingGradientError(
        "is differentiated in a program that holds no gradient of it: it was exported under `no_grad`, or where nothing that it "
        "depends on required grad, or `run_decompositions()` left its forward alone", core=core,
        hint="Export it with gradients enabled, and an example input that requires grad if no parameter does; train before decompositions.",
    )  # fmt: skip


# What is not there of a gradient `like` a tensor, from cotangents: a trace holds it, and raises where it is asked for.
LIBRARY.define('no_gradient(str core, Tensor like, Tensor[] cotangents, str hint="") -> Tensor', tags=TAGS)
LIBRARY.impl("no_gradient", lambda core, like, cotangents, hint="": refuse_missing_gradient(core, hint), "CompositeExplicitAutograd")
torch.library.register_fake("flexsn::no_gradient", lambda core, like, cotangents, hint="": torch.empty_like(like), lib=LIBRARY)


def _forward_alone(
    program: str, inputs: Sequence[Tensor], states: Sequence[Tensor | None], params: Sequence[Tensor], *others: Any
) -> list[Tensor]:  # fmt: skip
    """The rule of `flexsn::forward` for autograd, which meets it only where its formula, around it, is gone."""

    def below(*tensors: Tensor | None) -> list[Tensor]:
        n, m = len(inputs), len(inputs) + len(states)
        with skipping_autograd():
            return torch.ops.flexsn.forward(program, list(tensors[:n]), list(tensors[n:m]), list(tensors[m:]), *others)

    tensors = (*inputs, *(states := states or ()), *(params or ()))  # a package of AOTInductor passes None for an empty list
    if forward_ad_level() >= 0:
        refuse_forward_mode(program_from(program, inputs[0].device).sig.core, tensors)
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)):
        return below(*tensors)
    core = program_from(program, inputs[0].device).sig.core
    if transforms_active():
        refuse_missing_gradient(core)
    return list(WithoutGradient.apply(below, core, "", *tensors))


LIBRARY.impl("forward", _forward_alone, "Autograd")
LIBRARY.impl("backward", torch.library.fallthrough_kernel, "Autograd")  # second derivatives are refused before it
