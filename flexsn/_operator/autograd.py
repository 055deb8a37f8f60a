"""The ways to a kernel, each an autograd formula around `run.forward` and `run.backward`.

- eager, plain tensors: `_Eager`, the cheapest formula that autograd knows;
- under `torch.func` (`grad`, `vmap`, `jacrev`, ...): `_Traced`, a formula that transforms compose with;
- traced by the compiler or by export, fake tensors: the operator `flexsn::scan`, one node that carries the program as a
  string. Below autograd it dissolves into prologue, kernel operator (`_operator/library.py`) and epilogue.

Each ends in one kernel per direction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._capture.trace import Meta
from .._program.cache import program_from
from .._runtime import fork as forks
from .._runtime.layout import is_dense, memory_order, same_shape, unbroadcast
from .._runtime.layout import rows as as_rows
from .._torch.aot_autograd import remade
from .._torch.autograd import apply_function, autocast_on, below_autograd, records_gradients
from .._torch.compiling import unseen_by_dynamo
from .._torch.tensors import has_storage
from .._torch.transforms import is_plain, transforms_active, transforms_or_modes_active
from ..errors import BatchedGradientError, DoubleBackwardError, FreedGraphError, ShapeMismatchError
from . import call as run
from . import dtensor as sharding
from .library import LIBRARY, TAGS, TracedCall, like_row, text_of
from .no_gradient import WithoutGradient, no_forward_mode, refuse_forward_mode

Tensors = Sequence[Tensor | None]


def run_call(call: run.Call, tensors: Tensors) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Final states, state sequences (if asked for) and outputs of a call."""
    results = _results(call, tensors)
    outs, n = call.program.num_outputs, call.program.sig.num_states
    sequences = results[outs + n : outs + 2 * n] if call.sequences else []
    return results[outs : outs + n], sequences, results[:outs]


def _results(call: run.Call, tensors: Tensors) -> list[Tensor]:
    """Outputs, final states, state sequences."""
    if isinstance(call, TracedCall) and not (transforms_active() or below_autograd()):
        return _by_operator(call, tensors)
    return _differentiably(call, tensors) if call.differentiable else _without_gradients(call, tensors)[0]


def _differentiably(call: run.Call, tensors: Tensors) -> list[Tensor]:
    return list(_Traced.apply(call, *tensors) if isinstance(call, TracedCall) else apply_function(_Eager, call, tensors))


def disturbed() -> bool:
    """Whether autocast or a fork changes what PyTorch's ops do."""
    return autocast_on() or forks.must_be_alone()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """While inside, dtypes are those of the operands, and ops of a forked child wait for nobody."""
    alone = forks.alone() if forks.must_be_alone() else contextlib.nullcontext()
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), alone:
        yield


# --- what every door does ---------------------------------------------------------------------------------------------------
def _as_rows(call: run.Call, tensors: Tensors) -> list[Tensor | None]:
    """Inputs and states as kernels take them; the rest as it is."""
    i, n, step = call.num_inputs, call.num_operands, call.shapes.step
    if call.whole and all([t is None or is_dense(t) for t in tensors[:n]]):
        return list(tensors)
    first = tensors[0]
    assert first is not None, "inputs are there"
    order = memory_order(first) if same_shape(first.shape[1:], step) else None
    found = [None if t is None else as_rows(t, step, 1 if k < i else 0, order) for k, t in enumerate(tensors[:n])]
    return [*found, *tensors[n:]]


def _forward(call: run.Call, rows: run.Rows, save: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, final states, state sequences; and checkpoints. Without recording gradients."""
    n = call.num_operands
    if call.around is None:
        return run.forward(call, rows[:n], call.named(rows[n:]), save)
    with call.around():
        return run.forward(call, rows[:n], call.named(rows[n:]), save)


def _without_gradients(call: run.Call, tensors: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    if torch.is_grad_enabled() and any(call.needs):  # integers that a core computes with floats that need a gradient
        with torch.no_grad():
            return _forward(call, _as_rows(call, tensors), save=False)
    return _forward(call, _as_rows(call, tensors), save=False)


def _savable(tensors: Tensors) -> Tensors:
    """Autograd saves no tensor that was made in inference mode."""
    return [t.clone() if t is not None and t.is_inference() and not torch.is_inference_mode_enabled() else t for t in tensors]


def _not_differentiable(call: run.Call, results: Sequence[Tensor]) -> list[Tensor]:
    """Those of outputs, final states and state sequences through which no gradient flows."""
    return [t for t, constant in zip(results, call.constant, strict=True) if constant] if call.constant else []


def _backward(call: run.Call, rows: run.Rows, checkpoints: Sequence[Tensor], grads: Tensors, needs: Sequence[bool]) -> list[Tensor | None]:
    """One gradient per operand, from cotangents of outputs, final states and state sequences."""
    if disturbed():
        with undisturbed():
            return _backward(call, rows, checkpoints, grads, needs)
    n = call.num_operands
    with contextlib.nullcontext() if call.around is None else call.around():
        found = run.backward(call, rows[:n], call.named(rows[n:]), checkpoints, grads, needs)
    if call.whole:
        return found
    for k, (grad, kind) in enumerate(zip(found[:n], call.kinds, strict=False)):
        found[k] = None if grad is None or kind is None else unbroadcast(grad, kind[0], 1 if k < call.num_inputs else 0)
    return found


def _refuse_double_backward(call: run.Call) -> None:
    raise DoubleBackwardError(
        "is differentiated twice (create_graph=True), but a fused call has no second derivative", core=call.program.sig.core,
        hint='Use backend="torch", the eager loop, where second derivatives are needed.',
    )  # fmt: skip


def _refuse_batched_gradients(call: run.Call) -> NoReturn:
    raise BatchedGradientError(
        "is given a batch of cotangents at once (is_grads_batched=True, vectorize=True), which an eager fused call does not take",
        core=call.program.sig.core, hint="Use `torch.func.jacrev` or `torch.func.vmap(torch.func.vjp(...)[1])`, or give them one by one.",
    ) from None  # fmt: skip


def _saved(ctx, call: run.Call) -> tuple[Tensor, ...]:
    """What the forward saved, unless a backward before this one freed it."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
    raise FreedGraphError(
        "backward through the graph a second time: an earlier backward freed what this call had saved", core=call.program.sig.core,
        hint="States carried over from an earlier call still belong to its graph: call `flexsn.reset_net(model)` before each sample (or "
        "make neurons with `stateful=False`), or `flexsn.detach_states(model)` between pieces of one. To differentiate one loss twice: "
        "`retain_graph=True` the first time.",
    )  # fmt: skip


def _strides(tensors: Tensors) -> list[tuple[int, ...] | None] | None:
    """None if all are contiguous."""
    for t in tensors:  # a plain loop: every call comes here
        if t is not None and not t.is_contiguous():
            return [None if t is None else t.stride() for t in tensors]
    return None


def _unpacked(call: run.Call, tensors: Tensors, checkpoints: Sequence[Tensor]) -> tuple[run.Rows, list[Tensor]]:
    """Rows and checkpoints in one order of memory again."""
    rows: run.Rows = _as_rows(call, tensors)
    return rows, [as_rows(t, call.shapes.step, 1, memory_order(rows[0])) for t in checkpoints]


# --- eager --------------------------------------------------------------------------------------------------------------------
class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: run.Call, *tensors):
        rows = _as_rows(call, tensors)
        results, checkpoints = _forward(call, rows, save=True)
        saved = (*_savable(rows), *checkpoints)
        ctx.call, ctx.strides = call, _strides(saved)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        constant = _not_differentiable(call, results)
        if constant:
            ctx.mark_non_differentiable(*constant)
        return tuple(results)

    @staticmethod
    @unseen_by_dynamo
    def backward(ctx, *grads):
        if torch.is_grad_enabled():
            _refuse_double_backward(ctx.call)
        saved, kept = _saved(ctx, ctx.call), len(ctx.call.kinds)
        needs = ctx.needs_input_grad[1:]
        return None, *_backward_of_saved(ctx.call, saved[:kept], saved[kept:], _strides(saved) != ctx.strides, grads, needs)


def _backward_of_saved(
    call: run.Call, rows: run.Rows, checkpoints: Sequence[Tensor], changed: bool, grads: Tensors, needs: Sequence[bool]
) -> list[Tensor | None]:
    """`changed`: hooks of saved tensors gave others, equal to them."""
    rows, checkpoints = _as_saved(call, rows, checkpoints)
    if changed:
        rows, checkpoints = _unpacked(call, rows, checkpoints)
    try:
        return _backward(call, rows, checkpoints, grads, needs)
    except RuntimeError:
        if all(g is None or has_storage(g) for g in grads):
            raise
        _refuse_batched_gradients(call)


def _as_saved(call: run.Call, rows: run.Rows, checkpoints: Sequence[Tensor]) -> tuple[run.Rows, list[Tensor]]:
    """What was saved, as it was."""
    i, n, step = call.num_inputs, call.num_operands, call.shapes.step
    kinds = [None if kind is None else ((call.T, *step) if k < i else step, kind[1]) for k, kind in enumerate(call.kinds[:n])]
    kinds += call.kinds[n:]
    kept = [((call.checkpoints, *step), dtype) for dtype in call.saved_dtypes or ()]
    return _as_it_was(call, rows, kinds), _as_it_was(call, checkpoints, kept)


def _as_it_was(call: run.Call, tensors: Tensors, kinds: Sequence[tuple[tuple[int, ...], torch.dtype] | None]) -> list[Any]:
    """Kernels take pointers: what was saved must be as it was, whatever hooks, `.data` or a cast of a module have made of it. Other dtypes
    are cast back; None stays."""
    found = list[Any]()
    for tensor, kind in zip(tensors, kinds, strict=True):
        if tensor is None or kind is None:
            found.append(None)
        elif same_shape(tensor.shape, kind[0]):
            found.append(tensor if tensor.dtype is kind[1] else tensor.to(kind[1]))
        else:
            raise ShapeMismatchError(
                f"had saved a tensor of shape {list(kind[0])} for its backward, which now has the shape {list(tensor.shape)}",
                core=call.program.sig.core,
                hint="What hooks of saved tensors unpack must equal what they packed, and `.data` of an operand keep its shape.",
            )
    return found


# --- under transforms ---------------------------------------------------------------------------------------------------------
class _Traced(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(call: run.Call, *tensors):
        results, checkpoints = _forward(call, _as_rows(call, tensors), save=True)
        return (*results, *checkpoints)

    @staticmethod
    def setup_context(ctx, inputs, output):
        call, *tensors = inputs
        sequences = call.program.sig.num_states if call.sequences else 0
        shown = call.program.num_outputs + call.program.sig.num_states + sequences
        ctx.call, ctx.shown = call, shown
        ctx.present = [t is not None for t in tensors]
        ctx.save_for_backward(*[t for t in tensors if t is not None], *output[shown:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*_not_differentiable(call, output[:shown]), *output[shown:])

    @staticmethod
    @unseen_by_dynamo
    def backward(ctx, *grads):
        call = ctx.call
        saved = _saved(ctx, call)
        found = _TracedBackward.apply(call, ctx.needs_input_grad[1:], ctx.present, len(saved), *saved, *grads[: ctx.shown])
        return None, *found

    @staticmethod
    def jvp(ctx, *tangents):
        raise no_forward_mode(ctx.call.program.sig.core)


class _TracedBackward(torch.autograd.Function):
    """The backward as a function of its own: transforms differentiate through it only to be refused."""

    generate_vmap_rule = True

    @staticmethod
    @unseen_by_dynamo
    def forward(call, needs, present, num_saved, *tensors):
        saved, grads = iter(tensors[:num_saved]), tensors[num_saved:]
        operands = [next(saved) if there else None for there in present]
        checkpoints = list(saved)
        rows = _as_rows(call, operands)
        rows[: call.num_inputs] = [remade(x) for x in rows[: call.num_inputs]]
        return tuple(_backward(call, rows, checkpoints, grads, needs))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.call = inputs[0]

    @staticmethod
    @unseen_by_dynamo
    def backward(ctx, *grads):
        _refuse_double_backward(ctx.call)

    @staticmethod
    def jvp(ctx, *tangents):
        _refuse_double_backward(ctx.call)


# --- flexsn::scan ---------------------------------------------------------------------------------------------------------------
LIBRARY.define("scan(str program, Tensor[] inputs, Tensor?[] states, Tensor[] statics, bool sequences) -> Tensor[]", tags=TAGS)


def _by_operator(call: run.Call, tensors: Tensors) -> list[Tensor]:
    i, n = call.num_inputs, call.num_operands
    inputs, states, statics = list(tensors[:i]), list(tensors[i:n]), list(tensors[n:])
    program = text_of(call.program.blueprint, vjp=call.differentiable)
    return torch.ops.flexsn.scan(program, inputs, states, statics, call.sequences)


def call_of(program: str, inputs: Sequence[Tensor], states: Tensors, statics: Sequence[Tensor], sequences: bool) -> run.Call:
    """The call that operands of `flexsn::scan` make."""
    device, tensors = inputs[0].device, (*inputs, *states, *statics)
    made = program_from(program, device)
    given = [tuple(x.shape[1:]) for x in inputs] + [tuple(v.shape) for v in states if v is not None]
    shapes = made.blueprint.shapes(given)
    if shapes is None:
        raise ShapeMismatchError(
            f"was compiled for the step shape {list(made.step)}, where only dims {sorted(made.blueprint.free_dims)} may change, "
            f"but is given {', '.join(str(list(s)) for s in given)}", core=made.sig.core,
        )  # fmt: skip
    names = (*made.sig.param_names, *made.blueprint.captured(vjp=True))[: len(statics)]  # a program with its VJP may run without it
    plain = not transforms_or_modes_active() and all(t is None or is_plain(t) for t in tensors)
    differentiable = records_gradients() and any(t is not None and t.requires_grad for t in tensors)
    return (run.Call if plain else TracedCall)(made, shapes, inputs[0].shape[0], names, sequences, differentiable, tensors)


def _scan(program, inputs, states, statics, sequences) -> list[Tensor]:
    call = call_of(program, inputs, states, statics, sequences)
    tensors: Tensors = (*inputs, *states, *statics)
    refuse_forward_mode(call.program.sig.core, tensors)
    if sharding.any_dtensor(tensors):
        sharding.ready()
        sharding.check_layouts(call.program.sig, inputs, states, statics)
        tensors = sharding.settled(tensors)
        call.around = sharding.Replicating
    if not call.differentiable:
        return _without_gradients(call, tensors)[0]
    if call.program.blueprint.vjp is None:
        return list(WithoutGradient.apply(lambda *given: _without_gradients(call, given)[0], call.program.sig.core, *tensors))
    results = _differentiably(call, tensors)
    n = call.program.sig.num_states
    return results[: call.program.num_outputs + (2 * n if sequences else n)]


def _fake_scan(program, inputs, states, statics, sequences) -> list[Tensor]:
    call = call_of(program, inputs, states, statics, sequences)
    shapes, blueprint, T = call.shapes, call.program.blueprint, call.T
    order = memory_order(inputs[0]) if same_shape(inputs[0].shape[1:], shapes.step) else None

    def empty(leading: tuple, step: tuple, meta: Meta) -> Tensor:
        whole = same_shape(step, shapes.step)
        return like_row(inputs[0], (*leading, *step), meta.dtype, len(leading), order if whole else None)

    outputs = [empty((T,), s, m) for s, m in zip(shapes.outputs, blueprint.outputs, strict=True)]
    states = list(zip(shapes.states, blueprint.states, strict=True))
    trail = [empty((T,), s, m) for s, m in states] if sequences else []
    return [*outputs, *[empty((), s, m) for s, m in states], *trail]


sharding.RULES["scan"] = lambda cls, func, types, args, kwargs: _scan(*args)
for _key in ("CompositeExplicitAutograd", "Autograd", "FuncTorchDynamicLayerFrontMode"):  # the last: an exported program under `torch.func`
    LIBRARY.impl("scan", _scan, _key)
torch.library.register_fake("flexsn::scan", _fake_scan, lib=LIBRARY)
