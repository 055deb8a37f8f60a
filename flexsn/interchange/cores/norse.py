"""Norse's own step functions as cores: `step(x, state, p, dt)`, with the tensors of a state one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from norse.torch.functional.reset import reset_value
from torch import Tensor, nn

from ...errors import InterchangeError
from ..describe import Described


def leaves(state: Any) -> Iterator[Tensor]:
    """The tensors of a state tuple, which may hold other state tuples."""
    for part in state:
        if isinstance(part, tuple):
            yield from leaves(part)
        else:
            yield part


def leaf_names(state: Any, prefix: str = "") -> Iterator[str]:
    """`v`, `i`, and `lif.v` for those of a state tuple within."""
    for name, part in zip(state._fields, state, strict=True):
        if isinstance(part, tuple):
            yield from leaf_names(part, f"{prefix}{name}.")
        else:
            yield prefix + name


def rebuild(like: Any, values: Iterator[Any]) -> Any:
    """A state tuple of the same types from its tensors."""
    return type(like)(*(rebuild(part, values) if isinstance(part, tuple) else next(values) for part in like))


class Step(nn.Module):
    """A step function with its parameters and time step."""

    def __init__(self, neuron: Any, example: Any):
        super().__init__()
        self.activation, self.p, self.dt = neuron.activation, neuron.p, neuron.dt
        self.like = rebuild(example, iter([None] * len(list(leaves(example)))))

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        out, state = self.activation(x, rebuild(self.like, iter(states)), *self.weights(), self.p, self.dt)
        return out, *leaves(state)

    def weights(self) -> tuple[Tensor, ...]:
        """What the step function takes between the state and the parameters."""
        return ()

    def state_shape(self, step: torch.Size) -> torch.Size:
        """The shape of the states for that of an input."""
        return step

    def describe(self) -> Described:
        """Norse's `lif` lets the input jump onto the current and decays it afterwards, so its `w_in` is `tau_syn`."""
        name, p = self.activation.__name__, self.p
        if name == "iaf_feed_forward_step":
            return "IF", {"v_threshold": p.v_th, "v_reset": p.v_reset}
        if name not in _LEAKY:
            raise InterchangeError(f"NIR has no primitive for Norse's `{name}`")
        arguments = {"tau": 1.0 / (self.dt * p.tau_mem_inv), "v_leak": p.v_leak}
        if name == "lif_feed_forward_step":
            steps = 1.0 / (self.dt * p.tau_syn_inv)
            arguments |= {"tau_syn": steps, "w_in": steps}
        if name != "li_box_feed_forward_step":
            arguments |= {"v_threshold": p.v_th, "v_reset": p.v_reset}
        if getattr(p, "reset_method", reset_value) is not reset_value:
            raise InterchangeError(f"resets by `{p.reset_method.__name__}`; NIR resets to a number")
        return _LEAKY[name], arguments


_LEAKY = {"lif_feed_forward_step": "CubaLIF", "lif_box_feed_forward_step": "LIF", "li_box_feed_forward_step": "LI"}


class RecurrentStep(Step):
    """A step function with weights for its input, and for its spikes of the step before, which are a state."""

    def __init__(self, neuron: Any, example: Any):
        super().__init__(neuron, example)
        self.input_weights, self.recurrent_weights = neuron.input_weights, neuron.recurrent_weights

    def weights(self) -> tuple[Tensor, ...]:
        return self.input_weights, self.recurrent_weights

    def state_shape(self, step: torch.Size) -> torch.Size:
        return torch.Size([*step[:-1], self.recurrent_weights.shape[0]])
