"""A graph as lines of code: what C++ and Triton share."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .graph import HALF, Graph, Node

_EXACT = {"where", "neg", "abs", "maximum", "minimum", "fmax", "fmin", "sign", "floor", "ceil", "trunc", "round"}


@dataclass(frozen=True)
class Language:
    """How a language writes values.

    Attributes:
        template: the text of a node's op, with `{0} {1} {2}` for arguments and `{T}` for the result's type.
        types: names of the types in which dtypes are computed.
        rounding: per 16-bit dtype, how a value computed in float32 is rounded to it.
        constant: a constant argument, given the template of the op that takes it.
        declare: one line, of `{type} {name} {text}`.
        comment: what a comment begins with.
    """

    template: Callable[[Node], str]
    types: Mapping[torch.dtype, str]
    rounding: Mapping[torch.dtype, str]
    constant: Callable[[Node, str], str]
    declare: str
    comment: str

    def statements(self, graph: Graph) -> list[str]:
        """One line per value; what is used once, by the same user line, is written into its use."""
        uses = Counter(a for n in graph.nodes for a in n.args) + Counter(graph.outputs.values())
        inlined: dict[Node, str] = {}
        consumer = {a: n for n in graph.nodes for a in n.args}
        lines = []
        shown = None
        for node in graph.nodes:
            text = self._expression(node, inlined)
            user = consumer.get(node)
            if user is not None and uses[node] == 1 and user.line == node.line and self._inlinable(node, user):
                inlined[node] = text if _is_call(self.template(node)) and node.dtype not in HALF else f"({text})"
                continue
            where = f"  {self.comment} {where_of(node.line)}" if node.line and node.line != shown else ""
            shown = node.line or shown
            lines.append(self.declare.format(type=self.types[node.dtype], name=node.name, text=text) + where)
        return lines

    def _expression(self, node: Node, inlined: dict[Node, str]) -> str:
        template = self.template(node)
        args = [self.constant(a, template) if a.op == "const" else inlined.get(a, a.name) for a in node.args]
        text = template.format(*args, T=self.types[node.dtype])
        return self.rounding[node.dtype].format(text) if node.dtype in HALF and node.op not in _EXACT else text

    def _inlinable(self, node: Node, user: Node) -> bool:
        """Small integers would be promoted inside an expression; a template may name an argument twice; in an arm of a
        select it would be a branch, and the loop no vector loop."""
        index = user.args.index(node)
        if re.fullmatch(r"t\d+", node.name) is None or (user.op == "where" and index > 0):
            return False
        plain = (torch.float32, torch.float64, torch.bool)
        return node.dtype in plain and user.dtype in plain and self.template(user).count(f"{{{index}}}") == 1


def _is_call(template: str) -> bool:
    return re.fullmatch(r"[\w:.]+(<[^()]*>)?\([^()]*(\([^()]*\)[^()]*)*\)", template) is not None


def where_of(line: str) -> str:
    """`file.py:12: h = v + x` of a source line, as it may stand in a comment."""
    place, _, code = line.partition(": ")
    text = f"{os.path.basename(place)}: {code}" if code else os.path.basename(place)
    return re.sub(r"[^\x20-\x7e]|\\|\?\?", "_", text)[:110].rstrip()


def safe(text: str) -> str:
    """A core's name as it may stand in a comment."""
    return re.sub(r"[^\w.]", "_", text, flags=re.ASCII)[:80]
