"""The gradients of a recurrence: of its segments over whole sequences, and of what flows back through its mixing calls.

Between forward and backward a recurrence keeps its operands and the results of its mixing calls. All else its segments compute once more:
so a recurrent layer of LIF neurons keeps one sequence beside its input and its output, where states and operands were three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from ..._capture.signature import core_name
from ..._runtime import fork
from ..._torch.autograd import pulled_back
from ..._torch.tensors import has_storage
from ..._torch.transforms import is_plain
from ...errors import DoubleBackwardError
from ..autograd import run_call
from .mixing_calls import MixingFunction, Place
from .recurrence import IN_CACHE, Loop

_OF_WEIGHT = {torch.conv1d: conv1d_weight, torch.conv2d: conv2d_weight, torch.conv3d: conv3d_weight}


class Whole(NamedTuple):
    """Sequences of a recurrence.

    Attributes:
        gives, finals, trail: what its last segments give to other pieces; final states; states after every step.
        mixed: results of mixing calls.
        asked: operands of the mixing calls that are computed.
    """

    gives: dict[Place, Tensor]
    finals: dict[int, Tensor]
    trail: dict[int, Tensor]
    mixed: dict[Place, Tensor]
    asked: dict[Place, Tensor]


class Operands(NamedTuple):
    """What a recurrence takes: sequences of other pieces, states at the start, params, and captured tensors."""

    known: dict[Place, Tensor]
    states: dict[int, Tensor]
    params: dict[int, Tensor]
    captured: dict[str, Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        return [t for group in self for t in group.values()]

    def of(self, values: Sequence[Any]) -> Operands:
        """Return other values in the place of these."""
        given, groups = iter(values), list[Any]()
        for group in self:
            groups.append({key: next(given) for key in group})
        return Operands(*groups)


def over_whole(loop: Loop, operands: Operands, kept: Mapping[Place, Tensor]) -> Whole:
    """Run the segments over whole sequences.

    Args:
        kept: what a walk kept, see `Loop.kept`.
    """
    rows, mixed = {**operands.known, **kept}, {p: kept[p] for p in loop.mixed if p in kept}
    found = Whole({}, {}, {}, mixed, {})
    for stage, steps in zip(loop.piece.stages, loop.steps, strict=True):
        for step in steps:
            states = [operands.states[k] for k in step.segment.states]
            call, given = step.over_time(rows, states, list(operands.params.values()), operands.captured)
            finals, trail, outputs = run_call(call, given)
            found.finals.update(zip(step.segment.states, finals, strict=True))
            found.trail.update(zip(step.segment.states, trail, strict=True))
            (found.gives if stage is loop.piece.stages[-1] else found.asked).update(zip(step.segment.gives, outputs, strict=True))
        for j in sorted(loop.views.intersection(stage.calls)):
            given = [(found.asked[p] if p in found.asked else rows[p]).detach() for p in loop.mixing[j].operands]
            views = dict(zip(loop.results_of[j], loop.mix[j].over_time(given, [t.detach() for t in loop.mix[j].fixed]), strict=True))
            rows |= views
            mixed |= views
    return found


def _expect_backward(loop: Loop, operands: Operands, kept: Mapping[Place, Tensor]) -> None:
    """Prepare what a backward will run, of which some has no kernel.

    Raises:
        CannotFuseError: that of a segment.
    """
    some, rows = next(iter(operands.states.values())), {**operands.known, **kept}
    for step in [step for steps in loop.steps for step in steps]:
        views = {p: step.segment.meta_of(p) for p in step.segment.takes if p not in rows}
        given = rows | {p: some.new_empty((loop.T, *meta.shape), dtype=meta.dtype) for p, meta in views.items()}
        states = [operands.states[k] for k in step.segment.states]
        step.over_time(given, states, list(operands.params.values()), operands.captured)


def differentiable(loop: Loop, operands: Operands, kept: Mapping[Place, Tensor], walked: Whole | None, shared: Sequence[Place]) -> Whole:
    """Return what a recurrence gives, with gradients.

    Args:
        walked: what a walk found; None where the segments are to find it.
        shared: results of mixing calls that other pieces take.
    """
    if walked is not None:
        _expect_backward(loop, operands, kept)
    fixed = [t for j in loop.piece.calls for t in loop.mix[j].fixed]
    groups: list[Any] = []
    results = iter(_Recurrence.apply(loop, operands, kept, walked, shared, groups, *operands.tensors, *fixed))
    gives, finals, trail, mixed = [{key: next(results) for key in group} for group in groups]
    return Whole(gives, finals, trail, mixed, {})


class _Recurrence(torch.autograd.Function):
    """A recurrence; `groups` tells what its results are."""

    @staticmethod
    def forward(
        ctx: Any, loop: Loop, operands: Operands, kept: Mapping[Place, Tensor], walked: Whole | None, shared: Sequence[Place],
        groups: list[Any], *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.loop, ctx.like, ctx.kept, ctx.made = loop, operands.of([None] * len(operands.tensors)), list(kept), None
        if walked is None:
            ctx.made = _with_graph(loop, operands, ctx.needs_input_grad[6:], kept)
            walked = ctx.made[1]
        loop.known = {}  # of which the saved tensors are
        mixed = {p: walked.mixed[p] for p in shared}
        groups += [list(group) for group in (walked.gives, walked.finals, walked.trail, mixed)]
        ctx.groups = groups
        ctx.save_for_backward(*tensors, *kept.values())
        ctx.set_materialize_grads(False)
        return tuple([t.detach() for group in (walked.gives, walked.finals, walked.trail, mixed) for t in group.values()])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or not all(g is None or (is_plain(g) and has_storage(g)) for g in grads):
            raise DoubleBackwardError(
                "mixes neurons, and its backward is differentiated (`create_graph=True`), or takes batched cotangents",
                core=core_name(ctx.loop.given.core), hint='Only the eager loop does that: `backend="torch"`.',
            )  # fmt: skip
        with fork.undisturbed():
            return *[None] * 6, *_pulled(ctx, grads)


def _with_graph(loop: Loop, operands: Operands, needs: Sequence[bool], kept: Mapping[Place, Tensor]) -> tuple[Operands, Whole]:
    """Return leaves of autograd in the place of operands, and what the segments make of them."""
    leaves = operands.of([t.detach().requires_grad_(need) for t, need in zip(operands.tensors, needs, strict=False)])
    with torch.enable_grad():
        return leaves, over_whole(loop, leaves, kept)


def _pulled(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of the operands, and of the fixed tensors of mixing calls."""
    loop: Loop = ctx.loop
    saved, needs, count = ctx.saved_tensors, ctx.needs_input_grad[6:], len(ctx.like.tensors)  # raises if one was written to since
    operands, kept = ctx.like.of(saved[:count]), dict(zip(ctx.kept, saved[len(saved) - len(ctx.kept) :], strict=True))
    fixed, fixed_needs = iter(saved[count:]), iter(needs[count:])
    loop.of_fixed.clear()
    loop.known = {p: t.detach() for p, t in operands.known.items()}
    for j in loop.piece.calls:
        loop.mix[j].fixed = [next(fixed) for _ in loop.mix[j].fixed]
        loop.needs[j] = [next(fixed_needs) for _ in loop.mix[j].fixed]
    leaves, whole = ctx.made or _with_graph(loop, operands, needs, kept)
    given = iter(grads)
    of_gives, of_finals, of_trail, of_mixed = [{key: next(given) for key in group} for group in ctx.groups]
    of_trail = {k: of_trail.get(k) for k in whole.trail}
    computed = {key: t.detach() for group in (whole.asked, whole.mixed, kept) for key, t in group.items()}
    trail = {k: t.detach() for k, t in whole.trail.items()}
    found, fed = loop.backward(computed, trail, of_gives | of_mixed, of_finals, of_trail) if loop.T else ({}, {})
    _pull_fixed(loop, computed, trail, found)
    for k, by in fed.items():
        of_trail[k] = by[1:] if (g := of_trail[k]) is None else g + by[1:]
    results: list[Any] = [(whole.gives, of_gives), (whole.finals, of_finals), (whole.trail, of_trail), (whole.asked, found)]
    ys = [(y, g) for group, of in results for key, y in group.items() if y.requires_grad and (g := of.get(key)) is not None]
    asked = [t for t in leaves.tensors if t.requires_grad]
    pulled = iter(
        pulled_back([y for y, _ in ys], [g for _, g in ys], asked, retain_graph=ctx.made is not None)
        if ys and asked else [None] * len(asked)
    )  # fmt: skip
    of_leaves: dict[str, Any] = leaves.of([next(pulled) if t.requires_grad else None for t in leaves.tensors])._asdict()
    for name, more in (("states", {k: by[0] for k, by in fed.items()}), ("known", {p: found.get(p) for p in loop.outer})):
        for key, g in more.items():
            of_leaves[name][key] = _sum(of_leaves[name][key], g)
    return [*[g for group in of_leaves.values() for g in group.values()], *_of_fixed(loop, trail, computed, found)]


def _pull_fixed(loop: Loop, computed: Mapping[Place, Tensor], trail: Mapping[int, Tensor], flows: Mapping[Place, Tensor]) -> None:
    """Find the gradients of the fixed tensors of calls that are no products, as far as the walk back has not.

    Args:
        flows: cotangents of what the calls give, `[T, ...]`, among others.
    """
    for j in loop.piece.calls:
        mix, needs, grads = loop.mix[j], loop.needs[j], flows.get(loop.results_of[j][0])
        if mix.weights is not None or not any(needs) or grads is None:
            continue
        (place,) = loop.mixing[j].operands
        operand = _whole(loop, place, trail, computed)
        if mix.convolution is None:
            _, *found = mix.pulled([operand], [grads], needs)
        else:
            found = _of_convolution(mix, operand, grads, needs)
        loop.of_fixed |= {(j, n): g for n, g in enumerate(found) if g is not None}


def _of_convolution(mix: MixingFunction, operand: Tensor, grads: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients of the fixed tensors of a convolution, of all steps `[T, ...]`."""
    weight, options = mix.fixed[0], mix.convolution or {}
    steps = len(operand) if operand.is_cuda else max(1, IN_CACHE // operand[0].numel())
    found: list[Tensor | None] = [None] * len(needs)
    for x, g in zip(operand.split(steps), grads.split(steps), strict=True):
        if x.dim() - 1 == weight.dim():  # else a step has no batch
            x, g = x.flatten(0, 1), g.flatten(0, 1)
        of_weight = _OF_WEIGHT[mix.func](x, weight.shape, g, **options) if needs[0] else None
        parts = [of_weight, *[g.sum([0, *range(2, g.dim())]) if need else None for need in needs[1:]]]
        found = [part if sum_ is None or part is None else sum_ + part for sum_, part in zip(found, parts, strict=True)]
    return found


def _of_fixed(
    loop: Loop, trail: Mapping[int, Tensor], computed: Mapping[Place, Tensor], found: Mapping[Place, Tensor]
) -> list[Tensor | None]:
    """Return the gradients of the fixed tensors of mixing calls, of which a walk back found part."""
    of_fixed = list[Tensor | None]()
    for j in loop.piece.calls:
        if loop.mix[j].weights is None or not loop.T:
            of_fixed += [loop.of_fixed.get((j, n)) for n in range(len(loop.needs[j]))]
        elif any(loop.needs[j]):
            halves = _halves(loop, loop.mixing[j].operands[0], trail, computed)
            of_fixed += loop.mix[j].of_weights(*halves, found["m", j, 0], loop.needs[j])
        else:
            of_fixed += [None] * len(loop.needs[j])
    return of_fixed


def _halves(loop: Loop, place: Place, trail: Mapping[int, Tensor], computed: Mapping[Place, Tensor]) -> tuple[Tensor, Tensor]:
    """Return an operand at the first step, and at every step but that."""
    if place[0] == "v" and place[1] in loop.start:
        return loop.start[place[1]], trail[place[1]][:-1]
    whole = _whole(loop, place, trail, computed)
    return whole[0], whole[1:]


def _whole(loop: Loop, place: Place, trail: Mapping[int, Tensor], computed: Mapping[Place, Tensor]) -> Tensor:
    """Return an operand at all steps."""
    if place[0] == "v" and place[1] in loop.start:
        return torch.cat([loop.start[place[1]].unsqueeze(0), trail[place[1]][:-1]])
    return computed[place] if place in computed else loop.known[place]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b
