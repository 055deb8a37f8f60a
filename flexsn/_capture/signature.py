"""How many inputs, states, outputs and params a core has; every check of operands and returns lives here."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._torch.tensors import broadcast_shapes, is_symbolic, size_hint
from ..errors import (
    ArgumentError,
    CoreError,
    DeviceMismatchError,
    FlexSNError,
    OperandCountError,
    OperandTypeError,
    ReturnCountError,
    ReturnTypeError,
    SequenceLengthError,
    ShapeMismatchError,
    StateMismatchError,
    TorchScriptError,
    UnsupportedDtypeError,
)

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
)  # fmt: skip
COMPLEX = (torch.complex64, torch.complex128)


BOOL_HINT = "Spikes as numbers: write `x.to(v.dtype)` for `x`."


@dataclass(frozen=True)
class Signature:
    """`core(*inputs, *states, *params) -> (*outputs, *new_states)`, in numbers and names."""

    core: str
    num_inputs: int
    num_states: int
    num_params: int
    names: tuple[str, ...]  # one per operand: inputs, then states, then params
    exact: bool = True  # whether its forward runs step after step, also where it need not

    @property
    def input_names(self) -> tuple[str, ...]:
        return self.names[: self.num_inputs]

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.names[self.num_inputs : self.num_inputs + self.num_states]

    @property
    def param_names(self) -> tuple[str, ...]:
        return self.names[self.num_inputs + self.num_states :]


def core_name(core: Callable) -> str:
    """The name by which messages and generated sources call the core."""
    while isinstance(core, functools.partial):
        core = core.func
    return getattr(core, "__name__", None) or type(core).__name__


def _parameters(core: Callable, wrapped: bool = True) -> list[inspect.Parameter] | None:
    """`wrapped`: of what a decorator's function passes its operands on to, where it does."""
    target = core.forward if isinstance(core, torch.nn.Module) else core
    try:
        own = inspect.signature(target, follow_wrapped=False).parameters.values()
        passes_on = any(p.kind is p.VAR_POSITIONAL for p in own)
        return list(inspect.signature(target).parameters.values() if passes_on and wrapped else own)
    except (TypeError, ValueError):  # a builtin without a signature takes whatever it takes
        return None


def _binds(core: Callable) -> bool:
    """Whether a decorator's function stands before the core, which may give it some arguments itself."""
    return _parameters(core) != _parameters(core, wrapped=False)


def positional_names(core: Callable) -> tuple[tuple[str, ...], int, bool]:
    """Names of the positional parameters, how many of them lack a default, and whether `*args` follows."""
    parameters = _parameters(core)
    if parameters is None:
        return (), 0, True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    return tuple(p.name for p in positional), required, any(p.kind is p.VAR_POSITIONAL for p in parameters)


def check_core(core: Any) -> None:
    """A core can be called with one step."""
    if not callable(core):
        raise ArgumentError(f"the core must be callable, not {type(core).__name__}", hint="Pass a function of one time step.")
    if isinstance(core, type) and issubclass(core, torch.nn.Module):
        raise ArgumentError("is a class, not a module", core=core_name(core), hint=f"Pass an instance: `{core_name(core)}()`.")
    if getattr(type(core), "runs_sequences", False):
        raise ArgumentError("is a FlexSN; a core is a function of one step", core=core_name(core), hint="Pass `neuron.core`.")


def torchscript_refused(core: Callable) -> TorchScriptError:
    return TorchScriptError(
        "is recorded by `torch.jit.trace`, which cannot hold a fused call", core=core_name(core),
        hint="Use `torch.export.export`; for ONNX `torch.onnx.export(flexsn.decompose(program), dynamo=True)` (docs/export.md).",
    )  # fmt: skip


def _check_keyword_only(core: Callable) -> None:
    missing = [f"`{p.name}`" for p in _parameters(core, wrapped=False) or () if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if missing:
        raise OperandCountError(
            f"has keyword-only arguments without a default: {', '.join(missing)}", core=core_name(core),
            hint="Operands are passed by position; bind the others with `functools.partial`.",
        )  # fmt: skip


def make_signature(core: Callable, num_inputs: int, num_states: int, num_params: int) -> Signature:
    """The signature of one call; raises `OperandCountError` where the core cannot take that many operands."""
    check_core(core)
    _check_keyword_only(core)
    names, required, open_ended = positional_names(core)
    given = num_inputs + num_states + num_params
    if num_inputs < 1:
        raise OperandCountError("at least one input sequence is needed", core=core_name(core))
    if (given < required or (given > len(names) and not open_ended)) and not _binds(core):
        takes = f"at least {required}" if open_ended else str(len(names) if required == len(names) else f"{required} to {len(names)}")
        raise OperandCountError(
            f"takes {takes} operands ({', '.join(names)}{', *args' if open_ended else ''}) but was given {given}: "
            f"{num_inputs} inputs + {num_states} states + {num_params} params",
            core=core_name(core),
        )
    filler = [f"arg{i}" for i in range(given)]
    return Signature(core_name(core), num_inputs, num_states, num_params, tuple(names[:given]) + tuple(filler[len(names) :]))


def check_operands(sig: Signature, inputs: Sequence[Tensor], states: Sequence[Tensor | None], params: Sequence[Tensor]) -> int:
    """Check kind, dtype, device and T of every operand; returns T."""
    kinds = [("input", n, t) for n, t in zip(sig.input_names, inputs, strict=True)]
    kinds += [("state", n, t) for n, t in zip(sig.state_names, states, strict=True) if t is not None]
    kinds += [("param", n, t) for n, t in zip(sig.param_names, params, strict=True)]
    device = inputs[0].device if isinstance(inputs[0], Tensor) else None
    for kind, name, tensor in kinds:
        if not isinstance(tensor, Tensor):
            raise not_a_tensor(f"{kind} `{name}`", tensor, sig.core)
        if refusal := not_dense(tensor):
            raise OperandTypeError(f"{kind} `{name}` must be a dense tensor, not {refusal[0]}", core=sig.core, hint=refusal[1])
        if tensor.dtype not in (*DTYPES, *COMPLEX):
            raise UnsupportedDtypeError(f"{kind} `{name}` has dtype {tensor.dtype}", core=sig.core, hint=dtype_hint(tensor.dtype))
        if tensor.device != device and not (kind == "param" and tensor.dim() == 0 and tensor.device.type == "cpu"):
            raise DeviceMismatchError(f"{kind} `{name}` is on {tensor.device} but input `{sig.names[0]}` is on {device}", core=sig.core)
    for name, x in zip(sig.input_names, inputs, strict=True):
        if x.dim() == 0:
            raise SequenceLengthError(f"input `{name}` is 0-dimensional; inputs are sequences of shape [T, *shape]", core=sig.core)
        if x.shape[0] != inputs[0].shape[0]:
            lengths = ", ".join(f"`{n}` has T = {t.shape[0]}" for n, t in zip(sig.input_names, inputs, strict=True))
            raise SequenceLengthError(f"input sequences differ in T (dimension 0): {lengths}", core=sig.core)
    return inputs[0].shape[0]


_OF_DTYPES = re.compile(r"(?i)d[_ ]?type|scalar ?type|not implemented for|float|double|half|\bbool|\bint\d+|\blong\b")


@contextlib.contextmanager
def noting_default_states(sig: Signature, states: Sequence[Any] | None, dtype: torch.dtype) -> Iterator[None]:
    """Add to an error of the core's own about dtypes, while it runs on zeros in place of states (None) that were not given, what
    these are.

    Args:
        states: as given; None once the zeros have taken what the core returns.
    """
    try:
        yield
    except Exception as error:  # whatever a core raises; raised again
        if isinstance(error, FlexSNError) and not isinstance(error, CoreError):
            raise
        names = ", ".join(f"`{name}`" for name, state in zip(sig.state_names, states or (), strict=False) if state is None)
        if names and _OF_DTYPES.search(error.reason if isinstance(error, CoreError) else str(error)):
            note = (
                f"flexsn: zeros of {str(dtype)[6:]}, the dtype of the first input, stand in place of {names}. Where the core needs "
                "another dtype, give a state: `states=(...)`, or `initial_states=lambda x: [torch.zeros(x.shape[1:], dtype=torch.bool)]`."
            )
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise


def broadcasts(small: Sequence[int], large: Sequence[int]) -> bool:
    """Whether `small` broadcasts to `large` and not further."""
    try:
        return broadcast_shapes(small, large) == tuple(large)
    except RuntimeError:
        return False


def step_shape(sig: Signature, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The broadcast shape of operands at one time step."""
    try:
        return broadcast_shapes(*shapes)
    except RuntimeError:
        hinted = [[size_hint(n) if is_symbolic(n) else n for n in s] for s in shapes]
        listed = ", ".join(f"`{n}` {s}" for n, s in zip(sig.names, hinted, strict=False))
        raise ShapeMismatchError(
            f"one-step shapes do not broadcast: {listed}", core=sig.core,
            hint="States carried over from a call of another shape need `reset()` first; a neuron at two places of a network carries the "
            "states of one to the other." if sig.num_states else None,
        ) from None  # fmt: skip


def loop_shape(sig: Signature, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ShapeMismatchError | None]:
    """Return the shape of one step of a loop, where some operands may have one dim more than others, an inner one, and the error that
    these do not broadcast; of others it is raised."""
    try:
        return step_shape(sig, shapes), None
    except ShapeMismatchError as error:
        most = max(map(len, shapes))
        if all(len(s) in (0, most) for s in shapes):
            raise
        try:
            return tuple(broadcast_shapes(*[s[:-1] if len(s) == most else s for s in shapes])), error
        except RuntimeError:
            raise error from None


def state_mismatch(sig: Signature, name: str, before: Any, after: Any, given: bool, line: str | None = None) -> StateMismatchError:
    """Of a state that changes its shape or dtype in a step.

    Args:
        given: whether the caller gave it, or an earlier call left it.
    """
    hint = "A state keeps its shape and dtype from step to step; start it as what the core returns, or convert inside the core."
    if given:
        hint += "\n  States carried over from a call of another dtype (autocast, another input) need `reset()` first."
    return StateMismatchError(f"state `{name}` goes in as {before} and comes back as {after}", core=sig.core, line=line, hint=hint)


_RETURN = "End the core with `return *outputs, *new_states`."
_LEAF = "A neuron is a leaf to `torch.fx`: override `is_leaf_module` of a `torch.fx.Tracer`, or use `torch.export.export`."
_AS_TENSOR = "Make it a tensor: `torch.as_tensor(value)`."
PADDED = "Pad it: `x, lengths = torch.nn.utils.rnn.pad_packed_sequence(packed)` gives a tensor [T, B, *]; what lies past a length is 0."


def not_a_tensor(what: str, value: Any, core: str) -> OperandTypeError:
    hints = ((type(None), "Only states may be None: zeros."), (torch.fx.Proxy, _LEAF), (PackedSequence, PADDED))
    hint = next((text for kind, text in hints if isinstance(value, kind)), _AS_TENSOR)
    return OperandTypeError(f"{what} must be a tensor, not {type(value).__name__}", core=core, hint=hint)


def not_dense(tensor: Tensor) -> tuple[str, str] | None:
    """What a tensor is that is not dense memory of numbers, and what to do about it."""
    if tensor.is_nested:
        return "a nested one", "Pad it: `torch.nested.to_padded_tensor(tensor, 0.0)`."
    if tensor.layout is not torch.strided:
        return str(tensor.layout), "Call `.to_dense()` on it first."
    if tensor.is_quantized:
        return "a quantised one", "Call `.dequantize()` on it first."
    return None


def dtype_hint(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "Convert it to complex64 or complex128."
    return f"Convert it to one of {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}."


def check_values(sig: Signature, values: Sequence[Tensor], device: torch.device) -> None:
    """What the core returned are dense tensors on the device of its operands."""
    for i, value in enumerate(values):
        if refusal := not_dense(value):
            raise ReturnTypeError(f"return value {i} must be a dense tensor, not {refusal[0]}", core=sig.core, hint=refusal[1])
        if value.dtype not in (*DTYPES, *COMPLEX):
            raise UnsupportedDtypeError(f"return value {i} has dtype {value.dtype}", core=sig.core, hint=dtype_hint(value.dtype))
        same = value.device == device or (value.device.type == device.type and device.index is None)  # "cuda": the current one
        if not same and not (value.dim() == 0 and value.device.type == "cpu"):
            raise DeviceMismatchError(f"return value {i} is on {value.device} but the operands are on {device}", core=sig.core)


def check_returns(sig: Signature, returned: Any, num_outputs: int | None) -> tuple[Tensor, ...]:
    """What the core returned, as a tuple of outputs + states."""
    values = (returned,) if isinstance(returned, Tensor) else returned
    if not isinstance(values, (tuple, list)):
        if inspect.iscoroutine(returned):
            returned.close()  # nobody will await it
        raise ReturnTypeError(f"returned {type(returned).__name__}, not a tensor or a tuple of tensors", core=sig.core, hint=_RETURN)
    for i, value in enumerate(values):
        if not isinstance(value, Tensor):
            hint = _RETURN if isinstance(value, (tuple, list, dict, type(None))) else _AS_TENSOR
            raise ReturnTypeError(f"return value {i} is {type(value).__name__}, not a tensor", core=sig.core, hint=hint)
    expected = None if num_outputs is None else num_outputs + sig.num_states
    if len(values) < sig.num_states or (expected is not None and len(values) != expected):
        wanted = f"{num_outputs} outputs + " if num_outputs is not None else ""
        raise ReturnCountError(
            f"returned {len(values)} values, expected {wanted}{sig.num_states} states"
            f"{f' ({expected})' if expected is not None else ' at the end'}",
            core=sig.core,
        )
    return tuple(values)
