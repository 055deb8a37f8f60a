"""Leaky neurons that tire: a second state, fed by their own spikes, raises the threshold or holds the membrane down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from torch import Tensor

from ..surrogate import atan
from .base import Neuron, Options
from .integrate import Surrogate, charge
from .reset import Number, Reset, reset


def alif(
    x: Tensor, v: Tensor, a: Tensor, tau: Number = 2.0, tau_adapt: Number = 20.0, beta: Number = 0.2, v_threshold: Number = 1.0,
    v_reset: Reset = 0.0, v_leak: Number = 0.0, r: Number = 1.0, decay_input: bool = True, detach_reset: bool = False,
    surrogate: Surrogate = atan,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Adaptive LIF (the neuron of the LSNN): `lif` whose threshold is `v_threshold + beta a`; `a` decays with `tau_adapt`
    and every spike adds 1 to it. A step decays `a` first, so a spike raises the threshold of the next step by
    `beta (1 - 1 / tau_adapt)`. A soft reset subtracts the raised threshold.

    Args:
        tau_adapt: time constant of the adaptation, in steps.
        beta: how much a spike raises the threshold.

    Source: Bellec et al., NeurIPS 2018, arXiv:1803.09574, in the form that Norse gives it. In Bellec et al., Nat. Commun. 11,
    3625, 2020 (e-prop) a spike counts in full first, `A = v_th + beta a`, then `a = rho a + z`: with `rho = 1 - 1 / tau_adapt`, their
    beta is `rho` times the one here.
    """
    a = a - a / tau_adapt
    threshold = v_threshold + beta * a
    h = charge(x, v, tau, v_leak, r, decay_input)
    s = surrogate(h - threshold)
    return s, reset(h, s, threshold, v_reset, detach_reset), a + s


def adlif(
    x: Tensor, v: Tensor, w: Tensor, tau: Number = 2.0, tau_adapt: Number = 20.0, a: Number = 0.0, b: Number = 0.2,
    v_threshold: Number = 1.0, v_reset: Reset = 0.0, v_leak: Number = 0.0, r: Number = 1.0, detach_reset: bool = False,
    surrogate: Surrogate = atan,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """LIF with spike-frequency adaptation by a current: `h = v + (r x - w - (v - v_leak)) / tau`, and
    `w = w + (a (v - v_leak) - w) / tau_adapt + b s`.

    Args:
        tau_adapt: time constant of the adaptation current, in steps.
        a: coupling of the membrane to the current (resonance below threshold).
        b: what a spike adds to the current.

    Source: Benda & Herz, Neural Comput. 15, 2003; Bittar & Garner, Front. Neurosci. 16, 2022 (adLIF).
    """
    h = v + (r * x - w - (v - v_leak)) / tau
    s = surrogate(h - v_threshold)
    w = w + (a * (v - v_leak) - w) / tau_adapt + b * s
    return s, reset(h, s, v_threshold, v_reset, detach_reset), w


class ALIF(Neuron, core=alif, start=("v_leak", 0.0)):
    """Adaptive-threshold LIF layer (LSNN): arguments of `alif`, options of `Neuron`."""

    if TYPE_CHECKING:  # `__signature__` is made of the core

        def __init__(
            self, tau: Number = 2.0, tau_adapt: Number = 20.0, beta: Number = 0.2, v_threshold: Number = 1.0, v_reset: Reset = 0.0,
            v_leak: Number = 0.0, r: Number = 1.0, decay_input: bool = True, detach_reset: bool = False, surrogate: Surrogate = atan,
            **options: Unpack[Options],
        ) -> None: ...  # fmt: skip


class AdLIF(Neuron, core=adlif, start=("v_leak", 0.0)):
    """LIF layer with spike-frequency adaptation: arguments of `adlif`, options of `Neuron`."""

    if TYPE_CHECKING:  # `__signature__` is made of the core

        def __init__(
            self, tau: Number = 2.0, tau_adapt: Number = 20.0, a: Number = 0.0, b: Number = 0.2, v_threshold: Number = 1.0,
            v_reset: Reset = 0.0, v_leak: Number = 0.0, r: Number = 1.0, detach_reset: bool = False, surrogate: Surrogate = atan,
            **options: Unpack[Options],
        ) -> None: ...  # fmt: skip
