"""The rules of siblings.yaml on planted groups: what is there is said, and what is not there is not."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lmeval_screener.figures import difference, ratio
from lmeval_screener.weights.projection import FinalNorm
from scipy.stats import spearmanr

from benchmarks.validity import records, sibling_play, siblings
from benchmarks.validity.analysis import FAILS, HOLDS, Grouped, share_of
from benchmarks.validity.answers import Answers, next_probabilities
from benchmarks.validity.decoder import Decoder
from benchmarks.validity.questions import questions
from benchmarks.validity.sibling_races import TITLE, Groups, agreement, by_figure, sibling_page
from benchmarks.validity.sibling_races import claims as race_claims
from benchmarks.validity.siblings import (
    SLOPES,
    Cell,
    Pairs,
    Population,
    below,
    cells,
    claims,
    first_for,
    held_often,
    tables,
)
from benchmarks.validity.study import read_study
from benchmarks.validity.texts import DOMAINS, WITH_CALLS, trained_tokenizer
from lmeval_dispersion import evidence
from lmeval_dispersion.evidence import FINE_TUNES, FROM_SCRATCH, OUR_MODELS, OUR_SIZES

SHAPE = {"width": 16, "mlp": 24, "layers": 1, "heads": 2}
TOKENS, QUESTIONS = 15, 400


def cell(rng, kind, seed, domain, *, k=None, size=24, spread=0.3, tokens=0.01):
    """Ratios that order accuracies with slope ``k`` (0: not at all), over tokens that are so noisy."""
    rho = np.sqrt(2 * k**2 / (1 + 2 * k**2))
    truth, noise = rng.standard_normal((2, size))
    accuracy = np.clip(0.5 + 0.12 * truth, 0, 1)
    parts = tokens * rng.standard_normal((2, size, TOKENS))
    log_ratio = (
        spread * (rho * truth + np.sqrt(1 - rho**2) * noise) + parts[0].mean(1) - parts[1].mean(1)
    )
    left = [
        sign * (p.mean(1, keepdims=True) - p) / (TOKENS - 1)
        for p, sign in zip(parts, (1, -1), strict=True)
    ]
    right = (rng.random((size, QUESTIONS)) < accuracy[:, None]).astype(float)
    near = np.clip(accuracy[:, None] + 0.1 * rng.standard_normal((size, QUESTIONS)), 0, 1)
    answers = rng.dirichlet(np.ones(TOKENS), 25)[None] * accuracy[:, None, None] + 0.05
    return Cell(
        kind,
        seed,
        domain,
        accuracy,
        accuracy,
        right,
        near,
        answers,
        log_ratio,
        np.concatenate(left, axis=1),
    )


def planted(slopes, *, groups=10, **settings):
    rng = np.random.default_rng(2)
    return [
        cell(rng, kind, seed, domain, k=k, size=24 if kind == "mix" else 32, **settings)
        for kind, k in slopes.items()
        for seed in range(groups)
        for domain in DOMAINS
    ]


def near_copies(rng, **settings):
    return [
        cell(rng, f"copies-{kind}", 0, d, **settings)
        for kind in ("scratch", "tuned")
        for d in DOMAINS
    ]


def said(all_cells, near=()):
    populations = [Population(kind, all_cells) for kind in siblings.KINDS]
    return [(line.claim, line.verdict) for line in claims(populations, near)], populations


def test_an_order_that_is_as_good_as_registered_is_called_so():
    near = near_copies(np.random.default_rng(2), k=0.0, spread=0.0, tokens=0.1)
    lines, populations = said(planted(SLOPES), near)
    assert [verdict for _, verdict in lines] == [HOLDS] * 9
    for own in populations:
        slope = own.slope().estimate
        assert slope.low <= own.k <= slope.high
        assert all(abs(each.too_sure.value) < 0.05 for each in own.bins(own.cells))
        assert own.brier(rival=False) < 0.25
    shown = "\n".join(tables(populations, near))
    assert "| copies-tuned | 3 | 3 | 3 |" in shown
    assert "| copies-scratch | 3 | 3 | 3 |" in shown


def test_an_order_that_is_none_is_not():
    near = near_copies(np.random.default_rng(1), k=0.0)  # ratios differ and say nothing
    lines, _ = said(planted(dict.fromkeys(SLOPES, 0.0)), near)
    assert [verdict for _, verdict in lines] == [FAILS] * 9


def test_pairs_and_chances_are_those_of_a_slow_loop():
    own = cell(np.random.default_rng(5), "tuned", 1, "math", k=0.7, size=12)
    pairs, population = Pairs.of(own), Population("tuned", [own])
    places = {int(line): place for place, line in enumerate(own.order)}
    slow = {}
    for i in range(12):
        for j in range(12):
            if places[i] < places[j] and abs(own.accuracy[i] - own.accuracy[j]) > 0.01:
                slow[i, j] = own.accuracy[i] > own.accuracy[j]
    assert (
        dict(
            zip(
                zip(pairs.first.tolist(), pairs.second.tolist(), strict=True),
                pairs.right,
                strict=True,
            )
        )
        == slow
    )
    normal = np.random.default_rng(0).standard_normal((200_000, 12))
    expected = -np.sort(-normal, axis=1).mean(0)  # Blom's scores are near the expected ones
    ranks = zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)
    at = [expected[places[i]] - expected[places[j]] for i, j in ranks]
    np.testing.assert_allclose(pairs.scores, at, atol=0.03)
    sums = sum(each.too_sure.pairs for each in population.bins([own]))
    assert sums == (population.said(pairs) >= 0.6).sum()


@pytest.mark.parametrize(("kind", "size"), [("mix", 24), ("tuned", 32), ("tuned", 96)])
def test_the_places_to_evaluate_hold_the_best_as_often_as_said(kind, size):
    rng, k = np.random.default_rng(3), SLOPES[kind]
    rho = np.sqrt(2 * k**2 / (1 + 2 * k**2))
    truth, noise = rng.standard_normal((2, 20_000, size))
    seen = rho * truth + np.sqrt(1 - rho**2) * noise
    places = (seen > np.take_along_axis(seen, truth.argmax(1)[:, None], 1)).sum(1)
    first = first_for(kind, size)
    assert (places < first).mean() >= 0.89
    assert (places < first - 1).mean() < 0.91


def test_rows_are_what_the_models_are(tmp_path):
    tokenizer = trained_tokenizer(WITH_CALLS, 1400, documents=150)
    asked = {
        pool: {domain: questions(domain, 30, seed) for domain in DOMAINS}
        for pool, seed in (("truth", 1), ("labels", 2))
    }
    answers, made, norms = Answers(tokenizer, asked), [], []
    for seed in (1, 2):
        model = Decoder(tokenizer.get_vocab_size(), **SHAPE, seeds=[seed]).eval()
        with torch.no_grad():
            for parameter in model.named.values():
                parameter.add_(
                    0.3
                    * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                )
        tensors = {name: tensor.float() for name, tensor in model.member(0).items()}
        kept = answers.kept(model, tensors, own_rows=True)
        made.append({"name": f"m{seed}", "recipe": f"copies-tuned-1-{seed}", "seed": 1, **kept})
        norms.append((model, tensors))
    found, bases = cells(made, 30)
    assert (len(found), bases) == (3, {})
    for own in found:
        ids = answers.tokens[own.domain]
        others = [i for i in answers.reference if i not in ids]
        figures = []
        for line, (model, tensors) in enumerate(norms):
            right = [
                answers.answered(model, pool, own.domain)[0].mean() for pool in ("labels", "truth")
            ]
            np.testing.assert_allclose([own.right[line].mean(), own.truth[line]], right)
            assert own.accuracy[line] == pytest.approx(np.mean(right))
            first = next_probabilities(model, answers.prompts["labels", own.domain][:25])[:, ids]
            np.testing.assert_allclose(own.answers[line], first, atol=0.003)
            rows = tensors["lm_head.weight"].numpy()
            norm = FinalNorm("n", tensors["model.norm.weight"].double().numpy(), "rms")
            figures.append(ratio(rows[ids], rows[others], norm, "BF16"))
        np.testing.assert_allclose(
            own.log_ratio, [np.log(figure.mean) for figure in figures], atol=1e-5
        )
        logs = [
            SimpleNamespace(
                mean=np.log(figure.mean),
                left_out_domain=np.log(figure.left_out_domain),
                left_out_reference=np.log(figure.left_out_reference),
            )
            for figure in figures
        ]
        assert np.sqrt(own.variances[0, 1]) == pytest.approx(difference(*logs).se, rel=0.01)


def test_the_mean_answer_orders_those_who_agree_with_the_others():
    rng = np.random.default_rng(4)
    truth = np.linspace(0.2, 0.9, 9)
    answers = (
        truth[:, None, None] * np.eye(3)[rng.integers(3, size=25)] + (1 - truth[:, None, None]) / 3
    )
    slow = []
    for own in answers:
        total = 0.0
        for question in range(25):
            mean = np.mean([other[question] / other[question].sum() for other in answers], axis=0)
            total += (own[question] * mean).sum()
        slow.append(total / 25)
    np.testing.assert_allclose(agreement(answers), slow)
    own = cell(rng, "lora", 1, "math", k=0.7, size=9)
    figures = by_figure(own)
    assert figures["agreement"] == pytest.approx(spearmanr(agreement(own.answers), own.truth)[0])
    assert figures["25 labels"] > 0.3


# --- the race -------------------------------------------------------------------------------------------


def played(given, **changes):
    """Means that every claim asks for."""
    means = {
        "everything": {"lost": 0.004, "share": 1.0, "loads": 24, "wrong": 0.0},
        "the race": {"lost": 0.005, "share": 0.10, "loads": 6, "wrong": 0.01},
        "the race, ordered by the block": {"lost": 0.005, "share": 0.08, "loads": 6, "wrong": 0.01},
        "the race by the block": {"lost": 0.005, "share": 0.25, "loads": 24, "wrong": 0.01},
        "a race of all": {"lost": 0.005, "share": 0.4, "loads": 24, "wrong": 0.0},
        "the first 32": {"lost": 0.005, "share": 0.2, "loads": 32, "wrong": 0.0},
    }
    for way, change in changes.items():
        means[way.replace("_", " ").replace(" ordered", ", ordered")] |= change
    rng = np.random.default_rng(0)

    def jittered(way):
        return {
            name: value + (name == "lost") * 1e-4 * rng.standard_normal()
            for name, value in means[way].items()
        }

    return {f"{own.group} {own.domain}": {way: jittered(way) for way in means} for own in given}


def said_of_races(**changes):
    rng = np.random.default_rng(6)
    given = [
        cell(rng, kind, seed, d, k=0.7)
        for kind in ("mix", "tuned", "lora")
        for seed in (1, 2, 3)
        for d in DOMAINS
    ]
    results = played(given, **changes)
    pooled = {
        f"{kind} 1 2 {d}": results[f"{kind} 1 {d}"] for kind in ("mix", "tuned") for d in DOMAINS
    }
    return {line.claim: line.verdict for line in race_claims(given, results, results, pooled)}


def test_a_race_that_is_as_good_as_registered_is_called_so():
    lines = said_of_races()
    assert set(lines.values()) == {HOLDS}
    assert len(lines) == 2 * (2 * 3 + 2) + 4


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"the_race": {"lost": 0.03}}, "The race loses at most"),
        ({"the_race": {"share": 0.2}}, "The race asks at most"),
        ({"the_race": {"wrong": 0.06}}, "of its races are wrong: random mixtures"),
        ({"the_race": {"loads": 32}}, "Of 96 in one list"),
        ({"the_race": {"lost": 0.02}}, "Of 96 in one list"),
        ({"the_race_ordered_by_the_block": {"share": 0.11}}, "Ordered by the first block"),
        ({"the_race_ordered_by_the_block": {"lost": 0.03}}, "Ordered by the first block"),
        ({"the_race_by_the_block": {"lost": 0.03}}, "The race by the block loses"),
        ({"the_race_by_the_block": {"share": 0.3}}, "With the base it asks"),
        ({"the_race_by_the_block": {"wrong": 0.06}}, "of its races are wrong: adapters"),
    ],
)
def test_a_figure_beyond_its_bound_refutes_its_claim(changes, claim):
    verdicts = [verdict for name, verdict in said_of_races(**changes).items() if claim in name]
    assert verdicts
    assert HOLDS not in verdicts


def test_figures_are_means_over_cells_then_groups():
    rng = np.random.default_rng(0)
    given = [
        cell(rng, "lora", seed, d, k=0.7) for seed, ds in ((1, DOMAINS), (2, ("math",))) for d in ds
    ]
    value = Groups(given, {}).over(lambda own: float(own.seed))
    assert isinstance(value, Grouped)
    assert value.value == 1.5


def test_intervals_over_six_groups_cover_and_shares_of_cells_are_wilsons():
    rng = np.random.default_rng(4)
    covered = np.zeros(2)
    for _ in range(600):
        parts = rng.standard_normal(6)
        figure = Grouped.jackknifed(lambda kept, parts=parts: float(parts[kept].mean()), 6)
        np.testing.assert_allclose(figure.parts, parts)
        for place, estimate in enumerate((figure.estimate, figure.registered)):
            covered[place] += estimate.low <= 0 <= estimate.high
    assert 0.92 < covered[0] / 600 < 0.98
    assert covered[1] / 600 < 0.90  # as registered
    assert str(share_of(np.full(6, 3.0), np.full(6, 3.0))) == "1.00 (0.82 to 1.00)"
    even, uneven = (
        share_of(np.array(hits), np.full(6, 10.0)) for hits in ([5.0] * 6, [0.0, 10.0] * 3)
    )
    assert even.value == uneven.value == 0.5
    assert uneven.low < even.low  # cells of a group that are alike count less


def test_a_share_of_lists_that_held_can_fail():
    rng = np.random.default_rng(9)

    def verdicts(truth):
        draws = rng.binomial(3, truth, (300, 6)).astype(float)
        return [held_often(share_of(hits, np.full(6, 3.0))) for hits in draws]

    assert verdicts(0.98).count(HOLDS) > 280
    assert verdicts(0.60).count(HOLDS) < 15  # as registered, half of them held
    assert verdicts(0.40).count(FAILS) > 270


def test_a_wider_interval_rescues_no_claim_that_failed():
    figure = Grouped(0.318, np.array([0.27, 0.28, 0.31, 0.33, 0.35, 0.368]))
    assert figure.estimate.low < 0.28 < figure.registered.low
    assert below(figure, 0.28) == FAILS


def test_the_committed_page_is_that_of_the_committed_rows():
    page = records.ROOT / "docs" / "results" / "siblings.md"
    assert sibling_page(records.FOLDER).written(TITLE) == page.read_text("utf-8")


def test_what_answers_print_is_counted_on_the_committed_fresh_groups():
    folder = siblings.STUDY.parent / "results"
    shapes = read_study(siblings.STUDY).content
    found, _ = cells(siblings.read(folder), shapes["questions"])
    for kind, slope in (("mix", FROM_SCRATCH), ("tuned", FINE_TUNES)):
        fresh, own = Population(kind, found), evidence.SLOPES[slope]
        _, held, _ = fresh.held(fresh.cells)
        (row,) = [row for row in own.held if row.fresh]
        assert (row.held, row.cells) == (held, len(fresh.cells))
        assert row.groups.startswith(f"{len(fresh.groups)} fresh groups of {fresh.size} ")
        bins = [
            (most, round(each.was, 2))
            for most, each in zip(siblings.BINS[1:], fresh.bins(fresh.cells), strict=True)
        ]
        assert [*own.right] == bins
    # The size that is named, and told apart from others.
    shape = {name: shapes["sizes"]["small"][name] for name in ("width", "mlp", "layers", "heads")}
    model = Decoder(shapes["texts"]["vocabulary"], **shape)
    parameters = sum(part.numel() for part in model.parameters())
    assert f"models of about {parameters / 1e6:.1f} million parameters" == OUR_MODELS
    assert OUR_SIZES[0] < parameters < OUR_SIZES[1]


def test_the_study_is_registered_with_its_groups():
    runs = read_study(siblings.STUDY).runs()
    kinds = [run.recipe.split("-")[0] for run in runs]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "base": 6,
        "mix": 144,
        "tuned": 192,
        "lora": 144,
        "copies": 48,
    }
    copies = [run for run in runs if run.recipe.startswith("copies-tuned")]
    assert len({(run.seed, str(run.shares), run.training["lr"]) for run in copies}) == 1
    assert len({run.order for run in copies}) == 24
    assert all((run.adapter is not None) == run.recipe.startswith("lora") for run in runs)


def test_races_of_planted_groups_are_played_and_judged():
    rng = np.random.default_rng(6)
    given = [
        cell(rng, kind, seed, d, k=0.7, size=8)
        for kind, seeds in (("mix", (311, 312, 313, 314)), ("lora", (301,)))
        for seed in seeds
        for d in DOMAINS
    ]
    bases = {
        f"301 {d}": cell(rng, "base", 301, d, k=0.7, size=2).among(np.arange(1)) for d in DOMAINS
    }
    content = sibling_play.played(given, bases, orders=2)
    assert content["400"].keys() == {f"{c.group} {c.domain}" for c in given}
    assert {key.rsplit(" ", 1)[0] for key in content["pooled"]} == {"mix 311 312 313 314"}
    mix, adapters = content["400"]["mix 311 math"], content["400"]["lora 301 math"]
    assert mix["everything"] == {
        "lost": pytest.approx(mix["everything"]["lost"]),
        "share": 1,
        "loads": 8,
        "wrong": 0,
    }
    assert mix["the race"]["loads"] == first_for("mix", 8)
    assert "the race" not in adapters
    # All answer the block, the base and the best everything.
    assert adapters["the race by the block"]["share"] >= (2 * 400 + 7 * 25) / (8 * 400)
    assert adapters["the race by the block"]["loads"] >= 9 + 2
