"""C++ source -> loaded kernel: the system compiler, a private cache on disk, and the call.

A library is found by the hash of everything that it depends on (source, header, flags, compiler, processor, PyTorch),
so a second process starts warm and a change of any of these builds anew. The cache belongs to its user: the folder is
0700, entries appear by an atomic rename, and nothing is loaded that another user could have written.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .errors import BackendUnavailableError, BuildError
from .memory import addresses
from .plan import Plan

HEADERS = Path(__file__).parent / "cpp"
_TORCH = Path(torch.__file__).parent
# Exact: no contraction, wrapping integers. Vectorised: no pass may turn a select back into a branch (sink, thread-jumps).
_FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fvisibility=default", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-fwrapv", "-fno-tree-sink", "-fno-thread-jumps", "-mprefer-vector-width=512", "-w",
)  # fmt: skip
# Bytes of one core's cache that a tile may fill, and the most neurons. Measured on two cores (Zen 5): where rows are long,
# plain forward stores in long tiles are best; else calls larger than half the last-level cache stream short rows past it
# (the other threads' prefetchers run into them), and the backward's recomputed chunk should stay near.
_TILE = {"forward": (256 * 1024, 4096), "long": (256 * 1024, 32768), "streamed": (256 * 1024, 512), "backward": (72 * 1024, 8192)}
_LONG_ROW = 65536  # neurons per thread
_GRAIN = 32768  # neuron-steps that are worth a thread
_lock = threading.Lock()
_kernels: dict[str, Kernel] = {}


class Kernel:
    """A loaded library and the plan that its function `symbol` runs."""

    def __init__(self, plan: Plan, source: str, path: Path, symbol: str = "run"):
        self.plan, self.source, self.path = plan, source, path
        self._run = getattr(ctypes.CDLL(str(path)), symbol)
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [ctypes.c_int] * 2
        self._step_bytes = sum(a.storage.itemsize for a in plan.arguments if a.kind == "sequence")
        self._pointers = ctypes.c_void_p * max(1, len(plan.arguments))
        self._tile = functools.lru_cache(functools.partial(tile_length, plan))
        self._dims = ctypes.c_int64 * max(1, 2 * sum(a.kind == "param" for a in plan.arguments))

    def __call__(self, arrays: Sequence[Tensor | None], dims: Sequence[int], T: int, N: int) -> None:
        """Run over T steps of N neurons; arrays contiguous, in the order of `plan.arguments`, None where absent."""
        if T == 0 or N == 0:
            return
        pointers = self._pointers(*addresses(arrays))
        tile, threads, large = self.cut(T, N)
        if self._run(pointers, self._dims(*dims), T, N, tile, threads, large):
            raise MemoryError("flexsn: no memory for the scratch rows of a tile")

    def cut(self, T: int, N: int) -> tuple[int, int, bool]:
        """Neurons per tile, threads, and whether finished rows are streamed past the cache."""
        threads = max(1, min(num_threads(), T * N // _GRAIN))
        large = T * N * self._step_bytes > _cache_bytes() // 2
        kind = _kind_of_tile(self.plan.direction, N // threads, large)
        return self._tile(N, threads, kind), threads, large and kind != "long"


def _kind_of_tile(direction: str, row: int, large: bool) -> str:
    if direction == "backward":
        return direction
    return "long" if row > _LONG_ROW else "streamed" if large else "forward"


def tile_length(plan: Plan, N: int, threads: int, kind: str) -> int:
    """Neurons per tile: as many as fit in cache, in full vectors, the same number of tiles for every thread."""
    budget, limit = _TILE[kind]
    most = max(256, min(budget // max(1, plan.tile_bytes), limit) // 64 * 64)
    tiles = -(-N // most)
    tiles = -(-tiles // threads) * threads
    return max(64, (-(-N // tiles) + 63) // 64 * 64)


@functools.cache
def _cache_bytes() -> int:
    """Of the last-level cache; 32 MiB where the system does not say."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 32 << 20


_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def num_threads() -> int:
    """`torch.get_num_threads()`, but 1 in a forked child, where OpenMP would wait for threads that do not exist."""
    return 1 if _forked else torch.get_num_threads()


def check_device(device: torch.device) -> str | None:
    """Why tensors on this device cannot be taken, or None."""
    return None if device.type == "cpu" else f'backend "cpp" runs on the CPU, and the operands are on {device}'


def load(plan: Plan, source: str) -> Kernel:
    """The kernel of a rendered plan, from this process, the disk cache or the compiler, in that order.

    Raises:
        BackendUnavailableError: there is no C++ compiler.
        BuildError: the compiler failed.
    """
    key = _key(source)
    with _lock:
        if key not in _kernels:
            path = cache_folder() / f"{key}.so"
            if not _trusted(path):
                _build(source, path)
            _kernels[key] = Kernel(plan, source, path)
        return _kernels[key]


# --- the cache ------------------------------------------------------------------------------------------------------------
def cache_folder() -> Path:
    """`$FLEXSN_CACHE_DIR/cpp`, by default under the user's cache folder; made if need be, and checked to be private."""
    base = os.environ.get("FLEXSN_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexsn"
    folder = Path(base) / "cpp"
    try:
        Path(base).mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as e:
        return _private_folder(f"cannot make {folder}: {e.strerror}")
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        return _private_folder(f"{folder} is not a folder that only this user can write")
    return folder


@functools.cache
def _private_folder(reason: str) -> Path:
    """A cache for this process alone."""
    import warnings

    warnings.warn(f"flexsn: {reason}; kernels are built anew in every process", RuntimeWarning, stacklevel=2)
    return Path(tempfile.mkdtemp(prefix="flexsn-"))


def _trusted(path: Path) -> bool:
    """Whether an entry exists, is a plain file of this user that nobody else can write, and is whole."""
    try:
        info = path.lstat()
        digest = path.with_suffix(".sha256").read_text()
    except OSError:
        return False
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        return False
    return hashlib.sha256(path.read_bytes()).hexdigest() == digest


def _key(source: str) -> str:
    parts = (source, _header_text(), " ".join(_FLAGS), *_compiler_identity(), _processor(), torch.__version__)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@functools.cache
def _header_text() -> str:
    return "\0".join(p.read_text() for p in sorted(HEADERS.glob("*.h")))


@functools.cache
def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    except OSError:
        return platform.processor() + platform.machine()


@functools.cache
def _find_compiler(wanted: str | None, path: str | None) -> tuple[str, int, int] | None:
    for name in [wanted] if wanted else ["g++", "c++", "clang++"]:
        found = shutil.which(name, path=path)
        if found:
            info = os.stat(found)
            return os.path.realpath(found), info.st_size, info.st_mtime_ns
    return None


def compiler() -> tuple[str, int, int] | None:
    """Path, size and age of the C++ compiler: `$CXX`, else the first of g++, c++, clang++ on `$PATH`."""
    return _find_compiler(os.environ.get("CXX"), os.environ.get("PATH"))


def _compiler_identity() -> tuple[str, ...]:
    found = compiler()
    if found is None:
        raise BackendUnavailableError(
            'backend "cpp" needs a C++ compiler, and neither $CXX nor g++, c++ or clang++ on $PATH is one',
            hint='Install g++ (Debian: `apt install g++`), or use backend="torch", the eager loop.',
        )
    return tuple(map(str, found))


# --- the compiler -----------------------------------------------------------------------------------------------------------
def has_sleef() -> bool:
    """Whether libtorch_cpu carries the vector maths of Sleef (x86-64 builds from PyPI do)."""
    library = _TORCH / "lib" / "libtorch_cpu.so"
    return platform.machine() == "x86_64" and library.exists() and hasattr(ctypes.CDLL(str(library)), "Sleef_expf8_u10")


def _build(source: str, path: Path) -> None:
    """Compile beside the target and move into place: other processes see all of an entry or nothing."""
    compiler_path = _compiler_identity()[0]
    openmp = sorted(glob.glob(str(_TORCH / "lib" / "libgomp*"))) or ["-lgomp"]  # the one runtime that PyTorch uses too
    libraries = [*openmp[:1]]
    flags = [*_FLAGS, f"-I{HEADERS}"]
    if has_sleef():
        flags.append("-DFLEXSN_SLEEF")
        libraries.append(str(_TORCH / "lib" / "libtorch_cpu.so"))
    if "#include <ATen" in source:
        flags.append(f"-I{_TORCH / 'include'}")
        libraries.append(str(_TORCH / "lib" / "libc10.so"))
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
        text = Path(folder) / "kernel.cpp"
        text.write_text(source)
        _run([compiler_path, *flags, "-c", str(text), "-o", f"{folder}/kernel.o"])
        _run([compiler_path, "-shared", f"{folder}/kernel.o", "-o", f"{folder}/kernel.so", *libraries, "-lm"])
        library = Path(folder) / "kernel.so"
        library.chmod(0o700)
        digest = Path(folder) / "kernel.sha256"
        digest.write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        os.replace(text, path.with_suffix(".cpp"))
        os.replace(digest, path.with_suffix(".sha256"))
        os.replace(library, path)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise BuildError(
            f"the compiler failed (exit {done.returncode}): {' '.join(command[:2])} ...\n{done.stderr[-2000:]}",
            hint="Run `flexsn.scan(..., backend='torch')` meanwhile, and report the core: generated source should always build.",
        )
