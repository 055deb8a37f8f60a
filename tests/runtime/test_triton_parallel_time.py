"""Parts of time side by side on a GPU, or in Triton's interpreter, give what one walk gives, up to rounding."""

import pytest
import torch
from test_parallel_time import AFFINE, CORES, one_after_the_other

import flexsn
from flexsn._ir.roles import Kind
from flexsn._runtime.triton import parallel_time
from flexsn._runtime.triton.kernel import interpreted


@pytest.fixture
def walks(monkeypatch):
    """The kinds of what was carried in the calls whose parts of time ran side by side."""
    found = []
    call = parallel_time._Walks.__call__

    def noted(self, arrays, dims):
        found.append(self.rows[0].kind)
        call(self, arrays, dims)

    monkeypatch.setattr(parallel_time, "LEAST_STEPS", 64)
    monkeypatch.setattr(parallel_time._Walks, "__call__", noted)
    return found


def steps():
    """Three parts, of which the last has one step; on a GPU many."""
    return 65 if interpreted() else 20_001


def operands(core, params, step, dtype):
    torch.manual_seed(0)
    x = (torch.randn(steps(), *step, dtype=dtype) + 0.8).requires_grad_()
    states = [torch.rand(step, dtype=dtype).requires_grad_() for _ in range(core)]
    return x, states, [(torch.rand(step) if p == "step" else p.detach().clone()).to(x).requires_grad_() for p in params]


def gradients(name, step, sequences, dtype=torch.float64):
    core, states, params = CORES[name]
    x, states, params = operands(states, params, step, dtype)
    found = flexsn.scan(core, (x,), tuple(states), params=tuple(params), store_state_seqs=sequences, backend="triton")
    results = [*found.outputs, *found.states]
    generator = torch.Generator(x.device).manual_seed(1)
    cotangents = [torch.randn(r.shape, generator=generator, device=r.device).to(r.dtype) for r in results]
    return torch.autograd.grad(results, [x, *states, *params], cotangents)


@pytest.mark.parametrize("name, step, sequences", [("per neuron", (3,), True), ("adaptive", (2, 2), False), *[
    pytest.param(name, (3,), sequences, marks=pytest.mark.full) for name in CORES for sequences in (False, True)
]])  # fmt: skip
def test_gradients(walks, name, step, sequences):
    found = gradients(name, step, sequences)
    assert walks == [Kind.STATE_GRAD]
    with one_after_the_other():
        expected = gradients(name, step, sequences)
    assert len(walks) == 1
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name, given", [("state space", True), pytest.param("leaky", False, marks=pytest.mark.full)])
def test_affine_states(walks, name, given):
    core, states, params = AFFINE[name]
    results = []
    for exact in (True, False):
        assert not walks
        x, first, leaves = operands(states, params, (3,), torch.float64)
        first = first if given else [None] * states
        found = flexsn.scan(core, (x,), tuple(first), tuple(leaves), exact=exact, store_state_seqs=True, backend="triton")
        results.append([*found.outputs, *found.states])
    assert walks == [Kind.STATE]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_what_checkpoints_of_parts_give(walks):
    """The backward of a forward in parts starts from its checkpoints."""
    core, _, params = AFFINE["leaky"]
    found = []
    for exact in (True, False):
        x, _, leaves = operands(1, params, (3,), torch.float64)
        y = flexsn.scan(core, (x,), (None,), tuple(leaves), exact=exact, backend="triton").outputs[0]
        found.append(torch.autograd.grad(y.square().sum(), [x, *leaves]))
    assert walks == [Kind.STATE_GRAD, Kind.STATE, Kind.STATE_GRAD]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_growing_states_with_a_loss_on_the_first_steps(walks):
    """`A` overflows in later parts, and nothing times it is nothing."""

    def grows(x, v):
        v = v * 50.0 + x
        return v, v

    x = torch.zeros(129, 2, requires_grad=True)
    y = flexsn.scan(grows, (x,), (None,), backend="triton").outputs[0]
    found = torch.autograd.grad(y[:10].sum(), x)[0]
    assert walks and found.isfinite().all() and not found[10:].any()
    torch.testing.assert_close(found[:10, 0], torch.tensor([sum(50.0**k for k in range(10 - t)) for t in range(10)]))


@pytest.mark.parametrize("ends", [(1.0, 0.15), (0.5, 0.0), (0.98, 1.0)])
def test_sequences_that_end(walks, ends):
    """Parts that begin past the end of all sequences of a program start from the states at it."""
    T = steps()
    lengths, found = torch.tensor([int(share * T) for share in ends]), []

    def run():
        torch.manual_seed(0)
        x = (torch.randn(T, 2, 2, dtype=torch.float64) + 0.8).requires_grad_()
        v = torch.rand(2, 2, dtype=torch.float64).requires_grad_()
        results = flexsn.scan(CORES["lif"][0], (x,), (v,), lengths=lengths, backend="triton")
        weights = torch.linspace(1, 2, T, dtype=x.dtype, device=x.device)[:, None, None]
        return torch.autograd.grad((results.outputs[0] * weights).sum() + results.states[0].square().sum(), [x, v])

    found.append(run())
    assert walks == [Kind.STATE_GRAD]
    with one_after_the_other():
        found.append(run())
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
