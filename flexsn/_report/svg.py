"""A small writer of layered drawings: operands at the left, what a step returns at the right, a loop for every state; and of the pieces of
a core that mixes neurons, from top to bottom."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from html import escape

from .model import Drawing, Piece
from .words import placed

_CHARACTER, _HEIGHT, _GAP, _LANE, _MARGIN, _LOOP = 7.4, 28, 18, 64, 16, 8  # pixels
_LAST = ("output", "next")
_PLAIN = 'fill="none" stroke="#6b7785" font-family="monospace" font-size="12"'  # a style sheet's rules come before these


@dataclass
class Box:
    """A box, or (without a label) a bend of an edge that passes a layer."""

    layer: int
    label: str = ""
    kind: str = ""
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0


def draw(drawing: Drawing, title: str, ident: str = "0") -> str:
    """An `<svg>` element, of an `ident` that no other on a page has; its colours are the page's, grey where that has none."""
    boxes = {key: Box(layer, *drawing.boxes[key]) for key, layer in _layers(drawing).items()}
    paths = _bend(boxes, drawing.edges)
    columns = _order(boxes, paths)
    loops = [(key, key.removeprefix("out:")) for key, box in boxes.items() if box.kind == "next"]
    side = _MARGIN + _LOOP * len(loops)
    width, bottom = _place(columns, side)
    height = bottom + _LOOP * len(loops)
    lines = [_edge([boxes[k] for k in path], ident) for path in paths]
    lines += [_loop(boxes[a], boxes[b], i, bottom, ident) for i, (a, b) in enumerate(loops)]
    lines += [_box(box) for box in boxes.values() if box.kind]
    return _svg(title, width, height, ident, lines)


def _svg(title: str, width: float, height: float, ident: str, lines: list[str]) -> str:
    tip = (
        f'<defs><marker id="{_tip(ident)}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" fill="#6b7785" stroke="none" d="M0,0 L8,4 L0,8 z"/></marker></defs>'
    )
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return "\n".join([f'<svg class="dependencies" role="img" {size} {_PLAIN}>', f"<title>{escape(title)}</title>", tip, *lines, "</svg>"])


def _tip(ident: str) -> str:
    """The marker at the end of an edge."""
    return f"tip-{ident}"


def _layers(drawing: Drawing) -> dict[str, int]:
    """Operands first, every value one after the last that it needs, what is returned last."""
    needs = defaultdict(list)
    for source, target in drawing.edges:
        needs[target].append(source)
    layers: dict[str, int] = {}
    for key, (_, kind) in drawing.boxes.items():  # in order of computation
        layers[key] = 1 + max((layers[s] for s in needs[key]), default=0) if kind in ("value", *_LAST) else 0
    last = max([1, *layers.values(), *(1 + n for k, n in layers.items() if drawing.boxes[k][1] == "value")])
    return {k: last if drawing.boxes[k][1] in _LAST else n for k, n in layers.items()}


def _bend(boxes: dict[str, Box], edges: list[tuple[str, str]]) -> list[list[str]]:
    """Edges as paths with a bend in every layer between; an edge over several layers keeps clear of the boxes there."""
    paths = []
    for source, target in edges:
        path = [source]
        for layer in range(boxes[source].layer + 1, boxes[target].layer):
            path.append(f"bend:{source}:{layer}")  # shared by all edges of one source
            boxes.setdefault(path[-1], Box(layer))
        paths.append([*path, target])
    return paths


def _order(boxes: dict[str, Box], paths: list[list[str]]) -> list[list[Box]]:
    """Boxes by layer, in each near those that they are joined to."""
    columns: list[list[str]] = [[] for _ in range(1 + max(b.layer for b in boxes.values()))]
    for key, box in boxes.items():
        columns[box.layer].append(key)
    joined: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        for a, b in itertools.pairwise(path):
            joined[a].append(b)
            joined[b].append(a)
    for sweep in range(6):
        forth = sweep % 2 == 0
        layers = range(1, len(columns)) if forth else range(len(columns) - 2, -1, -1)
        for layer in layers:
            beside = columns[layer - 1 if forth else layer + 1]
            height = {k: _mean([i / len(beside) for i, j in enumerate(beside) if j in joined[k]]) for k in columns[layer]}
            columns[layer].sort(key=height.__getitem__)
    return [[boxes[k] for k in column] for column in columns]


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.5


def _place(columns: list[list[Box]], side: float) -> tuple[float, float]:
    """Coordinates of all boxes; returns the width of the drawing and the lower edge of the lowest box."""
    heights = [sum(_height(b) + _GAP for b in column) - _GAP for column in columns]
    x, most = side, max(heights)
    for column, height in zip(columns, heights, strict=True):
        widest = max((_CHARACTER * len(b.label) + 22 for b in column if b.kind), default=0.0)
        y = _MARGIN + (most - height) / 2
        for box in column:
            box.x, box.y, box.width = x, y, widest
            y += _height(box) + _GAP
        x += widest + _LANE
    return x - _LANE + side, most + 2 * _MARGIN


def _height(box: Box) -> float:
    return _HEIGHT if box.kind else 6


def _middle(box: Box) -> float:
    return box.y + _height(box) / 2


def _edge(path: list[Box], ident: str) -> str:
    x, y = path[0].x + path[0].width, _middle(path[0])
    text = f"M{x:.1f},{y:.1f}"
    for box in path[1:]:
        half = (x + box.x) / 2
        text += f" C{half:.1f},{y:.1f} {half:.1f},{_middle(box):.1f} {box.x:.1f},{_middle(box):.1f}"
        x, y = box.x + box.width, _middle(box)
        if not box.kind:
            text += f" H{x:.1f}"
    return f'<path class="edge" d="{text}" marker-end="url(#{_tip(ident)})"/>'


def _loop(new: Box, old: Box, lane: int, bottom: float, ident: str) -> str:
    """From a state after the step, around everything, to the same state before the next; each loop in a lane of its own."""
    out, y = 10 + _LOOP * lane, bottom + _LOOP * lane
    text = f"M{new.x + new.width:.1f},{_middle(new):.1f} h{out} V{y:.1f} H{old.x - out:.1f} V{_middle(old):.1f} H{old.x:.1f}"
    return f'<path class="loop" d="{text}" stroke-dasharray="5 4" marker-end="url(#{_tip(ident)})"><title>the next step</title></path>'


def _box(box: Box) -> str:
    middle = f'x="{box.x + box.width / 2:.1f}" y="{_middle(box) + 4:.1f}"'
    return (
        f'<g class="{box.kind}"><rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{_HEIGHT}" rx="6"/>'
        f'<text {middle} fill="#6b7785" stroke="none" text-anchor="middle">{escape(box.label)}</text></g>'
    )


# --- pieces, from top to bottom -------------------------------------------------------------------------------------------------------
_LONGEST, _LINE, _SIDE, _TURN = 92, 17, 12, 6  # characters of a line; pixels


@dataclass
class _Row:
    """A box with lines of text, each with its class: a piece, the frame of a loop, or an input or output of the core.

    Attributes:
        takes: keys of other rows.
        inner: whether it is in a loop.
    """

    kind: str
    lines: list[tuple[str, str]]
    takes: list[str] = field(default_factory=list)
    inner: bool = False
    x: float = 0.0
    y: float = 0.0
    right: float = 0.0
    bottom: float = 0.0


def draw_pieces(pieces: list[Piece], title: str, ident: str = "0") -> str:
    """An `<svg>` element: a box for every piece, arrows for what it takes of others, and a frame around what a loop runs at every step."""
    rows = _rows(pieces)
    at = {key: n for n, key in enumerate(key for key, row in rows.items() if row.kind != "loop-head")}
    edges = [(a, b) for b, row in rows.items() for a in dict.fromkeys(row.takes)]
    reach = {a: max(at[b] - at[a] for source, b in edges if source == a) for a, _ in edges}
    ahead = sorted([a for a in reach if reach[a] > 1], key=reach.__getitem__)  # each has a lane at the right
    back = [a for a in at if any(source == a and at[b] <= at[a] for source, b in edges)]  # and these, to the next step, at the left
    side = _SIDE * (len(back) + 2)
    right, bottom = _stack(list(rows.values()), side)
    lines = list[str]()
    for head, row in rows.items():
        if row.kind == "loop-head":
            row.bottom = max(r.bottom for key, r in rows.items() if key.startswith(f"{head}.")) + _SIDE
        lines.append(_written(row))
    for a, b in edges:
        source, target, out = rows[a], rows[b], rows[a].bottom - 8
        beside = [key for key in (ahead if at[b] > at[a] else back) if (key, b) in edges and at[b] != at[key] + 1]
        into = target.y + (target.bottom - target.y) * (1 + (beside.index(a) if a in beside else 0)) / (len(beside) + 2)
        if at[b] == at[a] + 1:
            lines.append(f'<path class="edge" d="M{right - 28:.1f},{source.bottom:.1f} V{target.y:.1f}" marker-end="url(#{_tip(ident)})"/>')
        elif at[b] > at[a]:
            lines.append(_around("edge", (source.right, out), right + _SIDE * (ahead.index(a) + 1), (target.right, into), ident))
        else:
            lines.append(_around("loop", (source.x, out), source.x - _SIDE * (back.index(a) + 1), (target.x, into), ident))
    return _svg(title, right + _SIDE * len(ahead) + _MARGIN, bottom, ident, lines)


def _rows(pieces: list[Piece]) -> dict[str, _Row]:
    told = [p for piece in pieces for p in (piece, *piece.parts)]
    rows = {name: _Row("input", [(name.strip("`"), "")]) for p in told for name, giver in p.takes if not giver}
    for p in told:
        lines = [(line, "") for line in textwrap.wrap(f"{p.number}. {p.text}", _LONGEST)]
        lines += [(line, "soft") for line in textwrap.wrap(p.why, _LONGEST)]
        lines += [(line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}...", "soft") for line in map(placed, p.lines)]
        kind = "loop-head" if p.parts else "call" if p.name else "kernel"
        rows[p.number] = _Row(kind, lines, [giver or name for name, giver in p.takes], "." in p.number)
    return rows | {name: _Row("output", [(name, "")], [p.number]) for p in told for name in p.outputs}


def _stack(rows: list[_Row], side: float) -> tuple[float, float]:
    """Coordinates of all rows; returns the right edge of the boxes, and the height of the drawing."""
    right = y = float(_MARGIN)
    for row in rows:  # an arrow passes beside the head of a loop
        more = 60 if row.kind == "loop-head" else (side + _SIDE) * row.inner
        right = max(right, _MARGIN + _CHARACTER * max(len(text) for text, _ in row.lines) + 2 * _SIDE + more)
    for before, row in itertools.pairwise([rows[0], *rows]):
        y += _SIDE if before.inner and not row.inner else 0
        width = max(_CHARACTER * len(row.lines[0][0]) + 2 * _SIDE, 56)
        row.x, row.right = (right - width if row.kind in ("input", "output") else _MARGIN + side * row.inner), right - _SIDE * row.inner
        row.y, row.bottom = y, y + _LINE * len(row.lines) + _SIDE
        y = row.bottom + (_GAP if row.kind != "loop-head" else 0)
    return right, y + _MARGIN


def _written(row: _Row) -> str:
    size = f'x="{row.x:.1f}" y="{row.y:.1f}" width="{row.right - row.x:.1f}" height="{row.bottom - row.y:.1f}"'
    left = row.x + (_SIDE if row.kind not in ("input", "output") else (row.right - row.x - _CHARACTER * len(row.lines[0][0])) / 2)
    texts = [
        f'<text class="{kind}" x="{left:.1f}" y="{row.y + _LINE * (i + 1):.1f}" fill="#6b7785" stroke="none">{escape(text)}</text>'
        for i, (text, kind) in enumerate(row.lines)
    ]
    return f'<g class="{row.kind}"><rect {size} rx="6"/>{"".join(texts)}</g>'


def _around(kind: str, start: tuple[float, float], lane: float, end: tuple[float, float], ident: str) -> str:
    """From the side of a box by a lane beside them to the side of another."""
    (x, y), (to, into) = start, end
    h, v = math.copysign(_TURN, lane - x), math.copysign(_TURN, into - y)
    text = f"M{x:.1f},{y:.1f} H{lane - h:.1f} q{h},0 {h},{v} V{into - v:.1f} q0,{v} {-h},{v} H{to:.1f}"
    dashes = ' stroke-dasharray="5 4"' if kind == "loop" else ""
    return f'<path class="{kind}" d="{text}"{dashes} marker-end="url(#{_tip(ident)})"/>'
