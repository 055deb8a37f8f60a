"""Runs a sequence in pieces: states go from piece to piece, and the backward reads and runs each piece again.

Between forward and backward only the states at the borders are kept, so a sequence may be longer than memory: its pieces
may lie on disk, or be made when they are asked for.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint

from .._capture.signature import PADDED
from .._torch.autograd import saved_tensors_hooks_off
from .._torch.transforms import transforms_active
from ..errors import PiecesError
from .dtensor import is_dtensor

Run = Callable[[tuple[Tensor, ...], Sequence[Tensor | None]], tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]]


def in_pieces(x: Any) -> bool:
    """Return whether an input of `scan` is a sequence in pieces: a list, tuple, dataset or iterator, and no array."""
    if isinstance(x, (Tensor, PackedSequence)):
        return False
    if isinstance(x, (list, tuple)):
        return not x or isinstance(x[0], (Tensor, list, tuple)) or hasattr(x[0], "__array__")
    if isinstance(x, (str, bytes, dict)) or hasattr(x, "__array__"):
        return False
    return hasattr(x, "__iter__") or (hasattr(x, "__len__") and hasattr(x, "__getitem__"))


class Shared(NamedTuple):
    """What pieces may read beside their inputs and states.

    Attributes:
        tensors: the params and all tensors that the core leads to, by name.
        read: names of those that the pieces have read so far.
        values: the Python values that the core reads.
        of_reduce: the tensors that `reduce` captures, by path.
    """

    tensors: Callable[[], dict[str, Tensor]]
    read: Collection[str]
    values: Callable[[], Any]
    of_reduce: Callable[[], dict[str, Tensor]]


def scan_pieces(
    run: Run, core: str, names: Sequence[str], inputs: Sequence[Any], states: Sequence[Tensor | None],
    reduce: Callable[..., Any] | None, shared: Shared,
) -> tuple[tuple[Any, ...], tuple[Tensor, ...], tuple[list[Tensor], ...]]:  # fmt: skip
    """Run the pieces one after the other.

    Args:
        run: one piece: inputs and initial states -> outputs, final states, state sequences.
        names: of the inputs, for messages.
        inputs: one sequence in pieces per input.
        reduce: `reduce(k, *outputs)` for piece `k`.

    Returns:
        Outputs (lists of pieces, or sums of what `reduce` returns), final states, state sequences (lists of pieces).

    Raises:
        PiecesError: pieces that cannot be read, or read again, or that do not fit each other.
    """
    if saved_tensors_hooks_off():
        raise PiecesError(
            "is transformed by `torch.func`, but the backward of a sequence in pieces reads them again", core=core,
            hint="Join them (`torch.cat(pieces)`), or differentiate with `.backward()` or `torch.autograd.grad`.",
        )  # fmt: skip
    if reduce is not None and not callable(reduce):
        raise PiecesError(f"`reduce` is {type(reduce).__name__}, not a function", core=core, hint=_REDUCE)
    pieces, captures = _Pieces(core, names, inputs), _ReduceCaptures(core, shared.of_reduce)
    device = next((v.device for v in states if v is not None), None)

    def one(k: int, *states: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
        read = pieces.read(k, device)
        again = pieces.check_unchanged(k, shared.tensors, shared.values)
        captures.check_unchanged(k, last=pieces.count == k + 1)
        outputs, finals, trail = run(read, states)
        if not again:
            tensors = shared.tensors()
            used = {id(tensors[name]) for name in shared.read if name in tensors}
            pieces.note(k, read, {name: t for name, t in tensors.items() if id(t) in used}, shared.values())  # under all its names
        return outputs if reduce is None else _reduced(core, k, reduce(k, *outputs)), finals, trail

    found: list[tuple[Tensor, ...]] = []
    trails: list[tuple[Tensor, ...]] = []
    for k in pieces.numbers():
        if pieces.one_shot or not torch.is_grad_enabled() or transforms_active():  # 2.11 cannot `vmap` a checkpoint
            results, finals, trail = one(k, *states)
            pieces.refuse_gradients((*results, *finals))
        else:
            results, finals, trail = checkpoint(one, k, *states, use_reentrant=False)
        states = finals
        trails.append(trail)
        found = [*found, results] if reduce is None or not found else [_summed(core, k, found[0], results)]
    captures.settle()
    outputs = tuple(list(y) for y in zip(*found, strict=True)) if reduce is None else found[0]
    return outputs, tuple(states), tuple(list(v) for v in zip(*trails, strict=True))  # type: ignore[arg-type]  # finals are there


_REDUCE = "It takes `(k, *outputs)` and returns this piece's part of a sum, for example the loss: `lambda k, s: s.square().sum()`."


def _reduced(core: str, k: int, value: Any) -> tuple[Any, ...]:
    """Return what `reduce` returned, as a tuple of tensors or numbers."""
    found = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    for part in found:
        if not isinstance(part, (Tensor, int, float)):
            raise PiecesError(f"`reduce` returned {type(part).__name__} for piece {k}, not a tensor", core=core, hint=_REDUCE)
    return found


def _summed(core: str, k: int, before: tuple[Any, ...], now: tuple[Any, ...]) -> tuple[Any, ...]:
    shapes = [[list(getattr(v, "shape", ())) for v in values] for values in (before, now)]
    if shapes[0] != shapes[1]:
        raise PiecesError(
            f"`reduce` returned tensors of shape {shapes[1]} for piece {k} and {shapes[0]} before: they are summed over the pieces",
            core=core, hint="Return what does not depend on the length of a piece, as `outputs[0].sum(0)`.",
        )  # fmt: skip
    return tuple(a + b for a, b in zip(before, now, strict=True))


_LOADER = (
    "Pieces of a DataLoader: `[batch[0] for batch in loader]`, or `(batch[0] for batch in loader)` under `torch.no_grad()`; its batches "
    "are the steps of one sequence."
)


def _as_tensors(name: str, piece: Any) -> str:
    """Return what to write in place of pieces that are no tensors."""
    if hasattr(piece, "__array__"):
        return (
            f"Read arrays as tensors: `[torch.from_numpy(a) for a in {name}]`; those of a file on demand, by a class with "
            "`__len__` and `__getitem__`."
        )
    if isinstance(piece, PackedSequence):
        return PADDED
    if isinstance(piece, (tuple, list)):
        return _LOADER
    return "A piece is a tensor of shape [T_k, *shape]."


class _Pieces:
    """The pieces of every input, by number.

    Attributes:
        one_shot: an input is an iterator, so that nothing can be read twice.
    """

    def __init__(self, core: str, names: Sequence[str], inputs: Sequence[Any]):
        self.core, self.names = core, names
        self.inputs = inputs = [tuple(x) if isinstance(x, list) else x for x in inputs]  # a list may change before the backward
        for name, x in zip(names, inputs, strict=True):
            if not in_pieces(x):
                raise PiecesError(f"input `{name}` is {type(x).__name__} while another input is in pieces", core=core,
                                  hint=f"Cut it as the others: `{name}.split(lengths)`.")  # fmt: skip
            if not isinstance(x, Iterator) and not hasattr(x, "__getitem__"):
                raise PiecesError(f"input `{name}` is {type(x).__name__}, whose pieces cannot be read by number", core=core, hint=_LOADER)
        self.one_shot = any(isinstance(x, Iterator) for x in inputs)
        counts = {name: len(x) for name, x in zip(names, inputs, strict=True) if not isinstance(x, Iterator)}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"`{n}` has {c}" for n, c in counts.items())
            raise PiecesError(f"inputs differ in their number of pieces: {listed}", core=core)
        self.streams = [iter(x) if isinstance(x, Iterator) else None for x in inputs]
        self.count = next(iter(counts.values()), None)
        self.waiting: list[Any] = []
        self.versions: dict[int, list[tuple[weakref.ref[Tensor], int]]] = {}
        self.shared: dict[int, dict[str, weakref.ref[Tensor]]] = {}
        self.values: dict[int, Any] = {}

    def numbers(self) -> Iterator[int]:
        """Yield 0, 1, ... while there are pieces; those of iterators wait to be read."""
        for k in itertools.count() if self.count is None else range(self.count):
            self.waiting = [None if stream is None else next(stream, None) for stream in self.streams]
            ended = [w is None for w, stream in zip(self.waiting, self.streams, strict=True) if stream is not None]
            if any(ended):
                if not all(ended) or self.count is not None:
                    raise PiecesError(f"an input has fewer pieces than another: it ends before piece {k}", core=self.core)
                if k > 0:
                    return
                self.count = 0
                break
            yield k
        if self.count == 0:
            raise PiecesError("there are no pieces", core=self.core)

    def read(self, k: int, device: torch.device | None) -> tuple[Tensor, ...]:
        """Return piece `k` of every input, on `device`."""
        found = [w if stream is not None else x[k] for x, w, stream in zip(self.inputs, self.waiting, self.streams, strict=True)]
        for name, piece in zip(self.names, found, strict=True):
            if not isinstance(piece, Tensor):
                raise PiecesError(
                    f"piece {k} of input `{name}` is {type(piece).__name__}, not a tensor", core=self.core, hint=_as_tensors(name, piece)
                )  # fmt: skip
        return tuple(found if device is None else [piece.to(device, non_blocking=True) for piece in found])

    def note(self, k: int, read: Sequence[Tensor], shared: dict[str, Tensor], values: Any) -> None:
        """Remember what piece `k` used when it was run first.

        Args:
            shared: params and captured tensors, by name.
            values: Python values that the core reads.
        """
        self.versions[k] = [(weakref.ref(t), t._version) for t in (*read, *shared.values()) if not t.is_inference()]
        self.shared[k], self.values[k] = {name: weakref.ref(t) for name, t in shared.items()}, values

    def check_unchanged(self, k: int, shared: Callable[[], dict[str, Tensor]], values: Callable[[], Any]) -> bool:
        """Raise if what piece `k` used was replaced or written in place since it was run first: the gradient would be of another call.
        Returns whether it was run before."""
        if k not in self.versions:
            return False
        for tensor, version in self.versions[k]:
            held = tensor()
            if held is not None and held._version != version:
                raise PiecesError(
                    f"a tensor of shape {list(held.shape)} that piece {k} used was modified by an in-place operation before the backward",
                    core=self.core, hint="Run the backward first: it reads the pieces and the params again.",
                )  # fmt: skip
        if self.values[k] != values():
            raise PiecesError(
                f"a Python value that the core reads (a number, a flag as `.training`) changed after piece {k} ran, before the backward",
                core=self.core, hint="Run the backward first: it runs the core again.",
            )  # fmt: skip
        now = shared()
        if any(ref() is not now.get(name) for name, ref in self.shared[k].items()):
            raise PiecesError(
                f"a tensor that the core captures was replaced by another one after piece {k} ran, before the backward", core=self.core,
                hint="Run the backward first, and inside of what replaces it (`functional_call`): it runs the core again.",
            )  # fmt: skip
        return True

    def refuse_gradients(self, results: Sequence[Any]) -> None:
        if self.one_shot and torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in results):
            raise PiecesError(
                "is trained on an iterator of pieces, but the backward has to read them again", core=self.core,
                hint="Give a list, or anything with `len(pieces)` and `pieces[k]`; iterators serve under `torch.no_grad()`.",
            )  # fmt: skip


class _ReduceCaptures:
    """The tensors that `reduce` captures and leaves as they are, such as weights and targets. What it changes itself (running
    statistics, what it keeps for a plot) is its own matter, but for tensors that are trained: their gradient would be wrong."""

    def __init__(self, core: str, of_reduce: Callable[[], dict[str, Tensor]]):
        self.core, self.of_reduce, self.settled = core, of_reduce, False
        self.seen = self._now()

    def _now(self) -> dict[str, tuple[Tensor, int]]:
        return {path: (t, t._version) for path, t in self.of_reduce().items() if not t.is_inference()}

    def settle(self) -> None:
        """Watch, from the end of the last piece on, what the calls of `reduce` left alone and what is trained."""
        now = self._now()
        there = {path: (t, v) for path, (t, v) in self.seen.items() if path in now and now[path][0] is t}
        self.seen = {path: (t, v) for path, (t, v) in there.items() if now[path][1] == v or t.requires_grad}
        self.settled = True

    def check_unchanged(self, k: int, last: bool) -> None:
        """Raise if one of them changed before the backward runs piece `k` again; `last`: with which it begins."""
        if not self.settled:
            return
        now = self._now() if last else self.seen
        for path, (tensor, version) in self.seen.items():
            replaced = path not in now or not (now[path][0] is tensor or is_dtensor(now[path][0]) != is_dtensor(tensor))  # FSDP's swap
            if replaced or tensor._version != version:
                how = "replaced by another one" if replaced else "modified by an in-place operation"
                raise PiecesError(
                    f"a tensor of shape {list(tensor.shape)} that `reduce` captures (`{path}`) was {how} before the backward of piece {k}",
                    core=self.core, hint="Run the backward first: it calls `reduce` again.",
                )  # fmt: skip
