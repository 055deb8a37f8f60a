"""`NIRNetwork`: modules as nodes of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter

import torch
from torch import Tensor, nn

from ..errors import InterchangeError
from .layers import Feedback

Edge = tuple[str, str]


class NIRNetwork(nn.Module):
    """A graph of modules; `[T, B, *shape]` to the same. Several edges into a node add up.

    Without cycles each node runs over the whole sequence. With a cycle all nodes run step by step, and in each cycle an edge
    that leaves a neuron carries its output of the step before, at first zeros; `flexsn.reset_net` forgets it, as it does the
    states of the neurons.

    Attributes:
        nodes: the modules, by node name with `.` as `_`.
        edges: pairs of node names.
        dt: length of a step in seconds.
    """

    def __init__(self, nodes: Mapping[str, nn.Module], edges: Iterable[Edge], neurons: Mapping[str, tuple[int, ...]], dt: float):
        """`neurons`: the shapes of one step of those nodes that are neurons."""
        super().__init__()
        self.edges = tuple((_key(a), _key(b)) for a, b in edges)
        self.nodes = nn.ModuleDict({_key(name): module for name, module in nodes.items()})
        self.dt = dt
        shapes = {_key(name): shape for name, shape in neurons.items()}
        targets, sources = {b for _, b in self.edges}, {a for a, _ in self.edges}
        firsts, lasts = [n for n in self.nodes if n not in targets], [n for n in self.nodes if n not in sources]
        if len(firsts) != 1 or len(lasts) != 1:
            raise InterchangeError(f"the graph begins at {firsts} and ends at {lasts}; flexsn takes one input and one output")
        self.first, self.last = firsts[0], lasts[0]
        reached, closing = depth_first(self.nodes, self.edges, self.first)
        if lost := self.nodes.keys() - reached:
            raise InterchangeError(f"nodes {sorted(lost)} are not reached from the input")
        late = leaving_neurons(self.edges, closing, shapes)
        waits = {n: [a for a, b in self.edges if b == n and (a, b) not in late] for n in self.nodes}
        self.order = list(TopologicalSorter(waits).static_order())
        self.into = waits
        self.feedback: dict[Edge, Feedback] = {edge: Feedback(shapes[edge[0]]) for edge in sorted(late)}
        self.loops = nn.ModuleList(self.feedback.values())  # `reset_net` finds them here

    def forward(self, x: Tensor) -> Tensor:
        """`[T, B, *shape]` to `[T, B, *shape]`."""
        if not self.feedback:
            return self._run(x)
        return torch.cat([self._run(step) for step in x.split(1)])

    def _run(self, x: Tensor) -> Tensor:
        values: dict[str, Tensor] = {}
        for name in self.order:
            arriving = [x] if name == self.first else [values[a] for a in self.into[name]]
            arriving += [last(x) for (_, b), last in self.feedback.items() if b == name]
            values[name] = self.nodes[name](sum(arriving[1:], arriving[0]))
        for (a, _), last in self.feedback.items():
            last.put(values[a])
        return values[self.last]


def _key(name: str) -> str:
    return name.replace(".", "_")


def depth_first(nodes: Iterable[str], edges: Iterable[Edge], first: str) -> tuple[set[str], set[Edge]]:
    """The nodes that `first` leads to, and the edges that close cycles, in the order of the edges."""
    follow: dict[str, list[str]] = {n: [] for n in nodes}
    for a, b in edges:
        follow[a].append(b)
    reached, on_path, closing = {first}, {first}, set()
    path = [(first, iter(follow[first]))]
    while path:
        name, rest = path[-1]
        after = next(rest, None)
        if after is None:
            path.pop()
            on_path.discard(name)
        elif after in on_path:
            closing.add((name, after))
        elif after not in reached:
            reached.add(after)
            on_path.add(after)
            path.append((after, iter(follow[after])))
    return reached, closing


def leaving_neurons(edges: tuple[Edge, ...], closing: set[Edge], neurons: Mapping[str, object]) -> set[Edge]:
    """Edges that break the same cycles, moved back to where they leave a neuron."""
    late, seen, todo = set(), set(), list(closing)
    while todo:
        source, target = edge = todo.pop()
        if source in neurons:
            late.add(edge)
        elif edge not in seen:
            seen.add(edge)
            ahead = depth_first({n for e in edges for n in e}, edges, target)[0]
            before = [(a, b) for a, b in edges if b == source and a in ahead]
            if source in ahead and source == target:
                raise InterchangeError(f"node `{source}` feeds itself without a neuron in between")
            todo += before
    if not late and closing:
        raise InterchangeError(f"a cycle through {sorted({n for e in closing for n in e})} holds no neuron")
    return late
