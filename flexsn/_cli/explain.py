"""`flexsn explain package.module:core --shape T,N...`."""

from __future__ import annotations

import argparse
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._capture.signature import DTYPES, positional_names
from .._report import explain
from .._runtime.backends import NAMES
from ..errors import FlexSNError
from ..module import FlexSN
from .outcome import BAD, GOOD, Outcome, UsageError
from .target import load_target

DTYPE_NAMES = {str(d).removeprefix("torch."): d for d in DTYPES}


def add_explain(commands: Any) -> list[argparse.ArgumentParser]:
    about = "what flexsn makes of a core: graph, hoisting, kernels, cost; or why it cannot be fused"
    parser = commands.add_parser("explain", help=about, description=about[0].upper() + about[1:] + ".")
    parser.add_argument("target", metavar="MODULE:NAME", help="a core, a FlexSN or a network: package.module:name or file.py:name")
    add_operands(parser)
    parser.add_argument("--states", type=number_of_states, metavar="S", help="number of states of a core; by default what its inputs leave")
    parser.add_argument("--backend", choices=NAMES, help='by default "auto", or the module\'s own')
    parser.add_argument("--no-measure", action="store_true", help="time nothing")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page")
    parser.set_defaults(run=run)
    return [parser]


def add_operands(parser: argparse.ArgumentParser) -> None:
    """What the example inputs are."""
    parser.add_argument(
        "--shape", type=shape, action="append", metavar="T,N...", help="of the input sequences: steps, then the shape of a step; once "
        "for all inputs, or once for each; by default 100,1024",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPE_NAMES, default="float32", help="of the inputs (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where they are, such as cuda (default: %(default)s)")


def shape(text: str) -> tuple[int, ...]:
    """`100,32,512` -> (100, 32, 512)."""
    try:
        sizes = tuple(int(n) for n in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: write the steps and the sizes of a step, such as 100,32,512")
    return sizes


def number_of_states(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of states: write 0, 1, 2, ...")
    return int(text)


def run(args: argparse.Namespace) -> Outcome:
    with as_one_line(args.target):
        target = load_target(args.target)
        inputs = example_inputs(args, count_inputs(target, args.states))
        if isinstance(target, torch.nn.Module):
            target = target.to(device_of(args))
        states = None if args.states is None or isinstance(target, FlexSN) else (None,) * args.states
        report = explain(target, *inputs, states=states, backend=args.backend, measure=not args.no_measure)
    text, data = str(report), report.to_dict()
    if args.html:
        try:
            path = report.save(args.html)
        except OSError as error:
            raise UsageError(f"cannot write {args.html}: {error.strerror}") from None
        text, data["html"] = f"{report!r}\nwrote {path}", str(path)
    return Outcome(text, data, GOOD if report.fused else BAD)


@contextmanager
def as_one_line(name: str) -> Iterator[None]:
    """Whatever the user's code raises while it is imported and run, `SystemExit` included, as one line."""
    try:
        yield
    except FlexSNError:
        raise
    except (Exception, SystemExit) as error:
        told = " ".join(str(error).partition("\n")[0].split())
        raise UsageError(f"`{name}` cannot be run: {type(error).__name__}: {told}".removesuffix(": ") + _place(error)) from error


_NOT_THE_USERS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


def _place(error: BaseException) -> str:
    """The last line of the user's that was running."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*_NOT_THE_USERS, "<"))]
    return f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def count_inputs(target: Callable[..., Any], states: int | None) -> int | None:
    """How many inputs a target takes, where that is known."""
    if isinstance(target, FlexSN):
        return target.num_inputs
    names, required, open_ended = positional_names(target)
    return None if states is None or open_ended else max(1, (required or len(names)) - states)


def device_of(args: argparse.Namespace) -> torch.device:
    """Raises UsageError where PyTorch has no such device here."""
    try:
        device = torch.device(args.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a build of PyTorch without CUDA asserts
        raise UsageError(f"no device {args.device!r} here: {str(error).splitlines()[0]}") from None
    return device


def example_inputs(args: argparse.Namespace, count: int | None) -> list[Tensor]:
    """Numbers between 0 and 2, the same in every run."""
    shapes = args.shape or [(100, 1024)]
    if count is not None and len(shapes) == 1:
        shapes = shapes * count
    dtype, device = DTYPE_NAMES[args.dtype], device_of(args)
    generator = torch.Generator().manual_seed(0)
    drawn = [2 * torch.rand(s, generator=generator) for s in shapes]
    return [x.to(device, dtype) for x in drawn]
