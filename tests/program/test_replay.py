"""Ops of PyTorch that are noted in one call, and run again on other tensors."""

import pytest
import torch
from helpers import on_cpu

from flexsn._program.replay import Notes, layouts

pytestmark = on_cpu


def noted(function, *given):
    """What `function` returns and hands to a kernel, which does nothing; its replay."""
    ran = []
    with Notes(given) as notes:
        returned, taken = function(notes.fresh, *given)
    return notes.replay(taken, ran.append, returned), ran


def views(fresh, x, y):
    """Views, a copy, fresh memory that is written to in part, and a list of tensors."""
    rows = fresh(lambda: torch.full((2, 3), torch.nan))
    rows[1] = y.reshape(3)
    rows[0].zero_()
    wide = x.unsqueeze(0).expand(4, 3).contiguous()
    _first, second = torch.cat([wide, rows]).split([2, 4])
    return [second.T, rows, x + 1.0], [rows, x.detach(), None, wide]


def test_ops_run_again_on_other_tensors():
    replay, ran = noted(views, torch.arange(3.0), torch.ones(1, 3))
    x, y = torch.tensor([5.0, 6.0, 7.0]), torch.tensor([[1.0, 2.0, 3.0]])
    want, taken = views(lambda make: make(), x, y)
    found = replay([x, y])
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
    for a, b in zip(ran[0], taken, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
    assert ran[0][1].data_ptr() == x.data_ptr()


def test_what_nothing_needs_is_left_out():
    def function(fresh, x):
        x.exp().unsqueeze(0)
        fresh(lambda: torch.zeros(3)).add_(1.0)
        return [x * 2.0], []

    replay, _ = noted(function, torch.ones(3))
    assert len(replay.steps) == 1


def test_a_kernel_takes_what_a_view_was_made_of():
    """Its address is what matters, where it starts there: the views are left out."""

    def function(fresh, x):
        return [], [x.unsqueeze(0).flatten(), x[1:].flatten()]

    replay, ran = noted(function, torch.ones(3, 2))
    given = torch.rand(3, 2)
    replay([given])
    assert ran[0][0] is given and ran[0][1].data_ptr() == given[1:].data_ptr()


def test_a_tensor_from_elsewhere_is_not_taken_for_one_of_the_call():
    other = torch.ones(3)
    assert noted(lambda fresh, x: ([x + other], []), torch.ones(3))[0] is None
    assert noted(lambda fresh, x: ([x], [other]), torch.ones(3))[0] is None
    assert noted(lambda fresh, x: ([x + 1.0], []), torch.ones(0))[0] is None


def test_layouts_tell_which_tensors_share_memory():
    x, y = torch.ones(4), torch.ones(4)
    assert layouts([x, y, None]) == layouts([y, x, None])
    for others in ([x, x, None], [x, y[:2], None], [x, y, x], [x.double(), y, None], [x, y.expand(3, 4), None]):
        assert layouts(others) != layouts([x, y, None])
    assert layouts([x, x[1:3]]) != layouts([x, x[:2]])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_of_autograd(mode):
    with mode():
        replay, _ = noted(views, torch.arange(3.0), torch.ones(1, 3))
    with torch.no_grad():
        found = replay([torch.ones(3), torch.zeros(1, 3)])
    assert found[2].tolist() == [2.0, 2.0, 2.0] and not any(t.is_inference() for t in found)
