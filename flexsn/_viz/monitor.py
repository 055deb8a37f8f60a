"""`flexsn.monitor`: what the layers of a network do while it runs, recorded by hooks that leave it as it was."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._capture.signature import make_signature
from .._over_time.walks import walking
from .._torch.autograd import current_backward
from .._torch.compiling import is_compiled, outside_dynamo, unseen_by_dynamo
from .._torch.transforms import is_plain
from ..errors import MonitorError
from ..module import FlexSN
from .monitor_record import LayerRecord, Limits, Norm, States

__all__ = ["LayerRecord", "Limits", "Monitor", "monitor"]


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
        self._model, self._modules, self._handles = model, _chosen(model, layers), list[Any]()
        self._asked: list[FlexSN] = []  # for their states
        self._watched: list[FlexSN] = []
        for name, module in self._modules.items():
            record = self.layers[name] = LayerRecord(name, type(module).__name__, self.limits)
            record.spikes = deque(maxlen=keep) if spikes else None
            record.states = States({n: deque(maxlen=keep) for n in _wanted(module, states)})
        _check_states_found(self._modules, self.layers, states)

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
        mode = _common_mode(self._model)
        for name, module in self._modules.items():
            record = self.layers[name]
            self._handles.append(module.register_forward_hook(_Hook(_after_call, record, mode)))
            if isinstance(module, FlexSN):
                module._watchers += 1
                self._watched.append(module)
            if record.states and isinstance(module, FlexSN):
                self._asked.append(module)
                _ask(module)
            if self.gradients:
                for key, param in module.named_parameters():
                    if param.requires_grad:
                        norm = record._params.setdefault(key, Norm())
                        self._handles.append(param.register_hook(norm.add))
        return self

    def __exit__(self, *exception: Any) -> None:
        while self._handles:
            self._handles.pop().remove()
        while self._watched:
            self._watched.pop()._watchers -= 1
        while self._asked:
            _release(self._asked.pop())

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
        states: names of states of which every step of the last `keep` calls is kept (True: all those of `FlexSN`s). For that,
            while the `with` lasts, the neurons are asked to store state sequences, which takes the memory of these. Of another
            layer (a node of SpikingJelly, a module of one's own) a name is that of an attribute, kept as it is after each call.
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
    if any(map(is_compiled, model.modules())):
        raise MonitorError("the model is compiled, hooks and all", hint="Monitor it before `torch.compile`, or a copy of it.")


def _chosen(model: nn.Module, layers: Collection[str] | None) -> dict[str, nn.Module]:
    named = dict(model.named_modules())
    if layers is None:
        held = {child for module in named.values() if isinstance(module, FlexSN) for child in module.children()}  # of a `Recurrent`
        layers = [name for name, module in named.items() if isinstance(module, FlexSN) and module not in held]
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
    names = getattr(module, "state_names", None)
    return names or make_signature(module.core, module.num_inputs, module.num_states, module.num_params).state_names


def _wanted(module: nn.Module, states: bool | Collection[str]) -> list[str]:
    """Which of the states that are asked for a layer has; one that is no `FlexSN` has them as attributes."""
    if isinstance(states, bool):
        return list(_state_names(module)) if states else []
    names = _state_names(module)
    return [n for n in states if n in names or (not isinstance(module, FlexSN) and _may_be_a_state(module, n))]


def _may_be_a_state(module: nn.Module, name: Any) -> bool:
    """A tensor, or what a module holds in its place before the first call."""
    value = getattr(module, name, "") if isinstance(name, str) else ""
    return value is None or (isinstance(value, (Tensor, int, float)) and not isinstance(value, bool))


def _check_states_found(modules: dict[str, nn.Module], records: dict[str, LayerRecord], states: bool | Collection[str]) -> None:
    kept = {n for record in records.values() for n in record.states}
    missing = set() if isinstance(states, bool) else set(states) - kept
    if missing or (states is True and not kept):
        named = ", ".join(map(repr, sorted(missing, key=str))) if missing else "at all"
        there = sorted({n for module in modules.values() for n in _state_names(module)})
        hint = f"There are {there}, in {list(modules)}."
        if states is True:
            hint += " Of a layer that is no FlexSN, name the attributes that are its states."
        raise MonitorError(f"no monitored layer has a state {named}", hint=hint)


def _ask(neuron: FlexSN) -> None:
    """Have it store the states of every step, for one monitor more."""
    count, before = neuron._asked or (0, neuron.store_state_seqs)
    neuron._asked = count + 1, before
    neuron.store_state_seqs = True


def _release(neuron: FlexSN) -> None:
    """For one monitor less; after the last it is as before the first."""
    count, before = neuron._asked or (1, neuron.store_state_seqs)
    neuron._asked = (count - 1, before) if count > 1 else None
    if count > 1:
        return
    neuron.store_state_seqs = before
    if not before:
        neuron.state_seqs = None


_MODES = {
    "snntorch.SpikingNeuron": "s", "norse.SNNCell": "s", "norse.SNNRecurrentCell": "s", "norse.SNN": "m", "norse.SNNRecurrent": "m"
}  # fmt: skip


def _mode(module: nn.Module) -> str | None:
    """`"s"` if a layer is called once per step, `"m"` if with sequences; None if it does not say."""
    mode = getattr(module, "step_mode", None)
    if mode in ("s", "m"):
        return mode
    bases = (f"{c.__module__.partition('.')[0]}.{c.__name__}" for c in type(module).__mro__)
    return next((_MODES[name] for name in bases if name in _MODES), None)


def _common_mode(model: nn.Module) -> str:
    """That of layers that do not say: single steps, if every layer that says takes these."""
    return "s" if {_mode(m) for m in model.modules()} - {None} == {"s"} else "m"


@outside_dynamo("flexsn.monitor keeps values: leave its `with` before compiling")
def _leave_graph() -> None:
    """End the graph that Dynamo traces: what follows runs as it is, or where there must be one graph, is an error."""


@unseen_by_dynamo
def _after_call(record: LayerRecord, common: str, module: nn.Module, inputs: Any, output: Any) -> None:
    """The forward hook."""
    if torch.compiler.is_dynamo_compiling():
        _leave_graph()
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, Tensor):
        raise MonitorError(f"{_name(record)} returns {type(first).__name__}, not a tensor", hint="Leave it out of `layers`.")
    if walking.now is not None:
        walking.now.watch(record, first, lambda whole: record.see(whole, _states_after_call(record, module, slice(None)), 2))
        return
    if not is_plain(first):
        raise MonitorError(f"{_name(record)} runs under torch.func or in a trace: no values to keep", hint="Leave the `with` before.")
    if current_backward() >= 0:  # an activation checkpoint runs the call again
        record.follow(first)
        return
    new = slice(-1 if getattr(module, "step_mode", "") == "s" else None, None)  # a converted node of SpikingJelly adds up single steps
    record.see(first, _states_after_call(record, module, new), 1 if (_mode(module) or common) == "s" else 2)


class _Hook(partial):
    """A monitor's forward hook. In copies and files it is one that does nothing: what runs there is none of the monitor's."""

    takes_steps = True  # of `over_time`, which shows it sequences

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


def _no_hook() -> Any:
    return _unwatched


def _unwatched(module: nn.Module, inputs: Any, output: Any) -> None:
    """Stands in a copy for the hook of a monitor."""


def watches(hook: Any) -> bool:
    """Whether a forward hook is a monitor's, or stands in a copy for one."""
    return isinstance(hook, _Hook) or hook is _unwatched


def _states_after_call(record: LayerRecord, module: nn.Module, new: slice) -> dict[str, Tensor]:
    if isinstance(module, FlexSN):
        sequences = zip(_state_names(module), module.state_seqs or (), strict=False)
        return {name: sequence[new] for name, sequence in sequences if name in record.states}
    found = {name: getattr(module, name) for name in record.states}
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise MonitorError(f"`{name}` of {_name(record)} is a {type(value).__name__} after a call, not a tensor")
    return found


def _activity(r: LayerRecord, limits: Limits) -> str | None:
    rate = r.rate
    if not r.calls:
        return f"{_name(r)} was not called"
    if rate is None:  # calls of no steps
        return None
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
    if largest is None or r.rate is None:
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
