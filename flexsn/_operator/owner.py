"""A module that owns what its core captures: `FlexSN` without its calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from .._capture.reads import Reads, bound, lock, module_tensors
from .._capture.reads_look import look as walk
from .._torch.compiling import unseen_by_dynamo
from .dispatch import look


class Tensors(nn.Module):
    """Holds parameters, buffers and modules under names."""

    def register(self, name: str, value: Tensor | nn.Module) -> None:
        for held in (self._parameters, self._buffers, self._modules):  # a value of another kind
            held.pop(name, None)
        if isinstance(value, nn.Module):
            self.add_module(name, value)
        elif isinstance(value, nn.Parameter):
            self.register_parameter(name, value)
        else:
            self.register_buffer(name, value)


def _free_name(wanted: str, taken: Collection[str]) -> str:
    """A name that is not taken, and that no attribute of `nn.Module` has."""
    name = wanted
    while name in taken or hasattr(Tensors, name) or name in vars(nn.Module()):
        name += "_"
    return name


def free_names(wanted: Sequence[str]) -> tuple[str, ...]:
    found = list[str]()
    for name in wanted:
        found.append(_free_name(name, found))
    return tuple(found)


def _holds(module: nn.Module, wanted: nn.Module) -> bool:
    """Whether a module has another one in it. By its own means: PyTorch's walks come here."""
    seen, stack = set[int](), [module]
    while stack:
        found = stack.pop()
        if found is wanted:
            return True
        if id(found) not in seen:
            seen.add(id(found))
            stack += [child for child in found._modules.values() if child is not None]
    return False


class CoreOwner(nn.Module):
    """A module with a core, whose captured tensors and modules are its own, by name.

    Attributes:
        core: any callable; an `nn.Module` is a submodule.
        captured: what any other core captured; None if nothing.
        holds_copies: whether it is a copy whose core captures modules.
    """

    def __init__(self, core: Callable[..., Any]):
        super().__init__()
        self.core = core
        self.captured: Tensors | None = None
        self.holds_copies = False
        self._reads: Any = None
        self._copied: Any = None  # what the core reads where a copy's modules stand in place of those that it captures
        self._names: dict[str, str] = {}  # path of a captured object -> its name in `captured`
        self._origin: dict[str, Any] = {}  # what the path led to when it was registered
        self._holders: dict[str, nn.Module] = {}  # by path, captured networks that hold this module: no parts of it

    @property
    def _core(self) -> Callable[..., Any]:
        """Past `nn.Module.__getattr__`: where an export finds a module under two names, that makes a stand-in at every access."""
        own, modules = self.__dict__, self.__dict__["_modules"]
        return modules["core"] if "core" in modules else own["core"]

    def _look(self) -> None:
        """Look at the core, and register what it captures."""
        with lock:
            seen = look(self._core)
            if seen is not self._reads:
                self._reads = seen
                self._register(seen)

    def _register(self, seen: Reads) -> None:
        for path, slot in seen.objects.items():
            value = slot.get()
            if isinstance(self.core, nn.Module) or self._origin.get(path) is value:
                continue
            unpickled = path in self._names and path not in self._origin
            self._origin[path] = value
            if unpickled:  # what came with the pickle stands for what the core reads here
                self.holds_copies |= isinstance(value, nn.Module) and self._own(path) is not value
                continue
            if path not in self._names:
                self._names[path] = _free_name(path.replace(".", "_"), self._names.values())
            self.captured = self.captured or Tensors()
            self.captured.register(self._names[path], value)

    def _own(self, path: str) -> Any:
        return self._holders[path] if path in self._holders else getattr(self.captured, self._names[path])

    def _replaced(self) -> dict[str, Any]:
        """By path, the objects that this module uses in place of those that the core captures."""
        return {path: self._own(path) for path in self._names if path in self._reads.objects}

    def _part_from_holders(self) -> None:
        """A core that is a closure over its network (`self.w`) captures what holds this neuron: a circle of modules, which
        PyTorch would walk for ever. When the neuron was made, the network did not hold it yet."""
        modules = {} if self.captured is None else self.captured._modules
        for path, name in self._names.items():
            found = modules.get(name)
            if found is not None and _holds(found, self):
                self._holders[path] = found
                del modules[name]

    @unseen_by_dynamo
    def look(self) -> tuple[Reads, dict[str, Any]]:
        """What the core reads now, and the objects that this module uses in place of captured ones, by path."""
        if self._reads is None or not self._reads.of_now(self._core):
            self._look()
        replaced = self._replaced()
        if any(isinstance(own, nn.Module) and own is not self._reads.objects[path].get() for path, own in replaced.items()):
            with bound(self._reads, replaced):  # a copy's modules have flags and numbers of their own
                if self._copied is None or not self._copied.current():
                    self._copied = walk(self._core)
            return self._copied, replaced
        return self._reads, replaced

    def with_its_own(self) -> AbstractContextManager[None]:
        """While inside, the core holds the objects of this module."""
        return bound(*self.look())

    def captured_places(self) -> dict[int, tuple[str, ...]]:
        """Of every tensor that the core captured, by its `id`: the attributes that lead to this module's own."""
        reads, replaced = self.look()
        places: dict[int, tuple[str, ...]] = {}
        for path in replaced:
            if path in self._holders:
                continue
            original, start = reads.objects[path].get(), ("captured", self._names[path])
            if isinstance(original, nn.Module):
                places |= {id(t): (*start, *name.removeprefix(".").split(".")) for name, t in module_tensors(original, "").items()}
            else:
                places[id(original)] = start
        return places

    # what PyTorch calls first wherever it walks modules without remembering which it has seen
    def named_children(self):
        self._part_from_holders()
        return super().named_children()

    def named_modules(self, *args, **kwargs):
        self._part_from_holders()
        return super().named_modules(*args, **kwargs)

    def train(self, mode: bool = True):
        self._part_from_holders()
        return super().train(mode)

    def apply(self, fn):
        self._part_from_holders()
        return super().apply(fn)

    def state_dict(self, *args, **kwargs):
        self._part_from_holders()
        return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args):
        self._part_from_holders()
        super()._load_from_state_dict(*args)

    # --- copies ---------------------------------------------------------------------------------------------------------
    def _apply(self, fn, recurse=True):
        self._part_from_holders()
        return super()._apply(fn, recurse)

    def __deepcopy__(self, memo):
        return self._copy(self.__getstate__(), memo)

    def _copy(self, state: dict[str, Any], memo: dict) -> Any:
        """A copy with copies of these attributes. The core, if it is no module, is shared."""
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        for key, value in state.items():
            shared = key == "core" and not isinstance(value, nn.Module)
            new.__dict__[key] = value if shared else copy.deepcopy(value, memo)
        new._origin = dict(self._origin)
        new.holds_copies = bool(new._holders) or (new.captured is not None and bool(new.captured._modules))
        return new

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()  # without what `compile()` bound to this very module
        state["_reads"] = state["_copied"] = None
        state["_origin"] = {}  # a function that is pickled by name reads other objects where it is loaded
        return state
