"""The examples run at a small scale and learn; event files are what tonic reads."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
CHANCE = {"japanese_vowels": 1 / 9, "pig_cvp": 1 / 52, "events_tonic": 1 / 10, "two_compartments": 1 / 10, "lightning_digits": 1 / 10}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANCE)
def test_quick_run_learns_and_reports(name, tmp_path):
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--quick", "--seed", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    losses, reached = metrics["loss"], metrics["validation"]
    assert len(losses) == len(reached) == metrics["epochs"] > 1 and metrics["seed"] == 1 and metrics["quick"]
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    assert reached[metrics["best_epoch"] - 1] == max(reached)
    assert 1.5 * CHANCE[name] < metrics["test_accuracy"] <= 1.0
    assert f"test accuracy {metrics['test_accuracy']:.1%}" in done.stdout
    assert "it/s" in done.stderr + done.stdout or "epoch" in done.stderr, "a progress bar"
    picture = (tmp_path / f"{name}.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and len(picture) > 20_000


def test_examples_are_short():
    assert {p.stem for p in EXAMPLES.glob("*.py")} >= set(CHANCE)
    for name in (*CHANCE, "lif"):
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 100, name


def test_tonic_reads_the_files_that_are_made(tmp_path, monkeypatch):
    np, tonic = pytest.importorskip("numpy"), pytest.importorskip("tonic")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import event_files

    rng = np.random.default_rng(0)
    image = np.zeros((8, 8))
    image[2:6, 3] = 1.0
    events = event_files.saccades(image, rng)
    event_files.write(events, tmp_path / "7" / "00001.bin")
    read = tonic.io.read_mnist_file(str(tmp_path / "7" / "00001.bin"), dtype=tonic.datasets.NMNIST.dtype)
    assert (tmp_path / "7" / "00001.bin").stat().st_size == 5 * len(events)
    for k, name in enumerate("xytp"):
        np.testing.assert_array_equal(read[name], events[:, k])
    assert events[:, 2].max() > 2**16 and (np.diff(events[:, 2]) >= 0).all() and events[:, 2].max() < 300_000
    assert len(np.unique(events[:, :2], axis=0)) > 4 * 9 * 2, "the bar has moved over the sensor"
    on, off = (events[events[:, 3] == p] for p in (1, 0))
    assert len(on) - len(off) == 4 * 9, "what lights up goes dark again, but for where the bar is in the end"


def test_made_data_set_is_read_by_tonic_class_by_class(tmp_path, monkeypatch):
    for package in ("tonic", "sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import events_tonic

    events_tonic.make(tmp_path, count=40, seed=0)
    (x, y), (test_x, test_y) = (events_tonic.load(tmp_path, train) for train in (True, False))
    assert x.shape == (events_tonic.FRAMES, 30, 2, 17, 17) and test_x.shape[1] == len(test_y) == 10
    files = sorted((tmp_path / "NMNIST" / "Train").glob("*/*.bin"))
    assert [int(f.parent.name) for f in files] == y.tolist()
    assert x[:, 0].sum() > 100 and sum(f.stat().st_size for f in files) // 5 >= x.sum() > 0
