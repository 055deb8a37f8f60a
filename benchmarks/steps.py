"""Networks written one step at a time, and cores that mix what they compute: `python benchmarks/steps.py --json out.json`.

`flexsn.over_time` of a feed-forward network beside the same layers called one by one on whole sequences, and beside a loop over the
network in single steps. Then `flexsn.scan` of cores with mixing calls (two layers in one core, two layers with feedback, an LSTM with one
product for its gates, a norm, a sum, a softmax or a convolution inside the recurrence) beside a plain loop over `x.unbind(0)`. All in turns, inference and training steps;
results are compared first. `--device cuda` runs it on a GPU: there also recurrent LIF, adaptive LIF, LSTM and GRU under autocast to bfloat16, a
recurrence of 4,096 neurons, each call and the loop in a CUDA graph (that is, without the time of Python), and for what runs in CUDA graphs the loop of a compiled step.
"""

from __future__ import annotations

import argparse
import datetime
import functools
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
from measure import graphed, machine
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
    gates, gates_of_3 = ([nn.Linear(width, many * width, device=device) for _ in range(2)] for many in (4, 3))
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

    def gru(x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        (xr, xz, xn), (hr, hz, hn) = gates_of_3[0](x).chunk(3, -1), gates_of_3[1](h).chunk(3, -1)
        z = torch.sigmoid(xz + hz)
        h = (1.0 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h
        return h, h

    def lif(x: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        h = v + (2.0 * x + back(s) - v) / 2.0
        s = flexsn.surrogate.atan(h - 1.0)
        return s, h * (1.0 - s), s

    def wide(x: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        return lif(x, v, s)

    def alif(x: Tensor, v: Tensor, a: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        h = v + (2.0 * x + back(s) - v) / 2.0
        s = flexsn.surrogate.atan(h - 1.0 - 0.2 * a)
        return s, h * (1.0 - s), a * 0.95 + s, s

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
    own |= {convolved: [filters], convolved_small: [filters], lif: [back], alif: [back], gru: gates_of_3, wide: [back]}
    states = {two_layers: 2, feedback: 3, lstm: 2, normed: 2, inhibited: 2, competing: 1, convolved: 2, convolved_small: 2}
    states |= {lif: 2, alif: 3, gru: 1, wide: 2}
    return {core.__name__: (core, states[core], [p for layer in own[core] for p in layer.parameters()]) for core in own}


STEPS = {"convolved": (16, 8, 32, 32), "convolved_small": (2, 8, 8, 8)}  # of others [batch, width]
WIDE = 4096
IN_GRAPHS = ("convolved", "convolved_small", "wide")  # on a GPU
IN_BFLOAT16 = ("lif", "alif", "lstm", "gru")


def core_case(name: str, T: int, batch: int, width: int, device: str, repeats: int, *, bf16: bool = False) -> dict:
    width = WIDE if name == "wide" else width
    core, count, params = cores(width, device)[name]
    step = STEPS.get(name, (batch, width))
    x, rest = torch.randn(T, *step, device=device), [torch.zeros(step, device=device)] * count

    precision = torch.autocast(device, torch.bfloat16, enabled=bf16, cache_enabled=False)

    def fused(x: Tensor) -> Tensor:
        with precision:
            return flexsn.scan(core, [x], rest, strict=True).outputs[0]

    def loop(x: Tensor, core: Callable = core) -> Tensor:
        states, found = rest, []
        with precision:
            for step in x.unbind(0):
                y, *states = core(step, *states)
                found.append(y)
            return torch.stack(found)

    runs: dict[str, Callable[[Tensor], Tensor]] = {"flexsn": fused, "loop": loop}
    if device == "cuda" and name in IN_GRAPHS:
        runs["loop of a compiled step"] = functools.partial(loop, core=torch.compile(core))
    with torch.no_grad():
        same = (fused(x) == loop(x)).float().mean().item()
    found = {"core": name, "T": T, "step": step, "bfloat16": bf16, "equal": same, **passes(runs, x, params, repeats)}
    return {**found, "without_python": captured(runs, x, params, repeats)} if device == "cuda" else found


def captured(runs: dict[str, Callable[[Tensor], Tensor]], x: Tensor, params: Sequence[Tensor], repeats: int) -> dict:
    """Time inference and training steps of flexsn and of the loop, each replayed in a CUDA graph."""
    leaf, cotangent = x.clone().requires_grad_(), torch.randn_like(runs["loop"](x))

    def infer(run: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        return graphed(torch.no_grad()(functools.partial(run, x)))

    def train(run: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        return graphed(lambda: torch.autograd.grad(run(leaf), [leaf, *params], cotangent, allow_unused=True))

    kinds, taken = {"inference": infer, "training": train}, ("flexsn", "loop")
    return {kind: with_ratios(in_turns({name: how(runs[name]) for name in taken}, repeats)) for kind, how in kinds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cores", action="store_true", help="cores alone, without the networks")
    options = parser.parse_args()
    load, device, repeats = os.getloadavg()[0], options.device, options.repeats
    if device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the legacy stream cannot be captured
    found = {
        "machine": machine(), "python": platform.python_version(), "torch": torch.__version__, "flexsn": flexsn.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "date": datetime.date.today().isoformat(),
        "threads": torch.get_num_threads(), "repeats": repeats, "load_before": load,
        "networks": [network_case(make, device, repeats) for make in (() if options.cores else (dense, events, small, convolutional))],
        "cores": [],
    }  # fmt: skip
    print(json.dumps(found["networks"], indent=1), flush=True)
    cases = [(name, 128, True) for name in IN_BFLOAT16 if device == "cuda"]
    cases += [(name, 64, False) for name in reversed(cores(8, device)) if name != "wide" or device == "cuda"]
    for name, batch, bf16 in cases:
        found["cores"].append(core_case(name, 100, batch, 256, device, repeats, bf16=bf16))
        print(json.dumps(found["cores"][-1], indent=1), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
