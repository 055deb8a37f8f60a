"""The cache on disk: whose folders are trusted, and whose entries.

An entry `<key>.so` counts together with `<key>.sha256`. It appears by an atomic rename, whole or not at all, and is
loaded only from folders that nobody else can write or exchange.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import grp
import hashlib
import os
import pwd
import re
import shutil
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from ..errors import BackendUnavailableError

_ABANDONED = 24 * 3600  # seconds after which a build's folder was left by a process that was killed
_BUILD = re.compile(r"build-[a-z0-9_]{8}")
_private: Path | None = None
_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]  # as the standard library does


def folder() -> Path:
    """Return `$FLEXSN_CACHE_DIR/cpp`, by default under the user's cache folder; made if need be, and checked to be private."""
    given = os.environ.get("FLEXSN_CACHE_DIR")
    try:
        base = Path(given).expanduser() if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexsn"
    except RuntimeError:
        return private_folder("there is no home folder, and $FLEXSN_CACHE_DIR does not name one without it")
    try:
        base = base.absolute()  # no compiler takes it for an option
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        base = base.resolve()
        found = base / "cpp"
        found.mkdir(mode=0o700, exist_ok=True)
        open_to = writable_by_others(found)
    except OSError as error:
        return private_folder(f"cannot make a cache in {base}: {error.strerror}")
    return found if open_to is None else private_folder(f"{open_to} is not a folder that only this user can write")


def private_folder(reason: str) -> Path:
    """Return a cache for this process alone, removed when it ends; a warning gives the reason.

    Raises:
        BackendUnavailableError: it cannot be made either.
    """
    global _private
    with _lock:
        if _private is not None and _private.is_dir():  # a child has its parent's
            return _private
        try:
            made = Path(tempfile.mkdtemp(prefix="flexsn-")).absolute()
        except OSError as error:
            raise BackendUnavailableError(
                f'backend "cpp" has no place for its kernels: {reason}; nor for temporary files: {error.strerror}',
                hint="Set $FLEXSN_CACHE_DIR to a folder of your own, on a disk with space from which programs may run.",
            ) from error
        _private = made
    atexit.register(_remove, os.getpid(), made)
    warnings.warn(f"flexsn: {reason}; kernels are built anew in every process", RuntimeWarning, stacklevel=2)
    return made


def _remove(process: int, path: Path) -> None:
    if process == os.getpid():  # not in a child
        shutil.rmtree(path, ignore_errors=True)


# --- trust ----------------------------------------------------------------------------------------------------------------
def writable_by_others(path: Path) -> Path | None:
    """Return the first of a folder and those above it that another user could write or exchange, or None.

    Above the folder, a writable one counts as safe if it is sticky, as /tmp is: there nobody renames what is not theirs.
    """
    for place in (path, *path.parents):
        info = place.lstat()
        sticky = place != path and info.st_mode & stat.S_ISVTX
        owned = info.st_uid == os.getuid() or (place != path and info.st_uid in _administrators())
        if not stat.S_ISDIR(info.st_mode) or not owned or (_others_may_write(info) and not sticky):
            return place
    return None


def _others_may_write(info: os.stat_result) -> bool:
    return bool(info.st_mode & stat.S_IWOTH or (info.st_mode & stat.S_IWGRP and not _is_own_group(info.st_gid)))


@functools.cache
def _is_own_group(group: int) -> bool:
    """Whether a group is the one that many systems make for this user alone: of the same name, with nobody else in it."""
    try:
        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


@functools.cache
def _administrators() -> frozenset[int]:
    """Return root; inside a user namespace, where root's files show as those of an unknown user, that one too."""
    with contextlib.suppress(OSError, ValueError):
        inside, outside, count = map(int, Path("/proc/self/uid_map").read_text().split()[:3])
        if (inside, outside) != (0, 0) or count < 1 << 31:
            return frozenset({0, int(Path("/proc/sys/kernel/overflowuid").read_text())})
    return frozenset({0})


def trusted(path: Path) -> bool:
    """Whether an entry exists, is a plain file of this user that nobody else can write, and is whole."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
                return False
            return hashlib.sha256(file.read()).hexdigest() == path.with_suffix(".sha256").read_text()
    except (OSError, ValueError):  # not there, or not text
        return False


# --- entries --------------------------------------------------------------------------------------------------------------
def abandoned(place: Path, seconds: float) -> list[Path]:
    """Return folders in which a build was cut off more than `seconds` ago."""
    return [folder for folder in place.iterdir() if _is_cut_off(folder, time.time() - seconds)]


def _is_cut_off(folder: Path, since: float) -> bool:
    """Whether it has a name as `workshop` gives, is older, and holds nothing but what compilers write: no folder of the user's."""
    try:
        if not _BUILD.fullmatch(folder.name) or not stat.S_ISDIR((info := folder.lstat()).st_mode) or info.st_mtime > since:
            return False
        return all(f.name.startswith(("kernel", "cc")) and stat.S_ISREG(f.lstat().st_mode) for f in folder.iterdir())
    except OSError:  # it is gone: the build has ended
        return False


@contextlib.contextmanager
def workshop(path: Path) -> Iterator[Path]:
    """Give a folder beside an entry, to build it in; those that killed processes left go."""
    with contextlib.suppress(OSError):
        for old in abandoned(path.parent, _ABANDONED):
            shutil.rmtree(old, ignore_errors=True)
    made = tempfile.mkdtemp(prefix="build-", dir=path.parent)  # no TemporaryDirectory, which a forked child that ends removes too
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def publish(library: Path, source: Path, path: Path) -> None:
    """Move a library and its source to where an entry lies: other processes see all of it or nothing."""
    library.chmod(0o700)
    digest = library.with_suffix(".sha256")
    digest.write_text(hashlib.sha256(library.read_bytes()).hexdigest())
    os.replace(source, path.with_suffix(".cpp"))
    os.replace(digest, path.with_suffix(".sha256"))
    os.replace(library, path)
