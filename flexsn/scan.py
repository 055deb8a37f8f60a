"""`flexsn.scan`: a core over a sequence, as one differentiable call."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _compat, _compat_transforms, dynamo, reads_look, run, sharding
from . import reads as reading
from . import tune as tuning
from .doors import disturbed, run_call, undisturbed
from .eager import eager_loop
from .errors import (
    BackendUnavailableError,
    CannotFuseError,
    OperandTypeError,
    PiecesError,
    StaleStateError,
)
from .fallback import noting, warn_once
from .loops import scan_operator
from .ops import check_backend
from .pieces import in_pieces, scan_pieces
from .prepare import PLAIN, prepare, refuse_freed
from .reads import Reads
from .signature import Signature, check_operands, core_name, make_signature, torchscript_refused


class ScanResult(NamedTuple):
    """Outputs `[T, *shape]`; final states `[*shape]`, or state sequences `[T, *shape]` if asked for."""

    outputs: tuple[Tensor, ...]
    states: tuple[Tensor, ...]


def scan(
    core: Callable[..., Any],
    inputs: Sequence[Tensor],
    states: Sequence[Tensor | None] = (),
    params: Sequence[Tensor] = (),
    *,
    store_state_seqs: bool = False,
    backend: str = "auto",
    strict: bool = False,
    tune: bool = False,
    reduce: Callable[..., Any] | None = None,
) -> ScanResult:
    """Run one-step function `core` over T steps in one fused kernel, differentiable in every tensor it touches.

    Args:
        core: `core(*inputs_t, *states, *params) -> (*outputs_t, *new_states)`, one time step in plain PyTorch.
        inputs: sequences `[T, *shape]`; at least one. `core` sees `[*shape]`. Or sequences in pieces, each a list (or anything
            with `len` and `[k]`) of `[T_k, *shape]`: results are lists of pieces too, and the backward reads and runs every piece
            again, so that only the states at their borders are kept. Pieces are moved to where the initial states are. An
            iterator of pieces can be read once, and serves where nothing requires grad.
        states: initial states, broadcastable to the step shape; None for zeros of the shape and dtype that `core` returns.
        params: tensors that go to every step unchanged. Tensors that `core` captures need not be listed.
        store_state_seqs: return the states of every step in place of the final ones.
        backend: `"auto"`, `"cpp"` (fused, CPU), `"triton"` (fused, NVIDIA GPUs; also named `"inductor"`), `"torch"` (the
            eager loop) or `"hop"` (the device's fused one, through the operator that compiled calls take).
        strict: make `"auto"` raise where it would fall back to the eager loop.
        tune: on a GPU, measure the kernels' tiles at these sizes first (seconds, once: the choice is kept on disk, and used by
            later calls of all kinds). Compiled calls do not measure.
        reduce: for sequences in pieces, `reduce(k, *outputs)` takes the outputs of piece `k` and returns a tensor or a tuple of
            tensors (its part of the loss), which are summed over the pieces and returned in place of the outputs.

    Returns:
        `ScanResult(outputs, states)`, both tuples.

    Raises:
        FlexSNError: a subclass per mistake (see `flexsn.errors`), naming the core, the operand or op, and the source line.
    """
    for name, given in (("inputs", inputs), ("states", states), ("params", params)):
        if not isinstance(given, (tuple, list)):
            raise OperandTypeError(f"`{name}` must be a tuple or list of tensors", core=core_name(core), hint=f"Write `{name}=(x,)`.")
    if reduce is not None or any(map(in_pieces, inputs)):
        return _scan_in_pieces(core, inputs, states, params, store_state_seqs, reduce, backend=backend, strict=strict, tune=tune)
    operands = tuple(inputs), tuple(states), tuple(params)
    if torch.compiler.is_dynamo_compiling():
        finals, sequences, outputs = compile_core(core, None, *operands, backend=backend, strict=strict, sequences=store_state_seqs)
    else:
        finals, sequences, outputs = run_core(
            core, look(core), {}, *operands, backend=backend, strict=strict, sequences=store_state_seqs, tune=tune
        )
    return ScanResult(tuple(outputs), tuple(sequences if store_state_seqs else finals))


@_compat.outside_dynamo("a sequence in pieces")
def _scan_in_pieces(core, inputs, states, params, store_state_seqs, reduce, **options) -> ScanResult:
    if not any(map(in_pieces, inputs)):
        raise PiecesError("`reduce` is given, but no input is in pieces", core=core_name(core), hint="Write `inputs=(x.split(length),)`.")

    read = {f"param {k}" for k in range(len(params))}  # names of what the pieces have read so far

    def run(pieces: tuple[Tensor, ...], states: Sequence[Tensor | None]) -> tuple[Any, Any, Any]:
        seen = look(core)
        finals, trail, outputs = run_core(core, seen, {}, pieces, tuple(states), tuple(params), sequences=store_state_seqs, **options)
        kernels = [] if options["backend"] == "torch" else [call.captured for call in seen.calls.values()]
        read.update(*(kernels or [seen.tensors({})]))  # all that the core leads to, where no kernel ran
        return tuple(outputs), tuple(finals), tuple(trail)

    sig = make_signature(core, len(inputs), len(states), len(params))
    outputs, finals, trails = scan_pieces(
        run, sig.core, sig.input_names, inputs, states, reduce,
        lambda: {f"param {k}": p for k, p in enumerate(params)} | look(core).tensors({}), lambda: read,
        lambda: look(core).fingerprint, lambda: _captured(reduce),
    )  # fmt: skip
    return ScanResult(outputs, trails if store_state_seqs else finals)  # type: ignore[arg-type]  # lists of tensors, as documented


def _captured(function: Any) -> dict[str, Tensor]:
    """The tensors that a function captures, by path."""
    with reading.lock:
        return reads_look.look(function).tensors({}) if callable(function) else {}


class CoreScan(_compat.HigherOrderOperator):
    """What Dynamo sees of a call: `dynamo.py` turns it into `flexsn::scan`. Where Dynamo gives up on a core, it runs as it is."""

    def __init__(self) -> None:
        super().__init__("flexsn_core_scan")

    @_compat.unseen_by_dynamo
    def __call__(self, core, owner, inputs, states, params, sequences, num_outputs, backend, strict):
        reads, replaced = (look(core), {}) if owner is None else owner.look()
        finals, trail, outputs = run_core(
            core, reads, replaced, inputs, states, params, backend=backend, strict=strict, sequences=sequences, num_outputs=num_outputs
        )
        return [*outputs, *finals, *trail]


core_scan = CoreScan()


def compile_core(
    core: Callable, owner: Any, inputs: tuple[Tensor, ...], states: tuple[Tensor | None, ...], params: tuple[Tensor, ...], *, backend: str,
    strict: bool, sequences: bool, num_outputs: int | None = None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """`run_core` as Dynamo traces it.

    Args:
        owner: the `FlexSN` that holds the captured tensors, if one does.
    """
    if not dynamo.ready() or (owner is not None and owner.holds_copies):
        return uncompiled_call(core, owner, inputs, states, params, sequences, num_outputs, backend, strict)
    results = core_scan(core, owner, inputs, states, params, sequences, num_outputs, backend, strict)
    if isinstance(results, str):  # no kernel can express the core
        loop = loop_scan if results == dynamo.SCAN else uncompiled_loop
        return loop(core, owner, inputs, states, params, sequences, num_outputs)
    n = len(states)
    outs = len(results) - (2 * n if sequences else n)
    return list(results[outs : outs + n]), list(results[outs + n :]), list(results[:outs])


@_compat.outside_dynamo(
    "flexsn runs the eager loop: no kernel expresses this core, and gradients of the loops that Inductor compiles come out wrong. Compile "
    "without `fullgraph=True`, or under `torch.no_grad()`"
)
def uncompiled_loop(
    core: Callable, owner: Any, inputs: tuple[Tensor, ...], states: tuple[Tensor | None, ...], params: tuple[Tensor, ...], sequences: bool,
    num_outputs: int | None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """The eager loop, between compiled parts."""
    seen = (look(core), {}) if owner is None else owner.look()
    return run_core(core, *seen, inputs, states, params, backend="torch", strict=False, sequences=sequences, num_outputs=num_outputs)


@_compat.outside_dynamo(
    "flexsn runs the call uncompiled: this PyTorch has moved what compiled calls stand on, as an `InterfaceWarning` says; or, without the "
    "warning, this neuron is a copy whose core captures a module, and Dynamo would read the original's flags and numbers (a core that is a "
    "module and holds the other is copied with it). Compile without `fullgraph=True`"
)
def uncompiled_call(
    core: Callable, owner: Any, inputs: tuple[Tensor, ...], states: tuple[Tensor | None, ...], params: tuple[Tensor, ...], sequences: bool,
    num_outputs: int | None, backend: str, strict: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """The call as it runs outside of `torch.compile`, between compiled parts."""
    seen = (look(core), {}) if owner is None else owner.look()
    return run_core(core, *seen, inputs, states, params, backend=backend, strict=strict, sequences=sequences, num_outputs=num_outputs)


def compiled_loop(
    core: Callable, owner: Any, inputs: tuple[Tensor, ...], states: tuple[Tensor | None, ...], params: tuple[Tensor, ...], sequences: bool,
    num_outputs: int | None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """`eager_loop` as Dynamo traces it: PyTorch's own scan operator, one node for any T."""
    shape = torch.broadcast_shapes(*[x.shape[1:] for x in inputs])
    first = [inputs[0].new_zeros(shape) if v is None else v for v in states]
    if num_outputs is None:
        returned = core(*[x.new_zeros(x.shape[1:]) for x in inputs], *first, *params)
        num_outputs = (1 if isinstance(returned, Tensor) else len(returned)) - len(states)
    counts = len(inputs), len(states), num_outputs
    done = list(scan_operator(core, *counts, *inputs, *first, *params, states="sequence"))
    outputs, trail = done[:num_outputs], done[num_outputs:]
    finals = (
        [v[-1].clone() for v in trail] if inputs[0].shape[0] else [v.expand(t.shape[1:]).clone() for v, t in zip(first, trail, strict=True)]
    )
    return finals, trail if sequences else [], outputs


class LoopScan(_compat.HigherOrderOperator):
    """`compiled_loop`, with numbers as constants. Where Dynamo gives up on it, the eager loop runs."""

    def __init__(self) -> None:
        super().__init__("flexsn_loop_scan")

    @_compat.unseen_by_dynamo
    def __call__(self, *operands):
        return uncompiled_loop(*operands)


loop_scan = LoopScan()
dynamo.INLINED["flexsn_loop_scan"] = dynamo.Inlined(compiled_loop, owned=True)


@_compat.unseen_by_dynamo
def run_core(
    core: Callable, seen: Reads, replaced: dict[str, Any], inputs: tuple[Tensor, ...], states: tuple[Tensor | None, ...],
    params: tuple[Tensor, ...], *, backend: str, strict: bool, sequences: bool, num_outputs: int | None = None,
    tune: bool = False,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """Check, choose a backend, run. Returns final states, state sequences (if asked for), outputs."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]  # it is there; sizes of tensors are tensors then
        raise torchscript_refused(core)
    if disturbed():
        with undisturbed():
            return run_core(
                core, seen, replaced, inputs, states, params, backend=backend, strict=strict, sequences=sequences, num_outputs=num_outputs,
                tune=tune,
            )  # fmt: skip
    captured = seen.tensors(replaced) if seen.objects else {}
    tensors = (*inputs, *states, *params, *captured.values())
    counts = (len(inputs), len(states), len(params))
    key = _kinds(tensors, (*counts, backend, sequences, num_outputs, tune, _tied(captured) if captured else ()))
    call = seen.calls.get(key)
    if call is not None and _compat.forward_ad_level() < 0:
        try:
            return run_call(call, _read_by(call, tensors, captured))
        except RuntimeError:
            _refuse_stale(seen.signatures[counts], inputs, states)
            raise
    check_backend(backend, core_name(core))
    if counts not in seen.signatures:
        seen.signatures[counts] = make_signature(core, *counts)
    sig = seen.signatures[counts]
    check_operands(sig, inputs, states, params)
    if key is None and sharding.any_dtensor(tensors):
        sharding.ready()
        if sharding.any_dtensor((*inputs, *states, *params)):
            sharding.check_layouts(sig, inputs, states, params)
    refuse_freed(sig, (*sig.names, *captured), tensors)
    _refuse_stale(sig, inputs, states)
    why: Exception | None = None  # the eager loop runs, if another backend could be taken
    if backend != "torch":
        try:
            call = prepare(core, seen, replaced, sig, inputs, states, params, captured, backend, sequences, num_outputs)
            if tune and type(call) is run.Call:
                tuning.tune(call, inputs)
            results = run_call(call, _read_by(call, tensors, captured))
        except (CannotFuseError, BackendUnavailableError) as error:
            if backend != "auto" or strict:
                raise
            warn_once("the eager loop", error)
            why = error
        else:
            if key is not None:
                if len(seen.calls) >= _MOST_CALLS:
                    seen.calls.clear()
                seen.calls[key] = call
            return results
    inputs, states, params = sharding.settled_groups(inputs, states, params)
    around = sharding.Replicating() if sharding.any_dtensor(tensors) else contextlib.nullcontext()
    with reading.bound(seen, replaced), around, noting("the eager loop", why):
        outputs, finals, state_seqs = eager_loop(core, sig, inputs, states, params, num_outputs, sequences)
    return finals, state_seqs, outputs


def _read_by(call: run.Call, tensors: tuple[Tensor | None, ...], captured: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
    """The operands, with those captured tensors after them that the call reads: a core that is a method of its network leads to all of
    the network's."""
    if not captured:
        return tensors
    return (*tensors[: len(tensors) - len(captured)], *[captured[name] for name in call.captured])


def _is_without_memory(tensor: Tensor) -> bool:
    return not _compat_transforms.is_plain(tensor)


def _refuse_stale(sig: Signature, inputs: Sequence[Tensor], states: Sequence[Tensor | None]) -> None:
    """Raise if a call is given states that have no values for it: of a transform that has ended."""
    if _compat_transforms.active():
        stale = _compat_transforms.outlived_its_vmap
    elif _compat_transforms.transformed() or not all(map(_compat_transforms.is_plain, inputs)):
        return
    else:
        stale = _is_without_memory
    for name, state in zip(sig.state_names, states, strict=True):
        if state is not None and stale(state):
            raise StaleStateError(
                f"state `{name}` was left by a trace or a transform that has ended, and has no values", core=sig.core,
                hint="Call `reset()` on the module (`flexsn.reset_net(model)` on all of a network) after tracing or transforming it.",
            )  # fmt: skip


_looks: weakref.WeakKeyDictionary[Callable, Reads] = weakref.WeakKeyDictionary()


@_compat.unseen_by_dynamo
def look(core: Callable) -> Reads:
    """What the core reads, looked at again only when something that it holds has changed."""
    with reading.lock:
        return _look(core)


def _look(core: Callable) -> Reads:
    try:
        seen = _kept(core)
    except TypeError:  # not hashable
        return reads_look.look(core)
    if seen is None or not seen.of_now(core):
        if isinstance(core, types.FunctionType):
            vars(core).setdefault(reading.KEPT, None)  # its attributes are counted with this one
        seen = reads_look.look(core)
        seen.own = reading.own_of(core)
        if isinstance(core, types.FunctionType):
            vars(core)[reading.KEPT] = seen
        elif seen.cyclic:  # what it reads keeps it alive
            _looks.pop(core, None)
        elif not isinstance(core, types.MethodType):  # a bound method is a new object at every access
            _looks[core] = seen
    return seen


def _kept(core: Callable) -> Reads | None:
    """A function carries what it reads itself: a closure over an object that holds the core would never die in a table."""
    if not isinstance(core, types.FunctionType):
        return _looks.get(core)
    seen = vars(core).get(reading.KEPT)
    return seen if seen is not None and seen.of() is core else None  # `functools.wraps` copies attributes


_MOST_CALLS = 256


def _tied(captured: dict[str, Tensor]) -> tuple[int, ...]:
    """Which captured tensors are the same one, under several names; empty if none."""
    ids = [id(t) for t in captured.values()]
    return () if len(set(ids)) == len(ids) else tuple([ids.index(i) for i in ids])


def _kinds(tensors: Sequence[Tensor | None], others: tuple) -> tuple | None:
    """What a call depends on but for the values of its operands; None where one is no plain tensor, or calls are traced."""
    if _compat_transforms.transformed():
        return None
    kinds: list[Any] = [_compat.records_gradients(), torch.get_default_dtype()]
    for t in tensors:
        if t is None:
            kinds.append(None)
        elif type(t) not in PLAIN or t.is_nested or t.layout is not torch.strided:
            return None
        else:
            kinds += (t.shape, t.dtype, t.device, t.requires_grad)
    return (*others, *kinds)
