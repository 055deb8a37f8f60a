"""Saying, once per reason, that something slower than a fused kernel runs."""

from __future__ import annotations

import sys
import warnings

from .errors import FallbackWarning
from .places import INTERNAL

_warned: set[str] = set()


def warn_once(what: str, why: Exception) -> None:
    """`what` runs, for the reason `why`."""
    text = f"flexsn runs {what}: {why}"
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, FallbackWarning, stacklevel=_users_level())


def _users_level() -> int:
    """How many frames up the first one outside flexsn and PyTorch is."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INTERNAL):
        frame, level = frame.f_back, level + 1
    return level
