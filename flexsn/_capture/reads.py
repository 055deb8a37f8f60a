"""What a core reads besides its arguments: captured tensors, modules and Python values, each by its access path.

Identity is by path and not by object: `functional_call`, parametrize, `load_state_dict(assign=True)` and FSDP2 swap
the objects, so every call looks again. Tensors become extra params of the core; Python values (floats, flags,
`.training`, the code of helper functions) are constants of the capture and form its `fingerprint`.
"""

from __future__ import annotations

import collections
import contextlib
import operator
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .slots import MISSING, Slot

KEPT = "__flexsn_reads__"  # attribute of a function that was a core


def own_of(core: Callable) -> tuple:
    """Its code and defaults, which hold no reference to it."""
    return getattr(core, "__code__", None), getattr(core, "__defaults__", None), getattr(core, "__kwdefaults__", None)


@dataclass
class Reads:
    """The result of one look at a core."""

    objects: dict[str, Slot] = field(default_factory=dict)  # captured tensors and modules, outermost ones
    again: list[tuple[Slot, Slot]] = field(default_factory=list)  # other places of what is captured, each with the first one
    fingerprint: tuple = ()  # code and constants; equal fingerprints trace to equal graphs
    watched: list[tuple[Slot, Any]] = field(default_factory=list)
    sizes: list[tuple[Any, int]] = field(default_factory=list)  # of containers and namespaces, which may grow
    orders: list[tuple[Any, list]] = field(default_factory=list)  # keys of dicts, and items of sets, that may be iterated
    iterators: list[Slot] = field(default_factory=list)  # places of those that cannot be looked into
    opaque: list[Any] = field(default_factory=list)  # what the fingerprint names by id(): to be kept while it is in use
    signatures: dict[tuple[int, int, int], Any] = field(default_factory=dict)  # by counts of operands, made by `scan`
    own: tuple = ()  # `own_of` the core
    calls: dict[tuple | None, Any] = field(default_factory=dict)  # by kinds of operands, made by `scan`

    cyclic: bool = False  # whether the core can be reached from what it reads, or may be
    of: Callable[[], Any] = lambda: None  # the core, weakly

    def __reduce__(self) -> tuple:
        return Reads, ()  # with a function that travels by value goes nothing of this process

    def of_now(self, core: Callable) -> bool:
        """Whether a look at the core would find the same."""
        if self.of() is not core:  # closures of one factory share their code, partials have none
            return False
        return bool(self.own) and all(map(operator.is_, self.own, own_of(core))) and self.current()

    def current(self) -> bool:
        """Whether every place still holds the object that it held at the look."""
        for slot, seen in self.watched:  # plain loops: every call comes here
            if slot.get() is not seen:
                return False
        for table, keys in self.orders:
            if not all(map(operator.is_, list(table), keys)):
                return False
        return all([len(container) == n for container, n in self.sizes])

    def held(self) -> tuple[list[Any], list[int]]:
        """What every watched place holds now, and how many things each namespace."""
        return [slot.get() for slot, _ in self.watched], [len(container) for container, _ in self.sizes]

    def restore(self, held: tuple[list[Any], list[int]]) -> str | None:
        """Put back what the places held, drop what was added to namespaces; returns a place that had changed, if any."""
        changed = None
        for (slot, _), old in zip(self.watched, held[0], strict=True):
            if slot.get() is not old:
                changed = slot.path
                slot.set(old)
        for table, items in self.orders:
            if isinstance(table, set) and not all(map(operator.is_, [*table, None], [*items, None])):
                changed = changed or "set"
                table.clear()
                table.update(items)
        for (container, _), n in zip(self.sizes, held[1], strict=True):
            if len(container) > n and isinstance(container, (dict, list, collections.deque)):
                changed = changed or type(container).__name__
                for key in list(container)[n:] if isinstance(container, dict) else range(len(container) - 1, n - 1, -1):
                    del container[key]
        return changed

    def tensors(self, replaced: dict[str, Any] | None = None) -> dict[str, Tensor]:
        """Captured tensors by path, read afresh; `replaced` gives other objects for some outermost paths."""
        found: dict[str, Tensor] = {}
        for path, slot in self.objects.items():
            value = replaced[path] if replaced and path in replaced else slot.get()
            if isinstance(value, Tensor):
                found[path] = value
            elif isinstance(value, nn.Module):
                found.update(module_tensors(value, path))
        return found


def module_tensors(module: nn.Module, path: str) -> dict[str, Tensor]:
    """Parameters, buffers and plain tensor attributes of a module and its children, by path."""
    found = {}
    for prefix, child in module.named_modules(prefix=path):
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None:
                found[f"{prefix}.{name}"] = tensor
        for name, value in vars(child).items():
            if isinstance(value, Tensor):
                found[f"{prefix}.{name}"] = value
    return found


# Held while cores are looked at, traced or lowered, and while captured objects are swapped: one lock for all of these, so
# that no two threads wait for each other. A fork waits for it, so that no child is born with a core half swapped.
lock = threading.RLock()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


@contextlib.contextmanager
def bound(reads: Reads, replaced: dict[str, Any]) -> Iterator[None]:
    """While inside, the core sees `replaced[path]` in place of the objects that it captured, by whatever names.

    A `FlexSN` owns its captured tensors (so that `.to`, `deepcopy` and `state_dict` act on them), while a closure is
    shared by all copies of its function. Calls that run the core itself therefore swap the module's tensors in, one
    thread at a time, and put the old ones back.
    """
    if not replaced:
        yield
        return
    with lock:
        undo = list[Callable[[], None]]()
        try:
            for path, new in replaced.items():
                if reads.objects[path].get() is not new:
                    undo.append(reads.objects[path].put(new))
            for place, first in reads.again:
                new = first.get()
                if place.get() is not new and new is not MISSING:
                    undo.append(place.put(new))
            yield
        finally:
            for put_back in reversed(undo):
                put_back()


@contextlib.contextmanager
def stand_ins(reads: Reads, replaced: dict[str, Any], make: Callable[[Tensor], Tensor]) -> Iterator[dict[str, Any]]:
    """While inside, the captured tensors are `make(tensor)`; yields what to bind, by outermost path.

    Tensors of captured modules are swapped in place, others are in what is yielded.
    """
    swapped, undo = dict(replaced), list[tuple[dict[str, Any], str, Any]]()
    with lock:
        try:
            for path, slot in reads.objects.items():
                value = replaced.get(path, slot.get())
                if isinstance(value, Tensor):
                    swapped[path] = make(value)
                for child in value.modules() if isinstance(value, nn.Module) else ():
                    tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers, vars(child))
                    for table in tables:
                        for name, tensor in list(table.items()):
                            if isinstance(tensor, Tensor):
                                undo.append((table, name, tensor))
                                table[name] = make(tensor)
            yield swapped
        finally:
            for table, name, tensor in reversed(undo):  # of a module under two names twice
                table[name] = tensor
