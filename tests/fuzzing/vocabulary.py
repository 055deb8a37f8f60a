"""What random cores are made of: every op of flexsn/opset.py as PyTorch writes it, and composites of PyTorch and flexsn.

A word is one line of a core. Dtypes follow PyTorch: a word takes whatever PyTorch takes, which the generator finds out by
trying. Guards keep away what PyTorch itself leaves undefined or answers with an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexsn._ir.ops import OPS


@dataclass(frozen=True)
class Word:
    """One line of a core.

    Attributes:
        text: Python, with `{0} {1} {2}` for the arguments.
        arity: number of arguments.
        guards: by argument, what it has to be: see `GUARDS`.
        op: the closed op that it is, if it is one.
        detached: PyTorch has no derivative (or flexsn has no rule for it), so no gradient may pass.
        kinds: of arguments that it is tried on: `f`loat, `i`nteger, `b`ool.
    """

    name: str
    text: str
    arity: int
    guards: tuple[tuple[int, str], ...] = ()
    op: str | None = None
    detached: bool = False
    kinds: str = "fib"


# Of `{0}`: text that keeps its value where that is harmless. `{low}`, `{high}`: range of the integer dtype wanted.
GUARDS = {
    "divisor": ("{0}.clamp(1, 50)", "{0}.clamp(1, 3)", "torch.where({0} > 0, {0}, 7)", "torch.where({0} > 0, {0}, -3)"),
    "signed": ("torch.where({0} == {0}, {0}, 1.0)",),  # the sign of a NaN depends on how code was compiled
    "angle": ("{0}.clamp(-14.0, 14.0)",),  # else Sleef's last bit depends on the largest angle of a vector
    "in range": ("torch.where({0} == {0}, {0}, 0.0).clamp({low}, {high})",),  # else C leaves the conversion undefined
}

_SPECIAL = {
    "fma": "torch.addcmul({2}, {0}, {1})",
    "trunc_div": 'torch.div({0}, {1}, rounding_mode="trunc")',
    "mantissa": "torch.frexp({0}).mantissa",
    "exponent": "torch.frexp({0}).exponent",
    "convert": "{0}.to({dtype})",
    "copysign": "torch.copysign({0}, {1}.detach())",  # zeros go back from its sign: autograd carries them on, to 0 * inf
    "erfcx": "torch.special.erfcx({0})",
    "ndtri": "torch.special.ndtri({0})",
    "log_ndtr": "torch.special.log_ndtr({0})",
}
_GUARDED = {
    **{name: ((1, "divisor"),) for name in ("trunc_div", "floor_div_int", "remainder_int", "fmod_int")},
    **{name: ((0, "angle"),) for name in ("sin", "cos", "tan")},
    "signbit": ((0, "signed"),),
    "copysign": ((0, "signed"), (1, "signed")),
    "convert": ((0, "in range"),),
}
_DETACHED = {"nextafter", "digamma", "floor_div", "floor_div_int", "remainder_int", "mantissa"}
_KINDS = {
    **dict.fromkeys(("floor_div", "remainder", "fmod", "pow", "nextafter"), "f"),
    **dict.fromkeys(("shift_left", "shift_right"), "i"),
    "not": "b",
} | {n: "i" for n in OPS if n.endswith("_int")}


def _of_op(name: str) -> Word:
    op = OPS[name]
    arguments = ", ".join(f"{{{i}}}" for i in range(op.arity))
    text = _SPECIAL.get(name) or f"torch.{op.eager.__name__}({arguments})"
    return Word(name, text, op.arity, _GUARDED.get(name, ()), name, name in _DETACHED, _KINDS.get(name, "fib"))


CLOSED = {name: _of_op(name) for name in OPS}

# Composites: one op of PyTorch that is several closed ops, operators with numbers, and surrogates.
_UNARY = """
1.0 - {0} | 2.5 + {0} | {0} * 0.3 | {0} / 3.0 | 1.0 / {0} | {0} ** 2 | {0} ** 3 | {0} ** -1 | {0} ** -2 | {0}.float() ** 0.5 | {0}.double() ** -0.5 |
{0} ** 1.7 | 2.0 ** {0} | 3.0 ** {0} | {0} > 0 | {0} <= 0.5 | {0} == 1 | {0} != 0.25 | {0} >= 3 | {0} < -1.5 | {0} >= -1 | {0} > 300 | -{0} | +{0} | ~{0} |
{0} & 6 | {0} | 9 | {0} ^ -1 | {0} << 3 | {0} >> 1 | {0} + 3 | {0} * 2 | 7 - {0} | {0}.detach() | torch.zeros_like({0}) |
torch.full_like({0}, 0.75) | {0}.clone() | {0}.reciprocal() | {0}.rsqrt() | {0}.square() | {0}.frac() | {0}.relu() | {0}.sgn() |
{0}.nan_to_num() | {0}.nan_to_num(0.5, 3.0, -3.0) | {0}.clamp(-0.5, 2.0) | {0}.clamp(min=-0.5) | {0}.clamp(max=2) | {0}.deg2rad() |
{0}.rad2deg() | {0}.isfinite() | {0}.isinf() | {0}.isposinf() | {0}.isneginf() | {0}.logical_not() | {0}.logit() | {0}.logit(0.1) |
{0}.sinc() | {0}.float_power(2) | {0}.round(decimals=2) | {0}.round(decimals=-1) | torch.special.entr({0}) | torch.special.ndtr({0}) |
F.relu6({0}) | F.gelu({0}) | F.gelu({0}, approximate="tanh") | F.silu({0}) | F.mish({0}) | F.elu({0}) | F.celu({0}, 1.3) | F.selu({0}) |
F.softplus({0}) | F.softplus({0}, 2.0, 5.0) | F.logsigmoid({0}) | F.hardtanh({0}) | F.hardsigmoid({0}) | F.hardswish({0}) |
F.leaky_relu({0}, 0.1) | F.softshrink({0}, 0.3) | F.hardshrink({0}, 0.3) | F.threshold({0}, 0.3, 7.0) | F.softsign({0}) |
F.tanhshrink({0}) | flexsn.surrogate.atan({0} - 1.0) | flexsn.surrogate.atan({0}, 3.0) | flexsn.surrogate.sigmoid({0}) |
flexsn.surrogate.fast_sigmoid({0} - 0.5) | flexsn.surrogate.super_spike({0}) | flexsn.surrogate.piecewise_linear({0}, 0.7) |
flexsn.surrogate.gaussian({0}) | flexsn.surrogate.straight_through({0}) | {0}.masked_fill({0} > 1, -1.5) | {0}.half() | {0}.bfloat16() |
{0}.fmod(-0.75) | {0} % 0.7 | {0} % -3 | 5.0 % {0}.detach().clamp(1, 9) | {0}.bool() | {0}.logical_or({0} > 0)
"""
_BINARY = """
{0} + {1} | {0} - {1} | {0} * {1} | {0} / {1} | {0} + {1} | {0} * {1} | {0} > {1} | {0} == {1} | {0} & {1} | {0} ^ {1} |
torch.add({0}, {1}, alpha=0.3) | torch.sub({0}, {1}, alpha=2) | torch.rsub({0}, {1}) | torch.lerp({0}, {1}, 0.3) |
torch.lerp({0}, {1}, 0.8) | torch.lerp({0}, {1}, {1}) | torch.addcmul({0}, {1}, {0}, value=0.3) | torch.addcdiv({0}, {1}, {0}, value=0.3) |
torch.addcdiv({0}, {0}, {1}) | torch.clamp({0}, {1}, {1} + 1) | torch.isclose({0}, {1}) | torch.logaddexp({0}, {1}) |
torch.logaddexp2({0}, {1}) | torch.xlogy({0}, {1}) | torch.special.xlog1py({0}, {1}) | torch.ldexp({0}, {1}) | torch.where({0} > 0.5, {0}, {1}) |
torch.where({0} > {1}, {0}, 0.5) | torch.logical_and({0}, {1}) | torch.logical_xor({0}, {1}) | {0}.masked_fill({1} > 0, 0.25) |
torch.heaviside({0}.detach(), {1}.detach()) | {0} * {1}.detach() | flexsn.surrogate.atan({0} - {1}) | {0} * (1.0 - {1}) | {0} + ({1} - {0}) / 2.0
"""


def _composites(text: str, arity: int) -> list[Word]:
    lines = [t.strip() for t in text.replace("{0} | 9", "{0} |9").replace("|\n", " | ").replace("\n", " ").split(" | ")]
    return [Word(t, t, arity, kinds="i" if "<<" in t or ">>" in t else "fib") for t in dict.fromkeys(lines) if t]


COMPOSITES = {w.name: w for w in (*_composites(_UNARY, 1), *_composites(_BINARY, 2))}
