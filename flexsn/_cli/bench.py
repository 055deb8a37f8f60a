"""`flexsn bench`: this machine; fused against the eager loop and installed peers, beside what its memory allows."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from .._report.measure import Others, disturbance
from .._report.words import seconds
from .candidates import NEURONS, compare
from .explain import device_of, shape
from .outcome import Outcome, UsageError, table
from .roofline import arithmetic_rate, plot


def add_bench(commands: Any) -> list[argparse.ArgumentParser]:
    about = "time this machine: fused against the eager loop and installed peers, and a roofline"
    parser = commands.add_parser("bench", help=about, description=about[0].upper() + about[1:] + ".")
    parser.add_argument("--shape", type=shape, default=(100, 32, 512), metavar="T,N...", help="of the input (default: 100,32,512)")
    parser.add_argument("--neuron", choices=NEURONS, action="append", help="by default all")
    parser.add_argument("--device", default="cpu", help="where to run, such as cuda (default: %(default)s)")
    parser.add_argument("--no-peers", action="store_true", help="leave out other libraries, which take seconds to import")
    parser.add_argument("--plot", metavar="FILE", help="draw the roofline (.png, .svg, .pdf); needs matplotlib")
    parser.set_defaults(run=run)
    return [parser]


def run(args: argparse.Namespace) -> Outcome:
    device = device_of(args)
    if len(args.shape) < 2 or 0 in args.shape:
        raise UsageError(f"shape {args.shape} has no neurons to time", hint="Write steps and the shape of a step: --shape 100,32,512")
    if args.plot:
        _need_matplotlib()
    others = Others()
    cases = [compare(name, args.shape, device, peers=not args.no_peers) for name in args.neuron or NEURONS]
    data: dict[str, Any] = {
        "shape": list(args.shape), "device": str(device), "threads": torch.get_num_threads(), "torch": torch.__version__,
        "arithmetic_rate": arithmetic_rate(device), "cases": cases,
        "others_busy": others.share(),
    }  # fmt: skip
    text = _text(data)
    if args.plot:
        data["plot"] = str(plot(data, args.plot))
        text += f"\nwrote {data['plot']}"
    return Outcome(text, data)


def _need_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed", hint='Install it with `pip install "flexsn[report]"`.')


def _text(data: dict[str, Any]) -> str:
    lines = [f"T and step shape {data['shape']} on {data['device']}, {data['threads']} threads, torch {data['torch']}"]
    lines.append("Times of whole calls, the shortest of several, and how many times as long as flexsn's, or as the bound's, that is.")
    lines.append("Bound: a copy that moves as many bytes.")
    for case in data["cases"]:
        for mode, found in case["modes"].items():
            facts = f"{found['bytes_per_neuron_step']:g} B and {found['operations_per_neuron_step']} operations per neuron-step"
            lines.append(f"\n{case['neuron']}, {mode}: {facts}; bound {seconds(found['bound_s'])} ({found['copy_rate'] / 1e9:.1f} GB/s)")
            lines.append(table([_row(c, found) for c in found["candidates"]], "  "))
    lines.append(f"\narithmetic, measured in a kernel: {data['arithmetic_rate'] / 1e9:.1f} Gop/s")
    lines += filter(None, [disturbance(data["others_busy"])])
    return "\n".join(lines)


def _row(candidate: dict[str, Any], found: dict[str, Any]) -> tuple[str, ...]:
    if candidate["seconds"] is None:
        return candidate["name"], "not run", "", candidate["note"]
    fused = found["candidates"][0]["seconds"]
    ratio = "" if candidate["name"] == "flexsn" else f"{candidate['seconds'] / fused:.1f} x flexsn"
    ratio = ratio or f"{fused / found['bound_s']:.1f} x bound"
    return candidate["name"], seconds(candidate["seconds"]), ratio, candidate["note"]
