"""The counter of lines of code counts what `tools/count_lines.py` says: no blank lines, comments or docstrings."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import count_lines

PYTHON = '''"""A module,
of two lines."""

# a comment
import os  # and one beside code


class Some:
    """Does."""

    text = """no docstring:
# a string"""

    def method(self):
        """Return."""
        return (  # over
            # a comment inside

            os.name
        )
'''
CPP = """// a comment
/* over
   lines */
#include "tile.h"  // beside code

int x; /* beside code */
"""


def test_python():
    assert count_lines.python_lines(PYTHON) == 8
    assert count_lines.python_lines('"""Alone."""\n') == count_lines.python_lines("") == 0


def test_cpp():
    assert count_lines.cpp_lines(CPP) == 2


def test_folders(tmp_path):
    (tmp_path / "_ir").mkdir()
    for name, text in (("_ir/ops.py", "a = 1\nb = 2\n"), ("_ir/graph.py", "c = 3\n"), ("scan.py", "d = 4\n")):
        (tmp_path / name).write_text(text)
    assert count_lines.lines_by_folder(tmp_path) == {"_ir": 3, "scan.py": 1}


def test_every_directory_is_counted_on_one_side():
    assert set(count_lines.lines_by_folder(count_lines.PACKAGE)) >= count_lines.AROUND
