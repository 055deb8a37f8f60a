"""Triton's compiler, by a shorter way.

For every load and store, Triton looks through all that is connected to it for the widest access (its pass `coalesce`): over
the unrolled steps of a chunk that is most of a build, and where it gives loads another layout than the arithmetic, values go
through shared memory between the two. Here the widest access is known: how many neurons a thread has side by side. So it is
written into the one layout that all tensors of a kernel share, and nothing is left to look for. Where a thread has one neuron
the binary is Triton's own, to the byte; else its loads and stores are (`tests/codegen/test_triton.py` compares).

Triton 3.6.0 has a hook by which a program exchanges stages of its compiler; this module sets it. Other versions, GPUs that
are not NVIDIA's, and programs that exchange this stage themselves get Triton's own passes.

Kernels are built on threads, and Triton's reader of source sets the program's warning filters, and puts them back, at every
node of a syntax tree: what another thread sets meanwhile would be undone, or what Triton sets would stay. Here it does not.

One thread at a time reads source. Triton's reader is Python code, of which two threads run no faster than one: the backward, which is
asked for first and whose passes take longest, would be read only when the forward is, too. And of two threads that parse at once CPython
3.11 may fail one ("AST constructor recursion depth mismatch").
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

reading = threading.Lock()  # held while source is read
_building = threading.local()  # `here`: while this thread is in `compile`; `together`: as there, if by the short way


def compile(source: Any, target: Any, options: Mapping[str, Any], *, together: int) -> Any:
    """Compile as `triton.compile` does, for a kernel of elementwise operations on blocks of one size.

    Args:
        together: how many neighbours of a block a thread loads at once.
    """
    import triton

    _leave_filters_alone()
    _building.here = True
    if triton.__version__ == "3.6.0" and target.backend == "cuda":
        _hook()
        _building.together = together
    with reading:
        source.hash()  # which parses
    source.make_ir = _alone(source.make_ir)
    try:
        return triton.compile(source, target=target, options=dict(options))
    finally:
        _building.here, _building.together = False, None


def _alone(read: Callable) -> Callable:
    """Return a function that runs on one thread at a time."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with reading:
            return read(*args, **kwargs)

    return run


def _leave_filters_alone() -> None:
    from triton.compiler import code_generator

    if not isinstance(code_generator.warnings, _Warnings):
        code_generator.warnings = _Warnings()


class _Warnings:
    """The module `warnings`, as Triton's reader of source sees it: while flexsn builds, it sets no filters."""

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def catch_warnings(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if getattr(_building, "here", False) else warnings.catch_warnings()

    def simplefilter(self, *args: Any) -> None:
        if not getattr(_building, "here", False):
            warnings.simplefilter(*args)


def _hook() -> None:
    """Set the hook, if it is not there (a scope of Triton's knobs that ends takes it away)."""
    from triton import knobs

    before = knobs.runtime.add_stages_inspection_hook
    if not isinstance(before, _Stages):
        knobs.runtime.add_stages_inspection_hook = _Stages(before)


@dataclass(frozen=True)
class _Stages:
    """The hook; one that was there runs first."""

    before: Callable[..., None] | None

    def __call__(self, backend: Any, stages: dict, options: Any, language: Any, capability: Any) -> None:
        own = stages["ttgir"]
        if self.before is not None:
            self.before(backend, stages, options, language, capability)
        together = getattr(_building, "together", None)
        if together is not None and stages.get("ttgir") is own:
            stages["ttgir"] = functools.partial(_to_ttgir, options, capability, together)


def _to_ttgir(options: Any, capability: int, together: int, module: Any, metadata: dict) -> Any:
    """Run the stage from Triton's IR to that for GPUs."""
    from triton._C.libtriton import ir, passes

    manager = ir.pass_manager(module.context)
    manager.enable_debug()
    passes.ttir.add_convert_to_ttgpuir(manager, f"cuda:{capability}", options.num_warps, 32, options.num_ctas)
    manager.run(module, "make_ttgir")
    if together > 1:
        module = _laid_out(module, together)
    manager = ir.pass_manager(module.context)
    manager.enable_debug()
    passes.ttir.add_loop_aware_cse(manager)
    passes.ttir.add_triton_licm(manager)
    passes.common.add_canonicalizer(manager)
    manager.run(module, "make_ttgir")
    metadata["tensordesc_meta"] = module.get_tensordesc_metadata()
    return module


def _laid_out(module: Any, together: int) -> Any:
    """Return the module with neighbours in one thread, where its layout deals them out one by one."""
    from triton._C.libtriton import ir

    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(str(module).replace("sizePerThread = [1]", f"sizePerThread = [{together}]"))
        file.flush()
        read = ir.parse_mlir_module(file.name, module.context)
    read.context = module.context
    return read
