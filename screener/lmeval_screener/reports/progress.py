"""What a screening says while it runs: lines of progress for logs, JSON lines as data."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lmeval_dispersion.errors import DispersionError
from lmeval_screener.contract import tied_with
from lmeval_screener.screened import Failed

if TYPE_CHECKING:
    from lmeval_screener.reading import Reading
    from lmeval_screener.result import Result

_EVERY = 30.0  # seconds between two lines
_SHARE = 0.05  # or this share of all,
_LEAST = 3.0  # but never more often than every so many seconds


class Lines:
    """Lines of progress for logs: how many, how fast, how long still, what failed.

    Args:
        say: Prints a line.
        clock: Seconds.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._start = self._last = clock()
        self._done = 0
        self._failed: Counter[str] = Counter()

    def on_done(self, outcome: Reading | Failed, done: int, count: int) -> None:
        """Take note of a checkpoint that ended, and say how it goes where it is time."""
        if isinstance(outcome, Failed):
            self._failed[outcome.error] += 1
        now = self._clock()
        if not done:
            return
        since, share = now - self._last, (done - self._done) / count
        if since < _LEAST or (since < _EVERY and share < _SHARE) or done == count:
            return
        self._last, self._done = now, done
        rate = done / (now - self._start)
        failed = ", ".join(f"{number} {code}" for code, number in self._failed.most_common())
        self._say(
            f"{done} of {count} ({100 * done // count} %), {rate:.1f}/s, {_span((count - done) / rate)} left"
            + (f"; failed: {failed}" if failed else "")
        )


def _span(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h {whole % 3600 // 60} min"


class JsonLines:
    """``--format jsonl``: a line for each checkpoint when it ends, unranked, and a last one with the ranks.

    Args:
        path: Where they go; None for standard output.

    Raises:
        DispersionError: The file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: IO[str] | None = None
        if path is not None:
            try:
                self._file = path.open("w", encoding="utf-8")
            except OSError as error:
                raise DispersionError(f"could not write {path}: {error.strerror or error}") from error

    def on_done(self, outcome: Reading | Failed) -> None:
        """Write the line of a checkpoint that ended."""
        if isinstance(outcome, Failed):
            self._write(
                {
                    "label": outcome.label,
                    "repo": outcome.repo,
                    "requested_revision": outcome.revision,
                    "file": outcome.file,
                    "error": outcome.error,
                    "message": outcome.message,
                }
            )
            return
        self._write(
            {
                "label": outcome.target.label,
                "repo": outcome.repo,
                "requested_revision": outcome.target.revision,
                "file": outcome.target.file,
                "revision": outcome.revision,
                "gap": {m: {"mean": g.mean, "se": g.se} for m, g in outcome.gaps.items()},
                "ratio": None
                if outcome.ratio is None
                else {"mean": outcome.ratio.mean, "se": outcome.ratio.se},
                "tensor": outcome.tensor,
                "dtype": outcome.dtype,
                "bytes_read": outcome.bytes_read,
                "requests": outcome.requests,
                "seconds": round(outcome.seconds, 3),
            }
        )

    def finish(self, result: Result) -> None:
        """Write the last line: the answer, the ranks of every group, and the totals."""
        content = result.head()
        names = ("schema", "domain", "reference", "metric", "se_covers", "totals")
        summary = {name: content[name] for name in names} | {"answer": result.answer()}
        summary["totals"]["failed"] = len(result.failed)
        if result.gate is not None:
            summary["gate"] = result.gate.to_dict()
        summary["groups"] = [
            {
                "family": group.family,
                "scale": group.scale,
                "ranking": [
                    {"label": c.label, "rank": c.rank, "tied_with": tied_with(c, group)}
                    for c in group.checkpoints
                ],
            }
            for group in result.groups
        ]
        self._write({"summary": summary})
        if self._file is not None:
            self._file.close()

    def _write(self, content: dict[str, Any]) -> None:
        file = self._file or sys.stdout
        try:
            file.write(json.dumps(content, ensure_ascii=True, allow_nan=False) + "\n")
            file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            place = self._path or "standard output"
            raise DispersionError(f"could not write {place}: {error.strerror or error}") from error
