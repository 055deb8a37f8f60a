"""Calls of a core that mixes neurons: a loop over time in which its mixing calls and the kernel of the rest take turns.

A mixing call of an input (`x @ w_in`) runs once, on the whole sequence. Those of states (`s @ w`) lie in the recurrence: a first loop,
without gradients, finds their results. Then the rest of the core runs as any core does, over whole sequences, and gives outputs, states
and all gradients but those that flow through the mixing calls of states. `_Feedback` adds these: its backward walks back over time once,
and gives the rest the cotangents that its states have by way of the mixing calls.

So the backward decides nothing anew: it reads the results of the mixing calls that the forward found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._captured.captured_values import CapturedValues
from .._operator.call import Call
from .._operator.prepare import prepare
from . import cpu_loop
from .mixing import MixingFunction, Rest, mixing_functions

Run = Callable[..., tuple[list[Tensor], list[Tensor], list[Tensor]]]  # `run_core`, of the rest


def run_mixing(
    run: Run, core: Callable, look: CapturedValues, inputs: Sequence[Tensor], states: Sequence[Tensor | None], params: tuple[Tensor, ...],
    *, backend: str, sequences: bool, num_outputs: int | None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """Run a core whose calls that mix neurons take an input or a state each.

    Args:
        run: runs the rest.
        look: at the rest, which is its `wrap`.

    Returns:
        Final states, state sequences (if asked for), outputs.
    """
    rest: Rest = look.wrap
    first = [x[0] for x in inputs]
    metas = rest.metas[len(inputs) :]
    given = [first[0].new_zeros(m.shape, dtype=m.dtype) if v is None else v.expand(m.shape) for v, m in zip(states, metas, strict=True)]
    mix = mixing_functions(rest, look.runnable(core), [*first, *given, *params])
    taken = [inputs[k] for k in rest.inputs]
    mixed = [None if j in rest.carried else f.over_time(inputs[rest.mixing[j].operand], f.fixed) for j, f in enumerate(mix)]
    loop = Loop(rest, core, look, [*taken, *mixed], given, params, mix, backend, num_outputs)
    fixed = [t for j in rest.carried for t in mix[j].fixed]
    tensors = (*inputs, *given, *params, *look.tensors().values(), *fixed)
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    outputs, finals, found = loop.forward(keeps=trains or sequences)
    if not (trains or sequences):
        return finals, [], outputs
    for j, m in zip(rest.carried, found, strict=True):
        mixed[j] = m
    finals, trail, outputs = run(
        core, look, (*taken, *mixed), tuple(given), params, backend=backend, strict=True, sequences=True, num_outputs=num_outputs
    )
    if any(t.requires_grad for t in (*outputs, *finals, *trail, *fixed)):
        results = _Feedback.apply(loop, len(outputs), *outputs, *finals, *trail, *given, *fixed, *found)
        outputs, finals, trail = _grouped(results, len(outputs), len(given))
    return finals, trail if sequences else [], outputs


def _grouped(tensors: Sequence[Any], outs: int, states: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Return outputs, final states, states after every step."""
    return list(tensors[:outs]), list(tensors[outs : outs + states]), list(tensors[outs + states : outs + 2 * states])


class Loop:
    """The walks over time of one call.

    Attributes:
        rest: what is left of the core.
        inputs: sequences `[T, ...]` of the rest; None for the results of mixing calls of states.
        states: at the start.
        mix: the mixing calls.
    """

    def __init__(
        self, rest: Rest, core: Callable, look: CapturedValues, inputs: list[Tensor | None], states: Sequence[Tensor],
        params: tuple[Tensor, ...], mix: Sequence[MixingFunction], backend: str, num_outputs: int | None,
    ):  # fmt: skip
        self.rest, self.inputs, self.states, self.mix = (
            rest,
            [None if x is None else x.detach() for x in inputs],
            [v.detach() for v in states],
            mix,
        )
        self.T = next(x.shape[0] for x in inputs if x is not None)
        self.carried = [(len(rest.inputs) + j, rest.state_of(j), mix[j]) for j in rest.carried]
        self.metas = [rest.mixing[j].result for j in rest.carried]
        self._prepare = core, look, params, backend, num_outputs

    def step(self, *, trains: bool) -> tuple[Call, list[Tensor]]:
        """Return the call of the rest for one step, and the params and captured tensors that it reads.

        Args:
            trains: whether it has gradients of the results of mixing calls, and of states.
        """
        core, look, params, backend, num_outputs = self._prepare
        captured = look.tensors()
        operands = [*self.inputs, *self.states, *params, *captured.values()]
        kinds = [
            None if t is None else (t.shape, t.dtype, t.stride(), k >= len(self.inputs) and t.requires_grad) for k, t in enumerate(operands)
        ]
        key = ("step", trains, backend, num_outputs, *kinds)
        if key in look.over_parts:
            call = look.over_parts[key]
            return call, [*[p.detach() for p in params], *[captured[name].detach() for name in call.captured]]
        one = [None if x is None else x[:1] for x in self.inputs]
        for (place, _, _), meta in zip(self.carried, self.metas, strict=True):
            one[place] = self.states[0].new_empty((1, *meta.shape), dtype=meta.dtype)
        states = [v.clone() for v in self.states]
        for tensor in [*[one[place] for place, _, _ in self.carried], *states] if trains else ():
            tensor.requires_grad_(tensor.is_floating_point())
        with torch.set_grad_enabled(trains):
            look.over_parts[key] = call = prepare(
                core, look, self.rest.signature, one, states, params, captured, backend, trains, num_outputs
            )  # type: ignore[arg-type]  # all are there
        return call, [*[p.detach() for p in params], *[captured[name].detach() for name in call.captured]]

    @torch.no_grad()
    def forward(self, *, keeps: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Walk over time; return outputs `[T, ...]`, final states, and, if it `keeps` them, the results of the mixing calls of states."""
        call, statics = self.step(trains=False)
        outs, states = call.bounds[0], self.states
        if cpu_loop.takes(call, call.launch, self.carried, self.metas):
            one = [v.new_empty((1, *self.metas[0].shape)) if x is None else x[:1] for x in self.inputs for v in states[:1]]
            walk = cpu_loop.Walk(call, call.launch, self.T, _given(call, call.launch, call.prologue, [*one, *states, *statics]))
            writes = {role: (shape, dtype) for role, shape, dtype in call.launch.writes}
            outputs = [torch.empty((self.T, *shape[1:]), dtype=dtype) for shape, dtype in map(writes.__getitem__, call.results[:outs])]
            mixed = [torch.empty((self.T if keeps else 1, *m.shape), dtype=m.dtype) for m in self.metas]
            if (finals := cpu_loop.forward(walk, self.carried, self.inputs, states, mixed, outputs)) is not None:
                return outputs, finals, mixed
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
    def backward(
        self, mixed: Sequence[Tensor], trail: Sequence[Tensor], outputs: Sequence[Tensor | None], finals: Sequence[Tensor | None],
        trails: Sequence[Tensor | None],
    ) -> tuple[list[Tensor], dict[int, Tensor]]:  # fmt: skip
        """Walk back over time.

        Args:
            mixed: results of the mixing calls of states.
            trail: states after every step.
            outputs, finals, trails: cotangents of outputs, final states and states after every step.

        Returns:
            The cotangents of `mixed`; of each state that a mixing call takes, what flows to it by way of these calls, `[T + 1, ...]`: at the last, nothing.
        """
        call, statics = self.step(trains=True)
        rows = [None if x is None else x.unsqueeze(1).unbind(0) for x in self.inputs]
        for (place, _, _), m in zip(self.carried, mixed, strict=True):
            rows[place] = m.unsqueeze(1).unbind(0)
        needs = [False, *[place in {p for p, _, _ in self.carried} for place in range(len(rows))], *[True] * len(self.states)]
        ends = [torch.zeros_like(v) if g is None and v.is_floating_point() else g for v, g in zip(self.states, finals, strict=True)]
        kinds = [*[type(g) for g in (*outputs, *ends)], *[type(None)] * len(trail)]
        back = call.backward_for((*needs, *[False] * len(statics)), kinds)
        found = [torch.empty_like(m) for m in mixed]
        fed = {k: trail[k].new_empty((self.T + 1, *trail[k].shape[1:])) for _, k, _ in self.carried}
        for by in fed.values():
            by[self.T] = 0
        if cpu_loop.takes(call, back.launch, self.carried, self.metas) and all(g is None for g in trails):
            sequences = [*self.inputs]
            for (place, _, _), m in zip(self.carried, mixed, strict=True):
                sequences[place] = m
            one = [x[:1] for x in sequences if x is not None]
            walk = cpu_loop.Walk(call, back.launch, self.T, _given(call, back.launch, back.prologue, [*one, *self.states, *statics]))
            if cpu_loop.backward(walk, self.carried, sequences, self.states, trail, outputs, ends, found, fed):  # type: ignore[arg-type]  # all are there
                return found, fed
        for tensor in (*found, *fed.values()):
            tensor.zero_()
        for t in reversed(range(self.T)):
            states = self.states if t == 0 else [after[t - 1] for after in trail]
            saved = call.laid_out([*[row[t] for row in rows if row is not None], *states, *statics])
            ends = [a if b is None else b[t] if a is None else a + b[t] for a, b in zip(ends, trails, strict=True)]
            given = [*[None if g is None else g[t : t + 1] for g in outputs], *ends, *[None] * len(trail)]
            grads = call.backward(back, saved, given, call.order)
            ends = [
                torch.zeros_like(v) if g is None and v.is_floating_point() else g for v, g in zip(states, grads[len(rows) :], strict=False)
            ]
            for into, (place, k, f) in zip(found, self.carried, strict=True):
                if (grad := grads[place]) is not None:
                    into[t] = grad[0]
                    fed[k][t] += f.pulled(states[k], grad[0])
            for k, by in fed.items():
                ends[k] = ends[k] + by[t]  # type: ignore[operator]  # a state that a mixing call takes has a gradient
        return found, fed


def _given(call: Call, launch: Any, prologue: Any, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return operands of one step as a launch takes them, with the params that it reads; None for its cotangents."""
    laid_out = call.laid_out(tensors)
    params = [] if prologue is None else map(prologue(call.named(laid_out)).__getitem__, launch.params)
    return [*laid_out, *[None] * (len(launch.roles) - len(laid_out)), *params]


class _Feedback(torch.autograd.Function):
    """Outputs, final states and states after every step, as they are; the backward adds what flows through the mixing calls of states."""

    @staticmethod
    def forward(ctx: Any, loop: Loop, outs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`tensors`: outputs, final states, states after every step; initial states; fixed tensors of mixing calls, and their results."""
        states = len(loop.states)
        ctx.loop, ctx.outs = loop, outs
        ctx.save_for_backward(*tensors[outs + states : outs + 2 * states], *tensors[len(tensors) - len(loop.carried) :])
        ctx.set_materialize_grads(False)
        return tuple([t.view_as(t) for t in tensors[: outs + 2 * states]])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        loop: Loop = ctx.loop
        states = len(loop.states)
        trail, mixed = ctx.saved_tensors[:states], ctx.saved_tensors[states:]
        outputs, finals, trails = _grouped(grads, ctx.outs, states)
        found, fed = loop.backward(mixed, trail, outputs, finals, trails)
        starts: list[Tensor | None] = [None] * states
        for k, by in fed.items():
            starts[k] = by[0]
            trails[k] = by[1:] if trails[k] is None else trails[k] + by[1:]
        needs, of_fixed = list(ctx.needs_input_grad[2 + len(grads) + states :]), list[Tensor | None]()
        for (_, k, f), grad in zip(loop.carried, found, strict=True):
            own, needs = needs[: len(f.fixed)], needs[len(f.fixed) :]
            of_fixed += f.gradients(loop.states[k], trail[k][:-1], grad, own)
        return (None, None, *outputs, *finals, *trails, *starts, *of_fixed, *[None] * len(mixed))
