"""Arguments in, an outcome out: printed as text, or as JSON with `--json`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .._version import __version__
from ..errors import FlexSNError
from .bench import add_bench
from .build import add_build
from .cache import add_cache
from .doctor import add_doctor
from .explain import add_explain
from .outcome import USAGE, Outcome, UsageError

_ABOUT = "Write one time step of a spiking neuron in plain PyTorch, get one fused kernel for the whole sequence."
_CODES = "Exit codes: 0 all is well; 1 bad news (a core cannot be fused, a self-test fails); 2 the command does not make sense."


class _Parser(argparse.ArgumentParser):
    """Its errors are told as all others are; its commands' parsers are of this class too."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise UsageError(message)


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser("flexsn", description=_ABOUT, epilog=_CODES)
    parser.add_argument("--version", action="version", version=f"flexsn {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (add_explain, add_bench, add_build, add_doctor, add_cache):
        for command in add(commands):
            command.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    as_json = "--json" in words  # known before the others are
    try:
        args = make_parser().parse_args(words)
        as_json = args.json
        outcome: Outcome = args.run(args)
    except FlexSNError as error:
        outcome = _failure(error, as_json)
    return _show(outcome, as_json)


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
