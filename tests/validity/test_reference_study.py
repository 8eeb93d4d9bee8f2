"""The comparison of two reference sets: texts of both, right pairs by a slow loop, verdicts."""

from __future__ import annotations

import random
import re
from itertools import combinations

import numpy as np
import pytest

from benchmarks.validity import records, reference_sets
from benchmarks.validity import texts as sources
from benchmarks.validity.analysis import FAILS, HOLDS, INCONCLUSIVE
from benchmarks.validity.reference_sets import (
    compared,
    counted,
    right_shares,
    table,
    verdict_of,
)
from benchmarks.validity.study import read_study

FIRST, SECOND = sources.REFERENCES


def test_half_of_the_texts_have_the_words_of_the_second_set_in_place_of_the_others():
    first, second = (set(sources.token_set_items(name)) for name in sources.REFERENCES.values())
    assert set(sources.REPLACED) == first - second
    assert set(sources.REPLACED.values()) == second - first
    make = sources.in_both(sources.story)
    rng, plain = random.Random(5), random.Random(5)
    kinds = []
    for _ in range(400):
        text, before = make(rng), sources.story(plain)
        plain.random()  # the one that chooses the words
        words = set(re.findall(r"\w+", text))
        assert not (words & (first - second) and words & (second - first))
        kinds.append(text != before)
        assert len(text.split()) == len(before.split())
    assert 100 < sum(kinds) < 220  # some stories have none of the words


def test_right_pairs_of_resamples_are_those_of_a_slow_loop():
    rng = np.random.default_rng(3)
    accuracy, figure = rng.uniform(0.3, 0.4, 9), rng.normal(size=9)
    counts = counted(9)[:6]
    assert counts[0].tolist() == [1] * 9
    assert (counts.sum(1) == 9).all()
    for sample, share in zip(counts, right_shares(accuracy, figure, counts), strict=True):
        right = []
        for i, j in combinations(np.repeat(np.arange(9), sample), 2):
            if i != j and abs(accuracy[i] - accuracy[j]) > 0.01 + 1e-9:
                right.append((accuracy[i] > accuracy[j]) == (figure[i] > figure[j]))
        assert share == pytest.approx(np.mean(right))


def planted(noise: dict[str, float], checkpoints: int = 32, questions: int = 400):
    """Rows whose figures follow accuracy, with as much noise by each set."""
    rng = np.random.default_rng(1)
    rows = []
    for _ in range(checkpoints):
        row = {}
        for domain in sources.DOMAINS:
            skill = rng.uniform(0.1, 0.9)
            right = rng.random(questions) < skill
            figures = {
                name: dict.fromkeys(("ratio", "gap"), skill + size * rng.normal())
                for name, size in noise.items()
            }
            truth = int(rng.binomial(questions, skill))
            row[domain] = {"right": records.packed(right), "truth": truth, "by_reference": figures}
        rows.append(row)
    return {"mix": rows, "tuned": rows}, questions


@pytest.mark.parametrize(
    ("noise", "verdict"),
    [
        ({FIRST: 0.1, SECOND: 0.05}, HOLDS),
        ({FIRST: 0.05, SECOND: 1.0}, FAILS),
        ({FIRST: 0.3, SECOND: 0.33}, INCONCLUSIVE),
    ],
)
def test_the_verdict_is_that_of_what_was_planted(noise, verdict):
    comparisons = compared(*planted(noise))
    assert [each.figure for each in comparisons] == ["ratio", "gap"] * 2
    assert verdict_of(comparisons) == verdict
    assert verdict_of(comparisons[:2]).startswith("not judged")
    assert table(comparisons).startswith(f"`reference` orders no worse: {verdict}\n\n| models |")


def test_the_study_is_registered_with_its_groups():
    runs = read_study(reference_sets.STUDY).runs()
    kinds = [run.recipe.split("-")[0] for run in runs]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"base": 1, "mix": 24, "tuned": 32}


def test_the_evidence_page_has_what_the_committed_rows_say():
    page = (records.ROOT / "docs" / "results" / "README.md").read_text("utf-8")
    comparisons = compared(reference_sets.read(), 1319)
    sentence, _, shown = table(comparisons).partition("\n\n")
    assert shown in page
    assert ("not judged" in sentence) == ("not judged yet" in page)
