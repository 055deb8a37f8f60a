"""Random cores that mix neurons, against the eager loop: outputs, states and every gradient, in float64."""

import pytest
import torch
from fuzzing import batch, mixing
from fuzzing.case import LAYOUTS
from helpers import on_cpu

from flexsn._operator.mixing.mixing_calls import MixingFunction
from flexsn._runtime import cpp_kernel

SEED = 1
pytestmark = on_cpu  # whose kernels are built together


def cases(first, last):
    return [mixing.generate(f"{SEED}/{k}") for k in range(first, last)]


def judged(first, last, flags=batch.FAST_BUILD):
    said = mixing.complaints(cases(first, last), flags)
    assert not said, "\n\n".join(said)


@pytest.mark.parametrize(
    "first", [0, pytest.param(40, marks=pytest.mark.slow), *(pytest.param(k, marks=pytest.mark.full) for k in (80, 120))]
)
def test_random_cores_that_mix_neurons(first):
    judged(first, first + (40 if first else 8))


@pytest.mark.full
def test_random_cores_that_mix_neurons_as_users_get_them(threads):
    threads(2)
    judged(200, 216, batch.AS_USERS_GET_THEM)


def test_a_fault_in_a_gradient_is_found(monkeypatch):
    own = MixingFunction.of_operand
    monkeypatch.setattr(MixingFunction, "of_operand", lambda self, *given: own(self, *given) * (1 + 1e-8))
    monkeypatch.setattr(cpp_kernel, "_FLAGS", batch.FAST_BUILD)
    convolved = next(case for case in cases(0, 100) if any(line.op == "conv" and line.args[0] == "v0" for line in case.lines))
    assert "gradient of" in mixing.complaint(convolved)


def test_the_generator_draws_every_word_shape_and_layout():
    drawn = cases(0, 400)
    lines = [line for case in drawn for line in case.lines if line.op]
    of_inputs, of_states = ({line.op for line in lines if line.args[0].startswith(letter)} for letter in "xv")
    assert of_states == {*mixing.OF_ROWS, *mixing.WITHIN, *mixing.OF_IMAGES}
    assert of_inputs >= {*mixing.OF_ROWS, *mixing.OF_IMAGES}
    assert {case.T for case in drawn} == set(mixing.T_VALUES) and {len(case.states) for case in drawn} == {1, 2, 3}
    assert {o.layout for case in drawn for o in case.operands} == set(LAYOUTS)
    widths = [(case.inputs[0].values.shape[1:], case.states[0].values.shape) for case in drawn]
    assert len({v[-1] for _, v in widths}) >= 8 and 0.3 < sum(x != v for x, v in widths) / len(drawn) < 0.7
    assert {sum(line.args[0].startswith("v") for line in case.lines if line.op) for case in drawn} >= {1, 2, 3, 4}


def test_a_label_says_everything():
    first, second = mixing.generate("7/3"), mixing.generate("7/3")
    assert first.script("auto") == second.script("auto")
    assert all(torch.equal(a.tensor(), b.tensor()) for a, b in zip(first.operands, second.operands, strict=True))
