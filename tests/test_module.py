"""`FlexSN`: counts, states, registration of what is captured, copies."""

import copy
import io
import pickle

import pytest
import torch
from cores import adlif, leaky, lif, relu_mem
from torch import nn

import flexsn
from flexsn import FlexSN
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
    gate = nn.PReLU()

    def core(x, v):
        v = v * w + x * scale
        return gate(v), v

    return FlexSN(core, num_inputs=1, num_states=1, num_outputs=1, backend="cpp"), w, scale, gate


# --- calls ---------------------------------------------------------------------------------------------------------------
def test_counts_are_inferred():
    assert (FlexSN(lif, num_states=1, params=lif_params()).num_inputs, FlexSN(relu_mem, num_inputs=1).num_states) == (1, 1)
    net = FlexSN(adlif, 2, 2, 2, params=[torch.tensor(0.9), torch.tensor(0.5)])
    assert len(net(torch.randn(3, 4), torch.randn(3, 4))) == 2


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_sequence_call(backend):
    x = torch.randn(7, 4)
    net = FlexSN(lif, 1, 1, 1, params=lif_params(), backend=backend, store_state_seqs=True)
    y = net(x)
    want = flexsn.scan(lif, [x], [None], list(net.parameters()), backend="torch", store_state_seqs=True)
    assert torch.equal(y, want.outputs[0]) and torch.equal(net.state_seqs[0], want.states[0])
    assert torch.equal(net.states[0], want.states[0][-1])


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_single_steps_are_the_sequence(backend):
    x = torch.randn(7, 4)
    whole = FlexSN(lif, 1, 1, 1, params=lif_params(), backend=backend)
    steps = FlexSN(lif, 1, 1, 1, params=lif_params(), backend=backend, step_mode="s")
    assert torch.equal(torch.stack([steps(row) for row in x]), whole(x))
    assert torch.equal(steps.states[0], whole.states[0])


def test_states_are_carried_until_reset():
    x = torch.randn(8, 4)
    net = FlexSN(lif, 1, 1, 1, params=lif_params(), backend="cpp")
    whole = net(x).detach()
    net.reset()
    assert net.states is None
    assert torch.equal(torch.cat([net(x[:3]), net(x[3:])]), whole)
    flexsn.reset_net(nn.Sequential(net))
    assert torch.equal(net(x), whole)


def test_detach_states():
    x = torch.randn(4, 4, requires_grad=True)
    net = FlexSN(lif, 1, 1, 1, params=lif_params(), backend="cpp")
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
        net = FlexSN(leaky, 1, 1, 1, params=[torch.tensor(0.5, dtype=f64)], backend="cpp")
        y = torch.cat([net(leaf[:2]), net(leaf[2:])]) if split else net(leaf)
        y.square().sum().backward()
        xs.append(leaf.grad)
    torch.testing.assert_close(*xs)


def test_overridden_init_states():
    class Charged(FlexSN):
        @staticmethod
        def init_states(num_states, step_mode, *inputs):
            return [torch.full_like(inputs[0][0] if step_mode == "m" else inputs[0], 2.0)]

    net = Charged(leaky, 1, 1, 1, params=[torch.tensor(1.0)], backend="cpp")
    net(torch.zeros(3, 4))
    assert torch.equal(net.states[0], torch.full((4,), 2.0))


def test_zero_steps():
    net = FlexSN(lif, 1, 1, 1, params=lif_params(), backend="cpp", store_state_seqs=True)
    assert net(torch.randn(0, 4)).shape == (0, 4) and torch.equal(net.states[0], torch.zeros(4))
    y = net(torch.randn(3, 4))
    assert y.shape == (3, 4) and net.state_seqs[0].shape == (3, 4)


def test_mistakes():
    with pytest.raises(OperandCountError, match="needs 1 inputs but was given 2"):
        FlexSN(lif, 1, 1, 1, params=lif_params())(torch.randn(3, 4), torch.randn(3, 4))
    with pytest.raises(OperandCountError, match="num_states"):
        FlexSN(lif)
    with pytest.raises(OperandCountError, match="do not fit"):
        FlexSN(lif, 3, 2)
    with pytest.raises(ReturnCountError, match="2 outputs"):
        FlexSN(lif, 1, 1, 2, params=lif_params(), backend="cpp")(torch.randn(3, 4))
    with pytest.raises(ReturnCountError, match="states only"):
        FlexSN(lambda x, v: x + v, 1, 1, backend="cpp")(torch.randn(3, 4))
    with pytest.raises(ValueError, match="step_mode"):
        FlexSN(lif, 1, 1, 1, step_mode="x")


def test_repr_names_the_core():
    assert "lif" in repr(FlexSN(lif, 1, 1, 1, params=lif_params())) and "num_states=1" in repr(FlexSN(relu_mem, 1))


# --- registration --------------------------------------------------------------------------------------------------------------
def test_captured_tensors_are_registered():
    net, w, scale, gate = closure_neuron()
    assert {id(p) for p in net.parameters()} == {id(w), id(gate.weight)}
    assert [b is scale for b in net.buffers()] == [True]
    assert dict(net.named_parameters()).keys() == {"captured.w", "captured.gate.weight"}
    assert net.state_dict().keys() == {"captured.w", "captured.scale", "captured.gate.weight"}


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
        assert w.grad is not None and gate.weight.grad is not None
        optimizer.step()
    assert counts.programs == 1


def test_module_core_is_a_submodule():
    net = FlexSN(Core(), 1, 1, 1, backend="cpp")
    assert net.state_dict().keys() == {"core.w", "core.scale"} and len(list(net.parameters())) == 1
    net(torch.randn(3, 4)).sum().backward()
    assert net.core.w.grad is not None


def module_neuron():
    return FlexSN(Core(), 1, 1, 1, backend="cpp")


def param_neuron():
    return FlexSN(leaky, 1, 1, 1, params=[nn.Parameter(torch.rand(4))], backend="cpp")


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
    assert torch.equal(
        flexsn.scan(net.core, [x], [None], backend="cpp").outputs[0], flexsn.scan(net.core, [x], [None], backend="torch").outputs[0]
    )


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

    net, x = FlexSN(core, 1, 1, 1, backend="cpp"), torch.randn(3, 4)
    net(x)
    w = nn.Parameter(torch.rand(4))
    assert torch.equal(net(x), x * w)
    assert [p is w for p in net.parameters()] == [True]


def test_a_network_trains():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 16), FlexSN(lif, 1, 1, 1, params=lif_params(), backend="cpp"), nn.Linear(16, 1))
    x = torch.rand(10, 64, 3)
    target = (x.mean(0).sum(1, keepdim=True) > 1.5).float()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        flexsn.reset_net(net)
        loss = nn.functional.binary_cross_entropy_with_logits(net(x).mean(0), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
