"""NIR graphs in flexsn and in SpikingJelly, snnTorch and Norse, in both directions: the same spikes."""

import warnings

import numpy as np
import pytest
import torch
from graphs import B, T, affine, assert_spikes, cuba_lif, f64, full, lif, loop
from loaded_peers import layer, neuron, nir, norse, snn, snn_utils, surrogate
from torch import nn
from torch.nn.utils import prune

import flexsn
from flexsn.errors import InterchangeError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from snntorch.export_nir import export_to_nir as snntorch_to_nir
    from snntorch.import_nir import import_from_nir as snntorch_from_nir
    from spikingjelly.activation_based.nir_exchange import export_to_nir as spikingjelly_to_nir
    from spikingjelly.activation_based.nir_exchange import import_from_nir as spikingjelly_from_nir


# --- SpikingJelly -----------------------------------------------------------------------------------------------------------
def test_graphs_run_as_in_spikingjelly():
    """Its rules: v_leak = v_reset, r 1 or tau/dt, w_in tau_syn/dt; IF with r 1/dt."""
    graph = nir.NIRGraph.from_list(
        affine(6, 4, 2.0),
        lif(6, v_leak=-0.1, v_reset=-0.1),
        affine(5, 6, 2.0),
        cuba_lif(5),
        affine(3, 5),
        nir.IF(full(3, 1e4), full(3, 1.0)),
    )
    x = 2.0 * torch.randn(T, B, 4, dtype=f64)
    assert_spikes(flexsn.from_nir(graph, dtype=f64, backend="cpp")(x), loop(spikingjelly_from_nir(graph, dtype=f64), x))


def jelly():
    return nn.Sequential(
        layer.Conv2d(2, 3, 3, step_mode="m"), neuron.LIFNode(v_reset=-0.1, step_mode="m"), layer.AvgPool2d(2, step_mode="m"),
        neuron.IFNode(v_threshold=0.3, step_mode="m"), layer.Flatten(step_mode="m"), layer.Linear(27, 5, step_mode="m"),
        neuron.ParametricLIFNode(init_tau=3.0, v_threshold=0.1, decay_input=False, step_mode="m"),
    ).double()  # fmt: skip


def test_graphs_that_spikingjelly_writes():
    net, x = jelly(), 10.0 * torch.rand(T, B, 2, 8, 8, dtype=f64)
    graph = spikingjelly_to_nir(net, x)
    assert_spikes(flexsn.from_nir(graph, dtype=f64, backend="torch")(x), net(x))


def test_converted_neurons_with_smooth_spikes_are_refused():
    net = nn.Sequential(neuron.LIFNode(step_mode="m", surrogate_function=surrogate.ATan(spiking=False)))
    flexsn.convert(net)
    with pytest.raises(InterchangeError, match=r"has spikes of 0\.966 .* NIR's are 0 or 1"):
        flexsn.to_nir(net, torch.rand(T, B, 4))


def test_a_pruned_time_constant_is_written_as_it_is_now():
    net = flexsn.convert(neuron.ParametricLIFNode(step_mode="m"), backend="torch").model
    prune.identity(net.core, "w")
    with torch.no_grad():
        net.core.w_orig.fill_(-2.0)
    graph = flexsn.to_nir(net, torch.rand(T, B, 4), dt=1.0)
    np.testing.assert_allclose(graph.nodes["spikingjellyneuron"].tau, 1.0 + np.exp(2.0), rtol=1e-6)


def test_converted_spikingjelly_networks_are_written_as_spikingjelly_writes_them():
    net, x = jelly(), 10.0 * torch.rand(T, B, 2, 8, 8, dtype=f64)
    theirs = spikingjelly_to_nir(net, x)
    flexsn.convert(net, backend="torch")
    ours = flexsn.to_nir(net, x, dt=1e-4)
    assert [type(n) for n in ours.nodes.values()] == [type(n) for n in theirs.nodes.values()]
    for got, want in zip(ours.nodes.values(), theirs.nodes.values(), strict=True):
        for key, value in want.to_dict().items():
            if isinstance(value, np.ndarray) and value.dtype.kind == "f":
                np.testing.assert_allclose(getattr(got, key), value, rtol=1e-9, err_msg=f"{type(want).__name__}.{key}")
    assert_spikes(loop(spikingjelly_from_nir(ours, dtype=f64), x), net(x))


def test_spikingjelly_s_current_based_lif():
    net = nn.Sequential(nn.Linear(4, 5), neuron.CUBALIFNode()).double()
    x = torch.randn(B, 4, dtype=f64)
    theirs = spikingjelly_to_nir(net, x)
    flexsn.convert(net)
    ours = flexsn.to_nir(net, x, dt=1e-4)
    for key in ("tau_syn", "tau_mem", "r", "w_in", "v_leak", "v_threshold", "v_reset"):
        np.testing.assert_allclose(getattr(ours.nodes["1"], key), getattr(theirs.nodes["_1"], key), rtol=1e-12)


# --- snnTorch (dt is 1e-4; float32 alone: its surrogates return float32) ------------------------------------------------------
@pytest.fixture(autouse=True)
def _instances():
    snn.SpikingNeuron.instances.clear()
    yield
    snn.SpikingNeuron.instances.clear()


def steps(net, x):
    snn_utils.reset(net)
    return torch.stack([y[0] if isinstance(y := net(step), tuple) else y for step in x])


def test_graphs_run_as_in_snntorch(capsys):
    """Its rules: v_leak 0, r tau/dt, w_in tau_syn/dt, v_reset 0."""
    graph = nir.NIRGraph.from_list(affine(6, 4), lif(6, r=3.0), affine(5, 6, 2.0), cuba_lif(5))
    x = 2.0 * torch.randn(T, B, 4)
    assert_spikes(flexsn.from_nir(graph, backend="cpp")(x), steps(snntorch_from_nir(graph), x))


def snntorch_net(kind=snn.Leaky, n=5, **options):
    first = snn.Leaky(beta=torch.full((6,), 0.8), threshold=torch.ones(6), init_hidden=True, reset_mechanism="zero", reset_delay=False)
    decays = {name: torch.full((n,), 0.7) for name in (("alpha", "beta") if kind is snn.Synaptic else ("beta",))}
    last = kind(**decays, threshold=torch.ones(n), init_hidden=True, reset_mechanism="zero", reset_delay=False, **options)
    return nn.Sequential(nn.Linear(4, 6), first, nn.Linear(6, n), last)


@pytest.mark.filterwarnings("ignore:nirtorch.extract_nir_graph:DeprecationWarning")
@pytest.mark.parametrize("kind", [snn.Leaky, snn.Synaptic])
def test_graphs_that_snntorch_writes(kind):
    net, x = snntorch_net(kind), 2.0 * torch.randn(T, B, 4)
    graph = snntorch_to_nir(net, x[0], ignore_dims=[0])
    want = steps(net, x)
    assert_spikes(flexsn.from_nir(graph, backend="torch")(x), want)
    snn_utils.reset(net)
    flexsn.convert(net, backend="torch", step_mode="m")
    assert_spikes(net(x), want)
    flexsn.reset_net(net)
    assert_spikes(flexsn.from_nir(flexsn.to_nir(net, x), backend="torch")(x), want)


@pytest.mark.filterwarnings("ignore:nirtorch.extract_nir_graph:DeprecationWarning")
@pytest.mark.parametrize("all_to_all", [True, False], ids=["matrix", "one to one"])
def test_recurrent_graphs_that_snntorch_writes(all_to_all):
    """RLeaky: a cycle of a neuron and its recurrent weights, which deliver the spikes of the step before."""
    own = {"linear_features": 5} if all_to_all else {"V": torch.rand(5)}
    net, x = snntorch_net(snn.RLeaky, 5, all_to_all=all_to_all, **own), 3.0 * torch.randn(T, B, 4)
    graph = snntorch_to_nir(net, x[0], ignore_dims=[0])
    again = flexsn.from_nir(graph, backend="torch")
    assert not again.feedback and sum(isinstance(m, flexsn.Recurrent) for m in again.modules()) == 1
    want = steps(net, x)
    assert_spikes(again(x), want)
    flexsn.reset_net(again)
    assert_spikes(torch.cat([again(piece) for piece in x.split(7)]), want)
    flexsn.reset_net(again)
    back = flexsn.to_nir(again, x)
    assert len(graph.edges) == len(back.edges)
    assert_spikes(flexsn.from_nir(back, backend="torch")(x), want)


def test_converted_neurons_keep_their_side_of_the_threshold():
    """SpikingJelly spikes at `>=`, snnTorch at `>`; whole numbers hit it."""
    x = torch.randint(0, 4, (T, B, 4)).float()
    for make, inclusive in (
        (lambda: neuron.IFNode(v_threshold=3.0, step_mode="m"), True),
        (lambda: snn.Leaky(beta=0.5, threshold=3.0, reset_mechanism="zero", reset_delay=False, init_hidden=True), False),
    ):
        net = nn.Sequential(make())
        flexsn.convert(net, step_mode="m", backend="torch")
        want = net(x)
        graph = flexsn.to_nir(net, x)
        assert bool(graph.nodes["0"].metadata.get("inclusive")) == inclusive
        assert torch.equal(flexsn.from_nir(graph, backend="torch")(x), want) and want.any()


def test_a_converted_neuron_that_starts_elsewhere_is_refused():
    node = neuron.CUBALIFNode(v_reset=0.5)
    net = nn.Sequential(node)
    node.set_reset_value("v", 0.3)
    flexsn.convert(net, step_mode="m")
    with pytest.raises(InterchangeError, match=r"starts from initial_states=\(0.3, 0.0\)"):
        flexsn.to_nir(net, torch.rand(T, B, 4))


def test_snntorch_s_default_reset_is_refused():
    net = nn.Sequential(nn.Linear(4, 3), snn.Leaky(beta=0.9, init_hidden=True))
    flexsn.convert(net, step_mode="m")
    with pytest.raises(InterchangeError, match=r"`1` \(Leaky\).*one step after the spike"):
        flexsn.to_nir(net, torch.rand(T, B, 4))


# --- Norse (dt is 1e-3) -----------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:nirtorch.load:DeprecationWarning")
def test_graphs_run_as_in_norse():
    """Its rules: v_reset 0, IF with r 1/dt taken as 1."""
    neurons = lif(6, tau=3e-3, v_leak=0.1), cuba_lif(5, tau_syn=2e-3, tau_mem=5e-3, r=2.0)
    graph = nir.NIRGraph.from_list(affine(6, 4), neurons[0], affine(5, 6, 3.0), neurons[1])
    x = 2.0 * torch.randn(T, B, 4)
    assert_spikes(flexsn.from_nir(graph, dt=1e-3, backend="cpp")(x), loop(norse.from_nir(graph, dt=1e-3), x))


@pytest.mark.filterwarnings("ignore:nirtorch.extract_nir_graph:DeprecationWarning")
def test_graphs_that_norse_writes_need_dt_1():
    """Norse 1.1 writes `tau` multiplied by `dt`; with `dt=1.0` it writes seconds, as NIR has them and as it reads them."""
    p = norse.LIFBoxParameters(tau_mem_inv=torch.full((6,), 300.0), v_th=torch.full((6,), 0.4), v_leak=torch.zeros(6))
    net = norse.SequentialState(nn.Linear(4, 6), norse.LIFBoxCell(p, dt=1e-3))
    x = 2.0 * torch.randn(T, B, 4)
    want = loop(net, x)
    graph = norse.to_nir(net, x[0], dt=1.0)
    np.testing.assert_allclose(graph.nodes["1"].tau, 1 / 300.0, rtol=1e-6)
    np.testing.assert_allclose(norse.to_nir(net, x[0], dt=1e-3).nodes["1"].tau, 1e-3 / 300.0, rtol=1e-6)
    graph.nodes["input"] = nir.Input([4])  # it counts the batch as a dim of the input
    assert_spikes(flexsn.from_nir(graph, dt=1e-3, backend="torch")(x), want)


@pytest.mark.parametrize("name", ["IAF", "LIF"])
def test_converted_norse_neurons_are_written(name):
    net = nn.Sequential(getattr(norse, name)())
    x = 10.0 * torch.rand(T, B, 4)
    want = net(x)[0]
    flexsn.convert(net, backend="torch")
    graph = flexsn.to_nir(net, x, dt=1e-3)
    assert_spikes(flexsn.from_nir(graph, backend="torch")(x), want)
