"""A step that is given as the source of a Triton function, as a graph that the planner and the Triton renderer take."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import torch

from .._codegen.triton_values import COMPUTE
from .._ir.graph import HALF, Graph, Node
from .._ir.roles import Kind, Role, of_kind
from .info import StepRoles

FUNCTION = "function_of_source"  # its name in a kernel's text, whose own functions may have the name that it has in its source


class WrittenStep(Graph):
    """A graph without nodes: one call of the function computes its outputs.

    Args:
        core: name of the function, for messages.
        roles: of what the function takes and returns.
        dtypes: in memory, of these roles.
        outputs: roles of the graph's outputs; by default all that there are.
        absent: arguments that are no inputs of the graph: zeros.
    """

    def __init__(
        self, core: str, roles: StepRoles, dtypes: Mapping[Role, torch.dtype], outputs: Iterable[Role] | None = None,
        absent: Container[Role] = (),
    ):  # fmt: skip
        self._roles, self._dtypes, self._absent = roles, dtypes, absent
        inputs = {r: Node("input", (), dtypes[r], r) for r in roles.takes if r not in absent}
        given = dict.fromkeys(r for r in (*roles.returns, *roles.carried) if r is not None) if outputs is None else outputs
        names = {r: f"{r}_next" if r in roles.carried else r for r in given}
        super().__init__(core, inputs, {r: Node("written", tuple(inputs.values()), dtypes[r], name) for r, name in names.items()})

    def select(self, roles: Iterable[str]) -> WrittenStep:
        return WrittenStep(self.core, self._roles, self._dtypes, map(Role.of, roles), self._absent)

    def for_cotangents(self, given: Iterable[str]) -> WrittenStep:
        absent = {*of_kind(self._roles.takes, Kind.OUTPUT_GRAD)} - set(given)
        return WrittenStep(self.core, self._roles, self._dtypes, self.outputs, absent)

    @property
    def written(self) -> list[str]:
        """The call: arguments in the form in which they lie in memory, and zeros of the shape of the first that is there."""
        shape = f"{next(iter(self.inputs), 'mask')}.shape"
        given = []
        for role in self._roles.takes:
            dtype = self._dtypes[role]
            given.append(f"{role}.to({_in_memory(dtype)})" if dtype in HALF else role)
            if role in self._absent:
                given[-1] = f"tl.zeros({shape}, {COMPUTE[dtype]})"
        lines = [f"{', '.join(r or '_' for r in self._roles.returns)} = {FUNCTION}({', '.join(given)})"]
        for role, result in self._roles.carried.items():
            if role in self.outputs:
                dtype = self.outputs[role].dtype
                lines.append(f"{role}_next = {result}.to({_in_memory(dtype)})" + f".to({COMPUTE[dtype]})" * (dtype in HALF))
        return lines


def _in_memory(dtype: torch.dtype) -> str:
    """Return Triton's name of a dtype; that of a 16-bit float is not the one in which it is computed."""
    return f"tl.{str(dtype).removeprefix('torch.')}" if dtype in HALF else COMPUTE[dtype]
