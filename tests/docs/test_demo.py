"""The demo: fused and eager training agree, and a small run writes what it promises."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
KEYS = {
    "test_accuracy", "test_accuracy_per_epoch", "test_images", "loss_first", "loss_last_epoch", "loss_per_epoch",
    "seconds", "step_seconds_fused", "step_seconds_eager", "speed_up", "seed", "epochs", "steps", "hidden",
    "batch", "quick", "python", "torch", "flexsn", "numpy", "cpu", "threads", "date",
}  # fmt: skip

for package in ("sklearn", "matplotlib", "tqdm"):
    pytest.importorskip(package)


@pytest.fixture
def digits(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import digits

    return digits


@pytest.mark.parametrize("seed", [0, 1])
def test_fused_and_eager_training_have_the_same_loss_curve(digits, seed):
    fused, eager = (digits.train(seed=seed, epochs=2, steps=16, hidden=48, backend=backend, max_updates=12) for backend in ("cpp", "torch"))
    assert len(fused["losses"]) == 12 and len(set(fused["losses"])) > 6, "the curve should move"
    assert fused["losses"] == pytest.approx(eager["losses"], rel=1e-5)
    assert fused["accuracies"] == eager["accuracies"]
    # the loss sees spike counts only; the weights show every gradient
    weights, expected = fused["net"].state_dict(), eager["net"].state_dict()
    assert weights.keys() == expected.keys() and any("params.w" in name for name in weights)
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_quick_run_writes_metrics_and_picture(tmp_path):
    command = [sys.executable, str(EXAMPLES / "digits.py"), "--quick", "--seed", "3", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert set(metrics) == KEYS
    assert metrics["seed"] == 3 and metrics["steps"] == 32 and metrics["epochs"] == 2 == len(metrics["loss_per_epoch"])
    assert all(math.isfinite(metrics[k]) for k in KEYS if isinstance(metrics[k], (int, float)))
    assert metrics["step_seconds_fused"] > 0 and metrics["step_seconds_eager"] > 0
    assert metrics["speed_up"] == pytest.approx(metrics["step_seconds_eager"] / metrics["step_seconds_fused"])
    assert metrics["loss_per_epoch"][-1] < metrics["loss_first"] and 0 <= metrics["test_accuracy"] <= 1
    picture = (tmp_path / "out" / "digits.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and len(picture) > 30_000
