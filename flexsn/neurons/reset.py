"""What the neurons of the zoo share: what a spike does to the membrane, and functions of an argument."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import ArgumentError

Number = float | Tensor
Reset = float | Tensor | str | None


def reset(h: Tensor, s: Tensor, v_threshold: Number, v_reset: Reset, detach_reset: bool) -> Tensor:
    """The membrane after the spikes `s` of `h`.

    `v_reset`, a number: hard reset, the membrane is set to it; None: soft reset, the threshold is subtracted;
    `"never"`: no reset. `detach_reset`: no gradient through the spike that resets.
    """
    if isinstance(v_reset, str):
        if v_reset != "never":
            raise ArgumentError(f'v_reset is a number (hard reset), None (soft reset) or "never", not {v_reset!r}')
        return h
    if detach_reset:
        s = s.detach()
    if v_reset is None:
        return h - s * v_threshold
    return (1.0 - s) * h + s * v_reset


def apply(function: str, value: Number) -> Number:
    """`exp`, `cos`, `sin` of an argument, which is a number or a tensor."""
    return getattr(torch if isinstance(value, Tensor) else math, function)(value)


def sigmoid(value: Number) -> Number:
    return torch.sigmoid(value) if isinstance(value, Tensor) else 1.0 / (1.0 + math.exp(-value))
