"""Long sequences of few neurons: `python benchmarks/long.py --json out.json`.

The backward of an LIF, and calls of a leaky integrator with `exact=False`, walk parts of time side by side; the same with
`torch.use_deterministic_algorithms(True)`, or `exact=True`, walk one step after the other. Both take turns, on one and two threads; how far
results differ is printed, too. On a CPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

import flexsn

sys.path.insert(0, str(Path(__file__).parent))
from measure import interleaved, machine

SIZES = ((100_000, 1), (100_000, 4), (10_000, 1), (10_000, 4))


def lif(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v + (x - v) / 2.0
    s = flexsn.surrogate.sigmoid(h - 1.0, 4.0)
    return s, h * (1.0 - s)


def leaky(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    v = v + (x - v) * 0.05
    return v, v


def rotation(x: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, v = 0.99 * (u * 0.8 - v * 0.6) + x, 0.99 * (u * 0.6 + v * 0.8)
    return u, u, v


def backward(core, states: int, x: Tensor, g: Tensor, parts: bool):
    leaf = x.clone().requires_grad_()
    y = flexsn.scan(core, (leaf,), (None,) * states).outputs[0]

    def run() -> Tensor:
        torch.use_deterministic_algorithms(not parts)
        try:
            return torch.autograd.grad(y, leaf, g, retain_graph=True)[0]
        finally:
            torch.use_deterministic_algorithms(False)

    return run


def forward(core, states: int, x: Tensor, exact: bool):
    def run() -> Tensor:
        with torch.no_grad():
            return flexsn.scan(core, (x,), (None,) * states, exact=exact).outputs[0]

    return run


def measured(T: int, N: int, threads: int, seconds: float) -> dict:
    """Return milliseconds of every call, and how far the two ways differ."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    x, g = torch.randn(T, N) + 0.8, torch.randn(T, N)
    found: dict = {"T": T, "N": N, "threads": threads}
    kinds = {
        "LIF, backward": (lif, 1),
        "leaky integrator, backward": (leaky, 1),
        "leaky integrator": (leaky, 1),
        "2 x 2 rotation": (rotation, 2),
    }
    for name, (core, states) in kinds.items():
        if name.endswith("backward"):
            calls = {"in order": backward(core, states, x, g, False), "parts": backward(core, states, x, g, True)}
        else:
            calls = {"in order": forward(core, states, x, True), "parts": forward(core, states, x, False)}
        a, b = (call() for call in calls.values())
        times = {k: v["median_s"] * 1e3 for k, v in interleaved(calls, seconds).items()}
        found[name] = {**times, "difference": ((a - b).norm() / a.norm()).item()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=1.5)
    args = parser.parse_args()
    rows = []
    for T, N in SIZES:
        for threads in (1, 2):
            rows.append(measured(T, N, threads, args.seconds))
            print(f"T {T}, N {N}, {threads} thread(s)")
            for name, r in rows[-1].items():
                if isinstance(r, dict):
                    faster = r["in order"] / r["parts"]
                    print(
                        f"  {name:28}{r['in order']:8.2f} ms, in parts {r['parts']:7.2f} ms: {faster:5.1f}x, differs by {r['difference']:.0e}",
                        flush=True,
                    )
    if args.json:
        args.json.write_text(json.dumps({"date": str(datetime.date.today()), "machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
