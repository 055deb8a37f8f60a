"""`flexsn.FlexSN` made, called, copied and shared in ways that it was not meant for."""

import copy
import pickle
import threading

import torch
from torch import nn

import flexsn
from flexsn import errors

from . import V, X, both, gives, group, leaky, loop, passes_on, raises

misuse = group("Modules")


def neuron(backend, core=leaky, **options):
    return flexsn.FlexSN(core, num_states=1, backend=backend, **options)


def after(*pieces, core=leaky):
    """Outputs of pieces of a sequence, one after another, from zeros."""
    return loop(core, [torch.cat(pieces)], [torch.zeros(pieces[0].shape[1:])])[0].split([len(x) for x in pieces])


# --- made ----------------------------------------------------------------------------------------------------------------------
@misuse("`num_states` and `num_inputs` left out", raises(errors.OperandCountError, "num_states cannot be inferred", "pass it"))
def no_counts(backend):
    return flexsn.FlexSN(leaky, backend=backend), None


@misuse("more states than the core has arguments", raises(errors.OperandCountError, "takes x, v", "do not fit"))
def states_too_many(backend):
    return flexsn.FlexSN(leaky, num_states=3, backend=backend), None


@misuse("a negative number of states", raises(errors.OperandCountError, "-1 states", "do not fit"))
def states_negative(backend):
    return flexsn.FlexSN(leaky, 3, -1, backend=backend), None


@misuse("a number of states that is no integer", raises(errors.ArgumentError, "num_states", "int", "float"))
def states_fraction(backend):
    return flexsn.FlexSN(leaky, num_states=1.0, backend=backend), None


@misuse("counts in the order of other libraries", raises(errors.OperandCountError, "do not fit"))
def counts_swapped(backend):
    return flexsn.FlexSN(lambda x, v, u: (x, v, u), 3, 2, backend=backend), None


@misuse("a `step_mode` that does not exist", raises(errors.ArgumentError, '"m"', '"s"', "'multi'"))
def step_mode(backend):
    return neuron(backend, step_mode="multi"), None


@misuse("a `step_mode` that does not exist, set later", raises(errors.ArgumentError, '"m"', '"s"', "'multi'"))
def step_mode_later(backend):
    made = neuron(backend)
    made.step_mode = "multi"
    return made(X), None


@misuse("a module with a backend that does not exist", raises(errors.BackendError, "unknown backend 'cupy'", "'cpp'"))
def backend_name(backend):
    return neuron("cupy"), None


@misuse("flags in `requires_grad` for the wrong number of operands", raises(errors.OperandCountError, "1 flags", "1 inputs + 1 states"))
def flags(backend):
    return neuron(backend, requires_grad=[True]), None


@misuse("gradients asked of an integer input by `requires_grad`", gives("none flows"), slow=True)
def flags_of_integers(backend):
    x = torch.arange(6).view(3, 2)
    return neuron(backend, requires_grad=[True, True])(x), after(x)


@misuse(
    "a number among the params of a module", raises(errors.OperandTypeError, "param `w` must be a tensor, not float", "torch.as_tensor")
)
def param_number_of_module(backend):
    return neuron(backend, lambda x, v, w: (x * w, v), params=[0.5]), None


@misuse("a core that is not callable, in a module", raises(errors.ArgumentError, "callable", "int"))
def module_of_number(backend):
    return flexsn.FlexSN(3, num_states=1, backend=backend), None


@misuse("a module around a module (`FlexSN(FlexSN(...))`)", raises(errors.ArgumentError, "FlexSN", "one step"))
def module_of_module(backend):
    return flexsn.FlexSN(neuron(backend), 1, 1, backend=backend), None


# --- called -----------------------------------------------------------------------------------------------------------------------
@misuse("too many inputs", raises(errors.OperandCountError, "needs 1 inputs but was given 2"), triton=True)
def inputs_too_many(backend):
    return neuron(backend)(X, X), None


@misuse("no input to a module", raises(errors.OperandCountError, "needs 1 inputs but was given 0"))
def module_no_input(backend):
    return neuron(backend)(), None


@misuse("an input by name", raises(errors.OperandCountError, "by position", "'x'"))
def input_by_name(backend):
    return neuron(backend)(x=X), None


@misuse(
    "a `PackedSequence` to a module of single steps",
    raises(errors.OperandTypeError, "input `x` must be a tensor, not PackedSequence", "rnn.pad_packed_sequence("),
)
def module_packed(backend):
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    return neuron(backend, step_mode="s")(packed), None


@misuse("`lengths` to a module of single steps", raises(errors.ArgumentError, "takes one step", 'step_mode="m"'))
def lengths_of_a_step(backend):
    return neuron(backend, step_mode="s")(X, lengths=torch.ones(X.shape[1], dtype=torch.long)), None


@misuse("a list of inputs to a module", raises(errors.OperandTypeError, "input `x` must be a tensor, not list"))
def module_list(backend):
    return neuron(backend)([X]), None


@misuse("a number to a single-step module", raises(errors.OperandTypeError, "input `x` must be a tensor, not float"))
def module_step_number(backend):
    return neuron(backend, step_mode="s")(1.0), None


@misuse("a list to a module with `example_outputs`", raises(errors.OperandTypeError, "input `x` must be a tensor, not list"))
def module_example_list(backend):
    return neuron(backend, example_outputs=[V])([1.0]), None


@misuse(
    "`requires_grad` at the position that it has in SpikingJelly's FlexSN",
    raises(errors.ArgumentError, "example_outputs must be a tensor per output", "(True, False)", "requires_grad=True"),
)
def gradients_by_position(backend):
    return flexsn.FlexSN(leaky, 1, 1, 1, (V, V), (True, False), backend=backend), None


@misuse("`example_outputs` of another number", raises(errors.OperandCountError, "example_outputs has 2 examples for num_outputs=1"))
def output_examples_too_many(backend):
    return neuron(backend, num_outputs=1, example_outputs=(V, V)), None


@misuse("`example_outputs` with T", raises(errors.ShapeMismatchError, "output 0 has steps of shape", "one step, without T"), slow=True)
def output_example_with_time(backend):
    return neuron(backend, example_outputs=[X])(X), None


@misuse("one step to a multi-step module", gives("the first dimension is taken for time"), slow=True)
def step_to_multi(backend):
    return neuron(backend)(V), after(V)


@misuse("a sequence to a single-step module", gives("all of it is one step"), triton=True)
def sequence_to_single(backend):
    return neuron(backend, step_mode="s")(X), after(X[None])[0][0]


@misuse("single steps and sequences mixed", gives("states are carried from one to the other"), triton=True)
def modes_mixed(backend):
    net = neuron(backend)
    found = [net(X[:2])]
    net.step_mode = "s"
    found.append(net(X[2])[None])
    net.step_mode = "m"
    return [*found, net(X[3:])], after(X[:2], X[2:3], X[3:])


@misuse("another batch size without `reset()`", raises(errors.ShapeMismatchError, "`v` [4, 3]", "`reset()`"), triton=True)
def batch_changes(backend):
    net = neuron(backend)
    net(X)
    return net(torch.ones(5, 7, 3)), None


@misuse("a batch of one after a larger one, without `reset()`", gives("broadcasts with the states, as in PyTorch"), triton=True)
def batch_shrinks(backend):
    net = neuron(backend)
    net(X)
    return net(X[:, :1]), after(X, X[:, :1].expand(5, 4, 3))[1]


@misuse("a larger batch after a batch of one, without `reset()`", gives("the states broadcast with it, as in PyTorch"))
def batch_grows(backend):
    net = neuron(backend)
    net(X[:, :1])
    return net(X), after(X[:, :1].expand(5, 4, 3), X)[1]


@misuse("another batch size after `reset()`", gives("works"), slow=True)
def batch_after_reset(backend):
    net = neuron(backend)
    net(X)
    net.reset()
    return net(X[:, :2]), after(X[:, :2])


@misuse("another dtype without `reset()`", raises(errors.StateMismatchError, "state `v`", "float32", "float64"))
def dtype_changes(backend):
    net = neuron(backend)
    net(X)
    return net(X.double()), None


@misuse("`.double()` between calls", gives("states are cast too"), slow=True)
def cast_between(backend):
    net = neuron(backend)
    net(X)
    return net.double()(X.double()), after(X.double(), X.double())[1]


@misuse("an optimizer step without `detach_states()` (truncated BPTT)",
        raises(errors.FreedGraphError, "a second time", "detach_states"),
        torch=passes_on(RuntimeError, "backward through the graph a second time", whose="PyTorch's error"), triton=True)  # fmt: skip
def not_detached(backend):
    w = nn.Parameter(torch.full((3,), 0.5))
    net = neuron(backend, lambda x, v: (v * w, torch.tanh(v * w + x)))
    for _ in range(2):
        net(X).sum().backward()
    return None, None


@misuse("a sample after another without `reset()`, each with its backward",
        raises(errors.FreedGraphError, "carried over from an earlier call", "flexsn.reset_net(model)"),
        torch=passes_on(RuntimeError, "backward through the graph a second time", whose="PyTorch's error"))  # fmt: skip
def not_reset(backend):
    net = nn.Sequential(nn.Linear(3, 4), flexsn.LIF(backend=backend), nn.Linear(4, 4), flexsn.LIF(backend=backend))
    for _ in range(2):
        net(X).sum().backward()
    return None, None


@misuse("`reset()` between forward and backward", gives("the gradients of the forward that ran"))
def reset_between(backend):
    net, x, y = neuron(backend), X.clone().requires_grad_(), X.clone().requires_grad_()
    loss = net(x).sum()
    net.reset()
    return [torch.autograd.grad(loss, [x]), net.states is None], [torch.autograd.grad(after(y)[0].sum(), [y]), True]


@misuse("a call under `no_grad`, then one that is differentiated", gives("gradients stop at the carried state"), slow=True)
def no_grad_before(backend):
    net, x, y = neuron(backend), X.clone().requires_grad_(), X.clone().requires_grad_()
    with torch.no_grad():
        net(X)
    want = after(X, y)[1]
    return torch.autograd.grad(net(x).sum(), [x]), torch.autograd.grad(want.sum(), [y])


@misuse("states carried out of `inference_mode` into training", gives("as constants"), triton=True)
def inference_before(backend):
    net, x, y = neuron(backend), X.clone().requires_grad_(), X.clone().requires_grad_()
    with torch.inference_mode():
        net(X)
    return torch.autograd.grad(net(x).sum(), [x]), torch.autograd.grad(after(X, y)[1].sum(), [y])


@misuse("a carried state changed in place between calls", gives("the next call starts from it"), slow=True)
def state_edited(backend):
    net = neuron(backend)
    net(X)
    net.states[0].zero_()
    return net(X), after(X)[0]


@misuse("a carried state changed in place before the backward", gives("the forward that ran has its own copy"))
def state_edited_before_backward(backend):
    net, x, y = neuron(backend), X.clone().requires_grad_(), X.clone().requires_grad_()
    out = net(x)
    net.states[0].detach().zero_()
    return torch.autograd.grad(out.sum(), [x]), torch.autograd.grad(after(y)[0].sum(), [y])


@misuse("`states` set to another number of tensors", raises(errors.OperandCountError, "2 states", "1"))
def states_set(backend):
    net = neuron(backend)
    net.states = [V, V]
    return net(X), None


@misuse("`states` set to a tensor", raises(errors.ArgumentError, "`states`", "list"))
def states_set_tensor(backend):
    net = neuron(backend)
    net.states = V
    return net(X), None


@misuse("`states` set to a list of numbers", raises(errors.OperandTypeError, "state `v` must be a tensor, not float"))
def states_set_number(backend):
    net = neuron(backend)
    net.states = [0.0]
    return net(X), None


@misuse("`init_states` that returns too few", raises(errors.OperandCountError, "0 states", "1"))
def init_states(backend):
    class Net(flexsn.FlexSN):
        @staticmethod
        def init_states(num_states, step_mode, *inputs):
            return []

    return Net(leaky, num_states=1, backend=backend)(X), None


@misuse("a call that fails", gives("leaves the carried states as they were"), triton=True)
def failed_call(backend):
    net = neuron(backend)
    net(X)
    try:
        net(torch.ones(5, 7, 3))
    except errors.ShapeMismatchError:
        return net(X), after(X, X)[1]
    return None, None


# --- copied, saved, shared -----------------------------------------------------------------------------------------------------------
@misuse("`copy.deepcopy` in the middle of a sequence", gives("both go on from there, apart"), triton=True)
def copied(backend):
    net = neuron(backend)
    net(X.clone().requires_grad_())
    twin = copy.deepcopy(net)
    want = after(X, X)[1]
    return [net(X), twin(X), twin.states[0] is net.states[0]], [want, want, False]


class Pickled(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x, v):
        return x * self.w, v + x


@misuse("a pickled module", gives("in the process that reads it"), slow=True)
def pickled(backend):
    net = neuron(backend, Pickled())
    net(X)
    twin = pickle.loads(pickle.dumps(net))
    return [twin(X), twin.states[0]], [X * 2.0, X.sum(0) * 2.0]


@misuse("a module around a lambda, pickled", passes_on(AttributeError, "pickle", whose="pickle's error"))
def pickled_lambda(backend):
    return pickle.dumps(neuron(backend, lambda x, v: (x, v))), None


@misuse("a `state_dict` with a param too few", passes_on(RuntimeError, "Missing key", whose="PyTorch's error"))
def state_dict(backend):
    return neuron(backend, Pickled()).load_state_dict({}), None


@misuse("`core` replaced after the module was made", gives("runs the new core"), triton=True)
def core_replaced(backend):
    net = neuron(backend)
    net(X)
    net.core, net.states = (lambda x, v: (x * 5.0, v)), None
    return net(X), X * 5.0


@misuse("one module in 8 threads at once, without states", gives("right results"), risky=True)
def threads(backend):
    net, found = flexsn.FlexSN(lambda x: x * 3.0, num_states=0, backend=backend), []
    workers = [threading.Thread(target=lambda: found.append(net(X))) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return found, [X * 3.0] * 8


@misuse("one module at two places of a network", gives("the second goes on with the states of the first"))
def shared(backend):
    net = neuron(backend)
    y, state = loop(leaky, [X], [torch.zeros(4, 3)])
    return nn.Sequential(net, net)(X), loop(leaky, [y], [state])[0]


@misuse("`T = 0` to a module", gives("empty output; states as they were"), triton=True)
def module_no_steps(backend):
    net = neuron(backend)
    net(X)
    empty = net(X[:0])
    return [empty, net(X)], [X[:0], after(X, X)[1]]


@misuse("a call under `torch.autocast`", gives("computes in the dtypes of its operands"))
def autocast(backend):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return both(backend, leaky, [X], [V])


@misuse("a module moved to the meta device in the middle of a sequence", raises(errors.DeviceMismatchError, "state `v` is on meta"))
def to_meta(backend):
    net = neuron(backend)
    net(X)
    return net.to("meta")(X), None


@misuse("`reset_net` of something that is no module", raises(errors.ArgumentError, "a module", "list", "torch.nn.ModuleList"))
def reset_list(backend):
    return flexsn.reset_net([neuron(backend)]), None


@misuse("`detach_states` of something that is no module", raises(errors.ArgumentError, "a module", "list", "torch.nn.ModuleList"))
def detach_list(backend):
    return flexsn.detach_states([neuron(backend)]), None


@misuse("`detach_states` before the first call", gives("nothing to do"), slow=True)
def detach_nothing(backend):
    net = neuron(backend)
    flexsn.detach_states(net)
    return net(X), after(X)


@misuse("a module whose parameters are shared with another", gives("gradients add up"), slow=True)
def shared_parameters(backend):
    core = Pickled()
    first, second = neuron(backend, core), neuron(backend, core)
    (first(X).sum() + second(X).sum()).backward()
    return core.w.grad, 2.0 * X.sum((0, 1))


@misuse("a surrogate of a Python number", raises(errors.OperandTypeError, "takes a tensor first, not float", "torch.as_tensor"))
def surrogate_number(backend):
    return neuron(backend, lambda x, v: (flexsn.surrogate.atan(1.0) + x, v))(X), None
