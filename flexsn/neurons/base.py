"""`Neuron`: a core with named constants as a module."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, ShapeMismatchError
from ..module import FlexSN, InitialStates
from ..signature import positional_names

Argument = float | int | bool | str | None | Tensor | Callable[..., Any]


class Neuron(FlexSN):
    """A neuron of the zoo: a `FlexSN` whose core is a function of this package with its constants filled in.

    A subclass names its core, `class LIF(Neuron, core=lif, start=("v_leak",))`, and takes the constants of that core, by
    its names and with its defaults. A number is a constant of the kernel; a tensor broadcasts to one step `[*shape]` as
    PyTorch broadcasts, and is a parameter or a buffer of the module. All of them are attributes: `neuron.tau`,
    `neuron.v_threshold = 0.5`.

    Args:
        learn: names of the arguments that are learned: each becomes an `nn.Parameter`, a scalar unless `per_channel`.
        learn_tau: learn every argument whose name begins with `tau`.
        per_channel: number of channels `C`: what is learned, and every tensor given for an argument, is `[C]` and goes
            along dim 1 of a step, as in `nn.BatchNorm2d`: inputs are `[T, B, C, *]`, or `[T, C]`.
        initial_states: as that of `FlexSN`; by default every state starts where it rests (see the core).
        step_mode, backend, store_state_seqs, strict, tune: as those of `FlexSN`.
    """

    step: ClassVar[Callable[..., Any]]
    start: ClassVar[tuple[str | float | Callable[..., Any], ...]] = ()
    always: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(
        cls, core: Callable[..., Any] | None = None, start: Sequence[str | float | Callable[..., Any]] = (), always: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """`start`: for each state the name of the argument that it starts from, a number, or a function of the neuron;
        `always`: what is learned in any case."""
        super().__init_subclass__(**kwargs)
        if core is None:
            return
        cls.step, cls.start, cls.always = staticmethod(core), tuple(start), tuple(always)
        given = [p for p in inspect.signature(core).parameters.values() if p.default is not p.empty]
        cls.defaults = {p.name: p.default for p in given}
        options = [p for p in inspect.signature(Neuron.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
        if "__init__" not in vars(cls):
            cls.__signature__ = inspect.Signature([*given, *options])  # type: ignore[attr-defined]  # what `inspect` asks for
        for name in cls.defaults:
            setattr(cls, name, property(functools.partial(_get, name=name), functools.partial(_set, name=name)))

    def __init__(
        self, *args: Argument, learn: Sequence[str] = (), learn_tau: bool = False, per_channel: int | None = None,
        initial_states: InitialStates | None = None, step_mode: str = "m", backend: str = "auto", store_state_seqs: bool = False,
        strict: bool = False, tune: bool = False, **kwargs: Argument,
    ):  # fmt: skip
        cls = type(self)
        values = self._arguments(args, kwargs)
        learn = (learn,) if isinstance(learn, str) else learn
        if learn_tau and not any(n.startswith("tau") for n in values):
            raise ArgumentError(f"{cls.__name__} has no time constant `tau` to learn; its arguments are {', '.join(values)}")
        learned = {*learn, *cls.always, *(n for n in values if learn_tau and n.startswith("tau"))}
        if unknown := learned - values.keys():
            raise ArgumentError(f"{cls.__name__} cannot learn {sorted(unknown)}; its arguments are {', '.join(values)}")
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
            store_state_seqs=store_state_seqs, strict=strict, tune=tune, initial_states=initial_states,
        )  # fmt: skip
        self.per_channel = per_channel

    def forward(self, *inputs: Tensor, **named: Any) -> Tensor | tuple[Tensor, ...]:
        if self.per_channel is not None:
            self._check_channels(inputs)
        return super().forward(*inputs, **named)

    def _check_channels(self, inputs: Sequence[Any]) -> None:
        for x in inputs:
            step = x.shape[self.step_mode == "m" :] if isinstance(x, Tensor) else ()
            if len(step) and step[min(1, len(step) - 1)] not in (self.per_channel, 1):
                raise ShapeMismatchError(
                    f"{type(self).__name__} has per_channel={self.per_channel}, but an input has steps of shape {list(step)}",
                    hint="Channels are dim 1 of a step: inputs are [T, B, C, *], or [T, C].",
                )

    def _arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every argument of the core by name: what was given, and the defaults of the rest."""
        cls = type(self)
        if unknown := kwargs.keys() - cls.defaults.keys():
            raise ArgumentError(f"{cls.__name__} has no argument {sorted(unknown)}; it takes {', '.join(cls.defaults)}")
        if len(args) > len(cls.defaults):
            raise ArgumentError(f"{cls.__name__} takes {len(cls.defaults)} arguments but was given {len(args)}")
        first = dict(zip(cls.defaults, args, strict=False))
        if twice := first.keys() & kwargs.keys():
            raise ArgumentError(f"{cls.__name__} was given {sorted(twice)} twice")
        values = cls.defaults | first | kwargs
        for name, value in values.items():
            _check(cls, name, value)
        return values

    @property
    def arguments(self) -> dict[str, Any]:
        """Every argument of the core by name, as it is now."""
        return {name: getattr(self, name) for name in type(self).defaults}

    @property
    def state_names(self) -> tuple[str, ...]:
        return positional_names(type(self).step)[0][self.num_inputs : self.num_inputs + self.num_states]

    def start_states(self, *inputs: Tensor) -> list[Tensor | None]:
        if self.initial_states is not None:
            return super().start_states(*inputs)
        values = [getattr(self, s) if isinstance(s, str) else s(self) if callable(s) else s for s in type(self).start]
        x = inputs[0] if self.step_mode == "s" else inputs[0][0] if inputs[0].shape[0] else inputs[0].new_empty(inputs[0].shape[1:])
        starts: list[Any] = [0.0 if v is None or isinstance(v, str) else v for v in values]
        for k, v in enumerate(starts):
            if isinstance(v, Tensor):
                starts[k] = (v if self.per_channel is None else _along(v, x)).to(self.start_dtype(*inputs))
        return self.filled(starts, inputs)

    def extra_repr(self) -> str:
        shown = {n: v for n, v in self.arguments.items() if n in ("tau", "v_threshold", "v_reset") or v is not type(self).defaults[n]}
        return ", ".join([*(f"{n}={_shown(v)}" for n, v in shown.items()), f"step_mode={self.step_mode!r}", f"backend={self.backend!r}"])


def _get(neuron: Neuron, name: str) -> Any:
    if name in neuron._names:  # a tensor or module, which the module holds
        return getattr(neuron.captured, neuron._names[name])
    return neuron.core.keywords[name]  # type: ignore[attr-defined]  # the core is a partial


def _set(neuron: Neuron, value: Any, name: str) -> None:
    if name in neuron._names:
        raise AttributeError(
            f"`{name}` is a tensor of this neuron: write into it under torch.no_grad(), {name}.copy_(...), or make another neuron"
        )
    _check(type(neuron), name, value)
    if isinstance(value, (Tensor, nn.Module)):
        raise AttributeError(f"`{name}` is a constant of this neuron: make another neuron to give it a tensor or a module")
    core: Any = neuron.core
    neuron.core = functools.partial(core.func, **(core.keywords | {name: value}))


def _check(cls: type[Neuron], name: str, value: Any) -> None:
    """Refuse what an argument cannot be, by what its default is."""
    default, number = cls.defaults[name], isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, bool):
        wanted = None if isinstance(value, bool) else "True or False"
    elif callable(default):
        wanted = None if callable(value) and not isinstance(value, Tensor) else "a function, such as flexsn.surrogate.atan"
    elif name == "v_reset":
        wanted = None if number or isinstance(value, Tensor) or value in (None, "never") else 'a number, a tensor, None or "never"'
    elif isinstance(default, (int, float)):
        wanted = None if isinstance(value, Tensor) or (number and value == value) else "a number or a tensor"
    else:
        wanted = None
    if wanted is not None:
        raise ArgumentError(f"{cls.__name__}: {name} must be {wanted}, not {value!r}")
    if name.startswith("tau") and number and value <= 0:
        raise ArgumentError(f"{cls.__name__}: {name} must be positive (it is in steps), not {value}")


def _value(name: str, value: Any, learned: bool, channels: int | None) -> Any:
    """An argument as the core takes it: a constant, a buffer, or a parameter."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if learned and not (number or isinstance(value, Tensor)):
        raise ArgumentError(f"{name}={value!r} is not a number, so it cannot be learned")
    if not learned and not isinstance(value, Tensor):
        return value
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
    if channels is not None and tensor.dim() == 0:
        tensor = tensor.detach().expand(channels).clone()
    if channels is not None and tensor.shape != (channels,):
        raise ArgumentError(f"{name} has shape {list(tensor.shape)}; per_channel={channels} takes a number or a tensor [{channels}]")
    return nn.Parameter(tensor.detach().clone()) if learned and not isinstance(tensor, nn.Parameter) else tensor


def _along(value: Tensor, x: Tensor) -> Tensor:
    """`[C]` as it lies along dim 1 of a step `x` `[B, C, *]`"""
    return value.view(-1, *[1] * max(0, x.dim() - 2))


class ByChannel:
    """A core, with tensors among its keyword arguments laid along dim 1 of a step."""

    def __init__(self, core: Callable[..., Any]):
        self.__wrapped__, self.__name__ = core, core.__name__  # whose signature `inspect` shows

    def __call__(self, *operands: Tensor, **arguments: Any) -> Any:
        laid = {n: _along(v, operands[0]) if isinstance(v, Tensor) else v for n, v in arguments.items()}
        return self.__wrapped__(*operands, **laid)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = "learned" if isinstance(value, nn.Parameter) else "tensor"
        return f"{value.item():.4g} ({kind})" if value.dim() == 0 else f"{list(value.shape)} ({kind})"
    if isinstance(value, functools.partial):
        return f"{_shown(value.func)}({', '.join(f'{n}={_shown(v)}' for n, v in value.keywords.items())})"
    return getattr(value, "__name__", None) or repr(value)
