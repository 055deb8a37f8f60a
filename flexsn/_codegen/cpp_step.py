"""One step of a kernel as C++: a function that loops over the neurons of a row."""

from __future__ import annotations

import dataclasses
import math
import struct

import torch

from .._ir.ends import is_going
from .._ir.graph import Graph, Node
from .._ir.roles import Kind
from .._plan.plan import KernelPlan
from .cpp_ops import TEXTS
from .language import Language, numbers

STORAGE = {
    torch.float32: "float", torch.float64: "double", torch.float16: "half", torch.bfloat16: "bfloat16", torch.bool: "bool8",
    torch.int8: "int8_t", torch.int16: "int16_t", torch.int32: "int32_t", torch.int64: "int64_t", torch.uint8: "uint8_t",
}  # fmt: skip
ROW = {**STORAGE, torch.float16: "float", torch.bfloat16: "float"}  # of rows that stay in a tile
_ROUNDED = {"half", "bfloat16"}  # on the way to memory
COMPUTE = {**ROW, torch.bool: "bool"}
_ROUND = {torch.float16: "flexsn::round_half({0})", torch.bfloat16: "flexsn::round_bfloat16({0})"}


class Step:
    """The text of one row function. Where sequences end, it is compiled twice: for neurons of which some may have ended, and for others."""

    def __init__(self, name: str, comment: str, plan: KernelPlan, graph: Graph):
        self.name, self.comment, self.graph = name, comment, graph
        constants = {a for n in graph.nodes for a in n.args}
        self.numbers = {node: k for node, k in numbers(plan).items() if node in constants}
        self.parameters: list[str] = []
        self.arguments: list[str] = []
        self.end = plan.end
        self.top: list[str] = []
        self.bottom: list[str] = []

    def row(self, name: str, ctype: str, argument: str, *, const: bool = True) -> None:
        self.parameters.append(f"{'const ' if const else ''}{ctype}* __restrict {name}")
        self.arguments.append(argument)

    def text(self) -> list[str]:
        left = None if self.end is None else self.graph.inputs.get(self.end)

        def template(node: Node) -> str:
            going = left is not None and is_going(node, left)
            return f"going || {TEXTS[node.op]}" if going else TEXTS[node.op]

        language = dataclasses.replace(_CPP, template=template, constant=lambda node, _: self.numbers.get(node) or literal(node))
        parameters = [*self.parameters, *(f"{COMPUTE[node.dtype]} {k}" for node, k in self.numbers.items())]
        parameters += ["int32_t passed"] if self.end is not None else []
        return [
            f"// {self.comment}",
            *(["template <bool going>"] if self.end is not None else []),
            f"static inline void {self.name}(int64_t n, {', '.join(parameters)}) {{",
            "#pragma omp simd",
            "  for (int64_t i = 0; i < n; ++i) {",
            *(f"    {line}" for line in [*self.top, *language.statements(self.graph), *self.bottom]),
            "  }",
            "}",
            "",
        ]

    def call(self, otherwise: str = "") -> str:
        """Return its call for a block; `otherwise`: what is done where all sequences of the block have ended."""
        given = ", ".join([*(f"{argument} + b" for argument in self.arguments), *self.numbers.values()])
        if self.end is None:
            return f"{self.name}(m, {given});"
        calls = [f"{self.name}<{going}>(m, {given}, int32_t(t));" for going in ("true", "false")]
        return f"if (t < least) {calls[0]} else if (t < most) {calls[1]}{f' else {{ {otherwise} }}' if otherwise else ''}"


def literal(node: Node) -> str:
    """Return a constant as a C++ literal of its exact value."""
    value, dtype = node.value, node.dtype
    ctype = COMPUTE[dtype]
    if dtype is torch.bool:
        return "true" if value else "false"
    if not dtype.is_floating_point:
        return f"{ctype}({value})" if value > -(2**63) else "std::numeric_limits<int64_t>::min()"
    if math.isnan(value):
        return f"std::numeric_limits<{ctype}>::quiet_NaN()"
    if ctype == "float":
        value = float32(value)
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}std::numeric_limits<{ctype}>::infinity()"
    text = repr(value) + ("f" if ctype == "float" else "")
    return f"({text})" if text[0] == "-" else text


def float32(value: float) -> float:
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


_CPP = Language(
    template=lambda node: TEXTS[node.op], types=COMPUTE, rounding=_ROUND, constant=lambda node, _: literal(node),
    declare="const {type} {name} = {text};", comment="//",
)  # fmt: skip


def operand_rows(step: Step, graph: Graph, plan: KernelPlan, state: str) -> None:
    """Load the operands of a step. `state`: the row of a state, with {} for its role."""
    arrays = {a.role: a for a in plan.reads}
    carried = {a.role for a in plan.carried}
    for role, node in graph.inputs.items():
        ctype = COMPUTE[node.dtype]
        if role == plan.end:
            step.row(f"{role}_row", ctype, f"{role}_row")
            step.top.append(f"const {ctype} {node.name} = {role}_row[i] - passed;")
        if role == plan.end or role in carried:
            continue
        sequence = role in arrays and arrays[role].kind == "sequence"
        rtype = STORAGE[arrays[role].storage] if sequence else ROW[node.dtype]
        step.row(f"{role}_row", rtype, state.format(role) if role.kind is Kind.STATE else f"{role}_row")
        step.top.append(f"const {ctype} {node.name} = {loaded(f'{role}_row[i]', rtype, ctype)};")


def loaded(element: str, stored: str, ctype: str) -> str:
    return element if stored == ctype else f"load<{ctype}>({element})"


def stored(node: Node, stored: str) -> str:
    if stored == COMPUTE[node.dtype]:
        return literal(node) if node.op == "const" else node.name
    if node.op == "const":
        return f"store<{stored}>({literal(node)})"
    return f"store<{stored}>({node.name}{' != 0.0f' if stored in _ROUNDED and _is_spike(node) else ''})"  # a bool needs no rounding


def _is_spike(node: Node) -> bool:
    """Whether a value is 0 or 1 by construction: bools made numbers, these constants, and what chooses among or multiplies such."""
    waiting, seen = [node], set[Node]()
    while waiting:
        n = waiting.pop()
        if n in seen:
            continue
        seen.add(n)
        if n.op in ("mul", "maximum", "minimum"):
            waiting += n.args
        elif n.op == "where":
            waiting += n.args[1:]
        elif not (n.args[0].dtype is torch.bool if n.op == "convert" else n.op == "const" and str(n.value) in ("0.0", "1.0")):
            return False
    return True
