"""Cores that mix neurons as nodes of a compiled graph: the operators `flexsn::mixing` and `flexsn::mixing_backward`.

They name a core by what Dynamo made of it, and run it as plain calls do, unseen by the compiler. Where gradients are asked for, the forward
gives beside its results what the walks over time of recurrences found. The backward takes that, runs the rest of the call again, and has
autograd differentiate it: so it walks back only, and decides nothing anew. Exported programs hold PyTorch's own `scan`.
"""

from __future__ import annotations

import collections
import hashlib
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._capture.inner import MIXES
from .._capture.signature import Signature
from .._capture.source_lines import Replay
from .._capture.trace import Meta
from .._captured.captured_values import CapturedValues
from .._ir.graph import HALF
from .._operator.dispatch import run_core
from .._operator.library import LIBRARY, TAGS
from .._operator.mixing.run import with_walks
from .._runtime.fork import autocast_dtype
from .._torch.autograd import skipping_autograd
from .._torch.capture import no_modes
from .._torch.tensors import is_symbolic, size_expression, size_hint
from .._torch.transforms import is_plain, transforms_active
from ..errors import DoubleBackwardError, FlexSNError, FreedGraphError, NotElementwiseError, ShapeMismatchError
from .body import Body, captured_name, size_sources

CALL = "str core, Tensor[] operands, bool[] given, ScalarType? autocast, bool sequences, bool trains"
_TAGS = (*TAGS, torch.Tag.cudagraph_unsafe)  # a walk records CUDA graphs of its own
LIBRARY.define(f"mixing({CALL}) -> Tensor[]", tags=_TAGS)
LIBRARY.define(f"mixing_backward({CALL}, Tensor[] found, Tensor?[] cotangents, bool[] wanted) -> Tensor[]", tags=_TAGS)


UNKNOWN_STATES = (
    "core `{core}` fails on default states of the shape of its inputs: it runs uncompiled, where their shapes are found. If they have "
    "others, give them: `initial_states=` of a FlexSN, `states` of `flexsn.scan`"
)


def mixes(error: FlexSNError) -> bool:
    """Whether no kernel takes a core because it mixes neurons, or takes operands of shapes that only such a core does."""
    return isinstance(error, ShapeMismatchError) or (isinstance(error, NotElementwiseError) and MIXES in error.reason)


def first(results: list, count: int) -> list:
    """Return some of the results of an operator, for Dynamo to trace."""
    return results[:count]


class Options(NamedTuple):
    """What a call depends on besides tensors: which states are given (the others start at zero), the dtype of autocast (None: it is off),
    whether state sequences are asked for, and whether gradients may be."""

    given: Sequence[bool]
    autocast: torch.dtype | None
    sequences: bool
    trains: bool


# --- cores by name ------------------------------------------------------------------------------------------------------------
class GraphCore:
    """A core in graphs.

    Attributes:
        step: runs one step on inputs, states and params, of which the last are the tensors that the core captures; `sig`: of that.
        num_results: outputs, final states and state sequences; by whether there are any of the last.
    """

    def __init__(self, key: str, step: Callable[..., Any], sig: Signature, num_outputs: int | None):
        self.key, self.step, self.sig, self.num_outputs = key, step, sig, num_outputs

        def function(*operands: Tensor) -> Any:
            return _core(key).step(*operands)

        self.function, self.seen = function, CapturedValues(function)  # of which no look finds more than the name
        self.seen.signatures[sig.num_inputs, sig.num_states, sig.num_params] = sig
        self.num_results: dict[bool, int] = {}
        self._metas: dict[tuple, list[tuple[bool, Meta]]] = {}

    def run(self, operands: Sequence[Tensor], options: Options) -> list[Tensor]:
        """Run a call as outside of `torch.compile`; return outputs, final states and state sequences."""
        n, rest = self.sig.num_inputs, iter(operands[self.sig.num_inputs :])
        states = tuple([next(rest) if there else None for there in options.given])
        with torch.autocast(operands[0].device.type, options.autocast, enabled=options.autocast is not None):
            finals, trail, outputs = run_core(
                self.function, self.seen, tuple(operands[:n]), states, tuple(rest), backend="auto", strict=True,
                sequences=options.sequences, num_outputs=self.num_outputs,
            )  # fmt: skip
        self.num_results[options.sequences] = len(outputs) + len(finals) + len(trail)
        return [*outputs, *finals, *trail]

    def forward(self, operands: Sequence[Tensor], options: Options) -> list[Tensor]:
        """Run a call without gradients; return what `run` does and, where the call trains, what its walks found."""
        found: list[Tensor] | None = [] if options.trains else None
        with torch.no_grad(), with_walks(found):
            return [*self.run(operands, options), *(found or [])]

    def metas(self, operands: Sequence[Tensor], options: Options) -> list[tuple[bool, Meta]]:
        """Return what `forward` gives: whether it is a sequence, shape and dtype of one step. Symbolic sizes stay open where results grow
        evenly with each of them, which is seen at other numbers; else the trace is bound to those that it has."""
        shapes = [t.shape[k < self.sig.num_inputs :] for k, t in enumerate(operands)]
        open_sizes = {size_expression(n): n for shape in shapes for n in shape if is_symbolic(n)}
        hints = {name: size_hint(n) for name, n in open_sizes.items()}
        base = self._seen(operands, options, hints)
        if not open_sizes:
            return base
        try:
            more = [self._seen(operands, options, hints | {name: hint + 1}) for name, hint in hints.items()]
            most = self._seen(operands, options, {name: hint + 3 for name, hint in hints.items()})
            slopes = [_slopes(*shapes) for shapes in zip(*[[meta.shape for _, meta in made] for made in (base, most, *more)], strict=True)]
        except (FlexSNError, RuntimeError, ValueError):
            return self._seen(operands, options, {name: int(n) for name, n in open_sizes.items()})
        changes = [n - hints[name] for name, n in open_sizes.items()]
        grown = [[sum(map(operator.mul, by, changes)) for by in slope] for slope in slopes]
        pairs = zip(base, grown, strict=True)
        return [(lead, Meta(tuple(map(operator.add, meta.shape, by)), meta.dtype)) for (lead, meta), by in pairs]

    def _seen(self, operands: Sequence[Tensor], options: Options, sizes: dict[str, int]) -> list[tuple[bool, Meta]]:
        """Return what `metas` does, with symbolic sizes as given: as a call of one step on zeros gives it, of the kernels of any T."""
        kinds = list[tuple[Any, ...]]()
        for k, t in enumerate(operands):
            lead = (1,) * (k < self.sig.num_inputs)
            step = [sizes[size_expression(n)] if is_symbolic(n) else int(n) for n in t.shape[len(lead) :]]
            kinds.append(((*lead, *step), t.dtype, t.device))
        key = *kinds, tuple(options.given), *options[1:]
        if key not in self._metas:
            with no_modes():
                made = self.forward([torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in kinds], options)
            states = len(options.given)
            end = self.num_results[options.sequences] - states * options.sequences
            leads = [not end - states <= k < end for k in range(len(made))]
            self._metas[key] = [(lead, Meta(tuple(t.shape[lead:]), t.dtype)) for lead, t in zip(leads, made, strict=True)]
        return self._metas[key]


def _slopes(base: Sequence[int], most: Sequence[int], *more: Sequence[int]) -> list[list[int]]:
    """Return, of each size of a shape, by how much it grows with each open size; raise ValueError if it does not grow evenly.

    Args:
        most, more: the shape for all open sizes 3 larger, and for each of them 1 larger.
    """
    found = [[n - before for n in others] for before, *others in zip(base, *more, strict=True)]
    if [n + 3 * sum(by) for n, by in zip(base, found, strict=True)] != list(most):
        raise ValueError
    return found


# A core lives as long as code that Dynamo compiled from it; the latest ones also while a backward may follow on what ran that code
_cores: weakref.WeakValueDictionary[str, GraphCore] = weakref.WeakValueDictionary()
_latest: collections.deque[GraphCore] = collections.deque(maxlen=64)


def _core(key: str) -> GraphCore:
    core = _cores.get(key)
    if core is None:
        raise FreedGraphError("is of code that Dynamo has dropped", core=key, hint="Call the compiled function again.")
    return core


def graph_core(
    bodies: Sequence[Body], sig: Signature, operands: Sequence[Tensor | None], lifted: Sequence[Any], num_outputs: int | None
) -> GraphCore:  # fmt: skip
    """Return the core that Dynamo made `bodies` of, under one name for equal ones; arguments as of `blueprint_of_body`."""
    count, n = len(operands), sig.num_inputs
    sources = size_sources([None if t is None else t.shape[k < n :] for k, t in enumerate(operands)])
    values = [_value_of(value, sources) for value in lifted]
    captured = [captured_name(k) for k in range(values.count(None))]
    sig = Signature(sig.core, n, sig.num_states, sig.num_params + len(captured), (*sig.names, *captured))

    def step(*given: Tensor) -> Any:
        rest = iter(given[count:])
        found = [next(rest) if v is None else given[v[0]].shape[v[1]] if isinstance(v, tuple) else v for v in values]
        body = bodies[0] if any(t.dtype in HALF for t in given) else bodies[-1]
        run = body.graph.forward if type(given[0]) is Tensor else Replay(body.graph).run  # slower, with the user's lines: for captures
        return run(*given[:count], *[found[place] for place in body.places])

    texts = [body.graph.print_readable(print_output=False) for body in bodies]
    told = repr((texts, [body.places for body in bodies], sig, values, num_outputs))
    key = f"{sig.core}_{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    core = _cores.get(key)
    if core is None:
        core = _cores[key] = GraphCore(key, step, sig, num_outputs)
    _latest.append(core)
    return core


def _value_of(value: Any, sources: dict[str, tuple[int, int]]) -> float | tuple[int, int] | None:
    """Return where a size is read, or a number, to which the graph is then bound; None of a captured tensor."""
    if isinstance(value, Tensor):
        return None
    if is_symbolic(value) and size_expression(value) in sources:
        return sources[size_expression(value)]
    return float(value) if isinstance(value, (float, torch.SymFloat)) else int(value)


def mixing_call(parts: tuple[Any, ...], proxies: Sequence[Any], sequences: bool, trains: bool) -> tuple[GraphCore, tuple] | Exception:
    """Return a core, and the arguments of a node of `flexsn::mixing`; of a core that runs in no pieces, why.

    Args:
        parts: of the core, as `graph_core` takes them.
        proxies: of operands and what bodies take after them.
    """
    _, sig, fakes, values, _ = parts
    core, there = graph_core(*parts), [v is None or isinstance(v, Tensor) for v in (*fakes, *values)]
    operands = [p for p, flag in zip(proxies, there, strict=True) if flag and p is not None]
    given = [t is not None for t in fakes[sig.num_inputs : sig.num_inputs + sig.num_states]]
    options = Options(given, autocast_dtype(fakes[0].device.type), sequences, trains)
    try:
        core.metas([t for t in (*fakes, *values) if isinstance(t, Tensor)], options)
    except (FlexSNError, RuntimeError) as error:  # what else runs it raises it again, or says why
        return error
    return core, (core.key, operands, *options)


# --- the operators ------------------------------------------------------------------------------------------------------------
def _own(results: Sequence[Tensor], operands: Sequence[Tensor | None]) -> list[Tensor]:
    """Return results of an operator densely, each in memory of its own, from its start: Inductor expects it to be aligned."""
    taken, found = {t.untyped_storage().data_ptr() for t in operands if t is not None}, list[Tensor]()
    for t in results:
        shares = t.untyped_storage().data_ptr() in taken or t.storage_offset()
        found.append(t.clone(memory_format=torch.contiguous_format) if shares else t.contiguous())
        taken.add(found[-1].untyped_storage().data_ptr())
    return found


def _mixing(key: str, operands: list[Tensor], *options: Any) -> list[Tensor]:
    return _own(_core(key).forward(operands, Options(*options)), operands)


def _fake_mixing(key: str, operands: list[Tensor], *options: Any) -> list[Tensor]:
    first, T = operands[0], operands[0].shape[0]
    metas = _core(key).metas(operands, Options(*options))
    return [first.new_empty((T, *meta.shape) if lead else meta.shape, dtype=meta.dtype) for lead, meta in metas]


def _mixing_backward(key: str, operands: list[Tensor], *others: Any) -> list[Tensor]:
    options, (found, cotangents, wanted) = Options(*others[:-3]), others[-3:]
    leaves = [t.detach().requires_grad_(want) for t, want in zip(operands, wanted, strict=True)]
    with torch.enable_grad(), with_walks(given=found or None):
        results = _core(key).run(leaves, options)
    pairs = [(y, g) for y, g in zip(results, cotangents, strict=True) if g is not None and y.requires_grad]
    asked = [t for t in leaves if t.requires_grad]
    grads = torch.autograd.grad([y for y, _ in pairs], asked, [g for _, g in pairs], allow_unused=True) if pairs else [None] * len(asked)
    whole = [torch.zeros_like(t) if g is None else g for t, g in zip(asked, grads, strict=True)]
    return _own(whole, [*operands, *found, *cotangents])


def _fake_mixing_backward(key: str, operands: list[Tensor], *others: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, want in zip(operands, others[-1], strict=True) if want]


# --- autograd, whose turn it also is inside of them, but for traces ---------------------------------------------------------------
def _past_autograd(name: str, *args: Any) -> list[Tensor]:
    """Run an operator where autograd and `torch.vmap` have their turn; in traces what comes after autograd."""
    if not transforms_active() and all(map(is_plain, args[1])):
        with no_modes():  # which would see what is inside
            return {"mixing": _mixing, "mixing_backward": _mixing_backward}[name](*args)
    with skipping_autograd():
        return getattr(torch.ops.flexsn, name)(*args)


class _Recorded(torch.autograd.Function):
    """A call, and what its walks found."""

    @staticmethod
    def forward(ctx: Any, key: str, options: list[Any], *operands: Tensor) -> tuple[Tensor, ...]:
        results = _past_autograd("mixing", key, list(operands), *options)
        ctx.key, ctx.options, ctx.shown = key, options, _core(key).num_results[Options(*options).sequences]
        ctx.count, found = len(operands), results[ctx.shown :]
        ctx.save_for_backward(*operands, *found)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*found, *[y for y in results[: ctx.shown] if not y.is_floating_point()])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        saved, wanted, backward = list(ctx.saved_tensors), list(ctx.needs_input_grad[2:]), torch.ops.flexsn.mixing_backward
        grads = iter(backward(ctx.key, saved[: ctx.count], *ctx.options, saved[ctx.count :], list(cotangents[: ctx.shown]), wanted))
        return None, None, *[next(grads) if want else None for want in wanted]


def _mixing_by_autograd(key: str, operands: list[Tensor], *options: Any) -> list[Tensor]:
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return list(_Recorded.apply(key, list(options), *operands))
    return _past_autograd("mixing", key, operands, *options)


def _mixing_backward_by_autograd(key: str, operands: list[Tensor], *others: Any) -> list[Tensor]:
    *_, cotangents, _ = others
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*operands, *cotangents)):
        raise DoubleBackwardError(
            "mixes neurons, and its backward in a compiled graph is differentiated", core=_core(key).sig.core,
            hint='Only the eager loop does that: `backend="torch"`, outside of `torch.compile`.',
        )  # fmt: skip
    return _past_autograd("mixing_backward", key, operands, *others)


def _no_batches(info: Any, in_dims: tuple, key: str, *_: Any) -> Any:
    raise DoubleBackwardError("mixes neurons, and takes no batches in a compiled graph", core=_core(key).sig.core)


for _name, _real, _fake, _by_autograd in (
    ("mixing", _mixing, _fake_mixing, _mixing_by_autograd),
    ("mixing_backward", _mixing_backward, _fake_mixing_backward, _mixing_backward_by_autograd),
):
    LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    LIBRARY.impl(_name, _by_autograd, "Autograd")
    torch.library.register_fake(f"flexsn::{_name}", _fake, lib=LIBRARY)
    torch.library.register_vmap(f"flexsn::{_name}", _no_batches, lib=LIBRARY)
