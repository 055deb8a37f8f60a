"""`flexsn.convert`: the neurons of a SpikingJelly, snnTorch or Norse model as flexsn's, in place."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .._capture.signature import core_name
from ..errors import ArgumentError, InterchangeError
from ..module import FlexSN
from .swap import LeaveAlone, NoNeuron, check_plain

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
        no_gain: those of `replaced` that are called one step at a time, where a kernel saves nothing, and what would change that.
    """

    model: nn.Module
    replaced: list[Entry] = field(default_factory=list)
    left: list[Entry] = field(default_factory=list)
    no_gain: list[Entry] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"converted {len(self.replaced)} of {len(self.replaced) + len(self.left)} neurons"]
        parts += [str(entry) for entry in self.replaced]
        if self.left:
            parts += ["left alone", *map(str, self.left)]
        if self.no_gain:
            parts += ["nothing gained", *map(str, self.no_gain)]
        return "\n".join(parts)


def convert(model: nn.Module, *, backend: str = "auto", step_mode: str | None = None) -> Report:
    """Swap the neurons of a SpikingJelly, snnTorch or Norse model for flexsn ones, in place.

    Each is called, reset and detached as the neuron was, and computes the same: spikes are equal, gradients agree to rounding, and so do
    the sums of recurrent layers. Its `Parameter`s are the same objects (an optimizer goes on), now under `core.`; state dicts made before
    load. What is not known, or does not fuse, stays as it is. See docs/interchange.md for what each library's neurons become.

    Args:
        model: a network, or a neuron itself (its replacement is `report.model`).
        backend: as for `FlexSN`.
        step_mode: `"m"`: each neuron then takes sequences `[T, *shape]`; `"s"`: one step `[*shape]`. By default as before:
            SpikingJelly by the node's `step_mode`, snnTorch steps, Norse cells steps and layers sequences. What a container
            calls step by step (Norse's `Lift`, SpikingJelly's `MultiStepContainer`) is called so in any case.

    Raises:
        ArgumentError: `model` is no module, or another `step_mode`.
        InterchangeError: with `step_mode`, a neuron that stays as it is takes the other; nothing is changed then.
        TypeError: the model holds no neuron of any of these libraries.
    """
    _check_model(model)
    if step_mode not in (None, "s", "m"):
        raise ArgumentError(f'step_mode must be "s", "m" or None, not {step_mode!r}')
    peers = _peers()
    search = _Search(peers, backend, Report(model))
    search.look(model, "", step_mode)
    search.say_no_gain()
    if not (search.report.replaced or search.report.left):
        raise TypeError(f"{type(model).__name__} holds no neuron of {', '.join(_PEERS)}")
    for holder, name, child in search.places:
        if id(child) in search.made:
            setattr(holder, name, search.made[id(child)][1])
    search.report.model = search.made.get(id(model), (model, model))[1]
    for peer in peers:
        peer.finish(search.report.model, list(search.made.values()))
    return search.report


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ArgumentError(f"convert takes a model, not {what}", hint="Give it an `nn.Module`: `flexsn.convert(model)`.")


def _peers() -> list[Any]:
    """The converters of the libraries that are loaded: a model can hold neurons of no other."""
    return [importlib.import_module(f".{ours}", __package__) for name, ours in _PEERS.items() if name in sys.modules]


class _Search:
    """The neurons of a model and what they become; nothing is changed yet.

    Attributes:
        made: by the `id` of a neuron: the neuron and its replacement. One that is used in several places is converted once.
        places: every module with the one that holds it and its name there.
        stepped: neurons that are replaced and called step by step: place, old kind, what calls them so, and what would change that.
        waits: neurons that stay, and take single steps from the model.
    """

    def __init__(self, peers: list[Any], backend: str, report: Report):
        self.peers, self.backend, self.report = peers, backend, report
        self.made: dict[int, tuple[nn.Module, FlexSN]] = {}
        self.places: list[tuple[nn.Module, str, nn.Module]] = []
        self.seen: set[int] = set()
        self.stepped: list[tuple[str, str, str, str]] = []
        self.waits: list[str] = []

    def look(self, module: nn.Module, place: str, step_mode: str | None, caller: str = "") -> None:
        """`caller`: the container that calls it at every step, if one does."""
        if id(module) in self.seen or isinstance(module, FlexSN):
            return
        self.seen.add(id(module))
        peer = next((p for p in self.peers if p.is_neuron(module)), None)
        if peer is not None and self.swap(module, place or "(the model)", peer, step_mode, caller):
            return
        if any(p.loops(module) for p in self.peers):  # what it holds is called step by step, whatever it takes itself
            step_mode, caller = None, f"`{place or '(the model)'}` ({type(module).__name__})"
        for name, child in [(n, c) for n, c in module._modules.items() if c is not None]:  # named_children() drops repeats
            self.places.append((module, name, child))
            self.look(child, f"{place}.{name}" if place else name, step_mode, caller)

    def swap(self, module: nn.Module, place: str, peer: Any, step_mode: str | None, caller: str) -> bool:
        before = type(module).__name__
        try:
            check_plain(module)
            made = peer.replace(module, self.backend, step_mode)
        except LeaveAlone as reason:
            entry = Entry(place, before, str(reason))
            if step_mode not in (None, peer.takes(module)):
                raise _stays(entry, peer.takes(module), step_mode) from None
            if not isinstance(reason, NoNeuron):
                self.report.left.append(entry)
                self.waits += [f"`{place}` ({before})"] if peer.takes(module) == "s" and not caller else []
            return False
        if made.step_mode == "s":
            self.stepped.append((place, before, caller, peer.SEQUENCES))
        self.report.replaced.append(Entry(place, before, _summary(made)))
        self.made[id(module)] = module, made
        return True

    def say_no_gain(self) -> None:
        """One sentence per neuron whose kernel runs over one step."""
        for place, before, caller, advice in self.stepped:
            if not caller and self.waits:
                advice = f"{self.waits[0]} stays as it is and takes single steps, so the model is called step by step"
            why = f"{caller} calls it step by step" if caller else advice
            self.report.no_gain.append(Entry(place, before, f"a kernel over one step saves nothing: {why}"))


def _summary(neuron: FlexSN) -> str:
    spans = {"s": "one step per call", "m": "whole sequences"}[neuron.step_mode]
    return f"FlexSN, core {core_name(neuron.core)}, {spans}"


def _stays(entry: Entry, takes: str, asked: str | None) -> InterchangeError:
    words = {"s": "single steps", "m": "whole sequences"}
    return InterchangeError(
        f"`{entry.place}` ({entry.before}) stays as it is, and takes {words[takes]}; step_mode={asked!r} is for models that take "
        f"{words[asked or takes]} throughout. It stays because: {entry.outcome}",
        hint="Nothing was changed. Convert without `step_mode`, and call the model as before; or convert the parts around this neuron. "
        "(A neuron of SpikingJelly has a `step_mode` of its own that can be set first.)",
    )
