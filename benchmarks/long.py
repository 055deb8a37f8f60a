"""Long sequences of few neurons: `python benchmarks/long.py --json out.json`, on a GPU with `--device cuda`.

The backward of an LIF, and calls of a leaky integrator with `exact=False`, walk parts of time side by side; the same with
`torch.use_deterministic_algorithms(True)`, or `exact=True`, walk one step after the other. Both take turns; how far results differ is
printed, too. On a CPU with one and with two threads, whole calls. On a GPU the kernels of a call, in a CUDA graph, without the time of the
host; beside them a copy of as many bytes as the call must move, `torch.cumsum` over time, and, of the leaky integrator, compiled
`associative_scan` and, where it is installed, the package accelerated-scan (time in its last dim).
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import flexsn

sys.path.insert(0, str(Path(__file__).parent))
from measure import graphed, interleaved, machine

SIZES = ((100_000, 1), (100_000, 4), (10_000, 1), (10_000, 4))
ON_GPU = ((16_384, 64), (16_384, 1024), (4096, 4096), (131_072, 512), (2048, 64), (2048, 8192), (100_000, 1))


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


def adaptive(x: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    v = v * 0.9 + x * 0.3
    s = flexsn.surrogate.erf(v - 1.0 - 0.2 * a)
    return s, v * (1.0 - s), a * 0.95 + s


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


def measured_on_gpu(T: int, N: int, seconds: float) -> dict:
    """Return milliseconds of the kernels of every call, of what bounds them, and of peers, and how far the two ways differ."""
    from gpu import in_turns

    torch.manual_seed(0)
    x, g = torch.randn(T, N, device="cuda") + 0.8, torch.randn(T, N, device="cuda")
    found: dict = {"T": T, "N": N}
    kinds = {
        "LIF, backward": (lif, 1, 3),
        "adaptive LIF, backward": (adaptive, 2, 3),
        "leaky integrator": (leaky, 1, 2),
        "2 x 2 rotation": (rotation, 2, 2),
    }
    for name, (core, states, arrays) in kinds.items():
        if name.endswith("backward"):
            calls = {"in order": backward(core, states, x, g, False), "parts": backward(core, states, x, g, True)}
        else:
            calls = {"in order": forward(core, states, x, True), "parts": forward(core, states, x, False)}
        a, b = (call() for call in calls.values())
        difference = ((a - b).norm() / a.norm()).item()
        source = torch.empty(arrays * T * N // 2, device="cuda")
        calls["copy"] = functools.partial(torch.empty_like(source).copy_, source)
        if core is leaky:
            calls |= peers_of_leaky(x)
        found[name] = {**in_turns({k: graphed(call) for k, call in calls.items()}, seconds), "difference": difference}
    return found


def peers_of_leaky(x: Tensor) -> dict[str, Callable[[], object]]:
    """Return calls that give a leaky integrator's states: with factors, which they take, that are there already."""
    from torch._higher_order_ops.associative_scan import associative_scan

    factors, inputs = torch.full_like(x, 0.95), x * 0.05

    def combine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return left[0] * right[0], left[1] * right[0] + right[1]

    scan = torch.compile(lambda a, b: associative_scan(combine, (a, b), 0, combine_mode="pointwise")[1], fullgraph=True, dynamic=False)
    expected = forward(leaky, 1, x, True)()
    assert torch.allclose(scan(factors, inputs), expected, rtol=1e-3, atol=1e-3)
    calls: dict[str, Callable[[], object]] = {
        "torch.cumsum": lambda: torch.cumsum(x, 0),
        "associative_scan, compiled": lambda: scan(factors, inputs),
    }
    try:
        from accelerated_scan.scalar import scan as accelerated
    except ImportError:
        return calls
    ours = [t.t().contiguous()[None] for t in (factors, inputs)]
    assert torch.allclose(accelerated(*ours)[0].t(), expected, rtol=1e-3, atol=1e-3)
    return {**calls, "accelerated-scan": lambda: accelerated(*ours)}


def report_gpu(row: dict) -> None:
    print(f"T {row['T']}, N {row['N']}")
    for name, r in row.items():
        if isinstance(r, dict):
            others = ", ".join(f"{k} {v:.4f}" for k, v in r.items() if k not in ("in order", "parts", "difference"))
            ratio = f"{r['in order'] / r['parts']:.1f}x, differs by {r['difference']:.0e}"
            print(f"  {name:24}{r['in order']:9.4f} ms, in parts {r['parts']:.4f} ms: {ratio}; {others}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    rows = []
    if args.device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the legacy stream cannot be captured
    for T, N in ON_GPU if args.device == "cuda" else ():
        rows.append(measured_on_gpu(T, N, args.seconds / 5))
        report_gpu(rows[-1])
    for T, N in SIZES if args.device == "cpu" else ():
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
        about = {"date": str(datetime.date.today()), "torch": torch.__version__, "machine": machine()}
        if args.device == "cuda":
            about["device"] = torch.cuda.get_device_name()
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
