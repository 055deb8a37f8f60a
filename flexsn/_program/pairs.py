"""Calls with complex inputs, states or returns: as calls of a core that takes and returns their real and imaginary parts.

What inside the core is complex, and params and captured tensors that are, `_capture/complex_numbers.py` takes care of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._capture.signature import Signature
from .._capture.trace import Meta
from ..errors import UnsupportedValueError
from .parts import PartsLayout


class ComplexLayout(PartsLayout):
    """Which values of a core are complex: of operands the real dtype of their parts, of returns whether they are."""

    def endings(self, kind: torch.dtype | bool) -> Sequence[str]:
        return "_real", "_imag"

    def apart(self, tensor: Tensor, kind: torch.dtype | bool) -> list[Tensor]:
        return [part.contiguous() for part in torch.view_as_real(tensor.resolve_conj()).unbind(-1)]

    def joined(self, parts: Sequence[Tensor], kind: torch.dtype | bool) -> Tensor:
        re, im = (p.to(kind) for p in parts) if isinstance(kind, torch.dtype) else parts
        return torch.complex(re, im)

    def __call__(self, core: Callable) -> Callable[..., tuple[Tensor, ...]]:
        def on_parts(*operands: Tensor) -> tuple[Tensor, ...]:
            count = len(operands) - self.sig.num_params
            returned = core(*self.join(operands[:count], self.operands), *operands[count:])
            returned = (returned,) if isinstance(returned, Tensor) else returned
            return tuple([part for y in returned for part in ((y.real, y.imag) if y.is_complex() else (y,))])

        return on_parts


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
