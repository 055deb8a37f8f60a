"""What the documents show is what the code does."""

import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import flexsn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import stages  # noqa: E402
import zoo  # noqa: E402


def test_architecture_shows_the_output_of_every_stage():
    text = (ROOT / "docs" / "architecture.md").read_text()
    shown = stages.stages(stages.example())
    assert set(re.findall(r"<!-- stage: (\w+) -->", text)) == set(shown)
    assert stages.fill(text, shown) == text, "run `python tools/stages.py --write`"


def test_readme_snippets_run():
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 5
    torch.manual_seed(0)
    names: dict = {}
    exec(compile("\n".join(blocks), "README.md", "exec"), names)
    assert names["x"].shape == (100, 32, 512)
    assert names["neuron"].core.w_mem.grad.abs().sum() > 0
    assert names["neuron"].core.w_adapt.grad.abs().sum() > 0
    assert names["v"].shape == (32, 512)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_pages_name_the_pytorch_that_is_tested(page):
    from flexsn._version import TESTED_TORCH as tested

    text, needed = " ".join((ROOT / page).read_text().split()), tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert needed["project"]["dependencies"] == [f"torch>={tested[0]}"] and f"PyTorch {tested[0]} or newer" in text
    assert f"tested with {tested[0]} to {tested[1]}" in text
    assert f"torch=={tested[1]}." in (ROOT / "Makefile").read_text()  # of `make test-newest`


def snippets(page, count):
    """Names that the snippets of a page leave behind."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)
    assert len(blocks) == count
    names: dict = {}
    torch.manual_seed(0)
    exec(compile("\n".join(blocks), page, "exec"), names)
    return names


@pytest.mark.slow
def test_neuron_snippets_run(counts):
    names = snippets("neurons.md", 4)
    annealed, made = names["annealed"], (counts.programs, counts.builds)
    for threshold in (0.4, 0.3):
        annealed.reset()
        annealed.v_threshold.fill_(threshold)
        annealed.surrogate_alpha.fill_(9.0)
        (grad,) = torch.autograd.grad(annealed(names["x"]).mean(), names["x"])
        other = flexsn.LIF(v_threshold=threshold, surrogate=flexsn.surrogate.atan(alpha=9.0), backend="torch")
        torch.testing.assert_close(grad, torch.autograd.grad(other(names["x"]).mean(), names["x"])[0])
    assert (counts.programs, counts.builds) == made and made[0] > 0
    flexsn.LIF(v_threshold=0.37)(names["x"])
    assert counts.programs > made[0]  # a number is a constant
    assert names["learned"].tau.grad.shape == (16,) and names["learned"].tau.grad.abs().sum() > 0
    assert 0 < names["spikes"].mean() < 1 and names["v"].shape == (8, 16)
    assert abs(names["fitted"].g_leak - 0.2) < 1e-6 and names["fired"].shape == (100, 8, 16)


def test_surrogate_snippets_run():
    names = snippets("surrogates.md", 2)
    atan = 1.5 / (1 + (torch.pi / 2 * 3.0 * torch.linspace(-1.0, 1.0, 5)) ** 2)
    torch.testing.assert_close(names["x"].grad, atan)
    assert names["spikes"].tolist() == [0, 0, 1, 1, 1]
    x = torch.tensor([0.0, 2.0], requires_grad=True)
    assert names["peaked"](x).tolist() == [1, 1] and names["neuron"](torch.ones(3, 2)).shape == (3, 2)
    assert names["scaled"].surrogate.gain.grad.abs() > 0
    (grad,) = torch.autograd.grad(names["peaked"](x).sum(), x)
    torch.testing.assert_close(grad, torch.exp(-x.detach()))


def test_pages_of_the_zoo_are_those_of_the_code():
    for path, page in zoo.pages().items():
        assert path.read_text() == page, f"{path.name}: run `python tools/zoo.py --write`"
    assert {n for names in zoo.FAMILIES.values() for n in names} == {
        n for n, c in vars(flexsn.neurons).items() if isinstance(c, type) and n not in ("Bounded", "Neuron", "Synaptic")
    }
    assert set(zoo.PEERS) == set(flexsn.surrogate.__all__) - {"straight_through_estimator", "deterministic_pass"}
    assert set(zoo.CURVES) == set(zoo.PEERS) - {"custom_surrogate"}, "the page says that the plot has all but that one"


def test_arguments_of_every_neuron_are_those_that_it_takes():
    text = (ROOT / "docs" / "neurons.md").read_text()
    rows = re.findall(r"\*\*`flexsn\.(\w+)`\*\*.*?\nArguments: (.*?)(?:\. |\.\n)", text, flags=re.DOTALL)
    assert {name for name, _ in rows} == {n for names in zoo.FAMILIES.values() for n in names}
    shared = set(inspect.signature(flexsn.neurons.Neuron.__init__).parameters)
    for name, shown in rows:
        given = eval(f"dict({shown.replace('`', '')})", {"atan": flexsn.surrogate.atan})
        taken = {n: p.default for n, p in inspect.signature(getattr(flexsn, name)).parameters.items() if n not in shared}
        assert given == taken, name
        made = getattr(flexsn, name)(**given)
        assert all(isinstance(v, torch.Tensor) or getattr(made, n) == v for n, v in made.arguments.items()), name


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_is_in_the_navigation_of_the_site():
    listed = re.findall(r"^ +- .*: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1], flags=re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_names_of_the_page_of_names_are_there():
    names = re.findall(r"^::: (\S+)", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)
    assert len(names) > 20
    for name in names:
        pkgutil.resolve_name(name)


@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")  # PyTorch's own, 2.13
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # Inductor's own
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # PyTorch's own, of its first `jvp`
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo looks at that of carried states
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # Inductor's own, as it tunes: 2.11
@pytest.mark.slow
def test_compile_snippets_run():
    text = (ROOT / "docs" / "compile.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 22
    torch.manual_seed(0)
    names: dict = {}
    exec(compile("\n".join(blocks), "compile.md", "exec"), names)
    torch.testing.assert_close(names["y"], names["net"](names["x"]))
    torch.testing.assert_close(names["same"], names["spikes"])
    assert {n: g.shape for n, g in names["per_sample"].items()} == {n: (3, *p.shape) for n, p in names["params"].items()}


@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")  # PyTorch's own, 2.13
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # Inductor's own
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # `torch.export.load` of 2.11, of its own buffer
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["without package", "whole"])
def test_export_snippets_run(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "export.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 5 and sum("aoti" in block for block in blocks) == 1
    torch.manual_seed(0)
    names: dict = {}
    exec(compile("\n".join(b for b in blocks if whole or "aoti" not in b), "export.md", "exec"), names)
    net, x = names["net"], names["x"]
    flexsn.reset_net(net)
    torch.testing.assert_close(torch.from_numpy(names["y"]), net(x).detach())
    pieces = torch.cat([names["first"], names["second"]])
    assert torch.equal(pieces, flexsn.scan(names["lif"], (x,), (torch.zeros(16, 8),)).outputs[0])
    if whole:
        names["net"].requires_grad_(False)
        flexsn.reset_net(net)
        torch.testing.assert_close(names["run"](x[:5]).detach(), net(x[:5]))


@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")  # PyTorch's own, 2.13
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # PyTorch's own, as it traces a surrogate
def test_lowlevel_snippets_run(capsys):
    text = (ROOT / "docs" / "lowlevel.md").read_text()
    names: dict = {}
    exec(compile("\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)), "lowlevel.md", "exec"), names)
    x, v = names["x"].detach().requires_grad_(), names["v"]
    y = flexsn.scan(names["lif"], [x], [v]).outputs[0]
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(names["grad_x"], grad)
    torch.testing.assert_close(names["x"].grad, grad)
    for same in ("spikes", "y", "y2"):
        assert torch.equal(names[same], y)
    assert "def lif_step" in capsys.readouterr().out


def run_snippets(page):
    """Run the Python of a page, from its first snippet to its last; the names that it leaves."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)
    assert blocks
    names: dict = {}
    exec(compile("\n".join(blocks), page, "exec"), names)
    return names


def test_quickstart_runs():
    names = run_snippets("index.md")
    assert names["loss"].isfinite() and names["net"][0].weight.grad.abs().sum() > 0


@pytest.mark.slow
def test_own_neuron_runs():
    names = run_snippets("own_neuron.md")
    assert 0 < names["spikes"].mean() < 1
    flexsn.reset_net(names["net"])
    alone = names["net"](names["sequences"][0][:, None]).mean(0)
    torch.testing.assert_close(names["votes"][:1], alone)
    assert names["neuron"].core.w_alpha.grad.abs().sum() > 0


@pytest.mark.slow
def test_recurrent_networks_run(tmp_path):
    page = (ROOT / "docs" / "recurrent.md").read_text()
    blocks, file, names = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL), tmp_path / "core.py", {}
    file.write_text("\n".join(blocks))  # whose lines the report shows
    exec(compile(file.read_text(), file, "exec"), names)
    assert 0 < names["spikes"].mean() < 1 and names["drawing"].startswith("<svg")
    (shown,) = re.findall(r"<!-- report: pieces -->\n```\n(.*?)\n```", page, flags=re.DOTALL)
    assert re.search(r"--- pieces .*? ---\n(.*?)\n\n", str(names["report"]), flags=re.DOTALL)[1] == shown
    assert names["y"].shape == (20, 4, 8) and names["network"].conv.weight.grad.abs().sum() > 0


@pytest.mark.slow
def test_add_an_op(tmp_path):
    """The lines of the page, added to a copy of the package, are all that its core needs."""
    rows, use = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "add_an_op.md").read_text(), flags=re.DOTALL)
    shutil.copytree(ROOT / "flexsn", tmp_path / "flexsn")
    (tmp_path / "neuron.py").write_text(use)

    def run():
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        return subprocess.run([sys.executable, "neuron.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert "`special_bessel_j0` has no rule in the closed op set" in run().stderr
    parts = re.split(r"# flexsn/(\w+/\w+\.py).*\n", rows)[1:]
    for name, lines in zip(parts[::2], parts[1::2], strict=True):
        with (tmp_path / "flexsn" / name).open("a") as file:
            file.write(lines)
    done = run()
    assert done.returncode == 0, done.stderr


def test_explain_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "explain.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    names: dict = {}
    exec(compile("\n".join(blocks), str(page), "exec"), names)
    assert names["page"].startswith("<!DOCTYPE html>") and names["drawing"].startswith("<svg")
    assert names["problem"].op == "randn_like" and "Draw the noise outside" in names["problem"].hint
    assert names["data"]["passes"]["backward"]["measured_s"] > 0


def test_explain_page_shows_the_report():
    page = ROOT / "docs" / "explain.md"
    report = flexsn.explain(stages.example(), torch.rand(100, 32, 512), measure=False)
    sections = dict(re.findall(r"--- ([\w ]+?)(?: \([^\n]*\))? ---\n(.*?)(?=\n\n---|\Z)", str(report), flags=re.DOTALL))
    shown = re.findall(r"<!-- report: ([\w ]+) -->\n```\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert [name for name, _ in shown] == ["core and captured graph", "dependencies", "cost"]
    for name, text in shown:
        assert text.rstrip() == sections[name].rstrip(), name


def test_command_lines_parse():
    from flexsn._cli.main import make_parser

    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "cli.md").read_text(), flags=re.DOTALL)
    lines = re.findall(r"flexsn ([a-z][^>\n)]*)", "\n".join(blocks))
    assert len(lines) == 12
    for line in lines:
        assert callable(make_parser().parse_args(line.strip().strip('"').split()).run), line
    assert {line.split()[0] for line in lines} == {"explain", "bench", "build", "doctor", "cache"}


@pytest.mark.slow
def test_pictures_snippets_run(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    import pictures

    monkeypatch.chdir(tmp_path)
    names, printed = pictures.run(pictures.PAGE.read_text())
    shown = set(re.findall(r"\(img/(\w+\.png)\)", pictures.PAGE.read_text()))
    assert {p.name for p in tmp_path.glob("*.png")} == shown and (tmp_path / "events.gif").stat().st_size > 1000
    assert names["spikes"].shape == (200, 60) and names["hidden"].spikes[-1].shape == names["hidden"].states["v"][-1].shape == (50, 8, 100)
    words, shown_words = (re.sub(r"\s*[-\d][\d.e%+-]*", " #", t) for t in (printed, pictures.PAGE.read_text()))  # digits: of a machine
    assert "is silent" in printed and words in shown_words, "run `python tools/pictures.py`"
    for name in shown:
        assert (pictures.PAGE.parent / "img" / name).stat().st_size < 100_000


INTERCHANGE = {"interchange": 6, "from_spikingjelly": 3, "from_snntorch": 3, "from_norse": 3}  # page: blocks


@pytest.mark.slow
@pytest.mark.parametrize("page", INTERCHANGE)
def test_interchange_snippets_run(page, tmp_path, monkeypatch, capsys):
    import loaded_peers

    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == INTERCHANGE[page]
    torch.manual_seed(0)
    loaded_peers.snn.SpikingNeuron.instances.clear()
    names: dict = {}
    exec(compile("\n".join(blocks), f"{page}.md", "exec"), names)
    if page == "interchange":
        printed = re.search(r"```text\n(converted.*?)```", text, flags=re.DOTALL)
        assert capsys.readouterr().out == printed[1]
        flexsn.reset_net(names["net"])
        assert names["spikes"].any() and names["before"].any()
        torch.testing.assert_close(names["y"], names["net"](names["x"]))
    else:
        assert names["same"].any() and not names["same"].all()
