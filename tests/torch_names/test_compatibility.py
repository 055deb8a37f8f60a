"""Internal interfaces of PyTorch that move: said with the versions, and what does not stand on them goes on."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flexsn
from flexsn import lowlevel
from flexsn._torch import availability as interfaces
from flexsn._torch.compiling import unseen_by_dynamo
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, of a module of Inductor's
def test_everything_is_there_in_the_versions_that_are_known():
    groups = [names for group, names in interfaces.INTERFACES.items() if group != interfaces.GPU or torch.backends.cuda.is_built()]
    assert [name for names in groups for name in names if not interfaces._is_there(name)] == []
    low, high = (tuple(map(int, v.split("."))) for v in interfaces.KNOWN.split(" to "))
    assert low <= tuple(map(int, re.match(r"(\d+)\.(\d+)", torch.__version__).groups())) <= high


def test_what_is_not_there_is_seen():
    for name in ("torch._nothing:scan", "torch._higher_order_ops.scan:nothing", "torch._C:_functorch.nothing"):
        assert not interfaces._is_there(name)


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
        pytest.raises(BackendUnavailableError, match=f"it knows PyTorch {interfaces.KNOWN}"),
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


def test_a_moved_interface_of_a_step(without):
    """What takes an ATen graph apart stands on the interfaces of the kernels too."""
    graph = lowlevel.generate_inference_graph(lambda x: x + 1, [torch.rand(3)])
    interfaces.moved.cache_clear()
    without("torch._decomp:decomposition_table")
    with pytest.warns(InterfaceWarning), pytest.raises(BackendUnavailableError, match="decomposition_table"):
        lowlevel.generate_triton_code_str(graph, "core")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("backend", ["auto", "cpp", "torch"])
def test_a_moved_interface_of_dynamo(without, backend):
    """The call runs between compiled parts, as it runs uncompiled."""
    without("torch._dynamo.variables.higher_order_ops:speculate_subgraph")
    torch._dynamo.reset()
    x, neuron = 3 * torch.rand(6, 5), flexsn.LIF(backend=backend)
    compiled = torch.compile(lambda x: neuron(x * 2.0) + 1.0, backend="aot_eager")
    with pytest.warns(InterfaceWarning, match="speculate_subgraph"):
        found = compiled(x)
    want = flexsn.LIF(backend=backend)(x * 2.0) + 1.0
    assert torch.equal(found, want) and want.std() > 0
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs the call uncompiled"):
        torch.compile(neuron, backend="aot_eager", fullgraph=True)(x)


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
    ("torch._subclasses.fake_tensor", "FakeTensorMode", "FallbackWarning InterfaceWarning\n"),
    pytest.param("torch._decomp", "decomposition_table", "FallbackWarning InterfaceWarning\n", marks=pytest.mark.slow),
    pytest.param("torch.utils._python_dispatch", "_disable_current_modes", "FallbackWarning InterfaceWarning\n", marks=pytest.mark.slow),
])  # fmt: skip
def test_flexsn_imports_and_runs_without(tmp_path, module, name, said):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FLEXSN_CACHE_DIR": str(tmp_path)}
    code = MOVED.format(module=module, name=name)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == said


NOTHING = """
import builtins, torch
gone, plain = {gone}, builtins.__import__

def without(name, globals=None, locals=None, fromlist=(), level=0):
    if globals and str(globals.get("__name__")).startswith("flexsn") and (hidden := [n for n in fromlist or () if f"{{name}}.{{n}}" in gone]):
        missed.extend(hidden)
        raise ImportError(f"cannot import name {{hidden[0]}}")
    return plain(name, globals, locals, fromlist, level)

missed, builtins.__import__ = [], without
import flexsn
flexsn.LIF(backend="torch")(torch.rand(4, 3, requires_grad=True)).sum().backward()
print(*missed)
"""


def test_flexsn_imports_with_none_of_them():
    """Every import of a private name fails in flexsn's own modules; PyTorch's do not run without them."""
    gone = {name.replace(":", ".") for names in interfaces.INTERFACES.values() for name in names}
    done = subprocess.run([sys.executable, "-c", NOTHING.format(gone=gone)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {"HigherOrderOperator", "FakeTensorMode"} <= set(done.stdout.split())


@pytest.mark.parametrize("name", ["set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy"])
def test_functions_that_dynamo_cannot_be_told_of_stay_as_they_are(monkeypatch, name):
    from torch._C._dynamo import eval_frame

    monkeypatch.delattr(eval_frame, name)
    function = lambda: 7
    assert unseen_by_dynamo(function) is function and function() == 7
