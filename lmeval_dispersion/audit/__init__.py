"""What the dispersion of a finished run is good for: slices, mixtures, calibration, ranking, comparison.

Everything here reads stores (``lmeval_dispersion.store``) and never a model. Its modules are private.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lmeval_dispersion.audit.reports.results import AuditResult

__all__ = ["audit_run", "calibrate_run", "compare_runs", "predict_run"]


def audit_run(
    path: str | Path,
    *,
    layer: str | None = None,
    slices: Sequence[str] = (),
    metrics: Literal["dispersion", "all"] = "dispersion",
    seed: int = 0,
) -> AuditResult:
    """The audit of the run whose store is at ``path``: what ``dispersion audit`` reports.

    Args:
        path: Folder of the store, or a folder that holds the stores of one run.
        layer: Layer of the vectors; default: the store's own.
        slices: Columns of the documents to slice by; default: those that the run itself suggests.
        metrics: ``all``: also RankMe, effective rank, participation ratio and stable rank of every slice.
        seed: Of everything that is drawn.

    Returns:
        The report ``dispersion-audit/3`` (``docs/reference/audit.md``) as a dict, where undefined numbers are
        None; ``to_markdown()``, ``to_html()``, ``to_frame()`` and ``plot()`` show it.

    Raises:
        StoreError: ``path`` is no store, or one that cannot be read.
        UsageError: The layer or a column is not there.
    """
    from lmeval_dispersion.audit.reports.results import audited

    return audited(path, layer=layer, slices=slices, metrics=metrics, seed=seed)


def calibrate_run(
    path: str | Path,
    *,
    where: str | None = None,
    layer: str | None = None,
    slice_size: int | None = None,
    seed: int = 0,
) -> AuditResult:
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
    from lmeval_dispersion.audit.reports.results import calibrated

    return calibrated(path, where=where, layer=layer, slice_size=slice_size, seed=seed)


def predict_run(
    calibrator: Mapping[str, Any] | str | Path,
    path: str | Path,
    *,
    where: str | None = None,
    by: str | None = None,
    force: bool = False,
    seed: int = 0,
) -> AuditResult:
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
    from lmeval_dispersion.audit.reports.results import predicted

    return predicted(calibrator, path, where=where, by=by, force=force, seed=seed)


def compare_runs(
    paths: Sequence[str | Path],
    *,
    by: str = "subject",
    layer: str | None = None,
) -> AuditResult:
    """Runs beside the first of them, with paired intervals: what ``dispersion compare`` reports.

    Args:
        paths: Folders of two runs or more.
        by: Column of the documents that makes the slices.
        layer: Layer of all of them; default: each store's own.

    Raises:
        UsageError: Fewer than two runs.
        MixedStoresError: No shared documents, or other prompts or documents under the same ids.
    """
    from lmeval_dispersion.audit.reports.results import compared

    return compared(paths, by=by, layer=layer)
