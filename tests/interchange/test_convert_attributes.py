"""What the attributes of a converted neuron are: those of the neuron that it was, read and written by the same names."""

import copy
import pickle

import pytest
import torch
from conversions import B, T, jelly
from loaded_peers import functional, layer, neuron, norse, snn, snn_surrogate, snn_utils, surrogate
from test_convert import NODES, Doubled
from torch import nn

import flexsn
from flexsn.errors import ArgumentError, InterchangeError
from flexsn.interchange.swap import Attribute


@pytest.fixture(autouse=True)
def _instances():
    """snnTorch keeps every neuron ever made in a list."""
    snn.SpikingNeuron.instances.clear()
    yield
    snn.SpikingNeuron.instances.clear()


def converted(ref, **options):
    """A copy of a neuron, converted."""
    return flexsn.convert(copy.deepcopy(ref), **({"backend": "torch"} | options)).model


def after(neuron_, x):
    """Outputs of a call and the gradient by its input."""
    leaf = x.clone().requires_grad_()
    y = neuron_(leaf)
    y = y[0] if isinstance(y, tuple) else y
    y.sum().backward()
    return y.detach(), leaf.grad


def assert_both_change(net, ref, change, x, grads_alone=False):
    """Before and after a change both do the same, and the change shows."""
    before = after(ref, x)
    assert torch.equal(after(net, x)[0], before[0])
    for n in (net, ref):
        (n.reset if hasattr(n, "reset") and callable(n.reset) else n.reset_mem)()
        change(n)
    (got, grad), (want, want_grad) = after(net, x), after(ref, x)
    assert torch.equal(got, want), f"{(got != want).double().mean():.1%} differ"
    torch.testing.assert_close(grad, want_grad, rtol=1e-4, atol=1e-5)
    assert not torch.equal(want_grad if grads_alone else want, before[1] if grads_alone else before[0]), "the change has no effect"


# --- SpikingJelly's constants ---------------------------------------------------------------------------------------------
CONSTANTS = [
    ("if", "v_threshold", 0.4), ("lif", "v_threshold", 0.4), ("lif", "tau", 1.5), ("lif", "decay_input", False),
    ("lif", "v_reset", -0.3), ("lif", "v_reset", None), ("klif", "k", nn.Parameter(torch.tensor(0.5))), ("qif", "a0", 2.0), ("eif", "theta_rh", 0.3),
    ("izhikevich", "tau_w", 1.5), ("cuba", "v_decay", 0.2), ("raf", "omega", 2.0), ("clif", "tau", 4.0), ("plif", "w", nn.Parameter(torch.tensor(2.0))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "attribute", "value"), CONSTANTS, ids=lambda v: v if isinstance(v, str) else None)
def test_constants_are_written_as_on_the_node(name, attribute, value):
    ref = NODES[name]()
    ref.step_mode = "m"
    assert_both_change(converted(ref), ref, lambda n: setattr(n, attribute, value), 3.0 * torch.randn(20, B, 4))


def test_constants_of_a_step_of_ones_own():
    ref = Doubled()
    ref.step_mode = "m"
    net = converted(ref)
    assert net.v_threshold == 1.0
    assert_both_change(net, ref, lambda n: setattr(n, "v_threshold", 0.2), torch.randn(T, B, 4))


@pytest.mark.parametrize(
    "change",
    [
        lambda n: setattr(n, "surrogate_function", surrogate.ATan(3.0)),
        lambda n: setattr(n.surrogate_function, "alpha", 1.5),
        lambda n: n.surrogate_function.set_spiking_mode(False),
        lambda n: setattr(n, "detach_reset", True),
    ],
    ids=["another", "its slope", "smooth", "detached reset"],
)
def test_the_surrogate_is_that_of_the_node(change):
    ref = neuron.LIFNode(step_mode="m", surrogate_function=surrogate.Sigmoid())  # the default is one object for all nodes
    assert_both_change(converted(ref), ref, change, 3.0 * torch.randn(T, B, 4), grads_alone=True)


def test_a_threshold_that_becomes_a_parameter_is_learned():
    net = converted(neuron.IFNode(step_mode="m"))
    net.v_threshold = nn.Parameter(torch.tensor(0.5))
    net(torch.randn(T, B, 4)).sum().backward()
    assert net.v_threshold.grad.abs() > 0 and dict(net.named_parameters()).keys() == {"core.v_threshold"}


@torch.no_grad()
def test_a_compiled_network_sees_what_is_written():
    torch._dynamo.reset()
    ref = neuron.LIFNode(step_mode="m")
    net = converted(ref, backend="cpp")
    fast, x = torch.compile(net, backend="eager"), torch.randn(T, B, 4)
    for value in (1.0, 0.2):
        for n in (net, ref):
            n.reset()
            n.v_threshold, n.v = value, 0.1
        assert torch.equal(fast(x), ref(x)) and torch.equal(net.v, ref.v)


@pytest.mark.parametrize("name", [*NODES, "gated"])
def test_every_attribute_of_a_node_is_read_and_written_or_refused(name):
    ref = neuron.GatedLIFNode(T=T) if name == "gated" else NODES[name]()
    net = converted(ref)
    values = vars(ref) | ref._parameters | ref._modules | ref._memories
    public = {n: v for n, v in values.items() if not n.startswith("_") and n not in vars(nn.Module())}
    assert {"v", "v_threshold", "surrogate_function"} <= public.keys()
    for attribute, value in public.items():
        assert attribute in ("surrogate_function", "w", "k") or torch.is_tensor(value) or getattr(net, attribute) == value, attribute
        if attribute in ("lava_s_cale", "w_rest", "T"):
            with pytest.raises(InterchangeError, match=f"`{attribute}` of a converted {type(ref).__name__} cannot be changed"):
                setattr(net, attribute, 3.0)
        elif isinstance(value, float):
            setattr(net, attribute, 0.625)
            assert getattr(net, attribute) == 0.625, attribute


def test_attributes_that_the_node_does_not_have():
    net, other = converted(neuron.IFNode()), converted(neuron.LIFNode(tau=3.0))
    assert other.tau == 3.0 and not hasattr(net, "tau") and not hasattr(net, "w")
    net.tau = "a note of the user's"
    assert net.tau == "a note of the user's" and other.tau == 3.0


# --- SpikingJelly's states ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["s", "m"])
@pytest.mark.parametrize(
    "value", [torch.full((B, 4), 0.9), 0.9, torch.full((B, 5), 0.9), torch.full((B, 4), 0.9, dtype=torch.float64)],
    ids=["tensor", "number", "of another shape", "of another dtype"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["lif", "izhikevich", "cuba"])
def test_states_are_written_as_on_the_node(name, value, mode):
    ref = NODES[name]()
    ref.step_mode, x = mode, 2.0 * torch.rand(B, 4) if mode == "s" else 2.0 * torch.rand(T, B, 4)
    net = converted(ref)
    for begin in (lambda: None, lambda: (net(x), ref(x))):  # before the first call, and between calls
        begin()
        net.v = ref.v = value
        assert torch.equal(net(x), ref(x))
        for state in ref._memories:
            assert torch.equal(getattr(net, state), getattr(ref, state)) and getattr(net, state).dtype == torch.float32
    functional.reset_net(net), functional.reset_net(ref)
    assert net.v == ref.v


def test_a_state_that_is_written_counts():
    net = converted(neuron.IFNode(step_mode="m"))
    net.v = 0.9
    assert net(torch.full((1, B, 4), 0.2)).all()
    net.reset()
    assert not net(torch.full((1, B, 4), 0.2)).any()


def test_no_step_keeps_the_states():
    net = converted(neuron.IFNode(step_mode="m"))
    net.v = 0.5
    assert net(torch.ones(0, B, 4)).shape == (0, B, 4) and torch.equal(net.v, torch.full((B, 4), 0.5))


def test_v_seq_starts_anew_with_another_shape():
    ref = neuron.IFNode(store_v_seq=True)
    net = converted(ref)
    for size in (3, 3, 2):
        x = torch.rand(size, 4)
        net(x), ref(x)
        assert torch.equal(net.v_seq, ref.v_seq)


def test_attributes_are_there_after_pickling():
    net = converted(neuron.LIFNode(tau=3.0))
    stored = pickle.dumps(net)
    lent = [n for n, v in vars(type(net)).items() if isinstance(v, Attribute)]
    for name in lent:  # as in a process that has converted nothing
        delattr(type(net), name)
    loaded = pickle.loads(stored)
    assert (loaded.tau, loaded.v) == (3.0, 0.0) and {"tau", "v", "v_threshold"} <= set(lent)


# --- snnTorch -------------------------------------------------------------------------------------------------------------
SNN = [
    (lambda: snn.Leaky(beta=0.9, init_hidden=True), "beta", torch.tensor(0.2)),
    (lambda: snn.Leaky(beta=0.9, init_hidden=True), "threshold", torch.tensor([0.2, 0.5, 1.0, 2.0])),
    (lambda: snn.Leaky(beta=0.9, init_hidden=True), "graded_spikes_factor", torch.tensor(2.0)),
    (lambda: snn.Leaky(beta=0.9, init_hidden=True), "reset_delay", False),
    (lambda: snn.Leaky(beta=0.9, init_hidden=True, learn_beta=True), "beta", nn.Parameter(torch.tensor(0.3))),
    (lambda: snn.Synaptic(alpha=0.8, beta=0.9, init_hidden=True), "alpha", torch.tensor(0.3)),
    (lambda: snn.Lapicque(beta=0.5, init_hidden=True), "R", torch.tensor(2.0)),
    (lambda: snn.Alpha(alpha=0.9, beta=0.8, init_hidden=True), "beta", torch.tensor(0.5)),
]


@pytest.mark.parametrize(("make", "attribute", "value"), SNN, ids=[f"{k}-{a}" for k, (_, a, _) in enumerate(SNN)])
def test_snntorch_constants_are_written_as_on_the_neuron(make, attribute, value):
    ref = make()
    net = converted(ref)

    class Steps(nn.Module):
        def __init__(self, cell):
            super().__init__()
            self.cell, self.reset = cell, cell.reset_mem

        def forward(self, x):
            return torch.stack([self.cell(step) for step in x])

    def change(steps):
        setattr(steps.cell, attribute, value)

    assert_both_change(Steps(net), Steps(ref), change, 2.0 * torch.randn(T, B, 4))
    assert getattr(net, attribute) is value


def test_snntorch_surrogates_can_be_changed():
    ref = snn.Leaky(beta=0.9)
    net = converted(ref)
    for n in (ref, net):
        n.spike_grad = snn_surrogate.fast_sigmoid(slope=3)
    x = torch.randn(B, 4, requires_grad=True)
    got, want = (torch.autograd.grad(n(x)[0].sum(), x)[0] for n in (net, ref))
    torch.testing.assert_close(got, want)
    assert want.any() and net.spike_grad.func is flexsn.surrogate.fast_sigmoid


def test_snntorch_states_and_what_is_refused():
    net = flexsn.convert(snn.Synaptic(alpha=0.8, beta=0.9, init_hidden=True), backend="torch").model
    net(torch.ones(B, 4))
    net.mem = torch.zeros(0)
    assert not net.mem.any() and net.syn.all()
    with pytest.raises(InterchangeError, match="`mem` of a converted Synaptic is a tensor"):
        net.mem = 0.5
    for name, value in (("reset_mechanism", "zero"), ("inhibition", True), ("state_quant", torch.round), ("state_function", None)):
        with pytest.raises(InterchangeError, match=rf"`{name}` of a converted Synaptic cannot be changed[\s\S]*before `flexsn.convert`"):
            setattr(net, name, value)
    assert (net.reset_mechanism, net.inhibition) == ("subtract", False)
    net.output = True
    assert len(net(torch.ones(B, 4))) == 3
    snn_utils.reset(nn.Sequential(net))
    assert not net.syn.any()


# --- Norse ----------------------------------------------------------------------------------------------------------------
def test_norse_parameters_are_written_as_on_the_layer():
    ref, net = norse.LIF(), converted(norse.LIF())
    x = 3.0 * torch.rand(T, B, 4)
    before, _ = net(x)
    for attribute, value in (("p", ref.p._replace(v_th=torch.tensor(0.3), v_leak=torch.tensor(0.1))), ("dt", 2e-3)):
        setattr(ref, attribute, value), setattr(net, attribute, value)
        (got, state), (want, want_state) = net(x), ref(x)
        assert torch.equal(got, want) and torch.equal(state.v, want_state.v) and not torch.equal(want, before)
        before = want
    with pytest.raises(InterchangeError, match="`activation_sparse` of a converted LIF cannot be changed"):
        net.activation_sparse = torch.relu


# --- one step mode for all ------------------------------------------------------------------------------------------------
def leaky():
    return snn.Leaky(beta=0.9, init_hidden=True)


def inhibited():
    with pytest.warns(UserWarning, match="Inhibition"):
        return snn.Leaky(beta=0.9, inhibition=True, init_hidden=True)


@pytest.mark.parametrize(
    ("make", "mode", "why"),
    [
        (lambda: snn.SLSTM(8, 4, init_hidden=True), "m", "(SLSTM) stays as it is, and takes single steps"),
        (inhibited, "m", "(Leaky) stays as it is, and takes single steps"),
        (lambda: norse.LIFMCRecurrentCell(8, 8), "m", "(LIFMCRecurrentCell) stays as it is, and takes single steps"),
        (lambda: norse.LSNNRecurrent(8, 8, adjoint=True), "s", "(LSNNRecurrent) stays as it is, and takes whole sequences"),
        (lambda: neuron.NonSpikingIFNode(), "s", "(NonSpikingIFNode) stays as it is, and takes whole sequences"),
        (lambda: neuron.GatedLIFNode(T=T), "s", "(GatedLIFNode) stays as it is, and takes whole sequences"),
        (lambda: neuron.IFNode(surrogate_function=surrogate.PoissonPass()), "m", "(IFNode) stays as it is, and takes single steps"),
    ],
    ids=["recurrent", "inhibition", "norse cell", "norse layer", "sequences alone", "gated", "noise"],
)
def test_a_step_mode_that_not_all_take_is_refused(make, mode, why):
    net = nn.Sequential(nn.Linear(8, 8), leaky(), nn.Linear(8, 8), make())
    before, known = list(net), list(snn.SpikingNeuron.instances)
    with pytest.raises(InterchangeError) as raised:
        flexsn.convert(net, step_mode=mode)
    assert f"`3` {why}" in str(raised.value) and "Nothing was changed" in str(raised.value)
    assert all(a is b for a, b in zip(net, before, strict=True)), "not even the neuron before it"
    assert all(a is b for a, b in zip(snn.SpikingNeuron.instances, known, strict=True))
    assert len(flexsn.convert(net).replaced) >= 1


def test_a_neuron_left_alone_that_takes_what_is_asked():
    net = nn.Sequential(neuron.LIFNode(), neuron.PSN(T=T), norse.LSNNRecurrent(4, 4, adjoint=True))
    report = flexsn.convert(net, step_mode="m")
    assert [e.before for e in report.left] == ["PSN", "LSNNRecurrent"] and net[0].step_mode == "m"


@pytest.mark.parametrize(
    "make",
    [
        lambda: layer.MultiStepContainer(layer.Linear(4, 4), neuron.LIFNode()),
        lambda: layer.StepModeContainer(True, "m", layer.Linear(4, 4), neuron.LIFNode()),
        lambda: layer.LinearRecurrentContainer(nn.Sequential(neuron.LIFNode(), nn.Linear(4, 4)), 4, 4, step_mode="m"),
        lambda: norse.Lift(norse.SequentialState(nn.Linear(4, 4), norse.LIFBoxCell())),
    ],
    ids=["multi step", "step mode", "recurrent", "lift"],
)
def test_what_a_container_calls_step_by_step_stays_so(make):
    torch.manual_seed(1)
    ref = make()
    net = copy.deepcopy(ref)
    report = flexsn.convert(net, backend="torch", step_mode="m")
    assert len(report.replaced) == 1 and "one step per call" in report.replaced[0].outcome
    x = 30.0 * torch.rand(T, B, 4)
    got, want = (y[0] if isinstance(y, tuple) else y for y in (net(x), ref(x)))
    assert torch.equal(got, want) and want.any()


@pytest.mark.parametrize(("wrong", "why"), [(3, "a int"), (None, "a NoneType"), (nn.Linear, "the class Linear"), ([jelly], "a list")])
def test_what_is_no_model_is_refused(wrong, why):
    with pytest.raises(ArgumentError, match=f"convert takes a model, not {why}"):
        flexsn.convert(wrong)


def test_sequences_asked_for_inside_a_compiled_function():
    net = nn.Sequential(neuron.IFNode(step_mode="m"))
    flexsn.convert(net)

    @torch.compile(backend="eager")
    def run(x):
        net[0].store_v_seq = True
        return net(x)

    run(torch.rand(5, 2, 3))
    assert net[0].store_v_seq and net[0].v_seq.shape == (5, 2, 3)
