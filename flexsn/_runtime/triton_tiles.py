"""How a Triton kernel is cut for a GPU: the tile by its size, or the one that was measured."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from dataclasses import asdict, dataclass

import torch

from .._ir.roles import Kind
from .._plan.plan import KernelPlan
from ..errors import BuildError
from .disk_cache import folder as cache_folder


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


WIDE = 768  # neurons per multiprocessor from which on the GPU is full without loads ahead
CLASSES = ((1, False), (1 << 40, True), (1 << 40, False))  # a size and alignment of each class that `tile_for` knows
_LARGE_CORE = 100  # ops of a step from which on a thread has registers for one neuron only


def tile_for(plan: KernelPlan, N: int, processors: int, aligned: bool) -> Tile:
    """Return the tile for N neurons on a GPU of so many multiprocessors; `aligned`: whether rows start at multiples of 16 bytes.

    There is one for few and one for many neurons (or two, by alignment), from `tools/tune_triton.py` on an H200
    (benchmarks/results/gpu_tune_h200.json): within 5% of the best tile for LIF, adaptive LIF and Hodgkin-Huxley at the sizes there
    and the chunks that the plan chooses.
    """
    if WIDE * processors >= N:
        return Tile(64, 2, ahead=True)
    if not aligned or len(plan.step.nodes) > _LARGE_CORE:
        return Tile(64, 2, ahead=False)
    return Tile(64 * _neurons_per_thread(plan), 2, ahead=False, aligned=True)


_REGISTERS = 320  # bytes of a chunk's inputs and states for which a thread of a large tile has registers


def _neurons_per_thread(plan: KernelPlan) -> int:
    """Return as many as a load of 16 bytes brings and registers hold; at least two, but of 8 bytes one."""
    if _itemsize(plan) == 8:
        return 1
    inputs = {a.role: a.storage.itemsize for a in plan.reads if a.kind == "sequence" and a.role.kind is Kind.INPUT}
    states = {a.role: a.compute.itemsize for a in plan.reads if a.kind == "row" and a.role.kind is Kind.STATE}
    held = (plan.chunk + 1) * sum((inputs | states).values())
    most = 1 << (_REGISTERS // max(1, held)).bit_length() >> 1  # the power of two below
    return min(16 // _itemsize(plan), max(2, most))


def neighbours(plan: KernelPlan, tile: Tile) -> int:
    """Return how many neighbours a thread loads at once: all that it has, up to 16 bytes."""
    return max(1, min(tile.block // (32 * tile.warps), 16 // _itemsize(plan))) if tile.aligned else 1


def _itemsize(plan: KernelPlan) -> int:
    """Return the bytes of an element of the sequences, the widest if they differ."""
    return max((a.storage.itemsize for a in plan.arguments if a.kind == "sequence"), default=4)


class MeasuredTiles:
    """The tiles that `tune=True` found for one kernel, by GPU and number of neurons (to the next power of two): a file.

    A file that cannot be read, written or understood counts as none: it holds nothing that a result depends on.
    """

    def __init__(self, source: str):
        self._name = hashlib.sha256(source.encode()).hexdigest()[:32] + ".json"
        self._found: dict[str, Tile] | None = None

    def get(self, N: int, index: int, aligned: bool) -> Tile | None:
        """Return the tile that was measured for N neurons on a GPU, if any was."""
        if self._found is None:
            self._found = self._read()
        return self._found.get(self._key(N, index, aligned)) if self._found else None

    def keep(self, N: int, index: int, aligned: bool, tile: Tile) -> None:
        """Take a tile for calls with N neurons from now on, in other processes too."""
        self._found = {**self._read(), self._key(N, index, aligned): tile}
        with contextlib.suppress(OSError, BuildError):
            path = cache_folder() / "tiles" / self._name
            path.parent.mkdir(mode=0o700, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_text(json.dumps({key: asdict(tile) for key, tile in self._found.items()}, indent=1))
            part.replace(path)

    def _read(self) -> dict[str, Tile]:
        try:
            kept = json.loads((cache_folder() / "tiles" / self._name).read_text())
            return {key: Tile(**fields) for key, fields in kept.items()}
        except (OSError, BuildError, ValueError, TypeError, AttributeError):
            return {}

    @staticmethod
    def _key(N: int, index: int, aligned: bool) -> str:
        return f"{_gpu_name(index)}, {1 << (N - 1).bit_length()} neurons" + (", aligned" if aligned else "")


@functools.cache
def _gpu_name(index: int) -> str:
    return torch.cuda.get_device_name(index)
