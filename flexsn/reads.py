"""What a core reads besides its arguments: captured tensors, modules and Python values, each by its access path.

Identity is by path and not by object: `functional_call`, parametrize, `load_state_dict(assign=True)` and FSDP2 swap
the objects, so every call looks again. Tensors become extra params of the core; Python values (floats, flags,
`.training`, the code of helper functions) are constants of the capture and form its `fingerprint`.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dis
import functools
import gc
import operator
import os
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from .slots import MISSING, Attributes, Child, Contents, Core, Slot

_SCALARS = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format, range, slice)
_MODULE_INTERNALS = frozenset(vars(nn.Module()))
# Modules of flexsn whose functions are taken as they are, as PyTorch's
_OWN = ("flexsn", "flexsn.settings", "flexsn.surrogate", "flexsn.module", "flexsn.scan", "flexsn.neurons")
_OPAQUE = {"torch", "numpy"}  # packages whose objects are taken as they are
_SETTINGS = ("torch.optim.lr_scheduler", "torch.distributions")
_IN_CLASSES = (*_SCALARS, Tensor, list, tuple, dict, functools.partial)  # attributes of classes that are looked into
_VIEWS = (types.MappingProxyType, type(vars(types).keys()), type(vars(types).values()), type(vars(types).items()))
_MAX_DEPTH = 32
_PYTHONS = Path(os.__file__).parent
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
    orders: list[tuple[dict, list]] = field(default_factory=list)  # keys of dicts that may be iterated
    iterators: list[Slot] = field(default_factory=list)  # places of those that cannot be looked into
    opaque: list[Any] = field(default_factory=list)  # what the fingerprint names by id(): to be kept while it is in use
    signatures: dict[tuple[int, int, int], Any] = field(default_factory=dict)  # by counts of operands, made by `scan`
    own: tuple = ()  # `own_of` the core
    calls: dict[tuple | None, Any] = field(default_factory=dict)  # by kinds of operands, made by `scan`

    cyclic: bool = False  # whether the core can be reached from what it reads
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

    def finish(self) -> None:
        """What may be read by a name that any of the functions has."""
        while found := [name for name in self.waiting if name in self.named_anywhere]:
            for name in found:
                for visit in self.waiting.pop(name):
                    visit()

    def slot(self, path: str, holder: Any, key: Any, depth: int) -> None:
        place = Slot(path, holder, key)
        value = place.get()
        self.reads.watched.append((place, value))
        if value is not MISSING:
            self.visit(path, value, place, depth)

    def visit(self, path: str, value: Any, place: Slot | None, depth: int) -> None:
        if isinstance(value, _SCALARS):
            plain: Any = next(base for base in type(value).__mro__ if _is_library(base.__module__))  # whose `repr` tells values apart
            self.constants.append((path, type(value).__name__, plain.__repr__(value)))
            if plain is type(value) or id(value) in self.seen:
                return
            self.seen[id(value)] = path, place
            self.held.append(value)
            self.attributes(path, value, depth)
            return
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
            self.visit(path, value.__func__, None, depth + 1)
            self.fixed(f"{path}.self", value.__self__, depth)
        elif isinstance(value, types.FunctionType):
            self.function(path, value, depth)
        elif isinstance(value, (list, tuple, dict, collections.deque)):
            self.items(path, value, place, depth)
            if not _is_library(type(value).__module__):
                self.attributes(path, value, depth)
        elif isinstance(value, _VIEWS):
            self.visit(path, gc.get_referents(value)[0], None, depth + 1)  # what it shows
        elif isinstance(value, weakref.ref):
            self.visit(path, value(), None, depth + 1)
        elif isinstance(value, contextvars.ContextVar):
            self.slot(f"{path}.value", value, None, depth + 1)
        elif isinstance(value, type):
            self.cls(path, value, depth)
        elif isinstance(value, random.Random) or (isinstance(value, Iterator) and _is_library(type(value).__module__)):
            self.opaque(path, value, place)
        elif isinstance(value, (types.ModuleType, types.BuiltinFunctionType, types.MethodWrapperType)):
            self.constants.append((path, type(value).__qualname__, value.__name__))
            if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
                for name in list(vars(value)):
                    self.later(name, functools.partial(self.namespace, path, value, (name,), depth))
            owner = getattr(value, "__self__", None)
            if isinstance(owner, Iterator) and _is_library(type(owner).__module__):  # `next_id = ids.__next__`
                self.opaque(f"{path}.self", owner, place)
            elif not isinstance(owner, (types.ModuleType, type(None))):  # a method of a list, of a tensor
                self.fixed(f"{path}.self", owner, depth)
        elif _slot_names(type(value)) or (isinstance(getattr(value, "__dict__", None), dict) and not _is_opaque(type(value))):
            self.attributes(path, value, depth)
        else:
            self.opaque(path, value, place)

    def attributes(self, path: str, value: Any, depth: int) -> None:
        """The class of an object, and what it holds by names."""
        self.slot(f"{path}.type", self.holder(value, Attributes(value)), "__class__", depth + 1)
        namespace = getattr(value, "__dict__", None)
        if isinstance(namespace, dict):
            self.names(path, namespace, list(namespace), depth)
        for name in _slot_names(type(value)):
            self.slot(f"{path}.{name}", self.holder(value, Attributes(value)), name, depth + 1)

    def holder(self, value: Any, own: Any) -> Any:
        """`own`, which holds `value`, unless that is the core: what is known of a core is kept as long as the core lives."""
        if value is self.core:
            with contextlib.suppress(TypeError):  # it has no weak references: nothing is kept
                return Core(weakref.ref(value))
        return own

    def later(self, name: str, visit: Callable[[], None]) -> None:
        self.waiting.setdefault(name, []).append(visit)

    def names(self, path: str, namespace: Any, names: Sequence[Any], depth: int) -> None:
        self.reads.sizes.append((namespace, len(namespace)))
        if isinstance(namespace, dict) and len(names) == len(namespace) > 1:  # not of a module
            self.reads.orders.append((namespace, list(namespace)))
        for name in names:
            self.slot(f"{path}.{name}", namespace, name, depth + 1)

    def fixed(self, path: str, value: Any, depth: int) -> None:
        """What its holder never exchanges."""
        self.visit(path, value, Slot(path, Contents(value)) if isinstance(value, nn.Module) else None, depth + 1)

    def opaque(self, path: str, value: Any, place: Slot | None = None) -> None:
        """Something that cannot be looked into: the same object counts as the same value."""
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

    def module(self, path: str, module: nn.Module, place: Slot | None, depth: int) -> None:
        self.slot(f"{path}.type", self.holder(module, Attributes(module)), "__class__", depth + 1)
        self.slot(f"{path}.training", vars(module), "training", depth + 1)
        skipped = _MODULE_INTERNALS | getattr(type(module), "unread", frozenset())
        if vars(module).get("core", module) is self.core:  # the neuron of this very core, which its closure leads to
            skipped |= {"states", "state_seqs"}
        self.names(path, vars(module), [n for n in vars(module) if n not in skipped], depth)
        for name in _slot_names(type(module)):
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
                self.visit(f"{path}.{name}", child, Slot(path, Child(place), name) if place else None, depth + 1)
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks):
            self.reads.sizes.append((hooks, len(hooks)))
            for i, (key, hook) in enumerate(hooks.items()):
                place = Slot(f"{path}.hook", hooks, key)
                self.reads.watched.append((place, hook))
                self.visit(f"{path}.hook{i}", hook, place, depth + 1)

    def cls(self, path: str, cls: type, depth: int) -> None:
        self.constants.append((path, "class", cls.__qualname__))
        if _is_library(cls.__module__):
            return
        for base in cls.__mro__:
            if _is_library(base.__module__):
                continue
            self.reads.sizes.append((vars(base), len(vars(base))))
            for name, raw in list(vars(base).items()):
                member = _function_in(raw)
                place = Slot(f"{path}.{name}", base, name)
                if isinstance(member, types.FunctionType):
                    self.reads.watched.append((place, raw))
                    self.visit(place.path, member, None, depth + 1)
                elif not name.startswith("__"):
                    self.reads.watched.append((place, raw))
                    if isinstance(member, _IN_CLASSES):
                        self.visit(place.path, member, place, depth + 1)
                    else:  # a class may lead anywhere: to a trainer, to the network that this neuron is part of
                        self.constants.append((place.path, type(member).__qualname__))
                        self.later(name, functools.partial(self.visit, place.path, member, place, depth + 1))

    def namespace(self, path: str, module: types.ModuleType, names: Sequence[str], depth: int) -> None:
        """The attributes of a module that a function names, also of modules inside it."""
        if _is_library(module.__name__) or depth > _MAX_DEPTH:
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
        if _is_library(fn.__module__ or "") and _is_library(fn.__globals__.get("__name__", "")):  # decorators copy the first
            if fn.__closure__:  # as decorators leave them: one code for many functions
                self.opaque(path, fn)
            return
        names = _names(fn.__code__)
        self.named_anywhere.update(names)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            self.named(f"{path}.{name}", cell, None, names, depth)
        set_there = _global_names(fn.__code__, "STORE_GLOBAL")
        for name in dict.fromkeys((*_global_names(fn.__code__), *set_there)):
            if name.startswith("@"):  # pytest's, in the asserts of tests
                continue
            if name in fn.__globals__:
                self.named(f"{path}.{name}", fn.__globals__, name, names, depth)
            elif name in set_there:
                self.reads.watched.append((Slot(f"{path}.{name}", fn.__globals__, name), MISSING))
        attributes = [name for name in vars(fn) if name != KEPT]
        self.names(f"{path}.attributes", vars(fn), attributes, depth)  # none, too: it may set one
        for attribute in ("__defaults__", "__kwdefaults__"):
            values = getattr(fn, attribute)
            if values:
                self.items(f"{path}.defaults", values, Slot(path, fn, attribute), depth)

    def named(self, path: str, holder: Any, key: Any, names: Sequence[str], depth: int) -> None:
        """What a function means by a name; of a module, the attributes that it names."""
        value = Slot(path, holder, key).get()
        if isinstance(value, types.ModuleType):
            self.namespace(path, value, names, depth)
        else:
            self.slot(path, holder, key, depth + 1)


def _settable(place: Slot | None) -> TypeGuard[Slot]:
    """Whether an object may be put there. Children are no places of their own: the outermost module stands for them."""
    return place is not None and not isinstance(place.holder, Child)


def _function_in(raw: Any) -> Any:
    """Of a property, or a static or class method: the function. Anything else as it is."""
    for name in ("fget", "__func__"):
        try:
            return getattr(raw, name)
        except Exception:  # an attribute of a class may be anything, and answer to a name as it likes
            continue
    return raw


def _slot_names(cls: type) -> list[str]:
    """Attributes that objects of a class hold outside their `__dict__`."""
    found = []
    for base in cls.__mro__:
        slots = () if _is_library(base.__module__) else getattr(base, "__slots__", ()) if "__slots__" in vars(base) else ()
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _is_opaque(cls: type) -> bool:
    """Whether objects of a class are taken as they are: those of PyTorch and NumPy, but for those that are settings of others."""
    return cls.__module__.partition(".")[0] in _OPAQUE and not cls.__module__.startswith(_SETTINGS)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of those inside it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const)


def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names of globals and of attributes, also those that are given to `getattr`."""
    parts = list(_nested(code))
    texts = (const for part in parts for const in part.co_consts if isinstance(const, str) and const.isidentifier())
    return tuple(dict.fromkeys((*(name for part in parts for name in part.co_names), *texts)))


def _global_names(code: types.CodeType, *opnames: str) -> tuple[str, ...]:
    """Names that a function reads, or those of other instructions."""
    wanted = opnames or ("LOAD_GLOBAL", "LOAD_NAME")
    found = (i.argval for part in _nested(code) for i in dis.get_instructions(part) if i.opname in wanted)
    return tuple(dict.fromkeys(found))


@functools.cache
def _is_library(module: str) -> bool:
    """Modules whose functions are taken as they are: PyTorch, the standard library and flexsn itself."""
    top = module.partition(".")[0]
    own = module in _OWN or module.startswith("flexsn.neurons.")
    return own or top in {"torch", "numpy"} or (top in sys.stdlib_module_names and _is_pythons(sys.modules.get(top)))


def _is_pythons(module: types.ModuleType | None) -> bool:
    """Whether a module that is named like one of the standard library is that one, and no `trace.py` beside the user's script."""
    file = getattr(module, "__file__", None)
    return getattr(module, "__name__", None) != "__main__" and (file is None or Path(file).is_relative_to(_PYTHONS))


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
