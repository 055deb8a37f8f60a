"""Cores that mix neurons by calls that take an input or a state: against the eager loop, PyTorch's own layers, and finite differences."""

import copy
import functools
import gc
import warnings

import numpy as np
import pytest
import torch
from helpers import Reversed, check_mixing, on_cpu
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import linear

import flexsn
from flexsn import surrogate
from flexsn._operator.call import Call
from flexsn._operator.mixing import recurrence, run
from flexsn._operator.mixing.cpp_walk import Walk
from flexsn._operator.mixing.mixing_calls import MixingFunction, functions_of_step
from flexsn._program.compiled import Program
from flexsn._program.replay import Repeated
from flexsn.errors import DoubleBackwardError, FallbackWarning, NotElementwiseError, ShapeMismatchError

f32, f64 = torch.float32, torch.float64
H, INPUTS = 5, 4


@pytest.fixture(autouse=True)
def no_fallback():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield


def lif(x, v, s, w):
    h = v + (x + s @ w - v) / 2.0
    s = surrogate.atan(h - 0.3)
    return s, h * (1.0 - s), s


def two_products(x, v, s, w):
    """Of one state by weights and their transpose, and of another."""
    h = torch.tanh(v + (x + s @ w + linear(s, w) * 0.5 + torch.mm(v, w) - v) / 2.0)
    return h, h, torch.sigmoid(h - 0.2)


def input_too(x, v, w_in, w, b):
    h = torch.tanh(x @ w_in + linear(v, w, b))
    return h, h


def delayed(x, v, past, w):
    """The product is of what a state was one step before."""
    v = 0.5 * v + x + past @ w
    return torch.tanh(v), v, torch.tanh(v)


def whole_mean(x, v):
    return x - 0.1 * v.mean(), 0.5 * v + x


def rolled(x, v, w):
    h = torch.sin(x + w * v.roll(1, -1))
    return h, h


def computed_weights(x, v, w, mask):
    """The weights are themselves computed, once per call."""
    v = torch.tanh(x + v @ (w * mask).T)
    return v, v


def weights(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=f64, device="cpu") * 0.4


W = weights(H, H)
CASES = {
    "lif": (lif, H, 2, [W]),
    "two products": (two_products, H, 2, [W]),
    "an input too": (input_too, INPUTS, 1, [weights(INPUTS, H), W, weights(H)]),
    "delayed": (delayed, H, 2, [W]),
    "mean": (whole_mean, H, 1, []),
    "rolled": (rolled, H, 1, [weights(H)]),
    "computed weights": (computed_weights, H, 1, [W, (weights(H, H, seed=2) > 0).to(f64)]),
}


def operands(name, T=7, batch=(3,), dtype=f64):
    core, width, states, params = CASES[name]
    generator, device = torch.Generator("cpu").manual_seed(0), torch.get_default_device()
    x = torch.randn(T, *batch, width, generator=generator, dtype=f64, device="cpu")
    starts = [torch.rand(*batch, H, generator=generator, dtype=f64, device="cpu") for _ in range(states)]
    inputs, starts, params = [[t.to(device, dtype) for t in group] for group in ([x], starts, params)]
    return core, inputs, starts, params


@pytest.mark.parametrize("name", CASES)
def test_as_the_eager_loop(name):
    core, *given = operands(name)
    check_mixing(core, *given)
    check_mixing(core, *given, sequences=True)  # whose cotangents come at every step
    with torch.no_grad():
        got, want = [flexsn.scan(core, *given, backend=b, strict=b == "auto") for b in ("auto", "torch")]
    for a, b in zip((*got.outputs, *got.states), (*want.outputs, *want.states), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("T", [1, 2, 17, 33])
@pytest.mark.parametrize("batch", [(), (1,), (9,), (2, 3)])
def test_sizes(T, batch):
    if batch:
        check_mixing(*operands("two products", T, batch)) if len(batch) == 1 else check_mixing(*operands("lif", T, batch))
    else:
        check_mixing(*operands("computed weights", T, batch))


def test_no_steps():
    core, (x,), states, params = operands("lif")
    found = flexsn.scan(core, [x[:0]], states, params)
    assert found.outputs[0].shape == (0, 3, H) and torch.equal(found.states[0], states[0])


@pytest.mark.parametrize("name", ["lif", "an input too"])
def test_strided_and_broadcast_operands(name):
    core, (x,), states, params = operands(name)
    check_mixing(core, [x.transpose(0, 1).contiguous().transpose(0, 1)], states, params)
    check_mixing(core, [x[:, :1].expand(7, 3, -1)], states, params)
    check_mixing(core, [x.flip(0)[::2]], [v[:1] for v in states] if name == "lif" else states, params)


def test_default_states():
    core, (x,), _, params = operands("lif")
    check_mixing(core, [x], [None, None], params)


@pytest.mark.parametrize("name", ["two products", "an input too", "delayed", "mean", "rolled", "computed weights"])
def test_finite_differences(name):
    core, inputs, states, params = operands(name, T=4, batch=(2,))
    given = [t.requires_grad_() for t in (*inputs, *states, *params)]

    def run(x, *rest):
        found = flexsn.scan(core, [x], rest[: len(states)], rest[len(states) :], strict=True)
        return (*found.outputs, *found.states)

    assert torch.autograd.gradcheck(run, given)


# --- PyTorch's own layers --------------------------------------------------------------------------------------------------------
def gru(layer, x, h):
    w_in, w, b_in, b = layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0
    n = layer.hidden_size
    r, z, i = [slice(k * n, (k + 1) * n) for k in range(3)]
    reset = torch.sigmoid(linear(x, w_in[r], b_in[r]) + linear(h, w[r], b[r]))
    update = torch.sigmoid(linear(x, w_in[z], b_in[z]) + linear(h, w[z], b[z]))
    new = torch.tanh(linear(x, w_in[i], b_in[i]) + reset * linear(h, w[i], b[i]))
    h = (1 - update) * new + update * h
    return h, h


def lstm(layer, x, h, c):
    w_in, w, b_in, b = layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0
    n = layer.hidden_size
    i, f, g, o = [linear(x, w_in[s], b_in[s]) + linear(h, w[s], b[s]) for s in (slice(k * n, (k + 1) * n) for k in range(4))]
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, h, c


@pytest.mark.parametrize(("kind", "core", "states"), [(nn.GRU, gru, 1), (nn.LSTM, lstm, 2)])
def test_gated_cells_equal_pytorchs(kind, core, states):
    torch.manual_seed(0)
    layer, x = kind(INPUTS, H, dtype=f64), torch.randn(11, 3, INPUTS, dtype=f64, requires_grad=True)
    cotangent = torch.randn(11, 3, H, dtype=f64)
    leaves = [x, *layer.parameters()]
    want = layer(x)[0]
    step = functools.partial(core, layer)
    got = flexsn.scan(step, [x], [torch.zeros(3, H, dtype=f64)] * states, strict=True).outputs[0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(y, leaves, cotangent) for y in (got, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


# --- the loop in C++ -------------------------------------------------------------------------------------------------------------
def spiking(width, T=20, batch=11, rate=0.1):
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(T, batch, width, generator=generator) < rate).float() * 2 + 0.1
    return x.requires_grad_(), (torch.randn(width, width, generator=generator) / width**0.5).requires_grad_(), torch.zeros(batch, width)


def trained(core, x, w, start):
    found = flexsn.scan(core, [x], [start] * 2, [w], strict=True)
    generator = torch.Generator().manual_seed(1)
    return (found.outputs[0], *torch.autograd.grad(found.outputs[0], [x, w], torch.randn(x.shape, generator=generator)))


@on_cpu
@pytest.mark.parametrize("width", [16, 33, 100])
def test_the_loop_serves_products(width, monkeypatch):
    """Rows of spikes, dense rows, and widths that fill no vector."""
    walked = []
    own = Walk.kernel_of
    monkeypatch.setattr(Walk, "kernel_of", lambda self, *, back: (walked.append(back), own(self, back=back))[1])
    for dtype, tolerance in ((f32, 1e-5), (f64, 1e-12)):
        for core in (lif, two_products):
            x, w, start = [t.detach().to(dtype) for t in spiking(width)]
            check_mixing(core, [x], [start, start], [w], tolerance=tolerance, scale=10)
    assert walked == [False, True] * 4


@on_cpu
def test_params_that_differ_from_sequence_to_sequence():
    """The loop walks groups of sequences, whose params must be alike; others take turns in Python."""
    x, w, start = [t.detach().double() for t in spiking(8, T=5, batch=3)]

    def core(x, v, s, w, tau):
        h = v + (x + s @ w - v) / tau
        return torch.sigmoid(h), h, torch.sigmoid(h)

    for tau in (
        torch.tensor(2.0, dtype=f64),
        torch.rand(8, dtype=f64) + 1,
        torch.rand(3, 1, dtype=f64) + 1,
        torch.rand(3, 8, dtype=f64) + 1,
    ):
        check_mixing(core, [x], [start, start], [w, tau])


def test_inputs_of_fewer_dims():
    """A signal of every step, or of every channel and step, beside one of every sequence."""

    def core(x, signal, v, w):
        v = torch.tanh(x + signal + v @ w)
        return v, v

    for shape in ((5,), (5, H)):
        x, signal = weights(5, 5, H), weights(*shape, seed=2)
        check_mixing(
            core, [t.to(torch.get_default_device()) for t in (x, signal)], [torch.zeros(5, H, dtype=f64)], [torch.eye(H, dtype=f64)]
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_seen(value):
    """Zero times one of them is NaN, in the forward, and of a gradient in the backward."""
    core, (x,), states, (w,) = operands("lif", dtype=f32)
    w[1, 2] = value
    runs = [flexsn.scan(core, [0 * x], states, [w], backend=b) for b in ("auto", "torch")]
    assert [torch.equal(a.isnan(), b.isnan()) for a, b in zip(*(r.states for r in runs), strict=True)] == [True, True]
    assert runs[0].states[0].isnan().any()


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.tau, self.linear = nn.Parameter(torch.tensor(0.5, dtype=f64)), nn.Linear(H, H, dtype=f64)

    def forward(self, x, v):
        v = v + (torch.tanh(x + self.linear(v)) - v) * self.tau
        return v, v


def test_the_backward_is_of_the_tensors_of_the_forward():
    """`functional_call` puts the module's own back before the backward runs."""
    net, x = flexsn.FlexSN(Module(), num_states=1, stateful=False), torch.randn(6, 3, H, dtype=f64)
    for make in (lambda name, p: p.detach() * 0.3, lambda name, p: p.detach() * 0.3 if name == "core.tau" else p.detach()):
        grads = []
        for net.backend in ("auto", "torch"):
            given = {name: make(name, p).requires_grad_() for name, p in net.named_parameters()}
            grads.append(torch.autograd.grad(torch.func.functional_call(net, given, (x,)).sum(), list(given.values())))
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


def test_outputs_may_be_written_to():
    core, (x,), states, params = operands("two products")
    w = params[0].requires_grad_()
    grads = []
    for backend in ("auto", "torch"):
        found = flexsn.scan(core, [x], states, params, backend=backend)
        found.outputs[0].mul_(2)
        found.states[0].add_(1)
        grads.append(torch.autograd.grad(found.outputs[0].sum() + found.states[0].square().sum(), w))
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


def test_the_backward_decides_nothing_anew():
    """Inputs in tenths and weights in hundredths put values on thresholds, where another order of a sum flips spikes."""
    torch.manual_seed(0)
    T, batch, width = 40, 16, 64
    x = torch.randint(0, 6, (T, batch, width)).float().div(10).requires_grad_()
    w = torch.randint(-20, 21, (width, width)).float().div(100).requires_grad_()
    start, cotangent = torch.zeros(batch, width), torch.randn(T, batch, width)

    def core(x, v, s, w):
        h = v + (x + s @ w - v) / 2.0
        s = surrogate.atan(h - 0.3)
        return s, h * (1.0 - s), s

    spikes = flexsn.scan(core, [x], [start, start], [w], strict=True).outputs[0]
    v, s, found = start, start, []
    for t, given in enumerate(x.unbind(0)):
        h = v + (given + s @ w - v) / 2.0
        soft = surrogate.atan(h - 0.3)
        s = soft + (spikes[t] - soft).detach()  # as the forward decided
        v = h * (1.0 - s)
        found.append(s)
    got = torch.autograd.grad(spikes, [x, w], cotangent)
    want = torch.autograd.grad(torch.stack(found), [x, w], cotangent)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 2e-5 * b.abs().max()


# --- where it does not serve -----------------------------------------------------------------------------------------------------
def test_the_operator_of_graphs_takes_no_such_core():
    core, *given = operands("delayed")
    with pytest.raises(NotElementwiseError, match="past @ w"):
        flexsn.scan(core, *given, backend="hop")


def test_shapes_that_fit_neither():
    with pytest.raises(ShapeMismatchError, match=r"`x` \[3, 4\], `v` \[3, 7\]"):
        flexsn.scan(input_too, [torch.randn(5, 3, INPUTS)], [torch.zeros(3, 7)], operands("an input too", dtype=f32)[3])


def test_a_second_derivative_is_refused():
    core, (x,), states, params = operands("two products")
    y = flexsn.scan(core, [x.requires_grad_()], states, params).outputs[0]
    with pytest.raises(DoubleBackwardError, match="mixes neurons"):
        torch.autograd.grad(y.sum(), x, create_graph=True, retain_graph=True)
    with pytest.raises(DoubleBackwardError, match="batched cotangents"):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape, dtype=f64), is_grads_batched=True)


@pytest.mark.parametrize("written", [0, 1, 2], ids=["input", "state", "weights"])
def test_what_is_written_to_before_the_backward_is_noticed(written):
    core, (x,), states, params = operands("delayed")
    leaves = x.requires_grad_(), states[0], params[0].requires_grad_()
    y = flexsn.scan(core, [x], states, params).outputs[0]
    with torch.no_grad():
        leaves[written].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_transforms_take_the_loop():
    core, (x,), states, params = operands("two products")
    warnings.simplefilter("ignore", FallbackWarning)

    def loss(w, backend):
        return flexsn.scan(core, [x], states, [w], backend=backend).outputs[0].sum()

    loss(params[0], "auto")  # a plain call, whose way is known by now
    got, want = [torch.func.grad(loss)(params[0], backend) for backend in ("auto", "torch")]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*[torch.vmap(lambda w, b=b: loss(w, b))(torch.stack([params[0]] * 2)) for b in ("auto", "torch")])


def products_of_16_bits(x, v, s, w):
    """The step of `lif`, its product in bfloat16."""
    h = v + (x + (s.bfloat16() @ w.bfloat16()).float() - v) / 2.0
    s = surrogate.atan(h - 0.3)
    return s, h * (1.0 - s), s


@pytest.mark.parametrize("given", [f32, torch.bfloat16])
def test_products_follow_autocast(given):
    """Elementwise ops stay in float32; what comes in 16 bits, as of a layer before, comes out so."""
    _, (x,), states, params = operands("lif", T=20, dtype=f32)
    x, w = (2 * x).to(given), params[0].requires_grad_()
    results = []
    for core, on, backend in ((lif, True, "auto"), (lif, True, "torch"), (products_of_16_bits, False, "torch")):
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=on):
            starts = [None, None] if on else [torch.zeros_like(v) for v in states]
            y = flexsn.scan(core, [x if on else x.float()], starts, [w], backend=backend)
        results.append((y.outputs[0].float(), *torch.autograd.grad(y.outputs[0].float().sin().sum(), w)))
        assert y.outputs[0].dtype is (given if on else f32)
    assert results[0][0].any()
    for spikes, grad in results[:2]:
        assert torch.equal(spikes, results[2][0])
        torch.testing.assert_close(grad, results[2][1], rtol=3e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits(dtype):
    """States and sums are carried in float32; only operands of products are rounded. Without autocast the eager loop runs."""
    warnings.simplefilter("ignore", FallbackWarning)
    layer, norm = nn.Linear(H, H).to(dtype), nn.LayerNorm(H).to(dtype)

    def core(x, v):
        v = 0.9 * v + 0.1 * torch.tanh(x + norm(layer(v)))
        return v, v

    def want(x, v):
        mixed = torch.nn.functional.linear(v.to(dtype), layer.weight, layer.bias).float()
        v = 0.9 * v + 0.1 * torch.tanh(x + torch.nn.functional.layer_norm(mixed, (H,), norm.weight.float(), norm.bias.float()))
        return v, v

    x = torch.randn(20, 3, H).to(dtype)
    for backend in ("auto", "torch"):
        found = flexsn.scan(core, [x], [None], backend=backend)
        assert found.outputs[0].dtype is found.states[0].dtype is dtype
        exact = flexsn.scan(want, [x.float()], [torch.zeros(3, H)], backend="torch").outputs[0]
        torch.testing.assert_close(found.outputs[0].float(), exact.to(dtype).float(), rtol=1e-2, atol=1e-3)
        for p in torch.autograd.grad(found.outputs[0].float().sum(), [layer.weight, norm.bias]):
            assert p.dtype is dtype and p.isfinite().all()


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, functools.partial(nn.RNNCell, nonlinearity="relu")])
@pytest.mark.parametrize("inputs", [INPUTS, H])
def test_cells_of_pytorch(kind, inputs):
    """Taken as the calls that they are made of; their default states are as wide as the cell."""
    cell, x = kind(inputs, H, dtype=f64), torch.randn(6, 3, inputs, dtype=f64)
    count = 2 if kind is nn.LSTMCell else 1

    def core(x, *states):
        after = cell(x, states if count == 2 else states[0])
        return (after[0], *after) if count == 2 else (after, after)

    found = []
    for backend in ("auto", "torch"):
        y = flexsn.scan(core, [x], [None] * count, backend=backend, strict=backend == "auto").outputs[0]
        found.append([y, *torch.autograd.grad(y.sin().sum(), list(cell.parameters()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("stateful", [False, True, "detached"])
def test_under_an_activation_checkpoint(stateful, warm):
    """Whose hooks of saved tensors call PyTorch's functions in the midst of a core."""
    layer = flexsn.Recurrent(flexsn.ALIF(tau=4.0), nn.Linear(H, H, dtype=f64), stateful=stateful, strict=True)
    x = torch.randn(6, 3, H, dtype=f64, requires_grad=True)
    if warm:
        layer(x).sum().backward()
    found = []
    for call in (lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False), layer):
        layer.reset()
        found.append(torch.autograd.grad(call(x).sin().sum(), [x, *layer.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_attention_without_dropout():
    def core(x, v):
        q = v.unflatten(-1, (2, 3)).transpose(1, 2)
        v = torch.tanh(x + torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2))
        return v, v

    check_mixing(core, [torch.randn(4, 3, 5, 6, dtype=f64)], [torch.rand(3, 5, 6, dtype=f64)], [])


def test_captured_tensors_that_change():
    """Weights in a closure: written to, exchanged, and of a module that is trained."""
    layer = nn.Linear(H, H, dtype=f64)

    def core(x, v):
        v = torch.tanh(x + layer(v))
        return v, v

    x, start = torch.randn(6, 3, H, dtype=f64), torch.zeros(3, H, dtype=f64)
    for change in (
        lambda: None,
        lambda: layer.weight.data.mul_(2),
        lambda: setattr(layer, "weight", nn.Parameter(torch.eye(H, dtype=f64))),
    ):
        change()
        runs = [flexsn.scan(core, [x], [start], backend=b).outputs[0] for b in ("auto", "torch")]
        torch.testing.assert_close(*runs, rtol=1e-12, atol=1e-12)
        grads = [torch.autograd.grad(y.sum(), list(layer.parameters())) for y in runs]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_warm_call_does_not_run_the_core(monkeypatch):
    """Where all weights are the core's own, what it calls is known; the weights are those of the call."""
    layer, runs = nn.Linear(H, H, dtype=f64), []

    def core(x, v):
        h = torch.tanh(x + layer(v))
        return h, h

    monkeypatch.setattr(run, "functions_of_step", lambda *args: (runs.append(1), functions_of_step(*args))[1])
    x = torch.randn(6, 2, H, dtype=f64)
    for _ in range(3):
        layer.weight = nn.Parameter(torch.randn(H, H, dtype=f64) * 0.3)
        (y,), _ = flexsn.scan(core, (x,), (x[0],))
        v = x[0]
        for step in x.unbind(0):
            v = torch.tanh(step + linear(v, layer.weight, layer.bias))
        torch.testing.assert_close(y[-1], v)
    assert len(runs) == 1


def detached(x, h, w):
    h = torch.tanh(x + h.detach() @ w + 0.3 * h)
    return h, h


def detached_input(x, h, w):
    h = torch.tanh(x.detach() @ w + x + h @ w)
    return h, h


def its_data(x, h, w):
    h = torch.tanh(x + linear(h.data, w) + 0.3 * h)
    return h, h


def without_gradient(x, h, w):
    with torch.no_grad():
        m = h.mean(0)
    h = torch.tanh(x + h @ w - m)
    return h, h


def output_without_gradient(x, h, w):
    """What a product gives without a gradient is an output, and goes into another one."""
    with torch.no_grad():
        m = x @ w
    h = torch.tanh(m @ w + 0.5 * h + x)
    return m + 0.0 * h, h


def only_without_gradient(x, h, w):
    with torch.no_grad():
        m = h @ w
    h = torch.tanh(x + 0.5 * h + m)
    return m, h


def of_a_function(x, h, w):
    h = torch.tanh(x + Reversed.apply(h) @ w)
    return h, h


def written_to(x, h, w):
    current = h @ w
    current += x
    return current, torch.tanh(current)


def rectified(x, h, w):
    h = torch.nn.functional.relu(linear(h, w), inplace=True) * 0.5 + x
    return h, h


OWN = (
    detached,
    detached_input,
    its_data,
    without_gradient,
    output_without_gradient,
    only_without_gradient,
    of_a_function,
    written_to,
    rectified,
)


@pytest.mark.parametrize("core", OWN, ids=lambda core: core.__name__)
def test_what_becomes_of_an_operand_before_a_product_or_of_its_result(core):
    """An alias of a state may be detached, or a Function's; a product may have no gradient; what it gives may be written to."""
    w = torch.randn(6, 6, dtype=f64) * 0.4
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            check_mixing(core, [torch.randn(4, 2, 6, dtype=f64)], [torch.randn(2, 6, dtype=f64)], [w], scale=10)


def test_one_tensor_as_two_params_and_then_two():
    def core(x, h, g, a, b):
        h = torch.tanh(x + h @ a)
        g = torch.tanh(h + g @ b)
        return g, h, g

    w, u = torch.randn(6, 6, dtype=f64), torch.randn(6, 6, dtype=f64)
    x, zeros = torch.randn(5, 3, 6, dtype=f64), torch.zeros(3, 6, dtype=f64)
    for params in ([w, w], [w, u], [u, w], [u, u]) * 2:
        found, want = [flexsn.scan(core, [x], [zeros, zeros], params, backend=b).outputs[0] for b in ("auto", "torch")]
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


@on_cpu
def test_arrays_of_numpy_in_one_place_are_another_kind_of_call():
    cell, array = nn.LSTMCell(4, 6), np.zeros((4, 6), "float32")

    def core(x, h, c):
        h, c = cell(x, (h, c))
        return h, h, c

    for given in (array[1:], array[1:]), (array[:3], array[1:]), None:
        for _ in range(4):
            x = torch.randn(5, 3, 4)
            states = [torch.from_numpy(a) for a in given] if given else [torch.randn(3, 6), torch.randn(3, 6)]
            found, want = [flexsn.scan(core, [x], states, backend=b).outputs[0] for b in ("auto", "torch")]
            torch.testing.assert_close(found, want)


@on_cpu
def test_backwards_that_are_built_beside_a_forward_are_those_that_run(monkeypatch):
    """Of a step, and of whole sequences: none is built for nothing."""
    expected, launched, expect, launch = [], [], Program.expect, Call._launch
    monkeypatch.setattr(Program, "expect", lambda *args: expected.append(args[1:]) or expect(*args))
    monkeypatch.setattr(Call, "_launch", lambda self, *args: launched.append((self.T, *args[:1], *args[1])) or launch(self, *args))
    layer = flexsn.Recurrent(flexsn.ALIF(), nn.Linear(6, 6), stateful=False, strict=True)
    layer(torch.rand(7, 3, 6, requires_grad=True)).sum().backward()
    assert sorted(map(repr, expected)) == sorted(repr(found) for found in launched if found[1] == "backward") != []


@on_cpu
def test_what_is_kept_of_calls_follows_what_needs_gradients():
    """Calls of one layout: without gradients, of some operands, of all; each several times, as those after the second are run again."""
    layer = flexsn.Recurrent(flexsn.LIF(), nn.Linear(6, 6), stateful=False, strict=True)
    plain = copy.deepcopy(layer)
    plain.backend, plain.strict = "torch", False
    for of_x, of_weight, trains in ((False, False, False), (True, False, True), (False, True, True), (True, True, True)) * 2:
        for _ in range(3):
            runs, x = [], torch.rand(7, 3, 6) + 0.5
            for net in (layer, plain):
                leaf = x.clone().requires_grad_(of_x)
                net.requires_grad_(of_weight)
                leaves = [t for t in (leaf, *net.parameters()) if t.requires_grad]
                with torch.set_grad_enabled(trains):
                    y = net(leaf)
                runs.append([y.detach(), *(torch.autograd.grad(y.square().sum(), leaves) if trains else ())])
            for a, b in zip(*runs, strict=True):
                torch.testing.assert_close(a, b)


def scaled(x, v, p):
    v = torch.tanh(0.5 * v * p[0] + x * v + v @ p)
    return v * 1.5, v


@on_cpu
@pytest.mark.parametrize("changed", ["state", "param"])
def test_hooks_that_copy_what_is_saved(changed):
    """The backward reads the copies, whatever becomes of the tensors."""
    for _ in range(4):
        given, runs = (torch.randn(5, 4, 6), torch.randn(4, 6), torch.randn(6, 6) / 3), []
        for backend in ("auto", "torch"):
            x, v, p = [t.clone().requires_grad_() for t in given]
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
                found = flexsn.scan(scaled, [x], [v], [p], backend=backend)
            with torch.no_grad():
                {"state": v, "param": p}[changed].mul_(-3.0).add_(1.0)
            runs.append(torch.autograd.grad(found.outputs[0].square().sum() + found.states[0].sum(), (x, v, p)))
        for a, b in zip(*runs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@on_cpu
def test_tensors_of_inference_mode_in_training():
    with torch.inference_mode():
        x, v = torch.randn(5, 4, 6), torch.randn(4, 6)
    p = (torch.randn(6, 6) / 3).requires_grad_()
    for _ in range(3):
        y = flexsn.scan(scaled, [x], [v], [p]).outputs[0]
        (found,) = torch.autograd.grad(y.square().sum(), p)
        y = flexsn.scan(scaled, [x.clone()], [v.clone()], [p], backend="torch").outputs[0]
        torch.testing.assert_close(found, torch.autograd.grad(y.square().sum(), p)[0])


@on_cpu
def test_results_without_gradients_may_be_changed_with_them():
    core = lambda x, v, p: scaled(x, v, p)  # the first call is one that looks at it
    for _ in range(4):
        with torch.no_grad():
            found = flexsn.scan(core, [torch.randn(5, 4, 6)], [torch.randn(4, 6)], [torch.randn(6, 6) / 3])
        for y in (*found.outputs, *found.states):
            assert y.mul_(torch.ones((), requires_grad=True)).requires_grad


@on_cpu
def test_trials_are_no_steps_of_a_batch_norm():
    """Of a core whose states have another width than its input, which takes trials."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.norm, self.narrow = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 6)

        def forward(self, x, v, u):
            v = torch.tanh(0.5 * v + self.norm(self.wide(x + u)))
            u = 0.5 * u + self.narrow(v)
            return u, v, u

    net = Net()
    for calls in range(1, 4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            flexsn.scan(net, [torch.randn(5, 4, 6)], [torch.zeros(4, 12), torch.zeros(4, 6)])
        assert net.norm.num_batches_tracked == 5 * calls


@on_cpu
def test_replays_hold_no_weights():
    layer = flexsn.Recurrent(flexsn.LIF(), nn.Linear(64, 64), stateful=False)
    with torch.no_grad():
        for _ in range(3):
            layer(torch.randn(3, 2, 64))
    weight = layer.mixing.weight
    gc.collect()
    storages = {t.untyped_storage().data_ptr() for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and t.shape == (64, 64)}
    assert storages == {weight.untyped_storage().data_ptr()}


def test_what_is_kept_for_the_backward():
    """Beside operands and the output one sequence, of what the product gives; states are computed once more."""
    layer, x = flexsn.Recurrent(flexsn.ALIF(), nn.Linear(32, 32), stateful=False, strict=True), torch.rand(50, 8, 32, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x)
    del kept[x.untyped_storage().data_ptr()]
    assert kept.pop(y.untyped_storage().data_ptr(), 0) == 0
    rows = [size for size in kept.values() if size > x.nbytes // 50 * 10]
    assert rows == [x.nbytes]
    y.sum().backward()
    assert x.grad.abs().sum() > 0


class Turned(torch.autograd.Function):
    """Elementwise, with a backward that is not."""

    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(-1)


def test_a_backward_without_a_kernel_is_refused_by_the_forward():
    w = torch.randn(H, H, dtype=f64)

    def core(x, v):
        v = torch.tanh(Turned.apply(x) + v @ w)
        return v, v

    x, start = torch.randn(6, 3, H, dtype=f64), torch.zeros(3, H, dtype=f64)
    flexsn.scan(core, [x], [start], strict=True)
    with pytest.raises(NotElementwiseError):
        flexsn.scan(core, [x.requires_grad_()], [start], strict=True)


def of_input(x, v, w):
    v = torch.tanh(x @ w + v)
    return v, v


def of_state(x, v, w):
    v = torch.tanh(x + v @ w)
    return v, v


def elementwise(x, v, w):
    v = torch.tanh(x + v * w[0])
    return v, v


@pytest.mark.parametrize("core", [of_input, of_state, elementwise])
def test_no_steps_give_zeros(core):
    """Of any core alike; the cotangent of a final state is that of the state at the start."""
    w, v, x = (torch.randn(s, dtype=f64).requires_grad_() for s in ((6, 6), (3, 6), (0, 3, 6)))
    for start in (None, v):
        found = flexsn.scan(core, [x], [start], [w])
        assert all(not g.any() for g in torch.autograd.grad(found.outputs[0].sum(), [x, w], retain_graph=True))
        assert found.states[0].requires_grad == (start is not None)
    gx, gw, gv = torch.autograd.grad(found.states[0].sum(), [x, w, v])
    assert gx.shape == x.shape and not gw.any() and torch.equal(gv, torch.ones_like(v))


@on_cpu  # on a GPU the graphs of a step and of its backward run apart
@pytest.mark.parametrize("width, once, again", [(4, 2, 0), (6000, 5, 5)], ids=["small", "large"])
def test_a_convolution_runs_once_in_training(width, once, again, monkeypatch):
    """A small one is noted in the second step. A large one runs again for a second backward, and under hooks of saved tensors, which see what is to be kept."""
    w = torch.nn.Parameter(torch.randn(2, 2, 3) * 0.3)

    def core(x, s):
        s = torch.tanh(x + torch.nn.functional.conv1d(s, w, padding=1))
        return s, s

    x, start = torch.randn(5, 3, 2, width, requires_grad=True), torch.zeros(3, 2, width)
    flexsn.scan(core, [x], [start]).outputs[0].sum().backward()  # captures
    calls, own = [], MixingFunction.__call__
    monkeypatch.setattr(MixingFunction, "__call__", lambda self, *tensors: (calls.append(self.func), own(self, *tensors))[1])
    y = flexsn.scan(core, [x], [start]).outputs[0]
    first = torch.autograd.grad(y.sum(), [x, w], retain_graph=True)
    assert len(calls) == once
    second = torch.autograd.grad(y.sum(), [x, w])
    assert len(calls) == once + again
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float())
    with hooks:
        y = flexsn.scan(core, [x], [start]).outputs[0]
    third = torch.autograd.grad(y.sum(), [x, w])
    want = torch.autograd.grad(flexsn.scan(core, [x], [start], backend="torch").outputs[0].sum(), [x, w])
    for found in (first, second, third):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4 * want[1].abs().max().item())


CONVOLUTIONS = {
    "bias": (lambda y, w, b: F.conv1d(y, w, b, padding=1), (3, 2, 7), (2, 2, 3)),
    "no batch": (lambda y, w, b: F.conv1d(y, w, b, 1, 1), (2, 7), (2, 2, 3)),
    "groups": (lambda y, w, b: F.conv2d(y, w, bias=b, padding=(2, 0), dilation=(2, 1), groups=2), (3, 4, 5, 4), (4, 2, 3, 1)),
    "no bias": (lambda y, w, b: F.conv2d(y, w, padding=1) + b[:, None, None], (3, 4, 5, 4), (4, 4, 3, 3)),
    "same": (lambda y, w, b: F.conv2d(y, w, b, padding="same"), (3, 4, 5, 4), (4, 4, 3, 3)),
    "volume": (lambda y, w, b: F.conv3d(y, w, b, padding=1), (2, 2, 3, 4, 3), (2, 2, 3, 3, 3)),
    "large": (lambda y, w, b: F.conv2d(y, w, b, padding=1), (5, 4, 48, 48), (4, 4, 3, 3)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_convolutions(name):
    """Those of their weights are found of all steps at once, but where steps are large."""
    call, shape, weight = CONVOLUTIONS[name]
    torch.manual_seed(0)

    def core(x, v, w, b):
        v = torch.tanh(0.5 * v + x + call(v, w, b))
        return v * v, v

    check_mixing(core, [torch.randn(4, *shape)], [torch.randn(shape)], [0.3 * torch.randn(weight), torch.randn(weight[0])])


def test_calls_that_no_gradient_goes_through():
    """Of what they take at all steps, which has one elsewhere."""

    def core(x, v, edges):
        bins = torch.searchsorted(edges, v.contiguous())
        v = torch.tanh(0.5 * v + x + 0.1 * bins.to(x.dtype)) + edges[0]
        return v, v

    x, edges = torch.randn(4, 3, 5, requires_grad=True), torch.tensor([-0.5, 0.0, 0.5], requires_grad=True)
    found = []
    for backend in ("auto", "torch"):
        y = flexsn.scan(core, [x], [torch.zeros(3, 5)], [edges], backend=backend).outputs[0]
        found.append(torch.autograd.grad(y.square().sum(), [x, edges]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("T", [1, 2, 3, 7])
@pytest.mark.parametrize("both", [True, False], ids=["convolution", "convolution and cumsum"])
def test_a_loop_in_python_notes_one_step(both, T, monkeypatch):
    """Of two layers, of which the second one's spikes drive the first; where they start they are laid out in another way.

    `cumsum` keeps graphs of autograd in training, so steps with it are noted without gradients alone.
    """
    loops = []

    class Counted(Repeated):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            loops.append(self)

    def core(x, v, u, n, w, b):
        v = torch.tanh(0.5 * v + x + F.conv1d(u, w, b, padding=1))
        u = torch.tanh(0.3 * u + (v if both else v.cumsum(-1)) * 0.1) + n * 0.01
        return v * u, v, u, n + 1

    monkeypatch.setattr(recurrence, "Repeated", Counted)
    start = torch.randn(7, 2, 3).permute(2, 1, 0)
    x, w, b = torch.randn(T, 3, 2, 7), 0.3 * torch.randn(2, 2, 3), torch.randn(2)
    counts = torch.zeros(3, 2, 7, dtype=torch.int32)
    check_mixing(core, [x], [start, start * 2.0, counts], [w, b])
    forward, backward = loops
    assert forward.repeats == backward.repeats == both
    assert (forward.replay is not None) == (both and T > 1) and (backward.replay is not None) == (both and T > 2)
    with torch.no_grad():
        flexsn.scan(core, [x], [start, start * 2.0, counts], [w, b], strict=True)
    assert loops[-1].repeats and (loops[-1].replay is not None) == (T > 1)
