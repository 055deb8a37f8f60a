"""The first call of a fresh process, with kernels on disk: forward and backward on a CPU, imports of torch and flexsn apart.

    python benchmarks/first_call.py [--output first_call.json] [--turns 9]

Processes run in turns: an LIF, an LIF with PyTorch's whole fake mode from the start, which imports `torch._dynamo` and sympy, and a core
with `softplus`, `silu` and `leaky_relu`. Printed, and written as JSON, are medians and best ones in seconds, with hardware, versions, date and the load of the machine, which should be quiet.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from measure import machine

import flexsn

CHILD = """
import json, sys, time
laps = [time.perf_counter()]
import torch
laps.append(time.perf_counter())
import flexsn
laps.append(time.perf_counter())
if sys.argv[1] == "whole":
    from flexsn._torch.fake_tensors import LightFakeMode
    light = LightFakeMode.__init__
    def whole(self):
        light(self)
        self.complete()
    LightFakeMode.__init__ = whole
def core(x, v):
    v = 0.9 * v + F.softplus(x) - F.silu(v)
    return F.leaky_relu(v), v
F = torch.nn.functional
neuron = flexsn.FlexSN(core, num_states=1) if sys.argv[1] == "softplus" else flexsn.LIF()
x = torch.rand(64, 256, requires_grad=True)
laps.append(time.perf_counter())
y = neuron(x)
laps.append(time.perf_counter())
y.sum().backward()
laps.append(time.perf_counter())
names = ("import torch", "import flexsn", None, "forward", "backward")
print(json.dumps({name: end - start for name, start, end in zip(names, laps, laps[1:]) if name}))
"""


def first_call(mode: str) -> dict[str, float]:
    """Return the seconds of each part of a fresh process."""
    done = subprocess.run([sys.executable, "-c", CHILD, mode], capture_output=True, text=True, check=True)
    laps = json.loads(done.stdout)
    return laps | {"first call": laps["forward"] + laps["backward"]}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    laps: dict[str, list[dict[str, float]]] = {"light": [], "whole": [], "softplus": []}
    for mode in laps:
        first_call(mode)  # builds the kernels, if need be
    load = os.getloadavg()[0]
    for _ in range(options.turns):
        for mode, found in laps.items():
            found.append(first_call(mode))
    rows = {
        mode: {
            name: {"median_s": statistics.median(lap[name] for lap in found), "best_s": min(lap[name] for lap in found)}
            for name in found[0]
        }
        for mode, found in laps.items()
    }
    for mode, row in rows.items():
        print(f"{mode}:", "  ".join(f"{name} {value['median_s']:.3f} (best {value['best_s']:.3f})" for name, value in row.items()))
    if options.output:
        versions = {"torch": torch.__version__, "flexsn": flexsn.__version__}
        facts = {"date": datetime.date.today().isoformat(), "machine": machine(), "versions": versions, "load_before": load}
        document = facts | {"turns": options.turns, "rows": rows}
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
