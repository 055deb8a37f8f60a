"""`flexsn.lowlevel`: multi-step kernels from a source and from a core, against a plain loop over the core."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flexsn import surrogate
from flexsn._runtime.triton import kernel as launch_triton
from flexsn.errors import BackendError, StateMismatchError, UnsupportedOpError
from flexsn.lowlevel import (
    FlexSNInfo,
    build_inference_final_state_kernel,
    build_inference_kernel,
    build_training_kernels,
    extract_info,
    flexsn_backward,
    flexsn_backward_ncl_bucket,
    flexsn_forward,
    flexsn_inference,
    flexsn_inference_final_state,
    generate_forward_and_backward_graph,
    generate_inference_graph,
    generate_triton_code_str,
    get_flexsn_backward_kernel,
    get_flexsn_forward_kernel,
    get_flexsn_inference_final_state_kernel,
    get_flexsn_inference_kernel,
)

SLOW = pytest.mark.slow  # a compiler run each
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def lif(x, v):
    h = v + (x - v) / 2.0
    s = surrogate.atan(h - 1.0)
    return s, h * (1.0 - s)


def plif(x, v):
    """A sigmoid surrogate, a detached reset."""
    h = v + (x - v) * 0.25
    s = surrogate.sigmoid(h - 0.5)
    return s, h - s.detach() * 0.5


def adaptive(x1, x2, v, a):
    """2 inputs, 2 states, 3 outputs, of which one is a hard threshold."""
    h = v * 0.875 + x1 - a
    s = surrogate.fast_sigmoid(h - 1.0 - 0.5 * x2)
    return s, h > 0, h + x2, h * (1.0 - s), a * 0.75 + 0.25 * s + 0.125 * v * x2


def stateless(x):
    return torch.tanh(x) * x


CORES = {"lif": (lif, 1, 1, 1), "plif": (plif, 1, 1, 1), "adaptive": (adaptive, 2, 2, 3), "stateless": (stateless, 1, 0, 1)}
QUICK = [*((name, torch.float32) for name in CORES), ("plif", torch.float16), ("stateless", torch.float16)]
ROWS = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}", marks=() if (name, dtype) in QUICK else SLOW)
        for name in CORES
        for dtype in TOLERANCE
    ],
)


def loop(core, inputs, states, num_outputs):
    """Outputs, state sequences, final states."""
    outputs, sequences = [], []
    for t in range(inputs[0].shape[0]):
        returned = core(*[x[t] for x in inputs], *states)
        returned = (returned,) if isinstance(returned, torch.Tensor) else returned
        outputs.append(returned[:num_outputs])
        states = returned[num_outputs:]
        sequences.append(states)
    return [torch.stack(o) for o in zip(*outputs, strict=True)], [torch.stack(s) for s in zip(*sequences, strict=True)], list(states)


def operands(name, T=7, shape=(3, 5), dtype=torch.float32):
    _, inputs, states, _ = CORES[name]
    xs = [(torch.randn(T, *shape, dtype=torch.float64) * 1.5).to(dtype) for _ in range(inputs)]
    return xs, [torch.randn(shape, dtype=torch.float64).to(dtype) for _ in range(states)]


def from_core(name, kind, dtype=torch.float32):
    core, *counts = CORES[name]
    examples = [torch.zeros(2, 3, dtype=dtype) for _ in range(counts[0] + counts[1])]
    if kind == "training":
        return build_training_kernels(core, *counts, examples)
    return {"inference": build_inference_kernel, "final": build_inference_final_state_kernel}[kind](core, *counts, examples)


def from_source(name, kind, dtype=torch.float32):
    core, inputs, states, outputs = CORES[name]
    examples = [torch.zeros(2, 3, dtype=dtype) for _ in range(inputs + states)]
    if kind != "training":
        graph = generate_inference_graph(core, examples)
        info = extract_info(graph, inputs, states, outputs)
        get = {"inference": get_flexsn_inference_kernel, "final": get_flexsn_inference_final_state_kernel}[kind]
        return get(*generate_triton_code_str(graph, name), info), info
    forward, backward = generate_forward_and_backward_graph(core, examples)
    info = extract_info(forward, inputs, states, outputs)
    forward_kernel = get_flexsn_forward_kernel(*generate_triton_code_str(forward, name), info)
    return forward_kernel, get_flexsn_backward_kernel(*generate_triton_code_str(backward, name), info), info


MAKERS = pytest.mark.parametrize("make", [from_core, from_source])


def assert_fresh(results, arguments):
    """Contiguous, and no memory in common."""
    seen = {a.untyped_storage().data_ptr() for a in arguments}
    for t in results:
        assert t.is_contiguous() and not t.requires_grad
        if t.numel():
            assert t.untyped_storage().data_ptr() not in seen
            seen.add(t.untyped_storage().data_ptr())


# --- inference ------------------------------------------------------------------------------------------------------------------------
@MAKERS
@ROWS
def test_inference(make, name, dtype, poison):
    core, _, _, num_outputs = CORES[name]
    xs, vs = operands(name, dtype=dtype)
    outputs, sequences, finals = loop(core, xs, vs, num_outputs)
    exact = name != "stateless"
    got = flexsn_inference(*make(name, "inference", dtype), *xs, *vs)
    last = flexsn_inference_final_state(*make(name, "final", dtype), *xs, *vs)
    for results, want in ((got, outputs + sequences), (last, outputs + finals)):
        assert_fresh(results, xs + vs)
        assert len(results) == len(want)
        for a, b in zip(results, want, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@MAKERS
def test_one_kernel_serves_every_length_and_size(make):
    kernel, info = make("lif", "inference")
    for T, shape in ((1, (4,)), (2, (1,)), (16, (3, 5, 2)), (33, (200,)), (3, ())):
        xs, vs = operands("lif", T, shape)
        outputs, sequences, _ = loop(lif, xs, vs, 1)
        for a, b in zip(flexsn_inference(kernel, info, *xs, *vs), outputs + sequences, strict=True):
            assert torch.equal(a, b)
    assert len(kernel._loaded) == 1


@MAKERS
@pytest.mark.parametrize("kind", ["inference", "final"])
def test_missing_states_are_zeros(make, kind):
    kernel, info = make("adaptive", kind)
    xs, vs = operands("adaptive")
    zeros = [torch.zeros_like(v) for v in vs]
    launch = {"inference": flexsn_inference, "final": flexsn_inference_final_state}[kind]
    want = launch(kernel, info, *xs, *zeros)
    for given in ([], [None], [None, zeros[1]], [zeros[0]]):
        assert all(torch.equal(a, b) for a, b in zip(launch(kernel, info, *xs, *given), want, strict=True))


@MAKERS
def test_no_steps(make):
    xs, vs = operands("adaptive", T=0)
    kernel, info = make("adaptive", "inference")
    got = flexsn_inference(kernel, info, *xs, *vs)
    assert [tuple(t.shape) for t in got] == [(0, 3, 5)] * 5 and got[1].dtype == torch.bool
    kernel, info = make("adaptive", "final")
    got = flexsn_inference_final_state(kernel, info, *xs, vs[0].t().contiguous().t())
    assert [tuple(t.shape) for t in got] == [(0, 3, 5)] * 3 + [(3, 5)] * 2
    assert torch.equal(got[3], vs[0]) and not got[4].any()
    assert_fresh(got, xs + vs)
    forward, _, info = make("adaptive", "training")
    got = flexsn_forward(forward, info, *xs, *vs)
    assert len(got) == info.num_fwd_kernel_returns and all(t.shape == (0, 3, 5) for t in got)


@MAKERS
def test_no_neurons(make):
    xs, vs = operands("lif", shape=(0, 5))
    kernel, info = make("lif", "inference")
    assert [tuple(t.shape) for t in flexsn_inference(kernel, info, *xs, *vs)] == [(7, 0, 5)] * 2


@MAKERS
def test_strided_arguments(make):
    x, v = torch.randn(5, 7, 3).transpose(0, 1)[:, ::2], torch.randn(1, 3).expand(3, 3)
    flipped = torch.randn(7, 3, 3).flip(0)
    kernel, info = make("lif", "inference")
    for given in (x, flipped, torch.randn(3, 3).expand(7, 3, 3)):
        outputs, sequences, _ = loop(lif, [given], [v], 1)
        got = flexsn_inference(kernel, info, given, v)
        assert all(torch.equal(a, b) for a, b in zip(got, outputs + sequences, strict=True))
        assert_fresh(got, [given, v])


@MAKERS
def test_final_states_have_the_dtype_of_the_initial_ones(make):
    xs, vs = operands("lif")
    kernel, info = make("lif", "final")
    output, final = flexsn_inference_final_state(kernel, info, *xs, vs[0].double())
    assert output.dtype == torch.float32 and final.dtype == torch.float64
    kernel, info = make("lif", "inference")
    assert [t.dtype for t in flexsn_inference(kernel, info, xs[0].double(), vs[0])] == [torch.float32] * 2


def test_arguments_that_require_grad_are_taken_and_nothing_is_recorded():
    xs, vs = operands("lif")
    kernel, info = from_core("lif", "inference")
    got = flexsn_inference(kernel, info, xs[0].requires_grad_(), vs[0].requires_grad_())
    assert not any(t.requires_grad for t in got)


# --- shapes and dtypes of the core --------------------------------------------------------------------------------------------------------
def test_operands_and_returns_of_several_shapes():
    w = torch.randn(4, 1)

    def core(x, bias, v):
        return bias * 2, x + bias, x.new_zeros(1, 5), v * 0.5 + x * w

    xs = [torch.randn(6, 4, 5), torch.randn(6, 5)]
    v = torch.randn(4, 5)
    kernel, info = build_inference_kernel(core, 2, 1, 3, [xs[0][0], xs[1][0], v])
    outputs, sequences, _ = loop(core, xs, [v], 3)
    for a, b in zip(flexsn_inference(kernel, info, *xs, v), outputs + sequences, strict=True):
        assert a.shape == b.shape and torch.equal(a, b) and a.is_contiguous()


def test_gradients_of_operands_that_broadcast():
    def core(x, bias, v):
        h = v * 0.5 + x * torch.tanh(bias)
        return h * h, h

    x, bias, v = torch.randn(6, 4, 5), torch.randn(6, 5), torch.randn(4, 1)
    forward, backward, info = build_training_kernels(core, 2, 1, 1, [x[0], bias[0], v])
    leaves = [t.double().requires_grad_() for t in (x, bias, v)]
    outputs, _, _ = loop(core, leaves[:2], leaves[2:], 1)
    cotangent = torch.randn(6, 4, 5)
    want = torch.autograd.grad(outputs, leaves, [cotangent.double()])
    returns = flexsn_forward(forward, info, x, bias, v)
    saved = [returns[i] for i in info.c2k_return_mapping]
    got = flexsn_backward(backward, info, cotangent, None, *saved, input_templates=[x, bias], state_templates=[v])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


WEIGHT = torch.randn(2, 3, generator=torch.Generator().manual_seed(3))
SMALLER = {  # cores of two inputs and one state, some of whose values are smaller than a step
    "the state widens": lambda x, y, v: (x * 2, y + v, v + x * 0),
    "an output is smaller": lambda x, y, v: (x * 2 + v, y * 3, torch.tanh(v + y)),
    "a captured tensor is larger": lambda x, y, v: (x * y, y + v, torch.tanh(v * 0.5 + WEIGHT.to(v.dtype))),
    "a state widens by another": lambda x, y, v, w: (x * y, y + w, torch.tanh(v * 0.5 + x), torch.tanh(w * 0.5 + v)),
}


@pytest.mark.parametrize("shapes", [((3,), (1,), (1,)), ((2, 3), (1,), (2, 1)), ((3,), (3,), (1,)), ((2, 3), (3,), (3,))], ids=str)
@pytest.mark.parametrize("case", SMALLER)
def test_every_kernel_gives_the_shapes_and_gradients_of_the_loop(case, shapes):
    """Where operands broadcast, inference and training agree: results are those of a loop from states of the shapes they come to."""
    core, num_states = SMALLER[case], SMALLER[case].__code__.co_argcount - 2
    xs, vs = [torch.randn(4, *s) for s in shapes[:2]], [torch.randn(shapes[2]) for _ in range(num_states)]
    examples = [*(x[0] for x in xs), *vs]
    leaves = [t.double().requires_grad_() for t in (*xs, *vs)]
    wide = leaves[2:]
    for _ in range(num_states):
        after = core(*[x[0] for x in leaves[:2]], *wide)[2:]
        wide = [v.expand(torch.broadcast_shapes(v.shape, a.shape)) for v, a in zip(wide, after, strict=True)]
    outputs, sequences, finals = loop(core, leaves[:2], wide, 2)

    kernel, info = build_inference_kernel(core, 2, num_states, 2, examples)
    to_the_end, at_the_end = build_inference_final_state_kernel(core, 2, num_states, 2, examples)
    forward, backward, training = build_training_kernels(core, 2, num_states, 2, examples)
    returns = flexsn_forward(forward, training, *xs, *vs)
    for got, want in (
        (flexsn_inference(kernel, info, *xs, *vs), outputs + sequences),
        (flexsn_inference_final_state(to_the_end, at_the_end, *xs, *vs), outputs + finals),
        (returns[: 2 + num_states], outputs + sequences),
    ):
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)

    cotangents = [torch.randn(t.shape) for t in outputs + sequences]
    want = torch.autograd.grad(outputs + sequences, leaves, [c.double() for c in cotangents])
    saved = [returns[i] for i in training.c2k_return_mapping]
    for a, b in zip(flexsn_backward(backward, training, *cotangents, *saved, input_templates=xs, state_templates=vs), want, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_a_state_of_another_size_is_refused():
    for build in (build_inference_kernel, build_training_kernels):
        with pytest.raises(StateMismatchError, match=r"come back as \[\[4\]\]"):
            build(lambda x, v: (x * 2, v.new_zeros(4)), 1, 1, 1, [torch.randn(3)] * 2)


def test_constants_and_copies_as_returns():
    def core(x, v):
        return torch.ones_like(x), x, v, x, v

    for make in (build_inference_kernel, build_inference_final_state_kernel):
        kernel, info = make(core, 1, 1, 4)
        x, v = torch.randn(3, 4), torch.randn(4)
        launch = flexsn_inference if make is build_inference_kernel else flexsn_inference_final_state
        got = launch(kernel, info, x, v)
        assert_fresh(got, [x, v])
        assert (got[0] == 1).all() and torch.equal(got[1], x) and torch.equal(got[2], v.expand(3, 4)) and torch.equal(got[3], x)


def test_captured_tensors_are_read_at_every_launch():
    w, tau = torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.tensor(0.5))
    kernel, info = build_inference_kernel(lambda x, v: (x * torch.sigmoid(w), v * tau + x), 1, 1, 1, [torch.zeros(3, 5)] * 2)
    x, v = torch.randn(4, 3, 5), torch.randn(3, 5)
    for _ in range(2):
        output, _ = flexsn_inference(kernel, info, x, v)
        torch.testing.assert_close(output, x * torch.sigmoid(w.detach()))
        with torch.no_grad():
            w.mul_(2)


def test_constants_that_a_core_makes():
    """They are computed once per launch, beside no captured tensor."""

    def core(x, v):
        return x, v * torch.exp(-torch.ones(3) / 5) + x

    x, v = torch.randn(4, 3), torch.randn(3)
    kernel, info = build_inference_kernel(core, 1, 1, 1, [x[0], v])
    outputs, sequences, _ = loop(core, [x], [v], 1)
    for a, b in zip(flexsn_inference(kernel, info, x, v), outputs + sequences, strict=True):
        torch.testing.assert_close(a, b)


def test_integers_and_bools():
    def core(x, fire, count):
        count = count + fire.to(count.dtype)
        return x * count, fire & (count > 2), count

    x, fire, count = torch.randn(5, 4), torch.rand(5, 4) > 0.4, torch.zeros(4, dtype=torch.int64)
    forward, backward, info = build_training_kernels(core, 2, 1, 2, [x[0], fire[0], count], requires_grad=[True, True, True])
    returns = flexsn_forward(forward, info, x, fire, count)
    outputs, sequences, _ = loop(core, [x, fire], [count], 2)
    for a, b in zip(returns, outputs + sequences, strict=False):
        assert a.dtype == b.dtype and torch.equal(a, b)
    saved = [returns[i] for i in info.c2k_return_mapping]
    got = flexsn_backward(backward, info, torch.ones(5, 4), None, None, *saved, input_templates=[x, fire], state_templates=[count])
    assert torch.equal(got[0], sequences[0].float())
    assert [g.dtype for g in got[1:]] == [torch.bool, torch.int64] and not any(g.any() for g in got[1:])


@pytest.mark.parametrize("example", [(8,), (1, 8), (4, 1)], ids=str)
def test_a_state_that_is_larger_than_its_example(example):
    """Results are as small as the example makes them: they would lose neurons."""

    def core(x, v):
        v = v * 0.5 + 1
        return x + v, v

    x, v = torch.rand(3, 4, 8), torch.rand(4, 8)
    kernel, info = build_inference_kernel(core, 1, 1, 1, [x[0], torch.zeros(example)])
    with pytest.raises(ValueError, match=r"operand `arg1_1` has steps of shape \[4, 8\], but its example was"):
        flexsn_inference(kernel, info, x, v)
    small = torch.rand(example)
    got, want = flexsn_inference(kernel, info, x, small), loop(core, [x], [small], 1)
    assert all(torch.equal(a, b) for a, b in zip(got, want[0] + want[1], strict=True))


def test_training_with_a_bool_state():
    def core(x, up):
        return torch.where(up, x, -x), x > 0

    x, up = torch.randn(5, 4, requires_grad=True), torch.zeros(4, dtype=torch.bool)
    forward, backward, info = build_training_kernels(core, 1, 1, 1, [torch.zeros(4), up])
    returns = flexsn_forward(forward, info, x, up)
    outputs, sequences, _ = loop(core, [x], [up], 1)
    assert torch.equal(returns[0], outputs[0]) and torch.equal(returns[1], sequences[0])
    saved = [returns[i] for i in info.c2k_return_mapping]
    got = flexsn_backward(backward, info, torch.ones(5, 4), None, *saved, state_templates=[up])
    assert torch.equal(got[0], torch.autograd.grad(outputs[0].sum(), x)[0])
    assert got[1].dtype == torch.bool and not got[1].any()


def test_a_state_that_the_core_promotes():
    """It is carried in its own dtype; its sequence has the dtype that the core returns."""

    def core(x, v):
        v = v * 0.5 + x
        return v > 0, v

    x, v = torch.randn(4, 5), torch.randn(5).half()
    kernel, info = build_inference_kernel(core, 1, 1, 1, [x[0], v])
    sequence, state = [], v
    for t in range(4):
        wide = core(x[t], state)[1]
        sequence.append(wide)
        state = wide.half()
    _, got = flexsn_inference(kernel, info, x, v)
    assert got.dtype == torch.float32 and torch.equal(got, torch.stack(sequence))
    kernel, info = build_inference_final_state_kernel(core, 1, 1, 1, [x[0], v])
    assert torch.equal(flexsn_inference_final_state(kernel, info, x, v)[1], state)


def test_cores_with_in_place_ops():
    def core(x, v):
        v.mul_(0.5).add_(x)
        return v.clamp(min=0), v

    x, v = torch.randn(4, 5), torch.randn(5)
    examples = [x[0].clone(), v.clone()]
    kernel, info = build_inference_kernel(core, 1, 1, 1, examples)
    forward, _, training = build_training_kernels(core, 1, 1, 1, examples)
    assert torch.equal(examples[0], x[0]) and torch.equal(examples[1], v)
    want = [torch.stack(r) for r in zip(*_in_place_loop(core, x, v.clone()), strict=True)]
    for got in (flexsn_inference(kernel, info, x, v), flexsn_forward(forward, training, x, v)):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=False))


def _in_place_loop(core, x, v):
    for t in range(x.shape[0]):
        output, v = core(x[t], v)
        yield output, v.clone()


# --- training ---------------------------------------------------------------------------------------------------------------------------
@MAKERS
@ROWS
def test_training(make, name, dtype, poison):
    core, num_inputs, _, num_outputs = CORES[name]
    xs, vs = operands(name, dtype=dtype)
    leaves = [t.clone().requires_grad_() for t in xs + vs]
    outputs, sequences, _ = loop(core, leaves[:num_inputs], leaves[num_inputs:], num_outputs)
    forward, backward, info = make(name, "training", dtype)
    returns = flexsn_forward(forward, info, *xs, *vs)
    assert_fresh(returns, xs + vs)
    assert len(returns) == info.num_fwd_kernel_returns
    for a, b in zip(returns, outputs + sequences, strict=False):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torch.allclose(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]) if name == "stateless" else torch.equal(a, b)
    saved = [returns[i] for i in info.c2k_return_mapping]
    cotangents = [torch.randn(t.shape).to(dtype) if t.requires_grad else None for t in outputs + sequences]
    for absent in (None, 0, len(cotangents) - 1):
        given = [None if k == absent and len(cotangents) > 1 else g for k, g in enumerate(cotangents)]
        pairs = [(t, g) for t, g in zip(outputs + sequences, given, strict=True) if g is not None]
        want = torch.autograd.grad([t for t, _ in pairs], leaves, [g for _, g in pairs], retain_graph=True)
        got = flexsn_backward(backward, info, *given, *saved, input_templates=xs, state_templates=vs)
        assert_fresh(got, [*saved, *xs, *vs, *(g for g in given if g is not None)])
        for grad, reference in zip(got, want, strict=True):
            assert grad.dtype == reference.dtype and grad.shape == reference.shape
            scale = TOLERANCE[dtype] * max(1.0, reference.abs().max().item())
            torch.testing.assert_close(grad, reference, rtol=TOLERANCE[dtype], atol=scale)


@MAKERS
def test_cotangents_of_a_hard_threshold_are_ignored(make):
    xs, vs = operands("adaptive")
    forward, backward, info = make("adaptive", "training")
    returns = flexsn_forward(forward, info, *xs, *vs)
    saved = [returns[i] for i in info.c2k_return_mapping]
    given = [torch.randn(7, 3, 5) for _ in range(5)]
    with_it = flexsn_backward(backward, info, *given, *saved, input_templates=xs)
    without = flexsn_backward(backward, info, given[0], None, *given[2:], *saved, input_templates=xs)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))


@MAKERS
def test_strided_cotangents(make):
    xs, vs = operands("lif")
    forward, backward, info = make("lif", "training")
    returns = flexsn_forward(forward, info, *xs, *vs)
    saved = [returns[i] for i in info.c2k_return_mapping]
    spread = torch.ones(1, 1, 1).expand(7, 3, 5)
    got = flexsn_backward(backward, info, spread, spread.flip(0), *[s.transpose(0, 1).contiguous().transpose(0, 1) for s in saved])
    want = flexsn_backward(backward, info, torch.ones(7, 3, 5), torch.ones(7, 3, 5), *saved)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def trained(name="adaptive", T=7):
    xs, vs = operands(name, T)
    forward, backward, info = from_core(name, "training")
    returns = flexsn_forward(forward, info, *xs, *vs)
    return xs, vs, backward, info, [returns[i] for i in info.c2k_return_mapping]


def test_without_cotangents_or_steps_gradients_are_zeros_like_the_templates():
    for T in (7, 0):
        xs, vs, backward, info, saved = trained(T=T)
        given = [torch.randn(T, 3, 5) if T == 0 else None] * 5
        wide = [v.double() for v in vs]
        got = flexsn_backward(backward, info, *given, *saved, input_templates=xs, state_templates=wide)
        for grad, like in zip(got, xs + wide, strict=True):
            assert grad.shape == like.shape and grad.dtype == like.dtype and not grad.any()
    x, v = torch.randn(0, 4), torch.randn(0, 4)
    _, backward, info = from_core("lif", "training")
    got = flexsn_backward(backward, info, x, v, *[torch.zeros(0, 4)] * len(info.c2k_return_mapping))
    assert [tuple(g.shape) for g in got] == [(0, 4), (4,)]


def test_without_templates_gradients_follow_the_cotangents():
    xs, vs, backward, info, saved = trained("lif")
    gradient_of_x, gradient_of_v = flexsn_backward(backward, info, torch.ones(7, 3, 5), torch.ones(7, 3, 5), *saved)
    assert gradient_of_x.shape == xs[0].shape and gradient_of_v.shape == vs[0].shape
    got = flexsn_backward(backward, info, torch.ones(7, 3, 5), torch.ones(7, 3, 5).double(), *saved)
    assert [g.dtype for g in got] == [torch.float32, torch.float64]


def test_missing_and_wrong_templates_are_value_errors():
    xs, vs, backward, info, saved = trained()
    full = [torch.randn(7, 3, 5) for _ in range(5)]
    cases = [
        ([None] * 5, {}),
        ([None] * 5, {"input_templates": xs}),
        (full, {}),  # several inputs
        ([*full[:3], None, full[4]], {"input_templates": xs}),  # a state's is None
        (full, {"input_templates": xs[:1]}),
        (full, {"input_templates": xs, "state_templates": vs[:1]}),
        (full, {"input_templates": xs, "state_templates": [*vs, *vs]}),
    ]
    for given, templates in cases:
        with pytest.raises(ValueError):
            flexsn_backward(backward, info, *given, *saved, **templates)
    xs, vs, backward, info, saved = trained("lif")
    with pytest.raises(ValueError, match="input_templates"):
        flexsn_backward(backward, info, None, torch.ones(7, 3, 5), *saved)
    with pytest.raises(ValueError):
        flexsn_backward(backward, info, torch.ones(7, 3, 5), torch.ones(7, 3, 5), *saved, saved[0])
    with pytest.raises(ValueError, match="T"):
        flexsn_backward(backward, info, torch.ones(6, 3, 5), torch.ones(7, 3, 5), *saved)


def test_operands_that_do_not_fit_are_value_errors():
    kernel, info = from_core("adaptive", "inference")
    xs, vs = operands("adaptive")
    for args in ([xs[0]], [*xs, *vs, vs[0]], [xs[0], xs[1][:3], *vs], [*xs, torch.randn(4), *vs[:1]], [torch.tensor(1.0), xs[0]]):
        with pytest.raises(ValueError):
            flexsn_inference(kernel, info, *args)
    with pytest.raises(TypeError):
        flexsn_inference(kernel, info, xs[0], None, *vs)
    with pytest.raises(TypeError, match="complex"):
        flexsn_inference(kernel, info, *xs, vs[0].to(torch.complex64))
    with pytest.raises(TypeError, match="kind"):
        flexsn_inference_final_state(kernel, info, *xs, *vs)


def test_size_classes():
    bounds = (1 << 12, 1 << 17, 1 << 20, 1 << 23)
    assert [flexsn_backward_ncl_bucket(b) for b in bounds] == [0, 1, 2, 3]
    assert [flexsn_backward_ncl_bucket(b + 1) for b in bounds] == [1, 2, 3, 4]
    assert flexsn_backward_ncl_bucket(1) == 0


# --- building ---------------------------------------------------------------------------------------------------------------------------
BUILDERS = [build_inference_kernel, build_inference_final_state_kernel, build_training_kernels]


@pytest.mark.parametrize("build", BUILDERS)
def test_examples(build):
    for examples in ([], [torch.randn(3)], [torch.randn(3)] * 3):
        with pytest.raises(ValueError, match="examples"):
            build(lif, 1, 1, 1, examples)
    with pytest.raises(TypeError, match="complex"):
        build(lif, 1, 1, 1, [torch.randn(3), torch.randn(3, dtype=torch.complex64)])
    for counts in ((1, 1, 2), (1, 1, 0)):
        with pytest.raises(ValueError):
            build(lif, *counts)
    with pytest.raises(UnsupportedOpError, match="cumsum"):
        build(lambda x, v: (x.cumsum(0), v + x), 1, 1, 1)


def test_default_examples_have_distinct_dims_and_float32():
    seen = []

    def core(x, v):
        seen.extend([(tuple(x.shape), x.dtype), (tuple(v.shape), v.dtype)])
        return x + v, v

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        build_inference_kernel(core, 1, 1, 1)
    finally:
        torch.set_default_dtype(before)
    for shape, dtype in seen:
        assert dtype == torch.float32 and len(set(shape)) == len(shape) > 1


def test_training_needs_as_many_flags_as_examples():
    with pytest.raises(ValueError, match="flags"):
        build_training_kernels(lif, 1, 1, 1, requires_grad=[True])
    _, backward, info = build_training_kernels(lif, 1, 1, 1, requires_grad=[True, False])
    saved = [torch.randn(4, 3)] * len(info.c2k_return_mapping)
    gradient_of_x, gradient_of_v = flexsn_backward(backward, info, torch.ones(4, 3), torch.ones(4, 3), *saved)
    assert gradient_of_x.any() and not gradient_of_v.any()


def test_copies_of_kernels_and_infos():
    kernel, info = from_core("lif", "inference")
    assert copy.deepcopy(kernel) is kernel
    for twin in (copy.deepcopy(info), pickle.loads(pickle.dumps(info))):
        assert twin == info and twin.layout == info.layout


def test_info_of_a_core():
    forward, _, info = build_training_kernels(adaptive, 2, 2, 3)
    assert isinstance(info, FlexSNInfo) and forward.info is info
    assert info[:3] == (2, 3, 2) and info.fwd_kernel_returns[:5] == ["s0", "s1", "s2", "v0", "v1"]
    assert all(0 <= i < info.num_fwd_kernel_returns for i in info.c2k_return_mapping)


# --- sources ------------------------------------------------------------------------------------------------------------------------------
BY_HAND = '''
@triton.jit
def step(x, v):
    """A leaky integrator, written by hand."""
    h = v * 0.5 + x
    return tl.where(h > 1.0, 1.0, 0.0), h, h
'''
BACK_BY_HAND = """
@triton.jit
def back(h, grad_1):
    return grad_1, grad_1 * 0.5
"""


def test_a_step_written_by_hand():
    info = FlexSNInfo(1, 1, 1, ["x", "v"], ["s", "h", "h"], ["s0", "v0", "_"], ["s0", "v0"], 2, [1])
    x, v = torch.randn(6, 5), torch.randn(5)
    state, want = v, []
    for t in range(6):
        state = state * 0.5 + x[t]
        want.append(state)
    for get, launch in ((get_flexsn_inference_kernel, flexsn_inference), (get_flexsn_forward_kernel, flexsn_forward)):
        spikes, states = launch(get(BY_HAND, "step", info), info, x, v)
        assert torch.equal(states, torch.stack(want)) and torch.equal(spikes, (states > 1).float())
    backward = get_flexsn_backward_kernel(BACK_BY_HAND, "back", info)
    gradient_of_x, gradient_of_v = flexsn_backward(backward, info, torch.zeros(6, 5), torch.ones(6, 5), states)
    torch.testing.assert_close(gradient_of_x[:, 0], torch.tensor([sum(0.5**k for k in range(6 - t)) for t in range(6)]))
    torch.testing.assert_close(gradient_of_v, gradient_of_x[0] * 0.5)
    with pytest.raises(ValueError, match="grad_k"):
        get_flexsn_backward_kernel(BACK_BY_HAND.replace("grad_1", "g"), "back", info)


def test_sources_name_their_function_and_print_when_verbose(capsys):
    graph = generate_inference_graph(lif, [torch.zeros(3)] * 2)
    source, name = generate_triton_code_str(graph, "lif")
    info = extract_info(graph, 1, 1, 1)
    with pytest.raises(ValueError, match="no function"):
        get_flexsn_inference_kernel(source, "other", info)
    get_flexsn_inference_kernel(source, name, info)
    assert capsys.readouterr().out == ""
    get_flexsn_inference_kernel(source, name, info, verbose=True)
    assert f"def {name}_forward(" in capsys.readouterr().out


def test_kernels_of_a_source_need_triton_on_the_cpu_too(monkeypatch):
    kernel, info = from_source("plif", "inference")
    monkeypatch.setattr(launch_triton, "interpreted", lambda: False)
    with pytest.raises(BackendError, match="TRITON_INTERPRET"):
        flexsn_inference(kernel, info, torch.zeros(2, 3, device="cpu"), torch.zeros(3, device="cpu"))


def test_one_launch_covers_all_steps(monkeypatch):
    launches = []
    interpret = launch_triton.Kernel._interpret
    monkeypatch.setattr(launch_triton.Kernel, "_interpret", lambda self, *args: (launches.append(self), interpret(self, *args))[1])
    forward, backward, info = from_source("lif", "training")
    for T in (1, 16, 17):
        xs, vs = operands("lif", T)
        returns = flexsn_forward(forward, info, *xs, *vs)
        flexsn_backward(backward, info, returns[0], returns[1], *[returns[i] for i in info.c2k_return_mapping])
    assert len(launches) == 6 and len(set(launches)) == 2


BUILDS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import test_lowlevel_kernels as here
from flexsn._runtime.triton.kernel import Kernel
from flexsn._runtime.triton.tiles import Tile
from triton.backends.compiler import GPUTarget

built = 0
for name in here.CORES:
    for dtype in (torch.float32, torch.bfloat16):
        for kernel in (*here.from_source(name, "inference", dtype)[:1], *here.from_source(name, "training", dtype)[:2]):
            for present in ([], None):
                plan, text = kernel.render(present=present)
                assert "ld.global" in Kernel(plan, text).build(Tile(128, 2, False, True), GPUTarget("cuda", 90, 32)).asm["ptx"]
                built += 1
info = here.FlexSNInfo(1, 1, 1, ["x", "v"], ["s", "h", "h"], ["s0", "v0", "_"], ["s0", "v0"], 2, [1])
for name in ("step", "steps", "step_forward"):  # as the renderer names functions of its own
    source = here.BY_HAND.replace("def step(", f"def {name}(")
    plan, text = here.get_flexsn_forward_kernel(source, name, info).render()
    assert "st.global" in Kernel(plan, text).build(Tile(64, 2, True), GPUTarget("cuda", 90, 32)).asm["ptx"]
    built += 1
print(built)
"""


@pytest.mark.slow
def test_kernels_of_a_source_build_for_a_gpu(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", BUILDS, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) == 51
