"""Cores that mix what they compute: against the eager loop and PyTorch's own layers, and the pieces in which they run."""

import warnings

import pytest
import torch
from helpers import assert_same_grads, assert_same_values, check_mixing, evaluate
from torch import nn
from torch.nn.functional import layer_norm, linear, softmax

import flexsn
from flexsn.errors import FallbackWarning

f64 = torch.float64
H, SMALL = 6, 3


@pytest.fixture(autouse=True)
def no_fallback():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield


def computed(x, v, w):
    h = torch.tanh(x + (2.0 * v) @ w)
    return h * w[0], h


def two_in_a_row(x, v, w):
    """Two products in a row, and a norm of what is computed."""
    h = torch.tanh(x + (v @ w) @ w)
    h = layer_norm(h + torch.tanh(h @ w), (H,))
    return h, h


def gates(x, h, c, w):
    """One product for four gates, of another width than the states."""
    i, f, o, u = (x @ w + h @ w).repeat(1, 4).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, h, c


def joined(x, v, w, both):
    h = torch.tanh(torch.cat([x, v * w[0]], -1) @ both)
    return h, h


def two_layers(x, v, u, w, down):
    v = 0.8 * v + x @ w
    s = torch.sigmoid(v - 0.5)
    u = 0.7 * u + s @ down
    return torch.sigmoid(u), v * (1.0 - s), u


def feedback(x, v, u, past, w, down):
    """The second layer goes back to the first one; an output has another shape than the states."""
    v = w[0] * v + x + past @ down.T
    s = torch.sigmoid(v - 0.5)
    u = 0.7 * u + s @ down
    return torch.tanh(u), s.sum(-1), v, u, torch.tanh(u)


def own_spikes_later(x, v, past, w):
    """A state in no recurrence: the spikes of the step before, for what comes after."""
    v = 0.8 * v + x
    s = torch.sigmoid(v - 0.5)
    return s + past @ w, v, s


def inhibition(x, v, i):
    i = 0.5 * i + x
    h = 0.9 * v + i - softmax(v + i, -1)
    s = torch.tanh(h)
    return s - s.mean(-1, keepdim=True), h, i


def attention(x, v, w):
    """Two operands that depend on time, one of them an input."""
    v = torch.tanh(v * 0.5 + softmax((v @ w) @ (x @ w).T, -1) @ x)
    return v, v


def two_recurrences(x, v, u, w):
    v = torch.tanh(v @ w + x)
    u = torch.tanh((u * 0.5) @ w + v @ w)
    return u + v, v, u


def mixed_is_returned(x, v, w):
    """The result of a mixing call is the output, and the state."""
    h = torch.tanh(x + v) @ w
    return h, h


def weights(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=f64, device="cpu") * 0.4


W, DOWN, BOTH = weights(H, H), weights(H, SMALL), weights(2 * H, H)
CASES = {
    "computed": (computed, [H], [W], "at every step"),
    "two in a row": (two_in_a_row, [H], [W], "at every step"),
    "gates": (gates, [H, H], [W], "at every step"),
    "joined": (joined, [H], [W, BOTH], "at every step"),
    "two layers": (two_layers, [H, SMALL], [W, DOWN], ""),
    "feedback": (feedback, [H, SMALL, SMALL], [W, DOWN], "at every step"),
    "own spikes later": (own_spikes_later, [H, H], [W], ""),
    "inhibition": (inhibition, [H, H], [], "at every step"),
    "attention": (attention, [H], [W], "at every step"),
    "two recurrences": (two_recurrences, [H, H], [W], "at every step"),
    "mixed is returned": (mixed_is_returned, [H], [W], "at every step"),
}


def operands(name, T=5, batch=4):
    core, widths, params, _ = CASES[name]
    generator, device = torch.Generator("cpu").manual_seed(0), torch.get_default_device()
    x = torch.randn(T, batch, H, generator=generator, dtype=f64, device="cpu")
    starts = [torch.rand(batch, width, generator=generator, dtype=f64, device="cpu") for width in widths]
    inputs, states, params = [[t.to(device) for t in group] for group in ([x], starts, params)]
    return core, inputs, states, params


def check(core, inputs, states, params, **options):
    fused, grads = evaluate(core, inputs, states, params, backend="auto", **options)
    eager, want = evaluate(core, inputs, states, params, backend="torch", **options)
    assert_same_values(fused, eager, exact=False)
    assert_same_grads(grads, want, 1.0)


@pytest.mark.parametrize("name", CASES)
def test_as_the_eager_loop(name):
    core, *given = operands(name)
    check(core, *given)
    check(core, *given, sequences=True)  # whose cotangents come at every step
    with torch.no_grad():
        got, want = [flexsn.scan(core, *given, backend=b, strict=b == "auto") for b in ("auto", "torch")]
    for a, b in zip((*got.outputs, *got.states), (*want.outputs, *want.states), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("T", "batch"), [(1, 4), (9, 1)])
def test_sizes(name, T, batch):
    check(*operands(name, T, batch))


@pytest.mark.parametrize("name", ["feedback", "gates", "attention", "two recurrences"])
def test_finite_differences(name):
    core, (x,), states, params = operands(name, T=3, batch=2)
    leaves = [t.clone().requires_grad_() for t in (x, *states, *params)]

    def run(x, *others):
        result = flexsn.scan(core, [x], others[: len(states)], others[len(states) :], strict=True)
        return *result.outputs, *result.states

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("name", CASES)
def test_what_mixes_in_no_recurrence_runs_once(name):
    core, inputs, states, params = operands(name)
    report = flexsn.explain(core, *inputs, states=states, params=params)
    assert report.choice.fused, report.choice.why
    assert ("at every step" in report.choice.why) == bool(CASES[name][3])
    assert "once, on the whole sequence" in report.choice.why or name not in ("two layers", "own spikes later", "two recurrences")


def test_no_steps_of_a_convolution():
    conv, back = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def core(x, v):
        v = torch.tanh(0.5 * v + conv(x) + back(v))
        return v, v

    rest = torch.zeros(2, 3, 5, 5)
    assert flexsn.scan(core, [torch.zeros(0, 2, 2, 5, 5)], [rest], strict=True).outputs[0].shape == (0, 2, 3, 5, 5)


def test_an_lstm_with_one_product_for_its_gates_equals_pytorchs():
    torch.manual_seed(0)
    layer = nn.LSTM(5, 7).double()

    def core(x, h, c):
        both = linear(x, layer.weight_ih_l0, layer.bias_ih_l0) + linear(h, layer.weight_hh_l0, layer.bias_hh_l0)
        i, f, g, o = both.chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, h, c

    x = torch.randn(11, 3, 5, dtype=f64, requires_grad=True)
    zeros = torch.zeros(3, 7, dtype=f64)
    result = flexsn.scan(core, [x], [zeros, zeros], strict=True)
    y, (h, c) = layer(x)
    torch.testing.assert_close([result.outputs[0], *result.states], [y, h[0], c[0]])
    leaves = (x, *layer.parameters())
    grads = [torch.autograd.grad(total.sin().sum(), leaves) for total in (result.outputs[0], y)]
    torch.testing.assert_close(*grads)


def test_a_module_with_such_a_core_carries_its_states():
    w = nn.Parameter(W.to(torch.get_default_device(), copy=True))
    neuron = flexsn.FlexSN(lambda x, v: computed(x, v, w), num_states=1, strict=True)
    x = torch.randn(8, 2, H, dtype=f64)
    neuron.states = [torch.zeros(2, H, dtype=f64)]
    parts = torch.cat([neuron(x[:3]), neuron(x[3:])])
    whole = flexsn.scan(computed, [x], [torch.zeros(2, H, dtype=f64)], [w], backend="torch").outputs[0]
    torch.testing.assert_close(parts, whole)
    parts.sum().backward()
    (expected,) = torch.autograd.grad(whole.sum(), w)
    torch.testing.assert_close(w.grad, expected)


def test_no_steps():
    for name in CASES:
        core, (x,), states, params = operands(name)
        result = flexsn.scan(core, [x[:0].requires_grad_()], states, params, strict=True)
        assert [len(y) for y in result.outputs] == [0] * len(result.outputs), name
        assert all(torch.equal(a, b) for a, b in zip(result.states, states, strict=True)), name


def largest(x, v):
    h = torch.tanh(x + v)
    top = h.max(-1)
    return h - top.values.unsqueeze(-1), h, top.indices, v * 0.5 + h.sort(-1).values


def test_named_tuples_of_pytorch():
    x, v = torch.randn(5, 4, H, dtype=f64), torch.rand(4, H, dtype=f64)
    got, want = [flexsn.scan(largest, [x], [v], backend=backend) for backend in ("auto", "torch")]
    torch.testing.assert_close(got.outputs, want.outputs)
    torch.testing.assert_close(got.states, want.states)


def test_a_core_that_makes_other_calls_than_at_its_capture_is_noticed():
    x, v, w = torch.randn(5, 4, H), torch.rand(4, H), W.to(torch.get_default_device(), torch.float32)

    def other(x, v):
        if type(x) is torch.Tensor:
            x = x * 1.0
        return x + v @ w, v * 0.5 + x

    with pytest.warns(FallbackWarning, match="`mm` is not elementwise"):
        got = flexsn.scan(other, [x], [v])
    assert torch.equal(got.outputs[0], flexsn.scan(other, [x], [v], backend="torch").outputs[0])


@pytest.mark.parametrize("taken", [lambda a, p: a[..., 2:6], lambda a, p: a @ p], ids=["part", "product"])
def test_a_state_of_another_recurrence_is_an_operand(taken):
    """Its cotangents have as many rows as there are steps."""

    def core(x, v, u, w, p):
        a = taken(torch.cat([v, u], -1), p)
        return a, torch.tanh(x + v @ w), torch.tanh(a)

    torch.manual_seed(0)
    check_mixing(core, [torch.randn(3, 2, 4)], [torch.randn(2, 4)] * 2, [torch.randn(4, 4), torch.randn(8, 4)])
