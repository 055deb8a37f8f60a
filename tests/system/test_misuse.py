"""Every misuse gives the right numbers, or an error that says what to do. The rows are in `tests/misuses`."""

import collections
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import folders
import misuses
import pytest
import torch
from misuses import Outcome, Row, gives, passes_on, raises

import flexsn
from flexsn import errors
from flexsn._operator import fallback

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import misuse_table  # noqa: E402  (tools/ is not a package)

ROWS = misuses.rows()
PATIENCE = 300  # seconds that a row may take on a busy machine before it counts as a hang
SAFE = [
    pytest.param(row.name, backend, marks=[pytest.mark.slow] * row.slow, id=f"{row.name}-{backend}")
    for row in ROWS.values()
    if not row.risky
    for backend in row.outcomes
]
RISKY = [(row.name, backend) for row in ROWS.values() if row.risky for backend in row.outcomes]


def judge(row: Row, backend: str) -> None:
    """Do the misuse; anything but the row's outcome is an assertion that fails."""
    want = row.outcomes[backend]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            result = row.run(backend)
        except BaseException as error:  # judged by the row, SystemExit and the like too
            check_error(error, want)
            return
    assert want.kind in ("gives", "falls back"), f"no error, but {result}"
    assert_same(*result)
    check_warnings([w.message for w in told], want)


def check_error(error: BaseException, want: Outcome) -> None:
    if want.kind not in ("raises", "passes on"):
        raise AssertionError(f"{type(error).__name__}: {error}") from error
    assert type(error) is want.error, f"{type(error).__name__}: {error}"
    assert isinstance(error, errors.FlexSNError) == (want.kind == "raises")
    said = "\n".join([str(error), *getattr(error, "__notes__", ())])
    for part in want.parts:
        assert part in said, f"{part!r} is not in: {said}"


def check_warnings(told: list[Warning], want: Outcome) -> None:
    """A call that falls back says so, and why; nothing else warns."""
    fallbacks = [str(w) for w in told if isinstance(w, errors.FallbackWarning)]
    assert len(fallbacks) == len(told), told
    assert bool(fallbacks) == (want.kind == "falls back"), fallbacks
    for part in want.parts if fallbacks else ():
        assert part in fallbacks[0]


def assert_same(got, want) -> None:
    got, want = list(misuses.tensors(got)), list(misuses.tensors(want))
    assert got and len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        if isinstance(w, torch.Tensor):
            assert type(g) is torch.Tensor
            torch.testing.assert_close(g, w, rtol=1e-6, atol=1e-6, equal_nan=True)
        else:
            assert g == w, (g, w)


@pytest.fixture
def patience():
    """What hangs fails."""

    def give_up(*_):
        raise TimeoutError(f"no answer after {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("name", "backend"), SAFE)
def test_misuse(name, backend, patience):
    judge(ROWS[name], backend)


@pytest.mark.slow
def test_misuses_that_might_crash():
    """In a process of their own: what a crash or a hang keeps from reporting is missing from the report."""
    code = "import test_misuse; test_misuse.report_risky()"
    path = f"{folders.PATH}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=2 * PATIENCE
    )  # fmt: skip
    report = dict(json.loads(line) for line in done.stdout.splitlines())
    assert report == {f"{name} {backend}": "as expected" for name, backend in RISKY}, done.stderr[-2000:]
    assert done.returncode == 0


def report_risky() -> None:
    for name, backend in RISKY:
        fallback._warned.clear()
        try:
            judge(ROWS[name], backend)
        except AssertionError as error:
            print(json.dumps([f"{name} {backend}", str(error)]), flush=True)
        else:
            print(json.dumps([f"{name} {backend}", "as expected"]), flush=True)


# --- the table ---------------------------------------------------------------------------------------------------------------
def test_the_table_is_whole():
    assert len(ROWS) >= 90
    assert len({row.what for row in ROWS.values()}) == len(ROWS), "two rows say the same"
    for row in ROWS.values():
        assert set(row.outcomes) >= {"auto", "cpp", "torch"}, row.name
        for outcome in row.outcomes.values():
            ours = outcome.error is not None and issubclass(outcome.error, errors.FlexSNError)
            assert ours == (outcome.kind in ("raises", "falls back")), row.name
            assert outcome.parts or outcome.kind != "raises", f"{row.name}: an error of flexsn says what to do"
    kinds = collections.Counter(row.outcomes["auto"].kind for row in ROWS.values())
    assert min(kinds[k] for k in ("gives", "raises", "falls back", "passes on")) > 20, kinds
    assert sum("triton" in row.outcomes for row in ROWS.values()) > 60


def test_every_error_of_the_table_has_a_class_of_its_own():
    found = {o.error for row in ROWS.values() for o in row.outcomes.values() if o.kind in ("raises", "falls back")}
    assert errors.FlexSNError not in found and errors.CannotFuseError not in found


def test_the_page_is_current():
    assert misuse_table.page(ROWS.values()) == (ROOT / "docs" / "misuse.md").read_text(), "run `python tools/misuse_table.py --write`"


# --- the judge ------------------------------------------------------------------------------------------------------------------
def warns():
    warnings.warn("flexsn runs the eager loop: because", errors.FallbackWarning, stacklevel=1)
    return torch.ones(2), torch.ones(2)


def fails(error):
    raise error


ODD = errors.OperandTypeError("is odd", hint="Make it even.")
WRONG = {
    "a wrong number": (lambda: (torch.ones(2), torch.zeros(2)), gives("")),
    "a wrong dtype": (lambda: (torch.ones(2).double(), torch.ones(2)), gives("")),
    "a wrong shape": (lambda: (torch.ones(1), torch.ones(2)), gives("")),
    "a subclass": (lambda: (torch.nn.Parameter(torch.ones(2)), torch.ones(2)), gives("")),
    "a result too few": (lambda: ([torch.ones(2)], [torch.ones(2)] * 2), gives("")),
    "nothing": (lambda: ([], []), gives("")),
    "an error": (lambda: fails(ODD), gives("")),
    "no error": (lambda: (torch.ones(2), torch.ones(2)), raises(errors.OperandTypeError)),
    "an error of another class": (lambda: fails(ODD), raises(errors.OperandCountError)),
    "an error that does not say what to do": (lambda: fails(errors.OperandTypeError("is odd")), raises(errors.OperandTypeError, "Make it")),
    "an error of Python's": (lambda: fails(TypeError("is odd")), raises(errors.OperandTypeError)),
    "an error of flexsn in place of the core's": (lambda: fails(ODD), passes_on(errors.OperandTypeError)),
    "a silent fallback": (lambda: (torch.ones(2), torch.ones(2)), misuses.falls_back(errors.RandomOpError)),
    "a fallback that nobody expects": (warns, gives("")),
    "a fallback for another reason": (warns, misuses.falls_back(errors.RandomOpError, "random")),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_judge_sees(what):
    run, outcome = WRONG[what]
    with pytest.raises(AssertionError):
        judge(Row("", what, lambda backend: run(), {"auto": outcome}), "auto")


def test_a_neuron_still_runs_after_all_this():
    got = flexsn.scan(misuses.leaky, [misuses.X], [misuses.V], backend="cpp")
    assert_same([*got.outputs, *got.states], misuses.loop(misuses.leaky, [misuses.X], [misuses.V]))
