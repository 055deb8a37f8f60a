"""How it is measured: interleaved samples, medians, memory, and what the machine is."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

QUICK_CALL = 0.05  # seconds: calls faster than this are sampled in bursts
BURST = 4


def others_busy(since: tuple[float, float, float] | None = None) -> tuple[float, float, float] | float:
    """Share of all cores that other processes used since an earlier call's result; without one, such a result."""
    ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    now = (time.perf_counter(), busy, usage.ru_utime + usage.ru_stime)
    if since is None:
        return now
    wall, busy, own = (b - a for a, b in zip(since, now, strict=True))
    return min(1.0, max(0.0, (busy - own) / (wall * (os.cpu_count() or 1))))


def _sample(call: Callable[[], object]) -> tuple[float, bool]:
    """Seconds of one call, its results freed, and whether other work on the machine pushed it off its core."""
    pushed = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    pushed = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - pushed
    return seconds, pushed > seconds / 0.025


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    """Return what replays, in a CUDA graph, all that a function launches.

    What it reads was made on the current stream, which is not the legacy one: that cannot be captured, and a backward runs where its
    forward ran.
    """
    graph = torch.cuda.CUDAGraph()
    for _ in range(3):
        call()
    gc.collect()
    gc.disable()  # an older graph cannot be given back while one is recorded
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            kept = call()  # the memory of the results
    finally:
        gc.enable()
    return lambda: (graph.replay(), kept)


def interleaved(calls: dict[str, Callable[[], object]], seconds: float, least: int = 3, most: int = 60) -> dict[str, dict]:
    """Sample all calls in turn, A B C A B C ..., until each has had its share of the time.

    Each turn waits for a moment in which nothing else runs on the machine, for `seconds` in all at most. A turn of a fast
    call is a burst of samples after one that is thrown away, so that caches hold what they hold when the call is repeated.
    A sample is disturbed if the system preempted the process more often than once per 25 ms; if enough undisturbed samples
    remain, the median is theirs.
    """
    samples: dict[str, list[float]] = {k: [] for k in calls}
    disturbed: dict[str, list[float]] = {k: [] for k in calls}
    spent = dict.fromkeys(calls, 0.0)
    open_calls = list(calls)
    share = seconds / max(1, len(calls))
    patience = seconds
    while open_calls:
        for key in list(open_calls):
            patience -= _wait_for_quiet(patience)
            begin = time.perf_counter()
            first = _sample(calls[key])
            turn = [first] if first[0] > QUICK_CALL else [_sample(calls[key]) for _ in range(BURST)]
            for duration, pushed in turn:
                (disturbed if pushed else samples)[key].append(duration)
            spent[key] += time.perf_counter() - begin
            taken = len(samples[key]) + len(disturbed[key])
            if taken >= least and (spent[key] >= share or len(samples[key]) >= most):
                open_calls.remove(key)
    return {k: _summary(samples[k], disturbed[k], least) for k in calls}


def _wait_for_quiet(patience: float) -> float:
    """Wait until this is the only running thread of the machine; returns the seconds waited."""
    start = time.perf_counter()
    while (waited := time.perf_counter() - start) < patience:
        if int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) <= 1:
            break
        time.sleep(0.002)
    return waited


def _summary(clean: list[float], disturbed: list[float], least: int) -> dict:
    used = clean if len(clean) >= least else clean + disturbed
    quarters = statistics.quantiles(used, n=4) if len(used) > 1 else [used[0]] * 3
    return {
        "median_s": statistics.median(used),
        "quartiles_s": [quarters[0], quarters[2]],
        "least_s": min(clean + disturbed),
        "samples": len(clean),
        "disturbed_samples": len(disturbed),
        "median_uses_disturbed": used is not clean,
        "trusted": used is clean and len(clean) >= len(disturbed),
    }


# --- memory -------------------------------------------------------------------------------------------------------------------
def peak_bytes(call: Callable[[], object]) -> tuple[int, int]:
    """Peak and final bytes of tensors allocated during a call, from PyTorch's allocation events; results kept alive."""
    with _muted(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    del kept
    return peak, level


@contextlib.contextmanager
def _muted():
    """Without the lines that the profiler writes to stdout and stderr."""
    sys.stdout.flush()
    saved = [os.dup(1), os.dup(2)]
    with open(os.devnull, "w") as nothing:
        for stream in (1, 2):
            os.dup2(nothing.fileno(), stream)
    try:
        yield
    finally:
        for stream, old in zip((1, 2), saved, strict=True):
            os.dup2(old, stream)
            os.close(old)


def peak_resident(call: Callable[[], object]) -> int:
    """Growth of this process's resident memory to its peak during a call: what the allocation events cannot see is in it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    kept = call()
    peak = _status("VmHWM")
    del kept
    return peak - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


# --- the machine ----------------------------------------------------------------------------------------------------------------
def machine() -> dict:
    cpu = {}
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}).stdout
        cpu = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines.splitlines())}
    except (OSError, subprocess.CalledProcessError):
        pass
    hugepages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu.get("Model name", platform.processor()),
        "family_model": f"{cpu.get('CPU family', '?')}/{cpu.get('Model', '?')}",
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "caches": {k: cpu[k] for k in ("L1d cache", "L2 cache", "L3 cache") if k in cpu},
        "memory_gib": round(pages / 2**30, 1),
        "transparent_hugepages": hugepages.read_text().strip() if hugepages.exists() else "unknown",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "GOMP_", "MALLOC_", "THP_", "LD_PRELOAD"))},
    }


def compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++", "clang++")):
        try:
            return subprocess.run([name, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
        except (OSError, subprocess.CalledProcessError):
            continue
    return "none"
