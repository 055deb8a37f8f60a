"""The state that counts down to the end of a sequence: found where nothing happens past it, and nowhere else."""

import pytest
import torch

from flexsn._ir.ends import end_of
from flexsn._ir.graph import Builder
from flexsn._ir.roles import Role


def step(*, number=1, least=0, output=0.0, keeps="v", dtype=torch.int32, others=True):
    """Return a step that stops where `left` is `least`, with one thing about it changed."""
    b = Builder("core")
    x, v, left = (
        b.input(Role.of("x0"), torch.float32, "x"),
        b.input(Role.of("v0"), torch.float32, "v"),
        b.input(Role.of("v1"), dtype, "left"),
    )
    going = b.add("gt", (left, b.const(least, dtype)), torch.bool)
    new = b.add("add", (v, x), torch.float32)
    outputs = {Role.of("v1"): b.add("sub", (left, b.const(number, dtype)), dtype)}
    if others:
        outputs[Role.of("y0")] = b.add("where", (going, new, b.const(output, torch.float32)), torch.float32)
        outputs[Role.of("v0")] = b.add("where", (going, new, {"v": v, "x": x}[keeps]), torch.float32)
    return b.graph(outputs)


def test_a_step_that_stops():
    assert end_of(step()) == "v1"


@pytest.mark.parametrize(
    "changed", [{"number": 2}, {"least": 1}, {"output": 1.0}, {"keeps": "x"}, {"dtype": torch.int64}, {"others": False}], ids=str
)
def test_a_step_that_goes_on(changed):
    assert end_of(step(**changed)) is None
