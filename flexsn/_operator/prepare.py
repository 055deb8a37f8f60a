"""Find or make the program for a call, and what is known of such calls: the slow path, which one call of a kind takes."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._capture.signature import Signature, step_shape
from .._capture.trace import Meta
from .._captured.captured_values import CapturedValues
from .._program.cache import Source, program_for
from .._program.captured import Blueprint, Shapes
from .._program.compiled import Program
from .._program.dual import Dual
from .._program.symbolic_sizes import Sizes, exactly, settle_sizes
from .._runtime.backends import choose_backend
from .._runtime.memory import addresses
from .._torch.autograd import forward_ad_level, records_gradients, transformed
from .._torch.availability import TRANSFORMS, require
from .._torch.capture import no_modes
from .._torch.tensors import has_pointer, overrides_operators
from .._torch.transforms import has_tangent, is_plain, transforms_active, transforms_or_modes_active
from ..errors import DoubleBackwardError, OperandTypeError, UnsupportedOpError, UnsupportedValueError
from . import call as run
from .library import TracedCall, exports_to_onnx

PLAIN = (Tensor, torch.nn.Parameter)


class CoreCall(NamedTuple):
    """A call of a core.

    Attributes:
        seen: what the core captures; `captured`: the tensors among that, by name.
        states: None for default ones.
        backend, strict, sequences, num_outputs: as `run_core` has them.
    """

    core: Callable
    seen: CapturedValues
    sig: Signature
    inputs: Sequence[Tensor]
    states: Sequence[Tensor | None]
    params: Sequence[Tensor]
    captured: dict[str, Tensor]
    num_outputs: int | None = None
    backend: str = "auto"
    strict: bool = False
    sequences: bool = False

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        """Inputs, states and params."""
        return (*self.inputs, *self.states, *self.params)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Operands, then captured tensors."""
        return (*self.operands, *self.captured.values())

    @property
    def metas(self) -> list[Meta | None]:
        """Of the operands, at one step."""
        found: list[Meta | None] = [Meta(tuple(x.shape[1:]), x.dtype) for x in self.inputs]
        return found + [None if t is None else Meta(tuple(t.shape), t.dtype) for t in (*self.states, *self.params)]

    def on(self, core: Callable, captured: dict[str, Tensor]) -> Source:
        """Return what a capture meets: the core on stand-ins, and these."""
        return Source(core, captured, self.seen, self.sig, self.inputs[0].device, self.num_outputs)


def prepare(asked: CoreCall, build: bool = True) -> run.Call:
    """Find or make the program for a call, and `build` its kernels."""
    sig, tensors, captured, hidden = asked.sig, asked.tensors, asked.captured, transforms_active()
    forward_mode = forward_ad_level() >= 0 and any(t is not None and has_tangent(t) for t in tensors)
    if hidden:
        require(TRANSFORMS)
    _refuse_overriding(sig, (*sig.names, *captured), tensors)
    traced = forward_mode or transforms_or_modes_active() or not all(t is None or is_plain(t) for t in tensors)
    name = choose_backend(asked.backend, asked.inputs[0].device, sig.core, traced=traced)
    hidden = hidden or forward_mode  # what is differentiated is not seen from here
    records = (records_gradients() or forward_mode) and not exports_to_onnx()
    differentiable = records and any(_may_need_grad(t, hidden) for t in tensors)

    def operands(program: Program, trains: bool) -> tuple[tuple[str, ...], tuple[Tensor | None, ...]]:
        read = program.blueprint.captured(vjp=trains)
        return read, (*asked.operands, *[captured[n] for n in read])

    def made(kind: type[run.Call], program: Program, shapes: Shapes) -> run.Call:
        # what a core leads to, and does not read, may be all that needs a gradient
        trains = differentiable and any(_may_need_grad(t, hidden) for t in operands(program, True)[1])
        read, given = operands(program, trains)
        call = kind(program, shapes, asked.inputs[0].shape[0], (*sig.param_names, *read), asked.sequences, trains, given)
        if trains:
            call.source = SourceOf(asked.core, asked.seen, sig)
            call.keep = call.source.keep
        if build and kind is run.Call:
            call.compile(given)
        return call

    if traced:
        return made(TracedCall, *_while_tracing(name, asked, differentiable))
    program, shapes = _program(name, asked.on(*asked.seen.stand_ins(asked.core, stand_in)), asked.metas, differentiable)
    if not shapes.numel and any(torch.Size(s).numel() for s in (*shapes.outputs, *shapes.states)):
        raise UnsupportedOpError(
            f"returns values although the step shape {list(shapes.step)} has no elements", core=sig.core,
            hint="Leave out the operand without elements, on which they do not depend.",
        )  # fmt: skip
    return made(TracedCall if asked.backend == "hop" else run.Call, program, shapes)


class SourceOf:
    """A core on stand-ins of what it captures, made when a gradient is differentiated. Graphs of autograd, which
    may hang from what a network holds, keep a function alive (`keep`), unless a module holds it, and it may lead back to that."""

    def __init__(self, core: Any, seen: CapturedValues, sig: Signature):
        method = isinstance(core, types.MethodType)
        self.core: Any = weakref.WeakMethod(core) if method else weakref.ref(core)
        self.seen, self.sig, self.fingerprint, self.wraps = weakref.ref(seen), sig, seen.fingerprint, seen.wraps
        function = isinstance(core, (types.FunctionType, functools.partial))
        self.keep = self.core if function and (seen.simple or not seen.owned) else None

    def __call__(self) -> tuple[Callable, dict[str, Tensor]]:
        core, seen = self.core(), self.seen()
        if core is not None and (seen is None or not seen.valid(core)):
            seen = functools.reduce(CapturedValues.wrapped, self.wraps, CapturedValues(core))
        if core is None or seen is None or seen.fingerprint != self.fingerprint:
            what = "is gone" if core is None else "captures something else now"
            raise DoubleBackwardError(
                f"is differentiated twice, and {what}", core=self.sig.core, hint="Keep it as it is until the last backward has run."
            )
        on_stand_ins, stand_ins = seen.stand_ins(core, functools.partial(stand_in, transformed=True))
        return on_stand_ins.unchecked, stand_ins  # type: ignore[attr-defined]  # as `stand_ins` says


class SourceOfDual:
    """A dual core on stand-ins, for derivatives of a derivative."""

    def __init__(self, dual: Dual, source: Any):
        self.dual, self.source, self.keep = dual, source, source.keep

    def __call__(self) -> tuple[Callable, dict[str, Tensor]]:
        made = self.dual.on(self.source)
        return made, made.captured


def prepare_dual(
    source: Any, dual: Dual, groups: Sequence[Sequence[Tensor | None]], read: dict[str, Tensor], sequences: bool
) -> tuple[run.Call, tuple]:
    """Return the call of a dual core (`_program/dual.py`) on inputs, states and params, and its operands.

    Args:
        source: gives the core that it differentiates.
        read: the captured tensors of the core that it differentiates, by name.
    """
    inputs, states, params = groups
    given = (*inputs, *states, *params, *read.values())
    device, hidden = next(t for t in inputs if t is not None).device, transforms_active() or forward_ad_level() >= 0
    trains = records_gradients() and any(_may_need_grad(t, hidden) for t in given)
    metas = [None if t is None else Meta(tuple(t.shape[1:] if k < len(inputs) else t.shape), t.dtype) for k, t in enumerate(given)]
    program, shapes = dual.program(source, metas[: dual.sig.num_inputs + dual.sig.num_states + dual.sig.num_params], device, trains)
    names = program.blueprint.captured(vjp=trains)
    operands = (*inputs, *states, *params, *[read[name] for name in names])
    plain = not hidden and not transforms_or_modes_active() and all(t is None or is_plain(t) for t in operands)
    T = inputs[0].shape[0]  # type: ignore[union-attr]  # an input is there
    call = (run.Call if plain else TracedCall)(program, shapes, T, (*dual.sig.param_names, *names), sequences, trains, operands)
    call.source, call.keep = SourceOfDual(dual, source), source.keep
    call.compile(operands)
    return call, operands


def _program(name: str, source: Source, metas: Sequence[Meta | None], differentiable: bool) -> tuple[Program, Shapes]:
    """The program for a call, with its VJP if asked for: which may show that a program made for another size does not fit this one."""
    while True:
        program, shapes = program_for(name, source, metas)
        if not differentiable:
            return program, shapes
        program.differentiate(source.core, source.captured, source.seen)
        if program.fits(metas):
            return program, shapes


def _refuse_overriding(sig: Signature, names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    """A kernel does what PyTorch's operators mean, not what a class makes of them."""
    for name, tensor in zip(names, tensors, strict=True):
        if type(tensor) not in (*PLAIN, type(None)) and overrides_operators(type(tensor)):
            raise UnsupportedValueError(
                f"`{name}` is a {type(tensor).__name__}, a class that overrides operators of PyTorch", core=sig.core,
                hint="Pass `tensor.as_subclass(torch.Tensor)`.",
            )  # fmt: skip


def refuse_freed(sig: Signature, names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    """PyTorch itself crashes on a tensor whose storage was freed."""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None and type(tensor) in PLAIN and is_plain(tensor) and has_pointer(tensor):
            try:
                addresses([tensor])
            except OperandTypeError as error:
                raise OperandTypeError(f"`{name}` has no memory: its storage was freed", core=sig.core, hint=error.hint) from None


def _may_need_grad(tensor: Tensor | None, transformed: bool) -> bool:
    """`transformed`: by `torch.func`; a transform inside another hides what the outer one differentiates."""
    return tensor is not None and (tensor.requires_grad or (transformed and (tensor.is_floating_point() or tensor.is_complex())))


def stand_in(tensor: Tensor, transformed: bool = False) -> Tensor:
    """Return a plain tensor of the same type, shape and dtype, a leaf of autograd."""
    if tensor.layout is not torch.strided or tensor.is_nested:  # which is refused by name where the core uses it
        return tensor
    if is_plain(tensor) and not transformed:
        plain = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    else:
        plain = torch.empty(exactly(tensor.shape), dtype=tensor.dtype, device=tensor.device)
    plain.requires_grad_(_may_need_grad(tensor, transformed))
    return torch.nn.Parameter(plain, plain.requires_grad) if isinstance(tensor, torch.nn.Parameter) else plain


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of the same class, under transforms too."""
    made = tensor.clone()
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


def _while_tracing(name: str, asked: CoreCall, differentiable: bool) -> tuple[Program, Shapes]:
    """Find or make the program for a call whose tensors cannot be read: the core runs on stand-ins of captured tensors, and
    symbolic sizes get numbers."""
    sig, metas = asked.sig, asked.metas
    ins = sig.num_inputs + sig.num_states
    shapes = [m.shape for m in metas[:ins] if m is not None]
    step_shape(sig, shapes)  # which sizes must be equal
    make = functools.partial(stand_in, transformed=transformed())  # asked before the transforms are set aside
    with no_modes():
        source = asked.on(*asked.seen.stand_ins(asked.core, make))
        made: list[Program] = []

        def draw_at(sizes: Sizes) -> Blueprint:
            numbered = [None if m is None else Meta(sizes.of(m.shape, exact=i >= ins), m.dtype) for i, m in enumerate(metas)]
            made.append(_program(name, source, numbered, differentiable)[0])
            return made[-1].blueprint

        settle_sizes(draw_at, shapes)
        program = made[-1]
    found = program.blueprint.shapes(shapes)
    assert found is not None
    return program, found
