"""Stateful modules under activation checkpoints, whose backward runs calls again: where these start, and what is carried afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._capture.signature import core_name
from .._torch.autograd import after_backward, current_backward
from ..errors import CarriedStateError


@dataclass
class Within:
    """A module while a backward calls it. What it carried before comes back when the backward ends.

    Attributes:
        backward: which one.
        before: what the module carried.
        anew: whether its calls are taken for single calls that are run again, each from where a call after `reset()` starts; until
            the backward itself resets it or sets its states.
        left: the states that its last call in the backward left.
        outer: the same of the backward in which this one runs, if it called the module too.
    """

    backward: int
    before: tuple[Any, Any]
    anew: bool
    left: Any
    outer: Within | None


def enter(neuron: Any, backward: int) -> Within:
    """Of a `FlexSN` that a backward calls or resets."""
    outer = neuron._within
    if outer is not None and outer.backward == backward:
        return outer
    left = outer.left if outer is not None else neuron.states if neuron.states_are_left() else None
    within = neuron.__dict__["_within"] = Within(backward, (neuron.states, neuron.state_seqs), True, left, outer)
    after_backward(lambda: leave(neuron, within))
    return within


def leave(neuron: Any, within: Within) -> None:
    if neuron._within is within:
        own = neuron.__dict__
        own["_within"], (own["states"], own["state_seqs"]) = within.outer, within.before


def starts_anew(neuron: Any) -> bool:
    """Whether a call starts where one after `reset()` does, and not from the carried states.

    Raises:
        CarriedStateError: a backward runs a call again that may have started from others.
    """
    backward = current_backward()
    if backward < 0:
        while neuron._within is not None:  # of a backward that failed
            leave(neuron, neuron._within)
        return neuron.states is None
    within = enter(neuron, backward)
    if neuron.states is not None and neuron.states is not within.left:
        within.anew = False  # somebody set them
    if neuron._first is False and within.anew:
        raise CarriedStateError(
            "is called by a backward, as activation checkpoints do, and it is not known where the call started: it was not the first since "
            "`reset()`, and only the last states are kept", core=core_name(neuron.core),
            hint="Call `reset()` inside the checkpointed function, or make it start from states that it is given: "
            "`flexsn.scan(core, inputs, states)`.",
        )  # fmt: skip
    return within.anew or neuron.states is None
