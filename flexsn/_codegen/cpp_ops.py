"""How C++ writes the closed ops: one expression per op, and the lines that a source needs at its top for it.

In an expression `{0} {1} {2}` are the arguments and `{T}` is the type of the result. Functions of `flexsn::` stand in
`_runtime/cpp/flexsn.h`; those that a macro `FLEXSN_MATH1` or `FLEXSN_MATH2` declares are Sleef's vector functions.
"""

from __future__ import annotations

from .._ir.ops import OPS

TEXTS: dict[str, str] = {}  # by op
NEEDS: dict[str, tuple[str, ...]] = {}  # by op: `#include` lines and macros, for those that need any


def _functions(names: str, *needs: str) -> None:
    """Ops that are the function `flexsn::<name>`; in `needs`, `{name}` stands for its name."""
    for name in names.split():
        TEXTS[name] = f"flexsn::{name}({', '.join(f'{{{i}}}' for i in range(OPS[name].arity))})"
        NEEDS.update({name: tuple(line.format(name=name) for line in needs)} if needs else {})


def _expressions(texts: dict[str, str], *needs: str) -> None:
    TEXTS.update(texts)
    NEEDS.update(dict.fromkeys(texts, needs) if needs else {})


# --- exact ---------------------------------------------------------------------------------------------------------------
_functions("neg abs sign fma sqrt maximum minimum fmax fmin floor ceil trunc round copysign nextafter trunc_div floor_div_int")
_functions("remainder_int pow_int mantissa exponent signbit shift_left shift_right")
_expressions({
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}",
    "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "!{0}", "invert": "~{0}",
    "isnan": "{0} != {0}", "where": "{0} ? {1} : {2}", "convert": "flexsn::convert<{T}>({0})", "fmod_int": "flexsn::c_mod({0}, {1})",
})  # fmt: skip
_functions("fmod", "FLEXSN_MATH2({name}, )")
_expressions({
    "floor_div": "flexsn::floor_div_from(flexsn::fmod({0}, {1}), {0}, {1})",
    "remainder": "flexsn::remainder_from(flexsn::fmod({0}, {1}), {1})",
}, *NEEDS["fmod"])  # fmt: skip

# --- transcendental: Sleef's, within 1 ulp of the correctly rounded value (`u10`) unless the suffix says otherwise -------
_functions("exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh atanh erf lgamma", "FLEXSN_MATH1({name}, u10)")
_functions("erfc", "FLEXSN_MATH1({name}, u15)")
_functions("atan2 pow", "FLEXSN_MATH2({name}, _u10)")
_functions("hypot", "FLEXSN_MATH2({name}, _u05)")
_expressions({"exp": "flexsn::exponential({0})", "sigmoid": "{T}(1) / ({T}(1) + flexsn::exponential(-{0}))"}, "FLEXSN_EXP")
for _name in ("asinh", "acosh"):
    _far = f"flexsn::far_as_log({{0}}, flexsn::{_name}({{0}}), flexsn::log(flexsn::abs({{0}})))"
    _expressions({_name: _far}, f"FLEXSN_MATH1({_name}, u10)", "FLEXSN_MATH1(log, u10)")

# --- special functions: ATen's own scalar code ------------------------------------------------------------------------------
_expressions({
    "erfinv": "{T}(flexsn::refined_erfinv(double({0}), calc_erfinv(double({0}))))", "digamma": "calc_digamma({0})",
    "erfcx": "calc_erfcx({0})", "ndtri": "calc_ndtri({0})", "log_ndtr": "calc_log_ndtr({0})",
}, "#include <ATen/native/Math.h>")  # fmt: skip
