"""Functions made anew over other cells: for a module whose own tensors stand in place of those in a core's cells, and for copies."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .user_code import CONSTANTS, is_users


def rebind(core: Any, others: dict[int, Tensor]) -> Any:
    """Return the core with `others[id(tensor)]` in place of tensors in its cells, defaults and partial arguments, and in functions there.

    What leads to none of them stays the object that it is.
    """
    return _made_anew(core, lambda value: others.get(id(value), value) if isinstance(value, Tensor) else value, {})


def copied(core: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a core: the cells of a function are copied, as PyTorch copies `self` of a bound method."""

    def leaf(value: Any) -> Any:
        shared = isinstance(value, (*CONSTANTS, type, types.ModuleType, types.BuiltinFunctionType, types.FunctionType))
        return value if shared else copy.deepcopy(value, memo)

    return _made_anew(core, leaf, {})


def _made_anew(value: Any, leaf: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if is_users(value):
        return _function(value, leaf, memo)
    if isinstance(value, functools.partial):
        parts = value.func, *value.args, *value.keywords.values()
        new = [_made_anew(part, leaf, memo) for part in parts]
        if all(a is b for a, b in zip(parts, new, strict=True)):
            return value
        n = 1 + len(value.args)
        made = functools.partial(new[0], *new[1:n], **dict(zip(value.keywords, new[n:], strict=True)))
        made.__dict__.update(vars(value))
        return made
    if type(value) in (list, tuple, dict):
        keys = value if isinstance(value, dict) else range(len(value))
        new = [_made_anew(value[key], leaf, memo) for key in keys]
        if all(value[key] is one for key, one in zip(keys, new, strict=True)):
            return value
        return dict(zip(keys, new, strict=True)) if isinstance(value, dict) else type(value)(new)
    return leaf(value)


def _function(fn: types.FunctionType, leaf: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """A function over new cells, or itself where nothing in it is new."""
    cells = tuple([types.CellType() for _ in fn.__closure__ or ()])
    made = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, cells)
    memo[id(fn)] = made
    same = True
    for cell, new in zip(fn.__closure__ or (), cells, strict=True):
        if cell != types.CellType():
            new.cell_contents = _made_anew(cell.cell_contents, leaf, memo)
            same &= new.cell_contents is cell.cell_contents or new.cell_contents is made
    made.__defaults__ = fn.__defaults__ and tuple([_made_anew(v, leaf, memo) for v in fn.__defaults__])
    made.__kwdefaults__ = fn.__kwdefaults__ and {n: _made_anew(v, leaf, memo) for n, v in fn.__kwdefaults__.items()}
    same &= all(a is b for a, b in zip(made.__defaults__ or (), fn.__defaults__ or (), strict=True))
    same &= all(v is (fn.__kwdefaults__ or {})[n] for n, v in (made.__kwdefaults__ or {}).items())
    if same:
        memo[id(fn)] = fn
        return fn
    made.__qualname__, made.__module__, made.__doc__ = fn.__qualname__, fn.__module__, fn.__doc__
    made.__dict__.update(fn.__dict__)
    return made
