"""`flexsn.monitor` records what happened, leaves the network as it was, and says what is wrong with it."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import flexsn
from flexsn.errors import MonitorError


def lif(x, v):
    h = v + (x - v) / 2.0
    s = flexsn.surrogate.atan(h - 1.0)
    return s, h * (1.0 - s)


def lif_learned(x, v, w):
    h = v + (x - v) * torch.sigmoid(w)
    s = flexsn.surrogate.atan(h - 1.0)
    return s, h * (1.0 - s)


def network(**options):
    torch.manual_seed(0)
    first = flexsn.FlexSN(lif_learned, 1, 1, params=[nn.Parameter(torch.zeros(5))], **options)
    net = nn.Sequential(nn.Linear(6, 5), first, nn.Linear(5, 4), flexsn.FlexSN(lif, num_states=1, **options))
    for linear in net[::2]:
        nn.init.uniform_(linear.weight, 0.0, 1.0)
    return net


X = (torch.rand(9, 3, 6, generator=torch.Generator().manual_seed(1)) < 0.5).float()


def run(net):
    """Output, gradients and carried states of two calls."""
    net.zero_grad()
    y = net(X)
    y.square().mean().backward()
    flexsn.detach_states(net)
    z = net(X)
    z.mean().backward()
    results = [y, z, *(p.grad for p in net.parameters()), *(v for m in net if isinstance(m, flexsn.FlexSN) for v in m.states)]
    return [t.detach().clone() for t in results]


def traces(net):
    """All that a monitor might leave behind."""
    hooks = [len(h) for m in net.modules() for h in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)]
    params = [len(p._backward_hooks or ()) for p in net.parameters()]
    stored = [(m.store_state_seqs, m.state_seqs is None) for m in net.modules() if isinstance(m, flexsn.FlexSN)]
    return hooks, params, stored, sorted(net.state_dict())


# --- the model stays as it is -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(
    "asked", [{}, {"spikes": True, "states": True, "layers": ["0", "1", "2", "3"], "keep": None}], ids=["rates", "all"]
)
def test_results_have_the_same_bits(backend, asked):
    net = network(backend=backend)
    expected = run(copy.deepcopy(net))
    with flexsn.monitor(net, **asked) as seen:
        watched = run(net)
    assert len(watched) == len(expected) and all(torch.equal(a, b) for a, b in zip(watched, expected, strict=True))
    assert watched[0].sum() > 0 and seen["1"].calls == 2
    flexsn.reset_net(net)
    assert all(torch.equal(a, b) for a, b in zip(run(net), expected, strict=True)), "and afterwards"


@pytest.mark.parametrize("store", [False, True])
def test_nothing_is_left_behind(store):
    net = network(store_state_seqs=store)
    before = traces(net)
    with flexsn.monitor(net, spikes=True, states=True) as seen:
        assert traces(net) != before
        net(X)
    after = traces(net)
    assert after[:2] == before[:2] and after[3] == before[3]
    assert [s for s, _ in after[2]] == [store, store] and [none for _, none in after[2]] == [not store] * 2
    net(X)
    assert seen["1"].calls == 1, "it has stopped counting"


def test_nothing_is_left_behind_after_an_exception():
    net = network()
    before = traces(net)
    with pytest.raises(RuntimeError, match="shapes"), flexsn.monitor(net, spikes=True, states=True) as seen:
        net(X)
        net(torch.zeros(9, 3, 7))
    assert traces(net) == before
    assert seen["1"].calls == 1 and seen["1"].rate > 0, "what was seen until then is there"


@pytest.mark.parametrize("how", ["copy", "file"])
@pytest.mark.parametrize("store", [False, True])
def test_copies_and_files_made_inside_are_as_without(store, how, tmp_path):
    """Hooks, records and state sequences that a monitor asked for are the monitor's; layers that are no neurons are watched too."""
    net = network(store_state_seqs=store)
    net(X)
    with flexsn.monitor(net, ["0", "1", "3"], spikes=True) as seen, flexsn.monitor(net, states=["v"]):
        net(X)
        if how == "copy":
            made = copy.deepcopy(net)
        else:
            torch.save(net, tmp_path / "net.pt")
            made = torch.load(tmp_path / "net.pt", weights_only=False)
        calls = seen["1"].calls
        flexsn.reset_net(made)
        y = made(X)
        assert seen["1"].calls == calls  # it does not count the copy's
        for neuron in (made[1], made[3]):
            assert neuron.store_state_seqs is store and (neuron.state_seqs is not None) is store
    for neuron in (net[1], net[3]):
        assert neuron.store_state_seqs is store
    flexsn.reset_net(net)
    assert torch.equal(net(X), y)
    flexsn.reset_net(made)
    exported = torch.export.export(made, (X,)).module()
    assert torch.equal(exported(X), y)
    with flexsn.monitor(made) as again:
        flexsn.reset_net(made)
        made(X)
    assert again["1"].calls == 1


def test_monitors_may_be_nested():
    net = network()
    before = traces(net)
    with flexsn.monitor(net, states=True) as outer:
        net(X)
        with flexsn.monitor(net, states=True) as inner:
            net(X)
        net(X)
    assert (outer["1"].calls, inner["1"].calls) == (3, 1)
    assert len(outer["1"].states["v"]) == len(inner["1"].states["v"]) == 1
    assert traces(net) == before


# --- what is recorded ---------------------------------------------------------------------------------------------------------
def test_rates_are_means_over_time_batch_and_calls():
    net = network()
    y = torch.stack([net[:2](X), net[:2](X)]).detach()  # states are carried from the first to the second
    flexsn.reset_net(net)
    with flexsn.monitor(net) as seen:
        net(X), net(X)
    layer = seen["1"]
    assert list(seen.layers) == ["1", "3"] and layer.calls == 2 and layer.kind == "FlexSN"
    torch.testing.assert_close(layer.rates, y.double().mean((0, 1, 2)))
    assert layer.rate == pytest.approx(y.double().mean().item()) and 0 < layer.rate < 1
    assert layer.spikes is None and not layer.states, "whole sequences on request only"


def test_silent_and_saturated_neurons_are_counted():
    net = nn.Sequential(flexsn.FlexSN(lif, num_states=1))
    x = torch.zeros(10, 2, 8)
    x[:, :, 0] = 100.0  # spikes always
    x[4, 1, 1] = 100.0  # once in one sample
    with flexsn.monitor(net) as seen:
        net(x)
    layer = seen["0"]
    assert (layer.silent, layer.saturated) == (6 / 8, 1 / 8)
    torch.testing.assert_close(layer.rates, torch.tensor([1.0, 1 / 20] + [0.0] * 6, dtype=torch.float64))


@pytest.mark.parametrize("shape, neurons", [((7, 2, 3, 4, 5), (3, 4, 5)), ((7, 2, 3), (3,)), ((7, 3), (3,)), ((7,), (7,))])
def test_which_dims_are_neurons(shape, neurons):
    with flexsn.monitor(model := nn.Identity(), layers=[""]) as seen:
        model(y := torch.rand(shape))
    assert seen[""].rates.shape == neurons
    assert seen[""].rates.sum().item() == pytest.approx(y.double().sum().item() * len(seen[""].rates.flatten()) / y.numel())
    assert "(model)" in str(seen) and not seen[""].spiking and seen[""].saturated is None


def test_calls_of_several_shapes_keep_the_mean():
    with flexsn.monitor(model := nn.Identity(), layers=[""]) as seen:
        model(torch.ones(4, 2, 3)), model(torch.zeros(4, 2, 5))
    assert seen[""].rate == pytest.approx(24 / 64)
    assert seen[""].rates is None and seen[""].silent is None
    assert " - " in str(seen)


def test_spikes_and_states_are_those_of_the_calls():
    net = network()
    with flexsn.monitor(net, spikes=True, states=["v"], keep=2) as seen:
        outputs = [net(X) for _ in range(3)]
    record = seen["3"]
    assert len(record.spikes) == 2 and record.calls == 3
    assert all(torch.equal(a, b) for a, b in zip(record.spikes, outputs[1:], strict=True))
    assert not any(s.requires_grad for s in record.spikes) and set(record.states) == {"v"}
    flexsn.reset_net(net)
    net[3].store_state_seqs = True
    for k in range(3):
        net(X)
        if k:
            assert torch.equal(record.states["v"][k - 1], net[3].state_seqs[0])


def test_a_record_is_a_copy():
    net = nn.Sequential(flexsn.FlexSN(lif, num_states=1))
    with flexsn.monitor(net, spikes=True) as seen, torch.no_grad():
        y = net(3 * torch.rand(5, 2, 4))
        kept = y.clone()
        y.zero_()
    assert torch.equal(seen["0"].spikes[-1], kept) and kept.sum() > 0


def test_states_of_an_nn_module_core_by_its_own_names():
    class Two(nn.Module):
        def forward(self, x, fast, slow):
            fast, slow = 0.5 * fast + x, 0.9 * slow + fast
            return flexsn.surrogate.atan(slow - 1.0), fast, slow

    net = nn.Sequential(flexsn.FlexSN(Two(), num_states=2))
    with flexsn.monitor(net, states="slow") as seen:
        net(X)
    assert set(seen["0"].states) == {"slow"} and seen["0"].states["slow"][-1].shape == X.shape
    with flexsn.monitor(net, states=True) as seen:
        net(X)
    assert set(seen["0"].states) == {"fast", "slow"}


def test_single_steps():
    net = nn.Sequential(flexsn.FlexSN(lif, num_states=1, step_mode="s"))
    with flexsn.monitor(net, spikes=True, states=True, keep=None) as seen:
        y = torch.stack([net(x) for x in 2 * X])
    assert torch.equal(torch.stack(list(seen["0"].spikes)), y) and y.sum() > 0
    torch.testing.assert_close(seen["0"].rates, y.double().mean((0, 1)))
    whole = flexsn.scan(lif, [2 * X], [None], store_state_seqs=True).states[0]
    torch.testing.assert_close(torch.cat(list(seen["0"].states["v"])), whole)


def test_gradient_norms_are_those_of_autograd():
    net = network()
    hidden = net[:2](X)
    hidden.retain_grad()
    y = net[2:](hidden)
    y.retain_grad()
    y.square().mean().backward()
    grads = {name: p.grad.clone() for name, p in net.named_parameters()}
    flexsn.reset_net(net)
    net.zero_grad()
    with flexsn.monitor(net, layers=["1", "2", "3"]) as seen:
        net(X).square().mean().backward()
    assert seen["1"].gradient_norm == pytest.approx(hidden.grad.norm().item(), rel=1e-5)
    assert seen["3"].gradient_norm == pytest.approx(y.grad.norm().item(), rel=1e-5)
    assert seen["1"].param_gradient_norms == {"params.w": pytest.approx(grads["1.params.w"].norm().item(), rel=1e-5)}
    both = {"weight": grads["2.weight"].norm().item(), "bias": grads["2.bias"].norm().item()}
    assert seen["2"].param_gradient_norms == pytest.approx(both, rel=1e-5)
    assert seen["2"].param_gradient_norm == pytest.approx((both["weight"] ** 2 + both["bias"] ** 2) ** 0.5, rel=1e-5)
    assert seen["3"].param_gradient_norm is None, "it has no parameters"


def test_gradient_norms_over_several_passes_are_root_mean_squares():
    layer = nn.Linear(2, 1, bias=False)
    with flexsn.monitor(layer, layers=[""]) as seen:
        for factor in (1.0, 7.0):
            (factor * layer(torch.tensor([[3.0, 4.0]])).sum()).backward()
    assert seen[""].gradient_norm == pytest.approx(5.0)  # sqrt((1 + 49) / 2)
    assert seen[""].param_gradient_norms["weight"] == pytest.approx(25.0)
    with flexsn.monitor(layer, layers=[""], gradients=False) as seen:
        layer(torch.ones(1, 2)).sum().backward()
    assert seen[""].param_gradient_norm is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_calls_that_a_checkpoint_runs_again_count_once(reentrant):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), flexsn.LIF(v_threshold=0.3), nn.Linear(4, 4), flexsn.LIF(v_threshold=0.3))
    x, seen = 3.0 * torch.randn(6, 2, 4), []
    for run in (net, lambda x: checkpoint(net, x, use_reentrant=reentrant)):
        flexsn.reset_net(net)
        with flexsn.monitor(net, spikes=True) as monitor:
            run(x.clone().requires_grad_()).sum().backward()
        seen.append([(layer.calls, layer.rate, layer.gradient_norm, len(layer.spikes)) for layer in monitor.layers.values()])
    assert seen[0] == seen[1] and seen[0][0][0] == 1 and seen[0][0][2] > 0


def test_a_call_whose_output_is_not_in_the_loss():
    """The backward reaches it through the carried states only."""
    net = nn.Sequential(flexsn.FlexSN(lif, num_states=1))
    x = (3 * torch.rand(9, 2, 4)).requires_grad_()
    with flexsn.monitor(net) as seen:
        net(x)
        y = net(x)
        y.sum().backward()
    assert seen["0"].calls == 2 and seen["0"].gradient_norm == pytest.approx(y.numel() ** 0.5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it itself
@pytest.mark.slow
def test_inside_a_compiled_function():
    net = network()
    whole = torch.compile(lambda x: net(x).sum(), fullgraph=True, backend="eager")
    pieces = torch.compile(lambda x: net(x).sum(), backend="eager")
    with flexsn.monitor(net, spikes=True, states=True) as seen:
        pieces(X).backward()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"flexsn\.monitor keeps values"):
            whole(X)
    flexsn.reset_net(net)
    assert seen["1"].calls == 1 and seen["1"].rate > 0 and seen["1"].gradient_norm > 0
    with torch.no_grad():
        assert whole(X) == seen["3"].spikes[-1].sum(), "and once it is off, in one graph"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_function_that_was_compiled_and_called_before():
    net = network()
    compiled = torch.compile(net, backend="eager")
    for spikes in (False, True):
        compiled(X)
        with flexsn.monitor(net, spikes=spikes) as seen:
            flexsn.reset_net(net)
            compiled(X)
        flexsn.reset_net(net)
        assert seen["1"].calls == seen["3"].calls == 1 and seen["1"].rate > 0
        compiled(X)
        assert seen["1"].calls == 1
    assert copy.deepcopy(net)(X) is not None


# --- what it says -------------------------------------------------------------------------------------------------------------
def problems_of(net, x, loss=None, **options):
    with flexsn.monitor(net, **options) as seen:
        y = net(x)
        if loss is not None:
            loss(y).backward()
    return seen


def test_silent_and_saturated_layers_are_flagged():
    layers = nn.Sequential(*(flexsn.FlexSN(lif, num_states=1) for _ in range(2)))
    healthy = problems_of(layers[:1], 3 * torch.rand(20, 4, 6))
    assert healthy.problems == []
    silent = problems_of(layers, torch.zeros(20, 4, 6))
    assert [p.split(":")[0] for p in silent.problems] == ["layer 0 is silent", "layer 1 is silent"]
    flexsn.reset_net(layers)
    saturated = problems_of(layers[:1], torch.full((20, 4, 6), 100.0))
    assert [p.split(":")[0] for p in saturated.problems] == ["layer 0 is saturated"]
    saturated.limits.saturated = 1.0
    assert saturated.problems == [], "limits can be moved"
    assert all(f"! {p}" in str(silent) for p in silent.problems)


def test_layers_that_were_not_called_are_flagged():
    net = nn.ModuleDict({"used": flexsn.FlexSN(lif, num_states=1), "unused": flexsn.FlexSN(lif, num_states=1)})
    with flexsn.monitor(net) as seen:
        net["used"](3 * torch.rand(9, 2, 4))
    assert seen.problems == ["layer unused was not called"]
    assert seen["unused"].rate is None and "unused  FlexSN      0       -" in str(seen)


def test_calls_of_no_steps_are_calls():
    seen = problems_of(nn.Sequential(flexsn.FlexSN(lif, num_states=1)), torch.zeros(0, 4, 6, requires_grad=True), torch.sum)
    assert seen["0"].calls == 1 and seen.problems == []


def test_vanishing_and_missing_gradients_are_flagged():
    class Scale(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(factor))

        def forward(self, x):
            return x * self.factor

    net = nn.Sequential(Scale(1.0), Scale(1.0), Scale(1e-4))
    kinds = {"layers": ["0", "1", "2"]}
    small = problems_of(net, torch.rand(3, 2), torch.sum, **kinds)
    assert [p.split(":")[0] for p in small.problems] == ["the gradient vanishes before layer 0", "the gradient vanishes before layer 1"]
    assert "1.0e-04 of the largest" in small.problems[0]
    none = problems_of(net, torch.rand(3, 2), lambda y: (y.detach() * net[2].factor).sum(), **kinds)
    assert none.problems == [], "no gradient anywhere, nothing to compare with"
    net.insert(2, nn.Tanh())
    net[1].factor.data.fill_(1e4)  # tanh is flat there: the gradient is 0
    zero = problems_of(net, torch.rand(3, 2), torch.sum, layers=["1", "2", "3"])
    assert zero.problems[0].startswith("the gradient vanishes before layer 1: 0, 0.0e+00")
    infinite = problems_of(nn.Sequential(Scale(1.0)), torch.rand(3), lambda y: y.sum() * float("inf"), layers=["0"])
    assert infinite.problems == ["the gradient at layer 0 is not finite"]
    cut = nn.Sequential(Scale(1.0), Scale(1.0))
    cut[0].register_forward_hook(lambda module, args, y: y.detach())
    assert problems_of(cut, torch.rand(3), torch.sum, layers=["0", "1"]).problems == ["no gradient reaches layer 0"]


def test_values_that_are_not_finite_are_flagged():
    seen = problems_of(nn.Identity(), torch.tensor([float("nan"), 1.0]), layers=[""])
    assert seen.problems == ["the model gives values that are not finite"]


def test_report_is_a_table():
    net = network()
    seen = problems_of(net, X, torch.sum)
    head, *rows = str(seen).splitlines()
    assert head.split() == ["layer", "class", "calls", "rate", "silent", "saturated", "|dL/dy|", "|dL/dw|"]
    assert len(rows) == 2 + len(seen.problems)
    for row, layer in zip(rows, seen.layers.values(), strict=False):
        name, kind, calls, rate, silent, saturated, norm, params = row.split()
        assert (name, kind, calls) == (layer.name, "FlexSN", "1") and float(rate) == pytest.approx(layer.rate, abs=1e-4)
        assert (silent, saturated) == (f"{layer.silent:.0%}", f"{layer.saturated:.0%}")
        assert norm == f"{layer.gradient_norm:.2e}"
        assert params == ("-" if name == "3" else f"{layer.param_gradient_norm:.2e}")
    assert len({len(line) for line in (head, *rows[:1])}) == 1, "columns line up"


# --- what is refused ----------------------------------------------------------------------------------------------------------
def test_names_that_are_not_there():
    net = nn.ModuleDict({"encoder": flexsn.FlexSN(lif, num_states=1)})
    with pytest.raises(MonitorError, match=r"no layer 'encodr'[\s\S]*'encoder'"):
        flexsn.monitor(net, layers=["encodr"])
    with pytest.raises(MonitorError, match=r"no monitored layer has a state 'u'[\s\S]*v"):
        flexsn.monitor(net, states=["u"])
    with pytest.raises(MonitorError, match=r"'decoder' is not monitored[\s\S]*encoder"):
        flexsn.monitor(net, layers="encoder")["decoder"]
    with pytest.raises(MonitorError, match=r"no FlexSN[\s\S]*'0'"):
        flexsn.monitor(nn.Sequential(nn.Linear(2, 2)))


def test_a_monitor_that_is_on_cannot_be_turned_on():
    with flexsn.monitor(network()) as seen:
        with pytest.raises(MonitorError, match="on already"):
            seen.__enter__()
        assert seen._handles, "the first one still records"


def test_outputs_that_are_no_tensors():
    class Named(nn.Module):
        def forward(self, x):
            return {"y": x}

    with pytest.raises(MonitorError, match="the model returns dict"), flexsn.monitor(model := Named(), layers=[""]):
        model(X)


def test_transforms_and_compiled_models():
    net = network()
    with pytest.raises(MonitorError, match=r"layer 1 runs under torch\.func"), flexsn.monitor(net):
        torch.func.vmap(net, in_dims=1)(X)
    flexsn.reset_net(net)
    layer = nn.Linear(2, 2)
    layer.compile(backend="eager")
    for compiled in (torch.compile(network(), backend="eager"), nn.Sequential(layer)):
        with pytest.raises(MonitorError, match="compiled"):
            flexsn.monitor(compiled)


# --- mistakes -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options, why",
    [
        ({"layers": ["9"]}, "the model has no layer '9'\\n  There are: '0', '1', .*'2', '3'"),
        ({"layers": [3]}, "the model has no layer 3\\n  There are: '3'"),
        ({"layers": 3}, "`layers` must be names"),
        ({"layers": []}, "`layers` must be names"),
        ({"states": "w"}, r"no monitored layer has a state 'w'\n  There are \['v'\], in \['1', '3'\]"),
        ({"states": ["v", 3]}, "has a state 3"),
        ({"states": True, "layers": "0"}, "has a state at all"),
        ({"states": None}, "`states` must be True, False or names"),
        ({"states": 3}, "`states` must be True, False or names"),
        ({"spikes": ["1"]}, "`spikes` must be True or False"),
        ({"gradients": None}, "`gradients` must be True or False"),
        *(({"keep": wrong}, "`keep` must be a number of calls") for wrong in (0, -1, 2.5, "all", True)),
    ],
    ids=repr,
)
def test_options_that_are_no_options(options, why):
    with pytest.raises(MonitorError, match=why):
        flexsn.monitor(network(), **options)


def test_what_is_no_model_is_refused():
    net = network()
    for wrong, why in ((3, "a int"), (None, "a NoneType"), ([net], "a list"), (nn.Linear, "the class Linear"), (lif, "a function")):
        with pytest.raises(MonitorError, match=f"into a model, not into {why}"):
            flexsn.monitor(wrong)
    with pytest.raises(MonitorError, match=r"no FlexSN\n  Name the layers to look at, `layers=\[...\]`, of '0'"):
        flexsn.monitor(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(MonitorError, match="of '', the model itself"):
        flexsn.monitor(nn.Linear(2, 2))


def test_states_that_were_not_kept_are_named():
    with flexsn.monitor(network(), states="v") as seen:
        pass
    assert list(seen) == ["1", "3"] and "1" in seen and "0" not in seen
    with pytest.raises(MonitorError, match=r"state 'w' was not kept\n  Kept are \['v'\]"):
        seen["1"].states["w"]
    with pytest.raises(MonitorError, match="not monitored"):
        seen["0"]
