"""The slope of a user's own results in a file: `dispersion verify --keep` writes it, a screening reads it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.evidence import SLOPES, Slope
from lmeval_dispersion.files import read_json, write_whole
from lmeval_screener.chance import LEAST_SLOPE, MOST_SLOPE, Own

SCHEMA = "screen-checkpoints-slope/1"
_HINT = "`dispersion verify … --keep FILE` writes one"


def keep_slope(path: Path, found: Slope, kind: str, subject: str) -> None:
    """Write a slope, new or in place of an older one; another file is refused."""
    if path.exists():
        read_slope(path, "name a new file")
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    k, low, high = (round(value, 4) for value in (found.k, found.low, found.high))
    own = Own(kind, k, low, high, found.spread, today, found.groups, subject=subject)
    write_whole(path, f"{json.dumps({'schema': SCHEMA} | own.to_dict(), indent=1)}\n".encode())


def read_slope(path: str | Path, hint: str = _HINT) -> Own:
    """The slope in a file; ``hint`` says what to do where there is none."""
    content = read_json(Path(path), "a kept slope", SCHEMA, hint)
    try:
        kind = str(content["kind"])
        k, low, high = (float(content[name]) for name in ("k", "low", "high"))
        texts = [str(content[name]) for name in ("measured", "subject")]
        own = Own(
            kind, k, low, high, SLOPES[kind].spread, texts[0], int(content["evaluated"]), subject=texts[1]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path}: expected a whole slope, but {type(error).__name__} {error} shows that a part is "
            "missing or of another type; keep it again"
        ) from error
    if not LEAST_SLOPE <= low <= k <= high <= MOST_SLOPE:
        raise UsageError(
            f"{path}: expected k inside its interval, both from {LEAST_SLOPE:g} to {MOST_SLOPE:g}, got "
            f"{k} ({low} to {high}); keep it again"
        )
    return own
