"""`Neuron`: a core with named constants as a module."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .._capture.arguments import InitialStates, Stateful
from .._capture.signature import positional_names
from .._torch.transforms import is_plain
from ..errors import ArgumentError, ShapeMismatchError
from ..module import FlexSN
from .bounds import Bounded

_SHOWN = ("tau", "v_threshold", "v_reset")  # in the repr, whatever their values
Bounds = Mapping[str, tuple[float | None, float | None]]
Argument = float | int | bool | str | None | Tensor | Callable[..., Any]


class Options(TypedDict, total=False):
    """What every neuron takes by keyword beside the arguments of its core, for type checkers."""

    learn: Sequence[str]
    learn_tau: bool
    bounds: Bounds | None
    per_channel: int | None
    initial_states: InitialStates | None
    step_mode: str
    backend: str
    store_state_seqs: bool
    strict: bool
    exact: bool
    stateful: Stateful


class Neuron(FlexSN):
    """A neuron of the zoo: a `FlexSN` whose core is a function of this package with its constants filled in.

    A subclass names its core, `class LIF(Neuron, core=lif, start=("v_leak",))`, and takes the constants of that core, by its names and
    with its defaults. A number is an argument of the kernel; a tensor broadcasts to one step `[*shape]` as PyTorch broadcasts, and is a
    parameter or a buffer of the module. All of them are attributes: `neuron.tau`, `neuron.v_threshold = 0.5`.

    Args:
        learn: names of the arguments that are learned: each becomes an `nn.Parameter`, a scalar unless `per_channel`.
        learn_tau: learn every argument whose name begins with `tau`.
        bounds: `{"tau": (1.0, None)}`: between which numbers a learned argument stays, None for no bound (see `Bounded`).
        per_channel: number of channels `C`: what is learned, and every tensor given for an argument, is `[C]` and goes
            along dim 1 of a step, as in `nn.BatchNorm2d`: inputs are `[T, B, C, *]`, or `[T, C]`.
        initial_states: as that of `FlexSN`; by default every state starts where it rests (see the core).
        step_mode, backend, store_state_seqs, strict, exact, stateful: as those of `FlexSN`.
    """

    step: ClassVar[Callable[..., Any]]
    start: ClassVar[tuple[str | float | Callable[..., Any], ...]] = ()
    always: ClassVar[tuple[str, ...]] = ()
    never: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(
        cls, core: Callable[..., Any] | None = None, start: Sequence[str | float | Callable[..., Any]] = (), always: Sequence[str] = (),
        never: Sequence[str] = (), **kwargs: Any,
    ) -> None:  # fmt: skip
        """`start`: for each state the name of the argument that it starts from, a number, or a function of the neuron;
        `always`: what is learned in any case; `never`: what no spike's gradient reaches."""
        super().__init_subclass__(**kwargs)
        if core is None:
            return
        cls.step, cls.start, cls.always, cls.never = staticmethod(core), tuple(start), tuple(always), tuple(never)
        given = [p for p in inspect.signature(core).parameters.values() if p.default is not p.empty]
        cls.defaults = {p.name: p.default for p in given}
        options = [p for p in inspect.signature(Neuron.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
        if "__init__" in vars(cls):  # whose arguments stand for what is always learned
            own = [p for p in inspect.signature(cls.__init__).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
            given = [*own, *(p.replace(kind=p.KEYWORD_ONLY) for p in given if p.name not in cls.always)]
            options = [p.replace(default=True) if p.name == "learn_tau" else p for p in options]
        cls.__signature__ = inspect.Signature([*given, *options])  # type: ignore[attr-defined]  # what `inspect` asks for
        for name in cls.defaults:
            setattr(cls, name, _Attribute(functools.partial(_get, name=name), functools.partial(_set, name=name)))

    def __init__(
        self, *args: Argument, learn: Sequence[str] = (), learn_tau: bool = False, bounds: Bounds | None = None,
        per_channel: int | None = None, initial_states: InitialStates | None = None, step_mode: str = "m", backend: str = "auto",
        store_state_seqs: bool = False, strict: bool = False, exact: bool = True, stateful: Stateful = True, **kwargs: Argument,
    ):  # fmt: skip
        cls = type(self)
        values = self._arguments(args, kwargs)
        per_channel = _channel_count(cls, per_channel)
        learned = _learned(cls, values, learn, learn_tau)
        within = _within(cls, learned, bounds or {})
        values = {n: _value(f"{cls.__name__}: {n}", v, n in learned, per_channel) for n, v in values.items()}
        if per_channel is not None and not any(isinstance(v, Tensor) for v in values.values()):
            raise ArgumentError(
                f"{cls.__name__}: per_channel={per_channel}, but nothing is learned and no argument is a tensor; "
                f"name what differs from channel to channel, as in learn=('{next(iter(values))}',)"
            )
        step = cls.step if per_channel is None else ByChannel(cls.step)
        required = positional_names(cls.step)[1]
        super().__init__(
            functools.partial(step, **values), required - len(cls.start), len(cls.start), step_mode=step_mode, backend=backend,
            store_state_seqs=store_state_seqs, strict=strict, exact=exact, stateful=stateful, initial_states=initial_states,
        )  # fmt: skip
        self.per_channel = per_channel
        self._modules.update({n: v for n, v in values.items() if isinstance(v, nn.Module)})  # past `add_module`: properties have the names
        for name, bounded in within.items():
            parametrize.register_parametrization(self, name, bounded)

    def forward(self, *inputs: Tensor, **named: Any) -> Tensor | tuple[Tensor, ...]:
        if self.per_channel is not None:
            self._check_channels(inputs)
        for x in inputs:
            if isinstance(x, Tensor) and x.dtype is torch.bool:  # spikes, of which a neuron computes
                inputs = tuple([t.to(self.start_dtype(*inputs)) if isinstance(t, Tensor) and t.dtype is torch.bool else t for t in inputs])
                break
        return super().forward(*inputs, **named)

    def _check_channels(self, inputs: Sequence[Any]) -> None:
        has = f"{type(self).__name__} has per_channel={self.per_channel}, but"
        steps = [list(x.shape[not self._takes_one_step() :]) for x in inputs if isinstance(x, Tensor)]
        for step in steps:
            if step and step[min(1, len(step) - 1)] not in (self.per_channel, 1):
                hint = "Channels are dim 1 of a step: inputs are [T, B, C, *], or [T, C]."
                raise ShapeMismatchError(f"{has} an input has steps of shape {step}", hint=hint)
        if len({len(step) for step in steps}) > 1:
            hint = "Channels are dim 1 of every step: give all inputs as many dimensions, some of size 1."
            raise ShapeMismatchError(f"{has} inputs have steps of shapes {', '.join(map(str, steps))}", hint=hint)

    def _arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every argument of the core by name: what was given, and the defaults of the rest."""
        cls = type(self)
        if unknown := kwargs.keys() - cls.defaults.keys():
            hints = [_ELSEWHERE[name] for name in sorted(unknown) if name in _ELSEWHERE]
            raise ArgumentError(
                f"{cls.__name__} has no argument {sorted(unknown)}; it takes {', '.join(cls.defaults)}", hint=" ".join(hints) or None
            )
        if len(args) > len(cls.defaults):
            raise ArgumentError(f"{cls.__name__} takes {len(cls.defaults)} arguments but was given {len(args)}")
        first = dict(zip(cls.defaults, args, strict=False))
        if twice := first.keys() & kwargs.keys():
            raise ArgumentError(f"{cls.__name__} was given {sorted(twice)} twice")
        values = cls.defaults | first | kwargs
        values = {name: plain(value) for name, value in values.items()}
        for name, value in values.items():
            _check(cls, name, value)
        return values

    def __setattr__(self, name: str, value: Any) -> None:
        """Properties come first: `nn.Module` would register a parameter or a module under the name of an argument."""
        if name == "core" and getattr(value, "keywords", {}).keys() < type(self).defaults.keys():
            hint = "Make a neuron of the other one: `flexsn.FlexSN(core, num_states=...)`."
            raise ArgumentError(f"{type(self).__name__} has a core of its own, whose arguments are its attributes", hint=hint)
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def arguments(self) -> dict[str, Any]:
        """Every argument of the core by name, as it is now."""
        return {name: getattr(self, name) for name in type(self).defaults}

    @property
    def state_names(self) -> tuple[str, ...]:
        return positional_names(type(self).step)[0][self.num_inputs : self.num_inputs + self.num_states]

    def rest(self, *shape: Any) -> list[Tensor]:
        """Return the states that calls after `reset()` start from, for steps `[*shape]` (sizes, or a sequence of them): where the neuron
        rests, or what `initial_states` says (a function of the inputs is given zeros).

        Returns:
            One tensor `[*shape]` per state, in the order of `state_names`, in the dtype and on the device of the neuron's own tensors.
        """
        sizes = torch.Size(shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape)
        own = next(itertools.chain(self.parameters(), self.buffers()), None)
        x = (torch.zeros if own is None else own.new_zeros)(sizes if self.step_mode == "s" else (1, *sizes))
        starts, dtype = self.start_states(*[x] * self.num_inputs), self.start_dtype(x)
        return [x.new_zeros(sizes, dtype=dtype) if v is None else v.expand(sizes).clone() for v in starts]

    def start_states(self, *inputs: Tensor) -> list[Tensor | None]:
        if self.initial_states is not None:
            return super().start_states(*inputs)
        starts: list[Any] = []
        for start in type(self).start:
            value = getattr(self, start) if isinstance(start, str) else start(self) if callable(start) else start
            if isinstance(value, Tensor):
                dims = inputs[0].dim() - (self.step_mode == "m")
                value = (value if self.per_channel is None else _along(value, dims)).to(self.start_dtype(*inputs))
            starts.append(0.0 if value is None or isinstance(value, str) else value)
        return self.filled(starts, inputs)

    def extra_repr(self) -> str:
        usual = type(self).defaults
        shown = {n: v for n, v in self.arguments.items() if n in _SHOWN or isinstance(v, Tensor) or v != usual[n]}
        return ", ".join([*(f"{n}={_shown(v)}" for n, v in shown.items()), f"step_mode={self.step_mode!r}", f"backend={self.backend!r}"])


class _Attribute(property):
    """An argument as an attribute. A `__set__` in Python Dynamo follows; the setter of a plain `property` is called after the graph,
    which computes with the value from before (2.11)."""

    def __set__(self, neuron: Any, value: Any) -> None:
        if self.fset is None:
            raise AttributeError("can't set attribute")
        self.fset(neuron, value)


def _get(neuron: Neuron, name: str) -> Any:
    for table in (neuron._parameters, neuron._buffers, neuron.__dict__):  # the last: where pruning puts what it computes
        if name in table:
            return table[name]
    core: Any = neuron.core  # a partial
    value = core.keywords[name]
    if not isinstance(value, Tensor):
        return value
    if name in neuron._own:  # PyTorch takes it away, to put a parametrization in its place
        raise AttributeError(f"{type(neuron).__name__!r} object has no attribute {name!r}")
    return _registered(neuron, value)


def _registered(neuron: Neuron, tensor: Tensor) -> Tensor:
    """Return what the neuron holds in place of a tensor that was given under another name too."""
    seen = neuron.captured_values()
    return next((read() for path, read in seen.own.items() if seen.original(path) is tensor), tensor)


def _set(neuron: Neuron, value: Any, name: str) -> None:
    cls = type(neuron).__name__
    if name in neuron._own and name not in neuron._parameters and name not in neuron._buffers and isinstance(value, Tensor):
        neuron.__dict__[name] = value  # what a hook of pruning computes, before every call
        return
    tables: tuple[tuple[dict[str, Any], type], ...] = ((neuron._parameters, nn.Parameter), (neuron._buffers, Tensor))
    for table, kind in tables:  # as `load_state_dict(assign=True)` does
        if name in table and isinstance(value, kind):
            _check(type(neuron), name, value)
            table[name] = value
            return
    held = _get(neuron, name)
    if isinstance(held, nn.Module):
        raise ArgumentError(f"{cls}: `{name}` is a module of this neuron", hint="Make another neuron.")
    if isinstance(held, Tensor):
        hint = f"Write into it, `with torch.no_grad(): neuron.{name}.copy_(...)`, or make another neuron."
        raise ArgumentError(f"{cls}: `{name}` is a tensor of this neuron", hint=hint)
    if isinstance(value, (Tensor, nn.Module)):
        made = f'{cls}({name}=..., learn="{name}")' if isinstance(value, nn.Parameter) else f"{cls}({name}=...)"
        raise ArgumentError(f"{cls}: `{name}` is a constant of this neuron", hint=f"Make a neuron that has it from the start: `{made}`.")
    value = plain(value)
    _check(type(neuron), name, value)
    core: Any = neuron.core
    neuron.core = functools.partial(core.func, **(core.keywords | {name: value}))
    neuron.changes += 1


_ELSEWHERE = {  # what other libraries call arguments
    "beta": "A decay `beta` per step is `tau = 1 / (1 - beta)` here, which also divides inputs: `r=tau` undoes that.",
    "decay": "A decay per step is `tau = 1 / (1 - decay)` here, which also divides inputs: `r=tau` undoes that.",
    "tau_mem": "It is called `tau` here, in steps.",
    "threshold": "It is called `v_threshold` here.",
    "v_th": "It is called `v_threshold` here.",
    "reset_mechanism": '`v_reset=None` subtracts the threshold, a number sets the membrane to it, "never" does neither.',
    "spike_grad": "It is called `surrogate` here, a function such as `flexsn.surrogate.atan`.",
    "surrogate_function": "It is called `surrogate` here, a function such as `flexsn.surrogate.atan`.",
    "learn_beta": "Write `learn_tau=True`.",
    "init_hidden": "A neuron carries its states by itself; `stateful=False` has it start anew at every call.",
}


# --- what arguments may be -------------------------------------------------------------------------------------------------
def plain(value: Any) -> Any:
    """Scalars of numpy as those of Python."""
    if type(value) in (int, float) or isinstance(value, Tensor):  # Dynamo does not ask its symbolic numbers for `ndim`
        return value
    return value.item() if getattr(value, "ndim", None) == 0 else value


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _wanted(default: Any, name: str, value: Any) -> str | None:
    """What an argument has to be, by what its default is; None if it is."""
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "True or False"
    if callable(default):
        function = callable(value) and not isinstance(value, (Tensor, type))
        return None if function else "a function, such as flexsn.surrogate.atan"
    if is_number(value) or (isinstance(value, Tensor) and not value.is_complex()):
        return None
    if name == "v_reset":
        return None if value is None or (isinstance(value, str) and value == "never") else 'a number, a tensor, None or "never"'
    return "a number or a tensor"


def _check(cls: type[Neuron], name: str, value: Any) -> None:
    wanted = _wanted(cls.defaults[name], name, value)
    if wanted is not None:
        hint = f"Pass `torch.as_tensor({name}, dtype=torch.float32)`." if getattr(value, "ndim", 0) else None
        raise ArgumentError(f"{cls.__name__}: {name} must be {wanted}, not {value!r}", hint=hint)
    if name.startswith("tau") or name in _DIVISORS:
        least = smallest(value)
        if not least > 0:
            raise ArgumentError(f"{cls.__name__}: {name} must be positive{_DIVISORS.get(name, ' (it is in steps)')}, not {least:g}")
    if name in _GAINS and not smallest(value != 0):
        raise ArgumentError(f"{cls.__name__}: {name} must not be 0: the membrane would stay 0, and nothing would be learned")
    if name in cls.never and isinstance(value, Tensor) and value.requires_grad:
        _refuse_learned(cls, name)


_DIVISORS = {"tau_w": " (it is in ms)", "c_m": "", "delta_t": "", "dt": " (it is in ms)"}
_GAINS = ("k",)


def smallest(value: float | Tensor) -> float:
    """NaN if any is; of a tensor without values, 1."""
    if not isinstance(value, Tensor):
        return value
    if not (is_plain(value) and value.numel()):
        return 1.0
    return value.detach().amin().item()


def _refuse_learned(cls: type[Neuron], name: str) -> None:
    raise ArgumentError(f"{cls.__name__} cannot learn `{name}`: no spike has a gradient by it", hint="Choose it, as a number or a tensor.")


def _channel_count(cls: type[Neuron], channels: Any) -> int | None:
    channels = plain(channels)
    if channels is not None and (isinstance(channels, bool) or not isinstance(channels, int) or channels < 1):
        raise ArgumentError(f"{cls.__name__}: per_channel must be the number of channels, an int above 0, not {channels!r}")
    return channels


def _learned(cls: type[Neuron], values: dict[str, Any], learn: Any, learn_tau: bool) -> set[str]:
    """Names of the arguments that are learned."""
    learn = (learn,) if isinstance(learn, str) else learn
    if not isinstance(learn, (tuple, list, set, frozenset)) or not all(isinstance(n, str) for n in learn):
        raise ArgumentError(f"{cls.__name__}: learn must be names of arguments, as in learn=('{next(iter(values))}',), not {learn!r}")
    if learn_tau and not any(n.startswith("tau") for n in values):
        raise ArgumentError(f"{cls.__name__} has no time constant `tau` to learn; its arguments are {', '.join(values)}")
    learned = {*learn, *cls.always, *(n for n in values if learn_tau and n.startswith("tau"))}
    if unknown := learned - values.keys():
        raise ArgumentError(f"{cls.__name__} cannot learn {sorted(unknown)}; its arguments are {', '.join(values)}")
    for name in learned & {*cls.never}:
        _refuse_learned(cls, name)
    return learned


def _within(cls: type[Neuron], learned: set[str], bounds: Bounds) -> dict[str, Bounded]:
    """Parametrizations of learned arguments, by name."""
    if not isinstance(bounds, Mapping) or not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in bounds.values()):
        raise ArgumentError(f"{cls.__name__}: bounds must be pairs by name, as in bounds={{'tau': (1.0, None)}}, not {bounds!r}")
    if others := sorted(bounds.keys() - learned):
        raise ArgumentError(f"{cls.__name__}: bounds are of what is learned, and {others} are not", hint=f"Write `learn={tuple(others)}`.")
    return {name: Bounded(low, high) for name, (low, high) in bounds.items()}


def _value(name: str, value: Any, learned: bool, channels: int | None) -> Any:
    """An argument as the core takes it: a constant, a buffer, or a parameter."""
    if learned and not (is_number(value) or isinstance(value, Tensor)):
        raise ArgumentError(f"{name}={value!r} is not a number, so it cannot be learned")
    if not learned and not isinstance(value, Tensor):
        return value
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
    if learned and not tensor.is_floating_point():  # as an int is
        tensor = tensor.to(torch.get_default_dtype())
    if channels is not None and tensor.dim() == 0:
        tensor = tensor.detach().expand(channels).clone()
    if channels is not None and tensor.shape != (channels,):
        raise ArgumentError(f"{name} has shape {list(tensor.shape)}; per_channel={channels} takes a number or a tensor [{channels}]")
    return nn.Parameter(tensor.detach().clone()) if learned and not isinstance(tensor, nn.Parameter) else tensor


def _along(value: Tensor, dims: int) -> Tensor:
    """`[C]` as it lies along dim 1 of a step `[B, C, *]` of so many dims."""
    return value.view(-1, *[1] * max(0, dims - 2))


class ByChannel:
    """A core, with tensors among its keyword arguments laid along dim 1 of a step."""

    def __init__(self, core: Callable[..., Any]):
        self.__wrapped__, self.__name__ = core, core.__name__  # whose signature `inspect` shows

    def __call__(self, *operands: Tensor, **arguments: Any) -> Any:
        laid = {n: _along(v, operands[0].dim()) if isinstance(v, Tensor) else v for n, v in arguments.items()}
        return self.__wrapped__(*operands, **laid)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = "learned" if value.requires_grad else "tensor"  # a bounded one is no parameter itself
        return f"{value.item():.4g} ({kind})" if value.dim() == 0 else f"{list(value.shape)} ({kind})"
    if isinstance(value, functools.partial):
        return f"{_shown(value.func)}({', '.join(f'{n}={_shown(v)}' for n, v in value.keywords.items())})"
    return getattr(value, "__name__", None) or repr(value)
