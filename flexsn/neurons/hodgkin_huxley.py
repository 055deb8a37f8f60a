"""The Hodgkin-Huxley neuron."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from ..surrogate import atan
from .base import Neuron, Options
from .integrate import Surrogate
from .reset import Number


def _linexp(z: Tensor) -> Tensor:
    """`z / (1 - exp(-z))`, which is 1 at 0; finite, with its gradient, for every `z` from -80 on."""
    near = z.abs() < 1e-3
    safe = torch.where(near, 1.0, z)
    return torch.where(near, 1.0 + 0.5 * z + z * z / 12.0, safe / -torch.expm1(-safe))


def rates(v: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """Opening and closing rates (1/ms) of the gates m, h, n at `v` (mV); below -840 mV those at -840 mV.

    There m and n shut and h opens within a microsecond or two; farther down the exponentials overflow in float32.
    """
    v = v.clamp(min=-840.0)
    m = _linexp((v + 40.0) / 10.0), 4.0 * torch.exp(-(v + 65.0) / 18.0)
    h = 0.07 * torch.exp(-(v + 65.0) / 20.0), torch.sigmoid((v + 35.0) / 10.0)
    n = 0.1 * _linexp((v + 55.0) / 10.0), 0.125 * torch.exp(-(v + 65.0) / 80.0)
    return m, h, n


def hodgkin_huxley(
    x: Tensor, v: Tensor, m: Tensor, h: Tensor, n: Tensor, c_m: Number = 1.0, g_na: Number = 120.0, g_k: Number = 36.0,
    g_leak: Number = 0.3, e_na: Number = 50.0, e_k: Number = -77.0, e_leak: Number = -54.387, v_threshold: Number = 0.0,
    dt: Number = 0.01, surrogate: Surrogate = atan,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Hodgkin & Huxley's squid axon: `c_m dv/dt = x - g_na m^3 h (v - e_na) - g_k n^4 (v - e_k) - g_leak (v - e_leak)`, and
    `dp/dt = alpha_p (1 - p) - beta_p p` for the gates m, h, n (`rates`). An exponential Euler step: each equation is linear
    in its own state, and is solved with the others held. A spike where `v` crosses `v_threshold` upwards; nothing is reset.

    Units: `x` uA/cm2; voltages mV; `c_m` uF/cm2; conductances mS/cm2; `dt` ms.
    Starts at rest: -65 mV, gates in steady state. Source: Hodgkin & Huxley, J. Physiol. 117, 1952, with today's sign of the
    voltage and rest at -65 mV (Gerstner et al., Neuronal Dynamics, 2014, ch. 2.2).
    """
    na, k = g_na * m * m * m * h, g_k * n * n * n * n
    total = na + k + g_leak
    target = (na * e_na + k * e_k + g_leak * e_leak + x) / total
    new = target + (v - target) * torch.exp(-dt * total / c_m)
    gates = [a / (a + b) + (p - a / (a + b)) * torch.exp(-dt * (a + b)) for p, (a, b) in zip((m, h, n), rates(v), strict=True)]
    s = surrogate(new - v_threshold) * (v < v_threshold).to(v.dtype)
    return s, new, *gates


def _rest(v: float) -> tuple[float, ...]:
    return v, *(float(a / (a + b)) for a, b in rates(torch.tensor(v, dtype=torch.float64)))


class HodgkinHuxley(Neuron, core=hodgkin_huxley, start=_rest(-65.0)):
    """Hodgkin-Huxley layer: arguments of `hodgkin_huxley`, options of `Neuron`."""

    if TYPE_CHECKING:  # `__signature__` is made of the core

        def __init__(
            self, c_m: Number = 1.0, g_na: Number = 120.0, g_k: Number = 36.0, g_leak: Number = 0.3, e_na: Number = 50.0,
            e_k: Number = -77.0, e_leak: Number = -54.387, v_threshold: Number = 0.0, dt: Number = 0.01, surrogate: Surrogate = atan,
            **options: Unpack[Options],
        ) -> None: ...  # fmt: skip
