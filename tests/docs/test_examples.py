"""The examples run at a small scale and learn; event files are what tonic reads, and spikes in SHD's format what h5py does."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
CHANCE = {
    "japanese_vowels": 1 / 9, "pig_cvp": 1 / 52, "events_tonic": 1 / 10, "two_compartments": 1 / 10, "lightning_digits": 1 / 10,
    "shd_like": 1 / 20, "gru_as_a_core": 0.19,
}  # fmt: skip


SLOW = ("japanese_vowels", "shd_like", "gru_as_a_core")  # a whole example each; the others are run by `make test-full`


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.full) for name in CHANCE])
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


@pytest.mark.slow
def test_a_recurrent_layer_reaches_what_its_example_states(tmp_path):
    """At full scale; the classes are told apart by the order of spikes."""
    command = [sys.executable, str(EXAMPLES / "shd_like.py"), "--out", str(tmp_path)]
    subprocess.run(command, capture_output=True, timeout=600, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert "at least 80 % are recognised" in (EXAMPLES / "shd_like.py").read_text()
    assert json.loads((tmp_path / "metrics.json").read_text())["test_accuracy"] >= 0.8


def test_a_gru_as_a_core_is_pytorchs(monkeypatch):
    for package in ("matplotlib", "tqdm"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import gru_as_a_core

    assert gru_as_a_core.largest_difference(T=9, batch=3, inputs=4, hidden=6) < 1e-13


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


# --- spikes in SHD's format --------------------------------------------------------------------------------------------------------
@pytest.fixture
def shd_files(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import shd_files

    return shd_files


def test_made_spikes_are_as_those_of_shd(shd_files):
    np = pytest.importorskip("numpy")
    made, again, other = (shd_files.make(40, seed) for seed in (3, 3, 4))
    assert set(made.labels) <= set(range(20)) and len(set(made.labels)) > 10
    for times, units in zip(made.times, made.units, strict=True):
        assert times.dtype == np.float32 and units.dtype == np.uint16 and times.shape == units.shape and len(times) > 1000
        assert (np.diff(times) >= 0).all() and times.min() >= 0 and units.max() < 700
    assert all(map(np.array_equal, made.times, again.times)) and not np.array_equal(made.times[0], other.times[0])
    counts, labels = shd_files.binned(made)
    assert counts.shape == (100, 40, 700) and labels.tolist() == made.labels.tolist()
    inside = [(times < shd_files.SECONDS).sum() for times in made.times]
    assert counts.sum((0, 2)).tolist() == inside


def test_the_other_half_of_the_classes_runs_backwards(shd_files):
    np = pytest.importorskip("numpy")
    for part in shd_files.patterns(np.random.default_rng(0)):
        np.testing.assert_array_equal(part[:10], part[10:, :, ::-1])


def test_files_of_shd_are_read(shd_files, tmp_path):
    h5py, np = pytest.importorskip("h5py"), pytest.importorskip("numpy")
    made = shd_files.make(5, 0)
    with h5py.File(tmp_path / "shd_train.h5", "w") as file:
        for name, values, dtype in (("times", made.times, np.float16), ("units", made.units, np.uint16)):  # as in the files
            rows = file.create_dataset(f"spikes/{name}", (5,), dtype=h5py.vlen_dtype(dtype))
            for k, row in enumerate(values):
                rows[k] = row
        file["labels"] = made.labels.astype(np.uint16)
    counts, labels = shd_files.binned(shd_files.read(tmp_path / "shd_train.h5"))
    assert labels.tolist() == made.labels.tolist()
    rounded = made._replace(times=[times.astype(np.float16) for times in made.times])
    assert counts.equal(shd_files.binned(rounded)[0]) and counts.sum() > 5000


def test_a_file_to_train_on_is_not_tested_on(shd_files, tmp_path):
    for package in ("matplotlib", "tqdm"):
        pytest.importorskip(package)
    import shd_like

    with pytest.raises(SystemExit, match=r"--data takes shd_train\.h5"):
        shd_like.main(["--out", str(tmp_path), "--data", "digits.h5"])


def test_without_h5py_the_path_of_a_file_is_answered_by_what_is_missing(shd_files, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(SystemExit, match="needs h5py"):
        shd_files.read("shd_train.h5")
