"""`flexsn.convert`: the neurons of a SpikingJelly, snnTorch or Norse model as flexsn's, in place."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..module import FlexSN
from .swap import LeaveAlone

_PEERS = {"spikingjelly": "peer_spikingjelly", "snntorch": "peer_snntorch", "norse": "peer_norse"}


@dataclass(frozen=True)
class Entry:
    """One neuron: where it is, what it was, and what it became or why it stayed."""

    place: str
    before: str
    outcome: str

    def __str__(self) -> str:
        return f"  {self.place:<24} {self.before:<20} {self.outcome}"


@dataclass
class Report:
    """What `convert` did; print it.

    Attributes:
        model: the converted model: the one that was given, or its replacement if it was a neuron itself.
        replaced, left: neurons converted, and neurons left alone, with the reason.
    """

    model: nn.Module
    replaced: list[Entry] = field(default_factory=list)
    left: list[Entry] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"converted {len(self.replaced)} of {len(self.replaced) + len(self.left)} neurons"]
        parts += [str(entry) for entry in self.replaced]
        if self.left:
            parts += ["left alone", *map(str, self.left)]
        return "\n".join(parts)


def convert(model: nn.Module, *, backend: str = "auto", step_mode: str | None = None) -> Report:
    """Swap the neurons of a SpikingJelly, snnTorch or Norse model for flexsn ones, in place.

    Each is called, reset and detached as the neuron was, and computes the same: spikes are equal, gradients agree to
    rounding. Its `Parameter`s are the same objects (an optimizer goes on), now under `core.`; state dicts made before load.
    What is not known, or does not fuse, stays as it is. See docs/interchange.md for what each library's neurons become.

    Args:
        model: a network, or a neuron itself (its replacement is `report.model`).
        backend: as for `FlexSN`.
        step_mode: `"m"`: each neuron then takes sequences `[T, *shape]`; `"s"`: one step `[*shape]`. By default as before:
            SpikingJelly by the node's `step_mode`, snnTorch steps, Norse cells steps and layers sequences.

    Raises:
        TypeError: the model holds no neuron of any of these libraries.
        ValueError: another `step_mode`.
    """
    if step_mode not in (None, "s", "m"):
        raise ValueError(f'step_mode must be "s", "m" or None, not {step_mode!r}')
    report = Report(model)
    peers = _peers()
    done: dict[int, nn.Module] = {}
    report.model = _walk(model, "", report, peers, done, backend, step_mode)
    if not (report.replaced or report.left):
        raise TypeError(f"{type(model).__name__} holds no neuron of {', '.join(_PEERS)}")
    for peer in peers:
        peer.finish(report.model)
    return report


def _peers() -> list[Any]:
    """The converters of the libraries that are loaded: a model can hold neurons of no other."""
    return [importlib.import_module(f".{ours}", __package__) for name, ours in _PEERS.items() if name in sys.modules]


def _walk(module: nn.Module, place: str, report: Report, peers: list[Any], done: dict[int, nn.Module], *options: Any) -> nn.Module:
    """The module to stand in this place. A module that is used in several places is converted once."""
    if id(module) in done or isinstance(module, FlexSN):
        return done.get(id(module), module)
    done[id(module)] = module
    peer = next((p for p in peers if p.is_neuron(module)), None)
    if peer is not None:
        made = _swap(module, place or "(the model)", report, peer, *options)
        if made is not None:
            done[id(module)] = made
            return made
    for name, child in [(n, c) for n, c in module._modules.items() if c is not None]:  # named_children() drops repeats
        new = _walk(child, f"{place}.{name}" if place else name, report, peers, done, *options)
        if new is not child:
            setattr(module, name, new)
    return module


def _swap(module: nn.Module, place: str, report: Report, peer: Any, backend: str, step_mode: str | None) -> nn.Module | None:
    before = type(module).__name__
    try:
        if any(getattr(module, name) for name in _HOOKS):
            raise LeaveAlone("has hooks, which would be lost; register them after the conversion")
        made = peer.replace(module, backend, step_mode)
    except LeaveAlone as reason:
        report.left.append(Entry(place, before, str(reason)))
        return None
    report.replaced.append(Entry(place, before, made.summary()))
    return made


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
