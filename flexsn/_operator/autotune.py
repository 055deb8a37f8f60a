"""Tiles measured on this GPU at the sizes of a call, when asked for (`tune=True`), and kept on disk for later processes.

Without it, `triton_tiles.tile_for` chooses from the tiles that were tuned once, offline. On the CPU there is nothing to
measure: tiles follow from the sizes of the caches.
"""

from __future__ import annotations

import statistics
from concurrent.futures import Future

import torch

from .._runtime.launch import Launch, arrays_of
from .._runtime.triton_kernel import Kernel
from .._runtime.triton_tiles import Tile
from ..errors import BuildError
from .call import Call

CANDIDATES = tuple(
    Tile(block, warps, ahead, aligned)
    for block, warps, aligned in ((64, 2, False), (128, 4, False), (128, 2, True), (256, 4, True), (256, 2, True), (512, 4, True))
    for ahead in (False, True)
)
_REPEATS, _WARM = 10, 3


def tune(call: Call) -> None:
    """Choose the tiles of a call's kernels by measuring them, unless an earlier run did: seconds per kernel."""
    device = call.program.device
    for launch in (call.launch, call.usual_backward().launch if call.differentiable else None):
        if device.type == "cuda" and launch is not None and launch.T * launch.numel:
            _tune(launch, device)


def _tune(launch: Launch, device: torch.device) -> None:
    kernel, N = launch.kernel, launch.numel
    aligned = N % 16 == 0
    if kernel.tiles.get(N, device.index, aligned) is not None:
        return
    candidates = [tile for tile in CANDIDATES if aligned or not tile.aligned]
    builds = [kernel.expect_tile(tile, device.index) for tile in candidates]
    times = {tile: time for tile, build in zip(candidates, builds, strict=True) if (time := _milliseconds(launch, tile, build, device))}
    if times:
        kernel.tiles.keep(N, device.index, aligned, min(times, key=times.__getitem__))
        kernel.forget(N)


def _milliseconds(launch: Launch, tile: Tile, build: Future, device: torch.device) -> float | None:
    """The median time of the kernel with a tile; None if that cannot be built."""
    kernel: Kernel = launch.kernel
    try:
        build.result()
    except BuildError:  # too many registers or too much shared memory for this tile; the others remain
        return None
    taken = arrays_of(kernel.plan.arguments, launch.T, launch.step, launch.checkpoints)
    arrays = [torch.zeros(shape, dtype=dtype, device=device) for _, shape, dtype in taken]
    dims = (1, launch.numel) * len(launch.params)
    times = []
    for _ in range(_WARM + _REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        kernel.run_tile(tile, arrays, dims, launch.T, launch.numel)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[_WARM:])
