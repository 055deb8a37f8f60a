"""`flexsn.explain`: what flexsn makes of a core, as data, as text and as an HTML page."""

from .collect import explain
from .reports import NetworkReport, Report

__all__ = ["NetworkReport", "Report", "explain"]
