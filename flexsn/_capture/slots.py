"""Places that hold what a core reads: each can be read at every call, and set while other tensors stand in."""

from __future__ import annotations

import collections
import contextvars
import functools
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

MISSING = object()


@dataclass(frozen=True)
class Attributes:
    """The attributes of an object with `__slots__`."""

    owner: Any


@dataclass(frozen=True)
class Core:
    """The core itself, which no place keeps alive: its attributes, or the arguments of a partial."""

    ref: weakref.ref[Any]

    def held(self) -> Any:
        core = self.ref()
        return core if isinstance(core, functools.partial) else Attributes(core)


@dataclass(frozen=True)
class Contents:
    """A module that its holder cannot exchange, such as the owner of a bound method: what it contains is exchanged."""

    module: Any


@dataclass(frozen=True)
class Child:
    """The children of the module that a place holds."""

    place: Slot


class Slot:
    """One place that holds a value: a closure cell, a key of a namespace or container, a context variable, an attribute of a class,
    function or partial, an item of a tuple that another place holds, a module by its `Contents`, a child of one, or (weakly) the core."""

    __slots__ = ("get", "holder", "key", "path")

    def __init__(self, path: str, holder: Any, key: Any = None):
        self.path, self.holder, self.key = path, holder, key
        self.get = _reader(holder, key)  # every call of a neuron reads every place: without a Python frame where that can be

    def set(self, value: Any) -> None:
        if isinstance(self.holder, Core):
            Slot(self.path, self.holder.held(), self.key).set(value)
        elif value is MISSING:
            self._clear()
        elif isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, (type, types.FunctionType)):
            setattr(self.holder, self.key, value)
        elif isinstance(self.holder, Attributes):
            setattr(self.holder.owner, self.key, value)
        elif isinstance(self.holder, Slot):
            self.holder.set(_exchanged(self.holder.get(), self.key, value))
        elif isinstance(self.holder, contextvars.ContextVar):
            self.holder.set(value)
        elif isinstance(self.holder, functools.partial):
            function, _, *others = tuple(self.holder.__reduce__()[2])
            self.holder.__setstate__((function, value, *others))  # type: ignore[attr-defined]  # as `pickle` calls it
        elif isinstance(self.holder, (list, collections.deque)) and self.key >= len(self.holder):
            self.holder.append(value)  # it became shorter
        else:
            self.holder[self.key] = value

    def _clear(self) -> None:
        """Take away what was put where nothing stood."""
        if isinstance(self.holder, types.CellType):
            del self.holder.cell_contents
        elif isinstance(self.holder, Attributes):
            delattr(self.holder.owner, self.key)
        elif isinstance(self.holder, dict):
            self.holder.pop(self.key, None)

    def put(self, value: Any) -> Callable[[], None]:
        """Set it; returns what puts the very object back that was there."""
        if isinstance(self.holder, Slot):
            return self.holder.put(_exchanged(self.holder.get(), self.key, value))
        if isinstance(self.holder, Contents):
            module = self.holder.module
            undo = functools.partial(_become, module, type(module), vars(module))
            _become(module, type(value), vars(value))
            return undo
        before = self.get()
        self.set(value)
        return functools.partial(self.set, before)


def _become(module: nn.Module, cls: type, contents: dict[str, Any]) -> None:
    """Another module's contents, and its class: `parametrize` gives every module one of its own."""
    object.__setattr__(module, "__class__", cls)
    object.__setattr__(module, "__dict__", contents)


def _reader(holder: Any, key: Any) -> Callable[[], Any]:
    """What reads a place: its value, or `MISSING`."""
    if isinstance(holder, types.CellType):
        return functools.partial(_content, holder)
    if isinstance(holder, weakref.ref):
        return holder
    if isinstance(holder, type):
        return functools.partial(vars(holder).get, key, MISSING)
    if isinstance(holder, dict):
        return functools.partial(holder.get, key, MISSING)
    if isinstance(holder, contextvars.ContextVar):
        return functools.partial(holder.get, MISSING)
    if isinstance(holder, Attributes):
        return functools.partial(getattr, holder.owner, key, MISSING)
    if isinstance(holder, Core):
        return lambda: getattr(holder.ref(), key, MISSING)
    if isinstance(holder, (types.FunctionType, functools.partial)):
        return functools.partial(getattr, holder, key)
    if isinstance(holder, Slot):
        return lambda: _item(holder.get(), key)
    if isinstance(holder, Contents):
        return lambda: holder.module
    if isinstance(holder, Child):
        return lambda: holder.place.get()._modules.get(key, MISSING)
    return functools.partial(_item, holder, key)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is not bound yet
        return MISSING


def _item(values: Sequence[Any], place: int) -> Any:
    try:
        return values[place]
    except (LookupError, RuntimeError):  # the latter of TorchScript's tables
        return MISSING


def _exchanged(values: tuple, place: int, value: Any) -> tuple:
    """A tuple with another item in one place."""
    items = (*values[:place], value, *values[place + 1 :])
    make = getattr(type(values), "_make", type(values))  # a named one
    return make(items)
