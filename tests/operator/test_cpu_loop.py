"""Recurrences that walk over time in C++: each kind of op, against the eager loop, and that it did walk there."""

import pytest
import torch
from helpers import check_mixing, on_cpu
from torch.nn.functional import layer_norm, linear

import flexsn
from flexsn import surrogate
from flexsn._captured.captured_values import look
from flexsn._operator.mixing import cpp_walk, gradients
from flexsn._operator.mixing.cpp_products import outer
from flexsn._operator.mixing.cpp_walk import Driven, Walk, by_spikes
from flexsn._operator.mixing.mixing_calls import MixingFunction, Run, moves
from flexsn._operator.mixing.recurrence import Loop
from flexsn._program.replay import Kinds, Notes

pytestmark = on_cpu
f64 = torch.float64
H = 5
W_OF_ONE = torch.ones(1, H, dtype=f64, device="cpu")


def lstm(x, h, c, w):
    """One product for all gates."""
    i, f, o, u = (torch.cat([x, x, x, x], -1) + h @ w).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, h, c


def joined(x, h, w, b):
    """A GRU over input and state in one row."""
    z, r = torch.sigmoid(linear(torch.cat([x, h], -1), w[: 2 * H], b)).split(H, -1)
    h = (1 - z) * torch.tanh(linear(torch.cat([x, r * h], -1), w[2 * H :])) + z * h
    return h, h


def normed(x, v, s, w, gain, shift):
    h = v + (layer_norm(x + linear(s, w), (H,), gain, shift, eps=0.01) - v) / 2.0
    s = torch.sigmoid(h)
    return s, h, s


def normed_state(x, v, w):
    """The norm of a state, without weights, beside another use of it."""
    v = torch.tanh(x + layer_norm(v, (H,)) @ w + 0.5 * v.roll(2, -1))
    return v, v


def feedback(x, v, u, z, w, back):
    """Two layers; the second one's spikes drive the first."""
    v = v + (x + z @ back - v) / 2.0
    s = surrogate.atan(v - 0.2)
    u = u + (s @ w - u) / 3.0
    z = surrogate.atan(u - 0.1)
    return z + u, v * (1 - s), u * (1 - z), z


def read_elsewhere(x, v, u, w):
    """Another state, of no recurrence that mixes, takes a gate, which is a part of a product."""
    gate, drive = (v @ w)[..., :H], (v @ w)[..., H:]
    v = torch.tanh(x + torch.sigmoid(gate) * drive)
    return gate * 0.5 + u, v, torch.sin(u + gate)


def unused_part(x, v, w):
    v = torch.tanh(x + (v @ w)[..., :H])
    return v, v


def half_of_each(x, u, p, w):
    """A product and a slice of one state, and a slice of what it gives."""
    s = torch.sigmoid(x + u - 1.0)
    q = 0.8 * u + 0.2 * s + p @ w
    return s, torch.tanh(torch.cat([p[..., :2], q[..., 2:]], -1)), s


def narrow_to_wide(x, v, up, down):
    """States of 5, a hidden layer of 3 inside the step."""
    v = torch.tanh(x + torch.tanh(v @ down) @ up)
    return v, v


def inhibited(x, v, s, w):
    """All spikes of the step before, and the mean of what there would be, beside a product, without which one kernel adds so few values."""
    h = v + (x + s @ w - 0.3 * s.sum(-1, keepdim=True) - v) / 2.0
    h = h - 0.5 * h.mean(dim=-1, keepdim=True) + torch.mean(v, (-1,), True)
    s = torch.sigmoid(h)
    return s, h * (1.0 - s), s


def competing(x, v, w):
    """A softmax over what comes in, one over a state, and the sum of a product."""
    share = torch.softmax(x + v @ w, -1)
    v = torch.tanh(x - v.softmax(dim=-1) + share * torch.sum(v @ w, dim=-1, keepdim=True))
    return share + v, v


def weights(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=f64, device="cpu") * 0.4


CASES = {
    "lstm": (lstm, 2, [weights(H, 4 * H)]),
    "joined": (joined, 1, [weights(3 * H, 2 * H), weights(2 * H)]),
    "normed": (normed, 2, [weights(H, H), weights(H, seed=2), weights(H, seed=3)]),
    "normed state": (normed_state, 1, [weights(H, H)]),
    "feedback": (feedback, 3, [weights(H, H), weights(H, H, seed=2)]),
    "read elsewhere": (read_elsewhere, 2, [weights(H, 2 * H)]),
    "unused part": (unused_part, 1, [weights(H, 2 * H)]),
    "half of each": (half_of_each, 2, [weights(H, H)]),
    "inhibited": (inhibited, 2, [weights(H, H)]),
    "competing": (competing, 1, [weights(H, H)]),
    "narrow to wide": (narrow_to_wide, 1, [weights(3, H), weights(H, 3)]),
}


@pytest.fixture
def walked(monkeypatch):
    """The walks that were written down, over memory that holds NaN before it is written to; nothing is known of calls before."""
    for core, *_ in CASES.values():
        look(core).over_parts.clear()
    found, own, fresh = [], Walk.kernel_of, cpp_walk.allocator

    def poisoned(*args):
        make = fresh(*args)
        return lambda: make().fill_(torch.nan)

    monkeypatch.setattr(cpp_walk, "allocator", poisoned)
    monkeypatch.setattr(Walk, "kernel_of", lambda self, *, back: (found.append(back), own(self, back=back))[1])
    return found


@pytest.mark.parametrize("sequences", [False, True], ids=["outputs", "state sequences"])
@pytest.mark.parametrize(("T", "batch"), [(7, (3,)), (1, (1,)), (4, (2, 9))])
@pytest.mark.parametrize("name", CASES)
def test_as_the_eager_loop(name, T, batch, sequences, walked):
    core, count, params = CASES[name]
    x, states = operands(T, batch, count)
    check_mixing(core, [x], states, params, scale=10, sequences=sequences)
    assert walked == [False, True]


def test_values_that_are_no_numbers_stay(walked):
    """As PyTorch's softmax has them."""
    x, start = torch.randn(6, 3, H), torch.zeros(3, H)
    x[1, 0, 4], x[2, 1, 0], x[3, 2] = torch.inf, torch.nan, -torch.inf
    runs = [flexsn.scan(lambda x, v: (v.softmax(-1), x), [x], [start], backend=b).outputs[0] for b in ("cpp", "torch")]
    torch.testing.assert_close(*runs, equal_nan=True)


def operands(T, batch, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, *batch, H, generator=generator, dtype=f64)
    return x, [torch.rand(*batch, H, generator=generator, dtype=f64) for _ in range(count)]


@pytest.mark.parametrize("sequences", [False, True], ids=["outputs", "state sequences"])
@pytest.mark.parametrize("name", CASES)
def test_the_third_call_of_a_kind_replays(name, sequences, walked):
    """On its own values: inputs, states and weights are others in each call."""
    core, count, params = CASES[name]
    for seed in range(4):
        x, states = operands(6, (3,), count, seed)
        check_mixing(core, [x], states, [p * (1 - 0.1 * seed) for p in params], scale=10, sequences=sequences)
    assert walked == [False, True] * 2  # the second call's are noted


def gradients_of(core, x, states, tensors, sequences, backend):
    """Results and gradients, whose cotangents differ from value to value."""
    found = flexsn.scan(core, [x], states, store_state_seqs=sequences, backend=backend)
    results = [*found.outputs, *found.states]
    return results, torch.autograd.grad(sum([(y * (1.0 + y.detach().sin())).sum() for y in results]), tensors)


@pytest.fixture
def taken(monkeypatch):
    """What walks back took over, and whether segments ran back after them."""
    found, own, of_segments = [], Loop.take_over, gradients._of_segments
    monkeypatch.setattr(Loop, "take_over", lambda self, takes: (found.append(takes), own(self, takes))[1])
    monkeypatch.setattr(
        gradients, "_of_segments", lambda ran, *of: (found.append([r.call.differentiable for r in ran]), of_segments(ran, *of))[1]
    )
    return found


@pytest.mark.parametrize("sequences", [False, True], ids=["outputs", "state sequences"])
@pytest.mark.parametrize("name", CASES)
def test_the_walk_back_finds_all_gradients(name, sequences, taken):
    """Where states at the start have none, nor params that segments read, and inputs have the shape of a step."""
    core, count, params = CASES[name]
    params = [p.clone().requires_grad_() for p in params]
    x, states = operands(7, (3,), count)
    x.requires_grad_()
    captured = {
        1: lambda x, v: core(x, v, *params),
        2: lambda x, v, u: core(x, v, u, *params),
        3: lambda x, v, u, z: core(x, v, u, z, *params),
    }
    runs = [gradients_of(captured[count], x, states, [x, *params], sequences, backend) for backend in ("cpp", "cpp", "cpp", "torch")]
    for found in runs[:-1]:
        torch.testing.assert_close(found, runs[-1])
    runs_back = [any(flags) for flags in taken if isinstance(flags, list)]
    assert runs_back == [name == "joined"] * 2  # whose segments slice its weights, and so read them; the third call replays


ELSEWHERE = {
    "an input that a call of the loop takes, too": (lambda x, v, w: x + linear(torch.cat([x, v], -1), w), weights(H, 2 * H), (3, H)),
    "a convolution": (lambda x, v, w: x + torch.conv1d(v, w, padding=1), weights(2, 2, 3), (3, 2, H)),
    "a sum that drops its dim": (lambda x, v, w: x * w - v.sum(-1).unsqueeze(-1), weights(H), (3, H)),
}


@pytest.mark.parametrize("asked", ["all", "inputs", "weights"])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_gradients_of_inputs_in_every_loop(name, asked, taken):
    """Some of these walk in Python; of some, gradients are asked for in part."""
    mix, w, shape = ELSEWHERE[name]
    x, start = torch.randn(6, *shape, dtype=f64, requires_grad=True), torch.randn(shape, dtype=f64)
    weight = torch.nn.Parameter(w.clone())
    tensors = {"all": [x, weight], "inputs": [x], "weights": [weight]}[asked]

    def core(x, v):
        v = torch.tanh(mix(x, v, weight) + 0.5 * v)
        return v * v, v

    runs = [gradients_of(core, x, [start], tensors, True, backend) for backend in ("auto", "auto", "auto", "torch")]
    for found in runs[:-1]:
        torch.testing.assert_close(found, runs[-1])
    assert any(isinstance(takes, set) for takes in taken) == (name != "a sum that drops its dim")  # whose segment reads the weights


@pytest.mark.parametrize("why", ["a state", "a param", "a broadcast input"])
def test_segments_run_back_for_other_gradients(why, taken):
    w, scale = torch.nn.Parameter(weights(H, H)), weights(H).requires_grad_(why == "a param")
    x, (start,) = operands(7, (3,), 1)
    x = (x[:, :1] if why == "a broadcast input" else x).requires_grad_()
    start.requires_grad_(why == "a state")
    tensors = [t for t in (x, start, scale, w) if t.requires_grad]

    def core(x, v):
        v = torch.tanh(x + scale * v + v @ w)
        return v * v, v

    runs = [gradients_of(core, x, [start], tensors, False, backend) for backend in ("auto", "auto", "auto", "torch")]
    for found in runs[:-1]:
        torch.testing.assert_close(found, runs[-1])
    assert taken == [[True], [True]]  # the third call replays


def test_calls_with_and_without_gradients_of_states_take_turns(taken):
    """The kernels of one step differ."""
    x, (start,) = operands(7, (3,), 1)
    w = torch.nn.Parameter(weights(H, H))

    def core(x, v):
        v = torch.tanh(x + 0.5 * v + v @ w)
        return v * v, v

    x.requires_grad_()
    for needed in (True, False, True, False):
        v = start.detach().requires_grad_(needed)
        tensors = [x, w, v] if needed else [x, w]
        found, want = (gradients_of(core, x, [v], tensors, False, backend) for backend in ("cpp", "torch"))
        torch.testing.assert_close(found, want)
    assert any(isinstance(takes, set) for takes in taken)


def test_operands_that_are_the_same_tensor_are_another_kind(walked):
    """What was noted for two states that lie in one place would take the first for both."""
    core, _, params = CASES["feedback"]
    x, (v, u, z) = operands(5, (3,), 3)
    for _ in range(3):
        check_mixing(core, [x], [v, v, z], params, scale=10)
    for _ in range(3):
        check_mixing(core, [x], [v, u, z], params, scale=10)
    assert walked == [False, True] * 4


def test_other_numbers_of_steps_are_other_kinds(walked):
    core, count, params = CASES["lstm"]
    for T in (3, 5, 3, 5, 3, 5):
        x, states = operands(T, (3,), count, seed=T)
        check_mixing(core, [x], states, params, scale=10)
    assert walked == [False, True] * 4


def test_few_kinds_are_kept(monkeypatch):
    core, count, params = CASES["lstm"]
    kept, own = [], Notes.replay
    monkeypatch.setattr(Kinds, "most", 4)
    monkeypatch.setattr(Notes, "replay", lambda *args: kept.append(1) or own(*args))
    for T in (*range(2, 12), 11):
        x, states = operands(T, (2,), count)
        check_mixing(core, [x], states, params, scale=10)
    assert len(kept) == 2  # forward and backward of the last


@pytest.mark.parametrize(
    "mix",
    [
        lambda v: v.cumsum(-1),
        lambda v: v.softmax(0),
        lambda v: v.sum(0, keepdim=True),
        lambda v: v.sum(-1).unsqueeze(-1),
        lambda v: v.sum(keepdim=True, dim=(0, 1)),
        lambda v: v.mean(-1, keepdim=True) @ W_OF_ONE,
        lambda v: torch.cat([v[..., 1:], v.mean(-1, keepdim=True)], -1),
    ],
)
def test_what_it_has_no_op_for_walks_in_python(mix, walked):
    def core(x, v):
        v = torch.tanh(x + mix(v))
        return v, v

    check_mixing(core, [torch.randn(5, 3, H, dtype=f64)], [torch.zeros(3, H, dtype=f64)], [])
    assert not walked


def product(a, w, bias, start=None):
    """`a @ w + bias`, or that and where it starts, by the loop."""
    walk = Walk(1, a.shape[:1], a.dtype, w.shape[1])
    found = walk.rows_of(torch.zeros(1, len(a), w.shape[1], dtype=a.dtype) if start is None else start.clone().unsqueeze(0), w.shape[1])
    walk.product(walk.rows_of(a.unsqueeze(0), a.shape[1]), found, w, bias, adds=start is not None)
    tensors, launch = walk.kernel_of(back=False)
    launch(tensors)
    return found.tensor[0]


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.1, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize(("rows", "K", "N"), [(1, 1, 1), (45, 300, 70), (32, 128, 32), (13, 131, 33)])
def test_products(rows, K, N, dtype, rate):
    """They err no more than PyTorch's own, and a row has the same bits whatever rows stand beside."""
    a = torch.randn(rows, K, dtype=dtype) * (torch.rand(rows, K) < rate)
    a[rows // 2 :] *= torch.rand(rows - rows // 2, K) < 0.2  # of which some are driven by what is not zero, and others are not
    w, bias, start = torch.randn(K, N, dtype=dtype), torch.randn(N, dtype=dtype), torch.randn(rows, N, dtype=dtype)
    found, added = product(a, w, bias), product(a, w, None, start)
    within = {"rtol": 0, "atol": K**0.5 * (3e-6 if dtype is torch.float32 else 1e-14)}
    torch.testing.assert_close(found.double(), a.double() @ w.double() + bias.double(), **within)
    torch.testing.assert_close(added.double(), a.double() @ w.double() + start.double(), **within)
    assert all(torch.equal(product(row[None], w, bias)[0], found[i]) for i, row in enumerate(a))


@pytest.mark.parametrize("rate", [1.0, 0.05], ids=["any values", "mostly zero"])
@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize(("rows", "K", "N"), [(700, 40, 70), (1, 3, 5), (300, 9, 32), (513, 17, 33)])
def test_gradients_of_weights(rows, K, N, dtype, rate):
    """They have the same bits at any number of threads, and err no more than PyTorch's own product."""
    a, g, before = (
        torch.randn(rows, K, dtype=dtype) * (torch.rand(rows, K) < rate),
        torch.randn(rows, N, dtype=dtype),
        torch.get_num_threads(),
    )
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(outer(a[: rows // 3], a[rows // 3 :], g))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    want = a.double().T @ g.double()
    torch.testing.assert_close(found[0].double(), want, rtol=0, atol=want.abs().max().item() * (3e-6 if dtype is torch.float32 else 1e-14))


def test_zeros_times_infinity_are_no_numbers_in_gradients_of_weights():
    a, g = torch.zeros(40, 3), torch.ones(40, 2)
    a[5, 1], g[7, 0] = 1.0, torch.inf
    found = outer(a[:4], a[4:], g)
    assert found[:, 0].isnan().all() and found[:, 1].tolist() == [0.0, 1.0, 0.0]


# --- products outside of recurrences ----------------------------------------------------------------------------------------------
@pytest.fixture
def driven(monkeypatch):
    """Calls of products that spikes drive."""
    found, forward = [], Driven.forward
    monkeypatch.setattr(Driven, "forward", staticmethod(lambda ctx, *operands: (found.append(operands), forward(ctx, *operands))[1]))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("written", ["linear", "linear without a bias", "matmul", "mm"])
def test_spikes_drive_products_of_whole_sequences(written, dtype, driven):
    """Of inputs that are wider than the recurrence after them, too."""
    T, batch, K, N = 40, 9, 170, 90
    w, b = torch.randn(N, K, dtype=dtype) * 0.3, torch.randn(N, dtype=dtype)
    mix = {
        "linear": lambda x, w, b: linear(x, w, b), "linear without a bias": lambda x, w, b: linear(x, w) + b,
        "matmul": lambda x, w, b: x @ w.T + b, "mm": lambda x, w, b: torch.mm(x, w.T) + b,
    }[written]  # fmt: skip

    def core(x, y, v, w, b, r):
        h = v * 0.5 + mix(x, w, b) + y @ r
        y = surrogate.atan(h - 1.0)
        return y, y, h * (1.0 - y)

    x = (torch.rand(T, batch, K) < 0.05).to(dtype)
    states, r = [torch.zeros(batch, N, dtype=dtype), torch.zeros(batch, N, dtype=dtype)], torch.randn(N, N, dtype=dtype) * 0.1
    check_mixing(core, [x], states, [w, b, r], scale=4.0)
    assert len(driven) == 1


def test_values_that_are_not_mostly_zero_take_the_librarys_product(driven):
    def core(x, v, w):
        v = v * 0.5 + x @ w
        return v, v

    x, v, w = torch.randn(40, 9, 170), torch.zeros(9, 90), torch.randn(170, 90)
    got = flexsn.scan(core, [x], [v], [w], strict=True).outputs[0]
    torch.testing.assert_close(got[0], x[0] @ w, rtol=1e-5, atol=1e-4)
    assert not driven


def test_driven_products_as_the_librarys():
    """Gradients of gradients; weights and cotangents that are no numbers; rows that are dense among those that are not; no threads' bits."""
    a, w, b = (
        (torch.rand(300, 50, dtype=f64) < 0.05) * torch.randn(300, 50, dtype=f64),
        torch.randn(50, 40, dtype=f64),
        torch.randn(40, dtype=f64),
    )
    a[17] = 1.5
    leaves = [t.requires_grad_() for t in (a, w, b)]
    assert torch.autograd.gradcheck(Driven.apply, [a[:20], w, b])
    assert torch.autograd.gradgradcheck(Driven.apply, [a[:4], w, b])
    grad = torch.randn(300, 40, dtype=f64)
    for spoiled in (None, w, grad):
        with torch.no_grad():
            if spoiled is not None:
                spoiled[3, 2] = torch.inf
        got, want = Driven.apply(*leaves), torch.addmm(b, a, w)
        torch.testing.assert_close(got, want, equal_nan=True)
        for found, expected in zip(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, leaves, grad), strict=True):
            torch.testing.assert_close(found, expected, equal_nan=True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = Driven.apply(*leaves)
        torch.set_num_threads(3)
        torch.testing.assert_close(alone, Driven.apply(*leaves), rtol=0, atol=0, equal_nan=True)
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's own
def test_tangents_transforms_and_autocast_take_the_librarys_product():
    x, w = torch.zeros(2000, 50), torch.randn(50, 60)
    assert torch.equal(by_spikes(x, w), torch.zeros(2000, 60))
    with torch.autograd.forward_ad.dual_level():
        assert by_spikes(torch.autograd.forward_ad.make_dual(x, x), w) is None
    torch.vmap(lambda rows: rows if by_spikes(rows, w) is None else pytest.fail("a transform"))(torch.zeros(2, 2000, 50))
    with torch.autocast("cpu", torch.bfloat16):
        assert by_spikes(x, w) is None
    assert by_spikes(x[:5], w) is None  # too little to look
    assert by_spikes(x, w[:40]) is None and by_spikes(x, w[:, 0]) is None and by_spikes(x, w, torch.ones(1)) is None  # not of one size
    assert by_spikes(x.half(), w.half()) is None and by_spikes(x, w.double()) is None


def test_the_same_bits_at_any_number_of_threads():
    core, count, params = CASES["lstm"]
    x, before = torch.randn(100, 64, H, dtype=f64, requires_grad=True), torch.get_num_threads()
    params = [p.clone().requires_grad_() for p in params]
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            y = flexsn.scan(core, [x], [torch.zeros(64, H, dtype=f64)] * count, params, strict=True).outputs[0]
            found.append([y, *torch.autograd.grad(y.sin().sum(), [x, *params])])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("func", "args", "widths", "want"),
    [
        (torch.chunk, ((4, 7), 2, -1), [7], [[Run(0, 0, 0, 4)], [Run(0, 4, 0, 3)]]),
        (torch.cat, ([(4, 2), (4, 3)], -1), [2, 3], [[Run(0, 0, 0, 2), Run(1, 0, 2, 3)]]),
        (torch.roll, ((4, 5), 2, -1), [5], [[Run(0, 3, 0, 2), Run(0, 0, 2, 3)]]),
        (torch.Tensor.__getitem__, ((4, 5), (..., slice(1, 3))), [5], [[Run(0, 1, 0, 2)]]),
        (torch.roll, ((4, 5), 1, 0), [5], None),  # along the batch
        (torch.Tensor.__getitem__, ((4, 5), 0), [5], None),
        (torch.flip, ((4, 5), [-1]), [5], None),
    ],
)
def test_runs_of_values(func, args, widths, want):
    first, *others = args
    made = [torch.zeros(s) for s in first] if isinstance(first, list) else torch.zeros(first)
    f = MixingFunction(func, tuple(range(len(widths))), (made, *others), {})
    assert moves(f, (4,), widths) == want
