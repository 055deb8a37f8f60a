"""The fused kernel against the eager loop: dtypes, T, shapes, strides, broadcasting, and a zoo of neurons."""

import pytest
import torch
from cores import adlif, leaky, lif, lif_detached_reset, lif_soft, plif, relu_mem
from helpers import assert_same_values, backends, check, evaluate
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import flexsn
from flexsn import surrogate

pytestmark = pytest.mark.usefixtures("poison")
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
K = 16  # chunk of the programs below
TIMES = [0, 1, K - 1, K, K + 1, 3 * K + 2]


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def scalar(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype)


def operands(core, T, shape, dtype):
    """Operands that make about a third of the neurons spike."""
    x = randn(T, *shape, dtype=dtype) * 1.5
    v = randn(*shape, dtype=dtype) * 0.5
    if core in (lif, lif_soft, lif_detached_reset):
        return [x], [v], [scalar(1.75, dtype), scalar(0.5, dtype)]
    if core is leaky:
        return [x], [v], [scalar(0.75, dtype)]
    if core is plif:
        return [x], [v], [scalar(0.3, dtype)]
    if core is adlif:
        return [x, randn(T, *shape, dtype=dtype)], [v, randn(*shape, dtype=dtype)], [scalar(0.875, dtype), scalar(0.5, dtype)]
    assert core is relu_mem
    return [x], [v], []


# --- core x dtype x T x N -------------------------------------------------------------------------------------------------
def in_every_dtype(first, *others):
    """One core in every dtype, the others in float32; slow: these in the other dtypes too."""
    marks = lambda core, dtype: () if core is first or dtype is torch.float32 else pytest.mark.slow
    rows = [pytest.param(c, d, id=f"{c.__name__}-{str(d)[6:]}", marks=marks(c, d)) for c in (first, *others) for d in FLOATS]
    return pytest.mark.parametrize(("core", "dtype"), rows)


@pytest.mark.parametrize("T", TIMES)
@in_every_dtype(lif, adlif)
def test_matrix(core, dtype, T):
    for shape in [(0,), (1,), (63,), (64,), (65,)]:
        xs, vs, ps = operands(core, T, shape, dtype)
        check(core, xs, vs, ps, sequences=True)


@in_every_dtype(leaky, lif, adlif, lif_soft, lif_detached_reset, relu_mem, plif)
def test_final_states(core, dtype):
    many = [(2 * K, (1000,))] if dtype is torch.float32 else []  # which Triton's interpreter takes long for
    for T, shape in [(K + 1, (65,)), *many, (3, ()), (5, (2, 3, 4, 5)), (4, (3, 0, 2)), (0, (3, 4)), (1, (7, 1))]:
        check(core, *operands(core, T, shape, dtype), exact=core is not plif)


@pytest.mark.parametrize("core", [lif, adlif], ids=lambda c: c.__name__)
def test_without_gradients_the_same_values(core):
    for T, shape in [(0, (5,)), (K, (65,)), (3 * K + 2, (1000,)), (3, (2, 3, 4))]:
        for sequences in (False, True):
            xs, vs, ps = operands(core, T, shape, torch.float32)
            with torch.no_grad():
                got = flexsn.scan(core, xs, vs, ps, backend=backends()[0], store_state_seqs=sequences)
            want = flexsn.scan(core, xs, vs, ps, backend="torch", store_state_seqs=sequences)
            for a, b in zip((*got.outputs, *got.states), (*want.outputs, *want.states), strict=True):
                assert torch.equal(a, b) and not a.requires_grad


@pytest.mark.slow
def test_wide_state_core_with_longer_chunks():
    """Three states, one input: chunks are longer than 16 steps."""

    def chain(x, a, b, c):
        a = 0.5 * a + x
        b = 0.75 * b + a * c
        c = 0.25 * c - b
        return b * c, a, b, c

    for T in (1, 31, 32, 33, 63, 64, 65, 130):
        check(chain, [randn(T, 66) * 0.3], [randn(66) * 0.3 for _ in range(3)], sequences=T % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("N", [64 * 300 + 1, 100_000])
def test_many_neurons_many_tiles(N, threads):
    threads(2)
    xs, vs, ps = operands(lif, K + 2, (N,), torch.float32)
    check(lif, xs, vs, ps, sequences=True, scale=30)


# --- strides ----------------------------------------------------------------------------------------------------------------
def strided(name, T, dtype):
    """A sequence [T, 4, 6, 5] (or so) that is not contiguous."""
    if name == "transposed":
        return randn(4, T, 6, 5, dtype=dtype).transpose(0, 1)
    if name == "step transposed":
        return randn(T, 6, 4, 5, dtype=dtype).transpose(1, 2)
    if name == "every second step":
        return randn(2 * T, 4, 6, 5, dtype=dtype)[::2]
    if name == "sliced neurons":
        return randn(T, 4, 6, 10, dtype=dtype)[..., 1::2]
    if name == "offset":
        return randn(T + 1, 4, 6, 5, dtype=dtype)[1:]
    if name == "expanded over time":
        return randn(1, 4, 6, 5, dtype=dtype).expand(T, 4, 6, 5)
    if name == "expanded over neurons":
        return randn(T, 4, 1, 5, dtype=dtype).expand(T, 4, 6, 5)
    if name == "expanded scalar":
        return randn(1, 1, 1, 1, dtype=dtype).expand(T, 4, 6, 5)
    assert name == "channels_last"
    return randn(T, 4, 6, 5, dtype=dtype).contiguous(memory_format=torch.channels_last)


STRIDES = ["transposed", "step transposed", "every second step", "sliced neurons", "offset", "expanded over time",
           "expanded over neurons", "expanded scalar", "channels_last"]  # fmt: skip


@pytest.mark.parametrize("name", STRIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=lambda d: str(d)[6:])
def test_strides_of_inputs(name, dtype):
    for T in (1, K + 1):
        x = strided(name, T, dtype)
        check(lif, [x], [randn(4, 6, 5, dtype=dtype)], [scalar(1.75, dtype), scalar(0.5, dtype)], sequences=True)


def test_strides_of_states_and_params():
    T = K + 1
    for v in (randn(6, 4).t(), randn(4, 12)[:, ::2], randn(4, 1).expand(4, 6), randn(6).expand(4, 6), randn(1).expand(4, 6)):
        check(lif, [randn(T, 4, 6)], [v], [randn(12)[::2] + 3, randn(6, 4).t()], sequences=True)


def test_strides_of_cotangents():
    x, v = randn(5, 4, 6).requires_grad_(), randn(4, 6).requires_grad_()
    ps = [scalar(1.75), scalar(0.5)]
    for cotangent in (randn(6, 4, 5).transpose(0, 2), randn(1, 1, 1).expand(5, 4, 6), randn(5, 4, 12)[..., ::2]):
        grads = []
        for backend in (backends()[0], "torch"):
            y = flexsn.scan(lif, [x], [v], ps, backend=backend).outputs[0]
            grads.append(torch.autograd.grad(y, [x, v], cotangent))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


def test_results_lie_as_the_first_input_does_and_do_not_alias():
    x, v = randn(6, 4, 5).transpose(1, 2), randn(5, 4)

    def keep(x, v):
        return x, v

    y, w = (r[0] for r in flexsn.scan(keep, [x], [v], backend=backends()[0]))
    assert y.stride() == x.stride() and w.stride() == x[0].stride()
    y.fill_(7.0), w.fill_(7.0)
    assert not (x == 7.0).any() and not (v == 7.0).any()


# --- broadcasting ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (4, 5), (4, 1), (1, 5), (3, 1, 1), (3, 4, 5), (1, 1, 1), (3, 1, 5), (1, 4, 1), (2, 3, 4, 5), (2, 1, 1, 1), (2, 1, 4, 1)],
    ids=str,
)  # fmt: skip
def test_params_broadcast(shape):
    for T in (3, K + 1):
        x, v = randn(T, 2, 3, 4, 5), randn(2, 3, 4, 5)
        check(lif, [x], [v], [randn(*shape).abs() + 1.5, randn(*shape) * 0.2], sequences=True)
        check(leaky, [x], [v], [randn(*shape) * 0.5])


def test_params_of_different_shapes():
    x, v = randn(9, 2, 3, 4), randn(2, 3, 4)
    check(adlif, [x, x.flip(0)], [v, v], [randn(3, 1) * 0.5, randn(2, 1, 4) * 0.5], sequences=True)
    check(adlif, [x, x.flip(0)], [v, v], [randn(4) * 0.5, scalar(0.5)], sequences=True)


AS_ONE = [  # of [3, 4, 1], [4] and [4, 1]
    lambda a, b, c: b[:, None] + c, lambda a, b, c: a + b.view(4, 1), lambda a, b, c: a + b[:, None] + c.squeeze(-1)[:, None],
    lambda a, b, c: torch.stack([b, c[:, 0]]).sum(0)[:, None], lambda a, b, c: torch.cat([b, c[:, 0]])[2:6, None] + a,
    lambda a, b, c: (b.view(2, 2) + c.view(2, 2)).view(4, 1),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of a module that Inductor imports
@pytest.mark.parametrize("route", ["scan", "torch.func", "compiled", "hop"])
@pytest.mark.parametrize("one", range(len(AS_ONE)))
def test_gradients_of_params_share_no_memory(one, route):
    """Else autograd, which adds to them in place, would add to several at once."""
    start = [randn(3, 4, 1), randn(4), randn(4, 1)]
    xs = [randn(5, 2, 3, 4, 6) for _ in range(3)]

    def losses(params, backend):
        def core(x, v):
            v = 0.5 * v + x * AS_ONE[one](*params)
            return v * v, v

        for x in xs:
            yield flexsn.scan(core, (x,), (None,), backend=backend).outputs[0].sum()

    def accumulated(backend, wrap=lambda f: f):
        params = [p.clone().requires_grad_() for p in start]
        for k in range(len(xs)):
            wrap(lambda: list(losses(params, backend))[k])().backward()
        return [p.grad for p in params]

    want = accumulated("torch")
    if route == "torch.func":
        found = torch.func.grad(lambda ps: next(losses(ps, "auto")))(tuple(start))
        want = torch.func.grad(lambda ps: next(losses(ps, "torch")))(tuple(start))
    else:
        found = accumulated("hop" if route == "hop" else "auto", torch.compile if route == "compiled" else lambda f: f)
    torch.testing.assert_close(found, want)
    memory = [g.untyped_storage().data_ptr() for g in found if g is not None]
    assert len(set(memory)) == len(memory)


def test_a_param_may_widen_the_step():
    """[T, 1] inputs with a [7] param: the state is [7]."""
    check(leaky, [randn(K + 1, 1)], [randn(1)], [randn(7) * 0.5])
    check(leaky, [randn(K + 1, 3, 1)], [None], [randn(7) * 0.5])
    check(leaky, [randn(K + 1)], [None], [randn(7) * 0.5], sequences=True)


@pytest.mark.parametrize(
    ("one", "two"), [((3, 1, 5), (3, 4, 5)), ((1,), (4, 5)), ((), (4, 5)), ((4, 1), (1, 5)), ((5,), (4, 5)), ((4, 5), (5,)), ((1, 1, 1), (2, 3, 4))], ids=str,
)  # fmt: skip
def test_inputs_broadcast_with_each_other(one, two):
    full = torch.broadcast_shapes(one, two)
    for T in (1, K + 1):
        for sequences in (False, True):
            check(adlif, [randn(T, *one), randn(T, *two)], [randn(*full), randn(*full)], [scalar(0.875), scalar(0.5)], sequences=sequences)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (4, 1), (1, 1), (1, 5)], ids=str)
def test_states_broadcast(shape):
    for T in (0, 1, K + 1):
        for sequences in (False, True):
            check(lif, [randn(T, 4, 5)], [randn(*shape)], [scalar(1.75), scalar(0.5)], sequences=sequences)


def test_a_state_that_stays_smaller_than_the_step():
    """A counter that no neuron's value reaches: 0-dimensional, while the outputs are [4, 5]."""

    def fading(x, v, gain):
        return x * gain + v, v, gain * 0.5

    for T in (0, 1, K + 1):
        for sequences in (False, True):
            check(fading, [randn(T, 4, 5)], [randn(4, 5), scalar(1.0)], sequences=sequences)
            check(fading, [randn(T, 4, 5)], [randn(4, 5), randn(5)], sequences=sequences)


def test_an_output_smaller_than_the_step():
    def two(x, z, v):
        v = 0.5 * v + x * z
        return v, z + 1.0, v

    for T in (0, 1, K + 1):
        check(two, [randn(T, 4, 5), randn(T, 5)], [None], sequences=True)
        check(two, [randn(T, 4, 5), randn(T, 1, 1)], [randn(5)])


def test_default_states_are_zeros_of_what_the_core_returns():
    for T in (0, 1, K + 1):
        check(lif, [randn(T, 6)], [None], [scalar(1.75), scalar(0.5)], sequences=True)
        check(adlif, [randn(T, 3, 1), randn(T, 1, 4)], [None, None], [scalar(0.875), scalar(0.5)])
        check(adlif, [randn(T, 6), randn(T, 6)], [None, randn(6)], [scalar(0.875), scalar(0.5)])


# --- mixed dtypes -------------------------------------------------------------------------------------------------------------
def test_float64_param_with_float32_sequences():
    """A 0-dimensional float64 param does not promote; a 1-dimensional one does."""
    check(leaky, [randn(K + 1, 5)], [randn(5)], [scalar(0.75, torch.float64)])
    check(leaky, [randn(K + 1, 5)], [randn(5, dtype=torch.float64)], [randn(5, dtype=torch.float64) * 0.5])


def test_half_inputs_with_float32_states():
    check(leaky, [randn(K + 1, 65, dtype=torch.float16)], [randn(65)], [scalar(0.75)], sequences=True)
    check(leaky, [randn(K + 1, 65, dtype=torch.bfloat16)], [randn(65)], [randn(65, dtype=torch.bfloat16)])


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool], ids=lambda d: str(d)[6:])
def test_integer_and_bool_inputs(dtype):
    def gated(x, spikes, v):
        v = 0.5 * v + x * spikes
        return v, (v > 0.5), spikes, v

    spikes = torch.randint(0, 2, (K + 1, 65)).to(dtype)
    values, _ = check(gated, [randn(K + 1, 65), spikes], [randn(65)], sequences=True)
    assert values["output 1"].dtype is torch.bool and values["output 2"].dtype is dtype


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d)[6:])
def test_special_values(dtype):
    inf, nan = float("inf"), float("nan")
    row = torch.tensor([0.0, -0.0, inf, -inf, nan, 1e-45, -1e-45, 1e-8, 65504.0, 3e38, 0.5, 1.5, 2.5, -2.5], dtype=torch.float64).to(dtype)

    def rounding(x, v):
        return x.round(), x.floor(), x.ceil(), x.trunc(), x.sign(), x.abs(), torch.minimum(x, v), torch.maximum(x, v), x / v, x - v

    xs, vs = [row.repeat(3, 14)], [row.repeat_interleave(14)]
    got, _ = evaluate(lambda x, v: (*rounding(x, v), v), xs, vs, backend=backends()[0])
    want, _ = evaluate(lambda x, v: (*rounding(x, v), v), xs, vs, backend="torch")
    assert_same_values(got, want)
    for name, w in want.items():
        assert torch.equal(got[name].signbit()[w == 0], w.signbit()[w == 0]), f"sign of zero in {name}"


# --- only what is needed ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("picked", ["output 0", "output 1", "sequence 0", "sequence 1", "final 0", "final 1"])
def test_missing_cotangents(picked):
    """A loss over one result alone."""
    xs, vs, ps = operands(adlif, K + 1, (65,), torch.float32)
    check(adlif, xs, vs, ps, sequences=picked.startswith("seq"), loss=lambda name: name == picked)


# --- a zoo of neurons ---------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_hodgkin_huxley():
    def vtrap(x, y):
        return torch.where((x / y).abs() < 1e-6, y * (1.0 - x / y / 2.0), x / (torch.exp(x / y) - 1.0))

    def hodgkin_huxley(i, v, m, h, n, g_na, g_k, dt):
        am, bm = 0.1 * vtrap(-(v + 40.0), torch.full_like(v, 10.0)), 4.0 * torch.exp(-(v + 65.0) / 18.0)
        ah, bh = 0.07 * torch.exp(-(v + 65.0) / 20.0), torch.sigmoid((v + 35.0) / 10.0)
        an, bn = 0.01 * vtrap(-(v + 55.0), torch.full_like(v, 10.0)), 0.125 * torch.exp(-(v + 65.0) / 80.0)
        current = g_na * m**3 * h * (v - 50.0) + g_k * n**4 * (v + 77.0) + 0.3 * (v + 54.387)
        return (
            v,
            v + dt * (i - current),
            m + dt * (am * (1 - m) - bm * m),
            h + dt * (ah * (1 - h) - bh * h),
            n + dt * (an * (1 - n) - bn * n),
        )

    N, f64 = 33, torch.float64
    states = [torch.full((N,), value, dtype=f64) for value in (-65.0, 0.05, 0.6, 0.32)]
    params = [scalar(120.0, f64), torch.full((N,), 36.0, dtype=f64), scalar(0.01, f64)]
    check(hodgkin_huxley, [randn(70, N, dtype=f64).abs() * 20], states, params, sequences=True, exact=False, scale=1e3)


def test_izhikevich():
    a, b, c, d = 0.02, 0.2, -65.0, 8.0

    def izhikevich(i, v, u):
        v = v + 0.5 * (0.04 * v**2 + 5.0 * v + 140.0 - u + i)
        u = u + 0.5 * (a * (b * v - u))
        s = (v >= 30.0).to(v.dtype)
        return s, torch.where(s > 0, c, v), u + d * s

    values, _ = check(
        izhikevich, [torch.rand(100, 65) * 30], [torch.full((65,), -65.0), torch.full((65,), -13.0)], sequences=True, scale=100
    )
    assert values["output 0"].any()


def test_integer_refractory_counter():
    def refractory(x, v, wait):
        h = torch.where(wait > 0, v, 0.5 * v + x)
        s = surrogate.atan(h - 1.0)
        fired = s > 0
        return s, fired, h * (1.0 - s), torch.where(fired, 3, (wait - 1).clamp(min=0))

    for dtype in (torch.int64, torch.int32, torch.uint8):
        wait = torch.randint(0, 3, (65,)).to(dtype) if dtype is torch.int64 else None
        check(refractory, [randn(40, 65)], [randn(65), wait], sequences=True)


def test_two_compartments():
    def two_compartments(x_d, x_s, v_d, v_s, g, tau):
        flow = g * (v_d - v_s)
        v_d = v_d + (x_d - v_d - flow) / tau
        h = v_s + (x_s - v_s + flow) / tau
        s = surrogate.gaussian(h - 0.75)
        return s, v_d - 0.1 * s, h - s

    x, y = randn(K + 1, 4, 65), randn(K + 1, 4, 65)
    check(two_compartments, [x, y], [None, randn(65)], [randn(65).abs(), torch.tensor([[1.5], [2.0], [3.0], [4.0]])], sequences=True)


def test_masked_in_place_temporaries():
    def clipped(x, v):
        h = 0.5 * v + x
        h[h > 1] = 0.0
        h.mul_(2)
        h += 0.25
        s = (h > 0.5).float()
        s *= h
        return s, h

    check(clipped, [randn(K + 1, 65)], [randn(65)], sequences=True)


def test_where_and_clamp():
    def gates(x, v, low):
        h = torch.where(x > 0, v + x, v * 0.5).clamp(min=-1.0, max=1.0)
        h = torch.clamp(h, min=low)
        return torch.where(h.abs() > 0.5, h, 0.0), h.masked_fill(h > 0.9, 0.25)

    check(gates, [randn(K + 1, 3, 5)], [randn(3, 5)], [torch.tensor([[-0.5], [-0.25], [0.0]])], sequences=True)


def test_users_own_autograd_function():
    class Triangle(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, width):
            ctx.save_for_backward(x)
            ctx.width = width
            return (x > 0).to(x)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * torch.relu(1 - x.abs() / ctx.width), None

    class NeedsInput(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return (x >= 0).to(x)

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            slope = w * (x.abs() < 1)
            return grad * slope if ctx.needs_input_grad[0] else None, None

    def triangle(x, v):
        h = 0.5 * v + x
        s = Triangle.apply(h - 1, 0.5)
        return s, h - s

    def windowed(x, v, w):
        h = 0.5 * v + x
        s = NeedsInput.apply(h - 1, w)
        return s, h - s

    check(triangle, [randn(K + 1, 65)], [randn(65)], sequences=True)
    check(windowed, [randn(K + 1, 65)], [randn(65)], [randn(65)], sequences=True)


def test_state_returned_unchanged_and_output_is_input():
    def keep(x, v, w):
        return x, v, v * w, w

    for T in (0, 1, K + 1):
        check(keep, [randn(T, 65)], [randn(65), randn(65)], sequences=True)
        check(keep, [randn(T, 4, 5)], [randn(4, 5), randn(4, 5)])


def test_states_change_places():
    def swap(x, a, b):
        return a - b, b, a + x

    for T in (0, 1, 2, K, K + 1):
        check(swap, [randn(T, 65)], [randn(65), randn(65)], sequences=True)


def test_same_tensor_returned_twice():
    def twice(x, v):
        h = 0.5 * v + x
        return h, h, h

    check(twice, [randn(K + 1, 65)], [randn(65)], sequences=True)
    check(twice, [randn(K + 1, 65)], [randn(65)], loss=lambda name: name == "output 1")


def test_output_that_does_not_depend_on_time():
    w = torch.tensor([0.5, 2.0, -1.0], requires_grad=True)

    def constant(x, v, p):
        return p * 2.0, torch.ones_like(x), w + p, v + x

    check(constant, [randn(K + 1, 3)], [randn(3)], [randn(3)], captured={"w": w})
    check(constant, [randn(K + 1, 3)], [randn(3)], [randn(3)], captured={"w": w}, sequences=True)
    check(constant, [randn(0, 3)], [randn(3)], [randn(3)], captured={"w": w})


def test_unused_input_state_and_param():
    def careless(x, y, v, w, p, q):
        return x * p, v + 1.0, x

    check(careless, [randn(K + 1, 5), randn(K + 1, 5)], [randn(5), randn(5)], [scalar(0.5), scalar(2.0)], sequences=True)


def test_all_results_constant():
    def nothing(x, v):
        return torch.zeros_like(x), torch.ones_like(v)

    check(nothing, [randn(K + 1, 5)], [randn(5)], sequences=True)


def test_state_without_output():
    def silent(x, v):
        return (0.5 * v + x,)

    got, _ = check(silent, [randn(K + 1, 5)], [randn(5)])
    assert list(got) == ["final 0"]


def test_no_state():
    check(lambda x, w: torch.tanh(x * w), [randn(K + 1, 65)], [], [scalar(0.5)], exact=False)


SPIKES = [  # the others run together, in tests/test_surrogate.py
    surrogate.atan, surrogate.sigmoid, surrogate.fast_sigmoid, surrogate.super_spike, surrogate.piecewise_linear, surrogate.gaussian,
    surrogate.straight_through,
]  # fmt: skip


@pytest.mark.parametrize("spike", SPIKES, ids=lambda f: f.__name__)
def test_surrogates_in_a_neuron(spike):

    def neuron(x, v):
        h = 0.5 * v + x
        s = spike(h - 1.0)
        return s, h - s

    check(neuron, [randn(K + 1, 65)], [randn(65)], sequences=True)


# --- params that only the core, or only its VJP, reads -------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_param_that_only_the_recomputation_reads():
    """The VJP of `v * v + x + p` reads v and not p, but the states that it reads are recomputed with p."""

    def core(x, v, p, q):
        new = v * v * 0.1 + x + p
        return v * q, new

    def core_in_other_order(x, v, p, q):
        y = v * q
        return y, v * v * 0.1 + x + p

    def core_of_prologues(x, v, w, p, q):
        return v * torch.exp(q), w * v + torch.sigmoid(p), 0.5 * w + x + torch.exp(p)

    f64 = torch.float64
    for T in (2, K + 3):
        x, v = randn(T, 5, dtype=f64) * 0.3, randn(5, dtype=f64) * 0.3
        for shape in ((), (5,)):
            ps = [randn(*shape, dtype=f64) * 0.1 + 0.5, randn(*shape, dtype=f64) * 0.1 - 3.0]
            check(core, [x], [v], ps, sequences=True)
            check(core_in_other_order, [x], [v], ps, sequences=True)
            check(core_of_prologues, [x], [v, v.flip(0)], ps, exact=False)


# --- random cores -------------------------------------------------------------------------------------------------------------------
_UNARY = {
    "neg": lambda a: -a, "abs": torch.abs, "relu": torch.relu, "half": lambda a: 0.5 * a, "square": lambda a: a * a,
    "spike": lambda a: surrogate.atan(a - 0.25), "clamp": lambda a: a.clamp(-1.0, 1.0), "detach": lambda a: a.detach(),
    "inverse": lambda a: 1.0 / (1.0 + a * a), "floor": torch.floor, "hard": lambda a: (a > 0).to(a.dtype),
}  # fmt: skip
_BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "max": torch.maximum, "min": torch.minimum,
    "where": lambda a, b: torch.where(a > b, a, b), "masked": lambda a, b: a.masked_fill(b > 0.5, 0.25),
    "quotient": lambda a, b: a / (1.0 + b * b),
}  # fmt: skip
_leaves = st.sampled_from(["x", "y", "v", "w", "p", "q"])
_trees = st.recursive(
    _leaves,
    lambda inner: st.one_of(st.tuples(st.sampled_from(sorted(_UNARY)), inner), st.tuples(st.sampled_from(sorted(_BINARY)), inner, inner)),
    max_leaves=6,
)


def _grow(tree, env):
    if isinstance(tree, str):
        return env[tree]
    name, *parts = tree
    return (_UNARY | _BINARY)[name](*(_grow(part, env) for part in parts))


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
@given(trees=st.tuples(_trees, _trees, _trees, _trees), T=st.sampled_from([1, K - 1, K + 1, 2 * K + 3]), seed=st.integers(0, 100))
def test_random_cores(trees, T, seed):
    one, two, v_tree, w_tree = trees

    def random_core(x, y, v, w, p, q):
        env = {"x": x, "y": y, "v": v, "w": w, "p": p, "q": q}
        h = torch.clamp(_grow(v_tree, env), -4.0, 4.0) * 0.5 + 0.0 * x
        return _grow(one, env), _grow(two, env | {"v": h}), h, torch.clamp(_grow(w_tree, env | {"v": h}), -4.0, 4.0) * 0.5 + 0.0 * x

    torch.manual_seed(seed)
    f64 = torch.float64
    states = [randn(3, 7, dtype=f64), randn(3, 7, dtype=f64)]
    check(
        random_core,
        [randn(T, 3, 7, dtype=f64), randn(T, 3, 7, dtype=f64)],
        states,
        [scalar(0.75, f64), randn(7, dtype=f64)],
        sequences=True,
        scale=100,
    )
