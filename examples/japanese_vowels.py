"""Who speaks? Two Japanese vowels by nine men, recognised by a spiking network with learned time constants.

    python examples/japanese_vowels.py

The data set (Kudo, Toyama and Shimbo, 1999) ships inside the `aeon` package, from whose folder its two text files are read
(aeon's own loader would import numba and pandas). An utterance is a series of 12 coefficients, 7 to 29 steps long.
"""

from __future__ import annotations

from importlib.resources import files

import torch
from common import fit, learning_curve, minibatches, options, plt, report, share_right, split, updates
from torch import Tensor, nn

import flexsn
from flexsn import plot, surrogate


class LIF(nn.Module):
    """Leaky integrate-and-fire, hard reset to 0; every neuron learns its leak."""

    def __init__(self, channels: int):
        super().__init__()
        self.leak = nn.Parameter(torch.linspace(0.0, 2.5, channels))

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        decay = torch.sigmoid(self.leak)
        v = decay * v + (1.0 - decay) * x
        spike = surrogate.atan(v - 1.0)
        return spike, v * (1.0 - spike)


def load(part: str) -> tuple[Tensor, Tensor, Tensor]:
    """Padded utterances `[T, B, 12]`, which steps are theirs `[T, B, 1]`, and speakers `[B]`."""
    text = (files("aeon") / f"datasets/data/JapaneseVowels/JapaneseVowels_{part}.ts").read_text()
    rows = [line.split(":") for line in text.partition("@data\n")[2].splitlines()]
    series = [torch.tensor([[float(v) for v in channel.split(",")] for channel in row[:-1]]).T for row in rows]
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(s), 1) for s in series])
    return nn.utils.rnn.pad_sequence(series), mask, torch.tensor([int(row[-1]) - 1 for row in rows])


def build(hidden: int) -> nn.Sequential:
    """`[T, B, 12]` -> a vote for every speaker at every step `[T, B, 9]`."""
    net = nn.Sequential(
        nn.Linear(12, hidden), flexsn.FlexSN(LIF(hidden), num_states=1), nn.Dropout(0.2),
        nn.Linear(hidden, hidden), flexsn.FlexSN(LIF(hidden), num_states=1), nn.Dropout(0.2), nn.Linear(hidden, 9),
    )  # fmt: skip
    with torch.no_grad():
        net[0].weight *= 3.0
        net[3].weight *= 5.0  # spikes are sparse: the usual initial weights would never reach threshold
    return net


def votes(net: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    flexsn.reset_net(net)
    return (net(x) * mask).sum(0) / mask.sum(0)


def main(argv: list[str] | None = None) -> dict:
    args = options(__file__, __doc__, epochs=40, quick=6, argv=argv)
    (x, mask, speaker), (test_x, test_mask, test_speaker) = load("TRAIN"), load("TEST")
    spoken = mask.expand_as(x) > 0
    mean, deviation = (s(x[spoken].view(-1, 12), 0) for s in (torch.mean, torch.std))
    x, test_x = (x - mean) / deviation * mask, (test_x - mean) / deviation * test_mask
    train, held_out = split(len(speaker), 0.2, args.seed)
    net = build(hidden=64 if args.quick else 256)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-2)

    def loss_of(chosen: Tensor) -> Tensor:
        noisy = x[:, chosen] + 0.3 * torch.randn(x[:, chosen].shape) * mask[:, chosen]
        return nn.functional.cross_entropy(votes(net, noisy, mask[:, chosen]), speaker[chosen])

    def epoch() -> list[float]:
        return updates(optimizer, map(loss_of, (train[i] for i in minibatches(len(train), 24))))

    def validate() -> float:
        return share_right(votes(net, x[:, held_out], mask[:, held_out]), speaker[held_out])

    history = fit(net, epoch, validate, args.epochs)
    with torch.no_grad(), flexsn.monitor(net, spikes=True) as seen:
        test_accuracy = share_right(votes(net, test_x, test_mask), test_speaker)
    print(seen)
    with plt.rc_context(plot.STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
        steps = int(test_mask[:, 0].sum())
        axes[0].plot(test_x[:steps, 0], lw=1.0)
        axes[0].set(title=f"An utterance of speaker {test_speaker[0] + 1}", xlabel="time step", ylabel="coefficient (normalised)")
        plot.raster(seen["1"].spikes[-1][:steps, 0, ::4], ax=axes[1]).set_title("A quarter of the first layer")
        learning_curve(history, axes[2])
    return report(args, figure, {"test_accuracy": test_accuracy, "test_utterances": len(test_speaker)} | history)


if __name__ == "__main__":
    main()
