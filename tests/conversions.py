"""A converted network beside the one that it was: the same outputs and gradients."""

import pytest
import torch
from loaded_peers import functional, layer
from torch import nn

T, B = 9, 3


def each(names, fused):
    """Every case in the eager loop, which shows that the core is right; on the kernels those named, the rest among the slow tests."""
    kernels = [pytest.param(n, "cpp", id=f"{n}-cpp", marks=() if n in fused else pytest.mark.slow) for n in names]
    return pytest.mark.parametrize(("name", "backend"), [pytest.param(n, "torch", id=f"{n}-torch") for n in names] + kernels)


def assert_same(net, ref, run, run_ref=None, rtol=1e-4):
    """Equal outputs; gradients of the input and of every parameter, by name, to rounding."""
    x = (2.0 * torch.randn(T, B, 4)).requires_grad_()
    same_x = x.detach().clone().requires_grad_()
    got, want = run(net, x), (run_ref or run)(ref, same_x)
    assert torch.equal(got, want), f"{int((got != want).sum())} of {want.numel()} differ"
    assert want.any() and not want.all()
    cotangent = torch.randn_like(want)
    params, ref_params = (dict(m.named_parameters()) for m in (net, ref))
    assert [n.replace("core.", "") for n in params] == list(ref_params)
    grads = torch.autograd.grad(got, [x, *params.values()], cotangent)
    wanted = torch.autograd.grad(want, [same_x, *ref_params.values()], cotangent)
    for name, g, w in zip(["x", *params], grads, wanted, strict=True):
        assert w.any(), f"the gradient of {name} is zero: nothing is compared"
        torch.testing.assert_close(g, w, rtol=rtol, atol=rtol * w.abs().max().item(), msg=lambda m, n=name: f"{n}: {m}")


def whole(net, x):
    return net(x)


def looped(net, x):
    return torch.stack([net(step) for step in x])


def compare(ours, theirs):
    """Two surrogates: the same values, and the same gradients to rounding."""
    x = torch.cat([torch.linspace(-2.0, 2.0, 41), torch.tensor([0.0, float("nan")])])
    values, grads = [], []
    for spike in (ours, theirs):
        leaf = x.clone().requires_grad_()
        values.append(spike(leaf))
        values[-1].sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*values)
    torch.testing.assert_close(grads[0][:-1], grads[1][:-1])  # of NaN the value alone counts


def jelly(node, mode="m"):
    net = nn.Sequential(layer.Linear(4, 7), node)
    functional.set_step_mode(net, mode)
    return net
