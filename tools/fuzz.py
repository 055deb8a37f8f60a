"""Random cores, thousands of them, against the eager loop: results to the bit, gradients within their rounding errors.

    python tools/fuzz.py [--cases 10000] [--first 0] [--seed N] [--backend cpp|triton] [--device cuda] [--only LABEL] [--every-as-users 8]

Prints its seed; case k has the label `seed/k`, from which everything follows: `--only seed/k` runs it alone. A failure is made
small and printed as a program that runs by itself. Most C++ kernels are built without optimisation, a hundred to a library; one
library in eight has the flags that users' kernels have. On a GPU half of the cores have the tile of many neurons. See docs/numerics.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, metavar="K", help="start at case K: parts of one run, side by side")
    parser.add_argument("--seed", type=int, help="a new one if not given")
    parser.add_argument("--backend", choices=["cpp", "triton"], default="cpp", help="triton runs in its interpreter, slowly")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: Triton's kernels on a GPU, beside eager there")
    parser.add_argument("--only", metavar="LABEL", help="one case, seed/number")
    parser.add_argument("--every-as-users", type=int, default=8, metavar="N", help="each Nth library with the flags of users' kernels")
    parser.add_argument("--depth", type=int, default=30, help="most lines of a core")
    parser.add_argument("--shrink", type=float, default=120.0, metavar="SECONDS", help="for each failure")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many")
    options = parser.parse_args()
    if options.device == "cuda":
        options.backend = "triton"
    elif options.backend == "triton":
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    with tempfile.TemporaryDirectory(prefix="flexsn-fuzz-") as folder:
        os.environ["FLEXSN_CACHE_DIR"] = folder
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    import torch
    from fuzzing import batch, campaign

    if options.device == "cuda":
        torch.set_default_device("cuda:0")
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    labels = [options.only] if options.only else [f"{seed}/{options.first + k}" for k in range(options.cases)]
    again = f"python tools/fuzz.py --device cuda --seed {seed} --first {options.first} --cases {options.cases}"
    again = again if options.device == "cuda" else f"make fuzz SEED={seed} CASES={options.cases}"
    print(f"seed {seed}, {len(labels)} cores, backend {options.backend}; again: {again}", flush=True)
    report, start = campaign.Report(), time.perf_counter()
    size = 10 if options.device == "cuda" else 100
    for number, first in enumerate(range(0, len(labels), size)):
        flags = batch.AS_USERS_GET_THEM if number % options.every_as_users == options.every_as_users - 1 else batch.FAST_BUILD
        tiles = batch.on_gpu(many=number % 2 == 1) if options.device == "cuda" else contextlib.nullcontext()
        with tiles:
            for case, verdict in campaign.run(labels[first : first + size], options.backend, flags, options.depth):
                report.add(case, verdict)
                if isinstance(verdict, campaign.Failure) and verdict.kind != "refused":
                    _tell(case, verdict, options)
        print(f"{time.perf_counter() - start:6.0f} s  {report}", flush=True)
        if len(report.failures) >= options.failures:
            break
    print("ops drawn least:", ", ".join(f"{op} {n}" for op, n in report.ops.most_common()[:-9:-1]))
    return 1 if report.failures else 0


def _tell(case, failure, options) -> None:
    from fuzzing import campaign

    print(f"\n{case.label}  {failure}", flush=True)
    small = campaign.smallest(case, failure, options.backend, options.shrink)
    print(f"--- as small as it got ---\n{small.script(options.backend)}--- end ---\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
