"""What code and classes say by themselves: the names that a function uses, what it does with its variables, whose a class is."""

from __future__ import annotations

import dis
import functools
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

# Modules of flexsn whose functions are taken as they are, as PyTorch's
_OWN = ("flexsn", "flexsn._surrogate_arguments", "flexsn.surrogate", "flexsn.module", "flexsn.owner", "flexsn.scan", "flexsn.neurons")
_PYTHONS = Path(os.__file__).parent
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"})  # what Python does with one attribute of a variable
_VARIABLE = (  # first words of what loads one
    "LOAD_FAST", "STORE_FAST_LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT", "LOAD_GLOBAL", "LOAD_NAME",
)  # fmt: skip


@functools.cache
def is_library(module: str) -> bool:
    """Modules whose functions are taken as they are: PyTorch, the standard library and flexsn itself."""
    top = module.partition(".")[0]
    own = module in _OWN or module.startswith("flexsn.neurons.")
    return own or top in {"torch", "numpy"} or (top in sys.stdlib_module_names and _is_pythons(sys.modules.get(top)))


def _is_pythons(module: types.ModuleType | None) -> bool:
    """Whether a module that is named like one of the standard library is that one, and no `trace.py` beside the user's script."""
    file = getattr(module, "__file__", None)
    return getattr(module, "__name__", None) != "__main__" and (file is None or Path(file).is_relative_to(_PYTHONS))


def is_taken_as_it_is(fn: types.FunctionType) -> bool:
    return is_library(fn.__module__ or "") and is_library(fn.__globals__.get("__name__", ""))  # decorators copy the first


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """By name, of a class and its bases that are the user's."""
    for base in cls.__mro__:
        if not is_library(base.__module__):
            yield from list(vars(base).items())


def function_in(raw: Any) -> Any:
    """Of a property, or a static or class method: the function. Anything else as it is."""
    for name in ("fget", "__func__"):
        try:
            return getattr(raw, name)
        except Exception:  # an attribute of a class may be anything, and answer to a name as it likes
            continue
    return raw


def slot_names(cls: type) -> list[str]:
    """Attributes that objects of a class hold outside their `__dict__`."""
    found = []
    for base in cls.__mro__:
        slots = () if is_library(base.__module__) else getattr(base, "__slots__", ()) if "__slots__" in vars(base) else ()
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of those inside it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from nested(const)


def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Names of globals and of attributes, also those that are given to `getattr`."""
    parts = list(nested(code))
    texts = (const for part in parts for const in part.co_consts if isinstance(const, str) and const.isidentifier())
    return tuple(dict.fromkeys((*(name for part in parts for name in part.co_names), *texts)))


@functools.lru_cache(maxsize=4096)
def taken_whole(code: types.CodeType) -> frozenset[str]:
    """Variables with which a function does more than to read and set attributes that no class of PyTorch's or Python's has."""
    found = set[str]()
    for part in nested(code):
        steps = [step for step in dis.get_instructions(part) if step.opname not in ("CACHE", "EXTENDED_ARG")]
        for step, after in zip(steps, (*steps[1:], None), strict=True):
            several = isinstance(step.argval, tuple)  # variables (Python 3.13)
            attribute = not several and after and after.opname in _ATTRIBUTE and not hasattr(nn.Module, str(after.argval))
            if step.opname.startswith(_VARIABLE) and not attribute:
                found.update(step.argval if several else [step.argval])
    if "super" in names_in(code):  # reads attributes of the first argument in another class
        found.update(name for part in nested(code) for name in (*part.co_varnames, *part.co_freevars))
    return frozenset(found)


def global_names(code: types.CodeType, *opnames: str) -> tuple[str, ...]:
    """Names that a function reads, or those of other instructions."""
    wanted = opnames or ("LOAD_GLOBAL", "LOAD_NAME")
    found = (i.argval for part in nested(code) for i in dis.get_instructions(part) if i.opname in wanted)
    return tuple(dict.fromkeys(found))
