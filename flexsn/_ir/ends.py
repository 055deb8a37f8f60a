"""Steps that come to an end: a state counts down, and where it is 0 nothing happens any more."""

from __future__ import annotations

from .graph import Graph, Node, Shape
from .roles import Kind, Role, of_kind


def end_of(graph: Graph) -> Role | None:
    """Return the state that counts down to the end of a sequence, from where on outputs are 0 and all other states stay as they are.

    It is int32, one less after every step, and everything else that the step gives is chosen by whether it is more than 0.
    """
    for role in of_kind(graph.outputs, Kind.STATE):
        left, new = graph.inputs.get(role), graph.outputs[role]
        if left is not None and left.dtype == new.dtype and str(left.dtype) == "torch.int32" and _is(new, "sub", left, 1):
            others = {r: node for r, node in graph.outputs.items() if r is not role}
            if others and all(_stays(node, left, graph.inputs.get(r) if r.kind is Kind.STATE else None) for r, node in others.items()):
                return role
    return None


def stopping(vjp: Graph, end: Role) -> Graph:
    """Return a VJP by which nothing flows where the state `end` is 0 or less, whatever it computes there: 0 times infinity, say."""
    left, nodes, outputs = vjp.inputs.get(end), [*vjp.nodes], dict(vjp.outputs)
    going = next((n for n in vjp.nodes if left is not None and is_going(n, left)), None)
    for role, node in vjp.outputs.items() if going is not None else ():
        zero = Node("const", (), node.dtype, "0", 0, shape=Shape.NUMBER)
        other = vjp.inputs.get(role) if role.kind is Kind.STATE_GRAD else zero
        stops = node.op == "where" and node.args[0] is going and node.args[2].op == "const" and not node.args[2].value
        if role.kind.is_grad and other is not None and not (stops and other is zero) and node.op != "const":
            outputs[role] = Node("where", (going, node, other), node.dtype, f"{role}_going")  # type: ignore[arg-type]  # it was found
            nodes.append(outputs[role])
    return Graph(vjp.core, vjp.inputs, outputs, nodes)


def is_going(node: Node, left: Node) -> bool:
    """Return whether a node says that a sequence has not ended, of which so many steps are `left`."""
    return _is(node, "gt", left, 0)


def _is(node: Node, op: str, left: Node, number: int) -> bool:
    """Whether a node is `op(left, number)`."""
    return node.op == op and node.args[0] is left and node.args[1].op == "const" and node.args[1].value == number


def _stays(node: Node, left: Node, state: Node | None) -> bool:
    """Whether a node is the `state`, or 0 where there is none, unless `left > 0`."""
    if node.op != "where" or not is_going(node.args[0], left):
        return False
    other = node.args[2]
    return other is state if state is not None else other.op == "const" and not other.value
