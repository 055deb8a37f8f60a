"""The shapes of default states, where they are not those of the inputs: found by running one step on zeros of unknown shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._capture.decompositions import CELLS
from .._capture.signature import Signature
from .._capture.trace import Meta
from ..errors import ShapeMismatchError
from .mixing.precision import tensors_in

_MOST_RUNS = 6


@dataclass(frozen=True)
class DefaultStates:
    """Shapes and dtypes of default states; None of a state that is given."""

    metas: tuple[Meta | None, ...]

    def filled(self, inputs: Sequence[Tensor], states: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return the states of a call, zeros where there is none."""
        pairs = zip(states, self.metas, strict=True)
        return tuple([v if meta is None else inputs[0].new_zeros(meta.shape, dtype=meta.dtype) for v, meta in pairs])


class _Zeros(TorchFunctionMode):
    """While inside, a zero of unknown shape takes the shape of what it is added to; a function that it does not suit gives such a zero.

    Args:
        dims: how many it says that it has.
    """

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.dims = dims
        self.unknown: dict[int, Tensor] = {}

    def zero(self, like: Tensor) -> Tensor:
        made = like.new_zeros(())
        self.unknown[id(made)] = made
        return made

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in CELLS:
            with self:
                return CELLS[func](*args, **kwargs)
        if func is Tensor.dim and id(args[0]) in self.unknown:  # which modules ask for
            return self.dims
        tensors = list(tensors_in((args, kwargs)))
        if not any(id(t) in self.unknown for t in tensors):
            return func(*args, **kwargs)
        first = next(t for t in tensors if id(t) in self.unknown)
        if getattr(func, "__name__", "") in ("chunk", "tensor_split"):
            return tuple([self.zero(first) for _ in range(args[1])])
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError):  # it needs a shape
            return self.zero(first)
        if not isinstance(result, Tensor) or result.dim():
            return result
        if all(id(t) in self.unknown or not t.dim() for t in tensors):
            return self.zero(result)
        return result  # a sum over all that is known


def default_states(
    core: Callable, sig: Signature, inputs: Sequence[Tensor], states: Sequence[Tensor | None], params: Sequence[Tensor]
) -> DefaultStates:
    """Return what states are zeros of, where there is none: the shapes that the core returns.

    Raises:
        ShapeMismatchError: the shape of a state depends on what it was before.
    """
    step = [x[0] if len(x) else x.new_zeros(x.shape[1:]) for x in inputs]
    found: list[Tensor | None] = list(states)
    for _ in range(_MOST_RUNS):
        with torch.no_grad(), _Zeros(step[0].dim()) as zeros:
            given = [zeros.zero(step[0]) if v is None else v for v in found]
            returned = core(*step, *given, *params)
            values = (returned,) if isinstance(returned, Tensor) else tuple(returned)
            news = values[len(values) - len(found) :]
            unknown = [id(v) in zeros.unknown for v in news]
        before = found
        found = [v if v is not None or u else torch.zeros_like(new) for v, u, new in zip(found, unknown, news, strict=True)]
        if not any(v is None for v in found):
            metas = [Meta(tuple(v.shape), v.dtype) for v in found if v is not None]
            return DefaultStates(tuple([meta if v is None else None for v, meta in zip(states, metas, strict=True)]))
        if all((a is None) == (b is None) for a, b in zip(before, found, strict=True)):
            break
    name = sig.state_names[[v is None for v in found].index(True)]
    raise ShapeMismatchError(
        f"the shape of state `{name}` cannot be found: it depends on what the state was before", core=sig.core,
        hint="Give the states where they start: `initial_states=` of a FlexSN, `states` of `flexsn.scan`.",
    )  # fmt: skip
