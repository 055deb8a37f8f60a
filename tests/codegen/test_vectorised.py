"""Every loop over neurons is a vector loop: the compiler says so."""

import re
import subprocess

import pytest
import torch

from flexsn import surrogate
from flexsn._capture.signature import make_signature
from flexsn._capture.trace import Meta
from flexsn._codegen.cpp import render
from flexsn._program.compiled import program_of
from flexsn._runtime import cpp_kernel as launch_cpp


def lif(x, v):
    h = v + (x - v) / 2.0
    s = surrogate.atan(h - 1.0)
    return s, h * (1.0 - s)


def exponential(x, v, m):
    h = v + 0.1 * (torch.exp((v - 1.0) / 0.2) - v + x)
    m = m + 0.01 * (torch.sigmoid(h) - m) / (1.0 + torch.exp(-m))
    s = surrogate.sigmoid(h - 1.5)
    return s, torch.where(s > 0, 0.0, h), m


def branches(x, v):
    """Selects between calls, bools, NaN tests, in-place masks: what tempts a compiler to branch."""
    h = torch.tanh(v) + x.clamp(-1, 1) * torch.sin(v) + torch.where(torch.isnan(x) | (x > 2), x.abs().sqrt(), torch.log1p(x * x))
    h[h > 3] = 0.0
    return h > 1, h.pow(2) - torch.atan2(h, x)


def refractory(x, v, count):
    ready = count <= 0
    h = torch.where(ready, 0.9 * v + x, v)
    s = (h > 1.0) & ready
    return s.to(x.dtype), torch.where(s, 0.0, h), torch.where(s, 3, (count - 1).clamp(min=0))


def clamped(x, v):
    """Selects of selects, of which GCC's elimination of partial redundancies makes branches."""
    h = torch.minimum(torch.maximum(v * 0.9 + x.relu(), -x.abs()), torch.nan_to_num(x) + 2)
    return (h.clamp(0, 1).clamp(max=v.abs() + 1) > 0.5).to(x.dtype), h.clamp(0, 3)


def floor_division(x, v):
    h = torch.div(v + x, v.abs() + 0.25, rounding_mode="floor")
    return (h > 1.0).to(x.dtype), torch.remainder(h, 3.0)


def long(x, v):
    """More than GCC inlines of its own accord: a loop that calls scalar functions is no vector loop."""
    for k in range(60):
        v = v + 0.01 * torch.exp(-(x - 0.1 * k) * (x - 0.1 * k)) * torch.sigmoid(v + 0.05 * k)
    return (v > 1.0).to(x.dtype), v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("core", [lif, exponential, branches, refractory, clamped, floor_division, long], ids=lambda c: c.__name__)
def test_the_compiler_vectorises_every_step_loop(core, dtype, tmp_path):
    states = 2 if core in (exponential, refractory) else 1
    metas = [Meta((5,), dtype), Meta((5,), dtype)] + [Meta((5,), torch.int64 if core is refractory else dtype)] * (states - 1)
    program = program_of("cpp", core, make_signature(core, 1, states, 0), metas, torch.device("cpu"), {}, None)
    program.differentiate(core, {})
    wanted = [r for r in program.vjp.graph.outputs if r in ("gx0", "gv0")]
    cotangents = [r for r in program.vjp.graph.inputs if r[:2] == "gy"]
    for plan in (program.forward_plan((dtype,), True, False), program.backward_plan((dtype,), wanted, cotangents)):
        source = render(plan)
        path = tmp_path / "kernel.cpp"
        path.write_text(source)
        command = [launch_cpp.compiler()[0], *launch_cpp._FLAGS, "-DFLEXSN_SLEEF", f"-I{launch_cpp.HEADERS}", "-fopt-info-vec-optimized"]
        command += ["-c", str(path), "-o", str(tmp_path / "kernel.o")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        lines = {int(n) for n in re.findall(r"kernel\.cpp:(\d+):\d+: optimized: loop vectorized", said)}
        pragmas = [i for i, line in enumerate(source.splitlines(), 1) if "pragma omp simd" in line]
        assert pragmas
        for at in pragmas:
            assert lines & {at + 1, at + 2, at + 3}, source.splitlines()[at - 2]
