"""Many C++ kernels in one library: one start of the compiler, one reading of the headers.

Inside `deferred()` the backend "cpp" builds nothing: calls give what memory holds. `build()` then compiles all the kernels
asked for, and the same calls compute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flexsn._codegen import triton_frame
from flexsn._plan.plan import KernelPlan
from flexsn._runtime import cpp_kernel as launch_cpp
from flexsn._runtime import disk_cache as launch_cache
from flexsn._runtime.backends import BACKENDS
from flexsn._runtime.triton import kernel as launch_triton
from flexsn._runtime.triton import tiles as triton_tiles

# As users get them; or fast to build: the same statements without vector loops and threads.
AS_USERS_GET_THEM = launch_cpp._FLAGS
FAST_BUILD = ("-std=c++17", "-O0", "-march=native", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fwrapv", "-w")


class Deferred:
    """A kernel that is built later; until then a call writes nothing."""

    def __init__(self, plan: KernelPlan, source: str):
        self.plan, self.source = plan, source
        self.kernel: launch_cpp.Kernel | None = None

    def bind(self, *sizes: Any) -> Callable[..., None]:
        return lambda *arrays: self.kernel.bind(*sizes)(*arrays) if self.kernel is not None else None


@contextlib.contextmanager
def deferred() -> Iterator[list[Deferred]]:
    """Collects the kernels that `backend="cpp"` would build."""
    found: dict[str, Deferred] = {}
    kernels: list[Deferred] = []

    def load(plan: KernelPlan, source: str) -> Deferred:
        kernels.append(Deferred(plan, source))
        found.setdefault(source, kernels[-1])
        return kernels[-1]

    before = BACKENDS["cpp"]
    BACKENDS["cpp"] = dataclasses.replace(before, load=load)
    try:
        yield kernels
    finally:
        BACKENDS["cpp"] = before


def build(kernels: Sequence[Deferred], flags: Sequence[str] = FAST_BUILD, folder: Path | None = None) -> None:
    """One library of all the kernels; equal sources are built once."""
    sources = {source: i for i, source in enumerate(dict.fromkeys(k.source for k in kernels))}
    if not sources:
        return
    place = folder or Path(tempfile.mkdtemp(prefix="batch-", dir=launch_cache.folder()))
    path = place / f"batch{next(_count)}.so"
    before = launch_cpp._FLAGS
    launch_cpp._FLAGS = tuple(flags)  # type: ignore[assignment]  # a tuple of another length
    try:
        launch_cpp._build(joined(list(sources)), path, "run_0")
    finally:
        launch_cpp._FLAGS = before
    for kernel in kernels:
        kernel.kernel = launch_cpp.Kernel(kernel.plan, kernel.source, path, f"run_{sources[kernel.source]}")


_count = itertools.count()


def joined(sources: Sequence[str]) -> str:
    """One translation unit: the tops once, every kernel in a namespace of its own, its functions renamed: `run_0`, `run_1`, ..."""
    tops: list[str] = []
    bodies: list[str] = []
    for i, source in enumerate(sources):
        lines = source.splitlines()
        start = lines.index("using namespace flexsn;")
        tops += [line for line in lines[:start] if not line.startswith("//")]
        body = "\n".join(lines[start + 1 :])
        body = body.replace("int run(", f"int run_{i}(").replace("run_parts(", f"run_parts_{i}(")
        bodies.append(f"namespace kernel_{i} {{\n{body}\n}}")
    unique = list(dict.fromkeys(tops))
    includes = [t for t in unique if t.startswith("#")]
    return "\n".join([*includes, *(t for t in unique if t not in includes), "using namespace flexsn;", *bodies, ""])


@contextlib.contextmanager
def on_gpu(many: bool) -> Iterator[None]:
    """On a GPU, kernels for the sizes of a call alone; with `many`, those that a call with many neurons has. Without the fast
    divisions of gradients, whose error the bounds of rounding errors do not know."""
    before = triton_tiles.CLASSES, triton_tiles.WIDE, launch_triton.Kernel._expect_others
    triton_tiles.CLASSES, launch_triton.Kernel._expect_others = (), lambda *args: None  # type: ignore[assignment, method-assign]
    smooth, triton_frame.smooth = triton_frame.smooth, lambda graph: set()
    if many:
        triton_tiles.WIDE = 0
    try:
        yield
    finally:
        triton_tiles.CLASSES, triton_tiles.WIDE, launch_triton.Kernel._expect_others = before  # type: ignore[method-assign]
        triton_frame.smooth = smooth
