"""`flexsn.convert` on neurons with a parameter per neuron, per pixel and per channel: values and gradients of the original."""

import copy

import pytest
import torch
from loaded_peers import neuron, norse, snn
from torch import nn

import flexsn
from flexsn.errors import OperandTypeError

STEPS, BATCH = 7, 2


@pytest.fixture(autouse=True)
def _instances():
    """snnTorch keeps every neuron ever made in a list."""
    snn.SpikingNeuron.instances.clear()
    yield
    snn.SpikingNeuron.instances.clear()


def convolution(lif):
    return nn.Sequential(nn.Conv2d(1, 3, 3), lif)


def stepped(net, x):
    """Outputs of every step; of a pair of output and state the output."""
    outputs, state = [], ()
    for step in x:
        y = net(step, *state) if isinstance(net, (flexsn.FlexSN, norse.LIFBoxCell)) else net(step)
        y, state = (y[0], y[1:]) if isinstance(y, tuple) else (y, ())
        outputs.append(y)
    return torch.stack(outputs)


def assert_equal(net, ref, x, run=stepped):
    """The same outputs, some 0 and some 1, and the same gradients of the input and of every parameter."""
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    got, want = run(net, inputs[0]), run(ref, inputs[1])
    assert torch.equal(got, want) and want.any() and not want.all()
    cotangent = torch.randn_like(want)
    grads, wanted = (
        torch.autograd.grad(y, [leaf, *m.parameters()], cotangent) for y, leaf, m in zip((got, want), inputs, (net, ref), strict=True)
    )
    for g, w in zip(grads, wanted, strict=True):
        assert w.any()
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4 * w.abs().max().item())


SHAPES = [(3, 6, 6), (6, 6), (1, 6, 6), (3, 1, 1), (1, 3, 6, 6), (6,), (1,), (BATCH, 3, 6, 6)]


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decays_of_any_shape(shape, backend):
    ref = convolution(snn.Leaky(beta=torch.rand(shape), learn_beta=True, init_hidden=True, threshold=torch.rand(3, 1, 1) / 2))
    net = copy.deepcopy(ref)
    assert len(flexsn.convert(net, backend=backend).replaced) == 1 and isinstance(net[1], flexsn.FlexSN)
    assert_equal(net, ref, 3.0 * torch.rand(STEPS, BATCH, 1, 8, 8))


def test_decays_of_any_shape_over_whole_sequences():
    ref = snn.Synaptic(alpha=torch.rand(3, 6, 6), beta=torch.rand(6, 6), learn_alpha=True, learn_beta=True, init_hidden=True)
    net = flexsn.convert(copy.deepcopy(ref), backend="cpp", step_mode="m").model
    assert_equal(net, ref, torch.rand(STEPS, BATCH, 3, 6, 6), lambda m, x: m(x) if m is net else stepped(m, x))


def test_thresholds_per_pixel_of_norse():
    ref = norse.LIFBoxCell(p=norse.LIFBoxParameters(v_th=torch.rand(3, 6, 6) / 4))
    net = flexsn.convert(copy.deepcopy(ref), backend="cpp").model
    assert_equal(net, ref, 3.0 * torch.rand(STEPS, BATCH, 3, 6, 6))


class PerChannel(neuron.BaseNode):
    """A learned decay per channel of an image."""

    def __init__(self, view):
        super().__init__(step_mode="m")
        self.w, self.view = nn.Parameter(torch.rand(3)), view

    def single_step_functional_forward(self, inputs, states, **kwargs):
        h = states[0] * self.w.view(self.view).sigmoid() + inputs[0]
        spike = self.surrogate_function(h - self.v_threshold)
        return (spike,), (h * (1.0 - spike),)


@pytest.mark.parametrize("view", [(3, 1, 1), (1, 3, 1, 1)], ids=str)
def test_parameters_that_a_step_views_as_channels(view):
    ref = PerChannel(view)
    net = flexsn.convert(copy.deepcopy(ref), backend="cpp").model
    assert isinstance(net, flexsn.FlexSN)
    assert_equal(net, ref, torch.rand(STEPS, BATCH, 3, 4, 5), lambda m, x: m(x))


class Misfit(PerChannel):
    def single_step_functional_forward(self, inputs, states, **kwargs):
        return (inputs[0] * self.w.view(2, -1),), states


def test_a_step_that_runs_on_no_shape_stays_with_the_reason():
    report = flexsn.convert(nn.Sequential(Misfit((3,))))
    assert not report.replaced and "does not run on one step of shape [2, 3]: `view`" in report.left[0].outcome


# --- tensors that were computed when the neuron was made --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: snn.Lapicque(beta=0.9, learn_beta=True, init_hidden=True), "C"),
        (lambda: snn.Leaky(beta=torch.rand(4, requires_grad=True).sigmoid(), init_hidden=True), "beta"),
    ],
    ids=["lapicque", "leaky"],
)
def test_what_was_computed_from_a_parameter_stays_with_the_reason(make, name):
    """A second backward through it fails, in snnTorch too, and an optimizer step does not reach it."""
    ref = make()
    report = flexsn.convert(nn.Sequential(ref))
    assert not report.replaced and f"`{name}` was computed once" in report.left[0].outcome
    stepped(ref, torch.rand(STEPS, 2, 4)).sum().backward()
    ref.reset_mem()
    with pytest.raises(RuntimeError, match="a second time"):
        stepped(ref, torch.rand(STEPS, 2, 4)).sum().backward()


def test_a_lapicque_that_learns_its_threshold():
    ref = snn.Lapicque(beta=0.5, threshold=torch.rand(3, 6, 6) / 4, learn_threshold=True, init_hidden=True)
    net = flexsn.convert(copy.deepcopy(ref), backend="cpp").model
    assert_equal(net, ref, torch.rand(STEPS, BATCH, 3, 6, 6))


# --- what is no tensor -------------------------------------------------------------------------------------------------------
CONVERTED = {
    "spikingjelly": lambda: neuron.LIFNode(step_mode="m"),
    "spikingjelly, gated": lambda: neuron.GatedLIFNode(T=3),
    "snntorch": lambda: snn.Leaky(beta=0.9, init_hidden=True),
    "norse": norse.LIF,
}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_packed_sequence_is_taken_or_told_to_be_padded(name):
    net = flexsn.convert(CONVERTED[name](), backend="torch").model
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    x, lengths = nn.utils.rnn.pad_packed_sequence(packed)
    assert x.shape == (3, 2, 2) and lengths.tolist() == [3, 2]
    if name == "spikingjelly":  # becomes a neuron of the zoo
        found = nn.utils.rnn.pad_packed_sequence(net(packed))[0]
        net.reset()
        assert torch.equal(found, net(x, lengths=lengths))
        return
    for begin in (lambda: None, lambda: net(torch.ones(3, 2, 1, 1, 1))):  # before the first call, and after one
        begin()
        with pytest.raises(OperandTypeError, match=r"must be a tensor, not PackedSequence[\s\S]*torch.nn.utils.rnn.pad_packed_sequence"):
            net(packed)
