"""Private names of PyTorch and Triton for launches on a GPU, each with the versions in which it was seen."""

from __future__ import annotations

import concurrent.futures.thread
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .availability import GPU, moved


def _stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# Of a device, the CUDA stream that PyTorch uses now, as a number; in C, as every launch asks: the public call makes an object first.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream)  # 2.11, 2.14


def gpu_allocator() -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]:
    """`torch.empty_strided` by shape, strides and dtype on the current GPU, in the quickest way that PyTorch has."""
    if moved(GPU):
        return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
    return torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]  # GPU builds have it (2.11, 2.14)


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
