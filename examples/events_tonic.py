"""An event camera looks at digits: files in N-MNIST's format, read by tonic, classified by a small spiking CNN.

    python examples/events_tonic.py                 # makes its own data set: scikit-learn's digits before a moving sensor
    python examples/events_tonic.py --data DIR      # the real one, where `DIR/NMNIST/Train` and `Test` have been unpacked

The loading is tonic's own either way: `tonic.datasets.NMNIST`, `Downsample`, `ToFrame`. How the files are made: `event_files.py`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import tonic
import torch
from common import fit, learning_curve, minibatches, options, plt, report, share_right, split, updates
from event_files import make
from torch import Tensor, nn

import flexsn
from flexsn import plot, surrogate

FRAMES = 12


class NMNIST(tonic.datasets.NMNIST):
    """tonic's, but it takes the folder as it is: any number of files, and nothing is downloaded."""

    def _check_exists(self) -> bool:
        return True


def lif(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    v = v + (x - v) / 2.0
    spike = surrogate.atan(v - 1.0)
    return spike, v * (1.0 - spike)


def load(folder: Path, train: bool) -> tuple[Tensor, Tensor]:
    """Counts of events `[T, B, 2, 17, 17]`, and labels."""
    steps = [tonic.transforms.Downsample(spatial_factor=0.5), tonic.transforms.ToFrame((17, 17, 2), n_time_bins=FRAMES)]
    events = NMNIST(str(folder), train=train, transform=tonic.transforms.Compose(steps))
    frames, labels = zip(*events, strict=True)
    return torch.as_tensor(np.stack(frames, axis=1), dtype=torch.float32), torch.tensor(labels)


class Net(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, channels, 5, stride=2), nn.Conv2d(channels, 2 * channels, 3, stride=2)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(2 * channels)
        self.lif1, self.lif2 = (flexsn.FlexSN(lif, num_states=1) for _ in range(2))
        self.vote = nn.Linear(2 * channels * 9, 10)

    def forward(self, x: Tensor) -> Tensor:
        """`[T, B, 2, 17, 17]` -> votes `[B, 10]`; convolutions take time and batch as one."""
        flexsn.reset_net(self)
        x = self.lif1(self.norm1(self.conv1(x.flatten(0, 1))).unflatten(0, x.shape[:2]))
        x = self.lif2(self.norm2(self.conv2(x.flatten(0, 1))).unflatten(0, x.shape[:2]))
        return self.vote(x.flatten(2)).mean(0)


def main(argv: list[str] | None = None) -> dict:
    args = options(__file__, __doc__, epochs=12, quick=4, argv=argv, data="folder that holds NMNIST/Train and NMNIST/Test")
    with tempfile.TemporaryDirectory() as made:
        if args.data is None:
            make(Path(made), count=400 if args.quick else 1797, seed=args.seed)
        (x, y), (test_x, test_y) = (load(args.data or Path(made), train) for train in (True, False))
    train, held_out = split(len(y), 0.15, args.seed)
    net = Net(channels=8 if args.quick else 16)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3, weight_decay=1e-2)

    def epoch() -> list[float]:
        batches = (train[i] for i in minibatches(len(train), 32))
        return updates(optimizer, (nn.functional.cross_entropy(net(x[:, b]), y[b]) for b in batches))

    history = fit(net, epoch, lambda: share_right(net(x[:, held_out]), y[held_out]), args.epochs)
    with torch.no_grad(), flexsn.monitor(net, spikes=True) as seen:
        test_accuracy = share_right(net(test_x), test_y)
    print(seen)
    with plt.rc_context(plot.STYLE):
        figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), layout="constrained")
        plot.heat_map(test_x[:, 0, 1], ax=axes[0]).set_title(f"Brighter: where a {test_y[0]} sent events")
        plot.raster(seen["lif1"].spikes[-1][:, 0].flatten(1)[:, ::8], ax=axes[1]).set_title("First layer, every eighth")
        plot.rate_histogram(seen["lif2"].spikes[-1], ax=axes[2], bins=12).set_title("Second layer, all recordings")
        learning_curve(history, axes[3])
    return report(args, figure, {"test_accuracy": test_accuracy, "test_recordings": len(test_y)} | history)


if __name__ == "__main__":
    main()
