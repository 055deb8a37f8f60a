"""The kernels as PyTorch operators: `flexsn::forward` and `flexsn::backward`, one launch each.

They are what a traced graph holds, so they take the whole program as a string and every other argument as plain tensors
and sizes: nothing in them belongs to one process. Operands broadcast to the step shape `step`, results have it in full, in
the order of memory of the first input. Prologue, epilogue and narrowing are ordinary ops around them (`_operator/call.py`), which the
compiler sees and fuses.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._captured.captured_values import lock
from .._ir.roles import Kind, Role, roles
from .._plan.plan import Plan
from .._program import serialize
from .._program.cache import keep_under_text, program_from
from .._program.captured import Blueprint
from .._program.compiled import Program
from .._runtime.launch import Launch, allocated, arrays_of
from .._runtime.layout import Order, dense, memory_order, same_shape, strides_of
from ..errors import OperandTypeError
from .call import Call

LIBRARY = torch.library.Library("flexsn", "FRAGMENT")
TAGS = (torch.Tag.pt2_compliant_tag,)
LIBRARY.define(
    "forward(str program, Tensor[] inputs, Tensor?[] states, Tensor[] params, SymInt[] step, SymInt checkpoints, bool save, "
    "bool sequences) -> Tensor[]",
    tags=TAGS,
)
LIBRARY.define(
    "backward(str program, Tensor[] inputs, Tensor?[] states, Tensor[] params, Tensor[] checkpoints, Tensor[] cotangents, "
    "str[] given, str[] wanted, SymInt[] step) -> Tensor[]",
    tags=TAGS,
)


# --- programs by their text ---------------------------------------------------------------------------------------------------
_CACHE_SIZE = 512


def _trim(cache: OrderedDict) -> None:
    while len(cache) > _CACHE_SIZE:
        cache.popitem(last=False)


def text_of(blueprint: Blueprint, *, vjp: bool) -> str:
    """Return what `serialize.write` does, written once per blueprint."""
    kept = blueprint.texts
    if vjp not in kept:
        kept[vjp] = serialize.write(blueprint, vjp=vjp)
    return kept[vjp]


# --- flexsn::forward ------------------------------------------------------------------------------------------------------------
def _flags_forward(inputs: Sequence[Tensor], save: bool, sequences: bool) -> tuple:
    return tuple([x.dtype for x in inputs]), save, sequences


def _roles(
    inputs: Sequence[Tensor], states: Sequence[Tensor | None], saved: Sequence[Tensor] = (), given: tuple[Role, ...] = ()
) -> tuple[Role | None, ...]:
    """Return the roles of the operands, in order; None for states that start at zero."""
    kinds = ((Kind.INPUT, inputs), (Kind.STATE, states), (Kind.CHECKPOINT, saved))
    return (*[None if t is None else Role(kind, k) for kind, tensors in kinds for k, t in enumerate(tensors)], *given)


def leading_dims(role: Role) -> int:
    """Return how many dims an operand has before those of the step: one for time, but none for a single row of states."""
    return 0 if role.kind in (Kind.STATE, Kind.STATE_GRAD) else 1


def _order(inputs: Sequence[Tensor], step: Sequence[int]) -> Order | None:
    return memory_order(inputs[0]) if same_shape(inputs[0].shape[1:], tuple(step)) else None


def like_row(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, leading: int, order: Order | None) -> Tensor:
    if order is None:
        return like.new_empty(shape, dtype=dtype)
    return like.new_empty_strided(shape, strides_of(shape, leading, order), dtype=dtype)


def _laid_out(operands: Sequence[Tensor | None], roles: Sequence[Role | None], launch: Launch) -> list[Tensor | None]:
    """Return the operands as kernels take them: at the step shape, in dense memory."""
    found: list[Tensor | None] = []
    for role, tensor in zip(roles, operands, strict=True):
        leading = 0 if role is None else leading_dims(role)
        if role is None or tensor is None or (role.kind is Kind.CHECKPOINT and tensor.shape[leading:] != launch.step):
            found.append(tensor)  # no checkpoints of this call
            continue
        if tensor.shape[leading:] != launch.step:
            tensor = tensor.expand(*tensor.shape[:leading], *launch.step)
        found.append(dense(tensor, leading, launch.order))
    return found


def _check(
    launch: Launch, roles: Sequence[Role | None], operands: Sequence[Tensor | None], params: Mapping[Role, Tensor], checkpoints: int
) -> None:
    """Raise if what a graph passes is shorter than a kernel reads, or of another dtype: kernels take pointers."""
    arrays = dict(zip(roles, operands, strict=True))
    rows = {"sequence": launch.T, "checkpoint": checkpoints, "row": 1}
    for a in launch.kernel.plan.reads:
        tensor = params.get(a.role) if a.kind == "param" else arrays.get(a.role)
        if tensor is None and (a.kind == "row" or (a.kind == "checkpoint" and not checkpoints)):
            continue  # zeros; none are read
        if tensor is None or tensor.dtype is not a.storage or (a.kind != "param" and tensor.numel() < rows[a.kind] * launch.numel):
            found = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise OperandTypeError(
                f"a {a.kind} of a kernel, `{a.role}`, is {found}; expected {a.storage}, for {launch.T} steps of {list(launch.step)}",
                core=launch.kernel.plan.core,
            )


def _kinds(tensors: Sequence[Tensor | None]) -> tuple:
    return tuple([None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors])


def by_role(params: Sequence[Tensor] | None) -> dict[Role, Tensor]:
    """Return params of a kernel by role; they go by place. (A package of AOTInductor passes None for an empty list.)"""
    return {Role(Kind.PARAM, k): p for k, p in enumerate(params or ())}


Operands = Sequence[Tensor | None]
Roles = tuple[Role | None, ...]
Made = Callable[[Program, int], tuple[Any, Roles, int, int]]  # the kernel, the roles of operands, checkpoints to write, and to read

# By all that a call depends on but the tensors: its launch, the roles of its operands, and whether it takes these as they are
_launches: OrderedDict[tuple, tuple[Launch, Roles, bool]] = OrderedDict()


def _settle(
    program: str, inputs: Sequence[Tensor], step: tuple[int, ...], others: tuple, operands: Operands, params: Sequence[Tensor] | None,
    made: Made,
) -> tuple[Launch, Operands]:  # fmt: skip
    """Return a launch, and the operands as it takes them: as they are, if calls with operands of these kinds need no change.

    Args:
        others: what the call depends on besides the program, the step shape and the operands.
        made: makes the kernel for a program and a number of steps.
    """
    device, T = inputs[0].device, inputs[0].shape[0]
    key = (device, program, step, others, _kinds(operands), _kinds(params) if params else ())
    kept = _launches.get(key)
    if kept is not None:
        launch, roles, as_they_are = kept
        return launch, operands if as_they_are else _laid_out(operands, roles, launch)
    own = program_from(program, device)
    kernel, roles, written, read = made(own, T)
    launch = Launch(kernel, device, T, step, written, roles, _order(inputs, step))
    laid_out = _laid_out(operands, roles, launch)
    _check(launch, roles, laid_out, by_role(params), read)
    as_they_are = all(a is b for a, b in zip(laid_out, operands, strict=True))
    with lock:
        _launches[key] = launch, roles, as_they_are
        _trim(_launches)
    return launch, operands if as_they_are else laid_out


def settle_forward(
    operands: Operands, program: str, inputs: list[Tensor], states: Operands, params: list[Tensor], step: list[int], checkpoints: int,
    save: bool, sequences: bool,
) -> tuple[Launch, Operands]:  # fmt: skip
    """Return the launch of a call of `flexsn::forward`, and its operands as that takes them."""

    def made(own: Program, T: int) -> tuple[Any, Roles, int, int]:
        return own.kernel(T, "forward", *_flags_forward(inputs, save, sequences)), _roles(inputs, states), checkpoints, 0

    return _settle(program, inputs, tuple(step), (checkpoints, save, sequences), operands, params, made)


def _forward(program: str, inputs: list[Tensor], states: Operands, params: list[Tensor], *others: Any) -> list[Tensor]:
    launch, operands = settle_forward((*inputs, *states), program, inputs, states, params, *others)
    return launch(operands, by_role(params))


WHEN_TRACED: list[Callable[[], None]] = []  # called as often as a trace meets one of the operators


def _fake_arrays(made: Plan, T: Any, step: Sequence[int], checkpoints: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    for prepare in WHEN_TRACED:
        prepare()
    order = _order(inputs, step)
    arrays = arrays_of(allocated(made, checkpoints), T, tuple(step), checkpoints)
    return [like_row(inputs[0], shape, dtype, len(shape) - len(step), order) for _, shape, dtype in arrays]


def _fake_forward(
    program: str, inputs: list[Tensor], states: Operands, params: list[Tensor], step: list[int], checkpoints: int, save: bool,
    sequences: bool,
) -> list[Tensor]:  # fmt: skip
    made = program_from(program, inputs[0].device).plan_of("forward", *_flags_forward(inputs, save, sequences))
    return _fake_arrays(made, inputs[0].shape[0], step, checkpoints, inputs)


# --- flexsn::backward -----------------------------------------------------------------------------------------------------------
def _flags_backward(inputs: Sequence[Tensor], given: Sequence[str], wanted: Sequence[str]) -> tuple:
    return tuple([x.dtype for x in inputs]), tuple(wanted), tuple([r for r in map(Role.of, given) if r.kind is not Kind.STATE_GRAD])


def settle_backward(
    operands: Operands, program: str, inputs: list[Tensor], states: Operands, params: list[Tensor], checkpoints: list[Tensor],
    cotangents: list[Tensor], given: list[str], wanted: list[str], step: list[int],
) -> tuple[Launch, Operands]:  # fmt: skip
    """Return the launch of a call of `flexsn::backward`, and its operands as that takes them."""

    def made(own: Program, T: int) -> tuple[Any, Roles, int, int]:
        kernel = own.kernel(T, "backward", *_flags_backward(inputs, given, wanted))
        return kernel, _roles(inputs, states, checkpoints, tuple(map(Role.of, given))), 0, own.checkpoints(T)

    return _settle(program, inputs, tuple(step), (len(checkpoints), tuple(given), tuple(wanted)), operands, params, made)


def _backward(
    program: str, inputs: list[Tensor], states: Operands, params: list[Tensor], checkpoints: list[Tensor], cotangents: list[Tensor],
    *others: Any,
) -> list[Tensor]:  # fmt: skip
    given = (*inputs, *states, *checkpoints, *cotangents)
    launch, operands = settle_backward(given, program, inputs, states, params, checkpoints, cotangents, *others)
    return launch(operands, by_role(params))


def _fake_backward(
    program: str, inputs: list[Tensor], states: Operands, params: list[Tensor], checkpoints: list[Tensor], cotangents: list[Tensor],
    given: list[str], wanted: list[str], step: list[int],
) -> list[Tensor]:  # fmt: skip
    made = program_from(program, inputs[0].device).plan_of("backward", *_flags_backward(inputs, given, wanted))
    return _fake_arrays(made, inputs[0].shape[0], step, 0, inputs)


# --- vmap: one more dim in front of the step shape ----------------------------------------------------------------------------------
def _batched(tensor: Tensor | None, dim: int | None, leading: int, step: Sequence[int]) -> Tensor | None:
    """Return `tensor` with its batch dim (one of size 1 if it has none) right after `leading` dims, then the dims of the step."""
    if tensor is None:
        return None
    tensor = tensor.unsqueeze(leading) if dim is None else tensor.movedim(dim, leading)
    missing = leading + 1 + len(step) - tensor.dim()
    return tensor.reshape(*tensor.shape[: leading + 1], *([1] * missing), *tensor.shape[leading + 1 :])


def _all_batched(tensors: Sequence[Tensor | None], dims: Any, leading: int, step: Sequence[int]) -> list[Tensor | None]:
    dims = dims or [None] * len(tensors)
    return [_batched(t, d, leading, step) for t, d in zip(tensors, dims, strict=True)]


def _vmap_forward(
    info: Any, in_dims: tuple, program: str, inputs: list[Tensor], states: Operands, params: list[Tensor], step: list[int],
    checkpoints: int, save: bool, sequences: bool,
) -> tuple:  # fmt: skip
    x, v, p = in_dims[1:4]
    wide = [info.batch_size, *step]
    found = torch.ops.flexsn.forward(
        program, _all_batched(inputs, x, 1, step), _all_batched(states, v, 0, step), _all_batched(params, p, 0, step), wide, checkpoints,
        save, sequences,
    )  # fmt: skip
    return found, [f.dim() - len(wide) for f in found]


def _vmap_backward(
    info: Any, in_dims: tuple, program: str, inputs: list[Tensor], states: Operands, params: list[Tensor], checkpoints: list[Tensor],
    cotangents: list[Tensor], given: list[str], wanted: list[str], step: list[int],
) -> tuple:  # fmt: skip
    x, v, p, c, g = in_dims[1:6]
    wide = [info.batch_size, *step]
    g = g or [None] * len(given)
    grads = [_batched(t, d, leading_dims(Role.of(r)), step) for t, d, r in zip(cotangents, g, given, strict=True)]
    saved = _all_batched(checkpoints, c, 1, step)
    rows = [t.expand(t.shape[0], *wide) for t in saved if t is not None]
    found = torch.ops.flexsn.backward(
        program, _all_batched(inputs, x, 1, step), _all_batched(states, v, 0, step), _all_batched(params, p, 0, step), rows, grads, given,
        wanted, wide,
    )  # fmt: skip
    return found, [f.dim() - len(wide) for f in found]


for _name, _real, _fake, _vmap in (
    ("forward", _forward, _fake_forward, _vmap_forward),
    ("backward", _backward, _fake_backward, _vmap_backward),
):
    LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flexsn::{_name}", _fake, lib=LIBRARY)
    torch.library.register_vmap(f"flexsn::{_name}", _vmap, lib=LIBRARY)


KERNEL_OPERATORS = torch.ops.flexsn.forward.default, torch.ops.flexsn.backward.default


# --- flexsn::carry --------------------------------------------------------------------------------------------------------------
LIBRARY.define("carry(Tensor state) -> Tensor", tags=(*TAGS, torch.Tag.cudagraph_unsafe))
LIBRARY.impl("carry", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("flexsn::carry", torch.clone, lib=LIBRARY)
torch.library.register_autograd("flexsn::carry", lambda ctx, grad: grad, lib=LIBRARY)


def carry(state: Tensor) -> Tensor:
    """Return a copy that no CUDA graph owns: a state that the next call takes, while that call's graph reuses its own memory.
    Compiled without CUDA graphs it is the state itself."""
    return torch.ops.flexsn.carry(state)


IN_ONNX: list[Any] = []  # what runs the operators in an export to ONNX, which has none of them: `_torch_compile/export.py` puts it there


def exports_to_onnx() -> bool:
    """Whether `torch.onnx.export` runs."""
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and onnx.is_in_onnx_export()


# --- a call that is traced ----------------------------------------------------------------------------------------------------------
class TracedCall(Call):
    """A call whose tensors are traced, fake, or wrapped by a transform: its launches are operators."""

    @property
    def device(self) -> torch.device:
        return self.program.device

    def compile(self, tensors: Sequence[Tensor | None]) -> None:
        """Decide how the call runs; how its operands lie is seen where they are read, which a transform may change."""
        self._prepare_forward()

    def _expect_backward(self) -> None:
        """Nothing is built while tracing."""

    def _launch(self, direction: str, flags: tuple, others: tuple[Role, ...], prologue: Any) -> OperatorLaunch:
        return OperatorLaunch(self, direction, flags, others)


class OperatorLaunch:
    """Stands where `run.Launch` does, and calls the operator."""

    def __init__(self, call: TracedCall, direction: str, flags: tuple, others: tuple[Role, ...]):
        self.call, self.direction, self.flags, self.others = call, direction, flags, others
        self.given = [str(r) for r in others if r.kind.is_grad]
        params = call.program.vjp.params if direction == "backward" else call.program.params
        self.params = roles(Kind.PARAM, len(params))  # all: they go by place
        self.program = text_of(call.program.blueprint, vjp=direction == "backward")
        keep_under_text(self.program, call.program)
        self.writes = allocated(call.program.plan_of(direction, *flags), call.checkpoints)
        self.places = {a.role: place for place, a in enumerate(self.writes)}

    def run(self, given: Sequence[Tensor | None]) -> list[Tensor]:
        """As `Launch.run`; `given`: operands, statics, then in a backward checkpoints and cotangents, then params."""
        call, ops = self.call, IN_ONNX[-1] if exports_to_onnx() and IN_ONNX else torch.ops.flexsn
        i, n = call.num_inputs, call.num_operands
        inputs, states, rest = list(given[:i]), list(given[i:n]), list(given[len(call.kinds) :])
        others, values = rest[: len(self.others)], rest[len(self.others) :]
        step = list(call.shapes.step)
        if self.direction == "forward":
            _, save, sequences = self.flags
            return ops.forward(self.program, inputs, states, values, step, call.checkpoints if save else 0, save, sequences)
        grads = len(others) - len(self.given)
        wanted = [str(r) for r in self.flags[1]]
        return ops.backward(self.program, inputs, states, values, others[:grads], others[grads:], self.given, wanted, step)
