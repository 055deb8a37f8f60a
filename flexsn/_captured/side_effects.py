"""What a core does besides computing, found while it is traced: a kernel would do it once, not at every step."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import RandomOpError, SideEffectError
from .captured_values import CapturedValues


@contextmanager
def no_side_effects(seen: CapturedValues, core: str) -> Iterator[None]:
    """Refuse a core whose traces draw random numbers of Python or NumPy, or change what it captures by a way that no stand-in shows."""
    generators = [(*generator, generator[1]()) for generator in _generators()]
    unexplained = None
    try:
        yield
    except RandomOpError as error:  # where the numbers come from may be found below
        unexplained = error
    finally:
        drawn = []
        for name, get, put, before in generators:
            if repr(get()) != repr(before):
                drawn.append(name)
                put(before)
    if drawn:
        raise RandomOpError(
            f"draws random numbers from {drawn[0]}", core=core,
            hint="Draw the noise outside, for the whole sequence, and pass it as one more input [T, *shape].",
        )  # fmt: skip
    if unexplained is not None:
        raise unexplained
    if not seen.valid():
        raise SideEffectError(
            f"changes `{seen.changed()}` while it runs", core=core,
            hint="What changes from step to step is a state: take it as an argument and return its new value.",
        )  # fmt: skip


def _generators() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    """Yield the global sources of random numbers that a trace would freeze: name, and how to get and set the state."""
    yield "Python's `random`", random.getstate, random.setstate
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        yield "`numpy.random`", functools.partial(numpy.get_state, legacy=False), numpy.set_state
