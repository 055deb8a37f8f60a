"""A training step of a spiking VGG-11 under bf16 autocast, eager and compiled, with ReLU in the neuron's place as the floor.

    python benchmarks/network.py --output benchmarks/results/network_<date>.json [--steps 4 16] [--only NAME ...] [--without-fusion]

Needs a GPU and, for the peers, SpikingJelly 2.0.0. Every network has the same weights; a step is forward, loss, backward
and SGD on [T, 128, 3, 32, 32] noise. Time: the networks run in turns of a few steps, synchronised, since the speed of a
shared host changes from second to second; the median over rounds. Peers follow, one by one. Memory: the peak of a step.
`--without-fusion`: what stands before a neuron in a compiled network stays a pass of its own, to see what fusing it gains.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch._inductor.config
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

import cores
import peers
from gpu import machine

import flexsn
from flexsn._runtime.triton.kernel import finish_builds
from flexsn._torch_compile import prologue_fusion

BATCH = 128
LAYOUT = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")


class OverTime(nn.Module):
    """Layers without state, on `[T, B, ...]`: time and batch are one dim to them."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def vgg11(neuron: Callable[[], nn.Module]) -> nn.Sequential:
    layers, channels, before = [], 3, []
    for width in LAYOUT:
        if width == "M":
            before = [nn.MaxPool2d(2)]
            continue
        layers += [OverTime(*before, nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)), neuron()]
        channels, before = width, []
    return nn.Sequential(*layers, OverTime(*before, nn.Flatten(), nn.Linear(channels, 10)))


def flexsn_lif() -> nn.Module:
    return flexsn.FlexSN(cores.lif_sigmoid, num_states=1, strict=True)


def flexsn_stateless() -> nn.Module:
    return flexsn.FlexSN(cores.lif_sigmoid, num_states=1, strict=True, stateful=False)


def flexsn_detached() -> nn.Module:
    return flexsn.FlexSN(cores.lif_sigmoid, num_states=1, strict=True, stateful="detached")


def sj_lif() -> nn.Module:
    layer = peers.sj_neuron.LIFNode(
        tau=2.0, decay_input=True, v_threshold=1.0, v_reset=0.0, surrogate_function=peers.sj_surrogate.Sigmoid(alpha=4.0), step_mode="m"
    )
    layer.backend = "triton"
    return layer


class SJFlexSN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = peers.sj_neuron.FlexSN(cores.lif_sigmoid, num_states=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer.multi_step_functional_forward((x,), (torch.zeros_like(x[0]),), static_inputs=())[0][0]


class EagerLoop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        v, spikes = torch.zeros_like(x[0]), []
        for x_t in x.unbind(0):
            s, v = cores.lif_sigmoid(x_t, v)
            spikes.append(s)
        return torch.stack(spikes)


NEURONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "flexsn": flexsn_lif, "flexsn_detached": flexsn_detached, "flexsn_stateless": flexsn_stateless,
    "eager_loop": EagerLoop,
}  # fmt: skip
if peers.spikingjelly:
    NEURONS |= {"sj_lifnode_triton": sj_lif, "sj_flexsn": SJFlexSN}
# name -> neuron, how it is compiled
RUNS = {
    "relu": ("relu", None), "relu_compiled": ("relu", {}), "relu_reduce_overhead": ("relu", {"mode": "reduce-overhead"}),
    "flexsn": ("flexsn", None), "flexsn_compiled": ("flexsn", {}), "flexsn_reduce_overhead": ("flexsn", {"mode": "reduce-overhead"}),
    "flexsn_detached": ("flexsn_detached", None), "flexsn_detached_compiled": ("flexsn_detached", {}),
    "flexsn_detached_reduce_overhead": ("flexsn_detached", {"mode": "reduce-overhead"}),
    "flexsn_stateless": ("flexsn_stateless", None), "flexsn_stateless_compiled": ("flexsn_stateless", {}),
    "flexsn_stateless_reduce_overhead": ("flexsn_stateless", {"mode": "reduce-overhead"}),
    "eager_loop": ("eager_loop", None), "sj_lifnode_triton": ("sj_lifnode_triton", None),
    "sj_lifnode_triton_compiled": ("sj_lifnode_triton", {}), "sj_flexsn": ("sj_flexsn", None), "sj_flexsn_compiled": ("sj_flexsn", {}),
}  # fmt: skip


def floor(name: str) -> str:
    """The run of ReLU that is compiled in the same way."""
    return next(n for n, (neuron, compiled) in RUNS.items() if neuron == "relu" and compiled == RUNS[name][1])


def network(neuron: str) -> nn.Sequential:
    torch.manual_seed(0)
    return vgg11(NEURONS[neuron]).cuda()


def reset(net: nn.Module, neuron: str) -> None:
    if neuron in ("flexsn", "flexsn_detached"):
        flexsn.reset_net(net)
    elif neuron.startswith("sj_lif"):
        peers.sj_functional.reset_net(net)


def training_step(net: nn.Module, call: Callable, neuron: str, x: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

    def step() -> Tensor:
        reset(net, neuron)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(call(x).mean(0), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def check(x: Tensor) -> dict:
    """flexsn against the eager loop, in float32, before anything is timed."""
    found: dict = {"tf32": False}
    torch.backends.cudnn.allow_tf32 = False  # one flipped spike changes all that follow
    with torch.no_grad():
        want = network("eager_loop")(x)
        found["eager_equal"] = torch.equal(network("flexsn")(x), want)
        got = torch.compile(network("flexsn"), fullgraph=True)(x)
        found["compiled_error"] = ((got - want).norm() / want.norm()).item()
    torch.backends.cudnn.allow_tf32 = True
    if not found["eager_equal"]:
        raise AssertionError("flexsn and the eager loop differ")
    return found


def settle_memory() -> None:
    """Nothing waits for Python's collector, and cuBLAS keeps no workspace: 32 MiB that the first to come would pay for all."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def prepared(name: str, x: Tensor, labels: Tensor) -> tuple[dict, Callable[[], Tensor]]:
    """What is known of a network before it is timed, and its training step."""
    neuron, compiled = RUNS[name]
    torch._dynamo.utils.counters.clear()
    settle_memory()
    others = torch.cuda.memory_allocated() - sum(t.untyped_storage().nbytes() for t in (x, labels))
    net = network(neuron)
    start = time.perf_counter()
    call = net if compiled is None else torch.compile(net, **compiled)
    step = training_step(net, call, neuron, x, labels)
    losses = [step().item() for _ in range(3)]
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    finish_builds()
    settle_memory()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    row = {"peak_mib": (torch.cuda.max_memory_allocated() - others) / 2**20, "first_steps_s": first, "losses": losses}
    row["date"] = datetime.date.today().isoformat()
    if compiled is not None:
        row["graph_breaks"] = dict(torch._dynamo.utils.counters["graph_break"])
        row["cudagraph_skips"] = torch._dynamo.utils.counters["inductor"].get("cudagraph_skips", 0)
    return row, step


def in_turns(steps: dict[str, Callable[[], Tensor]], rounds: int, turn: int = 8) -> dict[str, list[float]]:
    """Milliseconds of a step of each network, one number per round: the mean over a turn of so many steps."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()  # what the network before left in caches is not its own
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(turn):
                step()
            torch.cuda.synchronize()
            found[name].append((time.perf_counter() - start) / turn * 1e3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", required=True)
    parser.add_argument("--steps", nargs="*", type=int, default=[4, 16])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--without-fusion", action="store_true")
    options = parser.parse_args()
    if options.without_fusion:
        prologue_fusion.DEVICES.clear()
        torch._inductor.config.force_disable_caches = True  # they know nothing of it
    target = Path(options.output)
    document: dict = json.loads(target.read_text()) if target.exists() else {"T": {}}  # rows that are not measured again stay
    now, before = machine(), document.get("machine", {})
    if not peers.spikingjelly:
        now["spikingjelly"] = before.get("spikingjelly", "absent")  # that of the rows that stay
    document |= {"machine": now, "batch": BATCH, "fusion": not options.without_fusion}
    torch.backends.cudnn.benchmark = False
    torch._dynamo.config.recompile_limit = 2 * len(RUNS)  # to Dynamo they are one function
    for T in options.steps:
        torch.manual_seed(1)
        x, labels = torch.randn(T, BATCH, 3, 32, 32, device="cuda"), torch.randint(10, (BATCH,), device="cuda")
        rows: dict = document["T"].setdefault(str(T), {})
        rows["check"] = check(x[:, :16])
        torch._dynamo.reset()
        chosen = [n for n in options.only if RUNS[n][0] in NEURONS]
        ours, others = [n for n in chosen if not n.startswith("sj")], [n for n in chosen if n.startswith("sj")]
        for group in (ours, *[[n] for n in others]):  # peers last, one by one: their hooks and failures may slow what follows
            steps = {}
            for name in group:
                try:
                    rows[name], steps[name] = prepared(name, x, labels)
                except Exception:  # a peer may fail in any way: the report says how
                    if group is ours:
                        raise
                    rows[name] = {"failed": traceback.format_exc()[-1500:], "date": datetime.date.today().isoformat()}
                    print(T, name, rows[name]["failed"], flush=True)
            turns = in_turns(steps, options.rounds)
            for name, times in turns.items():
                rows[name] |= {"ms": statistics.median(times), "rounds_ms": times}
                if floor(name) in chosen:  # of this host: another run may replace the floor's row, and not this one
                    floors = rows[floor(name)]
                    rows[name] |= {"floor_ms": floors["ms"], "over_floor": rows[name]["ms"] / floors["ms"]}
                    if floor(name) in turns:  # in turns with it: a slow second of the host hits both
                        rows[name]["over_floor"] = statistics.median(a / b for a, b in zip(times, floors["rounds_ms"], strict=True))
                print(T, name, {k: v for k, v in rows[name].items() if k not in ("losses", "rounds_ms")}, flush=True)
            target.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
