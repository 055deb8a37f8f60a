"""A GRU as a core: one step in plain PyTorch, equal to `nn.GRU`, trained to add two marked numbers of a sequence.

    python examples/gru_as_a_core.py

Products of the input and of the state are the calls of a core that mix neurons. First the step is compared with PyTorch's own layer in
float64, values and gradients; then it learns the adding problem (Hochreiter and Schmidhuber, 1997): of 40 numbers two are marked.
"""

from __future__ import annotations

import torch
from common import fit, learning_curve, options, plt, report, updates
from torch import Tensor, nn

import flexsn
from flexsn import plot

STEPS, WITHIN = 40, 0.1  # a sum is right if it is off by less


class GRU(nn.Module):
    """One step of a gated recurrent unit (Cho et al., 2014), as PyTorch computes it."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.x_reset, self.x_update, self.x_new = (nn.Linear(inputs, hidden) for _ in range(3))
        self.h_reset, self.h_update, self.h_new = (nn.Linear(hidden, hidden) for _ in range(3))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        reset = torch.sigmoid(self.x_reset(x) + self.h_reset(h))
        update = torch.sigmoid(self.x_update(x) + self.h_update(h))
        new = torch.tanh(self.x_new(x) + reset * self.h_new(h))
        h = (1.0 - update) * new + update * h
        return h, h


def layer(inputs: int, hidden: int) -> flexsn.FlexSN:
    """`[T, B, inputs]` -> `[T, B, hidden]`, from a state of zeros, which is given since it is not as wide as the input."""
    return flexsn.FlexSN(
        GRU(inputs, hidden), num_states=1, stateful=False, strict=True, initial_states=lambda x: [x.new_zeros(x.shape[1], hidden)]
    )


def largest_difference(T: int = 50, batch: int = 8, inputs: int = 5, hidden: int = 32) -> float:
    """Between flexsn and `nn.GRU` with the same weights in float64, in values and gradients."""
    gru, own = layer(inputs, hidden).double(), nn.GRU(inputs, hidden, dtype=torch.float64)
    names = [(kind, end) for end in ("weight", "bias") for kind in ("x", "h")]  # the order of PyTorch's parameters
    groups = [[getattr(getattr(gru.core, f"{kind}_{gate}"), end) for gate in ("reset", "update", "new")] for kind, end in names]
    with torch.no_grad():
        for parameter, group in zip(own.parameters(), groups, strict=True):
            parameter.copy_(torch.cat(group))
    x, cotangent = (torch.randn(T, batch, n, dtype=torch.float64, requires_grad=n == inputs) for n in (inputs, hidden))
    got, want = gru(x), own(x)[0]
    flat = torch.autograd.grad(got, [x, *(p for group in groups for p in group)], cotangent)
    found = [got, flat[0], *(torch.cat(flat[1 + 3 * k : 4 + 3 * k]) for k in range(4))]
    expected = [want, *torch.autograd.grad(want, [x, *own.parameters()], cotangent)]
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def adding(batch: int) -> tuple[Tensor, Tensor]:
    """Numbers and marks `[T, B, 2]`, and the sums of the two marked numbers, one in each half."""
    numbers, marks = torch.rand(STEPS, batch), torch.zeros(STEPS, batch)
    for half in range(2):
        marks[torch.randint(half * STEPS // 2, (half + 1) * STEPS // 2, (batch,)), torch.arange(batch)] = 1.0
    return torch.stack([numbers, marks], -1), (numbers * marks).sum(0)


def right(error: Tensor) -> float:
    return (error.abs() < WITHIN).double().mean().item()


def main(argv: list[str] | None = None) -> dict:
    args = options(__file__, __doc__, epochs=20, quick=8, argv=argv)
    print(f"largest difference from nn.GRU in float64, values and gradients: {(difference := largest_difference()):.1e}")
    hidden = 32 if args.quick else 64
    net = nn.Sequential(layer(2, hidden), nn.Linear(hidden, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    held_out, test = adding(500), adding(1000)

    def error(x: Tensor, sums: Tensor) -> Tensor:
        return net(x)[-1, :, 0] - sums

    def epoch() -> list[float]:
        return updates(optimizer, (error(*adding(64)).square().mean() for _ in range(50)))

    history = fit(net, epoch, lambda: right(error(*held_out)), args.epochs)
    with torch.no_grad():
        test_error, states = error(*test), net[0](test[0])[:, 0]
    with plt.rc_context(plot.STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
        plot.heat_map(states, ax=axes[0]).set_title("The states of one sequence")
        axes[1].plot(test[1], test[1] + test_error, ".", ms=2.0, color=plot.BLUE)
        axes[1].set(title="All sequences of the test", xlabel="sum", ylabel="answer")
        learning_curve(history, axes[2])
    return report(args, figure, {"test_accuracy": right(test_error), "chance": 0.19, "largest_difference": difference} | history)


if __name__ == "__main__":
    main()
