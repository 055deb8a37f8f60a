"""A segment of a recurrence: its kernel of one step, and that over whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._captured.captured_values import CapturedValues
from ..._torch.fake_tensors import disable_modes
from ..call import Backward, Call
from ..prepare import CoreCall, prepare
from .mixing_calls import Place, Segment

Rows = dict[Place, Tensor]  # of one step, `[1, ...]`
_MOST_STEPS = 64


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
