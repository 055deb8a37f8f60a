"""Roles: what a value is to a step. The keys of a graph's inputs and outputs, of a plan's arrays, of a call's operands."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum


class Kind(Enum):
    """The kinds of roles; the value is how a role of the kind prints, before its number."""

    INPUT = "x"
    STATE = "v"  # before the step among inputs, after it among outputs; of a whole call the initial and the final one
    PARAM = "p"  # loaded once: a param, or what is computed from params and captured tensors before the kernel runs
    OUTPUT = "y"
    STATES = "s"  # the states of every step
    CHECKPOINT = "c"  # the states at the starts of chunks
    INPUT_GRAD = "gx"
    STATE_GRAD = "gv"
    PARAM_GRAD = "gp"  # summed over time
    STORED = "w"  # a value of every step that a backward stores for the epilogue
    OUTPUT_GRAD = "gy"
    STATES_GRAD = "gs"

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is that of the name, computed in Python

    @property
    def is_grad(self) -> bool:
        return self.value[0] == "g"


class Role(str):
    """A kind and a number: `Role(Kind.STATE, 0)`. It is a string, `v0`, so that it prints and travels as one; nothing takes it apart.

    Attributes:
        kind: what it is.
        number: which of its kind, from 0.
    """

    __slots__ = ("kind", "number")
    kind: Kind
    number: int

    def __new__(cls, kind: Kind, number: int) -> Role:
        role = super().__new__(cls, f"{kind.value}{number}")
        role.kind, role.number = kind, number
        return role

    def __getnewargs__(self) -> tuple[Kind, int]:  # type: ignore[override]  # of copies and pickles
        return self.kind, self.number

    def to(self, kind: Kind) -> Role:
        """The role of another kind with this number: the checkpoint of a state, the sequence of its values."""
        return Role(kind, self.number)

    @property
    def grad(self) -> Role:
        """The role of the gradient of a value, or of its cotangent."""
        return Role(_GRADS[self.kind], self.number)

    @property
    def primal(self) -> Role:
        """The role of what a gradient belongs to."""
        return Role(_PRIMALS[self.kind], self.number)

    @staticmethod
    def of(text: str) -> Role:
        """The role that a text names: `gv0`.

        Raises:
            ValueError: it names none.
        """
        if isinstance(text, Role):
            return text
        found = re.fullmatch(r"(g?[a-z])(0|[1-9]\d*)", text)
        if found is None or found[1] not in _KINDS:
            raise ValueError(f"{text!r} is no role")
        return Role(_KINDS[found[1]], int(found[2]))


_KINDS = {k.value: k for k in Kind}
_PRIMALS = {k: Kind(k.value[1:]) for k in Kind if k.is_grad}
_GRADS = {primal: grad for grad, primal in _PRIMALS.items()}


def roles(kind: Kind, count: int) -> tuple[Role, ...]:
    """The first `count` roles of a kind."""
    return tuple([Role(kind, k) for k in range(count)])


def of_kind(found: Iterable[Role], *kinds: Kind) -> list[Role]:
    """Those that are of one of the kinds."""
    return [r for r in found if r.kind in kinds]
