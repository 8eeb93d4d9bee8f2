"""What a screening says while it runs: lines of progress for logs, JSON lines as data."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lmeval_dispersion.errors import DispersionError

if TYPE_CHECKING:
    from lmeval_screener.ranking.measured import Measured
    from lmeval_screener.result import Failed, Result

_EVERY = 30.0  # seconds between two lines
_SHARE = 0.05  # or this share of all,
_LEAST = 3.0  # but never more often than every so many seconds


class Lines:
    """Lines of progress for logs: how many, how fast, how long still, what failed.

    Each pass over the checkpoints begins anew: their rows, and with controls those.

    Args:
        say: Prints a line.
        clock: Seconds.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._start = self._last = clock()
        self._done, self._what = 0, ""
        self._failed: Counter[str] = Counter()

    def ended(self, outcome: Measured | Failed, done: int, count: int) -> None:
        """Take note of a checkpoint that ended, before `progress` is told of it."""
        code = getattr(outcome, "error", None)
        if code is not None:
            self._failed[code] += 1

    def progress(self, done: int, count: int, label: str) -> None:
        """Say how it goes where it is time; see `lmeval_screener.screening.Progress`."""
        now = self._clock()
        if not done:
            self._start, self._last, self._done = now, now, 0
            if label:
                self._what = f"{label}: "
                self._failed.clear()
            return
        since, share = now - self._last, (done - self._done) / count
        if since < _LEAST or (since < _EVERY and share < _SHARE) or done == count:
            return
        self._last, self._done = now, done
        rate = done / (now - self._start)
        failed = ", ".join(f"{number} {code}" for code, number in self._failed.most_common())
        self._say(
            f"{self._what}{done} of {count} ({100 * done // count} %), {rate:.1f}/s, "
            + f"{_span((count - done) / rate)} left"
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

    def ended(self, outcome: Measured | Failed, done: int, count: int) -> None:
        """Write the line of a checkpoint that ended."""
        from lmeval_screener.ranking.measured import Measured

        if not isinstance(outcome, Measured):
            self._write(
                {
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
                "repo": outcome.repo,
                "requested_revision": outcome.target.revision,
                "file": outcome.target.file,
                "revision": outcome.revision,
                "gap": {m: {"mean": g.mean, "se": g.se} for m, g in outcome.gaps.items()},
                "tensor": outcome.tensor,
                "dtype": outcome.dtype,
                "bytes_read": outcome.bytes_read,
                "requests": outcome.requests,
                "seconds": round(outcome.seconds, 3),
            }
        )

    def finish(self, result: Result) -> None:
        """Write the last line: the answer, the ranks of every group, and the totals."""
        from lmeval_screener.reports.answer import answer

        # Without the checkpoints, which have their lines: a registry's would not fit in memory.
        content = replace(result, checkpoints=(), failed=()).head()
        content["totals"]["checkpoints"] = len(result.checkpoints)
        names = ("schema", "domain", "reference", "metric", "se_covers", "totals")
        summary = {name: content[name] for name in names} | {"answer": answer(result)}
        summary["totals"]["failed"] = len(result.failed)
        if result.gate is not None:
            summary["gate"] = result.gate.to_dict()
        # The ranks of all, one after the other: as one text they would not be small.
        self._put('{"summary": ' + _text(summary)[:-1] + ', "groups": [')
        for number, group in enumerate(result.groups):
            head = _text({"family": group.family, "scale": group.scale})[:-1]
            self._put((", " if number else "") + head + ', "ranking": [')
            for place, c in enumerate(group.checkpoints):
                ranks = {"label": c.label, "rank": c.rank, "tied_with": list(c.tied_with)}
                self._put((", " if place else "") + _text(ranks))
            self._put("]}")
        self._put("]}}\n")
        self._flush()
        if self._file is not None:
            self._file.close()

    def _write(self, content: dict[str, Any]) -> None:
        self._put(_text(content) + "\n")
        self._flush()

    def _put(self, text: str) -> None:
        with self._writing() as file:
            file.write(text)

    def _flush(self) -> None:
        with self._writing() as file:
            file.flush()

    @contextmanager
    def _writing(self) -> Iterator[IO[str]]:
        try:
            yield self._file or sys.stdout
        except BrokenPipeError:
            raise
        except OSError as error:
            place = self._path or "standard output"
            raise DispersionError(f"could not write {place}: {error.strerror or error}") from error


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=True, allow_nan=False)
