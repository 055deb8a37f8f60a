"""Sequences of unequal length, and resets: `python benchmarks/uneven.py --json out.json`, on a GPU with `--device cuda`.

The same call without them, with lengths that are all T, with lengths uniform between 10% and 100% of T, and with resets before 2% of the
steps take turns, inference and training steps. On a GPU they are replayed in CUDA graphs: the time of the kernels, and of what prepares
lengths for them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import flexsn

sys.path.insert(0, str(Path(__file__).parent))
from measure import graphed, machine
from recurrent import in_turns

SIZES = {"cpu": [(100, 64, 2048), (100, 64, 16)], "cuda": [(100, 128, 4096), (100, 1024, 64)]}
RECURRENT = {"cpu": (100, 64, 256), "cuda": (100, 128, 256)}


def layers(hidden: int) -> dict[str, Callable[[], nn.Module]]:
    return {
        "LIF": lambda: flexsn.LIF(stateful=False, strict=True),
        "Hodgkin-Huxley": lambda: flexsn.HodgkinHuxley(stateful=False, strict=True),
        "recurrent LIF": lambda: flexsn.Recurrent(flexsn.LIF(stateful=False, strict=True), nn.Linear(hidden, hidden, bias=False)),
    }


def case(name: str, T: int, batch: int, hidden: int, device: str, repeats: int) -> dict:
    torch.manual_seed(0)
    layer = layers(hidden)[name]().to(device)
    x = (torch.randn(T, batch, hidden, device=device) * 0.6 + 0.6).requires_grad_()
    params = [x, *layer.parameters()]
    whole, uneven = torch.full((batch,), T, device=device), torch.randint(T // 10, T + 1, (batch,), device=device)
    kinds = {
        "without": {}, "lengths, all T": {"lengths": whole}, "lengths, 10% to 100% of T": {"lengths": uneven},
        "resets": {"resets": torch.rand(T, batch, device=device) < 0.02},
    }  # fmt: skip
    cotangent = torch.randn_like(layer(x))
    found: dict = {"layer": name, "T": T, "batch": batch, "hidden": hidden}
    for kind in ("inference", "training"):

        def call(options: dict, kind: str = kind) -> None:
            with torch.set_grad_enabled(kind == "training"):
                y = layer(x, **options)
                if kind == "training":
                    torch.autograd.grad(y, params, cotangent)

        calls: dict = {label: lambda options=options: call(options) for label, options in kinds.items()}
        if device == "cuda":
            calls = {label: graphed(run) for label, run in calls.items()}
        times = in_turns(calls, repeats)
        found[kind] = {label: row["median_s"] * 1e3 for label, row in times.items()}
    return found


def report(row: dict) -> None:
    print(f"{row['layer']}, T {row['T']}, batch {row['batch']}, {row['hidden']} neurons each")
    for kind in ("inference", "training"):
        own = row[kind]["without"]
        others = ", ".join(f"{label} {own / ms:.2f}x" for label, ms in row[kind].items() if label != "without")
        print(f"  {kind:10} {own:9.3f} ms without; {others}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the legacy stream cannot be captured
    found = {
        "machine": machine(), "python": platform.python_version(), "torch": torch.__version__, "flexsn": flexsn.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu", "date": datetime.date.today().isoformat(),
        "threads": torch.get_num_threads(), "rows": [],
    }  # fmt: skip
    cases = [(name, *size) for size in SIZES[options.device] for name in ("LIF", "Hodgkin-Huxley")]
    for given in [*cases, ("recurrent LIF", *RECURRENT[options.device])]:
        found["rows"].append(case(*given, options.device, options.repeats))
        report(found["rows"][-1])
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
