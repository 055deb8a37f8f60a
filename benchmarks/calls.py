"""What a call costs: training steps and inference of a LIF, beside an autograd Function in Python that doubles its input.

    python benchmarks/calls.py [--device cuda] [--output calls.json]

All of a row are measured in turns, on one CPU thread: on a CPU at T = 4, N = 16; on a GPU, kernels included, at 4 x 1024 and 96 x 32768.
Printed, and written as JSON, is the best turn of each in microseconds, and its ratio to the Function's.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import flexsn
from flexsn import FlexSN

TURNS = {"cpu": (60, 200), "cuda": (40, 300)}  # turns, and calls in each
SIZES = {"cpu": [(4, 16)], "cuda": [(4, 1024), (96, 32768)]}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def lif(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v + (x - v) / 2.0
    s = flexsn.surrogate.atan(h - 1.0)
    return s, h * (1.0 - s)


class Learned(nn.Module):
    """The same with a learned time constant."""

    def __init__(self) -> None:
        super().__init__()
        self.tau = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + (x - v) / self.tau
        s = flexsn.surrogate.atan(h - 1.0)
        return s, h * (1.0 - s)


def measure(T: int, N: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Best turn and median of every call, in microseconds."""
    x, cotangent = (2 * torch.rand(T, 1, N, device=device)).requires_grad_(), torch.rand(T, 1, N, device=device)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "Function": Doubled.apply,
        "LIF": FlexSN(lif, num_states=1, stateful=False),
        "learned LIF": FlexSN(Learned().to(device), num_states=1, stateful=False),
    }

    def train(call: Callable[[Tensor], Tensor]) -> None:
        call(x).backward(cotangent)
        x.grad = None

    def infer(call: Callable[[Tensor], Tensor]) -> None:
        with torch.no_grad():
            call(x)

    turns, count = TURNS[device.type]
    times: dict[str, list[float]] = {f"{name}, {run.__name__}": [] for name in calls for run in (train, infer)}
    for turn in range(turns + 3):
        for name, call in calls.items():
            for run in (train, infer):
                if device.type == "cuda":
                    torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(count):
                    run(call)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if turn >= 3:
                    times[f"{name}, {run.__name__}"].append((time.perf_counter() - start) / count * 1e6)
    return {name: {"best_us": min(found), "median_us": statistics.median(found)} for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    rows = []
    for T, N in SIZES[options.device]:
        found = measure(T, N, device)
        for name, row in found.items():
            row["ratio"] = row["best_us"] / found[f"Function, {name.split(', ')[1]}"]["best_us"]
            print(f"{T} x {N}  {name:20s} {row['best_us']:8.1f} us (median {row['median_us']:.1f}), {row['ratio']:.2f}x of the Function")
        rows.append({"T": T, "N": N, "calls": found})
    machine = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    if options.output is not None:
        versions = {"torch": torch.__version__, "flexsn": flexsn.__version__, "python": platform.python_version()}
        options.output.write_text(json.dumps({"device": machine, "versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
