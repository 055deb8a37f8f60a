"""The ways to a kernel, each an autograd formula around `run.forward` and `run.backward`.

- eager, plain tensors: `_Eager`, the cheapest formula that autograd knows;
- under `torch.func` (`grad`, `vmap`, `jacrev`, ...): `_Traced`, a formula that transforms compose with;
- traced by the compiler or by export, fake tensors: the operator `flexsn::scan`, one node that carries the program as a
  string. Below autograd it dissolves into prologue, kernel operator (`_operator/library.py`) and epilogue.

Each ends in one kernel per direction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._capture.trace import Meta
from .._program.cache import program_from
from .._program.dual import dual_of
from .._runtime import fork as forks
from .._runtime.layout import memory_order, narrow, same_shape
from .._runtime.layout import rows as as_rows
from .._torch.aot_autograd import remade
from .._torch.autograd import below_autograd, forward_ad_level, plain_apply, records_gradients, unwrap_if_dead
from .._torch.compiling import unseen_by_dynamo
from .._torch.tensors import has_storage
from .._torch.transforms import is_plain, over_batch, transforms_active, transforms_or_modes_active
from ..errors import DoubleBackwardError, FreedGraphError, ShapeMismatchError
from . import call as run
from . import dtensor as sharding
from .library import LIBRARY, TAGS, TracedCall, exports_to_onnx, like_row, text_of
from .no_gradient import WithoutGradient, refuse_forward_mode
from .prepare import prepare_dual

Tensors = Sequence[Tensor | None]


def run_call(call: run.Call, tensors: Tensors) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Final states, state sequences (if asked for) and outputs of a call."""
    results = _results(call, tensors)
    outs, ends = call.bounds
    return list(results[outs:ends]), list(results[ends:]), list(results[:outs])


def _results(call: run.Call, tensors: Tensors) -> Sequence[Tensor]:
    """Outputs, final states, state sequences."""
    if isinstance(call, TracedCall):
        if not (transforms_active() or below_autograd() or forward_ad_level() >= 0):
            return _by_operator(call, tensors)
        call.compile(tensors)
    return _differentiably(call, tensors) if call.differentiable else _without_gradients(call, tensors)


def _differentiably(call: run.Call, tensors: Tensors) -> Sequence[Tensor]:
    if isinstance(call, TracedCall):
        return _Traced.apply(call, *tensors)[: len(call.results)]
    return record(call, *call.dense([None if t is None else unwrap_if_dead(t) for t in tensors]))


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


def savable(tensors: Tensors) -> Tensors:
    """Autograd saves no tensor that was made in inference mode."""
    return [t.clone() if t is not None and t.is_inference() else t for t in tensors]


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
    def forward(ctx: Any, call: run.Call, *tensors: Tensor | None) -> Any:
        laid_out = tensors if call.in_place else call.laid_out(tensors)
        if call.prologue is None and call.returned_whole:
            found = list(map(call.launch.run(laid_out).__getitem__, call.places))
        else:
            found = call.forward(laid_out)
        ctx.call, shown = call, len(call.results)
        ctx.kept = call.keep and call.keep()
        ctx.save_for_backward(*(savable(tensors) if call.clones else tensors), *found[shown:])
        ctx.set_materialize_grads(False)
        del found[shown:]
        if call.constant:
            ctx.mark_non_differentiable(*itertools.compress(found, call.constant))
        return tuple(found)

    @staticmethod
    @unseen_by_dynamo
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call = ctx.call
        if torch.is_grad_enabled():
            return _Eager.differentiably(ctx, grads)
        if (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") or forks.forked) and forks.disturbed():
            with forks.undisturbed():
                return _Eager.backward(ctx, *grads)
        needs = ctx.needs_input_grad
        back = call.backwards.get((needs, *map(type, grads))) or call.backward_for(needs, tuple(map(type, grads)))
        try:
            saved = ctx.saved_tensors
            if not call.in_place:
                n = len(call.kinds)
                saved = (*call.laid_out(saved[:n]), *saved[n:])
            return None, *call.backward(back, saved, grads, call.order)
        except RuntimeError as error:
            if "second time" in str(error):
                _refuse_freed_graph(call)
            if all(g is None or has_storage(g) for g in grads):
                raise
        return _Eager.differentiably(ctx, grads)  # a batch of cotangents at once

    @staticmethod
    def differentiably(ctx: Any, grads: Sequence[Tensor | None]) -> tuple:
        """Run the backward as a function of its own, with a derivative and a rule for batches."""
        call, saved = ctx.call, ctx.saved_tensors
        operands, given = saved[: len(call.kinds)], [t for t in saved if t is not None]
        asked = Asked(call, ctx.needs_input_grad[1:], [t is not None for t in operands], len(given))
        if all(g is None or has_storage(g) for g in grads):
            return None, *_TracedBackward.apply(asked, *given, *grads)
        traced = TracedCall(call.program, call.shapes, call.T, call.statics, call.sequences, True, operands)
        traced.source = call.source
        traced.compile(operands)
        asked = dataclasses.replace(asked, call=traced)
        return None, *over_batch(lambda *cotangents: _TracedBackward.apply(asked, *given, *cotangents), grads)


record = plain_apply(_Eager)


# --- under transforms ---------------------------------------------------------------------------------------------------------
class _Traced(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(call: run.Call, *tensors: Tensor | None) -> Any:
        return tuple(_forward(call, tensors)[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        call, *tensors = inputs
        shown = len(call.results)
        ctx.call, ctx.shown, ctx.kept = call, shown, call.keep and call.keep()
        ctx.present = [t is not None for t in tensors]
        given = [t for t in tensors if t is not None]
        ctx.save_for_backward(*given, *output[shown:])
        ctx.save_for_forward(*given, *output[shown:])  # a batch keeps the dims of one list for both
        ctx.set_materialize_grads(False)
        ctx.transformed = transforms_active()  # PyTorch's rule for batches marks nothing, and takes no None for a tangent
        ctx.mark_non_differentiable(*itertools.compress(output, call.constant), *([] if ctx.transformed else output[shown:]))

    @staticmethod
    @unseen_by_dynamo
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call = ctx.call
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            _refuse_freed_graph(call)
        asked = Asked(call, ctx.needs_input_grad[1:], ctx.present, len(saved))
        return None, *_TracedBackward.apply(asked, *saved, *grads[: ctx.shown])

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> Any:
        call, saved = ctx.call, iter(ctx.saved_tensors)
        operands = [next(saved) if there else None for there in ctx.present]
        constant = call.constant or [False] * len(call.results)
        moved = [None if c else t for t, c in zip(_along(call, operands, tangents), constant, strict=True)]
        return *moved, *[torch.zeros_like(c) if ctx.transformed and c.is_floating_point() else None for c in saved]  # of checkpoints


@dataclasses.dataclass(frozen=True, eq=False)
class Asked:
    """What a backward is asked for, beside tensors; one value to transforms, which take lists apart.

    Attributes:
        needs: of each operand, whether its gradient is needed.
        present: of each, whether it is there.
        num_saved: how many of the tensors were saved: operands that are there, and checkpoints. Cotangents follow.
    """

    call: run.Call
    needs: Sequence[bool]
    present: Sequence[bool]
    num_saved: int

    def split(self, given: Sequence[Tensor | None]) -> tuple[list, list, list]:
        """Return operands, checkpoints and cotangents; or what stands at their places."""
        saved, n = iter(given), sum(self.present)
        return [next(saved) if there else None for there in self.present], list(given[n : self.num_saved]), list(given[self.num_saved :])


class _TracedBackward(torch.autograd.Function):
    """The backward as a function of its own, with the derivatives that follow from those of the dual call (`_along`)."""

    generate_vmap_rule = True

    @staticmethod
    @unseen_by_dynamo
    def forward(asked: Asked, *tensors: Tensor | None) -> Any:
        call = asked.call
        operands, checkpoints, cotangents = asked.split(tensors)
        rows = call.laid_out(operands)
        rows[: call.num_inputs] = [None if x is None else remade(x) for x in rows[: call.num_inputs]]
        back = call.backward_for((False, *asked.needs), tuple(map(type, cotangents)))
        with (
            forks.undisturbed() if forks.disturbed() else contextlib.nullcontext(),
            contextlib.nullcontext() if call.around is None else call.around(),
        ):
            return tuple(call.backward(back, [*rows, *checkpoints], cotangents, call.order_of(rows)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.asked, *tensors = inputs
        ctx.given = [t is not None for t in tensors]
        given = [t for t in tensors if t is not None]
        ctx.save_for_backward(*given)
        ctx.save_for_forward(*given)
        ctx.set_materialize_grads(False)

    @staticmethod
    @unseen_by_dynamo
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        """With `u` for gradients: `<u, gradient>` is the derivative of `<cotangents, results>` along `u`."""
        saved = iter(ctx.saved_tensors)
        operands, checkpoints, cotangents = ctx.asked.split([next(saved) if there else None for there in ctx.given])

        def gradients(*along: Tensor | None) -> Tensors:
            moved, found = _gradients_along(ctx.asked.call, operands, along, cotangents)
            of_operands = [g for g, there in zip(found, ctx.asked.present, strict=True) if there]
            return [*of_operands, *[None] * len(checkpoints), *[None if c is None else d for c, d in zip(cotangents, moved, strict=True)]]

        return None, *over_batch(gradients, tangents)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> Any:
        """The backward along tangents of the cotangents, in which it is linear, and that of the derivative along those of operands."""
        asked, saved = ctx.asked, iter(ctx.saved_tensors)
        given = [next(saved) if there else None for there in ctx.given]
        operands, _checkpoints, cotangents = asked.split(given)
        along, _none, turned = asked.split(tangents)
        total: list[Tensor | None] = [None] * len(operands)
        if any(t is not None for t in turned):
            total = list(_TracedBackward.apply(asked, *given[: asked.num_saved], *turned))
        if any(t is not None for t in along):
            found = _gradients_along(asked.call, operands, along, cotangents)[1]
            total = [a if b is None else b if a is None else a + b for a, b in zip(total, found, strict=True)]
        return tuple([g if need else None for g, need in zip(total, asked.needs, strict=True)])


# --- derivatives ----------------------------------------------------------------------------------------------------------------
def _along(call: run.Call, operands: Tensors, tangents: Tensors) -> list[Tensor | None]:
    """Return the derivatives of the results of a call along tangents of its operands, None where there is none: of the dual core, in one
    more call."""
    if call.source is None:
        what = "is differentiated twice, or in forward mode; a compiled or exported call holds one gradient"
        raise DoubleBackwardError(what, core=call.program.sig.core, hint="Call the network as it is where more are needed.")
    i, n = call.num_inputs, call.num_operands
    whole = [[None if t is None else as_rows(t, call.shapes.step, int(k < i)) for k, t in enumerate(ts[:n])] for ts in (operands, tangents)]
    values, along = [*whole[0], *operands[n:]], [*whole[1], *tangents[n:]]
    for k in range(i, n):  # tangents of states are states themselves
        v = values[k]
        if v is not None and v.is_floating_point() and along[k] is None:
            along[k] = torch.zeros_like(v)
    floating = [m.dtype.is_floating_point for m in call.program.blueprint.states]
    moving = [t is not None for t in along[:i]] + floating + [t is not None for t in along[n:]]
    dual = dual_of(call.program, call.statics, moving)
    read = {name: t for name, t in zip(call.statics, values[n:], strict=True) if t is not None}  # all are
    groups: Sequence[Tensors] = values[:i], values[i:n], [read[name] for name in call.program.sig.param_names]
    given = [[*group, *[along[k] for k in ks]] for group, ks in zip(groups, dual.groups, strict=True)]
    made, tensors = prepare_dual(call.source, dual, given, read, call.sequences)
    finals, trails, outputs = run_call(made, tensors)
    outs, ends = call.program.num_outputs, n - i
    moved = dict(zip([k for k, m in enumerate(call.program.blueprint.outputs) if m.dtype.is_floating_point], outputs[outs:], strict=True))
    states = [k - i for k in dual.groups[1]]
    moved |= zip([outs + k for k in states], finals[ends:], strict=True)
    moved |= zip([outs + ends + k for k in states], trails[ends:], strict=False)
    return [None if k not in moved else narrow(moved[k], shape, leading) for k, (shape, leading) in enumerate(call.result_shapes)]


def _gradients_along(call: run.Call, operands: Tensors, tangents: Tensors, cotangents: Tensors) -> tuple[Tensors, Tensors]:
    """Return the derivatives of the results along tangents, and the gradients of all operands for cotangents of these derivatives."""
    leaves = [k for k, t in enumerate(operands) if t is not None and (t.is_floating_point() or t.is_complex())]
    there: list[bool] = []

    def derivatives(*given: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        now = list(operands)
        for k, t in zip(leaves, given, strict=True):
            now[k] = t
        found = _along(call, now, tangents)
        there[:] = [t is not None for t in found]
        turned = [t for t, c in zip(found, cotangents, strict=True) if c is not None and t is not None]
        return turned, [t for t in found if t is not None]

    differentiated: Any = torch.func.vjp(derivatives, *[operands[k] for k in leaves], has_aux=True)
    _, pull, found = differentiated
    grads = pull([c for c, flag in zip(cotangents, there, strict=True) if c is not None and flag])
    gradients: list[Tensor | None] = [None] * len(operands)
    for k, grad in zip(leaves, grads, strict=True):
        gradients[k] = grad
    moved = iter(found)
    return [next(moved) if flag else None for flag in there], gradients


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
    differentiable = records_gradients() and not exports_to_onnx() and any(t is not None and t.requires_grad for t in tensors)
    return (run.Call if plain else TracedCall)(made, shapes, inputs[0].shape[0], names, sequences, differentiable, tensors)


def _scan(program: str, inputs: list[Tensor], states: Tensors, statics: list[Tensor], sequences: bool) -> list[Tensor]:
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
        return list(WithoutGradient.apply(lambda *given: _without_gradients(call, given), call.program.sig.core, "", *tensors))
    return list(_differentiably(call, tensors) if call.differentiable else _without_gradients(call, tensors))


def _fake_scan(program: str, inputs: list[Tensor], states: Tensors, statics: list[Tensor], sequences: bool) -> list[Tensor]:
    call = call_of(program, inputs, states, statics, sequences)
    shapes, blueprint, T = call.shapes, call.program.blueprint, call.T
    order = memory_order(inputs[0]) if same_shape(inputs[0].shape[1:], shapes.step) else None

    def empty(leading: tuple, step: tuple, meta: Meta) -> Tensor:
        whole = same_shape(step, shapes.step)
        return like_row(inputs[0], (*leading, *step), meta.dtype, len(leading), order if whole else None)

    outputs = [empty((T,), s, m) for s, m in zip(shapes.outputs, blueprint.outputs, strict=True)]
    kept = list(zip(shapes.states, blueprint.states, strict=True))
    trail = [empty((T,), s, m) for s, m in kept] if sequences else []
    return [*outputs, *[empty((), s, m) for s, m in kept], *trail]


sharding.RULES["scan"] = lambda cls, func, types, args, kwargs: _scan(*args)
for _key in ("CompositeExplicitAutograd", "Autograd", "FuncTorchDynamicLayerFrontMode"):  # the last: an exported program under `torch.func`
    LIBRARY.impl("scan", _scan, _key)
torch.library.register_fake("flexsn::scan", _fake_scan, lib=LIBRARY)
