"""Numbers and places as a reader likes them; shared by the text and the page."""

from __future__ import annotations

import os
from typing import Any

from .._ir.roles import Kind, of_kind
from .._operator.call import Call
from .._plan.parallel_time import why_in_order
from .._plan.plan import KernelPlan
from .._runtime.launch import Launch
from ..errors import as_shown


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def total(nbytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"


def short(line: str | None) -> str:
    """`file.py:number` of a `file:number: text` line, or `cell In[7], line 3` of a notebook's."""
    if not line:
        return ""
    place = as_shown(line).partition(": ")[0].rstrip(":")
    file, _, number = place.rpartition(":")
    return f"{os.path.basename(file)}:{number}" if file else place


def placed(line: str) -> str:
    """The user's code of such a line after its place."""
    return f"{short(line)}: {as_shown(line).partition(': ')[2]}"


_TOLD = {
    "tile": "tiles of {} neurons", "threads": "{} threads", "scratch_bytes": "{} B of scratch per tile",
    "vector_bits": "vectors of {} bits", "vector_registers": "{} vector registers", "warps": "{} warps", "programs": "{} programs",
    "registers": "{} registers per thread", "spills": "{} spills", "shared_bytes": "{} B of shared memory", "note": "{}",
}  # fmt: skip
_FLAGS = {"streamed": "rows streamed past the cache", "loads_ahead": "loads one chunk ahead"}


def launch_words(launch: dict[str, Any]) -> str:
    told = [_TOLD[key].format(value) for key, value in launch.items() if key in _TOLD]
    return ", ".join(told + [text for key, text in _FLAGS.items() if launch.get(key)])


def walk_words(made: KernelPlan, launch: Launch, call: Call) -> str:
    """Return a line on how parts of time are walked, or could be, or why not, where the sizes of the call ask for it."""
    program, back, sizes = call.program, made.direction == "backward", (call.T, call.shapes.numel)
    if not program.backend.parallel_in_time.fit(*sizes):
        return ""
    if launch.parallel_in_time:
        parts, steps = launch.parallel_in_time.cut(*sizes)
        return f"\n  walks {parts} parts of time side by side, of {steps} steps each"
    graph, kind = (program.vjp.graph, Kind.STATE_GRAD) if back else (program.graph, Kind.STATE)
    why = why_in_order(graph, of_kind(graph.outputs, kind))
    if back or not program.sig.exact:
        return f"\n  walks one step after the other: {why}"
    return "" if why else "\n  walks one step after the other; `exact=False` would walk parts of time side by side"


def inexact_gains(call: Call) -> bool:
    """Whether `exact=False` would walk parts of time side by side."""
    program = call.program
    fits = program.sig.exact and program.backend.parallel_in_time.fit(call.T, call.shapes.numel)
    return fits and not why_in_order(program.graph, of_kind(program.graph.outputs, Kind.STATE))
