"""Integrate-and-fire neurons with one state, the membrane `v`.

In all of them `x` is the input current of a step, time constants are in steps (`tau / dt`), and voltages are in the unit
of `v_threshold`. A step charges the membrane to `h`, spikes where `h` reaches the threshold, and resets (`reset.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..surrogate import atan
from .base import Neuron
from .reset import Number, Reset, reset

Surrogate = Callable[[Tensor], Tensor]


def charge(x: Tensor, v: Tensor, tau: Number, v_leak: Number, r: Number, decay_input: bool) -> Tensor:
    """One Euler step of the leaky membrane, `tau dv/dt = -(v - v_leak) + r x`; without `decay_input` the current is not
    divided by `tau`."""
    if decay_input:
        return v + (r * x - (v - v_leak)) / tau
    return v - (v - v_leak) / tau + r * x


def integrate_and_fire(
    x: Tensor, v: Tensor, v_threshold: Number = 1.0, v_reset: Reset = 0.0, r: Number = 1.0, detach_reset: bool = False,
    surrogate: Surrogate = atan,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Integrate-and-fire: `h = v + r x`, a spike where `h >= v_threshold`, reset.

    Args:
        r: resistance.

    Starts at `v_reset` (0 if that is no number). Source: Lapicque 1907; Abbott, Brain Res. Bull. 1999.
    """
    h = v + r * x
    s = surrogate(h - v_threshold)
    return s, reset(h, s, v_threshold, v_reset, detach_reset)


def lif(
    x: Tensor, v: Tensor, tau: Number = 2.0, v_threshold: Number = 1.0, v_reset: Reset = 0.0, v_leak: Number = 0.0, r: Number = 1.0,
    decay_input: bool = True, detach_reset: bool = False, surrogate: Surrogate = atan,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Leaky integrate-and-fire: `h = v + (r x - (v - v_leak)) / tau`, or `h = v - (v - v_leak) / tau + r x` without
    `decay_input`; a spike where `h >= v_threshold`, reset.

    Args:
        tau: membrane time constant in steps; the membrane keeps `1 - 1 / tau` of its distance to `v_leak` per step.
        v_leak: resting potential.
        r: resistance.

    Starts at `v_leak`. Source: Gerstner et al., Neuronal Dynamics, Cambridge 2014, eq. 1.5, Euler step of 1.
    """
    h = charge(x, v, tau, v_leak, r, decay_input)
    s = surrogate(h - v_threshold)
    return s, reset(h, s, v_threshold, v_reset, detach_reset)


def leaky_integrator(
    x: Tensor, v: Tensor, tau: Number = 2.0, v_leak: Number = 0.0, r: Number = 1.0, decay_input: bool = True
) -> tuple[Tensor, Tensor]:
    """Leaky integrator: the membrane of `lif` without spikes; its output is the membrane. Starts at `v_leak`."""
    v = charge(x, v, tau, v_leak, r, decay_input)
    return v, v


class IF(Neuron, core=integrate_and_fire, start=("v_reset",)):
    """Integrate-and-fire layer: arguments of `integrate_and_fire`, options of `Neuron`."""


class LIF(Neuron, core=lif, start=("v_leak",)):
    """Leaky integrate-and-fire layer: arguments of `lif`, options of `Neuron`."""


class LeakyIntegrator(Neuron, core=leaky_integrator, start=("v_leak",)):
    """Leaky-integrator layer: arguments of `leaky_integrator`, options of `Neuron`."""
