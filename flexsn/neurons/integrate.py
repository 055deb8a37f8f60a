"""Integrate-and-fire neurons with one state, the membrane `v`.

In all of them `x` is the input current of a step, time constants are in steps (`tau / dt`), and voltages are in the unit
of `v_threshold`. A step charges the membrane to `h`, spikes where `h` reaches the threshold, and resets (`reset.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..surrogate import atan
from .base import Neuron, Options, is_number, plain, smallest
from .reset import Number, Reset, reset, sigmoid

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

    Starts at `v_leak`. Source: Gerstner et al., Neuronal Dynamics, Cambridge 2014, ch. 1; an Euler step of 1.
    """
    h = charge(x, v, tau, v_leak, r, decay_input)
    s = surrogate(h - v_threshold)
    return s, reset(h, s, v_threshold, v_reset, detach_reset)


def leaky_integrator(
    x: Tensor, v: Tensor, tau: Number = 2.0, v_leak: Number = 0.0, r: Number = 1.0, decay_input: bool = True
) -> tuple[Tensor, Tensor]:
    """Leaky integrator: the membrane of `lif` without spikes, `v = v + (r x - (v - v_leak)) / tau`, or
    `v = v - (v - v_leak) / tau + r x` without `decay_input`. Its output is the membrane.

    Args:
        tau: membrane time constant in steps.

    Starts at `v_leak`. Source: Gerstner et al., Neuronal Dynamics, Cambridge 2014, ch. 1.3.1; an Euler step of 1.
    """
    v = charge(x, v, tau, v_leak, r, decay_input)
    return v, v


def parametric_lif(
    x: Tensor, v: Tensor, w: Tensor | float = 0.0, v_threshold: Number = 1.0, v_reset: Reset = 0.0, v_leak: Number = 0.0, r: Number = 1.0,
    decay_input: bool = True, detach_reset: bool = False, surrogate: Surrogate = atan,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Parametric LIF: `lif` with `1 / tau = sigmoid(w)`, so that the time constant stays above one step while `w` is learned.

    Source: Fang et al., ICCV 2021, arXiv:2007.05785.
    """
    k = sigmoid(w)
    h = v + (r * x - (v - v_leak)) * k if decay_input else v - (v - v_leak) * k + r * x
    s = surrogate(h - v_threshold)
    return s, reset(h, s, v_threshold, v_reset, detach_reset)


def klif(
    x: Tensor, v: Tensor, k: Number = 1.0, tau: Number = 2.0, v_threshold: Number = 1.0, v_reset: Reset = 0.0, v_leak: Number = 0.0,
    r: Number = 1.0, scale_reset: bool = False, decay_input: bool = True, detach_reset: bool = False, surrogate: Surrogate = atan,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """KLIF: the charged membrane of `lif` goes through `relu(k h)` with a learned `k`, which also scales the surrogate.

    Args:
        k: gain of the membrane, not 0: the neuron would be silent, and learn nothing.
        scale_reset: divide by `k` again before the reset, and the threshold of a soft reset with it.

    Source: Jiang & Zhang, arXiv:2302.09238, 2023.
    """
    h = torch.relu(k * charge(x, v, tau, v_leak, r, decay_input))
    s = surrogate(h - v_threshold)
    if scale_reset:
        return s, reset(h / k, s, v_threshold / k, v_reset, detach_reset)
    return s, reset(h, s, v_threshold, v_reset, detach_reset)


def gated_lif(
    x: Tensor, v: Tensor, s: Tensor, alpha: Number = 0.0, beta: Number = 0.0, gamma: Number = 0.0, w_decay: Number = -1.0986123,
    w_threshold: Number = 0.0, w_linear: Number = -3.4339872, w_reset: Number = 0.0, w_conduct: Number = 0.0, surrogate: Surrogate = atan,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gated LIF: learned gates choose between exponential and linear leak (`alpha`), plain and scaled input (`beta`), and
    hard and soft reset (`gamma`). With all arguments passed through a sigmoid, and the spike `s` of the step before:
    `k = 1 - alpha (1 - decay)`, `v = k v (1 - gamma s) - (1 - alpha) linear + (1 - beta (1 - conduct)) x - (1 - gamma) reset s`.

    Args:
        alpha, beta, gamma: logits of the gates.
        w_decay, w_threshold, w_linear, w_reset, w_conduct: logits of decay, threshold, linear leak, soft reset, conductance
            (one for all time steps; the paper has one per step).

    The state `v` is the membrane before the reset. Source: Yao et al., NeurIPS 2022, arXiv:2210.13768.
    """
    alpha, beta, gamma, decay, threshold, linear, drop, conduct = map(
        sigmoid, (alpha, beta, gamma, w_decay, w_threshold, w_linear, w_reset, w_conduct)
    )
    k = 1.0 - alpha * (1.0 - decay)
    v = k * v - (1.0 - alpha) * linear + x * (1.0 - beta * (1.0 - conduct)) - k * v * gamma * s - (1.0 - gamma) * drop * s
    s = surrogate(v - threshold)
    return s, v, s


class IF(Neuron, core=integrate_and_fire, start=("v_reset",)):
    """Integrate-and-fire layer: arguments of `integrate_and_fire`, options of `Neuron`."""

    if TYPE_CHECKING:  # `__signature__` is made of the core

        def __init__(
            self, v_threshold: Number = 1.0, v_reset: Reset = 0.0, r: Number = 1.0, detach_reset: bool = False, surrogate: Surrogate = atan,
            **options: Unpack[Options],
        ) -> None: ...  # fmt: skip


class LIF(Neuron, core=lif, start=("v_leak",)):
    """Leaky integrate-and-fire layer: arguments of `lif`, options of `Neuron`."""

    if TYPE_CHECKING:  # `__signature__` is made of the core

        def __init__(
            self, tau: Number = 2.0, v_threshold: Number = 1.0, v_reset: Reset = 0.0, v_leak: Number = 0.0, r: Number = 1.0,
            decay_input: bool = True, detach_reset: bool = False, surrogate: Surrogate = atan, **options: Unpack[Options],
        ) -> None: ...  # fmt: skip


class LeakyIntegrator(Neuron, core=leaky_integrator, start=("v_leak",)):
    """Leaky-integrator layer: arguments of `leaky_integrator`, options of `Neuron`."""

    if TYPE_CHECKING:  # `__signature__` is made of the core

        def __init__(
            self, tau: Number = 2.0, v_leak: Number = 0.0, r: Number = 1.0, decay_input: bool = True, **options: Unpack[Options],
        ) -> None: ...  # fmt: skip


class ParametricLIF(Neuron, core=parametric_lif, start=("v_leak",), always=("w",)):
    """Parametric LIF layer: learns `w = -log(tau - 1)`; arguments of `parametric_lif`, options of `Neuron`.

    Args:
        tau: time constant to begin with, in steps, above 1: a number, or a tensor with one per channel.
    """

    if TYPE_CHECKING:  # `__signature__` is made of the core

        def __init__(
            self, tau: Number = 2.0, v_threshold: Number = 1.0, v_reset: Reset = 0.0, v_leak: Number = 0.0, r: Number = 1.0,
            decay_input: bool = True, detach_reset: bool = False, surrogate: Surrogate = atan, **options: Unpack[Options],
        ) -> None: ...  # fmt: skip

    else:

        def __init__(self, tau: Number = 2.0, **arguments: Any):
            if "w" in arguments:
                raise ArgumentError("ParametricLIF makes its own `w`", hint="Pass the time constant to begin with, tau = 1 + exp(-w).")
            if not arguments.pop("learn_tau", True):
                raise ArgumentError(
                    "ParametricLIF learns its time constant in any case", hint="For one that stays, take `flexsn.LIF(tau=...)`."
                )
            learn = arguments.pop("learn", ())
            learn = learn if isinstance(learn, str) or not isinstance(learn, Collection) else [n for n in learn if n != "tau"]
            super().__init__(w=_logit(tau), learn=() if learn == "tau" else learn, **arguments)

    @property
    def tau(self) -> Tensor:
        """The time constant as it is now, in steps."""
        return 1.0 / torch.sigmoid(self.arguments["w"].detach())

    @tau.setter
    def tau(self, value: Any) -> None:
        raise ArgumentError(
            "ParametricLIF: `tau` follows from the parameter `w`",
            hint="Write into that, `with torch.no_grad(): neuron.w.fill_(-math.log(tau - 1))`, or make another neuron.",
        )


def _logit(tau: Any) -> Tensor:
    """`w` with `1 / tau = sigmoid(w)`."""
    value = plain(tau)
    if not is_number(value) and not (isinstance(value, Tensor) and not value.is_complex()):
        hint = "Pass `torch.as_tensor(tau, dtype=torch.float32)`." if getattr(value, "ndim", 0) else None
        raise ArgumentError(f"ParametricLIF: tau must be a number or a tensor, not {tau!r}", hint=hint)
    if not smallest(value) > 1:
        raise ArgumentError(f"ParametricLIF: tau must be above 1 step, not {tau}: 1 / tau is a sigmoid")
    start = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.get_default_dtype())
    return -torch.log(start - 1)


class KLIF(Neuron, core=klif, start=("v_leak",), always=("k",)):
    """KLIF layer, which learns `k`: arguments of `klif`, options of `Neuron`."""

    if TYPE_CHECKING:  # `__signature__` is made of the core

        def __init__(
            self, k: Number = 1.0, tau: Number = 2.0, v_threshold: Number = 1.0, v_reset: Reset = 0.0, v_leak: Number = 0.0,
            r: Number = 1.0, scale_reset: bool = False, decay_input: bool = True, detach_reset: bool = False, surrogate: Surrogate = atan,
            **options: Unpack[Options],
        ) -> None: ...  # fmt: skip


class GatedLIF(
    Neuron, core=gated_lif, start=(0.0, 0.0),
    always=("alpha", "beta", "gamma", "w_decay", "w_threshold", "w_linear", "w_reset", "w_conduct"),
):  # fmt: skip
    """Gated LIF layer, which learns all its numbers: arguments of `gated_lif`, options of `Neuron`."""

    if TYPE_CHECKING:  # `__signature__` is made of the core

        def __init__(
            self, alpha: Number = 0.0, beta: Number = 0.0, gamma: Number = 0.0, w_decay: Number = -1.0986123, w_threshold: Number = 0.0,
            w_linear: Number = -3.4339872, w_reset: Number = 0.0, w_conduct: Number = 0.0, surrogate: Surrogate = atan,
            **options: Unpack[Options],
        ) -> None: ...  # fmt: skip
