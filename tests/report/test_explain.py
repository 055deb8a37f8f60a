"""`flexsn.explain`: what the report says is what the engine does, by hand counts, and its page stands alone."""

import json
import re
import shutil
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import cores
import pytest
import torch
from helpers import line_of
from torch import nn

import flexsn
from flexsn._report import measure
from flexsn._report.measure import beside_copies, copy_of, disturbance, least_seconds
from flexsn._report.subject import subject_of
from flexsn._report.svg import draw
from flexsn._report.vectors import read_assembly, vector_facts
from flexsn._report.words import seconds, short, total

T, SHAPE, N = 40, (2, 24), 48


def lif(x, v):
    h = v + (x - v) / 2.0
    s = flexsn.surrogate.atan(h - 1.0)
    return s, h * (1.0 - s)


class Adaptive(nn.Module):
    def __init__(self, channels=24):
        super().__init__()
        self.w_mem = nn.Parameter(torch.zeros(channels))
        self.w_adapt = nn.Parameter(torch.full((channels,), 2.0))

    def forward(self, x, v, a):
        decay = torch.sigmoid(self.w_mem)
        h = decay * v + (1.0 - decay) * x
        s = flexsn.surrogate.atan(h - (1.0 + a))
        a = torch.sigmoid(self.w_adapt) * a + 0.2 * s
        return s, h * (1.0 - s), a


WEIGHTS = torch.eye(3, device="cpu")


def mixes(x, v):
    h = v + x
    s = flexsn.surrogate.atan(h - h.mean())
    return s, h


def recurrent(x, v, s):
    h = 0.5 * v + x + s @ WEIGHTS
    s = flexsn.surrogate.atan(h - 1.0)
    return s, h, s


def branches(x, v):
    if v.max() > 1.0:
        v = v - 1.0
    return x + v, v


def draws(x, v):
    v = v + torch.randn_like(x)
    return v, v


def sequence(*shape, dtype=torch.float32):
    return torch.rand(T, *(shape or SHAPE)).to(dtype)


@pytest.fixture(scope="module")
def report():
    return flexsn.explain(lif, torch.rand(T, *SHAPE), measure=False)


@pytest.fixture(scope="module")
def adaptive():
    return flexsn.explain(flexsn.FlexSN(Adaptive(), num_states=2), torch.rand(T, *SHAPE), measure=False)


def parsed(page):
    assert page.startswith("<!DOCTYPE html>")
    return ET.fromstring(page)


def all_text(element):
    return "".join(element.itertext())


# --- numbers, counted by hand ----------------------------------------------------------------------------------------------------
# bytes: of sequences, 4 or 2 each; a float32 checkpoint of every state each 16 steps. Operations: of the core's source.
BY_HAND = {
    "lif": (cores.lif, 1, 1, torch.float32, (4, 4), (4, 4 + 4 / 16), (8 + 4 / 16, 4), 8),
    "lif, 16 bit": (cores.lif, 1, 1, torch.float16, (2, 2), (2, 2 + 4 / 16), (4 + 4 / 16, 2), 8),
    "adaptive lif": (cores.adlif, 2, 2, torch.float32, (8, 8), (8, 8 + 8 / 16), (16 + 8 / 16, 8), 16),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_bytes_and_operations_by_hand(case):
    core, inputs, states, dtype, infer, forward, backward, operations = BY_HAND[case]
    params = [torch.tensor(p) for p in ((2.0, 1.0) if states == 1 else (0.9, 0.95))]
    x = [sequence(dtype=dtype) for _ in range(inputs)]
    passes = flexsn.explain(core, *x, states=(None,) * states, params=params, measure=False).passes
    assert list(passes) == ["inference", "forward", "backward"]
    for name, (read, written) in zip(passes, (infer, forward, backward), strict=True):
        assert (passes[name].bytes_read, passes[name].bytes_written) == (read, written), name
        assert passes[name].bytes_per_neuron_step == read + written
    assert passes["inference"].operations_per_neuron_step == passes["forward"].operations_per_neuron_step == operations
    assert passes["forward"].recomputed == 0 < passes["backward"].recomputed <= operations


def test_operations_by_name(report):
    assert report.passes["inference"].operations == {"sub": 3, "div": 1, "add": 1, "ge": 1, "convert": 1, "mul": 1}


def test_bytes_of_the_call(report):
    rows = 4 * N  # a state, before and after
    assert report.passes["inference"].bytes_moved == 2 * T * 4 * N + 2 * rows
    assert report.passes["forward"].bytes_moved == 2 * T * 4 * N + 2 * rows + 2 * rows  # checkpoints at steps 16 and 32
    assert report.passes["forward"].chunk == 16 and "chunks of 16 steps" in report.passes["forward"].plan


# --- what it says --------------------------------------------------------------------------------------------------------------------
def test_the_users_lines(report):
    for op in report.captured:
        assert op.kind == "step" and op.line is not None
    assert [op.line for op in report.captured if op.text.startswith("aten.div")] == [line_of(lif, "h = v +")]
    assert report.where == f"{__file__}:{lif.__code__.co_firstlineno}"
    assert [row.text.strip() for row in report.source] == [t.strip() for t in inspect_lines(lif)]
    assert [row.kinds for row in report.source] == [(), ("step",), ("step",), ("step",)]
    for shown in (str(report), all_text(parsed(report.html()))):
        assert "s = flexsn.surrogate.atan(h - 1.0)" in shown and "aten.div.Tensor(sub_tensor, 2.0)" in shown


def inspect_lines(function):
    import inspect

    return inspect.getsource(function).splitlines()


def test_text_has_each_op_below_its_line(report):
    lines = str(report).splitlines()
    at = next(i for i, text in enumerate(lines) if "h = v + (x - v) / 2.0" in text)
    assert [re.sub(r"\s*\. \w+ = ", "", text).split("(")[0] for text in lines[at + 1 : at + 4]] == [
        "aten.sub.Tensor", "aten.div.Tensor", "aten.add.Tensor",
    ]  # fmt: skip


def test_hoisted(adaptive):
    assert [op.text for op in adaptive.prologue] == [
        "aten.sigmoid.default(w_mem)", "aten.rsub.Scalar(sigmoid_default, 1.0)", "aten.sigmoid.default(w_adapt)",
    ]  # fmt: skip
    assert adaptive.prologue[0].line == line_of(Adaptive.forward, "decay = torch.sigmoid")
    sums = [op for op in adaptive.epilogue if "sum_over_T" in op.text]
    assert len(sums) == 3 and all(op.kind == "reduced" for op in adaptive.epilogue)
    kinds = {row.text.strip().split(" ")[0]: set(row.kinds) for row in adaptive.source}
    assert kinds["decay"] == {"static"} and kinds["h"] == {"static", "step"} and kinds["s"] == {"step"}
    assert "aten.sigmoid.default(w_mem)" in str(adaptive)


def test_nothing_hoisted(report):
    assert report.prologue == [] and report.epilogue == []
    assert "prologue: nothing" in str(report)


def test_operands_and_sizes(adaptive):
    told = [(o.kind, o.name, o.shape) for o in adaptive.operands]
    assert told == [
        ("input", "x", SHAPE), ("state", "v", SHAPE), ("state", "a", SHAPE), ("captured", "w_mem", (24,)), ("captured", "w_adapt", (24,)),
        ("output", "output 0", SHAPE),
    ]  # fmt: skip
    assert (adaptive.T, adaptive.step_shape, adaptive.neurons, adaptive.device) == (T, SHAPE, N, "cpu")


def test_sources_are_those_of_the_kernels(report):
    assert "// lif: forward" in report.passes["forward"].source and "// lif: backward" in report.passes["backward"].source
    assert all(p.language == "cpp" for p in report.passes.values())
    launch = report.passes["forward"].launch
    assert launch["tile"] == 64 and launch["threads"] == 1 and launch["streamed"] is False  # 48 neurons, in vectors of 64
    assert report.vjp is not None and "gx0=" in report.vjp and report.graph is not None and "y0=s" in report.graph


def test_dependencies(report, adaptive):
    assert set(report.drawing.edges) == {
        ("x0", "n:h"), ("v0", "n:h"), ("n:h", "n:s"), ("n:s", "out:y0"), ("n:h", "out:v0"), ("n:s", "out:v0"),
    }  # fmt: skip
    labels = {label for label, _ in adaptive.drawing.boxes.values()}
    assert {"x", "v", "a", "h", "s", "output", "sigmoid(w_mem)", "rsub(sigmoid(w_mem), 1.0)", "sigmoid(w_adapt)"} == labels
    assert "s <- h" in str(report)


def test_dependencies_in_the_users_names():
    def core(i, n):
        N = n + i  # neither name may stand in generated code as it is
        return N * 2, N

    made = flexsn.explain(core, sequence(dtype=torch.int32), measure=False)
    assert list(made.drawing.boxes.values()) == [("i", "input"), ("n", "state"), ("N", "value"), ("output", "output"), ("n", "next")]


# --- which backend -------------------------------------------------------------------------------------------------------------------
def test_why_this_backend(report):
    assert report.fused and report.choice.name == "cpp" and "cpu" in report.choice.why
    asked = flexsn.explain(lif, sequence(), backend="cpp", measure=False)
    assert asked.choice.name == "cpp" and 'backend="cpp" was asked for' in asked.choice.why
    eager = flexsn.explain(lif, sequence(), backend="torch", measure=False)
    assert not eager.fused and eager.choice.name == "torch" and eager.problem is None and eager.passes.keys() == report.passes.keys()


def test_triton_interpreted():
    made = flexsn.explain(lif, sequence(), backend="triton", measure=False)
    assert made.choice.name == "triton" and made.passes["forward"].language == "python"
    assert "tl.load" in made.passes["forward"].source and "interpreter" in made.passes["forward"].launch["note"]


def test_without_a_compiler(monkeypatch):
    def only_here(x, v):
        v = 0.25 * v + x
        return v * 3.0, v

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    made = flexsn.explain(only_here, sequence())
    assert not made.fused and made.problem.error == "BackendUnavailableError" and "g++" in made.problem.hint
    assert made.passes == {} and made.captured and made.drawing is not None  # what needs no kernel is there
    assert "apt install g++" in str(made)


@pytest.mark.parametrize(
    ("core", "error", "op", "text", "instead"),
    [
        (mixes, "NotElementwiseError", "mean", "h.mean()", "do this outside the core"),
        (branches, "ControlFlowError", None, "if v.max()", "torch.where"),
        (draws, "RandomOpError", "randn_like", "torch.randn_like(x)", "input"),
    ],
)
def test_a_core_that_cannot_fuse(core, error, op, text, instead):
    made = flexsn.explain(core, sequence(dtype=torch.bfloat16))  # in other dtypes, what mixes runs in pieces
    assert not made.fused and made.choice.name == "torch" and made.passes == {} and made.drawing is None
    assert made.problem.error == error and instead in made.problem.hint
    assert op is None or op in made.problem.op
    assert made.problem.line == line_of(core, text)
    assert [row.kinds for row in made.source if text in row.text] == [("problem",)]
    for shown in (str(made), all_text(parsed(made.html()))):
        assert text in shown and made.problem.hint in shown


def test_what_takes_turns_with_a_kernel_is_told():
    made = flexsn.explain(recurrent, torch.rand(T, 2, 3))
    assert made.fused and made.problem is None and [o.name for o in made.operands] == ["mixed_0", "x", "v", "s", "WEIGHTS", "output 0"]
    assert "`matmul` runs at every step" in made.choice.why and "h = 0.5 * v + x + s @ WEIGHTS" in str(made)
    assert parsed(made.html()) is not None and made.to_dict()["fused"]
    made = flexsn.explain(mixes, sequence(), measure=False)  # of what the core computes, once
    assert made.fused and made.problem is None and "`mean` runs once, on the whole sequence" in made.choice.why
    assert made.pieces[1].lines == (line_of(mixes, "h.mean()"),) and made.pieces[0].text.startswith("A kernel over the whole sequence")


def test_an_op_without_a_rule_has_a_hint():
    made = flexsn.explain(lambda x, v: (torch.special.bessel_j0(x), v), sequence(), measure=False)
    assert made.problem.error == "UnsupportedOpError" and made.problem.op == "special_bessel_j0"
    assert "docs/ops.md" in made.problem.hint and "docs/add_an_op.md" in made.problem.hint and made.problem.hint in str(made)


def test_a_model_without_neurons():
    x = torch.rand(5, 4)
    made = flexsn.explain(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), x, measure=False)
    assert not made.fused and made.problem.message.startswith("holds no `FlexSN`; as a core: ") and made.problem.op != "FlexSN"
    assert made.problem.message in str(made)
    with pytest.raises(flexsn.errors.CoreError, match="holds no `FlexSN`; as a core: "):
        flexsn.explain(nn.Linear(3, 4), x, measure=False)
    assert flexsn.explain(nn.ReLU(), x, measure=False).fused  # a core indeed
    inside = flexsn.explain(flexsn.FlexSN(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), num_states=0), x, measure=False)
    assert not inside.fused and "holds no" not in inside.problem.message


# --- what may be given ---------------------------------------------------------------------------------------------------------------
def test_integers_have_no_backward():
    made = flexsn.explain(lambda x, v: (x + v, v + x), sequence(dtype=torch.int32), measure=False)
    assert list(made.passes) == ["inference"] and made.vjp is None and made.fused


def test_single_step_module():
    neuron = flexsn.FlexSN(lif, num_states=1, step_mode="s")
    assert flexsn.explain(neuron, torch.rand(*SHAPE), measure=False).T == 1


def test_states_start_where_a_module_starts_them():
    """At `initial_states`, or at rest: they say of which shape a step is, and of which dtype its states are."""
    given = flexsn.FlexSN(lif, num_states=1, initial_states=lambda x: [x.new_full((4, 1), 0.5, dtype=torch.float64)])
    made = flexsn.explain(given, torch.rand(T, 3), measure=False)
    (state,) = [o for o in made.operands if o.kind == "state"]
    assert made.step_shape == (4, 3) and state.dtype == "float64"
    single = flexsn.FlexSN(lif, num_states=1, step_mode="s", initial_states=lambda x: [x.new_zeros(4, 1)])
    assert flexsn.explain(single, torch.rand(3), measure=False).step_shape == (4, 3)


def test_a_neuron_of_the_zoo_starts_at_rest():
    neuron = flexsn.Izhikevich()
    subject = subject_of(neuron, [torch.rand(T, 3)], None, (), None)
    assert [v.unique().tolist() for v in subject.states] == [[-65.0], [-13.0]]
    assert flexsn.explain(neuron, torch.rand(T, 3), measure=False).fused


def test_requires_grad_flags_are_kept():
    neuron = flexsn.FlexSN(Adaptive(), num_states=2, requires_grad=(False, False, False))
    writes = flexsn.explain(neuron, sequence(), measure=False).passes["backward"].plan.split("writes")[1]
    assert "gp0" in writes and "gx0" not in writes


def test_nothing_of_the_module_changes():
    neuron = flexsn.FlexSN(Adaptive(), num_states=2)
    neuron(sequence())
    before, carried = [v.clone() for v in neuron.states], neuron.states
    x = sequence().requires_grad_()
    flexsn.explain(neuron, x)
    assert neuron.states is carried and all(map(torch.equal, neuron.states, before))
    assert x.grad is None and all(p.grad is None for p in neuron.parameters())


def test_network():
    bad = flexsn.FlexSN(lambda x, v: (x - torch.rand_like(v), v), num_states=1)
    norm = nn.BatchNorm1d(24)
    net = nn.Sequential(nn.Linear(8, 24), flexsn.FlexSN(Adaptive(), num_states=2), nn.Flatten(0, 1), norm, nn.Unflatten(0, (T, 2)), bad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = flexsn.explain(net, torch.rand(T, 2, 8), measure=False)
    assert list(made.layers) == ["1", "5"] and not made.fused
    assert made.layers["1"].fused and made.layers["5"].problem.op == "rand_like"
    assert norm.num_batches_tracked == 0 and net[1].states is None
    assert repr(made) == "<NetworkReport: 1: Adaptive fused by cpp; 5: <lambda> not fused>"
    page = parsed(made.html())
    assert len(page.findall(".//article")) == 2 and json.loads(json.dumps(made.to_dict()))["layers"]["1"]["fused"]
    with pytest.warns(flexsn.errors.FallbackWarning):  # a real call still says it
        net(torch.rand(T, 2, 8))


def test_modes_around_the_call():
    with torch.inference_mode(), torch.autocast("cpu"):
        made = flexsn.explain(lif, sequence())
    assert list(made.passes) == ["inference", "forward", "backward"] and made.operands[-1].dtype == "float32"
    assert made.passes["backward"].measured_s > 0


def test_operands_that_do_not_fit():
    errors = flexsn.errors
    with pytest.raises(errors.OperandCountError, match="example of every input"):
        flexsn.explain(lif)
    with pytest.raises(errors.OperandTypeError, match="input 0 must be a tensor"):
        flexsn.explain(lif, (T, 8))
    with pytest.raises(errors.OperandTypeError, match="a core is a callable"):
        flexsn.explain(3, sequence())
    with pytest.raises(errors.OperandCountError, match="takes `\\*args`"):
        flexsn.explain(lambda *a: a, sequence())
    with pytest.raises(errors.OperandCountError, match="needs 1 inputs but was given 2"):
        flexsn.explain(flexsn.FlexSN(lif, num_states=1), sequence(), sequence())
    with pytest.raises(errors.OperandCountError, match="its own params"):
        flexsn.explain(flexsn.FlexSN(lif, num_states=1), sequence(), params=(torch.ones(()),))
    with pytest.raises(errors.SequenceLengthError):
        flexsn.explain(cores.adlif, sequence(), sequence()[:3], states=(None, None), params=(torch.ones(()),) * 2)
    with pytest.raises(errors.OperandTypeError, match="input 0 has no values"):
        flexsn.explain(lif, sequence().to("meta"))
    for target, wrong in ((lif, 1), (lif, torch.zeros(SHAPE)), (flexsn.FlexSN(lif, num_states=1), 1)):
        with pytest.raises(errors.OperandTypeError, match="`states` must be a tuple or list of tensors, or None for zeros, not"):
            flexsn.explain(target, sequence(), states=wrong)
    with pytest.raises(errors.OperandTypeError, match="`params` must be a tuple or list of tensors, not int"):
        flexsn.explain(lif, sequence(), params=2)
    with pytest.raises(errors.BackendError, match="unknown backend 'cuda'"):
        flexsn.explain(lif, sequence(), backend="cuda")


# --- measured ------------------------------------------------------------------------------------------------------------------------
def test_measured():
    made = flexsn.explain(lif, sequence())
    for p in made.passes.values():
        assert 0 < p.measured_s < 10 and 0 < p.bound_s < 10
        assert p.copy_rate == pytest.approx(p.bytes_moved / p.bound_s)
    assert 0 <= made.others_busy <= 1
    assert "copy rate of this machine" in str(made) and "GB/s" in made.html()


def test_not_measured(report):
    assert all(p.measured_s is None and p.bound_s is None and p.copy_rate is None for p in report.passes.values())
    assert "not measured" in str(report) and "Nothing was measured" in report.html()


def test_an_empty_call_is_not_timed():
    assert flexsn.explain(lif, torch.rand(0, 8)).passes["forward"].measured_s is None


def test_shortest_of_several():
    import time

    naps = iter([0.03, 0.02, 0.004, 0.02, 0.02, *[0.02] * 100])
    assert 0.004 <= least_seconds(lambda: time.sleep(next(naps)), torch.device("cpu")) < 0.015
    assert disturbance(0.5).startswith("Other processes used 50%") and disturbance(0.01) == disturbance(None) == ""


class Clock:
    """Time that passes only while what is timed runs, and stands still but for that."""

    def __init__(self, monkeypatch):
        self.now, self.sizes = 0.0, []
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(measure, "copy_of", self.copy_of)

    def call(self, *seconds):
        """Takes these seconds in turn, and the last of them from then on."""
        left = list(seconds)

        def run():
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run

    def copy_of(self, nbytes, device):
        self.sizes.append(nbytes)
        return measure.Copy(self.call(0.008, 0.008, 0.008, 0.008, nbytes * 1e-6), 1.0)  # slow at first


def test_a_copy_is_timed_beside_the_calls_and_once_per_size(monkeypatch):
    clock = Clock(monkeypatch)
    calls = {"inference": clock.call(0.002), "forward": clock.call(0.5, 0.1, 0.003), "backward": clock.call(0.004)}
    found = beside_copies(calls, {"inference": 1000, "forward": 1000, "backward": 2000}, torch.device("cpu"))
    assert clock.sizes == [1000, 2000]
    assert {k: v for k, (v, _) in found.items()} == pytest.approx({"inference": 0.002, "forward": 0.003, "backward": 0.004})
    assert {k: v for k, (_, v) in found.items()} == pytest.approx({"inference": 0.001, "forward": 0.001, "backward": 0.002})


def test_a_busy_while_falls_on_calls_and_copies_alike(monkeypatch):
    """As long as `least_seconds` of one call takes, everything is a hundred times slower."""
    clock, cpu = Clock(monkeypatch), torch.device("cpu")

    def run():
        clock.now += 0.1 if clock.now < 0.3 else 0.001

    monkeypatch.setattr(measure, "copy_of", lambda nbytes, device: measure.Copy(run, 1.0))
    assert beside_copies({"a": run}, {"a": 1000}, cpu)["a"] == pytest.approx((0.001, 0.001))
    clock.now = 0.0
    assert least_seconds(run, cpu) == pytest.approx(0.001)


def test_a_large_copy_is_part_of_it(monkeypatch):
    monkeypatch.setattr(measure, "_LARGEST", 1000)
    copies = {n: copy_of(n, torch.device("cpu")) for n in (100, 2000, 10_000)}
    assert [copy.call().numel() for copy in copies.values()] == [50, 1000, 1000]
    assert [copy.times for copy in copies.values()] == [1.0, 1.0, 5.0]


def test_words():
    assert [seconds(s) for s in (None, 2.0, 0.0123, 4.5e-6, 3e-9)] == ["-", "2 s", "12.3 ms", "4.5 us", "3 ns"]
    assert [total(n) for n in (12, 4.2e3, 4.2e6, 1.5e9)] == ["12 B", "4.2 kB", "4.2 MB", "1.5 GB"]
    assert short("/a/b c/x.py:12: y = 1: 2") == "x.py:12" and short(None) == ""


# --- vectors -------------------------------------------------------------------------------------------------------------------------
def test_assembly():
    wide = "  1: vaddps %zmm1,%zmm2,%zmm3\n  2: vmovups %ymm9,(%rax)\n"
    assert read_assembly(wide) == {"vector_bits": 512, "vector_registers": 3}
    assert read_assembly("  1: vmovups %zmm1,(%rax)\n 2: mulps %xmm0,%xmm1\n")["vector_bits"] == 128
    assert read_assembly("  1: addss %xmm0,%xmm1\n")["vector_bits"] == 0
    assert read_assembly("  1: fadd v1.4s, v2.4s, v3.4s\n") == {"vector_bits": 128, "vector_registers": 3}


def test_vectors_of_a_kernel(report, monkeypatch, tmp_path):
    if shutil.which("objdump"):
        assert report.passes["forward"].launch["vector_bits"] >= 128
    assert "objdump failed" in vector_facts(tmp_path / "absent.so")["note"] or shutil.which("objdump") is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert "not installed" in vector_facts(tmp_path / "absent.so")["note"]


# --- the page ------------------------------------------------------------------------------------------------------------------------
def test_page_is_whole(adaptive):
    page = adaptive.html()
    root = parsed(page)
    assert "http" not in page and "@import" not in page and "src=" not in page
    assert all(ref == "#" for ref in re.findall(r"url\((.)", page))
    assert not root.findall(".//script") and not root.findall(".//link") and not root.findall(".//img")
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    assert {h.text for h in root.findall(".//h2")} >= {
        "Inputs, states, outputs",
        "Core",
        "Hoisted",
        "Cost",
        "Kernel: forward",
        "Kernel: backward",
    }
    assert adaptive.passes["backward"].source.strip() in all_text(root)


def test_pygments_colours_and_its_absence(report, monkeypatch):
    assert '<span class="k">' in report.html() and "prefers-color-scheme: dark" in report.html()
    for name in [m for m in sys.modules if m.split(".")[0] == "pygments"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pygments", None)
    plain = report.html()
    assert '<span class="k">' not in plain and report.passes["forward"].source.strip() in all_text(parsed(plain))


def test_hostile_names_are_escaped(tmp_path):
    folder = tmp_path / "a&b <i>"
    folder.mkdir()
    path = folder / "evil.py"
    path.write_text('def core(x, v):\n    "</pre><script>alert(1)</script>&amp;"\n    v = v + x  # ]]> <b>\n    return v, v\n')
    space = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    core = space["core"]
    core.__name__ = '<script>alert("x")</script>'
    made = flexsn.explain(core, sequence(dtype=torch.int32), measure=False)
    root = parsed(made.html())
    assert not [e for e in root.iter() if e.tag in ("script", "i", "b")]
    shown = all_text(root)
    assert '<script>alert("x")</script>' in shown and "</pre><script>alert(1)</script>&amp;" in shown and "a&b <i>" in shown
    bad = flexsn.explain(lambda x, v: (x - torch.rand_like(v), v), sequence())
    bad.problem.hint = bad.problem.message = "<script>alert(2)</script>"
    assert "<script>alert(2)</script>" in all_text(parsed(bad.html())) and not parsed(bad.html()).findall(".//script")


def test_save_and_notebook(report, tmp_path):
    path = report.save(tmp_path / "r.html")
    assert path.read_text(encoding="utf-8") == report.html()
    assert report._repr_html_().startswith("<iframe") and "<article" not in report._repr_html_()  # escaped inside the frame
    assert repr(report) == "<Report: lif fused by cpp>"


def test_json(adaptive):
    data = json.loads(json.dumps(adaptive.to_dict()))
    assert data["fused"] is True and data["neurons"] == N and data["passes"]["backward"]["bytes_per_neuron_step"] == 12.25
    assert data["passes"]["forward"]["operations_per_neuron_step"] == 12
    assert data["source"][1]["kinds"] == ["static"]


# --- the drawing ---------------------------------------------------------------------------------------------------------------------
def boxes_of(svg):
    return [
        {k: float(rect.get(k)) for k in ("x", "y", "width", "height")} | {"label": text.text, "kind": g.get("class")}
        for g in ET.fromstring(svg).findall("g")
        for rect, text in [(g.find("rect"), g.find("text"))]
    ]


def test_drawing(report, adaptive):
    for made in (report, adaptive):
        svg = made.svg()
        boxes = boxes_of(svg)
        assert sorted(b["label"] for b in boxes) == sorted(label for label, _ in made.drawing.boxes.values())
        root = ET.fromstring(svg)
        for b in boxes:
            assert b["x"] >= 0 and b["x"] + b["width"] <= float(root.get("width")) and b["y"] + b["height"] <= float(root.get("height"))
            assert 7 * len(b["label"]) < b["width"]
        for i, a in enumerate(boxes):  # none covers another
            for b in boxes[:i]:
                apart = a["x"] + a["width"] <= b["x"] or b["x"] + b["width"] <= a["x"]
                assert apart or a["y"] + a["height"] <= b["y"] or b["y"] + b["height"] <= a["y"]
        assert len([p for p in root.findall("path") if p.get("class") == "edge"]) == len(made.drawing.edges)
        assert len([p for p in root.findall("path") if p.get("class") == "loop"]) == sum(
            k == "next" for _, k in made.drawing.boxes.values()
        )


def test_drawing_runs_from_left_to_right(adaptive):
    columns = {"input": 0, "state": 0, "param": 0, "value": 1, "output": 2, "next": 2}
    boxes = sorted(boxes_of(adaptive.svg()), key=lambda b: b["x"])
    assert [columns[b["kind"]] for b in boxes] == sorted(columns[b["kind"]] for b in boxes)
    left = {b["label"]: b["x"] for b in boxes if b["kind"] == "value"}
    assert left["h"] < left["s"] < left["a"]


def test_drawing_of_a_state_that_nothing_reads():
    made = flexsn.explain(lambda x, v: (x * 2, x), sequence(dtype=torch.int32), measure=False)
    assert ("v", "state") in made.drawing.boxes.values() and ET.fromstring(draw(made.drawing, "a & b", "k")).find("title").text == "a & b"


# --- beside ---------------------------------------------------------------------------------------------------------------------------
def test_import_is_light():
    code = "import sys, flexsn; print([m for m in ('pygments', 'matplotlib', 'flexsn.cli', 'flexsn.report') if m in sys.modules])"
    root = Path(flexsn.__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root).stdout.strip() == "[]"


@pytest.mark.gpu
def test_registers_on_a_gpu():
    made = flexsn.explain(lif, torch.rand(T, 64, 128, device="cuda"))
    assert made.choice.name == "triton" and made.machine["gpu"] != "none"
    for p in made.passes.values():
        assert p.launch["registers"] > 8 and p.launch["spills"] == 0 and p.launch["tile"] >= 64 and p.measured_s > 0
    assert "registers per thread" in str(made)


# --- cores on one line ----------------------------------------------------------------------------------------------------------
def on_one_line(x, v): h = v + x; s = flexsn.surrogate.atan(h - 1.0); return s, h * (1.0 - s)  # fmt: skip # noqa: E702


def two_on_a_line(x, v):
    h = v + x; s = flexsn.surrogate.atan(h - 1.0)  # fmt: skip # noqa: E702
    return s, h * (1.0 - s)


def arguments_on_lines(x, v):
    return flexsn.surrogate.atan(
        x=v + x,
        alpha=3.0,
    ), v * torch.clamp(x,
        min=v * 0.5)  # fmt: skip


assigned = lambda x, v: (flexsn.surrogate.atan(x + v - 1.0), v * 0.5)
inside_a_call = flexsn.FlexSN(lambda x, v: (flexsn.surrogate.atan(x + v - 1.0), v * 0.5), num_states=1)


@pytest.mark.parametrize("name", ["on_one_line", "two_on_a_line", "arguments_on_lines", "assigned", "inside_a_call"])
def test_values_have_no_name_that_the_core_did_not_give(name):
    made = flexsn.explain(globals()[name], sequence(), measure=False)
    labels = {label for label, kind in made.drawing.boxes.values() if kind == "value"}
    assert not labels, "which line names which value cannot be told"
    assert all(re.match(r"\s+(t\d+: |return |\w+\()", line) or line.startswith(core_of(name)) for line in made.graph.splitlines()), (
        made.graph
    )
    marked = [row for row in made.source if row.kinds]
    lines = Path(__file__).read_text().splitlines()
    assert marked and all(lines[row.number - 1].strip() == row.text.strip() for row in marked)


def core_of(name):
    return name if name in ("on_one_line", "two_on_a_line", "arguments_on_lines") else "<lambda>"


def test_a_line_with_one_statement_names_its_value():
    def named(x, v):
        h = v + x
        s = flexsn.surrogate.atan(x=h - 1.0)
        return s, h * (1.0 - s)

    made = flexsn.explain(named, sequence(), measure=False)
    assert {label for label, kind in made.drawing.boxes.values() if kind == "value"} == {"h", "s"}


def several_by_one_name(x, v, w):
    both = [state + x for state in (v, w)]
    pair = both[0] * 2.0, both[1] * 3.0
    total = sum([2.0 * x for x in pair])
    return total, *both


def test_a_name_of_several_values_is_none_of_them():
    drawing = flexsn.explain(several_by_one_name, sequence(), measure=False).drawing
    assert {label for label, kind in drawing.boxes.values() if kind == "value"} == {"total"}
    (total,) = (key for key, (label, _) in drawing.boxes.items() if label == "total")
    from_states = {("x0", "out:v0"), ("v0", "out:v0"), ("x0", "out:v1"), ("v1", "out:v1")}
    assert set(drawing.edges) == from_states | {("x0", total), ("v0", total), ("v1", total), (total, "out:y0")}


def test_gates_of_hodgkin_and_huxley_depend_alike():
    drawing = flexsn.explain(flexsn.HodgkinHuxley(), torch.rand(4, 3), measure=False).drawing
    assert "gates" not in {label for label, _ in drawing.boxes.values()}
    for k in (1, 2, 3):
        assert {source for source, target in drawing.edges if target == f"out:v{k}"} == {"v0", f"v{k}"}


@pytest.mark.parametrize("given", ["states", "params"])
def test_a_network_has_its_own_states_and_params(given):
    net = nn.Sequential(nn.Linear(4, 3), flexsn.LIF())
    with pytest.raises(flexsn.errors.OperandCountError, match=f"the neurons of a network have their own {given}"):
        flexsn.explain(net, torch.rand(5, 4), measure=False, **{given: [torch.zeros(3)]})
