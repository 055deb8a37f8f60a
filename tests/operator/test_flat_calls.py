"""A warm eager call is one flat path: few Python functions of flexsn's own between a neuron and its kernel."""

import sys
import threading
from pathlib import Path

import pytest
import torch

import flexsn
from flexsn import FlexSN

PACKAGE = str(Path(flexsn.__file__).parent)


def lif(x, v):
    h = v + (x - v) / 2.0
    s = flexsn.surrogate.atan(h - 1.0)
    return s, h * (1.0 - s)


def frames(run):
    """What `run` returns, and the functions of flexsn's own, comprehensions too, that it enters on any thread."""
    seen = []

    def profile(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            seen.append(f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}")

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        result = run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return result, seen


@pytest.mark.parametrize("stateful", [False, True, "detached"])
def test_frames_of_a_warm_call(stateful):
    neuron, x = FlexSN(lif, num_states=1, stateful=stateful), torch.rand(4, 1, 16, requires_grad=True)
    for _ in range(2):
        neuron.reset()
        y = neuron(x)
        y.backward(torch.ones_like(y))
    neuron.reset()
    y, forward = frames(lambda: neuron(x))
    cotangent = torch.ones_like(y)
    _, backward = frames(lambda: y.backward(cotangent))
    own = len(forward) - (1 if stateful == "detached" and sys.version_info < (3, 12) else 0)  # a comprehension over the states
    assert own <= 12, forward
    assert len(backward) <= 4, backward


def test_frames_of_inference():
    neuron, x = FlexSN(lif, num_states=1, stateful=False), torch.rand(4, 1, 16)
    with torch.no_grad():
        neuron(x)
        _, found = frames(lambda: neuron(x))
    assert len(found) <= 12, found


def test_kernels_are_loaded_before_autograd_is_entered(monkeypatch):
    """Nothing is planned or built inside an autograd Function's forward."""
    from flexsn._operator.autograd import _Eager
    from flexsn._program.compiled import Program

    inside, built = [], []
    kernel, forward = Program.kernel, _Eager.forward

    def entered(*args):
        inside.append(True)
        try:
            return forward(*args)
        finally:
            inside.pop()

    monkeypatch.setattr(_Eager, "forward", staticmethod(entered))
    monkeypatch.setattr(Program, "kernel", lambda *args: (built.append(bool(inside)), kernel(*args))[1])
    y = FlexSN(lambda x, v: (x * 3.25 + v, v + x), num_states=1, stateful=False)(torch.rand(5, 3, requires_grad=True))
    y.sum().backward()
    assert built and not any(built)
