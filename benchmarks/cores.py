"""The neurons that are measured, each as one time step, and the operands that they are measured on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexsn import surrogate


# --- leaky integrate-and-fire, hard reset ---------------------------------------------------------------------------------
# Gerstner, Kistler, Naud & Paninski, "Neuronal Dynamics" (Cambridge, 2014), section 1.3, one Euler step with tau = 2 steps:
#     h[t] = v[t-1] + (x[t] - v[t-1]) / 2        membrane before the reset
#     s[t] = 1 if h[t] >= 1 else 0               spike
#     v[t] = h[t] (1 - s[t])                     reset to 0
def lif_atan(x, v):
    h = v + (x - v) / 2
    s = surrogate.atan(h - 1.0)
    return s, h * (1 - s)


def lif_sigmoid(x, v):
    h = v + (x - v) / 2
    s = surrogate.sigmoid(h - 1.0)
    return s, h * (1 - s)


# --- adaptive leaky integrate-and-fire: 2 inputs, 2 states, 2 outputs -------------------------------------------------------
# Bellec, Salaj, Subramoney, Legenstein & Maass, "Long short-term memory and learning-to-learn in networks of spiking
# neurons" (NeurIPS 2018): the threshold rises with every spike and decays back. The drive is excitation less inhibition;
# the membrane is read out beside the spikes.
#     h[t] = v[t-1] + (e[t] - i[t] - v[t-1]) / tau
#     s[t] = 1 if h[t] >= theta + beta a[t-1] else 0
#     v[t] = h[t] (1 - s[t])
#     a[t] = rho a[t-1] + (1 - rho) s[t]
TAU, THETA, BETA, RHO = 4.0, 0.5, 1.8, 0.96


def adaptive_lif(exc, inh, v, a):
    h = v + (exc - inh - v) / TAU
    s = surrogate.atan(h - (THETA + BETA * a))
    return s, h, h * (1 - s), RHO * a + (1 - RHO) * s


# --- Hodgkin-Huxley: 4 states -----------------------------------------------------------------------------------------------
# Hodgkin & Huxley, J. Physiol. 117 (1952) 500-544, in the units and signs of "Neuronal Dynamics", section 2.2 (mV, ms,
# mS/cm^2, uF/cm^2, uA/cm^2), by forward Euler with step DT:
#     C dV/dt = I - g_Na m^3 h (V - E_Na) - g_K n^4 (V - E_K) - g_L (V - E_L)
#     dq/dt   = alpha_q(V) (1 - q) - beta_q(V) q      for q = m, h, n
# A spike is an upward crossing of V_SPIKE.
DT, C = 0.02, 1.0
G_NA, G_K, G_L = 120.0, 36.0, 0.3
E_NA, E_K, E_L = 50.0, -77.0, -54.387
V_SPIKE = 0.0
HH_REST = (-65.0, 0.0529, 0.5961, 0.3177)


def _linoid(y):
    """y / (1 - exp(-y)); the hole at 0, where the value is 1, is stepped around."""
    y = torch.where(y.abs() < 1e-4, 1e-4, y)
    return y / (1 - torch.exp(-y))


def hodgkin_huxley(current, v, m, h, n):
    alpha_m = _linoid((v + 40) / 10)
    beta_m = 4 * torch.exp(-(v + 65) / 18)
    alpha_h = 0.07 * torch.exp(-(v + 65) / 20)
    beta_h = 1 / (1 + torch.exp(-(v + 35) / 10))
    alpha_n = 0.1 * _linoid((v + 55) / 10)
    beta_n = 0.125 * torch.exp(-(v + 65) / 80)

    i_na = G_NA * m * m * m * h * (v - E_NA)
    i_k = G_K * n * n * n * n * (v - E_K)
    i_l = G_L * (v - E_L)
    v_new = v + DT / C * (current - i_na - i_k - i_l)
    m_new = m + DT * (alpha_m * (1 - m) - beta_m * m)
    h_new = h + DT * (alpha_h * (1 - h) - beta_h * h)
    n_new = n + DT * (alpha_n * (1 - n) - beta_n * n)
    s = surrogate.atan((v_new - V_SPIKE) / 10) * (v < V_SPIKE).to(v.dtype)
    return s, v_new, m_new, h_new, n_new


# --- what to run them on ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Neuron:
    """A core and the distribution of its operands.

    Attributes:
        drive: mean and standard deviation of each input.
        rest: initial value of each state.
        outputs: number of outputs; output 0 is the spikes.
        lif: surrogate name if this is the plain LIF, which other libraries have built in.
    """

    name: str
    title: str
    core: Callable[..., tuple[Tensor, ...]]
    drive: tuple[tuple[float, float], ...]
    rest: tuple[float, ...]
    outputs: int = 1
    lif: str | None = None

    def operands(self, T: int, N: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Input sequences, initial states, cotangents of the outputs."""
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(T, N, generator=generator).mul_(std).add_(mean) for mean, std in self.drive]
        states = [torch.full((N,), value) for value in self.rest]
        return inputs, states, [torch.randn(T, N, generator=generator) for _ in range(self.outputs)]

    def copies(self, mode: str) -> float:
        """Bytes that must move, in copies of one sequence (a copy reads one and writes one).

        Inference reads the inputs and writes the outputs. Training does, then reads inputs and cotangents and writes
        the gradients of the inputs.
        """
        forward = len(self.drive) + self.outputs
        return (forward if mode == "inference" else 2 * forward + len(self.drive)) / 2


LIF = Neuron("lif_atan", "LIF, hard reset, atan surrogate", lif_atan, ((0.7, 1.0),), (0.0,), lif="atan")
LIF_SIGMOID = Neuron("lif_sigmoid", "LIF, hard reset, sigmoid surrogate", lif_sigmoid, ((0.7, 1.0),), (0.0,), lif="sigmoid")
ADAPTIVE = Neuron("adaptive_lif", "adaptive LIF, 2 inputs, 2 states, 2 outputs", adaptive_lif, ((1.2, 1.0), (0.4, 0.5)), (0.0, 0.0), 2)
HH = Neuron("hodgkin_huxley", "Hodgkin-Huxley, 4 states", hodgkin_huxley, ((60.0, 20.0),), HH_REST)
