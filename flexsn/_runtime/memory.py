"""Large CPU results: blocks that earlier results left are used again.

The first touch of fresh memory costs more than the kernel that writes it (the system zeroes every page), and the C
library gives large blocks back to the system as soon as a tensor dies. So the latest blocks of dead results are kept,
`MOST` bytes of them at most.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import os
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._torch.cuda import gpu_allocator
from ..errors import OperandTypeError

LEAST = 1 << 20  # bytes of a block: smaller ones are the C library's
MOST = min(1 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 16)
_HUGE = 2 << 20  # blocks of at least a huge page are whole ones, smaller ones eighths
_free: list[mmap.mmap] = []  # oldest first. List methods are atomic; a finalizer may run between any two of them


def allocator(device: torch.device, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Callable[[], Tensor]:
    """Returns a function that makes tensors of a shape, strides of dense memory, and a dtype, on a device (if it is a GPU, on the current
    one), whatever is in them."""
    if device.type == "cuda":  # GPUs have PyTorch's caching allocator
        return functools.partial(gpu_allocator(), shape, strides, dtype)
    if device.type == "cpu" and math.prod(shape) * dtype.itemsize >= LEAST:
        return functools.partial(_from_block, shape, strides, dtype)
    return functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


def _from_block(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    count = math.prod(shape)
    size = count * dtype.itemsize
    page = _HUGE if size >= _HUGE else _HUGE // 8
    block = _take(size, page) or _fresh(-(-size // page) * page)
    view = memoryview(block)  # the tensor's storage holds it
    weakref.finalize(view, _give, block).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=count).as_strided_(tuple(shape), tuple(strides))


def dense_strides(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Of dense memory with the dims in this order from the outermost, by default their own."""
    dims = tuple(range(len(shape)) if order is None else order)
    strides = [1] * len(shape)
    for outer, inner in zip(dims[-2::-1], dims[:0:-1], strict=True):
        strides[outer] = strides[inner] * max(1, shape[inner])
    return tuple(strides)


def addresses(arrays: Sequence[Tensor]) -> list[int]:
    """Returns where arrays lie; 0 for those without elements.

    Raises:
        OperandTypeError: the storage of one was freed.
    """
    found = list(map(data_ptr, arrays))  # here and in kernels, which calls wait for: no Python function per array
    return found if all(found) else _checked(arrays, found)


data_ptr = Tensor.data_ptr


def _checked(arrays: Sequence[Tensor], found: list[int]) -> list[int]:
    for array, address in zip(arrays, found, strict=True):
        if not address and array.numel():
            raise OperandTypeError(
                f"a tensor of shape {list(array.shape)} has no memory: its storage was freed",
                hint="Whoever freed it (`untyped_storage().resize_(0)`, a sharded module outside its forward) must bring it back.",
            )
    return found


def _fresh(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"flexsn: no memory for a result of {size} bytes ({error.strerror})") from None


def _take(size: int, page: int) -> mmap.mmap | None:
    """The latest free block of at least `size` bytes, and at most a quarter, or a page, more."""
    for block in reversed(_free.copy()):
        if size <= len(block) <= size + max(size // 4, page):
            with contextlib.suppress(ValueError):  # another thread took it
                _free.remove(block)
                return block
    return None


def _give(block: mmap.mmap) -> None:
    _free.append(block)
    while sum(map(len, _free.copy())) > MOST:
        with contextlib.suppress(IndexError):  # another thread was first
            _free.pop(0)
