"""The audit's results in Python: the dicts that its JSON holds, which can also be seen as reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from lmeval_dispersion.audit.calibration.calibrator import (
    check_fits,
    check_worth,
    fit_calibrator,
    predict_slices,
    read_calibrator,
)
from lmeval_dispersion.audit.calibration.document import calibrator_document, prediction_document
from lmeval_dispersion.audit.calibration.selection import labels_of, rows_where
from lmeval_dispersion.audit.compare import compared_stores, comparison_document
from lmeval_dispersion.audit.reports.document import audit_document
from lmeval_dispersion.audit.reports.report import audit_report, plain
from lmeval_dispersion.audit.run import Run, read_run
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.report import Document, Reportable, nullable
from lmeval_dispersion.store import read_store


class AuditResult(Reportable, dict[str, Any]):
    """What the audit found: a dict as ``--format json`` writes it, and a report."""

    def __init__(self, values: Mapping[str, Any], document: Callable[[], Document]) -> None:
        super().__init__(values)
        self._document = document

    def document(self) -> Document:
        """The report that the command prints."""
        return self._document()

    def to_frame(self) -> pd.DataFrame:
        """The rows that ``--format csv`` writes, with nullable types."""
        return nullable(pd.DataFrame(list(self.document().rows)))


def audited(
    path: str | Path,
    *,
    layer: str | None = None,
    slices: Sequence[str] = (),
    metrics: str = "dispersion",
    seed: int = 0,
) -> AuditResult:
    """See :func:`lmeval_dispersion.audit.audit_run`."""
    report = audit_report(read_run(path, layer), slices=slices, metrics=metrics, seed=seed)
    return AuditResult(plain(report), partial(audit_document, report))


def calibrated(
    path: str | Path,
    *,
    where: str | None = None,
    layer: str | None = None,
    slice_size: int | None = None,
    seed: int = 0,
) -> AuditResult:
    """See :func:`lmeval_dispersion.audit.calibrate_run`."""
    run = read_run(path, layer)
    if where is not None:
        run = labels_of(run, rows_where(run, where))
    found = fit_calibrator(run, slice_size=slice_size, seed=seed)
    return AuditResult(found, partial(calibrator_document, found))


def predicted(
    calibrator: Mapping[str, Any] | str | Path,
    path: str | Path,
    *,
    where: str | None = None,
    by: str | None = None,
    force: bool = False,
    seed: int = 0,
) -> AuditResult:
    """See :func:`lmeval_dispersion.audit.predict_run`."""
    found = dict(calibrator) if isinstance(calibrator, Mapping) else read_calibrator(calibrator)
    run = run_for(found, path)
    check_fits(found, run)
    if not force:
        check_worth(found, "the calibrator" if isinstance(calibrator, Mapping) else calibrator)
    rows = None if where is None else rows_where(run, where)
    result = predict_slices(found, run, by=by, rows=rows, force=force, seed=seed)
    return AuditResult(plain(result), partial(prediction_document, result))


def compared(
    paths: Sequence[str | Path],
    *,
    by: str = "subject",
    layer: str | None = None,
) -> AuditResult:
    """See :func:`lmeval_dispersion.audit.compare_runs`."""
    comparison = compared_stores(paths, by=by, layer=layer)
    return AuditResult(plain(comparison), partial(comparison_document, comparison))


def run_for(calibrator: Mapping[str, Any], path: str | Path) -> Run:
    """The run, in the calibrator's layer; another model is refused before its vectors are read.

    Raises:
        UsageError: The run has not the calibrator's layer.
    """
    store, layer = read_store(path), calibrator["layer"]
    if store.model == calibrator["model"] and layer not in store.layers:
        raise UsageError(
            f"this calibrator was fitted for layer {layer!r}, and the run has "
            f"{', '.join(store.layers)}; run it with that layer, or calibrate on another"
        )
    return Run.of(store, layer if layer in store.layers else None)
