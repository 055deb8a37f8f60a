"""`flexsn.convert` on steps that users of SpikingJelly write: its FlexSN, subclasses of SimpleBaseNode and of BaseNode."""

import copy

import pytest
import torch
from conversions import B, T, assert_same, jelly, looped, whole
from loaded_peers import functional, neuron, surrogate
from torch import nn

import flexsn

BACKENDS = pytest.mark.parametrize("backend", ["torch", "cpp"])
spike = flexsn.surrogate.atan


# --- its FlexSN -------------------------------------------------------------------------------------------------------------
def lif(x, v):
    h = v + (x - v) / 2.0
    s = spike(h - 1.0)
    return s, h * (1.0 - s)


def adaptive(x, y, v, a, tau, threshold):
    h = v + (x + 0.5 * y - v) / tau
    s = spike(h - threshold - a)
    return s, h, h * (1.0 - s), 0.9 * a + s


@BACKENDS
def test_a_flexsn_of_spikingjelly_becomes_one_of_ours(backend):
    ref = neuron.FlexSN(lif, num_states=1, store_state_seqs=True)
    net = copy.deepcopy(ref)
    report = flexsn.convert(net, backend=backend)
    made = report.model
    assert [e.before for e in report.replaced] == ["FlexSN"] and isinstance(made, flexsn.FlexSN) and not report.left
    counts = made.num_inputs, made.num_states, made.num_outputs, made.num_params
    assert made.core is lif and counts == (1, 1, 1, 0) and (made.step_mode, made.store_state_seqs, made.backend) == ("m", True, backend)
    x = (3.0 * torch.rand(T, B, 4)).requires_grad_()
    for _ in range(2):  # the second call goes on from the first
        (got, want), grads = (made(x), ref(x)), []
        assert torch.equal(got, want) and want.any() and torch.equal(made.states[0], ref.states[0])
        assert torch.equal(made.state_seqs[0], ref.state_seqs[0])
        grads = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (got, want)]
        torch.testing.assert_close(*grads)
    functional.detach_net(made)
    assert not made.states[0].requires_grad
    functional.reset_net(made)
    assert made.states is None
    functional.set_step_mode(made, "s"), functional.set_step_mode(ref, "s"), ref.reset()
    assert torch.equal(looped(made, x), looped(ref, x))


@BACKENDS
def test_static_inputs_stay_the_same_parameters(backend):
    torch.manual_seed(0)
    tau, threshold = nn.Parameter(torch.rand(B, 4) + 1.5), torch.tensor(0.7)
    ref = neuron.FlexSN(adaptive, num_states=2, static_inputs=(tau, threshold))
    old = copy.deepcopy(ref.state_dict())
    made = flexsn.convert(copy.copy(ref), backend=backend).model
    assert (made.num_inputs, made.num_states, made.num_outputs, made.num_params) == (2, 2, 2, 2)
    assert [id(p) for p in made.parameters()] == [id(tau)] and [n for n, _ in made.named_buffers()] == ["params.threshold"]
    assert made.static_inputs[0] is tau and torch.equal(made.static_inputs[1], threshold)
    x, y = torch.rand(2, T, B, 4).mul(2.0).requires_grad_().unbind()
    got, want = made(x, y), ref(x, y)
    assert len(got) == 2 and all(torch.equal(a, b) for a, b in zip(got, want, strict=True)) and want[0].any()
    for g, w in zip(*(torch.autograd.grad(o[0].sum() + o[1].square().sum(), (x, y, tau)) for o in (got, want)), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        tau.zero_()
    assert made.load_state_dict(old).missing_keys == [] and torch.equal(tau, old["_static_input_0"])
    assert made.load_state_dict(made.state_dict()).missing_keys == []


def test_carried_states_of_a_flexsn_go_over():
    ref, x = neuron.FlexSN(lif, num_states=1, step_mode="s"), 3.0 * torch.rand(T, B, 4)
    ref(x[0])
    made = flexsn.convert(copy.deepcopy(ref), backend="torch", step_mode="m").model
    want = looped(ref, x[1:])
    assert torch.equal(made(x[1:]), want) and want.any()


class FromHalf(neuron.FlexSN):
    @staticmethod
    def init_states(num_states, step_mode, *inputs):
        return tuple(torch.full_like(inputs[0] if step_mode == "s" else inputs[0][0], 0.5) for _ in range(num_states))


def mixed(x, v):
    return x - v.mean(), v


def test_what_flexsns_are_left_alone():
    for node, reason in (
        (FromHalf(lif, num_states=1), "defines init_states"),
        (neuron.FlexSN(mixed, num_states=1), "`mean` is not elementwise"),
    ):
        net = nn.Sequential(node)
        report = flexsn.convert(net)
        assert net[0] is node and reason in report.left[0].outcome


# --- subclasses of SimpleBaseNode: the charge, fire and reset of the tutorial --------------------------------------------------
class Charge(neuron.SimpleBaseNode):
    def __init__(self, **options):
        super().__init__(**options)
        self.w = nn.Parameter(torch.tensor(0.3))

    def neuronal_charge(self, x):
        self.v = self.v + (x - self.v) * self.w.sigmoid()


class Adapting(neuron.SimpleBaseNode):
    """Everything of its own: a second memory, a helper, a threshold that moves."""

    def __init__(self, **options):
        super().__init__(v_threshold=0.8, **options)
        self.register_memory("a", 0.25)
        self.gain = nn.Parameter(torch.rand(7) + 1.0)

    def drive(self, x):
        return self.gain * x

    def neuronal_charge(self, x):
        self.v = 0.7 * self.v + self.drive(x)

    def neuronal_fire(self):
        return self.surrogate_function(self.v - self.v_threshold - self.a)

    def neuronal_reset(self, spike):
        super().neuronal_reset(spike)
        self.a = 0.9 * self.a + 0.2 * spike.detach()


class ResetFirst(Charge):
    """Another order of the three."""

    def single_step_forward(self, x):
        self.v = self.v + torch.zeros_like(x)
        spike = self.neuronal_fire()
        self.neuronal_reset(spike)
        self.neuronal_charge(x)
        return spike


SIMPLE = {
    "charge": Charge,
    "soft reset": lambda: Charge(v_reset=None, surrogate_function=surrogate.ATan()),
    "reset -0.2, detached": lambda: Charge(v_reset=-0.2, detach_reset=True),
    "everything": Adapting,
    "another order": ResetFirst,
    "SimpleIFNode": neuron.SimpleIFNode,
    "SimpleLIFNode": lambda: neuron.SimpleLIFNode(tau=3.0, decay_input=False),
}


@BACKENDS
@pytest.mark.parametrize("name", SIMPLE)
def test_subclasses_of_simple_nodes(name, backend):
    torch.manual_seed(0)
    ref = jelly(SIMPLE[name]())
    net = copy.deepcopy(ref)
    report = flexsn.convert(net, backend=backend)
    assert isinstance(net[1], flexsn.FlexSN) and not report.left
    assert [n.replace("core.node.", "") for n, _ in net.named_parameters()] == [n for n, _ in ref.named_parameters()]
    assert_equal(net, ref, whole)
    functional.reset_net(net), functional.reset_net(ref)
    functional.set_step_mode(net, "s"), functional.set_step_mode(ref, "s")
    assert_equal(net, ref, looped)


def assert_equal(net, ref, run):
    """Two sequences, the second from the states that the first left: spikes, states and gradients of all parameters."""
    x = [(3.0 * torch.rand(T, B, 4)).requires_grad_() for _ in range(2)]
    got, want = ([run(m, piece) for piece in x] for m in (net, ref))
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True)) and want[1].any() and not want[1].all()
    assert all(torch.equal(getattr(net[1], n), v) for n, v in ref[1].named_memories())
    grads, wanted = (
        torch.autograd.grad(sum(y.mul(y + 1.0).sum() for y in ys), [*x, *m.parameters()]) for ys, m in ((got, net), (want, ref))
    )
    for g, w in zip(grads, wanted, strict=True):
        assert w.any()
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4 * w.abs().max().item())


def test_a_simple_node_keeps_its_attributes_and_leaves_the_old_one_as_it_was():
    ref = Adapting(step_mode="m")
    x = torch.rand(T, B, 7)
    ref(x)
    functional.detach_net(ref)
    before = {n: v.clone() for n, v in ref.named_memories()}
    net = flexsn.convert(ref, backend="torch").model
    assert torch.equal(net.v, before["v"]) and torch.equal(net.a, before["a"]) and net.v_threshold == 0.8
    assert net.gain is ref.gain and net(x).any()
    assert all(torch.equal(v, before[n]) for n, v in ref.named_memories())
    net.reset()
    assert (net.v, net.a) == (0.0, 0.25)
    twin = Adapting(step_mode="m")
    twin.load_state_dict(ref.state_dict())
    for node in (net, twin):
        node.v_threshold, node.a = 0.3, 0.1
    assert torch.equal(net(x), twin(x))
    assert net.load_state_dict(twin.state_dict()).missing_keys == []


@torch.no_grad()
def test_a_simple_node_runs_between_compiled_parts():
    torch._dynamo.reset()
    ref = jelly(Adapting())
    net = copy.deepcopy(ref)
    flexsn.convert(net, backend="cpp")
    fast, x = torch.compile(net, backend="eager"), 3.0 * torch.rand(T, B, 4)
    for _ in range(2):
        assert torch.equal(fast(x), ref(x)) and torch.equal(net[1].a, ref[1].a)


def test_states_of_a_simple_node_broadcast_as_pytorch_does():
    ref = Charge(step_mode="m")
    net = flexsn.convert(copy.deepcopy(ref), backend="torch").model
    for x in (torch.rand(T, 1, 4), torch.rand(T, B, 4)):
        assert torch.equal(net(x), ref(x)) and torch.equal(net.v, ref.v)
    with pytest.raises(RuntimeError, match="must match"):
        ref(torch.rand(T, 2, 4))
    with pytest.raises(flexsn.errors.ShapeMismatchError, match=r"need `reset\(\)` first"):
        net(torch.rand(T, 2, 4))


class Counting(Charge):
    def neuronal_charge(self, x):
        self.steps = getattr(self, "steps", 0) + 1
        super().neuronal_charge(x)


class Mixing(Charge):
    def neuronal_charge(self, x):
        self.v = self.v + x - x.mean()


class Remembering(Charge):
    u = 0.0

    def neuronal_charge(self, x):
        self.u = 0.5 * self.u + x
        self.v = self.v + self.u


class FromNothing(Charge):
    def __init__(self):
        super().__init__()
        self.register_memory("u", None)


class OtherSequences(Charge):
    def multi_step_forward(self, x_seq):
        return super().multi_step_forward(2.0 * x_seq)


class TwoInputs(Charge):
    def single_step_forward(self, x, y):
        return super().single_step_forward(x + y)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Counting, "steps` while it runs"),
        (Remembering, "u` while it runs"),
        (Mixing, "`mean` is not elementwise"),
        (FromNothing, "its memory `u` starts as NoneType"),
        (OtherSequences, "defines multi_step_forward; flexsn calls neuronal_charge, neuronal_fire, neuronal_reset by itself"),
        (TwoInputs, "its step takes several inputs"),
    ],
)  # fmt: skip
def test_what_simple_nodes_are_left_alone(make, reason):
    net = nn.Sequential(make())
    before = net[0]
    report = flexsn.convert(net)
    assert net[0] is before and reason in report.left[0].outcome


# --- subclasses of BaseNode ---------------------------------------------------------------------------------------------------
class Helped(neuron.BaseNode):
    """A step that calls helpers, under the names of the tutorial's equations."""

    def neuronal_charge(self, x, v):
        return v + (2.0 * x - v) / 3.0

    def neuronal_reset(self, h, spike):
        return h * (1.0 - spike) if self.v_reset is not None else h - spike

    def single_step_functional_forward(self, inputs, states, **kwargs):
        h = self.neuronal_charge(inputs[0], states[0])
        spike = self.surrogate_function(h - self.v_threshold)
        return (spike,), (self.neuronal_reset(h, spike),)


@BACKENDS
@pytest.mark.parametrize("v_reset", [0.0, None])
def test_a_step_that_calls_helpers(v_reset, backend):
    ref = jelly(Helped(v_reset=v_reset))
    net = copy.deepcopy(ref)
    assert len(flexsn.convert(net, backend=backend).replaced) == 1
    assert_same(net, ref, whole)


class Old(neuron.BaseNode):
    """As in SpikingJelly 0.0.0.14; 2.0 cannot run it."""

    def neuronal_charge(self, x):
        self.v = self.v + x


class OldLIF(neuron.LIFNode):
    def neuronal_charge(self, x):
        self.v = self.v + x


class OwnStart(Helped):
    def materialize_states(self, inputs, states, step_mode):
        return super().materialize_states(inputs, states, step_mode)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Old, "defines neuronal_charge, which SpikingJelly 2.0 does not call in a BaseNode: derive it from SimpleBaseNode, or define"),
        (OldLIF, "defines neuronal_charge, which SpikingJelly 2.0 does not call in a LIFNode"),
        (OwnStart, "defines materialize_states beside `single_step_functional_forward`"),
    ],
)
def test_what_nodes_are_left_alone(make, reason):
    net = nn.Sequential(make())
    before = net[0]
    report = flexsn.convert(net)
    assert net[0] is before and reason in report.left[0].outcome
