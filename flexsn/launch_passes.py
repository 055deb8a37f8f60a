"""Triton's compiler, by a shorter way where a thread has one neuron.

For every load and store, Triton looks through all that is connected to it for accesses that could be widened (its pass
`coalesce`): over the unrolled steps of a chunk that is most of a build. Where a thread has one element there is nothing to
widen, and the passes below give the same binary, to the byte (`tests/test_triton.py` compares).

Triton 3.6.0 has a hook by which a program exchanges stages of its compiler; this module sets it. Other versions, GPUs that
are not NVIDIA's, and programs that exchange this stage themselves get Triton's own passes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any

_building = threading.local()  # `short`: whether this thread builds by the short way


def compile(source: Any, target: Any, options: Mapping[str, Any], *, one_each: bool) -> Any:
    """As `triton.compile`; `one_each`: whether a thread has one element of every tensor."""
    import triton

    if triton.__version__ == "3.6.0" and target.backend == "cuda":
        _hook()
        _building.short = one_each
    try:
        return triton.compile(source, target=target, options=dict(options))
    finally:
        _building.short = False


@functools.cache
def _hook() -> None:
    """Set the hook; one that is there runs first."""
    from triton import knobs

    before = knobs.runtime.add_stages_inspection_hook

    def stages_of(backend: Any, stages: dict, options: Any, language: Any, capability: Any) -> None:
        own = stages["ttgir"]
        if before is not None:
            before(backend, stages, options, language, capability)
        if getattr(_building, "short", False) and stages.get("ttgir") is own:
            stages["ttgir"] = functools.partial(_to_ttgir, options, capability)

    knobs.runtime.add_stages_inspection_hook = stages_of


def _to_ttgir(options: Any, capability: int, module: Any, metadata: dict) -> Any:
    """The stage from Triton's IR to that for GPUs."""
    from triton._C.libtriton import ir, passes

    manager = ir.pass_manager(module.context)
    manager.enable_debug()
    passes.ttir.add_convert_to_ttgpuir(manager, f"cuda:{capability}", options.num_warps, 32, options.num_ctas)
    passes.ttir.add_loop_aware_cse(manager)
    passes.ttir.add_triton_licm(manager)
    passes.common.add_canonicalizer(manager)
    manager.run(module, "make_ttgir")
    metadata["tensordesc_meta"] = module.get_tensordesc_metadata()
    return module
