"""The components of a graph of what is made of what."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

Node = TypeVar("Node", bound=Any)  # that can be sorted


def strongly_connected(made_of: Mapping[Node, Collection[Node]]) -> list[list[Node]]:
    """Return the strongly connected components of a graph, what others are made of first: Tarjan's algorithm."""
    index, low, stack, found = dict[Node, int](), dict[Node, int](), list[Node](), list[list[Node]]()

    def visit(node: Node) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(made_of[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for node in made_of:
        if node not in index:
            visit(node)
    return found
