"""Loops over time of recurrent layers on a CPU, products of spikes, and gradients of their weights: `_runtime/cpp/recurrent.h`, for float
and double.

Where a core multiplies spikes with weights outside of recurrences, these drive rows of the weights there, too: a training step of a network
as for SHD, written as one core, takes 25 ms, and 41 ms with PyTorch's products before and after the recurrence
(`python benchmarks/recurrent.py`, 2026-11-28, two CPU cores).
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
from torch import Tensor

from ..._plan.plan import KernelPlan
from ..._runtime.cpp_kernel import Kernel, load, start
from ..._runtime.fork import num_threads
from ..._runtime.memory import allocator, dense_strides
from ..._torch.tensors import has_storage
from ..._torch.transforms import has_tangent, is_plain

GRAIN = 16384  # neuron-steps that are worth a second thread
_WORTH = 1 << 22  # multiplications of a product that are worth a look at how many are by zero
_PRODUCT = 1  # as `Op`
DTYPES = {torch.float32: "float", torch.float64: "double"}
_LOOP = """// the loop of recurrences over {name}s: kernels of one step, products, and what else mixes the values of a row
#include "recurrent.h"
FLEXSN_RUN {{ return flexsn::recurrent<{name}>(arrays, dims, T, N, threads, flag); }}
"""
_OUTER = """// gradients of the weights of recurrences over {name}s
#include "recurrent.h"
FLEXSN_RUN {{ return flexsn::outer<{name}>(arrays, dims, T, N, tile, threads); }}
"""


_PLAN = KernelPlan("recurrent", "forward", (), (), (), (), 1, numbers=False)  # of which the loader reads nothing more


@functools.cache
def _loaded(source: str) -> Kernel:
    return load(_PLAN, source)  # type: ignore[return-value]  # nothing is put off where calls run


def expect(dtype: torch.dtype, *, trains: bool) -> None:
    """Start to build, beside the kernels of a recurrence, what calls of it need."""
    for text in (_LOOP, _OUTER) if trains else (_LOOP,):
        start(_PLAN, text.format(name=DTYPES[dtype]))


def loop(dtype: torch.dtype) -> Kernel:
    """Return the loop over time, for products of `dtype`."""
    return _loaded(_LOOP.format(name=DTYPES[dtype]))


def outer(first: Tensor, rest: Tensor, grads: Tensor) -> Tensor | None:
    """Return the gradient of `w` in `a @ w`, the same bits at any number of threads; None on another device, or of another dtype.

    Args:
        first, rest: rows of `a [rows, K]`, which lie in two places.
        grads: of the product, `[rows, H]`.
    """
    name = DTYPES.get(first.dtype)
    if name is None or first.device.type != "cpu" or rest.dtype is not first.dtype:
        return None
    few = mostly_zero(rest) and bool(grads.sum().isfinite())  # else zero times one of them is not zero
    first, rest, grads = first.contiguous(), rest.contiguous(), grads.contiguous()
    out = first.new_empty((first.shape[1], grads.shape[1]))
    pointers = struct.pack("=4Q", *[t.data_ptr() for t in (first, rest, grads, out)])
    threads = num_threads() if grads.numel() >= GRAIN else 1
    sizes = struct.pack("=2q", len(first), few)
    _loaded(_OUTER.format(name=name)).run_pointer(pointers, b"", sizes, len(grads), *out.shape, threads, 0)
    return out


def mostly_zero(rows: Tensor) -> bool:
    """Return whether at most a fifth of the values of some rows is not zero."""
    some = rows[:: max(1, len(rows) // 512)]
    return bool(some.count_nonzero() * 5 <= some.numel())


def product(a: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Return `a @ w + bias` for rows `a [rows, K]` that are mostly zero, by what is not."""
    (rows, width), columns, size = a.shape, w.shape[1], a.element_size()
    out = allocator(a.device, (rows, columns), dense_strides((rows, columns)), a.dtype)()
    given = [a.contiguous(), None, out, None, w.contiguous(), None if bias is None else bias.contiguous()]
    op = (_PRODUCT, 7, 0, 1, width, columns, 0, 0, -1 if bias is None else 1)
    dims = (2, 1, *(0, width * size, 0), *(0, columns * size, 0), *op)  # a loop of one step, over two arrays
    pointers = struct.pack("=6Q", *[0 if t is None else t.data_ptr() for t in given])
    threads = min(num_threads(), rows) if rows * max(width, columns) >= GRAIN else 1
    if loop(a.dtype).run_pointer(pointers, b"", struct.pack(f"={len(dims)}q", *dims), 1, rows, 0, threads, 0):
        raise MemoryError("flexsn: no memory for the scratch rows of a tile")
    return out


class Driven(torch.autograd.Function):
    """A product of spikes with weights, `a @ w + bias`; see `by_spikes`."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, w)
        return product(a.flatten(0, -2), w, bias).unflatten(0, a.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (a, w), by, found = ctx.saved_tensors, grad.flatten(0, -2), None
        if ctx.needs_input_grad[1]:
            rows = a.flatten(0, -2)
            plain = not torch.is_grad_enabled() and is_plain(grad) and has_storage(grad)
            found = outer(rows[:1], rows[1:], by) if plain else rows.T @ by
        return grad @ w.T if ctx.needs_input_grad[0] else None, found, by.sum(0) if ctx.needs_input_grad[2] else None


def by_spikes(a: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Return `a @ w + bias`, of which rows of `w` are driven by what is not zero in `a [..., K]`; None where that is not much of a large
    product on a CPU, or a transform, a trace or autocast is to see a product of PyTorch's."""
    if not a.is_cpu or a.dtype not in DTYPES or a.dim() < 2 or torch.is_autocast_enabled("cpu"):
        return None
    if w.shape != (a.shape[-1], w.shape[-1]) or (bias is not None and bias.shape != w.shape[1:]) or a.numel() * w.shape[1] < _WORTH:
        return None
    tensors = [t for t in (a, w, bias) if t is not None]
    if not all(is_plain(t) and has_storage(t) and t.dtype is a.dtype and not has_tangent(t) for t in tensors):
        return None
    if not mostly_zero(a.detach().flatten(0, -2)):
        return None
    return Driven.apply(a, w, bias)
