"""What is done to every neuron of a network."""

from __future__ import annotations

from torch import nn

from .errors import ArgumentError
from .module import FlexSN


def _neurons(model: nn.Module) -> list[FlexSN]:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"takes a module, not a {type(model).__name__}", hint="Hold the modules in a `torch.nn.ModuleList`.")
    seen, ahead, found = {model}, [model], []  # `model.modules()` also makes names, as long as several kernels take
    for module in ahead:
        if isinstance(module, FlexSN):
            found.append(module)
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                ahead.append(child)
    return found


def reset_net(model: nn.Module) -> None:
    """Forget the states of every `FlexSN` in `model`."""
    for neuron in _neurons(model):
        neuron.reset()


def detach_states(model: nn.Module) -> None:
    """Cut the graph at the carried states of every `FlexSN` in `model`: call it between pieces in truncated BPTT."""
    for neuron in _neurons(model):
        neuron.detach_states()
