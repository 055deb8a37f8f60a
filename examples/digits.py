"""Train a two-layer spiking classifier on scikit-learn's digits, time it fused and eager, draw what it does.

    python examples/digits.py --seed 0 --out demo_output

The neuron is `lif`, one time step in plain PyTorch. `flexsn.FlexSN` runs it over the whole sequence in one kernel,
forward and backward, and learns the time constant of every channel on the way.
"""

from __future__ import annotations

import time

import torch
from common import options, share_right
from digits_report import report
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

import flexsn
from flexsn import surrogate


def lif(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Leaky integrate-and-fire, hard reset to 0: input `x`, membrane `v`, and one learnable leak `w` per channel."""
    decay = torch.sigmoid(w)
    v = decay * v + (1.0 - decay) * x
    spike = surrogate.atan(v - 1.0)
    return spike, v * (1.0 - spike)


def build(hidden: int, backend: str) -> nn.Sequential:
    """Input spikes `[T, B, 64]` -> output spikes `[T, B, 10]`."""
    leaks = (torch.linspace(0.0, 2.5, hidden), torch.full((10,), 2.0))
    first, second = (flexsn.FlexSN(lif, num_states=1, params=[nn.Parameter(leak)], backend=backend) for leak in leaks)
    net = nn.Sequential(nn.Linear(64, hidden), first, nn.Linear(hidden, 10), second)
    with torch.no_grad():
        net[0].weight *= 5.0
        net[2].weight *= 5.0  # inputs are sparse spikes: the usual initial weights would never reach threshold
    return net


def encode(images: Tensor, steps: int, generator: torch.Generator) -> Tensor:
    """Rate code `[B, 64] -> [T, B, 64]`: a pixel of brightness p fires every 1/p steps, from a random phase."""
    phase = torch.rand(images.shape, generator=generator)
    return (images * torch.arange(steps + 1.0).view(-1, 1, 1) + phase).floor().diff(dim=0)


def loss_of(net: nn.Module, spikes: Tensor, labels: Tensor) -> Tensor:
    flexsn.reset_net(net)
    return nn.functional.cross_entropy(10.0 * net(spikes).mean(0), labels)


@torch.no_grad()
def accuracy(net: nn.Module, spikes: Tensor, labels: Tensor) -> float:
    """How often the right output neuron spikes most."""
    flexsn.reset_net(net)
    return share_right(net(spikes).mean(0), labels)


def load(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images in [0, 1] and labels: three quarters to train on, one quarter to test on."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images.astype("float32") / 16.0, labels, test_size=0.25, stratify=labels, random_state=seed)
    return tuple(torch.from_numpy(parts[k]) for k in (0, 2, 1, 3))


def train(seed: int, epochs: int, steps: int, hidden: int, backend: str = "auto", max_updates: int | None = None) -> dict:
    """Train from scratch; returns the net, the loss of every update and the test accuracy after every epoch."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    images, labels, test, test_labels = load(seed)
    test_spikes = encode(test, steps, torch.Generator().manual_seed(seed + 1))
    net = build(hidden, backend)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=2e-2)
    batch, per_epoch = 64, len(images) // 64
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=epochs * per_epoch, pct_start=0.1)
    losses, accuracies, start = [], [], time.perf_counter()
    with tqdm(total=max_updates or epochs * per_epoch, unit="update") as bar:
        while len(losses) < bar.total:
            for chosen in torch.randperm(len(images), generator=generator).split(batch)[: min(per_epoch, bar.total - len(losses))]:
                kept = torch.rand(len(chosen), 64, generator=generator) > 0.15  # drop pixels: a net this size would overfit
                loss = loss_of(net, encode(images[chosen] * kept, steps, generator), labels[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                bar.update()
            accuracies.append(accuracy(net, test_spikes, test_labels))
            bar.set_postfix(loss=f"{losses[-1]:.3f}", accuracy=f"{accuracies[-1]:.2%}")
    told = {"losses": losses, "accuracies": accuracies, "seconds": time.perf_counter() - start, "steps": steps}
    return told | {"net": net, "hidden": hidden, "batch": batch, "test": (test, test_spikes, test_labels)}


if __name__ == "__main__":
    args = options(__file__, __doc__, 50, 2)
    report(args, train(args.seed, args.epochs, steps=32, hidden=64 if args.quick else 256), loss_of)
