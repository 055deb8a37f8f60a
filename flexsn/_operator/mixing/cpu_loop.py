"""The walks over time on a CPU: products of states and weights, and the kernel of one step, in a C++ loop (`_runtime/cpp/recurrent.h`).

It serves where every mixing call of a state is `s @ w` or `linear(s)` of float32 or float64, as wide as the step. A sequence is walked by
one thread: rows of spikes drive rows of the weights, other rows go through blocked products. Each sum runs in one order, so the bits are
the same at any number of threads.

What it gains: recurrent LIF layers of 128 to 512 neurons, 100 steps, batch 64, on two cores: inference takes 2.6 to 6.0 times less time
than a plain loop, a training step 3.3 to 3.8 times less; a training step of a network as for SHD 2.1 times less
(`python benchmarks/recurrent.py`, 2026-11-27).
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._ir.roles import Kind, Role
from ..._runtime import cpp_kernel
from ..._runtime.fork import num_threads
from ..._runtime.launch import Launch
from ..call import Call
from . import cpp_products
from .mixing_calls import MixingFunction

Carried = Sequence[tuple[int, int, MixingFunction]]  # mixing calls of states: place among the inputs of the rest, state, call


class Back(NamedTuple):
    """What a walk back over time reads, and what it writes.

    Attributes:
        inputs: sequences of the rest, the results of mixing calls among them.
        trail: states after every step.
        outputs, ends: cotangents of outputs, and of final states.
        found: to be written: cotangents of the results of the mixing calls of states.
        fed: to be written: of each state that such a call takes, what flows to it at the start of a step by way of these calls,
            `[T + 1, ...]`: at the last one, nothing.
    """

    inputs: Sequence[Tensor]
    trail: Sequence[Tensor]
    outputs: Sequence[Tensor | None]
    ends: Sequence[Tensor | None]
    found: Sequence[Tensor]
    fed: dict[int, Tensor]


_AT, _BEFORE, _SLOT, _OTHER_SLOT = range(4)  # as `Place::Kind`


@dataclass(eq=False)
class Place:
    """Where an array lies.

    Attributes:
        tensor: `[T, *step]`, or two rows `[2, *step]` that take turns; a param.
        kind: at which row step t finds it: that of t, that of the step before, one of two that take turns, the other one.
        first: the row at step 0 of `_BEFORE`.
        param: whether it is the same at all steps, for all sequences.
    """

    tensor: Tensor
    kind: int = _AT
    first: Tensor | None = None
    param: bool = False

    def pointers(self) -> tuple[int, int]:
        return self.tensor.data_ptr(), 0 if self.first is None else self.first.data_ptr()

    def strides(self) -> tuple[int, int, int]:
        size = self.tensor.element_size()
        return (0, 0, _AT) if self.param else (self.tensor[0].numel() * size if self.tensor.shape[0] > 1 else 0, size, self.kind)


@dataclass
class Product:
    """Rows of `target` are rows of `source` times `weights`, or these are added to them; `total`: to which they are added in turn."""

    weights: Tensor
    bias: Tensor | None
    source: Place
    target: Place
    total: Place | None = None
    adds: bool = False


def walk_of(call: Call, launch: Any, prologue: Any, loop: Any, operands: Sequence[Tensor]) -> Walk | None:
    """Return what walks over the steps of a `Loop` in C++, or None.

    Args:
        call, launch, prologue: of the rest for one step, what it runs, and what computes the params of that.
        operands: states, params and captured tensors.
    """
    if not isinstance(launch, Launch) or not isinstance(launch.kernel, cpp_kernel.Kernel) or not _takes(call, loop):
        return None
    first = loop.states[0]
    empty = iter([first.new_empty((1, *meta.shape), dtype=meta.dtype) for meta in loop.results])
    laid_out = call.laid_out([*[next(empty) if x is None else x[:1] for x in loop.inputs], *operands])
    params = [] if prologue is None else map(prologue(call.named(laid_out)).__getitem__, launch.params)
    walk = Walk(call, launch, loop.T, [*laid_out, *[None] * (len(launch.roles) - len(laid_out)), *params])
    return walk if walk.periodic() else None


def _takes(call: Call, loop: Any) -> bool:
    """Return whether all mixing calls of states are products as wide as the step, of one dtype."""
    step, dtype = call.shapes.step, loop.results[0].dtype
    if call.order is not None or not call.returned_whole or dtype not in cpp_products.DTYPES or not math.prod(step):
        return False
    for (_, k, f), meta in zip(loop.carried, loop.results, strict=True):
        shapes = [(f.weights, (step[-1], step[-1])), *[(bias, step[-1:]) for bias in f.fixed[1:]], (loop.states[k], step)] if step else []
        if f.weights is None or meta.shape != step or not step or any(t.dtype is not dtype or t.shape != s for t, s in shapes):
            return False
    return True


class Walk:
    """A walk over T steps.

    Args:
        call, launch: of the rest for one step, and what it runs.
        given: operands of one step as the launch takes them, from which it reads params.
    """

    def __init__(self, call: Call, launch: Launch, T: int, given: Sequence[Tensor | None]):
        self.call, self.launch, self.kernel, self.T = call, launch, launch.kernel, T
        self.step, self.dims = call.shapes.step, list(launch.dims)
        if launch.params:
            given, self.dims = launch.with_indexed(given)
        operands = dict(zip((*launch.roles, *launch.params), given, strict=False))
        reads = [a.role for a in self.kernel.plan.reads if a.role.kind is Kind.PARAM]
        self.reads = {role: Place(tensor, param=True) for role in reads if (tensor := operands.get(role)) is not None}
        self.writes: dict[Role, Place] = {}
        self.products: list[Product] = []

    def periodic(self) -> bool:
        """Return whether params are the same for every sequence."""
        pairs = zip(self.dims[::2], self.dims[1::2], strict=True)
        return all(count == 1 or self.step[-1] % (inner * count) == 0 for inner, count in pairs)

    def rows(self, sequence: Tensor) -> Tensor:
        """Return a sequence `[T, *step]` in dense memory."""
        T, *own = sequence.shape
        return sequence.reshape(T, *[1] * (len(self.step) - len(own)), *own).expand(T, *self.step).contiguous()

    def slots(self, row: Tensor, slot: int) -> Tensor:
        """Return two rows that take turns, one of which starts as `row`."""
        made = row.new_empty((2, *self.step))
        made[slot] = row
        return made

    def run(self, *, back: bool) -> bool:
        """Walk; False, and nothing ran, if an array of the step has no place."""
        plan = self.kernel.plan
        listed: list[Place | None] = [self.reads.get(a.role) for a in plan.reads] + [self.writes.get(a.role) for a in plan.writes]
        kinds = [a.kind for a in (*plan.reads, *plan.writes)]
        if any(place is None and kind != "checkpoint" for place, kind in zip(listed, kinds, strict=True)):
            return False
        for product in self.products:
            listed += [p for p in (product.source, product.target, product.total) if p is not None and not any(p is q for q in listed)]
        at = {id(place): k for k, place in enumerate(listed) if place is not None}
        weights = [(p.weights.contiguous(), None if p.bias is None else p.bias.contiguous()) for p in self.products]
        pointers, dims = (
            [ctypes.cast(self.kernel.run_pointer, ctypes.c_void_p).value],
            [len(listed), len(self.products), len(self.dims), *self.dims],
        )
        for place in listed:
            pointers += (0, 0) if place is None else place.pointers()
            dims += (0, 0, _AT) if place is None else place.strides()
        for product, (w, b) in zip(self.products, weights, strict=True):
            pointers += (w.data_ptr(), 0 if b is None else b.data_ptr())
            total = -1 if product.total is None else at[id(product.total)]
            dims += (at[id(product.source)], at[id(product.target)], total, product.adds)
        loop = cpp_products.loop(self.products[0].weights.dtype)
        width = self.step[-1]
        sequences = math.prod(self.step[:-1])
        threads = min(num_threads(), sequences) if self.T * sequences * width >= cpp_products.GRAIN else 1
        arrays, sizes = struct.pack(f"={len(pointers)}Q", *pointers), struct.pack(f"={len(dims)}q", *dims)
        if loop.run_pointer(arrays, self.kernel.numbers, sizes, self.T, sequences, width, threads, back):
            raise MemoryError("flexsn: no memory for the scratch rows of a tile")
        return True

    def forward(self, loop: Any, *, keeps: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]] | None:
        """Walk over time; return outputs, final states and the results of the mixing calls of states, or None if it cannot.

        Args:
            keeps: whether these are of use later.
        """
        arrays = {role: (shape, dtype) for role, shape, dtype in self.launch.writes}
        outputs = [torch.empty((self.T, *arrays[r][0][1:]), dtype=arrays[r][1]) for r in self.call.results[: self.call.bounds[0]]]
        slots = [self.slots(v, 0) for v in loop.states]
        self.reads |= {Role(Kind.INPUT, k): Place(self.rows(x)) for k, x in enumerate(loop.inputs) if x is not None}
        for k, two in enumerate(slots):
            self.reads[Role(Kind.STATE, k)], self.writes[Role(Kind.STATE, k)] = Place(two, _SLOT), Place(two, _OTHER_SLOT)
        self.writes |= {Role(Kind.OUTPUT, k): Place(y) for k, y in enumerate(outputs)}
        mixed = [torch.empty((self.T if keeps else 1, *m.shape), dtype=m.dtype) for m in loop.results]
        for (place, k, f), m in zip(loop.carried, mixed, strict=True):
            target = self.reads[Role(Kind.INPUT, place)] = Place(m)
            bias = f.fixed[1] if f.fixed[1:] else None
            weights: Any = f.weights  # there are some, as `_takes` saw
            self.products.append(Product(weights, bias, self.reads[Role(Kind.STATE, k)], target))
        return (outputs, [two[self.T & 1] for two in slots], mixed) if self.run(back=False) else None

    def backward(self, loop: Any, back: Back) -> bool:
        """Walk back over time; False if it cannot."""
        last = (self.T - 1) & 1
        self.reads |= {Role(Kind.INPUT, k): Place(self.rows(x)) for k, x in enumerate(back.inputs)}
        for k, (start, after) in enumerate(zip(loop.states, back.trail, strict=True)):
            self.reads[Role(Kind.STATE, k)] = Place(self.rows(after), _BEFORE, start.contiguous())
        self.reads |= {Role(Kind.OUTPUT_GRAD, k): Place(self.rows(g)) for k, g in enumerate(back.outputs) if g is not None}
        for k, end in enumerate(back.ends):
            if end is not None:
                two = self.slots(end, last)
                self.reads[Role(Kind.STATE_GRAD, k)], self.writes[Role(Kind.STATE_GRAD, k)] = Place(two, _SLOT), Place(two, _OTHER_SLOT)
        for (place, _, _), grad in zip(loop.carried, back.found, strict=True):
            self.writes[Role(Kind.INPUT_GRAD, place)] = Place(grad)
        for k, by in back.fed.items():
            by[self.T] = 0
            calls, target = [(place, f) for place, state, f in loop.carried if state == k], Place(by)
            for n, (place, f) in enumerate(calls):
                total = self.writes[Role(Kind.STATE_GRAD, k)] if n == len(calls) - 1 else None
                weights: Any = f.weights  # there are some, as `_takes` saw
                self.products.append(Product(weights.T, None, self.writes[Role(Kind.INPUT_GRAD, place)], target, total, n > 0))
        return self.run(back=True)
