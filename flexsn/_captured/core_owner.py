"""A module that holds a core and owns what the core's cells, defaults and partial arguments capture: `FlexSN` without its calls."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.compiling import unseen_by_dynamo
from .captured_values import CapturedValues, lock, look_again
from .rebinding import copied


class Tensors(nn.Module):
    """Holds parameters and buffers under names."""

    def register(self, name: str, value: Tensor) -> None:
        """Hold a tensor under a name: a `Parameter` as parameter, any other as buffer."""
        register(self, name, value)


def register(module: nn.Module, name: str, value: Tensor) -> None:
    """Make a tensor the module's own. Past `register_parameter`, which refuses names that the class has (a neuron's `tau`)."""
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    own, other = tables if isinstance(value, nn.Parameter) else reversed(tables)
    other.pop(name, None)  # a value of another kind
    own[name] = value  # at the place of one that was there: optimizers and averages count parameters


def free_name(wanted: str, taken: Collection[str], cls: type = Tensors) -> str:
    """Return a name that is not taken, and that no attribute of the class has."""
    name = wanted
    while name in taken or hasattr(cls, name) or name in vars(nn.Module()):
        name += "_"
    return name


def free_names(wanted: Sequence[str]) -> tuple[str, ...]:
    """Return as many different names, free in a `Tensors`."""
    found = list[str]()
    for name in wanted:
        found.append(free_name(name, found))
    return tuple(found)


class CoreOwner(nn.Module):
    """A module with a core, whose captured tensors are its own, by name.

    Attributes:
        core: any callable; an `nn.Module` is a submodule.
        changes: how often a number of it was replaced: what compiled code can look at.
    """

    changes = 0

    def __init__(self, core: Callable[..., Any]):
        super().__init__()
        self.core = core
        self._own: dict[str, str] = {}  # path of a captured tensor -> the name under which this module holds it
        self._origin: dict[str, Tensor] = {}  # what the core's cell held when it was registered
        self._seen: CapturedValues | None = None
        self._looked_at: Any = None  # the core that was looked at

    @property
    def _core(self) -> Callable[..., Any]:
        """Past `nn.Module.__getattr__`: where an export finds a module under two names, that makes a stand-in at every access."""
        own, modules = self.__dict__, self.__dict__["_modules"]
        return modules["core"] if "core" in modules else own["core"]

    @unseen_by_dynamo
    def captured_values(self) -> CapturedValues:
        """Return what the core captures, looked at again where something has changed."""
        seen, own = self._seen, self.__dict__
        core = own["core"] if "core" in own else own["_modules"]["core"]  # `_core`, of which every call would make one more frame
        if seen is not None and self._looked_at is core and seen.valid(core):
            return seen
        return self.recapture()

    def recapture(self) -> CapturedValues:
        """Look at the core again, also at what is taken as it was (arrays, sets, objects of other libraries)."""
        with lock:
            core = self._core
            seen = look_again(core, self._seen if self._looked_at is core else None)
            self._register(seen)
            seen.owned = True
            self.__dict__.update(_seen=seen, _looked_at=core)
            return seen

    def _register(self, seen: CapturedValues) -> None:
        for path in set(self._own).difference(seen.own_paths):  # the user's variable holds no tensor now
            name = self._own.pop(path)
            self._parameters.pop(name, None)
            self._buffers.pop(name, None)
            self._origin.pop(path, None)
        for path in seen.own_paths:
            value = seen.original(path)
            if path not in self._own:
                taken = {*vars(self), *self._parameters, *self._buffers, *self._modules}
                self._own[path] = free_name(path.replace(".", "_"), taken, self._reserved())
                register(self, self._own[path], value)
            elif self._origin.get(path, value) is not value:  # the user's variable holds another tensor now
                register(self, self._own[path], value)
            self._origin[path] = value
            seen.own[path] = functools.partial(_read, self, self._own[path])

    @classmethod
    def _reserved(cls) -> type:
        """Return the class whose attributes are no free names: the one that stands on this one."""
        return next(base for base in reversed(cls.__mro__) if issubclass(base, CoreOwner) and base is not CoreOwner)

    def captured_places(self) -> dict[int, tuple[str, ...]]:
        """Return, of every tensor in the core's cells, by its `id`, the attribute that leads to this module's own."""
        seen = self.captured_values()
        return {id(seen.original(path)): (self._own[path],) for path in seen.own_paths}

    # --- copies ------------------------------------------------------------------------------------------------------------
    def __deepcopy__(self, memo: dict) -> Any:
        return self._copy(self._state(), memo)

    def _state(self) -> dict[str, Any]:
        """Return `__getstate__`, also of a parametrized module: of its class PyTorch refuses it, so that it is not pickled."""
        return super(type(self), self).__getstate__() if "parametrizations" in self._modules else self.__getstate__()

    def _copy(self, state: dict[str, Any], memo: dict) -> Any:
        """Return a copy with copies of these attributes. The cells of functions are copied like `self` of a bound method."""
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        functions = {key: state.pop(key) for key, value in list(state.items()) if callable(value) and not isinstance(value, type)}
        for key, value in state.items():
            new.__dict__[key] = copy.deepcopy(value, memo)
        for key, function in functions.items():  # after the tensors, of which their cells get the copies
            new.__dict__[key] = copied(function, memo)
        return new

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()  # without what `compile()` bound to this very module
        return state | {"_seen": None, "_looked_at": None, "_origin": {}}  # what it holds stays its own, wherever it is loaded

    def _save_to_state_dict(self, *args: Any) -> None:
        """Save what the core's cells hold now, also before the next call."""
        self.captured_values()
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load into what the core's cells hold now. Take the keys of 0.1.0 too, which held what a core captured under `captured.`."""
        self.captured_values()
        start = f"{prefix}captured."
        old = {key: key.removeprefix(start).replace(".", "_") for key in state_dict if key.startswith(start)}
        if old:
            names = {path.replace(".", "_"): name for path, name in self._own.items()}
            others = {path.replace(".", "_"): tensor for path, tensor in self.captured_values().tensors().items()}
            for key, name in old.items():
                if name in names:
                    state_dict[prefix + names[name]] = state_dict.pop(key)
                elif name in others:  # what a module or a global holds
                    with torch.no_grad():
                        others[name].copy_(state_dict.pop(key))
        super()._load_from_state_dict(state_dict, prefix, *args)


def _read(module: nn.Module, name: str) -> Tensor:
    found = module._parameters.get(name)
    return found if found is not None else getattr(module, name)
