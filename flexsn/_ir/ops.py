"""The closed set of ops: every op that a kernel may contain, each in one row.

A row gives the op's meaning (`eager`, on tensors of one dtype), its dtype rule, and the ATen overloads that lower to it
directly. How an op is written stands with each language: `_codegen/cpp_ops.py`, `_codegen/triton_ops.py`. ATen ops that are
several of these are composed in `_ir/lowering.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """

    name: str
    arity: int
    eager: Callable[..., Tensor]
    result: str
    aten: tuple[str, ...]
    promote: str


OPS: dict[str, Op] = {}


def _op(
    name: str, arity: int, eager: Callable[..., Tensor], aten: str | Sequence[str] = (), *, result: str = "same", promote: str = "default"
) -> None:
    OPS[name] = Op(name, arity, eager, result, (aten,) if isinstance(aten, str) else tuple(aten), promote)


def _with_scalars(name: str, *more: str) -> tuple[str, ...]:
    """The overloads of an op on two tensors, or on one and a number."""
    return tuple(f"{name}.{overload}" for overload in ("Tensor", "Scalar", *more))


# --- arithmetic: exact, bit-identical to eager -------------------------------------------------------------------------
_op("add", 2, torch.add)
_op("sub", 2, torch.sub)
_op("mul", 2, torch.mul, _with_scalars("mul"))
_op("div", 2, torch.div)
_op("neg", 1, torch.neg, "neg.default")
_op("abs", 1, torch.abs, "abs.default")
_op("sign", 1, torch.sign, ("sign.default", "sgn.default"))
_op("fma", 3, lambda a, b, c: torch.addcmul(c, a, b))
_op("sqrt", 1, torch.sqrt, "sqrt.default", promote="float")
_op("maximum", 2, torch.maximum, ("maximum.default", "clamp_min.Tensor"))
_op("minimum", 2, torch.minimum, ("minimum.default", "clamp_max.Tensor"))
_op("fmax", 2, torch.fmax, "fmax.default")
_op("fmin", 2, torch.fmin, "fmin.default")
_op("floor", 1, torch.floor, "floor.default")
_op("ceil", 1, torch.ceil, "ceil.default")
_op("trunc", 1, torch.trunc, ("trunc.default", "fix.default"))
_op("round", 1, torch.round, "round.default")
_op("copysign", 2, torch.copysign, _with_scalars("copysign"), promote="float")
_op("nextafter", 2, torch.nextafter, "nextafter.default")
_op("trunc_div", 2, lambda a, b: torch.div(a, b, rounding_mode="trunc"))
_op("floor_div", 2, torch.floor_divide)
_op("floor_div_int", 2, torch.floor_divide)
_op("remainder", 2, torch.remainder)
_op("remainder_int", 2, torch.remainder)
_op("fmod", 2, torch.fmod, promote="float")
_op("fmod_int", 2, torch.fmod)
_op("pow_int", 2, torch.pow)
_op("mantissa", 1, lambda x: torch.frexp(x).mantissa)
_op("exponent", 1, lambda x: torch.frexp(x).exponent, result="int32")

# --- comparison, selection, bits ---------------------------------------------------------------------------------------
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _op(_name, 2, getattr(torch, _name), _with_scalars(_name), result="bool")
_op("isnan", 1, torch.isnan, "isnan.default", result="bool")
_op("signbit", 1, torch.signbit, "signbit.default", result="bool")
_op("where", 3, torch.where, result="select")
_op("convert", 1, Tensor.to, result="convert")
for _name in ("and", "or", "xor"):
    _op(_name, 2, getattr(torch, f"bitwise_{_name}"), _with_scalars(f"bitwise_{_name}", "Scalar_Tensor"))
_op("not", 1, torch.logical_not)
_op("invert", 1, torch.bitwise_not)
_SHIFTS = (*(f"bitwise_{{}}_shift.{o}" for o in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")), "__{}shift__.Tensor", "__{}shift__.Scalar")
_op("shift_left", 2, torch.bitwise_left_shift, [s.format("left" if "bit" in s else "l") for s in _SHIFTS])
_op("shift_right", 2, torch.bitwise_right_shift, [s.format("right" if "bit" in s else "r") for s in _SHIFTS])

# --- transcendental and special ----------------------------------------------------------------------------------------
for _name in "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc lgamma".split():
    _op(_name, 1, getattr(torch, _name), f"{_name}.default", promote="float")
for _name in ("atan2", "hypot"):
    _op(_name, 2, getattr(torch, _name), f"{_name}.default", promote="float")
_op("pow", 2, torch.pow, promote="float")
for _name in ("sigmoid", "erfinv", "digamma"):
    _op(_name, 1, getattr(torch, _name), f"{_name}.default", promote="float")
for _name in ("erfcx", "ndtri", "log_ndtr"):
    _op(_name, 1, getattr(torch.special, _name), f"special_{_name}.default", promote="float")
