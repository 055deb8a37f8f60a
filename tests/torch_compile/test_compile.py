"""FlexSN under `torch.compile`: whole graphs, the values and gradients of an eager call, one kernel node per direction.

Where Inductor is not the point, graphs run op by op (`aot_eager`): that compiles in milliseconds, and keeps eager's bits.
"""

import collections
import copy
import functools
import inspect
import os
import re
import subprocess
import sys
import warnings
from contextlib import nullcontext

import pytest
import torch
from cores import adlif, leaky, lif, plif, relu_mem
from functorch.compile import make_boxed_func
from helpers import without_graph_caches
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.nn.utils import parametrize

import flexsn
from flexsn import FlexSN
from flexsn._operator import library as ops
from flexsn.errors import BackendError, FallbackWarning

# PyTorch's own: Dynamo looks at `.grad` of every tensor that goes into a graph; its `scan` imports TorchScript
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor", "ignore:`torch.jit.script_method` is deprecated", "ignore:TypedStorage is deprecated"
)


class Plif(nn.Module):
    """A LIF with a learned decay per channel, which stands in the last dim, or `dims` dims further in front."""

    def __init__(self, channels, dims=0):
        super().__init__()
        self.w = nn.Parameter(torch.rand(channels, *([1] * dims)))
        self.v_th = 0.5

    def forward(self, x, v):
        h = v + (x - v) * torch.sigmoid(self.w)
        s = flexsn.surrogate.atan(h - self.v_th)
        return s, h * (1.0 - s)


def module_neuron():
    return FlexSN(Plif(8), 1, 1)


def params_neuron():
    return FlexSN(plif, 1, 1, params=[nn.Parameter(torch.rand(8))])


def closure_neuron():
    w, scale = nn.Parameter(torch.rand(8)), torch.full((8,), 1.5)
    return FlexSN(lambda x, v: plif(x * scale, v, w), 1, 1)


class Stretch(nn.Module):
    def forward(self, w):
        return 2.0 * w - 0.5


def parametrized_neuron():
    neuron = module_neuron()
    parametrize.register_parametrization(neuron.core, "w", Stretch())
    return neuron


DECAY = nn.Parameter(torch.linspace(-1, 1, 8))
FOUR = torch.ones(4)
NEURONS = {"module": module_neuron, "params": params_neuron, "closure": closure_neuron, "parametrized": parametrized_neuron}


def run(net, *inputs, grad=True):
    """Outputs, and the gradients of inputs and parameters, from fresh states."""
    flexsn.reset_net(net)
    inputs = [x.detach().requires_grad_(grad and x.is_floating_point()) for x in inputs]
    with nullcontext() if grad else torch.no_grad():
        outputs = net(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if not grad:
        return list(outputs), []
    leaves = [*(x for x in inputs if x.requires_grad), *net.parameters()]
    weights = [torch.linspace(-1, 2, y.numel()).reshape(y.shape).to(y) for y in outputs]
    return list(outputs), torch.autograd.grad(outputs, leaves, weights)


def assert_close(got, want, **tolerance):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def assert_compiles(net, *calls, backend="aot_eager", frames=1, grad=True, tolerance=None, **options):
    """A whole graph, compiled `frames` times for these calls (each a tuple of inputs), that does what the eager net does."""
    eager, counter = copy.deepcopy(net), CompileCounterWithBackend(backend)
    counter.__name__ = backend  # as the backend itself
    compiled = torch.compile(net, backend=counter, fullgraph=True, **options)
    for inputs in calls:
        values, grads = run(compiled, *inputs, grad=grad)
        want_values, want_grads = run(eager, *inputs, grad=grad)
        assert_close([v.detach() for v in values], [v.detach() for v in want_values], **(tolerance or {}))
        assert_close(grads, want_grads, **(tolerance or {"rtol": 1e-4, "atol": 1e-5}))
    assert counter.frame_count == frames
    return compiled


# --- neurons ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", NEURONS.values(), ids=NEURONS)
def test_every_way_to_hold_a_parameter(make):
    net = nn.Sequential(nn.Linear(4, 8), make(), nn.Linear(8, 2))
    assert_compiles(net, (torch.randn(7, 3, 4),))


@pytest.mark.parametrize("make", [m if n == "module" else pytest.param(m, marks=pytest.mark.slow) for n, m in NEURONS.items()], ids=NEURONS)
def test_an_optimizer_step_is_seen_and_nothing_recompiled(make):
    net, x = nn.Sequential(make()), torch.randn(7, 3, 8)
    compiled = assert_compiles(net, (x,))
    optimizer, before = torch.optim.SGD(net.parameters(), lr=5.0), run(compiled, x, grad=False)[0][0]
    flexsn.reset_net(net)
    compiled(x).sum().backward()
    optimizer.step()
    with torch.compiler.set_stance("fail_on_recompile"):
        after = run(compiled, x)[0][0]
    assert torch.equal(after, run(copy.deepcopy(net), x)[0][0]) and not torch.equal(after, before)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype, grad):
    neuron = FlexSN(lif, 1, 1, params=[nn.Parameter(torch.tensor(p, dtype=dtype)) for p in (1.5, 0.5)])
    assert_compiles(neuron, (torch.randn(6, 5).to(dtype),), grad=grad)


def test_two_inputs_states_and_outputs():
    params = [nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.rand(4))]
    assert_compiles(FlexSN(adlif, 2, 2, 2, params=params), (torch.randn(6, 3, 4), torch.randn(6, 3, 4)))


def test_integer_input_beside_a_float():
    def gated(x, k, v):
        v = v * 0.5 + torch.where(k > 1, x, 0.0)
        return v, v

    assert_compiles(FlexSN(gated, 2, 1), (torch.randn(6, 4), torch.randint(0, 4, (6, 4))))


def test_single_steps():
    net, x = FlexSN(Plif(8), 1, 1, step_mode="s"), torch.randn(5, 3, 8)
    eager, compiled = copy.deepcopy(net), torch.compile(net, backend="aot_eager", fullgraph=True)
    for row in x:
        assert torch.equal(compiled(row), eager(row))
    assert torch.equal(net.states[0], eager.states[0])


def test_state_sequences():
    net, x = FlexSN(Plif(8), 1, 1, store_state_seqs=True), torch.randn(5, 3, 8)
    eager, compiled = copy.deepcopy(net), torch.compile(net, backend="aot_eager", fullgraph=True)
    (compiled(x).sum() + net.state_seqs[0].square().sum()).backward()
    (eager(x).sum() + eager.state_seqs[0].square().sum()).backward()
    assert torch.equal(net.state_seqs[0], eager.state_seqs[0]) and torch.equal(net.states[0], eager.states[0])
    torch.testing.assert_close(net.core.w.grad, eager.core.w.grad)


@pytest.mark.parametrize("shape", [(0, 3, 8), (1, 3, 8), (5, 0, 8), (5, 1, 8), (5, 8)])
def test_sizes_zero_and_one(shape):
    assert_compiles(module_neuron(), (torch.randn(shape),))


def test_zero_steps_keep_the_states():
    net = module_neuron()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(4, 3, 8))
    before = net.states[0].detach().clone()
    assert compiled(torch.randn(0, 3, 8)).shape == (0, 3, 8) and torch.equal(net.states[0], before)


# --- states -----------------------------------------------------------------------------------------------------------------
def test_carried_states_compile_twice_and_no_more():
    net, x = nn.Sequential(nn.Linear(4, 8), module_neuron()), torch.randn(6, 3, 4)
    eager, counter = copy.deepcopy(net), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    for _ in range(3):
        flexsn.reset_net(net)
        flexsn.reset_net(eager)
        for _ in range(3):
            assert torch.equal(compiled(x), eager(x))
            flexsn.detach_states(net)
            flexsn.detach_states(eager)
    assert counter.frame_count == 2


def test_gradients_flow_through_carried_states():
    net, pieces = module_neuron(), torch.randn(3, 4, 2, 8)
    compiled, grads = torch.compile(net, backend="aot_eager", fullgraph=True), []
    for call in (compiled, net):
        net.reset()
        sum(call(x).square().sum() + net.states[0].sum() for x in pieces).backward()
        grads.append(net.core.w.grad.clone())
        net.zero_grad()
    torch.testing.assert_close(*grads)


class Halved(FlexSN):
    """States that a user assigns around the call."""

    def forward(self, x):
        if self.states is not None:
            self.states = [v * 0.5 for v in self.states]
        y = super().forward(x)
        self.states = [v + 1.0 for v in self.states]
        return y


def test_states_assigned_before_and_after_the_call():
    eager, net = (Halved(functools.partial(lif, tau=2.0, v_th=1.0), num_states=1) for _ in range(2))
    compiled, x = torch.compile(net, backend="eager", fullgraph=True), torch.randn(6, 3, 8)
    for _ in range(3):
        assert torch.equal(compiled(x), eager(x)) and torch.equal(net.states[0], eager.states[0])


def test_a_deepcopied_net_has_its_own_parameters_and_states():
    x = torch.randn(6, 3, 8)
    net = nn.Sequential(closure_neuron())
    twin = copy.deepcopy(net)
    with torch.no_grad():
        next(twin.parameters()).sub_(3.0)
    for each in (net, twin):
        assert_compiles(each, (x,))
    assert not torch.equal(net[0].states[0], twin[0].states[0])


def test_a_deepcopied_compiled_net():
    net, x = nn.Sequential(closure_neuron()), torch.randn(6, 3, 8)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    compiled(x)
    flexsn.reset_net(net)
    twin = copy.deepcopy(compiled)
    with torch.no_grad():
        next(twin.parameters()).sub_(3.0)
    assert torch.equal(compiled(x), run(copy.deepcopy(net), x)[0][0])
    assert torch.equal(twin(x), run(copy.deepcopy(twin._orig_mod), x)[0][0])


def test_resets_and_detached_states_in_a_compiled_function():
    net = nn.Sequential(nn.Linear(4, 8), module_neuron())

    def pieces(x):
        flexsn.reset_net(net)
        first = net(x)
        flexsn.detach_states(net)
        return first + 2.0 * net(x)

    x = torch.randn(5, 3, 4)
    counter = CompileCounterWithBackend("aot_eager")
    counter.__name__ = "aot_eager"
    compiled = torch.compile(pieces, backend=counter, fullgraph=True)
    want = torch.autograd.grad(pieces(x).square().sum(), list(net.parameters()))
    for _ in range(3):
        y = compiled(x)
        assert_close([y], [pieces(x)])
        assert_close(torch.autograd.grad(y.square().sum(), list(net.parameters())), want)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.filterwarnings("ignore::flexsn.errors.FallbackWarning")
def test_detached_states_between_compiled_parts(backend):
    """There a compiled part copies what the loop left, and no more than its values."""
    found = []
    for compiled in (False, True):
        neuron = FlexSN(mixing, num_states=1, stateful="detached", backend=backend)
        run, w = torch.compile(neuron) if compiled else neuron, torch.tensor(1.0, requires_grad=True)
        for seed in range(3):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
            run(x * w).square().sum().backward()
            assert not neuron.states[0].requires_grad
        found.append(w.grad)
    torch.testing.assert_close(*found)


class Gate(nn.Module):
    """Parameters of its own and of a child, under one name; and children that Sequential holds."""

    def __init__(self):
        super().__init__()
        self.weight, self.prelu = nn.Parameter(torch.tensor([3.0])), nn.PReLU()
        self.rest = nn.Sequential(nn.PReLU(), nn.Tanh())

    def forward(self, x):
        return self.rest(self.prelu(x) * self.weight)


def test_a_closure_over_a_module_with_children():
    gate, x = Gate(), torch.randn(6, 3, 5)
    neuron = FlexSN(lambda x, v: (gate(x + v), v * 0.5 + x), num_states=1, stateful=False)
    want, found = (call(x) for call in (neuron, torch.compile(neuron, backend="aot_eager", fullgraph=True)))
    assert torch.equal(want, found)
    assert_close(torch.autograd.grad(found.sum(), list(gate.parameters())), torch.autograd.grad(want.sum(), list(gate.parameters())))


def test_networks_of_one_kind_share_a_graph():
    """A sweep in one process: PyTorch gives up at the ninth graph of a function."""
    counter, x = CompileCounterWithBackend("aot_eager"), torch.randn(5, 3, 8)
    counter.__name__ = "aot_eager"

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.neuron = nn.Linear(8, 8), flexsn.LIF(learn_tau=True, stateful=False)

        def forward(self, x):
            return self.neuron(self.layer(x))

    for tau in range(2, 14):
        net = Network()
        nn.init.constant_(net.neuron.tau, float(tau))
        found = torch.compile(net, backend=counter, fullgraph=True)(x)
        assert torch.equal(found, net(x))
        assert_close(torch.autograd.grad(found.sum(), [net.neuron.tau]), torch.autograd.grad(net(x).sum(), [net.neuron.tau]))
    assert counter.frame_count <= 2


def test_no_grad_inside_a_core():
    def core(x, v):
        with torch.no_grad():
            threshold = v.abs() + 1.0
        return flexsn.surrogate.sigmoid(x + v - threshold), 0.5 * v + x

    x = torch.randn(6, 3, 5, requires_grad=True)
    neuron = FlexSN(core, num_states=1, strict=True, stateful=False)
    want, found = (call(x) for call in (neuron, torch.compile(neuron, backend="aot_eager", fullgraph=True)))
    assert torch.equal(want, found)
    assert_close(torch.autograd.grad(found.sum(), [x]), torch.autograd.grad(want.sum(), [x]))


Returned = collections.namedtuple("Returned", ["spikes", "v"])


def test_a_named_tuple():
    neuron = FlexSN(lambda x, v: Returned((x + v).cos(), x * 0.5 + v), num_states=1, stateful=False)
    assert torch.equal(torch.compile(neuron, backend="aot_eager", fullgraph=True)(FOUR), neuron(FOUR))


def test_compiled_autograd():
    layer, neuron = nn.Linear(4, 4), FlexSN(lambda x, v: ((x + v).tanh(), x + v), num_states=1, stateful=False, strict=True)

    def step(x):
        neuron(layer(x)).square().sum().backward()

    step(FOUR.expand(5, 3, 4))
    want, layer.weight.grad = layer.weight.grad, None
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(FOUR.expand(5, 3, 4))
    assert_close([layer.weight.grad], [want])


# --- sizes that change ---------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore::flexsn.errors.FallbackWarning")
def test_dynamic_sizes_of_a_core_that_no_kernel_expresses():
    counter = CompileCounterWithBackend("aot_eager")
    counter.__name__ = "aot_eager"
    neuron = FlexSN(lambda x, v: ((v * 0.5 + x).tanh(), v * 0.5 + x - v.mean(-1, keepdim=True)), num_states=1, stateful=False)
    compiled = torch.compile(neuron, backend=counter, fullgraph=True, dynamic=True)
    for batch in (4, 2, 7):
        x = torch.randn(6, batch, 5)
        assert_close([compiled(x)], [neuron(x)])
    assert counter.frame_count == 1


def test_dynamic_sizes_compile_once():
    net = nn.Sequential(nn.Linear(4, 8), module_neuron(), nn.Linear(8, 2))
    calls = [(torch.randn(T, batch, 4),) for T, batch in [(5, 3), (7, 3), (33, 6), (100, 2), (2, 16)]]
    assert_compiles(net, *calls, dynamic=True)


@pytest.mark.parametrize("core", [
    lambda x, v: (v + x, v * 0.5 + x),
    lambda x, v: (FOUR * 2.0, v + x),
], ids=["a smaller state", "a smaller output"])  # fmt: skip
def test_a_batch_as_large_as_a_smaller_operand_compiles_no_more(core):
    """Sizes of dims that do not correspond are not compared, which would bind them."""
    counter = CompileCounterWithBackend("aot_eager")
    counter.__name__ = "aot_eager"
    call = lambda x, v: flexsn.scan(core, [x], [v]).outputs[0]
    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    for batch in (2, 3, 4, 5):
        x, v = torch.randn(6, batch, 4), torch.ones(4)
        assert_close([compiled(x, v)], [call(x, v)])
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dynamic_sizes_in_16_bits(dtype):
    """The core is traced twice, for the dtypes that are given and for those that are computed in, and its captured tensors have sizes."""
    calls = [(torch.randn(T, batch, 8).to(dtype),) for T, batch in [(5, 3), (17, 6), (6, 2)]]
    assert_compiles(module_neuron(), *calls, dynamic=True)


def test_automatic_dynamic_sizes_compile_twice():
    net = nn.Sequential(nn.Linear(4, 8), closure_neuron())
    assert_compiles(net, *[(torch.randn(T, 3, 4),) for T in (4, 7, 33, 100)], frames=2)


def test_dynamic_sizes_with_a_broadcast_state():
    def core(x, v):
        return flexsn.scan(leaky, [x], [v], [torch.tensor(0.5)]).outputs[0]

    compiled = torch.compile(core, backend="aot_eager", fullgraph=True, dynamic=True)
    for T, n in [(3, 4), (9, 5)]:
        x, v = torch.randn(T, n, 6), torch.randn(6)
        assert torch.equal(compiled(x, v.clone()), core(x, v))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_number_of_steps_that_the_data_decides():
    def core(x, kept, v):
        return flexsn.scan(leaky, [x[kept]], [v], [torch.tensor(0.5)]).outputs[0]

    compiled = torch.compile(core, backend="aot_eager", fullgraph=True, dynamic=True)
    x, v = torch.randn(6, 4), torch.randn(4)
    for kept in ([True, False, True, True, False, True], [True] * 6):
        assert torch.equal(compiled(x, torch.tensor(kept), v), core(x, torch.tensor(kept), v))


def test_a_core_that_reads_a_size_stays_right():
    def core(x, v):
        v = v * 0.5 + x / x.shape[0]
        return v, v

    assert_compiles(FlexSN(core, 1, 1), (torch.randn(5, 3),), (torch.randn(5, 4),), frames=2, dynamic=True)


# --- networks -----------------------------------------------------------------------------------------------------------------
class PerStep(nn.Module):
    """A layer over [T, B, ...] as one over [T * B, ...]."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def convolutions():
    torch.manual_seed(0)
    convolution = lambda c: PerStep(nn.Conv2d(c, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
    return nn.Sequential(convolution(3), flexsn.LIF(), convolution(8), flexsn.LIF())


@pytest.mark.parametrize("layout", [pytest.param(torch.contiguous_format, marks=pytest.mark.slow), torch.channels_last])
def test_memory_lies_as_convolutions_choose(layout):
    """Inductor lets them have channels last; then so do the neurons between them, without copies."""
    from torch._inductor import config

    x = torch.randn(4 * 2, 3, 8, 8).to(memory_format=layout).unflatten(0, (4, 2))
    eager, net = convolutions().to(memory_format=layout), convolutions().to(memory_format=layout)
    want, compiled, grads = eager(x), torch.compile(net, fullgraph=True), []
    with config.patch(force_layout_optimization=True):
        got, code = run_and_get_code(compiled, x)
        torch.testing.assert_close(got, want)
        for model, y in ((eager, want), (net, got)):
            grads.append(torch.autograd.grad(y.square().sum(), list(model.parameters())))
        for model in (eager, net):
            flexsn.detach_states(model)
        torch.testing.assert_close(compiled(x), eager(x))  # with states that were carried
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    calls = [line for line in code[0].splitlines() if "= flexsn_forward_buf" in line]
    assert len(calls) == 2 and all("(4, 2, 8, 8, 8), (1024, 512, 1, 64, 8)" in line for line in calls)
    assert "(2, 8, 8, 8), (512, 64, 8, 1)" not in code[0], "a final state is copied into the order of its dims"


class WithState(nn.Module):
    """Spikes, and a view of the state that is carried."""

    def __init__(self):
        super().__init__()
        self.net = convolutions()

    def forward(self, x):
        return self.net(x), self.net[1].states[0].flatten(1)


@pytest.mark.slow
def test_a_view_of_a_carried_state_is_a_result_too():
    from torch._inductor import config

    x, net = torch.randn(4, 2, 3, 8, 8), WithState()
    eager = copy.deepcopy(net)
    with config.patch(force_layout_optimization=True), without_graph_caches():
        compiled = torch.compile(net, fullgraph=True)
        for _ in range(2):
            for got, want in zip(compiled(x), eager(x), strict=True):
                assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert_close(net.net[1].states[0], eager.net[1].states[0], rtol=1e-4, atol=1e-4)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = PerStep(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.neuron = FlexSN(Plif(channels, 2), 1, 1)

    def forward(self, x):
        return x + self.neuron(self.conv(x))


def vgg():
    return nn.Sequential(
        PerStep(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)), FlexSN(Plif(4, 2), 1, 1), PerStep(nn.AvgPool2d(2)),
        PerStep(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6)), FlexSN(lif, 1, 1, params=[torch.tensor(2.0), torch.tensor(0.5)]),
        PerStep(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)),
    )  # fmt: skip


@pytest.mark.parametrize("batch", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_backward_of_pooling_gives_memory_in_the_order_of_its_dims(batch):
    """A batch of one has the stride of time: which of the two is the outer dim cannot be read from strides."""
    torch.manual_seed(0)
    net = nn.Sequential(PerStep(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)), flexsn.LIF(), PerStep(nn.MaxPool2d(2)))
    with without_graph_caches():
        assert_compiles(net, (torch.randn(4, batch, 2, 2, 2),), backend="inductor", tolerance={"rtol": 1e-4, "atol": 1e-4})


def test_inputs_are_made_again_in_the_backward():
    """What comes out of a batch norm is computed twice, not saved."""
    torch.manual_seed(0)
    net = nn.Sequential(PerStep(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)), flexsn.LIF())
    x, want = torch.randn(4, 2, 2, 4, 4), copy.deepcopy(net)
    compiled = torch.compile(net, fullgraph=True)
    with without_graph_caches():
        grads, (_, backward) = run_and_get_code(lambda: torch.autograd.grad(compiled(x).square().sum(), list(net.parameters())))
    assert ".neg()" in backward
    assert_close(grads, torch.autograd.grad(want(x).square().sum(), list(want.parameters())), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_spiking_vgg(dynamic):
    net = vgg()
    frames = 2 if dynamic else 1  # the momentum of BatchNorm, first an unknown, makes Dynamo start again
    assert_compiles(net, (torch.randn(4, 2, 2, 8, 8),), dynamic=dynamic, frames=frames)
    assert [m.num_batches_tracked.item() for m in net.modules() if isinstance(m, nn.BatchNorm2d)] == [1, 1]


def test_spiking_vgg_in_eval_mode():
    assert_compiles(vgg().eval(), (torch.randn(4, 2, 2, 8, 8),), grad=False)


def test_residual_blocks():
    assert_compiles(nn.Sequential(Residual(3), Residual(3)), (torch.randn(4, 2, 3, 6, 6),))


def test_channels_last_activations():
    net = nn.Sequential(PerStep(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)), FlexSN(Plif(4, 2), 1, 1))
    x = torch.randn(8, 3, 6, 6).to(memory_format=torch.channels_last).unflatten(0, (4, 2))
    assert_compiles(net, (x,))


def test_autocast():
    net = nn.Sequential(nn.Linear(4, 8), closure_neuron(), nn.Linear(8, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_compiles(net, (torch.randn(6, 3, 4),))


# --- what changes between calls --------------------------------------------------------------------------------------------------
def test_a_changed_attribute_compiles_again():
    net, x = module_neuron(), torch.randn(6, 3, 8)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    for frames, threshold in [(1, 0.5), (2, 0.2), (2, 0.5)]:
        net.core.v_th = threshold
        assert torch.equal(run(compiled, x)[0][0], run(copy.deepcopy(net), x)[0][0])
        assert counter.frame_count == frames


@pytest.mark.slow
def test_a_changed_number_in_a_partial_compiles_again():
    x = 2 * torch.rand(5, 8)
    for threshold in (0.75, 0.5, 0.3):  # the second time, Dynamo would make a number an input of the graph
        neuron = FlexSN(functools.partial(lif, tau=2.0, v_th=threshold), 1, 1)
        got = torch.compile(neuron, fullgraph=True, backend="aot_eager")(x)
        neuron.reset()
        assert torch.equal(got, neuron(x)), threshold


def test_a_changed_closure_variable_compiles_again():
    gain = 1.0

    def core(x, v):
        v = v * 0.5 + x * gain
        return v, v

    net, x = FlexSN(core, 1, 1), torch.randn(4, 3)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    first = run(compiled, x)[0][0]
    gain = 2.0
    assert torch.equal(run(compiled, x)[0][0], 2 * first)


def test_training_mode_is_seen():
    class Core(nn.Module):
        def forward(self, x, v):
            v = v * 0.5 + x
            return (v if self.training else -v), v

    net, x = FlexSN(Core(), 1, 1), torch.randn(4, 3)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    assert torch.equal(run(compiled, x)[0][0], -run(compiled.eval(), x)[0][0])


def test_a_replaced_parameter_is_seen():
    net, x = closure_neuron(), torch.randn(6, 3, 8)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    before = run(compiled, x)[0][0]
    net.load_state_dict({n: t - 2.0 for n, t in net.state_dict().items()}, assign=True)
    after = run(compiled, x)[0][0]
    assert torch.equal(after, run(copy.deepcopy(net), x)[0][0]) and not torch.equal(after, before)


# --- the functional form ------------------------------------------------------------------------------------------------------
def test_scan_with_a_core_that_captures_a_traced_tensor():
    def net(x, w):
        decay = torch.sigmoid(w)

        def core(x, v):
            v = v * decay + x
            return v * v, v

        result = flexsn.scan(core, [x], [None])
        return result.outputs[0] + result.states[0]

    x, results = torch.randn(5, 3, 8), []
    for call in (torch.compile(net, backend="aot_eager", fullgraph=True), net):
        leaves = [x.clone().requires_grad_(), torch.linspace(-1, 1, 8).requires_grad_()]
        y = call(*leaves)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
    assert_close(*results)


@pytest.mark.parametrize("sequences", [False, True])
def test_scan_with_given_states_and_params(sequences):
    def net(x, v, decay):
        result = flexsn.scan(leaky, (x,), (v,), (decay,), store_state_seqs=sequences)
        return *result.outputs, *result.states

    operands, results = (torch.randn(5, 3, 4), torch.randn(3, 4), torch.rand(4)), []
    for call in (torch.compile(net, backend="aot_eager", fullgraph=True), net):
        leaves = [t.clone().requires_grad_() for t in operands]
        values = call(*leaves)
        results.append([*values, *torch.autograd.grad(sum(y.sum() for y in values), leaves)])
    assert_close(*results)


# --- outside whole graphs --------------------------------------------------------------------------------------------------------
def test_a_training_step_with_the_backward_inside():
    def step(net, x):
        loss = net(x).square().sum()
        loss.backward()
        return loss.detach()

    net, x = nn.Sequential(nn.Linear(4, 8), module_neuron()), torch.randn(5, 3, 4)
    twin = copy.deepcopy(net)
    torch.testing.assert_close(torch.compile(step, backend="aot_eager")(net, x), step(twin, x))
    assert_close([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])


def test_a_neuron_that_dynamo_leaves_alone():
    """Called from a compiled region, an eager neuron is not compiled piece by piece."""
    net, x = module_neuron(), torch.randn(5, 3, 8)
    counter = CompileCounterWithBackend("eager")

    def step(x):
        y = torch.compiler.disable(net, recursive=False)(x)
        y.square().sum().backward()
        return y

    y = torch.compile(step, backend=counter)(x)
    assert torch.equal(y, run(net, x)[0][0]) and counter.frame_count <= 2


def test_a_transform_inside_a_compiled_function_runs_as_it_is():
    def gradients(w, x):
        scanned = torch.func.grad(lambda w, x: flexsn.scan(plif, (x,), (None,), (w,)).outputs[0].sum())
        return torch.func.vmap(scanned, (None, 1))(w, x)

    w, x = torch.rand(8), torch.randn(5, 3, 8)
    torch.testing.assert_close(torch.compile(gradients, backend="aot_eager")(w, x), gradients(w, x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.func"):
        torch.compile(gradients, backend="aot_eager", fullgraph=True)(w, x)


def unfused(x, v, w):
    s, new = plif(x, v, w)
    return s, torch.sort(new, -1)[0]


@pytest.mark.parametrize(
    ("step", "backend"),
    [(plif, "auto"), pytest.param(plif, "torch", marks=pytest.mark.slow), pytest.param(unfused, "auto", marks=pytest.mark.slow)],
    ids=["fused", "torch", "unfused"],
)
@pytest.mark.parametrize("kind", ["list", "dict", "attribute"])
@pytest.mark.filterwarnings("ignore::flexsn.errors.FallbackWarning")
def test_places_of_captured_tensors(kind, step, backend):
    """A copy of the net uses its own tensors, wherever the core keeps the first ones."""
    held = {"list": [nn.Parameter(torch.rand(8))], "dict": {"w": nn.Parameter(torch.rand(8))}, "attribute": Plif(8)}[kind]
    read = {"list": lambda: held[0], "dict": lambda: held["w"], "attribute": lambda: held.w}[kind]
    net = nn.Sequential(FlexSN(lambda x, v: step(x, v, read()), 1, 1, 1, backend=backend))
    twin = copy.deepcopy(net)
    with torch.no_grad():
        inspect.getclosurevars(twin[0].core).nonlocals["read"]().sub_(2.0)
    x = torch.randn(6, 3, 8)
    assert_compiles(net, (x,))
    assert_compiles(twin, (x,))
    assert not torch.equal(net[0].states[0], twin[0].states[0])


@pytest.mark.parametrize("step", [plif, unfused], ids=["fused", "unfused"])
@pytest.mark.filterwarnings("ignore::flexsn.errors.FallbackWarning")
def test_a_copy_compiled_after_its_original(step):
    """And tensors that are replaced: what the neuron owns is read, and the core's cell holds another tensor."""
    w = nn.Parameter(torch.rand(8))
    original = FlexSN(lambda x, v: step(x, v, w), 1, 1, 1, stateful=False)
    x = torch.randn(6, 3, 8)
    compiled = torch.compile(original, backend="aot_eager")
    compiled(x)
    twin = copy.deepcopy(original)
    with torch.no_grad():
        twin.w.sub_(2.0)
    got = torch.compile(twin, backend="aot_eager")(x)
    torch.testing.assert_close(got, twin(x))
    assert not torch.equal(got, original(x))
    got.sum().backward()
    assert twin.w.grad is not None and w.grad is None
    original.load_state_dict(twin.state_dict(), assign=True)
    torch.testing.assert_close(compiled(x), twin(x))


@pytest.mark.parametrize(
    ("backend", "grad"),
    [pytest.param("auto", False, marks=pytest.mark.slow), ("auto", True), pytest.param("torch", True, marks=pytest.mark.slow)],
)
@pytest.mark.filterwarnings("ignore::flexsn.errors.FallbackWarning")
def test_a_core_without_kernel_reads_the_tensors_of_its_neuron(backend, grad):
    """Under a checkpoint, of another dtype, beside an input that is the captured tensor: what the neuron owns, as in eager calls."""
    w, u = torch.rand(6, 3, 8), torch.rand(8)
    original = FlexSN(lambda x, v: unfused(x, v, w[0] * u), 1, 1, 1, backend=backend, stateful=False)
    other, wide = copy.deepcopy(original), copy.deepcopy(original).double()
    with torch.no_grad():
        next(other.buffers()).sub_(2.0)
    x = torch.randn(6, 3, 8)
    checkpointed = functools.partial(torch.utils.checkpoint.checkpoint, other, use_reentrant=False)
    beside = lambda x: other(x + w) + original(w)
    of_its_own_input = lambda x: x + other(w)
    for call, given in ((other, x), (checkpointed, x), (beside, x), (of_its_own_input, x), (wide, x.double()), (original, x)):
        torch._dynamo.reset()
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(torch.compile(call, backend="aot_eager")(given), call(given))
    torch._dynamo.reset()
    if backend == "auto":  # one node, as it runs in pieces
        torch.testing.assert_close(torch.compile(wide, backend="aot_eager", fullgraph=True)(x.double()), wide(x.double()))
        return
    with pytest.raises(torch._dynamo.exc.Unsupported, match="holds other tensors"):
        torch.compile(wide, backend="aot_eager", fullgraph=True)(x.double())


@pytest.mark.parametrize("backend", ["triton", "inductor"])
def test_a_named_backend_is_not_replaced(backend):
    net = FlexSN(relu_mem, 1, 1, backend=backend)
    with pytest.raises(BackendError, match="does not run on cpu in a traced call"):
        torch.compile(net, backend="aot_eager", fullgraph=True)(torch.randn(5, 3))


class Asking(nn.Module):
    """Its core asks what its tensors are."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.7))
        self.alias = self.w
        self.register_buffer("b", torch.tensor(0.2))
        self.neuron = FlexSN(self.core, 1, 1, stateful=False)

    def core(self, x, v):
        answers = (
            type(self.w) is nn.Parameter, isinstance(self.b, nn.Parameter), self.w is self.alias, len(list(self.parameters())) == 1,
            dict(self.named_parameters())["w"] is self.w, "b" in dict(self.named_buffers()),
        )  # fmt: skip
        code = sum(1 << k for k, answer in enumerate(answers) if answer)
        return x * self.w + code, v

    def forward(self, x):
        return self.neuron(x)


@pytest.mark.parametrize("how", ["compile", "export"])
def test_captured_tensors_are_what_they_are_outside(how):
    net, x = Asking(), torch.randn(3, 4)
    call = (
        torch.compile(net, backend="aot_eager", fullgraph=True)
        if how == "compile"
        else torch.export.export(net, (x,), strict=True).module()
    )
    torch.testing.assert_close(call(x), net(x))
    assert net(torch.zeros(1, 1)).item() == 0b111101


class Assigning(nn.Module):
    """What it assigns, its core reads."""

    def __init__(self):
        super().__init__()
        self.gain, self.k = torch.tensor(1.0), 1.0
        self.neuron = FlexSN(self.core, 1, 1, stateful=False)

    def core(self, x, v):
        v = v * 0.5 + x * self.gain * self.k
        return v * v, v

    def forward(self, x):
        self.gain, self.k = x.mean(), self.k + 1.0
        return self.neuron(x)


def test_what_was_assigned_before_the_call_is_read():
    """A tensor of the graph, and a number: Dynamo has not assigned them yet, and a capture of the core itself would miss them."""
    net, want, x = Assigning(), Assigning(), torch.rand(3, 4)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    for k in range(3):
        torch.testing.assert_close(compiled(x + k), want(x + k))


# --- graphs ---------------------------------------------------------------------------------------------------------------------
def graphs_of(net, *inputs):
    """The forward and the backward graph of a net, as ATen ops; with their neighbours each op is `name(names of operands)`."""
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    run(torch.compile(net, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True), *inputs)
    return graphs


def targets(graph):
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("make", [params_neuron, module_neuron, closure_neuron])
def test_the_prologue_is_ordinary_nodes_beside_one_kernel_for_any_length(make):
    found = []
    for T in (4, 400):
        torch._dynamo.reset()
        forward, backward = graphs_of(make(), torch.randn(T, 3, 8))
        (kernel,) = [n for n in forward.nodes if str(n.target) == "flexsn.forward.default"]
        assert "aten.sigmoid.default" in [str(n.target) for n in kernel.args[3]]
        assert targets(backward).count("flexsn.backward.default") == 1
        found.append([[t for t in targets(g) if "getitem" not in t] for g in (forward, backward)])  # few steps need no checkpoints
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # Inductor's own
def test_inductor_fuses_the_prologue_with_what_makes_the_params():
    raw, x = torch.rand(8), torch.randn(5, 3, 8)
    call = lambda raw, x: flexsn.scan(plif, [x], [None], [raw.exp() * 0.5]).outputs[0]
    with torch.no_grad(), without_graph_caches():
        got, code = run_and_get_code(torch.compile(call, fullgraph=True), raw, x)
        torch.testing.assert_close(got, call(raw, x))
    (code,) = code
    assert set(re.findall(r"cpp_fused_(\w+?)_\d", code)) == {"exp_mul_sigmoid"} and "flexsn_forward_" in code


def test_a_neuron_without_state_has_no_cotangent_of_one():
    """What a compiled graph returns is given zeros for a gradient that nobody has."""
    given = []
    for stateful in (True, "detached", False):
        forward, backward = graphs_of(FlexSN(relu_mem, 1, 1, stateful=stateful), torch.randn(6, 3, 8))
        (kernel,) = [n for n in backward.nodes if str(n.target) == "flexsn.backward.default"]
        given.append(kernel.args[6])
        assert ("flexsn.carry.default" in targets(forward)) is bool(stateful)
    assert given == [["gy0", "gv0"], ["gy0"], ["gy0"]]


@pytest.mark.parametrize("make", [flexsn.LIF, lambda: flexsn.LIF(tau=torch.tensor([2.0, 3.0, 4.0]), per_channel=3)])
def test_an_error_in_a_compiled_call_has_the_names_of_the_core(make):
    call = torch.compile(make(), backend="eager", fullgraph=True)
    with torch.no_grad():
        call(torch.rand(5, 4, 3))
        with pytest.raises(flexsn.errors.ShapeMismatchError, match=r"core `lif`.*`x` \[.*, 3\], `v` \[4, 3\]"):
            call(torch.rand(5, 5, 3))


def test_what_makes_a_compiled_core_fall_back_is_said_without_the_graph():
    with pytest.warns(flexsn.errors.FallbackWarning) as said:
        torch.compile(FlexSN(lambda x, v: (x + v + torch.randn_like(x), v), num_states=1), backend="eager")(torch.rand(6, 4, 3))
    assert "randn_like" in str(said[0].message) and "While executing" not in str(said[0].message)


def test_a_neuron_without_state_compiles_once():
    net, x = nn.Sequential(nn.Linear(4, 8), FlexSN(relu_mem, 1, 1, stateful=False)), torch.randn(6, 3, 4)
    assert_compiles(net, *[(x * k,) for k in range(4)])


def test_inference_graphs_save_nothing():
    net, graphs = params_neuron(), []

    def keep(graph, example_inputs):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(net, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    run(compiled, torch.randn(40, 3, 8), grad=False)
    (kernel,) = [n for n in graphs[0].nodes if str(n.target) == "flexsn.forward.default"]
    checkpoints, save, sequences = kernel.args[5:8]
    assert (checkpoints, save, sequences) == (0, False, False)


# --- cores that no kernel expresses -------------------------------------------------------------------------------------------------
def mixing(x, v):
    h = v * 0.5 + x
    v = h - h.mean()
    return torch.sigmoid(v), v


@pytest.mark.parametrize("T", [1, 6])
def test_a_core_that_mixes_neurons_is_one_node(T):
    """Also by `strict=True`: it runs in pieces, as in plain calls. (Its own tests: `tests/torch_compile/test_compile_mixing.py`.)"""
    x, results = torch.randn(T, 3, 4), []
    results.append(run(torch.compile(FlexSN(mixing, 1, 1, strict=True), backend="aot_eager", fullgraph=True), x))
    results.append(run(FlexSN(mixing, 1, 1, backend="torch"), x))
    (values, grads), (want, want_grads) = results
    assert_close(values, want)
    assert_close(grads, want_grads)


def test_the_eager_loop_by_name():
    assert_compiles(FlexSN(leaky, 1, 1, params=[nn.Parameter(torch.rand(4))], backend="torch"), (torch.randn(5, 3, 4),))


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("backend", "dtype", "said"),
    [
        ("aot_eager", torch.float32, None),
        ("inductor", torch.float32, None),
        ("inductor", torch.bfloat16, "the eager loop"),
    ],
    ids=["aot_eager", "inductor", "inductor, half"],
)
def test_training_two_layers_that_no_kernel_expresses(backend, dtype, said, dynamic):
    """In pieces, in one graph; what does not run so, between compiled parts: by the eager loop."""

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([0.3, 0.1, -0.4, 1.0]))

        def forward(self, x, v):
            h = v + (x - v) * self.w.sigmoid() - (2 * v).mean()
            s = flexsn.surrogate.atan(h - 0.5)
            return s, h * (1.0 - s)

    net, x = nn.Sequential(FlexSN(Mixing(), 1, 1), FlexSN(Mixing(), 1, 1)).to(dtype), torch.randn(6, 3, 4, dtype=dtype)
    with warnings.catch_warnings() if said is None else pytest.warns(FallbackWarning, match=said):
        if said is None:
            warnings.simplefilter("error", FallbackWarning)
        values, grads = run(torch.compile(net, backend=backend, dynamic=dynamic), x)
    for layer in net:
        layer.backend = "torch"
    want, want_grads = run(net, x)
    assert_close(values, want)
    assert_close(grads, want_grads)
    assert all(g.any() for g in want_grads)


def test_a_whole_graph_is_refused_where_gradients_would_be_wrong():
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"no kernel expresses this core.*Compile without `fullgraph=True`"):
        torch.compile(FlexSN(mixing, 1, 1, backend="torch"), fullgraph=True)(torch.randn(5, 3))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_inference_in_a_loop_of_inductor(dynamic):
    """Also without `fullgraph`, where Dynamo does not let a graph read scalars."""
    net = FlexSN(leaky, 1, 1, params=[nn.Parameter(torch.rand(4))], backend="torch")
    compiled, counter = torch.compile(net, dynamic=dynamic), torch._dynamo.utils.counters
    counter.clear()
    for T in (6, 9, 0):
        x = torch.randn(T, 3, 4)
        assert_close(run(compiled, x, grad=False)[0], run(copy.deepcopy(net), x, grad=False)[0])
    assert not counter["graph_break"]


# --- mistakes -------------------------------------------------------------------------------------------------------------------------
def test_a_mistake_is_told_with_its_message():
    net, x = FlexSN(leaky, 1, 1, params=[torch.tensor(0.5)]), torch.randn(5, 3)
    for call, words in (
        (lambda: net(x, x), "needs 1 inputs but was given 2"),
        (lambda: net(None), "must be a tensor, not NoneType"),
        (lambda: net(x.sum()), "0-dimensional"),
        (lambda: flexsn.scan(leaky, x, (None,), (x[0],)), "`inputs` must be a tuple or list"),
        (lambda: flexsn.scan(leaky, (x,), (torch.zeros(2),), (x[0],)), r"one-step shapes do not broadcast: `x` \[3\], `v` \[2\]"),
        (lambda: flexsn.scan(leaky, (x,), (None,), (x[0],), backend="cupy"), "unknown backend 'cupy'"),
    ):
        with pytest.raises((torch._dynamo.exc.Unsupported, flexsn.errors.FlexSNError), match=words):
            torch.compile(call, backend="eager", fullgraph=True)()
        with pytest.raises(flexsn.errors.FlexSNError, match=words):
            torch.compile(call, backend="eager")()


def test_a_mistake_is_caught_inside():
    net = FlexSN(leaky, 1, 1, params=[torch.tensor(0.5)])

    def careful(x):
        try:
            return net(x, x)
        except flexsn.errors.OperandCountError:
            return x + 1

    x = torch.randn(5, 3)
    assert torch.equal(torch.compile(careful, backend="eager", fullgraph=True)(x), x + 1)


def test_a_core_that_breaks_the_graph():
    def core(x, v):
        torch._dynamo.graph_break()
        v = v * 0.5 + x
        return v * v, v

    net, x = FlexSN(core, 1, 1), torch.randn(5, 3)
    assert_close(run(torch.compile(net, backend="aot_eager"), x)[1], run(net, x)[1])
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(net, backend="aot_eager", fullgraph=True)(x)


# --- Inductor ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_inductor(mode):
    net = nn.Sequential(nn.Linear(4, 8), closure_neuron(), nn.Linear(8, 2))
    eager, x = copy.deepcopy(net), torch.randn(7, 3, 4)
    values, grads = run(torch.compile(net, mode=mode, fullgraph=True), x)
    want_values, want_grads = run(eager, x)
    assert_close(values, want_values)
    assert_close(grads, want_grads)


def test_inductor_with_dynamic_sizes():
    net = nn.Sequential(nn.Linear(4, 8), module_neuron())
    assert_compiles(net, *[(torch.randn(T, 3, 4),) for T in (5, 17, 50)], backend="inductor", dynamic=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_generated_code_finds_a_launch_once(dynamic, strided, monkeypatch):
    """Where sizes are constants, at the first call from each line; operands that lie otherwise are laid out in every call."""

    def operands(seed, T=5):
        x = torch.randn(T, 4, 6, generator=torch.Generator().manual_seed(seed))
        return (x.mT.contiguous().mT if strided else x).requires_grad_()

    neuron, looked_up = FlexSN(relu_mem, 1, 1), []
    compiled = torch.compile(neuron, fullgraph=True, dynamic=dynamic)
    settle = ops._settle
    monkeypatch.setattr(ops, "_settle", lambda *args: (looked_up.append(args), settle(*args))[1])
    for seed in range(4):
        neuron.reset()
        x, leaf = operands(seed), operands(seed)
        if seed == 0:
            y, (code, *_) = run_and_get_code(compiled, x)
            assert ("= flexsn_forward_buf" in code) is not dynamic and ("torch.ops.flexsn.call_forward(" in code) is dynamic
        else:
            y = compiled(x)
        (y * torch.linspace(-1, 1, 6)).sum().backward()
        neuron.reset()
        want = neuron(leaf)
        (want * torch.linspace(-1, 1, 6)).sum().backward()
        assert torch.equal(y, want) and torch.equal(x.grad, leaf.grad)
    assert len(looked_up) == (8 if dynamic else 2)


def test_the_neuron_keeps_its_bits():
    """What Inductor fuses around it may round otherwise; the neuron does not."""
    neuron = FlexSN(lif, 1, 1, params=[torch.tensor(1.7), torch.tensor(0.3)])

    def net(x):
        h = torch.sigmoid(3.0 * x) * 2.0
        return h, neuron(h)

    h, y = torch.compile(net, fullgraph=True)(torch.randn(50, 4, 33))
    neuron.reset()
    assert torch.equal(y, neuron(h))


def test_the_neurons_gradient_keeps_its_bits():
    neuron, x, grads = FlexSN(relu_mem, 1, 1), torch.randn(50, 4, 33), []
    for call in (torch.compile(neuron, fullgraph=True), neuron):
        neuron.reset()
        leaf = x.clone().requires_grad_()
        (call(leaf) * torch.linspace(-1, 1, 33)).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


# --- disk caches --------------------------------------------------------------------------------------------------------------------
CACHED = """
import sys, torch, flexsn
from torch import nn
from torch._dynamo.utils import counters

what = sys.argv[1]

class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8))
        self.register_buffer("v_th", torch.tensor(0.5))

    def forward(self, x, v):
        h = v + (x - v) * torch.sigmoid(self.w)
        s = flexsn.surrogate.atan(h - self.v_th)
        return s, h * (1.0 - s)

if what == "network":
    net = nn.Sequential(nn.Linear(4, 8), flexsn.FlexSN(Core(), 1, 1))
elif what == "operator":
    core, v0 = Core(), torch.zeros(3, 8)
    net = lambda x: flexsn.lowlevel.flex_sn_scan(core, 1, 1, 1, torch.cat([x, x], -1), v0)[0]
else:  # a program that was exported elsewhere
    net = torch.export.load(what).module()
if sys.argv[2] == "first":  # whatever else this process compiled
    torch.compile(flexsn.FlexSN(lambda x, v: (x + v, x + v), 1, 1))(torch.randn(5, 3, 4))
    torch._dynamo.reset()
    counters.clear()
compiled = torch.compile(net, fullgraph=True)
got = compiled(torch.ones(5, 3, 4))
got.sum().backward()
if what == "network":
    flexsn.reset_net(net)
with torch.no_grad():
    torch.testing.assert_close(compiled(torch.ones(5, 3, 4)), got)
names = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass")
print([counters["aot_autograd"][n] for n in names], [counters["inductor"][f"fxgraph_cache_{n}"] for n in ("hit", "miss", "bypass")])
"""


@pytest.mark.parametrize(
    "what", [pytest.param("network", marks=pytest.mark.slow), *(pytest.param(w, marks=pytest.mark.full) for w in ("operator", "program"))]
)
def test_a_second_process_finds_what_the_first_compiled(what, tmp_path):
    """It need not have compiled anything before: importing flexsn is enough."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    if what == "program":
        net = nn.Sequential(nn.Linear(4, 8), FlexSN(plif, 1, 1, params=[nn.Parameter(torch.rand(8))], stateful=False))
        torch.export.save(torch.export.export(net, (torch.randn(5, 3, 4),)), what := tmp_path / "net.pt2")
    found = []
    for time in ("first", "second"):
        command = [sys.executable, "-W", "ignore", "-c", CACHED, what, time]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.strip())
    # training and inference; forward and backward of training, and inference
    assert found == ["[0, 2, 0] [0, 3, 0]", "[2, 0, 0] [3, 0, 0]"]


@pytest.mark.filterwarnings("ignore::flexsn.errors.FallbackWarning")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("stateful", [True, "detached"])
def test_a_neuron_without_a_kernel_called_several_times(compiler, stateful):
    """Each call starts where the one before it ended."""
    net = FlexSN(lambda x, v: (v * 0.5 + x + 0 * v.mean(), v * 0.5 + x + 0 * v.mean()), 1, 1, stateful=stateful)
    calls = lambda a, b, c: (net(a), net(b), net(c))
    xs = [torch.full((2, 3), k + 1.0) for k in range(3)]
    with torch.no_grad():
        got, state = torch.compile(calls, backend=compiler)(*xs), net.states[0]
        net.reset()
        for a, b in zip((*got, state), (*calls(*xs), net.states[0]), strict=True):
            assert torch.equal(a, b)


def test_state_sequences_of_every_call():
    x, (net, want) = 2 * torch.rand(5, 3, 6), (flexsn.LIF(store_state_seqs=True) for _ in range(2))
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    for stored in (True, True, False, True):
        net.store_state_seqs = want.store_state_seqs = stored
        assert torch.equal(compiled(x), want(x))
        assert (net.state_seqs is None) == (not stored)
        torch.testing.assert_close(net.state_seqs, want.state_seqs, rtol=0, atol=0)
