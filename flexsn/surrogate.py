"""Surrogate spikes: a Heaviside step forward, a smooth gradient backward.

`spike(x)` is 1 where `x >= 0`, else 0, in the dtype of `x`; the gradient of a surrogate is a bump around 0 that stands
in for the derivative of the step, which is zero almost everywhere. All take the distance to threshold `x` (any shape,
same unit as the membrane) and return a tensor of its shape. All forms are stable: no overflow for any finite `x`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["atan", "fast_sigmoid", "gaussian", "piecewise_linear", "sigmoid", "straight_through", "super_spike"]


def _spike(x: Tensor) -> Tensor:
    return (x >= 0).to(x.dtype)


class _ATan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.save_for_backward(x)
        ctx.alpha = alpha
        return _spike(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        scaled = (0.5 * math.pi * ctx.alpha) * x
        return grad * ((0.5 * ctx.alpha) / (1.0 + scaled * scaled)), None


def atan(x: Tensor, alpha: float = 2.0) -> Tensor:
    """Arctangent surrogate (Fang et al., ICCV 2021): gradient `(alpha / 2) / (1 + (pi / 2 * alpha * x)^2)`."""
    return _ATan.apply(x, alpha)


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.save_for_backward(x)
        ctx.alpha = alpha
        return _spike(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(ctx.alpha * x)
        return grad * (ctx.alpha * s * (1.0 - s)), None


def sigmoid(x: Tensor, alpha: float = 4.0) -> Tensor:
    """Sigmoid surrogate: gradient `alpha * s * (1 - s)` with `s = sigmoid(alpha * x)`."""
    return _Sigmoid.apply(x, alpha)


class _FastSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slope):
        ctx.save_for_backward(x)
        ctx.slope = slope
        return _spike(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        d = 1.0 + ctx.slope * x.abs()
        return grad / (d * d), None


def fast_sigmoid(x: Tensor, slope: float = 25.0) -> Tensor:
    """Fast-sigmoid surrogate (Zenke & Vogels, 2021): gradient `1 / (1 + slope * |x|)^2`."""
    return _FastSigmoid.apply(x, slope)


class _SuperSpike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, beta):
        ctx.save_for_backward(x)
        ctx.beta = beta
        return _spike(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        d = 1.0 + ctx.beta * x.abs()
        return grad * (ctx.beta / (d * d)), None


def super_spike(x: Tensor, beta: float = 10.0) -> Tensor:
    """SuperSpike surrogate (Zenke & Ganguli, Neural Computation 2018): gradient `beta / (1 + beta * |x|)^2`."""
    return _SuperSpike.apply(x, beta)


class _PiecewiseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, width):
        ctx.save_for_backward(x)
        ctx.width = width
        return _spike(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        height = (1.0 - x.abs() / ctx.width) / ctx.width
        return grad * height.clamp(min=0.0), None


def piecewise_linear(x: Tensor, width: float = 1.0) -> Tensor:
    """Triangular surrogate (Esser et al., PNAS 2016): gradient `max(0, 1 - |x| / width) / width`."""
    return _PiecewiseLinear.apply(x, width)


class _Gaussian(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sigma):
        ctx.save_for_backward(x)
        ctx.sigma = sigma
        return _spike(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        z = x / ctx.sigma
        return grad * (torch.exp(-0.5 * z * z) / (ctx.sigma * math.sqrt(2.0 * math.pi))), None


def gaussian(x: Tensor, sigma: float = 0.5) -> Tensor:
    """Gaussian surrogate (Yin, Corradi & Bohte, 2021): gradient is the normal density of width `sigma` at `x`."""
    return _Gaussian.apply(x, sigma)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _spike(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def straight_through(x: Tensor) -> Tensor:
    """Straight-through estimator (Bengio, Leonard & Courville, 2013): gradient 1 everywhere."""
    return _StraightThrough.apply(x)
