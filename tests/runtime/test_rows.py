"""Operands in other orders of memory than that of their dims: `torch.channels_last`, transposed, strided."""

import pytest
import torch
from helpers import backends, check

import flexsn
from flexsn._runtime.layout import by_index, dense, memory_order, rows
from flexsn._runtime.memory import dense_strides


def core(x, v, w):
    h = v + (x - v) * w
    s = flexsn.surrogate.atan(h - 1.0)
    return s, h * (1.0 - s)


def channels_last(x):
    """`[T, B, C, *space]` with the channels innermost in memory."""
    return x.movedim(2, -1).contiguous().movedim(-1, 2)


def batch_innermost(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def time_inside(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("lay", [channels_last, batch_innermost, time_inside, lambda x: x[..., ::2]])
@pytest.mark.parametrize("param", [(3, 1, 1), (), (2, 3, 4, 6), (6,), (2, 1, 1, 6)], ids=str)
def test_memory_in_any_order(lay, param):
    torch.manual_seed(0)
    wide = lay(torch.zeros(1, 1, 1, 1, 12)).shape[-1] == 6
    x, w = lay(torch.randn(9, 2, 3, 4, 12 if wide else 6) * 2), torch.rand(param)
    check(core, [x], [None], [w], sequences=True)
    check(core, [x], [torch.rand(2, 3, 4, 6)], [w])


@pytest.mark.parametrize("shape", [(9, 2, 3, 4, 6), (1, 2, 3, 4, 6), (9, 1, 3, 1, 6)], ids=str)
def test_what_is_written_lies_as_the_first_input_does(shape):
    x = channels_last(torch.randn(shape)).requires_grad_()
    (y,), (v,) = flexsn.scan(core, [x], [None], [torch.rand(3, 1, 1)], backend=backends()[0])
    (grad,) = torch.autograd.grad(y.sum() + v.sum(), x)
    for found in (y, v[None], grad):
        assert found.movedim(2, -1).is_contiguous()


def test_orders():
    x = torch.zeros(5, 2, 3, 4, 6)
    assert memory_order(x) is None and memory_order(time_inside(x)) is None and memory_order(x[..., ::2]) is None
    last = channels_last(x)
    assert memory_order(last) == (0, 2, 3, 1) and memory_order(last[0], leading=0) == (0, 2, 3, 1)
    assert dense(last, 1, (0, 2, 3, 1)) is last and rows(last, (2, 3, 4, 6), 1, (0, 2, 3, 1)) is last
    assert (
        dense_strides(x.shape, (0, 1, 3, 4, 2)) == last.stride() and dense_strides((5, 0, 3)) == (3, 3, 1) == torch.empty(5, 0, 3).stride()
    )
    _, inner, count = by_index(torch.zeros(3, 1, 1), (2, 3, 4, 6), (0, 2, 3, 1))
    assert (inner, count) == (1, 3)
