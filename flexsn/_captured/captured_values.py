"""What a core captures besides its arguments, found along the names in its code: tensors are operands, numbers and code are constants.

1. What the code of a core names and reaches from closure cells, defaults, partial arguments, `self` and globals, through modules,
   lists, tuples, dicts, dataclasses, plain objects and the user functions it calls, is captured: tensors are operands, read anew at
   every call; numbers, strings, flags, enums, dtypes and code are constants, compared at every call, and a changed one captures again.
2. Anything else on such a path is taken as it was at the capture (`frozen`).
3. A capture runs the core on stand-ins (`stand_ins.py`); nothing of the user's is written.
"""

from __future__ import annotations

import os
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import CapturedValueWarning
from .rebinding import rebind
from .stand_ins import Walk

# Held while cores are looked at, traced or lowered. A fork waits for it, so that no child is born with half a program.
lock = threading.RLock()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)

Make = Callable[[Tensor], Tensor]


class CapturedValues:
    """What one look at a core found.

    Attributes:
        fingerprint: code and constants; equal fingerprints trace to equal graphs.
        frozen: path and type of what was taken as it was.
        kept: objects that the fingerprint names by `id`.
        owned: whether a module holds the core.
        own: by path, how to read the tensors that a module registered in place of those in the core's cells.
        calls, signatures: what `dispatch` knows of calls, by the kinds of their operands; of equal fingerprints the same.
        over_parts: by the kinds of operands, what `dispatch` knows of calls on parts of their operands: a look at the core over
            them, or why none runs.
        simple: whether the places that are watched hold no object that may lead back to the core.
        wraps: what makes another core of the core, each of what the one before it made.
    """

    def __init__(self, core: Callable, walk: Walk | None = None):
        walk = walk or Walk(core, _same)
        self._items, self._attributes, self._sizes, self._orders = walk.items, walk.attributes, walk.sizes, walk.orders
        self._places = walk.places
        self.any_tensors = bool(walk.places)
        self._root = (*[getattr(core, name, None) for name in ("__code__", "__defaults__", "__kwdefaults__")], type(walk.home))
        # what is taken as it is may change unseen: such a look shares no program with another
        self.fingerprint = (*walk.constants, object()) if walk.frozen else tuple(walk.constants)
        self.frozen, self.kept, self.simple, self.refusal = walk.frozen, walk.kept, walk.simple, walk.refusal
        self.own_paths = walk.own
        self.own: dict[str, Callable[[], Tensor]] = {}
        self.owned = False
        self.calls: dict[Any, Any] = {}
        self.signatures: dict[tuple[int, int, int], Any] = {}
        self.over_parts: dict[Any, Any] = {}
        self.wraps: tuple[Any, ...] = ()

    @property
    def wrap(self) -> Any:
        """What makes another core of the core on stand-ins, the last if there are several; None if it runs as it is (`wrapped`)."""
        return self.wraps[-1] if self.wraps else None

    def __reduce__(self) -> tuple:
        return CapturedValues, (_nothing,)  # nothing of this process travels

    def valid(self, core: Callable | None = None) -> bool:
        """Return whether every constant is what it was, so that a look would find the same; of `core`, the same callable, also its code."""
        if core is not None:
            code, defaults, kwdefaults, kind = self._root
            home = core.__self__ if isinstance(core, types.MethodType) else core
            if type(home) is not kind or getattr(core, "__code__", None) is not code or getattr(core, "__defaults__", None) is not defaults:
                return False
            if getattr(core, "__kwdefaults__", None) is not kwdefaults:
                return False
        try:
            for table, key, value in self._items:  # plain loops: every call comes here
                if table[key] is not value:
                    return False
            for holder, name, value in self._attributes:
                if getattr(holder, name) is not value:
                    return False
            for table, size in self._sizes:
                if len(table) != size:
                    return False
            for table, keys in self._orders:
                if list(table) != keys:
                    return False
        except (KeyError, IndexError, ValueError, AttributeError):  # it is gone: a cell without a value raises ValueError
            return False
        return True

    def changed(self) -> str | None:
        """Return the name of a place that no longer holds what it held."""
        for table, key, value in self._items:
            if not (key in table if isinstance(table, (dict, types.MappingProxyType)) else key < len(table)) or table[key] is not value:
                return str(key)
        for holder, name, value in self._attributes:
            if getattr(holder, name, None) is not value:
                return name
        return None if self.valid() else "a container"

    def tensors(self) -> dict[str, Tensor]:
        """Return the captured tensors by path, read anew.

        Raises:
            LookupError, ValueError: a place is gone, which `valid` would have said.
        """
        found: dict[str, Tensor] = {}
        for path, (holder, key) in self._places.items():
            own = self.own.get(path)
            value = own() if own is not None else holder.cell_contents if key is None else holder[key]
            if isinstance(value, Tensor):
                found[path] = value
        return found

    def original(self, path: str) -> Tensor:
        """Return the tensor that the core's own places hold, whatever a module registered."""
        holder, key = self._places[path]
        return holder.cell_contents if key is None else holder[key]

    def runnable(self, core: Callable) -> Callable:
        """Return the core, as `wrapped` has it, over the tensors that a module registered, where others are in its cells."""
        others = {id(given): now for path, read in self.own.items() if (now := read()) is not (given := self.original(path))}
        core = rebind(core, others) if others else core
        for wrap in self.wraps:
            core = wrap(core)
        return core

    def stand_ins(self, core: Callable, make: Make) -> tuple[Callable, dict[str, Tensor]]:
        """Return the core rebuilt on `make(tensor)` for every captured tensor, and these by path. Each run refuses writes to them; the
        core itself, which leads to nothing of the user's, is its attribute `unchecked`.

        Raises:
            CannotFuseError: it captures what no program can hold (a ScriptModule, an iterator, a context variable).
        """
        if self.refusal is not None:
            raise self.refusal
        walk = Walk(core, make, {path: read() for path, read in self.own.items()})
        run: Any = walk.checked()
        unchecked = walk.core
        for wrap in self.wraps:
            run, unchecked = wrap(run), wrap(unchecked)
        run.unchecked = unchecked
        return run, walk.made

    def wrapped(self, wrap: Any) -> CapturedValues:
        """Return the same look, for calls of what `wrap`, which is hashable, makes of the core: it captures what the core does."""
        made = object.__new__(CapturedValues)
        wraps = (*self.wraps, wrap)
        made.__dict__.update(self.__dict__, fingerprint=(*self.fingerprint, wrap), wraps=wraps, calls={}, signatures={}, over_parts={})
        return made

    def warn_of_frozen(self, core: str) -> None:
        """Say once what was taken as it was."""
        for path, kind in self.frozen:
            if (core, path, kind) not in _said:
                _said.add((core, path, kind))
                warnings.warn(
                    f"core `{core}` captures `{path}`, a {kind}, which flexsn takes as it is now and does not compare at later calls. "
                    "Capture numbers or tensors, or call `recapture()` on the neuron after a change.", CapturedValueWarning, stacklevel=2,
                )  # fmt: skip


_said = set[tuple[str, str, str]]()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _nothing() -> None:
    """A core that captures nothing."""


# --- the cache of looks at cores of `flexsn.scan`; a `FlexSN` keeps its own ----------------------------------------------------
# by the function or module, and the function behind a method of it
_looks: weakref.WeakKeyDictionary[Any, dict[Any, CapturedValues]] = weakref.WeakKeyDictionary()


def look(core: Callable) -> CapturedValues:
    """Return what the core captures, looked at again only when something has changed.

    Cores whose places may lead back to them are looked at in every call: a table that keeps what they hold would keep them alive.
    """
    home, behind = (core.__self__, core.__func__) if isinstance(core, types.MethodType) else (core, None)
    if not isinstance(home, (types.FunctionType, torch.nn.Module)) or type(home).__hash__ is not object.__hash__:
        with lock:
            return CapturedValues(core)
    looks = _looks.get(home)
    known = looks.get(behind) if looks is not None else None
    if known is not None and known.valid(core):
        return known
    with lock:
        seen = look_again(core, known)
        if seen.simple:
            _looks.setdefault(home, {})[behind] = seen
        return seen


def look_again(core: Callable, before: CapturedValues | None) -> CapturedValues:
    """Return a new look, which goes on with the calls of one that found the same."""
    seen = CapturedValues(core)
    if before is not None and before.fingerprint == seen.fingerprint:
        seen.calls, seen.signatures = before.calls, before.signatures
    return seen
