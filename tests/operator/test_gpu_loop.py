"""Recurrences whose walks over time are recorded, as on GPUs, over buffers: against the eager loop.

On a CPU a stand-in of CUDA's graphs runs what it recorded again; with `--device cuda` these are CUDA graphs.
"""

import contextlib
import threading

import pytest
import torch
from helpers import check_mixing
from test_cpu_loop import CASES, f64, weights

import flexsn
from flexsn._operator.mixing import gpu_loop, triton_walk, walks
from flexsn.surrogate import atan

H, RECORDER = 5, gpu_loop.Recorder


class Again:
    """Runs what it recorded again."""

    refused = False

    def __init__(self, device):
        self.lock = threading.Lock()

    def alone(self):
        return self.lock

    def record(self, run):
        results = {}
        return lambda: results.update(run()), results


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """The numbers of steps that were recorded."""
    found = []
    record = gpu_loop._Walks._steps
    monkeypatch.setattr(gpu_loop._Walks, "_steps", lambda self, steps: (found.append(steps), record(self, steps))[1])
    if torch.get_default_device().type == "cpu":
        monkeypatch.setattr(gpu_loop, "_records", lambda device: True)
        monkeypatch.setattr(gpu_loop, "Recorder", Again)
        for name in ("forward", "backward"):
            monkeypatch.setattr(walks, name, lambda *args, **kwargs: None)
    return found


def rows(T, batch=3, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn((T, batch, H), generator=generator, dtype=f64, device="cpu").to(torch.get_default_device())


def on_device(tensors):
    return [t.to(torch.get_default_device()) for t in tensors]


@pytest.mark.parametrize("T", [1, 32, 77])
@pytest.mark.parametrize("name", CASES)
def test_recurrences(name, T, recorded):
    core, states, params = CASES[name]
    check_mixing(core, [rows(T)], [None] * states, on_device(params), scale=1e-2)
    want = {1: {1}, 32: {32}, 77: {32, 8, 4, 1}}[T]
    assert {*recorded} == want if torch.get_default_device().type == "cpu" else {*recorded} < {*want, 0}  # some were recorded before


def test_calls_of_any_length_record_no_more(recorded):
    core, states, params = CASES["lstm"]
    for T in (63, 64, 95, 40, 1, 130):
        check_mixing(core, [rows(T, seed=T)], [None] * states, on_device(params), scale=1e-2)
        if T == 63:
            recorded.clear()
    if torch.get_default_device().type == "cuda":
        assert recorded == []
    assert flexsn.scan(core, [rows(0)], [None] * states, on_device(params)).outputs[0].shape == (0, 3, H)


def test_a_walk_has_one_recorder(monkeypatch):
    """Made by the first call; a stream and events are on a GPU."""
    made, recorder, (w,) = [], gpu_loop.Recorder, on_device([weights(H, H)])
    monkeypatch.setattr(gpu_loop, "Recorder", lambda device: (made.append(device), recorder(device))[1])

    def core(x, v):
        v = torch.tanh(x + v @ w) / 3.0
        return v, v

    with torch.no_grad():
        for T in (4, 4, 40):
            flexsn.scan(core, [rows(T)], [None])
    assert len(made) == 1


class Done:
    """An event that tells what is done with it."""

    def __init__(self):
        self.calls = []

    def wait(self):
        self.calls.append("wait")

    def record(self):
        self.calls.append("record")


def test_calls_after_one_that_failed_wait_for_it(monkeypatch):
    """What it had launched uses the buffers."""
    recorder = object.__new__(RECORDER)
    recorder.device, recorder.lock, recorder.done = torch.device("cpu"), threading.Lock(), Done()
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    with pytest.raises(ZeroDivisionError), recorder.alone():
        1 / 0  # noqa: B018  # an error inside
    with recorder.alone():
        pass
    assert recorder.done.calls == ["wait", "record"] * 2


def test_weights_and_captured_tensors_are_read_anew(recorded):
    (w,) = on_device([weights(H, H)])
    linear = torch.nn.Linear(H, H, dtype=f64, device=w.device)

    def core(x, v):
        v = torch.tanh(x + linear(v) + torch.nn.functional.layer_norm(v, (H,), w[0]))
        return v, v

    neuron, x = flexsn.FlexSN(core, num_states=1, stateful=False), rows(9)
    for _ in range(3):
        check_mixing(core, [x], [None], [])
        with torch.no_grad():
            linear.weight.add_(0.1)
            linear.weight.data = linear.weight.data.clone()  # elsewhere
            w.mul_(1.5)
    with torch.inference_mode():
        y = neuron(x)
    torch.testing.assert_close(y.clone(), flexsn.scan(core, [x], [None], backend="torch").outputs[0])


def test_results_stay_as_they_are():
    """What a call returned lies in no buffer, and backwards may run in any order."""
    core, states, params = CASES["feedback"]
    params = on_device(params)
    leaves = [rows(40, seed=k).requires_grad_() for k in range(3)]
    runs = [flexsn.scan(core, [x], [None] * states, params) for x in leaves]
    wants = [flexsn.scan(core, [x], [None] * states, params, backend="torch") for x in leaves]
    for k in (1, 0, 2):
        torch.testing.assert_close(runs[k].outputs, wants[k].outputs)
        torch.testing.assert_close(runs[k].states, wants[k].states)
        found, want = (torch.autograd.grad(r.outputs[0].sum() + r.states[0].sum(), leaves[k])[0] for r in (runs[k], wants[k]))
        torch.testing.assert_close(found, want)


def test_states_that_take_turns():
    """A state is what another one was before the step."""
    (w,) = on_device([weights(H, H)])

    def core(x, v, before):
        new = torch.tanh(x + (v + before) @ w)
        return new, new, v

    check_mixing(core, [rows(21)], [rows(1)[0], None], [])


def test_changed_weights_under_autocast(recorded, monkeypatch):
    """Autocast keeps casts of weights that need gradients: none may be part of what is played."""
    monkeypatch.setattr(triton_walk, "takes", lambda device: False)

    def core(x, v, w):
        v = torch.tanh(x + v @ w)
        return v, v

    x, device = rows(5).float(), torch.get_default_device().type
    for seed in range(3):
        (w,) = on_device([weights(H, H).float() * (1 + seed)])
        w.requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            runs = [flexsn.scan(core, [x], [None], [w], backend=b).outputs[0] for b in ("auto", "torch")]
        torch.testing.assert_close(*runs)
        grads = [torch.autograd.grad(y.sum(), w)[0] for y in runs]
        torch.testing.assert_close(*grads, rtol=3e-2, atol=1e-2)
    assert recorded


@pytest.mark.gpu
def test_what_cannot_be_recorded_walks_in_python(recorded):
    """A function of PyTorch that waits for the GPU."""
    (w,) = on_device([weights(H, H)])

    def core(x, v):
        v = torch.tanh(x + torch.linalg.solve(w @ w.T + torch.eye(H, dtype=f64), v.T).T)
        return v, v

    for _ in range(2):
        check_mixing(core, [rows(5)], [None], [])


@pytest.mark.gpu
def test_a_graph_of_the_users_holds_the_walk():
    core, states, params = CASES["lstm"]
    x, params = rows(7), on_device(params)
    with torch.no_grad():
        want = flexsn.scan(core, [x], [None] * states, params).outputs[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = flexsn.scan(core, [x], [None] * states, params).outputs[0]
        x.mul_(2.0)
        graph.replay()
        torch.testing.assert_close(found, flexsn.scan(core, [x], [None] * states, params).outputs[0])
    assert not torch.equal(found, want)


@pytest.mark.gpu
def test_streams_take_turns():
    core, states, params = CASES["lstm"]
    params, inputs = on_device(params), [rows(64, batch=512, seed=k) for k in range(6)]
    wants = [flexsn.scan(core, [x], [None] * states, params, backend="torch").outputs[0] for x in inputs]
    torch.cuda.synchronize()
    streams, founds = [torch.cuda.Stream() for _ in inputs], []
    for x, stream in zip(inputs, streams, strict=True):
        with torch.cuda.stream(stream), torch.no_grad():
            founds.append(flexsn.scan(core, [x], [None] * states, params).outputs[0])
    torch.cuda.synchronize()
    torch.testing.assert_close(founds, wants)


def test_threads_take_turns():
    core, states, params = CASES["normed"]
    params, inputs = on_device(params), [rows(20, seed=k) for k in range(4)]
    wants = [flexsn.scan(core, [x], [None] * states, params, backend="torch").outputs[0] for x in inputs]
    founds = {}

    def run(k):
        with torch.no_grad():
            for _ in range(5):
                founds[k] = flexsn.scan(core, [inputs[k]], [None] * states, params).outputs[0]

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    with contextlib.ExitStack() as stack:
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
    torch.testing.assert_close([founds[k] for k in range(4)], wants)


def test_spikes_decide_once():
    """Inputs in tenths and weights in hundredths put potentials on thresholds; the backward reads the forward's spikes."""
    w = (weights(H, H) * 100).round() / 100

    def core(x, v, s, w):
        h = v + (x + s @ w - v) / 2.0
        s = atan(h - 1.0)
        return s, h * (1.0 - s), s

    x = (rows(50).abs() * 10).round() / 10
    check_mixing(core, [x], [None, None], on_device([w]), scale=1e-2)
