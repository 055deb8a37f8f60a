"""NIR in and out: round trips, and the spikes of three other implementations of it."""

import warnings

import numpy as np
import pytest
import torch
from graphs import B, T, affine, assert_spikes, f64, full, lif
from loaded_peers import nir
from torch import nn
from torch.nn.utils import prune

import flexsn
from flexsn.errors import InterchangeError
from flexsn.interchange import Delay, PerStep, Scale, SumPool2d, Threshold

with warnings.catch_warnings():
    warnings.simplefilter("ignore")


# --- the equations --------------------------------------------------------------------------------------------------------
def test_every_neuron_is_an_euler_step_of_its_equation():
    """Against the equations of NIR's documentation, written out in numpy with v, i, tau and r of each neuron its own."""
    rng, n, dt = np.random.default_rng(0), 5, 2e-3
    p = {name: rng.uniform(0.5, 1.5, n) for name in ("r", "w_in", "v_threshold")}
    p |= {"tau": rng.uniform(3, 9, n) * dt, "tau_syn": rng.uniform(2, 5, n) * dt, "v_leak": rng.uniform(-0.3, 0.3, n)}
    p["v_reset"] = rng.uniform(-0.5, 0.0, n)
    x = 3.0 * rng.standard_normal((T, n)) + 1.0
    leaky = {k: p[k] for k in ("tau", "r", "v_leak")}
    current = {"tau_mem": p["tau"], **{k: p[k] for k in ("tau_syn", "r", "v_leak", "w_in")}}
    fire = {k: p[k] for k in ("v_threshold", "v_reset")}
    for node in (
        nir.IF(r=p["r"] / dt, **fire), nir.LI(**leaky), nir.LIF(**leaky, **fire), nir.CubaLI(**current), nir.CubaLIF(**current, **fire)
    ):  # fmt: skip
        kind = type(node).__name__
        spiking, leaks, cuba = kind.endswith("F"), kind != "IF", kind.startswith("Cuba")
        v, i, want = p["v_leak"] if leaks else p["v_reset"], np.zeros(n), []
        for s in x:
            i = i + dt / p["tau_syn"] * (p["w_in"] * s - i) if cuba else s
            v = v + dt / p["tau"] * (p["v_leak"] - v + p["r"] * i) if leaks else v + p["r"] * i
            z = v > p["v_threshold"]
            want.append(z.astype(float) if spiking else v)
            v = np.where(z, p["v_reset"], v) if spiking else v
        got = flexsn.from_nir(nir.NIRGraph.from_list(node), dt=dt, dtype=f64, backend="torch")(torch.tensor(x)[:, None])[:, 0]
        np.testing.assert_allclose(got.numpy(), np.stack(want), rtol=1e-12, atol=1e-12, err_msg=kind)
        assert not spiking or 0 < np.mean(want) < 1


def test_a_spike_needs_more_than_the_threshold():
    """NIR: `v > v_threshold`. Here v is 0.5, 1.0 (no spike), 1.5."""
    graph = nir.NIRGraph.from_list(nir.IF(r=full(1, 1.0), v_threshold=full(1, 1.0)))
    spikes = flexsn.from_nir(graph, dt=1.0, backend="torch")(torch.full((3, 1, 1), 0.5))
    assert spikes.flatten().tolist() == [0.0, 0.0, 1.0]


# --- round trips ------------------------------------------------------------------------------------------------------------
def everything():
    """One of each node."""
    return nn.Sequential(
        PerStep(nn.Conv2d(2, 3, (3, 5), padding=1, stride=(1, 2)), 3), flexsn.LIF(tau=3.0, v_threshold=0.2, r=torch.rand(3, 1, 1) + 0.5),
        PerStep(nn.AvgPool2d(2), 3), PerStep(SumPool2d((2, 1), stride=1), 3), nn.Dropout(), nn.Flatten(2), nn.Linear(9, 10),
        flexsn.IF(r=0.7), nn.Linear(10, 6, bias=False), Scale(torch.rand(6) + 1.0),
        flexsn.CubaLIF(tau=2.0, tau_syn=torch.rand(6) + 1.5, decay_input=False, v_reset=-0.1), nn.Unflatten(2, (2, 3)),
    )[:-1]  # fmt: skip


def rest():
    return nn.Sequential(
        nn.Linear(6, 5), flexsn.LeakyIntegrator(tau=4.0, decay_input=False), Delay(torch.tensor([0, 1, 2, 7, 3])), flexsn.CubaLI(v_leak=0.1)
    )


@pytest.fixture
def double():
    torch.set_default_dtype(f64)
    yield
    torch.set_default_dtype(torch.float32)


def numbers_of(graph):
    """Every array of every node by name."""
    return {f"{n}.{k}": v for n, node in graph.nodes.items() for k, v in node.to_dict().items() if isinstance(v, np.ndarray)}


def test_round_trip_through_a_file(double, tmp_path):
    net = nn.Sequential(*everything(), *rest()).eval()
    x = 2.0 * torch.rand(T, B, 2, 8, 8)
    graph = flexsn.to_nir(net, x, dt=1e-3)
    kinds = [type(node).__name__ for node in graph.nodes.values()]
    assert kinds == "Input Conv2d LIF AvgPool2d SumPool2d Flatten Affine IF Linear Scale CubaLIF Affine LI Delay CubaLI Output".split()
    nir.write(tmp_path / "net.nir", graph)
    again = flexsn.from_nir(tmp_path / "net.nir", backend="torch")
    assert again.dt == 1e-3
    for module in net.modules():
        if isinstance(module, flexsn.FlexSN):
            module.backend = "torch"
    want, got = net(x), again(x)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    assert net[1](net[0](x)).mean() > 0.05
    back = flexsn.to_nir(again, x)
    assert back.edges == graph.edges and back.metadata == {"dt": 1e-3, "dtype": "float64"}
    ours, theirs = numbers_of(graph), numbers_of(back)
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        np.testing.assert_allclose(theirs[name], value, rtol=1e-12, err_msg=name)


def test_what_is_read_can_be_trained_and_reset():
    net = flexsn.from_nir(nir.NIRGraph.from_list(affine(6, 4), lif(6), nir.Delay(full(6, 2e-4))), backend="cpp")
    assert isinstance(net.nodes["lif"], flexsn.LIF) and [n for n, _ in net.named_parameters()] == [
        "nodes.affine.weight",
        "nodes.affine.bias",
    ]
    x = torch.randn(T, B, 4)
    first = net(x)
    first.sum().backward()
    assert net.nodes["affine"].weight.grad.abs().sum() > 0
    assert not first[:2].any() and torch.equal(net(x)[:2], net.nodes["lif"](net.nodes["affine"](x))[:2]) is False
    flexsn.reset_net(net)
    assert torch.equal(net(x), first)


def test_delays_carry_over_from_call_to_call():
    delay, x = Delay(torch.tensor([0, 2, 5])), torch.rand(12, B, 3)
    whole = delay(x)
    for k, steps in enumerate((0, 2, 5)):
        assert torch.equal(whole[steps:, :, k], x[: 12 - steps, :, k]) and not whole[:steps, :, k].any()
    delay.reset()
    assert torch.equal(torch.cat([delay(piece) for piece in x.split([1, 4, 7])]), whole)


def test_one_dimensional_convolutions_and_float32(tmp_path):
    net = nn.Sequential(PerStep(nn.Conv1d(2, 3, 3, padding="same", dilation=2), 2), flexsn.LIF(v_threshold=0.1), nn.Flatten(2))
    x = torch.rand(5, B, 2, 10)
    nir.write(tmp_path / "net.nir", flexsn.to_nir(net, x))
    for module in (net[1], again := flexsn.from_nir(tmp_path / "net.nir", backend="torch")):
        module.backend = "torch"
    assert_spikes(again(x), net(x))


@pytest.mark.parametrize("inclusive", [True, False])
def test_what_is_exactly_at_the_threshold(inclusive, tmp_path):
    """Whole numbers hit thresholds. NIR spikes above them alone; which neuron spikes at one is kept beside."""
    spike = flexsn.surrogate.atan(inclusive=inclusive)
    ones = dict(decay_input=False, v_threshold=2.0, surrogate=spike, backend="torch")
    net = nn.Sequential(
        flexsn.LIF(**ones), flexsn.CubaLIF(**ones), flexsn.IF(surrogate=spike, backend="torch"), flexsn.CubaLI(backend="torch")
    )
    x = torch.randint(0, 4, (20, B, 8)).float()
    want = net(x)
    nir.write(tmp_path / "net.nir", flexsn.to_nir(net, x))
    graph = nir.read(tmp_path / "net.nir")
    assert [bool(graph.nodes[n].metadata.get("inclusive")) for n in "0123"] == [inclusive] * 3 + [False]
    read = flexsn.from_nir(graph, backend="torch")
    assert torch.equal(read(x), want) and want.any()
    flexsn.reset_net(read)
    again = flexsn.from_nir(flexsn.to_nir(read, x), surrogate=flexsn.surrogate.sigmoid(inclusive=not inclusive), backend="torch")
    assert torch.equal(again(x), want)


def test_a_threshold_layer_at_its_threshold():
    x = torch.tensor([[[0.5, 1.0, 1.5]]])
    for spike, at in ((flexsn.surrogate.atan, 1.0), (flexsn.surrogate.atan(inclusive=False), 0.0)):
        net = Threshold(torch.ones(3), spike)
        assert flexsn.from_nir(flexsn.to_nir(net, x))(x).flatten().tolist() == net(x).flatten().tolist() == [0.0, at, 1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_model_comes_back_in_its_dtype(dtype, tmp_path):
    net = nn.Sequential(nn.Linear(8, 6), flexsn.LIF(tau=3.0, v_threshold=0.2, r=torch.rand(6)), Scale(torch.rand(6))).to(dtype)
    x = 3.0 * torch.rand(T, B, 8)
    nir.write(tmp_path / "net.nir", flexsn.to_nir(net, x))
    read = flexsn.from_nir(tmp_path / "net.nir", backend="torch")
    assert {t.dtype for t in (*read.parameters(), *read.buffers())} == {dtype}
    net[1].backend = "torch"
    assert torch.equal(read(x.to(dtype)), net(x.to(dtype))) and net[1].states[0].dtype == dtype
    assert {p.dtype for p in flexsn.from_nir(tmp_path / "net.nir", dtype=torch.float32).parameters()} == {torch.float32}


def test_initial_states_that_are_where_nir_starts():
    net = nn.Sequential(
        flexsn.LIF(v_leak=0.25, initial_states=[0.25]), flexsn.CubaLIF(v_threshold=0.2, initial_states=[0.0, None]), flexsn.IF(v_reset=0.5)
    )
    for neuron in net:
        neuron.backend = "torch"
    x = 9.0 * torch.rand(T, B, 4)
    want = net(x)
    assert torch.equal(flexsn.from_nir(flexsn.to_nir(net, x), backend="torch")(x), want) and want.any()


# --- a forward of one's own -----------------------------------------------------------------------------------------------
class Residual(nn.Module):
    """Time folded into the batch by hand, and a branch."""

    def __init__(self):
        super().__init__()
        self.conv, self.lif, self.down = nn.Conv2d(2, 2, 3, padding=1), flexsn.LIF(v_threshold=0.1, backend="torch"), nn.Linear(32, 4)

    def forward(self, x):
        y = self.conv(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        y = self.lif(y + x)
        return self.down(torch.flatten(y, 2))


def test_branches_add_up_and_folding_is_no_node():
    net, x = Residual(), torch.rand(T, B, 2, 4, 4)
    graph = flexsn.to_nir(net, x)
    assert set(graph.edges) == {
        ("input", "conv"), ("conv", "lif"), ("input", "lif"), ("lif", "flatten"), ("flatten", "down"), ("down", "output")
    }  # fmt: skip
    torch.testing.assert_close(flexsn.from_nir(graph, backend="torch")(x), net(x))


def test_per_channel_constants_lie_along_the_channels():
    net = nn.Sequential(flexsn.LIF(learn_tau=True, per_channel=2, tau=torch.tensor([2.0, 5.0])))
    graph = flexsn.to_nir(net, torch.rand(T, B, 2, 3, 3), dt=1.0)
    np.testing.assert_allclose(graph.nodes["0"].tau, np.array([2.0, 5.0])[:, None, None] * np.ones((2, 3, 3)))


def test_a_learned_time_constant_is_written_as_it_is_now():
    lif = flexsn.ParametricLIF(tau=4.0, decay_input=False)
    graph = flexsn.to_nir(lif, torch.rand(T, B, 4), dt=1.0)
    node = graph.nodes["parametriclif"]
    np.testing.assert_allclose(node.tau, 4.0, rtol=1e-6)
    np.testing.assert_allclose(node.r, 4.0, rtol=1e-6)


def test_a_bounded_constant_is_written_as_any():
    lif = flexsn.LIF(tau=4.0, learn_tau=True, bounds={"tau": (1.0, None)}, decay_input=False)
    np.testing.assert_allclose(flexsn.to_nir(nn.Sequential(lif), torch.rand(T, B, 4), dt=1.0).nodes["0"].tau, 4.0, rtol=1e-6)


def test_single_step_models():
    net = nn.Sequential(nn.Linear(4, 3), flexsn.LIF(step_mode="s"), Delay(2, step_mode="s"))
    graph = flexsn.to_nir(net, torch.rand(B, 4))
    assert graph.nodes["1"].tau.shape == (3,) and np.array_equal(graph.nodes["2"].delay, np.full(3, 2e-4))
    with pytest.raises(InterchangeError, match=r"`1` \(LIF\): takes single steps, and is called with a sequence"):
        flexsn.to_nir(net[:2].append(Delay(2)), torch.rand(T, B, 4))


# --- weights that hooks set -------------------------------------------------------------------------------------------------
def pruned(layer):
    return prune.l1_unstructured(layer, "weight", 0.5)


@pytest.mark.parametrize("change", [pruned, nn.utils.weight_norm, nn.utils.spectral_norm], ids=["pruned", "weight norm", "spectral norm"])
@pytest.mark.filterwarnings("ignore:.*(weight|spectral)_norm.*is deprecated:FutureWarning")
def test_weights_are_written_as_they_are_after_the_last_optimizer_step(change):
    torch.manual_seed(0)
    net = nn.Sequential(change(nn.Linear(8, 8)), flexsn.LIF(v_threshold=0.05, backend="torch"))
    optimizer = torch.optim.SGD(net.parameters(), lr=5.0)
    x = 3.0 * torch.randn(T, B, 8)
    net(x).mean().backward()
    stale = net[0].weight.detach().clone()
    optimizer.step()
    net.eval()  # a spectral norm goes on with its iteration in training
    flexsn.reset_net(net)
    graph = flexsn.to_nir(net, x)
    want = net(x)
    assert not torch.equal(torch.tensor(graph.nodes["0"].weight), stale)
    np.testing.assert_array_equal(graph.nodes["0"].weight, net[0].weight.detach())
    assert_spikes(flexsn.from_nir(graph, backend="torch")(x), want)


# --- refusals -------------------------------------------------------------------------------------------------------------
def custom(x, v):
    return x + v, v * 0.5


class Squares(nn.Module):
    def forward(self, x):
        return x * x


class Loops(nn.Module):
    def forward(self, x):
        return torch.stack([step for step in x])


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.lif = flexsn.LIF()

    def forward(self, x):
        return self.lif(self.lif(x))


OUT = {
    "initial states": (lambda: flexsn.LIF(initial_states=[0.9]), r"`1` \(LIF\): starts from initial_states=\(0.9,\).*starts at `v_leak`"),
    "a current": (lambda: flexsn.CubaLI(initial_states=[None, 0.1]), r"`1` \(CubaLI\).*at `v_leak`, with no current"),
    "a start that is computed": (lambda: flexsn.IF(initial_states=lambda x: [x[0]]), r"`1` \(IF\).*starts at `v_reset`"),
    "soft reset": (lambda: flexsn.LIF(v_reset=None), r"`1` \(LIF\).*soft reset"),
    "no reset": (lambda: flexsn.LIF(v_reset="never"), "never"),
    "several spikes": (
        lambda: flexsn.LIF(surrogate=flexsn.surrogate.multi_level_spike_count(max_spike_count=3)),
        r"`1` \(LIF\): has spikes of 3 at a distance of 3 to the threshold; NIR's are 0 or 1",
    ),
    "scaled": (lambda: flexsn.IF(surrogate=lambda h: 2.0 * flexsn.surrogate.atan(h)), "has spikes of 2 .* NIR's are 0 or 1"),
    "smooth": (lambda: flexsn.CubaLIF(surrogate=torch.sigmoid), "has spikes of 0.953 at a distance of 3 .* NIR's are 0 or 1"),
    "half at the threshold": (
        lambda: flexsn.IF(surrogate=lambda h: torch.heaviside(h, torch.tensor(0.5))),
        "has spikes of 0.5 at a .* of 0 ",
    ),
    "another threshold": (lambda: flexsn.IF(surrogate=lambda h: flexsn.surrogate.atan(h - 0.2)), "has spikes of 0 at a distance of 0.1 "),
    "below": (lambda: flexsn.IF(surrogate=lambda h: torch.sign(h)), "has spikes of -1 at a distance of -3 "),
    "a threshold that counts": (lambda: Threshold(torch.ones(4), torch.relu), r"`1` \(Threshold\): has spikes of 3 .* NIR's are 0 or 1"),
    "core": (lambda: flexsn.FlexSN(custom, num_states=1), r"`1` \(FlexSN\): NIR has no primitive for the core `custom`"),
    "batch norm": (lambda: nn.BatchNorm1d(4), "Fold it"),
    "max pool": (lambda: PerStep(nn.MaxPool2d(2), 3), "MaxPool2d"),
    "square": (Squares, "calls `mul`"),
    "loop": (Loops, "loop over time"),
    "twice": (Twice, "called twice"),
    "several dims": (lambda: nn.Sequential(nn.Unflatten(2, (2, 2)), nn.Linear(2, 2)), "Unflatten"),
}


@pytest.mark.parametrize("name", OUT)
def test_what_nir_cannot_say_is_refused(name):
    make, message = OUT[name]
    with pytest.raises(InterchangeError, match=message) as raised:
        flexsn.to_nir(nn.Sequential(nn.Identity(), make()), torch.rand(T, B, 4))
    error = raised.value
    assert str(error) == "\n  ".join(filter(None, [error.reason, error.hint]))  # nothing of torch.fx


def test_every_surrogate_that_steps_is_taken():
    def of_differences(h):  # which rounds
        smooth = torch.sigmoid(3.7 * h)
        return smooth + (flexsn.surrogate.atan(h) - smooth).detach()

    others = {"custom_surrogate", "poisson_pass", "SSO", "multi_level_spike_count"}  # which want more than x, or count
    spikes = [getattr(flexsn.surrogate, name) for name in flexsn.surrogate.__all__ if name not in others]
    spikes += [of_differences, flexsn.surrogate.atan(alpha=torch.rand(4) + 1.0)]
    for spike in spikes:
        graph = flexsn.to_nir(nn.Sequential(flexsn.LIF(surrogate=spike), Threshold(torch.ones(4), spike)), torch.rand(T, B, 4))
        assert list(graph.nodes) == ["input", "0", "1", "output"]


def doubled(module, inputs, output=None):
    return (2.0 * inputs[0],) if output is None else 2.0 * output


def wrap(module):
    inner = module.forward
    module.forward = lambda x: inner(2.0 * x)


CALLS = {  # what is done to a module, and what is said of it
    "forward hook": (lambda m: m.register_forward_hook(doubled), r"has the hook `doubled`; NIR has no place"),
    "pre-hook": (lambda m: m.register_forward_pre_hook(doubled), r"has the hook `doubled`; NIR has no place"),
    "own forward": (wrap, r"has a `forward` of its own on the instance; NIR has no place"),
}
PLACES = {  # `get_submodule`'s name, and how it is called
    "layer": ("0.0", r"`0\.0` \(Linear\): "),
    "container": ("0", r"`0` \(Sequential\): "),
    "neuron": ("1", r"`1` \(LIF\): "),
    "layer per step": ("2.module", r"`2\.module` \(Conv1d\): "),
    "model": ("", r"the model \(Sequential\): "),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", CALLS)
def test_what_a_call_runs_beside_the_layers_is_refused(call, place):
    (change, message), (name, called) = CALLS[call], PLACES[place]
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), flexsn.LIF(), PerStep(nn.Conv1d(B, 2, 3), 2))
    x = torch.rand(T, 1, B, 4)
    net[0][0].register_full_backward_hook(lambda *_: None)  # which a forward does not run
    change(net.get_submodule(name))
    with pytest.raises(InterchangeError, match=called + message):
        flexsn.to_nir(net, x)


def test_compiled_and_lazy_models_are_told_what_to_do():
    x = torch.rand(T, B, 4)
    with pytest.raises(InterchangeError, match=r"the model \(OptimizedModule\): is compiled[\s\S]*given to `torch.compile`"):
        flexsn.to_nir(torch.compile(nn.Linear(4, 3), backend="eager"), x)
    with pytest.raises(InterchangeError, match=r"`0` \(LazyLinear\): has no weights yet[\s\S]*Call the model once"):
        flexsn.to_nir(nn.Sequential(nn.LazyLinear(3)), x)


@pytest.mark.parametrize("layers", [None, ["0.0"], ["0"], [""]], ids=str)
def test_a_monitor_may_be_on_and_does_not_count(layers):
    net, x = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), flexsn.LIF()), torch.rand(T, B, 4)
    want = flexsn.to_nir(net, x)
    with flexsn.monitor(net, layers=layers) as seen:
        got = flexsn.to_nir(net, x)
    assert got.edges == want.edges and [record.calls for record in seen.layers.values()] == [0]
    assert all(np.array_equal(value, numbers_of(want)[name]) for name, value in numbers_of(got).items())


def test_a_sequence_for_a_model_of_single_steps():
    x = torch.rand(T, B, 4)
    with pytest.raises(
        InterchangeError, match=r"`0` \(Linear\).*\n.*The neurons take single steps, so the sample must be `\[B, \*shape\]`"
    ):
        flexsn.to_nir(nn.Sequential(nn.Linear(4, 3), flexsn.LIF(step_mode="s")), x)
    with pytest.raises(InterchangeError, match=r"`1` \(IF\): takes single steps, and is called with a sequence"):
        flexsn.to_nir(nn.Sequential(flexsn.LIF(), flexsn.IF(step_mode="s")), x)


def test_what_is_no_model_and_no_sample():
    for wrong, why in ((lambda x: x, "a function"), (nn.Linear, "the class Linear"), (3, "a int")):
        with pytest.raises(InterchangeError, match=f"to_nir takes a module, not {why}"):
            flexsn.to_nir(wrong, torch.rand(T, B, 4))
    with pytest.raises(InterchangeError, match="sample_input must be a tensor, not a list"):
        flexsn.to_nir(flexsn.LIF(), [1.0])


def test_errors_of_the_model_are_pytorch_s_own():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        flexsn.to_nir(nn.Sequential(nn.Linear(3, 4)), torch.rand(T, B, 4))
    assert "executing" not in str(raised.value)  # nothing of torch.fx


def test_pools_and_linears_that_nir_does_not_have():
    x = torch.rand(T, B, 2, 4, 4)
    for make, message in [
        (PerStep(nn.AvgPool2d(2, ceil_mode=True), 3), "ceil_mode"),
        (PerStep(nn.AvgPool2d(2, padding=1, count_include_pad=False), 3), "count_include_pad"),
        (PerStep(nn.LPPool2d(2, 2), 3), "norm 2"),
        (PerStep(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), 3), "circular"),
        (nn.Linear(4, 4), "Flatten first"),
        (nn.Flatten(1), "flattens time or batch"),
    ]:
        with pytest.raises(InterchangeError, match=message):
            flexsn.to_nir(nn.Sequential(make), x)


IN = {
    "integrator": (lambda: nir.I(r=full(4, 1.0)), r"node `i`: flexsn has nothing for nir\.I"),
    "delay": (lambda: nir.Delay(full(4, 1.5e-4)), r"node `delay` \(nir.Delay\): delays must be whole numbers"),
    "tau": (lambda: lif(4, tau=0.0), r"node `lif` \(nir.LIF\): tau must be positive"),
    "weight": (lambda: nir.Linear(np.ones((2, 4, 4))), "takes a matrix"),
}


@pytest.mark.parametrize("name", IN)
def test_what_flexsn_does_not_have_is_refused(name):
    make, message = IN[name]
    with pytest.raises(InterchangeError, match=message):
        flexsn.from_nir(nir.NIRGraph.from_list(make()))


def test_graphs_of_another_form_are_refused():
    with pytest.raises(InterchangeError, match=r"takes a nir\.NIRGraph"):
        flexsn.from_nir(lif(4))
    for dt in (0.0, -1.0, "a", float("nan"), float("inf"), torch.ones(2)):
        with pytest.raises(InterchangeError, match="dt is the length of a step in seconds, not"):
            flexsn.from_nir(nir.NIRGraph.from_list(lif(4)), dt=dt)
        with pytest.raises(InterchangeError, match="dt is the length of a step in seconds, not"):
            flexsn.to_nir(flexsn.LIF(), torch.rand(T, B, 4), dt=dt)
    for dtype in ("float64", torch.int32):
        with pytest.raises(InterchangeError, match="dtype must be a floating dtype"):
            flexsn.from_nir(nir.NIRGraph.from_list(lif(4)), dtype=dtype)
    nodes = {"a": nir.Input([4]), "b": nir.Input([4]), "lif": lif(4), "out": nir.Output([4])}
    with pytest.raises(InterchangeError, match="one input and one output"):
        flexsn.from_nir(nir.NIRGraph(nodes, [("a", "lif"), ("b", "lif"), ("lif", "out")]))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InterchangeError, match=r"there is no file '.*absent\.nir'"):
        flexsn.from_nir(tmp_path / "absent.nir")
    (tmp_path / "text.nir").write_text("no graph")
    for path in (tmp_path / "text.nir", tmp_path):
        with pytest.raises(InterchangeError, match="is no NIR file"):
            flexsn.from_nir(str(path))


def test_without_the_package(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "nir", None)
    with pytest.raises(ImportError, match="pip install nir"):
        flexsn.to_nir(flexsn.LIF(), torch.rand(T, B, 4))


# --- subgraphs --------------------------------------------------------------------------------------------------------------
def test_subgraphs_are_dissolved():
    inner = nir.NIRGraph.from_list(affine(6, 4), lif(6))
    nodes = {"input": nir.Input([4]), "block": inner, "readout": affine(3, 6), "output": nir.Output([3])}
    edges = [("input", "block"), ("block", "readout"), ("readout", "output")]
    x = torch.randn(T, B, 4)
    got = flexsn.from_nir(nir.NIRGraph(nodes, edges, type_check=False), backend="torch")
    assert list(got.nodes) == ["input", "readout", "output", "block_affine", "block_lif"]
    want = flexsn.from_nir(nir.NIRGraph.from_list(affine(6, 4), lif(6), affine(3, 6)), backend="torch")
    assert torch.equal(got(x), want(x))


def test_a_lock_that_goes_is_waited_for(tmp_path, monkeypatch):
    """HDF5 locks a file that it writes; a compiler that is started meanwhile inherits the lock, and holds it until it runs."""
    net, x = torch.nn.Sequential(torch.nn.Linear(3, 4), flexsn.LIF(tau=2.0)), torch.randn(5, 2, 3)
    nir.write(tmp_path / "net.nir", flexsn.to_nir(net, x))
    read, calls = nir.read, []

    def locked(*args, **options):
        calls.append(1)
        if len(calls) < 3:
            raise BlockingIOError("unable to lock file")
        return read(*args, **options)

    monkeypatch.setattr(nir, "read", locked)
    torch.testing.assert_close(flexsn.from_nir(tmp_path / "net.nir")(x), net(x))
    monkeypatch.setattr(nir, "read", lambda *args, **options: (_ for _ in ()).throw(BlockingIOError("unable to lock file")))
    with pytest.raises(InterchangeError, match="unable to lock file"):
        flexsn.from_nir(tmp_path / "net.nir")
