"""Reports: what a tool says as data, and its forms for terminal, Markdown, CSV, JSON and page.

Its modules are private; the names are here.
"""

from lmeval_dispersion.report.document import (
    Chart,
    Code,
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

__all__ = [
    "Chart",
    "Code",
    "Column",
    "Document",
    "Facts",
    "Note",
    "Part",
    "Row",
    "Section",
    "Table",
    "Text",
]
