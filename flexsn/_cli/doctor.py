"""`flexsn doctor`: what is installed, which backends work here and why not, and a self-test."""

from __future__ import annotations

import argparse
import subprocess
import time
from importlib import metadata
from typing import Any

import torch

from .._report.subject import machine_facts
from .._report.words import seconds, total
from .._runtime import cpp_kernel as launch_cpp
from .._runtime.backends import BACKENDS
from .._runtime.triton import kernel as launch_triton
from .._version import TESTED_TORCH
from ..errors import FlexSNError
from ..scan import scan
from .cache import inspect_cache
from .candidates import lif
from .outcome import BAD, GOOD, Outcome, table

_PACKAGES = ("triton", "numpy", "Pygments", "matplotlib", "onnx", "spikingjelly", "snntorch", "norse", "nir", "Brian2")


def add_doctor(commands: Any) -> list[argparse.ArgumentParser]:
    about = "what is installed, which backends work here, and a self-test"
    parser = commands.add_parser("doctor", help=about, description=about[0].upper() + about[1:] + ".")
    parser.set_defaults(run=run)
    return [parser]


def run(args: argparse.Namespace) -> Outcome:
    backends = {name: _examine(name) for name in BACKENDS}
    own = "triton" if torch.cuda.is_available() else "cpp"
    well = backends[own]["works"] and not any(b["tested"] and not b["works"] for b in backends.values())
    data = {
        "well": well,
        "notes": notes(torch.__version__),
        "machine": machine_facts(),
        "compiler": compiler_facts(),
        "packages": {name: version_of(name) for name in _PACKAGES},
        "cache": inspect_cache(),
        "backends": backends,
    }
    return Outcome(_text(data), data, GOOD if well else BAD)


def notes(torch_version: str) -> list[str]:
    """What is worth knowing and no error."""
    oldest, newest = TESTED_TORCH
    if _minor(oldest) <= _minor(torch_version) <= _minor(newest):
        return []
    return [f"PyTorch {torch_version} is not among the versions that flexsn is tested with, {oldest} to {newest}."]


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def compiler_facts() -> dict[str, Any]:
    found = launch_cpp.compiler()
    if found is None:
        return {"path": None, "version": None, "vector_maths": None}
    told = subprocess.run([found[0], "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    return {"path": found[0], "version": told[0] if told else None, "vector_maths": "Sleef" if launch_cpp.has_sleef() else "libm"}


# --- backends -----------------------------------------------------------------------------------------------------------------------
def _examine(name: str) -> dict[str, Any]:
    """Whether a backend works on a device of this machine: it runs there and agrees with the eager loop."""
    device = _device_for(name)
    if device is None:
        why = "PyTorch finds no NVIDIA GPU here (on the CPU it runs under TRITON_INTERPRET=1 alone, for tests)"
        return {"works": False, "tested": False, "why": why, "device": None, "seconds": None}
    begun = time.perf_counter()
    try:
        wrong = self_test(name, device)
    except FlexSNError as error:
        wrong = f"{type(error).__name__}: {error}"
    spent = time.perf_counter() - begun
    return {"works": wrong is None, "tested": True, "why": wrong, "device": str(device), "seconds": spent}


def _device_for(name: str) -> torch.device | None:
    if name == "triton" and not launch_triton.interpreted():
        return torch.device("cuda") if torch.cuda.is_available() else None
    return torch.device("cpu")


def self_test(backend: str, device: torch.device) -> str | None:
    """Run a LIF forward and backward, and compare with the eager loop; returns what differs, or None."""
    x = (2 * torch.rand(35, 77, generator=torch.Generator().manual_seed(0))).to(device)
    results = {}
    for name in (backend, "torch"):
        leaf = x.clone().requires_grad_()
        done = scan(lif, (leaf,), (None,), backend=name)
        (grad,) = torch.autograd.grad((done.outputs[0] * x).sum() + done.states[0].sum(), leaf)
        results[name] = done.outputs[0].detach(), done.states[0].detach(), grad
    for what, got, want in zip(("spikes", "states"), *(r[:2] for r in results.values()), strict=True):
        if not torch.equal(got, want):
            return f"its {what} differ from the eager loop's"
    gap = (results[backend][2] - results["torch"][2]).abs().max().item()
    return None if gap < 1e-5 else f"its gradients differ from the eager loop's by {gap:g}"


# --- text -----------------------------------------------------------------------------------------------------------------------------
def _text(data: dict[str, Any]) -> str:
    compiler, cache = data["compiler"], data["cache"]
    facts = list(data["machine"].items())
    told = f"{compiler['version']} ({compiler['path']}), vector maths {compiler['vector_maths']}"
    facts.append(("compiler", told if compiler["path"] else "none: set $CXX, or install g++"))
    facts.append(("cache", f"{cache['folder']}: {cache['kernels']} kernels, {total(cache['bytes'])}"))
    backends = [(name, _verdict(b)) for name, b in data["backends"].items()]
    installed = [f"{name} {version}" for name, version in data["packages"].items() if version]
    absent = [name for name, version in data["packages"].items() if not version]
    sections = [
        table(facts),
        "backends\n" + table([*backends, ("torch", "works (the eager loop)")], "  "),
        "packages\n  " + ", ".join(installed) + (f"\n  not installed: {', '.join(absent)}" if absent else ""),
        *[f"Note: {note}" for note in data["notes"]],
        "All is well." if data["well"] else "Something is wrong: see the backends above.",
    ]
    return "\n\n".join(sections)


def _verdict(b: dict[str, Any]) -> str:
    if b["works"]:
        return f"works: self-test on {b['device']} agrees with the eager loop ({seconds(b['seconds'])})"
    return f"{'FAILS' if b['tested'] else 'cannot run here'}: {b['why']}"
