"""The look at a core: everything that it can reach by name, with the places that hold it and a fingerprint of the Python values.

What the look finds is kept, checked and exchanged in `_capture/reads.py`.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import gc
import random
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from .reads import KEPT, Reads
from .reads_code import function_in, global_names, is_library, is_taken_as_it_is, members, names_in, slot_names, taken_whole
from .slots import MISSING, Attributes, Child, Contents, Core, Slot

_SCALARS = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format, range, slice)
_MODULE_INTERNALS = frozenset(vars(nn.Module()))
_OPAQUE = {"torch", "numpy"}  # packages whose objects are taken as they are
_SETTINGS = ("torch.optim.lr_scheduler", "torch.distributions")
_IN_CLASSES = (*_SCALARS, Tensor, list, tuple, dict, functools.partial)  # attributes of classes that are looked into
_VIEWS = (types.MappingProxyType, type(vars(types).keys()), type(vars(types).values()), type(vars(types).items()))
_MAX_DEPTH = 32
_CARRIED = frozenset({"states", "state_seqs"})  # of a neuron: what a call left
_BY_ATTRIBUTE = frozenset({"__getattr__", "__getattribute__", "__setattr__", "__delattr__"})  # methods that it calls for it


def look(core: Callable) -> Reads:
    """Walk everything that the core can reach by name."""
    walker = _Walker(core)
    walker.visit("core", core, Slot("core", weakref.ref(core)) if isinstance(core, nn.Module) else None, 0)
    walker.finish()
    walker.reads.fingerprint = tuple(walker.constants)
    with contextlib.suppress(TypeError):  # it has no weak references
        walker.reads.of = weakref.ref(core)
    return walker.reads


class _Walker:
    def __init__(self, core: Callable) -> None:
        self.core = core
        self.reads = Reads()
        self.constants: list[tuple] = []
        self.seen: dict[int, tuple[str, Slot | None]] = {}  # by identity, the first path and place
        self.held: list[Any] = []
        self.named_anywhere: set[str] = set()  # in the functions that were seen
        self.waiting: dict[str, list[Callable[[], None]]] = {}  # visits to be made if that name is among them
        self.networks: dict[int, bool] = {}  # by identity of modules, whether the core belongs to them
        self.kept: dict[int, dict[str, list[Callable[[], None]]]] = {}  # of networks, by name: visits of what the core has not named
        self.met: list[nn.Module] = []  # these networks
        self.hidden = False  # whether something was met that cannot be looked into and may lead to a network
        self.passed_on: set[int] = set()  # networks of which the core reads more than attributes by their names

    def finish(self) -> None:
        """What may be read by a name that any of the functions has."""
        while True:
            if self.hidden:
                for module in self.met:
                    self.takes_whole(module)
            found = [name for name in self.waiting if name in self.named_anywhere]
            if not found:
                return
            for name in found:
                for visit in self.waiting.pop(name):
                    visit()

    def slot(self, path: str, holder: Any, key: Any, depth: int, *, whole: bool = True) -> None:
        place = Slot(path, holder, key)
        value = place.get()
        self.reads.watched.append((place, value))
        if value is not MISSING:
            self.visit(path, value, place, depth, whole=whole)

    def visit(self, path: str, value: Any, place: Slot | None, depth: int, *, whole: bool = True) -> None:
        """Look into what a place holds.

        Args:
            whole: the core may do anything with it from there; else it reads attributes by their names (of a network), or nothing (of
                a function or class that is called from elsewhere only).
        """
        if isinstance(value, _SCALARS):
            plain: Any = next(base for base in type(value).__mro__ if is_library(base.__module__))  # whose `repr` tells values apart
            self.constants.append((path, type(value).__name__, plain.__repr__(value)))
            if plain is type(value) or id(value) in self.seen:
                return
            self.seen[id(value)] = path, place
            self.held.append(value)
            self.attributes(path, value, depth)
            return
        if whole:
            self.takes_whole(value)
        identity = id(vars(value)) if isinstance(value, nn.Module) else id(value)  # of modules that share their contents: one
        if identity in self.seen:
            self.reads.cyclic |= value is self.core
            first, before = self.seen[identity]
            self.constants.append((path, "same as", first))
            if isinstance(value, (Tensor, nn.Module, tuple)) and before is not None and _settable(place):
                self.reads.again.append((place, before))
            return
        if depth > _MAX_DEPTH or (isinstance(value, Tensor) and place is None):  # which may stand elsewhere too
            self.opaque(path, value)
            return
        self.seen[identity] = path, place
        self.held.append(value)  # while the walk lasts, so that ids stay unique
        if isinstance(value, Tensor):
            self.constants.append((path, "tensor"))
            if place is not None:
                self.reads.objects[path.removeprefix("core.")] = place
        elif isinstance(value, nn.Module):
            if _settable(place):
                self.reads.objects[path.removeprefix("core.")] = place
            self.module(path, value, place, depth)
        elif isinstance(value, functools.partial):
            self.fixed(f"{path}.func" if isinstance(value.func, nn.Module) else path, value.func, depth)
            self.items(path, value.args, Slot(path, self.holder(value, value), "args"), depth)
            self.items(path, value.keywords, None, depth)
            self.names(f"{path}.attributes", vars(value), list(vars(value)), depth)
        elif isinstance(value, types.MethodType):
            self.visit(path, value.__func__, None, depth + 1, whole=False)
            self.calls(value.__func__, value.__self__)
            self.fixed(f"{path}.self", value.__self__, depth, whole=not isinstance(value.__func__, types.FunctionType))
        elif isinstance(value, types.FunctionType):
            self.function(path, value, depth)
        elif isinstance(value, (list, tuple, dict, collections.deque)):
            self.items(path, value, place, depth)
            if not is_library(type(value).__module__):
                self.attributes(path, value, depth)
        elif isinstance(value, (set, frozenset)):
            self.set(path, value)
        elif isinstance(value, _VIEWS):
            self.visit(path, gc.get_referents(value)[0], None, depth + 1)  # what it shows
        elif isinstance(value, weakref.ref):
            self.visit(path, value(), None, depth + 1)
        elif isinstance(value, contextvars.ContextVar):
            self.slot(f"{path}.value", value, None, depth + 1)
        elif isinstance(value, type):
            self.cls(path, value, depth)
        elif isinstance(value, random.Random) or (isinstance(value, Iterator) and is_library(type(value).__module__)):
            self.opaque(path, value, place)
        elif isinstance(value, (types.ModuleType, types.BuiltinFunctionType, types.MethodWrapperType)):
            self.constants.append((path, type(value).__qualname__, value.__name__))
            if isinstance(value, types.ModuleType) and not is_library(value.__name__):
                for name in list(vars(value)):
                    self.later(name, functools.partial(self.namespace, path, value, (name,), depth))
            owner = getattr(value, "__self__", None)
            if isinstance(owner, Iterator) and is_library(type(owner).__module__):  # `next_id = ids.__next__`
                self.opaque(f"{path}.self", owner, place)
            elif not isinstance(owner, (types.ModuleType, type(None))):  # a method of a list, of a tensor
                self.fixed(f"{path}.self", owner, depth)
        elif slot_names(type(value)) or (isinstance(getattr(value, "__dict__", None), dict) and not _is_opaque(type(value))):
            self.attributes(path, value, depth)
        else:
            self.opaque(path, value, place)

    def attributes(self, path: str, value: Any, depth: int) -> None:
        """The class of an object, and what it holds by names."""
        self.slot(f"{path}.type", self.holder(value, Attributes(value)), "__class__", depth + 1)
        namespace = getattr(value, "__dict__", None)
        if isinstance(namespace, dict):
            self.names(path, namespace, list(namespace), depth)
        for name in slot_names(type(value)):
            self.slot(f"{path}.{name}", self.holder(value, Attributes(value)), name, depth + 1)

    def holder(self, value: Any, own: Any) -> Any:
        """`own`, which holds `value`, unless that is the core: what is known of a core is kept as long as the core lives."""
        if value is self.core:
            with contextlib.suppress(TypeError):  # it has no weak references: nothing is kept
                return Core(weakref.ref(value))
        return own

    # --- the network that the neuron is part of -----------------------------------------------------------------------
    # A core may lead to it, as a method of it or a closure over it, and so to all that it keeps: what its `forward` computed, logs of
    # a training loop. While the core reads nothing of it but attributes by their names (`self.w`), only these are the core's.
    def is_network(self, module: nn.Module) -> bool:
        """Whether the neuron is in it or the core is its method, and nothing but code of the user's reads its attributes."""
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        users = all(base in (nn.Module, object) or not is_library(base.__module__) for base in type(module).__mro__)
        return users and not any(hooks) and id(module) not in self.passed_on and self.holds_the_core(module)

    def holds_the_core(self, module: nn.Module) -> bool:
        if id(module) not in self.networks:
            self.networks[id(module)] = False  # meanwhile, for modules in a circle
            own = vars(module).get("core") is self.core or getattr(self.core, "__self__", None) is module
            self.networks[id(module)] = own or any(self.holds_the_core(child) for child in module._modules.values() if child is not None)
        return self.networks[id(module)]

    def network(self, path: str, module: nn.Module, names: Sequence[str], depth: int) -> None:
        """Keep visits of its attributes, and what its methods name, until the core names these."""
        kept = self.kept.setdefault(id(module), {})
        self.met.append(module)
        for name in names:
            kept.setdefault(name, []).append(functools.partial(self.slot, f"{path}.{name}", vars(module), name, depth + 1))
        for name, raw in members(type(module)):
            fn = function_in(raw)
            if isinstance(fn, types.FunctionType):
                kept.setdefault(name, []).append(functools.partial(self.calls, fn, module))
            elif not isinstance(raw, _IN_CLASSES):  # which may be a method made by a decorator
                kept.setdefault(name, []).append(functools.partial(self.takes_whole, module))
        for name in kept:
            self.later(name, functools.partial(self.name_of_network, module, name))
        for name in _BY_ATTRIBUTE:
            self.name_of_network(module, name)

    def name_of_network(self, module: nn.Module, name: str) -> None:
        for visit in self.kept[id(module)].pop(name, ()):
            visit()

    def calls(self, fn: Any, owner: Any = None) -> None:
        """The core may call a function: what it names may be read, of its owner more if it takes that whole."""
        if not isinstance(fn, types.FunctionType) or is_taken_as_it_is(fn):
            return
        self.named_anywhere.update(names_in(fn.__code__))
        if isinstance(owner, nn.Module) and (not fn.__code__.co_argcount or fn.__code__.co_varnames[0] in taken_whole(fn.__code__)):
            self.takes_whole(owner)

    def takes_whole(self, value: Any) -> None:
        """The core may do anything with it: call it, pass it on, ask for attributes whose names it computes."""
        if isinstance(value, types.FunctionType):
            self.calls(value)
        elif isinstance(value, type):
            for _, raw in members(value):
                self.calls(function_in(raw))
        elif isinstance(value, dict):
            for module in self.met:
                if vars(module) is value:
                    self.takes_whole(module)
        elif isinstance(value, nn.Module) and self.holds_the_core(value) and id(value) not in self.passed_on:
            self.passed_on.add(id(value))
            self.hidden |= vars(value).get("core") is self.core  # a neuron, which has the core, which may have the network
            for name in list(self.kept.get(id(value), ())):
                self.name_of_network(value, name)
            for child in value._modules.values():
                self.takes_whole(child)

    def later(self, name: str, visit: Callable[[], None]) -> None:
        self.waiting.setdefault(name, []).append(visit)

    def names(self, path: str, namespace: Any, names: Sequence[Any], depth: int) -> None:
        self.reads.sizes.append((namespace, len(namespace)))
        if isinstance(namespace, dict) and len(names) == len(namespace) > 1:  # not of a module
            self.reads.orders.append((namespace, list(namespace)))
        for name in names:
            self.slot(f"{path}.{name}", namespace, name, depth + 1)

    def fixed(self, path: str, value: Any, depth: int, *, whole: bool = True) -> None:
        """What its holder never exchanges."""
        self.visit(path, value, Slot(path, Contents(value)) if isinstance(value, nn.Module) else None, depth + 1, whole=whole)

    def opaque(self, path: str, value: Any, place: Slot | None = None) -> None:
        """Something that cannot be looked into: the same object counts as the same value."""
        self.hidden |= not (isinstance(value, (Tensor, types.FunctionType)) or _is_opaque(type(value)))
        if isinstance(value, Iterator):
            self.reads.iterators.append(place or Slot(path, Contents(value)))
        self.reads.opaque.append(value)
        self.constants.append((path, "object", id(value)))

    def items(self, path: str, values: Any, place: Slot | None, depth: int) -> None:
        self.constants.append((path, type(values).__name__, len(values)))
        if isinstance(values, tuple):  # which does not change: the place that holds it is watched
            for k, value in enumerate(values):
                self.visit(f"{path}.{k}", value, Slot(f"{path}.{k}", place or values, k), depth + 1)
        else:
            self.names(path, values, list(values) if isinstance(values, dict) else range(len(values)), depth)

    def set(self, path: str, values: Collection[Any]) -> None:
        """By its scalars, in order; what else it holds has no place."""
        self.reads.sizes.append((values, len(values)))
        self.reads.orders.append((values, list(values)))
        self.constants.append((path, type(values).__name__, tuple(sorted(map(repr, filter(_is_scalar, values))))))
        for value in values:
            if not _is_scalar(value):
                self.opaque(path, value)
                self.takes_whole(value)

    def module(self, path: str, module: nn.Module, place: Slot | None, depth: int) -> None:
        network = self.is_network(module)
        self.slot(f"{path}.type", self.holder(module, Attributes(module)), "__class__", depth + 1, whole=not network)
        self.slot(f"{path}.training", vars(module), "training", depth + 1)
        skipped = _MODULE_INTERNALS | getattr(type(module), "unread", frozenset())
        own = [n for n in vars(module) if n not in skipped]
        if getattr(type(module), "runs_sequences", False):  # a neuron; of this very core, if its closure leads here
            if vars(module).get("core", module) is not self.core:
                for name in _CARRIED.intersection(own):
                    self.later(name, functools.partial(self.slot, f"{path}.{name}", vars(module), name, depth + 1))
            own = [n for n in own if n not in _CARRIED]
        if network:
            self.network(path, module, own, depth)
            own = []
        self.names(path, vars(module), own, depth)
        for name in slot_names(type(module)):
            self.slot(f"{path}.{name}", self.holder(module, Attributes(module)), name, depth + 1)
        for table in (module._parameters, module._buffers, module._modules):
            self.reads.sizes.append((table, len(table)))
            if len(table) > 1:
                self.reads.orders.append((table, list(table)))
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                self.constants.append((f"{path}.{name}", tensor is None))
                self.reads.watched.append((Slot(path, table, name), tensor))
        for name, child in module._modules.items():
            self.reads.watched.append((Slot(path, module._modules, name), child))
            if child is not None:
                inside = Slot(path, Child(place), name) if place else None
                self.visit(f"{path}.{name}", child, inside, depth + 1, whole=not self.holds_the_core(child))
                if self.holds_the_core(child):
                    self.later(name, functools.partial(self.takes_whole, child))
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks):
            self.reads.sizes.append((hooks, len(hooks)))
            for i, (key, hook) in enumerate(hooks.items()):
                place = Slot(f"{path}.hook", hooks, key)
                self.reads.watched.append((place, hook))
                self.visit(f"{path}.hook{i}", hook, place, depth + 1)

    def cls(self, path: str, cls: type, depth: int) -> None:
        self.constants.append((path, "class", cls.__qualname__))
        if is_library(cls.__module__):
            return
        for base in cls.__mro__:
            if is_library(base.__module__):
                continue
            self.reads.sizes.append((vars(base), len(vars(base))))
            for name, raw in list(vars(base).items()):
                member = function_in(raw)
                place = Slot(f"{path}.{name}", base, name)
                if isinstance(member, types.FunctionType):
                    self.reads.watched.append((place, raw))
                    self.visit(place.path, member, None, depth + 1, whole=False)
                elif not name.startswith("__"):
                    self.reads.watched.append((place, raw))
                    if isinstance(member, _IN_CLASSES):
                        self.visit(place.path, member, place, depth + 1)
                    else:  # a class may lead anywhere: to a trainer, to the network that this neuron is part of
                        self.constants.append((place.path, type(member).__qualname__))
                        self.later(name, functools.partial(self.visit, place.path, member, place, depth + 1))

    def namespace(self, path: str, module: types.ModuleType, names: Sequence[str], depth: int) -> None:
        """The attributes of a module that a function names, also of modules inside it."""
        if is_library(module.__name__) or depth > _MAX_DEPTH:
            return
        for name in names:
            value = vars(module).get(name, MISSING)
            if isinstance(value, types.ModuleType):
                self.namespace(f"{path}.{name}", value, names, depth + 1)
            elif value is not MISSING:
                self.slot(f"{path}.{name}", vars(module), name, depth + 1)

    def function(self, path: str, fn: types.FunctionType, depth: int) -> None:
        self.constants.append((path, "code", fn.__code__, fn.__code__.co_filename))  # code of two files may be equal; lines differ
        for attribute in ("__code__", "__defaults__", "__kwdefaults__") if depth else ():  # a slot of the core would keep it alive
            self.reads.watched.append((Slot(path, fn, attribute), getattr(fn, attribute)))
        if is_taken_as_it_is(fn):
            if fn.__closure__:  # as decorators leave them: one code for many functions
                self.opaque(path, fn)
            return
        names = names_in(fn.__code__)
        whole = taken_whole(fn.__code__)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            if name == "__class__":  # of `super()`
                self.slot(f"{path}.{name}", cell, None, depth + 1, whole=False)
            else:
                self.named(f"{path}.{name}", cell, None, names, depth, whole=name in whole)
        set_there = global_names(fn.__code__, "STORE_GLOBAL")
        for name in dict.fromkeys((*global_names(fn.__code__), *set_there)):
            if name.startswith("@"):  # pytest's, in the asserts of tests
                continue
            if name in fn.__globals__:
                self.named(f"{path}.{name}", fn.__globals__, name, names, depth, whole=name in whole)
            elif name in set_there:
                self.reads.watched.append((Slot(f"{path}.{name}", fn.__globals__, name), MISSING))
        attributes = [name for name in vars(fn) if name != KEPT]
        self.names(f"{path}.attributes", vars(fn), attributes, depth)  # none, too: it may set one
        for attribute in ("__defaults__", "__kwdefaults__"):
            values = getattr(fn, attribute)
            if values:
                self.items(f"{path}.defaults", values, Slot(path, fn, attribute), depth)

    def named(self, path: str, holder: Any, key: Any, names: Sequence[str], depth: int, *, whole: bool) -> None:
        """What a function means by a name; of a module, the attributes that it names."""
        value = Slot(path, holder, key).get()
        if isinstance(value, types.ModuleType):
            self.namespace(path, value, names, depth)
        else:
            self.slot(path, holder, key, depth + 1, whole=whole or not isinstance(value, nn.Module))


def _settable(place: Slot | None) -> TypeGuard[Slot]:
    """Whether an object may be put there. Children are no places of their own: the outermost module stands for them."""
    return place is not None and not isinstance(place.holder, Child)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, _SCALARS)


def _is_opaque(cls: type) -> bool:
    """Whether objects of a class are taken as they are: those of PyTorch and NumPy, but for those that are settings of others."""
    return cls.__module__.partition(".")[0] in _OPAQUE and not cls.__module__.startswith(_SETTINGS)
