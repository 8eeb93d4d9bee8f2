"""What a watched run leaves behind: a line of JSON for every measurement, and what they say together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lmeval_screener.figures import Difference, paired_difference

from lmeval_dispersion.errors import UsageError

FORMAT = "dispersion-watch/2"  # 1 had warnings too
FILE = "dispersion_watch.jsonl"
MEASURES = ("dispersion", "condensation", "effective_rank")


def append_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Add one line; a line that a killed process left half written is ended first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    torn = False
    if path.exists() and path.stat().st_size:
        with path.open("rb") as stream:
            stream.seek(-1, 2)
            torn = stream.read(1) != b"\n"
    with path.open("a", encoding="utf-8") as stream:
        stream.write(("\n" if torn else "") + json.dumps(record, allow_nan=False) + "\n")


def read_records(folder: str | Path) -> list[dict[str, Any]]:
    """The measurements of a run in the order of their steps.

    A run that was resumed measures some steps again: what it had measured from there on does not count.

    Raises:
        UsageError: There is no such file, it holds something else, or nothing was measured yet.
    """
    path = Path(folder)
    path = path / FILE if path.is_dir() else path
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"expected the folder of a watched run, with {FILE} in it, got {folder} ({reason}); add "
            "DispersionCallback to the trainer, or name another folder"
        ) from None
    records: list[dict[str, Any]] = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # half a line of a process that was killed
        if not isinstance(record, dict) or not str(record.get("format")).startswith("dispersion-watch/"):
            raise UsageError(f"expected lines of {FORMAT} in {path}, got {line[:60]!r}; name another folder")
        while records and records[-1]["step"] >= record["step"]:
            records.pop()
        records.append(record)
    if not records:
        raise UsageError(f"{path} holds no measurement yet; wait for the first log, evaluation or save")
    return records


def change(later: Mapping[str, Any], earlier: Mapping[str, Any], domain: str) -> Difference:
    """G of a domain in one record minus that in an earlier one, with the paired error over the tokens.

    Raises:
        UsageError: The two were measured on other tokens.
    """
    a, b = later["domains"][domain], earlier["domains"].get(domain)
    if b is None or a["tokens"] != b["tokens"]:
        raise UsageError(
            f"steps {earlier['step']} and {later['step']} were measured on other tokens of {domain}; "
            "give the resumed run a folder of its own"
        )
    sides = (
        np.array(a[f"left_out_{side}"]) - np.array(b[f"left_out_{side}"]) for side in ("domain", "reference")
    )
    return paired_difference(a["gap"] - b["gap"], *sides)
