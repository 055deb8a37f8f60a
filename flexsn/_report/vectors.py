"""What a compiler made of a kernel: the width of its vectors and the registers that it uses."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

_BITS = {"zmm": 512, "ymm": 256, "xmm": 128}
_PACKED = re.compile(r"\s(v?p?[a-z0-9]+)\s+.*%([xyz]mm)\d")
_REGISTER = re.compile(r"%([xyz]mm)(\d+)")
_NEON = re.compile(r"\bv(\d+)\.(?:4s|2d|8h|16b)\b")


def vector_facts(library: Path) -> dict[str, Any]:
    """Bits of the widest vectors that a library computes with, and how many of these registers it names; `note` where
    that cannot be read."""
    tool = shutil.which("objdump")
    if tool is None:
        return {"note": "vector width unknown: objdump is not installed"}
    done = subprocess.run([tool, "-d", "--no-show-raw-insn", str(library)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"note": f"vector width unknown: objdump failed ({done.stderr.strip()[:200]})"}
    return read_assembly(done.stdout)


def read_assembly(text: str) -> dict[str, Any]:
    """The same, from the text of a disassembler (x86-64, AArch64)."""
    neon = set(_NEON.findall(text))
    if neon:
        return {"vector_bits": 128, "vector_registers": len(neon)}
    widest = None
    for line in text.splitlines():
        match = _PACKED.search(line)
        if match and _computes_packed(match[1]):
            widest = max(widest or 0, _BITS[match[2]])
    if widest is None:
        return {"vector_bits": 0, "note": "no vector arithmetic found"}
    used = {number for kind, number in _REGISTER.findall(text) if _BITS[kind] == widest}
    return {"vector_bits": widest, "vector_registers": len(used)}


def _computes_packed(mnemonic: str) -> bool:
    """Whether an instruction does arithmetic on all lanes: not a move, and not on one element only."""
    name = mnemonic.removeprefix("v")
    floating = name.endswith(("ps", "pd")) and not name.startswith(("mov", "cvt", "unpck", "shuf", "xor"))
    integer = name.startswith(("padd", "psub", "pmul", "pcmp", "pmin", "pmax"))
    return floating or integer
