"""A network that is a chain of layers, an `nn.Sequential`: each layer is called with all steps, one after the other.

No code of the user's runs between the layers, so no tensors have to stand for a step, and the call takes the time of its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .steps import after_time, linear_by_spikes
from .walks import begins, ends

_ACTIVATIONS = {nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardtanh}
_TAKE_ANY = {nn.Identity, nn.Dropout, nn.Flatten, nn.Linear, nn.LayerNorm} | _ACTIVATIONS
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_TAKE_A_BATCH: dict[type, int] = dict.fromkeys((nn.GroupNorm, *_BATCH_NORMS), 0) | {
    getattr(nn, f"{name}{dims}d"): dims + 1 for dims in (1, 2, 3) for name in ("Conv", "MaxPool", "AvgPool", "AdaptiveAvgPool")
}
"""How many dims a step without batch has; 0: it has one."""


def chain(network: nn.Module) -> list[nn.Module] | None:
    """Return the layers of a network made of `nn.Sequential`s, in their order; None where something else is in it."""
    if type(network) is not nn.Sequential or _is_changed(network.__dict__):
        return None
    layers: list[nn.Module] = []
    neurons = set()
    for module in network.__dict__["_modules"].values():
        if type(module) is nn.Sequential:
            inner = chain(module)
            if inner is None:
                return None
            layers += inner
            continue
        if not _is_known(module) or module in neurons:  # a neuron that is called twice in a step
            return None
        layers.append(module)
        if _is_neuron(module):
            neurons.add(module)
    return layers


def run_chain(layers: Sequence[nn.Module], x: Tensor) -> Tensor | None:
    """Return what the last layer gives at all steps `[T, *shape]`, and have the neurons carry their states; None, and nothing is carried,
    where a neuron has several outputs."""
    carried = []
    for layer in layers:
        if _is_neuron(layer):
            anew, states = begins(layer, (x,))
            outputs, finals, sequences = layer.run((x,), states, layer.store_state_seqs)  # type: ignore[operator]  # it is a neuron
            if len(outputs) != 1:
                return None
            x = outputs[0]
            carried.append((layer, anew, finals, sequences))
        elif (rank := _TAKE_A_BATCH.get(type(layer))) is not None and x.dim() - 1 != rank:
            x = layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        elif type(layer) is nn.Flatten:
            x = x.flatten(*after_time(layer.start_dim, layer.end_dim)) if x.dim() > 1 else layer(x)
        else:
            found = linear_by_spikes(x, layer.weight, layer.bias) if type(layer) is nn.Linear else None
            x = layer(x) if found is None else found
    for neuron in carried:
        ends(*neuron)
    return x


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
    if kind in _BATCH_NORMS and (own["training"] or module.running_mean is None):
        return False
    return (kind in _TAKE_ANY or kind in _TAKE_A_BATCH) and not (own.get("inplace") or own.get("return_indices"))
