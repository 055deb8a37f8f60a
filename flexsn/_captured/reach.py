"""What the code of a core can reach by the names that it uses, found before anything is rebuilt."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from .user_code import (
    CONSTANTS,
    CONTAINERS,
    HOOKS,
    INTERNALS,
    NAMESPACES,
    WHOLE,
    functions_in,
    globals_of,
    is_library,
    is_users,
    members,
    names_in,
    users_bases,
)


class Reach:
    """What the code of a core reaches, looked through before anything is rebuilt.

    Attributes:
        names: of attributes and globals in all of the code.
        home: what a look at the core lives as long as: the object of a bound method, else the core.
        fixed: `id` of tensors that code inside classes reads, which is not rebuilt: they stand for themselves.
    """

    def __init__(self, core: Any):
        self.names: frozenset[str] = frozenset({"parametrizations", "forward"})
        self.home = core.__self__ if isinstance(core, types.MethodType) else core
        self.fixed: set[int] = set()
        before = -1
        while len(self.names) != before:  # names that are met late may lead further in what was met before
            before = len(self.names)
            self._seen: set[tuple[int, bool]] = set()
            self._look(core, False)

    def _look(self, value: Any, fixed: bool) -> None:
        stack = [(value, fixed)]
        while stack:
            one, fixed = stack.pop()
            if isinstance(one, CONSTANTS) or (id(one), fixed) in self._seen:
                continue
            self._seen.add((id(one), fixed))
            if isinstance(one, Tensor):
                self.fixed |= {id(one)} if fixed else set()
            else:
                stack += self._inside(one, fixed)

    def _inside(self, one: Any, fixed: bool) -> Iterator[tuple[Any, bool]]:
        if is_users(one):
            self.names |= names_in(one.__code__)
            for cell in one.__closure__ or ():
                if cell != types.CellType():
                    yield cell.cell_contents, fixed
            values = (*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values())
            yield from ((v, fixed) for v in (*values, *(one.__globals__[n] for n in globals_of(one))))
        elif isinstance(one, types.MethodType):
            yield from ((one.__func__, fixed), (one.__self__, fixed))
        elif isinstance(one, types.BuiltinFunctionType) and isinstance(one.__self__, type):
            yield one.__self__, fixed  # `apply` of an autograd function, since PyTorch 2.14
        elif isinstance(one, functools.partial):
            yield from ((v, fixed) for v in (one.func, *one.args, *one.keywords.values()))
        elif isinstance(one, (list, tuple)):
            yield from ((v, fixed) for v in one)
        elif isinstance(one, dict):
            yield from ((v, fixed) for v in one.values())
        elif isinstance(one, type):
            for _, name, raw in members(one, made=False):
                yield from ((fn, True) for fn in functions_in(raw))
                if name in self.names and not name.startswith("__"):
                    yield raw, True
        elif isinstance(one, types.ModuleType):
            if not is_library(one.__name__):
                yield from ((vars(one)[n], fixed) for n in self.names & vars(one).keys())
        elif isinstance(one, nn.Module) or users_bases(type(one)) or isinstance(one, NAMESPACES):
            yield from self._of_instance(one, fixed)

    def _of_instance(self, one: Any, fixed: bool) -> Iterator[tuple[Any, bool]]:
        bases, own = users_bases(type(one)), getattr(one, "__dict__", {})
        every = not bases or isinstance(one, CONTAINERS) or not self.names.isdisjoint(WHOLE)
        seen = set(own)
        for _, name, raw in members(type(one), made=True):
            if name in self.names or name == "forward" or name.startswith("__"):
                method = isinstance(raw, types.FunctionType) and not name.startswith("__") and name not in seen
                yield from ((fn, fixed or not method) for fn in functions_in(raw))
                if not name.startswith("__") and not any(functions_in(raw)):
                    yield raw, fixed
                seen.add(name)
        if isinstance(one, nn.Module):
            yield from ((hook, fixed) for table in HOOKS for hook in own[table].values())
            for table in ("_parameters", "_buffers", "_modules"):
                yield from (
                    (v, fixed) for n, v in own[table].items() if v is not None and (every or n in self.names or table != "_modules")
                )
            if getattr(type(one), "runs_sequences", False):
                return
        yield from ((v, fixed) for n, v in own.items() if (n in self.names or (every and bases)) and n not in INTERNALS)
