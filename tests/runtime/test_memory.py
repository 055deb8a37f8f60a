"""Blocks of large results are used again, and only when nobody holds them."""

import gc
import threading
import weakref

import pytest
import torch
from cores import lif
from torch import nn

import flexsn
from flexsn._runtime import memory

SIZE = memory.LEAST // 4


def empty(shape, dtype):
    return memory.allocator(CPU, shape, memory.dense_strides(shape), dtype)()


CPU = torch.device("cpu")


def test_small_results_are_the_allocators():
    assert torch.equal(empty((0, 3), torch.float32), torch.empty(0, 3, device=CPU))
    x = empty((SIZE - 1,), torch.float32)
    assert x.untyped_storage().nbytes() == 4 * (SIZE - 1)


def test_a_dead_block_is_used_again_and_a_live_one_is_not():
    x = empty((2, SIZE), torch.float32)
    place = x.data_ptr()
    view = x[1:]
    del x
    other = empty((2, SIZE), torch.float32)
    assert other.data_ptr() != place  # `view` lives
    del view
    again = empty((2, SIZE), torch.float16), empty((2, SIZE), torch.float32)
    assert [a.data_ptr() == place for a in again] == [False, True]  # half the size does not fit
    assert again[1].is_contiguous() and not again[1]._is_view()


def test_kept_bytes_are_bounded(monkeypatch):
    memory._free.clear()
    monkeypatch.setattr(memory, "MOST", 3 * memory.LEAST)
    blocks = [empty((SIZE,), torch.float32) for _ in range(8)]
    del blocks
    gc.collect()
    assert sum(map(len, memory._free)) == 3 * memory.LEAST


def test_results_of_threads_never_share_memory():
    wrong = []

    def work(k):
        for _ in range(50):
            x = empty((SIZE,), torch.float32)
            x.fill_(k)
            if not bool((x == k).all()):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_large_result_is_an_ordinary_tensor():
    def core(x, v):
        v = v * 0.5 + x
        return v * 2.0, v

    x = torch.randn(2, SIZE, requires_grad=True)
    y = flexsn.scan(core, inputs=(x,), states=(None,)).outputs[0]
    y += 1.0  # in place on a result, as on any other
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0) + torch.tensor([[1.0], [0.0]]))


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.tau = nn.Parameter(torch.tensor(2.0))

    def forward(self, x, v):
        return lif(x, v, self.tau, 1.0)


@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("backend", ["auto", "torch", "hop"])
def test_the_first_call_of_a_size_leaves_nothing_to_the_garbage_collector(backend, trains):
    module, weight = flexsn.FlexSN(Learned(), num_states=1, backend=backend), torch.randn(4, 6, requires_grad=True)

    def use(T, batch):
        flexsn.reset_net(module)
        with torch.set_grad_enabled(trains):
            x = torch.randn(T, batch, 4) @ weight
            y = module(x)
        if trains:
            y.sum().backward()
        return weakref.ref(x), weakref.ref(y)

    use(2, 2)  # PyTorch's own modules, on their first import, hold the frames of a call
    gc.collect()
    gc.disable()
    try:
        assert [ref() for sizes in ((5, 2), (5, 3), (40, 3)) for ref in use(*sizes)] == [None] * 6
    finally:
        gc.enable()
