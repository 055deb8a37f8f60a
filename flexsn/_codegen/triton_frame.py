"""What Triton kernels of both directions are written with: their names and flags, functions of a step, the first lines, loads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch

from .._ir.graph import HALF, Graph, Node, Shape
from .._ir.roles import Kind, Role
from .._plan.plan import Array, KernelPlan
from .._version import __version__
from .language import numbers, safe
from .triton_values import COMPUTE, IMPORTS, TRITON, literal, smooth, template


def kernel_name(plan: KernelPlan) -> str:
    """Return the kernel's name, which profilers show."""
    name = f"{safe(plan.core).replace('.', '_')}_{plan.direction}{'_matrix' if plan.matrix else '_of_parts' if plan.over_parts else ''}"
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
def function(name: str, parameters: Sequence[str], comment: str, body: Sequence[str], result: Sequence[str]) -> list[str]:
    lines = ["@triton.jit", f"def {name}({', '.join(parameters)}):", f'    """{comment}"""', *(f"    {line}" for line in body)]
    return [*lines, *([f"    return {', '.join(result)}"] if result else []), "", ""]


def call(results: Sequence[str], function: str, arguments: Sequence[str]) -> str:
    call = f"{function}({', '.join(arguments)})"
    return f"{', '.join(results)} = {call}" if results else call


def computation(plan: KernelPlan, graph: Graph, name: str, comment: str, roles: Sequence[Role], results: Sequence[Role]) -> list[str]:
    """Return a function of one step: operands `roles`, in the form in which they lie in memory, to the outputs `results`."""
    fast = smooth(graph) if name == "vjp" else ()
    names = numbers_of(plan, graph)
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
    return function(name, [*operands, *names.values()], comment, body, [_result(graph.outputs[r], shape) for r in results])


def numbers_of(plan: KernelPlan, graph: Graph) -> dict[Node, str]:
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
class Frame:
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
        lengths = ["T", "N", "part_steps"] if plan.over_parts else ["T", "N"]
        parameters = [*pointers, *dims, *self.numbers, *lengths, *flags(plan), "BLOCK: tl.constexpr", "AHEAD: tl.constexpr"]
        lines = ["@triton.jit", f"def {kernel_name(plan)}({', '.join(parameters)}):", *self.describe()]
        lines += [f"    {k} = tl.full((), {k}, {COMPUTE[node.dtype]})" for node, k in numbers(plan).items()]
        lines += ["    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)", "    mask = i < N"]
        lines += self._part() if plan.over_parts else []
        before, like = None, {a.role: a.like for a in plan.reads}
        for role in self.params:
            sizes = f"i, N, {role}_inner, {role}_count"
            if before is None:
                lines.append(f"    {role}_at = math.index({sizes})")
            elif not like[role]:
                same = f"({role}_inner == {before}_inner) & ({role}_count == {before}_count)"
                lines.append(f"    {role}_at = math.index_or({before}_at, {same}, {sizes})")
            lines.append(f"    {role} = tl.load({role}_seq + {like[role] or role}_at, mask=mask, other=0)")
            before = like[role] or role
        return lines

    def _part(self) -> list[str]:
        """Return the lines that find the part of time of a program."""
        in_order = "part" if self.plan.direction == "forward" else "parts - 1 - part"
        return [
            "    part, parts = tl.program_id(1), tl.num_programs(1)",
            "    begin = part * part_steps  # of its steps; the last part may have fewer",
            "    T = tl.minimum(T - begin, part_steps)",
            f"    place = {in_order}  # in the order of the walk",
            "    row = i + place * N",
            *(f"    {r}_seq += begin * N" for r in (*self.sequences, *self.written)),
        ]

    def stop(self) -> list[str]:
        """Return the lines that find out after how many steps all sequences of a program have ended, and clear what is written after
        that."""
        end = self.plan.end
        if end is None or self.plan.over_parts:
            return []
        (left,) = [a for a in self.plan.reads if a.role == end]
        lines = [f"{end}_from = {self.first(left)}", f"whole, T = T, tl.maximum(0, tl.minimum(T, tl.max({end}_from)))"]
        clear = [f"tl.store({r}_seq + i + past * N, 0, mask=mask)" for r in self.written]
        return indented([*lines, "for past in range(T, whole):  # all sequences have ended", *indented(clear)])

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
        carried = self.plan.over_parts and a.role in self.carried
        if carried and self.plan.matrix:  # A begins with ones in its diagonal, b with nothing
            entry = self.carried.index(a.role) - len(self.carried) + len(self.plan.matrix)
            value = int(entry >= 0 and len(set(self.plan.matrix[entry])) == 1)
            return f"tl.full((BLOCK,), {value}, {COMPUTE[a.compute]})"
        at = "row" if carried else "i"
        return f"tl.load({a.role}_first + {at}, mask={where(self.is_given(a.role))}, other=0).to({COMPUTE[a.compute]})"

    def counted(self) -> str:
        """Return the mask of step j, if it is one of those that count: in chunks of one step all do."""
        return "mask" if self.plan.chunk == 1 else where("(j < count)")

    def last_rows(self) -> list[str]:
        rows = [a.role for a in self.plan.writes if a.kind == "row"]
        if not self.plan.over_parts:
            return [f"    tl.store({r}_last + i, {r}, mask=mask)" for r in rows]
        of_each = [r for r in rows if self.plan.matrix or r.kind is Kind.PARAM_GRAD]
        lines = [f"    tl.store({r}_last + row, {r}, mask=mask)" for r in of_each]
        ends = [r for r in rows if r not in of_each]
        return [*lines, *(f"    tl.store({r}_last + i, {r}, mask={where('(place == parts - 1)')})" for r in ends)]


def where(condition: str) -> str:
    """Return the mask where a condition on numbers holds, else off everywhere. Triton 3.9's interpreter takes no mask but of bools,
    and a comparison of numbers is none there; the last one, of a block, is."""
    return f"(mask & {condition}) != 0"


def _lengths(most: int) -> list[int]:
    """Return the steps for which code is written where at most `most` are left: powers of two, the shortest that serves is taken."""
    return [1 << k for k in range(most.bit_length())]


def indented(lines: Sequence[str], levels: int = 1) -> list[str]:
    return ["    " * levels + line for line in lines]


def reads(sequences: Sequence[str], count: object, length: int, *, to: str = "", at: str = "", mask: str = "mask") -> list[str]:
    return [f"{r}{to} = math.read({r}_at{at}, N, {mask}, count={count}, L={length})" for r in sequences]


def shortest(most: int, of_length: Callable[[int], list[str]]) -> list[str]:
    """Return the code of the shortest length that serves the `rest` steps that are left, one to `most`."""
    if most == 1:
        return of_length(1)
    lines: list[str] = []
    for length in reversed(_lengths(most)):
        test = f"{'elif' if lines else 'if'} rest > {length // 2}:"  # no `else`: Triton wants one type of what both branches define
        lines += [test, *indented(of_length(length))]
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
    lines = function(name, list(names.values()), f"One step, ({given}) -> ({given_back}).", body, returned)
    return "\n".join([f"# {name}: one step. Generated by flexsn {__version__}.", *IMPORTS, "", "", *lines[:-2], ""])
