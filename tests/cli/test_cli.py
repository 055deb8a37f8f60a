"""The command line: exit codes, JSON, errors that teach, and what each command leaves on disk."""

import argparse
import itertools
import json
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import flexsn
from flexsn._cli import bench, candidates, doctor, main, roofline
from flexsn._cli.main import make_parser
from flexsn._cli.outcome import UsageError
from flexsn._cli.target import load_target

ROOT = Path(__file__).parents[2]
LIF = f"{ROOT}/examples/lif.py:lif"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder, from which modules are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


CORES = """
import torch, flexsn
def draws(x, v):
    v = v + torch.rand_like(x)
    return v, v
def two(x, y, v):
    v = v + x * y
    return v, v
class Neuron(flexsn.FlexSN):
    def __init__(self):
        super().__init__(two, num_inputs=2, num_states=1)
class Needs(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
number = 3
"""


# --- explain -------------------------------------------------------------------------------------------------------------------------
def test_explain_text(run):
    code, out, err = run("explain", LIF, "--shape", "20,64", "--no-measure")
    assert code == 0 and err == ""
    assert "=== lif: fused by cpp ===" in out and "T = 20, step shape [64]" in out and "// lif: backward" in out


def test_explain_json_and_page(run, tmp_path):
    page = tmp_path / "r.html"
    code, out, _ = run("explain", LIF, "--shape", "20,64", "--no-measure", "--json", "--html", page)
    data = json.loads(out)
    assert code == 0 and data["fused"] and data["passes"]["forward"]["bytes_per_neuron_step"] == 8.25
    assert data["html"] == str(page) and ET.fromstring(page.read_text()).tag == "html"
    code, out, _ = run("explain", LIF, "--shape", "20,64", "--no-measure", "--html", page)
    assert code == 0 and out == f"<Report: lif fused by cpp>\nwrote {page}\n"


def test_explain_tells_what_cannot_be_fused(run, here):
    (here / "bad_cores.py").write_text(CORES)
    code, out, _ = run("explain", "bad_cores:draws", "--shape", "5,8")
    assert code == 1 and "RandomOpError" in out and "v = v + torch.rand_like(x)" in out and "instead" in out
    code, out, _ = run("explain", "bad_cores:draws", "--shape", "5,8", "--json")
    assert code == 1 and json.loads(out)["problem"]["op"] == "rand_like"


def test_explain_counts_inputs(run, here):
    (here / "more_cores.py").write_text(CORES)
    flags = "--no-measure", "--json", "--dtype", "int32"
    for words in (("Neuron", "--shape", "5,8"), ("two", "--states", "1", "--shape", "5,8"), ("two", "--shape", "5,8", "--shape", "5,1")):
        code, out, _ = run("explain", f"more_cores:{words[0]}", *words[1:], *flags)
        kinds = [o["kind"] for o in json.loads(out)["operands"]]
        assert code == 0 and kinds == ["input", "input", "state", "output"], words


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nowhere:core",), "there is no module `nowhere`"),
        (("nowhere.py:core",), "there is no file `nowhere.py`"),
        (("lif",), "does not say where the core is"),
        ((f"{ROOT}/examples/lif.py:lief",), "It has `lif`."),
        (("some_cores:nothing_like_it_at_all",), "It has `draws`, `two`, `Neuron`, `Needs`."),
        (("some_cores:number",), "is int, not a core"),
        (("some_cores:Needs",), "cannot be made without arguments"),
        (("broken:core",), "ZeroDivisionError"),
        (("asks:core",), "cannot be imported: ModuleNotFoundError: No module named 'not_there'"),
        ((LIF, "--shape", "5,8", "--shape", "5,8", "--shape", "5,8"), "takes 2 operands"),
        ((LIF, "--device", "cuda:77"), "no device 'cuda:77' here"),
        ((LIF, "--no-measure", "--shape", "3,4", "--dtype", "int32", "--html", "/nowhere/x.html"), "cannot write /nowhere/x.html"),
    ],
)
def test_explain_errors(run, here, words, told):
    (here / "some_cores.py").write_text(CORES)
    (here / "broken.py").write_text("1 / 0\n")
    (here / "asks.py").write_text("import not_there\n")
    code, out, err = run("explain", *words)
    assert code == 2 and out == "" and err.startswith("flexsn: ") and told in err
    code, out, err = run("explain", *words, "--json")
    error = json.loads(out)["error"]
    assert code == 2 and err == "" and told in f"{error['message']} {error['hint']}"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "COMMAND"),
        (("explain", LIF, "--shape", "5x8"), "'5x8' is no shape: write the steps"),
        (("explain", LIF, "--shape", "5,-8"), "is no shape"),
        (("explain", LIF, "--states", "-1"), "'-1' is no number of states"),
        (("explain", LIF, "--backend", "cuda"), "invalid choice: 'cuda'"),
        (("cache",), "ACTION"),
        (("unknown",), "invalid choice: 'unknown'"),
    ],
)
def test_usage(run, words, told):
    code, out, err = run(*words)
    assert code == 2 and out == "" and told in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("explain", "m:lif", "--shape", "5,x"), "'5,x' is no shape"),
        (("nonsense",), "invalid choice: 'nonsense'"),
        (("cache",), "ACTION"),
    ],
)
def test_usage_as_json(run, words, told):
    code, out, err = run(*words, "--json")
    assert code == 2 and told in json.loads(out)["error"]["message"] and err.startswith("usage: ")


RAISES = """
import torch, flexsn
def lif(x, v):
    return x + v, v
net = torch.nn.Sequential(torch.nn.Linear(64, 128), flexsn.FlexSN(lif, num_states=1))
def wrong(x, v):
    return x.foo(), v
def leaves(x, v):
    raise SystemExit(5)
def lines(x, v):
    raise KeyError("one\\ntwo")
class Refuses(torch.nn.Module):
    def __init__(self):
        raise ValueError("one\\ntwo")
"""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("raises:net", "--shape", "5,3"), "`raises:net` cannot be run: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        (("raises:wrong", "--shape", "5,4"), "no attribute 'foo' (at "),
        (("raises:leaves", "--shape", "5,4"), "SystemExit: 5 (at "),
        (("raises:lines", "--shape", "5,4"), "KeyError: "),
        (("raises:Refuses", "--shape", "5,4"), "ValueError: one (at "),
        (("raises:lif", "--shape", "999999999,999999999"), "RuntimeError: "),
        (("stops:core", "--shape", "5,4"), "SystemExit: 3 (at "),
    ],
)
def test_explain_of_what_raises(run, here, words, told):
    (here / "raises.py").write_text(RAISES)
    (here / "stops.py").write_text("raise SystemExit(3)\n")
    code, out, err = run("explain", *words, "--no-measure")
    assert code == 2 and out == "" and told in err and err.startswith("flexsn: ") and err.count("\n") == 1
    code, out, err = run("explain", *words, "--no-measure", "--json")
    assert code == 2 and err == "" and told in json.loads(out)["error"]["message"]


def test_targets(here):
    (here / "cores_here.py").write_text(CORES)
    assert load_target("cores_here:two").__name__ == "two"
    assert load_target("cores_here.py:two").__name__ == "two"
    assert isinstance(load_target("cores_here:Neuron"), flexsn.FlexSN)
    assert load_target("flexsn.surrogate:atan") is flexsn.surrogate.atan
    with pytest.raises(UsageError, match=r"there is no module `flexsn\.nothing`"):
        load_target("flexsn.nothing:core")


# --- doctor --------------------------------------------------------------------------------------------------------------------------
def test_doctor(run):
    code, out, _ = run("doctor", "--json")
    data = json.loads(out)
    assert code == 0 and data["well"] and data["machine"]["flexsn"] == flexsn.__version__
    cpp, triton = data["backends"]["cpp"], data["backends"]["triton"]
    assert cpp["works"] and cpp["tested"] and cpp["seconds"] > 0
    assert triton["works"] and triton["device"] == "cpu"  # the tests run its interpreter
    assert data["compiler"]["path"] and data["packages"]["numpy"] and data["cache"]["kernels"] >= 2
    assert "works: self-test on cpu agrees" in doctor._text(data) and data["notes"] == []


@pytest.mark.parametrize("version", ["2.10.1", "2.15.0.dev20270101+cpu", "3.0"])
def test_doctor_notes_an_untested_pytorch(run, monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    code, out, _ = run("doctor")
    assert code == 0 and f"Note: PyTorch {version} is not among the versions that flexsn is tested with, 2.11 to 2.14." in out
    assert doctor.notes("2.11.0+cu130") == doctor.notes("2.14.1a0") == []


def test_doctor_without_compiler(run, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(doctor, "lif", lambda x, v: (x * 0.75 + v, v))  # a core of which no kernel is loaded
    code, out, _ = run("doctor")
    assert code == 1 and "none: set $CXX, or install g++" in out and "Something is wrong" in out
    assert "FAILS: BackendUnavailableError" in out and "PyTorch finds no NVIDIA GPU" in out


def test_doctor_sees_wrong_numbers(run, monkeypatch):
    def wrong(core, inputs, states, backend):
        done = flexsn.scan(core, inputs, states, backend="torch")
        return done if backend == "torch" else done._replace(outputs=(done.outputs[0] + 1.0,))

    monkeypatch.setattr(doctor, "scan", wrong)
    code, out, _ = run("doctor", "--json")
    assert code == 1 and "spikes differ" in json.loads(out)["backends"]["cpp"]["why"]


def test_self_test_sees_wrong_gradients(monkeypatch):
    def wrong(core, inputs, states, backend):
        x = inputs[0] if backend == "torch" else inputs[0] * 2 - inputs[0].detach()
        return flexsn.scan(core, (x,), states, backend="torch")

    monkeypatch.setattr(doctor, "scan", wrong)
    assert "gradients differ" in doctor.self_test("cpp", torch.device("cpu"))


# --- bench ---------------------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_bench(run, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, _ = run("bench", "--no-peers", "--neuron", "lif", "--shape", "20,64", "--json", "--plot", tmp_path / "roof.png")
    data = json.loads(out)
    assert code == 0 and data["arithmetic_rate"] > 1e6 and (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")
    modes = data["cases"][0]["modes"]
    assert modes["inference"]["bytes_per_neuron_step"] == 8 and modes["training"]["bytes_per_neuron_step"] == 8.25 + 12.25
    for found in modes.values():
        assert [c["name"] for c in found["candidates"]] == ["flexsn", "eager loop"]
        assert all(0 < c["seconds"] < 10 for c in found["candidates"]) and found["bound_s"] > 0
    shown = bench._text(data)
    assert "x flexsn" in shown and "lif, training: 20.5 B and" in shown


@pytest.mark.parametrize("copy_rate", [2e9, 5e9, 2e10, 1e13], ids=lambda r: f"{r:g}")
def test_labels_of_the_roofline_do_not_overlap(copy_rate):
    pytest.importorskip("matplotlib")
    times = [{"seconds": 1e-3}, {"seconds": 5e-3}]
    modes = {
        mode: {"operations_per_neuron_step": ops, "bytes_per_neuron_step": nbytes, "copy_rate": copy_rate, "candidates": times}
        for mode, ops, nbytes in (("inference", 8, 8), ("training", 34, 20.5))
    }
    case = {"neuron": "lif", "modes": modes}
    figure = roofline.draw({"shape": [100, 512], "device": "cpu", "threads": 2, "arithmetic_rate": 2e10, "cases": [case]})
    figure.draw_without_rendering()
    (low, high), axis = figure.axes[0].get_xlim(), figure.axes[0].xaxis
    labels = [t for t in axis.get_ticklabels(which="both") if t.get_text() and low <= t.get_position()[0] <= high]
    boxes = sorted((t.get_window_extent().x0, t.get_window_extent().x1) for t in labels)
    assert len(boxes) >= 3 and all(left[1] < right[0] for left, right in itertools.pairwise(boxes))


@pytest.mark.parametrize("wrong", [lambda x: x + 1.0, lambda x: 1.5 * x - 0.5 * x.detach()], ids=["spikes", "gradients"])
def test_bench_refuses_wrong_results(run, monkeypatch, wrong):
    monkeypatch.setattr(candidates, "_scan", lambda core, states, backend: (lambda x: x * 1.0) if backend == "torch" else wrong)
    code, out, err = run("bench", "--no-peers", "--neuron", "lif", "--shape", "20,64")
    assert code == 2 and out == "" and "not that of the eager loop: not timed" in err


def test_bench_usage(run, monkeypatch):
    code, _, err = run("bench", "--shape", "20")
    assert code == 2 and "no neurons to time" in err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run("bench", "--plot", "x.png")
    assert code == 2 and "flexsn[report]" in err


def test_a_peer_that_breaks_is_reported(monkeypatch):
    def breaks(title, device):
        raise RuntimeError("no luck")

    monkeypatch.setattr(candidates.metadata, "version", lambda name: "1.0")
    for name in ("_spikingjelly", "_snntorch", "_norse"):
        monkeypatch.setattr(candidates, name, breaks)
    found = candidates.peers_of("lif", torch.device("cpu"))
    assert [(c.name, c.run, c.note) for c in found] == [(p, None, "RuntimeError: no luck") for p in ("spikingjelly", "snntorch", "norse")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what peers and their dependencies warn of while they are imported
def test_peers_run():
    pytest.importorskip("spikingjelly")
    x = 2 * torch.rand(6, 3, 5)
    want = flexsn.scan(candidates.lif, (x,), (None,)).outputs[0]
    found = {c.name.split()[0]: c for c in candidates.peers_of("lif", torch.device("cpu"))}
    assert {"spikingjelly", "snntorch", "norse"} <= found.keys()
    for name, candidate in found.items():
        assert candidate.run is not None, f"{name}: {candidate.note}"
        spikes = candidate.run(x)
        assert spikes.shape == x.shape and set(spikes.unique().tolist()) <= {0.0, 1.0}
    assert torch.equal(found["spikingjelly"].run(x), want)  # the same equations


# --- every command ----------------------------------------------------------------------------------------------------------------------
def commands_of(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield name, child
                yield from commands_of(child)


def leaves():
    return {name: p for name, p in commands_of(make_parser()) if not any(isinstance(a, argparse._SubParsersAction) for a in p._actions)}


def test_json_everywhere():
    assert leaves().keys() == {"explain", "bench", "build", "doctor", "info", "clear"}
    for name, parser in leaves().items():
        assert any("--json" in action.option_strings for action in parser._actions), name


# --- from a shell --------------------------------------------------------------------------------------------------------------------
def test_as_a_module_into_a_closed_pipe():
    words = [sys.executable, "-m", "flexsn", "doctor"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        process.stdout.close()  # long before anything is printed
        assert process.stderr.read() == "" and process.wait() == 0


def test_console_script_is_declared():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"flexsn": "flexsn._cli:main"} and callable(main)


def test_version(run):
    assert run("--version") == (0, f"flexsn {flexsn.__version__}\n", "")
