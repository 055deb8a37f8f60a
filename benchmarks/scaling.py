"""Weak scaling of training under DistributedDataParallel: a spiking VGG-11 and Linear + LIF, the same batch per GPU on 1, 2, 4, 8.

    python benchmarks/scaling.py --world 1 2 4 8 --output benchmarks/results/scaling_<date>.json [--only NAME ...]
    python benchmarks/scaling.py --world 1 2 --device cpu --quick --output /tmp/scaling.json

A step is forward, loss, backward (with the reduction of gradients) and SGD, in bf16; one process per GPU, NCCL (Gloo on the
CPU), NVLink multicast off. Before anything is timed, the reduced gradients are compared with those that one process computes
from the shards of all ranks. Kept rows are not measured again: several calls may fill one file. `--world 1` comes first: it
is the measure of the others.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}  # before torch: NVLink multicast stays off

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))

import cores
from network import BATCH, flexsn_lif, vgg11

import flexsn

BF16 = torch.bfloat16
TOLERANCE = {"float64": 1e-9, "bf16": 2e-2}  # of the norm; a reduction that is missing is wrong by about 1
TIMEOUT = datetime.timedelta(seconds=120)  # of a collective whose other ranks have failed


# --- what is trained ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Workload:
    """One model and its batch per process.

    Attributes:
        model: makes it, with the same weights in every process, for a full or a small run.
        shape: of the batch `[T, B, ...]`, for a full or a small run.
        autocast: parameters are float32 and autocast computes in bf16; else they are bf16 themselves.
        compiled: under `torch.compile`.
    """

    model: Callable[[bool], nn.Module]
    shape: Callable[[bool], tuple[int, ...]]
    autocast: bool
    compiled: bool = False


class Blocks(nn.Module):
    """A linear layer whose weight lies in blocks of rows: the gradient of one is reduced while that of the next is computed."""

    def __init__(self, width: int, blocks: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width // blocks) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([block(x) for block in self.blocks], -1)


def linear_lif(width: int, blocks: int = 1) -> nn.Module:
    layer = nn.Linear(width, width) if blocks == 1 else Blocks(width, blocks)
    return nn.Sequential(layer, flexsn.FlexSN(cores.lif_sigmoid, num_states=1, strict=True))


def vgg(quick: bool) -> nn.Module:
    return vgg11(flexsn_lif)


def vgg_workload(T: int, compiled: bool) -> Workload:
    return Workload(vgg, lambda quick: (2, 2, 3, 32, 32) if quick else (T, BATCH, 3, 32, 32), True, compiled)


def linear_workload(blocks: int) -> Workload:
    return Workload(
        lambda quick: linear_lif(64 if quick else 16_384, blocks), lambda quick: (5, 2, 64) if quick else (500, 16, 16_384), False
    )


WORKLOADS = {
    "vgg_t4": vgg_workload(4, False), "vgg_t16": vgg_workload(16, False), "vgg_t16_compiled": vgg_workload(16, True),
    "linear": linear_workload(1), "linear_blocks": linear_workload(8),
}  # fmt: skip


def make(workload: Workload, device: torch.device, quick: bool, dtype: torch.dtype | None = None) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return workload.model(quick).to(dtype or (torch.float32 if workload.autocast else BF16))


def shard(shape: tuple[int, ...], rank: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The part of the batch that `rank` trains on."""
    generator = torch.Generator(device).manual_seed(1000 + rank)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


def loss_of(call: Callable, net: nn.Module, x: Tensor, autocast: bool) -> Tensor:
    flexsn.reset_net(net)
    with torch.autocast(x.device.type, dtype=BF16, enabled=autocast):
        return (call(x).to(torch.promote_types(x.dtype, torch.float32)) - 0.5).square().mean()


def parallel(net: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Running statistics are not broadcast: training reads none, and those of rank 0, which are saved, are its own either way."""
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(net, device_ids=ids, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False)


# --- right before fast ----------------------------------------------------------------------------------------------------------
def gradient_error(workload: Workload, device: torch.device, quick: bool, exact: bool) -> float:
    """Of the reduced gradients, against one process that takes the shards one by one: the norm of the difference, relative.

    Batch norm takes its statistics per shard in both. `exact`: in float64 at a small size, else as it is timed.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    dtype = torch.float64 if exact else torch.float32 if workload.autocast else BF16
    small, shape = quick or exact, workload.shape(quick or exact)
    autocast = workload.autocast and not exact
    net = make(workload, device, small, dtype)
    alone = copy.deepcopy(net)
    call = parallel(net, device)
    loss_of(call, net, shard(shape, rank, device, dtype), autocast).backward()
    sums = [torch.zeros_like(p, dtype=torch.float64 if exact else torch.float32) for p in alone.parameters()]
    for other in range(world):
        loss_of(alone, alone, shard(shape, other, device, dtype), autocast).backward()
        for total, p in zip(sums, alone.parameters(), strict=True):
            total += p.grad
        alone.zero_grad()
    wrong = sum((p.grad - total / world).double().square().sum() for p, total in zip(net.parameters(), sums, strict=True))
    error = (wrong / sum((total / world).double().square().sum() for total in sums)).sqrt()
    dist.all_reduce(error, dist.ReduceOp.MAX)
    return error.item()


def check(name: str, device: torch.device, quick: bool) -> dict[str, float]:
    found = {kind: gradient_error(WORKLOADS[name], device, quick, kind == "float64") for kind in TOLERANCE}
    for kind, error in found.items():
        if not error <= TOLERANCE[kind]:
            raise AssertionError(f"{name}: gradients of {dist.get_world_size()} processes differ from one's by {error:.1e} ({kind})")
    return found


# --- time -----------------------------------------------------------------------------------------------------------------------
def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def slowest_ms(step: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median milliseconds of a step in batches of steps, each batch as slow as its slowest process."""
    for _ in range(3):
        step()
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    once = agreed(time.perf_counter() - start, device)
    batch = max(1, min(100, int(0.1 / once)))
    samples = []
    for _ in range(max(3, min(200, int(seconds / (batch * once))))):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(batch):
            step()
        synchronize(device)
        samples.append(agreed((time.perf_counter() - start) / batch * 1e3, device))
    return statistics.median(samples)


def agreed(number: float, device: torch.device) -> float:
    """The largest of all processes' numbers, so that all do the same."""
    tensor = torch.tensor(number, device=device, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def measure(name: str, device: torch.device, quick: bool) -> dict:
    workload, world = WORKLOADS[name], dist.get_world_size()
    shape, seconds = workload.shape(quick), 0.2 if quick else 4.0
    net = make(workload, device, quick)
    parameters = [p for p in net.parameters() if p.requires_grad]
    x = shard(shape, dist.get_rank(), device, torch.float32 if workload.autocast else BF16)
    optimizer = torch.optim.SGD(parameters, lr=1e-4, fused=True)
    call = torch.compile(net) if workload.compiled else net  # first: around the wrapper Dynamo would give up
    call = parallel(call, device) if world > 1 else call

    def step(synced: bool = True) -> None:
        with nullcontext() if synced or world == 1 else call.no_sync():
            loss_of(call, net, x, workload.autocast).backward()
        optimizer.step()
        optimizer.zero_grad()  # to None: a kept gradient would be zeroed, added to and divided, a fresh one is copied into its bucket

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row = {"ms": slowest_ms(step, device, seconds), "batch": shape[1], "T": shape[0]}
    row["samples_per_s_per_process"] = shape[1] / row["ms"] * 1e3
    row["gradient_bytes"] = sum(p.numel() * p.element_size() for p in parameters)
    if world > 1:
        row["ms_without_reduction"] = slowest_ms(lambda: step(False), device, seconds / 2)
        flat = torch.zeros(row["gradient_bytes"] // 2, dtype=BF16, device=device)
        row["allreduce_ms"] = slowest_ms(lambda: dist.all_reduce(flat), device, seconds / 4)
        row["bus_bytes_per_s"] = 2 * (world - 1) / world * row["gradient_bytes"] / row["allreduce_ms"] * 1e3
    if device.type == "cuda":
        row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return row


# --- processes --------------------------------------------------------------------------------------------------------------------
def work(rank: int, world: int, folder: str, kind: str, quick: bool, names: list[str]) -> None:
    """One process: checks and measures the named workloads; rank 0 writes a file per row."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = False
    else:
        torch.set_num_threads(1)
    extra = {"device_id": device} if kind == "cuda" else {}
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world,
                            timeout=TIMEOUT, **extra)  # fmt: skip
    try:
        for name in names:
            start = time.perf_counter()
            row = {"gradient_error": check(name, device, quick)} | measure(name, device, quick)
            row |= {"took_s": time.perf_counter() - start, "date": datetime.date.today().isoformat()}
            if rank == 0:
                Path(folder, f"{name}.json").write_text(json.dumps(row))
                print(world, name, row, flush=True)
            torch._dynamo.reset()
            if kind == "cuda":
                torch.cuda.empty_cache()
    finally:
        dist.destroy_process_group()


def machine(kind: str) -> dict:
    found: dict = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__, "flexsn": flexsn.__version__}
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpus": torch.cuda.device_count(), "memory_gib": round(properties.total_memory / 2**30)}
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())), "nvlink_multicast": False}
    return found


def rows_of(world: int, kind: str, quick: bool, names: list[str]) -> dict[str, dict]:
    """What `world` processes measure; also what they had measured when one of them failed."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            processes.spawn(work, (world, folder, kind, quick, names), nprocs=world)
            failure = None
        except Exception as error:  # of any of them, in any way: the file says how
            failure = {"failed": str(error)[-1500:]}
        found = {name: json.loads(path.read_text()) for name in names if (path := Path(folder, f"{name}.json")).exists()}
    missing = [name for name in names if name not in found]
    if failure:
        print(world, missing[:1], failure["failed"], flush=True)
        found |= {name: failure for name in missing[:1]}
    return found


def add_efficiency(document: dict) -> None:
    for rows in document["world"].values():
        for name, row in rows.items():
            alone = document["world"].get("1", {}).get(name, {})
            if "ms" in row and "ms" in alone and row["date"] == alone["date"]:
                row["of_one"] = row["samples_per_s_per_process"] / alone["samples_per_s_per_process"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--world", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--only", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that it runs")
    parser.add_argument("--again", action="store_true", help="measure rows again that the file has")
    options = parser.parse_args()
    target: Path = options.output
    document: dict = json.loads(target.read_text()) if target.exists() else {"world": {}}
    document |= {"machine": machine(options.device), "quick": options.quick}
    document["command"] = "python benchmarks/scaling.py " + " ".join(sys.argv[1:])
    for world in sorted(options.world):
        rows: dict = document["world"].setdefault(str(world), {})
        names = [n for n in options.only if options.again or "ms" not in rows.get(n, {})]
        if names:
            rows |= rows_of(world, options.device, options.quick, names)
        add_efficiency(document)
        target.write_text(json.dumps(document, indent=1))
    failed = [f"{name} on {world}" for world, rows in document["world"].items() for name, row in rows.items() if "failed" in row]
    print("failed: " + ", ".join(failed) if failed else "all measured")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
