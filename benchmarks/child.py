"""One measurement in a process of its own: `child.py first T N apart|all` or `child.py memory T N`. Prints JSON.

`first`: the first forward and backward of a core. What PyTorch does once per process is timed before it with `apart`,
and left where it falls with `all`; `import torch` is timed separately in both.
`memory`: growth of resident memory in a training step.
"""

from __future__ import annotations

import json
import sys
import time

times: dict[str, float] = {}


def lap(name: str, start: float) -> None:
    times[name] = time.perf_counter() - start


def pytorch_once() -> None:
    """Trace an unrelated function, its gradient included, with PyTorch's own tools, and run an eager backward."""
    import torch
    import torch._dynamo
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    class Surrogate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return (x >= 0).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad / (1.0 + x * x)

    def probe(x, y):
        z = Surrogate.apply(x * y - 1.0)
        return torch.autograd.grad((z * (1 - x)).sum(), (x, y))

    make_fx(probe, tracing_mode="fake")(torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True))
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(3)).requires_grad_()
        torch.autograd.grad(Surrogate.apply(x / 2).sum(), x)
    x = torch.ones(1 << 18, requires_grad=True)
    torch.autograd.grad(probe(x, x * 2)[0].sum() * 0 + (x * 2).sum(), x)


def first(T: int, N: int, mode: str) -> None:
    start = time.perf_counter()
    import torch

    lap("import_torch_s", start)
    x, cotangent = torch.randn(T, N, requires_grad=True), torch.randn(T, N)
    if mode == "apart":
        start = time.perf_counter()
        pytorch_once()
        lap("pytorch_once_s", start)
    start = time.perf_counter()
    from cores import LIF

    import flexsn

    lap("import_flexsn_s", start)
    start = time.perf_counter()
    (y,), _ = flexsn.scan(LIF.core, [x], [None], strict=True)
    lap("forward_s", start)
    start = time.perf_counter()
    torch.autograd.grad(y, x, cotangent)
    lap("backward_s", start)
    start = time.perf_counter()
    (y,), _ = flexsn.scan(LIF.core, [x], [None], strict=True)
    torch.autograd.grad(y, x, cotangent)
    lap("second_step_s", start)


def memory(T: int, N: int) -> None:
    import torch
    from cores import LIF
    from measure import peak_resident

    import flexsn

    (x,), states, (cotangent,) = LIF.operands(T, N)
    x.requires_grad_()
    warm = torch.randn(2, 4096, requires_grad=True)
    torch.autograd.grad(flexsn.scan(LIF.core, [warm], [torch.zeros(4096)], strict=True).outputs[0].sum(), warm)

    def step():
        result = flexsn.scan(LIF.core, [x], states, strict=True)
        return result, torch.autograd.grad(result.outputs[0], x, cotangent)

    growth = peak_resident(step)
    times.update(growth_bytes=growth, kept_bytes=(2 * T + 1) * N * 4, input_bytes=T * N * 4)


if __name__ == "__main__":
    what, T, N, *rest = sys.argv[1:]
    {"first": first, "memory": memory}[what](int(T), int(N), *rest)
    print(json.dumps(times))
