"""Current-based neurons: a synapse that filters the input, then a leaky membrane. Two states, `v` and the current `i`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from torch import Tensor

from ..surrogate import atan
from .base import Neuron, Options
from .integrate import Surrogate, charge
from .reset import Number, Reset, reset


def cuba_lif(
    x: Tensor, v: Tensor, i: Tensor, tau: Number = 2.0, tau_syn: Number = 2.0, v_threshold: Number = 1.0, v_reset: Reset = 0.0,
    v_leak: Number = 0.0, r: Number = 1.0, w_in: Number = 1.0, decay_input: bool = True, detach_reset: bool = False,
    surrogate: Surrogate = atan,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Current-based (synaptic) LIF: the new current `i = i + (w_in x - i) / tau_syn` charges the membrane of `lif`,
    `h = v + (r i - (v - v_leak)) / tau`. Without `decay_input`: `i = i - i / tau_syn + w_in x`, `h = v - (v - v_leak) / tau + r i`.

    Args:
        tau, tau_syn: time constants of membrane and synapse in steps.
        w_in: weight of the input.

    Starts at `v_leak` and no current. Source: Gerstner et al., Neuronal Dynamics, 2014, ch. 3.1.
    """
    i = charge(x, i, tau_syn, 0.0, w_in, decay_input)
    h = charge(i, v, tau, v_leak, r, decay_input)
    s = surrogate(h - v_threshold)
    return s, reset(h, s, v_threshold, v_reset, detach_reset), i


def cuba_li(
    x: Tensor, v: Tensor, i: Tensor, tau: Number = 2.0, tau_syn: Number = 2.0, v_leak: Number = 0.0, r: Number = 1.0, w_in: Number = 1.0,
    decay_input: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Current-based leaky integrator: `cuba_lif` without spikes. The new current `i = i + (w_in x - i) / tau_syn` charges
    `v = v + (r i - (v - v_leak)) / tau`; without `decay_input`: `i = i - i / tau_syn + w_in x`, `v = v - (v - v_leak) / tau + r i`.
    Its output is the membrane.

    Args:
        tau, tau_syn: time constants of membrane and synapse in steps.
        w_in: weight of the input.

    Starts at `v_leak` and no current. Source: Gerstner et al., Neuronal Dynamics, 2014, ch. 3.1.
    """
    i = charge(x, i, tau_syn, 0.0, w_in, decay_input)
    v = charge(i, v, tau, v_leak, r, decay_input)
    return v, v, i


class CubaLIF(Neuron, core=cuba_lif, start=("v_leak", 0.0)):
    """Current-based LIF layer: arguments of `cuba_lif`, options of `Neuron`."""

    if TYPE_CHECKING:  # `__signature__` is made of the core

        def __init__(
            self, tau: Number = 2.0, tau_syn: Number = 2.0, v_threshold: Number = 1.0, v_reset: Reset = 0.0, v_leak: Number = 0.0,
            r: Number = 1.0, w_in: Number = 1.0, decay_input: bool = True, detach_reset: bool = False, surrogate: Surrogate = atan,
            **options: Unpack[Options],
        ) -> None: ...  # fmt: skip


class CubaLI(Neuron, core=cuba_li, start=("v_leak", 0.0)):
    """Current-based leaky-integrator layer: arguments of `cuba_li`, options of `Neuron`."""

    if TYPE_CHECKING:  # `__signature__` is made of the core

        def __init__(
            self, tau: Number = 2.0, tau_syn: Number = 2.0, v_leak: Number = 0.0, r: Number = 1.0, w_in: Number = 1.0,
            decay_input: bool = True, **options: Unpack[Options],
        ) -> None: ...  # fmt: skip


Synaptic = CubaLIF
