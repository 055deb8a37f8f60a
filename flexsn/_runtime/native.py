"""Calls without Python between them and their kernels: `_runtime/cpp/native.cpp`, an extension that is built once for a PyTorch.

A launch in C++ serves the operands that it was made for, a door (`run.Call.door`) the calls and backwards that it has seen in
Python before; any other they decline, and Python takes it. Nothing waits for the build: a process that launches many kernels
starts it in the background. Until it is done, or where it cannot be (no compiler, no headers of Python), Python does the same in
more time; `flexsn doctor` says which of these holds.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import FlexSNError
from . import cpp_compiler as launch_compiler
from . import disk_cache as launch_cache
from .memory import LEAST

SOURCE = Path(__file__).parent / "cpp" / "native.cpp"
_TORCH = Path(torch.__file__).parent
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-DNDEBUG", "-w")
_MANY = 200  # launches in a process after which the build is worth it

module: Any = None  # the extension, once it is loaded
generation = 0  # of its launches: those of an earlier one decline
_served: tuple[Callable[..., Any], ...] = ()  # what its doors call in Python
_asked = 0
_builder: threading.Thread | None = None
_failed: str | None = None


def wanted() -> bool:
    """Whether the extension is there. Every launch that could use it asks: the first loads what was built before, and one of many
    starts the build."""
    global _asked
    if module is not None:
        return True
    if _failed is None and _builder is None:
        _asked += 1
        if _asked == 1:
            _start(load_built)
        elif _asked == _MANY:
            start_build()
    return module is not None


def start_build() -> threading.Thread:
    """Build and load it on a thread, once."""
    global _builder
    if _builder is None:
        _builder = threading.Thread(target=_start, args=(build,), name="flexsn-native", daemon=True)
        _builder.start()
    return _builder


def _start(step: Callable[[], None]) -> None:
    """Whatever stands in its way is no error of the call: Python goes on doing the same, and `state` says why."""
    global _failed
    try:
        step()
    except (FlexSNError, OSError, ImportError) as error:
        _failed = f"{type(error).__name__}: {error}"


def state() -> str:
    if module is not None:
        return "loaded"
    if _failed is not None:
        return f"cannot be used: {_failed}"
    return "being built" if _builder is not None else f"not built yet: a process builds it in the background after {_MANY} launches"


def build() -> None:
    """Load the extension; build it first, if need be.

    Raises:
        FlexSNError: there is no compiler, or it fails.
        OSError: no disk takes it.
    """
    path = _path()
    if not launch_cache.trusted(path):
        with launch_cache.workshop(path) as folder:
            text, library = folder / "kernel.cpp", folder / "kernel.so"
            text.write_text(SOURCE.read_text())
            headers = [f"-I{_TORCH / 'include'}", f"-I{sysconfig.get_paths()['include']}"]
            libraries = [f"-L{_TORCH / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
            command = [launch_compiler.identity()[0], *_FLAGS, *headers, str(text), "-o", str(library), *libraries]
            launch_compiler.run(command, folder)
            launch_cache.publish(library, text, path)
    load_built()


def load_built() -> None:
    """Load the extension, if it was built before."""
    global module
    path = _path()
    if module is not None or not launch_cache.trusted(path):
        return
    loader = importlib.machinery.ExtensionFileLoader("flexsn_native", str(path))
    spec = importlib.util.spec_from_file_location("flexsn_native", path, loader=loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    loaded.start(*_served)
    module = loaded


def _path() -> Path:
    parts = (SOURCE.read_text(), *_FLAGS, *launch_compiler.identity(), torch.__version__, sys.version, str(_TORCH))
    return launch_cache.folder() / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.so"


def serve(backward: Callable[..., Any], params: Callable[..., Any], statics: Callable[..., Any]) -> None:
    """What doors call in Python: `backward(call, saved, grads, needs)` takes the backwards that they decline, `params(call, prologue,
    statics)` computes what a launch takes beside them, and `statics(call, epilogue, statics, written)` the gradients of statics."""
    global _served
    _served = backward, params, statics


def is_large(result: Tensor) -> bool:
    """Whether a result on the CPU comes from `_runtime/memory.py`."""
    return result.numel() * result.itemsize >= LEAST


def launch(
    kernel: Any, gpu: int | None, reads: Sequence[tuple[Any, int]], writes: Sequence[Tensor], present: Sequence[bool], dims: Sequence[int],
    T: int, N: int, entry: tuple[Any, Any],
) -> Any:  # fmt: skip
    """A launch of the extension: a kernel at given sizes, for operands and results like these.

    Args:
        gpu: index of the GPU, None on a CPU.
        reads: what the kernel reads, each with its place among the operands of the launch.
        present: of the kernel's arguments, which are passed.
        dims: two sizes per param.
        entry: `kernel.entry`.
    """
    places = iter(range(len(reads) + len(writes)))
    arguments = [next(places) if there else -1 for there in present]
    kinds = [[(tuple(t.shape), t.stride(), t.dtype, place) for t, place in given] for given in (reads, [(t, 0) for t in writes])]
    return module.launch(kernel, -1 if gpu is None else gpu, *kinds, arguments, dims, T, N, *entry)


def renew() -> None:
    """Launches made so far decline from now on: what they were made from has changed."""
    global generation
    generation += 1
    if module is not None:
        module.renew()


def _after_fork() -> None:
    """In a child: kernels run on one thread, and nothing is being built."""
    global _builder, _asked
    _builder, _asked = None, 0
    renew()


os.register_at_fork(after_in_child=_after_fork)
