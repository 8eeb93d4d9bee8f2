"""Reports: results as data, and their formats: terminal, Markdown, CSV, JSON and HTML page.

A result declares its rows, charts and sentences (:class:`Report`; its docstring shows a template);
every format is made from these. The modules are private; the names are here.
"""

from __future__ import annotations

from lmeval_dispersion.report.declared import Report
from lmeval_dispersion.report.document import (
    Chart,
    Col,
    Column,
    Document,
    Facts,
    Note,
    Part,
    Row,
    Section,
    Table,
    Text,
)
from lmeval_dispersion.report.forms import FORMATS, render, require

__all__ = [
    "FORMATS",
    "Chart",
    "Col",
    "Column",
    "Document",
    "Facts",
    "Note",
    "Part",
    "Report",
    "Row",
    "Section",
    "Table",
    "Text",
    "render",
    "require",
]
