"""A study's result as a report: tables from its data frames; `charts` draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import pandas as pd

from lmeval_dispersion import statistics
from lmeval_dispersion.report import Col, Report, Table
from lmeval_dispersion.report.cells import json_value
from lmeval_dispersion.report.document import Column
from lmeval_dispersion.statistics import Array


@dataclass(frozen=True, repr=False)
class StudyResult(Report):
    """Base class for the results of the laboratory's measures.

    The subclass for each measure adds its tables as fields.

    Attributes:
        manifest: The settings; for each model its identity, the library versions, and how many
            texts and segments were read.
    """

    schema = "dispersion-lab-report/3"
    libraries = ("torch", "transformers", "numpy")
    guide = "docs/reference/laboratory.md"
    kind: ClassVar[str]
    main: ClassVar[str]  # the field whose rows are those of CSV and the data frame
    manifest: dict[str, Any]

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the CSV output, which are those of the measure's main table."""
        return records(getattr(self, self.main))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON output: schema, answer, kind of measure, manifest and every table."""
        tables = {}
        for name, value in vars(self).items():
            if isinstance(value, pd.DataFrame):
                tables[name] = records(value)
        content = json_value({"manifest": self.manifest, "tables": tables})
        return {
            "schema": self.schema,
            "answer": self.answer(),
            "kind": self.kind,
            **content,
        }

    def context(self) -> dict[str, Any]:
        """Return the values that every measure's template needs.

        ``models`` is the list of the models' names. ``run`` is a list of mappings: the names of
        models and texts, the facts on each model (such as library versions), and the settings.
        """
        names = {key: ", ".join(value) for key, value in self.manifest["names"].items()}
        settings = {key: str(value) for key, value in self.manifest["settings"].items()}
        labels: dict[str, None] = {}
        facts = []
        for model in self.manifest["models"]:
            labels[model["model"]] = None
            flat = {}
            for key, value in model.items():
                if not isinstance(value, (dict, list)):
                    flat[key] = value
            facts.append(flat)
        return {
            "models": list(labels),
            "run": [names, *facts, settings],
        }


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return one dictionary for each row of a frame, with the column names as keys."""
    return cast("list[dict[str, Any]]", frame.to_dict("records"))


def table(
    frame: pd.DataFrame,
    caption: str,
    columns: Mapping[str, Column],
    *,
    most: int = 0,
    more: str = "",
) -> Table:
    """Return a frame as a table of the report; columns without any value are left out.

    Args:
        frame: The rows.
        caption: The caption of the table.
        columns: How to show each column, by its name in the frame.
        most: Maximum number of rows; of a longer frame, rows at even distances are shown. 0 for
            all rows.
        more: A sentence below the table; replaced by the numbers of rows if some are left out.
    """
    if 0 < most < len(frame):
        more = f"{most} of {len(frame)} rows; the details show all."
        places = np.linspace(0, len(frame) - 1, most).round()
        frame = frame.iloc[places.astype(int)]
    return Table.of(records(frame), caption, columns=columns, more=more)


def bounded(
    key: str, heading: str, format: str, ends: tuple[str, str] = ("low", "high"), **options: Any
) -> dict[str, Column]:
    """Return the declarations of three columns by name: a value, and the ends of its interval.

    Args:
        key: Name of the value's column in the frame.
        heading: Heading of the value's column.
        format: How to format all three numbers.
        ends: Names of the columns of the lower and the upper end.
        **options: Further options of the value's `Col`.
    """
    low, high = ends
    return {
        key: Col(
            heading,
            format,
            dots="both",
            reach=f"{low} {high}",
            **options,
        ),
        low: Col("95 % from", format, short="from", drop=1),
        high: Col("to", format, drop=1),
    }


def with_ends(key: str, interval: Sequence[float]) -> dict[str, float]:
    """Return a value and the ends of its interval as entries of a row.

    The entries are ``KEY``, ``KEY_low`` and ``KEY_high``, where KEY is ``key``.

    Args:
        key: Name of the value.
        interval: The value, the lower end and the upper end.
    """
    value, low, high = interval
    return {
        key: value,
        f"{key}_low": low,
        f"{key}_high": high,
    }


def jackknife_bounds(value: float, left_out: Array, claims: int = 1) -> statistics.Bounds:
    """Return 95 % bounds of an estimate, by Student's t with the jackknife standard error.

    Args:
        value: The estimate.
        left_out: Shape (n,), the estimate with each of n parts, such as documents, left out in turn.
        claims: Number of such estimates whose bounds are to hold at once (Bonferroni).
    """
    return statistics.student_bounds(
        value,
        statistics.jackknife_se(left_out),
        len(left_out),
        1 - (1 - statistics.LEVEL) / claims,
    )
