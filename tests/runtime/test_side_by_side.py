"""Forward and backward of a neuron are built side by side, by calls that train alone; nothing of that outlives the program."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from folders import PATH

# a compiler that notes the direction of every kernel that it starts to compile, with a place for more
COMPILER = """#!/bin/sh
here=$(dirname "$0")
for word; do case "$word" in */kernel.cpp) direction=$(sed -n '1s/.*: \\(forward\\|backward\\).*/\\1/p' "$word");; esac; done
[ -n "$direction" ] && echo $direction >> "$here/log"
{more}
exec g++ "$@"
"""
TRAIN = """
import os, sys, torch, flexsn
torch.set_num_threads(1)

def core(x, v):
    v = v * 0.4375 + x
    return v * v, v

x = torch.ones(7, 5, requires_grad=True)

def forward(x=x, backend="cpp"):
    return flexsn.scan(core, [x], [None], backend=backend).outputs[0]

def agrees():
    grads = [torch.autograd.grad(forward(backend=name).sum(), x)[0] for name in ("cpp", "torch")]
    torch.testing.assert_close(*grads)
    return True

"""
WAITS = """
case "$direction" in {for_}) touch "$here/waits"; n=0
while [ ! -e "$here/go" ]; do sleep 0.05; n=$((n + 1)); [ $n -gt 1200 ] && exit 9; done;; esac"""


class Place:
    """A cache and a compiler of its own."""

    def __init__(self, path):
        self.path, self.compiler = path, path / "c++"

    def start(self, code, more=""):
        if not self.compiler.exists():  # a compiler that is written again is another one
            self.compiler.write_text(COMPILER.replace("{more}", more))
            self.compiler.chmod(0o700)
        environment = os.environ | {"CXX": str(self.compiler), "FLEXSN_CACHE_DIR": str(self.path / "cache"), "PYTHONPATH": PATH}
        return subprocess.Popen(
            [sys.executable, "-c", TRAIN + code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, code, more=""):
        process = self.start(code, more)
        out, err = process.communicate(timeout=200)
        return process.returncode, out, err

    def log(self):
        return sorted((self.path / "log").read_text().split())

    def processes(self):
        """Those that were started with a path in this place."""
        found = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:  # it has ended
                continue
            if os.fsencode(self.path) in words:
                found.append(int(name))
        return found


@pytest.fixture
def place(tmp_path):
    found = Place(tmp_path)
    yield found
    for process in found.processes():
        os.kill(process, signal.SIGKILL)


def test_the_compilers_of_both_directions_run_at_once(place):
    """Each waits until the other has started."""
    meets = """[ -n "$direction" ] && { touch "$here/$direction"; n=0
    while [ ! -e "$here/forward" ] || [ ! -e "$here/backward" ]; do sleep 0.05; n=$((n + 1)); [ $n -gt 1200 ] && exit 9; done; }"""
    code, out, err = place.run("print(agrees())", meets)
    assert (code, out) == (0, "True\n"), err
    assert place.log() == ["backward", "forward"]
    code, out, err = place.run("print(agrees())")
    assert (code, out) == (0, "True\n"), err
    assert place.log() == ["backward", "forward"]  # a second process builds nothing


@pytest.mark.parametrize("call", ["forward(x.detach())", "with torch.no_grad(): forward()", "with torch.inference_mode(): forward()"])
def test_a_call_that_does_not_train_builds_the_forward_alone(place, call):
    code, _, err = place.run(call)
    assert code == 0, err
    assert place.log() == ["forward"]


def test_a_trace_builds_nothing(place):
    code, _, err = place.run("torch.export.export(flexsn.LIF(learn_tau=True), (x.detach(),))")
    assert code == 0 and not (place.path / "log").exists(), err


def test_a_program_that_ends_meanwhile_leaves_nothing(place):
    """Its backward is not waited for: its compiler is killed, the folder of the build removed."""
    began = "forward()\nwhile not os.path.exists(os.path.dirname(os.environ['CXX']) + '/waits'): pass"
    code, _, err = place.run(began, WAITS.replace("{for_}", "backward"))  # waits a minute
    assert code == 0 and err == ""
    for _ in range(100):
        if not place.processes():
            break
        time.sleep(0.05)
    assert place.processes() == []
    assert [p.name for p in (place.path / "cache" / "cpp").iterdir() if p.name.startswith("build-")] == []


def test_a_fork_meanwhile(place):
    """The child, which has no such thread, builds the backward for itself; the parent gets its own."""
    forks = """
forward()
if (pid := os.fork()) == 0:
    open(os.path.dirname(os.environ["CXX"]) + "/go", "w")
    assert agrees()
    sys.exit(7)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(code, agrees())
"""
    code, out, err = place.run(forks, WAITS.replace("{for_}", "backward"))
    assert (code, out) == (0, "7 True\n"), err


def test_a_backward_that_cannot_be_built_is_an_error_of_the_backward(place):
    fails = '[ "$direction" = backward ] && { echo "not this one" >&2; exit 3; }'
    code, out, err = place.run("y = forward()\nprint(len(y))\ny.sum().backward()\nprint('trained')", fails)
    assert (code, out) == (1, "7\n") and "BuildError" in err and "not this one" in err and "Exception in thread" not in err
