"""What a core wrote to the stand-ins of what it captures."""

from __future__ import annotations

import collections
import types
from typing import Any

from ..errors import SideEffectError

_STATE = "What changes from step to step is a state: take it as an argument and return its new value."
_HOOK = (
    "A hook of a module may set it (`torch.nn.utils.prune`, the old `weight_norm`): make that permanent with `prune.remove(module, name)`, "
    "or use `torch.nn.utils.parametrize`."
)
_MISSING, _EMPTY = object(), types.CellType()


class Shells:
    """The mutable stand-ins of a core: cells, tables of globals and attributes, containers."""

    def __init__(self) -> None:
        self._shells: list[tuple[str, Any]] = []
        self._before: list[dict[Any, Any]] = []

    def add(self, path: str, shell: Any) -> None:
        """Watch a stand-in."""
        self._shells.append((path, shell))

    def settle(self) -> None:
        """Take what every stand-in holds as what it has to hold."""
        self._before = [_held(shell) for _, shell in self._shells]

    def refuse_writes(self, core: str, hooked: bool) -> None:
        """Raise `SideEffectError` if one holds anything else; `hooked`: a module among them has hooks."""
        for (path, shell), before in zip(self._shells, self._before, strict=True):
            now = _held(shell)
            changed = [k for k in now.keys() | before.keys() if now.get(k, _MISSING) is not before.get(k, _MISSING)]
            if changed:
                where = ".".join(filter(None, (path, changed[0] if isinstance(changed[0], str) and not isinstance(shell, set) else "")))
                raise SideEffectError(f"changes `{where}` while it runs", core=core, hint=_HOOK if hooked else _STATE)


def _held(shell: Any) -> dict[Any, Any]:
    """Return what a stand-in holds, by key."""
    if isinstance(shell, dict):
        return dict(shell)
    if isinstance(shell, types.CellType):
        return {"": shell.cell_contents} if shell != _EMPTY else {}
    return dict(enumerate(shell)) if isinstance(shell, (list, collections.deque)) else {repr(one): _MISSING for one in shell}
