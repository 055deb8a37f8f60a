"""Data parallel: DistributedDataParallel and `fully_shard` against one process on the whole batch.

Checks are the functions named `check_*`; they run in several processes at once (`ranks.py`), on GPUs too.
"""

import copy
import os
import signal
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from ranks import launch, start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

import flexsn
from flexsn import surrogate

T, BATCH, C = 7, 8, 8


# --- a network with every kind of learnable param that a core can have ----------------------------------------------------------------
class PLIF(nn.Module):
    """A module core: its param and buffer are attributes."""

    def __init__(self, channels):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1.0, 1.0, channels))
        self.register_buffer("threshold", torch.full((channels,), 0.3))

    def forward(self, x, v):
        h = v + (x - v) * self.w.sigmoid()
        s = surrogate.atan(h - self.threshold)
        return s, h * (1.0 - s)


def capturing(channels):
    """A function core that captures a param."""
    decay = nn.Parameter(torch.linspace(0.2, 0.9, channels))

    def core(x, v):
        h = v * decay + x
        s = surrogate.sigmoid(h - 0.4)
        return s, h - s

    return core


def explicit(x, v, gain):
    h = v * 0.5 + gain * x
    return h.tanh(), h


def network(dtype=torch.float64):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, C), flexsn.FlexSN(PLIF(C), num_states=1, strict=True),
        nn.Linear(C, C), flexsn.FlexSN(capturing(C), 1, 1, strict=True),
        nn.Linear(C, C), flexsn.FlexSN(explicit, 1, 1, params=[nn.Parameter(torch.linspace(0.5, 1.5, C))], strict=True),
    )  # fmt: skip
    with torch.no_grad():
        for linear in net[::2]:
            linear.weight *= 3.0  # for spikes
    return net.to(dtype=dtype, device=torch.get_default_device())


def whole_batch(seed=1, dtype=torch.float64):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randn(T, BATCH, 6, generator=generator, dtype=dtype)


def part(x, rank, world):
    return x.chunk(world, 1)[rank]


def backward(call, net, x):
    flexsn.reset_net(net)
    loss = (call(x) - 0.5).square().mean()
    loss.backward()
    return loss


def gradients(net):
    return {n: None if p.grad is None else full(p.grad).clone() for n, p in net.named_parameters()}


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reference(x, dtype=torch.float64):
    """What one process computes from the whole batch."""
    net = network(dtype)
    backward(net, net, x)
    found = gradients(net)
    assert len(found) == 9 and all(g.abs().sum() > 0 for g in found.values()), "the test would see nothing"
    return found


def same(got, want, tolerance=1e-9):
    assert list(got) == list(want)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def ids():
    return [torch.cuda.current_device()] if torch.get_default_device().type == "cuda" else None


def mesh_of(world):
    return init_device_mesh(torch.get_default_device().type, (world,))


# --- DistributedDataParallel ------------------------------------------------------------------------------------------------------------
def check_ddp(rank, world):
    x = whole_batch()
    want = reference(x)
    for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-4}):
        net = network()
        call = DDP(net, device_ids=ids(), **options)
        for _ in range(2):  # the second step is where buckets are rebuilt
            net.zero_grad()
            backward(call, net, part(x, rank, world))
            same(gradients(net), want)


def check_missing_reduction_is_seen(rank, world):
    """The comparison above fails when gradients stay on their ranks."""
    x, net = whole_batch(), network()
    call = DDP(net, device_ids=ids())
    with call.no_sync():
        backward(call, net, part(x, rank, world))
    with pytest.raises(AssertionError, match="not close"):
        same(gradients(net), reference(x))


def check_ddp_accumulates(rank, world):
    """`no_sync` for all micro-batches but the last."""
    x = whole_batch()
    net = network()
    call = DDP(net, device_ids=ids())
    pieces = part(x, rank, world).chunk(2, 1)
    for k, piece in enumerate(pieces):
        with nullcontext() if k == len(pieces) - 1 else call.no_sync():
            backward(call, net, piece)
    same({n: g / len(pieces) for n, g in gradients(net).items()}, reference(x))


class Branches(nn.Module):
    """Of two networks a call uses one: params of the other have no gradient in any process."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = network(), network()

    def forward(self, x):
        return self.used(x)


def check_ddp_unused(rank, world):
    x, net = whole_batch(), Branches().double()
    call = DDP(net, device_ids=ids(), find_unused_parameters=True)
    want = reference(x)
    for _ in range(2):
        net.zero_grad()
        backward(call, net, part(x, rank, world))
        same(gradients(net.used), want)
        assert all(g is None or not g.any() for g in gradients(net.unused).values())


def check_ddp_autocast(rank, world):
    """bf16 autocast: the mean of what one process computes from the parts."""
    x, device = whole_batch(dtype=torch.float32), torch.get_default_device().type
    alone, net = network(torch.float32), network(torch.float32)
    call = DDP(net, device_ids=ids())
    with torch.autocast(device, torch.bfloat16):
        for k in range(world):
            backward(alone, alone, part(x, k, world))
        backward(call, net, part(x, rank, world))
    want = {n: g / world for n, g in gradients(alone).items()}
    assert all(g.abs().sum() > 0 for g in want.values())
    same(gradients(net), want, 1e-5)


def check_states_stay(rank, world):
    """Truncated BPTT: states go from piece to piece in their process, past the broadcast of buffers and past checkpoints."""
    x = part(whole_batch(), rank, world)
    alone, net = network(), network()
    call = DDP(net, device_ids=ids())  # buffers are broadcast by default
    names = set(net.state_dict())
    with torch.no_grad():
        net[1].core.threshold += 0.1 * rank  # a buffer: rank 0's is everyone's from the next forward on
    for piece in x.split(3):
        alone_y = alone(piece)
        y = call(piece)
        torch.testing.assert_close(y, alone_y, rtol=1e-12, atol=1e-12)
        for k in (1, 3, 5):
            torch.testing.assert_close(net[k].states, alone[k].states, rtol=1e-12, atol=1e-12)
        others = [torch.empty_like(net[1].states[0]) for _ in range(world)]
        dist.all_gather(others, net[1].states[0].detach().contiguous())
        assert not any(torch.equal(others[0], o) for o in others[1:]), "states of rank 0 on another rank"
        assert set(net.state_dict()) == names and {n for n, _ in net.named_buffers()} == {"1.core.threshold"}
        (y - 0.5).square().mean().backward()
        flexsn.detach_states(net)
        assert not net[1].states[0].requires_grad
    flexsn.reset_net(net)
    assert net[1].states is None
    torch.testing.assert_close(net[1].core.threshold, torch.full((C,), 0.3, dtype=torch.float64))
    torch.testing.assert_close(call(x[:2]), (flexsn.reset_net(alone), alone(x[:2]))[1])


def compiled_ddp(rank, world, backend):
    x = whole_batch()
    net, want = network(), reference(x)
    call = DDP(torch.compile(net, fullgraph=True, backend=backend), device_ids=ids())
    for _ in range(2):
        net.zero_grad()
        backward(call, net, part(x, rank, world))
        same(gradients(net), want)


def check_ddp_compiled(rank, world):
    compiled_ddp(rank, world, "aot_eager")


def check_ddp_inductor(rank, world):
    compiled_ddp(rank, world, "inductor")


# --- fully_shard ------------------------------------------------------------------------------------------------------------------------
def sharded(net, mesh, wrap, **options):
    for k in {"root": (), "layers": range(6), "neurons": (1, 3, 5)}[wrap]:
        fully_shard(net[k], mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def check_fsdp(rank, world):
    """Outside a forward params are shards; neurons see whole ones, and gradients are reduced and scattered."""
    x, mesh, want = whole_batch(), mesh_of(world), reference(whole_batch())
    for wrap in ("root", "layers", "neurons"):
        for reshard in (True, False):
            net = sharded(network(), mesh, wrap, reshard_after_forward=reshard)
            for _ in range(2):
                net.zero_grad()
                backward(net, net, part(x, rank, world))
                assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in net.parameters())
                assert net[1].core.w.to_local().numel() == C // world
                same(gradients(net), want)


def check_fsdp_trains(rank, world):
    """Five steps of Adam end at the params of one process, and its `state_dict` has no states."""
    mesh, alone = mesh_of(world), network()
    net = sharded(network(), mesh, "layers")
    optimizers = [torch.optim.Adam(n.parameters(), lr=1e-2) for n in (alone, net)]
    for step in range(5):
        x = whole_batch(step)
        backward(alone, alone, x)
        backward(net, net, part(x, rank, world))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    saved = {n: full(t) for n, t in net.state_dict().items()}
    same(saved, dict(alone.state_dict()), 1e-7)


def check_fsdp_accumulates(rank, world):
    x, mesh = whole_batch(), mesh_of(world)
    net = sharded(network(), mesh, "layers")
    pieces = part(x, rank, world).chunk(2, 1)
    for k, piece in enumerate(pieces):
        net.set_requires_gradient_sync(k == len(pieces) - 1)
        backward(net, net, piece)
    same({n: g / len(pieces) for n, g in gradients(net).items()}, reference(x))


def check_fsdp_mixed_precision(rank, world):
    """bf16 params inside the neurons, gradients reduced in float32."""
    x, mesh = whole_batch(dtype=torch.float32), mesh_of(world)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net, alone = sharded(network(torch.float32), mesh, "layers", mp_policy=policy), network(torch.float32)
    seen = []
    net[3].register_forward_pre_hook(lambda module, args: seen.append(module.decay.dtype))
    backward(net, net, part(x, rank, world))
    assert seen == [torch.bfloat16]
    sums = {n: torch.zeros_like(p) for n, p in alone.named_parameters()}
    for k in range(world):
        half = copy.deepcopy(alone).bfloat16()
        half[1].core.threshold = alone[1].core.threshold  # buffers keep their dtype
        for layer in half:
            layer.register_forward_pre_hook(lambda module, args: tuple(t.bfloat16() for t in args))
        backward(half, half, part(x, k, world))
        for n, p in half.named_parameters():
            sums[n] += p.grad.float() / world
    for n, g in gradients(net).items():
        assert g.dtype == torch.float32
        assert (g - sums[n]).norm() <= 0.02 * sums[n].norm(), n


def check_fsdp_compiled(rank, world):
    x, mesh, want = whole_batch(), mesh_of(world), reference(whole_batch())
    net = sharded(network(), mesh, "layers")
    call = torch.compile(net, backend="aot_eager")
    for _ in range(2):
        net.zero_grad()
        backward(call, net, part(x, rank, world))
        same(gradients(net), want)


# --- a process that dies ------------------------------------------------------------------------------------------------------------------
def check_killed(rank, world):
    x, net = whole_batch(), network()
    call = DDP(net, device_ids=ids())
    for step in range(100):
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        backward(call, net, part(x, rank, world))
        print("step", step, flush=True)


@pytest.mark.slow
def test_killed_process_ends_the_others(tmp_path):
    codes, texts = start(__file__, 2, ["check_killed"], tmp_path, seconds=60)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, -signal.SIGKILL), "rank 0 did not notice"  # -SIGKILL: it hung, and was ended by the test
    assert "step 2" in texts[0] and "step 3" not in texts[0]
    assert "Connection closed by peer" in texts[0] or "Connection reset by peer" in texts[0], texts[0][-2000:]


SLOW = ["check_ddp_inductor", "check_ddp_compiled", "check_fsdp_compiled", "check_ddp_autocast", "check_fsdp_mixed_precision"]
CHECKS = [n for n in list(globals()) if n.startswith("check_") and n not in ("check_killed", *SLOW)]
FEW = ["check_ddp", "check_states_stay", "check_fsdp"]


@pytest.mark.parametrize(("world", "names"), [(2, CHECKS), pytest.param(4, FEW, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_process(world, names, tmp_path):
    launch(__file__, world, names, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_compiled_and_mixed_precision(world, tmp_path):
    launch(__file__, world, SLOW if world == 2 else SLOW[-2:], tmp_path)
