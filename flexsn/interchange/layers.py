"""Layers over sequences `[T, B, *shape]` that PyTorch has not: `PerStep`, and those of NIR."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import ShapeMismatchError
from ..module import FlexSN


class PerStep(nn.Module):
    """A stateless module applied to every step: all dims before the last `rank` are folded into its batch.

    Args:
        module: takes `[N, *shape]`, as `nn.Conv2d` takes `[N, C, H, W]`.
        rank: how many dims `shape` has; 3 for `nn.Conv2d`.
    """

    def __init__(self, module: nn.Module, rank: int):
        super().__init__()
        self.module, self.rank = module, rank

    def forward(self, x: Tensor) -> Tensor:
        """`[T, B, *shape]` to `[T, B, *out]`; so with any other dims before `shape`."""
        if x.dim() <= self.rank:
            raise ShapeMismatchError(
                f"PerStep: an input of shape {list(x.shape)} has no dims before the {self.rank} of one step",
                hint="Inputs are [T, B, *shape]; `rank` counts the dims of `shape`, for `nn.Conv2d` 3.",
            )
        leading = x.shape[: x.dim() - self.rank]
        return self.module(x.reshape(-1, *x.shape[x.dim() - self.rank :])).unflatten(0, leading)

    def extra_repr(self) -> str:
        return f"rank={self.rank}"


class Scale(nn.Module):
    """`y = scale * x`, elementwise; `scale` has the shape of one step without its batch."""

    def __init__(self, scale: Tensor):
        super().__init__()
        self.scale = nn.Parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Threshold(nn.Module):
    """1 where `x > threshold`, with a surrogate gradient."""

    threshold: Tensor

    def __init__(self, threshold: Tensor, spike: Callable[[Tensor], Tensor]):
        super().__init__()
        self.register_buffer("threshold", threshold)
        self.spike = spike

    def forward(self, x: Tensor) -> Tensor:
        return self.spike(x - self.threshold)


class SumPool2d(nn.AvgPool2d):
    """Sums of windows: the mean, times the number of elements."""

    def forward(self, x: Tensor) -> Tensor:
        size = self.kernel_size
        count = size * size if isinstance(size, int) else size[0] * size[1]
        return super().forward(x) * count


def _hold(x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    return past, x


class Delay(FlexSN):
    """`y[t] = x[t - steps]`, 0 before the sequence began. The last inputs are carried from call to call until `reset()`.

    Args:
        steps: whole numbers, of the shape of one step without its batch (or of any shape that broadcasts to it).
    """

    steps: Tensor

    def __init__(self, steps: Tensor):
        super().__init__(_hold, num_inputs=1, num_states=1)
        self.register_buffer("steps", steps.to(torch.long))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # one input
        """`[T, *shape]` to the same."""
        longest = int(self.steps.max()) if self.steps.numel() else 0
        past = self.states[0] if self.states is not None else x.new_zeros(longest, *x.shape[1:])
        line = torch.cat([past, x])
        self._carry([line[line.shape[0] - longest :]], None)
        times = torch.arange(x.shape[0], device=x.device).view(-1, *[1] * (x.dim() - 1)) + (longest - self.steps)
        return line.gather(0, times.expand(x.shape))

    def extra_repr(self) -> str:
        return f"steps={self.steps.unique().tolist()}"


class Feedback(FlexSN):
    """What an edge that closes a cycle carries: the output of the step before, zeros at first.

    Args:
        shape: of that output at one step, without its batch.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(_hold, num_inputs=1, num_states=1)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # one input
        """What arrives in a step whose input to the whole network is `x`, `[1, B, *]`."""
        return x.new_zeros(*x.shape[:2], *self.shape) if self.states is None else self.states[0]

    def put(self, value: Tensor) -> None:
        self._carry([value], None)
