"""What `flexsn.explain` returns: facts that print, and go to a page and to JSON."""

from __future__ import annotations

import dataclasses
import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .html import page
from .model import Facts
from .svg import draw, draw_pieces
from .text import report_text


class Printable:
    """What the report of a core and that of a network have in common."""

    def parts(self) -> dict[str, Facts]:
        """Reports of cores, by title."""
        raise NotImplementedError

    def html(self) -> str:
        """A page that needs nothing beside itself."""
        return page(self.parts())

    def save(self, path: str | Path) -> Path:
        """Write the page; returns the path."""
        path = Path(path)
        path.write_text(self.html(), encoding="utf-8")
        return path

    def __str__(self) -> str:
        return "\n\n\n".join(report_text(report, title) for title, report in self.parts().items())

    def __repr__(self) -> str:
        told = [f"{title} {report.summary()}" for title, report in self.parts().items()]
        return f"<{type(self).__name__}: {'; '.join(told)}>"

    def _repr_html_(self) -> str:
        """In a notebook: the page in a frame of its own, so that its style stays there."""
        return f'<iframe srcdoc="{html.escape(self.html())}" width="100%" height="800" style="border:0"></iframe>'


@dataclass(repr=False)
class Report(Printable, Facts):
    """What flexsn makes of one core: see `Facts` for the fields.

    `print(report)` shows it as text; `report.html()` and `report.save(path)` give a page, `report.to_dict()` data for JSON.
    """

    def parts(self) -> dict[str, Facts]:
        return {self.core: self}

    def svg(self, ident: str = "0") -> str | None:
        """A drawing of how outputs and new states depend on inputs and states, as an `<svg>` element; None without a graph.

        Args:
            ident: one that no other drawing on the page has.
        """
        return None if self.drawing is None else draw(self.drawing, f"Dependencies of {self.core}", ident)

    def pieces_svg(self, ident: str = "0") -> str | None:
        """A drawing of the pieces of a core that mixes neurons, as an `<svg>` element; None of any other core."""
        return draw_pieces(self.pieces, f"Pieces of {self.core}", ident) if self.pieces else None

    def to_dict(self) -> dict[str, Any]:
        """All fields, and what follows from them, as JSON takes it."""
        found = dataclasses.asdict(self) | {"fused": self.fused, "neurons": self.neurons}
        for name, made in self.passes.items():
            found["passes"][name] |= {
                "bytes_per_neuron_step": made.bytes_per_neuron_step,
                "operations_per_neuron_step": made.operations_per_neuron_step,
                "copy_rate": made.copy_rate,
            }
        return found


@dataclass(repr=False)
class NetworkReport(Printable):
    """A report for every `FlexSN` that a network called, by its name in the network."""

    layers: dict[str, Report]

    @property
    def fused(self) -> bool:
        return all(report.fused for report in self.layers.values())

    def parts(self) -> dict[str, Facts]:
        return {f"{name}: {report.core}": report for name, report in self.layers.items()}

    def to_dict(self) -> dict[str, Any]:
        return {"fused": self.fused, "layers": {name: report.to_dict() for name, report in self.layers.items()}}
