"""`flexsn.convert` on SpikingJelly's neurons, and what holds for all: the same spikes and gradients, called as they were."""

import copy
import pickle

import pytest
import torch
from conversions import B, T, assert_same, each, jelly, looped, whole
from loaded_peers import base, functional, layer, neuron, norse, snn, surrogate
from torch import nn
from torch.nn.utils import parametrize

import flexsn
from flexsn.errors import InterchangeError
from flexsn.interchange import peer_spikingjelly

# --- SpikingJelly ---------------------------------------------------------------------------------------------------------
NODES = {
    "if": lambda: neuron.IFNode(),
    "if soft": lambda: neuron.IFNode(v_reset=None, surrogate_function=surrogate.ATan()),
    "lif": lambda: neuron.LIFNode(tau=3.0, surrogate_function=surrogate.ATan(alpha=3.0)),
    "lif reset -0.2": lambda: neuron.LIFNode(v_reset=-0.2, decay_input=False, surrogate_function=surrogate.PiecewiseQuadratic(0.5)),
    "lif detached": lambda: neuron.LIFNode(v_reset=None, detach_reset=True, surrogate_function=surrogate.Erf()),
    "plif": lambda: neuron.ParametricLIFNode(init_tau=3.0, decay_input=False),
    "klif": lambda: neuron.KLIFNode(),
    "klif scaled": lambda: neuron.KLIFNode(scale_reset=True, v_reset=None),
    "qif": lambda: neuron.QIFNode(),
    "eif": lambda: neuron.EIFNode(),
    "izhikevich": lambda: neuron.IzhikevichNode(a=0.5, b=0.1),
    "cuba": lambda: neuron.CUBALIFNode(),
    "raf": lambda: neuron.RAFNode(),
    "clif": lambda: neuron.ComplementaryLIFNode(),
}


@each(NODES, fused=["lif reset -0.2", "klif scaled"])
def test_spikingjelly_nodes(name, backend):
    ref = jelly(NODES[name]())
    net = copy.deepcopy(ref)
    weights = dict(net.named_parameters())
    report = flexsn.convert(net, backend=backend)
    assert isinstance(net[1], flexsn.FlexSN) and [e.place for e in report.replaced] == ["1"] and not report.left
    assert [id(p) for p in net.parameters()] == [id(p) for p in weights.values()]
    assert_same(net, ref, whole)
    functional.reset_net(net), functional.reset_net(ref)
    functional.set_step_mode(net, "s"), functional.set_step_mode(ref, "s")
    assert torch.equal(looped(net, torch.ones(3, B, 4)), looped(ref, torch.ones(3, B, 4)))


@pytest.mark.parametrize("inplane", [None, 3])
def test_gated_lif(inplane):
    """A conductance per step; the spike of the last step is not carried over, the membrane is."""
    ref = neuron.GatedLIFNode(T=5, inplane=inplane, surrogate_function=surrogate.ATan())
    net = copy.deepcopy(ref)
    report = flexsn.convert(net, backend="torch")
    x = (2.0 * torch.rand(5, B, 3, 2, 2)).requires_grad_()
    got, want = ([m(x), m(0.5 * x)] for m in (report.model, ref))
    assert all(torch.equal(a, b) and a.any() for a, b in zip(got, want, strict=True))
    grads, wanted = (torch.autograd.grad(ys[1].sum(), [x, *m.parameters()]) for ys, m in ((got, report.model), (want, ref)))
    for g, w in zip(grads, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
        assert w.any()


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize(("inplane", "shapes"), [(None, [(4, 8)] * 3), (3, [(2, 1, 4, 4)] * 2), (3, [(1, 3, 2, 2), (B, 3, 2, 2)])])
def test_gated_lif_broadcasts_as_in_spikingjelly(inplane, shapes, backend):
    """Few dims gain those of the gates, and the membrane is carried all the same; `u` is `v`."""
    ref = neuron.GatedLIFNode(T=20, inplane=inplane)
    net = flexsn.convert(copy.deepcopy(ref), backend=backend).model
    for shape in shapes:
        x = 3.0 * torch.randn(20, *shape)
        got, want = net(x), ref(x)
        assert torch.equal(got, want) and want.any()
        torch.testing.assert_close((net.v, net.u), (ref.v, ref.u))


def test_every_known_node_is_tested():
    assert {type(make()) for make in NODES.values()} | {neuron.GatedLIFNode} == set(peer_spikingjelly.CORES)


def test_states_are_carried_reset_and_detached_as_in_spikingjelly():
    ref = jelly(neuron.LIFNode(v_reset=-0.1, store_v_seq=True))
    net = copy.deepcopy(ref)
    flexsn.convert(net, backend="torch")
    assert net[1].v == -0.1 and net[1].v_seq is None and net[1].store_v_seq
    x = torch.randn(T, B, 4)
    for piece in (x[:4], x[4:], x[:, :1]):  # the last has another batch: both start anew
        assert torch.equal(net(piece), ref(piece))
        assert torch.equal(net[1].v, ref[1].v) and torch.equal(net[1].v_seq, ref[1].v_seq)
    assert net[1].v.requires_grad
    functional.detach_net(net)
    assert not net[1].v.requires_grad
    functional.reset_net(net)
    assert net[1].v == -0.1 and net[1].v_seq is None


@pytest.mark.parametrize("make", [neuron.IFNode, lambda: neuron.GatedLIFNode(T=T)], ids=["if", "gated"])
@torch.no_grad()
def test_states_are_carried_under_torch_compile(make):
    torch._dynamo.reset()
    ref = make()
    ref.step_mode = "m"
    net = flexsn.convert(copy.deepcopy(ref), backend="cpp").model
    fast = torch.compile(net, backend="eager", fullgraph=True)
    x = 3.0 * torch.randn(T, B, 3, 2, 2)
    for _ in range(3):
        assert torch.equal(fast(x), ref(x)) and torch.equal(net.v, ref.v)


def test_single_steps_add_to_v_seq():
    ref = jelly(neuron.IFNode(store_v_seq=True), "s")
    net = copy.deepcopy(ref)
    flexsn.convert(net, backend="torch")
    for x in torch.randn(3, B, 4):
        net(x), ref(x)
    assert ref[1].v_seq.shape == (3, B, 7) and torch.equal(net[1].v_seq, ref[1].v_seq)


def test_a_conversion_in_the_middle_of_a_sequence_goes_on():
    ref = jelly(neuron.IzhikevichNode(a=0.5, b=0.1))
    x = torch.randn(T, B, 4)
    ref(x)
    functional.detach_net(ref)
    net = copy.deepcopy(ref)
    flexsn.convert(net, backend="torch")
    assert torch.equal(net(x), ref(x))


def test_the_reset_cache_of_spikingjelly_knows_the_new_neurons():
    net = jelly(neuron.IFNode())
    old = net[1]  # keeps the old node alive, so the cache stays valid
    functional.reset_net(net)
    flexsn.convert(net, backend="torch")
    net(torch.ones(T, B, 4))
    functional.reset_net(net)
    assert net[1].states is None and old is not net[1]


class Doubled(neuron.BaseNode):
    """A user's own step."""

    def single_step_functional_forward(self, inputs, states, **kwargs):
        h = states[0] + (2.0 * inputs[0] - states[0]) / 3.0
        spike = self.surrogate_function(h - self.v_threshold)
        return (spike,), (h * (1.0 - spike),)


class Renamed(neuron.LIFNode):
    def __init__(self):
        super().__init__(tau=5.0)


class Ignored(neuron.IFNode):
    def single_step_functional_forward(self, inputs, states, **kwargs):
        return inputs, states


class Noisy(neuron.BaseNode):
    def single_step_functional_forward(self, inputs, states, **kwargs):
        return (inputs[0] + torch.rand_like(inputs[0]),), states


class Widened(neuron.IFNode):
    def multi_step_forward(self, x_seq, *args, **kwargs):
        return super().multi_step_forward(2 * x_seq)


@pytest.mark.parametrize("make", [Doubled, Renamed])
def test_subclasses_of_nodes(make):
    ref = jelly(make())
    net = copy.deepcopy(ref)
    assert len(flexsn.convert(net, backend="torch").replaced) == 1
    x = 5.0 * torch.randn(T, B, 4)
    want = ref(x)
    assert torch.equal(net(x), want) and want.any()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Ignored, "SpikingJelly runs the step of IFNode"),
        (Noisy, "random numbers"),
        (Widened, "multi_step_forward"),
        (lambda: neuron.IFNode(surrogate_function=surrogate.PoissonPass()), "random numbers"),
        (lambda: neuron.PSN(T=T), "mixes time steps"),
        (lambda: neuron.MaskedPSN(k=2, T=T), "mixes time steps"),
        (lambda: neuron.SlidingPSN(k=2), "mixes time steps"),
        (lambda: neuron.NonSpikingIFNode(), "not among"),
    ],
    ids=["ignored", "noise", "own forward", "surrogate", "psn", "masked psn", "sliding psn", "no spikes"],
)
def test_what_spikingjelly_neurons_are_left_alone(make, reason):
    net = nn.Sequential(layer.Linear(4, 7), make())
    before = net[1]
    report = flexsn.convert(net)
    assert net[1] is before and reason in str(report.left[0]) and reason in str(report)


def test_hooks_are_not_lost():
    net = jelly(neuron.IFNode())
    net[1].register_forward_hook(lambda *_: None)
    report = flexsn.convert(net)
    assert type(net[1]) is neuron.IFNode and "hooks" in report.left[0].outcome


def tripled(forward):
    return lambda x, *state: forward(3.0 * x, *state)


OWN = {  # a neuron, the method that is set on the instance, and how a sequence is run
    "spikingjelly": (lambda: neuron.LIFNode(step_mode="m"), "forward", whole),
    "its step": (lambda: neuron.LIFNode(step_mode="m"), "multi_step_forward", whole),
    "snntorch": (lambda: snn.Leaky(beta=0.9, init_hidden=True), "forward", looped),
    "norse": (norse.LIF, "forward", lambda net, x: net(x)[0]),
    "norse cell": (lambda: norse.Lift(norse.LIFCell()), "lifted_module.forward", lambda net, x: net(x)[0]),
}


@pytest.mark.parametrize("name", OWN)
def test_methods_of_an_instance_are_not_lost(name):
    make, path, run = OWN[name]
    net, plain, x = nn.Sequential(make()), nn.Sequential(make()), torch.rand(T, B, 4)
    holder = net.get_submodule(".".join(["0", *path.split(".")[:-1]]))
    method = path.split(".")[-1]
    setattr(holder, method, tripled(getattr(holder, method)))
    before, kind = net[0], type(net[0])
    report = flexsn.convert(net)
    assert net[0] is before and type(net[0]) is kind and not report.replaced
    assert f"has a `{method}` of its own on the instance, which would be lost" in report.left[0].outcome
    assert not torch.equal(run(net, x), run(plain, x))


def test_hooks_of_a_lifted_cell_are_not_lost():
    net = norse.SequentialState(norse.Lift(norse.LIFCell()))
    net[0].lifted_module.register_forward_hook(lambda *_: None)
    report = flexsn.convert(net)
    assert not report.replaced and all("hooks" in entry.outcome for entry in report.left)


class Halved(nn.Module):
    def forward(self, w):
        return 0.5 * w


@pytest.mark.parametrize(
    ("make", "name"), [(neuron.ParametricLIFNode, "w"), (lambda: snn.Leaky(beta=0.9, learn_beta=True), "beta")], ids=["sj", "snn"]
)
def test_parametrized_neurons_are_left_alone(make, name):
    old = make()
    parametrize.register_parametrization(old, name, Halved())
    report = flexsn.convert(nn.Sequential(old))
    assert "has parametrizations; take them off, and register them on its `core`" in report.left[0].outcome
    parametrize.remove_parametrizations(old, name)
    net = flexsn.convert(old, backend="torch").model
    before = getattr(net, name).detach().clone()
    parametrize.register_parametrization(net.core, name, Halved())
    assert torch.equal(getattr(net, name), 0.5 * before)


def test_dropout_of_spikingjelly_is_no_neuron():
    net = nn.Sequential(layer.Linear(4, 7), layer.Dropout(0.5), neuron.IFNode(), layer.Dropout2d(0.5))
    assert str(flexsn.convert(net)).startswith("converted 1 of 1 neurons") and isinstance(net[1], layer.Dropout)
    with pytest.raises(InterchangeError, match=r"`1` \(Dropout\) stays as it is, and takes single steps"):
        flexsn.convert(nn.Sequential(neuron.IFNode(), layer.Dropout(0.5)), step_mode="m")
    with pytest.raises(TypeError, match="holds no neuron"):
        flexsn.convert(layer.Dropout(0.5))


def test_a_node_within_a_container_keeps_its_mode():
    torch.manual_seed(1)
    ref = layer.LinearRecurrentContainer(nn.Sequential(neuron.LIFNode(), nn.Linear(4, 4)), 4, 4, step_mode="m")
    net = copy.deepcopy(ref)
    report = flexsn.convert(net, backend="torch")
    assert [e.before for e in report.replaced] == ["LIFNode"] and [e.before for e in report.left] == ["LinearRecurrentContainer"]
    x = 30.0 * torch.rand(T, B, 4)
    want = ref(x)
    assert torch.equal(net(x), want) and want.any()


# --- SpikingJelly's functions on flexsn's neurons ---------------------------------------------------------------------------
def test_flexsn_neurons_in_a_spikingjelly_network():
    net = nn.Sequential(layer.Linear(4, 7), flexsn.LIF(backend="cpp"), layer.Linear(7, 5), neuron.LIFNode())
    functional.set_step_mode(net, "m")
    x = 3.0 * torch.randn(T, B, 4)
    want = net(x)
    assert net[1].step_mode == "m" and want.shape == (T, B, 5) and net[1].states[0].requires_grad
    functional.detach_net(net)
    assert not net[1].states[0].requires_grad and not net[3].v.requires_grad
    functional.reset_net(net)
    assert net[1].states is None
    functional.set_step_mode(net, "s")
    assert torch.equal(looped(net, x), want) and net[1].step_mode == "s"


def test_layers_over_time_of_spikingjelly_take_flexsn_neurons():
    inner = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    net = nn.Sequential(layer.SeqToANNContainer(inner), flexsn.IF(backend="torch"), layer.Flatten(step_mode="m"), layer.Linear(3 * 36, 5))
    x = torch.rand(T, B, 2, 8, 8)
    assert net(x).shape == (T, B, 5)
    assert base.extract_memories(net) == []
    functional.reset_net(net)
    assert net[1].states is None


# --- all of them --------------------------------------------------------------------------------------------------------------
def test_a_neuron_by_itself_and_a_shared_one():
    node = neuron.LIFNode(step_mode="m")
    assert isinstance(flexsn.convert(node).model, flexsn.FlexSN)
    shared = nn.ModuleList([node, nn.Sequential(node), node])
    report = flexsn.convert(shared)
    assert shared[0] is shared[1][0] is shared[2] and isinstance(shared[0], flexsn.FlexSN) and len(report.replaced) == 1
    assert flexsn.convert(nn.Sequential(neuron.IFNode(), *shared)).replaced[0].before == "IFNode"


def test_models_without_neurons_are_refused():
    with pytest.raises(TypeError, match="spikingjelly, snntorch, norse"):
        flexsn.convert(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="step_mode"):
        flexsn.convert(neuron.IFNode(), step_mode="x")


@pytest.mark.parametrize("make", [lambda: neuron.ParametricLIFNode(), lambda: snn.Leaky(beta=0.7, learn_beta=True, init_hidden=True)])
def test_state_dicts_from_before_load(make):
    old, net = nn.Sequential(make()), nn.Sequential(make())
    with torch.no_grad():
        for parameter in old.parameters():
            parameter.fill_(0.3)
    flexsn.convert(net)
    assert net.load_state_dict(old.state_dict()).missing_keys == []
    assert [p.item() for p in net.parameters()] == [pytest.approx(0.3)]
    assert net.load_state_dict(net.state_dict()).missing_keys == []


@pytest.mark.parametrize("make", [lambda: neuron.LIFNode(step_mode="m"), lambda: snn.Leaky(beta=0.7, init_hidden=True)], ids=["sj", "snn"])
def test_converted_neurons_are_copied_and_pickled(make):
    net = flexsn.convert(make(), backend="torch", step_mode="m").model
    x = 30.0 * torch.rand(T, B, 4)
    want, copied = net(x), copy.deepcopy(net)
    net.reset(), copied.reset()
    loaded = pickle.loads(pickle.dumps(net))
    for other in (copied, loaded):
        assert torch.equal(other(x), want) and want.any()


def test_training_goes_on_with_the_same_optimizer():
    net = jelly(neuron.ParametricLIFNode())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    flexsn.convert(net, backend="cpp")
    before = [p.detach().clone() for p in net.parameters()]
    net(torch.randn(T, B, 4)).sum().backward()
    optimizer.step()
    assert all(not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
