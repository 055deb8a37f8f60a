"""On a GPU: compiled, transformed and exported calls. Run by `make test-gpu`."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import flexsn
from flexsn import surrogate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # the compilers of PyTorch 2.11 warn of themselves
]


class PLIF(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.3))

    def forward(self, x, v):
        h = v + (x - v) * self.w.sigmoid()
        s = surrogate.atan(h - 1.0)
        return s, h * (1.0 - s)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), flexsn.FlexSN(PLIF(), num_states=1), nn.Linear(64, 8)).cuda()


def recurrent():
    """A network whose recurrent weights are zero or a quarter: their sums of spikes are exact in any order."""
    torch.manual_seed(0)
    layer = flexsn.Recurrent(flexsn.ALIF(tau=4.0), nn.Linear(64, 64, bias=False), stateful=False)
    net = nn.Sequential(nn.Linear(32, 64), layer, nn.Linear(64, 8)).cuda()
    with torch.no_grad():
        layer.mixing.weight.copy_((torch.rand(64, 64) < 0.1).float() * 0.25)
    return net


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_recurrent_layers_match_eager(mode):
    """Their loops over time are CUDA graphs of flexsn's own; weights that an optimizer changes are read anew."""
    torch._dynamo.reset()
    net, twin = recurrent(), recurrent()
    compiled = torch.compile(net, fullgraph=True, mode=mode)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.01) for n in (net, twin)]
    for T in (20, 20, 20, 33):
        x = torch.randn(T, 6, 32, device="cuda") * 2
        runs = []
        for call, own, optimizer in ((compiled, net, optimizers[0]), (twin, twin, optimizers[1])):
            y = call(x)
            y.square().mean().backward()
            optimizer.step()
            runs.append((y.detach().clone(), gradients(own)))
        torch.testing.assert_close(runs[0], runs[1], rtol=1e-3, atol=1e-5)


def gradients(net):
    found = {n: p.grad.clone() for n, p in net.named_parameters()}
    net.zero_grad()
    return found


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_training_matches_eager(mode, dynamic):
    torch._dynamo.reset()
    net = network()
    compiled = torch.compile(net, fullgraph=True, mode=mode, dynamic=dynamic)
    for T, batch in ((20, 6), (20, 6), (33, 9)):
        x = torch.randn(T, batch, 32, device="cuda")
        runs = []
        for call in (net, compiled, compiled):
            flexsn.reset_net(net)
            y = call(x)
            y.square().mean().backward()
            runs.append((y.detach().clone(), net[1].states[0].detach().clone(), gradients(net)))
        for run in runs[1:]:
            torch.testing.assert_close(run[:2], runs[0][:2], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(run[2], runs[0][2], rtol=1e-3, atol=1e-5)


def graph_launches(call):
    """How many CUDA graphs a call replays, and how many kernels it launches beside them, as CUDA's own trace has it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as traced:
        call()
        torch.cuda.synchronize()
    names = [e.name for e in traced.events()]
    return sum(n == "cudaGraphLaunch" for n in names), sum(n in ("cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx") for n in names)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_training_step_replays_cuda_graphs(mode):
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(32, 64), flexsn.FlexSN(PLIF(), num_states=1, stateful=False), nn.Linear(64, 8)).cuda()
    compiled, x, reference = torch.compile(net, fullgraph=True, mode=mode), torch.randn(20, 6, 32, device="cuda"), []

    def step():
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x).square().mean().backward()

    net(x).square().mean().backward()
    reference = gradients(net)
    for _ in range(4):  # warm-up, recording, replays
        net.zero_grad()
        step()
        torch.testing.assert_close(gradients(net), reference, rtol=1e-3, atol=1e-5)
    replayed, launched = graph_launches(step)
    assert replayed == (2 if mode == "reduce-overhead" else 0), (replayed, launched)  # forward and backward
    assert launched > 0 if mode == "default" else launched < 10  # beside the graphs: gradients are added up


def test_cuda_graphs_are_used_and_carried_states_survive_them():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net, x = network(), torch.randn(5, 20, 6, 32, device="cuda")
    reference = copy.deepcopy(net)
    compiled = torch.compile(net, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):  # warm-up, recording, replays
            flexsn.reset_net(net)
            flexsn.reset_net(reference)
            kept = []
            for piece in x:  # states go from call to call
                torch.testing.assert_close(compiled(piece).clone(), reference(piece), rtol=1e-4, atol=1e-5)
                kept.append((net[1].states[0], reference[1].states[0]))
            for mine, want in kept:  # later replays have not written over earlier states
                torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5)
        assert graph_launches(lambda: compiled(x[0]))[0] == 1
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 0


class PerStep(nn.Module):
    """Layers over [T, batch, ...] as over [T * batch, ...]."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        y = self.layers(x.flatten(0, 1))
        return y.reshape(*x.shape[:2], *y.shape[1:])


def spiking_conv(before, after):
    return nn.Sequential(PerStep(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after)), flexsn.LIF(surrogate=surrogate.sigmoid))


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = spiking_conv(channels, channels)

    def forward(self, x):
        return x + self.body(x)


NETWORKS = {
    "vgg": lambda: [
        spiking_conv(3, 8),
        PerStep(nn.MaxPool2d(2)),
        spiking_conv(8, 16),
        PerStep(nn.Flatten(), nn.Linear(256, 10)),
    ],
    "residual": lambda: [spiking_conv(3, 8), Residual(8), Residual(8), PerStep(nn.Flatten(), nn.Linear(512, 10))],
}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", NETWORKS)
def test_training_of_convolutional_networks_matches_eager(name, mode):
    """In double precision, where no spike hangs on how Inductor rounds; with carried states, whose values are compared too."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(*NETWORKS[name]()).cuda().double()
    compiled, pieces, runs = torch.compile(net, fullgraph=True, mode=mode), torch.rand(2, 4, 3, 3, 8, 8, device="cuda").double(), []
    neurons = [m for m in net.modules() if isinstance(m, flexsn.FlexSN)]
    for call in (net, compiled, compiled, compiled):
        flexsn.reset_net(net)
        ys = [call(piece).clone() for piece in pieces]
        sum(y.square().mean() for y in ys).backward()
        runs.append((*(y.detach() for y in ys), *(m.states[0].detach().clone() for m in neurons), gradients(net)))
    assert not torch.equal(runs[0][0][0], runs[0][0][1]), "there are spikes"
    for run in runs[1:]:
        torch.testing.assert_close(run, runs[0], rtol=1e-6, atol=1e-8)


def test_a_used_module_moves_with_its_states():
    net, x = network(), torch.randn(20, 6, 32, device="cuda")
    want = [net(x), net(x)]
    flexsn.reset_net(net)
    first = net(x)
    net.cpu()
    assert net[1].states[0].device.type == "cpu"
    moved = net(x.cpu())
    net.cuda()
    again = net(x)
    for got, reference in zip((first, moved.cuda()), want, strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-4, atol=1e-5)
    assert again.is_cuda and net[1].states[0].is_cuda


LOOPS = {
    "hop": flexsn.lowlevel.flex_sn_scan, "scan": flexsn.lowlevel.lowerable_scan, "while_loop": flexsn.lowlevel.lowerable_while_loop_scan,
}  # fmt: skip


@pytest.mark.parametrize("name, grad", [("hop", False), ("hop", True), ("scan", False), ("while_loop", False)])
def test_scans_of_the_low_level_compile_whole(name, grad):
    """Gradients that Inductor makes of PyTorch's `scan` are wrong, which a warning says; `while_loop` has none."""
    torch._dynamo.reset()
    core, found = PLIF().cuda(), []
    x, v = torch.randn(9, 6, 5, device="cuda"), torch.rand(6, 5, device="cuda")
    compiled = torch.compile(lambda x, v: LOOPS[name](core, 1, 1, 1, x, v), fullgraph=True)
    for call in (lambda x, v: flexsn.lowlevel.eager_scan(core, 1, 1, 1, x, v), compiled):
        with torch.set_grad_enabled(grad):
            results = call(x, v)
        found.append((*results, *(torch.autograd.grad(results[0].sum(), core.w) if grad else ())))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    code = """
import torch, flexsn
from torch._dynamo.utils import counters
net = torch.nn.Sequential(torch.nn.Linear(4, 8), flexsn.LIF(tau=2.0, learn_tau=True)).cuda()
torch.compile(net, fullgraph=True)(torch.randn(5, 3, 4, device="cuda")).sum().backward()
print(counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"])
"""
    found = []
    for _ in range(2):
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(done.stdout.strip())
    assert found == ["0 0", "1 2"]


def test_a_decomposed_program_runs_on_the_gpu():
    net, x = network().eval(), torch.randn(12, 6, 32, device="cuda")
    program = torch.export.export(net, (x,))
    flexsn.reset_net(net)
    with torch.no_grad():
        want = net(x)
    for loop in ("unroll", "scan"):
        with torch.no_grad():
            torch.testing.assert_close(flexsn.decompose(program, loop).module()(x), want, rtol=1e-4, atol=1e-5)


def test_bits_of_the_node():
    torch._dynamo.reset()
    x = torch.randn(20, 6, 64, device="cuda")
    net = network()[1]
    with torch.no_grad():
        eager = net(x)
        net.reset()
        assert torch.equal(torch.compile(net, fullgraph=True)(x), eager)


def test_autocast():
    torch._dynamo.reset()
    net, x = network(), torch.randn(20, 6, 32, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
        eager = net(x)
        net[1].reset()
        compiled = torch.compile(net, fullgraph=True)(x)
    assert compiled.dtype is eager.dtype is torch.bfloat16
    torch.testing.assert_close(compiled, eager, rtol=0.05, atol=0.05)


def test_transforms():
    net = network()
    x = torch.randn(4, 20, 6, 32, device="cuda")

    def loss(params, x):
        flexsn.reset_net(net)
        return torch.func.functional_call(net, params, (x,)).square().mean()

    params = dict(net.named_parameters())
    per_sample = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    flexsn.reset_net(net)
    for k in range(4):
        loss(params, x[k]).backward()
        want = gradients(net)
        torch.testing.assert_close({n: g[k] for n, g in per_sample.items()}, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("op", ["scan", "forward", "backward"])
def test_opcheck(op):
    from flexsn._capture.signature import make_signature
    from flexsn._capture.trace import Meta
    from flexsn._operator.library import text_of
    from flexsn._program.cache import program_from
    from flexsn._program.captured import draw

    def core(x, v, w):
        h = v * w + x
        return surrogate.atan(h - 1.0), h

    sig, device = make_signature(core, 1, 1, 1), torch.device("cuda")
    made = draw(core, sig, [Meta((6, 5), torch.float32), None, Meta((5,), torch.float32)], device, {})
    made.differentiate(core, {}, device)
    text = text_of(made, vjp=True)
    x, w = torch.randn(20, 6, 5, device="cuda", requires_grad=op == "scan"), torch.rand(5, device="cuda", requires_grad=op == "scan")
    if op == "scan":
        torch.library.opcheck(torch.ops.flexsn.scan, (text, [x], [None], [w], True))
        return
    rows = program_from(text, device).checkpoints(20)
    forward = (text, [x], [None], [w], [6, 5], rows, True, False)
    if op == "forward":
        torch.library.opcheck(torch.ops.flexsn.forward, forward)
    else:
        rows, roles = torch.ops.flexsn.forward(*forward), ["v0", "c0", "y0"]
        found = dict(zip(roles, rows, strict=True))
        args = (text, [x], [None], [w], [found["c0"]], [torch.ones_like(x)], ["gy0"], ["gx0", "gv0", "gp0"], [6, 5])
        torch.library.opcheck(torch.ops.flexsn.backward, args)


def test_export_in_a_new_process(tmp_path):
    net, x = network().eval(), torch.randn(20, 6, 32, device="cuda")
    sizes = {0: torch.export.Dim("T", min=2, max=4096), 1: torch.export.Dim("B", min=2, max=512)}
    program = torch.export.export(net, (x,), dynamic_shapes=(sizes,))
    torch.export.save(program, tmp_path / "net.pt2")
    y = torch.randn(33, 9, 32, device="cuda")
    flexsn.reset_net(net)
    with torch.no_grad():
        torch.save((y, net(y)), tmp_path / "pair.pt")
    code = (
        "import torch, flexsn\n"
        f"x, want = torch.load(r'{tmp_path}/pair.pt')\n"
        f"exported = torch.export.load(r'{tmp_path}/net.pt2').module()\n"
        "torch.testing.assert_close(exported(x), want, rtol=1e-4, atol=1e-5)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
