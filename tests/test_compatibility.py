"""Internal interfaces of PyTorch that move: said with the versions, and what does not stand on them goes on."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flexsn
from flexsn import _compat, interfaces, lowlevel
from flexsn.errors import BackendUnavailableError, InterfaceWarning

ROOT = Path(flexsn.__file__).parent.parent


@pytest.fixture
def without(monkeypatch):
    """A function that takes an interface out of this PyTorch."""
    interfaces.moved.cache_clear()
    there = interfaces._is_there
    gone = []
    monkeypatch.setattr(interfaces, "_is_there", lambda name: name not in gone and there(name))
    yield gone.append
    interfaces.moved.cache_clear()


def test_everything_is_there_in_the_versions_that_are_known():
    assert [name for names in interfaces.INTERFACES.values() for name in names if not interfaces._is_there(name)] == []
    low, high = (tuple(map(int, v.split("."))) for v in interfaces.KNOWN.split(" to "))
    assert low <= tuple(map(int, re.match(r"(\d+)\.(\d+)", torch.__version__).groups())) <= high


def test_what_is_not_there_is_seen():
    for name in ("torch._nothing:scan", "torch._higher_order_ops.scan:nothing", "torch._C:_functorch.nothing"):
        assert not interfaces._is_there(name)


def test_private_imports_are_in_the_table():
    """What is imported from private modules is in the table, is optional there, or fails at import."""
    text = "".join((ROOT / "flexsn" / name).read_text() for name in ("_compat.py", "inductor.py"))
    modules = set(re.findall(r"^\s*from (torch\.[\w.]+) import", text, re.MULTILINE))
    listed = {name.partition(":")[0] for names in interfaces.INTERFACES.values() for name in names}
    handled = {"torch._higher_order_ops.scan", "torch._higher_order_ops.while_loop"}  # None where PyTorch has none
    at_import = {"torch._ops", "torch.fx.experimental.proxy_tensor"}
    inside = {
        "torch._subclasses.functional_tensor",
        "torch.fx",
        "torch.utils",
        "torch._inductor",
        "torch._inductor.virtualized",
        "torch._C._dynamo",
    }
    assert modules - listed - handled - at_import - inside == set()


@pytest.mark.parametrize("name", ["torch._guards:tracing", "torch._subclasses.fake_tensor:FakeTensorMode"])
def test_a_moved_interface_of_the_kernels(without, counts, name):
    without(name)
    core = lambda x, v: (x + v, v * 0.5 + x)
    x = torch.rand(3, 4)
    want = flexsn.scan(core, [x], [None], backend="torch").outputs[0]
    place = re.escape(name.replace(":", "."))
    with (
        pytest.warns(
            InterfaceWarning, match=rf"PyTorch {re.escape(torch.__version__)} has no `{place}`, on which flexsn {flexsn.__version__}"
        ),
        pytest.raises(BackendUnavailableError, match=r"2\.11 to 2\.13"),
    ):
        flexsn.scan(core, [x], [None], backend="cpp")
    with pytest.warns(flexsn.errors.FallbackWarning, match=place):
        assert torch.equal(flexsn.scan(core, [x], [None]).outputs[0], want)
    with pytest.raises(BackendUnavailableError):
        flexsn.scan(core, [x], [None], strict=True)


def test_a_moved_interface_of_the_low_level(without):
    without("torch._functorch.aot_autograd:aot_export_joint_simple")
    with pytest.warns(InterfaceWarning), pytest.raises(BackendUnavailableError, match=r"flexsn\.lowlevel: PyTorch"):
        lowlevel.generate_inference_graph(lambda x: x + 1, [torch.rand(3)])


def test_it_is_said_once(without):
    without("torch._guards:tracing")
    with pytest.warns(InterfaceWarning) as said:
        first, second = interfaces.moved("fused kernels"), interfaces.moved("fused kernels")
    assert first == second and len(said) == 1


MOVED = """
import warnings
import {module} as module
del module.{name}
import torch, flexsn
x = torch.rand(3, 4)
core = lambda x, v: (x + v, v * 0.5 + x)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    y = flexsn.scan(core, [x], [None]).outputs[0]
assert torch.equal(y, flexsn.scan(core, [x], [None], backend="torch").outputs[0])
print(*sorted(w.category.__name__ for w in said if w.category.__module__ == "flexsn.errors"))
"""


@pytest.mark.parametrize(("module", "name", "said"), [
    ("torch._subclasses.fake_tensor", "DynamicOutputShapeException", "FallbackWarning InterfaceWarning\n"),
    pytest.param("torch.utils._python_dispatch", "_disable_current_modes", "FallbackWarning InterfaceWarning\n", marks=pytest.mark.slow),
])  # fmt: skip
def test_flexsn_imports_and_runs_without(tmp_path, module, name, said):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FLEXSN_CACHE_DIR": str(tmp_path)}
    code = MOVED.format(module=module, name=name)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == said


@pytest.mark.parametrize("name", ["set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy"])
def test_functions_that_dynamo_cannot_be_told_of_stay_as_they_are(monkeypatch, name):
    from torch._C._dynamo import eval_frame

    monkeypatch.delattr(eval_frame, name)
    function = lambda: 7
    assert _compat.unseen_by_dynamo(function) is function and function() == 7


def test_the_oldest_and_the_newest_are_those_of_the_package():
    project = (ROOT / "pyproject.toml").read_text()
    low, high = interfaces.KNOWN.split(" to ")
    assert f'"torch>={low}"' in project and f"PyTorch {low} to {high}" in (ROOT / "README.md").read_text()
    assert importlib.import_module("torch").__version__.startswith(high) or importlib.import_module("torch").__version__.startswith(low)
