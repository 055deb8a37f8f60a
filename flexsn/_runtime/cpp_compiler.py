"""The C++ compiler: which one, and one run of it. No shell, no terminal, a limit on its time; of what it says the end is kept."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import BackendUnavailableError, BuildError, FlexSNError

_KEPT = 4096  # bytes of what a compiler says
_PATIENCE = 3.0  # seconds after which the user is told what takes so long
_REPORT = "Run `flexsn.scan(..., backend='torch')` meanwhile, and report the core: generated source should always build."


@functools.cache
def _find(wanted: str | None, path: str | None) -> tuple[str, int, int] | None:
    for name in [wanted] if wanted else ["g++", "c++", "clang++"]:
        found = shutil.which(name, path=path)
        if found:
            info = os.stat(found)
            return os.path.abspath(found), info.st_size, info.st_mtime_ns  # not its real path: what links lead to may go by their names
    return None


def compiler() -> tuple[str, int, int] | None:
    """Return path, size and age of the C++ compiler: `$CXX`, else the first of g++, c++, clang++ on `$PATH`."""
    return _find(os.environ.get("CXX"), os.environ.get("PATH"))


def identity() -> tuple[str, ...]:
    """Return the same as strings.

    Raises:
        BackendUnavailableError: there is none.
    """
    found = compiler()
    if found is None and (asked := os.environ.get("CXX")):
        raise BackendUnavailableError(
            f'backend "cpp" needs a C++ compiler, and $CXX is {asked!r}, which is no program on $PATH',
            hint="Give $CXX the name or path of one program, without arguments, or unset it: then g++, c++ or clang++ is taken.",
        )
    if found is None:
        raise BackendUnavailableError(
            'backend "cpp" needs a C++ compiler, and there is no g++, c++ or clang++ on $PATH',
            hint='Install g++ (Debian: `apt install g++`), or use backend="torch", the eager loop.',
        )
    return tuple(map(str, found))


def time_limit() -> float:
    """Return the seconds that one run of the compiler may take: `$FLEXSN_BUILD_TIMEOUT`, by default 600."""
    given = os.environ.get("FLEXSN_BUILD_TIMEOUT", "600")
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise BuildError(f"$FLEXSN_BUILD_TIMEOUT is {given!r}, not a number of seconds", hint="Unset it: the default is 600.")
    return seconds


def run(command: Sequence[str], folder: Path, told: str = "") -> None:
    """Run a compiler that writes into `folder`, its temporary files too.

    Args:
        told: what is said on stderr, once per process, if this takes longer than 3 s. `$FLEXSN_QUIET=1` keeps it from that.

    Raises:
        BuildError: it cannot be run, fails, or takes too long, or the program ends; it is killed then, with all that it started.
        OSError: the disk of `folder` is full.
    """
    limit = time_limit()
    try:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"LC_ALL": "C", "TMPDIR": str(folder)},
        )  # fmt: skip
    except OSError as error:
        raise BuildError(f"cannot run the compiler {command[0]}: {error.strerror}", hint="Set $CXX to a C++ compiler.") from error
    finished = False
    _running.add(process.pid)
    with process:
        try:
            if _ending:
                raise BuildError("the program ends")
            said = _listen(process, time.monotonic() + limit, told)
            finished = said is not None
        finally:
            _running.discard(process.pid)
            if not finished:
                _kill(process.pid)
    shown = " ".join(command[:2])
    if said is None:
        raise BuildError(
            f"the compiler had not finished after {limit:g} s, and was killed: {shown} ...",
            hint="Set $CXX to another compiler, or $FLEXSN_BUILD_TIMEOUT to more seconds.",
        )
    if process.returncode != 0:
        if "No space left" in said or "quota exceeded" in said or os.statvfs(folder).f_bavail == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        raise BuildError(f"the compiler failed (exit {process.returncode}): {shown} ...\n{said[-2000:]}", hint=_REPORT)


_running: set[int] = set()  # also on threads that do not keep the program from ending
_threads: set[threading.Thread] = set()
_ending = False


def _kill(process: int) -> None:
    """Kill a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def in_background(work: Callable[[], object]) -> None:
    """Call `work`, which runs compilers, on a thread that ends with the program. Errors are left to whoever needs its result."""

    def go() -> None:
        try:
            work()
        except (FlexSNError, OSError):
            pass  # the call that needs the result tries again, and raises
        finally:
            _threads.discard(thread)

    thread = threading.Thread(target=go, name="flexsn-build", daemon=True)
    _threads.add(thread)
    thread.start()


@atexit.register
def _kill_running() -> None:
    global _ending
    _ending = True  # a thread that is about to start a compiler sees it
    for process in list(_running):
        _kill(process)
    for thread in list(_threads):  # which remove their folders
        thread.join(10)


def _after_fork() -> None:
    _running.clear()
    _threads.clear()


os.register_at_fork(after_in_child=_after_fork)


_told: set[str] = set()


def _tell(line: str) -> None:
    if line not in _told and os.environ.get("FLEXSN_QUIET") != "1" and sys.stderr is not None:
        _told.add(line)
        print(f"flexsn: {line}", file=sys.stderr, flush=True)


def _listen(process: subprocess.Popen, deadline: float, told: str) -> str | None:
    """Return the end of what a process says until it ends, or None if the deadline comes first; tell the user why it takes long."""
    assert process.stdout is not None
    file = process.stdout.fileno()
    poll, kept, ended, patience = select.poll(), b"", False, time.monotonic() + _PATIENCE
    poll.register(file, select.POLLIN)
    while not ended:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        if told and time.monotonic() >= patience:
            _tell(told)
            told = ""
        if poll.poll(1000 * min(left, 0.5)):
            block = os.read(file, 1 << 16)
            kept, ended = (kept + block)[-_KEPT:], not block
        else:
            ended = process.poll() is not None  # what it started may hold its output open
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    return kept.decode(errors="replace")
