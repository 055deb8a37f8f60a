"""Derivatives of derivatives: the Hessian of a loss by three parameters of a Hodgkin-Huxley neuron over 1,000 steps, in float64.

    python benchmarks/derivatives.py [--output derivatives.json] [--without-loop]

By `torch.func.hessian` and by `create_graph=True`, fused, and by the eager loop, whose numbers are compared. Printed, and written as
JSON, are the first call in seconds (with an empty cache of kernels: run it with `FLEXSN_CACHE_DIR` set to an empty folder), and the best
and the median of the warm ones.
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
from torch import Tensor

import flexsn

T, DT = 1000, 0.01
STARTS = (-65.0, 0.05, 0.6, 0.32)
CONDUCTANCES = torch.tensor([120.0, 36.0, 0.3], dtype=torch.float64)
TURNS = 20


def hodgkin_huxley(x, v, m, h, n, g_na, g_k, g_l):  # noqa: PLR0913  the neuron has four states and three conductances
    """One step of the forward Euler method (Hodgkin and Huxley, J. Physiol. 1952); mV and ms."""
    opens, closes = 0.1 * (v + 40) / (1 - torch.exp(-(v + 40) / 10)), 4 * torch.exp(-(v + 65) / 18)
    recovers, inactivates = 0.07 * torch.exp(-(v + 65) / 20), 1 / (1 + torch.exp(-(v + 35) / 10))
    rises, falls = 0.01 * (v + 55) / (1 - torch.exp(-(v + 55) / 10)), 0.125 * torch.exp(-(v + 65) / 80)
    current = g_na * m**3 * h * (v - 50) + g_k * n**4 * (v + 77) + g_l * (v + 54.4)
    v = v + DT * (x - current)
    m, h, n = (
        m + DT * (opens * (1 - m) - closes * m),
        h + DT * (recovers * (1 - h) - inactivates * h),
        n + DT * (rises * (1 - n) - falls * n),
    )
    return v, v, m, h, n


def loss(params: Tensor, backend: str) -> Tensor:
    x = torch.full((T, 1), 10.0, dtype=torch.float64)
    states = [torch.full((1,), start, dtype=torch.float64) for start in STARTS]
    voltage = flexsn.scan(hodgkin_huxley, [x], states, params.unbind(), backend=backend).outputs[0]
    return (voltage + 60).square().sum()


def by_func(backend: str) -> Tensor:
    return torch.func.hessian(lambda params: loss(params, backend))(CONDUCTANCES)


def by_graph(backend: str) -> Tensor:
    params = CONDUCTANCES.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(params, backend), params, create_graph=True)
    rows = [torch.autograd.grad(gradient, params, e, retain_graph=True)[0] for e in torch.eye(3, dtype=torch.float64)]
    return torch.stack(rows)


def seconds(call: Callable[[], Tensor]) -> tuple[float, Tensor]:
    start = time.perf_counter()
    found = call()
    return time.perf_counter() - start, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--without-loop", action="store_true", help="not the eager loop, which takes a minute")
    options = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    found = {}
    for name, way in (("torch.func.hessian", by_func), ("create_graph=True", by_graph)):
        first, found[name] = seconds(lambda way=way: way("cpp"))
        warm = [seconds(lambda way=way: way("cpp"))[0] for _ in range(TURNS)]
        rows[f"{name}, fused"] = {"first_s": first, "best_s": min(warm), "median_s": statistics.median(warm)}
    if not options.without_loop:
        for name, way in (("torch.func.hessian", by_func), ("create_graph=True", by_graph)):
            once, want = seconds(lambda way=way: way("torch"))
            torch.testing.assert_close(found[name], want, rtol=1e-8, atol=0.0)
            rows[f"{name}, eager loop"] = {"first_s": once}
    for name, row in rows.items():
        print(f"{name:32}", "  ".join(f"{key} {value:.4f}" for key, value in row.items()))
    if options.output:
        machine = {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        options.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
