"""C++ source -> loaded kernel: the system compiler, a private cache on disk, and the call.

A library is found by the hash of everything that it depends on (source, header, flags, compiler, processor, PyTorch),
so a second process starts warm and a change of any of these builds anew. In a process there is one kernel per source,
built once however many threads ask for it, and unloaded when no program uses it any more.
"""

from __future__ import annotations

import _ctypes
import contextlib
import copy
import ctypes
import functools
import hashlib
import os
import platform
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .._codegen.language import values
from .._plan.plan import KernelPlan
from ..errors import BackendUnavailableError, BuildError
from . import cpp_compiler as launch_compiler
from . import disk_cache as launch_cache
from .cpp_compiler import compiler
from .fork import num_threads
from .memory import addresses, data_ptr

__all__ = ["HEADERS", "Kernel", "check_device", "compiler", "load", "tile_length"]

HEADERS = Path(__file__).parent / "cpp"
_TORCH = Path(torch.__file__).parent
# Exact: no contraction, wrapping integers.
_EXACT = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=default", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-w",
)  # fmt: skip
# Fast, where a compiler takes them. Vectorised: no pass may turn a select back into a branch (pre, sink, thread-jumps), and no limit
# keep the vector functions of a long step from being inlined into its loop.
_FAST = (
    "-march=native", "-fopenmp-simd", "-fno-tree-pre", "-fno-tree-sink", "-fno-thread-jumps", "-mprefer-vector-width=512",
    "--param=large-function-growth=100000", "--param=inline-unit-growth=100000",
)  # fmt: skip
_FLAGS = _EXACT + _FAST
_PROBE = '#include "tile.h"\nextern "C" int run(int threads) { flexsn::parallel(threads, [](int, int) {}); return 0; }\n'
# Bytes of one core's cache that a tile may fill, and the most neurons. Measured on two cores (Zen 5): calls larger than
# half the last-level cache stream their rows past it, best in rows of a few KiB.
_TILE = {"forward": (256 * 1024, 4096), "streamed": (256 * 1024, 2048), "backward": (144 * 1024, 8192)}
_GRAIN = 32768  # neuron-steps that are worth a thread
_lock = threading.Lock()  # held for look-ups alone
_kernels: MutableMapping[tuple, Kernel] = weakref.WeakValueDictionary()  # by the key of the source, and the numbers
_builds: dict[str, Future[Kernel]] = {}  # those under way


class Kernel:
    """A loaded library and the plan that its function `symbol` runs; plans that differ in numbers alone share a library file."""

    def __init__(self, plan: KernelPlan, source: str, path: Path, symbol: str = "run"):
        self.plan, self.source, self.path = plan, source, path
        self.run_pointer = _entry_point(path, self, symbol)
        self.run_pointer.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 3 + [ctypes.c_int] * 2
        self.numbers = struct.pack(f"={len(values(plan))}d", *values(plan))
        self._step_bytes = sum(a.storage.itemsize for a in plan.arguments if a.kind == "sequence")
        self._tile = functools.lru_cache(functools.partial(tile_length, plan))

    def bind(self, present: Sequence[bool], T: int, N: int, parts: int = 1) -> Callable[[list[Tensor], Sequence[int]], None]:
        """As `backends.Kernel.bind`; `parts`: how many parts of time run side by side, each of T steps."""
        if not T * N:
            return lambda arrays, dims: None
        if parts > 1:
            function = _entry_point(self.path, self, "run_parts")
            function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 4 + [ctypes.c_int] * 2
            sizes: tuple[int, ...] = (T, N, parts)
        else:
            function, sizes = self.run_pointer, (T, N)
        absent = [place for place, there in enumerate(present) if not there]
        pack_pointers = struct.Struct(f"={len(present)}Q").pack
        pack_dims = struct.Struct(f"={2 * sum(a.kind == 'param' for a in self.plan.arguments)}q").pack
        M = N * parts
        fixed = self.cut(T, M) if T * M < 2 * _GRAIN else None  # too little for two threads, however many there are

        def run(arrays: list[Tensor], dims: Sequence[int]) -> None:
            pointers = list(map(data_ptr, arrays))
            if not all(pointers):
                addresses(arrays)  # raises for those that have elements
            for place in absent:
                pointers.insert(place, 0)
            if function(pack_pointers(*pointers), self.numbers, pack_dims(*dims), *sizes, *(fixed or self.cut(T, M))):
                raise MemoryError("flexsn: no memory for the scratch rows of a tile")

        return run

    def carry(self) -> Callable[[Sequence[Tensor | None], int, int], None]:
        """Return the function that passes on, of a plan with a matrix, what is carried from part to part: `carry(arrays, N, parts)`."""
        function = _entry_point(self.path, self, "carry")
        function.argtypes = [ctypes.c_void_p] + [ctypes.c_int64] * 2
        function.restype = None

        def run(arrays: Sequence[Tensor | None], N: int, parts: int) -> None:
            function(struct.pack(f"={len(arrays)}Q", *[0 if a is None else data_ptr(a) for a in arrays]), N, parts)

        return run

    def cut(self, T: int, N: int) -> tuple[int, int, bool]:
        """Return neurons per tile, threads, and whether finished rows are streamed past the cache."""
        threads = max(1, min(num_threads(), T * N // _GRAIN))
        large = T * N * self._step_bytes > _cache_bytes() // 2
        direction = self.plan.direction
        return self._tile(N, threads, "streamed" if large and direction == "forward" else direction), threads, large


def tile_length(plan: KernelPlan, N: int, threads: int, kind: str) -> int:
    """Return the neurons per tile: as many as fit in cache, in full vectors, the same number of tiles for every thread."""
    budget, limit = _TILE[kind]
    most = max(256, min(budget // max(1, plan.tile_bytes), limit) // 64 * 64)
    tiles = -(-N // most)
    tiles = -(-tiles // threads) * threads
    return max(64, (-(-N // tiles) + 63) // 64 * 64)


@functools.cache
def _cache_bytes() -> int:
    """Return the size of the last-level cache; 32 MiB where the system does not say."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 32 << 20


def _entry_point(path: Path, owner: object | None, symbol: str) -> ctypes._NamedFuncPointer:
    """Return the function `symbol` of a library, which is unloaded when `owner` dies; raises OSError if it cannot be loaded."""
    library = ctypes.CDLL(str(path))
    if owner is not None:
        weakref.finalize(owner, _ctypes.dlclose, library._handle).atexit = False
    try:
        return getattr(library, symbol)
    except AttributeError:
        raise OSError(f"{path} has no kernel in it") from None
    finally:
        if owner is None:
            _ctypes.dlclose(library._handle)


def _after_fork() -> None:
    """Start anew in a forked child: the threads that build are not there, and one may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _builds.clear()


os.register_at_fork(after_in_child=_after_fork)


def check_device(device: torch.device) -> str | None:
    """Return why tensors on this device cannot be taken, or None."""
    return None if device.type == "cpu" else f'backend "cpp" runs on the CPU, and the operands are on {device}'


def load(plan: KernelPlan, source: str) -> Kernel | Later:
    """Return the kernel of a rendered plan, from this process, the disk cache or the compiler, in that order.

    Raises:
        BackendUnavailableError: there is no C++ compiler.
        BuildError: the compiler failed, or no disk takes what it makes.
    """
    key, numbers = _key(source), values(plan)
    if (wanted := getattr(_here, "wanted", None)) is not None and not launch_cache.trusted(launch_cache.folder() / f"{key}.so"):
        wanted[key] = plan, source
        return Later(plan, source)
    while True:
        with _lock:
            kernel, build = _kernels.get((key, *numbers)), _builds.get(key)
            if kernel is not None:
                return kernel
            if build is None:
                own = _builds[key] = Future[Kernel]()
        if build is None:
            return _settle(own, plan, source, key)
        error = build.exception()  # waits
        if isinstance(error, Exception):
            raise copy.copy(error) from error
        # it is built, perhaps for other numbers, or that thread was interrupted: this one looks again


def start(plan: KernelPlan, source: str) -> None:
    """Start to build a kernel that is not on disk, on a thread; `load` waits for it.

    Raises:
        BackendUnavailableError: there is no C++ compiler.
    """
    key = _key(source)
    with _lock:
        known = key in _builds
    if not known and not hasattr(_here, "wanted") and not (launch_cache.folder() / f"{key}.so").exists():
        launch_compiler.in_background(functools.partial(load, plan, source))


@dataclass(frozen=True)
class Later:
    """A kernel that `collected` has put off: it fills what it writes with zeros."""

    plan: KernelPlan
    source: str

    def bind(self, present: Sequence[bool], T: int, N: int) -> Callable[[list[Tensor], Sequence[int]], None]:
        writes = sum(present[len(self.plan.reads) :])
        bind = functools.cache(lambda: load(self.plan, self.source).bind(present, T, N))

        def run(arrays: list[Tensor], dims: Sequence[int]) -> None:
            if not hasattr(_here, "wanted"):  # what keeps it has outlived the collection
                return bind()(arrays, dims)
            for array in arrays[len(arrays) - writes :]:
                array.zero_()

        return run


_here = threading.local()


@contextlib.contextmanager
def collected() -> Iterator[dict[str, tuple[KernelPlan, str]]]:
    """Build nothing on this thread while inside; gives the plans and sources of the kernels that calls would have built."""
    _here.wanted = found = dict[str, tuple[KernelPlan, str]]()
    try:
        yield found
    finally:
        del _here.wanted


def _settle(build: Future[Kernel], plan: KernelPlan, source: str, key: str) -> Kernel:
    """Make a kernel, for this thread and those that wait."""
    try:
        kernel = _make(plan, source, key)
    except BaseException as error:  # an interrupt too; raised again below, and for every thread that waits
        with _lock:
            _builds.pop(key, None)
        build.set_exception(error)
        raise
    with _lock:
        _kernels[(key, *values(plan))] = kernel
        _builds.pop(key, None)
    build.set_result(kernel)
    return kernel


def _make(plan: KernelPlan, source: str, key: str) -> Kernel:
    """Return a kernel from the disk cache or the compiler. What keeps every kernel from being built is not tried again in this process."""
    folder = launch_cache.folder()
    place = launch_compiler.identity(), folder
    if place in _unavailable and not launch_cache.trusted(folder / f"{key}.so"):
        raise copy.copy(_unavailable[place])
    try:
        return _from_disk(plan, source, folder, key)
    except BackendUnavailableError as error:
        _unavailable[place] = copy.copy(error)
        raise


_unavailable: dict[tuple, BackendUnavailableError] = {}  # by compiler and cache


def _from_disk(plan: KernelPlan, source: str, folder: Path, key: str) -> Kernel:
    """Return a kernel from a folder; where that disk fails, or runs no programs, from one for this process alone."""
    try:
        return _from_folder(plan, source, folder / f"{key}.so")
    except OSError as error:
        reason = f"the cache {folder} cannot be used: {error}"
    try:
        return _from_folder(plan, source, launch_cache.private_folder(reason) / f"{key}.so")
    except OSError as error:
        raise BackendUnavailableError(
            f'backend "cpp" has no place for its kernels: {reason}; nor can a folder for temporary files: {error}',
            hint="Set $FLEXSN_CACHE_DIR to a folder of your own, on a disk with space from which programs may run.",
        ) from error


def _from_folder(plan: KernelPlan, source: str, path: Path) -> Kernel:
    if launch_cache.trusted(path):
        try:
            return Kernel(plan, source, path)
        except OSError:  # what it was linked with is gone
            pass
    _build(source, path)
    return Kernel(plan, source, path)


def _key(source: str) -> str:
    parts = (source, _header_text(), " ".join(_FLAGS), *launch_compiler.identity(), _processor(), torch.__version__)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@functools.cache
def _header_text() -> str:
    return "\0".join(p.read_text() for p in sorted(HEADERS.glob("*.h")))


@functools.cache
def _processor() -> str:
    """Return what `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    except OSError:
        return platform.processor() + platform.machine()


# --- the build ------------------------------------------------------------------------------------------------------------
@functools.cache
def has_sleef() -> bool:
    """Whether libtorch_cpu carries the vector maths of Sleef (x86-64 builds from PyPI do)."""
    library = _TORCH / "lib" / "libtorch_cpu.so"
    return platform.machine() == "x86_64" and library.exists() and hasattr(ctypes.CDLL(str(library)), "Sleef_expf8_u10")


def _torch_stub(command: str, folder: Path) -> Path:
    """Return an empty library of the name of PyTorch's own, for the linker alone, which takes longer to read the real one than a kernel to
    compile. Where a kernel is loaded, the real one is there: it has the vector maths, and leads to the OpenMP runtime whose threads run
    kernels, too."""
    stub = folder / "libtorch_cpu.so"
    launch_compiler.run([command, "-shared", "-nostdlib", f"-Wl,-soname,{stub.name}", "-x", "c", os.devnull, "-o", str(stub)], folder)
    return stub


def _build(source: str, path: Path, symbol: str = "run") -> None:
    """Compile beside the target and move into place what can be loaded."""
    compiler = launch_compiler.identity()
    core = source.partition(":")[0].removeprefix("// ")  # as the title of a kernel says
    told = f"building the kernels of `{core}` with {Path(compiler[0]).name} (kept in {path.parent} for the next time)"
    with launch_cache.workshop(path) as folder:
        try:
            library = _library(source, folder, symbol, _taken.get((compiler, _FLAGS), _FLAGS), told)
        except BuildError:  # of this kernel, of a flag, or of every program
            if (compiler, _FLAGS) in _taken or (taken := _flags_taken(folder)) == _FLAGS:
                raise
            _taken[compiler, _FLAGS] = taken
            library = _library(source, folder, symbol, taken, told)
        launch_cache.publish(library, folder / "kernel.cpp", path)


def _library(source: str, folder: Path, symbol: str, flags: Sequence[str], told: str = "") -> Path:
    """Compile into a folder; returns the library, which can be loaded. `told`: what the user hears if it takes long."""
    text, compiled, library = folder / "kernel.cpp", folder / "kernel.o", folder / "kernel.so"
    text.write_text(source)
    command, more = launch_compiler.identity()[0], [f"-I{HEADERS}"]
    if has_sleef():
        more.append("-DFLEXSN_SLEEF")
    if "#include <ATen" in source:
        more.append(f"-I{_TORCH / 'include'}")
    launch_compiler.run([command, *flags, *more, "-c", str(text), "-o", str(compiled)], folder, told)
    stub = _torch_stub(command, folder)
    launch_compiler.run([command, "-shared", str(compiled), "-o", str(library), "-Wl,--no-as-needed", str(stub), "-lm"], folder)
    if not library.is_file():
        raise BuildError(f"the compiler {command} says that it succeeded, and made no library", hint="Set $CXX to another one.")
    _entry_point(library, None, symbol)
    return library


# By compiler and flags: those flags that it takes, where it does not take all. A kernel's key need not name them: they follow from both.
_taken: dict[tuple, tuple[str, ...]] = {}


def _flags_taken(folder: Path) -> tuple[str, ...]:
    """Return those of `_FLAGS` that the compiler takes.

    Raises:
        BackendUnavailableError: it builds no program at all.
    """
    command = launch_compiler.identity()[0]
    try:
        _library(_PROBE, folder, "run", _EXACT)
    except BuildError as error:
        raise BackendUnavailableError(
            f'backend "cpp" needs a C++ compiler, and {command} cannot build the smallest program: {error.reason}',
            hint="Set $CXX to one that can (Debian: `apt install g++`), or $FLEXSN_BUILD_TIMEOUT to more seconds if it is slow, or use "
            'backend="torch", the eager loop.',
        ) from error
    text, compiled = folder / "kernel.cpp", folder / "kernel.o"
    text.write_text("")
    return tuple(f for f in _FLAGS if f not in _FAST or _takes([command, "-Werror", f, "-c", str(text), "-o", str(compiled)], folder))


def _takes(command: Sequence[str], folder: Path) -> bool:
    """Whether the compiler knows a flag, also without a warning: that is how clang says that it passes over one of GCC's."""
    try:
        launch_compiler.run(command, folder)
    except BuildError:
        return False
    return True
