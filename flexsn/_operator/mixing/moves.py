"""Mixing calls that pick or join values along the last dim, and compute nothing: `cat`, `chunk`, `split`, `narrow`, `roll`, indexing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .mixing_calls import MixingFunction

_MOVES = {
    torch.cat, torch.concat, torch.concatenate, torch.chunk, Tensor.chunk, torch.split, Tensor.split, torch.narrow, Tensor.narrow,
    torch.roll,
    Tensor.roll, torch.tensor_split, Tensor.tensor_split, Tensor.__getitem__,
}  # fmt: skip


class Run(NamedTuple):
    """Values `start` to `start + width` of an operand's rows, which lie from `at` in those of a result."""

    operand: int
    start: int
    at: int
    width: int


def moves(f: MixingFunction, lead: Sequence[int], widths: Sequence[int]) -> list[list[Run]] | None:
    """Return the runs of values of which the results of a call are made; None of a call that does anything else.

    Args:
        lead: dims of operands and results before the last one.
        widths: of the operands.
    """
    if f.func not in _MOVES or f.fixed:
        return None
    ends, total, found = list(itertools.accumulate(widths)), sum(widths), list[list[Run]]()
    rows = torch.arange(math.prod(lead)).view(*lead, 1) * total  # values tell in which row they were
    numbered = [rows + torch.arange(end - width, end) for end, width in zip(ends, widths, strict=True)]
    for result in f(*numbered):
        if result.shape[:-1] != (*lead,) or not (result - rows == result[(0,) * len(lead)]).all():
            return None
        numbers = result[(0,) * len(lead)]
        breaks = [0, *(numbers.diff() != 1).nonzero().add(1).flatten().tolist(), len(numbers)]
        runs = list[Run]()
        for begin, end in itertools.pairwise(breaks):
            runs += _of_operands(int(numbers[begin]), begin, end - begin, widths)
        found.append(runs)
    return found


def _of_operands(number: int, at: int, width: int, widths: Sequence[int]) -> list[Run]:
    """Return the runs that a row of numbers in a row is made of, the operands numbered one after the other."""
    found, begin = list[Run](), 0
    for operand, own in enumerate(widths):
        start, end = max(number, begin), min(number + width, begin + own)
        if start < end:
            found.append(Run(operand, start - begin, at + start - number, end - start))
        begin += own
    return found
