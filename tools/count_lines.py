"""Count the lines of code of the engine and of the package: `python tools/count_lines.py`, part of `make lint`.

Blank lines, comments and docstrings do not count. `package` and `engine` are Python; the engine is the package without neurons,
`lowlevel`, pictures and monitors, reports, `interchange` and the command line. `--folders` lists every directory. The exit code
is 1 where a ceiling is exceeded: a change that removes code lowers the ceiling, one that raises it says why.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "flexsn"
AROUND = {"neurons", "lowlevel", "_viz", "_report", "interchange", "_cli"}  # what stands on the engine
CEILINGS = {"lowlevel": 999, "engine": 16_020, "package": 22_776, "C++": 849}
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that docstrings take up."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node, clean=False):
            text = node.body[0]
            found.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return found


def python_lines(text: str) -> int:
    """Return how many lines of Python source hold code."""
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - docstring_lines(ast.parse(text)))


def cpp_lines(text: str) -> int:
    """Return how many lines of C++ source hold code."""
    bare = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    return sum(bool(line.split("//")[0].strip()) for line in bare.splitlines())


def lines_by_folder(package: Path) -> Counter[str]:
    """Return the lines of Python of every directory of a package, and of every file at its top."""
    found: Counter[str] = Counter()
    for path in sorted(package.rglob("*.py")):
        found[path.relative_to(package).parts[0]] += python_lines(path.read_text())
    return found


def main() -> int:
    """Print the counts; return 1 if one exceeds its ceiling."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", action="store_true", help="list every directory, and every file at the top")
    folders = lines_by_folder(PACKAGE)
    if parser.parse_args().folders:
        for name, count in folders.items():
            print(f"{count:6,} {name}")
    found = {
        "lowlevel": folders["lowlevel"],
        "engine": sum(count for name, count in folders.items() if name not in AROUND),
        "package": folders.total(),
        "C++": sum(cpp_lines(path.read_text()) for path in PACKAGE.rglob("*") if path.suffix in (".h", ".cpp")),
    }
    for name, count in found.items():
        print(f"{name}: {count:,} lines of code, at most {CEILINGS[name]:,}")
    return int(any(count > CEILINGS[name] for name, count in found.items()))


if __name__ == "__main__":
    sys.exit(main())
