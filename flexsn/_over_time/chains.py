"""A network that is a chain of layers, an `nn.Sequential`: each layer is called with all steps, one after the other.

No code of the user's runs between the layers, so no tensors have to stand for a step, and the call takes the time of its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .steps import after_time, linear_by_spikes
from .walks import Walk, begins, ends

_ACTIVATIONS = {nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardtanh}
_TAKE_ANY = {nn.Identity, nn.Dropout, nn.Flatten, nn.Linear, nn.LayerNorm} | _ACTIVATIONS
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_TAKE_A_BATCH: dict[type, int] = dict.fromkeys((nn.GroupNorm, *BATCH_NORMS), 0) | {
    getattr(nn, f"{name}{dims}d"): dims + 1 for dims in (1, 2, 3) for name in ("Conv", "MaxPool", "AvgPool", "AdaptiveAvgPool")
}
"""How many dims a step without batch has; 0: it has one."""


def chain(network: nn.Module) -> list[nn.Module] | None:
    """Return the layers of a network made of `nn.Sequential`s, in their order; None where something else is in it, or a neuron twice."""
    layers = _layers(network)
    neurons = [layer for layer in layers or () if _is_neuron(layer)]
    return layers if len({*neurons}) == len(neurons) else None


def _layers(network: nn.Module) -> list[nn.Module] | None:
    if type(network) is not nn.Sequential or _is_changed(network.__dict__):
        return None
    layers: list[nn.Module] = []
    for module in network.__dict__["_modules"].values():
        found = _layers(module) if type(module) is nn.Sequential else [module] if _is_known(module) else None
        if found is None:
            return None
        layers += found
    return layers


class _Chain(Walk):
    """A run of such a network. Neurons are given whole sequences, and carry their states once the last layer was called."""

    def __init__(self) -> None:
        self.left: list[tuple[Any, bool, Sequence[Tensor], list[Tensor] | None]] = []

    def neuron(self, neuron: Any, inputs: Sequence[Tensor]) -> Any:
        with self.on(None):
            anew, states = begins(neuron, inputs)
            outputs, finals, sequences = self.run(neuron, inputs, states)
        self.left.append((neuron, anew, finals, sequences))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def run_chain(layers: Sequence[nn.Module], x: Tensor, lengths: Tensor | None) -> Tensor | None:
    """Return what the last layer gives at all steps `[T, *shape]`; None, and nothing is carried, where a layer gives something else than
    one tensor, or takes more dims than a step has. `lengths`: of the sequences, as of `Walk`."""
    run = _Chain()
    run.lengths = lengths
    with run.on(run):
        for layer in layers:
            if x.dim() <= _least(layer):
                return None
            if (rank := _TAKE_A_BATCH.get(type(layer))) is not None and x.dim() - 1 != rank:
                x = layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])
            elif type(layer) is nn.Flatten:
                x = x.flatten(*after_time(layer.start_dim, layer.end_dim))
            else:
                found = linear_by_spikes(x, layer.weight, layer.bias) if type(layer) is nn.Linear else None
                y = layer(x) if found is None else found
                if type(y) is tuple:  # of a neuron
                    return None
                x = y
    for neuron in run.left:
        ends(*neuron)
    return x


def _least(layer: Any) -> int:
    """Return how many dims a step has at least that a layer takes."""
    if type(layer) is nn.Flatten:
        return max(1, -layer.start_dim, -layer.end_dim)
    return len(layer.normalized_shape) if type(layer) is nn.LayerNorm else int(type(layer) is nn.Linear)


def _is_neuron(module: Any) -> bool:
    return getattr(type(module), "runs_sequences", False)


def _is_changed(own: dict[str, Any]) -> bool:
    """Return whether a user has a say in calls of a module, whose attributes are given: by a hook, or a forward of its own."""
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return bool(hooks) or "forward" in own


def _is_known(module: Any) -> bool:
    """Return whether a layer takes and gives one tensor, and what it makes of a step depends on that step alone."""
    kind, own = type(module), module.__dict__
    if _is_changed(own):
        return False
    if _is_neuron(module):  # of a class of the user's the forward may be another
        plain = own["num_inputs"] == 1 and own["example_outputs"] is None and own.get("per_channel") is None
        return plain and kind.__module__.split(".")[0] == __name__.split(".")[0]
    if kind in BATCH_NORMS and (own["training"] or module.running_mean is None):
        return False
    return (kind in _TAKE_ANY or kind in _TAKE_A_BATCH) and not (own.get("inplace") or own.get("return_indices"))
