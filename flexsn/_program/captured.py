"""What a program is made from: a core captured at one layout of operands, as data that prints, travels and needs no core.

A `Blueprint` names no backend. It holds both lowered steps (`forward`, and `vjp` once it is asked for) and what is known of sizes:
which dims of the step shape may change. `_program/serialize.py` writes it as a string and reads it back.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from .._capture.linearity import nonlinear, of_a_users_backward
from .._capture.signature import Signature, broadcasts, noting_default_states, state_mismatch, step_shape
from .._capture.trace import Meta, Trace, trace
from .._ir.graph import HALF
from .._torch.tensors import broadcast_shapes, promoted_dtype
from ..errors import CannotFuseError, CoreError, NotElementwiseError, RandomOpError, UnsupportedOpError
from .lowered import LoweredStep, LoweredVjp, lower_step, lower_vjp
from .pairs import refuse_complex

Record = Callable[..., Trace]  # `trace` of one core on one device


@dataclass(frozen=True)
class Shapes:
    """The step shapes of one call."""

    step: tuple[int, ...]
    states: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.step).numel()


@dataclass
class Blueprint:
    """A captured core.

    Attributes:
        metas: of the operands (inputs, states, params) as the core takes them; default states are settled.
        outputs: metas of what the core returns before its states.
        step: the step shape at which the graphs were recorded.
        free_dims: dims of it whose size the core does not depend on.
        forward: the core on operands as a kernel has them: of the step shape, 16-bit floats as float32.
        vjp: the core and its VJP, captured by `differentiate`.
        trace: the recording that `forward` was lowered from; None of a core that was read from a text.
        ops: of the core itself, where `_torch_compile/prologue_fusion.py` put more before it: how long chunks are must not depend on that.
    """

    sig: Signature
    metas: list[Meta]
    outputs: tuple[Meta, ...]
    step: tuple[int, ...]
    free_dims: frozenset[int]
    forward: LoweredStep
    vjp: LoweredVjp | None = None
    trace: Trace | None = None
    ops: int | None = None
    texts: dict[bool, str] = field(default_factory=dict, repr=False)  # written forms, with the VJP and without

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    @property
    def states(self) -> tuple[Meta, ...]:
        return tuple(self.metas[self.sig.num_inputs : self.sig.num_inputs + self.sig.num_states])

    def captured(self, *, vjp: bool) -> tuple[str, ...]:
        """Return the names of the captured tensors that the core reads, or the core and its VJP, which a call passes after the params; last
        those that nothing but the VJP reads."""
        return tuple(dict.fromkeys((*self.forward.captured, *(self.vjp.captured if vjp and self.vjp is not None else ()))))

    @property
    def computed(self) -> list[Meta]:
        return _computed(self.sig, self.metas, self.step)

    @property
    def carried(self) -> list[Meta]:
        """Metas of the states as they go from step to step."""
        return self.computed[self.sig.num_inputs : self.sig.num_inputs + self.sig.num_states]

    def differentiate(self, core: Callable, captured: dict[str, Tensor], device: torch.device) -> LoweredVjp:
        """Capture the VJP on first use; `core` is the one that this blueprint was made from, or its equal. Fewer dims may be free
        afterwards: a backward may depend on sizes that the core does not ask for."""
        if self.vjp is None:
            assert self.trace is not None, "a core that was read from a text brings its VJP, or has none"
            record = functools.partial(trace, core, self.sig, device=device, captured=captured, vjp=True)
            vjp = self._as_computed(record)
            free_dims = _free_dims(record, self, self.trace, vjp, captured, self.free_dims) if self._may_differ(vjp) else self.free_dims
            self._check_smaller(self.trace, vjp, free_dims)
            self.vjp = lower_vjp(self.sig, vjp, self.num_outputs, self.carried, device)
            self.free_dims = free_dims
            self.texts.clear()
        return self.vjp

    def _may_differ(self, vjp: Trace) -> bool:
        """Return whether a VJP may be another one at other sizes, or the next time, although the core is not: where code that is not
        PyTorch's or flexsn's runs backward (a custom function, a hook), or a size is read there. All else PyTorch derives from the core."""
        assert self.trace is not None, "as in `differentiate`"
        read = (vjp.shapes_read, vjp.ranks_read) != (self.trace.shapes_read, self.trace.ranks_read)
        return read or any(n.meta.get("backward") and n.meta.get("line") for n in vjp.graph.nodes)

    def _as_computed(self, record: Record) -> Trace:
        """Return the recorded VJP at the step shape. A backward of the user's may run at the shapes of smaller operands alone."""
        ins = self.sig.num_inputs + self.sig.num_states
        try:
            return record(metas=self.computed)
        except Exception as error:  # whatever the user's code raises at shapes that nobody gave it
            if isinstance(error, CannotFuseError) or all(m.shape == self.step for m in self.metas[:ins]):
                raise
            reason, line = (error.reason, error.line) if isinstance(error, CoreError) else (f"{type(error).__name__}: {error}", None)
            raise UnsupportedOpError(
                f"has a backward that fails on operands of the step shape {list(self.step)}: {reason}", core=self.sig.core, line=line,
                hint="Give all inputs, states and returns the same step shape.",
            ) from None  # fmt: skip

    def _check_smaller(self, forward: Trace, vjp: Trace, free_dims: frozenset[int]) -> None:
        """Refuse a user's backward that a kernel would get wrong for smaller operands. Eager sums the cotangents of what is smaller than
        the step before that backward takes them, a kernel after it; of a smaller return a kernel holds the cotangent at one of its
        neurons, and zeros at the others. Both are right where that backward is linear, and asks for no sizes."""
        whole, operands = torch.Size(self.step).numel(), self.metas[: self.sig.num_inputs + self.sig.num_states]
        known = zip(self.sig.names, operands, vjp.grads, strict=False)
        smaller = [name for name, meta, grad in known if grad is not None and torch.Size(meta.shape).numel() != whole]
        given = [n for n in vjp.cotangents if n is not None]
        returns = [n for n in given if n.meta["val"].numel() != whole]
        if not smaller and not returns:
            return
        node = nonlinear(vjp.graph, given, given if smaller else returns, vjp.grads)
        own = [n for n in vjp.graph.nodes if of_a_users_backward(n)]
        asks = (vjp.shapes_read, vjp.ranks_read) != (forward.shapes_read, forward.ranks_read)
        if node is None and (asks or (own and free_dims != self.free_dims)):
            node = own[0] if own else vjp.returns[0]
        if node is not None:
            what = f"`{smaller[0]}`" if smaller else "a return"
            raise NotElementwiseError(
                "has a backward of its own that is not linear, or depends on sizes, and sums of cotangents over neurons are not those of a "
                f"kernel: {what} is smaller than the step {list(self.step)}", core=self.sig.core, line=node.meta.get("line"),
                hint="Give all inputs, states and returns the same step shape.",
            )  # fmt: skip

    def shapes(self, operand_shapes: Sequence[tuple[int, ...]]) -> Shapes | None:
        """Return the shapes of a call with inputs and states of these step shapes, or None where the graphs do not fit."""
        common = step_shape(self.sig, operand_shapes)
        offset = len(self.step) - len(common)
        if offset < 0:
            return None
        step = tuple(common[d - offset] if d >= offset and d in self.free_dims else n for d, n in enumerate(self.step))
        if not all(n in (1, step[d + offset]) for d, n in enumerate(common)):
            return None
        states = tuple(rescale(m.shape, self.step, step) for m in self.states)
        return Shapes(step, states, tuple(rescale(m.shape, self.step, step) for m in self.outputs))


def rescale(shape: tuple[int, ...], old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """Return `shape`, which broadcasts to step shape `old`, for step shape `new`."""
    offset = len(old) - len(shape)
    return tuple(1 if n == 1 else new[d + offset] for d, n in enumerate(shape))


def draw(
    core: Callable, sig: Signature, metas: Sequence[Meta | None], device: torch.device, captured: dict[str, Tensor],
    num_outputs: int | None = None,
) -> Blueprint:  # fmt: skip
    """Capture `core` for operands of the given metas (inputs, states, params; None: a default state).

    Args:
        captured: tensors that the core may meet besides its operands, by path.
    """
    record = functools.partial(trace, core, sig, device=device, captured=captured)
    seen, forward = _settle(record, sig, metas, num_outputs)
    ins, returns = sig.num_inputs + sig.num_states, forward.metas()
    refuse_complex(sig, seen, returns)
    step = _step_of(sig, seen[:ins], returns)
    computed = _computed(sig, seen, step)
    if computed != seen:
        _check_shapes_read(sig, forward, step)
        forward = _record_as_computed(record, sig, computed, step)
        if step and any(not m.shape for m in seen[:ins]) and len({m.dtype for m in seen}) > 1:
            _check_promotion(record, sig, seen, computed, forward)
    outputs = tuple(returns[: len(returns) - sig.num_states])
    lowered = lower_step(sig, forward, len(outputs), computed[sig.num_inputs : ins], device)
    made = Blueprint(sig, seen, outputs, step, frozenset(), lowered, trace=forward)
    made.free_dims = _free_dims(functools.partial(record, vjp=False), made, forward, forward, captured, frozenset(range(len(step))))
    return made


def _step_of(sig: Signature, operands: Sequence[Meta], returns: Sequence[Meta]) -> tuple[int, ...]:
    """Return the step shape; outputs that are as large as the core makes them belong to it."""
    step = step_shape(sig, [m.shape for m in operands])
    for i, meta in enumerate(returns):
        try:
            step = broadcast_shapes(step, meta.shape)
        except RuntimeError:
            raise NotElementwiseError(
                f"return value {i} has shape {list(meta.shape)}, which does not broadcast with the step shape {list(step)}",
                core=sig.core, hint="A kernel handles each neuron by itself: return values of every neuron, or numbers.",
            ) from None  # fmt: skip
    return step


def _computed(sig: Signature, metas: Sequence[Meta], step: tuple[int, ...]) -> list[Meta]:
    ins = sig.num_inputs + sig.num_states
    return [Meta(step if i < ins else m.shape, torch.float32 if m.dtype in HALF else m.dtype) for i, m in enumerate(metas)]


def _settle(record: Record, sig: Signature, metas: Sequence[Meta | None], num_outputs: int | None) -> tuple[list[Meta], Trace]:
    """Find states that the core returns as it took them: given ones may broadcast, default ones adapt."""
    inputs = [m for m in metas[: sig.num_inputs] if m is not None]
    zero = Meta(step_shape(sig, [m.shape for m in inputs]), inputs[0].dtype)
    step_shape(sig, [m.shape if m else () for m in metas[: sig.num_inputs + sig.num_states]])
    current = [m or zero for m in metas]
    states = metas[sig.num_inputs : sig.num_inputs + sig.num_states]
    for first in (True, False, False, False):
        with noting_default_states(sig, states if first else None, zero.dtype):
            recorded = record(metas=current, vjp=False, num_outputs=num_outputs)
        new = recorded.metas()[len(recorded.returns) - sig.num_states :]
        old = current[sig.num_inputs : sig.num_inputs + sig.num_states]
        if new == old:
            return current, recorded
        for i, (given, before, after) in enumerate(zip(states, old, new, strict=True)):
            if given is None or (after.dtype == given.dtype and broadcasts(before.shape, after.shape)):
                current[sig.num_inputs + i] = after
        if current[sig.num_inputs : sig.num_inputs + sig.num_states] == old:
            break
    changed = [(n, a, b) for n, a, b in zip(sig.state_names, old, new, strict=True) if a != b]
    name, before, after = changed[0]
    was_given = states[sig.state_names.index(name)] is not None
    raise state_mismatch(sig, name, before, after, was_given, recorded.returns[-1].meta.get("line"))


def _check_shapes_read(sig: Signature, recorded: Trace, step: tuple[int, ...]) -> None:
    """Refuse a core that reads sizes of smaller operands: a kernel has operands of the step shape."""
    shapes, ranks = sorted({*recorded.shapes_read} - {step}), sorted({*recorded.ranks_read} - {len(step)})
    if shapes or ranks:
        what = f"a size of a tensor of shape {list(shapes[0])}" if shapes else f"that a tensor has {ranks[0]} dims"
        raise UnsupportedOpError(
            f"reads {what}, which a kernel computes at the step shape {list(step)}", core=sig.core,
            hint="Give all inputs and states the same step shape.",
        )  # fmt: skip


def _record_as_computed(record: Record, sig: Signature, metas: list[Meta], step: tuple[int, ...]) -> Trace:
    try:
        return record(metas=metas, vjp=False)
    except RuntimeError as error:  # a `CoreError`, or PyTorch's own
        reason, line = (error.reason, error.line) if isinstance(error, CoreError) else (str(error), None)
        raise UnsupportedOpError(
            f"runs on its operands as they are, but not on operands of the step shape {list(step)}: {reason}",
            core=sig.core, line=line, hint="Give all inputs and states the same step shape.",
        ) from None  # fmt: skip


def _check_promotion(record: Record, sig: Signature, seen: Sequence[Meta], computed: Sequence[Meta], forward: Trace) -> None:
    """Refuse a core whose dtypes depend on that: a tensor without dims gives way in type promotion, a row of neurons does not."""
    given = _dtypes(record(metas=[Meta(m.shape, c.dtype) for m, c in zip(seen, computed, strict=True)], vjp=False))
    wide = _dtypes(forward)
    if set(given) == set(wide) and (given == wide or len(given) != len(wide)):
        return
    raise UnsupportedOpError(
        "computes in other dtypes on an operand without dims than on the same numbers in a row", core=sig.core,
        hint="Type promotion ranks a tensor without dims lower: give all inputs and states the same step shape, or convert one of them.",
    )  # fmt: skip


def _dtypes(recorded: Trace) -> list[torch.dtype]:
    """Return the dtypes in which all values are computed, in order, without what only moves them."""
    moves = ("aten::expand", "aten::view", "aten::detach", "aten::alias", "aten::full")
    nodes = [n for n in recorded.graph.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), Tensor)]
    return [_computed_in(n) for n in nodes if getattr(getattr(n.target, "_schema", None), "name", "") not in moves]


def _computed_in(node: fx.Node) -> torch.dtype:
    """Return the dtype of a value; of a comparison, which gives bools, that in which its operands are compared."""
    operands = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args if isinstance(a, (fx.Node, bool, int, float))]
    dtype = node.meta["val"].dtype
    return promoted_dtype(operands, to_float=False) if dtype is torch.bool and operands else dtype


def _free_dims(
    record: Record, made: Blueprint, forward: Trace, recorded: Trace, captured: dict[str, Tensor], dims: frozenset[int]
) -> frozenset[int]:
    """Return those of `dims` of the step shape whose size what was `recorded` does not depend on: found by recording it again with other
    sizes."""
    ins, metas = made.sig.num_inputs + made.sig.num_states, made.computed
    fixed = {n for m in metas[ins:] for n in m.shape} | {n for t in captured.values() for n in t.shape} | {1}
    free = frozenset(d for d in dims if made.step[d] not in fixed)
    if free and not (forward.shapes_read or recorded.shapes_read):  # else Python may decide by any of them
        other = list(made.step)
        for d in free:
            other[d] = next(n for n in range(made.step[d] + 1 + d, 1 << 62) if n not in fixed and n not in other)
        with contextlib.suppress(Exception):  # whatever the core raises at sizes that nobody gave it: it fits the given ones only
            again = record(metas=[Meta(tuple(other), m.dtype) if i < ins else m for i, m in enumerate(metas)])
            if again.text() == recorded.text():
                return free
    if record(metas=metas).text() != recorded.text():
        raise RandomOpError(
            "computes with other numbers each time it runs", core=made.sig.core,
            hint="Draw random numbers, or read the clock, outside, for the whole sequence, and pass them as one more input "
            "[T, *shape]. What a set gives, sort.",
        )  # fmt: skip
    return frozenset()
