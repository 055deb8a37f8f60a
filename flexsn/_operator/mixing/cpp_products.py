"""Loops over time of recurrent layers on a CPU, and gradients of their weights: `_runtime/cpp/recurrent.h`, `products.h`."""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

from ..._plan.plan import KernelPlan
from ..._runtime.cpp_kernel import Kernel, load, start
from ..._runtime.fork import num_threads
from ..._runtime.launch import as_one

GRAIN = 16384  # neuron-steps that are worth a second thread
DTYPES = {torch.float32: "float", torch.float64: "double"}
_LOOP = """// the loop of recurrences over {name}s: kernels of one step, products, and what else mixes the values of a row
#include "recurrent.h"
FLEXSN_RUN {{ return flexsn::recurrent<{name}>(arrays, dims, T, N, threads, flag); }}
"""
_OUTER = """// gradients of the weights of recurrences over {name}s
#include "products.h"
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
    return as_one(lambda rows: _outer(name, *rows), (first, rest, grads))


def _outer(name: str, first: Tensor, rest: Tensor, grads: Tensor) -> Tensor:
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
