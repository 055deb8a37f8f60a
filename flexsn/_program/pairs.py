"""Calls with complex inputs, states or returns: as calls of a core that takes and returns their real and imaginary parts.

What inside the core is complex, and params and captured tensors that are, `_capture/complex_numbers.py` takes care of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._capture.signature import Signature
from .._capture.trace import Meta
from ..errors import UnsupportedValueError


@dataclass(frozen=True)
class ComplexLayout:
    """Which values of a core are complex; called with the core, it gives the one on real parts.

    Attributes:
        sig: of the core.
        operands: of inputs and states, the real dtype of the parts of those that are complex.
        returns: of outputs and states, whether they are.
    """

    sig: Signature
    operands: tuple[torch.dtype | None, ...]
    returns: tuple[bool, ...]

    @property
    def num_outputs(self) -> int:
        """How many outputs the core on real parts has."""
        outputs = self.returns[: len(self.returns) - self.sig.num_states]
        return len(outputs) + sum(outputs)

    @property
    def signature(self) -> Signature:
        """The signature of the core on real parts."""
        sig, names = self.sig, list[str]()
        for name, dtype in zip(sig.names, self.operands, strict=False):
            names += [name] if dtype is None else [f"{name}_real", f"{name}_imag"]
        inputs, states = (sum(2 if d else 1 for d in kinds) for kinds in self._groups())
        return Signature(sig.core, inputs, states, sig.num_params, (*names, *sig.param_names))

    def _groups(self) -> tuple[tuple[torch.dtype | None, ...], tuple[torch.dtype | None, ...]]:
        return self.operands[: self.sig.num_inputs], self.operands[self.sig.num_inputs :]

    def split(
        self, inputs: Sequence[Tensor], states: Sequence[Tensor | None]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:  # fmt: skip
        """Return the parts of inputs and states, each in memory of its own: a copy of what is complex."""
        found = [tuple(_parts(values, kinds)) for values, kinds in zip((inputs, states), self._groups(), strict=True)]
        return found[0], found[1]  # type: ignore[return-value]  # inputs are there

    def outputs(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of their parts."""
        return _joined(parts, self.returns[: len(self.returns) - self.sig.num_states])

    def states(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return states, or their sequences, of their parts."""
        return _joined(parts, self.returns[len(self.returns) - self.sig.num_states :])

    def __call__(self, core: Callable) -> Callable[..., tuple[Tensor, ...]]:
        def on_parts(*operands: Tensor) -> tuple[Tensor, ...]:
            given, whole = iter(operands), list[Tensor]()
            for dtype in self.operands:
                part = next(given)
                whole.append(part if dtype is None else torch.complex(part.to(dtype), next(given).to(dtype)))
            returned = core(*whole, *given)
            returned = (returned,) if isinstance(returned, Tensor) else returned
            return tuple([part for y in returned for part in ((y.real, y.imag) if y.is_complex() else (y,))])

        return on_parts


def _parts(values: Iterable[Tensor | None], kinds: Iterable[torch.dtype | None]) -> Iterator[Tensor | None]:
    for value, kind in zip(values, kinds, strict=True):
        if kind is None or value is None:
            yield from (value,) * (1 if kind is None else 2)
        else:
            yield from [part.contiguous() for part in torch.view_as_real(value.resolve_conj()).unbind(-1)]


def _joined(values: Sequence[Tensor], kinds: Iterable[bool]) -> list[Tensor]:
    given = iter(values)
    return [torch.complex(next(given), next(given)) if kind else next(given) for kind in kinds]


class ComplexStepError(UnsupportedValueError):
    """A call takes or returns complex numbers: its kernel is that of another core, which `layout` makes."""

    def __init__(self, layout: ComplexLayout):
        super().__init__("takes or returns complex numbers, and kernels take real ones", core=layout.sig.core)
        self.layout = layout

    def __reduce__(self) -> tuple:
        return ComplexStepError, (self.layout,)


def refuse_complex(sig: Signature, operands: Sequence[Meta], returns: Sequence[Meta]) -> None:
    """Raise `ComplexStepError` where inputs, states (settled) or returns are complex."""
    layout = ComplexLayout(
        sig, tuple([m.dtype.to_real() if m.dtype.is_complex else None for m in operands[: sig.num_inputs + sig.num_states]]),
        tuple([m.dtype.is_complex for m in returns]),
    )  # fmt: skip
    if any(layout.operands) or any(layout.returns):
        raise ComplexStepError(layout)
