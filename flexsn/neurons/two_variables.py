"""Neurons of two coupled variables: a dendrite and a soma that spikes; a damped oscillation below threshold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from torch import Tensor

from ..surrogate import atan
from .base import Neuron, Options
from .integrate import Surrogate
from .reset import Number, Reset, apply, reset


def two_compartment_lif(
    x: Tensor, x_dend: Tensor, v: Tensor, d: Tensor, tau: Number = 2.0, tau_dend: Number = 10.0, g: Number = 0.5, g_dend: Number = 0.1,
    v_threshold: Number = 1.0, v_reset: Reset = 0.0, v_leak: Number = 0.0, r: Number = 1.0, detach_reset: bool = False,
    surrogate: Surrogate = atan,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Two-compartment LIF, with two inputs: the soma `h = v + (r x - (v - v_leak) + g (d - v)) / tau` and the dendrite
    `d = d + (r x_dend - (d - v_leak) + g_dend (v - d)) / tau_dend`. A spike resets the soma alone.

    Args:
        tau, tau_dend: time constants of soma and dendrite in steps.
        g, g_dend: coupling into the soma and into the dendrite, in units of the leak conductance of each.

    Both start at `v_leak`. Source: Gerstner et al., Neuronal Dynamics, Cambridge 2014, ch. 3.
    """
    h = v + (r * x - (v - v_leak) + g * (d - v)) / tau
    d = d + (r * x_dend - (d - v_leak) + g_dend * (v - d)) / tau_dend
    s = surrogate(h - v_threshold)
    return s, reset(h, s, v_threshold, v_reset, detach_reset), d


class TwoCompartmentLIF(Neuron, core=two_compartment_lif, start=("v_leak", "v_leak")):
    """Two-compartment LIF layer, called with two sequences: arguments of `two_compartment_lif`, options of `Neuron`."""

    if TYPE_CHECKING:  # `__signature__` is made of the core

        def __init__(
            self, tau: Number = 2.0, tau_dend: Number = 10.0, g: Number = 0.5, g_dend: Number = 0.1, v_threshold: Number = 1.0,
            v_reset: Reset = 0.0, v_leak: Number = 0.0, r: Number = 1.0, detach_reset: bool = False, surrogate: Surrogate = atan,
            **options: Unpack[Options],
        ) -> None: ...  # fmt: skip


def resonate_and_fire(
    x: Tensor, v: Tensor, u: Tensor, b: Number = -0.2, omega: Number = 1.0, dt: Number = 1.0, v_threshold: Number = 1.0,
    v_reset: Reset = 0.0, detach_reset: bool = False, surrogate: Surrogate = atan,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Resonate-and-fire: the exact step of `dz/dt = (b + i omega) z` for `z = u + i v`, then the input on `u`:
    `z = exp((b + i omega) dt) z + x`. A spike where `v >= v_threshold` resets `v`; `u` goes on.

    Args:
        b: damping, negative, per unit of `dt`.
        omega: angular frequency, radians per unit of `dt`.

    Starts at rest. Source: Izhikevich, Neural Networks 14, 2001.
    """
    decay, c, s = apply("exp", b * dt), apply("cos", omega * dt), apply("sin", omega * dt)
    u, h = decay * (u * c - v * s) + x, decay * (u * s + v * c)
    spike = surrogate(h - v_threshold)
    return spike, reset(h, spike, v_threshold, v_reset, detach_reset), u


class ResonateAndFire(Neuron, core=resonate_and_fire, start=(0.0, 0.0)):
    """Resonate-and-fire layer: arguments of `resonate_and_fire`, options of `Neuron`."""

    if TYPE_CHECKING:  # `__signature__` is made of the core

        def __init__(
            self, b: Number = -0.2, omega: Number = 1.0, dt: Number = 1.0, v_threshold: Number = 1.0, v_reset: Reset = 0.0,
            detach_reset: bool = False, surrogate: Surrogate = atan, **options: Unpack[Options],
        ) -> None: ...  # fmt: skip
