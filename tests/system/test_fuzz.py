"""The fuzzer, for a minute: 300 cores in few libraries, some as users get them, some in Triton's interpreter. At length: `make fuzz`."""

import dataclasses
import subprocess
import sys
from collections import Counter

import pytest
import torch
from fuzzing import batch, campaign, generate, oracle
from fuzzing import check as checks
from fuzzing.case import Case, Line, Operand, compile_core
from fuzzing.check import check
from fuzzing.vocabulary import CLOSED, COMPOSITES, Word

import flexsn
from flexsn._capture import decompositions as decompose
from flexsn._capture.signature import make_signature
from flexsn._capture.trace import Meta
from flexsn._codegen import cpp as render_cpp
from flexsn._codegen.cpp_ops import TEXTS
from flexsn._ir.ops import OPS
from flexsn._operator import call as calls
from flexsn._program import cache as caching
from flexsn._program.compiled import program_of
from flexsn.errors import UnsupportedOpError

SEED = 1


def judged(first, last, **options):
    report = campaign.Report()
    for case, verdict in campaign.run([f"{SEED}/{k}" for k in range(first, last)], **options):
        report.add(case, verdict)
    return report


def complaint(report):
    return "\n\n".join(f"{case.label}: {failure}\n{case.source()}" for case, failure in report.failures)


@pytest.mark.parametrize("first", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (100, 200))])
def test_random_cores_give_the_bits_of_eager(first):
    report = judged(first, first + 100)
    assert not report.failures, complaint(report)
    assert report.verdicts["ok"] >= 90, report
    assert len(report.ops) >= 0.9 * len(OPS)


@pytest.mark.slow
def test_random_cores_as_users_get_them():
    """Vector loops and threads, in one library."""
    report = judged(300, 320, flags=batch.AS_USERS_GET_THEM, depth=12)
    assert not report.failures, complaint(report)
    assert report.verdicts["ok"] >= 18, report


def test_random_cores_in_tritons_interpreter():
    report = judged(400, 410, backend="triton", depth=8)
    assert not report.failures, complaint(report)
    assert report.verdicts["ok"] >= 8, report


# --- what counts as no failure ---------------------------------------------------------------------------------------------
def by_hand(text, *operands):
    lines = (Line("t0", text, tuple(o.name for o in operands)),)
    return Case(
        "made by hand", operands[:1], operands[1:], (), lines, ("t0",), tuple(o.name for o in operands[1:]), (True,) * len(operands)
    )


def of_two_dtypes():
    """PyTorch refuses `isclose` of two dtypes, unless they meet in a step without dims."""
    x, v = Operand("x0", torch.ones(3, dtype=torch.float64)), Operand("v0", torch.ones(1, dtype=torch.int16))
    return by_hand("torch.isclose({1}.float() + {0}, {1}.float())", x, v)


def test_what_pytorch_refuses_of_rows_is_refused():
    assert check(of_two_dtypes()).kind == "refused"


@pytest.mark.parametrize("case", [of_two_dtypes(), by_hand("{0} * 2.0", Operand("x0", torch.ones(3, 5)))])
def test_a_refusal_that_pytorch_does_not_share_is_a_failure(case, monkeypatch):
    said = f"runs on its operands as they are, {checks.OF_ROWS} [1]: Subtraction, the `-` operator, with a bool tensor is not supported"

    def refuse(*arguments):
        raise UnsupportedOpError(said, core="core")

    monkeypatch.setattr(checks, "scanned", refuse)
    found = check(case)
    assert found.kind == "error" and "bool tensor" in found.text


def test_an_error_of_the_oracle_alone_is_no_refusal_of_pytorch(monkeypatch):
    x = Operand("x0", torch.arange(3.0).view(1, 3))
    assert campaign.verdict(by_hand("{0}.to(torch.int32) % 0", x), "cpp") == "not run"

    def refuse(*arguments):
        raise RuntimeError("ZeroDivisionError")

    monkeypatch.setattr(oracle.Own, "own", refuse)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        campaign.verdict(by_hand("{0} * 2.0", x), "cpp")


@pytest.mark.parametrize("text", ["torch.fmod({0}, 1e-300)", "torch.remainder({0}, 1e-300)"])
def test_remainders_are_exact_in_the_triton_run_alone(text):
    """As on a GPU. PyTorch's vector code on a CPU has NaN where a / b overflows, and so has C++."""
    case = by_hand(text, Operand("x0", torch.linspace(-1e10, 1e10, 65, dtype=torch.float64)[None]))
    assert check(case, "triton") is None and check(case, "cpp") is None
    assert [case.core()(o).isnan().any() for o in (case.inputs[0].values[:, :64], case.inputs[0].values[:, ::2])] == [True, False]


def test_digamma_left_of_zero_in_the_triton_run():
    """PyTorch is off by half of its digits at a pole; Triton's kernel is not."""
    case = by_hand("torch.digamma({0})", Operand("x0", torch.tensor([[-0.9998840462896686]], dtype=torch.float64)))
    assert check(case, "triton") is None


# --- the generator leaves nothing out -------------------------------------------------------------------------------------
def lowered(word: Word, dtype: torch.dtype):
    """The closed ops of one line."""
    names = [f"x{k}" for k in range(word.arity)]
    text = word.text.format(*names, dtype="torch.int32")
    core = compile_core(f"def core({', '.join(names)}):\n    return {text}\n")
    first = torch.bool if word.name in ("where", "not") else dtype
    metas = [Meta((5,), first), *[Meta((5,), dtype)] * (word.arity - 1)]
    return {n.op for n in program_of("cpp", core, make_signature(core, word.arity, 0, 0), metas, torch.device("cpu"), {}).graph.nodes}


@pytest.mark.parametrize("name", OPS)
def test_every_closed_op_has_a_word_that_becomes_it(name):
    word = CLOSED[name]
    dtype = torch.int32 if word.kinds == "i" or name in ("and", "or", "xor", "invert") else torch.float32
    assert name in lowered(word, dtype)


def test_the_generator_draws_every_word_dtype_and_boundary():
    cases = [generate.generate(f"{SEED}/{k}") for k in range(1500)]
    ops = Counter(line.op for case in cases for line in case.lines)
    assert set(OPS) <= set(ops)
    texts = {line.text for case in cases for line in case.lines}
    assert {w.text for w in COMPOSITES.values()} <= texts
    assert {o.values.dtype for c in cases for o in c.operands if o.values is not None} == set(flexsn._capture.signature.DTYPES)
    assert {c.T for c in cases} == set(generate.T_VALUES)
    assert {o.layout for c in cases for o in c.operands} == {"plain", "transposed", "every other", "shifted", "expanded"}
    assert max(len(c.lines) for c in cases) >= 24
    assert all(len(part) == n for part, n in (({len(c.inputs) for c in cases}, 4), ({len(c.states) for c in cases}, 5)))


def test_a_label_says_everything():
    first, second = generate.generate("7/3"), generate.generate("7/3")
    assert first.source() == second.source() and first.label == "7/3"
    pairs = list(zip(first.operands, second.operands, strict=True))
    assert len(pairs) >= 3 and all((o.values is None) == (p.values is None) for o, p in pairs)
    given = [(o.tensor(), p.tensor()) for o, p in pairs if o.values is not None]
    assert len(given) >= 2
    for a, b in given:
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert a.stride() == b.stride()


# --- the fuzzer finds faults ------------------------------------------------------------------------------------------------
def small_case(text, op=None, dtype=torch.float32, values=None):
    x = Operand("x0", torch.randn(17, 65, dtype=dtype) if values is None else values, grad=dtype.is_floating_point)
    v = Operand("v0", torch.randn(65, dtype=dtype), grad=dtype.is_floating_point)
    lines = (Line("t0", "{0} * 0.5 + {1}", ("v0", "x0")), Line("t1", text, ("t0",), op), Line("t2", "{0} - {1}", ("t1", "x0")))
    return Case("made by hand", (x,), (v,), (), lines, ("t2",), ("t1",), (True, True))


def fault_in_an_op(monkeypatch):
    monkeypatch.setitem(TEXTS, "floor", "flexsn::trunc({0})")
    return small_case("{0}.floor()"), "forward"


def fault_in_a_function(monkeypatch):
    monkeypatch.setitem(TEXTS, "tanh", "flexsn::tanh({0}) * {T}(1.000002)")
    oracle._singles.cache_clear()
    oracle._single.cache_clear()
    return small_case("{0}.tanh()"), "op"


def fault_at_a_checkpoint(monkeypatch):
    plain = render_cpp.render
    from flexsn._runtime.backends import BACKENDS

    def render(plan):
        """Every block of steps starts from the first checkpoint."""
        text = plain(plan)
        assert plan.direction == "forward" or "start / K, K, begin" in text
        return text.replace("start / K, K, begin", "start / K > 0, K, begin")

    monkeypatch.setitem(BACKENDS, "cpp", dataclasses.replace(BACKENDS["cpp"], render=render))
    case = small_case("{0}.tanh()")
    return case.change(inputs=(Operand("x0", torch.randn(49, 65), grad=True),)), "gradient"


def fault_in_a_derivative(monkeypatch):
    tanh = torch.ops.aten.tanh_backward.default
    rule = decompose._OWN[tanh]
    monkeypatch.setitem(decompose._OWN, tanh, lambda grad, y: rule(grad, y) * 1.0001)
    decompose.decomposition.cache_clear()
    return small_case("{0}.tanh()"), "gradient"


def fault_in_strides(monkeypatch):
    monkeypatch.setattr(calls, "as_rows", lambda tensor, step, leading, order: tensor.expand(*tensor.shape[:leading], *step))
    case = small_case("{0}.relu()")
    return case.change(inputs=(Operand("x0", torch.randn(17, 65), "every other", grad=True),)), "forward"


FAULTS = [
    fault_in_an_op,
    fault_in_a_function,
    fault_at_a_checkpoint,
    fault_in_a_derivative,
    fault_in_strides,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__.replace("_", " "))
def test_a_fault_is_found(fault, monkeypatch):
    monkeypatch.setattr(caching, "PROGRAMS", caching.Programs())  # the same core without the fault, or with another
    case, kind = fault(monkeypatch)
    campaign.build([case], batch.FAST_BUILD)
    found = check(case)
    for cached in (oracle._singles, oracle._single, decompose.decomposition):
        cached.cache_clear()
    assert found is not None and found.kind == kind, found


@pytest.mark.full
def test_a_failure_shrinks_to_a_program_that_shows_it(monkeypatch, tmp_path):
    """A fault in one op, in a long core with many operands: one line is left, and the program runs."""
    monkeypatch.setitem(TEXTS, "floor", "flexsn::trunc({0})")
    labels = (f"{SEED}/{k}" for k in range(1000))
    case = next(c for c in map(generate.generate, labels) if "floor" in {line.op for line in c.lines} and len(c.lines) > 8 and faulty(c))
    small = campaign.smallest(case, check(case), seconds=600)
    assert len(small.lines) <= 4 and small.T <= 2 and len(small.operands) <= 2
    assert sum(o.values.numel() for o in small.operands if o.values is not None) <= 8
    script = tmp_path / "small.py"
    script.write_text(small.script("cpp"))
    said = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "torch\n" in said.stdout and "cpp\n" in said.stdout and "floor" in script.read_text()


def faulty(case):
    campaign.build([case], batch.FAST_BUILD)
    failure = check(case)
    return failure is not None and failure.kind == "forward"
