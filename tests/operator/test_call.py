"""Eager calls, first and later ones: the same results and errors whatever operands, parameters, cotangents and saved tensors come."""

import gc
import os
import threading
import weakref

import pytest
import torch
from cores import adlif, leaky, lif, relu_mem
from helpers import on_cpu
from torch import nn

import flexsn
from flexsn import FlexSN
from flexsn._operator.call import Call
from flexsn.errors import (
    DeviceMismatchError,
    FreedGraphError,
    OperandTypeError,
    ShapeMismatchError,
)

TAU, TH = 2.0, 1.0


def lif_of_numbers(x, v):
    return lif(x, v, TAU, TH)


def adlif_of_numbers(x1, x2, v, a):
    return adlif(x1, x2, v, a, 0.9, 0.8)


def counting(x, n):
    """A hard threshold of an integer state: outputs and states without gradients."""
    n = n + 1
    return (x * x + n), n


class Learned(nn.Module):
    """Params that the kernel takes as they are, of shape [1, 7] and []."""

    def __init__(self):
        super().__init__()
        self.tau, self.v_th = nn.Parameter(torch.linspace(1.5, 3.0, 7).view(1, 7)), nn.Parameter(torch.tensor(0.7))

    def forward(self, x, v):
        return lif(x, v, self.tau, self.v_th)


class Computed(nn.Module):
    """Params that are computed before the kernel, gradients that are computed after it, and a constant."""

    def __init__(self):
        super().__init__()
        self.w, self.shift = nn.Parameter(torch.linspace(-1.0, 1.0, 7)), nn.Parameter(torch.tensor(0.2))

    def forward(self, x, v):
        s, v = lif(x + self.shift * torch.linspace(0.5, 1.5, 7), v, 1.0 + self.w.exp(), 1.0)
        return s, v * self.w.sigmoid()


CORES = {"lif": (lif_of_numbers, 1, 1), "two": (adlif_of_numbers, 2, 2), "exact": (relu_mem, 1, 1), "counting": (counting, 1, 1)}
LEARNED = {"learned": Learned, "computed": Computed}


def neuron_of(name, **options):
    if name in LEARNED:
        return FlexSN(LEARNED[name](), num_states=1, stateful=False, strict=True, **options)
    core, inputs, states = CORES[name]

    def own(*operands):  # with calls of its own, whatever other tests have called
        return core(*operands)

    return FlexSN(own, num_inputs=inputs, num_states=states, stateful=False, strict=True, **options)


def operands(name, dtype=torch.float32, T=20, step=(3, 7)):
    return [(torch.randn(T, *step) + 0.5).to(dtype).requires_grad_() for _ in range(2 if name == "two" else 1)]


def latest(neuron):
    """The kind of calls that was made last for the first time."""
    return list(neuron.captured_values().calls.values())[-1]


def everything(neuron, xs, seed=0):
    """Outputs, states and the gradients of inputs and parameters, from cotangents of all."""
    ys = neuron(*xs)
    ys = list(ys) if isinstance(ys, tuple) else [ys]
    trail = neuron.state_seqs or []
    roots = [y for y in (*ys, *trail) if y.requires_grad]
    generator = torch.Generator("cpu").manual_seed(seed)
    cotangents = [torch.randn(y.shape, generator=generator, device="cpu").to(y) for y in roots]
    grads = torch.autograd.grad(roots, [*xs, *neuron.parameters()], cotangents, allow_unused=True)
    return ys, [*ys, *trail], grads


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.fixture
def filled():
    """PyTorch fills fresh memory with NaN: an element that a kernel leaves shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# --- later calls are as the first ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sequences", [False, True], ids=["finals", "sequences"])
@pytest.mark.parametrize("name", [*CORES, *LEARNED])
def test_later_calls_have_the_bits_of_the_first(name, sequences, dtype, filled):
    for T in (1, 3, 16, 40):
        xs, neuron = operands(name, dtype, T), neuron_of(name, store_state_seqs=sequences)
        _, want, want_grads = everything(neuron, xs)
        for _ in range(2):
            _, got, grads = everything(neuron, xs)
            assert_same(got, want)
            assert_same(grads, want_grads)


@pytest.mark.parametrize("name", [*CORES, *LEARNED])
def test_inference(name, filled):
    xs, neuron = operands(name), neuron_of(name)
    with torch.no_grad():
        want = neuron(*xs)
        got = neuron(*xs)
    assert_same(got if isinstance(got, tuple) else [got], want if isinstance(want, tuple) else [want])
    with torch.inference_mode():
        for _ in range(2):
            y = neuron(*xs)
        assert (y[0] if isinstance(y, tuple) else y).is_inference()


def test_carried_states_and_their_gradients():
    x = torch.randn(12, 5, requires_grad=True)
    neuron, eager = FlexSN(lif_of_numbers, num_states=1, strict=True), FlexSN(lif_of_numbers, num_states=1, backend="torch")
    found = []
    for layer in (eager, neuron, neuron):
        layer.reset()
        parts = [layer(part) for part in x.split(4)]
        found.append((torch.cat(parts), *torch.autograd.grad(torch.cat(parts).sum() + layer.states[0].square().sum(), x)))
    assert torch.equal(found[1][0], found[0][0]) and torch.allclose(found[1][1], found[0][1], atol=1e-6)
    assert_same(found[2], found[1])


def test_any_cotangents_and_any_needs():
    x, v = torch.randn(9, 5), torch.randn(5)
    reads = {}
    for need_x, need_v in ((True, True), (True, False), (False, True)):
        for loss in ("output", "final", "both"):
            for _ in range(3):
                xs, vs = x.clone().requires_grad_(need_x), v.clone().requires_grad_(need_v)
                done = flexsn.scan(relu_mem, (xs,), (vs,), strict=True)
                roots = {"output": done.outputs[0], "final": done.states[0]}
                total = sum(r.square().sum() for n, r in roots.items() if loss in (n, "both"))
                total.backward()
                want = reads.setdefault((need_x, need_v, loss), (xs.grad, vs.grad))
                assert_same((xs.grad, vs.grad), want)


def test_gradients_of_some_operands_of_one_kind_of_call():
    """Each set of operands that a backward asks for has a kernel of its own."""
    want = {}
    for _ in range(3):
        for asked in ("x", "v", "xv", "v", "x"):
            operands = {"x": torch.linspace(-1, 1, 45).view(9, 5).requires_grad_(), "v": torch.linspace(0, 1, 5).requires_grad_()}
            y = flexsn.scan(relu_mem, (operands["x"],), (operands["v"],), strict=True).outputs[0]
            grads = torch.autograd.grad(y.square().sum(), [operands[name] for name in asked])
            for name, grad in zip(asked, grads, strict=True):
                assert torch.equal(grad, want.setdefault(name, grad))


@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_some_parameters(name):
    neuron, x = neuron_of(name), torch.randn(9, 3, 7, requires_grad=True)
    named = {"x": x, **dict(neuron.named_parameters())}
    want = {}
    for _ in range(3):
        for asked in (["x"], [*named], *([n] for n in named), [*named][1:]):
            y = neuron(x)
            for found, grad in zip(asked, torch.autograd.grad(y.square().sum(), [named[n] for n in asked]), strict=True):
                assert torch.equal(grad, want.setdefault(found, grad))
    eager = FlexSN(neuron.core, num_states=1, stateful=False, backend="torch")(x)
    for grad, wanted in zip(torch.autograd.grad(eager.square().sum(), list(named.values())), want.values(), strict=True):
        torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("name", LEARNED)
def test_params_change_between_calls(name):
    neuron, x = neuron_of(name), torch.randn(9, 3, 7, requires_grad=True)
    eager = FlexSN(neuron.core, num_states=1, stateful=False, backend="torch")
    for _ in range(4):
        ys, _, grads = everything(neuron, [x])
        _, want, want_grads = everything(eager, [x])
        assert torch.equal(ys[0], want[0])
        for grad, wanted in zip(grads, want_grads, strict=True):
            torch.testing.assert_close(grad, wanted)
        with torch.no_grad():
            for parameter in neuron.parameters():
                parameter.mul_(1.25)


def test_params_of_half_precision_are_computed_in_single():
    """A param that the core takes is cast before the kernel, and may not be passed on as it is."""
    weight, x = (
        nn.Parameter(torch.tensor([0.3, 1.7, 2.1], dtype=torch.bfloat16)),
        torch.randn(5, 3, dtype=torch.bfloat16, requires_grad=True),
    )
    neuron, eager = [
        FlexSN(lambda x, v, w: (x * w + v, v * w + x), num_states=1, params=[weight], stateful=False, backend=backend)
        for backend in ("auto", "torch")
    ]
    for _ in range(4):
        y = neuron(x)
        grads = torch.autograd.grad(y.float().square().sum(), [x, weight])
    want = eager(x)
    assert torch.equal(y, want)
    for grad, wanted in zip(grads, torch.autograd.grad(want.float().square().sum(), [x, weight]), strict=True):
        assert grad.dtype is wanted.dtype is torch.bfloat16
        torch.testing.assert_close(grad, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", LEARNED)
def test_a_backward_under_autocast(name):
    neuron, x = neuron_of(name), torch.randn(9, 3, 7, requires_grad=True)
    wanted = [x, *neuron.parameters()]
    for _ in range(3):
        want = torch.autograd.grad(neuron(x).square().sum(), wanted)
    y = neuron(x)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        assert_same(torch.autograd.grad(y.square().sum(), wanted), want)


def test_results_without_gradients():
    x = torch.randn(6, 4)
    for _ in range(3):
        done = flexsn.scan(counting, (x.clone().requires_grad_(),), (torch.zeros(4, dtype=torch.int64),), strict=True)
        assert done.outputs[0].requires_grad and not done.states[0].requires_grad


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # PyTorch's own
def test_compiled_code_gives_the_same_each_time():
    net = nn.Sequential(nn.Linear(5, 5), FlexSN(lif_of_numbers, num_states=1, stateful=False, strict=True))
    compiled, x = torch.compile(net, fullgraph=True), torch.randn(6, 3, 5)
    found = []
    for _ in range(4):
        y = compiled(x)
        found.append((y, *torch.autograd.grad(y.square().sum(), list(net.parameters()))))
    for again in found[1:]:
        assert_same(again, found[0])


# --- unusual operands -------------------------------------------------------------------------------------------------------------
def test_operands_and_cotangents_that_lie_otherwise():
    neuron, x = neuron_of("lif"), torch.randn(8, 6, 4)
    for _ in range(2):
        want = neuron(x.requires_grad_())
    strided = x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    y = neuron(strided)
    assert torch.equal(y, want)
    negated = torch.complex(torch.zeros_like(x), -x.detach()).conj().imag.requires_grad_()
    assert negated.is_neg() and torch.equal(neuron(negated), want)
    y = neuron(x)
    y.backward(torch.ones_like(y))
    first, x.grad = x.grad, None
    y = neuron(x)
    y.backward(torch.ones(()).expand(y.shape))  # a cotangent without memory of its own
    assert torch.equal(x.grad, first)


def test_saved_tensors_may_come_back_otherwise():
    neuron, x = neuron_of("lif"), torch.randn(20, 6, 4, requires_grad=True)
    for _ in range(2):
        (want,) = torch.autograd.grad(neuron(x).sum(), x)
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2)):
        y = neuron(x)
    assert packed == [(20, 6, 4), (1, 6, 4)]  # the input, checkpoints
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)
    with torch.autograd.graph.save_on_cpu():
        y = neuron(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)


@pytest.mark.parametrize("calls", [0, 3], ids=["first call", "later call"])
def test_what_hooks_unpack_on_another_device_is_refused(calls):
    """The kernel would follow a pointer to nowhere."""
    neuron, x = neuron_of("lif"), torch.randn(20, 6, 4, requires_grad=True)
    for _ in range(calls):
        (want,) = torch.autograd.grad(neuron(x).sum(), x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.to("meta")):
        y = neuron(x)
    with pytest.raises(DeviceMismatchError, match=f"runs its backward on {x.device}, and .* is on meta"):
        y.sum().backward()
    if calls:
        assert torch.equal(torch.autograd.grad(neuron(x).sum(), x)[0], want)


@on_cpu
def test_threads_of_the_process_may_change(threads):
    neuron, x = neuron_of("lif"), torch.randn(64, 4096, requires_grad=True)
    found = []
    for count in (1, 1, 2, 2, 1, 1):
        threads(count)
        y = neuron(x)
        found.append((y, *torch.autograd.grad(y.sum(), x)))
    for again in found[1:]:
        assert_same(again, found[0])


def test_a_tensor_of_inference_mode():
    neuron = FlexSN(lambda x, v, w: ((x + v) * w, x + v), num_states=1, params=[nn.Parameter(torch.ones(4))], stateful=False)
    with torch.inference_mode():
        x = torch.randn(5, 4)
    for _ in range(3):
        neuron(x).sum().backward()
    done = [flexsn.scan(relu_mem, (x,), (torch.ones(4, requires_grad=True),), strict=True).outputs[0] for _ in range(3)]
    for y in done:
        y.sum().backward()


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("inside", [False, True], ids=["input made before", "input made inside"])
def test_gradients_enabled_in_inference_mode(inside, before):
    """PyTorch records none there, whatever went before."""
    neuron, x = neuron_of("lif"), torch.randn(20, 5, requires_grad=True)
    for _ in range(before):
        neuron(x).sum().backward()
    with torch.inference_mode(), torch.enable_grad():
        for _ in range(3):
            y = neuron(torch.randn(20, 5) if inside else x)
            assert y.is_inference() and not y.requires_grad and y.grad_fn is None
    for _ in range(2):
        assert neuron(x).requires_grad


@pytest.mark.parametrize("T, step", [(0, (3,)), (4, (0,))])
def test_nothing_to_run(T, step):
    neuron, x = neuron_of("exact"), torch.randn(T, *step, requires_grad=True)
    for _ in range(3):
        y = neuron(x)
        y.sum().backward()
        assert y.shape == (T, *step) and x.grad.shape == x.shape


# --- errors -----------------------------------------------------------------------------------------------------------------------
@pytest.fixture(params=["lif", *LEARNED])
def recorded(request):
    neuron, x = neuron_of(request.param), torch.randn(8, 3, 7, requires_grad=True)
    for _ in range(3):
        neuron(x).sum().backward()
    y = neuron(x)
    return neuron, x, y


def test_a_freed_graph(recorded):
    _, _, y = recorded
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    with pytest.raises(FreedGraphError, match="reset_net"):
        y.sum().backward()


def test_a_write_into_what_was_saved(recorded):
    _, x, y = recorded
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_write_into_a_parameter(recorded):
    neuron, _, y = recorded
    for parameter in neuron.parameters():
        with torch.no_grad():
            parameter.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward(retain_graph=True)


def test_freed_memory_is_no_operand(recorded):
    neuron, x, _ = recorded
    gone = x.detach().clone().requires_grad_()
    gone.untyped_storage().resize_(0)
    with pytest.raises(OperandTypeError, match="no memory"):
        neuron(gone)


def test_an_error_of_python_passes_the_engine(recorded, monkeypatch):
    _, _, y = recorded

    def broken(*args):
        raise ZeroDivisionError("of this test")

    monkeypatch.setattr(Call, "backward", broken)
    with pytest.raises(ZeroDivisionError, match="of this test"):
        y.backward(torch.ones(()).expand(y.shape))


def test_anomaly_detection(recorded):
    neuron, x, _ = recorded
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        neuron(x).sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of a module that Dynamo imports
def test_compiled_autograd(recorded):
    neuron, x, y = recorded
    (want,) = torch.autograd.grad(y.sum(), x)
    x.grad = None
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        neuron(x).sum().backward()
    assert torch.equal(x.grad, want)


# --- lives ------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["lif", *LEARNED])
def test_nothing_is_left_of_a_neuron(name):
    neuron, x = neuron_of(name), torch.randn(4, 3, 7, requires_grad=True)
    for _ in range(3):
        y = neuron(x)
        y.sum().backward()
    call = latest(neuron)
    seen = weakref.ref(call)
    del neuron, call
    gc.collect()
    assert seen() is not None  # the graph of `y` has it
    del y
    gc.collect()
    assert seen() is None


def test_threads():
    neuron, x = neuron_of("lif"), torch.randn(30, 50)
    leaf = x.clone().requires_grad_()
    neuron(leaf).sum().backward()
    wrong = []

    def work():
        for _ in range(50):
            own = x.clone().requires_grad_()
            neuron(own).sum().backward()
            if not torch.equal(own.grad, leaf.grad):
                wrong.append(own.grad)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@on_cpu
def test_a_forked_child():
    neuron, x = neuron_of("lif"), torch.randn(64, 4096)
    with torch.no_grad():
        for _ in range(3):
            want = neuron(x)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                found = [neuron(x) for _ in range(3)]
                torch.set_num_threads(1)  # or PyTorch's own comparison waits for threads of the parent
                code = 0 if all(torch.equal(y, want) for y in found) else 2
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def made_of_params(shape, order=(0, 1)):
    """A neuron, its params of this shape, and an input whose step of shape (6, 5) lies in this order."""

    def own(x, v, tau, v_th):
        return lif(x, v, tau, v_th)

    params = [nn.Parameter(torch.rand(shape) + bottom) for bottom in (1.5, 0.2)]
    x = torch.randn(20, *[(6, 5)[d] for d in order]).permute(0, *[1 + order.index(d) for d in (0, 1)])
    return FlexSN(own, num_states=1, params=params, stateful=False, strict=True), params, x.requires_grad_()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("shape", [(), (5,), (6, 1), (6, 5)])
def test_launches_with_params(shape, order, filled):
    neuron, params, x = made_of_params(shape, order)

    def results():
        y = neuron(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *params])]

    want = results()
    for _ in range(2):
        assert_same(results(), want)
    with torch.no_grad():
        params[0].mul_(1.5)
    eager = FlexSN(lif, num_states=1, params=params, stateful=False, backend="torch")(x)
    assert torch.equal(neuron(x), eager)


@pytest.mark.parametrize("slope", [False, True], ids=["in the core", "in its backward alone"])
def test_constants_of_a_core(slope):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.tensor([1.0, 2.0, 3.0], device=grad.device)

    def core(x, v):
        v = v + (Doubled.apply(x) if slope else x * torch.tensor([1.0, 2.0, 3.0]))
        return v * 1.0, v

    neuron, eager = [FlexSN(core, num_states=1, stateful=False, backend=backend) for backend in ("auto", "torch")]
    x = torch.randn(5, 2, 3, requires_grad=True)
    for _ in range(4):
        y = neuron(x)
        assert_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(eager(x).sum(), x))


def test_params_that_come_to_lie_otherwise():
    neuron, params, x = made_of_params((6, 5))
    neuron(x).sum().backward()
    for other in (torch.rand(5, 6).t(), torch.rand(12, 5)[::2], torch.rand(6, 5).double()):
        params[0].data = other + 1.5
        with torch.no_grad():
            eager = FlexSN(lif, num_states=1, params=params, stateful=False, backend="torch")(x)
            assert torch.equal(neuron(x), eager)


def test_leaky_with_a_captured_number():
    decay = 0.5
    neuron = FlexSN(lambda x, v: leaky(x, v, decay), num_states=1, stateful=False)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    neuron(x)
    assert torch.autograd.gradcheck(neuron, x)


# --- what was saved comes back otherwise: an error ----------------------------------------------------------------------------------
def shrunk(t):
    return t.new_zeros(0)


@pytest.mark.parametrize("unpack", [shrunk, lambda t: t[:1, :2], lambda t: t.reshape(-1)])
def test_hooks_that_unpack_another_shape(unpack):
    neuron, x = neuron_of("lif"), torch.randn(20, 5, requires_grad=True)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = neuron(x)
        with pytest.raises(ShapeMismatchError, match="had saved a"):
            y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_hooks_that_unpack_another_dtype(dtype):
    """It is cast back; and what the first backward of a kind is given is not kept for the next."""
    neuron, x = neuron_of("lif"), torch.randn(20, 5).bfloat16().float().requires_grad_()
    (want,) = torch.autograd.grad(FlexSN(lif_of_numbers, num_states=1, backend="torch")(x).sum(), x)
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.to(dtype) if t.shape == x.shape else t):
            y = neuron(x)
        for result in (y, neuron(x)):
            assert torch.allclose(torch.autograd.grad(result.sum(), x)[0], want, atol=1e-6)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("unpack", [lambda t: t.double(), lambda t: t.expand(2, *t.shape)], ids=["dtype", "shape"])
def test_hooks_that_unpack_other_params(name, unpack):
    neuron, x = neuron_of(name), torch.randn(9, 3, 7, requires_grad=True)
    want = everything(neuron, [x])[2]
    shapes = {p.shape for p in neuron.parameters()}
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpack(t) if t.shape in shapes else t):
            y = neuron(x)
        if unpack(x).shape == x.shape:
            generator = torch.Generator("cpu").manual_seed(0)
            cotangent = torch.randn(y.shape, generator=generator, device="cpu").to(y)
            assert_same(torch.autograd.grad(y, [x, *neuron.parameters()], cotangent), want)
        else:
            with pytest.raises(ShapeMismatchError, match="had saved a"):
                y.sum().backward()
        everything(neuron, [x])


@pytest.mark.parametrize("shape", [(0,), (1, 5)])
def test_data_set_before_the_backward(shape):
    neuron = neuron_of("lif")
    for _ in range(3):
        x = torch.randn(20, 5, requires_grad=True)
        y = neuron(x)
        x.data = torch.zeros(shape)
        with pytest.raises(ShapeMismatchError, match="which now has the shape"):
            y.sum().backward()


def test_a_module_cast_before_the_backward():
    """Its params are other ones by then, in place: the gradients are those of the call."""
    found = []
    for backend in ("auto", "torch"):
        weight = nn.Parameter(torch.tensor([0.5, 0.25, 1.5]))
        neuron = FlexSN(lambda x, v, w: (x * w + v * v, x + v), num_states=1, params=[weight], stateful=False, backend=backend)
        x = torch.linspace(-1, 1, 12).view(4, 3).requires_grad_()
        y = neuron(x)
        neuron.double()
        found.append(torch.autograd.grad(y.square().sum(), x)[0])
    assert torch.allclose(found[0], found[1].float())
