"""A kernel at given sizes on a device: allocate what it writes, look up what it reads, run it."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import call
from typing import Any

import torch
from torch import Tensor

from .._ir.roles import Kind, Role
from .._plan.plan import Array, KernelPlan, Plan
from .._torch.autograd import profiler_flag
from ..errors import DeviceMismatchError
from .layout import Order, by_index, strides_of
from .memory import allocator


class _Noting(threading.local):
    """The `Notes` (`_program/replay.py`) of the call that runs on this thread; None where none is noted."""

    notes: Any = None


noting = _Noting()


def as_one(run: Callable[[Sequence[Any]], Any], tensors: Sequence[Any], *, addresses: bool = False) -> Any:
    """Return `run(tensors)`. Where the call is noted, that is one op of the notes.

    Args:
        run: returns a tensor, a list of them, or None; it holds no tensors, as the notes keep it for later calls.
        addresses: whether it reads no more of the tensors than where they lie in memory.
    """
    return run(tensors) if noting.notes is None else noting.notes.one(run, tensors, addresses=addresses)


def refuse_notes(why: str) -> None:
    """Where the call is noted: stop that, as its ops cannot be run again, or should not be."""
    if noting.notes is not None:
        noting.notes.refuse(why)


class Launch:
    """A kernel for T steps of a step shape on a device, for operands that are passed in a given order.

    Attributes:
        order: the order in which the step's dims lie in memory, in every array; None if it is their own.
        params: roles of the params that are passed after the operands, at any shape that broadcasts to the step.
        writes: role, shape and dtype of every array to allocate.
        places: where in `writes` a role stands.
        strides: of the arrays of `writes`.
        parallel_in_time: what runs parts of time side by side, if there are many steps of few neurons; None where the step does not
            allow it.
    """

    def __init__(
        self, kernel: Any, device: torch.device, T: int, step: tuple[int, ...], checkpoints: int, roles: Sequence[Role | None],
        order: Order | None = None, dims: Sequence[int] = (),
    ):  # fmt: skip
        """`checkpoints`: rows of them; `roles`: of the operands, in the order in which calls pass them, None for one that the kernel does
        not read; `dims`: two sizes per param (see `by_index`) where `roles` names the params too."""
        self.T, self.step, self.numel, self.order = T, step, math.prod(step), order
        self.kernel: Any = getattr(kernel, "main", kernel)  # what runs, beside others, where it is one `ParallelInTime`
        self.params = tuple([a.role for a in kernel.plan.reads if a.kind == "param" and a.role not in roles])
        self.checkpoints = checkpoints
        self.writes = arrays_of(allocated(kernel.plan, checkpoints), T, step, checkpoints)
        self.places = {role: place for place, (role, _, _) in enumerate(self.writes)}
        self.strides = [strides_of(shape, len(shape) - len(step), order) for _, shape, _ in self.writes]
        arrays = zip(self.writes, self.strides, strict=True)
        self._allocators = [allocator(device, shape, strides, dtype) for (_, shape, dtype), strides in arrays]
        self.roles, self.dims, self._device = roles, dims, device
        self._gpu = device.index if device.type == "cuda" else None
        given = {role: place for place, role in enumerate((*roles, *self.params)) if role is not None}
        self._reads = [given[a.role] for a in kernel.plan.reads if a.role in given]
        present = [a.role in given for a in kernel.plan.reads] + [a.role in self.places for a in kernel.plan.writes]
        self.parallel_in_time = kernel if kernel is not self.kernel else None
        if self._gpu is not None and self.parallel_in_time is not None:
            self.expect()  # there are several
        self._run, self._profiling = kernel.bind(present, T, self.numel), profiler_flag()

    def expect(self) -> None:
        """Start to build what it runs, on a GPU."""
        if self.parallel_in_time is not None:
            self.parallel_in_time.expect(self.numel, self._gpu, self.T)
        else:
            self.kernel.expect(self.numel, self._gpu)

    def __call__(self, operands: Sequence[Tensor | None], params: Mapping[Role, Tensor]) -> list[Tensor]:
        """Run; returns what was written, in the order of `writes`."""
        return self.run([*operands, *[params[role] for role in self.params]] if self.params else operands)

    def run(self, given: Sequence[Tensor | None], dims: Sequence[int] | None = None) -> list[Tensor]:
        """Run; `given`: the operands, then the params as the prologue left them, in the order of `params`; `dims`: two sizes per param, if
        they lie in all calls as `fixed` saw them.

        Raises:
            DeviceMismatchError: an operand that the kernel reads is on another device.
        """
        if noting.notes is not None:
            return noting.notes.one(functools.partial(self.run, dims=dims), given)
        if self._gpu is not None and self._gpu != torch.cuda.current_device():
            with torch.cuda.device(self._gpu):
                return self.run(given, dims)
        if dims is None:
            given, dims = self.with_indexed(given) if self.params else (given, self.dims)
        arrays: list[Any] = list(map(given.__getitem__, self._reads))
        for t in arrays:  # kernels take pointers
            if t.device != self._device:
                raise self._is_elsewhere(t)
        written = list(map(call, self._allocators))
        if self.T == 0:
            _copy_over_no_time(dict(zip(self.places, written, strict=True)), dict(zip(self.roles, given, strict=False)))
        arrays += written
        if self._profiling():
            with torch.autograd.profiler.record_function(f"flexsn::{self.kernel.plan.core} {self.kernel.plan.direction}"):
                self._run(arrays, dims)
        else:
            self._run(arrays, dims)
        return written

    def fixed(self, given: Sequence[Tensor | None]) -> Callable[[Sequence[Tensor | None]], list[Tensor]] | None:
        """Return what `run` does for operands that lie in every call as these do, decided once; None where a param must be laid out anew in
        each."""
        operands, dims = self.with_indexed(given) if self.params else (given, self.dims)
        pairs = [(a, b) for a, b in zip(given, operands, strict=True) if a is not None and b is not None]
        if any(a.device != b.device or a.data_ptr() != b.data_ptr() for a, b in pairs):
            return None
        return functools.partial(self.run, dims=dims)

    def _is_elsewhere(self, tensor: Tensor) -> DeviceMismatchError:
        return DeviceMismatchError(
            f"runs its {self.kernel.plan.direction} on {self._device}, and a tensor that it reads is on {tensor.device}",
            core=self.kernel.plan.core, hint="Hooks of saved tensors must unpack where they packed, as those of `save_on_cpu` do.",
        )  # fmt: skip

    def with_indexed(self, given: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[int]]:
        """The operands, then the params as the kernel takes them; two sizes per param."""
        found, dims = [*given], list[int]()
        for place in range(len(given) - len(self.params), len(given)):
            param = given[place]
            assert param is not None
            found[place], inner, count = by_index(param.to(self._device), self.step, self.order)  # a number may be a tensor on the CPU
            dims += (inner, count)
        return found, dims


def _copy_over_no_time(written: dict[Role, Tensor], given: dict[Role | None, Tensor | None]) -> None:
    """Without steps nothing runs: what is left at one end of time is what came in at the other."""
    for role, end in written.items():
        if role.kind in (Kind.STATE, Kind.STATE_GRAD):
            start = given.get(role)
            end.zero_() if start is None else end.copy_(start)
        elif role.kind.is_grad:
            end.zero_()


def allocated(plan: KernelPlan | Plan, checkpoints: Any) -> list[Array]:
    """What a call returns of what its kernel writes: no array of checkpoints where there are none. (Where their number depends on a
    symbolic T, it is a bound of at least one.)"""
    none = type(checkpoints) is int and not checkpoints
    return [a for a in plan.writes if not (none and a.kind == "checkpoint")]


def arrays_of(arrays: Sequence[Array], T: int, step: tuple[int, ...], checkpoints: int) -> list[tuple[Role, tuple[int, ...], torch.dtype]]:
    """Role, shape and dtype of arrays that a kernel takes, params at full size."""
    rows = {"sequence": (T,), "checkpoint": (checkpoints,), "row": (), "param": ()}
    return [(a.role, (*rows[a.kind], *step), a.storage) for a in arrays]
