"""Every mistake has its class, and its message names the core, the operand or op, and the user's own line."""

import inspect
import linecache
import pickle
import sys
import types
import warnings

import pytest
import torch
from cores import leaky, lif
from helpers import line_of, words

import flexsn
from flexsn import errors
from flexsn._runtime import cpp_kernel as launch_cpp
from flexsn.errors import FallbackWarning

X = torch.randn(5, 4, 3)
BACKENDS = ["cpp", "torch"]


def fails(kind, core, *parts, inputs=(X,), states=(None,), params=(), line=None, backend="cpp", **options):
    """The call raises exactly `kind`, with all `parts` and the source line in the message."""
    with pytest.raises(errors.FlexSNError) as caught:
        flexsn.scan(core, inputs, states, params, backend=backend, **options)
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {caught.value}"
    text = str(caught.value)
    name = getattr(core, "__name__", type(core).__name__)
    assert f"core `{name}`" in text and caught.value.core == name
    for part in parts:
        assert part in text, f"{part!r} is not in: {text}"
    if line is not None:
        assert caught.value.line == line_of(core, line) and line_of(core, line) in text
    return caught.value


# --- the call does not fit the core -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
def test_number_of_operands(backend):
    fails(errors.OperandCountError, lif, "x, v, tau, v_th", "given 2", "1 inputs + 1 states + 0 params", backend=backend)
    fails(errors.OperandCountError, leaky, "given 4", inputs=[X, X], states=[None], params=[torch.tensor(1.0)], backend=backend)
    fails(errors.OperandCountError, leaky, "at least one input", inputs=[], backend=backend)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("backend", BACKENDS)
def test_kind_of_operands(backend):
    decay = [torch.tensor(0.5)]
    fails(errors.OperandTypeError, leaky, "param `decay`", "float", params=[0.5], backend=backend)
    fails(errors.OperandTypeError, leaky, "input `x`", "list", inputs=[[1.0, 2.0]], params=decay, backend=backend)
    fails(errors.OperandTypeError, leaky, "state `v`", "float", states=[0.0], params=decay, backend=backend)
    fails(errors.OperandTypeError, leaky, "input `x`", "sparse", inputs=[X.to_sparse()], params=decay, backend=backend)
    fails(errors.UnsupportedDtypeError, leaky, "input `x`", "complex32", inputs=[X.to(torch.complex32)], params=decay, backend=backend)


@pytest.mark.parametrize("backend", ["cpp", "auto"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_products_of_two_dtypes(backend, dtype):
    """PyTorch's own error names no core, and comes after a warning that speaks of something else."""
    w, linear, x = torch.rand(3, 3), torch.nn.Linear(3, 3), (X * 3).to(dtype)

    def of_input(x, v):
        v = torch.tanh(v + linear(x))
        return v, v

    def of_state(x, v):
        v = torch.tanh(x + v @ w)
        return v, v

    name = str(dtype)[6:]
    fails(errors.CoreError, of_input, "`addmm`", f"float32 and {name}", "x.to(weight.dtype)", inputs=[x], line="linear(x)", backend=backend)
    fails(errors.CoreError, of_state, "`mm`", f"{name} and float32", inputs=[x], line="v @ w", backend=backend)
    with pytest.raises(errors.CoreError, match="core `recurrent_lif`: `addmm` is given float32 and float64"):
        flexsn.Recurrent(flexsn.LIF(), linear)(X.double())


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_of_sequences(backend):
    def add(x, y):
        return x + y

    fails(errors.SequenceLengthError, add, "`x` has T = 5", "`y` has T = 6", inputs=[X, torch.randn(6, 4, 3)], states=[], backend=backend)
    fails(errors.SequenceLengthError, add, "`y`", "0-dimensional", inputs=[X, torch.tensor(1.0)], states=[], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_that_do_not_broadcast(backend):
    def add(x, y):
        return x + y

    fails(errors.ShapeMismatchError, add, "`x` [4, 3]", "`y` [4, 2]", inputs=[X, torch.randn(5, 4, 2)], states=[], backend=backend)
    fails(errors.ShapeMismatchError, leaky, "`x` [4, 3]", "`v` [7]", states=[torch.zeros(7)], params=[torch.tensor(0.5)], backend=backend)
    with pytest.raises((RuntimeError, errors.FlexSNError), match=r"\b7\b") as caught:  # PyTorch's own words, at the user's line
        flexsn.scan(leaky, [X], [None], [torch.zeros(7)], backend=backend)
    if backend == "cpp":
        assert caught.value.line == line_of(leaky, "v * decay")


@pytest.mark.parametrize("backend", BACKENDS)
def test_devices(backend):
    meta = torch.tensor(0.5, device="meta")
    fails(errors.DeviceMismatchError, leaky, "state `v` is on meta", "`x` is on cpu", states=[torch.zeros(4, 3, device="meta")],
          params=[torch.tensor(0.5)], backend=backend)  # fmt: skip
    fails(errors.DeviceMismatchError, leaky, "param `decay` is on meta", params=[meta.expand(3)], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_returns(backend):
    def nothing(x, v):
        v = v + x

    def number(x, v):
        return 1.0, v

    def text(x, v):
        return "spike"

    def too_few(x, v, w):
        return (x,)

    fails(errors.ReturnTypeError, nothing, "NoneType", "return", backend=backend)
    fails(errors.ReturnTypeError, number, "return value 0", "float", backend=backend)
    fails(errors.ReturnTypeError, text, "str", backend=backend)
    fails(errors.ReturnCountError, too_few, "returned 1 values", "2 states", states=[None, None], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_that_change(backend):
    def to_double(x, v):
        return x, (v + x).double()

    def grows(x, v):
        return x, (v + x)[None]

    def to_int(x, n):
        return x, n + 0.5

    fails(errors.StateMismatchError, to_double, "state `v`", "float32", "float64", states=[torch.zeros(4, 3)], backend=backend)
    if backend == "torch":
        fails(errors.StateMismatchError, grows, "state `v`", states=[torch.zeros(4, 3)], backend=backend)
    fails(errors.StateMismatchError, to_int, "state `n`", "int64", states=[torch.zeros(4, 3, dtype=torch.int64)], backend=backend)


def test_writing_into_operands():
    def writes_state(x, v):
        v += x
        return v, v

    def writes_input(x, v):
        x[x > 1] = 0.0
        return x, v

    def writes_param(x, v, w):
        w.mul_(2)
        return x * w, v

    fails(errors.OperandMutationError, writes_state, "`add_`", "operand `v`", line="v += x")
    fails(errors.OperandMutationError, writes_input, "operand `x`", line="x[x > 1] = 0.0")
    fails(errors.OperandMutationError, writes_param, "operand `w`", params=[torch.ones(3)], line="w.mul_(2)")


def test_writing_into_operands_fails_in_the_eager_loop_too():
    """Or gives what it would give without aliasing: never wrong sequences and a changed input."""

    def writes_input(x, v):
        x.mul_(2)
        return x, v + x

    x, kept = X.clone(), X.clone()
    try:
        flexsn.scan(writes_input, [x], [None], backend="torch")
    except errors.OperandMutationError:
        return
    assert torch.equal(x, kept)


def test_views_of_operands():
    def writes_view(x, v):
        h = v.view(4, 3)
        h.add_(x)
        return v, v

    def writes_slice(x, v):
        h = v + x
        h[0] = 1.0
        return h, h

    with pytest.raises(errors.FlexSNError) as caught:
        flexsn.scan(writes_view, [X], [torch.zeros(4, 3)], backend="cpp")
    assert caught.value.line == line_of(writes_view, "h.add_(x)")
    with pytest.raises(errors.CannotFuseError) as caught:
        flexsn.scan(writes_slice, [X], [torch.zeros(4, 3)], backend="cpp")
    assert caught.value.line == line_of(writes_slice, "h[0] = 1.0")


# --- what a kernel cannot express -------------------------------------------------------------------------------------------------
HALF = X.bfloat16()  # in which no core that mixes neurons runs in pieces
W = torch.eye(3)
SCALE = torch.tensor([1.0, 2.0, 3.0])


def mean(x, v):
    v = 0.5 * v + x
    v = v - v.mean()
    return v, v


def matmul(x, v):
    v = 0.5 * v + x @ W.to(x.dtype)
    return v, v


def cumsum(x, v):
    h = torch.cumsum(x, -1)
    return h, v + h


def softmax(x, v):
    h = torch.softmax(v + x, dim=-1)
    return h, h


def slicing(x, v):
    h = x[1:] - x[:-1]  # along the last dim a kernel takes it
    return h, v + x


def rolled(x, v):
    h = torch.roll(x, 1, 0)
    return h, v + h


def flattened(x, v):
    h = (x + v).view(-1)
    return h, v


def conv(x, v):
    h = torch.nn.functional.conv1d(x[None], torch.ones(4, 4, 1, dtype=x.dtype))[0]
    return h, v + h


def nonzero(x, v):
    h = x[x > 0]
    return h, v


@pytest.mark.parametrize(
    ("core", "op", "line"),
    [(mean, "mean", "v - v.mean()"), (matmul, "m", "x @ W"), (cumsum, "cumsum", "torch.cumsum"), (softmax, "softmax", "torch.softmax"),
     (slicing, "slice", "x[1:]"), (rolled, "roll", "torch.roll"), (flattened, "view", ".view(-1)"), (conv, "", "conv1d"), (nonzero, "index", "x[x > 0]")],
    ids=lambda p: getattr(p, "__name__", None),
)  # fmt: skip
def test_not_elementwise(core, op, line):
    error = fails(errors.NotElementwiseError, core, op, inputs=[HALF], line=line)
    assert isinstance(error, errors.CannotFuseError) and isinstance(error, NotImplementedError)


@pytest.mark.parametrize("core", [mean, matmul, cumsum, softmax, slicing, rolled, flattened, conv], ids=lambda c: c.__name__)
def test_what_mixes_neurons_runs_in_pieces(core):
    want = flexsn.scan(core, [X], [None], backend="torch")
    for options in ({"strict": True}, {"backend": "cpp"}, {}):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            got = flexsn.scan(core, [X], [None], **options)
        torch.testing.assert_close([*got.outputs, *got.states], [*want.outputs, *want.states])


def test_what_gives_another_number_of_values_at_every_step_runs_in_no_pieces():
    fails(errors.NotElementwiseError, nonzero, "index", line="x[x > 0]")


def test_what_needs_a_state_cannot_move_before_the_sequence():
    weight = torch.eye(3, dtype=HALF.dtype)

    def recurrent(x, v, s):
        v = 0.5 * v + x + (2 * s) @ weight
        return v, v, (v >= 1.0).to(v.dtype)

    hint = fails(errors.NotElementwiseError, recurrent, inputs=[HALF], states=[None, None], line="(2 * s) @ weight").hint
    assert "do this outside the core, on its outputs" in hint and 'step_mode="s"' in hint and 'backend="torch"' in hint
    assert fails(errors.NotElementwiseError, cumsum, inputs=[HALF]).hint.endswith("do this outside the core, or on params only.")


def rand_like(x, v):
    return x + torch.rand_like(x), v


def randn(x, v):
    return x + torch.randn(3), v


def dropout(x, v):
    return torch.nn.functional.dropout(x, 0.5), v


def bernoulli(x, v):
    return torch.bernoulli(torch.sigmoid(x)), v


def normal_(x, v):
    return x + torch.empty(3).normal_(), v


@pytest.mark.parametrize("core", [rand_like, randn, dropout, bernoulli, normal_], ids=lambda c: c.__name__)
def test_random(core):
    error = fails(errors.RandomOpError, core, "random", line="return")
    assert "input" in error.hint


def test_dropout_in_eval_mode_is_fine():
    module = torch.nn.Dropout(0.5).eval()
    assert torch.equal(flexsn.scan(lambda x, v: (module(x), v), [X], [None], backend="cpp").outputs[0], X)


GAIN = torch.tensor(2.0)


def reads_item(x, v):
    return x * GAIN.item(), v


def reads_float(x, v):
    gain = float(GAIN)
    return x * gain, v


def reads_list(x, v):
    a, _, _ = SCALE.tolist()
    return x * a, v


def reads_numpy(x, v):
    gain = SCALE.numpy()
    return x * gain[0], v


def reads_int(x, v):
    return x * int(GAIN), v


def reads_state(x, v):
    return x * v[0, 0].item(), v


def reads_sum(x, v):
    return x * v.sum().item(), v


@pytest.mark.parametrize(
    ("core", "what", "line"),
    [(reads_item, "item", "GAIN.item()"), (reads_float, "", "float(GAIN)"), (reads_list, "tolist", "SCALE.tolist()"), (reads_numpy, "numpy", "SCALE.numpy()"),
     (reads_int, "", "int(GAIN)"), (reads_state, "item", ".item()"), (reads_sum, "item", ".item()")],
    ids=lambda p: getattr(p, "__name__", None),
)  # fmt: skip
def test_reading_values(core, what, line):
    error = fails(errors.ScalarReadError, core, what, line=line)
    if "GAIN" in line or "SCALE" in line:
        assert ("GAIN" if "GAIN" in line else "SCALE") in str(error)


def if_max(x, v):
    if v.max() > 1:
        v = v * 0
    return x, v


def if_captured(x, v):
    if GAIN > 1:
        x = x * 2
    return x, v


def while_any(x, v):
    while (v > 1).any():
        v = v - 1
    return x, v


def ternary(x, v):
    return (x if x.sum() else v), v


@pytest.mark.parametrize(
    ("core", "line"), [(if_max, "if v.max() > 1"), (if_captured, "if GAIN > 1"), (while_any, "while (v > 1)"), (ternary, "x.sum()")],
    ids=lambda p: getattr(p, "__name__", None),
)  # fmt: skip
def test_control_flow(core, line):
    assert "torch.where" in fails(errors.ControlFlowError, core, line=line).hint


def test_control_flow_on_python_values_is_fine():
    def core(x, v, gain=2.0):
        if gain > 1 and x.shape[-1] == 3 and x.dtype.is_floating_point and x.dim() == 2:
            return x * gain, v
        return x, v

    assert torch.equal(flexsn.scan(core, [X], [None], backend="cpp").outputs[0], X * 2)


def test_writing_into_captured_tensors():
    count, module = torch.zeros(3), torch.nn.BatchNorm1d(3)

    def counts(x, v):
        count.add_(1)
        return x, v

    def batch_norm(x, v):
        return module(x), v

    error = fails(errors.CapturedMutationError, counts, "`count`", line="count.add_(1)")
    assert "state" in error.hint and not count.any()
    with pytest.raises(errors.CannotFuseError) as caught:
        flexsn.scan(batch_norm, [X], [None], backend="cpp")
    assert caught.value.line == line_of(batch_norm, "module(x)") and module.num_batches_tracked == 0


def test_out_argument():
    def core(x, v):
        h = torch.empty_like(x)
        torch.add(x, v, out=h)
        return h, v

    with pytest.raises(errors.CannotFuseError) as caught:
        flexsn.scan(core, [X], [None], backend="cpp")
    assert caught.value.line == line_of(core, "out=h")


def test_unsupported_elementwise_op():
    def core(x, v):
        return torch.special.airy_ai(x), v

    fails(errors.UnsupportedOpError, core, "airy_ai", line="airy_ai")


def test_complex_inside_the_core():
    def core(x, v):
        return torch.tanh(torch.complex(x, v)).real, v

    with pytest.raises(errors.FlexSNError) as caught:
        flexsn.scan(core, [X], [None], backend="cpp")
    assert caught.value.line == line_of(core, "tanh")


def test_gradient_that_is_not_linear():
    class Clipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w * 1.0

        @staticmethod
        def backward(ctx, grad):
            return grad.clamp(-1, 1)

    w = torch.ones(3, requires_grad=True)

    def core(x, v):
        return x * Clipped.apply(w), v

    fails(errors.ParamGradientError, core, "clamp")
    with torch.no_grad():
        flexsn.scan(core, [X], [None], backend="cpp")


def test_a_tensor_kept_from_another_run():
    kept = []

    def core(x, v):
        kept.append(x)
        return x + kept[0], v

    with pytest.raises(errors.FlexSNError, match="core `core`"):
        flexsn.scan(core, [X], [None], backend="cpp")
        flexsn.scan(core, [X], [None], backend="cpp")


def test_torchscript_records_no_call():
    """A second recording crashed the process."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), flexsn.LIF())
    for _ in range(2):
        with warnings.catch_warnings(), pytest.raises(errors.TorchScriptError, match=r"core `lif`(.|\n)*torch\.export"):
            warnings.simplefilter("ignore")  # that it is deprecated
            torch.jit.trace(model, X)
    model[1].reset()
    assert model(X).shape == X.shape


def test_torch_fx_is_told_of_leaves():
    with pytest.raises(errors.OperandTypeError, match="is_leaf_module"):
        torch.fx.symbolic_trace(torch.nn.Sequential(flexsn.LIF()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_left_by_a_call_of_another_dtype(backend):
    neuron = flexsn.LIF(backend=backend)
    neuron(X.bfloat16())
    with pytest.raises(errors.StateMismatchError, match=r"bfloat16(.|\n)*need `reset\(\)` first"):
        neuron(X)
    error = fails(errors.StateMismatchError, lambda x, v: (x, v.float() if v.dtype is torch.float64 else v.double()), backend=backend)
    assert "reset" not in str(error)


def test_a_batch_norm_in_a_core():
    norm = torch.nn.BatchNorm1d(3)
    fails(errors.CapturedMutationError, lambda x, v: (norm(x + v), v), "norm.num_batches_tracked", "in front of the neuron")


def test_an_error_of_the_users_own_passes_through():
    def core(x, v):
        raise KeyError("mine")

    def wrong_shapes(x, v):
        return x + torch.ones(7), v

    for backend in ("cpp", "torch", "auto"):
        with pytest.raises(KeyError, match="mine"):
            flexsn.scan(core, [X], [None], backend=backend)
        with pytest.raises((RuntimeError, errors.FlexSNError)):
            flexsn.scan(wrong_shapes, [X], [None], backend=backend)


# --- backends -----------------------------------------------------------------------------------------------------------------------
def test_unknown_backend():
    fails(errors.BackendError, leaky, "'cuda'", "'cpp'", "'torch'", params=[torch.tensor(0.5)], backend="cuda")


def test_backend_that_does_not_serve_the_device():
    x = torch.zeros(3, 4, device="meta")
    with pytest.raises(errors.BackendError, match="meta"):
        flexsn.scan(leaky, [x], [None], [torch.tensor(0.5, device="meta")], backend="cpp")


@pytest.mark.parametrize("core", [mean, matmul, cumsum, softmax, rolled, reads_float, if_max], ids=lambda c: c.__name__)
def test_auto_falls_back_once_and_gives_the_eager_result(core):
    x = X if core in (reads_float, if_max) else HALF
    with pytest.warns(FallbackWarning, match=words(f"core `{core.__name__}`")) as seen:
        got = [flexsn.scan(core, [x], [None]) for _ in range(3)]
    assert len([w for w in seen if w.category is FallbackWarning]) == 1
    assert seen[0].filename == __file__
    want = flexsn.scan(core, [x], [None], backend="torch")
    for result in got:
        assert torch.equal(result.outputs[0], want.outputs[0]) and torch.equal(result.states[0], want.states[0])
    for options in ({"strict": True}, {"backend": "cpp"}):
        with pytest.raises(errors.CannotFuseError):
            flexsn.scan(core, [x], [None], **options)


def test_fallback_of_a_module_warns_at_the_users_line():
    net = flexsn.FlexSN(mean, 1, 1, 1)
    with pytest.warns(FallbackWarning) as seen:
        net(HALF)
        net(HALF)
    assert len(seen) == 1


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("core", [lambda x, v: (v + (x - v) / 2, v), lambda x, v: ((1 - x) * v, v), lambda x, v: (-x * v, v)])
def test_bools_are_not_subtracted(core, backend):
    """PyTorch's rule, on both paths; the error says what to write."""
    with pytest.raises(RuntimeError, match="bool tensor is not supported") as caught:
        flexsn.scan(core, [X > 0.5], [torch.zeros_like(X[0])], backend=backend)
    assert "x.to(v.dtype)" in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def test_auto_does_not_hide_mistakes():
    def nothing(x, v):
        v = v + x

    def writes(x, v):
        v += x
        return v, v

    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        fails(errors.ReturnTypeError, nothing, backend="auto")
        fails(errors.OperandMutationError, writes, states=[torch.zeros(4, 3)], backend="auto")
        fails(errors.OperandCountError, leaky, backend="auto")
        fails(errors.StateMismatchError, lambda x, v: (x, v.double()), states=[torch.zeros(4, 3)], backend="auto")


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)


def test_no_compiler(no_compiler):
    def uncompiled(x, v):
        return x * 0.9375 + v, v

    assert launch_cpp.compiler() is None
    with pytest.raises(errors.BackendUnavailableError, match="C\\+\\+ compiler") as caught:
        flexsn.scan(uncompiled, [X], [None], backend="cpp")
    assert "g++" in caught.value.hint
    with pytest.raises(errors.BackendUnavailableError):
        flexsn.scan(uncompiled, [X], [None], strict=True)
    with pytest.warns(FallbackWarning, match="compiler") as seen:
        got = [flexsn.scan(uncompiled, [X], [None]) for _ in range(2)]
    assert len(seen) == 1
    assert torch.equal(got[0].outputs[0], X * 0.9375) and torch.equal(got[1].outputs[0], X * 0.9375)


def test_named_compiler_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(errors.BackendUnavailableError, match=r"\$CXX is .*/nowhere/g\+\+.*, which is no program"):
        flexsn.scan(lambda x, v: (x * 0.96875 + v, v), [X], [None], backend="cpp")


def test_compiler_that_fails(monkeypatch, tmp_path):
    import torch._inductor.config  # which a first capture imports, and which keeps the compiler of that moment

    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'it does not like this' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(errors.BackendUnavailableError, match="exit 3") as caught:
        flexsn.scan(lambda x, v: (x * 0.90625 + v, v), [X], [None], backend="cpp")
    assert "it does not like this" in str(caught.value)
    monkeypatch.delenv("CXX")
    assert torch.equal(flexsn.scan(lambda x, v: (x * 0.90625 + v, v), [X], [None], backend="cpp").outputs[0], X * 0.90625)


# --- the classes ----------------------------------------------------------------------------------------------------------------------
def classes():
    return [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.FlexSNError)]


@pytest.mark.parametrize("cls", classes(), ids=lambda c: c.__name__)
def test_every_class_pickles_and_is_documented(cls):
    error = cls("does this", core="lif", line="a.py:3: v += x", hint="Do that.")
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is cls and str(twin) == str(error) == "core `lif`: does this\n  at a.py:3: v += x\n  Do that."
    assert (twin.core, twin.line, twin.hint, twin.reason) == ("lif", "a.py:3: v += x", "Do that.", "does this")
    assert cls.__doc__ and cls.__mro__.index(errors.FlexSNError) < cls.__mro__.index(Exception)


@pytest.mark.parametrize("backend", ["auto", "cpp", "torch"])
def test_a_default_state_of_another_dtype_than_the_core_takes(backend):
    def refractory(x, v, fired):
        h = v + x
        s = (h > 1.0) & ~fired
        return s.float(), h, s

    x = torch.rand(4, 2)
    with pytest.raises(TypeError) as caught:
        flexsn.scan(refractory, [x], [torch.zeros(2), None], backend=backend)
    (note,) = caught.value.__notes__
    assert "zeros of float32" in note and "`fired`" in note and "`v`" not in note
    flexsn.scan(refractory, [x], [torch.zeros(2), torch.zeros(2, dtype=torch.bool)], backend=backend)
    with pytest.raises(RuntimeError, match=r"expected (predicate|condition) to be") as caught:
        flexsn.scan(lambda x, fired: (torch.where(fired, x, -x), x > 0), [x], [None], backend=backend)
    assert "zeros of float32" in caught.value.__notes__[0]
    for mistake in (lambda x, v: (torch.clamp(x, minn=0), v), lambda x, v: ([x][1], v)):  # that no dtype is part of
        with pytest.raises((TypeError, IndexError)) as caught:
            flexsn.scan(mistake, [x], [None], backend=backend, strict=True)
        assert not any("zeros of" in note for note in getattr(caught.value, "__notes__", ()))


@pytest.mark.parametrize("backend", ["auto", "cpp", "torch"])
def test_an_error_of_a_state_that_started_as_zeros_of_another_dtype_says_so(backend):
    def latch(x, b):
        fire = x > 0.3
        return x * fire, fire | b

    with pytest.raises((errors.CoreError, NotImplementedError)) as raised:
        flexsn.FlexSN(latch, num_states=1, backend=backend)(torch.randn(5, 3, 6))
    (note,) = raised.value.__notes__
    assert "zeros of float32" in note and "`b`" in note


def test_sizes_of_a_trace_are_told_as_numbers():
    neuron = flexsn.FlexSN(lambda x, v: (x + v, x + v), num_states=1)
    compiled = torch.compile(neuron, backend="eager", dynamic=True)
    with torch.no_grad():
        compiled(torch.rand(4, 3, 6))
        with pytest.raises(errors.ShapeMismatchError, match=r"`x` \[5, 6\], `v` \[3, 6\]"):
            compiled(torch.rand(4, 5, 6))


# --- notebooks -----------------------------------------------------------------------------------------------------------------
CELL = "def inhibited(x, v):\n    h = v + x\n    return h - h.mean().item(), h\n"


class Shell:
    """What IPython's shell has: a cache of the cells that it compiled, which names them."""

    def __init__(self, file):
        self.compile, self.file = self, file

    def format_code_name(self, name):
        return ("Cell", "In[7]") if name == self.file else None


@pytest.fixture
def cell(monkeypatch):
    """A core of a notebook's cell, whose file is a temporary one."""
    file = "/tmp/ipykernel_123/456.py"
    monkeypatch.setitem(linecache.cache, file, (len(CELL), None, CELL.splitlines(keepends=True), file))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: Shell(file)))
    names = {}
    exec(compile(CELL, file, "exec"), names)
    return names["inhibited"]


def test_an_error_names_the_cell_of_a_notebook(cell):
    with pytest.raises(errors.ScalarReadError, match=r"\n  at cell In\[7\], line 3: return h - h\.mean\(\)\.item\(\), h\n") as caught:
        flexsn.scan(cell, [torch.rand(3, 2)], [None], strict=True)
    assert caught.value.line == "/tmp/ipykernel_123/456.py:3: return h - h.mean().item(), h"
    with pytest.warns(errors.FallbackWarning, match=r"at cell In\[7\], line 3"):
        flexsn.scan(cell, [torch.rand(3, 2)], [None])


def test_a_report_names_the_cell_of_a_notebook(cell):
    report = flexsn.explain(cell, torch.rand(3, 2))
    assert "core at cell In[7], line 1\n" in str(report) and "at       cell In[7], line 3: return" in str(report)
    assert "ipykernel" not in str(report) + report.html()


@pytest.mark.parametrize(
    "module", [None, types.SimpleNamespace(), types.SimpleNamespace(get_ipython=lambda: None)], ids=["no IPython", "no shell", "no kernel"]
)
def test_files_keep_their_names(module, monkeypatch):
    """Also beside a shell, a file is a file; a shell that names no cells is as none."""
    if module is None:
        monkeypatch.delitem(sys.modules, "IPython", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "IPython", module)
    assert errors.as_shown("neurons.py:3: h = x") == "neurons.py:3: h = x"
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: Shell("other.py")))
    assert errors.as_shown("neurons.py:3: h = x") == "neurons.py:3: h = x"
    assert errors.as_shown("other.py:3") == "cell In[7], line 3" and errors.as_shown("no place") == "no place"
