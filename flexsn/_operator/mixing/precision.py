"""The dtypes of products in a core: elementwise ops compute in float32 where operands are 16-bit floats, products in 16 bits.

Under autocast a product of float32 values runs as autocast has it; beside weights of 16 bits its operand is rounded to theirs. What it
gives goes on in float32, as sums and states do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..._ir.graph import HALF

_PRODUCTS = {
    F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, torch.conv1d,
    torch.conv2d, torch.conv3d, torch.matmul, torch.mm, torch.bmm, torch.mv, torch.addmm, torch.addmv, torch.addbmm, torch.baddbmm,
    torch.einsum, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.mv, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.addmm,
    F.scaled_dot_product_attention,
}  # fmt: skip
_NORMS = {F.layer_norm, F.group_norm, F.batch_norm, F.instance_norm, F.rms_norm, torch.layer_norm, torch.group_norm}


def in_its_dtype(func: Callable, args: Any, kwargs: dict[str, Any], autocast: torch.dtype | None) -> Any:
    """Call a function of PyTorch, and return its result: products in the dtype that this module says, norms in float32.

    Args:
        autocast: the dtype of autocast at the call of the core; None where it is off.
    """
    if func not in _PRODUCTS and func not in _NORMS:
        return func(*args, **kwargs)
    floats = [t for t in tensors_in((args, kwargs)) if t.is_floating_point()]
    dtypes = {t.dtype for t in floats}
    half = dtypes & {*HALF}
    if dtypes == half or (autocast is None and not half) or torch.float64 in dtypes:
        return func(*args, **kwargs)
    if autocast is not None and func in _PRODUCTS:
        with torch.autocast(floats[0].device.type, autocast):
            result = func(*args, **kwargs)
    else:
        to = next(iter(half)) if func in _PRODUCTS else torch.float32
        given = [t.to(to) if t.is_floating_point() else t for t in tensors_in((args, kwargs))]
        args, kwargs = with_tensors((args, kwargs), iter(given))
        result = func(*args, **kwargs)
    return result.float()


class Products(TorchFunctionMode):
    """While inside, calls of PyTorch go by `in_its_dtype`; autocast reaches those that take what depends on time.

    Args:
        moving: tensors that do.
    """

    def __init__(self, autocast: torch.dtype | None, moving: Sequence[Tensor]):
        super().__init__()
        self.autocast, self.moving = autocast, {id(t): t for t in moving}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not any(id(t) in self.moving for t in tensors_in((args, kwargs))):
            return in_its_dtype(func, args, kwargs, None)
        result = in_its_dtype(func, args, kwargs, self.autocast)
        self.moving |= {id(t): t for t in tensors_in(result)}
        return result


def precise(core: Callable, autocast: torch.dtype | None, moving: int) -> Callable:
    """Return the core, whose products and norms go by `in_its_dtype`; its first `moving` operands depend on time."""

    def run(*operands: Tensor) -> Any:
        with Products(autocast, operands[:moving]):
            return core(*operands)

    return run


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list, dict)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(value)


def with_tensors(tree: Any, given: Iterator[Tensor]) -> Any:
    """Return arguments with other tensors, in order."""
    if isinstance(tree, Tensor):
        return next(given)
    if isinstance(tree, dict):
        return {key: with_tensors(value, given) for key, value in tree.items()}
    return type(tree)([with_tensors(value, given) for value in tree]) if isinstance(tree, (tuple, list)) else tree
