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
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch

from .._ir.graph import HALF, Graph, Node, Shape
from .._ir.roles import Kind, Role, of_kind
from .._plan.plan import Array, KernelPlan
from .._version import __version__
from .language import numbers, safe, title
from .triton_values import COMPUTE, IMPORTS, TRITON, literal, smooth, template


@functools.lru_cache(256)
def render(plan: KernelPlan) -> str:
    """Return the kernel's source text."""
    body = _forward(plan) if plan.direction == "forward" else _backward(plan)
    return "\n".join([*title(plan, "#"), *IMPORTS, "", "", *body, ""])


def kernel_name(plan: KernelPlan) -> str:
    """Return the kernel's name, which profilers show."""
    name = f"{safe(plan.core).replace('.', '_')}_{plan.direction}"
    return name if name.isidentifier() else f"core_{name}"


def nullable(plan: KernelPlan) -> list[Array]:
    """Return the rows that a call may lack, zero then: initial states, cotangents of final states."""
    return [a for a in plan.reads if a.kind == "row"]


_BITS = 31  # of a flag: it is an int32


def flags(plan: KernelPlan) -> list[str]:
    """Return the names of the numbers that say which of `nullable(plan)` are there."""
    return [f"given_{k}" if k else "given" for k in range(len(packed([False] * len(nullable(plan)))))]


def packed(present: Sequence[bool]) -> tuple[int, ...]:
    """Return the numbers of `flags`: bit by bit, whether each of `nullable(plan)` is there."""
    parts = [present[k : k + _BITS] for k in range(0, max(1, len(present)), _BITS)]
    return tuple([sum(1 << bit for bit, there in enumerate(part) if there) for part in parts])


# --- functions -----------------------------------------------------------------------------------------------------------------
def _function(name: str, parameters: Sequence[str], comment: str, body: Sequence[str], result: Sequence[str]) -> list[str]:
    lines = ["@triton.jit", f"def {name}({', '.join(parameters)}):", f'    """{comment}"""', *(f"    {line}" for line in body)]
    return [*lines, *([f"    return {', '.join(result)}"] if result else []), "", ""]


def _call(results: Sequence[str], function: str, arguments: Sequence[str]) -> str:
    call = f"{function}({', '.join(arguments)})"
    return f"{', '.join(results)} = {call}" if results else call


def computation(plan: KernelPlan, graph: Graph, name: str, comment: str, roles: Sequence[Role], results: Sequence[Role]) -> list[str]:
    """Return a function of one step: operands `roles`, in the form in which they lie in memory, to the outputs `results`."""
    fast = smooth(graph) if name == "vjp" else ()
    names = _numbers(plan, graph)
    language = dataclasses.replace(
        TRITON, template=functools.partial(template, fast=fast), constant=lambda node, user: names.get(node) or TRITON.constant(node, user)
    )
    stored = {a.role: a.storage for a in plan.reads if a.kind in ("sequence", "param")}
    inside = {r: graph.inputs[r].name for r in roles}
    body = []
    for role in roles:
        node = graph.inputs[role]
        if COMPUTE[stored.get(role, node.dtype)] != f"tl.{_long(stored.get(role, node.dtype))}":  # a 16-bit float
            body.append(f"{node.name} = {node.name}.to({COMPUTE[node.dtype]})")
    body += graph.written or language.statements(graph)
    operands = list(inside.values()) or ["mask"]  # without operands, `mask` tells the shape
    shape = f"{operands[0]}.shape"
    return _function(name, [*operands, *names.values()], comment, body, [_result(graph.outputs[r], shape) for r in results])


def _numbers(plan: KernelPlan, graph: Graph) -> dict[Node, str]:
    """Return those of the kernel's numbers that a graph takes."""
    taken = {a for n in graph.nodes for a in n.args}
    return {node: name for node, name in numbers(plan).items() if node in taken}


def _long(dtype: torch.dtype) -> str:
    return {torch.bool: "int1"}.get(dtype, str(dtype).removeprefix("torch."))


def _result(node: Node, shape: str) -> str:
    """Return a result; a value that depends on no operand is spread over the block."""
    if node.shape is not Shape.NUMBER:
        return node.name
    return f"tl.full({shape}, {literal(node) if node.op == 'const' else node.name}, {COMPUTE[node.dtype]})"


# --- the frame -------------------------------------------------------------------------------------------------------------------
class _Frame:
    """Writes what the two directions share: names, parameters, the first lines."""

    def __init__(self, plan: KernelPlan):
        self.plan = plan
        self.params = [a.role for a in plan.reads if a.kind == "param"]
        self.numbers = list(numbers(plan).values())
        self.constant = [*self.params, *self.numbers]  # what all steps take
        self.sequences = [a.role for a in plan.reads if a.kind == "sequence"]
        self.written = [a.role for a in plan.writes if a.kind == "sequence"]
        self.carried = [a.role for a in plan.carried]
        self.checkpoints = [a.role for a in plan.used(plan.arguments) if a.kind == "checkpoint"]
        self.nullable = [a.role for a in nullable(plan)]

    def pointer(self, a: Array, read: bool) -> str:
        return f"{a.role}_seq" if a.kind != "row" else f"{a.role}_first" if read else f"{a.role}_last"

    def open(self) -> list[str]:
        plan = self.plan
        pointers = [self.pointer(a, i < len(plan.reads)) for i, a in enumerate(plan.arguments)]
        dims = [f"{r}_{d}" for r in self.params for d in ("inner", "count")]
        parameters = [*pointers, *dims, *self.numbers, "T", "N", *flags(plan), "BLOCK: tl.constexpr", "AHEAD: tl.constexpr"]
        lines = ["@triton.jit", f"def {kernel_name(plan)}({', '.join(parameters)}):", *self.describe()]
        lines += [f"    {k} = tl.full((), {k}, {COMPUTE[node.dtype]})" for node, k in numbers(plan).items()]
        lines += ["    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)", "    mask = i < N"]
        for before, role in zip([None, *self.params], self.params, strict=False):
            sizes = f"i, N, {role}_inner, {role}_count"
            if before is None:
                lines.append(f"    {role}_at = math.index({sizes})")
            else:
                same = f"({role}_inner == {before}_inner) & ({role}_count == {before}_count)"
                lines.append(f"    {role}_at = math.index_or({before}_at, {same}, {sizes})")
            lines.append(f"    {role} = tl.load({role}_seq + {role}_at, mask=mask, other=0)")
        return lines

    def describe(self) -> list[str]:
        notes = []
        for role in self.nullable:
            flag, bit = self.flag(role)
            notes.append(f"bit {bit} of `{flag}`: {role}_first is there")
        if self.params:
            notes.append("neuron i reads param element (i // inner) % count")
        return [f"    # {note}" for note in notes]

    def flag(self, role: Role) -> tuple[str, int]:
        """Return which flag, and which bit of it, says whether a row is there."""
        word, bit = divmod(self.nullable.index(role), _BITS)
        return flags(self.plan)[word], bit

    def is_given(self, role: Role) -> str:
        flag, bit = self.flag(role)
        return f"(({flag} & {1 << bit}) != 0)"

    def first(self, a: Array) -> str:
        return f"tl.load({a.role}_first + i, mask={_where(self.is_given(a.role))}, other=0).to({COMPUTE[a.compute]})"

    def last_rows(self) -> list[str]:
        return [f"    tl.store({a.role}_last + i, {a.role}, mask=mask)" for a in self.plan.writes if a.kind == "row"]


def _where(condition: str) -> str:
    """Return the mask where a condition on numbers holds, else off everywhere. Triton 3.9's interpreter takes no mask but of bools,
    and a comparison of numbers is none there; the last one, of a block, is."""
    return f"(mask & {condition}) != 0"


def _lengths(most: int) -> list[int]:
    """Return the steps for which code is written where at most `most` are left: powers of two, the shortest that serves is taken."""
    return [1 << k for k in range(most.bit_length())]


def _indented(lines: Sequence[str], levels: int = 1) -> list[str]:
    return ["    " * levels + line for line in lines]


def _reads(sequences: Sequence[str], count: object, length: int, *, to: str = "", at: str = "", mask: str = "mask") -> list[str]:
    return [f"{r}{to} = math.read({r}_at{at}, N, {mask}, count={count}, L={length})" for r in sequences]


def _shortest(most: int, of_length: Callable[[int], list[str]]) -> list[str]:
    """Return the code of the shortest length that serves the `rest` steps that are left, one to `most`."""
    if most == 1:
        return of_length(1)
    lines: list[str] = []
    for length in reversed(_lengths(most)):
        test = f"{'elif' if lines else 'if'} rest > {length // 2}:"  # no `else`: Triton wants one type of what both branches define
        lines += [test, *_indented(of_length(length))]
    return lines


# --- forward -----------------------------------------------------------------------------------------------------------------------
def _forward(plan: KernelPlan) -> list[str]:
    f, K, core = _Frame(plan), plan.chunk, safe(plan.core)
    states = f.carried
    outputs = {a.role: a.role.to(Kind.STATE) if a.role.kind is Kind.STATES else a.role for a in plan.writes if a.kind == "sequence"}
    operands = list(plan.step.inputs)
    results = of_kind(plan.step.outputs, Kind.OUTPUT)
    lines = computation(plan, plan.step, "step", f"One step of {core}.", operands, results + states)

    at = [f"{r}_at" for r in f.written]
    body = ["for j in tl.static_range(L):"]
    own = [*([f"{r}[j]" if r in f.sequences else r for r in operands] or ["mask"]), *_numbers(plan, plan.step).values()]
    body.append("    " + _call([*results, *(f"{v}_next" for v in states)], "step", own))
    body += [f"    {v} = tl.where(j < count, {v}_next, {v})" for v in states]
    body += [f"    tl.store({r}_at + j * N, {outputs[r]}, mask={_where('(j < count)')})" for r in f.written]
    parameters = [*f.sequences, *at, *states, *f.constant, "N", "mask", "count", "L: tl.constexpr"]
    lines += _function("steps", parameters, "The first `count` of L steps, their inputs in registers.", body, states)

    def run(count: object, length: int) -> str:
        return _call(states, "steps", [*f.sequences, *at, *states, *f.constant, "N", "mask", f"count={count}", f"L={length}"])

    def piece(length: int) -> list[str]:
        return [*_reads(f.sequences, "rest", length), run("rest", length)]

    lines += f.open()
    lines += [f"    {a.role} = {f.first(a)}" for a in plan.carried if a.role in f.nullable]
    lines += [f"    {r}_at = {r}_seq + i" for r in (*f.sequences, *f.written)]
    lines += [f"    {r}_at = {r}_seq + i - N" for r in f.checkpoints]
    save = [f"tl.store({r}_at, {r.to(Kind.STATE)}, mask={_where('(t > 0)')})  # the state at the start of a chunk" for r in f.checkpoints]
    save += [f"{r}_at += N" for r in f.checkpoints]
    if save:
        lines.append("    t = 0")
    if f.sequences:
        lines += ["    if AHEAD:", *_indented(_reads(f.sequences, K, K, to="_next", mask=f"mask & (T >= {K})"), 2)]
    lines.append(f"    for left in range(T // {K}, 0, -1):")
    body = save
    if f.sequences:
        body = [*body, "if AHEAD:", *(f"    {r} = {r}_next" for r in f.sequences)]
        body += _indented(_reads(f.sequences, K, K, to="_next", at=f" + {K} * N", mask="mask & (left > 1)"))
        body += ["else:", *_indented(_reads(f.sequences, K, K))]
    body = [*body, run(K, K), *(f"{r}_at += {K} * N" for r in (*f.sequences, *f.written)), *([f"t += {K}"] if save else [])]
    lines += _indented(body, 2)
    if K > 1:
        lines += [f"    rest = T % {K}", "    if rest > 0:", *_indented([*save, *_shortest(K if K > 2 else 1, piece)], 2)]
    return [*lines, *f.last_rows()]


# --- backward ------------------------------------------------------------------------------------------------------------------------
def _backward(plan: KernelPlan) -> list[str]:
    assert plan.advance is not None
    f, core, ahead, vjp = _Frame(plan), safe(plan.core), plan.advance, plan.step
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
    lines += ["    t = T", *(f"    {r}_at = {r}_seq + i + T * N" for r in loop.moving)]
    lines += [f"    {r}_at = {r}_seq + i + ((T - 1) // {plan.chunk} - 1) * N  # of the last chunk" for r in f.checkpoints]
    return [*lines, *_indented(loop.rest()), *_indented(loop.chunks()), *f.last_rows()]


class _BackwardLoop:
    """Writes the loop of a backward: what is left of T after the full chunks, then the chunks, from the last step to the first."""

    def __init__(self, plan: KernelPlan, frame: _Frame, states: list[Role]):
        assert plan.advance is not None
        self.plan, self.frame, self.states, self.K = plan, frame, states, plan.chunk
        self.advance = [r if r not in frame.sequences else f"{r}[j]" for r in plan.advance.inputs] or ["mask"]
        self.advance += _numbers(plan, plan.advance).values()
        self.needed = [r for r in plan.advance.inputs if r in frame.sequences]
        self.moving = [*frame.sequences, *frame.written]

    # --- functions ---------------------------------------------------------------------------------------------------
    def functions(self) -> list[str]:
        lines = self.after() if self.states and self.K > 2 else []
        f, states = self.frame, self.states
        body = [f"{v}_all = ({v},)" for v in states]
        if states:
            body += ["for j in tl.static_range(L - 1):", "    " + _call(states, "advance", self.advance)]
            body += [f"    {v}_all = {v}_all + ({v},)" for v in states]
        body.append("for j in tl.static_range(L - 1, -1, -1):")
        body += [f"    {line}" for line in self.step_back()]
        body += [f"    tl.store({r}_at + j * N, {r}, mask={_where('(j < count)')})" for r in f.written]
        at = [f"{r}_at" for r in f.written]
        parameters = [*f.sequences, *at, *states, *f.carried, *f.constant, "N", "mask", "count", "L: tl.constexpr"]
        comment = "The first `count` of L steps: the states on from the first, then the gradients back."
        return lines + _function("steps", parameters, comment, body, f.carried)

    def after(self) -> list[str]:
        body = ["for j in tl.static_range(L):", "    " + _call(self.states, "advance", self.advance)]
        parameters = [*self.needed, *self.states, *self.frame.constant, "mask", "L: tl.constexpr"]
        return _function("after", parameters, "The states L steps on.", body, self.states)

    def step_back(self) -> list[str]:
        """Return the lines of step j: the cotangents of the states before it, and what it adds to gradients of params."""
        f, step = self.frame, self.plan.step
        cotangents = of_kind(f.carried, Kind.STATE_GRAD)
        own_sequences = {r: r.to(Kind.STATES_GRAD) for r in cotangents}
        given = {r: f"{r} + {s}[j].to({r}.dtype)" if s in f.sequences else r for r, s in own_sequences.items()}
        own = {r: f"{r}[j]" for r in f.sequences} | {v: f"{v}_all[j]" for v in self.states} | given
        results = [f"{r}_step" if r in f.carried else r for r in step.outputs]
        operands = [own.get(r, r) for r in step.inputs] or ["mask"]
        lines = [_call(results, "vjp", [*operands, *_numbers(self.plan, step).values()])]
        for r in f.carried:
            new = f"{r}_step" if r in cotangents else f"{r} + {r}_step"
            lines.append(f"{r} = tl.where(j < count, {new}, {r})")
        return lines

    # --- calls -------------------------------------------------------------------------------------------------------
    def run(self, count: object, length: int, at: str = "") -> str:
        f = self.frame
        places = [f"{r}_at{at}" for r in f.written]
        own = [*f.sequences, *places, *self.states, *f.carried, *f.constant, "N", "mask", f"count={count}", f"L={length}"]
        return _call(f.carried, "steps", own)

    def back(self, length: object) -> list[str]:
        return [f"t -= {length}", *(f"{r}_at -= {length} * N" for r in self.moving)]

    def starts(self, t: str, to: str = "") -> list[str]:
        """Return the lines that load the states at the start of the chunk that starts at t."""
        f = self.frame
        if self.plan.most is not None:
            return [f"{a.role}{to} = {f.first(a)}" for a in self.plan.reads if a.role in self.states]
        own = [f"{v}{to} = math.state_at({t}, {v.to(Kind.CHECKPOINT)}_at, {v}_first + i, {f.is_given(v)}, mask)" for v in self.states]
        return [*own, *(f"{r}_at -= N" for r in f.checkpoints)]

    def on(self, length: int, at: str = "") -> list[str]:
        """Return the lines that take the states on through `length` steps."""
        if not self.states:
            return []
        call = _call(self.states, "after", [*self.needed, *self.states, *self.frame.constant, "mask", f"L={length}"])
        return [*_reads(self.needed, length, length, at=at), call]

    # --- the loop ----------------------------------------------------------------------------------------------------
    def rest(self) -> list[str]:
        """Return the lines for what is left, by code for half a chunk, which needs no more registers than the chunks: its second half
        comes first."""
        half, f = self.K // 2, self.frame
        if not half:
            return []

        def piece(length: int) -> list[str]:
            return [*_reads(f.sequences, "rest", length), self.run("rest", length)]

        body = [*self.back("rest"), *self.starts("t")]
        if self.plan.most is not None and self.plan.most > self.K and self.states:
            body += ["if t > 0:  # after the chunk", *_indented(self.on(self.K, at=f" - {self.K} * N"))]
        if half > 1:
            later = [*self.on(half), *_reads(f.sequences, f"rest - {half}", half, at=f" + {half} * N")]
            later += [self.run(f"rest - {half}", half, at=f" + {half} * N"), f"rest = {half}"]
            again = [f"{v} = {v}_half" for v in self.states]
            body += [f"{v}_half = {v}" for v in self.states]
            body += [f"if rest > {half}:", *_indented([*later, *again])]
        return [f"rest = T % {self.K}", "if rest > 0:", *_indented([*body, *_shortest(half, piece)])]

    def chunks(self) -> list[str]:
        K, states, sequences = self.K, self.states, self.frame.sequences

        def fetch_next(mask: str) -> list[str]:
            return [*self.starts(f"(t - {K})", "_next"), *_reads(sequences, K, K, to="_next", at=f" - {K} * N", mask=mask)]

        lines = []
        body = self.back(K)
        if states or sequences:
            lines += ["if AHEAD:", *_indented(fetch_next(f"mask & (T >= {K})"))]
            body += ["if AHEAD:", *(f"    {r} = {r}_next" for r in (*states, *sequences)), *_indented(fetch_next("mask & (left > 1)"))]
            body += ["else:", *_indented([*self.starts("t"), *_reads(sequences, K, K)])]
        lines += [f"for left in range(T // {K}, 0, -1):", *_indented([*body, self.run(K, K)])]
        return lines


# --- a step alone ----------------------------------------------------------------------------------------------------------------------
def render_step(graph: Graph, name: str, operands: Sequence[str], results: Sequence[str | None]) -> str:
    """Return one step as a `@triton.jit` function of values in the form in which they lie in memory.

    Args:
        operands: roles of its arguments, in order; it need not read them all.
        results: roles of what it returns; None for a zero.
    """
    taken, made = list(map(Role.of, operands)), [None if r is None else Role.of(r) for r in results]
    names = {r: graph.inputs[r].name if r in graph.inputs else f"unused_{r}" for r in taken}
    wide = [n for n in graph.inputs.values() if n.dtype in HALF]
    body = [f"{n.name} = {n.name}.to({COMPUTE[n.dtype]})" for n in wide] + TRITON.statements(graph)
    shape = f"{next(iter(names.values()))}.shape"
    returned = [f"tl.zeros({shape}, tl.float32)" if r is None else _result(graph.outputs[r], shape) for r in made]
    kinds = [_long(graph.inputs[r].dtype) if r in graph.inputs else "anything" for r in taken]
    given = ", ".join(f"{n}: {kind}" for n, kind in zip(names.values(), kinds, strict=True))
    given_back = ", ".join("0" if r is None else _long(graph.outputs[r].dtype) for r in made)
    lines = _function(name, list(names.values()), f"One step, ({given}) -> ({given_back}).", body, returned)
    return "\n".join([f"# {name}: one step. Generated by flexsn {__version__}.", *IMPORTS, "", "", *lines[:-2], ""])
