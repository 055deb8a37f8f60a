"""Kernels by number: what an operator can take, and when they go.

An entry lives while somebody owns it (a module, say) or uses it (a recorded autograd graph).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .info import FlexSNInfo
from .kernels import StepKernel

_lock = threading.RLock()  # a finalizer may run while its thread holds it
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]  # as the standard library does
_entries: dict[int, FlexSNKernelHandle] = {}
_numbers = itertools.count(1)


@dataclass
class FlexSNKernelHandle:
    """The kernels under one handle, each possibly None, and how many references own and use them."""

    inference_kernel: StepKernel | None = None
    inference_info: FlexSNInfo | None = None
    inference_final_state_kernel: StepKernel | None = None
    inference_final_state_info: FlexSNInfo | None = None
    forward_kernel: StepKernel | None = None
    backward_kernel: StepKernel | None = None
    training_info: FlexSNInfo | None = None
    owner_refs: int = 1
    active_refs: int = 0


def register_flexsn_kernel_handle(**kernels: Any) -> int:
    """Return a new handle, owned once: numbers count from 1 and are never used again.

    Args:
        kernels: those that there are, under the names of `FlexSNKernelHandle`'s fields.
    """
    entry = FlexSNKernelHandle(**kernels)
    with _lock:
        handle = next(_numbers)
        _entries[handle] = entry
    return handle


def get_flexsn_kernel_handle(handle: Any) -> FlexSNKernelHandle:
    """Return the entry of a handle.

    Raises:
        RuntimeError: there is none.
        TypeError: what cannot be a handle.
    """
    return _known(handle_number(handle))


def retain_flexsn_kernel_handle(handle: Any) -> None:
    """Use a handle once more; raises as `get_flexsn_kernel_handle`."""
    _count(handle, "active_refs", 1)


def retain_owner_flexsn_kernel_handle(handle: Any) -> None:
    """Own a handle once more; raises as `get_flexsn_kernel_handle`."""
    _count(handle, "owner_refs", 1)


def release_flexsn_kernel_handle(handle: Any) -> None:
    """Own a handle once less. The last reference of both kinds takes the entry with it, and closes its kernels."""
    _count(handle, "owner_refs", -1)


def release_active_flexsn_kernel_handle(handle: Any) -> None:
    """Use a handle once less, otherwise as `release_flexsn_kernel_handle`."""
    _count(handle, "active_refs", -1)


def attach_flexsn_handle_finalizer(owner: Any, handle: Any) -> weakref.finalize:
    """Release the owner reference when `owner` dies: the reference that its holder has; a copy retains its own.

    Raises:
        RuntimeError: there is no such handle.
    """
    get_flexsn_kernel_handle(handle)
    return weakref.finalize(owner, release_flexsn_kernel_handle, handle_number(handle))


def handle_number(handle: Any) -> int:
    """Return a handle as an int; raise `TypeError` for what is none."""
    if isinstance(handle, Tensor) and handle.numel() != 1:
        raise TypeError(f"a kernel handle is one number, not a tensor of {handle.numel()}")
    try:
        return int(handle.item() if isinstance(handle, Tensor) else handle)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"a kernel handle is a number, not {type(handle).__name__}") from None


def _known(number: int) -> FlexSNKernelHandle:
    entry = _entries.get(number)
    if entry is None:
        raise RuntimeError(f"flexsn: there is no kernel handle {number}; it was released, or never registered")
    return entry


def _count(handle: Any, kind: str, by: int) -> None:
    """Count a reference more or less; one less of an entry that is gone is none."""
    number = handle_number(handle)
    with _lock:
        entry = _entries.get(number) if by < 0 else _known(number)
        if entry is None:
            return
        setattr(entry, kind, max(0, getattr(entry, kind) + by))
        if entry.owner_refs or entry.active_refs:
            return
        del _entries[number]
    _close(entry)


def _close(entry: FlexSNKernelHandle) -> None:
    """Close every kernel once, also where one of them raises."""
    with contextlib.ExitStack() as closing:
        for kernel in {id(v): v for v in vars(entry).values()}.values():
            if callable(getattr(kernel, "close", None)):
                closing.callback(kernel.close)
