"""One self-contained HTML page: text, sortable tables and Altair charts, readable without a network.

The page asks for nothing: styles, scripts and data are inside, and a content security policy forbids the
rest. Charts are drawn by Vega (inlined once a page, 0.9 MB) as SVG in the page's own colours, so that they
follow dark mode and print. Equal input gives equal bytes. Everything that is passed in is escaped.

>>> page = Page("Nine checkpoints", lead="Ranked by `G`.")
>>> _ = page.section("Ranking").table(
...     [{"repo": "a/b", "gap": 1.43, "se": 0.02}],
...     [Column("repo", "Checkpoint"), Column("gap", "Gap G", ".3f", error="se")],
...     caption="Checkpoints, best first",
... )
>>> "1.430 ± 0.020" in page.html()
True
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lmeval_dispersion import __version__
from lmeval_dispersion.report.charts import chart_spec, vega_script
from lmeval_dispersion.report.page_table import Column, inline, paragraphs, shown, table_html

__all__ = ["Column", "Page"]

if TYPE_CHECKING:
    import altair
    import pandas

_HERE = Path(__file__).resolve().parent


class Page:
    """Builds the page from top to bottom; ``html`` returns it.

    Texts are plain: paragraphs are parted by an empty line, and `backticks` mark code.

    Args:
        title: The page's title and first heading.
        lead: What the page says, in a sentence or two.
    """

    def __init__(self, title: str, lead: str = "") -> None:
        self._title = title
        self._lead = lead
        self._parts: list[str] = []
        self._sections: list[tuple[str, str]] = []
        self._charts: list[str] = []
        self._tables = 0

    def section(self, heading: str, text: str = "") -> Page:
        """Start a section; what follows belongs to it. Returns the page, to go on with it."""
        name = f"section-{len(self._sections) + 1}"
        self._sections.append((name, heading))
        self._parts.append(f'<h2 id="{name}">{html.escape(heading)}</h2>')
        return self.text(text)

    def text(self, text: str) -> Page:
        """Add paragraphs."""
        self._parts.append(paragraphs(text))
        return self

    def note(self, text: str, kind: Literal["note", "warning"] = "note") -> Page:
        """Add a paragraph that stands out: a caveat, or what the evidence does not support (a warning)."""
        title = kind.capitalize()
        self._parts.append(
            f'<aside class="note {kind}" aria-label="{title}">'
            f"<strong>{title}</strong>{paragraphs(text)}</aside>"
        )
        return self

    def facts(self, facts: Mapping[str, object]) -> Page:
        """Add a short list of names and values: what was read, with which settings."""
        items = "".join(
            f"<div><dt>{html.escape(name)}</dt><dd>{shown(value)}</dd></div>" for name, value in facts.items()
        )
        self._parts.append(f'<dl class="facts">{items}</dl>')
        return self

    def code(self, text: str) -> Page:
        """Add a block of code, such as the command that made the page."""
        self._parts.append(f'<pre tabindex="0"><code>{html.escape(text)}</code></pre>')
        return self

    def table(
        self,
        rows: pandas.DataFrame | Iterable[Mapping[str, Any]],
        columns: Sequence[Column | str] | None = None,
        *,
        caption: str,
        sortable: bool = True,
    ) -> Page:
        """Add a table; its first column names the rows.

        A None is an empty cell and a NaN is shown as "undefined"; both stay last however the table is sorted.

        Args:
            rows: A frame, or mappings from key to value.
            columns: What is shown, in order; a string is key and heading in one. None shows every key of
                the first row.
            caption: What the table holds, in one line.
            sortable: Whether the heads are buttons that sort.
        """
        records = list(rows.to_dict("records") if hasattr(rows, "to_dict") else rows)
        if columns is None:
            columns = [str(key) for key in (rows.columns if hasattr(rows, "columns") else records[0])]
        chosen = [Column(column, column) if isinstance(column, str) else column for column in columns]
        self._tables += 1
        self._parts.append(
            table_html(records, chosen, f"table-{self._tables}", caption, sortable and len(records) > 1)
        )
        return self

    def chart(self, chart: altair.TopLevelMixin, *, caption: str, description: str) -> Page:
        """Add an Altair chart. A single or layered one without a width takes the page's; others keep theirs.

        Args:
            chart: The chart, with its data inside. Use no colours where the page's do; where one is needed,
                name ``var(--series-1)`` … ``var(--series-8)``, ``var(--ink)``, ``var(--muted)``.
            caption: What it shows, in one line.
            description: What a reader who can't see it should know: what rises, what falls, what stands out.
        """
        name = f"chart-{len(self._charts) + 1}"
        spec = chart_spec(chart, description)
        height = spec["height"] + 90 if isinstance(spec.get("height"), (int, float)) else 320
        data = re.sub(
            "[<>&\u2028\u2029]",
            lambda sign: f"\\u{ord(sign[0]):04x}",
            json.dumps(spec, sort_keys=True, allow_nan=False),
        )
        self._charts.append(f'<script type="application/json" id="{name}-spec">{data}</script>')
        self._parts.append(
            f'<figure><figcaption>{inline(caption)}</figcaption><div class="chart" id="{name}" role="img" '
            f'aria-label="{html.escape(description)}" style="min-height:{height:.0f}px"></div>'
            "<noscript><p>This chart is drawn by JavaScript, which is off.</p></noscript></figure>"
        )
        return self

    def html(self) -> str:
        """The whole page, UTF-8 text without any reference outside itself."""
        scripts = [_asset("page.js"), *([vega_script()] if self._charts else [])]
        policy = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
        contents = ""
        if len(self._sections) > 3:
            links = "".join(
                f'<li><a href="#{name}">{html.escape(text)}</a></li>' for name, text in self._sections
            )
            contents = f'<nav aria-label="Contents"><ol>{links}</ol></nav>'
        lead = f'<div class="lead">{paragraphs(self._lead)}</div>' if self._lead else ""
        # page.js comes last: it draws what is above it.
        tail = "\n".join([*self._charts, *(f"<script>{script}</script>" for script in reversed(scripts))])
        body = "\n".join(part for part in self._parts if part)
        return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src {policy}; \
style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="lmeval-dispersion {__version__}">
<title>{html.escape(self._title)}</title>
<link rel="icon" href="data:,">
<style>
{_asset("page.css")}</style>
</head>
<body>
<main>
<header><h1>{html.escape(self._title)}</h1>{lead}</header>
{contents}
{body}
</main>
<footer>lmeval-dispersion {__version__}</footer>
<div id="status" class="unseen" role="status"></div>
{tail}
</body>
</html>
"""


@functools.cache
def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
