"""Triton kernels that walk over time, built for GPUs that are not there."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.nn.functional import layer_norm, linear

import flexsn
from flexsn import surrogate
from flexsn._captured.captured_values import look
from flexsn._codegen.triton_walk import WalkSource

BUILD = textwrap.dedent("""
    import json, sys
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from flexsn._runtime.triton import kernel as triton_kernel

    for text, signature, constants in json.load(sys.stdin):
        source = ASTSource(triton_kernel.define(text, "walk"), signature | dict.fromkeys(constants, "constexpr"), constants)
        for architecture in (80, 90, 100):
            options = {"num_warps": 4, "num_stages": 3, "launch_cooperative_grid": True}
            binary = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
            print(architecture, binary.asm["ptx"].count("mma"), binary.metadata.shared)
""")
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}


def lif(x, v, s, w):
    h = v + (x + s @ w - 0.1 * s.mean(-1, keepdim=True) - v) / 2.0
    s = surrogate.atan(h - 0.3)
    return s, h * (1.0 - s), s


def lstm(x, h, c, w):
    i, f, o, u = (torch.cat([x, x, -x, x], -1) + linear(layer_norm(h, (h.shape[-1],)), w)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, h, c


@pytest.mark.slow
@pytest.mark.parametrize(
    "core, rows, held, products, alone",
    [(lif, 1, True, 6, False), (lif, 1, False, 1, False), (lstm, 4, False, 6, False), (lif, 1, True, 6, True)],
)
def test_walks_build_for_gpus_that_are_not_there(core, rows, held, products, alone, monkeypatch):
    """The shared memory is that of an A100 at most."""
    found, own = [], WalkSource.text

    def noted(self, name, **options):
        text = own(self, name, **options | {"held": held, "alone": alone})
        signature = {name: TYPES[a.dtype] if isinstance(a, torch.Tensor) else "fp32" if isinstance(a, float) else "i32"
                     for name, a in self.arguments.items()}  # fmt: skip
        block = 128 if rows == 1 else 64
        constants = {"H": 256, "KP": 256, "KB": block, "BB": 16, "HC": 32, "PROGRAMS": 8, "PRODUCTS": products}
        constants |= {"H": 100, "KP": 128, "HC": 128, "PROGRAMS": 1} if alone else {}
        found.append((text, signature | {"counters": "*i32", "T": "i32", "B": "i32"}, constants))
        return own(self, name, **options)

    monkeypatch.setattr(WalkSource, "text", noted)
    look(core).over_parts.clear()  # nothing is known of calls before
    x, w = torch.randn(3, 2, 16, requires_grad=True), torch.randn(rows * 16, 16, requires_grad=True)
    flexsn.scan(core, [x], [torch.zeros(2, 16)] * 2, [w], backend="triton").outputs[0].sum().backward()
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD], input=json.dumps(found[:2]), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [architecture for architecture, *_ in lines] == [80, 90, 100] * 2  # the forward, and the backward
    assert all(products and shared <= 163 << 10 for _, products, shared in lines)
