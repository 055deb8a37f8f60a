"""What a core does besides arithmetic: reads values into Python, writes in place."""

import contextlib
import warnings

import numpy as np
import torch
from torch import nn
from torch._dynamo.exc import Unsupported

import flexsn
from flexsn import errors

from . import V, X, both, falls_back, gives, group, loop, passes_on, raises

misuse = group("What a core reads and writes")


def scan(backend, core, inputs=(X,), states=(V,), params=()):
    return flexsn.scan(core, inputs, states, params, backend=backend), None


# --- values read into Python -----------------------------------------------------------------------------------------------------
@misuse("`.item()` of a state", falls_back(errors.ScalarReadError, "`item` reads the value", "Keep it a tensor"), triton=True)
def item(backend):
    return both(backend, lambda x, v: (x * v[0, 0].item(), v + x), states=[V])


@misuse("`float()` of a captured tensor", falls_back(errors.ScalarReadError, "tensor `w`", "Keep it a tensor"))
def captured_float(backend):
    w = torch.tensor(2.0)
    return both(backend, lambda x, v: (x * float(w), v + x), states=[V])


@misuse("`.tolist()`", falls_back(errors.ScalarReadError, "reads the value"))
def to_list(backend):
    return both(backend, lambda x, v: (x * v.tolist()[0][0], v + x), states=[V])


@misuse("`.numpy()`", falls_back(errors.ScalarReadError, "`numpy`"))
def to_numpy(backend):
    return both(backend, lambda x, v: (x * float(v.numpy().max()), v + x), states=[V])


@misuse("a numpy function of a tensor (`np.asarray(x)`)", falls_back(errors.ScalarReadError, "__array__"))
def numpy_function(backend):
    return both(backend, lambda x, v: (torch.from_numpy(np.maximum(np.asarray(x), 0)), v), states=[V])


@misuse("a product with a numpy array", gives("as in PyTorch"), slow=True)
def numpy_product(backend):
    gain = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.CapturedValueWarning)  # an array is taken as it is, which is said once per process
        return both(backend, lambda x, v: (x * torch.from_numpy(gain), v + x), states=[V])


@misuse("a product with a numpy number", gives("as in PyTorch"), slow=True)
def numpy_number(backend):
    gain = np.float64(0.1)
    return both(backend, lambda x, v: (x * gain, v + x), states=[V])


@misuse("`if` on a tensor", falls_back(errors.ControlFlowError, "control flow", "torch.where"), triton=True)
def branch(backend):
    return both(backend, lambda x, v: ((x if x.max() > 1 else x * 2.0), v + x), states=[V])


@misuse("`assert` on a tensor's values", falls_back(errors.ControlFlowError, "control flow"))
def assertion(backend):
    def core(x, v):
        assert (v < 100).all()
        return x, v + x

    return both(backend, core, states=[V])


def branches(x, v):
    h = v + x
    if h > 1:
        h = h * 0.0
    return h, h


BRANCH = {
    "outcome": passes_on(
        RuntimeError, "ambiguous", "flexsn ran the eager loop", "torch.where", whose="PyTorch's error, with flexsn's note"
    ),
    "torch": passes_on(RuntimeError, "ambiguous", whose="PyTorch's error at the core's line"),
    "cpp": raises(errors.ControlFlowError, "control flow", "torch.where"),
}


@misuse("`if` on a tensor of many values (`if h > 1:`)", **BRANCH)
def branch_on_many(backend):
    return scan(backend, branches)


@misuse("`if h > 1:` under `torch.compile(fullgraph=True)`",
        passes_on(Unsupported, "branching", "torch.cond", whose="Dynamo's error; in a core, write `torch.where(condition, a, b)`"))  # fmt: skip
def branch_compiled(backend):
    net = flexsn.FlexSN(branches, num_states=1, backend=backend)
    return torch.compile(net, fullgraph=True, backend="eager")(X), None


@misuse("`and` between tensors", **BRANCH)
def boolean_and(backend):
    return scan(backend, lambda x, v: ((x > 0) and (v > 0), v))


@misuse("`number in tensor`", falls_back(errors.ScalarReadError, "reads the value"))
def membership(backend):
    return both(backend, lambda x, v: (x * 2.0 if 3.0 in x else x, v), states=[V])


@misuse("`max(x, v)` of Python", falls_back(errors.ControlFlowError, "control flow"))
def python_max(backend):
    x, v = X[:, :1, :1], V[:1, :1]
    return both(backend, lambda x, v: (max(x, v), v), [x], [v])


@misuse("`for row in x`", gives("as in PyTorch"))
def iteration(backend):
    return both(backend, lambda x, v: (torch.stack([row * 2.0 for row in x]), v + x), states=[V])


@misuse("an f-string with a tensor", falls_back(errors.ScalarReadError, "__format__"), triton=True)
def format_string(backend):
    def core(x, v):
        assert f"{x.max():.3f} {v}"
        return x * 2.0, v + x

    return both(backend, core, states=[V])


@misuse("`str(x)`", falls_back(errors.ScalarReadError, "__repr__"))
def text(backend):
    def core(x, v):
        return x * float(len(str(x)) > 0), v + x

    return both(backend, core, states=[V])


@misuse("`print(x)` of a tensor", falls_back(errors.ScalarReadError, "__repr__", "store_state_seqs=True"), triton=True)
def printing_tensor(backend):
    def core(x, v):
        print(x, file=Discard())
        return x * 2.0, v + x

    return both(backend, core, states=[V])


class Discard:
    """A file that nobody reads."""

    def write(self, text):
        pass


@misuse("`print` of text", gives("is printed when the core is traced, not at every step"), slow=True)
def printing(backend):
    def core(x, v):
        print("step", file=Discard())
        return x * 2.0, v + x

    return both(backend, core, states=[V])


@misuse("`warnings.warn` in a core", gives("warns when the core is traced"))
def warning(backend):
    def core(x, v):
        warnings.warn("careful", stacklevel=2)
        return x * 2.0, v + x

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = both(backend, core, states=[V])
    assert any("careful" in str(w.message) for w in told)
    return result


@misuse("`x.requires_grad` as a condition", gives("reads as False"), torch=gives("reads what it is"))
def requires_grad_condition(backend):
    x = X.clone().requires_grad_()
    y = flexsn.scan(lambda x, v: (x * 3.0 if x.requires_grad else x * 2.0, v), [x], [V], backend=backend).outputs
    return y, (X * (3.0 if backend == "torch" else 2.0)).requires_grad_()


@misuse("`x.shape`, `len(x)`, `x.dtype`, `x.device` as values", gives("as in PyTorch"))
def metadata(backend):
    return both(backend, lambda x, v: (x * len(x) + x.shape[-1] + x.element_size(), v + x.numel() * (x.device.type == "cpu")), states=[V])


@misuse("a tensor as a key of a dict", gives("as in PyTorch"), slow=True)
def hashing(backend):
    return both(backend, lambda x, v: ({x: 2.0}[x] * x, v + x), states=[V])


# --- written in place ---------------------------------------------------------------------------------------------------------
@misuse("`v += x`", raises(errors.OperandMutationError, "operand `v`", "Write `v = v + x`"), triton=True)
def adds_in_place(backend):
    def core(x, v):
        v += x
        return v * 2.0, v

    v = V.clone()
    try:
        return scan(backend, core, states=[v])
    finally:
        assert backend == "torch" or torch.equal(v, V)


@misuse("`x[x > 1] = 0` of an input", raises(errors.OperandMutationError, "operand `x`"))
def writes_input(backend):
    def core(x, v):
        x[x > 1] = 0.0
        return x, v

    return scan(backend, core, [X.clone()])


@misuse("`w.mul_(2)` of a param", raises(errors.OperandMutationError, "operand `w`"), triton=True)
def writes_param(backend):
    def core(x, v, w):
        w.mul_(2.0)
        return x * w, v

    return scan(backend, core, params=[torch.ones(3)])


@misuse("`v.data.add_(x)`", raises(errors.OperandMutationError, "operand `v`"), torch=gives("as in PyTorch: the operand changes"))
def writes_data(backend):
    def core(x, v):
        v.data.add_(x)
        return v * 2.0, v

    return flexsn.scan(core, [X], [V.clone()], backend=backend).outputs, loop(core, [X], [V.clone()])[:1]


@misuse("`v.detach().add_(x)`", raises(errors.OperandMutationError, "operand `v`"))
def writes_detached(backend):
    def core(x, v):
        v.detach().add_(x)
        return v * 2.0, v

    return scan(backend, core, states=[V.clone()])


@misuse("a default state written in place", raises(errors.OperandMutationError, "operand `v`"), triton=True, torch=gives("as in PyTorch"))
def writes_default_state(backend):
    def core(x, v):
        v += x
        return v * 2.0, v

    return flexsn.scan(core, [X], [None], backend=backend).outputs, loop(core, [X], [torch.zeros(4, 3)])[:1]


@misuse("a captured tensor written in place", falls_back(errors.CapturedMutationError, "captured tensor `count`", "is a state"))
def writes_captured(backend):
    count = torch.zeros(3)

    def core(x, v):
        count.add_(1.0)
        return x * count, v

    return flexsn.scan(core, [X], [V], backend=backend).outputs, X * torch.arange(1.0, 6.0).view(5, 1, 1)


@misuse("a value that the core made, written in place", gives("as in PyTorch"), triton=True)
def writes_own(backend):
    def core(x, v):
        h = v + x
        h.mul_(0.5).add_(1.0)
        h *= x
        return h, h

    return both(backend, core, states=[V])


@misuse("a part of a value written (`h[0] = 1`)", falls_back(errors.InPlaceError, "views"))
def writes_part(backend):
    def core(x, v):
        h = v + x
        h[0] = 1.0
        return h, h

    return both(backend, core, states=[V])


@misuse("rows of a value written by a mask (`h[alive] = 9`)", falls_back(errors.NotElementwiseError, "`index_put`"))
def writes_rows(backend):
    alive = torch.tensor([True, False, True, False])

    def core(x, v):
        h = v + x
        h[alive] = 9.0
        return h, h * 0.5

    return both(backend, core, states=[V])


@misuse("columns of a value written (`h[:, idx] = 0`)", falls_back(errors.NotElementwiseError, "`index_put`"))
def writes_columns(backend):
    columns = torch.tensor([0, 2])

    def core(x, v):
        h = v + x
        h[:, columns] = 0.0
        return h, h * 0.5

    return both(backend, core, states=[V])


class KeptInRange(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([-1.0, 0.5, 3.0]))

    def forward(self, x, v):
        self.w.data = self.w.data.clamp(0.0, 1.0)
        h = v + x * self.w
        return h, h * 0.5


@misuse("`.data` of a parameter set", falls_back(errors.CapturedMutationError, "sets `.data` of captured tensor `w`"))
def sets_data_of_a_parameter(backend):
    core, other = KeptInRange(), KeptInRange()
    got, want = flexsn.scan(core, [X], [V], backend=backend).outputs, loop(other, [X], [V])[:1]
    return [*got, core.w.detach()], [*want, other.w.detach()]


@misuse("`.data` of a value set", falls_back(errors.InPlaceError, "sets `.data` of a tensor", "Compute a new one"))
def sets_data(backend):
    def core(x, v):
        h = v + x
        h.data = h.data.clamp(0.0, 1.0)
        return h, h * 0.5

    return both(backend, core, states=[V])


@misuse("`out=`", falls_back(errors.InPlaceError, "writes into an argument"))
def out_argument(backend):
    def core(x, v):
        h = torch.empty_like(x)
        torch.add(x, v, out=h)
        return h, h

    return both(backend, core, states=[V])


@misuse("`empty_like` and `copy_`", gives("as in PyTorch"), triton=True)
def copy_into_empty(backend):
    def core(x, v):
        h = torch.empty_like(x)
        h.copy_(v + x)
        return h * 2.0, h

    return both(backend, core, states=[V])


@misuse("`zeros_like(x)`, then `h[mask] = 1`", gives("as in PyTorch"), slow=True)
def masked_write(backend):
    def core(x, v):
        s = torch.zeros_like(x)
        s[x > v] = 1.0
        return s, v + x

    return both(backend, core, states=[V])


@misuse("`resize_` of a value", falls_back(errors.InPlaceError, "resize_"), torch=raises(errors.StateMismatchError, "state"),
        auto=raises(errors.StateMismatchError, "state"))  # fmt: skip
def resizes(backend):
    def core(x, v):
        h = x * 2.0
        h.resize_(2, 6)
        return x, h

    return scan(backend, core)


# --- refusals that a core swallows -------------------------------------------------------------------------------------------------
@misuse(
    "`.item()` inside `try`, with another answer in `except`",
    falls_back(errors.ScalarReadError, "`__float__` reads the value"),
    triton=True,
)
def swallows_read(backend):
    def core(x, v):
        try:
            gain = float(v.max())
        except Exception:  # the misuse itself: a core that hides an error
            gain = 0.0
        return x * gain, v + x

    return both(backend, core, states=[V])


@misuse("`if` on a tensor inside `try`", falls_back(errors.ControlFlowError, "control flow"))
def swallows_branch(backend):
    def core(x, v):
        try:
            y = x if x.max() > 1 else x * 2.0
        except Exception as error:  # the misuse itself: a core that hides an error
            raise ValueError("nothing but tensors here") from error
        return y, v + x

    return both(backend, core, states=[V])


@misuse("random numbers inside `contextlib.suppress`", falls_back(errors.RandomOpError, "draws random numbers"))
def swallows_random(backend):
    def core(x, v):
        noise = 0.0
        with contextlib.suppress(RuntimeError):
            noise = torch.rand_like(x)
        return x + noise, v

    torch.manual_seed(1)
    got = flexsn.scan(core, [X], [V], backend=backend).outputs
    torch.manual_seed(1)
    return got, loop(core, [X], [V])[:1]


@misuse("a write into an operand inside `try`", raises(errors.OperandMutationError, "operand `v`"), triton=True)
def swallows_write(backend):
    def core(x, v):
        try:
            v += x
        except Exception:  # the misuse itself: a core that hides an error
            v = v - x
        return v * 2.0, v

    return scan(backend, core, states=[V.clone()])


@misuse("an operator that PyTorch refuses, inside `try`", gives("takes the path that PyTorch takes"), triton=True)
def swallows_error(backend):
    def core(x, v):
        try:
            return x + torch.ones(7), v
        except RuntimeError:
            return x * 2.0, v + x

    return both(backend, core, states=[V])
