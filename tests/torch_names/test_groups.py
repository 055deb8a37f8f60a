"""A PyTorch without the private names of one feature: fused kernels run, and a warning names the feature where it is used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flexsn
from flexsn._torch import availability as interfaces

ROOT = Path(flexsn.__file__).parent.parent

WITHOUT = """
import builtins, importlib, types, warnings
import torch
import torch._dynamo, torch._refs  # which fake tensors import

hidden, plain_import, plain_module = {{}}, builtins.__import__, importlib.import_module
for place, _, name in [name.partition(":") for name in {names}]:
    module, name = importlib.import_module(place), name.split(".")[0]
    if not place.startswith("torch._C"):  # hidden from flexsn alone: fake tensors need some of them
        hidden.setdefault(place, types.SimpleNamespace(**vars(module)))
        delattr(hidden[place], name)
    elif hasattr(module, name):  # not so in a build for CPUs
        delattr(module, name)

def without(name, globals=None, locals=None, fromlist=(), level=0):
    by_flexsn = fromlist and str((globals or {{}}).get("__name__")).startswith("flexsn")
    return hidden[name] if by_flexsn and name in hidden else plain_import(name, globals, locals, fromlist, level)

builtins.__import__ = without
importlib.import_module = lambda name, package=None: hidden.get(name) or plain_module(name, package)
import flexsn
from flexsn.errors import BackendUnavailableError, FallbackWarning, InterfaceWarning

def core(x, v):
    h = v + (x - v) / 2.0
    s = flexsn.surrogate.atan(h - 1.0)
    return s + h, h * (1.0 - s)

def trained(backend):
    x = torch.linspace(0.0, 3.0, 60).reshape(5, 12).requires_grad_()
    out = flexsn.FlexSN(core, 1, 1, backend=backend, strict=backend != "torch")(x)
    out.square().sum().backward()
    return out.detach(), x.grad

with warnings.catch_warnings(record=True) as at_once:
    warnings.simplefilter("error")
    warnings.simplefilter("always", InterfaceWarning)
    for found, want in zip(trained("cpp"), trained("torch"), strict=True):
        torch.testing.assert_close(found, want)
    assert want.std() > 0
assert bool(at_once) == {at_once}
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    x, plain = torch.rand(4, 5, 3), lambda x, v: (x + v, v * 0.5 + x)
{used}
print(*[w.message for w in (*at_once, *said) if w.category is InterfaceWarning])
"""

USED = {
    interfaces.TRANSFORMS: """
run = lambda backend: torch.func.vmap(lambda x: flexsn.scan(plain, [x], [None], backend=backend).outputs[0])(x)
assert torch.equal(run("auto"), run("torch")) and any(w.category is FallbackWarning for w in said)
try:
    run("cpp")
    raise AssertionError
except BackendUnavailableError:
    pass
""",
    interfaces.GPU: """
from flexsn._torch.cuda import gpu_allocator
gpu_allocator()
""",
    interfaces.TRACES: """
found = flexsn.lowlevel.flex_sn_scan(plain, 1, 1, 1, x, x[0])[0]
assert torch.equal(found, flexsn.scan(plain, [x], [x[0]], backend="torch").outputs[0])
""",
    interfaces.COMPILE: "assert not flexsn.lowlevel.dynamo_hop_available()",
    interfaces.INDUCTOR: "flexsn.scan; from flexsn._torch_compile.call_sites import prepare_inductor; prepare_inductor()",
    interfaces.FUSION: """
import torch._inductor.lowering
from flexsn._torch_compile.call_sites import prepare_inductor
prepare_inductor()
""",
    interfaces.PROFILES: "pass",  # every launch asks
    interfaces.LOWLEVEL: """
try:
    flexsn.lowlevel.generate_inference_graph(lambda x: x + 1, [x])
    raise AssertionError
except BackendUnavailableError:
    pass
""",
}


def test_every_optional_feature_has_a_switch():
    assert interfaces.INTERFACES.keys() == {interfaces.KERNELS, *USED}


@pytest.mark.parametrize("feature", USED)
def test_fused_kernels_run_without(feature):
    names = interfaces.INTERFACES[feature]
    used = "\n".join(f"    {line}" for line in USED[feature].strip().splitlines())
    code = WITHOUT.format(names=names, used=used, at_once=feature == interfaces.PROFILES)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(f"flexsn: {feature}: PyTorch"), done.stdout
    assert all(f"`{name.replace(':', '.')}`" in done.stdout for name in names)
