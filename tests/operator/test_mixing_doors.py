"""Kinds of cores that mix neurons, through every door by which a call comes: what each computes, or how it refuses."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from helpers import on_cpu
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import flexsn
from flexsn._torch_compile.hop import flex_sn_scan
from flexsn.errors import (
    DoubleBackwardError,
    FallbackWarning,
    NotElementwiseError,
    ShapeMismatchError,
    TorchScriptError,
    UnsupportedOpError,
)

pytestmark = [
    on_cpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit."),  # of what forward mode and PyTorch's compiler import
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"),
]
f64 = torch.float64


def made(*shape, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator("cpu").manual_seed(sum(shape)), dtype=f64, device="cpu")


W = made(5, 5, scale=0.4)
X, V = made(6, 3, 5), made(3, 5)


def product(x, v, w):
    v = torch.tanh(x + v @ w)
    return v, v


def of_input_too(x, v, w):
    v = torch.tanh(x @ w + F.linear(v, W))
    return v, v


def convolution(x, v, w):
    v = torch.tanh(x + F.conv1d(v, w, padding=1))
    return v, v


def mean(x, v, w):
    v = torch.tanh(x + 0.5 * w * v - v.mean(-1, keepdim=True))
    return v, v


def layer(x, v, w):
    """What `flexsn.Recurrent` makes of a neuron."""
    v = 0.5 * v + x + F.linear(v, w)
    return torch.sigmoid(v), v


CORES = {
    "product": (product, X, V, W),
    "of an input too": (of_input_too, made(6, 3, 4), V, made(4, 5, scale=0.4)),
    "convolution": (convolution, made(6, 3, 2, 5), made(3, 2, 5), made(2, 2, 3, scale=0.4)),
    "mean": (mean, made(6, 3, 70), made(3, 70), made(70)),  # of at most 64 values a kernel takes it
    "layer": (layer, X, V, W),
}


def outputs(core, x, v, w, **options):
    return flexsn.scan(core, [x], [v], [w], **options).outputs[0]


def plain(core, x, v, w):
    """The loop, by hand."""
    found = []
    for step in x.unbind(0):
        y, v = core(step, v, w)
        found.append(y)
    return torch.stack(found)


def gradient(call, x):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(call(leaf).sin().sum(), leaf)[0]


def tangent(call, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(x, x.cos()))).tangent


def second(call, x):
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(call(leaf).sin().sum(), leaf, create_graph=True)
    return torch.autograd.grad(first.sin().sum(), leaf)[0]


def values(call, x):
    return call(x)


class Net(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


def step_by_step(core, x, v, w, strict):
    neuron = flexsn.FlexSN(lambda x, v: core(x, v, w), 1, 1, step_mode="s", strict=strict, initial_states=lambda x: [v])
    return torch.stack([neuron(step) for step in x])


def through(make):
    """A door that makes another function of a function of `x`."""
    return lambda core, x, v, w, strict: make(lambda x: outputs(core, x, v, w, strict=strict))(x)


def compiled(**options):
    return through(lambda call: torch.compile(call, backend="aot_eager", **options))


class Door(NamedTuple):
    """How a call comes.

    Attributes:
        run: `run(core, x, v, w, strict)` returns what is compared.
        of: of the plain loop, what it is compared with.
        strict: what a strict call raises; None: it is fused.
        falls_back: what the warning of a call that is not strict says; None: it does as a strict one.
        widths: what a core whose input is as wide as no state raises, strict or not, where that differs; None: it runs.
    """

    run: Callable
    of: Callable = values
    strict: type[Exception] | None = None
    falls_back: str | None = None
    widths: type[Exception] | str | None = "no other"


EAGER = {"strict": NotElementwiseError, "falls_back": "runs the eager loop"}
SCAN = {"strict": NotElementwiseError, "falls_back": "runs PyTorch's own scan", "widths": ShapeMismatchError}
DOORS = {
    "scan": Door(lambda core, x, v, w, strict: outputs(core, x, v, w, strict=strict)),
    "training": Door(lambda core, x, v, w, strict: gradient(lambda x: outputs(core, x, v, w, strict=strict), x), gradient),
    "cpp": Door(lambda core, x, v, w, strict: outputs(core, x, v, w, backend="cpp")),
    "triton": Door(lambda core, x, v, w, strict: outputs(core, x, v, w, backend="triton")),
    "single steps": Door(step_by_step),
    "in pieces": Door(lambda core, x, v, w, strict: torch.cat(flexsn.scan(core, [[x[:2], x[2:]]], [v], [w], strict=strict).outputs[0])),
    "checkpoint": Door(
        lambda core, x, v, w, strict: gradient(
            lambda x: torch.utils.checkpoint.checkpoint(lambda x: outputs(core, x, v, w, strict=strict), x, use_reentrant=False), x
        ),
        gradient,
    ),
    "second derivative": Door(
        lambda core, x, v, w, strict: second(lambda x: outputs(core, x, v, w, strict=strict), x), second, DoubleBackwardError
    ),
    "forward mode": Door(lambda core, x, v, w, strict: tangent(lambda x: outputs(core, x, v, w, strict=strict), x), tangent, **EAGER),
    "grad": Door(through(lambda call: torch.func.grad(lambda x: call(x).sin().sum())), gradient, **EAGER),
    "vmap": Door(
        lambda core, x, v, w, strict: torch.vmap(lambda x, v: outputs(core, x, v, w, strict=strict), (1, 0), 1)(x, v),
        **EAGER,
    ),
    "hop": Door(lambda core, x, v, w, strict: outputs(core, x, v, w, backend="hop"), strict=NotElementwiseError),
    "the operator": Door(lambda core, x, v, w, strict: flex_sn_scan(core, 1, 1, 1, x, v, w)[0]),
    "make_fx": Door(lambda core, x, v, w, strict: make_fx(lambda x: outputs(core, x, v, w, strict=strict))(x)(x), **EAGER),
    "export": Door(through(lambda call: lambda x: torch.export.export(Net(call), (x,)).module()(x)), **EAGER),
    "strict export": Door(through(lambda call: lambda x: torch.export.export(Net(call), (x,), strict=True).module()(x)), **SCAN),
    "compiled": Door(compiled()),
    "compiled, training": Door(
        lambda core, x, v, w, strict: gradient(
            torch.compile(lambda x: outputs(core, x, v, w, strict=strict), backend="aot_eager", fullgraph=True), x
        ),
        gradient,
    ),
    "compiled whole": Door(compiled(fullgraph=True)),
    "TorchScript": Door(through(lambda call: lambda x: torch.jit.trace(call, (x,))(x)), strict=TorchScriptError),
    "lowlevel": Door(
        lambda core, x, v, w, strict: flexsn.lowlevel.build_inference_kernel(lambda x, v: core(x, v, w), 1, 1, 1, [x[0], v]),
        strict=UnsupportedOpError,
    ),
}
MATRIX = [pytest.param(core, door, id=f"{core}-{door}") for door in DOORS for core in CORES]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch's own
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize(("name", "door"), MATRIX)
def test_every_kind_through_every_door(name, door, strict):
    core, x, v, w = CORES[name]
    how = DOORS[door]
    error, said = how.strict, None if strict else how.falls_back
    if how.widths != "no other" and name == "of an input too":
        error, said = how.widths, None
    if error is not None and said is None:
        with pytest.raises(error, match=r"torch\.jit\.trace|not elementwise|mixes neurons|do not broadcast|graph break|runs uncompiled"):
            how.run(core, x, v, w, strict)
        return
    with pytest.warns(FallbackWarning, match=said) if said else contextlib.nullcontext():
        got = how.run(core, x, v, w, strict)
    want = how.of(lambda x: plain(core, x, v, w), x)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
