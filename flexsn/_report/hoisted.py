"""The ATen ops of a recorded graph as text: in the user's names, and short enough for a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from .._capture.graph_writer import getitem
from .._program.static_parts import StaticModule
from .model import Op

_LONGEST_LABEL = 28


def op_of(node: fx.Node, names: Mapping[str, str]) -> Op:
    """An op, its arguments renamed where `names` has another name for them."""
    if node.target is getitem:
        return Op(node.name, "{}[{}]".format(*[_argument(a, names) for a in node.args]), node.meta["kind"], node.meta.get("line"))
    given = [_argument(a, names) for a in node.args] + [f"{k}={_argument(v, names)}" for k, v in node.kwargs.items()]
    return Op(node.name, f"{node.target}({', '.join(given)})", node.meta.get("kind", "static"), node.meta.get("line"))


def _argument(value: Any, names: Mapping[str, str]) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(v, names) for v in value)}]"
    if isinstance(value, fx.Node):
        return _user_name(value.meta["role"]) if "role" in value.meta else names.get(value.name, value.name)
    return str(value)


def hoisted_ops(module: StaticModule, sums: Sequence[str]) -> list[Op]:
    """What PyTorch runs once per call. `sums`: roles of the sums over time that an epilogue takes."""
    operands = [_user_name(n) for n in module.operands] + ["a constant"] * len(module.constants) + [f"sum_over_T({r})" for r in sums]
    names = {f"a{i}": name for i, name in enumerate(operands)}
    return [op_of(node, names) for node in module.nodes]


def label_of(node: fx.Node) -> str:
    """A static value as an expression, or the name of its op where that is long."""
    text = _expression(node)
    node = node.all_input_nodes[0] if node.target is getitem else node
    return text if len(text) <= _LONGEST_LABEL else f"{_op_name(node)}(...)"


def _expression(value: Any) -> str:
    if not isinstance(value, fx.Node):
        return str(value)
    if value.op == "placeholder":
        return _user_name(value.meta["role"])
    if value.target is getitem:
        return "{}[{}]".format(*map(_expression, value.args))
    return f"{_op_name(value)}({', '.join(map(_expression, value.args))})"


def _op_name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]


def _user_name(path: str) -> str:
    return path.removeprefix("core.")
