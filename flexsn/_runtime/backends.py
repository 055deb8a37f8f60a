"""What a loaded kernel is, and the backends that load them, each in one row, and which one serves a call. To add one: add a row here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .._codegen import cpp as render_cpp
from .._codegen import triton as render_triton
from .._plan import plan
from ..errors import BackendError, BackendUnavailableError
from . import cpp_kernel, parallel_time
from .triton import kernel as triton_kernel
from .triton import parallel_time as triton_parallel_time

Run = Callable[[list[Tensor], Sequence[int]], None]


class Kernel(Protocol):
    """A plan, its source text and the code made of it.

    A backend's kernel may have more: those that are built for the sizes of a call (`Backend.lazy`) have `expect(N, index)`, which
    starts to build early.
    """

    @property
    def plan(self) -> plan.KernelPlan: ...

    @property
    def source(self) -> str: ...

    def bind(self, present: Sequence[bool], T: int, N: int) -> Run:
        """Return what runs the kernel over T steps of N neurons.

        Args:
            present: of each of `plan.arguments`, whether calls pass it. Rows may be absent (zeros then), and checkpoints of calls
                that have none.

        Returns:
            `run(arrays, dims)`: the arguments that are there, in dense memory; two sizes per param (`inner`, `count`: neuron i
            reads element `(i // inner) % count`). It writes to those of `plan.writes`.
        """
        ...


@dataclass(frozen=True)
class NoKernel:
    """The kernel of a plan that writes nothing: no gradient that is asked for exists."""

    plan: plan.KernelPlan
    source: str = ""

    def bind(self, present: Sequence[bool], T: int, N: int) -> Run:
        return lambda arrays, dims: None


@dataclass(frozen=True)
class Backend:
    """What a backend is.

    Attributes:
        devices: types of the devices that it serves unless a call names another backend.
        render: plan -> source text.
        load: plan and source -> kernel.
        chunk: steps of a chunk, for numbers of inputs, states and ops of a step, bytes of an input's element, and whether
            checkpoints are stored.
        chunk_for: steps of a chunk in calls of T steps, of that and T.
        refuses: why it cannot run on a device, or None.
        parallel_in_time: what runs parts of time side by side in place of a kernel; it is made of that kernel, the plans of
            `_plan/parallel_time.py` and what loads a plan. `fit(T, N)`: whether it does so at these sizes; `cut(T, N)`: how many parts
            there are, and of how many steps.
        lazy: kernels are built for the sizes of a call; their `expect` starts that early.
        start: plan and source of a kernel that `load` is asked for soon; it is built meanwhile. None where `expect` serves.
    """

    devices: frozenset[str]
    render: Callable[[plan.KernelPlan], str]
    load: Callable[[plan.KernelPlan, str], Kernel]
    chunk: Callable[[int, int, int, int, bool], int]
    chunk_for: Callable[[int, int], int]
    refuses: Callable[[torch.device], str | None]
    parallel_in_time: type[parallel_time.ParallelInTime] | type[triton_parallel_time.ParallelInTime]
    lazy: bool = False
    start: Callable[[plan.KernelPlan, str], None] | None = None


BACKENDS = {
    "cpp": Backend(
        frozenset({"cpu"}), render_cpp.render, cpp_kernel.load, plan.chunk_in_cache, lambda chunk, T: chunk, cpp_kernel.check_device,
        parallel_time.ParallelInTime, start=cpp_kernel.start,
    ),
    "triton": Backend(
        frozenset({"cuda"}), render_triton.render, triton_kernel.load, plan.chunk_in_registers, plan.chunk_for,
        triton_kernel.check_device, triton_parallel_time.ParallelInTime, lazy=True,
    ),
}  # fmt: skip
_ALIASES = {"inductor": "triton", "hop": "auto"}  # names that earlier programs gave
NAMES = ("auto", "torch", *BACKENDS, *_ALIASES)  # what `backend=` takes; "torch" is the eager loop, which is no backend


def backend_of(device: torch.device) -> str:
    """Return the name of the backend that serves a device; of one that no backend names (`meta`, where nothing runs), the first."""
    return next((name for name, backend in BACKENDS.items() if device.type in backend.devices), next(iter(BACKENDS)))


def check_backend(wanted: str, core: str) -> None:
    """Raise BackendError unless `wanted` is one of `NAMES`."""
    if wanted not in NAMES:
        raise BackendError(f"unknown backend {wanted!r}; there are {', '.join(map(repr, NAMES))}", core=core)


def choose_backend(wanted: str, device: torch.device, core: str, *, traced: bool) -> str:
    """Return the name of the backend that runs a call; `traced` ones run on the device's own.

    Raises:
        BackendError: the backend that is wanted does not run there.
        BackendUnavailableError: "auto" is wanted, and no backend runs there.
    """
    own = backend_of(device)
    name = own if "auto" in (wanted, _ALIASES.get(wanted)) else _ALIASES.get(wanted, wanted)
    refused = BACKENDS[name].refuses(device) if wanted != "auto" or device.type != "meta" else None
    if traced and refused is None and name != own:
        refused = f"backend {name!r} does not run on {device} in a traced call"
    if refused is not None:
        raise (BackendUnavailableError if wanted == "auto" else BackendError)(refused, core=core, hint='Use backend="auto".')
    return name
