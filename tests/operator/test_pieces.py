"""Sequences in pieces: values and gradients of the whole sequence, memory of a piece."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import flexsn
from flexsn import surrogate
from flexsn.errors import OperandTypeError, PiecesError, SequenceLengthError

N = 32
LENGTHS = [5, 1, 16, 17, 3]
DECAY = nn.Parameter(torch.tensor(0.6, dtype=torch.float64))


def core(x, z, v, a, w):
    h = v * DECAY + x * w + z
    s = surrogate.atan(h - 1.0 - a)
    return s, h, h * (1.0 - s), a * 0.9 + s


def operands():
    x, z = torch.randn(2, sum(LENGTHS), N, dtype=torch.float64)
    v, a, w = torch.randn(3, N, dtype=torch.float64)
    return [t.clone().requires_grad_() for t in (x, z, v, a, w)]


def whole():
    x, z, v, a, w = leaves = operands()
    result = flexsn.scan(core, (x, z), (v, a), (w,), strict=True)
    return leaves, result, torch.autograd.grad(loss(*result.outputs) + result.states[0].sum(), [*leaves, DECAY])


def loss(s, h):
    return (s * torch.arange(1.0, N + 1, dtype=s.dtype)).sum() + h.square().sum()


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_values_and_gradients():
    leaves, want, want_grads = whole()
    x, z, v, a, w = leaves
    got = flexsn.scan(core, (x.split(LENGTHS), list(z.split(LENGTHS))), (v, a), (w,), strict=True)
    assert [[len(p) for p in y] for y in got.outputs] == [LENGTHS, LENGTHS]
    for y, pieces in zip(want.outputs, got.outputs, strict=True):
        assert torch.equal(torch.cat(pieces), y)
    assert all(torch.equal(p, q) for p, q in zip(got.states, want.states, strict=True))
    grads = torch.autograd.grad(loss(*map(torch.cat, got.outputs)) + got.states[0].sum(), [*leaves, DECAY])
    close(grads, want_grads)


def test_reduced():
    leaves, want, want_grads = whole()
    x, z, v, a, w = leaves
    seen = []

    def part(k, s, h):
        seen.append((k, len(s)))
        return loss(s, h), s.detach().sum()

    (total, spikes), (last, _) = flexsn.scan(core, (x.split(LENGTHS), z.split(LENGTHS)), (v, a), (w,), strict=True, reduce=part)
    close(spikes, want.outputs[0].sum())
    assert seen == list(enumerate(LENGTHS))
    close(torch.autograd.grad(total + last.sum(), [*leaves, DECAY]), want_grads)
    assert seen[len(LENGTHS) :] == list(enumerate(LENGTHS))[::-1], "the backward runs every piece once more, from the last"


def test_state_sequences():
    leaves, _, _ = whole()
    x, z, v, a, w = leaves
    want = flexsn.scan(core, (x, z), (v, a), (w,), store_state_seqs=True)
    got = flexsn.scan(core, (x.split(LENGTHS), z.split(LENGTHS)), (v, a), (w,), store_state_seqs=True)
    for pieces, trail in zip(got.states, want.states, strict=True):
        assert torch.equal(torch.cat(pieces), trail)
    close(torch.autograd.grad(torch.cat(got.states[0]).sum(), leaves), torch.autograd.grad(want.states[0].sum(), leaves))


def lif(x, v):
    h = v + (x - v) / 2.0
    s = surrogate.atan(h - 1.0)
    return s, h * (1.0 - s)


class Encoded(Dataset):
    """Pieces made when they are read, by layers that learn."""

    def __init__(self, pieces, encoder):
        self.pieces, self.encoder, self.reads = pieces, encoder, []

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, k):
        self.reads.append(k)
        return self.encoder(self.pieces[k])


def test_dataset_of_encoded_pieces():
    encoder, head, x = nn.Linear(6, N), nn.Linear(N, 3), 3.0 * torch.randn(20, 4, 6)
    y = head(flexsn.scan(lif, (encoder(x),), (None,)).outputs[0]).square().sum()
    params = [*encoder.parameters(), *head.parameters()]
    want = torch.autograd.grad(y, params)
    data = Encoded(x.split(6), encoder)
    (total,), _ = flexsn.scan(lif, (data,), (None,), reduce=lambda k, s: head(s).square().sum())
    torch.testing.assert_close(total, y)
    torch.testing.assert_close(torch.autograd.grad(total, params), want, rtol=1e-4, atol=1e-4)
    assert data.reads == [0, 1, 2, 3, 3, 2, 1, 0]


def test_only_states_at_borders_are_kept():
    """Bytes that autograd saves between forward and backward."""
    saved = []

    def pack(t):
        saved.append(t.numel() * t.element_size())
        return t

    w = torch.ones(N, requires_grad=True)
    pieces = torch.randn(64, N).split(8)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        flexsn.scan(lambda x, v, w: (v * w + x, v * w + x), (torch.cat(pieces),), (None,), (w,))
    assert sum(saved) >= 64 * N * 4, "the test would see nothing"
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        flexsn.scan(lambda x, v, w: (v * w + x, v * w + x), (pieces,), (None,), (w,), reduce=lambda k, y: y.sum())
    assert sum(saved) == 7 * N * 4, saved


def test_iterators():
    x = torch.randn(12, N)
    want = flexsn.scan(lif, (x,), (None,))
    got = flexsn.scan(lif, (iter(x.split(5)),), (None,))  # nothing requires grad
    assert torch.equal(torch.cat(got.outputs[0]), want.outputs[0]) and torch.equal(got.states[0], want.states[0])
    x.requires_grad_()
    with pytest.raises(PiecesError, match="iterator of pieces, but the backward has to read them again"):
        flexsn.scan(lif, (iter(x.split(5)),), (None,))
    with torch.no_grad():
        got = flexsn.scan(lif, ((piece for piece in x.split(5)),), (None,))
        counted = flexsn.scan(lif, (iter(x.split(5)),), (None,), reduce=lambda k, s: (s.sum(), s.numel()))
        flexsn.scan(lif, (iter([x[:0], x]),), (torch.zeros(N, requires_grad=True),), store_state_seqs=True)  # its end is that state
    assert torch.equal(torch.cat(got.outputs[0]), want.outputs[0])
    assert counted.outputs == (want.outputs[0].sum(), x.numel())


def test_refused():
    x, v = torch.randn(6, N), lambda x, z, v: (x + z + v, v)
    two = x.split(3)
    with pytest.raises(PiecesError, match=r"input `z` is Tensor while another input is in pieces"):
        flexsn.scan(v, (two, x), (None,))
    with pytest.raises(PiecesError, match=r"`x` has 2, `z` has 3"):
        flexsn.scan(v, (two, x.split(2)), (None,))
    with pytest.raises(SequenceLengthError, match=r"`x` has T = 3, `z` has T = 4"):
        flexsn.scan(v, (two, x.split(4)), (None,))
    with pytest.raises(PiecesError, match="it ends before piece 2"):
        flexsn.scan(v, (iter(two), iter([*two, *two])), (None,))
    with pytest.raises(PiecesError, match="it ends before piece 2"):
        flexsn.scan(v, (iter(two), [*two, *two]), (None,))
    for empty in ([], iter([])):
        with pytest.raises(PiecesError, match="there are no pieces"):
            flexsn.scan(lif, (empty,), (None,))
    with pytest.raises(PiecesError, match="piece 1 of input `x` is list, not a tensor"):
        flexsn.scan(lif, ([x, [1.0]],), (None,))
    with pytest.raises(PiecesError, match="no input is in pieces"):
        flexsn.scan(lif, (x,), (None,), reduce=lambda k, s: s.sum())
    with pytest.raises(OperandTypeError, match="must be a tensor, not ndarray"):
        flexsn.scan(lif, (x.numpy(),), (None,))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own, at a graph break
def test_compiled_caller_breaks_its_graph():
    x = torch.randn(12, N, requires_grad=True)

    def total(x):
        return flexsn.scan(lif, ((2 * x).split(5),), (None,), reduce=lambda k, s: s.sum()).outputs[0] * 3

    want = torch.autograd.grad(total(x), x)
    got = total(x), torch.compile(total, backend="aot_eager")(x)
    assert torch.equal(*got)
    torch.testing.assert_close(torch.autograd.grad(got[1], x), want)


MEMORY = """
import sys, threading, time, torch, flexsn
from flexsn import surrogate

def resident():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def lif(x, v, w):
    h = v + (x - v) * w.sigmoid()
    s = surrogate.atan(h - 1.0)
    return s, h * (1.0 - s)

path, T, N, whole = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "whole"
x = torch.from_file(path, size=T * N, dtype=torch.float32).view(T, N)
w = torch.zeros(N, requires_grad=True)
def step(x):
    if whole:
        return flexsn.scan(lif, (x,), (None,), (w,), strict=True).outputs[0].square().mean()
    return flexsn.scan(lif, (x.split(len(x) // 64),), (None,), (w,), strict=True, reduce=lambda k, s: s.square().sum()).outputs[0] / x.numel()
step(x[:64]).backward()
before, peak, done = resident(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
w.grad = None
loss = step(x)
loss.backward()
done = True
thread.join()
print(peak - before, loss.item(), w.grad.norm().item())
"""


@pytest.mark.slow
def test_peak_memory(tmp_path):
    """A step on a sequence of 128 MiB on disk, in 64 pieces: a few pieces of memory; whole: more than the sequence."""
    T, size = 2048, 16_384
    torch.manual_seed(0)
    path = tmp_path / "sequence.bin"
    (2.0 * torch.randn(T * size)).numpy().tofile(path)
    found = {}
    for how in ("whole", "pieces"):
        command, freed = [sys.executable, "-c", MEMORY, str(path), str(T), str(size), how], {"MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **freed})  # free gives back at once
        assert done.returncode == 0, done.stderr
        found[how] = [float(number) for number in done.stdout.split()]
    sequence = 4 * T * size
    assert found["whole"][0] > sequence, "the test would see nothing"
    assert found["pieces"][0] < sequence / 5, f"{found['pieces'][0] / sequence:.2f} of the sequence"
    torch.testing.assert_close(torch.tensor(found["pieces"][1:]), torch.tensor(found["whole"][1:]), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize(
    ("changed", "reduced"),
    [(c, r) for c in ("a piece", "a param", "a captured tensor") for r in (False, True)] + [("a tensor of reduce", True)],
)
def test_what_changes_before_the_backward_is_noticed(changed, reduced):
    w, c = torch.full((6,), 0.5, requires_grad=True), torch.full((6,), 0.3, requires_grad=True)
    pieces = [torch.rand(10, 6), torch.rand(10, 6)]

    def core(x, v, w):
        h = v * w + x * c
        return h, h

    head = torch.full((6,), 0.3, requires_grad=True)
    reduce = (lambda k, y: (y * head).sum()) if reduced else None
    (y,), _ = flexsn.scan(core, (pieces,), (None,), (w,), reduce=reduce)
    with torch.no_grad():
        {"a piece": pieces[1], "a param": w, "a captured tensor": c, "a tensor of reduce": head}[changed].mul_(2)
    with pytest.raises(flexsn.errors.PiecesError, match="modified by an in-place operation"):
        (y if reduced else y[0].sum() + y[1].sum()).backward()


@pytest.mark.parametrize(
    "reduce, why",
    [
        ("sum", "`reduce` is str, not a function"),
        (lambda k, s: None, "`reduce` returned NoneType for piece 0, not a tensor"),
        (lambda k, s: (s.sum(), "loss"), "`reduce` returned str for piece 0, not a tensor"),
        (lambda k, s: s, r"returned tensors of shape \[\[1, 3\]\] for piece 2 and \[\[2, 3\]\] before"),
        (lambda k, s: (s.sum(),) * (k + 1), r"returned tensors of shape \[\[\], \[\]\] for piece 1"),
    ],
    ids=["no function", "None", "a word", "by length", "by number"],
)
@pytest.mark.parametrize("grad", [False, True])
def test_reduce_that_cannot_be_summed_is_refused(reduce, why, grad):
    x = torch.rand(5, 3, requires_grad=grad)
    with pytest.raises(flexsn.errors.PiecesError, match=why):
        flexsn.scan(lif, (x.split(2),), (None,), reduce=reduce)


# --- what is no sequence in pieces, and no sum ----------------------------------------------------------------------------------
def leaky(x, v):
    h = 0.9 * v + x
    return h.tanh(), h


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_gradient_transforms_are_refused(transform, backend):
    def total(x):
        return flexsn.scan(leaky, (x.split(5),), (None,), reduce=lambda k, y: y.square().sum(), backend=backend).outputs[0]

    with pytest.raises(PiecesError, match=r"torch\.func.*\n.*torch\.cat\(pieces\)"):
        transform(total)(torch.randn(20, 4))


def test_vmap_over_pieces():
    x = torch.randn(3, 20, 4)
    got = torch.vmap(lambda x: flexsn.scan(leaky, (x.split(5),), (None,), reduce=lambda k, y: y.sum()).outputs[0])(x)
    torch.testing.assert_close(got, torch.stack([flexsn.scan(leaky, (row,), (None,)).outputs[0].sum() for row in x]))


def test_arrays_and_loaders_are_no_pieces(tmp_path):
    mapped = np.memmap(tmp_path / "x", dtype=np.float32, mode="w+", shape=(20, 4))
    loader = DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=5)
    for pieces, words in (
        ([mapped[:10], mapped[10:]], "memmap, not a tensor.*\n.*torch.from_numpy"),
        (iter([mapped]), "memmap, not a tensor.*\n.*torch.from_numpy"),
        (loader, "DataLoader.*\n.*batch\\[0\\] for batch"),
        (iter(loader), "list, not a tensor.*\n.*batch\\[0\\] for batch"),
        (list(loader), "list, not a tensor.*\n.*batch\\[0\\] for batch"),
    ):
        with pytest.raises(PiecesError, match=words):
            flexsn.scan(leaky, (pieces,), (None,))
    want = flexsn.scan(leaky, (torch.cat([b[0] for b in loader]),), (None,)).outputs[0]
    assert torch.equal(torch.cat(flexsn.scan(leaky, ([b[0] for b in loader],), (None,)).outputs[0]), want)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_captured_tensor_replaced_before_the_backward(backend):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.full((2,), 0.7))

        def core(self, x, v):
            v = (x * self.w).tanh() + 0.5 * v * self.w
            return v * v, v

        def forward(self, x):
            return torch.cat(flexsn.scan(self.core, (list(x.split(2)),), (torch.zeros(2),), backend=backend).outputs[0])

    net, other, x = Net(), torch.full((2,), 1.3, requires_grad=True), torch.randn(6, 2)
    total = torch.func.functional_call(net, {"w": other}, (x,)).sum()
    with pytest.raises(PiecesError, match=r"captures was replaced .* before the backward"):
        total.backward()
    net(x).sum().backward()
    assert net.w.grad.abs().sum() > 0


def test_a_python_value_that_changes_before_the_backward():
    """The backward runs the core again, with what it reads then. `reduce` may keep count of what it is called for."""
    gain, calls = [1.0], []
    x = torch.rand(20, 6, requires_grad=True)

    def core(x, v):
        h = v * 0.5 + x * gain[0]
        return h, h

    def reduce(k, y):
        calls.append(k)
        return y.sum()

    (y,), _ = flexsn.scan(core, (x.split(10),), (None,), reduce=reduce)
    y.backward()
    assert len(calls) >= 2 and x.grad.any()
    (y,), _ = flexsn.scan(core, (x.split(10),), (None,), reduce=reduce)
    gain[0] = 3.0
    with pytest.raises(PiecesError, match="a Python value that the core reads"):
        y.backward()


@pytest.mark.parametrize(
    ("change", "noticed"),
    [("a buffer of reduce", True), ("another tensor in reduce", True), ("another piece in the list", False), ("an empty list", False)],
)
def test_what_changes_beside_the_trained_tensors(change, noticed):
    """A list of pieces is the caller's, who may fill it with the next ones; what `reduce` collects and counts is its own matter."""
    weights, held, collected, last = torch.full((6,), 2.0), [torch.ones(6)], [], {}
    pieces, v, norm, total = [torch.rand(10, 6), torch.rand(10, 6)], torch.zeros(6, requires_grad=True), nn.BatchNorm1d(6), torch.zeros(())

    def reduce(k, y):
        nonlocal total
        collected.append(y.detach())
        last["y"], total = y.detach(), total + y.detach().sum()
        norm(y.detach())
        return (y.square() * weights).sum() + (y * held[0]).sum()

    want = torch.autograd.grad(flexsn.scan(leaky, (pieces,), (v,), reduce=reduce).outputs[0], [v])
    loss = flexsn.scan(leaky, (pieces,), (v,), reduce=reduce).outputs[0]
    if change == "a buffer of reduce":
        weights.mul_(3.0)
    elif change == "another tensor in reduce":
        held[0] = held[0] * 3.0
    elif change == "another piece in the list":
        pieces[0] = pieces[0] * 2.0
    else:
        pieces.clear()
    if noticed:
        with pytest.raises(PiecesError, match="before the backward"):
            loss.backward()
    else:
        assert torch.equal(torch.autograd.grad(loss, [v])[0], want[0])


def test_looking_at_what_reduce_holds_takes_no_time():
    """What it collects grows with every piece, and is not looked through at every piece."""
    pieces, v, logged = [torch.rand(2, 6)] * 300, torch.zeros(6, requires_grad=True), []
    looks, values = [], flexsn.scan.__globals__["CapturedValues"]

    def counted(function):
        looks.append(function)
        return values(function)

    def reduce(k, y):
        logged.append(y.detach().mean())
        return y.square().sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(flexsn.scan.__globals__, "CapturedValues", counted)
        flexsn.scan(leaky, (pieces,), (v,), reduce=reduce).outputs[0].backward()
    assert len(logged) >= 300 and 1 <= sum(f is reduce for f in looks) <= 3


def test_a_trained_tensor_that_reduce_changes_is_noticed():
    head, pieces = torch.ones(6, requires_grad=True), [torch.rand(4, 6)] * 2

    def reduce(k, y):
        part = (y * head.detach().clone()).sum() + head.sum()
        with torch.no_grad():
            head.mul_(2.0)
        return part

    v = torch.zeros(6, requires_grad=True)
    loss = flexsn.scan(leaky, (pieces,), (v,), reduce=reduce).outputs[0]
    with pytest.raises(PiecesError, match="before the backward"):
        loss.backward()


def test_what_a_core_leads_to_and_does_not_read_may_change():
    """A core that is a method of its network."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.other = torch.nn.Parameter(torch.full((3,), 0.5)), torch.nn.BatchNorm1d(3)

        def step(self, x, v):
            h = v * self.w.sigmoid() + x
            return h.tanh(), h

    net, x = Net(), torch.rand(9, 4, 3)
    (got,) = flexsn.scan(net.step, (x.split(4),), (None,), reduce=lambda k, y: y.square().sum()).outputs
    net.other(x.flatten(0, 1))
    net.other.weight = torch.nn.Parameter(torch.ones(3))
    want = flexsn.scan(net.step, (x,), (None,)).outputs[0].square().sum()
    torch.testing.assert_close(torch.autograd.grad(got, net.w), torch.autograd.grad(want, net.w))
    (lost,) = flexsn.scan(net.step, (x.split(4),), (None,), reduce=lambda k, y: y.square().sum()).outputs
    with torch.no_grad():
        net.w.mul_(2)
    with pytest.raises(PiecesError, match="modified by an in-place operation"):
        lost.backward()


def test_a_tied_tensor_is_watched_under_all_its_names():
    net = torch.nn.Module()
    net.a = net.b = torch.nn.Parameter(torch.full((3,), 0.5))

    def core(x, v):
        h = v * net.a + x * net.b
        return h.tanh(), h

    (lost,) = flexsn.scan(core, (torch.rand(9, 4, 3).split(4),), (None,), reduce=lambda k, y: y.square().sum()).outputs
    net.b = torch.nn.Parameter(torch.full((3,), 5.0))
    with pytest.raises(PiecesError, match=r"changed after piece|replaced by another one"):
        lost.backward()
