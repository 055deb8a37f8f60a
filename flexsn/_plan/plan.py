"""The plan of a call: the kernels that run, and what each loads, keeps, recomputes and stores per step.

A plan is made from step graphs and the flags of a call alone; it knows no device and no source language. Its kernels run one after
the other; a kernel walks over time, and at every step runs its segments, one after the other. Today's plans have one kernel of one
segment, since all ops of a step are elementwise.

Forward: walks T once, states kept; with `checkpoint`, the states at the start of every chunk of `chunk` steps are
stored (all but the first chunk's, which are the initial states). Backward: walks the chunks in reverse; in each it
recomputes the states from the checkpoint (`advance`), then runs the VJP steps from the last to the first. A kernel for few steps has
no more than one full chunk and a rest: the states at the start of the rest are recomputed, too, and nothing is stored.

Checkpoints are one policy of what a forward saves for its backward. The other one, of `flexsn.lowlevel`, saves intermediates of every step:
they are outputs of the forward's graph and inputs of the backward's, which reads no states, and so recomputes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .._ir.graph import Graph
from .._ir.roles import Kind, Role, of_kind
from ..errors import FlexSNError


@dataclass(frozen=True)
class Array:
    """One array that a kernel reads or writes.

    Attributes:
        role: `x0`, `v0`, `p0`, `y0`, `gx0`, ...; unique among a plan's reads, and among its writes.
        kind: `sequence` [T, N], `row` [N], `param` (broadcast by index), `checkpoint` [chunks - 1, N].
        storage: dtype in memory.
        compute: dtype in the kernel.
        like: of a param that is part of a tensor, its first part, which has the same sizes.
    """

    role: Role
    kind: str
    storage: torch.dtype
    compute: torch.dtype
    like: Role | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", Role.of(self.role))


@dataclass(frozen=True)
class Segment:
    """Elementwise ops that one loop over the neurons runs at every step.

    Attributes:
        step: what is computed: the core, or its VJP.
        advance: backward: the new states alone, which a chunk computes again.
    """

    step: Graph
    advance: Graph | None = None


@dataclass(frozen=True)
class KernelPlan:
    """One kernel.

    Attributes:
        direction: "forward" or "backward".
        segments: what it computes at every step, in order.
        carried: rows that live from step to step: states, cotangents of states, sums.
        chunk: steps from checkpoint to checkpoint.
        longest: the chunk of the kernel for any number of steps, if this one is for few.
        matrix: of a kernel over parts of time (`parallel_time.py`), the entries of the matrix that it carries: row and column.
        over_parts: whether each of its programs walks one part of time, whose steps are an argument of the kernel.
        numbers: whether constants of the core are arguments of the kernel, which serves others then; else they are part of its text.
        end: the state that counts down to the end of a sequence (`_ir/ends.py`): of neurons whose sequences have ended nothing is computed.
    """

    core: str
    direction: str
    segments: tuple[Segment, ...]
    reads: tuple[Array, ...]
    writes: tuple[Array, ...]
    carried: tuple[Array, ...]
    chunk: int
    longest: int | None = None
    numbers: bool = True
    matrix: tuple[tuple[int, int], ...] = ()
    over_parts: bool = False
    end: Role | None = None

    @property
    def step(self) -> Graph:
        """The step graph of a kernel of one segment."""
        (segment,) = self.segments
        return segment.step

    @property
    def advance(self) -> Graph | None:
        """The graph of the new states of a kernel of one segment."""
        (segment,) = self.segments
        return segment.advance

    @property
    def most(self) -> int | None:
        """The largest T of a kernel for few steps: less than two chunks; else None. Such a kernel stores no checkpoints, but keeps those
        arguments, so that all kernels of a plan share one signature."""
        few = self.longest is not None and self.chunk < self.longest
        return next(steps for steps, length in _SHORT if length == self.chunk) if few else None

    @property
    def arguments(self) -> tuple[Array, ...]:
        return self.reads + self.writes

    def used(self, arrays: Sequence[Array]) -> list[Array]:
        """Return those of `arrays` that the kernel reads or writes."""
        return [a for a in arrays if self.most is None or a.kind != "checkpoint"]

    def bytes_per_step(self, arrays: Sequence[Array]) -> float:
        """Return the bytes that cross the memory bus per neuron and step."""
        total = 0.0
        for a in self.used(arrays):
            share = {"sequence": 1.0, "checkpoint": 1.0 / self.chunk}.get(a.kind, 0.0)
            total += share * a.storage.itemsize
        return total

    @property
    def tile_bytes(self) -> int:
        """Bytes of fast memory that one neuron of a tile needs."""
        rows = sum(a.compute.itemsize for a in self.carried)
        if self.direction == "backward":
            states = sum(a.compute.itemsize for a in self.reads if a.kind == "checkpoint" and a.role.to(Kind.STATE) != self.end)
            inputs = sum(a.storage.itemsize for a in self.reads if a.kind == "sequence" and a.role.kind is Kind.INPUT)
            rows += self.chunk * (states + inputs)
        return rows + sum(a.compute.itemsize for a in self.arguments if a.kind == "param")

    def __str__(self) -> str:
        lines = [f"{self.direction} of {self.core}, chunks of {self.chunk} steps"]
        for title, arrays in (("reads", self.reads), ("writes", self.writes), ("carries", self.carried)):
            listed = ", ".join(f"{a.role} ({a.kind}, {str(a.storage)[6:]})" for a in self.used(arrays))
            moved = f"   {self.bytes_per_step(arrays):.2f} B per neuron-step" if title != "carries" else ""
            lines.append(f"  {title:8}{listed}{moved}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Plan:
    """The kernels of a call in one direction, in the order in which they run.

    Attributes:
        scratch: arrays that a kernel writes and a later one reads, which the call neither takes nor returns.
    """

    kernels: tuple[KernelPlan, ...]
    scratch: tuple[Array, ...] = ()

    def __post_init__(self) -> None:
        verify(self)

    @property
    def reads(self) -> list[Array]:
        """What the call takes."""
        return self._outside([a for k in self.kernels for a in k.reads])

    @property
    def writes(self) -> list[Array]:
        """What the call returns."""
        return self._outside([a for k in self.kernels for a in k.writes])

    def _outside(self, arrays: Sequence[Array]) -> list[Array]:
        inside = {a.role for a in self.scratch}
        return list({a.role: a for a in arrays if a.role not in inside}.values())

    def __str__(self) -> str:
        scratch = [f"scratch: {', '.join(a.role for a in self.scratch)}"] if self.scratch else []
        return "\n".join([*map(str, self.kernels), *scratch])


def verify(plan: Plan) -> None:
    """Raise if a kernel reads what nobody gives it: an array, or a value of a segment that no array, no carried row and no earlier
    segment holds; or if a scratch array is not written before it is read."""
    scratch, written = {a.role for a in plan.scratch}, set[Role]()
    for kernel in plan.kernels:
        reads = {a.role for a in kernel.reads}
        missing = (reads & scratch) - written
        known = reads | {a.role for a in kernel.carried}
        for segment in kernel.segments:
            missing |= {*segment.step.inputs, *(segment.advance.inputs if segment.advance is not None else ())} - known
            known |= set(segment.step.outputs)
        stored = {Kind.STATES: Kind.STATE}
        values = {a.role: a.role.to(stored.get(a.role.kind, a.role.kind)) for a in kernel.writes if a.kind != "checkpoint"}
        missing |= {role for role, value in values.items() if value not in known}
        if missing:
            raise FlexSNError(f"internal: a {kernel.direction} kernel lacks {', '.join(sorted(missing))}", core=kernel.core)
        written |= {a.role for a in kernel.writes}
    if not scratch <= written:
        raise FlexSNError(f"internal: nothing writes {', '.join(sorted(scratch - written))}", core=plan.kernels[0].core)


def chunk_in_cache(num_inputs: int, num_states: int, ops: int, itemsize: int, checkpoint: bool) -> int:
    """Return the steps of a chunk, for a backward that keeps a chunk in cache: 16 or more, so that checkpoints take at most about
    1/16 of the inputs."""
    length = 16
    while length * num_inputs < 16 * num_states and length < 64:
        length *= 2
    return length


def checkpoints(T: int, K: int, longest: int) -> int:
    """Return how many checkpoints T steps store: every chunk but the first starts from one, unless the kernel is for few steps."""
    return max(0, -(-T // K) - 1) if longest == K else 0


_UNROLLED = 160, 320  # ops of a step, unrolled, with a backward (about three times as many) and without: what compiles in seconds


def chunk_in_registers(num_inputs: int, num_states: int, ops: int, itemsize: int, checkpoint: bool) -> int:
    """Return the steps of a chunk, for kernels that keep a chunk in registers: a power of two, 16 for a LIF; 1, so that the backward
    computes no states again, where two steps of it compile for longer than five seconds."""
    length, least = 16, 1 if checkpoint and ops > 2 * _UNROLLED[0] else 2
    while length > least and length * ops * max(4, itemsize) // 4 > _UNROLLED[not checkpoint]:
        length //= 2
    return length


_SHORT = ((4, 4), (15, 8))  # up to so many steps, less than two chunks, chunks of so many at most


def chunk_for(chunk: int, T: int) -> int:
    """Return the steps of a chunk for T steps, of kernels that keep a chunk in registers: where `chunk` is too long to be filled, a
    shorter one, which leaves registers for more neurons and less to be done by the code for a part of a chunk."""
    return min([chunk, *(length for steps, length in _SHORT if steps >= T)])


def chunks(chunk: int) -> list[int]:
    """Return all that `chunk_for` gives."""
    return sorted({chunk, *(min(chunk, length) for _, length in _SHORT)})


_MEMORY = {Kind.INPUT: "sequence", Kind.PARAM: "param"}  # how operands lie that are neither states nor cotangents


def plan_forward(step: Graph, storage: Mapping[Role, torch.dtype], *, chunk: int, checkpoint: bool, sequences: bool) -> KernelPlan:
    """Return the kernel of the pass over T.

    Args:
        step: the core's graph, `x* v* p* -> y* v*`.
        storage: dtype in memory of every role.
        checkpoint: also store the states at chunk starts, for a backward.
        sequences: also store the states of every step.
    """
    reads, carried, writes = [], [], []
    states = of_kind(step.outputs, Kind.STATE)
    for role, node in step.inputs.items():
        if role.kind in _MEMORY:
            reads.append(Array(role, _MEMORY[role.kind], storage[role], node.dtype))
    for role in states:
        compute = step.outputs[role].dtype
        if role in step.inputs and step.inputs[role].dtype != compute:
            raise FlexSNError(f"internal: state {role} changes dtype", core=step.core)
        reads.append(Array(role, "row", storage[role], compute))
        carried.append(Array(role, "row", compute, compute))
        writes.append(Array(role, "row", storage[role], compute))
        if sequences:
            writes.append(Array(role.to(Kind.STATES), "sequence", storage[role], compute))
        if checkpoint:
            writes.append(Array(role.to(Kind.CHECKPOINT), "checkpoint", compute, compute))
    for role, node in step.outputs.items():
        if role.kind is Kind.OUTPUT:
            writes.append(Array(role, "sequence", storage[role], node.dtype))
    return KernelPlan(step.core, "forward", (Segment(step),), tuple(reads), tuple(writes), tuple(carried), chunk)


def with_parts(made: KernelPlan, like: Mapping[Role, Role]) -> KernelPlan:
    """Return the plan that knows, of a param that is part of a tensor, the first part that the kernel reads, if that is `like[role]`."""
    read = {a.role for a in made.reads}
    reads = [dataclasses.replace(a, like=like[a.role]) if like.get(a.role) in read else a for a in made.reads]
    return dataclasses.replace(made, reads=tuple(reads)) if like else made


def with_end(made: KernelPlan, end: Role | None) -> KernelPlan:
    """Return the plan of a kernel that stops at the end of sequences, if it reads the state that counts down to it, `end`."""
    return dataclasses.replace(made, end=end) if any(a.role == end for a in made.reads) else made


def plan_backward(
    joint: Graph, storage: Mapping[Role, torch.dtype], *, chunk: int, wanted: Sequence[str], cotangents: Sequence[str]
) -> KernelPlan:
    """Return the kernel of the walk back over T.

    Args:
        joint: the VJP and the new states, `x* v* p* gy* gv* -> gx* gv* gp* v*`.
        wanted: what to store: `gx*` (per step), `gv*` (initial states), `gp*` (summed over T), `w*` (per step, for an epilogue).
        cotangents: which exist: `gy*` per output, `gs*` per state sequence. Those of final states may be null at run time.
    """
    joint = joint.for_cotangents(cotangents)
    carries = of_kind(joint.outputs, Kind.STATE_GRAD)
    vjp = joint.select([r for r in joint.outputs if r in wanted or r in carries])
    needed = _needed_states(joint, vjp)
    advance = joint.select(needed)
    reads: list[Array] = []
    for role in dict.fromkeys([*vjp.inputs, *advance.inputs]):
        node = vjp.inputs.get(role) or advance.inputs[role]
        if role.kind in _MEMORY:
            reads.append(Array(role, _MEMORY[role.kind], storage[role], node.dtype))
        elif role.kind is Kind.OUTPUT_GRAD:
            reads.append(Array(role, "sequence", storage[role.primal], node.dtype))
    for role in needed:
        dtype = joint.outputs[role].dtype
        reads.append(Array(role, "row", storage[role], dtype))
        reads.append(Array(role.to(Kind.CHECKPOINT), "checkpoint", dtype, dtype))
    carried = []
    for role in carries:
        dtype = vjp.outputs[role].dtype
        carried.append(Array(role, "row", dtype, dtype))
        reads.append(Array(role, "row", storage[role.primal], dtype))
        if role.to(Kind.STATES_GRAD) in cotangents:
            reads.append(Array(role.to(Kind.STATES_GRAD), "sequence", storage[role.primal], dtype))
    writes = []
    for role in map(Role.of, wanted):
        dtype = vjp.outputs[role].dtype
        kind = "sequence" if role.kind in (Kind.INPUT_GRAD, Kind.STORED) else "row"
        of_operand = role.kind in (Kind.INPUT_GRAD, Kind.STATE_GRAD)  # a sum, and what an epilogue takes, keep the dtype of computation
        writes.append(Array(role, kind, storage[role.primal] if of_operand else dtype, dtype))
        if role.kind is Kind.PARAM_GRAD:
            carried.append(Array(role, "row", dtype, dtype))
    return KernelPlan(joint.core, "backward", (Segment(vjp, advance),), tuple(reads), tuple(writes), tuple(carried), chunk)


def _needed_states(joint: Graph, vjp: Graph) -> list[Role]:
    """Return the states that the VJP reads, and those that these are computed from."""
    needed = {*of_kind(vjp.inputs, Kind.STATE)}
    while True:
        more = needed | {*of_kind(joint.select(sorted(needed)).inputs, Kind.STATE)}
        if more == needed:
            return [r for r in joint.outputs if r in needed]
        needed = more
