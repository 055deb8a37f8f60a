"""Many cases in one go: labels in, verdicts and statistics out. Used by tests/system/test_fuzz.py and tools/fuzz.py."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from . import batch
from .case import Case
from .check import Failure, check, eager_error, fused
from .generate import generate
from .shrink import shrink

# what PyTorch refuses, in the eager loop
NOT_RUN = ("ZeroDivisionError", "derivative for", "a bool tensor is not supported", "can't be cast to the desired output type")


@dataclass
class Report:
    """What came of a run.

    Attributes:
        verdicts: numbers of cases: ok, refused, not run (PyTorch itself raises), and kinds of failures.
        failures: the failing cases.
        ops: how often each closed op was drawn.
    """

    verdicts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[Case, Failure]] = field(default_factory=list)
    ops: Counter[str] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    longest: int = 0

    def add(self, case: Case, verdict: Failure | str) -> None:
        self.verdicts[verdict if isinstance(verdict, str) else verdict.kind] += 1
        self.ops.update(line.op for line in case.lines if line.op)
        self.dtypes.update({str(o.values.dtype) for o in case.operands if o.values is not None})
        self.longest = max(self.longest, len(case.lines))
        if isinstance(verdict, Failure) and verdict.kind != "refused":
            self.failures.append((case, verdict))

    def __str__(self) -> str:
        verdicts = ", ".join(f"{n} {v}" for v, n in self.verdicts.most_common())
        return f"{self.verdicts.total()} cores: {verdicts}; {len(self.ops)} closed ops, up to {self.longest} lines"


def run(
    labels: Sequence[str], backend: str = "cpp", flags: Sequence[str] | None = batch.FAST_BUILD, depth: int = 30
) -> Iterator[tuple[Case, Failure | str]]:
    """Judge the cases of the labels. `flags`: of one library for all of them; None: kernels one by one, as users get them."""
    cases = [generate(label, depth) for label in labels]
    if backend == "cpp" and flags is not None:
        build(cases, flags)
    for case in cases:
        yield case, verdict(case, backend)


def build(cases: Sequence[Case], flags: Sequence[str]) -> None:
    """The kernels of all cases in one library."""
    with batch.deferred() as kernels:
        for case in cases:
            with contextlib.suppress(Exception):  # judged later, when it is raised again
                fused(case, "cpp")
    batch.build(kernels, flags)


def verdict(case: Case, backend: str) -> Failure | str:
    try:
        return check(case, backend) or "ok"
    except RuntimeError as error:
        said = eager_error(case)  # by itself, without the oracle
        if not any(text in str(error) and text in said for text in NOT_RUN):
            raise
        return "not run"


def smallest(case: Case, failure: Failure, backend: str = "cpp", seconds: float = 120.0) -> Case:
    """The case, shrunk."""

    def fails(candidate: Case) -> bool:
        try:
            if backend == "cpp":
                build([candidate], batch.FAST_BUILD)
            found = check(candidate, backend)
        except Exception:  # not a case: PyTorch refuses it
            return False
        return found is not None and found.kind == failure.kind

    return shrink(case, fails, seconds)
