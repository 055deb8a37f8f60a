"""`flexsn.convert` on recurrent layers of SpikingJelly, snnTorch and Norse: the spikes of their own loops in float64, and their gradients."""

import copy
import pickle
import warnings

import pytest
import torch
from conversions import B, T, each
from loaded_peers import functional, layer, neuron, norse, snn, snn_surrogate, snn_utils, surrogate
from torch import nn
from torch.nn.utils import parametrize

import flexsn
from flexsn.errors import FallbackWarning, InterchangeError, StateMismatchError

f64 = torch.float64
above = flexsn.surrogate.atan(inclusive=False)  # snnTorch's own give float32 spikes, which its recurrent weights refuse in float64


@pytest.fixture(autouse=True)
def _double():
    """Peers make states of the default dtype; and what falls back to the eager loop fails."""
    torch.manual_seed(0)
    torch.set_default_dtype(f64)
    snn.SpikingNeuron.instances.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield
    snn.SpikingNeuron.instances.clear()
    torch.set_default_dtype(torch.float32)


def twins(make):
    """A layer, and the same."""
    ref, net = make(), make()
    net.load_state_dict(ref.state_dict())
    return ref, net


def assert_same(net, ref, run, run_ref, *shape, gain=2.0):
    """Equal spikes; gradients of the input and of every parameter, under the same names, to rounding."""
    x = (gain * torch.randn(T, B, *shape)).requires_grad_()
    same = x.detach().clone().requires_grad_()
    got, want = run(net, x), run_ref(ref, same)
    assert torch.equal(got, want) and want.any() and not want.all()
    ours, theirs = dict(net.named_parameters()), dict(ref.named_parameters())
    assert [n.removeprefix("core.") for n in ours] == list(theirs)
    cotangent = torch.randn_like(want)
    grads = torch.autograd.grad(got, [x, *ours.values()], cotangent, retain_graph=True)
    wanted = torch.autograd.grad(want, [same, *theirs.values()], cotangent)
    for g, w in zip(grads, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-10 * w.abs().max().item())
        assert w.any()


def whole(net, x):
    return net(x)


def stepped(net, x):
    return torch.stack([net(step) for step in x])


# --- snnTorch ---------------------------------------------------------------------------------------------------------------
def rleaky(**options):
    return snn.RLeaky(**{"beta": 0.9, "linear_features": 7, "spike_grad": above, "init_hidden": True, **options})


def rsynaptic(**options):
    return snn.RSynaptic(**{"alpha": 0.7, "beta": 0.9, "linear_features": 7, "spike_grad": above, "init_hidden": True, **options})


conv = {"linear_features": None, "conv2d_channels": 2, "kernel_size": 3}
SNN = {
    "rleaky": (lambda: rleaky(learn_beta=True), 7),
    "rleaky zero": (lambda: rleaky(reset_mechanism="zero", learn_threshold=True), 7),
    "rleaky at once": (lambda: rleaky(reset_mechanism="zero", reset_delay=False), 7),
    "rleaky conv": (lambda: rleaky(**conv), 2, 5, 5),
    "rleaky one to one": (lambda: rleaky(all_to_all=False, linear_features=None, V=torch.rand(7)), 7),
    "rleaky none": (lambda: rleaky(reset_mechanism="none", beta=0.3), 7),
    "rsynaptic": (lambda: rsynaptic(learn_alpha=True), 7),
    "rsynaptic zero": (lambda: rsynaptic(reset_mechanism="zero", learn_beta=True), 7),
    "rsynaptic conv": (lambda: rsynaptic(**conv), 2, 5, 5),
    "rsynaptic one to one": (lambda: rsynaptic(all_to_all=False, linear_features=None), 7),
    "slstm": (lambda: snn.SLSTM(7, 7, threshold=0.1, spike_grad=above, learn_threshold=True, init_hidden=True), 7),
    "slstm subtract": (lambda: snn.SLSTM(7, 7, bias=False, threshold=0.05, spike_grad=above, reset_mechanism="subtract", init_hidden=True), 7),
    "sconv2dlstm": (lambda: snn.SConv2dLSTM(2, 3, 3, threshold=0.05, spike_grad=above, init_hidden=True), 2, 5, 5),
    "sconv2dlstm zero": (lambda: snn.SConv2dLSTM(2, 2, (3, 5), bias=False, threshold=0.05, spike_grad=above, reset_mechanism="zero", init_hidden=True), 2, 5, 5),
}  # fmt: skip


@each(SNN, fused=["rleaky", "rsynaptic zero", "slstm"])
def test_snntorch_s_recurrent_neurons(name, backend):
    make, *shape = SNN[name]
    ref, old = twins(make)
    parameters = list(old.parameters())
    report = flexsn.convert(old, backend=backend, step_mode="m")
    net = report.model
    assert len(report.replaced) == 1 and not report.left and isinstance(net, type(ref))
    assert [id(p) for p in net.parameters()] == [id(p) for p in parameters]
    net.strict = backend == "cpp"
    assert_same(net, ref, whole, stepped, *shape)
    net.step_mode = "s"
    x = torch.randn(3, B, *shape)
    assert torch.equal(stepped(net, x), stepped(ref, x)), "the next calls go on from the first"
    snn_utils.reset(nn.Sequential(net)), snn_utils.reset(nn.Sequential(ref))
    assert torch.equal(stepped(net, x), stepped(ref, x)), "and anew after a reset"


def test_recurrent_weights_that_are_not_learned_stay_so():
    ref, old = twins(lambda: rleaky(learn_recurrent=False))
    net = flexsn.convert(old, backend="torch", step_mode="m").model
    assert not net.recurrent.weight.requires_grad and net.recurrent is old.recurrent
    x = 2.0 * torch.randn(T, B, 7)
    assert torch.equal(net(x), stepped(ref, x))


@pytest.mark.parametrize("name", ["rleaky", "rsynaptic", "slstm"])
def test_states_of_snntorch_s_recurrent_neurons_go_in_and_out(name):
    ref, old = twins(SNN[name][0])
    ref.init_hidden = old.init_hidden = False
    net = flexsn.convert(old, backend="torch").model
    states, same = [], []
    for step in 2.0 * torch.randn(T, B, 7):
        want, got = ref(step, *states), net(step, *same)
        assert len(got) == len(want) and torch.equal(got[0], want[0])
        torch.testing.assert_close(got, want)
        states, same = (list(v) if net.state_names[0] == "spk" else list(v[1:]) for v in (want, got))


def test_snntorch_s_recurrent_states_of_a_sequence():
    ref, old = twins(lambda: rsynaptic(init_hidden=False))
    net, x, states, seen = flexsn.convert(old, backend="torch", step_mode="m").model, 2.0 * torch.randn(T, B, 7), [], []
    for step in x:
        states = ref(step, *states)
        seen.append(states)
    torch.testing.assert_close(net(x, spk=torch.zeros(B, 7)), tuple(map(torch.stack, zip(*seen, strict=True))))


def test_snntorch_s_own_surrogates_and_state_dicts():
    """In float32, which they need; state dicts from before load, and the attributes are the ones that were."""
    torch.set_default_dtype(torch.float32)
    ref = snn.RLeaky(beta=0.9, linear_features=7, spike_grad=snn_surrogate.fast_sigmoid(5), init_hidden=True)
    net = flexsn.convert(snn.RLeaky(beta=0.8, linear_features=7, init_hidden=True), backend="torch", step_mode="m").model
    assert net.load_state_dict(ref.state_dict()).missing_keys == []
    net.spike_grad = ref.spike_grad
    x = torch.randn(T, B, 7)
    want = stepped(ref, x)
    assert torch.equal(net(x), want) and want.any()
    assert torch.equal(net.spk, ref.spk) and torch.equal(net.mem, ref.mem) and net.beta == 0.9
    with pytest.raises(InterchangeError, match="linear_features"):
        net.linear_features = 8


def quiet(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return make()


SNN_LEFT = [
    (lambda: snn.SLSTM(4, 7), "sets its states to zero at every step where input_size is not hidden_size"),
    (lambda: rsynaptic(reset_delay=False), "reset_delay=False"),
    (lambda: snn.SConv2dLSTM(2, 3, 3, max_pool=2), "pooling mixes"),
    (lambda: quiet(lambda: rleaky(inhibition=True)), "compares neurons"),
    (lambda: rleaky(state_quant=lambda v: v), "state_quant"),
    (lambda: rleaky(spike_grad=snn_surrogate.SSO()), "cannot be fused"),
    (lambda: type("Mine", (snn.RLeaky,), {})(beta=0.9, linear_features=7), "a subclass of RLeaky"),
]


@pytest.mark.parametrize(("make", "reason"), SNN_LEFT, ids=["sizes", "delay", "pooling", "inhibition", "quantised", "noise", "subclass"])
def test_what_recurrent_neurons_of_snntorch_are_left_alone(make, reason):
    torch.set_default_dtype(torch.float32)
    report = flexsn.convert(nn.Sequential(make()))
    assert not report.replaced and reason in report.left[0].outcome


# --- Norse ------------------------------------------------------------------------------------------------------------------
CELLS = ["LIFRecurrentCell", "LSNNRecurrentCell", "LIFExRecurrentCell", "LIFAdExRecurrentCell", "LIFRefracRecurrentCell"]
LAYERS = ["LIFRecurrent", "LSNNRecurrent", "LIFExRecurrent", "LIFAdExRecurrent", "LIFRefracRecurrent"]


def output(net, x):
    return net(x)[0]


def threaded(net, x):
    state, out = None, []
    for step in x:
        y, state = net(step, state)
        out.append(y)
    return torch.stack(out)


@each(LAYERS + CELLS, fused=["LIFRecurrent", "LSNNRecurrent"])
def test_norse_s_recurrent_neurons(name, backend):
    ref, old = twins(lambda: getattr(norse, name)(4, 7).double())
    parameters = list(old.parameters())
    report = flexsn.convert(old, backend=backend)
    net, run = report.model, threaded if name.endswith("Cell") else output
    assert len(report.replaced) == 1 and [id(p) for p in net.parameters()] == [id(p) for p in parameters]
    net.strict = backend == "cpp"
    assert_same(net, ref, run, run, 4, gain=30.0)


def test_norse_s_recurrent_states_go_in_and_out():
    ref, old = twins(lambda: norse.LSNNRecurrent(4, 7, record_states=True).double())
    net = flexsn.convert(old, backend="torch").model
    x = 30.0 * torch.randn(2, T, B, 4)
    (_, states), (_, want) = net(x[0]), ref(x[0])
    assert type(states) is type(want) and all(torch.equal(a, b) for a, b in zip(states, want, strict=True))
    last = type(want)(*[v[-1] for v in want])
    assert torch.equal(net(x[1], last)[0], ref(x[1], last)[0])


def test_no_gradient_reaches_norse_s_autapses():
    """As there, by a hook on the weights."""
    net = flexsn.convert(norse.LIFRecurrent(4, 7).double(), backend="torch").model
    net(30.0 * torch.randn(T, B, 4))[0].sum().backward()
    grad = net.recurrent_weights.grad
    assert grad.any() and not grad.diagonal().any()


def test_a_lifted_recurrent_cell_takes_whole_sequences():
    cell = norse.LIFRecurrentCell(4, 7).double()
    ref, net = nn.Sequential(norse.Lift(cell)), nn.Sequential(norse.Lift(cell))
    report = flexsn.convert(net, backend="torch")
    assert "whole sequences" in report.replaced[0].outcome
    x = 30.0 * torch.randn(T, B, 4)
    want = ref(x)[0]
    assert torch.equal(net(x)[0], want) and want.any()


def test_what_recurrent_neurons_of_norse_are_left_alone():
    assert "cannot be fused" in flexsn.convert(norse.LSNNRecurrent(4, 7, adjoint=True)).left[0].outcome
    assert "a forward of its own" in flexsn.convert(norse.LIFMCRecurrentCell(4, 7)).left[0].outcome


# --- SpikingJelly -----------------------------------------------------------------------------------------------------------
Linear, ElementWise = layer.LinearRecurrentContainer, layer.ElementWiseRecurrentContainer


def in_layers(*linears, **options):
    return Linear(nn.Sequential(*linears, neuron.ParametricLIFNode(v_threshold=0.3, surrogate_function=surrogate.ATan())), 5, 7, **options)


JELLY = {
    "linear": lambda: Linear(neuron.LIFNode(v_reset=-0.1), 5, 5),
    "linear two states": lambda: Linear(neuron.CUBALIFNode(), 5, 5, bias=False),
    "linear in a layer": lambda: in_layers(nn.Linear(5, 7)),
    "linear in two layers": lambda: in_layers(layer.Linear(5, 4), nn.Linear(4, 7, bias=False), bias=False),
    "element-wise": lambda: ElementWise(neuron.IFNode(v_reset=None), lambda y, x: x - 0.5 * y),
    "element-wise plif": lambda: ElementWise(neuron.ParametricLIFNode(), torch.add),
}


@each(JELLY, fused=["linear", "linear in a layer", "element-wise"])
def test_spikingjelly_s_recurrent_containers(name, backend):
    ref, old = twins(JELLY[name])
    parameters = list(old.parameters())
    functional.set_step_mode(ref, "m"), functional.set_step_mode(old, "m")
    report = flexsn.convert(old, backend=backend)
    net = report.model
    assert len(report.replaced) == 1 and "whole sequences" in report.replaced[0].outcome
    assert [id(p) for p in net.parameters()] == [id(p) for p in parameters]
    net.strict = backend == "cpp"
    assert_same(net, ref, whole, whole, 5, gain=6.0)
    functional.set_step_mode(net, "s"), functional.set_step_mode(ref, "s")
    x = 6.0 * torch.randn(3, B, 5)
    assert torch.equal(stepped(net, x), stepped(ref, x)), "the next calls go on from the first"
    functional.reset_net(net), functional.reset_net(ref)
    assert torch.equal(stepped(net, x), stepped(ref, x)) and torch.equal(net.y, ref.y), "and anew after a reset"


def test_a_container_is_copied_written_to_and_loaded():
    ref = JELLY["linear in a layer"]()
    net = flexsn.convert(nn.Sequential(JELLY["linear in a layer"]()), backend="torch", step_mode="m").model
    assert net.load_state_dict({f"0.{k}": v for k, v in ref.state_dict().items()}).missing_keys == []
    assert net[0].sub_module[1].v_threshold == 0.3 and net[0].rc.weight.shape == (5, 12)
    ref.sub_module[1].v_threshold = net[0].sub_module[1].v_threshold = 0.2
    ref.step_mode, x = "m", 6.0 * torch.randn(T, B, 5)
    want = ref(x)
    for made in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), net):
        assert torch.equal(made(x), want) and want.any()
    with pytest.raises(StateMismatchError):  # a ValueError in SpikingJelly
        net(x[:, :1])


def test_a_container_is_converted_in_the_middle_of_a_sequence():
    ref = JELLY["linear"]()
    x = 6.0 * torch.randn(2, T, B, 5)
    with torch.no_grad():
        stepped(ref, x[0])
    net = flexsn.convert(copy.deepcopy(ref), backend="torch", step_mode="m").model
    assert torch.equal(net(x[1]), stepped(ref, x[1]))


def storing():
    return neuron.LIFNode(store_v_seq=True)


def halved():
    made = JELLY["linear"]()
    parametrize.register_parametrization(made.rc, "weight", nn.Identity())
    return made


def hooked():
    made = JELLY["linear"]()
    made.rc.register_forward_hook(lambda *_: None)
    return made


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: Linear(nn.Sequential(nn.Linear(5, 5), neuron.IFNode(), nn.Linear(5, 5)), 5, 5),
            "something else than linear layers and a node",
        ),
        (lambda: ElementWise(nn.Sequential(nn.Linear(5, 5), neuron.IFNode()), torch.add), "something else than a node"),
        (lambda: Linear(storing(), 5, 5), "stores `v_seq`"),
        (halved, "has parametrizations"),
        (hooked, "has hooks"),
        (lambda: ElementWise(neuron.IFNode(), lambda y, x: x + y.mean()), "`mean` is not elementwise"),
        (lambda: type("Mine", (Linear,), {})(neuron.IFNode(), 5, 5), "a subclass of a container"),
    ],
    ids=["layers after", "mixing", "v_seq", "parametrized", "hooks", "no element-wise function", "subclass"],
)
def test_what_containers_are_left_alone(make, reason):
    """What they hold is looked at by itself."""
    report = flexsn.convert(nn.Sequential(make()))
    assert reason in report.left[0].outcome and len(report.replaced) == 1
