"""`tune=True`: what is measured, kept and chosen afterwards. Times are given here; test_gpu.py measures real ones."""

from concurrent.futures import Future

import pytest
import torch

import flexsn
from flexsn._operator import autotune as tune
from flexsn._runtime import triton_kernel as launch_triton
from flexsn._runtime import triton_tiles
from flexsn._runtime.triton_tiles import MeasuredTiles, Tile


def lif(x, v):
    h = v + (x - v) / 2.0
    s = flexsn.surrogate.atan(h - 1.0)
    return s, h * (1.0 - s)


FAST = Tile(256, 4, True, True)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU by name alone, and an empty cache."""
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_tiles, "_gpu_name", lambda index: "GPU X")
    monkeypatch.setattr(launch_triton, "_processors", lambda index: 132)
    return tmp_path


class Launch:
    T, numel, writes = 8, 4096, ["y0"]

    def __init__(self, numel):
        self.kernel, self.numel = FakeKernel(None), numel


class FakeKernel(launch_triton.Kernel):
    def __init__(self, plan):
        self.plan, self.tiles, self._ready = plan, MeasuredTiles("source"), {(4096, 0, True): "old", (64, 0, True): "other"}
        self.asked = []

    def expect_tile(self, tile, index):
        self.asked.append(tile)
        return Future()


def test_the_fastest_is_kept(gpu, monkeypatch):
    measured = []
    monkeypatch.setattr(tune, "_milliseconds", lambda launch, tile, build, device: measured.append(tile) or (0.1 if tile == FAST else 0.5))
    launch = Launch(4096)
    tune._tune(launch, torch.device("cuda", 0))
    assert set(measured) == set(tune.CANDIDATES) and launch.kernel.tile(4096, 0, True) == FAST
    assert launch.kernel._ready == {(64, 0, True): "other"}, "the next call chooses again"
    tune._tune(launch, torch.device("cuda", 0))
    assert len(measured) == len(tune.CANDIDATES), "measured once"
    assert MeasuredTiles("source").get(4096, 0, True) == FAST, "another process reads it"
    assert MeasuredTiles("source").get(3000, 0, True) == FAST and MeasuredTiles("source").get(5000, 0, True) is None
    assert MeasuredTiles("source").get(4096, 0, False) is None and MeasuredTiles("another source").get(4096, 0, True) is None


def test_tiles_that_cannot_be_built_and_rows_that_are_not_aligned(gpu, monkeypatch):
    monkeypatch.setattr(tune, "_milliseconds", lambda launch, tile, build, device: None if tile.block == 64 else float(tile.block))
    launch = Launch(4095)
    tune._tune(launch, torch.device("cuda", 0))
    assert launch.kernel.tiles.get(4095, 0, False) in [Tile(128, 4, False), Tile(128, 4, True)]
    assert not any(tile.aligned for tile in launch.kernel.asked)


def test_where_no_tile_can_be_built_the_usual_one_stays(gpu, monkeypatch):
    monkeypatch.setattr(tune, "_milliseconds", lambda *_: None)
    launch = Launch(4096)
    tune._tune(launch, torch.device("cuda", 0))
    assert launch.kernel.tiles.get(4096, 0, True) is None and (4096, 0, True) in launch.kernel._ready


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"GPU X, 4096 neurons, aligned": {"block": 1, "shape": 2}}', '{"GPU X, 4096 neurons": 3}']
)
def test_a_damaged_file_counts_as_none(gpu, text):
    tiles = MeasuredTiles("source")
    tiles.keep(4096, 0, True, FAST)
    (path,) = gpu.rglob("*.json")
    path.write_text(text)
    assert MeasuredTiles("source").get(4096, 0, True) is None


def test_on_the_cpu_it_changes_nothing():
    x = torch.rand(5, 7)
    y = flexsn.FlexSN(lif, num_states=1, tune=True)(x)
    assert torch.equal(y, flexsn.scan(lif, [x], [None], backend="torch", tune=True).outputs[0])
