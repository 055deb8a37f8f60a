"""Calls of a core that mixes neurons: a loop over time in which its mixing calls and the kernel of the rest take turns.

A mixing call of an input (`x @ w_in`) runs once, on the whole sequence. Those of states (`s @ w`) lie in the recurrence: a first walk over
time, without gradients, finds their results. Then the rest of the core runs as any core does, over whole sequences, and gives outputs,
states and all gradients but those that flow through the mixing calls of states. `_Feedback` adds these: its backward walks back over time
once, and gives the rest the cotangents that its states have by way of the mixing calls.

So the backward decides nothing anew: it reads the results of the mixing calls that the forward found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._capture.signature import core_name
from ..._captured.captured_values import CapturedValues
from ..._runtime import fork
from ..._torch.tensors import has_storage
from ..._torch.transforms import is_plain
from ...errors import DoubleBackwardError
from ..call import Call
from ..prepare import prepare
from . import cpu_loop
from .cpu_loop import Back, Carried
from .mixing_calls import MixingFunction, Rest, mixing_functions

Results = tuple[list[Tensor], list[Tensor], list[Tensor]]  # final states, state sequences, outputs


class Given(NamedTuple):
    """What a call is given."""

    core: Callable
    look: CapturedValues  # at the rest, which is its `wrap`
    inputs: Sequence[Tensor]
    states: Sequence[Tensor | None]
    params: tuple[Tensor, ...]
    backend: str
    num_outputs: int | None


def run_mixing(run: Callable[..., Results], given: Given, sequences: bool) -> Results:
    """Run a core whose mixing calls take an input or a state each; `run` runs the rest.

    Returns:
        Final states, state sequences (if asked for), outputs.
    """
    rest: Rest = given.look.wrap
    first = [x[0] if len(x) else x.new_zeros(x.shape[1:]) for x in given.inputs]
    pairs = zip(given.states, rest.metas[len(given.inputs) :], strict=True)
    states = [first[0].new_zeros(m.shape, dtype=m.dtype) if v is None else v.expand(m.shape) for v, m in pairs]
    mix = mixing_functions(rest, given.look.runnable(given.core), [*first, *states, *given.params])
    inputs: list[Tensor | None] = [given.inputs[k] for k in rest.inputs]
    for f, m in zip(mix, rest.mixing, strict=True):
        inputs.append(f.over_time(given.inputs[m.operand], f.fixed) if m.operand < len(given.inputs) else None)
    fixed = [t for j in rest.carried for t in mix[j].fixed]
    tensors = (*given.inputs, *states, *given.params, *given.look.tensors().values(), *fixed)
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    loop = Loop(given, inputs, states, mix)
    if loop.T:
        outputs, finals, mixed = loop.forward(keeps=trains or sequences)
        if not (trains or sequences):
            return finals, [], outputs
    else:
        mixed = [first[0].new_empty((0, *m.shape), dtype=m.dtype) for m in loop.results]
    for (place, _, _), result in zip(loop.carried, mixed, strict=True):
        inputs[place] = result
    finals, trail, outputs = run(
        given.core, given.look, tuple(inputs), tuple(states), given.params, backend=given.backend, strict=True, sequences=True,
        num_outputs=given.num_outputs,
    )  # fmt: skip
    if loop.T and any(t.requires_grad for t in (*outputs, *finals, *trail, *fixed)):
        results = _Feedback.apply(loop, len(outputs), *outputs, *finals, *trail, *states, *fixed, *mixed)
        outputs, finals, trail = _grouped(results, len(outputs), len(states))
    return finals, trail if sequences else [], outputs


def _grouped(tensors: Sequence[Any], outs: int, states: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Return outputs, final states, states after every step."""
    return list(tensors[:outs]), list(tensors[outs : outs + states]), list(tensors[outs + states : outs + 2 * states])


_MOST_STEPS = 64


class Loop:
    """The walks over time of one call.

    Attributes:
        inputs: sequences `[T, ...]` of the rest; None for the results of mixing calls of states.
        states: at the start.
        carried: mixing calls of states: their places in `inputs`, the states that they take, and they.
        results: metas of their results.
    """

    def __init__(self, given: Given, inputs: Sequence[Tensor | None], states: Sequence[Tensor], mix: Sequence[MixingFunction]):
        rest: Rest = given.look.wrap
        self.given, self.T = given, given.inputs[0].shape[0]
        self.inputs, self.states = [None if x is None else x.detach() for x in inputs], [v.detach() for v in states]
        self.carried: Carried = [(len(rest.inputs) + j, rest.state_of(j), mix[j]) for j in rest.carried]
        self.results = [rest.mixing[j].result for j in rest.carried]
        self.captured = given.look.tensors()  # as they are now: `functional_call` exchanges them before the backward

    def step(self, *, trains: bool) -> tuple[Call, list[Tensor]]:
        """Return the call of the rest for one step, and the params and captured tensors that it reads.

        Args:
            trains: whether it has gradients of the results of mixing calls, and of states.
        """
        given, look = self.given, self.given.look
        captured = self.captured
        statics = [*given.params, *captured.values()]
        kinds: list[Any] = [(t.shape, t.dtype, t.device, t.stride(), t.requires_grad) for t in statics]
        kinds += [None if x is None else (x.shape[1:], x.dtype, x.stride()[1:]) for x in self.inputs]
        kinds += [(v.shape, v.dtype, v.stride()) for v in self.states]
        key = ("step", trains, given.backend, given.num_outputs, *kinds)
        call = look.over_parts.get(key)
        if call is None:
            one = [None if x is None else x[:1] for x in self.inputs]
            for (place, _, _), meta in zip(self.carried, self.results, strict=True):
                one[place] = self.states[0].new_empty((1, *meta.shape), dtype=meta.dtype)
            states = [v.clone() for v in self.states]
            for tensor in [*[one[place] for place, _, _ in self.carried], *states] if trains else ():
                tensor.requires_grad_(tensor.is_floating_point())  # type: ignore[union-attr]  # all are there
            if len(look.over_parts) >= _MOST_STEPS:
                look.over_parts.clear()
            with torch.set_grad_enabled(trains):
                call = look.over_parts[key] = prepare(
                    given.core, look, look.wrap.signature, one, states, given.params, captured, given.backend, trains,  # type: ignore[arg-type]  # all are there
                    given.num_outputs,
                )  # fmt: skip
        return call, [*[p.detach() for p in given.params], *[captured[name].detach() for name in call.captured]]

    @torch.no_grad()
    def forward(self, *, keeps: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Walk over time; return outputs `[T, ...]`, final states, and, if it `keeps` them, the results of the mixing calls of states."""
        call, statics = self.step(trains=False)
        walk = cpu_loop.walk_of(call, call.launch, call.prologue, self, [*self.states, *statics])
        if walk is not None and (found := walk.forward(self, keeps=keeps)) is not None:
            return found
        outs, states = call.bounds[0], self.states
        kept: list[list[Tensor]] = []
        rows = [None if x is None else x.unsqueeze(1).unbind(0) for x in self.inputs]
        for t in range(self.T):
            now: list[Any] = [None if row is None else row[t] for row in rows]
            for place, k, f in self.carried:
                now[place] = f(states[k], *f.fixed).unsqueeze(0)
            results = call.forward(call.laid_out([*now, *states, *statics]))
            states = results[outs:]
            kept.append([*results[:outs], *[now[place] for place, _, _ in self.carried if keeps]])
        sequences = [torch.cat(rows) for rows in zip(*kept, strict=True)]
        return sequences[:outs], states, sequences[outs:]

    @torch.no_grad()
    def backward(self, mixed: Sequence[Tensor], trail: Sequence[Tensor], grads: tuple[list, list, list]) -> Back:
        """Walk back over time.

        Args:
            mixed: results of the mixing calls of states.
            trail: states after every step.
            grads: cotangents of outputs, final states and states after every step.
        """
        call, statics = self.step(trains=True)
        outputs, finals, trails = grads
        inputs = [*self.inputs]
        for (place, _, _), m in zip(self.carried, mixed, strict=True):
            inputs[place] = m
        ends = [torch.zeros_like(v) if g is None and v.is_floating_point() else g for v, g in zip(self.states, finals, strict=True)]
        places = {place for place, _, _ in self.carried}
        needs = (False, *[k in places for k in range(len(inputs))], *[True] * len(ends), *[False] * len(statics))
        how = call.backward_for(needs, [*[type(g) for g in (*outputs, *ends)], *[type(None)] * len(trail)])
        fed = {k: trail[k].new_empty((self.T + 1, *trail[k].shape[1:])) for _, k, _ in self.carried}
        back = Back(inputs, trail, outputs, ends, [torch.empty_like(m) for m in mixed], fed)  # type: ignore[arg-type]  # all are there
        walk = cpu_loop.walk_of(call, how.launch, how.prologue, self, [*self.states, *statics])
        if walk is not None and all(g is None for g in trails) and walk.backward(self, back):
            return back
        for tensor in (*back.found, *fed.values()):
            tensor.zero_()
        rows = [x.unsqueeze(1).unbind(0) for x in back.inputs]
        for t in reversed(range(self.T)):
            states = self.states if t == 0 else [after[t - 1] for after in trail]
            ends = [a if b is None else b[t] if a is None else a + b[t] for a, b in zip(ends, trails, strict=True)]
            cotangents = [*[None if g is None else g[t : t + 1] for g in outputs], *ends, *[None] * len(trail)]
            found = call.backward(how, call.laid_out([*[row[t] for row in rows], *states, *statics]), cotangents, call.order)
            ends = [*found[len(rows) : len(rows) + len(states)]]
            for into, (place, k, f) in zip(back.found, self.carried, strict=True):
                if (grad := found[place]) is not None:
                    into[t] = grad[0]
                    fed[k][t] += f.pulled(states[k], grad[0])
            for k, by in fed.items():
                ends[k] = by[t] if (end := ends[k]) is None else end + by[t]
            ends = [torch.zeros_like(v) if g is None and v.is_floating_point() else g for v, g in zip(states, ends, strict=True)]
        return back


class _Feedback(torch.autograd.Function):
    """Outputs, final states and states after every step, as they are; the backward adds what flows through the mixing calls of states."""

    @staticmethod
    def forward(ctx: Any, loop: Loop, outs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`tensors`: outputs, final states, states after every step; initial states; fixed tensors of mixing calls, and their results."""
        states = len(loop.states)
        ctx.loop, ctx.outs = loop, outs
        ctx.save_for_backward(*tensors[outs + states : outs + 2 * states], *tensors[outs + 3 * states :])
        ctx.set_materialize_grads(False)
        return tuple([t.detach() for t in tensors[: outs + 2 * states]])  # the same memory, to which may be written, as no view of two may

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
        states = len(loop.states)
        saved = ctx.saved_tensors  # raises if one was written to since
        trail, fixed, mixed = saved[:states], iter(saved[states : len(saved) - len(loop.carried)]), saved[len(saved) - len(loop.carried) :]
        for _, _, f in loop.carried:
            f.fixed = [next(fixed) for _ in f.fixed]
        outputs, finals, trails = _grouped(grads, ctx.outs, states)
        back = loop.backward(mixed, trail, (outputs, finals, trails))
        starts: list[Tensor | None] = [None] * states
        for k, by in back.fed.items():
            starts[k] = by[0]
            trails[k] = by[1:] if trails[k] is None else trails[k] + by[1:]
        needs, of_fixed = list(ctx.needs_input_grad[2 + len(grads) + states :]), list[Tensor | None]()
        for (_, k, f), grad in zip(loop.carried, back.found, strict=True):
            own, needs = needs[: len(f.fixed)], needs[len(f.fixed) :]
            of_fixed += f.gradients(loop.states[k], trail[k][:-1], grad, own)
        return (None, None, *outputs, *finals, *trails, *starts, *of_fixed, *[None] * len(mixed))
