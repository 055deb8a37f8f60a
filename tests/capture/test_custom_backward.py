"""Backwards that users write (`torch.autograd.Function`, hooks): what they compute from, change, draw and mix."""

import functools
import math
import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import flexsn
from flexsn import errors
from flexsn._operator import fallback
from flexsn._program import captured

aten = torch.ops.aten


def function(backward, forward=lambda h, *more: (h > 0).to(h)):
    """An autograd function that saves what it is given; `backward(g, *saved)`."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *operands):
            ctx.save_for_backward(*operands)
            return forward(*operands)

        @staticmethod
        def backward(ctx, g):
            return backward(g, *ctx.saved_tensors)

    return Function.apply


def lsq(g, x, a):
    """Learned step size quantisation (Esser et al. 2020): the gradient of the step has a scale by the number of neurons."""
    q = x / a
    inside = (q >= -4) & (q <= 3)
    return g * inside, (g * torch.where(inside, q.round() - q, q.clamp(-4, 3))).sum() / math.sqrt(x.numel() * 3)


quantise = function(lsq, lambda x, a: (x / a).round().clamp(-4, 3) * a)  # PyTorch 2.11 compiles none that a module holds


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.5))

    def forward(self, x, v):
        h = 0.8 * v + x
        s = quantise(h, self.a)
        return s, h - s


def by_length(h):
    s = flexsn.surrogate.atan(h)
    if s.requires_grad:
        s.register_hook(lambda g: g / len(g))
    return s


def by_hook(x, v):
    s = by_length(0.8 * v + x)
    return s, v


class Branching(nn.Module):
    """`if` on a size in a backward."""

    def forward(self, x, v):
        s = branch(0.8 * v + x)
        return s, v


branch = function(lambda g, h: g * 2.0 if len(h) > 10 else g)


def gradients(net, sizes):
    found = []
    for size in sizes:
        x = torch.randn(6, size, 5, generator=torch.Generator().manual_seed(size)).requires_grad_()
        params = [p for p in net.parameters() if p.requires_grad]
        found += torch.autograd.grad(net(x).square().sum(), [x, *params])
    return found


def nested(g, h):
    with torch.enable_grad():
        inner = h.detach().requires_grad_()
        return torch.autograd.grad(branch(inner), inner, g)[0]


def asked_forward(x):
    h = x * 1.0
    if h.requires_grad:
        factor = 2.0 if len(h) > 10 else 1.0
        h.register_hook(lambda g: g * factor)
    return h


ASKS = {
    "numel": function(lambda g, h: g * 2.0 if torch.numel(g) > 40 else g), "aten": function(lambda g, h: g * 2.0 if aten.size.int(g, 0) > 10 else g),
    "stride": function(lambda g, h: g * 2.0 if h[None].stride(0) > 40 else g),
    "same size": function(lambda g, h: g * 2.0 if g.is_same_size(torch.empty(20, 5)) else g),
    "flat": function(lambda g, h: g * 2.0 if len(g.reshape(-1)) > 60 else g), "nested": function(nested), "forward": asked_forward,
}  # fmt: skip


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_ways_to_ask_for_a_size(ask):
    net = flexsn.FlexSN(lambda x, v: ((0.8 * v + ask(x)).tanh(), v + x), num_states=1, backend="cpp", stateful=False)
    got = gradients(net, (5, 20))
    net.backend = "torch"
    for a, b in zip(got, gradients(net, (5, 20)), strict=True):
        torch.testing.assert_close(a, b)


def test_the_gradient_of_a_sum_that_asks_for_its_length():
    w = torch.tensor(0.5, requires_grad=True)
    times = function(lambda g, x, w: (g * w, (rows := (g * x).sum(-1)).sum() * (2.0 if len(rows) > 10 else 1.0)), lambda x, w: x * w)
    for size in (5, 20):
        x = torch.randn(4, size, 3, generator=torch.Generator().manual_seed(0))
        grads = [
            torch.autograd.grad(flexsn.scan(lambda x, v: (v + times(x, w), v), [x], [None], backend=b).outputs[0].square().sum(), w)[0]
            for b in ("cpp", "torch")
        ]
        torch.testing.assert_close(*grads)


def test_a_backward_may_use_gradients_of_its_own():
    def backward(g, h):
        with torch.enable_grad():
            inner = h.detach().requires_grad_()
            inner.sin().backward(g)
        found, inner.grad = inner.grad, None
        return found

    sine = function(backward, torch.sin)
    net = flexsn.FlexSN(lambda x, v: (sine(x), v), num_states=1, backend="cpp", stateful=False)
    got = gradients(net, (5,))[0]
    net.backend = "torch"
    torch.testing.assert_close(got, gradients(net, (5,))[0])


def test_hooks_need_no_condition():
    """The trace without gradients passes them by, too."""

    def core(x, v):
        u = 0.5 * v + x
        u.register_hook(lambda g: g * 2.0)
        u.retain_grad()
        return u.tanh(), u

    net = flexsn.FlexSN(core, num_states=1, backend="cpp", stateful=False)
    got = gradients(net, (5,))[0]
    net.backend = "torch"
    torch.testing.assert_close(got, gradients(net, (5,))[0])


@pytest.mark.parametrize(
    ("make", "dynamic"),
    [
        (Quantised, None),
        (Quantised, False),
        (Quantised, True),
        (lambda: by_hook, None),
        (Branching, None),
        (Branching, False),
        (Branching, True),
    ],  # Dynamo follows no hooks of tensors made inside
    ids=["function", "static", "dynamic", "hook", "branch", "branch static", "branch dynamic"],
)
def test_a_backward_may_depend_on_sizes(make, dynamic):
    """The first size is no constant of the kernel."""
    core = make()
    net = flexsn.FlexSN(core, num_states=1, backend="cpp", stateful=False)
    called = net if dynamic is None else torch.compile(net, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    called.parameters = net.parameters
    got = gradients(called, (32, 8, 32, 9))
    net.backend = "torch"
    for a, b in zip(got, gradients(net, (32, 8, 32, 9)), strict=True):
        torch.testing.assert_close(a, b)


def test_sizes_that_no_backward_asks_for_stay_free():
    net = flexsn.LIF(learn_tau=True)
    for size in (7, 8, 31):
        net.reset() or net(torch.rand(5, size, 3)).sum().backward()
    seen, found = net.captured_values(), set()
    for call in seen.calls.values():
        found.add(id(call.program))
    assert len(seen.calls) == 3 and len(found) == 1


MIXING = {
    "centred": lambda g, h: g - g.mean(), "summed": lambda g, h: g.sum(0, keepdim=True).expand_as(g), "cumsum": lambda g, h: g.cumsum(-1),
    "flipped": lambda g, h: g.flip(-1), "normed": lambda g, h: g / (1.0 + g.norm()),
}  # fmt: skip


@pytest.mark.parametrize("backward", MIXING.values(), ids=MIXING)
def test_a_backward_that_mixes_neurons(backward):
    step = function(backward)

    def core(x, v):
        h = 0.8 * v + x
        s = step(h - 1.0)
        return s, h - s

    x, v = torch.randn(20, 3, 2, requires_grad=True), torch.zeros(3, 2)
    grad = lambda backend: torch.autograd.grad(flexsn.scan(core, [x], [v], backend=backend).outputs[0].square().sum(), x)[0]
    with pytest.raises(errors.NotElementwiseError, match="in the backward is not elementwise"):
        grad("cpp")
    with pytest.warns(errors.FallbackWarning, match="in the backward"):
        torch.testing.assert_close(grad("auto"), grad("torch"))


@pytest.mark.parametrize("as_param", [False, True])
def test_a_gradient_of_a_param_that_depends_on_no_cotangent(as_param):
    """It would be added once, and not at every step."""
    sparse = function(lambda g, h, w: (g, 0.1 * w.sign()))
    w = torch.tensor([0.5, -0.5], requires_grad=True)

    def core(x, v, *params):
        h = 0.8 * v + x
        s = sparse(h, *params or (w,))
        return s, h - s

    def grad(backend):
        found = flexsn.scan(core, [torch.ones(13, 3, 2)], [torch.zeros(3, 2)], [w] * as_param, backend=backend)
        return torch.autograd.grad(found.outputs[0].sum(), w)[0]

    with pytest.raises(errors.ParamGradientError, match="depends on no cotangent"):
        grad("cpp")
    with pytest.warns(errors.FallbackWarning, match="depends on no cotangent"):
        torch.testing.assert_close(grad("auto"), torch.tensor([1.3, -1.3]))


ZEROS = {
    "zeros_like": torch.zeros_like, "zero_": lambda w: torch.empty_like(w).zero_(), "fill_": lambda w: torch.empty_like(w).fill_(0.0),
    "product": lambda w: w * 0, "tensor": lambda w: torch.tensor([0.0, 0.0]), "none": lambda w: None,
}  # fmt: skip


@pytest.mark.parametrize("zero", ZEROS.values(), ids=ZEROS)
def test_a_gradient_of_a_param_that_is_zero(zero):
    frozen = function(lambda g, h, w: (g / (1 + h.abs()) ** 2, zero(w)), lambda h, w: (h > w).to(h))
    w, x = torch.tensor([0.5, -0.5], requires_grad=True), torch.randn(5, 3, 2, requires_grad=True)

    def core(x, v):
        h = 0.8 * v + x
        s = frozen(h, w)
        return s, h - s

    grads = [
        torch.autograd.grad(flexsn.scan(core, [x], [torch.zeros(3, 2)], backend=backend).outputs[0].sum(), [x, w], allow_unused=True)
        for backend in ("cpp", "torch")
    ]
    torch.testing.assert_close(grads[0][0], grads[1][0])
    assert grads[0][1] is None or not grads[0][1].any()


@pytest.mark.filterwarnings("ignore::flexsn.errors.FallbackWarning")
@pytest.mark.parametrize(
    ("backward", "error"),
    [
        (lambda log: lambda g, h: log.append(1) or g, errors.SideEffectError),
        (lambda log: lambda g, h: g * random.random(), errors.RandomOpError),
        (lambda log: lambda g, h: g * torch.rand(()), errors.RandomOpError),
    ],
    ids=["writes", "random", "torch"],
)
def test_a_backward_with_side_effects(backward, error):
    """At every call: the second does not find what the first recorded."""
    log: list = []
    step = function(backward(log))

    def core(x, v):
        h = v + x
        s = step(h - 1.0)
        return s, h * (1.0 - s)

    neuron, x = flexsn.FlexSN(core, num_states=1, stateful=False, backend="cpp"), torch.rand(5, 2, 3, requires_grad=True)
    for _ in range(2):
        with pytest.raises(error):
            neuron(x)
    assert torch.equal(neuron(x.detach()), flexsn.scan(core, (x.detach(),), (None,), backend="torch").outputs[0])
    neuron.backend = "auto"
    for _ in range(2):  # the warning comes once
        log.clear()
        neuron(x).sum().backward()
        assert log == [1] * (5 if error is errors.SideEffectError else 0)


def clip(g, h):
    return g.clamp(-0.1, 0.1)


# --- operands, params and returns that are smaller than the step -----------------------------------------------------------------------
halved = function(lambda g, h: g / 2, lambda h: h * 1.0)
clipped = function(lambda g, h: g.clamp(-0.1, 0.1), lambda h: h * 1.0)
ones_of_cotangents = function(lambda g, h: torch.ones_like(g) * h, lambda h: h * 1.0)
shifted_zeros = function(lambda g, h: torch.zeros_like(g) + 1.0, lambda h: h * 1.0)
shifted = function(lambda g, h: g + 0.1, lambda h: h * 1.0)
constant = function(lambda g, h: h * 2.0, lambda h: h * 1.0)
counted = function(lambda g, h: g / g.numel(), lambda h: h * 1.0)
ones = function(lambda g, h: torch.ones_like(h), lambda h: h * 1.0)
saved = function(lambda g, h: h, lambda h: h * 1.0)


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".torch.jit.script")  # PyTorch's own: a DeprecationWarning, since 2.14 a FutureWarning
    scripted_clip = torch.jit.script(clip)


def fails_but_at_3(g):
    assert g.shape == (3,)
    return g * 2.0


def tried(g):
    try:
        return g.view(3) * 2.0
    except RuntimeError:
        return g


def asks_forward(h):
    h = h * 1.0
    if h.requires_grad:  # which no call without gradients comes to
        factor = 2.0 if len(h) > 3 else 1.0
        h.register_hook(lambda g: g * factor)
    return h


def hooked(hook):
    def way(h):
        h = h * 1.0
        if h.requires_grad:
            h.register_hook(hook)
        return h

    return way


def masked(g, h):
    g = g.clone()
    g[h.abs() > 0.5] = 0.0
    return g * (1.0 - h.abs()).clamp(min=0.0)


def added_up(way):
    """Of an input that broadcasts."""

    def core(x, z, v):
        h = 0.8 * v + x + way(z)
        return h.tanh(), h

    return core


def spiking(spike):
    def core(x, z, v):
        h = 0.8 * v + x + z
        s = spike(h - 0.5)
        return s, h * (1 - s)

    return core


def small_gradients(core, backend):
    torch.manual_seed(0)
    x, z = torch.randn(6, 5, 3), torch.randn(6, 3, requires_grad=True)
    y = flexsn.scan(core, [x, z], [None], backend=backend).outputs[0]
    return torch.autograd.grad(y.square().sum(), z)[0]


@pytest.mark.parametrize(
    "way",
    {
        "clipped": clipped, "shifted": shifted, "constant": constant, "ones of it": ones_of_cotangents, "zeros of it": shifted_zeros, "counted": counted, "ones": ones, "saved": saved,
        "beside another way": lambda h: saved(h) + h, "hook": hooked(lambda g: g.sign()), "PyTorch's": hooked(torch.sign),
        "partial": hooked(functools.partial(torch.clamp, min=-0.1, max=0.1)), "module": hooked(nn.Hardtanh(-0.1, 0.1)),
        "scripted": function(scripted_clip), "rank": hooked(lambda g: g * g.dim()), "branch": hooked(lambda g: g * (2.0 if g.shape[0] > 3 else 1.0)),
        "no op": hooked(lambda g: g * 2.0 if len(g) < 4 else g), "length of strides": hooked(lambda g: g * len(g.stride())),
        "in place": hooked(lambda g: g.mul_(2.0)), "asks forward": asks_forward, "tried": hooked(tried),
    }.items(), ids=lambda way: way[0],
)  # fmt: skip
def test_a_backward_of_a_small_input_that_is_not_linear(way):
    """Eager sums over the neurons first."""
    _, way = way
    with pytest.raises(errors.NotElementwiseError, match=r"`z` is smaller than the step \[5, 3\]"):
        small_gradients(added_up(way), "cpp")
    with fallback.unsaid():
        torch.testing.assert_close(small_gradients(added_up(way), "auto"), small_gradients(added_up(way), "torch"))


@pytest.mark.parametrize(
    "core",
    [added_up(halved), spiking(function(masked)), spiking(function(lambda g, h: g / (1 + h.abs()).square())), added_up(hooked(torch.neg))],
    ids=["halved", "masked", "fast sigmoid", "negated"],
)  # fmt: skip
def test_a_linear_backward_of_a_small_input_is_fused(core):
    torch.testing.assert_close(small_gradients(core, "cpp"), small_gradients(core, "torch"))


@pytest.mark.parametrize(
    "op",
    [
        torch.xlogy,
        torch.special.xlog1py,
        torch.fmod,
        torch.atan2,
        torch.hypot,
        torch.copysign,
        lambda z, p: torch.sign(z) * p,
        lambda z, p: flexsn.surrogate.atan(z).trunc() * p,
    ],
    ids=["xlogy", "xlog1py", "fmod", "atan2", "hypot", "copysign", "sign", "trunc of spikes"],
)
def test_what_pytorch_derives_of_a_small_input_is_fused(op):
    p = torch.rand(3) + 0.5
    core = added_up(lambda z: op(z.abs() + 0.1, p))
    torch.testing.assert_close(small_gradients(core, "cpp"), small_gradients(core, "torch"))


@pytest.mark.parametrize("backward", [lambda g, w: torch.where(g >= 0, 1.0, -2.0), lambda g, w: g + 1.0], ids=["sign", "shifted"])
def test_a_backward_of_a_small_return_that_is_not_linear(backward):
    """A kernel has the cotangent at one of its neurons, and zeros at the others."""
    way = function(backward, lambda w: w * 2.0)

    def grad(backend):
        torch.manual_seed(0)
        x, c, w = torch.randn(7, 5, 3), torch.randn(7, 3), torch.ones(3, requires_grad=True)
        y = flexsn.scan(lambda x, v, w: (0.8 * v + x, way(w), 0.8 * v + x), [x], [None], [w], backend=backend).outputs[1]
        return torch.autograd.grad((y * c).sum(), w)[0]

    with pytest.raises(errors.NotElementwiseError, match="a return is smaller"):
        grad("cpp")
    with fallback.unsaid():
        torch.testing.assert_close(grad("auto"), grad("torch"))


def fills_by_mask(g):
    g = g.clone()
    g[torch.tensor([True, False, False])] = 0.5
    return g


NOT_OF_THE_SUM = {
    "floor": lambda g: torch.div(g, 0.25, rounding_mode="floor") * 0.25, "mask": fills_by_mask,
    "index_fill": lambda g: g.index_fill(0, torch.tensor([0]), 0.5), "index_add": lambda g: g.index_add(0, torch.tensor([0]), torch.tensor([0.5])),
    "scatter_add": lambda g: g.scatter_add(0, torch.tensor([0]), torch.tensor([0.5])),
    "pad": lambda g: torch.nn.functional.pad(g, (1, 0), value=0.5)[:-1], "int": lambda g: g.int().float(), "bool": lambda g: g.bool().float(),
}  # fmt: skip


@pytest.mark.parametrize("rule", NOT_OF_THE_SUM.values(), ids=NOT_OF_THE_SUM)
def test_a_gradient_of_a_param_that_is_not_linear_in_a_sum(rule):
    times = function(lambda g, h, w: (g * w, rule((g * h).sum(0))), lambda h, w: h * w)

    def core(x, v, w):
        h = 0.8 * v + times(x, w)
        return h, h

    def grad(backend):
        torch.manual_seed(0)
        x, w = torch.randn(7, 5, 3), torch.ones(3, requires_grad=True)
        return torch.autograd.grad(flexsn.scan(core, [x], [None], [w], backend=backend).outputs[0].square().sum(), w)[0]

    with pytest.raises(errors.ParamGradientError, match="not known to be linear"):
        grad("cpp")
    with fallback.unsaid():
        torch.testing.assert_close(grad("auto"), grad("torch"))


@pytest.mark.parametrize("way", [hooked(fails_but_at_3), hooked(lambda g: g.view(3) * 2.0)], ids=["assert", "view"])
def test_a_backward_that_runs_at_the_size_of_a_small_input_alone(way):
    with pytest.raises(errors.UnsupportedOpError, match=r"a backward that fails on operands of the step shape \[5, 3\]"):
        small_gradients(added_up(way), "cpp")
    with fallback.unsaid():
        torch.testing.assert_close(small_gradients(added_up(way), "auto"), small_gradients(added_up(way), "torch"))


@pytest.mark.parametrize(
    "way",
    [
        lambda z: checkpoint(lambda a: a.tanh() * a, z, use_reentrant=False), function(lambda g, h: torch.vmap(torch.mul)(g, h)),
    ],
    ids=["checkpoint", "vmap"],
)  # fmt: skip
def test_what_asks_sizes_of_a_small_input_and_decides_nothing_is_fused(way):
    torch.testing.assert_close(small_gradients(added_up(way), "cpp"), small_gradients(added_up(way), "torch"))


def test_several_results_of_one_op_beside_a_small_input():
    layer = weight_norm(nn.Linear(3, 3, bias=False))

    def core(x, z, v):
        h = 0.8 * v + x * layer.weight.diagonal() + z
        return h.tanh(), h

    torch.testing.assert_close(small_gradients(core, "cpp"), small_gradients(core, "torch"))


def test_a_size_that_a_param_has_too_is_no_constant_of_a_small_operand():
    w = torch.ones(5, 3)
    core = added_up(lambda z: hooked(lambda g: g / len(g))(z * w))
    with fallback.unsaid():
        torch.testing.assert_close(small_gradients(core, "auto"), small_gradients(core, "torch"))


def test_the_user_s_parameter_stays_what_it_is_where_a_backward_sets_it():
    w = torch.ones(3, requires_grad=True)

    def backward(g, h):
        w.data = w.data * 0.5
        return g * 2.0

    core = added_up(function(backward, lambda h: h * w.detach()))
    with pytest.raises(errors.CapturedMutationError, match=r"sets `\.data` of captured tensor `.*w`"):
        small_gradients(core, "cpp")
    assert w.device.type == "cpu"
    assert torch.equal(w, torch.ones(3))


def test_a_gradient_that_a_core_sets_stays_the_users():
    w = torch.ones(3, requires_grad=True)

    def core(x, v):
        w.grad = x.detach() * 1.0
        return x * w, v

    with pytest.raises(errors.CapturedMutationError, match=r"sets `\.grad` of captured tensor"):
        flexsn.scan(core, [torch.ones(4, 3)], [None], backend="cpp")
    assert w.grad is None


@pytest.mark.parametrize(
    ("spike", "captures"),
    [
        (flexsn.surrogate.atan, 1),
        (lambda h: flexsn.surrogate.custom_surrogate(h, lambda h: h.cos()), 2),
        (function(lambda g, h: g * 2.0), 2),
    ],
    ids=["flexsn's", "of a gradient", "of a function"],
)
def test_what_pytorch_derives_is_captured_once(spike, captures, monkeypatch):
    """A user's code may make another backward at other sizes, or the next time: it runs twice."""
    vjps = []
    own = captured.trace
    monkeypatch.setattr(captured, "trace", lambda *args, vjp, **rest: (vjps.append(vjp), own(*args, vjp=vjp, **rest))[1])

    def core(x, v):
        h = 0.8 * v + x
        s = spike(h - 1.0)
        return s, h * (1.0 - s)

    x = torch.randn(3, 5, requires_grad=True)
    flexsn.scan(core, [x], [None]).outputs[0].sum().backward()
    assert vjps.count(False) == 2 and vjps.count(True) == captures
