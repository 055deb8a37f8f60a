"""`flexsn.lowlevel`: handles, and the operators that run the kernels of a handle."""

import copy
import gc
import inspect
import operator
import threading

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from flexsn import surrogate
from flexsn.errors import DoubleBackwardError, ForwardModeError, MissingGradientError
from flexsn.lowlevel import (
    FlexSNKernelHandle,
    attach_flexsn_handle_finalizer,
    build_inference_final_state_kernel,
    build_inference_kernel,
    build_training_kernels,
    flexsn_forward,
    flexsn_inductor_backward,
    flexsn_inductor_inference,
    flexsn_inductor_inference_final_state,
    flexsn_inductor_training,
    flexsn_inductor_training_final_state,
    flexsn_inference,
    flexsn_inference_final_state,
    get_flexsn_kernel_handle,
    register_flexsn_kernel_handle,
    release_active_flexsn_kernel_handle,
    release_flexsn_kernel_handle,
    retain_flexsn_kernel_handle,
    retain_owner_flexsn_kernel_handle,
)

ops = torch.ops.flexsn
FORWARD = {
    "inference": (flexsn_inductor_inference, ops.flexsn_inductor_inference),
    "inference_final_state": (flexsn_inductor_inference_final_state, ops.flexsn_inductor_inference_final_state),
    "training": (flexsn_inductor_training, ops.flexsn_inductor_training),
    "training_final_state": (flexsn_inductor_training_final_state, ops.flexsn_inductor_training_final_state),
}
TRAINING = pytest.mark.parametrize("kind", ["training", "training_final_state"])


def core(x1, x2, v, a):
    h = v * 0.875 + x1 - a
    s = surrogate.sigmoid(h - 1.0 - 0.5 * x2)
    return s, h > 0, h + x2, h * (1.0 - s), a * 0.75 + 0.25 * s + 0.125 * v * x2


OUTPUTS, STATES = 3, 2


@pytest.fixture(scope="module")
def kernels():
    """All that a handle may hold."""
    inference, inference_info = build_inference_kernel(core, 2, 2, 3)
    final, final_info = build_inference_final_state_kernel(core, 2, 2, 3)
    forward, backward, info = build_training_kernels(core, 2, 2, 3)
    return {
        "inference_kernel": inference, "inference_info": inference_info, "inference_final_state_kernel": final,
        "inference_final_state_info": final_info, "forward_kernel": forward, "backward_kernel": backward, "training_info": info,
    }  # fmt: skip


@pytest.fixture
def handle(kernels):
    number = register_flexsn_kernel_handle(**kernels)
    yield number
    release_flexsn_kernel_handle(number)


def operands(T=6, shape=(4, 3), grad=True):
    xs = [torch.randn(T, *shape) for _ in range(2)]
    vs = [torch.randn(*shape) for _ in range(2)]
    return [[t.requires_grad_(grad) for t in ts] for ts in (xs, vs)]


def loop(xs, vs):
    """Outputs, state sequences, final states."""
    outputs, sequences = [], []
    for t in range(xs[0].shape[0]):
        returned = core(*[x[t] for x in xs], *vs)
        outputs.append(returned[:OUTPUTS])
        vs = returned[OUTPUTS:]
        sequences.append(vs)
    return [torch.stack(o) for o in zip(*outputs, strict=True)], [torch.stack(s) for s in zip(*sequences, strict=True)], list(vs)


def counts(handle):
    entry = get_flexsn_kernel_handle(handle)
    return entry.owner_refs, entry.active_refs


# --- handles ------------------------------------------------------------------------------------------------------------------------------
class Closing:
    """A kernel that counts how often it was closed."""

    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


def test_fields_of_an_entry():
    assert [p.name for p in inspect.signature(FlexSNKernelHandle).parameters.values()] == [
        "inference_kernel", "inference_info", "inference_final_state_kernel", "inference_final_state_info", "forward_kernel",
        "backward_kernel", "training_info", "owner_refs", "active_refs",
    ]  # fmt: skip
    entry = FlexSNKernelHandle(*[None] * 7)
    assert (entry.owner_refs, entry.active_refs) == (1, 0)


def test_handles_count_up_and_are_never_used_again():
    first = register_flexsn_kernel_handle()
    assert first >= 1
    release_flexsn_kernel_handle(first)
    second = register_flexsn_kernel_handle(forward_kernel=None)
    assert second == first + 1
    release_flexsn_kernel_handle(second)


def test_the_last_reference_closes_every_kernel():
    kernels = [Closing() for _ in range(4)]
    names = ("inference_kernel", "inference_final_state_kernel", "forward_kernel", "backward_kernel")
    handle = register_flexsn_kernel_handle(**dict(zip(names, kernels, strict=True)))
    retain_flexsn_kernel_handle(handle)
    retain_owner_flexsn_kernel_handle(handle)
    assert counts(handle) == (2, 1)
    release_flexsn_kernel_handle(handle)
    release_flexsn_kernel_handle(handle)
    release_flexsn_kernel_handle(handle)
    assert counts(handle) == (0, 1) and not any(k.closed for k in kernels)
    release_active_flexsn_kernel_handle(handle)
    assert [k.closed for k in kernels] == [1] * 4
    for use in (retain_flexsn_kernel_handle, retain_owner_flexsn_kernel_handle, get_flexsn_kernel_handle):
        with pytest.raises(RuntimeError, match="no kernel handle"):
            use(handle)
    release_flexsn_kernel_handle(handle)
    release_active_flexsn_kernel_handle(handle)
    assert [k.closed for k in kernels] == [1] * 4


def test_counts_never_go_below_zero():
    handle = register_flexsn_kernel_handle()
    release_active_flexsn_kernel_handle(handle)
    assert counts(handle) == (1, 0)
    release_flexsn_kernel_handle(handle)


def test_a_kernel_in_two_places_is_closed_once_and_all_are_though_one_fails():
    class Failing(Closing):
        def close(self):
            super().close()
            raise OSError("stuck")

    shared, failing = Closing(), Failing()
    handle = register_flexsn_kernel_handle(inference_kernel=failing, forward_kernel=shared, backward_kernel=shared)
    with pytest.raises(OSError, match="stuck"):
        release_flexsn_kernel_handle(handle)
    assert (shared.closed, failing.closed) == (1, 1)


def test_kernels_are_closed_outside_the_lock():
    done = []

    class Waiting:
        def close(self):
            thread = threading.Thread(target=lambda: done.append(register_flexsn_kernel_handle()))
            thread.start()
            thread.join(10)
            done.append(thread.is_alive())

    release_flexsn_kernel_handle(register_flexsn_kernel_handle(forward_kernel=Waiting()))
    assert done[1:] == [False]
    release_flexsn_kernel_handle(done[0])


def test_what_a_handle_may_come_as():
    number = register_flexsn_kernel_handle()
    for form in (number, torch.tensor(number), torch.tensor([number]), float(number), str(number)):
        retain_flexsn_kernel_handle(form)
    assert counts(number) == (1, 5)
    for wrong in (None, [number], torch.tensor([1, 2]), "one", float("nan"), float("inf"), object()):
        for use in (retain_flexsn_kernel_handle, release_flexsn_kernel_handle, release_active_flexsn_kernel_handle):
            with pytest.raises(TypeError, match="handle"):
                use(wrong)
    for _ in range(5):
        release_active_flexsn_kernel_handle(number)
    release_flexsn_kernel_handle(number)


def test_finalizers_take_the_owner_reference_over():
    class Owner:
        pass

    kernel = Closing()
    handle = register_flexsn_kernel_handle(forward_kernel=kernel)
    owner = Owner()
    finalizer = attach_flexsn_handle_finalizer(owner, handle)
    assert counts(handle) == (1, 0) and finalizer.alive
    twin = copy.copy(owner)
    retain_owner_flexsn_kernel_handle(handle)
    attach_flexsn_handle_finalizer(twin, torch.tensor(handle))
    del owner
    gc.collect()
    assert counts(handle) == (1, 0) and not finalizer.alive and kernel.closed == 0
    del twin
    gc.collect()
    assert kernel.closed == 1
    with pytest.raises(RuntimeError):
        attach_flexsn_handle_finalizer(Owner(), handle)


def test_threads_count_right():
    kernel = Closing()
    handle = register_flexsn_kernel_handle(forward_kernel=kernel)

    def work():
        for _ in range(300):
            retain_flexsn_kernel_handle(handle)
            retain_owner_flexsn_kernel_handle(handle)
            release_active_flexsn_kernel_handle(handle)
            release_flexsn_kernel_handle(handle)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert counts(handle) == (1, 0) and kernel.closed == 0
    release_flexsn_kernel_handle(handle)
    assert kernel.closed == 1


# --- what the operators give ----------------------------------------------------------------------------------------------------------------
def test_schemas():
    for _, op in FORWARD.values():
        assert str(op.default._schema).endswith("(int handle, Tensor[] flat_args) -> Tensor[]")
        assert not op.default._schema.is_mutable


def test_inference(handle, kernels):
    xs, vs = operands(grad=False)
    got = flexsn_inductor_inference(torch.tensor([handle]), [*xs, *vs])
    want = flexsn_inference(kernels["inference_kernel"], kernels["inference_info"], *xs, *vs)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    got = ops.flexsn_inductor_inference_final_state(handle, [*xs, *vs])
    want = flexsn_inference_final_state(kernels["inference_final_state_kernel"], kernels["inference_final_state_info"], *xs, *vs)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_training_returns(handle, kernels):
    xs, vs = operands()
    info = kernels["training_info"]
    returns = flexsn_forward(kernels["forward_kernel"], info, *xs, *vs)
    got = flexsn_inductor_training(handle, [*xs, *vs])
    assert all(torch.equal(a, b) for a, b in zip(got, returns, strict=True))
    kept = [returns[i] for i in info.c2k_return_mapping if i >= OUTPUTS]
    want = [*returns[:OUTPUTS], *(s[-1] for s in returns[OUTPUTS : OUTPUTS + STATES]), *kept]
    got = flexsn_inductor_training_final_state(handle, [*xs, *vs])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("kind", FORWARD)
def test_results_are_contiguous_and_their_own(handle, kind):
    xs, vs = operands(grad=False)
    seen = {t.data_ptr() for t in xs + vs}
    for t in FORWARD[kind][0](handle, [xs[0].transpose(1, 2).contiguous().transpose(1, 2), xs[1], *vs]):
        assert t.is_contiguous() and t.data_ptr() not in seen
        seen.add(t.data_ptr())


@pytest.mark.parametrize("kind", FORWARD)
def test_initial_states_may_be_left_out(handle, kind):
    function, _ = FORWARD[kind]
    xs, vs = operands(grad=False)
    want = function(handle, [*xs, *(torch.zeros_like(v) for v in vs)])
    assert all(torch.equal(a, b) for a, b in zip(function(handle, xs), want, strict=True))
    for wrong in ([*xs, vs[0]], [xs[0]], [*xs, *vs, vs[0]], []):
        with pytest.raises(ValueError):
            function(handle, wrong)


@pytest.mark.parametrize("kind", FORWARD)
def test_missing_kernels_are_named(kernels, kind):
    xs, vs = operands(grad=False)
    bare = register_flexsn_kernel_handle(**{k: v for k, v in kernels.items() if "info" in k})
    with pytest.raises(RuntimeError, match="no inference" if "inference" in kind else "no forward kernel"):
        FORWARD[kind][0](bare, [*xs, *vs])
    with pytest.raises(RuntimeError, match="no kernel handle"):
        FORWARD[kind][0](1 << 40, [*xs, *vs])
    half = register_flexsn_kernel_handle(**(kernels | {"backward_kernel": None}))
    if "training" in kind:
        with pytest.raises(RuntimeError, match="no backward kernel"):
            FORWARD[kind][0](half, [*xs, *vs])
    with torch._subclasses.FakeTensorMode() as fake:  # needs the info alone
        given = [fake.from_tensor(t) for t in (*xs, *vs)]
        shapes = [(t.shape, t.dtype) for t in FORWARD[kind][0](bare, given)]
    full = register_flexsn_kernel_handle(**kernels)
    assert shapes == [(t.shape, t.dtype) for t in FORWARD[kind][0](full, [*xs, *vs])]
    for number in (bare, half, full):
        release_flexsn_kernel_handle(number)


# --- gradients ----------------------------------------------------------------------------------------------------------------------------------
@TRAINING
@pytest.mark.parametrize("absent", [(), (0,), (3,), (0, 2, 4), (2, 3, 4)])
def test_gradients(handle, kind, absent):
    xs, vs = operands()
    got = FORWARD[kind][0](handle, [*xs, *vs])
    outputs, sequences, finals = loop(xs, vs)
    want = outputs + (sequences if kind == "training" else finals)
    roots = [k for k in range(OUTPUTS + STATES) if k != 1 and k not in absent]
    cotangents = [torch.randn_like(want[k]) for k in roots]
    found = torch.autograd.grad([got[k] for k in roots], xs + vs, cotangents, allow_unused=True)
    for a, b in zip(found, torch.autograd.grad([want[k] for k in roots], xs + vs, cotangents), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@TRAINING
def test_without_initial_states_inputs_get_gradients(handle, kind):
    xs, _ = operands()
    got = FORWARD[kind][0](handle, xs)
    want = FORWARD[kind][0](handle, [*xs, *(torch.zeros(4, 3) for _ in range(2))])
    for a, b in zip(torch.autograd.grad(got[0].sum(), xs), torch.autograd.grad(want[0].sum(), xs), strict=True):
        assert torch.equal(a, b)


def test_backward(handle, kernels):
    xs, vs = operands(grad=False)
    info = kernels["training_info"]
    returns = flexsn_inductor_training(handle, [*xs, *vs])
    saved = [returns[i] for i in info.c2k_return_mapping]
    leaves = [t.clone().requires_grad_() for t in (*xs, *vs)]
    outputs, _, _ = loop(leaves[:2], leaves[2:])
    want = torch.autograd.grad(outputs[0].sum(), leaves)
    for templates in ([*xs, *vs], xs):
        got = flexsn_inductor_backward(handle, [torch.ones(6, 4, 3), None, None, None, None], saved, templates)
        assert len(got) == len(templates)
        for a, b in zip(got, want, strict=False):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError):
        flexsn_inductor_backward(handle, [None], saved, xs)
    assert not any(g.any() for g in flexsn_inductor_backward(handle, [None] * 5, saved, [*xs, *vs]))


@TRAINING
def test_saved_tensors_take_no_part_in_gradients(handle, kind):
    xs, vs = operands()
    got = FORWARD[kind][0](handle, [*xs, *vs])
    assert [t.requires_grad for t in got[: OUTPUTS + STATES]] == [True, False, True, True, True]
    assert got[OUTPUTS + STATES :] and not any(t.requires_grad for t in got[OUTPUTS + STATES :])


@TRAINING
def test_no_cotangent_no_launch(handle, kind, monkeypatch):
    """What the loss ignores costs nothing: no tensor of zeros is made for it."""
    xs, vs = operands()
    got = FORWARD[kind][0](handle, [*xs, *vs])
    given = []
    backward = get_flexsn_kernel_handle(handle).backward_kernel
    load = type(backward).load
    monkeypatch.setattr(
        type(backward), "load", lambda self, device, kinds, present=(): given.append(present) or load(self, device, kinds, present)
    )
    got[2].sum().backward()
    assert given == [("gy2",)]


INFERENCE = pytest.mark.parametrize("kind", ["inference", "inference_final_state"])


@INFERENCE
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # PyTorch's own
@pytest.mark.parametrize("compiler", [None, "aot_eager", "inductor"])
def test_a_gradient_through_inference_is_refused(handle, kind, compiler):
    """A gradient that would come out without its part through the kernel raises, through whatever result it is asked for."""
    xs, vs = operands()
    run = torch.compile(FORWARD[kind][0], fullgraph=True, backend=compiler) if compiler else FORWARD[kind][0]
    for leaf in (xs[0], vs[1]):
        got = run(handle, [*xs, *vs])
        for k in (0, 2, 3, 4):
            with pytest.raises(MissingGradientError, match=rf"(?s)kernel handle {handle}\b.*no gradient.*`flexsn_inductor_training`"):
                torch.autograd.grad(got[k].sum() + leaf.sum(), leaf, retain_graph=True)
        assert not got[1].requires_grad  # bool


@INFERENCE
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_inference_on_what_requires_grad(handle, kind, compiler):
    """Without a gradient through the results nothing is refused, and nothing recorded under `no_grad`."""
    xs, vs = operands()
    run = torch.compile(FORWARD[kind][0], fullgraph=True, backend=compiler) if compiler else FORWARD[kind][0]
    want = FORWARD[kind][0](handle, [t.detach() for t in (*xs, *vs)])
    got = run(handle, [*xs, *vs])
    (got[0].detach() * xs[0]).sum().backward()
    assert torch.equal(xs[0].grad, want[0])
    with torch.no_grad():
        plain = run(handle, [*xs, *vs])
    assert not any(t.requires_grad for t in plain)
    for a, b, c in zip(got, plain, want, strict=True):
        assert torch.equal(a, c) and torch.equal(b, c)


def test_a_gradient_through_the_backward_operator_is_refused(handle, kernels):
    """Templates lend their shapes alone; cotangents and saved tensors that require grad would lose it."""
    xs, vs = operands()
    with torch.no_grad():
        returns = flexsn_inductor_training(handle, [*xs, *vs])
    saved = [returns[i] for i in kernels["training_info"].c2k_return_mapping]
    row = torch.ones(6, 4, 3)
    got = flexsn_inductor_backward(handle, [row, None, None, None, None], saved, [*xs, *vs])
    assert not any(g.requires_grad for g in got)
    got = flexsn_inductor_backward(handle, [row.requires_grad_(), None, None, None, None], saved, [*xs, *vs])
    with pytest.raises(MissingGradientError, match=f"kernel handle {handle}"):
        (got[0].sum() + row.sum()).backward()


@TRAINING
def test_second_derivatives_are_refused(handle, kind):
    xs, vs = operands()
    got = FORWARD[kind][0](handle, [*xs, *vs])
    with pytest.raises(DoubleBackwardError):
        torch.autograd.grad(got[0].sum(), xs, create_graph=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's own, of its first `jvp`
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kind", list(FORWARD))
def test_forward_mode_is_refused(handle, kind, requires_grad):
    xs, vs = operands(grad=requires_grad)
    for run in FORWARD[kind]:
        with pytest.raises(ForwardModeError, match=f"kernel handle {handle}"):
            torch.func.jvp(lambda x, run=run: run(handle, [x, xs[1], *vs])[0], (xs[0],), (torch.ones_like(xs[0]),))
        with forward_ad.dual_level(), pytest.raises(ForwardModeError, match=f"kernel handle {handle}"):
            run(handle, [xs[0], xs[1], forward_ad.make_dual(vs[0], vs[1]), vs[1]])
    with forward_ad.dual_level():  # without a tangent
        FORWARD[kind][0](handle, [*xs, *vs])


@pytest.mark.parametrize("kind", list(FORWARD))
def test_transforms_are_refused_and_constants_pass(handle, kind):
    (x, *xs), vs = operands(grad=False)
    run = FORWARD[kind][0]
    error = (RuntimeError, r"torch\.func\.grad") if kind.startswith("training") else (MissingGradientError, "has no gradient")
    with pytest.raises(error[0], match=error[1]):
        torch.func.grad(lambda x: run(handle, [x, *xs, *vs])[0].sum())(x)
    with pytest.raises(RuntimeError, match=r"torch\.func\.vmap"):
        torch.vmap(lambda x: run(handle, [x, *xs, *vs])[0])(x[None])
    expected = run(handle, [x, *xs, *vs])[0]
    assert torch.equal(torch.func.grad(lambda y: (y * run(handle, [x, *xs, *vs])[0]).sum())(torch.ones_like(x)), expected)


@TRAINING
def test_no_steps(handle, kind):
    xs, vs = operands(T=0)
    got = FORWARD[kind][0](handle, [*xs, *vs])
    assert all(t.shape == (0, 4, 3) for t in got[:OUTPUTS])
    if kind == "training":
        assert all(t.shape == (0, 4, 3) for t in got)
        roots, cotangents = got[3:5], [torch.zeros(0, 4, 3)] * 2
        want = [torch.zeros(0, 4, 3)] * 2 + [torch.zeros(4, 3)] * 2
    else:
        assert all(torch.equal(a, b) for a, b in zip(got[3:5], vs, strict=True))
        roots, cotangents = got[3:5], [torch.randn(4, 3) for _ in range(2)]
        want = [torch.zeros(0, 4, 3)] * 2 + cotangents
    for a, b in zip(torch.autograd.grad(roots, xs + vs, cotangents), want, strict=True):
        assert torch.equal(a, b)


@TRAINING
def test_a_recorded_graph_holds_the_kernels(kernels, kind):
    class Owner:
        pass

    closing = Closing()
    handle = register_flexsn_kernel_handle(**(kernels | {"inference_kernel": closing}))
    owner = Owner()
    attach_flexsn_handle_finalizer(owner, handle)
    xs, vs = operands()
    got = FORWARD[kind][0](handle, [*xs, *vs])
    assert counts(handle) == (1, 1)
    loss = got[0].sum() + got[3].sum()
    del owner, got
    gc.collect()
    assert counts(handle) == (0, 1)
    first = torch.autograd.grad(loss, xs + vs, retain_graph=True)
    second = torch.autograd.grad(loss, xs + vs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and closing.closed == 0
    del loss
    gc.collect()
    assert closing.closed == 1
    with pytest.raises(RuntimeError, match="no kernel handle"):
        get_flexsn_kernel_handle(handle)


@TRAINING
def test_nothing_is_held_where_nothing_is_recorded(handle, kind):
    xs, vs = operands()
    with torch.no_grad():
        kept = FORWARD[kind][0](handle, [*xs, *vs])
    assert counts(handle) == (1, 0) and not kept[0].requires_grad


def test_states_of_integers_get_no_gradient():
    def counting(x, n):
        return x * n, n + 1

    examples = [torch.zeros(3), torch.zeros(3, dtype=torch.int64)]
    forward, backward, info = build_training_kernels(counting, 1, 1, 1, examples)
    handle = register_flexsn_kernel_handle(forward_kernel=forward, backward_kernel=backward, training_info=info)
    x, n = torch.randn(4, 3, requires_grad=True), torch.arange(3)
    got = flexsn_inductor_training(handle, [x, n])
    got[0].sum().backward()
    assert torch.equal(x.grad, torch.stack([n + t for t in range(4)]).float())
    release_flexsn_kernel_handle(handle)


# --- PyTorch's own checks ------------------------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch's own, in `opcheck` of 2.14
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("kind", FORWARD)
def test_opcheck(handle, kind, states):
    xs, vs = operands(grad=kind.startswith("training"))  # inference refuses the gradients that the check asks for
    result = torch.library.opcheck(FORWARD[kind][1].default, (handle, [*xs, *(vs if states else [])]))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch's own, in `opcheck` of 2.14
@pytest.mark.parametrize("final", [True, False])
def test_opcheck_of_the_backward(handle, kernels, final):
    xs, vs = operands()
    info = kernels["training_info"]
    with torch.no_grad():
        returns = flexsn_inductor_training(handle, [*xs, *vs])
    saved = [returns[i] for i in info.c2k_return_mapping]
    rows = [torch.randn(4, 3) if final else torch.randn(6, 4, 3), None]
    args = [torch.randn(6, 4, 3), None, None, *rows], saved, [*xs, *vs]
    calls = [(ops.handle_backward.default, (handle, final, *args))]
    calls += [] if final else [(ops.flexsn_inductor_backward.default, (handle, *args))]
    for op, given in calls:
        assert set(torch.library.opcheck(op, given).values()) == {"SUCCESS"}


@pytest.mark.parametrize("kind", list(FORWARD))
def test_a_trace_holds_one_operator(handle, kind):
    xs, vs = operands(grad=False)
    traced = make_fx(lambda *args: FORWARD[kind][0](handle, list(args)))(*xs, *vs)
    targets = {n.target for n in traced.graph.nodes if n.op == "call_function"}
    assert targets - {operator.getitem} == {ops.handle_forward.default}
    want = FORWARD[kind][0](handle, [*xs, *vs])
    assert all(torch.equal(a, b) for a, b in zip(traced(*xs, *vs), want, strict=True))


@TRAINING
def test_what_is_left_of_a_trace_has_no_gradient(handle, kind):
    """The formula of autograd is around the operator: without it a gradient is refused, and never zeros."""
    xs, vs = operands()
    with pytest.raises(MissingGradientError, match=f"kernel handle {handle}"):
        ops.handle_forward(handle, kind, [*xs, *vs])


@TRAINING
def test_opaque_to_the_compiler(handle, kind):
    xs, vs = operands()

    def loss(*args):
        got = FORWARD[kind][0](handle, list(args))
        return (got[0] * 2).sum() + got[3].sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(loss(*xs, *vs), xs + vs)
    for a, b in zip(torch.autograd.grad(compiled(*xs, *vs), xs + vs), want, strict=True):
        torch.testing.assert_close(a, b)
