"""A kernel that walks parts of a long time side by side, where its neurons are few (`_plan/parallel_time.py`).

What it gains is measured by `benchmarks/long.py`, on two cores: over 100,000 steps of one neuron, where such a network is nothing else, the
backward of an LIF takes a tenth of the time, and the forward of a leaky integrator a quarter (docs/long.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._ir.roles import Kind, Role, roles
from .._plan.parallel_time import steps_of_part
from .._plan.plan import KernelPlan

if TYPE_CHECKING:
    from .cpp_kernel import Kernel

# Where a vector of neurons is nearly empty, and there is time for parts to fill it. The choice depends on sizes alone, never on the
# number of threads: so do the bits of gradients.
MOST_NEURONS, LEAST_STEPS = 4, 8192


class ParallelInTime:
    """A kernel, and those that walk parts of time in its place, which are loaded when a call needs them.

    It may be used wherever its main kernel is.
    """

    def __init__(self, main: Any, matrix: KernelPlan, walk: KernelPlan, load: Callable[[KernelPlan], Any]):
        self.main, self._matrix, self._walk, self._load = main, matrix, walk, load

    @staticmethod
    def fit(T: int, N: int) -> bool:
        """Whether parts of time are walked side by side in calls of these sizes."""
        return 0 < N <= MOST_NEURONS and T >= LEAST_STEPS

    def cut(self, T: int, N: int) -> tuple[int, int]:
        """Return how many parts there are, and of how many steps; fewer are left."""
        steps = steps_of_part(self.main.plan.chunk)
        return T // steps, steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.main, name)

    def bind(self, present: Sequence[bool], T: int, N: int) -> Callable[[list[Tensor], Sequence[int]], None]:
        """As `Kernel.bind`."""
        plain = self.main.bind(present, T, N)
        if not self.fit(T, N):
            return plain
        walk = _Forward if self.main.plan.direction == "forward" else _Backward
        matrix, kernel = self._load(self._matrix), self._load(self._walk)
        if not hasattr(kernel, "carry"):  # it is noted, to be built ahead
            return plain
        side_by_side = walk(self.main.plan, matrix, kernel, present, T, N)

        def run(arrays: list[Tensor], dims: Sequence[int]) -> None:
            (plain if torch.are_deterministic_algorithms_enabled() else side_by_side)(arrays, dims)

        return run


Arrays = Mapping[Role, Tensor]


class _Walk:
    """A walk over T steps of N neurons: `A` and `b` of every part; what passes from part to part; every part; and the last steps, which
    fill no part.

    Attributes:
        carried: roles of the states, or of their cotangents.
        parts, steps: how many parts, and of how many steps.
        whole, chunks: steps and chunks of all parts.
    """

    kind: Kind  # of what is carried

    def __init__(self, main: KernelPlan, matrix: Kernel, kernel: Kernel, present: Sequence[bool], T: int, N: int):
        self.reads, self.writes = kernel.plan.reads, kernel.plan.writes
        self.given = [a.role for a, there in zip(main.reads, present, strict=False) if there]
        self.wanted = [a.role for a, there in zip(main.writes, present[len(main.reads) :], strict=True) if there]
        chunk, self.N = kernel.plan.chunk, N
        self.steps = steps_of_part(chunk)
        self.parts, self.more = divmod(T, self.steps)
        self.whole = T - self.more
        self.chunks = self.whole // chunk
        self.params = [a.role for a in self.reads if a.kind == "param"]
        entries = matrix.plan.matrix
        rows = roles(self.kind, sum(a.role.kind is self.kind for a in matrix.plan.carried))
        self.carried, self._entries = rows[: -len(entries)], rows[-len(entries) :]
        self._ones = {role for role, (row, column) in zip(self._entries, entries, strict=True) if row == column}
        known = {*self.given, *self._ones} - {*self.carried}  # b begins with nothing
        self._matrix_reads = [a.role for a in matrix.plan.reads if a.role in known]
        self._walk = kernel.bind(self._there({*self.given, *self.carried}), self.steps, N, self.parts)
        self._rest = kernel.bind(self._there({*self.given, *self.first_of_rest}), self.more, N)
        there = [a.role in known for a in matrix.plan.reads] + [True] * len(matrix.plan.writes)
        self._matrix, self._carry = matrix.bind(there, self.steps, N, self.parts), matrix.carry()
        self._row_dtypes = {a.role: a.storage for a in self.reads if a.kind == "row"}
        self.dtype = matrix.plan.carried[0].compute

    @property
    def first_of_rest(self) -> Sequence[Role]:
        """The states at the start of the last steps, which are known whatever the call is given."""
        return [a.role for a in self.reads if a.kind == "row" and a.role.kind is Kind.STATE]

    def _there(self, known: set[Role]) -> list[bool]:
        made = [a.role in self.wanted or a.kind == "row" for a in self.writes]
        return [a.role in known for a in self.reads] + made

    def operands(self, arrays: Sequence[Tensor]) -> tuple[dict[Role, Tensor], dict[Role, Tensor], dict[Role, Tensor]]:
        """Return what is read, what is written, and what is carried into the first step, by role."""
        given, out = dict(zip(self.given, arrays, strict=False)), dict(zip(self.wanted, arrays[len(self.given) :], strict=True))
        given |= {role: given[role].to(dtype) for role, dtype in self._row_dtypes.items() if role in given}
        return given, out, {role: given[role] for role in self.carried if role in given}

    def passed(self, given: Arrays, first: Arrays, dims: Sequence[int]) -> dict[Role, Tensor]:
        """Return what is carried into every part."""
        length = self.parts * self.N
        ones = torch.ones(length, dtype=self.dtype, device="cpu")
        found = {role: torch.empty(length, dtype=self.dtype, device="cpu") for role in (*self.carried, *self._entries)}
        sizes = [n for k, role in enumerate(self.params) if role in self._matrix_reads for n in dims[2 * k : 2 * k + 2]]
        self._matrix([ones if role in self._ones else given[role] for role in self._matrix_reads] + [*found.values()], sizes)
        self._carry([*found.values(), *[first.get(role) for role in self.carried]], self.N, self.parts)
        return {role: found[role] for role in self.carried}

    def walk(self, given: Arrays, out: Arrays, dims: Sequence[int]) -> dict[Role, Tensor]:
        """Run every part; returns the rows that each has written."""
        rows = self._rows(self.parts * self.N)
        self._walk(self._arrays(given, {**out, **rows}), dims)
        return {role: row.view(self.parts, self.N) for role, row in rows.items()}

    def rest(self, given: Arrays, out: Arrays, first: Arrays, dims: Sequence[int]) -> dict[Role, Tensor]:
        """Run the last steps; returns the rows that they have written."""
        rows = self._rows(self.N)
        if self.more:
            self._rest(self._arrays({**self._later(given), **first}, {**self._later(out), **rows}), dims)
        return rows

    def _rows(self, length: int) -> dict[Role, Tensor]:
        return {a.role: torch.empty(length, dtype=a.storage, device="cpu") for a in self.writes if a.kind == "row"}

    def _arrays(self, given: Arrays, out: Arrays) -> list[Tensor]:
        return [given[a.role] for a in self.reads if a.role in given] + [out[a.role] for a in self.writes if a.role in out]

    def _later(self, arrays: Arrays) -> dict[Role, Tensor]:
        """The steps and checkpoints after the parts."""
        starts = {a.role: self.chunks if a.kind == "checkpoint" else self.whole for a in (*self.reads, *self.writes)}
        kept = {a.role for a in (*self.reads, *self.writes) if a.kind in ("row", "param")}
        return {role: array if role in kept else array[starts[role] :] for role, array in arrays.items()}


class _Forward(_Walk):
    kind = Kind.STATE

    def __call__(self, arrays: list[Tensor], dims: Sequence[int]) -> None:
        given, out, first = self.operands(arrays)
        rows = self.walk({**given, **self.passed(given, first, dims)}, out, dims)
        last = {role: row[-1] for role, row in rows.items()}
        if self.more:
            for role in self.carried:
                if role.to(Kind.CHECKPOINT) in out:
                    _flat(out[role.to(Kind.CHECKPOINT)][self.chunks - 1]).copy_(last[role])
            last = self.rest(given, out, last, dims)
        for role, row in last.items():
            _flat(out[role]).copy_(row)


class _Backward(_Walk):
    kind = Kind.STATE_GRAD

    def __call__(self, arrays: list[Tensor], dims: Sequence[int]) -> None:
        given, out, first = self.operands(arrays)
        if self.more:
            checkpoints = {role: given[role.to(Kind.CHECKPOINT)][self.chunks - 1] for role in self.first_of_rest}
            rest = self.rest(given, out, {**first, **checkpoints}, dims)
            first = {role: rest[role] for role in self.carried}
        rows = self.walk({**given, **self.passed(given, first, dims)}, out, dims)
        for role in rows.keys() & out.keys():
            row = rows[role]
            if role.kind is Kind.STATE_GRAD:
                _flat(out[role]).copy_(row[0])
            else:  # one part after the other, whatever the number of threads
                total = row.cumsum(0)[-1]
                _flat(out[role]).copy_(total + rest[role] if self.more else total)


def _flat(row: Tensor) -> Tensor:
    """The elements of a dense row in the order of memory."""
    return row.as_strided((row.numel(),), (1,))
