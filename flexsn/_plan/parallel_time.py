"""Plans of kernels that walk parts of time side by side, and what passes from part to part.

A step that is affine in what it carries (`_ir/affine.py`) makes of a part of time one matrix and one vector: `new = A carried + b`.
Three walks give what one walk over all of T gives, up to rounding: a kernel that carries `A` and `b` over every part, side by side; a
walk from part to part over these alone; and the kernel itself over every part, side by side, from what came in at its start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from .._ir.affine import MOST_STATES, coupled, with_matrix
from .._ir.graph import Builder, Graph, Node
from .._ir.roles import Kind, Role, of_kind, roles
from .plan import Array, KernelPlan, plan_backward, plan_forward

LONGEST = 256  # steps of a part: `A` is a product over so many, which overflows later than one over more


def steps_of_part(chunk: int) -> int:
    """Return the steps of a part: an odd number of chunks, so that the same step of several parts does not meet in one set of a cache."""
    chunks = max(1, LONGEST // chunk)
    return chunk * (chunks - 1 + chunks % 2)


def _wide(made: KernelPlan) -> KernelPlan:
    """Return the plan whose rows lie in memory as they are computed, so that what passes from part to part loses no digits."""

    def widened(arrays: Sequence[Array]) -> tuple[Array, ...]:
        return tuple([dataclasses.replace(a, storage=a.compute) if a.kind == "row" else a for a in arrays])

    return dataclasses.replace(made, reads=widened(made.reads), writes=widened(made.writes))


def parallel_backward(
    joint: Graph, storage: Mapping[Role, torch.dtype], *, chunk: int, wanted: Sequence[str], cotangents: Sequence[str]
) -> tuple[KernelPlan, KernelPlan] | None:
    """Return the two kernels of a backward that `plan_backward` takes: the one that carries `A` and `b` of the cotangents of states, and
    the one that walks every part. None where there are no such states, more than `MOST_STATES`, or a step that is not affine in them.

    The first writes `b` to the roles of the cotangents, and the entries of `A` to those that follow, in the order of `matrix`.
    """
    joint = joint.for_cotangents(cotangents)
    carried = of_kind(joint.outputs, Kind.STATE_GRAD)
    entries = _entries(joint, carried)
    if entries is None:
        return None
    graph, more = with_matrix(joint, carried, entries)
    storage = {**storage, **{role.primal: joint.outputs[carried[0]].dtype for role in more}}
    first = plan_backward(graph, storage, chunk=chunk, wanted=[*carried, *more], cotangents=cotangents)
    walk = plan_backward(joint, storage, chunk=chunk, wanted=list(dict.fromkeys([*wanted, *carried])), cotangents=cotangents)
    return _wide(dataclasses.replace(first, matrix=tuple(entries))), _wide(walk)


def parallel_forward(
    step: Graph, storage: Mapping[Role, torch.dtype], *, chunk: int, checkpoint: bool, sequences: bool
) -> tuple[KernelPlan, KernelPlan] | None:
    """Return the two kernels of a forward that `plan_forward` takes, as `parallel_backward`; of `A` and `b` of the states."""
    carried = of_kind(step.outputs, Kind.STATE)
    entries = _entries(step, carried)
    if entries is None:
        return None
    graph, more = with_matrix(step, carried, entries)
    storage = {**storage, **{role: step.outputs[carried[0]].dtype for role in more}}
    first = plan_forward(graph, storage, chunk=chunk, checkpoint=False, sequences=False)
    walk = plan_forward(step, storage, chunk=chunk, checkpoint=checkpoint, sequences=sequences)
    return _wide(dataclasses.replace(first, matrix=tuple(entries))), _wide(walk)


def _entries(step: Graph, carried: Sequence[Role]) -> list[tuple[int, int]] | None:
    """Return the entries of `A`, in order; None where parts of time cannot be walked side by side."""
    found = None if why_in_order(step, carried) else coupled(step.select(carried), carried)
    return sorted(found) if isinstance(found, set) else None


def kernels_over_parts(main: KernelPlan, matrix: KernelPlan) -> tuple[KernelPlan, KernelPlan, KernelPlan]:
    """Return the kernels of a GPU, whose programs walk a part of time each: the one that carries `A` and `b`, the walk from part to part,
    and the one that walks every part, as `main` walks all of T.

    What passes from part to part lies in rows [parts, N], in the order of the walk: of a backward, the last part comes first.
    """
    rows = carried_rows(matrix)
    reads = [dataclasses.replace(a, storage=a.compute) if a.role in rows else a for a in main.reads]
    walk = dataclasses.replace(main, reads=tuple(reads), longest=None, over_parts=True)
    return dataclasses.replace(matrix, over_parts=True), _from_part_to_part(main, matrix), walk


def carried_rows(matrix: KernelPlan) -> list[Role]:
    """Return the roles of what is carried beside the entries of its matrix."""
    return [a.role for a in matrix.carried[: len(matrix.carried) - len(matrix.matrix)]]


def _from_part_to_part(main: KernelPlan, matrix: KernelPlan) -> KernelPlan:
    """Return the forward kernel over parts, `x* = b, A` and `v* = what is carried`, that gives what comes in at each. Cores that carry
    alike share it."""
    rows, dtype = carried_rows(matrix), matrix.carried[0].compute
    builder = Builder("from_part_to_part")
    names = [*rows, *(f"d{row}{column}" for row, column in matrix.matrix)]
    given = [builder.input(Role(Kind.INPUT, k), dtype, f"{name}_part") for k, name in enumerate(names)]
    states = [builder.input(Role(Kind.STATE, k), dtype, name) for k, name in enumerate(rows)]
    sums, zero = given[: len(rows)], builder.const(0, dtype)
    for (row, column), entry in zip(matrix.matrix, given[len(rows) :], strict=True):
        times = builder.op("mul", entry, states[column])
        nothing = builder.op("eq", states[column], zero)  # it gives nothing, whatever A has grown to
        sums[row] = builder.op("add", sums[row], builder.op("where", nothing, zero, times))
    outputs = {Role(Kind.STATE, k): value for k, value in enumerate(sums)} | {Role(Kind.OUTPUT, k): v for k, v in enumerate(states)}
    step = builder.graph(outputs)
    firsts = {a.role: a.storage for a in main.reads if a.kind == "row"}
    storage = dict.fromkeys([*step.inputs, *step.outputs], dtype) | {Role(Kind.STATE, k): firsts[role] for k, role in enumerate(rows)}
    made = plan_forward(step, storage, chunk=_chunk_of_values(len(given)), checkpoint=False, sequences=False)
    return dataclasses.replace(made, writes=tuple([a for a in made.writes if a.kind == "sequence"]))


def _chunk_of_values(values: int) -> int:
    """Return the steps of a chunk: a thread holds two, one of them read ahead, where a step reads so many values and does little."""
    return max(1, min(16, 1 << (64 // values).bit_length() >> 1))


def why_in_order(step: Graph, carried: Sequence[Role]) -> str:
    """Return why a walk goes over one step after the other whatever its sizes are; nothing where parts of time may be walked."""
    if not carried:
        return "nothing is carried from step to step"
    if len(carried) > MOST_STATES:
        return f"{len(carried)} values are carried from step to step, and parts of time serve for {MOST_STATES}"
    if len({step.outputs[role].dtype for role in carried}) > 1 or list(carried) != [*roles(carried[0].kind, len(carried))]:
        return "what is carried from step to step has several dtypes"
    found = coupled(step.select(carried), carried)
    return f"`{found}` is not affine in what is carried" if isinstance(found, Node) else ""
