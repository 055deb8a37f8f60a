"""What `FlexSN` was given, checked: counts, lists, flags and initial states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .._torch.tensors import broadcast_shapes
from ..errors import ArgumentError, OperandCountError, ReturnCountError, ShapeMismatchError
from .signature import core_name, not_a_tensor, positional_names

Start = float | Tensor | None
InitialStates = Sequence[Start] | Callable[..., Sequence[Start]]
Stateful = bool | Literal["detached"]


def as_tuple(name: str, values: Any, core: str) -> tuple[Any, ...]:
    """The argument `name` as a tuple; a tensor stands for a list of one."""
    if isinstance(values, Tensor):
        return (values,)
    if not (hasattr(values, "__len__") and hasattr(values, "__iter__")):
        raise ArgumentError(
            f"{name} must be a tuple or list, not {type(values).__name__}", core=core, hint=f"Write `{name}=(value,)`."
        )  # fmt: skip
    return tuple(values)


def output_examples(given: Any, num_outputs: int | None, core: str) -> tuple[Tensor, ...] | None:
    """`example_outputs` as a tuple, one tensor per output; None where it was not given."""
    if given is None:
        return None
    given = given if isinstance(given, bool) else as_tuple("example_outputs", given, core)
    if isinstance(given, bool) or not all(isinstance(y, Tensor) for y in given):
        raise ArgumentError(
            f"example_outputs must be a tensor per output, one step of it, not {given!r}", core=core,
            hint="It stands before `requires_grad` and what follows: pass those by name, as in `requires_grad=True`.",
        )  # fmt: skip
    if len(given) != num_outputs if num_outputs is not None else not given:
        wanted = "at least one output" if num_outputs is None else f"num_outputs={num_outputs}"
        raise OperandCountError(f"example_outputs has {len(given)} examples for {wanted}", core=core)
    return given


def check_output_examples(examples: Sequence[Tensor], outputs: Sequence[Tensor], core: str) -> None:
    """Whether the examples are as many, and of as many dims, as the outputs of a call turn out to be; sizes may change."""
    if len(examples) != len(outputs):
        raise ReturnCountError(f"returned {len(outputs)} outputs, and example_outputs has {len(examples)} examples", core=core)
    for k, (example, y) in enumerate(zip(examples, outputs, strict=True)):
        if example.dim() != y.dim() - 1:
            raise ShapeMismatchError(
                f"output {k} has steps of shape {list(y.shape[1:])}, and its example has shape {list(example.shape)}", core=core,
                hint="An example in `example_outputs` is one step, without T.",
            )  # fmt: skip


def without_outputs(n: int, core: str) -> ReturnCountError:
    """The error of a neuron whose core returns its `n` states alone."""
    return ReturnCountError(
        f"returned {n} values, and the last {n} are taken as the new states (num_states={n}): no output is left, and a neuron has nothing "
        "to return", core=core,
        hint="End the core with `return *outputs, *new_states`: a state may be an output too. For the states alone call "
        "`flexsn.scan(core, inputs, states, store_state_seqs=True)`.",
    )  # fmt: skip


def without_steps(
    examples: Sequence[Tensor], inputs: Sequence[Tensor], states: Sequence[Tensor | None], dtype: torch.dtype, core: str
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Outputs, final states and state sequences of a call at `T == 0`, from one-step examples of the outputs.

    Args:
        states: initial ones: what they end as. None stands for zeros of the shape of a step.
        dtype: what is floating has it.
    """
    shapes = [*(x.shape[1:] for x in inputs), *(v.shape for v in states if v is not None)]
    try:
        step = broadcast_shapes(*shapes)
    except RuntimeError:
        listed = ", ".join(str(list(s)) for s in shapes)
        raise ShapeMismatchError(f"the steps of inputs, and states, have shapes that do not broadcast: {listed}", core=core) from None
    like = inputs[0]
    outputs = [like.new_empty((0, *y.shape), dtype=dtype if y.is_floating_point() else y.dtype) for y in examples]
    finals = [like.new_zeros(step, dtype=dtype) if v is None else v.expand(step).clone() for v in states]
    return outputs, finals, [v.new_empty((0, *v.shape)) for v in finals]


def check_step_mode(step_mode: str, stateful: Stateful, core: str) -> None:
    """Whether a call takes a sequence or a step, and what it leaves to the next one."""
    if step_mode not in ("m", "s"):
        raise ArgumentError(f'step_mode must be "m" (multi-step) or "s" (single-step), not {step_mode!r}', core=core)
    if not isinstance(stateful, bool) and stateful != "detached":
        raise ArgumentError(f'stateful must be True, False or "detached", not {stateful!r}', core=core)
    if step_mode == "s" and not stateful:
        raise ArgumentError('step_mode="s" with stateful=False: every step would start anew', core=core)


def param_names(core: Callable[..., Any], params: Sequence[Any], first: int) -> list[str]:
    """What the core calls its params, from its argument `first` on, or `param_0`, `param_1`, ... if it does not say."""
    names = list(positional_names(core)[0][first : first + len(params)])
    names = names if len(names) == len(params) else [f"param_{k}" for k in range(len(params))]
    for name, param in zip(names, params, strict=True):
        if not isinstance(param, Tensor):
            raise not_a_tensor(f"param `{name}`", param, core_name(core))
    return names


def operand_counts(
    core: Callable[..., Any], num_inputs: int | None, num_states: int | None, num_params: int, examples: int | None
) -> tuple[int, int]:
    """How many inputs and states the core takes: as given, or what its signature leaves. An argument with a default is left to
    itself, unless params would otherwise leave no argument for an input.

    Args:
        examples: how many inputs and states together, where examples of them say so.
    """
    for name, count in (("num_inputs", num_inputs), ("num_states", num_states)):
        check_count(name, count, core_name(core))
    names, required, open_ended = positional_names(core)
    total = examples if examples is not None else None if open_ended else (required or len(names)) - num_params
    if num_states is None:
        if num_inputs is None or total is None:
            raise OperandCountError("num_states cannot be inferred; pass it", core=core_name(core))
        num_states = total - num_inputs
    if num_inputs is None:
        if total is None:
            raise OperandCountError("num_inputs cannot be inferred from `*args`; pass it", core=core_name(core))
        least = 0 if examples is not None else min(required, num_states + 1)  # params beyond fill arguments with defaults
        num_inputs = max(total, least) - num_states
    if examples is not None and examples != num_inputs + num_states:
        raise OperandCountError(
            f"example_inputs has {examples} examples for {num_inputs} inputs + {num_states} states", core=core_name(core)
        )  # fmt: skip
    fits = open_ended or examples is not None or num_inputs + num_states <= len(names) - num_params
    if num_inputs < 1 or num_states < 0 or not fits:
        raise OperandCountError(
            f"takes {', '.join(names)}: {num_inputs} inputs + {num_states} states + {num_params} params do not fit", core=core_name(core),
            hint=_fitting(names, required, num_params),
        )  # fmt: skip
    return num_inputs, num_states


def _fitting(names: Sequence[str], required: int, num_params: int) -> str | None:
    """Which counts of inputs and states a core takes beside its params."""
    least, most = max(1, required - num_params), len(names) - num_params
    if not names:
        return None
    if most < 1:
        return f"{num_params} params leave none of its {len(names)} arguments for an input."
    together = str(most) if least == most else f"{least} to {most}"
    return f"Arguments are inputs, then states, then params: pass `num_inputs=` (at least 1) and `num_states=`, {together} together."


def check_count(name: str, count: Any, core: str) -> None:
    if not isinstance(count, (int, type(None))) or isinstance(count, bool):
        raise ArgumentError(f"{name} must be an int, not {type(count).__name__}", core=core)
    if name == "num_outputs" and count is not None and count < 0:
        raise ArgumentError(f"num_outputs={count}: a core returns its outputs before its states, at least one", core=core)


def gradient_flags(flags: Any, num_inputs: int, num_states: int, core: str) -> tuple[bool, ...] | None:
    """`requires_grad` as one flag per input and state; None where it was not given."""
    if flags is None:
        return None
    if isinstance(flags, bool):
        return (flags,) * (num_inputs + num_states)
    if not (isinstance(flags, (tuple, list)) and all(isinstance(f, bool) for f in flags)):
        raise ArgumentError(f"requires_grad must be True, False or a list of these, one per input and state, not {flags!r}", core=core)
    if len(flags) != num_inputs + num_states:
        raise OperandCountError(f"requires_grad has {len(flags)} flags for {num_inputs} inputs + {num_states} states", core=core)
    return tuple(flags)


def checked_start(given: InitialStates | None, num_states: int, core: str) -> InitialStates | None:
    """`initial_states` as it was given; what a function returns is checked by `check_start` in every call."""
    if given is None or callable(given):
        return given
    if not isinstance(given, (list, tuple, Tensor)):
        raise ArgumentError(f"initial_states must be a list, one number or None for each state, not {given!r}", core=core)
    if len(given) != num_states or any(isinstance(v, Tensor) for v in given):
        raise OperandCountError(
            f"initial_states={given!r} does not fit {num_states} states: one number or None for each", core=core,
            hint="Tensors come from a function of the inputs: initial_states=lambda *inputs: [v0].",
        )  # fmt: skip
    check_start(given, "a number or None", core)
    return tuple(given)


def check_start(values: Any, wanted: str, core: str) -> None:
    """What the states start from: one entry per state, numbers, None and, from a function of the inputs, tensors."""
    if not isinstance(values, (list, tuple)):
        raise ArgumentError(f"initial_states returned {values!r}: it has to return a list, {wanted} for each state", core=core)
    for k, value in enumerate(values):
        number = hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0
        if not (value is None or number or isinstance(value, Tensor)):
            raise ArgumentError(f"initial_states has {value!r} for state {k}: it has to be {wanted}", core=core)


def wrong_call(core: str, sizes: tuple[int, int, int], given: int, named: Sequence[str]) -> OperandCountError:
    """Return the error of a neuron that is called with another number of inputs than it has, or with operands by name.

    Args:
        sizes: its inputs, states and params.
    """
    inputs, states, params = sizes
    if named:
        return OperandCountError(f"takes inputs by position, but was given {[*named]} by name", core=core)
    return OperandCountError(
        f"needs {inputs} inputs but was given {given}", core=core,
        hint=f"It was made with num_states={states} and {params} params; what is left of the core's arguments are inputs, unless "
        "`num_inputs=` says how many. Tensors that go to every step unchanged are listed in `params=`.",
    )  # fmt: skip
