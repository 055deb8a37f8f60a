"""What a run of `digits.py` leaves behind: a training step timed fused and eager, `metrics.json` and the picture."""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import common
import numpy
import torch
from digits_picture import draw
from torch import Tensor, nn

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def step_times(net: nn.Module, loss_of: Loss, spikes: Tensor, labels: Tensor, repeats: int) -> tuple[float, float]:
    """Median seconds of a training step, fused and eager: the same model and batch, taking turns."""
    runs: list[tuple[nn.Module, torch.optim.Optimizer, list[float]]] = []
    for backend in ("auto", "torch"):
        model = copy.deepcopy(net)
        for layer in model[1::2]:
            layer.backend = backend
        runs.append((model, torch.optim.AdamW(model.parameters()), []))
    for _ in range(3 + repeats):
        for model, optimizer, seconds in runs:
            start = time.perf_counter()
            optimizer.zero_grad()
            loss_of(model, spikes, labels).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
    fused_s, eager_s = (statistics.median(seconds[3:]) for _, _, seconds in runs)
    return fused_s, eager_s


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def report(args: argparse.Namespace, done: dict, loss_of: Loss) -> dict:
    """Time, draw, write and print what `train` returned; `loss_of(net, spikes, labels)` is what a step descends."""
    test, test_spikes, test_labels = done["test"]
    fused_s, eager_s = step_times(done["net"], loss_of, test_spikes[:, :64], test_labels[:64], repeats=5 if args.quick else 30)
    per_epoch = [statistics.fmean(part) for part in numpy.array_split(done["losses"], args.epochs)]
    metrics = {
        "test_accuracy": done["accuracies"][-1], "test_accuracy_per_epoch": done["accuracies"], "test_images": len(test),
        "loss_first": done["losses"][0], "loss_last_epoch": per_epoch[-1], "loss_per_epoch": per_epoch, "seconds": done["seconds"],
        "step_seconds_fused": fused_s, "step_seconds_eager": eager_s, "speed_up": eager_s / fused_s, "steps": done["steps"],
        "hidden": done["hidden"], "batch": done["batch"], "numpy": numpy.__version__, "cpu": cpu_model(),
    }  # fmt: skip
    print(f"training step: fused {1e3 * fused_s:.2f} ms, eager {1e3 * eager_s:.2f} ms: {eager_s / fused_s:.1f} times as fast")
    return common.report(args, draw(done, fused_s, eager_s), metrics)
