"""The pages on reading say what the reading layer does: error codes, numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lmeval_screener.checkpoints import account, http, web
from lmeval_screener.checkpoints.account import FIRST_BACKOFF
from lmeval_screener.errors import SCREENING_CODES
from lmeval_screener.weights import rows
from lmeval_screener.weights.tensors import FLOAT_DTYPES

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = "".join(
    (DOCS / page).read_text()
    for page in (
        "explanation/ranged-reads.md",
        "reference/formats-and-storages.md",
        "reference/errors.md",
    )
)


def part(name):
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", PAGE, re.DOTALL)
    assert found
    return found[1]


def test_the_table_of_codes_is_the_programs_own():
    lines = part("codes").strip().splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert [(code.strip("`"), meaning) for code, meaning, _ in cells] == list(
        SCREENING_CODES.items()
    )
    assert all(advice for _, _, advice in cells)


@pytest.mark.parametrize(
    "words",
    [
        f"Up to {http.CONNECTIONS} requests to one host",
        f"without a byte for {http.SILENCE:g} s is dead",
        f"within {rows.SLACK:.0%} of the needed ones".replace("%", " %"),
        f"at most {web.WHOLE / 2**20:g} MiB",
        f"retried after {FIRST_BACKOFF:g} s, ",
        "after five attempts without progress"
        if account.ATTEMPTS == 5
        else "a number the page lacks",
        f"{', '.join(FLOAT_DTYPES[:-1])} and {FLOAT_DTYPES[-1]} are decoded",
    ],
)
def test_numbers_are_those_of_the_code(words):
    assert words in " ".join(PAGE.split())
