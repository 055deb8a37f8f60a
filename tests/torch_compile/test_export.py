"""`torch.export` of networks with neurons: saved, loaded and run elsewhere, packaged, and without flexsn."""

import operator
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cores import adlif, lif, lif_soft, plif, relu_mem
from torch import nn
from torch._inductor.exc import InductorError
from torch.export import Dim, export

import flexsn
from flexsn import surrogate
from flexsn._ir.graph import Builder, interpret
from flexsn._ir.ops import OPS
from flexsn._torch_compile.export import run_step
from flexsn.errors import CarriedStateError, DecomposeError, ForwardModeError, MissingGradientError, StaleStateError

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"),  # PyTorch's own, 2.13
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # of surrogates, by Dynamo
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),  # Inductor's own
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning"),  # strict: states are assigned
]
ROOT = Path(flexsn.__file__).parent.parent
STRICT = pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
SLOWLY_STRICT = pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["non-strict", "strict"])
DYNAMIC = ({0: Dim("T", min=1), 1: Dim("B", min=1)},)
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SIZES = ((5, 3), (12, 2), (1, 7), (40, 1))


class Learnt(nn.Module):
    """A LIF with a learnt time constant and threshold per channel, and a captured constant."""

    def __init__(self, channels):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1.0, 1.0, channels))
        self.register_buffer("threshold", torch.full((channels,), 0.5))

    def forward(self, x, v):
        h = v + (x - v) * torch.sigmoid(self.w)
        s = surrogate.atan(h - self.threshold)
        return s, h * (1.0 - s)


class Network(nn.Module):
    """Returns the spikes, too: they show any difference."""

    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.readout = nn.Linear(8, 16), flexsn.FlexSN(Learnt(16), num_states=1), nn.Linear(16, 4)

    def forward(self, x):
        spikes = self.hidden(self.embed(x))
        return spikes, self.readout(spikes)


def eager(net, x):
    flexsn.reset_net(net)
    with torch.no_grad():
        found = net(x)
    flexsn.reset_net(net)
    return found


def sequence(T=5, batch=3, channels=8, device="cpu"):
    return 3.0 * torch.randn(T, batch, channels, device=device)


def elsewhere(code, *arguments):
    """What `code` prints in a new process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd="/")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def save_cases(path, net, sizes=SIZES):
    device = next(net.parameters()).device
    cases = [(x, *eager(net, x)) for x in (sequence(*size, device=device) for size in sizes)]
    assert all(0.05 < spikes.mean() < 0.95 for _, spikes, _ in cases)
    torch.save(cases, path)


CHECK = """
for x, spikes, y in torch.load(sys.argv[2]):
    got = run(x)
    assert torch.equal(got[0], spikes), (got[0] != spikes).sum()
    torch.testing.assert_close(got[1], y)
    torch.testing.assert_close(run(x), got, rtol=0, atol=0)  # starts from zero states again
"""


# --- export, save, load -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
@DEVICES
@SLOWLY_STRICT
def test_saved_program_runs_in_a_process_that_has_only_imported_flexsn(strict, device, tmp_path):
    net = Network().to(device)
    save_cases(tmp_path / "cases.pt", net)
    torch.export.save(export(net, (sequence(device=device),), dynamic_shapes=DYNAMIC, strict=strict), tmp_path / "net.pt2")
    code = "import sys, torch, flexsn\nrun = torch.export.load(sys.argv[1]).module()" + CHECK
    elsewhere(code, tmp_path / "net.pt2", tmp_path / "cases.pt")


def test_exported_program_can_be_trained():
    net, x = Network(), sequence()
    program = export(net, (x,)).module()
    net(x)[1].square().sum().backward()
    program(x)[1].square().sum().backward()
    want = {n: p.grad for n, p in net.named_parameters()}
    found = {n: p.grad for n, p in program.named_parameters()}
    assert want.keys() == found.keys() and want["hidden.core.w"].abs().sum() > 0
    for name in want:
        torch.testing.assert_close(found[name], want[name], msg=name)


@STRICT
def test_a_program_without_gradients_says_so_when_it_is_differentiated(strict):
    """It was exported under `no_grad`, or of a network with nothing to train. (A core of its own: what this process has differentiated
    before, it knows.)"""
    number = 0.8125 if strict else 0.6875

    def own(x, v):
        return v * number + x, v * number + x

    x = sequence()
    with torch.no_grad():
        deployed = export(nn.Sequential(nn.Linear(8, 8), flexsn.FlexSN(own, num_states=1)), (x,), strict=strict).module()
        want = deployed(x)
    found = deployed(x)
    assert torch.equal(found, want)
    with pytest.raises(MissingGradientError, match=r"core `own`: .*exported under `no_grad`"):
        found.sum().backward()
    alone, leaf = export(nn.Sequential(flexsn.FlexSN(own, num_states=1)), (x,), strict=strict).module(), x.clone().requires_grad_()
    with pytest.raises(MissingGradientError):
        (alone(leaf) + leaf).sum().backward()


class Shared(nn.Module):
    """A core under two names, and in two neurons."""

    def __init__(self):
        super().__init__()
        self.core = Learnt(8)
        self.first, self.second = flexsn.FlexSN(self.core, num_states=1), flexsn.FlexSN(self.core, num_states=1)

    def forward(self, x):
        return self.second(self.first(x) * 3.0)


@STRICT
def test_a_core_under_two_names(strict):
    net, x = Shared(), sequence()
    program = export(net, (x,), dynamic_shapes=({0: Dim("T"), 1: Dim("B", min=2)},), strict=strict).module()
    for T, B in ((7, 8), (3, 2)):
        x = sequence(T, B)
        flexsn.reset_net(net)
        want, found = net(x), program(x)
        assert want.any() and torch.equal(found, want)
    gradient = lambda y, module: torch.autograd.grad(y.sum(), list(dict(module.named_parameters()).values()))
    torch.testing.assert_close(gradient(found, program), gradient(want, net))


def test_steps_whose_number_a_trace_finds():
    """PyTorch's `layer_norm` under `vmap` makes numbers of all sizes: a dynamic T is PyTorch's error, and one that may be static runs."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            return flexsn.scan(lif, (torch.vmap(self.norm)(x),), (torch.zeros(3, 8),), (torch.tensor(2.0), torch.tensor(1.0))).outputs[0]

    net, x = Net(), torch.randn(12, 3, 8)
    with pytest.raises(Exception, match="marked T as dynamic but your code specialized it to be a constant"):
        export(net, (x,), dynamic_shapes=({0: Dim("T")},), strict=False)
    program = export(net, (x,), dynamic_shapes=({0: Dim.AUTO},), strict=False).module()
    assert torch.equal(program(x), net(x)) and net(x).any()


@STRICT
def test_a_batch_stays_dynamic_beside_smaller_states(strict):
    class Net(nn.Module):
        def forward(self, x, v):
            return flexsn.scan(lambda x, v: (v + x, v * 0.5 + x), (x,), (v,)).outputs[0]

    net, v = Net(), torch.ones(4)
    program = export(net, (torch.randn(3, 5, 4), v), dynamic_shapes=({0: Dim("T"), 1: Dim("B")}, None), strict=strict).module()
    for B in (4, 2, 9):
        x = torch.randn(6, B, 4)
        assert torch.equal(program(x, v), net(x, v))


# --- states -----------------------------------------------------------------------------------------------------------------
def neuron(**options):
    return flexsn.FlexSN(lambda x, v: lif(x, v, 2.0, 1.0), num_states=1, **options)


@STRICT
def test_export_leaves_no_states(strict):
    net, x = nn.Sequential(neuron(store_state_seqs=True)), sequence()
    export(net, (x,), strict=strict)
    assert net[0].states is None and net[0].state_seqs is None
    want = neuron()
    assert torch.equal(net(x), want(x)) and torch.equal(net(x), want(x))  # from zero states, then from those of the first call
    assert len(net[0].state_seqs) == 1


def test_export_that_fails_leaves_no_states():
    class Fails(nn.Sequential):
        def forward(self, x):
            super().forward(x)
            raise KeyError("after the neuron")

    net, x = Fails(neuron()), sequence()
    with pytest.raises(KeyError, match="after the neuron"):
        export(net, (x,), strict=False)
    assert torch.equal(net[0](x), neuron()(x))


@STRICT
def test_carried_states_are_not_exported(strict):
    net, x = nn.Sequential(nn.Linear(8, 8), neuron()), sequence()
    net(x)
    with pytest.raises(CarriedStateError, match=r"core `<lambda>`: carries states.*\n.*`reset\(\)`.*flexsn\.scan"):
        export(net, (x,), strict=strict)
    assert not isinstance(net[1].states[0], torch._subclasses.FakeTensor)
    flexsn.reset_net(net)
    want = eager(net, x)
    assert torch.equal(export(net, (x,), strict=strict).module()(x), want)


@STRICT
def test_a_neuron_called_twice_in_one_program_carries_its_states(strict):
    class Twice(nn.Sequential):
        def forward(self, x):
            first = super().forward(x)
            flexsn.detach_states(self)
            return first, super().forward(x)

    net, x = Twice(neuron()), sequence()
    want = eager(net, x)
    assert not torch.equal(*want)
    torch.testing.assert_close(export(net, (x,), strict=strict).module()(x), want, rtol=0, atol=0)
    assert net[0].states is None


@STRICT
def test_states_as_inputs_of_a_program(strict):
    class Carrying(nn.Module):
        def __init__(self):
            super().__init__()
            self.core = Learnt(8)

        def forward(self, x, v):
            result = flexsn.scan(self.core, (x,), (v,))
            return result.outputs[0], result.states[0]

    net, x, v = Carrying(), sequence(12), torch.randn(3, 8)
    program = export(net, (x, v), dynamic_shapes=({0: Dim("T", min=1)}, None), strict=strict).module()
    whole, last = program(x, v)
    first, between = program(x[:5], v)
    second, end = program(x[5:], between)
    assert torch.equal(whole, net(x, v)[0]) and torch.equal(torch.cat([first, second]), whole) and torch.equal(end, last)


@STRICT
def test_functorch_takes_a_program_with_a_stateful_neuron(strict):
    net, x = nn.Sequential(nn.Linear(8, 8), neuron()), sequence()
    program = export(net, (x,), strict=strict).module()

    def grads(module):
        loss = lambda params, x: torch.func.functional_call(module, params, (x,)).square().mean()
        named = {name: p.detach() for name, p in module.named_parameters()}
        return torch.func.grad(loss)(named, x), torch.func.vmap(torch.func.grad(loss), (None, 0))(named, torch.stack([x, 2 * x]))

    torch.testing.assert_close(grads(program), grads(nn.Sequential(net[0], neuron(stateful=False))))


def test_compiled_calls_are_no_exports():
    net, want, x = neuron(), neuron(), sequence()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(x), want(x))
    assert isinstance(net.states, list) and torch.equal(net.states[0], want.states[0])


def under_vmap(net, x):
    torch.func.vmap(net, in_dims=2, out_dims=2)(x.unsqueeze(2))


def under_vmap_of_grad(net, x):
    torch.func.vmap(torch.func.grad(lambda x: net(x).sum()), in_dims=1)(x)


def on_fake_tensors(net, x):
    with torch._subclasses.FakeTensorMode():
        net(torch.empty(x.shape))


def inside_make_fx(net, x):
    torch.fx.experimental.proxy_tensor.make_fx(net, tracing_mode="symbolic")(x)


def exported_unregistered(net, x):
    class Hiding(nn.Module):
        def forward(self, x):
            return net(x)

    export(Hiding(), (x,), strict=False)


@pytest.mark.parametrize("known", [False, True], ids=["first call", "known call"])
@pytest.mark.parametrize("leave", [under_vmap, under_vmap_of_grad, on_fake_tensors, inside_make_fx, exported_unregistered])
def test_states_left_by_a_trace_are_refused(leave, known):
    net, x = neuron(), sequence()
    for _ in range(2 * known):  # with states and without
        net(x)
    net.reset()
    want = neuron()(x)
    leave(net, x)
    for _ in range(2):
        with pytest.raises(StaleStateError, match=r"state `v` was left by a trace.*\n.*`reset\(\)`"):
            net(x)
    net.reset()
    assert torch.equal(net(x), want)


def test_states_left_by_an_ended_grad_have_values():
    net, want, x = neuron(), neuron(), sequence()
    torch.func.grad(lambda x: net(x).sum())(x)
    want(x)
    assert torch.equal(net(x), want(x))


# --- decompose --------------------------------------------------------------------------------------------------------------
def operators(program):
    """Names of all that a program calls, bodies of loops included."""
    nodes = [n for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule) for n in m.graph.nodes]
    return {str(n.target) for n in nodes if n.op == "call_function"}


class Scan(nn.Module):
    """`flexsn.scan`, of which outputs and final states or state sequences are returned."""

    def __init__(self, core, sequences=False, inputs=1):
        super().__init__()
        self.core, self.sequences, self.inputs = core, sequences, inputs

    def forward(self, inputs, states, params):
        result = flexsn.scan(self.core, inputs, states, params, store_state_seqs=self.sequences)
        return *result.outputs, *result.states


def captures(x, v):
    h = v * TABLE[2] + x * WEIGHTS
    return h.relu(), h


TABLE, WEIGHTS = torch.tensor([0.25, 0.5, 0.75]), torch.linspace(-1.0, 1.0, 8)


def odd_returns(x, v, u, w):
    """An output that is a param, one that is a number, one twice, an input, and a state that stays as it is."""
    h = x + v
    return w.exp(), torch.zeros_like(x), h, h, x, h, u


def integers(x, v, n):
    fired = x > v
    return fired, (n >> 1) ^ 3, torch.where(fired, 0.0, v + x), n + fired


def narrow(x, v, w):
    """Outputs and states of fewer neurons than the step shape has."""
    return x + v, w * 2.0, v + w


CASES = {
    "lif": (lif, [()], [None], [torch.tensor(2.0), torch.rand(8)]),
    "lif_soft, state given": (lif_soft, [()], [torch.randn(3, 8)], [torch.tensor(2.0), torch.rand(8)]),
    "plif, state broadcast": (plif, [()], [torch.randn(8)], [torch.randn(8)]),
    "adlif": (adlif, [(), ()], [None, torch.randn(3, 8)], [torch.tensor(0.9), torch.rand(8)]),
    "relu_mem": (relu_mem, [()], [None], []),
    "captures": (captures, [()], [None], []),
    "no state": (lambda x, z: (x * z, x > z), [(), ()], [], []),
    "odd returns": (odd_returns, [()], [None, torch.randn(3, 8)], [torch.randn(8)]),
    "integers": (integers, [()], [torch.randn(3, 8), torch.randint(100, (3, 8))], []),
    "narrow": (narrow, [()], [torch.randn(8)], [torch.randn(8)]),
}
LOOPS = pytest.mark.parametrize("loop", ["scan", "unroll"])


def call_of(name, dtype=torch.float32, T=6):
    core, inputs, states, params = CASES[name]
    x = tuple((2.0 * torch.randn(T, 3, 8)).to(dtype) for _ in inputs)

    def cast(tensors):
        return tuple(t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors)

    return core, (x, cast(states), cast(params))


def assert_equal(got, want):
    torch.testing.assert_close(tuple(got), tuple(want), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("loop, sequences", [("scan", False), ("scan", True), ("unroll", False)])
@pytest.mark.parametrize("name", CASES)
def test_decomposed_programs_keep_the_bits_of_eager(name, loop, sequences):
    core, operands = call_of(name)
    decomposed = flexsn.decompose(export(Scan(core, sequences), operands), loop)
    outputs, states = flexsn.scan(core, *operands, store_state_seqs=sequences, backend="torch")
    assert_equal(decomposed.module()(*operands), (*outputs, *states))
    assert not any("flexsn" in name for name in operators(decomposed))


@LOOPS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["lif", "adlif", "plif, state broadcast"])
def test_decomposed_programs_compute_16_bit_floats_in_float32(name, dtype, loop):
    core, operands = call_of(name, dtype)
    decomposed = flexsn.decompose(export(Scan(core, True), operands), loop).module()
    outputs, states = flexsn.scan(core, *operands, store_state_seqs=True, backend="torch")
    assert_equal(decomposed(*operands), (*outputs, *states))


@LOOPS
def test_decomposing_no_steps_at_all(loop):
    core, operands = call_of("odd returns", T=0)
    program = export(Scan(core), operands)
    assert_equal(flexsn.decompose(program, loop).module()(*operands), program.module()(*operands))


def test_a_decomposed_scan_keeps_T_and_batch_dynamic():
    net = Network()
    decomposed = flexsn.decompose(export(net, (sequence(),), dynamic_shapes=DYNAMIC))
    for size in SIZES:
        x = sequence(*size)
        spikes, y = decomposed.module()(x)
        want = eager(net, x)
        assert torch.equal(spikes, want[0])
        torch.testing.assert_close(y, want[1])
    assert {o for o in operators(decomposed) if not o.startswith(("aten.", "<built-in"))} == {"scan"}


def test_an_unrolled_program_is_aten_alone():
    net, x = Network(), sequence()
    decomposed = flexsn.decompose(export(net, (x,)), loop="unroll")
    assert all(name.startswith(("aten.", "<built-in function getitem")) for name in operators(decomposed))
    assert torch.equal(decomposed.module()(x)[0], eager(net, x)[0])


def test_what_cannot_be_decomposed():
    program = export(Network(), (sequence(),), dynamic_shapes=DYNAMIC)
    with pytest.raises(DecomposeError, match=r"core `Learnt`: has a dynamic T.*\n.*loop=\"scan\"\.$"):
        flexsn.decompose(program, loop="unroll")
    with pytest.raises(ValueError, match="unknown loop 'while'"):
        flexsn.decompose(program, loop="while")
    with pytest.raises(TypeError, match=r"torch\.export\.export\(model, inputs\)` returns, not Network"):
        flexsn.decompose(Network())


def test_decomposing_what_pytorch_decomposed_before():
    net, x = Network(), sequence()
    lowered = export(net, (x,)).run_decompositions()
    assert "flexsn.forward.default" in operators(lowered)
    decomposed = flexsn.decompose(lowered)
    assert "flexsn.forward.default" not in operators(decomposed)
    assert torch.equal(decomposed.module()(x)[0], eager(net, x)[0])
    assert operators(flexsn.decompose(decomposed)) == operators(decomposed)


@pytest.mark.parametrize("loop", ["scan", pytest.param("unroll", marks=pytest.mark.slow)])
def test_decomposed_program_runs_in_a_process_without_flexsn(loop, tmp_path):
    net = Network()
    sizes = SIZES if loop == "scan" else SIZES[:1]
    save_cases(tmp_path / "cases.pt", net, sizes)
    program = export(net, (sequence(),), dynamic_shapes=DYNAMIC if loop == "scan" else None)
    torch.export.save(flexsn.decompose(program, loop), tmp_path / "net.pt2")
    code = "import sys, torch\nrun = torch.export.load(sys.argv[1]).module()" + CHECK + "assert 'flexsn' not in sys.modules"
    elsewhere(code, tmp_path / "net.pt2", tmp_path / "cases.pt")


def step_graphs():
    """Every closed op on tensors, and with a number in second place."""
    for name, op in OPS.items():
        integral = name.endswith("_int") or name in ("and", "or", "xor", "invert", "shift_left", "shift_right")
        dtype = torch.bool if name == "not" else torch.int32 if integral else torch.float32
        for number in (False, True) if op.arity > 1 else (False,):
            b = Builder(name)
            args = [b.input(f"x{k}", dtype, f"x{k}") for k in range(op.arity)]
            if number:
                args[1] = b.const(2, dtype)
            if name == "where":
                args[0] = b.op("lt", args[0], args[2])
            result = b.convert(args[0], torch.float64) if name == "convert" else b.op(name, *args)
            yield pytest.param(b.graph({"y0": result}), id=f"{name}{' number' if number else ''}")


@pytest.mark.parametrize("graph", list(step_graphs()))
def test_every_closed_op_is_decomposed(graph):
    values = {torch.float32: torch.rand(7) + 0.25, torch.int32: torch.arange(1, 8, dtype=torch.int32), torch.bool: torch.rand(7) > 0.5}
    given = {role: values[node.dtype] for role, node in graph.inputs.items()}
    like = next(iter(given.values()))
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda given: run_step(graph, given, like))(given)
    assert all(n.target is operator.getitem or n.target.namespace == "aten" for n in traced.graph.nodes if n.op == "call_function")
    assert_equal([traced(given)["y0"]], [interpret(graph, given)["y0"].expand(7)])


# --- packages ---------------------------------------------------------------------------------------------------------------
def packaged(program, folder):
    with torch.no_grad():
        return torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "net.pt2"))


def skip_unless_packages_load(device, folder):
    """With a C++ compiler that links its own C++ library into what it builds, PyTorch's loader crashes on any package."""
    path = packaged(export(nn.Linear(8, 8).to(device), (sequence(device=device),)), folder)
    code = "import sys, torch\ntorch._inductor.aoti_load_package(sys.argv[1])"
    if subprocess.run([sys.executable, "-c", code, path], check=False, capture_output=True, cwd="/").returncode < 0:
        pytest.skip("packages of AOTInductor crash when they are loaded here: is $CXX a compiler that links libstdc++ statically?")


@pytest.mark.slow
@DEVICES
@pytest.mark.parametrize("shapes", [None, DYNAMIC], ids=["static", "dynamic"])
def test_package_runs_in_a_process_that_has_only_imported_flexsn(shapes, device, tmp_path):
    if device == "cuda":
        skip_unless_packages_load(device, tmp_path)
    net = Network().to(device)
    save_cases(tmp_path / "cases.pt", net, SIZES if shapes else SIZES[:1])
    packaged(export(net, (sequence(device=device),), dynamic_shapes=shapes), tmp_path)
    code = "import sys, torch, flexsn\nrun = torch._inductor.aoti_load_package(sys.argv[1])" + CHECK
    elsewhere(code, tmp_path / "net.pt2", tmp_path / "cases.pt")


SCAN = pytest.mark.xfail(
    torch.__version__ < (2, 12), raises=InductorError, strict=True, reason="2.11 packages no `scan` at all, none of PyTorch's own either"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop, shapes",
    [("unroll", None), pytest.param("scan", None, marks=SCAN), pytest.param("scan", DYNAMIC, marks=SCAN)],
    ids=["unroll", "scan", "scan dynamic"],
)
def test_decomposed_package_runs_in_a_process_without_flexsn(loop, shapes, tmp_path):
    net = Network()
    save_cases(tmp_path / "cases.pt", net, SIZES if shapes else SIZES[:1])
    packaged(flexsn.decompose(export(net, (sequence(),), dynamic_shapes=shapes), loop), tmp_path)
    code = "import sys, torch\nrun = torch._inductor.aoti_load_package(sys.argv[1])" + CHECK + "assert 'flexsn' not in sys.modules"
    elsewhere(code, tmp_path / "net.pt2", tmp_path / "cases.pt")


# --- ONNX -------------------------------------------------------------------------------------------------------------------
def onnx_session(program, folder):
    import onnxruntime  # here alone: `make test-gpu` runs without it

    torch.onnx.export(program, dynamo=True, verbose=False).save(folder / "net.onnx")
    session = onnxruntime.InferenceSession(folder / "net.onnx", providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    return lambda *tensors: [torch.from_numpy(y) for y in session.run(None, {n: t.numpy() for n, t in zip(names, tensors, strict=True)})]


def test_onnx_has_the_spikes_of_eager(tmp_path):
    net = Network()
    run = onnx_session(flexsn.decompose(export(net, (sequence(),), dynamic_shapes=DYNAMIC)), tmp_path)
    for size in SIZES:
        x = sequence(*size)
        want = eager(net, x)
        assert 0.05 < want[0].mean() < 0.95
        spikes, y = run(x)
        assert torch.equal(spikes, want[0])
        torch.testing.assert_close(y, want[1])


@pytest.mark.parametrize("shapes", [None, DYNAMIC], ids=["static", "dynamic"])
def test_onnx_of_a_network_as_it_is(tmp_path, shapes):
    """Also one that would train: what is exported is inference."""
    import onnxruntime

    net = Network().eval()
    assert any(p.requires_grad for p in net.parameters())
    torch.onnx.export(net, (sequence(),), dynamo=True, verbose=False, dynamic_shapes=shapes).save(tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    for size in SIZES if shapes else SIZES[:1]:
        x = sequence(*size)
        spikes, y = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        want = eager(net, x)
        assert torch.equal(torch.from_numpy(spikes), want[0])
        torch.testing.assert_close(torch.from_numpy(y), want[1])
    assert torch.equal(net(x)[0], want[0])  # the network is as it was


def test_onnx_of_an_unrolled_program(tmp_path):
    net, x = Network(), sequence()
    run = onnx_session(flexsn.decompose(export(net, (x,)), loop="unroll"), tmp_path)
    assert torch.equal(run(x)[0], eager(net, x)[0])


def test_onnx_of_operands_that_share_memory(tmp_path):
    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, 3))

        def forward(self, x, v):
            def core(x, y, v, u):
                return x * y * self.w[0] + v * self.w[1], v + x, u - y

            result = flexsn.scan(core, (x, x), (v, v))
            return *result.outputs, *result.states

    net, x, v = Same(), torch.randn(4, 3), torch.randn(3)
    run = onnx_session(flexsn.decompose(export(net, (x, v), dynamic_shapes=({0: Dim("T", min=1)}, None))), tmp_path)
    for T in (4, 9):
        x = torch.randn(T, 3)
        torch.testing.assert_close(tuple(run(x, v)), net(x, v))


# --- what others make of a program ---------------------------------------------------------------------------------------------
def own_leak(x, v):
    h = v * 0.90625 + x
    return h.tanh(), h


class Skipped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.neuron = nn.Linear(8, 8), flexsn.FlexSN(own_leak, num_states=1, stateful=False)

    def forward(self, x):
        x = self.layer(x)
        return x + self.neuron(x)


@STRICT
def test_decompositions_drop_gradients_with_words(strict):
    """They leave the forward kernel alone. A gradient that is lost in silence would be wrong beside a skip connection."""
    net, x = Skipped(), sequence()
    program = export(net, (x,), strict=strict).run_decompositions().module()
    assert torch.equal(program(x), net(x))
    with torch.no_grad():
        assert torch.equal(program(x), net(x))
    with pytest.raises(MissingGradientError, match="run_decompositions"):
        program(x).sum().backward()
    with pytest.raises(MissingGradientError, match="run_decompositions"):
        torch.func.grad(lambda x: program(x).sum())(x)


@STRICT
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_transforms_of_a_program(strict):
    net, x = Skipped(), sequence()
    program = export(net, (x,), strict=strict).module()
    torch.testing.assert_close(torch.func.grad(lambda x: program(x).sum())(x), torch.func.grad(lambda x: net(x).sum())(x))
    both = torch.stack([x, 2.0 * x])
    torch.testing.assert_close(torch.func.vmap(program)(both), torch.stack([net(x), net(2.0 * x)]))
    for forward_mode in (torch.func.jvp, lambda f, given, tangents: torch.func.linearize(f, *given)[1](*tangents)):
        with pytest.raises(ForwardModeError):
            forward_mode(program, (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ForwardModeError):
        program(torch.autograd.forward_ad.make_dual(x, x))


@STRICT
@pytest.mark.filterwarnings("ignore::flexsn.errors.FallbackWarning")
def test_a_batch_stays_dynamic_where_no_kernel_runs(strict):
    neuron = flexsn.FlexSN(lambda x, v: ((v * 0.5 + x).tanh(), v * 0.5 + x - v.mean(-1, keepdim=True)), num_states=1, stateful=False)
    program = export(neuron, (sequence(),), dynamic_shapes=(({1: torch.export.Dim("batch")},),), strict=strict).module()
    torch.testing.assert_close(program(sequence(batch=9)).shape, neuron(sequence(batch=9)).shape)
    x = sequence(batch=6)
    torch.testing.assert_close(program(x), neuron(x))


@STRICT
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_decomposed_by_pytorch_and_compiled(strict, backend):
    """The error waits in the backward graph until somebody asks for a gradient."""
    torch._dynamo.reset()
    net, x = Skipped(), sequence()
    program = export(net, (x,), strict=strict).run_decompositions().module()
    found = torch.compile(program, backend=backend)(x)
    torch.testing.assert_close(found, net(x))
    with pytest.raises(MissingGradientError, match="run_decompositions"):
        found.sum().backward()
    head = nn.Linear(8, 2)
    torch.compile(lambda x: head(program(x).detach()), backend=backend)(x).sum().backward()
    assert head.weight.grad is not None
    for transform in (lambda f: torch.func.jvp(f, (x,), (x,)), lambda f: torch.func.jacfwd(f)(x)):
        with pytest.raises(ForwardModeError):
            transform(program)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level(), pytest.raises(ForwardModeError):
        program(torch.autograd.forward_ad.make_dual(x, x))
