"""`examples/train_distributed.py`: killed and started again it follows the same curve; a failed process ends the job."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "train_distributed.py"


def command(processes, out, *options):
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*start, str(PROGRAM), "--out", str(out), "--every", "20", "--hidden", "32", "--batch", "16", *options]


def environment():
    folder = str(PROGRAM.parent.parent)
    return {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo"}


def run(processes, out, *options):
    return subprocess.run(
        command(processes, out, *options), env=environment(), capture_output=True, text=True, check=False, timeout=120
    )  # fmt: skip


def losses(out):
    path = out / "losses.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return [row["loss"] for row in rows]


def bar(done):
    """Where the progress bar of rank 0 began and ended; there is no other."""
    shown = [int(n) for n in re.findall(r"(\d+)/90 \[", done.stderr)]
    assert shown == sorted(shown)
    return shown[0], shown[-1]


def processes_of(out):
    """Ids of the processes that train into `out`, and what started them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            if str(out) in entry.read_bytes().decode(errors="replace"):
                found.append(int(entry.parent.name))
    return found


def kill_after(processes, out, step, *options):
    """SIGKILL to every process that trains once `step` steps are in the log."""
    with (out.parent / "killed.txt").open("w+") as said:
        job = subprocess.Popen(command(processes, out, *options), env=environment(), stdout=said, stderr=said)
        end, log = time.monotonic() + 120, out / "losses.jsonl"
        while not (log.exists() and log.read_text().count("\n") >= step):
            assert job.poll() is None and time.monotonic() < end, "the job ended before it could be killed"
            time.sleep(0.002)
        victims = [pid for pid in processes_of(out) if pid != job.pid or processes == 1]
        assert len(victims) == processes
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        code = job.wait(timeout=60)
        said.seek(0)
        assert code == -signal.SIGKILL if processes == 1 else "Signal 9 (SIGKILL) received by PID" in said.read()


def resumes(processes, tmp_path):
    done = run(processes, tmp_path / "whole", "--steps", "90")
    assert done.returncode == 0, done.stderr[-3000:]
    assert bar(done) == (0, 90)
    want = losses(tmp_path / "whole")
    assert len(want) == 90 and want[-1] < 0.85 * want[0]

    out = tmp_path / "killed"
    kill_after(processes, out, 50, "--steps", "90")
    seen = losses(out)
    assert 50 <= len(seen) < 90 and seen == want[: len(seen)]
    checkpoint = max(out.glob("step_*"))
    done = run(processes, out, "--steps", "90")
    assert done.returncode == 0, done.stderr[-3000:]
    first = int(checkpoint.name.removeprefix("step_"))
    assert first in (40, 60, 80) and bar(done) == (first, 90)
    assert losses(out) == want  # bit for bit
    assert [path.name for path in out.glob("step_*")] == ["step_00000090"]


@pytest.mark.slow
def test_killed_and_resumed(tmp_path):
    resumes(1, tmp_path)


@pytest.mark.slow
def test_killed_and_resumed_by_two(tmp_path):
    resumes(2, tmp_path)


@pytest.mark.slow
def test_one_process_and_two_follow_one_curve(tmp_path):
    for processes in (1, 2):
        done = run(processes, tmp_path / str(processes), "--steps", "30")
        assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "2"), rel=1e-4)


@pytest.mark.slow
def test_failed_process_ends_the_job(tmp_path):
    start = time.monotonic()
    done = run(2, tmp_path / "run", "--steps", "100000", "--fail", "1", "10")
    assert time.monotonic() - start < 60
    assert done.returncode == 1
    cause = done.stderr.split("Root Cause (first observed failure)")[1]
    assert "rank      : 1" in cause and "rank 1 was told to fail at step 10" in cause
    assert len(losses(tmp_path / "run")) == 10
    assert not processes_of(tmp_path / "run")
