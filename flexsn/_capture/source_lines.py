"""Where the user's code is: which files are not theirs, and the lines that another tracer's graph remembers."""

from __future__ import annotations

import os
import re
import threading
from typing import Any

import torch
from torch import fx

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_HOLD_CORES = tuple(_PACKAGE + folder + os.sep for folder in ("neurons", "interchange", "_report", "_cli"))
INTERNAL = (os.path.dirname(torch.__file__) + os.sep, _PACKAGE)


def may_hold_cores(file: str) -> bool:
    """Whether a file of flexsn is built on the engine, and may hold cores."""
    return file.startswith(_HOLD_CORES)


class Replay(fx.Interpreter):
    """Runs a graph that another tracer made of a core; ops keep the user's lines that the graph remembers."""

    def __init__(self, graph: fx.GraphModule):
        super().__init__(graph)
        self.extra_traceback = False  # `torch.fx` would add lines of this file to the text of an error

    def run_node(self, n: fx.Node) -> Any:
        before, replayed.line = replayed.line, _remembered_line(n) or replayed.line
        try:
            return super().run_node(n)
        finally:
            replayed.line = before


class _Replayed(threading.local):
    line: str | None = None


replayed = _Replayed()


def _remembered_line(node: fx.Node) -> str | None:
    found = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', node.meta.get("stack_trace") or node.stack_trace or "")
    users = [(name, number, code) for name, number, code in found if not name.startswith(INTERNAL)]
    return "{}:{}: {}".format(*users[-1]) if users else None
