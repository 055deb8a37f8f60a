"""The steps of snnTorch's neurons as cores: the arithmetic of `snntorch` 1.0, op by op.

snnTorch's neurons spike where `mem > threshold`, and (with `reset_delay=True`, the default) take the reset in the step after
the spike: it comes from the membrane that enters the step. The reset carries no gradient. `beta` and `alpha` are decays per
step, clamped to [0, 1].
"""

from __future__ import annotations

from typing import Any

import snntorch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import InterchangeError
from ..describe import Described
from ..surrogates import from_snntorch
from ..swap import keep


class Neuron(nn.Module):
    """Fire and reset; subclasses integrate. `reset_delay` exists for Leaky and Synaptic alone."""

    tensors: tuple[str, ...] = ()
    beta: Tensor
    alpha: Tensor
    threshold: Tensor
    graded_spikes_factor: Tensor
    R: Tensor
    C: Tensor
    time_step: Tensor

    def __init__(self, neuron: Any):
        super().__init__()
        self.spike = from_snntorch(neuron.spike_grad)
        self.mechanism = neuron.reset_mechanism
        self.reset_delay = getattr(neuron, "reset_delay", True)
        keep(self, neuron, "beta", "threshold", "graded_spikes_factor", *self.tensors)

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        reset = self.spike(states[-1] - self.threshold).detach()
        *currents, mem = self.integrate(x, reset, *states)
        s = self.spike(mem - self.threshold) * self.graded_spikes_factor
        if not self.reset_delay:
            mem = self.now(mem, s / self.graded_spikes_factor - reset)
        return s, *currents, mem

    def state_shape(self, step: torch.Size) -> torch.Size:
        """The shape of the states for that of an input."""
        return step

    def now(self, mem: Tensor, reset: Tensor) -> Tensor:
        """The reset in the step of the spike."""
        if self.mechanism == "subtract":
            return mem - reset * self.threshold
        return mem - reset * mem if self.mechanism == "zero" else mem

    def integrate(self, x: Tensor, reset: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def describe(self) -> Described:
        kind, times = self.describe_times()
        if self.reset_delay or self.mechanism != "zero":
            raise InterchangeError(
                f'resets by "{self.mechanism}"{", one step after the spike" * self.reset_delay}; NIR resets at once, to a number',
                hint='It has an equivalent with reset_mechanism="zero", reset_delay=False.',
            )
        if bool((self.graded_spikes_factor != 1).any()):
            raise InterchangeError("has graded spikes; NIR's are 0 or 1")
        return kind, {"v_threshold": self.threshold, "v_reset": 0.0, "decay_input": False, "surrogate": self.spike, **times}

    def describe_times(self) -> Described:
        raise InterchangeError(f"NIR has no primitive for snnTorch's {type(self).__name__}")


class Leaky(Neuron):
    def integrate(self, x: Tensor, reset: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        (mem,) = states
        if self.mechanism == "zero":
            mem = (1 - reset) * mem
        mem = self.beta.clamp(0, 1) * mem + x
        return (mem - reset * self.threshold if self.mechanism == "subtract" else mem,)

    def describe_times(self) -> Described:
        return "LIF", {"tau": 1.0 / (1.0 - self.beta.clamp(0, 1))}


class Lapicque(Neuron):
    """An RC circuit: `C` is charged through `R` for `time_step`."""

    tensors = ("R", "C", "time_step")

    def integrate(self, x: Tensor, reset: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        (mem,) = states
        rc = self.R * self.C
        mem = x * self.R * (1 / rc) * self.time_step + (1 - self.time_step / rc) * mem
        return (self.now(mem, reset),)


class Synaptic(Neuron):
    """A current that decays by `alpha` drives the membrane."""

    tensors = ("alpha",)

    def integrate(self, x: Tensor, reset: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        syn, mem = states
        syn = self.alpha.clamp(0, 1) * syn + x
        mem = self.beta.clamp(0, 1) * mem + syn
        return syn, self.now(mem, reset)

    def describe_times(self) -> Described:
        return "CubaLIF", {"tau": 1.0 / (1.0 - self.beta.clamp(0, 1)), "tau_syn": 1.0 / (1.0 - self.alpha.clamp(0, 1))}


class Alpha(Neuron):
    """The membrane is the difference of an excitatory and an inhibitory current."""

    tensors = ("alpha",)

    def integrate(self, x: Tensor, reset: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        exc, inh, _ = states
        alpha, beta = self.alpha.clamp(0, 1), self.beta.clamp(0, 1)
        gain = torch.log(alpha) / (torch.log(beta) - torch.log(alpha)) + 1
        inh_next = beta * inh - x
        exc_next = alpha * exc + x
        mem = gain * (exc_next + inh_next)
        if self.mechanism == "subtract":
            return exc_next - self.threshold * reset, inh_next - inh_next * reset, mem - -inh * reset
        if self.mechanism == "zero":
            return exc_next - exc_next * reset, inh_next - inh_next * reset, mem - mem * reset
        return exc_next, inh_next, mem


class RLeaky(Neuron):
    """Its spikes of the step before, a state, come back through `recurrent`: a linear layer, a convolution, or a factor `V` of each."""

    tensors: tuple[str, ...] = ("V",)

    def __init__(self, neuron: Any):
        super().__init__(neuron)
        self.recurrent = neuron.recurrent

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        s, *after = super().forward(x, *states)
        return s, s, *after

    def integrate(self, x: Tensor, reset: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        spk, mem = states
        mem = self.beta.clamp(0, 1) * mem + x + self.recurrent(spk)
        return (self.now(mem, reset),)

    def describe_times(self) -> Described:
        return "LIF", {"tau": 1.0 / (1.0 - self.beta.clamp(0, 1))}


class RSynaptic(RLeaky):
    """The spikes of the step before drive the current."""

    tensors = ("V", "alpha")

    def integrate(self, x: Tensor, reset: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        spk, syn, mem = states
        syn = self.alpha.clamp(0, 1) * syn + x + self.recurrent(spk)
        mem = self.beta.clamp(0, 1) * mem + syn
        return syn, self.now(mem, reset)

    def describe_times(self) -> Described:
        raise InterchangeError("resets one step after the spike; NIR resets at once, to a number")


class SLSTM(Neuron):
    """An LSTM (Hochreiter & Schmidhuber, 1997) whose hidden state `mem` spikes.

    Each gate is a product of its own rows of the weights, so that what is left of the step is elementwise.
    """

    def __init__(self, neuron: Any):
        super().__init__(neuron)
        self.lstm_cell = neuron.lstm_cell

    def integrate(self, x: Tensor, reset: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        syn, mem = states
        cell = self.lstm_cell
        of_x = [F.linear(x, w, b) for w, b in _gates(cell.weight_ih, cell.bias_ih)]
        i, f, g, o = [a + F.linear(mem, w, b) for a, (w, b) in zip(of_x, _gates(cell.weight_hh, cell.bias_hh), strict=True)]
        syn = f.sigmoid() * syn + i.sigmoid() * g.tanh()
        return syn, self.now(o.sigmoid() * syn.tanh(), reset)


class SConv2dLSTM(Neuron):
    """An LSTM of channels whose gates are convolutions of input and hidden state (Shi et al., NeurIPS 2015)."""

    def __init__(self, neuron: Any):
        super().__init__(neuron)
        self.conv, self.out_channels = neuron.conv, neuron.out_channels

    def state_shape(self, step: torch.Size) -> torch.Size:
        return torch.Size([*step[:-3], self.out_channels, *step[-2:]])

    def integrate(self, x: Tensor, reset: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        syn, mem = states
        gates, padding = _gates(self.conv.weight, self.conv.bias), self.conv.padding
        count = self.conv.in_channels - self.out_channels  # the first channels of the weight are for the input
        of_x = [F.conv2d(x, w[:, :count], b, padding=padding) for w, b in gates]
        i, f, o, g = [a + F.conv2d(mem, w[:, count:], padding=padding) for a, (w, _) in zip(of_x, gates, strict=True)]
        syn = f.sigmoid() * syn + i.sigmoid() * g.tanh()
        return syn, self.now(o.sigmoid() * syn.tanh(), reset)


def _gates(weight: Tensor, bias: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of each of four gates."""
    return list(zip(weight.chunk(4), [None] * 4 if bias is None else bias.chunk(4), strict=True))


CORES: dict[type, tuple[type[Neuron], tuple[str, ...]]] = {
    snntorch.Leaky: (Leaky, ("mem",)),
    snntorch.Lapicque: (Lapicque, ("mem",)),
    snntorch.Synaptic: (Synaptic, ("syn", "mem")),
    snntorch.Alpha: (Alpha, ("syn_exc", "syn_inh", "mem")),
    snntorch.RLeaky: (RLeaky, ("spk", "mem")),
    snntorch.RSynaptic: (RSynaptic, ("spk", "syn", "mem")),
    snntorch.SLSTM: (SLSTM, ("syn", "mem")),
    snntorch.SConv2dLSTM: (SConv2dLSTM, ("syn", "mem")),
}
RECURRENT = (RLeaky, SLSTM, SConv2dLSTM)  # and RSynaptic, which is an RLeaky
