"""Norse's neurons as flexsn's: Norse's own step functions, `step(x, state, p, dt)`, are the cores.

They are pure PyTorch, so flexsn fuses them as they are; the parameter tuple `p` is captured, tensors and all. States are
passed in and out, as in Norse: nothing is carried from call to call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from norse.torch.functional.reset import reset_value
from norse.torch.module.lift import Lift
from norse.torch.module.snn import SNN, SNNCell, SNNRecurrent, SNNRecurrentCell
from torch import Tensor, nn

from ..errors import InterchangeError
from ..module import FlexSN
from .describe import Described
from .swap import LeaveAlone, Swapped, check_fuses, check_plain


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
        out, state = self.activation(x, rebuild(self.like, iter(states)), self.p, self.dt)
        return out, *leaves(state)

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


class NorseNeuron(Swapped):
    """Called as the cell (`step_mode="s"`) or layer (`"m"`) it stands for: `z, state = lif(x, state)`."""

    state_fallback: Any = None
    record_states = False

    def __init__(self, neuron: Any, step_mode: str, backend: str):
        over_time = isinstance(neuron, SNN)
        example = neuron.state_fallback(torch.zeros((1, 1, 1) if over_time else (1, 1)))
        super().__init__(Step(neuron, example), neuron, tuple(leaf_names(example)), step_mode, backend)
        self.state_fallback, self.fallback_over_time = neuron.state_fallback, over_time
        self.record_states = getattr(neuron, "record_states", False)

    def write(self, name: str, value: Any) -> None:
        """The cell whose method makes the first state has the same `p`."""
        super().write(name, value)
        cell = getattr(self.state_fallback, "__self__", None)
        if name == "p" and cell is not None:
            cell.p = value

    def forward(self, input_tensor: Tensor, state: Any = None) -> tuple[Tensor, Any]:  # type: ignore[override]  # as Norse's
        self._check_inputs((input_tensor,))
        xs = input_tensor if self.step_mode == "m" else input_tensor.unsqueeze(0)
        state = self.state_fallback(xs if self.fallback_over_time else xs[0]) if state is None else state
        values = [v.to(torch.result_type(v, xs)).expand(xs.shape[1:]) for v in leaves(state)]
        outputs, finals, trail = self.run((xs,), values, self.record_states or self.store_state_seqs)
        self._carry(None, trail if self.store_state_seqs else None)
        spikes = outputs[0] if self.step_mode == "m" else outputs[0].squeeze(0)
        return spikes, rebuild(state, iter(trail if trail and self.record_states else finals))


class LiftedNeuron(NorseNeuron):
    """`Lift(cell)`: takes `x` or `(x, state)`."""

    def forward(self, x: Any) -> tuple[Tensor, Any]:  # type: ignore[override]  # as Lift's
        return super().forward(*x) if isinstance(x, tuple) else super().forward(x)


def is_neuron(module: nn.Module) -> bool:
    if isinstance(module, Lift):
        return isinstance(module.lifted_module, SNNCell)
    return isinstance(module, SNN | SNNCell | SNNRecurrent | SNNRecurrentCell)


def replace(neuron: Any, backend: str, step_mode: str | None) -> Swapped:
    """The flexsn neuron for a cell, a layer, or a lifted cell.

    Raises:
        LeaveAlone: it is recurrent, its cell was changed on the instance, or its step does not fuse.
    """
    cell = neuron.lifted_module if isinstance(neuron, Lift) else neuron
    check_plain(cell)
    if isinstance(cell, SNNRecurrent | SNNRecurrentCell):
        raise LeaveAlone("its recurrent weights mix neurons at every step")
    if type(cell).forward not in (SNN.forward, SNNCell.forward):
        raise LeaveAlone("defines a forward of its own")
    made: NorseNeuron
    if isinstance(neuron, Lift):
        made = LiftedNeuron(cell, "m", backend)
    else:
        made = NorseNeuron(cell, step_mode or ("m" if isinstance(cell, SNN) else "s"), backend)
    check_fuses(made)
    return made


SEQUENCES = 'convert with step_mode="m", and call the model with sequences [T, *shape] in place of the loop over time'


def takes(neuron: nn.Module) -> str:
    """A cell takes one step per call."""
    return "s" if isinstance(neuron, SNNCell | SNNRecurrentCell) else "m"


def loops(module: nn.Module) -> bool:
    """`Lift` calls what it holds at every step."""
    return isinstance(module, Lift)


def finish(model: nn.Module, swapped: list[tuple[nn.Module, FlexSN]]) -> None:
    pass
