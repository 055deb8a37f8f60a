"""The steps of SpikingJelly's neurons as cores: the arithmetic of `spikingjelly.activation_based.neuron` 2.0, op by op.

A membrane `v` charges to `h`, spikes where `h >= v_threshold`, and resets: to `v_reset`, or by `v_threshold` if `v_reset` is
None. Time constants are in steps.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
from spikingjelly.activation_based import neuron
from torch import Tensor, nn
from torch.nn import functional as F

from ..describe import Described
from ..surrogates import from_spikingjelly
from ..swap import keep


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


class OwnEquations(OwnStep):
    """The charge, fire and reset of a user's subclass of `SimpleBaseNode`, called as they are on a copy of the node.

    They write its memories, which are set before a step and set back after it. A write to anything else is refused, as in any core.
    Dynamo refuses the writes too, and runs such a neuron between compiled parts.
    """

    def __init__(self, node: Any):
        super().__init__(copy.copy(node))
        self.node._memories = dict(node._memories_rv)

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        memories = self.node._memories
        before = dict(memories)
        memories.update(zip(before, states, strict=True))
        try:
            spikes = self.node.single_step_forward(x)
            return spikes, *memories.values()
        finally:
            memories.update(before)


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


class Recurrent(nn.Module):
    """A recurrent container: what it gave at the step before, `y`, meets the input of the step on its way into a node.

    Args:
        container: whose tensors and functions it shares.
        held: the core of the node that the container holds, or linear layers and that.
    """

    element_wise_function: Any
    rc: Any
    sub_module: Any

    def __init__(self, container: Any, held: nn.Module):
        super().__init__()
        for name in ("element_wise_function", "rc"):
            if hasattr(container, name):
                setattr(self, name, getattr(container, name))
        self.sub_module = held

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        *own, y = states
        node = self.sub_module[-1] if isinstance(self.sub_module, nn.Sequential) else self.sub_module
        s, *own = node(self.join(x, y), *own)
        return s, *own, s

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        """What the node takes."""
        return self.element_wise_function(y, x)

    def state_shape(self, step: torch.Size) -> torch.Size:
        """The shape of the states for that of an input."""
        return step


class LinearRecurrent(Recurrent):
    """`rc` takes input and `y` side by side, and linear layers may follow: their product is one matrix for each."""

    def folded(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of `rc` and the linear layers together."""
        first, *rest = [self.rc, *(list(self.sub_module)[:-1] if isinstance(self.sub_module, nn.Sequential) else [])]
        weight, bias = first.weight, first.bias
        for linear in rest:
            weight = linear.weight @ weight
            bias = linear.bias if bias is None else linear.weight @ bias if linear.bias is None else linear.weight @ bias + linear.bias
        return weight, bias

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        (weight, bias), inputs = self.folded(), self.rc.out_features
        return F.linear(x, weight[:, :inputs], bias) + F.linear(y, weight[:, inputs:])

    def state_shape(self, step: torch.Size) -> torch.Size:
        return torch.Size([*step[:-1], self.rc.in_features - self.rc.out_features])


CORES: dict[type, type[nn.Module]] = {
    neuron.IFNode: IF, neuron.LIFNode: LIF, neuron.ParametricLIFNode: ParametricLIF, neuron.KLIFNode: KLIF, neuron.QIFNode: QIF,
    neuron.EIFNode: EIF, neuron.IzhikevichNode: Izhikevich, neuron.CUBALIFNode: CubaLIF, neuron.RAFNode: RAF,
    neuron.ComplementaryLIFNode: ComplementaryLIF, neuron.GatedLIFNode: GatedLIF,
}  # fmt: skip
