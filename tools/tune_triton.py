"""Measure tiles and chunks of the Triton kernels on this GPU: what `triton_tiles.tile_for` is made from.

    python tools/tune_triton.py --output tune.json [--cores lif_sigmoid ...] [--jobs 16]

For every core, size, chunk and tile: milliseconds of inference, of the forward with checkpoints, and of the backward.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from gpu import NEURONS, arrays, copy_rate, launch, plans, program, sequence_bytes

from flexsn._codegen import triton as render_triton
from flexsn._plan.plan import checkpoints
from flexsn._runtime.triton import tiles as triton_tiles
from flexsn._runtime.triton.kernel import Kernel
from flexsn._runtime.triton.tiles import Tile

SIZES = {
    "lif_sigmoid": [(32, 3_211_264, "float32"), (1024, 131_072, "float32"), (1024, 16_384, "float32"), (96, 32_768, "float32"),
                    (32, 802_816, "float32"), (8, 8_388_608, "float16"), (64, 1_048_576, "float16"), (4, 16_777_216, "float32"),
                    (4, 16_777_216, "float16")],
    "adaptive_lif": [(4, 8_388_608, "float32"), (32, 1_605_632, "float32"), (1024, 16_384, "float32"), (96, 32_768, "float32")],
    "hodgkin_huxley": [(32, 1_605_632, "float32"), (1024, 16_384, "float32")],
}  # fmt: skip
CANDIDATES = tuple(
    Tile(block, warps, ahead, aligned)
    for block, warps, aligned in ((64, 2, False), (128, 4, False), (128, 2, True), (256, 4, True), (256, 2, True), (512, 4, True))
    for ahead in (False, True)
)
CHUNKS = {"lif_sigmoid": [4, 8, 16], "adaptive_lif": [4, 8], "hodgkin_huxley": [1, 2, 4]}


def build(job) -> tuple[float, dict]:
    """In a worker without a GPU context: fill Triton's cache."""
    from triton.backends.compiler import GPUTarget

    plan, tile = job
    start = time.perf_counter()
    try:
        binary = Kernel(plan, render_triton.render(plan)).build(tile, GPUTarget("cuda", 90, 32))
    except Exception as error:  # a tile that cannot be built: the record says why
        return time.perf_counter() - start, {"error": str(error)[-300:]}
    return time.perf_counter() - start, {"shared": binary.metadata.shared}


def measure(plan, tile: Tile, T: int, N: int, checkpoints: int, memory: dict) -> tuple[float, Any]:
    from triton.testing import do_bench

    triton_tiles.tile_for = lambda *_: tile
    kernel = Kernel(plan, render_triton.render(plan))
    binary = kernel._binary(kernel.expect(N, 0), tile, 0)
    call = launch(kernel, arrays(plan, T, N, checkpoints, memory), T, N)
    return do_bench(call, warmup=3, rep=15, return_mode="median"), binary


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--cores", nargs="*", default=list(SIZES))
    parser.add_argument("--jobs", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    cases = []
    for name in options.cores:
        for dtype in dict.fromkeys(d for _, _, d in SIZES[name]):
            made = program(NEURONS[name], getattr(torch, dtype))
            for chunk in CHUNKS[name]:
                made.chunk = made.inference_chunk = chunk
                for direction, plan in plans(made, getattr(torch, dtype), 1000).items():
                    cases += [(name, dtype, chunk, direction, plan, tile) for tile in CANDIDATES]
    start = time.perf_counter()
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        built = list(pool.map(build, [(c[4], c[5]) for c in cases]))
    print(f"{len(cases)} builds in {time.perf_counter() - start:.0f} s; slowest {max(s for s, _ in built):.1f} s", flush=True)
    rows = []
    rate = copy_rate()
    print(f"device copy {rate / 1e12:.3f} TB/s", flush=True)
    for name in options.cores:
        for T, N, dtype in SIZES[name]:
            memory: dict = {}
            for (core, case_dtype, chunk, direction, plan, tile), (seconds, outcome) in zip(cases, built, strict=True):
                if (core, case_dtype) != (name, dtype) or "error" in outcome:
                    continue
                ms, binary = measure(plan, tile, T, N, checkpoints(T, chunk, chunk), memory)
                moved = (plan.bytes_per_step(plan.reads) + plan.bytes_per_step(plan.writes)) * T * N
                least = sequence_bytes(plan) * T * N
                rows.append({
                    "core": core, "T": T, "N": N, "dtype": dtype, "chunk": chunk, "kernel": direction, **dataclasses.asdict(tile),
                    "ms": ms, "floor_ms": least / rate * 1e3, "moved_ms": moved / rate * 1e3, "registers": binary.n_regs,
                    "spills": binary.n_spills, "build_s": seconds,
                })  # fmt: skip
            print(f"{name} {T}x{N}: {time.perf_counter() - start:.0f} s", flush=True)
    found = {"device": torch.cuda.get_device_name(), "copy_tb_s": rate / 1e12, "torch": torch.__version__, "rows": rows}
    Path(options.output).write_text(json.dumps(found))
    rows.sort(key=lambda r: (r["core"], r["T"], r["N"], r["kernel"], r["ms"]))
    for _, group in itertools.groupby(rows, key=lambda r: (r["core"], r["T"], r["N"], r["kernel"])):
        for r in list(group)[:3]:
            print(
                f"{r['core']} {r['T']}x{r['N']} {r['dtype']} {r['kernel']:9} {r['ms']:.4f} ms, floor {r['floor_ms']:.4f}"
                f" ({r['floor_ms'] / r['ms']:.0%}) K={r['chunk']} block={r['block']} warps={r['warps']} ahead={r['ahead']}"
                f" aligned={r['aligned']} registers={r['registers']} spills={r['spills']} build={r['build_s']:.1f} s"
            )


if __name__ == "__main__":
    main()
