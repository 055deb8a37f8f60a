"""The modules of flexsn import in one direction, and the package needs neither triton nor a compiler to import."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import flexsn

PACKAGE = Path(flexsn.__file__).parent
ORDER = [  # directories and files at the top; each imports only what stands before it
    "errors", "_version", "_torch", "_ir", "_surrogate_arguments", "surrogate", "_capture", "_captured", "_plan", "_codegen", "_runtime", "_program", "_operator", "_torch_compile",
    "_over_time", "scan", "module", "neurons", "lowlevel", "_viz", "_report", "interchange", "_cli", "__main__",
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
            names = {f"{module}.{alias.name}" for alias in node.names}
            found |= names if {n.removeprefix("flexsn.") for n in names} <= NAMES else {module, *names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {n.removeprefix("flexsn.") for n in found} & NAMES


FILES = [p for p in PACKAGE.glob("**/*.py") if p != PACKAGE / "__init__.py"]
NAMES = {name_of(p) for p in FILES}
MODULES = {name_of(p): imports(p) for p in FILES}


def stage(name):
    return ORDER.index(name.split(".")[0])


def test_no_cycles():
    list(TopologicalSorter(MODULES).static_order())


@pytest.mark.parametrize("name", sorted(MODULES))
def test_direction(name):
    """A stage imports itself and earlier stages."""
    late = {other for other in MODULES[name] if stage(other) > stage(name)}
    assert not late, f"{name} imports {sorted(late)}"


def test_every_stage_is_there():
    assert {name.split(".")[0] for name in MODULES} == set(ORDER)


def test_private_directories_are_marked():
    assert {name for name in SUBPACKAGES if not name.startswith("_")} == {"neurons", "lowlevel", "interchange"}
    assert len([p for p in FILES if p.parent == PACKAGE]) + 1 <= 8


def test_files_and_directories_stay_small():
    """At most 400 lines in a file. At most 12 modules in a directory, beside its `__init__.py`."""
    assert [name_of(p) for p in FILES if len(p.read_text().splitlines()) > 400] == []
    counts = Counter(p.parent.name for p in FILES if p.name != "__init__.py")
    assert {name: count for name, count in counts.items() if count > 12} == {}


def test_packages_are_shipped():
    listed = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(p.parent.relative_to(PACKAGE.parent).parts) for p in FILES}
    assert sorted(listed) == sorted(folders)


def test_errors_and_opset_stand_alone():
    assert (
        MODULES["errors"] == set()
        and MODULES["_ir.ops"] == set()
        and MODULES["surrogate"] == {"errors", "_surrogate_arguments", "_torch.autograd"}
    )
    assert MODULES["_surrogate_arguments"] == {"_torch.transforms", "errors"}
    assert [n for n, found in MODULES.items() if "_surrogate_arguments" in found] == ["surrogate"]


def test_neurons_stand_on_the_module_and_the_surrogates():
    below = set().union(*(found for name, found in MODULES.items() if name.startswith("neurons")))
    others = {n for n in below if not n.startswith("neurons")}
    private = {"_torch.compiling", "_torch.transforms", "_capture.arguments", "_capture.signature", "_captured.core_owner"}
    assert others == private | {"errors", "module", "surrogate"}


def test_the_peers_of_interchange_have_a_file_each():
    """Only `convert` knows the converters, by name: nothing imports another library before a model of it is there."""
    peers = {name for name in NAMES if name.startswith("interchange.peer_")}
    assert peers == {"interchange.peer_norse", "interchange.peer_snntorch", "interchange.peer_spikingjelly"}
    assert not {name for name, found in MODULES.items() if found & peers}


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "tools"])
def test_what_stands_beside_the_package_imports_names_that_it_has(folder):
    """Tests run some of these files alone: one that is run by hand must not break unseen."""
    nodes = [node for path in (PACKAGE.parent / folder).glob("**/*.py") for node in ast.walk(ast.parse(path.read_text()))]
    found = {
        (n.module, a.name)
        for n in nodes
        if isinstance(n, ast.ImportFrom) and n.module and n.module.split(".")[0] == "flexsn"
        for a in n.names
    }
    assert found
    for module, name in sorted(found):
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


def test_importing_flexsn_imports_no_other_library():
    others = ("spikingjelly", "snntorch", "norse", "nir", "nirtorch", "matplotlib")
    code = f"import sys, flexsn; print([m for m in {others} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert done.stdout.strip() == "[]"


def test_private_names_of_torch_stand_on_nothing():
    """That they are in one place, `tests/torch_names/test_names.py` sees."""
    below = set().union(*(found for name, found in MODULES.items() if name.startswith("_torch.")))
    assert {name for name in below if not name.startswith("_torch.")} == {"errors", "_version"}


def test_what_silences_a_check_says_why():
    """Beside it, in a few words: a comment that goes on after the rules that it names."""
    rules = r"\[[\w, -]+\]", r": [A-Z]+\d+(?:, [A-Z]+\d+)*"
    silences = re.compile(rf"# type: ignore(?:{rules[0]})?|# (?:ruff: )?noqa(?:{rules[1]})?|except(?: (?:Base)?Exception\b[^:#]*)?:")
    files = [p for folder in ("flexsn", "benchmarks", "tools", "examples") for p in (PACKAGE.parent / folder).glob("**/*.py")]
    found = [(p.name, line) for p in files for line in p.read_text().splitlines() if silences.search(line)]
    assert len(found) > 50
    assert [(name, line) for name, line in found if not re.search(r"[a-z]{3}", silences.split(line)[-1])] == []


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


def test_dtensor_is_imported_by_who_uses_it():
    code = "import sys, torch\nbefore = set(sys.modules)\nimport flexsn\nprint(*sorted(set(sys.modules) - before))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "flexsn._operator.dtensor" in loaded and not [m for m in loaded if m.startswith(("torch.distributed.tensor", "torch._dynamo"))]


def test_public_names():
    zoo = {
        n
        for n, neuron in vars(flexsn.neurons).items()
        if isinstance(neuron, type) and neuron not in (flexsn.neurons.Neuron, flexsn.neurons.Bounded)
    }
    assert set(flexsn.__all__) == zoo | {
        "Delay",
        "FlexSN",
        "PerStep",
        "Recurrent",
        "ScanResult",
        "__version__",
        "build",
        "convert",
        "decompose",
        "detach_states",
        "get_states",
        "set_states",
        "errors",
        "explain",
        "from_nir",
        "lowlevel",
        "monitor",
        "neuron_parallel",
        "plot",
        "neurons",
        "over_time",
        "reset_net",
        "scan",
        "surrogate",
        "to_nir",
    }
    assert all(hasattr(flexsn, name) for name in flexsn.__all__)
    assert dir(flexsn) == sorted(flexsn.__all__)
    assert (PACKAGE / "py.typed").exists()
