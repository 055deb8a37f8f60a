"""What a call of a module runs beside the forward of its class: hooks, and functions that were set on the instance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .._capture.signature import core_name
from .._torch.compiling import is_optimized_module
from .._viz.monitor import watches
from ..errors import InterchangeError

_SET_WEIGHTS = (BasePruningMethod, WeightNorm, SpectralNorm)  # pre-hooks that compute a weight, and leave the input as it is


def own_functions(module: nn.Module) -> list[str]:
    """Names of methods that the instance has its own of."""
    return [name for name, value in vars(module).items() if callable(value) and callable(getattr(type(module), name, None))]


def forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def check_calls(model: nn.Module) -> None:
    """A graph holds layers, and has no place for what else their calls run.

    Raises:
        InterchangeError: a module has a forward of its own or hooks, other than those that set its weights and flexsn's monitors.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        if found := _beside(module):
            raise InterchangeError(f"`{name}` ({kind}): {found[0]}" if name else f"the model ({kind}): {found[0]}", hint=found[1])


def _beside(module: nn.Module) -> tuple[str, str] | None:
    """What stands in the way, and what to do."""
    if is_optimized_module(module):
        return "is compiled", "Give the model that was given to `torch.compile`."
    if isinstance(module, LazyModuleMixin):
        return "has no weights yet", "Call the model once: a lazy layer makes them then."
    if "forward" in vars(module):
        was = type(module).__name__
        return "has a `forward` of its own on the instance; NIR has no place for it", f"`del layer.forward` brings back that of {was}."
    for hook in forward_hooks(module):
        if not isinstance(hook, _SET_WEIGHTS) and not watches(hook):
            hint = "Take it off, `handle.remove()`, or make what it does a layer."
            return f"has the hook `{core_name(hook)}`; NIR has no place for it", hint
    return None


def set_weights(module: nn.Module) -> None:
    """What a call does first: weights that are pruned or normalised by hooks are those of the last call before."""
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, _SET_WEIGHTS):
                hook(part, ())
