"""Complex inputs, states, params, captured tensors and outputs: fused against the eager loop, values and gradients."""

import copy

import pytest
import torch
from helpers import backends, on_cpu
from torch import nn

import flexsn
from flexsn import errors, surrogate
from flexsn._program.cache import PROGRAMS

f64, c64, c128 = torch.float64, torch.complex64, torch.complex128
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),  # PyTorch's own, in `torch.func` and in Inductor
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # which Dynamo reads behind a graph break
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]
N = 16  # whole vectors: eager contracts in the rest of a row


def resonate_and_fire(x, z, b, w):
    """z' = exp((b + i w) dt) z + x; a spike where Im z > 1."""
    z = torch.exp(torch.complex(b, w) * 0.1) * z + x
    return surrogate.atan(z.imag - 1.0), z


def state_space(x, h, log_decay, angle, b, c):
    """A diagonal state space: h' = a h + b x, and 2 Re(c h)."""
    h = torch.exp(torch.complex(-torch.exp(log_decay), angle)) * h + b * x
    return 2 * (c * h).real, h


def params_of(core, dtype=torch.float32):
    generator, wide = torch.Generator().manual_seed(0), dtype.to_complex()
    if core is resonate_and_fire:
        return [torch.full((N,), -0.5, dtype=dtype), torch.linspace(1.0, 10.0, N, dtype=dtype)]
    made = [torch.randn(N, generator=generator, dtype=d) for d in (dtype, dtype, wide, wide)]
    return [made[0] - 2.0, *made[1:]]


def run(core, inputs, states, params, backend, sequences=False):
    """Results and gradients, for cotangents that differ."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (*inputs, *states, *params)]
    i, n = len(inputs), len(inputs) + len(states)
    made = flexsn.scan(core, leaves[:i], leaves[i:n], leaves[n:], backend=backend, store_state_seqs=sequences)
    results = [*made.outputs, *made.states]
    wanted = [t for t in leaves if t is not None]
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in results]
    return [y.detach() for y in results], torch.autograd.grad(results, wanted, cotangents, allow_unused=True)


def assert_same(core, inputs, states, params, backend, exact=True, **options):
    expected, grads = run(core, inputs, states, params, "torch", **options)
    found, gradients = run(core, inputs, states, params, backend, **options)
    for k, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a, b) if exact else torch.allclose(a, b, 1e-5, 1e-6), f"result {k}"
    for k, (a, b) in enumerate(zip(gradients, grads, strict=True)):
        assert (a is None) == (b is None), f"gradient {k}"
        if a is not None:
            close = 1e-11 if b.dtype in (f64, c128) else 3e-5
            assert a.dtype == b.dtype and (a - b).abs().max() <= close * b.abs().max(), f"gradient {k}"


@on_cpu
@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("core", [resonate_and_fire, state_space])
def test_neurons(core, dtype, backend):
    """Bits of the eager loop where it only adds and multiplies, and gradients of real and complex params."""
    for T in (1, 5, 37):
        x = torch.randn(T, 2, N, dtype=dtype)
        assert_same(core, [x], [None], params_of(core, dtype), backend, sequences=T == 5)
    first = torch.randn(2, N, dtype=dtype.to_complex())
    assert_same(core, [x], [first], params_of(core, dtype), backend)


@on_cpu
def test_shared_state_shape():
    """A state smaller than the step, and complex inputs that are no rows of memory, or conjugates."""
    x = torch.randn(3, 5, N, dtype=c64)
    for given in (x, x.conj(), x.transpose(0, 1), x[:, :, ::2].repeat(1, 1, 2)):
        assert_same(lambda x, z: (x * z, 0.5 * z + x), [given], [torch.randn(N, dtype=c64)], [], "cpp", exact=False)


OPS = {
    "add": lambda x, z, p: torch.add(x, z * p, alpha=0.5 - 0.25j),
    "sub": lambda x, z, p: 1.0 - z * p - x,
    "real factors": lambda x, z, p: z * p.real + x * 0.3 + p.imag,
    "imaginary unit": lambda x, z, p: 1j * z * p + x.real * (0.5 + 1j) + 1j,
    "div": lambda x, z, p: x / (z + p + 3) + z / 2.5 + 1 / (p + 2j),
    "reciprocal": lambda x, z, p: (z * 0.3 + p + 2j).reciprocal() + x,
    "conj": lambda x, z, p: z.conj() * p + x.conj() * z.conj().imag,
    "exp": lambda x, z, p: torch.exp(z * p * 0.3) + x,
    "exp of an angle": lambda x, z, p: torch.exp(1j * z.real) * p + x,
    "polar": lambda x, z, p: torch.polar(x.abs(), z.imag) * p,
    "abs": lambda x, z, p: z * 0.5 / (1 + z.abs()) + x * p.abs(),
    "angle": lambda x, z, p: z * 0.5 + x * (z + 3).angle() * p,
    "sgn": lambda x, z, p: torch.sgn(z * 0.5 + x) * p,
    "square": lambda x, z, p: z**2 * 0.1 * p + x,
    "parts": lambda x, z, p: torch.complex(z.imag, x.real) * p + z.real * x.imag,
    "view as reals": lambda x, z, p: torch.view_as_complex(torch.view_as_real(z * p)) + torch.view_as_real(x)[..., 0],
    "where": lambda x, z, p: torch.where(z.real > 0, z * p, x) + torch.where(x == z, 0.0, z),
    "filled": lambda x, z, p: torch.zeros_like(z) + x * p * torch.full_like(z, 1 + 2j) + torch.zeros(N, dtype=c128) - z,
    "in place": lambda x, z, p: (z * p).mul_(0.5).add_(x),
    "static": lambda x, z, p: torch.exp(p * 0.3j) * z + x * p.conj() + torch.log(p) * 0.1,
    "cast": lambda x, z, p: (z * p).to(c64).to(c128) + x.real.to(c128),
}


def core_of(name):
    def core(x, z, p):
        h = 0.3 * OPS[name](x, z, p)
        return h * h.conj() + h.imag, h

    return core


def normal(*shapes):
    return [torch.randn(shape, dtype=c128) for shape in shapes]


@on_cpu
@pytest.mark.parametrize("name", OPS)
def test_ops(name):
    """Values and gradients of the eager loop; and gradients that pass `gradcheck`, but of the one that rounds and the one that jumps."""
    core = core_of(name)
    x, z, p = normal((4, 2, N), (2, N), (N,))
    assert_same(core, [x], [z], [p], "cpp", exact=False)
    if name in ("cast", "where"):
        return

    def call(x, z, p):
        made = flexsn.scan(core, [x], [z], [p], backend="cpp")
        return (*made.outputs, *made.states)

    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in (x[:2], z, p)], fast_mode=True)


@on_cpu
@pytest.mark.parametrize("shape", [(), (2, N)])
@pytest.mark.parametrize("name", ["real factors", "static"])
def test_shapes_of_params(name, shape):
    """Their gradients are sums over neurons, of which PyTorch goes on in complex numbers; or there is nothing to sum."""
    x, z, p = normal((4, 2, N), (2, N), shape)
    assert_same(core_of(name), [x], [z], [p], "cpp", exact=False)


@on_cpu
def test_derivatives_of_derivatives():
    def core(x, z, p):
        z = z * p + x.conj() * z
        return z * z.conj() * z.imag, z

    leaves = [torch.randn(*s, dtype=c128, requires_grad=True) for s in ((2, 3), (3,), (3,))]

    def call(*given):
        return flexsn.scan(core, [given[0]], [given[1]], [given[2]], backend="cpp").outputs[0]

    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@on_cpu
def test_bits():
    """Of products also infinities, NaN and signs of zero: a real factor counts as complex. Of sums, finite ones (docs/numerics.md)."""
    finite = torch.tensor([0.0, -0.0, 1.5, -2.0, 0.1, 7e5, 1e30, 1e-40])
    other = torch.tensor([0.0, -0.0, 1.5, -2.0, float("inf"), float("nan"), 3e38, 1e-40])
    for values, core in ((other, lambda x, w, r: (x * w, x * r, x * 1.5, 2j * x)), (finite, lambda x, w, r: (x + w, x - w, 1 - x, x + r))):
        z = torch.complex(*torch.meshgrid(values, values, indexing="ij")).flatten()
        x = z.repeat(64, 1).T.contiguous()  # every pair of them
        found, expected = (flexsn.scan(core, [x], [], [z, z.imag.contiguous()], backend=b).outputs for b in ("cpp", "torch"))
        for a, b in zip(found, expected, strict=True):
            a, b = torch.view_as_real(a), torch.view_as_real(b)
            there = ~b.isnan()
            assert torch.equal(~a.isnan(), there) and torch.equal(a[there], b[there])
            assert values is finite or torch.equal(a[there].signbit(), b[there].signbit())


def neuron(**options):
    log_decay, angle, b, c = map(nn.Parameter, params_of(state_space))

    def core(x, h):
        return state_space(x, h, log_decay, angle, b, c)

    return flexsn.FlexSN(core, num_states=1, **options)


@on_cpu
def test_module():
    """Params with real and complex values, carried states, `detach`, `reset`, `state_dict`, copies, single steps."""
    module = neuron(strict=True)
    assert {name: p.dtype for name, p in module.named_parameters()} == {
        "log_decay": torch.float32, "angle": torch.float32, "b": c64, "c": c64,
    }  # fmt: skip
    x = torch.randn(8, 2, N)
    whole = module(x)
    assert module.states[0].dtype is c64
    module.reset()
    assert torch.equal(torch.cat([module(x[:3]), module(x[3:])]), whole)
    module.reset()
    module(x[:3])
    module.detach()
    assert not module.states[0].requires_grad
    module(x[3:]).square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in module.parameters())
    module.reset()
    other = neuron(store_state_seqs=True)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), whole) and other.state_seqs[0].shape == (8, 2, N) and other.state_seqs[0].dtype is c64
    twin = copy.deepcopy(other)
    twin.reset()
    assert torch.equal(twin(x), whole)
    twin.reset()
    twin.step_mode = "s"
    assert torch.equal(torch.stack([twin(step) for step in x]), whole)


@on_cpu
def test_learns_by_complex_params():
    module, target = neuron(strict=True, stateful=False), neuron(strict=True, stateful=False)
    with torch.no_grad():
        for name in ("b", "c"):
            getattr(target, name).mul_(1.3 * torch.exp(torch.tensor(0.4j)))
    x = torch.randn(20, 2, N)
    goal, optimizer, losses = target(x).detach(), torch.optim.Adam(module.parameters(), 0.02), []
    for _ in range(60):
        optimizer.zero_grad()
        losses.append(torch.nn.functional.mse_loss(module(x), goal))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]


@on_cpu
def test_later_calls_capture_nothing(monkeypatch):
    x, params = torch.randn(6, 2, N), params_of(state_space)
    flexsn.scan(state_space, [x], [None], params, strict=True)
    monkeypatch.setattr("flexsn._operator.dispatch.prepare", None)
    before = dict(PROGRAMS.exact)
    assert flexsn.scan(state_space, [x], [None], params, strict=True).states[0].dtype is c64
    assert PROGRAMS.exact == before


@on_cpu
def test_no_steps():
    made = flexsn.scan(state_space, [torch.randn(0, 2, N)], [None], params_of(state_space), backend="cpp")
    assert made.outputs[0].shape == (0, 2, N) and torch.equal(made.states[0], torch.zeros(2, N, dtype=c64))


@on_cpu
def test_transforms():
    x, params = torch.randn(3, 6, 2, N), params_of(state_space)

    def loss(b, backend):
        return flexsn.scan(state_space, [x[0]], [None], [*params[:2], b, params[3]], backend=backend).outputs[0].square().sum()

    found, expected = (torch.func.grad(loss)(params[2], backend) for backend in ("auto", "torch"))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    batched = torch.func.vmap(lambda x: flexsn.scan(state_space, [x], [None], params, strict=True).outputs[0])(x)
    assert torch.equal(batched, torch.stack([flexsn.scan(state_space, [one], [None], params, backend="torch").outputs[0] for one in x]))


@on_cpu
def test_compiled():
    """Complex states run between compiled parts; complex numbers inside a core with real ones around stay in one graph."""
    x, params = torch.randn(6, 2, N), [p.requires_grad_() for p in params_of(state_space)]

    def call(x, backend="auto"):
        return flexsn.scan(state_space, [2 * x], [None], params, backend=backend).outputs[0] * 2

    compiled = torch.compile(call)(x)
    assert torch.allclose(compiled, call(x, "torch"), 1e-5, 1e-6)
    grads = [torch.autograd.grad(y.sum(), params) for y in (compiled, call(x, "torch"))]
    assert all(torch.allclose(a, b, 1e-4, 1e-4) for a, b in zip(*grads, strict=True))
    torch.compiler.reset()
    with pytest.raises(Exception, match="complex numbers, whose parts a kernel takes"):
        torch.compile(call, fullgraph=True)(x)

    def inside(x, re, im, p):
        h = torch.complex(re, im) * p.conj() * 0.5 + 1j * x + torch.zeros_like(p)
        return h.abs(), h.real, h.imag

    def whole(x, backend="auto"):
        return flexsn.scan(inside, [2 * x], [None, None], [params[2]], backend=backend).outputs[0]

    compiled = torch.compile(whole, fullgraph=True)(x)
    assert torch.allclose(compiled, whole(x, "torch"), 1e-5, 1e-6)
    grads = [torch.autograd.grad(y.sum(), params[2])[0] for y in (compiled, whole(x, "torch"))]
    assert torch.allclose(*grads, 1e-4, 1e-4)


@on_cpu
def test_explained():
    report = str(flexsn.explain(state_space, torch.randn(6, 2, N), params=params_of(state_space), measure=False))
    assert "h_real" in report and "h_imag" in report and "fused by cpp" in report


def test_what_is_refused(recwarn):
    x = torch.randn(4, 2, N)
    with pytest.raises(errors.UnsupportedDtypeError, match=r"(?s)input `x` has dtype torch.complex32.*complex64 or complex128"):
        flexsn.scan(resonate_and_fire, [x.to(torch.complex32)], [None], params_of(resonate_and_fire))

    def bent(x, z):
        z = torch.tanh(z + 1j * x)
        return z.real, z

    with pytest.raises(errors.UnsupportedOpError, match=r"(?s)`tanh` of complex numbers has no rule.*torch.tanh\(z"):
        flexsn.scan(bent, [x], [None], strict=True)
    found = flexsn.scan(bent, [x], [None])
    assert torch.equal(found.states[0], flexsn.scan(bent, [x], [None], backend="torch").states[0])
    assert any("`tanh` of complex numbers" in str(w.message) for w in recwarn)

    def reads_its_view(x, z):
        return (torch.view_as_real(z) * torch.ones(2))[..., 0], z + x

    with pytest.raises(errors.CannotFuseError, match="`mul`"):
        flexsn.scan(reads_its_view, [x], [torch.zeros(2, N, dtype=c64)], strict=True)
