"""What `flexsn bench` times: a few neurons, fused, in the eager loop, and as installed peers have them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from .._report import Report, explain
from .._report.measure import least_seconds
from .._runtime.backends import BACKENDS, backend_of
from ..errors import FlexSNError
from ..scan import scan
from ..surrogate import atan

Run = Callable[[Tensor], Tensor]


def lif(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = v + (x - v) / 2.0
    s = atan(h - 1.0)
    return s, h * (1.0 - s)


def _adaptive(x: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = v * 0.9 + x * 0.1
    s = atan(h - 0.25 * (1.0 + a))
    return s, h * (1.0 - s), a * 0.95 + 0.2 * s


def _leaky(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    v = v + (x - v) * 0.05
    return v, v


NEURONS: dict[str, tuple[Callable[..., Any], int]] = {"lif": (lif, 1), "adaptive": (_adaptive, 2), "leaky": (_leaky, 1)}
AFFINE = {"leaky"}  # in their states: `exact=False` may walk parts of time side by side


@dataclass
class Candidate:
    """`run`: input `[T, *shape]` to spikes; None where it cannot be had, for the reason in `note`."""

    name: str
    run: Run | None
    note: str = ""


def compare(name: str, sizes: tuple[int, ...], device: torch.device, *, peers: bool) -> dict[str, Any]:
    """Time one neuron, inference and training, as every candidate has it.

    Raises:
        FlexSNError: the fused result is not that of the eager loop: then nothing is reported.
    """
    core, states = NEURONS[name]
    generator = torch.Generator().manual_seed(0)
    x = (2 * torch.rand(sizes, generator=generator)).to(device).requires_grad_()
    report = explain(core, x)
    assert isinstance(report, Report), "a core gives one report"
    candidates = [Candidate("flexsn", _scan(core, states, "auto")), Candidate("eager loop", _scan(core, states, "torch"))]
    if name in AFFINE:
        parts = BACKENDS[backend_of(device)].parallel_in_time.fit(sizes[0], math.prod(sizes[1:]))
        note = "walks parts of time side by side" if parts else "as exact=True here: there are too few steps, or too many neurons"
        candidates.append(Candidate("exact=False", _scan(core, states, "auto", exact=False), note))
    candidates += peers_of(name, device) if peers else []
    _check(candidates[0], candidates[1], x)
    return {"neuron": name, "modes": {mode: _mode(mode, report, candidates, x) for mode in ("inference", "training")}}


def _scan(core: Callable[..., Any], states: int, backend: str, exact: bool = True) -> Run:
    strict = backend == "auto"
    return lambda x: scan(core, (x,), (None,) * states, backend=backend, strict=strict, exact=exact).outputs[0]


def _check(fused: Candidate, eager: Candidate, x: Tensor) -> None:
    assert fused.run is not None and eager.run is not None, "both are flexsn's own"
    got, want = fused.run(x), eager.run(x)
    (dx,), (dw,) = (torch.autograd.grad(y, x, torch.ones_like(y)) for y in (got, want))
    if not torch.equal(got, want) or not torch.allclose(dx, dw, rtol=1e-4, atol=1e-5):
        raise FlexSNError("the fused result is not that of the eager loop: not timed", hint="Run `flexsn doctor`, and report this.")


def _mode(mode: str, report: Report, candidates: list[Candidate], x: Tensor) -> dict[str, Any]:
    passes = [report.passes[p] for p in (("inference",) if mode == "inference" else ("forward", "backward"))]
    bound = sum(p.bound_s or 0.0 for p in passes)
    return {
        "bytes_per_neuron_step": sum(p.bytes_per_neuron_step for p in passes),
        "operations_per_neuron_step": sum(p.operations_per_neuron_step for p in passes),
        "bound_s": bound,
        "copy_rate": sum(p.bytes_moved for p in passes) / bound,
        "candidates": [{"name": c.name, "seconds": _time(mode, c.run, x) if c.run else None, "note": c.note} for c in candidates],
    }


def _time(mode: str, run: Run, x: Tensor) -> float:
    if mode == "inference":
        with torch.no_grad():
            return least_seconds(lambda: run(x), x.device)
    ones = torch.ones_like(run(x))
    return least_seconds(lambda: torch.autograd.grad(run(x), x, ones), x.device)


# --- peers ----------------------------------------------------------------------------------------------------------------------------
def peers_of(name: str, device: torch.device) -> list[Candidate]:
    """The same sort of neuron in the libraries that are installed; each with its own equations, so only its time is shown."""
    if name != "lif":
        return []
    found = []
    for package, make in (("spikingjelly", _spikingjelly), ("snntorch", _snntorch), ("norse", _norse)):
        try:
            version = metadata.version(package)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # theirs, while they are imported
                found.append(make(f"{package} {version}", device))
        except metadata.PackageNotFoundError:
            continue
        except Exception as error:  # whatever a peer raises: it is reported, and the others are timed
            found.append(Candidate(package, None, f"{type(error).__name__}: {error}"))
    return found


def _spikingjelly(title: str, device: torch.device) -> Candidate:
    from spikingjelly.activation_based import neuron, surrogate

    layer = neuron.LIFNode(tau=2.0, surrogate_function=surrogate.ATan(), step_mode="m").to(device)

    def run(x: Tensor) -> Tensor:
        layer.reset()
        return layer(x)

    return Candidate(title, run, "LIFNode, the same equations")


def _snntorch(title: str, device: torch.device) -> Candidate:
    import snntorch

    layer = snntorch.Leaky(beta=0.5, reset_mechanism="zero").to(device)

    def run(x: Tensor) -> Tensor:
        state, spikes = layer.init_leaky().to(device), []
        for step in x.unbind(0):
            spike, state = layer(step, state)
            spikes.append(spike)
        return torch.stack(spikes)

    return Candidate(title, run, "Leaky, its own equations")


def _norse(title: str, device: torch.device) -> Candidate:
    import norse.torch

    layer = norse.torch.LIF().to(device)
    return Candidate(title, lambda x: layer(x)[0], "LIF, its own equations (two states)")
