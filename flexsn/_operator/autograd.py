"""The ways to a kernel, each an autograd formula around `run.forward` and `run.backward`.

- eager, plain tensors: `_Eager`, the cheapest formula that autograd knows;
- under `torch.func` (`grad`, `vmap`, `jacrev`, ...): `_Traced`, a formula that transforms compose with;
- traced by the compiler or by export, fake tensors: the operator `flexsn::scan`, one node that carries the program as a
  string. Below autograd it dissolves into prologue, kernel operator (`_operator/library.py`) and epilogue.

Each ends in one kernel per direction.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from .._capture.trace import Meta
from .._program.cache import program_from
from .._runtime import fork as forks
from .._runtime.layout import memory_order, same_shape
from .._torch.aot_autograd import remade
from .._torch.autograd import autocast_on, below_autograd, plain_apply, records_gradients, unwrap_if_dead
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
    outs, ends = call.bounds
    return list(results[outs:ends]), list(results[ends:]), list(results[:outs])


def _results(call: run.Call, tensors: Tensors) -> Sequence[Tensor]:
    """Outputs, final states, state sequences."""
    if isinstance(call, TracedCall):
        if not (transforms_active() or below_autograd()):
            return _by_operator(call, tensors)
        call.compile(tensors)
    return _differentiably(call, tensors) if call.differentiable else _without_gradients(call, tensors)


def _differentiably(call: run.Call, tensors: Tensors) -> Sequence[Tensor]:
    if isinstance(call, TracedCall):
        return _Traced.apply(call, *tensors)[: len(call.results)]
    return record(call, *[None if t is None else unwrap_if_dead(t) for t in tensors])


def disturbed() -> bool:
    """Whether autocast or a fork changes what PyTorch's ops do."""
    return autocast_on() or forks.must_be_alone()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """While inside, dtypes are those of the operands, and ops of a forked child wait for nobody."""
    alone = forks.alone() if forks.must_be_alone() else contextlib.nullcontext()
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), alone:
        yield


# --- what every way does ------------------------------------------------------------------------------------------------------
def _forward(call: run.Call, tensors: Tensors) -> tuple[Tensors, list[Tensor]]:
    """Operands as they are saved; outputs, final states and state sequences, then checkpoints. Without recording gradients."""
    with contextlib.nullcontext() if call.around is None else call.around():
        laid_out = tensors if call.in_place else call.laid_out(tensors)
        return laid_out, call.forward(laid_out)


def _without_gradients(call: run.Call, tensors: Tensors) -> list[Tensor]:
    if torch.is_grad_enabled() and any(call.needs):  # integers that a core computes with floats that need a gradient
        with torch.no_grad():
            return _forward(call, tensors)[1]
    return _forward(call, tensors)[1]


def _savable(tensors: Tensors) -> Tensors:
    """Autograd saves no tensor that was made in inference mode."""
    return [t.clone() if t is not None and t.is_inference() else t for t in tensors]


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


def _refuse_freed_graph(call: run.Call) -> NoReturn:
    raise FreedGraphError(
        "backward through the graph a second time: an earlier backward freed what this call had saved", core=call.program.sig.core,
        hint="States carried over from an earlier call still belong to its graph: call `flexsn.reset_net(model)` before each sample (or "
        "make neurons with `stateful=False`), or `flexsn.detach_states(model)` between pieces of one. To differentiate one loss twice: "
        "`retain_graph=True` the first time.",
    ) from None  # fmt: skip


# --- eager --------------------------------------------------------------------------------------------------------------------
class _Eager(torch.autograd.Function):
    """One flat path per call: everything but the tensors is looked up in the call."""

    @staticmethod
    def forward(ctx, call: run.Call, *tensors):
        laid_out = tensors if call.in_place else call.laid_out(tensors)
        if call.prologue is None and call.returned_whole:
            found = list(map(call.launch.run(laid_out).__getitem__, call.places))
        else:
            found = call.forward(laid_out)
        ctx.call, shown = call, len(call.results)
        ctx.save_for_backward(*(_savable(laid_out) if call.clones else laid_out), *found[shown:])
        ctx.set_materialize_grads(False)
        del found[shown:]
        if call.constant:
            ctx.mark_non_differentiable(*itertools.compress(found, call.constant))
        return tuple(found)

    @staticmethod
    @unseen_by_dynamo
    def backward(ctx, *grads):
        call = ctx.call
        if torch.is_grad_enabled():
            _refuse_double_backward(call)
        if (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") or forks.forked) and disturbed():
            with undisturbed():
                return _Eager.backward(ctx, *grads)
        needs = ctx.needs_input_grad
        back = call.backwards.get((needs, *map(type, grads))) or call.backward_for(needs, tuple(map(type, grads)))
        try:
            return None, *call.backward(back, ctx.saved_tensors, grads, call.order)
        except RuntimeError as error:
            if "second time" in str(error):
                _refuse_freed_graph(call)
            if all(g is None or has_storage(g) for g in grads):
                raise
        _refuse_batched_gradients(call)


record = plain_apply(_Eager)


# --- under transforms ---------------------------------------------------------------------------------------------------------
class _Traced(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(call: run.Call, *tensors):
        return tuple(_forward(call, tensors)[1])

    @staticmethod
    def setup_context(ctx, inputs, output):
        call, *tensors = inputs
        shown = len(call.results)
        ctx.call, ctx.shown = call, shown
        ctx.present = [t is not None for t in tensors]
        ctx.save_for_backward(*[t for t in tensors if t is not None], *output[shown:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*itertools.compress(output, call.constant), *output[shown:])

    @staticmethod
    @unseen_by_dynamo
    def backward(ctx, *grads):
        call = ctx.call
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            _refuse_freed_graph(call)
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
        rows = call.laid_out(operands)
        rows[: call.num_inputs] = [remade(x) for x in rows[: call.num_inputs]]
        back = call.backward_for((False, *needs), tuple(map(type, grads)))
        with undisturbed() if disturbed() else contextlib.nullcontext(), contextlib.nullcontext() if call.around is None else call.around():
            return tuple(call.backward(back, [*rows, *saved], grads, call.order_of(rows)))

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
    without = call.differentiable and call.program.blueprint.vjp is None
    call.differentiable = call.differentiable and not without
    call.compile(tensors)
    if without:
        return list(WithoutGradient.apply(lambda *given: _without_gradients(call, given), call.program.sig.core, *tensors))
    return list(_differentiably(call, tensors) if call.differentiable else _without_gradients(call, tensors))


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
