"""`flexsn.scan`: derivatives, what is computed and what is not, autograd's own rules, programs and threads."""

import gc
import itertools
import threading
import warnings
import weakref

import pytest
import torch
from cores import adlif, leaky, lif
from helpers import check, evaluate, on_cpu

import flexsn
from flexsn._ir.roles import Kind
from flexsn._operator import call as run
from flexsn._runtime.launch import Launch
from flexsn.errors import FallbackWarning

f64 = torch.float64


def leaves(*shapes):
    return [torch.randn(s, dtype=f64, requires_grad=True) for s in shapes]


# --- gradcheck ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sequences", [pytest.param(False, marks=pytest.mark.slow), True], ids=["finals", "sequences"])
@pytest.mark.parametrize("T", [1, 4, 18])
def test_gradcheck(T, sequences):
    scale = torch.tensor(0.8, dtype=f64, requires_grad=True)

    def smooth(x, z, v, w, a, b):
        v = torch.tanh(v * a * scale + x)
        w = w * torch.sigmoid(b) + v * z
        return v * w, torch.exp(-w * w) + x, v, w

    def run_it(scale_, x, z, v, w, a, b):
        nonlocal scale
        scale = scale_
        result = flexsn.scan(smooth, [x, z], [v, w], [a, b], store_state_seqs=sequences)
        return (*result.outputs, *result.states)

    operands = leaves((), (T, 2, 3), (T, 3), (2, 3), (3,), (2, 1), ())
    assert torch.autograd.gradcheck(run_it, operands)


def test_gradcheck_through_two_calls():
    """The final states of one call are the initial states of the next."""

    def run_it(x, v, decay):
        first = flexsn.scan(leaky, [x], [v], [decay])
        second = flexsn.scan(leaky, [x.flip(0)], first.states, [decay], store_state_seqs=True)
        return first.outputs[0], *second.outputs, *second.states

    assert torch.autograd.gradcheck(run_it, leaves((3, 4), (4,), (4,)))


# --- only what is needed ------------------------------------------------------------------------------------------------------
@pytest.fixture
def backward_calls(monkeypatch):
    """What every backward kernel was asked for: (wanted roles, wanted statics, cotangents)."""
    seen = []
    original = run.Call.backward

    def spy(call, back, saved, cotangents, order):
        wanted = [f"g{role}" for role, place in zip(call.roles, back.places, strict=True) if place >= 0]
        statics = [False] * len(call.statics) if back.epilogue is None else [key is not None for key, _ in back.epilogue.results]
        given = sorted([f"g{role}" for role, grad in zip(call.results, cotangents, strict=True) if grad is not None])
        seen.append((wanted, tuple(statics), given))
        return original(call, back, saved, cotangents, order)

    monkeypatch.setattr(run.Call, "backward", spy)
    return seen


def test_no_gradient_for_what_does_not_require_it(backward_calls):
    x, v = torch.randn(5, 4), torch.randn(4)
    tau, v_th = torch.tensor(2.0), torch.tensor(0.5)
    cases = {"x": (["gx0"], (False, False)), "v": (["gv0"], (False, False)), "tau": ([], (True, False)), "v_th": ([], (False, True))}
    for name, (roles, statics) in cases.items():
        operands = {"x": x.clone(), "v": v.clone(), "tau": tau.clone(), "v_th": v_th.clone()}
        operands[name].requires_grad_()
        flexsn.scan(lif, [operands["x"]], [operands["v"]], [operands["tau"], operands["v_th"]]).outputs[0].sum().backward()
        assert {n for n, t in operands.items() if t.grad is not None} == {name}
        wanted, wanted_statics, cotangents = backward_calls.pop()
        assert (wanted, wanted_statics, cotangents) == (roles, statics, ["gy0"])
        want = {n: t.detach().clone().requires_grad_(n == name) for n, t in operands.items()}
        flexsn.scan(lif, [want["x"]], [want["v"]], [want["tau"], want["v_th"]], backend="torch").outputs[0].sum().backward()
        torch.testing.assert_close(operands[name].grad, want[name].grad)


def test_only_the_asked_gradient_of_autograd_grad(backward_calls):
    x, v, decay = leaves((5, 4), (4,), ())
    y = flexsn.scan(leaky, [x], [v], [decay]).outputs[0].sum()
    torch.autograd.grad(y, [v], retain_graph=True)
    torch.autograd.grad(y, [decay])
    assert "gv0" in backward_calls[0][0]
    assert backward_calls[1][1] == (True,)


def test_a_kernel_writes_only_what_is_wanted():
    """Plans: the backward for the input alone has no array for states' or params' gradients."""
    from flexsn._program.cache import PROGRAMS

    x = torch.randn(5, 4, requires_grad=True)
    v = torch.randn(4)

    def fresh(x, v, tau):
        v = v + (x - v) * tau
        return v * v, v

    flexsn.scan(fresh, [x], [v], [torch.tensor(0.5)]).outputs[0].sum().backward()
    program = next(p for p, _ in reversed(PROGRAMS.exact.values()) if p.sig.core == "fresh")
    plans = [k.plan for k in program._kernels.values() if k.plan.direction == "backward"]
    assert [[a.role for a in p.writes] for p in plans] == [["gx0"]]


def test_nothing_requires_grad_nothing_saved(monkeypatch):
    saves, launched = [], Launch.run

    def spied(launch, *given, **options):
        saves.append(any(role.kind is Kind.CHECKPOINT for role in launch.places))
        return launched(launch, *given, **options)

    monkeypatch.setattr(Launch, "run", spied)
    x, v, decay = torch.randn(50, 4), torch.randn(4), torch.tensor(0.5)
    y = flexsn.scan(leaky, [x], [v], [decay]).outputs[0]
    assert not y.requires_grad and saves == [False]
    with torch.no_grad():
        y = flexsn.scan(leaky, [x.requires_grad_()], [v], [decay]).outputs[0]
    assert not y.requires_grad and saves == [False, False]
    with torch.inference_mode():
        assert not flexsn.scan(leaky, [x], [v], [decay]).outputs[0].requires_grad
    assert flexsn.scan(leaky, [x], [v], [decay]).outputs[0].requires_grad and saves[-1] is True


def test_cotangents_of_zero_outputs_are_not_needed():
    x, v, decay = leaves((5, 4), (4,), ())
    result = flexsn.scan(leaky, [x], [v], [decay], store_state_seqs=True)
    grads = torch.autograd.grad(result.states[0][2].sum(), [x, v, decay], retain_graph=True)
    assert not grads[0][3:].any() and grads[0][:3].all()
    both = torch.autograd.grad(result.states[0].sum() + result.outputs[0].sum(), [x])
    assert both[0].all()


# --- results that are not differentiable -----------------------------------------------------------------------------------------
def test_hard_threshold_has_no_gradient():
    def hard(x, v):
        v = 0.5 * v + x
        s = (v > 0.5).to(v.dtype)
        return s, v > 0.5, v.to(torch.int32), v

    x, v = leaves((5, 4), (4,))
    result = flexsn.scan(hard, [x], [v], store_state_seqs=True)
    want = flexsn.scan(hard, [x], [v], backend="torch", store_state_seqs=True)
    assert [t.requires_grad for t in (*result.outputs, *result.states)] == [False, False, False, True]
    assert [t.requires_grad for t in (*want.outputs, *want.states)] == [False, False, False, True]
    assert [t.dtype for t in result.outputs] == [t.dtype for t in want.outputs]
    check(hard, [x], [v], sequences=True)


def test_state_reset_by_a_hard_threshold():
    def hard_reset(x, v):
        v = 0.5 * v + x
        s = (v > 0.5).to(v.dtype)
        return s, v * (1 - s)

    check(hard_reset, [torch.randn(20, 65, dtype=f64)], [torch.randn(65, dtype=f64)], sequences=True)
    check(hard_reset, [torch.randn(20, 65, dtype=f64)], [torch.randn(65, dtype=f64)])


def test_no_differentiable_result_at_all():
    x = torch.randn(5, 4, requires_grad=True)
    result = flexsn.scan(lambda x, n: (x > 0, n + (x > 0)), [x], [torch.zeros(4, dtype=torch.int64)])
    assert not result.outputs[0].requires_grad and not result.states[0].requires_grad
    assert torch.equal(result.states[0], (x > 0).sum(0))


GAIN = torch.tensor(0.5, requires_grad=True)
FLOWS = {  # inputs, states, core
    "a gain behind a filter": (1, 1, lambda x, v: (GAIN * (0.9 * v + x), 0.9 * v + x)),
    "a counter": (1, 1, lambda x, n: (x * 2 * (n < 50), n + 1)),
    "two apart": (2, 1, lambda x, y, v: (x * 1.0, y * v, v + 1)),
    "changing places": (1, 2, lambda x, a, b: (a * 1.0, b * 1.0, b, a)),
    "a delay": (1, 3, lambda x, a, b, c: (c * 1.0, x + 0, a + 0, b + 0)),
    "identity": (1, 1, lambda x, v: (v, x)),
    "detached": (1, 2, lambda x, v, u: (v + u, v.detach() + x, u.detach() * 0.5)),
    "rounded": (1, 1, lambda x, v: ((v + x).round(), (v + x).round())),
    "spikes": (1, 1, lambda x, v: (flexsn.surrogate.atan(v + x - 1), (v + x).sign())),
    "a state of a param": (1, 1, lambda x, v: (v * 0.5, GAIN * 1.0 + 0 * v.detach())),
}


@pytest.mark.parametrize("name", FLOWS)
def test_results_require_grad_where_the_eager_loop_s_do(name):
    """What no operand that requires grad flows into does not."""
    inputs, states, core = FLOWS[name]

    def flags(backend, T, needs, absent, sequences):
        xs = [torch.rand(T, 4, requires_grad=need) for need in needs[:inputs]]
        vs = [None if gone else torch.rand(4, requires_grad=need) for need, gone in zip(needs[inputs:], absent, strict=True)]
        found = flexsn.scan(core, xs, vs, backend=backend, store_state_seqs=sequences)
        return [t.requires_grad for t in (*found.outputs, *found.states)]

    either = [False, True]
    masks = itertools.product(either, repeat=inputs + states), itertools.product(either, repeat=states)
    for call in itertools.product([1, 2, 6], *masks, either):
        want = flags("torch", *call)
        assert flags("auto", *call) == want, call
        assert flags("auto", *call) == want, call  # now through the door
        if call[0] == 6 and not any(call[2]):
            assert flags("hop", *call) == want, call


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of a module that Inductor imports
@pytest.mark.parametrize("how", ["eager", "compiled", "dynamic"])
@pytest.mark.parametrize("name", ["a gain behind a filter", "a counter"])
def test_carried_states_without_gradients_belong_to_no_graph(name, how):
    neuron = flexsn.FlexSN(FLOWS[name][2], num_states=1, strict=True)
    call = neuron if how == "eager" else torch.compile(neuron, fullgraph=True, dynamic=how == "dynamic")
    for _ in range(3):
        x = torch.rand(6, 4, requires_grad=name == "a counter")
        call(x).sum().backward()
        assert not neuron.states[0].requires_grad


# --- graphs ------------------------------------------------------------------------------------------------------------------------
def test_retained_graph_is_walked_twice():
    x, v, decay = leaves((20, 4), (4,), ())
    y = flexsn.scan(leaky, [x], [v], [decay]).outputs[0].sum()
    first = torch.autograd.grad(y, [x, v, decay], retain_graph=True)
    second = torch.autograd.grad(y, [x, v, decay])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, [x])


@pytest.mark.parametrize("which", ["x", "v", "decay"])
def test_in_place_change_between_forward_and_backward(which):
    operands = {"x": torch.randn(5, 4, dtype=f64), "v": torch.randn(4, dtype=f64), "decay": torch.tensor(0.5, dtype=f64)}
    grad = torch.ones((), dtype=f64, requires_grad=True)
    y = flexsn.scan(leaky, [operands["x"] * 1 if which != "x" else operands["x"]], [operands["v"]], [operands["decay"]])
    assert not y.outputs[0].requires_grad
    other = {n: (t if n == which else t * grad) for n, t in operands.items()}
    y = flexsn.scan(leaky, [other["x"]], [other["v"]], [other["decay"]]).outputs[0].sum()
    operands[which].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_in_place_change_of_a_captured_tensor():
    w = torch.tensor(0.5, dtype=f64)

    def captured(x, v):
        v = v * w + x
        return v * v, v

    (x,) = leaves((5, 4))
    y = flexsn.scan(captured, [x], [None]).outputs[0].sum()
    w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_in_place_change_of_results_is_safe():
    x, v, decay = leaves((20, 4), (4,), ())
    result = flexsn.scan(leaky, [x], [v], [decay])
    want = torch.autograd.grad(result.outputs[0].sum(), [x], retain_graph=True)[0]
    y = result.outputs[0]
    (y * 1).mul_(3).sum()
    y.detach().zero_()
    torch.testing.assert_close(torch.autograd.grad(result.outputs[0].sum(), [x])[0], want)


def test_nothing_is_kept_alive():
    x, v, decay = leaves((20, 4), (4,), ())
    y = flexsn.scan(leaky, [x], [v], [decay]).outputs[0]
    alive = weakref.ref(x), weakref.ref(y)
    del x, v, decay, y
    gc.collect()
    assert [r() for r in alive] == [None, None]


def test_empty_sequences_and_empty_neurons():
    for T, shape in ((0, (4,)), (5, (0,)), (0, (0,)), (5, (3, 0))):
        x, v = torch.randn(T, *shape, requires_grad=True), torch.randn(shape, requires_grad=True)
        decay = torch.tensor(0.5, requires_grad=True)
        for sequences in (False, True):
            result = flexsn.scan(leaky, [x], [v], [decay], store_state_seqs=sequences)
            assert result.outputs[0].shape == (T, *shape)
            assert result.states[0].shape == ((T, *shape) if sequences else shape)
            grads = torch.autograd.grad(
                result.outputs[0].sum() + result.states[0].sum(), [x, v, decay], allow_unused=True, materialize_grads=True
            )
            assert [g.shape for g in grads] == [x.shape, v.shape, decay.shape] and grads[2] == 0
            if T == 0 and not sequences:
                assert torch.equal(result.states[0], v) and torch.equal(grads[1], torch.ones_like(v))


def test_final_state_alone_gives_gradients():
    xs, vs = [torch.randn(20, 6, dtype=f64), torch.randn(20, 6, dtype=f64)], [torch.randn(6, dtype=f64), None]
    ps = [torch.tensor(0.9, dtype=f64), torch.tensor(0.5, dtype=f64)]
    for name in ("final 0", "final 1"):
        _, grads = check(adlif, xs, vs, ps, loss=lambda n, name=name: n == name)
        assert grads["x1"].any() and grads["beta"].any()


def test_loss_scales_with_tensor_hooks():
    x, v, decay = leaves((5, 4), (4,), ())
    seen = []
    result = flexsn.scan(leaky, [x], [v], [decay])
    result.outputs[0].register_hook(lambda g: seen.append(g.shape) or g * 2)
    (result.outputs[0].sum()).backward()
    want = torch.autograd.grad(2 * flexsn.scan(leaky, [x], [v], [decay], backend="torch").outputs[0].sum(), [x])[0]
    torch.testing.assert_close(x.grad, want)
    assert seen == [(5, 4)]


def test_activation_checkpointing_and_anomaly_mode():
    from torch.utils.checkpoint import checkpoint

    x, v, decay = leaves((5, 4), (4,), ())
    plain = flexsn.scan(leaky, [x], [v], [decay]).outputs[0]
    want = torch.autograd.grad(plain.sum(), [x, decay])
    again = checkpoint(lambda x, d: flexsn.scan(leaky, [x], [v], [d]).outputs[0], x, decay, use_reentrant=False)
    got = torch.autograd.grad(again.sum(), [x, decay])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with torch.autograd.detect_anomaly():
            flexsn.scan(leaky, [x], [v], [decay]).outputs[0].sum().backward()


def test_saved_tensors_hooks_see_everything():
    x, v, decay = leaves((40, 4), (4,), ())
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
        y = flexsn.scan(leaky, [x], [v], [decay]).outputs[0]
    want = torch.autograd.grad(flexsn.scan(leaky, [x], [v], [decay], backend="torch").outputs[0].sum(), [x])[0]
    torch.testing.assert_close(torch.autograd.grad(y.sum(), [x])[0], want)
    assert (40, 4) in packed


# --- programs ---------------------------------------------------------------------------------------------------------------------------
@on_cpu
def test_new_sizes_neither_capture_nor_build(counts):
    def sized(x, v, decay):
        v = v * decay + x
        return v * v, v

    def go(T, *shape):
        x, v, decay = torch.randn(T, *shape, requires_grad=True), torch.randn(shape), torch.tensor(0.5, requires_grad=True)
        flexsn.scan(sized, [x], [v], [decay]).outputs[0].sum().backward()

    go(5, 6, 7)
    assert (counts.programs, counts.builds) == (1, 2)
    for T, shape in ((9, (6, 7)), (1, (8, 7)), (0, (6, 9)), (33, (65, 129)), (5, (0, 3))):
        go(T, *shape)
    assert counts.builds == 2
    assert counts.programs == 1


@on_cpu
def test_lambdas_made_anew_share_a_program(counts):
    x = torch.randn(3, 4)
    for _ in range(5):
        flexsn.scan(lambda x, v: (x * 1.25 + v, v * 0.625 + x), [x], [None])
    assert (counts.programs, counts.builds) == (1, 1)


def test_equal_cores_of_different_text_do_not_mix():
    x = torch.ones(2, 3)
    results = [flexsn.scan(core, [x], [None]).outputs[0] for core in (lambda x, v: (x + 1, v), lambda x, v: (x + 2, v))]
    assert torch.equal(results[1] - results[0], torch.ones(2, 3))


def test_a_core_that_reads_shapes_is_captured_per_size():
    def scaled(x, v):
        v = v + x / x.shape[-1]
        return v * x.numel(), v

    for shape in ((4, 5), (4, 6), (3, 5), (7, 9), (4, 5)):
        check(scaled, [torch.randn(3, *shape, dtype=f64)], [torch.randn(shape, dtype=f64)])


@on_cpu
def test_threads_compile_one_core_once(counts):
    def shared(x, v, decay):
        v = v * decay + x * 0.3125
        return v * v, v

    x, v, decay = torch.randn(20, 65), torch.randn(65), torch.tensor(0.5)
    barrier, results, errors = threading.Barrier(8), [], []

    def work():
        try:
            barrier.wait()
            leaf = x.clone().requires_grad_()
            y = flexsn.scan(shared, [leaf], [v], [decay]).outputs[0]
            results.append((y.detach(), torch.autograd.grad(y.sum(), [leaf])[0]))
        except Exception as error:  # shown below: a thread's exception does not fail a test by itself
            errors.append(error)

    workers = [threading.Thread(target=work) for _ in range(8)]
    [w.start() for w in workers]
    [w.join(120) for w in workers]
    assert errors == [] and len(results) == 8
    assert (counts.programs, counts.builds) == (1, 2)
    assert all(torch.equal(a, b) for r in results for a, b in zip(r, results[0], strict=True))


def test_the_number_of_threads_does_not_change_a_bit(threads):
    xs, v, ps = [torch.randn(20, 3, 7001)], torch.randn(3, 7001), [torch.tensor(1.75), torch.randn(3, 1).abs()]
    found = []
    for n in (1, 2, 3):
        threads(n)
        found.append(evaluate(lif, xs, [v], ps, backend="auto", sequences=True))
    for values, grads in found[1:]:
        assert all(torch.equal(values[n], found[0][0][n]) for n in values)
        assert all(torch.equal(grads[n], found[0][1][n]) for n in ("x", "v"))


def test_auto_is_the_fused_kernel_and_does_not_warn(counts):
    def quiet(x, v):
        return x * 0.8125 + v, v * 0.5

    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        flexsn.scan(quiet, [torch.randn(3, 4)], [None], strict=True)
        flexsn.scan(quiet, [torch.randn(3, 4)], [None])
    assert counts.programs == 1


def test_result_is_a_pair_of_tuples():
    result = flexsn.scan(leaky, [torch.randn(3, 4)], [None], [torch.tensor(0.5)])
    outputs, states = result
    assert isinstance(outputs, tuple) and isinstance(states, tuple) and result.outputs is outputs and result.states is states
    assert isinstance(result, flexsn.ScanResult)
    assert flexsn.scan(lambda x: x * 2, [torch.ones(3, 4)]).states == ()
