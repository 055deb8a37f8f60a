"""The modules of flexsn import in one direction, and the package needs neither triton nor a compiler to import."""

import ast
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import flexsn

PACKAGE = Path(flexsn.__file__).parent
ORDER = [
    "signature", "capture", "graph", "blueprint", "plan", "render", "launch", "compile", "run", "ops", "doors", "loops", "scan", "hop",
    "module", "step", "handles", "handle", "lowlevel", "plot", "monitor",
]  # fmt: skip


SUBPACKAGES = sorted(p.parent.name for p in PACKAGE.glob("*/__init__.py"))


def name_of(path):
    """`module`, or `subpackage.module`; a subpackage's own name is that of its `__init__.py`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imports(path):
    """flexsn modules that a file imports, by name."""
    here, found = path.parent.relative_to(PACKAGE.parent).parts, set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            start = ".".join(here[: len(here) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, (start, node.module)))
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {n.removeprefix("flexsn.") for n in found} & NAMES


FILES = [p for p in PACKAGE.glob("**/*.py") if p != PACKAGE / "__init__.py"]
NAMES = {name_of(p) for p in FILES}
MODULES = {name_of(p): imports(p) for p in FILES}


def stage(name):
    if "." in name or name in SUBPACKAGES:
        return len(ORDER)  # after every stage: none imports a subpackage
    stem = name.split("_")[0]
    return ORDER.index(stem) if stem in ORDER else None


def test_no_cycles():
    list(TopologicalSorter(MODULES).static_order())


@pytest.mark.parametrize("name", sorted(MODULES))
def test_direction(name):
    """A stage imports only earlier stages."""
    if stage(name) is None:
        return
    late = {other for other in MODULES[name] if stage(other) is not None and stage(other) > stage(name)}
    assert not late, f"{name} imports {sorted(late)}"


def test_packages_are_shipped():
    listed = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == ["flexsn", *(f"flexsn.{name}" for name in SUBPACKAGES)]


def test_errors_and_opset_stand_alone():
    assert MODULES["errors"] == set() and MODULES["opset"] == set() and MODULES["surrogate"] == {"errors"}


def test_private_names_of_torch_are_in_one_place():
    allowed = {"_compat", "dynamo", "lower"}
    for path in PACKAGE.glob("**/*.py"):
        text = path.read_text()
        if path.stem not in allowed:
            assert "import torch._" not in text and "from torch._" not in text.replace("from torch._ops", ""), path.name


def test_imports_without_triton_and_compiler():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import os; os.environ['PATH'] = '/nowhere'\n"
        "import torch, flexsn\n"
        "x = torch.ones(3, 4)\n"
        "print(flexsn.scan(lambda x, v: (x + v, v), [x], [None], backend='torch').outputs[0].sum().item())\n"
        "assert not any(m.startswith('triton') and sys.modules[m] for m in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "12.0"


def test_public_names():
    assert set(flexsn.__all__) == {
        "FlexSN",
        "ScanResult",
        "__version__",
        "decompose",
        "detach_states",
        "errors",
        "explain",
        "monitor",
        "plot",
        "reset_net",
        "scan",
        "surrogate",
    }
    assert all(hasattr(flexsn, name) for name in flexsn.__all__)
    assert (PACKAGE / "py.typed").exists()
