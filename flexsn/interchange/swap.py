"""What the converters of the three libraries share: a neuron kept under its old name, and the test that it fuses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..capture import Meta
from ..compile import program_for
from ..errors import CannotFuseError
from ..module import FlexSN
from ..signature import core_name, make_signature


class LeaveAlone(Exception):
    """Why a neuron is not converted."""


def keep(core: nn.Module, source: nn.Module, *names: str) -> None:
    """Give `core` these tensors of `source`, in the order they have there: the same `Parameter` objects, the same buffers."""
    for name, parameter in source.named_parameters(recurse=False):
        if name in names:
            core.register_parameter(name, parameter)
    for name, buffer in source.named_buffers(recurse=False):
        if name in names:
            core.register_buffer(name, buffer)


class Swapped(FlexSN):
    """A neuron of another library as a `FlexSN`.

    It loads state dicts from before the conversion: the keys of the old neuron's tensors are those of the core's, and
    what only the old neuron kept (states as buffers, flags) is passed over.

    Args:
        core: one step; an `nn.Module` that holds the old neuron's parameters by their names.
        old: the neuron it stands for.
        num_inputs, num_states: how many the core takes.
        step_mode, backend: as for `FlexSN`.
    """

    def __init__(self, core: nn.Module, old: nn.Module, num_states: int, step_mode: str, backend: str, num_inputs: int = 1):
        super().__init__(core, num_inputs=num_inputs, num_states=num_states, step_mode=step_mode, backend=backend)
        self.old_name = type(old).__name__
        self.old_keys = tuple(old.state_dict())
        self.train(old.training)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        for key in self.old_keys:
            if prefix + key in state_dict:
                value = state_dict.pop(prefix + key)
                if key in self.core.state_dict():
                    state_dict[f"{prefix}core.{key}"] = value
        super()._load_from_state_dict(state_dict, prefix, *args)

    def fitting(self, x: Tensor, states: Sequence[Tensor | None] | None) -> list[Tensor | None] | None:
        """The carried states if they have the shape of one step `x`; else None: all three libraries start anew then."""
        if states is None or any(v is not None and v.shape != x.shape for v in states):
            return None
        return list(states)

    def summary(self) -> str:
        spans = {"s": "one step per call", "m": "whole sequences"}[self.step_mode]
        return f"FlexSN, core {core_name(self.core)}, {spans}"

    def extra_repr(self) -> str:
        return f"was {self.old_name}, {super().extra_repr()}"


def check_fuses(neuron: FlexSN, step: tuple[int, ...] | None = None) -> None:
    """Capture the core and its gradient on stand-ins; nothing is built.

    Args:
        step: the shape of one step; by default a batch of what the core's tensors broadcast to.

    Raises:
        LeaveAlone: one kernel cannot express it, or PyTorch cannot run it.
    """
    reads, replaced = neuron.look()
    captured = reads.tensors(replaced) if reads.objects else {}
    floats = [t for t in captured.values() if t.is_floating_point()]
    shape = step or torch.broadcast_shapes((2, 1), *(t.shape for t in floats))
    dtype = floats[0].dtype if floats else torch.get_default_dtype()
    device = floats[0].device if floats else torch.device("cpu")
    sig = make_signature(neuron.core, neuron.num_inputs, neuron.num_states, 0)
    metas = [Meta(tuple(shape), dtype)] * (neuron.num_inputs + neuron.num_states)
    try:
        program = program_for("triton" if device.type == "cuda" else "cpp", neuron.core, reads, sig, metas, device, captured, None)[0]
        program.differentiate(neuron.core, captured)
    except CannotFuseError as error:
        raise LeaveAlone(f"cannot be fused: {error.reason}{f', at {error.line}' if error.line else ''}") from error
