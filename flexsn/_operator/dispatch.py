"""A call of a core on tensors: check it, choose a backend, run it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._capture.inner import MIXES, MOST
from .._capture.signature import Signature, check_operands, core_name, make_signature, torchscript_refused
from .._capture.trace import Meta
from .._captured.captured_values import CapturedValues
from .._captured.uneven import Uneven
from .._ir.graph import HALF
from .._program.cache import cut_for
from .._program.inner import inner_dims, layout_of
from .._program.pairs import ComplexStepError
from .._program.parts import PartsLayout
from .._runtime import fork
from .._runtime.backends import check_backend
from .._torch.autograd import call_modes, profiler_flag, unwrap_if_dead
from .._torch.compiling import unseen_by_dynamo
from .._torch.tensors import broadcast_shapes
from .._torch.transforms import is_plain, left_by_an_ended_vmap, transforms_active, transforms_or_modes_active
from ..errors import (
    BackendUnavailableError,
    CannotFuseError,
    CarriedStateError,
    CoreError,
    FlexSNError,
    FreedGraphError,
    NotElementwiseError,
    ShapeMismatchError,
    StaleStateError,
    StateMismatchError,
)
from . import call as run
from . import dtensor as sharding
from .autograd import record, run_call
from .default_states import DefaultStates, default_states
from .eager_loop import eager_loop, first_step
from .fallback import noting, warn_once
from .mixing.cut import Cut, take_apart
from .mixing.one_step import Given
from .mixing.precision import precise
from .mixing.run import run_mixing
from .prepare import PLAIN, CoreCall, copied, prepare, refuse_freed, stand_in

Results = tuple[list[Tensor], list[Tensor], list[Tensor]]  # final states, state sequences (if asked for), outputs


@unseen_by_dynamo
def run_core(
    core: Callable, seen: CapturedValues, inputs: tuple[Tensor, ...], states: tuple[Tensor | None, ...], params: tuple[Tensor, ...], *,
    backend: str, strict: bool, sequences: bool, num_outputs: int | None = None, exact: bool = True,
) -> Results:  # fmt: skip
    """Run a call as calls of its kind before it, or check it, choose a backend, and compile it.

    Returns:
        Final states, state sequences (if asked for), outputs.
    """
    captured = seen.tensors() if seen.any_tensors else {}
    tensors = (*inputs, *states, *params, *captured.values())
    counts = (len(inputs), len(states), len(params))
    modes, tied = call_modes(), _tied(captured) if len(captured) > 1 else ()
    kinds: Any = None if modes is None else [modes, counts, backend, sequences, num_outputs, exact, tied]
    alive: list[Tensor | None] = []
    for t in tensors if modes is not None else ():  # a plain loop: every call comes here
        if t is None:
            alive.append(None)
            kinds.append(None)
        elif type(t) not in PLAIN or t.is_nested or t.layout is not torch.strided:
            kinds = None
            break
        else:
            lies = t.is_contiguous() and not t.is_neg() and not t._is_zerotensor()
            needs = t.requires_grad or (modes[0] and t.is_inference() and "inference")  # type: ignore[index]  # else the loop is empty
            kinds += (type(t), t.shape, t.dtype, t.device, needs, lies or (t.stride(), t.is_neg(), t._is_zerotensor()))
            alive.append(unwrap_if_dead(t))
    key = None if kinds is None else tuple(kinds)
    call = seen.calls.get(key)
    if call is not None:
        given = alive if call.captured == tuple(captured) else read_by(call, alive, captured)
        try:
            cast = call.runs_ops and (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))
            if (cast or fork.forked) and fork.disturbed():
                with fork.undisturbed():
                    return run_call(call, given)
            if call.differentiable:
                results = record(call, *given) if call.in_place else record(call, *call.dense(given))
            elif call.runs_ops and modes[0]:  # type: ignore[index]  # there is a call
                return run_call(call, given)
            else:
                results = call.forward(given if call.in_place else call.laid_out(given))
        except RuntimeError:
            _refuse_stale(seen.signatures[counts], inputs, states)
            raise
        outs, ends = call.bounds
        return list(results[outs:ends]), list(results[ends:]), list(results[:outs])
    if torch.jit.is_tracing():  # type: ignore[attr-defined]  # it is there; sizes of tensors are tensors then
        raise torchscript_refused(core)
    sig = seen.signatures.get(counts)
    if sig is None:
        check_backend(backend, core_name(core))
        sig = seen.signatures[counts] = make_signature(core, *counts)
    if not exact:
        sig = dataclasses.replace(sig, exact=False)
    asked = CoreCall(core, seen, sig, inputs, states, params, captured, num_outputs, backend, strict, sequences)
    with fork.undisturbed() if fork.disturbed() else contextlib.nullcontext():
        return _run_from_start(asked, key)


_NOT_OF_SHAPES = (CannotFuseError, BackendUnavailableError, StaleStateError, FreedGraphError, CarriedStateError)  # of a RuntimeError


def _run_from_start(asked: CoreCall, key: tuple | None) -> Results:
    """Run a call; keep under `key` where default states start, if that is not where the inputs' shape says."""
    known = asked.seen.over_parts.get(key)
    if isinstance(known, DefaultStates):
        return _again(asked, known)
    try:
        return _run_first(asked, key)
    except (RuntimeError, ShapeMismatchError, StateMismatchError) as error:
        cause = error
    starts = other_starts(cause, asked)
    try:
        results = _again(asked, starts)
    except (StateMismatchError, ShapeMismatchError):
        raise cause from None
    _keep(asked.seen.over_parts, key, starts)
    return results


def _again(asked: CoreCall, starts: DefaultStates) -> Results:
    """Run a call whose default states start elsewhere."""
    options = {"strict": asked.strict, "sequences": asked.sequences, "num_outputs": asked.num_outputs, "exact": asked.sig.exact}
    states = starts.filled(asked.inputs, asked.states)
    return run_core(asked.core, asked.seen, tuple(asked.inputs), states, tuple(asked.params), backend=asked.backend, **options)


def _on_copies(asked: CoreCall) -> Callable:
    """Return the core on copies of what it captures, for a trial: a batch norm in it counts no step of that."""
    return asked.seen.stand_ins(asked.core, copied)[0].unchecked  # type: ignore[attr-defined]  # as `stand_ins` says


def other_starts(error: Exception, asked: CoreCall) -> DefaultStates:
    """Return where default states start that are not of the inputs' shape.

    Raises:
        Exception: the `error` of states of that shape, if it says something else, or the core runs on no other, or it cannot be found on
            which; then a note says so.
    """
    inputs = asked.inputs
    if all(v is not None for v in asked.states) or isinstance(error, _NOT_OF_SHAPES):
        raise error
    try:
        found = default_states(_on_copies(asked), asked.sig, inputs, asked.states, asked.params) if inputs[0].dim() else None
    except ShapeMismatchError as other:
        if isinstance(error, RuntimeError) and not hasattr(error, "__notes__"):  # the core did not run on states of the inputs' shape
            error.add_note(f"{other.reason}. {other.hint}")
        raise error from None
    except Exception:  # the core's own: what it raised on states of the inputs' shape says more
        found = None
    if found is None or all(meta is None or meta.shape == _step_of(inputs) for meta in found.metas):
        raise error
    return found


def _step_of(inputs: Sequence[Tensor]) -> tuple[int, ...] | None:
    try:
        return broadcast_shapes(*[x.shape[1:] for x in inputs])
    except RuntimeError:
        return None


def _run_first(asked: CoreCall, key: tuple | None) -> Results:
    """Check a call, choose a backend, run; keep under `key` how."""
    core, seen, sig, inputs, states, params, captured, num_outputs, backend, strict, sequences = asked
    known = seen.over_parts.get(key)
    if isinstance(known, CapturedValues):
        return _run_over_parts(asked, known)
    check_backend(backend, sig.core)
    check_operands(sig, inputs, states, params)
    if key is None and sharding.any_dtensor(asked.tensors):
        sharding.ready()
        if sharding.any_dtensor(asked.operands):
            sharding.check_layouts(sig, inputs, states, params)
    refuse_freed(sig, (*sig.names, *captured), asked.tensors)
    _refuse_stale(sig, inputs, states)
    why: Exception | None = None  # the eager loop runs, if another backend could be taken
    if backend != "torch":
        try:
            if isinstance(known, Exception):
                raise copy.copy(known)
            try:
                call = prepare(asked)
            except (ComplexStepError, NotElementwiseError, ShapeMismatchError) as error:
                if sharding.any_dtensor(asked.tensors) and not isinstance(error, ComplexStepError):
                    raise
                return _run_apart(error, key, asked)
            results = run_call(call, read_by(call, asked.tensors, captured))
        except (CannotFuseError, BackendUnavailableError) as error:
            if backend != "auto" or strict:
                raise
            warn_once("the eager loop", error)
            why = error
        else:
            if type(call) is run.Call:
                _keep(seen.calls, key, call)
            return results
    inputs, states, params = sharding.settled_groups(inputs, states, params)
    around = sharding.Replicating() if sharding.any_dtensor(asked.tensors) else contextlib.nullcontext()
    named = torch.autograd.profiler.record_function(f"flexsn::{sig.core} loop") if profiler_flag()() else contextlib.nullcontext()
    with around, named, noting("the eager loop", why):
        outputs, finals, state_seqs = eager_loop(seen.runnable(core), sig, inputs, states, params, num_outputs, sequences)
    return finals, state_seqs, outputs


def _run_apart(error: FlexSNError, key: tuple | None, asked: CoreCall) -> Results:
    """Run a call that no kernel takes as it is: by one for parts of its values, or for what is left of it without what mixes neurons.

    Args:
        error: why none does.
        key: under which it is kept how.

    Raises:
        CannotFuseError, ShapeMismatchError: why none takes that.
    """
    try:
        look, results = run_parts(lambda look: _run_over_parts(asked, look), error, asked)
    except (CannotFuseError, ShapeMismatchError) as why:
        try:
            cause = error if isinstance(error, ShapeMismatchError) else why  # values of many shapes, whatever parts they could have
            look = apart_from_mixing(cause, None if asked.backend == "hop" else key, asked)  # whose calls are ops of a graph
            results = _run_over_parts(asked, look)
        except (CannotFuseError, ShapeMismatchError) as other:
            alike = isinstance(why, NotElementwiseError) and isinstance(other, NotElementwiseError)
            why = why if other is error or (alike and why.reason != other.reason) else other  # of one reason, the one that says more
            _keep(asked.seen.over_parts, key, copy.copy(why))  # which holds no frames, as `why` does
            raise why from None
    _keep(asked.seen.over_parts, key, look)
    return results


def _run_over_parts(asked: CoreCall, look: CapturedValues) -> Results:
    """Run a call with complex numbers, or an inner dim, by the kernel of the core on their parts, which `look` is a look at."""
    core, inputs, states, params = asked.core, asked.inputs, asked.states, tuple(asked.params)
    if isinstance(look.wrap, Cut):
        autocast = fork.autocast_dtype(inputs[0].device.type)
        return run_mixing(Given(core, look, inputs, states, params, asked.backend, autocast), asked.sequences)
    layout: PartsLayout = look.wrap
    parts = layout.split(inputs, states)
    look.signatures[len(parts[0]), len(parts[1]), len(params)] = layout.signature
    options = {"backend": asked.backend, "sequences": asked.sequences, "num_outputs": layout.num_outputs, "exact": asked.sig.exact}
    finals, trail, outputs = run_core(core, look, *parts, params, strict=True, **options)
    return layout.states(finals), layout.states(trail) if asked.sequences else [], layout.outputs(outputs)


def apart_from_mixing(error: FlexSNError, key: tuple | None, asked: CoreCall) -> CapturedValues:
    """Return a look at what is left of a core without its calls that mix neurons.

    Args:
        error: why no kernel takes the whole.
        key: None under transforms and traces, and for tensors that are not plain.

    Raises:
        CannotFuseError: why none takes the rest, or the `error`.
    """
    seen, sig, num_outputs = asked.seen, asked.sig, asked.num_outputs
    mixes = isinstance(error, ShapeMismatchError) or (isinstance(error, NotElementwiseError) and MIXES in error.reason)
    nowhere = key is None and not isinstance(error, ShapeMismatchError)
    autocast = fork.autocast_dtype(asked.inputs[0].device.type)
    loops = autocast is None and any(t is not None and t.dtype in HALF for t in asked.operands)
    if not mixes or nowhere or not isinstance(seen.wrap, Uneven | None):
        raise error
    if loops:
        misfit = isinstance(error, ShapeMismatchError)
        reason, more = ("mixes neurons, and its operands have 16 bits", "") if misfit else (error.reason, error.hint or "")
        hint = f"Operands of what mixes neurons may have 16 bits under `torch.autocast`: call it there, or give it float32. {more}".rstrip()
        raise NotElementwiseError(reason, core=sig.core, line=error.line, hint=hint) from None
    inputs, params = [run.upcast(x) for x in asked.inputs], [run.upcast(p) for p in asked.params]
    states = [None if v is None else run.upcast(v) for v in asked.states]
    try:
        precisely = precise(_on_copies(asked), autocast, sig.num_inputs + sig.num_states)
        _, current = first_step(precisely, sig, inputs, states, params, num_outputs)
    except Exception:  # whatever the core raises: the loop raises it again, where it would run
        raise error from None
    if key is None:
        raise NotElementwiseError("takes operands that do not broadcast, and is called where only a kernel could run", core=sig.core)
    shapes = [*[(x.shape[1:], x.dtype) for x in inputs], *[(v.shape, v.dtype) for v in (*current, *params)]]
    source = asked.on(*seen.stand_ins(asked.core, stand_in))
    cut = cut_for(take_apart, source, [Meta(tuple(shape), dtype) for shape, dtype in shapes])
    if not cut.mixing:
        raise error
    over = seen.over_parts.get(cut) or seen.wrapped(cut)  # the same for another T
    _keep(seen.over_parts, cut, over)
    return over


Result = TypeVar("Result")


def run_parts(runs: Callable[[CapturedValues], Result], error: FlexSNError, asked: CoreCall) -> tuple[CapturedValues, Result]:
    """Return a look at the core over the parts of complex numbers, or of values with an inner dim, and what `runs` makes of it.

    Args:
        error: why no kernel takes the whole.

    Raises:
        CannotFuseError, ShapeMismatchError: why none takes the parts, or the `error`.
    """
    seen, sig, inputs, states, params = asked[1:6]
    if isinstance(error, ComplexStepError):
        look = seen.wrapped(error.layout)
        return look, runs(look)
    backs = isinstance(error, NotElementwiseError) and MIXES not in error.reason  # a backward, or a return
    if backs or not isinstance(seen.wrap, Uneven | None):
        raise error
    given = [tuple(x.shape[1:]) for x in inputs] + [() if v is None else tuple(v.shape) for v in states]
    misfit, why = isinstance(error, ShapeMismatchError), error
    ranks_differ = len({len(s) for s in given if s}) > 1
    apart = misfit or ranks_differ
    found = list(inner_dims(given))
    if not found and misfit and ranks_differ and any(inner_dims(given, least=0, most=math.inf)):
        raise NotElementwiseError(
            f"has operands with one dim more than others, of none or more than {MOST} values", core=sig.core,
            hint=f"A kernel takes a sum over a last dim of 1 to {MOST}.",
        )  # fmt: skip
    for outer, has in found:
        try:
            returned, current = first_step(_on_copies(asked), sig, inputs, states, params, asked.num_outputs)
        except Exception:  # whatever the core raises: the loop raises it again, where it would run
            if misfit:
                raise
            break
        shapes = [*[x.shape[1:] for x in inputs], *[v.shape for v in current]]
        look = seen.wrapped(layout_of(sig, outer, has, shapes, [y.shape for y in returned]))
        try:
            return look, runs(look)
        except CannotFuseError as other:
            why = other if apart else why  # of operands that all have the same dims, what is wrong with the whole is plainer
        except CoreError:  # of a core that takes the dim to be elsewhere
            pass
    raise why from None


def read_by(call: run.Call, tensors: Sequence[Tensor | None], captured: dict[str, Tensor]) -> Sequence[Tensor | None]:
    """Return the operands, then those captured tensors that the call reads: a core that is a method leads to all of its network's."""
    if not captured:
        return tensors
    return (*tensors[: len(tensors) - len(captured)], *[captured[name] for name in call.captured])


def _refuse_stale(sig: Signature, inputs: Sequence[Tensor], states: Sequence[Tensor | None]) -> None:
    """Raise if a call is given states that have no values for it: of a transform that has ended."""
    transformed = transforms_active()
    if not transformed and (transforms_or_modes_active() or not all(map(is_plain, inputs))):
        return
    for name, state in zip(sig.state_names, states, strict=True):
        if state is not None and (left_by_an_ended_vmap(state) if transformed else not is_plain(state)):
            raise StaleStateError(
                f"state `{name}` was left by a trace or a transform that has ended, and has no values", core=sig.core,
                hint="Call `reset()` on the module (`flexsn.reset_net(model)` on all of a network) after tracing or transforming it.",
            )  # fmt: skip


_MOST_CALLS = 256


def _keep(known: dict, key: Hashable | None, value: Any) -> None:
    """Keep what is known of a kind of calls; None is none that comes again."""
    if key is not None:
        if len(known) >= _MOST_CALLS:
            known.clear()
        known[key] = value


def _tied(captured: dict[str, Tensor]) -> tuple[int, ...]:
    """Which captured tensors are the same one, under several names; empty if none."""
    ids = [id(t) for t in captured.values()]
    return () if len(set(ids)) == len(ids) else tuple([ids.index(i) for i in ids])
