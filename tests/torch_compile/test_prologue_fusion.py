"""What a compiled network computes before a neuron, in the neuron's kernel (`_torch_compile/prologue_fusion.py`): which chains, and that nothing else changes."""

import copy

import pytest
import torch
from cores import lif, relu_mem
from helpers import without_graph_caches
from torch import nn

from flexsn import FlexSN
from flexsn._program import serialize as text
from flexsn._program.cache import program_from
from flexsn._torch_compile import prologue_fusion

TAU, TH = 2.0, 1.0


def plain_lif(x, v):
    return lif(x, v, TAU, TH)


pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")  # of a module that Inductor imports


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """On every device, and what was fused: (program, new program or None) of each chain that was found."""
    found = []
    own = prologue_fusion.with_chain

    def noting(program, *others):
        found.append((program, own(program, *others)))
        return found[-1][1]

    monkeypatch.setattr(prologue_fusion, "DEVICES", {"cpu", "cuda"})
    monkeypatch.setattr(prologue_fusion, "with_chain", noting)
    torch._dynamo.reset()
    with without_graph_caches():  # which knows nothing of what is set here
        yield found
    torch._dynamo.reset()


def neuron(core=plain_lif, states=1, **options):
    return FlexSN(core, num_states=states, stateful=False, strict=True, **options)


class Block(nn.Module):
    """Convolution, batch norm, neuron, on [T, B, C, H, W]."""

    def __init__(self, neuron, channels=8):
        super().__init__()
        self.layers, self.neuron = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)), neuron

    def forward(self, x):
        made = self.layers(x.flatten(0, 1))
        return self.neuron(made.view(*x.shape[:2], *made.shape[1:]))


def results(model, call, *inputs):
    """Outputs, and gradients of inputs and parameters."""
    model.zero_grad()
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = call(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum((y * torch.linspace(0, 1, y.numel()).view(y.shape)).sum() for y in outputs).backward()
    return [*outputs, *[t.grad for t in (*inputs, *model.parameters())]]


def both(model, *inputs, **options):
    """Results of the compiled model, with what is fused and without."""
    other = copy.deepcopy(model)
    got = results(model, torch.compile(model, fullgraph=True, **options), *inputs)
    prologue_fusion.DEVICES.clear()
    torch._dynamo.reset()
    with without_graph_caches():
        return got, results(other, torch.compile(other, fullgraph=True, **options), *inputs)


def assert_close(got, want):
    pairs = [(got, want)] if isinstance(got, torch.Tensor) else zip(got, want, strict=True)
    for a, b in pairs:
        assert (a is None) == (b is None)
        if a is not None:
            assert (a - b).norm() <= 1e-5 * b.norm() + 1e-12


# --- what is fused -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("T", "train"),
    [(4, True), (1, False), *(pytest.param(*at, marks=pytest.mark.slow) for at in ((1, True), (4, False), (40, True), (40, False)))],
)
def test_batch_norm(fused, T, train):
    model = Block(neuron()).train(train)
    got, want = both(model, torch.randn(T, 2, 3, 7, 5))
    assert len(fused) == 2  # forward and backward
    assert all(longer is not None for _, longer in fused)
    assert torch.equal(got[0], want[0])
    assert_close(got, want)


@pytest.mark.slow
def test_half_precision_is_rounded_as_eager_rounds_it(fused):
    model = Block(neuron(relu_mem))
    x = torch.randn(4, 2, 3, 7, 5)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        got, want = both(model, x)
    assert len(fused) == 2
    assert got[0].dtype == torch.bfloat16
    assert got[0].ne(want[0]).float().mean() < 0.01  # where Inductor contracts a product and a sum


class Affine(nn.Module):
    def __init__(self, neuron, shape=(6, 1)):
        super().__init__()
        self.scale, self.shift, self.neuron = nn.Parameter(torch.rand(shape) + 0.5), nn.Parameter(torch.rand(shape)), neuron

    def before(self, x):
        return (x - self.shift) * self.scale / 0.75 + 0.25

    def forward(self, x):
        return self.neuron(self.before(x))


@pytest.mark.parametrize("shape", [(6, 1), (5,), (1, 1), (6, 5), (3, 6, 5)])
def test_numbers_are_those_of_eager(fused, shape):
    model = Affine(neuron(relu_mem), shape)
    x = torch.randn(20, 3, 6, 5)
    want = results(model, model, x)
    got = results(model, torch.compile(model, fullgraph=True), x)
    assert len(fused) == 2
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert_close(got, want)


def test_params_of_the_neuron_stay_its_own(fused):
    params = [nn.Parameter(torch.full((6, 1), 2.0)), nn.Parameter(torch.full((5,), 0.5))]
    model = Affine(neuron(lif, params=params))
    got, want = both(model, torch.randn(20, 3, 6, 5))
    assert len(fused) == 2
    assert torch.equal(got[0], want[0])
    assert_close(got, want)


@pytest.mark.slow
def test_names_of_the_neuron_stay_its_own(fused):
    def core(x, v, before_0_0):
        v = v * before_0_0 + x
        return v.tanh(), v

    got, want = both(Affine(neuron(core, params=[nn.Parameter(torch.tensor(0.3))])), torch.randn(20, 3, 6, 5))
    assert len(fused) == 2
    assert_close(got, want)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of Dynamo, which looks at carried states
def test_carried_states(fused):
    models = [Affine(FlexSN(relu_mem, num_states=1, strict=True)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    calls = torch.compile(models[0], fullgraph=True), models[1]
    parts = [torch.randn(20, 3, 6, 5, requires_grad=True) for _ in range(2)]
    found = []
    for call, model in zip(calls, models, strict=True):
        y = torch.cat([call(part) for part in parts])
        found.append([y, *torch.autograd.grad(y.square().sum() + model.neuron.states[0].sum(), [*parts, *model.parameters()])])
    assert len(fused) == 4
    assert torch.equal(found[0][0], found[1][0])
    assert_close(*found)


def test_the_sign_of_zero(fused):
    class Times(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number, self.neuron = number, neuron(lambda x, v: (1.0 / x, v))

        def forward(self, x):
            return self.neuron(x * self.number)

    with torch.no_grad():
        found = []
        for number in (0.0, -0.0):  # which Dynamo takes for one
            torch._dynamo.reset()
            found.append(torch.compile(Times(number), fullgraph=True)(torch.ones(4, 3)))
    assert len(fused) == 2
    assert found[0].eq(torch.inf).all()
    assert found[1].eq(-torch.inf).all()


def test_two_inputs(fused):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.neuron = neuron(lambda a, b, v: (a * v, v * 0.5 + b), num_inputs=2)

        def forward(self, a, b):
            return self.neuron(a * 2 - 1, -b / 3)

    model, a, b = Two(), torch.randn(20, 3, 5), torch.randn(20, 3, 5)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, fullgraph=True)(a, b), model(a, b))
    assert len(fused) == 2


def test_sizes_that_change(fused):
    model = Affine(neuron(relu_mem), (6, 1))
    call = torch.compile(model, fullgraph=True, dynamic=True)
    for T, B in ((20, 3), (4, 5), (40, 6)):
        x = torch.randn(T, B, 6, 5)
        assert_close(results(model, call, x), results(model, model, x))
    assert len(fused) == 2  # compiled once


def test_an_input_that_is_also_returned(fused):
    got, want = both(Affine(neuron(lambda x, v: (x, v + x))), torch.randn(20, 3, 6, 5))
    assert fused
    assert_close(got, want)


@pytest.mark.slow
def test_checkpoints_do_not_depend_on_it(fused):
    both(Block(neuron()), torch.randn(40, 2, 3, 7, 5))
    for program, longer in fused:
        before, after = [program_from(p, torch.device("cpu")) for p in (program, longer[0])]
        assert len(after.graph.nodes) > len(before.graph.nodes)
        assert after.chunk == before.chunk
        assert "compiled graph: makes x" in longer[0]  # a comment of the kernel
        assert text.read(longer[0], torch.device("cpu")).ops == before.ops


def test_the_rewritten_graph_holds_no_chain(fused, monkeypatch):
    graphs = []
    own = prologue_fusion.fuse

    def keeping(node):
        own(node)
        graphs.append({str(n.target) for n in node.graph.nodes})

    monkeypatch.setattr(prologue_fusion, "fuse", keeping)
    model = Affine(neuron())
    with torch.no_grad():
        torch.compile(model, fullgraph=True)(torch.randn(4, 3, 6, 5))
    assert len(graphs) == 1
    assert not any(op in target for target in graphs[0] for op in ("sub", "mul", "div", "add"))


# --- what is not ----------------------------------------------------------------------------------------------------------------
class Before(nn.Module):
    def __init__(self, before, **options):
        super().__init__()
        self.before, self.neuron = before, neuron(**options)

    def forward(self, *inputs):
        made = self.before(*inputs)
        return (self.neuron(made), made) if self.before is read_by_another else self.neuron(made)


def read_by_another(x):
    return x * 2


def of_two(x, y):
    return x * 2 + y


def different_at_every_step(x):
    return x * x.detach()[:, :1, :1].cumsum(0)


def not_arithmetic(x):
    return x.tanh()


def of_float8(x):
    return (x * 2).to(torch.float8_e4m3fn).to(x.dtype)


def with_alpha(x):
    return torch.add(x, x, alpha=2)


def long(x):
    for _ in range(prologue_fusion._LONGEST + 1):
        x = x * 1.25 - 0.5
    return x


def of_another_dtype(x):
    return x.double() * 2


def of_a_slice(x):
    return x[..., ::2] * 2


def of_batch_first(x):
    return x.transpose(0, 1) * 2


def merged(x):
    return (x * 2).view(4, 15).view(4, 3, 5).transpose(1, 2)


@pytest.mark.parametrize(
    "before", [read_by_another, of_two, different_at_every_step, not_arithmetic, of_another_dtype, of_a_slice, of_batch_first, merged]
)
def test_other_inputs_stay(fused, before):
    model = Before(before)
    inputs = [torch.randn(4, 3, 5) for _ in range(2 if before is of_two else 1)]
    want = results(model, model, *inputs)
    got = results(model, torch.compile(model, fullgraph=True), *inputs)
    with torch.no_grad():  # where nothing is saved
        assert_close(torch.compile(model, fullgraph=True)(*inputs), model(*inputs))
    assert not fused
    assert_close(got, want)


def test_float8_is_rounded_outside(fused):
    model, x = Before(of_float8), torch.randn(4, 3, 5)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, fullgraph=True)(x), model(x))
    assert not fused


def test_the_end_of_a_long_chain(fused):
    got, want = both(Before(long), torch.randn(4, 3, 5))
    assert all(longer is not None for _, longer in fused)
    assert_close(got, want)


def test_a_smaller_input_stays(fused):
    class Broadcasting(nn.Module):
        def __init__(self):
            super().__init__()
            self.neuron = neuron(lambda a, b, v: (a + v, v * 0.5 + b), num_inputs=2)

        def forward(self, a, b):
            return self.neuron(a * 2, b)

    got, want = both(Broadcasting(), torch.randn(4, 1, 5), torch.randn(4, 3, 5))
    assert all(longer is None for _, longer in fused)
    assert_close(got, want)
