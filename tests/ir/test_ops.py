"""Ops: every closed op and every composite against eager, on hard values, mixed dtypes, and op_db's samples."""

import functools
import importlib
import string
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import run_kernel

import flexsn
from flexsn._codegen import cpp as render_cpp
from flexsn._ir.graph import Builder, interpret
from flexsn._ir.ops import OPS
from flexsn._plan import plan
from flexsn._runtime import cpp_kernel as launch_cpp
from flexsn._runtime.backends import BACKENDS

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import op_table

FLOATS = (torch.float32, torch.float64)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
INT_ONLY = {n for n in OPS if n.endswith("_int")} | {"invert", "shift_left", "shift_right"}
BITS = {"and", "or", "xor"}
ANY = {"add", "sub", "mul", "neg", "abs", "sign", "maximum", "minimum", "fmax", "fmin", "trunc_div", "eq", "ne", "lt", "le", "gt", "ge",
       "isnan", "signbit", "where"}  # fmt: skip
# What PyTorch's CPU maths does only approximately, too (`sqrt`: MKL's is not correctly rounded).
APPROXIMATE = {n for n, op in OPS.items() if op.promote == "float"} - {"div", "copysign"} | {"pow"}


def takes(name, dtype):
    """Whether lowering uses a closed op on this dtype."""
    if dtype is torch.bool:
        return name in BITS | {"not", "eq", "ne", "lt", "le", "gt", "ge", "where", "mul", "maximum", "minimum", "sign"}
    if dtype.is_floating_point:
        return name not in INT_ONLY | BITS | {"not", "convert"}
    return name in INT_ONLY | BITS | ANY


def grid(dtype):
    """All pairs of values where ops go wrong, and a third value beside each."""
    if dtype is torch.bool:
        values = torch.tensor([False, True])
    elif dtype.is_floating_point:
        info = torch.finfo(dtype)
        half = [0.0, info.smallest_normal / 8, info.tiny, info.eps, 1e-3, 0.25, 0.5, 0.75, 1.0, 1 + info.eps, 1.5, 2.0, 2.5, 3.0, 3.7,
                20.0, 88.5, 1e3, 2.0**23 + 0.5, 1e10, info.max, float("inf")]  # fmt: skip
        values = torch.tensor([*half, *(-v for v in half), float("nan")], dtype=dtype)
    else:
        info = torch.iinfo(dtype)
        wanted = [info.max, info.max - 1, 127, 100, 64, 33, 17, 8, 7, 5, 3, 2, 1, 0, -1, -2, -3, -5, -7, -8, -64, -100, info.min + 1]
        values = torch.tensor([v for v in wanted if v >= info.min], dtype=dtype)
    a, b = (v.flatten() for v in torch.meshgrid(values, values, indexing="ij"))
    whole = -(-a.numel() // 64) * 64  # eager treats the tail of a row by other code, with other NaNs
    a, b = (torch.cat([v] * -(-whole // v.numel()))[:whole] for v in (a, b))
    return a, b, a.roll(7).flip(0)


def arguments(name, dtype):
    a, b, c = grid(dtype)
    if not dtype.is_floating_point and name in ("trunc_div", "floor_div_int", "remainder_int", "fmod_int"):
        b = torch.where(b == 0, torch.ones_like(b), b)  # eager raises
    return a, b, c


def run_graph(graph, inputs):
    """One step of a graph as a compiled kernel."""
    storage = {r: n.dtype for r, n in (graph.inputs | graph.outputs).items()}
    made = plan.plan_forward(graph, storage, chunk=16, checkpoint=False, sequences=False)
    kernel = launch_cpp.load(made, render_cpp.render(made))
    n = next(iter(inputs.values())).numel()
    written = {a.role: torch.empty(1, n, dtype=a.storage) for a in made.writes}
    run_kernel(kernel, inputs, written, 1, n)
    return {role: tensor[0] for role, tensor in written.items()}


def all_ops(dtype):
    """A graph with one output per closed op on this dtype."""
    b = Builder("all_ops")
    names, outputs, inputs = [], {}, {}

    def leaf(tensor):
        role = next((r for r, t in inputs.items() if t is tensor or (t.dtype == tensor.dtype and t.equal(tensor))), f"x{len(inputs)}")
        if role not in inputs:
            inputs[role] = tensor
            b.input(role, tensor.dtype, role)
        return b.inputs[role]

    grids = {}
    for name, op in OPS.items():
        if takes(name, dtype):
            key = dtype.is_floating_point or name in ("trunc_div", "floor_div_int", "remainder_int", "fmod_int")
            values = grids.setdefault(key, [t.contiguous() for t in arguments(name, dtype)])
            args = [leaf(t) for t in values[: op.arity]]
            if name == "where":
                args = [b.op("lt", args[0], args[1]), *args[1:]]
            outputs[f"y{len(names)}"] = b.op(name, *args)
            names.append(name)
    for target in (*FLOATS, *INTS, torch.bool):
        if target is not dtype:
            outputs[f"y{len(names)}"] = b.convert(leaf(grids[next(iter(grids))][0]), target)
            names.append(f"convert to {target}")
    return b.graph(outputs), inputs, names


@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_every_language_writes_every_closed_op(language):
    """The table of a language has an expression for each op, of its arguments and the type of the result alone."""
    table = importlib.import_module(f"flexsn._codegen.{language}_ops").TEXTS
    assert set(table) == set(OPS)
    for name, text in table.items():
        for one in text.values() if isinstance(text, dict) else [text]:
            fields = {field for _, field, _, _ in string.Formatter().parse(one) if field is not None}
            assert {f for f in fields if f != "T"} == {str(i) for i in range(OPS[name].arity)}, name


def test_every_backend_has_a_table_of_ops():
    assert {p.stem.removesuffix("_ops") for p in Path(render_cpp.__file__).parent.glob("*_ops.py")} == set(BACKENDS)


def test_every_closed_op_is_tested():
    tested = {n for n in OPS for d in (*FLOATS, *INTS, torch.bool) if takes(n, d)} | {"convert"}
    assert tested == set(OPS)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS, torch.bool], ids=str)
def test_kernels_compute_the_eager_meaning_of_every_closed_op(dtype):
    graph, inputs, names = all_ops(dtype)
    got, want = run_graph(graph, inputs), interpret(graph, inputs)
    precise = want
    if dtype is torch.float32:
        wide = {r: t.double() for r, t in inputs.items()}
        precise = _interpret_wide(graph, wide)
    wrong = {}
    for k, name in enumerate(names):
        exact = precise[f"y{k}"].double() if name in APPROXIMATE and dtype.is_floating_point else None
        error = op_table.disagreement(got[f"y{k}"], want[f"y{k}"], exact)
        if error:
            wrong[name] = error
    assert not wrong


def _interpret_wide(graph, inputs):
    """Float32 ops computed in float64: the reference for those that round."""
    env = {n: inputs[r] for r, n in graph.inputs.items()}
    for node in graph.nodes:
        args = [env[a] for a in node.args]
        env[node] = args[0].to(node.dtype) if node.op == "convert" else OPS[node.op].eager(*args)
    return {r: env[n] for r, n in graph.outputs.items()}


# --- composites on hard values --------------------------------------------------------------------------------------------
EXACT_UNARY = {
    "reciprocal": torch.reciprocal, "neg": torch.neg, "abs": torch.abs, "relu": F.relu, "relu6": F.relu6, "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish, "leaky_relu": F.leaky_relu, "softshrink": lambda x: F.softshrink(x, 0.3),
    "hardshrink": lambda x: F.hardshrink(x, 0.3), "threshold": lambda x: F.threshold(x, 0.3, 7.0), "softsign": F.softsign,
    "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc, "round": torch.round, "frac": torch.frac, "sign": torch.sign,
    "sgn": torch.sgn, "round3": lambda x: torch.round(x, decimals=3), "round-3": lambda x: torch.round(x, decimals=-3),
    "nan_to_num": torch.nan_to_num, "deg2rad": torch.deg2rad, "rad2deg": torch.rad2deg, "square": torch.square,
    "isfinite": torch.isfinite, "isinf": torch.isinf, "isposinf": torch.isposinf, "isneginf": torch.isneginf, "isnan": torch.isnan,
    "signbit": torch.signbit, "logical_not": torch.logical_not, "clamp": lambda x: torch.clamp(x, -0.5, 2.0),
    "clamp_min": lambda x: torch.clamp(x, min=-0.5), "clamp_max": lambda x: torch.clamp(x, max=2), "pow2": lambda x: x**2,
    "pow3": lambda x: x**3, "pow-1": lambda x: x**-1, "pow-2": lambda x: x**-2, "mantissa": lambda x: torch.frexp(x)[0],
    "exponent": lambda x: torch.frexp(x)[1], "x//2.5": lambda x: x // 2.5, "x%2.5": lambda x: x % 2.5, "fmod": lambda x: x.fmod(-0.75),
    "1-x": lambda x: 1 - x, "add alpha": lambda x: torch.add(x, 0.7, alpha=0.3), "2%x": lambda x: 2.0 % x, "2//x": lambda x: 2.0 // x,
}  # fmt: skip
EXACT_BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum, "minimum": torch.minimum,
    "fmax": torch.fmax, "fmin": torch.fmin, "copysign": torch.copysign, "nextafter": torch.nextafter, "heaviside": torch.heaviside,
    "add alpha": lambda x, y: torch.add(x, y, alpha=0.3), "sub alpha": lambda x, y: torch.sub(x, y, alpha=-1.7),
    "rsub alpha": lambda x, y: torch.rsub(x, y, alpha=0.3), "lerp .3": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp .8": lambda x, y: torch.lerp(x, y, 0.8), "lerp": lambda x, y: torch.lerp(x, y, y), "isclose": torch.isclose,
    "isclose nan": lambda x, y: torch.isclose(x, y, equal_nan=True), "addcmul": lambda x, y: torch.addcmul(x, y, x, value=0.3),
    "addcmul 1": lambda x, y: torch.addcmul(x, y, y), "addcdiv": lambda x, y: torch.addcdiv(x, y, x, value=0.3),
    "addcdiv 1": lambda x, y: torch.addcdiv(x, x, y), "where": lambda x, y: torch.where(x > y, x, 0.5),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, -1.5), "floor_divide": torch.floor_divide, "remainder": torch.remainder,
    "fmod": torch.fmod, "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"), "prelu": torch.ops.aten._prelu_kernel,
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"), "eq": torch.eq, "logical_xor": torch.logical_xor,
    "logical_and": torch.logical_and, "clamp": lambda x, y: torch.clamp(x, y, y + 1),
    "hardsigmoid'": torch.ops.aten.hardsigmoid_backward,
    "hardswish'": torch.ops.aten.hardswish_backward, "tanh'": torch.ops.aten.tanh_backward, "sigmoid'": torch.ops.aten.sigmoid_backward,
    "hardtanh'": lambda g, x: torch.ops.aten.hardtanh_backward(g, x, -1, 1),
    "relu'": lambda g, x: torch.ops.aten.threshold_backward(g, x, 0),
    "leaky_relu'": lambda g, x: torch.ops.aten.leaky_relu_backward(g, x, 0.1, False),
    "hardshrink'": lambda g, x: torch.ops.aten.hardshrink_backward(g, x, 0.3),
    "softshrink'": lambda g, x: torch.ops.aten.softshrink_backward(g, x, 0.3),
}  # fmt: skip
CLOSE_UNARY = {
    "gelu": F.gelu, "gelu tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "mish": F.mish, "elu": F.elu,
    "celu": lambda x: F.celu(x, 1.3), "selu": F.selu, "softplus": F.softplus, "softplus 2": lambda x: F.softplus(x, 2.0, 5.0),
    "logsigmoid": F.logsigmoid, "tanhshrink": F.tanhshrink, "sinc": torch.sinc, "logit": torch.logit, "rsqrt": torch.rsqrt,
    "logit eps": lambda x: torch.logit(x, 0.1), "entr": torch.special.entr, "ndtr": torch.special.ndtr, "exp2": lambda x: 2.0**x,
    "pow.5": lambda x: x**0.5, "pow-.5": lambda x: x**-0.5, "pow1.7": lambda x: x**1.7, "erfcx": torch.special.erfcx,
    "log_ndtr": torch.special.log_ndtr, "ndtri": torch.special.ndtri, "erfinv": torch.erfinv, "digamma": torch.digamma,
    "lgamma": torch.lgamma, "sigmoid": torch.sigmoid, "expm1": torch.expm1, "log1p": torch.log1p, "erfc": torch.erfc,
}  # fmt: skip
CLOSE_BINARY = {
    "logaddexp": torch.logaddexp, "logaddexp2": torch.logaddexp2, "xlogy": torch.xlogy, "xlog1py": torch.special.xlog1py,
    "pow": torch.pow, "float_power": lambda x, y: torch.float_power(x, y).float(), "ldexp": torch.ldexp, "atan2": torch.atan2,
    "hypot": torch.hypot,
}  # fmt: skip


def many(functions):
    """A core of all the functions."""

    def core(*operands):
        return tuple(fn(*operands) for fn in functions.values())

    return core


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    ("functions", "arity", "exact"),
    [(EXACT_UNARY, 1, True), (EXACT_BINARY, 2, True), (CLOSE_UNARY, 1, False), (CLOSE_BINARY, 2, False)],
    ids=["exact unary", "exact binary", "close unary", "close binary"],
)
def test_composites_on_hard_values(functions, arity, exact, dtype):
    skipped = ("hardsigmoid'",) if dtype is torch.float64 else ()  # eager multiplies by 1 / 6 in float32
    functions = {n: fn for n, fn in functions.items() if n not in skipped}
    operands = [t.repeat(2, 1) for t in grid(dtype)[:arity]]
    core = many(functions)
    got = flexsn.scan(core, operands, backend="cpp").outputs
    want = flexsn.scan(core, operands, backend="torch").outputs
    precise = flexsn.scan(core, [t.double() for t in operands], backend="torch").outputs
    wrong = {}
    for name, a, b, reference in zip(functions, got, want, precise, strict=True):
        cancels = name == "tanhshrink" and dtype is torch.float64  # x - tanh(x): the last bit of PyTorch's tanh differs by CPU
        scale = 1.0 if cancels else None
        error = op_table.disagreement(a, b, None if exact or not b.is_floating_point() else reference.double(), scale)
        if error:
            wrong[name] = error
    assert not wrong


LACKING = {"x//2.5", "2//x", "2%x", "floor_divide", "heaviside"}  # no derivative in eager
if torch.__version__ < (2, 13):
    LACKING.add("nextafter")  # it has one since 2.13
NOT_DIFFERENTIABLE = LACKING | {"digamma"}  # whose derivative is polygamma, which has no rule
SMOOTH = [
    (name, fn, arity)
    for functions, arity in ((EXACT_UNARY, 1), (EXACT_BINARY, 2), (CLOSE_UNARY, 1), (CLOSE_BINARY, 2))
    for name, fn in functions.items()
    if name not in NOT_DIFFERENTIABLE and name[-1] != "'"
]


@pytest.mark.parametrize(("fn", "arity"), [s[1:] for s in SMOOTH], ids=[f"{s[0]} of {s[2]}" for s in SMOOTH])
def test_gradients_on_hard_values(fn, arity):
    """The lowered backward, interpreted: also where it gives NaN or inf."""

    def gradients(backend, dtype):
        operands = [t.to(dtype).repeat(2, 1).requires_grad_() for t in grid(torch.float32)[:arity]]
        y = flexsn.scan(lambda *a: fn(*a), operands, backend=backend).outputs[0]
        if not y.requires_grad:
            return []
        cotangent = torch.where(torch.arange(y.numel()).view(y.shape) % 2 == 0, 1.5, -0.75).to(y.dtype)
        return torch.autograd.grad(y, operands, cotangent, allow_unused=True)

    want, precise = gradients("torch", torch.float32), gradients("torch", torch.float64)
    with op_table.interpreted():
        got = gradients("cpp", torch.float32)
    for a, b, reference in zip(got, want, precise, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert op_table.disagreement(a, b, reference.double(), 1.5) is None


@pytest.mark.parametrize("name", sorted(LACKING))
def test_what_eager_cannot_differentiate_has_no_gradient(name):
    fn = (EXACT_UNARY | EXACT_BINARY)[name]
    operands = [t.repeat(2, 1).requires_grad_() for t in grid(torch.float32)[: 1 + (name in EXACT_BINARY)]]
    with pytest.raises(RuntimeError, match=r"derivative for .* is not implemented"):
        flexsn.scan(lambda *a: fn(*a), operands, backend="torch").outputs[0].sum().backward()
    with op_table.interpreted():
        assert not flexsn.scan(lambda *a: fn(*a), operands, backend="cpp").outputs[0].requires_grad


# --- mixed dtypes -----------------------------------------------------------------------------------------------------------
def ints(dtype):
    return torch.tensor([[0, 1, 2, 3, 7, 100, 127, 5], [255, 200, -1, -2, -7, -100, -128, 9]]).to(dtype)


MIXED = {
    "int64": ([ints(torch.int64)], [], (
        lambda x: x + 0.5, lambda x: x * 2, lambda x: x / 2, lambda x: x // 2, lambda x: x // -3, lambda x: x % 3, lambda x: x % -3,
        lambda x: x.fmod(-3), lambda x: torch.div(x, -3, rounding_mode="trunc"), lambda x: x << 3, lambda x: x >> 1, lambda x: ~x,
        lambda x: x & 6, lambda x: x | 9, lambda x: x ^ -1, lambda x: -x, lambda x: x.abs(), lambda x: x**3, lambda x: x > 1.5,
        lambda x: x.to(torch.int32) * 1000003, lambda x: x.to(torch.uint8) + 200, lambda x: x.float() * 0.1, lambda x: x.half() * 0.1,
        lambda x: x.bool(), lambda x: x.sign(), lambda x: x.clamp(0, 5), lambda x: x.clamp(0.5, 5), lambda x: torch.where(x > 0, x, 0.5),
        lambda x: x.sqrt(), lambda x: x.floor(), lambda x: x.exp().isfinite(), lambda x: torch.add(x, x, alpha=3), lambda x: 3 - x,
        lambda x: x.float_power(2), lambda x: x.double() / 3, lambda x: x.relu(), lambda x: x.nan_to_num(), lambda x: x == 127.0,
        lambda x: torch.addcmul(x, x, x, value=2), lambda x: x.masked_fill(x > 2, 7), lambda x: 7 % (x | 1), lambda x: 2 << (x & 15),
    )),
    "uint8": ([ints(torch.uint8)], [], (
        lambda x: x + 200, lambda x: x - 3, lambda x: x * x, lambda x: -x, lambda x: ~x, lambda x: x >> 1, lambda x: x << 7,
        lambda x: x << 9, lambda x: x // 7, lambda x: x % 7, lambda x: x / 3, lambda x: x + 0.5, lambda x: x > 100, lambda x: x > 300,
        lambda x: x.to(torch.int8), lambda x: x.sign(), lambda x: x.float() - 300, lambda x: (x.float() - 300).to(torch.uint8),
        lambda x: x**2, lambda x: x.bitwise_xor(15), lambda x: x + x.to(torch.int8), lambda x: x.logical_not(), lambda x: 2 << (x & 3),
    )),
    "bool": ([ints(torch.int64) > 2], [], (
        lambda x: x * 2, lambda x: x + 0.5, lambda x: x + x, lambda x: x * x, lambda x: x & ~x, lambda x: x ^ True, lambda x: x / 2,
        lambda x: x.float() - 1, lambda x: torch.where(x, 1.0, -1.0), lambda x: torch.where(x, 2, 3), lambda x: x > 0, lambda x: x == 0.5,
        lambda x: x.to(torch.int8) - 1, lambda x: x.logical_or(~x), lambda x: x.half() * 0.1, lambda x: x.exp(), lambda x: x | False,
    )),
    "float32 to others": ([torch.tensor([[0.5, -0.5, -1.7, 255.9, 300.0, -3e2], [3.5e9, -3.5e9, 2e19, -0.0, float("inf"), float("nan")]])],
                          [], tuple((lambda x, d=d: x.to(d)) for d in (*INTS, torch.bool, torch.float64, torch.half, torch.bfloat16))),
    "int32, float64": ([ints(torch.int32), torch.randn(2, 8, dtype=torch.float64)], [], (
        lambda x, y: x + y, lambda x, y: x * y.float(), lambda x, y: x > y, lambda x, y: torch.where(x > 0, x, y), lambda x, y: y.int() + x,
        lambda x, y: torch.maximum(x, y), lambda x, y: x / 3, lambda x, y: y.ldexp(x % 5), lambda x, y: y // (x + 0.5),
        lambda x, y: y.half() + x,
    )),
    "int8, int16 and a param": ([ints(torch.int8), ints(torch.int16)], [torch.tensor([0.1]), torch.tensor(3)], (
        lambda x, y, p, q: x + y, lambda x, y, p, q: x * y, lambda x, y, p, q: x * p, lambda x, y, p, q: x * q, lambda x, y, p, q: y // q,
        lambda x, y, p, q: x << (y & 7), lambda x, y, p, q: x >> (y & 7), lambda x, y, p, q: (x > y) * p, lambda x, y, p, q: x % (y | 1),
    )),
    "inside in 16 bits": ([torch.randn(2, 64)], [torch.tensor([0.1]), torch.tensor(0.1)], (
        lambda x, p, q: x.half() * 0.1, lambda x, p, q: x.half() * p, lambda x, p, q: x.half() * q, lambda x, p, q: x.half() + x.bfloat16(),
        lambda x, p, q: torch.lerp(x.half(), p.half(), 0.3), lambda x, p, q: (x.half() * 0 + 0.1) == 0.1, lambda x, p, q: x.half().relu(),
        lambda x, p, q: x.bfloat16() / 3, lambda x, p, q: x.half().fmod(0.1), lambda x, p, q: x.half() % 0.1, lambda x, p, q: x.half() < q,
        lambda x, p, q: torch.addcmul(x.half(), p.half(), x.half()), lambda x, p, q: F.hardswish(x.half()), lambda x, p, q: x.half() ** 3,
        lambda x, p, q: F.softshrink(x.bfloat16(), 0.3), lambda x, p, q: x.half().frexp()[0], lambda x, p, q: x.half().double() + 1,
    )),
    "float16 and a float32 param": ([torch.randn(2, 64).half()], [torch.tensor([0.1]), torch.tensor(0.1)], (
        lambda x, p, q: x * p, lambda x, p, q: x * q, lambda x, p, q: x + 1, lambda x, p, q: x > 0.1, lambda x, p, q: x.int() + x,
        lambda x, p, q: torch.where(x > 0, x, p),
    )),
    "bfloat16 and float32": ([torch.randn(2, 64).bfloat16(), torch.randn(2, 64)], [], (
        lambda x, y: x * y, lambda x, y: x + 1, lambda x, y: x > y, lambda x, y: x.bool(),
    )),
}  # fmt: skip


@pytest.mark.parametrize("case", MIXED)
def test_mixed_dtypes_promote_as_in_eager(case):
    inputs, params, functions = MIXED[case]
    core = many(dict(enumerate(functions)))
    got = flexsn.scan(core, inputs, params=params, backend="cpp").outputs
    want = flexsn.scan(core, inputs, params=params, backend="torch").outputs
    wrong = {k: e for k, (a, b) in enumerate(zip(got, want, strict=True)) if (e := op_table.disagreement(a, b, None))}
    assert not wrong


def test_a_tensor_written_in_place_twice():
    def core(x):
        h = x.clone()
        h.mul_(2)
        h.add_(1)
        return h

    x = torch.randn(2, 5)
    assert flexsn.scan(core, [x], backend="cpp").outputs[0].equal(x * 2 + 1)


def test_a_cotangent_without_memory():
    x = torch.randn(2, 5, requires_grad=True)
    y = flexsn.scan(lambda x: x * 2, [x], backend="cpp").outputs[0]
    assert torch.autograd.grad(torch.sgn(y).sum(), x)[0].equal(torch.zeros_like(x))  # sgn gives a ZeroTensor


# --- op_db --------------------------------------------------------------------------------------------------------------------
@functools.cache
def interpreted(name):
    with op_table.interpreted():
        return op_table.judge(name)


@pytest.mark.parametrize("name", [*op_table.scope(), *op_table.EXTRA])
def test_op_db_lowered(name):
    row = interpreted(name)
    assert row.total > 0
    assert not [*row.forward, *row.backward]


def test_op_db_coverage():
    """`test_op_db_lowered` asks all of it."""
    assert len(op_table.scope()) == 133


@pytest.mark.parametrize(
    "name",
    [
        *("where", "nn.functional.hardswish", "frexp", "round.decimals_3", "sgn"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("xlogy", "special.log_ndtr")),
    ],
)
def test_op_db_compiled(name):
    row = op_table.judge(name)
    assert not [*row.forward, *row.backward]


@pytest.mark.full
def test_op_db_compiled_in_full():
    rows = op_table.run([*op_table.scope(), *op_table.EXTRA], jobs=2)
    assert len(rows) == 133 + len(op_table.EXTRA)
    assert {r.name: [*r.forward, *r.backward][:2] for r in rows if not r.ok} == {}


GRIDS = {
    "numbers": lambda v: torch.fake_quantize_per_tensor_affine(v, 0.1, 3, -20, 27),
    "tensors": lambda v: torch.fake_quantize_per_tensor_affine(v, torch.tensor([0.3]), torch.tensor([-2], dtype=torch.int32), -8, 7),
    "channels": lambda v: torch.fake_quantize_per_channel_affine(
        v, torch.tensor([0.1, 0.07, 0.3]), torch.tensor([0, 5, -3], dtype=torch.int32), v.dim() - 2, -20, 20
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GRIDS)
def test_fake_quantisation(name, dtype):
    """Values have the bits of eager; the gradient goes straight through where nothing was cut off, and is 0 elsewhere."""

    def core(x, v):
        v = v * 0.5 + x
        return GRIDS[name](v) * x, v

    values = 3 * torch.randn(6, 3, 40)
    values[0, :, :4] = torch.tensor([float("nan"), -0.001, 1e4, -1e4])
    found = []
    for backend in ("cpp", "torch"):
        x = values.to(dtype).requires_grad_()
        y = flexsn.FlexSN(core, 1, 1, backend=backend)(x)
        found.append((y.detach(), *torch.autograd.grad(y.nan_to_num().sum(), x)))
    for fused, eager in zip(*found, strict=True):
        torch.testing.assert_close(fused, eager, rtol=0, atol=0, equal_nan=True)
    assert len(found[0][1].unique()) > 10


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_fake_quantisation_refuses_what_eager_refuses(backend):
    with pytest.raises(RuntimeError, match="`zero_point` must be between"):
        flexsn.FlexSN(lambda x, v: (torch.fake_quantize_per_tensor_affine(x, 0.1, 9, 0, 7), v + x), 1, 1, backend=backend)(torch.rand(3, 2))
