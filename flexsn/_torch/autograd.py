"""Private names of autograd, each with the versions in which it was seen: its modes, hooks and running backwards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .availability import PROFILES, moved


def records_gradients() -> bool:
    """Whether autograd follows what happens now: inference mode does without it, also where gradients are enabled inside."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns `function.apply` for tensors outside of transforms (`unwrap_if_dead` first), past the Python in it."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]  # a method of its base, in C++


# As `Function.apply` does
unwrap_if_dead: Callable[[torch.Tensor], torch.Tensor] = getattr(torch._C._functorch, "unwrap_if_dead", lambda tensor: tensor)  # 2.11, 2.14


def call_modes() -> tuple[bool, torch.dtype] | None:
    """Whether autograd records calls, and the default dtype; None under transforms, dispatch modes and in forward mode."""
    if (
        torch._C._functorch.get_interpreter_stack() is not None  # 2.11, 2.14
        or torch._C._len_torch_dispatch_stack() > 0  # 2.13
        or torch.autograd.forward_ad._current_level >= 0  # 2.11, 2.14
    ):
        return None
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled(), torch.get_default_dtype()


def transformed() -> bool:
    """Whether `torch.func` or forward mode is active."""
    return torch._C._functorch.get_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0  # 2.11, 2.14


def forward_ad_level() -> int:
    """-1 outside of `torch.autograd.forward_ad.dual_level()`."""
    return torch.autograd.forward_ad._current_level  # 2.11, 2.14


def saved_tensors_hooks_there() -> bool:
    """Whether saved-tensor hooks are active and see what autograd saves from here on."""
    return not saved_tensors_hooks_off() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # 2.11, 2.14


def saved_tensors_hooks_off() -> bool:
    """Whether saved-tensor hooks, and so checkpointing, are refused here, as inside `torch.func.grad`."""
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return False
    except RuntimeError:
        return True


def autocast_on() -> bool:
    """Whether autocast is on for CPUs or GPUs."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def below_autograd() -> bool:
    """Whether autograd has had its turn: inside the rule of an operator for what comes after it."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch.DispatchKey.AutogradFunctionality)  # 2.11, 2.13


def skipping_autograd() -> contextlib.AbstractContextManager:
    """While inside, operators go past autograd."""
    return torch._C._AutoDispatchBelowAutograd()  # 2.11, 2.14


# Which backward runs on this thread: a number, or -1 for none; -1 where this name has moved, of which `_torch/availability.py` warns
current_backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)  # 2.11, 2.14


def after_backward(call: Callable[[], None]) -> None:
    """Called when the backward that runs on this thread ends."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # 2.11, 2.14


@functools.cache
def profiler_flag() -> Callable[[], bool]:
    """Return the function that tells whether a profiler of PyTorch's runs; one in C, since every launch asks."""
    return bool if moved(PROFILES) else torch.autograd._profiler_enabled  # type: ignore[attr-defined]  # it is there (2.11, 2.14)


def pulled_back(
    ys: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], *, retain_graph: bool = False
) -> Sequence[torch.Tensor | None]:  # fmt: skip
    """Return what `torch.autograd.grad(ys, leaves, grads, allow_unused=True)` does. That imports sympy, to compare shapes, for most of a
    second."""
    with torch.enable_grad():
        root = _Cotangents.apply(grads, *ys)
    return torch.autograd.grad(root, leaves, retain_graph=retain_graph, allow_unused=True)


class _Cotangents(torch.autograd.Function):
    """A number whose gradient some cotangents are."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[torch.Tensor], *ys: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        return ys[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.grads
