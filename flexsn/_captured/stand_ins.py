"""A core rebuilt on stand-ins for what it captures, so that a capture sees the types, identities and names that a call sees.

Modules and plain objects become shells (the same class, a `__dict__` of their own), functions are made anew over fresh cells and a copy
of their globals, containers are copied. Whatever the core writes lands there, and shows.
"""

from __future__ import annotations

import collections.abc
import copy
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .._capture.signature import core_name
from ..errors import CannotFuseError
from .reach import Reach
from .refusals import refusal_of
from .shells import Shells
from .user_code import (
    CONSTANTS,
    CONTAINERS,
    HOOKS,
    INTERNALS,
    NAMESPACES,
    WHOLE,
    class_behind,
    functions_in,
    globals_of,
    is_library,
    is_users,
    is_users_hook,
    leads_nowhere,
    members,
    slots_of,
    users_bases,
)


class Walk:
    """One walk over everything that a core reaches by the names in its code.

    Attributes:
        core: the core on stand-ins.
        home: what the look lives as long as: the object of a bound method, else the core.
        made: stand-ins of tensors, by path.
        places: of each captured tensor, the table and key that hold it (key None: a cell).
        items, attributes, sizes, orders: guards: tables with keys, objects with attribute names, containers with lengths, dicts with keys.
        constants: the fingerprint so far.
        own: paths of tensors in cells, defaults and partial arguments of the core, or of functions in these.
        frozen: path and type name of what is taken as it is.
        kept: objects that the fingerprint names by `id`.
        simple: whether what is watched holds no object that may lead back to the core.
        refusal: why the core cannot be captured, if so.
    """

    def __init__(self, core: Callable, make: Callable[[Tensor], Tensor], registered: dict[str, Tensor] | None = None):
        self._root, self._make, self._registered = core, make, registered or {}
        reach = Reach(core)
        self.home = reach.home
        self._names, self._fixed, self._whole = reach.names, reach.fixed, not reach.names.isdisjoint(WHOLE)
        self._memo: dict[int, Any] = {}
        self._first: dict[int, str] = {}
        self._bases: set[type] = set()
        self._alive: list[Any] = []  # so that ids stay unique
        self._shells = Shells()
        self._hooked = False
        self.made: dict[str, Tensor] = {}
        self.places: dict[str, tuple[Any, Any]] = {}
        self.items: list[tuple[Any, Any, Any]] = []
        self.attributes: list[tuple[Any, str, Any]] = []
        self.sizes: list[tuple[Any, int]] = []
        self.orders: list[tuple[dict, list]] = []
        self.constants: list[tuple] = []
        self.own: list[str] = []
        self.frozen: list[tuple[str, str]] = []
        self.kept: list[Any] = []
        self.simple = True
        self.refusal: CannotFuseError | None = None
        self.core = self._visit("", core, own=True)
        self._shells.settle()

    def checked(self) -> Callable:
        """Return the core on stand-ins; every run of it raises if it wrote to what it captured."""

        def run(*operands: Any) -> Any:
            returned = self.core(*operands)
            self._shells.refuse_writes(core_name(self._root), self._hooked)
            return returned

        return run

    # --- places --------------------------------------------------------------------------------------------------------
    def _slot(self, path: str, holder: Any, key: Any, value: Any, own: bool = False) -> Any:
        """Return what stands in for the value of a place that is read anew (a tensor) or compared (anything else) at every call.

        `holder[key]` gives the value; of a cell (`key` None) its content; of a tuple it never changes.
        """
        first = isinstance(value, Tensor) and id(value) not in self._memo
        if first:
            self.places[path] = holder, key
            if own:
                self.own.append(path)
        if not isinstance(holder, tuple) and (own or not first):
            if key is None:
                self.attributes.append((holder, "cell_contents", value))
            else:
                self.items.append((holder, key, value))
        return self._visit(path, value, own)

    def _visit(self, path: str, value: Any, own: bool = False) -> Any:
        """Return what stands in for a value, and note what a program depends on."""
        if isinstance(value, CONSTANTS):
            self.constants.append((path, type(value).__qualname__, repr(value)))
            return value
        if id(value) in self._memo:
            self.simple = self.simple and value is not self.home
            self.constants.append((path, "same as", self._first[id(value)]))
            return self._memo[id(value)]
        self._alive.append(value)
        self._first[id(value)] = path
        for kind, rebuild in _REBUILD:
            if isinstance(value, kind):
                return rebuild(self, path, value, own)
        return self._other(path, value)

    def _remember(self, value: Any, made: Any) -> Any:
        self._memo[id(value)] = made
        return made

    def _as_it_is(self, path: str, value: Any) -> Any:
        self.constants.append((path, "object", id(value)))
        self.kept.append(value)
        return self._remember(value, value)

    def _frozen(self, path: str, value: Any) -> Any:
        """A value that nothing is known of: the same object counts as the same value. (A core of such a kind is what it is.)"""
        self._code(path, getattr(value, "__wrapped__", None))
        if path:
            self.frozen.append((path, type(value).__qualname__))
        return self._as_it_is(path, value)

    def _refuse(self, path: str, value: Any, error: CannotFuseError) -> Any:
        self.refusal = self.refusal or error
        return self._as_it_is(path, value)

    # --- kinds of values ---------------------------------------------------------------------------------------------------
    def _tensor(self, path: str, value: Tensor, own: bool) -> Tensor:
        self.constants.append((path, "tensor"))
        current = self._registered.get(path, value)
        self.made[path] = value if id(value) in self._fixed else self._make(current)
        return self._remember(value, self.made[path])

    def _function(self, path: str, fn: types.FunctionType, own: bool) -> Any:
        if not is_users(fn):
            return self._remember(fn, fn) if fn.__closure__ is None else self._as_it_is(path, fn)
        code = fn.__code__
        self.constants.append((path, "code", code, code.co_filename))  # code of two files may be equal; lines differ
        if fn is not self._root:
            self.attributes += [(fn, name, getattr(fn, name)) for name in ("__code__", "__defaults__", "__kwdefaults__")]
        cells = tuple([types.CellType() for _ in fn.__closure__ or ()])
        variables = dict(fn.__globals__)
        made = self._remember(fn, types.FunctionType(code, variables, fn.__name__, None, cells))
        made.__qualname__, made.__module__, made.__doc__ = fn.__qualname__, fn.__module__, fn.__doc__
        prefix = "" if fn is self._root or path in ("", "self") else f"{path}."
        for name, cell, new in zip(code.co_freevars, fn.__closure__ or (), cells, strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # the variable is not bound yet
                continue
            new.cell_contents = value if name == "__class__" else self._slot(prefix + name, cell, None, value, own)
            self._shells.add(prefix + name, new)
        if fn.__defaults__:
            of, names = fn.__defaults__, code.co_varnames[code.co_argcount - len(fn.__defaults__) :]
            made.__defaults__ = tuple([self._slot(prefix + names[k], of, k, v, own) for k, v in enumerate(of)])
        if fn.__kwdefaults__:
            made.__kwdefaults__ = {n: self._slot(prefix + n, fn.__kwdefaults__, n, v, own) for n, v in fn.__kwdefaults__.items()}
        for name in globals_of(fn):
            self.simple &= vars(sys.modules.get(fn.__globals__.get("__name__", ""), types)) is fn.__globals__
            variables[name] = self._slot(prefix + name, fn.__globals__, name, variables[name])
        made.__dict__.update({n: self._slot(f"{prefix}{n}", vars(fn), n, v) if n in self._names else v for n, v in vars(fn).items()})
        self._shells.add(path, variables)
        self._shells.add(path, made.__dict__)
        return made

    def _method(self, path: str, method: types.MethodType, own: bool) -> Any:
        holder = self._slot(f"{path}.self" if path else "self", (method.__self__,), 0, method.__self__)  # bound for good
        made = types.MethodType(
            self._visit(path, method.__func__) if isinstance(method.__func__, types.FunctionType) else method.__func__, holder
        )
        return self._remember(method, made)

    def _partial(self, path: str, value: functools.partial, own: bool) -> Any:
        prefix = f"{path}." if path else ""
        func = self._visit(path, value.func, own)
        args = [self._slot(f"{prefix}{k}", value.args, k, a, own) for k, a in enumerate(value.args)]
        keywords = {k: self._slot(prefix + k, value.keywords, k, a, own) for k, a in value.keywords.items()}
        made = functools.partial(func, *args, **keywords)
        made.__dict__.update(vars(value))
        return self._remember(value, made)

    def _module(self, path: str, module: nn.Module, own: bool) -> Any:
        if (error := refusal_of(path, module, self._root)) is not None:
            return self._refuse(path, module, error)
        made = self._remember(module, object.__new__(class_behind(module)))
        held = dict(vars(module))
        object.__setattr__(made, "__dict__", held)
        prefix, users = f"{path}." if path else "", bool(users_bases(type(module)))
        self._class_of(path, module, held)
        self.items.append((vars(module), "training", module.training))
        self.constants.append((path, "training", module.training))
        every = self._whole or not users or isinstance(module, CONTAINERS)
        for table in ("_parameters", "_buffers", "_modules"):
            given = vars(module)[table]
            held[table] = mine = type(given)(given) if type(given) is not dict else dict(given)
            self._sized(path, given)
            self.items.append((vars(module), table, given))
            for name, value in given.items():
                if value is not None and (every or table != "_modules" or name in self._names):
                    mine[name] = self._slot(prefix + name, given, name, value)
                elif value is None:
                    self.items.append((given, name, value))
            self._shells.add(path, mine)
        for table in HOOKS:
            hooks = vars(module)[table]
            held[table] = type(hooks)(hooks)
            users_own = [(n, k, hook) for n, (k, hook) in enumerate(hooks.items()) if is_users_hook(hook)]
            held[table].update({k: self._slot(f"{prefix}{table}.{n}", hooks, k, hook) for n, k, hook in users_own})
            self.sizes.append((hooks, len(hooks)))
            self.constants.append((path, table, tuple(map(id, hooks.values()))))
            self._hooked |= bool(hooks)
            self.simple = self.simple and not (hooks and isinstance(self.home, nn.Module))  # one may be its method
        if not getattr(type(module), "runs_sequences", False):  # what a neuron carries from call to call is no constant
            self.sizes.append((vars(module), len(vars(module))))  # an attribute set later stands before that of the class
            for name, value in vars(module).items():
                named = name in self._names or (self._whole if users else isinstance(value, CONSTANTS))
                if name not in INTERNALS and named:
                    held[name] = self._slot(prefix + name, vars(module), name, value)
        self._shells.add(path, held)
        return made

    def _object(self, path: str, value: Any) -> Any:
        """An object of a class of the user's. What it holds in slots is taken as it is."""
        prefix, own = f"{path}." if path else "", getattr(value, "__dict__", {})
        slots = slots_of(type(value))
        try:
            made = copy.copy(value) if slots else object.__new__(type(value))
        except TypeError:  # its base is made by another `__new__`
            made = copy.copy(value)
        self._remember(value, made)
        self.frozen += [
            (prefix + name, type(getattr(value, name)).__qualname__) for name in slots if name in self._names and hasattr(value, name)
        ]
        held = getattr(made, "__dict__", {})
        held.update(own)
        self._class_of(path, value, held)
        self.sizes.append((own, len(own)))
        for name, one in own.items():
            if name in self._names or self._whole:
                held[name] = self._slot(prefix + name, own, name, one)
        self._shells.add(path, held)
        return made

    def _class_of(self, path: str, value: Any, held: dict[str, Any]) -> None:
        """What an instance finds in its class by the names of the code: methods are bound to the shell, tensors get stand-ins."""
        self.constants.append((path, "class", id(type(value))))
        self.kept.append(type(value))
        self.simple = self.simple and isinstance(value, nn.Module) and (value is not self.home or leads_nowhere(vars(value)))
        if value is not self.home:  # nothing that is watched holds that; `valid` compares its class
            self.attributes.append((value, "__class__", type(value)))
        self._watch_bases(type(value))
        seen = set(held)
        for base, name, raw in members(type(value), made=True):
            if name not in self._names and name != "forward" and not name.startswith("__"):
                continue
            where = f"{path}.{name}" if path else name
            if isinstance(raw, types.FunctionType) and not name.startswith("__") and name not in seen:
                self.items.append((vars(base), name, raw))
                held[name] = types.MethodType(self._visit(where, raw), self._memo[id(value)])
            elif any(functions_in(raw)):
                self.items.append((vars(base), name, raw))
                self._code(where, raw)
            elif name not in seen and not name.startswith("__"):
                held[name] = self._slot(where, vars(base), name, raw)
            seen.add(name)

    def _watch_bases(self, cls: type) -> None:
        """Guard against names that are set on a class later, before those of its bases."""
        new = [base for base in users_bases(cls) if base not in self._bases]
        self._bases.update(new)
        self.sizes += [(vars(base), len(vars(base))) for base in new]

    def _code(self, path: str, raw: Any) -> None:
        """Functions that stay in their class: what they name counts, and stands for itself."""
        for fn in functions_in(raw):
            if id(fn) in self._memo or not is_users(fn):
                continue
            self._remember(fn, fn)
            self._first[id(fn)] = path
            self._alive.append(fn)
            self.constants.append((path, "code", fn.__code__, fn.__code__.co_filename))
            self.attributes.append((fn, "__code__", fn.__code__))
            for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
                if name != "__class__":
                    self._slot(f"{path}.{name}", cell, None, cell.cell_contents)
            for name in globals_of(fn):
                self._slot(f"{path}.{name}", fn.__globals__, name, fn.__globals__[name])

    def _type(self, path: str, cls: type, own: bool) -> Any:
        """A class, taken as it is: the code of its methods and what the core names of it count."""
        self.constants.append((path, "class", id(cls)))
        self.kept.append(cls)
        self._remember(cls, cls)
        self._watch_bases(cls)
        for base, name, raw in members(cls, made=False):
            if any(functions_in(raw)):
                self.items.append((vars(base), name, raw))
                self._code(f"{path}.{name}", raw)
            elif name in self._names and not name.startswith("__"):
                self._slot(f"{path}.{name}", vars(base), name, raw)
        return cls

    def _namespace(self, path: str, module: types.ModuleType, own: bool) -> Any:
        if is_library(module.__name__):
            return self._remember(module, module)
        made = self._remember(module, types.ModuleType(module.__name__))
        made.__dict__.update(vars(module))
        for name in sorted(self._names & vars(module).keys()):
            made.__dict__[name] = self._slot(f"{path}.{name}", vars(module), name, vars(module)[name])
        self._shells.add(path, made.__dict__)
        return made

    def _list(self, path: str, value: list, own: bool) -> Any:
        made = self._remember(value, [] if type(value) is list else copy.copy(value))
        self._sized(path, value)
        made[:] = [self._slot(f"{path}.{k}", value, k, one, own) for k, one in enumerate(value)]
        self._shells.add(path, made)
        return made

    def _dict(self, path: str, value: dict, own: bool) -> Any:
        made = self._remember(value, {} if type(value) is dict else copy.copy(value))
        self._sized(path, value)
        self.constants.append((path, "keys", tuple(map(repr, value))))
        made.update({k: self._slot(f"{path}.{k}", value, k, one, own) for k, one in value.items()})
        self._shells.add(path, made)
        return made

    def _sized(self, path: str, value: Any) -> None:
        inside = value.values() if isinstance(value, dict) else value
        self.simple = self.simple and all(isinstance(one, (*CONSTANTS, Tensor, nn.Module)) and one is not self.home for one in inside)
        if isinstance(value, dict) and len(value) > 1:  # which may be iterated
            self.orders.append((value, list(value)))
        else:
            self.sizes.append((value, len(value)))
        self.constants.append((path, type(value).__qualname__, len(value)))

    def _tuple(self, path: str, value: tuple, own: bool) -> Any:
        self.constants.append((path, type(value).__qualname__, len(value)))
        made = [self._slot(f"{path}.{k}", value, k, one, own) for k, one in enumerate(value)]
        make = getattr(type(value), "_make", type(value))  # a named one
        return self._remember(value, make(made))

    def _builtin(self, path: str, value: Any, own: bool) -> Any:
        owner = getattr(value, "__self__", None)
        if isinstance(owner, (Tensor, type)):  # a type: `apply` of an autograd function, since PyTorch 2.14
            return getattr(self._slot(f"{path}.self" if path else "self", (owner,), 0, owner), value.__name__)
        if owner is None or isinstance(owner, types.ModuleType) or type(owner).__module__ == "pybind11_builtins":
            return self._as_it_is(path, value)
        if (error := refusal_of(path, owner, self._root)) is not None:
            return self._refuse(path, value, error)
        return self._frozen(path, value)

    def _other(self, path: str, value: Any) -> Any:
        module = "" if users_bases(type(value)) else type(value).__module__.partition(".")[0]
        if (error := refusal_of(path, value, self._root)) is not None:
            return self._refuse(path, value, error)
        if isinstance(value, frozenset) and all(isinstance(one, CONSTANTS) for one in value):
            self.constants.append((path, "frozenset", tuple(sorted(map(repr, value)))))
            return self._remember(value, value)
        if module == "flexsn" or (module == "torch" and (callable(value) or not hasattr(value, "__dict__"))):
            return self._as_it_is(path, value)
        if isinstance(value, (set, collections.deque)):
            made = copy.copy(value)
            self._frozen(path, value)
            self._shells.add(path, made)
            return self._remember(value, made)
        if users_bases(type(value)) or isinstance(value, NAMESPACES):
            return self._object(path, value)
        return self._frozen(path, value)


_REBUILD: tuple[tuple[Any, Callable[..., Any]], ...] = (
    (Tensor, Walk._tensor), (nn.Module, Walk._module), (types.FunctionType, Walk._function), (types.MethodType, Walk._method),
    (functools.partial, Walk._partial), (list, Walk._list), (dict, Walk._dict), (tuple, Walk._tuple), (type, Walk._type),
    (types.ModuleType, Walk._namespace), ((types.BuiltinFunctionType, types.MethodWrapperType), Walk._builtin),
)  # fmt: skip
