"""Two studies side by side, as Python has them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from lmeval_dispersion.report import Document, Reportable, nullable


class StudiesCompared(Reportable):
    """Two studies side by side, see :func:`compare_studies`.

    Attributes:
        differences: A row a metric: both values, their difference and its 95 % interval.
        first: Folder of the baseline.
        second: Folder of the other study.
    """

    def __init__(self, differences: pd.DataFrame, first: str, second: str) -> None:
        self.differences, self.first, self.second = differences, first, second

    def document(self) -> Document:
        """The report that ``dispersion compare`` prints."""
        from lmeval_dispersion.laboratory.reports.documents import comparison_document

        return comparison_document(self.differences, self.first, self.second)

    def to_frame(self) -> pd.DataFrame:
        """The differences, tidy."""
        return nullable(self.differences)


def compare_studies(first: str | Path, second: str | Path) -> StudiesCompared:
    """Two complete studies of one kind, the second minus the first.

    Raises:
        UsageError: See :func:`lmeval_dispersion.laboratory.comparison.compared`.
    """
    from lmeval_dispersion.laboratory.comparison import compared

    return StudiesCompared(compared(first, second), str(first), str(second))
