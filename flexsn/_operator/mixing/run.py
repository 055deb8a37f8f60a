"""Calls of a core that mixes neurons: its pieces, one after the other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._ir.graph import HALF
from ..._program.replay import Kinds
from ..autograd import run_call
from ..call import upcast
from ..eager_loop import result_dtypes
from .cut import AtOnce, Recurrence, Scan
from .gradients import Operands, Whole, differentiable, over_whole
from .mixing_calls import NOTHING, Place, Segment, functions_of_step, mixing_functions
from .one_step import Given, OneStep
from .recurrence import Loop

Results = tuple[list[Tensor], list[Tensor], list[Tensor]]  # final states, state sequences, outputs


class _Walks(threading.local):
    """What calls of this thread do with the walks of their recurrences.

    Attributes:
        found: to which they add what they find; None: nowhere.
        given: what calls like them found before, in place of which they walk; None: they walk.
    """

    found: list[Tensor] | None = None
    given: Iterator[Tensor] | None = None


_walks = _Walks()


@contextlib.contextmanager
def with_walks(found: list[Tensor] | None = None, given: Sequence[Tensor] | None = None) -> Iterator[None]:
    """While inside, recurrences add what their walks find to `found`, or read it from `given` and do not walk."""
    before = _walks.found, _walks.given
    _walks.found, _walks.given = found, None if given is None else iter(given)
    try:
        yield
    finally:
        _walks.found, _walks.given = before


def run_mixing(given: Given, sequences: bool) -> Results:
    """Run a core that is cut into pieces.

    Returns:
        Final states, state sequences (if asked for), outputs.
    """
    operands = [*given.inputs, *given.states, *given.params]
    if any(t is not None and t.dtype in HALF for t in operands):
        return _as_given(run_mixing(_upcast(given), sequences), given)
    captured = given.look.tensors()
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*operands, *captured.values()))
    known = given.look.over_parts
    runs_core = ("functions", given.autocast) not in known  # see `mixing_functions`
    if trains:
        return _of_pieces(_MixingRun(given, sequences))

    def work() -> tuple[list[Tensor], None]:
        finals, trail, outputs = _of_pieces(_MixingRun(given, sequences))
        return [*finals, *trail, *outputs], None

    if runs_core or _walks.found is not None or _walks.given is not None:
        return _without_views(work()[0], given, sequences)

    device, kinds = given.inputs[0].device, known.setdefault("calls", Kinds())
    what = sequences, given.backend, given.autocast, device, torch.is_inference_mode_enabled()
    return _without_views(kinds.run(what, [*operands, *captured.values()], work)[0], given, sequences)


def _without_views(found: list[Tensor], given: Given, sequences: bool) -> Results:
    """Return the results of a call without gradients. A view that is made without them may not be written to with them: none is one."""
    found = [t if t._base is None else t.detach() for t in found]
    ends = len(given.states)
    outs = 2 * ends if sequences else ends
    return found[:ends], found[ends:outs], found[outs:]


def _of_pieces(call: _MixingRun) -> Results:
    """Run a call piece by piece."""
    given, cut = call.given, call.cut
    for piece in cut.pieces:
        if isinstance(piece, AtOnce):
            call.at_once(piece.call)
        elif isinstance(piece, Scan):
            call.scan(piece.segment)
        else:
            call.recurrence(piece)
    call.known |= {place: call.known[source] for place, source in cut.same}
    numbers = range(len(call.states))
    outputs = [call.known["y", k, 0] for k in range(cut.outputs)]
    results = [call.finals[k] for k in numbers], [call.trail[k] for k in numbers] if call.sequences else [], outputs
    return results if len(given.inputs[0]) else _of_no_steps(results, given)


def _of_no_steps(results: Results, given: Given) -> Results:
    """Return results of no steps, which give every operand a gradient of zeros, as those of one kernel do; default states give none."""
    tensors = [t for t in (*given.inputs, *given.states, *given.params, *given.look.tensors().values()) if t is not None]
    nothing = sum([t.flatten()[:0].sum() for t in tensors if t.requires_grad and t.is_floating_point()])

    def tied(t: Tensor) -> Tensor:
        return t + nothing.to(t.dtype) if isinstance(nothing, Tensor) and t.dtype.is_floating_point else t

    finals, trail, outputs = results
    finals = [v.detach() if start is None else tied(v) for v, start in zip(finals, given.states, strict=True)]
    return finals, [*map(tied, trail)], [*map(tied, outputs)]


def _upcast(given: Given) -> Given:
    """Return the call in float32."""
    inputs, states = [upcast(x) for x in given.inputs], [None if v is None else upcast(v) for v in given.states]
    return given._replace(inputs=inputs, states=states, params=tuple([upcast(p) for p in given.params]))


def _as_given(results: Results, given: Given) -> Results:
    """Return results in the dtypes that the core returns for the operands as they are."""
    operands, known = [*given.inputs, *given.states, *given.params], given.look.over_parts
    key = ("dtypes", given.autocast, *[None if t is None else t.dtype for t in operands])
    if key not in known:
        known[key] = result_dtypes(given.look.runnable(given.core), given.look.wrap.sig, given.inputs, given.states, given.params)
    finals, trail, outputs = results
    of_outputs, of_states = known[key][: len(outputs)], known[key][len(outputs) :]
    finals, trail = [[t.to(d) for t, d in zip(group, of_states, strict=False)] for group in (finals, trail)]
    return finals, trail, [y.to(d) for y, d in zip(outputs, of_outputs, strict=True)]


class _MixingRun:
    """One call.

    Attributes:
        known: sequences `[T, ...]` of what is computed so far.
        finals, trail: final states; states after every step, of those that are asked for.
    """

    def __init__(self, given: Given, sequences: bool):
        self.given, self.cut, self.sequences = given, given.look.wrap, sequences
        self.known: dict[Place, Tensor] = {("x", k, 0): x for k, x in enumerate(given.inputs)}
        self.known[NOTHING] = given.inputs[0].new_zeros(len(given.inputs[0]))
        pairs = zip(given.states, self.cut.metas[len(given.inputs) :], strict=True)
        self.states = [given.inputs[0].new_zeros(m.shape, dtype=m.dtype) if v is None else v.expand(m.shape) for v, m in pairs]
        tensors: dict[Any, Tensor] = {("param", n): p for n, p in enumerate(given.params)} | given.look.tensors()
        self.mix = mixing_functions(given.look.over_parts, tensors, given.autocast, lambda: functions_of_step(
            self.cut.mixing, self.cut.calls, given.look.runnable(given.core), self.cut.sig.core,
            [*[x[0] if len(x) else x.new_zeros(x.shape[1:]) for x in given.inputs], *self.states, *given.params], given.autocast,
        ))  # fmt: skip
        self.finals, self.trail = dict[int, Tensor](), dict[int, Tensor]()

    def sequence(self, place: Place) -> Tensor:
        """Return a sequence; of a state that before every step."""
        if place not in self.known:
            after, start = self.trail[place[1]], self.states[place[1]]
            self.known[place] = torch.cat([start.unsqueeze(0), after[:-1]]) if len(after) else after
        return self.known[place]

    def at_once(self, j: int) -> None:
        mix, call, some = self.mix[j], self.cut.mixing[j], self.given.inputs[0]
        if len(some):
            results = mix.over_time([self.sequence(p) for p in call.operands], mix.fixed)
        else:  # of which `vmap` finds no shapes
            results = tuple([some.new_empty((0, *meta.shape), dtype=meta.dtype) for meta in call.results])
        self.known.update(zip([("m", j, i) for i in range(len(results))], results, strict=True))

    def scan(self, segment: Segment) -> None:
        """Run a segment over the whole sequence."""
        given, takes, states = self.given, {p: self.sequence(p) for p in segment.takes}, [self.states[k] for k in segment.states]
        keeps = bool(states) and (self.sequences or any(("v", k, 0) in self.cut.shared for k in segment.states))
        captured = given.look.tensors()
        step = OneStep(given, segment, (), (), captured)
        call, operands = step.over_time(takes, states, given.params, captured, sequences=keeps)
        finals, trail, outputs = run_call(call, operands)
        self.known.update(zip(segment.gives, outputs, strict=True))
        self.finals.update(zip(segment.states, finals, strict=True))
        self.trail.update(zip(segment.states, trail, strict=False))

    def recurrence(self, piece: Recurrence) -> None:
        given, captured, links = self.given, self.given.look.tensors(), self.cut.links[self.cut.pieces.index(piece)]
        known = {p: self.sequence(p) for p in links.taken}
        operands = Operands(known, {k: self.states[k] for k in piece.states}, dict(enumerate(given.params)), captured)
        loop = Loop(given, piece, known, operands.states, {j: self.mix[j] for j in piece.calls}, captured, len(given.inputs[0]))
        tensors = (*operands.tensors, *[t for j in piece.calls for t in self.mix[j].fixed])
        needs = tuple([t.requires_grad for t in tensors])
        trains, kept, walked = torch.is_grad_enabled() and any(needs), dict[Place, Tensor](), None
        loop.trains = needs if trains else ()
        if _walks.given is not None:
            kept = {p: next(_walks.given) for p in (*loop.mixed, *loop.befores)}
        elif loop.T:
            beside = self.sequences or not self.cut.shared.isdisjoint(links.own)
            found, finals = loop.forward(keeps=trains or beside or _walks.found is not None)
            kept = {p: t for p, t in found.items() if p not in loop.gives}
            if not beside and not (_walks.found is not None and loop.views):
                walked = Whole({p: found[p] for p in loop.gives}, finals, {}, {}, {}, [])
        else:
            some = given.inputs[0]
            kept = {p: some.new_empty((0, *m.shape), dtype=m.dtype) for p in loop.mixed for m in [self.cut.mixing[p[1]].results[p[2]]]}
            kept |= {("v", k, 0): v.new_empty((0, *v.shape)) for k, v in operands.states.items()}
        shared = [p for p in loop.mixed if p in self.cut.shared]
        if trains:
            walked = differentiable(loop, operands, kept, walked, shared)
        elif walked is None:
            walked = over_whole(loop, operands, kept)
        if _walks.found is not None:
            _walks.found += [walked.mixed[p] if p in walked.mixed else kept[p] for p in (*loop.mixed, *loop.befores)]
        self.known |= walked.gives | {p: walked.mixed[p] for p in shared}
        self.finals |= walked.finals
        self.trail |= walked.trail
