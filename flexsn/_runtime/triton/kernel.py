"""Triton source -> loaded kernel: Triton's compiler and disk cache, the tile, and the call.

A binary serves every T of its class (by the steps of a chunk, `plan.chunk_for`), and every N of its class (few neurons, or many
with rows aligned or not): sizes are run-time arguments. The backward is built beside the forward, on threads; then, on one thread, all
other classes of N and T. Under `TRITON_INTERPRET=1` (set before triton is imported) kernels run on CPU tensors, slowly: for tests.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import linecache
import math
import operator
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from ..._codegen.language import numbers, values
from ..._codegen.triton import render
from ..._codegen.triton_frame import flags, kernel_name, nullable, packed
from ..._codegen.triton_values import COMPUTE, STORAGE
from ..._plan.plan import KernelPlan, chunks
from ..._torch.cuda import current_stream, interpreter_exits, triton_launch
from ...errors import BackendUnavailableError, BuildError
from ..memory import addresses, data_ptr
from . import passes, tiles
from .tiles import Tile

_lock = threading.Lock()
_interpreter = threading.Lock()  # it patches Triton's language while it runs: one thread at a time
_kernels: MutableMapping[tuple, Kernel] = weakref.WeakValueDictionary()
_first: dict[
    tuple, tuple[float, ...]
] = {}  # the numbers that were asked for first, by what tells kernels apart that take them as arguments


def _after_fork() -> None:
    """Start anew in a forked child: another thread may have held a lock, and those that build are not there."""
    for held in (_lock, _interpreter, passes.reading):
        held._at_fork_reinit()  # type: ignore[attr-defined]  # as the standard library does
    _builders.cache_clear()
    _later.cache_clear()


os.register_at_fork(after_in_child=_after_fork)


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, as Triton reads the variable."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on")


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """While inside, this thread alone uses Triton's interpreter, whose warnings, and NumPy's on values that GPUs take silently, are off."""
    with _interpreter, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def _triton() -> Any:
    try:
        import triton
    except ImportError:
        raise BackendUnavailableError(
            'backend "triton" needs the package triton, which is not installed',
            hint='Install it with `pip install "flexsn[triton]"`, or use backend="torch", the eager loop.',
        ) from None
    return triton


_AS_EAGER = {"enable_fp_fusion": False, "enable_reflect_ftz": False}  # no fused multiply-add; denormals are no zeros in libdevice


class Kernel:
    """A rendered plan, its function, and the binaries made of it: one per tile and GPU. Plans that differ in numbers alone share them."""

    def __init__(self, plan: KernelPlan, source: str):
        self.plan, self.source, self._numbers = plan, source, values(plan)
        self.function = define(source, kernel_name(plan))
        self._builds: dict[tuple[Tile, int], Future] = {}
        self._unasked: set[tuple[Tile, int]] = set()  # of these, those for which nobody waits
        self._expected: set[int] = set()  # GPUs for which all classes are built, or will be
        self._others: list[Kernel] = []  # for other numbers of steps
        self._loaded: dict[tuple[Tile, int], Any] = {}
        self._ready: dict[tuple[int, int, bool], tuple] = {}
        self._shared: Kernel | None = None  # is found as long as this one lives
        self._nullable = [plan.arguments.index(a) for a in nullable(plan)]

    def with_numbers(self, plan: KernelPlan) -> Kernel:
        """Return the kernel of a plan that differs from this one's in numbers alone."""
        if values(plan) == self._numbers:
            return self
        other = copy.copy(self)  # what is built is of both
        other.plan, other._numbers, other._shared = plan, values(plan), self
        return other

    def bind(
        self, present: Sequence[bool], T: int, N: int, parts: int = 1, steps: int = 0
    ) -> Callable[[list[Tensor], Sequence[int]], None]:
        """Return what runs it over T steps of N neurons, on the current device.

        Args:
            present: of each of `plan.arguments`, whether it is there.
            parts, steps: of a plan over parts of time, how many there are, and of how many steps.

        Returns:
            `run(arrays, dims)`: the arguments that are there, in dense memory; two sizes per param.
        """
        cut = (steps,) if self.plan.over_parts else ()
        sizes = (*self._numbers, T, N, *cut, *packed([present[place] for place in self._nullable]))
        absent = [place for place, there in enumerate(present) if not there]

        def run(arrays: list[Tensor], dims: Sequence[int]) -> None:
            index = arrays[-1].get_device()
            pointers = list(map(data_ptr, arrays))
            if not all(pointers):
                addresses(arrays)  # raises for those that have elements
            address = functools.reduce(operator.or_, pointers, N)
            for place in absent:
                pointers.insert(place, 0)
            key = N, index, not address % 16
            launch, grid, function, fixed, constants = self._ready.get(key) or self.prepare(*key)
            launch(grid, parts, 1, current_stream(index), function, *fixed, *pointers, *dims, *sizes, *constants)

        def interpret(arrays: list[Tensor], dims: Sequence[int]) -> None:
            there = iter(arrays)
            self._interpret([next(there) if is_there else None for is_there in present], dims, sizes, parts)

        if T == 0 or N == 0:
            return lambda arrays, dims: None
        return interpret if interpreted() else run

    def prepare(self, N: int, index: int, aligned: bool) -> tuple:
        """Return what launches the binary for N neurons on a GPU."""
        tile, binary = self.loaded(N, index, aligned)
        if len(self._ready) > 1000:
            self._ready.clear()
        self._ready[N, index, aligned] = ready = _ready(binary, N, tile)
        return ready

    def loaded(self, N: int, index: int, aligned: bool) -> tuple[Tile, Any]:
        """Return the tile for N neurons on a GPU, and its binary; it is built and loaded first, if need be."""
        tile = self.tile(N, index, aligned)
        binary = self._loaded.get((tile, index))
        if binary is None:
            binary = self._loaded[tile, index] = self._binary(self.expect(N, index, aligned), tile, index)
        return tile, binary

    def tile(self, N: int, index: int, aligned: bool) -> Tile:
        """Return the tile for N neurons on a GPU."""
        return tiles.tile_for(self.plan, N, _processors(index), aligned)

    def expect(self, N: int, index: int, aligned: bool = True) -> Future:
        """Start to build what a call with N neurons on a GPU needs; the first time, then also what calls of any other size need."""
        first = self.expect_tile(self.tile(N, index, aligned), index)
        if index not in self._expected:
            self._expected.add(index)
            _later().submit(self._expect_others, first, index)
        return first

    def _tiles(self, index: int) -> list[Tile]:
        """Return the tiles that calls of all sizes have."""
        return [self.tile(N, index, aligned) for N, aligned in tiles.CLASSES]

    def _expect_others(self, first: Future, index: int) -> None:
        """Build the tiles for other numbers of neurons, and the kernels for other numbers of steps, once `first`, for which somebody
        waits, is built. What fails here is tried again, and raised, by the call that needs it."""
        wait([first])
        plans = [dataclasses.replace(self.plan, chunk=chunk) for chunk in chunks(self.plan.longest)] if self.plan.longest else []
        self._others = [load(plan, render(plan)) for plan in plans if plan != self.plan]
        for kernel in (self, *self._others):
            for tile in kernel._tiles(index):
                kernel.expect_tile(tile, index, asked=False)

    def expect_tile(self, tile: Tile, index: int, asked: bool = True) -> Future:
        """Start to build a tile, once; again if that failed.

        Args:
            asked: whether somebody waits for it, or will.
        """
        key = tile, index
        with _lock, torch.cuda.device(index):
            build = self._builds.get(key)
            taken_over = asked and key in self._unasked and build is not None and build.cancel()
            if asked:
                self._unasked.discard(key)
            if build is None or taken_over or (build.done() and build.exception() is not None):
                target = _target()
                if asked:
                    build = _builders().submit(self.build, tile, target)
                else:
                    build = _later().submit(_unless_exiting, self.build, tile, target)
                    self._unasked.add(key)
                self._builds[key] = build
            return build

    def _binary(self, build: Future, tile: Tile, index: int) -> Any:
        """Return the binary for a tile, loaded on a GPU; a failed build may be tried again."""
        try:
            binary = build.result()
        except BaseException:  # raised again below, for every caller that waits
            with _lock:
                if self._builds.get((tile, index)) is build:
                    del self._builds[tile, index]
            raise
        with _lock, torch.cuda.device(index):
            binary._init_handles()
        return binary

    def build(self, tile: Tile, target: Any) -> Any:
        """Compile for a `GPUTarget`.

        Raises:
            BuildError: Triton failed.
        """
        triton = _triton()
        kinds = [f"*{STORAGE[a.storage]}" for a in self.plan.arguments]
        kinds += ["i64"] * (2 * sum(a.kind == "param" for a in self.plan.reads))
        kinds += [*(COMPUTE[node.dtype].replace("tl.float", "fp") for node in numbers(self.plan)), "i32", "i64"]
        size = len(kinds) - 1
        kinds += [*(["i32"] * (self.plan.over_parts + len(flags(self.plan)))), "constexpr", "constexpr"]
        constants = {(len(kinds) - 2,): tile.block, (len(kinds) - 1,): tile.ahead}
        even = [i for i, kind in enumerate(kinds) if tile.aligned and (kind[0] == "*" or i == size)]
        attributes = {(i,): [["tt.divisibility", 16]] for i in even}
        try:
            source = triton.compiler.ASTSource(self.function, dict(zip(self.function.arg_names, kinds, strict=True)), constants, attributes)
            options = {"num_warps": tile.warps, "num_stages": 1, **_AS_EAGER, **({"ptx_options": tile.ptxas} if tile.ptxas else {})}
            return passes.compile(source, target, options, together=tiles.neighbours(self.plan, tile))
        except Exception as error:  # whatever a compiler raises
            raise BuildError(
                f"Triton failed on `{kernel_name(self.plan)}`: {type(error).__name__}: {str(error)[-2000:]}",
                hint="Run `flexsn.scan(..., backend='torch')` meanwhile, and report the core: generated source should always build.",
            ) from error

    def _interpret(self, arrays: Sequence[Tensor | None], dims: Sequence[int], sizes: Sequence[Any], parts: int) -> None:
        N = sizes[len(self._numbers) + 1]
        block = min(128 if N <= 4096 else 1024, 1 << (N - 1).bit_length())
        addresses([t for t in arrays if t is not None])
        present = [torch.zeros((), dtype=a.storage) if t is None else t for a, t in zip(self.plan.arguments, arrays, strict=True)]
        taken = [t.float() if t.dtype is torch.bfloat16 else t for t in present]  # the interpreter rounds bfloat16 towards zero
        with interpreting():
            self.function[(math.ceil(N / block), parts)](*taken, *dims, *sizes, BLOCK=block, AHEAD=True)
        for given_one, used in list(zip(present, taken, strict=True))[len(self.plan.reads) :]:
            if used is not given_one:
                given_one.copy_(used)


def _ready(binary: Any, N: int, tile: Tile) -> tuple:
    """Return a launch over N neurons: what launches, the number of programs, the kernel, its metadata, its constants."""
    launch, between = triton_launch(binary)
    return launch, -(-N // tile.block), binary.function, (*between, binary.packed_metadata, None, None, None), (tile.block, tile.ahead)


@functools.cache
def _builders() -> ThreadPoolExecutor:
    """Return the threads that build: Triton's passes run without Python's lock."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="flexsn-build")


@functools.cache
def _later() -> ThreadPoolExecutor:
    """Return the one thread for what nobody waits for: more would keep the program from Python's lock."""
    return ThreadPoolExecutor(1, thread_name_prefix="flexsn-later")


def _unless_exiting(build: Callable[..., Any], *args: Any) -> Any:
    if interpreter_exits():
        raise CancelledError
    return build(*args)


def finish_builds() -> None:
    """Wait until nothing is built for which nobody waits: for measurements."""
    for _ in range(2):  # what is found to be built goes to the end of the line
        _later().submit(lambda: None).result()


def _target() -> Any:
    """Return the current GPU."""
    return _triton().runtime.driver.active.get_current_target()


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def define(source: str, name: str) -> Any:
    """Return the function of generated source; Triton reads the text back through `linecache`."""
    _triton()
    key = hashlib.sha256(source.encode()).hexdigest()[:16]
    file = f"<flexsn {key}>"
    lines = linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space: dict[str, Any] = {"__name__": f"flexsn.generated_{key}"}
    exec(compile(source, file, "exec"), space)
    weakref.finalize(space[name], _forget, file, lines).atexit = False
    return space[name]


def _forget(file: str, lines: tuple) -> None:
    """Drop the text of a function that is gone, unless the same text was defined again since."""
    if linecache.cache.get(file) is lines:
        del linecache.cache[file]


def check_device(device: torch.device) -> str | None:
    """Return why tensors on this device cannot be taken, or None."""
    if device.type == "cuda" or (device.type == "cpu" and interpreted()):
        return None
    return f'backend "triton" runs on NVIDIA GPUs, and the operands are on {device} (on the CPU it runs under TRITON_INTERPRET=1 alone)'


def load(plan: KernelPlan, source: str) -> Kernel:
    """Return the kernel of a rendered plan; binaries are built when a size needs them.

    The numbers that a process asks for first are part of the kernel's text, which is up to 15% faster where registers are scarce
    (`benchmarks/gpu.py --only kernels`); all others share the kernel that takes them as arguments.

    Raises:
        BackendUnavailableError: triton is not installed.
    """
    storages = tuple(a.storage for a in plan.arguments)  # the text names no dtypes of memory
    shared = hashlib.sha256(source.encode()).digest(), storages
    if values(plan) and _first.setdefault(shared, values(plan)) == values(plan):
        plan = dataclasses.replace(plan, numbers=False)
        source = render(plan)
    key = source, storages
    with _lock:
        kernel = _kernels.get(key)
        if kernel is None:
            kernel = _kernels[key] = Kernel(plan, source)
        return kernel.with_numbers(plan)
