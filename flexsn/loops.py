"""A core over time without a kernel: by a Python loop, by PyTorch's `scan` operator, by PyTorch's `while_loop` operator.

All take `(core_fn, num_inputs, num_states, num_outputs, *flat_args, output_template_specs=None)`. `flat_args` are the input
sequences `[T, *shape]`, then the initial states `[*shape]`, then lifted tensors, which go to every step as they are. The
core is called `core_fn(*step_inputs, *states, *lifted)` and returns `(*outputs, *new_states)` as a tensor, tuple or list; it
need not be elementwise. Results come as one tuple, contiguous, and share memory neither with arguments nor among each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from . import _compat
from .errors import OperandCountError, OperandTypeError, SequenceLengthError, StateMismatchError
from .signature import Signature, check_returns, core_name, make_signature

__all__ = [
    "check_scan_arguments", "eager_scan", "eager_scan_final_state", "empty_results", "lowerable_scan", "lowerable_scan_available",
    "lowerable_scan_final_state", "lowerable_while_loop_available", "lowerable_while_loop_scan",
    "lowerable_while_loop_scan_final_state", "python_loop", "scan_operator", "while_loop_operator",
]  # fmt: skip

Specs = Sequence[tuple[Any, ...]] | None  # per output: (shape, dtype) or (shape, dtype, device)
States = Literal["sequence", "final"]


# --- what the three have in common --------------------------------------------------------------------------------------
def check_scan_arguments(
    core_fn: Callable[..., Any], num_inputs: int, num_states: int, num_outputs: int, flat_args: Sequence[Tensor],
    output_template_specs: Specs,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """Check the arguments of a scan and split them into input sequences, initial states and lifted tensors.

    Raises:
        ValueError: no input; fewer tensors than inputs + states; sequences that differ in T; a core that cannot take so many
            arguments; `T == 0` without one spec per output. (Under Dynamo the core and the specs are not looked at.)
        TypeError: an argument that is not a tensor.
    """
    if num_inputs < 1 or num_states < 0 or num_outputs < 0:
        raise OperandCountError(f"needs an input, and no negative counts: got {num_inputs}, {num_states}, {num_outputs}")
    if len(flat_args) < num_inputs + num_states:
        raise OperandCountError(f"{len(flat_args)} tensors for {num_inputs} inputs and {num_states} states")
    for i, arg in enumerate(flat_args):
        if not isinstance(arg, Tensor):
            raise OperandTypeError(f"argument {i} of the scan must be a tensor, not {type(arg).__name__}")
    inputs, rest = list(flat_args[:num_inputs]), list(flat_args[num_inputs:])
    if any(x.dim() == 0 for x in inputs):
        raise SequenceLengthError("an input is 0-dimensional; inputs are sequences of shape [T, *shape]")
    if any(x.shape[0] != inputs[0].shape[0] for x in inputs):
        raise SequenceLengthError(f"input sequences differ in T (dimension 0): {', '.join(str(x.shape[0]) for x in inputs)}")
    if not torch.compiler.is_compiling():
        make_signature(core_fn, num_inputs, num_states, len(flat_args) - num_inputs - num_states)
        if inputs[0].shape[0] == 0 and num_outputs > 0:
            _check_specs(output_template_specs, num_outputs)
    return inputs, rest[:num_states], rest[num_states:]


def _check_specs(specs: Specs, num_outputs: int) -> None:
    given = [] if specs is None else list(specs)
    if len(given) != num_outputs or any(len(spec) not in (2, 3) for spec in given):
        raise OperandCountError(
            f"T = 0 needs `output_template_specs`, a (shape, dtype) or (shape, dtype, device) per output: {num_outputs}, not {specs}"
        )


def empty_results(
    core_fn: Callable[..., Any], inputs: Sequence[Tensor], states: Sequence[Tensor], lifted: Sequence[Tensor], num_outputs: int,
    output_template_specs: Specs, kind: States,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What a scan over T == 0 steps returns. The core does not run: under Dynamo it is traced, for what no spec tells."""
    specs = output_template_specs
    if specs is None and num_outputs > 0:
        run = _Step(core_fn, inputs, states, lifted, num_outputs)
        specs = [(y.shape, y.dtype, y.device) for y in run([x.new_zeros(x.shape[1:]) for x in inputs], states)[:num_outputs]]
    here = inputs[0].device
    outputs = [torch.empty((0, *s[0]), dtype=s[1], device=s[2] if len(s) > 2 else here) for s in specs or ()]
    if kind == "final":
        return *outputs, *map(_fresh, states)
    return *outputs, *(v.new_empty((0, *v.shape)) for v in states)


class _Step:
    """The core at one step, its returns checked: `step(inputs, states)` gives a tuple of outputs and new states."""

    def __init__(self, core_fn, inputs, states, lifted, num_outputs):
        self.core, self.lifted, self.outputs = core_fn, lifted, num_outputs
        self.sig = Signature(core_name(core_fn), len(inputs), len(states), len(lifted), ())

    def __call__(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return check_returns(self.sig, self.core(*inputs, *states, *self.lifted), self.outputs)

    def expand(self, states: Sequence[Tensor], new: Sequence[Tensor]) -> list[Tensor]:
        """States as they go into a step, in the shape in which they come out of it."""
        for i, (before, after) in enumerate(zip(states, new, strict=True)):
            dims = zip(reversed(before.shape), reversed(after.shape), strict=False)
            if before.dtype != after.dtype or before.dim() > after.dim() or any(a not in (1, b) for a, b in dims):
                raise StateMismatchError(
                    f"state {i} goes in as {before.dtype}{list(before.shape)} and comes back as {after.dtype}{list(after.shape)}",
                    core=self.sig.core, hint="A state keeps its shape and dtype from step to step.",
                )  # fmt: skip
        return [before.expand(after.shape) for before, after in zip(states, new, strict=True)]


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


# --- a Python loop --------------------------------------------------------------------------------------------------------
def python_loop(
    core_fn: Callable[..., Any], num_inputs: int, num_states: int, num_outputs: int, *flat_args: Tensor,
    output_template_specs: Specs = None, states: States = "sequence",
) -> tuple[Tensor, ...]:  # fmt: skip
    """`eager_scan`, or with `states="final"` `eager_scan_final_state`."""
    inputs, current, lifted = check_scan_arguments(core_fn, num_inputs, num_states, num_outputs, flat_args, output_template_specs)
    if inputs[0].shape[0] == 0:
        return empty_results(core_fn, inputs, current, lifted, num_outputs, output_template_specs, states)
    step = _Step(core_fn, inputs, current, lifted, num_outputs)
    rows = []
    for t in range(inputs[0].shape[0]):
        returned = step([x[t] for x in inputs], current)
        step.expand(current, returned[num_outputs:])
        current = list(returned[num_outputs:])
        rows.append(returned if states == "sequence" else returned[:num_outputs])
    stacked = [torch.stack(row) for row in zip(*rows, strict=True)]
    return (*stacked, *map(_fresh, current)) if states == "final" else tuple(stacked)


# --- PyTorch's scan operator ------------------------------------------------------------------------------------------------
def scan_operator(
    core_fn: Callable[..., Any], num_inputs: int, num_states: int, num_outputs: int, *flat_args: Tensor,
    output_template_specs: Specs = None, states: States = "sequence",
) -> tuple[Tensor, ...]:  # fmt: skip
    """`lowerable_scan`, or with `states="final"` `lowerable_scan_final_state`."""
    scan = _compat.scan_operator()
    if scan is None:
        raise RuntimeError(f"PyTorch {torch.__version__} has no `scan` operator; use `eager_scan`")
    inputs, first, lifted = check_scan_arguments(core_fn, num_inputs, num_states, num_outputs, flat_args, output_template_specs)
    if inputs[0].shape[0] == 0:
        return empty_results(core_fn, inputs, first, lifted, num_outputs, output_template_specs, states)
    step = _Step(core_fn, inputs, first, lifted, num_outputs)
    template = step([x[0] for x in inputs], first)
    init = [_fresh(v) for v in step.expand(first, template[num_outputs:])]
    if not template:
        return ()
    carry = init or [inputs[0].new_zeros(())]  # the operator wants at least one

    def body(carry, xs):
        returned = step(xs, carry[:num_states])
        kept = returned if states == "sequence" else returned[:num_outputs]
        return [_fresh(v) for v in returned[num_outputs:]] or [carry[0] + 0], [_fresh(y) for y in kept] or [carry[0].new_zeros(())]

    final, sequences = scan(body, carry, inputs)
    return (*sequences[:num_outputs], *final[:num_states]) if states == "final" else tuple(sequences)


# --- PyTorch's while_loop operator --------------------------------------------------------------------------------------------
def while_loop_operator(
    core_fn: Callable[..., Any], num_inputs: int, num_states: int, num_outputs: int, *flat_args: Tensor,
    output_template_specs: Specs = None, states: States = "sequence",
) -> tuple[Tensor, ...]:  # fmt: skip
    """`lowerable_while_loop_scan`, or with `states="final"` `lowerable_while_loop_scan_final_state`."""
    while_loop = _compat.while_loop_stack_operator()
    if while_loop is None:
        raise RuntimeError(f"PyTorch {torch.__version__} has no `while_loop` operator that stacks results; use `eager_scan`")
    inputs, first, lifted = check_scan_arguments(core_fn, num_inputs, num_states, num_outputs, flat_args, output_template_specs)
    T = inputs[0].shape[0]
    if T == 0:
        return empty_results(core_fn, inputs, first, lifted, num_outputs, output_template_specs, states)
    step = _Step(core_fn, inputs, first, lifted, num_outputs)
    template = step([x[0] for x in inputs], first)
    if any(y.requires_grad for y in template):
        raise RuntimeError("PyTorch's `while_loop` has no gradient for this: call under `torch.no_grad()`, or use `lowerable_scan`")
    if not template:
        return ()
    outputs = [torch.zeros_like(y, memory_format=torch.contiguous_format) for y in template[:num_outputs]]
    init = [_fresh(v) for v in step.expand(first, template[num_outputs:])]

    def unfinished(t, *carried):
        return t < T

    def body(t, *carried):
        now = t.item()
        torch._check(now >= 0)
        torch._check(now < T)
        returned = step([x.select(0, now) for x in inputs], carried[num_outputs:])
        return t + 1, *[_fresh(y) for y in returned]

    _, *sequences = while_loop(unfinished, body, (torch.zeros((), dtype=torch.int64), *outputs, *init), ())
    for y in sequences:
        torch._check(y.shape[0] == T)
    if states == "final":
        return *sequences[:num_outputs], *(_fresh(v[-1]) for v in sequences[num_outputs:])
    return tuple(sequences)
