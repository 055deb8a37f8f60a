"""`FlexSN`: counts, states, registration of what is captured, copies."""

import copy
import functools
import io
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch
from cores import adlif, leaky, lif, relu_mem
from helpers import on_cpu
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import flexsn
from flexsn import FlexSN, errors
from flexsn.errors import OperandCountError, ReturnCountError

f64 = torch.float64


def lif_params():
    return [nn.Parameter(torch.tensor(1.75)), nn.Parameter(torch.tensor(0.5))]


class Core(nn.Module):
    def __init__(self, n=4):
        super().__init__()
        self.w = nn.Parameter(torch.rand(n))
        self.register_buffer("scale", torch.full((n,), 2.0))

    def forward(self, x, v):
        v = v * self.w + x * self.scale
        return v * v, v


def closure_neuron(n=4):
    w, scale = nn.Parameter(torch.rand(n)), torch.full((n,), 2.0)
    gate = [nn.Parameter(torch.tensor(0.25))]

    def core(x, v):
        v = v * w + x * scale
        return nn.functional.prelu(v, gate[0]), v

    return FlexSN(core, num_inputs=1, num_states=1, num_outputs=1), w, scale, gate


# --- calls ---------------------------------------------------------------------------------------------------------------
def test_counts_are_inferred():
    assert (FlexSN(lif, num_states=1, params=lif_params()).num_inputs, FlexSN(relu_mem, num_inputs=1).num_states) == (1, 1)
    net = FlexSN(adlif, 2, 2, 2, params=[torch.tensor(0.9), torch.tensor(0.5)])
    assert len(net(torch.randn(3, 4), torch.randn(3, 4))) == 2


def decaying(x, v, tau=2.0, gain=1.0):
    v = v + (gain * x - v) / tau
    return v, v


def test_params_fill_arguments_with_defaults():
    x, tau, gain = torch.rand(5, 3), torch.tensor(4.0), torch.tensor(0.5)
    for params in ([], [tau], [tau, gain]):
        net = FlexSN(decaying, num_states=1, params=params, backend="torch")
        assert net.num_inputs == 1 and net.param_names == ("tau", "gain")[: len(params)]
        assert torch.equal(net(x), flexsn.scan(decaying, [x], [None], params, backend="torch").outputs[0])
    two = FlexSN(lambda x, y, v, w=1.0: (x * y * w, v), num_inputs=2, num_states=1, params=[tau])
    assert (two.num_inputs, two.param_names) == (2, ("w",))


@pytest.mark.parametrize(
    ("core", "counts", "hint"),
    [(lambda x, v: (x, v), {"num_states": 2}, "(at least 1) and `num_states=`, 2 together"),
     (decaying, {"num_states": 3, "params": [torch.ones(())]}, "(at least 1) and `num_states=`, 1 to 3 together"),
     (lambda x, v: (x, v), {"num_states": 1, "params": [torch.ones(())] * 3}, "3 params leave none of its 2 arguments for an input")],
)  # fmt: skip
def test_counts_that_do_not_fit_say_which_would(core, counts, hint):
    with pytest.raises(OperandCountError, match="do not fit") as caught:
        FlexSN(core, **counts)
    assert hint in caught.value.hint


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_sequence_call(backend):
    x = torch.randn(7, 4)
    net = FlexSN(lif, 1, 1, 1, params=lif_params(), backend=backend, store_state_seqs=True)
    y = net(x)
    want = flexsn.scan(lif, [x], [None], list(net.parameters()), backend="torch", store_state_seqs=True)
    assert torch.equal(y, want.outputs[0]) and torch.equal(net.state_seqs[0], want.states[0])
    assert torch.equal(net.states[0], want.states[0][-1])


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_single_steps_are_the_sequence(backend):
    x = torch.randn(7, 4)
    whole = FlexSN(lif, 1, 1, 1, params=lif_params(), backend=backend)
    steps = FlexSN(lif, 1, 1, 1, params=lif_params(), backend=backend, step_mode="s")
    assert torch.equal(torch.stack([steps(row) for row in x]), whole(x))
    assert torch.equal(steps.states[0], whole.states[0])


def test_states_are_carried_until_reset():
    x = torch.randn(8, 4)
    net = FlexSN(lif, 1, 1, 1, params=lif_params())
    whole = net(x).detach()
    net.reset()
    assert net.states is None
    assert torch.equal(torch.cat([net(x[:3]), net(x[3:])]), whole)
    flexsn.reset_net(nn.Sequential(net))
    assert torch.equal(net(x), whole)


@pytest.mark.parametrize("initial", [None, [0.3]])
def test_a_neuron_without_state_starts_anew(initial):
    x = torch.randn(8, 4)
    net = FlexSN(lif, 1, 1, 1, params=lif_params(), stateful=False, initial_states=initial, store_state_seqs=True)
    want = FlexSN(lif, 1, 1, 1, params=lif_params(), initial_states=initial, store_state_seqs=True)
    for piece in (x, x[:3], x):  # other batch sizes need no reset either
        want.reset()
        net.states = [torch.ones(())]  # as another value of `stateful` may have left them
        assert torch.equal(net(piece), want(piece)) and net.states is None
        assert torch.equal(net.state_seqs[0], want.state_seqs[0])
    copied = copy.deepcopy(net)
    assert torch.equal(copied(x), net(x)) and copied.states is None
    assert torch.equal(flexsn.LIF(stateful=False)(x), flexsn.LIF()(x))
    with pytest.raises(errors.ArgumentError, match="every step would start anew"):
        FlexSN(lif, 1, 1, 1, params=lif_params(), stateful=False, step_mode="s")


@pytest.mark.parametrize("compiled", [False, True])
def test_states_may_be_carried_as_values(compiled):
    """A backward ends where its call began, whatever came before."""
    make = lambda stateful: FlexSN(lif, 1, 1, 1, params=lif_params(), stateful=stateful)
    net, want = make("detached"), make(True)
    call = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
    for _ in range(3):
        x = torch.randn(5, 4, requires_grad=True)
        y = want.params.tau * call(x)
        assert not net.states[0].requires_grad and net.states[0].grad_fn is None
        (got,) = torch.autograd.grad(y.sum(), x)
        (expected,) = torch.autograd.grad((want.params.tau * want(x)).sum(), x)
        want.detach_states()
        torch.testing.assert_close(got, expected)
        assert torch.equal(net.states[0], want.states[0])
    net.reset()
    assert net.states is None


def test_single_steps_may_carry_values():
    x = torch.randn(5, 4, requires_grad=True)
    net = FlexSN(lif, 1, 1, 1, params=lif_params(), stateful="detached", step_mode="s")
    want = FlexSN(lif, 1, 1, 1, params=lif_params())
    assert torch.equal(torch.stack([net(step) for step in x.unbind(0)]), want(x))
    with pytest.raises(errors.ArgumentError, match=r"stateful must be True, False or .detached., not 'detach'"):
        FlexSN(lif, 1, 1, 1, params=lif_params(), stateful="detach")


def test_detach_states():
    x = torch.randn(4, 4, requires_grad=True)
    net = FlexSN(lif, 1, 1, 1, params=lif_params())
    net(x)
    assert net.states[0].requires_grad
    flexsn.detach_states(nn.ModuleList([net]))
    assert not net.states[0].requires_grad
    later = torch.randn(4, 4, requires_grad=True)
    net(later).sum().backward()
    assert x.grad is None and later.grad is not None


def test_gradients_flow_through_carried_states():
    x, xs = torch.randn(6, 4, dtype=f64), []
    for split in (False, True):
        leaf = x.clone().requires_grad_()
        net = FlexSN(leaky, 1, 1, 1, params=[torch.tensor(0.5, dtype=f64)])
        y = torch.cat([net(leaf[:2]), net(leaf[2:])]) if split else net(leaf)
        y.square().sum().backward()
        xs.append(leaf.grad)
    torch.testing.assert_close(*xs)


def test_overridden_init_states():
    class Charged(FlexSN):
        @staticmethod
        def init_states(num_states, step_mode, *inputs):
            return [torch.full_like(inputs[0][0] if step_mode == "m" else inputs[0], 2.0)]

    net = Charged(leaky, 1, 1, 1, params=[torch.tensor(1.0)])
    net(torch.zeros(3, 4))
    assert torch.equal(net.states[0], torch.full((4,), 2.0))


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_initial_states(backend, dtype):
    x = torch.randn(5, 3, 4).to(dtype)
    params = [torch.tensor(0.9), torch.tensor(0.5)]
    net = FlexSN(adlif, 2, 2, 2, params=params, backend=backend, initial_states=[None, -0.5], store_state_seqs=True)
    got = net(x, x)
    starts = [torch.zeros(3, 4, dtype=dtype), torch.full((3, 4), -0.5, dtype=dtype)]
    want = flexsn.scan(adlif, [x, x], starts, params, backend=backend, store_state_seqs=True)
    for a, b in zip((*got, *net.state_seqs), (*want.outputs, *want.states), strict=True):
        assert a.dtype is dtype and torch.equal(a, b)
    carried = net(x, x)
    net.reset()
    assert torch.equal(net(x, x)[1], got[1]) and not torch.equal(carried[1], got[1])
    steps = FlexSN(adlif, 2, 2, 2, params=params, backend=backend, initial_states=[None, -0.5], step_mode="s")
    if dtype is not torch.bfloat16:  # which rounds at the end of every call
        assert torch.equal(torch.stack([steps(row, row)[1] for row in x]), got[1])


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_initial_states_take_the_dtype_of_inputs_and_parameters(backend):
    net = FlexSN(leaky, 1, 1, 1, params=[torch.full((4,), 0.5, dtype=f64)], backend=backend, initial_states=[1.0])
    net(torch.zeros(2, 4))
    assert torch.equal(net.states[0], torch.full((4,), 0.25, dtype=f64))
    net = FlexSN(leaky, 1, 1, 1, params=[torch.tensor(0.5, dtype=f64)], backend=backend, initial_states=[1.0])
    net(torch.zeros(2, 4, dtype=torch.int32))
    assert torch.equal(net.states[0], torch.full((4,), 0.25))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_initial_states_from_a_function(backend):
    v0 = torch.rand(4, requires_grad=True)
    net = FlexSN(leaky, 1, 1, 1, params=[torch.tensor(0.5)], backend=backend, initial_states=lambda x: [v0 + x[0].mean()])
    net(torch.ones(3, 4)).sum().backward()
    want = flexsn.scan(leaky, [torch.ones(3, 4)], [v0 + 1.0], [torch.tensor(0.5)], backend="torch")
    (grad,) = torch.autograd.grad(want.outputs[0].sum(), v0)
    torch.testing.assert_close(v0.grad, grad)
    assert torch.equal(net.states[0], want.states[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:`torch.jit.script_method` is deprecated")  # PyTorch's own
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_initial_states_in_a_compiled_call(backend):
    net = FlexSN(leaky, 1, 1, 1, params=[torch.tensor(0.5)], backend=backend, initial_states=[1.5])
    compiled, x = torch.compile(net, fullgraph=True, backend="aot_eager"), torch.rand(5, 4)
    got = [compiled(x), compiled(x)]
    net.reset()
    again = compiled(x)
    net.reset()
    want = [net(x), net(x)]
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and torch.equal(again, want[0])


def test_initial_states_that_do_not_fit():
    with pytest.raises(OperandCountError, match="one number or None for each"):
        FlexSN(leaky, 1, 1, 1, params=[torch.tensor(0.5)], initial_states=[1.0, 2.0])
    with pytest.raises(OperandCountError, match="one number or None for each"):
        FlexSN(leaky, 1, 1, 1, params=[torch.tensor(0.5)], initial_states=[torch.zeros(4)])


def test_zero_steps():
    net = FlexSN(lif, 1, 1, 1, params=lif_params(), store_state_seqs=True)
    assert net(torch.randn(0, 4)).shape == (0, 4) and torch.equal(net.states[0], torch.zeros(4))
    y = net(torch.randn(3, 4))
    assert y.shape == (3, 4) and net.state_seqs[0].shape == (3, 4)


def scaled(x, v, gain):
    return gain * x, v


def scaling(gain):
    return lambda x, v: (gain * x, v)


class Scaling:
    def __init__(self, gain):
        self.gain = gain

    def __call__(self, x, v):
        return self.gain * x, v


@pytest.mark.parametrize(
    "make", [lambda gain: functools.partial(scaled, gain=gain), scaling, Scaling], ids=["partial", "closure", "object"]
)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_another_core_of_the_same_kind_is_seen(make, backend):
    x, net = torch.rand(5, 3), FlexSN(make(2.0), 1, 1, backend=backend)
    assert torch.equal(net(x), 2 * x)
    net.core, net.states = make(3.0), None
    assert torch.equal(net(x), 3 * x)


def test_mistakes():
    with pytest.raises(OperandCountError, match="needs 1 inputs but was given 2"):
        FlexSN(lif, 1, 1, 1, params=lif_params())(torch.randn(3, 4), torch.randn(3, 4))
    with pytest.raises(OperandCountError, match="num_states"):
        FlexSN(lif)
    with pytest.raises(OperandCountError, match="do not fit"):
        FlexSN(lif, 3, 2)
    with pytest.raises(ReturnCountError, match="2 outputs"):
        FlexSN(lif, 1, 1, 2, params=lif_params())(torch.randn(3, 4))
    with pytest.raises(ReturnCountError, match=r"returned 1 values, and the last 1 are taken as the new states \(num_states=1\)"):
        FlexSN(lambda x, v: x + v, 1, 1)(torch.randn(3, 4))
    with pytest.raises(ValueError, match="step_mode"):
        FlexSN(lif, 1, 1, 1, step_mode="x")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # PyTorch's own
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("options", [{}, {"backend": "torch"}, {"example_outputs": torch.zeros(4)}], ids=["auto", "torch", "no steps"])
def test_a_mode_that_is_set_wrong_later_is_refused(options, compiled):
    """With the error of the constructor, also where one setting makes the other wrong; a module that is set right again runs on."""
    x = torch.rand(0 if "example_outputs" in options else 3, 4)
    for wrong in ({"step_mode": "x"}, {"step_mode": None}, {"stateful": "detach"}, {"step_mode": "s", "stateful": False}):
        torch._dynamo.reset()
        with pytest.raises(errors.ArgumentError) as at_once:
            FlexSN(relu_mem, 1, 1, **wrong)
        net = FlexSN(relu_mem, 1, 1, **options)
        call = torch.compile(net, backend="eager") if compiled else net
        assert call(x).shape == x.shape
        before = net.states[0].clone()
        for name, value in wrong.items():
            setattr(net, name, value)
        with pytest.raises(errors.ArgumentError) as later:
            call(x)
        assert str(later.value).splitlines()[0] == str(at_once.value).splitlines()[0]
        assert torch.equal(net.states[0], before)
        net.step_mode, net.stateful = "m", True
        assert call(x).shape == x.shape


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("mode", ["m", "s"])
def test_both_modes_by_name(mode, backend):
    """`multi_step_forward` and `single_step_forward` take their own shapes whatever the module's mode is, and leave that."""
    x = torch.rand(5, 3)
    net, want = FlexSN(relu_mem, 1, 1, step_mode=mode, backend=backend), FlexSN(relu_mem, 1, 1)(x)
    assert torch.equal(net.multi_step_forward(x[:3]), want[:3])
    assert torch.equal(net.single_step_forward(x[3]), want[3]) and torch.equal(net.single_step_forward(x[4]), want[4])
    assert net.step_mode == mode
    with pytest.raises(OperandCountError):
        net.multi_step_forward(x, x)
    assert net.step_mode == mode and set("ms") == set(net.supported_step_mode())
    with pytest.raises(errors.ArgumentError, match="every step would start anew"):
        FlexSN(relu_mem, 1, 1, stateful=False).single_step_forward(x[0])


def test_supported_backends_are_those_that_can_be_set():
    net, x = FlexSN(relu_mem, 1, 1, stateful=False), torch.rand(5, 3)
    names, want = net.supported_backends, net(x)
    assert isinstance(names, tuple) and set(names) == {"auto", "cpp", "torch", "triton", "inductor", "hop"}
    for name in names:
        assert FlexSN(relu_mem, 1, 1, backend=name).backend == name
    for net.backend in ("auto", "torch", "hop", "cpp" if x.is_cpu else "triton"):  # the others serve other devices
        assert torch.equal(net(x), want)


def test_repr_names_the_core():
    assert "lif" in repr(FlexSN(lif, 1, 1, 1, params=lif_params())) and "num_states=1" in repr(FlexSN(relu_mem, 1))


# --- registration --------------------------------------------------------------------------------------------------------------
def test_captured_tensors_are_registered():
    net, w, scale, gate = closure_neuron()
    assert {id(p) for p in net.parameters()} == {id(w), id(gate[0])}
    assert [b is scale for b in net.buffers()] == [True]
    assert dict(net.named_parameters()).keys() == {"w", "gate_0"}
    assert net.state_dict().keys() == {"w", "scale", "gate_0"}


def test_gradients_reach_the_users_parameter_and_steps_are_seen(counts):
    net, w, _, gate = closure_neuron()
    x = torch.randn(5, 4)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for _ in range(3):
        net.reset()
        optimizer.zero_grad()
        y = net(x)
        want = flexsn.scan(net.core, [x], [None], backend="torch").outputs[0]
        torch.testing.assert_close(y, want)
        y.sum().backward()
        assert w.grad is not None and gate[0].grad is not None
        optimizer.step()
    assert counts.programs == 1


def test_module_core_is_a_submodule():
    net = FlexSN(Core(), 1, 1, 1)
    assert net.state_dict().keys() == {"core.w", "core.scale"} and len(list(net.parameters())) == 1
    net(torch.randn(3, 4)).sum().backward()
    assert net.core.w.grad is not None


def module_neuron():
    return FlexSN(Core(), 1, 1, 1)


def param_neuron():
    return FlexSN(leaky, 1, 1, 1, params=[nn.Parameter(torch.rand(4))])


MAKERS = {"closure": lambda: closure_neuron()[0], "module": module_neuron, "params": param_neuron}


def eager(net, x):
    """The same module in the eager loop, from the same state."""
    other = copy.deepcopy(net)
    other.backend = "torch"
    return other(x)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_deepcopy_is_independent(make, counts):
    net, x = make(), torch.randn(5, 4)
    before = net(x).detach()
    net.reset()
    twin = copy.deepcopy(net)
    assert not {id(t) for t in net.state_dict(keep_vars=True).values()} & {id(t) for t in twin.state_dict(keep_vars=True).values()}
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(0.5)
    changed = twin(x)
    assert not torch.equal(changed, before)
    twin.reset()
    torch.testing.assert_close(changed, eager(twin, x))
    assert torch.equal(net(x), before)
    twin(x).sum().backward()
    assert all(p.grad is not None for p in twin.parameters()) and all(p.grad is None for p in net.parameters())
    assert counts.programs == 1


def test_states_beside_a_checkpoint():
    """A stream goes on in another process from what `get_states` gave."""
    net, x = nn.Sequential(flexsn.ALIF(), nn.Linear(4, 4), flexsn.LIF(), flexsn.LIF(stateful=False)), 3.0 * torch.rand(9, 2, 4)
    net(x[:5])
    file = io.BytesIO()
    torch.save({"model": net.state_dict(), "states": flexsn.get_states(net)}, file)
    assert sorted(flexsn.get_states(net)) == ["0", "2"] and not flexsn.get_states(net)["0"][0].requires_grad
    want = net(x[5:])
    other = nn.Sequential(flexsn.ALIF(), nn.Linear(4, 4), flexsn.LIF(), flexsn.LIF(stateful=False))
    other(x)
    file.seek(0)
    saved = torch.load(file)
    other.load_state_dict(saved["model"])
    flexsn.set_states(other, saved["states"])
    assert torch.equal(other(x[5:]), want)
    flexsn.set_states(other, {})
    assert other[0].states is None
    with pytest.raises(errors.ArgumentError, match=r"no neuron \['1'\]"):
        flexsn.set_states(other, {"1": []})
    with pytest.raises(errors.OperandCountError, match="carries 1 states"):
        flexsn.set_states(other, {"0": [torch.zeros(2, 4)]})
    with pytest.raises(errors.ArgumentError, match="not a dict"):
        flexsn.set_states(other, [[torch.zeros(2, 3)]])
    with pytest.raises(errors.ArgumentError, match="a module"):
        flexsn.get_states([net])


class LearnedStart(nn.Module):
    """Starts from a learned state, which a function beside the core reads."""

    def __init__(self, bound=False):
        super().__init__()
        self.v0 = nn.Parameter(torch.full((6,), -3.0))
        self.neuron = flexsn.LIF(initial_states=self.start if bound else lambda x: [self.v0], stateful=False)

    def start(self, x):
        return [self.v0]

    def forward(self, x):
        return self.neuron(x)


@pytest.mark.parametrize("bound", [False, True])
def test_a_copy_starts_from_its_own_states(bound):
    net, x = LearnedStart(bound), 3.0 * torch.rand(9, 2, 6)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.v0.zero_()
    assert not torch.equal(twin(x), net(x)) and torch.equal(twin(x), flexsn.LIF()(x))
    twin(x).sum().backward()
    assert twin.v0.grad is not None and net.v0.grad is None
    average = torch.optim.swa_utils.AveragedModel(net)
    with torch.no_grad():
        net.v0.zero_()
    assert not torch.equal(average(x), net(x))


@pytest.mark.parametrize("make", [lambda x: torch.full_like(x, 0.5), lambda x: x])
def test_an_initial_state_of_the_whole_sequence_is_refused(make):
    x = torch.rand(9, 2, 6)
    with pytest.raises(flexsn.errors.ShapeMismatchError, match=r"\[9, 2, 6\], that of the sequence; a step is \[2, 6\]"):
        flexsn.LIF(initial_states=lambda x: [make(x)])(x)
    y = flexsn.LIF(initial_states=lambda x: [make(x)[0]])(x)
    assert y.shape == x.shape


def test_deepcopy_with_states_in_a_graph():
    net, x = module_neuron(), torch.randn(5, 4)
    net(x)
    twin = copy.deepcopy(net)
    assert torch.equal(twin.states[0], net.states[0]) and not twin.states[0].requires_grad
    assert torch.equal(twin(x), net(x))


@pytest.mark.parametrize("make", [module_neuron, param_neuron])
def test_pickle(make):
    net, x = make(), torch.randn(5, 4)
    want = net(x).detach()
    net.reset()
    for twin in (pickle.loads(pickle.dumps(net)), torch.load(_saved(net), weights_only=False)):
        assert torch.equal(twin(x), want)
        twin(x).sum().backward()


def _saved(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_state_dict_round_trip(make):
    net, other, x = make(), make(), torch.randn(5, 4)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    for assign in (False, True):
        target = make()
        target.load_state_dict(other.state_dict(), assign=assign)
        other.reset()
        assert torch.equal(target(x), other(x))
    assert not torch.equal(net(x), other(x))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_to_another_dtype(make):
    net, x = make(), torch.randn(5, 4)
    single = net(x).detach()
    net.to(f64)
    assert net.states[0].dtype is f64
    net.reset()
    double = net(x.double())
    assert double.dtype is f64 and double.shape == single.shape
    torch.testing.assert_close(double.float(), single)
    net.reset()
    torch.testing.assert_close(double, eager(net, x.double()))
    double.sum().backward()
    assert all(p.grad is not None and p.grad.dtype is f64 for p in net.parameters())


def test_two_modules_of_one_closure_are_independent_after_a_copy():
    net, w, *_ = closure_neuron()
    twin = copy.deepcopy(net)
    with torch.no_grad():
        w.zero_()
    x = torch.randn(5, 4)
    assert not torch.equal(net(x), twin(x))
    assert torch.equal(flexsn.scan(net.core, [x], [None]).outputs[0], flexsn.scan(net.core, [x], [None], backend="torch").outputs[0])


def test_functional_call_on_a_network():
    net = nn.Sequential(nn.Linear(4, 4), closure_neuron()[0])
    x = torch.randn(5, 4)
    other = {n: (p.detach() + 0.25).requires_grad_() for n, p in net.named_parameters()}
    got = torch.func.functional_call(net, other, (x,))
    flexsn.reset_net(net)
    net[1].backend = "torch"
    want = torch.func.functional_call(net, other, (x,))
    torch.testing.assert_close(got, want)
    for a, b in zip(
        torch.autograd.grad(got.sum(), list(other.values())), torch.autograd.grad(want.sum(), list(other.values())), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_rebinding_the_closure_of_a_module():
    w = nn.Parameter(torch.rand(4))

    def core(x, v):
        return x * w, v

    net, x = FlexSN(core, 1, 1, 1), torch.randn(3, 4)
    net(x)
    w = nn.Parameter(torch.rand(4))
    assert torch.equal(net(x), x * w)
    assert [p is w for p in net.parameters()] == [True]


def test_a_network_trains():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 16), FlexSN(lif, 1, 1, 1, params=lif_params()), nn.Linear(16, 1))
    x = torch.rand(10, 64, 3)
    target = (x.mean(0).sum(1, keepdim=True) > 1.5).float()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    losses = []
    for _ in range(100):
        flexsn.reset_net(net)
        loss = nn.functional.binary_cross_entropy_with_logits(net(x).mean(0), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


# --- copies, hooks, threads, processes ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "make", [module_neuron, pytest.param(lambda: nn.Sequential(nn.Linear(4, 4), param_neuron()), marks=pytest.mark.slow)]
)
def test_a_whole_module_in_another_process(make, tmp_path):
    net, x = make(), torch.randn(5, 4)
    want = net(x)
    flexsn.reset_net(net)
    torch.save((net, x, want.detach()), tmp_path / "net.pt")
    code = f"import torch; net, x, want = torch.load({str(tmp_path / 'net.pt')!r}, weights_only=False); assert torch.equal(net(x), want)"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_averaged_models(make):
    """An EMA copy, made from the net and run on its own."""
    net, x = nn.Sequential(nn.Linear(4, 4), make()), torch.randn(5, 4)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    before = [p.detach().clone() for p in net.parameters()]
    average.update_parameters(net)  # the first time copies
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1.0)
    average.update_parameters(net)
    for p, old in zip(average.module.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old + 0.5)
    got = average(x)
    flexsn.reset_net(average)
    average.module[1].backend = "torch"
    torch.testing.assert_close(got, average(x))
    assert not torch.equal(got, net(x))


class Network(nn.Module):
    """Whose neuron's core is a method of it, or a closure, and reads `w` alone."""

    def __init__(self, how, backend="auto"):
        super().__init__()
        self.first, self.w, self.norm = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 0.5)), nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        core = self.step if how == "method" else lambda x, v: self.step(x, v)
        self.neuron = FlexSN(core, num_states=1, backend=backend, stateful=False)

    def step(self, x, v):
        h = v * self.w + x
        return flexsn.surrogate.atan(h - 1.0), h

    def forward(self, x):
        s = self.norm(self.neuron(x).flatten(0, 1))
        self.count += 1
        return s


@pytest.mark.parametrize("how", ["method", "closure"])
def test_a_core_that_leads_to_its_network_holds_on_to_what_it_reads(how):
    """What else is there changes between forward and backward, and has no gradient."""
    torch.manual_seed(0)
    x, grads = torch.rand(6, 5, 4) * 2, []
    for backend in ("auto", "torch"):
        net = Network(how, backend)
        net(x).pow(3).sum().backward()
        assert net.first.weight.grad is None
        grads.append(net.w.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("how", ["method", "closure"])
@pytest.mark.parametrize(
    "walk",
    [
        lambda net: torch.func.functional_call(net, dict(net.named_parameters()), torch.rand(6, 5, 4)),
        nn.SyncBatchNorm.convert_sync_batchnorm, lambda net: [*net.children(), *net.neuron.children()], lambda net: [*net.modules()],
    ],
    ids=["functional_call", "convert_sync_batchnorm", "children", "modules"],
)  # fmt: skip
def test_walks_over_a_network_that_its_neuron_leads_to_end(how, walk):
    net = Network(how)
    walk(net)
    assert sum(isinstance(m, Network) for m in net.modules()) == 1
    assert {n for n, _ in net.named_parameters()} == {"w", "first.weight", "first.bias", "norm.weight", "norm.bias"}


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("which", ["copy", "original"])
def test_a_parametrized_module_beside_a_copy(which, backend):
    """`parametrize` gives a module a class of its own; a core that is a method runs on the copy's contents."""

    class Twice(nn.Module):
        def forward(self, w):
            return 2 * w

    first = FlexSN(Network("method").step, num_states=1, backend=backend)
    other, x = copy.deepcopy(first), torch.rand(4, 5, 4)
    changed, kept = (other, first) if which == "copy" else (first, other)
    before = kept(x)
    held = changed.core.__self__
    parametrize.register_parametrization(held, "w", Twice())
    want = FlexSN(lambda x, v: (flexsn.surrogate.atan(v * held.w + x - 1.0), v * held.w + x), num_states=1)(x)
    assert torch.equal(changed(x), want) and not torch.equal(want, before)
    assert torch.equal(kept.reset() or kept(x), before)


@pytest.mark.parametrize(("make", "holder", "name"), [(module_neuron, "core", "w"), (param_neuron, "params", "decay")])
def test_parametrized_parameters(make, holder, name):
    class Halved(nn.Module):
        def forward(self, w):
            return 0.5 * w

    net, x = make(), torch.randn(5, 4)
    parametrize.register_parametrization(getattr(net, holder), name, Halved())
    got = net(x)
    got.sum().backward()
    net.reset()
    torch.testing.assert_close(got, eager(net, x))
    (original,) = net.parameters()
    assert original.grad is not None and original.grad.any()
    parametrize.remove_parametrizations(getattr(net, holder), name)
    net.reset()
    assert torch.equal(net(x), got)


def test_weight_norm_of_a_module_core():
    net, x = FlexSN(nn.utils.parametrizations.weight_norm(Core(), "w"), 1, 1).double(), torch.randn(5, 4, dtype=f64)
    grads = []
    for backend in ("auto", "torch"):
        net.backend = backend
        net.reset()
        grads.append(torch.autograd.grad(net(x).square().sum(), list(net.parameters())))
    assert len(grads[0]) == 2
    for fused, looped in zip(*grads, strict=True):
        torch.testing.assert_close(fused, looped)


def test_hooks_around_a_call():
    net, x, seen = module_neuron(), torch.randn(5, 4, requires_grad=True), []
    net.register_forward_pre_hook(lambda module, args: (2.0 * args[0],))
    net.register_forward_hook(lambda module, args, y: seen.append(torch.equal(args[0], 2.0 * x)) or y + 1.0)
    net.register_full_backward_hook(lambda module, gx, gy: seen.append(tuple(gx[0].shape)))
    y = net(x)
    y.sum().backward()
    assert torch.equal(y, FlexSN(net.core, 1, 1, backend="torch")(2.0 * x) + 1.0) and seen == [True, (5, 4)]


def test_threads_that_run_copies_of_one_closure():
    """Each copy sees its own tensors, whoever else runs; the closure itself is shared."""
    net, x = closure_neuron()[0], torch.randn(6, 4)
    twins = [copy.deepcopy(net) for _ in range(6)]
    for i, twin in enumerate(twins):
        with torch.no_grad():
            twin.w.fill_(0.1 * i)
    want = [eager(twin, x).detach() for twin in twins]

    def run(i):
        got = []
        for _ in range(20):
            twins[i].reset()
            got.append(torch.equal(twins[i](x), want[i]))
            twins[i](x).sum().backward()
        return all(got)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(run, range(6)))


class Spikes(torch.utils.data.Dataset):
    """Samples encoded by a neuron, in the workers of a loader."""

    def __init__(self):
        self.neuron = module_neuron()

    def __len__(self):
        return 4

    def __getitem__(self, i):
        self.neuron.reset()
        with torch.no_grad():
            return self.neuron(torch.full((5, 4), float(i)))


@on_cpu
@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_workers_of_a_loader(start):
    data = Spikes()
    want = torch.stack([data[i] for i in range(4)])
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=start)
    (got,) = list(loader)
    assert torch.equal(got, want)


def test_hooks_of_params_see_real_gradients_alone():
    """Capture differentiates the core too: what is registered on its parameters is not for that."""
    w, seen = torch.nn.Parameter(torch.tensor(2.0)), []
    w.register_hook(lambda grad: seen.append(grad.detach().clone()))
    w.register_hook(lambda grad: grad * 2)

    def core(x, v):
        h = v + (x - v) / w
        return h, h

    neuron = FlexSN(core, 1, 1, strict=True)
    neuron(torch.rand(5, 3)).sum().backward()
    assert len(seen) == 1 and type(seen[0]) is torch.Tensor
    torch.testing.assert_close(w.grad, 2 * seen[0])


def test_a_captured_tensor_becomes_a_parameter_and_back():
    scale, x = torch.ones(3), torch.rand(5, 3)

    def core(x, v):
        h = v * 0.5 + x * scale
        return h, h

    neuron = FlexSN(core, 1, 1, strict=True)
    kinds = [scale, torch.nn.Parameter(torch.full((3,), 2.0)), torch.full((3,), 3.0)]
    for scale in kinds:
        neuron.reset()
        assert torch.equal(neuron(x), flexsn.scan(core, [x], [None], backend="torch").outputs[0])
        assert [n for n, _ in neuron.named_parameters()] == ["scale"] * isinstance(scale, torch.nn.Parameter)


@pytest.mark.parametrize("wrong", ["v", "0", 5, {"v": 0.0}, ["0"], [[1.0]], [1j], [object()], [numpy.ones(2)]])
def test_initial_states_of_another_kind_are_refused(wrong):
    def decay(x, v):
        return v + x, 0.5 * v

    with pytest.raises(flexsn.errors.ArgumentError, match=r"core `decay`: initial_states (must be a list|has .* for state 0)"):
        flexsn.FlexSN(decay, num_states=1, initial_states=wrong)
    neuron = flexsn.FlexSN(decay, num_states=1, initial_states=lambda x: wrong)
    with pytest.raises(flexsn.errors.ArgumentError, match=r"initial_states (returned|has .* for state 0)"):
        neuron(torch.zeros(2, 3))
    for fine in ([None], [0.5], (numpy.float32(0.5),), [float("nan")]):
        first = flexsn.FlexSN(decay, num_states=1, initial_states=fine, backend="torch")(torch.zeros(1, 3))
        want = torch.full((1, 3), 0.0 if fine[0] is None else float(fine[0]))
        assert torch.equal(first.isnan(), want.isnan()) and torch.equal(first.nan_to_num(), want.nan_to_num())


# --- arguments of another kind ------------------------------------------------------------------------------------------------------
def weighted(x, v, w):
    h = v * w + x
    return h.tanh(), h


def test_one_flag_for_all_operands():
    x = torch.randn(5, 4, requires_grad=True)
    assert not FlexSN(lambda x, v: (x + v, v), num_states=1, requires_grad=False)(x).requires_grad
    assert FlexSN(lambda x, v: (x + v, v), num_states=1, requires_grad=True)(x).requires_grad
    for wrong in (1, "yes", [True, None]):
        with pytest.raises(errors.ArgumentError, match="requires_grad must be True, False or a list"):
            FlexSN(lambda x, v: (x + v, v), num_states=1, requires_grad=wrong)


def test_a_tensor_in_place_of_a_list_of_one():
    x, w = torch.randn(5, 4), nn.Parameter(torch.rand(4))
    alone, listed = FlexSN(weighted, num_states=1, params=w), FlexSN(weighted, num_states=1, params=[w])
    assert torch.equal(alone(x), listed(x)) and alone.params.w is w
    empty = FlexSN(weighted, num_states=1, params=[w], example_outputs=torch.zeros(4))(x[:0])
    assert empty.shape == (0, 4)


@pytest.mark.parametrize("name", ["params", "example_inputs", "example_outputs"])
def test_a_number_in_place_of_a_list(name):
    with pytest.raises(errors.ArgumentError, match=f"{name} must be a tuple or list, not int"):
        FlexSN(weighted, num_states=1, **{name: 3})


@pytest.mark.parametrize("num_outputs", [None, 1])
def test_examples_of_outputs_that_are_none(num_outputs):
    """Wrong in number or kind, and a `requires_grad` at the position that it has in SpikingJelly's FlexSN."""
    v = torch.zeros(3)
    for wrong in ((True, False), True, False, (None,), [[0.0]], (v, False)):
        with pytest.raises(
            errors.ArgumentError, match=r"(?s)core `relu_mem`: example_outputs must be a tensor per output.*`requires_grad=True`"
        ):
            FlexSN(relu_mem, 1, 1, num_outputs, (v, v), wrong)
    for wrong in ((), []) if num_outputs is None else ((), (v, v)):
        with pytest.raises(OperandCountError, match=f"core `relu_mem`: example_outputs has {len(wrong)} examples"):
            FlexSN(relu_mem, 1, 1, num_outputs, (v, v), wrong)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_examples_of_outputs_are_compared_with_outputs(backend):
    x, v = torch.rand(5, 3), torch.zeros(3)
    with pytest.raises(ReturnCountError, match="returned 1 outputs, and example_outputs has 2 examples"):
        FlexSN(relu_mem, 1, 1, example_outputs=(v, v), backend=backend)(x)
    with pytest.raises(errors.ShapeMismatchError, match=r"(?s)output 0 has steps of shape \[3\].*shape \[5, 3\].*one step, without T"):
        FlexSN(relu_mem, 1, 1, example_outputs=x, backend=backend)(x)
    net = FlexSN(relu_mem, 1, 1, example_outputs=torch.zeros(2, 3), backend=backend)
    assert net(torch.rand(5, 7, 3)).shape == (5, 7, 3)  # the size of a batch may change


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_zero_steps_by_examples_leave_states_of_this_call(backend, compiled):
    """Outputs by example; states, their sequences, device and dtype by the call, as without examples; the core does not run."""
    torch._dynamo.reset()
    x, options = torch.rand(5, 3), {"store_state_seqs": True, "backend": backend}
    nets = [FlexSN(relu_mem, 1, 1, example_outputs=e, **options) for e in (None, torch.zeros(3))]
    seen = []
    for net in nets:
        call = torch.compile(net, backend="eager") if compiled else net
        for given in (x, x[:0], None, x[:0], None, x[:0].double(), None, x[:0].to("meta")):
            if given is None:
                net.reset()
            elif given.device.type != "meta" or net.example_outputs is not None:
                seen.append((call(given), net.states[0], net.state_seqs[0]))
    plain, by_example = seen[:4], seen[4:]
    for k, (wants, gots) in enumerate(zip(plain, by_example, strict=False)):
        for want, got in zip(wants, gots, strict=True):
            assert got.shape == want.shape and got.dtype == want.dtype and torch.equal(got, want), k
    assert [t.device.type for t in by_example[4]] == ["meta"] * 3 and by_example[4][2].shape == (0, 3)


@pytest.mark.parametrize("start", [[0.5], lambda x: [torch.tensor(0.5)]], ids=["number", "tensor"])
def test_zero_steps_by_examples_leave_what_states_start_from(start):
    def never(x, v):
        raise AssertionError("the core ran")

    net = FlexSN(never, 1, 1, example_outputs=torch.zeros(3, dtype=torch.bool), initial_states=start)
    y = net(torch.rand(0, 2, 3))
    assert y.shape == (0, 3) and y.dtype == torch.bool and net.state_seqs is None
    assert torch.equal(net.states[0], torch.full((2, 3), 0.5))
    net.states = [torch.zeros(4)]
    with pytest.raises(errors.ShapeMismatchError, match=r"core `never`.*\[2, 3\], \[4\]"):
        net(torch.rand(0, 2, 3))


def test_examples_of_operands_are_counted_also_where_counts_are_given():
    with pytest.raises(OperandCountError, match=r"example_inputs has 1 examples for 1 inputs \+ 1 states"):
        FlexSN(relu_mem, 1, 1, 1, example_inputs=[torch.zeros(3)])


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.1, 0.9, 0.5, 0.7]))

    def forward(self, x, v):
        return weighted(x, v, self.w)


def test_a_pruned_core():
    """Its hook writes the weight at every step: said with the way out, or by the eager loop."""
    core, x = Weighted(), torch.randn(6, 4)
    prune.l1_unstructured(core, "w", amount=2)
    with pytest.raises(errors.SideEffectError, match=r"prune\.remove\(module, name\)"):
        FlexSN(core, num_states=1, strict=True)(x)
    with pytest.warns(errors.FallbackWarning, match=r"prune\.remove"):
        got = FlexSN(core, num_states=1)(x)
    want = flexsn.scan(weighted, (x,), (None,), (torch.tensor([0.0, 0.9, 0.0, 0.7]),), strict=True).outputs[0]
    assert torch.equal(got, want)
    prune.remove(core, "w")
    assert torch.equal(FlexSN(core, num_states=1, strict=True)(x), want)


class Rectified(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.PReLU(4)

    def forward(self, x, v):
        return weighted(self.act(x), v, 0.5)


def test_a_pruned_module_of_pytorchs_inside_a_core():
    """Whose attributes no code of the user's names."""
    core, x = Rectified(), torch.randn(6, 3, 4)
    prune.l1_unstructured(core.act, "weight", amount=2)
    with pytest.raises(errors.SideEffectError, match=r"prune\.remove\(module, name\)"):
        FlexSN(core, num_states=1, strict=True)(x)
    assert type(core.act.weight) is torch.Tensor and core.act.weight.tolist() == core.act.weight_orig.mul(core.act.weight_mask).tolist()
    prune.remove(core.act, "weight")
    torch.testing.assert_close(FlexSN(core, num_states=1, strict=True)(x), FlexSN(core, num_states=1, backend="torch")(x))


# --- where states start -------------------------------------------------------------------------------------------------------
def test_a_start_has_the_dtype_of_the_modules_own_parameters():
    neuron = flexsn.FlexSN(lambda x, v: (x + v, v), 1, 1, initial_states=[0.5])
    assert neuron.start_dtype(torch.ones(2, 3)) is torch.float32
    neuron.register_parameter("w", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    assert neuron.start_dtype(torch.ones(2, 3)) is torch.float64


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_inputs_that_do_not_broadcast_are_named_wherever_states_start(start):
    neuron = flexsn.FlexSN(lambda x, y, v: (x + v + y, v + y), 2, 1, initial_states=[start])
    with pytest.raises(errors.ShapeMismatchError, match=r"`x` \[4\], `y` \[5\]"):
        neuron(torch.rand(3, 4), torch.rand(3, 5))


@pytest.mark.filterwarnings("ignore:Sparse")  # PyTorch: in beta
def test_a_sparse_input_is_refused_by_name_where_a_start_goes_by_channel():
    neuron = flexsn.neurons.LIF(v_leak=torch.rand(3), per_channel=3)
    with pytest.raises(errors.OperandTypeError, match="sparse"):
        neuron(torch.rand(2, 3).to_sparse_csr())


# --- which tensors and which values are meant ---------------------------------------------------------------------------------
class TwoWeights(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.5))
        self.b = self.a if tied else nn.Parameter(torch.tensor(2.0))

    def forward(self, x, v):
        v = v * self.a + x * self.b
        return v * v, v


def two_weights(tied, backend="auto"):
    return FlexSN(TwoWeights(tied), num_states=1, stateful=False, backend=backend)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # PyTorch's own
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_tied_and_untied_tensors_are_two_programs(compiled):
    x = torch.ones(3, 1)
    for tied in (True, False, True):
        neuron, loop = two_weights(tied), two_weights(tied, "torch")
        run = torch.compile(neuron, backend="aot_eager", fullgraph=True) if compiled else neuron
        got, want = run(x), loop(x)
        got.sum().backward(), want.sum().backward()
        torch.testing.assert_close([got, *(p.grad for p in neuron.parameters())], [want, *(p.grad for p in loop.parameters())])


def test_a_tie_may_be_undone():
    neuron, x = two_weights(tied=True), torch.ones(3, 1)
    neuron(x)
    neuron.core.b = nn.Parameter(torch.tensor(2.0))
    torch.testing.assert_close(neuron(x), two_weights(tied=False, backend="torch")(x))


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.k = nn.Parameter(torch.tensor(0.7)), 2.0

    def forward(self, x):
        return x * self.w * (self.k if self.training else 0.5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # PyTorch's own
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
@torch.no_grad()
def test_a_copy_has_flags_and_numbers_of_its_own(backend, compiled):
    gain, x = Gain(), torch.ones(3, 2)

    def core(x, v):
        v = gain(x) + 0.5 * v
        return v * 1.0, v

    neuron = FlexSN(core, num_states=1, stateful=False, backend=backend)
    copied = copy.deepcopy(neuron)
    torch.testing.assert_close(copied(x), neuron(x), rtol=0, atol=0)
    own = copied.core.__closure__[0].cell_contents
    assert own is not gain
    own.eval()
    run = torch.compile(copied, backend="aot_eager") if compiled else copied
    torch.testing.assert_close(run(x) * 4.0, neuron(x))
    own.train().k = 6.0
    torch.testing.assert_close(run(x), neuron(x) * 3.0)
    gain.eval()
    torch.testing.assert_close(run(x), neuron(x) * 12.0)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # PyTorch's own
def test_a_compiled_copy_whose_core_captures_a_module_is_one_graph():
    gain, x = Gain(), torch.ones(3, 2)
    copied = copy.deepcopy(FlexSN(lambda x, v: (gain(x) + v, v * 0.5), num_states=1, stateful=False))
    with torch.no_grad():
        copied.core.__closure__[0].cell_contents.w.fill_(3.0)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(copied, backend="aot_eager", fullgraph=True)(x), copied(x))


# --- one object under several names -------------------------------------------------------------------------------------------------
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))

    def forward(self, x, *v):
        return (x * self.w, *v) if v else x * self.w

    def step(self, x, v):
        return x * self.w, v


def two_names():
    a = nn.Parameter(torch.tensor(2.0))
    b = a
    return lambda x, v: (x * a + x * b, v)


def two_tuples():
    a = (nn.Parameter(torch.tensor(2.0)),)
    b = a
    return lambda x, v: (x * a[0] + x * b[0], v)


def a_module_and_its_child():
    a = nn.Sequential(Scaled())
    b = a[0]
    return lambda x, v: (a(x) + b(x), v)


def a_method_and_its_owner():
    a = Scaled()
    b = a.step
    return lambda x, v: (a(x) + b(x, v)[0], v)


WAYS = [two_names, two_tuples, a_module_and_its_child, a_method_and_its_owner, lambda: Scaled().step, lambda: functools.partial(Scaled())]


@pytest.mark.parametrize("make", WAYS, ids=[*[f.__name__ for f in WAYS[:4]], "a_method", "a_partial_of_a_module"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_copy_has_its_own_under_every_name(make, backend):
    net, x = FlexSN(make(), 1, 1, backend=backend, stateful=False), torch.ones(3, 4)
    twin = copy.deepcopy(net)
    (w,) = [t for t in twin.captured_values().tensors().values() if isinstance(t, nn.Parameter)]
    with torch.no_grad():
        w.mul_(1.5)
    y = twin(x)
    y.sum().backward()
    assert torch.equal(y, 1.5 * net(x)) and torch.equal(w.grad * w, y.sum())
    assert all(p.grad is None for p in net.captured_values().tensors().values())


class Whole(nn.Module):
    """A network whose neuron is a closure over it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))
        self.neuron = FlexSN(lambda x, v: (x * self.w, v), 1, 1, stateful=False)

    def forward(self, x):
        return self.neuron(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # PyTorch's own
@torch.no_grad()
def test_a_compiled_copy_of_a_network_that_its_neuron_reads():
    net, x = Whole().train(), torch.ones(3, 4)
    twin = copy.deepcopy(net)
    twin.w.fill_(5.0)
    for run in (twin, torch.compile(twin, backend="aot_eager")):
        assert torch.equal(run(x), 5.0 * x)


OFFSET = nn.Parameter(torch.zeros(()))


def shifted(x, v):
    return x + OFFSET, v


def rebind(monkeypatch, value):
    monkeypatch.setitem(globals(), "OFFSET", nn.Parameter(torch.tensor(value)))


def test_globals_are_neither_registered_nor_copied_nor_saved(monkeypatch):
    x, net = torch.zeros(3, 4), FlexSN(shifted, 1, 1)
    rebind(monkeypatch, 5.0)
    twin, saved = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    assert not net.state_dict() and all(torch.equal(n(x), x + 5.0) for n in (net, twin, saved))
    rebind(monkeypatch, 2.0)
    assert all(torch.equal(n(x), x + 2.0) for n in (net, twin, saved))


def decayed(x, v, decay=nn.Parameter(torch.tensor(0.5))):  # noqa: B008  (what the test is about)
    return x * decay, v


def test_a_pickle_keeps_its_values_where_the_core_is_found_by_name():
    net, x = FlexSN(decayed, 1, 1), torch.ones(3, 4)
    saved = pickle.dumps(net)
    with torch.no_grad():
        net.decay.fill_(2.0)  # as a new process has other defaults
    loaded = pickle.loads(saved)
    (trained,) = loaded.parameters()
    assert torch.equal(loaded(x), 0.5 * x) and trained is not net.decay and torch.equal(net(x), 2.0 * x)
    assert torch.equal(copy.deepcopy(loaded)(x), 0.5 * x)
    with torch.no_grad():
        net.decay.fill_(0.5)


def test_each_copy_sees_that_a_name_is_bound_anew(monkeypatch):
    net, x = FlexSN(shifted, 1, 1), torch.zeros(3, 4)
    twin = copy.deepcopy(net)
    rebind(monkeypatch, 2.0)
    assert torch.equal(twin(x), x + 2.0) and torch.equal(net(x), x + 2.0)


def test_params_whose_names_differ_by_what_is_put_behind_them():
    net = FlexSN(lambda x, type, type_: x * type + type_, 1, 0, params=(torch.tensor(2.0), torch.tensor(10.0)))
    assert len(set(net.param_names)) == 2 and torch.equal(net(torch.ones(2, 3)), torch.full((2, 3), 12.0))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # PyTorch's own
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("T", [0, 3])
@pytest.mark.parametrize(
    "options", [{}, {"num_outputs": 0}, {"num_outputs": 0, "example_outputs": ()}, {"num_outputs": 0, "backend": "torch"}], ids=str
)
def test_a_core_without_outputs_leaves_the_states(options, T, compiled):
    """A neuron has outputs: what returns its states alone is told of `scan`, which returns them."""

    def summing(x, v):
        return x + v

    torch._dynamo.reset()
    net, x = FlexSN(summing, 1, 1, **options), torch.ones(T, 4)
    net.states = [torch.zeros(4)]
    with pytest.raises(
        ReturnCountError, match=r"(?s)`summing`.*nothing to return.*`flexsn.scan\(core, inputs, states, store_state_seqs=True\)`"
    ):
        (torch.compile(net, backend="eager") if compiled else net)(x)
    assert not net.states[0].any()
    result = flexsn.scan(summing, (x,), (torch.zeros(4),), store_state_seqs=True)
    assert result.outputs == () and torch.equal(result.states[0], x.cumsum(0))


@pytest.mark.parametrize("wrong", [-1, True])
def test_a_number_of_outputs_that_is_none(wrong):
    with pytest.raises(errors.ArgumentError, match="core `relu_mem`: num_outputs"):
        FlexSN(relu_mem, 1, 1, wrong)


def test_a_copy_of_a_compiled_module_runs_itself():
    net, x = flexsn.LIF(tau=2.0, learn_tau=True, v_threshold=0.3), torch.rand(5, 2, 4)
    net.compile(backend="eager")
    before = net(x)
    net.reset()
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.tau.fill_(50.0)
    found = twin(x)
    assert not torch.equal(found, before) and net.states is None and twin.states is not None
    found.sum().backward()
    assert twin.tau.grad is not None and net.tau.grad is None
    assert torch.equal(torch.load(_saved(net), weights_only=False)(x), before)


TAU = nn.Parameter(torch.tensor(1.0))


def test_a_global_bound_anew_after_a_copy_was_compiled(monkeypatch):
    def core(x, v):
        h = v * 0.5 + x * TAU
        return h.tanh(), h

    net, x = flexsn.FlexSN(core, 1, 1, stateful=False), torch.ones(2, 3)
    twin = copy.deepcopy(net)
    torch._dynamo.reset()
    call = torch.compile(lambda net, x: net(x), backend="eager")
    call(twin, x), call(net, x)
    monkeypatch.setitem(globals(), "TAU", nn.Parameter(torch.tensor(5.0)))
    assert torch.equal(call(net, x), net(x)) and torch.equal(call(twin, x), twin(x))
    assert torch.equal(net(x)[0], (x[0] * 5.0).tanh())
