"""How Dynamo, the front end of `torch.compile` and strict export, takes a neuron: as one operator that carries its program.

Dynamo traces the core once, as the body of a higher-order operator: so it guards on every Python value that the core
reads and lifts every tensor that it captures. The body is then captured as an eager core is, and what enters the
compiled graph is `flexsn::scan`. The private names of Dynamo that this stands on are in `_torch/dynamo.py`, which is
imported when `register` is called, as the first compiled call does; `dynamo` below is that module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .._capture.inner import MIXES
from .._capture.signature import Signature, core_name, loop_shape, positional_names, step_shape
from .._ir.graph import HALF
from .._operator.dtensor import any_dtensor
from .._operator.fallback import say_once, warn_once
from .._operator.library import text_of
from .._program.inner import inner_dims
from .._program.pairs import ComplexStepError
from .._program.symbolic_sizes import exactly
from .._runtime.backends import check_backend, choose_backend
from .._torch.availability import COMPILE, TRACES, moved
from .._torch.tensors import is_symbolic, size_hint
from .._torch.transforms import transforms_active
from ..errors import (
    BackendError,
    BackendUnavailableError,
    CannotFuseError,
    CarriedStateError,
    FlexSNError,
    NotElementwiseError,
    ShapeMismatchError,
)
from .body import Body, blueprint_of_body, captured_place
from .mixing import UNKNOWN_STATES, first, mixes, mixing_call

INLINED: dict[str, Callable[..., Any]] = {}  # by the name of a higher-order operator, a call of it in Python, for Dynamo to trace


def register() -> bool:
    """Tell Dynamo about flexsn's higher-order operators; once is enough. Raises what a PyTorch that differs raises."""
    from .._torch import dynamo

    table: dict[str, Any] = dynamo.variable_classes
    made = {"flexsn_core_scan": _core_scan_variable, "flex_sn_scan": _flex_sn_scan_variable}
    for name, make in made.items():
        if name not in table:
            table[name] = make(dynamo)
    return True


def _while_tracing(function: Callable) -> Callable:
    """Dynamo runs it while it traces: as `assume_constant_result`, which would import Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes
    return function


@_while_tracing
def ready() -> bool:
    """`register`, while Dynamo traces. False where this PyTorch lacks a name for it."""
    return not (moved(COMPILE) or moved(TRACES)) and register()


@_while_tracing
def exporting() -> bool:
    """Whether `torch.export` traces this call. (What Dynamo of 2.11 makes of `is_exporting` is True in every compiled call.)"""
    return torch.compiler.is_exporting()


@_while_tracing
def refuse_carried(core: str) -> None:
    raise CarriedStateError(
        "carries states from an earlier call, which the exported program would hold as constants", core=core,
        hint="Call `reset()` on the module (`flexsn.reset_net(model)` on all of a network) before the export: the program then starts "
        "where a first call does. For a program that takes its states as inputs, export a module that calls "
        "`flexsn.scan(core, inputs, states)`.",
    )  # fmt: skip


def _flex_sn_scan_variable(dynamo: Any) -> type:
    class FlexSNScanVariable(dynamo.TorchHigherOrderOperatorVariable):
        _HOP_NAME = "flex_sn_scan"

        def _call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            return _inlined(dynamo, tx, self._HOP_NAME, args, kwargs)

    return FlexSNScanVariable


def _inlined(dynamo: Any, tx: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What Dynamo makes of a higher-order operator's call in Python."""
    with _following_a_core(dynamo), _keeping_assignments(tx):
        return dynamo.inlined(tx, INLINED[name])(*args, **kwargs)


def _loop(dynamo: Any, tx: Any, args: Sequence[Any]) -> Any:
    """Trace the call of a core that no kernel expresses by PyTorch's own scan. It reads what the cells of the core hold."""
    owner = args[1]
    if not owner.is_python_constant() and any(given != _given(own.node) for given, own in _owned_proxies(dynamo, tx, owner).items()):
        raise dynamo.Unsupported(
            "a core that no kernel expresses, of a neuron that holds other tensors than its core's cells: it runs uncompiled"
        )
    return _inlined(dynamo, tx, "flexsn_core_scan", args, {})


def _constant(variable: Any) -> Any:
    """The value of a variable of Dynamo, which may hold a number (`num_outputs`) as a symbol: the graph is then for this one."""
    return variable.evaluate_expr() if hasattr(variable, "evaluate_expr") else variable.as_python_constant()  # 2.11, 2.14


def _core_scan_variable(dynamo: Any) -> type:
    class CoreScanVariable(dynamo.TorchHigherOrderOperatorVariable):
        """`core_scan(core, owner, inputs, states, params, sequences, num_outputs, backend, strict, exact)`."""

        _HOP_NAME = "flexsn.scan"

        def _call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            if transforms_active():
                raise dynamo.Unsupported("a core under a `torch.func` transform: the transform runs uncompiled")
            with dynamo.constants(specialize_float=True):  # numbers in a `partial` are constants of the kernel
                args, _ = dynamo.LazyVariableTracker.realize_all((list(args), kwargs))
            core, owner, inputs, states, params, *flags = args
            sequences, num_outputs, backend, strict, exact = map(_constant, flags)
            sig = _signature(dynamo, core, (len(inputs.items), len(states.items), len(params.items)), exact)
            try:
                check_backend(backend, sig.core)
            except BackendError as error:
                raise _passed_on(dynamo, error) from None
            if backend == "torch":
                return self._without_kernel(tx, args)
            counts = sig.num_inputs, sig.num_states, sig.num_params
            proxies: list[Any] = [None if v.is_python_constant() else v.as_proxy() for v in (*inputs.items, *states.items, *params.items)]
            fakes: list[Any] = [None if p is None else p.node.meta["example_value"] for p in proxies]
            if any_dtensor(fakes):
                raise dynamo.Unsupported("a neuron on DTensors: the call runs uncompiled, between compiled parts")
            kinds = (False, True) if any(t is not None and t.dtype in HALF for t in fakes) else (False,)
            if misfit := _inner_alone(sig, fakes):
                return _of_inner(dynamo, tx, args, misfit)
            found = [_speculate(dynamo, tx, core, fakes, sig, self.value, computed=computed) for computed in kinds]
            captured = {proxy.node: proxy for _, own in found for proxy in own}  # what is known of sizes differs from one to the next
            places = {node: place for place, node in enumerate(captured)}
            bodies = [Body(graph, [places[proxy.node] for proxy in own]) for graph, own in found]
            lifted = list(captured.values())
            if not owner.is_python_constant():
                lifted = _owned_by(dynamo, tx, owner, lifted)
            values = [proxy.node.meta["example_value"] for proxy in lifted]
            grad = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (*fakes, *values))
            try:
                choose_backend(backend, fakes[0].device, sig.core, traced=True)
                blueprint = blueprint_of_body(bodies, sig, fakes, values, num_outputs, grad)
            except FlexSNError as error:
                falls_back, parts = backend == "auto" and not strict, (bodies, sig, fakes, values, num_outputs)
                on_parts, given = _may_run_on_parts(tx, error, falls_back, sig, fakes), [*proxies, *lifted]
                if backend == "auto" and mixes(error) and (node := _mixed(dynamo, tx, parts, given, sequences, grad, on_parts)):
                    return node
                if on_parts:
                    return dynamo.VariableTracker.build(tx, PARTS)
                if isinstance(error, (CannotFuseError, BackendUnavailableError)) and falls_back:
                    warn_once(_without_kernel(tx), error)
                    computed = any(p.node.op != "placeholder" for p in proxies[: counts[0]])
                    if torch.compiler.is_exporting() and torch.is_grad_enabled() and computed:
                        for fake in fakes:  # the scan's rule for autograd takes no sizes of what the graph computes
                            exactly(() if fake is None else fake.shape[1:])
                    return self._without_kernel(tx, args)
                raise _passed_on(dynamo, error) from None
            n, m = counts[0], counts[0] + counts[1]
            tensors = [p for p, t in zip(lifted, values, strict=True) if isinstance(t, Tensor)]
            read = [tensors[captured_place(name)] for name in blueprint.captured(vjp=grad)]
            call = (text_of(blueprint, vjp=grad), proxies[:n], proxies[n:m], [*proxies[m:], *read], sequences)
            return dynamo.wrap_fx_proxy(tx, tx.output.create_proxy("call_function", torch.ops.flexsn.scan.default, call, {}))

        def _without_kernel(self, tx: Any, args: Any) -> Any:
            return _loop(dynamo, tx, args[:7]) if _without_kernel(tx) == SCAN else dynamo.VariableTracker.build(tx, EAGER)

    return CoreScanVariable


EAGER, SCAN, PARTS = "the eager loop", "PyTorch's own scan", "a call of a core on parts, uncompiled"


def _step_shapes(sig: Signature, fakes: Sequence[Tensor | None]) -> list[tuple[int, ...]]:
    """Return one-step shapes of inputs and states, symbolic sizes as they are in this trace; `()` of default states."""
    operands = enumerate(fakes[: sig.num_inputs + sig.num_states])
    shapes = [() if t is None else tuple(t.shape[int(k < sig.num_inputs) :]) for k, t in operands]
    return [tuple([size_hint(n) if is_symbolic(n) else n for n in s]) for s in shapes]


def _inner_alone(sig: Signature, fakes: Sequence[Tensor | None]) -> ShapeMismatchError | None:
    """Return why no compiled kernel takes one-step shapes that broadcast but for an inner dim that some of them have; None of others."""
    try:
        return loop_shape(sig, _step_shapes(sig, fakes))[1]
    except ShapeMismatchError:  # which is said where the core is traced
        return None


def _mixed(dynamo: Any, tx: Any, parts: tuple, proxies: Sequence[Any], sequences: bool, grad: bool, on_parts: bool) -> Any:
    """Return the results of a core that mixes neurons, as one node of the graph; None where there is none, as in exports.

    Args:
        on_parts: whether the call runs between compiled parts where no node holds it. The other arguments are as of `mixing_call`.
    """
    if torch.compiler.is_exporting():
        return None
    made = mixing_call(parts, proxies, sequences, grad)
    if isinstance(made, Exception):
        if on_parts:
            raise dynamo.Unsupported(f"a core that mixes neurons, and that no graph holds, runs uncompiled: {made}") from made
        return None
    core, call = made
    tx.output.install_global_by_id("__flexsn_core", core)  # it lives as long as the code
    results = dynamo.wrap_fx_proxy(tx, tx.output.create_proxy("call_function", torch.ops.flexsn.mixing.default, call, {}))
    return dynamo.inlined(tx, first)(results, dynamo.VariableTracker.build(tx, core.num_results[sequences]))


def _may_run_on_parts(tx: Any, error: FlexSNError, falls_back: bool, sig: Signature, fakes: Sequence[Tensor | None]) -> bool:
    """Whether a call that no kernel takes as it is may run, between compiled parts, by one for parts of its operands."""
    inner = isinstance(error, NotElementwiseError) and falls_back and (MIXES in error.reason or any(inner_dims(_step_shapes(sig, fakes))))
    return isinstance(error, ComplexStepError) or (inner and _without_kernel(tx) == EAGER)


def _of_inner(dynamo: Any, tx: Any, args: Sequence[Any], misfit: ShapeMismatchError) -> Any:
    """Return what runs a call whose shapes broadcast but for an inner dim: a kernel between compiled parts, or PyTorch's own scan."""
    *_, backend, strict, _ = map(_constant, args[5:])
    if backend != "auto" or strict or _without_kernel(tx) == EAGER:
        return dynamo.VariableTracker.build(tx, PARTS)
    why = "has operands that do not broadcast, whose kernel runs between compiled parts: without gradients that would not pay"
    warn_once(SCAN, NotElementwiseError(why, core=misfit.core))
    return _loop(dynamo, tx, args[:7])


def _without_kernel(tx: Any) -> str:
    """What runs a core that no kernel expresses: `SCAN`, but for Inductor and unknown compilers, where a gradient may be asked for.

    Inductor (seen in 2.13) takes the memory that a loop's carried values start in for other results while what the loop
    returns still lies there. In a forward `lowerable_scan` returns nothing of these; in a backward they are gradients of
    captured tensors and first states, and come out wrong.
    """
    known = _keeps_gradients(tx) and tx.output.current_tracer.parent is None  # checkpoints have no rule for it
    right = not torch.is_grad_enabled() or known or torch.compiler.is_exporting()
    return SCAN if right else EAGER


def _keeps_gradients(tx: Any) -> bool:
    """Whether the compiler of a graph is known to differentiate PyTorch's `scan` right."""
    return getattr(tx.output.compiler_fn, "__name__", "").startswith(("eager", "aot_eager"))


@_while_tracing
def doubt_gradients(operator: str) -> None:
    """Say that gradients of a loop, which Dynamo traces, may come out wrong, if they may."""
    from .._torch.dynamo import InstructionTranslator

    if not torch.compiler.is_exporting() and not _keeps_gradients(InstructionTranslator.current_tx()):
        say_once(
            f"gradients may come out wrong: Inductor (seen in PyTorch 2.13) overwrites memory that PyTorch's `{operator}` still needs. "
            "Train with `flexsn.scan` or `flex_sn_scan`, or compile with `backend='aot_eager'`",
            RuntimeWarning,
        )


@_while_tracing
def let_graphs_read_scalars() -> None:
    """A loop in Inductor's code counts its steps in a tensor and reads it. Without this only calls with `fullgraph=True` may."""
    from .._torch.dynamo import InstructionTranslator

    shapes = InstructionTranslator.current_tx().output.shape_env
    shapes.settings = dataclasses.replace(shapes.settings, allow_scalar_outputs=True)


def _passed_on(dynamo: Any, error: FlexSNError) -> Exception:
    """The same error, of a class that Dynamo passes on as it is; any other would count as a bug in Dynamo."""
    kind, known = type(error), dynamo.UncapturedHigherOrderOpError
    both: Any = type(kind.__name__, (kind, known), {"__module__": kind.__module__})
    passed = both.__new__(both)
    known.__init__(passed, str(error))
    passed.__dict__.update(vars(error))
    return passed


@contextlib.contextmanager
def _following_a_core(dynamo: Any) -> Iterator[None]:
    """Numbers are constants, of kernels and for PyTorch's `scan`; no warning of Dynamo's own way with autograd functions, which
    surrogates are (2.11, 2.14)."""
    with dynamo.constants(specialize_float=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
        yield


@contextlib.contextmanager
def _keeping_assignments(tx: Any) -> Iterator[None]:
    """Objects that were assigned to before hold the record of assignments that the trace of a body replaces (2.13): what is assigned to
    them after it would be lost."""
    record = tx.output.side_effects
    yield
    record.__dict__.update(tx.output.side_effects.__dict__)
    tx.output.side_effects = record


def _speculate(
    dynamo: Any, tx: Any, core: Any, fakes: list, sig: Signature, source: Any, computed: bool = False
) -> tuple[Any, list]:  # fmt: skip
    """The core as a graph, for the dtypes of its operands or `computed` ones; and what it captures (proxies outside it)."""
    steps = [None if t is None else t.shape[1:] if i < sig.num_inputs else t.shape for i, t in enumerate(fakes)]
    misfit: Exception | None = None
    try:
        shape = step_shape(sig, [s for s in steps[: sig.num_inputs + sig.num_states] if s is not None])
    except FlexSNError as error:  # a core that mixes neurons may take them
        misfit, shape = _passed_on(dynamo, error), tuple(fakes[0].shape[1:])
    with dynamo.discard_graph_changes(tx):
        examples = []
        for size, like in zip(steps, fakes, strict=True):
            with tx.fake_mode:
                like = fakes[0] if like is None else like
                dtype = torch.float32 if computed and like.dtype in HALF else like.dtype
                fake = torch.empty(shape if size is None else size, dtype=dtype, device=like.device)
                fake.requires_grad_(torch.is_grad_enabled() and like.is_floating_point())
            proxy = tx.output.create_proxy("call_function", torch.empty, (0,), {})
            examples.append(dynamo.wrap_fx_proxy(tx, proxy, example_value=fake))
    with _following_a_core(dynamo), _keeping_assignments(tx):
        core = dynamo.inlined(tx, _with_plain_tuples)(core)
        try:
            _, graph, lifted = dynamo.speculate_subgraph(
                tx, core, examples, {}, "flexsn.scan", source_target=source, set_subgraph_inputs="flatten_manual",
                supports_input_mutation=False, supports_aliasing=True,
            )  # fmt: skip
        except RuntimeError as error:
            raised = type(error).__name__ in ("TorchRuntimeError", "FakeTensorObservedException")  # by the core: 2.11, 2.14
            if raised and misfit is not None:  # it does not take such shapes
                raise misfit from None
            if raised and None in fakes:
                raise dynamo.Unsupported(UNKNOWN_STATES.format(core=sig.core)) from error
            raise
    return fx.GraphModule(dict(tx.output.nn_modules), graph), list(lifted)


def _with_plain_tuples(core: Callable) -> Callable:
    """The core, to return a plain tuple where it returns a named one, which the body of a higher-order operator may not."""
    return functools.partial(_plainly, core)


def _plainly(core: Callable, *operands: Any) -> Any:
    results = core(*operands)
    return tuple(results) if isinstance(results, tuple) else results


def _owned_by(dynamo: Any, tx: Any, owner: Any, lifted: list) -> list:
    """In place of tensors that the core captured, those that the `FlexSN` owns under their names."""
    owned = _owned_proxies(dynamo, tx, owner, {_given(proxy.node) for proxy in lifted})
    for proxy in lifted:
        given = _given(proxy.node)
        if given in owned and _given(owned[given].node) != given:  # a copy: the original may be bound anew, and owns another one then
            dynamo.install_guard(proxy.node.meta["grapharg"].source.make_guard(dynamo.GuardBuilder.ID_MATCH))
    return [owned.get(_given(proxy.node), proxy) for proxy in lifted]


def _owned_proxies(dynamo: Any, tx: Any, owner: Any, wanted: Collection[int | None] | None = None) -> dict[int | None, fx.Proxy]:
    """By the `id` of each tensor (each `wanted` one) that the core captured: what the `FlexSN` owns in its place."""
    follow, found = dynamo.inlined(tx, _follow), dict[int | None, fx.Proxy]()
    for given, place in owner.value.captured_places().items():
        if wanted is None or given in wanted:
            found[given] = follow(owner, *[dynamo.VariableTracker.build(tx, name) for name in place]).as_proxy()
            if _given(found[given].node) == given and owner.source is not None:
                # The very tensor that the core captured: one input of the graph for both, which Dynamo reads from either place,
                # and does not compare the two where one is a global.
                mine, seen = functools.reduce(dynamo.AttrSource, place, owner.source), found[given].node.meta["grapharg"].source
                if mine != seen:
                    dynamo.install_guard(mine.make_guard(functools.partial(dynamo.GuardBuilder.DUPLICATE_INPUT, source_b=seen)))
    return found


def _given(node: fx.Node) -> int | None:
    """The `id` of the tensor that a graph is given in this place."""
    given = node.meta.get("grapharg")
    return id(given.example) if given is not None and isinstance(given.example, Tensor) else None


def _follow(thing: Any, *names: str) -> Any:
    for name in names:
        thing = getattr(thing, name)
    return thing


def _signature(dynamo: Any, core: Any, counts: tuple[int, int, int], exact: bool) -> Signature:
    """With the names of the function behind Dynamo's variable, where there is one."""
    bound = 0
    while isinstance(inner := getattr(core, "func", None), dynamo.VariableTracker):  # a partial
        core, bound = inner, bound + len(getattr(core, "args", ()))
    fn = next((f for a in ("fn", "value") if callable(f := getattr(core, a, None))), None)
    names = [n for n in positional_names(fn)[0] if n != "self"][bound:] if fn else []
    names = [*names, *(f"operand{k}" for k in range(len(names), sum(counts)))][: sum(counts)]
    return Signature(core_name(fn) if fn else "core", *counts, tuple(names), exact)
