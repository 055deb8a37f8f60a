"""Cores that mix neurons as nodes of a compiled graph: the operators `flexsn::mixing` and `flexsn::mixing_backward`.

They name a core by what Dynamo made of it, and run it as plain calls do, unseen by the compiler. The backward runs the forward again.
So a graph holds them where no gradient is asked for, or where it may not break (`fullgraph=True`): else a call that trains runs between
compiled parts, which keeps what its forward found.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._capture.inner import MIXES
from .._capture.signature import Signature
from .._capture.source_lines import Replay
from .._captured.captured_values import CapturedValues
from .._ir.graph import HALF
from .._operator.dispatch import run_core
from .._operator.library import LIBRARY, TAGS
from .._operator.mixing.precision import precise
from .._runtime.fork import autocast_dtype
from .._torch.autograd import after_dispatch_modes, autocast_on
from .._torch.tensors import is_symbolic, size_expression
from ..errors import FlexSNError, NotElementwiseError, ShapeMismatchError
from .body import Body, captured_name, size_sources

ARGUMENTS = "str core, Tensor[] operands, bool[] given, ScalarType? autocast, bool sequences"
_UNSEEN = (*TAGS, torch.Tag.cudagraph_unsafe)  # they keep buffers and CUDA graphs of their own
LIBRARY.define(f"mixing({ARGUMENTS}) -> Tensor[]", tags=_UNSEEN)
LIBRARY.define(f"mixing_backward(Tensor?[] cotangents, bool[] wanted, {ARGUMENTS}) -> Tensor[]", tags=_UNSEEN)


UNKNOWN_STATES = (
    "core `{core}` fails on default states of the shape of its inputs: it runs uncompiled, where their shapes are found. If they have "
    "others, give them: `initial_states=` of a FlexSN, `states` of `flexsn.scan`"
)


def runs_in_pieces(error: FlexSNError, fakes: Sequence[Tensor | None]) -> bool:
    """Whether a core mixes neurons, or takes shapes that only such a core does, and runs in pieces where nothing is exported."""
    mixes = isinstance(error, ShapeMismatchError) or (isinstance(error, NotElementwiseError) and MIXES in error.reason)
    half = any(t is not None and t.dtype in HALF for t in fakes)
    return mixes and (autocast_on() or not half) and not torch.compiler.is_exporting()


class Core(NamedTuple):
    """A core in graphs.

    Attributes:
        sig: params are its own, and then the tensors that it captures.
        function: of one step of these.
        seen: what `run_core` is told that it captures: nothing.
    """

    sig: Signature
    function: Callable[..., Any]
    seen: CapturedValues
    num_outputs: int | None
    strict: bool


_cores: dict[str, Core] = {}  # by what a graph calls them; they are small, and compiled code may run as long as the process does


def keep_core(
    bodies: Sequence[Body], sig: Signature, operands: Sequence[Tensor | None], lifted: Sequence[Any], num_outputs: int | None,
    strict: bool,
) -> str:  # fmt: skip
    """Return the name of a core in graphs, for what Dynamo made of it, as `blueprint_of_body` takes that."""
    tensors = sum(isinstance(value, Tensor) for value in lifted)
    names = (*sig.names, *[captured_name(k) for k in range(tensors)])
    sig = Signature(sig.core, sig.num_inputs, sig.num_states, sig.num_params + tensors, names)
    count, sources = len(operands), size_sources([None if t is None else t.shape[k < sig.num_inputs :] for k, t in enumerate(operands)])
    places = [sources.get(size_expression(n)) if is_symbolic(n) else None for n in lifted]
    numbers = [None if isinstance(n, Tensor) or place is not None else float(n) if isinstance(n, (float, torch.SymFloat)) else int(n)
               for n, place in zip(lifted, places, strict=True)]  # fmt: skip

    def run(*given: Tensor) -> Any:
        """Run one step."""
        captured, extras = iter(given[count:]), list[Any]()
        for value, place, number in zip(kinds, places, numbers, strict=True):
            extras.append(next(captured) if value else number if place is None else given[place[0]].shape[place[1]])
        body = bodies[0] if any(t.dtype in HALF for t in given) else bodies[-1]
        return Replay(body.graph).run(*given[:count], *[extras[k] for k in body.places])

    kinds = [isinstance(value, Tensor) for value in lifted]
    texts = [body.graph.print_readable(print_output=False, include_stride=False, include_device=False) for body in bodies]
    told = repr((texts, [body.places for body in bodies], sig, kinds, places, numbers, num_outputs, strict))
    key = f"{sig.core}_{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    if key not in _cores:
        _steps[key] = run

        def core(*given: Tensor) -> Any:
            return _step(key, given)

        seen = CapturedValues(core)
        seen.signatures[sig.num_inputs, sig.num_states, sig.num_params] = sig
        _cores[key] = Core(sig, core, seen, num_outputs, strict)
    return key


def mixing_call(
    bodies: Sequence[Body], sig: Signature, fakes: Sequence[Tensor | None], lifted: Sequence[Any], num_outputs: int | None,
    strict: bool, proxies: Sequence[Any],
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arguments of a node of `flexsn::mixing` but the last.

    Args:
        proxies: of the operands (None: a default state), then of captured tensors.
    """
    key, n = keep_core(bodies, sig, fakes, lifted, num_outputs, strict), sig.num_inputs
    first = fakes[0]
    assert first is not None
    given = [p is not None for p in proxies[n : n + sig.num_states]]
    return key, [p for p in proxies if p is not None], given, autocast_dtype(first.device.type)


_steps: dict[str, Callable[..., Any]] = {}


def _step(key: str, given: tuple[Tensor, ...]) -> Any:
    return _steps[key](*given)


def _groups(core: Core, operands: Sequence[Tensor], given: Sequence[bool]) -> tuple[tuple, tuple, tuple]:
    """Return inputs, states (None: a default one) and params."""
    n, rest = core.sig.num_inputs, iter(operands[core.sig.num_inputs :])
    states = [next(rest) if there else None for there in given]
    return tuple(operands[:n]), tuple(states), tuple(rest)


def _run(key: str, operands: Sequence[Tensor], given: Sequence[bool], autocast: torch.dtype | None, sequences: bool) -> list[Tensor]:
    """Run the call as outside of `torch.compile`; return outputs, final states and, if asked for, state sequences."""
    core = _cores[key]
    inputs, states, params = _groups(core, operands, given)
    with torch.autocast(operands[0].device.type, autocast, enabled=autocast is not None):
        finals, trail, outputs = run_core(
            core.function,
            core.seen,
            inputs,
            states,
            params,
            backend="auto",
            strict=False,
            sequences=sequences,
            num_outputs=core.num_outputs,
        )
    return [*outputs, *finals, *trail]


def _untouched(run: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Return the function, run in a thread of its own where autograd and `vmap` would have no turn."""

    @functools.wraps(run)
    def wrapped(*call: Any) -> list[Tensor]:
        if not after_dispatch_modes():
            return run(*call)
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def there() -> list[Tensor]:
            with torch.cuda.stream(stream), torch.no_grad():
                return run(*call)

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(there).result()

    return wrapped


@_untouched
def _mixing(key: str, operands: list[Tensor], *options: Any) -> list[Tensor]:
    found, memory = list[Tensor](), {t.untyped_storage().data_ptr() for t in operands}
    for t in _run(key, operands, *options):  # no two lie in the same memory, and none in that of an operand
        own = t.clone(memory_format=torch.contiguous_format) if t.untyped_storage().data_ptr() in memory else t.contiguous()
        memory.add(own.untyped_storage().data_ptr())
        found.append(own)
    return found


def _fake_mixing(
    key: str, operands: list[Tensor], given: list[bool], autocast: torch.dtype | None, sequences: bool
) -> list[Tensor]:  # fmt: skip
    core, T = _cores[key], operands[0].shape[0]
    inputs, states, params = _groups(core, operands, given)
    shape = torch.broadcast_shapes(*[x.shape[1:] for x in inputs]) if None in states else ()
    step = [*[x.new_empty(x.shape[1:]) for x in inputs], *[inputs[0].new_zeros(shape) if v is None else v for v in states]]
    run = core.function if autocast is None else precise(core.function, autocast, len(step))
    returned = run(*step, *params)
    returned = (returned,) if isinstance(returned, Tensor) else tuple(returned)
    outs = len(returned) - len(states)
    rows = [y.new_empty((T, *y.shape)) for y in (returned if sequences else returned[:outs])]
    return [*rows[:outs], *[v.new_empty(v.shape) for v in returned[outs:]], *rows[outs:]]


@_untouched
def _mixing_backward(cotangents: list[Tensor | None], wanted: list[bool], key: str, operands: list[Tensor], *options: Any) -> list[Tensor]:
    leaves = [t.detach().requires_grad_(want) for t, want in zip(operands, wanted, strict=True)]
    with torch.enable_grad():
        results = _run(key, leaves, *options)
    pairs = [(y, g) for y, g in zip(results, cotangents, strict=True) if g is not None and y.requires_grad]
    asked = [t for t in leaves if t.requires_grad]
    grads = torch.autograd.grad([y for y, _ in pairs], asked, [g for _, g in pairs], allow_unused=True) if pairs else [None] * len(asked)
    return [torch.zeros_like(t) if g is None else g.contiguous() for t, g in zip(asked, grads, strict=True)]


def _fake_mixing_backward(cotangents: list[Tensor | None], wanted: list[bool], key: str, operands: list[Tensor], *_: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, want in zip(operands, wanted, strict=True) if want]


def _setup(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.key, operands, *ctx.options = inputs
    ctx.save_for_backward(*operands)
    ctx.wanted = [t.requires_grad for t in operands]


def _backward(ctx: Any, cotangents: list[Tensor | None]) -> tuple[Any, ...]:
    found = iter(torch.ops.flexsn.mixing_backward(cotangents, ctx.wanted, ctx.key, list(ctx.saved_tensors), *ctx.options))
    return None, [next(found) if want else None for want in ctx.wanted], None, None, None


LIBRARY.impl("mixing", _mixing, "CompositeExplicitAutograd")
LIBRARY.impl("mixing_backward", _mixing_backward, "CompositeExplicitAutograd")
torch.library.register_fake("flexsn::mixing", _fake_mixing, lib=LIBRARY)
torch.library.register_fake("flexsn::mixing_backward", _fake_mixing_backward, lib=LIBRARY)
torch.library.register_autograd("flexsn::mixing", _backward, setup_context=_setup, lib=LIBRARY)
