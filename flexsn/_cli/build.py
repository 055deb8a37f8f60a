"""`flexsn.build` and `flexsn build`: every kernel that calls of a network need, built ahead."""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from .._runtime import cpp_compiler, disk_cache
from .._runtime.cpp_kernel import collected, load
from ..errors import OperandTypeError
from ..neurons.network import reset_net
from .explain import DTYPE_NAMES, as_one_line, device_of, example_inputs, shape
from .outcome import Outcome
from .target import load_target


def build(network: nn.Module, *examples: Any, training: bool = False) -> int:
    """Build ahead every kernel that calls of a network with such inputs need: for images and clusters, where no compiler should run later.

    A copy of the network runs once on the examples, its CPU kernels put off: they give zeros. Then all are built side by side, on as many
    compilers as there are cores. So this costs a run of the network, a capture of each core, and the time of the compilers over the
    number of cores. Kernels on a GPU are built by the run itself, and lie in Triton's cache.

    Args:
        network: stays as it is.
        examples: its arguments; sizes of tensors do not matter, dtypes and numbers of dims do.
        training: build what a training step needs too: the network runs once more, in training mode, and back from the sum of its results.

    Returns:
        The number of CPU kernels that were built; 0 if all were there.

    Raises:
        OperandTypeError: it is no module.
        BackendUnavailableError: there is no C++ compiler, or none that works.
        BuildError: the compiler failed at a kernel.
    """
    if not isinstance(network, nn.Module):
        raise OperandTypeError(
            f"a network is a `torch.nn.Module`, not {type(network).__name__}",
            hint="Of a core: `flexsn.build(flexsn.FlexSN(core, ...), x)`.",
        )
    if any(t.device.type == "cpu" for t in (*network.parameters(), *tensors(examples))):
        cpp_compiler.identity()  # raises if there is none, where a call would take the eager loop
    with collected() as wanted, torch.random.fork_rng(devices=[]):
        with torch.no_grad():
            _fresh(network).eval()(*examples)
        if training:
            with torch.enable_grad():
                results = [t.sum() for t in tensors(_fresh(network).train()(*examples)) if t.requires_grad]
                if results:
                    torch.autograd.backward(results)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="flexsn-build") as pool:
        list(pool.map(lambda made: load(*made), wanted.values()))
    return len(wanted)


def _fresh(network: nn.Module) -> nn.Module:
    """Return a copy without states."""
    own = copy.deepcopy(network)
    reset_net(own)
    return own


def tensors(found: Any) -> Iterator[Tensor]:
    """Give the tensors of lists, tuples and dicts."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, (list, tuple, dict)):
        for part in found.values() if isinstance(found, dict) else found:
            yield from tensors(part)


def add_build(commands: Any) -> list[argparse.ArgumentParser]:
    about = "build ahead every kernel that calls of a network need"
    parser = commands.add_parser("build", help=about, description=about[0].upper() + about[1:] + ".")
    parser.add_argument("target", metavar="MODULE:NAME", help="a network or a FlexSN: package.module:name or file.py:name")
    parser.add_argument(
        "--example", dest="shape", type=shape, action="append", required=True, metavar="T,N...", help="the shape of an input, such as "
        "10,1,64; once for each",
    )  # fmt: skip
    parser.add_argument("--training", action="store_true", help="also what a training step needs")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, default="float32", help="of the inputs (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where they are, such as cuda (default: %(default)s)")
    parser.set_defaults(run=run)
    return [parser]


def run(args: argparse.Namespace) -> Outcome:
    begun = time.perf_counter()
    with as_one_line(args.target):
        network: Any = load_target(args.target)
        if isinstance(network, nn.Module):
            network = network.to(device_of(args))
        built = build(network, *example_inputs(args, None), training=args.training)
    data = {"built": built, "seconds": time.perf_counter() - begun, "folder": str(disk_cache.folder())}
    kernels = f"{built} kernel{'s' if built != 1 else ''}"
    return Outcome(f"built {kernels} in {data['seconds']:.1f} s, kept in {data['folder']}" if built else "all kernels are there", data)
