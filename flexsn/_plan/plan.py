"""The plan of a kernel: what it loads, keeps, recomputes and stores per step, and the bytes that this moves.

A plan is made from step graphs and the flags of a call alone; it knows no device and no source language.

Forward: walks T once, states kept; with `checkpoint`, the states at the start of every chunk of `chunk` steps are
stored (all but the first chunk's, which are the initial states). Backward: walks the chunks in reverse; in each it
recomputes the states from the checkpoint (`advance`), then runs the VJP steps from the last to the first. A plan for few steps has
no more than one full chunk and a rest: the states at the start of the rest are recomputed, too, and nothing is stored.
"""

from __future__ import annotations

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
    """

    role: Role
    kind: str
    storage: torch.dtype
    compute: torch.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", Role.of(self.role))


@dataclass(frozen=True)
class Plan:
    """One kernel."""

    core: str
    direction: str  # "forward" or "backward"
    step: Graph  # what is computed at every step: the core, or its VJP
    advance: Graph | None  # backward: the new states alone
    reads: tuple[Array, ...]
    writes: tuple[Array, ...]
    carried: tuple[Array, ...]  # rows that live from step to step: states, or cotangents of states
    chunk: int
    longest: int | None = None  # the chunk of its like for any number of steps, if this one is for few

    @property
    def most(self) -> int | None:
        """How many steps it serves at most, if it is for few: less than two chunks, and so without checkpoints, for which it has
        arguments as the others have."""
        few = self.longest is not None and self.chunk < self.longest
        return next(steps for steps, length in _SHORT if length == self.chunk) if few else None

    @property
    def arguments(self) -> tuple[Array, ...]:
        return self.reads + self.writes

    def used(self, arrays: Sequence[Array]) -> list[Array]:
        """Those of `arrays` that the kernel reads or writes."""
        return [a for a in arrays if self.most is None or a.kind != "checkpoint"]

    def bytes_per_step(self, arrays: Sequence[Array]) -> float:
        """Bytes that cross the memory bus per neuron and step."""
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
            states = sum(a.compute.itemsize for a in self.reads if a.kind == "checkpoint")
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


def chunk_in_cache(num_inputs: int, num_states: int, ops: int, itemsize: int, checkpoint: bool) -> int:
    """Steps of a chunk, for a backward that keeps a chunk in cache: 16 or more, so that checkpoints take at most about
    1/16 of the inputs."""
    length = 16
    while length * num_inputs < 16 * num_states and length < 64:
        length *= 2
    return length


def checkpoints(T: int, K: int, longest: int) -> int:
    """Every chunk but the first starts from a checkpoint, where K steps are not fewer than those of a chunk for many steps."""
    return max(0, -(-T // K) - 1) if longest == K else 0


_UNROLLED = 160, 320  # ops of a step, unrolled, with a backward (about three times as many) and without: what compiles in seconds


def chunk_in_registers(num_inputs: int, num_states: int, ops: int, itemsize: int, checkpoint: bool) -> int:
    """Steps of a chunk, for kernels that keep a chunk in registers: a power of two, 16 for a LIF."""
    length = 16
    while length > 2 and length * ops * max(4, itemsize) // 4 > _UNROLLED[not checkpoint]:
        length //= 2
    return length


_SHORT = ((4, 4), (15, 8))  # up to so many steps, less than two chunks, chunks of so many at most


def chunk_for(chunk: int, T: int) -> int:
    """Steps of a chunk for T steps, of kernels that keep a chunk in registers: where `chunk` is too long to be filled, a shorter
    one, which leaves registers for more neurons and less to be done by the code for a part of a chunk."""
    return min([chunk, *(length for steps, length in _SHORT if steps >= T)])


def chunks(chunk: int) -> list[int]:
    """All that `chunk_for` gives."""
    return sorted({chunk, *(min(chunk, length) for _, length in _SHORT)})


_MEMORY = {Kind.INPUT: "sequence", Kind.PARAM: "param"}  # how operands lie that are neither states nor cotangents


def plan_forward(step: Graph, storage: Mapping[Role, torch.dtype], *, chunk: int, checkpoint: bool, sequences: bool) -> Plan:
    """Plan the pass over T.

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
    return Plan(step.core, "forward", step, None, tuple(reads), tuple(writes), tuple(carried), chunk)


def plan_backward(
    joint: Graph, storage: Mapping[Role, torch.dtype], *, chunk: int, wanted: Sequence[str], cotangents: Sequence[str]
) -> Plan:
    """Plan the walk back over T.

    Args:
        joint: the VJP and the new states, `x* v* p* gy* gv* -> gx* gv* gp* v*`.
        wanted: gradients to store: `gx*` (per step), `gv*` (initial states), `gp*` (summed over T).
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
        kind = "sequence" if role.kind is Kind.INPUT_GRAD else "row"
        writes.append(Array(role, kind, dtype if role.kind is Kind.PARAM_GRAD else storage[role.primal], dtype))
        if role.kind is Kind.PARAM_GRAD:
            carried.append(Array(role, "row", dtype, dtype))
    return Plan(joint.core, "backward", vjp, advance, tuple(reads), tuple(writes), tuple(carried), chunk)


def _needed_states(joint: Graph, vjp: Graph) -> list[Role]:
    """States that the VJP reads, and those that these are computed from."""
    needed = {*of_kind(vjp.inputs, Kind.STATE)}
    while True:
        more = needed | {*of_kind(joint.select(sorted(needed)).inputs, Kind.STATE)}
        if more == needed:
            return [r for r in joint.outputs if r in needed]
        needed = more
