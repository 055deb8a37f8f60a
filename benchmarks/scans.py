"""Time a LIF as a Python loop, as PyTorch's compiled `scan` and `while_loop`, and as flexsn's fused kernel.

    python benchmarks/scans.py            about two minutes, half of it PyTorch's compiler
    python benchmarks/scans.py --quick    one small size, nothing kept

Every candidate is checked against a hand-written loop first; where they differ, no speed is reported.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import cores
import measure
import peers
from run import RESULTS, Case, engine, milliseconds, parity

from flexsn import loops

SIZES = [(64, 65536), (1000, 4096)]
NEURON = cores.LIF
TITLES = {
    "hand_loop": "hand-written loop",
    "eager_scan": "`eager_scan`",
    "scan": "`lowerable_scan`, compiled",
    "while_loop": "`lowerable_while_loop_scan`, compiled",
    "flexsn": "`flexsn.scan`, fused",
}


def by(function: Callable, compiled: bool) -> peers.Run:
    """A mechanism as a candidate, with final states, as flexsn gives them."""

    def run(inputs, states):
        return function(NEURON.core, len(inputs), len(states), NEURON.outputs, *inputs, *states)[: NEURON.outputs]

    return torch.compile(run, fullgraph=True, dynamic=False) if compiled else run


def candidates(mode: str) -> dict[str, peers.Run]:
    found = {
        "hand_loop": peers.hand_loop(NEURON),
        "eager_scan": by(loops.eager_scan_final_state, compiled=False),
        "scan": by(loops.lowerable_scan_final_state, compiled=True),
        "while_loop": by(loops.lowerable_while_loop_scan_final_state, compiled=True),
        "flexsn": peers.fused(NEURON),
    }
    if mode == "training":
        del found["while_loop"]  # inference only
    return found


def measure_size(mode: str, T: int, N: int, seconds: float) -> dict:
    torch._dynamo.reset()
    case = Case(NEURON, mode, T, N)
    record: dict = {"core": NEURON.name, "mode": mode, "T": T, "N": N, "first_call_s": {}, "parity": {}, "timings": {}}
    reference, calls = case.step(peers.hand_loop(NEURON)), {}
    for key, run in candidates(mode).items():
        result, record["first_call_s"][key] = peers.timed(lambda run=run: case.step(run))
        record["parity"][key] = parity(result, reference)
        if record["parity"][key]["ok"]:
            case.step(run)
            calls[key] = lambda run=run: case.step(run)
    del reference, result
    since = measure.others_busy()
    record["timings"] = measure.interleaved(calls, seconds)
    record["others_busy"] = measure.others_busy(since)
    return record


def table(records: list[dict]) -> str:
    """Medians in ms, in brackets over flexsn's; `~`: measured on a busy machine."""
    head = [f"{r['mode']}, T = {r['T']}, N = {r['N']}" for r in records]
    lines = ["| ms | " + " | ".join(head) + " |", "| --- |" + " ---: |" * len(records)]
    for key, title in TITLES.items():
        lines.append(f"| {title} | " + " | ".join(cell(r, key) for r in records) + " |")
    return "\n".join(lines)


def cell(record: dict, key: str) -> str:
    if key not in record["parity"]:
        return "inference only"
    if key not in record["timings"]:
        return "differs from the loop"
    own, found = record["timings"].get("flexsn"), record["timings"][key]
    ratio = f" ({found['median_s'] / own['median_s']:.1f}x)" if own and key != "flexsn" else ""
    return f"{milliseconds(found['median_s'])}{'' if found['trusted'] else '~'}{ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a LIF by every mechanism.")
    parser.add_argument("--quick", action="store_true", help="one small size, nothing kept")
    parser.add_argument("--seconds", type=float, help="sampling time per size and mode (default 10, quick 1)")
    parser.add_argument("--output", type=Path, help="JSON file (default benchmarks/results/scans_cpu_<date>.json, quick: none)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    seconds = options.seconds or (1.0 if options.quick else 10.0)
    document: dict = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": measure.machine(), "compiler": measure.compiler(), "engine": engine(), "versions": peers.versions(),
        "load_average_before": os.getloadavg(), "seconds_per_case": seconds, "cases": [],
    }  # fmt: skip
    for T, N in [(8, 1024)] if options.quick else SIZES:
        for mode in ("inference", "training"):
            document["cases"].append(measure_size(mode, T, N, seconds))
    document["load_average_after"] = os.getloadavg()
    print(f"{document['machine']['cpu']}, {document['machine']['threads']} threads; PyTorch {document['versions']['torch']}\n")
    print(table(document["cases"]))
    output = options.output or (None if options.quick else RESULTS / f"scans_cpu_{document['date'][:10]}.json")
    if output:
        output.write_text(json.dumps(document, indent=1) + "\n")
        print(f"\n{output}: written")


if __name__ == "__main__":
    main()
