"""What a report holds: plain data that prints, and goes to JSON as it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Operand:
    """What goes into a step, or comes out of it.

    Attributes:
        kind: `input`, `state`, `param`, `captured`, `frozen` (taken as it was at the capture) or `output`.
        shape: at one step.
        dtype: "" for a default state of a core that was not captured; the type of what is `frozen`.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Op:
    """An ATen op that the core ran, or that its derivative needs.

    Attributes:
        text: the op and its arguments.
        kind: `static` (hoisted), `step` (in the kernel) or `reduced` (hoisted, after the kernel).
        line: the user's source line, `file:number: text`.
    """

    name: str
    text: str
    kind: str
    line: str | None


@dataclass
class SourceLine:
    """A line of the core, and what became of it: kinds of its ops, or `problem`."""

    number: int
    text: str
    kinds: tuple[str, ...] = ()


@dataclass
class Problem:
    """Why a core cannot be fused.

    Attributes:
        error: class of the error, in `flexsn.errors`.
        op: the op at fault, where there is one.
        line: the user's source line, `file:number: text`.
        hint: what to write instead.
    """

    error: str
    message: str
    op: str | None
    line: str | None
    hint: str | None


@dataclass
class Choice:
    """Which backend runs the call, and why; `others` says of each fused one whether it could."""

    name: str
    why: str
    fused: bool
    others: dict[str, str]


@dataclass
class Pass:
    """One kernel.

    Attributes:
        name: `inference`, `forward` (for training) or `backward`.
        plan: what it loads, carries and stores, as text.
        chunk: steps from checkpoint to checkpoint.
        bytes_read, bytes_written: per neuron-step; what is read or written once per call is left out.
        operations: how many of each op of the closed set a neuron-step computes; `recomputed` of them are the forward's.
        launch: tile, threads, vectors, registers, as the backend has them.
        bytes_moved: by the whole call.
        bound_s: seconds that a copy of as many bytes takes on this machine; None if not measured.
        measured_s: seconds of the shortest of several calls, from Python; None if not measured.
        source: generated source, in `language`.
    """

    name: str
    plan: str
    chunk: int
    bytes_read: float
    bytes_written: float
    operations: dict[str, int]
    recomputed: int
    launch: dict[str, Any]
    bytes_moved: int
    source: str
    language: str
    bound_s: float | None = None
    measured_s: float | None = None

    @property
    def bytes_per_neuron_step(self) -> float:
        return self.bytes_read + self.bytes_written

    @property
    def operations_per_neuron_step(self) -> int:
        return sum(self.operations.values())

    @property
    def copy_rate(self) -> float | None:
        """Bytes per second of the copy that gives the bound, reads and writes counted."""
        return self.bytes_moved / self.bound_s if self.bound_s else None


@dataclass
class Drawing:
    """Which values depend on which: boxes by key with (label, kind), and edges from key to key.

    Kinds: `input`, `state`, `param`, `value`, `output`, `next` (a state after the step).
    """

    boxes: dict[str, tuple[str, str]] = field(default_factory=dict)
    edges: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Piece:
    """What runs of a core that mixes neurons: a call, a kernel, or a loop over time.

    Attributes:
        number: `2`, or `2.1` in a loop.
        name: of the function that it calls; "" of a kernel, or a loop.
        text, why: what it does, and why there, in sentences.
        lines: the user's, `file:number: text`.
        takes: names of what it takes, each with the number of the piece that gives it ("" for an input): for what the step before gave, it
            is no earlier one.
        outputs: those of the core that it gives.
        parts: of a loop, in the order in which they run at every step.
    """

    number: str
    name: str = ""
    text: str = ""
    why: str = ""
    lines: tuple[str, ...] = ()
    takes: tuple[tuple[str, str], ...] = ()
    outputs: tuple[str, ...] = ()
    parts: list[Piece] = field(default_factory=list)


@dataclass(repr=False)
class Facts:
    """What flexsn makes of one core, for operands like those of one call.

    Attributes:
        core: its name; `where`: file and line of its definition.
        T, step_shape, neurons: sizes of the example; `neurons` is the number of elements of `step_shape`.
        device: of the operands.
        problem: why the core cannot be fused, or None. Without a graph the lists below are empty.
        pieces: of a core that mixes neurons, in the order in which they run; what follows is of one of them.
        captured: ops of the core, in order.
        prologue: ops that run once per call before the kernels, by PyTorch; `epilogue`: after the backward.
        graph, vjp: the step and its derivative over the closed op set, as text.
        passes: the kernels, by name.
        machine: processor, threads and versions.
        whole: of a core in pieces, seconds of the call with all of them: `inference`, and `training`, with its backward.
        others_busy: share of the cores that other processes used while it was measured.
    """

    core: str
    where: str | None
    source: list[SourceLine]
    operands: list[Operand]
    T: int
    step_shape: tuple[int, ...]
    device: str
    choice: Choice
    machine: dict[str, str]
    problem: Problem | None = None
    pieces: list[Piece] = field(default_factory=list)
    captured: list[Op] = field(default_factory=list)
    prologue: list[Op] = field(default_factory=list)
    epilogue: list[Op] = field(default_factory=list)
    graph: str | None = None
    vjp: str | None = None
    passes: dict[str, Pass] = field(default_factory=dict)
    drawing: Drawing | None = None
    whole: dict[str, float] = field(default_factory=dict)
    others_busy: float | None = None

    @property
    def fused(self) -> bool:
        return self.choice.fused

    def summary(self) -> str:
        return f"fused by {self.choice.name}{', in pieces' if self.pieces else ''}" if self.fused else "not fused"

    @property
    def neurons(self) -> int:
        count = 1
        for n in self.step_shape:
            count *= n
        return count
