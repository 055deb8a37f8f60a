"""docs/scaling.md: what bounds training on many GPUs, computed from recorded single-GPU times: `python benchmarks/scaling_model.py`.

A step of data-parallel training takes its time on one GPU, and what of the reduction of gradients cannot hide behind the
backward. A ring moves 2 (n - 1) / n of the gradient's bytes through every GPU's link. Rates of links are assumptions, stated in
the page; times, bytes and memory are those of the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GPUS = (8, 64, 1000)
PER_HOST = 8
NVLINK, NETWORK = 360e9, 40e9  # bytes per second: of a GPU inside a host (NVLink without multicast), of a GPU's share of the network
LATENCY = 20e-6  # seconds per stage of a tree between hosts
MIB = 2**20
VGG_PARAMS = 9_228_362  # of benchmarks/network.py's VGG-11, checked by tests/docs/test_scaling.py
LINEAR = 16_384


@dataclass(frozen=True)
class Case:
    """A workload as measured on one GPU.

    Attributes:
        ms: of a whole step (forward, loss, backward).
        gradient_bytes: that a step reduces.
        hidden: share of the step behind which the reduction can run: the backward, from the first gradient that is ready.
        last: share of the gradient's bytes that is ready only when the backward is over, and never hides.
    """

    name: str
    ms: float
    gradient_bytes: int
    hidden: float
    last: float


def newest(pattern: str) -> tuple[dict, str]:
    path = max(RESULTS.glob(pattern))
    return json.loads(path.read_text()), path.name


def reduction_ms(nbytes: float, gpus: int) -> float:
    """Ring inside the hosts, and between them with every GPU on its own link: reduce-scatter, all-reduce of an eighth, all-gather."""
    inside = min(gpus, PER_HOST)
    hosts = -(-gpus // PER_HOST)
    seconds = 2 * (inside - 1) / inside * nbytes / NVLINK
    if hosts > 1:
        seconds += 2 * (hosts - 1) / hosts * nbytes / PER_HOST / NETWORK + LATENCY * hosts.bit_length()
    return seconds * 1e3


def efficiency(case: Case, gpus: int) -> tuple[float, float]:
    """Milliseconds of the reduction that nothing hides, and samples per second per GPU against one GPU."""
    whole = reduction_ms(case.gradient_bytes, gpus)
    exposed = max(case.last * whole, whole - case.hidden * case.ms)
    return exposed, case.ms / (case.ms + exposed)


def cases(network: dict, gpu: dict) -> list[Case]:
    rows = {f"spiking VGG-11, T = {T}{label}": network["T"][T][key] for T in ("4", "16")
            for key, label in (("flexsn", ""), ("flexsn_compiled", ", compiled"))}  # fmt: skip
    found = [Case(name, row["ms"], 4 * VGG_PARAMS, 0.5, 0.3) for name, row in rows.items()]  # buckets of 25 MB: the last has 11 of 37
    linear = next(row for row in gpu["workload"]["rows"] if row["dtype"] == "float16")
    nbytes = 2 * (LINEAR * LINEAR + LINEAR)
    ms = linear["ms"]["flexsn"]
    return [
        *found,
        Case("Linear + LIF, one weight", ms, nbytes, 0.0, 1.0),
        Case("Linear + LIF, weight in 8 blocks", ms, nbytes, 0.35, 1 / 8),
    ]


def scaling_table(found: list[Case]) -> list[str]:
    lines = ["| workload | ms on one GPU | gradients, MB | " + " | ".join(f"{n} GPUs: reduction, ms; of one GPU" for n in GPUS) + " |"]
    lines.append("| --- " * (3 + len(GPUS)) + "|")
    for case in found:
        cells = [f"{reduction_ms(case.gradient_bytes, n):.2f}; {efficiency(case, n)[1]:.0%}" for n in GPUS]
        lines.append(f"| {case.name} | {case.ms:.2f} | {case.gradient_bytes / 1e6:.0f} | " + " | ".join(cells) + " |")
    return lines


def memory_table(network: dict) -> list[str]:
    """The batch that fits: memory of a step grows with the batch; what does not (weights, gradients, momentum) is taken off first."""
    total, batch = network["machine"]["memory_gib"] * 1024, network["batch"]
    fixed = 3 * 4 * VGG_PARAMS / MIB
    lines = [
        "| network, T = 16 | peak MiB at batch 128 | MiB per sample | batch that fits | of ReLU's |",
        "| --- | --- | --- | --- | --- |",
    ]
    names = {"relu": "ReLU", "flexsn": "flexsn", "eager_loop": "eager loop", "sj_lifnode_triton": "SpikingJelly LIFNode (triton)",
             "relu_compiled": "ReLU, compiled", "flexsn_compiled": "flexsn, compiled",
             "sj_lifnode_triton_compiled": "SpikingJelly LIFNode (triton), compiled"}  # fmt: skip
    rows = network["T"]["16"]
    fits = {key: (total * 0.92 - fixed) / ((rows[key]["peak_mib"] - fixed) / batch) for key in names}
    for key, name in names.items():
        peak, floor = rows[key]["peak_mib"], fits["relu_compiled" if key.endswith("compiled") else "relu"]
        lines.append(f"| {name} | {peak:.0f} | {(peak - fixed) / batch:.1f} | {fits[key]:.0f} | {fits[key] / floor:.2f}x |")
    return lines


def neuron_table(gpu: dict) -> list[str]:
    """What a layer of neurons adds to the memory of its input and output between forward and backward."""
    memory = gpu["memory"]
    lines = ["| LIF, float32 | memory of a training step but for input, output and gradient, over the input's bytes |", "| --- | --- |"]
    names = {"flexsn": "flexsn", "hand_loop": "eager loop", "sj_lifnode": "SpikingJelly LIFNode", "sj_flexsn": "SpikingJelly FlexSN"}
    for key, name in names.items():
        lines.append(f"| {name} | {memory['peers'][key]['extra_over_input']:.2f} |")
    return lines


def tensor_parallel_table(gpu: dict) -> list[str]:
    """Linear + LIF with the weight in columns over the GPUs of one host: no gradient of the weight moves, outputs do."""
    row = next(r for r in gpu["workload"]["rows"] if r["dtype"] == "float16")
    T, batch, N = row["T"], row["batch"], row["N"]
    lines = ["| split | bytes through each GPU's link per step, MB |", "| --- | --- |"]
    gradient = 2 * (N * N + N)
    n = PER_HOST
    lines.append(f"| data parallel (batch): all-reduce of the gradient | {2 * (n - 1) / n * gradient / 1e6:.0f} |")
    spikes = 2 * T * batch * N
    lines.append(f"| column parallel, spikes gathered for the next layer (all-gather forward, reduce-scatter backward; batch {batch} in all)"
                 f" | {2 * (n - 1) / n * spikes / 1e6:.0f} |")  # fmt: skip
    lines.append(f"| the same, batch {batch * n} in all | {2 * (n - 1) / n * spikes * n / 1e6:.0f} |")
    lines.append("| the neuron itself, sharded in batch, channels or space | 0 |")
    return lines


def measured_table() -> list[str]:
    """Weak scaling as measured, if a result is there."""
    if not list(RESULTS.glob("scaling_2*.json")):
        return [
            "Not measured yet on several GPUs: `python benchmarks/scaling.py --world 1 2 4 8 --output benchmarks/results/scaling_<date>.json`."
        ]
    document, name = newest("scaling_2*.json")
    m = document["machine"]
    lines = [f"From `benchmarks/results/{name}` ({m.get('gpu', 'CPU')}, PyTorch {m['torch']}, Python {m['python']}, NCCL"
             f" {m.get('nccl', '-')}, NVLink multicast off). Gradients agreed with one process before timing. Each row is beside one GPU of"
             " the same day.", ""]  # fmt: skip
    lines += [
        "| workload | GPUs | ms per step | without reduction, ms | samples/s per GPU | of one GPU | all-reduce, GB/s per link | measured |"
    ]
    lines += ["| --- " * 8 + "|"]
    for world, rows in document["world"].items():
        for workload, row in rows.items():
            if "ms" not in row:
                lines.append(f"| {workload} | {world} | fails | | | | | |")
                continue
            bare, rate = row.get("ms_without_reduction"), row.get("bus_bytes_per_s")
            lines.append(
                f"| {workload} | {world} | {row['ms']:.2f} | {'' if bare is None else f'{bare:.2f}'} | {row['samples_per_s_per_process']:.0f} |"
                f" {row.get('of_one', float('nan')):.1%} | {'' if rate is None else f'{rate / 1e9:.0f}'} | {row['date']} |"
            )
    return lines


TEXT = """# Training on 8, 64 and 1,000 GPUs, on paper

Generated by `python benchmarks/scaling_model.py`; do not edit. How to set training up: [docs/distributed.md](distributed.md).

Times, bytes and memory are measured on one {gpu} (`benchmarks/results/{network_name}` and `{gpu_name}`; PyTorch {torch}); the
links are **assumed**: {nvlink:.0f} GB/s per GPU inside a host of {per_host} (NVLink, multicast off), {net:.0f} GB/s per GPU between hosts,
{latency:.0f} us per stage of a tree between hosts. Nothing on this page but the section "Measured" was measured on more than one GPU.

## What bounds a step

Data parallel: per step each GPU sends and receives 2 (n - 1) / n of the gradient's bytes, whatever T and the batch are; the
time of the step grows with both. So a spiking network is *easier* to scale than its non-spiking twin: T multiplies the work
between two reductions and not the bytes. The reduction hides behind half of the step (the backward) where a network has many
layers (but for the last bucket of gradients), behind 35% of it for a weight in blocks, and behind nothing where one weight is
everything, as its gradient is ready when the backward is over.

{scaling}

- **8 GPUs**: the VGG is bound by its own kernels: its reduction takes {vgg8} of a step at T = 4. One big `Linear` is bound by the
  wire: cut the weight into blocks of rows (`benchmarks/scaling.py`, `linear_blocks`), and the gradient of a block travels while
  the next is computed.
- **64 GPUs**: the reduction crosses hosts, at a ninth of the rate. Hierarchical rings (NCCL's own) leave an eighth of the bytes for
  each GPU's network link. Gradients in bf16 (`bf16_compress_hook`) halve them.
- **1,000 GPUs**: bytes per GPU hardly grow ((n - 1) / n), latency does, with the logarithm of the hosts; the slowest GPU sets the pace
  and the global batch becomes the question: 128 per GPU are 128,000. Shard channels inside a host, and the batch over the hosts.

## What to shard first

1. **The batch** (DDP). Nothing of a neuron moves: states, spikes and surrogate gradients stay where they are, and a learnable time
   constant per channel is a few kB of gradient.
2. **Optimizer state and weights** (`fully_shard`) when they, not activations, fill the memory. The bytes grow by half (all-gather
   twice, reduce-scatter once, against the two halves of an all-reduce).
3. **Channels** (column and row parallel `Linear` around the neuron) where one weight is too big or the batch per GPU too small. The
   neuron needs no communication in any step dimension:

{tensor}

   Spikes of T steps weigh T times what a non-spiking layer's activations weigh: tensor parallelism that gathers them pays per step of
   time, data parallelism does not. Keep it inside a host, and pair column with row parallel so that the neuron sits between them.
4. **Time**: never across GPUs: a step needs the one before. A sequence longer than memory goes in pieces (`flexsn.scan` on a list):
   states at the borders are kept, and every piece is run once more.

## Where the memory goes, and the batch that fits

Between forward and backward a layer of neurons keeps its input and a few checkpoints; the loop keeps every step's intermediates.
So what flexsn saves is memory of activations, which is what grows with T and the batch:

{neuron}

The spiking VGG-11 on one GPU of {memory} GiB, 92% of it used, extrapolated linearly from the peak at batch {batch}:

{batchfit}

The batch per GPU that fits bounds how far the reduction can be hidden: exposed communication shrinks in proportion to it.

## Measured

The model above leaves out what DDP itself costs (the column "without reduction" against one GPU: gradients are copied into buckets) and what NCCL's kernels take from a backward that they run beside; measured numbers are lower where these weigh.

{measured}
"""


def page() -> str:
    network, network_name = newest("network_2*.json")
    gpu, gpu_name = newest("gpu_2*.json")
    found = cases(network, gpu)
    vgg8 = f"{reduction_ms(found[0].gradient_bytes, 8) / found[0].ms:.0%}"
    return TEXT.format(
        gpu=network["machine"]["gpu"], torch=network["machine"]["torch"], network_name=network_name, gpu_name=gpu_name,
        nvlink=NVLINK / 1e9, per_host=PER_HOST, net=NETWORK / 1e9, latency=LATENCY * 1e6, vgg8=vgg8,
        scaling="\n".join(scaling_table(found)), tensor="\n".join("   " + line for line in tensor_parallel_table(gpu)),
        neuron="\n".join(neuron_table(gpu)), memory=network["machine"]["memory_gib"], batch=network["batch"],
        batchfit="\n".join(memory_table(network)), measured="\n".join(measured_table()),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if docs/scaling.md is not what this prints")
    options = parser.parse_args()
    target = ROOT / "docs" / "scaling.md"
    if options.check:
        return int(target.read_text() != page())
    target.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
