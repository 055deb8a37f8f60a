"""Which captured values no program can hold, and why."""

from __future__ import annotations

import collections.abc
import contextvars
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from .._capture.signature import core_name
from ..errors import CannotFuseError, RandomOpError, SideEffectError, UnsupportedValueError


def refusal_of(path: str, value: Any, core: Callable[..., Any]) -> CannotFuseError | None:
    """Return the error for a value at a path that a program cannot hold: one that changes when it is used, or whose code is hidden."""
    name = core_name(core)
    if isinstance(value, torch.jit.ScriptModule):
        return UnsupportedValueError(
            f"captures `{path or 'the core'}`, a ScriptModule, whose code flexsn cannot see", core=name,
            hint="Capture the module that it was made from.",
        )  # fmt: skip
    if isinstance(value, contextvars.ContextVar):
        return UnsupportedValueError(
            f"reads the context variable `{path}`, whose value differs from context to context", core=name,
            hint="Read it outside, and pass a tensor or a number.",
        )  # fmt: skip
    if isinstance(value, collections.abc.Iterator):
        hint = "Draw before the call, for the whole sequence, and pass it as one more input [T, *shape]."
        return SideEffectError(f"draws from the iterator `{path}`, which changes it", core=name, hint=hint)
    generator = _generator(value)
    if generator is None:
        return None
    hint = "Draw the noise outside, for the whole sequence, and pass it as one more input [T, *shape]."
    return RandomOpError(f"draws from `{path}`, {generator}", core=name, hint=hint)


def _generator(value: Any) -> str | None:
    """Return which generator of random numbers a value is, if it is one."""
    if isinstance(value, random.Random):
        return "a `random.Random`"
    numpy = sys.modules.get("numpy")
    drawn = numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))
    return "a generator of numpy" if drawn else None
