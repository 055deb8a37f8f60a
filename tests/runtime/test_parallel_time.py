"""Few neurons over many steps: parts of time side by side give what one walk gives, up to rounding."""

import contextlib
import re

import pytest
import torch

import flexsn
from flexsn._runtime import parallel_time
from flexsn._runtime.cpp_kernel import collected

STEPS = 2401  # whole parts, and a rest of one step


@contextlib.contextmanager
def one_after_the_other():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def fewer_steps(monkeypatch):
    monkeypatch.setattr(parallel_time, "LEAST_STEPS", 2048)


@pytest.fixture
def walks(monkeypatch):
    """The numbers of parts that have run."""
    found = []
    call = parallel_time._Backward.__call__

    def noted(self, arrays, dims):
        found.append(self.parts)
        call(self, arrays, dims)

    monkeypatch.setattr(parallel_time._Backward, "__call__", noted)
    return found


def lif(x, v):
    h = v + (x - v) / 2.0
    s = flexsn.surrogate.sigmoid(h - 1.0, 4.0)
    return s, h * (1.0 - s)


def learned(x, v, tau, theta):
    h = v + (x - v) * torch.sigmoid(tau)
    s = flexsn.surrogate.atan(h - theta)
    return s, h - s * theta


def per_neuron(x, v, tau, gain):
    h = v + (x * gain - v) * torch.sigmoid(tau)
    s = flexsn.surrogate.atan(h - 1.0)
    return s * gain, h * (1.0 - s)


def adaptive(x, v, a):
    v = v * 0.9 + x * 0.3
    s = flexsn.surrogate.erf(v - 1.0 - 0.2 * a)
    return s, v * (1.0 - s), a * 0.95 + s + 0.01 * v


def rotation(x, u, v):
    u, v = 0.98 * (u * 0.9 - v * 0.4) + x, 0.98 * (u * 0.4 + v * 0.9)
    return torch.where(u > 0, u, 0.1 * u) + v, u, v


def chain(x, a, b, c, d):
    a = a * 0.9 + x
    b = b * 0.8 + a
    c = torch.tanh(c) * 0.5 + b
    d = d * 0.7 - c * a
    return d, a, b, c, d


CORES = {
    "lif": (lif, 1, []), "learned": (learned, 1, [torch.tensor(0.3), torch.tensor(0.7)]), "per neuron": (per_neuron, 1, ["step", torch.tensor(1.3)]),
    "adaptive": (adaptive, 2, []),
    "rotation": (rotation, 2, []), "chain": (chain, 4, []),
}  # fmt: skip


def gradients(core, x, states, params, dtype, sequences=False, only_first_steps=False):
    x = x.to(dtype).requires_grad_()
    states = [v.to(dtype).requires_grad_() for v in states]
    params = [p.clone().to(dtype).requires_grad_() for p in params]
    found = flexsn.scan(core, (x,), tuple(states), params=tuple(params), store_state_seqs=sequences)
    results = [*found.outputs, *found.states]
    if only_first_steps:
        results = [r[:100] for r in found.outputs]
    generator = torch.Generator().manual_seed(1)
    return torch.autograd.grad(results, [x, *states, *params], [torch.randn(r.shape, generator=generator).to(r.dtype) for r in results])


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("step", [(1,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("sequences", [False, True])
def test_gradients(walks, name, step, sequences):
    core, states, params = CORES[name]
    torch.manual_seed(0)
    x, states = torch.randn(STEPS, *step) + 0.8, [torch.rand(step) for _ in range(states)]
    params = [torch.rand(step) if p == "step" else p for p in params]
    found = gradients(core, x, states, params, torch.float64, sequences)
    assert walks, "it ran one step after the other"
    with one_after_the_other():
        walks.clear()
        expected = gradients(core, x, states, params, torch.float64, sequences)
        assert not walks
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["learned", "rotation"])
def test_gradients_in_float32(name):
    core, states, params = CORES[name]
    torch.manual_seed(0)
    x, states = torch.randn(STEPS, 4) + 0.8, [torch.rand(4) for _ in range(states)]
    found = gradients(core, x, states, params, torch.float32)
    for a, b in zip(found, gradients(core, x, states, params, torch.float64), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


def test_states_in_16_bits_pass_from_part_to_part_in_float32(walks):
    """Borders keep what a walk without them keeps in its registers."""
    torch.manual_seed(0)
    x, states = torch.randn(STEPS, 4).to(torch.bfloat16) + 0.8, [torch.rand(4).to(torch.bfloat16) for _ in range(2)]
    found = gradients(rotation, x, states, [], torch.bfloat16)
    assert walks
    with one_after_the_other():
        for a, b in zip(found, gradients(rotation, x, states, [], torch.bfloat16), strict=True):
            assert (a != b).float().mean() < 1e-3, "more than roundings of a few elements"


def test_the_choice_and_the_bits_do_not_depend_on_threads(walks):
    torch.manual_seed(0)
    x, params = torch.randn(20_001, 3) + 0.8, CORES["learned"][2]
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(gradients(learned, x, [torch.zeros(3)], params, torch.float32))
    finally:
        torch.set_num_threads(threads)
    assert len(walks) == 2 and all(map(torch.equal, *found))


def test_a_loss_on_the_first_steps_alone_of_states_that_grow(walks):
    """`A` overflows in later parts, and nothing times it is nothing."""

    def grows(x, v):
        v = v * 1.5 + x
        return v, v

    x = torch.zeros(STEPS, 2)
    found = gradients(grows, x, [torch.zeros(2)], [], torch.float32, only_first_steps=True)
    assert walks
    with one_after_the_other():
        for a, b in zip(found, gradients(grows, x, [torch.zeros(2)], [], torch.float32, only_first_steps=True), strict=True):
            assert b.isfinite().all() and not a[200:].any()
            torch.testing.assert_close(a, b)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(h):
        return (h > 0).to(h.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.1, 0.1)


def clipped(x, v):
    h = v * 0.5 + x
    s = Clipped.apply(h - 1.0)
    return s, h - s


def five(x, *v):
    return sum(v), *[0.5 * u + x for u in v]


@pytest.mark.parametrize("core, states, steps, step", [(clipped, 1, STEPS, 2), (five, 5, STEPS, 2), (lif, 1, 1000, 2), (lif, 1, STEPS, 5)])
def test_what_runs_one_step_after_the_other(walks, core, states, steps, step):
    """A backward that is not affine in cotangents, many states, few steps, many neurons."""
    gradients(core, torch.randn(steps, step), [torch.zeros(step)] * states, [], torch.float32)
    assert not walks


def leaky(x, v, k):
    v = v + (x - v) * k
    return torch.tanh(v), v


def state_space(x, u, v):
    u, v = 0.99 * (u * 0.8 - v * 0.6) + x, 0.99 * (u * 0.6 + v * 0.8)
    return (u > 1).to(x.dtype), u, v


@pytest.fixture
def forwards(monkeypatch):
    found = []
    call = parallel_time._Forward.__call__
    monkeypatch.setattr(parallel_time._Forward, "__call__", lambda self, *given: found.append(self.parts) or call(self, *given))
    return found


AFFINE = {"leaky": (leaky, 1, [torch.tensor([0.05])]), "state space": (state_space, 2, [])}


@pytest.mark.parametrize("name", AFFINE)
@pytest.mark.parametrize("steps", [2401, 2880])
@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_affine_states(forwards, name, steps, sequences, given):
    core, states, params = AFFINE[name]
    torch.manual_seed(0)
    x = torch.randn(steps, 3, dtype=torch.float64)
    params = [p.double().requires_grad_() for p in params]
    first = [torch.rand(3, dtype=torch.float64) if given else None for _ in range(states)]
    results = []
    for exact in (True, False):
        assert not forwards
        leaf = x.clone().requires_grad_()
        found = flexsn.scan(core, (leaf,), tuple(first), tuple(params), exact=exact, store_state_seqs=sequences)
        flat = [*found.outputs, *found.states]
        with torch.no_grad():
            alone = flexsn.scan(core, (leaf,), tuple(first), tuple(params), exact=exact, store_state_seqs=sequences)
        grads = torch.autograd.grad(
            [y for y in flat if y.requires_grad], [leaf, *params], [torch.ones_like(y) for y in flat if y.requires_grad]
        )
        results.append([*flat, *grads, *alone.outputs, *alone.states])
    assert len(forwards) == 2
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def squares(x, v):
    v = 0.1 * v * v + x
    return v, v


def divides(x, v):
    v = x / (v + 3.0)
    return v, v


def chooses(x, v):
    v = torch.where(v > 0, 0.5 * v, 0.25 * v) + x
    return v, v


@pytest.mark.parametrize("core", [lif, clipped, squares, divides, chooses])
def test_a_core_that_is_not_affine_runs_as_it_does(forwards, core):
    """Also where its backward is that of an affine one: the choice is made on the forward."""
    x = torch.randn(STEPS, 2).tanh()
    a, b = (flexsn.scan(core, (x,), (None,), exact=exact) for exact in (True, False))
    assert not forwards and all(map(torch.equal, [*a.outputs, *a.states], [*b.outputs, *b.states]))


def test_what_is_built_ahead(walks):
    x = torch.randn(STEPS, 2)
    with collected() as found:
        gradients(lambda x, v: lif(x, v), x, [torch.zeros(2)], [], torch.float32)
    assert not walks and sum(bool(plan.matrix) for plan, _ in found.values()) == 1


@pytest.mark.parametrize("around", [lambda: torch.device("meta"), torch.inference_mode, lambda: torch.autocast("cpu")])
def test_contexts_around_a_call_change_nothing(forwards, around):
    x = torch.randn(STEPS, 2)
    expected = flexsn.scan(leaky, (x,), (None,), (torch.tensor(0.05),), exact=False).outputs[0]
    k = torch.tensor(0.05)
    with around():
        found = flexsn.scan(leaky, (x,), (None,), (k,), exact=False).outputs[0]
    assert len(forwards) == 2 and torch.equal(found, expected)


def test_explain_says_how_time_is_walked():
    torch.manual_seed(0)
    x = torch.randn(STEPS, 2, requires_grad=True)
    said = str(flexsn.explain(lif, x, states=(None,)))
    assert said.count("walks 10 parts of time side by side, of 240 steps each") == 1  # the backward; its forward is exact
    assert "walks one step after the other: `" in str(flexsn.explain(clipped, x, states=(None,)))
    assert "side by side" not in str(flexsn.explain(lif, x[:100], states=(None,)))


def test_explain_says_where_exact_false_would_pay():
    def leaky_of_one(x, v):
        return leaky(x, v, 0.05)

    said = str(flexsn.explain(leaky_of_one, torch.randn(STEPS, 2), states=(None,)))
    assert re.search(r"`exact=False` would walk parts of time side by side: \d+\.\d times as fast here", said)
    for core, steps in ((lif, STEPS), (leaky_of_one, 100)):
        assert "would walk" not in str(flexsn.explain(core, torch.randn(steps, 2), states=(None,), measure=False))


def test_complex_states(forwards):
    """A diagonal state-space neuron, whose one complex state is two values."""
    pole = torch.tensor([0.9 + 0.3j, 0.8 - 0.5j])

    def diagonal(x, v):
        v = v * pole + x
        return v.real.relu(), v

    x = torch.randn(STEPS, 2)
    expected = flexsn.scan(diagonal, (x,), (None,))
    assert not forwards
    found = flexsn.scan(diagonal, (x,), (None,), exact=False)
    assert forwards
    for a, b in zip([*found.outputs, *found.states], [*expected.outputs, *expected.states], strict=True):
        torch.testing.assert_close(a, b)


def test_pieces_and_steps_of_modules(forwards):
    neuron = flexsn.FlexSN(state_space, num_states=2, exact=False)
    assert "10 parts of time" in str(flexsn.explain(neuron, torch.randn(STEPS, 2)))
    x = torch.randn(2 * STEPS, 2)
    with torch.no_grad():
        pieces = flexsn.scan(leaky, ([x[:STEPS], x[STEPS:]],), (None,), (torch.tensor(0.05),), exact=False)
        assert len(forwards) >= 2
        whole = flexsn.scan(leaky, (x,), (None,), (torch.tensor(0.05),))
    torch.testing.assert_close(torch.cat(pieces.outputs[0]), whole.outputs[0])


def test_modules_and_compiled_calls_take_it(forwards):
    neuron = flexsn.LeakyIntegrator(tau=20.0, exact=False)
    x = torch.randn(STEPS, 2)
    with torch.no_grad():
        expected = neuron(x)
        assert len(forwards) == 1
        neuron.reset()
        torch.testing.assert_close(torch.compile(neuron, fullgraph=True, backend="aot_eager")(x), expected)
    assert len(forwards) == 2


def test_vmap_takes_it(forwards, walks):
    x = torch.randn(5, STEPS, 2)

    def loss(x):
        return flexsn.scan(leaky, (x,), (None,), (torch.tensor(0.05),), exact=False).outputs[0].square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(x[:, :, :1])
    expected = torch.stack([torch.func.grad(loss)(part) for part in x[:, :, :1]])
    torch.testing.assert_close(found, expected)
    assert forwards and walks  # of one neuron; five of them walk in order


def test_exported_programs_take_it(forwards, tmp_path):
    neuron = flexsn.LeakyIntegrator(tau=20.0, exact=False, stateful=False)
    x = torch.randn(STEPS, 2)
    program = torch.export.export(neuron, (x,))
    torch.export.save(program, tmp_path / "neuron.pt2")
    forwards.clear()
    found = torch.export.load(tmp_path / "neuron.pt2").module()(x)
    assert len(forwards) == 1
    torch.testing.assert_close(found, neuron(x))
