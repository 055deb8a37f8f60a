"""`flexsn.monitor`: what the layers of a network do while it runs, recorded by hooks that leave it as it was."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import _compat
from .errors import MonitorError
from .module import FlexSN
from .signature import make_signature


@dataclass
class Limits:
    """From where on a layer is reported; rates are spikes per neuron and step."""

    silent: float = 1e-3  # a layer of a lower rate
    saturated: float = 0.9  # a layer of a higher rate, and a neuron that counts as saturated
    vanishing: float = 1e-3  # a gradient smaller than this times the largest one among the layers


@dataclass
class _Norm:
    """Root mean square, over calls, of a gradient's L2 norm; sums stay on the device until they are read."""

    squares: Any = 0.0
    calls: int = 0

    def add(self, grad: Tensor | None) -> None:
        if grad is None:  # the backward passed by: a later call reached back through the carried states alone
            return
        norm = torch.linalg.vector_norm(grad.detach(), dtype=torch.float64)
        self.squares, self.calls = self.squares + norm * norm, self.calls + 1

    def value(self) -> float | None:
        return math.sqrt(float(self.squares) / self.calls) if self.calls else None


@dataclass
class LayerRecord:
    """What one layer did.

    Of its output, or of the first where there are several, dims 0 and 1 are time and batch; what is left are its neurons.
    An output of two dims has no batch, or, from a layer in step mode `"s"`, no time.

    Attributes:
        name: as in `model.named_modules()`; `kind`: the class.
        calls: how often it was called.
        spikes, states: the whole sequences of the last `keep` calls, detached copies, if asked for: a list, and a dict of
            lists by the name of the state.
    """

    name: str
    kind: str
    limits: Limits
    calls: int = 0
    spikes: Any = None
    states: dict[str, Any] = field(default_factory=dict)
    _total: Any = 0.0
    _count: int = 0
    _counts: Any = 0.0  # spikes per neuron; None once calls differ in their shape
    _binary: Any = True
    _output: _Norm = field(default_factory=_Norm)
    _params: dict[str, _Norm] = field(default_factory=dict)

    # --- read -------------------------------------------------------------------------------------------------------
    @property
    def rate(self) -> float | None:
        """Mean of the output: spikes per neuron and step; None before the first call."""
        return float(self._total) / self._count if self._count else None

    @property
    def rates(self) -> Tensor | None:
        """Mean of every neuron `[*shape]`, float64; None before the first call and where calls differ in shape."""
        return self._counts / (self._count / self._counts.numel()) if isinstance(self._counts, Tensor) and self._count else None

    @property
    def spiking(self) -> bool:
        """Whether every output was 0 or 1."""
        return bool(self._binary)

    @property
    def silent(self) -> float | None:
        """Fraction of neurons that never gave anything but 0."""
        return None if self.rates is None else float((self.rates == 0).double().mean())

    @property
    def saturated(self) -> float | None:
        """Fraction of neurons that spike at more than `limits.saturated` of all steps; None if they do not spike."""
        return None if self.rates is None or not self.spiking else float((self.rates > self.limits.saturated).double().mean())

    @property
    def gradient_norm(self) -> float | None:
        """L2 norm of the loss' gradient by this layer's output (root mean square over calls); None if there was none."""
        return self._output.value()

    @property
    def param_gradient_norms(self) -> dict[str, float]:
        """The same by each parameter of the layer that got a gradient, by name (root mean square over backward passes)."""
        values = {name: norm.value() for name, norm in self._params.items()}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def param_gradient_norm(self) -> float | None:
        """The L2 norm over all of them; None if there was none."""
        norms = self.param_gradient_norms.values()
        return math.sqrt(sum(n * n for n in norms)) if norms else None

    # --- written by the hooks ---------------------------------------------------------------------------------------
    def see(self, output: Tensor, states: dict[str, Tensor]) -> None:
        """Count what a call returned."""
        y = output.detach()
        neurons = y.shape[min(2, max(0, y.dim() - 1)) :]
        counts = y.sum(dim=list(range(y.dim() - len(neurons))), dtype=torch.float64) if neurons != y.shape else y.double()
        self._counts = self._counts + counts if not self.calls or _shape(self._counts) == counts.shape else None
        self._total, self._count = self._total + counts.sum(), self._count + y.numel()
        self._binary = self._binary & ((y == 0) | (y == 1)).all()
        self.calls += 1
        if self.spikes is not None:
            self.spikes.append(y.clone())
        for name, sequence in states.items():
            self.states[name].append(sequence.detach().clone())
        if output.requires_grad:
            output.register_hook(self._output.add)


def _shape(counts: Any) -> torch.Size | None:
    return counts.shape if isinstance(counts, Tensor) else None


class _States(dict[str, Any]):
    """Sequences by the name of the state."""

    def __missing__(self, name: Any) -> Any:
        raise MonitorError(
            f"the state {name!r} was not kept", hint=f"Kept are {list(self)}; ask for it: `flexsn.monitor(model, states=[{name!r}])`."
        )


class Monitor:
    """A context manager that records; `flexsn.monitor` makes one. Print it for its report.

    Attributes:
        layers: `LayerRecord`s by name, in the order of `model.named_modules()`.
        limits: from where on a layer is reported; may be changed at any time.
    """

    def __init__(
        self, model: nn.Module, layers: Collection[str] | None, spikes: bool, states: bool | Collection[str], gradients: bool,
        keep: int | None,
    ):  # fmt: skip
        _check_model(model)
        self.limits, self.gradients, self.layers = Limits(), gradients, dict[str, LayerRecord]()
        self._modules, self._handles = _chosen(model, layers), list[Any]()
        self._stored: list[tuple[FlexSN, bool]] = []  # who is asked for its states, and whether it was before
        found: set[str] = set()
        for name, module in self._modules.items():
            record = LayerRecord(name, type(module).__name__, self.limits)
            names = _state_names(module) if states else ()
            wanted = names if states is True else [n for n in names if n in states]  # type: ignore[operator]  # no bool here
            record.spikes = deque(maxlen=keep) if spikes else None
            record.states = _States({n: deque(maxlen=keep) for n in wanted})
            found |= set(names)
            self.layers[name] = record
        missing = set() if isinstance(states, bool) else set(states) - found
        if missing or (states is True and not found):
            named = ", ".join(map(repr, sorted(missing, key=str))) if missing else "at all"
            raise MonitorError(f"no monitored layer has a state {named}", hint=f"There are {sorted(found)}, in {list(self.layers)}.")

    def __getitem__(self, name: str) -> LayerRecord:
        if name not in self.layers:
            raise MonitorError(f"layer {name!r} is not monitored", hint=f"These are: {list(self.layers)}.")
        return self.layers[name]

    def __iter__(self) -> Iterator[str]:
        """Names of the layers."""
        return iter(self.layers)

    def __enter__(self) -> Monitor:
        if self._handles:
            raise MonitorError("this monitor is on already", hint="Make another one, or leave its `with` first.")
        for name, module in self._modules.items():
            record = self.layers[name]
            self._handles.append(module.register_forward_hook(partial(_after_call, record)))
            if record.states and isinstance(module, FlexSN):
                self._stored.append((module, module.store_state_seqs))
                module.store_state_seqs = True
            if self.gradients:
                for key, param in module.named_parameters():
                    if param.requires_grad:
                        norm = record._params.setdefault(key, _Norm())
                        self._handles.append(param.register_hook(norm.add))
        return self

    def __exit__(self, *exception: Any) -> None:
        while self._handles:
            self._handles.pop().remove()
        while self._stored:
            neuron, before = self._stored.pop()
            neuron.store_state_seqs = before
            if not before:
                neuron.state_seqs = None

    # --- the report -------------------------------------------------------------------------------------------------
    @property
    def problems(self) -> list[str]:
        """What is wrong, one sentence each: layers that were not called, are silent or saturated, or get hardly any gradient."""
        records = list(self.layers.values())
        norms = [r.gradient_norm for r in records]
        largest = max((n for n in norms if n is not None), default=None)
        found = []
        for record, norm in zip(records, norms, strict=True):
            found += [_activity(record, self.limits), _flow(record, norm, largest, self.limits)]
        return [problem for problem in found if problem]

    def __str__(self) -> str:
        rows = [("layer", "class", "calls", "rate", "silent", "saturated", "|dL/dy|", "|dL/dw|")]
        for r in self.layers.values():
            numbers = _text(r.rate, ".4f"), _text(r.silent, ".0%"), _text(r.saturated, ".0%")
            norms = _text(r.gradient_norm, ".2e"), _text(r.param_gradient_norm, ".2e")
            rows.append((r.name or "(model)", r.kind, str(r.calls), *numbers, *norms))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [(*map(str.ljust, row[:2], widths), *map(str.rjust, row[2:], widths[2:])) for row in rows]
        return "\n".join([*("  ".join(line).rstrip() for line in lines), *(f"! {problem}" for problem in self.problems)])

    __repr__ = __str__


def monitor(
    model: nn.Module, layers: Collection[str] | None = None, *, spikes: bool = False, states: bool | Collection[str] = False,
    gradients: bool = True, keep: int | None = 1,
) -> Monitor:  # fmt: skip
    """Record what the layers of `model` do inside a `with`, leaving the model as it is.

    Args:
        layers: names as in `model.named_modules()`; by default every `FlexSN`.
        spikes: keep the outputs of the last `keep` calls whole; their sums are always kept.
        states: names of states of which every step of the last `keep` calls is kept (True: all). For that, while the `with`
            lasts, the neurons are asked to store state sequences, which takes the memory of these.
        gradients: record norms of the gradients by outputs and by parameters.
        keep: how many calls are kept whole; None keeps all.

    Returns:
        A `Monitor`, to be used in `with`: its `layers` (or `monitor["name"]`) are `LayerRecord`s, `problems` a list of
        sentences, and `print(monitor)` a table: `rate` in spikes per neuron and step, the fractions of neurons that never
        spike and that nearly always do, and gradient norms. Used again, it goes on counting.

    Raises:
        MonitorError: `layers` or `states` names something that is not there; there is no neuron; the model is compiled (its
            hooks would be: monitor the model that was given to `torch.compile`). A compiled function that calls the model
            breaks its graph there while the `with` lasts.
    """
    layers = (layers,) if isinstance(layers, str) else layers
    states = (states,) if isinstance(states, str) else states
    if layers is not None and (not isinstance(layers, Collection) or not layers):
        raise MonitorError(f"`layers` must be names as in `model.named_modules()`, not {layers!r}", hint="None takes every FlexSN.")
    if not isinstance(states, (bool, Collection)):
        raise MonitorError(f"`states` must be True, False or names of states, not {states!r}", hint='Write `states=["v"]`.')
    for name, flag in (("spikes", spikes), ("gradients", gradients)):
        if not isinstance(flag, bool):
            raise MonitorError(f"`{name}` must be True or False, not {flag!r}", hint="`layers=` says of which layers.")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise MonitorError(f"`keep` must be a number of calls, 1 or more, or None for all; not {keep!r}")
    return Monitor(model, layers, spikes, states, gradients, keep)


# --- parts -----------------------------------------------------------------------------------------------------------------
def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise MonitorError(f"a monitor looks into a model, not into {what}", hint="Give it an `nn.Module`: `flexsn.monitor(model)`.")
    if any(map(_compat.is_compiled, model.modules())):
        raise MonitorError("the model is compiled, hooks and all", hint="Monitor it before `torch.compile`, or a copy of it.")


def _chosen(model: nn.Module, layers: Collection[str] | None) -> dict[str, nn.Module]:
    named = dict(model.named_modules())
    if layers is None:
        layers = [name for name, module in named.items() if isinstance(module, FlexSN)]
        if not layers:
            known = ", ".join(map(repr, list(named)[1:])) or "'', the model itself"
            raise MonitorError("the model has no FlexSN", hint=f"Name the layers to look at, `layers=[...]`, of {known}.")
    for name in layers:
        if name not in named:
            near = get_close_matches(str(name), named, n=3) or list(named)[1:] or [""]
            raise MonitorError(f"the model has no layer {name!r}", hint=f"There are: {', '.join(map(repr, near))}.")
    return {name: module for name, module in named.items() if name in layers}


def _state_names(module: nn.Module) -> tuple[str, ...]:
    if not isinstance(module, FlexSN):
        return ()
    return make_signature(module.core, module.num_inputs, module.num_states, module.num_params).state_names


@_compat.unseen_by_dynamo
def _after_call(record: LayerRecord, module: nn.Module, inputs: Any, output: Any) -> None:
    """The forward hook."""
    if torch.compiler.is_dynamo_compiling():
        _compat.break_graph("flexsn.monitor keeps values: leave its `with` before compiling")
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, Tensor):
        raise MonitorError(f"{_name(record)} returns {type(first).__name__}, not a tensor", hint="Leave it out of `layers`.")
    if not _compat.is_plain(first):
        raise MonitorError(f"{_name(record)} runs under torch.func or in a trace: no values to keep", hint="Leave the `with` before.")
    sequences = zip(_state_names(module), module.state_seqs or (), strict=False) if isinstance(module, FlexSN) else ()
    record.see(first, {name: sequence for name, sequence in sequences if name in record.states})


def _activity(r: LayerRecord, limits: Limits) -> str | None:
    rate = r.rate
    if rate is None:
        return f"{_name(r)} was not called"
    if not math.isfinite(rate):
        return f"{_name(r)} gives values that are not finite"
    if not r.spiking:
        return None
    if rate < limits.silent:
        return f"{_name(r)} is silent: {rate:.2g} spikes per neuron and step; raise its weights or lower its threshold"
    if rate > limits.saturated:
        return f"{_name(r)} is saturated: {rate:.2g} spikes per neuron and step; lower its weights or raise its threshold"
    return None


def _flow(r: LayerRecord, norm: float | None, largest: float | None, limits: Limits) -> str | None:
    if largest is None or not r.calls:
        return None
    if norm is None:
        return f"no gradient reaches {_name(r)}"
    if not math.isfinite(norm):
        return f"the gradient at {_name(r)} is not finite"
    if norm == 0.0 or norm < limits.vanishing * largest:
        share = f"{norm / largest:.1e} of the largest" if largest else "0 everywhere"
        return f"the gradient vanishes before {_name(r)}: {norm:.2g}, {share}; widen the surrogate or bring membranes nearer to threshold"
    return None


def _name(record: LayerRecord) -> str:
    return f"layer {record.name}" if record.name else "the model"


def _text(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)
