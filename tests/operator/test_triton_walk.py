"""Recurrences that walk over time in one Triton kernel: against the eager loop, and that they did walk there."""

import random

import numpy as np
import pytest
import torch
from helpers import on_cpu
from torch import nn
from torch.nn.functional import layer_norm, linear

import flexsn
from flexsn import surrogate
from flexsn._captured.captured_values import look
from flexsn._codegen.triton_walk import WalkSource
from flexsn._operator.mixing import triton_walk
from flexsn._operator.mixing.cpp_walk import CannotWalk
from flexsn._operator.mixing.triton_walk import Tile, TritonWalk, tile_for
from flexsn._program.replay import Notes

T = 6


@pytest.fixture(autouse=True)
def within_memory(monkeypatch):
    """In the interpreter: all that a walk loads and stores lies in the memory of a tensor that it was given."""
    if not triton_walk.triton_kernel.interpreted():
        return
    from triton.runtime.interpreter import InterpreterBuilder

    given: list[torch.Tensor] = []

    def checked(name):
        own = getattr(InterpreterBuilder, name)
        at_mask = 2 if "store" in name else 1

        def access(self, pointers, *args):
            addresses, mask = np.broadcast_arrays(pointers.data, args[at_mask - 1].data)
            addresses = addresses[mask.astype(bool)].astype(np.int64)
            storages = [t.untyped_storage() for t in given]
            inside = [(addresses >= m.data_ptr()) & (addresses < m.data_ptr() + m.nbytes()) for m in storages]
            assert not given or np.logical_or.reduce(inside).all(), f"{name} beside the memory of all tensors"
            return own(self, pointers, *args)

        return access

    def kernel_of(self, *, back, own=TritonWalk.kernel_of):
        taken, launch = own(self, back=back)

        def run(tensors):
            given[:] = [t for t in tensors if t is not None]
            try:
                launch(tensors)
            finally:
                given.clear()

        return taken, run

    def zeros(*args, own=torch.zeros, **options):  # of the launch: where programs meet
        made = own(*args, **options)
        return given.append(made) or made if given else made

    for name in ("create_masked_load", "create_masked_store"):
        monkeypatch.setattr(InterpreterBuilder, name, checked(name))
    monkeypatch.setattr(TritonWalk, "kernel_of", kernel_of)
    monkeypatch.setattr(triton_walk.torch, "zeros", zeros)


@pytest.fixture
def walked(monkeypatch):
    """The texts of the kernels that walked, each of which was written down: nothing is run again."""
    found, own = [], WalkSource.text
    monkeypatch.setattr(Notes, "replay", lambda *args: None)

    def noted(self, *args, **options):
        found.append(own(self, *args, **options))
        return found[-1]

    monkeypatch.setattr(WalkSource, "text", noted)
    return found


def check(core, x, states, params, *, asked=(0, 1, 2), tol=1e-4):
    """Compare outputs, final states and all gradients with the eager loop; `asked`: which of the results have cotangents."""
    runs = []
    for backend in ("triton", "torch"):
        leaves = [t.clone().requires_grad_() for t in (x, *states, *params)]
        n = 1 + len(states)
        found = flexsn.scan(core, leaves[:1], leaves[1:n], leaves[n:], backend=backend)
        results = [*found.outputs, *found.states]
        torch.manual_seed(0)
        cotangents = [torch.randn(y.shape, device=y.device) for y in results]
        pairs = [(y, g) for k, (y, g) in enumerate(zip(results, cotangents, strict=True)) if y.requires_grad and k in asked]
        grads = torch.autograd.grad([y for y, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
        runs.append([*results, *[torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)]])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol * max(1.0, b.detach().abs().max().item()))


def lif(x, v, s, w):
    h = v + (x + s @ w - v) / 2.0
    s = surrogate.atan(h - 0.3)
    return s, h * (1.0 - s), s


def rnn(x, h, w, b):
    h = torch.tanh(x + linear(h, w, b))
    return h, h


def added(x, v, w):
    v = x + v @ w
    return v, v


def two_products(x, v, s, w):
    """Of a state that is 0 or 1, and of one that has any value."""
    h = v + (x + s @ w + linear(v, w) * 0.1 - v) / 2.0
    s = surrogate.atan(h - 0.3)
    return s + v, h * (1.0 - s), s


def in_a_row(x, v, w):
    """What a product gives goes into the next one."""
    v = torch.tanh(x + torch.tanh(v @ w) @ w)
    return v, v


def inhibited(x, v, s, w):
    """Sums of spikes and of any values, beside a product."""
    h = v + (x + s @ w - 0.1 * s.sum(-1, keepdim=True) - v) / 2.0
    h = h - 0.5 * h.mean(-1, keepdim=True)
    s = surrogate.atan(h - 0.3)
    return s, h * (1.0 - s), s


def normed(x, v, s, w):
    """A norm with weights, of what a product gives."""
    h = v + (layer_norm(x + s @ w, (w.shape[0],), 0.5 + w[0], w[1], 1e-3) - v) / 2.0
    s = surrogate.atan(h - 0.3)
    return s, h * (1.0 - s), s


def plainly_normed(x, v, w):
    v = torch.tanh(x + layer_norm(v, (w.shape[0],)) @ w)
    return v, v


def competing(x, v, w):
    v = torch.tanh(x + 3.0 * torch.softmax(v @ w, -1) - v.softmax(-1))
    return v, v


def lstm(x, h, c, w):
    """Gates are four times as wide as the states; of an input that is, too."""
    i, f, o, u = (torch.cat([x, x, -x, x], -1) + h @ torch.cat([w, w.T, -w, w * 2], 1)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, h, c


def to_gates_and_back(x, v, s, w):
    """A product that takes what is wider than a state."""
    both = torch.tanh(s @ torch.cat([w, w.T], 1))
    h = v + (x + both @ torch.cat([w, -w.T], 0) - v) / 2.0
    s = surrogate.atan(h - 0.3)
    return s, h * (1.0 - s), s


def mixed_as_it_is(x, v, w):
    """What a product gives is an output, too."""
    m = v @ w
    v = torch.tanh(x + m)
    return m, v


CORES = {
    f.__name__: f for f in (
        lif, two_products, in_a_row, inhibited, mixed_as_it_is, normed, plainly_normed, competing, lstm, to_gates_and_back,
    )
}  # fmt: skip
TWO_STATES = ("lif", "two_products", "inhibited", "normed", "lstm", "to_gates_and_back")


@pytest.fixture(params=["weights read", "weights held", "all held"])
def cut(request, monkeypatch):
    """How a walk is cut: a program has all columns, or shares what a product takes with others; it keeps the weights, or reads them."""
    monkeypatch.setattr(triton_walk, "_HELD", 0 if request.param == "weights read" else triton_walk._HELD)
    monkeypatch.setattr(triton_walk, "_ALONE", triton_walk._ALONE if request.param == "all held" else 0)


@pytest.mark.parametrize("width, batch", [(5, 3), (33, 17), (16, 1)])
@pytest.mark.parametrize("name", CORES)
def test_as_the_eager_loop(name, width, batch, cut, walked):
    torch.manual_seed(1)
    states = [torch.rand(batch, width) for _ in range(2 if name in TWO_STATES else 1)]
    check(CORES[name], torch.randn(T, batch, width) + 0.5, states, [torch.randn(width, width) * 0.3])
    assert ["walk back" in text for text in walked] == [False, True]


@pytest.mark.parametrize("core", [lif, rnn, lstm], ids=lambda core: core.__name__)
def test_products_follow_autocast(core, cut, walked):
    """To bfloat16; in float16 walks are as before."""
    torch.manual_seed(1)
    rows, (x, w, b) = 2 - (core is rnn), (torch.randn(T, 4, 20) + 0.5, torch.randn(20, 20) * 0.3, torch.randn(20))
    for dtype, tolerance in ((torch.bfloat16, 4e-2), (torch.float16, 5e-3)):
        with torch.autocast(x.device.type, dtype):
            check(core, x, [torch.zeros(4, 20)] * rows, [w, b][: 3 - rows], tol=tolerance)
    assert len(walked) == 2 and all("math.round_bfloat16(u" in text for text in walked)


@pytest.mark.parametrize("name", CORES)
def test_the_third_call_of_a_kind_replays(name, monkeypatch):
    """On its own values: inputs, states and weights are others in each call."""
    look(CORES[name]).over_parts.clear()  # nothing is known of calls before
    found, own, (width, batch) = [], TritonWalk.kernel_of, (12, 4)
    monkeypatch.setattr(TritonWalk, "kernel_of", lambda self, *, back: (found.append(back), own(self, back=back))[1])
    for seed in range(4):
        torch.manual_seed(seed)
        states = [torch.rand(batch, width) for _ in range(2 if name in TWO_STATES else 1)]
        check(CORES[name], torch.randn(T, batch, width) + 0.5, states, [torch.randn(width, width) * 0.3])
    assert found == [False, True] * 2  # the second call's are noted


def layers(width):
    """Cores that capture layers of PyTorch: a norm and a bias in a recurrence; two layers, which are pieces without one."""
    torch.manual_seed(0)
    first, second, norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.uniform_(-0.5, 0.5)

    def normed(x, v, s):
        h = v + (norm(x + first(s)) - v) / 2.0
        s = surrogate.atan(h - 0.3)
        return s, h * (1.0 - s), s

    def two(x, v, u):
        v = torch.tanh(first(x) + 0.5 * v)
        u = torch.tanh(second(v) + 0.5 * u)
        return u, v, u

    return {normed: [*first.parameters(), *norm.parameters()], two: [*first.parameters(), *second.parameters()]}


@pytest.mark.parametrize("backend", [pytest.param("cpp", marks=on_cpu), "triton"])
def test_layers_of_pytorch_that_a_core_captures(backend, cut):
    """In calls after the second, too, whose ops are those that were noted; with and without gradients."""
    for core, params in layers(20).items():
        for seed in range(4):
            torch.manual_seed(seed)
            x, states = torch.randn(T, 3, 20), [torch.rand(3, 20), torch.rand(3, 20)]
            runs = []
            for b in (backend, "torch"):
                leaves = [t.clone().requires_grad_() for t in (x, *states)]
                trained = flexsn.scan(core, leaves[:1], leaves[1:], backend=b)
                with torch.no_grad():
                    found = flexsn.scan(core, leaves[:1], leaves[1:], backend=b)
                results = [*trained.outputs, *trained.states]
                grads = torch.autograd.grad(sum([y.square().sum() for y in results]), [*leaves, *params])
                runs.append([*results, *found.outputs, *found.states, *grads])
            for a, b in zip(*runs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@on_cpu
def test_each_backend_replays_its_own(monkeypatch):
    look(rnn).over_parts.clear()
    texts, own = [], WalkSource.text
    monkeypatch.setattr(WalkSource, "text", lambda self, *args, **options: (texts.append(own(self, *args, **options)), texts[-1])[1])
    given = [torch.randn(T, 3, 5)], [torch.zeros(3, 5)], [torch.randn(5, 5), torch.randn(5)]
    for backend in ("cpp", "triton"):
        for _ in range(3):
            flexsn.scan(rnn, *given, backend=backend)
        assert bool(texts) == (backend == "triton")


def beside(x, v, s, w):
    """A state that nothing is computed from."""
    h = 0.5 * v + 0.3 * (v @ w) + 0.2 * x
    s = surrogate.atan(h - 0.2)
    return s, h, s


@pytest.mark.parametrize("asked", [[0], [1], [2], [0, 2]])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_cotangents_of_some_results(asked, steps, walked):
    check(beside, torch.randn(steps, 2, 3), [torch.rand(2, 3), torch.rand(2, 3)], [torch.randn(3, 3)], asked=asked)
    assert walked


def random_core(seed):
    """A core of up to five random lines: products, gates, sums over rows, norms, and elementwise ones."""
    r, names, lines = random.Random(seed), ["x", "v", "s"], []
    for k in range(r.randint(2, 5)):
        a, b, w = r.choice(names), r.choice(names), r.choice(["w0", "w1"])
        mixed = [f"{a} @ {w}", f"linear({a}, {w}, b)", f"linear({a}, {w})"]
        plain = [
            f"torch.tanh({a} + 0.5 * {b})",
            f"{a} * 0.6 - {b} * 0.3",
            f"torch.where({b} > 0.2, {a}, 0.5 * {b})",
            f"({a} * {b}).clamp(-1, 1)",
        ]
        rows = [f"{a} - {b}.mean(-1, keepdim=True)", f"layer_norm({a}, b.shape, b, w0[0])", f"3.0 * torch.softmax({a}, -1) - {b}",
                f"torch.mul(*({a} @ gates).chunk(2, -1))", f"torch.cat([{a}, {b} * 2], -1) @ gates.T"]  # fmt: skip
        lines.append(f"t{k} = {r.choice(r.choice([mixed, plain, rows]))}")
        names.append(f"t{k}")
    lines.append(f"h = 0.5 * v + 0.3 * {names[-1]} + 0.2 * x + 0.1 * (v @ w1)")
    lines.append(r.choice(["s = surrogate.atan(h - 0.2)", f"s = torch.tanh(h + 0.1 * {r.choice(names)})"]))
    lines.append(
        r.choice(["return s, h * (1 - s * 0.5), s", f"return {r.choice(names)} + s, h, s", f"return s, h, s * 0.5 + 0.1 * {names[-1]}"])
    )
    lines.insert(0, "gates = torch.cat([w0, 0.7 * w1], 1)")
    space = {"torch": torch, "linear": linear, "layer_norm": layer_norm, "surrogate": surrogate}
    exec("def core(x, v, s, w0, w1, b):\n" + "\n".join(f"    {line}" for line in lines), space)
    sizes = r.choice([1, 2, 5, 9]), r.choice([1, 3, 18]), r.choice([3, 5, 16, 17])
    return space["core"], sizes, [k for k in range(3) if r.random() < 0.7] or [0]


@pytest.mark.parametrize("seed", range(24))
def test_random_cores(seed, walked):
    core, (steps, batch, width), asked = random_core(seed)
    torch.manual_seed(seed)
    states, params = (
        [torch.rand(batch, width) for _ in range(2)],
        [0.4 * torch.randn(s) for s in ((width, width), (width, width), (width,))],
    )
    check(core, torch.randn(steps, batch, width), states, params, asked=asked, tol=2e-3)
    assert walked and "walk back" in walked[-1]


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_numbers_of_steps(steps, walked):
    check(lif, torch.randn(steps, 3, 5) + 0.5, [torch.rand(3, 5), torch.rand(3, 5)], [torch.randn(5, 5) * 0.3])
    assert len(walked) == 2


def test_biases_and_products_of_any_values(walked):
    check(rnn, torch.randn(T, 3, 5), [torch.randn(3, 5)], [torch.randn(5, 5) * 0.3, torch.randn(5)])
    assert "SPIKES=False" in walked[0]


def test_spikes_are_known_to_be_zero_or_one(walked):
    """But not where a call starts: a state may have any value there."""
    check(lif, torch.randn(T, 3, 5) + 0.5, [torch.rand(3, 5), 3 * torch.randn(3, 5)], [torch.randn(5, 5) * 0.3])
    assert "SPIKES=True" in walked[0] and "SPIKES=False" in walked[1]


@pytest.mark.parametrize("neuron", [flexsn.LIF(), flexsn.LIF(learn_tau=True), flexsn.ALIF(tau=5.0, r=5.0)], ids=["lif", "learned", "alif"])
@pytest.mark.parametrize("bias", [False, True])
def test_recurrent_layers(neuron, bias, walked):
    torch.manual_seed(1)
    mixing, x, found = nn.Linear(20, 20, bias=bias), (torch.randn(T, 3, 20) + 1.0).requires_grad_(), []
    for backend in ("triton", "torch"):
        layer = flexsn.Recurrent(neuron, mixing, stateful=False, backend=backend)
        y = layer(x)
        found.append([y, *torch.autograd.grad(y.sum(), [x, *layer.parameters()])])
        with torch.no_grad():
            torch.testing.assert_close(layer(x), y)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(walked) == 3 and found[0][0].any()


def test_values_that_are_no_numbers_stay(walked):
    """Infinite and NaN weights, and inputs, reach what they reach in PyTorch."""
    w = torch.eye(5)
    w[0, 1], w[2, 3] = float("inf"), float("nan")
    x, start = torch.randn(T, 3, 5), torch.zeros(3, 5)
    x[1, 0, 4] = float("inf")
    runs = [flexsn.scan(lambda x, v, w: (v @ w, x + 0.1 * v), [x], [start], [w], backend=b).outputs[0] for b in ("triton", "torch")]
    torch.testing.assert_close(*runs, equal_nan=True)


@pytest.mark.parametrize("core", [lif, added], ids=lambda core: core.__name__)
def test_infinities_meet_parts_that_are_zero(core, cut, walked):
    """Times a number that is one bfloat16, whose other parts are zero, an infinity stays one."""
    w, start, x = (torch.arange(400.0).reshape(20, 20) % 7 + 1) / 8, torch.zeros(1, 20), torch.ones(2, 1, 20)
    start[0, 3] = float("inf")
    runs = [flexsn.scan(core, [x], [x[0], start][core is added :], [w], backend=b) for b in ("triton", "torch")]
    assert walked
    for a, b in zip(*[(*run.outputs, *run.states) for run in runs], strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@on_cpu
def test_how_a_walk_is_cut():
    def cut(sequences, width, products, processors=132, shared=227 << 10, parts=3):
        return tile_for(sequences, width, products, processors, shared, parts=parts)

    one = [(1, 1)]
    assert cut(64, 256, one) == Tile(16, 32, 4, 8, True, 256)
    assert cut(64, 512, one) == Tile(16, 32, 4, 16, True, 256)
    assert cut(1024, 256, one) == Tile(32, 64, 32, 4, True, 128)  # more sequences in a program, so that all run at once
    assert cut(256, 512, one) == Tile(16, 64, 16, 8, True, 128)
    assert cut(64, 256, one * 2) == Tile(16, 32, 4, 8, True, 256)
    assert cut(256, 1024, one) == Tile(32, 64, 8, 16, False, 128)  # weights that no program holds
    assert cut(256, 1024, one, parts=1) == Tile(32, 64, 8, 16, True, 128)
    assert cut(64, 256, [(1, 4)]) == Tile(16, 32, 4, 8, False, 64)  # gates
    assert cut(64, 256, [(1, 4)], 108, 99 << 10) == Tile(16, 32, 4, 8, False, 32)  # shared memory holds no more
    assert cut(64, 256, []) == Tile(16, 32, 4, 8, True, 256)
    assert cut(64, 100, one) == Tile(16, 128, 4, 1, True, 128, alone=True)
    assert cut(64, 2048, one, parts=1) == Tile(32, 32, 2, 64, True, 128)
    for sequences, width in ((64, 2048), (16384, 256)):
        with pytest.raises(CannotWalk, match="more than this GPU runs at once"):
            cut(sequences, width, one)


def summed_up(x, v, w):
    v = torch.tanh(x + (v @ w).cumsum(-1))
    return v, v


def halves(x, v, w):
    a, b = (x + v @ w).chunk(2, -1)
    v = torch.cat([torch.tanh(a) * torch.sigmoid(b), b], -1)
    return v, v


@pytest.mark.parametrize("core, width", [(summed_up, 5), (halves, 6)])
def test_what_has_no_op_walks_as_before(core, width, walked, monkeypatch):
    made, make = [], TritonWalk.__init__
    monkeypatch.setattr(TritonWalk, "__init__", lambda self, *args: (made.append(1), make(self, *args))[1])
    operands = torch.randn(T, 3, width), [torch.randn(3, width)], [torch.randn(width, width) * 0.3]
    for _ in range(2):
        check(core, *operands)
    assert not walked and len(made) == 2  # forward and backward: what was refused is not tried again


@pytest.mark.parametrize("change", [lambda w: w[:, :4] @ w[:4], lambda w: w.double()], ids=["product", "double"])
def test_others_walk_as_before(change, walked):
    """Weights that are computed are weights; values in float64 have no walk there."""
    w = change(torch.randn(5, 5) * 0.3)
    x, start = torch.randn(T, 3, 5, dtype=w.dtype), torch.zeros(3, 5, dtype=w.dtype)
    runs = [flexsn.scan(rnn, [x], [start], [w, w[0]], backend=b).outputs[0] for b in ("triton", "torch")]
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-4)
    assert bool(walked) == (w.dtype is torch.float32)
