"""Cores that add over a small last dim: their kernels against the eager loop, and what is refused."""

import contextlib

import pytest
import torch
from helpers import backends, check, check_mixing, evaluate, on_cpu

import flexsn
from flexsn import surrogate
from flexsn._capture.inner import MOST
from flexsn._operator import dispatch
from flexsn._operator.mixing import cut
from flexsn.errors import FallbackWarning, NotElementwiseError, ShapeMismatchError

DOUBLE = torch.float64
TAU = 4.0


def dendrites(x, d, v, w):
    d = d + (x.unsqueeze(-1) * w - d) / TAU
    v = v + (d.sum(-1) - v) / 2.0
    s = surrogate.atan(v - 1.0)
    return s, d, v * (1 - s)


def means(x, d, v, w):
    d = d + (x[..., None] * w - d) / TAU
    v = v + d.mean(-1) - v / 2
    return surrogate.atan(v - 1), d, v


def kept_dim(x, d, v, w):
    d = d + (x * w - d) / TAU
    v = v + (d * w).sum(-1, keepdim=True) - v / 2
    s = surrogate.atan(v - 1)
    return s, d, v * (1 - s)


def fed_back(x, d, v, w):
    d = d + (x[..., None] * w - d) / TAU + 0.1 * v.unsqueeze(-1)
    d = d - 0.1 * d.sum(dim=-1, keepdim=True)
    v = v + (d * w).sum(-1) - v / 2
    return d * v.unsqueeze(-1), d, v


def shares(x, d, v, w):
    e = (d * 0.1).exp()
    p = e / e.sum(-1, keepdim=True)
    d = d + (x.unsqueeze(-1).expand(-1, -1, d.shape[-1]) * torch.sigmoid(w) * p - d) / TAU
    v = torch.tanh(v + (p * d).sum(-1))
    return v, d, v


def cable(x, d, v, w):
    """Compartments in a row, each beside its neighbours."""
    left, right = torch.cat([x.unsqueeze(-1), d[..., :-1]], -1), d.roll(-1, -1)
    d = d + 0.3 * (left - d) * w + 0.1 * torch.nn.functional.softplus(right - d.flip(-1))
    first, rest = d.split([1, d.shape[-1] - 1], -1)
    v = v + d[..., -1] + rest.sum(-1) * first.squeeze(-1) - v / 2
    return surrogate.atan(v - 1), d, v


def one_by_one(x, d, v, w):
    first, *others = d.unbind(-1)
    first = first + x - first / 2
    d = torch.stack([first, *[o * 0.9 + first * 0.1 for o in others]], -1) * w
    return v + d.sum(-1), d, v * 0.5


def counted(x, d, v, w):
    d = d + (x.unsqueeze(-1) - d) * w
    s = surrogate.atan(d - 0.5)
    d = torch.where(s > 0, torch.zeros_like(d), d)
    return (d > 0).sum(-1), s, d, v * 0.9 + s.sum(-1)


def of_params(x, d, v, w):
    d = 0.5 * d + x.unsqueeze(-1) * w.mean() + w[..., 0].unsqueeze(-1) * w.softmax(-1)
    return d.sum(-1) * w.sum(-1), d, v * 0.5


CORES = [means, fed_back, shares, cable, one_by_one, counted, of_params, kept_dim]


def operands(core, n, w=(), T=5, dtype=DOUBLE):
    one = (1,) if core is kept_dim else ()

    def make(*shape):
        return (torch.randn(shape, dtype=DOUBLE) * 0.7).to(dtype)

    return [make(T, 3, 2, *one)], [make(3, 2, n), make(3, 2, *one)], [make(*w, n).abs()]


@pytest.mark.parametrize("core", CORES)
def test_cores(core):
    check(core, *operands(core, 4), exact=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("w", [(), (2,)])
def test_dtypes(dtype, w):
    check(dendrites, *operands(dendrites, 3, w, dtype=dtype), exact=False)


@pytest.mark.parametrize("n", [1, 2, MOST])
def test_sizes(n):
    """Long enough for checkpoints, of which each part has its own."""
    check(dendrites, *operands(dendrites, n, T=70 if n < MOST else 3), exact=False, sequences=n == 2)


def test_adds_from_first_to_last():
    x, (d, v), w = operands(dendrites, 9, dtype=torch.float32)

    def chain(x, d, v, w):
        d = d + (x.unsqueeze(-1) * w - d) / TAU
        total = d[..., 0]
        for j in range(1, d.shape[-1]):
            total = total + d[..., j]
        v = v + (total - v) / 2.0
        s = surrogate.atan(v - 1.0)
        return s, d, v * (1 - s)

    for backend in backends():
        got = evaluate(dendrites, x, (d, v), w, backend=backend)[0]
        assert all(torch.equal(got[name], want) for name, want in evaluate(chain, x, (d, v), w, backend="torch")[0].items())


def test_captured_tensors_and_an_input_with_the_dim():
    weight, gate = torch.rand(2, 3, dtype=DOUBLE, requires_grad=True), torch.rand(3, dtype=DOUBLE, requires_grad=True)

    def core(x, d):
        d = d * torch.sigmoid(gate) + x * weight.exp()
        return (d * gate).mean(-1), d

    x, d = torch.randn(5, 4, 2, 3, dtype=DOUBLE), torch.randn(4, 2, 3, dtype=DOUBLE)
    check(core, [x], [d], captured={"weight": weight, "gate": gate}, exact=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_other_dtypes(dtype):
    """A weight `[N]` has dims, as what it meets has: the wider dtype is that of the result, and of a comparison."""
    weight = torch.tensor([0.1, 0.2, 0.3], dtype=dtype)

    def core(x, d):
        d = d * 0.5 + x.unsqueeze(-1) * (weight * 0.5).to(d.dtype)
        above = torch.where(d > weight, d * 0.5, d * 2.0)
        return (above * weight).sum(-1).to(x.dtype), d

    x = torch.zeros(3, 2, 5)
    x[0] = 1.0
    check(core, [x], [torch.tensor([0.1, 0.2, 0.3]).expand(2, 5, 3).contiguous()], exact=False)


def test_thresholds_of_another_dtype():
    """0.1 in float32 is more than 0.1 in float64, in which eager compares."""
    theta = torch.tensor([0.1, 0.2, 0.3], dtype=DOUBLE)
    d = theta.float().expand(2, 5, 3).contiguous()
    check(lambda x, d: ((d > theta).to(x.dtype).sum(-1) + x, d), [torch.zeros(3, 2, 5)], [d])
    check(lambda x, d: ((d < 300).sum(-1) + (d < torch.full((3,), 300)).sum(-1) + x, d), [torch.zeros(3, 2, 5)], [d.to(torch.int8)])


@pytest.mark.parametrize(
    "op", [torch.minimum, torch.fmax, torch.copysign, lambda a, b: a.lerp(b, b.sigmoid()), lambda a, b: torch.addcdiv(a, a, b * b + 1)]
)
def test_ops_whose_backward_writes_in_place(op):
    def core(x, d):
        d = op(d, x.unsqueeze(-1) * d.roll(1, -1))
        return d.sum(-1), d

    check(core, [torch.randn(3, 2, 5, dtype=DOUBLE)], [torch.randn(2, 5, 3, dtype=DOUBLE)], exact=False)


def test_an_output_of_fewer_values():
    check(lambda x, v: (x[..., 1:] - x[..., :-1], v + x), [torch.randn(5, 4, 3, dtype=DOUBLE)], [torch.zeros(4, 3, dtype=DOUBLE)])


def test_two_kinds_of_branches():
    """Of different number."""

    def core(x, a, b):
        a, b = a * 0.5 + x.unsqueeze(-1), b * 0.25 + x.unsqueeze(-1) * 2
        return a.sum(-1) * b.mean(-1), a, b

    check(core, [torch.randn(4, 2, 5, dtype=DOUBLE)], [torch.randn(2, 5, 3, dtype=DOUBLE), torch.randn(2, 5, 2, dtype=DOUBLE)], exact=False)


def test_second_derivatives():
    x, states, params = operands(shares, 3, T=3)

    def f(x, d, w):
        return flexsn.scan(shares, [x], [d, states[1]], [w]).outputs[0]

    given = [t.requires_grad_() for t in (*x, states[0], *params)]
    assert torch.autograd.gradgradcheck(f, given, fast_mode=True)


def test_vmap():
    x, (d, v), (w,) = operands(means, 3)
    many = torch.stack([w, 2 * w])
    found = torch.func.vmap(lambda w: flexsn.scan(means, x, [d, v], [w], strict=True).states[1])(many)
    for got, own in zip(found, many, strict=True):
        torch.testing.assert_close(got, flexsn.scan(means, x, [d, v], [own], backend="torch").states[1])


def test_a_neuron_carries_states():
    """From a function of the input, and a default one beside it; another size after `reset`."""
    weight = torch.rand(3)

    def core(x, d, v):
        return dendrites(x, d, v, weight)

    made = [
        flexsn.FlexSN(core, num_states=2, initial_states=lambda x: [x.new_zeros(*x.shape[1:], 3), None], backend=b, step_mode="m")
        for b in ("auto", "torch")
    ]
    made[0].strict = True
    for shape in ((4, 2), (4, 2), (5, 2)):
        if shape[0] == 5:
            for net in made:
                net.reset()
        x = torch.randn(6, *shape)
        got, want = [net(x) for net in made]
        torch.testing.assert_close(got, want)
        for a, b in zip(made[0].states, made[1].states, strict=True):
            torch.testing.assert_close(a, b)
    assert made[0].states[0].shape == (5, 2, 3)


@on_cpu
def test_few_programs(counts):
    """One capture and one pair of kernels serve all batch sizes, and a second call captures nothing."""
    for batch in (3, 3, 5):
        x = torch.randn(4, batch, 7, requires_grad=True)
        flexsn.scan(means, [x], [torch.zeros(batch, 7, 2), torch.zeros(batch, 7)], [torch.rand(2)]).outputs[0].sum().backward()
    assert counts.builds == 2


def softly(x, d):
    d = d + x.unsqueeze(-1)
    return d.logsumexp(-1), d


def unaligned(x, d):
    d = d + x.unsqueeze(-1)
    return d.sum(-1), d * x


@pytest.mark.parametrize(
    ("core", "n", "says"),
    [
        (softly, 3, "takes `sum` and `mean`"),
        (unaligned, 2, r"Give it the dim: `v.unsqueeze\(-1\)`"),
        (lambda x, d: ((x.unsqueeze(-1) + d).sum(0), d), 3, "`sum` is not elementwise"),
        (lambda x, d: ((x.unsqueeze(-1) + d).sum(-1), d), MOST + 1, f"sum over a last dim of 1 to {MOST}"),
    ],
)
def test_refusals(core, n, says):
    """The eager loop runs what no kernel takes, and says why. In other dtypes, what mixes runs in pieces."""
    x, d = torch.randn(4, 2, 2, dtype=torch.bfloat16), torch.randn(2, 2, n, dtype=torch.bfloat16)
    with pytest.raises(NotElementwiseError, match=says):
        flexsn.scan(core, [x], [d], strict=True)
    with pytest.warns(FallbackWarning, match="the eager loop"):
        flexsn.scan(core, [x], [d])


def test_a_refusal_is_not_tried_again(monkeypatch):
    """Later calls of a kind go straight to the eager loop, and a strict one says the same each time."""
    tried = []
    once = dispatch.first_step
    monkeypatch.setattr(dispatch, "first_step", lambda *args: (tried.append(args[1]), once(*args))[1])

    def core(x, v):
        h = x * v
        for _ in range(cut._MOST + 1):  # calls that mix neurons
            h = h.cumsum(-1).tanh()
        return h, v

    x, v = torch.randn(4, 2, 3), torch.ones(2, 3)
    with pytest.warns(FallbackWarning, match="cumsum"):
        want = flexsn.scan(core, [x], [v]).outputs[0]
    first = len(tried)
    assert torch.equal(flexsn.scan(core, [x], [v]).outputs[0], want)
    said = set()
    for _ in range(2):
        with pytest.raises(NotElementwiseError) as caught:
            flexsn.scan(core, [x], [v], strict=True)
        said.add(str(caught.value))
    assert len(said) == 1 and len(tried) == first > 0


def test_shapes_that_do_not_fit():
    with pytest.raises(ShapeMismatchError, match="do not broadcast"):
        flexsn.scan(dendrites, [torch.randn(4, 3, 2)], [torch.zeros(5, 2, 3), torch.zeros(3, 2)], [torch.rand(3)])
    with pytest.raises(ShapeMismatchError, match="do not broadcast"):  # the core takes `v` as it takes `x`
        flexsn.scan(lambda x, v: (x + v, x + v), [torch.randn(4, 3, 2)], [torch.zeros(3)])


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(
    ("core", "error", "says"),
    [
        (lambda x, d: (undefined, d), NameError, "undefined"),  # noqa: F821
        (lambda x, d: (x.unsqeeze(-1), d), AttributeError, "unsqeeze"),
        (lambda x, d: (d + x, d), ShapeMismatchError, r"The size of tensor a \(3\)(.|\n)*x.unsqueeze\(-1\)"),
        (lambda x, d: (x, d.sum(-1)), flexsn.errors.StateMismatchError, "state `d` goes in as"),
    ],
    ids=["name", "attribute", "sizes", "state"],
)
def test_mistakes_are_named(core, error, says, backend):
    with pytest.raises(error, match=says):
        flexsn.scan(core, [torch.randn(4, 2, 5)], [torch.zeros(2, 5, 3)], backend=backend)


def test_explain():
    x, states, params = operands(dendrites, 3)
    report = flexsn.explain(dendrites, *x, states=states, params=params, measure=False)
    assert report.problem is None and "added from the first to the last" in str(report)
    assert [o.name for o in report.operands if o.kind == "state"] == ["d_0", "d_1", "d_2", "v"]
    x, d = [t.bfloat16() for t in (*x, states[0])]
    said = flexsn.explain(softly, x, states=[d], measure=False)
    assert said.problem is not None and "`sum` and `mean`" in str(said)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:.*is deprecated", "ignore:flexsn runs PyTorch's own scan")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("core", [dendrites, kept_dim])
def test_compiled(core, grad):
    x, states, params = operands(core, 3, dtype=torch.float32)
    given = [t.requires_grad_(grad) for t in (*x, *states, *params)]

    def f(x, d, v, w):
        result = flexsn.scan(core, [x * 2], [d, v], [w])
        return (result.outputs[0] * 3, *result.states)

    found = []
    for run in (f, torch.compile(f)):
        with torch.set_grad_enabled(grad):
            values = run(*given)
        found.append((*values, *(torch.autograd.grad([y.sum() for y in values], given) if grad else ())))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=["numbers", "rows"])
def test_parts_of_a_param_are_found_at_one_index(shape):
    """Each index of its own made the builds of 64 branches three times as long."""
    x, d, v, w = torch.zeros(4, 5, 2), torch.zeros(5, 2, 3), torch.zeros(5, 2), torch.ones(shape, requires_grad=True)
    report = flexsn.explain(dendrites, x, states=[d, v], params=[w], backend="triton", measure=False)
    sources = [kernel.source for kernel in report.passes.values()]
    assert len(sources) >= 2 and all(source.count("math.index") == 1 for source in sources)
    assert all(source.count("_seq + p0_at, mask=mask") == 3 for source in sources)


def chain_of_compartments(x, d):
    d = 0.9 * d + 0.1 * torch.cat([torch.zeros_like(d[..., :1]), d[..., :-1]], -1) + x.unsqueeze(-1)
    return d.sum(-1), d


def halves(x, d):
    half = d.shape[-1] // 2
    d = torch.cat([d[..., half:] * 0.9, d[..., :half] * 0.8 + x.unsqueeze(-1)], -1)
    return d.sum(-1), d


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("core", [chain_of_compartments, halves])
def test_slices_that_are_empty(core, n):
    """Of one compartment they are: such a core runs in the eager loop, and the warning names the line."""
    operands = [torch.rand(5, 3, 4, dtype=DOUBLE)], [torch.zeros(3, 4, n, dtype=DOUBLE)], []
    said = pytest.warns(FallbackWarning, match="test_inner.py") if n == 1 else contextlib.nullcontext()
    with said:
        check_mixing(core, *operands)


def test_a_slice_that_is_empty_without_an_inner_dim():
    def core(x, v):
        v = 0.9 * torch.cat([v[..., 0:], v[..., :0]], -1) + x
        return v, v

    with pytest.warns(FallbackWarning, match="test_inner.py"):
        check_mixing(core, [torch.rand(5, 3, 4, dtype=DOUBLE)], [torch.zeros(3, 4, dtype=DOUBLE)], [])
