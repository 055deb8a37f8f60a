"""A graph as lines of code: what C++ and Triton share."""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .._ir.graph import HALF, Graph, Node
from .._plan.plan import Array, KernelPlan
from .._version import __version__

_DEEPEST = 50  # expressions in one another: each has up to four brackets, and Python reads 200, clang 256
_EXACT = {"where", "neg", "abs", "maximum", "minimum", "fmax", "fmin", "sign", "floor", "ceil", "trunc", "round"}


@dataclass(frozen=True)
class Language:
    """How a language writes values.

    Attributes:
        template: the text of a node's op, with `{0} {1} {2}` for arguments and `{T}` for the result's type.
        types: names of the types in which dtypes are computed.
        rounding: per 16-bit dtype, how a value computed in float32 is rounded to it.
        constant: a constant argument, given the node that takes it.
        declare: one line, of `{type} {name} {text}`.
        comment: what a comment begins with.
    """

    template: Callable[[Node], str]
    types: Mapping[torch.dtype, str]
    rounding: Mapping[torch.dtype, str]
    constant: Callable[[Node, Node], str]
    declare: str
    comment: str

    def statements(self, graph: Graph) -> list[str]:
        """Return one line per value; what is used once, by the same user line, is written into its use, up to `_DEEPEST` in one another."""
        uses = Counter(a for n in graph.nodes for a in n.args) + Counter(graph.outputs.values())
        inlined: dict[Node, str] = {}
        depth: dict[Node, int] = {}  # of what is written into a use
        consumer = {a: n for n in graph.nodes for a in n.args}
        lines = []
        shown = None
        for node in graph.nodes:
            text = self._expression(node, inlined)
            user, within = consumer.get(node), 1 + max((depth.get(a, 0) for a in node.args), default=0)
            once = user is not None and uses[node] == 1 and user.line == node.line
            if once and within < _DEEPEST and self._inlinable(node, user):  # type: ignore[arg-type]  # there is a user
                depth[node] = within
                inlined[node] = text if _is_call(self.template(node)) and node.dtype not in HALF else f"({text})"
                continue
            where = f"  {self.comment} {where_of(node.line)}" if node.line and node.line != shown else ""
            shown = node.line or shown
            lines.append(self.declare.format(type=self.types[node.dtype], name=node.name, text=text) + where)
        return lines

    def _expression(self, node: Node, inlined: dict[Node, str]) -> str:
        template = self.template(node)
        args = [self.constant(a, node) if a.op == "const" else inlined.get(a, a.name) for a in node.args]
        text = template.format(*args, T=self.types[node.dtype])
        return self.rounding[node.dtype].format(text) if node.dtype in HALF and node.op not in _EXACT else text

    def _inlinable(self, node: Node, user: Node) -> bool:
        """Return whether a value may be written into its use. Small integers would be promoted inside an expression; a template may
        name an argument twice; in an arm of a select it would be a branch, and the loop no vector loop."""
        index = user.args.index(node)
        if re.fullmatch(r"t\d+", node.name) is None or (user.op == "where" and index > 0):
            return False
        plain = (torch.float32, torch.float64, torch.bool)
        return node.dtype in plain and user.dtype in plain and self.template(user).count(f"{{{index}}}") == 1


_IN_TEXT = {"0.0", "-0.0", "1.0", "-1.0", "inf", "-inf", "nan"}  # numbers that a formula has whatever its constants are


@functools.lru_cache(256)
def numbers(plan: KernelPlan) -> dict[Node, str]:
    """Return the constants that are arguments of a kernel, and their names there: `LIF(tau=2.0)` and `LIF(tau=3.0)` run one kernel."""
    graphs = [g for g in (plan.step, plan.advance) if g is not None and not g.written] if plan.numbers else []
    taken = {n.name for g in graphs for n in [*g.nodes, *g.inputs.values()]}
    names = (name for k in itertools.count() if (name := f"k{k}") not in taken)
    used = dict.fromkeys(a for g in graphs for n in g.nodes for a in n.args if a.op == "const" and a.dtype.is_floating_point)
    return {a: next(names) for a in used if repr(a.value) not in _IN_TEXT}


def values(plan: KernelPlan) -> tuple[float, ...]:
    """Return the values of `numbers(plan)`, in order."""
    return tuple([node.value for node in numbers(plan)])


def title(plan: KernelPlan, comment: str) -> list[str]:
    """Return the first lines of a kernel: what it is, and what it moves."""
    listed = {t: ", ".join(_label(plan, a) for a in plan.used(arrays) if a.kind in ("sequence", "checkpoint")) or "nothing"
              for t, arrays in (("reads", plan.reads), ("writes", plan.writes))}  # fmt: skip
    what = f"{plan.direction}, T steps of N neurons, in chunks of {plan.chunk}"
    what += f", {'A and b of ' if plan.matrix else ''}parts of time side by side" if plan.over_parts else ""
    return [
        f"{comment} {safe(plan.core)}: {what}. Generated by flexsn {__version__}.",
        f"{comment} per neuron-step: reads {plan.bytes_per_step(plan.reads):g} B ({listed['reads']}),"
        f" writes {plan.bytes_per_step(plan.writes):g} B ({listed['writes']})",
    ]


def _label(plan: KernelPlan, a: Array) -> str:
    node = plan.step.inputs.get(a.role) or plan.step.outputs.get(a.role)
    return f"{a.role} = {node.name}" if node is not None and node.op != "const" and node.name != a.role else a.role


def _is_call(template: str) -> bool:
    return re.fullmatch(r"[\w:.]+(<[^()]*>)?\([^()]*(\([^()]*\)[^()]*)*\)", template) is not None


def where_of(line: str) -> str:
    """Return `file.py:12: h = v + x` of a source line, as it may stand in a comment."""
    place, _, code = line.partition(": ")
    text = f"{os.path.basename(place)}: {code}" if code else os.path.basename(place)
    return re.sub(r"[^\x20-\x7e]|\\|\?\?", "_", text)[:110].rstrip()


def safe(text: str) -> str:
    """Return a core's name as it may stand in a comment."""
    return re.sub(r"[^\w.]", "_", text, flags=re.ASCII)[:80]
