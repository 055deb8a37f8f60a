"""`package.module:name` on the command line -> the object."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from .outcome import UsageError

_FORM = "Write `package.module:name` or `path/to/file.py:name`; the name is a core, a flexsn.FlexSN or a network of them."


def load_target(text: str) -> Callable[..., Any]:
    """The core, neuron or network that `text` names.

    Raises:
        UsageError: there is none.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"`{text}` does not say where the core is", hint=_FORM)
    found: Any = _module(place)
    for part in name.split("."):
        found = _attribute(found, part, place)
    if inspect.isclass(found):
        found = _instance(found, text)
    if not callable(found):
        raise UsageError(f"`{text}` is {type(found).__name__}, not a core", hint=_FORM)
    return found


def _module(place: str) -> ModuleType:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return _from_file(place) if place.endswith(".py") else importlib.import_module(place)
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            hint = f"It is looked for in {os.getcwd()} and among the installed packages. {_FORM}"
            raise UsageError(f"there is no module `{error.name}`", hint=hint) from None
        raise _failed(place, error) from error
    except Exception as error:  # whatever the user's module raises while it is imported
        raise _failed(place, error) from error


def _from_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise UsageError(f"there is no file `{path}`", hint=_FORM)
    name = os.path.basename(path).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, os.path.abspath(path))
    assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec.loader.exec_module(module)
    return module


def _failed(place: str, error: Exception) -> UsageError:
    return UsageError(f"`{place}` cannot be imported: {type(error).__name__}: {error}", hint="Import it in Python to see where.")


def _attribute(owner: Any, name: str, place: str) -> Any:
    if hasattr(owner, name):
        return getattr(owner, name)
    near = difflib.get_close_matches(name, dir(owner), n=3, cutoff=0.5)
    own = getattr(owner, "__name__", None)
    functions = [n for n, value in vars(owner).items() if callable(value) and not n.startswith("_") and _defined_in(value, own)]
    listed = near or functions[:8]
    hint = f"It has {', '.join(f'`{n}`' for n in listed)}." if listed else _FORM
    raise UsageError(f"`{place}` has no `{name}`", hint=hint)


def _defined_in(value: Any, module: str | None) -> bool:
    return getattr(value, "__module__", None) == module or isinstance(value, nn.Module)


def _instance(cls: type, text: str) -> Any:
    """A module class that needs no arguments stands for one of its instances."""
    try:
        return cls()
    except TypeError as error:
        raise UsageError(
            f"`{text}` is a class, and cannot be made without arguments: {error}", hint="Name an instance of it: `neuron = Class(...)`."
        ) from None
