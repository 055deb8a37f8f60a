"""Seconds: of a call, and of a copy that moves as many bytes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_LEAST, _SPAN = 5, 0.1  # samples, and seconds after which no more are taken
_LARGEST = 256 << 20  # bytes of one side of the copy; a longer one takes as many times longer


def least_seconds(call: Callable[[], object], device: torch.device) -> float:
    """The shortest of several calls, after one that does not count: what other processes do on the machine only adds."""
    call()
    samples: list[float] = []
    begun = time.perf_counter()
    while len(samples) < _LEAST or time.perf_counter() - begun < _SPAN:
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        samples.append(time.perf_counter() - start)
    return min(samples)


def copy_seconds(nbytes: int, device: torch.device) -> float:
    """What PyTorch's copy takes to move so many bytes, half read and half written, on all its threads."""
    size = max(1, min(nbytes // 2, _LARGEST))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return least_seconds(lambda: target.copy_(source), device) * max(1.0, nbytes / (2 * size))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
