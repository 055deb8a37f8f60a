"""The step graph: one time step over the closed op set, in static single assignment, each value of one dtype.

It is data: it prints, verifies, prunes, and runs (slowly) by the eager meaning of its ops, which defines what a
rendered kernel has to compute.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ..errors import CoreError, FlexSNError
from .ops import OPS
from .roles import Kind, Role

_OF_INTEGERS = frozenset({"and", "or", "xor", "invert", "shift_left", "shift_right"})
HALF = (torch.float16, torch.bfloat16)


class Shape(IntEnum):
    """How many values a node has at one step; an elementwise op has the largest shape of its arguments."""

    NUMBER = 0  # one: a constant, and what is computed from constants
    PARAM = 1  # those of a param, which is broadcast by index; it does not change with time
    NEURON = 2  # one for every neuron


@dataclass(eq=False)
class Node:
    """One value. `op` is a closed op, `input` (named by its role) or `const` (with a Python value)."""

    op: str
    args: tuple[Node, ...]
    dtype: torch.dtype
    name: str
    value: Any = None
    line: str | None = None
    shape: Shape = Shape.NEURON
    of: frozenset[Role] = frozenset()  # of a constant: roles of the cotangents that it was made from, and vanishes with

    def __repr__(self) -> str:
        return self.name

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        shape = "" if self.shape is Shape.NEURON else f"[{self.shape.name.lower()}]"
        return f"{self.name}: {kind}{shape} = {self.op}({', '.join(a.name for a in self.args)})"


@dataclass(eq=False)
class Graph:
    """Inputs and outputs by role (`_ir/roles.py`): `x0 v0 p0 gy0 gv0` in, `y0 v0 gx0 gv0 gp0` out."""

    core: str
    inputs: dict[Role, Node]
    outputs: dict[Role, Node]
    nodes: list[Node] = field(default_factory=list)  # in order of computation; no inputs, no constants

    def __str__(self) -> str:
        ins = ", ".join(f"{role}={n.name}" for role, n in self.inputs.items())
        outs = ", ".join(f"{role}={n.name}" for role, n in self.outputs.items())  # a constant's name is its value
        return "\n".join([f"{self.core}({ins}):", *(f"    {n}" for n in self.nodes), f"    return {outs}"])

    @property
    def written(self) -> list[str]:
        """Lines of the target language that compute the outputs, in place of nodes: of a step whose source is given."""
        return []

    def select(self, roles: Iterable[str]) -> Graph:
        """Return the part that computes the given outputs, with only the inputs that it reads."""
        outputs = {r: self.outputs[r] for r in map(Role.of, roles)}
        live = reachable(outputs.values())
        inputs = {r: n for r, n in self.inputs.items() if n in live}
        return Graph(self.core, inputs, outputs, [n for n in self.nodes if n in live])

    def for_cotangents(self, given: Iterable[str]) -> Graph:
        """Return the graph where outputs have no other cotangents (`gy*`) than those given: as in autograd, what depends on absent
        ones alone vanishes with them. States have theirs."""
        there, builder, new = set(given), Builder(self.core), dict[Node, Node | None]()
        alive = {node for role, node in self.inputs.items() if exists(role, there)}
        for role, node in self.inputs.items():
            new[node] = None if role.kind.is_grad and node not in alive else builder.input(role, node.dtype, node.name)

        def get(n: Node) -> Node | None:
            if n.op == "const":
                return None if vanishes(n, there) else builder.const(n.value, n.dtype)
            return new[n]

        for node in self.nodes:
            if any(a in alive or any(exists(role, there) for role in a.of) for a in node.args):
                alive.add(node)
            args = [get(a) for a in node.args]
            new[node] = None if None in args and node not in alive else _vanish(builder, node, args)
        outputs = {}
        for role, node in self.outputs.items():
            value = get(node)
            outputs[role] = builder.const(0, node.dtype) if value is None else value
        return builder.graph(outputs)


def exists(role: Role, given: Container[str]) -> bool:
    """Whether a role is that of a cotangent that is there: those of states always are."""
    return role.kind is Kind.STATE_GRAD or (role.kind.is_grad and role in given)


def vanishes(const: Node, given: Container[str]) -> bool:
    """Whether a constant was made from cotangents, none of which is there."""
    return bool(const.of) and not any(exists(role, given) for role in const.of)


def _vanish(builder: Builder, node: Node, args: list[Node | None]) -> Node | None:
    """Return `node` over arguments of which some are absent (None), while another depends on a cotangent that is there."""
    present = tuple(a for a in args if a is not None)
    if len(present) == len(args):
        return builder.add(node.op, present, node.dtype, node.name, node.line)
    a, b = args[0], args[1] if len(args) > 1 else None
    if node.op == "mul" or (node.op == "div" and a is None):
        return None
    if node.op == "add":
        return a if b is None else b
    if node.op == "sub":
        return a if b is None else builder.add("neg", (b,), node.dtype, node.name, node.line)
    if node.op == "fma" and (a is None or b is None):
        return args[2]
    filled = [builder.const(0, old.dtype) if new is None else new for old, new in zip(node.args, args, strict=True)]
    return builder.add(node.op, tuple(filled), node.dtype, node.name, node.line)


def reachable(roots: Iterable[Node]) -> set[Node]:
    """Return everything that the roots are computed from, themselves included."""
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.args)
    return seen


class Builder:
    """Builds a graph value by value; equal computations become one."""

    def __init__(self, core: str):
        self.core = core
        self.inputs: dict[Role, Node] = {}
        self.nodes: list[Node] = []
        self.names: dict[str, int] = {}  # how often each was wanted
        self._taken: set[str] = set()
        self.line: str | None = None
        self._known: dict[tuple, Node] = {}

    def name(self, wanted: str | None) -> str:
        """Return a name that no other value has: the wanted one, or it with a number."""
        while True:
            n = self.names[wanted or "t"] = self.names.get(wanted or "t", 0) + 1
            found = f"t{n}" if wanted is None else wanted if n == 1 else f"{wanted}_{n}"
            if found not in self._taken:
                self._taken.add(found)
                return found

    def input(self, role: str, dtype: torch.dtype, name: str) -> Node:
        role = Role.of(role)
        made = self.inputs[role] = Node("input", (), dtype, self.name(name), shape=shape_of(role))
        return made

    def const(self, value: Any, dtype: torch.dtype, of: frozenset[Role] = frozenset()) -> Node:
        if dtype is torch.bool:
            value = bool(value)
        elif dtype.is_floating_point:
            value = torch.tensor(value, dtype=dtype, device="cpu").item() if dtype in HALF else float(value)
        elif isinstance(value, float) and not math.isfinite(value):
            value = 0
        else:
            bits = torch.iinfo(dtype).bits
            value = (int(value) - torch.iinfo(dtype).min) % (1 << bits) + torch.iinfo(dtype).min
        key = ("const", repr(value), dtype, of)
        if key not in self._known:
            self._known[key] = Node("const", (), dtype, repr(value), value, shape=Shape.NUMBER, of=of)
        return self._known[key]

    def add(self, op: str, args: tuple[Node, ...], dtype: torch.dtype, name: str | None = None, line: str | None = None) -> Node:
        if op == "convert" and args[0].dtype == dtype:
            return args[0]
        if op == "convert" and args[0].op == "const":
            return self.const(args[0].value, dtype, args[0].of)
        simpler = self._simplify(op, args)
        if simpler is not None:
            return simpler
        key = (op, args, dtype)
        if key not in self._known:
            node = Node(op, args, dtype, self.name(name), line=line or self.line, shape=elementwise(args))
            self._known[key] = node
            self.nodes.append(node)
        return self._known[key]

    def _simplify(self, op: str, args: tuple[Node, ...]) -> Node | None:
        """Return what a value is by an identity that holds bit for bit, if there is one."""
        last = args[-1]
        if op in ("mul", "div") and last.op == "const" and last.value == 1:
            return args[0]
        if op in ("add", "sub") and last.op == "neg" and last.dtype.is_floating_point:
            return self.op("sub" if op == "add" else "add", args[0], last.args[0])
        if op == "neg" and last.op == "neg":
            return last.args[0]
        if op == "where" and args[1] is last:
            return last
        return None

    def copy(self, node: Node, args: tuple[Node, ...]) -> Node:
        """Return the value of another graph's node on other arguments; what the user did not name is numbered anew."""
        return self.add(node.op, args, node.dtype, None if re.fullmatch(r"t\d+", node.name) else node.name, node.line)

    def op(self, name: str, *args: Node) -> Node:
        """Return a closed op on nodes; the dtype of the result follows the op's rule."""
        rule = OPS[name].result
        dtype = {"bool": torch.bool, "int32": torch.int32}.get(rule, args[-1].dtype)
        return self.add(name, args, dtype)

    def convert(self, node: Node, dtype: torch.dtype) -> Node:
        return self.add("convert", (node,), dtype)

    def graph(self, outputs: Mapping[Any, Node]) -> Graph:
        by_role = {Role.of(role): node for role, node in outputs.items()}
        graph = Graph(self.core, self.inputs, by_role, self.nodes).select(by_role)
        verify(graph)
        return graph


def shape_of(role: Role) -> Shape:
    """Return the shape of an input."""
    return Shape.PARAM if role.kind is Kind.PARAM else Shape.NEURON


def elementwise(args: Iterable[Node]) -> Shape:
    """Return the shape of an elementwise op of these arguments."""
    return max((a.shape for a in args), default=Shape.NUMBER)


def verify(graph: Graph) -> None:
    """Raise if the graph is not made of closed ops in order, each obeying its dtype rule, of the shape that its arguments give."""
    seen = set(graph.inputs.values())
    if any(node.shape is not shape_of(Role.of(role)) for role, node in graph.inputs.items()):
        raise FlexSNError("internal: an input has not the shape of its role", core=graph.core)
    for node in graph.nodes:
        op = OPS.get(node.op)
        kinds = [a.dtype for a in node.args]
        same = len(set(kinds)) == 1
        ok = op is not None and len(node.args) == op.arity and {
            "same": same and node.dtype == kinds[0],
            "bool": same and node.dtype == torch.bool,
            "int32": same and node.dtype == torch.int32,
            "select": kinds[0] == torch.bool and set(kinds[1:]) == {node.dtype},
            "convert": True,
        }[op.result]  # fmt: skip
        floating = node.args[0].dtype.is_floating_point if node.args else False
        if ok and (floating if node.op in _OF_INTEGERS else node.op == "fma" and not floating):
            raise CoreError(f"`{node.op}` is not implemented for {str(kinds[0])[6:]}", core=graph.core, line=node.line)
        if not ok or node.shape is not elementwise(node.args) or any(a not in seen and a.op != "const" for a in node.args):
            raise FlexSNError(f"internal: `{node}` breaks the rules of the closed op set", core=graph.core, line=node.line)
        seen.add(node)


def interpret(graph: Graph, inputs: Mapping[Any, Tensor]) -> dict[Role, Tensor]:
    """Run one step by the eager meaning of every op; `inputs` and results by role."""
    device = next(iter(inputs.values())).device if inputs else torch.device("cpu")
    env: dict[Node, Tensor] = {node: inputs[role] for role, node in graph.inputs.items()}

    def get(node: Node) -> Tensor:
        return env[node] if node.op != "const" else torch.tensor(node.value, dtype=node.dtype, device=device)

    for node in graph.nodes:
        args = [get(a) for a in node.args]
        env[node] = args[0].to(node.dtype) if node.op == "convert" else OPS[node.op].eager(*args)
    return {role: get(node) for role, node in graph.outputs.items()}
