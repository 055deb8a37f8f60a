"""What the fuzzer found in flexsn, each the smallest core that showed it."""

import copy

import pytest
import torch
from cores import leaky
from helpers import backends, check, evaluate
from torch import nn

import flexsn
from flexsn._capture.decompositions import decomposition
from flexsn.errors import UnsupportedOpError

NATIVE = backends()[0]  # of the device that the tests run on


def test_a_backward_in_which_nothing_needs_a_gradient_builds():
    x, p, q = torch.randn(3, 5, requires_grad=True), torch.tensor(0.5, requires_grad=True), torch.randn(5, requires_grad=True)
    (y,), _ = flexsn.scan(lambda x, p, q: q * 2.0, [x], [], [p, q], backend=NATIVE)
    grads = torch.autograd.grad(y, [x, p], torch.ones_like(y), allow_unused=True)
    assert all(g is None or not g.any() for g in grads)


def test_the_gradient_of_a_sign_of_a_computed_value():
    """`sgn` has a gradient without memory, on which ops go past the recorder."""
    check(lambda x: x.abs().sgn() + x, [torch.randn(3, 5, dtype=torch.float64)])
    check(lambda x: x * x.sgn(), [torch.randn(3, 5)])


def test_a_param_whose_gradient_is_zero_by_construction():
    """`copysign` gives its second argument zeros, which other functions of params pass on."""

    def core(x, p):
        sign = torch.nn.functional.silu(-p)
        return torch.copysign(x, torch.where(sign == sign, sign, 1.0)) + x * p

    def selected(x, p):
        return torch.copysign(torch.where(p == p, p, 1.0), torch.where(p == p, p, 1.0)) + x

    for c in (core, selected):
        check(c, [torch.randn(3, 5)], params=[torch.tensor([0.7])])


def test_an_input_without_dims_that_gives_way_in_type_promotion():
    """In eager int32 without dims beside uint8 is computed in uint8, in rows it would be int32."""
    numbers, rows = torch.tensor([300, 7], dtype=torch.int32), torch.arange(10, dtype=torch.uint8).view(2, 5)

    def core(a, b):
        return (a + b).to(torch.float32)

    with pytest.raises(UnsupportedOpError, match="other dtypes on an operand without dims"):
        flexsn.scan(core, [numbers, rows], backend=NATIVE)
    with pytest.warns(flexsn.errors.FallbackWarning):
        got = flexsn.scan(core, [numbers, rows]).outputs[0]
    assert got.equal(torch.stack([core(a, b) for a, b in zip(numbers, rows, strict=True)]))
    check(lambda a, b: a.to(torch.uint8) + b, [numbers, rows])
    check(lambda a, b: a * b, [torch.randn(2), torch.randn(2, 5)])


def test_a_comparison_with_an_input_without_dims():
    """Its result has one dtype either way, and is another: in eager float32 0.1 is compared with 0.1 rounded to float32."""
    thresholds, rows = torch.full((2,), 0.1, dtype=torch.float64), torch.full((2, 5), 0.1)

    def core(x, y):
        return torch.where(x > y, x * 2, x * 0.5)

    with pytest.raises(UnsupportedOpError, match="other dtypes on an operand without dims"):
        flexsn.scan(core, [rows, thresholds], backend=NATIVE)
    with pytest.warns(flexsn.errors.FallbackWarning):
        got = flexsn.scan(core, [rows, thresholds]).outputs[0]
    assert got.equal(rows * 0.5)
    check(core, [rows, thresholds.float()])
    check(lambda x, y, v: (x > y.to(x.dtype), v * 0.5 + x), [rows, thresholds], [torch.zeros(5)])


def test_values_beside_a_step_without_elements():
    empty, full = torch.randn(3, 2, 0), torch.randn(3, 2, 1)
    with pytest.raises(UnsupportedOpError, match="has no elements"):
        flexsn.scan(lambda a, b: (a * 2, b * 2), [empty, full], backend=NATIVE)
    values, _ = evaluate(lambda a, b: (a * 2, a + b), [empty, full], backend=NATIVE)
    assert values["output 1"].shape == (3, 2, 0)


def through_a_comparison(x, v, w):
    t = torch.addcmul(v, w, v) ** -2
    return torch.maximum(x, t), w * 2.0, v


def on_params_alone(x, v, w):
    return torch.special.xlog1py(w, torch.pow(w, w)), w * 2.0, v


def under_a_condition(x, v, w):
    return torch.where(v == v, torch.where(x * w > 0.0, x, torch.log(w - w)), 0.0), w * 2.0, v


@pytest.mark.parametrize("core", [through_a_comparison, on_params_alone, under_a_condition])
def test_an_output_that_no_loss_reaches_sends_nothing_back(core):
    """Its cotangent is absent, not zero: zero times an infinite derivative would be NaN."""
    grads = []
    for backend in ("torch", NATIVE):
        w = torch.full((4,), -0.5, dtype=torch.float64, requires_grad=True)
        x, v = torch.rand(3, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
        (y, z), (last,) = flexsn.scan(core, [x], [v], [w], backend=backend)
        assert y.requires_grad
        grads += torch.autograd.grad(z.sum() + last.sum(), w)
    assert torch.equal(grads[0], torch.full((4,), 6.0, dtype=torch.float64)) and torch.equal(*grads)


@pytest.mark.parametrize("integer", [torch.int8, torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("floating", [torch.float32, torch.float64])
def test_integers_between_floats_have_no_negative_zero(integer, floating):
    """GCC takes float(int(x)) for trunc(x)."""
    x = torch.tensor([-0.8, 0.8, -0.0, 3.7] * 16, dtype=floating).expand(3, 64)
    (y,), _ = flexsn.scan(lambda x: x.to(integer).to(floating), [x], backend=NATIVE)
    want = x.to(integer).to(floating)
    assert torch.equal(y, want) and torch.equal(y.signbit(), want.signbit())


def test_the_negative_of_a_fused_product_keeps_its_zero():
    """GCC makes it one instruction whose zero has another sign."""

    def core(x):
        zero = x.relu() * 0.0
        return -torch.addcmul(zero, x, zero)

    x = torch.tensor([-0.45, 0.3] * 32, dtype=torch.float64).expand(3, 64)
    (y,), _ = flexsn.scan(core, [x], backend=NATIVE)
    assert torch.equal(y.signbit(), core(x).signbit()) and not y.any()


def test_gradients_that_are_zero_by_construction_add_up():
    def core(x, p):
        square, below, near = p**2, torch.floor(p), torch.round(p)  # the gradients of the last two meet first
        return torch.addcmul(below, square, near) + x

    p, x = torch.tensor(1.7, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    (y,), _ = flexsn.scan(core, [x], [], [p], backend=NATIVE)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), p)[0].item(), 15 * 2 * 1.7 * 2.0)


def rounded(x, v, w):
    return torch.round(torch.log(x)), x * 2.0, v


def rounded_param(x, v, w):
    return torch.round(torch.log(w)) + x * 0.0, x * 2.0, v


@pytest.mark.parametrize("core", [rounded, rounded_param])
def test_zeros_made_from_an_absent_cotangent_are_absent(core):
    """`round` sends zeros back whatever its cotangent is, but none where there is no cotangent."""
    grads = []
    for backend in ("torch", NATIVE):
        x, w = torch.zeros(3, 4, requires_grad=True), torch.zeros(4, requires_grad=True)
        (y, z), _ = flexsn.scan(core, [x], [torch.zeros(4)], [w], backend=backend)
        gx, gw = torch.autograd.grad(z.sum(), [x, w], allow_unused=True)
        grads.append(gx)
        assert y.requires_grad and (gw is None or not gw.any())
    assert torch.equal(grads[0], torch.full((3, 4), 2.0)) and torch.equal(*grads)


def test_zeros_made_from_a_cotangent_that_is_there():
    """Zero times an infinite derivative is NaN, in eager as well; here the loss comes through the state alone."""
    grads = []
    for backend in ("torch", NATIVE):
        x = torch.zeros(1, 4, requires_grad=True)
        _, (last,) = flexsn.scan(lambda x, v: (log := torch.log(x), torch.ceil(log)), [x], [None], backend=backend)
        grads += torch.autograd.grad(last.sum(), x)
    assert grads[0].isnan().all() and grads[1].isnan().all()


def test_integers_out_of_range_between_floats():
    """What no integer holds becomes the least one, also where GCC would take float(int(x)) for trunc(x)."""
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.5] * 16).expand(3, 64)
    for width in (torch.int32, torch.int64):
        (y,), _ = flexsn.scan(lambda x: x.to(width).to(torch.float32), [x], backend=NATIVE)
        assert torch.equal(y, x.to(width).to(torch.float32))


@pytest.mark.parametrize("exponent", [2, 3, -1, -2])
def test_powers_of_bfloat16_are_rounded_as_products(exponent):
    check(lambda x: x.bfloat16() ** exponent, [torch.rand(3, 500) + 0.3])


def test_a_derivative_times_a_gradient_that_is_zero_by_construction():
    p, x = torch.tensor(0.7, requires_grad=True), torch.rand(3, 5) + 0.5
    (y,), _ = flexsn.scan(lambda x, p: torch.remainder(torch.xlogy(p, x), torch.sign(torch.erfc(p))), [x], [], [p], backend=NATIVE)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), p)[0], x.log().sum())


BEFORE_A_SIGN = {
    "xlog1py": lambda p: torch.special.xlog1py(p, p), "index": lambda p: p[[0, 2, 1, 3]], "matrix": lambda p: p @ torch.ones(4, 4),
    "cat": lambda p: torch.cat([p[2:], p[:2]]), "masked_fill": lambda p: p.masked_fill(p > 0.5, 3.0), "sum": lambda p: p - p.sum(),
}  # fmt: skip


@pytest.mark.parametrize("function", BEFORE_A_SIGN.values(), ids=BEFORE_A_SIGN)
def test_what_passes_on_a_gradient_that_is_zero_by_construction(function):
    """To a param: by products, by gathering, by sums of such terms."""
    check(lambda x, p: x + torch.sign(function(p)), [torch.randn(3, 4)], params=[torch.rand(4)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "core",
    [lambda a, b: torch.add(a, b, alpha=0.3), lambda a, b: b - a * 0.3, lambda a, b: a + 0.3, lambda a, b: 0.3 - a,
     lambda a, b: a + torch.tensor(0.3), lambda a, b: a.abs() ** 1.7, lambda a, b: torch.rsub(a, b, alpha=0.3)],
)  # fmt: skip
def test_numbers_beside_tensors_of_16_bits(core, dtype):
    """Eager rounds them to 16 bits for sums and powers, and not for products."""
    x = [torch.randn(2, 512), torch.randn(2, 512)]
    check(lambda a, b: core(a.to(dtype), b.to(dtype)), x, exact=True)


def test_a_static_gradient_of_zeros_vanishes_with_its_cotangent():
    """And is NaN where eager's is: zero times the infinite derivative of a root at zero."""

    def core(x, p):
        return torch.div(x * 0.0 + 1.0, p**0.5, rounding_mode="trunc"), x * 2.0 + p

    found = []
    for backend in ("torch", NATIVE):
        x, p = torch.rand(3, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64, requires_grad=True)
        (y, z), _ = flexsn.scan(core, [x], [], [p], backend=backend)
        found.append([torch.autograd.grad(loss, p, retain_graph=True)[0] for loss in (z.sum(), (y.nan_to_num() + z).sum())])
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][0], torch.full((4,), 3.0, dtype=torch.float64))
    assert found[0][1].isnan().all() and found[1][1].isnan().all()


def test_the_dtype_of_ldexp():
    """That of PyTorch's own decomposition is float32 for bools beside 16 bits."""
    check(lambda x, v: (torch.ldexp(x > v, v.half()), v), [torch.randn(3, 5)], [torch.randn(5)])


@pytest.mark.parametrize("used", [0, 1])
def test_a_param_that_is_an_output_beside_a_sum_with_it(used):
    """The cotangent of one output alone is what another's gradient is computed from."""
    p, q = torch.tensor(1.0, requires_grad=True), torch.ones(5, requires_grad=True)
    outputs, _ = flexsn.scan(lambda x, p, q: (q + p, q), [torch.ones(3, 5)], [], [p, q], backend=NATIVE)
    found = torch.autograd.grad(outputs[used].sum(), [p, q], allow_unused=True)
    assert torch.equal(found[1], torch.full((5,), 3.0)) and (found[0] is None if used else found[0].item() == 15.0)


def test_dtypes_that_mix_in_a_step_without_dims_alone():
    """PyTorch refuses `isclose` of two dtypes; beside a row, `x` has the last word."""
    core = lambda x, v: (torch.isclose(v.float() + x, v.float()), v)
    with pytest.raises(UnsupportedOpError, match="not on operands of the step shape"):
        flexsn.scan(core, [torch.ones(3, dtype=torch.float64)], [torch.ones(1, dtype=torch.int16)], backend=NATIVE)


def test_a_gradient_of_zeros_under_a_condition():
    def core(x, p):
        return x - p, torch.round(torch.sin(p.clamp(-14.0, 14.0))) + x * 0.0

    p = torch.tensor(1.0, requires_grad=True)
    outputs, _ = flexsn.scan(core, [torch.rand(3, 5)], [], [p], backend=NATIVE)
    assert torch.autograd.grad(sum(y.sum() for y in outputs), p)[0].item() == -15.0


def test_the_sign_of_a_bool():
    """Numpy, in Triton's interpreter, subtracts no bools."""
    check(lambda x: ((x > 0).sgn(), torch.sign(x > 0) & (x < 1)), [torch.randn(3, 5)])


def test_ops_on_numbers_alone():
    """Python would compute them, in Triton: `(0.0 >= 0.0).to(tl.float32)` builds nowhere."""
    check(lambda x: flexsn.surrogate.sigmoid(torch.zeros_like(x)), [torch.randn(3, 5)])
    check(lambda x: torch.special.ndtr((x == x).isneginf()), [torch.randn(3, 5)], exact=False)


@pytest.mark.parametrize("function", [torch.exp2, torch.cosh], ids=["exp2", "cosh"])
@pytest.mark.parametrize("backend", backends())
def test_a_function_has_the_same_bits_at_any_place_of_a_row(function, backend):
    """PyTorch's, which Triton's interpreter calls, have others at the end of a row."""
    x = torch.linspace(-2.0, 2.0, 75, dtype=torch.float64).to(torch.float64 if function is torch.cosh else torch.float32)[None]
    whole = flexsn.scan(function, [x], backend=backend).outputs[0]
    alone = [flexsn.scan(function, [part], backend=backend).outputs[0] for part in x.split(1, dim=1)]
    assert torch.equal(whole, torch.cat(alone, dim=1))


@pytest.mark.parametrize("backend", backends())
def test_what_no_wanted_gradient_needs_is_not_computed(backend):
    """PyTorch subtracts no bools: the gradient of `logaddexp` for `p` does not exist, that for `v` does."""

    def core(x, v, p):
        return torch.logaddexp(torch.signbit(p), p) + x, v * 2.0

    v, p = torch.ones(5, requires_grad=True), torch.randn(5)
    _, (last,) = flexsn.scan(core, [torch.randn(3, 5)], [v], [p], backend=backend)
    assert torch.equal(torch.autograd.grad(last.sum(), v)[0], torch.full((5,), 8.0))
    y = flexsn.scan(core, [torch.randn(3, 5)], [v], [p.requires_grad_()], backend=backend).outputs[0]
    with pytest.raises(RuntimeError, match="with a bool tensor is not supported"):
        torch.autograd.grad(y.sum(), p)


# --- found by differential tests of random cores ----------------------------------------------------------------------------------
@pytest.mark.parametrize("used", [0, 1])
def test_names_of_values_where_an_output_has_no_cotangent(used):
    """A value without a name of its own must not take that of another."""

    def core(x, y):
        u = x + y
        return u * 2.0, torch.sin(x) * torch.cos(y) - u

    x, y = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in "xy")
    want = torch.autograd.grad(torch.stack([core(a, b)[used] for a, b in zip(x, y, strict=True)]).sum(), [x, y])
    got = torch.autograd.grad(flexsn.scan(core, [x, y], backend=NATIVE).outputs[used].sum(), [x, y])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.shape[-1] > 4, lambda x: x.size(-1) > 4, lambda x: x.numel() > 4, lambda x: len(x) > 4,
        lambda x: min(x.size()[-1], 5) == 5, lambda x: x.nbytes > 16,
    ],
    ids=["shape", "size", "numel", "len", "sizes", "nbytes"],
)  # fmt: skip
def test_python_that_decides_by_a_size(ask):
    def core(x):
        return x * (0.5 if ask(x) else 1.0)

    for n, want in ((5, 0.5), (3, 1.0), (9, 0.5), (4, 1.0)):
        assert flexsn.scan(core, [torch.ones(2, n)], backend=NATIVE).outputs[0].unique().item() == want


def test_python_that_decides_by_the_rank_of_a_smaller_operand():
    def core(x, y):
        return x * 0.5 if y.dim() else x + 0 * y

    operands = [torch.ones(2, 3), torch.ones(2)]
    with pytest.raises(UnsupportedOpError, match=r"reads that a tensor has 0 dims, .* step shape \[3\]"):
        flexsn.scan(core, operands, backend=NATIVE)
    with pytest.warns(flexsn.errors.FallbackWarning):
        assert flexsn.scan(core, operands).outputs[0].unique().item() == 1.0
    assert flexsn.scan(core, [torch.ones(2, 3), torch.ones(2, 3)], backend=NATIVE).outputs[0].unique().item() == 0.5
    assert flexsn.scan(core, [torch.ones(2, 3), torch.ones(2, 1)], backend=NATIVE).outputs[0].unique().item() == 0.5  # of one rank
    with pytest.raises(UnsupportedOpError, match=r"reads a size of a tensor of shape \[1\], .* step shape \[3\]"):
        flexsn.scan(lambda x, y: x * y.shape[0], [torch.ones(2, 3), torch.ones(2, 1)], backend=NATIVE)


@pytest.mark.parametrize("lacking", [lambda x: torch.floor_divide(x, 0.9), lambda x: torch.heaviside(x, torch.tensor(0.5))])
def test_a_derivative_that_pytorch_lacks_for_some_operands(lacking):
    """Which of them a call differentiates is not known when the core is recorded."""

    def core(x, w):
        return lacking(x) * w, x * w

    x, w = torch.full((3, 4), 2.0), torch.ones(4, requires_grad=True)
    with pytest.raises(UnsupportedOpError, match=r"derivative for .* is not implemented"):
        flexsn.scan(core, [x], [], [w], backend=NATIVE)
    want = torch.stack([sum(core(a, w)) for a in x]).sum()
    with pytest.warns(flexsn.errors.FallbackWarning):
        got = sum(y.sum() for y in flexsn.scan(core, [x], [], [w]).outputs)
    torch.testing.assert_close(torch.autograd.grad(got, w), torch.autograd.grad(want, w))
    assert flexsn.scan(core, [x], [], [w.detach()], backend=NATIVE).outputs[0].shape == (3, 4)


def detached(x, w):
    t = torch.zeros_like(x)
    u = t.detach()
    t += x
    return u + t


def a_row(x, w):
    t = w * 1.0
    u = t[0]
    t.mul_(2)
    return x * u


def with_a_dim(x, w):
    t = w * 1.0
    u = t[None]
    t += 1
    return x * u[0]


@pytest.mark.parametrize("core", [detached, a_row, with_a_dim])
def test_a_write_into_a_tensor_with_views_that_no_input_reaches(core):
    x, w = torch.ones(2, 3), torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(flexsn.errors.InPlaceError, match="writes into a tensor that has views"):
        flexsn.scan(core, [x], [], [w], backend=NATIVE)
    with pytest.warns(flexsn.errors.FallbackWarning):
        assert torch.equal(flexsn.scan(core, [x], [], [w]).outputs[0][1], core(x[1], w))


# --- found by a search through copies and hooks -----------------------------------------------------------------------------------
def test_a_copy_that_is_traced_first_leaves_nothing_to_others():
    """A program serves every neuron of its code: no tensor of one may be a constant in it."""

    def tied(value):
        a = torch.full((4,), value)
        b = a
        return flexsn.FlexSN(lambda x: x * a + b * 100.0, 1, 0, backend=NATIVE)

    x = torch.ones(3, 4)
    assert torch.equal(copy.deepcopy(tied(2.0))(x), 202.0 * x)
    assert torch.equal(tied(7.0)(x), 707.0 * x)


@pytest.mark.parametrize("backend", [NATIVE, "hop"])
@pytest.mark.parametrize(
    ("pack", "unpack"),
    [(lambda t: t.contiguous() if t.numel() > 1000 else t, lambda t: t), (lambda t: torch.stack([t, t], -1), lambda t: t[..., 0])],
    ids=["the large contiguous", "strided views"],
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_saved_tensors_that_come_back_with_other_strides(pack, unpack, backend, channels_last):
    x, v = torch.rand(40, 2, 3, 3, 4) * 2, torch.rand(2, 3, 3, 4)
    x, v = (t.movedim(-1, -3) if channels_last else t for t in (x, v))

    def grads(**how):
        leaves = x.clone().requires_grad_(), v.clone().requires_grad_()
        return torch.autograd.grad(flexsn.scan(leaky, leaves[:1], leaves[1:], [torch.tensor(0.5)], **how).outputs[0].square().sum(), leaves)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        got = grads(backend=backend)
    torch.testing.assert_close(got, grads(backend="torch"))


def test_the_gradient_of_log_sigmoid_needs_no_second_result():
    """PyTorch's is empty on a GPU."""
    x, grad = torch.randn(7), torch.randn(7)
    aten = torch.ops.aten
    want = aten.log_sigmoid_backward(grad, x, aten.log_sigmoid_forward(x)[1])
    torch.testing.assert_close(decomposition(aten.log_sigmoid_backward.default)(grad, x, torch.empty(0)), want)


# --- found by a search through autograd functions, returns of params, layouts -------------------------------------------------------
class LearnedSlope(torch.autograd.Function):
    """A spike whose surrogate has a slope that is learned: its forward computes nothing with it."""

    @staticmethod
    def forward(ctx, x, alpha):
        ctx.save_for_backward(x, alpha)
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        x, alpha = ctx.saved_tensors
        s = torch.sigmoid(alpha * x)
        return g * s * (1 - s) * alpha, g * s * (1 - s) * x


class Learned(nn.Module):
    def __init__(self, leaf):
        super().__init__()
        self.raw = nn.Parameter(torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64))
        self.alpha = self.raw if leaf else self.raw * 2.0

    def forward(self, x, v):
        h = v + (x - v) / 2.0
        s = LearnedSlope.apply(h - 0.5, self.alpha)
        return s, h * (1.0 - s)


@pytest.mark.parametrize("backend", [NATIVE, "hop", "compiled"])
@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo asks for
def test_a_trained_tensor_that_only_a_backward_reads(backend, leaf, needs):
    x, core = torch.rand(6, 3, dtype=torch.float64).requires_grad_(needs), Learned(leaf)

    def grad(backend):
        run = lambda x: flexsn.scan(core, (x,), (None,), backend=backend).outputs[0]
        return torch.autograd.grad(run(x).sum(), core.raw, retain_graph=True)[0]

    if backend == "compiled":
        neuron = flexsn.FlexSN(core, 1, 1)
        out = torch.compile(neuron, backend="aot_eager", fullgraph=True)(x)
        got = torch.autograd.grad(out.sum(), neuron.core.raw, retain_graph=True)[0]
    else:
        got = grad(backend)
    torch.testing.assert_close(got, grad("torch"))
    assert got.abs().min() > 0


OF_PARAMS = {
    "amax": lambda w: w.amax(), "norm": lambda w: w.norm(), "square": lambda w: w @ w, "prod": lambda w: w.prod(), "std": lambda w: w.std(),
    "rows": lambda w: torch.stack([w, w * 2]).norm(dim=1, keepdim=True), "sum": lambda w: w.sum(), "mean": lambda w: w.exp().mean(),
}  # fmt: skip


@pytest.mark.parametrize("backend", [NATIVE, "hop"])
@pytest.mark.parametrize("name", OF_PARAMS)
@pytest.mark.parametrize("captured", [True, False])
def test_a_return_that_is_made_of_params_alone_and_is_smaller_than_the_step(name, captured, backend):
    w = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64, requires_grad=True)
    f, x = OF_PARAMS[name], torch.rand(4, 2, 3, dtype=torch.float64, requires_grad=True)

    def grads(backend):
        if captured:
            found = flexsn.scan(lambda x, v: (x * v, f(w), v * 0.5 + f(w)), (x,), (None,), backend=backend)
        else:
            found = flexsn.scan(lambda x, v, w: (x * v, f(w), v * 0.5 + f(w)), (x,), (None,), (w,), backend=backend)
        out = found.outputs[1]
        weights = torch.arange(1.0, out.numel() + 1, dtype=torch.float64).view_as(out)
        return torch.autograd.grad((out * weights).sum() + found.outputs[0].sum(), (w, x))

    for got, want in zip(grads(backend), grads("torch"), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", [NATIVE, "hop"])
def test_params_lie_in_memory_as_they_like(backend):
    def core(x, w):
        return x * w.reshape(-1).softmax(0).reshape(w.shape)

    x, w = torch.ones(2, 2, 3), torch.rand(2, 3)
    neuron = flexsn.FlexSN(core, 1, 0, params=nn.Parameter(w.t().contiguous().t()), backend=backend)
    torch.testing.assert_close(torch.compile(neuron, backend="aot_eager", fullgraph=True)(x), neuron(x))
    for laid in (w, w.t().contiguous().t(), torch.rand(1, 3).expand(2, 3)):
        want = flexsn.scan(core, (x,), (), (laid,), backend="torch").outputs[0]
        torch.testing.assert_close(flexsn.scan(core, (x,), (), (laid,), backend=backend).outputs[0], want)
    weight = nn.Parameter(w)
    for laid in (w, w.t().contiguous().t()):  # after the first call
        weight.data = laid
        scanned = [flexsn.scan(lambda x: core(x, weight), (x,), backend=b).outputs[0] for b in (backend, "torch")]
        torch.testing.assert_close(*scanned)
        chosen = [
            flexsn.scan(lambda x: x * weight * (1 if weight.is_contiguous() else 2), (x,), backend=b).outputs[0] for b in (backend, "torch")
        ]
        assert torch.equal(*chosen)


class OwnGraph(torch.autograd.Function):
    """Builds a graph in its forward and walks it, once, in its backward."""

    @staticmethod
    def forward(ctx, a):
        with torch.enable_grad():
            b = a.detach().requires_grad_()
            y = b * b * b
        ctx.save_for_backward(b, y)
        return y.detach()

    @staticmethod
    def backward(ctx, g):
        b, y = ctx.saved_tensors
        return torch.autograd.grad(y, b, g)[0]


def test_a_function_with_a_graph_of_its_own():
    x = torch.rand(4, 3, requires_grad=True)
    (got,) = torch.autograd.grad(flexsn.scan(OwnGraph.apply, (x,), backend=NATIVE).outputs[0].sum(), x)
    torch.testing.assert_close(got, 3 * x.detach() ** 2)


def test_a_write_into_what_the_gradient_of_another_operand_would_need():
    """Eager needs no gradient of `x`; a kernel's are drawn for every operand."""
    x, q = torch.rand(4, 3), torch.rand(3, requires_grad=True)
    core = lambda x, q: x.tanh().mul_(2) * q
    with pytest.raises(flexsn.errors.InPlaceError, match="writes in place into what its gradient needs"):
        flexsn.scan(core, (x,), (), (q,), backend=NATIVE)
    with pytest.warns(flexsn.errors.FallbackWarning):
        out = flexsn.scan(core, (x,), (), (q,)).outputs[0]
    torch.testing.assert_close(torch.autograd.grad(out.sum(), q)[0], (x.tanh() * 2).sum(0))


@pytest.mark.parametrize("name", ["bitand", "xor_eq", "static_cast", "thread_local", "constexpr"])
def test_words_of_c_as_names(name):
    space = {}
    exec(f"def core(x):\n    {name} = x.tanh()\n    return {name} * {name}\n", space)
    x = torch.rand(4, 3)
    assert torch.equal(flexsn.scan(space["core"], (x,), backend=NATIVE).outputs[0], x.tanh() * x.tanh())


def test_states_that_settle_after_a_step():
    grown = lambda x, u, v: (x + u, v * 0.5, v + x)  # u takes the shape that v grows to
    typed = lambda x, u, v: (x, v * 1.0, u)  # v, which is not given, takes the dtype of u
    x = torch.rand(3, 3)
    for core, states in ((grown, (torch.zeros(3), torch.zeros(1))), (typed, (torch.zeros(3, dtype=torch.float64), None))):
        found = [flexsn.scan(core, (x,), states, backend=b) for b in (NATIVE, "torch")]
        for got, want in zip(*[f.outputs + f.states for f in found], strict=True):
            assert torch.equal(got, want) and got.dtype is want.dtype


def test_a_shift_of_bools():
    x = torch.tensor([[1.0, -1.0]])
    for backend in (NATIVE, "torch"):
        assert flexsn.scan(lambda x: (x > 0) << 2, (x,), backend=backend).outputs[0].tolist() == [[4, 0]]


# --- found by a sceptic ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", [NATIVE, "hop"])
def test_a_captured_tensor_and_one_computed_from_it(backend):
    """What flows to `w` through `u` is added by autograd, once."""
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    u, x = w.exp(), torch.randn(6, 3, dtype=torch.float64)

    def core(x, v):
        v = v * 0.5 + x * u + w
        return v, v

    grads = [
        torch.autograd.grad(flexsn.scan(core, (x,), (None,), backend=b).outputs[0].sum(), w, retain_graph=True)[0]
        for b in (backend, "torch")
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("backend", [NATIVE, "hop"])
@pytest.mark.parametrize("read", [0, 1])
@pytest.mark.parametrize("cut", [lambda w: w.unbind(0), lambda w: [part[0] for part in w.chunk(2)], lambda w: (w[0], w[1])])
def test_parts_of_one_tensor_of_which_a_backward_reads_one(cut, read, backend):
    w = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    a, b = cut(w)
    x = torch.rand(6, 3, dtype=torch.float64)

    def core(x, v):
        s = LearnedSlope.apply(x + v - 0.5, (a, b)[read])
        return s + v * (b, a)[read], v * 0.5 + x

    grads = [
        torch.autograd.grad(flexsn.scan(core, (x,), (None,), backend=k).outputs[0].sum(), w, retain_graph=True)[0]
        for k in (backend, "torch")
    ]
    torch.testing.assert_close(*grads)
    assert grads[0].abs().min() > 0


def test_a_view_that_only_the_layout_of_a_param_allows():
    w, x = torch.rand(3, 2).t(), torch.ones(4, 2, 3)
    core = lambda x, w: x * w.t().view(-1).softmax(0).view(3, 2).t()
    with pytest.warns(flexsn.errors.FallbackWarning, match="view"):
        torch.testing.assert_close(
            flexsn.scan(core, (x,), (), (w,)).outputs[0], flexsn.scan(core, (x,), (), (w,), backend="torch").outputs[0]
        )
