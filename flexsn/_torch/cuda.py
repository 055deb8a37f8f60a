"""Private names of PyTorch and Triton for launches on a GPU, each with the versions in which it was seen."""

from __future__ import annotations

import concurrent.futures.thread
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch


def _no_gpu(device: int = -1) -> int:
    raise RuntimeError("this build of PyTorch has no CUDA")


# Of a device, the CUDA stream that PyTorch uses now, as a number (the public call makes an object first); and the current device.
# Bound as they are, in C: every launch asks.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_gpu)  # 2.11, 2.13
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _no_gpu)  # 2.11, 2.13


def gpu_allocator() -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]:
    """`torch.empty_strided` by shape, strides and dtype on the current GPU, in the quickest way that PyTorch has."""
    make = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # 2.11, 2.13
    return make or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda"))


def triton_launch(binary: Any) -> tuple[Any, tuple[Any, ...]]:
    """What launches a compiled kernel, and its arguments between the function and those of `binary.run`."""
    run = binary.run
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    if triton_version()[:2] == (3, 6) and not scratch:  # past a Python function that looks for scratch memory
        return run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)
    return run, ()


@functools.cache
def triton_version() -> tuple[int, ...]:
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def interpreter_exits() -> bool:
    """Whether the interpreter ends, and waits only for what threads of a pool have still to do."""
    return concurrent.futures.thread._shutdown  # Python 3.11, 3.12
