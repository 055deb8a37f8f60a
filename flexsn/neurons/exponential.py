"""Integrate-and-fire neurons whose membrane takes off by itself: quadratic, exponential, AdEx, Izhikevich."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from ..surrogate import atan
from .base import Neuron, Options
from .integrate import Surrogate
from .reset import Number, Reset, reset


def quadratic_if(
    x: Tensor, v: Tensor, tau: Number = 2.0, a0: Number = 1.0, v_c: Number = 0.8, v_threshold: Number = 1.0, v_reset: Reset = -0.1,
    v_leak: Number = 0.0, r: Number = 1.0, detach_reset: bool = False, surrogate: Surrogate = atan,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Quadratic integrate-and-fire: `h = v + (r x + a0 (v - v_leak) (v - v_c)) / tau`.

    Args:
        a0: curvature.
        v_c: critical voltage, above which the membrane takes off.

    Starts at `v_leak`. Source: Latham et al., J. Neurophysiol. 83, 2000; Gerstner et al., Neuronal Dynamics, 2014, ch. 5.
    """
    h = v + (r * x + a0 * (v - v_leak) * (v - v_c)) / tau
    s = surrogate(h - v_threshold)
    return s, reset(h, s, v_threshold, v_reset, detach_reset)


def exponential_if(
    x: Tensor, v: Tensor, tau: Number = 2.0, delta_t: Number = 1.0, v_rh: Number = 0.8, v_threshold: Number = 1.0, v_reset: Reset = -0.1,
    v_leak: Number = 0.0, r: Number = 1.0, detach_reset: bool = False, surrogate: Surrogate = atan,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Exponential integrate-and-fire: `h = v + (r x - (v - v_leak) + delta_t exp((v - v_rh) / delta_t)) / tau`.

    Args:
        delta_t: sharpness of the take-off.
        v_rh: rheobase threshold, where it begins.

    Starts at `v_leak`. Source: Fourcaud-Trocme et al., J. Neurosci. 23, 2003.
    """
    h = v + (r * x - (v - v_leak) + delta_t * torch.exp((v - v_rh) / delta_t)) / tau
    s = surrogate(h - v_threshold)
    return s, reset(h, s, v_threshold, v_reset, detach_reset)


def adex(
    x: Tensor, v: Tensor, w: Tensor, c_m: Number = 281.0, g_leak: Number = 30.0, v_leak: Number = -70.6, v_rh: Number = -50.4,
    delta_t: Number = 2.0, tau_w: Number = 144.0, a: Number = 4.0, b: Number = 80.5, v_threshold: Number = -40.4,
    v_reset: Reset = -70.6, dt: Number = 0.1, detach_reset: bool = False, surrogate: Surrogate = atan,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Adaptive exponential integrate-and-fire, an Euler step of
    `c_m dv/dt = x - w - g_leak (v - v_leak) + g_leak delta_t exp((v - v_rh) / delta_t)` and `tau_w dw/dt = a (v - v_leak) - w`;
    a spike at `v_threshold` (here `v_rh + 5 delta_t`) resets `v` and adds `b` to `w`.

    Units: `x`, `w`, `b` pA; voltages mV; `c_m` pF; `g_leak`, `a` nS; `tau_w`, `dt` ms.
    Starts at `v_leak`, `w = 0`. Source: Brette & Gerstner, J. Neurophysiol. 94, 2005, whose constants are the defaults.
    """
    h = v + dt * ((x - w - g_leak * (v - v_leak) + g_leak * delta_t * torch.exp((v - v_rh) / delta_t)) / c_m)
    w = w + dt * ((a * (v - v_leak) - w) / tau_w)
    s = surrogate(h - v_threshold)
    return s, reset(h, s, v_threshold, v_reset, detach_reset), w + b * s


def izhikevich(
    x: Tensor, v: Tensor, u: Tensor, a: Number = 0.02, b: Number = 0.2, d: Number = 8.0, v_threshold: Number = 30.0,
    v_reset: Reset = -65.0, dt: Number = 1.0, detach_reset: bool = False, surrogate: Surrogate = atan,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Izhikevich's neuron, an Euler step of `dv/dt = 0.04 v^2 + 5 v + 140 - u + x` and `du/dt = a (b v - u)`; a spike at
    `v_threshold` resets `v` (to his `c`) and adds `d` to `u`.

    Units: voltages mV, `dt` ms; the defaults are a regular-spiking cell.
    Starts at `v_reset`, `u = b v`, as in the paper's program. Source: Izhikevich, IEEE Trans. Neural Netw. 14, 2003.
    """
    h = v + dt * (0.04 * v * v + 5.0 * v + 140.0 - u + x)
    u = u + dt * (a * (b * v - u))
    s = surrogate(h - v_threshold)
    return s, reset(h, s, v_threshold, v_reset, detach_reset), u + d * s


def _recovery(neuron: Any) -> Number:
    """Where `u` starts."""
    return neuron.b * neuron.v_reset if isinstance(neuron.v_reset, (int, float, Tensor)) else 0.0


class QuadraticIF(Neuron, core=quadratic_if, start=("v_leak",)):
    """Quadratic integrate-and-fire layer: arguments of `quadratic_if`, options of `Neuron`."""

    if TYPE_CHECKING:  # `__signature__` is made of the core

        def __init__(
            self, tau: Number = 2.0, a0: Number = 1.0, v_c: Number = 0.8, v_threshold: Number = 1.0, v_reset: Reset = -0.1,
            v_leak: Number = 0.0, r: Number = 1.0, detach_reset: bool = False, surrogate: Surrogate = atan, **options: Unpack[Options],
        ) -> None: ...  # fmt: skip


class ExponentialIF(Neuron, core=exponential_if, start=("v_leak",)):
    """Exponential integrate-and-fire layer: arguments of `exponential_if`, options of `Neuron`."""

    if TYPE_CHECKING:  # `__signature__` is made of the core

        def __init__(
            self, tau: Number = 2.0, delta_t: Number = 1.0, v_rh: Number = 0.8, v_threshold: Number = 1.0, v_reset: Reset = -0.1,
            v_leak: Number = 0.0, r: Number = 1.0, detach_reset: bool = False, surrogate: Surrogate = atan, **options: Unpack[Options],
        ) -> None: ...  # fmt: skip


class AdEx(Neuron, core=adex, start=("v_leak", 0.0)):
    """Adaptive exponential integrate-and-fire layer: arguments of `adex`, options of `Neuron`."""

    if TYPE_CHECKING:  # `__signature__` is made of the core

        def __init__(
            self, c_m: Number = 281.0, g_leak: Number = 30.0, v_leak: Number = -70.6, v_rh: Number = -50.4, delta_t: Number = 2.0,
            tau_w: Number = 144.0, a: Number = 4.0, b: Number = 80.5, v_threshold: Number = -40.4, v_reset: Reset = -70.6, dt: Number = 0.1,
            detach_reset: bool = False, surrogate: Surrogate = atan, **options: Unpack[Options],
        ) -> None: ...  # fmt: skip


class Izhikevich(Neuron, core=izhikevich, start=("v_reset", _recovery)):
    """Layer of Izhikevich's neurons: arguments of `izhikevich`, options of `Neuron`."""

    if TYPE_CHECKING:  # `__signature__` is made of the core

        def __init__(
            self, a: Number = 0.02, b: Number = 0.2, d: Number = 8.0, v_threshold: Number = 30.0, v_reset: Reset = -65.0, dt: Number = 1.0,
            detach_reset: bool = False, surrogate: Surrogate = atan, **options: Unpack[Options],
        ) -> None: ...  # fmt: skip
