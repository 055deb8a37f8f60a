"""snnTorch's neurons as flexsn's: how they are called, their states and attributes. Their arithmetic is in `cores/snntorch.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import snntorch
import torch
from snntorch import SpikingNeuron
from torch import Tensor, nn

from ..errors import InterchangeError
from ..module import FlexSN
from .cores.snntorch import CORES, RECURRENT
from .surrogates import from_snntorch
from .swap import LeaveAlone, Swapped, check_fuses, check_recurs


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
        if self.step_mode == "s":
            outputs, trail = [outputs[0].squeeze(0)], finals
        if self.init_hidden and not self.output:
            return outputs[0]
        others = (trail or [])["spk" in self.state_names :]  # `spk`, the first of its states where it is one, is what comes out
        return (outputs[0], *others)

    def _starting(self, x: Tensor, given: dict[str, Tensor | None]) -> list[Tensor | None]:
        """Of each state: what is given, else what is carried, else zeros; zeros too where the shape does not fit."""
        shape = self.core.state_shape(x.shape)  # type: ignore[attr-defined]  # the core is one of ours
        carried: Sequence[Tensor | None] = self.states or [None] * self.num_states
        states = [v if given.get(name) is None else given[name] for name, v in zip(self.state_names, carried, strict=True)]
        zeros = None if shape == x.shape else x.new_zeros(shape)  # None stands for zeros of the shape of the input
        return [v if v is not None and v.shape == shape else zeros for v in states]

    def reset_mem(self) -> Any:
        """Forget the states; returns what stands for zeros in the next call."""
        self.reset()
        empty = tuple(self.threshold.new_zeros(0) for _ in self.state_names)
        return empty[0] if len(empty) == 1 else empty

    init_leaky = init_lapicque = init_synaptic = init_alpha = reset_mem
    init_rleaky = init_rsynaptic = init_slstm = init_sconv2dlstm = reset_mem

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


FusedLeaky, FusedLapicque, FusedSynaptic, FusedAlpha, *_recurrent = (_as(kind) for kind in CORES)
FusedRLeaky, FusedRSynaptic, FusedSLSTM, FusedSConv2dLSTM = _recurrent
FUSED = dict(zip(CORES, (FusedLeaky, FusedLapicque, FusedSynaptic, FusedAlpha, *_recurrent), strict=True))


def is_neuron(module: nn.Module) -> bool:
    return isinstance(module, SpikingNeuron)


def replace(neuron: Any, backend: str, step_mode: str | None) -> Swapped:
    """The flexsn neuron for a neuron.

    Raises:
        LeaveAlone: the kind is not known, compares neurons, quantises its state, does not do what its arguments say, or does not fuse.
    """
    if type(neuron) not in CORES:
        raise LeaveAlone(_why_not(neuron))
    if neuron.inhibition:
        raise LeaveAlone("inhibition=True compares neurons with each other")
    if neuron.state_quant:
        raise LeaveAlone("state_quant rounds the states in a way that flexsn does not know")
    if (why := _forgets(neuron)) is not None:
        raise LeaveAlone(why)
    kind, names = CORES[type(neuron)]
    core = kind(neuron)
    made = FUSED[type(neuron)](core, neuron, names, step_mode or "s", backend)
    if isinstance(core, RECURRENT):
        step = _example(neuron)
        check_recurs(made, step, core.state_shape(step))
    else:
        check_fuses(made)
    return made


def _forgets(neuron: Any) -> str | None:
    """Why snnTorch 1.0 does something else than a recurrent neuron's arguments say."""
    if isinstance(neuron, snntorch.SLSTM) and neuron.input_size != neuron.hidden_size:
        return "snnTorch 1.0 sets its states to zero at every step where input_size is not hidden_size, so that nothing comes back"
    if isinstance(neuron, snntorch.RSynaptic) and not neuron.reset_delay:
        return "snnTorch 1.0 computes its reset_delay=False from other values than those it keeps"
    if isinstance(neuron, snntorch.SConv2dLSTM) and (neuron.max_pool or neuron.avg_pool):
        return "its pooling mixes what the step has computed"
    return None


def _example(neuron: Any) -> torch.Size:
    """The shape of one step that a recurrent neuron takes."""
    if isinstance(neuron, snntorch.SLSTM):
        return torch.Size([2, neuron.input_size])
    if isinstance(neuron, snntorch.SConv2dLSTM):
        return torch.Size([2, neuron.in_channels, 3, 3])
    if isinstance(neuron.recurrent, nn.Linear):
        return torch.Size([2, neuron.recurrent.in_features])
    if isinstance(neuron.recurrent, nn.Conv2d):
        return torch.Size([2, neuron.recurrent.in_channels, 3, 3])
    tensors = (neuron.V, neuron.beta, neuron.threshold, getattr(neuron, "alpha", neuron.beta))
    return torch.broadcast_shapes((2, 1), *[t.shape for t in tensors])


def _why_not(neuron: Any) -> str:
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
