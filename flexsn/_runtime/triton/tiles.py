"""How a Triton kernel is cut for a GPU: the tile by its size."""

from __future__ import annotations

from dataclasses import dataclass

from ..._ir.roles import Kind
from ..._plan.plan import KernelPlan


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut for the GPU.

    Attributes:
        block: neurons per program.
        warps: warps that share them.
        ahead: whether the loads of the next chunk are issued before the steps of this one.
        aligned: whether rows start at multiples of 16 bytes, so that a thread may load several neurons at once.
        ptxas: options of NVIDIA's assembler.
    """

    block: int
    warps: int
    ahead: bool
    aligned: bool = False
    ptxas: str = ""


WIDE = 768  # neurons per multiprocessor from which on the GPU is full without loads ahead
CLASSES = ((1, False), (1 << 40, True), (1 << 40, False))  # a size and alignment of each class that `tile_for` knows
_LARGE_CORE = 100  # ops of a step from which on a thread has registers for one neuron only
_LARGEST_CORES = 300  # from which on one tile serves all sizes: each takes a second or more to build


def tile_for(plan: KernelPlan, N: int, processors: int, aligned: bool) -> Tile:
    """Return the tile for N neurons on a GPU of so many multiprocessors; `aligned`: whether rows start at multiples of 16 bytes.

    There is one for few and one for many neurons (or two, by alignment), from `tools/tune_triton.py` on an H200
    (benchmarks/results/gpu_tune_h200.json): within 5% of the best tile for LIF, adaptive LIF and Hodgkin-Huxley at the sizes there
    and the chunks that the plan chooses. The largest cores load ahead in the backward alone, as 64 branches of `benchmarks/inner.py` do
    fastest on an H100 at 256, 4,096 and 262,144 neurons. NVIDIA's assembler, unless it is
    told `-O1`, gives some of these 32 registers, and keeps the rest in memory. Parts of time side by side fill a GPU whatever N is.
    """
    if len(plan.step.nodes) > _LARGEST_CORES:
        return Tile(64, 2, ahead=plan.direction == "backward", ptxas="-O1")
    if WIDE * processors >= N or plan.over_parts:
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
