"""Capture: what is recorded, of which kind, with which source line, and what the graph computes."""

import pytest
import torch
from cores import lif
from helpers import check, line_of

import flexsn
from flexsn._capture.signature import make_signature
from flexsn._capture.trace import Meta, trace
from flexsn.errors import InPlaceError, OperandMutationError

f32 = torch.float32
CPU = torch.device("cpu")


def record(core, *shapes, inputs=1, states=1, captured=None, vjp=False, dtype=f32):
    sig = make_signature(core, inputs, states, len(shapes) - inputs - states)
    return trace(core, sig, [Meta(s, dtype) for s in shapes], CPU, captured or {}, vjp=vjp)


def kinds(recorded):
    return [
        (n.target._schema.name.removeprefix("aten::"), n.meta["kind"])
        for n in recorded.graph.nodes
        if n.op == "call_function" and "kind" in n.meta
    ]


def test_what_is_computed_from_params_alone_is_static():
    w = torch.ones(3)

    def core(x, v, p):
        decay = torch.exp(-1.0 / p) * w
        return x * decay, v

    found = kinds(record(core, (4, 3), (4, 3), (), captured={"w": w}))
    assert found[-1] == ("mul", "step") and {kind for _, kind in found[:-1]} == {"static"}


def test_shapes_and_dtypes_of_returns():
    recorded = record(lambda x, v: (x > v, (x + v)[..., :], v), (4, 1), (3,))
    assert recorded.metas() == [Meta((4, 3), torch.bool), Meta((4, 3), f32), Meta((3,), f32)]
    assert str(Meta((4, 3), torch.bool)) == "bool[4, 3]"


def test_every_node_has_the_users_line():
    recorded = record(lif, (5,), (5,), (), ())
    lines = [
        n.meta["line"] for n in recorded.graph.nodes if n.op == "call_function" and n.meta.get("kind") == "step" and "uniform" not in n.meta
    ]
    assert line_of(lif, "h = v +") in lines and line_of(lif, "return s") in lines and all(lines)


def test_in_place_on_a_temporary_is_the_functional_op():
    def in_place(x, v):
        h = x + v
        h *= 2
        h[h > 1] = 0.0
        return h, h

    names = [n for n, _ in kinds(record(in_place, (5,), (5,)))]
    assert names[:2] == ["add", "mul"] and not [n for n in names if n.endswith("_")]


INTEGERS_WRITTEN = {
    "add": lambda n: n.add_(0.5), "divide": lambda n: n.div_(2), "root": lambda n: n.sqrt_(), "clamp": lambda n: n.clamp_(max=2.5),
    "bool": lambda n: (n > 0).add_(1),
}  # fmt: skip


@pytest.mark.parametrize("write", INTEGERS_WRITTEN.values(), ids=INTEGERS_WRITTEN)
def test_in_place_on_integers_is_refused_where_pytorch_refuses(write):
    """Also if the core catches it: its other way is taken."""

    def caught(x, n):
        m = n + 1
        try:
            m = write(m)
        except RuntimeError:
            m = m + 2
        return x * m, m.long()

    x, n = torch.randn(5, 3), torch.zeros(3, dtype=torch.int64)
    for backend in ("cpp", "torch"):
        with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
            flexsn.scan(lambda x, n: (x, write(n + 1).long()), [x], [n], backend=backend)
    got, want = (flexsn.scan(caught, [x], [n], backend=backend) for backend in ("cpp", "torch"))
    assert torch.equal(got.states[0], want.states[0]) and torch.equal(got.outputs[0], want.outputs[0])


@pytest.mark.parametrize("power", [lambda h, v: h.pow_(2), lambda h, v: h.pow_(v)], ids=["number", "tensor"])
def test_in_place_power_is_the_functional_op(power):
    """`pow_.Scalar` has another name than its functional form: `pow.Tensor_Scalar`."""

    def core(x, v):
        h = x + v
        return power(h, v), h * 0.5

    names = [n for n, _ in kinds(record(core, (5,), (5,)))]
    assert names[:2] == ["add", "pow"] and "pow_" not in names
    x, v = torch.rand(4, 5), torch.rand(5)
    check(core, (x,), (v,), only="cpp")


def test_in_place_on_a_view_is_refused():
    def core(x, v):
        h = x + v
        h.view(-1)[0] = 1.0
        return h, v

    with pytest.raises(InPlaceError) as caught:
        record(core, (5,), (5,))
    assert caught.value.line == line_of(core, "h.view(-1)")


@pytest.mark.parametrize("vjp", [False, True])
def test_in_place_on_an_alias_of_an_operand_is_refused(vjp):
    def core(x, v):
        h = v.detach()
        h += x
        return h, v

    with pytest.raises((InPlaceError, OperandMutationError)):
        record(core, (5,), (5,), vjp=vjp)


def test_captured_tensors_that_are_used():
    w, unused = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    recorded = record(lambda x, v: (x * w, v), (3,), (3,), captured={"w": w, "unused": unused}, vjp=True)
    assert list(recorded.captured) == ["w"] and recorded.grads[2].meta["kind"] in ("step", "reduced")


def test_cotangents_of_results_that_are_not_differentiable():
    recorded = record(lambda x, v: (x > 0, (x > 0).to(x.dtype), x * v, v), (3,), (3,), vjp=True)
    assert [c is not None for c in recorded.cotangents] == [False, False, True, True]


LAID_OUT = {
    "vector @ matrix": lambda p: p @ torch.arange(16.0).view(4, 4), "matrix @ vector": lambda p: torch.arange(16.0).view(4, 4) @ p,
    "unsqueeze_": lambda p: (p * 2).unsqueeze_(0).mul_(0.5), "squeeze_": lambda p: p.view(1, 4).neg().squeeze_(0),
    "t_": lambda p: (p[:, None] * p).t_().mul_(2)[1], "transpose_": lambda p: (p[:, None] * p * p).transpose_(0, 1)[1],
}  # fmt: skip


@pytest.mark.parametrize("function", LAID_OUT.values(), ids=LAID_OUT)
def test_params_laid_out_in_place(function):
    p = torch.rand(4, dtype=torch.float64)
    check(lambda x, v, p: (v + x, v + x * function(p.float())), [torch.randn(5, 2, 4)], [torch.rand(2, 4)], [p])


def test_gradient_of_a_broadcast_param_is_reduced():
    recorded = record(lambda x, v, p: (x * p, v), (4, 3), (4, 3), (3,), vjp=True)
    assert [g.meta["kind"] for g in recorded.grads] == ["step", "step", "reduced"]
    assert tuple(recorded.grads[2].meta["val"].shape) == (3,)


def test_equal_texts_for_other_sizes():
    def by_size(x, v):
        return x / x.shape[-1], v

    def plain(x, v):
        return x * 0.5, torch.zeros_like(v) + torch.ones(v.shape)

    assert record(plain, (4, 3), (4, 3)).text() == record(plain, (5, 7), (5, 7)).text()
    assert record(by_size, (4, 3), (4, 3)).text() != record(by_size, (5, 7), (5, 7)).text()


def test_nothing_of_the_users_changes():
    w = torch.ones(3, requires_grad=True)
    calls = []

    def core(x, v):
        calls.append(type(x))
        return x * w, v

    record(core, (3,), (3,), captured={"w": w}, vjp=True)
    assert len(calls) == 1 and w.grad is None and type(w) is torch.Tensor and torch.equal(w, torch.ones(3))


def test_cores_that_flexsn_has_give_their_lines():
    from flexsn._cli.candidates import lif  # in a subpackage, as a user's core would be beside it

    lines = [n.meta["line"] for n in record(lif, (5,), (5,)).graph.nodes if n.op == "call_function"]
    assert lines[0] == line_of(lif, "h = v + (x - v) / 2.0") and lines[3:6] == [line_of(lif, "s = atan(h - 1.0)")] * 3

    def users(x, v):
        return lif(x, v)

    lines = {n.meta["line"] for n in record(users, (5,), (5,)).graph.nodes if n.op == "call_function"}
    assert lines == {line_of(users, "return lif(x, v)")}
