"""What every result can do: show itself in a notebook, be written down, draw its first chart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.errors import MissingExtraError, UsageError
from lmeval_dispersion.report.document import Document, Row

if TYPE_CHECKING:
    import pandas as pd

_LINE = 160  # characters of a sentence that stand in a repr


class Reportable:
    """A result that can be seen as a report, in every form that the commands have."""

    def document(self) -> Document:
        """The result as a report."""
        raise NotImplementedError

    def to_markdown(self) -> str:
        """The report as Markdown, as ``--format markdown`` prints it."""
        from lmeval_dispersion.report.forms import render

        return render(self.document(), "markdown")

    def to_html(self) -> str:
        """The report as a self-contained page with charts, as ``--format html`` prints it.

        Raises:
            MissingExtraError: A library that pages need is not installed.
        """
        from lmeval_dispersion.report.forms import render

        return render(self.document(), "html")

    def plot(self) -> Any:
        """The report's first chart; ``document().charts()`` has all of them.

        Raises:
            UsageError: The report has no chart.
            MissingExtraError: altair is not installed.
        """
        charts = self.document().charts()
        if not charts:
            raise UsageError(f"expected a result with a chart, got {self.document().title!r}, which has none")
        try:
            chart = next(iter(charts.values()))
            return chart.draw() if callable(chart.draw) else chart.specification()
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                f"a chart needs {error.name}, which is not installed; "
                "run: pip install 'lmeval-dispersion[html]'"
            ) from error

    def _repr_html_(self) -> str | None:
        """Text and tables for a notebook; None, so that it shows the repr, where jinja2 is missing."""
        try:
            from lmeval_dispersion.report.html_page import html_fragment

            return html_fragment(self.document())
        except ModuleNotFoundError:
            return None

    def __repr__(self) -> str:
        document = self.document()
        lines = (" ".join(line.split()) for line in document.answer)
        short = [line if len(line) <= _LINE else f"{line[: _LINE - 1]}…" for line in lines]
        return "\n  ".join([f"<{type(self).__name__}> {document.title}", *short])


def frame_of(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows as a frame in pandas' nullable types.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtraError(
            "a data frame needs pandas: pip install 'lmeval-dispersion[audit]' (or `pip install pandas`)"
        ) from error
    return nullable(pd.DataFrame(list(rows)))


def nullable(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame in pandas' nullable types, ``Int64``, ``boolean`` and ``string``; floats stay, with NaN."""
    import pandas as pd

    types = {"integer": "Int64", "boolean": "boolean", "string": "string", "empty": "string"}
    kinds = {name: pd.api.types.infer_dtype(column, skipna=True) for name, column in frame.items()}
    return frame.astype({name: types[kind] for name, kind in kinds.items() if kind in types})
