"""A walk over time as Triton source: what a recurrence does at a step, written line by line into a kernel's loop.

A program of the kernel has HC of the H columns of BB sequences in registers, and those columns of the weights. What a product takes, all
programs of the same sequences write to memory, and meet there.
"""

from __future__ import annotations

import functools
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

_IMPORT = "import flexsn._runtime.triton.walk_math as walks"


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


@dataclass
class _Product:
    """A product: the variables of its results, of its operand, the pointers of its scratch memory, of its weights and of memory for their
    parts, and a name of its own."""

    found: list[str]
    sources: list[str]
    scratch: str
    weights: str
    parts: str
    name: str

    def opening(self, *, held: bool) -> list[str]:
        """Return the lines before the loop; `held`: as of `lines`."""
        if held:
            return [f"{self.weights}_held = walks.weights({self.weights}, c, H, KP, KB)"]
        columns = [f"{n} * H + c" if n else "c" for n in range(len(self.found))]
        return [f"walks.split({self.weights}, {self.parts}, {column}, {self.sizes}, KB, c < H)" for column in columns]

    @property
    def sizes(self) -> str:
        """The sizes of its weights."""
        return f"{len(self.sources)} * H, {len(self.found)} * H"

    def lines(self, spikes: bool, stores: Sequence[str], loads: Sequence[str], *, held: bool, alone: bool) -> list[str]:
        """Return its lines.

        Args:
            spikes: whether what it takes is 0 or 1.
            stores, loads: lines for while a program waits for others, and for once they are there.
            held: whether a program keeps its columns of the weights; else it reads them at every step.
            alone: whether it also has all columns of what a product takes.
        """
        if alone:
            a, w = self.sources[0], f"{self.weights}_held[0]"
            return [*loads, *stores, f"{self.found[0]} = walks.own_product({a}, c < H, {w}, start, PRODUCTS, SPIKES={spikes})"]
        rows, width = self.name, f"{len(self.sources)} * H"
        lines = [f"{rows} = {self.scratch} + (count % 2) * 3 * B * {width} + r * {width}"]
        for n, source in enumerate(self.sources):
            lines.append(f"walks.share({rows}, B, {width}, {f'{n} * H + ' if n else ''}c, {source}, mask, PRODUCTS)")
        lines += ["walks.arrive(counter, PROGRAMS)", *stores, "walks.wait(counter, count, PROGRAMS)", "count += 1", *loads]
        lines += [f"{found}, {found}_rest = tl.zeros((BB, HC), tl.float32), tl.zeros((BB, HC), tl.float32)" for found in self.found]
        given = "start, PRODUCTS, SPIKES=" + str(spikes)
        if held:
            lines += ["for block in tl.static_range(KP // KB):", "    k = block * KB + tl.arange(0, KB)"]
            both = f"{self.found[0]}, {self.found[0]}_rest"
            lines.append(f"    {both} = walks.add_product({both}, {rows}, B, {width}, k[None, :], r, {self.weights}_held[block], {given})")
            return [*lines, f"{self.found[0]} = walks.joined({both})"]
        lines += [f"for first_k in range(0, {width}, KB):", "    k = first_k + tl.arange(0, KB)"]
        for n, found in enumerate(self.found):
            column = f"{n} * H + c" if n else "c"
            lines.append(f"    w = walks.read_weights({self.parts}, k[:, None], {column}, {self.sizes}, c < H)")
            both = f"{found}, {found}_rest"
            lines.append(f"    {both} = walks.add_product({both}, {rows}, B, {width}, k[None, :], r, w, {given})")
        return [*lines, *[f"{found} = walks.joined({found}, {found}_rest)" for found in self.found]]


class WalkSource:
    """The text of a kernel, and its arguments.

    Args:
        rounds: whether what products give is rounded to bfloat16, as autocast has it.

    Attributes:
        arguments: by name: tensors, sizes and numbers.
        products: those of a step.
    """

    def __init__(self, *, rounds: bool = False) -> None:
        self.rounds = rounds
        self.arguments: dict[str, Any] = {}
        self.functions: dict[KernelPlan, str] = {}
        self.opening = list[str]()  # before the loop
        self.loads: dict[str, tuple[str, str]] = {}  # by variable: what loads it for a step `{t}` under a mask `{mask}`, and its conversion
        self.body = list[str | _Product]()
        self.products, self._spikes = list[_Product](), set[str]()
        self._known, self._slots = dict[int, str](), dict[int, _Slot]()
        self._stores: dict[int, tuple[str, str, bool]] = {}  # and whether it is known before all products
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
            name, pointer = self.name(), self._pointer(sequence, strides=True)
            wide = ".to(tl.float32)" if sequence.dtype in (torch.bfloat16, torch.float16) else ""
            self.loads[name] = f"tl.load({_at(pointer, '{t}')}, mask={{mask}}, other=0)", wide
            self._known[id(array)] = name
            self._kept.append(array)
        return self._known[id(array)]

    def before(self, array: Any, sequence: Any, first: Any) -> str:
        """Return the variable of the row before step t; of `first [B, H]` at step 0."""
        if id(array) not in self._known:
            name, later, start = self.name(), self._pointer(sequence, strides=True), self._pointer(first)
            self.loads[name] = f"walks.row_before({{t}}, {later}, {later}_step, {later}_row, {start}, r, c, H, {{mask}})", ""
            self._known[id(array)] = name
            self._kept.append(array)
        return self._known[id(array)]

    def set(self, array: Any, sequence: Any, variable: str, *, stored: bool) -> None:
        """Note the variable of a value at this step; `stored`: whether its sequence has it."""
        self._known[id(array)] = variable
        self._kept.append(array)
        if stored:
            self._stores[id(array)] = self._pointer(sequence, strides=True), variable, not self.products

    def carried(self, turns: Any, *, other: bool) -> str | None:
        """Return the variable of a value of `turns [2, B, H]`, or, if `other`, of what it is at the next step, once that is known."""
        slot = self._slots.get(id(turns))
        if slot is None:
            name = self.name()
            slot = self._slots[id(turns)] = _Slot(self._pointer(turns, strides=True), name, name)
            self.opening.append(f"{slot.variable} = tl.load({_at(slot.pointer, 'first')}, mask=mask, other=0)")
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

    def product(self, sources: Sequence[str], scratch: Any, w: Any, parts: Any, biases: Sequence[Any]) -> list[str]:
        """Return the variables of `a @ w + bias`, of which `a` and the result may be several times as wide as a value.

        Args:
            sources: the variables of `a`.
            scratch: bfloat16 `[2, 3, B, width of a]`, of this product.
            parts: bfloat16 `[3, *w.shape]`, for the parts of its weights.
            biases: one per result; None of none.
        """
        found, (to, of, split) = [self.name() for _ in biases], map(self._pointer, (scratch, w, parts))
        made = _Product(found, list(sources), to, of, split, self.name())
        self.products.append(made)
        self.body.append(made)
        if not self.rounds:
            return [name if b is None else self.sum(name, self.param(b)) for name, b in zip(made.found, biases, strict=True)]
        added = ["" if b is None else f" + math.round_bfloat16({self.param(b)})" for b in biases]
        return [self.let(f"math.round_bfloat16({name}{bias})") for name, bias in zip(made.found, added, strict=True)]

    def total(self, source: str, scratch: Any, *, largest: bool = False) -> str:
        """Return the variable of the sum of a row, or of its largest value, at every column; `scratch [2, B, H]` is of this sum."""
        found = self.let(f"walks.total({source}, {self._pointer(scratch)}, counter, count, r, c, B, H, PROGRAMS, LARGEST={largest})")
        self.body.append("count += 1")
        return found

    def sum(self, a: str, b: str) -> str:
        """Return the variable of a sum."""
        return self.let(f"{a} + {b}")

    # --- text -------------------------------------------------------------------------------------------------------------------
    def text(self, core: str, *, back: bool, held: bool, alone: bool) -> str:
        """Return the kernel's text: `walk(*arguments, counters, T, B, ...)`; a program per BB sequences and HC columns.

        Args:
            held, alone: as of `_Product.lines`.
        """
        steps = [step_lines(plan, name) for plan, name in self.functions.items()]
        constants = [f"{name}: tl.constexpr" for name in ("H", "KP", "KB", "BB", "HC", "PROGRAMS", "PRODUCTS")]
        lines = ["@triton.jit(do_not_specialize=['T', 'B'])"]
        lines += [f"def walk({', '.join([*self.arguments, 'counters', 'T', 'B', *constants])}):"]
        spikes = {slot.variable for slot in self._slots.values() if slot.next in self._spikes} | self._spikes
        next_rows = ["# rows of the next step, which are loaded while this one is computed"] if self.loads else []
        next_rows += [f"{name}_next = {load.format(t='after', mask='ahead')}" for name, (load, _) in self.loads.items()]
        stores = {known: [_store(*store) for *store, before in self._stores.values() if before is known] for known in (True, False)}
        body, opening = list[str](), list(self.opening)
        for line in self.body:
            if isinstance(line, str):
                body.append(line)
                continue
            body += line.lines({*line.sources} <= spikes, stores.pop(True, []), next_rows, held=held, alone=alone)
            next_rows, opening = [], opening + line.opening(held=held)
        opening += [f"{name}_next = {load.format(t='begin', mask='mask')}" for name, (load, _) in self.loads.items()]
        loop = [f"start, t = passed == 0, begin {'-' if back else '+'} passed"]
        loop += ["after, ahead = t - 1, (mask & (t > 0)) != 0" if back else "after, ahead = t + 1, (mask & (t + 1 < T)) != 0"]
        loop += [f"{name} = {name}_next{wide}" for name, (_, wide) in self.loads.items()]
        loop += [*next_rows, *body, *stores.get(True, []), *stores[False]]
        loop += [f"{slot.variable} = {slot.next}" for slot in self._slots.values() if slot.next is not None]
        own = [
            "r = (tl.program_id(0).to(tl.int64) * BB + tl.arange(0, BB))[:, None]  # sequences",
            "c = (tl.program_id(1) * HC + tl.arange(0, HC))[None, :]  # columns",
            "mask = (r < B) & (c < H)",
            "counter, count = counters + tl.program_id(0) * 32, 0",
            "first, last = (T - 1) % 2, 1" if back else "first, last = 0, T % 2",
            f"begin = {'tl.cast(T - 1, tl.int64)' if back else 'tl.zeros((), tl.int64)'}",
            *dict.fromkeys(opening),
            "for passed in range(T):",
            *[f"    {line}" for line in loop],
            *[f"tl.store({_at(slot.pointer, 'last')}, {slot.variable}, mask=mask)" for slot in self._slots.values()],
        ]
        title = f"# {safe(core)}: a walk {'back ' if back else ''}over time. Generated by flexsn {__version__}."
        return "\n".join([title, *IMPORTS, _IMPORT, "", "", *steps, *lines, *[f"    {line}" for line in own], ""])

    def let(self, text: str) -> str:
        """Return the name of a new variable, which is what an expression says."""
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


def _store(pointer: str, value: str) -> str:
    return f"tl.store({_at(pointer, 't')}, {value}, mask=mask)"


def _at(pointer: str, step: str) -> str:
    return f"{pointer} + {step} * {pointer}_step + r * {pointer}_row + c"
