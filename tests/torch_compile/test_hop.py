"""`flex_sn_scan`: eager, traced (`make_fx`, AOT), compiled; one node per direction for any T."""

import contextlib
import functools
import subprocess
import sys
import warnings

import pytest
import torch
from cores import adlif, leaky, lif, plif
from functorch.compile import aot_function, make_boxed_func
from helpers import GRAD_TOLERANCE
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

import flexsn
from flexsn._torch_compile.hop import dynamo_hop_available, flex_sn_scan
from flexsn._torch_compile.loops import eager_scan
from flexsn.errors import FallbackWarning

# PyTorch's own scan imports TorchScript
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
f64 = torch.float64


def smooth(x, v, w):
    v = torch.sigmoid(w) * v + torch.tanh(x)
    return v * v, v


def mixing(x, v):
    v = 0.5 * v + x
    return v - v.mean(), v


def operands(T=7, dtype=f64, grad=True):
    return [torch.randn(*shape, dtype=dtype, requires_grad=grad) for shape in ((T, 3, 6), (3, 6), (6,))]


def assert_same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def assert_as_the_loop(call, counts, core, args):
    """Values and gradients of `call(core, *counts, *args)`."""
    found = []
    for scan in (call, eager_scan):
        leaves = [a.detach().requires_grad_() for a in args]
        values = scan(core, *counts, *leaves)
        grads = torch.autograd.grad([y for y in values if y.requires_grad], leaves, [torch.ones_like(y) for y in values if y.requires_grad])
        found.append(([y.detach() for y in values], grads))
    assert_same(found[0][0], found[1][0])
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=GRAD_TOLERANCE[a.dtype], atol=GRAD_TOLERANCE[a.dtype])


def compiled(core, *rest):
    """`flex_sn_scan` compiled whole."""
    return torch.compile(lambda *rest: flex_sn_scan(core, *rest), backend="aot_eager", fullgraph=True)(*rest)


CASES = {
    "lifted": (smooth, (1, 1, 1), [(7, 3, 4), (3, 4), (4,)]),
    "spikes": (lif, (1, 1, 1), [(7, 3, 4), (3, 4), (), ()]),
    "two of each": (adlif, (2, 2, 2), [(7, 4), (7, 4), (4,), (4,), (), (4,)]),
    "no state": (lambda x, w: x * w, (1, 0, 1), [(7, 4), (4,)]),
    "one step": (smooth, (1, 1, 1), [(1, 3, 4), (3, 4), (4,)]),
}


@pytest.mark.parametrize("call", [flex_sn_scan, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients(case, call):
    core, counts, shapes = case
    assert_as_the_loop(call, counts, core, [torch.randn(shape) for shape in shapes])


def test_gradcheck():
    assert torch.autograd.gradcheck(lambda *a: flex_sn_scan(smooth, 1, 1, 1, *a), operands(5))


@pytest.mark.parametrize("call", [flex_sn_scan, compiled], ids=["eager", "compiled"])
def test_results_are_contiguous_and_share_no_memory(call):
    x, v, w = operands(grad=False)
    results = call(lambda x, v, w: (x, v), 1, 1, 1, x.transpose(1, 2).contiguous().transpose(1, 2), v, w)
    assert all(y.is_contiguous() for y in results) and torch.equal(results[0], x) and torch.equal(results[1][-1], v)
    assert len({t.untyped_storage().data_ptr() for t in (x, v, w, *results)}) == 5


# --- traces -----------------------------------------------------------------------------------------------------------------------------
def names(graph):
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_trace_for_inference_holds_the_operator(mode):
    args = operands(grad=False)
    traced = make_fx(lambda *a: flex_sn_scan(smooth, 1, 1, 1, *a), tracing_mode=mode)(*args)
    (node,) = [n for n in traced.graph.nodes if n.target is flex_sn_scan]
    body = getattr(traced, node.args[0].target)
    assert node.args[1:4] == (1, 1, 1) and {"aten.tanh.default", "aten.sigmoid.default"} <= set(names(body.graph))
    assert_same(traced(*args), flex_sn_scan(smooth, 1, 1, 1, *args))
    if mode == "symbolic":
        longer = operands(33, grad=False)
        assert_same(traced(*longer), flex_sn_scan(smooth, 1, 1, 1, *longer))


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_a_trace_for_training_holds_one_kernel_per_direction(mode):
    def gradients(*args):
        leaves = [a.detach().requires_grad_() for a in args]
        return torch.autograd.grad([y.sum() for y in flex_sn_scan(smooth, 1, 1, 1, *leaves)], leaves)

    found = []
    for T in (4, 400):
        args = operands(T, grad=False)
        traced = make_fx(gradients, tracing_mode=mode)(*args)
        found.append([name for name in names(traced.graph) if "getitem" not in name])  # checkpoints are one result more
        assert_same(traced(*args), gradients(*args))
    for nodes in found:
        assert nodes.count("flexsn.forward.default") == nodes.count("flexsn.backward.default") == 1
    assert found[0] == found[1]


@pytest.mark.parametrize("grad", [False, True])
def test_aot_function(grad):
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(names(graph.graph))
        return make_boxed_func(graph.forward)

    args = operands(grad=grad)
    values = aot_function(lambda *a: flex_sn_scan(smooth, 1, 1, 1, *a), fw_compiler=keep, bw_compiler=keep)(*args)
    want = flex_sn_scan(smooth, 1, 1, 1, *args)
    assert_same(values, want)
    assert graphs[0].count("flexsn.forward.default") == 1
    if grad:
        assert_same(*(torch.autograd.grad(sum(y.sum() for y in each), args) for each in (values, want)))
        assert graphs[1].count("flexsn.backward.default") == 1


# --- compiled ---------------------------------------------------------------------------------------------------------------------------
def test_dynamo_takes_it():
    assert dynamo_hop_available() is True


def test_where_dynamo_cannot_take_it_a_warning_says_why(monkeypatch):
    def moved():
        raise ImportError("no `speculate_subgraph` here")

    monkeypatch.setattr(flexsn._torch_compile.dynamo, "register", moved)
    with pytest.warns(RuntimeWarning, match=r"torch.compile cannot take flex_sn_scan: ImportError: no `speculate_subgraph` here"):
        assert flexsn._torch_compile.hop._register() is False
    monkeypatch.setattr(flexsn._torch_compile.hop, "_available", False)
    assert dynamo_hop_available() is False


UNTOUCHED = """
import torch
from torch._dynamo.variables import builder, functions, higher_order_ops, misc, nn_module, torch as variables

def names():
    classes = {c for m in (builder, functions, higher_order_ops, misc, nn_module, variables) for c in vars(m).values() if isinstance(c, type)}
    found = {(c.__module__, c.__qualname__, name): value for c in classes for name, value in vars(c).items() if callable(value)}
    return found | {("table", name): c for name, c in higher_order_ops._hop_name_to_variable_class.items()}

before = names()
import flexsn
from flexsn.lowlevel import flex_sn_scan
x = torch.rand(4, 3)
core = lambda x, v: (x + v, x + v)
net = flexsn.FlexSN(core, 1, 1)
torch.compile(lambda x: flex_sn_scan(core, 1, 1, 1, x, x[0])[0] + net(x), backend="eager", fullgraph=True)(x)
after = names()
own = {k for k in after.keys() - before.keys() if k[0] != "table" and not k[0].startswith("flexsn")}
print(all(after[k] is v for k, v in before.items()), sorted(own), sorted(k[1] for k in after.keys() - before.keys() if k[0] == "table"))
"""


def test_dynamo_is_told_and_not_patched():
    """Every method of its classes, and every operator that it knew, is what it was before flexsn was imported and used."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", UNTOUCHED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    same, own, told = done.stdout.split(" ", 2)
    assert same == "True" and own == "[]" and eval(told) == sorted(flexsn._torch_compile.dynamo.INLINED), done.stdout


@pytest.mark.parametrize("grad", [False, True])
def test_the_hop_backend_compiles_whole_with_closures(grad):
    found = []
    for compiler in (None, "aot_eager", "inductor"):
        w, x = torch.tensor([0.3, -0.1, 1.0], requires_grad=True), torch.linspace(-1, 2, 15).view(5, 3).requires_grad_(grad)
        net = flexsn.FlexSN(closure(w), 1, 1, backend="hop", stateful=False)
        call = net if compiler is None else torch.compile(net, fullgraph=True, backend=compiler)
        with torch.set_grad_enabled(grad):
            y = call(x)
        found.append((y, *(torch.autograd.grad(y.sum(), [x, w]) if grad else ())))
    for got in found[1:]:
        torch.testing.assert_close(got, found[0])


class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(4))

    def forward(self, x, v):
        return plif(x, v, self.w)

    def other(self, x, v):
        return plif(2.0 * x, v, self.w)


def closure(w):
    def core(x, v):
        return plif(x, v, w)

    return core


KINDS = {
    "closure": lambda core: closure(core.w),
    "bound method": lambda core: core.other,
    "partial": lambda core: functools.partial(plif, w=core.w),
    "module": lambda core: core,
    "lambda": lambda core: lambda x, v: plif(x, v, core.w),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) if n in ("bound method", "partial") else k for n, k in KINDS.items()], ids=KINDS
)
def test_kinds_of_cores_compile_whole(kind):
    owner, x = Core(), torch.randn(7, 3, 4)
    core, counter, found = kind(owner), CompileCounterWithBackend("aot_eager"), []

    def call(x):
        return flex_sn_scan(core, 1, 1, 1, x, x.new_zeros(3, 4))

    for run in (torch.compile(call, backend=counter, fullgraph=True), call):
        values = run(x)
        found.append([*values, *torch.autograd.grad(values[0].sum(), owner.w)])
    assert counter.frame_count == 1
    assert_same(*found)


def test_dynamic_lengths_compile_once():
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda *a: flex_sn_scan(smooth, 1, 1, 1, *a), backend=counter, fullgraph=True, dynamic=True)
    for T in (5, 17, 100):
        args = operands(T)
        assert_same(call(*args), flex_sn_scan(smooth, 1, 1, 1, *args))
    assert counter.frame_count == 1


@pytest.mark.parametrize("fullgraph", [False, True])
def test_counts_may_be_symbols_of_dynamo(fullgraph):
    """As numbers of closures and arguments are with `dynamic=True`: a graph for each."""
    args = operands(grad=False)
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda n, *a: flex_sn_scan(smooth, n, n, n, *a), backend=counter, fullgraph=fullgraph, dynamic=True)
    assert_same(call(1, *args), flex_sn_scan(smooth, 1, 1, 1, *args))

    def two(x, y, v, u, w):
        return x + v, y * w, 0.5 * v + x, u + 1

    args = [args[0], args[0] * 2, args[1], args[1] * 2, args[2]]
    call = torch.compile(lambda n, *a: flex_sn_scan(two, n, n, n, *a), backend=counter, fullgraph=fullgraph, dynamic=True)
    assert_same(call(2, *args), flex_sn_scan(two, 2, 2, 2, *args))
    assert counter.frame_count == 2


class Connected(nn.Module):
    def __init__(self):
        super().__init__()
        self.p, self.linear = nn.Parameter(torch.full((6,), 0.7, dtype=f64)), nn.Linear(6, 6, dtype=f64)

    def core(self, x, v):
        h = self.p * v + x * self.p + 0.1 * self.linear(v)
        return torch.tanh(h), h

    def forward(self, x, v):
        sequence, trail = flex_sn_scan(self.core, 1, 1, 1, x, v)
        return sequence.sum(0) + trail[-1]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo asks what comes back from between the parts for
def test_gradients_between_compiled_parts():
    """What the graph is broken for runs as it is, and no part of it in a graph of its own: Inductor's gradients of `scan` are wrong."""
    net, (x, v, _) = Connected(), operands(grad=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=FallbackWarning)  # what mixes neurons takes turns with a kernel
        found = torch.compile(net)(x, v)
    sequence, trail = eager_scan(net.core, 1, 1, 1, x, v)
    expected = sequence.sum(0) + trail[-1]
    assert_same([found], [expected])
    params = list(net.parameters())
    assert_same(torch.autograd.grad(found.sum(), params), torch.autograd.grad(expected.sum(), params))


class Capturing(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.unread, self.loose = nn.Parameter(torch.rand(6, dtype=f64)), nn.Parameter(torch.rand(2)), torch.rand(6, dtype=f64)
        self.register_buffer("b", torch.rand(6, dtype=f64))

    def core(self, x, v):
        return torch.tanh(x * self.w + v) + self.b, 0.5 * v + x * self.loose

    def forward(self, x, v):
        return flex_sn_scan(self.core, 1, 1, 1, x, v)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_export_lifts_what_the_core_captures(dynamic, strict, grad):
    net, (x, v, _) = Capturing(), operands(grad=False)
    with torch.set_grad_enabled(grad):
        program = torch.export.export(net, (x, v), strict=strict, dynamic_shapes=({0: torch.export.Dim("T")}, None) if dynamic else None)
    run = program.module()
    x = torch.randn(9 if dynamic else 7, 3, 6, dtype=f64)
    assert_same(run(x, v), net(x, v))
    with torch.no_grad():
        run.w.mul_(2.0)
        run.b.add_(1.0)
    assert torch.equal(run.w, net.w)  # an export shares them
    assert_same(run(x, v), net(x, v))


class Doubling(nn.Module):
    def forward(self, x):
        return 2.0 * x


class Tied(nn.Module):
    """With a module under two names."""

    def __init__(self):
        super().__init__()
        self.one = self.other = Doubling()

    def forward(self, x, v):
        return flex_sn_scan(lambda x, v: (torch.tanh(x + v), 0.5 * v + self.one(x)), 1, 1, 1, x, v)


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_of_a_core_that_calls_a_module_under_two_names(strict):
    net, (x, v, _) = Tied(), operands(grad=False)
    assert_same(torch.export.export(net, (x, v), strict=strict).module()(x, v), net(x, v))


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_a_trace_lifts_what_the_core_captures(mode):
    net, (x, v, _) = Capturing(), operands(grad=False)
    with torch.no_grad():
        traced = make_fx(net, tracing_mode=mode, _allow_non_fake_inputs=True)(x, v)
        (node,) = [n for n in traced.graph.nodes if n.target is flex_sn_scan]
        assert len(node.args) == 4 + 2 + 3  # the parameter that the core reads, the buffer, the tensor
        assert_same(traced(x, v), net(x, v))


# --- no steps ----------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("call", [flex_sn_scan, compiled], ids=["eager", "compiled"])
def test_zero_steps(call):
    x, v, w = operands(0, grad=False)
    specs = [((3, 4, 2), torch.float16)]
    scan = functools.partial(flex_sn_scan, output_template_specs=specs)
    y, states = (
        scan(smooth, 1, 1, 1, x, v, w)
        if call is flex_sn_scan
        else torch.compile(scan, backend="eager", fullgraph=True)(smooth, 1, 1, 1, x, v, w)
    )
    assert y.shape == (0, 3, 4, 2) and y.dtype is torch.float16 and states.shape == (0, 3, 6) and states.dtype is f64


def test_zero_steps_compiled_need_no_specs():
    y, states = compiled(smooth, 1, 1, 1, *operands(0, grad=False))
    assert y.shape == states.shape == (0, 3, 6)


def test_zero_steps_do_not_run_the_core():
    def core(x, v):
        raise AssertionError

    x, v, _ = operands(0, grad=False)
    y, _ = flex_sn_scan(core, 1, 1, 1, x, v, output_template_specs=[((2,), torch.bool)])
    assert y.shape == (0, 2) and y.dtype is torch.bool


# --- mistakes ----------------------------------------------------------------------------------------------------------------------------
MISTAKES = {
    "no input": (0, 1, 1, lambda: [torch.ones(3)]),
    "too few tensors": (1, 1, 1, lambda: [torch.ones(5, 3)]),
    "sequences of different lengths": (2, 0, 1, lambda: [torch.ones(5, 3), torch.ones(4, 3)]),
    "more tensors than the core takes": (1, 1, 1, lambda: [torch.ones(5, 3), *[torch.ones(3)] * 3]),
    "another number of returns": (1, 1, 2, lambda: [torch.ones(5, 3), torch.ones(3), torch.ones(3)]),
    "no specs for no steps": (1, 1, 1, lambda: [torch.ones(0, 3), torch.ones(3), torch.ones(3)]),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_value_errors(mistake):
    *counts, args = mistake
    with pytest.raises(ValueError):
        flex_sn_scan(leaky, *counts, *args())


def test_specs_of_the_wrong_number():
    with pytest.raises(ValueError, match="output_template_specs"):
        flex_sn_scan(leaky, 1, 1, 1, torch.ones(0, 3), torch.ones(3), torch.ones(3), output_template_specs=[])


# --- a core that no kernel expresses --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("call", [flex_sn_scan, compiled], ids=["eager", "compiled"])
def test_a_core_that_mixes_neurons_in_16_bits(call):
    x, v, _ = operands(dtype=torch.bfloat16, grad=False)
    with pytest.warns(FallbackWarning, match="mean"):
        assert_as_the_loop(call, (1, 1, 1), mixing, [x, v])


@pytest.mark.parametrize("call", [flex_sn_scan, compiled], ids=["eager", "compiled"])
def test_a_core_that_mixes_neurons_runs_in_pieces(call):
    x, v, _ = operands(grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert_as_the_loop(call, (1, 1, 1), mixing, [x, v])


@pytest.mark.parametrize("dtype", [f64, torch.bfloat16])
def test_a_core_that_mixes_neurons_in_a_trace(dtype):
    """What runs the trace cuts the core into pieces where that can be."""
    x, v, _ = operands(dtype=dtype, grad=False)
    with pytest.warns(FallbackWarning, match="PyTorch's own scan"):
        traced = make_fx(lambda x, v: flex_sn_scan(mixing, 1, 1, 1, x, v), tracing_mode="fake")(x, v)
    with warnings.catch_warnings() if dtype is f64 else pytest.warns(FallbackWarning, match="the eager loop"):
        if dtype is f64:
            warnings.simplefilter("error", FallbackWarning)
        assert_same(traced(x, v), eager_scan(mixing, 1, 1, 1, x, v))


def fusable(x, v):
    v = 0.5 * v + x
    return v.tanh(), v


TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "vmap": lambda f, x: torch.vmap(f)(torch.stack([x, 2 * x])),
    "per sample": lambda f, x: torch.vmap(torch.func.grad(lambda x: f(x).square().sum()))(torch.stack([x, 2 * x])),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of what forward mode imports
@pytest.mark.parametrize("core", [fusable, mixing])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_what_no_kernel_expresses(transform, core):
    x, v, _ = operands(grad=False)

    def through(scan):
        return TRANSFORMS[transform](lambda x: scan(core, 1, 1, 1, x, v)[0], x)

    with pytest.warns(FallbackWarning, match="the eager loop") if core is mixing else contextlib.nullcontext():
        got = through(flex_sn_scan)
    torch.testing.assert_close(got, through(eager_scan))
