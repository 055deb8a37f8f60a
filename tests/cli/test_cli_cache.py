"""`flexsn cache`: it knows the files that flexsn wrote, and leaves all others."""

import json
import os
from pathlib import Path

import pytest
import torch

import flexsn

KERNELS = [c * 32 for c in "ab"]
MINE = [
    "results.so",
    "mymodel.cpp",
    "data.sha256",
    "a.so",
    KERNELS[0] + ".csv",
    "x" * 32 + ".so",
    "A" * 32 + ".cpp",
    "tiles/notes.txt",
    "tiles/a.json",
]


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A cache of two kernels with the measured tiles of one, what builds have left, and files of the user's."""
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "kept"))
    folder = tmp_path / "kept" / "cpp"
    (folder / "tiles").mkdir(parents=True)
    folder.chmod(0o700)
    for name in KERNELS:
        for suffix, size in ((".so", 1000), (".cpp", 200), (".sha256", 64)):
            (folder / (name + suffix)).write_bytes(b"x" * size)
    (folder / "tiles" / f"{KERNELS[0]}.json").write_text("{}")
    for name in MINE:
        (folder / name).write_text("mine")
    (tmp_path / "elsewhere.so").write_text("not here")
    (folder / f"{'c' * 32}.so").symlink_to(tmp_path / "elsewhere.so")
    for build in ("build-runs_now", "build-cut_off1", "build-of-mine"):
        (folder / build).mkdir()
        (folder / build / "kernel.cpp").write_text("")
    for build in ("build-cut_off1", "build-of-mine"):
        os.utime(folder / build, (0, 0))
    return folder


def test_cache_info(run, kernels):
    code, out, _ = run("cache", "info", "--json")
    data = json.loads(out)
    assert code == 0 and (data["folder"], data["kernels"], data["tuned"], data["bytes"]) == (str(kernels), 2, 1, 2 * 1264 + 2)
    code, out, _ = run("cache", "info")
    assert code == 0 and "2 CPU kernels, measured tiles for 1 GPU kernel, 2.53 kB" in out and f"{kernels} (from $FLEXSN_CACHE_DIR)" in out
    (kernels / "tiles" / f"{KERNELS[0]}.json").unlink()
    assert "2 CPU kernels, 2.53 kB\n" in run("cache", "info")[1]


def everything(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def test_cache_clear(run, kernels, tmp_path):
    before = everything(kernels)
    code, out, _ = run("cache", "clear", "--dry-run")
    assert (
        code == 0 and "would remove 2 CPU kernels, measured tiles for 1 GPU kernel, 2.53 kB, from" in out and everything(kernels) == before
    )
    code, out, _ = run("cache", "clear", "--json")
    assert code == 0 and json.loads(out) == {"folder": str(kernels), "kernels": 2, "tuned": 1, "bytes": 2530, "removed": True}
    ours = {name + suffix for name in KERNELS for suffix in (".so", ".cpp", ".sha256")}
    ours |= {f"tiles/{KERNELS[0]}.json", "build-cut_off1", "build-cut_off1/kernel.cpp"}
    assert before - everything(kernels) == ours and set(MINE) < everything(kernels)
    assert (tmp_path / "elsewhere.so").exists()
    assert json.loads(run("cache", "info", "--json")[1])["kernels"] == 0


def test_cache_clear_removes_all_that_flexsn_writes(run, tmp_path, monkeypatch):
    """Names are matched, so this fails when the caches give others."""
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path))
    core = lambda x, v: (x * 0.7331 + v, v)  # of which no other test makes a kernel
    flexsn.scan(core, [torch.ones(3, 4)], [None], backend="cpp")
    triton_tiles = pytest.importorskip("flexsn._runtime.triton_tiles")
    monkeypatch.setattr(triton_tiles, "_gpu_name", lambda index: "a GPU")
    triton_tiles.MeasuredTiles("a source").keep(64, 0, True, triton_tiles.Tile(64, 2, False, True))
    assert "1 CPU kernel, measured tiles for 1 GPU kernel" in run("cache", "info")[1]
    assert {Path(name).suffix for name in everything(tmp_path / "cpp")} == {".so", ".cpp", ".sha256", ".json", ""}
    run("cache", "clear")
    assert everything(tmp_path / "cpp") == {"tiles"}
