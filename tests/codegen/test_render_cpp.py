"""C++ source: golden files, literals, names and comments that cannot break it, parentheses."""

import itertools
import math
import struct
from pathlib import Path

import pytest
import torch
from cores import lif, recurrent_lif
from helpers import check

import flexsn
from flexsn._capture.signature import make_signature
from flexsn._capture.trace import Meta
from flexsn._codegen import cpp as render_cpp
from flexsn._codegen.cpp_step import literal
from flexsn._ir.graph import Builder
from flexsn._operator.mixing.cut import take_apart
from flexsn._program import compiled as compiling
from flexsn._program.cache import PROGRAMS
from flexsn._version import __version__

GOLDEN = Path(__file__).parents[1] / "golden"
f32, f64 = torch.float32, torch.float64


# --- golden files -------------------------------------------------------------------------------------------------------------
def plans(core, sig, metas):
    program = compiling.program_of("cpp", core, sig, metas, torch.device("cpu"), {}, None)
    program.differentiate(core, {})
    dtypes, wanted = (f32,) * sig.num_inputs, tuple(r for r in program.vjp.graph.outputs if r[0] == "g")
    return program.forward_plan(dtypes, True, False), program.backward_plan(dtypes, wanted, ("gy0",))


def lif_sources():
    metas = [Meta((5,), f32), Meta((5,), f32), Meta((), f32), Meta((3, 1), f32)]
    return dict(zip(("lif_forward", "lif_backward"), plans(lif, make_signature(lif, 1, 1, 2), metas), strict=True))


def segment_sources():
    """What is left of a recurrent layer when its product is taken out of the step."""
    metas = [Meta((2, 5), f32)] * 3 + [Meta((5, 5), f32)]
    cut = take_apart(recurrent_lif, make_signature(recurrent_lif, 1, 2, 1), metas, torch.device("cpu"), {}, None)
    (segment,) = cut.segments
    metas = [*[segment.meta_of(p) for p in segment.takes], *metas[1:3], metas[3]]
    found = plans(segment(recurrent_lif), segment.signature, metas)
    return dict(zip(("segment_forward", "segment_backward"), found, strict=True))


@pytest.mark.parametrize("name", ["lif_forward", "lif_backward", "segment_forward", "segment_backward"])
def test_golden(name, update_golden):
    """After a wanted change of the renderer: `pytest tests/codegen/test_render_cpp.py --update-golden`, and read the diff."""
    text = render_cpp.render((segment_sources() if "segment" in name else lif_sources())[name]).replace(f"flexsn {__version__}", "flexsn")
    path = GOLDEN / f"{name}.cpp"
    if update_golden:
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_rendering_twice_gives_the_same_text():
    for first, second in zip(lif_sources().values(), lif_sources().values(), strict=True):
        assert render_cpp.render(first) == render_cpp.render(second)


# --- literals -------------------------------------------------------------------------------------------------------------------
def const(value, dtype):
    return Builder("core").const(value, dtype)


@pytest.mark.parametrize("value", [0.1, -0.1, 1e-45, 3.4e38, 1 / 3, 16777217.0, -0.0, 1e300, 0.0, 2.0**-149])
def test_float_literals_are_exact(value):
    single = literal(const(value, f32)).strip("()")
    if abs(value) < 3.5e38:
        want = struct.unpack("f", struct.pack("f", value))[0]
        assert single.endswith("f") and float(single[:-1]) == want and math.copysign(1, float(single[:-1])) == math.copysign(1, value)
    else:
        assert "infinity" in single
    assert float(literal(const(value, f64)).strip("()")) == value


def test_other_literals():
    assert literal(const(True, torch.bool)) == "true" and literal(const(-1, torch.int8)) == "int8_t(-1)"
    assert literal(const(-(2**63), torch.int64)) == "std::numeric_limits<int64_t>::min()"
    assert "quiet_NaN" in literal(const(float("nan"), f32)) and literal(const(-float("inf"), f64)).startswith("-")
    assert literal(const(-2, f32)) == "(-2.0f)"


def test_constants_arrive_bit_for_bit():
    values = [0.1, -1e-45, 3.0e38, -0.0, float("inf"), float("-inf"), 123456789.123]

    def core(x, v):
        return *(torch.where(x > 2, x, c) for c in values), v

    for dtype in (f32, f64):
        check(core, [torch.zeros(2, 3, dtype=dtype)], [torch.zeros(3, dtype=dtype)])


def test_integer_constants_arrive():
    def core(x, n):
        return n + (2**40), n * -(2**63), n - 2**31, n.to(torch.uint8) + 250, n

    check(core, [torch.zeros(2, 3)], [torch.arange(3)])


# --- names and comments -----------------------------------------------------------------------------------------------------------
def test_names_that_mean_something_to_the_compiler():
    def core(int, double, N, T, K, n, i, tile, begin, signed, x0_row, p):
        t1 = int + double
        NULL = t1 * p
        M_PI = NULL + N
        return M_PI, t1, T, K, n, i, tile, begin, signed, x0_row

    check(core, [torch.randn(18, 5)], [torch.randn(5) * 0.1 for _ in range(10)], [torch.tensor(0.5)])


def test_names_that_are_not_ascii():
    def kern(x, größe, λ, __v):
        größe = größe * λ + x
        return größe, größe, λ, __v

    check(kern, [torch.randn(3, 5)], [torch.randn(5), torch.randn(5), None])


def test_name_of_the_core_in_a_comment():
    def core(x, v):
        return x + v, v  # */ ??/ \

    core.__name__ = "a*/b\\\n#error no\n??/"
    check(core, [torch.randn(3, 5)], [torch.randn(5)])


def test_core_without_source_text():
    space = {}
    exec("def core(x, v):\n    h = x + v\n    return h * 0.5, h\n", space)
    check(space["core"], [torch.randn(3, 5)], [torch.randn(5)])


# --- expressions ------------------------------------------------------------------------------------------------------------------------
def test_a_call_followed_by_an_operator_keeps_its_parentheses():
    """`x / (exp(x) - 1)` is not `x / exp(x) - 1`."""

    def core(x, v):
        return x / (torch.exp(x) - 1.0), x - (torch.abs(v) + 1.0), -(torch.abs(x) - v), 2.0 * (torch.exp(v) + x), v

    check(core, [torch.randn(3, 65, dtype=f64)], [torch.randn(65, dtype=f64)], exact=False)


INNER = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / (b * b + 1.0), "neg": lambda a, b: -a,
    "abs_sub": lambda a, b: a.abs() - b, "where": lambda a, b: torch.where(a > b, a, b * 0.5), "max_add": lambda a, b: torch.maximum(a, b) + a,
    "cmp": lambda a, b: (a > b).to(a.dtype), "neg_mul": lambda a, b: -a * b, "const": lambda a, b: a * -0.5,
}  # fmt: skip


@pytest.mark.parametrize("outer", [n if n in ("sub", "neg") else pytest.param(n, marks=pytest.mark.slow) for n in INNER])
def test_nested_expressions_in_one_line(outer):
    """Every op inside every other, on one source line, where the renderer writes one expression."""
    f = INNER[outer]

    def core(x, v):
        return *(f(INNER[n](x, v), INNER[m](v, x)) for n, m in itertools.product(INNER, ["sub", "neg", "abs_sub"])), v

    check(core, [torch.randn(2, 65)], [torch.randn(65)], scale=10)


def test_long_chains_in_one_line():
    """Python reads at most 200 brackets in one another."""

    def core(x, v):
        for _ in range(150):
            v = v * 0.5 + x.tanh() * 0.1
        return v, v

    check(core, [torch.randn(2, 65)], [torch.randn(65)])


def test_bools_and_small_integers_in_expressions():
    def core(x, n, b):
        m = (n + 100) * 2 - (n - 100)
        c = ((x > 0) & b) | ~(b ^ (x < 0.5))
        return m, ~n, -n, c, b.to(n.dtype) + n, n // 3, n % 5, m, c

    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        n = torch.randint(-100 if dtype.is_signed else 0, 100, (65,)).to(dtype)
        check(core, [torch.randn(3, 65)], [n, torch.rand(65) > 0.5])


def test_shifts():
    def core(x, n):
        return (n >> 1) + (n << 2), torch.bitwise_left_shift(n, 1), torch.bitwise_right_shift(n, torch.ones_like(n)), n

    check(core, [torch.randn(3, 65)], [torch.randint(0, 100, (65,))])


def test_unused_inputs_are_not_read():
    def core(x, y, v):
        return x + v, v

    flexsn.scan(core, [torch.randn(2, 3), torch.randn(2, 3)], [None], backend="cpp")
    program = next(p for p, _ in reversed(PROGRAMS.exact.values()) if p.sig.core == "core" and p.sig.num_inputs == 2)
    kernels = [k for k in program._kernels.values() if k.plan.direction == "forward"]
    assert all("x1" not in [a.role for a in k.plan.reads] for k in kernels)
