"""A report as one HTML page (well-formed XML too) that needs nothing beside itself: styles and drawings are inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from ..errors import as_shown
from .measure import disturbance
from .model import Facts, Op, Pass, SourceLine
from .svg import draw, draw_pieces
from .text import COLUMNS, cost_row, op_words, operand_words, whole_words
from .words import launch_words, short


def page(parts: Mapping[str, Facts]) -> str:
    """The page of some reports, by title."""
    title = "flexsn: " + ", ".join(parts)
    body = "\n".join(_article(name, report, i) for i, (name, report) in enumerate(parts.items()))
    links = "".join(f'<li><a href="#r{i}">{escape(name)}</a> {_badge(report)}</li>' for i, (name, report) in enumerate(parts.items()))
    contents = f"<nav><ul>{links}</ul></nav>" if len(parts) > 1 else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(title)}</title>\n<style>\n{_css(STYLE + highlight_style())}\n</style>\n</head>\n"
        f"<body>\n<main>\n{contents}\n{body}\n</main>\n</body>\n</html>\n"
    )


def _css(text: str) -> str:
    """A style sheet as it may stand in HTML and in XML alike."""
    return text.replace("<", "").replace("&", "")


def _article(title: str, report: Facts, number: int) -> str:
    sections = [
        _heading(title, report),
        _problem(report),
        _section(
            "Pieces", _pieces(report, number), "In the order in which they run. Dashed: to the next step. What follows is of one of them."
        ),
        _section("Inputs, states, outputs", _drawing(report, number), "Which values of a step depend on which. Dashed: to the next step."),
        _section("Core", _source(report), _LEGEND),
        _section(
            "Hoisted",
            _hoisted(report),
            "Run once per call by PyTorch, not at every step: they depend on params and captured tensors alone.",
        ),
        _section("Cost", _costs(report), _cost_note(report)),
        *(_section(f"Kernel: {name}", _kernel(p)) for name, p in report.passes.items()),
        _section("Step graph", _graphs(report), "One step over the closed op set, and its vector-Jacobian product."),
    ]
    return f'<article id="r{number}">\n' + "\n".join(s for s in sections if s) + "\n</article>"


def _drawing(report: Facts, number: int) -> str:
    return "" if report.drawing is None else draw(report.drawing, f"Dependencies of {report.core}", str(number))


def _pieces(report: Facts, number: int) -> str:
    return draw_pieces(report.pieces, f"Pieces of {report.core}", f"{number}-pieces") if report.pieces else ""


def _section(title: str, body: str, note: str = "") -> str:
    if not body:
        return ""
    told = f"<p>{escape(note)}</p>\n" if note else ""
    return f"<section>\n<h2>{escape(title)}</h2>\n{told}{body}\n</section>"


def _badge(report: Facts) -> str:
    return f'<span class="badge {"good" if report.fused else "bad"}">{escape(report.summary())}</span>'


def _heading(title: str, report: Facts) -> str:
    machine = report.machine
    facts = [
        ("backend", f"{report.choice.name}: {report.choice.why}"),
        *((name, why) for name, why in report.choice.others.items() if name != report.choice.name),
        ("core", as_shown(report.where) if report.where else "written outside Python files"),
        ("example", f"T = {report.T}, step shape {list(report.step_shape)} = {report.neurons} neurons, on {report.device}"),
        *((o.kind, operand_words(o)) for o in report.operands),
        ("machine", f"{machine['processor']}, {machine['threads']} threads; GPU {machine['gpu']}"),
        ("versions", f"flexsn {machine['flexsn']}, torch {machine['torch']}, Python {machine['python']}"),
    ]
    return f"<h1>{escape(title)} {_badge(report)}</h1>\n{_facts(facts)}"


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    rows = "\n".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f'<div class="wide"><table class="facts">\n{rows}\n</table></div>'


def _problem(report: Facts) -> str:
    p = report.problem
    if p is None:
        return ""
    where = as_shown(p.line) if p.line else None
    told = [("error", f"flexsn.errors.{p.error}"), ("what", p.message), ("op", p.op), ("at", where), ("instead", p.hint)]
    return f'<section class="problem">\n<h2>Why it is not fused</h2>\n{_facts((k, v) for k, v in told if v)}\n</section>'


# --- the core ---------------------------------------------------------------------------------------------------------------------
_LEGEND = "Under each line the ops that it ran; step: in the kernel; static: hoisted."


def _source(report: Facts) -> str:
    by_line: dict[str, list[Op]] = {}
    for op in report.captured:
        by_line.setdefault(short(op.line), []).append(op)
    file = (report.where or "").rpartition(":")[0]
    coloured = highlight("\n".join(row.text for row in report.source), "python").split("\n")
    rows = []
    for row, code in zip(report.source, coloured, strict=False):
        rows.append(_source_row(row, code))
        rows += [_op_row(op) for op in by_line.pop(short(f"{file}:{row.number}:"), [])]
    for place, ops in by_line.items():
        rows.append(f'<tr><td class="number"></td><td class="kinds"></td><td>at {escape(place or "a line that is not known")}</td></tr>')
        rows += [_op_row(op) for op in ops]
    return '<div class="wide"><table class="source">\n' + "\n".join(rows) + "\n</table></div>" if rows else ""


def _source_row(row: SourceLine, code: str) -> str:
    kinds = " ".join(f'<span class="kind {k}">{k}</span>' for k in row.kinds)
    marked = ' class="at-fault"' if "problem" in row.kinds else ""
    return f'<tr{marked}><td class="number">{row.number}</td><td class="kinds">{kinds}</td><td class="code"><pre>{code}</pre></td></tr>'


def _op_row(op: Op) -> str:
    kind = f'<span class="kind {op.kind}">{op.kind}</span>'
    return f'<tr class="op"><td></td><td class="kinds">{kind}</td><td><pre>{escape(op_words(op))}</pre></td></tr>'


def _hoisted(report: Facts) -> str:
    if not report.passes:
        return ""
    lines = []
    for title, ops in (("Prologue", report.prologue), ("Epilogue", report.epilogue)):
        listed = "\n".join(escape(f"{op.name} = {op.text}" + (f"   # {short(op.line)}" if op.line else "")) for op in ops)
        lines.append(f"<h3>{title}</h3>\n<pre>{listed or 'nothing'}</pre>")
    return "\n".join(lines)


# --- the kernels ------------------------------------------------------------------------------------------------------------------
def _costs(report: Facts) -> str:
    if not report.passes:
        return ""
    head = "".join(f"<th>{escape(c)}</th>" for c in COLUMNS)
    rows = ["<tr>" + "".join(f"<td>{escape(c)}</td>" for c in cost_row(name, p)) + "</tr>" for name, p in report.passes.items()]
    return f'<div class="wide"><table class="costs">\n<tr>{head}</tr>\n' + "\n".join(rows) + "\n</table></div>"


def _cost_note(report: Facts) -> str:
    rate = next((p.copy_rate for p in report.passes.values()), None)
    measured = f" A copy of this size moves {rate / 1e9:.1f} GB/s here." if rate else " Nothing was measured."
    if report.whole:
        measured = f" They are of the piece that is shown, which is not measured by itself; {whole_words(report)}."
    return (
        "Bytes and operations per neuron-step; times of whole calls from Python, the shortest of several. The bound is the time "
        "that PyTorch's own copy takes to move as many bytes." + f"{measured} {disturbance(report.others_busy)}".rstrip()
    )


def _kernel(p: Pass) -> str:
    counted = ", ".join(f"{n} {op}" for op, n in p.operations.items())
    facts = _facts([("chunk", f"{p.chunk} steps"), ("launch", launch_words(p.launch)), ("computes", counted or "nothing")])
    opened = "" if p.name == "inference" else ' open="open"'
    source = f'<details{opened}><summary>Generated source</summary>\n<pre class="code">{highlight(p.source, p.language)}</pre></details>'
    return f"{facts}\n<pre>{escape(p.plan)}</pre>\n{source}"


def _graphs(report: Facts) -> str:
    shown = [("step", report.graph), ("VJP", report.vjp)]
    return "\n".join(f"<details><summary>{title}</summary>\n<pre>{escape(text)}</pre></details>" for title, text in shown if text)


# --- source text, coloured by Pygments where that is installed -----------------------------------------------------------------------
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


# --- the style sheet: light and dark, wide enough for code, readable when printed -----------------------------------------------------
STYLE = """
:root { color-scheme: light dark; --ink: #1d232a; --soft: #5d6975; --paper: #ffffff; --tint: #f4f6f8; --line: #d5dbe1;
  --good: #1a7f4b; --bad: #b3261e; --input: #2b6cb0; --state: #8a5a00; --param: #6b46a8; --output: #1a7f4b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ed; --soft: #9aa6b2; --paper: #14181d; --tint: #1d232a; --line: #353f4a;
  --good: #5bc98c; --bad: #ff8a80; --input: #7db4ef; --state: #e0b050; --param: #b89bef; --output: #5bc98c; } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px; }
h1 { font-size: 26px; margin: 8px 0 16px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 6px; padding-top: 12px; border-top: 1px solid var(--line); }
h3 { font-size: 15px; margin: 14px 0 4px; }
p { color: var(--soft); margin: 4px 0 10px; }
pre { font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; background: var(--tint); padding: 10px 12px; border-radius: 6px;
  overflow-x: auto; margin: 6px 0; }
table { border-collapse: collapse; }
.wide { overflow-x: auto; }
.facts th { text-align: left; font-weight: 600; color: var(--soft); padding: 2px 18px 2px 0; vertical-align: top; white-space: nowrap; }
.facts td { padding: 2px 0; overflow-wrap: anywhere; }
.costs th, .costs td { text-align: right; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
.costs th:first-child, .costs td:first-child { text-align: left; }
.source { width: 100%; background: var(--tint); border-radius: 6px; }
.source pre { background: none; margin: 0; padding: 1px 8px; }
.source .number { color: var(--soft); text-align: right; padding: 0 8px; font: 13px ui-monospace, monospace; }
.source .kinds { white-space: nowrap; width: 1px; }
.source .op pre { color: var(--soft); padding-left: 40px; font-size: 12px; }
.source .at-fault { background: color-mix(in srgb, var(--bad) 18%, transparent); }
.kind { font-size: 11px; padding: 0 6px; border-radius: 8px; border: 1px solid currentColor; }
.kind.step { color: var(--input); } .kind.static, .kind.reduced { color: var(--param); } .kind.problem { color: var(--bad); }
.op .kind { opacity: 0.6; border-color: transparent; }
.badge { font-size: 14px; font-weight: 600; padding: 2px 10px; border-radius: 12px; border: 1px solid currentColor; white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); }
section.problem { border-left: 4px solid var(--bad); padding-left: 16px; }
.problem h2 { border-top: none; color: var(--bad); }
summary { cursor: pointer; margin-top: 8px; }
a { color: var(--input); }
svg.dependencies { max-width: 100%; height: auto; }
svg text { font: 12px ui-monospace, "DejaVu Sans Mono", monospace; fill: var(--ink); }
svg rect { fill: var(--tint); stroke: var(--soft); stroke-width: 1.2; }
svg .input rect { stroke: var(--input); } svg .state rect, svg .next rect { stroke: var(--state); }
svg .param rect { stroke: var(--param); } svg .output rect { stroke: var(--output); }
svg .loop-head rect { fill: none; stroke: var(--state); } svg .call rect { stroke: var(--param); }
svg .soft { fill: var(--soft); }
svg .edge { fill: none; stroke: var(--soft); stroke-width: 1.2; }
svg .loop { fill: none; stroke: var(--state); stroke-width: 1.2; stroke-dasharray: 5 4; }
svg .tip { fill: var(--soft); }
@media print { main { max-width: none; } pre { white-space: pre-wrap; } }
"""
