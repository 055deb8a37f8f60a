"""A step that is given as the source of a Triton function, as a graph that the planner and the Triton renderer take."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import torch

from .._codegen.triton import COMPUTE
from .._ir.graph import HALF, Graph, Node
from .._ir.roles import Kind, Role, of_kind

FUNCTION = "function_of_source"  # its name in a kernel's text, whose own functions may have the name that it has in its source


class WrittenStep(Graph):
    """A graph without nodes: one call of the function computes its outputs.

    Args:
        core: name of the function, for messages.
        takes: roles and dtypes in memory of the function's arguments, in order.
        returns: roles of its results, in order; `_` for one that is not used.
        outputs: roles and dtypes of the graph's outputs.
        carried: outputs that go to the next step, in their own dtype, and the result that each is made of.
        absent: arguments that are no inputs of the graph: zeros.
    """

    def __init__(
        self, core: str, takes: Mapping[Role, torch.dtype], returns: Sequence[str], outputs: Mapping[Role, torch.dtype],
        carried: Mapping[Role, Role], absent: Container[str] = (),
    ):  # fmt: skip
        self._takes, self._returns, self._carried, self._absent = takes, returns, carried, absent
        inputs = {r: Node("input", (), dtype, r) for r, dtype in takes.items() if r not in absent}
        names = {r: f"{r}_next" if r in carried else r for r in outputs}
        super().__init__(core, inputs, {r: Node("written", tuple(inputs.values()), dtype, names[r]) for r, dtype in outputs.items()})

    def select(self, roles: Iterable[str]) -> WrittenStep:
        outputs = {r: self.outputs[r].dtype for r in map(Role.of, roles)}
        return WrittenStep(self.core, self._takes, self._returns, outputs, self._carried, self._absent)

    def for_cotangents(self, given: Iterable[str]) -> WrittenStep:
        absent = {*of_kind(self._takes, Kind.OUTPUT_GRAD)} - set(given)
        outputs = {r: n.dtype for r, n in self.outputs.items()}
        return WrittenStep(self.core, self._takes, self._returns, outputs, self._carried, absent)

    @property
    def written(self) -> list[str]:
        """The call: arguments in the form in which they lie in memory, and zeros of the shape of the first that is there."""
        shape = f"{next(iter(self.inputs), 'mask')}.shape"
        given = []
        for role, dtype in self._takes.items():
            given.append(f"{role}.to({_in_memory(dtype)})" if dtype in HALF else role)
            if role in self._absent:
                given[-1] = f"tl.zeros({shape}, {COMPUTE[dtype]})"
        lines = [f"{', '.join(self._returns)} = {FUNCTION}({', '.join(given)})"]
        for role, result in self._carried.items():
            if role in self.outputs:
                dtype = self.outputs[role].dtype
                lines.append(f"{role}_next = {result}.to({_in_memory(dtype)})")
                lines[-1] += f".to({COMPUTE[dtype]})" if dtype in HALF else ""
        return lines


def _in_memory(dtype: torch.dtype) -> str:
    """Return Triton's name of a dtype; that of a 16-bit float is not the one in which it is computed."""
    return f"tl.{str(dtype).removeprefix('torch.')}" if dtype in HALF else COMPUTE[dtype]
