"""Design a neuron of two compartments in its phase plane, then let it read digits pixel by pixel, beside a plain LIF.

    python examples/two_compartments.py

A dendrite takes the input and drives a soma, which spikes and pulls the dendrite back. The phase plane shows what that makes
of the pair before any training: without input a spiral, so that an input rings on for tens of steps; with enough of it a
fixed point beyond threshold, so it spikes. Scikit-learn's digits ask for such a memory: 64 pixels come one by one.
"""

from __future__ import annotations

import torch
from common import fit, learning_curve, minibatches, options, plt, report, share_right, split, updates
from sklearn.datasets import load_digits
from torch import Tensor, nn

import flexsn
from flexsn import plot, surrogate


class TwoCompartments(nn.Module):
    """Dendrite `d` drives soma `s`, which pulls it back; a spike takes 1 off the soma. Both couplings are learned."""

    states = 2

    def __init__(self, channels: int):
        super().__init__()
        self.drive, self.pull = (nn.Parameter(torch.logspace(-2.0, -0.3, channels)) for _ in range(2))

    def forward(self, x: Tensor, d: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d = 0.98 * d - self.pull.abs() * s + x
        s = 0.95 * s + self.drive.abs() * d
        spike = surrogate.atan(s - 1.0)
        return spike, d, s - spike


class LIF(nn.Module):
    """One compartment, with a learned leak."""

    states = 1

    def __init__(self, channels: int):
        super().__init__()
        self.leak = nn.Parameter(torch.linspace(0.0, 4.0, channels))

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        v = torch.sigmoid(self.leak) * v + x
        spike = surrogate.atan(v - 1.0)
        return spike, v - spike


def run(kind: type, args, x: Tensor, y: Tensor, rows: tuple[Tensor, Tensor, Tensor]) -> tuple[dict, float]:
    """Train one kind of neuron; its history and its accuracy in the test."""
    torch.manual_seed(args.seed)
    train, held_out, test = rows
    hidden = 64 if args.quick else 128
    net = nn.Sequential(
        nn.Linear(1, hidden), flexsn.FlexSN(kind(hidden), num_states=kind.states),
        nn.Linear(hidden, hidden), flexsn.FlexSN(kind(hidden), num_states=kind.states), nn.Linear(hidden, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)

    def votes(rows: Tensor) -> Tensor:
        flexsn.reset_net(net)
        return net(x[:, rows])[-16:].mean(0)

    def epoch() -> list[float]:
        batches = (train[i] for i in minibatches(len(train), 64))
        return updates(optimizer, (nn.functional.cross_entropy(votes(b), y[b]) for b in batches))

    history = fit(net, epoch, lambda: share_right(votes(held_out), y[held_out]), args.epochs)
    with torch.no_grad():
        return history, share_right(votes(test), y[test])


def main(argv: list[str] | None = None) -> dict:
    args = options(__file__, __doc__, epochs=60, quick=3, argv=argv)
    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images / 16.0, dtype=torch.float32).T[..., None]  # [64, B, 1]: a pixel per step
    rest, test = split(len(labels), 0.25, args.seed)
    train, held_out = (rest[i] for i in split(len(rest), 0.15, args.seed))
    results = {k.__name__: run(k, args, x, torch.as_tensor(labels), (train, held_out, test)) for k in (TwoCompartments, LIF)}
    with plt.rc_context(plot.STYLE):
        figure, axes = plt.subplots(1, 4, figsize=(17, 4), layout="constrained")
        one = TwoCompartments(1)
        for coupling in one.parameters():
            nn.init.constant_(coupling, 0.1)
        for ax, value, start in ((axes[0], 0.0, (1.0, 0.0)), (axes[1], 0.12, (0.0, 0.0))):
            view = {"x": (-1.5, 3.0), "y": (-1.0, 1.4), "starts": [start], "steps": 60, "names": ("dendrite", "soma")}
            plot.phase_plane(one, ax=ax, inputs=[value], **view).set_title(f"Input {value}: " + ("spikes" if value else "an echo"))
        for ax, (name, (history, accuracy)) in zip(axes[2:], results.items(), strict=True):
            learning_curve(history, ax).set_title(f"{name}: {accuracy:.1%} in the test")
    (history, accuracy), (lif_history, lif_accuracy) = results.values()
    metrics = {"test_accuracy": accuracy, "test_accuracy_lif": lif_accuracy, "loss_lif": lif_history["loss"], "test_images": len(test)}
    return report(args, figure, metrics | history)


if __name__ == "__main__":
    main()
