"""Train a two-layer spiking classifier on scikit-learn's digits, time it fused and eager, draw what it does.

    python examples/digits.py --seed 0 --out demo_output

The neuron is `lif`, one time step in plain PyTorch. `flexsn.FlexSN` runs it over the whole sequence in one kernel,
forward and backward, and learns the time constant of every channel on the way.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy
import torch
from digits_picture import draw
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

import flexsn
from flexsn import surrogate

THRESHOLD = 1.0


def lif(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Leaky integrate-and-fire, hard reset to 0: input `x`, membrane `v`, and one learnable leak `w` per channel."""
    decay = torch.sigmoid(w)
    v = decay * v + (1.0 - decay) * x
    spike = surrogate.atan(v - THRESHOLD)
    return spike, v * (1.0 - spike)


def lif_layer(leak: Tensor, backend: str) -> flexsn.FlexSN:
    return flexsn.FlexSN(lif, num_inputs=1, num_states=1, params=[nn.Parameter(leak)], backend=backend)


def build(hidden: int, backend: str) -> nn.Sequential:
    """Input spikes `[T, B, 64]` -> output spikes `[T, B, 10]`."""
    layers = (nn.Linear(64, hidden), lif_layer(torch.linspace(0.0, 2.5, hidden), backend))
    layers += (nn.Linear(hidden, 10), lif_layer(torch.full((10,), 2.0), backend))
    with torch.no_grad():
        for linear in layers[::2]:
            linear.weight *= 5.0  # inputs are sparse spikes: the usual initial weights would never reach threshold
    return nn.Sequential(*layers)


def encode(images: Tensor, steps: int, generator: torch.Generator) -> Tensor:
    """Rate code `[B, 64] -> [T, B, 64]`: a pixel of brightness p fires every 1/p steps, from a random phase."""
    phase = torch.rand(images.shape, generator=generator)
    charge = images * torch.arange(steps + 1.0).view(-1, 1, 1) + phase
    return charge.floor().diff(dim=0)


def loss_of(net: nn.Module, spikes: Tensor, labels: Tensor) -> Tensor:
    flexsn.reset_net(net)
    rates = net(spikes).mean(0)
    return nn.functional.cross_entropy(10.0 * rates, labels)


@torch.no_grad()
def predict(net: nn.Module, spikes: Tensor) -> Tensor:
    """The class whose output neuron spikes most."""
    flexsn.reset_net(net)
    return net(spikes).mean(0).argmax(1)


def load(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images in [0, 1] and labels: three quarters to train on, one quarter to test on."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images.astype("float32") / 16.0, labels, test_size=0.25, stratify=labels, random_state=seed)
    train, test, train_labels, test_labels = map(torch.from_numpy, parts)
    return train, train_labels, test, test_labels


def train(seed: int, epochs: int, steps: int, hidden: int, backend: str, batch: int = 64, max_updates: int | None = None) -> dict:
    """Train from scratch; returns the net, the loss of every update and the test accuracy after every epoch."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    images, labels, test, test_labels = load(seed)
    test_spikes = encode(test, steps, torch.Generator().manual_seed(seed + 1))
    net = build(hidden, backend)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=2e-2)
    per_epoch = len(images) // batch
    updates = epochs * per_epoch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=updates, pct_start=0.1)
    losses, accuracies, start = [], [], time.perf_counter()
    with tqdm(total=min(updates, max_updates or updates), unit="update") as bar:
        for _ in range(epochs):
            for chosen in torch.randperm(len(images), generator=generator).split(batch)[:per_epoch]:
                kept = torch.rand(len(chosen), 64, generator=generator) > 0.15  # drop pixels: a net this size would overfit
                loss = loss_of(net, encode(images[chosen] * kept, steps, generator), labels[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                bar.update()
                if len(losses) == max_updates:
                    break
            accuracies.append((predict(net, test_spikes) == test_labels).double().mean().item())
            bar.set_postfix(loss=f"{losses[-1]:.3f}", accuracy=f"{accuracies[-1]:.2%}")
            if len(losses) == max_updates:
                break
    seconds = time.perf_counter() - start
    return {"net": net, "losses": losses, "accuracies": accuracies, "seconds": seconds, "test": (test, test_spikes, test_labels)}


def step_times(net: nn.Module, spikes: Tensor, labels: Tensor, fused: str, repeats: int) -> tuple[float, float]:
    """Median seconds of a training step, fused and eager: the same model and batch, taking turns."""
    runs: list[tuple[nn.Module, torch.optim.Optimizer, list[float]]] = []
    for backend in (fused, "torch"):
        model = copy.deepcopy(net)
        for layer in model[1::2]:
            layer.backend = backend
        runs.append((model, torch.optim.AdamW(model.parameters()), []))
    for _ in range(3 + repeats):
        for model, optimizer, seconds in runs:
            start = time.perf_counter()
            optimizer.zero_grad()
            loss_of(model, spikes, labels).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
    fused_s, eager_s = (statistics.median(seconds[3:]) for _, _, seconds in runs)
    return fused_s, eager_s


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--steps", type=int, default=32, help="time steps per image")
    parser.add_argument("--backend", choices=("auto", "cpp", "torch"), default="auto", help="what the training runs on")
    parser.add_argument("--quick", action="store_true", help="two epochs of a small net, to see that it works")
    parser.add_argument("--out", type=Path, default=Path("demo_output"))
    args = parser.parse_args(argv)
    epochs, hidden = (2, 64) if args.quick else (args.epochs, 256)

    start = time.perf_counter()
    done = train(args.seed, epochs, args.steps, hidden, args.backend)
    test, test_spikes, test_labels = done["test"]
    fused = "auto" if args.backend == "torch" else args.backend
    fused_s, eager_s = step_times(done["net"], test_spikes[:, :64], test_labels[:64], fused, repeats=5 if args.quick else 30)
    args.out.mkdir(parents=True, exist_ok=True)
    per_epoch = [statistics.fmean(part) for part in numpy.array_split(done["losses"], epochs)]
    draw(done, args.out / "digits.png", fused_s, eager_s)
    metrics = {
        "test_accuracy": done["accuracies"][-1], "test_accuracy_per_epoch": done["accuracies"], "test_images": len(test),
        "loss_first": done["losses"][0], "loss_last_epoch": per_epoch[-1], "loss_per_epoch": per_epoch,
        "seconds_training": done["seconds"], "seconds_total": time.perf_counter() - start,
        "step_seconds_fused": fused_s, "step_seconds_eager": eager_s, "speed_up": eager_s / fused_s,
        "seed": args.seed, "epochs": epochs, "steps": args.steps, "hidden": hidden, "batch": 64, "backend": args.backend,
        "python": platform.python_version(), "torch": torch.__version__, "flexsn": flexsn.__version__, "numpy": numpy.__version__,
        "cpu": cpu_model(), "threads": torch.get_num_threads(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(f"test accuracy {metrics['test_accuracy']:.2%} on {len(test)} images after {done['seconds']:.1f} s of training")
    print(f"training step: fused {1e3 * fused_s:.2f} ms, eager {1e3 * eager_s:.2f} ms: {eager_s / fused_s:.1f} times as fast")
    print(f"wrote {args.out / 'metrics.json'} and {args.out / 'digits.png'}")
    return metrics


if __name__ == "__main__":
    main()
