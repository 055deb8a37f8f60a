"""On a GPU: what the interpreter cannot show. Run by `make test-gpu`."""

import pytest
import torch
from cores import adlif, lif
from fuzzing import batch, campaign
from helpers import check
from test_triton_ops import DTYPES, different_ops

import flexsn
from flexsn import surrogate
from flexsn._runtime.triton import kernel as launch_triton

pytestmark = pytest.mark.gpu


def core(x, v):
    h = v + (x - v) / 3.0
    s = surrogate.sigmoid(h - 1.0)
    return s, h * (1.0 - s)


def operands(T, *shape, device="cuda", dtype=torch.float32):
    return torch.randn(T, *shape, device=device).mul_(1.5).to(dtype)


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip((*a.outputs, *a.states), (*b.outputs, *b.states), strict=True))


def test_auto_picks_triton_for_cuda_tensors(recwarn):
    x = operands(5, 100)
    assert same(flexsn.scan(core, [x], [None], strict=True), flexsn.scan(core, [x], [None], backend="torch"))
    assert not recwarn.list


@pytest.mark.parametrize("many", [False, True])
def test_random_cores(many):
    """At length: `python tools/fuzz.py --device cuda`."""
    with batch.on_gpu(many):
        verdicts = [verdict for _, verdict in campaign.run([f"20261125/{k}" for k in range(100, 112)], "triton")]
    assert verdicts == ["ok"] * 12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("exponent", [2, 3, -1, -2, 0.5, -0.5])
def test_powers_of_16_bits_are_rounded_as_eagers(exponent, dtype):
    x, power = operands(1, 4096).abs(), lambda x: x.to(dtype) ** exponent
    assert same(flexsn.scan(power, [x], [], strict=True), flexsn.scan(power, [x], [], backend="torch"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forward_bits(dtype):
    """Division by a number is eager's multiplication by its reciprocal; division by a tensor is a division."""

    def exact(x, v, tau):
        h = v + (x - v) / 3.0 - v / tau + (x / 7.0).sqrt().nan_to_num()
        return torch.where(h > 1.0, h.round(), h.floor()), torch.maximum(h, x).clamp(-2.0, 2.0), h * 0.9

    x, tau = operands(33, 1001, dtype=dtype), torch.tensor(1.7, dtype=dtype, device="cuda")
    assert same(*(flexsn.scan(exact, [x], [None], [tau], backend=b) for b in ("triton", "torch")))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_op_means_what_it_does_in_eager(dtype):
    """Denormals are no zeros, in the functions of CUDA's library either."""
    assert not different_ops(dtype, "cuda")


def test_log_sigmoid_of_a_param():
    """Of PyTorch's two results the second is empty on a GPU. Its gradient is computed from the param alone."""

    def gated(x, v, p):
        return torch.nn.functional.logsigmoid(p).exp(), v + x

    check(gated, [operands(5, 40)], [None], [torch.randn(40, device="cuda")], exact=False)


def test_same_bits_every_run():
    x = operands(40, 10_007).requires_grad_()
    w = torch.full((10_007,), 0.4, device="cuda", requires_grad=True)

    def learnt(x, v):
        h = v + (x - v) * torch.sigmoid(w)
        s = surrogate.atan(h - 1.0)
        return s, h * (1.0 - s)

    runs = []
    for _ in range(3):
        y = flexsn.scan(learnt, [x], [None], backend="triton").outputs[0]
        runs.append((y, *torch.autograd.grad(y.cumsum(0).sum(), [x, w])))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_more_than_2_31_elements():
    T, N = 3, (2**31 + 4096) // 3 // 16 * 16 + 16
    x = torch.empty(T, N, device="cuda", dtype=torch.float16).normal_(0.8, 1.0)
    assert x.numel() > 2**31
    x.requires_grad_()
    y = flexsn.scan(core, [x], [None], backend="triton").outputs[0]
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    for part in (slice(0, 1000), slice(N - 1000, N)):
        small = x[:, part].detach().clone().requires_grad_()
        expected = flexsn.scan(core, [small], [None], backend="torch").outputs[0]
        assert torch.equal(y[:, part], expected)
        torch.testing.assert_close(grad[:, part], torch.autograd.grad(expected.sum(), small)[0])


def test_other_streams():
    x = operands(64, 100_000)
    expected = flexsn.scan(core, [x], [None], backend="torch")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            busy = busy @ busy * 1e-4  # what is computed next must wait for it
        late = x + 0 * busy.sum().nan_to_num()
        found = flexsn.scan(core, [late], [None], backend="triton")
    torch.cuda.current_stream().wait_stream(stream)
    assert same(found, expected)


@pytest.fixture
def leaf_of_another_stream():
    """PyTorch warns of gradients for leaves that were first used on another stream, as those of a capture are."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    yield
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)


def test_cuda_graph(leaf_of_another_stream):
    x = operands(20, 5000).requires_grad_()
    cotangent = torch.randn_like(x)

    def step():
        y = flexsn.scan(core, [x], [None], backend="triton").outputs[0]
        return y, torch.autograd.grad(y, x, cotangent)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, grad = step()
    with torch.no_grad():
        x.copy_(operands(20, 5000))
    graph.replay()
    expected = flexsn.scan(core, [x], [None], backend="torch").outputs[0]
    assert torch.equal(y, expected)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, x, cotangent)[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus():
    found = []
    for index in (1, 0, 1):
        x = operands(20, 3001, device=f"cuda:{index}")
        got = flexsn.scan(core, [x], [None], backend="triton")
        assert same(got, flexsn.scan(core, [x], [None], backend="torch"))
        found.append(got.outputs[0].device.index)
    assert found == [1, 0, 1] and torch.cuda.current_device() == 0


def test_unaligned_and_odd_rows():
    for N, offset in ((4096, 1), (4099, 0), (17, 3)):
        whole = operands(1, 40 * N + offset).flatten()
        x = whole[offset:].view(40, N)
        check(core, [x], [None])


def test_a_number_on_the_cpu_is_a_param():
    x, numbers = operands(20, 300), [torch.tensor(1.75, device="cpu"), torch.tensor(0.5, device="cpu")]
    got, want = (flexsn.scan(lif, [x], [None], numbers, backend=b) for b in ("triton", "torch"))
    torch.testing.assert_close(got.states[0], want.states[0])


def test_channels_last_and_module():
    neuron = flexsn.FlexSN(core, num_states=1, strict=True)
    x = torch.randn(6, 2, 3, 5, 7, device="cuda").transpose(2, 4)
    y = neuron(x)
    again = neuron(x)
    assert y.shape == x.shape and neuron.states[0].device.type == "cuda" and not torch.equal(y, again)
    neuron.reset()
    assert torch.equal(neuron(x), y)


def test_large_broadcast_params_and_their_gradients():
    x, v = operands(50, 64, 33, 17), torch.zeros(64, 33, 17, device="cuda")
    check(
        adlif, [x, operands(50, 64, 33, 17)], [v, v + 0.5], [torch.rand(64, 1, 1, device="cuda"), torch.rand((), device="cuda")], scale=50
    )


def test_autocast_keeps_the_operands_dtypes():
    x = operands(9, 100)
    with torch.autocast("cuda", dtype=torch.float16):
        y = flexsn.scan(core, [x], [None], strict=True).outputs[0]
    assert y.dtype == torch.float32


def test_operands_on_two_devices():
    with pytest.raises(flexsn.errors.FlexSNError, match="is on cpu"):
        flexsn.scan(core, [operands(4, 5)], [torch.zeros(5, device="cpu")])


def test_no_later_size_builds_anything():
    def step(x, v):
        v = 0.6251 * v + x
        return surrogate.sigmoid(v - 1.0), v

    def train(T, N):
        x = operands(T, N).requires_grad_()
        flexsn.scan(step, [x], [None], strict=True).outputs[0].sum().backward()

    def built():
        return sum(len(kernel._builds) for kernel in launch_triton._kernels.values())

    train(4, 4096)
    launch_triton.finish_builds()
    before = built()
    for T, N in ((5, 4096), (1000, 7), (4, 1 << 18), (3, (1 << 18) + 1), (12, 1 << 18), (40, 200_000)):
        train(T, N)
    assert built() == before


@pytest.mark.parametrize("shape", [(40, 300), (3, 5), (64, 16)])
@pytest.mark.parametrize("T", [1, 7, 50])
def test_lengths_and_resets(T, shape):
    """Programs of sequences of which all, some or none have ended; lengths on the CPU."""
    torch.manual_seed(0)
    x, v = operands(T, *shape).requires_grad_(), torch.rand(shape, device="cuda", requires_grad=True)
    lengths, resets = torch.randint(-1, T + 2, shape[:1]), torch.rand(T, shape[0], device="cuda") < 0.2
    runs = []
    for backend in ("triton", "torch"):
        found = flexsn.scan(core, [x], [v], lengths=lengths, resets=resets, backend=backend)
        results = [*found.outputs, *found.states]
        runs.append([*results, *torch.autograd.grad(sum([y.square().sum() for y in results]), [x, v])])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert torch.equal(runs[0][0], runs[1][0])
