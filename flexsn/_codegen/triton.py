"""Plan -> Triton source. Pure: needs neither triton nor a device.

One program walks all of T for BLOCK neurons, their states in registers. T is a run-time number: full chunks of K steps in
a loop, then the rest at once, by code for a power of two of steps of which as many count as are left. The loads of a chunk
are issued together, before its first step. The backward takes the rest and the chunks from the last to the first, recomputes
the states of each from its checkpoint, and keeps them in registers. For few steps (`plan.most`) there is at most one full chunk, and
no checkpoint: the states at the start of the rest are those that the chunk leaves.

The kernel is `<core>_forward(*plan.arguments, *(inner, count per param), *numbers, T, N, given, BLOCK, AHEAD)`, or `_backward`; `numbers`
are the constants of the core, bit k
of `given` says whether the k-th of `nullable(plan)` is there (where there are more than 31, `given_1` and so on follow it).
AHEAD: also issue the next chunk's loads before this one's steps.

Where parts of time run side by side (`plan.over_parts`), a program walks one of them, of `part_steps` steps, which follow N in the call.
"""

from __future__ import annotations

import functools

from .._ir.roles import Kind, Role, of_kind
from .._plan.plan import KernelPlan
from .language import safe, title
from .triton_frame import Frame, call, computation, function, indented, numbers_of, reads, shortest
from .triton_values import COMPUTE, IMPORTS


@functools.lru_cache(256)
def render(plan: KernelPlan) -> str:
    """Return the kernel's source text."""
    body = _forward(plan) if plan.direction == "forward" else _backward(plan)
    return "\n".join([*title(plan, "#"), *IMPORTS, "", "", *body, ""])


# --- forward -----------------------------------------------------------------------------------------------------------------------
def _forward(plan: KernelPlan) -> list[str]:
    f, K, core = Frame(plan), plan.chunk, safe(plan.core)
    states = f.carried
    outputs = {a.role: a.role.to(Kind.STATE) if a.role.kind is Kind.STATES else a.role for a in plan.writes if a.kind == "sequence"}
    operands = list(plan.step.inputs)
    results = of_kind(plan.step.outputs, Kind.OUTPUT)
    lines = computation(plan, plan.step, "step", f"One step of {core}.", operands, results + states)

    at = [f"{r}_at" for r in f.written]
    body = ["for j in tl.static_range(L):"]
    own = [*([f"{r}[j]" if r in f.sequences else r for r in operands] or ["mask"]), *numbers_of(plan, plan.step).values()]
    after = [f"{v}_next" if K > 1 else v for v in states]
    body.append("    " + call([*results, *after], "step", own))
    body += [f"    {v} = tl.where(j < count, {v}_next, {v})" for v in states if K > 1]
    body += [f"    tl.store({r}_at + j * N, {outputs[r]}, mask={f.counted()})" for r in f.written]
    parameters = [*f.sequences, *at, *states, *f.constant, "N", "mask", "count", "L: tl.constexpr"]
    lines += function("steps", parameters, "The first `count` of L steps, their inputs in registers.", body, states)

    def run(count: object, length: int) -> str:
        return call(states, "steps", [*f.sequences, *at, *states, *f.constant, "N", "mask", f"count={count}", f"L={length}"])

    def piece(length: int) -> list[str]:
        return [*reads(f.sequences, "rest", length), run("rest", length)]

    lines += [*f.open(), *f.stop()]
    lines += [f"    {a.role} = {f.first(a)}" for a in plan.carried if a.role in f.nullable]
    lines += [f"    {r}_at = {r}_seq + i" for r in (*f.sequences, *f.written)]
    save: list[str] = []
    if f.checkpoints:
        lines += ["    t, saved_at = 0, i - N"] if not plan.over_parts else [f"    t, saved_at = begin, i + (begin // {K} - 1) * N"]
        save = ["saved = (mask & (t > 0)) != 0  # the states at the start of a chunk"]
        save += [f"tl.store({r}_seq + saved_at, {r.to(Kind.STATE)}, mask=saved)" for r in f.checkpoints]
        save += ["saved_at += N"]
    if f.sequences:
        lines += ["    if AHEAD:", *indented(reads(f.sequences, K, K, to="_next", mask=f"mask & (T >= {K})"), 2)]
    lines.append(f"    for left in range(T // {K}, 0, -1):")
    body = save
    if f.sequences:
        body = [*body, "if AHEAD:", *(f"    {r} = {r}_next" for r in f.sequences)]
        body += indented(reads(f.sequences, K, K, to="_next", at=f" + {K} * N", mask="mask & (left > 1)"))
        body += ["else:", *indented(reads(f.sequences, K, K))]
    body = [*body, run(K, K), *(f"{r}_at += {K} * N" for r in (*f.sequences, *f.written)), *([f"t += {K}"] if save else [])]
    lines += indented(body, 2)
    if K > 1:
        lines += [f"    rest = T % {K}", "    if rest > 0:", *indented([*save, *shortest(K if K > 2 else 1, piece)], 2)]
    if plan.end is not None and not plan.over_parts:
        lines += _after_the_end(f, K)
    return [*lines, *f.last_rows()]


def _after_the_end(f: Frame, K: int) -> list[str]:
    """Return the lines that store the states at the starts of the chunks that are left when all sequences have ended."""
    end = f.plan.end
    lines = []
    if f.checkpoints:
        own = [f"{r.to(Kind.STATE)}{' - (start - T)' if r.to(Kind.STATE) == end else ''}" for r in f.checkpoints]
        lines = [f"for start in range((T + {K - 1}) // {K} * {K}, whole, {K}):", "    saved = (mask & (start > 0)) != 0"]
        lines.append(f"    saved_at = i + (start // {K} - 1) * N")
        lines += [f"    tl.store({r}_seq + saved_at, {value}, mask=saved)" for r, value in zip(f.checkpoints, own, strict=True)]
    return indented([*lines, f"{end} -= whole - T"])


# --- backward ------------------------------------------------------------------------------------------------------------------------
def _backward(plan: KernelPlan) -> list[str]:
    assert plan.advance is not None
    f, core, ahead, vjp = Frame(plan), safe(plan.core), plan.advance, plan.step
    states = of_kind([a.role for a in plan.reads if a.kind == "row"], Kind.STATE)
    lines: list[str] = []
    if states:
        lines += computation(plan, ahead, "advance", f"The states of {core} one step on.", list(ahead.inputs), states)
    comment = f"One step back: the vector-Jacobian product of {core}."
    lines += computation(plan, vjp, "vjp", comment, list(vjp.inputs), list(vjp.outputs))
    loop = _BackwardLoop(plan, f, states)
    lines += loop.functions()

    lines += f.open()
    for a in plan.carried:
        zero = f"tl.zeros((BLOCK,), {COMPUTE[a.compute]})"
        lines.append(f"    {a.role} = {f.first(a) if a.role in f.nullable else zero}")
    lines += f.stop()
    lines += ["    t = begin + T" if plan.over_parts else "    t = T", *(f"    {r}_at = {r}_seq + i + T * N" for r in loop.moving)]
    if loop.states and plan.most is None:
        lines += [f"    saved_at = i + (({'t' if plan.over_parts else 'T'} - 1) // {plan.chunk} - 1) * N  # of the last chunk"]
        lines += [f"    {v}_at, {v}_given = {v}_first + i, {f.is_given(v)}" for v in loop.states]
    return [*lines, *indented(loop.rest()), *indented(loop.chunks()), *f.last_rows()]


class _BackwardLoop:
    """Writes the loop of a backward: what is left of T after the full chunks, then the chunks, from the last step to the first."""

    def __init__(self, plan: KernelPlan, frame: Frame, states: list[Role]):
        assert plan.advance is not None
        self.plan, self.frame, self.states, self.K = plan, frame, states, plan.chunk
        self.advance = [r if r not in frame.sequences else f"{r}[j]" for r in plan.advance.inputs] or ["mask"]
        self.advance += numbers_of(plan, plan.advance).values()
        self.needed = [r for r in plan.advance.inputs if r in frame.sequences]
        self.moving = [*frame.sequences, *frame.written]

    # --- functions ---------------------------------------------------------------------------------------------------
    def functions(self) -> list[str]:
        lines = self.after() if self.states and self.K > 2 else []
        f, states = self.frame, self.states
        body = [f"{v}_all = ({v},)" for v in states]
        if states:
            body += ["for j in tl.static_range(L - 1):", "    " + call(states, "advance", self.advance)]
            body += [f"    {v}_all = {v}_all + ({v},)" for v in states]
        body.append("for j in tl.static_range(L - 1, -1, -1):")
        body += [f"    {line}" for line in self.step_back()]
        body += [f"    tl.store({r}_at + j * N, {r}, mask={f.counted()})" for r in f.written]
        at = [f"{r}_at" for r in f.written]
        parameters = [*f.sequences, *at, *states, *f.carried, *f.constant, "N", "mask", "count", "L: tl.constexpr"]
        comment = "The first `count` of L steps: the states on from the first, then the gradients back."
        return lines + function("steps", parameters, comment, body, f.carried)

    def after(self) -> list[str]:
        body = ["for j in tl.static_range(L):", "    " + call(self.states, "advance", self.advance)]
        parameters = [*self.needed, *self.states, *self.frame.constant, "mask", "L: tl.constexpr"]
        return function("after", parameters, "The states L steps on.", body, self.states)

    def step_back(self) -> list[str]:
        """Return the lines of step j: the cotangents of the states before it, and what it adds to gradients of params."""
        f, step = self.frame, self.plan.step
        cotangents = of_kind(f.carried, Kind.STATE_GRAD)
        own_sequences = {r: r.to(Kind.STATES_GRAD) for r in cotangents}
        given = {r: f"{r} + {s}[j].to({r}.dtype)" if s in f.sequences else r for r, s in own_sequences.items()}
        own = {r: f"{r}[j]" for r in f.sequences} | {v: f"{v}_all[j]" for v in self.states} | given
        one = self.K == 1  # all steps count
        results = [f"{r}_step" if r in f.carried and not (one and r in cotangents) else r for r in step.outputs]
        operands = [own.get(r, r) for r in step.inputs] or ["mask"]
        lines = [call(results, "vjp", [*operands, *numbers_of(self.plan, step).values()])]
        for r in f.carried:
            new = f"{r}_step" if r in cotangents else f"{r} + {r}_step"
            if not one:
                lines.append(f"{r} = tl.where(j < count, {new}, {r})")
            elif r not in cotangents:
                lines.append(f"{r} = {new}")
        return lines

    # --- calls -------------------------------------------------------------------------------------------------------
    def run(self, count: object, length: int, at: str = "") -> str:
        f = self.frame
        places = [f"{r}_at{at}" for r in f.written]
        own = [*f.sequences, *places, *self.states, *f.carried, *f.constant, "N", "mask", f"count={count}", f"L={length}"]
        return call(f.carried, "steps", own)

    def back(self, length: object) -> list[str]:
        return [f"t -= {length}", *(f"{r}_at -= {length} * N" for r in self.moving)]

    def starts(self, t: str, to: str = "") -> list[str]:
        """Return the lines that load the states at the start of the chunk that starts at t."""
        f = self.frame
        if self.plan.most is not None:
            return [f"{a.role}{to} = {f.first(a)}" for a in self.plan.reads if a.role in self.states]
        own = [f"{v}{to} = math.state_at(start, {v.to(Kind.CHECKPOINT)}_seq + saved_at, {v}_at, {v}_given, mask)" for v in self.states]
        return [f"start = {t}", *own, "saved_at -= N"] if own else []

    def on(self, length: int, at: str = "") -> list[str]:
        """Return the lines that take the states on through `length` steps."""
        if not self.states:
            return []
        run = call(self.states, "after", [*self.needed, *self.states, *self.frame.constant, "mask", f"L={length}"])
        return [*reads(self.needed, length, length, at=at), run]

    # --- the loop ----------------------------------------------------------------------------------------------------
    def rest(self) -> list[str]:
        """Return the lines for what is left, by code for half a chunk, which needs no more registers than the chunks: its second half
        comes first."""
        half, f = self.K // 2, self.frame
        if not half:
            return []

        def piece(length: int) -> list[str]:
            return [*reads(f.sequences, "rest", length), self.run("rest", length)]

        body = [*self.back("rest"), *self.starts("t")]
        if self.plan.most is not None and self.plan.most > self.K and self.states:
            body += ["if t > 0:  # after the chunk", *indented(self.on(self.K, at=f" - {self.K} * N"))]
        if half > 1:
            later = [*self.on(half), *reads(f.sequences, f"rest - {half}", half, at=f" + {half} * N")]
            later += [self.run(f"rest - {half}", half, at=f" + {half} * N"), f"rest = {half}"]
            again = [f"{v} = {v}_half" for v in self.states]
            body += [f"{v}_half = {v}" for v in self.states]
            body += [f"if rest > {half}:", *indented([*later, *again])]
        return [f"rest = T % {self.K}", "if rest > 0:", *indented([*body, *shortest(half, piece)])]

    def chunks(self) -> list[str]:
        K, states, sequences = self.K, self.states, self.frame.sequences

        def fetch_next(mask: str) -> list[str]:
            return [*self.starts(f"(t - {K})", "_next"), *reads(sequences, K, K, to="_next", at=f" - {K} * N", mask=mask)]

        lines = []
        body = self.back(K)
        if states or sequences:
            lines += ["if AHEAD:", *indented(fetch_next(f"mask & (T >= {K})"))]
            body += ["if AHEAD:", *(f"    {r} = {r}_next" for r in (*states, *sequences)), *indented(fetch_next("mask & (left > 1)"))]
            body += ["else:", *indented([*self.starts("t"), *reads(sequences, K, K)])]
        lines += [f"for left in range(T // {K}, 0, -1):", *indented([*body, self.run(K, K)])]
        return lines
