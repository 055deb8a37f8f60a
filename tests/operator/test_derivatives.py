"""Every derivative of fused calls against the eager loop: forward mode, second and third derivatives, batches of cotangents."""

import gc

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.utils._pytree import tree_leaves

import flexsn
from flexsn import surrogate
from flexsn.errors import CannotFuseError, DoubleBackwardError

f64 = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")  # PyTorch's own, in `torch.func`


def smooth(x, v, p):
    h = p * v + torch.tanh(x * p)
    return torch.sigmoid(h) * x, h * 0.9


def spiking(x, v, p):
    h = v + (x - v) * p.sigmoid()
    s = surrogate.sigmoid(h - 0.5, 4.0)
    return s, h * (1.0 - s)


def two(x, z, v, a, p, q):
    """Two inputs, two states, two outputs of which one is integer, params of which one is read through what is computed from it."""
    h = v * torch.exp(-1.0 / p) + x * z - a
    s = torch.where(h > 0.3, h * h, q * h)
    return s, (h > 0.0).to(torch.int64), h - s, a * 0.8 + 0.2 * s.detach() + 0.1 * h


def counting(x, v, n, p):
    """A state of integers, and one whose gradient is cut."""
    return x * v * p + n, (v * p).detach() * 0.5 + 0.1, n + 1


def make(*shapes):
    return [torch.randn(s, dtype=f64) for s in shapes]


CASES = {
    "smooth": (smooth, (1, 1, 1), lambda: make((6, 3), (3,), (3,))),
    "spiking": (spiking, (1, 1, 1), lambda: make((6, 3), (3,), (3,))),
    "default states": (smooth, (1, 1, 1), lambda: [*make((6, 3)), None, *make((3,))]),
    "a param for all neurons": (smooth, (1, 1, 1), lambda: make((6, 2, 3), (2, 3), ())),
    "a param for some": (smooth, (1, 1, 1), lambda: make((6, 2, 3), (2, 3), (2, 1))),
    "two of each": (two, (2, 2, 2), lambda: [*make((5, 2, 3), (5, 3), (2, 3), (3,)), torch.tensor(1.7, dtype=f64), *make((3,))]),
    "strided": (smooth, (1, 1, 1), lambda: [torch.randn(3, 6, dtype=f64).T, torch.randn(6, dtype=f64)[::2], *make((3,))]),
    "a state for all neurons": (smooth, (1, 1, 1), lambda: make((6, 3), (), (3,))),
    "an input for some": (two, (2, 2, 2), lambda: make((5, 2, 3), (5, 1, 3), (2, 3), (2, 1), (3,), ())),
    "integers": (counting, (1, 2, 1), lambda: [*make((5, 3), (3,)), torch.zeros(3, dtype=torch.int64), *make((3,))]),
    "one step": (smooth, (1, 1, 1), lambda: make((1, 3), (3,), (3,))),
    "many steps": (spiking, (1, 1, 1), lambda: make((67, 2), (2,), ())),
    "no steps": (smooth, (1, 1, 1), lambda: make((0, 3), (3,), (3,))),
}
CASE = pytest.mark.parametrize("case", CASES)
SEQUENCES = pytest.mark.parametrize("sequences", [False, True], ids=["final", "sequences"])


def leaves_of(operands):
    return [k for k, t in enumerate(operands) if t is not None and t.is_floating_point()]


def calls(case, sequences=False):
    """The fused call and the eager loop as functions of the operands that have gradients, and these."""
    core, (i, n, _), operands = *CASES[case][:2], CASES[case][2]()
    where = leaves_of(operands)

    def call(backend):
        def run(*given):
            now = list(operands)
            for k, t in zip(where, given, strict=True):
                now[k] = t
            found = flexsn.scan(
                core, now[:i], now[i : i + n], now[i + n :], backend=backend, strict=backend != "torch", store_state_seqs=sequences
            )
            return [y for y in (*found.outputs, *found.states) if y.is_floating_point()]

        return run

    return call("auto"), call("torch"), [operands[k] for k in where]


def assert_same(got, want):
    got, want = tree_leaves(got), tree_leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        a, b = (torch.zeros((), dtype=f64) if t is None else t for t in (a, b))
        torch.testing.assert_close(*torch.broadcast_tensors(a, b), rtol=1e-9, atol=1e-9)


@CASE
@SEQUENCES
def test_second_derivatives(case, sequences):
    fused, eager, operands = calls(case, sequences)
    found = []
    for run in (fused, eager):
        torch.manual_seed(3)
        leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in operands]
        results = [y for y in run(*leaves) if y.requires_grad]
        cotangents = [torch.randn_like(y).requires_grad_() for y in results]
        grads = torch.autograd.grad(results, leaves, cotangents, create_graph=True, allow_unused=True)
        assert any(g is not None and g.requires_grad for g in grads)
        known = [g for g in grads if g is not None and g.requires_grad]
        again = torch.autograd.grad(known, (*leaves, *cotangents), [torch.randn_like(g) for g in known], allow_unused=True)
        found.append([*grads, *again])
    assert_same(*found)


@CASE
@SEQUENCES
@pytest.mark.parametrize("way", ["torch.func", "dual level"])
def test_forward_mode(case, sequences, way):
    fused, eager, operands = calls(case, sequences)
    tangents = [torch.randn_like(t) for t in operands]
    found = []
    for run in (fused, eager):
        if way == "torch.func":
            found.append(torch.func.jvp(run, tuple(operands), tuple(tangents)))
        else:
            with forward_ad.dual_level():
                results = run(*map(forward_ad.make_dual, operands, tangents))
                found.append([tuple(forward_ad.unpack_dual(y)) for y in results])
    assert_same(*found)


def of_one(run, operands, k):
    """A scalar function of one operand."""
    return lambda t: sum(y.square().sum() for y in run(*operands[:k], t, *operands[k + 1 :]))


SECOND = {
    "hessian": torch.func.hessian,
    "reverse over reverse": lambda f: torch.func.jacrev(torch.func.jacrev(f)),
    "reverse over forward": lambda f: torch.func.jacrev(torch.func.jacfwd(f)),
    "forward over forward": lambda f: torch.func.jacfwd(torch.func.jacfwd(f)),
    "functional": lambda f: lambda t: torch.autograd.functional.hessian(f, t),
    "functional, vectorized": lambda f: lambda t: torch.autograd.functional.hessian(f, t, vectorize=True),
}


@pytest.mark.parametrize("case", ["smooth", "spiking", "a param for all neurons", "two of each"])
@pytest.mark.parametrize("way", SECOND)
def test_hessians(case, way):
    """All ways agree with the eager loop's reverse over reverse. (Its forward over forward does not, where a surrogate is in it.)"""
    fused, eager, operands = calls(case)
    k = len(operands) - 1
    want = SECOND["reverse over reverse"](of_one(eager, operands, k))(operands[k])
    assert_same(SECOND[way](of_one(fused, operands, k))(operands[k]), want)


@pytest.mark.parametrize("way", ["hessian", "reverse over forward", "forward over forward"])
def test_hessians_over_more_steps_than_a_chunk(way):
    """The forward saves checkpoints then, which batches of tangents pass by."""

    def core(x, v, p):
        v = torch.tanh(v * p + x)
        return v * v, v

    x, p = torch.randn(40, 3, dtype=torch.float64), torch.rand(3, dtype=torch.float64)

    def loss(backend):
        return lambda p: sum(y.square().sum() for y in flexsn.scan(core, [x], [None], [p], backend=backend).outputs)

    want = SECOND["reverse over reverse"](loss("torch"))(p)
    torch.testing.assert_close(SECOND[way](loss("auto"))(p), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", ["smooth", "strided", "a param for all neurons", "an input for some"])
def test_batches_of_cotangents(case):
    fused, eager, operands = calls(case)
    found = []
    for run in (fused, eager):
        leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in operands]
        y = run(*leaves)[0]
        torch.manual_seed(3)
        found.append(torch.autograd.grad(y, leaves, torch.randn(4, *y.shape, dtype=f64), is_grads_batched=True, allow_unused=True))
    assert_same(*found)


def test_third_derivatives():
    fused, eager, operands = calls("smooth")
    found = []
    for run in (fused, eager):
        p = operands[2].clone().requires_grad_()
        g = run(*operands[:2], p)[0].square().sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(g.square().sum(), p, create_graph=True)
        found.append(g.detach())
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", ["smooth", "strided", "a state for all neurons", "a param for some"])
def test_numerically(case):
    fused, _, operands = calls(case)
    leaves = [t.requires_grad_() for t in operands]
    assert torch.autograd.gradcheck(fused, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(fused, leaves)


def test_captured_tensors_and_layers():
    """As a network has them: a learned neuron between layers, differentiated for a Hessian-vector product."""
    torch.manual_seed(3)
    found = []
    for backend in ("auto", "torch"):
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(4, 3), flexsn.LIF(tau=2.0, learn_tau=True, stateful=False, backend=backend), nn.Linear(3, 2)).to(f64)
        weights = list(net.parameters())
        loss = net(torch.randn(6, 2, 4, dtype=f64) * 4).square().sum()
        grads = torch.autograd.grad(loss, weights, create_graph=True)
        found.append(torch.autograd.grad(grads, weights, [torch.randn_like(g) for g in grads]))
    assert_same(*found)


def of_an_inner_function(x, w, backend):
    spike = surrogate.atan

    def inner(x, v):
        s = spike(v * w + x - 0.5)
        return s, v * w + x - s

    return flexsn.scan(inner, [x], [None], backend=backend).outputs[0]


def of_an_inner_function_over_modules(x, w, backend):
    layers = {"scale": w, "act": nn.PReLU(dtype=f64)}
    return flexsn.scan(lambda x, v: (layers["act"](v * layers["scale"] + x), v + x), [x], [None], backend=backend).outputs[0]


def of_a_neuron_that_changes_between_calls(x, w, backend):
    neuron = flexsn.LIF(tau=2.0 + w[0], stateful=False, backend=backend)
    low = neuron(4 * x)
    neuron.v_threshold = 0.5
    return low + neuron(4 * x)


@pytest.mark.parametrize("run", [of_an_inner_function, of_an_inner_function_over_modules, of_a_neuron_that_changes_between_calls])
def test_cores_that_are_gone_after_their_call(run):
    """What a second derivative needs of them is there as long as the graph is."""
    x, found = torch.randn(6, 3, dtype=f64), []
    for backend in ("auto", "torch"):
        w = torch.full((3,), 0.7, dtype=f64, requires_grad=True)
        y = run(x, w, backend)
        gc.collect()
        (g,) = torch.autograd.grad(y.sin().sum(), w, create_graph=True)
        found.append([g.detach(), *torch.autograd.grad(g.square().sum(), w)])
    assert_same(*found)


def test_a_core_that_captures_something_else_now():
    scale, x = 2.0, torch.randn(4, 3, requires_grad=True)
    neuron = flexsn.FlexSN(lambda x, v: ((x * scale).sin(), v + x), num_states=1, stateful=False)
    (g,) = torch.autograd.grad(neuron(x).sum(), x, create_graph=True)
    scale = 3.0
    with pytest.raises(DoubleBackwardError, match="captures something else now"):
        g.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype):
    x, v, p = (t.to(dtype) for t in make((8, 3), (3,), (3,)))
    tangents = tuple(torch.randn_like(t) for t in (x, v, p))
    found = [
        torch.func.jvp(lambda x, v, p, b=b: flexsn.scan(smooth, [x], [v], [p], backend=b).outputs[0], (x, v, p), tangents)[1]
        for b in ("auto", "torch")
    ]
    assert found[0].dtype == dtype
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return (h >= 0).to(h.dtype)

    @staticmethod
    def backward(ctx, g):
        (h,) = ctx.saved_tensors
        return g.clamp(-0.1, 0.1) * torch.exp(-h * h)


def test_a_backward_that_is_not_linear_is_refused_by_name():
    def clipped(x, v):
        s = Clipped.apply(x + v)
        return s, v * 0.5 + x

    x = torch.randn(4, 3, requires_grad=True)
    y = flexsn.scan(clipped, [x], [None]).outputs[0]
    with pytest.raises(DoubleBackwardError, match=r"clipped.*differentiated twice.*not linear") as caught:
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        g.sum().backward()
    assert 'backend="torch"' in str(caught.value) and not isinstance(caught.value, CannotFuseError)
