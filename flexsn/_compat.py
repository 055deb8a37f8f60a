"""Private names of PyTorch, all in one place, each with the versions in which it was seen: 2.11, 2.13."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import (  # 2.11, 2.13
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes as disable_modes  # 2.11, 2.13

__all__ = [
    "DYNAMIC_SHAPE_ERRORS", "FakeTensor", "FakeTensorMode", "current_device", "current_stream", "decomposition_table",
    "disable_modes", "forward_ad_level", "functional_overload", "has_tangent", "quiet", "scan_operator", "transformed",
    "while_loop_stack_operator",
]  # fmt: skip

DYNAMIC_SHAPE_ERRORS = (DynamicOutputShapeException, DataDependentOutputException)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While inside, fake tensors do not log the errors that flexsn turns into its own."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # 2.13
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def decomposition_table() -> dict[Any, Any]:
    """ATen overload -> Python decomposition; imported on use (it pulls in much of PyTorch)."""
    import torch._refs  # noqa: F401  registers the decompositions  (2.11, 2.13)
    from torch._decomp import decomposition_table as table  # 2.11, 2.13

    return table


def functional_overload(func: Any) -> Any | None:
    """`aten.add_.Tensor` -> `aten.add.Tensor`."""
    base = func._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, base.removesuffix("_"), None) if base.endswith("_") else None
    return getattr(packet, func._overloadname, None) if packet is not None else None


def forward_ad_level() -> int:
    """-1 outside of `torch.autograd.forward_ad.dual_level()`."""
    return torch.autograd.forward_ad._current_level  # 2.11, 2.13


def has_tangent(tensor: torch.Tensor) -> bool:
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def current_stream(device: int) -> int:
    """The CUDA stream that PyTorch uses now, as a number; the public call makes an object first."""
    return torch._C._cuda_getCurrentRawStream(device)  # 2.11, 2.13


def current_device() -> int:
    return torch._C._cuda_getDevice()  # 2.11, 2.13


def transformed() -> bool:
    """Whether `torch.func` or a dispatch mode is active: tensors may then lack memory."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack() > 0  # 2.13


def scan_operator() -> Callable[..., Any] | None:
    """`scan(combine_fn, init, xs)`; imported on use, and None where PyTorch has none."""
    try:
        from torch._higher_order_ops.scan import scan  # 2.11, 2.13
    except ImportError:
        return None
    return scan


def while_loop_stack_operator() -> Callable[..., Any] | None:
    """`while_loop(cond, body, carried, additional)` that gives all iterations' results, stacked; None where PyTorch has none."""
    try:
        from torch._higher_order_ops.while_loop import while_loop_stack_output_op  # 2.11, 2.13
    except ImportError:
        return None
    return while_loop_stack_output_op
