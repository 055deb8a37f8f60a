"""Arguments in, an outcome out: printed as text, or as JSON with `--json`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

from .._version import __version__
from ..errors import FlexSNError
from .bench import add_bench
from .cache import add_cache
from .completion import add_completion
from .doctor import add_doctor
from .explain import add_explain
from .outcome import USAGE, Outcome

_ABOUT = "Write one time step of a spiking neuron in plain PyTorch, get one fused kernel for the whole sequence."
_CODES = "Exit codes: 0 all is well; 1 bad news (a core cannot be fused, a self-test fails); 2 the command does not make sense."


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("flexsn", description=_ABOUT, epilog=_CODES)
    parser.add_argument("--version", action="version", version=f"flexsn {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (add_explain, add_bench, add_doctor, add_cache):
        for command in add(commands):
            command.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_completion(commands, make_parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    args = make_parser().parse_args(argv)
    command: Callable[[argparse.Namespace], Outcome] = args.run
    try:
        outcome = command(args)
    except FlexSNError as error:
        outcome = _failure(error, args.json)
    return _show(outcome, args.json)


def _failure(error: FlexSNError, as_json: bool) -> Outcome:
    told = {"type": type(error).__name__, "message": error.reason, "core": error.core, "line": error.line, "hint": error.hint}
    if not as_json:
        print(f"flexsn: {error}", file=sys.stderr)
    return Outcome("", {"error": told}, USAGE)


def _show(outcome: Outcome, as_json: bool) -> int:
    text = json.dumps(outcome.data, indent=2) if as_json else outcome.text
    try:
        if text:
            print(text, flush=True)
    except BrokenPipeError:  # a reader such as `head` has seen enough; Python flushes stdout once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return outcome.code
