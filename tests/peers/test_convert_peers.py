"""`flexsn.convert` on snnTorch's and Norse's neurons, surrogates as flexsn's, and SpikingJelly's functions on a network of both."""

import copy

import pytest
import torch
from conversions import B, T, assert_same, compare, each, jelly, looped, whole
from loaded_peers import functional, layer, neuron, norse, snn, snn_surrogate, snn_utils, surrogate
from torch import nn

import flexsn
from flexsn.interchange import peer_snntorch, surrogates

# --- snnTorch ---------------------------------------------------------------------------------------------------------------
SNN = {
    "leaky": lambda **k: snn.Leaky(beta=0.9, **k),
    "leaky zero learned": lambda **k: snn.Leaky(beta=0.9, reset_mechanism="zero", learn_beta=True, learn_threshold=True, **k),
    "leaky at once": lambda **k: snn.Leaky(beta=torch.linspace(0.1, 0.9, 7), learn_beta=True, reset_delay=False, **k),
    "leaky zero at once": lambda **k: snn.Leaky(beta=0.8, reset_delay=False, reset_mechanism="zero", graded_spikes_factor=2.0, **k),
    "leaky none": lambda **k: snn.Leaky(beta=0.5, reset_mechanism="none", spike_grad=snn_surrogate.fast_sigmoid(), **k),
    "synaptic": lambda **k: snn.Synaptic(alpha=0.8, beta=0.9, learn_alpha=True, spike_grad=snn_surrogate.fast_sigmoid(5), **k),
    "synaptic at once": lambda **k: snn.Synaptic(alpha=0.8, beta=0.9, reset_mechanism="zero", reset_delay=False, **k),
    "lapicque": lambda **k: snn.Lapicque(beta=0.5, threshold=0.2, **k),
    "lapicque zero": lambda **k: snn.Lapicque(R=2.0, C=3.0, reset_mechanism="zero", **k),
    "alpha": lambda **k: snn.Alpha(alpha=0.9, beta=0.8, threshold=0.5, **k),
    "alpha subtract": lambda **k: snn.Alpha(alpha=0.9, beta=0.8, reset_mechanism="subtract", **k),
}


@pytest.fixture(autouse=True)
def _instances():
    """snnTorch keeps every neuron ever made in a list."""
    snn.SpikingNeuron.instances.clear()
    yield
    snn.SpikingNeuron.instances.clear()


def pair(make, **options):
    """A network, and the same unconverted; snnTorch's list of neurons knows both."""
    net, ref = (nn.Sequential(nn.Linear(4, 7), make(**options)) for _ in range(2))
    ref.load_state_dict(net.state_dict())
    return net, ref


@each(SNN, fused=["leaky at once", "alpha subtract"])
def test_snntorch_neurons(name, backend):
    net, ref = pair(SNN[name], init_hidden=True)
    weights = list(net.parameters())
    report = flexsn.convert(net, backend=backend)
    assert len(report.replaced) == 1 and "one step per call" in report.replaced[0].outcome
    assert isinstance(net[1], flexsn.FlexSN) and isinstance(net[1], type(ref[1]))
    assert [id(p) for p in net.parameters()] == [id(p) for p in weights]
    assert_same(net, ref, looped)
    snn_utils.reset(net), snn_utils.reset(ref)
    net[1].step_mode = "m"
    assert_same(net, ref, whole, looped)


def test_every_known_neuron_is_tested():
    """The recurrent ones in `tests/interchange/test_convert_recurrent.py`."""
    recurrent = {snn.RLeaky, snn.RSynaptic, snn.SLSTM, snn.SConv2dLSTM}
    assert {type(make()) for make in SNN.values()} | recurrent == set(peer_snntorch.CORES)


@pytest.mark.parametrize("name", ["leaky", "synaptic", "alpha"])
def test_states_of_snntorch_neurons_go_in_and_out(name):
    net, ref = pair(SNN[name])
    flexsn.convert(net, backend="torch")
    old, new = ref[1], net[1]
    initial = old.reset_mem()
    states = same = initial if isinstance(initial, tuple) else (initial,)
    x = torch.randn(T, B, 7)
    seen = []
    for step in x:
        spikes, *states = old(step, *states)
        got, *same = new(step, *same)
        assert torch.equal(got, spikes) and all(torch.equal(a, b) for a, b in zip(same, states, strict=True))
        seen.append((spikes, *states))
    new.reset_mem()
    new.step_mode = "m"
    for got, want in zip(new(x, mem=torch.zeros(B, 7)), zip(*seen, strict=True), strict=True):
        assert torch.equal(got, torch.stack(want))


def test_hidden_states_cannot_be_passed():
    net, _ = pair(SNN["leaky"], init_hidden=True)
    flexsn.convert(net)
    with pytest.raises(TypeError, match="init_hidden"):
        net[1](torch.ones(B, 7), torch.zeros(B, 7))


def test_snntorch_resets_and_detaches_converted_neurons():
    net, _ = pair(SNN["synaptic"], init_hidden=True)
    flexsn.convert(net, backend="torch")
    net(torch.ones(B, 4))
    assert net[1].mem.any() and net[1].syn.requires_grad
    snn.Synaptic.detach_hidden()
    assert net[1].mem.any() and not net[1].syn.requires_grad
    snn_utils.reset(net)
    assert not net[1].mem.any() and not net[1].syn.any()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: snn.Leaky(beta=0.9, state_quant=lambda v: v.round()), "state_quant"),
        (lambda: snn.Leaky(beta=0.9, spike_grad=snn_surrogate.SSO()), "random"),
        (lambda: type("Mine", (snn.Leaky,), {})(beta=0.9), "subclass of Leaky"),
    ],
    ids=["quantised", "noise", "subclass"],
)
def test_what_snntorch_neurons_are_left_alone(make, reason):
    report = flexsn.convert(nn.Sequential(make()))
    assert not report.replaced and reason in report.left[0].outcome


def test_inhibition_is_left_alone():
    with pytest.warns(UserWarning, match="Inhibition"):
        lif = snn.Leaky(beta=0.9, inhibition=True)
    assert "compares neurons" in flexsn.convert(lif).left[0].outcome


# --- Norse ------------------------------------------------------------------------------------------------------------------
CELLS = ["IAFCell", "LIFCell", "LIFBoxCell", "LIFAdExCell", "LIFExCell", "LIFRefracCell", "LICell", "LIBoxCell", "LSNNCell"]
LAYERS = ["LIF", "IAF", "LI", "LIFAdEx", "LIFEx", "LSNN"]


def steps(net, x):
    state, out = None, []
    for step in x:
        y, state = net(step, state)
        out.append(y)
    return torch.stack(out)


@each(CELLS + LAYERS, fused=["LIF", "LSNNCell"])
def test_norse_neurons(name, backend):
    torch.manual_seed(3)
    make, cell = getattr(norse, name), name.endswith("Cell")
    linear = nn.Linear(4, 7)
    with torch.no_grad():
        linear.weight *= 20.0
    ref = norse.SequentialState(linear, make())
    net = norse.SequentialState(copy.deepcopy(linear), make())
    report = flexsn.convert(net, backend=backend)
    assert ("one step per call" if cell else "whole sequences") in report.replaced[0].outcome
    x = torch.randn(T, B, 4)
    got, want = (steps(m, x) if cell else m(x)[0] for m in (net, ref))
    assert torch.equal(got, want) and want.any()
    got_grad, want_grad = (torch.autograd.grad(y.sum(), m[0].weight)[0] for y, m in ((got, net), (want, ref)))
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-4, atol=1e-4 * want_grad.abs().max().item())


def test_norse_states_keep_their_types():
    layer_, converted = norse.LSNN(), nn.Sequential(norse.LSNN())
    flexsn.convert(converted, backend="torch")
    x = 30.0 * torch.rand(T, B, 4)
    _, want = layer_(x)
    y, got = converted[0](x)
    assert type(got) is type(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    again, _ = converted[0](x, got)
    assert torch.equal(again, layer_(x, want)[0]) and not torch.equal(again, y)


def test_recorded_states_of_a_norse_layer():
    ref = norse.LIF(record_states=True)
    net = flexsn.convert(norse.LIF(record_states=True), backend="torch").model
    x = 30.0 * torch.rand(T, B, 4)
    (_, want), (_, got) = ref(x), net(x)
    assert got.v.shape == (T, B, 4) and torch.equal(got.v, want.v) and torch.equal(got.i, want.i)


def test_a_lifted_norse_cell_becomes_one_kernel_over_time():
    ref = norse.SequentialState(norse.Lift(nn.Linear(4, 7)), norse.Lift(norse.LIFCell()))
    net = copy.deepcopy(ref)
    report = flexsn.convert(net, backend="torch")
    assert [e.before for e in report.replaced] == ["Lift"] and "whole sequences" in report.replaced[0].outcome
    x = 30.0 * torch.rand(T, B, 4)
    (got, state), (want, want_state) = net(x)[0], ref(x)[0]  # Lift returns its state with the output
    assert torch.equal(got, want) and want.any() and torch.equal(state.v, want_state.v)


# --- surrogates ---
THEIRS = [
    *(getattr(surrogate, name)() for name in surrogates._SPIKINGJELLY),
    surrogate.ATan(3.0), surrogate.Sigmoid(2.0), surrogate.PiecewiseQuadratic(0.7), surrogate.Erf(1.5), surrogate.SuperSpike(3.0),
]  # fmt: skip
SNNTORCH_S = [getattr(snn_surrogate, name)() for name in surrogates._SNNTORCH] + [snn_surrogate.atan(3.0), snn_surrogate.sigmoid(5)]


@pytest.mark.parametrize("spike", THEIRS, ids=str)
def test_spikingjelly_s_surrogates_become_flexsn_s(spike):
    ours = surrogates.from_spikingjelly(spike)
    assert ours.func.__module__ == "flexsn.surrogate"
    compare(ours, spike)


@pytest.mark.parametrize("spike", SNNTORCH_S, ids=lambda f: f.__qualname__.split(".")[0])
def test_snntorch_s_surrogates_become_flexsn_s(spike):
    ours = surrogates.from_snntorch(spike)
    assert ours.func.__module__ == "flexsn.surrogate"
    compare(ours, spike)


def test_unknown_surrogates_are_called_as_they_are():
    def own(x):
        return surrogate.atan.apply(x, 2.0) * 1.0

    for unknown in (surrogate.PoissonPass(), surrogate.Sigmoid(spiking=False), own):
        assert surrogates.from_spikingjelly(unknown) is unknown
    custom = snn_surrogate.custom_surrogate(lambda x, grad, out: grad * 0.5)
    assert surrogates.from_snntorch(custom) is custom and surrogates.from_snntorch(own) is own
    compare(surrogates.above(own), lambda x: snn_surrogate.atan()(x))
    ref = jelly(neuron.LIFNode(surrogate_function=own))
    net = copy.deepcopy(ref)
    assert flexsn.convert(net, backend="torch").replaced
    assert_same(net, ref, whole)


# --- functions on a network ---
def set_backend(net, backend):
    """Read and set what SpikingJelly's `functional.set_backend` does, which its 2.0 has no more."""
    for module in net.modules():
        if hasattr(module, "backend") and backend in module.supported_backends:
            module.backend = backend


def step(x, v):
    h = v * 0.5 + x
    return h.tanh(), h


def test_spikingjelly_s_functions_on_a_network_with_a_flexsn_module():
    net = nn.Sequential(layer.Linear(4, 7), neuron.LIFNode(), flexsn.FlexSN(step, 1, 1), flexsn.LIF(tau=2.0))
    x, own = torch.randn(T, B, 4), net[2]
    functional.set_step_mode(net, "m")
    want = net(x)
    assert own.step_mode == "m" and own.states is not None and own.states[0].requires_grad
    functional.detach_net(net)
    assert not own.states[0].requires_grad
    functional.reset_net(net)
    assert own.states is None and net[3].states is None
    set_backend(net, "torch")
    assert [m.backend for m in net[2:]] == ["torch"] * 2
    torch.testing.assert_close(net(x), want)
    set_backend(net, "cupy")
    assert own.backend == "torch"
    functional.reset_net(net)
    functional.set_step_mode(net, "s")
    torch.testing.assert_close(torch.stack([net(row) for row in x]), want)
    functional.reset_net(net)
    torch.testing.assert_close(functional.multi_step_forward(x, net), want)
    functional.set_step_mode(net[2:], "x")
    with pytest.raises(flexsn.errors.ArgumentError, match='step_mode must be "m"'):
        net[2:](x)
