"""The LIF neuron with an absolute refractory period."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from ..surrogate import atan
from .base import Neuron, Options
from .integrate import Surrogate, charge
from .reset import Number, Reset, reset


def refractory_lif(
    x: Tensor, v: Tensor, q: Tensor, tau: Number = 2.0, refractory: Number = 2.0, v_threshold: Number = 1.0, v_reset: Reset = 0.0,
    v_leak: Number = 0.0, r: Number = 1.0, decay_input: bool = True, detach_reset: bool = False, surrogate: Surrogate = atan,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """LIF that, after a spike, keeps its membrane and stays silent for `refractory` steps; `q` counts them down.

    Args:
        refractory: how many steps. They are counted, so it has no gradient and cannot be learned.

    Source: Gerstner et al., Neuronal Dynamics, Cambridge 2014, ch. 1.
    """
    active = (q <= 0).to(v.dtype)
    h = charge(x, v, tau, v_leak, r, decay_input)
    s = surrogate(h - v_threshold) * active
    v = active * reset(h, s, v_threshold, v_reset, detach_reset) + (1.0 - active) * v
    fired = s.detach()
    return s, v, (1.0 - fired) * torch.relu(q - 1.0) + fired * refractory


class RefractoryLIF(Neuron, core=refractory_lif, start=("v_leak", 0.0), never=("refractory",)):
    """LIF layer with a refractory period: arguments of `refractory_lif`, options of `Neuron`."""

    if TYPE_CHECKING:  # `__signature__` is made of the core

        def __init__(
            self, tau: Number = 2.0, refractory: Number = 2.0, v_threshold: Number = 1.0, v_reset: Reset = 0.0, v_leak: Number = 0.0,
            r: Number = 1.0, decay_input: bool = True, detach_reset: bool = False, surrogate: Surrogate = atan, **options: Unpack[Options],
        ) -> None: ...  # fmt: skip
