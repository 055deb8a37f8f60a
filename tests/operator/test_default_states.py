"""Default states whose shape is not that of the inputs: zeros of the shape that the core returns, where it can be found."""

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, layer_norm, linear

import flexsn
from flexsn.errors import CoreError


def weights(*shape):
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(torch.get_default_device()) * 0.3


IN, REC, OUT, LSTM_IN, LSTM_REC, FIELD, BACK = (
    weights(7, 16), weights(16, 16), weights(16, 5), weights(64, 7), weights(64, 16), weights(8, 3, 3, 3), weights(8, 8, 3, 3)
)  # fmt: skip


WIDE_IN, WIDE_REC, LAST = weights(90, 70), weights(70, 70), weights(70)


def wide(x, v, s):
    """Widths that are no small inner dims (those of up to 64 are tried as such first)."""
    h = v + (x @ WIDE_IN + s @ WIDE_REC - v) / 2.0
    s = torch.sigmoid(h - 1.0)
    return s @ LAST, h * (1.0 - s), s


def of_a_wide_dim(x, v):
    v = v * 0.9 + x @ LAST
    return v, v


def recurrent(x, v, s):
    h = v + (x @ IN + s @ REC - v) / 2.0
    s = torch.sigmoid(h - 1.0)
    return s, h * (1.0 - s), s


def lstm(x, h, c):
    i, f, o, u = (linear(x, LSTM_IN) + linear(h, LSTM_REC)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, h, c


def strided(x, v, s):
    h = 0.7 * v + conv2d(x, FIELD, stride=2, padding=1) + conv2d(s, BACK, padding=1)
    s = torch.sigmoid(h - 1.0)
    return s, h * (1.0 - s), s


def three_layers(x, v, u, y):
    v = 0.9 * v + x @ IN
    u = 0.8 * u + torch.tanh(v) @ REC
    y = 0.7 * y + torch.tanh(u) @ OUT
    return y, v, u, y


def of_a_norm(x, v):
    h = v * 0.9 + x @ IN + layer_norm(v, (16,))
    return h, h


CASES = {
    "recurrent": (recurrent, (3, 7), [(3, 16)] * 2),
    "lstm": (lstm, (3, 7), [(3, 16)] * 2),
    "strided": (strided, (2, 3, 8, 8), [(2, 8, 4, 4)] * 2),
    "three layers": (three_layers, (3, 7), [(3, 16), (3, 16), (3, 5)]),
    "wide": (wide, (3, 90), [(3, 70)] * 2),
    "of a wide dim": (of_a_wide_dim, (3, 4, 70), [(3, 4)]),
    "of a norm": (of_a_norm, (3, 7), [(3, 16)]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_zeros_of_the_shape_that_the_core_returns(name, backend):
    core, shape, states = CASES[name]
    x = torch.randn(5, *shape)
    neuron = flexsn.FlexSN(core, num_states=len(states), backend=backend, strict=True)
    given = flexsn.scan(core, [x], [torch.zeros(s) for s in states], backend="torch")
    for _ in range(2):  # the second call knows
        neuron.reset()
        torch.testing.assert_close(neuron(x), given.outputs[0])
        assert [tuple(v.shape) for v in neuron.states] == states
    assert neuron(x[:0]).shape[0] == 0


def test_one_state_may_be_given():
    x = torch.randn(5, 3, 7)
    some = torch.rand(3, 16)
    got = flexsn.scan(recurrent, [x], [some, None], strict=True).outputs[0]
    torch.testing.assert_close(got, flexsn.scan(recurrent, [x], [some, torch.zeros(3, 16)], backend="torch").outputs[0])


def test_gradients_flow_from_them():
    w = nn.Parameter(IN.clone())
    neuron = flexsn.FlexSN(lambda x, v: ((h := torch.tanh(x @ w + v @ REC)), h), num_states=1, strict=True)
    neuron(torch.randn(4, 3, 7)).sum().backward()
    assert w.grad.abs().sum() > 0


def test_what_cannot_be_found_is_asked_for():
    both = weights(23, 16)
    neuron = flexsn.FlexSN(lambda x, v: ((h := torch.tanh(torch.cat([x, v], -1) @ both)), h), num_states=1)
    with pytest.raises(CoreError, match=r"shape of state `v` cannot be found[^$]*initial_states"):
        neuron(torch.randn(4, 3, 7))


def test_an_error_of_the_core_is_its_own():
    neuron = flexsn.FlexSN(lambda x, v: ((h := torch.tanh(x @ REC + v)), h), num_states=1)
    with pytest.raises(CoreError, match=r"reduction dim|multiplied"):
        neuron(torch.randn(4, 3, 7))


@pytest.mark.parametrize("name", CASES)
def test_explain_finds_them(name):
    core, step, _ = CASES[name]
    assert flexsn.explain(core, torch.randn(4, *step)).fused
