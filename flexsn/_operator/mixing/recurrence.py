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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._program.replay import Repeated
from ..._runtime.launch import refuse_notes
from ..._torch.autograd import saved_tensors_hooks_there
from ..._torch.tensors import has_storage
from . import gpu_loop, walks
from .cut import Recurrence
from .mixing_calls import Graph, MixingFunction, Place
from .one_step import Given, OneStep, Rows

_LONG = "walks in Python, and in CUDA graphs, are long"
IN_CACHE = 1 << 16  # values that a convolution's gradient goes through at a time, on a CPU: more is slower


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
        own, _, self.results_of, self.mixed, self.asked, self.gives, self.fed = cut.links[self.number]
        self.steps = [[OneStep(given, segment, own, self.fed, captured) for segment in stage.segments] for stage in piece.stages]
        self.views = set[int]()  # calls whose results are views of their operand
        self.needs = {j: list[bool]() for j in piece.calls}  # which fixed tensors have gradients
        self.of_fixed: dict[tuple[int, int], Tensor] = {}  # these, of calls that are no products
        self.trains, self.written_down, self.cut = tuple[bool, ...](), False, ""
        self.taken_over: set[Place] | None = None  # see `take_over`
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
        return sorted({p for p in operands if p in self.known and self.known[p].is_floating_point()} | (self.taken_over or set()))

    def take_over(self, takes: set[Place]) -> None:
        """Have the walk back find the gradients of what segments take of other pieces, too, which have the shape of a step; none run back
        after it, for which it would keep what flows to states."""
        self.taken_over = takes
        for step in [step for steps in self.steps for step in steps]:
            step.own = [own or p in takes for p, own in zip(step.segment.takes, step.own, strict=True)]

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
        kept, states = list[list[Tensor]](), [*self.start.values()]
        now = 0

        def one_step(given: Any) -> Any:
            taken, before = given[: len(sequences)], given[len(sequences) :]
            rows = dict(zip(sequences, taken, strict=True)) | {("v", k, 0): v.unsqueeze(0) for k, v in zip(self.start, before, strict=True)}
            for stage, steps in zip(self.piece.stages, self.steps, strict=True):
                after = [step.forward(rows) for step in steps]
                for j in stage.calls:
                    operands = [rows[p].squeeze(0) for p in self.mixing[j].operands]
                    results = self._called(now, j, operands)
                    if now == 0 and self.mixing[j].operands[0][0] in "am" and all(_shares(y, operands[0]) for y in results):
                        self.views.add(j)
                    rows.update(zip(self.results_of[j], [y.unsqueeze(0) for y in results], strict=True))
            ends = {k: v for found in after for k, v in found.items()}
            return [*[rows[p] for p in wanted if p[0] != "m" or p[1] not in self.views], *[ends[k] for k in self.start]]

        repeated = self._repeated(one_step, [j for j in self.piece.calls if self._keeps_graph(j)])
        for now in range(self.T):
            results: Any = repeated([*[row[now] for row in sequences.values()], *states])
            kept.append(results[: len(results) - len(states)])
            states = results[len(results) - len(states) :]
        wanted = [p for p in wanted if p[0] != "m" or p[1] not in self.views]
        found = {p: torch.cat(column) for p, column in zip(wanted, zip(*kept, strict=True), strict=True)}
        return found, dict(zip(self.start, states, strict=True))

    def _repeated(self, step: Callable[[list], list], with_graphs: Sequence[int]) -> Repeated:
        """Return a step as one that is noted: on a CPU, where it keeps no graphs of autograd.

        So a recurrent convolution of small steps runs 1.2 times as fast as a plain loop, and 1.7 times in training; without it, as fast and
        slower in training (`python benchmarks/steps.py`, `convolved_small`, 2026-11-28, two CPU cores).
        """
        return Repeated(step, [*self.fixed_tensors().values()], repeats=self.device.type == "cpu" and not with_graphs)

    def _keeps_graph(self, j: int) -> bool:
        """Return whether a mixing call keeps what its backward needs, unless hooks, as of checkpoints, look after what is saved: the
        operand, at most; a large convolution need not run once more."""
        plain = not self.trains or self.mix[j].weights is not None or j in self.without_graph
        return not plain and not saved_tensors_hooks_there()

    def _called(self, t: int, j: int, operands: list[Tensor]) -> Sequence[Tensor]:
        """Return the results of a mixing call."""
        mix = self.mix[j]
        if not self._keeps_graph(j):
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
        places = (*self.asked, *self.outer, *whole)
        kept: list[list[Tensor]] = []
        keeps = self.fed if self.taken_over is None else frozenset[int]()
        fed = {k: v.new_empty((self.T + 1, *v.shape)) for k, v in self.start.items() if k in keeps and v.is_floating_point()}
        sequences = {p: t.unsqueeze(1).unbind(0) for p, t in (self.known | dict(computed)).items()}
        befores = [(v, *trail[k].unbind(0)) for k, v in self.start.items()]
        given_grads = {p: grads.get(p) for p in (*self.gives, *self.mixed)}
        now = self.T - 1

        def zeros_if_none(ends: Mapping[int, Tensor | None]) -> dict[int, Tensor | None]:
            return {k: torch.zeros_like(v) if (g := ends[k]) is None and v.is_floating_point() else g for k, v in self.start.items()}

        def one_step(given: Any) -> Any:
            taken = iter(given)
            rows = {p: next(taken) for p in sequences} | {("v", k, 0): next(taken).unsqueeze(0) for k in self.start}
            own, ends, of_trail = ({key: next(taken) for key in group} for group in (given_grads, self.start, self.start))
            ends = {k: a if (b := of_trail[k]) is None else b if a is None else a + b for k, a in ends.items()}
            flow = {p: g for p in self.mixed if (g := own[p]) is not None}
            self._step_back(now, rows, flow, {p: own[p] for p in self.gives}, ends)
            after = zeros_if_none({k: _sum(flow.get(("n", k, 0)), flow.get(("v", k, 0))) for k in self.start})
            return [*[self._of(flow, rows, p) for p in places], *[flow.get(("v", k, 0)) for k in fed], *after.values()]

        repeated = self._repeated(one_step, [j for j, mix in self.mix.items() if mix.weights is None and j not in self.without_graph])
        found: Any = [*zeros_if_none(ends).values()]
        for now in reversed(range(self.T)):
            given: list[Tensor | None] = [*[row[now] for row in sequences.values()], *[before[now] for before in befores]]
            given += [None if g is None else g[now : now + 1] for g in given_grads.values()]
            given += [*found[len(found) - len(self.start) :], *[None if (by := trails[k]) is None else by[now] for k in self.start]]
            found = repeated(given) if now else one_step(given)  # where states start they may be laid out in another way
            kept.append(found[: len(places)])
            for by, g in zip(fed.values(), found[len(places) :], strict=False):
                by[now] = 0.0 if g is None else g[0]
        for by in fed.values():
            by[self.T] = 0.0
        last = dict(zip(self.start, found[len(found) - len(self.start) :], strict=True))
        columns = zip(*kept[::-1], strict=True)
        return {p: torch.cat(column) for p, column in zip(places, columns, strict=True)}, fed, last

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
