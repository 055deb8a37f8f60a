"""Print every stage of one core, from the captured ATen graph to the generated source: `python tools/stages.py`.

`docs/architecture.md` shows this output; `python tools/stages.py --write` refreshes it, and a test compares the two.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import torch

from flexsn._capture.signature import make_signature
from flexsn._capture.trace import Meta, Trace
from flexsn._captured.captured_values import look
from flexsn._codegen import cpp as render_cpp
from flexsn._program.cache import Source, program_for
from flexsn._program.compiled import Program

ROOT = Path(__file__).parent.parent


def example():
    """The core of examples/lif.py."""
    return runpy.run_path(str(ROOT / "examples" / "lif.py"))["lif"]


def aten_text(recorded: Trace | None) -> str:
    """A recorded graph, a line per op, with the kind of every value and the user's line."""
    assert recorded is not None
    lines = []
    for node in recorded.graph.nodes:
        if node.op == "call_function":
            place, _, code = (node.meta.get("line") or "").partition(": ")
            op = f"{node.name} = {node.target}({', '.join(map(str, node.args))})"
            lines.append(f"{op:60} # {node.meta['kind']}, {Path(place).name}: {code}")
    return "\n".join(lines)


def stages(core) -> dict[str, str]:
    """The printed form of every stage, by name."""
    sig = make_signature(core, 1, 1, 0)
    program: Program
    program, _ = program_for("cpp", Source(core, {}, look(core), sig, torch.device("cpu")), [Meta((512,), torch.float32), None])
    vjp = program.differentiate(core, {})
    forward = program.forward_plan((torch.float32,), True, False)
    backward = program.backward_plan((torch.float32,), ("gx0",), ("gy0",))
    return {
        "signature": str(sig),
        "capture": aten_text(program.blueprint.trace),
        "graph": str(program.graph),
        "vjp": str(vjp.graph),
        "plan": f"{forward}\n{backward}",
        "forward": render_cpp.render(forward),
        "backward": render_cpp.render(backward),
    }


def fill(text: str, shown: dict[str, str]) -> str:
    """The document with the block after each `<!-- stage: name -->` replaced by that stage's output."""

    def block(match: re.Match) -> str:
        return f"{match[1]}\n```{match[3]}\n{shown[match[2]].rstrip()}\n```"

    return re.sub(r"(<!-- stage: (\w+) -->)\n```(\w*)\n(?:.*?\n)??```(?=\n)", block, text, flags=re.DOTALL)


if __name__ == "__main__":
    output = stages(example())
    if "--write" in sys.argv:
        path = ROOT / "docs" / "architecture.md"
        path.write_text(fill(path.read_text(), output))
    else:
        for name, text in output.items():
            print(f"--- {name} ---\n{text}\n")
