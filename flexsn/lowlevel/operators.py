"""The kernels of a handle as PyTorch operators: opaque to the compiler, with fake and autograd registrations.

`flat_args = [*input_seqs, *init_states]`; initial states may be left out, all or none: zeros then. The plain functions take
a handle in any form and call `torch.ops.flexsn.<name>`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._operator.no_gradient import no_forward_mode, refuse_forward_mode
from .._torch.autograd import skipping_autograd
from .._torch.transforms import active_transforms, transforms_active
from ..errors import DoubleBackwardError, MissingGradientError, OperandCountError
from . import launch as step_launch
from .handles import get_flexsn_kernel_handle, handle_number, release_active_flexsn_kernel_handle, retain_flexsn_kernel_handle
from .info import FlexSNInfo
from .launch import final_metas, flexsn_forward, flexsn_inference, flexsn_inference_final_state, operands, return_metas

_library = torch.library.Library("flexsn", "FRAGMENT")  # lives as long as the process
_TAGS = (torch.Tag.pt2_compliant_tag,)


# --- the functions -----------------------------------------------------------------------------------------------------------------
def flexsn_inductor_inference(handle: Any, flat_args: Sequence[Tensor]) -> list[Tensor]:
    """`[*output_seqs, *state_seqs]`, not differentiable.

    Raises:
        RuntimeError: an unknown handle, or one without this kernel.
        ValueError: no input, or some but not all initial states.
    """
    return torch.ops.flexsn.flexsn_inductor_inference(handle_number(handle), list(flat_args))


def flexsn_inductor_inference_final_state(handle: Any, flat_args: Sequence[Tensor]) -> list[Tensor]:
    """`[*output_seqs, *final_states]`, not differentiable. Raises as `flexsn_inductor_inference`."""
    return torch.ops.flexsn.flexsn_inductor_inference_final_state(handle_number(handle), list(flat_args))


def flexsn_inductor_training(handle: Any, flat_args: Sequence[Tensor]) -> list[Tensor]:
    """Every return of the forward kernel: `[*output_seqs, *state_seqs, *intermediates]`; cotangents of the last are ignored.

    Raises:
        RuntimeError: as `flexsn_inductor_inference`; forward and backward kernels are both needed.
        DoubleBackwardError: a second derivative; a `RuntimeError`.
    """
    return torch.ops.flexsn.flexsn_inductor_training(handle_number(handle), list(flat_args))


def flexsn_inductor_training_final_state(handle: Any, flat_args: Sequence[Tensor]) -> list[Tensor]:
    """`[*output_seqs, *final_states, *saved]`: what the backward reads beside the outputs. Raises as `flexsn_inductor_training`."""
    return torch.ops.flexsn.flexsn_inductor_training_final_state(handle_number(handle), list(flat_args))


def flexsn_inductor_backward(
    handle: Any, grad_outputs: Sequence[Tensor | None], saved_tensors: Sequence[Tensor], input_templates: Sequence[Tensor]
) -> list[Tensor]:
    """`[*input_grads, *init_state_grads]` of `flexsn_inductor_training`.

    Args:
        grad_outputs: cotangents of output and state sequences, each possibly None.
        saved_tensors: `[returns[i] for i in c2k_return_mapping]`.
        input_templates: `[*input_seqs, *init_states]`, or the input sequences alone; then there are no gradients of states.
    """
    return torch.ops.flexsn.flexsn_inductor_backward(handle_number(handle), list(grad_outputs), list(saved_tensors), list(input_templates))


# --- what runs ----------------------------------------------------------------------------------------------------------------------
def _kernel(handle: int, name: str, info: str) -> tuple[Any, FlexSNInfo]:
    return _get(handle, name), _get(handle, info)


def _get(handle: int, name: str) -> Any:
    found = getattr(get_flexsn_kernel_handle(handle), name)
    if found is None:
        raise RuntimeError(f"flexsn: kernel handle {handle} has no {name.replace('_', ' ')}")
    return found


def _complete(info: FlexSNInfo, flat_args: Sequence[Tensor]) -> list[Tensor]:
    """With the initial states that were left out: zeros like a step of the first input."""
    missing = info.num_inputs + info.num_states - len(flat_args)
    if not flat_args or info.num_inputs < 1:
        raise OperandCountError("at least one input is needed")
    if missing not in (0, info.num_states):
        raise OperandCountError(f"{len(flat_args)} tensors for {info.num_inputs} inputs and {info.num_states} states, all or none of these")
    x = flat_args[0]
    return [*flat_args, *(torch.zeros(x.shape[1:], dtype=x.dtype, device=x.device) for _ in range(missing))]


def _inference(handle: int, flat_args: Sequence[Tensor]) -> list[Tensor]:
    kernel, info = _kernel(handle, "inference_kernel", "inference_info")
    return list(flexsn_inference(kernel, info, *_complete(info, flat_args)))


def _inference_final_state(handle: int, flat_args: Sequence[Tensor]) -> list[Tensor]:
    kernel, info = _kernel(handle, "inference_final_state_kernel", "inference_final_state_info")
    return list(flexsn_inference_final_state(kernel, info, *_complete(info, flat_args)))


def _training(handle: int, flat_args: Sequence[Tensor]) -> list[Tensor]:
    kernel, info = _kernel(handle, "forward_kernel", "training_info")
    _get(handle, "backward_kernel")
    return list(flexsn_forward(kernel, info, *_complete(info, flat_args)))


def _training_final_state(handle: int, flat_args: Sequence[Tensor]) -> list[Tensor]:
    kernel, info = _kernel(handle, "forward_kernel", "training_info")
    _get(handle, "backward_kernel")
    returns, finals = step_launch.forward_and_finals(kernel, info, _complete(info, flat_args))
    return [*returns[: info.num_outputs], *finals, *_distinct([returns[j] for j in _kept(info)])]


def _kept(info: FlexSNInfo) -> list[int]:
    """Returns that the backward reads and that are no outputs."""
    return [j for j in info.c2k_return_mapping if j >= info.num_outputs]


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    """No tensor twice: results of an operator do not alias each other."""
    first = {id(t): k for k, t in reversed(list(enumerate(tensors)))}
    return [t if first[id(t)] == k else t.clone() for k, t in enumerate(tensors)]


def _backward(
    handle: int,
    grad_outputs: Sequence[Tensor | None],
    saved_tensors: Sequence[Tensor],
    input_templates: Sequence[Tensor],
    final: bool = False,
) -> list[Tensor]:
    kernel, info = _kernel(handle, "backward_kernel", "training_info")
    if len(grad_outputs) != info.num_returns or len(saved_tensors) != len(info.c2k_return_mapping):
        raise OperandCountError(f"{len(grad_outputs)} cotangents and {len(saved_tensors)} saved tensors")
    templates, states = _complete(info, input_templates), list(grad_outputs[info.num_outputs :])
    none: list[Tensor | None] = [None] * info.num_states
    found = step_launch.backward(
        kernel, info, grad_outputs[: info.num_outputs], none if final else states, states if final else none, saved_tensors,
        templates[: info.num_inputs], templates[info.num_inputs :],
    )  # fmt: skip
    return found[: len(input_templates)]


def _backward_final_state(handle: int, grad_outputs, saved_tensors, input_templates) -> list[Tensor]:
    """`_backward`, with cotangents of final states in place of state sequences."""
    return _backward(handle, grad_outputs, saved_tensors, input_templates, final=True)


# --- what they give, without running ---------------------------------------------------------------------------------------------------
def _fake(info_name: str, final: bool, saved: bool) -> Callable[[int, Sequence[Tensor]], list[Tensor]]:
    def fake(handle: int, flat_args: Sequence[Tensor]) -> list[Tensor]:
        info = _get(handle, info_name)
        inputs, states, T, step = operands(info, _complete(info, flat_args))
        x = inputs[0]
        returns = [((T, *shape), dtype) for shape, dtype in return_metas(info, inputs, states, step)]
        ends = final_metas(info, inputs, states, step) if final else returns[info.num_outputs : info.num_returns]
        tail = [returns[j] for j in _kept(info)] if final else returns[info.num_returns :]
        metas = [*returns[: info.num_outputs], *ends, *(tail if saved else [])]
        return [torch.empty(shape, dtype=dtype, device=x.device) for shape, dtype in metas]

    return fake


def _fake_backward(handle: int, grad_outputs, saved_tensors, input_templates: Sequence[Tensor]) -> list[Tensor]:
    _get(handle, "training_info")
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in input_templates]


# --- autograd ---------------------------------------------------------------------------------------------------------------------------
class _Active:
    """An active reference, for as long as this object lives."""

    def __init__(self, handle: int):
        retain_flexsn_kernel_handle(handle)
        weakref.finalize(self, release_active_flexsn_kernel_handle, handle).atexit = False


def _of(handle: int) -> str:
    return f"kernel handle {handle}"


def _refuse_transform(handle: int, name: str) -> NoReturn:
    raise RuntimeError(f"flexsn: the kernels of handle {handle} do not run under `torch.func.{name}`: use `flex_sn_scan`")


def _autograd_of_inference(operator: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    def rule(handle: int, *others) -> list[Tensor]:
        tensors = [t for given in others for t in given if t is not None]
        refuse_forward_mode(_of(handle), tensors)
        if transforms_active() and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            hint = "`flexsn_inductor_training` is differentiable; pass detached tensors to the other operators."
            raise MissingGradientError("is differentiated by an operator that has no gradient", core=_of(handle), hint=hint)  # never zeros
        with skipping_autograd():
            return operator(handle, *others)

    return rule


class _Training(torch.autograd.Function):
    """A call of a training operator. `final`: it returns final states in place of state sequences."""

    @staticmethod
    def forward(operator: Callable[..., list[Tensor]], final: bool, handle: int, *flat_args):
        with skipping_autograd():
            return tuple(operator(handle, list(flat_args)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.final, ctx.handle, *flat_args = inputs
        info: FlexSNInfo = _get(ctx.handle, "training_info")
        ctx.active, ctx.num_args = _Active(ctx.handle), len(flat_args)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[info.num_returns :])
        rest = iter(output[info.num_returns :])
        saved = [output[j] if not ctx.final or j < info.num_outputs else next(rest) for j in info.c2k_return_mapping]
        ctx.save_for_backward(*saved, *(t.new_empty(()).expand(t.shape) for t in flat_args))

    @staticmethod
    def backward(ctx, *grads):
        if torch.is_grad_enabled():
            raise DoubleBackwardError("a kernel of a handle is differentiated with create_graph=True, and has no second derivative")
        info: FlexSNInfo = _get(ctx.handle, "training_info")
        count = len(ctx.saved_tensors) - ctx.num_args
        saved, templates = list(ctx.saved_tensors[:count]), list(ctx.saved_tensors[count:])
        given = list(grads[: info.num_returns])
        if all(g is None for g in given):
            return None, None, None, *[None] * ctx.num_args
        walk = torch.ops.flexsn.flexsn_inductor_backward_final_state if ctx.final else torch.ops.flexsn.flexsn_inductor_backward
        return None, None, None, *[g if g.is_floating_point() else None for g in walk(ctx.handle, given, saved, templates)]

    @staticmethod
    def jvp(ctx, *tangents):
        raise no_forward_mode(_of(ctx.handle))


def _autograd_of_training(final: bool) -> Callable:
    def of(operator: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        def rule(handle: int, flat_args: Sequence[Tensor]) -> list[Tensor]:
            refuse_forward_mode(_of(handle), flat_args)
            if torch.is_grad_enabled() and any(t.requires_grad for t in flat_args):
                if transforms_active():
                    _refuse_transform(handle, active_transforms()[-1])
                return list(_Training.apply(operator, final, handle, *flat_args))
            with skipping_autograd():
                return operator(handle, flat_args)

        return rule

    return of


def _define(name: str, schema: str, run: Callable, fake: Callable, autograd: Callable) -> None:
    _library.define(f"{name}{schema}", tags=_TAGS)
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, autograd(getattr(torch.ops.flexsn, name)), "Autograd")
    torch.library.register_fake(f"flexsn::{name}", fake, lib=_library)
    torch.library.register_vmap(f"flexsn::{name}", lambda info, in_dims, handle, *others: _refuse_transform(handle, "vmap"), lib=_library)


_FORWARD = "(int handle, Tensor[] flat_args) -> Tensor[]"
_BACKWARD = "(int handle, Tensor?[] grad_outputs, Tensor[] saved_tensors, Tensor[] input_templates) -> Tensor[]"
_INFERENCE: dict[str, tuple[Callable, Callable]] = {
    "flexsn_inductor_inference": (_inference, _fake("inference_info", final=False, saved=False)),
    "flexsn_inductor_inference_final_state": (_inference_final_state, _fake("inference_final_state_info", final=True, saved=False)),
}
for _name, (_run, _shapes) in _INFERENCE.items():
    _define(_name, _FORWARD, _run, _shapes, _autograd_of_inference)
for _name, _run in (("flexsn_inductor_backward", _backward), ("flexsn_inductor_backward_final_state", _backward_final_state)):
    _define(_name, _BACKWARD, _run, _fake_backward, _autograd_of_inference)
for _name, _run, _final in (
    ("flexsn_inductor_training", _training, False),
    ("flexsn_inductor_training_final_state", _training_final_state, True),
):
    _define(_name, _FORWARD, _run, _fake("training_info", final=_final, saved=True), _autograd_of_training(_final))
