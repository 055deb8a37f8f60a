"""Sequences of unequal length, and resets in the middle of them, as part of a step: a core that is given either becomes another core.

It carries how many steps each sequence has left. One that has ended takes zeros, gives zeros, and keeps its states; so whatever runs
cores runs it, and kernels that see that nothing is left to do stop there (`_ir/ends.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from .._capture.signature import PADDED, Signature, core_name, make_signature
from ..errors import ArgumentError, OperandTypeError, ShapeMismatchError
from .captured_values import CapturedValues

_MOST = 8  # of a core: looks at it with lengths, resets, or both


def takes_one_step(core: str) -> ArgumentError:
    """Return the error of a neuron that is given lengths or resets, and takes one step."""
    return ArgumentError(
        "is given `lengths` or `resets`, and takes one step", core=core,
        hint='Give it sequences, `step_mode="m"`; in a network that `flexsn.over_time` runs, give that the `lengths`.',
    )  # fmt: skip


class Uneven(NamedTuple):
    """What makes a core one of sequences that end, or start anew, each at steps of its own.

    Attributes:
        sizes: how many inputs, states and params the core has.
        ends: whether sequences have lengths: then the last state is how many steps are left.
        resets: whether they start anew: then the last input says before which steps.
        starts: of every state, whether a param, behind those of the core, says where it starts anew; else at zero.
        own: of every input, whether each sequence has values of its own; all share those of one with fewer dims.
    """

    sizes: tuple[int, int, int]
    ends: bool
    resets: bool
    starts: tuple[bool, ...]
    own: tuple[bool, ...]

    def __call__(self, core: Callable) -> Callable:
        return uneven_step(core, *self)

    def signature(self, core: Callable) -> Signature:
        """Return that of the core which this one makes; its messages name the core and its operands."""
        sig = make_signature(core, *self.sizes)
        if taken := {"lengths", "resets"}.intersection(sig.names):
            raise ArgumentError(
                f"has an operand named `{taken.pop()}`, and is given `lengths` or `resets`", core=sig.core, hint="Rename it."
            )
        inputs = *sig.input_names, *(["resets"] if self.resets else [])
        states = *sig.state_names, *(["lengths"] if self.ends else [])
        starts = [f"reset_{name}" for name, there in zip(sig.state_names, self.starts, strict=False) if there]
        params = *sig.param_names, *starts
        return Signature(sig.core, len(inputs), len(states), len(params), (*inputs, *states, *params))

    def look(self, core: Callable, seen: CapturedValues) -> CapturedValues:
        """Return the look at the core that this one makes of it; `seen`: that at the core."""
        found = seen.over_parts.get(self)
        if found is None:
            sig, found = self.signature(core), seen.wrapped(self)
            found.signatures[sig.num_inputs, sig.num_states, sig.num_params] = sig
            while sum(isinstance(key, Uneven) for key in seen.over_parts) >= _MOST:
                del seen.over_parts[next(key for key in seen.over_parts if isinstance(key, Uneven))]
            seen.over_parts[self] = found
        return found


def uneven_step(
    core: Callable, sizes: tuple[int, int, int], ends: bool, resets: bool, starts: tuple[bool, ...], own: tuple[bool, ...]
) -> Callable:  # fmt: skip
    """Return one step of a core over uneven sequences; arguments as of `Uneven`."""

    def step(*operands: Tensor) -> Any:
        inputs, operands = operands[: sizes[0]], operands[sizes[0] :]
        if resets:
            now, operands = operands[0], operands[1:]
        states, operands = operands[: sizes[1]], operands[sizes[1] :]
        before = states
        if ends:
            left, operands = operands[0], operands[1:]
            inputs = tuple([_chosen(left > 0, x, x.new_zeros(())) if each else x for x, each in zip(inputs, own, strict=True)])
        if resets:
            anew = list(operands[sizes[2] :])
            first = [anew.pop(0) if there else v.new_zeros(()) for v, there in zip(states, starts, strict=True)]
            states = tuple([_chosen(~now, v, start) for start, v in zip(first, states, strict=True)])
        returned = core(*inputs, *states, *operands[: sizes[2]])
        values = (returned,) if isinstance(returned, Tensor) else returned
        if not ends or not isinstance(values, (tuple, list)) or not all([isinstance(y, Tensor) for y in values]):
            return returned  # what is no step is refused by who called
        outputs = [_chosen(left > 0, y, y.new_zeros(())) for y in values[: len(values) - sizes[1]]]
        after = [_chosen(left > 0, new, old) for new, old in zip(values[len(values) - sizes[1] :], before, strict=True)]
        return *outputs, *after, left - 1

    return step


def _chosen(condition: Tensor, value: Tensor, other: Tensor) -> Tensor:
    """Return a value where a condition `[B, 1, ...]` holds, which is of the first dim of it, else the other."""
    missing = value.dim() - condition.dim()
    for _ in range(missing):
        condition = condition.unsqueeze(-1)
    if missing < 0 and value.dim() and value.shape[0] == condition.shape[0]:  # a sum over the last dim, say
        condition = condition.reshape(-1, *[1] * (value.dim() - 1))
    return torch.where(condition, value, other)


def check_lengths(lengths: Any, inputs: Sequence[Tensor]) -> None:
    """Refuse what are no lengths of sequences of any of the inputs of a network."""
    sizes = [x.shape[1:2] for x in inputs if x.dim() > 1]
    if not sizes:
        raise ShapeMismatchError("over_time is given lengths, and no input `[T, B, *]`", core="over_time")
    own = getattr(lengths, "shape", None)
    _check("lengths", lengths, own if own in sizes else sizes[0], (torch.int64, torch.int32), "over_time")


def cleared(sequence: Tensor, lengths: Tensor) -> Tensor:
    """Return a sequence `[T, B, *]`, zero past the end of each; another one as it is."""
    if sequence.dim() < 2 or sequence.shape[1] != len(lengths):
        return sequence
    T = sequence.shape[0]
    going = torch.arange(T, device=sequence.device).unsqueeze(-1) < lengths.to(sequence.device)
    return torch.where(going.reshape(T, -1, *[1] * (sequence.dim() - 2)), sequence, sequence.new_zeros(()))


def over_packed(run: Callable[..., Any], inputs: Sequence[Any], core: str, beside: bool) -> Any:
    """Return what `run(*inputs, lengths=)` gives for packed sequences, its outputs `[T, B, *]` packed as these are.

    Args:
        run: returns a tensor, or a tuple of outputs and, it may be, something else.
        beside: whether something else that says where sequences end is given.

    Raises:
        ArgumentError: they are.
        OperandTypeError: some inputs are not packed, or in another way than the first.
    """
    first = inputs[0]
    if beside:
        raise ArgumentError("takes a PackedSequence, which says how long sequences are, and `lengths` or `resets`", core=core, hint=PADDED)
    if not all(isinstance(x, PackedSequence) and _alike(x, first) for x in inputs):
        raise OperandTypeError("takes inputs of which some are packed, and some are not, or not alike", core=core, hint=PADDED)
    padded = [pad_packed_sequence(x) for x in inputs]
    lengths = padded[0][1]

    def packed(y: Any) -> Any:
        if not isinstance(y, Tensor):
            return y
        order = first.sorted_indices
        y, sizes = (y, lengths) if order is None else (y.index_select(1, order), lengths[order.to(lengths.device)])
        return first._replace(data=pack_padded_sequence(y, sizes).data)

    found = run(*[x for x, _ in padded], lengths=lengths)
    return tuple([packed(y) for y in found]) if isinstance(found, tuple) else packed(found)


def _alike(a: PackedSequence, b: PackedSequence) -> bool:
    """Whether two packed sequences have the same lengths, in the same order of the batch."""
    one, other = a.sorted_indices, b.sorted_indices
    same = one is other if one is None or other is None else torch.equal(one, other)
    return same and torch.equal(a.batch_sizes, b.batch_sizes)


class Ends(NamedTuple):
    """Where the sequences of a call end and start anew, as `flexsn.scan` has it.

    Attributes:
        lengths: `[B]`, or None.
        resets: `[T, B]`, or None.
        states: where they start anew.
    """

    lengths: Tensor | None
    resets: Tensor | None
    states: Sequence[Tensor | None]

    def among(
        self, core: Callable, inputs: Sequence[Tensor], states: Sequence[Tensor | None], params: Sequence[Tensor]
    ) -> tuple[Uneven, tuple[Tensor, ...], tuple[Tensor | None, ...], tuple[Tensor, ...]]:
        """Return what makes another core of the core, and the operands of a call of that.

        Raises:
            ArgumentError, OperandTypeError, ShapeMismatchError: they are not what `flexsn.scan` says.
        """
        name, first = core_name(core), None
        for x in inputs:
            if isinstance(x, Tensor) and (first is None or (x.dim(), x.shape[1:2]) > (first.dim(), first.shape[1:2])):
                first = x
        if first is None or first.dim() < 2:
            raise ShapeMismatchError(
                "is given lengths or resets, and no input has a dim of sequences", core=name,
                hint="Inputs are `[T, B, *]`: `lengths` has one number, and `resets` one column, for each of the B sequences.",
            )  # fmt: skip
        if len(self.states) != len(states):
            raise ArgumentError(f"has {len(states)} states, and `reset_states` {len(self.states)}", core=name, hint="Give one for each.")
        for v in self.states:
            if self.resets is not None and v is not None and not isinstance(v, Tensor):
                raise OperandTypeError(f"`reset_states` has a {type(v).__name__}: give tensors, or None for zeros", core=name)
        ones, starts = (1,) * (first.dim() - 2), [None if self.resets is None else v for v in self.states]
        sizes, given = (len(inputs), len(states), len(params)), tuple([v is not None for v in starts])
        own = tuple([isinstance(x, Tensor) and x.dim() >= first.dim() for x in inputs])
        wrap = Uneven(sizes, self.lengths is not None, self.resets is not None, given, own)
        inputs, states, params = tuple(inputs), tuple(states), (*params, *[v for v in starts if v is not None])
        if self.resets is not None:
            _check("resets", self.resets, first.shape[:2], (torch.bool,), name)
            inputs += (self.resets.to(first.device).reshape(*self.resets.shape, *ones),)
        if self.lengths is not None:
            _check("lengths", self.lengths, first.shape[1:2], (torch.int64, torch.int32), name)
            left = self.lengths.to(first.device).clamp(0, torch.iinfo(torch.int32).max)
            states += (left.to(torch.int32).reshape(-1, *ones),)
        return wrap, inputs, states, params


def _check(what: str, value: Any, shape: Sequence[int], dtypes: Sequence[torch.dtype], core: str) -> None:
    if not isinstance(value, Tensor):
        hint = f"Write `torch.as_tensor({what})`."
        raise OperandTypeError(f"`{what}` must be a tensor, not {type(value).__name__}", core=core, hint=hint)
    if value.dtype not in dtypes:
        raise OperandTypeError(f"`{what}` is of {value.dtype}", core=core, hint=f"Write `{what}.to({dtypes[0]})`.")
    if value.shape != shape:
        wanted = "one number per sequence, `[B]`" if what == "lengths" else "`[T, B]`"
        raise ShapeMismatchError(f"`{what}` has the shape {list(value.shape)}, not {list(shape)}: {wanted}", core=core)
