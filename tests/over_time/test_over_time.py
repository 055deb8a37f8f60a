"""Networks whose forward is one step: `flexsn.over_time` against a loop of PyTorch over the same network."""

import copy
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import Reversed
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import flexsn
from flexsn._operator.mixing.cpp_walk import Driven


def plain_loop(network, *inputs):
    """The network, called step by step, its neurons in single steps; states are carried and not reset."""
    for module in network.modules():
        if isinstance(module, flexsn.FlexSN):
            module.step_mode, module.backend, module.strict = "s", "torch", False
    steps = [network(*x) for x in zip(*[x.unbind(0) for x in inputs], strict=True)]
    return torch.stack(steps) if isinstance(steps[0], torch.Tensor) else tuple(map(torch.stack, zip(*steps, strict=True)))


def neurons(network):
    return [m for m in network.modules() if isinstance(m, flexsn.FlexSN)]


class Residual(nn.Module):
    """Skips, functions of PyTorch that mix dims, two inputs and two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(12, 4)
        self.neuron, self.out = flexsn.LIF(tau=3.0), flexsn.LeakyIntegrator(tau=4.0)

    def forward(self, x, gate):
        h = self.neuron(self.first(x)) * gate + x.view(x.shape[0], -1)
        h = torch.cat([h, F.softmax(x, -1)[:, :6].flip(-1)], dim=1)
        return self.out(self.second(h)), h.sum(1)


def conv():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), flexsn.LIF(tau=2.0), nn.MaxPool2d(2), nn.Conv2d(4, 3, 3),
        flexsn.ALIF(tau=4.0), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5), flexsn.LeakyIntegrator(tau=3.0),
    )  # fmt: skip


def recurrent():
    return nn.Sequential(nn.Linear(5, 8), flexsn.Recurrent(flexsn.LIF(tau=3.0), nn.Linear(8, 8)), nn.LayerNorm(8), nn.Linear(8, 2))


def singles():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), flexsn.LIF(step_mode="s"), nn.GroupNorm(2, 8), flexsn.Delay(2), nn.Tanh())


NETWORKS = {
    "residual": (Residual, [(7, 3, 6), (7, 3, 6)]),
    "conv": (conv, [(6, 2, 2, 8, 8)]),
    "conv in evaluation": (lambda: conv().eval(), [(6, 2, 2, 8, 8)]),
    "recurrent": (recurrent, [(9, 3, 5)]),
    "single steps": (singles, [(9, 3, 5)]),
    "no batch": (lambda: nn.Sequential(nn.Linear(5, 8), flexsn.LIF(), nn.Linear(8, 2)), [(9, 5)]),
    "one step": (recurrent, [(1, 3, 5)]),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_values_gradients_and_statistics_are_those_of_the_loop(name):
    make, shapes = NETWORKS[name]
    torch.manual_seed(0)
    network = make().double()
    other = copy.deepcopy(network)
    found, expected = [], []
    over_time = flexsn.over_time(network, strict=True)
    for _ in range(2):  # the second call goes on from the first
        inputs = [torch.randn(*shape, dtype=torch.double, requires_grad=True) for shape in shapes]
        twins = [x.detach().clone().requires_grad_() for x in inputs]
        for got, results in ((found, over_time(*inputs)), (expected, plain_loop(other, *twins))):
            got += results if isinstance(results, tuple) else [results]
        flexsn.detach_states(network)
        flexsn.detach_states(other)
        weights = [torch.randn_like(y) for y in found]
        for got, own in ((found, [*inputs, *network.parameters()]), (expected, [*twins, *other.parameters()])):
            total = sum((y * w).sum() for y, w in zip(got, weights, strict=True) if y.requires_grad)
            got += [torch.zeros(()) if g is None else g for g in torch.autograd.grad(total, own, allow_unused=True)]
        found, expected = [y.detach() for y in found], [y.detach() for y in expected]
    found += [*network.buffers(), *[v for n in neurons(network) for v in n.states or ()]]
    expected += [*other.buffers(), *[v for n in neurons(other) for v in n.states or ()]]
    assert over_time.reason is None
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


def test_the_network_is_held_and_its_settings_are_left():
    network = recurrent()
    over_time = flexsn.over_time(network)
    assert over_time.network is network
    assert {f"network.{key}" for key in network.state_dict()} == set(over_time.state_dict())
    over_time(torch.randn(4, 3, 5))
    assert [n.step_mode for n in neurons(network)] == ["m"] * len(neurons(network))
    assert all(n.states is not None for n in neurons(network)[:1])
    flexsn.reset_net(over_time)
    assert all(n.states is None for n in neurons(network))


@pytest.mark.parametrize("stateful", [True, False, "detached"])
@pytest.mark.parametrize("at_once", [True, False])
def test_states_are_carried_as_the_neuron_says(stateful, at_once):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.neuron, self.seen = flexsn.LeakyIntegrator(tau=5.0, stateful=stateful, store_state_seqs=True), 0

        def forward(self, x):
            self.seen += not at_once
            return self.neuron(x)

    network = Network()
    over_time, x = flexsn.over_time(network), torch.randn(8, 3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", flexsn.errors.FallbackWarning)
        first, second = over_time(x[:5]), over_time(x[5:])
    assert (over_time.reason is None) == at_once
    whole = flexsn.LeakyIntegrator(tau=5.0, stateful=stateful)
    parts = whole(x[:5]), whole(x[5:])
    torch.testing.assert_close((first, second), parts)
    assert (network.neuron.states is None) == (not stateful)
    assert network.neuron.state_seqs[0].shape == (3, 3)
    for found, expected in zip((first, second), parts, strict=True):
        grads = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (found, expected)]
        torch.testing.assert_close(*grads)


class Own(nn.Module):
    """A step that does more than compute."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.neuron, self.how = nn.Linear(4, 4), flexsn.LIF(tau=2.0), how
        self.before, self.count, self.rows, self.last, self.table = None, 0, [], deque(maxlen=2), {}
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("held", torch.zeros(4))

    def forward(self, x):
        h = self.neuron(self.linear(x))
        return getattr(self, self.how)(h)

    def attribute(self, h):
        self.before = h if self.before is None else 0.5 * self.before + h
        return self.before

    def number(self, h):
        self.count += 1
        return h * self.count

    def append(self, h):
        self.rows.append(h)
        return sum(self.rows)

    def rolling(self, h):
        self.last.append(h)
        return self.last[0]

    def dictionary(self, h):
        self.table["h"] = h + self.table.get("h", 0.0)
        return self.table["h"]

    def buffer(self, h):
        self.mean = 0.9 * self.mean + h.mean(0)
        return h - self.mean

    def in_place(self, h):
        self.held.add_(1.0)
        return h * self.held

    def in_place_of_steps(self, h):
        with torch.no_grad():
            self.held.copy_(h[0])
        return h * self.held

    def values(self, h):
        return h if h.sum() > 3 else -h

    def states(self, h):
        return h + self.neuron.states[0]

    def twice(self, h):
        return self.neuron(h)


FALLING_BACK = {
    "attribute": "Own.before", "number": "Own.count", "append": "Own.rows", "rolling": "Own.last", "dictionary": "Own.table", "buffer": "Own.mean",
    "in_place": "add_", "in_place_of_steps": "inplace", "values": "reads values", "states": "states of a neuron", "twice": "called twice",
}  # fmt: skip


@pytest.mark.parametrize("how", FALLING_BACK)
def test_what_cannot_run_at_once_runs_step_by_step_and_says_so(how):
    torch.manual_seed(0)
    network, x = Own(how), torch.randn(6, 3, 4)
    other = copy.deepcopy(network)
    with pytest.raises(flexsn.errors.CannotFuseError, match=FALLING_BACK[how]):
        flexsn.over_time(network, strict=True)(x)
    assert network.neuron.states is None and network.count == 0 and not network.rows and not network.table and not network.last
    over_time = flexsn.over_time(network)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = over_time(x)
        assert all(w.category is flexsn.errors.FallbackWarning for w in said)
        torch.testing.assert_close(found, plain_loop(other, x))
        for a, b in zip(network.buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(a, b)
    assert FALLING_BACK[how] in over_time.reason


def test_random_numbers_of_no_step_are_drawn_at_every_step():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.neuron = flexsn.LIF()

        def forward(self, x):
            return self.neuron(x) + torch.randn(4)

    over_time = flexsn.over_time(Noisy())
    with pytest.warns(flexsn.errors.FallbackWarning, match="draws random numbers"):
        y = over_time(torch.zeros(5, 3, 4))
    assert len({float(row[0, 0]) for row in y}) == 5


def test_dropout_draws_for_every_step():
    over_time = flexsn.over_time(nn.Sequential(nn.Dropout(0.5), flexsn.LeakyIntegrator(tau=1.0), nn.Dropout2d(0.5)), strict=True)
    y = over_time(torch.ones(64, 2, 16, 4, 4)).ne(0)
    assert 0.2 < y.float().mean() < 0.3  # a quarter is left
    assert len({tuple(row.flatten().tolist()) for row in y}) == 64


def test_a_hook_that_sees_one_step_has_it_run_step_by_step():
    network, shapes = nn.Sequential(nn.Linear(4, 4), flexsn.LIF()), []
    network[0].register_forward_hook(lambda m, i, o: shapes.append(tuple(o.shape)))
    over_time = flexsn.over_time(network)
    with pytest.warns(flexsn.errors.FallbackWarning, match="hook"):
        over_time(torch.randn(5, 2, 4))
    assert shapes == [(2, 4)] * 5
    network[0]._forward_hooks.clear()
    over_time(torch.randn(5, 2, 4))
    assert over_time.reason is None


@pytest.mark.parametrize("at_once", [True, False])
def test_a_monitor_sees_whole_sequences(at_once):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), flexsn.LIF(tau=2.0, step_mode="s"), nn.Linear(8, 8), flexsn.LIF(tau=3.0))
    if not at_once:
        network[0].register_forward_hook(lambda m, i, o: None)
    over_time, x = flexsn.over_time(network), torch.randn(6, 3, 4)
    with flexsn.monitor(over_time, spikes=True, states=True) as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore", flexsn.errors.FallbackWarning)
        y = over_time(x)
        y.sum().backward()
    assert (over_time.reason is None) == at_once
    record = seen["network.3"]
    assert record.calls == 1 and torch.equal(record.spikes[0], y.detach())
    assert record.states["v"][0].shape == (6, 3, 8)
    assert seen["network.1"].spikes[0].shape == (6, 3, 8)
    first = flexsn.LIF(tau=2.0)(network[0](x))
    torch.testing.assert_close(seen["network.1"].spikes[0], first.detach())
    assert seen["network.1"].gradient_norm is not None
    assert network[1].state_seqs is None and not network[1].store_state_seqs


def test_explain_shows_each_neuron():
    over_time = flexsn.over_time(nn.Sequential(nn.Linear(4, 8), flexsn.LIF(tau=2.0, step_mode="s")))
    report = flexsn.explain(over_time, torch.randn(6, 3, 4))
    assert "network.1: lif: fused" in str(report)


def test_lengths():
    over_time = flexsn.over_time(Residual())
    with pytest.raises(flexsn.errors.SequenceLengthError, match=r"\[4, 5\]"):
        over_time(torch.randn(4, 3, 6), torch.randn(5, 3, 6))
    with pytest.raises(flexsn.errors.SequenceLengthError, match="no tensor"):
        over_time()
    with pytest.raises(flexsn.errors.SequenceLengthError, match="without dims"):
        over_time(torch.zeros(()), torch.zeros(()))
    with pytest.raises(flexsn.errors.ArgumentError, match="module"):
        flexsn.over_time(lambda x: x)
    empty = flexsn.over_time(nn.Sequential(nn.Linear(6, 4), flexsn.LIF(), nn.Linear(4, 2)), strict=True)(torch.randn(0, 3, 6))
    assert empty.shape == (0, 3, 2)


def test_a_step_kept_after_its_call_says_what_it_is():
    kept = []

    class Keeping(nn.Module):
        def forward(self, x):
            kept.append(x)
            return x * 2

    with pytest.raises(flexsn.errors.StaleStateError, match="keeps a tensor"):
        flexsn.over_time(Keeping())(torch.randn(3, 2))
    with pytest.raises(flexsn.errors.StaleStateError, match="after its call"):
        kept[0] + 1


def test_an_error_of_the_step_is_the_users():
    over_time = flexsn.over_time(nn.Sequential(nn.Linear(4, 8), flexsn.LIF(), nn.Linear(7, 2)))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        over_time(torch.randn(3, 2, 4))


def test_inside_other_transforms():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(4, 8), flexsn.LIF(tau=2.0, stateful=False), nn.Linear(8, 3), flexsn.LeakyIntegrator(tau=3.0, stateful=False)
    )
    over_time, x = flexsn.over_time(network, strict=True), torch.randn(5, 2, 4, requires_grad=True)
    y = over_time(x)
    again = checkpoint(over_time, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.sum(), x)[0], torch.autograd.grad(y.sum(), x, retain_graph=True)[0])
    many = torch.randn(3, 5, 2, 4)
    torch.testing.assert_close(torch.vmap(over_time)(many), torch.stack([over_time(m) for m in many]))
    params = {name: p.detach() * 1.5 for name, p in over_time.named_parameters()}
    moved = torch.func.functional_call(over_time, params, (x,))
    with torch.no_grad():
        for p in over_time.parameters():
            p.mul_(1.5)
    torch.testing.assert_close(moved, over_time(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert over_time(x).dtype == nn.Sequential(*network)(x).dtype


def test_second_derivatives():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), flexsn.LIF(tau=2.0, stateful=False), nn.Linear(4, 2)).double()
    over_time, x = flexsn.over_time(network, strict=True), torch.randn(4, 2, 3, dtype=torch.double, requires_grad=True)
    found = []
    for module in (over_time, network):
        (grad,) = torch.autograd.grad(module(x).pow(2).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.pow(2).sum(), x)[0])
    torch.testing.assert_close(*found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # PyTorch's own
def test_a_compiled_model_breaks_its_graph_there():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(4, 4), flexsn.over_time(nn.Sequential(nn.Linear(4, 8), flexsn.LIF(stateful=False)), strict=True), nn.ReLU()
    )
    x = torch.randn(5, 2, 4)
    expected = network(x)
    torch.testing.assert_close(torch.compile(network)(x), expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="one step"):
        torch.compile(network, fullgraph=True)(x)


def step_by_step(network, x, match):
    """Both ways of a network that runs step by step for a reason that must match."""
    other = copy.deepcopy(network)
    over_time = flexsn.over_time(network)
    with pytest.warns(flexsn.errors.FallbackWarning, match=match):
        found = over_time(x)
    with pytest.raises(flexsn.errors.StepByStepError, match=match):
        flexsn.over_time(copy.deepcopy(other), strict=True)(x)
    torch.testing.assert_close(found, plain_loop(other, x))
    torch.testing.assert_close(list(network.buffers()), list(other.buffers()))


def test_a_batch_norm_that_is_called_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(5)

        def forward(self, x):
            return self.norm(self.norm(x) * 2 + 1)

    step_by_step(Twice(), torch.randn(4, 3, 5), "batch norm is called twice")


@pytest.mark.parametrize("first", [True, False])
def test_a_neuron_that_a_step_resets(first):
    class Resetting(nn.Module):
        def __init__(self, before):
            super().__init__()
            self.neuron, self.before = flexsn.LIF(), before

        def forward(self, x):
            if self.before:
                self.neuron.reset()
            y = self.neuron(x)
            if not self.before:
                self.neuron.reset()
            return y

    step_by_step(Resetting(first), torch.full((5, 1, 1), 1.5), "resets a neuron")


def test_what_a_step_keeps_elsewhere_is_noticed():
    kept = []

    class Elsewhere(nn.Module):
        def forward(self, x):
            kept.append(x * 2)
            return sum(kept)

    with pytest.raises(flexsn.errors.StaleStateError, match="keeps a tensor outside"):
        flexsn.over_time(Elsewhere())(torch.randn(3, 2))


def test_dropout_of_weights_draws_for_every_step():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, 4))

        def forward(self, x):
            return F.linear(x, F.dropout(self.weight, 0.5, self.training))

    over_time = flexsn.over_time(Dropping())
    with pytest.warns(flexsn.errors.FallbackWarning, match="`dropout` draws"):
        y = over_time(torch.ones(20, 1, 4))
    assert len({tuple(row.flatten().tolist()) for row in y}) > 5
    flexsn.over_time(over_time.network.eval(), strict=True)(torch.ones(20, 1, 4))


def test_columns_are_written_at_every_step():
    class Writing(nn.Module):
        def forward(self, x):
            z = x * 1.0
            z[:, 0] = 0.0
            return z

    x = torch.randn(4, 3, 5)
    y = flexsn.over_time(Writing(), strict=True)(x)
    assert not y[..., 0].any() and torch.equal(y[..., 1:], x[..., 1:])


def test_returns_that_are_no_tensors():
    class Numbers(nn.Module):
        def forward(self, x):
            return x, float(x.sum())

    with pytest.warns(flexsn.errors.FallbackWarning), pytest.raises(flexsn.errors.ArgumentError, match="returned a float"):
        flexsn.over_time(Numbers())(torch.randn(3, 2))


def test_one_over_time_in_another():
    inner = flexsn.over_time(nn.Linear(2, 2))
    step_by_step(nn.Sequential(inner, nn.ReLU()), torch.randn(4, 3, 2), "another `over_time`")


@pytest.mark.parametrize("count", [False, True])
def test_inputs_by_name(count):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.neuron, self.seen = flexsn.LIF(), 0

        def forward(self, x, *, gain, shift=0.0):
            self.seen += count
            return self.neuron(x) * gain + shift

    x, gain = torch.rand(5, 3, 4), torch.rand(5, 1, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", flexsn.errors.FallbackWarning)
        y = flexsn.over_time(Scaled())(x, gain=gain, shift=1.0)
    torch.testing.assert_close(y, flexsn.LIF()(x) * gain + 1.0)


def test_an_input_that_was_written_to_is_not_run_again():
    class Writing(nn.Module):
        def forward(self, x):
            x.mul_(2.0)
            return x if x.sum() > 0 else -x

    x = torch.ones(3, 2)
    with pytest.raises(RuntimeError, match="data-dependent"):
        flexsn.over_time(Writing())(x)
    assert torch.equal(x, torch.full((3, 2), 2.0))


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # PyTorch's own, where the first thing that a thread does is a product
def test_threads_share_a_network_that_carries_nothing():
    network = nn.Sequential(nn.Linear(4, 8), flexsn.LIF(tau=2.0, stateful=False), nn.Linear(8, 3))
    over_time, xs = flexsn.over_time(network, strict=True), [torch.randn(6, 2, 4) for _ in range(64)]
    expected = [network(x) for x in xs]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(over_time, xs))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert network[1].states is None


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return 2.0 * grad


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


SURROGATES = {"atan": flexsn.surrogate.atan, "of a tensor": flexsn.surrogate.sigmoid(alpha=torch.rand(6) + 1.0)}
FUNCTIONS = {f.__name__: f.apply for f in (Reversed, Passed, Rounded)}


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another way"])
@pytest.mark.parametrize("name", [*SURROGATES, *FUNCTIONS])
def test_gradients_of_the_users_own(name, beside):
    """Surrogates run at all steps at once; of other Functions autograd knows the backward of one step alone."""
    function = (SURROGATES | FUNCTIONS)[name]

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.neuron = nn.Linear(6, 6), flexsn.LIF(stateful=False)

        def forward(self, x):
            y = function(self.layer(x))
            return self.neuron(x + y) if beside else y

    network, x = Network(), torch.randn(4, 2, 6, requires_grad=True)
    over_time = flexsn.over_time(network, strict=name in SURROGATES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", flexsn.errors.FallbackWarning)
        found = over_time(x)
    assert (over_time.reason is None) == (name in SURROGATES)
    want = torch.stack([function(network.layer(step)) for step in x])
    want = flexsn.LIF(stateful=False)(x + want) if beside else want
    torch.testing.assert_close(found, want)
    params = [x, *network.parameters()]
    for a, b in zip(*[torch.autograd.grad(y.sin().sum(), params) for y in (found, want)], strict=True):
        torch.testing.assert_close(a, b)


def test_a_function_that_returns_none_beside_a_tensor():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    network, x = Attention(), torch.randn(3, 2, 5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch's, of a slow batching rule
        found = flexsn.over_time(network, strict=True)(x)
    torch.testing.assert_close(found, torch.stack([network(step) for step in x]))


@pytest.mark.skipif("config.getoption('--device') == 'cuda'", reason="on a GPU linear layers are PyTorch's own")
@pytest.mark.parametrize("by_name", [False, True])
def test_spikes_drive_linear_layers(by_name, monkeypatch):
    """As the layers one by one, to rounding; of what is not mostly zero with the same bits."""

    class Layer(nn.Linear):
        def forward(self, x):
            return F.linear(input=x, weight=self.weight, bias=self.bias) if by_name else super().forward(x)

    layers = [Layer(120, 80), flexsn.LIF(stateful=False, v_threshold=0.1), Layer(80, 30)]
    network, x = nn.Sequential(*layers).double(), (torch.rand(90, 9, 120, dtype=torch.float64) < 0.05).double()
    found, forward = [], Driven.forward
    monkeypatch.setattr(Driven, "forward", staticmethod(lambda ctx, *operands: (found.append(1), forward(ctx, *operands))[1]))
    for spikes in (x, torch.randn_like(x)):
        found.clear()
        leaf = spikes.clone().requires_grad_()
        want, got = network(leaf), flexsn.over_time(network, strict=True)(leaf)
        assert len(found) == (spikes is x)  # the second layer is too small to look
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12) if found else torch.testing.assert_close(got, want, rtol=0, atol=0)
        cotangent = torch.randn_like(want)
        grads = [torch.autograd.grad(y, [leaf, *network.parameters()], cotangent) for y in (got, want)]
        for own, expected in zip(*grads, strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dims", [(), (1,), (-2,), (0, 1), (1, -1), (-3, -2)])
def test_flattened_steps(dims):
    class Net(nn.Module):
        def forward(self, x):
            return x.flatten(*dims), torch.flatten(x, *dims) * 2, torch.flatten(x[..., 0], start_dim=1), x.sum().flatten()

    x = torch.randn(4, 2, 3, 5)
    for got, want in zip(flexsn.over_time(Net(), strict=True)(x), zip(*map(Net(), x), strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(want))


def test_dims_that_are_not_there():
    with pytest.raises(IndexError):
        flexsn.over_time(nn.Flatten(4))(torch.randn(4, 2, 3, 5))
