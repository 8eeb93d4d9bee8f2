"""What a screening was made from: the commit and the matrix of every checkpoint, the words of T."""

from __future__ import annotations

from lmeval_dispersion.report import Code, Column, Made, Part, Section, Table, Text
from lmeval_screener.result import Result


def provenance(result: Result) -> Section:
    """A row a checkpoint: the commit that was read, the matrix, how many tokens of T and R; and T's words."""

    def row(place: int) -> dict[str, object]:
        c = result.checkpoints[place]
        return {
            "checkpoint": c.label,
            "commit": c.revision or "a folder",
            "matrix": c.tensor.name,
            "dtype": c.tensor.dtype,
            "domain": c.tokens.domain,
            "reference": c.tokens.reference,
        }

    columns = [
        Column("checkpoint", "Checkpoint"),
        Column("commit", "Commit", drop=3),
        Column("matrix", "Rows of", drop=1),
        Column("dtype", "Type", drop=1),
        Column("domain", "Tokens of T", "d", drop=2),
        Column("reference", "of R", "d", drop=2),
    ]
    table = Table(
        Made(row, len(result.checkpoints)), columns, "What every row was computed from", "checkpoints-read"
    )
    dropped = {word for c in result.checkpoints for word in c.tokens.dropped}
    words = "  ".join(word.replace(" ", "␣") for word in result.domain_words if word not in dropped)
    parts: list[Part] = [table]
    if words:
        parts += [Text("Tokens of T (␣ is a space):"), Code(words)]
    return Section("Checkpoints as read", parts, name="provenance", details=True)
