"""What a core does besides computing, found while it is traced: a kernel would do it once, not at every step."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from ..errors import RandomOpError, SideEffectError
from .reads import Reads
from .slots import Contents, Slot

_STATE = "What changes from step to step is a state: take it as an argument and return its new value."
_HOOK = (
    "A hook of a module may set it (`torch.nn.utils.prune`, the old `weight_norm`): make that permanent with `prune.remove(module, name)`, "
    "or use `torch.nn.utils.parametrize`."
)


@contextlib.contextmanager
def no_side_effects(reads: Reads, core: str, run: Callable) -> Iterator[Callable]:
    """Refuse a core that writes to what it reads, and undo what its traces wrote; nothing is drawn from an iterator.

    Yields what to trace in place of `run`, the core: each of its runs begins with what the first began with. (After two runs of
    `self.even = not self.even` everything is as it was.)
    """
    held, changed = reads.held(), None
    generators = [(*generator, generator[1]()) for generator in _generators(reads)]
    iterators = [Undrawn(slot, core) for slot in reads.iterators]
    for one in iterators:
        if isinstance(one.slot.holder, Contents):  # in a method, `next_id = ids.__next__`, where nothing can stand in its place
            raise one.error
    undo = [one.slot.put(one) for one in iterators]
    first = reads.held()

    def anew(*operands: Any) -> Any:
        nonlocal changed
        changed = reads.restore(first) or changed
        return run(*operands)

    unexplained = None
    try:
        yield anew
    except RandomOpError as error:  # where the numbers come from may be found below
        unexplained = error
    finally:
        for put_back in reversed(undo):
            put_back()
        changed = reads.restore(held) or changed
        drawn = []
        for name, get, put, before in generators:
            if repr(get()) != repr(before):
                drawn.append(name)
                put(before)
    if changed:
        raise SideEffectError(
            f"changes `{changed.removeprefix('core.')}` while it runs", core=core,
            hint=_HOOK if any(slot.path.endswith(".hook") for slot, _ in reads.watched) else _STATE,
        )  # fmt: skip
    for one in iterators:
        if one.drawn:  # the core caught it
            raise one.error
    if drawn:
        raise RandomOpError(
            f"draws random numbers from {drawn[0]}", core=core,
            hint="Draw the noise outside, for the whole sequence, and pass it as one more input [T, *shape].",
        )  # fmt: skip
    if unexplained is not None:
        raise unexplained


def _generators(reads: Reads) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    """Sources of random numbers that a trace would freeze: name, and how to get and set the state."""
    yield "Python's `random`", random.getstate, random.setstate
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        yield "`numpy.random`", functools.partial(numpy.get_state, legacy=False), numpy.set_state
    for value in reads.opaque:
        of_numpy = any(cls.__module__.partition(".")[0] == "numpy" for cls in type(value).__mro__)
        bits = getattr(value, "bit_generator", getattr(value, "_bit_generator", None)) if of_numpy else None
        if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # which has no state
            yield "a `random.Random`", value.getstate, value.setstate
        elif bits is not None:
            yield "a generator of numpy", functools.partial(getattr, bits, "state"), functools.partial(setattr, bits, "state")


class Undrawn:
    """Stands for an iterator that a core reads while it is traced: a trace would freeze what it gives.

    Attributes:
        slot: where the iterator stands.
        drawn: whether the core asked for a value.
        error: what it was told.
    """

    def __init__(self, slot: Slot, core: str):
        self.slot, self.drawn, self._iterator = slot, False, slot.get()
        self.error = SideEffectError(
            f"draws from the iterator `{slot.path.removeprefix('core.')}`, which changes it", core=core,
            hint="Draw before the call, for the whole sequence, and pass it as one more input [T, *shape].",
        )  # fmt: skip

    def __iter__(self) -> Undrawn:
        return self

    def __next__(self) -> NoReturn:
        self.drawn = True
        raise self.error

    def __call__(self, *args: Any) -> NoReturn:  # in place of a method of an iterator
        next(self)

    def send(self, value: Any) -> NoReturn:
        next(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)
