"""The layers that stand beside neurons: `PerStep` and `Delay`."""

import numpy as np
import pytest
import torch
from torch import nn

import flexsn
from flexsn import interchange
from flexsn.errors import ArgumentError, CarriedStateError, ShapeMismatchError, StateMismatchError

T, B = 9, 3


def test_they_are_public_names():
    assert flexsn.PerStep is interchange.PerStep and flexsn.Delay is interchange.Delay


def test_a_convolution_at_every_step():
    conv, x = nn.Conv2d(2, 3, 3), torch.randn(T, B, 2, 5, 5)
    layer = flexsn.PerStep(conv, 3)
    torch.testing.assert_close(layer(x), torch.stack([conv(step) for step in x]))
    assert layer(x[:0]).shape == (0, B, 3, 3, 3)
    torch.testing.assert_close(layer(x[:, 0]), torch.stack([conv(step[:1]) for step in x])[:, 0])


@pytest.mark.parametrize("shape", [(2, 5, 5), (5, 5)], ids=str)
def test_a_single_step_without_a_batch_is_told_so(shape):
    with pytest.raises(
        ShapeMismatchError, match=r"PerStep: an input of shape .* has no dims before the 3 of one step[\s\S]*\[T, B, \*shape\]"
    ):
        flexsn.PerStep(nn.Conv2d(2, 3, 3), 3)(torch.randn(shape))


# --- Delay ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [3, torch.tensor(3), [3, 3, 3, 3], torch.tensor([3.0]), np.int64(3)], ids=str)
def test_one_delay_for_all(steps):
    x = torch.randn(T, B, 4)
    y = flexsn.Delay(steps)(x)
    assert torch.equal(y[3:], x[:-3]) and not y[:3].any()


@pytest.mark.parametrize("steps", [2.5, -1, torch.tensor([1, -2]), torch.tensor([0.5])], ids=str)
def test_delays_that_are_no_whole_numbers_are_refused(steps):
    with pytest.raises(ArgumentError, match="Delay: steps must be whole numbers, 0 or more, not"):
        flexsn.Delay(steps)


def test_no_delay_takes_any_batch():
    layer = flexsn.Delay(0)
    for x in (torch.randn(T, B, 4), torch.randn(2, 1, 5, dtype=torch.float64)):
        assert torch.equal(layer(x), x)


def test_single_steps_are_delayed_as_sequences():
    x, steps = torch.randn(T, B, 3), torch.tensor([0, 2, 5])
    layer = flexsn.Delay(steps, step_mode="s")
    assert torch.equal(torch.stack([layer(step) for step in x]), flexsn.Delay(steps)(x))


@pytest.mark.parametrize(
    "other", [torch.ones(T, 2, 4), torch.ones(T, B, 4, dtype=torch.float64), torch.ones(T, 4), torch.ones(T, B, 1)], ids=lambda x: f"{x.dtype} {[*x.shape]}"
)  # fmt: skip
def test_another_kind_of_sequence_needs_a_reset(other):
    layer, x = flexsn.Delay(2), torch.randn(T, B, 4)
    first = layer(x)
    with pytest.raises(StateMismatchError, match=r"Delay: carries 2 inputs of shape \[3, 4\], torch.float32 on cpu[\s\S]*Call `reset\(\)`"):
        layer(other)
    layer.reset()
    assert torch.equal(layer(other)[2:], other[:-2]) and layer(other).dtype == other.dtype
    layer.reset()
    assert torch.equal(layer(x), first)


def test_a_delay_casts_what_it_carries_with_its_network():
    layer, x = flexsn.Delay(2), torch.randn(T, B, 4, dtype=torch.float64).float().double()
    layer(x.float())
    layer.double()
    assert torch.equal(layer(x)[:2], x[-2:]) and layer.steps.dtype == torch.int64


def test_delays_that_do_not_fit_the_step():
    with pytest.raises(ShapeMismatchError, match=r"Delay: steps of shape \[5\] do not broadcast to one step \[3, 4\]"):
        flexsn.Delay([1, 2, 3, 4, 5])(torch.randn(T, B, 4))


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_delays_count(assign):
    layer, x = flexsn.Delay(1), torch.randn(T, B, 4)
    layer.load_state_dict(flexsn.Delay(4).state_dict(), assign=assign)
    assert torch.equal(layer(x), flexsn.Delay(4)(x)) and repr(layer) == "Delay(steps=[4])"
    layer.load_state_dict(flexsn.Delay(2).state_dict())
    with pytest.raises(StateMismatchError, match="carries 4 inputs"):
        layer(x)


def test_gradients_pass_a_delay_and_end_at_a_detached_state():
    layer, x = flexsn.Delay([0, 1, 2]), torch.randn(T, B, 3, requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(x.grad, torch.stack([torch.arange(T) < T - k for k in range(3)], -1).float()[:, None].expand(T, B, 3))
    flexsn.detach_states(layer)
    assert not layer.states[0].requires_grad


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")  # strict: states are assigned
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of surrogates, by Dynamo
@pytest.mark.parametrize("strict", [False, True])
def test_a_delay_in_an_exported_network(strict):
    net = nn.Sequential(flexsn.Delay([0, 3, 1, 2]), flexsn.LIF(v_threshold=0.3))
    batch, time = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("time", min=2, max=64)
    program = torch.export.export(net, (torch.rand(T, B, 4),), dynamic_shapes=[{0: time, 1: batch}] if not strict else None, strict=strict)
    for x in [torch.rand(T, B, 4)] * 2 + ([] if strict else [torch.rand(2, 7, 4)]):
        flexsn.reset_net(net)
        want = net(x)
        assert torch.equal(program.module()(x), want) and (want.any() or len(x) < 3)
    with pytest.raises(CarriedStateError, match=r"Call `reset\(\)`"):
        torch.export.export(net[:1], (torch.rand(T, B, 4),), strict=strict)


def test_a_delay_in_a_compiled_network():
    torch._dynamo.reset()
    layer, x = flexsn.Delay([0, 3, 1, 2]), torch.rand(T, B, 4)
    want = [layer(x), layer(x)]
    layer.reset()
    fast = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(fast(x), want[0]) and torch.equal(fast(x), want[1]) and not torch.equal(*want)
