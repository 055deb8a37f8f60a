"""Networks written one step at a time, and cores that mix what they compute: `python benchmarks/steps.py --json out.json`.

`flexsn.over_time` of a feed-forward network beside the same layers called one by one on whole sequences, and beside a loop over the
network in single steps. Then `flexsn.scan` of cores with mixing calls (two layers in one core, two layers with feedback, an LSTM with one
product for its gates, a norm, a sum, a softmax or a convolution inside the recurrence) beside a plain loop over `x.unbind(0)`. All in turns, inference and training steps;
results are compared first. `--device cuda` runs it on a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import flexsn

sys.path.insert(0, str(Path(__file__).parent))
from measure import machine
from recurrent import in_turns, with_ratios


class Folded(nn.Module):
    """A layer of one step, called with a whole sequence: time folded into the batch."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def dense() -> tuple[list[nn.Module], list[int]]:
    layers = [
        nn.Linear(700, 256),
        flexsn.ALIF(tau=20.0, r=20.0, stateful=False),
        nn.Linear(256, 256),
        flexsn.LIF(v_threshold=0.1, stateful=False),
        nn.Linear(256, 20),
    ]
    return layers, [100, 64, 700]


def events() -> tuple[list[nn.Module], list[int]]:
    """The dense network, of inputs of which 3% spike at a step."""
    return dense()


def small() -> tuple[list[nn.Module], list[int]]:
    return [nn.Linear(64, 64), flexsn.LIF(v_threshold=0.5, stateful=False), nn.Linear(64, 10)], [8, 16, 64]


def convolutional() -> tuple[list[nn.Module], list[int]]:
    layers: list[nn.Module] = []
    for inputs, outputs, threshold in ((2, 32, 0.5), (32, 32, 0.2)):
        neuron = flexsn.LIF(v_threshold=threshold, stateful=False)
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs).eval(), neuron, nn.MaxPool2d(2)]
    return [*layers, nn.Flatten(), nn.Linear(32 * 64, 10)], [8, 16, 2, 32, 32]


def stepped(network: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a loop over a network whose neurons carry their states from single step to single step."""
    neurons = [m for m in network.modules() if isinstance(m, flexsn.FlexSN)]
    for neuron in neurons:
        neuron.step_mode, neuron.stateful = "s", True

    def run(x: Tensor) -> Tensor:
        flexsn.reset_net(network)
        return torch.stack([network(step) for step in x.unbind(0)])

    return run


def passes(runs: dict[str, Callable[[Tensor], Tensor]], x: Tensor, params: Sequence[Tensor], repeats: int) -> dict:
    """Time inference and training steps of functions of `x`, in turns."""
    leaf, cotangent = x.clone().requires_grad_(), torch.randn_like(next(iter(runs.values()))(x))
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None

    def infer(run: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def inner() -> None:
            with torch.no_grad():
                run(x)
            wait()

        return inner

    def train(run: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def inner() -> None:
            torch.autograd.grad(run(leaf), [leaf, *params], cotangent, allow_unused=True)
            wait()

        return inner

    kinds = {"inference": infer, "training": train}
    return {kind: with_ratios(in_turns({name: how(run) for name, run in runs.items()}, repeats)) for kind, how in kinds.items()}


def rates_of(network: nn.Module, x: Tensor) -> list[float]:
    """Return the mean of what each neuron gives."""
    with torch.no_grad(), flexsn.monitor(network) as monitor:
        network(x)
    return [layer.rate for layer in monitor.layers.values()]


def network_case(make: Callable[[], tuple[list[nn.Module], list[int]]], device: str, repeats: int) -> dict:
    torch.manual_seed(0)
    layers, shape = make()
    loops, x = nn.Sequential(*make()[0]).to(device), torch.randn(shape, device=device)
    x = (x > 1.88).float() if make is events else x
    network = nn.Sequential(*layers).to(device)
    loops.load_state_dict(network.state_dict())
    kept = (flexsn.FlexSN, nn.Linear)
    one_by_one = nn.Sequential(*[layer if isinstance(layer, kept) else Folded(layer) for layer in layers])
    over_time, loop = flexsn.over_time(network, strict=True), stepped(loops)
    with torch.no_grad():
        outputs = [run(x) for run in (over_time, one_by_one, loop)]
    same = [(outputs[0] - y).abs().max().item() for y in outputs[1:]]
    rates = rates_of(over_time, x)
    params = [*network.parameters(), *loops.parameters()]
    found = passes({"flexsn": over_time, "layers one by one": one_by_one}, x, params, repeats)
    beside = passes({"flexsn": over_time, "single steps": loop}, x, params, repeats)  # apart: what runs after many small tensors is slower
    return {"network": make.__name__, "shape": shape, "rates": rates, "largest_difference": same, **found, "beside_single_steps": beside}


def cores(width: int, device: str) -> dict[str, tuple[Callable, int, list[nn.Parameter]]]:
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, device=device) for _ in range(3)]
    gates = [nn.Linear(width, 4 * width, device=device) for _ in range(2)]
    first, second, back = layers
    norm, filters = nn.LayerNorm(width, device=device), nn.Conv2d(8, 8, 3, padding=1, device=device)

    def two_layers(x: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        v = v + (first(x) - v) / 2.0
        s = flexsn.surrogate.atan(v - 0.5)
        u = u + (second(s) - u) / 3.0
        z = flexsn.surrogate.atan(u - 0.1)
        return z, v * (1.0 - s), u * (1.0 - z)

    def feedback(x: Tensor, v: Tensor, u: Tensor, past: Tensor) -> tuple[Tensor, ...]:
        v = v + (first(x) + back(past) - v) / 2.0
        s = flexsn.surrogate.atan(v - 0.5)
        u = u + (second(s) - u) / 3.0
        z = flexsn.surrogate.atan(u - 0.1)
        return z, v * (1.0 - s), u * (1.0 - z), z

    def lstm(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        i, f, o, u = (gates[0](x) + gates[1](h)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, h, c

    def normed(x: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        h = v + (norm(x + first(s)) - v) / 2.0
        s = flexsn.surrogate.atan(h - 1.0)
        return s, h * (1.0 - s), s

    def inhibited(x: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        h = v + (2.0 * x - 0.1 * s.sum(-1, keepdim=True) - v) / 2.0
        s = flexsn.surrogate.atan(h - 1.0)
        return s, h * (1.0 - s), s

    def competing(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = v + (2.0 * x + torch.softmax(v, -1) - v) / 2.0
        s = flexsn.surrogate.atan(h - 1.0)
        return s, h * (1.0 - s)

    def convolved(x: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        h = v + (2.0 * x + filters(s) - v) / 2.0
        s = flexsn.surrogate.atan(h - 1.0)
        return s, h * (1.0 - s), s

    def convolved_small(x: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        return convolved(x, v, s)

    own = {two_layers: [first, second], feedback: layers, lstm: gates, normed: [first, norm], inhibited: [], competing: []}
    own |= {convolved: [filters], convolved_small: [filters]}
    states = {two_layers: 2, feedback: 3, lstm: 2, normed: 2, inhibited: 2, competing: 1, convolved: 2, convolved_small: 2}
    return {core.__name__: (core, states[core], [p for layer in own[core] for p in layer.parameters()]) for core in own}


STEPS = {"convolved": (16, 8, 32, 32), "convolved_small": (2, 8, 8, 8)}  # of others [batch, width]


def core_case(name: str, T: int, batch: int, width: int, device: str, repeats: int) -> dict:
    core, count, params = cores(width, device)[name]
    step = STEPS.get(name, (batch, width))
    x, rest = torch.randn(T, *step, device=device), [torch.zeros(step, device=device)] * count

    def fused(x: Tensor) -> Tensor:
        return flexsn.scan(core, [x], rest, strict=True).outputs[0]

    def loop(x: Tensor) -> Tensor:
        states, found = rest, []
        for step in x.unbind(0):
            y, *states = core(step, *states)
            found.append(y)
        return torch.stack(found)

    with torch.no_grad():
        same = (fused(x) == loop(x)).float().mean().item()
    return {
        "core": name,
        "T": T,
        "step": step,
        "equal": same,
        **passes({"flexsn": fused, "loop": loop}, x, params, repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load, device, repeats = os.getloadavg()[0], options.device, options.repeats
    found = {
        "machine": machine(), "python": platform.python_version(), "torch": torch.__version__, "flexsn": flexsn.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "date": datetime.date.today().isoformat(),
        "threads": torch.get_num_threads(), "repeats": repeats, "load_before": load,
        "networks": [network_case(make, device, repeats) for make in (dense, events, small, convolutional)],
        "cores": [core_case(name, 100, 64, 256, device, repeats) for name in cores(8, device)],
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
