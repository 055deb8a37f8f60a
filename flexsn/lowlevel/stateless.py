"""`FlexSNKernel`: a core as a stateless callable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .._capture.signature import core_name
from ..errors import OperandCountError
from ..module import FlexSN


class FlexSNKernel:
    """A core as a stateless callable: `kernel(*input_seqs, *init_states) -> (*output_seqs, *state_seqs)`.

    Sequences are `[T, *shape]`, initial states `[*shape]`; they may be left out, all or none, and are zeros then. Results are
    contiguous, whatever the order in memory of the operands.

    Args:
        core, num_inputs, num_states, num_outputs, example_outputs, requires_grad, backend, strict: as those of `FlexSN`.

    Raises:
        OperandCountError: neither all states are given nor none; other errors are those of `flexsn.scan`.
    """

    def __init__(
        self, core: Callable[..., Any], num_inputs: int, num_states: int, num_outputs: int, example_inputs: Sequence[Any] | None = None,
        example_outputs: Sequence[Tensor] | None = None, requires_grad: Sequence[bool] | bool | None = None, backend: str = "auto", *,
        strict: bool = False,
    ):  # fmt: skip
        self.neuron = FlexSN(
            core, num_inputs, num_states, num_outputs, example_inputs, example_outputs, requires_grad, "m", backend, True, strict=strict
        )

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        neuron = self.neuron
        inputs, states = operands[: neuron.num_inputs], operands[neuron.num_inputs :]
        if len(inputs) != neuron.num_inputs or (states and len(states) != neuron.num_states):
            counts = f"{neuron.num_inputs} inputs and {neuron.num_states} states"
            raise OperandCountError(f"was given {len(operands)} operands for {counts}", core=core_name(neuron.core))
        outputs, _, sequences = neuron.run(inputs, states or (None,) * neuron.num_states, True)
        return tuple([y.contiguous() for y in (*outputs, *(sequences or ()))])
