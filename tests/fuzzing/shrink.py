"""Makes a failing case small: fewer steps, neurons, lines, operands and results, and plainer numbers, while it still fails alike."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .case import Case, Line, Operand

Fails = Callable[[Case], bool]


def shrink(case: Case, fails: Fails, seconds: float = 120.0) -> Case:
    """The smallest case found. `fails`: whether a candidate fails in the same way; a candidate may also be no case at all."""
    end = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for candidates in (_fewer_results, _fewer_steps, _fewer_neurons, _fewer_lines, _fewer_operands, _plainer):
            found = True
            while found and time.monotonic() < end:
                found = False
                for candidate in candidates(case):
                    if time.monotonic() > end:
                        break
                    if fails(candidate):
                        case, found, progress = candidate, True, True
                        break
    return case


def _fewer_results(case: Case) -> Iterator[Case]:
    for k in range(len(case.outputs)):
        if len(case.outputs) > 1:
            loss = case.loss[:k] + case.loss[k + 1 :]
            yield case.change(outputs=case.outputs[:k] + case.outputs[k + 1 :], loss=loss)
    outs = len(case.outputs)
    for k, state in enumerate(case.states):
        states = case.states[:k] + case.states[k + 1 :]
        new, loss = case.new_states[:k] + case.new_states[k + 1 :], case.loss[: outs + k] + case.loss[outs + k + 1 :]
        yield case.change(states=states, new_states=new, loss=loss)  # where no line reads it
        if state.values is not None and case.T:  # a param instead of a state
            yield case.change(states=states, new_states=new, loss=loss, params=(state, *case.params))
    for k, used in enumerate(case.loss):
        if used:
            yield case.change(loss=(*case.loss[:k], False, *case.loss[k + 1 :]))
    if case.sequences:
        yield case.change(sequences=False)


def _fewer_steps(case: Case) -> Iterator[Case]:
    for length in sorted({1, 2, case.T // 2, case.T - 1}):
        if 0 < length < case.T:
            for start in {0, case.T - length}:
                yield case.change(inputs=tuple(_with(o, _values(o)[start : start + length]) for o in case.inputs))


def _fewer_neurons(case: Case) -> Iterator[Case]:
    """Halves of a dim counted from the last: neurons are independent."""
    dims = max(o.values.dim() - (o in case.inputs) for o in case.operands if o.values is not None)
    for dim in range(1, dims + 1):
        size = max(_size(o, dim, o in case.inputs) for o in case.operands)
        for start, length in ((0, size // 2), (size - size // 2, size // 2), (0, 1), (size - 1, 1)):
            if 0 < length < size:
                inputs, states, params = (
                    tuple(_narrow(o, dim, start, length, o in case.inputs) for o in part)
                    for part in (case.inputs, case.states, case.params)
                )
                yield case.change(inputs=inputs, states=states, params=params)
    if dims > 1:
        flat = [_flat(o, o in case.inputs) for o in case.operands]
        if all(o is not None for o in flat):
            yield _replace(case, flat)  # type: ignore[arg-type]  # just checked


def _fewer_lines(case: Case) -> Iterator[Case]:
    """Every line replaced by one of its arguments, or by another operand."""
    for k in range(len(case.lines) - 1, -1, -1):
        line = case.lines[k]
        for name in dict.fromkeys((*line.args, *(o.name for o in case.operands))):
            if line.text != "{0}" or line.args != (name,):
                rest = [_renamed(other, line.name, name) for other in case.lines[k + 1 :]]
                lines = (*case.lines[:k], *rest)
                outputs = tuple(name if n == line.name else n for n in case.outputs)
                yield case.change(lines=lines, outputs=outputs, new_states=tuple(name if n == line.name else n for n in case.new_states))


def _fewer_operands(case: Case) -> Iterator[Case]:
    used = {a for line in case.lines for a in line.args} | {*case.outputs, *case.new_states}
    for k, operand in enumerate(case.inputs):
        if operand.name not in used and len(case.inputs) > 1:
            yield case.change(inputs=case.inputs[:k] + case.inputs[k + 1 :])
    for k, operand in enumerate(case.params):
        if operand.name not in used:
            yield case.change(params=case.params[:k] + case.params[k + 1 :])


def _plainer(case: Case) -> Iterator[Case]:
    """Plain memory, no gradients, ones and zeros, fewer digits."""
    for operand in case.operands:
        if operand.layout != "plain":
            yield _replace(case, [dataclasses.replace(o, layout="plain") if o is operand else o for o in case.operands])
        if operand.grad:
            yield _replace(case, [dataclasses.replace(o, grad=False) if o is operand else o for o in case.operands])
        if operand.values is None:
            continue
        for values in (torch.ones_like(operand.values), torch.zeros_like(operand.values), _rounded(operand.values)):
            changed = not torch.equal(values.nan_to_num(9.0), operand.values.nan_to_num(9.0)) or bool(
                (values != values).ne(operand.values != operand.values).any()
            )
            # towards ones, else zeros, else fewer digits: never back
            if changed and _plainness(values) < _plainness(operand.values):
                yield _replace(case, [dataclasses.replace(o, values=values) if o is operand else o for o in case.operands])


def _plainness(values: Tensor) -> float:
    if values.numel() == 0 or bool((values == 1).all()):
        return 0
    if bool((values == 0).all()):
        return 1
    return 2 + len(str(values.flatten()[:64].tolist()))


def _rounded(values: Tensor) -> Tensor:
    return values.double().round(decimals=1).to(values.dtype) if values.is_floating_point() else values


def _values(operand: Operand) -> Tensor:
    assert operand.values is not None
    return operand.values


def _with(operand: Operand, values: Tensor) -> Operand:
    return dataclasses.replace(operand, values=values)


def _replace(case: Case, operands: list[Operand]) -> Case:
    i, s = len(case.inputs), len(case.inputs) + len(case.states)
    return case.change(inputs=tuple(operands[:i]), states=tuple(operands[i:s]), params=tuple(operands[s:]))


def _size(operand: Operand, dim: int, sequence: bool) -> int:
    return operand.values.shape[-dim] if operand.values is not None and operand.values.dim() - sequence >= dim else 1


def _narrow(operand: Operand, dim: int, start: int, length: int, sequence: bool) -> Operand:
    values = operand.values
    if values is None or values.dim() - sequence < dim or values.shape[-dim] == 1:
        return operand
    return _with(operand, values.narrow(-dim, start, min(length, values.shape[-dim])).contiguous())


def _flat(operand: Operand, sequence: bool) -> Operand | None:
    """Without the first dim of the step shape, if that has one element."""
    values = operand.values
    if values is None or values.dim() - sequence < 2:
        return operand
    return _with(operand, values.squeeze(int(sequence))) if values.shape[sequence] == 1 else None


def _renamed(line: Line, old: str, new: str) -> Line:
    return dataclasses.replace(line, args=tuple(new if a == old else a for a in line.args))
