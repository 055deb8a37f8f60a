"""Layers over sequences `[T, B, *shape]` that PyTorch has not: `PerStep`, and those of NIR."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._captured.uneven import Ends
from ..errors import ArgumentError, ShapeMismatchError, StateMismatchError
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
        steps: whole numbers, 0 or more: one for all, or a tensor of the shape of one step without its batch (or of any shape that
            broadcasts to it). They stay as they are: a longer delay is another layer.
        step_mode: `"m"`: calls take `[T, *shape]`; `"s"`: calls take one step `[*shape]`.

    Raises:
        ArgumentError: steps that are negative or no whole numbers.
    """

    steps: Tensor

    def __init__(self, steps: int | Sequence[int] | Tensor, step_mode: str = "m"):
        super().__init__(_hold, num_inputs=1, num_states=1, step_mode=step_mode)
        given = torch.as_tensor(steps)
        self.register_buffer("steps", given.to(torch.long))
        if bool(((self.steps != given) | (self.steps < 0)).any()):
            raise ArgumentError(f"Delay: steps must be whole numbers, 0 or more, not {steps!r}")
        self._measure()

    def _measure(self) -> None:
        """A number of Python, so that a compiled or exported call does not depend on the values of a tensor."""
        self.longest = int(self.steps.max()) if self.steps.numel() else 0

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._measure()

    def run(
        self, inputs: tuple[Tensor, ...], states: Sequence[Tensor | None], sequences: bool, ends: Ends | None = None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor] | None]:
        """The delayed sequence, and the last inputs of all; there are no states of every step."""
        if ends is not None:
            raise ArgumentError("Delay: takes neither `lengths` nor `resets`", hint="Run sequences of one length at a time.")
        (x,), (carried,) = inputs, states
        past = carried if carried is not None and self.longest else x.new_zeros(self.longest, *x.shape[1:])
        self._check(x, past)
        line = torch.cat([past, x])
        times = torch.arange(x.shape[0], device=x.device).view(-1, *[1] * (x.dim() - 1)) + (self.longest - self.steps)
        return [line.gather(0, times.expand(x.shape))], [line[x.shape[0] :]], None

    def _check(self, x: Tensor, past: Tensor) -> None:
        fits = self.steps.dim() < x.dim() and all(n in (1, m) for n, m in zip(self.steps.shape[::-1], x.shape[::-1], strict=False))
        if not fits:
            raise ShapeMismatchError(f"Delay: steps of shape {list(self.steps.shape)} do not broadcast to one step {list(x.shape[1:])}")
        if past.shape != (self.longest, *x.shape[1:]) or past.dtype != x.dtype or past.device != x.device:
            raise StateMismatchError(
                f"Delay: carries {past.shape[0]} inputs of shape {list(past.shape[1:])}, {past.dtype} on {past.device}, and needs "
                f"{self.longest} of {list(x.shape[1:])}, {x.dtype} on {x.device}",
                hint="Call `reset()` on it (`flexsn.reset_net(model)` on all of a network) before a sequence of another kind.",
            )

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
