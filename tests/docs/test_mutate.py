"""The mutation tool: what it changes, and how it tells that a test noticed."""

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import mutate
import pytest

SOURCE = '''"""Of one module."""

def plan(n: int, flag: bool = True) -> str:
    """Return a text."""
    if n < 2 and flag:
        raise ValueError("n < 2 is too few")
    return f"a + {n}"
'''


def test_every_mutant_is_one_change():
    made = mutate.mutants("some.py", SOURCE)
    texts = [mutate.mutated(SOURCE, m.number) for m in made]
    assert {m.what for m in made} == {
        "True -> False", "condition negated", "And -> Or", "Lt -> LtE", "2 -> 3", "result left out", "' + ' -> ' - ' in a text"
    }  # fmt: skip
    assert len(set(texts)) == len(made) and ast.unparse(ast.parse(SOURCE)) not in texts
    assert all("n < 2 is too few" in text and '"""Return a text."""' in text for text in texts)
    assert "f'a - {n}'" in texts[-1] and made[-1].line == 7


@pytest.mark.slow
def test_outcomes(tmp_path):
    text = "import os, time, pytest\n" + "\n".join(
        f"def test_{name}(): {act}"
        for name, act in {"passes": "pass", "fails": "assert False", "dies": "os.abort()", "sleeps": "time.sleep(60)"}.items()
    )
    (tmp_path / "test_it.py").write_text(text)
    (tmp_path / "test_broken.py").write_text("import not_there")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n  gpu\n")
    found = [mutate.outcome(tmp_path, [f"test_it.py::test_{name}"], 30) for name in ("passes", "fails", "dies")]
    assert found == ["passed", "failed", "crashed"]
    assert mutate.outcome(tmp_path, ["test_it.py::test_sleeps"], 3) == "hangs"
    assert mutate.outcome(tmp_path, ["test_broken.py"], 30) == "does not import"


def test_the_table_names_files_that_are_there():
    for name, tests in mutate.TESTS.items():
        assert (mutate.ROOT / "flexsn" / name).exists(), name
        assert all((mutate.ROOT / test.split("::")[0]).exists() for test in tests), name
    assert mutate.tests_of("_codegen/triton.py") != mutate.tests_of("_codegen/cpp.py") == mutate.TESTS["_codegen"]
