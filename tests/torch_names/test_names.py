"""The private names of PyTorch that flexsn uses: in one place, in the table, and few."""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

import flexsn
from flexsn._torch.availability import INTERFACES

ROOT = Path(flexsn.__file__).parent.parent
MOST = 76  # names in the table: may only become less (one came with names in profiles: whether a profiler runs has no public form)


def private(name):
    return any(re.match(r"_(?!_)|experimental$", part) for part in name.split("."))


def is_module(name):
    try:
        return name in sys.modules or bool(importlib.util.find_spec(name))
    except ModuleNotFoundError:  # its parent is none
        return False


def dotted(node):
    """`a.b.c` of such an expression, or of `getattr(a.b, "c", None)`; or nothing."""
    if isinstance(node, ast.Attribute) and (start := dotted(node.value)):
        return f"{start}.{node.attr}"
    if isinstance(node, ast.Call) and dotted(node.func) == "getattr" and isinstance(node.args[1], ast.Constant):
        return f"{dotted(node.args[0])}.{node.args[1].value}"
    return node.id if isinstance(node, ast.Name) else ""


def private_names(source):
    """Of PyTorch: those that a source imports, those that it takes from modules that it imports or names, and `torch._C.these`."""
    tree, found, modules = ast.parse(source), set(), {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if is_module(name):
                    modules[alias.asname or alias.name] = name
                else:
                    found.add(name)
        elif isinstance(node, ast.Assign) and dotted(node.value).startswith("torch.") and is_module(dotted(node.value)):
            modules |= {target.id: dotted(node.value) for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        start, _, rest = dotted(node).partition(".")
        if rest and start in modules:
            found.add(f"{modules[start]}.{rest}")
    return {name for name in found if private(name) and not is_module(name)}


def used_names():
    """By name, the files of the package that use it; of names that go on from one another the longest."""
    files = {}
    for path in (ROOT / "flexsn").glob("**/*.py"):
        for name in private_names(path.read_text()):
            files.setdefault(name, set()).add(path.relative_to(ROOT / "flexsn"))
    return {name: paths for name, paths in files.items() if not any(other.startswith(f"{name}.") for other in files)}


LISTED = {name.replace(":", ".") for names in INTERFACES.values() for name in names}
NONE_WITHOUT = {"torch._higher_order_ops.scan.scan"}  # what needs it looks for it
PUBLIC = {"torch._check"}  # and documented
BY_MODULES_LOADED = ("torch._dynamo.compiled_autograd.", "torch.nn.utils.parametrize.")  # taken from there only where they are


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, of a module of Inductor's
def test_they_are_in_one_folder():
    outside = {name: paths for name, paths in used_names().items() if any(path.parts[0] != "_torch" for path in paths)}
    assert outside.keys() <= PUBLIC, outside


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, of a module of Inductor's
def test_they_are_in_the_table():
    """And the table has no others. What a class holds counts with the class."""
    used = used_names().keys() - NONE_WITHOUT - PUBLIC
    within = lambda name, others: any(f"{name}.".startswith(f"{other}.") for other in others)
    assert [name for name in used if not (within(name, LISTED))] == []
    assert [name for name in LISTED if not (within(name, used) or name.startswith(BY_MODULES_LOADED))] == []


def test_they_are_few():
    names = [name for names in INTERFACES.values() for name in names]
    assert len(names) == len(set(names)) == MOST


def test_they_are_seen():
    source = """
import torch
from torch._dynamo.variables import higher_order_ops as dynamo
from torch.overrides import _push_mode, TorchFunctionMode
def f():
    from torch._prims_common import elementwise_dtypes
    functorch = torch._C._functorch
    functorch.depth(getattr(torch._C, "_number", None))
    return dynamo.speculate_subgraph(torch._C._functorch.level(), torch.nn.__name__)
"""
    assert private_names(source) == {
        "torch._dynamo.variables.higher_order_ops.speculate_subgraph", "torch.overrides._push_mode", "torch._prims_common.elementwise_dtypes",
        "torch._C._functorch.level", "torch._C._functorch.depth", "torch._C._number",
    }  # fmt: skip
