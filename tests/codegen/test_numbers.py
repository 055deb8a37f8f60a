"""Numbers that a core reads are arguments of its kernels: neurons that differ in them alone share what is built."""

import math
import threading

import pytest
import torch

import flexsn
from flexsn._codegen import cpp
from flexsn._codegen.language import numbers, values
from flexsn._ir.graph import Builder
from flexsn._plan import plan
from flexsn._runtime.triton import kernel as triton_kernel

TAUS = (1.5, 2.0, 2.25, 3.0, 5.0, 7.5, 20.0, 1e30)


def trained(neuron, x):
    x = x.clone().requires_grad_()
    neuron.reset()
    y = neuron(x)
    y.backward(torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape))
    return y.detach(), x.grad, neuron.states[0].detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_time_constants_share_one_pair_of_kernels(counts, monkeypatch, tmp_path, dtype):
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path))
    x = torch.randn(9, 33, dtype=dtype) * 2
    kept = []
    for tau in TAUS:
        for v_threshold in (0.75, 0.3):
            made = [flexsn.LIF(tau=tau, v_threshold=v_threshold, backend=backend) for backend in ("cpp", "torch")]
            got, want = (trained(neuron, x) for neuron in made)
            assert all(map(torch.equal, got, want)), (tau, v_threshold)
            kept += made
    assert counts.builds == 2
    again = [trained(neuron, x) for neuron in kept]  # every neuron has kept its numbers
    assert all(torch.equal(a, b) for one, other in zip(again[::2], again[1::2], strict=True) for a, b in zip(one, other, strict=True))


def test_annealing_builds_nothing(counts, monkeypatch, tmp_path):
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path))
    x, neuron, loop = torch.randn(5, 7) * 2, flexsn.LIF(v_threshold=0.9), flexsn.LIF(v_threshold=0.9, backend="torch")
    for epoch in range(5):
        neuron.v_threshold = loop.v_threshold = 0.9 - 0.05 * epoch
        assert all(map(torch.equal, trained(neuron, x), trained(loop, x)))
    assert counts.builds == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("number", [0.1, -2.5, 1e-41, 1e300, 3.4028236e38, 2.0**-126, math.pi])
def test_any_number_keeps_its_bits_on_both_backends(number, dtype):
    def core(x, v):
        v = torch.where(v > number, v - x / number, v * number + x)
        return torch.tanh(number * v), v

    x = torch.linspace(-3, 3, 24, dtype=torch.float64).reshape(4, 6).to(dtype)
    want = flexsn.scan(core, [x], [None], backend="torch")
    for backend in ("cpp", "triton"):
        got = flexsn.scan(core, [x], [None], backend=backend)
        torch.testing.assert_close(got.outputs[0], want.outputs[0], rtol=1e-6, atol=0, equal_nan=True)  # NumPy's tanh in the interpreter
        assert torch.equal(got.states[0].isnan(), want.states[0].isnan())
        assert torch.equal(got.states[0].nan_to_num(), want.states[0].nan_to_num())


def test_the_interpreter_shares_functions_and_not_numbers():
    x = torch.randn(4, 6, requires_grad=True)
    before = set(triton_kernel._kernels)
    for scale in (0.3, 0.7, 1.9, 0.3):

        def core(x, v, scale=scale):
            v = v * scale + x * x
            return v * scale, v

        got, want = (torch.autograd.grad(flexsn.scan(core, [x], [None], backend=b).outputs[0].sum(), x)[0] for b in ("triton", "torch"))
        torch.testing.assert_close(got, want)
    new = [k for k in triton_kernel._kernels if k not in before]
    assert len(new) == 4, [k[0][:60] for k in new]  # forward and backward with the first number in their text, and for all others


def test_threads_that_build_one_source_get_their_own_numbers(monkeypatch, tmp_path):
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path))
    x, results = torch.ones(3, 4), {}

    def work(scale):
        results[scale] = flexsn.scan(lambda x, v: (x * scale + v, v), [x], [None], backend="cpp").outputs[0]

    threads = [threading.Thread(target=work, args=(0.25 + k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 6 and all(torch.equal(y, x * scale) for scale, y in results.items())


def test_what_a_formula_has_stays_in_the_text():
    """0, 1 and -1, infinities and NaN; integers and bools; constants that are results."""
    b = Builder("core")
    x = b.input("x0", torch.float32, "k0")
    step = x
    for number in (0.0, 1.0, -1.0, math.inf, math.nan, 2.5, -0.0, 0.25):
        step = b.op("add", step, b.const(number, torch.float32))
    count = b.op("add", b.convert(x, torch.int32), b.const(7, torch.int32))
    step = b.op("add", step, b.convert(count, torch.float32))
    graph = b.graph({"y0": step, "y1": b.const(0.125, torch.float32)})
    storage = {r: n.dtype for r, n in {**graph.inputs, **graph.outputs}.items()}
    made = plan.plan_forward(graph, storage, chunk=16, checkpoint=False, sequences=False)
    assert values(made) == (2.5, 0.25)
    assert list(numbers(made).values()) == ["k1", "k2"]  # `k0` is a name of the core
    assert "0.125" in cpp.render(made)


def test_explain_says_which_numbers_a_call_passes():
    text = str(flexsn.explain(flexsn.LIF(tau=3.5), torch.randn(5, 7)))
    assert "// called with k0 = 3.5" in text
