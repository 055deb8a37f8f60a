"""Calls of a core of whose values a kernel takes the parts, as values of their own: complex numbers, and those with an inner dim.

The core over parts joins what it is given, calls the core, and takes apart what that returns; its capture (`_capture/complex_numbers.py`,
`_capture/inner.py`) sees through both. A call takes operands apart and joins results, in PyTorch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._capture.signature import Signature


@dataclass(frozen=True)
class PartsLayout:
    """Which values of a core have parts; called with the core, it gives the one over parts.

    Attributes:
        sig: of the core.
        operands: of inputs and states, what kind of parts each has; None or 0 for one without.
        returns: of outputs and new states likewise.
    """

    sig: Signature
    operands: tuple[Any, ...]
    returns: tuple[Any, ...]

    # --- what a subclass says of one kind -----------------------------------------------------------------------------------------
    def endings(self, kind: Any) -> Sequence[str]:
        """Return what the names of the parts end with, one for each."""
        raise NotImplementedError

    def apart(self, tensor: Tensor, kind: Any) -> Sequence[Tensor]:
        """Return the parts, each in memory of its own."""
        raise NotImplementedError

    def joined(self, parts: Sequence[Tensor], kind: Any) -> Tensor:
        """Return the value of its parts."""
        raise NotImplementedError

    def __call__(self, core: Callable) -> Callable[..., tuple[Tensor, ...]]:
        raise NotImplementedError

    # --- of a whole call -------------------------------------------------------------------------------------------------------
    @property
    def num_outputs(self) -> int:
        """How many outputs the core over parts has."""
        return sum(self._count(kind) for kind in self.returns[: len(self.returns) - self.sig.num_states])

    @property
    def signature(self) -> Signature:
        """The signature of the core over parts."""
        sig = self.sig
        names = [[f"{n}{end}" for end in self.endings(k)] if k else [n] for n, k in zip(sig.names, self.operands, strict=False)]
        inputs, states = [[*itertools.chain(*group)] for group in (names[: sig.num_inputs], names[sig.num_inputs :])]
        return Signature(sig.core, len(inputs), len(states), sig.num_params, (*inputs, *states, *sig.param_names))

    def split(
        self, inputs: Sequence[Tensor], states: Sequence[Tensor | None]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:  # fmt: skip
        """Return the parts of inputs and states."""
        groups: list[Sequence[Any]] = [
            self.apart(t, kind) if kind and t is not None else (t,) * self._count(kind)
            for t, kind in zip((*inputs, *states), self.operands, strict=True)
        ]
        return tuple(itertools.chain(*groups[: len(inputs)])), tuple(itertools.chain(*groups[len(inputs) :]))

    def outputs(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of their parts."""
        return self.join(parts, self.returns[: len(self.returns) - self.sig.num_states])

    def states(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return states, or their sequences, of their parts."""
        return self.join(parts, self.returns[len(self.returns) - self.sig.num_states :])

    def join(self, parts: Sequence[Tensor], kinds: Sequence[Any]) -> list[Tensor]:
        """Return the values of parts that lie one after the other."""
        given = iter(parts)
        return [self.joined(list(itertools.islice(given, self._count(k))), k) if k else next(given) for k in kinds]

    def _count(self, kind: Any) -> int:
        return len(self.endings(kind)) if kind else 1
