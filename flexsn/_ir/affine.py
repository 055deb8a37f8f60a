"""Steps that are affine in some of their operands: `new = A carried + b`, where neither `A` nor `b` depends on what is carried.

The backward of nearly every core is so in the cotangents of states; the forward of some cores in the states. Then a walk over a part of
time is one matrix and one vector per neuron, whatever comes in at its start, and parts of time may be walked side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .graph import Builder, Graph, Node
from .roles import Kind, Role, of_kind

MOST_STATES = 4  # a matrix of theirs is carried beside them


def coupled(graph: Graph, carried: Sequence[Role]) -> set[tuple[int, int]] | Node:
    """Return the entries of `A`, over a number of steps, that are not zero everywhere; or a node by which the step is not affine."""
    reads: dict[Node, set[int]] = {graph.inputs[role]: {k} for k, role in enumerate(carried) if role in graph.inputs}
    for node in graph.nodes:
        found = set[int]().union(*(reads.get(a, ()) for a in node.args))
        if found and not _is_affine(node, [bool(reads.get(a)) for a in node.args]):
            return node
        reads[node] = found
    entries = {(row, column) for row, role in enumerate(carried) for column in reads.get(graph.outputs[role], ())}
    entries |= {(k, k) for k in range(len(carried))}
    while more := {(a, d) for a, b in entries for c, d in entries if b == c} - entries:
        entries |= more
    return entries


def _is_affine(node: Node, depends: Sequence[bool]) -> bool:
    """Whether a node is affine in those of its arguments that depend on what is carried."""
    if not node.dtype.is_floating_point:
        return False
    match node.op:
        case "add" | "sub" | "neg":
            return True
        case "mul":
            return not all(depends)
        case "div":
            return not depends[1]
        case "where":
            return not depends[0]
        case "fma":
            return not (depends[0] and depends[1])
        case "convert":
            return node.args[0].dtype.is_floating_point
        case _:
            return False


def with_matrix(graph: Graph, carried: Sequence[Role], entries: Sequence[tuple[int, int]]) -> tuple[Graph, list[Role]]:
    """Return the step that carries the entries of `A`, multiplied over time, beside `b`; and their roles, of the kind of `carried`.

    It computes no more of the step's outputs than what is carried, and, of a walk back, the states.
    """
    builder, new = Builder(graph.core), dict[Node, Node]()
    for role, node in graph.inputs.items():
        new[node] = builder.input(role, node.dtype, node.name)
    for node in graph.nodes:
        new[node] = builder.copy(node, tuple(_get(builder, new, a) for a in node.args))
    kept = [*carried, *(role for role in of_kind(graph.outputs, Kind.STATE) if role not in carried)]
    outputs = {role: _get(builder, new, graph.outputs[role]) for role in kept}
    roles = [Role(carried[0].kind, len(carried) + place) for place in range(len(entries))]
    for column in range(len(carried)):
        rows = {row: role for (row, of), role in zip(entries, roles, strict=True) if of == column}
        tangents = {}
        for row, role in rows.items():
            node = graph.outputs[carried[row]]
            value = builder.input(role, node.dtype, f"d{row}{column}")
            if carried[row] in graph.inputs:
                tangents[graph.inputs[carried[row]]] = value
        _push(builder, graph, new, tangents)
        for row, role in rows.items():
            node = graph.outputs[carried[row]]
            outputs[role] = tangents.get(node) or builder.const(0, node.dtype)
    return builder.graph({role: outputs[role] for role in (*kept, *roles)}), roles


def _get(builder: Builder, new: Mapping[Node, Node], node: Node) -> Node:
    return builder.const(node.value, node.dtype) if node.op == "const" else new[node]


def _push(builder: Builder, graph: Graph, new: Mapping[Node, Node], tangents: dict[Node, Node]) -> None:
    """Add to the tangents of a step's operands those of its affine nodes."""

    def value(place: int) -> Node:
        return _get(builder, new, node.args[place])

    def times(tangent: Node | None, place: int) -> Node | None:
        return tangent and builder.op("mul", tangent, value(place))

    def plus(a: Node | None, b: Node | None, op: str = "add") -> Node | None:
        return builder.op(op, a, b) if a and b else a or (b if op == "add" or b is None else builder.op("neg", b))

    for node in graph.nodes:
        a, b, c = (*(tangents.get(arg) for arg in node.args), None, None)[:3]
        match node.op:
            case "add" | "sub":
                made = plus(a, b, node.op)
            case "neg":
                made = plus(None, a, "sub")
            case "mul":
                made = times(a, 1) or times(b, 0)
            case "div":
                made = a and builder.op("div", a, value(1))
            case "fma":
                made = plus(times(a, 1) or times(b, 0), c)
            case "where":
                zero = builder.const(0, node.dtype)
                made = builder.op("where", value(0), b or zero, c or zero) if b or c else None
            case "convert":
                made = a and builder.convert(a, node.dtype)
            case _:  # it does not depend on what is carried
                made = None
        if made is not None:
            tangents[node] = made
