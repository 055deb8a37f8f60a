"""Processes by the dozen: children of one process that has imported flexsn, traced once, and started no thread."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import flexsn

ROOT = Path(flexsn.__file__).parent.parent

_MOTHER = """
import json, os, sys, traceback
import torch, flexsn

torch.set_num_threads(1)
flexsn.scan(lambda x, v: (x * 0.5 + v, v), [torch.ones(2, 3)], [None], backend="cpp")  # imports what a capture needs
sys.stdout.write("ready\\n"); sys.stdout.flush()
for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        reply = os.waitpid(order["wait"], 0)[1]
    elif (reply := os.fork()) == 0:
        told = os.open(order["says"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(told, 1); os.dup2(told, 2); os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(order["environment"])
        code = 1
        try:
            exec(compile(order["code"], "child.py", "exec"), {"__name__": "__main__"})
            code = 0
        except SystemExit as stop:
            code = stop.code
        except BaseException:  # printed; the exit code tells of it
            traceback.print_exc()
        sys.stdout.flush(); sys.stderr.flush()
        os._exit(code)
    sys.stdout.write(f"{reply}\\n"); sys.stdout.flush()
"""


class Child:
    """A process that runs `code`."""

    def __init__(self, nursery, pid, says):
        self.nursery, self.pid, self.says = nursery, pid, says

    def kill(self, after=0.0):
        time.sleep(after)
        os.kill(self.pid, signal.SIGKILL)

    def wait(self):
        """Its exit code, negative for a signal; and what it said."""
        code = os.waitstatus_to_exitcode(self.nursery.ask({"wait": self.pid}))
        return code, self.says.read_text() if self.says.exists() else ""


class Nursery:
    def __init__(self, folder):
        self.folder, self.count = folder, 0
        environment = os.environ | {"PYTHONPATH": str(ROOT), "FLEXSN_CACHE_DIR": str(folder / "first")}
        self.mother = subprocess.Popen(
            [sys.executable, "-c", _MOTHER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.mother.stdout.readline() == "ready\n"

    def ask(self, order):
        self.mother.stdin.write(json.dumps(order) + "\n")
        self.mother.stdin.flush()
        return int(self.mother.stdout.readline())

    def start(self, code, cache, **environment):
        self.count += 1
        says = self.folder / f"says-{self.count}"
        environment = {"FLEXSN_CACHE_DIR": str(cache)} | {k: str(v) for k, v in environment.items()}
        code = f"import signal\nsignal.alarm(100)\n{code}"  # a hang ends the child, and shows
        return Child(self, self.ask({"code": code, "environment": environment, "says": str(says)}), says)

    def run(self, code, cache, **environment):
        return self.start(code, cache, **environment).wait()

    def close(self):
        self.mother.stdin.close()
        self.mother.wait(60)
        self.mother.stdout.close()
