"""Operands as kernels take them, rows of neurons, and results and gradients back at the shapes of the core.

A kernel runs through memory: any order of the step's dims is as good to it as another, where all its arrays share it.
That of the first input is taken, so that networks in `torch.channels_last` need no copies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .memory import dense_strides

Order = tuple[int, ...]  # dims of the step, from the outermost in memory to the innermost


def same_shape(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """`a == b`, their lengths first: what a trace compares of symbolic sizes, also of dims that do not correspond, binds it."""
    return len(a) == len(b) and a == b


def memory_order(tensor: Tensor, leading: int = 1) -> Order | None:
    """In what order the dims of a step lie in memory after `leading` ones; None if in their own, or if not densely."""
    if tensor.is_contiguous():
        return None
    sizes, strides = tensor.shape[leading:], tensor.stride()[leading:]
    order = tuple(sorted(range(len(sizes)), key=lambda d: -strides[d]))
    dense = (*range(leading), *(leading + d for d in order))
    return order if tensor.permute(dense).is_contiguous() else None


def dense(tensor: Tensor, leading: int, order: Order | None) -> Tensor:
    """The tensor with memory of its own and its step in this order; itself if it is so."""
    if order is None:
        return tensor.contiguous()
    ordered = tensor.permute(*range(leading), *[leading + d for d in order])
    if ordered.is_contiguous():
        return tensor
    return ordered.contiguous().permute(*range(leading), *[leading + order.index(d) for d in range(len(order))])


def strides_of(shape: tuple[int, ...], leading: int, order: Order | None) -> tuple[int, ...]:
    """Of dense memory for a tensor whose step dims, after `leading` ones, lie in this order."""
    return dense_strides(shape, None if order is None else (*range(leading), *[leading + d for d in order]))


def rows(tensor: Tensor, step: tuple[int, ...], leading: int, order: Order | None = None) -> Tensor:
    """An operand broadcast to the step shape after `leading` dims, in dense memory: rows of N neurons."""
    tensor = plain(tensor)
    if not same_shape(tensor.shape[leading:], step):
        missing = leading + len(step) - tensor.dim()
        tensor = tensor.reshape(*tensor.shape[:leading], *([1] * missing), *tensor.shape[leading:])
        tensor = tensor.expand(*tensor.shape[:leading], *step)
    return dense(tensor, leading, order)


def plain(tensor: Tensor) -> Tensor:
    """With memory of its own and no lazy sign: kernels read what a pointer leads to."""
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def unbroadcast(grad: Tensor, shape: tuple[int, ...], leading: int) -> Tensor:
    """The gradient of an operand from the gradient of its rows."""
    if same_shape(grad.shape, shape):
        return grad
    missing = grad.dim() - len(shape)
    dims = list(range(leading, leading + missing))
    dims += [d + missing for d, n in enumerate(shape) if d >= leading and n == 1 and grad.shape[d + missing] != 1]
    return (grad.sum(dims) if dims else grad).reshape(shape)


def by_index(param: Tensor, step: tuple[int, ...], order: Order | None = None) -> tuple[Tensor, int, int]:
    """A param whose broadcast dims lie outside one solid block of memory needs no copy; any other is expanded."""
    param = plain(param)
    if order is not None:
        param = param.reshape((1,) * (len(step) - param.dim()) + tuple(param.shape)).permute(order)
        step = tuple([step[d] for d in order])
    shape = (1,) * (len(step) - param.dim()) + tuple(param.shape)
    solid = [d for d, n in enumerate(shape) if n != 1]
    if not solid:
        return param, max(1, math.prod(step)), 1
    block = range(solid[0], solid[-1] + 1)
    if all(shape[d] == step[d] for d in block):
        return param.contiguous(), math.prod(step[block.stop :]), math.prod(shape)
    return param.expand(step).contiguous(), 1, math.prod(step)


def narrow(full: Tensor, shape: tuple[int, ...], leading: int) -> Tensor:
    """What the core returns at a smaller shape is constant along the dims it lacks."""
    if same_shape(full.shape, shape):
        return full
    missing = full.dim() - len(shape)
    for _ in range(missing):
        full = full.select(leading, 0)
    for d, n in enumerate(shape):
        if n == 1 and full.shape[d] != 1:
            full = full.narrow(d, 0, 1)
    return full.clone(memory_format=torch.contiguous_format)  # its own memory, not the whole block


def widen(grad: Tensor, step: tuple[int, ...], leading: int, order: Order | None) -> Tensor:
    """The adjoint of `narrow`, in dense memory."""
    grad = plain(grad)  # that of `sgn` has no memory
    if same_shape(grad.shape[leading:], step):
        return dense(grad, leading, order)
    target = (*grad.shape[:leading], *step)
    full = grad.new_zeros(target)
    part = full
    for _ in range(len(target) - grad.dim()):
        part = part.select(leading, 0)
    for d, n in enumerate(grad.shape):
        if n == 1 and part.shape[d] != 1:
            part = part.narrow(d, 0, 1)
    part.copy_(grad)
    return dense(full, leading, order)
