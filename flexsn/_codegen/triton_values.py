"""How Triton writes the values of a step: types, constants and expressions."""

from __future__ import annotations

import math
from collections.abc import Container

import torch

from .._ir.graph import Graph, Node, reachable
from .cpp_step import float32
from .language import Language
from .triton_ops import TEXTS

STORAGE = {
    torch.float32: "fp32", torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16", torch.bool: "i1",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
}  # fmt: skip
COMPUTE = {
    torch.float32: "tl.float32", torch.float64: "tl.float64", torch.float16: "tl.float32", torch.bfloat16: "tl.float32",
    torch.bool: "tl.int1", torch.int8: "tl.int8", torch.int16: "tl.int16", torch.int32: "tl.int32", torch.int64: "tl.int64",
    torch.uint8: "tl.uint8",
}  # fmt: skip
_ROUND = {torch.float16: "math.round_half({0})", torch.bfloat16: "math.round_bfloat16({0})"}
IMPORTS = (
    "import triton", "import triton.language as tl", "",
    "import flexsn._runtime.triton.math as math", "from flexsn._runtime.triton.math import libdevice",
)  # fmt: skip


def template(node: Node, fast: Container[Node] = ()) -> str:
    """Return the expression of a node's op; `fast`: values for which the fast one serves."""
    if node.op == "convert":
        return _convert(node.args[0].dtype, node.dtype)
    text = TEXTS[node.op]
    if isinstance(text, str):
        return text
    kind = COMPUTE[node.args[-1].dtype].removeprefix("tl.").replace("int1", "bool")
    return text["fast"] if node in fast and kind == "float32" and "fast" in text else text.get(kind, text.get("", ""))


_DECIDES = frozenset("eq ne lt le gt ge sign floor ceil trunc round trunc_div floor_div remainder fmod signbit exponent mantissa".split())


def smooth(graph: Graph) -> set[Node]:
    """Return the values on which no decision depends: in a gradient, one ulp of theirs is no spike more or less."""
    deciding = [a for n in graph.nodes if n.op in _DECIDES or not n.dtype.is_floating_point for a in n.args]
    return set(graph.nodes) - reachable(deciding)


def _convert(source: torch.dtype, target: torch.dtype) -> str:
    """Return the expression of a conversion, as c10::convert does it."""
    if target is torch.bool:
        return "{0} != 0"
    if source.is_floating_point and not target.is_floating_point and target.itemsize < 8:
        return "{0}.to(tl.int32).to({T})"
    return "{0}.to({T})"


def literal(node: Node) -> str:
    """Return a constant of its exact value; Triton takes the dtype of a float from the other operand, so others are written out."""
    value, dtype = node.value, node.dtype
    if dtype is torch.bool:
        return repr(bool(value))
    if COMPUTE[dtype] == "tl.float32":
        value = float32(value)
    if value == 0 and math.copysign(1.0, value) < 0:  # Triton makes 0.0 of -0.0
        bits = "tl.full((), -(2**63), tl.int64)" if dtype is torch.float64 else "tl.full((), -(2**31), tl.int32)"
        return f"{bits}.to({COMPUTE[dtype]}, bitcast=True)"
    if COMPUTE[dtype] == "tl.float32" and 0 < abs(value) < 2.0**-126:  # Triton takes the literal for a float64
        return f"tl.full((), {value!r}, tl.float32)"
    text = repr(value) if not isinstance(value, float) or math.isfinite(value) else f'float("{value}")'
    if COMPUTE[dtype] in ("tl.float32", "tl.int32"):
        return f"({text})" if text[0] == "-" else text
    return f"tl.full((), {text}, {COMPUTE[dtype]})"


def _constant(node: Node, user: Node) -> str:
    """Return a constant argument. Functions take tensors: they look at the dtypes of their arguments. An op on plain numbers alone would
    be Python's."""
    plain, text = literal(node), template(user)
    whole = "math." in text or "libdevice." in text or ".to(" in text or all(a.op == "const" for a in user.args)
    return plain if not whole or plain.startswith("tl.") else f"tl.full((), {plain}, {COMPUTE[node.dtype]})"


TRITON = Language(
    template=template, types=COMPUTE, rounding=_ROUND, constant=_constant, declare="{name} = {text}", comment="#",
)  # fmt: skip
