"""Surrogates: spikes forward, the documented bump backward, stable everywhere."""

import math

import pytest
import torch

from flexsn import surrogate

X = torch.linspace(-3, 3, 601, dtype=torch.float64)
FORMULAS = {
    "atan": lambda x, a=2.0: (a / 2) / (1 + (math.pi / 2 * a * x) ** 2),
    "sigmoid": lambda x, a=4.0: a * torch.sigmoid(a * x) * (1 - torch.sigmoid(a * x)),
    "fast_sigmoid": lambda x, a=25.0: 1 / (1 + a * x.abs()) ** 2,
    "super_spike": lambda x, a=10.0: a / (1 + a * x.abs()) ** 2,
    "piecewise_linear": lambda x, a=1.0: (1 - x.abs() / a).clamp(min=0) / a,
    "gaussian": lambda x, a=0.5: torch.exp(-0.5 * (x / a) ** 2) / (a * math.sqrt(2 * math.pi)),
    "straight_through": lambda x: torch.ones_like(x),
}
NAMES = sorted(FORMULAS)


def gradient(name, x, *args):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(getattr(surrogate, name)(x, *args).sum(), x)[0]


def test_all_are_covered():
    assert set(surrogate.__all__) == set(FORMULAS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_forward_is_a_step(name, dtype):
    x = torch.tensor([-1.0, -0.0, 0.0, 1e-7, 2.0, float("inf"), -float("inf"), float("nan")]).to(dtype)
    y = getattr(surrogate, name)(x)
    assert y.dtype is dtype and y.tolist() == [0, 1, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_the_documented_one(name):
    torch.testing.assert_close(gradient(name, X), FORMULAS[name](X))
    if name != "straight_through":
        torch.testing.assert_close(gradient(name, X, 1.5), FORMULAS[name](X, 1.5))


@pytest.mark.parametrize("name", NAMES)
def test_no_overflow(name):
    for dtype in (torch.float32, torch.float64):
        top = torch.finfo(dtype).max
        x = torch.tensor([-top, -1e20, -1e4, 0.0, 1e4, 1e20, top], dtype=dtype)
        grad = gradient(name, x)
        assert torch.isfinite(grad).all() and (grad >= 0).all()


@pytest.mark.parametrize("name", ["atan", "sigmoid", "piecewise_linear", "gaussian"])
def test_bump_has_area_one(name):
    wide = torch.linspace(-2000, 2000, 4_000_001, dtype=torch.float64)
    assert torch.trapezoid(gradient(name, wide), wide).item() == pytest.approx(1.0, abs=1e-3)
