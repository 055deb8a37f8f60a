"""A call as Dynamo traces it: the operator `core_scan`, and the loops that run where no kernel expresses the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._operator.dispatch import look, run_core
from .._torch.compiling import outside_dynamo, unseen_by_dynamo
from .._torch.tracing import HigherOrderOperator
from . import call_sites as call_sites  # Inductor is told of the operators from there
from . import dynamo
from .loops import scan_operator


class CoreScan(HigherOrderOperator):
    """What Dynamo sees of a call: `dynamo.py` turns it into `flexsn::scan`. Where Dynamo gives up on a core, it runs as it is."""

    def __init__(self) -> None:
        super().__init__("flexsn_core_scan")

    @unseen_by_dynamo
    def __call__(self, core, owner, inputs, states, params, sequences, num_outputs, backend, strict):
        reads, replaced = (look(core), {}) if owner is None else owner.look()
        finals, trail, outputs = run_core(
            core, reads, replaced, inputs, states, params, backend=backend, strict=strict, sequences=sequences, num_outputs=num_outputs
        )
        return [*outputs, *finals, *trail]


core_scan = CoreScan()


def compile_core(
    core: Callable, owner: Any, inputs: tuple[Tensor, ...], states: tuple[Tensor | None, ...], params: tuple[Tensor, ...], *, backend: str,
    strict: bool, sequences: bool, num_outputs: int | None = None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """`run_core` as Dynamo traces it.

    Args:
        owner: the `FlexSN` that holds the captured tensors, if one does.
    """
    if not dynamo.ready() or (owner is not None and owner.holds_copies):
        return uncompiled_call(core, owner, inputs, states, params, sequences, num_outputs, backend, strict)
    results = core_scan(core, owner, inputs, states, params, sequences, num_outputs, backend, strict)
    if isinstance(results, str):  # no kernel can express the core
        loop = loop_scan if results == dynamo.SCAN else uncompiled_loop
        return loop(core, owner, inputs, states, params, sequences, num_outputs)
    n = len(states)
    outs = len(results) - (2 * n if sequences else n)
    return list(results[outs : outs + n]), list(results[outs + n :]), list(results[:outs])


@outside_dynamo(
    "flexsn runs the eager loop: no kernel expresses this core, and gradients of the loops that Inductor compiles come out wrong. Compile "
    "without `fullgraph=True`, or under `torch.no_grad()`"
)
def uncompiled_loop(
    core: Callable, owner: Any, inputs: tuple[Tensor, ...], states: tuple[Tensor | None, ...], params: tuple[Tensor, ...], sequences: bool,
    num_outputs: int | None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """The eager loop, between compiled parts."""
    seen = (look(core), {}) if owner is None else owner.look()
    return run_core(core, *seen, inputs, states, params, backend="torch", strict=False, sequences=sequences, num_outputs=num_outputs)


@outside_dynamo(
    "flexsn runs the call uncompiled: this PyTorch has moved what compiled calls stand on, as an `InterfaceWarning` says; or, without the "
    "warning, this neuron is a copy whose core captures a module, and Dynamo would read the original's flags and numbers (a core that is a "
    "module and holds the other is copied with it). Compile without `fullgraph=True`"
)
def uncompiled_call(
    core: Callable, owner: Any, inputs: tuple[Tensor, ...], states: tuple[Tensor | None, ...], params: tuple[Tensor, ...], sequences: bool,
    num_outputs: int | None, backend: str, strict: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """The call as it runs outside of `torch.compile`, between compiled parts."""
    seen = (look(core), {}) if owner is None else owner.look()
    return run_core(core, *seen, inputs, states, params, backend=backend, strict=strict, sequences=sequences, num_outputs=num_outputs)


def compiled_loop(
    core: Callable, owner: Any, inputs: tuple[Tensor, ...], states: tuple[Tensor | None, ...], params: tuple[Tensor, ...], sequences: bool,
    num_outputs: int | None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """`eager_loop` as Dynamo traces it: PyTorch's own scan operator, one node for any T."""
    shape = torch.broadcast_shapes(*[x.shape[1:] for x in inputs])
    first = [inputs[0].new_zeros(shape) if v is None else v for v in states]
    if num_outputs is None:
        returned = core(*[x.new_zeros(x.shape[1:]) for x in inputs], *first, *params)
        num_outputs = (1 if isinstance(returned, Tensor) else len(returned)) - len(states)
    counts = len(inputs), len(states), num_outputs
    done = list(scan_operator(core, *counts, *inputs, *first, *params, states="sequence"))
    outputs, trail = done[:num_outputs], done[num_outputs:]
    finals = (
        [v[-1].clone() for v in trail] if inputs[0].shape[0] else [v.expand(t.shape[1:]).clone() for v, t in zip(first, trail, strict=True)]
    )
    return finals, trail if sequences else [], outputs


class LoopScan(HigherOrderOperator):
    """`compiled_loop`, with numbers as constants. Where Dynamo gives up on it, the eager loop runs."""

    def __init__(self) -> None:
        super().__init__("flexsn_loop_scan")

    @unseen_by_dynamo
    def __call__(self, *operands):
        return uncompiled_loop(*operands)


loop_scan = LoopScan()
dynamo.INLINED["flexsn_loop_scan"] = dynamo.Inlined(compiled_loop, owned=True)
