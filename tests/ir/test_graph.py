"""The step graph: building, selecting, absent cotangents, running by meaning, refusing what breaks its rules."""

import pytest
import torch

from flexsn._ir.graph import Builder, Graph, Node, Shape, interpret, verify
from flexsn.errors import FlexSNError

f32 = torch.float32


def lif_graph():
    b = Builder("lif")
    x, v = b.input("x0", f32, "x"), b.input("v0", f32, "v")
    h = b.add("add", (v, b.op("div", b.op("sub", x, v), b.const(2, f32))), f32, "h")
    s = b.op("where", b.op("ge", h, b.const(1, f32)), b.const(1, f32), b.const(0, f32))
    return b.graph({"y0": s, "v0": b.op("mul", h, b.op("sub", b.const(1, f32), s))})


def test_runs_by_the_meaning_of_its_ops():
    x, v = torch.randn(100) * 3, torch.randn(100)
    out = interpret(lif_graph(), {"x0": x, "v0": v})
    h = v + (x - v) / 2
    s = (h >= 1).float()
    assert torch.equal(out["y0"], s) and torch.equal(out["v0"], h * (1 - s))


def test_prints():
    text = str(lif_graph())
    assert text.startswith("lif(x0=x, v0=v):") and "h: float32 = add(v, t" in text and text.endswith("return y0=t4, v0=t6")


def test_equal_computations_become_one():
    b = Builder("core")
    x = b.input("x0", f32, "x")
    assert b.op("mul", x, x) is b.op("mul", x, x) and b.const(1, f32) is b.const(1.0, f32)
    assert b.const(0.0, f32) is not b.const(-0.0, f32) and b.const(1, f32) is not b.const(1, torch.int32)
    assert b.convert(x, f32) is x and b.convert(b.const(1.5, f32), torch.int32).value == 1


def test_names_are_unique():
    b = Builder("core")
    x = b.input("x0", f32, "h")
    names = [b.add(op, (x, x), f32, "h").name for op in ("add", "sub", "mul")] + [x.name]
    assert len(set(names)) == 4


@pytest.mark.parametrize(("value", "dtype", "kept"), [(300, torch.uint8, 44), (-1, torch.uint8, 255), (2**31, torch.int32, -(2**31)), (2.7, torch.int64, 2),
                                                      (3, torch.bool, True), (float("inf"), torch.int32, 0)])  # fmt: skip
def test_constants_wrap_to_their_dtype(value, dtype, kept):
    assert Builder("core").const(value, dtype).value == kept


def test_select_drops_the_rest():
    graph = lif_graph().select(["y0"])
    assert list(graph.outputs) == ["y0"] and "mul" not in [n.op for n in graph.nodes]
    assert list(lif_graph().select([]).inputs) == []


def vjp_graph():
    b = Builder("core")
    x, a, c = b.input("x0", f32, "x"), b.input("gy0", f32, "a"), b.input("gy1", f32, "c")
    both = b.op("add", b.op("mul", a, x), b.op("neg", c))
    return b.graph({"gx0": both, "gv0": b.op("sub", b.op("mul", c, x), a), "gp0": b.op("mul", a, a)})


@pytest.mark.parametrize("absent", [["gy0"], ["gy1"], ["gy0", "gy1"], []])
def test_an_absent_cotangent_is_zero(absent):
    graph, x = vjp_graph(), torch.randn(9)
    given = {"x0": x, "gy0": torch.randn(9), "gy1": torch.randn(9)}
    less = graph.for_cotangents(set(given) - set(absent))
    assert not set(absent) & set(less.inputs)
    want = interpret(graph, given | dict.fromkeys(absent, torch.zeros(9)))
    got = interpret(less, {r: given[r] for r in less.inputs})
    for role, value in want.items():
        assert torch.equal(got[role].expand(9), value)
    assert len(less.nodes) < len(graph.nodes) or not absent


@pytest.mark.parametrize(
    "broken",
    [lambda x, n: Node("nonsense", (x,), f32, "y"), lambda x, n: Node("add", (x,), f32, "y"), lambda x, n: Node("add", (x, n), f32, "y"),
     lambda x, n: Node("lt", (x, x), f32, "y"), lambda x, n: Node("where", (x, x, x), f32, "y"), lambda x, n: Node("neg", (Node("neg", (x,), f32, "z"),), f32, "y")],
)  # fmt: skip
def test_verify_refuses(broken):
    x, n = Node("input", (), f32, "x"), Node("input", (), torch.int32, "n")
    node = broken(x, n)
    with pytest.raises(FlexSNError, match="closed op set"):
        verify(Graph("core", {"x0": x, "x1": n}, {"y0": node}, [node]))


def test_shapes_follow_from_the_inputs():
    b = Builder("core")
    x, p = b.input("x0", f32, "x"), b.input("p0", f32, "p")
    double, number = b.op("add", p, p), b.op("exp", b.const(2, f32))
    y = b.op("mul", b.op("add", double, number), x)
    graph = b.graph({"y0": y, "y1": number})
    assert [n.shape for n in (x, p, double, number, y)] == [Shape.NEURON, Shape.PARAM, Shape.PARAM, Shape.NUMBER, Shape.NEURON]
    assert "= add(p, p)" in str(graph) and "float32[param] = add" in str(graph) and "float32[number] = exp" in str(graph)
    assert "float32 = mul" in str(graph)


def test_verify_looks_at_shapes():
    x, p = Node("input", (), f32, "x"), Node("input", (), f32, "p", shape=Shape.PARAM)
    good = Node("add", (x, p), f32, "y")
    verify(Graph("core", {"x0": x, "p0": p}, {"y0": good}, [good]))
    wrong = Node("add", (x, p), f32, "y", shape=Shape.PARAM)
    with pytest.raises(FlexSNError, match="closed op set"):
        verify(Graph("core", {"x0": x, "p0": p}, {"y0": wrong}, [wrong]))
    with pytest.raises(FlexSNError, match="the shape of its role"):
        verify(Graph("core", {"x0": x, "p0": x}, {"y0": good}, [good]))
