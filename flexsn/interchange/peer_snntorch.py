"""snnTorch's neurons as flexsn's: the arithmetic of `snntorch` 1.0, op by op.

snnTorch's neurons spike where `mem > threshold`, and (with `reset_delay=True`, the default) take the reset in the step after
the spike: it comes from the membrane that enters the step. The reset carries no gradient. `beta` and `alpha` are decays per
step, clamped to [0, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import snntorch
import torch
from snntorch import SpikingNeuron
from torch import Tensor, nn

from ..errors import InterchangeError
from ..module import FlexSN
from .describe import Described
from .surrogates import from_snntorch
from .swap import LeaveAlone, Swapped, check_fuses, keep


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


CORES: dict[type, tuple[type[Neuron], tuple[str, ...]]] = {
    snntorch.Leaky: (Leaky, ("mem",)),
    snntorch.Lapicque: (Lapicque, ("mem",)),
    snntorch.Synaptic: (Synaptic, ("syn", "mem")),
    snntorch.Alpha: (Alpha, ("syn_exc", "syn_inh", "mem")),
}


class SnnTorchNeuron(Swapped):
    """Called as the neuron it stands for: `spk, mem = lif(x, mem)`, or `spk = lif(x)` with `init_hidden`.

    With `step_mode="m"` a call takes a sequence `[T, *shape]` and the states before it, and returns the spikes and the
    states of every step, `[T, *shape]` each, as a loop over time would have stacked them.
    """

    renamed: ClassVar[dict[str, str]] = {"spike_grad": "spike"}
    init_hidden = output = False
    threshold: Tensor

    def __init__(self, core: nn.Module, neuron: Any, state_names: tuple[str, ...], step_mode: str, backend: str):
        super().__init__(core, neuron, state_names, step_mode, backend)
        self.init_hidden, self.output = neuron.init_hidden, neuron.output
        carried = [getattr(neuron, name) for name in state_names]
        self.states = carried if all(v.numel() for v in carried) else None

    @property
    def reset_mechanism(self) -> str:
        return self.holder.mechanism

    @reset_mechanism.setter
    def reset_mechanism(self, value: str) -> None:
        self.refuse("reset_mechanism")

    def write(self, name: str, value: Any) -> None:
        super().write(name, from_snntorch(value) if name == "spike_grad" else value)

    def forward(self, x: Tensor, *states: Tensor | None, **named: Tensor | None) -> Any:  # type: ignore[override]  # as snnTorch's
        given = dict(zip(self.state_names, states, strict=False)) | named
        if self.init_hidden and any(v is not None for v in given.values()):
            raise TypeError(f"{', '.join(given)} cannot be passed to a neuron with init_hidden=True, which keeps its states")
        self._check_inputs((x,))
        xs = x if self.step_mode == "m" else x.unsqueeze(0)
        stored = self.store_state_seqs
        outputs, finals, trail = self.run((xs,), self._starting(xs[0], given), stored or self.step_mode == "m")
        self._carry(finals, trail if stored else None)
        if self.step_mode == "m":
            return (outputs[0], *(trail or ())) if self.output or not self.init_hidden else outputs[0]
        spikes = outputs[0].squeeze(0)
        return (spikes, *finals) if self.output or not self.init_hidden else spikes

    def _starting(self, x: Tensor, given: dict[str, Tensor | None]) -> list[Tensor | None]:
        """Of each state: what is given, else what is carried, else zeros; zeros too where the shape does not fit."""
        carried: Sequence[Tensor | None] = self.states or [None] * self.num_states
        states = [v if given.get(name) is None else given[name] for name, v in zip(self.state_names, carried, strict=True)]
        return [v if v is not None and v.shape == x.shape else None for v in states]

    def reset_mem(self) -> Any:
        """Forget the states; returns what stands for zeros in the next call."""
        self.reset()
        empty = tuple(self.threshold.new_zeros(0) for _ in self.state_names)
        return empty[0] if len(empty) == 1 else empty

    init_leaky = init_lapicque = init_synaptic = init_alpha = reset_mem

    def state(self, name: str) -> Tensor:
        return self.threshold.new_zeros(0) if self.states is None else self.states[self.state_names.index(name)]

    def set_state(self, name: str, value: Tensor) -> None:
        """An empty one stands for zeros. `snntorch.utils.reset` writes zeros into every state."""
        if not isinstance(value, Tensor):
            raise InterchangeError(f"`{name}` of a converted {self.old_name} is a tensor, not {value!r}", hint="Write torch.full(...).")
        states = list(self.states) if self.states is not None else [torch.zeros_like(value) for _ in self.state_names]
        k = self.state_names.index(name)
        states[k] = value if value.numel() else torch.zeros_like(states[k])
        self._carry(states if any(v.numel() for v in states) else None, self.state_seqs)


class _Alone(nn.Module):
    """Ends the chain of constructors before snnTorch's, which want arguments."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


def _as(kind: type) -> type[SnnTorchNeuron]:
    """`snntorch.utils.reset(net)` finds neurons by `isinstance`, so the replacement is one too."""
    return type(kind.__name__, (SnnTorchNeuron, _Alone, kind), {"__module__": __name__, "__qualname__": f"Fused{kind.__name__}"})


FusedLeaky, FusedLapicque, FusedSynaptic, FusedAlpha = (_as(kind) for kind in CORES)
FUSED = dict(zip(CORES, (FusedLeaky, FusedLapicque, FusedSynaptic, FusedAlpha), strict=True))


def is_neuron(module: nn.Module) -> bool:
    return isinstance(module, SpikingNeuron)


def replace(neuron: Any, backend: str, step_mode: str | None) -> Swapped:
    """The flexsn neuron for a neuron.

    Raises:
        LeaveAlone: the kind is not known, mixes neurons, quantises its state, or does not fuse.
    """
    if type(neuron) not in CORES:
        raise LeaveAlone(_why_not(neuron))
    if neuron.inhibition:
        raise LeaveAlone("inhibition=True compares neurons with each other")
    if neuron.state_quant:
        raise LeaveAlone("state_quant rounds the states in a way that flexsn does not know")
    core, names = CORES[type(neuron)]
    made = FUSED[type(neuron)](core(neuron), neuron, names, step_mode or "s", backend)
    check_fuses(made)
    return made


def _why_not(neuron: Any) -> str:
    if isinstance(neuron, snntorch.RLeaky | snntorch.RSynaptic):
        return "its recurrent weights mix neurons at every step"
    known = next((kind.__name__ for kind in CORES if isinstance(neuron, kind)), None)
    return f"a subclass of {known}" if known else "not among those that flexsn converts"


SEQUENCES = 'convert with step_mode="m", and call the model with sequences [T, *shape] in place of the loop over time'


def takes(neuron: nn.Module) -> str:
    """One step per call."""
    return "s"


def loops(module: nn.Module) -> bool:
    return False


def finish(model: nn.Module, swapped: list[tuple[nn.Module, FlexSN]]) -> None:
    """The new neurons take the place of the old in the list by which snnTorch resets and detaches all of them."""
    new = {id(old): made for old, made in swapped}
    SpikingNeuron.instances[:] = [new.get(id(n), n) for n in SpikingNeuron.instances]
