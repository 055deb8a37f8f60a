"""Where operands lie in memory: strides, overlaps, aliases, nothing at all."""

import torch
from torch import nn

import flexsn
from flexsn import errors

from . import V, X, both, gives, group, leaky, loop, passes_on, raises

misuse = group("Memory: strides, aliases, sizes of zero")


@misuse("an expanded input (stride 0)", gives("reads it as it lies"), triton=True)
def expanded(backend):
    return both(backend, leaky, [X[:, :1, :1].expand(5, 4, 3)], [V])


@misuse("windows that overlap in memory", gives("reads them as they lie"), triton=True)
def overlapping(backend):
    return both(backend, leaky, [X.reshape(-1).as_strided((5, 4, 3), (6, 3, 1))], [V])


@misuse("a transposed input and a transposed state", gives("copies them first"), slow=True)
def transposed(backend):
    return both(backend, leaky, [X.permute(2, 1, 0)], [torch.linspace(0, 1, 20).view(5, 4).t()])


@misuse("a `channels_last` input", gives("results lie in memory as it does"), slow=True)
def channels_last(backend):
    x = torch.linspace(-1, 1, 5 * 2 * 3 * 4).view(5, 2, 3, 4).to(memory_format=torch.channels_last)
    return both(backend, leaky, [x], [torch.zeros(2, 3, 4)])


@misuse("a slice with strides of megabytes", gives("copies it first"), risky=True)
def huge_strides(backend):
    base = torch.zeros(5, 1 << 20)
    base[:, :: 1 << 18] = X[:, :, 0]
    return both(backend, leaky, [base[:, :: 1 << 18]], [V[:, 0]])


@misuse("floats at an address that is no multiple of 4", gives("the right numbers"), risky=True)
def unaligned(backend):
    raw = bytearray(b"\0" + X.numpy().tobytes() + bytes(64))
    x = torch.frombuffer(raw, dtype=torch.float32, offset=1, count=60).view(5, 4, 3)
    return both(backend, leaky, [x], [V])


@misuse("one tensor as both inputs", gives("gradients add up"), slow=True)
def same_input_twice(backend):
    x = X.clone().requires_grad_()
    return both(backend, lambda a, b, v: (a * b + v, v + a), [x, x], [V], wrt=[x])


@misuse("one tensor as state and as param", gives("gradients add up"), slow=True)
def state_is_param(backend):
    v = V.clone().requires_grad_()
    return both(backend, lambda x, v, w: (x * w, v * w), [X], [v], [v], wrt=[v])


@misuse("a state that is a view of the input", gives("gradients add up"), slow=True)
def state_views_input(backend):
    x = X.clone().requires_grad_()
    return both(backend, leaky, [x], [x[0]], wrt=[x])


@misuse("a view of somebody's storage as a state, written to after the call", gives("results have memory of their own"), triton=True)
def results_are_fresh(backend):
    x, v = X.clone(), V.clone()
    result = flexsn.scan(lambda x, v: (x, v), [x], [v], backend=backend)
    result.outputs[0].zero_()
    result.states[0].zero_()
    return [x, v], [X, V]


@misuse("a final state written to: the output that the core returned beside it", gives("results do not share memory"), slow=True)
def results_apart(backend):
    core = lambda x, v: (x + v,) * 2
    result = flexsn.scan(core, [X], [V], backend=backend)
    result.states[0].zero_()
    return result.outputs, loop(core, [X], [V])[:1]


@misuse("states of every step, one of them written to", gives("results do not share memory"), slow=True)
def sequences_apart(backend):
    result = flexsn.scan(lambda x, v, w: (x, v + x, v + x), [X], [V, V], store_state_seqs=True, backend=backend)
    result.states[0].zero_()
    return result.states[1], torch.stack([V + X[: t + 1].sum(0) for t in range(5)])


@misuse("T = 0", gives("empty outputs; states as given"), triton=True)
def no_steps(backend):
    got = flexsn.scan(leaky, [X[:0]], [V], backend=backend)
    return [*got.outputs, *got.states], [X[:0], V]


@misuse("T = 0 with default states", gives("empty outputs; zeros"), triton=True)
def no_steps_no_states(backend):
    got = flexsn.scan(leaky, [X[:0]], [None], backend=backend)
    return [*got.outputs, *got.states], [X[:0], torch.zeros(4, 3)]


@misuse("T = 0, and the final state written to", gives("results have memory of their own"), triton=True)
def no_steps_fresh(backend):
    v = V.clone()
    flexsn.scan(leaky, [X[:0]], [v], backend=backend).states[0].zero_()
    return v, V


@misuse("no neurons", gives("empty outputs"), triton=True)
def no_neurons(backend):
    return both(backend, leaky, [X[:, :0]], [V[:0]])


@misuse("no steps and no neurons", gives("empty outputs"), slow=True)
def nothing_at_all(backend):
    got = flexsn.scan(leaky, [X[:0, :, :0]], [None], backend=backend)
    return [*got.outputs, *got.states], [X[:0, :, :0], torch.zeros(4, 0)]


@misuse("gradients of T = 0", gives("the state's cotangent; zeros for params"), triton=True)
def no_steps_gradients(backend):
    x, v, w = X[:0].clone().requires_grad_(), V.clone().requires_grad_(), torch.ones(3, requires_grad=True)
    got = flexsn.scan(lambda x, v, w: (x * w + v, v * w), [x], [v], [w], backend=backend)
    loss = got.outputs[0].sum() + (got.states[0] * V).sum()
    gx, gv, gw = torch.autograd.grad(loss, [x, v, w], allow_unused=True)
    none = lambda g, like: torch.zeros_like(like) if g is None else g  # the loop has no step that touches w
    return [none(gx, x), gv, none(gw, w)], [X[:0], V, torch.zeros(3)]


@misuse("gradients of no neurons", gives("empty; zeros for params"), triton=True)
def no_neurons_gradients(backend):
    x, w = X[:, :0].clone().requires_grad_(), torch.ones(3, requires_grad=True)
    return both(backend, lambda x, v, w: (x * w + v, v * w), [x], [V[:0]], [w], wrt=[x, w])


@misuse("a size of zero that broadcasts with a size of one", gives("empty outputs"), slow=True)
def zero_and_one(backend):
    return both(backend, lambda x, y: x + y, [X[:, :1], X[:, :0]])


@misuse("an input `[T]` of single numbers", gives("one neuron"), slow=True)
def one_neuron(backend):
    return both(backend, leaky, [X[:, 0, 0]], [V[0, 0]])


@misuse("a step of more than 8 dimensions", gives("works"), slow=True)
def many_dimensions(backend):
    x = torch.linspace(-1, 1, 3 * 2**4).view(3, 2, 1, 2, 1, 1, 2, 1, 1, 2, 1)
    return both(backend, leaky, [x], [torch.zeros(2, 1, 2, 1, 1, 2, 1, 1, 2, 1)])


@misuse(
    "an input written to between forward and backward", passes_on(RuntimeError, "modified by an inplace operation", whose="PyTorch's error")
)
def input_written(backend):
    x, w = X.clone(), torch.ones(3, requires_grad=True)
    y = flexsn.scan(lambda x, v: (x * w, v), [x], [V], backend=backend).outputs[0]
    x.zero_()
    return y.sum().backward(), None


@misuse("a captured tensor written to between forward and backward",
        passes_on(RuntimeError, "modified by an inplace operation", whose="PyTorch's error"), triton=True)  # fmt: skip
def captured_written(backend):
    w = torch.ones(3, requires_grad=True)
    x = X.clone().requires_grad_()
    y = flexsn.scan(lambda x, v: (x * w, v), [x], [V], backend=backend).outputs[0]
    with torch.no_grad():
        w.zero_()
    return y.sum().backward(), None


@misuse("`.data` of a param set to another tensor between forward and backward",
        gives("differentiates by the new values, unnoticed, as PyTorch's own `x * w`"))  # fmt: skip
def data_replaced(backend):
    w = torch.ones(3, requires_grad=True)
    x = X.clone().requires_grad_()
    y = flexsn.scan(lambda x, v, w: (x * w, v), [x], [V], [w], backend=backend).outputs[0]
    w.data = torch.full((3,), 2.0)
    y.sum().backward()
    return x.grad, torch.full_like(X, 2.0)


@misuse("a captured variable set to another tensor between forward and backward", gives("differentiates what ran"), slow=True)
def captured_replaced(backend):
    w = first = torch.full((3,), 2.0, requires_grad=True)
    x = X.clone().requires_grad_()
    y = flexsn.scan(lambda x: torch.tanh(x * w), [x], backend=backend).outputs[0]
    w = torch.zeros(3)
    return torch.autograd.grad(y.sum(), [x, first]), torch.autograd.grad(torch.tanh(x * first).sum(), [x, first])


@misuse("an output written to before the backward", gives("the backward does not need it"))
def output_written(backend):
    x = X.clone().requires_grad_()
    y = flexsn.scan(lambda x, v: (x * 3.0, v), [x], [V], backend=backend).outputs[0]
    y = y.mul_(2.0)
    return torch.autograd.grad(y.sum(), [x]), torch.full_like(X, 6.0)


@misuse("a captured variable that was deleted", passes_on(NameError, "'w'"), triton=True)
def captured_deleted(backend):
    w = torch.ones(3)
    core = lambda x: x * w  # noqa: F821
    del w
    return flexsn.scan(core, [X], backend=backend), None


@misuse("a captured variable deleted after the first call", passes_on(NameError, "'w'"))
def captured_deleted_later(backend):
    w = torch.ones(3)
    core = lambda x: x * w  # noqa: F821
    flexsn.scan(core, [X], backend=backend)
    del w
    return flexsn.scan(core, [X], backend=backend), None


@misuse("a module's param deleted after the first call", passes_on(AttributeError, "no attribute 'w'"))
def param_deleted(backend):
    class Core(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.w

    neuron = flexsn.FlexSN(Core(), num_states=0, backend=backend)
    neuron(X)
    del neuron.core.w
    return neuron(X), None


@misuse(
    "captured storage that was freed (`untyped_storage().resize_(0)`)",
    raises(errors.OperandTypeError, "`w` has no memory", "storage was freed"),
    risky=True,
    triton=True,
)
def storage_freed(backend):
    w = torch.ones(3)
    w.untyped_storage().resize_(0)
    return flexsn.scan(lambda x: x * w, [X], backend=backend), None


@misuse("captured storage that was freed after the first call", raises(errors.OperandTypeError, "[3] has no memory", "storage was freed"), risky=True,
        torch=raises(errors.OperandTypeError, "`w` has no memory", "storage was freed"))  # fmt: skip
def storage_freed_later(backend):
    w = torch.ones(3)
    core = lambda x: x * w
    flexsn.scan(core, [X], backend=backend)
    w.untyped_storage().resize_(0)
    return flexsn.scan(core, [X], backend=backend), None


@misuse("an input whose storage was freed", raises(errors.OperandTypeError, "`x` has no memory", "storage was freed"), risky=True)
def input_freed(backend):
    x = X.clone()
    x.untyped_storage().resize_(0)
    return flexsn.scan(lambda x: x * 6.0, [x], backend=backend), None
