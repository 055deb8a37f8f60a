"""Seconds: of a call, and of a copy that moves as many bytes; and what else the machine was doing."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

_LEAST, _SPAN = 5, 0.2  # samples, and seconds after which no more are taken
_LARGEST = 256 << 20  # bytes of one side of the copy; a longer one takes as many times longer
DISTURBED = 0.1  # share of the cores that others may take before times are called too long


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


class Others:
    """How busy other processes keep the machine, from when this is made."""

    def __init__(self) -> None:
        self._start = _clocks()

    def share(self) -> float | None:
        """Of all cores, between 0 and 1; None where the system does not say."""
        now = _clocks()
        if now is None or self._start is None:
            return None
        wall, busy, own = (b - a for a, b in zip(self._start, now, strict=True))
        return min(1.0, max(0.0, (busy - own) / (max(wall, 0.01) * (os.cpu_count() or 1))))


def _clocks() -> tuple[float, float, float] | None:
    """Seconds: on the wall, of all busy cores, of this process."""
    try:
        ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:
        return None
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK"), used.ru_utime + used.ru_stime


def disturbance(share: float | None) -> str:
    """A warning where others were busy, else ""."""
    if share is None or share < DISTURBED:
        return ""
    return f"Other processes used {share:.0%} of the cores meanwhile: the times are too long."
