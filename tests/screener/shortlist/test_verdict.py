"""The verdict's sentences on planted registries: each where it is true, none on noise."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import yaml
from json_schemas import faults
from lmeval_screener.chance import Chances, fitted, keep_slope, normal_scores, read_slope
from lmeval_screener.cli import main as screen_checkpoints
from lmeval_screener.shortlist.manifest import Candidate, Manifest
from lmeval_screener.shortlist.verdict import enough_results, verify
from lmeval_screener.targets.names import Target, labelled
from scipy import stats

from lmeval_dispersion.cli import main as dispersion
from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.evidence import FINE_TUNES, FROM_SCRATCH, SLOPES
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.report import render


def planted(counts, skill, *, listed=4, audit=0, seed=1, ratio=None):
    """A manifest of groups of ``counts`` candidates and their accuracies, G of correlation ``skill``."""
    draw = np.random.default_rng(seed)
    candidates, accuracies = [], []
    for number, count in enumerate(counts):
        gaps = np.sort(draw.normal(size=count))[::-1]
        own = skill * gaps + math.sqrt(1 - skill**2) * draw.normal(size=count)
        drawn = draw.choice(np.arange(listed, count), min(audit, count - listed), replace=False)
        for i in range(count):
            why = "rank" if i < listed else "audit" if i in drawn else None
            name, group = f"org/g{number}-{i}", ("fam", f"{number}B")
            other = None if ratio is None else ratio(draw, gaps[i], own[i])
            candidates.append(
                Candidate(Target(name), "a" * 40, group, why, i + 1, float(gaps[i]), other)
            )
            accuracies.append(float(own[i]))
    return Manifest("math", listed, audit, tuple(candidates), "manifest.json"), accuracies


def noisy(draw, gap, accuracy):
    return float(accuracy + draw.normal())


def verdict(folder, manifest, accuracies, *, known=None, **options):
    lines = ["repo,accuracy"]
    for c, accuracy in zip(manifest.candidates, accuracies, strict=True):
        if known is None or known(c):
            lines.append(f"{c.target.repo},{accuracy}")
    (folder / "accuracy.csv").write_text("\n".join(lines) + "\n")
    return verify(manifest, [str(folder / "accuracy.csv")], **options)


def chosen(c):
    return c.chosen is not None


WORKS = "The screen works on these "
NOT_ENOUGH = "Not enough results to say whether the screen works: "


@pytest.mark.parametrize(
    ("counts", "skill", "audit", "known", "start"),
    [
        ([30], 0.8, 0, None, WORKS),
        ([12, 12, 12], 0.7, 0, None, WORKS),
        ([40], 0.95, 8, chosen, WORKS),
        ([30], -0.8, 0, None, "The screen misleads on these 30 results; its order is reversed: "),
        ([120], 0.0, 0, None, "The screen is hardly better than chance on these 120 results: "),
        ([10], 0.3, 0, None, NOT_ENOUGH),
        ([3], 1.0, 0, None, NOT_ENOUGH),
    ],
)
def test_the_first_line_says_whether_the_screen_works(tmp_path, counts, skill, audit, known, start):
    found = verdict(
        tmp_path, *planted(counts, skill, audit=audit, listed=min(4, counts[0])), known=known
    )
    first = found.answer()[0]
    assert first.startswith(start), first
    assert render(found.document(), "table").startswith(first[:60])


def test_on_noise_next_to_nothing_is_claimed_and_on_skill_no_chance(tmp_path):
    noise = [verdict(tmp_path, *planted([8, 8], 0.0, seed=seed, listed=2)) for seed in range(60)]
    # 3 expected at 5 %; more than 7 in 1 % of cases
    assert sum(found.outcome in ("works", "misleads") for found in noise) <= 7
    assert sum(any(group.separate for group in found.groups) for found in noise) <= 7
    skilled = [verdict(tmp_path, *planted([60], 0.6, seed=seed)).outcome for seed in range(30)]
    assert "chance" not in skilled
    assert skilled.count("works") >= 28


def test_a_list_alone_is_never_called_chance(tmp_path):
    # Sixty of the list in no order: the pairs inside it differ little in G.
    manifest, accuracies = planted([80], 0.0, listed=70)
    found = verdict(tmp_path, manifest, accuracies, known=chosen)
    assert found.overall.high < 0.65
    assert found.answer()[0].startswith(NOT_ENOUGH)
    assert "pairs with results" in found.answer()[0]
    missed = (
        "It is unknown whether the list misses better checkpoints: no checkpoint that is not on it"
    )
    assert missed in " ".join(found.answer())


def test_the_number_of_results_that_would_do_is_said_where_there_are_fewer(tmp_path):
    enough = enough_results(2 / 3)
    assert 30 <= enough <= 40
    few = verdict(tmp_path, *planted([12], 0.2, seed=3)).answer()[0]
    assert f"; about {enough} in one group would show" in few
    shown = 0
    for seed in range(200):
        draw = np.random.default_rng(seed)
        g = draw.normal(size=enough)
        a = 0.5 * g + math.sqrt(0.75) * draw.normal(
            size=enough
        )  # two pairs of three are in the right order
        shown += stats.kendalltau(g, a).pvalue < 0.05
    assert 0.7 < shown / 200 < 0.92


def test_with_all_results_the_regret_is_a_fact(tmp_path):
    manifest, _ = planted([6], 0.0, listed=2)
    for accuracies, fact in (
        ([9, 1, 2, 3, 4, 5], "contains the best checkpoint."),
        ([1, 2, 9, 3, 4, 5], "misses the best checkpoint by 7."),
    ):
        answer = " ".join(verdict(tmp_path, manifest, accuracies).answer())
        assert f"Your list of 2 {fact} 2 at random would lose " in answer


def test_with_an_audit_the_others_that_are_better_are_estimated(tmp_path):
    manifest, accuracies = planted([40], 0.5, listed=8, audit=8)
    said = []
    for drawn in (itertools.cycle([100.0, -100.0]), itertools.repeat(-100.0)):
        values = [
            next(drawn) if c.chosen == "audit" else accuracy
            for c, accuracy in zip(manifest.candidates, accuracies, strict=True)
        ]
        answer = verdict(tmp_path, manifest, values, known=chosen).answer()
        said += [sentence for sentence in answer if "at random" in sentence]
    some, none = said
    seen = (
        r"Of 8 checkpoints drawn at random from .*, 4 are better than the list's best, by up to 9\d"
    )
    assert re.match(seen, some), some
    assert re.search(r": \d+–\d+ of all 32 that are not on it \(95% CI\)\.$", some)
    seen = "none are better than the list's best: at most 10 of all 32 that are not on it (95% CI)."
    assert none.endswith(seen)


def test_missing_results_are_named(tmp_path):
    manifest, accuracies = planted([20], 0.5, listed=4, audit=3)
    known = [c for c in manifest.candidates if chosen(c) and c.target.repo != "org/g0-1"]
    answer = verdict(tmp_path, manifest, accuracies, known=known.__contains__).answer()
    assert "1 of the checkpoints to evaluate has no result: org/g0-1." in answer
    whole = verdict(tmp_path, manifest, accuracies)
    assert not [s for s in whole.answer() if "no result" in s]


def test_several_groups_are_compared_only_inside_each(tmp_path):
    # Right inside each group; across them the order is turned round.
    manifest, _ = planted([6, 6, 6], 0.0, listed=2)
    places = [(6 - place % 6, 10 * (place // 6)) for place in range(18)]
    candidates = [
        replace(c, G=float(own + shift))
        for c, (own, shift) in zip(manifest.candidates, places, strict=True)
    ]
    manifest = replace(manifest, candidates=tuple(candidates))
    found = verdict(tmp_path, manifest, [own - 2 * shift for own, shift in places])
    assert (found.overall.spearman, found.overall.right) == (1, 1)
    assert found.answer()[0].startswith("The screen works on these 18 results: 100% of pairs")
    apart = (
        "Groups that differ from chance on their own, corrected for all 3: fam · 0B (right order)"
    )
    assert found.answer()[1].startswith(apart)
    lists = "The lists contain the best of 3 of 3 groups with all results; they lose 0 on average."
    assert lists in found.answer()


def test_pairs_right_are_those_of_the_order(tmp_path):
    manifest, accuracies = planted([12, 9], 0.6)
    rated = list(zip(manifest.candidates, accuracies, strict=True))
    pairs = [
        (b.rank - a.rank) * (x - y) > 0
        for i, (a, x) in enumerate(rated)
        for b, y in rated[:i]
        if a.group == b.group
    ]
    assert verdict(tmp_path, manifest, accuracies).overall.right == pytest.approx(np.mean(pairs))


def test_the_verdict_is_on_the_order_that_the_screen_gave_whichever_figure_ranked(tmp_path):
    manifest, accuracies = planted([8], 1.0, listed=8)
    by_ratio = [replace(c, rank=9 - c.rank, ratio=float(c.rank)) for c in manifest.candidates]
    judged = verdict(tmp_path, replace(manifest, candidates=tuple(by_ratio)), accuracies)
    assert (judged.outcome, judged.overall.right) == ("misleads", 0)
    assert verdict(tmp_path, manifest, accuracies).outcome == "works"


# --- the own slope --------------------------------------------------------------------------------------


def sloped(*args, kind=FINE_TUNES, **options):
    """A planted manifest whose ranks have a chance."""
    manifest, accuracies = planted(*args, **options)
    return replace(manifest, kinds={c.group: kind for c in manifest.candidates}), accuracies


def raced(folder, manifest, accuracies, known):
    """A race's folder in which only ``known`` were asked all 100 questions."""
    (folder / "race").mkdir()
    (folder / "race" / "race.json").write_text("{}")
    for number, (c, accuracy) in enumerate(zip(manifest.candidates, accuracies, strict=True)):
        if c.chosen:
            content = {
                "results": {"sums": {"acc,none": accuracy}},
                "config": {"model_args": {"pretrained": c.target.repo}},
                "race": {"questions": 100 if known(c) else 25, "of": 100, "score": accuracy},
            }
            (folder / "race" / f"results_{number}.json").write_text(json.dumps(content))
    return verify(manifest, [str(folder / "race")])


def test_the_own_slope_is_of_the_ranks_in_the_whole_group_and_said_with_its_interval(tmp_path):
    manifest, accuracies = sloped([24], 0.7, listed=9, audit=5)
    found = verdict(tmp_path, manifest, [1 / (1 + math.exp(-a)) for a in accuracies], known=chosen)
    known = [(c, a) for c, a in zip(manifest.candidates, accuracies, strict=True) if c.chosen]
    scores = normal_scores(24)[[c.rank - 1 for c, _ in known]]
    by_hand = fitted(
        [(scores, np.array([1 / (1 + math.exp(-a)) for _, a in known]))], SLOPES[FINE_TUNES]
    )
    assert (found.slope, found.ours, found.places) == (by_hand, SLOPES[FINE_TUNES], 24)
    first = [Chances(24, slope).first_for() for slope in (found.slope, found.ours)]
    assert (
        f"Your slope k is {found.slope.k:.2f} ({found.slope.low:.2f} to {found.slope.high:.2f}), from 14 "
        "evaluated checkpoints; ours on fine-tunes is 0.70. For a chance of 90% to have the best, "
        f"evaluate {first[0]} of 24 ranks; by our slope, {first[1]}." in " ".join(found.answer())
    )
    # Per cent are the same accuracies.
    per_cent = [100 / (1 + math.exp(-a)) for a in accuracies]
    assert verdict(tmp_path, manifest, per_cent, known=chosen).slope == found.slope


def test_an_own_slope_follows_the_skill_and_needs_ranks_with_a_chance(tmp_path):
    slopes = [verdict(tmp_path, *sloped([30], skill)).slope.k for skill in (-0.9, 0.0, 0.9)]
    assert slopes[0] < slopes[1] < SLOPES[FINE_TUNES].k < slopes[2]
    without = verdict(tmp_path, *planted([30], 0.9))
    assert (without.slope, without.ours) == (None, None)
    manifest, accuracies = sloped([12, 12], 0.9)
    one = verdict(
        tmp_path, manifest, accuracies, known=lambda c: c.target.repo in ("org/g0-1", "org/g1-1")
    )
    assert one.slope is None
    assert not [s for found in (without, one) for s in found.answer() if "slope" in s]
    # Of two kinds of groups, or after an own slope, the prior is that of fine-tunes.
    mixed = replace(
        manifest, kinds=dict(zip(manifest.kinds, (FINE_TUNES, FROM_SCRATCH), strict=True))
    )
    assert verdict(tmp_path, mixed, accuracies).ours == SLOPES[FINE_TUNES]
    scratch = replace(manifest, kinds=dict.fromkeys(manifest.kinds, FROM_SCRATCH))
    assert verdict(tmp_path, scratch, accuracies).ours == SLOPES[FROM_SCRATCH]


def test_survivors_of_a_race_give_no_slope_and_its_random_sample_does(tmp_path):
    manifest, accuracies = sloped([24], 0.7, listed=8, audit=5)
    accuracies = [0.5 + a / 20 for a in accuracies]
    best = sorted(accuracies)[-4]
    value = dict(zip((c.target.repo for c in manifest.candidates), accuracies, strict=True))
    runs = {
        "survivors": lambda c: value[c.target.repo] >= best,
        "sample": lambda c: c.chosen == "audit" or value[c.target.repo] >= best,
        "all": lambda c: True,
    }
    found = {}
    for name, known in runs.items():
        (tmp_path / name).mkdir()
        found[name] = raced(tmp_path / name, manifest, accuracies, known)
    assert {name: v.slope and v.slope.groups for name, v in found.items()} == {
        **{"survivors": None, "sample": 5, "all": 13}
    }
    missing = sum(1 for c in manifest.candidates if c.chosen and value[c.target.repo] < best)
    said = f"evaluate the {missing} checkpoints that it dropped in full."
    answers = [" ".join(v.answer()) for v in found.values()]
    assert [said in answer for answer in answers] == [True, False, False]


def test_a_kept_slope_is_read_again_and_a_race_that_dropped_keeps_none(tmp_path):
    manifest, accuracies = sloped([24], 0.7, listed=8)
    accuracies = [0.5 + a / 20 for a in accuracies]
    file, value = tmp_path / "slope.json", dict(zip(manifest.candidates, accuracies, strict=True))
    survivors = raced(tmp_path, manifest, accuracies, lambda c: value[c] >= sorted(accuracies)[-4])
    without = verdict(tmp_path, *planted([24], 0.7))
    one = verdict(tmp_path, manifest, accuracies, known=lambda c: c.rank == 1)
    for found, why in (
        (survivors, rf"evaluate the {survivors.dropped} checkpoints? that it dropped"),
        (without, "ranked by the ratio"),
        (one, "no group has two results"),
    ):
        with pytest.raises(DispersionError, match=why):
            found.keep(file)
        assert not file.exists()
    for of, kind in ((manifest, FINE_TUNES), (replace(manifest, task="gsm8k"), FROM_SCRATCH)):
        of = replace(of, kinds=dict.fromkeys(of.kinds, kind))
        found = verdict(tmp_path, of, accuracies)
        assert f"wrote your slope k {found.slope.k:.2f} for {kind} to {file}" in found.keep(file)
        own = read_slope(file)
        assert not faults(json.loads(file.read_text()))
        assert (own.k, own.low, own.high) == pytest.approx(
            (found.slope.k, found.slope.low, found.slope.high), abs=1e-4
        )
        assert (own.kind, own.groups, own.subject) == (kind, 24, of.task or "math")
    with pytest.raises(UsageError, match=r"but .*accuracy\.csv is not JSON.*; name a new file"):
        found.keep(tmp_path / "accuracy.csv")
    assert (tmp_path / "accuracy.csv").read_text().startswith("repo,")
    with pytest.raises(
        DispersionError, match=r"could not write .*slope\.json: No such .*; name another file"
    ):
        found.keep(tmp_path / "none" / "slope.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "other/1"}, "expected a kept slope (screen-checkpoints-slope/1), but "),
        (
            {"k": math.nan},
            "is damaged (`k`: expected a number, got a number nan); write it again with",
        ),
        ({"low": -2}, "expected a slope k within its interval, and both within -1 to 3, got "),
        ({"evaluated": -1}, "is damaged (`evaluated`"),
        ({"subject": None}, "is damaged (`subject`"),
        ({"high": 1e9}, "expected a slope k within its interval"),
        ({"k": 0.1}, "expected a slope k within its interval"),
        ({"k": "much"}, "is damaged (`k`: expected a number, got a string 'much'"),
        ({"kind": "quantized"}, "is damaged (`kind`: expected one of "),
    ],
)
def test_a_file_that_holds_no_slope_is_refused(tmp_path, change, said):
    file = tmp_path / "slope.json"
    keep_slope(file, SLOPES[FINE_TUNES], FINE_TUNES, "math")
    assert read_slope(file).k == SLOPES[FINE_TUNES].k
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UsageError, match=re.escape(said)):
        read_slope(file)


# --- results --------------------------------------------------------------------------------------------


def small_manifest(*entries):
    commits = [commit for _, _, commit, _ in entries]
    targets = labelled(
        [Target(repo, at, local=commit is None, file=file) for repo, at, commit, file in entries]
    )
    candidates = [
        Candidate(target, commit, ("fam", "7B"), "rank", i + 1, -i)
        for i, (target, commit) in enumerate(zip(targets, commits, strict=True))
    ]
    return Manifest("math", len(candidates), 0, tuple(candidates), "manifest.json")


def lm_eval(folder, name, arguments, accuracy):
    content = {
        "results": {"gsm8k": {"acc,none": accuracy}},
        "config": {"model_args": arguments},
        "date": 1.0,
    }
    (folder / f"results_{name}.json").write_text(json.dumps(content))


def test_results_are_matched_by_the_commit_that_was_screened(tmp_path):
    manifest = small_manifest(
        ("org/a", "step1000", "1" * 40, None),
        ("org/a", "step2000", "2" * 40, None),
        ("org/b", None, "3" * 40, "Q4_K_M"),
        ("/data/run/checkpoint-5", None, None, None),
    )
    lm_eval(tmp_path, "1", {"pretrained": "org/a", "revision": "1" * 40}, 0.1)
    lm_eval(tmp_path, "2", {"pretrained": "org/a", "revision": "2" * 40}, 0.2)
    lm_eval(
        tmp_path,
        "3",
        {"pretrained": "org/b", "revision": "3" * 40, "gguf_file": "b-Q4_K_M.gguf"},
        0.3,
    )
    lm_eval(tmp_path, "4", {"pretrained": "/elsewhere/run/checkpoint-5"}, 0.4)
    lm_eval(tmp_path, "5", {"pretrained": "org/a", "revision": "9" * 40}, 0.5)
    found = verify(manifest, [str(tmp_path)])
    assert (found.overall.results, found.without) == (4, ())
    assert found.groups[0].best == 0.4
    assert found.overall.spearman == -1
    (tmp_path / "results_4.json").unlink()
    assert verify(manifest, [str(tmp_path)]).without == ("checkpoint-5",)


def test_sources_that_disagree_are_refused_and_equal_ones_are_not(tmp_path):
    manifest, accuracies = planted([5], 0.5)
    verdict(tmp_path, manifest, accuracies)
    (tmp_path / "same.csv").write_text((tmp_path / "accuracy.csv").read_text())
    sources = [str(tmp_path / "accuracy.csv"), str(tmp_path / "same.csv")]
    assert verify(manifest, sources).overall.results == 5
    (tmp_path / "same.csv").write_text("repo,accuracy\norg/g0-0,77\n")
    with pytest.raises(
        UsageError, match=r"org/g0-0: expected one result, got .* and 77 in .*same\.csv"
    ):
        verify(manifest, sources)


def test_equal_results_are_not_enough(tmp_path):
    manifest, _ = planted([6], 0.5)
    first = verdict(tmp_path, manifest, [1.0] * 6).answer()[0]
    assert first == "Not enough results to say whether the screen works: all accuracies are equal."
    single = verdict(tmp_path, manifest, [1.0] * 6, known=lambda c: c.G > manifest.candidates[1].G)
    assert single.answer()[0].endswith("works: fewer than two checkpoints to compare.")


def test_the_schema_of_a_verdict_holds(tmp_path):
    given = [
        (planted([12, 9], 0.8, audit=3), {"known": chosen}),
        (planted([25], 0.5, ratio=noisy), {}),
        (sloped([25], 0.5, ratio=noisy), {}),
        (planted([6], 0.5), {"known": lambda c: c.target.repo == "org/g0-0"}),
        (planted([6, 6], 0.5), {"known": lambda c: c.group[1] == "1B"}),
    ]
    for arguments, options in given:
        document = verdict(tmp_path, *arguments, **options).document()
        assert faults(json.loads(render(document, "json"))) == []
        assert "nan" not in render(document, "markdown") + render(document, "csv")


def test_the_page_has_accuracy_against_the_figure_that_ranked_and_the_interval_in_a_cell(tmp_path):
    found = verdict(tmp_path, *planted([9], 0.9))
    by_gap = replace(found, order="highest G")
    by_ratio = verdict(tmp_path, *planted([9], 0.9, ratio=noisy))
    for drawn, figure in ((found, "G"), (by_gap, "G"), (by_ratio, "ratio")):
        (chart,) = drawn.charts().values()
        points = chart.specification()["data"]["values"]
        assert chart.caption == f"Accuracy against {figure}"
        assert [(p["label"], p[figure], p["accuracy"]) for p in points] == [
            (p.label, getattr(p, figure), p.accuracy) for p in drawn.points
        ]
    assert len(points) == found.overall.results == 9
    line = found.overall
    assert f"{line.right:.0%} ({line.low:.0%}–{line.high:.0%})" in (page := found.to_html())
    assert "─" not in page  # there is no bar in it
    assert "─ 95% interval" in render(found.document(), "table", width=120)


def test_own_models_are_called_by_what_their_names_share_unless_two_groups_would_be_called_the_same(
    tmp_path,
):
    manifest, accuracies = planted([6, 6], 0.9)

    def named(*families):
        candidates = [
            replace(
                c,
                group=(
                    f"tokenizer:{families[c.group[1] != manifest.candidates[0].group[1]]}",
                    "1B",
                ),
            )
            for c in manifest.candidates
        ]
        return {
            line.group
            for line in verdict(
                tmp_path, replace(manifest, candidates=candidates), accuracies
            ).groups
        }

    assert named("0a", "0a") == {"org · 1B · one tokenizer"}
    assert named("0a", "0b") == {"tokenizer:0a · 1B", "tokenizer:0b · 1B"}


# --- the command ----------------------------------------------------------------------------------------


def test_the_demos_list_is_written_and_verified_by_both_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--demo", "--shortlist", "2", "--audit-sample", "3", "--emit", "list"]
    assert screen_checkpoints(words) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 5
    assert "2 of 11: ranks 1–2, and 3 of the others at random" in printed.err
    assert "evaluate the list with: bash list/run.sh" in printed.err
    family = yaml.safe_load((data_folder("demo") / "family.yaml").read_text())
    lines = [f"{entry['folder']},{entry['accuracy']['mean']}" for entry in family["checkpoints"]]
    (tmp_path / "all.csv").write_text("\n".join(["repo,accuracy", *lines]) + "\n")
    words = ["list/manifest.json", "all.csv", "--format", "json"]
    found = []
    for command in (screen_checkpoints, dispersion):
        assert command(["verify", *words]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[0]["answer"][0].startswith("The screen works on these ")
    assert found[0]["groups"][0]["regret"] == 0
    # Kept, its slope is what the next screening's chances follow.
    assert dispersion(["verify", *words[:2], "--keep", "slope.json"]) == 0
    printed = capsys.readouterr()
    own = read_slope("slope.json")
    assert f"Your slope k is {own.k:.2f} " in printed.out
    assert (
        f"wrote your slope k {own.k:.2f} for fine-tunes to slope.json; use it with "
        "`screen-checkpoints …" in printed.err
    )
    said = (
        f"According to your own results (slope k = {own.k:.2f}, 95 % interval {own.low:.2f} to {own.high:.2f}, "
        "from 11 evaluated checkpoints, screened for math): "
    )
    screens = []
    for options in ([], ["--slope", "slope.json"]):
        assert screen_checkpoints(["--demo", "--format", "json", *options]) == 0
        screens.append(json.loads(capsys.readouterr().out))
        assert not faults(screens[-1])
    ours, yours = screens
    assert ours["slope"] is None
    assert "is not known for these" in ours["answer"][1]
    kept = json.loads((tmp_path / "slope.json").read_text())
    assert kept == {"schema": kept["schema"]} | yours["slope"]
    held = Chances(11, own).holds_best
    first = Chances(11, own).first_for()
    chance = f"{Chances(11, own).between(1, first):.0%}"
    assert yours["answer"][1] == (
        f"{said}ranks 1–{first} hold the best checkpoint with a chance of {held[first - 1]:.0%}; "
        f"rank 1 is better than rank {first} with a chance of {chance}."
    )
    assert not [sentence for sentence in yours["answer"] if "Of our" in sentence]
    assert [c["holds_best"] for c in yours["checkpoints"]] == held.tolist()
    assert [c["holds_best"] for c in ours["checkpoints"]] == Chances(
        11, SLOPES[FINE_TUNES]
    ).holds_best.tolist()
    assert [c["label"] for c in yours["checkpoints"]] == [c["label"] for c in ours["checkpoints"]]
    assert screen_checkpoints(["--demo", "--slope", "slope.json", "--shortlist", "-q"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == first
    assert screen_checkpoints(["--demo", "--slope", "list/manifest.json"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert dispersion(["verify", *words[:2], "--keep", "list/manifest.json"]) == 2
    assert "name a new file" in capsys.readouterr().err
    # A second list does not mix with the first.
    assert screen_checkpoints(["--demo", "--shortlist", "2", "--emit", "list"]) == 2
    assert "new or empty folder, got list" in capsys.readouterr().err
    assert screen_checkpoints(["verify", "none.json", "x.csv"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("screen-checkpoints verify: ")
    assert (
        "expected the manifest of a short list (screen-checkpoints-shortlist/2), but none.json does"
        in error
    )
    assert error.count("\n") == 1
