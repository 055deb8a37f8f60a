"""Cores that mix neurons in one compiled graph: `flexsn::mixing` and its backward."""

import gc

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import flexsn
from flexsn._torch_compile.mixing import _cores, _latest
from flexsn.errors import DoubleBackwardError
from flexsn.surrogate import atan

# PyTorch's own: Dynamo looks at `.grad` of every tensor that goes into a graph; Inductor imports TorchScript
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:`torch.jit.script_method` is deprecated")
H, f64 = 6, torch.float64


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def rows(*shape, seed=0, dtype=f64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def results(run, leaves):
    """Outputs, and gradients of the leaves and of a module's parameters."""
    ys = run(*leaves)
    ys = ys if isinstance(ys, (tuple, list)) else (ys,)
    loss = sum((y.to(f64) * (k + 1)).sin().sum() for k, y in enumerate(ys))
    own = run.parameters() if isinstance(run, nn.Module) else ()
    return [y.detach() for y in ys], torch.autograd.grad(loss, [*leaves, *own])


def assert_as_plain(run, *leaves, backend="aot_eager"):
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    found, want = results(compiled, leaves), results(run, leaves)
    torch.testing.assert_close(found, want)
    with torch.no_grad():
        ys = compiled(*leaves)
    torch.testing.assert_close(list(ys) if isinstance(ys, (tuple, list)) else [ys], want[0])
    return found, want


class Net(nn.Module):
    def __init__(self, neuron=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, H, dtype=f64), nn.Linear(H, 2, dtype=f64)
        self.layer = flexsn.Recurrent(neuron or flexsn.LIF(tau=4.0), nn.Linear(H, H, dtype=f64), stateful=False)

    def forward(self, x):
        return self.last(self.layer(3.0 * self.first(x)))


# --- networks -----------------------------------------------------------------------------------------------------------------------
def test_a_network_is_one_graph_in_training_and_in_inference(recwarn):
    net, x, counter = Net(), rows(5, 3, 4), CompileCounterWithBackend("inductor")
    compiled = torch.compile(net, fullgraph=True, backend=counter)
    for _ in range(2):
        torch.testing.assert_close(results(compiled, [x]), results(net, [x]))
    assert counter.frame_count == 1
    assert [node.target for node in counter.graphs[0].graph.nodes].count(torch.ops.flexsn.mixing.default) == 1
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x))
    assert counter.frame_count == 2  # one for each, as for any module
    assert not [w for w in recwarn if issubclass(w.category, flexsn.errors.FallbackWarning)]


@pytest.mark.slow
def test_without_fullgraph_it_is_one_graph_too():
    counter = CompileCounterWithBackend("aot_eager")
    net, x = Net(flexsn.ALIF(tau=4.0)), rows(5, 3, 4)
    torch.testing.assert_close(results(torch.compile(net, backend=counter), [x]), results(net, [x]))
    assert counter.frame_count == 1


def test_optimizer_steps_and_other_sequence_lengths():
    """Changed weights are seen, and nothing is compiled for them; for other T once."""
    plain, net, counter = Net(), Net(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, fullgraph=True, backend=counter)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.5) for n in (plain, net)]
    for k, T in enumerate((5, 5, 5, 7, 9, 1)):
        x, losses = rows(T, 3, 4, seed=k), []
        for run, optimizer in zip((plain, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(run(x).square().sum())
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(*losses)
        assert counter.frame_count == (1, 1, 1, 2, 2, 3)[k]  # T = 1 is a graph of its own, as anywhere
    torch.testing.assert_close(net.state_dict(), plain.state_dict())


@pytest.mark.parametrize("dynamic", [None, True])
def test_batches_of_other_sizes(dynamic):
    net, counter = Net(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, fullgraph=True, backend=counter, dynamic=dynamic)
    counts = []
    for T, batch in ((5, 3), (5, 5), (7, 8), (9, 3)):
        torch.testing.assert_close(results(compiled, [rows(T, batch, 4)]), results(net, [rows(T, batch, 4)]))
        counts.append(counter.frame_count)
    assert counts[-1] == counts[0 if dynamic else 2]  # from there on both sizes are symbols


def test_carried_states():
    plain, other = (flexsn.Recurrent(flexsn.LIF(), nn.Linear(H, H, dtype=f64)) for _ in range(2))
    other.load_state_dict(plain.state_dict())
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for k in range(3):
        with torch.no_grad():
            torch.testing.assert_close(compiled(rows(4, 3, H, seed=k) * 2), plain(rows(4, 3, H, seed=k) * 2))


# --- cores --------------------------------------------------------------------------------------------------------------------------
class Captures(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(rows(H, H).detach())
        self.neuron = flexsn.FlexSN(self.step, 1, 2, stateful=False)

    def step(self, x, v, s):
        h = v + (x + s @ self.w - v) / 2.0
        s = atan(h - 0.3)
        return s, h * (1.0 - s), s

    def forward(self, x):
        return self.neuron(x)


def test_a_captured_tensor():
    assert_as_plain(Captures(), rows(5, 3, H))


def lstm(x, h, c, w, u):
    i, f, o, g = (x @ w + h @ u).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, h, c


def run_lstm(x, h, c, w, u):
    found = flexsn.scan(lstm, [x], [h, c], [w, u])
    return *found.outputs, *found.states


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("width", [H, 9])
def test_an_lstm_with_given_states(width, backend):
    assert_as_plain(run_lstm, rows(5, 3, width), rows(3, H), rows(3, H, seed=1), rows(width, 4 * H), rows(H, 4 * H), backend=backend)


def test_captured_tensors_and_changed_weights():
    """An optimizer step between calls, a number that changes, and no compile for what stays the same."""
    linear, counter = nn.Linear(H, H, dtype=f64), CompileCounterWithBackend("aot_eager")

    def core(x, v):
        v = torch.tanh(x + linear(v))
        return v, v

    neuron, x = flexsn.FlexSN(core, num_states=1, stateful=False), rows(5, 3, H)
    compiled = torch.compile(neuron, fullgraph=True, backend=counter)
    for _ in range(3):
        plain, y = neuron(x), compiled(x)
        torch.testing.assert_close(y, plain)
        grads = torch.autograd.grad(y.sin().sum(), [x, *linear.parameters()])
        torch.testing.assert_close(grads, torch.autograd.grad(plain.sin().sum(), [x, *linear.parameters()]))
        with torch.no_grad():
            for p, g in zip(linear.parameters(), grads[1:], strict=True):
                p.sub_(0.1 * g)
    assert counter.frame_count == 1
    for T in (7, 9, 11):
        torch.testing.assert_close(compiled(rows(T, 3, H)), neuron(rows(T, 3, H)))
    assert counter.frame_count <= 3  # then T is a symbol


def test_default_states_and_state_sequences():
    def core(x, v, s, w):
        v = torch.tanh(v + x + s @ w)
        return v * 2.0, v, torch.sigmoid(v)

    def run(x, w):
        found = flexsn.scan(core, [x], [None, None], [w], store_state_seqs=True)
        return *found.outputs, *found.states

    assert_as_plain(run, rows(5, 3, H), rows(H, H))


def test_products_convolutions_and_norms_in_no_recurrence_and_in_one():
    conv, norm = nn.Conv1d(2, 2, 3, padding=1, dtype=f64), nn.LayerNorm(H, dtype=f64)

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = conv, norm
            self.neuron = flexsn.FlexSN(self.step, 1, 1, stateful=False)

        def step(self, x, v):
            v = torch.tanh(self.norm(v) + self.conv(x))
            return torch.softmax(v, -1), v

        def forward(self, x):
            return self.neuron(x)

    assert_as_plain(Module(), rows(5, 3, 2, H))


def test_outputs_that_are_operands():
    """What an operator of a graph returns lies in no operand's memory."""

    def core(x, v, w):
        v = torch.tanh(x + v @ w)
        return x, v, v

    assert_as_plain(lambda x, w: (*(found := flexsn.scan(core, [x], [None], [w])).outputs, *found.states), rows(5, 3, H), rows(H, H))


@pytest.mark.parametrize("outside", [True, False], ids=["around the compiled call", "inside"])
def test_autocast(outside):
    layer, first = flexsn.Recurrent(flexsn.LIF(), nn.Linear(H, H), stateful=False), nn.Linear(4, H)

    def plain(x):
        return layer(3.0 * first(x))

    def inside(x):
        with torch.autocast("cpu", torch.bfloat16):
            return plain(x)

    x, own = rows(5, 3, 4, dtype=torch.float32), [*layer.parameters(), *first.parameters()]
    compiled, found = torch.compile(plain if outside else inside, fullgraph=True, backend="aot_eager"), []
    for run in (inside, compiled):
        with torch.autocast("cpu", torch.bfloat16, enabled=outside):
            y = run(x)
        found.append((y, torch.autograd.grad(y.float().square().sum(), [x, *own])))
    torch.testing.assert_close(*found)


class Cell(nn.Module):
    """Whose default states are of another width than its input."""

    def __init__(self, starts=None):
        super().__init__()
        self.cell = nn.LSTMCell(4, H, dtype=f64)
        self.neuron = flexsn.FlexSN(self.core, num_inputs=1, num_states=2, stateful=False, initial_states=starts)

    def core(self, x, h, c):
        h, c = self.cell(x, (h, c))
        return h, h, c

    def forward(self, x):
        return self.neuron(x)


@pytest.mark.slow
def test_default_states_of_another_width():
    x, net = rows(5, 3, 4), Cell()
    torch.testing.assert_close(torch.compile(net, backend="aot_eager")(x), net(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="initial_states="):
        torch.compile(net, backend="aot_eager", fullgraph=True)(x)
    assert_as_plain(Cell(lambda x: [x.new_zeros(x.shape[1], H)] * 2), x)


@pytest.mark.parametrize("full", [False, True])
def test_under_a_checkpoint(full):
    net, x = Net(), rows(5, 3, 4)
    run = lambda x: torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=full)
    found, want = ([y := call(x), *torch.autograd.grad(y.sin().sum(), [x, *net.parameters()])] for call in (compiled, net))
    torch.testing.assert_close(found, want)


# --- what is refused, and what goes ---------------------------------------------------------------------------------------------------
def tanh_core(x, v, w):
    v = torch.tanh(x + v @ w)
    return v, v


def run_tanh(x, w):
    return flexsn.scan(tanh_core, [x], [None], [w]).outputs[0]


def test_second_derivatives_are_refused():
    x, w = rows(5, 3, H), rows(H, H)
    with pytest.raises(DoubleBackwardError, match="tanh_core"):
        torch.autograd.grad(torch.compile(run_tanh, fullgraph=True, backend="eager")(x, w).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):  # AOTAutograd's own
        (g,) = torch.autograd.grad(torch.compile(run_tanh, fullgraph=True, backend="aot_eager")(x, w).sum(), x, create_graph=True)
        torch.autograd.grad(g.sum(), x)


def test_what_no_graph_holds_says_why():
    """As a plain call does: 16 bits without autocast, a core that no cut takes."""
    layer = flexsn.Recurrent(flexsn.LIF(), nn.Linear(H, H), stateful=False).bfloat16()
    x = rows(5, 3, H, dtype=torch.bfloat16)
    with pytest.warns(flexsn.errors.FallbackWarning, match="may have 16 bits under `torch.autocast`"):
        want = layer(x)
    torch.testing.assert_close(torch.compile(layer)(x), want)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs uncompiled: core `recurrent_lif`: `addmm` is not elementwise"):
        torch.compile(layer, fullgraph=True)(x)

    w = rows(H, H)

    def narrower(x, v):
        v = torch.tanh(x + v @ w) * v.shape[0]
        return v, v.float()

    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs uncompiled: core `narrower"):
        torch.compile(lambda x: flexsn.scan(narrower, [x], [None]).outputs[0], fullgraph=True)(rows(5, 3, H))


def test_cores_go_with_the_code_that_was_compiled_from_them():
    def core(x, v, w):
        v = torch.sin(x + v @ w)
        return v, v

    x, w = rows(5, 3, H), rows(H, H)
    _latest.clear()
    gc.collect()
    before = len(_cores)
    y = torch.compile(lambda: flexsn.scan(core, [x], [None], [w]).outputs[0], fullgraph=True, backend="aot_eager")()
    assert len(_cores) == before + 1
    torch._dynamo.reset()
    y.sum().backward()  # the graph of a call outlives the code
    del y
    _latest.clear()
    gc.collect()
    assert len(_cores) == before
