"""What is done with every neuron of a network at once."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..errors import ArgumentError
from ..module import FlexSN


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


def _by_name(model: nn.Module) -> dict[str, FlexSN]:
    names = {id(m): name for name, m in model.named_modules()} if isinstance(model, nn.Module) else {}
    return {names[id(neuron)]: neuron for neuron in _neurons(model)}


def get_states(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return the carried states of every `FlexSN` in `model` that has some, detached, by the module's name: a checkpoint of a stream
    beside `model.state_dict()`, which has none."""
    return {name: [v.detach() for v in m.states] for name, m in _by_name(model).items() if m.states is not None}


def set_states(model: nn.Module, states: dict[str, list[Tensor]]) -> None:
    """Have every `FlexSN` in `model` go on from what `get_states` returned; those that it lacks start anew.

    Raises:
        ArgumentError: not what `get_states` returns, or a name is that of no `FlexSN` of the model.
        OperandCountError: a neuron has another number of states.
    """
    named = _by_name(model)
    if not isinstance(states, Mapping):
        raise ArgumentError(f"states are {type(states).__name__}, not a dict", hint="By name, as `get_states` returns them.")
    if unknown := sorted(states.keys() - named.keys()):
        raise ArgumentError(f"the model has no neuron {unknown}", hint=f"Its neurons are {sorted(named)}.")
    for name, neuron in named.items():
        neuron.reset()
        if name in states:
            neuron._check_states(states[name])
            neuron.states = list(states[name])


def detach_states(model: nn.Module) -> None:
    """Cut the graph at the carried states of every `FlexSN` in `model`: call it between pieces in truncated BPTT."""
    for neuron in _neurons(model):
        neuron.detach_states()
