"""Train a spiking classifier on one process or many, save as it goes, go on where a killed run stopped.

    python examples/train_distributed.py --out run
    torchrun --standalone --nproc-per-node 4 examples/train_distributed.py --out run

The task: which of eight rate patterns drives 64 noisy input neurons. Batches are a function of seed and step alone, so a run
that was killed and started again follows the same loss curve, to the bit with as many processes as before.
`run/losses.jsonl` has the loss of every step, `run/step_<n>` the checkpoints. If a process fails, torchrun ends the others and
names it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import flexsn
from flexsn import surrogate

STEPS_IN_TIME, PIXELS, CLASSES = 24, 64, 8


class PLIF(nn.Module):
    """Leaky integrate-and-fire with a learnable time constant per channel (Fang et al., ICCV 2021)."""

    def __init__(self, channels: int):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = v + (x - v) * self.w.sigmoid()
        s = surrogate.atan(h - 1.0)
        return s, h * (1.0 - s)


def network(hidden: int) -> nn.Sequential:
    def neuron(channels: int) -> flexsn.FlexSN:
        return flexsn.FlexSN(PLIF(channels), num_states=1)

    net = nn.Sequential(nn.Linear(PIXELS, hidden), neuron(hidden), nn.Linear(hidden, hidden), neuron(hidden), nn.Linear(hidden, CLASSES))
    with torch.no_grad():
        for linear in net[:4:2]:
            linear.weight *= 4.0  # inputs are sparse spikes
    return net


def batch_of(seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
    """Spikes `[T, size, 64]` and labels `[size]` of one step, the same in every process."""
    patterns = torch.rand(CLASSES, PIXELS, generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step + 1)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    rates = 0.3 * patterns[labels] + 0.2 * torch.rand(size, PIXELS, generator=generator)
    return (torch.rand(STEPS_IN_TIME, size, PIXELS, generator=generator) < rates).float(), labels


def join(timeout: int) -> torch.device:
    """Meet the other processes, if torchrun started some; the device of this one."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout), **alone)
    return device


def save(folder: Path, step: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every process writes its part; only then the checkpoint gets its name, and the one before goes."""
    model, state = get_state_dict(net, optimizer)
    unfinished = folder / "unfinished"
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=unfinished)
    dist.barrier()
    if dist.get_rank() == 0:
        older = list(folder.glob("step_*"))
        unfinished.rename(folder / f"step_{step:08d}")
        for path in older:
            shutil.rmtree(path)
    dist.barrier()


def resume(folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint into the model and optimizer; the number of steps that it has behind it."""
    found = sorted(folder.glob("step_*"))
    if not found:
        return 0
    model, state = get_state_dict(net, optimizer)
    dcp.load({"model": model, "optimizer": state}, checkpoint_id=found[-1])
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)
    return int(found[-1].name.removeprefix("step_"))


def train(options: argparse.Namespace, device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    bare = network(options.hidden).to(device)
    net = DistributedDataParallel(bare) if world > 1 else bare
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    options.out.mkdir(parents=True, exist_ok=True)
    first = resume(options.out, net, optimizer)
    log = options.out / "losses.jsonl"
    if rank == 0:  # forget what came after the checkpoint
        shutil.rmtree(options.out / "unfinished", ignore_errors=True)
        log.write_text("".join(line for line in (log.open() if log.exists() else ()) if json.loads(line)["step"] < first))
    dist.barrier()
    with log.open("a") as losses, tqdm(total=options.steps, initial=first, disable=rank > 0, unit="step") as bar:
        for step in range(first, options.steps):
            if options.fail == [rank, step]:
                raise RuntimeError(f"rank {rank} was told to fail at step {step}")
            spikes, labels = (t.to(device) for t in batch_of(options.seed, step, options.batch))
            flexsn.reset_net(bare)
            rates = net(spikes.chunk(world, 1)[rank]).mean(0)
            loss = nn.functional.cross_entropy(rates, labels.chunk(world)[rank])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                losses.write(json.dumps({"step": step, "loss": mean.item()}) + "\n")
                losses.flush()
                bar.update()
                bar.set_postfix(loss=f"{mean.item():.3f}")
            if (step + 1) % options.every == 0 or step + 1 == options.steps:
                save(options.out, step + 1, net, optimizer)


@record  # torchrun shows the traceback of the process that failed first
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("run"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=50, help="steps from checkpoint to checkpoint")
    parser.add_argument("--batch", type=int, default=64, help="of all processes together, which must divide it")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=int, default=120, help="seconds after which a process gives up on the others")
    parser.add_argument("--fail", type=int, nargs=2, metavar=("RANK", "STEP"), help="raise there, to see how a job ends")
    options = parser.parse_args()
    device = join(options.timeout)
    if options.batch % dist.get_world_size():
        raise SystemExit(f"--batch {options.batch} does not divide among {dist.get_world_size()} processes")
    train(options, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
