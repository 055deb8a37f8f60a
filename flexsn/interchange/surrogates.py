"""Surrogates of other libraries as flexsn's own, where they mean the same.

SpikingJelly spikes where `x >= 0`, as flexsn does by default; snnTorch, Norse and NIR where `x > 0`. They differ at `x == 0`
alone, that is where a membrane hits its threshold exactly.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import surrogate

Spike = Callable[[Tensor], Tensor]


def above(spike: Spike) -> Spike:
    """`spike`, but 0 where `x == 0`; the gradient is that of `spike` everywhere."""
    if "inclusive" in inspect.signature(spike).parameters:
        return functools.partial(spike, inclusive=False)  # type: ignore[call-arg]  # its signature says so
    return functools.partial(_above, spike)


def at(spike: Spike) -> Spike:
    """`spike`, and 1 where `x == 0`, if it has a setting for that."""
    if "inclusive" in inspect.signature(spike).parameters:
        return functools.partial(spike, inclusive=True)  # type: ignore[call-arg]  # its signature says so
    return spike


@torch.no_grad()
def spikes_at_threshold(spike: Spike, device: torch.device) -> bool:
    """Whether it spikes where `x == 0`."""
    return bool((spike(torch.zeros(1, device=device)) > 0).any())


@torch.no_grad()
def no_step(spike: Spike, device: torch.device) -> tuple[float, float] | None:
    """A distance to the threshold and what it gives there, where that is not 0 below and 1 above."""
    for x in _DISTANCES:
        y = torch.as_tensor(spike(torch.full((1,), x, device=device))).double()
        off = torch.minimum(y.abs(), (y - 1.0).abs()) if x == 0.0 else (y - float(x > 0.0)).abs()
        wrong = y[~(off < 1e-5)]  # a step made of differences may be off by rounding
        if wrong.numel():
            return x, wrong.flatten()[0].item()
    return None


_DISTANCES = (*(sign * size for size in (3.0, 1.0, 0.75, 0.5, 0.25, 0.1, 1e-2, 1e-3) for sign in (1.0, -1.0)), 0.0)


def _above(spike: Spike, x: Tensor) -> Tensor:
    return spike(x) - (x == 0).to(x.dtype)


# its class: flexsn's function, of arguments with the same names; read-only, so that no call looks for changes in it
_SPIKINGJELLY = {
    "ATan": surrogate.atan,
    "Erf": surrogate.erf,
    "FakeNumericalGradient": surrogate.fake_numerical_gradient,
    "LeakyKReLU": surrogate.leaky_k_relu,
    "LogTailedReLU": surrogate.log_tailed_relu,
    "NonzeroSignLogAbs": surrogate.nonzero_sign_log_abs,
    "PiecewiseExp": surrogate.piecewise_exp,
    "PiecewiseLeakyReLU": surrogate.piecewise_leaky_relu,
    "PiecewiseQuadratic": surrogate.piecewise_quadratic,
    "QPseudoSpike": surrogate.q_pseudo_spike,
    "Rect": surrogate.rect,
    "S2NN": surrogate.s2nn,
    "Sigmoid": surrogate.sigmoid,
    "SoftSign": surrogate.soft_sign,
    "SquarewaveFourierSeries": surrogate.squarewave_fourier_series,
    "SuperSpike": lambda alpha: surrogate.super_spike(beta=1.0, height=alpha),
}  # fmt: skip

_SNNTORCH = {  # its function: flexsn's, of arguments with the same names
    "atan": surrogate.atan,
    "fast_sigmoid": surrogate.fast_sigmoid,
    "heaviside": surrogate.heaviside,
    "SFS": surrogate.SFS,
    "sigmoid": lambda slope: surrogate.sigmoid(alpha=slope),
    "spike_rate_escape": surrogate.spike_rate_escape,
    "straight_through_estimator": surrogate.straight_through,
    "triangular": surrogate.triangular,
}


def from_spikingjelly(spike: Any) -> Spike:
    """`surrogate.ATan(alpha)` and so on; what flexsn does not have, and the smooth mode (`spiking=False`), is called as it is."""
    kind = type(spike)
    make = _SPIKINGJELLY.get(kind.__name__) if kind.__module__ == "spikingjelly.activation_based.surrogate" else None
    if make is None or not spike.spiking or not _numbers(spike._sg_params):
        return spike
    return make(**spike._sg_params)


def from_snntorch(spike: Any) -> Spike:
    """`surrogate.atan(alpha)` and so on, which are closures; what flexsn does not have is called as it is."""
    name = getattr(spike, "__qualname__", "").removesuffix(".<locals>.inner")
    make = _SNNTORCH.get(name) if getattr(spike, "__module__", None) == "snntorch.surrogate" else None
    settings = dict(inspect.getclosurevars(spike).nonlocals) if make is not None else {}
    return spike if make is None or not _numbers(settings) else above(make(**settings))


def _numbers(settings: dict[str, Any]) -> bool:
    return not any(isinstance(value, torch.Tensor) for value in settings.values())
