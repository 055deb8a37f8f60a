"""Surrogate spikes: a Heaviside step forward, a gradient of another shape backward.

`spike(x)` is 1 where `x >= 0` (where `x > 0` with `inclusive=False`), else 0, in the dtype of `x`; the derivative of the
step is zero almost everywhere, and a surrogate puts a curve in its place. All take the distance to threshold `x` (any
shape, same unit as the membrane) and return a tensor of its shape. Without `x` they return themselves with other
settings: `atan(alpha=3.0)` is a spike function. Settings are numbers, or tensors that broadcast with `x`; they get no
gradient, so one that requires grad is refused; a tensor's values are looked at when the surrogate is made, `atan(alpha=a)`, not
when it is called with `x`. All are stable: no overflow and no NaN for any finite `x`.
docs/surrogates.md plots them and says what other packages call them.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._surrogate_arguments import (
    ABOVE_ONE,
    COUNT,
    FINITE,
    FUNCTION,
    HEIGHT,
    NOISE,
    NOT_NEGATIVE,
    NOT_ZERO,
    POSITIVE,
    SOME_SLOPE,
    TERMS,
    WINDOW,
    refuse_learned,
    takes,
)
from ._torch.autograd import transformed
from .errors import ArgumentError

__all__ = [
    "LSO", "SFS", "SSO", "atan", "custom_surrogate", "deterministic_pass", "erf", "fake_numerical_gradient", "fast_sigmoid", "gaussian",
    "heaviside", "leaky_k_relu", "log_tailed_relu", "multi_level_spike_count", "nonzero_sign_log_abs", "piecewise_exp",
    "piecewise_leaky_relu", "piecewise_linear", "piecewise_quadratic", "poisson_pass", "q_pseudo_spike", "rect", "s2nn", "sigmoid",
    "soft_sign", "spike_rate_escape", "squarewave_fourier_series", "straight_through", "straight_through_estimator", "super_spike",
    "triangular",
]  # fmt: skip

Function = Callable[[Tensor], Any]


class _Spike(torch.autograd.Function):
    """`step(x)`, with `gradient(x)` as its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Function, gradient: Function) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gradient = gradient
        return step(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None, None]:
        (x,) = ctx.saved_tensors
        return grad * ctx.gradient(x), None, None


class _TransformedSpike(torch.autograd.Function):
    """The same in the form that transforms and forward mode take, which costs every call more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, step: Function, gradient: Function) -> Tensor:
        return step(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, ctx.gradient = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None, None]:
        (x,) = ctx.saved_tensors
        return grad * ctx.gradient(x), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (x,) = ctx.saved_tensors
        return tangent * ctx.gradient(x)


def _apply(x: Tensor, step: Function, gradient: Function) -> Tensor:
    if (at_all_steps := getattr(type(x), "at_all_steps", None)) is not None:  # of `flexsn.over_time`
        return at_all_steps(x, lambda whole: _apply(whole, step, gradient))
    if torch.compiler.is_dynamo_compiling():
        return _Spike.apply(x, step, gradient)
    return (_TransformedSpike if transformed() else _Spike).apply(x, step, gradient)


def _reaches(x: Tensor) -> Tensor:
    return (x >= 0).to(x.dtype)


def _exceeds(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


def _spike(x: Tensor, gradient: Function, inclusive: bool) -> Tensor:
    return _apply(x, _reaches if inclusive else _exceeds, gradient)


def _choose(condition: Tensor, yes: float, no: float, x: Tensor) -> Tensor:
    """`torch.where` of two numbers, in the dtype of `x`."""
    mask = condition.to(x.dtype)
    return yes * mask + no * (1.0 - mask)


def _square(x: Tensor) -> Tensor:
    return x * x


# --- bumps: symmetric, falling on both sides of the threshold ---------------------------------------------------------------
@takes(alpha=POSITIVE)
def atan(x: Tensor, alpha: float = 2.0, *, inclusive: bool = True) -> Tensor:
    """Arctangent surrogate (Fang et al., ICCV 2021): gradient `(alpha / 2) / (1 + (pi / 2 * alpha * x)^2)`."""
    return _spike(x, lambda x: (0.5 * alpha) / (1.0 + _square((0.5 * math.pi * alpha) * x)), inclusive)


@takes(alpha=POSITIVE)
def sigmoid(x: Tensor, alpha: float = 4.0, *, inclusive: bool = True) -> Tensor:
    """Sigmoid surrogate: gradient `alpha * s * (1 - s)` with `s = sigmoid(alpha * x)`."""

    def gradient(x: Tensor) -> Tensor:
        s = torch.sigmoid(alpha * x)
        return alpha * s * (1.0 - s)

    return _spike(x, gradient, inclusive)


@takes(slope=NOT_NEGATIVE)
def fast_sigmoid(x: Tensor, slope: float = 25.0, *, inclusive: bool = True) -> Tensor:
    """Fast-sigmoid surrogate (Zenke & Vogels, 2021): gradient `1 / (1 + slope * |x|)^2`."""
    return _spike(x, lambda x: 1.0 / _square(1.0 + slope * x.abs()), inclusive)


@takes(beta=POSITIVE, height=HEIGHT)
def super_spike(x: Tensor, beta: float = 10.0, height: float | None = None, *, inclusive: bool = True) -> Tensor:
    """SuperSpike surrogate (Zenke & Ganguli, Neural Computation 2018): gradient `height / (1 + beta * |x|)^2`; `height` is `beta`
    unless given."""
    top = beta if height is None else height
    return _spike(x, lambda x: top / _square(1.0 + beta * x.abs()), inclusive)


@takes(alpha=POSITIVE)
def soft_sign(x: Tensor, alpha: float = 2.0, *, inclusive: bool = True) -> Tensor:
    """Soft-sign surrogate: gradient `(alpha / 2) / (1 + alpha * |x|)^2`."""
    return _spike(x, lambda x: (0.5 * alpha) / _square(1.0 + alpha * x.abs()), inclusive)


@takes(width=POSITIVE)
def piecewise_linear(x: Tensor, width: float = 1.0, *, inclusive: bool = True) -> Tensor:
    """Triangular surrogate (Esser et al., PNAS 2016): gradient `max(0, 1 - |x| / width) / width`."""
    return _spike(x, lambda x: ((1.0 - x.abs() / width) / width).clamp(min=0.0), inclusive)


@takes(alpha=POSITIVE)
def piecewise_quadratic(x: Tensor, alpha: float = 1.0, *, inclusive: bool = True) -> Tensor:
    """Piecewise quadratic surrogate (Neftci, Mostafa & Zenke, IEEE SPM 2019): gradient `max(0, alpha - alpha^2 * |x|)`; the
    same triangle as `piecewise_linear(width=1 / alpha)`."""
    return _spike(x, lambda x: (alpha * (1.0 - alpha * x.abs())).clamp(min=0.0), inclusive)


@takes(alpha=POSITIVE)
def piecewise_exp(x: Tensor, alpha: float = 1.0, *, inclusive: bool = True) -> Tensor:
    """Two-sided exponential surrogate (Shrestha & Orchard, NeurIPS 2018): gradient `alpha / 2 * exp(-alpha * |x|)`."""
    return _spike(x, lambda x: (0.5 * alpha) * torch.exp(-alpha * x.abs()), inclusive)


@takes(sigma=POSITIVE)
def gaussian(x: Tensor, sigma: float = 0.5, *, inclusive: bool = True) -> Tensor:
    """Gaussian surrogate (Yin, Corradi & Bohte, 2021): gradient is the normal density of width `sigma` at `x`."""
    height = 1.0 / (sigma * math.sqrt(2.0 * math.pi))
    return _spike(x, lambda x: torch.exp(-0.5 * _square(x / sigma)) * height, inclusive)


@takes(alpha=POSITIVE)
def erf(x: Tensor, alpha: float = 2.0, *, inclusive: bool = True) -> Tensor:
    """Error-function surrogate (Esser et al., NeurIPS 2015; Wu et al., 2018): gradient `alpha / sqrt(pi) * exp(-(alpha * x)^2)`."""
    return _spike(x, lambda x: torch.exp(-_square(alpha * x)) * (alpha / math.sqrt(math.pi)), inclusive)


@takes(alpha=POSITIVE)
def rect(x: Tensor, alpha: float = 1.0, *, inclusive: bool = True) -> Tensor:
    """Rectangular surrogate (Wu et al., Front. Neurosci. 2018): gradient `alpha` where `|x| < 1 / (2 alpha)`, else 0."""
    return _spike(x, lambda x: alpha * (x.abs() < 0.5 / alpha).to(x.dtype), inclusive)


@takes(alpha=POSITIVE)
def nonzero_sign_log_abs(x: Tensor, alpha: float = 1.0, *, inclusive: bool = True) -> Tensor:
    """Logarithmic surrogate: gradient `1 / (1 / alpha + |x|)`, whose area is not finite."""
    return _spike(x, lambda x: 1.0 / (1.0 / alpha + x.abs()), inclusive)


@takes(alpha=ABOVE_ONE)
def q_pseudo_spike(x: Tensor, alpha: float = 2.0, *, inclusive: bool = True) -> Tensor:
    """q-PseudoSpike (Herranz-Celotti & Rouat, 2022): gradient `(1 + 2 |x| / (alpha - 1))^(-alpha)`; `alpha > 1` is the weight of its
    tails."""
    return _spike(x, lambda x: (1.0 + (2.0 / (alpha - 1.0)) * x.abs()) ** -alpha, inclusive)


@takes(alpha=POSITIVE)
def fake_numerical_gradient(x: Tensor, alpha: float = 0.3, *, inclusive: bool = True) -> Tensor:
    """Secant of the step: gradient `min(1 / |x|, alpha)`."""
    return _spike(x, lambda x: (1.0 / x.abs()).clamp(max=alpha), inclusive)


# --- one side differs from the other ----------------------------------------------------------------------------------------
@takes(w=POSITIVE, c=FINITE)
def piecewise_leaky_relu(x: Tensor, w: float = 1.0, c: float = 0.01, *, inclusive: bool = True) -> Tensor:
    """Rectangle with a floor (Yin et al., 2017; Huh & Sejnowski, 2018; Wu et al., 2018): gradient `1 / (2 w)` where `|x| < w`, else `c`."""
    return _spike(x, lambda x: _choose(x.abs() < w, 0.5 / w, c, x), inclusive)


@takes(SOME_SLOPE, leak=FINITE, k=FINITE)
def leaky_k_relu(x: Tensor, leak: float = 0.0, k: float = 1.0, *, inclusive: bool = True) -> Tensor:
    """Leaky-ReLU surrogate: gradient `k` where it spikes, else `leak`."""
    return _spike(x, lambda x: _choose((x >= 0) if inclusive else (x > 0), k, leak, x), inclusive)


@takes(slope=FINITE)
def LSO(x: Tensor, slope: float = 0.1, *, inclusive: bool = True) -> Tensor:
    """Leaky spike operator: gradient 1 where it spikes, else `slope`; `leaky_k_relu(leak=slope)`."""
    return _spike(x, lambda x: _choose((x >= 0) if inclusive else (x > 0), 1.0, slope, x), inclusive)


@takes()
def heaviside(x: Tensor, *, inclusive: bool = True) -> Tensor:
    """The step as its own gradient: 1 where it spikes, else 0."""
    return _spike(x, _reaches if inclusive else _exceeds, inclusive)


@takes(alpha=FINITE)
def log_tailed_relu(x: Tensor, alpha: float = 0.0, *, inclusive: bool = True) -> Tensor:
    """Log-tailed ReLU (Cai et al., CVPR 2017): gradient `alpha` for `x <= 0`, 1 up to 1, then `1 / x`."""
    return _spike(x, lambda x: torch.where(x <= 0, alpha, 1.0 / x.clamp(min=1.0)), inclusive)


@takes(alpha=POSITIVE, beta=NOT_NEGATIVE)
def s2nn(x: Tensor, alpha: float = 4.0, beta: float = 1.0, *, inclusive: bool = True) -> Tensor:
    """S2NN (Suetake et al., Neural Networks 2023): gradient of `sigmoid(alpha * x)` for `x < 0`, else `beta / (1 + x)`."""

    def gradient(x: Tensor) -> Tensor:
        s = torch.sigmoid(alpha * x)
        return torch.where(x < 0, alpha * s * (1.0 - s), beta / (1.0 + x.abs()))

    return _spike(x, gradient, inclusive)


@takes(beta=NOT_NEGATIVE, slope=POSITIVE)
def spike_rate_escape(x: Tensor, beta: float = 1.0, slope: float = 25.0, *, inclusive: bool = True) -> Tensor:
    """Escape-rate surrogate (Gerstner & Kistler, 2002): gradient `slope * exp(-beta * |x - 1|)`, whose peak lies 1 above threshold."""
    return _spike(x, lambda x: slope * torch.exp(-beta * (x - 1.0).abs()), inclusive)


@takes(slope=NOT_NEGATIVE, B=FINITE)
def SFS(x: Tensor, slope: float = 25.0, B: float = 1.0, *, inclusive: bool = True) -> Tensor:
    """Sparse fast sigmoid (Perez-Nieves & Goodman, NeurIPS 2021): the gradient of `fast_sigmoid` where `x > B`, else 0."""
    return _spike(x, lambda x: (x > B).to(x.dtype) / _square(1.0 + slope * x.abs()), inclusive)


@takes(threshold=NOT_ZERO)
def triangular(x: Tensor, threshold: float = 1.0, *, inclusive: bool = True) -> Tensor:
    """The step of a triangle's slope, as snnTorch has it: gradient `threshold` below threshold, `-threshold` from there on.

    For the triangle itself see `piecewise_linear`.
    """
    return _spike(x, lambda x: _choose(x >= 0, -threshold, threshold, x), inclusive)


@takes(n=TERMS, T_period=POSITIVE)
def squarewave_fourier_series(x: Tensor, n: int = 2, T_period: float = 8.0, *, inclusive: bool = True) -> Tensor:
    """Fourier series of a square wave of period `T_period`: gradient `4 / T_period * sum(cos(2 pi (2 i - 1) x / T_period))` over
    `i = 1 .. n - 1`. Negative in places, and periodic."""

    def gradient(x: Tensor) -> Tensor:
        phase = x / T_period
        phase = (2.0 * math.pi) * (phase - torch.floor(phase))  # within one period, so no multiple of it overflows
        return (4.0 / T_period) * sum((torch.cos((2.0 * i - 1.0) * phase) for i in range(2, n)), torch.cos(phase))

    return _spike(x, gradient, inclusive)


# --- gradients that pass ----------------------------------------------------------------------------------------------------
@takes()
def straight_through(x: Tensor, *, inclusive: bool = True) -> Tensor:
    """Straight-through estimator (Bengio, Leonard & Courville, 2013): gradient 1 everywhere."""
    return _spike(x, lambda x: 1.0, inclusive)


straight_through_estimator = deterministic_pass = straight_through


@takes(max_spike_count=COUNT, grad_window=WINDOW)
def multi_level_spike_count(x: Tensor, max_spike_count: int = 1, grad_window: tuple[float, float] | None = None) -> Tensor:
    """Several spikes in a step: `x` rounded to the nearest integer from 0 to `max_spike_count` (halves to the even one, so
    `max_spike_count=1` spikes where `x > 0.5`); gradient 1 within `grad_window`, by default `[0, max_spike_count]`, else 0."""
    low, high = (0.0, float(max_spike_count)) if grad_window is None else grad_window
    return _apply(
        x,
        lambda x: torch.round(x.clamp(0.0, float(max_spike_count))),
        lambda x: ((x >= low) & (x <= high)).to(x.dtype),
    )


@takes(gradient=FUNCTION)
def custom_surrogate(x: Tensor, gradient: Function, *, inclusive: bool = True) -> Tensor:
    """A spike with a gradient of your own: `gradient(x)`, elementwise."""
    return _spike(x, functools.partial(_unlearned, gradient), inclusive)


def _unlearned(gradient: Function, x: Tensor) -> Any:
    with torch.enable_grad():
        slope = gradient(x.detach())
    if not isinstance(slope, (Tensor, numbers.Real)):
        raise ArgumentError(
            f"the `gradient` of custom_surrogate returned {type(slope).__name__}, not a tensor", hint="It takes `x` and returns its slope."
        )
    if isinstance(slope, Tensor) and slope.requires_grad:
        refuse_learned("custom_surrogate", "the `gradient`", slope)
    return gradient(x) if torch.is_grad_enabled() else slope


# --- with noise, which is an operand: a kernel draws no random numbers --------------------------------------------------------
@takes(noise=NOISE)
def poisson_pass(x: Tensor, noise: Tensor) -> Tensor:
    """A spike with probability `x`: 1 where `x > noise`, with `noise` uniform in [0, 1); gradient 1. Pass `torch.rand_like(x)` of the
    whole sequence as another input of the core."""
    return _spike(x - noise.detach(), lambda x: 1.0, False).to(x.dtype)


@takes(noise=NOISE, mean=FINITE, variance=FINITE)
def SSO(x: Tensor, noise: Tensor, mean: float = 0.0, variance: float = 0.2, *, inclusive: bool = True) -> Tensor:
    """Stochastic spike operator: gradient 1 where it spikes, else `(noise - 0.5 + mean) * variance` with `noise` uniform in [0, 1)."""
    s = (_reaches if inclusive else _exceeds)(x).detach()
    slope = torch.where(s > 0, 1.0, (noise.detach() - 0.5 + mean) * variance)
    return s + slope.to(x.dtype) * (x - x.detach())  # which adds 0
