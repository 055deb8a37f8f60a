"""`flexsn.scan`: a core over a sequence, as one differentiable call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ._capture.signature import PADDED, core_name, make_signature
from ._captured.captured_values import CapturedValues, look
from ._operator.dispatch import run_core
from ._operator.streaming import Shared, in_pieces, scan_pieces
from ._torch.compiling import outside_dynamo
from ._torch_compile.core_scan import compile_core
from .errors import OperandTypeError, PiecesError


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
    exact: bool = True,
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
        exact: with False, few neurons over many steps may run parts of time side by side, where new states are affine in the states
            (leaky integrators, state-space neurons, resonators without a reset): results then agree with the eager loop within rounding.
        reduce: for sequences in pieces, `reduce(k, *outputs)` takes the outputs of piece `k` and returns a tensor or a tuple of
            tensors (its part of the loss), which are summed over the pieces and returned in place of the outputs.

    Returns:
        `ScanResult(outputs, states)`, both tuples.

    Raises:
        FlexSNError: a subclass per mistake (see `flexsn.errors`), naming the core, the operand or op, and the source line.
    """
    for name, given in (("inputs", inputs), ("states", states), ("params", params)):
        packed = isinstance(given, PackedSequence)
        if packed or not isinstance(given, (tuple, list)):
            hint = f"{PADDED} Then write `{name}=(x,)`." if packed else f"Write `{name}=(x,)`."
            raise OperandTypeError(f"`{name}` must be a tuple or list of tensors", core=core_name(core), hint=hint)
    options: dict[str, Any] = {"backend": backend, "strict": strict, "exact": exact}
    if reduce is not None or any(map(in_pieces, inputs)):
        return _scan_in_pieces(core, inputs, states, params, store_state_seqs, reduce, **options)
    operands = tuple(inputs), tuple(states), tuple(params)
    if torch.compiler.is_dynamo_compiling():
        finals, sequences, outputs = compile_core(
            core, None, *operands, backend=backend, strict=strict, exact=exact, sequences=store_state_seqs
        )
    else:
        finals, sequences, outputs = run_core(
            core, look(core), *operands, backend=backend, strict=strict, exact=exact, sequences=store_state_seqs
        )
    return ScanResult(tuple(outputs), tuple(sequences if store_state_seqs else finals))


@outside_dynamo("a sequence in pieces")
def _scan_in_pieces(
    core: Callable, inputs: Sequence[Any], states: Sequence[Tensor | None], params: Sequence[Tensor], store_state_seqs: bool,
    reduce: Callable | None, **options: Any,
) -> ScanResult:  # fmt: skip
    if not any(map(in_pieces, inputs)):
        raise PiecesError("`reduce` is given, but no input is in pieces", core=core_name(core), hint="Write `inputs=(x.split(length),)`.")

    read = {f"param {k}" for k in range(len(params))}  # names of what the pieces have read so far

    def run(pieces: tuple[Tensor, ...], states: Sequence[Tensor | None]) -> tuple[Any, Any, Any]:
        seen = look(core)
        finals, trail, outputs = run_core(core, seen, pieces, tuple(states), tuple(params), sequences=store_state_seqs, **options)
        kernels = [] if options["backend"] == "torch" else [call.captured for call in seen.calls.values()]
        read.update(*(kernels or [seen.tensors()]))  # all that the core leads to, where no kernel ran
        return tuple(outputs), tuple(finals), tuple(trail)

    sig = make_signature(core, len(inputs), len(states), len(params))

    def tensors() -> dict[str, Tensor]:
        return {f"param {k}": p for k, p in enumerate(params)} | look(core).tensors()

    shared = Shared(tensors, read, lambda: look(core).fingerprint, lambda: _captured(reduce))
    outputs, finals, trails = scan_pieces(run, sig.core, sig.input_names, inputs, states, reduce, shared)
    return ScanResult(outputs, trails if store_state_seqs else finals)  # type: ignore[arg-type]  # lists of tensors, as documented


def _captured(function: Any) -> dict[str, Tensor]:
    """The tensors that a function captures, by path."""
    return CapturedValues(function).tensors() if callable(function) else {}
