"""What code and classes say by themselves: the names that a function uses, and whose a class or function is."""

from __future__ import annotations

import argparse
import dis
import enum
import functools
import numbers
import os
import sys
import types
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

CONSTANTS = (
    numbers.Number, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size, enum.Enum,
    range, slice,
)  # fmt: skip
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)  # where programs keep their settings
INTERNALS = frozenset(vars(nn.Module()))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # tables of a module
WHOLE = frozenset(  # who names one of these may mean any attribute or child
    "children named_children modules named_modules parameters named_parameters buffers named_buffers state_dict get_submodule "
    "get_parameter get_buffer getattr vars __dict__".split()
)
_NOT_OF_A_STEP = frozenset(
    "__repr__ __str__ __format__ __dir__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __copy__ __deepcopy__ __del__ __hash__ "
    "__init_subclass__ __class_getitem__".split()
)
_OF_MAKING = frozenset({"__init__", "__new__", "__post_init__"})
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType, type(vars(namedtuple("Pair", "first"))["first"]))
_PYTHONS = Path(os.__file__).parent
_USERS = ("flexsn.interchange", "flexsn.neurons.recurrent")  # the parts of flexsn whose classes are cores like a user's


@functools.cache
def is_library(module: str) -> bool:
    """Return whether functions and classes of a module are taken as they are: PyTorch, NumPy, the standard library, flexsn itself."""
    top = module.partition(".")[0]
    own = top == "flexsn" and not module.startswith(_USERS) and "flexsn" in sys.modules
    return (
        own
        or top in {"torch", "numpy", "triton", "pybind11_builtins"}
        or (top in sys.stdlib_module_names and _is_pythons(sys.modules.get(top)))
    )


def _is_pythons(module: types.ModuleType | None) -> bool:
    """Return whether a module that is named like one of the standard library is that one, and no `trace.py` beside the user's script."""
    file = getattr(module, "__file__", None)
    return getattr(module, "__name__", None) != "__main__" and (file is None or Path(file).is_relative_to(_PYTHONS))


def is_users(fn: Any) -> bool:
    """Return whether a value is a Python function that is rebuilt: not one of a library. Decorators copy `__module__`, so globals count."""
    if not isinstance(fn, types.FunctionType):
        return False
    return not (is_library(fn.__module__ or "") and is_library(fn.__globals__.get("__name__", "")))


def is_users_hook(hook: Any) -> bool:
    """Return whether a hook of a module is code of the user's, which may read and write what it captures."""
    return isinstance(hook, functools.partial) or is_users(getattr(hook, "__func__", hook)) or bool(users_bases(type(hook)))


def users_bases(cls: type) -> list[type]:
    """Return the class and its bases that are the user's, in the order of lookup."""
    return [base for base in cls.__mro__ if not is_library(base.__module__)]


def members(cls: type, *, made: bool) -> Iterator[tuple[type, str, Any]]:
    """Yield base, name and value of what a class of the user's and its bases hold and a step may use: of an instance that is `made`, not
    what makes one."""
    for base in users_bases(cls):
        for name, raw in list(vars(base).items()):
            slot = isinstance(raw, _SLOTS)
            if not slot and name not in _NOT_OF_A_STEP and not (made and name in _OF_MAKING):
                yield base, name, raw


def slots_of(cls: type) -> list[str]:
    """Return the names that objects of a class hold outside their `__dict__`."""
    found = [name for base in users_bases(cls) for name, raw in vars(base).items() if isinstance(raw, types.MemberDescriptorType)]
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def functions_in(raw: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of what stands in a class: a method, a property, a static or class method."""
    found = (raw.fget, raw.fset) if isinstance(raw, property) else (getattr(raw, "__func__", raw),)
    yield from (fn for fn in found if isinstance(fn, types.FunctionType))


def leads_nowhere(value: Any) -> bool:
    """Return whether an attribute of a module surely does not lead back to the module."""
    if isinstance(value, (tuple, list, dict, set)):
        return all(map(leads_nowhere, value.values() if isinstance(value, dict) else value))
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None and value.__defaults__ is None and value.__kwdefaults__ is None
    return isinstance(value, (*CONSTANTS, torch.Tensor, nn.Module, type))


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const)


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return names of globals and of attributes that a function uses, also those that stand in its strings (for `getattr`)."""
    parts = list(_nested(code))
    texts = (const for part in parts for const in part.co_consts if isinstance(const, str) and const.isidentifier())
    return frozenset((*(name for part in parts for name in part.co_names), *texts))


def globals_of(fn: types.FunctionType) -> list[str]:
    """Return names of globals that a function reads, and that are there; none of a library's function, which a decorator made."""
    if is_library(fn.__globals__.get("__name__", "")):
        return []
    return [name for name in globals_in(fn.__code__) if name in fn.__globals__]


@functools.lru_cache(maxsize=4096)
def globals_in(code: types.CodeType) -> tuple[str, ...]:
    """Return names of globals that a function reads."""
    found = (i.argval for part in _nested(code) for i in dis.get_instructions(part) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return tuple(dict.fromkeys(name for name in found if not name.startswith("@")))  # `@...`: pytest's, in the asserts of tests


def class_behind(value: Any) -> type:
    """Return the class of a value, past the one that `make_fx` gives a module that it finds under two names."""
    return next(cls for cls in type(value).__mro__ if all(base.__module__ != "torch.fx.experimental.proxy_tensor" for base in cls.__mro__))
