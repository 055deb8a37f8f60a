"""Captures a core from the graph that Dynamo made of it.

Dynamo traces a core once, as the body of a higher-order operator: so it guards on every Python value that the core reads, lifts
every tensor that it captures, and sees what the compiled function has assigned so far. Running that graph under the tracer of
eager calls gives the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._capture.signature import Signature, step_shape
from .._capture.source_lines import Replay
from .._capture.trace import Meta
from .._ir.graph import HALF
from .._program.captured import Blueprint, draw
from .._program.symbolic_sizes import Sizes, exactly, settle_sizes
from .._torch.capture import no_modes
from .._torch.tensors import is_symbolic, size_expression, unseen_size


class Body(NamedTuple):
    """What Dynamo made of a core.

    Attributes:
        graph: takes operands, and then what the core captures.
        places: of what it captures, in the list for all bodies of the core.
    """

    graph: fx.GraphModule
    places: Sequence[int]


def blueprint_of_body(
    bodies: Sequence[Body], sig: Signature, operands: Sequence[Tensor | None], lifted: Sequence[Any], num_outputs: int | None,
    differentiate: bool,
) -> Blueprint:  # fmt: skip
    """Capture what Dynamo made of a core.

    Args:
        bodies: for operands of the given dtypes, and for those of the kernel (16-bit floats as float32): a body holds as a
            constant what the core asks of dtypes.
        operands: fake input sequences, states (None: a default state) and params; sizes may be symbolic.
        lifted: what bodies take after them: fake tensors in place of captured tensors, and sizes.
    """
    ins, first = sig.num_inputs + sig.num_states, operands[0]
    assert first is not None
    device = first.device
    metas = [None if t is None else Meta(tuple(t.shape[i < sig.num_inputs :]), t.dtype) for i, t in enumerate(operands)]
    step_shapes = [m.shape for m in metas[:ins] if m is not None]
    step_shape(sig, step_shapes)  # which sizes must be equal
    sources = size_sources([None if m is None else m.shape for m in metas[:ins]])

    def kind(value: Any) -> Callable[..., Any]:
        """Return what makes, from the operands of a run, the value that the body takes in this place."""
        if isinstance(value, Tensor):
            shape, dtype, device, grad = exactly(value.shape), value.dtype, value.device, value.requires_grad
            stand_in = torch.empty(shape, dtype=dtype, device=device, requires_grad=grad)
            captured[captured_name(len(captured))] = stand_in
            return lambda *operands: stand_in
        if is_symbolic(value) and size_expression(value) in sources:  # Dynamo passes the sizes of operands
            i, d = sources[size_expression(value)]
            return lambda *operands: unseen_size(operands[i], d)
        number = float(value) if isinstance(value, (float, torch.SymFloat)) else int(value)
        return lambda *operands: number

    with no_modes():
        captured: dict[str, Tensor] = {}
        extras = [kind(value) for value in lifted]

        def core(*operands: Tensor) -> Any:
            body = bodies[0] if any(t.dtype in HALF for t in operands) else bodies[-1]
            with torch.set_grad_enabled(torch.is_grad_enabled()):  # a `no_grad` inside the core ends in the mode that Dynamo saw
                return Replay(body.graph).run(*operands, *(extras[place](*operands) for place in body.places))

        def draw_at(sizes: Sizes) -> Blueprint:
            numbered = [None if m is None else Meta(sizes.of(m.shape, exact=i >= ins), m.dtype) for i, m in enumerate(metas)]
            blueprint = draw(core, sig, numbered, device, captured, num_outputs)
            if differentiate:
                blueprint.differentiate(core, captured, device)
            return blueprint

        return settle_sizes(draw_at, step_shapes)


def captured_name(place: int) -> str:
    """Return the name of a captured tensor by its place among them; `captured_place` gives it back."""
    return f"captured_{place}"


def captured_place(name: str) -> int:
    """Return the place that `captured_name` wrote."""
    return int(name.rpartition("_")[2])


def size_sources(shapes: Sequence[Sequence[Any] | None]) -> dict[str, tuple[int, int]]:
    """Return where to read each symbolic size: of which operand, in which dim, counted from the last."""
    found: dict[str, tuple[int, int]] = {}
    for i, shape in enumerate(shapes):
        for d, n in enumerate(shape or ()):
            if shape is not None and is_symbolic(n):
                found.setdefault(size_expression(n), (i, d - len(shape)))
    return found
