"""Ops of PyTorch and launches of kernels, noted in one call, and run again on the tensors of calls like it.

What a call does around a kernel of many operands (views, copies, fresh memory, what a prologue computes) takes Python far longer to find
than PyTorch to do. Where the layouts of all that is given are those of an earlier call, it comes to the same ops.

What it gains: on an H100 a recurrent layer of 128 to 512 LIF neurons over 100 steps takes 2.0 to 2.6 times as long without it in
inference, and 1.5 to 1.7 times in training (`python benchmarks/recurrent.py --device cuda`, 2026-11-28).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._runtime.launch import noting
from .._torch.fake_tensors import TorchDispatchMode
from .._torch.tensors import memory_of
from .._torch.transforms import transforms_or_modes_active

Work = Callable[[], tuple[list[Tensor], Any]]  # returns what a call gives, and what else its caller wants to know, the same for its kind


class Kinds:
    """What is known of calls of one function, by their kind.

    The second time that a call of a kind runs, what PyTorch does for it is noted, and calls after that do the same again.
    """

    most = 32

    def __init__(self) -> None:
        self.known: dict[tuple, Any] = {}  # how often, a replay and what is beside it, or an error

    def run(
        self, what: tuple, given: Sequence[Tensor | None], work: Work, refusal: type[Exception] | tuple[()] = ()
    ) -> tuple[list[Tensor], Any]:  # fmt: skip
        """Return the results of a call, and what is beside them.

        Args:
            what: tells calls apart, beside the layouts of what is given.
            given: all tensors that the call reads.
            work: runs it.

        Raises:
            refusal: as `work` did for the first call of this kind.
        """
        key, tensors = (*what, layouts(given)), [t for t in given if t is not None]
        known = self.known.get(key)
        if isinstance(known, Exception):
            raise type(known)(*known.args)
        if isinstance(known, tuple) and noting.notes is None:
            return known[0](tensors), known[1]
        if known is None and len(self.known) >= self.most:
            self.known.clear()
        if known is _SEEN and not transforms_or_modes_active():
            with Notes(tensors) as notes:
                results, beside = work()
            replay = notes.replay(results)
            self.known[key] = _REPEATS if replay is None else (replay, beside)
            return results, beside
        try:
            found = work()
        except refusal as error:
            self.known[key] = type(error)(*error.args)  # without frames
            raise
        self.known.setdefault(key, _SEEN)
        return found


_SEEN, _REPEATS = "seen", "runs anew each time"

Tensors = list[Tensor | None]


class Repeated:
    """One step of a loop, a function of tensors: what its second call does is noted, and later calls do the same again.

    A step takes rows of sequences, which are all laid out alike, and what the step before returned. So if the tensors of the third call are
    laid out as those of the second, those of all later calls are.

    Args:
        function: returns tensors, or None in their place.
        fixed: tensors that it reads beside those that it is called with; the same in every call.
        repeats: whether it does nothing but to return tensors; else nothing is noted.
    """

    def __init__(self, function: Callable[[Tensors], Tensors], fixed: Sequence[Tensor], *, repeats: bool):
        self.function, self.fixed, self.repeats, self.calls = function, fixed, repeats, 0
        self.replay: Replay | None = None
        self.layouts, self.present = tuple[Any, ...](), list[bool]()

    def __call__(self, given: Tensors) -> Tensors:
        self.calls += 1
        if self.calls == 2 and self.repeats and noting.notes is None and not transforms_or_modes_active():
            with Notes(_present((*given, *self.fixed))) as notes:
                results = self.function(given)
            self.layouts, self.present = layouts(given), [t is not None for t in results]
            self.replay = notes.replay(_present(results))
            return results
        if self.calls == 3 and layouts(given) != self.layouts:
            self.replay = None
        if self.replay is None:
            return self.function(given)
        found = iter(self.replay(_present((*given, *self.fixed))))
        return [next(found) if present else None for present in self.present]


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return those that are not None."""
    return [t for t in tensors if t is not None]


class _Step(NamedTuple):
    """One op.

    Attributes:
        args: its arguments, with None for tensors.
        tensors: where among the arguments these stand, and their numbers: one, or those of a list, in which -1 is None.
        first: the number of its first result.
        results: how many it has; 0 of one tensor that is returned as it is, or of None.
        writes: whether it writes to its first tensor; None of a launch, which may write to any.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[tuple[int, int | list[int]], ...]
    first: int
    results: int
    writes: bool | None


# Methods in the place of ops that are noted often: Python takes less time to call them
_METHODS = {
    getattr(getattr(torch.ops.aten, name), overload): getattr(Tensor, name)
    for name, overload in (
        ("view", "default"), ("permute", "default"), ("expand", "default"), ("detach", "default"), ("unsqueeze", "default"),
        ("select", "int"), ("squeeze", "dim"), ("copy_", "default"), ("zero_", "default"), ("clone", "default"),
    )
}  # fmt: skip


class Notes(TorchDispatchMode):
    """While inside, ops of PyTorch and launches of kernels are noted; each of their results has a number.

    Args:
        given: the tensors of the call, which have the first numbers.

    Attributes:
        given: how many there are.
        strange: what keeps the ops from being run again: one takes a tensor that neither the call was given nor an op made.
    """

    def __init__(self, given: Sequence[Tensor]):
        super().__init__()
        self.values, self.steps, self.roots = list[Any](), list[_Step](), list[int]()  # None of what an op does not return
        self.strange: str | None = None
        self._numbers: dict[tuple, int] = {}
        for tensor in given:
            self._add(tensor, len(self.values))
        self.given = len(self.values)
        if not all(t.numel() for t in given):
            self.refuse("a tensor has no elements, and lies nowhere")
        ends = sorted({(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in given})
        if any(begin + size > other for (begin, size), (other, _) in itertools.pairwise(ends)):
            self.refuse("two tensors share memory, and none knows of the other")  # as of NumPy's arrays

    def __enter__(self) -> Notes:
        self._before, noting.notes = noting.notes, self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        noting.notes = self._before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if noting.notes is self and self.strange is None:
            self._note(func, args, kwargs, results)
        return results

    def one(self, run: Callable[[Sequence[Any]], Any], tensors: Sequence[Tensor | None], *, addresses: bool = False) -> Any:
        """Return `run(tensors)`, noted as one op; what that does is not noted.

        Args:
            addresses: whether all that matters of the tensors is where they lie: it may be given others that lie there.
        """
        noting.notes = None
        try:
            results = run(tensors)
        finally:
            noting.notes = self
        if self.strange is None:
            self._note(run, ([self._at(t) for t in tensors] if addresses else tensors,), {}, results)
        return results

    def refuse(self, why: str) -> None:
        """Note nothing from here on: the ops cannot be run again."""
        self.strange = self.strange or why
        self.values.clear()
        self.steps.clear()

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor, which is known by where it lies: views of one pass from object to object."""
        found = self._numbers.get(_place(tensor))
        if found is None:
            self.refuse("an op takes a tensor of which nobody knows where it comes from")
        return found or 0

    def _note(self, func: Any, args: tuple, kwargs: dict[str, Any], results: Any) -> None:
        at = list[tuple[int, Any]]()
        for n, arg in enumerate(args):
            if isinstance(arg, Tensor):
                at.append((n, self.number(arg)))
            elif isinstance(arg, (list, tuple)) and any(isinstance(t, Tensor) for t in arg):
                at.append((n, [-1 if t is None else self.number(t) for t in arg]))
        found = list(results) if isinstance(results, (tuple, list)) else [] if results is None else [results]
        if any(isinstance(value, Tensor) for value in kwargs.values()):
            self.refuse(f"{func} takes a tensor by name")
        elif not all(t is None or isinstance(t, Tensor) for t in found):
            self.refuse(f"{func} returns something else than tensors")
        if self.strange is not None:
            return
        root = at[0][1] if at and isinstance(at[0][1], int) else None
        schema = getattr(func, "_schema", None)
        writes = schema.is_mutable if schema is not None else None if at else False
        if not writes and len(found) == 1 and root is not None and found[0] is not None and self._is_known(found[0], root):
            return  # `detach`, or a view that changes nothing
        plain = tuple([None if n in dict(at) else arg for n, arg in enumerate(args)])
        count = len(found) if isinstance(results, (tuple, list)) else 0
        self.steps.append(_Step(_METHODS.get(func, func), plain, kwargs, tuple(at), len(self.values), count, writes))
        for tensor in found or [None]:  # a launch returns nothing
            views = tensor is not None and root is not None and memory_of(tensor) == memory_of(self.values[root])
            self._add(tensor, self.roots[root] if views and root is not None else len(self.values))

    def _add(self, tensor: Tensor | None, root: int) -> None:
        if tensor is not None:
            self._numbers[_place(tensor)] = len(self.values)
        self.values.append(tensor)
        self.roots.append(root)

    def _is_known(self, tensor: Tensor, source: int) -> bool:
        """Return whether what is made of a number is a tensor that has one."""
        number = self._numbers.get(_place(tensor))
        return number is not None and self.roots[number] == self.roots[source]

    def _at(self, tensor: Tensor | None) -> Tensor | None:
        """Return a tensor that starts where this one does: what a view was made of, if that does."""
        if tensor is None:
            return None
        number = self.number(tensor)
        if self.strange is not None:
            return tensor
        root = self.values[self.roots[number]]
        return root if root.data_ptr() == tensor.data_ptr() and root.dtype is tensor.dtype else tensor

    def replay(self, results: Sequence[Tensor]) -> Replay | None:
        """Return what does the same on other tensors, and returns such results; None if nothing does."""
        returned = [self.number(t) for t in results]
        if self.strange is not None:
            return None
        for place, number in enumerate(returned):
            if number < self.given:  # what is returned is another tensor than what was given
                self.steps.append(_Step(Tensor.detach, (None,), {}, ((0, number),), len(self.values), 0, False))
                returned[place] = len(self.values)
                self._add(results[place], self.roots[number])
        needed = {*returned}
        live, steps = {self.roots[n] for n in needed}, list[_Step]()
        for step in reversed(self.steps):
            takes = [k for _, n in step.tensors for k in (n if isinstance(n, list) else [n]) if k >= 0]
            target = self.roots[takes[0]] if step.writes else -1
            writes = step.writes is None or target in live or 0 <= target < self.given
            if writes or not needed.isdisjoint(range(step.first, step.first + max(1, step.results))):
                steps.append(step)
                needed.update(takes)
                live.update(self.roots[k] for k in takes)
        return Replay(steps[::-1], len(self.values), returned)


class Replay:
    """Ops and launches, for tensors laid out as those that were noted."""

    def __init__(self, steps: Sequence[_Step], count: int, returned: Sequence[int]):
        self.steps, self.count, self.returned = steps, count, returned

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Run; returns what the call returns."""
        values: list[Any] = [*given, *[None] * (self.count + 1 - len(given))]  # the last one is None
        for func, args, kwargs, tensors, first, results, _ in self.steps:
            own = list(args)
            for at, n in tensors:
                own[at] = values[n] if type(n) is int else [values[k] for k in n]  # type: ignore[union-attr]  # a list
            found = func(*own, **kwargs)
            if results:
                values[first : first + results] = found
            else:
                values[first] = found
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
