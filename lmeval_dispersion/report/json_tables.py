"""A report as JSON: a tool's versioned contract where it has one, else every table by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from lmeval_dispersion.report.cells import plain
from lmeval_dispersion.report.document import Document

SCHEMA = "dispersion-tables/1"


def json_text(document: Document) -> str:
    """All of `json_pieces` in one text."""
    return "".join(json_pieces(document))


def json_pieces(document: Document) -> Iterable[str]:
    """``document.contract()``, or :data:`SCHEMA`: title, answer, limits, command and tables; NaN is null."""
    if document.contract is not None:
        whole = document.contract()
        return (whole,) if isinstance(whole, str) else whole
    content = {
        "schema": SCHEMA,
        "title": document.title,
        "answer": list(document.answer),
        "limits": list(document.limits),
        "command": document.command,
        "tables": {
            name: {"caption": table.caption, "rows": [_value(row) for row in table.rows]}
            for name, table in document.tables().items()
        },
    }
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n",)


def _value(value: Any) -> Any:
    """The same value with null for what JSON cannot say."""
    value = plain(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [_value(item) for item in value]
    if hasattr(value, "items"):
        return {str(key): _value(item) for key, item in value.items()}
    return value
