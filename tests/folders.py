"""Where the project, its tests and their modules lie: what a process needs on its path to import a test module."""

import os
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
ALL = [TESTS, *sorted({path.parent for path in TESTS.glob("*/test_*.py")})]
PATH = os.pathsep.join(map(str, [ROOT, *ALL]))  # of `PYTHONPATH`
