"""Sequences of unequal length, and resets, beside each sequence on its own and a loop in plain PyTorch."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import flexsn
from flexsn import surrogate
from flexsn._captured.captured_values import look
from flexsn._codegen import cpp
from flexsn._program.compiled import Program
from flexsn._runtime import cpp_kernel, parallel_time
from flexsn.errors import ArgumentError, OperandTypeError, PiecesError, ShapeMismatchError

T, LENGTHS = 23, torch.tensor([0, 1, 23, 40, -3, 11, 16])  # of 23 steps: none, one, all, more than all, less than none
B, D = len(LENGTHS), 5
MIXED = torch.randn(D, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def lif(x, v):
    h = v + (x - v) / 2.0
    s = surrogate.atan(h - 1.0)
    return s, h * (1.0 - s)


def adaptive(x, v, a, tau):
    h = v + (x - v) / tau
    s = surrogate.atan(h - 0.5 - a)
    return s, h, h * (1.0 - s), a * 0.9 + 0.1 * s


def recurrent(x, v, s):
    h = v + (x + s @ MIXED.to(x.dtype) - v) / 2.0
    s = surrogate.atan(h - 1.0)
    return s, h * (1.0 - s), s


CORES = {"lif": (lif, 1, 0), "adaptive": (adaptive, 2, 1), "recurrent": (recurrent, 2, 0)}


def operands(name, steps=T, dtype=torch.float64):
    """Return a core and leaves: an input, states, params."""
    core, states, params = CORES[name]
    torch.manual_seed(0)
    x = (torch.randn(steps, B, D, dtype=dtype) + 0.6).requires_grad_()
    start = [torch.rand(B, D, dtype=dtype).requires_grad_() for _ in range(states)]
    return core, x, start, [torch.full((D,), 2.0 + k, dtype=dtype).requires_grad_() for k in range(params)]


def with_gradients(results, leaves):
    """Return results and the gradients of a loss in which every step and sequence weighs differently."""
    loss = sum((y * torch.linspace(1, 2, y.numel()).view(y.shape)).square().sum() for y in results)
    return [*results, *torch.autograd.grad(loss, leaves, allow_unused=True)]


def loop(core, x, states, params, lengths=None, resets=None, starts=None):
    """Return outputs and final states, written by hand."""
    lengths, kept = torch.full((x.shape[1],), len(x)) if lengths is None else lengths, []
    for t, row in enumerate(x.unbind(0)):
        before = states
        if resets is not None:
            starts = [torch.zeros_like(v) for v in states] if starts is None else starts
            states = [torch.where(resets[t, :, None], s, v) for s, v in zip(starts, states, strict=True)]
        values, going = core(row, *states, *params), (t < lengths)[:, None]
        outs = len(values) - len(states)
        kept.append([torch.where(going, y, torch.zeros_like(y)) for y in values[:outs]])
        states = [torch.where(going, new, old) for new, old in zip(values[outs:], before, strict=True)]
    return [torch.stack(column) for column in zip(*kept, strict=True)], states


def same(found, expected, **tolerances):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerances)


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_each_sequence_is_as_on_its_own(name, backend):
    core, x, states, params = operands(name)
    found = flexsn.scan(core, (x,), states, params, lengths=LENGTHS, backend=backend, strict=backend == "auto")
    got = with_gradients([*found.outputs, *found.states], [x, *states, *params])
    y, v = loop(core, x, states, params, LENGTHS)
    same(got, with_gradients([*y, *v], [x, *states, *params]))
    for b, n in enumerate(LENGTHS.clamp(0, T).tolist()):
        alone = flexsn.scan(core, (x[:n, b : b + 1],), [v[b : b + 1] for v in states], params)
        same([v[b : b + 1] for v in found.states], alone.states)
        for whole, own in zip(found.outputs, alone.outputs, strict=True):
            torch.testing.assert_close(whole[:n, b : b + 1], own)
            assert not whole[n:, b].any()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "shape, lengths", [((3, 300), [23, 5, 0]), ((3, 300), [4, 0, 9]), ((40, 16), [23, 0, 3, 11] * 10), ((2, 128), [7, 8])]
)
def test_blocks_of_neurons_that_end_apart(shape, lengths, streamed, monkeypatch):
    """In the same tile, on a CPU; `streamed`: rows go past the caches."""
    if streamed:
        monkeypatch.setattr(cpp_kernel, "_cache_bytes", lambda: 0)
    torch.manual_seed(0)
    x, n = (torch.randn(T, *shape, dtype=torch.float64) + 0.6).requires_grad_(), torch.tensor(lengths)
    states = [torch.rand(shape, dtype=x.dtype).requires_grad_() for _ in range(2)]
    tau = torch.rand(shape[1], dtype=x.dtype).add(1.5).requires_grad_()
    core = fresh(adaptive)
    found = flexsn.scan(core, (x,), states, (tau,), lengths=n, strict=True)
    y, after = loop(adaptive, x, states, [tau], n)
    leaves = [x, *states, tau]
    same(with_gradients([*found.outputs, *found.states], leaves), with_gradients([*y, *after], leaves))


@pytest.mark.parametrize("lengths", [[0, 0, 0], [1, 7, 0], [2, 3, -1], [7, 7, 7]], ids=str)
@pytest.mark.parametrize("steps", [3, 17])
def test_triton(lengths, steps):
    """Programs that stop at their longest sequence, in Triton's interpreter or on a GPU."""
    torch.manual_seed(0)
    x, v, n = (torch.randn(steps, 3, D) + 0.6).requires_grad_(), torch.rand(3, D).requires_grad_(), torch.tensor(lengths)
    found = flexsn.scan(lif, (x,), (v,), lengths=n, backend="triton")
    y, after = loop(lif, x, [v], [], n)
    same(with_gradients([*found.outputs, *found.states], [x, v]), with_gradients([*y, *after], [x, v]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("start", ["zeros", "given", "of the call"])
@pytest.mark.parametrize("name", CORES)
def test_resets(name, start):
    core, x, states, params = operands(name)
    resets = torch.rand(T, B) < 0.2
    resets[0, :3] = True  # in place of the states that are given
    own = [torch.rand(D, dtype=x.dtype).requires_grad_() for _ in states]
    starts = {"zeros": [None] * len(states), "given": own, "of the call": None}[start]
    found = flexsn.scan(core, (x,), states, params, lengths=LENGTHS, resets=resets, reset_states=starts, strict=True)
    y, v = loop(core, x, states, params, LENGTHS, resets, {"zeros": None, "given": own, "of the call": states}[start])
    leaves = [x, *states, *params, *(own if start == "given" else [])]
    same(with_gradients([*found.outputs, *found.states], leaves), with_gradients([*y, *v], leaves))


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("padding", [float("nan"), float("inf")])
def test_what_lies_past_an_end_reaches_nothing(name, padding):
    core, x, states, params = operands(name)
    past = torch.arange(T)[:, None] >= LENGTHS
    leaves = [x, *states, *params]
    expected = flexsn.scan(core, (x,), states, params, lengths=LENGTHS)
    padded = torch.where(past[..., None], padding, x.detach()).requires_grad_()
    found = flexsn.scan(core, (padded,), states, params, lengths=LENGTHS)
    got = with_gradients([*found.outputs, *found.states], [padded, *leaves[1:]])
    same(got, with_gradients([*expected.outputs, *expected.states], leaves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_sequences_repeat_the_last_state(dtype):
    _, x, (v,), _ = operands("lif", dtype=torch.float32)
    runs = [flexsn.scan(lif, (x.to(dtype),), (v.to(dtype),), lengths=LENGTHS, store_state_seqs=True, backend=b) for b in ("auto", "torch")]
    assert torch.equal(runs[0].states[0], runs[1].states[0]) and torch.equal(runs[0].outputs[0], runs[1].outputs[0])
    trail = runs[0].states[0]
    assert all(torch.equal(trail[t, 5], trail[10, 5]) for t in range(11, T)) and not torch.equal(trail[9, 5], trail[10, 5])


@pytest.mark.parametrize("longest", [4, 9])  # all have ended, or one goes on
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_gradients_of_state_sequences_past_an_end(backend, longest):
    """They repeat the last state, to which the gradients of all of them flow: a read-out of the last step is that of each own end."""
    _, x, (v,), _ = operands("lif", 9)
    lengths = LENGTHS.clamp(max=longest)
    found = flexsn.scan(lif, (x,), (v,), lengths=lengths, store_state_seqs=True, backend=backend)
    _, after = loop(lif, x, [v], [], lengths)
    same(with_gradients([found.states[0][-1]], [x, v]), with_gradients(after, [x, v]))


def test_a_core_that_is_not_finite_at_zero():
    """An ended sequence takes zeros; what their gradients are reaches nothing, in kernels."""

    def core(x, tau, v, w):
        v = v + (w / x - v) / tau
        return v.tanh(), v

    torch.manual_seed(0)
    x, tau = (torch.rand(6, 3, 2, dtype=torch.float64).add(0.5).requires_grad_() for _ in range(2))
    w, lengths = torch.rand(2, dtype=torch.float64).requires_grad_(), torch.tensor([6, 3, 0])
    found = flexsn.scan(core, (x, tau), (None,), (w,), lengths=lengths, strict=True).outputs[0]
    leaves = [x, tau, w]
    alone = [flexsn.scan(core, (x[:n, b], tau[:n, b]), (None,), (w,)).outputs[0] for b, n in enumerate(lengths.tolist()) if n]
    same(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(sum(y.sum() for y in alone), leaves))


@pytest.mark.parametrize("width", [4, 5])  # as many as sequences, too
@pytest.mark.filterwarnings("ignore::flexsn.errors.FallbackWarning")
def test_values_of_fewer_dims_than_an_input(width):
    def sums(x, v):
        v = v * 0.9 + x.sum(-1)
        return v, v.mean(-1), v

    x, lengths = torch.rand(10, 4, width, 3), torch.tensor([2, 4, 8, 10])
    for options in ({"lengths": lengths}, {"lengths": lengths, "resets": torch.rand(10, 4) < 0.2}):
        found = flexsn.scan(sums, (x,), (torch.zeros(4, width),), **options)
        for b, n in enumerate(lengths.tolist()):
            resets = options["resets"][:n, b : b + 1] if "resets" in options else None
            own = flexsn.scan(sums, (x[:n, b : b + 1],), (torch.zeros(1, width),), resets=resets, backend="torch")
            for whole, part in zip(found.outputs, own.outputs, strict=True):
                torch.testing.assert_close(whole[:n, b], part[:, 0])
                assert not whole[n:, b].any()
            torch.testing.assert_close(found.states[0][b : b + 1], own.states[0])


def test_an_input_that_all_sequences_share():
    """As many values as sequences; it comes first."""

    def core(x, y, v):
        v = v * 0.5 + x * y
        return v, v

    shared, x = torch.rand(6, 3), torch.rand(6, 3, 3)
    lengths = torch.tensor([6, 3, 0])
    found, plain = (flexsn.scan(core, (shared, x), (None,), lengths=n).outputs[0] for n in (lengths, None))
    assert torch.equal(found, torch.where((torch.arange(6)[:, None] < lengths)[..., None], plain, 0.0))


def test_pieces_count_on():
    _, x, (v,), _ = operands("lif")
    whole, pieces = (flexsn.scan(lif, (given,), (v,), lengths=LENGTHS) for given in (x, x.split(6)))
    found = with_gradients([torch.cat(pieces.outputs[0]), *pieces.states], [x, v])
    same(found, with_gradients([*whole.outputs, *whole.states], [x, v]))
    with pytest.raises(PiecesError, match="`resets` is given"):
        flexsn.scan(lif, (x.split(6),), (v,), resets=torch.zeros(T, B, dtype=torch.bool))
    with pytest.raises(PiecesError, match="no first piece"):
        flexsn.scan(lif, (iter(x.split(6)),), (v,), lengths=LENGTHS)


def test_a_neuron_carries_the_states_at_the_ends():
    _, x, _, _ = operands("lif")
    neuron, resets = flexsn.LIF(initial_states=[0.3]), torch.rand(2 * T, B) < 0.2
    first, second = neuron(x, lengths=LENGTHS, resets=resets[:T]), neuron(x, resets=resets[T:])
    starts = [torch.full((B, D), 0.3, dtype=x.dtype)]
    y, v = loop(neuron.core, x, starts, [], LENGTHS, resets[:T], starts)
    z, w = loop(neuron.core, x, v, [], None, resets[T:], starts)
    same([first, second, *neuron.states], [*y, *z, *w])


@pytest.mark.parametrize("stateful", [True, "detached", False])
def test_compiled(stateful):
    _, x, _, _ = operands("lif", dtype=torch.float32)
    resets, runs = torch.rand(T, B) < 0.2, []
    for compiled in (False, True):
        net = flexsn.LIF(stateful=stateful, learn_tau=True)
        run = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
        runs.append(with_gradients([run(x, lengths=LENGTHS, resets=resets)], [x, net.tau]) + list(net.states or []))
    same(*runs)


def test_exported():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.neuron = flexsn.LIF(stateful=False)

        def forward(self, x, lengths):
            return self.neuron(x, lengths=lengths)

    x, net = torch.rand(T, B, D) * 2, Net()
    steps = torch.export.Dim("T", min=2)
    program = torch.export.export(net, (x, LENGTHS), dynamic_shapes={"x": {0: steps}, "lengths": {}}).module()
    for lengths, given in ((LENGTHS, x), (LENGTHS.flip(0), x), (LENGTHS, torch.rand(2 * T, B, D) * 2)):
        assert torch.equal(program(given, lengths), net(given, lengths))


def test_transforms():
    _, x, (v,), _ = operands("lif")
    many, lengths, resets = torch.randn(4, T, B, D).double() + 0.6, torch.randint(0, T + 1, (4, B)), torch.rand(4, T, B) < 0.2

    def run(x, lengths, resets=None):
        return flexsn.scan(lif, (x,), (v.detach(),), lengths=lengths, resets=resets).outputs[0]

    for given in ((many, lengths), (many, lengths, resets)):
        assert torch.equal(torch.vmap(run)(*given), torch.stack([run(*one) for one in zip(*given, strict=True)]))
    assert torch.equal(torch.vmap(run, (0, None))(many, LENGTHS), torch.stack([run(x, LENGTHS) for x in many]))
    expected = torch.autograd.grad(run(x, LENGTHS).square().sum(), x)[0]
    torch.testing.assert_close(torch.func.grad(lambda x: run(x, LENGTHS).square().sum())(x.detach()), expected)
    y = checkpoint(lambda x: run(x, LENGTHS), x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], expected)


def test_second_derivatives():
    def smooth(x, v):
        v = v + (torch.tanh(x) - v) / 2.0
        return v * v, v

    x, v = torch.randn(6, 3, 2, dtype=torch.float64).requires_grad_(), torch.rand(3, 2, dtype=torch.float64).requires_grad_()
    run = functools.partial(flexsn.scan, smooth, lengths=torch.tensor([0, 4, 9]), strict=True)
    assert torch.autograd.gradgradcheck(lambda x, v: run((x,), (v,)).outputs[0], (x, v))


class Step(nn.Module):
    """A network of one step; `counts`: one that `over_time` runs step by step."""

    def __init__(self, *, counts=False):
        super().__init__()
        self.first, self.lif, self.second = nn.Linear(D, 8), flexsn.LIF(), nn.Linear(8, 3)
        self.recurrent, self.counts, self.count = flexsn.Recurrent(flexsn.LIF(), nn.Linear(3, 3)), counts, 0

    def forward(self, x):
        self.count += self.counts
        return self.recurrent(self.second(self.lif(self.first(x)))), self.second.bias.sum() + x.mean()


@pytest.mark.parametrize("kind", ["chain", "at once", "step by step"])
@pytest.mark.filterwarnings("ignore::flexsn.errors.FallbackWarning")
def test_over_time(kind):
    torch.manual_seed(0)
    step, x = Step(counts=kind == "step by step"), torch.rand(T, B, D) * 4
    chained = nn.Sequential(step.first, step.lif, step.second, step.recurrent, nn.Linear(3, 2))
    network = chained if kind == "chain" else step
    run, neurons = flexsn.over_time(network), [step.lif, step.recurrent]

    def called(*given, **named):
        y = run(*given, **named)
        found = [y] if kind == "chain" else list(y)
        states = [v.detach() for neuron in neurons for v in neuron.states]
        flexsn.reset_net(network)
        return found, states

    found, states = called(x, lengths=LENGTHS)
    for b, n in enumerate(LENGTHS.clamp(0, T).tolist()):
        assert not found[0][n:, b].any()
        if n:
            own, ends = called(x[:n, b : b + 1])
            torch.testing.assert_close(found[0][:n, b : b + 1], own[0])
            same([v[b : b + 1] for v in states], ends)
    assert (run.reason is None) == (kind != "step by step")
    if kind != "chain":  # of no sequence: as it is
        assert found[1].shape == (T,) and found[1].all()


def test_over_time_refuses_what_would_be_lost():
    class Taken(nn.Module):
        def forward(self, x, lengths):
            return x + lengths

    class Within(nn.Module):
        def __init__(self):
            super().__init__()
            self.neuron = flexsn.LIF()

        def forward(self, x):
            return self.neuron(x, lengths=LENGTHS)

    x = torch.rand(T, B, D)
    with pytest.raises(ArgumentError, match="and so does the network"):
        flexsn.over_time(Taken())(x, lengths=LENGTHS)
    with pytest.raises(ArgumentError, match="takes one step"):
        flexsn.over_time(Within())(x)
    layer = flexsn.over_time(nn.Linear(D, 2))
    for lengths in ([T] * B, torch.ones(B), LENGTHS[1:]):
        with pytest.raises((OperandTypeError, ShapeMismatchError), match="`lengths`"):
            layer(x, lengths=lengths)
    layer(torch.where((torch.arange(T)[:, None] < LENGTHS)[..., None], x, torch.nan), lengths=LENGTHS).sum().backward()
    assert layer.network.weight.grad.isfinite().all()


@pytest.mark.parametrize("sort", [True, False])
def test_packed_sequences(sort):
    lengths = torch.tensor([7, 5, 2] if sort else [2, 7, 5])
    x = torch.rand(7, 3, D) * 3
    packed = pack_padded_sequence(x, lengths, enforce_sorted=sort)
    neuron = flexsn.LIF()
    found, states = neuron(packed), neuron.states
    neuron.reset()
    expected = pack_padded_sequence(neuron(x, lengths=lengths), lengths, enforce_sorted=sort)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True) if a is not None)
    assert torch.equal(states[0], neuron.states[0])  # in the order of the batch
    scanned = flexsn.scan(lif, (packed,), (None,))
    assert torch.equal(scanned.states[0], flexsn.scan(lif, (x,), (None,), lengths=lengths).states[0])
    assert torch.equal(pad_packed_sequence(scanned.outputs[0])[1], lengths)
    nn.LSTM(D, 4)(found)  # goes where such sequences go
    other = pack_padded_sequence(x, lengths.flip(0), enforce_sorted=False)
    for refused in (
        lambda: flexsn.scan(lambda x, y, v: (x + y, v), (packed, other), (None,)),
        lambda: flexsn.scan(lif, (packed,), (None,), lengths=lengths),
        lambda: neuron(packed, lengths=lengths),
    ):
        with pytest.raises((ArgumentError, OperandTypeError)):
            refused()


def test_an_operand_named_lengths():
    def core(x, lengths):
        return x + lengths, lengths

    with pytest.raises(ArgumentError, match="has an operand named `lengths`"):
        flexsn.scan(core, (torch.ones(3, 2, 4),), (None,), lengths=torch.tensor([1, 2]))
    assert flexsn.scan(core, (torch.ones(3, 2, 4),), (None,)).outputs[0].shape == (3, 2, 4)


def test_kernels_stop_at_the_end(monkeypatch):
    """Of a core that is given lengths, and of one that counts down by hand: what a tile is not asked for, it does not read."""
    ends = []
    monkeypatch.setattr(Program, "__init__", lambda self, *a, init=Program.__init__: (init(self, *a), ends.append(self.end))[0])

    def stops_here(x, v, left):  # a core of this test alone
        s, w = lif(x, v)
        return torch.where(left > 0, s, 0.0), torch.where(left > 0, w, v), left - 1

    def goes_on(x, v, left):
        s, w = lif(x, v)
        return s, torch.where(left > 0, w, v), left - 1

    x, v, left = torch.rand(T, B, D) * 3, torch.zeros(B, D), LENGTHS.to(torch.int32)[:, None]
    for core in (stops_here, goes_on):
        found = flexsn.scan(core, (x,), (v, left), strict=True)
        y, after = loop(core, x, [v, left], [])
        same([*found.outputs, *found.states], [*y, *after])
        same(found.states[1:], [left - T])  # as a core that counts left it
    assert ends == ["v1", None]
    sources = [cpp.render(Program.forward_plan(p, [torch.float32], True, False)) for p in programs_of(lif, x, v)]
    assert sources and all("ends_of(" in source and "store_left(" in source for source in sources)


def programs_of(core, x, v):
    """Return the programs of calls with lengths."""
    flexsn.scan(core, (x,), (v,), lengths=LENGTHS, strict=True)
    return [call.program for seen in look(core).over_parts.values() for call in seen.calls.values()]


@pytest.mark.parametrize("ends", [(20_000, 3_000), (9_000, 3_000), (0, 8_500)])
def test_parts_of_time_side_by_side(ends):
    """Of one neuron and many steps: a walk back of which parts begin past an end, of one sequence or of all."""
    torch.manual_seed(0)
    lengths, runs = torch.tensor(ends), []
    x = (torch.randn(20_000, 2, 1, dtype=torch.float64) + 0.6).requires_grad_()
    for most in (parallel_time.MOST_NEURONS, 0):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(parallel_time, "MOST_NEURONS", most)
            y = flexsn.scan(fresh(lif), (x,), (None,), lengths=lengths, strict=True).outputs[0]
            runs.append([y, *torch.autograd.grad(y.square().sum(), x)])
    same(*runs)


def fresh(core):
    """Return a core that no call knows yet."""

    def new(*operands):
        return core(*operands)

    return new
