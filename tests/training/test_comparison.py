"""The comparison of arms against plain recomputation."""

import numpy as np
import pytest

from lmeval_dispersion.training.comparison import as_table, compared
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
    assert "| squeeze | d | 2 | 410.00 | 170.00 (84.85) | +11.75 (3.14) |" in as_table([base, squeeze])
