"""The one cache of programs in a process: by call, by layout of operands, and by text."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._capture.signature import Signature, noting_default_states
from .._capture.trace import Meta
from .._captured.captured_values import CapturedValues, lock
from .._captured.side_effects import no_side_effects
from .._runtime.backends import backend_of
from .._torch.availability import KERNELS, require
from .._torch.capture import no_modes
from ..errors import CannotFuseError
from .captured import Shapes
from .compiled import Program, program_of
from .serialize import read

_SIZE = 512
_MOST_CANDIDATES = 64  # programs of one layout: cores that depend on sizes need one per size


class Programs:
    """What is kept of programs, each table least recently used first.

    Attributes:
        exact: by everything that a call's program depends on: the program and the call's shapes, or why there is none.
        by_layout: by the same without sizes: programs, one of which may serve.
        by_text: by text, backend and device.
        cuts: pieces of cores that mix neurons, by the same as `exact`.
    """

    def __init__(self) -> None:
        self.exact: OrderedDict[tuple, tuple[Program, Shapes] | CannotFuseError] = OrderedDict()
        self.by_layout: OrderedDict[tuple, list[Program]] = OrderedDict()
        self.by_text: OrderedDict[tuple[str, str, torch.device], Program] = OrderedDict()
        self.cuts: OrderedDict[tuple, Any] = OrderedDict()

    def trim(self) -> None:
        """Drop what was used longest ago."""
        for table in (self.exact, self.by_layout, self.by_text, self.cuts):
            while len(table) > _SIZE:
                table.popitem(last=False)

    def clear(self) -> None:
        for table in (self.exact, self.by_layout, self.by_text, self.cuts):
            table.clear()


PROGRAMS = Programs()
Cut = TypeVar("Cut")


class Source(NamedTuple):
    """A core, as a capture meets it.

    Attributes:
        core: on stand-ins for what it captures.
        captured: these stand-ins, by path.
        seen: what it captures.
        device: of the operands.
    """

    core: Callable
    captured: dict[str, Tensor]
    seen: CapturedValues
    sig: Signature
    device: torch.device
    num_outputs: int | None = None


def program_for(backend: str, source: Source, metas: Sequence[Meta | None]) -> tuple[Program, Shapes]:
    """Return the compiled program for a call, and the call's shapes.

    Args:
        metas: of inputs, states (None: default states) and params.
    """
    core, captured, seen, sig, device, num_outputs = source
    base = (backend, *_what_a_trace_sees(source))
    exact = (*base, tuple(metas))
    with lock:
        known = PROGRAMS.exact.get(exact)
        if isinstance(known, CannotFuseError):
            raise copy.copy(known)
        if known is not None and known[0].fits(metas):
            PROGRAMS.exact.move_to_end(exact)
            return known
        ins = sig.num_inputs + sig.num_states
        layout = (*base, *(_pattern(m) for m in metas[:ins]), *metas[ins:])
        given = [m.shape for m in metas[:ins] if m is not None]
        candidates = PROGRAMS.by_layout.setdefault(layout, [])
        for program in candidates:
            shapes = program.blueprint.shapes(given)
            if shapes is not None:
                break
        else:
            require(KERNELS)
            try:
                states = metas[sig.num_inputs : ins]
                dtype = metas[0].dtype  # type: ignore[union-attr]  # an input is there
                with noting_default_states(sig, states, dtype), no_side_effects(seen, sig.core):
                    program = program_of(backend, core, sig, metas, device, captured, num_outputs)
                program.kept = seen.kept
                seen.warn_of_frozen(sig.core)
            except CannotFuseError as error:
                PROGRAMS.exact[exact] = copy.copy(error)  # which holds no frames, as `error` does
                PROGRAMS.trim()
                raise
            shapes = program.blueprint.shapes(given)
            assert shapes is not None
            candidates.append(program)
            del candidates[:-_MOST_CANDIDATES]
        PROGRAMS.exact[exact] = (program, shapes)
        PROGRAMS.trim()
        return program, shapes


def _what_a_trace_sees(source: Source) -> tuple:
    _, captured, seen, sig, device, num_outputs = source
    first: dict[int, str] = {}  # a tensor under two names is one to the trace
    statics = tuple(
        (path, first.setdefault(id(t), path), tuple(t.shape), tuple(t.stride()), t.dtype, t.requires_grad) for path, t in captured.items()
    )
    return seen.fingerprint, sig, num_outputs, device, statics, torch.get_default_dtype()


def cut_for(take_apart: Callable[..., Cut], source: Source, metas: Sequence[Meta]) -> Cut:
    """Return the pieces of a core that mixes neurons, for a call as of `program_for`."""
    core, captured, _, sig, device, num_outputs = source
    key = (*_what_a_trace_sees(source), tuple(metas))
    with lock:
        if key not in PROGRAMS.cuts:
            PROGRAMS.cuts[key] = take_apart(core, sig, metas, device, captured, num_outputs)
            PROGRAMS.trim()
        return PROGRAMS.cuts[key]


def _pattern(meta: Meta | None) -> tuple | None:
    return None if meta is None else (tuple(n == 1 for n in meta.shape), meta.dtype)


def program_from(program: str, device: torch.device, backend: str | None = None) -> Program:
    """Return the program that a text describes, for operands on `device` (by default by the device's backend)."""
    key = (program, backend or backend_of(device), device)
    with lock:
        if key not in PROGRAMS.by_text:
            with no_modes():
                PROGRAMS.by_text[key] = Program(key[1], read(program, device), device)
            PROGRAMS.trim()
        return PROGRAMS.by_text[key]


def keep_under_text(program: str, made: Program) -> None:
    """Keep a program under its text, which then need not be read in this process."""
    with lock:
        PROGRAMS.by_text.setdefault((program, backend_of(made.device), made.device), made)
