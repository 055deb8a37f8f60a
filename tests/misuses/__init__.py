"""Misuses of flexsn as data: what somebody does, and what has to happen. `tests/system/test_misuse.py` runs every row,
`tools/misuse_table.py` writes them to `docs/misuse.md`.

A row is a function of the backend that does the misuse and returns `(got, want)`: what flexsn gave, and what plain PyTorch
gives. Its outcome is one of

- `gives(note)`: the right numbers, from every backend;
- `raises(error, *parts)`: this error of flexsn, with these words in its message, from every backend;
- `falls_back(error, *parts)`: a kernel refuses with this error; `"torch"` gives the right numbers, and so does `"auto"`, with a
  warning that says why;
- `passes_on(error, *parts, whose=...)`: an error that is not flexsn's: the core's own, or what PyTorch says about autograd;

and may differ by backend: `misuse(..., torch=raises(...))`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import flexsn
from flexsn.errors import FlexSNError

BACKENDS = ("auto", "cpp", "torch", "triton")
FILES = ("operands", "memory", "returns", "code", "effects", "world", "gradients", "modules")


@dataclass(frozen=True)
class Outcome:
    """What has to happen.

    Attributes:
        kind: `"gives"`, `"raises"`, `"falls back"` or `"passes on"`.
        error: the exact class.
        parts: words of its message.
        note: what to say of it in the document.
    """

    kind: str
    error: type[BaseException] | None = None
    parts: tuple[str, ...] = ()
    note: str = ""

    def at(self, backend: str) -> Outcome:
        """What this means for one backend."""
        if self.kind != "falls back" or backend == "auto":
            return self
        return Outcome("gives") if backend == "torch" else Outcome("raises", self.error, self.parts)


def gives(note: str) -> Outcome:
    return Outcome("gives", note=note)


def raises(error: type[FlexSNError], *parts: str) -> Outcome:
    return Outcome("raises", error, parts)


def falls_back(error: type[FlexSNError], *parts: str) -> Outcome:
    return Outcome("falls back", error, parts)


def passes_on(error: type[BaseException], *parts: str, whose: str = "the core's own error") -> Outcome:
    return Outcome("passes on", error, parts, whose)


@dataclass(frozen=True)
class Row:
    """A misuse.

    Attributes:
        group: the part of the document.
        what: what somebody does, as a few words.
        run: does it with a backend; returns what flexsn gave and what plain PyTorch gives.
        outcomes: by backend.
        risky: whether it may crash the process: it is run in another one.
        slow: whether it is left out of the quick tests: its kernels take seconds to build, or others show the same.
    """

    group: str
    what: str
    run: Callable[[str], tuple[Any, Any]]
    outcomes: dict[str, Outcome] = field(repr=False)
    risky: bool = False
    slow: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__


ROWS: dict[str, Row] = {}


def group(title: str) -> Callable[..., Callable]:
    """The decorator that makes rows of one part of the document."""

    def misuse(
        what: str, outcome: Outcome, *, triton: Outcome | bool = False, risky: bool = False, slow: bool = False, **others: Outcome
    ) -> Callable:
        """A row; `triton`: run it in Triton's interpreter too."""

        def register(run: Callable) -> Callable:
            assert run.__name__ not in ROWS, run.__name__
            outcomes = {b: others.get(b, outcome).at(b) for b in BACKENDS[:3]}
            if triton:
                outcomes["triton"] = (outcome if triton is True else triton).at("triton")
            ROWS[run.__name__] = Row(title, what, run, outcomes, risky, slow)
            return run

        return register

    return misuse


def rows() -> dict[str, Row]:
    """Every row, by the name of its function."""
    for name in FILES:
        importlib.import_module(f"misuses.{name}")
    return ROWS


# --- what rows are made of -------------------------------------------------------------------------------------------------
X = torch.linspace(-2.0, 2.0, 60).view(5, 4, 3)
V = torch.linspace(0.5, 1.5, 12).view(4, 3)


def leaky(x, v):
    v = 0.5 * v + x
    return v * 2.0, v


def loop(core: Callable, inputs: Sequence[Tensor], states: Sequence[Tensor] = (), params: Sequence[Any] = ()) -> list[Tensor]:
    """`core`, step after step, in plain PyTorch: outputs `[T, *shape]`, then final states."""
    outputs: list[Sequence[Tensor]] = []
    for step in zip(*inputs, strict=True):
        returned = core(*step, *states, *params)
        returned = (returned,) if isinstance(returned, Tensor) else tuple(returned)
        outs = len(returned) - len(states)
        outputs.append(returned[:outs])
        states = returned[outs:]
    return [torch.stack(y) for y in zip(*outputs, strict=True)] + list(states)


def both(
    backend: str, core: Callable, inputs: Sequence[Tensor] = (X,), states: Sequence[Tensor] = (), params: Sequence[Any] = (), *,
    wrt: Sequence[Tensor] = (), plain: Callable | None = None,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """What `flexsn.scan` gives and what `loop` gives: outputs, final states, and gradients of their sum.

    Args:
        wrt: what to differentiate by.
        plain: the core in other words, for the loop.
    """
    result = flexsn.scan(core, list(inputs), list(states), list(params), backend=backend)
    found = [*result.outputs, *result.states]
    return found + slopes(found, wrt), (w := loop(plain or core, inputs, states, params)) + slopes(w, wrt)


def slopes(values: Sequence[Tensor], wrt: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(total(values), list(wrt))) if wrt else []


def total(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([(y.double() * torch.linspace(1, 2, y.numel()).view(y.shape)).sum() for y in values if y.requires_grad]).sum()


def tensors(tree: Any) -> Iterator[Any]:
    """The leaves of nested lists and tuples."""
    if isinstance(tree, (list, tuple)):
        for branch in tree:
            yield from tensors(branch)
    else:
        yield tree
