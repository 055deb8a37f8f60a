"""Judges a case: a backend beside the oracle, results to the bit, gradients within the bound of their rounding errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flexsn
from flexsn._capture.signature import make_signature
from flexsn._ir.graph import HALF
from flexsn._operator.eager_loop import eager_loop
from flexsn.errors import FlexSNError

from .case import Case
from .oracle import Bounds, Disagreement, Own

Operands = dict[str, Tensor | None]


# Errors of flexsn that say what it does not do: see docs/numerics.md.
REFUSALS = (
    "on an operand without dims than on the same numbers",
    "has no elements",
    "of 16-bit floats has no rule",
)
OF_ROWS = "but not on operands of the step shape"  # and then what PyTorch says to that


@dataclass
class Failure:
    """What is wrong with a case. `kind`: forward, gradient, op (one op by itself), error; or refused, which is no defect."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass
class Run:
    """Results by name, the roots of the loss, and operands that gradients are asked for, by name."""

    results: dict[str, Tensor]
    roots: list[Tensor]
    cotangents: list[Tensor]
    wanted: dict[str, Tensor]

    def gradients(self) -> dict[str, Tensor | None]:
        if not self.roots or not self.wanted:
            return dict.fromkeys(self.wanted)
        found = torch.autograd.grad(self.roots, list(self.wanted.values()), self.cotangents, allow_unused=True)
        return dict(zip(self.wanted, found, strict=True))


def scanned(case: Case, backend: str, operands: Operands) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Outputs and states of a backend."""
    inputs, states, params = ([operands[o.name] for o in part] for part in (case.inputs, case.states, case.params))
    result = flexsn.scan(case.core(), inputs, states, params, store_state_seqs=case.sequences, backend=backend)  # type: ignore[arg-type]
    return result.outputs, result.states


def looped(case: Case, core: Callable[..., Any], operands: Operands) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """Outputs and states of the eager loop, and the states of every step."""
    inputs, states, params = ([operands[o.name] for o in part] for part in (case.inputs, case.states, case.params))
    sig = make_signature(case.core(), len(inputs), len(states), len(params))
    outputs, finals, trail = eager_loop(core, sig, inputs, states, params, None, True)  # type: ignore[arg-type]
    return outputs, trail if case.sequences else finals, trail


def as_run(case: Case, operands: Operands, outputs: Sequence[Tensor], states: Sequence[Tensor], trail: Sequence[Tensor] = ()) -> Run:
    """With the loss of the case. States that no loss reaches have a cotangent of zero in flexsn: so have those of the `trail`."""
    results = {f"output {k}": y for k, y in enumerate(outputs)} | {f"state {k}": v for k, v in enumerate(states)}
    roots, cotangents = [], []
    for k, (value, used) in enumerate(zip(results.values(), case.loss, strict=True)):
        if used and value.requires_grad:
            roots.append(value)
            generator = torch.Generator("cpu").manual_seed(k)
            cotangents.append(torch.randn(value.shape, generator=generator, dtype=torch.float64, device="cpu").to(value))
    for value in trail:
        if value.requires_grad:
            roots.append(value)
            cotangents.append(torch.zeros_like(value))
    wanted = {n: t for n, t in operands.items() if t is not None and t.requires_grad}
    return Run(results, roots, cotangents, wanted)


def fused(case: Case, backend: str) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Results and gradients of a backend."""
    operands = {o.name: o.tensor() for o in case.operands}
    run = as_run(case, operands, *scanned(case, backend, operands))
    return run.results, run.gradients()


def check(case: Case, backend: str = "cpp") -> Failure | None:
    """None if the backend is right. What PyTorch itself refuses raises its own error."""
    operands = {o.name: o.tensor() for o in case.operands}
    params = [t for o in case.params if (t := operands[o.name]) is not None]
    try:
        with Own(params, backend) as own:
            oracle = as_run(case, operands, *looped(case, own.step(case.core(), len(case.inputs) + len(case.states)), operands))
    except Disagreement as error:
        return Failure("op", str(error))
    given = set(map(id, oracle.cotangents))  # no result of the core, whatever they were made from
    bounds = Bounds([t for t in own.static.values() if id(t) not in given], backend, oracle.cotangents)
    try:
        with bounds:
            eager = oracle.gradients()
    except Disagreement as error:
        return Failure("op", f"in the backward: {error}")
    try:
        results, grads = fused(case, backend)
    except Exception as error:  # whatever it is, it is the case's verdict
        if isinstance(error, FlexSNError) and (any(text in str(error) for text in REFUSALS) or refuses_rows(case, str(error))):
            return Failure("refused", str(error))
        return Failure("error", f"{type(error).__name__}: {error}")
    return compare_results(results, oracle.results) or compare_gradients(grads, eager, bounds, case.T)


def refuses_rows(case: Case, said: str) -> bool:
    """Whether PyTorch itself refuses the core on operands of the step shape, with what flexsn `said`."""
    inputs = [v[0] if len(v) else v.new_zeros(v.shape[1:]) for o in case.inputs if (v := o.values) is not None]
    moving = [*inputs, *(inputs[0].new_zeros(()) if o.values is None else o.values for o in case.states)]
    step = torch.broadcast_shapes(*(t.shape for t in moving))
    params = [o.values for o in case.params if o.values is not None]
    try:
        case.core()(*(t.float() if t.dtype in HALF else t for t in (*(t.expand(step) for t in moving), *params)))
    except RuntimeError as error:
        return OF_ROWS in said and str(error).partition("\n")[0] in said
    return False


def eager_error(case: Case) -> str:
    """What the eager loop raises, forward or backward."""
    operands = {o.name: o.tensor() for o in case.operands}
    try:
        as_run(case, operands, *looped(case, case.core(), operands)).gradients()
    except RuntimeError as error:
        return str(error)
    return ""


def different(got: Tensor, want: Tensor) -> Tensor:
    """Where the bits differ; all NaNs are equal."""
    same = got == want
    if want.is_floating_point():
        same = (same & (got.signbit() == want.signbit())) | (got.isnan() & want.isnan())
    return ~same


def compare_results(results: dict[str, Tensor], oracle: dict[str, Tensor]) -> Failure | None:
    for name, want in oracle.items():
        got = results[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            return Failure("forward", f"{name} is {got.dtype} {list(got.shape)} instead of {want.dtype} {list(want.shape)}")
        wrong = different(got.detach(), want.detach())
        if wrong.any():
            return Failure("forward", _first(name, got, want, wrong))
    return None


def compare_gradients(grads: dict[str, Tensor | None], eager: dict[str, Tensor | None], bounds: Bounds, T: int) -> Failure | None:
    for name, want in eager.items():
        got = grads[name]
        if T == 0:
            continue  # through no step at all: only states that a step differentiates get a gradient
        if got is None or want is None:
            other = want if got is None else got
            if other is not None and (other.nan_to_num(0.0) != 0).any():  # NaN: a cotangent of zero times an infinite derivative
                return Failure("gradient", f"{name}: {'flexsn' if got is None else 'eager'} gives none")
            continue
        if got.shape != want.shape or got.dtype != want.dtype:
            return Failure("gradient", f"{name} is {got.dtype} {list(got.shape)} instead of {want.dtype} {list(want.shape)}")
        total, error = bounds.of(want)
        info = torch.finfo(want.dtype)
        allowed = 4 * error + 4 * info.eps * total + 4 * info.tiny
        # where a term is infinite or NaN, or could overflow, order decides between these
        wrong = ~((got.double() - want.double()).abs() <= allowed) & (total < info.max / 16) & different(got, want)
        if wrong.any():
            return Failure("gradient", _first(name, got, want, wrong) + f", bound {allowed.expand(want.shape)[wrong][0].item():.3g}")
    return None


def _first(name: str, got: Tensor, want: Tensor, wrong: Tensor) -> str:
    at = tuple(wrong.nonzero()[0].tolist())
    return f"{name}{list(at)}: {got[at].item()!r} instead of {want[at].item()!r} ({int(wrong.sum())} of {wrong.numel()} values)"
