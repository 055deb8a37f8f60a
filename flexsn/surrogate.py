"""Surrogate spikes: a Heaviside step forward, a smooth gradient backward.

`spike(x)` is 1 where `x >= 0`, else 0, in the dtype of `x`; the gradient of a surrogate is a bump around 0 that stands
in for the derivative of the step, which is zero almost everywhere. All take the distance to threshold `x` (any shape,
same unit as the membrane) and return a tensor of its shape. All forms are stable: no overflow for any finite `x`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .errors import OperandTypeError

__all__ = ["atan", "fast_sigmoid", "gaussian", "piecewise_linear", "sigmoid", "straight_through", "super_spike"]


class _Spike(torch.autograd.Function):
    """The step, with `gradient(x)` as its derivative."""

    @staticmethod
    def forward(ctx, x: Tensor, gradient: Callable[[Tensor], Tensor | float]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gradient = gradient
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        return grad * ctx.gradient(x), None


class _TransformedSpike(torch.autograd.Function):
    """The same in the form that transforms and forward mode take, which costs every call more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, gradient: Callable[[Tensor], Tensor | float]) -> Tensor:
        return (x >= 0).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.gradient = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        return grad * ctx.gradient(x), None

    @staticmethod
    def jvp(ctx, tangent: Tensor, _):
        (x,) = ctx.saved_tensors
        return tangent * ctx.gradient(x)


def _spike(x: Tensor, gradient: Callable[[Tensor], Tensor | float]) -> Tensor:
    if not isinstance(x, Tensor):
        raise OperandTypeError(f"a surrogate takes a tensor, not {type(x).__name__}", hint="Make it a tensor: `torch.as_tensor(value)`.")
    if torch.compiler.is_dynamo_compiling():
        return _Spike.apply(x, gradient)
    transformed = torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0  # 2.11, 2.13
    return (_TransformedSpike if transformed else _Spike).apply(x, gradient)


def _square(x: Tensor) -> Tensor:
    return x * x


def atan(x: Tensor, alpha: float = 2.0) -> Tensor:
    """Arctangent surrogate (Fang et al., ICCV 2021): gradient `(alpha / 2) / (1 + (pi / 2 * alpha * x)^2)`."""
    return _spike(x, lambda x: (0.5 * alpha) / (1.0 + _square((0.5 * math.pi * alpha) * x)))


def sigmoid(x: Tensor, alpha: float = 4.0) -> Tensor:
    """Sigmoid surrogate: gradient `alpha * s * (1 - s)` with `s = sigmoid(alpha * x)`."""

    def gradient(x: Tensor) -> Tensor:
        s = torch.sigmoid(alpha * x)
        return alpha * s * (1.0 - s)

    return _spike(x, gradient)


def fast_sigmoid(x: Tensor, slope: float = 25.0) -> Tensor:
    """Fast-sigmoid surrogate (Zenke & Vogels, 2021): gradient `1 / (1 + slope * |x|)^2`."""
    return _spike(x, lambda x: 1.0 / _square(1.0 + slope * x.abs()))


def super_spike(x: Tensor, beta: float = 10.0) -> Tensor:
    """SuperSpike surrogate (Zenke & Ganguli, Neural Computation 2018): gradient `beta / (1 + beta * |x|)^2`."""
    return _spike(x, lambda x: beta / _square(1.0 + beta * x.abs()))


def piecewise_linear(x: Tensor, width: float = 1.0) -> Tensor:
    """Triangular surrogate (Esser et al., PNAS 2016): gradient `max(0, 1 - |x| / width) / width`."""
    return _spike(x, lambda x: ((1.0 - x.abs() / width) / width).clamp(min=0.0))


def gaussian(x: Tensor, sigma: float = 0.5) -> Tensor:
    """Gaussian surrogate (Yin, Corradi & Bohte, 2021): gradient is the normal density of width `sigma` at `x`."""
    height = 1.0 / (sigma * math.sqrt(2.0 * math.pi))
    return _spike(x, lambda x: torch.exp(-0.5 * _square(x / sigma)) * height)


def straight_through(x: Tensor) -> Tensor:
    """Straight-through estimator (Bengio, Leonard & Courville, 2013): gradient 1 everywhere."""
    return _spike(x, lambda x: 1.0)
