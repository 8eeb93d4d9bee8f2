"""Screened checkpoints, failures and results that were never read: their figures are planted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from lmeval_screener.figures import Ratio
from lmeval_screener.figures import gaps as gaps_of
from lmeval_screener.result.result import Result
from lmeval_screener.screened import Failed, Screened
from lmeval_screener.targets.names import Target
from lmeval_screener.tokens.resolution import Resolution
from lmeval_screener.tokens.sets import Token

COMMIT = "a" * 40
TOKENS = Resolution(
    domain=tuple(Token(str(i), str(i), i, "digits") for i in range(3)),
    reference=tuple(Token(f" word{i}", f"Ġword{i}", 10 + i, "words") for i in range(4)),
    dropped=(" nonlocal",),
    dropped_reference=(" lunch",),
    never_made=(),
    shared=(),
    one_row=(),
    digit_scheme="single digits",
    vocabulary=9,
)
GAPS = gaps_of([[1.0, 0, 0], [0, 1, 0], [0, 0, 1]], [[1.0, 1, 0], [0, 1, 1], [1, 0, 1]])
READ = {
    "dtype": "BF16",
    "shape": (1000, 32),
    "tied": False,
    "parameters": None,
    "tokenizer": "sha",
    "resolution": TOKENS,
    "warnings": (),
    "bytes_read": 802_344,
    "requests": 105,
    "seconds": 0.31,
}


def screened(
    repo, rank=1, *, revision=None, commit=COMMIT, file=None, scale="7B", accuracy=None, **values
):
    """A checkpoint at a rank, by G unless it has a ratio."""
    planted = {metric: replace(gap, mean=2 - rank / 10, se=0.02) for metric, gap in GAPS.items()}
    return Screened(
        target=Target(repo, revision, local=commit is None, file=file, accuracy=accuracy),
        repo=repo,
        revision=commit,
        tensor="lm_head.weight",
        file=file or "model.safetensors",
        **{**READ, "gaps": planted, **values},
        family="fam",
        scale=scale,
        rank=rank,
        ranked_by="ratio" if "ratio" in values else "gap",
    )


def ranking(count):
    """Checkpoints a, b, c … that G ranks."""
    return [screened(chr(96 + rank), rank) for rank in range(1, count + 1)]


def ratio_of(mean, se=0.01, rounding=0.001, seed=0):
    """A ratio over 10 and 30 tokens with noise of its own, whose error is about ``se``."""
    draw = np.random.default_rng([seed, int(1e6 * mean)])
    sides = [mean + se * draw.normal(size=size) / (size - 1) ** 0.5 for size in (10, 30)]
    return Ratio(mean, se, rounding, *sides)


def siblings(*ratios, se=0.01, **values):
    """Checkpoints a, b, c … (m1, m2, … of many) that these ratios rank, highest first."""
    places = sorted(set(ratios), reverse=True)
    names = (
        "abcdefghijklmnopqrstuvwxyz"
        if len(ratios) < 27
        else [f"m{i}" for i in range(1, len(ratios) + 1)]
    )
    return [
        screened(name, places.index(mean) + 1, ratio=ratio_of(mean, se, seed=seed), **values)
        for seed, (name, mean) in enumerate(zip(names, ratios, strict=False))
    ]


def failed(repo, error="RepoNotFound", message="none"):
    return Failed(Target(repo), error, message)


def result(members, failures=(), **values):
    return Result(
        "math", "reference", tuple(members), tuple(failures), 1.5, 9_000_000, 900, **values
    )


def ranked(members):
    """The members of each scale, best first, ranked by their figures."""
    checkpoints = []
    for scale in dict.fromkeys(member.scale for member in members):
        group = [member for member in members if member.scale == scale]
        group.sort(key=lambda c: -c.figure.mean)
        checkpoints += [replace(c, rank=rank) for rank, c in enumerate(group, 1)]
    return checkpoints
