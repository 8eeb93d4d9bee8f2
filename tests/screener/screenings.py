"""Screened checkpoints, failures and results that were never read: their figures are planted."""

from __future__ import annotations

from dataclasses import replace

from lmeval_screener.figures import gaps as gaps_of
from lmeval_screener.ranking import rank_gaps
from lmeval_screener.result.result import Result
from lmeval_screener.screened import Failed, Ranks, Screened
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
    repo, rank=1, ties=None, *, revision=None, commit=COMMIT, file=None, scale="7B", accuracy=None, **values
):
    """A checkpoint at a rank; ``ties`` are the first and last rank of a run, or all ranks of its ties."""
    if isinstance(ties, tuple):
        ties = [i for i in range(ties[0], ties[1] + 1) if i != rank]
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
        ties=Ranks(ties or ()),
    )


def ranking(*ties):
    """Checkpoints a, b, c … with the first and last of the ranks that each is tied with."""
    return [screened(chr(96 + rank), rank, ends) for rank, ends in enumerate(ties, start=1)]


def failed(repo, error="RepoNotFound", message="none"):
    return Failed(Target(repo), error, message)


def result(members, failures=(), **values):
    return Result(
        "math", "reference", "cosine", tuple(members), tuple(failures), 1.5, 9_000_000, 900, **values
    )


def ranked(members):
    """The members of each scale, best first, with their ranks and ties by their figures."""
    checkpoints = []
    for scale in dict.fromkeys(member.scale for member in members):
        group = [member for member in members if member.scale == scale]
        standings = rank_gaps([c.gaps["cosine"] for c in group], [c.ratio for c in group])
        pairs = sorted(zip(group, standings, strict=True), key=lambda pair: pair[1].rank)
        checkpoints += [replace(c, **standing._asdict()) for c, standing in pairs]
    return checkpoints
