"""The picture of `digits.py`: one test image on its way through the trained net, and how the net was trained."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy
import torch

import flexsn

INK, PALE, BLUE, ORANGE = "#22262b", "#b9bfc7", "#1f5f99", "#d9571c"
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 9.5, "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.titlepad": 9, "axes.labelcolor": INK, "axes.edgecolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8, "xtick.major.width": 0.8, "ytick.major.width": 0.8,
}  # fmt: skip


def raster(ax, spikes: numpy.ndarray, color, height: float, width: float = 1.2) -> None:
    """`[T, n]` spikes as bars, one row per neuron."""
    for row in range(spikes.shape[1]):
        ax.vlines(numpy.flatnonzero(spikes[:, row]), row - height / 2, row + height / 2, color=color(row), lw=width)
    ax.set(xlim=(-1, len(spikes)), ylim=(-0.7, spikes.shape[1] - 0.3), xlabel="time step")


def draw(done: dict, fused_s: float, eager_s: float) -> plt.Figure:
    net, (images, spikes, labels) = done["net"], done["test"]
    fc1, hidden_layer, fc2, output_layer = net
    flexsn.reset_net(net)
    hidden_layer.store_state_seqs = True
    with torch.no_grad():
        hidden = hidden_layer(fc1(spikes))
        output = output_layer(fc2(hidden))
        tau = [-1.0 / torch.sigmoid(w).log() for w in (torch.linspace(0.0, 2.5, hidden.shape[-1]), hidden_layer.params.w)]
    votes = output.sum(0)
    right = (votes.argmax(1) == labels).nonzero().flatten()
    sample = int(right[0]) if len(right) else 0
    label, guess = int(labels[sample]), int(votes[sample].argmax())
    order = tau[1].argsort()
    hidden_spikes, membrane = hidden[:, sample, order].numpy(), hidden_layer.state_seqs[0][:, sample, order].numpy()

    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(12.4, 7.4), layout="constrained")
        top, bottom = figure.subfigures(2, 1, height_ratios=(1.0, 1.0), hspace=0.05)
        top_axes = top.subplots(1, 4, width_ratios=(0.8, 1.6, 1.6, 1.3))
        show_pipeline(top_axes, images[sample], spikes[:, sample].numpy(), hidden_spikes, output[:, sample].numpy(), label, guess)
        grid = bottom.add_gridspec(2, 3, width_ratios=(2.1, 1.2, 1.6))
        show_membranes(bottom.add_subplot(grid[:, 0]), membrane, hidden_spikes, tau[1][order].numpy())
        show_time_constants(bottom.add_subplot(grid[:, 1]), *(t.numpy() for t in tau))
        show_learning(bottom.add_subplot(grid[0, 2]), bottom.add_subplot(grid[1, 2]), done)
        figure.suptitle(
            f"Two spiking layers on 8 × 8 digits: {done['accuracies'][-1]:.1%} test accuracy;  "
            f"training step {1e3 * fused_s:.1f} ms fused, {1e3 * eager_s:.1f} ms eager",
            x=0.008, ha="left", fontsize=12.5, fontweight="bold",
        )  # fmt: skip
    return figure


def show_pipeline(axes, image, spikes, hidden, output, label: int, guess: int) -> None:
    axes[0].imshow(image.view(8, 8), cmap="gray_r", interpolation="nearest")
    axes[0].set(title=f"Image of a {label}", xticks=[], yticks=[])
    axes[0].spines[:].set_visible(False)
    raster(axes[1], spikes, lambda row: INK, height=0.8)
    axes[1].set(title="Input: brightness as rate", ylabel="pixel", yticks=(0, 16, 32, 48, 63))
    axes[1].invert_yaxis()
    raster(axes[2], hidden, lambda row: BLUE, height=1.6)
    axes[2].set(title="Hidden spikes", ylabel="neuron, slow ones on top", yticks=(0, hidden.shape[1] - 1))
    raster(axes[3], output, lambda row: ORANGE if row == guess else PALE, height=0.7, width=2.2)
    axes[3].set(title=f"Output spikes vote {guess}", ylabel="class", yticks=range(10))


def show_membranes(ax, membrane, spikes, tau) -> None:
    """Some of the neurons that spiked, from fast to slow; 0 is the reset and 1 the threshold."""
    count = spikes.sum(0)
    firing = numpy.flatnonzero((count >= 2) & (count <= len(spikes) // 3) & (membrane.min(0) > -0.9))
    chosen = firing[numpy.linspace(0, len(firing) - 1, 5).astype(int)] if len(firing) else numpy.arange(5)
    time = numpy.arange(len(spikes))
    for k, neuron in enumerate(chosen):
        base = 2.0 * k
        ax.axhline(base + 1.0, color=PALE, lw=0.8, ls=(0, (4, 3)))
        ax.plot(time, base + membrane[:, neuron], color=BLUE, lw=1.5)
        ax.vlines(numpy.flatnonzero(spikes[:, neuron]), base, base + 1.35, color=ORANGE, lw=1.6)
        ax.text(len(spikes) + 0.3, base + 0.35, f"τ = {tau[neuron]:.1f}", va="center", color=BLUE)
    ax.set(title="Hidden membranes: threshold dashed, spikes in orange", xlabel="time step", xlim=(-0.5, len(spikes) - 0.5))
    ax.set(yticks=[2.0 * k + d for k in range(len(chosen)) for d in (0, 1)], yticklabels=["0", "1"] * len(chosen))


def show_time_constants(ax, before, after) -> None:
    ax.plot(before, color=PALE, lw=2)
    ax.plot(numpy.arange(len(after)), after, "o", color=BLUE, ms=2.6, mew=0)
    ax.text(0.04, 0.93, "learned, one per neuron", color=BLUE, transform=ax.transAxes)
    ax.text(0.04, 0.86, "at the start", color="#848b94", transform=ax.transAxes)
    ax.set(title="Time constants τ (steps)", xlabel="hidden neuron", ylim=(0, None))


def show_learning(upper, lower, done) -> None:
    epochs = len(done["accuracies"])
    per_epoch = [part.mean() for part in numpy.array_split(done["losses"], epochs)]
    time = numpy.arange(1, epochs + 1)
    upper.plot(numpy.linspace(0, epochs, len(done["losses"])), done["losses"], color=PALE, lw=0.7)
    upper.plot(time - 0.5, per_epoch, color=INK, lw=1.6)
    upper.set(title="Training loss", yscale="log", xlim=(0, epochs), xticklabels=[])
    lower.plot(time, 100 * numpy.array(done["accuracies"]), color=ORANGE, lw=1.6)
    lower.text(0.98, 0.7, f"{done['accuracies'][-1]:.1%} at the end", color=ORANGE, ha="right", transform=lower.transAxes)
    lower.set(title="Test accuracy (%)", xlabel="epoch", xlim=(0, epochs), ylim=(0, 102), yticks=(0, 50, 100))
