"""`flex_sn_scan`: a core over a sequence as a higher-order operator of PyTorch.

Each rule below is one way to meet it. Eager calls, and calls that autograd records, end in the engine (`run_core`): one
kernel, or in a trace one forward and one backward node (`flexsn::forward`, `flexsn::backward`) for any T. A trace without
gradients keeps the operator itself as one node with the core as its body; functionalisation, which every compiler runs,
lowers that to `flexsn::forward` too. What runs a core that no kernel can express is said: the Python loop; in a trace
PyTorch's own `scan`; and in a compiled call that or, where its gradients would be wrong, the loop between compiled parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._captured.captured_values import look
from .._operator.dispatch import run_core
from .._operator.fallback import warn_once
from .._torch.autograd import skipping_autograd
from .._torch.compiling import unseen_by_dynamo
from .._torch.tracing import HigherOrderOperator, give_rules, record_call, trace_body
from .._torch.transforms import transforms_active, transforms_or_modes_active
from ..errors import CannotFuseError
from . import dynamo
from .core_scan import core_scan, uncompiled_loop
from .loops import Specs, check_scan_arguments, eager_scan, empty_results, lowerable_scan


class FlexSNScan(HigherOrderOperator):
    """`flex_sn_scan(core_fn, num_inputs, num_states, num_outputs, *flat_args, output_template_specs=None)`.

    Args:
        core_fn: `core_fn(*step_inputs, *states, *lifted) -> (*outputs, *new_states)`, one time step.
        flat_args: input sequences `[T, *shape]`, initial states `[*shape]`, then tensors that go to every step unchanged.
        output_template_specs: `(shape, dtype)` or `(shape, dtype, device)` of one step of each output, for `T == 0`.

    Returns:
        Output sequences `[T, *shape]`, then state sequences `[T, *shape]`.

    Raises:
        ValueError: operands that do not fit the counts or each other.
    """

    def __init__(self) -> None:
        super().__init__("flex_sn_scan", cacheable=True)

    @unseen_by_dynamo  # which would see a trace in its own; it takes the operator by `_compiled`
    def __call__(
        self, core_fn: Callable[..., Any], num_inputs: int, num_states: int, num_outputs: int, *flat_args: Tensor,
        output_template_specs: Specs = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        counts = num_inputs, num_states, num_outputs
        inputs, states, lifted = check_scan_arguments(core_fn, *counts, flat_args, output_template_specs)
        if inputs[0].shape[0] == 0:
            return empty_results(core_fn, inputs, states, lifted, num_outputs, output_template_specs, "sequence")
        if transforms_active() or not _has_rules:
            return fused(core_fn, *counts, *flat_args)
        return super().__call__(core_fn, *counts, *flat_args)


flex_sn_scan = FlexSNScan()


def fused(core_fn: Callable, num_inputs: int, num_states: int, num_outputs: int, *flat_args: Tensor) -> tuple[Tensor, ...]:
    """By the engine; where no kernel can express the core, by PyTorch's scan in a trace and by a Python loop outside, and under
    `torch.func`, of which PyTorch's scan knows too little."""
    n, m = num_inputs, num_inputs + num_states
    traced = transforms_or_modes_active() and not transforms_active()
    try:
        _, sequences, outputs = run_core(
            core_fn, look(core_fn), flat_args[:n], flat_args[n:m], flat_args[m:], backend="auto", strict=True, sequences=True,
            num_outputs=num_outputs,
        )  # fmt: skip
    except CannotFuseError as error:
        warn_once("PyTorch's own scan" if traced else "the eager loop", error)
        loop = lowerable_scan if traced else eager_scan
        return loop(core_fn, num_inputs, num_states, num_outputs, *flat_args, states="sequence")
    return tuple([t.contiguous() for t in (*outputs, *sequences)])


def _autograd(core_fn: Callable, num_inputs: int, num_states: int, num_outputs: int, *flat_args: Tensor) -> Any:
    tensors = (*flat_args, *look(core_fn).tensors().values())
    if not transforms_or_modes_active() or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return fused(core_fn, num_inputs, num_states, num_outputs, *flat_args)
    with skipping_autograd():
        return HigherOrderOperator.__call__(flex_sn_scan, core_fn, num_inputs, num_states, num_outputs, *flat_args)


def _fake(mode: Any, core_fn: Callable, num_inputs: int, num_states: int, num_outputs: int, *flat_args: Tensor) -> Any:
    with mode:
        return fused(core_fn, num_inputs, num_states, num_outputs, *flat_args)


def _functionalize(ctx: Any, core_fn: Callable, num_inputs: int, num_states: int, num_outputs: int, *flat_args: Tensor) -> Any:
    with ctx.redispatch_to_next():
        return ctx.wrap_tensors(fused(core_fn, num_inputs, num_states, num_outputs, *ctx.unwrap_tensors(flat_args)))


def _proxy(mode: Any, core_fn: Callable, num_inputs: int, num_states: int, num_outputs: int, *flat_args: Tensor) -> Any:
    counts = num_inputs, num_states, num_outputs
    step = [t.select(0, 0) if i < num_inputs else t for i, t in enumerate(flat_args)]
    lifting, captured = _lifting(core_fn)
    body, read = trace_body(lifting, step, captured)
    args = (*counts, *flat_args, *read)
    return record_call(mode, flex_sn_scan, body, args, lambda: fused(core_fn, *counts, *flat_args))


def _lifting(core_fn: Callable) -> tuple[Callable, list[Tensor]]:
    """The core as a function of its operands and, after them, of the tensors that it captures; these."""
    seen = look(core_fn)
    captured = list({id(t): t for t in seen.tensors().values()}.values())

    def lifting(*args: Tensor) -> Any:
        n = len(args) - len(captured)
        given = dict(zip(map(id, captured), args[n:], strict=True))
        return seen.stand_ins(core_fn, lambda t: given.get(id(t), t))[0](*args[:n])

    return lifting, captured


def _compiled(
    core_fn: Callable, num_inputs: int, num_states: int, num_outputs: int, *flat_args: Tensor, output_template_specs: Specs = None
) -> tuple[Tensor, ...]:
    """A call as Dynamo traces it."""
    counts = num_inputs, num_states, num_outputs
    inputs, states, lifted = check_scan_arguments(core_fn, *counts, flat_args, output_template_specs)
    if inputs[0].shape[0] == 0:
        return empty_results(core_fn, inputs, states, lifted, num_outputs, output_template_specs, "sequence")
    call = core_fn, None, tuple(inputs), tuple(states), tuple(lifted), True, num_outputs
    results = core_scan(*call, "auto", False, True)
    if isinstance(results, str):
        _, trail, outputs = uncompiled_loop(*call)
        return (*outputs, *trail)
    return tuple([y.contiguous() for y in (*results[:num_outputs], *results[num_outputs + num_states :])])


_has_rules = give_rules(flex_sn_scan, autograd=_autograd, eager=fused, fake=_fake, functional=_functionalize, proxy=_proxy)


# --- registration with Dynamo -----------------------------------------------------------------------------------------------
dynamo.INLINED["flex_sn_scan"] = _compiled


def _register() -> bool:
    try:
        return dynamo.ready()
    except Exception as error:  # whatever a PyTorch with other private names raises; the eager operator works without
        warnings.warn(f"torch.compile cannot take flex_sn_scan: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
        return False


_available = _register()


def dynamo_hop_available() -> bool:
    """Whether `torch.compile` takes `flex_sn_scan` whole. If not, a warning at import said why."""
    return _available
