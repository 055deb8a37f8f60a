"""The same bits: over runs, threads, batch splits, tiles and chunk sizes."""

import dataclasses
import itertools
import math

import cores
import pytest
import torch

import flexsn
from flexsn import surrogate as surrogates
from flexsn._runtime import cpp_kernel as launch_cpp
from flexsn._runtime.backends import BACKENDS

T, BATCH, CHANNELS = 37, 24, 40


def adaptive(x, v, a, decay):
    """Every kind of operation: functions, selects, a param, two states."""
    h = v * torch.sigmoid(decay) + torch.tanh(x) - a * torch.exp(-v * v)
    s = surrogates.atan(h - 1.0)
    return s, h, torch.where(s > 0, torch.zeros_like(h), h), 0.9 * a + 0.1 * s


def operands(states):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(T, BATCH, CHANNELS, generator=generator)
    v = [torch.randn(BATCH, CHANNELS, generator=generator) for _ in range(states)]
    return x, v, [torch.rand(CHANNELS, generator=generator)]


def bits(core, states=2, rows=slice(None), backend="cpp", steps=T):
    """Outputs, final states, and gradients of the input, the initial states and the param."""
    x, v, params = operands(states)
    x, v = x[:steps, rows].clone().requires_grad_(), [s[rows].clone().requires_grad_() for s in v]
    params = [p.clone().requires_grad_() for p in params]
    result = flexsn.scan(core, [x], v, params, backend=backend)
    results = (*result.outputs, *result.states)
    loss = [
        torch.randn((*r.shape[:-2], BATCH, CHANNELS), generator=torch.Generator().manual_seed(k))[..., rows, :]
        for k, r in enumerate(results)
    ]
    grads = torch.autograd.grad(results, [x, *v, *params], loss)
    return [t.detach() for t in results], list(grads[:-1]), grads[-1]


def same(a, b):
    return all(t.equal(u) for t, u in zip(a, b, strict=True))


def test_a_hundred_runs():
    first = bits(adaptive)
    assert not any(t.isnan().any() for t in (*first[0], *first[1]))
    for _ in range(99):
        again = bits(adaptive)
        assert same(first[0], again[0]) and same(first[1], again[1]) and first[2].equal(again[2])


def test_any_number_of_threads(threads, monkeypatch):
    monkeypatch.setattr(launch_cpp, "_GRAIN", 64)  # so that this small call is worth threads
    threads(1)
    one = bits(adaptive)
    for count in (2, 3, 5, 8):
        threads(count)
        many = bits(adaptive)
        assert same(one[0], many[0]) and same(one[1], many[1]) and one[2].equal(many[2])


@pytest.mark.parametrize("cuts", [(0, 12, 24), (0, 1, 24), (0, 5, 7, 23, 24)])
def test_parts_of_a_batch_give_the_bits_of_the_whole(cuts):
    """All but the gradient of a param, which is a sum over neurons: that of the parts adds up to rounding."""
    values, grads, of_param = bits(adaptive)
    parts = [bits(adaptive, rows=slice(a, b)) for a, b in itertools.pairwise(cuts)]
    for k, whole in enumerate(values):
        assert torch.cat([p[0][k] for p in parts], dim=whole.dim() - 2).equal(whole)
    for k, whole in enumerate(grads):
        assert torch.cat([p[1][k] for p in parts], dim=whole.dim() - 2).equal(whole)
    total = sum(p[2] for p in parts)
    assert (total - of_param).abs().max() <= 1e-5 * of_param.abs().max()


def test_parts_in_the_order_of_a_param_per_neuron():
    """A param of one value per neuron is no sum over neurons: its gradient has the bits of the whole, too."""
    x = torch.randn(T, 90)
    p = torch.rand(90)

    def gradient(part):
        own = p[part].clone().requires_grad_()
        y = flexsn.scan(cores.leaky, [x[:, part]], [None], [own], backend="cpp").outputs[0]
        return torch.autograd.grad(y, own, torch.ones_like(y))[0]

    assert torch.cat([gradient(slice(0, 31)), gradient(slice(31, 90))]).equal(gradient(slice(0, 90)))


@pytest.mark.parametrize("tile", [64, 128, 4096])
def test_any_tile(tile, monkeypatch):
    whole = bits(adaptive)
    cut, cuts = launch_cpp.Kernel.cut, []

    def with_tile(self, T, N):
        cuts.append(self)
        return tile, *cut(self, T, N)[1:]

    def core(x, v, a, decay):  # another one: calls of `adaptive` have decided on their tiles
        return adaptive(x, v, a, decay)

    monkeypatch.setattr(launch_cpp.Kernel, "cut", with_tile)
    other = bits(core)
    assert same(whole[0], other[0]) and same(whole[1], other[1]) and whole[2].equal(other[2])
    assert len(set(cuts)) == 2


@pytest.mark.parametrize(("chunk", "backend"), [(1, "cpp"), (3, "cpp"), (64, "cpp"), (2, "triton")])
def test_any_chunk(chunk, backend, monkeypatch):
    """How far checkpoints are apart: what is recomputed has the bits of what was computed."""

    def core(x, v, a, decay):  # another one, so that no cached program has other chunks
        return adaptive(x, v, a, decay)

    steps = T if backend == "cpp" else 7
    want = bits(adaptive, backend=backend, steps=steps)
    monkeypatch.setitem(BACKENDS, backend, dataclasses.replace(BACKENDS[backend], chunk=lambda *_: chunk))
    got = bits(core, backend=backend, steps=steps)
    assert same(want[0], got[0]) and same(want[1], got[1]) and want[2].equal(got[2])


def test_triton_over_runs_and_batch_splits():
    values, grads, _ = bits(adaptive, backend="triton", steps=7)
    again = bits(adaptive, backend="triton", steps=7)
    assert same(values, again[0]) and same(grads, again[1])
    halves = [bits(adaptive, rows=r, backend="triton", steps=7) for r in (slice(0, 9), slice(9, BATCH))]
    for k, whole in enumerate((*values, *grads)):
        assert torch.cat([(*h[0], *h[1])[k] for h in halves], dim=whole.dim() - 2).equal(whole)
    assert math.isfinite(float(values[0].sum()))


def test_pieces_of_a_sequence_have_the_bits_of_the_whole():
    """The forward; states carried from piece to piece."""
    x, v, params = operands(2)
    whole = flexsn.scan(adaptive, [x], v, params, backend="cpp")
    first = flexsn.scan(adaptive, [x[:17]], v, params, backend="cpp")
    second = flexsn.scan(adaptive, [x[17:]], first.states, params, backend="cpp")
    assert torch.cat([first.outputs[0], second.outputs[0]]).equal(whole.outputs[0])
    assert same(second.states, whole.states)
