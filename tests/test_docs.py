"""What the documents show is what the code does."""

import re
import sys
from pathlib import Path

import pytest
import torch

import flexsn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import stages  # noqa: E402  (tools/ is not a package)


def test_architecture_shows_the_output_of_every_stage():
    text = (ROOT / "docs" / "architecture.md").read_text()
    shown = stages.stages(stages.example())
    assert set(re.findall(r"<!-- stage: (\w+) -->", text)) == set(shown)
    assert stages.fill(text, shown) == text, "run `python tools/stages.py --write`"


def test_readme_snippets_run():
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 3
    torch.manual_seed(0)
    names: dict = {}
    exec(compile("\n".join(blocks), "README.md", "exec"), names)
    assert names["x"].shape == (100, 32, 512)
    assert names["neuron"].core.w_mem.grad.abs().sum() > 0
    assert names["neuron"].core.w_adapt.grad.abs().sum() > 0
    assert names["v"].shape == (32, 512)


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")  # PyTorch's own, 2.13
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # Inductor's own
def test_compile_snippets_run():
    text = (ROOT / "docs" / "compile.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 5
    torch.manual_seed(0)
    names: dict = {}
    exec(compile("\n".join(blocks), "compile.md", "exec"), names)
    torch.testing.assert_close(names["y"], names["net"](names["x"]))
    torch.testing.assert_close(names["same"], names["outputs"])
    assert {n: g.shape for n, g in names["per_sample"].items()} == {n: (3, *p.shape) for n, p in names["params"].items()}


@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")  # PyTorch's own, 2.13
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # Inductor's own
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
