"""Training steps of cores that add over a small last dim: `python benchmarks/inner.py --json out.json`.

They have states `[B, H, N]` of N branches and use their sum: `dendrites`, the sum alone; `fed_back`, whose branches read it; `attended`, in
which they share an input by a softmax; `cable`, where each reads its neighbours. Fused calls and the eager loop over `x.unbind(0)` take turns, so
that whatever else the machine does meets both; results and gradients are compared first. Also how long the first call takes, with an
empty cache of kernels: the capture, and the builds of both kernels beside each other, after the first call of an LIF, which imports what
builds them. With `--device cuda` on a GPU, whose CPU seconds say little.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import flexsn
from flexsn._runtime.triton import kernel as triton_kernel

sys.path.insert(0, str(Path(__file__).parent))
from measure import machine

T, BATCH, HIDDEN = 200, 32, 128
TAU = 4.0
FIRST = "import sys; sys.argv = ['inner.py']; sys.path.insert(0, {folder!r}); import inner; inner.first({core!r}, {n}, {device!r})"


def dendrites(x: Tensor, d: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d = d + (x.unsqueeze(-1) * w - d) / TAU
    v = v + (d.sum(-1) - v) / 2.0
    s = flexsn.surrogate.atan(v - 1.0)
    return s, d, v * (1 - s)


def fed_back(x: Tensor, d: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d = d + (x.unsqueeze(-1) * w - d) / TAU + 0.1 * v.unsqueeze(-1)
    d = d - d.mean(-1, keepdim=True)
    v = v + ((d * w).sum(-1) - v) / 2.0
    s = flexsn.surrogate.atan(v - 1.0)
    return s, d, v * (1 - s)


def attended(x: Tensor, d: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    e = (d * 0.1).exp()
    share = e / e.sum(-1, keepdim=True)
    d = d + (x.unsqueeze(-1) * torch.sigmoid(w) * share - d) / TAU
    v = torch.tanh(v + (share * d).sum(-1))
    return v, d, v


def cable(x: Tensor, d: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    left, right = torch.cat([x.unsqueeze(-1), d[..., :-1]], -1), torch.cat([d[..., 1:], v.unsqueeze(-1)], -1)
    d = d + (left - d) * w * 0.3 + 0.1 * torch.nn.functional.softplus(right - d)
    v = v + (d.mean(-1) - v) / 2.0
    s = flexsn.surrogate.atan(v - 1.0)
    return s, d, v * (1 - s)


CORES = {core.__name__: core for core in (dendrites, fed_back, attended, cable)}


def operands(n: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(T, BATCH, HIDDEN).to(device).requires_grad_(), (torch.rand(n) * 4 / n).to(device).requires_grad_()
    return x, torch.zeros(BATCH, HIDDEN, n, device=device), torch.zeros(BATCH, HIDDEN, device=device), w


def fused(core: Callable, x: Tensor, d: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return flexsn.scan(core, (x,), (d, v), (w,), strict=True).outputs[0]


def loop(core: Callable, x: Tensor, d: Tensor, v: Tensor, w: Tensor) -> Tensor:
    spikes = []
    for step in x.unbind(0):
        s, d, v = core(step, d, v, w)
        spikes.append(s)
    return torch.stack(spikes)


def seconds(run: Callable, given: tuple[Tensor, Tensor, Tensor, Tensor], cotangent: Tensor) -> tuple[float, float]:
    """Return wall and CPU seconds of a training step."""
    begin, cpu = time.perf_counter(), time.process_time()
    torch.autograd.grad(run(*given), (given[0], given[3]), cotangent)[1].sum().item()  # waits for a GPU
    return time.perf_counter() - begin, time.process_time() - cpu


def note_builds(core: str, found: list[tuple[float, float]]) -> None:
    """Have builds of a core's Triton kernels add when they begin and end."""
    own = triton_kernel.Kernel.build

    def build(kernel: triton_kernel.Kernel, *args: object) -> object:
        begin = time.perf_counter()
        binary = own(kernel, *args)
        if kernel.plan.core == core:
            found.append((begin, time.perf_counter()))
        return binary

    triton_kernel.Kernel.build = build  # type: ignore[method-assign]  # noted, then run


def first(name: str, n: int, device: str) -> None:
    """Print wall and CPU seconds of a first training step, compilers included, and, of a GPU, of the builds of both its kernels."""
    builds: list[tuple[float, float]] = []
    note_builds(name, builds)
    given = operands(n, device)
    spikes = loop(CORES[name], given[0][:1], *given[1:])
    torch.autograd.grad(spikes, given[3], torch.ones_like(spikes))  # what PyTorch does once
    begin = time.perf_counter()
    torch.autograd.grad(flexsn.LIF()(given[0]).sum(), given[0])[0].sum().item()
    lif = time.perf_counter() - begin
    triton_kernel.finish_builds()
    before = os.times()
    wall, _ = seconds(partial(fused, CORES[name]), given, torch.ones(T, BATCH, HIDDEN, device=device))
    after = os.times()
    own, compilers = after.user + after.system - before.user - before.system, after.children_user - before.children_user
    each = [end - begin for begin, end in builds]
    both = max(end for _, end in builds) - min(begin for begin, _ in builds) if builds else None
    print(
        json.dumps(
            {"lif_wall_s": lif, "wall_s": wall, "builds_wall_s": both, "each_build_s": each, "own_cpu_s": own, "compilers_cpu_s": compilers}
        )
    )


def first_call(core: str, n: int, device: str) -> dict:
    """Return what `first` prints in a process of its own, with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        code = FIRST.format(folder=str(Path(__file__).parent), core=core, n=n, device=device)
        environment = os.environ | {"FLEXSN_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache, "FLEXSN_QUIET": "1"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured(name: str, n: int, repeats: int, device: str) -> dict:
    given = operands(n, device)
    cotangent = torch.randn(T, BATCH, HIDDEN).to(device)
    runs = {"fused": partial(fused, CORES[name]), "loop": partial(loop, CORES[name])}
    spikes, want = (run(*given) for run in runs.values())
    same = (spikes == want).float().mean().item()
    x, d, v, w = [t.detach().double() for t in given]
    wide = (x.requires_grad_(), d, v, w.requires_grad_())
    grads = [torch.autograd.grad(run(*wide), (x, w), cotangent.double()) for run in runs.values()]
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8 * expected.abs().max().item())
    rows: dict[str, list[tuple[float, float]]] = {"fused": [], "loop": []}
    for _ in range(repeats):
        for kind, run in runs.items():
            rows[kind].append(seconds(run, given, cotangent))
    found: dict = {"core": name, "n": n, "equal_outputs": same, "first": first_call(name, n, device)}
    for kind, times in rows.items():
        found[kind] = {
            "wall_median_s": statistics.median(t for t, _ in times), "wall_least_s": min(t for t, _ in times),
            "cpu_median_s": statistics.median(c for _, c in times), "cpu_least_s": min(c for _, c in times),
        }  # fmt: skip
    for measure in ("wall_median_s", "wall_least_s", "cpu_least_s"):
        found[f"loop_over_fused_{measure}"] = found["loop"][measure] / found["fused"][measure]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", choices=CORES, nargs="+", default=list(CORES))
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {
        "machine": machine(), "device": options.device, "python": platform.python_version(), "torch": torch.__version__, "flexsn": flexsn.__version__,
        "date": datetime.date.today().isoformat(), "T": T, "batch": BATCH, "hidden": HIDDEN, "repeats": options.repeats,
        "load_before": os.getloadavg()[0], "runs": [measured(core, n, options.repeats, options.device) for core in options.cores for n in options.sizes],
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
