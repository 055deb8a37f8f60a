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
from ..._program.replay import Kinds
from ..._runtime import fork
from ..._torch.tensors import has_storage
from ..._torch.transforms import is_plain
from ...errors import DoubleBackwardError
from ..autograd import savable
from ..call import Call
from .mixing_calls import MixingFunction, Place
from .one_step import OneStep
from .recurrence import IN_CACHE, Loop

_OF_WEIGHT = {torch.conv1d: conv1d_weight, torch.conv2d: conv2d_weight, torch.conv3d: conv3d_weight}


class Ran(NamedTuple):
    """A segment that ran over whole sequences; `saved`: operands as kernels take them, and checkpoints."""

    step: OneStep
    call: Call
    saved: list[Tensor | None]


class Whole(NamedTuple):
    """Sequences of a recurrence.

    Attributes:
        gives, finals, trail: what its last segments give to other pieces; final states; states after every step.
        mixed: results of mixing calls.
        asked: operands of the mixing calls that are computed.
        ran: its segments.
    """

    gives: dict[Place, Tensor]
    finals: dict[int, Tensor]
    trail: dict[int, Tensor]
    mixed: dict[Place, Tensor]
    asked: dict[Place, Tensor]
    ran: list[Ran]


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


def over_whole(loop: Loop, operands: Operands, kept: Mapping[Place, Tensor], *, trains: bool = False) -> Whole:
    """Run the segments over whole sequences.

    Args:
        kept: what a walk kept, see `Loop.kept`.
        trains: whether gradients are to be found, of operands that require them.
    """
    rows, mixed = {**operands.known, **kept}, {p: kept[p] for p in loop.mixed if p in kept}
    found = Whole({}, {}, {}, mixed, {}, [])
    for stage, steps in zip(loop.piece.stages, loop.steps, strict=True):
        for step in steps:
            states = [operands.states[k] for k in step.segment.states]
            with torch.set_grad_enabled(trains):
                call, given = step.over_time(rows, states, list(operands.params.values()), operands.captured)
            with torch.no_grad():
                laid_out = call.laid_out(given)
                results = call.forward(laid_out)
            (outs, ends), shown = call.bounds, len(call.results)
            found.finals.update(zip(step.segment.states, results[outs:ends], strict=True))
            found.trail.update(zip(step.segment.states, results[ends:shown], strict=True))
            (found.gives if stage is loop.piece.stages[-1] else found.asked).update(zip(step.segment.gives, results[:outs], strict=True))
            found.ran.append(Ran(step, call, [*laid_out, *results[shown:]]))
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
    segments = [step for steps in loop.steps for step in steps]
    if (takes := _to_take_over(loop, operands, loop.trains)) is not None:
        loop.take_over(takes)
        for step in segments:
            step.call(loop.first_rows(), trains=True)
        return
    some, rows = next(iter(operands.states.values())), {**operands.known, **kept}
    for step in segments:
        views = {p: step.segment.meta_of(p) for p in step.segment.takes if p not in rows}
        given = rows | {p: some.new_empty((loop.T, *meta.shape), dtype=meta.dtype) for p, meta in views.items()}
        states = [operands.states[k] for k in step.segment.states]
        step.over_time(given, states, list(operands.params.values()), operands.captured)


def _to_take_over(loop: Loop, operands: Operands, needs: Sequence[bool]) -> set[Place] | None:
    """Return the inputs of segments whose gradients the walk back is to find, so that no segment runs back over whole sequences after it.

    None: segments run back. So they do where an input has another shape than a step, and where states at the start, or params or captured
    tensors that segments read, have gradients.

    Args:
        needs: which operands have gradients.
    """
    of = dict(zip(_places(operands), needs, strict=False))
    fixed = [*[("v", k, 0) for k in operands.states], *[("param", n) for n in operands.params]]
    if not loop.T or any(map(of.__getitem__, fixed)):
        return None
    takes, some = set[Place](), next(iter(operands.states.values()))
    for step in [step for steps in loop.steps for step in steps]:
        call, _ = step.call(loop.first_rows(), trains=False)
        own = {p for p in step.segment.takes if of.get(p)}
        alike = all(operands.known[p].shape[1:] == call.shapes.step and operands.known[p].dtype is some.dtype for p in own)
        if not alike or any(of[name] for name in call.captured):
            return None
        takes |= own
    return takes


def _places(operands: Operands) -> list[Any]:
    """Return the keys of operands, all of them."""
    return [*operands.known, *[("v", k, 0) for k in operands.states], *[("param", n) for n in operands.params], *operands.captured]


def differentiable(loop: Loop, operands: Operands, kept: Mapping[Place, Tensor], walked: Whole | None, shared: Sequence[Place]) -> Whole:
    """Return what a recurrence gives, with gradients.

    Args:
        walked: what a walk found; None where the segments are to find it.
        shared: results of mixing calls that other pieces take.
    """
    if walked is not None and loop.written_down:
        _expect_backward(loop, operands, kept)
    fixed = [t for j in loop.piece.calls for t in loop.mix[j].fixed]
    groups: list[Any] = []
    results = iter(_Recurrence.apply(loop, operands, kept, walked, shared, groups, *operands.tensors, *fixed))
    gives, finals, trail, mixed = [{key: next(results) for key in group} for group in groups]
    return Whole(gives, finals, trail, mixed, {}, [])


class _Recurrence(torch.autograd.Function):
    """A recurrence; `groups` tells what its results are."""

    @staticmethod
    def forward(
        ctx: Any, loop: Loop, operands: Operands, kept: Mapping[Place, Tensor], walked: Whole | None, shared: Sequence[Place],
        groups: list[Any], *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.loop, ctx.like, ctx.kept = loop, operands.of([None] * len(operands.tensors)), tuple(kept)
        if walked is None:
            walked = over_whole(loop, operands, kept)
        loop.known = {}  # of which the saved tensors are
        mixed = {p: walked.mixed[p] for p in shared}
        groups += [tuple(group) for group in (walked.gives, walked.finals, walked.trail, mixed)]
        ctx.groups = tuple(groups)
        ctx.save_for_backward(*savable([*tensors, *kept.values()]))
        ctx.set_materialize_grads(False)
        return tuple([t.detach() for group in (walked.gives, walked.finals, walked.trail, mixed) for t in group.values()])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or not all(g is None or (is_plain(g) and has_storage(g)) for g in grads):
            raise DoubleBackwardError(
                "mixes neurons, and its backward is differentiated (`create_graph=True`), or takes batched cotangents",
                core=core_name(ctx.loop.given.core), hint='Only the eager loop does that: `backend="torch"`.',
            )  # fmt: skip
        loop, saved, needs = ctx.loop, ctx.saved_tensors, ctx.needs_input_grad[6:]  # raises if one was written to since
        grads = tuple([None if g is None else g.resolve_neg() for g in grads])

        def pulled() -> tuple[list[Tensor], list[bool]]:
            found = _pulled(ctx, saved, needs, grads)
            return [g for g in found if g is not None], [g is not None for g in found]

        kinds = loop.given.look.over_parts.setdefault("pulled", Kinds())
        with fork.undisturbed():
            found, there = kinds.run((*loop.kind, needs, ctx.kept, ctx.groups), [*saved, *grads], pulled)
        given = iter(found)
        return *[None] * 6, *[next(given) if is_there else None for is_there in there]


def _pulled(ctx: Any, saved: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of the operands, and of the fixed tensors of mixing calls, as far as they are needed."""
    count = len(ctx.like.tensors)
    kept = dict(zip(ctx.kept, saved[len(saved) - len(ctx.kept) :], strict=True))
    leaves = ctx.like.of([t.detach().requires_grad_(need) for t, need in zip(saved[:count], needs, strict=False)])
    places: list[Any] = [("fixed", j, n) for j in ctx.loop.piece.calls for n in range(len(ctx.loop.mix[j].fixed))]
    tensors: dict[Any, Tensor] = dict(zip(places, saved[count:], strict=False))
    for name, group in (("state", leaves.states), ("param", leaves.params), ("captured", leaves.captured)):
        tensors |= {(name, key): t for key, t in group.items()}
    loop, fixed_needs = ctx.loop.over(tensors, leaves.known, ctx.loop.T), iter(needs[count:])
    loop.needs = {j: [next(fixed_needs) for _ in mix.fixed] for j, mix in loop.mix.items()}
    loop.trains, loop.views, loop.graphs = ctx.loop.trains, {*ctx.loop.views}, ctx.loop.graphs
    if (takes := _to_take_over(loop, leaves, needs)) is not None:
        loop.take_over(takes)
    whole, given = over_whole(loop, leaves, kept, trains=takes is None), iter(grads)
    of_gives, of_finals, of_trail, of_mixed = [{key: next(given) for key in group} for group in ctx.groups]
    of_trail = {k: of_trail.get(k) for k in whole.trail}
    computed = {**whole.asked, **whole.mixed, **kept}
    found, fed = loop.backward(computed, whole.trail, of_gives | of_mixed, of_finals, of_trail) if loop.T else ({}, {})
    _pull_fixed(loop, computed, whole.trail, found)
    for k, by in fed.items():
        of_trail[k] = by[1:] if (g := of_trail[k]) is None else g + by[1:]
    of_leaves = _of_segments(whole.ran, of_gives | found, of_finals, of_trail)
    for key, g in (*[(("v", k, 0), by[0]) for k, by in fed.items()], *[(p, found.get(p)) for p in loop.outer]):
        of_leaves[key] = _sum(of_leaves.get(key), g)
    own = [of_leaves.get(key) if need else None for key, need in zip(_places(leaves), needs, strict=False)]
    return [*own, *_of_fixed(loop, whole.trail, computed, found)]


def _of_segments(ran: Sequence[Ran], *of: Mapping[Any, Tensor | None]) -> dict[Any, Tensor | None]:
    """Return the gradients of what segments took: of sequences and states by place, params by number, captured tensors by name.

    Args:
        of: cotangents of what they gave, by place; of final states, and of states after every step, by number.
    """
    found: dict[Any, Tensor | None] = {}
    for step, call, saved in ran:
        segment = step.segment
        grads = [of[0].get(p) for p in segment.gives] + [group.get(k) for group in of[1:] for k in segment.states]
        grads = [None if g is None or (call.constant and call.constant[n]) else g for n, g in enumerate(grads)]
        if not call.differentiable or all(g is None for g in grads):
            continue
        back = call.backward_for((False, *call.needs), [type(None) if g is None else Tensor for g in grads])
        params = [("param", n) for n in range(len(step.given.params))]
        own = (*segment.takes, *[("v", k, 0) for k in segment.states], *params, *call.captured)
        for key, g in zip(own, call.backward(back, saved, grads, call.order), strict=True):
            found[key] = _sum(found.get(key), g)
    return found


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
