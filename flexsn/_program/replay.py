"""Ops of PyTorch around a kernel, noted in one call, and run again on the tensors of calls like it.

What a call does before a kernel of many operands runs (views, copies, fresh memory, what a prologue computes) takes Python far longer to
find than PyTorch to do. Where the layouts of all that is given are those of an earlier call, it comes to the same ops.

What it gains: on an H100 a recurrent layer of 128 to 512 LIF neurons over 100 steps takes 1.6 to 1.7 times as long without it in
inference, and 1.1 to 1.3 times in training (`python benchmarks/recurrent.py --device cuda`, 2026-11-27).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._torch.fake_tensors import TorchDispatchMode
from .._torch.tensors import memory_of
from .._torch.transforms import transforms_or_modes_active

Fresh = Callable[[Callable[[], Tensor]], Tensor]  # calls what allocates a tensor
Launcher = Callable[[Sequence[Tensor | None]], None]  # runs a kernel over the tensors that it takes


class Written(NamedTuple):
    """A call, written down: all but its kernel has run.

    Attributes:
        results: what it gives once the kernel has run.
        beside: what else its caller wants to know, the same for all calls of a kind.
        taken, launch: what the kernel takes, and what runs it.
    """

    results: list[Tensor]
    beside: Any
    taken: list[Tensor | None]
    launch: Launcher


class Kinds:
    """Kinds of calls of one thing: what is known of them.

    The second time that a call of a kind is written down, what PyTorch does for it is noted, and calls after that do the same again.
    """

    most = 32

    def __init__(self) -> None:
        self.known: dict[tuple, Any] = {}  # how often, a replay and what is beside it, or an error

    def run(
        self, what: tuple, given: Sequence[Tensor | None], write_down: Callable[[Fresh], Written], refusal: type[Exception]
    ) -> tuple[list[Tensor], Any]:  # fmt: skip
        """Return the results of a call, and what is beside them.

        Args:
            what: tells calls apart, beside the layouts of what is given.
            given: all tensors that the call reads.

        Raises:
            refusal: as `write_down` did for the first call of this kind.
        """
        key, tensors = (*what, layouts(given)), [t for t in given if t is not None]
        known = self.known.get(key)
        if isinstance(known, refusal):
            raise refusal(*known.args)
        if isinstance(known, tuple):
            return known[0](tensors), known[1]
        if known is None and len(self.known) >= self.most:
            self.known.clear()
        try:
            written = write_down(operator.call)
        except refusal as error:
            self.known[key] = refusal(*error.args)  # without frames
            raise
        written.launch(written.taken)
        self.known[key] = _SEEN if known is None else self._noted(tensors, write_down) if known is _SEEN else known
        return written.results, written.beside

    def _noted(self, given: Sequence[Tensor], write_down: Callable[[Fresh], Written]) -> Any:
        if transforms_or_modes_active():
            return _SEEN
        with Notes(given) as notes:
            results, beside, *kernel = write_down(notes.fresh)
        replay = notes.replay(*kernel, results)
        return _REPEATS if replay is None else (replay, beside)


_SEEN, _REPEATS = "seen", "is written down each time"


class _Step(NamedTuple):
    """One op.

    Attributes:
        args: its arguments, with None for tensors.
        tensors: where among the arguments these stand, and their numbers: one, or those of a list.
        first: the number of its first result.
        results: how many it has; 0 of one tensor that is returned as it is.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[tuple[int, int | list[int]], ...]
    first: int
    results: int


class Notes(TorchDispatchMode):
    """While inside, ops of PyTorch are noted; each of their results has a number.

    Args:
        given: the tensors of the call, which have the first numbers.

    Attributes:
        strange: what keeps the ops from being run again: one takes a tensor that neither the call was given nor an op made.
    """

    def __init__(self, given: Sequence[Tensor]):
        super().__init__()
        self.values, self.steps, self.roots = list[Tensor](), list[_Step](), list[int]()
        self.strange: str | None = None
        self._numbers: dict[tuple, int] = {}
        self._off = False
        for tensor in given:
            self._add(tensor, len(self.values))
        if not all(t.numel() for t in given):
            self.strange = "a tensor has no elements, and lies nowhere"
        ends = sorted({(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in given})
        if any(begin + size > other for (begin, size), (other, _) in itertools.pairwise(ends)):
            self.strange = "two tensors share memory, and none knows of the other"  # as of NumPy's arrays

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if not self._off:
            self._note(func, args, kwargs, results)
        return results

    def fresh(self, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that `make` allocates; the ops of that are not noted."""
        self._off = True
        try:
            made = make()
        finally:
            self._off = False
        self._note(make, (), {}, made)
        return made

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor, which is known by where it lies: views of one pass from object to object."""
        found = self._numbers.get(_place(tensor))
        if found is None:
            self.strange = self.strange or "an op takes a tensor of which nobody knows where it comes from"
        return found or 0

    def _note(self, func: Any, args: tuple, kwargs: dict[str, Any], results: Any) -> None:
        if any(isinstance(value, Tensor) for value in kwargs.values()):
            self.strange = f"{func} takes a tensor by name"
        at = list[tuple[int, Any]]()
        for n, arg in enumerate(args):
            if isinstance(arg, Tensor):
                at.append((n, self.number(arg)))
            elif isinstance(arg, (list, tuple)) and any(isinstance(t, Tensor) for t in arg):
                at.append((n, [self.number(t) for t in arg]))
        plain = tuple([None if n in dict(at) else arg for n, arg in enumerate(args)])
        found = list(results) if isinstance(results, (tuple, list)) else [results]
        if not all(isinstance(t, Tensor) for t in found):
            self.strange = f"{func} returns something else than tensors"
            return
        self.steps.append(_Step(func, plain, kwargs, tuple(at), len(self.values), 0 if found[0] is results else len(found)))
        root = at[0][1] if at and isinstance(at[0][1], int) else None
        for tensor in found:
            views = root is not None and memory_of(tensor) == memory_of(self.values[root])
            self._add(tensor, self.roots[root] if views and root is not None else len(self.values))

    def _add(self, tensor: Tensor, root: int) -> None:
        self._numbers[_place(tensor)] = len(self.values)
        self.values.append(tensor)
        self.roots.append(root)

    def _as_pointer(self, tensor: Tensor) -> int:
        """Return the number of a tensor that starts where this one does: what a view was made of, if that does."""
        number = self.number(tensor)
        root = self.values[self.roots[number]]
        return self.roots[number] if root.data_ptr() == tensor.data_ptr() and root.dtype is tensor.dtype else number

    def replay(self, pointers: Sequence[Tensor | None], run: Launcher, results: Sequence[Tensor]) -> Replay | None:
        """Return what does the same on other tensors; None if nothing does.

        Args:
            pointers: tensors that a kernel takes, of which their addresses alone matter to it.
            run: runs the kernel over such tensors.
            results: tensors that the call returns.
        """
        taken = [None if t is None else self._as_pointer(t) for t in pointers]
        returned = [self.number(t) for t in results]
        if self.strange is not None:
            return None
        needed = {n for n in (*taken, *returned) if n is not None}
        live, steps = {self.roots[n] for n in needed}, list[_Step]()
        for step in reversed(self.steps):
            takes = [k for _, n in step.tensors for k in (n if isinstance(n, list) else [n])]
            schema = getattr(step.func, "_schema", None)
            writes = schema is not None and schema.is_mutable and self.roots[takes[0]] in live
            if writes or not needed.isdisjoint(range(step.first, step.first + max(1, step.results))):
                steps.append(step)
                needed.update(takes)
                live.update(self.roots[k] for k in takes)
        return Replay(steps[::-1], len(self.values), taken, run, returned)


class Replay:
    """Ops, and a kernel after them, for tensors laid out as those that were noted."""

    def __init__(
        self, steps: Sequence[_Step], count: int, taken: Sequence[int | None], run: Launcher,
        returned: Sequence[int],
    ):  # fmt: skip
        self.steps, self.count, self.taken, self.launch, self.returned = steps, count, taken, run, returned

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Run; returns what the call returns."""
        values: list[Any] = [*given, *[None] * (self.count - len(given))]
        for func, args, kwargs, tensors, first, results in self.steps:
            own = list(args)
            for at, n in tensors:
                own[at] = values[n] if type(n) is int else [values[k] for k in n]  # type: ignore[union-attr]  # a list
            found = func(*own, **kwargs)
            if results:
                values[first : first + results] = found
            else:
                values[first] = found
        self.launch([None if n is None else values[n] for n in self.taken])
        return [values[n] for n in self.returned]


def layouts(tensors: Sequence[Tensor | None]) -> tuple:
    """Return what ops on tensors depend on, beside values: shapes, strides, dtypes, and which share memory."""
    first: dict[int, tuple[int, int]] = {}
    found = list[Any]()
    for n, t in enumerate(tensors):
        if t is None:
            found.append(None)
            continue
        number, address = first.setdefault(t.untyped_storage().data_ptr(), (n, t.data_ptr()))  # two storages may lie in one place
        found.append((t.shape, t.stride(), t.dtype, number, t.data_ptr() - address))
    return tuple(found)


def _place(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
