"""A training step of a diagonal state-space neuron with complex states, fused and by the eager loop.

    python benchmarks/complex_states.py [--output complex_states.json]

The neuron is that of S4D (Gu et al., 2022): h' = a h + b x with a = exp(-exp(log_decay) + i angle), and the output 2 Re(c h), over
T = 1000 steps of 32 x 64 states. Gradients go to the input and to the four params. The ways take turns; printed are the best and the median
of each, in milliseconds, and by how much their gradients differ at most, relative to the largest.
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

T, BATCH, STATES = 1000, 32, 64
TURNS = 7
Params = list[Tensor]


def state_space(x, h, log_decay, angle, b, c):
    h = torch.exp(torch.complex(-torch.exp(log_decay), angle)) * h + b * x
    return 2 * (c * h).real, h


def fused(x: Tensor, params: Params) -> Tensor:
    return flexsn.scan(state_space, [x], [None], params, strict=True).outputs[0]


def loop(x: Tensor, params: Params) -> Tensor:
    """The eager loop, as one would write it: what does not depend on time is computed once."""
    log_decay, angle, b, c = params
    a, h, outputs = torch.exp(torch.complex(-torch.exp(log_decay), angle)), torch.zeros(BATCH, STATES, dtype=torch.complex64), []
    for now in x.unbind(0):
        h = a * h + b * now
        outputs.append(2 * (c * h).real)
    return torch.stack(outputs)


def step(way: Callable[[Tensor, Params], Tensor], x: Tensor, params: Params, weights: Tensor) -> tuple[float, list[Tensor]]:
    """Return the seconds of one training step, and its gradients."""
    leaves = [t.detach().requires_grad_() for t in (x, *params)]
    start = time.perf_counter()
    (way(leaves[0], leaves[1:]) * weights).sum().backward()
    return time.perf_counter() - start, [t.grad for t in leaves if t.grad is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    x, weights = torch.randn(T, BATCH, STATES), torch.randn(T, BATCH, STATES)
    params = [torch.randn(STATES) - 3, torch.rand(STATES) * 3, *(torch.randn(STATES, dtype=torch.complex64) for _ in range(2))]
    ways = {"fused": fused, "eager loop": loop}
    found = {name: step(way, x, params, weights)[1] for name, way in ways.items()}
    differ = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*found.values(), strict=True))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, way in ways.items():
            times[name].append(step(way, x, params, weights)[0])
    rows = {name: {"best_ms": 1e3 * min(t), "median_ms": 1e3 * statistics.median(t)} for name, t in times.items()}
    ratio = rows["eager loop"]["median_ms"] / rows["fused"]["median_ms"]
    about = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, flexsn {flexsn.__version__}"
    print(about)
    for name, row in rows.items():
        print(f"{name:12} best {row['best_ms']:8.1f} ms   median {row['median_ms']:8.1f} ms")
    print(f"the loop takes {ratio:.1f} times as long; gradients differ by {differ:.1e} of the largest")
    if options.output:
        options.output.write_text(json.dumps({"about": about, "rows": rows, "ratio": ratio, "gradients_differ": differ}, indent=1) + "\n")


if __name__ == "__main__":
    main()
