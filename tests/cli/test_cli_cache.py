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
]


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A cache of two kernels, what builds have left, and files of the user's."""
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "kept"))
    folder = tmp_path / "kept" / "cpp"
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    for name in KERNELS:
        for suffix, size in ((".so", 1000), (".cpp", 200), (".sha256", 64)):
            (folder / (name + suffix)).write_bytes(b"x" * size)
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
    assert code == 0 and (data["folder"], data["kernels"], data["bytes"]) == (str(kernels), 2, 2 * 1264)
    code, out, _ = run("cache", "info")
    assert code == 0 and "2 CPU kernels, 2.53 kB" in out and f"{kernels} (from $FLEXSN_CACHE_DIR)" in out


def everything(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def test_cache_clear(run, kernels, tmp_path):
    before = everything(kernels)
    code, out, _ = run("cache", "clear", "--dry-run")
    assert code == 0 and "would remove 2 CPU kernels, 2.53 kB, from" in out and everything(kernels) == before
    code, out, _ = run("cache", "clear", "--json")
    assert code == 0 and json.loads(out) == {"folder": str(kernels), "kernels": 2, "bytes": 2528, "removed": True}
    ours = {name + suffix for name in KERNELS for suffix in (".so", ".cpp", ".sha256")}
    ours |= {"build-cut_off1", "build-cut_off1/kernel.cpp"}
    assert before - everything(kernels) == ours and set(MINE) < everything(kernels)
    assert (tmp_path / "elsewhere.so").exists()
    assert json.loads(run("cache", "info", "--json")[1])["kernels"] == 0


def test_cache_clear_removes_all_that_flexsn_writes(run, tmp_path, monkeypatch):
    """Names are matched, so this fails when the caches give others."""
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path))
    core = lambda x, v: (x * 0.7331 + v, v)  # of which no other test makes a kernel
    flexsn.scan(core, [torch.ones(3, 4)], [None], backend="cpp")
    assert "1 CPU kernel, " in run("cache", "info")[1]
    assert {Path(name).suffix for name in everything(tmp_path / "cpp")} == {".so", ".cpp", ".sha256"}
    run("cache", "clear")
    assert everything(tmp_path / "cpp") == set()
