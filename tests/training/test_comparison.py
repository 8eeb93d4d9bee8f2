"""The comparison of arms against plain recomputation."""

import numpy as np
import pytest

from lmeval_dispersion.report import render
from lmeval_dispersion.training.comparison import compared, json_of, report
from lmeval_dispersion.training.settings import settings_from


def result(arm, seed, before, after):
    def figures(perplexity):
        return {"perplexity": perplexity, "tokens": [0.1, perplexity / 1000], "texts": [0.2, 0.3]}

    entries = [{"step": step, "domains": [figures(p)]} for step, p in ((0, before), (9, after))]
    return {"arm": arm, "seed": seed, "evaluations": entries}


def test_comparison_is_paired_by_seed():
    settings = settings_from(
        {"model": "m", "data": "d", "out": "o", "arms": "base,squeeze", "seeds": "0,1"}, None
    )
    runs = [
        result("base", 0, 400, 100),
        result("squeeze", 0, 400, 110),
        result("base", 1, 420, 200),
        result("squeeze", 1, 420, 230),
    ]
    base, squeeze = compared(settings, runs)
    assert (base["perplexity"], base["before"], base["versus_base"]) == (150, 410, None)
    assert base["sd"] == pytest.approx(np.std([100, 200], ddof=1))
    shifts = 100 * np.log([110 / 100, 230 / 200])
    assert squeeze["versus_base"] == pytest.approx(shifts.mean())
    assert squeeze["versus_base_sd"] == pytest.approx(shifts.std(ddof=1))
    assert squeeze["tokens"] == pytest.approx(0.17)


def rows(*shifts, arm="squeeze"):
    """A base and an arm whose perplexity is off by these per cents, seed by seed."""
    settings = settings_from(
        {"model": "m", "data": "d", "out": "o", "arms": f"base,{arm}", "seeds": [*range(len(shifts))]}, None
    )
    trained = [result("base", seed, 400, 100) for seed in range(len(shifts))]
    trained += [result(arm, seed, 400, 100 * np.exp(shift / 100)) for seed, shift in enumerate(shifts)]
    return compared(settings, trained)


@pytest.mark.parametrize(
    ("shifts", "first"),
    [
        ((-6, -7, -5), "Better than base: squeeze, perplexity -6.00 % (-8.48 to -3.52, 3 seeds)."),
        ((6, 7, 5), "No arm is better than base."),
        ((-6, -7, 5), "No arm is better than base."),
        ((-6,), "One seed tells nothing apart from base: squeeze -6.00 %."),
    ],
)
def test_the_answer_is_what_the_seeds_support(shifts, first):
    document = report(rows(*shifts))
    assert document.answer[0].startswith(first)
    rest = " ".join(document.answer[1:])
    assert ("Worse than base: squeeze, perplexity +6.00 %" in rest) == (shifts[0] > 0)
    assert ("Not told apart from base: squeeze" in rest) == (shifts == (-6, -7, 5))
    assert bool(document.limits) == (len(shifts) > 1)


def test_intervals_equal_scipys_and_widen_with_the_number_of_comparisons():
    stats = pytest.importorskip("scipy.stats")
    shifts = [-6.0, -7.5, -5.0, -4.0]
    one, two = rows(*shifts), rows(*shifts, arm="push_away")
    (table,) = report(one).sections[0].parts
    found = [table.rows[1][end] for end in ("low", "high")]
    assert found == pytest.approx(stats.t.interval(0.95, 3, np.mean(shifts), stats.sem(shifts)))
    (table,) = report([*one, two[1]]).sections[0].parts
    found = [table.rows[2][end] for end in ("low", "high")]
    assert found == pytest.approx(stats.t.interval(0.975, 3, np.mean(shifts), stats.sem(shifts)))


def test_without_a_base_nothing_is_compared():
    _, squeeze = rows(-6, -5)
    alone = squeeze | {"versus_base": None, "versus_base_sd": None}
    (sentence,) = report([alone]).answer
    assert sentence.startswith("Nothing is compared")
    assert f"{alone['perplexity']:.2f}, of squeeze" in sentence


def test_every_format_says_the_same():
    document = report(rows(-6, -7, -5), "dispersion train --model m")
    assert render(document, "json") == json_of(document.rows)
    for name in ("table", "markdown"):
        text = render(document, name)
        assert document.answer[0] in text
        assert "-6.00" in text
    head, *lines = render(document, "csv").splitlines()
    assert head.startswith("arm,domain,seeds,before,perplexity,sd,versus_base,")
    assert len(lines) == 2
