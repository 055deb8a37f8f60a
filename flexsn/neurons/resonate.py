"""The resonate-and-fire neuron: a damped oscillation below threshold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from torch import Tensor

from ..surrogate import atan
from .base import Neuron, Options
from .integrate import Surrogate
from .reset import Number, Reset, apply, reset


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
