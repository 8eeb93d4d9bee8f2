"""The tables find a law that is there and none in noise; the committed pages are those of the results."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import yaml
from planted_population import planted
from scipy.stats import spearmanr

from benchmarks.validity import analysis, page, results
from benchmarks.validity.analysis import Estimate, correlations, decision, partial, residual, variants
from benchmarks.validity.page import first_sentence, population_page, still_worth, tables_of, write_pages
from benchmarks.validity.study import Study, read_study
from benchmarks.validity.verdicts import FAILS, HOLDS, PART, UNTESTED, verdicts

PAGES = Path("docs/results")


def full(resamples: int) -> Study:
    """The full configuration with fewer resamples."""
    content = yaml.safe_load(Path("benchmarks/validity/full.yaml").read_text("utf-8"))
    content["analysis"]["resamples"] = resamples
    return Study(Path("full.yaml"), content)


@pytest.fixture(scope="module")
def study() -> Study:
    return full(40)


@pytest.fixture(scope="module", autouse=True)
def fewer_draws():
    patch = pytest.MonkeyPatch()
    patch.setattr(analysis, "DRAWS", 2)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def lawful(study):
    return tables_of(study, planted(study, law=1.0), [])


@pytest.fixture(scope="module")
def lawless(study):
    return tables_of(study, planted(study, law=0.0), [])


def test_correlation_and_decision_are_those_of_slow_computations():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3, 12)).round(1), rng.random(12).round(1)
    assert correlations(x, y[None]) == pytest.approx([spearmanr(row, y).statistic for row in x])
    assert np.isnan(correlations(np.ones((1, 12)), y[None])[0])
    right, pairs = 0.0, 0
    for i, j in itertools.combinations(range(12), 2):
        if abs(y[i] - y[j]) > 2 * np.sqrt((y[i] * (1 - y[i]) + y[j] * (1 - y[j])) / 50):
            pairs += 1
            sign = (x[0][i] - x[0][j]) * (y[i] - y[j])
            right += 1 if sign > 0 else 0.5 if sign == 0 else 0
    assert decision(x[0], y, 50) == (pytest.approx(right / pairs), pairs)


def test_pairs_on_which_both_figures_agree_are_counted_as_slow_loops_count_them(study):
    rows, rng = planted(study, law=0.6, noise=0.2), np.random.default_rng(7)
    for row in rows:
        for checkpoint in row["checkpoints"]:
            checkpoint["figures"]["ratio_folded_math"] = checkpoint["accuracy"]["math"] + rng.normal(0, 0.3)
    small = analysis.panel(study, analysis.frame(study, rows), "small", 800)
    line = analysis.both(study, small, "math")
    pairs = agreed = right = other = 0
    for g, ratio, y in zip(
        *(small.matrix(f"{name}_math") for name in ("cosine", "ratio_folded", "accuracy")), strict=True
    ):
        for i, j in itertools.combinations(range(len(y)), 2):
            error = np.sqrt((y[i] * (1 - y[i]) + y[j] * (1 - y[j])) / small.questions)
            if abs(y[i] - y[j]) <= 2 * error:
                continue
            pairs += 1
            same = (g[i] - g[j]) * (ratio[i] - ratio[j]) > 0
            agreed += same
            right += same and (g[i] - g[j]) * (y[i] - y[j]) > 0
            other += not same and (g[i] - g[j]) * (y[i] - y[j]) > 0
    assert line["pairs"] == pairs
    assert line["agree"].value == pytest.approx(agreed / pairs)
    assert line["right"].value == pytest.approx(right / agreed)
    assert line["else"].value == pytest.approx(other / (pairs - agreed))
    assert line["right"].low <= line["right"].value <= line["right"].high


def test_a_residual_is_uncorrelated_with_what_was_taken_out():
    rng = np.random.default_rng(1)
    controls = rng.normal(size=(30, 2))
    left = residual(rng.normal(size=30) + controls @ [2, 3], controls)
    assert np.abs(controls.T @ left).max() < 1e-9


def test_a_planted_law_is_found(study, lawful):
    found = {line.claim: line for line in verdicts(lawful)}
    held = [claim for claim, line in found.items() if line.verdict == HOLDS]
    assert {
        "G orders recipes by math accuracy (one size, one step)",
        "G of small models orders larger ones",
        "G adds to all cheap rivals together",
        "G orders better than each rival alone",
        "G orders better than 25 labelled questions",
        "G of a domain follows that domain's skill",
    } <= set(held)
    # The planted accuracy rises with every step, so the step cannot be beaten, and the page says so.
    assert found["G orders the checkpoints of one run"].verdict == FAILS
    assert "does not beat" not in first_sentence(study, lawful)
    assert "the step alone does at least as well" in first_sentence(study, lawful)
    assert lawful["worth"].low <= lawful["worth"].value <= lawful["worth"].high
    assert f"as well as {lawful['worth'].value:.0f} labelled question" in still_worth(lawful)


def test_nothing_is_claimed_of_noise(study, lawless):
    found = {line.claim: line.verdict for line in verdicts(lawless)}
    for claim in (
        "G orders recipes by math accuracy (one size, one step)",
        "G of small models orders larger ones",
        "G adds to all cheap rivals together",
        "G orders better than each rival alone",
        "G orders better than 25 labelled questions",
        "G of a domain follows that domain's skill",
        "A variant that nothing moves orders better than the cosine G",
    ):
        assert found[claim] == FAILS, claim
    assert "it does not beat 25 labelled questions" in first_sentence(study, lawless)


def test_what_is_not_run_is_not_tested():
    study = full(3)
    rows = [row for row in planted(study, law=1.0) if row["size"] == "small" and row["setting"] == "default"]
    found = {line.claim: line.verdict for line in verdicts(tables_of(study, rows, []))}
    assert found["G of small models orders larger ones"] == UNTESTED
    assert found["Optimiser settings move G less than recipes do"] == UNTESTED
    assert found["G does not move where no prediction moves"] == UNTESTED


def test_a_rival_that_is_the_accuracy_leaves_nothing_to_add(study):
    rows, rng = planted(study, law=1.0, noise=0.2), np.random.default_rng(4)
    for row in rows:
        for checkpoint in row["checkpoints"]:
            checkpoint["text_loss"] = -checkpoint["accuracy"]["math"] + 0.02 * rng.normal()
    table = analysis.frame(study, rows)
    found = {row["taken out"]: row["rho"] for row in partial(study, table, "math", last=True)}
    assert found["nothing"].low > 0.3
    assert found["text_loss"].value < found["nothing"].value / 2
    small = analysis.panel(study, table, "small", 800)
    order = {row["predictor"]: row["rho"].value for row in analysis.ordering(study, small, "math", "math")}
    assert order["text_loss"] > 0.95 > order["G (cosine)"]


def test_telling_who_was_taught_is_not_ordering_those_who_were(study):
    rows, rng = planted(study, law=1.0), np.random.default_rng(6)
    for row in rows:
        taught = bool(analysis.HOLD["math"] & set(study.content["recipes"][row["recipe"]]["shares"]))
        for checkpoint in row["checkpoints"]:
            checkpoint["accuracy"]["math"] = taught * round(rng.uniform(0.2, 0.9), 2)
            checkpoint["figures"]["cosine_math"] = taught + 0.1 * rng.normal()
    small = analysis.panel(study, analysis.frame(study, rows), "small", 800)
    inside = analysis.within_domain(study, small, "math")
    assert 4 < len(inside.recipes) < len(small.recipes)
    every = analysis.ordering(study, small, "math", "math")[0]["rho"]
    among = analysis.ordering(study, inside, "math", "math")[0]["rho"]
    assert every.low > 0
    assert among.low < 0 < among.high
    tables = {"inside": {"math": [{"predictor": "G (cosine)", "rho": among}]}, "inside_recipes": {"math": 16}}
    assert page.shown(among) in page.inside_sentence(tables)
    assert page.inside_sentence({}) == ""


def test_a_better_variant_is_found_on_the_other_half_and_a_lucky_one_is_not(study):
    rows = planted(study, law=0.3, noise=0.2)
    rng = np.random.default_rng(5)
    for row in rows:
        for checkpoint in row["checkpoints"]:
            for domain in analysis.DOMAINS:
                truth = checkpoint["accuracy"][domain]
                lucky = study.half(row["recipe"]) == "choose"
                checkpoint["figures"][f"ratio_folded_{domain}"] = truth
                checkpoint["figures"][f"centred_folded_{domain}"] = truth if lucky else rng.normal()
    found = {row["variant"]: row for row in variants(study, analysis.frame(study, rows))}
    assert found["ratio_folded"]["difference"].low > 0
    assert found["ratio_folded"]["holm"] < 0.5
    assert found["centred_folded"]["choose"] > 0.99
    assert found["centred_folded"]["difference"].low < 0
    # What the choosing half prefers is what is judged, though the other one would have been better.
    others = {"ordering": {}, "along": {"runs": 0}, "seeds": {}, "sizes": [], "partial": [], "frequency": [],
              "settings": [], "spread": None, "trials": {"same": []}, "smallest": None,
              "matrix": []}  # fmt: skip
    ratio = found["ratio_folded"]
    assert verdicts({**others, "variants": [found["cosine"], ratio]})[-1].verdict == HOLDS
    lucky = found["centred_folded"] | {"choose": 1.01}
    assert verdicts({**others, "variants": [found["cosine"], ratio, lucky]})[-1].verdict == FAILS


def test_an_unfinished_population_keeps_whole_seeds():
    study = full(3)
    rows = planted(study, law=1.0)
    table = analysis.frame(study, rows)
    whole = analysis.panel(study, table, "small", 800)
    assert (len(whole.recipes), whole.seeds) == (24, [0, 1, 2])
    missing = [r for r in rows if not (r["seed"] == 1 and r["recipe"] < "m") and r["recipe"] != "distilled"]
    part = analysis.panel(study, analysis.frame(study, missing), "small", 800)
    assert (len(part.recipes), part.seeds) == (23, [0, 2])
    text = population_page(study, tables_of(study, missing, []), missing, [])
    assert "stopped before its end" in text
    assert f"{len(missing)} of {len(rows)} models" in text


@pytest.mark.parametrize(("moved", "verdict"), [(0.0, HOLDS), (0.4, FAILS)])
def test_the_gauge_claim_follows_the_trials(study, lawful, moved, verdict):
    same = [
        {
            "change": "common vector",
            "shift": 1e-7,
            "checkpoints": 3,
            "cosine": moved,
            "ratio_folded": 0.0,
            "euclidean": 0.0,
        }
    ]
    line = next(
        v for v in verdicts({**lawful, "trials": {"same": same, "changed": []}}) if "no prediction" in v.claim
    )
    assert line.verdict == verdict


def test_intervals_that_hold_a_point(lawful):
    from benchmarks.validity.verdicts import includes, shown

    assert includes(Estimate(0.1, -0.1, 0.3), 0)
    assert not includes(Estimate(0.2, 0.1, 0.3), 0)
    assert includes(Estimate(0.2, float("nan"), float("nan")), 0)
    assert shown(Estimate(0.2, 0.1, 0.3)) == "0.20 (0.10 to 0.30)"
    assert shown(Estimate(float("nan"), 0, 0)) == "undefined"
    assert {line.verdict for line in verdicts(lawful)} <= {HOLDS, PART, FAILS, UNTESTED}


def test_the_page_keeps_what_others_wrote(study, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "tables_of", lambda *_: {**lawless_tables})
    configuration = Path("benchmarks/validity/full.yaml")
    row = planted(study, law=0.0)[0] | {"configuration": results.digest(configuration)}
    results.append(tmp_path / "full.jsonl", row)
    (tmp_path / "README.md").write_text(
        f"# Title\n\n{page.BEGIN}\nstale\n{page.END}\n\nother part\n", "utf-8"
    )
    write_pages(tmp_path, tmp_path, draw=False)
    whole = (tmp_path / "README.md").read_text("utf-8")
    assert whole.startswith("# Title")
    assert whole.endswith("other part\n")
    assert "stale" not in whole
    (tmp_path / "README.md").write_text("# no marks\n", "utf-8")
    with pytest.raises(ValueError, match="put them back"):
        write_pages(tmp_path, tmp_path, draw=False)


lawless_tables: dict = {
    "ordering": {}, "seeds": {}, "sizes": [], "matrix": [], "worth": None, "both": [], "frequency": [],
    "spread": None, "smallest": None,
    "what": "", "trained_steps": 3, "points": [], "along": {"runs": 0, "rows": []}, "partial": [],
    "partial_last": [],
    "variants": [], "settings": [], "settings_rho": float("nan"), "settings_decision": float("nan"),
    "trials": {"same": [], "changed": []},
}  # fmt: skip


@pytest.mark.parametrize("domain", analysis.DOMAINS)
def test_the_committed_orders_are_those_of_the_results(domain):
    """The quick form of the next: the lines of G and ratio, with their intervals."""
    study = read_study(Path("benchmarks/validity/full.yaml"))
    rows = results.checked(results.FOLDER / "full.jsonl", study.path)
    own = analysis.panel(study, analysis.frame(study, rows), "small", study.steps[-1])
    text, y = (PAGES / "population.md").read_text("utf-8"), own.matrix(f"accuracy_{domain}")
    for name, column in (("G (cosine)", "cosine"), ("ratio", "ratio_folded")):
        row = analysis._order(study, own, name, own.matrix(f"{column}_{domain}"), y)
        cells = (name, page.shown(row["rho"]), page.shown(row["decision"]), str(row["pairs"]))
        assert f"| {' | '.join(cells)} |" in text


@pytest.mark.slow
def test_the_committed_pages_are_those_of_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr(analysis, "DRAWS", 200)
    (tmp_path / "README.md").write_text((PAGES / "README.md").read_text("utf-8"), "utf-8")
    write_pages(results.FOLDER, tmp_path, draw=False)
    made = sorted(path.name for path in tmp_path.glob("*.md"))
    assert made
    for name in made:
        assert (tmp_path / name).read_text("utf-8") == (PAGES / name).read_text("utf-8"), name
