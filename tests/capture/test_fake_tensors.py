"""A capture imports neither `torch._dynamo` nor sympy for a common core, and what stands in for PyTorch's fake mode says what that says."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flexsn
from flexsn._torch.fake_tensors import FakeTensorMode, LightFakeMode

ROOT = Path(flexsn.__file__).parent.parent
aten = torch.ops.aten

IMPORTS = """
import inspect, sys
import torch, flexsn
from flexsn import neurons, surrogate
from flexsn._operator import dispatch

HEAVY = {"torch._dynamo", "sympy"}
assert HEAVY.isdisjoint(sys.modules)
x = torch.rand(4, 2, 3, requires_grad=True)
weight = torch.nn.Parameter(torch.rand(3))

def trained(what, call, leaves):
    call().sum().backward()
    assert all(leaf.grad is not None for leaf in leaves) and HEAVY.isdisjoint(sys.modules), what

lif = flexsn.LIF(tau=torch.nn.Parameter(torch.tensor(2.0)))
trained("a learned tau", lambda: lif(x), lif.parameters())
trained("a closure", lambda: flexsn.scan(lambda x, v: (torch.sigmoid(v) * weight, (v + x).clamp(-1.0, 1.0)), [x], [None]).outputs[0], [weight, x])
for name in ("softplus elu silu leaky_relu mish celu selu hardsigmoid hardswish hardtanh relu6 gelu logsigmoid softsign tanhshrink "
             "hardshrink softshrink").split():
    bent = getattr(torch.nn.functional, name)
    trained(name, lambda: flexsn.scan(lambda x, v: (s := v * 0.9 + bent(x), s), [x], [None]).outputs[0], [x])
branches = torch.rand(3, requires_grad=True)
dendrites = lambda x, d: ((d * branches).mean(-1), d * 0.9 + x.unsqueeze(-1))
trained("a mean over an inner dim", lambda: flexsn.scan(dendrites, [x], [torch.zeros(2, 3, 3)]).outputs[0], [x, branches])
linear, gates = torch.nn.functional.linear, torch.rand(12, 3, requires_grad=True)
def lstm(x, h, c):
    i, f, o, u = (linear(x, gates, gates[:, 0]) + linear(h, gates)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, h, c
trained("an LSTM", lambda: flexsn.scan(lstm, [x], [None, None], strict=True).outputs[0], [x, gates])
trained("a recurrent layer", lambda: flexsn.Recurrent(flexsn.LIF(), torch.nn.Linear(3, 3))(x), [x])
with torch.no_grad():
    flexsn.LIF()(x)
assert HEAVY.isdisjoint(sys.modules), "inference"

class Captured(Exception): ...

def capture(*args):
    prepare(*args, build=False)
    raise Captured

prepare, dispatch.prepare = dispatch.prepare, capture

def captured(what, call):
    try:
        call()
    except Captured:
        assert HEAVY.isdisjoint(sys.modules), what
    else:
        raise AssertionError(what)

for name, cls in vars(neurons).items():
    if isinstance(cls, type) and issubclass(cls, neurons.Neuron) and cls is not neurons.Neuron:
        captured(name, lambda: cls()(*[x] * (1 + (name == "TwoCompartmentLIF"))))
others = {"custom_surrogate", "poisson_pass"}  # which make another, and take noise
for name, spike in vars(surrogate).items():
    if inspect.isfunction(spike) and spike.__module__ == "flexsn.surrogate" and name.islower() and name[0] != "_" and name not in others:
        captured(name, lambda: flexsn.LIF(surrogate=spike)(x))
"""


def test_capture_and_training_import_neither_dynamo_nor_sympy():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


OPS = {
    "add": lambda a, b: aten.add.Tensor(a, b, alpha=2),
    "sub": lambda a, b: aten.rsub.Scalar(a, 1.5),
    "mul": lambda a, b: aten.mul.Tensor(a, 2.0),
    "div": aten.div.Tensor,
    "floor_divide": aten.floor_divide.default,
    "pow": lambda a, b: aten.pow.Tensor_Scalar(a, 2),
    "ge": aten.ge.Tensor,
    "logical_and": aten.logical_and.default,
    "bitwise_and": aten.bitwise_and.Tensor,
    "exp": lambda a, b: aten.exp.default(a),
    "where": lambda a, b: aten.where.self(aten.gt.Scalar(a, 0), a, b),
    "clamp": lambda a, b: aten.clamp.Tensor(a, max=b),
    "masked_fill": lambda a, b: aten.masked_fill.Scalar(a, aten.gt.Scalar(b, 0), 0.0),
    "frexp": lambda a, b: aten.frexp.Tensor(a)[1],
    "sum": lambda a, b: aten.sum.default(a),
    "sum of a dim": lambda a, b: aten.sum.dim_IntList(a, [-1]),
    "mean of a dim": lambda a, b: aten.mean.dim(a, [-1]),
    "select": lambda a, b: aten.select.int(a, -1, 2),
    "slice": lambda a, b: aten.slice.Tensor(a, 1, 1, 3),
    "select backward": lambda a, b: aten.select_backward.default(aten.select.int(a, 0, 1), [3, 4], 0, 1),
    "slice backward": lambda a, b: aten.slice_backward.default(aten.slice.Tensor(a, 0, 1, 2), [3, 4], 0, 1, 2, 1),
    "unbind": lambda a, b: aten.unbind.int(a, -1)[1],
    "stack": lambda a, b: aten.stack.default([a, b], -1),
    "stack of two dtypes": lambda a, b: aten.stack.default([a, aten._to_copy.default(b, dtype=torch.float64)]),
    "expanded": lambda a, b: aten.div.Scalar(aten.expand.default(a, [2, 3, 4]), 3),
    "expanded and transposed": lambda a, b: aten.mul.Tensor(aten.expand.default(a, [2, 3, 4]), aten.transpose.int(aten.expand.default(a, [2, 3, 4]), 0, 1)),
    "a column": lambda a, b: aten.add.Tensor(aten.unsqueeze.default(aten.select.int(a, 1, 0), 1), b),
    "a slice": lambda a, b: aten.exp.default(aten.slice.Tensor(a, 1, 1, 3)),
    "sum that keeps": lambda a, b: aten.sum.dim_IntList(a, [0], True, dtype=torch.float64),
    "copy": lambda a, b: aten._to_copy.default(a, dtype=torch.float16),
    "clone": lambda a, b: aten.clone.default(a, memory_format=torch.contiguous_format),
    "zeros_like": lambda a, b: aten.zeros_like.default(a),
    "new_full": lambda a, b: aten.new_full.default(a, [2, 5], 3),
    "full": lambda a, b: aten.full.default([4], 2, device=a.device),
    "scalar_tensor": lambda a, b: aten.scalar_tensor.default(2.5),
    "detach": lambda a, b: aten.detach.default(a),
    "expand": lambda a, b: aten.expand.default(a, [2, 3, 4]),
    "transposed": lambda a, b: aten.add.Tensor(aten.transpose.int(a, 0, 1), 1),
    "view": lambda a, b: aten.view.default(a, [-1]),
    "view of what is expanded": lambda a, b: aten.view.default(aten.expand.default(a, [2, 3, 4]), [-1]),
    "mm": lambda a, b: aten.mm.default(a, aten.t.default(a)),
    "mm of another width": lambda a, b: aten.mm.default(a, a),
    "mm of another dtype": lambda a, b: aten.mm.default(a, aten.expand.default(aten.view.default(b, [-1, 1]), [-1, 5])),
    "addmm": lambda a, b: aten.addmm.default(aten.select.int(a, 1, 0), a, aten.t.default(a)),
    "addmm of a matrix": lambda a, b: aten.addmm.default(b, a, aten.t.default(a), beta=2),
    "bmm": lambda a, b: aten.bmm.default(aten.expand.default(a, [2, 3, 4]), aten.transpose.int(aten.expand.default(a, [2, 3, 4]), 1, 2)),
    "bmm of another batch": lambda a, b: aten.bmm.default(aten.expand.default(a, [2, 3, 4]), aten.expand.default(aten.t.default(a), [3, 4, 3])),
    "split": lambda a, b: aten.split.Tensor(a, 2, -1)[1],
    "split with sizes": lambda a, b: aten.split_with_sizes.default(a, [1, 3], 1)[1],
    "split with other sizes": lambda a, b: aten.split_with_sizes.default(a, [1, 4], 1)[1],
    "no such dim": lambda a, b: aten.sum.dim_IntList(a, [5]),
    "two devices": lambda a, b: aten.add.Tensor(a, torch.empty(3, 4, device="cpu" if a.device.type == "cuda" else "cuda")),
    "other kernels": lambda a, b: aten.cumsum.default(a, 0),
    "on a device": lambda a, b: aten._to_copy.default(a, device=torch.device("cpu")),
    "is_same_size": aten.is_same_size.default,
}  # fmt: skip


def outcome(mode, op, left, right, device):
    """What a fake mode says of an op: the kind of a result, or of an error."""
    with mode:
        a, b = (torch.empty(shape, dtype=dtype, device=device) for shape, dtype in (left, right))
        try:
            found = op(a, b)
        except Exception as error:  # whatever PyTorch raises
            return type(error), str(error).split("\n")[0]
    return (found.shape, found.stride(), found.dtype, found.device) if isinstance(found, Tensor) else found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", OPS)
def test_the_light_mode_says_what_the_whole_one_says(name, device):
    shapes = [(3, 4), (4,), (3, 1), (), (0, 4)]
    single, half, integer, boolean = torch.float32, torch.float16, torch.int64, torch.bool
    dtypes = [(single, single), (half, half), (half, single), (integer, half), (integer, integer), (single, boolean), (boolean, boolean)]
    for (left, right), kinds in itertools.product([*itertools.product(shapes[:1], shapes), ((), ())], dtypes):
        operands = (left, kinds[0]), (right, kinds[1])
        want = outcome(FakeTensorMode(allow_non_fake_inputs=True), OPS[name], *operands, device)
        assert outcome(LightFakeMode(), OPS[name], *operands, device) == want, operands


def test_a_light_mode_becomes_whole_at_an_op_that_it_does_not_know():
    with LightFakeMode() as mode:
        x = torch.empty(3, 4)
        y = torch.sigmoid(x) + 1.0
        assert not mode.whole
        z = y.cumsum(0)
        assert mode.whole and z.fake_mode is y.fake_mode and (z * x).shape == (3, 4)
    assert type(torch.ones(2)) is Tensor


def test_views_share_memory():
    with LightFakeMode() as mode:
        x = torch.empty(3, 4)
        y = x.detach().view(12)
        assert x.untyped_storage()._cdata == y.untyped_storage()._cdata != (x + 1).untyped_storage()._cdata
    assert not mode.whole
