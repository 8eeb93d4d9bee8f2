"""What the dispersion of a finished run is good for: slices, mixtures, calibration, ranking, comparison.

Everything here reads stores (``lmeval_dispersion.store``) and never a model. Its modules are private.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["audit_run"]


def audit_run(
    path: str | Path, *, layer: str | None = None, slices: Sequence[str] = (), seed: int = 0
) -> dict[str, Any]:
    """The audit of the run whose store is at ``path``: what ``dispersion audit --format json`` writes.

    Args:
        path: Folder of the store, or a folder that holds the stores of one run.
        layer: Layer of the vectors; default: the store's own.
        slices: Columns of the documents to slice by; default: those that the run itself suggests.
        seed: Of everything that is drawn.

    Returns:
        The report ``dispersion-audit/1`` (``docs/audit.md``); undefined numbers are None.

    Raises:
        StoreError: ``path`` is no store, or one that cannot be read.
        UsageError: The layer or a column is not there.
    """
    from lmeval_dispersion.audit.report import audit_report, plain
    from lmeval_dispersion.audit.run import read_run

    report: dict[str, Any] = plain(audit_report(read_run(path, layer), slices=slices, seed=seed))
    return report
