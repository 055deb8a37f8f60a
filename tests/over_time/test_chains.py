"""Chains of layers: `flexsn.over_time` of an `nn.Sequential` calls them with whole sequences, no tensor stands for a step."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import flexsn
from flexsn._over_time import network as over_time_network
from flexsn._over_time.chains import chain


class Own(nn.Module):
    """The same layers, called by a forward of the user's own."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, *inputs):
        return self.layers(*inputs)


@pytest.fixture
def no_steps(monkeypatch):
    """Have tensors that stand for a step raise."""

    def made(*args):
        raise AssertionError("a tensor of one step was made")

    monkeypatch.setattr(over_time_network, "AllSteps", type("AllSteps", (), {"__init__": made}))


def dense(step_mode="m", stateful=True):
    return nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), flexsn.LIF(v_threshold=0.3, step_mode=step_mode, stateful=stateful),
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), flexsn.ALIF(tau=5.0, r=20.0, stateful=stateful), nn.Identity()), nn.Linear(8, 3),
    )  # fmt: skip


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4).eval(), flexsn.LIF(v_threshold=0.1), nn.MaxPool2d(2), nn.GroupNorm(2, 4),
        nn.Flatten(), nn.ReLU(), nn.Linear(16, 3),
    )  # fmt: skip


def recurrent():
    return nn.Sequential(nn.Linear(6, 8), flexsn.Recurrent(flexsn.LIF(v_threshold=0.3), nn.Linear(8, 8)), nn.Linear(8, 3))


CASES = {
    "dense": (dense, (5, 4, 6)),
    "single steps": (lambda: dense("s"), (5, 4, 6)),
    "detached": (lambda: dense(stateful="detached"), (5, 4, 6)),
    "not stateful": (lambda: dense(stateful=False), (5, 4, 6)),
    "one sample": (dense, (5, 6)),
    "convolutional": (convolutional, (5, 3, 2, 4, 4)),
    "no batch": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), flexsn.LIF(), nn.MaxPool2d(2), nn.Flatten(0)), (5, 2, 6, 6)),
    "flattened from the end": (lambda: nn.Sequential(nn.Flatten(-2, -1), nn.Linear(12, 2)), (5, 3, 2, 12, 1)),
    "recurrent": (recurrent, (5, 4, 6)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_chain_is_what_a_forward_of_ones_own_makes_of_it(name, request):
    make, shape = CASES[name]
    torch.manual_seed(0)
    network = make()
    own = flexsn.over_time(Own(copy.deepcopy(network)), strict=True)
    x = torch.randn(shape)
    found = []
    for run in (own, flexsn.over_time(network, strict=True)):
        leaf = x.clone().requires_grad_()
        total = [run(leaf), run(leaf * 0.5)]  # with the states that the first call left
        params = [leaf, *run.parameters()]
        found.append([*total, *torch.autograd.grad(sum(y.square().sum() for y in total), params)])
        request.getfixturevalue("no_steps")
    for got, want in zip(*found, strict=True):
        assert_close(got, want)
    for layer, other in zip(network.modules(), own.network.layers.modules(), strict=True):
        if isinstance(layer, flexsn.FlexSN):
            assert (layer.states is None) == (other.states is None)
            if layer.states is not None:
                assert_close(layer.states, other.states)


def test_an_error_of_a_layer_is_the_users():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        flexsn.over_time(nn.Sequential(flexsn.LIF(), nn.Linear(5, 2)))(torch.randn(4, 3, 6))


def test_what_has_a_hook_or_writes_is_no_chain():
    x, seen = torch.randn(4, 3, 6), []
    hooked = nn.Sequential(nn.Linear(6, 6), flexsn.LIF())
    hooked[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    with pytest.warns(flexsn.errors.FallbackWarning, match="has a hook, which sees one step"):
        flexsn.over_time(hooked)(x)
    assert seen == [(3, 6)] * 4
    assert chain(hooked) is None and chain(nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True))) is None


def test_a_recurrent_layer_follows_its_neuron_and_its_mixing():
    layer = flexsn.Recurrent(flexsn.LIF(tau=2.0, r=2.0), nn.Linear(4, 4))
    network, x = flexsn.over_time(nn.Sequential(layer), strict=True), 3 * torch.rand(6, 2, 4)
    for change in ({}, {"tau": 50.0}, {"v_reset": None}):
        for name, value in change.items():
            setattr(layer.neuron, name, value)
        flexsn.reset_net(network)
        got = network(x)
        flexsn.reset_net(network)
        assert torch.equal(got, layer(x))
    layer.mixing = nn.Linear(4, 4)
    flexsn.reset_net(network)
    got = network(x)
    flexsn.reset_net(network)
    assert torch.equal(got, layer(x))


@pytest.mark.parametrize("network", [lambda a: nn.Sequential(a, nn.Sequential(a)), lambda a: nn.Sequential(nn.Sequential(a), a)])
def test_a_neuron_at_two_places_runs_step_by_step(network):
    neuron = flexsn.LeakyIntegrator(tau=2.0)
    with pytest.raises(flexsn.errors.StepByStepError, match="called twice in a step"):
        flexsn.over_time(network(neuron), strict=True)(torch.rand(6, 2, 4))


@pytest.mark.parametrize("wrapped", [Own, nn.Sequential], ids=["own forward", "chain"])
@pytest.mark.parametrize("layer", [nn.Flatten(-3), nn.LayerNorm((5, 4)), nn.Linear(5, 3)])
def test_time_is_no_dim_of_a_layer(layer, wrapped):
    """What a step has too few dims for is refused as in single steps."""
    x = torch.rand(*{nn.Flatten: (5, 2, 3), nn.LayerNorm: (5, 4), nn.Linear: (5,)}[type(layer)])
    with pytest.raises((IndexError, RuntimeError)):
        flexsn.over_time(wrapped(nn.Sequential(layer)))(x)
    assert flexsn.over_time(wrapped(nn.Sequential(nn.Flatten(0))))(torch.rand(5)).shape == (5, 1)


def test_a_call_that_fails_leaves_what_is_carried():
    network = nn.Sequential(flexsn.LIF(), nn.Linear(6, 2))
    flexsn.over_time(network)(torch.rand(4, 3, 6))
    before, network[1] = network[0].states[0].clone(), nn.Linear(5, 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        flexsn.over_time(network)(torch.rand(4, 3, 6))
    assert torch.equal(network[0].states[0], before)


def test_a_neuron_with_two_outputs_ends_a_chain():
    def core(x, v):
        h = v + (x - v) / 2.0
        s = flexsn.surrogate.atan(h - 1.0)
        return s, h, h * (1 - s)

    network = nn.Sequential(nn.Linear(6, 6), flexsn.FlexSN(core, num_states=1))
    spikes, seen = flexsn.over_time(network, strict=True)(torch.randn(4, 3, 6))
    assert spikes.shape == seen.shape == (4, 3, 6)


@pytest.mark.parametrize("step_mode", ["m", "s"])
@pytest.mark.parametrize("wrapped", [Own, nn.Sequential], ids=["own forward", "chain"])
def test_neurons_with_values_per_channel(step_mode, wrapped):
    network = nn.Sequential(nn.Linear(6, 6), flexsn.LIF(tau=2.0, learn_tau=True, per_channel=5, v_threshold=0.1, step_mode=step_mode))
    x = torch.randn(7, 3, 5, 6)
    got = flexsn.over_time(wrapped(network), strict=True)(x)
    flexsn.reset_net(network)
    network[1].step_mode = "m"
    assert_close(got, network(x), rtol=0, atol=0)
    flexsn.reset_net(network)
    with pytest.raises(flexsn.errors.FlexSNError, match="per_channel=5, but an input has steps of shape"):
        flexsn.over_time(wrapped(network), strict=True)(torch.randn(7, 3, 4, 6))
