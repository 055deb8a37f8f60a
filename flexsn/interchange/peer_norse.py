"""Norse's neurons as flexsn's: Norse's own step functions, `step(x, state, p, dt)`, are the cores.

They are pure PyTorch, so flexsn fuses them as they are; the parameter tuple `p` is captured, tensors and all. States are
passed in and out, as in Norse: nothing is carried from call to call.
"""

from __future__ import annotations

from typing import Any

import torch
from norse.torch.module.lift import Lift
from norse.torch.module.snn import SNN, SNNCell, SNNRecurrent, SNNRecurrentCell
from torch import Tensor, nn

from ..module import FlexSN
from .cores.norse import RecurrentStep, Step, leaf_names, leaves, rebuild
from .swap import LeaveAlone, Swapped, check_fuses, check_plain, check_recurs

RECURRENT = (SNNRecurrent, SNNRecurrentCell)


class NorseNeuron(Swapped):
    """Called as the cell (`step_mode="s"`) or layer (`"m"`) it stands for: `z, state = lif(x, state)`."""

    state_fallback: Any = None
    record_states = False

    def __init__(self, neuron: Any, step_mode: str, backend: str):
        over_time = isinstance(neuron, SNN | SNNRecurrent)
        example = neuron.state_fallback(torch.zeros((1, 1, 1) if over_time else (1, 1)))
        core = (RecurrentStep if isinstance(neuron, RECURRENT) else Step)(neuron, example)
        super().__init__(core, neuron, tuple(leaf_names(example)), step_mode, backend)
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
        shape = self.core.state_shape(xs.shape[1:])  # type: ignore[attr-defined]  # the core is one of ours
        values = [v.to(torch.result_type(v, xs)).expand(shape) for v in leaves(state)]
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
        return isinstance(module.lifted_module, SNNCell | SNNRecurrentCell)
    return isinstance(module, SNN | SNNCell | SNNRecurrent | SNNRecurrentCell)


def replace(neuron: Any, backend: str, step_mode: str | None) -> Swapped:
    """The flexsn neuron for a cell, a layer, or a lifted cell.

    Raises:
        LeaveAlone: its cell was changed on the instance, or its step does not fuse.
    """
    cell = neuron.lifted_module if isinstance(neuron, Lift) else neuron
    check_plain(cell)
    if type(cell).forward not in [kind.forward for kind in (SNN, SNNCell, *RECURRENT)]:
        raise LeaveAlone("defines a forward of its own")
    made: NorseNeuron
    if isinstance(neuron, Lift):
        made = LiftedNeuron(cell, "m", backend)
    else:
        made = NorseNeuron(cell, step_mode or takes(cell), backend)
    if isinstance(cell, RECURRENT):
        step = torch.Size([2, cell.input_weights.shape[1]])
        check_recurs(made, step, made.core.state_shape(step))  # type: ignore[attr-defined]  # the core is one of ours
    else:
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
