"""Warns, once per reason, that something slower than a fused kernel runs."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator

from .._capture.signature import BOOL_HINT
from .._capture.source_lines import INTERNAL
from ..errors import FallbackWarning

_warned: set[str] = set()
_MOST = 512  # reasons that are remembered: past so many they are said anew


def warn_once(what: str, why: Exception) -> None:
    """Warn that `what` runs, for the reason `why`."""
    say_once(f"flexsn runs {what}: {why}", FallbackWarning)


def say_once(text: str, category: type[Warning]) -> None:
    """Warn, unless it was said before."""
    if text not in _warned:
        if len(_warned) >= _MOST:
            _warned.clear()
        _warned.add(text)
        warnings.warn(text, category, stacklevel=_users_level())


@contextlib.contextmanager
def noting(what: str, why: Exception | None) -> Iterator[None]:
    """Add to an error of `what`, as a note, the reason for which it ran, if there is one, and with it what to write instead."""
    try:
        yield
    except Exception as error:  # of the core's; raised again as it is
        if why is not None:
            error.add_note(f"flexsn ran {what}: {why}")
        if "bool tensor is not supported" in str(error):  # PyTorch's words
            error.add_note(BOOL_HINT)
        raise


@contextlib.contextmanager
def unsaid() -> Iterator[None]:
    """Silence warnings while inside; what would have been said still will be."""
    before = set(_warned)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            yield
    finally:
        _warned.intersection_update(before)


def _users_level() -> int:
    """Return how many frames up the first one outside flexsn and PyTorch is."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INTERNAL):
        frame, level = frame.f_back, level + 1
    return level
