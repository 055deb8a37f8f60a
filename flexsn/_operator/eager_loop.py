"""The eager loop: the core, step after step, in plain PyTorch. The oracle of every test, and `backend="torch"`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._capture.signature import Signature, broadcasts, check_returns, check_values, noting_default_states, state_mismatch, step_shape
from .._ir.graph import HALF
from ..errors import OperandMutationError, ReturnTypeError
from .call import upcast


def eager_loop(
    core: Callable, sig: Signature, inputs: Sequence[Tensor], states: Sequence[Tensor | None], params: Sequence[Tensor],
    num_outputs: int | None = None, sequences: bool = False,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """Run `core` over T steps.

    16-bit floats: the core runs in float32 on upcast operands; results are cast to the dtype that the core gives on the
    operands as they are.

    Returns:
        Outputs `[T, *shape]`, final states, and, if asked for, state sequences `[T, *shape]`.
    """
    half = any(t is not None and t.dtype in HALF for t in (*inputs, *states, *params))
    dtypes = _result_dtypes(core, sig, inputs, states, params) if half else None
    params = [upcast(p) for p in params]
    run = _carrying_float32(core, sig) if half else core
    T = inputs[0].shape[0]
    operands = zip(sig.names, (*inputs, *states, *params), strict=True)
    watched = [(n, t, t._version) for n, t in operands if t is not None and not t.is_inference()]
    slices = zip(*(upcast(x).unbind(0) for x in inputs), strict=True) if T else [[upcast(x).new_zeros(x.shape[1:]) for x in inputs]]
    current: list[Tensor] | None = None
    outputs, trail = [], []
    for step in slices:
        if current is None:
            returned, current = _first_step(run, sig, step, [None if v is None else upcast(v) for v in states], params, num_outputs)
        else:
            returned = check_returns(sig, run(*step, *current, *params), num_outputs)
        before, current = current, list(returned[len(returned) - sig.num_states :])
        _check_states(sig, before, current)
        _check_unwritten(sig, watched)
        outputs.append(returned[: len(returned) - sig.num_states])
        _check_outputs(sig, outputs[0], outputs[-1])
        if sequences:
            trail.append(current)
        if T == 0:
            current = before
    assert current is not None
    current = [v.clone() for v in current]  # the core may return an operand as it is
    stacked = [torch.stack(y)[:T] for y in zip(*outputs, strict=True)]
    stacked_states = [torch.stack(v)[:T] for v in zip(*trail, strict=True)]
    if dtypes is not None:
        outs = len(stacked)
        stacked = [y.to(d) for y, d in zip(stacked, dtypes, strict=False)]
        current = [v.to(d) for v, d in zip(current, dtypes[outs:], strict=True)]
        stacked_states = [v.to(d) for v, d in zip(stacked_states, dtypes[outs:], strict=False)]
    return stacked, current, stacked_states


def _carrying_float32(core: Callable, sig: Signature) -> Callable:
    """The core, with 16-bit states carried on in float32 as every kernel does."""

    def run(*operands: Tensor) -> tuple[Tensor, ...]:
        returned = check_returns(sig, core(*operands), None)
        outs = len(returned) - sig.num_states
        return (*returned[:outs], *map(upcast, returned[outs:]))

    return run


def _first_step(core, sig, step, states, params, num_outputs) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Run step 0; default states take the shape and dtype that the core returns, given ones broadcast to it."""
    shape = step_shape(sig, [x.shape for x in step])
    step_shape(sig, [t.shape if t is not None else () for t in (*step, *states)])
    current = [v if v is not None else torch.zeros(shape, dtype=step[0].dtype, device=step[0].device) for v in states]
    first: tuple[list[Tensor], list[Tensor]] | None = None
    for _ in range(4):
        try:
            with noting_default_states(sig, states if first is None else None, step[0].dtype):
                returned = check_returns(sig, core(*step, *current, *params), num_outputs)
        except RuntimeError:
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
    """`given`: at the first step, the states that the call was given."""
    for k, (name, a, b) in enumerate(zip(sig.state_names, before, after, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise state_mismatch(sig, name, _meta(a), _meta(b), given=k < len(given) and given[k] is not None)


def _check_unwritten(sig: Signature, watched: Sequence[tuple[str, Tensor, int]]) -> None:
    for name, tensor, version in watched:
        if tensor._version != version:
            raise OperandMutationError(f"writes into operand `{name}` in place", core=sig.core, hint="Write `v = v + x`, not `v += x`.")


def _meta(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _result_dtypes(core, sig, inputs, states, params) -> list[torch.dtype]:
    """Dtypes of the core's returns on the operands as they are."""
    step = [x[0] if x.shape[0] else x.new_zeros(x.shape[1:]) for x in inputs]
    with torch.no_grad():
        returned, current = _first_step(core, sig, step, list(states), params, None)
    _check_states(sig, current, returned[len(returned) - sig.num_states :])
    return [t.dtype for t in returned]
