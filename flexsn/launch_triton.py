"""Triton source -> loaded kernel: Triton's compiler and disk cache, the tile, and the call.

A binary serves every T and N: sizes are run-time arguments of no assumed divisibility. Under `TRITON_INTERPRET=1` (set
before triton is imported) kernels run on CPU tensors, slowly: for tests.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import math
import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _compat
from .errors import BackendUnavailableError, BuildError
from .plan import Plan
from .render_triton import STORAGE, kernel_name, nullable

_lock = threading.Lock()
_kernels: dict[tuple, Kernel] = {}


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut for the GPU.

    Attributes:
        block: neurons per program.
        warps: warps that share them.
        ahead: whether the loads of the next chunk are issued before the steps of this one.
        aligned: whether rows start at multiples of 16 bytes, so that a thread may load several neurons at once.
    """

    block: int
    warps: int
    ahead: bool
    aligned: bool = False


def tile_for(plan: Plan, N: int, processors: int, aligned: bool) -> Tile:
    """The tile for N neurons on a GPU of so many multiprocessors; `aligned`: whether its rows are.

    From `tools/tune_triton.py` on an H200 (benchmarks/results/gpu_tune_h200.json): within 6% of the best of all tiles for
    LIF and adaptive LIF at every size, so that a new N hardly ever needs another binary.
    """
    itemsize = max(a.storage.itemsize for a in plan.arguments)
    if plan.direction == "forward":
        return Tile(512 // itemsize, 2, ahead=True, aligned=aligned)
    if itemsize == 2 and 2048 * processors < N:  # enough other warps: registers are worth more than loads ahead
        return Tile(256, 2, ahead=False, aligned=aligned)
    return Tile(64, 2, ahead=True)


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _triton() -> Any:
    try:
        import triton
    except ImportError:
        raise BackendUnavailableError(
            'backend "triton" needs the package triton, which is not installed',
            hint='Install it with `pip install "flexsn[triton]"`, or use backend="torch", the eager loop.',
        ) from None
    return triton


class Kernel:
    """A rendered plan, its function, and the binaries made of it: one per tile and GPU."""

    def __init__(self, plan: Plan, source: str):
        self.plan, self.source = plan, source
        self.function = _define(source, kernel_name(plan))
        self._binaries: dict[tuple[Tile, int], Any] = {}
        self._tile = functools.lru_cache(lambda N, index, aligned: tile_for(plan, N, _processors(index), aligned))
        self._bits = [1 << nullable(plan).index(a) if a.kind == "row" and i < len(plan.reads) else 0 for i, a in enumerate(plan.arguments)]

    def __call__(self, arrays: Sequence[Tensor | None], dims: Sequence[int], T: int, N: int) -> None:
        """Run over T steps of N neurons; arrays contiguous, in the order of `plan.arguments`, None where absent."""
        if T == 0 or N == 0:
            return
        given = sum([bit for bit, a in zip(self._bits, arrays, strict=True) if a is not None])
        device = next(a for a in arrays if a is not None).device
        if device.type != "cuda":
            self._interpret(arrays, dims, T, N, given)
            return
        index = device.index
        pointers = [0 if a is None else a.data_ptr() for a in arrays]
        aligned = not N % 16 and not any([p % 16 for p in pointers])
        tile = self._tile(N, index, aligned)
        binary = self._binaries.get((tile, index)) or self.binary(tile, index)
        numbers = (*pointers, *dims, T, N, given, tile.block, tile.ahead)
        stream = _compat.current_stream(index)
        if _compat.current_device() == index:
            binary.run(-(-N // tile.block), 1, 1, stream, binary.function, binary.packed_metadata, None, None, None, *numbers)
        else:
            with torch.cuda.device(index):
                binary.run(-(-N // tile.block), 1, 1, stream, binary.function, binary.packed_metadata, None, None, None, *numbers)

    def binary(self, tile: Tile, index: int) -> Any:
        """The binary for a tile, loaded on a GPU; built if neither this process nor the disk has it."""
        with _lock:
            if (tile, index) not in self._binaries:
                with torch.cuda.device(index):
                    binary = self.build(tile)
                    binary._init_handles()
                    self._binaries[tile, index] = binary
            return self._binaries[tile, index]

    def build(self, tile: Tile, target: Any = None) -> Any:
        """Compile, for the current GPU or a `GPUTarget`.

        Raises:
            BuildError: Triton failed.
        """
        triton = _triton()
        kinds = [f"*{STORAGE[a.storage]}" for a in self.plan.arguments]
        kinds += ["i64"] * (2 * sum(a.kind == "param" for a in self.plan.reads)) + ["i32", "i64", "i32", "constexpr", "constexpr"]
        constants = {(len(kinds) - 2,): tile.block, (len(kinds) - 1,): tile.ahead}
        even = [i for i, kind in enumerate(kinds) if tile.aligned and (kind[0] == "*" or i == len(kinds) - 4)]
        attributes = {(i,): [["tt.divisibility", 16]] for i in even}
        source = triton.compiler.ASTSource(self.function, dict(zip(self.function.arg_names, kinds, strict=True)), constants, attributes)
        try:
            return triton.compile(source, target=target, options={"num_warps": tile.warps, "enable_fp_fusion": False})
        except Exception as error:  # whatever a compiler raises
            raise BuildError(
                f"Triton failed on `{kernel_name(self.plan)}`: {type(error).__name__}: {str(error)[-2000:]}",
                hint="Run `flexsn.scan(..., backend='torch')` meanwhile, and report the core: generated source should always build.",
            ) from error

    def _interpret(self, arrays: Sequence[Tensor | None], dims: Sequence[int], T: int, N: int, given: int) -> None:
        block = min(128, 1 << (N - 1).bit_length())
        present = [torch.zeros((), dtype=a.storage) if t is None else t for a, t in zip(self.plan.arguments, arrays, strict=True)]
        taken = [t.float() if t.dtype is torch.bfloat16 else t for t in present]  # the interpreter rounds bfloat16 towards zero
        with warnings.catch_warnings():  # the interpreter's own, and NumPy's on values that GPUs take silently
            warnings.simplefilter("ignore")
            self.function[(math.ceil(N / block),)](*taken, *dims, T, N, given, BLOCK=block, AHEAD=True)
        for given_one, used in list(zip(present, taken, strict=True))[len(self.plan.reads) :]:
            if used is not given_one:
                given_one.copy_(used)


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _define(source: str, name: str) -> Any:
    """The function of generated source; Triton reads the text back through `linecache`."""
    _triton()
    key = hashlib.sha256(source.encode()).hexdigest()[:16]
    file = f"<flexsn {key}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space: dict[str, Any] = {"__name__": f"flexsn.generated_{key}"}
    exec(compile(source, file, "exec"), space)
    return space[name]


def check_device(device: torch.device) -> str | None:
    """Why tensors on this device cannot be taken, or None."""
    if device.type == "cuda" or (device.type == "cpu" and interpreted()):
        return None
    return f'backend "triton" runs on NVIDIA GPUs, and the operands are on {device} (on the CPU it runs under TRITON_INTERPRET=1 alone)'


def load(plan: Plan, source: str) -> Kernel:
    """The kernel of a rendered plan; binaries are built when a size needs them.

    Raises:
        BackendUnavailableError: triton is not installed.
    """
    key = (source, tuple(a.storage for a in plan.arguments))  # the text names no dtypes of memory
    with _lock:
        if key not in _kernels:
            _kernels[key] = Kernel(plan, source)
        return _kernels[key]
