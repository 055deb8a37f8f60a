"""Checks that run in several processes at once: `launch` starts them, this file as a script is one of them.

Starting processes takes seconds, so one launch runs many checks. A check is a function `check(rank, world)` of a test
module; the first one to fail in any process ends its process with a traceback, and the others with it.
"""

import datetime
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import folders

TIMEOUT = datetime.timedelta(seconds=60)  # of one collective


def launch(module, world, names, folder, backend="gloo", seconds=240):
    """Run the checks `names` of a test module in `world` processes; asserts that all of them pass."""
    codes, texts = start(module, world, names, folder, backend, seconds)
    failed = [f"--- rank {k}: exit {code}\n{text[-6000:]}" for k, (code, text) in enumerate(zip(codes, texts, strict=True)) if code]
    assert not failed, "\n".join(failed)
    for text in texts:
        assert [line.split()[1] for line in text.splitlines() if line.startswith("passed ")] == list(names), text[-2000:]


def start(module, world, names, folder, backend="gloo", seconds=240):
    """Exit codes and outputs; processes that have not ended after `seconds` are killed, and their code is -SIGKILL."""
    environment = {**os.environ, "PYTHONPATH": folders.PATH, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    paths, children = [Path(folder, f"rank{k}.txt") for k in range(world)], []
    for k, path in enumerate(paths):
        command = [sys.executable, __file__, Path(module).stem, str(k), str(world), str(folder), backend, *names]
        with path.open("w") as file:
            children.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
    end = time.monotonic() + seconds
    for child in children:
        try:
            child.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.wait()
    return [child.returncode for child in children], [path.read_text() for path in paths]


def main():
    module, rank, world, folder, backend, *names = sys.argv[1:]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world = int(rank), int(world)
    if backend == "nccl":
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        torch.cuda.set_device(rank)
        torch.set_default_device(torch.device("cuda", rank))
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=TIMEOUT)
    checks = importlib.import_module(module)
    for name in names:
        torch.manual_seed(0)
        begin = time.monotonic()
        getattr(checks, name)(rank, world)
        print("passed", name, f"{time.monotonic() - begin:.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # the threads of Gloo groups that a device mesh holds live on, and once in hundreds abort an interpreter that ends


if __name__ == "__main__":
    main()
