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


def ranges(run):
    """What `run` shows of flexsn in a profile: the names of its ranges, in order."""
    with torch.profiler.profile(acc_events=True) as traced:
        run()
    return [e.name for e in sorted(traced.events(), key=lambda e: e.time_range.start) if e.name.startswith("flexsn::")]


def test_profiles_show_a_neuron_by_its_name():
    net, x = torch.nn.Sequential(flexsn.LIF(), FlexSN(lambda x, v: (x * 1.5 + v, v + x), num_states=1)), torch.rand(4, 1, 16)
    net(x.requires_grad_()).sum().backward()
    flexsn.reset_net(net)
    assert ranges(lambda: net(x).sum().backward()) == [
        "flexsn::lif forward", "flexsn::<lambda> forward", "flexsn::<lambda> backward", "flexsn::lif backward",
    ]  # fmt: skip
    with torch.no_grad():
        assert ranges(lambda: flexsn.LIF()(x)) == ["flexsn::lif forward"]
        assert ranges(lambda: flexsn.LIF(backend="torch")(x)) == ["flexsn::lif loop"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*")  # of a module that Inductor imports
@pytest.mark.slow
def test_profiles_of_compiled_calls_show_a_neuron_by_its_name():
    net, x = torch.compile(flexsn.LIF(stateful=False)), torch.rand(4, 1, 16)
    with torch.no_grad():
        net(x)
        assert ranges(lambda: net(x)) == ["flexsn::lif forward"]


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
