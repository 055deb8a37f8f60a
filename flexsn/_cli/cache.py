"""`flexsn cache info` and `flexsn cache clear`: the kernels on disk."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from .._report.words import total
from .._runtime.disk_cache import abandoned
from .._runtime.disk_cache import folder as cache_folder
from .outcome import Outcome

_KERNEL = re.compile(r"[0-9a-f]{32}\.(so|cpp|sha256)")  # the names that `launch_cache.publish` gives


def add_cache(commands: Any) -> list[argparse.ArgumentParser]:
    parser = commands.add_parser("cache", help="the compiled kernels on disk", description="The compiled kernels on disk.")
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    info = actions.add_parser("info", help="where they are, how many, how large")
    info.set_defaults(run=lambda args: show(inspect_cache()))
    clear = actions.add_parser("clear", help="remove them; they are built again when they are needed")
    clear.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    clear.set_defaults(run=lambda args: clear_cache(dry=args.dry_run))
    return [info, clear]


def inspect_cache() -> dict[str, Any]:
    """Place, number of kernels, bytes, and seconds since the youngest was built."""
    folder = cache_folder()
    files = _files(folder)
    kernels = [f for f in files if f.suffix == ".so"]
    newest = max((f.stat().st_mtime for f in kernels), default=None)
    return {
        "folder": str(folder),
        "kernels": len(kernels),
        "bytes": sum(f.stat().st_size for f in files),
        "youngest_s": None if newest is None else max(0.0, time.time() - newest),
        "set_by": "FLEXSN_CACHE_DIR" if os.environ.get("FLEXSN_CACHE_DIR") else "default",
        "triton_folder": str(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"),
    }


def _files(folder: Path) -> list[Path]:
    """What flexsn wrote there; nothing else is looked at, and nothing else is removed."""
    return sorted(f for f in folder.iterdir() if _KERNEL.fullmatch(f.name) and f.is_file() and not f.is_symlink())


def show(found: dict[str, Any]) -> Outcome:
    lines = [
        f"{found['folder']} ({'from $' if found['set_by'] != 'default' else ''}{found['set_by']})",
        _told(found),
        f"Triton keeps its own in {found['triton_folder']}",
    ]
    return Outcome("\n".join(lines), found)


def _told(found: dict[str, Any]) -> str:
    """`12 CPU kernels, 340 kB`."""
    return f"{found['kernels']} CPU kernel{'s' if found['kernels'] != 1 else ''}, {total(found['bytes'])}"


def clear_cache(dry: bool) -> Outcome:
    """Remove the kernels and what builds that were cut off left; processes that have loaded them keep them."""
    folder = cache_folder()
    files = _files(folder)
    left = abandoned(folder, _STALE)
    freed = sum(f.stat().st_size for f in files)
    kernels = sum(f.suffix == ".so" for f in files)
    if not dry:
        for file in files:
            file.unlink(missing_ok=True)
        for build in left:
            shutil.rmtree(build, ignore_errors=True)
    data = {"folder": str(folder), "kernels": kernels, "bytes": freed, "removed": not dry}
    return Outcome(f"{'would remove' if dry else 'removed'} {_told(data)}, from {folder}", data)


_STALE = 3600.0  # seconds: a younger folder may be a build that runs
