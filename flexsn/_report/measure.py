"""Seconds: of a call, and of a copy that moves as many bytes; and what else the machine was doing."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_LEAST, _SPAN = 5, 0.2  # samples of a call, and seconds per call after which no more are taken
_IN_A_ROW = 2  # samples before another call has its turn: the second finds its own data in the caches
_LARGEST = 256 << 20  # bytes of one side of the copy; a longer one takes as many times longer
DISTURBED = 0.1  # share of the cores that others may take before times are called too long


def least_seconds(call: Callable[[], object], device: torch.device) -> float:
    """The shortest of several calls, after one that does not count: what other processes do on the machine only adds."""
    return least_of_each([call], device)[0]


def least_of_each(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """The shortest of several calls of each, as many of one as of another, taken in turns: a while in which the machine is busy
    falls on all of them."""
    for call in calls:
        call()
    samples: list[list[float]] = [[] for _ in calls]
    begun = time.perf_counter()
    while len(samples[0]) < _LEAST or time.perf_counter() - begun < _SPAN * len(calls):
        for call, own in zip(calls, samples, strict=True):
            own += [_seconds(call, device) for _ in range(_IN_A_ROW)]
    return [min(own) for own in samples]


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


@dataclass(frozen=True)
class Copy:
    """PyTorch's copy of so many bytes, half read and half written, on all its threads.

    Attributes:
        call: copies them, or the largest part that there is room for.
        times: how often that part is in the whole.
    """

    call: Callable[[], object]
    times: float


def copy_of(nbytes: int, device: torch.device) -> Copy:
    size = max(1, min(nbytes // 2, _LARGEST))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Copy(lambda: target.copy_(source), max(1.0, nbytes / (2 * size)))


def beside_copies(
    calls: Mapping[str, Callable[[], object]], moved: Mapping[str, int], device: torch.device
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """By name: seconds of a call, and of a copy of the bytes that it moves. Where two move as many, their copy is one."""
    copies = {nbytes: copy_of(nbytes, device) for nbytes in dict.fromkeys(moved.values())}
    found = least_of_each([*calls.values(), *[copy.call for copy in copies.values()]], device)
    of_calls = dict(zip(calls, found, strict=False))
    of_copies = {n: s * copy.times for (n, copy), s in zip(copies.items(), found[len(calls) :], strict=True)}
    return {name: (of_calls[name], of_copies[moved[name]]) for name in calls}


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
