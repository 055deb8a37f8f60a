"""What PyTorch computes once per call around the kernels: the prologue before them, and the epilogue after a backward.

Both are cut from one ATen graph over params, captured tensors, constants of the core and, of a VJP, sums over time (`StaticGraph`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from .._capture.graph_writer import getitem
from .._capture.trace import Trace
from .._ir.graph import Graph, exists, vanishes
from .._ir.roles import Kind, Role
from .._torch.capture import made_under_modes
from .._torch.tensors import is_view
from .._torch.transforms import transforms_or_modes_active

Replaced = Mapping[fx.Node, "fx.Node | None"]  # what stands for a node where cotangents are absent; None where nothing is left
_NOTHING: Replaced = MappingProxyType({})


@dataclass
class StaticGraph:
    """The part of a recorded core that does not depend on time, and what follows the sums over time.

    Attributes:
        graph: placeholders, then ops; their `meta` has `kind` (`static`, `reduced`, or `step` of a sum), `val`, `line` and, of what was
            made from cotangents, their roles as `of`.
        operands: placeholders of params and captured tensors, by name.
        constants: placeholders of tensors that the core made from Python values, and these.
        sums: placeholders of values that a backward kernel sums over time, by the role of the sum.
        params: values that the kernel loads, by role.
        grads: gradients of params, then of captured tensors; None where there is none.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    operands: dict[str, fx.Node] = field(default_factory=dict)
    constants: dict[fx.Node, Tensor] = field(default_factory=dict)
    sums: dict[Role, fx.Node] = field(default_factory=dict)
    params: dict[Role, fx.Node] = field(default_factory=dict)
    grads: list[fx.Node | None] = field(default_factory=list)


def static_graph(
    recorded: Trace, params: Mapping[Role, fx.Node], grads: Sequence[fx.Node | None] = (), leaves: Mapping[str, Role] = MappingProxyType({})
) -> StaticGraph:
    """Return the static graph of a recorded core.

    Args:
        params: recorded nodes that the kernel loads.
        grads: recorded gradients of params and captured tensors.
        leaves: roles of placeholders that depend on time, by name.
    """
    sums = {node: Role(Kind.PARAM_GRAD, k) for k, node in enumerate(frontier(grads))}
    live = _behind([*params.values(), *[g for g in grads if g is not None]], sums)
    made, copies = StaticGraph(), dict[fx.Node, fx.Node]()
    placeholders = [n for n in recorded.graph.nodes if n in live and n.op == "placeholder" and n not in sums]
    for node in [*placeholders, *sums]:
        copies[node] = made.graph.placeholder(node.name)
    for node in recorded.graph.nodes:
        if node in live and node not in copies and node.op == "call_function":
            copies[node] = made.graph.node_copy(node, copies.__getitem__)
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
        if "of" in node.meta:
            copy.meta["of"] = [leaves[name] for name in node.meta["of"]]
    for node in placeholders:
        name = node.meta["role"]
        if name in recorded.constants:
            made.constants[copies[node]] = recorded.constants[name]
        else:
            made.operands[name] = copies[node]
    made.sums = {role: copies[node] for node, role in sums.items()}
    made.params = {role: copies[node] for role, node in params.items()}
    made.grads = [None if g is None else copies[g] for g in grads]
    return made


def parts_of_one(params: Mapping[Role, fx.Node]) -> dict[Role, Role]:
    """Return, for each param that is one of the values along a dim of a tensor, the first param that is another, if there is one."""
    first, found = dict[fx.Node, Role](), dict[Role, Role]()
    for role, node in params.items():
        if node.target is getitem and node.all_input_nodes[0].target is torch.ops.aten.unbind.int:
            leader = first.setdefault(node.all_input_nodes[0], role)
            found |= {role: leader} if leader is not role else {}
    return found


def frontier(grads: Sequence[fx.Node | None], replaced: Replaced = _NOTHING) -> list[fx.Node]:
    """Return the step values from which gradients of params are computed: what the kernel sums over time."""
    found: dict[fx.Node, None] = {}
    stack = [g for g in reversed(grads) if g is not None]
    seen = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.meta["kind"] == "step":
            found[node] = None
        elif node.meta["kind"] == "reduced":
            stack.extend(n for n in (replaced.get(n, n) for n in reversed(node.all_input_nodes)) if n is not None)
    return list(found)


def _behind(results: Iterable[fx.Node], ends: Iterable[fx.Node], replaced: Replaced = _NOTHING) -> set[fx.Node]:
    """Return what results are computed from, themselves included; nothing behind `ends`."""
    live, stack, stops = set[fx.Node](), list(results), set(ends)
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            if node not in stops:
                stack.extend(n for n in (replaced.get(n, n) for n in node.all_input_nodes) if n is not None)
    return live


class StaticModule:
    """A part of a static graph, prologue or epilogue, that PyTorch runs once per call; its results have names."""

    def __init__(
        self, module: Callable | None, operands: Sequence[str], constants: Sequence[Tensor], sums: Sequence[Role], results: Sequence
    ):
        self.module, self.operands, self.constants, self.sums, self.results = module, operands, constants, tuple(sums), results

    @property
    def nodes(self) -> list[fx.Node]:
        """Its ops, in order."""
        graph = getattr(self.module, "__self__", None)  # `module` is the `forward` of a `GraphModule`
        return [] if graph is None else [n for n in graph.graph.nodes if n.op == "call_function"]

    def passed(self, results: Sequence[str]) -> list[str] | None:
        """Return the names of the operands that these results are, if nothing is computed for them."""
        if not results:
            return []
        graph = self.module.__self__.graph  # type: ignore[union-attr]  # as in `nodes`
        names = dict(zip(graph.find_nodes(op="placeholder"), self.operands, strict=False))  # constants and sums come after these
        found = dict(zip(self.results, graph.output_node().args[0], strict=True))
        return [names[found[role]] for role in results] if all(found[role] in names for role in results) else None

    def __call__(self, statics: dict[str, Tensor], sums: Sequence[Tensor] = ()) -> dict[Any, Tensor]:
        if self.module is None:
            return {}
        constants = made_under_modes(self.constants) if transforms_or_modes_active() else self.constants
        values = self.module(*[statics[name] for name in self.operands], *constants, *sums)
        return dict(zip(self.results, values, strict=True))


def cut(static: StaticGraph, results: Mapping[Any, fx.Node], replaced: Replaced = _NOTHING, *, apart: bool = False) -> StaticModule:
    """Return the part of a static graph that computes `results`, with `replaced[node]` in place of a node.

    Args:
        apart: results share no memory with each other or with what they are computed from.
    """
    if not results:
        return StaticModule(None, (), (), (), ())
    live = _behind(results.values(), static.sums.values(), replaced)
    operands = {name: n for name, n in static.operands.items() if n in live}
    constants = {n: value for n, value in static.constants.items() if n in live}
    sums = {role: n for role, n in static.sums.items() if n in live}
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for i, node in enumerate([*operands.values(), *constants, *sums.values()]):
        copies[node] = graph.placeholder(f"a{i}")
    for node in static.graph.nodes:
        if node in live and node not in copies:
            copies[node] = graph.node_copy(node, lambda n: copies[replaced.get(n) or n])
            if node.target is torch.ops.aten.view.default:  # what the trace took for one may lie otherwise in a call
                copies[node].target = torch.ops.aten.reshape.default
    found = [copies[n] for n in results.values()]
    graph.output(tuple(_apart(graph, found, [copies[n] for n in sums.values()]) if apart else found))
    module = fx.GraphModule(torch.nn.Module(), graph)
    return StaticModule(module.forward, list(operands), list(constants.values()), list(sums), list(results))


def _apart(graph: fx.Graph, values: Sequence[fx.Node], sums: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the values, each in memory of its own, since autograd adds to a gradient in place. It copies what two tensors have for
    their gradient, but sees no view of it."""
    holders: dict[fx.Node, fx.Node] = {}
    found = list[fx.Node]()
    for value in values:
        memory = value
        while memory.op == "call_function" and (memory.target is getitem or is_view(memory.target)):
            memory = memory.all_input_nodes[0]
        lent = memory.op == "placeholder" and memory not in sums
        own = holders.setdefault(memory, value) is value and not lent
        found.append(value if own else graph.call_function(torch.ops.aten.clone.default, (value,)))
    return found


def without_cotangents(static: StaticGraph, step: Graph, given: Sequence[Role]) -> dict[fx.Node, fx.Node | None]:
    """Return what nodes of the epilogue come to where some outputs have no cotangent: nothing, or what is left of a sum. As in
    autograd, nothing flows back from there, not even zeros (which an infinite derivative would make NaN).

    Args:
        step: the VJP's graph, whose outputs are the sums.
        given: roles of the cotangents that there are.
    """
    left, sums = step.for_cotangents(given).outputs, set(static.sums.values())
    replaced: dict[fx.Node, fx.Node | None] = {}
    for role, node in static.sums.items():
        before = step.outputs[role]
        if left[role].op == "const" and (before.op != "const" or vanishes(before, given)):
            replaced[node] = None
    for node in static.graph.nodes:
        made_of = node.meta.get("of", ()) if node.meta["kind"] == "static" else ()
        if made_of and not any(exists(role, given) for role in made_of):
            replaced[node] = None
    for node in static.graph.nodes if replaced else ():
        if node in replaced or node.meta["kind"] not in ("static", "reduced"):
            continue
        terms = [n for n in node.all_input_nodes if n in sums or n in replaced or n.meta["kind"] == "reduced" or "nil" in n.meta]
        live = [n for n in (replaced.get(n, n) for n in terms) if n is not None]
        if terms and not live:
            replaced[node] = None
        elif len(live) < len(terms):
            if node.target is not torch.ops.aten.add.Tensor or live[0].meta["val"].shape != node.meta["val"].shape:
                return {}  # zeros serve
            replaced[node] = live[0]
    return replaced
