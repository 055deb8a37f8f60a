"""Ops of PyTorch that are noted in one call, and run again on other tensors."""

import pytest
import torch
from helpers import on_cpu

from flexsn._program.replay import Kinds, Notes, Repeated, layouts
from flexsn._runtime.launch import as_one, refuse_notes

pytestmark = on_cpu


def noted(function, *given):
    """The replay of what `function` returns, and what a kernel that does nothing was handed."""
    ran = []
    with Notes(given) as notes:
        returned, taken = function(fresh, *given)
        as_one(lambda taken: ran.append(list(taken)), taken, addresses=True)
    return notes.replay(returned), ran


def fresh(make):
    return as_one(lambda _: make(), ())


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
    for a, b in zip(ran[1], taken, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
    assert ran[1][1].data_ptr() == x.data_ptr()


def test_what_nothing_needs_is_left_out():
    def function(fresh, x):
        x.exp().unsqueeze(0)
        fresh(lambda: torch.zeros(3)).add_(1.0)
        return [x * 2.0], []

    replay, _ = noted(function, torch.ones(3))
    assert [step.func for step in replay.steps if step.writes is not None] == [torch.ops.aten.mul.Tensor]


def test_a_kernel_takes_what_a_view_was_made_of():
    """Its address is what matters, where it starts there: the views are left out."""

    def function(fresh, x):
        return [], [x.unsqueeze(0).flatten(), x[1:].flatten()]

    replay, ran = noted(function, torch.ones(3, 2))
    given = torch.rand(3, 2)
    replay([given])
    assert ran[1][0] is given and ran[1][1].data_ptr() == given[1:].data_ptr()


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


def test_views_that_change_nothing_are_left_out():
    """As `detach`; but what is returned is another tensor than what was given."""
    replay, _ = noted(lambda fresh, x: ([x.detach().view(2, 3).unsqueeze(0).squeeze(0), x.t() + 1.0], []), torch.ones(2, 3))
    x = torch.rand(2, 3, requires_grad=True)
    same, other = replay([x])
    assert same is not x and same.data_ptr() == x.data_ptr() and not same.requires_grad and torch.equal(other, x.t() + 1.0)
    assert [getattr(step.func, "__name__", "kernel") for step in replay.steps] == ["t.default", "add.Tensor", "detach"]


def test_results_that_are_none_have_numbers_too():
    """As of gradients of a convolution that are not asked for."""

    def function(fresh, x, w, g):
        options = [2], [1], [1], [1], False, [0], 1, [True, False, False]  # from the sizes of the bias on
        of_input, of_weight, of_bias = torch.ops.aten.convolution_backward(g, x, w, *options)
        assert of_weight is None and of_bias is None
        return [of_input * 2.0, of_input], []

    shapes = (3, 2, 7), (2, 2, 3), (3, 2, 7)
    replay, _ = noted(function, *map(torch.randn, shapes))
    given = [torch.randn(shape) for shape in shapes]
    want, _ = function(None, *given)
    assert all(map(torch.equal, replay(given), want))


def test_what_is_written_to_what_was_given_stays():
    replay, _ = noted(lambda fresh, x, count: ([x * 2.0], [count.add_(1)]), torch.ones(2), torch.zeros(()))
    count = torch.tensor(3.0)
    replay([torch.ones(2), count])
    assert count == 4


def test_launches_are_ops():
    """What one writes is read by an op, and what an op writes by it."""

    def kernel(tensors):
        x, out, _ = tensors
        out.copy_(x * 10.0)

    def function(x):
        out = torch.empty(3)
        as_one(kernel, [x + 1.0, out, None])
        return [out[1:] * 2.0, *as_one(lambda given: [given[0].sum(), given[0].exp()], [out])]

    x = torch.ones(3)
    with Notes([x]) as notes:
        returned = function(x)
    replay = notes.replay(returned)
    for a, b in zip(replay([torch.arange(3.0)]), function(torch.arange(3.0)), strict=True):
        assert torch.equal(a, b)


def test_what_is_long_is_not_noted():
    x = torch.ones(3)
    with Notes([x]) as notes:
        y = x + 1.0
        refuse_notes("it is long")
        y = as_one(lambda given: given[0] * 2.0, [y]) + x
    assert notes.replay([y]) is None and notes.strange == "it is long" and not notes.values


def test_kinds_note_the_second_call():
    """The first one that is told to take part in another one's notes runs for these."""
    kinds, ran = Kinds(), []

    def double(x):
        def work():
            ran.append(x)
            return [x * 2.0], "beside"

        return kinds.run(("double",), [x], work)

    for n in range(4):
        (y,), beside = double(torch.full((2,), float(n)))
        assert y.tolist() == [2.0 * n] * 2 and beside == "beside"
    assert len(ran) == 2
    x = torch.ones(2)
    with Notes([x]) as notes:
        (y,), _ = double(x)
    assert len(ran) == 3 and notes.replay([y])([torch.full((2,), 5.0)])[0].tolist() == [10.0] * 2


def test_kinds_that_are_refused_stay_so():
    kinds, ran = Kinds(), []

    def work():
        ran.append(1)
        raise ValueError("not this one")

    for _ in range(3):
        with pytest.raises(ValueError, match="not this one"):
            kinds.run((), [torch.ones(1)], work, ValueError)
    assert len(ran) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_of_autograd(mode):
    with mode():
        replay, _ = noted(views, torch.arange(3.0), torch.ones(1, 3))
    with torch.no_grad():
        found = replay([torch.ones(3), torch.zeros(1, 3)])
    assert found[2].tolist() == [2.0, 2.0, 2.0] and not any(t.is_inference() for t in found)


def test_steps_are_noted_once_and_repeated():
    """Also where one has no tensor; what is the same in every step comes from outside."""
    weights, ran = torch.randn(3, 3), []

    def step(given):
        row, state, nothing = given
        ran.append(len(ran))
        assert nothing is None
        state = torch.tanh(row + state @ weights)
        return [state * 2.0, None, state.unsqueeze(0)]

    def walk(run):
        state, found = torch.zeros(4, 3), []
        for row in rows.unbind(0):
            y, nothing, state = run([row, state, None])
            state = state.squeeze(0)
            assert nothing is None
            found.append(y)
        return torch.stack(found)

    rows = torch.randn(6, 4, 3)
    want, ran[:] = walk(step), []
    repeated = Repeated(step, [weights], repeats=True)
    assert torch.equal(walk(repeated), want) and ran == [0, 1] and repeated.replay is not None


def test_steps_that_differ_or_keep_something_are_not_repeated():
    def walk(given, *fixed, repeats=True):
        ran = []

        def step(given):
            ran.append(given)
            return [given[0] * weights]

        repeated = Repeated(step, fixed, repeats=repeats)
        found = [repeated([x])[0] for x in given]
        assert all(torch.equal(y, x * weights) for x, y in zip(given, found, strict=True))
        return len(ran)

    weights, alike = torch.randn(3), [*torch.randn(5, 2, 3).unbind(0)]
    assert walk(alike, weights) == 2
    assert walk(alike, weights, repeats=False) == 5
    assert walk(alike) == 5  # of a tensor from elsewhere
    assert walk([*alike[:2], *torch.randn(5, 3, 2).mT.unbind(0)], weights) == 7
