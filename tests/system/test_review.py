"""What a sceptical first user found."""

import contextlib
import copy
import random
import threading

import pytest
import torch
from torch import nn

import flexsn
from flexsn import errors


def test_a_call_under_autocast_computes_as_outside():
    w = nn.Parameter(torch.rand(2, 2))
    core = lambda x, v: (x * (w @ w).sum(0).float(), v)
    x, v = torch.ones(3, 2), torch.zeros(2)
    want = flexsn.scan(core, (x,), (v,), backend="cpp").outputs[0]
    for backend in ("cpp", "torch"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = flexsn.scan(core, (x,), (v,), backend=backend).outputs[0]
            (grad,) = torch.autograd.grad(got.sum(), [w])
        assert torch.equal(got, want) and grad.dtype == torch.float32


def test_captures_with_clashing_names_stay_apart():
    class Config:
        w = None

    cfg, cfg_w, training = Config(), nn.Parameter(torch.full((2,), 10.0)), nn.Parameter(torch.ones(2))
    cfg.w = nn.Parameter(torch.ones(2))
    neuron = flexsn.FlexSN(lambda x, v: (x * cfg.w + cfg_w * training, v), num_states=1, backend="cpp")
    assert torch.equal(neuron(torch.ones(1, 2)), torch.full((1, 2), 11.0))
    assert [n for n, _ in neuron.named_parameters()] == ["cfg_w", "training_"]


def test_copies_of_a_closure_in_threads():
    w = nn.Parameter(torch.ones(4))
    first = flexsn.FlexSN(lambda x: x * w, num_states=0, backend="torch")
    twin = copy.deepcopy(first)
    with torch.no_grad():
        twin.w.fill_(3.0)
    wrong = []

    def work(neuron, factor):
        for _ in range(100):
            if not torch.equal(neuron(torch.ones(2, 4)), torch.full((2, 4), factor)):
                wrong.append(factor)

    threads = [threading.Thread(target=work, args=a) for a in ((first, 1.0), (twin, 3.0)) * 2]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_forward_hooks_are_part_of_the_core():
    class Inner(nn.Module):
        def forward(self, x):
            return x * 1.0

    class Core(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x)

    x = torch.ones(1, 2)
    one, two = Core(), Core()
    one.inner.register_forward_hook(lambda m, a, y: y * 5)
    two.inner.register_forward_hook(lambda m, a, y: y * 9)
    outputs = [flexsn.scan(c, (x,), backend="cpp").outputs[0][0, 0].item() for c in (one, two)]
    two.inner.register_forward_hook(lambda m, a, y: y * 2)
    assert [*outputs, flexsn.scan(two, (x,), backend="cpp").outputs[0][0, 0].item()] == [5, 9, 18]


def test_python_side_effects_fall_back_to_the_loop():
    class SelfStateful(nn.Module):
        v = 0.0

        def forward(self, x):
            self.v = self.v * 0.5 + x
            return self.v

    count = [0]

    def counting(x):
        count[0] += 1
        return x * count[0]

    x = torch.ones(4, 1)
    for core, want in ((SelfStateful(), [1.0, 1.5, 1.75, 1.875]), (counting, [1.0, 2.0, 3.0, 4.0])):
        with pytest.raises(errors.SideEffectError):
            flexsn.scan(core, (x,), backend="cpp")
        with pytest.warns(errors.FallbackWarning):
            assert flexsn.scan(core, (x,)).outputs[0].flatten().tolist() == want
    with pytest.raises(errors.RandomOpError):
        flexsn.scan(lambda x: x * random.random(), (x,), backend="cpp")


def test_values_that_hide():
    class Classed:
        cfg = {"gain": 1.0}  # noqa: RUF012  (mutable on purpose)

    def helper(x):
        return x * helper.gain * Classed.cfg["gain"]

    helper.gain = 1.0
    core = lambda x: helper(x)
    x = torch.ones(1, 1)
    seen = []
    for change in (
        lambda: None,
        lambda: setattr(helper, "gain", 2.0),
        lambda: Classed.cfg.update(gain=5.0),
    ):
        change()
        seen.append(flexsn.scan(core, (x,), backend="cpp").outputs[0].item())
    assert seen == [1, 2, 10]


def test_half_states_agree():
    core = lambda x, h: (x * 1, (h.float() * 0.5 + x).half())
    x, h = torch.randn(20, 8).half(), torch.randn(8).half()
    for state in (h, None):
        want, got = (flexsn.scan(core, (x,), (state,), backend=b) for b in ("torch", "cpp"))
        assert torch.equal(want.states[0], got.states[0]) and got.states[0].dtype == torch.float16


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_the_trace_does_not_see_the_callers_autograd():
    w = nn.Parameter(torch.ones(3))
    packed = []

    def pack(t):
        packed.append(type(t))
        return t

    x = torch.ones(4, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        flexsn.scan(lambda x: torch.tanh(x * w), (x,), backend="cpp").outputs[0].sum().backward()
    assert packed and set(packed) <= {torch.Tensor, nn.Parameter}
    with torch.autograd.detect_anomaly(check_nan=False):
        flexsn.scan(lambda x: torch.sin(x * w), (x,), backend="cpp").outputs[0].sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # PyTorch imports its JVP decompositions
def test_forward_mode():
    x = torch.ones(3, 2)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        y = flexsn.scan(lambda x: x * x, (dual,), strict=True).outputs[0]
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(y).tangent, 2 * x)


def test_messages():
    x = torch.ones(3, 2)
    with pytest.raises(errors.OperandTypeError, match="tuple"):
        flexsn.scan(lambda x: x, x)
    with pytest.raises(errors.CoreError, match="not implemented for float32"):
        flexsn.scan(lambda x: x & x, (x,), backend="cpp")
    with pytest.raises(errors.ScalarReadError):
        flexsn.scan(lambda x: (f"{x.max():.3f}", x)[1], (x,), backend="cpp")


def test_a_core_that_accepts_one_size_only():
    def core(x):
        if x.shape[-1] != 4:
            raise ValueError("four channels, please")
        return x * 2.0

    assert torch.equal(flexsn.scan(core, (torch.ones(3, 4),), backend="cpp").outputs[0], torch.full((3, 4), 2.0))
    with pytest.raises(ValueError, match="four channels"):
        flexsn.scan(core, (torch.ones(3, 5),), backend="cpp")


# --- lazy tensors, changed functions, transforms -----------------------------------------------------------------------------------
def leak(x, v):
    v = v * 0.5 + x
    return v * 2.0, v


@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_lazy_negative_and_zero_tensors(backend):
    x = torch.randn(3, 5)
    for lazy in (torch._neg_view(x), torch._efficientzerotensor((3, 5))):
        got = flexsn.scan(leak, [lazy], [None], backend=backend)
        want = flexsn.scan(leak, [lazy.clone() + 0], [None], backend="torch")
        assert torch.equal(got.outputs[0], want.outputs[0]) and torch.equal(got.states[0], want.states[0])
    x.requires_grad_()
    flexsn.scan(leak, [x], [None], backend=backend).outputs[0].backward(torch._neg_view(torch.ones(3, 5)))
    assert (x.grad < 0).all()


def test_changed_defaults_are_seen():
    def core(x, v, k=1.0):
        return x * k + v, v + x

    x = torch.ones(2, 3)
    for k in (1.0, 7.0):
        core.__defaults__ = (k,)
        got, want = (flexsn.scan(core, [x], [None], backend=b).outputs[0] for b in ("cpp", "torch"))
        assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_a_parameter_that_nothing_depends_on(backend):
    class Core(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(()))

        def forward(self, x, v):
            return x + v, v * 0.5 + x

    core, x = Core(), torch.randn(3, 5)
    flexsn.scan(core, [x.requires_grad_()], [None], backend=backend).outputs[0].sum().backward()
    assert core.w.grad is None and x.grad is not None
    assert not flexsn.scan(core, [x.detach()], [None], backend=backend).outputs[0].requires_grad  # as in eager


def test_fake_tensors_and_transforms_after_a_plain_call():
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.randn(3, 5)
    want = flexsn.scan(leak, [x], [None]).outputs[0]  # the short path is taken from here on
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for operand in (x, mode.from_tensor(x)):
            y = flexsn.scan(leak, [operand], [None]).outputs[0]
            assert type(y).__name__ == "FakeTensor" and y.shape == x.shape
    assert torch.equal(torch.vmap(lambda t: flexsn.scan(leak, [t], [None]).outputs[0])(x[None])[0], want)


def test_a_named_backend_that_no_traced_call_has():
    with pytest.raises(flexsn.errors.BackendError, match="traced"):
        torch.vmap(lambda t: flexsn.scan(leak, [t], [None], backend="triton").outputs[0])(torch.randn(1, 3, 5))


def test_a_small_state_owns_no_large_block():
    def core(x, v):
        return x, v * 0.5 + 1.0

    state = flexsn.scan(core, [torch.rand(4, 1000, 10, requires_grad=True)], [torch.zeros(())], backend="cpp").states[0]
    assert state.untyped_storage().nbytes() == 4
    state.mul_(3.0)


def test_interpreted_kernels_in_threads():
    x, found = torch.randn(9, 24), []
    want = flexsn.scan(leak, [x], [None], backend="torch").outputs[0]
    threads = [threading.Thread(target=lambda: found.append(flexsn.scan(leak, [x], [None], backend="triton").outputs[0])) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 8 and all(torch.equal(y, want) for y in found)


def test_a_failed_build_is_reported_and_tried_again():
    from concurrent.futures import Future

    from flexsn._runtime.triton.kernel import Kernel
    from flexsn._runtime.triton.tiles import Tile

    kernel, tile, failed = Kernel.__new__(Kernel), Tile(64, 2, True), Future()
    failed.set_exception(flexsn.errors.BuildError("no"))
    kernel._builds = {(tile, 0): failed}
    for _ in range(2):  # a second waiter for the same build
        with pytest.raises(flexsn.errors.BuildError):
            kernel._binary(failed, tile, 0)
    assert kernel._builds == {}


def test_a_build_that_failed_ahead_of_its_call_is_tried_again(monkeypatch):
    from flexsn._runtime.triton import kernel as launch_triton
    from flexsn._runtime.triton import tiles as triton_tiles

    tried, kernel = [], launch_triton.Kernel.__new__(launch_triton.Kernel)
    kernel._builds, kernel._unasked = {}, set()
    monkeypatch.setattr(launch_triton, "_target", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())

    def build(self, tile, target):
        tried.append(tile)
        if len(tried) == 1:
            raise errors.BuildError("no memory")
        return "binary"

    monkeypatch.setattr(launch_triton.Kernel, "build", build)
    tile = triton_tiles.Tile(64, 2, ahead=False)
    assert isinstance(kernel.expect_tile(tile, 0).exception(), errors.BuildError)
    assert kernel.expect_tile(tile, 0).result() == kernel.expect_tile(tile, 0).result() == "binary" and len(tried) == 2
