"""Held-out figures, and base and losses side by side, against plain recomputation."""

import json
import math

import numpy as np
import pytest
import torch
from json_schemas import faults
from tiny_decoders import tiny_gpt2, tokens

from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.report import render
from lmeval_dispersion.training.comparison import TrainingComparison
from lmeval_dispersion.training.train import held_out_figures


@pytest.mark.parametrize("batch", [2, 5])
def test_evaluated_equals_a_loop_over_blocks(batch):
    model, ids = tiny_gpt2(), tokens(5, 12)
    before = torch.random.get_rng_state()
    figures = held_out_figures(model, ids.numpy().astype(np.int32), batch)
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), before)
    model.eval()
    with torch.no_grad():
        outs = [model(row[None], labels=row[None], output_hidden_states=True) for row in ids]
    assert figures["perplexity"] == pytest.approx(math.exp(np.mean([float(o.loss) for o in outs])), rel=1e-5)
    for layer in range(3):
        states = [o.hidden_states[layer + 1][0].numpy() for o in outs]
        assert figures["tokens"][layer] == pytest.approx(np.mean([dispersion(s) for s in states]), abs=1e-6)
        assert figures["texts"][layer] == pytest.approx(dispersion([s[-2] for s in states]), abs=1e-6)
    assert held_out_figures(model, ids[:1].numpy(), 1)["texts"] == [None] * 3


def comparison(*shifts, losses=("squeeze",)):
    """Losses whose perplexity is off base's with the same seed by these per cents; base's is 100, 150, …"""

    def figures(perplexity):
        return [{"perplexity": perplexity, "tokens": [0.1, perplexity / 1000], "texts": [0.2, 0.3]}]

    results = []
    for seed, shift in enumerate(shifts):
        base, start = 100 + 50 * seed, {"seed": seed, "before": figures(400 + 20 * seed)}
        results.append(start | {"arm": "base", "after": figures(base)})
        results += [start | {"arm": loss, "after": figures(base * np.exp(shift / 100))} for loss in losses]
    return TrainingComparison.of(results, ["texts/d.txt"])


@pytest.mark.parametrize(
    ("shifts", "first"),
    [
        ((-6, -7, -5), "Better than base: squeeze on d.txt, -6.00 % (-8.48 to -3.52)."),
        ((6, 7, 5), "No loss is better than base."),
        ((-6, -7, 5), "No loss is better than base."),
        ((-6,), "One seed shows no difference from base: squeeze on d.txt -6.00 %. Pass --seed more"),
    ],
)
def test_the_answer_is_what_the_seeds_support(shifts, first):
    document = comparison(*shifts).document()
    assert document.answer[0].startswith(first)
    rest = " ".join(document.answer[1:])
    assert ("Worse than base: squeeze on d.txt, +6.00 %" in rest) == (shifts[0] > 0)
    assert ("Not clearly different from base: squeeze" in rest) == (shifts == (-6, -7, 5))
    assert bool(document.limits) == (len(shifts) > 1)


def test_intervals_are_paired_by_seed_equal_scipys_and_widen_with_the_number_of_comparisons():
    stats = pytest.importorskip("scipy.stats")
    shifts = [-6.0, -7.5, -5.0, -4.0]
    for losses, level in ((("squeeze",), 0.95), (("squeeze", "push_away"), 0.975)):
        base, *_, row = comparison(*shifts, losses=losses).trained
        low, high = stats.t.interval(level, 3, np.mean(shifts), stats.sem(shifts))
        assert (row.versus_base, row.half) == pytest.approx(((low + high) / 2, (high - low) / 2))
        assert row.tokens == pytest.approx(row.perplexity / 1000)
        assert (base.perplexity, base.before, base.versus_base, base.domain) == (175, 430, None, "d.txt")
        assert base.sd == pytest.approx(np.std([100, 150, 200, 250], ddof=1))


def test_every_format_says_the_same():
    report = comparison(-6, -7, -5)
    document = report.document()
    for name in ("table", "markdown", "json"):
        text = render(document, name)
        assert document.answer[0] in text
        assert "-6.0" in text
    assert not faults(json.loads(render(document, "json")))
    head, *lines = render(document, "csv").splitlines()
    assert head.startswith("loss,domain,seeds,perplexity,sd,versus_base,")
    assert len(lines) == 2
    page = report.to_html()
    assert "Perplexity against base, 95\xa0% intervals" in page
    assert page.count("<svg") == 2  # wide and narrow
