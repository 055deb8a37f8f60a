"""The pages and programs about many GPUs: docs/distributed.md, docs/scaling.md, benchmarks/scaling.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import launch
from torch import nn

import flexsn

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # behind the folders of the tests, which have a `cores` of their own

import scaling_model  # noqa: E402  (benchmarks/ is not a package)


def test_scaling_page_is_what_the_script_prints():
    assert (ROOT / "docs" / "scaling.md").read_text() == scaling_model.page(), "run `python benchmarks/scaling_model.py`"


def test_vgg_has_as_many_params_as_the_page_says():
    layout, channels, count = (64, 128, 256, 256, 512, 512, 512, 512), 3, 512 * 10 + 10
    for width in layout:
        count += 9 * channels * width + 2 * width
        channels = width
    assert count == scaling_model.VGG_PARAMS


def test_reduction_model():
    """Nothing to reduce alone; inside a host the ring; between hosts every GPU carries its share of the rest."""
    inside = 2 * 7 / 8 * 1e9 / scaling_model.NVLINK * 1e3
    assert scaling_model.reduction_ms(1e9, 1) == 0.0
    assert scaling_model.reduction_ms(1e9, 8) == pytest.approx(inside)
    assert scaling_model.reduction_ms(1e9, 16) == pytest.approx(inside + 1e9 / 8 / scaling_model.NETWORK * 1e3 + 0.04)
    case = scaling_model.Case("", ms=10.0, gradient_bytes=1e9, hidden=0.5, last=0.1)
    assert scaling_model.efficiency(case, 8) == pytest.approx((0.1 * inside, 10 / (10 + 0.1 * inside)))


def check_snippets(rank, world):
    text = (ROOT / "docs" / "distributed.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 6
    names: dict = {}
    exec(compile("\n".join(blocks), "distributed.md", "exec"), names)
    whole = names["network"]()
    torch.testing.assert_close(names["y"], whole(names["x"]))
    whole[1].reset()
    whole(names["x"]).square().mean().backward()
    torch.testing.assert_close(names["grad"].full_tensor(), whole[1].core.w.grad)
    w = torch.zeros(16, requires_grad=True)
    flexsn.scan(names["lif"], (names["x"],), (None,), (w,)).outputs[0].sum().backward()
    torch.testing.assert_close(names["w"].grad.to_local(), w.grad, rtol=1e-4, atol=1e-4)
    w.grad = None
    loss = flexsn.scan(names["lif"], (names["x"],), (None,), (w,)).outputs[0].square().sum()
    loss.backward()
    torch.testing.assert_close((names["loss"], names["decay"].grad), (loss, w.grad), rtol=1e-4, atol=1e-4)
    assert isinstance(names["net"][1], nn.Module) and names["net"][1].states is None


@pytest.mark.slow
def test_snippets(tmp_path):
    launch(__file__, 2, ["check_snippets"], tmp_path)


@pytest.mark.slow
def test_scaling_runs_on_the_cpu(tmp_path):
    """Toy sizes on one process and two: gradients agree and every number is there."""
    target = tmp_path / "scaling.json"
    options = ["--device", "cpu", "--quick", "--world", "1", "2", "--only", "linear", "linear_blocks", "--output", str(target)]
    done = subprocess.run([sys.executable, "benchmarks/scaling.py", *options], capture_output=True, text=True, check=False, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(target.read_text())
    for name in ("linear", "linear_blocks"):
        row = document["world"]["2"][name]
        assert row["gradient_error"]["float64"] < 1e-9 and 0 < row["gradient_error"]["bf16"] < 2e-2
        assert row["ms"] > 0 and row["allreduce_ms"] > 0 and row["of_one"] > 0 and row["gradient_bytes"] == 2 * (64 * 64 + 64)
