"""What flows back through the mixing calls of a recurrence, beside what its segments give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._capture.signature import core_name
from ..._runtime import fork
from ..._torch.tensors import has_storage
from ..._torch.transforms import is_plain
from ...errors import DoubleBackwardError
from .mixing_calls import Place
from .recurrence import Loop


class Whole(NamedTuple):
    """Sequences of a recurrence whose segments were given what the first walk found.

    Attributes:
        gives, finals, trail: what other pieces take of its segments; final states; states after every step.
        shared: results of mixing calls that other pieces take.
        asked: operands of the mixing calls that are computed.
        states: at the start.
        outer: operands of the mixing calls that are of other pieces.
        mixed: all results of mixing calls.
    """

    gives: dict[Place, Tensor]
    finals: dict[int, Tensor]
    trail: dict[int, Tensor]
    shared: dict[Place, Tensor]
    asked: dict[Place, Tensor]
    states: dict[int, Tensor]
    outer: dict[Place, Tensor]
    mixed: dict[Place, Tensor]


def with_feedback(loop: Loop, whole: Whole) -> Whole:
    """Return the same sequences, the first four with the gradients that flow through the mixing calls."""
    fixed = [t for j in loop.piece.calls for t in loop.mix[j].fixed]
    tensors = [t for group in whole[:-1] for t in group.values()]
    results = iter(_Feedback.apply(loop, [list(group) for group in whole], *tensors, *fixed, *whole.mixed.values()))
    groups: Sequence[Any] = whole[:4]
    changed: dict[str, Any] = {name: {key: next(results) for key in group} for name, group in zip(whole._fields, groups, strict=False)}
    return whole._replace(**changed)


class _Feedback(torch.autograd.Function):
    """What other pieces take of a recurrence, as it is; the backward adds what flows through the mixing calls."""

    @staticmethod
    def forward(ctx: Any, loop: Loop, keys: list[list[Any]], *tensors: Tensor) -> tuple[Tensor, ...]:
        """`keys`: of a `Whole`; `tensors`: of it, with fixed tensors of mixing calls before the last group."""
        gives, finals, trail, shared, asked, states, outer, _ = map(len, keys)
        ctx.loop, ctx.keys = loop, keys
        own = gives + finals + trail + shared
        ctx.save_for_backward(
            *tensors[gives + finals : own - shared], *tensors[own : own + asked], *tensors[own + asked + states + outer :]
        )
        ctx.set_materialize_grads(False)
        return tuple([t.detach() for t in tensors[:own]])  # the same memory, to which may be written, as no view of two may

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or not all(g is None or (is_plain(g) and has_storage(g)) for g in grads):
            raise DoubleBackwardError(
                "mixes neurons, and its backward is differentiated (`create_graph=True`), or takes batched cotangents",
                core=core_name(ctx.loop.given.core), hint='Only the eager loop does that: `backend="torch"`.',
            )  # fmt: skip
        with fork.undisturbed():
            return _Feedback.pulled(ctx, grads)

    @staticmethod
    def pulled(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return the gradients of what `forward` was given."""
        loop: Loop = ctx.loop
        gives, finals, trail, shared, asked, states, outer, mixed = ctx.keys
        saved = ctx.saved_tensors  # raises if one was written to since
        after = dict(zip(trail, saved, strict=False))
        operands = dict(zip(asked, saved[len(trail) :], strict=False))
        fixed = iter(saved[len(trail) + len(asked) : len(saved) - len(mixed)])
        needs = iter(ctx.needs_input_grad[2 + len(grads) + len(asked) + len(states) + len(outer) :])
        loop.of_fixed.clear()
        for j in loop.piece.calls:
            loop.mix[j].fixed = [next(fixed) for _ in loop.mix[j].fixed]
            loop.needs[j] = [next(needs) for _ in loop.mix[j].fixed]
        computed = operands | dict(zip(mixed, saved[len(saved) - len(mixed) :], strict=True))
        given = iter(grads)
        of_gives, of_finals, of_trail, of_shared = ({key: next(given) for key in group} for group in (gives, finals, trail, shared))
        found, fed = loop.backward(computed, after, of_gives | of_shared, of_finals, of_trail)
        for k, by in fed.items():
            of_trail[k] = by[1:] if (g := of_trail[k]) is None else g + by[1:]
        of_fixed = list[Tensor | None]()
        for j in loop.piece.calls:
            if loop.mix[j].weights is None:
                of_fixed += [loop.of_fixed.get((j, n)) for n in range(len(loop.needs[j]))]
            elif any(loop.needs[j]):
                halves = _halves(loop, loop.mixing[j].operands[0], after, computed)
                of_fixed += loop.mix[j].of_weights(*halves, found["m", j, 0], loop.needs[j])
            else:
                of_fixed += [None] * len(loop.needs[j])
        starts = [fed[k][0] if k in fed else None for k in states]
        own = (*of_gives.values(), *of_finals.values(), *of_trail.values(), *[None] * len(shared))
        return (None, None, *own, *[found[p] for p in asked], *starts, *[found.get(p) for p in outer], *of_fixed, *[None] * len(mixed))


def _halves(loop: Loop, place: Place, trail: Mapping[int, Tensor], computed: Mapping[Place, Tensor]) -> tuple[Tensor, Tensor]:
    """Return an operand at the first step, and at every step but that."""
    if place[0] == "v" and place[1] in loop.start:
        return loop.start[place[1]], trail[place[1]][:-1]
    whole = computed[place] if place in computed else loop.known[place]
    return whole[0], whole[1:]
