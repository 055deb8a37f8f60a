"""What the report of `flexsn.convert` says of neurons whose conversion gains nothing."""

import warnings

import pytest
import torch
from loaded_peers import functional, layer, neuron, norse, snn
from torch import nn

import flexsn


@pytest.fixture(autouse=True)
def _instances():
    """snnTorch keeps every neuron ever made in a list."""
    snn.SpikingNeuron.instances.clear()
    yield
    snn.SpikingNeuron.instances.clear()


def leaky():
    return snn.Leaky(beta=0.9, init_hidden=True)


def said(report):
    """Where nothing is gained, and why; the printed report says the same."""
    assert ("nothing gained" in str(report)) == bool(report.no_gain) and all(str(e) in str(report) for e in report.no_gain)
    assert {e.place for e in report.no_gain} <= {e.place for e in report.replaced}
    return {e.place: e.outcome for e in report.no_gain}


LOOPED = 'saves nothing: convert with step_mode="m", and call the model with sequences [T, *shape] in place of the loop over time'


@pytest.mark.parametrize("make", [leaky, norse.LIFCell], ids=["snntorch", "norse"])
def test_models_that_are_stepped(make):
    found = said(flexsn.convert(nn.Sequential(nn.Linear(4, 4), make(), make())))
    assert list(found) == ["1", "2"] and all(LOOPED in why for why in found.values())
    assert said(flexsn.convert(nn.Sequential(nn.Linear(4, 4), make()), step_mode="m")) == {}


def test_nodes_of_spikingjelly_that_are_stepped():
    net = nn.Sequential(layer.Linear(4, 4), neuron.LIFNode())
    assert '`functional.set_step_mode(model, "m")`' in said(flexsn.convert(net))["1"]
    functional.set_step_mode(net, "m")  # the advice works after the conversion
    assert net(torch.rand(5, 3, 4)).shape == (5, 3, 4)
    net = nn.Sequential(layer.Linear(4, 4), neuron.LIFNode())
    functional.set_step_mode(net, "m")
    assert said(flexsn.convert(net)) == {}


def inhibited():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return snn.Leaky(beta=0.9, init_hidden=True, inhibition=True)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: snn.SLSTM(4, 8, init_hidden=True), "SLSTM"),
        (lambda: norse.LIFMCRecurrentCell(4, 4), "LIFMCRecurrentCell"),
        (inhibited, "Leaky"),
    ],
)
def test_a_neuron_that_keeps_the_whole_model_step_by_step(make, kind):
    report = flexsn.convert(nn.Sequential(nn.Linear(4, 4), leaky(), make(), leaky()))
    found = said(report)
    assert list(found) == ["1", "3"] and [e.before for e in report.left] == [kind]
    assert all(f"`2` ({kind}) stays as it is and takes single steps, so the model is called step by step" in why for why in found.values())


def test_containers_that_loop_over_time():
    fed = nn.Sequential(neuron.LIFNode(), nn.Linear(4, 4))
    net = nn.Sequential(layer.LinearRecurrentContainer(fed, 4, 4, step_mode="m"), neuron.LIFNode(step_mode="m"))
    assert said(flexsn.convert(net)) == {
        "0.sub_module.0": "a kernel over one step saves nothing: `0` (LinearRecurrentContainer) calls it step by step"
    }
    assert "`(the model)` (MultiStepContainer) calls it" in said(flexsn.convert(layer.MultiStepContainer(neuron.LIFNode())))["0"]


def test_what_stays_within_a_container_holds_up_nobody_else():
    net = nn.Sequential(norse.Lift(norse.SequentialState(norse.LIFMCRecurrentCell(4, 4))), leaky())
    assert LOOPED in said(flexsn.convert(net))["1"]
