"""What every loaded kernel is, whatever backend made it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .._plan.plan import KernelPlan

Run = Callable[[list[Tensor], Sequence[int]], None]


class Kernel(Protocol):
    """A plan, its source text and the code made of it.

    A backend's kernel may have more: those that are built for the sizes of a call (`Backend.lazy`) have `expect(N, index)`, which
    starts to build early.
    """

    @property
    def plan(self) -> KernelPlan: ...

    @property
    def source(self) -> str: ...

    def bind(self, present: Sequence[bool], T: int, N: int) -> Run:
        """Return what runs the kernel over T steps of N neurons.

        Args:
            present: of each of `plan.arguments`, whether calls pass it. Rows may be absent (zeros then), and checkpoints of calls
                that have none.

        Returns:
            `run(arrays, dims)`: the arguments that are there, in dense memory; two sizes per param (`inner`, `count`: neuron i
            reads element `(i // inner) % count`). It writes to those of `plan.writes`.
        """
        ...


@dataclass(frozen=True)
class NoKernel:
    """The kernel of a plan that writes nothing: no gradient that is asked for exists."""

    plan: KernelPlan
    source: str = ""

    def bind(self, present: Sequence[bool], T: int, N: int) -> Run:
        return lambda arrays, dims: None
