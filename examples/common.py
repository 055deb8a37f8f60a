"""What the examples share: options, the loop over epochs, and what a run leaves behind."""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn
from tqdm import tqdm

import flexsn

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def options(file: str, doc: str, epochs: int, quick: int, argv: list[str] | None = None, **paths: str) -> argparse.Namespace:
    """The command line of an example, where `paths` are further options with their help; seeds PyTorch."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, help=f"{epochs} by default")
    parser.add_argument("--quick", action="store_true", help=f"{quick} epochs at a small scale, to see that it works")
    parser.add_argument("--out", type=Path, default=Path("demo_output") / Path(file).stem)
    for name, help in paths.items():
        parser.add_argument(f"--{name}", type=Path, help=help)
    args = parser.parse_args(argv)
    args.epochs = args.epochs or (quick if args.quick else epochs)
    args.name = Path(file).stem
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    return args


def minibatches(count: int, size: int) -> Iterator[Tensor]:
    """Indices of one epoch in random order; what is left over at the end is dropped."""
    return (chosen for chosen in torch.randperm(count).split(size) if len(chosen) == size or count < size)


def split(count: int, part: float, seed: int) -> tuple[Tensor, Tensor]:
    """Two disjoint random sets of indices; the second has the fraction `part`."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[int(part * count) :], order[: int(part * count)]


def updates(optimizer: torch.optim.Optimizer, losses: Iterable[Tensor]) -> list[float]:
    """One update per loss, and their values; the next loss is computed after the update."""
    values = []
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def share_right(votes: Tensor, labels: Tensor) -> float:
    """Accuracy of votes `[B, classes]`."""
    return (votes.argmax(1) == labels).double().mean().item()


def fit(net: nn.Module, train_epoch: Callable[[], list[float]], validate: Callable[[], float], epochs: int) -> dict:
    """Train epoch by epoch and go back to the weights that did best in validation.

    Returns:
        `loss` and `validation`, one number per epoch, the `best_epoch` (from 1), and the `seconds` that it took.
    """
    history: dict = {"loss": [], "validation": [], "best_epoch": 0}
    best, start = {}, time.perf_counter()
    for _ in (bar := tqdm(range(epochs), unit="epoch")):
        net.train()
        losses = train_epoch()
        history["loss"].append(sum(losses) / len(losses))
        net.eval()
        with torch.no_grad():
            history["validation"].append(validate())
        if history["validation"][-1] > max(history["validation"][:-1], default=-1.0):
            history["best_epoch"], best = len(history["loss"]), copy.deepcopy(net.state_dict())
        bar.set_postfix(loss=f"{history['loss'][-1]:.3f}", validation=f"{history['validation'][-1]:.1%}")
    net.load_state_dict(best)
    return history | {"seconds": time.perf_counter() - start}


def learning_curve(history: dict, ax: plt.Axes) -> plt.Axes:
    """Loss (grey) and validation accuracy by epoch; the weights that were kept as a dot."""
    epochs, best = range(1, len(history["loss"]) + 1), history["best_epoch"]
    ax.plot(epochs, history["validation"], color=flexsn.plot.BLUE, lw=1.6)
    ax.plot(best, history["validation"][best - 1], "o", color=flexsn.plot.ORANGE)
    ax.set(title=f"Kept: epoch {best}, {max(history['validation']):.1%}", xlabel="epoch", ylabel="validation accuracy", ylim=(0, 1.02))
    ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator("auto", integer=True))
    losses = ax.twinx()
    losses.plot(epochs, history["loss"], color=flexsn.plot.GREY, lw=1.2)
    losses.set_ylabel("training loss", color=flexsn.plot.GREY)
    losses.spines["right"].set_visible(True)
    return ax


def report(args: argparse.Namespace, figure: plt.Figure, metrics: dict) -> dict:
    """Write the figure, and the metrics with what they were reached with, to `metrics.json`."""
    figure.savefig(args.out / f"{args.name}.png", dpi=100, facecolor="white")
    plt.close(figure)
    metrics |= {
        "seed": args.seed, "epochs": args.epochs, "quick": args.quick, "python": platform.python_version(), "torch": torch.__version__,
        "flexsn": flexsn.__version__, "threads": torch.get_num_threads(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(f"test accuracy {metrics['test_accuracy']:.1%} after {metrics['seconds']:.0f} s of training; see {args.out}")
    return metrics
