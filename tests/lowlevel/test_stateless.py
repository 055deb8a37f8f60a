"""`FlexSNKernel`: a core as a stateless callable."""

import pytest
import torch

import flexsn
from flexsn.lowlevel import FlexSNKernel, eager_scan


def lif(x, v):
    h = v + (x - v) / 2.0
    s = flexsn.surrogate.atan(h - 0.5)
    return s, h * (1.0 - s)


def mixed(x1, x2, v):
    h = 0.5 * v + x1 * x2
    return h.tanh(), h > 0.5, h


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("core, inputs, outputs", [(lif, 1, 1), (mixed, 2, 2)])
def test_results_are_those_of_the_loop(core, inputs, outputs, backend):
    kernel = FlexSNKernel(core, inputs, 1, outputs, backend=backend)
    args = [torch.randn(7, 3, 4) for _ in range(inputs)]
    for _ in range(2):  # nothing is carried
        for v in (torch.zeros(3, 4), torch.randn(3, 4)):
            want = eager_scan(core, inputs, 1, outputs, *args, v)
            for got in (kernel(*args, v), kernel(*args)) if not v.any() else (kernel(*args, v),):
                assert len(got) == outputs + 1
                for a, b in zip(got, want, strict=True):
                    assert a.dtype is b.dtype
                    torch.testing.assert_close(a, b, rtol=1e-6, atol=0)  # PyTorch's own `tanh` differs between processors


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_results_are_contiguous(compiler):
    kernel = FlexSNKernel(lif, 1, 1, 1)
    call = kernel if compiler is None else torch.compile(lambda *args: kernel(*args), backend=compiler, fullgraph=True)
    x, v = torch.randn(7, 3, 4).transpose(1, 2).requires_grad_(), torch.randn(3, 4).T.requires_grad_()
    got, want = call(x, v), eager_scan(lif, 1, 1, 1, x, v)
    assert all(y.is_contiguous() for y in got)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(sum(y.square().sum() for y in each), [x, v]) for each in (got, want)]
    torch.testing.assert_close(*grads)


def test_states_are_given_all_or_none():
    kernel = FlexSNKernel(lambda x, v, a: (x + v + a, v, a), 1, 2, 1)
    with pytest.raises(flexsn.errors.OperandCountError, match="2 operands for 1 inputs and 2 states"):
        kernel(torch.randn(5, 3), torch.randn(3))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_core_without_outputs_gives_its_states(backend):
    x = torch.randn(7, 3)
    (got,) = FlexSNKernel(lambda x, v: x + v, 1, 1, 0, backend=backend)(x)
    torch.testing.assert_close(got, x.cumsum(0))
