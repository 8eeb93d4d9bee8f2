"""What the dispersion of a finished run is good for: slices, mixtures, calibration, ranking, comparison.

Everything here reads stores (``lmeval_dispersion.store``) and never a model. Its modules are private.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lmeval_dispersion.audit.calibration.calibration import Calibration, calibrate
from lmeval_dispersion.audit.calibration.calibrator import check_fits, check_worth, read_calibrator
from lmeval_dispersion.audit.calibration.prediction import Predictions, predict_slices, run_for
from lmeval_dispersion.audit.calibration.selection import labels_of, rows_where
from lmeval_dispersion.audit.compare import Comparison, compare
from lmeval_dispersion.audit.report import Audit, audit
from lmeval_dispersion.audit.run import read_run
from lmeval_dispersion.audit.worst import Worst, worst

__all__ = ["audit_run", "calibrate_run", "compare_runs", "predict_run", "rank_run"]


def audit_run(
    path: str | Path,
    *,
    layer: str | None = None,
    slices: Sequence[str] = (),
    metrics: Literal["dispersion", "all"] = "dispersion",
    seed: int = 0,
    details: bool = False,
) -> Audit:
    """The audit of the run whose store is at ``path``: what ``dispersion audit`` reports.

    Args:
        path: Folder of the store, or a folder that holds the stores of one run.
        layer: Layer of the vectors; default: the store's own.
        slices: Columns of the documents to slice by; default: those that the run itself suggests.
        metrics: ``all``: also RankMe, effective rank, participation ratio and stable rank of every slice.
        seed: Of everything that is drawn.
        details: Whether to compute the parts that are no finding too.

    Returns:
        The report ``dispersion-audit/3`` (``docs/reference/audit.md``); ``to_dict()``, ``to_frame()``,
        ``to_markdown()``, ``to_html()`` and ``plot()`` give its forms.

    Raises:
        StoreError: ``path`` is no store, or one that cannot be read.
        UsageError: The layer or a column is not there.
    """
    extent: Literal["all", "findings"] = "all" if details else "findings"
    return audit(read_run(path, layer), slices=slices, metrics=metrics, seed=seed, extent=extent)


def calibrate_run(
    path: str | Path,
    *,
    where: str | None = None,
    layer: str | None = None,
    slice_size: int | None = None,
    seed: int = 0,
) -> Calibration:
    """A calibrator fitted to a labelled run: what ``dispersion calibrate`` writes.

    Args:
        path: As in :func:`audit_run`.
        where: Learn only from documents that satisfy this, such as ``"subject in ('anatomy', 'virology')"``.
        layer: Layer of the vectors; default: the store's own.
        slice_size: Documents of the slices to be predicted later; default: the command's.
        seed: Of everything that is drawn.

    Raises:
        UsageError: Too few labelled documents, or all correct or all incorrect.
    """
    run = read_run(path, layer)
    if where is not None:
        run = labels_of(run, rows_where(run, where))
    return calibrate(run, slice_size=slice_size, seed=seed)


def predict_run(
    calibrator: Calibration | Mapping[str, Any] | str | Path,
    path: str | Path,
    *,
    where: str | None = None,
    by: str | None = None,
    force: bool = False,
    seed: int = 0,
) -> Predictions:
    """The accuracy of the slices of a run, read off their dispersion: what ``dispersion predict`` reports.

    Args:
        calibrator: Of :func:`calibrate_run`, or the file of ``dispersion calibrate``.
        path: As in :func:`audit_run`.
        where: Estimate only documents that satisfy this.
        by: Column of the documents that makes the slices; default: that of the calibrator.
        force: Whether to estimate where the calibrator did not beat knowing nothing, or the slices differ
            from the labelled ones.
        seed: Of everything that is drawn.

    Raises:
        UsageError: The calibrator does not fit the run, or did not beat knowing nothing.
    """
    name: str | Path = "the calibrator"
    if isinstance(calibrator, Calibration):
        content = calibrator.calibrator
    elif isinstance(calibrator, Mapping):
        content = calibrator
    else:
        name, content = calibrator, read_calibrator(calibrator)
    run = run_for(content, path)
    check_fits(content, run)
    if not force:
        check_worth(content, name)
    rows = None if where is None else rows_where(run, where)
    return predict_slices(content, run, by=by, rows=rows, force=force, seed=seed)


def rank_run(path: str | Path, *, layer: str | None = None, count: int = 20, seed: int = 0) -> Worst:
    """Documents by their contribution, lowest first: what ``dispersion audit --worst`` reports.

    Args:
        path: As in :func:`audit_run`.
        layer: Layer of the vectors; default: the store's own.
        count: How many documents a table shows; ``to_frame()`` and CSV hold all.
        seed: Of the clusters of the lowest tenth.

    Raises:
        TooFewVectorsError: One document.
    """
    return worst(read_run(path, layer), count=count, seed=seed)


def compare_runs(paths: Sequence[str | Path], *, by: str = "subject", layer: str | None = None) -> Comparison:
    """Runs beside the first of them, with paired intervals: what ``dispersion compare`` reports.

    Args:
        paths: Folders of two runs or more.
        by: Column of the documents that makes the slices.
        layer: Layer of all of them; default: each store's own.

    Raises:
        UsageError: Fewer than two runs.
        MixedStoresError: No shared documents, or other prompts or documents under the same ids.
    """
    return compare(paths, by=by, layer=layer)
