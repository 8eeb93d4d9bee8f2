"""Every document of a run with its rank by contribution, as a table and as a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from lmeval_dispersion.audit.run import Run
from lmeval_dispersion.errors import UsageError

FORMATS = (".parquet", ".csv", ".jsonl")


def ranked_documents(run: Run) -> pd.DataFrame:
    """One row a document, lowest contribution first.

    Columns: ``rank`` from 1, ``contribution``, ``percentile`` in (0, 100], who it is (``task``, ``doc_id``,
    ``subject``), ``correct`` and ``prediction`` where known, the model's confidence, ``query_perplexity``,
    ``text``.

    Raises:
        TooFewVectorsError: One document.
    """
    contribution = run.points.contributions()
    order = np.argsort(contribution, kind="stable")
    documents = run.documents.iloc[order]
    rank = np.arange(1, len(order) + 1)
    return pd.DataFrame(
        {
            "rank": rank,
            "contribution": contribution[order],
            "percentile": 100 * rank / len(rank),
            **{name: documents[name].to_numpy() for name in ("task", "doc_id", "subject", "category")},
            "correct": run.score[order],
            "prediction": documents["prediction"].to_numpy(),
            "top_probability": run.confidence.top_probability[order],
            "query_perplexity": run.perplexity[order],
            "text": documents["text"].to_numpy(),
        }
    )


def check_writable(path: str | Path) -> None:
    """Raise UsageError, before the work is done, where a file of this name could not be written."""
    file = Path(path)
    if not file.parent.is_dir():
        raise UsageError(f"the folder {file.parent} does not exist; create it or choose another output")
    if file.is_dir():
        raise UsageError(f"expected a file to write, got the folder {file}")


def check_output(path: str | Path) -> None:
    """Raise UsageError unless the file can be written by its suffix."""
    file = Path(path)
    if file.suffix not in FORMATS:
        raise UsageError(f"expected an output ending in {', '.join(FORMATS)}, got {file.name!r}")
    check_writable(file)


def save_ranked(frame: pd.DataFrame, path: str | Path) -> None:
    """Write the ranking as parquet, CSV or JSON lines, by the file's suffix.

    Raises:
        UsageError: Another suffix, or no such folder.
    """
    check_output(path)
    file = Path(path)
    if file.suffix == ".parquet":
        frame.to_parquet(file, index=False)
    elif file.suffix == ".csv":
        frame.to_csv(file, index=False)
    else:
        frame.to_json(file, orient="records", lines=True, force_ascii=False)
