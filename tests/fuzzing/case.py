"""A fuzzed call as data: a core as lines of Python over named values, and its operands. Prints itself as a script."""

from __future__ import annotations

import itertools
import linecache
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flexsn

# A tensor of the same values in other memory, as Python over `{0}`.
LAYOUTS = {
    "plain": "{0}",
    "transposed": "{0}.transpose(0, -1).contiguous().transpose(0, -1)",
    "every other": "torch.stack([{0}, {0}], -1)[..., 0]",
    "shifted": "torch.cat([{0}.new_zeros(1), {0}.flatten()])[1:].view({0}.shape)",
    "expanded": "{0}[:1].expand({0}.shape)",  # its rows are equal
}
_GLOBALS = {"torch": torch, "F": F, "flexsn": flexsn, "inf": math.inf, "nan": math.nan}
_count = itertools.count()


@dataclass(frozen=True)
class Line:
    """`name = text` over the values `args`."""

    name: str
    text: str
    args: tuple[str, ...]
    op: str | None = None

    def __str__(self) -> str:
        return f"{self.name} = {self.text.format(*self.args)}"


@dataclass(frozen=True)
class Operand:
    """An input sequence `[T, *shape]`, an initial state or a param; `values`, on the CPU, None: a default state.
    Its tensor is on the default device."""

    name: str
    values: Tensor | None
    layout: str = "plain"
    grad: bool = False

    def tensor(self) -> Tensor | None:
        if self.values is None:
            return None
        values = self.values.to(torch.get_default_device())
        placed = values if self.layout == "plain" else eval(LAYOUTS[self.layout].format("x"), {"torch": torch, "x": values})
        return placed.detach().requires_grad_(self.grad)


@dataclass(frozen=True)
class Case:
    """A core, its operands, and which results the loss depends on (outputs, then states)."""

    label: str
    inputs: tuple[Operand, ...]
    states: tuple[Operand, ...]
    params: tuple[Operand, ...]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    new_states: tuple[str, ...]
    loss: tuple[bool, ...]
    sequences: bool = False
    compiled: list[Callable[..., Any]] = field(default_factory=list, compare=False, repr=False)

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (*self.inputs, *self.states, *self.params)

    @property
    def T(self) -> int:
        assert self.inputs[0].values is not None
        return self.inputs[0].values.shape[0]

    def source(self) -> str:
        arguments = ", ".join(o.name for o in self.operands)
        returns = ", ".join((*self.outputs, *self.new_states))
        return "\n".join([f"def core({arguments}):", *(f"    {line}" for line in self.lines), f"    return {returns}", ""])

    def core(self) -> Callable[..., Any]:
        """The function; the same object at every call."""
        if not self.compiled:
            self.compiled.append(compile_core(self.source()))
        return self.compiled[0]

    def change(self, **fields: Any) -> Case:
        """Another case, without the lines that nothing needs."""
        changed = replace(self, compiled=[], **fields)
        live, kept = {*changed.outputs, *changed.new_states}, []
        for line in reversed(changed.lines):
            if line.name in live:
                live.update(line.args)
                kept.append(line)
        return replace(changed, lines=tuple(reversed(kept)), compiled=[])

    def script(self, backend: str) -> str:
        """A runnable program that shows what the backend and the eager loop give."""
        device = torch.get_default_device().type
        return _SCRIPT.format(
            label=self.label, backend=backend, core=self.source(), operands="\n".join(_assignment(o) for o in self.operands),
            inputs=_names(self.inputs), states=_names(self.states), params=_names(self.params), loss=list(self.loss),
            sequences=self.sequences, interpret='os.environ["TRITON_INTERPRET"] = "1"\n' if backend == "triton" and device == "cpu" else "",
            device='\ntorch.set_default_device("cuda")\n' if device == "cuda" else "",
        )  # fmt: skip


def compile_core(source: str) -> Callable[..., Any]:
    """`core` of a source text, whose lines messages can quote."""
    path = f"<fuzzed core {next(_count)}>"
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    scope: dict[str, Any] = dict(_GLOBALS)
    exec(compile(source, path, "exec"), scope)
    return scope["core"]


def _names(operands: tuple[Operand, ...]) -> str:
    return "[" + ", ".join(o.name for o in operands) + "]"


def _assignment(operand: Operand) -> str:
    if operand.values is None:
        return f"{operand.name} = None"
    lines = [
        f"{operand.name} = torch.tensor({operand.values.tolist()!r}, dtype={operand.values.dtype}).reshape({tuple(operand.values.shape)})"
    ]
    if operand.layout != "plain":
        lines.append(f"{operand.name} = {LAYOUTS[operand.layout].format(operand.name)}")
    if operand.grad:
        lines.append(f"{operand.name}.requires_grad_()")
    return "\n".join(lines)


_SCRIPT = """\
# {label}: backend "{backend}" beside the eager loop
import os
from math import inf, nan

{interpret}import torch
import torch.nn.functional as F

import flexsn
{device}

{core}

{operands}
operands = [t for t in (*{inputs}, *{states}, *{params}) if t is not None and t.requires_grad]
for backend in ("torch", "{backend}"):
    result = flexsn.scan(core, {inputs}, {states}, {params}, store_state_seqs={sequences}, backend=backend)
    results = (*result.outputs, *result.states)
    print(backend, *results, sep="\\n  ")
    roots = [(k, r) for k, (r, used) in enumerate(zip(results, {loss})) if used and r.requires_grad]
    loss = [torch.randn(r.shape, generator=torch.Generator().manual_seed(k), dtype=torch.float64, device="cpu").to(r) for k, r in roots]
    if roots and operands:
        print("gradients", *torch.autograd.grad([r for _, r in roots], operands, loss, allow_unused=True), sep="\\n  ")
"""
