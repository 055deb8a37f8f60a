"""The walks over time in one call: what a recurrence does in one step is written down as a list of ops, for C++ or for Triton.

The ops are the kernels of the segments, products (`s @ w`, `linear(h)`), sums, `softmax` and `layer_norm` over the last dim, and what picks
or joins values along it (`cat`, `chunk`, indexing). A recurrence that does anything else, or has values whose leading dims differ, walks in
Python. On a CPU C++ runs the list (`cpp_walk.py`), on a GPU one Triton kernel (`triton_walk.py`), which knows fewer of these ops.

On a CPU a sequence of the batch is walked by one thread: rows of spikes drive rows of the weights, other rows go through blocked
products. Each sum runs in one order, so the bits are the same at any number of threads.

What that gains, on two cores, 100 steps, batch 64, beside a plain loop: recurrent LIF layers of 128 to 512 neurons run 5.4 to 8.1 times as
fast, and train 3.6 to 4.4 times; a training step of a network as for SHD is 1.9 times as fast (`python benchmarks/recurrent.py`,
2026-11-27). An LSTM of 256 runs 1.9 times as fast and trains 1.8 times, a norm inside the recurrence 7.9 and 4.5 times
(`python benchmarks/steps.py`, 2026-11-27).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._ir.roles import Kind, Role
from ..._program.replay import Kinds, Work
from ..._torch.fake_tensors import disable_modes
from ..call import Call
from . import cpp_products, triton_walk
from .cpp_walk import BEFORE, OTHER_SLOT, Array, CannotWalk, RowOp, Total, Walk, row_op
from .mixing_calls import Place, Run, moves

Sequences = dict[Place, Tensor]
Walked = tuple[Sequences, dict[int, Tensor]]  # and states, or what flows to them


def forward(loop: Any, *, keeps: bool) -> Walked | None:
    """Walk over time as `Loop.forward` does; None if that cannot be."""
    reasons = list[str]()
    for language, make in _walks(loop):

        def walk(make: Callable[..., Any] = make) -> tuple[list[Tensor], Any]:
            loop.written_down = True
            return _Forward(loop, make, keeps).run()

        found = _run(loop, ("forward", language, keeps), [], walk)
        if not isinstance(found, CannotWalk):
            loop.note(f"in {language}{loop.cut}")
            return found
        reasons.append(f"in Python (not in {language}: {found})")
    loop.note(reasons[0] if reasons else "in Python")
    return None


def backward(
    loop: Any, computed: Mapping[Place, Tensor], trail: Mapping[int, Tensor], grads: Mapping[Place, Tensor | None],
    ends: Mapping[int, Tensor | None], trails: Mapping[int, Tensor | None],
) -> Walked | None:  # fmt: skip
    """Walk back over time as `Loop.backward` does; None if that cannot be."""
    given = [t for group in (computed, trail, grads, ends, trails) for t in group.values()]
    what = "backward", tuple([p for p, g in grads.items() if g is not None])
    for language, make in _walks(loop):

        def walk(make: Callable[..., Any] = make) -> tuple[list[Tensor], Any]:
            return _Backward(loop, make, computed, trail, grads).run(ends, trails)

        found = _run(loop, (*what, language), given, walk)
        if not isinstance(found, CannotWalk):
            return found
    return None


def _run(loop: Any, what: tuple, given: Sequence[Tensor | None], walk: Work) -> Walked | CannotWalk:
    """Return what a walk finds, or why it cannot be.

    Args:
        what: of the loop.
        given: tensors that the walk takes beside those of the loop.
    """
    taken = [*loop.known.values(), *loop.start.values(), *loop.fixed_tensors().values(), *given]
    kinds = loop.given.look.over_parts.setdefault("walks", Kinds())
    try:
        found, (places, numbers, views, loop.cut) = kinds.run((*loop.kind, *what), taken, walk, CannotWalk)
    except CannotWalk as error:
        return error
    loop.views |= views
    return dict(zip(places, found, strict=False)), dict(zip(numbers, found[len(places) :], strict=True))


def _walks(loop: Any) -> list[tuple[str, Callable[..., Any]]]:
    """Return in which languages walks on a device can be, and what makes one for a number of steps, dims before the last, and a dtype."""
    found: list[tuple[str, Callable[..., Any]]] = [("C++", Walk)] if loop.device.type == "cpu" else []
    if triton_walk.takes(loop.device):
        found.append(("one Triton kernel", functools.partial(triton_walk.TritonWalk, loop.device, loop.given.autocast)))
    return found


class _Steps:
    """What a step of a `Loop` computes.

    Attributes:
        walk: its ops.
        rows: one step of all values, of any values: what calls of one step take.
        values: where those lie that the loop computes.
        totals: of these, sums over neurons, which stand at every place of a row.
    """

    def __init__(self, loop: Any, make: Callable[..., Any]):
        start, metas = next(iter(loop.start.values())), [meta for j in loop.piece.calls for meta in loop.mixing[j].results]
        dtype, lead = metas[0].dtype, start.shape[:-1]
        metas += loop.start.values()
        if dtype not in cpp_products.DTYPES or not start.dim() or any(m.dtype is not dtype or m.shape[:-1] != lead for m in metas):
            raise CannotWalk("values differ in dtype or in dims before the last, or are neither float32 nor float64")
        self.loop, self.walk, self.rows = loop, make(loop.T, lead, dtype, start.shape[-1]), loop.first_rows()
        self.values: dict[Place, Array] = {}
        self.totals = list[Place]()

    def reads(self, step: Any, call: Call) -> tuple[dict[Role, Array], int]:
        """Return what a segment reads of its inputs and states, and its width."""
        width = call.shapes.step[-1] if call.shapes.step else 0
        takes = [self.values[p] if p in self.values else self.walk.rows_of(self.loop.known[p], width) for p in step.segment.takes]
        states = [self.values["v", k, 0] for k in step.segment.states]
        return {Role(Kind.INPUT, n): a for n, a in enumerate(takes)} | {Role(Kind.STATE, n): a for n, a in enumerate(states)}, width

    def mixing(self, j: int) -> tuple[list[Array], Tensor | RowOp | list[list[Run]]]:
        """Return the operands of a mixing call; and weights of a product, what it does to rows, or the runs of values that results are made
        of."""
        sources, f = list[Array](), self.loop.mix[j]
        for p in self.loop.mixing[j].operands:
            if p not in self.values and self.loop.known[p].shape[1:-1] != self.walk.lead:
                raise CannotWalk("operands do not have the same dims before the last")
            sources.append(self.values[p] if p in self.values else self.walk.rows_of(self.loop.known[p], self.loop.known[p].shape[-1]))
            if sources[-1].tensor.dtype is not self.walk.dtype:
                raise CannotWalk("values differ in dtype")
            if p[0] == "m" and self.loop.mixing[p[1]].results[p[2]].shape[-1] != sources[-1].width:
                raise CannotWalk("what takes a sum over neurons mixes neurons")
        kind = f.weights if f.autocast is None or self.walk.takes_autocast else None
        step = torch.Size((*self.walk.lead, sources[0].width))
        kind = kind if kind is not None else row_op(f, step)
        with disable_modes():  # what finds it out on numbers is nothing to be noted
            kind = kind if kind is not None else moves(f, self.walk.lead, [source.width for source in sources])
        if kind is None:
            raise CannotWalk(f"`{self.loop.mixing[j].name}` has no op there" if f.autocast is None else "products follow autocast")
        return sources, kind

    def views(self, j: int, results: Tensor | RowOp | list[list[Run]]) -> bool:
        """Return whether the results of a call are parts of the rows of what the loop computed."""
        operands = self.loop.mixing[j].operands
        return isinstance(results, list) and len(operands) == 1 and operands[0][0] in "am" and all(len(runs) == 1 for runs in results)


class _Forward(_Steps):
    """A walk; `keeps` as `Loop.forward` has it."""

    def __init__(self, loop: Any, make: Callable[..., Any], keeps: bool):
        super().__init__(loop, make)
        if loop.device.type == "cpu":
            cpp_products.expect(self.walk.dtype, trains=keeps)
        self.keeps, self.after, self.ends = keeps, dict[int, Array](), dict[int, Tensor]()
        self.befores = loop.befores if keeps else []
        for k, start in loop.start.items():
            if ("v", k, 0) in self.befores:
                self.values["v", k, 0], self.after[k], self.ends[k] = self.walk.kept(start)
            else:
                two = self.values["v", k, 0] = self.walk.turns(start, 0)
                self.after[k], self.ends[k] = Array(two.tensor, OTHER_SLOT), two.tensor[loop.T & 1]

    def run(self) -> tuple[list[Tensor], Any]:
        loop, walk = self.loop, self.walk
        for stage, steps in zip(loop.piece.stages, loop.steps, strict=True):
            for step in steps:
                self.segment(step)
            for j in stage.calls:
                self.call(j)
        walk.launch(back=False)
        found = {p: walk.shaped(self.values[p].tensor) for p in (*loop.gives, *(loop.kept if self.keeps else ()))}
        found |= {p: found[p][..., :1] for p in self.totals if p in found}
        ends = [end.reshape(loop.start[k].shape) for k, end in self.ends.items()]
        return [*found.values(), *ends], ([*found], [*self.ends], {*loop.views}, walk.cut)

    def segment(self, step: Any) -> None:
        call, statics = step.call(self.rows, trains=False)
        reads, width = self.reads(step, call)
        dtypes = {role: dtype for role, _, dtype in call.launch.writes}
        writes = {Role(Kind.STATE, n): self.after[k] for n, k in enumerate(step.segment.states)}
        for p, role in zip(step.segment.gives, call.results, strict=False):
            rows = self.loop.T if p in self.loop.gives else 1
            self.values[p] = writes[role] = self.walk.new(width, rows, dtypes[role])
            self.rows[p] = self.walk.shaped(self.values[p].tensor[:1])
        self.walk.kernel(call, call.launch, call.prologue, step.operands(self.rows, statics), reads, writes)

    def call(self, j: int) -> None:
        sources, kind = self.mixing(j)
        places, rows = self.loop.results_of[j], self.loop.T if self.keeps else 1
        if isinstance(kind, list):
            for p, runs in zip(places, kind, strict=True):
                if self.views(j, kind):
                    self.loop.views.add(j)
                    self.values[p] = sources[0].part(runs[0].start, runs[0].width)
                    continue
                target = self.values[p] = self.walk.new(sum(run.width for run in runs), rows)
                for run in runs:
                    self.walk.copy(sources[run.operand].part(run.start, run.width), target.part(run.at, run.width))
            return
        width = sources[0].width if isinstance(kind, Total) else self.loop.mixing[j].results[0].shape[-1]
        target = self.values[places[0]] = self.walk.new(width, rows)
        if isinstance(kind, Total):
            self.totals.append(places[0])
        if isinstance(kind, RowOp):
            kind.forward(self.walk, sources[0], target)
        else:
            self.walk.product(sources[0], target, kind, *self.loop.mix[j].fixed[1:])


class _Backward(_Steps):
    """A walk back.

    Attributes:
        flows: cotangents, by place; those of a view's results are parts of that of its operand.
        written: which parts of them something was written to.
        partly: those to which something is added where nothing was written before.
    """

    def __init__(
        self, loop: Any, make: Callable[..., Any], computed: Mapping[Place, Tensor], trail: Mapping[int, Tensor],
        grads: Mapping[Place, Tensor | None],
    ):  # fmt: skip
        super().__init__(loop, make)
        self.computed, self.trail, self.grads = computed, trail, grads
        self.rows |= {p: t[:1] for p, t in computed.items()}
        self.values = {p: self.walk.rows_of(t, t.shape[-1]) for p, t in computed.items()}
        for k, start in loop.start.items():
            after = self.walk.rows_of(trail[k], start.shape[-1]).tensor.contiguous()
            self.values["v", k, 0] = Array(after, BEFORE, start.reshape(after.shape[1:]).contiguous())
        self.flows, self.written, self.partly = dict[Place, Array](), dict[Place, list[range]](), set[Place]()
        self.part_of: dict[Place, tuple[Place, int]] = {}
        for j in loop.piece.calls:
            sources, kind = self.mixing(j)
            if self.views(j, kind) and isinstance(kind, list):
                operand = loop.mixing[j].operands[0]
                self.part_of |= {p: (operand, runs[0].start) for p, runs in zip(loop.results_of[j], kind, strict=True)}
            if isinstance(kind, Total):  # in the order of the forward, and of a sum
                (place,) = loop.results_of[j]
                self.values[place] = self.walk.new(sources[0].width, 1)
                kind.forward(self.walk, sources[0], self.values[place])
                if grads.get(place) is not None:
                    raise CannotWalk("what takes a sum over neurons lies outside")
        for p in loop.mixed:
            if (given := grads.get(p)) is not None:
                whole, _ = self.whole(p)
                if whole not in self.written:
                    self.flow(whole).tensor.zero_()
                    self.written[whole] = [range(self.width(whole))]
                self.flow(p).tensor.add_(self.walk.rows_of(given, given.shape[-1]).tensor)

    def run(self, ends: Mapping[int, Tensor | None], trails: Mapping[int, Tensor | None]) -> tuple[list[Tensor], Any]:
        loop, walk, before, last = self.loop, self.walk, dict[int, Array](), (self.loop.T - 1) & 1
        for step in loop.steps[-1]:
            flow, writes = dict[Role, Array](), dict[Role, Array]()
            for n, k in enumerate(step.segment.states):
                role = Role(Kind.STATE_GRAD, n)
                flow[role] = walk.turns_of_zeros(loop.start[k]) if (g := ends[k]) is None else walk.turns(g, last)
                before[k] = writes[role] = Array(flow[role].tensor, OTHER_SLOT)
                if (by := trails[k]) is not None:
                    walk.copy(walk.rows_of(by, by.shape[-1]), flow[role], adds=True)
            for n, p in enumerate(step.segment.gives):
                if (given := self.grads[p]) is not None:
                    flow[Role(Kind.OUTPUT_GRAD, n)] = walk.rows_of(given, given.shape[-1])
            self.segment(step, flow, writes)
        for stage, steps in zip(loop.piece.stages[-2::-1], loop.steps[-2::-1], strict=True):
            for j in reversed(stage.calls):
                self.call(j)
            for step in reversed(steps):
                self.segment(step, {Role(Kind.OUTPUT_GRAD, n): self.flow(p) for n, p in enumerate(step.segment.gives)}, {})
        fed = {k: self.flows["v", k, 0] for k in loop.start if ("v", k, 0) in self.flows}
        for k, array in fed.items():
            walk.copy(array, before[k], adds=True)
            array.tensor[-1].zero_()
        fed = fed if loop.taken_over is None else {}
        for p, array in self.flows.items():
            if p in self.partly or len(set().union(*self.written.get(p, ()))) < array.width:  # a part has no cotangent
                array.tensor.zero_()
        walk.launch(back=True)
        taken = [p for p in loop.mixed if loop.mix[p[1]].weights is not None or any(loop.needs[p[1]])]
        found = {p: walk.shaped(self.flow(p).tensor) for p in (*loop.asked, *loop.outer, *taken)}
        flows = [walk.shaped(array.tensor) for array in fed.values()]
        return [*found.values(), *flows], ([*found], [*fed], {*loop.views}, walk.cut)

    def width(self, place: Place) -> int:
        return self.values[place].width if place in self.values else self.loop.known[place].shape[-1]

    def whole(self, place: Place) -> tuple[Place, int]:
        """Return what a value is a part of, or itself, and where in its rows the part begins."""
        begin = 0
        while place in self.part_of:
            place, more = self.part_of[place]
            begin += more
        return place, begin

    def flow(self, place: Place) -> Array:
        """Return the cotangent of a value."""
        whole, begin = self.whole(place)
        if whole != place:
            return self.flow(whole).part(begin, self.width(place))
        if place not in self.flows:
            of_state = place[0] == "v" and place[1] in self.loop.start
            rows = self.loop.T + of_state if not of_state or self.loop.taken_over is None else 1
            self.flows[place] = self.walk.new(self.width(place), rows)
        return self.flows[place]

    def target(self, place: Place, start: int = 0, width: int | None = None) -> tuple[Array, bool]:
        """Return where a part of a cotangent is written, and whether that is to be added to what is there."""
        whole, at = self.whole(place)
        begin, width, found = at + start, self.width(place) if width is None else width, self.flow(whole)
        parts = self.written.setdefault(whole, [])
        adds = any(part.start < begin + width and begin < part.stop for part in parts)
        if adds and not set().union(*parts) >= {*range(begin, begin + width)}:
            self.partly.add(whole)
        parts.append(range(begin, begin + width))
        return found if width == found.width else found.part(begin, width), adds

    def segment(self, step: Any, flow: Mapping[Role, Array], writes: dict[Role, Array]) -> None:
        """Write down the backward of a segment.

        Args:
            flow: cotangents of its results.
            writes: where those of its states go.
        """
        call, statics = step.call(self.rows, trains=True)
        how = step.backward_for(call, [Tensor if r.grad in flow else type(None) for r in call.results[: call.bounds[1]]], len(statics))
        if how.launch is None:
            raise CannotWalk("its gradient is no kernel")
        reads, width = self.reads(step, call)
        written = {a.role for a in how.launch.kernel.plan.writes}
        beside = list[tuple[Array, Array]]()
        for n, (p, own) in enumerate(zip(step.segment.takes, step.own, strict=True)):
            if own and (role := Role(Kind.INPUT_GRAD, n)) in written:
                target, adds = self.target(p)
                writes[role] = self.walk.new(width, 1) if adds else target
                beside += [(writes[role], target)] if adds else []
        self.walk.kernel(call, how.launch, how.prologue, step.operands(self.rows, statics), {**reads, **flow}, writes)
        for by, target in beside:
            self.walk.copy(by, target, adds=True)

    def call(self, j: int) -> None:
        """Write down what flows through a mixing call."""
        sources, kind = self.mixing(j)
        operands, places = self.loop.mixing[j].operands, self.loop.results_of[j]
        if isinstance(kind, list):
            for p, runs in zip(places, kind, strict=True):
                for run in runs if p not in self.part_of else ():
                    target, adds = self.target(operands[run.operand], run.start, run.width)
                    self.walk.copy(self.flow(p).part(run.at, run.width), target, adds=adds)
            return
        target, adds = self.target(operands[0])
        if isinstance(kind, Tensor):
            self.walk.product(self.flow(places[0]), target, kind.T, adds=adds)
            return
        found = self.walk.new(target.width, 1) if adds else target
        kind.backward(self.walk, sources[0], self.values[places[0]], self.flow(places[0]), found)
        if adds:
            self.walk.copy(found, target, adds=True)
