"""Runs a core over time without a kernel: by a Python loop, by PyTorch's `scan` operator, by PyTorch's `while_loop` operator.

All take `(core_fn, num_inputs, num_states, num_outputs, *flat_args, output_template_specs=None)`. `flat_args` are the input
sequences `[T, *shape]`, then the initial states `[*shape]`, then lifted tensors, which go to every step as they are. The
core is called `core_fn(*step_inputs, *states, *lifted)` and returns `(*outputs, *new_states)` as a tensor, tuple or list; it
need not be elementwise. Results come as one tuple of contiguous tensors `[T, *shape]` (final states: `[*shape]`) that share
memory neither with arguments nor with each other. `output_template_specs`, a `(shape, dtype)` or `(shape, dtype, device)` of
one step per output, is needed for `T == 0`, when the core does not run; under `torch.compile` it may be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from .._capture.signature import core_name, make_signature
from .._operator.eager_loop import over_time
from .._torch.tracing import proxy_mode, torch_scan, torch_while_loop
from .._torch.transforms import active_transforms, transforms_active
from ..errors import (
    DoubleBackwardError,
    FlexSNError,
    OperandCountError,
    OperandTypeError,
    ReturnCountError,
    ReturnTypeError,
    SequenceLengthError,
    StateMismatchError,
)
from . import dynamo

__all__ = [
    "check_scan_arguments", "eager_scan", "eager_scan_final_state", "empty_results", "lowerable_scan", "lowerable_scan_available",
    "lowerable_scan_final_state", "lowerable_while_loop_available", "lowerable_while_loop_scan",
    "lowerable_while_loop_scan_final_state",
]  # fmt: skip

Core = Callable[..., Any]
Specs = Sequence[tuple[Any, ...]] | None
States = Literal["sequence", "final"]


# --- a Python loop --------------------------------------------------------------------------------------------------------
def eager_scan(
    core_fn: Core, num_inputs: int, num_states: int, num_outputs: int, *flat_args: Tensor,
    output_template_specs: Specs = None, states: States = "sequence",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run a core over T steps by a Python loop in plain PyTorch; gradients of any order.

    Returns:
        Output sequences `[T, *shape]`, then state sequences `[T, *shape]`; with `states="final"` final states `[*shape]` in their place.

    Raises:
        ValueError: fewer tensors than inputs + states; no input; inputs that differ in T; a core that cannot take the
            arguments, returns another number of values than outputs + states, or changes the shape or dtype of a state;
            `T == 0` without one spec per output.
        TypeError: an argument or a return value that is not a tensor.
    """
    inputs, current, lifted = check_scan_arguments(core_fn, num_inputs, num_states, num_outputs, flat_args, output_template_specs)
    if inputs[0].shape[0] == 0:
        return empty_results(core_fn, inputs, current, lifted, num_outputs, output_template_specs, states)

    def step(now: Sequence[Tensor], before: Sequence[Tensor]) -> tuple[list[Tensor], Sequence[Tensor]]:
        returned = _step(core_fn, now, before, lifted, num_outputs)
        _as_returned(core_fn, before, returned[num_outputs:])
        return list(returned[num_outputs:]), returned if states == "sequence" else returned[:num_outputs]

    finals, kept = over_time(step, zip(*[x.unbind(0) for x in inputs], strict=True), current)  # `x[t]` would make a gradient of all T
    kept = [y.contiguous() for y in kept]
    return (*kept, *[_fresh(v) for v in finals]) if states == "final" else tuple(kept)


def eager_scan_final_state(*args: Any, output_template_specs: Specs = None) -> tuple[Tensor, ...]:
    """Run `eager_scan` with `states="final"`: final states `[*shape]` in place of state sequences."""
    return eager_scan(*args, output_template_specs=output_template_specs, states="final")


# --- PyTorch's scan operator ----------------------------------------------------------------------------------------------
def lowerable_scan(
    core_fn: Core, num_inputs: int, num_states: int, num_outputs: int, *flat_args: Tensor,
    output_template_specs: Specs = None, states: States = "sequence",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run a core over T steps by PyTorch's `scan` operator: one loop in the graph of `torch.compile`, whatever T is.

    Inference and training, inside and outside of `torch.compile`. In training every result must be floating-point. Gradients may come
    out wrong where Inductor, the default compiler, takes them (seen in PyTorch 2.13, with two such loops in a row); a
    `RuntimeWarning` says so.

    Returns:
        Output sequences `[T, *shape]`, then state sequences `[T, *shape]`; with `states="final"` final states `[*shape]` in their place.

    Raises:
        ValueError, TypeError: as `eager_scan`. Inside `torch.compile(fullgraph=True)` PyTorch wraps these in its own error.
        RuntimeError: this PyTorch has no `scan`; training with a result that is not floating-point; a second derivative; a
            transform of `torch.func` other than `vmap`.
    """
    scan = torch_scan()
    if scan is None:
        raise RuntimeError(f"PyTorch {torch.__version__} has no `scan` operator; use `eager_scan`")
    if torch.compiler.is_dynamo_compiling():
        dynamo.let_graphs_read_scalars()
    inputs, first, lifted = check_scan_arguments(core_fn, num_inputs, num_states, num_outputs, flat_args, output_template_specs)
    if inputs[0].shape[0] == 0:
        return empty_results(core_fn, inputs, first, lifted, num_outputs, output_template_specs, states)
    template = _step(core_fn, [x[0] for x in inputs], first, lifted, num_outputs)  # for shapes and errors: dead code once compiled
    init = [_fresh(v) for v in _as_returned(core_fn, first, template[num_outputs:])]
    if not torch.compiler.is_dynamo_compiling() and transforms_active():
        _refuse_transforms("scan", "vmap")
        # `scan` wants states that start in as many runs as the core leaves them in: these values, batched as those are
        init = [torch.where(torch.zeros_like(y, dtype=torch.bool), y, v) for v, y in zip(init, template[num_outputs:], strict=True)]
    differentiable = [y for y in template if y.requires_grad]
    if differentiable:
        _check_floating(template)
        if torch.compiler.is_dynamo_compiling():
            dynamo.doubt_gradients("scan")
        init = [_requiring_grad(v, differentiable[0]) for v in init]  # 2.11 drops gradients through a carry that starts without

    def body(carry: Any, xs: Any) -> Any:
        returned = [_fresh(y) for y in _step(core_fn, xs, carry[:num_states], lifted, num_outputs)]
        if differentiable:
            like = [y for y in returned if y.requires_grad][0]  # noqa: RUF015  Dynamo does not trace `next` over a generator here
            returned = [_requiring_grad(y, like) for y in returned]
        kept = [*returned[:num_outputs], *([_fresh(v) for v in returned[num_outputs:]] if states == "sequence" else [])]
        return returned[num_outputs:] or [_fresh(carry[0])], kept or [carry[0].new_zeros(())]

    # The operator wants at least one carry and one sequence.
    final, sequences = scan(body, init or [inputs[0].new_zeros(())], inputs)
    if differentiable and torch.compiler.is_compiling():
        # In 2.13 Inductor's backward loop takes the memory of the final states' gradients, the caller's, for its own. Here it
        # gets the memory of a copy that no simplification removes.
        final = [v.neg().neg() for v in final]
    results = (*sequences[:num_outputs], *final[:num_states]) if states == "final" else sequences[: num_outputs + num_states]
    if differentiable and not torch.compiler.is_compiling():  # compiled code refuses a second derivative by itself
        for y in results:
            y.register_hook(_first_order_only)
    return tuple(results)


def lowerable_scan_final_state(*args: Any, output_template_specs: Specs = None) -> tuple[Tensor, ...]:
    """Run `lowerable_scan` with `states="final"`: final states `[*shape]` in place of state sequences."""
    return lowerable_scan(*args, output_template_specs=output_template_specs, states="final")


def lowerable_scan_available() -> bool:
    """Return whether this PyTorch has the `scan` operator."""
    return torch_scan() is not None


def _refuse_transforms(operator: str, *taken: str) -> None:
    others = [name for name in active_transforms() if name not in taken]
    if others:
        raise RuntimeError(f"PyTorch's `{operator}` does not run under `torch.func.{others[0]}`: use `eager_scan`")


def _refuse_trace() -> None:
    """Raise in a trace other than Dynamo's: PyTorch's `while_loop` lifts no tensors that a body closes over there, and the trace would hold
    fakes of them."""
    if proxy_mode() is not None:
        raise RuntimeError(
            "PyTorch's `while_loop` cannot be traced by `make_fx` or by an export with `strict=False`: use `lowerable_scan`, or export "
            "with `strict=True`"
        )


def _first_order_only(grad: Tensor) -> None:
    if torch.is_grad_enabled():
        raise DoubleBackwardError("PyTorch's `scan` gives wrong second derivatives", hint="Use `eager_scan`.")


def _check_floating(results: Sequence[Tensor]) -> None:
    for i, y in enumerate(results):
        if not (y.is_floating_point() or y.is_complex()):
            raise RuntimeError(
                f"PyTorch's `scan` cannot differentiate a core that returns {y.dtype} (return value {i}): "
                "return it as floating-point, call under `torch.no_grad()`, or use `eager_scan`"
            )


def _requiring_grad(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor itself, or its value as a result that requires grad: `scan` differentiates all of its results or none."""
    return tensor if tensor.requires_grad else tensor - like.flatten()[:0].sum().to(tensor.dtype)  # minus nothing


# --- PyTorch's while_loop operator ----------------------------------------------------------------------------------------
def lowerable_while_loop_scan(
    core_fn: Core, num_inputs: int, num_states: int, num_outputs: int, *flat_args: Tensor,
    output_template_specs: Specs = None, states: States = "sequence",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run a core over T steps by PyTorch's `while_loop` operator; inference only.

    Returns:
        Output sequences `[T, *shape]`, then state sequences `[T, *shape]`; with `states="final"` final states `[*shape]` in their place.

    Raises:
        ValueError, TypeError: as `eager_scan`. Inside `torch.compile(fullgraph=True)` PyTorch wraps these in its own error.
        RuntimeError: this PyTorch has no `while_loop` that stacks results; a result would require grad; a transform of
            `torch.func`; a trace by `make_fx` or by a non-strict export.
    """
    while_loop = torch_while_loop()
    if while_loop is None:
        raise RuntimeError(f"PyTorch {torch.__version__} has no `while_loop` operator that stacks results; use `eager_scan`")
    if not torch.compiler.is_dynamo_compiling():
        _refuse_transforms("while_loop")
        _refuse_trace()
    inputs, first, lifted = check_scan_arguments(core_fn, num_inputs, num_states, num_outputs, flat_args, output_template_specs)
    T = inputs[0].shape[0]
    if T == 0:
        return empty_results(core_fn, inputs, first, lifted, num_outputs, output_template_specs, states)
    template = _step(core_fn, [x[0] for x in inputs], first, lifted, num_outputs)  # for shapes and errors: dead code once compiled
    if any(y.requires_grad for y in template):
        raise RuntimeError("PyTorch's `while_loop` gives no gradients here: call under `torch.no_grad()`, or use `lowerable_scan`")
    if not template:
        return ()
    outputs = [torch.zeros_like(y, memory_format=torch.contiguous_format) for y in template[:num_outputs]]
    init = [_fresh(v) for v in _as_returned(core_fn, first, template[num_outputs:])]

    def unfinished(t: Tensor, *carried: Tensor) -> Tensor:
        return t < T

    def body(t: Tensor, *carried: Tensor) -> Any:
        now: Any = t.item()
        torch._check(now >= 0)
        torch._check(now < T)
        step_inputs = [x.select(0, now) for x in inputs]
        return t + 1, *[_fresh(y) for y in _step(core_fn, step_inputs, carried[num_outputs:], lifted, num_outputs)]

    # The count stays on the CPU, so that the loop on another device need not be waited for.
    _, *sequences = while_loop(unfinished, body, (torch.zeros((), dtype=torch.int64, device="cpu"), *outputs, *init), ())
    for y in sequences:
        torch._check(y.shape[0] == T)
    if states == "final":
        return *sequences[:num_outputs], *[_fresh(v[-1]) for v in sequences[num_outputs:]]
    return tuple(sequences)


def lowerable_while_loop_scan_final_state(*args: Any, output_template_specs: Specs = None) -> tuple[Tensor, ...]:
    """Run `lowerable_while_loop_scan` with `states="final"`: final states `[*shape]` in place of state sequences."""
    return lowerable_while_loop_scan(*args, output_template_specs=output_template_specs, states="final")


def lowerable_while_loop_available() -> bool:
    """Return whether this PyTorch has the `while_loop` operator that stacks results."""
    return torch_while_loop() is not None


# --- what the three have in common ----------------------------------------------------------------------------------------
def check_scan_arguments(
    core_fn: Core, num_inputs: int, num_states: int, num_outputs: int, flat_args: Sequence[Tensor], output_template_specs: Specs
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Check the arguments of a scan and split them into input sequences, initial states and lifted tensors.

    Raises:
        ValueError: no input; fewer tensors than inputs + states; inputs that differ in T; a core that cannot take so many
            arguments (not looked at under Dynamo); `T == 0` without one spec per output (under Dynamo they may be missing).
        TypeError: an argument that is not a tensor.
    """
    tracing = torch.compiler.is_compiling()
    if num_inputs < 1 or num_states < 0 or num_outputs < 0:
        _refuse(OperandCountError, f"{num_inputs} inputs, {num_states} states, {num_outputs} outputs: at least one input is needed")
    if len(flat_args) < num_inputs + num_states:
        _refuse(OperandCountError, f"{len(flat_args)} tensors for {num_inputs} inputs and {num_states} states")
    for i, arg in enumerate(flat_args):
        if not isinstance(arg, Tensor):
            _refuse(OperandTypeError, f"argument {i} must be a tensor, not {type(arg).__name__}")
    inputs, rest = list(flat_args[:num_inputs]), list(flat_args[num_inputs:])
    if any(x.dim() == 0 for x in inputs):
        _refuse(SequenceLengthError, "an input is 0-dimensional; inputs are sequences of shape [T, *shape]")
    lengths = [x.shape[0] for x in inputs]
    if any(length != lengths[0] for length in lengths):
        _refuse(SequenceLengthError, f"input sequences differ in T (dimension 0): {lengths}")
    if not tracing:
        make_signature(core_fn, num_inputs, num_states, len(rest) - num_states)
    if lengths[0] == 0 and num_outputs > 0 and not (tracing and output_template_specs is None):
        _check_specs(output_template_specs, num_outputs)
    return inputs, rest[:num_states], rest[num_states:]


def _check_specs(specs: Specs, num_outputs: int) -> None:
    given = [] if specs is None else list(specs)
    if len(given) != num_outputs or any(len(spec) not in (2, 3) for spec in given):
        _refuse(
            OperandCountError,
            f"T = 0 needs one (shape, dtype) or (shape, dtype, device) per output in `output_template_specs`: {num_outputs}, not {specs}",
        )


def empty_results(
    core_fn: Core, inputs: Sequence[Tensor], states: Sequence[Tensor], lifted: Sequence[Tensor], num_outputs: int,
    output_template_specs: Specs, kind: States = "sequence",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return what a scan over T == 0 steps does. The core does not run; without specs (under Dynamo) it is traced for its shapes."""
    specs = output_template_specs
    if specs is None and num_outputs > 0:
        returned = _step(core_fn, [x.new_zeros(x.shape[1:]) for x in inputs], states, lifted, num_outputs)
        specs = [(y.shape, y.dtype, y.device) for y in returned[:num_outputs]]
    here = inputs[0].device
    outputs = [torch.empty((0, *s[0]), dtype=s[1], device=s[2] if len(s) > 2 else here) for s in (specs or ())[:num_outputs]]
    if kind == "final":
        return *outputs, *[_fresh(v) for v in states]
    return *outputs, *[v.new_empty((0, *v.shape)) for v in states]


def _step(
    core_fn: Core, inputs: Sequence[Tensor], states: Sequence[Tensor], lifted: Sequence[Tensor], num_outputs: int
) -> tuple[Tensor, ...]:
    """Run the core at one step; return outputs, then new states."""
    returned = core_fn(*inputs, *states, *lifted)
    values = (returned,) if isinstance(returned, Tensor) else returned
    if not isinstance(values, (tuple, list)) or not all(isinstance(y, Tensor) for y in values):
        _refuse(ReturnTypeError, f"core `{core_name(core_fn)}` must return tensors")
    if len(values) != num_outputs + len(states):
        message = f"returned {len(values)} values, expected {num_outputs} outputs + {len(states)} states"
        _refuse(ReturnCountError, f"core `{core_name(core_fn)}`: {message}")
    return tuple(values)


def _as_returned(core_fn: Core, states: Sequence[Tensor], new: Sequence[Tensor]) -> list[Tensor]:
    """Return states as they go into a step, expanded to the shape in which they come out of it."""
    for i, (before, after) in enumerate(zip(states, new, strict=True)):
        dims = zip(reversed(before.shape), reversed(after.shape), strict=False)
        if before.dtype != after.dtype or before.dim() > after.dim() or any(a != b and a != 1 for a, b in dims):
            message = f"state {i} goes in as {before.dtype}{list(before.shape)}, comes back as {after.dtype}{list(after.shape)}"
            _refuse(StateMismatchError, f"core `{core_name(core_fn)}`: {message}")
    return [before.expand(after.shape) for before, after in zip(states, new, strict=True)]


def _fresh(tensor: Tensor) -> Tensor:
    """Return a contiguous copy: the operators refuse results that share memory with operands or each other."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _refuse(kind: type[FlexSNError], message: str) -> NoReturn:
    """Raise; under Dynamo as a builtin error, the only kind whose message it keeps."""
    if not torch.compiler.is_compiling():
        raise kind(message)
    if issubclass(kind, TypeError):
        raise TypeError(message)
    raise ValueError(message)
