"""Forked children run on one thread: OpenMP would wait there for the threads of the parent, for ever."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

import torch

from .._torch.autograd import autocast_on

forked = False  # whether this process is a forked child


def _after_fork() -> None:
    global forked
    forked = True


os.register_at_fork(after_in_child=_after_fork)


class _Outer(threading.local):
    """The dtypes of autocast outside `undisturbed`, by type of device."""

    dtypes: Mapping[str, torch.dtype | None] = {}


_outer = _Outer()


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return the dtype of autocast on a type of device where a core was called; None where it is off, or unknown as on "meta"."""
    if not torch.amp.is_autocast_available(kind):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else _outer.dtypes.get(kind)


def num_threads() -> int:
    """Return `torch.get_num_threads()`, but 1 in a forked child."""
    return 1 if forked else torch.get_num_threads()


def disturbed() -> bool:
    """Whether autocast or a fork changes what PyTorch's ops do."""
    return autocast_on() or torch.get_num_threads() != num_threads()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """While inside, dtypes are those of the operands, and ops of a forked child wait for nobody."""
    before, wanted, outer = torch.get_num_threads(), num_threads(), _outer.dtypes
    if autocast_on():
        _outer.dtypes = {kind: autocast_dtype(kind) for kind in ("cpu", "cuda")}
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        try:
            if wanted != before:
                torch.set_num_threads(wanted)
            yield
        finally:
            _outer.dtypes = outer
            if wanted != before:
                torch.set_num_threads(before)
