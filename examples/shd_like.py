"""Spoken digits as spikes: a recurrent layer of adaptive neurons, on data in the format of the Spiking Heidelberg Digits.

    python examples/shd_like.py                          # makes its own data set
    python examples/shd_like.py --data shd_train.h5      # the real one; shd_test.h5 lies beside it. Needs h5py

700 units, 20 classes, 100 steps of 14 ms; `shd_files.py` says what is made. Half of the classes are the others backwards, so that
the order of spikes decides. Of the made test samples at least 80 % are recognised (chance 5 %), within a minute on two CPU cores.
"""

from __future__ import annotations

import torch
from common import fit, learning_curve, minibatches, options, plt, report, share_right, split, updates
from shd_files import CLASSES, STEPS, UNITS, binned, make, read
from torch import Tensor, nn

import flexsn
from flexsn import plot


def build(hidden: int) -> nn.Sequential:
    """`[T, B, 700]` -> the membranes of 20 readout neurons `[T, B, 20]`, which never spike."""
    mixing = nn.Linear(hidden, hidden, bias=False)  # of a layer's spikes, which come back to it a step later
    net = nn.Sequential(
        nn.Linear(UNITS, hidden), flexsn.Recurrent(flexsn.ALIF(tau=20.0, r=20.0, tau_adapt=50.0), mixing),
        nn.Linear(hidden, CLASSES), flexsn.LeakyIntegrator(tau=20.0),
    )  # fmt: skip
    with torch.no_grad():
        net[0].weight *= 2.0
        mixing.weight *= 0.3  # and little of it: over 100 steps what comes back multiplies
    return net


def votes(net: nn.Module, spikes: Tensor) -> Tensor:
    """`[B, 20]`: how high each membrane got."""
    flexsn.reset_net(net)
    return net(spikes.float()).amax(0)


def load(args) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What to train on and what to test on."""
    if args.data is None:
        count = 400 if args.quick else 1600
        return binned(make(count, 2 * args.seed)), binned(make(count // 4, 2 * args.seed + 1))
    if "train" not in args.data.name:
        raise SystemExit(f"--data takes shd_train.h5, beside which shd_test.h5 lies, and not {args.data.name}")
    return binned(read(args.data)), binned(read(args.data.with_name(args.data.name.replace("train", "test"))))


def main(argv: list[str] | None = None) -> dict:
    args = options(__file__, __doc__, epochs=15, quick=6, argv=argv, data="shd_train.h5, with shd_test.h5 beside it")
    (x, y), (test_x, test_y) = load(args)
    train, held_out = split(len(y), 0.15, args.seed)
    net = build(hidden=64 if args.quick else 256)
    recurrent = list(net[1].parameters())
    others = [p for k in (0, 2) for p in net[k].parameters()]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": recurrent, "lr": 3e-4}], lr=3e-3, weight_decay=1e-2)

    def clip(*_) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)

    optimizer.register_step_pre_hook(clip)

    def epoch() -> list[float]:
        batches = (train[i] for i in minibatches(len(train), 64))
        return updates(optimizer, (nn.functional.cross_entropy(votes(net, x[:, b]), y[b]) for b in batches))

    history = fit(net, epoch, lambda: share_right(votes(net, x[:, held_out]), y[held_out]), args.epochs)
    with torch.no_grad(), flexsn.monitor(net, spikes=True) as seen:
        test_accuracy = share_right(votes(net, test_x), test_y)
    print(seen)
    with plt.rc_context(plot.STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(14, 3.8), layout="constrained")
        plot.raster(test_x[:, 0, ::4].float(), ax=axes[0]).set(title=f"A sample of class {test_y[0]}, every fourth unit")
        plot.raster(seen["1"].spikes[-1][:, 0], ax=axes[1]).set_title("The recurrent layer")
        learning_curve(history, axes[2])
    return report(args, figure, {"test_accuracy": test_accuracy, "test_samples": len(test_y), "steps": STEPS} | history)


if __name__ == "__main__":
    main()
