"""`flexsn.monitor` on layers of every kind: called step by step or with sequences, flexsn's, converted, other libraries', plain."""

import pytest
import torch
from loaded_peers import layer, neuron, norse, snn
from torch import nn

import flexsn
from flexsn.errors import MonitorError

SHAPE = (2, 4, 3, 3)  # a batch of images of four channels


@pytest.fixture(autouse=True)
def _instances():
    """snnTorch keeps every neuron ever made in a list."""
    snn.SpikingNeuron.instances.clear()
    yield
    snn.SpikingNeuron.instances.clear()


def first_channel(size=9.0, shape=SHAPE):
    """Input that makes the first of four channels spike, and no other."""
    x = torch.zeros(shape)
    x[:, 0] = size
    return x


# --- which dims are neurons -----------------------------------------------------------------------------------------------
STEPS = {
    "flexsn": lambda: flexsn.IF(step_mode="s"),
    "spikingjelly": lambda: neuron.IFNode(),
    "converted": lambda: flexsn.convert(neuron.IFNode()).model,
    "converted from snntorch": lambda: flexsn.convert(snn.Leaky(beta=0.9)).model,
    "snntorch": lambda: snn.Leaky(beta=0.9),
    "norse": lambda: norse.LIFBoxCell(),
}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("shape", [SHAPE, (2, 4, 3), (2, 4)])
@torch.no_grad()
def test_single_steps_have_a_batch_and_no_time(kind, shape):
    net = nn.Sequential(STEPS[kind]())
    with flexsn.monitor(net, layers="0") as seen:
        for _ in range(5):
            net[0](first_channel(99.0, shape))
    record = seen["0"]
    assert record.calls == 5 and record.spiking and record.rates.shape == shape[1:]
    assert record.silent == 0.75 and record.rates[0].all()


@pytest.mark.parametrize(
    "make", [lambda: flexsn.IF(), lambda: neuron.IFNode(step_mode="m"), lambda: norse.IAF()], ids=["flexsn", "sj", "norse"]
)
def test_sequences_have_time_and_a_batch(make):
    net = nn.Sequential(make())
    with flexsn.monitor(net, layers=["0"]) as seen:
        net[0](first_channel().expand(5, *SHAPE))
    assert seen["0"].silent == 0.75 and seen["0"].rates.shape == (4, 3, 3)


def test_both_modes_say_the_same():
    x = 2.0 * torch.rand(7, *SHAPE)
    net = nn.Sequential(flexsn.LIF(v_threshold=0.9), flexsn.LIF(v_threshold=0.3))
    with flexsn.monitor(net) as whole:
        net(x)
    flexsn.reset_net(net)
    for n in net:
        n.step_mode = "s"
    with flexsn.monitor(net) as steps:
        for step in x:
            net(step)
    for name in "01":
        assert torch.equal(steps[name].rates, whole[name].rates) and steps[name].saturated == whole[name].saturated
        assert 0 < whole[name].silent < 1 or 0 < whole[name].rate < 1


def test_a_layer_that_does_not_say_is_called_as_the_others():
    single = nn.Sequential(nn.Conv2d(4, 5, 3, padding=1), flexsn.IF(step_mode="s"))
    with flexsn.monitor(single, layers=["0", "1"]) as seen:
        single(torch.rand(SHAPE))
    assert seen["0"].rates.shape == seen["1"].rates.shape == (5, 3, 3)
    mixed = nn.Sequential(layer.Linear(3, 5, step_mode="m"), nn.Identity(), flexsn.IF())
    with flexsn.monitor(mixed, layers=["0", "1", "2"]) as seen:
        mixed(torch.rand(SHAPE))
    assert [seen[n].rates.shape for n in "012"] == [(3, 5)] * 3


# --- states ---------------------------------------------------------------------------------------------------------------
class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.total, self.label = None, "a name"

    def forward(self, x):
        self.total = x if self.total is None else self.total + x
        return self.total


@torch.no_grad()
def test_states_of_other_layers_are_their_attributes():
    net = nn.Sequential(neuron.LIFNode(step_mode="m"), Counter(), flexsn.LIF(), neuron.IFNode(step_mode="m"))
    x, after = 3.0 * torch.rand(5, 3, 4), []
    with flexsn.monitor(net, layers=["0", "1", "2"], states=["v", "total"], keep=2) as seen:
        for _ in range(3):
            net(x)
            after.append((net[0].v.clone(), net[1].total.clone()))
    assert [list(seen[n].states) for n in "012"] == [["v"], ["total"], ["v"]]
    for k in (0, 1):
        assert torch.equal(seen["0"].states["v"][k], after[k + 1][0]) and torch.equal(seen["1"].states["total"][k], after[k + 1][1])
    assert not torch.equal(*seen["1"].states["total"]), "copies"
    assert seen["0"].states["v"][0].shape == (3, 4) and seen["2"].states["v"][0].shape == (5, 3, 4)


def test_what_is_no_state_of_another_layer():
    net = nn.Sequential(Counter(), neuron.IFNode())
    for name in ("label", "forward", "training", "nowhere", 3):
        with pytest.raises(MonitorError, match=f"no monitored layer has a state {name!r}"):
            flexsn.monitor(net, layers=["0"], states=[name])
    with pytest.raises(MonitorError, match=r"a state at all[\s\S]*name the attributes that are its states"):
        flexsn.monitor(net, layers=["0", "1"], states=True)
    node = nn.Sequential(nn.Identity())
    node[0].v = 0.5
    with pytest.raises(MonitorError, match="`v` of layer 0 is a float after a call"), flexsn.monitor(node, layers=["0"], states=["v"]):
        node(torch.rand(3))


@pytest.mark.parametrize("mode", ["s", "m"])
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: snn.Synaptic(alpha=0.8, beta=0.9, init_hidden=True), {"syn", "mem"}),
        (lambda: norse.LIFCell(), {"v", "i"}),
        (lambda: neuron.IzhikevichNode(), {"v", "w"}),
    ],
    ids=["snntorch", "norse", "spikingjelly"],
)
def test_states_of_converted_neurons_by_their_old_names(make, names, mode):
    net = nn.Sequential(make())
    flexsn.convert(net, step_mode=mode, backend="torch")
    x = torch.rand(5, 3, 4)
    with flexsn.monitor(net, states=True, keep=None) as seen:
        given = [net[0](x)] if mode == "m" else [net[0](step) for step in x]
    assert seen["0"].states.keys() == names
    for name, sequences in seen["0"].states.items():
        assert torch.cat(list(sequences)).shape == (5, 3, 4), name
    if isinstance(given[0], tuple):  # Norse's return their last state
        assert torch.equal(seen["0"].states["v"][-1][-1], given[-1][1].v)
    else:
        assert all(torch.equal(seen["0"].states[n][-1][-1], getattr(net[0], n)) for n in names)
    assert net[0].state_seqs is None and net[0].store_state_seqs is False


# --- several monitors -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("first_out", [0, 1])
def test_monitors_may_overlap(store, first_out):
    net = nn.Sequential(flexsn.LIF(store_state_seqs=store))
    monitors = [flexsn.monitor(net, states=True, keep=None) for _ in range(2)]
    x = torch.rand(3, 2, 4)
    for m in monitors:
        m.__enter__()
    net(x)
    monitors[first_out].__exit__(None, None, None)
    net(x)
    monitors[1 - first_out].__exit__(None, None, None)
    assert net[0].store_state_seqs is store and (net[0].state_seqs is None) is not store
    kept = [len(m["0"].states["v"]) for m in monitors]
    assert kept == ([1, 2] if first_out == 0 else [2, 1])
    with monitors[0]:
        net(x)
    assert len(monitors[0]["0"].states["v"]) == kept[0] + 1 and net[0].store_state_seqs is store
