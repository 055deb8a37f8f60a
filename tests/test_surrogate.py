"""Surrogates: a step forward, the documented curve backward and the peers' own, stable everywhere, fused as eager."""

import functools
import inspect
import math

import numpy
import pytest
import snntorch.surrogate as snn
import torch
from helpers import assert_same_grads, assert_same_values, evaluate
from spikingjelly.activation_based import surrogate as sj

import flexsn
from flexsn import surrogate
from flexsn.errors import ArgumentError, ParamGradientError

X = torch.linspace(-3, 3, 601, dtype=torch.float64)  # has 0, 1 and all widths in it
NOISE = torch.rand(601, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def s4(x, a):
    return a * torch.sigmoid(a * x) * (1 - torch.sigmoid(a * x))


def indicator(condition):
    return condition.to(torch.float64)


FORMULAS = {  # gradient at x, with the default settings and with others
    "atan": (lambda x, a=2.0: (a / 2) / (1 + (math.pi / 2 * a * x) ** 2), {"a": 1.5}),
    "sigmoid": (lambda x, a=4.0: s4(x, a), {"a": 1.5}),
    "fast_sigmoid": (lambda x, a=25.0: 1 / (1 + a * x.abs()) ** 2, {"a": 1.5}),
    "super_spike": (lambda x, a=10.0, b=None: (a if b is None else b) / (1 + a * x.abs()) ** 2, {"a": 1.5, "b": 4.0}),
    "soft_sign": (lambda x, a=2.0: 1 / (2 * a * (1 / a + x.abs()) ** 2), {"a": 1.5}),
    "piecewise_linear": (lambda x, a=1.0: (1 - x.abs() / a).clamp(min=0) / a, {"a": 1.5}),
    "piecewise_quadratic": (lambda x, a=1.0: (a - a**2 * x.abs()) * (x.abs() < 1 / a), {"a": 1.5}),
    "piecewise_exp": (lambda x, a=1.0: a / 2 * torch.exp(-a * x.abs()), {"a": 1.5}),
    "gaussian": (lambda x, a=0.5: torch.exp(-0.5 * (x / a) ** 2) / (a * math.sqrt(2 * math.pi)), {"a": 1.5}),
    "erf": (lambda x, a=2.0: a / math.sqrt(math.pi) * torch.exp(-((a * x) ** 2)), {"a": 1.5}),
    "rect": (lambda x, a=1.0: a * indicator(x.abs() < 1 / (2 * a)), {"a": 1.5}),
    "nonzero_sign_log_abs": (lambda x, a=1.0: 1 / (1 / a + x.abs()), {"a": 1.5}),
    "q_pseudo_spike": (lambda x, a=2.0: (1 + 2 / (a - 1) * x.abs()) ** -a, {"a": 1.5}),
    "fake_numerical_gradient": (lambda x, a=0.3: (1 / x.abs()).clamp(max=a), {"a": 1.5}),
    "piecewise_leaky_relu": (
        lambda x, a=1.0, b=0.01: 1 / (2 * a) * indicator(x.abs() < a) + b * indicator(x.abs() >= a),
        {"a": 1.5, "b": 0.1},
    ),
    "leaky_k_relu": (lambda x, a=0.0, b=1.0: b * indicator(x >= 0) + a * indicator(x < 0), {"a": 0.25, "b": 1.5}),
    "LSO": (lambda x, a=0.1: indicator(x >= 0) + a * indicator(x < 0), {"a": 0.3}),
    "heaviside": (lambda x: indicator(x >= 0), {}),
    "log_tailed_relu": (
        lambda x, a=0.0: torch.where(x > 1, 1 / x, torch.where(x > 0, torch.ones_like(x), a * torch.ones_like(x))),
        {"a": 0.1},
    ),
    "s2nn": (lambda x, a=4.0, b=1.0: torch.where(x < 0, s4(x, a), b / (1 + x)), {"a": 1.5, "b": 0.5}),
    "spike_rate_escape": (lambda x, a=1.0, b=25.0: b * torch.exp(-a * (x - 1).abs()), {"a": 1.5, "b": 2.0}),
    "SFS": (lambda x, a=25.0, b=1.0: (x > b) / (1 + a * x.abs()) ** 2, {"a": 1.5, "b": 0.25}),
    "triangular": (lambda x, a=1.0: a * indicator(x < 0) - a * indicator(x >= 0), {"a": 1.5}),
    "squarewave_fourier_series": (
        lambda x, n=2, t=8.0: 4 / t * sum(torch.cos((2 * i - 1) * 2 * math.pi / t * x) for i in range(1, n)),
        {"n": 5, "t": 3.0},
    ),
    "straight_through": (lambda x: torch.ones_like(x), {}),
    "straight_through_estimator": (lambda x: torch.ones_like(x), {}),
    "deterministic_pass": (lambda x: torch.ones_like(x), {}),
    "multi_level_spike_count": (
        lambda x, a=1, b=None: indicator((x >= (b or (0, a))[0]) & (x <= (b or (0, a))[1])),
        {"a": 3, "b": (-0.5, 2.0)},
    ),
    "custom_surrogate": (lambda x, f=torch.square: f(x), {"f": torch.cos}),
    "poisson_pass": (lambda x: torch.ones_like(x), {}),
    "SSO": (lambda x, a=0.0, b=0.2: torch.where(x >= 0, torch.ones_like(x), (NOISE - 0.5 + a) * b), {"a": 0.1, "b": 2.0}),
}
NAMES = sorted(FORMULAS)
OPERANDS = {"custom_surrogate": (torch.square,), "poisson_pass": (NOISE,), "SSO": (NOISE,)}  # what has no default
OPERAND_NAMES = {"custom_surrogate": "gradient", "poisson_pass": "noise", "SSO": "noise"}
OTHER_STEPS = {"multi_level_spike_count", "poisson_pass"}
STEPS = [n for n in NAMES if n not in OTHER_STEPS]


def gradient(spike, x, *args, **settings):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(spike(x, *args, **settings).sum(), x)[0]


def with_operands(name, like):
    """The surrogate `name` on tensors like `like`, whose noise is 0.25."""
    return functools.partial(getattr(surrogate, name), **(
        {"noise": torch.full_like(like, 0.25)} if name in ("SSO", "poisson_pass") else {"gradient": torch.square} if name == "custom_surrogate" else {}
    ))  # fmt: skip


def test_all_are_covered():
    assert set(surrogate.__all__) == set(FORMULAS)


@pytest.mark.parametrize("name", STEPS)
def test_forward_is_a_step(name):
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x = torch.tensor([-1.0, -0.0, 0.0, 1e-7, 2.0, -3e4, 3e4]).to(dtype)
        for inclusive in (True, False):
            y = with_operands(name, x)(x, inclusive=inclusive)
            assert y.dtype is dtype and y.tolist() == [0, inclusive, inclusive, 1, 1, 0, 1]
        if name != "SSO":  # which computes with x
            x = torch.tensor([float("inf"), -float("inf"), float("nan")]).to(dtype)
            assert with_operands(name, x)(x).tolist() == [1, 0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_the_documented_one(name):
    formula, others = FORMULAS[name]
    operands, spike = OPERANDS.get(name, ()), getattr(surrogate, name)
    torch.testing.assert_close(gradient(spike, X, *operands), formula(X), rtol=1e-12, atol=1e-13)
    if others:
        given = operands[: 1 if name == "SSO" else 0]
        torch.testing.assert_close(gradient(spike, X, *given, *others.values()), formula(X, **others), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_nowhere_silently_zero(name):
    assert gradient(getattr(surrogate, name), X, *OPERANDS.get(name, ())).abs().sum() > 0


@pytest.mark.parametrize("name", [n for n in NAMES if n != "custom_surrogate"])  # whose gradient here is a square
def test_no_overflow(name):
    for dtype in (torch.float32, torch.float64):
        top = torch.finfo(dtype).max
        x = torch.tensor([-top, -1e20, -1e4, -1.0, -0.0, 0.0, 1e-30, 1e4, 1e20, top], dtype=dtype)
        grad = gradient(with_operands(name, x), x)
        assert torch.isfinite(grad).all() and (grad.abs() <= 26).all()
        assert torch.isfinite(with_operands(name, x)(x)).all()


@pytest.mark.parametrize(
    "name",
    [
        "atan",
        "sigmoid",
        "piecewise_linear",
        "gaussian",
        "erf",
        "rect",
        "piecewise_exp",
        "piecewise_quadratic",
        "soft_sign",
        "q_pseudo_spike",
    ],
)
def test_bump_has_area_one(name):
    wide = torch.linspace(-2000, 2000, 4_000_001, dtype=torch.float64)
    assert torch.trapezoid(gradient(getattr(surrogate, name), wide), wide).item() == pytest.approx(1.0, abs=2e-3)


# --- peers ------------------------------------------------------------------------------------------------------------------
SPIKINGJELLY = {  # their defaults on the left, the same here on the right
    "ATan": (sj.ATan(), surrogate.atan),
    "Sigmoid": (sj.Sigmoid(), surrogate.sigmoid),
    "SoftSign": (sj.SoftSign(), surrogate.soft_sign),
    "SuperSpike": (sj.SuperSpike(), surrogate.super_spike(beta=1.0)),
    "SuperSpike(3)": (sj.SuperSpike(3.0), surrogate.super_spike(beta=1.0, height=3.0)),
    "PiecewiseQuadratic": (sj.PiecewiseQuadratic(), surrogate.piecewise_quadratic),
    "PiecewiseExp": (sj.PiecewiseExp(), surrogate.piecewise_exp),
    "Erf": (sj.Erf(), surrogate.erf),
    "NonzeroSignLogAbs": (sj.NonzeroSignLogAbs(), surrogate.nonzero_sign_log_abs),
    "PiecewiseLeakyReLU": (sj.PiecewiseLeakyReLU(), surrogate.piecewise_leaky_relu),
    "SquarewaveFourierSeries": (sj.SquarewaveFourierSeries(), surrogate.squarewave_fourier_series),
    "SquarewaveFourierSeries(4)": (sj.SquarewaveFourierSeries(4, 3.0), surrogate.squarewave_fourier_series(n=4, T_period=3.0)),
    "S2NN": (sj.S2NN(), surrogate.s2nn),
    "QPseudoSpike": (sj.QPseudoSpike(), surrogate.q_pseudo_spike),
    "LeakyKReLU": (sj.LeakyKReLU(), surrogate.leaky_k_relu),
    "LeakyKReLU(.1)": (sj.LeakyKReLU(0.1, 2.0), surrogate.leaky_k_relu(leak=0.1, k=2.0)),
    "FakeNumericalGradient": (sj.FakeNumericalGradient(), surrogate.fake_numerical_gradient),
    "LogTailedReLU": (sj.LogTailedReLU(), surrogate.log_tailed_relu),
    "DeterministicPass": (sj.DeterministicPass(), surrogate.deterministic_pass),
    "Rect": (sj.Rect(), surrogate.rect),
    "MultiLevelSpikeCount": (sj.MultiLevelSpikeCount(3), surrogate.multi_level_spike_count(max_spike_count=3)),
    "MultiLevelSpikeCount(window)": (sj.MultiLevelSpikeCount(2, grad_window=(-1, 2.5)), surrogate.multi_level_spike_count(max_spike_count=2, grad_window=(-1.0, 2.5))),
}  # fmt: skip
SNNTORCH = {  # which spikes where x > 0
    "atan": (snn.atan(), surrogate.atan),
    "fast_sigmoid": (snn.fast_sigmoid(), surrogate.fast_sigmoid),
    "sigmoid": (snn.sigmoid(), surrogate.sigmoid(alpha=25.0)),
    "heaviside": (snn.heaviside(), surrogate.heaviside),
    "spike_rate_escape": (snn.spike_rate_escape(), surrogate.spike_rate_escape),
    "straight_through_estimator": (snn.straight_through_estimator(), surrogate.straight_through_estimator),
    "triangular": (snn.triangular(), surrogate.triangular),
    "SFS": (snn.SFS(), surrogate.SFS),
    "custom_surrogate": (snn.custom_surrogate(lambda x, grad, spikes: grad * x), surrogate.custom_surrogate(gradient=lambda x: x)),
}


@pytest.mark.parametrize("name", SPIKINGJELLY)
def test_spikingjelly(name):
    theirs, ours = SPIKINGJELLY[name]
    assert torch.equal(ours(X), theirs(X))
    torch.testing.assert_close(gradient(ours, X), gradient(theirs, X), rtol=1e-12, atol=1e-12)


def test_every_name_of_spikingjelly_is_known():
    classes = {n for n, c in vars(sj).items() if isinstance(c, type) and issubclass(c, sj.SurrogateFunctionBase)}
    known = {name.split("(")[0] for name in SPIKINGJELLY} | {"PoissonPass"}  # random: below
    assert classes - {"SurrogateFunctionBase"} == known
    lower = {
        "".join("_" + c.lower() if c.isupper() and i and not n[i - 1].isupper() else c.lower() for i, c in enumerate(n)) for n in known
    }
    special = {"atan", "s2nn", "q_pseudo_spike", "leaky_k_relu", "log_tailed_relu", "piecewise_leaky_relu"}  # capitals in a row
    assert {n for n in lower if hasattr(surrogate, n)} | special <= set(surrogate.__all__)
    assert len({n for n in lower if hasattr(surrogate, n)} | special) == len(known)


@pytest.mark.parametrize("name", SNNTORCH)
def test_snntorch(name):
    theirs, ours = SNNTORCH[name]
    ours = functools.partial(ours, inclusive=False)
    assert torch.equal(ours(X), theirs(X).double())
    torch.testing.assert_close(gradient(ours, X), gradient(theirs, X), rtol=1e-12, atol=1e-12)


def test_every_name_of_snntorch_is_known():
    functions = {n for n, f in vars(snn).items() if callable(f) and not isinstance(f, type)}
    assert functions == set(SNNTORCH) | {"SSO", "LSO"}  # SSO is random; LSO() calls SSO without its settings and fails
    assert functions <= set(surrogate.__all__)


def test_stochastic_spike_operator_of_snntorch():
    torch.manual_seed(0)
    theirs = gradient(snn.SSO(mean=0.1, variance=0.5), X)
    torch.manual_seed(0)
    ours = gradient(surrogate.SSO, X, torch.rand_like(X), 0.1, 0.5, inclusive=False)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_poisson_pass_fires_with_its_probability():
    x, generator = torch.linspace(0, 1, 11).expand(100_000, 11), torch.Generator().manual_seed(0)
    rate = surrogate.poisson_pass(x, torch.rand(x.shape, generator=generator)).mean(0)
    torch.testing.assert_close(rate, x[0], rtol=0, atol=5e-3)
    assert rate[0] == 0 and rate[-1] == 1


# --- how they are called ------------------------------------------------------------------------------------------------------
def test_settings_by_name_give_a_spike_function():
    steep = surrogate.atan(alpha=3.0, inclusive=False)
    assert torch.equal(gradient(steep, X), gradient(surrogate.atan, X, 3.0)) and steep(torch.zeros(1)) == 0
    assert surrogate.atan()(torch.zeros(1)) == 1
    with pytest.raises(TypeError, match="takes a tensor first, not float"):
        surrogate.atan(3.0)


NAN, INF = math.nan, math.inf
REFUSED = {  # values that the formula cannot take; numbers that are not finite are refused everywhere
    ("alpha", "sigma", "width", "w", "T_period", "height", "spike_rate_escape slope", "super_spike beta"): (0, 0.0, -1.0),
    ("q_pseudo_spike alpha",): (1, 1.0, 0.5),
    ("fast_sigmoid slope", "SFS slope", "spike_rate_escape beta", "s2nn beta"): (-1.0,),
    ("n",): (1, 0, 2.5),
    ("max_spike_count",): (0, 1.5),
    ("triangular threshold",): (0, 0.0),
    ("grad_window",): (1.0, (0.0,), (5, 2), (1.0, 1.0), (NAN, 1.0), ("0", 1.0)),
    ("gradient",): (1.0, None),
    ("noise",): (0.5, None),
    ("inclusive",): (0, 1.0, None),
}
ALWAYS = ("steep", [2.0], numpy.ones(2), NAN, INF, -INF)


def settings_of(name):
    return [p for p in inspect.signature(getattr(surrogate, name)).parameters if p != "x"]


@pytest.mark.parametrize("name", [n for n in NAMES if getattr(surrogate, n).__name__ == n])
def test_settings_that_make_no_gradient_are_refused(name):
    given = with_operands(name, X).keywords
    for setting in settings_of(name):
        groups = [values for keys, values in REFUSED.items() if setting in keys or f"{name} {setting}" in keys]
        values = groups[0] if groups and (name, setting) != ("log_tailed_relu", "alpha") else ()
        for value in (*values, *ALWAYS):
            for call in ({}, {"x": X}):
                with pytest.raises(ArgumentError, match=f"{name} needs {setting} to be"):
                    getattr(surrogate, name)(**call, **(given | {setting: value}))
    with pytest.raises(ArgumentError, match=f"{name} has no setting `slop`; it takes"):
        getattr(surrogate, name)(slop=1.0)
    with pytest.raises(ArgumentError, match="settings by position"):
        getattr(surrogate, name)(X, *range(9))


def test_a_setting_given_twice():
    with pytest.raises(ArgumentError, match="atan was given alpha twice"):
        surrogate.atan(X, 3.0, alpha=2.0)


@pytest.mark.parametrize("spike", [surrogate.SSO, surrogate.poisson_pass])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_random_surrogates_give_the_dtype_of_x(spike, dtype):
    x = X.to(dtype).requires_grad_()
    s = spike(x, NOISE)
    (grad,) = torch.autograd.grad(s.sum(), x)
    assert s.dtype == grad.dtype == dtype and grad.any()


def test_settings_that_are_missing_are_named():
    for name in ("custom_surrogate", "poisson_pass", "SSO"):
        with pytest.raises(ArgumentError, match=f"{name} needs {OPERAND_NAMES[name]}: "):
            getattr(surrogate, name)(X)


# --- a spike does not depend on the shape of its surrogate: nothing there can be learned ----------------------------------------
def learned_by_name(alpha):
    return flexsn.LIF(surrogate=lambda h: surrogate.atan(h, alpha=alpha))


def learned_in_a_module(alpha):
    class Spike(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.alpha = alpha

        def forward(self, x):
            return surrogate.atan(x, self.alpha)

    return flexsn.LIF(surrogate=Spike())


def learned_as_param(alpha):
    return flexsn.FlexSN(lambda x, v, a: (surrogate.atan(x + v, a), v), num_states=1, params=[alpha])


def learned_by_a_function(alpha):
    return flexsn.LIF(surrogate=lambda h: surrogate.atan(h, alpha=alpha.exp()))


def learned_by_a_gradient(alpha):
    return flexsn.LIF(surrogate=surrogate.custom_surrogate(gradient=lambda h: torch.exp(-alpha * h.abs())))


LEARNED = [learned_by_name, learned_in_a_module, learned_as_param, learned_by_a_function, learned_by_a_gradient]


@pytest.mark.filterwarnings("ignore::flexsn.errors.FallbackWarning")
@pytest.mark.parametrize("make", LEARNED)
@pytest.mark.parametrize("backend", ["auto", "cpp", "torch"])
def test_a_slope_that_requires_grad_is_refused(make, backend):
    with pytest.raises(
        (ArgumentError, ParamGradientError), match=r"(atan|custom_surrogate) .*but gets no gradient.*\n  Write `.detach\(\)`"
    ):
        neuron = make(torch.nn.Parameter(torch.tensor(3.0)))
        neuron.backend = backend
        neuron(torch.rand(3, 4).requires_grad_()).sum().backward()


def test_a_slope_that_requires_grad_is_refused_when_it_is_set():
    with pytest.raises(ArgumentError, match="setting `alpha` of atan requires grad"):
        surrogate.atan(alpha=torch.nn.Parameter(torch.tensor(3.0)))


@pytest.mark.parametrize("make", [learned_as_param, learned_in_a_module, learned_by_a_gradient])
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.filterwarnings("ignore::flexsn.errors.FallbackWarning")
def test_a_tensor_slope_that_is_constant_works(make, backend):
    x = torch.linspace(-1.0, 1.0, 8).view(2, 4).requires_grad_()
    grads = []
    for alpha in (torch.tensor(1.0), torch.tensor(3.0)):
        neuron = make(torch.nn.Parameter(alpha, requires_grad=False) if make is learned_in_a_module else alpha)
        neuron.backend = backend
        (grad,) = torch.autograd.grad(neuron(x).sum(), x)
        grads.append(grad)
    assert grads[0].all() and grads[1].all() and (grads[0] != grads[1]).any()
    detached = flexsn.FlexSN(
        lambda x, v, a: (surrogate.atan(a * x + v, a.detach()), v), 1, 1, params=[torch.nn.Parameter(torch.tensor(3.0))]
    )
    detached.backend = "cpp" if backend == "auto" else backend
    detached(x).sum().backward()
    assert detached.params.a.grad is not None


def test_without_gradients_a_slope_may_require_them():
    alpha = torch.nn.Parameter(torch.tensor(3.0))
    with torch.no_grad():
        assert surrogate.atan(X, alpha).sum() == surrogate.atan(X).sum()


# --- fused --------------------------------------------------------------------------------------------------------------------
FUSED = [n for n in NAMES if n not in ("straight_through_estimator", "deterministic_pass")]  # which are `straight_through`
GROUPS = [FUSED[k : k + 10] for k in range(0, len(FUSED), 10)]


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g[0])
@pytest.mark.parametrize("backend", ["cpp", pytest.param("triton", marks=pytest.mark.slow)])
def test_fused_as_eager(group, backend):
    """Each surrogate has an input and an output of its own, so that gradients do not mix; a kernel holds ten of them."""
    options = [{} if n in OTHER_STEPS else {"inclusive": k % 2 == 0} for k, n in enumerate(group)]

    def core(*operands):
        *xs, noise, v = operands
        drive = [x + 0.25 * v for x in xs]
        own = [
            {"noise": noise} if n in ("SSO", "poisson_pass") else {"gradient": torch.cos} if n == "custom_surrogate" else {} for n in group
        ]
        return (*(getattr(surrogate, n)(h, **o, **w) for n, h, o, w in zip(group, drive, options, own, strict=True)), 0.5 * v + noise)

    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(5, 70, generator=generator) for _ in group]
    for x in xs:
        x[0, :3] = torch.tensor([0.0, 1.0, -1.0])
    inputs = [*xs, torch.rand(5, 70, generator=generator)]
    want_values, want_grads = evaluate(core, inputs, [torch.zeros(70)], backend="torch")
    values, grads = evaluate(core, inputs, [torch.zeros(70)], backend=backend)
    assert_same_values(values, want_values)
    assert_same_grads(grads, want_grads)
    assert all(grads[f"arg{k}"].any() for k in range(len(group)))
