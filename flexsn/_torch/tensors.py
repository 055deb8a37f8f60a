"""What PyTorch says of tensors, sizes and operators by private names, each with the versions in which it was seen."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

OpOverload: Any = type(torch.ops.aten.neg.default)  # an operator with one signature


def promoted_dtype(values: Sequence[Any], *, to_float: bool) -> torch.dtype:
    """The dtype of the result of an elementwise op on tensors and numbers; `to_float`: integers become floats."""
    shapes: tuple[tuple[int, ...], ...] = ((1,), ())  # tensors with dims come before those without, and numbers last
    tensors = [[v.dtype for v in values if isinstance(v, torch.Tensor) and bool(v.dim()) == bool(shape)] for shape in shapes]
    kinds: list[Any] = [_like(functools.reduce(torch.promote_types, d), shape) for d, shape in zip(tensors, shapes, strict=True) if d]
    kinds += [v for v in values if not isinstance(v, torch.Tensor)]
    found = functools.reduce(lambda a, b: _like(torch.result_type(a, b), (1,)), kinds)
    dtype = torch.result_type(found, found)
    return dtype if dtype.is_floating_point or dtype.is_complex or not to_float else torch.get_default_dtype()


def _like(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """`torch.broadcast_shapes`, which imports sympy, of sizes that are numbers.

    Raises:
        RuntimeError: they do not broadcast.
    """
    if any(isinstance(n, torch.SymInt) for shape in shapes for n in shape):
        return tuple(torch.broadcast_shapes(*shapes))
    found = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for d, n in enumerate(shape, len(found) - len(shape)):
            if found[d] == 1:
                found[d] = n
            elif n not in (1, found[d]):
                raise RuntimeError(f"shapes {shapes} do not broadcast")
    return tuple(found)


def functional_overload(func: Any) -> Any | None:
    """`aten.add_.Tensor` -> `aten.add.Tensor`; by argument types, since names differ (`pow_.Scalar` -> `pow.Tensor_Scalar`)."""
    base = func._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, base.removesuffix("_"), None) if base.endswith("_") else None
    if packet is None:
        return None
    names = sorted(packet.overloads(), key=lambda name: name != func._overloadname)  # its own name first
    wanted = _argument_types(func)
    return next((overload for name in names if _argument_types(overload := getattr(packet, name)) == wanted), None)


def _argument_types(func: Any) -> list[str]:
    """Of what a functional op takes; a view has none of it."""
    return [] if is_view(func) else [str(argument.type) for argument in func._schema.arguments]


def is_view(func: Any) -> bool:
    """Whether the results of a functional op may lie in the memory of its first operand."""
    schema = func._schema
    return schema.name == "aten::_unsafe_view" or any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def has_storage(tensor: torch.Tensor) -> bool:
    """Not so of what `torch.autograd.grad(..., is_grads_batched=True)` passes."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return False
    return True


def overrides_operators(cls: type) -> bool:
    """Whether a tensor class has a `__torch_function__` of its own."""
    function = cls.__torch_function__  # type: ignore[attr-defined]  # of tensor classes alone, which `type` does not say
    own = getattr(function, "__func__", function)
    return own not in (torch.Tensor.__torch_function__.__func__, torch.nn.Parameter.__torch_function__)  # type: ignore[attr-defined]  # bound


def has_pointer(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor is memory: not sparse, not a lazy zero, not left wrapped by a transform."""
    if torch._C._functorch.maybe_get_level(tensor) != -1:  # 2.11, 2.14
        return False
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor._is_zerotensor()  # 2.11, 2.14


def memory_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, fake ones too."""
    return tensor.untyped_storage()._cdata  # 2.11, 2.14


# A context manager: while inside, neither function modes nor tensor classes see calls of PyTorch's functions
unwatched: Callable[[], contextlib.AbstractContextManager] = getattr(torch._C, "DisableTorchFunction", contextlib.nullcontext)  # 2.11, 2.14


def unseen_size(tensor: torch.Tensor, dim: int) -> int:
    """A size, unseen by modes."""
    with unwatched():
        return tensor.shape[dim]


def is_symbolic(size: Any) -> bool:
    """Whether a size is an unknown of a trace."""
    return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None  # 2.11, 2.14


def size_hint(size: Any) -> int:
    """The number that a symbolic size has in this trace, which is not bound to it. (Bound where PyTorch knows none.)"""
    found = size.node.hint  # 2.11, 2.14
    return int(size) if found is None else int(found)


def size_expression(size: Any) -> str:
    """The expression of a symbolic size; equal ones are written alike."""
    return str(size.node.expr)  # 2.11, 2.14
