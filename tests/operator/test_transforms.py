"""`torch.func`, checkpoints, saved-tensor hooks, fake and meta tensors, `opcheck`: each against the eager loop, or refused."""

import copy

import pytest
import torch
from cores import adlif, leaky, plif
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, grad, jacrev, jvp, stack_module_state, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import flexsn
from flexsn import FlexSN
from flexsn._runtime.launch import Launch
from flexsn.errors import CarriedStateError, ForwardModeError

f64 = torch.float64
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's own, of its first `jvp`


def double(*shape):
    return torch.randn(*shape, dtype=f64)


def scan(x, v, w, backend="auto"):
    result = flexsn.scan(leaky, (x,), (v,), (w,), backend=backend, store_state_seqs=True)
    return result.outputs[0], result.states[0]


def loss(x, v, w, backend="auto"):
    return sum(y.square().sum() for y in scan(x, v, w, backend))


def assert_same(got, want):
    got, want = pytree.tree_leaves(got), pytree.tree_leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def assert_as_in_the_loop(transformed, *operands):
    """`transformed(backend, *operands)` gives the same fused and in the eager loop."""
    assert_same(transformed("auto", *operands), transformed("torch", *operands))


# --- torch.func ---------------------------------------------------------------------------------------------------------------
OPERANDS = {"x": (5, 3, 4), "v": (3, 4), "w": (4,)}


@pytest.mark.parametrize("transform", [grad, jacrev])
def test_reverse_mode(transform):
    function = loss if transform is grad else scan
    operands = [double(*shape) for shape in OPERANDS.values()]
    assert_as_in_the_loop(lambda b, *a: transform(lambda *a: function(*a, b), argnums=(0, 1, 2))(*a), *operands)


def test_vjp_of_a_tuple():
    operands = [double(*shape) for shape in OPERANDS.values()]
    cotangents = (double(5, 3, 4), double(5, 3, 4))
    assert_as_in_the_loop(lambda b, *a: vjp(lambda *a: scan(*a, b), *a)[1](cotangents), *operands)


def test_a_first_call_under_grad():
    """Captured inside the transform, where PyTorch allows no saved-tensor hooks."""

    def core(x, v):  # no other test has captured it
        v = 0.25 * v + x
        return v * v, v

    x = double(4, 3)
    assert_same(grad(lambda x: flexsn.scan(core, (x,), (None,)).outputs[0].sum())(x), _gradient(core, x))


def _gradient(core, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(flexsn.scan(core, (x,), (None,), backend="torch").outputs[0].sum(), x)[0]


# which operands are batched, in which dim
BATCHED = {
    "inputs": ((5, 6, 3, 4), (3, 4), (4,), (1, None, None)),
    "inputs in the last dim": ((5, 3, 4, 6), (3, 4), (4,), (-1, None, None)),
    "inputs in front of time": ((6, 5, 3, 4), (3, 4), (4,), (0, None, None)),
    "states": ((5, 3, 4), (3, 6, 4), (4,), (None, 1, None)),
    "params": ((5, 3, 4), (3, 4), (6, 4), (None, None, 0)),
    "params in the last dim": ((5, 3, 4), (3, 4), (4, 6), (None, None, 1)),
    "numbers": ((5, 3, 4), (3, 4), (6,), (None, None, 0)),
    "params [C, 1]": ((5, 3, 4), (3, 4), (6, 3, 1), (None, None, 0)),
    "params per neuron": ((5, 3, 4), (3, 4), (6, 3, 4), (None, None, 0)),
    "all": ((6, 5, 3, 4), (3, 6, 4), (4, 6), (0, 1, 1)),
    "a state that broadcasts": ((5, 6, 3, 4), (6, 4), (4,), (1, 0, None)),
}


@pytest.mark.parametrize("case", BATCHED.values(), ids=BATCHED)
def test_vmap(case):
    *shapes, dims = case
    operands = [double(*shape) for shape in shapes]
    assert_as_in_the_loop(lambda b, *a: vmap(lambda *a: scan(*a, b), dims)(*a), *operands)
    assert_as_in_the_loop(lambda b, *a: vmap(grad(lambda *a: loss(*a, b), argnums=(0, 1, 2)), dims)(*a), *operands)

    def of_the_sum(backend, *operands):
        return grad(lambda *a: sum(y.square().sum() for y in vmap(lambda *a: scan(*a, backend), dims)(*a)), argnums=(0, 1, 2))(*operands)

    assert_as_in_the_loop(of_the_sum, *operands)


@pytest.mark.parametrize("out", [0, 1, -1, (2, 0)], ids=str)
def test_vmap_out_dims(out):
    operands = double(5, 6, 3, 4), double(3, 4), double(4)
    assert_as_in_the_loop(lambda b, *a: vmap(lambda *a: scan(*a, b), (1, None, None), out)(*a), *operands)


def test_vmap_in_chunks():
    operands = double(7, 5, 3, 4), double(3, 4), double(4)
    assert_as_in_the_loop(lambda b, *a: vmap(lambda *a: scan(*a, b), (0, None, None), chunk_size=3)(*a), *operands)


def test_nested_vmap():
    def nested(backend, x, v, w):
        inner = vmap(grad(lambda *a: loss(*a, backend), argnums=(0, 2)), (1, None, None))
        return vmap(inner, (None, None, 0))(x, v, w)

    assert_as_in_the_loop(nested, double(5, 6, 3, 4), double(3, 4), double(2, 4))


def test_vmap_of_several_inputs_states_and_outputs():
    def run(backend, x1, x2, beta):
        results = flexsn.scan(adlif, (x1, x2), (None, None), (beta, torch.tensor(0.5)), backend=backend)
        return *results.outputs, *results.states

    operands = torch.randn(5, 6, 4), torch.randn(5, 4), torch.rand(6)
    assert_as_in_the_loop(lambda b, *a: vmap(lambda *a: run(b, *a), (1, None, 0))(*a), *operands)

    def gradient(backend, *operands):
        return vmap(grad(lambda *a: sum(y.sum() for y in run(backend, *a)), argnums=(0, 1, 2)), (1, None, 0))(*operands)

    assert_as_in_the_loop(gradient, *operands)


def test_params_of_channels_in_front_of_space():
    """`[C, 1, 1]`, batched: one per model of an ensemble."""

    def gradient(backend, x, w):
        return vmap(grad(lambda w: flexsn.scan(plif, (x,), (None,), (w,), backend=backend).outputs[0].sum()))(w)

    assert_as_in_the_loop(gradient, torch.randn(5, 2, 3, 4, 4), torch.rand(6, 3, 1, 1))


def test_functionalize():
    operands = [double(*shape) for shape in OPERANDS.values()]
    transformed = functionalize(lambda x, v, w: scan(x, v, w))
    assert_same(transformed(*operands), scan(*operands))
    graph = make_fx(transformed)(*operands).graph
    assert [str(n.target) for n in graph.nodes].count("flexsn.forward.default") == 1


# --- modules --------------------------------------------------------------------------------------------------------------------
class Plif(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(8))

    def forward(self, x, v):
        return plif(x, v, self.w)


def module_neuron():
    return FlexSN(Plif(), 1, 1)


def params_neuron():
    return FlexSN(plif, 1, 1, params=[nn.Parameter(torch.rand(8))])


def closure_neuron():
    w = nn.Parameter(torch.rand(8))
    return FlexSN(lambda x, v: plif(x, v, w), 1, 1)


neurons = pytest.mark.parametrize("make", [module_neuron, params_neuron, closure_neuron])


def net_and_loss(make):
    net = nn.Sequential(nn.Linear(8, 8), make())

    def stateless_loss(params, x):
        flexsn.reset_net(net)
        return functional_call(net, params, (x,)).square().sum()

    return net, stateless_loss


@neurons
def test_gradients_per_sample(make):
    net, stateless_loss = net_and_loss(make)
    params, x = {n: p.detach() for n, p in net.named_parameters()}, torch.randn(5, 3, 8)
    got = vmap(grad(stateless_loss), (None, 1))(params, x)
    want = [grad(stateless_loss)(params, x[:, i]) for i in range(3)]
    assert_same(got, {n: torch.stack([g[n] for g in want]) for n in params})


@neurons
def test_ensembles(make):
    models, x = [net_and_loss(make)[0] for _ in range(3)], torch.randn(5, 2, 8)
    params, _ = stack_module_state(models)
    _, stateless_loss = net_and_loss(make)
    grads = vmap(grad(stateless_loss), (0, None))(params, x)
    for i, model in enumerate(models):
        model(x).square().sum().backward()
        for name, param in model.named_parameters():
            torch.testing.assert_close(grads[name][i], param.grad, rtol=1e-4, atol=1e-4, msg=name)
    of_all = grad(lambda params: vmap(stateless_loss, (0, None))(params, x).sum())(params)
    torch.testing.assert_close(of_all, grads, rtol=1e-4, atol=1e-4)
    vmap(stateless_loss, (0, None))(params, x).sum().backward()  # the transform has ended, and autograd goes on
    torch.testing.assert_close({name: param.grad for name, param in params.items()}, grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("outer", ["grad", "autograd"])
def test_gradients_of_captured_tensors_through_vmap(outer):
    x = double(5, 3, 4)

    def run(backend, stacked):
        def one(w):
            return flexsn.scan(lambda x, v: plif(x, v, w), [x], [None], backend=backend).outputs[0]

        return vmap(one)(stacked).square().sum()

    def gradient(backend, stacked):
        if outer == "grad":
            return grad(lambda stacked: run(backend, stacked))(stacked)
        leaf = stacked.clone().requires_grad_()
        return torch.autograd.grad(run(backend, leaf), leaf)[0]

    assert_as_in_the_loop(gradient, double(6, 4))
    assert gradient("auto", double(6, 4)).abs().sum() > 0


@neurons
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(make, reentrant):
    net, x = nn.Sequential(nn.Linear(8, 8), make()), torch.randn(5, 3, 8)
    twin = copy.deepcopy(net)

    def forget_and_run(x):
        flexsn.reset_net(net)
        return net(x)

    leaves = [x.clone().requires_grad_() for _ in range(2)]
    checkpoint(forget_and_run, leaves[0], use_reentrant=reentrant).square().sum().backward()
    twin(leaves[1]).square().sum().backward()
    assert_same([leaves[0].grad, *(p.grad for p in net.parameters())], [leaves[1].grad, *(p.grad for p in twin.parameters())])


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), flexsn.LIF(tau=1.5), nn.Linear(8, 8), flexsn.LIF(learn_tau=True, v_threshold=0.2))


@pytest.mark.parametrize("block", [
    lambda net, x, reentrant: checkpoint(net, x, use_reentrant=reentrant),
    lambda net, x, reentrant: checkpoint_sequential(net, 2, x, use_reentrant=reentrant),
    lambda net, x, reentrant: checkpoint(lambda x: checkpoint(net, x, use_reentrant=reentrant), x, use_reentrant=reentrant),
], ids=["whole", "in parts", "nested"])  # fmt: skip
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_starts_where_the_only_call_since_the_reset_did(block, reentrant):
    net, twin = two_layers(), two_layers()
    leaves = [torch.randn(5, 3, 8).mul_(3.0).requires_grad_()]
    leaves.append(leaves[0].detach().clone().requires_grad_())
    for _ in range(2):
        flexsn.reset_net(net)
        flexsn.reset_net(twin)
        y, want = block(net, leaves[0], reentrant), twin(leaves[1])
        y.square().sum().backward()
        want.square().sum().backward()
        assert twin[1].states[0].any()
        assert_same([y, leaves[0].grad, *(p.grad for p in net.parameters())], [want, leaves[1].grad, *(p.grad for p in twin.parameters())])
        assert_same([net[1].states[0], net[3].states[0]], [twin[1].states[0], twin[3].states[0]])  # which the backward did not advance
        y, want = net(leaves[0]), twin(leaves[1])  # the next piece goes on from there
        assert_same([y], [want])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("step_mode", ["m", "s"])
def test_a_checkpoint_of_a_later_call_is_refused(reentrant, step_mode):
    neuron, x = flexsn.LIF(step_mode=step_mode), torch.randn(4, 3, requires_grad=True)
    first = neuron(x)
    second = checkpoint(neuron, x, use_reentrant=reentrant)
    with pytest.raises(CarriedStateError, match=r"core `lif`: is called by a backward.*not the first since `reset\(\)`"):
        (first + second).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_pieces_that_are_given_their_states(reentrant):
    neuron, twin = flexsn.LIF(), flexsn.LIF()
    leaves = [torch.full((4, 3), 1.5, requires_grad=True) for _ in range(2)]

    def piece(x, v):
        neuron.states = [v]
        return neuron(x[:2]) + neuron(x[2:]), neuron.states[0]

    first, v = checkpoint(piece, leaves[0], torch.zeros(3), use_reentrant=reentrant)
    second, _ = checkpoint(piece, leaves[0], v, use_reentrant=reentrant)
    (first.sum() + 2 * second.sum()).backward()
    halves = [twin(part) for part in (*leaves[1].split(2), *leaves[1].split(2))]
    (halves[0].sum() + halves[1].sum() + 2 * halves[2].sum() + 2 * halves[3].sum()).backward()
    assert_same([leaves[0].grad], [leaves[1].grad])


CARRIED = {
    "reset inside": lambda net: lambda x: (flexsn.reset_net(net), net(x))[1],
    "reset inside, two calls": lambda net: lambda x: (flexsn.reset_net(net), torch.cat([net(part) for part in x.split(3)]))[1],
    "nothing inside": lambda net: net,
}


@pytest.mark.parametrize("make", CARRIED.values(), ids=CARRIED)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("last", [True, False], ids=["last", "within"])
def test_a_backward_leaves_what_is_carried(make, reentrant, last):
    """PyTorch may stop the recomputation early, in the last call. Later calls go on from there, as without a checkpoint."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), flexsn.LeakyIntegrator(tau=3.0), *([] if last else [nn.Linear(3, 2)]))
    twin, x = copy.deepcopy(net), torch.randn(6, 4, 3)
    checkpoint(make(net), x.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
    make(twin)(x).sum().backward()
    for _ in range(2):
        flexsn.detach_states(net)
        flexsn.detach_states(twin)
        assert_same([net[1].states, net(x)], [twin[1].states, twin(x)])


@pytest.mark.parametrize("between", [flexsn.reset_net, flexsn.detach_states, lambda net: net(torch.randn(2, 4, 3).flatten(0, 1)[:6])])
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_happens_between_a_checkpoint_and_its_backward(between, reentrant):
    """The recomputation starts where the call did, and leaves the module as it is; or a `CarriedStateError`."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), flexsn.LIF(tau=3.0, v_leak=0.2, v_threshold=0.5))
    twin, leaves = copy.deepcopy(net), [torch.full((6, 3), 0.8, requires_grad=True) for _ in range(2)]
    y, want = checkpoint(net, leaves[0], use_reentrant=reentrant), twin(leaves[1])
    between(net)
    states = net[1].states
    if states is not None and between not in (flexsn.reset_net, flexsn.detach_states):
        with pytest.raises(CarriedStateError):
            y.sum().backward()
        return
    y.sum().backward()
    want.sum().backward()
    assert net[1].states is states
    assert_same([leaves[0].grad, net[0].weight.grad], [leaves[1].grad, twin[0].weight.grad])


@pytest.mark.parametrize("reentrant", [False, True])
def test_micro_batches_that_share_a_backward(reentrant):
    net, twin = two_layers(), two_layers()
    leaves = [torch.randn(5, 3, 8).mul_(3.0).requires_grad_() for _ in range(2)]
    others = [x.detach().clone().requires_grad_() for x in leaves]
    for net_of, xs, run in (
        (net, leaves, lambda net, x: checkpoint(net, x, use_reentrant=reentrant)),
        (twin, others, lambda net, x: net(x)),
    ):
        total = 0.0
        for x in xs:
            total = total + run(net_of, x).square().sum()
            flexsn.reset_net(net_of)
        total.backward()
    assert_same([x.grad for x in leaves], [x.grad for x in others])
    assert net[1].states is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_that_returns_a_state(reentrant):
    neuron, x = flexsn.LeakyIntegrator(), torch.ones(4, 3, requires_grad=True)

    def membrane(x):
        neuron(x)
        return neuron.states[0]

    checkpoint(membrane, x, use_reentrant=reentrant).sum().backward()
    neuron.reset()
    assert_same([x.grad], torch.autograd.grad(membrane(x).sum(), x))


def test_saved_tensors_hooks_see_what_is_saved():
    net, x, packed = params_neuron(), torch.randn(40, 3, 8), []
    twin = copy.deepcopy(net)

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.numpy(force=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda a: torch.from_numpy(a).to(x.device)):
        y = net(x)
    y.square().sum().backward()
    twin(x).square().sum().backward()
    assert packed[:2] == [(40, 3, 8), (8,)] and len(packed) == 3  # the input, the param, checkpoints
    assert_same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])


def test_a_module_under_two_names_keeps_its_tensors():
    """Others stand in for them while a transformed call is traced."""
    net = nn.Sequential(nn.Sequential(nn.PReLU()))
    inner, weight, x = net[0], net[0][0].weight, torch.randn(2, 5, 4)
    got = vmap(FlexSN(lambda x: inner(x) + net(x), 1, 0))(x)
    assert inner[0].weight is weight and torch.equal(got, 2 * inner(x))


# --- one kernel per direction ----------------------------------------------------------------------------------------------------------
def gradient_of(call):
    return lambda x, w: torch.autograd.grad(call(x.clone().requires_grad_(), w).sum(), w)


DOORS = {
    "eager": (lambda f: f, "forward"),
    "eager, training": (gradient_of, "forward backward"),
    "grad": (lambda f: grad(lambda x, w: f(x, w).sum()), "forward backward"),
    "vmap": (lambda f: vmap(f, (1, None), 1), "forward"),
    "vmap of grad": (lambda f: vmap(grad(lambda x, w: f(x, w).sum()), (1, None), 1), "forward backward"),
    "ensemble": (lambda f: lambda x, w: vmap(f, (None, 0))(x, torch.stack([w, 2 * w])), "forward"),
    "jacrev": (lambda f: jacrev(lambda x, w: f(x, w).sum(0)), "forward backward"),
    "compiled": (lambda f: torch.compile(f, backend="aot_eager"), "forward"),
    "compiled, training": (lambda f: gradient_of(torch.compile(f, backend="aot_eager")), "forward backward"),
}


@pytest.mark.parametrize("door", DOORS)
def test_one_kernel_per_direction_by_every_door(door, monkeypatch):
    launched, run = [], Launch.run
    monkeypatch.setattr(Launch, "run", lambda self, arrays: (launched.append(self.kernel.plan.direction), run(self, arrays))[1])
    make, directions = DOORS[door]
    x, w = torch.randn(5, 4, 3), torch.rand(3, requires_grad=True)
    call = make(lambda x, w: flexsn.scan(lambda x, v, w: ((x + v * w.sigmoid()).tanh(), x + v), [x], [None], [w]).outputs[0])
    for _ in range(2):
        launched.clear()
        call(x, w)
        assert " ".join(launched) == directions


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # Inductor's own
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_compiled_call_drops_no_tangents(compiler, warm):
    """Generated code calls kernels past the dispatcher, where autograd would have seen them."""
    neuron, x = flexsn.FlexSN(lambda x, v: ((x + v).tanh(), x + v), 1, 1, stateful=False), torch.randn(5, 3)
    for recorded in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(neuron, backend=compiler, fullgraph=True)
        with torch.set_grad_enabled(recorded):
            if warm:
                compiled(x)
            with forward_ad.dual_level():
                compiled(x)  # without tangents it runs
                with pytest.raises(ForwardModeError):
                    compiled(forward_ad.make_dual(x, torch.ones_like(x)))


def test_forward_mode_over_vmap():
    x, v, w = (double(*shape) for shape in OPERANDS.values())
    both = torch.stack([w, 2.0 * w])
    got = jvp(torch.func.vmap(lambda w: loss(x, v, w)), (both,), (torch.ones_like(both),))
    for k in range(2):
        assert_same([t[k] for t in got], jvp(lambda w: loss(x, v, w, "torch"), (both[k],), (torch.ones_like(w),)))
