"""Source text as HTML, coloured by Pygments where that is installed."""

from __future__ import annotations

from html import escape
from typing import Any


def _pygments() -> Any:
    try:
        import pygments.formatters
        import pygments.lexers
    except ImportError:
        return None
    return pygments


def highlight(source: str, language: str) -> str:
    """The text with a `<span>` per token, line by line as it was; without Pygments, escaped."""
    tools = _pygments()
    if tools is None:
        return escape(source)
    lexer = tools.lexers.get_lexer_by_name(language, stripnl=False, ensurenl=False)
    return tools.highlight(source, lexer, tools.formatters.HtmlFormatter(nowrap=True))


def highlight_style() -> str:
    """Style rules for light pages, and for dark ones."""
    tools = _pygments()
    if tools is None:
        return ""
    light, dark = (_rules(tools.formatters.HtmlFormatter(style=name)) for name in ("default", "github-dark"))
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def _rules(formatter: Any) -> str:
    """The rules of tokens; those of the page as a whole are ours."""
    lines = formatter.get_style_defs(".code").splitlines()
    return "\n".join(line for line in lines if line.startswith(".code ."))
