"""A core over time by a Python loop, by PyTorch's scan operator, by its while_loop operator: one contract, three mechanisms."""

import contextlib
import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from flexsn import errors, surrogate
from flexsn._torch_compile import loops

PUBLIC = {
    ("eager", "sequence"): loops.eager_scan,
    ("eager", "final"): loops.eager_scan_final_state,
    ("scan", "sequence"): loops.lowerable_scan,
    ("scan", "final"): loops.lowerable_scan_final_state,
    ("while_loop", "sequence"): loops.lowerable_while_loop_scan,
    ("while_loop", "final"): loops.lowerable_while_loop_scan_final_state,
}
EVERY = pytest.mark.parametrize("name", ["eager", "scan", "while_loop"])
OPERATORS = pytest.mark.parametrize("name", ["scan", "while_loop"])
STATES = pytest.mark.parametrize("states", ["sequence", "final"])
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
SLOWLY_COMPILED = pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])

DOUBTED = "gradients may come out wrong"  # true of Inductor, of which these tests see what comes out right

pytestmark = [  # PyTorch's compiler warns about itself
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning"),
    pytest.mark.filterwarnings(f"ignore:{DOUBTED}:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(autouse=True)
def _forget():
    """No test sees what another compiled."""
    torch._dynamo.reset()


# --- cores ----------------------------------------------------------------------------------------------------------------
def lif(x, v):
    h = v + (x - v) / 2.0
    s = surrogate.atan(h - 1.0)
    return s, h * (1.0 - s)


def smooth(x, v, w):
    return torch.sin(x + v) * w, torch.tanh(v * w + x)


def adaptive(x1, x2, v, a):
    """2 inputs, 2 outputs, 2 states."""
    h = v * 0.9 + x1 - a
    s = surrogate.sigmoid(h - 1.0 - 0.5 * x2)
    return s, h + x2, h - s, a * 0.8 + 0.25 * s


def recurrent(x, v, w):
    """Not elementwise: neurons see each other through a matrix."""
    v = torch.tanh(v @ w + x)
    return v.relu(), v


def crossed(x, v, a):
    """States that are read first of all, so that a compiler may take their memory for later values."""
    h = torch.tanh(v.softmax(-1) + x)
    k = torch.tanh(a.softmax(-1) * h)
    return torch.tanh(k.mT @ h), torch.tanh(h @ k), torch.tanh(k @ h)


class Leaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.4))
        self.register_buffer("b", torch.tensor(0.1))

    def forward(self, x, v):
        h = v * self.w + x + self.b
        s = surrogate.fast_sigmoid(h - 1.0)
        return [s, h - s]

    def method(self, x, v):
        return self.forward(x, v)


def scaled(k, x, v):
    return x * k + v, v * k


CASES = {  # core, counts, shapes of the operands
    "lif": (lif, (1, 1, 1), [(7, 5), (5,)]),
    "adaptive": (adaptive, (2, 2, 2), [(7, 2, 3), (7, 2, 3), (2, 3), (2, 3)]),
    "lifted": (smooth, (1, 1, 1), [(7, 5), (5,), (5,)]),
    "lifted scalar": (smooth, (1, 1, 1), [(7, 5), (5,), ()]),
    "recurrent": (recurrent, (1, 1, 1), [(7, 4, 5), (4, 5), (5, 5)]),
    "crossed": (crossed, (1, 2, 1), [(6, 5, 5), (5, 5), (5, 5)]),
    "no states": (lambda x: x * 2, (1, 0, 1), [(7, 5)]),
    "no outputs": (lambda x, v: v * 0.5 + x, (1, 1, 0), [(7, 5), (5,)]),
    "neither": (lambda x: (), (1, 0, 0), [(7, 5)]),
    "input returned": (lambda x, v: (x, v), (1, 1, 1), [(7, 5), (5,)]),
    "same tensor twice": (lambda x, v: [x + v] * 3, (1, 1, 2), [(7, 5), (5,)]),
    "swap": (lambda x, v, a: (v, a, x), (1, 2, 1), [(7, 5), (5,), (5,)]),
    "transposed result": (lambda x, v: (x.mT, v + x), (1, 1, 1), [(7, 2, 3), (2, 3)]),
    "constant": (lambda x, v: (torch.ones(3), v.detach() + 1, v + x), (1, 1, 2), [(7, 5), (5,)]),
    "state broadcasts": (lif, (1, 1, 1), [(7, 5), ()]),
    "one step": (lif, (1, 1, 1), [(1, 5), (5,)]),
    "one step, one neuron": (lif, (1, 1, 1), [(1, 1), (1,)]),
}
CASE = pytest.mark.parametrize("case", CASES)


def operands(shapes, requires_grad=False, dtype=torch.float32):
    return [(torch.randn(s, dtype=dtype) + 0.5).requires_grad_(requires_grad) for s in shapes]


def runner(name, states, core, counts, compiled=False, **options):
    def run(*args):
        return PUBLIC[name, states](core, *counts, *args, **options)

    return torch.compile(run, fullgraph=True) if compiled else run


def by_hand(core, counts, args, states="sequence"):
    """The definition, written out once more."""
    num_inputs, num_states, num_outputs = counts
    inputs, current, lifted = args[:num_inputs], args[num_inputs : num_inputs + num_states], args[num_inputs + num_states :]
    rows = []
    for step in zip(*inputs, strict=True):
        returned = core(*step, *current, *lifted)
        returned = (returned,) if isinstance(returned, torch.Tensor) else tuple(returned)
        current = returned[num_outputs:]
        rows.append(returned)
    sequences = [torch.stack(row) for row in zip(*rows, strict=True)]
    return (*sequences[:num_outputs], *current) if states == "final" else tuple(sequences)


def assert_same(got, want, exact=False):
    assert isinstance(got, tuple) and len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, **({"rtol": 0.0, "atol": 0.0} if exact else {}))


def assert_same_gradients(got, want, leaves):
    """Gradients of all leaves for the same cotangents, which stay as they are; None and zeros mean the same."""
    cotangents = [torch.randn_like(y) for y in want]
    before = [c.clone() for c in cotangents]
    grads = []
    for results in (got, want):
        pairs = [(y, c) for y, c in zip(results, cotangents, strict=True) if y.requires_grad]
        found = torch.autograd.grad([y for y, _ in pairs], leaves, [c for _, c in pairs], allow_unused=True)
        grads.append([torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)])
    assert all(torch.equal(a, b) for a, b in zip(cotangents, before, strict=True)), "a cotangent was overwritten"
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def assert_own_memory(results, args):
    assert all(y.is_contiguous() for y in results)
    places = [y.untyped_storage().data_ptr() for y in (*results, *args) if y.numel()]
    assert len(places) == len(set(places))


# --- values ---------------------------------------------------------------------------------------------------------------
@EVERY
@STATES
@CASE
def test_values(name, states, case):
    core, counts, shapes = CASES[case]
    args = operands(shapes)
    results = runner(name, states, core, counts)(*args)
    assert_same(results, by_hand(core, counts, args, states), exact=True)
    assert_own_memory(results, args)


@OPERATORS
@STATES
@CASE
@pytest.mark.slow
def test_values_compiled(name, states, case):
    core, counts, shapes = CASES[case]
    args = operands(shapes)
    with torch.no_grad():
        results = runner(name, states, core, counts, compiled=True)(*args)
    assert_same(results, by_hand(core, counts, args, states))
    assert_own_memory(results, args)


def test_eager_scan_compiled():
    """The Python loop is unrolled."""
    args = operands([(3, 5), (5,)])
    assert_same(runner("eager", "sequence", lif, (1, 1, 1), compiled=True)(*args), by_hand(lif, (1, 1, 1), args))


@EVERY
@STATES
@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [
        pytest.param(d, c, id=f"{str(d)[6:]}-{'compiled' if c else 'eager'}", marks=pytest.mark.slow if c and d is not torch.bool else ())
        for d in (torch.float64, torch.bfloat16, torch.int32, torch.bool)
        for c in (False, True)
    ],
)
def test_dtypes(name, states, compiled, dtype):
    """Inputs, states and results of any dtype; each keeps its own."""

    def core(x, v, n):
        return x, x.to(torch.int8), v, n + (x != 0)

    args = [torch.randn(4, 3).to(dtype), torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=torch.int64)]
    if compiled and name == "eager":
        return
    results = runner(name, states, core, (1, 2, 2), compiled)(*args)
    assert_same(results, by_hand(core, (1, 2, 2), args, states), exact=True)


@EVERY
@SLOWLY_COMPILED
def test_strided(name, compiled):
    if compiled and name == "eager":
        return
    x, v = torch.randn(6, 4, 2, 5).permute(3, 2, 0, 1)[::2], torch.randn(4, 1, 2).transpose(0, 2).expand(2, 6, 4)
    results = runner(name, "sequence", lif, (1, 1, 1), compiled)(x, v)
    assert_same(results, by_hand(lif, (1, 1, 1), (x, v)))
    assert_own_memory(results, (x, v))


@EVERY
@STATES
def test_channels_last_results_are_contiguous(name, states):
    x, v = torch.randn(3, 2, 4, 5).to(memory_format=torch.channels_last), torch.zeros(2, 4, 5)
    results = runner(name, states, lambda x, v: (x + 1, x + v), (1, 1, 1))(x, v)
    assert_own_memory(results, (x, v))


@EVERY
@SLOWLY_COMPILED
def test_kinds_of_core(name, compiled):
    """Functions, closures, bound methods, partials, modules, and a module's partial."""
    if compiled and name == "eager":
        return
    k, module = torch.tensor(0.5), Leaky()
    cores = [lif, lambda x, v: (x * k, v + k), module.method, functools.partial(scaled, 2.0), module, functools.partial(scaled, k)]
    args = operands([(4, 3), (3,)])
    with torch.no_grad():
        for core in cores:
            assert_same(runner(name, "sequence", core, (1, 1, 1), compiled)(*args), by_hand(core, (1, 1, 1), args))


# --- gradients ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["eager", "scan"])
@STATES
@CASE
def test_gradients(name, states, case):
    core, counts, shapes = CASES[case]
    args = operands(shapes, requires_grad=True)
    want = by_hand(core, counts, args, states)
    if any(y.requires_grad for y in want):
        assert_same_gradients(runner(name, states, core, counts)(*args), want, args)
    else:
        assert case == "neither"


@STATES
@CASE
@pytest.mark.slow
def test_gradients_compiled(states, case):
    core, counts, shapes = CASES[case]
    args = operands(shapes, requires_grad=True)
    want = by_hand(core, counts, args, states)
    if want:
        assert_same_gradients(runner("scan", states, core, counts, compiled=True)(*args), want, args)


@STATES
@pytest.mark.parametrize("case", ["lifted", "lifted scalar", "recurrent", "swap"])
def test_higher_order_gradients(states, case):
    core, counts, shapes = CASES[case]
    args = operands([(3, *s[1:]) if s and s[0] == 7 else s for s in shapes], requires_grad=True, dtype=torch.float64)
    run = runner("eager", states, core, counts)
    assert torch.autograd.gradcheck(run, args)
    assert torch.autograd.gradgradcheck(run, args)


@pytest.mark.slow
def test_numeric_gradients_of_scan():
    args = operands([(2, 2), (2,), (2,)], requires_grad=True, dtype=torch.float64)
    assert torch.autograd.gradcheck(runner("scan", "sequence", smooth, (1, 1, 1)), args)


@STATES
@SLOWLY_COMPILED
def test_scan_refuses_second_derivatives(states, compiled):
    """PyTorch's own are wrong: gradients of states and lifted tensors go missing."""
    args = operands([(2, 2), (2,), (2,)], requires_grad=True)
    results = runner("scan", states, smooth, (1, 1, 1), compiled)(*args)
    total = sum(y.sum() for y in results)
    torch.autograd.grad(total, args, retain_graph=True)
    with pytest.raises(RuntimeError, match="double backward" if compiled else "wrong second derivatives"):
        found = torch.autograd.grad(total, args, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in found), args)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of what a `scan` under `vmap` cuts its first step with
def test_operators_under_transforms():
    """Each batch of `vmap` starts from one state. PyTorch itself fails elsewhere, with errors that name nothing."""
    x, v, w = operands([(5, 3), (3,), (3,)])

    def run(name, x):
        return runner(name, "final", smooth, (1, 1, 1))(x, v, w)

    xs = torch.stack([x, 2 * x])
    torch.testing.assert_close(torch.vmap(lambda x: run("scan", x))(xs), torch.vmap(lambda x: run("eager", x))(xs))
    with pytest.raises(RuntimeError, match=r"`while_loop` does not run under `torch.func.vmap`: use `eager_scan`"):
        torch.vmap(lambda x: run("while_loop", x))(xs)
    for name in ("scan", "while_loop"):
        with pytest.raises(RuntimeError, match=rf"`{name}` does not run under `torch.func.grad`: use `eager_scan`"):
            torch.func.grad(lambda x, name=name: run(name, x)[0].sum())(x)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_while_loop_is_not_traced_by_make_fx(mode):
    args = operands([(5, 3), (3,), (3,)])
    with torch.no_grad():
        make_fx(runner("scan", "final", smooth, (1, 1, 1)), tracing_mode=mode)(*args)
        with pytest.raises(RuntimeError, match=r"cannot be traced by `make_fx`.*: use `lowerable_scan`, or export with `strict=True`"):
            make_fx(runner("while_loop", "final", smooth, (1, 1, 1)), tracing_mode=mode)(*args)


class Loops(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.run = runner(name, "final", smooth, (1, 1, 1))

    def forward(self, *args):
        return self.run(*args)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_a_while_loop_in_an_export(dynamic, strict):
    args = operands([(5, 3), (3,), (3,)])
    sizes = {"dynamic_shapes": (({0: torch.export.Dim("T")}, None, None),)} if dynamic else {}
    with torch.no_grad():
        if not strict:
            with pytest.raises(RuntimeError, match="or by an export with `strict=False`: use `lowerable_scan`"):
                torch.export.export(Loops("while_loop"), tuple(args), strict=strict, **sizes)
            return
        program = torch.export.export(Loops("while_loop"), tuple(args), strict=strict, **sizes)
        torch.testing.assert_close(list(program.module()(*args)), list(Loops("eager")(*args)))


SPIKES = [
    surrogate.atan, surrogate.sigmoid, surrogate.fast_sigmoid, surrogate.super_spike, surrogate.piecewise_linear, surrogate.gaussian,
    surrogate.straight_through,
]  # fmt: skip


@pytest.mark.parametrize("name", ["eager", "scan"])
@pytest.mark.parametrize("spike", SPIKES, ids=lambda f: f.__name__)
def test_surrogates(name, spike):
    def core(x, v):
        s = spike(v + x - 1.0)
        return s, (v + x) * 0.9 - s

    x, v = operands([(6, 5), (5,)], requires_grad=True)
    assert_same_gradients(runner(name, "sequence", core, (1, 1, 1))(x, v), by_hand(core, (1, 1, 1), (x, v)), [x, v])


@pytest.mark.parametrize("name", ["eager", "scan"])
@SLOWLY_COMPILED
@pytest.mark.parametrize("which", ["input", "state", "closure", "module"])
def test_gradients_of_some(name, compiled, which):
    """Of one operand only; the others, fresh states among them, do not require grad."""
    if compiled and name == "eager":
        return
    x, v = operands([(5, 3), (3,)])
    w, module = torch.tensor(0.7, requires_grad=True), Leaky()
    leaf = {"input": x, "state": v, "closure": w, "module": module.w}[which].requires_grad_()
    core = {"module": module, "closure": lambda x, v: (v + x, v * w + x)}.get(which, lif)
    assert_same_gradients(runner(name, "sequence", core, (1, 1, 1), compiled)(x, v), by_hand(core, (1, 1, 1), (x, v)), [leaf])


def test_gradient_reaches_a_state_that_starts_without():
    """The second state meets the gradient only at the second step."""

    def core(x, a, b):
        return b * 2, x * 3, b + a

    x, a, b = torch.randn(5, 3, requires_grad=True), torch.zeros(3), torch.zeros(3)
    for states in ("sequence", "final"):
        assert_same_gradients(runner("scan", states, core, (1, 2, 1))(x, a, b), by_hand(core, (1, 2, 1), (x, a, b), states), [x])


@COMPILED
def test_scan_refuses_to_train_integers(compiled):
    def core(x, v, n):
        s, v = lif(x, v)
        return s, v, n + s.detach().to(n.dtype)

    args = [torch.randn(4, 3, requires_grad=True), torch.zeros(3), torch.zeros(3, dtype=torch.int32)]
    run = runner("scan", "sequence", core, (1, 2, 1), compiled)
    with pytest.raises(RuntimeError, match="Observed exception" if compiled else r"cannot differentiate a core that returns torch.int32"):
        run(*args)
    with torch.no_grad():
        assert_same(runner("scan", "sequence", core, (1, 2, 1))(*args), by_hand(core, (1, 2, 1), args))


@COMPILED
@pytest.mark.parametrize("leaf", ["operand", "closure"])
def test_while_loop_refuses_to_train(compiled, leaf):
    x, v, w = torch.randn(4, 3), torch.zeros(3), torch.tensor(0.5)
    (x if leaf == "operand" else w).requires_grad_()
    run = runner("while_loop", "sequence", lambda x, v: (x * w, v + x), (1, 1, 1), compiled)
    with pytest.raises(RuntimeError, match="Observed exception" if compiled else "no gradients"):
        run(x, v)
    with torch.inference_mode():
        assert_same(run(x, v), by_hand(lambda x, v: (x * w, v + x), (1, 1, 1), (x, v)))


# --- nets, compiled ---------------------------------------------------------------------------------------------------------
class Neuron(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.scan = PUBLIC[name, "final"]

    def forward(self, x):
        return self.scan(lif, 1, 1, 1, x, torch.zeros_like(x[0]))[0]


class PerStep(nn.Module):
    """A layer of PyTorch on `[T, batch, ...]`."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def mlp(name):
    return nn.Sequential(nn.Linear(6, 8), Neuron(name), nn.Linear(8, 3))


def vgg(name):
    def block(a, b):
        return PerStep(nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b))), Neuron(name), PerStep(nn.MaxPool2d(2))

    return nn.Sequential(*block(1, 4), *block(4, 6), nn.Flatten(2), nn.Linear(6 * 4, 5))


NETS = {"one layer": (Neuron, (5, 2, 6)), "mlp": (mlp, (5, 2, 6)), "vgg": (vgg, (4, 2, 1, 8, 8))}


def pair(name, net):
    """The same net with the operator and with the Python loop."""
    make, shape = NETS[net]
    ours, reference = make(name), make("eager")
    reference.load_state_dict(ours.state_dict())
    return ours, reference, torch.randn(shape) * 2


@OPERATORS
@pytest.mark.parametrize("net", NETS)
@pytest.mark.slow
def test_net_inference(name, net):
    ours, reference, x = pair(name, net)
    ours.eval(), reference.eval()
    with torch.no_grad():
        y = torch.compile(ours, fullgraph=True)(x)
        torch.testing.assert_close(y, reference(x), rtol=1e-4, atol=1e-5)
        assert y.std() > 0


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "another"])
def test_gradients_of_compilers_that_are_not_known_are_doubted(compiler):
    args = operands(CASES["lifted"][2], requires_grad=True)
    core, counts, _ = CASES["lifted"]
    backend = (lambda graph, inputs: graph.forward) if compiler == "another" else compiler
    run = torch.compile(lambda *args: loops.lowerable_scan(core, *counts, *args), backend=backend, fullgraph=True)
    with torch.no_grad():
        run(*args)
    with pytest.warns(RuntimeWarning, match=DOUBTED) if compiler == "another" else contextlib.nullcontext():
        run(*args)


@pytest.mark.parametrize("net", ["mlp", "vgg"])
@pytest.mark.slow
def test_net_training(net):
    ours, reference, x = pair("scan", net)
    torch.compile(ours, fullgraph=True)(x).square().sum().backward()
    reference(x).square().sum().backward()
    for (label, a), b in zip(ours.named_parameters(), reference.parameters(), strict=True):
        assert b.grad.any(), label
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4 * b.grad.abs().max().item(), msg=lambda m, n=label: f"{n}: {m}")


# --- dynamic T --------------------------------------------------------------------------------------------------------------
class Compilations:
    """Inductor, and how often it ran."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, example_inputs):
        self.count += 1
        return torch._inductor.compile(graph, example_inputs)


@OPERATORS
@STATES
@pytest.mark.slow
def test_dynamic_length(name, states):
    backend, v = Compilations(), torch.zeros(6)
    run = torch.compile(lambda x, v: PUBLIC[name, states](lif, 1, 1, 1, x, v), fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for T in (5, 9, 3, 17):
            x = torch.randn(T, 6) + 0.7
            assert_same(run(x, v), by_hand(lif, (1, 1, 1), (x, v), states))
        assert backend.count == 1
        for T in (1, 0):
            x = torch.randn(T, 6)
            assert_same(run(x, v), loops.eager_scan(lif, 1, 1, 1, x, v, output_template_specs=[((6,), x.dtype)], states=states))


@pytest.mark.slow
@pytest.mark.parametrize(("core", "dynamic"), [(lambda x, v: (torch.tanh(v + x), v * 0.5 + x), True), (lif, None)], ids=["smooth", "lif"])
def test_dynamic_length_in_training(core, dynamic):
    """`dynamic=True` makes a surrogate's width a symbol too, which PyTorch 2.13 cannot follow into `scan`; T alone it can."""
    run = torch.compile(lambda x, v: loops.lowerable_scan(core, 1, 1, 1, x, v), fullgraph=True, dynamic=dynamic)
    for T in (5, 9, 3):
        x, v = operands([(T, 4), (4,)], requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        assert_same_gradients(run(x, v), by_hand(core, (1, 1, 1), (x, v)), [x, v])


# --- T == 0 -----------------------------------------------------------------------------------------------------------------
def never(*args):
    raise AssertionError("the core ran")


def takes_two(x, v):
    never()


@EVERY
def test_no_steps(name):
    x, v = torch.zeros(0, 5), torch.randn(3, 2, dtype=torch.float64).t()
    specs = [((4, 2), torch.int16), (torch.Size([7]), torch.float32, torch.device("meta"))]
    a, b, states = runner(name, "sequence", takes_two, (1, 1, 2), output_template_specs=specs)(x, v)
    assert (a.shape, a.dtype, a.device) == ((0, 4, 2), torch.int16, x.device)
    assert (b.shape, b.dtype, b.device.type) == ((0, 7), torch.float32, "meta")
    assert (states.shape, states.dtype) == ((0, 2, 3), torch.float64)
    *_, final = runner(name, "final", takes_two, (1, 1, 2), output_template_specs=specs)(x, v)
    assert_same((final,), (v,))
    assert_own_memory((final,), (v,))


@EVERY
@STATES
def test_no_steps_and_no_outputs_need_no_specs(name, states):
    (found,) = runner(name, states, takes_two, (1, 1, 0))(torch.zeros(0, 5), torch.ones(5))
    assert found.shape == ((5,) if states == "final" else (0, 5))


@EVERY
@pytest.mark.parametrize("specs", [None, [], [((5,), torch.float32)] * 2, [((5,),)]], ids=["none", "empty", "two", "no dtype"])
def test_no_steps_without_specs(name, specs):
    with pytest.raises(ValueError, match="T = 0 needs"):
        runner(name, "sequence", takes_two, (1, 1, 1), output_template_specs=specs)(torch.zeros(0, 5), torch.zeros(5))


@EVERY
@STATES
def test_no_steps_compiled(name, states):
    """Shapes come from the core's trace; given specs win."""
    x, v = torch.zeros(0, 5), torch.ones(5)
    core = lambda x, v: (torch.cat([x, x]).double(), v)
    y, _ = runner(name, states, core, (1, 1, 1), compiled=True)(x, v)
    assert (y.shape, y.dtype) == ((0, 10), torch.float64)
    y, _ = runner(name, states, core, (1, 1, 1), compiled=True, output_template_specs=[((3,), torch.int8)])(x, v)
    assert (y.shape, y.dtype) == ((0, 3), torch.int8)


def test_final_states_of_no_steps_are_differentiable():
    v = torch.ones(5, requires_grad=True)
    _, final = loops.eager_scan_final_state(lif, 1, 1, 1, torch.zeros(0, 5), v, output_template_specs=[((5,), torch.float32)])
    assert torch.equal(torch.autograd.grad(final.sum(), v)[0], torch.ones(5))


# --- errors -----------------------------------------------------------------------------------------------------------------
X, V = torch.ones(4, 3), torch.zeros(3)
MISTAKES = {
    "fewer tensors than inputs and states": (lif, (1, 1, 1), [X], errors.OperandCountError, "1 tensors for 1 inputs and 1 states"),
    "no input": (lif, (0, 2, 1), [X, V], errors.OperandCountError, "at least one input"),
    "negative": (lif, (1, -1, 1), [X, V], errors.OperandCountError, "at least one input"),
    "different T": (adaptive, (2, 2, 2), [X, X[:3], V, V], errors.SequenceLengthError, r"differ in T .*\[4, 3\]"),
    "0-dimensional input": (lif, (1, 1, 1), [V[0], V], errors.SequenceLengthError, "0-dimensional"),
    "not a tensor": (lif, (1, 1, 1), [X, 0.0], errors.OperandTypeError, "argument 1 must be a tensor, not float"),
    "too few returned": (lambda x, v: v, (1, 1, 1), [X, V], errors.ReturnCountError, "returned 1 values, expected 1 outputs [+] 1 states"),
    "too many returned": (lambda x, v: (v, v, v), (1, 1, 1), [X, V], errors.ReturnCountError, "returned 3 values"),
    "no tensor returned": (lambda x, v: None, (1, 1, 1), [X, V], errors.ReturnTypeError, "must return tensors"),
    "a number returned": (lambda x, v: (1.0, v), (1, 1, 1), [X, V], errors.ReturnTypeError, "must return tensors"),
    "state of another dtype": (lambda x, v: (x, v.double()), (1, 1, 1), [X, V], errors.StateMismatchError, "goes in as torch.float32"),
    "state of another shape": (lambda x, v: (x, v[:1]), (1, 1, 1), [X, V], errors.StateMismatchError, r"comes back as .*\[1\]"),
}


@EVERY
@STATES
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(name, states, mistake):
    core, counts, args, error, message = MISTAKES[mistake]
    assert issubclass(error, (ValueError, TypeError))
    with pytest.raises(error, match=message):
        runner(name, states, core, counts)(*args)


@EVERY
@pytest.mark.parametrize("core", [lambda x: x, Leaky(), functools.partial(scaled, 2.0)], ids=["function", "module", "partial"])
def test_core_that_cannot_take_the_arguments(name, core):
    with pytest.raises(ValueError, match=r"operands .* but was given 3"):
        runner(name, "sequence", core, (1, 1, 1))(X, V, V)


@pytest.mark.parametrize("name", ["eager", "scan", "while_loop"])
@pytest.mark.parametrize("mistake", [m for m in MISTAKES if m not in ("negative", "no tensor returned")])
def test_mistakes_compiled(name, mistake):
    """With `fullgraph=True` PyTorch raises its own error, which quotes ours; without, ours comes out."""
    core, counts, args, error, message = MISTAKES[mistake]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Observed exception"):
        runner(name, "sequence", core, counts, compiled=True)(*args)
    torch._dynamo.reset()
    with pytest.raises(error, match=message):
        torch.compile(runner(name, "sequence", core, counts))(*args)


@OPERATORS
def test_pytorch_without_the_operator(name, monkeypatch):
    available = {"scan": loops.lowerable_scan_available, "while_loop": loops.lowerable_while_loop_available}[name]
    assert available() is True
    monkeypatch.setattr(loops, {"scan": "torch_scan", "while_loop": "torch_while_loop"}[name], lambda: None)
    assert available() is False
    for states in ("sequence", "final"):
        with pytest.raises(RuntimeError, match=f"has no `{name}` operator"):
            runner(name, states, lif, (1, 1, 1))(X, V)


# --- the shared pieces --------------------------------------------------------------------------------------------------------
def test_arguments_are_split():
    inputs, states, lifted = loops.check_scan_arguments(lambda *args: args, 2, 1, 1, (X, X, V, V, X), None)
    assert [id(t) for t in (*inputs, *states, *lifted)] == [id(t) for t in (X, X, V, V, X)]
    assert (len(inputs), len(states), len(lifted)) == (2, 1, 2)


@pytest.mark.parametrize("function", [loops.eager_scan, loops.lowerable_scan, loops.lowerable_while_loop_scan], ids=lambda f: f.__name__)
def test_switch(function):
    """The paired names are one function with a switch."""
    name = {"eager_scan": "eager", "lowerable_scan": "scan", "lowerable_while_loop_scan": "while_loop"}[function.__name__]
    for states in ("sequence", "final"):
        assert_same(function(lif, 1, 1, 1, X, V, states=states), PUBLIC[name, states](lif, 1, 1, 1, X, V), exact=True)


def test_many_cores_outside_of_compile():
    """PyTorch compiles each body anew; its limit on that does not apply."""
    for k in range(12):
        core = lambda x, v: (x + v, v * k)
        assert_same(loops.lowerable_scan(core, 1, 1, 1, X, V), by_hand(core, (1, 1, 1), (X, V)))


def test_operators_are_imported_on_use():
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import flexsn._torch_compile.loops\n"
        "new = {m for m in sys.modules if m.startswith(('torch._higher_order_ops', 'torch._dynamo', 'torch._inductor'))}\n"
        "assert not new - before, sorted(new - before)\n"
    )
    root = Path(loops.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
