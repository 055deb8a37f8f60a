"""SpikingJelly's neurons as flexsn's: the arithmetic of `spikingjelly.activation_based.neuron` 2.0, op by op.

A membrane `v` charges to `h`, spikes where `h >= v_threshold`, and resets: to `v_reset`, or by `v_threshold` if `v_reset` is
None. Time constants are in steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from spikingjelly.activation_based import base, functional, layer, neuron
from torch import Tensor, nn

from ..module import FlexSN
from .describe import Described
from .surrogates import from_spikingjelly
from .swap import LeaveAlone, NoNeuron, Swapped, check_fuses, keep


class Node(nn.Module):
    """Fire and reset; subclasses charge. Constants of the node by their names there."""

    constants: tuple[str, ...] = ()
    surrogate_function: Any
    if TYPE_CHECKING:  # what `__init__` copies by name

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, node: Any):
        super().__init__()
        self.surrogate_function = node.surrogate_function
        for name in ("v_threshold", "v_reset", "detach_reset", *self.constants):
            setattr(self, name, getattr(node, name))

    def fire(self, h: Tensor) -> Tensor:
        return from_spikingjelly(self.surrogate_function)(h - self.v_threshold)

    def after(self, h: Tensor, s: Tensor) -> Tensor:
        s = s.detach() if self.detach_reset else s
        if self.v_reset is None:
            return h - s * self.v_threshold
        return s * self.v_reset + (1.0 - s) * h

    def leak(self, x: Tensor, v: Tensor, tau: float) -> Tensor:
        """`v` decays towards `v_reset` (0 if None); the input decays with it or not."""
        away = v - (self.v_reset or 0.0)
        return v + (x - away) / tau if self.decay_input else v - away / tau + x

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = self.charge(x, v)
        s = self.fire(h)
        return s, self.after(h, s)

    def charge(self, x: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def describe_reset(self) -> dict[str, Any]:
        return {"v_threshold": self.v_threshold, "v_reset": self.v_reset, "surrogate": from_spikingjelly(self.surrogate_function)}

    def describe_leak(self) -> dict[str, Any]:
        return {**self.describe_reset(), "v_leak": self.v_reset or 0.0, "decay_input": self.decay_input}


class IF(Node):
    def charge(self, x: Tensor, v: Tensor) -> Tensor:
        return v + x

    def describe(self) -> Described:
        return "IF", self.describe_reset()


class LIF(Node):
    constants = ("tau", "decay_input")

    def charge(self, x: Tensor, v: Tensor) -> Tensor:
        return self.leak(x, v, self.tau)

    def describe(self) -> Described:
        return "LIF", {**self.describe_leak(), "tau": self.tau}


class ParametricLIF(Node):
    """`1 / tau = sigmoid(w)`, learned (Fang et al., ICCV 2021)."""

    constants = ("decay_input",)

    def __init__(self, node: Any):
        super().__init__(node)
        keep(self, node, "w")

    def charge(self, x: Tensor, v: Tensor) -> Tensor:
        rate = self.w.sigmoid()
        away = v - (self.v_reset or 0.0)
        return v + (x - away) * rate if self.decay_input else v - away * rate + x

    def describe(self) -> Described:
        return "LIF", {**self.describe_leak(), "tau": 1.0 / self.w.sigmoid()}


class KLIF(Node):
    """The membrane is scaled by a learned `k` and rectified (Jiang & Zhang, 2023)."""

    constants = ("tau", "decay_input", "scale_reset")

    def __init__(self, node: Any):
        super().__init__(node)
        keep(self, node, "k")

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = torch.relu(self.k * self.leak(x, v, self.tau))
        s = self.fire(h)
        if not self.scale_reset:
            return s, self.after(h, s)
        event = s.detach() if self.detach_reset else s
        scaled = h / self.k
        if self.v_reset is None:
            return s, scaled - event * (self.v_threshold / self.k)
        return s, event * self.v_reset + (1.0 - event) * scaled


class QIF(Node):
    constants = ("tau", "a0", "v_rest", "v_c")

    def charge(self, x: Tensor, v: Tensor) -> Tensor:
        return v + (x + self.a0 * (v - self.v_rest) * (v - self.v_c)) / self.tau


class EIF(Node):
    constants = ("tau", "v_rest", "theta_rh", "delta_T")

    def charge(self, x: Tensor, v: Tensor) -> Tensor:
        upstroke = self.delta_T * torch.exp((v - self.theta_rh) / self.delta_T)
        return v + (x + self.v_rest - v + upstroke) / self.tau


class Izhikevich(Node):
    constants = ("tau", "a0", "v_rest", "v_c", "a", "b", "tau_w")

    def forward(self, x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]  # one state more
        h = v + (x + self.a0 * (v - self.v_rest) * (v - self.v_c) - w) / self.tau
        s = self.fire(h)
        return s, self.after(h, s), w + (self.a * (h - self.v_rest) - w) / self.tau_w + self.b * s


class CubaLIF(Node):
    constants = ("c_decay", "v_decay")

    def forward(self, x: Tensor, v: Tensor, c: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]  # one state more
        current = c * self.c_decay + x
        h = v * self.v_decay + current
        s = self.fire(h)
        return s, self.after(h, s), current

    def describe(self) -> Described:
        times = {"tau": 1.0 / (1.0 - self.v_decay), "tau_syn": 1.0 / (1.0 - self.c_decay)}
        return "CubaLIF", {**self.describe_reset(), **times, "decay_input": False}


class RAF(Node):
    """Resonate and fire: a rotation by `omega * dt`, damped by `exp(b * dt)`; the input enters `u`."""

    constants = ("b", "omega", "dt")

    def forward(self, x: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]  # one state more
        damping, cos, sin = math.exp(self.b * self.dt), math.cos(self.omega * self.dt), math.sin(self.omega * self.dt)
        u_next = damping * (u * cos - v * sin) + x
        h = damping * (u * sin + v * cos)
        s = self.fire(h)
        return s, self.after(h, s), u_next


class ComplementaryLIF(Node):
    """A second state `m` counts recent spikes and deepens the reset (Huang et al., ICML 2024). No gradient in `eval()`, as there."""

    constants = ("tau",)

    def forward(self, x: Tensor, v: Tensor, m: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]  # one state more
        h = v - v / self.tau + x
        s = self.fire(h) if self.training else (h - self.v_threshold >= 0).to(h.dtype)
        m = m * torch.sigmoid(h / self.tau) + s
        return s, h - s * (self.v_threshold + torch.sigmoid(m)), m


class OwnStep(nn.Module):
    """The step that a user's subclass of `BaseNode` defines, called as it is."""

    def __init__(self, node: Any):
        super().__init__()
        self.node = node

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        outputs, states = self.node.single_step_functional_forward((x,), states)
        return *outputs, *states


class GatedLIF(nn.Module):
    """Gates between leaks, inputs and resets (Yao et al., NeurIPS 2022). The conductance of each step is a second input."""

    def __init__(self, node: Any):
        super().__init__()
        self.surrogate_function = node.surrogate_function
        self.gates = ("alpha", "beta", "gamma", "tau", "v_threshold", "linear_decay", "v_subreset")
        keep(self, node, *self.gates, "conduct")

    def forward(self, x: Tensor, conduct: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        alpha, beta, gamma, tau, threshold, linear, drop = (getattr(self, n).view(-1, 1, 1).sigmoid() for n in self.gates)
        kept = (1 - alpha * (1 - tau)) * v
        h = kept - (1 - alpha) * linear + x * (1 - beta * (1 - conduct))
        h = h - kept * gamma * s - (1 - gamma) * drop * s
        s = from_spikingjelly(self.surrogate_function)(h - threshold)
        return s, h, s


CORES: dict[type, type[nn.Module]] = {
    neuron.IFNode: IF, neuron.LIFNode: LIF, neuron.ParametricLIFNode: ParametricLIF, neuron.KLIFNode: KLIF, neuron.QIFNode: QIF,
    neuron.EIFNode: EIF, neuron.IzhikevichNode: Izhikevich, neuron.CUBALIFNode: CubaLIF, neuron.RAFNode: RAF,
    neuron.ComplementaryLIFNode: ComplementaryLIF, neuron.GatedLIFNode: GatedLIF,
}  # fmt: skip

PARALLEL = (neuron.PSN, neuron.MaskedPSN, neuron.SlidingPSN)


class StoreVSeq:
    """The node's name for `store_state_seqs`; in Python, as Dynamo calls the setter of a property after the graph (2.11)."""

    def __get__(self, neuron: Any, kind: type | None = None) -> Any:
        return self if neuron is None else neuron.store_state_seqs

    def __set__(self, neuron: Any, value: bool) -> None:
        neuron.store_state_seqs, neuron.state_seqs = value, None


class SpikingJellyNeuron(Swapped):
    """As the node it stands for: `step_mode`, `reset()`, `detach()`, `store_v_seq` and `v_seq`, the states and constants by name."""

    def __init__(self, core: nn.Module, node: Any, step_mode: str, backend: str):
        super().__init__(core, node, tuple(node._memories), step_mode, backend, num_inputs=2 if isinstance(core, GatedLIF) else 1)
        self.start = self.initial_states = tuple(node._memories_rv.values())
        self.store_state_seqs = getattr(node, "store_v_seq", False)
        for name, value in node._memories.items():
            if isinstance(value, Tensor):
                self.set_state(name, value)

    def forward(self, *inputs: Tensor, **named: Any) -> Tensor | tuple[Tensor, ...]:
        if self.states is not None:
            self._check_inputs(inputs)
            self.states = self._settled(inputs[0])
        earlier = self.v_seq if self.step_mode == "s" else None
        outputs = super().forward(*inputs, **named)
        if earlier is not None and self.state_seqs:  # single steps of one shape add up until reset()
            k = self.state_names.index("v")
            if earlier.shape[1:] == self.state_seqs[k].shape[1:]:
                self.state_seqs[k] = torch.cat([earlier, self.state_seqs[k]])
        return outputs

    def _settled(self, x: Tensor) -> list[Tensor]:
        """The carried states as those of one step of `x`: numbers are filled in; one of another shape starts anew."""
        shape, found = x.shape[self.step_mode == "m" :], []
        for state, start in zip(self.states or (), self.start, strict=True):
            value = state if state.shape == shape or not state.dim() else torch.as_tensor(start, dtype=torch.float64)
            found.append(value.to(x.device, x.dtype).expand(shape))
        return found

    @property
    def holder(self) -> Any:
        return self.core.node if isinstance(self.core, OwnStep) else self.core

    def state(self, name: str) -> Any:
        k = self.state_names.index(name)
        return self.start[k] if self.states is None else self.states[k]

    def set_state(self, name: str, value: Tensor | float) -> None:
        """A number, for the shape of the next call, is kept as a tensor without dims."""
        now: Sequence[Any] = self.start if self.states is None else self.states
        values = [value if n == name else v for n, v in zip(self.state_names, now, strict=True)]
        self.states = [v if isinstance(v, Tensor) else torch.tensor(float(v), dtype=torch.float64) for v in values]

    store_v_seq = StoreVSeq()

    @property
    def v_seq(self) -> Tensor | None:
        return self.state_seqs[self.state_names.index("v")] if self.state_seqs else None


class GatedNeuron(SpikingJellyNeuron):
    """`[T, B, C, H, W]` with the node's own `T`; the spike of the step before is not carried from call to call.

    As in the node, an input of fewer dims broadcasts with the gates, `[C, 1, 1]`, and with the carried membrane, which a
    change of shape does not reset.
    """

    def forward(self, *inputs: Tensor, **named: Any) -> Tensor | tuple[Tensor, ...]:
        self._check_inputs(inputs)
        conduct = self.core.conduct  # type: ignore[attr-defined]  # the core is a GatedLIF
        steps = conduct.view(conduct.shape[0], 1, -1, 1, 1).sigmoid()
        x = inputs[0][: conduct.shape[0]]
        carried = self.states[:1] if self.states is not None else []
        shape = torch.broadcast_shapes(x.shape[1:], steps.shape[1:], *(v.shape for v in carried))
        x = x.reshape(x.shape[0], *(1,) * (len(shape) - x.dim() + 1), *x.shape[1:]).expand(-1, *shape)
        if carried:
            v = carried[0].expand(shape)
            self.states = [v, torch.zeros_like(v)]
        outputs = super().forward(x, steps, **named)
        if self.states is not None:
            self.states = type(self.states)([self.states[0]] * 2)  # type: ignore[call-arg]  # the node's `u` is its `v`
        return outputs


def is_neuron(module: nn.Module) -> bool:
    """Whether a module keeps states, or comes from SpikingJelly's package of neurons: some of those (PSN) keep none."""
    return isinstance(module, base.MemoryModule) or any(c.__module__.startswith(f"{neuron.__name__}.") for c in type(module).__mro__)


def replace(node: Any, backend: str, step_mode: str | None) -> FlexSN:
    """The flexsn neuron for a node.

    Raises:
        LeaveAlone: the kind is not known, or does not fuse.
    """
    if isinstance(node, neuron.GatedLIFNode) and step_mode == "s":
        raise LeaveAlone("takes sequences alone")
    if getattr(node, "_neuron_precision", None) is not None:
        raise LeaveAlone("has a precision of its own (`_neuron_precision`)")
    core = _core_of(type(node))(node)
    gated = isinstance(core, GatedLIF)
    made = (GatedNeuron if gated else SpikingJellyNeuron)(core, node, step_mode or node.step_mode, backend)
    check_fuses(made, (2, node.conduct[0].numel(), 2, 2) if gated else None)
    return made


def _core_of(kind: type) -> type[nn.Module]:
    """The core for a class of nodes; a subclass may define a constructor and a step of its own, and nothing else that counts."""
    theirs = next(c for c in kind.__mro__ if c.__module__.startswith("spikingjelly."))
    own = {name for c in kind.__mro__[: kind.__mro__.index(theirs)] for name, value in vars(c).items() if callable(value)}
    own -= {"__init__", "extra_repr"}
    if own == {STEP} and issubclass(theirs, neuron.BaseNode):
        if getattr(kind, MULTI_STEP) is not base.MemoryModule.multi_step_functional_forward:
            raise LeaveAlone(f"over sequences SpikingJelly runs the step of {theirs.__name__}, not the one that it defines")
        return OwnStep
    if issubclass(theirs, layer.Dropout | layer.DropConnectLinear):
        raise NoNeuron("keeps a mask from step to step")
    if issubclass(theirs, PARALLEL):
        raise LeaveAlone("mixes time steps: its output at a step is a learned sum over the inputs of several")
    if theirs not in CORES:
        container = "Container" in theirs.__name__
        raise LeaveAlone("a container; what is in it is looked at by itself" if container else "not among those that flexsn converts")
    if own:
        raise LeaveAlone(f"defines {', '.join(sorted(own))}; flexsn can take a subclass that defines `{STEP}` alone")
    return CORES[theirs]


STEP, MULTI_STEP = "single_step_functional_forward", "multi_step_functional_forward"


def takes(node: Any) -> str:
    """By its step mode; some have one alone."""
    return getattr(node, "step_mode", None) or node.supported_step_mode()[0]


def loops(module: nn.Module) -> bool:
    """Whether a container calls what it holds at every step."""
    return isinstance(module, _LOOPS)


_LOOPS = (
    layer.MultiStepContainer, layer.TLastMultiStepContainer, layer.StepModeContainer, layer.ElementWiseRecurrentContainer,
    layer.LinearRecurrentContainer,
)  # fmt: skip


def finish(model: nn.Module, swapped: list[tuple[nn.Module, Swapped]]) -> None:
    """SpikingJelly remembers which modules `reset_net(model)` resets."""
    for module in model.modules():
        functional.invalidate_reset_cache(module)
