"""A report as text for a terminal."""

from __future__ import annotations

import itertools

from ..errors import as_shown
from .measure import disturbance
from .model import Facts, Op, Operand, Pass
from .words import launch_words, placed, seconds, short, total

_MARKS = {"step": "*", "static": "^", "reduced": "^", "problem": "!"}


def report_text(report: Facts, title: str) -> str:
    sections = [
        _heading(report, title),
        _problem(report),
        _pieces(report),
        _source(report),
        _dependencies(report),
        _hoisted(report),
        _costs(report),
        _kernels(report),
        *(f"--- generated {name} ({p.language}) ---\n{p.source.rstrip()}" for name, p in report.passes.items() if name != "inference"),
    ]
    return "\n\n".join(s for s in sections if s)


def _heading(report: Facts, title: str) -> str:
    state = report.summary()
    lines = [f"=== {title}: {state} ===", f"backend {report.choice.name}: {report.choice.why}"]
    lines += [f"  {name}: {why}" for name, why in report.choice.others.items() if name != report.choice.name]
    if report.where:
        lines.append(f"core at {as_shown(report.where)}")
    lines.append(f"T = {report.T}, step shape {list(report.step_shape)} = {report.neurons} neurons, on {report.device}")
    lines += [f"  {o.kind:9}{operand_words(o)}" for o in report.operands]
    machine = report.machine
    lines.append(
        f"{machine['processor']}, {machine['threads']} threads; GPU {machine['gpu']}; torch {machine['torch']}, flexsn {machine['flexsn']}"
    )
    return "\n".join(lines)


def operand_words(operand: Operand) -> str:
    if operand.kind == "frozen":
        return f"{operand.name}: a {operand.dtype}, as it was at the capture: later changes are not seen"
    return f"{operand.name}: " + (f"{operand.dtype}{list(operand.shape)}" if operand.dtype else "as the core returns it")


def _problem(report: Facts) -> str:
    p = report.problem
    if p is None:
        return ""
    lines = [f"--- why not: {p.error} ---", p.message]
    lines += [f"  op       {p.op}"] if p.op else []
    lines += [f"  at       {as_shown(p.line)}"] if p.line else []
    lines += [f"  instead  {p.hint}"] if p.hint else []
    return "\n".join(lines)


def _pieces(report: Facts) -> str:
    lines = ["--- pieces (in the order in which they run) ---"]
    for piece in itertools.chain(*[(whole, *whole.parts) for whole in report.pieces]):
        indent = "      " if "." in piece.number else "  "
        lines.append(f"{indent}{piece.number}. {piece.text}")
        lines += [f"{indent}     {line}" for line in (piece.why, *map(placed, piece.lines)) if line]
    return "\n".join(lines) if report.pieces else ""


def _source(report: Facts) -> str:
    """The core, with the ops of each line under it."""
    if not report.source:
        return "\n".join(["--- captured graph ---", *(f"  {op_words(op)}" for op in report.captured)]) if report.captured else ""
    file = (report.where or "").rpartition(":")[0]
    by_line: dict[str, list[Op]] = {}
    for op in report.captured:
        by_line.setdefault(short(op.line), []).append(op)
    lines = ["--- core and captured graph (* in the kernel, ^ hoisted, ! cannot be fused) ---"]
    for row in report.source:
        mark = "".join(_MARKS[k] for k in row.kinds)
        lines.append(f"{mark:>2}{row.number:5}  {row.text}".rstrip())
        lines += [f"{'':10}. {op_words(op)}" for op in by_line.pop(short(f"{file}:{row.number}:"), [])]
    for place, ops in by_line.items():
        lines += [f"  at {place or 'a line that is not known'}", *(f"{'':10}. {op_words(op)}" for op in ops)]
    return "\n".join(lines)


def op_words(op: Op) -> str:
    return f"{op.name} = {op.text}" + ("" if op.kind == "step" else f"   [{op.kind}]")


def _dependencies(report: Facts) -> str:
    if report.drawing is None:
        return ""
    boxes, lines = report.drawing.boxes, ["--- dependencies ---"]
    for key, (label, kind) in boxes.items():
        if kind in ("value", "output", "next"):
            needs = [boxes[source][0] for source, target in report.drawing.edges if target == key]
            lines.append(f"  {label}{' at the next step' if kind == 'next' else ''} <- {', '.join(needs) or 'a constant'}")
    return "\n".join(lines)


def _hoisted(report: Facts) -> str:
    if not report.passes:
        return ""
    lines = ["--- hoisted: once per call, by PyTorch ---"]
    for title, ops in (("prologue", report.prologue), ("epilogue", report.epilogue)):
        lines += [f"  {title}{'' if ops else ': nothing'}", *(f"    {op.name} = {op.text}   {op.line or ''}".rstrip() for op in ops)]
    return "\n".join(lines)


COLUMNS = ("kernel", "B read", "B written", "ops", "bytes moved", "copy of as many", "measured", "of the bound")


def cost_row(name: str, p: Pass) -> tuple[str, ...]:
    """Cells of the table of costs: per neuron-step, then of the call."""
    share = f"{p.measured_s / p.bound_s:.2f} x" if p.measured_s and p.bound_s else "-"
    ops = f"{p.operations_per_neuron_step}" + (f" ({p.recomputed} recomputed)" if p.recomputed else "")
    return (name, f"{p.bytes_read:g}", f"{p.bytes_written:g}", ops, total(p.bytes_moved), seconds(p.bound_s), seconds(p.measured_s), share)


def _costs(report: Facts) -> str:
    if not report.passes:
        return ""
    rows = [COLUMNS, *(cost_row(name, p) for name, p in report.passes.items())]
    widths = [max(len(r[i]) for r in rows) for i in range(len(COLUMNS))]
    table = ["  " + "  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    rate = report.passes["inference"].copy_rate
    note = f"copy rate of this machine at this size: {rate / 1e9:.1f} GB/s" if rate else whole_words(report) or "not measured"
    of = "of the piece that is shown, not measured by itself" if report.pieces else "times of whole calls, the shortest of several"
    title = f"--- cost (bytes and operations per neuron-step; {of}) ---"
    told = [f"  {line}" for line in (note, disturbance(report.others_busy)) if line]
    return "\n".join([title, *table, *told])


def whole_words(report: Facts) -> str:
    """What a call with all its pieces takes; "" where that is not known."""
    if not report.whole:
        return ""
    trains = f", and {seconds(report.whole['training'])} with its backward" if "training" in report.whole else ""
    return f"the whole call takes {seconds(report.whole['inference'])}{trains} (the shortest of several)"


def _kernels(report: Facts) -> str:
    lines = []
    for name, p in report.passes.items():
        counted = ", ".join(f"{n} {op}" for op, n in p.operations.items())
        lines += [f"--- {name} ---", p.plan, f"  computes {counted}", f"  launch   {launch_words(p.launch)}"]
    return "\n".join(lines)
