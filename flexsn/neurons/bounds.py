"""Bounds of learned constants, by PyTorch's own `torch.nn.utils.parametrize`."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ..errors import ArgumentError


class Bounded(nn.Module):
    """A parametrization that keeps a tensor between bounds: `parametrize.register_parametrization(module, "w", Bounded(0.0, None))`.

    What is learned is a tensor `z` without bounds. The tensor is `low + softplus(z)` or `high - softplus(z)` with one bound, and
    `low + (high - low) sigmoid(z)` with two. Its gradient shrinks towards a bound but is never zero, so a constant that was driven there
    comes back. A clamp would have none beyond the bound, and the constant would stay there for good.

    Args:
        low, high: numbers; None for no bound. The tensor stays between them, and by rounding may come to equal one.

    Raises:
        ArgumentError: bounds that leave nothing between them; a tensor that is not between them, when it is registered or assigned.
    """

    def __init__(self, low: float | None = None, high: float | None = None):
        super().__init__()
        self.low, self.high = (-math.inf if low is None else low), (math.inf if high is None else high)
        if not self.low < self.high or (low is None and high is None):
            raise ArgumentError(f"bounds are numbers (low, high) with low < high, one of them possibly None, not ({low!r}, {high!r})")

    def forward(self, z: Tensor) -> Tensor:
        if self.high == math.inf:
            return self.low + softplus(z)
        if self.low == -math.inf:
            return self.high - softplus(z)
        width = self.high - self.low  # from the nearer bound, where the sigmoid's gradient does not round to zero
        return torch.where(z > 0, self.high - width * torch.sigmoid(-z), self.low + width * torch.sigmoid(z))

    def right_inverse(self, value: Tensor) -> Tensor:
        """Return the `z` of a tensor."""
        if not isinstance(value, Tensor):
            raise ArgumentError(f"a bounded tensor is set to a tensor, not {value!r}", hint="Write `torch.full_like(neuron.tau, 3.0)`.")
        if not bool(((value > self.low) & (value < self.high)).all()):
            raise ArgumentError(f"{value.detach().tolist()} is not between the bounds {self.low} and {self.high}")
        if self.low > -math.inf and self.high < math.inf:
            return torch.log(value - self.low) - torch.log(self.high - value)
        beyond = value - self.low if self.high == math.inf else self.high - value
        return beyond + torch.log(-torch.expm1(-beyond))

    def extra_repr(self) -> str:
        return f"{self.low}, {self.high}"
