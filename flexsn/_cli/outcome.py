"""What a command gives: text for people, data for programs, an exit code for scripts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import FlexSNError

GOOD, BAD, USAGE = 0, 1, 2


@dataclass
class Outcome:
    """`code`: 0 all is well; 1 the answer is bad news (a core cannot be fused, a self-test fails)."""

    text: str
    data: dict[str, Any] = field(default_factory=dict)
    code: int = GOOD


class UsageError(FlexSNError):
    """The command cannot be carried out as it was given: exit code 2."""


def table(rows: list[tuple[str, ...]], indent: str = "") -> str:
    """Rows of cells in columns, the last one ragged."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return "\n".join((indent + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True))).rstrip() for r in rows)
