"""The digits again, with PyTorch Lightning at the wheel: a `LightningModule` around `flexsn.FlexSN`, and nothing special.

    python examples/lightning_digits.py

States are forgotten before every batch; Lightning's checkpoint holds what the neurons learned, and the best one by validation
accuracy is loaded for the test at the end.
"""

from __future__ import annotations

import logging
import time
import warnings

import lightning
import torch
from common import learning_curve, options, plt, report, share_right, split
from japanese_vowels import LIF
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flexsn
from flexsn import plot

STEPS = 16


class SpikingDigits(lightning.LightningModule):
    """Images `[B, 64]`, shown for `STEPS` steps -> votes `[B, 10]`."""

    def __init__(self, hidden: int):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Linear(64, hidden), flexsn.FlexSN(LIF(hidden), num_states=1),
            nn.Linear(hidden, hidden), flexsn.FlexSN(LIF(hidden), num_states=1), nn.Linear(hidden, 10),
        )  # fmt: skip
        nn.init.uniform_(self.layers[0].weight, -0.4, 0.4)
        nn.init.uniform_(self.layers[2].weight, -0.5, 0.5)
        self.history: dict = {"loss": [], "validation": []}

    def forward(self, images: Tensor) -> Tensor:
        flexsn.reset_net(self)
        return self.layers(images.expand(STEPS, *images.shape)).mean(0)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("validation", share_right(self(batch[0]), batch[1]), prog_bar=True, batch_size=len(batch[1]))

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.log("test", share_right(self(batch[0]), batch[1]), batch_size=len(batch[1]))

    def on_train_epoch_end(self) -> None:
        for name, values in self.history.items():
            values.append(float(self.trainer.callback_metrics[name]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=1e-2)


def main(argv: list[str] | None = None) -> dict:
    args = options(__file__, __doc__, epochs=15, quick=4, argv=argv)
    lightning.seed_everything(args.seed, verbose=False)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data are in memory
    images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    rest, test = split(len(data), 0.25, args.seed)
    train, held_out = (rest[i] for i in split(len(rest), 0.15, args.seed))
    fit, validation, final = (DataLoader([data[i] for i in rows], 32, shuffle=rows is train) for rows in (train, held_out, test))

    model = SpikingDigits(hidden=64 if args.quick else 128)
    best = ModelCheckpoint(args.out, "best", monitor="validation", mode="max", enable_version_counter=False)
    trainer = lightning.Trainer(
        max_epochs=args.epochs, accelerator="cpu", logger=False, callbacks=[best, TQDMProgressBar()], deterministic=True,
        num_sanity_val_steps=0, enable_model_summary=False,
    )  # fmt: skip
    start = time.perf_counter()
    trainer.fit(model, fit, validation)
    reached = model.history["validation"]
    history = model.history | {"best_epoch": 1 + reached.index(max(reached)), "seconds": time.perf_counter() - start}
    with flexsn.monitor(model, spikes=True) as seen:
        test_accuracy = trainer.test(model, final, ckpt_path="best", verbose=False)[0]["test"]
    print(seen)
    with plt.rc_context(plot.STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
        plot.raster(seen["layers.1"].spikes[-1][:, 0], ax=axes[0]).set_title("First layer, a test image")
        learning_curve(history, axes[1])
    return report(args, figure, {"test_accuracy": test_accuracy, "test_images": len(test)} | history)


if __name__ == "__main__":
    main()
