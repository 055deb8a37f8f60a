"""Stateful neurons under activation checkpoints: where a call starts that a backward runs again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from . import _compat
from .errors import CarriedStateError
from .signature import core_name


class LastCall(NamedTuple):
    """The call that left the states which a module carries.

    Attributes:
        left: the first of these states.
        backward: the backward in which it ran, -1 if in none.
        only: whether it was the only one since `reset()`.
    """

    left: weakref.ref[Tensor]
    backward: int
    only: bool

    @classmethod
    def of(cls, states: Sequence[Tensor], only: bool) -> LastCall:
        return cls(weakref.ref(states[0]), _compat.current_backward(), only)

    def runs_again(self, states: Sequence[Tensor] | None, core: Callable) -> bool:
        """Whether a call that finds these states is this one, run again by a backward (`torch.utils.checkpoint`). It starts where
        this one did, then, and leaves the states as they are.

        Raises:
            CarriedStateError: it may be this one or one before.
        """
        backward = _compat.current_backward()
        if backward == self.backward or not states or states[0] is not self.left():
            return False
        if not self.only:
            raise CarriedStateError(
                "is called by a backward, as activation checkpoints do, but has been called more than once since `reset()`, and keeps only "
                "the last states: where the call started is not known", core=core_name(core),
                hint="Call `reset()` inside the checkpointed function, or make it start from states that it is given: "
                "`flexsn.scan(core, inputs, states)`.",
            )  # fmt: skip
        return True
