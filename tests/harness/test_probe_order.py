"""Which checkpoints to evaluate first, and how far their order is clear, by planted ties."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmeval_dispersion.probing.probe import order, overlaps


class Tied(NamedTuple):
    label: str
    rank: int
    tied_with: tuple[int, ...]


def ranking(*runs):
    """Checkpoints a, b, c … with the first and last of the ranks that each is tied with."""
    ranges = [range(run[0], run[1] + 1) if run else () for run in runs]
    return [
        Tied(chr(96 + rank), rank, tuple(other for other in of if other != rank))
        for rank, of in enumerate(ranges, 1)
    ]


@pytest.mark.parametrize(
    ("runs", "first", "clear"),
    [
        ([None, None], "Best: a (why), clearly ahead of b.", "The order of all 2 is clear."),
        (
            [(1, 6)] * 6,
            "No checkpoint stands apart: all 6 have no clear order; ask more questions, or race them.",
            "",
        ),
        (
            [None, None, (3, 4), (3, 4), None],
            "Best: a (why), clearly ahead of b.",
            "Ranks 3–4 overlap; the order of the others is clear.",
        ),
        (
            [None, *[(2, 7)] * 6],
            "Best: a (why), clearly ahead of b.",
            "Ranks 2–7 overlap; the order of the others is clear.",
        ),
        (
            [(1, 2), (1, 3), (2, 4), (3, 4)],
            "Evaluate first: a, b, c, d (why).",
            "Ranks 1–4 overlap.",
        ),
        (
            [None, *((2 * i, 2 * i + 1) for i in range(1, 6) for _ in "ab")],
            "Best: a (why), clearly ahead of b.",
            "Ranks 2–3, 4–5, 6–7 and 8–9 and 1 more run overlap; the order of the others is clear.",
        ),
        (
            [(1, 2), (1, 8), *[(2, 8)] * 6],
            "Evaluate first: a, any 2 of ranks 2–8 (why).",
            "Ranks 1–8 overlap.",
        ),
        (
            [(1, 3)] * 3 + [(4, 5)] * 2,
            "Evaluate first: a, b, c (why).",
            "Ranks 1–3 and 4–5 overlap.",
        ),
    ],
)
def test_the_answer_of_a_probe(runs, first, clear):
    assert order(ranking(*runs), "why") == [line for line in (first, clear) if line]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 14), st.integers(0, 10**6))
def test_overlaps_are_the_runs_of_ranks_that_hang_together(count, seed):
    draw = np.random.default_rng(seed)
    apart = np.triu(draw.random((count, count)) < draw.random(), 1)
    apart |= apart.T
    found = overlaps(
        [
            Tied(str(i), i + 1, tuple(j + 1 for j in range(count) if j != i and not apart[i, j]))
            for i in range(count)
        ]
    )
    # Between two neighbours of one run some tie crosses; between two runs none does.
    crossed = [
        any(not apart[i, j] for i in range(k) for j in range(k, count)) for k in range(1, count)
    ]
    runs, begin = [], 0
    for k, over in enumerate([*crossed, False], start=1):
        if not over:
            runs += [(begin + 1, k)] if k - begin > 1 else []
            begin = k
    assert found == runs
