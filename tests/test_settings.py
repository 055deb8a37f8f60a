"""Settings of surrogates: values of tensors, settings that leave no gradient, large ones, and gradients of the user's own."""

import functools

import numpy
import pytest
import torch

import flexsn
from flexsn import surrogate
from flexsn.errors import ArgumentError

X = torch.linspace(-3, 3, 601, dtype=torch.float64)
NAN, INF = float("nan"), float("inf")


def gradient(spike, x, *args):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(spike(x, *args).sum(), x)[0]


def test_they_may_be_numbers_of_numpy_and_tensors():
    for value in (numpy.float32(3.0), numpy.float64(3.0), numpy.array(3.0), numpy.int64(3), torch.tensor(3.0), torch.full((601,), 3.0)):
        for atan in (surrogate.atan(alpha=value), surrogate.atan(None, value)):
            torch.testing.assert_close(gradient(atan, X), gradient(surrogate.atan, X, 3.0), rtol=1e-6, atol=1e-7)
    assert surrogate.multi_level_spike_count(max_spike_count=numpy.int64(3))(torch.tensor(2.6)) == 3
    torch.testing.assert_close(
        gradient(surrogate.squarewave_fourier_series(n=numpy.int64(4)), X), gradient(surrogate.squarewave_fourier_series, X, 4)
    )


TENSORS = {  # one value of these is refused: (settings, the value)
    "atan": ({"alpha": torch.tensor(0.0)}, "above 0.*value of 0.0"),
    "sigmoid": ({"alpha": torch.tensor([1.0, -2.0, 3.0])}, "above 0.*value of -2.0"),
    "piecewise_linear": ({"width": torch.tensor(-1.0)}, "above 0.*value of -1.0"),
    "gaussian": ({"sigma": torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16)}, "above 0.*value of 0.0"),
    "erf": ({"alpha": torch.tensor([1.0, NAN])}, "value of nan"),
    "super_spike": ({"beta": torch.tensor(1.0), "height": torch.tensor(INF)}, "height.*value of inf"),
    "q_pseudo_spike": ({"alpha": torch.tensor([2, 1])}, "above 1.*value of 1"),
    "fast_sigmoid": ({"slope": torch.tensor([0.0, -1.0])}, "0 or above.*value of -1.0"),
    "triangular": ({"threshold": torch.tensor([1.0, 0.0])}, "other than 0.*value of 0.0"),
    "rect": ({"alpha": torch.tensor([True])}, "value of True"),
    "multi_level_spike_count": ({"max_spike_count": torch.tensor(2.5)}, r"an int.*not tensor\(2.5"),
    "custom_surrogate": ({"gradient": torch.tensor(1.0)}, "a function of x"),
    "heaviside": ({"inclusive": torch.tensor(False)}, "True or False"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_value_of_a_tensor_is_looked_at(name):
    settings, why = TENSORS[name]
    with pytest.raises(ArgumentError, match=f"{name} needs .*{why}"):
        getattr(surrogate, name)(**settings)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # PyTorch's own, as it traces a surrogate
def test_tensors_that_hold_no_values_are_taken():
    """On the meta device, under `vmap`, and as `torch.compile` traces."""
    assert callable(surrogate.atan(alpha=torch.zeros(3, device="meta")))

    def spike(alpha, x):
        return surrogate.atan(alpha=alpha)(x)

    alphas, x = torch.tensor([1.0, 3.0]), torch.rand(4, requires_grad=True)
    slopes = torch.func.vmap(torch.func.grad(lambda alpha, x: spike(alpha, x).sum(), argnums=1), (0, None))(alphas, x)
    for alpha, slope in zip(alphas, slopes, strict=True):
        torch.testing.assert_close(slope, gradient(surrogate.atan, x.detach(), alpha))
    compiled = torch.compile(spike, backend="eager", fullgraph=True)
    assert torch.equal(gradient(functools.partial(compiled, alphas[1]), x.detach()), slopes[1])


NO_GRADIENT = {  # with numbers that are fine one by one
    "leaky_k_relu": ({"leak": 0.0, "k": 0.0}, {"leak": 0.0, "k": 0.5}),
    "triangular": ({"threshold": 0.0}, {"threshold": -1.0}),
    "multi_level_spike_count": ({"grad_window": (5, 2)}, {"grad_window": (-INF, INF)}),
}


@pytest.mark.parametrize("name", NO_GRADIENT)
def test_settings_that_leave_no_gradient_anywhere_are_refused(name):
    wrong, right = NO_GRADIENT[name]
    for operands in ((), (X,)):
        with pytest.raises(ArgumentError, match=f"{name} needs "):
            getattr(surrogate, name)(*operands, **wrong)
    assert gradient(getattr(surrogate, name)(**right), X).any()


LARGE = {  # by setting: surrogates that have it
    "alpha": "atan sigmoid soft_sign piecewise_quadratic piecewise_exp erf rect nonzero_sign_log_abs s2nn q_pseudo_spike",
    "slope": "fast_sigmoid SFS spike_rate_escape",
    "beta": "super_spike s2nn spike_rate_escape",
    "w": "piecewise_leaky_relu",
    "width": "piecewise_linear",
}


@pytest.mark.parametrize(("name", "setting"), [(n, s) for s, names in LARGE.items() for n in names.split()], ids=str)
def test_large_settings_give_finite_gradients(name, setting):
    x = torch.tensor([-1e8, -1.0, -1e-31, -0.0, 0.0, 1e-31, 1.0, 1e8])
    found = gradient(getattr(surrogate, name)(**{setting: 1e30}), x)
    assert found.isfinite().all(), found


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_gradient_that_is_none_is_named(backend):
    x = torch.rand(3, 4, requires_grad=True)
    neuron = flexsn.LIF(surrogate=surrogate.custom_surrogate(gradient=lambda x: None), backend=backend)
    with pytest.raises(ArgumentError, match=r"`gradient` of custom_surrogate returned NoneType, not a tensor\n  It takes `x`"):
        neuron(x).sum().backward()
    for number in (2, 2.0, numpy.float32(2.0)):
        assert torch.equal(gradient(surrogate.custom_surrogate(gradient=lambda x, n=number: n), X), torch.full_like(X, 2.0))
