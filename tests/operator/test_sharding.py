"""DTensors as operands: what lies where, what is communicated, what is refused.

Checks are the functions named `check_*`; they run in several processes at once (`ranks.py`), on GPUs too.
"""

import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import launch
from test_distributed_data import PLIF, capturing, full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flexsn
from flexsn import neuron_parallel, surrogate
from flexsn._runtime import parallel_time
from flexsn.errors import FallbackWarning, ShardingError

T, SHAPE = 9, (4, 8, 6)  # batch, channels, space: the last is not divisible by four


def plif(x, v, w):
    h = v + (x - v) * w.sigmoid()
    s = surrogate.atan(h - 0.5)
    return s, h, h * (1.0 - s)


def leaky(x, v, w):
    h = v + (x - v) * w.sigmoid()
    return h.tanh(), h


def device():
    return torch.get_default_device().type


def random(*shape):
    return torch.randn(shape, dtype=torch.float64)


def close(got, want):
    torch.testing.assert_close(full(got), want, rtol=1e-10, atol=1e-10)


def compare(mesh, x_lies, v_lies, w, w_lies, core=plif):
    """Outputs, final states and gradients of a sharded call are those of the whole one, and lie as they should."""
    torch.manual_seed(3)
    x, v = random(T, *SHAPE) * 2.0, None if v_lies is None else random(*SHAPE)
    w = w.detach()
    operands = [t.clone().requires_grad_() for t in (x, v, w) if t is not None]
    spread = [distribute_tensor(t, mesh, lies).requires_grad_() for t, lies in ((x, x_lies), (v, v_lies), (w, w_lies)) if t is not None]
    results = []
    for x, *v, w in (operands, spread):
        done = flexsn.scan(core, (x,), v or (None,), (w,), strict=True)
        cotangents = [
            torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator(device()).manual_seed(k)) for k, y in enumerate(done.outputs)
        ]
        if isinstance(x, DTensor):
            cotangents = [distribute_tensor(g, mesh, x_lies) for g in cotangents]
            assert all(y.placements == tuple(x_lies) for y in (*done.outputs,)), [y.placements for y in done.outputs]
        results.append(([*done.outputs, *done.states], torch.autograd.grad(done.outputs, [x, *v, w], cotangents)))
    (values, grads), (spread_values, spread_grads) = results
    assert all(g.abs().sum() > 0 for g in grads)
    for got, want in zip(spread_values, values, strict=True):
        assert got.shape == want.shape
        close(got, want)
    for got, want, operand in zip(spread_grads, grads, spread, strict=True):
        assert got.placements == operand.placements
        close(got, want)


PARAMS = {"number": (), "channel": (8, 1), "neuron": SHAPE, "batch": (4, 1, 1)}


def check_any_step_dim(rank, world):
    mesh = init_device_mesh(device(), (world,))
    for shape in PARAMS.values():
        w = random(*shape)
        for dim in (1, 2, 3):
            compare(mesh, [Shard(dim)], None, w, [Replicate()])
            compare(mesh, [Shard(dim)], [Shard(dim - 1)], w, [Replicate()])
        compare(mesh, [Shard(1)], [Replicate()], w, [Replicate()])  # the state follows
        compare(mesh, [Replicate()], [Replicate()], w, [Replicate()])
    for shape, dim in (((8, 1), 0), (SHAPE, 0), (SHAPE, 1)):  # sharded params: along the input's dim or another
        for x_dim in (1, 2):
            compare(mesh, [Shard(x_dim)], None, random(*shape), [Shard(dim)])


def check_no_communication(rank, world):
    """Forward none; backward only the sum of each replicated param's gradient."""
    mesh = init_device_mesh(device(), (world,))
    for dim in (1, 2, 3):
        x = distribute_tensor(random(T, *SHAPE), mesh, [Shard(dim)]).requires_grad_()
        w = distribute_tensor(random(), mesh, [Replicate()]).requires_grad_()
        with CommDebugMode() as seen:
            y = flexsn.scan(plif, (x,), (None,), (w,), strict=True).outputs[0]
        assert seen.get_total_counts() == 0, seen.get_comm_counts()
        with CommDebugMode() as seen:
            y.backward(torch.ones_like(y))
        assert seen.get_total_counts() == 1 and w.grad.placements == (Replicate(),), seen.get_comm_counts()
        local = w.grad.to_local()
        parts = [torch.empty_like(local) for _ in range(world)]
        dist.all_gather(parts, local)
        assert all(torch.equal(p, local) for p in parts)


def check_missing_reduction_is_seen(rank, world):
    """Were the gradient of `w` left as each rank's own sum, `compare` would fail."""
    from flexsn._operator import dtensor as sharding

    mesh, whole = init_device_mesh(device(), (world,)), sharding._InOwnLayout.backward
    local = lambda ctx, grad: (
        DTensor.from_local(grad.to_local(), mesh, ctx.placements, run_check=False, shape=grad.shape, stride=grad.stride()),
        None,
    )
    sharding._InOwnLayout.backward = staticmethod(local)
    try:
        with pytest.raises(AssertionError, match="not close"):
            compare(mesh, [Shard(1)], None, random(8, 1), [Replicate()])
    finally:
        sharding._InOwnLayout.backward = staticmethod(whole)


def gated(x, gate, v):
    h = v * 0.5 + torch.where(gate > 0, x, 0.0)
    return h.tanh(), h


def check_an_operand_laid_out_anew_without_a_gradient(rank, world):
    """`gate` has none, and is no partial sum nor sharded along a dim of one inside."""
    mesh, shape = init_device_mesh(device(), (world,)), (T, 4, 1)
    for lies in (Replicate(), Shard(2), Partial()):
        x = distribute_tensor(random(T, 4, 8), mesh, [Shard(1)]).requires_grad_()
        part = random(*shape) if lies.is_partial() else None
        gate = distribute_tensor(random(*shape), mesh, [lies]) if part is None else DTensor.from_local(part, mesh, [lies], run_check=False)
        grads = []
        for backend in ("auto", "torch"):
            y = flexsn.scan(gated, (x, gate.requires_grad_()), (None,), backend=backend).outputs[0]
            found = torch.autograd.grad(y.sum().full_tensor(), (x, gate), allow_unused=True)
            assert found[1] is None
            grads.append(found[0])
        close(grads[0], full(grads[1]))


def check_a_cotangent_sharded_along_a_dim_of_one(rank, world):
    b = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    for sizes in ((1, world), (world, 1)):
        mesh, found = init_device_mesh(device(), sizes), []
        torch.manual_seed(3)
        x = distribute_tensor(random(T, 1, 8), mesh, [Replicate()] * 2)
        for backend in ("auto", "torch"):
            y = flexsn.scan(lambda x, v, b: leaky(x, v, b)[:2], (x,), (None,), (b,), backend=backend).outputs[0]
            cut = y.redistribute(placements=[Shard(1), Shard(2)])
            found.append(torch.autograd.grad(cut.square().sum().full_tensor(), b)[0])
        close(*found)


class Own(nn.Module):
    """A network that a core of its own leads to, whose other parts it does not read."""

    def __init__(self, how, backend):
        super().__init__()
        self.enc, self.w, self.norm, self.out = nn.Linear(6, 8), nn.Parameter(torch.zeros(8)), nn.BatchNorm1d(8), nn.Linear(8, 3)
        core = self.step if how == "method" else lambda x, v: self.step(x, v)
        self.neuron = flexsn.FlexSN(core, num_states=1, backend=backend, stateful=False)

    def step(self, x, v):
        h = v + (x - v) * self.w.sigmoid()
        s = surrogate.atan(h - 0.5)
        return s, h * (1.0 - s)

    def forward(self, x):
        s = self.neuron(self.enc(x))
        return self.out(self.norm(s.flatten(0, 1)).unflatten(0, s.shape[:2]))


def check_fsdp_of_a_core_that_leads_to_its_network(rank, world):
    from torch.distributed.fsdp import fully_shard

    mesh, x = init_device_mesh(device(), (world,)), torch.randn(T, 4, 6)
    for how in ("method", "closure"):
        for parts in ((), ("enc", "out")):
            torch.manual_seed(0)
            want, net = Own(how, "torch"), Own(how, "auto")
            net.load_state_dict(want.state_dict())
            for part in parts:
                fully_shard(getattr(net, part), mesh=mesh)
            fully_shard(net, mesh=mesh)
            dist.broadcast(x, 0)
            for one in (want, net):
                one(x).square().sum().backward()
            for name, p in want.named_parameters():
                torch.testing.assert_close(full(dict(net.named_parameters())[name].grad), p.grad, rtol=1e-4, atol=1e-5)


def check_refused(rank, world):
    mesh = init_device_mesh(device(), (world,))
    x, w = random(8, *SHAPE), random()
    with pytest.raises(ShardingError, match=r"input `x` is sharded in time \(dim 0 of \[8, 4, 8, 6\]\)") as caught:
        flexsn.scan(plif, (distribute_tensor(x, mesh, [Shard(0)]),), (None,), (w,))
    assert "Shard(1)" in str(caught.value) and "plif" in str(caught.value)
    with pytest.raises(ShardingError, match=r"`x` is a plain tensor while others of this call are DTensors"):
        flexsn.scan(plif, (x,), (None,), (distribute_tensor(w, mesh, [Replicate()]),))
    with pytest.raises(ShardingError, match=r"`v` is a plain tensor"):
        flexsn.scan(plif, (distribute_tensor(x, mesh, [Shard(1)]),), (x[0],), (w,))
    other = init_device_mesh(device(), (1, world))
    with pytest.raises(ShardingError, match="different meshes"):
        flexsn.scan(plif, (distribute_tensor(x, mesh, [Shard(1)]),), (None,), (distribute_tensor(w, other, [Replicate()] * 2),))


def check_partial_and_mixed(rank, world):
    """Partial sums are reduced first; an operand that lies otherwise follows the first; plain params are replicas."""
    mesh = init_device_mesh(device(), (world,))

    def both(x, z, v, w):
        h = v * w + x * z
        return h.tanh(), h

    torch.manual_seed(5)
    x, z, w = random(T, *SHAPE), random(T, *SHAPE), random(8, 1)
    leaves = [t.clone().requires_grad_() for t in (x, z, w)]
    y = flexsn.scan(both, leaves[:2], (None,), leaves[2:], strict=True).outputs[0]
    want = torch.autograd.grad(y.square().sum(), leaves)
    spread = [distribute_tensor(x, mesh, [Shard(2)]).requires_grad_(), distribute_tensor(z, mesh, [Shard(3)]).requires_grad_()]
    plain = w.clone().requires_grad_()
    y = flexsn.scan(both, spread, (None,), (plain,), strict=True).outputs[0]
    assert y.placements == (Shard(2),)
    got = torch.autograd.grad(y.square().sum().full_tensor(), [*spread, plain])
    assert [g.placements for g in got[:2]] == [(Shard(2),), (Shard(3),)]
    for g, expected in zip(got, want, strict=True):
        close(g, expected)
    halves = DTensor.from_local(x / world, mesh, [Partial()], run_check=False).requires_grad_()
    y = flexsn.scan(both, (halves, spread[1]), (None,), (plain,), strict=True).outputs[0]
    got = torch.autograd.grad(y.square().sum().full_tensor(), [halves, plain])
    close(got[0], want[0])
    close(got[1], want[2])


def check_two_mesh_dims(rank, world):
    """Batch over one dim of the mesh, channels over the other."""
    mesh = init_device_mesh(device(), (2, world // 2), mesh_dim_names=("data", "model"))
    for shape in PARAMS.values():
        compare(mesh, [Shard(1), Shard(2)], None, random(*shape), [Replicate(), Replicate()])
        compare(mesh, [Shard(1), Replicate()], [Shard(0), Replicate()], random(*shape), [Replicate(), Replicate()])
        compare(mesh, [Shard(3), Shard(1)], [Shard(2), Replicate()], random(*shape), [Replicate(), Replicate()])
    compare(mesh, [Shard(1), Shard(2)], None, random(8, 1), [Replicate(), Shard(0)])


def check_captured(rank, world):
    """Modules whose captured params are DTensors; states are carried as DTensors."""
    mesh = init_device_mesh(device(), (world,))
    for make, name in (
        (lambda: flexsn.FlexSN(PLIF(8), num_states=1, strict=True), "core.w"),
        (lambda: flexsn.FlexSN(capturing(8), 1, 1, strict=True), "decay"),
    ):
        torch.manual_seed(1)
        x = random(T, 4, 8)
        alone, layer = make().double(), distribute_module(make().double(), mesh)
        for dim in (1, 2):
            alone.zero_grad(), layer.zero_grad(), alone.reset(), layer.reset()
            spread = distribute_tensor(x, mesh, [Shard(dim)])
            for piece, part in ((x[:4], spread[:4]), (x[4:], spread[4:])):
                want, got = alone(piece), layer(part)
                close(got, want)
            assert isinstance(layer.states[0], DTensor)
            want.square().sum().backward(), got.square().sum().backward()
            grad = dict(layer.named_parameters())[name].grad
            assert grad.placements == (Replicate(),)
            close(grad, dict(alone.named_parameters())[name].grad)


def check_falls_back(rank, world):
    """A core that no kernel can express runs eagerly on DTensors, across the mesh."""
    mesh = init_device_mesh(device(), (world,))

    def mixing(x, v):
        h = v + x - x.mean()
        return h, h

    x = random(T, 4, 8)
    want = flexsn.scan(mixing, (x,), (torch.zeros(4, 8, dtype=x.dtype),), strict=True).outputs[0]  # in pieces
    spread = distribute_tensor(x, mesh, [Shard(1)])
    with pytest.warns(FallbackWarning):
        got = flexsn.scan(mixing, (spread,), (distribute_tensor(torch.zeros(4, 8, dtype=x.dtype), mesh, [Shard(0)]),)).outputs[0]
    close(got, want)


def both_ways(mesh, core, shape, x_lies, v_lies, w_shape, w_lies, backend, v_shape=None):
    """Outputs, final states and gradients of a sharded call and of the whole one; `w_lies` may be None: a plain tensor."""
    torch.manual_seed(2)
    x, v, w = random(T, *shape), random(*(v_shape or shape)), random(*w_shape)
    results = []
    for spread in (False, True):
        place = (lambda t, lies: distribute_tensor(t, mesh, lies)) if spread else (lambda t, lies: t.clone())
        leaves = [place(x, x_lies).requires_grad_(), (w.clone() if w_lies is None else place(w, w_lies)).requires_grad_()]
        start = None if v_lies is None else place(v, v_lies).requires_grad_()
        done = flexsn.scan(core, leaves[:1], (start,), leaves[1:], backend=backend)
        leaves += [] if start is None else [start]
        y = full(done.outputs[0])
        grads = torch.autograd.grad((y * y.detach().cos()).sum(), leaves)
        assert all(g.placements == t.placements for g, t in zip(grads, leaves, strict=True) if isinstance(t, DTensor))
        results.append([y, full(done.states[0]), *map(full, grads)])
    want, got = results
    assert all(g.any() for g in want)
    for a, b in zip(got, want, strict=True):
        close(a, b)


def check_eager_loop(rank, world):
    """Default states, plain params and what a core makes itself are replicas."""
    mesh = init_device_mesh(device(), (world,))

    def mixing(x, v, w):
        h = v * w + x * torch.arange(8.0) - x.mean()
        return h.tanh(), h

    for core, backend in ((leaky, "torch"), (mixing, "torch"), (mixing, "auto")):
        for x_lies, v_lies in (([Shard(2)], None), ([Shard(1)], [Replicate()]), ([Replicate()], [Shard(0)])):
            for w_lies in (None, [Replicate()], [Shard(0)]):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FallbackWarning)
                    both_ways(mesh, core, (4, 8), x_lies, v_lies, (8,), w_lies, backend)


def check_dim_of_one(rank, world):
    """A sharded dim of size 1 lies on one rank; others broadcast along it."""
    mesh = init_device_mesh(device(), (world,))
    for shape, x_lies in (((1, 8), [Shard(1)]), ((4, 1), [Shard(2)]), ((1, 1), [Shard(1)])):
        for w_shape in ((), (1,), (8,)):
            for w_lies in (None, [Replicate()]):
                for backend in ("auto", "torch"):
                    both_ways(mesh, leaky, shape, x_lies, None, w_shape, w_lies, backend)
    for backend in ("auto", "torch"):
        both_ways(mesh, leaky, (4, 8), [Shard(2)], [Shard(0)], (8,), None, backend, v_shape=(1, 8))


def check_param_without_gradient(rank, world):
    """An output that the loss does not take, and all that depends on the param."""
    mesh = init_device_mesh(device(), (world,))
    for backend in ("auto", "torch"):
        x = distribute_tensor(random(T, *SHAPE), mesh, [Shard(2)]).requires_grad_()
        w = distribute_tensor(random(6), mesh, [Replicate()]).requires_grad_()
        flexsn.scan(lambda x, v, w: (x + v, w * x, v * 0.5 + x), (x,), (None,), (w,), backend=backend).outputs[0].sum().backward()
        assert w.grad is None and x.grad.placements == (Shard(2),)


def check_made_in_the_core(rank, world):
    """A tensor that the core makes for all channels, beside sharded ones: in the kernel, and on params alone."""
    mesh = init_device_mesh(device(), (world,))

    def ramp(x, v, w):
        h = v * torch.arange(8.0) * 0.1 + (x - v) * w
        return h.tanh(), h

    def scaled(x, v, w):
        h = v * torch.where(torch.arange(8) > 2, w, torch.ones(8)).softmax(0) + x
        return h.tanh(), h

    for core in (ramp, scaled):
        for x_lies in ([Shard(2)], [Shard(1)], [Replicate()]):
            for w_lies in (None, [Replicate()], [Shard(0)]):
                both_ways(mesh, core, (4, 8), x_lies, None, (8,), w_lies, "auto")


# --- parallelize_module -----------------------------------------------------------------------------------------------------------------
def neuron(channels):
    return flexsn.FlexSN(PLIF(channels), num_states=1, strict=True)


def mlp():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), neuron(16), nn.Linear(16, 5)).double()
    with torch.no_grad():
        net[0].weight *= 3.0
    return net


def same_after_backward(alone, net, x):
    """One step on the same batch: outputs and every gradient."""
    for call in (alone, net):
        flexsn.reset_net(call)
    want, got = alone(x), net(x)
    close(got, want)
    want.square().sum().backward(), full(got).square().sum().backward()
    whole = dict(alone.named_parameters())
    for name, param in net.named_parameters():
        assert whole[name].grad.abs().sum() > 0
        close(param.grad, whole[name].grad)


def check_parallel_mlp(rank, world):
    mesh, net = init_device_mesh(device(), (world,)), mlp()
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "1": neuron_parallel(), "2": RowwiseParallel()})
    x = random(T, 4, 6)
    dist.broadcast(x, 0)
    same_after_backward(mlp(), net, x)
    assert net[1].states[0].placements == (Shard(1),) and net[0].weight.placements == (Shard(0),)


class Block(nn.Module):
    """Spiking attention and a spiking MLP on `[T, B, tokens, channels]`, heads apart."""

    def __init__(self, channels=16, heads=4):
        super().__init__()
        self.size = channels // heads
        self.q, self.k, self.v, self.out = (nn.Linear(channels, channels, bias=False) for _ in range(4))
        self.q_neuron, self.k_neuron, self.v_neuron = (neuron(channels) for _ in range(3))
        self.up, self.neuron, self.down = nn.Linear(channels, 4 * channels), neuron(4 * channels), nn.Linear(4 * channels, channels)

    def heads(self, x):
        return x.unflatten(-1, (-1, self.size)).transpose(-2, -3)

    def forward(self, x):
        q, k, v = (self.heads(n(f(x))) for f, n in ((self.q, self.q_neuron), (self.k, self.k_neuron), (self.v, self.v_neuron)))
        x = x + self.out((q @ k.transpose(-1, -2) @ v * 0.1).transpose(-2, -3).flatten(-2))
        return x + self.down(self.neuron(self.up(x)))


def block():
    torch.manual_seed(0)
    net = Block().double()
    with torch.no_grad():
        for linear in (net.q, net.k, net.v, net.up):
            linear.weight *= 3.0
    return net


def check_parallel_transformer(rank, world):
    mesh, net = init_device_mesh(device(), (world,)), block()
    plan = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()) | dict.fromkeys(("out", "down"), RowwiseParallel())
    plan |= dict.fromkeys(("q_neuron", "k_neuron", "v_neuron", "neuron"), neuron_parallel())
    parallelize_module(net, mesh, plan)
    x = random(T, 2, 3, 16)
    dist.broadcast(x, 0)
    same_after_backward(block(), net, x)


def check_parts_of_time(rank, world):
    """Few neurons over many steps, of which every rank has some."""

    def leaky(x, v):
        v = v + (x - v) * 0.05
        return v, v

    mesh, kinds, operands = init_device_mesh(device(), (world,)), [], parallel_time._Walk.operands

    def noted(self, arrays):
        kinds.append(self.kind.name)
        return operands(self, arrays)

    x = random(2401, 4)
    dist.broadcast(x, 0)
    found = []
    with mock.patch.object(parallel_time, "LEAST_STEPS", 2048), mock.patch.object(parallel_time._Walk, "operands", noted):
        for given in (x, distribute_tensor(x, mesh, [Shard(1)])):
            leaf = given.detach().requires_grad_()
            y = flexsn.scan(leaky, (leaf,), (None,), exact=False).outputs[0]
            y.square().sum().backward()
            found.append((full(y), full(leaf.grad)))
    assert kinds == ["STATE", "STATE_GRAD"] * 2 or device() == "cuda"
    for a, b in zip(*found, strict=True):
        close(a, b)


def check_lengths_and_resets(rank, world):
    """They are sharded as the batch is; what lies nowhere on the mesh is refused."""
    mesh = init_device_mesh(device(), (world,))
    x, lengths, resets = random(9, 4, 3) * 2, torch.tensor([9, 4, 0, 12], device=device()), random(9, 4) > 0.5
    for t in (x, resets):
        dist.broadcast(t, 0)
    neuron, found = flexsn.LIF(stateful=False, learn_tau=True).to(device()), []
    sharded = [distribute_tensor(t, mesh, [Shard(dim)]) for t, dim in ((x, 1), (lengths, 0), (resets, 1))]
    for given, n, mask in ((x, lengths, resets), sharded):
        leaf = given.detach().requires_grad_()
        y = neuron(leaf, lengths=n, resets=mask)
        found.append((full(y), full(torch.autograd.grad(y.square().sum(), leaf)[0])))
    for a, b in zip(*found, strict=True):
        close(a, b)
    with pytest.raises(ShardingError, match="`lengths` is a plain tensor"):
        neuron(sharded[0], lengths=lengths)


def check_compiled(rank, world):
    """Parallel layers under torch.compile."""
    mesh, net = init_device_mesh(device(), (world,)), mlp()
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "1": neuron_parallel(), "2": RowwiseParallel()})
    x = random(T, 4, 6)
    dist.broadcast(x, 0)
    alone, call = mlp(), torch.compile(net, backend="aot_eager")
    want, got = alone(x), call(x)
    close(got, want)
    want.square().sum().backward(), got.square().sum().backward()
    for (name, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
        assert name
        close(p.grad, q.grad)


SLOW = ["check_compiled"]
CHECKS = [n for n in list(globals()) if n.startswith("check_") and n not in SLOW]


@pytest.mark.slow
def test_two_processes(tmp_path):
    launch(__file__, 2, CHECKS, tmp_path)


@pytest.mark.slow
def test_four_processes(tmp_path):
    launch(__file__, 4, ["check_any_step_dim", "check_two_mesh_dims", "check_parallel_mlp", "check_parallel_transformer"], tmp_path)


@pytest.mark.slow
def test_compiled(tmp_path):
    launch(__file__, 2, SLOW, tmp_path)
