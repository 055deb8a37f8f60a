"""Run multi-step kernels on tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._capture.signature import DTYPES
from .._ir.roles import Kind, Role, of_kind
from .._runtime.launch import Launch
from .._runtime.layout import narrow, rows, unbroadcast, widen
from ..errors import DeviceMismatchError, OperandCountError, OperandTypeError, SequenceLengthError, UnsupportedDtypeError
from .info import FlexSNInfo, Shape
from .kernels import StepKernel

ArrayMeta = tuple[Shape, torch.dtype]  # of a tensor that a call returns


def flexsn_inference(f: StepKernel, info: FlexSNInfo, *args: Tensor | None) -> tuple[Tensor, ...]:
    """Return outputs and states of every step.

    Args:
        f: a kernel of `get_flexsn_inference_kernel` or `build_inference_kernel`.
        args: input sequences `[T, *shape]`, then initial states `[*shape]`; states that are None or left out are zeros.
            Other dtypes than those the kernel was built for are cast to them.

    Returns:
        Output sequences, then state sequences, `[T, *shape]`; with `T == 0` they are empty.

    Raises:
        ValueError: operands that do not fit in number, T, shape or device, or a kernel of another kind.
    """
    return tuple(forward(f, info, args, "inference")[0])


def flexsn_inference_final_state(f: StepKernel, info: FlexSNInfo, *args: Tensor | None) -> tuple[Tensor, ...]:
    """Return output sequences `[T, *shape]`, then final states `[*shape]`, in the dtypes of the initial states.

    With `T == 0` the outputs are empty and the final states copies of the initial ones. Otherwise as `flexsn_inference`.
    """
    outputs, finals = forward(f, info, args, "inference_final_state")
    return (*outputs, *finals)


def flexsn_forward(f: StepKernel, info: FlexSNInfo, *args: Tensor | None) -> tuple[Tensor, ...]:
    """Return all that the kernel does, `[T, *shape]`: outputs, state sequences, intermediates. Otherwise as `flexsn_inference`."""
    return tuple(forward(f, info, args, "forward")[0])


def flexsn_backward(
    f: StepKernel, info: FlexSNInfo, *args: Tensor | None, input_templates: Sequence[Tensor] | None = None,
    state_templates: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return gradients of input sequences `[T, *shape]`, then of initial states `[*shape]`.

    Args:
        f: a kernel of `get_flexsn_backward_kernel` or `build_training_kernels`.
        args: cotangents of output sequences, then of state sequences, each possibly None; then what `flexsn_forward` saved,
            `[returns[i] for i in info.c2k_return_mapping]`.
        input_templates: tensors like the input sequences: their gradients take shape, dtype and device from them.
        state_templates: the same for the initial states. By default gradients follow the first cotangent of an output, and the
            state sequences' cotangents.

    Returns:
        The gradients; zeros if all cotangents are None or `T == 0`.

    Raises:
        ValueError: no template where one is needed (every cotangent that it would follow is None, or there are several inputs), a wrong
            number of templates, or operands that do not fit.
    """
    _expect(f, "backward")
    roles = info.cotangents(final=False)
    if len(args) != len(roles) + len(info.saved):
        raise OperandCountError(f"{len(args)} arguments for {len(roles)} cotangents and {len(info.saved)} saved tensors")
    grads = [_checked(t, "cotangent") for t in args[: len(roles)]]
    saved = [_required(t, "saved tensor") for t in args[len(roles) :]]
    outputs, sequences = grads[: info.num_outputs], grads[info.num_outputs :]
    inputs = _templates(input_templates, info.num_inputs, "input")
    if inputs is None:
        inputs = [g for g in outputs if g is not None][:1]
        if info.num_inputs > 1 or not inputs:
            raise OperandCountError(f"{info.num_inputs} inputs, or no cotangent of an output: `input_templates` are needed")
    states = _templates(state_templates, info.num_states, "state")
    if states is None:
        states = [g.new_empty(()).expand(g.shape[1:]) for g in sequences if g is not None and g.dim() > 0]
        if len(states) != info.num_states:
            raise OperandCountError("where a state sequence has no cotangent, `state_templates` are needed")
    return tuple(backward(f, info, {r: g for r, g in zip(roles, grads, strict=True) if g is not None}, saved, inputs, states))


def _templates(given: Sequence[Tensor] | None, count: int, what: str) -> list[Tensor] | None:
    if given is not None and len(given) != count:
        raise OperandCountError(f"{len(given)} {what} templates for {count} {what}s")
    return None if given is None else [_required(t, f"{what} template") for t in given]


def flexsn_backward_ncl_bucket(ncl: int) -> int:
    """Return the size class, 0 to 4, of a step of `ncl` neurons; bounds 2^12, 2^17, 2^20, 2^23, inclusive."""
    return sum(ncl > bound for bound in (1 << 12, 1 << 17, 1 << 20, 1 << 23))


# --- forward -----------------------------------------------------------------------------------------------------------------------
class Operands:
    """The operands of a call, checked.

    Attributes:
        inputs: sequences `[T, *shape]`.
        states: initial ones, None for zeros.
        T: number of steps.
        step: shape of a step, to which all operands broadcast.
        device: of all of them.

    Raises:
        ValueError: operands that do not fit in number, T, shape or device.
        TypeError: what is no real tensor.
    """

    def __init__(self, info: FlexSNInfo, args: Sequence[Tensor | None]):
        least, most = info.num_inputs, info.num_inputs + info.num_states
        if not least <= len(args) <= most or least < 1:
            raise OperandCountError(f"{len(args)} operands for {info.num_inputs} inputs and {info.num_states} states")
        self._info = info
        self.inputs = [_required(t, "input") for t in args[:least]]
        self.states = [_checked(t, "state") for t in args[least:]] + [None] * (most - len(args))
        for x in self.inputs:
            if x.dim() == 0 or x.shape[0] != self.inputs[0].shape[0]:
                raise SequenceLengthError(f"input sequences [T, *shape] of shapes {[list(t.shape) for t in self.inputs]}")
        _same_device([*self.inputs, *self.states])
        shapes = [tuple(x.shape[1:]) for x in self.inputs] + [None if v is None else tuple(v.shape) for v in self.states]
        self.step = info.step_shape([s for s in shapes if s is not None])
        info.check_shapes(shapes, self.step)
        self.T, self.device = self.inputs[0].shape[0], self.inputs[0].device
        self._dtypes = info.dtypes({role: t.dtype for role, t in self.arrays().items()})

    def arrays(self) -> dict[Role, Tensor]:
        """Return those that are there, by role."""
        return {role: t for role, t in zip(self._info.args, (*self.inputs, *self.states), strict=True) if t is not None}

    def returns(self, kind: str) -> list[ArrayMeta]:
        """Return shapes and dtypes of the sequences that a kernel of this kind stores."""
        stored = self._info.returns[: self._info.num_stored(kind)]
        return [((self.T, *self._info.return_shape(j, self.step)), self._dtypes[role]) for j, role in enumerate(stored)]

    def finals(self) -> list[ArrayMeta]:
        """Return shapes and dtypes of the final states: an initial one sets its dtype, and at `T == 0` its shape."""
        found: list[ArrayMeta] = []
        for k, (role, v) in enumerate(zip(self._info.states, self.states, strict=True)):
            shape = self._info.return_shape(self._info.num_outputs + k, self.step)
            found.append((shape, self._dtypes[role]) if v is None else (shape if self.T else tuple(v.shape), v.dtype))
        return found


def forward(f: StepKernel, info: FlexSNInfo, args: Sequence[Tensor | None], kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """Run a kernel of a kind; return the sequences that it stores, and the final states."""
    _expect(f, kind)
    given = Operands(info, args)
    returns, finals = given.returns(kind), given.finals()
    if given.T == 0:
        metas = zip(given.states, finals, strict=True)
        ends = [torch.zeros(s, dtype=d, device=given.device) if v is None else _copy(v) for v, (s, d) in metas]
        return [torch.empty(shape, dtype=dtype, device=given.device) for shape, dtype in returns], ends
    written = _launch(f, given.arrays(), given.T, given.step, given.device, ())
    sequences = [narrow(written[role], shape, 1) for role, (shape, _) in zip(info.returns, returns, strict=False)]
    return sequences, [narrow(written[v], shape, 0).to(dtype) for v, (shape, dtype) in zip(info.states, finals, strict=True)]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


# --- backward ----------------------------------------------------------------------------------------------------------------------
def backward(
    f: StepKernel, info: FlexSNInfo, cotangents: Mapping[Role, Tensor], saved: Sequence[Tensor], inputs: Sequence[Tensor],
    states: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Run a backward kernel; return gradients like `inputs` and `states`.

    Args:
        cotangents: those that are there, by role (`FlexSNInfo.cotangents`).
        saved: what `flexsn_forward` saved.
    """
    ends = of_kind(cotangents, Kind.STATE_GRAD)
    steps = [g for role, g in cotangents.items() if role not in ends]
    if any(t.dim() == 0 for t in (*steps, *saved, *inputs)):
        raise SequenceLengthError("cotangents, saved tensors and input templates are sequences [T, *shape]")
    lengths = {t.shape[0] for t in (*steps, *inputs)}
    if len(lengths) > 1:
        raise SequenceLengthError(f"cotangents and input templates differ in T: {sorted(lengths)}")
    _same_device([*cotangents.values(), *saved])
    T = inputs[0].shape[0]
    likes = [(role.grad, like, int(role.kind is Kind.INPUT)) for role, like in zip(info.args, (*inputs, *states), strict=False)]
    if T == 0 or not cotangents:
        written = {role: _copy(cotangents[role]) for role in ends}  # without steps the end is the start
        return [_gradient(written.get(role), like, leading) for role, like, leading in likes]
    if any(t.shape[0] != T for t in saved):
        raise SequenceLengthError(f"a saved tensor has another T than the {T} of the cotangents")
    step = info.step_shape([tuple(t.shape[1:]) for t in (*steps, *saved, *inputs)] + [tuple(v.shape) for v in states])
    arrays = dict(zip(info.saved, saved, strict=True))
    for role, g in cotangents.items():  # a result that is smaller than a step was one value of many equal ones
        leading, k = int(role not in ends), role.number + info.num_outputs * (role.kind is not Kind.OUTPUT_GRAD)
        arrays[role] = widen(rows(g, info.return_shape(k, step), leading), step, leading, None)
    present = tuple(sorted([role for role in cotangents if role not in ends]))
    written = _launch(f, arrays, T, step, next(iter(cotangents.values())).device, present)
    return [_gradient(written.get(role), like, leading) for role, like, leading in likes]


def _gradient(grad: Tensor | None, like: Tensor, leading: int) -> Tensor:
    if grad is None:
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    return unbroadcast(grad, tuple(like.shape), leading).to(like.device, like.dtype)


# --- launch -------------------------------------------------------------------------------------------------------------------------
def _launch(
    f: StepKernel, arrays: Mapping[Role, Tensor], T: int, step: Shape, device: torch.device, present: tuple[str, ...]
) -> dict[Role, Tensor]:
    """Run a kernel; returns what it wrote, by role."""
    with torch.no_grad():
        kinds = {r: t.dtype for r, t in arrays.items()}
        loaded = f.load(device, kinds, present)
        taken = {a.role: a for a in loaded.plan.reads if a.role in arrays}
        launch = Launch(loaded, device, T, step, 0, tuple(taken))
        operands = [rows(arrays[r].to(a.storage), step, int(a.kind == "sequence")) for r, a in taken.items()]
        return dict(zip(launch.places, launch(operands, f.params(device)), strict=True))


def _expect(f: Any, kind: str) -> None:
    if getattr(f, "kind", kind) != kind:
        raise OperandTypeError(f"needs a kernel of kind `{kind}` and was given {f!r}")


def _required(tensor: Any, what: str) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise OperandTypeError(f"{what} must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype not in DTYPES:
        raise UnsupportedDtypeError(f"{what} has dtype {tensor.dtype}")
    return tensor


def _checked(tensor: Any, what: str) -> Tensor | None:
    return None if tensor is None else _required(tensor, what)


def _same_device(tensors: Sequence[Tensor | None]) -> None:
    devices = {t.device for t in tensors if t is not None}
    if len(devices) > 1:
        raise DeviceMismatchError(f"operands lie on different devices: {', '.join(sorted(map(str, devices)))}")
