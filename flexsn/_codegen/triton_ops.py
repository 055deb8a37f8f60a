"""How Triton writes the closed ops: one expression per op.

In an expression `{0} {1} {2}` are the arguments and `{T}` is the type of the result. Functions of `math.` stand in
`_runtime/triton/math.py`, those of `libdevice.` are CUDA's. Where the expression depends on the dtype of the last argument it is
a dict by `float32`, `float64`, `bool` and so on (16-bit floats are computed in float32), with `""` for all others; `fast`
serves float32 gradients on which no decision depends: within 2 ulp, where eager's bits are kept elsewhere.
"""

from __future__ import annotations

from .._ir.ops import OPS

TEXTS: dict[str, str | dict[str, str]] = {}  # by op


def _functions(module: str, names: str) -> None:
    """Ops that are the function `<module>.<name>`."""
    for name in names.split():
        TEXTS[name] = f"{module}.{name}({', '.join(f'{{{i}}}' for i in range(OPS[name].arity))})"


# --- exact ---------------------------------------------------------------------------------------------------------------
_functions("math", "fma fmax fmin trunc_div floor_div floor_div_int remainder remainder_int fmod_int pow_int mantissa exponent")
_functions("math", "shift_left shift_right")
_functions("libdevice", "trunc copysign nextafter fmod")
_functions("tl", "abs floor ceil")
_EXTREME = "tl.{0}({{0}}, {{1}}, propagate_nan=tl.PropagateNan.ALL)"
TEXTS |= {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}",
    "div": {"float32": "tl.div_rn({0}, {1})", "fast": "{0} / {1}", "": "{0} / {1}"},
    "neg": {"float32": "math.neg({0})", "float64": "math.neg({0})", "": "-{0}"},
    "sign": {"bool": "{0}", "": "({0} > 0).to({T}) - ({0} < 0).to({T})"},
    "sqrt": {"float32": "tl.sqrt_rn({0})", "": "tl.sqrt({0})"},
    "maximum": {"bool": "{0} | {1}", "": _EXTREME.format("maximum")},
    "minimum": {"bool": "{0} & {1}", "": _EXTREME.format("minimum")},
    "round": "libdevice.rint({0})",
    "isnan": "{0} != {0}",
    "signbit": {"float32": "{0}.to(tl.int32, bitcast=True) < 0", "float64": "{0}.to(tl.int64, bitcast=True) < 0", "": "{0} < 0"},
    "where": "tl.where({0}, {1}, {2})", "convert": "math.convert({0}, {T})",
    "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}", "invert": {"uint8": "255 - {0}", "": "~{0}"},
}  # fmt: skip
for _name, _sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    _text = f"{{0}} {_sign} {{1}}"
    TEXTS[_name] = {"bool": f"({{0}}).to(tl.int8) {_sign} ({{1}}).to(tl.int8)", "": _text}  # bools are integers of one signed bit

# --- transcendental and special ---------------------------------------------------------------------------------------------
_functions("libdevice", "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh")
_functions("libdevice", "erf erfc erfcx erfinv lgamma atan2 hypot pow")
_functions("math", "digamma log_ndtr")
_LOGISTIC = "1.0 / (1.0 + libdevice.exp(-{0}))"
TEXTS["sigmoid"] = {"float32": "tl.div_rn(1.0, 1.0 + libdevice.exp(-{0}))", "fast": _LOGISTIC, "": _LOGISTIC}
TEXTS["ndtri"] = "libdevice.normcdfinv({0})"
