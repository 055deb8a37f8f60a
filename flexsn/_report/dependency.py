"""From a step graph to its drawing: values without a name of their own are folded into those that have one."""

from __future__ import annotations

import ast
import re

from .._capture.signature import Signature
from .._ir.graph import Node
from .._ir.roles import Kind, Role, roles
from .._program.compiled import Program
from .hoisted import label_of
from .model import Drawing


def drawing_of(program: Program, sig: Signature) -> Drawing:
    """Boxes for operands, for values that the user named, and for what a step returns; edges where one needs the other."""
    drawing, step = Drawing(), program.graph
    behind: dict[Node, tuple[str, ...]] = {}  # keys of the boxes from which a value comes: its own, or the nearest
    for role, node in step.inputs.items():
        behind[node] = (role,)
        drawing.boxes[role] = _operand(program, sig, role)
    for role, name in zip(roles(Kind.STATE, sig.num_states), sig.state_names, strict=True):  # the step need not read them all
        drawing.boxes.setdefault(role, (name, "state"))
    for node in step.nodes:
        behind[node] = tuple(dict.fromkeys(key for arg in node.args for key in behind.get(arg, ())))
        label = _users_name(node)
        if label is not None:
            key = f"n:{node.name}"
            drawing.boxes[key] = (label, "value")
            drawing.edges += [(source, key) for source in behind[node]]
            behind[node] = (key,)
    for role, node in step.outputs.items():
        drawing.boxes[f"out:{role}"] = _returned(program, sig, role)
        drawing.edges += [(source, f"out:{role}") for source in behind.get(node, ())]  # a constant comes from nowhere
    return drawing


def _operand(program: Program, sig: Signature, role: Role) -> tuple[str, str]:
    if role.kind is Kind.PARAM:
        return label_of(program.params[role]), "param"
    names, kind = (sig.input_names, "input") if role.kind is Kind.INPUT else (sig.state_names, "state")
    return names[role.number], kind


def _returned(program: Program, sig: Signature, role: Role) -> tuple[str, str]:
    if role.kind is Kind.STATE:
        return sig.state_names[role.number], "next"
    return "output" if program.num_outputs == 1 else f"output {role.number}", "output"


def _users_name(node: Node) -> str | None:
    """What the user calls a value; in a graph names are told apart by a number at the end, and from words of C++ by `_`."""
    if re.fullmatch(r"t\d+(_\d+)?", node.name):
        return None
    base = re.sub(r"_\d+$", "", node.name)
    for name in (node.name, base, base.removesuffix("_")):
        if found := re.search(rf": ({re.escape(name)}\s*[:=].*)", node.line or ""):
            return None if _of_several(found[1]) else name
    return node.name


def _of_several(statement: str) -> bool:
    """Whether it gives one name to several values, as `gates = [...]` does: which of them a node is cannot be told."""
    try:
        (parsed,) = ast.parse(statement).body
    except (SyntaxError, ValueError):
        return False
    value = getattr(parsed, "value", None)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("dict", "list", "tuple"):
        return True
    return isinstance(value, (ast.Dict, ast.DictComp, ast.GeneratorExp, ast.List, ast.ListComp, ast.Tuple))
