"""Recurrences in one Triton kernel on a GPU: its programs meet at every product, so all of them have to run at once, whatever else does."""

import contextlib
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.nn.functional import layer_norm, linear

import flexsn
from flexsn import surrogate
from flexsn._operator.mixing.recurrence import Loop

pytestmark = pytest.mark.gpu


def lif(x, v, s, w):
    h = v + (x + s @ w - v) / 2.0
    s = surrogate.atan(h - 1.0)
    return s, h * (1.0 - s), s


def lstm(x, h, c, w):
    i, f, o, u = (torch.cat([x, x, -x, x], -1) + linear(h, w)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, h, c


def normed(x, v, s, w):
    h = v + (layer_norm(x + s @ w, (w.shape[0],)) - 0.1 * s.mean(-1, keepdim=True) - v) / 2.0
    s = surrogate.atan(h - 1.0)
    return s, h * (1.0 - s), s


CASES = {"lif": (lif, 1, 1), "lstm": (lstm, 4, 1), "normed": (normed, 1, 1)}


def operands(name, width=256, batch=64, T=20):
    """Return leaves: inputs, states, weights."""
    core, rows, columns = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(T, batch, width, device="cuda") * 0.6 + 0.6
    w = 0.5 * torch.randn(rows * width, columns * width, device="cuda") / width**0.5
    return core, x.requires_grad_(), [torch.zeros(batch, width, device="cuda") for _ in range(2)], w.requires_grad_()


def step(core, x, states, w):
    """Return outputs and gradients."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()  # leaves of the stream that runs
    y = flexsn.scan(core, [x], states, [w], strict=True).outputs[0]
    return y.detach(), *torch.autograd.grad(y.square().sum(), [x, w])


@pytest.fixture
def ran(monkeypatch):
    """How recurrences ran."""
    found = set()
    monkeypatch.setattr(Loop, "note", lambda self, how: found.add(how.partition(" (")[0]))
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_in_1000_calls(name, ran):
    given = operands(name)
    first = step(*given)
    assert ran == {"in one Triton kernel"}
    for _ in range(1000):
        assert all(map(torch.equal, step(*given), first))


@pytest.mark.parametrize("width, batch", [(256, 300), (512, 200), (700, 40), (1024, 128)])
def test_larger_sizes(width, batch, ran):
    """More sequences in a program; weights that no registers hold. A value within rounding of a threshold may spike in one alone."""
    core, x, states, w = operands("lif", width, batch, 6)
    found = step(core, x, states, w)
    assert ran == {"in one Triton kernel"}
    y = flexsn.scan(core, [x], states, [w], backend="torch").outputs[0]
    assert (found[0] == y).float().mean() > 0.999
    smooth = operands("lstm", width // 4 * 4, min(batch, 32), 6)
    got, want = step(*smooth), [t.detach() for t in eager(*smooth)]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


def eager(core, x, states, w):
    y = flexsn.scan(core, [x], states, [w], backend="torch").outputs[0]
    return y, *torch.autograd.grad(y.square().sum(), [x, w])


@pytest.mark.parametrize("width", [5, 64, 100, 128])
def test_one_program_has_all_columns(width, ran):
    """Of few neurons; the batch is no multiple of its sequences."""
    torch.manual_seed(0)
    x, w = torch.randn(9, 37, width, device="cuda") + 0.6, torch.randn(width, width, device="cuda") / width**0.5
    states = [torch.rand(37, width, device="cuda") for _ in range(2)]
    runs = []
    for backend in ("auto", "torch"):
        leaves = [t.clone().requires_grad_() for t in (x, *states, w)]
        found = flexsn.scan(normed, leaves[:1], leaves[1:3], leaves[3:], backend=backend)
        results = [*found.outputs, *found.states]
        runs.append([*results, *torch.autograd.grad(sum([y.square().sum() for y in results]), leaves)])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert ran == {"in one Triton kernel"}


def test_on_a_cpu_and_then_on_a_gpu(ran):
    """Of one core: what is known of it on the one is nothing to the other."""

    def core(x, v):
        v = torch.tanh(0.5 * v + x + torch.softmax(v, -1))
        return v, v

    x, v = torch.randn(5, 3, 20), torch.randn(3, 20)
    want = None
    for device in ("cpu", "cuda") * 3:
        leaves = [t.to(device).requires_grad_() for t in (x, v)]
        y = flexsn.scan(core, leaves[:1], leaves[1:], strict=True).outputs[0]
        found = [t.cpu() for t in (y.detach(), *torch.autograd.grad(y.square().sum(), leaves))]
        want = want or found
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert ran == {"in C++", "in one Triton kernel"}


def test_more_than_2_to_the_31_values():
    """Whole, and in two halves."""
    T, batch, width = 132_000, 64, 256
    x, w = torch.full((1, 1, width), 1.2, device="cuda"), torch.randn(width, width, device="cuda") / width**0.5
    x = x * torch.linspace(0.5, 1.5, batch, device="cuda").view(1, batch, 1)
    x = x.expand(T, batch, width).contiguous()
    states = [torch.zeros(batch, width, device="cuda") for _ in range(2)]
    assert x.numel() > 1 << 31
    with torch.no_grad():
        whole = flexsn.scan(lif, [x], states, [w], strict=True)
        first = flexsn.scan(lif, [x[: T // 2]], states, [w], strict=True)
        second = flexsn.scan(lif, [x[T // 2 :]], first.states, [w], strict=True)
    for a, b in zip(whole.states, second.states, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(whole.outputs[0][-100:], second.outputs[0][-100:]) and whole.outputs[0][-100:].any()


@pytest.mark.parametrize("name", CASES)
def test_beside_kernels_that_fill_the_card(name):
    """On streams of two priorities, each of which has a walk, too."""
    given, busy = operands(name), torch.randn(4096, 4096, device="cuda")
    want = step(*given)
    low, high = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-1)
    torch.cuda.synchronize()
    found = []
    for _ in range(8):
        for stream in (low, high):
            with torch.cuda.stream(stream):
                for _ in range(3):
                    busy @ busy
                found.append(step(*given))
        busy @ busy
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for results in found for a, b in zip(results, want, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_training_step_in_a_captured_graph(name, ran):
    """The walks are kernels of it, which all of their programs run at once, too, beside others that fill the card."""
    core, x, states, w = operands(name)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    a = torch.randn(8192, 8192, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        want = step(core, x, states, w)
    side.synchronize()
    with torch.cuda.graph(graph):
        found = step(core, x, states, w)
    for n in range(100):
        for y in found:
            y.zero_()
        torch.cuda.synchronize()
        if n % 10 == 0:
            with torch.cuda.stream(side):
                a @ a
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert ran == {"in one Triton kernel"}


WALKS = """
    import sys, torch, flexsn
    sys.path.insert(0, "tests/gpu")
    from test_gpu_walk import operands, step
    given = operands("lif", T=int(sys.argv[1]))
    step(*given)
    print("walks", flush=True)
    for _ in range(40):
        step(*given)
    torch.cuda.synchronize()
    print("done")
"""


def test_two_processes_and_one_that_is_killed():
    code = textwrap.dedent(WALKS)
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(subprocess.Popen([sys.executable, "-c", code, str(T)], stdout=subprocess.PIPE, text=True))
            for T in (20, 20, 20000)
        ]
        assert started[2].stdout.readline() == "walks\n"
        started[2].kill()  # in a walk of 20,000 steps
        assert [process.communicate(timeout=120)[0].splitlines()[-1] for process in started[:2]] == ["done", "done"]
    given = operands("lif")
    assert all(map(torch.equal, step(*given), step(*given)))
