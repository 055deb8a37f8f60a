"""NIR's cycles: `flexsn.Recurrent` goes out as a neuron with a layer on the way back, and such a cycle comes in as one."""

import warnings

import numpy as np
import pytest
import torch
from graphs import B, T, affine, assert_spikes, cuba_lif, f64, lif, loop
from loaded_peers import nir, snn
from torch import nn
from torch.nn.utils import prune

import flexsn
from flexsn.errors import InterchangeError
from flexsn.interchange import Delay, PerStep, Scale

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from spikingjelly.activation_based.nir_exchange import import_from_nir as spikingjelly_from_nir

above = flexsn.surrogate.atan(inclusive=False)


@pytest.fixture(autouse=True)
def _double():
    torch.manual_seed(0)
    torch.set_default_dtype(f64)
    yield
    torch.set_default_dtype(torch.float32)


def fed_back(neuron, mixing, **options):
    return flexsn.Recurrent(neuron, mixing, backend="torch", **options)


LAYERS = {
    "affine": lambda: (nn.Linear(4, 6), fed_back(flexsn.LIF(tau=3.0, v_threshold=0.3, surrogate=above), nn.Linear(6, 6))),
    "linear": lambda: (nn.Linear(4, 6), fed_back(flexsn.IF(v_threshold=0.7), nn.Linear(6, 6, bias=False))),
    "from its leak": lambda: (nn.Linear(4, 6), fed_back(flexsn.CubaLIF(tau=torch.rand(6) + 2, v_leak=0.1, v_reset=-0.2), nn.Linear(6, 6))),
    "no spikes": lambda: (nn.Linear(4, 6), fed_back(flexsn.LeakyIntegrator(tau=4.0), nn.Linear(6, 6))),
    "factors": lambda: (nn.Linear(4, 6), fed_back(flexsn.CubaLI(tau=4.0, tau_syn=2.0), Scale(-torch.rand(6)))),
    "two": lambda: (
        nn.Linear(4, 6), fed_back(flexsn.LIF(v_threshold=0.3), nn.Linear(6, 6)), nn.Linear(6, 5), fed_back(flexsn.LIF(), nn.Linear(5, 5)),
        nn.Linear(5, 2),
    ),
    "channels": lambda: (
        nn.Unflatten(2, (1, 2, 2)), PerStep(nn.Conv2d(1, 2, 1), 3),
        fed_back(flexsn.LIF(learn_tau=True, per_channel=2, v_threshold=0.3), nn.Conv2d(2, 2, 3, padding=1)),
    )[1:],
}  # fmt: skip


def sample(name):
    return 4.0 * torch.randn(T, B, *((1, 4, 4) if name == "channels" else (4,)))


@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_go_out_and_come_back(name, tmp_path):
    """The same outputs to the bit, whole sequences, the same values in the graph, and gradients of all weights."""
    net, x = nn.Sequential(*LAYERS[name]()), sample(name)
    want = net(x)
    graph = flexsn.to_nir(net, x, dt=1e-3)
    nir.write(tmp_path / "net.nir", graph)
    read = nir.read(tmp_path / "net.nir")
    assert set(read.edges) == set(graph.edges)
    again = flexsn.from_nir(read, backend="torch")
    assert torch.equal(again(x), want) and want.any() and not again.feedback
    assert sum(isinstance(m, flexsn.Recurrent) for m in again.nodes.values()) == sum(isinstance(m, flexsn.Recurrent) for m in net)
    back = flexsn.to_nir(again, x)
    assert back.edges == graph.edges
    for key, node in graph.nodes.items():
        for field in ("weight", "bias", "scale", "tau", "tau_mem", "tau_syn", "r", "v_threshold", "v_leak", "v_reset", "w_in"):
            if getattr(node, field, None) is not None:
                np.testing.assert_array_equal(getattr(node, field), getattr(read.nodes[key], field))
                np.testing.assert_allclose(getattr(node, field), getattr(back.nodes[key], field), rtol=1e-15)
    again(x).sum().backward()
    assert all(p.grad is not None for p in again.parameters())


def test_a_recurrent_layer_is_a_neuron_and_an_edge_back():
    net = nn.Sequential(nn.Linear(4, 6), fed_back(flexsn.LIF(tau=3.0), nn.Linear(6, 6, bias=False)))
    graph = flexsn.to_nir(net, torch.randn(T, B, 4), dt=1e-3)
    assert {name: type(node).__name__ for name, node in graph.nodes.items()} == {
        "input": "Input", "0": "Affine", "1": "LIF", "1_mixing": "Linear", "output": "Output"
    }  # fmt: skip
    assert set(graph.edges) == {("input", "0"), ("0", "1"), ("1", "1_mixing"), ("1_mixing", "1"), ("1", "output")}
    np.testing.assert_array_equal(graph.nodes["1_mixing"].weight, net[1].mixing.weight.detach().numpy())
    np.testing.assert_allclose(graph.nodes["1"].tau, 3e-3)


def test_a_cycle_comes_in_as_a_recurrent_layer():
    """As step by step, where each edge back carries the step before."""
    for make in (lif, cuba_lif):
        nodes = {"input": nir.Input([4]), "w": affine(6, 4, 2.0), "n": make(6), "back": affine(6, 6), "output": nir.Output([6])}
        edges = [("input", "w"), ("w", "n"), ("n", "back"), ("back", "n"), ("n", "output")]
        net, x = flexsn.from_nir(nir.NIRGraph(nodes, edges), backend="torch"), 2.0 * torch.randn(T, B, 4)
        layer = net.nodes["n"]
        assert isinstance(layer, flexsn.Recurrent) and list(net.nodes) == ["input", "w", "n", "output"]
        got, y, out = net(x), torch.zeros(B, 6), []
        layer.neuron.step_mode = "s"
        for step in x:
            y = layer.neuron(net.nodes["w"](step) + layer.mixing(y))
            out.append(y)
        assert_spikes(got, torch.stack(out))


def test_cycles_through_more_than_one_layer_run_step_by_step():
    nodes = {"input": nir.Input([4]), "w": affine(6, 4, 2.0), "n": lif(6), "a": affine(5, 6), "b": affine(6, 5), "output": nir.Output([6])}
    edges = [("input", "w"), ("w", "n"), ("n", "a"), ("a", "b"), ("b", "n"), ("n", "output")]
    net = flexsn.from_nir(nir.NIRGraph(nodes, edges), backend="torch")
    assert len(net.feedback) == 1 and not any(isinstance(m, flexsn.Recurrent) for m in net.modules())
    low_rank = nn.Sequential(net.nodes["a"], net.nodes["b"])
    same = nn.Sequential(net.nodes["w"], fed_back(net.nodes["n"], low_rank))
    x = 2.0 * torch.randn(T, B, 4)
    want = net(x)
    flexsn.reset_net(net)
    assert_spikes(same(x), want)


def test_a_layer_with_another_way_out_is_no_mixing():
    nodes = {"input": nir.Input([6]), "n": lif(6), "back": affine(6, 6), "output": nir.Output([6])}
    edges = [("input", "n"), ("n", "back"), ("back", "n"), ("back", "output")]
    net = flexsn.from_nir(nir.NIRGraph(nodes, edges), backend="torch")
    assert len(net.feedback) == 1 and net(torch.randn(T, B, 6)).shape == (T, B, 6)


def test_states_and_single_steps_of_a_recurrent_graph():
    net, x = nn.Sequential(*LAYERS["affine"]()), sample("affine")
    graph = flexsn.to_nir(net, x)
    net[1].step_mode = "s"
    alone = flexsn.to_nir(net, x[0])
    assert alone.edges == graph.edges
    again = flexsn.from_nir(graph, backend="torch")
    want = again(x)
    flexsn.reset_net(again)
    assert torch.equal(torch.cat([again(piece) for piece in x.split(7)]), want)


def test_a_pruned_mixing_is_written_as_it_is_now():
    net = nn.Sequential(fed_back(flexsn.LIF(v_threshold=0.1), nn.Linear(4, 4)))
    prune.l1_unstructured(net[0].mixing, "weight", 8)
    written = flexsn.to_nir(net, torch.randn(T, B, 4)).nodes["0_mixing"].weight
    assert (written == 0).sum() == 8


def test_a_converted_recurrent_neuron_is_written():
    """snnTorch's, where it resets at once to zero."""
    snn.SpikingNeuron.instances.clear()
    lone = {"init_hidden": True, "spike_grad": above, "reset_mechanism": "zero", "reset_delay": False}
    net = nn.Sequential(nn.Linear(4, 5), snn.RLeaky(beta=0.8, linear_features=5, **lone))
    flexsn.convert(net, step_mode="m", backend="torch")
    x = 2.0 * torch.randn(T, B, 4)
    want = net(x)
    assert_spikes(flexsn.from_nir(flexsn.to_nir(net, x), backend="torch")(x), want)


def test_spikingjelly_reads_recurrent_layers():
    """Without a bias: it begins with zeros behind the mixing, flexsn and snnTorch's RLeaky before it."""
    back = fed_back(flexsn.LIF(tau=3.0, v_threshold=0.3, decay_input=False, surrogate=above), nn.Linear(6, 6, bias=False))
    net, x = nn.Sequential(nn.Linear(4, 6), back), sample("linear")
    theirs = spikingjelly_from_nir(flexsn.to_nir(net, x, dt=1e-4), dtype=f64)
    assert_spikes(net(x), loop(theirs, x))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: fed_back(flexsn.LIF(), lambda y: y.roll(1, -1)), "the mixing is a function; NIR has Linear, Conv1d, Conv2d"),
        (lambda: fed_back(flexsn.LIF(), nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 6))), "the mixing is a Sequential"),
        (lambda: fed_back(flexsn.LIF(), Delay(2)), "the mixing is a Delay"),
        (lambda: fed_back(flexsn.LIF(), nn.Linear(6, 1)), r"the mixing returns \[1\] for \(6,\)"),
        (lambda: fed_back(flexsn.LIF(v_reset=None), nn.Linear(6, 6)), "soft reset"),
        (lambda: fed_back(flexsn.ALIF(tau=3.0), nn.Linear(6, 6)), "NIR has no primitive for `ALIF`"),
        (lambda: fed_back(flexsn.LIF(initial_states=(0.5,)), nn.Linear(6, 6)), "starts from initial_states"),
        (lambda: fed_back(lambda x, v: (v + x, v), nn.Linear(6, 6), num_states=1), "NIR has no primitive for the core"),
    ],
    ids=["function", "two layers", "delay", "broadcast", "soft reset", "adaptive", "elsewhere", "core"],
)
def test_what_recurrent_layers_nir_cannot_say(layer, message):
    with pytest.raises(InterchangeError, match=message) as raised:
        flexsn.to_nir(nn.Sequential(layer()), torch.randn(T, B, 6))
    assert "`0` (Recurrent)" in str(raised.value)
