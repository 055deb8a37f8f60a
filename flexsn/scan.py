"""`flexsn.scan`: a core over a sequence, as one differentiable call."""

from __future__ import annotations

import sys
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _compat, run
from . import reads as reading
from .backends import BACKENDS as KERNELS
from .capture import Meta
from .compile import program_for
from .eager import eager_loop
from .errors import (
    BackendError,
    BackendUnavailableError,
    CannotFuseError,
    DoubleBackwardError,
    FallbackWarning,
    FlexSNError,
    ForwardModeError,
    OperandTypeError,
    TransformError,
)
from .reads import Reads
from .record import INTERNAL
from .signature import Signature, check_operands, core_name, make_signature

BACKENDS = ("auto", "torch", "cpp", "triton", "inductor")


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
) -> ScanResult:
    """Run one-step function `core` over T steps in one fused kernel, differentiable in every tensor it touches.

    Args:
        core: `core(*inputs_t, *states, *params) -> (*outputs_t, *new_states)`, one time step in plain PyTorch.
        inputs: sequences `[T, *shape]`; at least one. `core` sees `[*shape]`.
        states: initial states, broadcastable to the step shape; None for zeros of the shape and dtype that `core` returns.
        params: tensors that go to every step unchanged. Tensors that `core` captures need not be listed.
        store_state_seqs: return the states of every step in place of the final ones.
        backend: `"auto"`, `"cpp"` (fused, CPU), `"triton"` (fused, NVIDIA GPUs; also named `"inductor"`) or `"torch"` (the
            eager loop).
        strict: make `"auto"` raise where it would fall back to the eager loop.

    Returns:
        `ScanResult(outputs, states)`, both tuples.

    Raises:
        FlexSNError: a subclass per mistake (see `flexsn.errors`), naming the core, the operand or op, and the source line.
    """
    for name, given in (("inputs", inputs), ("states", states), ("params", params)):
        if not isinstance(given, (tuple, list)):
            raise OperandTypeError(f"`{name}` must be a tuple or list of tensors", core=core_name(core), hint=f"Write `{name}=(x,)`.")
    finals, sequences, outputs = run_core(
        core, look(core), {}, tuple(inputs), tuple(states), tuple(params), backend=backend, strict=strict, sequences=store_state_seqs
    )
    return ScanResult(tuple(outputs), tuple(sequences if store_state_seqs else finals))


def run_core(
    core: Callable, seen: Reads, replaced: dict[str, Any], inputs: tuple[Tensor, ...], states: tuple[Tensor | None, ...],
    params: tuple[Tensor, ...], *, backend: str, strict: bool, sequences: bool, num_outputs: int | None = None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """Check, choose a backend, run. Returns final states, state sequences (if asked for), outputs."""
    if backend not in BACKENDS:
        raise BackendError(f"unknown backend {backend!r}; there are {', '.join(map(repr, BACKENDS))}", core=core_name(core))
    if _autocasting():  # dtypes are those of the operands
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return run_core(
                core, seen, replaced, inputs, states, params, backend=backend, strict=strict, sequences=sequences, num_outputs=num_outputs
            )
    captured = seen.tensors(replaced) if seen.objects else {}
    tensors = (*inputs, *states, *params, *captured.values())
    counts = (len(inputs), len(states), len(params))
    key = _kinds(tensors, (*counts, backend, sequences, num_outputs))
    call = seen.calls.get(key)
    if call is not None and _compat.forward_ad_level() < 0 and not _compat.transformed():
        return _run(call, tensors)
    if counts not in seen.signatures:
        seen.signatures[counts] = make_signature(core, *counts)
    sig = seen.signatures[counts]
    check_operands(sig, inputs, states, params)
    if backend != "torch":
        try:
            call = _prepare(core, seen, replaced, sig, inputs, states, params, captured, backend, sequences, num_outputs)
            results = _run(call, tensors)
        except (CannotFuseError, BackendUnavailableError) as error:
            if backend != "auto" or strict:
                raise
            _warn_once(error)
        else:
            if key is not None:
                if len(seen.calls) >= _MOST_CALLS:
                    seen.calls.clear()
                seen.calls[key] = call
            return results
    with reading.bound(seen, replaced):
        outputs, finals, state_seqs = eager_loop(core, sig, inputs, states, params, num_outputs, sequences)
    return finals, state_seqs, outputs


def _autocasting() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


_warned: set[str] = set()


def _warn_once(error: FlexSNError) -> None:
    text = str(error)
    if text not in _warned:
        _warned.add(text)
        warnings.warn(f"flexsn runs the eager loop: {text}", FallbackWarning, stacklevel=_users_level())


def _users_level() -> int:
    """How many frames up the first one outside flexsn and PyTorch is."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INTERNAL):
        frame, level = frame.f_back, level + 1
    return level


_looks: weakref.WeakKeyDictionary[Callable, Reads] = weakref.WeakKeyDictionary()


def look(core: Callable) -> Reads:
    """What the core reads, looked at again only when something that it holds has changed."""
    with reading.lock:
        return _look(core)


def _look(core: Callable) -> Reads:
    try:
        seen = _looks.get(core)
    except TypeError:  # not hashable
        return reading.look(core)
    own = tuple([getattr(core, name, None) for name in ("__code__", "__defaults__", "__kwdefaults__")])
    if seen is None or any([a is not b for a, b in zip(seen.own, own, strict=True)]) or not seen.current():
        seen = reading.look(core)
        seen.own = own
        if not isinstance(core, types.MethodType):  # a bound method is a new object at every access
            _looks[core] = seen
    return seen


_MOST_CALLS = 256


def _kinds(tensors: Sequence[Tensor | None], others: tuple) -> tuple | None:
    """What a call depends on but for the values of its operands; None where one is no plain tensor."""
    kinds: list[Any] = [torch.is_grad_enabled(), torch.get_default_dtype()]
    for t in tensors:
        if t is None:
            kinds.append(None)
        elif type(t) not in _PLAIN or t.is_nested or t.layout is not torch.strided:
            return None
        else:
            kinds += (t.shape, t.dtype, t.device, t.requires_grad)
    return (*others, *kinds)


_PLAIN = (Tensor, torch.nn.Parameter)


def _prepare(
    core, seen: Reads, replaced, sig: Signature, inputs, states, params, captured, backend: str, sequences: bool, num_outputs: int | None
) -> run.Call:
    """Find or make the program for a call."""
    if _compat.transformed() or any(isinstance(t, _compat.FakeTensor) for t in (*inputs, *states, *params)):
        raise TransformError(
            "is called under a transform or a dispatch mode (torch.func, vmap, fake tensors), where kernels find no memory", core=sig.core,
            hint='Use backend="torch", the eager loop, there.',
        )  # fmt: skip
    device = inputs[0].device
    name = {"auto": "triton" if device.type == "cuda" else "cpp", "inductor": "triton"}.get(backend, backend)
    refused = KERNELS[name].refuses(device)
    if refused is not None:
        raise (BackendUnavailableError if backend == "auto" else BackendError)(refused, core=sig.core, hint='Use backend="auto".')
    metas: list[Meta | None] = [Meta(tuple(x.shape[1:]), x.dtype) for x in inputs]
    metas += [None if v is None else Meta(tuple(v.shape), v.dtype) for v in states]
    metas += [Meta(tuple(p.shape), p.dtype) for p in params]
    tensors = (*inputs, *states, *params, *captured.values())
    if _compat.forward_ad_level() >= 0 and any(t is not None and _compat.has_tangent(t) for t in tensors):
        raise ForwardModeError("is differentiated in forward mode, which the fused operator does not do", core=sig.core)
    with reading.bound(seen, replaced):
        program, shapes = program_for(name, core, seen, sig, metas, device, captured, num_outputs)
        differentiable = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        if differentiable:
            program.differentiate(core, captured)
    return run.Call(program, shapes, inputs[0].shape[0], (*sig.param_names, *captured), sequences, differentiable, tensors)


def _run(call: run.Call, tensors: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    if call.differentiable:
        results = list(_Scan.apply(call, *tensors))
    else:
        with torch.no_grad():
            done, _ = _forward(call, tensors, save=False)
        results = [*done.outputs, *done.finals, *done.sequences]
    outs, n = call.program.num_outputs, call.program.sig.num_states
    return results[outs : outs + n], results[outs + n :], results[:outs]


def _split(call: run.Call, tensors: Sequence[Tensor | None]) -> tuple[list, list, list]:
    i, n = call.num_inputs, call.num_operands
    return list(tensors[:i]), list(tensors[i:n]), list(tensors[n:])


def _forward(call: run.Call, tensors: Sequence[Tensor | None], save: bool) -> tuple[run.Forward, tuple[list, list, list]]:
    """Without recording gradients."""
    inputs, states, statics = _split(call, tensors)
    step = call.shapes.step
    inputs = [run.rows(x, step, 1) for x in inputs]
    states = [None if v is None else run.rows(v, step, 0) for v in states]
    return run.forward(call, inputs, states, _named(call, statics), save), (inputs, states, statics)


def _named(call: run.Call, statics: Sequence[Tensor]) -> dict[str, Tensor]:
    """Static tensors by name; params (not captured tensors) are upcast, as the core was traced."""
    explicit = call.program.sig.num_params
    return {n: run.upcast(t.detach()) if k < explicit else t.detach() for k, (n, t) in enumerate(zip(call.statics, statics, strict=True))}


class _Scan(torch.autograd.Function):
    """The eager door: one forward kernel, one backward kernel."""

    @staticmethod
    def forward(ctx, call: run.Call, *tensors):
        done, (inputs, states, statics) = _forward(call, tensors, save=True)
        ctx.call = call
        ctx.checkpoint_roles = tuple(done.checkpoints)
        ctx.save_for_backward(*inputs, *states, *statics, *done.checkpoints.values())
        ctx.set_materialize_grads(False)
        vjp = call.program.vjp
        assert vjp is not None
        outs = len(done.outputs)
        results = (*done.outputs, *done.finals, *done.sequences)
        if not all(vjp.differentiable):
            flags = (*vjp.differentiable, *(vjp.differentiable[outs:] if done.sequences else ()))
            ctx.mark_non_differentiable(*[t for t, ok in zip(results, flags, strict=True) if not ok])
        return results

    @staticmethod
    def backward(ctx, *grads):
        if _autocasting():
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                return _Scan.backward(ctx, *grads)
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "is differentiated with create_graph=True, but a fused call has no second derivative", core=ctx.call.program.sig.core,
                hint='Use backend="torch", the eager loop, where second derivatives are needed.',
            )  # fmt: skip
        call, program, vjp = ctx.call, ctx.call.program, ctx.call.program.vjp
        sig, outs, n = program.sig, program.num_outputs, program.sig.num_states
        saved = ctx.saved_tensors
        kept = len(call.kinds)
        inputs, states, statics = _split(call, saved[:kept])
        checkpoints = dict(zip(ctx.checkpoint_roles, saved[kept:], strict=True))
        prefixes = (("gy", grads[:outs]), ("gv", grads[outs : outs + n]), ("gs", grads[outs + n :]))
        cotangents = {f"{p}{k}": g for p, gs in prefixes for k, g in enumerate(gs) if g is not None}
        needs = ctx.needs_input_grad[1:]
        roles = [f"g{r}" for r in call.roles]
        first_static = len(roles)
        wanted, wanted_statics = call.wanted(needs)
        if not cotangents:
            return (None,) * (1 + len(needs))
        found, static_grads = run.backward(call, inputs, states, _named(call, statics), checkpoints, cotangents, wanted, wanted_statics)
        results: list[Tensor | None] = [None]
        for k, (role, meta) in enumerate(zip(roles, call.kinds, strict=False)):
            grad = found.get(role)
            results.append(None if grad is None or meta is None else run.unbroadcast(grad, meta[0], 1 if k < sig.num_inputs else 0))
        named_grads = dict(zip((*sig.param_names, *vjp.captured), static_grads, strict=True))
        for name, meta in zip(call.statics, call.kinds[first_static:], strict=True):
            grad = named_grads.get(name)
            results.append(None if grad is None else grad.to(meta[1]))
        return tuple(results)
