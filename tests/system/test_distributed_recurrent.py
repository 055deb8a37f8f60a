"""Data parallel with recurrent layers: two processes against one on the whole batch. Checks run in several processes (`ranks.py`)."""

import pytest
import torch
from ranks import launch
from test_distributed_data import DDP, full, ids, mesh_of, part, same, whole_batch
from torch import nn
from torch.distributed.fsdp import fully_shard

import flexsn

H = 8


def by_function():
    w = nn.Parameter(0.5 * torch.randn(H, H))
    return flexsn.Recurrent(flexsn.ALIF(v_threshold=0.3), lambda y: y @ w)


def network():
    torch.manual_seed(0)
    layer = flexsn.Recurrent(flexsn.LIF(learn_tau=True, v_threshold=0.3, per_channel=H), nn.Linear(H, H))
    net = nn.Sequential(nn.Linear(6, H), layer, nn.Linear(H, H), by_function(), nn.Linear(H, 3))
    with torch.no_grad():
        for linear in net[0:3:2]:
            linear.weight *= 5.0  # for spikes
    return net.to(torch.get_default_device(), torch.float64)


def train(call, net, parts, steps=3):
    """Gradients of every step, and the parameters at the end, of a mean over the processes' parts."""
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        flexsn.reset_net(net)
        (call(parts(step)) - 0.5).square().mean().backward()
        found.append({name: full(p.grad).clone() for name, p in net.named_parameters()})
        optimizer.step()
    return [*found, {name: full(p).detach() for name, p in net.named_parameters()}]


def alone():
    net = network()
    found = train(net, net, lambda step: whole_batch(step))
    assert len(found[0]) == 10 and all(g.abs().sum() > 0 for g in found[0].values()), "the test would see nothing"
    return found


def check_ddp(rank, world):
    want = alone()
    for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}):
        net = network()
        for a, b in zip(
            train(DDP(net, device_ids=ids(), **options), net, lambda step: part(whole_batch(step), rank, world)), want, strict=True
        ):
            same(a, b)


def check_ddp_compiled(rank, world):
    net = network()
    call = DDP(torch.compile(net, backend="aot_eager"), device_ids=ids())
    for a, b in zip(train(call, net, lambda step: part(whole_batch(step), rank, world)), alone(), strict=True):
        same(a, b)


def check_fsdp(rank, world):
    """The whole network, or layer by layer: products take whole weights."""
    want = alone()
    for layers in ((), (0, 1, 2, 3, 4)):
        net = network()
        for k in layers:
            fully_shard(net[k], mesh=mesh_of(world))
        fully_shard(net, mesh=mesh_of(world))
        for a, b in zip(train(net, net, lambda step: part(whole_batch(step), rank, world)), want, strict=True):
            same(a, b)


@pytest.mark.slow
def test_gradients_are_those_of_one_process(tmp_path):
    launch(__file__, 2, ["check_ddp", "check_ddp_compiled", "check_fsdp"], tmp_path)
