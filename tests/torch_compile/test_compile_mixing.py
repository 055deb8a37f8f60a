"""Cores that mix neurons in one compiled graph."""

import pytest
import torch
from torch import nn

import flexsn
from flexsn.errors import FallbackWarning
from flexsn.surrogate import atan

# PyTorch's own: Dynamo looks at `.grad` of every tensor that goes into a graph; Inductor imports TorchScript
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:`torch.jit.script_method` is deprecated")
H, f64 = 6, torch.float64


def both(run, leaves, mode="inductor"):
    """Outputs and gradients of a plain and of a compiled call."""
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend=mode)
    results = []
    for call in (run, compiled):
        ys = call(*leaves)
        ys = ys if isinstance(ys, (tuple, list)) else (ys,)
        loss = sum((y.double() * (k + 1)).sin().sum() for k, y in enumerate(ys))
        results.append(([y.detach() for y in ys], torch.autograd.grad(loss, [t for t in leaves if t.requires_grad] + own(run))))
    return results


def own(run):
    return [p for p in run.parameters() if p.requires_grad] if isinstance(run, nn.Module) else []


def agree(run, leaves, **options):
    (plain, grads), (found, others) = both(run, leaves, **options)
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(others, grads)


def rows(T=5, batch=3, width=H, dtype=f64, seed=0):
    return torch.randn(T, batch, width, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, H, dtype=f64), nn.Linear(H, 2, dtype=f64)
        self.layer = flexsn.Recurrent(flexsn.ALIF(tau=4.0), nn.Linear(H, H, dtype=f64), stateful=False)

    def forward(self, x):
        return self.last(self.layer(3.0 * self.first(x)))


@pytest.mark.parametrize("mode", ["inductor", "aot_eager"])
def test_a_network_is_one_graph(mode):
    torch.manual_seed(0)
    agree(Net(), [rows(width=4)], mode=mode)


def lstm(x, h, c, w, u):
    i, f, o, g = (x @ w + h @ u).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, h, c


def test_states_of_another_width_than_the_input():
    w, u = rows(1, 9, 4 * H)[0], rows(1, H, 4 * H)[0]
    leaves = [t.detach().requires_grad_() for t in (rows(width=9), rows(1)[0], rows(1, seed=1)[0], w, u)]

    def run(x, h, c, w, u):
        found = flexsn.scan(lstm, [x], [h, c], [w, u])
        return *found.outputs, *found.states

    agree(run, leaves)


def test_state_sequences_and_default_states():
    w = rows(1, H)[0].detach().requires_grad_()

    def core(x, v, s, w):
        h = v + (x + s @ w - v) / 2.0
        s = atan(h - 0.3)
        return s, h * (1.0 - s), s

    def run(x, w):
        found = flexsn.scan(core, [x], [None, None], [w], store_state_seqs=True)
        return *found.outputs, *found.states

    agree(run, [rows(), w])


def test_captured_tensors_and_changed_weights():
    """An optimizer step between calls, a number that changes, and no compile for what stays the same."""
    linear, counter = nn.Linear(H, H, dtype=f64), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def core(x, v):
        v = torch.tanh(x + linear(v))
        return v, v

    neuron, x = flexsn.FlexSN(core, num_states=1, stateful=False), rows()
    torch._dynamo.reset()
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
        torch.testing.assert_close(compiled(rows(T)), neuron(rows(T)))
    assert counter.frame_count <= 3  # then T is a symbol


def test_carried_states():
    torch.manual_seed(0)
    plain, other = (flexsn.Recurrent(flexsn.LIF(), nn.Linear(H, H, dtype=f64)) for _ in range(2))
    other.load_state_dict(plain.state_dict())
    torch._dynamo.reset()
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for k in range(3):
            torch.testing.assert_close(compiled(rows(seed=k) * 2), plain(rows(seed=k) * 2))


def test_autocast():
    layer = flexsn.Recurrent(flexsn.LIF(), nn.Linear(H, H), stateful=False)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    (plain, grads), (found, others) = both(run, [rows(dtype=torch.float32)], mode="aot_eager")
    assert torch.equal(found[0], plain[0]) and found[0].dtype == plain[0].dtype
    torch.testing.assert_close(others, grads)


def test_inference_is_one_graph_without_a_word(recwarn):
    net, counter = Net(), torch._dynamo.testing.CompileCounterWithBackend("inductor")
    torch._dynamo.reset()
    compiled = torch.compile(net, backend=counter)
    with torch.no_grad():
        torch.testing.assert_close(compiled(rows(width=4)), net(rows(width=4)))
    assert counter.frame_count == 1
    assert not [w for w in recwarn if issubclass(w.category, FallbackWarning)]


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


def test_default_states_of_another_width():
    x = rows(width=4)
    torch._dynamo.reset()
    net = Cell()
    torch.testing.assert_close(torch.compile(net, backend="aot_eager")(x), net(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="initial_states="):
        torch.compile(net, backend="aot_eager", fullgraph=True)(x)
    agree(Cell(lambda x: [x.new_zeros(x.shape[1], H)] * 2), [x], mode="aot_eager")


@pytest.mark.parametrize("full", [False, True])
def test_under_a_checkpoint(full):
    net, x = Net(), rows(width=4)
    run = lambda x: torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=full)
    found, want = ([y := call(x), *torch.autograd.grad(y.sin().sum(), [x, *net.parameters()])] for call in (compiled, net))
    torch.testing.assert_close(found, want)


def test_outputs_that_are_operands():
    """What an operator of a graph returns lies in no operand's memory."""
    w = rows(1, H)[0].detach().requires_grad_()

    def core(x, v, w):
        v = torch.tanh(x + v @ w)
        return x, v, v

    def run(x, w):
        found = flexsn.scan(core, [x], [None], [w])
        return *found.outputs, *found.states

    agree(run, [rows(), w])


def test_second_derivatives_are_refused():
    w = rows(1, H)[0].detach().requires_grad_()

    def core(x, v, w):
        v = torch.tanh(x + v @ w)
        return v, v

    torch._dynamo.reset()
    run = torch.compile(lambda x: flexsn.scan(core, [x], [None], [w]).outputs[0], fullgraph=True, backend="aot_eager")
    x = rows()
    with pytest.raises(RuntimeError):
        (g,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        torch.autograd.grad(g.sum(), x)
