"""Kernels of a GPU that walk parts of a long time side by side, where neurons are too few to fill it (`_plan/parallel_time.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._ir.roles import Kind
from ..._plan.parallel_time import carried_rows, kernels_over_parts
from ..._plan.plan import KernelPlan

MOST_NEURONS, LEAST_STEPS = 8192, 2048
SHORTEST, LONGEST = 32, 256  # steps of a part


class ParallelInTime:
    """A kernel, and those that walk parts of time in its place. It may be used wherever its main kernel is.

    `walk`, the plan of a CPU's walk over parts, is of no use here: a program knows its part, and walks it as `main` walks all of T.
    """

    def __init__(self, main: Any, matrix: KernelPlan, walk: KernelPlan, load: Callable[[KernelPlan], Any]):
        self.main, self._load = main, load
        self._plans = kernels_over_parts(main.plan, matrix)
        self._entries = len(matrix.matrix)
        values = 2 * len(carried_rows(matrix)) + self._entries  # per neuron and part
        given = sum(a.storage.itemsize for a in main.plan.reads if a.kind == "sequence")
        self._least = 8 * values * matrix.carried[0].compute.itemsize / max(1, given)

    @staticmethod
    def fit(T: int, N: int) -> bool:
        """Whether parts of time are walked side by side in calls of these sizes."""
        return 0 < N <= MOST_NEURONS and LEAST_STEPS <= T <= LONGEST * 65_535  # parts of a grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self.main, name)

    def cut(self, T: int, N: int) -> tuple[int, int]:
        """Return how many parts there are, and of how many steps: a power of two, of which what passes from part to part takes at most an
        eighth of the memory of the input, and the walk from part to part takes about as long as those over parts."""
        steps = SHORTEST
        while steps < LONGEST and (steps < self._least or 2 * steps * steps < T * self._entries):
            steps *= 2
        return -(-T // steps), steps

    @functools.cached_property
    def kernels(self) -> list[Any]:
        """Return those that run: over parts, from part to part, over parts."""
        return [self._load(made) for made in self._plans]

    def expect(self, N: int, index: int, T: int) -> None:
        """Start to build what calls of these sizes need."""
        for kernel in self.kernels if self.fit(T, N) else [self.main]:
            kernel.expect(N, index)

    def bind(self, present: Sequence[bool], T: int, N: int) -> Callable[[list[Tensor], Sequence[int]], None]:
        """As `Kernel.bind`."""
        plain = self.main.bind(present, T, N)
        if not self.fit(T, N):
            return plain
        side_by_side = _Walks(self.kernels, present, T, N, *self.cut(T, N))

        def run(arrays: list[Tensor], dims: Sequence[int]) -> None:
            (plain if torch.are_deterministic_algorithms_enabled() else side_by_side)(arrays, dims)

        return run


class _Walks:
    """The three walks over T steps of N neurons, each of which is a launch.

    Attributes:
        given: roles of what a call passes, and their places in it.
        rows: roles of what is carried.
        of_matrix, of_walk: roles of what the walks over parts read.
        sums: places, among what a call passes, of sums over time, of which there is one per part.
    """

    def __init__(self, kernels: Sequence[Any], present: Sequence[bool], T: int, N: int, parts: int, steps: int):
        matrix, between, walk = kernels
        self.N, self.parts, self.dtype = N, parts, matrix.plan.carried[0].compute
        reads, writes = walk.plan.reads, walk.plan.writes
        self.given = {role: k for k, role in enumerate(a.role for a, there in zip(reads, present, strict=False) if there)}
        self.rows = carried_rows(matrix.plan)
        self.of_matrix = [a.role for a in matrix.plan.reads if a.role in self.given and a.role not in self.rows]
        self.of_walk = [a.role for a in reads if a.role in self.given or a.role in self.rows]
        params = [a.role for a in reads if a.kind == "param"]
        self._dims = [n for k, role in enumerate(params) if role in self.of_matrix for n in (2 * k, 2 * k + 1)]
        written = [a.role for a, there in zip(writes, present[len(reads) :], strict=True) if there]
        self.sums = [k + len(self.given) for k, role in enumerate(written) if role.kind is Kind.PARAM_GRAD]
        self.found = len(matrix.plan.writes)
        self._length = -(-parts * N // 32) * 32  # rows begin at multiples of 16 bytes
        there = [a.role in self.of_matrix for a in matrix.plan.reads] + [True] * self.found
        self.matrix = matrix.bind(there, T, N, parts, steps)
        firsts = [a.kind == "sequence" or self.rows[a.role.number] in self.given for a in between.plan.reads]
        self.between = between.bind(firsts + [True] * len(self.rows), parts, N)
        self.walk = walk.bind([a.role in self.of_walk for a in reads] + [*present[len(reads) :]], T, N, parts, steps)

    def __call__(self, arrays: list[Tensor], dims: Sequence[int]) -> None:
        device, given = arrays[-1].device, self.given
        passed = torch.empty(self.found + len(self.rows), self._length, dtype=self.dtype, device=device).unbind(0)
        found, came_in = passed[: self.found], passed[self.found :]
        self.matrix([*(arrays[given[role]] for role in self.of_matrix), *found], [dims[k] for k in self._dims])
        self.between([*found, *(arrays[given[role]] for role in self.rows if role in given), *came_in], ())
        written = arrays[len(given) :]
        for k in self.sums:
            written[k - len(given)] = torch.empty(self.parts, self.N, dtype=arrays[k].dtype, device=device)
        first = dict(zip(self.rows, came_in, strict=True))
        self.walk([first[role] if role in first else arrays[given[role]] for role in self.of_walk] + written, dims)
        for k in self.sums:  # in a fixed order
            torch.sum(written[k - len(given)], 0, out=arrays[k].as_strided((self.N,), (1,)))
