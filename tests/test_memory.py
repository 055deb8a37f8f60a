"""Blocks of large results are used again, and only when nobody holds them."""

import gc
import threading

import torch

import flexsn
from flexsn import memory

SIZE = memory.LEAST // 4
CPU = torch.device("cpu")


def test_small_results_are_the_allocators():
    assert torch.equal(memory.empty((0, 3), torch.float32, CPU), torch.empty(0, 3))
    x = memory.empty((SIZE - 1,), torch.float32, CPU)
    assert x.untyped_storage().nbytes() == 4 * (SIZE - 1)


def test_a_dead_block_is_used_again_and_a_live_one_is_not():
    x = memory.empty((2, SIZE), torch.float32, CPU)
    place = x.data_ptr()
    view = x[1:]
    del x
    other = memory.empty((2, SIZE), torch.float32, CPU)
    assert other.data_ptr() != place  # `view` lives
    del view
    again = memory.empty((2, SIZE), torch.float16, CPU), memory.empty((2, SIZE), torch.float32, CPU)
    assert [a.data_ptr() == place for a in again] == [False, True]  # half the size does not fit
    assert again[1].is_contiguous() and not again[1]._is_view()


def test_kept_bytes_are_bounded(monkeypatch):
    memory._free.clear()
    monkeypatch.setattr(memory, "MOST", 3 * memory.LEAST)
    blocks = [memory.empty((SIZE,), torch.float32, CPU) for _ in range(8)]
    del blocks
    gc.collect()
    assert sum(map(len, memory._free)) == 3 * memory.LEAST


def test_results_of_threads_never_share_memory():
    wrong = []

    def work(k):
        for _ in range(50):
            x = memory.empty((SIZE,), torch.float32, CPU)
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
    y = flexsn.scan(core, inputs=(x,), states=(None,), backend="cpp").outputs[0]
    y += 1.0  # in place on a result, as on any other
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0) + torch.tensor([[1.0], [0.0]]))
