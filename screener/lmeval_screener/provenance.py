"""What a screening was made from: the commit and the matrix of every checkpoint."""

from __future__ import annotations

from lmeval_dispersion.report import Column, Section, Table
from lmeval_screener.result import Result


def provenance(result: Result) -> Section:
    """A row a checkpoint: the commit that was read, the matrix, and how many tokens of T and R."""
    rows = [
        {
            "checkpoint": c.label,
            "commit": c.revision or "a folder",
            "matrix": c.tensor.name,
            "dtype": c.tensor.dtype,
            "domain": c.tokens.domain,
            "reference": c.tokens.reference,
        }
        for c in result.checkpoints
    ]
    columns = [
        Column("checkpoint", "Checkpoint"),
        Column("commit", "Commit", drop=3),
        Column("matrix", "Rows of", drop=1),
        Column("dtype", "Type", drop=1),
        Column("domain", "Tokens of T", "d", drop=2),
        Column("reference", "of R", "d", drop=2),
    ]
    table = Table(rows, columns, "What every row was computed from", "checkpoints-read")
    return Section("Checkpoints as read", [table], name="provenance", details=True)
