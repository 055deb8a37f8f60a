"""The backends, each in one row: how it renders, builds, and cuts time into chunks. To add one: add a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .._codegen import cpp as render_cpp
from .._codegen import triton as render_triton
from .._plan import plan
from . import cpp_kernel as launch_cpp
from . import triton_kernel as launch_triton


@dataclass(frozen=True)
class Backend:
    """What a backend is.

    Attributes:
        render: plan -> source text.
        load: plan and source -> kernel.
        chunk: steps of a chunk, for numbers of inputs, states and ops of a step, bytes of an input's element, and whether
            checkpoints are stored.
        chunk_for: steps of a chunk in calls of T steps, of that and T.
        refuses: why it cannot run on a device, or None.
        lazy: kernels are built for the sizes of a call; their `expect` starts that early.
    """

    render: Callable[[plan.Plan], str]
    load: Callable[[plan.Plan, str], Any]
    chunk: Callable[[int, int, int, int, bool], int]
    chunk_for: Callable[[int, int], int]
    refuses: Callable[[torch.device], str | None]
    lazy: bool = False


BACKENDS = {
    "cpp": Backend(render_cpp.render, launch_cpp.load, plan.chunk_in_cache, lambda chunk, T: chunk, launch_cpp.check_device),
    "triton": Backend(
        render_triton.render, launch_triton.load, plan.chunk_in_registers, plan.chunk_for, launch_triton.check_device, lazy=True
    ),
}
