"""Counting and naming operands, checking what comes in and what comes back."""

import functools

import pytest
import torch
from cores import adlif, lif

import flexsn
from flexsn._capture.signature import check_operands, check_returns, core_name, make_signature, positional_names, step_shape
from flexsn.errors import OperandCountError, ReturnCountError, ReturnTypeError, SequenceLengthError, ShapeMismatchError


class Module(torch.nn.Module):
    def forward(self, x, v, w=None):
        return x, v


class Caller:
    def __call__(self, x, v):
        return x, v


def test_core_name():
    assert core_name(lif) == "lif" and core_name(functools.partial(functools.partial(lif), tau=1)) == "lif"
    assert core_name(Module()) == "Module" and core_name(Caller()) == "Caller" and core_name(lambda x: x) == "<lambda>"


@pytest.mark.parametrize(
    ("core", "found"),
    [(lif, (("x", "v", "tau", "v_th"), 4, False)), (Module(), (("x", "v", "w"), 2, False)), (Caller(), (("x", "v"), 2, False)),
     (lambda x, *rest: x, (("x",), 1, True)), (lambda x, v=1, *, k: x, (("x", "v"), 1, False)), (functools.partial(lif, v_th=1), (("x", "v", "tau"), 3, False))],
    ids=["function", "module", "object", "args", "lambda", "partial"],
)  # fmt: skip
def test_positional_names(core, found):
    assert positional_names(core) == found


def test_names_by_kind():
    sig = make_signature(adlif, 2, 2, 2)
    assert (sig.input_names, sig.state_names, sig.param_names) == (("x1", "x2"), ("v", "a"), ("beta", "rho"))
    sig = make_signature(lambda x, *rest: x, 1, 1, 1)
    assert sig.names[0] == "x" and len(set(sig.names)) == 3


@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 1, 3), (5, 0, 0), (0, 2, 2)])
def test_counts_that_do_not_fit(counts):
    with pytest.raises(OperandCountError, match="core `lif`"):
        make_signature(lif, *counts)


def test_optional_parameters_may_be_left_out():
    assert make_signature(Module(), 1, 1, 0).names == ("x", "v") and make_signature(Module(), 1, 1, 1).names == ("x", "v", "w")


def test_step_shape():
    sig = make_signature(lif, 1, 1, 2)
    assert step_shape(sig, [(4, 1), (3,)]) == (4, 3) and step_shape(sig, [(), (0,)]) == (0,)
    with pytest.raises(ShapeMismatchError, match=r"`x` \[4\], `v` \[3\]"):
        step_shape(sig, [(4,), (3,)])


def test_check_operands_returns_T():
    sig = make_signature(lif, 1, 1, 2)
    assert check_operands(sig, [torch.zeros(7, 3)], [None], [torch.zeros(()), torch.zeros(3)]) == 7
    with pytest.raises(SequenceLengthError):
        check_operands(sig, [torch.zeros(())], [None], [torch.zeros(()), torch.zeros(3)])


def test_check_returns():
    sig, t = make_signature(lif, 1, 1, 2), torch.zeros(3)
    assert check_returns(sig, t, None) == (t,) and len(check_returns(sig, [t, t], 1)) == 2
    for bad in (None, 1.0, {"y": t}, (t, None), "ab"):
        with pytest.raises(ReturnTypeError):
            check_returns(sig, bad, None)
    for bad in ((), (t,), (t, t, t)):
        with pytest.raises(ReturnCountError):
            check_returns(sig, bad, 1)


def test_decorators_that_bind_and_that_pass_on():
    def bound(core):
        @functools.wraps(core)
        def outer(x, v):
            return core(x, v, 0.5)

        return outer

    def passed_on(core):
        @functools.wraps(core)
        def outer(*args, **kwargs):
            return core(*args, **kwargs)

        return outer

    def core(x, v, tau):
        return x + v * tau, x

    assert positional_names(bound(core)) == (("x", "v"), 2, False)
    assert positional_names(passed_on(core)) == (("x", "v", "tau"), 3, False)


def configured(**settings):
    def decorate(function):
        @functools.wraps(function)
        def core(*operands):
            return function(*operands, **settings)

        return core

    return decorate


@configured(tau=2.0)
def by_position(x, v, tau):
    return x + v, v + (x - v) / tau


@configured(tau=2.0)
def by_name(x, v, *, tau):
    return x + v, v + (x - v) / tau


@pytest.mark.parametrize("core", [by_position, by_name])
@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_a_decorator_may_give_arguments_itself(core, backend):
    x = torch.ones(3, 2)
    got = flexsn.scan(core, [x], [torch.zeros(2)], backend=backend).outputs[0]
    assert got[:, 0].tolist() == [1.0, 1.5, 1.75]
