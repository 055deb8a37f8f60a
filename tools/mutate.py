"""Change one thing in a stage of the engine, run the tests of that stage, and list the changes that no test notices.

`python tools/mutate.py` takes 100 mutants of `_ir`, `_plan` and `_codegen`; `python tools/mutate.py _plan/plan.py --count 20 --seed 3`
others. A mutant is one turned comparison, operator, condition or constant, one statement or result left out, or one operator in a
text that becomes generated source. It runs in a copy of the project. Some mutants mean the same as the original: read what is listed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("_ir", "_plan", "_codegen")
GOLDEN = ["tests/codegen/test_render_cpp.py", "tests/codegen/test_triton.py::test_golden"]
PARITY = ["tests/operator/test_parity.py::test_final_states", "tests/operator/test_parity.py::test_params_of_different_shapes"]
TESTS = {  # of a file or a directory of the package; the longest name that fits counts
    "_ir": ["tests/ir/test_graph.py", "tests/ir/test_ops.py", *GOLDEN],
    "_plan": ["tests/plan", *GOLDEN, *PARITY],
    "_codegen": ["tests/ir/test_ops.py", *GOLDEN, *PARITY],
    "_codegen/triton_frame.py": ["tests/codegen/test_triton.py", "tests/codegen/test_triton_ops.py"],
    "_codegen/triton.py": ["tests/codegen/test_triton.py", "tests/codegen/test_triton_ops.py"],
    "_codegen/triton_ops.py": ["tests/codegen/test_triton_ops.py"],
    "_program": ["tests/program", *PARITY],
    "_runtime/disk_cache.py": ["tests/runtime/test_launch_cpp.py", "tests/system/test_security.py", "tests/system/test_faults.py"],
}
LIMIT = 600  # seconds that the tests of one mutant may take

TURNED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
IN_TEXT = {" + ": " - ", " - ": " + ", " * ": " + ", " < ": " <= ", " >= ": " > ", " == ": " != ", " && ": " || ", " & ": " | ", "0": "1"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    file: str
    number: int
    line: int
    what: str


def variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield what may stand in the place of a node, each with a few words."""
    if type(node) in TURNED:
        yield f"{type(node).__name__} -> {TURNED[type(node)].__name__}", TURNED[type(node)]()
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        turned = copy.copy(node)
        turned.test = ast.UnaryOp(ast.Not(), node.test)
        yield "condition negated", turned
    elif isinstance(node, ast.Expr | ast.Assign | ast.AugAssign):
        yield "statement left out", ast.Pass()
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "result left out", ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        other = not node.value if isinstance(node.value, bool) else node.value + 1
        yield f"{node.value} -> {other}", ast.Constant(other)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        for old, new in IN_TEXT.items():
            if old in node.value:
                yield f"{old!r} -> {new!r} in a text", ast.Constant(node.value.replace(old, new, 1))


def is_passed_over(node: ast.AST) -> bool:
    """Return whether a node computes nothing: messages of errors, imports, docstrings, assertions, definitions without a body."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return text or isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.Assert)


def places(node: ast.AST, line: int = 0) -> Iterator[tuple[object, str | int, ast.AST, int]]:
    """Yield every node below one, with what holds it, under which name or number, and its line; annotations are left out."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        held = [(value, k, v) for k, v in enumerate(value)] if isinstance(value, list) else [(node, name, value)]
        for holder, key, child in held:
            if isinstance(child, ast.AST) and not is_passed_over(child):
                at = getattr(child, "lineno", line)
                yield holder, key, child, at
                yield from places(child, at)


def changes(tree: ast.AST) -> list[tuple[object, str | int, int, str, ast.AST]]:
    """Return what may be put where: holder, name or number there, line, a few words, the other node."""
    return [(holder, key, line, what, new) for holder, key, node, line in places(tree) for what, new in variants(node)]


def mutants(file: str, source: str) -> list[Mutant]:
    """Return the mutants of a source text."""
    return [Mutant(file, k, line, what) for k, (_, _, line, what, _) in enumerate(changes(ast.parse(source)))]


def mutated(source: str, number: int) -> str:
    """Return a source text with one change."""
    tree = ast.parse(source)
    holder, key, _, _, new = changes(tree)[number]
    if isinstance(holder, list):
        holder[int(key)] = new
    else:
        setattr(holder, str(key), new)
    return ast.unparse(ast.fix_missing_locations(tree))


def tests_of(file: str) -> list[str]:
    """Return the tests of the table that belong to a file of the package."""
    return TESTS[max((name for name in TESTS if file.startswith(name)), key=len)]


def outcome(folder: Path, tests: list[str], limit: float = LIMIT) -> str:
    """Run tests in a copy of the project; return "passed", or how they noticed: "failed", "does not import", "crashed", "hangs"."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_WAIT_POLICY": "passive"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode < 0:
        return "crashed"
    said = {0: "passed", 1: "failed", 2: "does not import", 3: "failed", 4: "does not import"}  # 4: the import of conftest.py failed
    if done.returncode not in said or (done.returncode == 4 and "conftest" not in done.stderr):
        raise SystemExit(f"pytest did not run {' '.join(tests)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return said[done.returncode]


def main() -> int:
    """Print each mutant that no test notices, and how many were noticed; return 0 if all were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=STAGES, help=f"files or directories of the package (default: {' '.join(STAGES)})")
    parser.add_argument("--count", type=int, default=100, help="mutants (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    paths = [ROOT / "flexsn" / name for name in arguments.files]
    chosen = sorted({p for path in paths for p in (path.rglob("*.py") if path.is_dir() else [path]) if p.name != "__init__.py"})
    every = [m for p in chosen for m in mutants(str(p.relative_to(ROOT / "flexsn")), p.read_text())]
    sample = random.Random(arguments.seed).sample(every, min(arguments.count, len(every)))
    with tempfile.TemporaryDirectory(prefix="flexsn-mutants-") as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for k in range(arguments.jobs):
            copies.put(Path(shutil.copytree(ROOT, Path(folder, str(k)), ignore=shutil.ignore_patterns(".*", "build", "site"))))
        for tests in {tuple(tests_of(m.file)) for m in sample}:
            if (found := outcome(Path(folder, "0"), list(tests))) != "passed":
                raise SystemExit(f"without a mutant: {found}: {' '.join(tests)}")

        def tried(mutant: Mutant) -> str:
            here = copies.get()
            path = here / "flexsn" / mutant.file
            path.write_text(mutated(path.read_text(), mutant.number))
            found = outcome(here, tests_of(mutant.file))
            shutil.copy(ROOT / "flexsn" / mutant.file, path)
            copies.put(here)
            return found

        with ThreadPoolExecutor(arguments.jobs) as pool:
            missed = []
            for mutant, found in zip(sample, pool.map(tried, sample), strict=True):
                if found == "passed":
                    missed.append(mutant)
                    print(f"NOT NOTICED: flexsn/{mutant.file}:{mutant.line}: {mutant.what}", flush=True)
    print(f"{len(sample) - len(missed)} of {len(sample)} mutants noticed, of {len(every)} in {len(chosen)} files (seed {arguments.seed})")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
