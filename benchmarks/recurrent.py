"""Recurrent LIF layers: `python benchmarks/recurrent.py --json out.json`, on a GPU with `--device cuda`.

`flexsn.Recurrent(LIF, Linear)` and the same step in a plain loop over `x.unbind(0)` take turns, inference and training steps, at several
widths and rates of spikes; beside them the layer without the replay of its ops (`_program/replay.py`), and `nn.RNN` (tanh) of the same
size. In training also the products of dense cotangents by the weights alone, a step at a time, by PyTorch: no backward of such a layer is
without them. On a GPU also the loop in a CUDA graph, which is replayed, `nn.GRU` and `nn.LSTM`, and all that once more in bfloat16: the layer
and the loop under autocast, the others of that dtype. Then a network as for SHD: 700 inputs, 256 recurrent ALIF, 20 outputs, 100 steps,
batch 64, whose training step includes the optimizer's: layer by layer, written as one core, and compiled; and the loop with one compiled
step. Results are compared first.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

import flexsn
from flexsn._program import replay
from flexsn._runtime.triton.kernel import finish_builds

sys.path.insert(0, str(Path(__file__).parent))
from measure import graphed, machine


class Plain(nn.Module):
    """The recurrent layer as a loop."""

    def __init__(self, layer: flexsn.Recurrent):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        core, mixing = self.layer.neuron.core, self.layer.mixing
        y, states, found = torch.zeros_like(x[0]), [torch.zeros_like(x[0])] * self.layer.neuron.num_states, []
        for step in x.unbind(0):
            y, *states = core(step + mixing(y), *states)
            found.append(y)
        return torch.stack(found)


class WrittenDown(nn.Module):
    """The recurrent layer, whose calls are written down each time in place of being replayed."""

    def __init__(self, layer: flexsn.Recurrent):
        super().__init__()
        self.layer = copy.deepcopy(layer)

    def forward(self, x: Tensor) -> Tensor:
        with mock.patch.object(replay.Kinds, "run", lambda self, what, given, work, refusal=(): work()):
            return self.layer(x)


def in_turns(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Return median and best seconds of each, run in turns; each follows each of the others as often, whose threads may still spin."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    for turn in range(repeats + 2):
        if turn == 2 and torch.cuda.is_initialized():
            finish_builds()
        order = [*runs.items()][:: 1 if turn % 2 else -1]
        for name, run in order[turn // 2 % len(order) :] + order[: turn // 2 % len(order)]:
            begin = time.perf_counter()
            run()
            wait()
            if turn >= 2:
                times[name].append(time.perf_counter() - begin)
    return {name: {"median_s": statistics.median(found), "best_s": min(found)} for name, found in times.items()}


def with_ratios(rows: dict[str, dict[str, float]]) -> dict:
    """Add how many times longer each takes than flexsn, by medians and by bests."""
    own = rows["flexsn"]
    ratios = {name: {key: row[key] / own[key] for key in row} for name, row in rows.items() if name != "flexsn"}
    return {"times": rows, "over_flexsn": ratios}


def layer_case(T: int, batch: int, hidden: int, drive: float, device: str, repeats: int, *, bf16: bool = False) -> dict:
    torch.manual_seed(0)
    layer = flexsn.Recurrent(flexsn.LIF(), nn.Linear(hidden, hidden, bias=False), stateful=False, strict=True).to(device)
    with torch.no_grad():
        layer.mixing.weight.mul_(0.5)
    dtype = torch.bfloat16 if bf16 else torch.float32
    x = (torch.randn(T, batch, hidden, device=device) * 0.6 + drive).to(dtype)
    runs: dict[str, nn.Module] = {"flexsn": layer, "written down": WrittenDown(layer), "loop": Plain(layer)}
    library = (nn.RNN, nn.GRU, nn.LSTM) if device == "cuda" else (nn.RNN,)
    runs |= {f"nn.{kind.__name__}": kind(hidden, hidden, device=device, dtype=dtype) for kind in library}
    leaf, cotangent = x.clone().requires_grad_(), torch.randn(T, batch, hidden, device=device)

    def called(run: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=bf16 and not isinstance(run, nn.RNNBase), cache_enabled=False):
            y = run(x)
        return y[0] if isinstance(y, tuple) else y

    with torch.no_grad():
        spikes = called(layer, x)
        same = (spikes == called(runs["loop"], x)).float().mean().item()

    def infer(run: nn.Module) -> Callable[[], object]:
        def inner() -> object:
            with torch.no_grad():
                return called(run, x)

        return inner

    def train(run: nn.Module) -> Callable[[], object]:
        def inner() -> object:
            y = called(run, leaf)
            return torch.autograd.grad(y, [leaf, *run.parameters()], cotangent.to(y.dtype))

        return inner

    def products() -> None:
        for g in rows:
            torch.mm(g, weight, out=product)

    rows, weight = cotangent.to(dtype).unbind(0), layer.mixing.weight.detach().to(dtype)
    product = torch.empty_like(rows[0])
    inferred, trained = [{name: kind(run) for name, run in runs.items()} for kind in (infer, train)]
    trained["products of cotangents alone"] = products
    if device == "cuda":
        for calls in (inferred, trained):
            calls |= {f"{name} in a CUDA graph": graphed(calls[name]) for name in ("flexsn", "loop")}
    return {
        "T": T, "batch": batch, "hidden": hidden, "dtype": str(dtype), "rate": spikes.mean().item(), "equal_spikes": same,
        "inference": with_ratios(in_turns(inferred, repeats)), "training": with_ratios(in_turns(trained, repeats)),
    }  # fmt: skip


def shd_like(device: str, repeats: int) -> dict:
    torch.manual_seed(0)
    T, batch, hidden = 100, 64, 256
    x = (torch.rand(T, batch, 700, device=device) < 0.03).float()
    target = torch.randint(0, 20, (batch,), device=device)
    layer = flexsn.Recurrent(flexsn.ALIF(tau=20.0, r=20.0), nn.Linear(hidden, hidden, bias=False), stateful=False, strict=True).to(device)
    w_in, w_out = nn.Linear(700, hidden, device=device), nn.Linear(hidden, 20, device=device)
    runs = {}
    compiled_step = torch.compile(lambda x, y, v, a: layer.neuron.core(w_in(x) + layer.mixing(y), v, a))

    def by_compiled_steps(x: Tensor) -> Tensor:
        states, found = [torch.zeros(batch, hidden, device=device)] * 3, []
        for step in x.unbind(0):
            states = compiled_step(step, *states)
            found.append(states[0])
        return w_out(torch.stack(found))

    def whole(x: Tensor) -> Tensor:
        return w_out(layer(w_in(x)))

    plain = Plain(layer)

    def network_core(x: Tensor, y: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        y, v, a = layer.neuron.core(w_in(x) + layer.mixing(y), v, a)
        return w_out(y), y, v, a

    one_core = flexsn.FlexSN(network_core, num_states=3, stateful=False, strict=True)
    networks: dict[str, Callable[[Tensor], Tensor]] = {
        "flexsn": whole,
        "flexsn, the network as one core": one_core,
        "loop": lambda x: w_out(plain(w_in(x))),
        "loop of a compiled step": by_compiled_steps,
        "compiled": torch.compile(whole),
        "compiled in one graph": torch.compile(whole, fullgraph=True),
    }
    for name, run in networks.items():
        optimizer = torch.optim.Adam([*layer.parameters(), *w_in.parameters(), *w_out.parameters()], lr=0.0)

        def step(run: Callable[[Tensor], Tensor] = run, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(run(x).mean(0), target).backward()
            optimizer.step()

        runs[name] = step
    with torch.no_grad():
        rate = layer(w_in(x)).mean().item()
        torch.testing.assert_close(one_core(x).mean(0), plain_logits := networks["loop"](x).mean(0), rtol=0, atol=1e-2)
        torch.testing.assert_close(whole(x).mean(0), plain_logits, rtol=0, atol=1e-2)
    return {"T": T, "batch": batch, "hidden": hidden, "rate": rate, "training": with_ratios(in_turns(runs, repeats))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load, device, repeats = os.getloadavg()[0], options.device, options.repeats
    if device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the legacy stream cannot be captured
    sizes = [(100, 64, 128, 0.6), (100, 64, 256, 0.6), (100, 64, 256, 0.0), (100, 64, 512, 0.6)]
    cases = [(size, False) for size in sizes]
    if device == "cuda":
        sizes = [(100, 128, 128, 0.6), (100, 128, 200, 0.6), (100, 128, 256, 0.6), (250, 256, 512, 0.6), (100, 256, 1024, 0.6)]
        cases += [*[(size, bf16) for size in sizes for bf16 in (False, True)], ((1000, 64, 256, 0.6), False)]
    found = {
        "machine": machine(), "python": platform.python_version(), "torch": torch.__version__, "flexsn": flexsn.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "date": datetime.date.today().isoformat(),
        "threads": torch.get_num_threads(), "repeats": repeats, "load_before": load,
        "shd_like": shd_like(device, repeats), "layers": [],
    }  # fmt: skip
    print(json.dumps(found, indent=1), flush=True)
    for size, bf16 in cases:
        found["layers"].append(layer_case(*size, device, repeats, bf16=bf16))
        print(json.dumps(found["layers"][-1], indent=1), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
