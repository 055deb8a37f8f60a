"""Sizes of traced tensors: numbers for the symbolic ones, so that a core can be captured while they stay open."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .._torch.tensors import is_symbolic, size_expression, size_hint
from ..errors import FlexSNError
from .captured import Blueprint

_FIRST = 1009  # a size that nobody's layer has


class Sizes:
    """Numbers for sizes. A symbolic size gets one of its own, equal ones the same; or, if `hints`, the size that it has in this
    trace, which is not bound to it by that."""

    def __init__(self, hints: bool = False):
        self.hints = hints
        self._numbers: dict[str, int] = {}

    def of(self, shape: Sequence[int], exact: bool = False) -> tuple[int, ...]:
        """Return numbers for sizes; `exact`: the sizes that they have, to which the trace is then bound."""
        return exactly(shape) if exact else tuple([self._number(n) for n in shape])

    def _number(self, size: int) -> int:
        if not is_symbolic(size):
            return int(size)
        if self.hints:
            return size_hint(size)
        return self._numbers.setdefault(size_expression(size), _FIRST + 2 * len(self._numbers))


def exactly(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes as numbers, to which the trace is bound."""
    return tuple([int(n) for n in shape])


def settle_sizes(draw: Callable[[Sizes], Blueprint], shapes: Sequence[Sequence[int]]) -> Blueprint:
    """Return what `draw` gives with the symbolic sizes among these step shapes left open; where the core depends on one, with the
    sizes that they have, to which the trace is then bound (and not where it fails, and something else runs the core)."""
    if any(is_symbolic(n) for s in shapes for n in s):
        try:
            blueprint = draw(Sizes())
        except FlexSNError:  # sizes that must be equal, or a number that the core holds
            blueprint = None
        if blueprint is not None and stays_open(blueprint, shapes):
            return blueprint
    blueprint = draw(Sizes(hints=True))
    for shape in shapes:
        exactly(shape)
    return blueprint


def stays_open(blueprint: Blueprint, shapes: Sequence[Sequence[int]]) -> bool:
    """Return whether the core depends on no symbolic size among these step shapes."""
    rank = len(blueprint.step)
    return all(not is_symbolic(n) or rank - len(s) + d in blueprint.free_dims for s in shapes for d, n in enumerate(s))
