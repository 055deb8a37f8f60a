"""What a neuron does in a network that `flexsn.over_time` runs: it is told of all steps at once, or of one after the other.

While such a network runs, its walk is `walking.now` in that thread, and every flexsn neuron that is called asks it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._captured.uneven import Ends
from .._operator.checkpointed import starts_anew
from .._torch.autograd import current_backward


class _Walking(threading.local):
    now: Walk | None = None


walking = _Walking()


class Walk:
    """One run of a network over a sequence.

    Attributes:
        lengths: how many steps each sequence of the batch has left; None where all have as many.
    """

    lengths: Tensor | None = None

    def run(self, neuron: Any, inputs: Sequence[Tensor], states: Sequence[Tensor | None]) -> Any:
        """Run a neuron over sequences; return outputs, final states and, if it stores them, the states of every step."""
        ends = None if self.lengths is None else Ends(self.lengths, None, states)
        return neuron.run(tuple(inputs), states, neuron.store_state_seqs, ends)

    @contextmanager
    def on(self, walk: Walk | None) -> Iterator[None]:
        """Have neurons ask `walk`; None: they run as they do elsewhere."""
        before, walking.now = walking.now, walk
        try:
            yield
        finally:
            walking.now = before

    def neuron(self, neuron: Any, inputs: Sequence[Tensor]) -> Any:
        """Return what a `FlexSN` gives for one step."""
        raise NotImplementedError

    def watch(self, record: Any, output: Tensor, see: Callable[[Tensor], None]) -> None:
        """Have a monitor's `record` see what a layer gave at all steps, once the walk is over."""
        raise NotImplementedError


def begins(neuron: Any, inputs: Sequence[Tensor]) -> tuple[bool, Sequence[Tensor | None]]:
    """Return whether a neuron starts anew, and its states.

    Args:
        inputs: sequences.
    """
    anew = neuron.states is None if neuron._within is None and current_backward() < 0 else starts_anew(neuron)
    if not (anew or not neuron.stateful):
        return False, neuron.states
    return True, neuron.start_states(*(inputs if neuron.step_mode == "m" else [x[0] for x in inputs]))


def ends(neuron: Any, anew: bool, states: Sequence[Tensor], sequences: list[Tensor] | None) -> None:
    """Have a neuron carry its states, if it does."""
    if neuron.stateful == "detached":
        states = [v.detach() for v in states]
    neuron._carry(list(states) if neuron.stateful else None, sequences, anew)


class PlainLoop(Walk):
    """Step by step: neurons take one step each time they are called."""

    def __init__(self) -> None:
        self.held: dict[Any, tuple[bool, list[Tensor], list[list[Tensor]]]] = {}
        self.carried: dict[Any, Any] = {}  # what neurons carried before
        self.watched: dict[int, tuple[Callable[[Tensor], None], list[Tensor]]] = {}

    def neuron(self, neuron: Any, inputs: Sequence[Tensor]) -> Any:
        one = [x.unsqueeze(0) for x in inputs]
        with self.on(None):
            anew, before, trail = self.held.get(neuron, (False, [], []))
            states: Sequence[Tensor | None] = before
            if neuron not in self.held or (neuron.stateful and neuron.states is not before):  # a step may reset it
                anew, states = begins(neuron, one)
            outputs, finals, sequences = self.run(neuron, one, states)
        trail.append(sequences or [])
        finals = list(finals)
        self.held[neuron] = anew, finals, trail
        if neuron.stateful:
            self.carried.setdefault(neuron, neuron.states)
            neuron.__dict__["states"] = finals  # a step may read them
        found = [y.squeeze(0) for y in outputs]
        return found[0] if len(found) == 1 else tuple(found)

    def undo(self) -> None:
        """Have the neurons carry what they did before."""
        for neuron, states in self.carried.items():
            neuron.__dict__["states"] = states

    def finish(self) -> None:
        """Have the neurons carry their states."""
        for neuron, (anew, finals, trail) in self.held.items():
            kept = [torch.cat(rows) for rows in zip(*trail, strict=True)] if neuron.store_state_seqs else None
            ends(neuron, anew, finals, kept)
        for see, rows in self.watched.values():
            see(torch.stack(rows))

    def watch(self, record: Any, output: Tensor, see: Callable[[Tensor], None]) -> None:
        record.follow(output)
        self.watched.setdefault(id(record), (see, []))[1].append(output.detach())
