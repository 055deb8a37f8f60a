"""Private names of PyTorch, all in one place, each with the versions in which it was seen: 2.11, 2.13."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
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
    "DYNAMIC_SHAPE_ERRORS", "FakeTensor", "FakeTensorMode", "aot_graph", "current_device", "current_stream",
    "decomposition_table", "disable_modes", "forward_ad_level", "functional_overload", "has_tangent", "load_aot", "min_cut",
    "quiet", "transformed",
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


@functools.cache
def _aot() -> tuple[Any, Any]:
    """AOTAutograd and its partitioner, imported on use; the warning filters that this adds (sympy's) go again."""
    with warnings.catch_warnings():
        import torch.fx.experimental.symbolic_shapes  # noqa: F401  fake tensors need it  (2.11, 2.13)
        from torch._functorch.aot_autograd import aot_export_joint_simple  # 2.11, 2.13
        from torch._functorch.partitioners import min_cut_rematerialization_partition  # 2.11, 2.13
    return aot_export_joint_simple, min_cut_rematerialization_partition


def aot_graph(fn: Callable, tensors: Sequence[torch.Tensor], *, joint: bool) -> torch.fx.GraphModule:
    """The functional ATen graph of `fn`, by AOTAutograd; `joint`: followed by its backward (`primals_*`, `tangents_*`)."""
    return _aot()[0](fn, tuple(tensors), trace_joint=joint)


def min_cut(joint: torch.fx.GraphModule, num_outputs: int) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """A joint graph cut in two, such that little is saved in between."""
    return _aot()[1](joint, None, num_fwd_outputs=num_outputs)


def load_aot() -> None:
    _aot()
