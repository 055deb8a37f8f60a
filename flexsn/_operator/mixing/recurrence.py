"""A recurrence that mixes neurons: a loop over time in which its mixing calls take turns with the kernels of its segments.

A walk over time finds what the recurrence gives, and keeps the results of its mixing calls. For the backward (`gradients.py`) the segments
run once more, given these, as any core does, over whole sequences: they give the states after every step, and all gradients but those that
flow through the mixing calls. A walk back over time finds these: the cotangents that states, and operands of the mixing calls, have by way
of them.

So the backward decides nothing anew: it reads the results of the mixing calls that the forward found.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._captured.captured_values import CapturedValues
from ..._runtime.launch import refuse_notes
from ..._torch.autograd import saved_tensors_hooks_there
from ..._torch.fake_tensors import disable_modes
from ..._torch.tensors import has_storage
from ..call import Backward, Call
from ..prepare import CoreCall, prepare
from . import gpu_loop, walks
from .cut import Recurrence
from .mixing_calls import Graph, MixingFunction, Place, Segment

Rows = dict[Place, Tensor]  # of one step, `[1, ...]`


class Given(NamedTuple):
    """What a call is given.

    Attributes:
        autocast: the dtype of autocast where the core was called; None where it was off.
    """

    core: Callable
    look: CapturedValues  # at a cut, which is its `wrap`
    inputs: Sequence[Tensor]
    states: Sequence[Tensor | None]
    params: tuple[Tensor, ...]
    backend: str
    autocast: torch.dtype | None

    def look_at(self, segment: Segment) -> CapturedValues:
        """Return a look at a segment."""
        found = self.look.over_parts.get(segment)
        if found is None:
            found = self.look.over_parts[segment] = self.look.wrapped(segment)
            found.signatures[len(segment.takes), len(segment.states), len(self.params)] = segment.signature
        return found


_MOST_STEPS = 64
_LONG = "walks in Python, and in CUDA graphs, are long"
IN_CACHE = 1 << 16  # values that a convolution's gradient goes through at a time, on a CPU: more is slower


class OneStep:
    """A segment, called for one step at a time.

    Args:
        own: what it takes that the walk computes: it has gradients of that, and of states.
        fed: states that a mixing call, or a segment beside its own, takes.
        captured: tensors as they are now: `functional_call` exchanges them before the backward.
    """

    def __init__(self, given: Given, segment: Segment, own: Collection[Place], fed: Collection[int], captured: Mapping[str, Tensor]):
        self.given, self.segment, self.look, self.fed, self.captured = given, segment, given.look_at(segment), fed, captured
        self.own = [p in own for p in segment.takes]
        self.calls: dict[bool, tuple[Call, list[Tensor]]] = {}
        self.how: dict[tuple[type, ...], Any] = {}  # by which cotangents there are

    def call(self, rows: Rows, *, trains: bool) -> tuple[Call, list[Tensor]]:
        """Return the call, and the params and captured tensors that it reads."""
        if trains in self.calls:
            return self.calls[trains]
        given, segment = self.given, self.segment
        takes, states = [rows[p] for p in segment.takes], [rows["v", k, 0].squeeze(0) for k in segment.states]
        statics = [*given.params, *self.captured.values()]
        kinds = [(t.shape, t.dtype, t.device, t.stride(), t.requires_grad) for t in statics]
        key = ("step", trains, given.backend, *kinds, *[(t.shape, t.dtype, t.device, t.stride()) for t in (*takes, *states)])
        call = self.look.over_parts.get(key)
        if call is None:
            takes, states = [t.detach() for t in takes], [t.detach().clone() for t in states]
            for tensor in [*[t for t, own in zip(takes, self.own, strict=True) if own], *states] if trains else ():
                tensor.requires_grad_(tensor.is_floating_point())
            self._make_room()
            expects = [True] * (len(segment.gives) + len(states)) + [False] * len(states) if takes[0].device.type == "cpu" else ()
            with torch.set_grad_enabled(trains):  # a GPU builds the whole walk
                call = self.look.over_parts[key] = self.prepared(takes, states, given.params, self.captured, trains, expects)
        self.calls[trains] = call, [*[p.detach() for p in given.params], *[self.captured[name].detach() for name in call.captured]]
        return self.calls[trains]

    def over_time(
        self, takes: Mapping[Place, Tensor], states: Sequence[Tensor], params: Sequence[Tensor], captured: dict[str, Tensor], *,
        sequences: bool = True,
    ) -> tuple[Call, list[Tensor]]:  # fmt: skip
        """Return the call over whole sequences, with gradients if operands have them, and these; `sequences`: also of states."""
        given, rows = self.given, [takes[p] for p in self.segment.takes]
        kinds = [(t.shape, t.dtype, t.device, t.stride(), t.requires_grad) for t in (*rows, *states, *params, *captured.values())]
        key = ("whole", sequences, torch.is_grad_enabled(), given.backend, *kinds)
        call = self.look.over_parts.get(key)
        if call is None:
            self._make_room()
            of_states = [False] * len(states) + [k in self.fed for k in self.segment.states] * sequences
            expects = [True] * len(self.segment.gives) + of_states
            call = self.look.over_parts[key] = self.prepared(rows, states, params, captured, sequences, expects)
        return call, [*rows, *states, *params, *[captured[name] for name in call.captured]]

    def prepared(
        self, takes: list[Tensor], states: Sequence[Tensor], params: Sequence[Tensor], captured: Mapping[str, Tensor], sequences: bool,
        expects: Sequence[bool],
    ) -> Call:  # fmt: skip
        """Return a call of the segment; `expects`: as `Call` has it."""
        given, segment = self.given, self.segment
        asked = CoreCall(
            given.core, self.look, segment.signature, takes, states, params, dict(captured), len(segment.gives), given.backend,
            sequences=sequences,
        )  # fmt: skip
        with disable_modes():  # the mode that notes ops: what is prepared once is no part of a call
            call = prepare(asked, build=False)
            call.expects = expects
            call.compile([*takes, *states, *params, *[captured[name] for name in call.captured]])
        return call

    def _make_room(self) -> None:
        if len(self.look.over_parts) >= _MOST_STEPS:
            self.look.over_parts.clear()

    def operands(self, rows: Rows, statics: Sequence[Tensor]) -> list[Tensor]:
        segment = self.segment
        return [*[rows[p] for p in segment.takes], *[rows["v", k, 0].squeeze(0) for k in segment.states], *statics]

    def forward(self, rows: Rows) -> dict[int, Tensor]:
        """Put what the segment gives into `rows`; return its states after the step."""
        call, statics = self.call(rows, trains=False)
        results = call.forward(call.laid_out(self.operands(rows, statics)))
        outs = len(self.segment.gives)
        rows.update(zip(self.segment.gives, results[:outs], strict=True))
        return dict(zip(self.segment.states, results[outs:], strict=True))

    def backward_for(self, call: Call, kinds: Sequence[type], statics: int) -> Backward:
        """Return how its backward runs for cotangents of some types, of what it gives and of its states after the step."""
        key, states = tuple(kinds), len(self.segment.states)
        if key not in self.how:
            beside = call.sequences * [type(None)] * states
            self.how[key] = call.backward_for((False, *self.own, *[True] * states, *[False] * statics), [*kinds, *beside])
        return self.how[key]

    def backward(self, rows: Rows, grads: Sequence[Tensor | None], ends: Sequence[Tensor | None]) -> Mapping[Place, Tensor]:
        """Return the gradients of what it takes of the walk's own, and of its states.

        Args:
            grads, ends: of what it gives, and of its states after the step.
        """
        call, statics = self.call(rows, trains=True)
        states = self.segment.states
        how = self.backward_for(call, [*map(type, grads), *map(type, ends)], len(statics))
        found = call.backward(how, call.laid_out(self.operands(rows, statics)), [*grads, *ends, *[None] * len(states)], call.order)
        places = (*self.segment.takes, *[("v", k, 0) for k in states])
        dims = (*[True] * len(self.own), *[False] * len(states))
        return {p: g if row else g.unsqueeze(0) for p, g, row in zip(places, found, dims, strict=False) if g is not None}


class Loop:
    """The walks over time of one recurrence.

    Attributes:
        known: sequences `[T, ...]` that the recurrence takes.
        states: at the start, by number.
        mix: mixing calls, by number.
        trains: of every tensor that the call takes, whether it has a gradient; empty for a call without gradients.
        written_down: whether the walk was written down in this call; else what was noted of an earlier one ran.
        cut: how its kernel divides the work, for `explain`.
    """

    def __init__(
        self, given: Given, piece: Recurrence, known: Mapping[Place, Tensor], states: Mapping[int, Tensor],
        mix: Mapping[int, MixingFunction], captured: Mapping[str, Tensor], T: int,
    ):  # fmt: skip
        cut = given.look.wrap
        self.given, self.piece, self.T, self.mixing, self.mix, self.captured = given, piece, T, cut.mixing, mix, captured
        self.known = {p: t.detach() for p, t in known.items()}
        self.start = {k: v.detach() for k, v in states.items()}
        self.number = cut.pieces.index(piece)  # of the piece
        own, _, self.results_of, self.mixed, self.asked, self.gives, fed = cut.links[self.number]
        self.steps = [[OneStep(given, segment, own, fed, captured) for segment in stage.segments] for stage in piece.stages]
        self.views = set[int]()  # calls whose results are views of their operand
        self.needs = {j: list[bool]() for j in piece.calls}  # which fixed tensors have gradients
        self.of_fixed: dict[tuple[int, int], Tensor] = {}  # these, of calls that are no products
        self.trains, self.written_down, self.cut = tuple[bool, ...](), False, ""
        self.graphs = dict[tuple[int, int], Graph]()  # of calls, by step, as the forward kept them
        self.device = next(iter(states.values())).device

    @property
    def kind(self) -> tuple:
        """What of a call its tensors do not tell."""
        return self.number, self.T, self.given.backend, self.given.autocast, self.device, self.trains

    @functools.cached_property
    def without_graph(self) -> set[int]:
        """Convolutions without graphs of autograd, whose weights have gradients of all steps at once. On a CPU no large ones."""
        most = IN_CACHE // 2 if self.device.type == "cpu" else math.inf
        found = {j for j, mix in self.mix.items() if mix.convolution is not None}
        return {j for j in found if math.prod(self.mixing[j].results[0].shape) <= most}

    def note(self, how: str) -> None:
        """Note how the loop over time ran, for `explain`."""
        self.given.look.over_parts["ran", self.number] = how

    @property
    def noted(self) -> str:
        """What was noted last."""
        return self.given.look.over_parts.get(("ran", self.number), "in Python")

    @property
    def outer(self) -> list[Place]:
        """Operands of mixing calls that other pieces give."""
        operands = {p for j in self.piece.calls for p in self.mixing[j].operands}
        return sorted({p for p in operands if p in self.known and self.known[p].is_floating_point()})

    @property
    def kept(self) -> list[Place]:
        """What segments take of a walk, but for results of mixing calls that are views."""
        return [*[p for p in self.mixed if p[1] not in self.views], *self.befores]

    @property
    def befores(self) -> list[Place]:
        """States before a step that its segments take as inputs."""
        taken = {p for steps in self.steps for step in steps for p in step.segment.takes}
        return sorted({("v", k, 0) for k in self.start} & taken)

    def fixed_tensors(self) -> dict[Any, Tensor]:
        """Return the tensors that are the same at every step."""
        found: dict[Any, Tensor] = {("param", n): p for n, p in enumerate(self.given.params)}
        found |= {("captured", name): t for name, t in self.captured.items()}
        return found | {("fixed", j, n): t for j in self.piece.calls for n, t in enumerate(self.mix[j].fixed)}

    def over(self, tensors: Mapping[Any, Tensor], known: Mapping[Place, Tensor], T: int) -> Loop:
        """Return the same loop over other tensors: states, and such as are the same at every step, and T steps of sequences."""
        given = self.given._replace(inputs=(), states=(), params=tuple([tensors["param", n] for n in range(len(self.given.params))]))
        mix = {j: self.mix[j].of_none().over([tensors["fixed", j, n] for n in range(len(self.mix[j].fixed))]) for j in self.piece.calls}
        captured = {name: tensors["captured", name] for name in self.captured}
        loop = Loop(given, self.piece, known, {k: tensors["state", k] for k in self.start}, mix, captured, T)
        loop.needs = {j: list(needs) for j, needs in self.needs.items()}
        return loop

    def first_rows(self) -> Rows:
        """Return rows of one step: of what it takes those of the first step, of what it computes any."""
        rows = {p: t[:1] for p, t in self.known.items()} | {("v", k, 0): v.unsqueeze(0) for k, v in self.start.items()}
        some = next(iter(self.start.values()))
        metas = {p: self.mixing[p[1]].results[p[2]] for p in self.mixed}
        return rows | {p: some.new_empty((1, *meta.shape), dtype=meta.dtype) for p, meta in metas.items()}

    @torch.no_grad()
    def forward(self, *, keeps: bool) -> tuple[dict[Place, Tensor], dict[int, Tensor]]:
        """Walk over time; return what the recurrence gives `[T, ...]`, and the final states.

        Args:
            keeps: whether it also returns what its segments then take: the results of its mixing calls but for those that are views, and
                states before every step.
        """
        if (walked := walks.forward(self, keeps=keeps)) is not None:
            return walked
        self.written_down = True
        refuse_notes(_LONG)
        return gpu_loop.forward(self, keeps=keeps) or self.walk(keeps=keeps)

    def walk(self, *, keeps: bool) -> tuple[dict[Place, Tensor], dict[int, Tensor]]:
        """Walk over time in Python, as `forward` does."""
        wanted = [*self.gives, *(self.kept if keeps else ())]
        sequences = {p: t.unsqueeze(1).unbind(0) for p, t in self.known.items()}
        kept: list[list[Tensor]] = []
        states = self.start
        for t in range(self.T):
            rows = {p: row[t] for p, row in sequences.items()} | {("v", k, 0): v.unsqueeze(0) for k, v in states.items()}
            for stage, steps in zip(self.piece.stages, self.steps, strict=True):
                after = [step.forward(rows) for step in steps]
                for j in stage.calls:
                    operands = [rows[p].squeeze(0) for p in self.mixing[j].operands]
                    results = self._called(t, j, operands)
                    if t == 0 and self.mixing[j].operands[0][0] in "am" and all(_shares(y, operands[0]) for y in results):
                        self.views.add(j)
                    rows.update(zip(self.results_of[j], [y.unsqueeze(0) for y in results], strict=True))
            states = {k: v for found in after for k, v in found.items()}
            wanted = [p for p in wanted if p[0] != "m" or p[1] not in self.views]
            kept.append([rows[p] for p in wanted])
        return {p: torch.cat(column) for p, column in zip(wanted, zip(*kept, strict=True), strict=True)}, states

    def _called(self, t: int, j: int, operands: list[Tensor]) -> Sequence[Tensor]:
        """Return the results of a mixing call. What its backward needs is kept, unless hooks, as of checkpoints, look after what is saved:
        the operand, at most; a large convolution need not run once more."""
        mix = self.mix[j]
        if not self.trains or mix.weights is not None or j in self.without_graph or saved_tensors_hooks_there():
            return mix(*operands, *mix.fixed)
        self.graphs[t, j] = mix.with_graph(operands, [f.requires_grad for f in mix.fixed])
        return [y.detach() for y in self.graphs[t, j][1]]

    @torch.no_grad()
    def backward(
        self, computed: Mapping[Place, Tensor], trail: Mapping[int, Tensor], grads: Mapping[Place, Tensor | None],
        ends: Mapping[int, Tensor | None], trails: Mapping[int, Tensor | None],
    ) -> tuple[dict[Place, Tensor], dict[int, Tensor]]:  # fmt: skip
        """Walk back over time.

        Args:
            computed: results of the mixing calls, and operands that are computed.
            trail: states after every step.
            grads, ends, trails: cotangents of what other pieces take, of final states, and of states after every step.

        Returns:
            Cotangents of operands that are computed, of those of other pieces, and of results of products; and what flows to states at the
            start of a step by way of mixing calls, and of segments that take them, `[T + 1, ...]`: at the last one, nothing.
        """
        if (back := walks.backward(self, computed, trail, grads, ends, trails)) is not None:
            return back
        refuse_notes(_LONG)
        if (back := gpu_loop.backward(self, computed, trail, grads, ends, trails)) is not None:
            return back
        found, fed, _ = self.walk_back(computed, trail, grads, ends, trails)
        return found, fed

    def walk_back(
        self, computed: Mapping[Place, Tensor], trail: Mapping[int, Tensor], grads: Mapping[Place, Tensor | None],
        ends: Mapping[int, Tensor | None], trails: Mapping[int, Tensor | None],
    ) -> tuple[dict[Place, Tensor], dict[int, Tensor], dict[int, Tensor | None]]:  # fmt: skip
        """Walk back over time in Python, as `backward` does; return also the cotangents of the states at the start."""
        of_all = [j for j in self.piece.calls if any(self.needs[j]) and (j in self.without_graph or self.mix[j].weights is not None)]
        whole = [p for p in self.mixed if p[1] in of_all]
        kept: dict[Place, list[Tensor]] = {p: [] for p in (*self.asked, *self.outer, *whole)}
        fed = {k: v.new_empty((self.T + 1, *v.shape)) for k, v in self.start.items() if v.is_floating_point()}
        sequences = {p: t.unsqueeze(1).unbind(0) for p, t in (self.known | dict(computed)).items()}
        ends = {k: torch.zeros_like(v) if (g := ends[k]) is None and v.is_floating_point() else g for k, v in self.start.items()}
        for t in reversed(range(self.T)):
            rows = {p: row[t] for p, row in sequences.items()}
            rows |= {("v", k, 0): (v if t == 0 else trail[k][t - 1]).unsqueeze(0) for k, v in self.start.items()}
            ends = {k: a if (b := trails[k]) is None else b[t] if a is None else a + b[t] for k, a in ends.items()}
            flow = {p: g[t : t + 1] for p in self.mixed if (g := grads.get(p)) is not None}
            self._step_back(t, rows, flow, {p: None if (g := grads[p]) is None else g[t : t + 1] for p in self.gives}, ends)
            for p, column in kept.items():
                column.append(self._of(flow, rows, p))
            for k, by in fed.items():
                by[t] = flow["v", k, 0][0] if ("v", k, 0) in flow else 0.0
            ends = {k: _sum(flow.get(("n", k, 0)), flow.get(("v", k, 0))) for k in self.start}
            ends = {k: torch.zeros_like(v) if (g := ends[k]) is None and v.is_floating_point() else g for k, v in self.start.items()}
        for by in fed.values():
            by[self.T] = 0.0
        return {p: torch.cat(column[::-1]) for p, column in kept.items()}, fed, ends

    def _step_back(self, t: int, rows: Rows, flow: Rows, grads: Mapping[Place, Tensor | None], ends: Mapping[int, Tensor | None]) -> None:
        """Put the cotangents of what a step computes into `flow`; those of states by way of their own segment as `("n", k, 0)`."""

        def add(place: Place, grad: Tensor | None) -> None:
            if grad is not None:
                flow[place] = flow[place] + grad if place in flow else grad

        for step in self.steps[-1]:
            states = step.segment.states
            given = step.backward(rows, [grads[p] for p in step.segment.gives], [ends[k] for k in states])
            for (kind, k, i), grad in given.items():
                if kind == "v" and k in states:
                    flow["n", k, 0] = grad.squeeze(0)
                else:
                    add((kind, k, i), grad)
        for stage, steps in reversed(list(zip(self.piece.stages[:-1], self.steps[:-1], strict=True))):
            for j in reversed(stage.calls):
                operands, results = self.mixing[j].operands, self.results_of[j]
                given_results = [self._of(flow, rows, p).squeeze(0) for p in results]
                own = [rows[p].squeeze(0) for p in operands]
                if j in self.without_graph:
                    pulled: Sequence[Tensor | None] = [self.mix[j].of_operand(own[0], given_results[0])]
                else:
                    pulled = self.mix[j].pulled(own, given_results, self.needs[j], self.graphs.pop((t, j), None))
                for place, g in zip(operands, pulled, strict=False):
                    add(place, None if g is None else g.unsqueeze(0))
                for n, g in enumerate(pulled[len(operands) :]):
                    if g is not None:
                        self.of_fixed[j, n] = g if (before := self.of_fixed.get((j, n))) is None else before + g
            for step in reversed(steps):
                for place, grad in step.backward(rows, [self._of(flow, rows, p) for p in step.segment.gives], []).items():
                    add(place, grad)

    def _of(self, flow: Rows, rows: Rows, place: Place) -> Tensor:
        return flow[place] if place in flow else torch.zeros_like(rows[place])


def _shares(a: Tensor, b: Tensor) -> bool:
    return has_storage(a) and has_storage(b) and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return what flows to a state before a step: by its own segment, and by others `[1, ...]`."""
    return a if b is None else b[0] if a is None else a + b[0]
