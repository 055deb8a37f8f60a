"""Runs a core step after step in plain PyTorch: `backend="torch"`, and the oracle of every test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._capture.signature import Signature, broadcasts, check_returns, check_values, loop_shape, noting_default_states, state_mismatch
from .._ir.graph import HALF
from .._runtime.fork import autocast_dtype
from ..errors import OperandMutationError, ReturnTypeError, ShapeMismatchError
from .call import upcast
from .mixing.precision import precise


def over_time(
    step: Callable[[Sequence[Tensor], Any], tuple[Any, Sequence[Tensor]]], rows: Iterable[Sequence[Tensor]], states: Any
) -> tuple[Any, list[Tensor]]:
    """Run one step after the other, each from the states that the one before returned.

    Args:
        step: `step(inputs, states) -> (new states, values to keep)`.
        rows: the inputs of each step.

    Returns:
        The last states; the kept values of all steps, stacked along a new first dim.
    """
    kept = []
    for inputs in rows:
        states, values = step(inputs, states)
        kept.append(values)
    return states, [torch.stack(sequence) for sequence in zip(*kept, strict=True)]


def eager_loop(
    core: Callable, sig: Signature, inputs: Sequence[Tensor], states: Sequence[Tensor | None], params: Sequence[Tensor],
    num_outputs: int | None = None, sequences: bool = False,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """Run `core` over T steps.

    With a 16-bit float among the operands the core runs in float32 on upcast ones; results are cast to the dtypes that the core
    returns for the operands as they are. Products run in their own dtype (`mixing/precision.py`).

    Returns:
        Outputs `[T, *shape]`, final states, and, if asked for, state sequences `[T, *shape]`.
    """
    half = any(t is not None and t.dtype in HALF for t in (*inputs, *states, *params))
    dtypes = result_dtypes(core, sig, inputs, states, params) if half else None
    params, autocast = [upcast(p) for p in params], autocast_dtype(inputs[0].device.type)
    run = precise(core, autocast, sig.num_inputs + sig.num_states) if half or autocast is not None else core
    run = _carrying_float32(run, sig) if half else run
    T = inputs[0].shape[0]
    operands = zip(sig.names, (*inputs, *states, *params), strict=True)
    watched = [(n, t, t._version) for n, t in operands if t is not None and not t.is_inference()]
    first: Sequence[Tensor] | None = None

    def step(now: Sequence[Tensor], current: list[Tensor] | None) -> tuple[list[Tensor], Sequence[Tensor]]:
        nonlocal first
        if current is None:
            returned, current = _first_step(run, sig, now, [None if v is None else upcast(v) for v in states], params, num_outputs)
        else:
            returned = check_returns(sig, run(*now, *current, *params), num_outputs)
        outs = len(returned) - sig.num_states
        outputs, new = returned[:outs], list(returned[outs:])
        first = outputs if first is None else first
        _check_states(sig, current, new)
        _check_unwritten(sig, watched)
        _check_outputs(sig, first, outputs)
        return new if T else current, returned if sequences else outputs

    if T:
        rows: Iterable[Sequence[Tensor]] = zip(*(upcast(x).unbind(0) for x in inputs), strict=True)
    else:  # one step on zeros shows what the core returns
        rows = [[upcast(x).new_zeros(x.shape[1:]) for x in inputs]]
    last, kept = over_time(step, rows, None)
    assert first is not None
    outs, finals = len(first), [v.clone() for v in last]  # the core may return an operand as it is
    kept = [y[:T] for y in kept]
    if dtypes is not None:
        kept = [y.to(d) for y, d in zip(kept, dtypes, strict=False)]
        finals = [v.to(d) for v, d in zip(finals, dtypes[outs:], strict=True)]
    return kept[:outs], finals, kept[outs:]


def _carrying_float32(core: Callable, sig: Signature) -> Callable:
    """Return the core, with 16-bit states carried on in float32 as every kernel does."""

    def run(*operands: Tensor) -> tuple[Tensor, ...]:
        returned = check_returns(sig, core(*operands), None)
        outs = len(returned) - sig.num_states
        return (*returned[:outs], *map(upcast, returned[outs:]))

    return run


def _first_step(
    core: Callable, sig: Signature, step: Sequence[Tensor], states: Sequence[Tensor | None], params: Sequence[Tensor],
    num_outputs: int | None,
) -> tuple[tuple[Tensor, ...], list[Tensor]]:  # fmt: skip
    """Run step 0; default states take the shape and dtype that the core returns, given ones broadcast to it.

    Returns:
        What the core returned, and the states that it was given.
    """
    shape, *_ = _fitting(sig, [x.shape for x in step])
    _, misfit, inner = _fitting(sig, [t.shape if t is not None else () for t in (*step, *states)])
    current = [v if v is not None else torch.zeros(shape, dtype=step[0].dtype, device=step[0].device) for v in states]
    first: tuple[list[Tensor], list[Tensor]] | None = None
    for _ in range(4):
        try:
            with noting_default_states(sig, states if first is None else None, step[0].dtype):
                returned = check_returns(sig, core(*step, *current, *params), num_outputs)
        except RuntimeError as error:
            if misfit is not None:
                if not inner:
                    raise misfit from error
                raise ShapeMismatchError(
                    f"{misfit.reason}, and the core does not take them so: {error}", core=sig.core,
                    hint=f"Beside a value `[..., N]`, one of each neuron is `x.unsqueeze(-1)`. {misfit.hint or ''}".rstrip(),
                ) from error  # fmt: skip
            if first is not None:  # it took zeros, but not the shape that it returned for them
                _check_shapes(sig, *first, states)
            raise
        check_values(sig, returned, step[0].device)
        new = returned[len(returned) - sig.num_states :]
        first = first or (list(current), list(new))
        if all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(current, new, strict=True)):
            break
        for i, (given, before, after) in enumerate(zip(states, list(current), new, strict=True)):
            if given is None:
                current[i] = torch.zeros(after.shape, dtype=after.dtype, device=after.device)
            elif before.shape != after.shape and before.dtype == after.dtype and broadcasts(before.shape, after.shape):
                current[i] = before.expand(after.shape)
    else:
        assert first is not None
        _check_states(sig, *first, states)
    return returned, current


def _fitting(sig: Signature, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ShapeMismatchError | None, bool]:
    """Return the shape of default states, and why the shapes do not broadcast, if they do not (a core that mixes neurons may take them),
    and whether they do but for an inner dim."""
    try:
        shape, error = loop_shape(sig, shapes)
    except ShapeMismatchError as why:
        return tuple(shapes[0]), why, False
    return shape, error, error is not None


def _check_outputs(sig: Signature, first: Sequence[Tensor], now: Sequence[Tensor]) -> None:
    if len(first) != len(now) or any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(first, now, strict=True)):
        raise ReturnTypeError(
            f"returned {', '.join(map(_meta, first))} at the first step and {', '.join(map(_meta, now))} at a later one", core=sig.core,
            hint="Outputs keep their number, shapes and dtypes from step to step.",
        )  # fmt: skip


def _check_shapes(sig: Signature, before: Sequence[Tensor], after: Sequence[Tensor], given: Sequence[Tensor | None]) -> None:
    if any(a.shape != b.shape for a, b in zip(before, after, strict=True)):
        _check_states(sig, before, after, given)


def _check_states(sig: Signature, before: Sequence[Tensor], after: Sequence[Tensor], given: Sequence[Tensor | None] = ()) -> None:
    """Raise if a state changes its shape or dtype. `given`: at the first step, the states that the call was given."""
    for k, (name, a, b) in enumerate(zip(sig.state_names, before, after, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise state_mismatch(sig, name, _meta(a), _meta(b), given=k < len(given) and given[k] is not None)


def _check_unwritten(sig: Signature, watched: Sequence[tuple[str, Tensor, int]]) -> None:
    for name, tensor, version in watched:
        if tensor._version != version:
            raise OperandMutationError(f"writes into operand `{name}` in place", core=sig.core, hint="Write `v = v + x`, not `v += x`.")


def _meta(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def first_step(
    core: Callable, sig: Signature, inputs: Sequence[Tensor], states: Sequence[Tensor | None], params: Sequence[Tensor],
    num_outputs: int | None,
) -> tuple[tuple[Tensor, ...], list[Tensor]]:  # fmt: skip
    """Run one step without gradients, on zeros where there is none.

    Returns:
        What the core returned, and the states that it was given, default ones as it returns them.
    """
    step = [x[0] if x.shape[0] else x.new_zeros(x.shape[1:]) for x in inputs]
    with torch.no_grad():
        returned, current = _first_step(core, sig, step, list(states), params, num_outputs)
    _check_states(sig, current, returned[len(returned) - sig.num_states :])
    return returned, current


def result_dtypes(
    core: Callable, sig: Signature, inputs: Sequence[Tensor], states: Sequence[Tensor | None], params: Sequence[Tensor]
) -> list[torch.dtype]:  # fmt: skip
    """Return the dtypes of the core's returns on the operands as they are, under the autocast of the call."""
    kind = inputs[0].device.type
    autocast = autocast_dtype(kind)
    with torch.autocast(kind, autocast) if autocast is not None else contextlib.nullcontext():
        return [t.dtype for t in first_step(core, sig, inputs, states, params, None)[0]]
