"""Calls of a core whose values have an inner dim, `[*neurons, N]`: as calls of a core over N values of every neuron.

A core that adds over its last dim (`d.sum(-1)`, N up to 64) is no elementwise step of the operands as they are, but one of their parts:
`d [B, H, N]` is N states `[B, H]`. `_capture/inner.py` records what the core does to them.

Parts lie one after the other in memory, so a call copies what has the dim, once: states at little cost, a whole input sequence at that of
another pass over it.

What it gains: a training step of dendrites of 8 and 64 branches (T = 200, 32 x 128 neurons) takes 14 and 3.4 times less time than the
eager loop on two CPU cores, 47 and 23 times less on an H100 (`python benchmarks/inner.py`, 2026-11-27).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .._capture.inner import MOST, Inner
from .._capture.signature import Signature
from .._capture.trace import recording
from .._torch.tensors import broadcast_shapes
from ..errors import UnsupportedOpError
from .parts import PartsLayout


class InnerLayout(PartsLayout):
    """Which values of a core have an inner dim, and how many parts they have."""

    def endings(self, kind: int) -> Sequence[str]:
        return [f"_{j}" for j in range(kind)]

    def apart(self, tensor: Tensor, kind: int) -> Sequence[Tensor]:
        return tensor.expand(*tensor.shape[:-1], kind).movedim(-1, 0).contiguous().unbind(0)

    def joined(self, parts: Sequence[Tensor], kind: int) -> Tensor:
        return torch.stack(list(parts), -1)

    def __call__(self, core: Callable) -> Callable[..., tuple[Tensor, ...]]:
        def over_parts(*parts: Tensor) -> tuple[Tensor, ...]:
            recorder = recording()
            recorder.inner = recorder.inner or Inner(recorder)
            count = len(parts) - self.sig.num_params
            returned = core(*self.join(parts[:count], self.operands), *parts[count:])
            values = (returned,) if isinstance(returned, Tensor) else tuple(returned)
            if len(values) != len(self.returns):
                raise UnsupportedOpError("returns another number of values than at first", core=self.sig.core)
            return tuple(p for v, n in zip(values, self.returns, strict=True) for p in (v.unbind(-1) if n else (v,)))

        return over_parts


def inner_dims(shapes: Sequence[tuple[int, ...]], least: int = 1, most: float = MOST) -> Iterator[tuple[int, list[bool]]]:
    """Return, for each way in which the last dim of inputs and states may be an inner one of `least` to `most` values, how many dims stand
    before it, and which of them have it: where all shapes broadcast, all, as `[B, H, 1]` and `[B, H, N]`; else, or then too, those of the
    most dims, as `[B, H, N]` beside `[B, H]`.

    Args:
        shapes: of one step of each; `()` of default states.
    """
    ranks = max(map(len, shapes))
    for has in dict.fromkeys((tuple(len(s) > 0 for s in shapes), tuple(len(s) == ranks for s in shapes))) if ranks > 1 else ():
        outer = [s[:-1] if h else s for s, h in zip(shapes, has, strict=True)]
        inner = [s[-1] for s, h in zip(shapes, has, strict=True) if h]
        if least <= min(inner) and max(inner) <= most and _broadcast(outer):
            yield ranks - 1, list(has)


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> bool:
    try:
        broadcast_shapes(*shapes)
    except RuntimeError:
        return False
    return True


def layout_of(
    sig: Signature, outer: int, has: Sequence[bool], operands: Sequence[torch.Size], returned: Sequence[torch.Size]
) -> InnerLayout:  # fmt: skip
    """Return the layout of calls, from one step of the core.

    Args:
        outer, has: as `inner_dims` gives them.
        operands: shapes of inputs and states, default ones as the core returns them.
        returned: shapes of outputs and new states.
    """
    inner = [h or (k >= sig.num_inputs and len(s) > outer) for k, (s, h) in enumerate(zip(operands, has, strict=True))]
    takes = tuple(s[-1] if h else 0 for s, h in zip(operands, inner, strict=True))
    return InnerLayout(sig, takes, tuple(s[-1] if len(s) > outer else 0 for s in returned))
