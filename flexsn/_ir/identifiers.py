"""The user's names in generated code: which of them may stand there."""

from __future__ import annotations

import re

from torch import fx

_RESERVED = frozenset(
    """alignas alignof and asm auto bool break case catch char class compl concept const continue decltype default delete do
    double else enum explicit export extern false final float for friend goto if import inline int int16_t int32_t int64_t int8_t
    long main major minor errno stdin stdout stderr assert linux unix mutable namespace new noexcept not nullptr operator or
    private protected public register requires return short
    signed sizeof static struct switch template this throw true try typedef typeid typename uint8_t union unsigned using
    virtual void volatile wchar_t while xor i j k n N T K tile begin flexsn half bfloat16 load store std p
    def del elif except from global in is lambda tl triton math libdevice None
    nonlocal pass raise with yield True False await async
    and_eq bitand bitor char16_t char32_t const_cast constexpr dynamic_cast not_eq or_eq reinterpret_cast static_assert static_cast
    thread_local xor_eq""".split()
)


def identifier(text: str | None) -> str | None:
    """Return a user's name as it may stand in generated code, or None."""
    if not text:
        return None
    name = text.rpartition(".")[2]
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,40}", name) or "__" in name or re.fullmatch(r"t\d+", name):
        return None
    taken = name in _RESERVED or name.endswith(("_row", "_seq")) or name != name.lower()  # capitals may be C macros
    return name + "_" if taken else name


def is_identifier(name: object) -> bool:
    """Return whether a name is nothing but a name in generated code; `identifier` and a graph's builder give such ones."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,60}", name) is not None


def assigned_name(node: fx.Node) -> str | None:
    """Return the name on the left of the user's line."""
    match = re.match(r".*?:\d+: (([A-Za-z_]\w*)\s*(?::[^=]*)?=(?!=).*)", node.meta.get("line") or "")
    return identifier(match.group(2)) if match and _is_assignment(match.group(1)) else None


def _is_assignment(text: str) -> bool:
    """Whether a line `name = ...` names what it computes: no whole lambda, no second statement, no argument of a call."""
    return not re.search(r"\blambda\b|;|,$", text) and text.count(")") <= text.count("(")
