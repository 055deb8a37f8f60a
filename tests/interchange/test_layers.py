"""The layers that stand beside neurons: `PerStep` and `Delay`."""

import pytest
import torch
from torch import nn

import flexsn
from flexsn import interchange
from flexsn.errors import ShapeMismatchError

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
