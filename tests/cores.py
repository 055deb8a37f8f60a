"""Cores that several tests share."""

import torch

from flexsn import surrogate


def leaky(x, v, decay):
    """1-1-1: smooth; a polynomial, so exact in forward and gradcheck-able."""
    v = v * decay + x
    return v * v - 0.5 * v, v


def lif(x, v, tau, v_th):
    """1-1-2: leaky integrate-and-fire, hard reset."""
    h = v + (x - v) / tau
    s = surrogate.atan(h - v_th)
    return s, h * (1.0 - s)


def lif_soft(x, v, tau, v_th):
    h = v + (x - v) / tau
    s = surrogate.fast_sigmoid(h - v_th)
    return s, h - s * v_th


def lif_detached_reset(x, v, tau, v_th):
    h = v + (x - v) / tau
    s = surrogate.piecewise_linear(h - v_th)
    return s, h * (1.0 - s.detach())


def plif(x, v, w):
    """The decay is a sigmoid of a param: computed once per call, outside the kernel."""
    h = v + (x - v) * torch.sigmoid(w)
    s = surrogate.super_spike(h - 1.0)
    return s, torch.where(s > 0, torch.zeros_like(h), h)


def adlif(x1, x2, v, a, beta, rho):
    """2-2-2: adaptive leaky integrate-and-fire with two inputs and two outputs."""
    h = v * beta + x1 - a
    s = surrogate.sigmoid(h - 1.0 - 0.5 * x2)
    v = h - s
    a = a * rho + 0.25 * s + 0.125 * v * x2
    return s, h + x2, v, a


def relu_mem(x, v):
    """1-1-0 with only exact ops and no surrogate."""
    h = (v * 0.5 + x).clamp(min=-1.0, max=2.0)
    return torch.maximum(h, -0.25 * x), h


def recurrent_lif(x, v, s, w):
    h = v + (x + s @ w - v) / 2.0
    s = surrogate.atan(h - 1.0)
    return s, h * (1.0 - s), s
