"""`flexsn.scan`: a core over a sequence, as one differentiable call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ._capture.signature import PADDED, core_name, make_signature
from ._captured.captured_values import CapturedValues, look
from ._captured.uneven import Ends, Uneven, over_packed
from ._operator.dispatch import run_core
from ._operator.streaming import Shared, in_pieces, scan_pieces
from ._torch.compiling import outside_dynamo
from ._torch_compile.core_scan import compile_core, run_uneven
from .errors import ArgumentError, OperandTypeError, PiecesError


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
    lengths: Tensor | None = None,
    resets: Tensor | None = None,
    reset_states: Sequence[Tensor | None] | None = None,
) -> ScanResult:
    """Run one-step function `core` over T steps in one fused kernel, differentiable in every tensor it touches.

    Args:
        core: `core(*inputs_t, *states, *params) -> (*outputs_t, *new_states)`, one time step in plain PyTorch.
        inputs: sequences `[T, *shape]`; at least one. `core` sees `[*shape]`. Or sequences in pieces, each a list (or anything
            with `len` and `[k]`) of `[T_k, *shape]`: results are lists of pieces too, and the backward reads and runs every piece
            again, so that only the states at their borders are kept. Pieces are moved to where the initial states are. An
            iterator of pieces can be read once, and serves where nothing requires grad. Or `PackedSequence`s: outputs are packed alike,
            and states, in the order of the batch, are those at the end of each sequence.
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
        lengths: int32 or int64 `[B]`, on any device: how many steps each sequence has, where inputs are `[T, B, *]`. More than T acts as T,
            less than 0 as 0. Past its end a sequence's outputs are zero, its states stay as they are (in state sequences, too), and no
            gradient flows; what its inputs hold there is of no matter. The host does not read it. With inputs in pieces it is that of
            the whole. The batch is the first dim of a step of the input that has most.
        resets: bool `[T, B]`: before which steps a sequence starts anew, from `reset_states`; gradients are cut there. Not with inputs in
            pieces.
        reset_states: where it starts anew, one for each state, as `states` are; by default from `states`.

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
    if any(isinstance(x, PackedSequence) for x in inputs):

        def padded(*inputs: Tensor, lengths: Tensor) -> tuple[Any, ...]:
            more: dict[str, Any] = {"store_state_seqs": store_state_seqs, "resets": resets, "reset_states": reset_states}
            found = scan(core, inputs, states, params, lengths=lengths, **more, **options)
            return *found.outputs, [*found.states]

        *outputs, finals = over_packed(padded, inputs, core_name(core), lengths is not None or reduce is not None)
        return ScanResult(tuple(outputs), tuple(finals))
    if reset_states is not None and resets is None:
        raise ArgumentError("`reset_states` is given, and `resets` is not", core=core_name(core), hint="Give `resets`, bool `[T, B]`.")
    if reduce is not None or any(map(in_pieces, inputs)):
        if resets is not None:
            hint = "Join the pieces: `torch.cat(pieces)`."
            raise PiecesError("`resets` is given, and inputs are in pieces", core=core_name(core), hint=hint)
        return _scan_in_pieces(core, inputs, states, params, store_state_seqs, reduce, lengths, **options)
    operands = tuple(inputs), tuple(states), tuple(params)
    options["sequences"] = store_state_seqs
    if lengths is not None or resets is not None:
        anew = states if reset_states is None else reset_states
        finals, sequences, outputs = run_uneven(core, None, *operands, Ends(lengths, resets, anew), **options)
    elif torch.compiler.is_dynamo_compiling():
        finals, sequences, outputs = compile_core(core, None, *operands, **options)
    else:
        finals, sequences, outputs = run_core(core, look(core), *operands, **options)
    return ScanResult(tuple(outputs), tuple(sequences if store_state_seqs else finals))


@outside_dynamo("a sequence in pieces")
def _scan_in_pieces(
    core: Callable, inputs: Sequence[Any], states: Sequence[Tensor | None], params: Sequence[Tensor], store_state_seqs: bool,
    reduce: Callable | None, lengths: Tensor | None, **options: Any,
) -> ScanResult:  # fmt: skip
    if not any(map(in_pieces, inputs)):
        raise PiecesError("`reduce` is given, but no input is in pieces", core=core_name(core), hint="Write `inputs=(x.split(length),)`.")

    own, wrap = len(states), None
    if lengths is not None:
        wrap, states = _with_lengths(core, inputs, states, params, lengths)
    read = {f"param {k}" for k in range(len(params))}  # names of what the pieces have read so far

    def run(pieces: tuple[Tensor, ...], states: Sequence[Tensor | None]) -> tuple[Any, Any, Any]:
        seen = look(core) if wrap is None else wrap.look(core, look(core))
        finals, trail, outputs = run_core(core, seen, pieces, tuple(states), tuple(params), sequences=store_state_seqs, **options)
        kernels = [] if options["backend"] == "torch" else [call.captured for call in seen.calls.values()]
        read.update(*(kernels or [seen.tensors()]))  # all that the core leads to, where no kernel ran
        return tuple(outputs), tuple(finals), tuple(trail)

    sig = make_signature(core, len(inputs), own, len(params))

    def tensors() -> dict[str, Tensor]:
        return {f"param {k}": p for k, p in enumerate(params)} | look(core).tensors()

    shared = Shared(tensors, read, lambda: look(core).fingerprint, lambda: _captured(reduce))
    outputs, finals, trails = scan_pieces(run, sig.core, sig.input_names, inputs, states, reduce, shared)
    return ScanResult(outputs, (trails if store_state_seqs else finals)[:own])  # type: ignore[arg-type]  # lists of tensors, as documented


def _with_lengths(
    core: Callable, inputs: Sequence[Any], states: Sequence[Tensor | None], params: Sequence[Tensor], lengths: Tensor
) -> tuple[Uneven, tuple[Tensor | None, ...]]:
    """Return what makes another core of the core, and the states of that: steps that are left go from piece to piece."""
    if not hasattr(inputs[0], "__getitem__") or not len(inputs[0]):
        raise PiecesError("`lengths` is given, and the first input has no first piece", core=core_name(core), hint="Give a list of pieces.")
    device = next((v.device for v in states if v is not None), None)
    first = torch.as_tensor(inputs[0][0], device=device)
    wrap, _, found, _ = Ends(lengths, None, states).among(core, [first, *inputs[1:]], states, params)
    return wrap, found


def _captured(function: Any) -> dict[str, Tensor]:
    """The tensors that a function captures, by path."""
    return CapturedValues(function).tensors() if callable(function) else {}
