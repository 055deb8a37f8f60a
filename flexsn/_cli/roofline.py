"""The roofline: what memory and arithmetic of this machine allow, and where the kernels are."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._report import Report, explain
from .outcome import UsageError

_CHAINS, _LENGTH = 8, 16  # independent chains of multiplications and additions


def _busy(x: Tensor) -> Tensor:
    """As many operations per element that a kernel has nothing else to wait for."""
    values = [x + float(k) for k in range(_CHAINS)]
    for _ in range(_LENGTH):
        values = [v * 0.999 + 0.001 for v in values]
    return sum(values[1:], start=values[0])


def arithmetic_rate(device: torch.device) -> float:
    """Operations per second of float32 multiplications and additions in a kernel, arrays in cache."""
    x = torch.rand(16, 32768, device=device)
    report = explain(_busy, x)
    assert isinstance(report, Report), "a core gives one report"
    found = report.passes["inference"]
    assert found.measured_s is not None, "there are neurons to time"
    return found.operations_per_neuron_step * x.numel() / found.measured_s


def plot(data: dict[str, Any], path: str) -> Path:
    """Draw operations per second over operations per byte, into a file."""
    try:
        draw(data).savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # no such folder; no such format
        raise UsageError(f"cannot write {path}: {error}") from None
    return Path(path)


def draw(data: dict[str, Any]) -> Any:
    """The figure, on logarithmic axes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    points = [(case["neuron"], mode, found) for case in data["cases"] for mode, found in case["modes"].items()]
    intensities = [found["operations_per_neuron_step"] / found["bytes_per_neuron_step"] for _, _, found in points]
    _draw_roof(axes, max(found["copy_rate"] for _, _, found in points), data["arithmetic_rate"], intensities)
    neuron_steps = math.prod(data["shape"])
    for (neuron, mode, found), intensity, marker in zip(points, intensities, itertools.cycle("os^Dv<>p"), strict=False):
        for candidate, colour in zip(found["candidates"][:2], _COLOURS, strict=True):
            rate = found["operations_per_neuron_step"] * neuron_steps / candidate["seconds"]
            axes.plot(intensity, rate, marker, color=colour, markersize=8)
        axes.plot([], [], marker, color="grey", label=f"{neuron}, {mode}")
    for colour, name in zip(_COLOURS, ("flexsn", "eager loop, at the kernel's operations per byte"), strict=True):
        axes.plot([], [], "s", color=colour, label=name)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="operations per second")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())  # over two decades its labels lie on each other
    axes.set_title(f"T and step shape {data['shape']} on {data['device']}, {data['threads']} threads")
    axes.legend(fontsize=8)
    axes.grid(True, which="both", alpha=0.2)
    return figure


_COLOURS = ("tab:blue", "tab:red")


def _draw_roof(axes: Any, copy_rate: float, peak: float, intensities: list[float]) -> None:
    """What memory allows up to the ridge, and arithmetic from there on."""
    ridge = peak / copy_rate
    low, high = min([*intensities, ridge]) / 4, max([*intensities, ridge]) * 4
    axes.plot([low, ridge, high], [low * copy_rate, peak, peak], color="black", linewidth=1.5)
    axes.annotate(f"copy, {copy_rate / 1e9:.0f} GB/s", (low, low * copy_rate), xytext=(14, 0), textcoords="offset points")
    axes.annotate(f"arithmetic, {peak / 1e9:.0f} Gop/s", (high, peak), ha="right", xytext=(0, 5), textcoords="offset points")
