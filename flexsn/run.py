"""Run a program on tensors: one forward kernel, one backward kernel, prologue and epilogue around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .compile import Program, Shapes, rescale
from .graph import HALF
from .memory import empty
from .plan import Plan


@dataclass(frozen=True)
class Call:
    """Everything about one call but its tensors.

    Attributes:
        statics: names of the params and captured tensors, in the order in which they are passed.
        sequences: whether the states of every step are returned too.
    """

    program: Program
    shapes: Shapes
    T: int
    statics: tuple[str, ...]
    sequences: bool


@dataclass
class Forward:
    """What a forward pass gives: `[T, *shape]` outputs and state sequences, final states, checkpoints to save."""

    outputs: list[Tensor]
    finals: list[Tensor]
    sequences: list[Tensor]
    checkpoints: dict[str, Tensor]


def forward(call: Call, inputs: Sequence[Tensor], states: Sequence[Tensor | None], statics: dict[str, Tensor], save: bool) -> Forward:
    """Run all T steps.

    Args:
        inputs: rows as `rows()` gives them.
        states: initial states as `rows()` gives them, or None for zeros.
        save: also write checkpoints for a backward.
    """
    program, shapes, T = call.program, call.shapes, call.T
    kernel = program.kernel("forward", tuple(x.dtype for x in inputs), save, call.sequences)
    checkpoints = program.backend.checkpoints(T, program.chunk)
    arrays = _operands(call, inputs, states)
    params, dims = _params(kernel.plan, program.prologue(statics), shapes.step, inputs[0].device)
    arrays |= params
    written = {}
    for a in kernel.plan.writes:
        rows = {"sequence": (T,), "checkpoint": (checkpoints,), "row": ()}[a.kind]
        written[a.role] = empty((*rows, *shapes.step), a.storage, inputs[0].device)
    kernel([arrays[a.role] for a in kernel.plan.reads] + [written[a.role] for a in kernel.plan.writes], dims, T, shapes.numel)
    if T == 0:
        for k, state in enumerate(states):
            final = written[f"v{k}"]
            final.zero_() if state is None else final.copy_(state)
    outputs = [_narrow(written[f"y{k}"], (T, *s), 1) for k, s in enumerate(shapes.outputs)]
    finals = [_narrow(written[f"v{k}"], s, 0) for k, s in enumerate(shapes.states)]
    sequences = [_narrow(written[f"s{k}"], (T, *s), 1) for k, s in enumerate(shapes.states)] if call.sequences else []
    return Forward(outputs, finals, sequences, {r: t for r, t in written.items() if r[0] == "c"})


@torch.autocast("cpu", enabled=False)
@torch.autocast("cuda", enabled=False)
def backward(
    call: Call, inputs: Sequence[Tensor], states: Sequence[Tensor | None], statics: dict[str, Tensor],
    checkpoints: dict[str, Tensor], cotangents: dict[str, Tensor], wanted: Sequence[str], wanted_statics: tuple[bool, ...],
) -> tuple[dict[str, Tensor], list[Tensor | None]]:  # fmt: skip
    """Walk back over all T steps.

    Args:
        cotangents: those that exist, `gy*` (outputs), `gs*` (state sequences), `gv*` (final states).
        wanted: `gx*` and `gv*` to compute.
        wanted_statics: which params and captured tensors (in the order of the VJP) need a gradient.

    Returns:
        Gradients of inputs and initial states by role, and gradients of the statics.
    """
    program, shapes, T = call.program, call.shapes, call.T
    vjp = program.vjp
    assert vjp is not None
    epilogue, sums = vjp.epilogue(wanted_statics)
    wanted = [r for r in wanted if r in vjp.graph.outputs]
    present = tuple(sorted(r for r in cotangents if r[:2] != "gv"))
    kernel = program.kernel("backward", tuple(x.dtype for x in inputs), (*wanted, *sums), present)
    arrays: dict[str, Tensor | None] = {**_operands(call, inputs, states), **checkpoints}
    for role, grad in cotangents.items():
        arrays[role] = _widen(grad, shapes.step, 0 if role[:2] == "gv" else 1)
    params, dims = _params(kernel.plan, vjp.prologue(statics), shapes.step, inputs[0].device)
    arrays |= params
    written = {}
    for a in kernel.plan.writes:
        rows = (T,) if a.kind == "sequence" else ()
        written[a.role] = empty((*rows, *shapes.step), a.storage, inputs[0].device)
    if T == 0:
        for role, grad in written.items():
            final = arrays.get(role)
            grad.zero_() if final is None else grad.copy_(final)
    kernel([arrays.get(a.role) for a in kernel.plan.reads] + [written[a.role] for a in kernel.plan.writes], dims, T, shapes.numel)
    shapes_of_sums = [rescale(tuple(vjp.frontier[r].meta["val"].shape), program.step, shapes.step) for r in sums]
    found = epilogue(statics, [unbroadcast(written[r], s, 0) for r, s in zip(sums, shapes_of_sums, strict=True)])
    return {r: written[r] for r in wanted}, [found.get(str(k)) for k in range(len(wanted_statics))]


def rows(tensor: Tensor, step: tuple[int, ...], leading: int) -> Tensor:
    """An operand broadcast to the step shape after `leading` dims, contiguous: rows of N neurons."""
    target = (*tensor.shape[:leading], *step)
    if tensor.shape != target:
        missing = len(target) - tensor.dim()
        tensor = tensor.reshape(*tensor.shape[:leading], *([1] * missing), *tensor.shape[leading:]).expand(target)
    return tensor.contiguous()


def unbroadcast(grad: Tensor, shape: tuple[int, ...], leading: int) -> Tensor:
    """The gradient of an operand from the gradient of its rows."""
    step = shape[leading:]
    return grad if grad.shape == shape else _sum_steps(grad, step, leading).reshape(shape)


def _sum_steps(grad: Tensor, step: tuple[int, ...], leading: int) -> Tensor:
    missing = grad.dim() - leading - len(step)
    dims = list(range(leading, leading + missing))
    dims += [d + leading + missing for d, n in enumerate(step) if n == 1 and grad.shape[d + leading + missing] != 1]
    return grad.sum(dims) if dims else grad


def _operands(call: Call, inputs: Sequence[Tensor], states: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    arrays: dict[str, Tensor | None] = {f"x{k}": x for k, x in enumerate(inputs)}
    return arrays | {f"v{k}": v for k, v in enumerate(states)}


def _params(
    plan: Plan, params: dict[str, Tensor], step: tuple[int, ...], device: torch.device
) -> tuple[dict[str, Tensor | None], list[int]]:
    """Params that a plan reads, and `inner, count` of each: element i of the step reads `(i / inner) % count`."""
    arrays: dict[str, Tensor | None] = {}
    dims: list[int] = []
    for a in plan.reads:
        if a.kind == "param":
            tensor, inner, count = _by_index(params[a.role].to(device), step)  # a number may be a tensor on the CPU
            arrays[a.role] = tensor
            dims += [inner, count]
    return arrays, dims


def _by_index(param: Tensor, step: tuple[int, ...]) -> tuple[Tensor, int, int]:
    """A param whose broadcast dims lie outside one solid block needs no copy; any other is expanded."""
    shape = (1,) * (len(step) - param.dim()) + tuple(param.shape)
    solid = [d for d, n in enumerate(shape) if n != 1]
    if not solid:
        return param, max(1, math.prod(step)), 1
    block = range(solid[0], solid[-1] + 1)
    if all(shape[d] == step[d] for d in block):
        return param.contiguous(), math.prod(step[block.stop :]), math.prod(shape)
    return param.expand(step).contiguous(), 1, math.prod(step)


def _narrow(full: Tensor, shape: tuple[int, ...], leading: int) -> Tensor:
    """What the core returns at a smaller shape is constant along the dims it lacks."""
    if full.shape == shape:
        return full
    missing = full.dim() - len(shape)
    for _ in range(missing):
        full = full.select(leading, 0)
    for d, n in enumerate(shape):
        if n == 1 and full.shape[d] != 1:
            full = full.narrow(d, 0, 1)
    return full.contiguous()


def _widen(grad: Tensor, step: tuple[int, ...], leading: int) -> Tensor:
    """The adjoint of `_narrow`."""
    if grad._is_zerotensor():  # a gradient without memory, as that of `sgn`
        grad = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
    target = (*grad.shape[:leading], *step)
    if grad.shape == target:
        return grad.contiguous()
    full = grad.new_zeros(target)
    part = full
    for _ in range(len(target) - grad.dim()):
        part = part.select(leading, 0)
    for d, n in enumerate(grad.shape):
        if n == 1 and part.shape[d] != 1:
            part = part.narrow(d, 0, 1)
    part.copy_(grad)
    return full


def upcast(tensor: Tensor) -> Tensor:
    """16-bit floats are computed in float32."""
    return tensor.float() if tensor.dtype in HALF else tensor
