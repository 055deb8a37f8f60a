"""Who is measured: flexsn and its peers, each as a function from (inputs, states) to outputs over the whole sequence."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy
import torch
from cores import Neuron
from torch import Tensor

import flexsn

try:
    import spikingjelly
    from spikingjelly.activation_based import functional as sj_functional
    from spikingjelly.activation_based import neuron as sj_neuron
    from spikingjelly.activation_based import surrogate as sj_surrogate
except ImportError:
    spikingjelly = None

Run = Callable[[list[Tensor], list[Tensor]], tuple[Tensor, ...]]


@dataclass
class Peer:
    """One candidate on one case.

    Attributes:
        key: name in the results.
        run: the whole sequence, inputs and initial states to outputs.
        note: what a reader should know.
        missing: why it does not run here, instead of `run`.
        compiles: its first call compiles; the seconds of that call are recorded.
    """

    key: str
    run: Run | None
    note: str = ""
    missing: str = ""
    compiles: bool = False


TITLES = {
    "flexsn": "flexsn",
    "flexsn_eager": 'flexsn, backend="torch"',
    "hand_loop": "hand-written eager loop",
    "torch_scan": "torch scan, compiled",
    "sj_flexsn": "SpikingJelly FlexSN",
    "sj_flexsn_compiled": "SpikingJelly FlexSN, torch.compile",
    "sj_lifnode": "SpikingJelly LIFNode",
    "copy": "copy",
    "clone": "copy into new memory",
}
LONGEST_UNROLLED = 64


def hand_loop(neuron: Neuron) -> Run:
    """What one writes without any library."""

    def run(inputs, states):
        outputs = [[] for _ in range(neuron.outputs)]
        for step in zip(*(x.unbind(0) for x in inputs), strict=True):
            returned = neuron.core(*step, *states)
            for kept, y in zip(outputs, returned, strict=False):
                kept.append(y)
            states = returned[neuron.outputs :]
        return tuple(torch.stack(kept) for kept in outputs)

    return run


def fused(neuron: Neuron) -> Run:
    """`strict`: a fallback to the eager loop is an error, not a slow result."""
    return lambda inputs, states: flexsn.scan(neuron.core, inputs, states, strict=True).outputs


def eager(neuron: Neuron) -> Run:
    return lambda inputs, states: flexsn.scan(neuron.core, inputs, states, backend="torch").outputs


def torch_scan(neuron: Neuron, mode: str) -> Run:
    """PyTorch's own scan operator, compiled. Its backward refuses bodies that return what they were given ("scan might be
    aliasing the input or the output"), so for training the body clones operands and results; the compiler fuses these away.
    """
    from torch._higher_order_ops.scan import scan

    own = (lambda ts: [t.clone() for t in ts]) if mode == "training" else list

    def body(carry, step):
        returned = own(neuron.core(*own(step), *own(carry)))
        return returned[neuron.outputs :], returned[: neuron.outputs]

    def run(inputs, states):
        return tuple(scan(body, states, inputs)[1])

    return torch.compile(run, fullgraph=True, dynamic=False)


def sj_flexsn(neuron: Neuron) -> Run:
    layer = sj_neuron.FlexSN(neuron.core, num_states=len(neuron.rest))

    def run(inputs, states):
        return layer.multi_step_functional_forward(tuple(inputs), tuple(states), static_inputs=())[0]

    return run


def sj_lifnode(neuron: Neuron) -> Run:
    surrogate = {"atan": sj_surrogate.ATan(alpha=2.0), "sigmoid": sj_surrogate.Sigmoid(alpha=4.0)}[neuron.lif]
    settings = {}
    if "backend" in inspect.signature(sj_neuron.LIFNode).parameters:  # gone from 2.0.0
        settings["backend"] = "cupy"
        numpy.int = int  # type: ignore[attr-defined]  # which it still uses
    layer = sj_neuron.LIFNode(
        tau=2.0, decay_input=True, v_threshold=1.0, v_reset=0.0, surrogate_function=surrogate, step_mode="m", **settings
    )  # fmt: skip

    def run(inputs, states):
        sj_functional.reset_net(layer)
        return (layer(inputs[0]),)

    return run


def peers(neuron: Neuron, mode: str, T: int, *, unrolled_training: bool) -> list[Peer]:
    """Every candidate of a case, flexsn first."""
    found = [
        Peer("flexsn", fused(neuron)),
        Peer("flexsn_eager", eager(neuron)),
        Peer("hand_loop", hand_loop(neuron)),
        Peer("torch_scan", torch_scan(neuron, mode), compiles=True, note="body clones its operands" if mode == "training" else ""),
    ]
    absent = "" if spikingjelly else "SpikingJelly is not installed (benchmarks/setup.sh)"
    found.append(Peer("sj_flexsn", None if absent else sj_flexsn(neuron), missing=absent))
    if neuron.lif:
        if not absent and T > LONGEST_UNROLLED:
            absent = f"unrolls {T} steps: not compiled here"
        elif not absent and mode == "training" and not unrolled_training:
            absent = "compiles for minutes: --slow-peers"
        run = None if absent else torch.compile(sj_flexsn(neuron), dynamic=False)
        found.append(Peer("sj_flexsn_compiled", run, missing=absent, compiles=True, note="the time loop is unrolled"))
        absent = "" if spikingjelly else found[4].missing
        found.append(Peer("sj_lifnode", None if absent else sj_lifnode(neuron), missing=absent))
    return found


def timed(call: Callable[[], object]) -> tuple[object, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "flexsn", "spikingjelly", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
