"""The error of every approximated function, on a sample: within the bounds that docs/numerics.md promises."""

import sys
from pathlib import Path

import pytest
from fuzzing.oracle import APPROXIMATE, single

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import ulp_table


def own(name, dtype):
    """One op as flexsn computes it: from a library of all of them, with the bits of the kernel that users get."""
    return lambda *args: single(name, *args) if name in APPROXIMATE else ulp_table.kernel(name, dtype)(*args)


@pytest.fixture(scope="module")
def rows():
    return {name: ulp_table.measure(name, 300, own) for name, f in ulp_table.FUNCTIONS.items() if not f.expensive}


def test_every_approximated_function_is_in_the_table():
    assert set(ulp_table.FUNCTIONS) - {"fma"} == APPROXIMATE - {"fmod"}
    text = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()
    assert all(f"| `{name}` |" in text for name in ulp_table.FUNCTIONS)


def test_functions_keep_their_bounds(rows):
    assert not {name: (row.flexsn, row.worst) for name, row in rows.items() if not row.holds()}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, f in ulp_table.FUNCTIONS.items() if f.expensive])
def test_special_functions_keep_their_bounds(name):
    row = ulp_table.measure(name, 1500)
    assert row.holds(), (row.flexsn, row.eager, row.worst)


def test_the_measure_sees_an_error():
    assert not ulp_table.measure("exp", 300, lambda name, dtype: lambda *a: own(name, dtype)(*a) * (1 + 4e-7)).holds()
