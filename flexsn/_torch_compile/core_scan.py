"""A call as Dynamo traces it: the operator `core_scan`, and what runs where no kernel expresses the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._captured.captured_values import look
from .._captured.uneven import Ends, uneven_step
from .._operator.dispatch import run_core
from .._torch.compiling import outside_dynamo, unseen_by_dynamo
from .._torch.tracing import HigherOrderOperator
from . import call_sites as call_sites  # Inductor is told of the operators from there
from . import dynamo
from .loops import lowerable_scan

Results = tuple[list[Tensor], list[Tensor], list[Tensor]]  # final states, state sequences (if asked for), outputs


def uncompiled(
    core: Callable, owner: Any, inputs: tuple[Tensor, ...], states: tuple[Tensor | None, ...], params: tuple[Tensor, ...], sequences: bool,
    num_outputs: int | None, backend: str = "torch", strict: bool = False,
    exact: bool = True,
) -> Results:  # fmt: skip
    """Run the call as it runs outside of `torch.compile`."""
    seen = look(core) if owner is None else owner.captured_values()
    options = {"backend": backend, "strict": strict, "sequences": sequences, "num_outputs": num_outputs, "exact": exact}
    return run_core(core, seen, inputs, states, params, **options)


@outside_dynamo(
    "flexsn runs the eager loop: no kernel expresses this core, and gradients of the loops that Inductor compiles come out wrong. Compile "
    "without `fullgraph=True`, or under `torch.no_grad()`"
)
def uncompiled_loop(*call: Any) -> Results:
    """Run the eager loop between compiled parts; `call` as `uncompiled` takes it, without a backend."""
    return uncompiled(*call)


@outside_dynamo(
    "flexsn runs the call uncompiled: it has values with an inner dim, or complex numbers, whose parts a kernel takes, or mixes neurons "
    "in a way that no graph holds. Compile without `fullgraph=True`"
)
def uncompiled_parts(*call: Any) -> Results:
    """Run the call between compiled parts; `call` as `uncompiled` takes it."""
    return uncompiled(*call)


@outside_dynamo(
    "flexsn runs the call uncompiled: this PyTorch has moved what compiled calls stand on, as an `InterfaceWarning` says. Compile without "
    "`fullgraph=True`"
)
def uncompiled_call(*call: Any) -> Results:
    """Run the call between compiled parts; `call` as `uncompiled` takes it."""
    return uncompiled(*call)


def compiled_loop(
    core: Callable, owner: Any, inputs: tuple[Tensor, ...], states: tuple[Tensor | None, ...], params: tuple[Tensor, ...], sequences: bool,
    num_outputs: int | None,
) -> list[Tensor]:  # fmt: skip
    """Run a core that no kernel expresses by PyTorch's own scan operator, one node for any T: what Dynamo traces of such a call.

    Returns:
        What `core_scan` does.
    """
    shape = torch.broadcast_shapes(*[x.shape[1:] for x in inputs])
    first = [inputs[0].new_zeros(shape) if v is None else v for v in states]
    if num_outputs is None:
        returned = core(*[x.new_zeros(x.shape[1:]) for x in inputs], *first, *params)
        num_outputs = (1 if isinstance(returned, Tensor) else len(returned)) - len(states)
    done = list(lowerable_scan(core, len(inputs), len(states), num_outputs, *inputs, *first, *params))
    outputs, trail = done[:num_outputs], done[num_outputs:]
    if inputs[0].shape[0]:
        finals = [v[-1].clone() for v in trail]
    else:
        finals = [v.expand(t.shape[1:]).clone() for v, t in zip(first, trail, strict=True)]
    return [*outputs, *finals, *(trail if sequences else [])]


class CoreScan(HigherOrderOperator):
    """`core_scan(core, owner, inputs, states, params, sequences, num_outputs, backend, strict, exact)`: what Dynamo sees of a call.

    In a graph it becomes `flexsn::scan`, or where no kernel expresses the core what `compiled_loop` does. Where Dynamo gives up on a
    core, it runs as it is. Returns outputs, final states and, if asked for, state sequences in one list; a string while Dynamo traces
    where the call must run between compiled parts.
    """

    def __init__(self) -> None:
        super().__init__("flexsn_core_scan")

    @unseen_by_dynamo
    def __call__(self, *call: Any) -> list[Tensor]:
        finals, trail, outputs = uncompiled(*call)
        return [*outputs, *finals, *trail]


core_scan = CoreScan()
dynamo.INLINED["flexsn_core_scan"] = compiled_loop


def compile_core(
    core: Callable, owner: Any, inputs: tuple[Tensor, ...], states: tuple[Tensor | None, ...], params: tuple[Tensor, ...], *, backend: str,
    strict: bool, sequences: bool, num_outputs: int | None = None, exact: bool = True,
) -> Results:  # fmt: skip
    """Run a call that Dynamo traces; `owner` is the `FlexSN` that holds the captured tensors, if one does."""
    call = core, owner, inputs, states, params, sequences, num_outputs
    if not dynamo.ready():
        return uncompiled_call(*call, backend, strict, exact)
    results = core_scan(*call, backend, strict, exact)
    if results == dynamo.PARTS:
        return uncompiled_parts(*call, backend, strict, exact)
    if isinstance(results, str):
        return uncompiled_loop(*call)
    n = len(states)
    outs = len(results) - (2 * n if sequences else n)
    return list(results[outs : outs + n]), list(results[outs + n :]), list(results[:outs])


def run_uneven(
    core: Callable, owner: Any, inputs: tuple[Tensor, ...], states: tuple[Tensor | None, ...], params: tuple[Tensor, ...], ends: Ends,
    **options: Any,
) -> Results:  # fmt: skip
    """Run a call over sequences that end, or start anew, each at steps of its own; `options` as of `run_core`."""
    wrap, own_inputs, own_states, own_params = ends.among(core, inputs, states, params)
    operands = own_inputs, own_states, own_params
    if torch.compiler.is_dynamo_compiling():
        found = compile_core(uneven_step(core, *wrap), owner, *operands, **options)
    else:
        seen, own = (look(core), core) if owner is None else (owner.captured_values(), owner._looked_at)
        found = run_core(own, wrap.look(core, seen), *operands, **options)
    finals, trail, outputs = found
    return finals[: len(states)], trail[: len(states)], outputs
