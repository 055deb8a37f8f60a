"""Operands of the wrong number, kind, dtype, device or shape."""

import warnings

import numpy as np
import torch

import flexsn
from flexsn import errors

from . import V, X, both, falls_back, gives, group, leaky, loop, passes_on, raises

misuse = group("Operands: how many, and of what kind")
PYTORCH_SHAPES = passes_on(RuntimeError, "size of tensor", "7", whose="PyTorch's error at the core's line")


def scan(backend, inputs, states=(None,), params=(), core=leaky):
    return flexsn.scan(core, inputs, states, params, backend=backend), None


@misuse("no input", raises(errors.OperandCountError, "at least one input"), triton=True)
def no_input(backend):
    return scan(backend, [], [None])


@misuse("one state too many", raises(errors.OperandCountError, "takes 2 operands (x, v) but was given 3"), triton=True)
def state_too_many(backend):
    return scan(backend, [X], [None, None])


@misuse("no state for a core that has one", raises(errors.OperandCountError, "given 1", "1 inputs + 0 states"))
def state_too_few(backend):
    return scan(backend, [X], [])


@misuse("a param that the core does not take", raises(errors.OperandCountError, "given 3", "1 params"))
def param_too_many(backend):
    return scan(backend, [X], [None], [torch.ones(3)])


@misuse("a tensor in place of a list of inputs", raises(errors.OperandTypeError, "`inputs` must be a tuple or list", "Write `inputs=(x,)`"))
def bare_tensor(backend):
    return scan(backend, X)


@misuse("`None` in place of a list of states", raises(errors.OperandTypeError, "`states` must be a tuple or list"))
def states_none(backend):
    return scan(backend, [X], None)


@misuse("a dict of params", raises(errors.OperandTypeError, "`params` must be a tuple or list"))
def params_dict(backend):
    return scan(backend, [X], [None], {"w": torch.ones(3)}, lambda x, v, w: (x * w, v))


@misuse("a generator of inputs", raises(errors.OperandTypeError, "`inputs` must be a tuple or list"))
def inputs_generator(backend):
    return scan(backend, (x for x in (X,)))


@misuse("`None` as an input", raises(errors.OperandTypeError, "input `x` must be a tensor, not NoneType"), triton=True)
def input_none(backend):
    return scan(backend, [None])


@misuse("`None` as a param", raises(errors.OperandTypeError, "param `w` must be a tensor, not NoneType"))
def param_none(backend):
    return scan(backend, [X], [None], [None], lambda x, v, w: (x * w, v))


@misuse("a list of numbers as an input", raises(errors.OperandTypeError, "input `x` must be a tensor, not list", "torch.as_tensor"))
def input_list(backend):
    return scan(backend, [[1.0, 2.0]])


@misuse("a numpy array as an input", raises(errors.OperandTypeError, "input `x` must be a tensor, not ndarray", "torch.as_tensor"))
def input_numpy(backend):
    return scan(backend, [X.numpy()])


PACKED = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])


def uneven(backend, **given):
    return flexsn.scan(leaky, [X], [None], backend=backend, **given), None


@misuse("`lengths` in a list", raises(errors.OperandTypeError, "`lengths` must be a tensor, not list", "torch.as_tensor(lengths)"))
def lengths_list(backend):
    return uneven(backend, lengths=[3] * X.shape[1])


@misuse("`lengths` of another batch", raises(errors.ShapeMismatchError, "`lengths` has the shape", "one number per sequence"))
def lengths_size(backend):
    return uneven(backend, lengths=torch.ones(X.shape[1] + 1, dtype=torch.long))


@misuse("`lengths` that are no integers", raises(errors.OperandTypeError, "`lengths` is of torch.float32", "lengths.to(torch.int64)"))
def lengths_floats(backend):
    return uneven(backend, lengths=torch.ones(X.shape[1]))


@misuse("`resets` of one step", raises(errors.ShapeMismatchError, "`resets` has the shape", "`[T, B]`"))
def resets_step(backend):
    return uneven(backend, resets=torch.ones(X.shape[1], dtype=torch.bool))


@misuse("`reset_states` without `resets`", raises(errors.ArgumentError, "`reset_states` is given", "Give `resets`"))
def reset_states_alone(backend):
    return uneven(backend, reset_states=(None,))


@misuse("packed inputs beside others", raises(errors.OperandTypeError, "some are packed", "rnn.pad_packed_sequence("))
def packed_beside(backend):
    return flexsn.scan(lambda x, y, v: (x + y, v), [PACKED, torch.ones(3, 2)], [None], backend=backend), None


@misuse(
    "a `PackedSequence` in place of a list of inputs",
    raises(errors.OperandTypeError, "`inputs` must be a tuple", "rnn.pad_packed_sequence("),
)
def bare_packed(backend):
    return scan(backend, PACKED)


@misuse("sequences packed as pieces", raises(errors.PiecesError, "piece 0 of input `x` is PackedSequence", "rnn.pad_packed_sequence("))
def pieces_packed(backend):
    return scan(backend, [[PACKED, PACKED]])


@misuse("a Python number as a state", raises(errors.OperandTypeError, "state `v` must be a tensor, not float", "torch.as_tensor"))
def state_number(backend):
    return scan(backend, [X], [0.0])


@misuse("a Python number as a param", raises(errors.OperandTypeError, "param `w` must be a tensor, not float", "torch.as_tensor"))
def param_number(backend):
    return scan(backend, [X], [None], [0.5], lambda x, v, w: (x * w, v))


@misuse(
    "a numpy array of negative strides, through `torch.from_numpy`",
    passes_on(ValueError, "negative", whose="PyTorch's error, before flexsn is called"),
)
def negative_strides(backend):
    return scan(backend, [torch.from_numpy(X.numpy()[::-1])])


@misuse("a numpy array of negative strides, copied", gives("works"), slow=True)
def negative_strides_copied(backend):
    return both(backend, leaky, [torch.from_numpy(np.ascontiguousarray(X.numpy()[::-1]))], [V])


@misuse("inputs that differ in T", raises(errors.SequenceLengthError, "`x` has T = 5, `y` has T = 4"), triton=True)
def lengths(backend):
    return scan(backend, [X, X[1:]], [], core=lambda x, y: x + y)


@misuse("an input without a time dimension", raises(errors.SequenceLengthError, "`x` is 0-dimensional", "[T, *shape]"))
def no_time(backend):
    return scan(backend, [torch.tensor(1.0)])


@misuse("inputs whose shapes do not broadcast", raises(errors.ShapeMismatchError, "`x` [4, 3], `y` [4, 2]"), triton=True)
def shapes(backend):
    return scan(backend, [X, X[..., :2]], [], core=lambda x, y: x + y)


@misuse("a state whose shape does not broadcast", raises(errors.ShapeMismatchError, "`v` [7]"))
def state_shape(backend):
    return scan(backend, [X], [torch.zeros(7)])


@misuse("a param whose shape does not broadcast", raises(errors.CoreError, "`mul`", "7"), triton=True, torch=PYTORCH_SHAPES)
def param_shape(backend):
    return scan(backend, [X], [None], [torch.ones(7)], lambda x, v, w: (x * w, v))


@misuse("a captured tensor whose shape does not broadcast", raises(errors.CoreError, "`mul`", "7"), torch=PYTORCH_SHAPES)
def captured_shape(backend):
    w = torch.ones(7)
    return scan(backend, [X], [None], core=lambda x, v: (x * w, v))


@misuse("a state with a time dimension", gives("broadcasts: every step then has that shape"))
def state_with_time(backend):
    return both(backend, leaky, [X], [torch.stack([V] * 5)])


# --- dtypes ------------------------------------------------------------------------------------------------------------------
@misuse("an input of 16-bit complex numbers", raises(errors.UnsupportedDtypeError, "input `x` has dtype torch.complex32", "complex64"))
def complex_input(backend):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls the dtype experimental
        x = X.to(torch.complex32)
    return scan(backend, [x])


@misuse(
    "a complex state of a core that returns a real one", raises(errors.StateMismatchError, "goes in as complex64", "comes back as float32")
)
def complex_state(backend):
    return scan(backend, [X], [V + 0j], core=lambda x, v: (x, v.real))


@misuse("a float8 input", raises(errors.UnsupportedDtypeError, "float8_e4m3fn", "Convert"))
def float8_input(backend):
    return scan(backend, [X.to(torch.float8_e4m3fn)])


@misuse("a uint16 input", raises(errors.UnsupportedDtypeError, "torch.uint16", "Convert"))
def uint16_input(backend):
    return scan(backend, [X.to(torch.uint16)])


@misuse("a quantised input", raises(errors.OperandTypeError, "quantised", ".dequantize()"))
def quantised_input(backend):
    return scan(backend, [torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)])


@misuse("a bool input", gives("promotes as in PyTorch"), triton=True)
def bool_input(backend):
    return both(backend, leaky, [X > 0], [V])


@misuse("a uint8 input", gives("wraps around as in PyTorch"), triton=True)
def uint8_input(backend):
    return both(backend, lambda x, n: (x * 3 - n, n + 200), [(X + 2).to(torch.uint8)], [torch.zeros(4, 3, dtype=torch.uint8)])


@misuse("an int64 input beyond 2**53", gives("stays an integer"))
def int64_input(backend):
    x = torch.tensor([[2**62 + 1, -(2**63)], [1, -1]])
    return both(backend, lambda x, n: (x + n, n - x), [x], [torch.tensor([1, 1])])


@misuse("a half input on a CPU", gives("computes and carries float32"))
def half_input(backend):
    x, v = X.half(), V.half()
    got = flexsn.scan(leaky, [x], [v], backend=backend)
    return [*got.outputs, *got.states], [y.half() for y in loop(leaky, [x.float()], [v.float()])]


@misuse("a bfloat16 input and a float32 state", gives("promotes as in PyTorch"))
def bfloat16_input(backend):
    x = X.bfloat16()
    got = flexsn.scan(leaky, [x], [V], backend=backend)
    return [*got.outputs, *got.states], loop(leaky, [x.float()], [V])


@misuse("a float64 param with float32 inputs", gives("promotes as in PyTorch"), slow=True)
def double_param(backend):
    return both(backend, lambda x, w: x * w, params=[torch.full((3,), 0.1, dtype=torch.float64)])


@misuse("integer inputs with `requires_grad`", passes_on(RuntimeError, "floating point", whose="PyTorch's error, before flexsn is called"))
def integer_requires_grad(backend):
    return scan(backend, [X.int().requires_grad_()])


@misuse("division of integers by zero", gives("0, where PyTorch raises"), triton=True,
        torch=passes_on(RuntimeError, "ZeroDivisionError", whose="PyTorch's error at the core's line"))  # fmt: skip
def division_by_zero(backend):
    x = torch.tensor([[6, 7], [8, 9]])
    return flexsn.scan(lambda x: x // (x - x), [x], backend=backend).outputs, [torch.zeros_like(x)]


# --- layouts and subclasses -----------------------------------------------------------------------------------------------------
@misuse("a sparse input", raises(errors.OperandTypeError, "dense", "sparse_coo", ".to_dense()"), triton=True)
def sparse_input(backend):
    return scan(backend, [X.to_sparse()])


@misuse("a sparse CSR state", raises(errors.OperandTypeError, "dense", "sparse_csr", ".to_dense()"))
def sparse_state(backend):
    return scan(backend, [X], [V.to_sparse_csr()])


@misuse("a sparse tensor that the core captured", falls_back(errors.UnsupportedValueError, "captured tensor `w`", "dense", ".to_dense()"))
def sparse_captured(backend):
    w = torch.eye(4, 3).to_sparse()
    return both(backend, lambda x: x + w)


@misuse("an MKLDNN input", raises(errors.OperandTypeError, "dense", ".to_dense()"))
def mkldnn_input(backend):
    return scan(backend, [X.to_mkldnn()])


@misuse("a nested tensor as an input", raises(errors.OperandTypeError, "nested", "torch.nested.to_padded_tensor"))
def nested_input(backend):
    return scan(backend, [torch.nested.nested_tensor([X[0], X[1, :2]], layout=torch.jagged)])


class Named(torch.Tensor):
    """A subclass that changes nothing."""


@misuse("an input of a tensor subclass", gives("computes on it; a kernel returns plain tensors"))
def subclass_input(backend):
    got = flexsn.scan(leaky, [X.as_subclass(Named)], [V], backend=backend)
    return [y.as_subclass(torch.Tensor) for y in (*got.outputs, *got.states)], loop(leaky, [X], [V])


class Doubled(torch.Tensor):
    """A subclass that changes what its operators do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        return result + result if func is torch.mul else result


@misuse(
    "an input whose class overrides its operators",
    falls_back(errors.UnsupportedValueError, "`x` is a Doubled", ".as_subclass(torch.Tensor)"),
)
def overriding_input(backend):
    got = flexsn.scan(lambda x: torch.mul(x, 3.0), [X.as_subclass(Doubled)], backend=backend).outputs[0]
    return got.as_subclass(torch.Tensor), X * 6.0


@misuse("a `Parameter` as an input", gives("a tensor as any other"), slow=True)
def parameter_input(backend):
    x = torch.nn.Parameter(X.clone())
    return both(backend, leaky, [x], [V], wrt=[x])


# --- devices ----------------------------------------------------------------------------------------------------------------------
@misuse("a meta input", raises(errors.BackendError, "meta"), torch=gives("shapes only"), auto=gives("shapes only"))
def meta_input(backend):
    got = flexsn.scan(leaky, [X.to("meta")], [None], backend=backend)
    return [got.outputs[0].device.type, got.outputs[0].shape], ["meta", X.shape]


@misuse("a meta state", raises(errors.DeviceMismatchError, "state `v` is on meta but input `x` is on cpu"), triton=True)
def meta_state(backend):
    return scan(backend, [X], [V.to("meta")])


@misuse("a 0-dimensional param on the meta device", raises(errors.DeviceMismatchError, "param `w` is on meta"))
def meta_number(backend):
    return scan(backend, [X], [], [torch.tensor(1.0, device="meta")], lambda x, w: x * w)


@misuse("a captured tensor on the meta device", raises(errors.DeviceMismatchError, "captured tensor `w` is on meta"),
        torch=passes_on(RuntimeError, "meta", whose="PyTorch's error at the core's line"))  # fmt: skip
def meta_captured(backend):
    w = torch.ones(3, device="meta")
    return scan(backend, [X], [], [], lambda x: x * w)


# --- options ------------------------------------------------------------------------------------------------------------------------
@misuse("a backend that does not exist", raises(errors.BackendError, "unknown backend 'gpu'", "'cpp'"))
def unknown_backend(backend):
    return flexsn.scan(leaky, [X], [None], backend="gpu"), None


@misuse("a core that is not callable", raises(errors.ArgumentError, "core", "callable", "NoneType"))
def core_none(backend):
    return flexsn.scan(None, [X], [None], backend=backend), None


@misuse("a module's class in place of a module", raises(errors.ArgumentError, "class", "Core()"))
def core_class(backend):
    class Core(torch.nn.Module):
        def forward(self, x, v):
            return x, v

    return flexsn.scan(Core, [X], [None], backend=backend), None
