"""What a recurrence does in one step, as the C++ loop over time takes it (`_runtime/cpp/recurrent.h`): a list of ops on arrays.

The loop also serves products of spikes with weights outside of recurrences (`by_spikes`), of all steps at once, since spikes drive rows of
the weights there, too: a training step of a network as for SHD, written as one core, takes 25 ms, and 41 ms with PyTorch's products before
and after the recurrence (`python benchmarks/recurrent.py`, 2026-11-28, two CPU cores).
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._ir.roles import Kind, Role
from ..._runtime import cpp_kernel
from ..._runtime.fork import num_threads
from ..._runtime.launch import Launch, as_one
from ..._runtime.memory import allocator, dense_strides
from ..._torch.tensors import has_storage
from ..._torch.transforms import has_tangent, is_plain
from ..call import Call
from . import cpp_products

AT, BEFORE, SLOT, OTHER_SLOT = range(4)  # as `Place::Kind`
_KERNEL, _PRODUCT, _COPY, _NORM, _NORM_BACK, _TOTAL, _SOFTMAX, _SOFTMAX_BACK = range(8)  # as `Op`


class CannotWalk(Exception):
    """A recurrence does what the C++ loop has no op for; the message says what, as `explain` does."""


@dataclass(eq=False)
class Array:
    """Where a value lies.

    Attributes:
        tensor: `[T, sequences, width]`; `[1, ...]` of what only its own step reads, `[2, ...]` of rows that take turns; a param.
        kind: at which row step t finds it: that of t, that of the step before, one of two that take turns, the other one.
        first: the row at step 0 of `BEFORE`.
        param: whether it is the same at all steps, for all sequences.
    """

    tensor: Tensor
    kind: int = AT
    first: Tensor | None = None
    param: bool = False

    @property
    def width(self) -> int:
        """The values of a row: of one sequence at one step."""
        return self.tensor.shape[-1]

    @property
    def dense(self) -> bool:
        """Whether rows of sequences lie one after the other."""
        return self.param or self.tensor.stride(1) == self.width or self.tensor.shape[1] == 1

    def part(self, at: int, width: int) -> Array:
        """Return a part of the rows."""
        first = None if self.first is None else self.first[:, at : at + width]
        return Array(self.tensor[..., at : at + width], self.kind, first)

    def strides(self) -> tuple[int, int, int]:
        """Return bytes from step to step and from sequence to sequence, and the kind."""
        size, t = self.tensor.element_size(), self.tensor
        return (0, 0, AT) if self.param else (t.stride(0) * size if t.shape[0] > 1 else 0, t.stride(1) * size, self.kind)


Launcher = Callable[[Sequence[Tensor | None]], None]  # runs a kernel over the tensors that it takes


def fresh(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor with memory of its own."""
    allocate = allocator(device, shape, dense_strides(shape), dtype)
    return as_one(lambda _: allocate(), ())


class Rows:
    """Where the values of a walk lie.

    Args:
        T: steps.
        lead: dims of a step before the last one.
        dtype: of all that ops but kernels take.
        unit: the width of states.

    Attributes:
        takes_autocast: whether products may follow autocast.
        cut: how its kernel divides the work, in words; empty where that is nothing to tell.
    """

    array: type[Array] = Array
    takes_autocast, cut = False, ""

    def __init__(self, T: int, lead: Sequence[int], dtype: torch.dtype, device: torch.device, unit: int):
        self.T, self.lead, self.dtype, self.device, self.unit = T, tuple(lead), dtype, device, unit
        self.sequences = math.prod(lead)

    def new(self, width: int, rows: int, dtype: torch.dtype | None = None) -> Array:
        """Return an array with memory of its own; on a CPU that which earlier ones left, if it is large."""
        shape = rows, self.sequences, width
        return self.array(fresh(self.device, shape, dtype or self.dtype))

    def launch(self, *, back: bool) -> None:
        """Run the ops at every step, or `back` from the last one."""
        taken, run = self.kernel_of(back=back)
        as_one(run, taken, addresses=True)

    def kernel_of(self, *, back: bool) -> tuple[list[Tensor | None], Launcher]:
        """Return the tensors that the kernel of the walk takes, and what runs it over such tensors."""
        raise NotImplementedError

    def rows_of(self, sequence: Tensor, width: int) -> Array:
        """Return a sequence `[T, *step]`, as wide as it is or broadcast."""
        T, *own = sequence.shape
        whole = (T, *self.lead, width)
        if len(own) > len(whole) - 1 or any(a not in (1, b) for a, b in zip(own[::-1], whole[::-1], strict=False)):
            raise CannotWalk("operands do not have the same dims before the last")
        wide = sequence.reshape(T, *[1] * (len(whole) - 1 - len(own)), *own).expand(whole).reshape(T, self.sequences, width)
        return self.array(wide if wide.stride(2) == 1 or width == 1 else wide.contiguous())

    def turns(self, row: Tensor, slot: int) -> Array:
        """Return two rows that take turns, the one in `slot` as given."""
        made = self.new(row.shape[-1], 2, row.dtype)
        made.tensor[slot].copy_(row.reshape(made.tensor.shape[1:]))
        return self.array(made.tensor, SLOT)

    def turns_of_zeros(self, like: Tensor) -> Array:
        """Return two rows that take turns, of zeros."""
        return self.array(torch.zeros((2, self.sequences, like.shape[-1]), dtype=like.dtype, device=self.device), SLOT)

    def shaped(self, array: Tensor) -> Tensor:
        """Return rows as `[*, *step]`."""
        return array.unflatten(1, self.lead) if self.lead else array.squeeze(1)


class Walk(Rows):
    """A list of ops, written one after the other; arguments as of `Rows`."""

    def __init__(self, T: int, lead: Sequence[int], dtype: torch.dtype, unit: int):
        super().__init__(T, lead, dtype, torch.device("cpu"), unit)
        self.arrays: list[Array] = []
        self.ops: list[list[int]] = []
        self.pointers: list[Tensor | tuple[int, Any]] = []  # or an address, and what keeps it good
        self.widest = 1

    def place(self, array: Array | None) -> int:
        """Return the number under which ops name an array; -1 of none."""
        if array is None:
            return -1
        for k, other in enumerate(self.arrays):
            if other is array:
                return k
        self.arrays.append(array)
        self.widest = max(self.widest, array.width if not array.param else 1)
        return len(self.arrays) - 1

    def pointer(self, address: Tensor | tuple[int, Any]) -> int:
        """Return the number under which ops name an address."""
        self.pointers.append(address)
        return len(self.pointers) - 1

    def weights(self, tensor: Tensor | None) -> int:
        """Return the number under which ops name weights; -1 of none."""
        dense = None if tensor is None else tensor.detach().contiguous()
        if dense is not None and dense.dtype is not self.dtype:
            raise CannotWalk("weights are of another dtype than values")
        return -1 if dense is None else self.pointer(dense)

    def kept(self, start: Tensor) -> tuple[Array, Array, Tensor]:
        """Return where a state lies before every step and after it, all of which are kept, and the final one."""
        whole = self.new(start.shape[-1], self.T + 1).tensor
        whole[0] = start.reshape(whole[0].shape)
        return Array(whole[:-1]), Array(whole[1:]), whole[self.T]

    # --- ops ------------------------------------------------------------------------------------------------------------------
    def kernel(
        self, call: Call, launch: Any, prologue: Any, operands: Sequence[Tensor], reads: Mapping[Role, Array], writes: Mapping[Role, Array]
    ) -> None:
        """Run the kernel of one step of a segment; `reads`, `writes`: where its inputs, states and results lie.

        Args:
            launch, prologue: what runs, and what computes its params.
            operands: of one step, of which params and captured tensors are read.
        """
        if not isinstance(launch, Launch) or not isinstance(launch.kernel, cpp_kernel.Kernel):
            raise CannotWalk("a part of it is no kernel for CPUs")
        static, dims = static_operands(self.lead, call, launch, prologue, operands)
        width = call.shapes.step[-1]
        if any(count > 1 and width % (inner * count) for inner, count in zip(dims[::2], dims[1::2], strict=True)):
            raise CannotWalk("a param differs from sequence to sequence")
        plan = launch.kernel.plan
        found: list[Array | None] = []
        for a in (*plan.reads, *plan.writes):
            array = (reads if len(found) < len(plan.reads) else writes).get(a.role)
            if a.role.kind is Kind.PARAM and (param := static.get(a.role)) is not None:
                array = Array(param, param=True)
            if (array is None and a.kind != "checkpoint") or (array is not None and not array.param and array.width != width):
                raise CannotWalk("a kernel takes values of another width")
            if array is not None and array.tensor.dtype is not a.storage:
                raise CannotWalk("values differ in dtype")
            found.append(array)
        code = ctypes.cast(launch.kernel.run_pointer, ctypes.c_void_p).value
        numbers = ctypes.cast(ctypes.c_char_p(launch.kernel.numbers), ctypes.c_void_p).value
        functions = self.pointer((code or 0, launch)), self.pointer((numbers or 0, launch.kernel.numbers))
        dense = all(array is None or array.dense for array in found)
        self.ops.append([_KERNEL, *functions, width, dense, len(dims), len(found), *dims, *map(self.place, found)])

    def product(self, source: Array, target: Array, w: Tensor, bias: Tensor | None = None, *, adds: bool = False) -> None:
        """Write `source @ w + bias` to the target, or add it."""
        if w.shape != (source.width, target.width) or (bias is not None and bias.shape != w.shape[1:]):
            raise CannotWalk("weights or a bias have other shapes than a product's")
        self.ops.append([_PRODUCT, self.place(source), self.place(target), *w.shape, adds, self.weights(w), self.weights(bias)])

    def copy(self, source: Array, target: Array, *, adds: bool = False) -> None:
        """Copy rows to the target, or add them."""
        self.ops.append([_COPY, self.place(source), self.place(target), source.width, adds])

    def by_rows(self, op: int, arrays: Sequence[Array], *tensors: Tensor | None) -> None:
        """Run an op on rows, each for itself; it computes with some tensors."""
        self.ops.append([op, *map(self.place, arrays), arrays[0].width, *map(self.weights, tensors)])

    def number(self, value: float) -> Tensor:
        return torch.full((1,), value, dtype=self.dtype)

    def norm(self, source: Array, target: Array, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        """Write `layer_norm` of rows to the target."""
        self.by_rows(_NORM, (source, target), weight, bias, self.number(eps))

    def norm_back(self, source: Array, grad: Array, target: Array, weight: Tensor | None, eps: float) -> None:
        """Write the cotangent of what `layer_norm` takes to the target; `grad`: that of its result."""
        self.by_rows(_NORM_BACK, (source, grad, target), weight, self.number(eps))

    def softmax(self, source: Array, target: Array) -> None:
        """Write `softmax` of rows to the target."""
        self.by_rows(_SOFTMAX, (source, target))

    def softmax_back(self, result: Array, grad: Array, target: Array) -> None:
        """Write the cotangent of what `softmax` takes to the target; `grad`: that of its result."""
        self.by_rows(_SOFTMAX_BACK, (result, grad, target))

    def total(self, source: Array, target: Array, by: float) -> None:
        """Write the sum of a row over `by` to the target, at every place of it."""
        self.by_rows(_TOTAL, (source, target), self.number(by))

    def kernel_of(self, *, back: bool) -> tuple[list[Tensor | None], Launcher]:
        taken, dims, loop = list[Tensor | None](), [len(self.arrays), len(self.ops)], cpp_products.loop(self.dtype)
        for array in self.arrays:
            taken += [array.tensor, array.first]
            dims += array.strides()
        for op, *rest in self.ops:
            dims += [op, len(rest), *rest]
        first, fixed = len(taken), [None if isinstance(p, Tensor) else p for p in self.pointers]  # holds no weights
        taken += [p if isinstance(p, Tensor) else None for p in self.pointers]
        packed = struct.pack(f"={len(dims)}q", *dims)
        parallel, T, sequences = self.T * self.sequences * self.widest >= cpp_products.GRAIN, self.T, self.sequences

        def launch(tensors: Sequence[Tensor | None]) -> None:
            pointers = [0 if t is None else t.data_ptr() for t in tensors]
            pointers[first:] = [own if p is None else p[0] for p, own in zip(fixed, pointers[first:], strict=True)]
            threads = min(num_threads(), sequences) if parallel else 1
            if loop.run_pointer(struct.pack(f"={len(pointers)}Q", *pointers), b"", packed, T, sequences, 0, threads, back):
                raise MemoryError("flexsn: no memory for the scratch rows of a tile")

        return taken, launch


def static_operands(
    lead: tuple[int, ...], call: Call, launch: Launch, prologue: Any, operands: Sequence[Tensor]
) -> tuple[dict[Role | None, Tensor | None], Sequence[int]]:  # fmt: skip
    """Return operands of the kernel of one step by role, params as it takes them; two sizes per param."""
    step = call.shapes.step
    if call.order is not None or not call.returned_whole or step[:-1] != lead or not math.prod(step) or len(step) != len(lead) + 1:
        raise CannotWalk("dims before the last differ, or memory is in another order")
    laid_out = call.laid_out(operands)
    params = [] if prologue is None else map(prologue(call.named(laid_out)).__getitem__, launch.params)
    given: Sequence[Tensor | None] = [*laid_out, *[None] * (len(launch.roles) - len(laid_out)), *params]
    given, dims = launch.with_indexed(given) if launch.params else (given, list(launch.dims))
    return dict(zip((*launch.roles, *launch.params), given, strict=False)), dims


class Norm(NamedTuple):
    """`layer_norm` over the last dim."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def forward(self, walk: Any, source: Array, target: Array) -> None:
        """Write what it makes of rows to the target."""
        walk.norm(source, target, *self)

    def backward(self, walk: Any, source: Array, result: Array, grad: Array, target: Array) -> None:
        """Write the cotangent of what it takes to the target; `grad`: that of its result."""
        walk.norm_back(source, grad, target, self.weight, self.eps)


class Softmax(NamedTuple):
    """`softmax` over the last dim; methods as of `Norm`."""

    def forward(self, walk: Any, source: Array, target: Array) -> None:
        walk.softmax(source, target)

    def backward(self, walk: Any, source: Array, result: Array, grad: Array, target: Array) -> None:
        walk.softmax_back(result, grad, target)


class Total(NamedTuple):
    """`sum` or `mean` over the last dim, which stays as a dim of one value: in a walk this stands at every place of a row. Methods as
    of `Norm`."""

    by: float

    def forward(self, walk: Any, source: Array, target: Array) -> None:
        walk.total(source, target, self.by)

    def backward(self, walk: Any, source: Array, result: Array, grad: Array, target: Array) -> None:
        walk.total(grad, target, self.by)


RowOp = Norm | Softmax | Total


def row_op(f: Any, operand: torch.Size) -> RowOp | None:
    """Return what a mixing call `f`, a `MixingFunction`, does to the rows of its operand; None of one that does anything else."""
    names, (args, kwargs) = _ARGUMENTS.get(f.func), f.arguments
    if names is None or tuple(f.moving) != (0,) or len(args) > len(names) + 1:
        return None
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    last, width = (len(operand) - 1, -1), operand[-1]
    if f.func is torch.nn.functional.layer_norm:
        whole = tuple(given["normalized_shape"]) == (width,)
        return Norm(given.get("weight"), given.get("bias"), given.get("eps", 1e-5)) if whole else None
    dim = given.get("dim")
    if given.get("dtype") is not None or (dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim) not in last:
        return None
    if f.func not in _MEANS:
        return Softmax()
    return Total(float(width) if _MEANS[f.func] else 1.0) if given.get("keepdim") is True else None


# whether they divide by the number of values
_MEANS = {torch.sum: False, Tensor.sum: False, torch.mean: True, Tensor.mean: True}
_ARGUMENTS = {  # of functions, after the operand
    torch.nn.functional.layer_norm: ("normalized_shape", "weight", "bias", "eps"),
    torch.nn.functional.softmax: ("dim", "_stacklevel", "dtype"), torch.softmax: ("dim", "dtype"), Tensor.softmax: ("dim", "dtype"),
    **dict.fromkeys(_MEANS, ("dim", "keepdim", "dtype")),
}  # fmt: skip


# --- products outside of recurrences -------------------------------------------------------------------------------------------
_WORTH = 1 << 22  # multiplications of a product that are worth a look at how many are by zero


class Driven(torch.autograd.Function):
    """A product of spikes with weights, `a @ w + bias`; see `by_spikes`."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, w)
        rows = a.flatten(0, -2)
        walk = Walk(1, rows.shape[:1], a.dtype, w.shape[1])
        found = walk.new(w.shape[1], 1)
        walk.product(walk.rows_of(rows.unsqueeze(0), a.shape[-1]), found, w, bias)
        tensors, launch = walk.kernel_of(back=False)
        launch(tensors)
        return found.tensor.reshape(*a.shape[:-1], w.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (a, w), by, found = ctx.saved_tensors, grad.flatten(0, -2), None
        if ctx.needs_input_grad[1]:
            rows = a.flatten(0, -2)
            plain = not torch.is_grad_enabled() and is_plain(grad) and has_storage(grad)
            found = cpp_products.outer(rows[:1], rows[1:], by) if plain else rows.T @ by
        return grad @ w.T if ctx.needs_input_grad[0] else None, found, by.sum(0) if ctx.needs_input_grad[2] else None


def by_spikes(a: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Return `a @ w + bias`, of which rows of `w` are driven by what is not zero in `a [..., K]`; None where that is not much of a large
    product on a CPU, or a transform, a trace or autocast is to see a product of PyTorch's."""
    if not a.is_cpu or a.dtype not in cpp_products.DTYPES or a.dim() < 2 or torch.is_autocast_enabled("cpu"):
        return None
    if w.shape != (a.shape[-1], w.shape[-1]) or (bias is not None and bias.shape != w.shape[1:]) or a.numel() * w.shape[1] < _WORTH:
        return None
    tensors = [t for t in (a, w, bias) if t is not None]
    if not all(is_plain(t) and has_storage(t) and t.dtype is a.dtype and not has_tangent(t) for t in tensors):
        return None
    if not cpp_products.mostly_zero(a.detach().flatten(0, -2)):
        return None
    return Driven.apply(a, w, bias)
