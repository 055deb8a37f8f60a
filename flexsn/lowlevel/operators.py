"""The kernels of a handle as PyTorch operators.

Two operators run them, `flexsn::handle_forward` and `flexsn::handle_backward`: opaque to the compiler, with fake implementations. The five
operators with names of their own, `torch.ops.flexsn.flexsn_inductor_*`, check their arguments, record the call for autograd and are made of
these two in every trace. The functions here take a handle in any form.

`flat_args = [*input_seqs, *init_states]`; initial states may be left out, all or none, and are zeros then.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._operator.no_gradient import WithoutGradient, refuse_forward_mode, refuse_missing_gradient
from .._torch.autograd import skipping_autograd
from .._torch.transforms import active_transforms, transforms_active
from ..errors import DoubleBackwardError, OperandCountError
from . import launch
from .handles import get_flexsn_kernel_handle, handle_number, release_active_flexsn_kernel_handle, retain_flexsn_kernel_handle
from .info import FlexSNInfo

_library = torch.library.Library("flexsn", "FRAGMENT")  # lives as long as the process
_INFERENCE, _TRAINING = ("inference", "inference_final_state"), ("training", "training_final_state")  # kinds of calls forward


def flexsn_inductor_inference(handle: Any, flat_args: Sequence[Tensor]) -> list[Tensor]:
    """Return `[*output_seqs, *state_seqs]`. A backward through them raises a `MissingGradientError`, never zeros.

    Raises:
        RuntimeError: an unknown handle, or one without this kernel.
        ValueError: no input, or some but not all initial states.
    """
    return torch.ops.flexsn.flexsn_inductor_inference(handle_number(handle), list(flat_args))


def flexsn_inductor_inference_final_state(handle: Any, flat_args: Sequence[Tensor]) -> list[Tensor]:
    """Return `[*output_seqs, *final_states]`. Otherwise as `flexsn_inductor_inference`."""
    return torch.ops.flexsn.flexsn_inductor_inference_final_state(handle_number(handle), list(flat_args))


def flexsn_inductor_training(handle: Any, flat_args: Sequence[Tensor]) -> list[Tensor]:
    """Return all that the forward kernel does: `[*output_seqs, *state_seqs, *intermediates]`; cotangents of the last are ignored.

    Raises:
        RuntimeError: as `flexsn_inductor_inference`; forward and backward kernels are both needed.
        DoubleBackwardError: a second derivative; a `RuntimeError`.
    """
    return torch.ops.flexsn.flexsn_inductor_training(handle_number(handle), list(flat_args))


def flexsn_inductor_training_final_state(handle: Any, flat_args: Sequence[Tensor]) -> list[Tensor]:
    """Return `[*output_seqs, *final_states, *saved]`: what the backward reads beside the outputs. Raises as `flexsn_inductor_training`."""
    return torch.ops.flexsn.flexsn_inductor_training_final_state(handle_number(handle), list(flat_args))


def flexsn_inductor_backward(
    handle: Any, grad_outputs: Sequence[Tensor | None], saved_tensors: Sequence[Tensor], input_templates: Sequence[Tensor]
) -> list[Tensor]:
    """Return `[*input_grads, *init_state_grads]` of `flexsn_inductor_training`. A backward through them is refused.

    Args:
        grad_outputs: cotangents of output and state sequences, each possibly None.
        saved_tensors: `[returns[i] for i in c2k_return_mapping]`.
        input_templates: `[*input_seqs, *init_states]`, or the input sequences alone; then there are no gradients of states.
    """
    return torch.ops.flexsn.flexsn_inductor_backward(handle_number(handle), list(grad_outputs), list(saved_tensors), list(input_templates))


# --- the two operators -------------------------------------------------------------------------------------------------------------
def _get(handle: int, name: str) -> Any:
    found = getattr(get_flexsn_kernel_handle(handle), name)
    if found is None:
        raise RuntimeError(f"flexsn: kernel handle {handle} has no {name.replace('_', ' ')}")
    return found


def _info(handle: int, kind: str) -> FlexSNInfo:
    return _get(handle, "training_info" if kind in _TRAINING else f"{kind}_info")


def _kernel_kind(kind: str) -> str:
    """Return what kind of kernel a kind of call runs."""
    return "forward" if kind in _TRAINING else kind


def _complete(info: FlexSNInfo, flat_args: Sequence[Tensor]) -> list[Tensor]:
    """Add the initial states that were left out: zeros like a step of the first input."""
    missing = info.num_inputs + info.num_states - len(flat_args)
    if not flat_args or info.num_inputs < 1:
        raise OperandCountError("at least one input is needed")
    if missing not in (0, info.num_states):
        raise OperandCountError(f"{len(flat_args)} tensors for {info.num_inputs} inputs and {info.num_states} states, all or none of these")
    x = flat_args[0]
    return [*flat_args, *(torch.zeros(x.shape[1:], dtype=x.dtype, device=x.device) for _ in range(missing))]


def _results(kind: str, info: FlexSNInfo, returns: Sequence[Any], finals: Sequence[Any]) -> list[Any]:
    """Return what a kind of call returns, of the sequences that its kernel stores and the final states."""
    if not kind.endswith("final_state"):
        return list(returns)
    kept = [returns[j] for j in info.c2k_return_mapping if j >= info.num_outputs] if kind in _TRAINING else []
    return [*returns[: info.num_outputs], *finals, *kept]


def _forward(handle: int, kind: str, flat_args: Sequence[Tensor]) -> list[Tensor]:
    info, own = _info(handle, kind), _kernel_kind(kind)
    kernel = _get(handle, f"{own}_kernel")
    if kind in _TRAINING:
        _get(handle, "backward_kernel")
    found = _results(kind, info, *launch.forward(kernel, info, _complete(info, flat_args), own))
    first = {id(t): k for k, t in reversed(list(enumerate(found)))}  # results of an operator do not alias each other
    return [t if first[id(t)] == k else t.clone() for k, t in enumerate(found)]


def _fake_forward(handle: int, kind: str, flat_args: Sequence[Tensor]) -> list[Tensor]:
    info = _info(handle, kind)
    call = launch.Operands(info, _complete(info, flat_args))
    metas = _results(kind, info, call.returns(_kernel_kind(kind)), call.finals())
    return [torch.empty(shape, dtype=dtype, device=call.device) for shape, dtype in metas]


def _backward(
    handle: int, final: bool, grad_outputs: Sequence[Tensor | None], saved_tensors: Sequence[Tensor], input_templates: Sequence[Tensor]
) -> list[Tensor]:
    """`final`: the cotangents after those of the outputs are of final states, not of state sequences."""
    kernel, info = _get(handle, "backward_kernel"), _get(handle, "training_info")
    roles = info.cotangents(final=final)
    if len(grad_outputs) != len(roles) or len(saved_tensors) != len(info.saved):
        raise OperandCountError(f"{len(grad_outputs)} cotangents and {len(saved_tensors)} saved tensors")
    cotangents = {r: g for r, g in zip(roles, grad_outputs, strict=True) if g is not None}
    likes = _complete(info, input_templates)
    found = launch.backward(kernel, info, cotangents, saved_tensors, likes[: info.num_inputs], likes[info.num_inputs :])
    return found[: len(input_templates)]


def _fake_backward(handle: int, final: bool, grad_outputs: Any, saved_tensors: Any, input_templates: Sequence[Tensor]) -> list[Tensor]:
    _get(handle, "training_info")
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in input_templates]


# --- autograd ---------------------------------------------------------------------------------------------------------------------------
class _Active:
    """An active reference, for as long as this object lives."""

    def __init__(self, handle: int):
        retain_flexsn_kernel_handle(handle)
        weakref.finalize(self, release_active_flexsn_kernel_handle, handle).atexit = False


class _Training(torch.autograd.Function):
    """A recorded call of a training operator."""

    @staticmethod
    def forward(kind: str, handle: int, *flat_args: Tensor | None) -> tuple[Tensor, ...]:
        with skipping_autograd():
            return tuple(torch.ops.flexsn.handle_forward(handle, kind, list(flat_args)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        kind, ctx.handle, *flat_args = inputs
        info = _info(ctx.handle, kind)
        ctx.active, ctx.num_args, ctx.final = _Active(ctx.handle), len(flat_args), kind.endswith("final_state")
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[info.num_returns :])
        rest = iter(output[info.num_returns :])
        saved = [output[j] if not ctx.final or j < info.num_outputs else next(rest) for j in info.c2k_return_mapping]
        ctx.save_for_backward(*saved, *(t.new_empty(()).expand(t.shape) for t in flat_args))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        if torch.is_grad_enabled():
            raise DoubleBackwardError("a kernel of a handle is differentiated with create_graph=True, and has no second derivative")
        info = _info(ctx.handle, "training")
        count = len(ctx.saved_tensors) - ctx.num_args
        saved, templates = list(ctx.saved_tensors[:count]), list(ctx.saved_tensors[count:])
        given = list(grads[: info.num_returns])
        if all(g is None for g in given):
            return None, None, *[None] * ctx.num_args
        found = torch.ops.flexsn.handle_backward(ctx.handle, ctx.final, given, saved, templates)
        return None, None, *[g if g.is_floating_point() else None for g in found]


_HINT = "`flexsn_inductor_training` is differentiable; detach what the other operators return, or call them under `torch.no_grad()`."


def _refuse_transform(handle: int, name: str) -> NoReturn:
    raise RuntimeError(f"flexsn: the kernels of handle {handle} do not run under `torch.func.{name}`: use `flex_sn_scan`")


def _recorded(handle: int, tensors: Sequence[Tensor | None]) -> bool:
    """Return whether autograd asks for the gradient of a call; refuse forward mode."""
    refuse_forward_mode(f"kernel handle {handle}", tensors)
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _without_gradient(operator: Callable) -> Callable:
    """Return the rule of an operator for autograd: below it no gradient is recorded, and one that is asked for raises."""

    def rule(handle: int, *others: Any) -> list[Tensor]:
        def below(*_: Tensor | None) -> list[Tensor]:
            with skipping_autograd():
                return operator(handle, *others)

        name = f"kernel handle {handle}"
        tensors = [t for given in others[1:3] for t in given]  # a template gives its shape alone
        if not _recorded(handle, tensors):
            return below()
        if transforms_active() or others[0] in _TRAINING:  # a transform would take it for zeros
            refuse_missing_gradient(name, _HINT)
        return list(WithoutGradient.apply(below, name, _HINT, *tensors))

    return rule


def _named(kind: str, handle: int, flat_args: Sequence[Tensor]) -> list[Tensor]:
    """Run an operator with a name of its own, recorded for autograd where it is one of training."""
    if kind not in _TRAINING or not _recorded(handle, flat_args):
        return torch.ops.flexsn.handle_forward(handle, kind, flat_args)
    if transforms_active():
        _refuse_transform(handle, active_transforms()[-1])
    return list(_Training.apply(kind, handle, *flat_args))


def _define(name: str, schema: str, run: Callable, fake: Callable | None = None) -> None:
    """Define an operator, which without `fake` is made of others in every trace."""
    _library.define(f"{name}({schema}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeImplicitAutograd" if fake is None else "CompositeExplicitAutograd")
    if fake is not None:
        _library.impl(name, _without_gradient(getattr(torch.ops.flexsn, name)), "Autograd")
        torch.library.register_fake(f"flexsn::{name}", fake, lib=_library)
    torch.library.register_vmap(f"flexsn::{name}", lambda info, in_dims, handle, *others: _refuse_transform(handle, "vmap"), lib=_library)


_ARGS, _GRADS = "Tensor[] flat_args", "Tensor?[] grad_outputs, Tensor[] saved_tensors, Tensor[] input_templates"
_define("handle_forward", f"int handle, str kind, {_ARGS}", _forward, _fake_forward)
_define("handle_backward", f"int handle, bool final, {_GRADS}", _backward, _fake_backward)
for _kind in (*_INFERENCE, *_TRAINING):
    _define(f"flexsn_inductor_{_kind}", f"int handle, {_ARGS}", functools.partial(_named, _kind))
_define("flexsn_inductor_backward", f"int handle, {_GRADS}", lambda handle, *args: torch.ops.flexsn.handle_backward(handle, False, *args))
