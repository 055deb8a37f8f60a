"""The walks over time on a CPU: products of states and weights, and the kernel of one step, in a C++ loop (`_runtime/cpp/recurrent.h`).

It serves where every mixing call of a state is `s @ w` or `linear(s)` of float32 or float64, as wide as the step. A sequence is walked by
one thread: rows of spikes drive rows of the weights, other rows go through blocked products. Each sum runs in one order, so the bits are
the same at any number of threads.

What it gains: a recurrent LIF of 64 x 256 neurons (`python benchmarks/recurrent.py`).
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._ir.roles import Kind, Role
from .._operator.call import Call
from .._runtime import cpp_kernel, recurrent
from .._runtime.fork import num_threads
from .._runtime.launch import Launch
from .mixing import MixingFunction

Carried = Sequence[tuple[int, int, MixingFunction]]  # place among the inputs of the rest, state, call
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


def takes(call: Call, launch: Any, carried: Carried, metas: Sequence[Any]) -> bool:
    """Return whether the C++ loop can walk.

    Args:
        call, launch: of the rest for one step, and what it runs.
        metas: of the results of the mixing calls in `carried`.
    """
    step = call.shapes.step
    if (
        not isinstance(launch, Launch)
        or not isinstance(launch.kernel, cpp_kernel.Kernel)
        or call.order is not None
        or not call.returned_whole
    ):
        return False
    width = step[-1] if step else 0
    dtype = metas[0].dtype
    for (_, _, f), meta in zip(carried, metas, strict=True):
        weights, bias = f.weights, f.fixed[1:]
        if (
            weights is None
            or weights.shape != (width, width)
            or meta.dtype is not dtype
            or meta.shape != step
            or dtype not in recurrent.DTYPES
        ):
            return False
        if weights.dtype is not dtype or any(b.shape != (width,) or b.dtype is not dtype for b in bias):
            return False
    return bool(math.prod(step))


class Walk:
    """A walk over T steps.

    Args:
        call, launch: of the rest for one step, and what it runs.
        given: operands of one step as the launch takes them, from which it reads params.
    """

    def __init__(self, call: Call, launch: Launch, T: int, given: Sequence[Tensor | None]):
        self.kernel, self.T, self.step, self.dims = launch.kernel, T, call.shapes.step, list(launch.dims)
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
        return sequence.expand(sequence.shape[0], *self.step).contiguous()

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
        if any(place is None and kind != "checkpoint" for place, kind in zip(listed, kinds, strict=True)) or not self.periodic():
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
        loop = recurrent.loop(self.products[0].weights.dtype)
        width = self.step[-1]
        sequences = math.prod(self.step[:-1])
        threads = min(num_threads(), sequences) if self.T * sequences * width >= recurrent.GRAIN else 1
        arrays, sizes = struct.pack(f"={len(pointers)}Q", *pointers), struct.pack(f"={len(dims)}q", *dims)
        if loop.run_pointer(arrays, self.kernel.numbers, sizes, self.T, sequences, width, threads, back):
            raise MemoryError("flexsn: no memory for the scratch rows of a tile")
        return True


def forward(
    walk: Walk, carried: Carried, inputs: Sequence[Tensor | None], states: Sequence[Tensor], mixed: Sequence[Tensor], outputs: Sequence[Tensor]
) -> list[Tensor] | None:  # fmt: skip
    """Walk over time; return the final states, or None if it cannot.

    Args:
        inputs: sequences of the rest; None for results of mixing calls of states.
        states: at the start.
        mixed, outputs: to be written, `[T, *step]`; one row of `mixed` if it is of no more use.
    """
    slots = [walk.slots(v, 0) for v in states]
    walk.reads |= {Role(Kind.INPUT, k): Place(walk.rows(x)) for k, x in enumerate(inputs) if x is not None}
    for k, two in enumerate(slots):
        walk.reads[Role(Kind.STATE, k)], walk.writes[Role(Kind.STATE, k)] = Place(two, _SLOT), Place(two, _OTHER_SLOT)
    walk.writes |= {Role(Kind.OUTPUT, k): Place(y) for k, y in enumerate(outputs)}
    for (place, k, f), m in zip(carried, mixed, strict=True):
        target = walk.reads[Role(Kind.INPUT, place)] = Place(m)
        assert f.weights is not None, "as `takes` says"
        walk.products.append(Product(f.weights, *(f.fixed[1:] or [None]), walk.reads[Role(Kind.STATE, k)], target))
    return [two[walk.T & 1] for two in slots] if walk.run(back=False) else None


def backward(
    walk: Walk, carried: Carried, inputs: Sequence[Tensor], states: Sequence[Tensor], trail: Sequence[Tensor], outputs: Sequence[Tensor | None],
    ends: Sequence[Tensor | None], found: Sequence[Tensor], fed: dict[int, Tensor],
) -> bool:  # fmt: skip
    """Walk back over time; False if it cannot.

    Args:
        inputs: sequences of the rest.
        states, trail: at the start, and after every step.
        outputs, ends: cotangents of outputs and of final states.
        found, fed: to be written: cotangents of the mixing calls' results, and what flows to states by way of them.
    """
    last = (walk.T - 1) & 1
    walk.reads |= {Role(Kind.INPUT, k): Place(walk.rows(x)) for k, x in enumerate(inputs)}
    walk.reads |= {
        Role(Kind.STATE, k): Place(walk.rows(after), _BEFORE, v.contiguous())
        for k, (v, after) in enumerate(zip(states, trail, strict=True))
    }
    walk.reads |= {Role(Kind.OUTPUT_GRAD, k): Place(walk.rows(g)) for k, g in enumerate(outputs) if g is not None}
    totals: dict[int, Place] = {}
    for k, end in enumerate(ends):
        if end is not None:
            two = walk.slots(end, last)
            walk.reads[Role(Kind.STATE_GRAD, k)] = Place(two, _SLOT)
            totals[k] = walk.writes[Role(Kind.STATE_GRAD, k)] = Place(two, _OTHER_SLOT)
    targets = {k: Place(by) for k, by in fed.items()}
    for (place, _, _), grad in zip(carried, found, strict=True):
        walk.writes[Role(Kind.INPUT_GRAD, place)] = Place(grad)
    for k, target in targets.items():
        calls = [(place, f) for place, state, f in carried if state == k]
        for n, (place, f) in enumerate(calls):
            assert f.weights is not None, "as `takes` says"
            total = totals[k] if n == len(calls) - 1 else None
            walk.products.append(Product(f.weights.T, None, walk.writes[Role(Kind.INPUT_GRAD, place)], target, total, n > 0))
    return walk.run(back=True)
