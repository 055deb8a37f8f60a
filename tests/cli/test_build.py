"""Kernels that are built ahead: all that calls need and no more, side by side, and a network that stays as it was."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from folders import PATH

import flexsn
from flexsn._program import cache as caching
from flexsn._runtime import cpp_kernel as launch_cpp
from flexsn.errors import BackendUnavailableError, OperandTypeError

NETWORK = """
import torch, flexsn
from torch import nn

def leaky(x, v):
    v = v * 0.6015625 + x
    return v * v, v

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.noise = nn.Linear(16, 8), nn.Linear(8, 4), nn.Dropout(0.5)
        self.hidden, self.out = flexsn.LIF(tau=2.5, learn_tau=True), flexsn.FlexSN(leaky, num_states=1)

    def forward(self, x):
        hidden = self.hidden(self.first(x))
        done = flexsn.scan(lambda x, v: (x * 0.5 + v, v + x * 0.25), (self.second(self.noise(hidden)),), (None,))
        return {"out": self.out(done.outputs[0]), "hidden": [hidden]}

network = Network()
x = 4 * torch.rand(10, 3, 16)
"""
USES = """
from network import network, x
flexsn_step = network(x)["out"].sum()
flexsn_step.backward()
assert network.hidden.tau.grad.abs() > 0 and flexsn_step.item() > 0
import flexsn, torch
flexsn.reset_net(network)
with torch.no_grad():
    network(x)
"""
# notes every run; a compiler of a kernel goes on once another one runs, too
COMPILER = """#!/bin/sh
here=$(dirname "$0")
for word; do case "$word" in */kernel.cpp) echo >> "$here/log"; n=0
while [ $(wc -l < "$here/log") -lt 2 ]; do sleep 0.05; n=$((n + 1)); [ $n -gt 1200 ] && exit 9; done;; esac; done
exec g++ "$@"
"""


@pytest.fixture
def place(tmp_path):
    """A function that runs Python there, with an empty cache and a compiler that counts."""
    (tmp_path / "network.py").write_text(NETWORK)
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER if len(os.sched_getaffinity(0)) > 1 else COMPILER.replace("-lt 2", "-lt 1"))
    compiler.chmod(0o700)
    environment = os.environ | {"CXX": str(compiler), "FLEXSN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": f"{PATH}:{tmp_path}"}

    def run(*words):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        log = tmp_path / "log"
        return done.returncode, done.stdout, done.stderr, len(log.read_text()) if log.exists() else 0

    return run


def test_a_fresh_process_starts_no_compiler_after_a_build(place):
    words = ("-m", "flexsn", "build", "network:network", "--example", "10,1,16")
    code, out, err, compiled = place(*words)
    assert code == 0 and out.startswith("built 3 kernels in ") and out.endswith("/cache/cpp\n") and compiled == 3, err
    code, out, err, compiled = place(*words, "--training")
    assert code == 0 and out.startswith("built 6 kernels in ") and compiled == 9, err  # forwards that keep states, and backwards
    code, _, err, compiled = place("-c", USES)
    assert (code, compiled) == (0, 9), err
    code, out, err, compiled = place(*words, "--training")
    assert (code, out, compiled) == (0, "all kernels are there\n", 9), err


@pytest.fixture
def cold(tmp_path, monkeypatch):
    """An empty cache, in a process that has loaded nothing; gives the network of `NETWORK` and an input."""
    names = {"__name__": "network_of_a_test"}
    (tmp_path / "network.py").write_text(NETWORK)
    exec(compile(textwrap.dedent(NETWORK), str(tmp_path / "network.py"), "exec"), names)
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(caching, "PROGRAMS", caching.Programs())
    monkeypatch.setattr(launch_cpp, "_kernels", {})
    return names["network"], names["x"]


def test_the_network_stays_as_it_was_and_runs_rightly(cold, counts):
    network, x = cold
    before, drawn = {k: v.clone() for k, v in network.state_dict().items()}, torch.get_rng_state()
    assert flexsn.build(network, x, training=True) == counts.builds == 9
    assert network.training and all(p.grad is None for p in network.parameters())
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items()) and torch.equal(torch.get_rng_state(), drawn)
    network.noise.p = 0.0
    results = []
    for backend in ("auto", "torch"):
        network.hidden.backend = network.out.backend = backend
        flexsn.reset_net(network)
        network.zero_grad()
        got = network(x)["out"]
        got.sum().backward()
        results.append((got.detach(), *[p.grad.clone() for p in network.parameters()]))
    assert results[0][0].abs().sum() > 0 and results[0][1].abs().sum() > 0  # no zeros of a kernel that was put off
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    assert counts.builds == 9
    assert flexsn.build(network, x, training=True) == 0


def test_what_is_no_network_and_what_is_no_compiler(cold, monkeypatch, tmp_path, run):
    network, x = cold
    with pytest.raises(OperandTypeError, match=r"is a `torch\.nn\.Module`, not function"):
        flexsn.build(lambda x, v: (x, v), x)
    monkeypatch.chdir(tmp_path)
    code, _, err = run("build", "network.py:network", "--example", "10,1,5")
    assert code == 2 and "shapes cannot be multiplied" in err and "network.py:" in err
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BackendUnavailableError, match="needs a C\\+\\+ compiler"):
        flexsn.build(network, x)
    assert not hasattr(launch_cpp._here, "wanted")
