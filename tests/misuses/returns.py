"""What a core returns, and states that do not stay what they were."""

import collections
import dataclasses

import torch

import flexsn
from flexsn import errors

from . import V, X, both, falls_back, gives, group, leaky, loop, raises

misuse = group("Returns and states")
KERNEL = raises(errors.NotElementwiseError, "not elementwise", "A kernel handles each neuron by itself")


def scan(backend, core, inputs=(X,), states=(V,), params=()):
    return flexsn.scan(core, inputs, states, params, backend=backend), None


@misuse("nothing is returned", raises(errors.ReturnTypeError, "returned NoneType", "return *outputs, *new_states"), triton=True)
def returns_nothing(backend):
    def core(x, v):
        v = v + x

    return scan(backend, core)


@misuse("a dict is returned", raises(errors.ReturnTypeError, "returned dict", "return *outputs, *new_states"))
def returns_dict(backend):
    return scan(backend, lambda x, v: {"s": x, "v": v})


@misuse("a string is returned", raises(errors.ReturnTypeError, "returned str"))
def returns_string(backend):
    return scan(backend, lambda x, v: "spike")


@misuse("a number is returned", raises(errors.ReturnTypeError, "return value 0 is float, not a tensor", "torch.as_tensor"))
def returns_number(backend):
    return scan(backend, lambda x, v: (1.0, v))


@misuse("`None` among the returns", raises(errors.ReturnTypeError, "return value 1 is NoneType"))
def returns_none_state(backend):
    return scan(backend, lambda x, v: (x, None))


@misuse("a nested tuple is returned", raises(errors.ReturnTypeError, "return value 1 is tuple", "return *outputs, *new_states"))
def returns_nested(backend):
    return scan(backend, lambda x, v: (x, (v,)))


@misuse("a dataclass is returned", raises(errors.ReturnTypeError, "returned Result"))
def returns_dataclass(backend):
    @dataclasses.dataclass
    class Result:
        s: torch.Tensor

    return scan(backend, lambda x, v: Result(x))


@misuse("a list is returned", gives("as a tuple"), slow=True)
def returns_list(backend):
    return both(backend, lambda x, v: [x, v + x], states=[V])


@misuse("a named tuple is returned", gives("as a tuple"), slow=True)
def returns_named_tuple(backend):
    Result = collections.namedtuple("Result", "s v")
    return both(backend, lambda x, v: Result(x * 2.0, v + x), states=[V])


@misuse(
    "a tensor is returned where outputs and states are due, with as many rows",
    raises(errors.ReturnCountError, "returned 1 values"),
    triton=True,
)
def returns_bare_tensor(backend):
    return scan(backend, lambda x, v, w: x, states=[V, V])


@misuse("too few values are returned", raises(errors.ReturnCountError, "returned 1 values", "2 states"))
def returns_too_few(backend):
    return scan(backend, lambda x, v, w: (x,), states=[V, V])


@misuse(
    "states only are returned, to a module", raises(errors.ReturnCountError, "returned 1 values", "taken as the new states"), triton=True
)
def returns_states_only(backend):
    return flexsn.FlexSN(lambda x, v: v + x, num_states=1, backend=backend)(X), None


@misuse("another number of outputs than `num_outputs` says", raises(errors.ReturnCountError, "expected 2 outputs + 1 states"))
def returns_other_count(backend):
    return flexsn.FlexSN(leaky, 1, 1, 2, backend=backend)(X), None


@misuse("an input is returned unchanged", gives("a copy"), triton=True)
def returns_input(backend):
    x = X.clone().requires_grad_()
    return both(backend, lambda x, v: (x, v + x), [x], [V], wrt=[x])


@misuse("a state is returned unchanged, as output and as state", gives("the same at every step"), triton=True)
def returns_state(backend):
    v = V.clone().requires_grad_()
    return both(backend, lambda x, v: (v, v), [X], [v], wrt=[v])


@misuse("one tensor is returned twice", gives("two results; gradients add up"), triton=True)
def returns_twice(backend):
    def core(x, v):
        v = v * 0.5 + x
        return v, v, v

    x = X.clone().requires_grad_()
    return both(backend, core, [x], [V], wrt=[x])


@misuse("an input comes back as the new state", gives("the input of the step before"), slow=True)
def returns_input_as_state(backend):
    return both(backend, lambda x, v: (v, x), [X], [V])


@misuse("states change places", gives("at every step"), slow=True)
def swaps_states(backend):
    return both(backend, lambda x, v, w: (x + v, w, v), [X], [V, 2 * V])


@misuse("a param is returned", gives("the same at every step"), slow=True)
def returns_param(backend):
    w = torch.linspace(1, 2, 3).requires_grad_()
    return both(backend, lambda x, v, w: (w, v + x), [X], [V], [w], wrt=[w])


@misuse("a captured tensor is returned", gives("the same at every step"), slow=True)
def returns_captured(backend):
    w = torch.linspace(1, 2, 3).requires_grad_()
    return both(backend, lambda x, v: (w, v + x), [X], [V], wrt=[w])


@misuse("a constant is returned", gives("the same at every step"))
def returns_constant(backend):
    return both(backend, lambda x, v: (torch.ones(3), v + x), [X], [V])


@misuse("an output that is smaller than the step", gives("keeps its shape"))
def returns_small(backend):
    return both(backend, lambda x, y: (x * 2.0, y * 2.0), [X, X[:, :1]])


@misuse(
    "a constant of another shape is returned", falls_back(errors.NotElementwiseError, "return value 0 has shape [2]", "step shape [4, 3]")
)
def returns_foreign_constant(backend):
    return both(backend, lambda x, v: (torch.ones(2), v + x), [X], [V])


@misuse("an output that is larger than the step", gives("keeps its shape"))
def returns_large(backend):
    return both(backend, lambda x: x.expand(2, 4, 3) * torch.ones(2, 1, 1))


@misuse("a transposed output", gives("keeps its shape"))
def returns_transposed(backend):
    return both(backend, lambda x: x.t())


@misuse("an output of another shape by `reshape`", gives("keeps its shape"))
def returns_reshaped(backend):
    return both(backend, lambda x: (x * 2.0).reshape(-1))


@misuse("a part of the input is returned", gives("keeps its shape"))
def returns_slice(backend):
    return both(backend, lambda x: x[1:])


@misuse("a detached output", gives("no gradient flows"), slow=True)
def returns_detached(backend):
    x = X.clone().requires_grad_()
    return both(backend, lambda x, v: (x.detach() * 2.0, v + x), [x], [V], wrt=[x])


@misuse("a bool output", gives("a bool sequence"), triton=True)
def returns_bool(backend):
    return both(backend, lambda x, v: (x > v, v), [X], [V])


@misuse("a function of complex numbers without a rule", falls_back(errors.UnsupportedOpError, "`tanh` of complex numbers has no rule"))
def complex_inside(backend):
    return both(backend, lambda x, v: (torch.tanh(torch.complex(x, v)).real, v), [X], [V])


@misuse(
    "a float8 output",
    raises(errors.UnsupportedDtypeError, "return value 0 has dtype torch.float8_e4m3fn"),
    cpp=raises(errors.UnsupportedValueError, "float8_e4m3fn"),
)
def returns_float8(backend):
    return scan(backend, lambda x, v: (x.to(torch.float8_e4m3fn), v))


@misuse("a sparse output", raises(errors.ReturnTypeError, "return value 0", "dense", ".to_dense()"), cpp=KERNEL)
def returns_sparse(backend):
    return scan(backend, lambda x, v: (x.to_sparse(), v))


@misuse(
    "a quantised output",
    raises(errors.ReturnTypeError, "return value 0", "quantised"),
    cpp=raises(errors.UnsupportedOpError, "quantize_per_tensor", "no rule in the closed op set"),
)
def returns_quantised(backend):
    return scan(backend, lambda x, v: (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), v))


@misuse("a numpy array is returned", falls_back(errors.ScalarReadError, "numpy"), torch=raises(errors.ReturnTypeError, "return value 0 is ndarray", "torch.as_tensor"),
        auto=raises(errors.ReturnTypeError, "return value 0 is ndarray", "torch.as_tensor"))  # fmt: skip
def returns_numpy(backend):
    return scan(backend, lambda x, v: (x.numpy(), v))


@misuse(
    "a meta tensor is returned",
    raises(errors.DeviceMismatchError, "return value 0 is on meta"),
    cpp=raises(errors.UnsupportedOpError, "meta device"),
)
def returns_meta(backend):
    return scan(backend, lambda x, v: (x.to("meta"), v))


# --- states ------------------------------------------------------------------------------------------------------------------
@misuse(
    "a state that changes its dtype",
    raises(errors.StateMismatchError, "state `v` goes in as float32[4, 3] and comes back as float64[4, 3]"),
    triton=True,
)
def state_dtype(backend):
    return scan(backend, lambda x, v: (x, v.double()))


@misuse("an integer state that becomes a float", raises(errors.StateMismatchError, "state `n`", "int64", "float32"))
def state_integer(backend):
    return scan(backend, lambda x, n: (x, n + 0.5), states=[torch.zeros(4, 3, dtype=torch.int64)])


@misuse("a state that gains a dimension", raises(errors.StateMismatchError, "state `v`", "[4, 3]", "[1, 4, 3]"), cpp=KERNEL, triton=KERNEL)
def state_grows(backend):
    return scan(backend, lambda x, v: (x, (v + x)[None]))


@misuse("a default state that gains a dimension at every step", raises(errors.StateMismatchError, "state `v`"), cpp=KERNEL)
def default_state_grows(backend):
    return scan(backend, lambda x, v: (x, v[None]), states=[None])


@misuse("a state that shrinks", raises(errors.StateMismatchError, "state `v`", "[4, 3]", "[1, 3]"), cpp=KERNEL)
def state_shrinks(backend):
    return scan(backend, lambda x, v: (x, v[:1]))


@misuse("a default state that shrinks to what does not broadcast", raises(errors.StateMismatchError, "state `v`", "[4, 3]", "[4, 2]"),
        cpp=KERNEL)  # fmt: skip
def default_state_shrinks(backend):
    return scan(backend, lambda x, v: (x, (v * 0.5 + x)[..., :2]), states=[None])


@misuse("a state that is summed up over neurons", raises(errors.StateMismatchError, "state `v`", "[4, 3]", "[]"), cpp=KERNEL)
def state_sums(backend):
    return scan(backend, lambda x, v: (x, v.sum()))


@misuse("a state smaller than the step that grows to it", gives("broadcasts at the first step"), triton=True)
def state_broadcasts(backend):
    return both(backend, leaky, [X], [V[:1]])


@misuse("a default state whose dtype depends on the step before it", raises(errors.StateMismatchError, "state `v`"))
def default_state_flips(backend):
    return scan(backend, lambda x, v: (x, v.double() if v.dtype is torch.float32 else v.float()), states=[None])


@misuse("an integer input and a default state that the core makes a float", gives("the state is a float from the start"), slow=True)
def default_state_promotes(backend):
    x = torch.arange(6).view(3, 2)
    got = flexsn.scan(leaky, [x], [None], backend=backend)
    return [*got.outputs, *got.states], loop(leaky, [x], [torch.zeros(2)])


@misuse("a half state in float32 inputs", raises(errors.StateMismatchError, "state `v`", "float16", "float32"))
def half_state(backend):
    return scan(backend, leaky, states=[V.half()])


@misuse("states that require grad", gives("gradients reach them"), triton=True)
def state_requires_grad(backend):
    v = V.clone().requires_grad_()
    return both(backend, leaky, [X], [v], wrt=[v])
