"""A program as text: it reads back as it was written, means the same in every process, and broken ones are refused."""

import json
import os
import subprocess
import sys

import folders
import pytest
import torch
from cores import adlif, leaky, lif, plif, relu_mem

from flexsn._capture.signature import make_signature
from flexsn._capture.trace import Meta
from flexsn._program import serialize as text
from flexsn._program.captured import draw
from flexsn._program.compiled import Program
from flexsn.errors import FlexSNError, ProgramTextError

CPU = torch.device("cpu")
f32, i64 = torch.float32, torch.int64


def lookup(x, v):
    """Literal tensors, infinities, every dtype, and an epilogue."""
    table = torch.tensor([0.1, -0.0, float("inf"), 1e-45])
    v = torch.where(v > float("-inf"), v * 0.5, float("nan")) + x * table
    return (v > 0) & torch.tensor([True, False, True, True]), v.double(), (v * 3).to(torch.int64), v


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.rand(4, 4))
        self.register_buffer("scale", torch.arange(4.0))

    def forward(self, x, v):
        v = v * torch.softmax(self.w, 0).sum(1) + x * self.scale
        return v * v, v


def blueprint(core, counts, metas, vjp=True):
    captured = dict(core.named_parameters()) | dict(core.named_buffers()) if isinstance(core, torch.nn.Module) else {}
    drawn = draw(core, make_signature(core, *counts), [None if m is None else Meta(*m) for m in metas], CPU, captured)
    if vjp:
        drawn.differentiate(core, captured, CPU)
    return drawn


STEP = ((3, 4), f32)
CASES = {
    "leaky": lambda: blueprint(leaky, (1, 1, 1), [STEP, STEP, ((4,), f32)]),
    "lif": lambda: blueprint(lif, (1, 1, 2), [STEP, None, ((), f32), ((), f32)]),
    "plif": lambda: blueprint(plif, (1, 1, 1), [STEP, STEP, ((3, 1), f32)]),
    "half": lambda: blueprint(plif, (1, 1, 1), [((3, 4), torch.float16), None, ((3, 1), torch.float16)]),
    "adlif": lambda: blueprint(adlif, (2, 2, 2), [STEP, STEP, None, None, ((), f32), ((4,), f32)]),
    "relu_mem": lambda: blueprint(relu_mem, (1, 1, 0), [((3, 4), torch.float64), None]),
    "lookup": lambda: blueprint(lookup, (1, 1, 0), [STEP, None]),
    "module": lambda: blueprint(Scaled(), (1, 1, 0), [STEP, None]),
    "integers": lambda: blueprint(lambda k, n: (k // 3 + n, n + k), (1, 1, 0), [((5,), i64), None]),
}
cases = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


@cases
def test_round_trip(make):
    drawn = make()
    for vjp in (False, True):
        written = text.write(drawn, vjp=vjp)
        again = text.read(written, CPU)
        assert text.write(again, vjp=vjp) == written and (again.vjp is not None) == vjp
        assert (again.sig, again.metas, again.outputs, again.step, again.free_dims, again.captured(vjp=vjp)) == (
            drawn.sig, drawn.metas, drawn.outputs, drawn.step, drawn.free_dims, drawn.captured(vjp=vjp)
        )  # fmt: skip


@cases
def test_a_text_gives_the_same_kernels(make):
    drawn = make()
    again = text.read(text.write(drawn, vjp=True), CPU)
    for backend in ("cpp", "triton"):
        first, second = Program(backend, drawn, CPU), Program(backend, again, CPU)
        dtypes = tuple(m.dtype for m in drawn.metas[: drawn.sig.num_inputs])
        wanted = tuple(r for r in first.vjp.graph.outputs if r[:2] in ("gx", "gp"))
        given = tuple(f"gy{k}" for k, ok in enumerate(first.vjp.differentiable[: first.num_outputs]) if ok)
        flags = [("forward", dtypes, True, True), ("forward", dtypes, False, False)]
        flags += [("backward", dtypes, wanted, given)] if wanted else []
        for each in flags:
            (own,), (other,) = first.plan_of(*each).kernels, second.plan_of(*each).kernels
            assert first.backend.render(own) == second.backend.render(other)


def test_prologues_and_epilogues_compute_the_same():
    core, drawn = Scaled(), CASES["module"]()
    first, second = Program("cpp", drawn, CPU), Program("cpp", text.read(text.write(drawn, vjp=True), CPU), CPU)
    statics = {n: t.detach() for n, t in (*core.named_parameters(), *core.named_buffers())}
    (want,), (got,) = ([t for t in p.prologue(statics).values() if t.shape == (4,) and t.sum() != 6.0] for p in (first, second))
    assert torch.equal(got, want)
    sums = [torch.randn(first.vjp.sum_shape(r)) for r in first.vjp.epilogue((True, False))[1]]
    (want,), (got,) = (p.vjp.epilogue((True, False))[0](statics, sums).values() for p in (first, second))
    assert torch.equal(got, want) and got.shape == (4, 4)


def test_the_text_names_no_device_and_no_object():
    for make in CASES.values():
        written = text.write(make(), vjp=True)
        assert '"cpu"' not in written and " at 0x" not in written


@pytest.mark.slow
def test_two_processes_write_the_same():
    code = "import test_text\nfor make in test_text.CASES.values(): print(test_text.text.write(make(), vjp=True))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": folders.PATH}, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [text.write(make(), vjp=True) for make in CASES.values()], done.stderr


# --- texts that nobody wrote ----------------------------------------------------------------------------------------------------------
def changed(**entries):
    return json.dumps(json.loads(text.write(CASES["lif"](), vjp=True)) | entries)


BROKEN = {
    "nothing": lambda: "",
    "no JSON": lambda: "flexsn",
    "another JSON": lambda: "[1, 2]",
    "no version": lambda: "{}",
    "cut off": lambda: changed()[:-40],
    "no graph": lambda: changed(forward=None),
    "an empty graph": lambda: changed(forward={}),
    "no counts": lambda: changed(counts=[1]),
    "an unknown dtype": lambda: changed(metas=[[[4], "float33"]]),
    "no dtype": lambda: changed(metas=[[[4], "nn"]]),
    "a step that is no list": lambda: changed(step=4),
}


@pytest.mark.parametrize("make", BROKEN.values(), ids=BROKEN)
def test_broken_texts(make):
    with pytest.raises(ProgramTextError):
        text.read(make(), CPU)


def test_another_version():
    with pytest.raises(ProgramTextError, match=f"version 99; this flexsn reads version {text.FORMAT}"):
        text.read(changed(format=99), CPU)


@pytest.mark.parametrize("op", ["aten.nothing.default", "nobody.add.Tensor", "aten.add.Nobody", "aten", "os.system.default", "aten.add"])
def test_unknown_operators(op):
    written = text.write(CASES["lif"](), vjp=True)
    assert "aten.sum.default" in written
    with pytest.raises(ProgramTextError):
        text.read(written.replace("aten.sum.default", op), CPU)


@pytest.mark.parametrize("op", ["aten.add.Tensor", "nothing", "input", "const", "convert", "where", ""])
def test_ops_outside_the_closed_set(op):
    """Or in it, but with other arguments."""
    data = json.loads(text.write(CASES["lif"](), vjp=False))
    data["forward"]["graph"]["nodes"][0][1] = op
    with pytest.raises(ProgramTextError):
        text.read(json.dumps(data), CPU)


def test_reading_lowers_nothing(monkeypatch):
    """A program is made of its text without the rules of any ATen op."""
    from flexsn._ir import lowering

    written = text.write(CASES["adlif"](), vjp=True)
    monkeypatch.setattr(lowering, "RULES", {})
    program = Program("cpp", text.read(written, CPU), CPU)
    assert program.vjp.graph.nodes and program.forward_plan((f32, f32), True, False).writes


def test_a_broken_text_in_a_graph_says_so():
    with pytest.raises(ProgramTextError):
        torch.ops.flexsn.scan("flexsn", [torch.ones(3, 4)], [None], [], False)
    with pytest.raises(FlexSNError):
        torch.ops.flexsn.forward("{}", [torch.ones(3, 4)], [None], [], [4], 0, False, False)


def leaves(data, path=()):
    """Every place of a JSON value."""
    yield path
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from leaves(value, (*path, key))


@pytest.mark.parametrize("wrong", [None, -7, "wrong", [], {"node": "wrong"}], ids=str)
def test_wherever_a_text_is_damaged(wrong):
    """It is refused, or (a name, a line) reads as well as before: no other error gets out."""
    whole, refused = json.loads(text.write(CASES["lookup"](), vjp=True)), 0
    places = [p for p in leaves(whole) if p][:: 1 if wrong is None else 7]
    for *path, last in places:
        data = json.loads(json.dumps(whole))
        holder = data
        for key in path:
            holder = holder[key]
        holder[last] = wrong
        try:
            text.read(json.dumps(data), CPU)
        except ProgramTextError:
            refused += 1
    assert refused > len(places) // 4
