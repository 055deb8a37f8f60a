"""A walk over time as Triton source: what a recurrence does at a step, written line by line into a kernel's loop.

A program of the kernel has HC of the H columns of BB sequences in registers, and those columns of the weights. What a product takes, all
programs of the same sequences write to memory, and meet there.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._ir.graph import Node
from .._ir.roles import Kind, Role, of_kind
from .._plan.plan import KernelPlan
from .._version import __version__
from .language import numbers, safe
from .triton_frame import computation
from .triton_values import COMPUTE, IMPORTS


@functools.lru_cache(256)
def results_of(plan: KernelPlan) -> tuple[Role, ...]:
    """Return the roles of what a step gives, in order."""
    return (*of_kind(plan.step.outputs, Kind.OUTPUT), *of_kind(plan.step.outputs, Kind.STATE)) or tuple(plan.step.outputs)


@functools.lru_cache(256)
def step_lines(plan: KernelPlan, name: str) -> str:
    """Return one step of a plan as a function."""
    comment = f"One step {'' if plan.direction == 'forward' else 'back '}of {safe(plan.core)}."
    return "\n".join(computation(plan, plan.step, name, comment, list(plan.step.inputs), results_of(plan)))


def is_spike(node: Node) -> bool:
    """Return whether a value is 0 or 1 for sure."""
    if node.op == "convert":
        return node.args[0].dtype is torch.bool
    if node.op == "const":
        return node.value in (0, 1)
    return node.op in ("where", "mul") and all(map(is_spike, node.args[node.op == "where" :]))


@dataclass
class _Slot:
    """A value that is carried from step to step: its pointer, its variable, and what that is at this step and at the next one."""

    pointer: str
    variable: str
    now: str  # the variable, or what it was changed to at this step
    next: str | None = None


class WalkSource:
    """The text of a kernel, and its arguments.

    Attributes:
        arguments: by name: tensors, sizes and numbers.
        products: how many there are at a step.
    """

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}
        self.functions: dict[KernelPlan, str] = {}
        self.opening, self.loads, self.body = list[str](), list[str](), list[str]()  # before the loop; of every step: first, then
        self.products, self._spikes = 0, set[str]()
        self._known, self._slots = dict[int, str](), dict[int, _Slot]()
        self._stores: dict[int, tuple[str, str]] = {}
        self._pointers: dict[int, str] = {}
        self._kept, self._count = list[Any](), 0

    def name(self) -> str:
        """Return the name of a new variable."""
        self._count += 1
        return f"u{self._count}"

    # --- values -----------------------------------------------------------------------------------------------------------------
    def row(self, array: Any, sequence: Any) -> str:
        """Return the variable of the row at step t of a sequence `[T, B, H]`; what was set at this step is not read again."""
        if id(array) not in self._known:
            name = self._known[id(array)] = self.name()
            self.loads.append(f"{name} = {_load(self._pointer(sequence, strides=True), 't')}")
            self._kept.append(array)
        return self._known[id(array)]

    def before(self, array: Any, sequence: Any, first: Any) -> str:
        """Return the variable of the row before step t; of `first [B, H]` at step 0."""
        if id(array) not in self._known:
            name, later, start = self.name(), self._pointer(sequence, strides=True), self._pointer(first)
            self.loads += ["if t > 0:", f"    {name} = {_load(later, '(t - 1)')}"]
            self.loads += ["else:", f"    {name} = tl.load({start} + r * H + c, mask=mask, other=0)"]
            self._known[id(array)] = name
            self._kept.append(array)
        return self._known[id(array)]

    def set(self, array: Any, sequence: Any, variable: str, *, stored: bool) -> None:
        """Note the variable of a value at this step; `stored`: whether its sequence has it."""
        self._known[id(array)] = variable
        self._kept.append(array)
        if stored:
            self._stores[id(array)] = self._pointer(sequence, strides=True), variable

    def carried(self, turns: Any, *, other: bool) -> str | None:
        """Return the variable of a value of `turns [2, B, H]`, or, if `other`, of what it is at the next step, once that is known."""
        slot = self._slots.get(id(turns))
        if slot is None:
            name = self.name()
            slot = self._slots[id(turns)] = _Slot(self._pointer(turns, strides=True), name, name)
            self.opening.append(f"{slot.variable} = {_load(slot.pointer, 'first')}")
        return slot.next if other else slot.now

    def carry(self, turns: Any, variable: str, *, other: bool) -> None:
        """Note what a carried value is from here on at this step, or, if `other`, at the next one."""
        self.carried(turns, other=False)
        slot = self._slots[id(turns)]
        slot.now, slot.next = (slot.now, variable) if other else (variable, slot.next)

    def param(self, tensor: Any) -> str:
        """Return the variable of a tensor of one element, or of one per column."""
        pointer = self._pointer(tensor)
        line = f"{pointer}_value = tl.load({pointer}{'' if tensor.numel() == 1 else ' + c, mask=c < H, other=1'})"
        if line not in self.opening:
            self.opening.append(line)
        return f"{pointer}_value"

    # --- ops --------------------------------------------------------------------------------------------------------------------
    def step(self, plan: KernelPlan, given: Sequence[str], values: Sequence[float]) -> dict[Role, str]:
        """Call one step of a plan; return the variables of what it gives.

        Args:
            given: in the order of its inputs.
            values: of its numbers.
        """
        own = list[str]()
        for (node, _), value in zip(numbers(plan).items(), values, strict=True):
            own.append(f"n{len(self.arguments)}")
            self.arguments[own[-1]] = value
            self.opening.append(f"{own[-1]} = tl.full((), {own[-1]}, {COMPUTE[node.dtype]})")
        function = self.functions.setdefault(plan, f"step{len(self.functions)}")
        found = {role: self.name() for role in results_of(plan)}
        self._spikes |= {name for role, name in found.items() if is_spike(plan.step.outputs[role])}
        self.body.append(f"{', '.join(found.values())} = {function}({', '.join([*given, *own])})")
        return found

    def product(self, source: str, scratch: Any, w: Any, bias: Any | None) -> str:
        """Return the variable of `source @ w + bias`; `scratch [2, B, H]` is of this product."""
        pointer, added = self._pointer(w), "" if bias is None else f" + {self.param(bias)}"
        self.opening.append(f"{pointer}_held = math.weights({pointer}, c, H, KP, KB)")
        given = f"{source}, {pointer}_held, {self._pointer(scratch)}, counter, count, start, r, c, B, H, KP, KB, PROGRAMS, PRODUCTS"
        found = self._let(f"math.product({given}, SPIKES={{spikes_{source}}}){added}")
        self.body.append("count += 1")
        self.products += 1
        return found

    def sum(self, a: str, b: str) -> str:
        """Return the variable of a sum."""
        return self._let(f"{a} + {b}")

    # --- text -------------------------------------------------------------------------------------------------------------------
    def text(self, core: str, *, back: bool) -> str:
        """Return the kernel's text: `walk(*arguments, counters, T, B, ...)`; a program per BB sequences and HC columns."""
        steps = [step_lines(plan, name) for plan, name in self.functions.items()]
        constants = [f"{name}: tl.constexpr" for name in ("H", "KP", "KB", "BB", "HC", "PROGRAMS", "PRODUCTS")]
        lines = ["@triton.jit(do_not_specialize=['T', 'B'])"]
        lines += [f"def walk({', '.join([*self.arguments, 'counters', 'T', 'B', *constants])}):"]
        spikes = {slot.variable for slot in self._slots.values() if slot.next in self._spikes} | self._spikes
        body = [re.sub(r"\{spikes_(\w+)\}", lambda found: str(found[1] in spikes), line) for line in self.body]
        loop = [*(["t, start = left - 1, left == T"] if back else ["start = t == 0"]), *self.loads, *body]
        loop += [f"tl.store({_at(pointer, 't')}, {value}, mask=mask)" for pointer, value in self._stores.values()]
        loop += [f"{slot.variable} = {slot.next}" for slot in self._slots.values() if slot.next is not None]
        own = [
            "r = (tl.program_id(0).to(tl.int64) * BB + tl.arange(0, BB))[:, None]  # sequences",
            "c = (tl.program_id(1) * HC + tl.arange(0, HC))[None, :]  # columns",
            "mask = (r < B) & (c < H)",
            "counter, count = counters + tl.program_id(0) * 32, 0",
            "first, last = (T - 1) % 2, 1" if back else "first, last = 0, T % 2",
            *self.opening,
            "for left in range(T, 0, -1):" if back else "for t in range(T):",
            *[f"    {line}" for line in loop],
            *[f"tl.store({_at(slot.pointer, 'last')}, {slot.variable}, mask=mask)" for slot in self._slots.values()],
        ]
        title = f"# {safe(core)}: a walk {'back ' if back else ''}over time. Generated by flexsn {__version__}."
        return "\n".join([title, *IMPORTS, "", "", *steps, *lines, *[f"    {line}" for line in own], ""])

    def _let(self, text: str) -> str:
        name = self.name()
        self.body.append(f"{name} = {text}")
        return name

    def _pointer(self, tensor: Any, *, strides: bool = False) -> str:
        """Return the name of a tensor among the arguments; `strides`: with those of its first two dims."""
        if id(tensor) not in self._pointers:
            name = self._pointers[id(tensor)] = f"a{len(self._pointers)}"
            self.arguments[name] = tensor
            self._kept.append(tensor)
            if strides:
                self.arguments |= {f"{name}_step": tensor.stride(0), f"{name}_row": tensor.stride(1)}
        return self._pointers[id(tensor)]


def _load(pointer: str, step: str) -> str:
    return f"tl.load({_at(pointer, step)}, mask=mask, other=0)"


def _at(pointer: str, step: str) -> str:
    return f"{pointer} + {step} * {pointer}_step + r * {pointer}_row + c"
