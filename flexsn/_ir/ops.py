"""The closed op set: every op that a kernel may contain, each in one row.

A row gives the op's meaning (`eager`, on tensors of one dtype), its dtype rule, the ATen overloads that it renders
directly, and its text for every renderer. To add an elementwise op: add a row here. ATen ops that are several of
these are composed in `_ir/lowering.py`.

Text: `{0} {1} {2}` are the arguments, `{T}` the type of the result in the renderer's language. A missing text means a
call of the function of that name in `_runtime/cpp/flexsn.h`, or in `_runtime/triton_math.py`. Where a text depends on the dtype of the
arguments it is a dict, by `float32` and `float64` (16-bit floats are computed in float32) or `bool`, else by `""`; `fast`
is for float32 gradients that decide nothing: within 2 ulp, where eager's bits are kept elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Op:
    """One closed op.

    Attributes:
        arity: number of arguments.
        eager: its meaning on tensors whose dtypes already follow the rule.
        result: `same` (all arguments and the result have one dtype), `bool` (arguments one dtype, result bool),
            `select` (bool, then two of the result's dtype), `convert` (any dtype to any), `int32` (of one dtype, to int32).
        aten: overloads of ATen that are this op, after type promotion.
        promote: how ATen promotes the arguments: `default`, or `float` (integers become the default float).
        cpp: C++ expression.
        use: lines that the C++ source needs at its top.
        triton: Triton expression, or by dtype.
    """

    name: str
    arity: int
    eager: Callable[..., Tensor]
    result: str
    aten: tuple[str, ...]
    promote: str
    cpp: str
    use: str | None
    triton: str | dict[str, str]


OPS: dict[str, Op] = {}


def _op(name, arity, eager, cpp=None, triton=None, *, aten=(), result="same", promote="default", use=None) -> None:
    aten = (aten,) if isinstance(aten, str) else tuple(aten)
    call = f"{name}({', '.join(f'{{{i}}}' for i in range(arity))})"
    OPS[name] = Op(name, arity, eager, result, aten, promote, cpp or f"flexsn::{call}", use, triton or f"math.{call}")


def _plain(name, eager, text, **options) -> None:
    """An operator that C++ and Triton write alike."""
    _op(name, 2, eager, text, text, **options)


def _compare(name, eager, sign) -> None:
    """Triton's bools are integers of one signed bit."""
    text = f"{{0}} {sign} {{1}}"
    triton = {"": text, "bool": f"({{0}}).to(tl.int8) {sign} ({{1}}).to(tl.int8)"}
    _op(name, 2, eager, text, triton, aten=(f"{name}.Tensor", f"{name}.Scalar"), result="bool")


def _math(name, eager, aten, accuracy="u10", arity=1, promote="float") -> None:
    """A function of Sleef, accurate to 1 ulp (`u10`) or 1.5 ulp (`u15`), and of CUDA's libdevice."""
    suffix = accuracy if arity == 1 else f"_{accuracy}" if accuracy else ""
    triton = f"libdevice.{name}({', '.join(f'{{{i}}}' for i in range(arity))})"
    _op(name, arity, eager, None, triton, aten=aten, promote=promote, use=f"FLEXSN_MATH{arity}({name}, {suffix})")


# --- arithmetic: exact, bit-identical to eager -------------------------------------------------------------------------
_DIV = {"float32": "tl.div_rn({0}, {1})", "fast": "{0} / {1}", "": "{0} / {1}"}
_plain("add", torch.add, "{0} + {1}")
_plain("sub", torch.sub, "{0} - {1}")
_plain("mul", torch.mul, "{0} * {1}", aten=("mul.Tensor", "mul.Scalar"))
_op("div", 2, torch.div, "{0} / {1}", _DIV)
_op("neg", 1, torch.neg, "flexsn::neg({0})", {"float32": "math.neg({0})", "float64": "math.neg({0})", "": "-{0}"}, aten="neg.default")
_op("abs", 1, torch.abs, None, "tl.abs({0})", aten="abs.default")
_SIGN = {"": "({0} > 0).to({T}) - ({0} < 0).to({T})", "bool": "{0}"}
_op("sign", 1, torch.sign, None, _SIGN, aten=("sign.default", "sgn.default"))
_op("fma", 3, lambda a, b, c: torch.addcmul(c, a, b))
_op("sqrt", 1, torch.sqrt, None, {"float32": "tl.sqrt_rn({0})", "": "tl.sqrt({0})"}, aten="sqrt.default", promote="float")
_MAX = {"": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", "bool": "{0} | {1}"}
_MIN = {"": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", "bool": "{0} & {1}"}
_op("maximum", 2, torch.maximum, None, _MAX, aten=("maximum.default", "clamp_min.Tensor"))
_op("minimum", 2, torch.minimum, None, _MIN, aten=("minimum.default", "clamp_max.Tensor"))
_op("fmax", 2, torch.fmax, aten="fmax.default")
_op("fmin", 2, torch.fmin, aten="fmin.default")
_op("floor", 1, torch.floor, None, "tl.floor({0})", aten="floor.default")
_op("ceil", 1, torch.ceil, None, "tl.ceil({0})", aten="ceil.default")
_op("trunc", 1, torch.trunc, None, "libdevice.trunc({0})", aten=("trunc.default", "fix.default"))
_op("round", 1, torch.round, None, "libdevice.rint({0})", aten="round.default")
_op("copysign", 2, torch.copysign, None, "libdevice.copysign({0}, {1})", aten=("copysign.Tensor", "copysign.Scalar"), promote="float")
_op("nextafter", 2, torch.nextafter, None, "libdevice.nextafter({0}, {1})", aten="nextafter.default")
_op("trunc_div", 2, lambda a, b: torch.div(a, b, rounding_mode="trunc"))
_op("floor_div", 2, torch.floor_divide, "flexsn::floor_div_from(flexsn::fmod({0}, {1}), {0}, {1})", use="FLEXSN_MATH2(fmod, )")
_op("floor_div_int", 2, torch.floor_divide)
_op("remainder", 2, torch.remainder, "flexsn::remainder_from(flexsn::fmod({0}, {1}), {1})", use="FLEXSN_MATH2(fmod, )")
_op("remainder_int", 2, torch.remainder)
_math("fmod", torch.fmod, (), "", arity=2)
_op("fmod_int", 2, torch.fmod, "flexsn::c_mod({0}, {1})")
_op("pow_int", 2, torch.pow)
_op("mantissa", 1, lambda x: torch.frexp(x).mantissa)
_op("exponent", 1, lambda x: torch.frexp(x).exponent, result="int32")

# --- comparison, selection, bits ---------------------------------------------------------------------------------------
_compare("eq", torch.eq, "==")
_compare("ne", torch.ne, "!=")
_compare("lt", torch.lt, "<")
_compare("le", torch.le, "<=")
_compare("gt", torch.gt, ">")
_compare("ge", torch.ge, ">=")
_op("isnan", 1, torch.isnan, "{0} != {0}", "{0} != {0}", aten="isnan.default", result="bool")
_SIGNBIT = {"float32": "{0}.to(tl.int32, bitcast=True) < 0", "float64": "{0}.to(tl.int64, bitcast=True) < 0", "": "{0} < 0"}
_op("signbit", 1, torch.signbit, None, _SIGNBIT, aten="signbit.default", result="bool")
_op("where", 3, torch.where, "{0} ? {1} : {2}", "tl.where({0}, {1}, {2})", result="select")
_op("convert", 1, Tensor.to, "flexsn::convert<{T}>({0})", "math.convert({0}, {T})", result="convert")
_plain("and", torch.bitwise_and, "{0} & {1}", aten=("bitwise_and.Tensor", "bitwise_and.Scalar", "bitwise_and.Scalar_Tensor"))
_plain("or", torch.bitwise_or, "{0} | {1}", aten=("bitwise_or.Tensor", "bitwise_or.Scalar", "bitwise_or.Scalar_Tensor"))
_plain("xor", torch.bitwise_xor, "{0} ^ {1}", aten=("bitwise_xor.Tensor", "bitwise_xor.Scalar", "bitwise_xor.Scalar_Tensor"))
_op("not", 1, torch.logical_not, "!{0}", "~{0}")
_op("invert", 1, torch.bitwise_not, "~{0}", {"": "~{0}", "uint8": "255 - {0}"})
_SHIFTS = (*(f"bitwise_{{}}_shift.{o}" for o in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")), "__{}shift__.Tensor", "__{}shift__.Scalar")
_op("shift_left", 2, torch.bitwise_left_shift, aten=[s.format("left" if "bit" in s else "l") for s in _SHIFTS])
_op("shift_right", 2, torch.bitwise_right_shift, aten=[s.format("right" if "bit" in s else "r") for s in _SHIFTS])

# --- transcendental: within 1 ulp of the correctly rounded value unless noted ------------------------------------------
_op("exp", 1, torch.exp, "flexsn::exponential({0})", "libdevice.exp({0})", aten="exp.default", promote="float", use="FLEXSN_EXP")
_math("exp2", torch.exp2, "exp2.default")
_math("expm1", torch.expm1, "expm1.default")
_math("log", torch.log, "log.default")
_math("log2", torch.log2, "log2.default")
_math("log10", torch.log10, "log10.default")
_math("log1p", torch.log1p, "log1p.default")
_math("sin", torch.sin, "sin.default")
_math("cos", torch.cos, "cos.default")
_math("tan", torch.tan, "tan.default")
_math("asin", torch.asin, "asin.default")
_math("acos", torch.acos, "acos.default")
_math("atan", torch.atan, "atan.default")
_math("sinh", torch.sinh, "sinh.default")
_math("cosh", torch.cosh, "cosh.default")
_math("tanh", torch.tanh, "tanh.default")
for _name, _eager in (("asinh", torch.asinh), ("acosh", torch.acosh)):
    _call = f"flexsn::far_as_log({{0}}, flexsn::{_name}({{0}}), flexsn::log(flexsn::abs({{0}})))"
    _use = f"FLEXSN_MATH1({_name}, u10)\nFLEXSN_MATH1(log, u10)"
    _op(_name, 1, _eager, _call, f"libdevice.{_name}({{0}})", aten=f"{_name}.default", promote="float", use=_use)
_math("atanh", torch.atanh, "atanh.default")
_math("erf", torch.erf, "erf.default")
_math("erfc", torch.erfc, "erfc.default", "u15")
_math("lgamma", torch.lgamma, "lgamma.default")
_math("atan2", torch.atan2, "atan2.default", arity=2)
_math("hypot", torch.hypot, "hypot.default", "u05", arity=2)
_math("pow", torch.pow, (), arity=2)
_LOGISTIC = "1.0 / (1.0 + libdevice.exp(-{0}))"
_SIGMOID = {"float32": "tl.div_rn(1.0, 1.0 + libdevice.exp(-{0}))", "fast": _LOGISTIC, "": _LOGISTIC}
_op("sigmoid", 1, torch.sigmoid, "{T}(1) / ({T}(1) + flexsn::exponential(-{0}))", _SIGMOID,
    aten="sigmoid.default", promote="float", use="FLEXSN_EXP")  # fmt: skip

# --- special functions: in C++ ATen's own scalar code ---------------------------------------------------------------------
for _name, _eager, _aten, _call, _libdevice in (
    (
        "erfinv",
        torch.erfinv,
        "erfinv.default",
        "{T}(flexsn::refined_erfinv(double({0}), calc_erfinv(double({0}))))",
        "libdevice.erfinv({0})",
    ),
    ("digamma", torch.digamma, "digamma.default", "calc_digamma({0})", "math.digamma({0})"),
    ("erfcx", torch.special.erfcx, "special_erfcx.default", "calc_erfcx({0})", "libdevice.erfcx({0})"),
    ("ndtri", torch.special.ndtri, "special_ndtri.default", "calc_ndtri({0})", "libdevice.normcdfinv({0})"),
    ("log_ndtr", torch.special.log_ndtr, "special_log_ndtr.default", "calc_log_ndtr({0})", "math.log_ndtr({0})"),
):
    _op(_name, 1, _eager, _call, _libdevice, aten=_aten, promote="float", use="#include <ATen/native/Math.h>")
