"""Fused against eager: everything that a call gives, and every gradient by name."""

import contextlib
import linecache
import re

import pytest
import torch

import flexsn
from flexsn._capture.signature import make_signature

# Forward results of exact ops must agree to the bit; gradients sum in another order: relative to the largest element.
GRAD_TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

on_cpu = pytest.mark.skipif("config.getoption('--device') != 'cpu'", reason="of calls on a CPU")


def leaf(tensor):
    """A differentiable copy that keeps strides (expanded and transposed views too)."""
    if tensor is None or not tensor.dtype.is_floating_point:
        return tensor
    return tensor.detach().requires_grad_()


def evaluate(core, inputs, states=(), params=(), *, backend, sequences=False, captured=None, loss=None, seed=0):
    """Run and differentiate. Returns values by name and gradients by name (None where autograd gives none).

    `loss`: which results get a cotangent, as a function of the result's name; by default all that require grad.
    """
    inputs, states, params = [leaf(x) for x in inputs], [leaf(v) for v in states], [leaf(p) for p in params]
    result = flexsn.scan(core, inputs, states, params, store_state_seqs=sequences, backend=backend)
    values = {f"output {k}": y for k, y in enumerate(result.outputs)}
    values |= {f"{'sequence' if sequences else 'final'} {k}": v for k, v in enumerate(result.states)}
    generator = torch.Generator("cpu").manual_seed(seed)
    cotangents = {
        n: torch.randn(t.shape, generator=generator, dtype=torch.float64, device="cpu").to(t)
        for n, t in values.items()
        if t.dtype.is_floating_point
    }
    roots = [n for n, t in values.items() if t.requires_grad and (loss is None or loss(n))]
    sig = make_signature(core, len(inputs), len(states), len(params))
    named = dict(zip(sig.names, (*inputs, *states, *params), strict=True)) | (captured or {})
    wanted = {n: t for n, t in named.items() if t is not None and t.requires_grad}
    grads = dict.fromkeys(wanted)
    if roots and wanted:
        found = torch.autograd.grad([values[n] for n in roots], list(wanted.values()), [cotangents[n] for n in roots], allow_unused=True)
        grads = dict(zip(wanted, found, strict=True))
        for name, grad in grads.items():
            if grad is not None:
                assert grad.shape == wanted[name].shape, f"gradient of {name} has shape {grad.shape}"
                assert grad.dtype == wanted[name].dtype, f"gradient of {name} has dtype {grad.dtype}"
    return {n: t.detach() for n, t in values.items()}, grads


def run_kernel(kernel, read, written, T, N):
    """A kernel without params, on all that it reads and writes, by role."""
    arrays = [read[a.role] for a in kernel.plan.reads] + [written[a.role] for a in kernel.plan.writes]
    kernel.bind([True] * len(arrays), T, N)(arrays, [])


def assert_same_values(fused, eager, exact=True, tolerance=None):
    assert list(fused) == list(eager)
    for name, want in eager.items():
        got = fused[name]
        assert got.shape == want.shape and got.dtype == want.dtype, (
            f"{name}: {got.dtype}{tuple(got.shape)} for {want.dtype}{tuple(want.shape)}"
        )
        if exact:
            same = torch.equal(torch.nan_to_num(got, 1234.0), torch.nan_to_num(want, 1234.0)) and torch.equal(got != got, want != want)
            assert same, f"{name} differs in {int((got != want).sum())} of {want.numel()} elements"
        else:
            rtol = tolerance or {torch.float64: 1e-12, torch.float32: 1e-5}.get(want.dtype, 4e-3)
            torch.testing.assert_close(got, want, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_grads(fused, eager, scale=1.0):
    """Gradients agree by name, as exactly as the coarsest dtype among them allows; None and zeros mean the same."""
    tol = scale * max([GRAD_TOLERANCE[g.dtype] for g in eager.values() if g is not None], default=0.0)
    assert set(fused) == set(eager)
    for name in eager:
        got, want = fused[name], eager[name]
        if got is None or want is None:
            other = want if got is None else got
            assert other is None or not other.any(), f"gradient of {name}: {'fused' if got is None else 'eager'} gives none"
            continue
        assert not got.isnan().any() or want.isnan().any(), f"gradient of {name} has NaN"
        size = max(1.0, want.abs().max().item()) if want.numel() else 1.0
        torch.testing.assert_close(got, want, rtol=tol, atol=tol * size, equal_nan=True, msg=lambda m, n=name: f"gradient of {n}: {m}")


def backends():
    """Those that run where the tests make their operands; on the CPU Triton's kernels are interpreted."""
    return ("triton",) if torch.get_default_device().type == "cuda" else ("cpp", "triton")


def check(core, inputs, states=(), params=(), *, sequences=False, captured=None, loss=None, exact=True, scale=1.0, only=None):
    """The fused kernels give what the eager loop gives. Returns the values and gradients of the first backend.

    `only`: the one backend to check; a reason why stands beside every use.
    """
    options = {"sequences": sequences, "captured": captured, "loss": loss}
    want_values, want_grads = evaluate(core, inputs, states, params, backend="torch", **options)
    found = []
    for backend in (only,) if only else backends():
        values, grads = evaluate(core, inputs, states, params, backend=backend, **options)
        assert_same_values(values, want_values, exact)
        assert_same_grads(grads, want_grads, scale)
        found.append((values, grads))
    return found[0]


def line_of(function, text):
    """`file.py:number: text`, the form in which messages quote the user's line that contains `text`."""
    code = function.__code__
    for number in range(code.co_firstlineno, code.co_firstlineno + 60):
        line = linecache.getline(code.co_filename, number)
        if text in line:
            return f"{code.co_filename}:{number}: {line.strip()}"
    raise AssertionError(f"no line with {text!r}")


def words(text):
    """A regular expression that finds `text` literally."""
    return re.escape(text)


@contextlib.contextmanager
def without_graph_caches():
    """Inductor and AOTAutograd compile every graph anew; headers and generated sources that were compiled before serve again."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    with inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


class Reversed(torch.autograd.Function):
    """The same values, as a view; another gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -0.5 * grad


def check_mixing(core, inputs, states, params, scale=1.0, tolerance=None, **options):
    """Compare a core that mixes neurons with the eager loop."""
    fused, grads = evaluate(core, inputs, states, params, backend="auto", **options)
    eager, want = evaluate(core, inputs, states, params, backend="torch", **options)
    assert_same_values(fused, eager, exact=False, tolerance=tolerance)
    assert_same_grads(grads, want, scale)
