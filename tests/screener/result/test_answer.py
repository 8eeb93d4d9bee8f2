"""The sentences of a screening: each on planted data that carry it, and not on data that do not."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import lmeval_screener.result
import numpy as np
import pytest
import yaml
from lmeval_screener.chance import Chances, Own
from lmeval_screener.figures import gap
from lmeval_screener.result.answer import course_sentence, not_screened
from lmeval_screener.screened import Against
from screenings import failed, ranking, ratio_of, result, screened, siblings

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.evidence import FINE_TUNES, FROM_SCRATCH, SLOPES
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.report import render

OURS = {"parameters": 190_000, "base": "org/base"}  # as the siblings that were counted
COUNTS = (
    "On our own fine-tunes (models of about 0.2 million parameters), such a list held a checkpoint "
    "within 0.01 of the best accuracy in 17 of 18 cases, each a group on one task (6 fresh groups "
    "of 32 fine-tunes); of pairs as far apart as ranks 1 and 9, 89 % were ordered correctly."
)
MIXTURES = (
    "in 18 of 18 cases, each a group on one task (6 fresh groups of 24 models trained on random "
    "data mixtures)"
)
NOT_KNOWN = (
    "How often such an order is right is not known for these checkpoints; "
    "`dispersion verify` estimates it from your results."
)
BY_GAP = "How often an order by G is right is not known."
NOISE = (
    "Screened for math, these {} checkpoints get no order from their output rows. Race them all, or "
    "ask each a few questions: `dispersion race --all --budget 5%`."
)
APART = [1.5 - i / 20 for i in range(24)]


def alphabet(count):
    return ", ".join("abcdefghijklmnopqrstuvwxyz"[:count])


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        (
            [1.3],
            [
                "Only a (ratio 1.300) can be ranked here; a screen compares checkpoints and says nothing about "
                "a single one."
            ],
        ),
        (
            [1.3, 1.1],
            [
                "Evaluate first: a, b (all 2, highest ratio first; math).",
                NOT_KNOWN,
            ],
        ),
        (
            APART,
            ["Evaluate first: a, b, c, d, e and 4 more (highest ratio of 24; math).", NOT_KNOWN],
        ),
        # Those of equal rows share a place, and all of them are named, or how many there are.
        ([1.3, 1.3, 1.2, 1.1, 1.0], ["Evaluate first: a, b, c, d (highest ratio of 5; math)."]),
        (
            [1.3] * 7 + APART[9:12],
            ["Evaluate first: a, b, c, d, e and 4 more (highest ratio of 10; math)."],
        ),
        ([1.3, 1.3, 1.3], [NOISE.format(3)]),
    ],
)
def test_the_answer_of_one_group(ratios, said):
    answer = result(siblings(*ratios)).answer()
    assert answer[: len(said)] == said
    assert len(answer) == max(len(said), 1 + (len(ratios) > 3))


@pytest.mark.parametrize(
    ("ratios", "values", "changes", "counts"),
    [
        (APART, OURS, {}, COUNTS),
        (APART[:8], OURS, {}, "17 of 18"),
        (APART[:7], OURS, {}, ""),  # fewer than were counted
        ([2 - i / 40 for i in range(33)], OURS, {}, ""),  # more
        (APART, OURS | {"parameters": 7_000_000_000}, {}, ""),
        (APART, OURS | {"parameters": None}, {}, ""),
        (APART, OURS | {"base": ""}, {}, ""),
        (APART, OURS, {0: {"base": "org/other"}}, ""),
        (APART, OURS, {0: {"parameters": 2_000_000}}, ""),
    ],
)
def test_what_was_counted_stands_over_lists_of_that_kind_alone(ratios, values, changes, counts):
    members = siblings(*ratios, **values)
    for place, change in changes.items():
        members[place] = replace(members[place], **change)
    found = result(members)
    assert (counts or "is not known for these") in found.answer()[1]
    assert ("our own" in found.answer()[1]) == bool(counts)
    # The line of the chance is drawn where it was measured, and the number is kept for all.
    assert (
        "chance that the best is above" in found.to_markdown().partition("<details>")[0]
    ) == bool(counts)
    assert found.to_dict()["checkpoints"][0]["holds_best"] == found.groups[0].chances.holds_best[0]
    assert "measured on our own models of about 0.2 million parameters" in found.to_markdown()


@pytest.mark.parametrize("count", [2, 5, 24, 100])
@pytest.mark.parametrize("values", [OURS, {}])
def test_first_line_marks_line_and_short_list_are_one_list(count, values):
    members = siblings(*(3 * 0.97**i for i in range(count)), **values)
    # A copy would be evaluated twice; one without a ratio has no place.
    members[1:1] = [
        replace(members[0], target=replace(members[0].target, labelled="copy"), copy_of="a")
    ]
    found = result([*members, screened("z", count + 1, no_ratio="no norm")])
    found = replace(
        found, checkpoints=tuple(replace(c, ranked_by="ratio") for c in found.checkpoints)
    )
    listed = [c.label for c in found.shortlist().groups[0].listed]
    table = found.tables()["ranking0"]
    marked = [row["label"] for row in table.rows if row["called"].startswith("▶")]
    assert marked == listed
    assert [
        table.rows[place]["label"] for place, mark in table.marks.items() if mark == "pick"
    ] == listed
    named = found.answer()[0].removeprefix("Evaluate first: ").partition(" (")[0]
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    assert named == ", ".join(listed[:5]) + more
    for place, words in table.cuts.items():
        assert [row["label"] for row in table.rows[:place] if row["label"] != "copy"] == listed
        assert f"{100 * found.groups[0].chances.holds_best[len(listed) - 1]:.0f} %" in words
        assert render(found.document(), "table", width=80).count(words) == 1
    assert len(table.cuts) == (values == OURS and count == 24)


def test_a_short_list_of_another_length_is_the_one_that_is_spoken_of():
    found = result(siblings(*APART, **OURS))
    shown = found.shown(found.shortlist(2))
    assert shown.answer()[0] == "Evaluate first: a, b (highest ratio of 24; math)."
    assert "such a list" not in shown.answer()[1]
    assert (
        "of pairs as far apart as ranks 1 and 2, 73 % were ordered correctly" in shown.answer()[1]
    )
    assert "such a list" in found.shown(found.shortlist(24)).answer()[1]  # of all that there are


def test_where_noise_may_explain_the_ratios_there_is_no_order_no_chance_and_no_short_list():
    noise = np.random.default_rng(3).normal(size=24) * 0.01
    found = result(siblings(*sorted(1 + noise, reverse=True), se=0.03))
    (group,) = found.groups
    assert found.answer() == [NOISE.format(24)]
    assert (group.is_noise, group.kind, group.chances, found.first_for()) == (True, "", None, 24)
    assert found.chance("a", "x") is None
    assert len(found.shortlist().chosen) == 24
    text = found.to_markdown()
    assert not [words for words in ("Holds the best", "Rank", "ranks first", "▶") if words in text]
    # The same spread beyond noise is an order.
    assert (
        result(siblings(*sorted(1 + noise, reverse=True), se=0.0005))
        .answer()[0]
        .startswith("Evaluate f")
    )


def test_by_g_no_chance_is_known_and_whose_ratio_is_missing_is_said():
    members = ranking(3)
    unread = "No ratio: it was not computed; the order is by G alone."
    said = [
        "Evaluate first: a, b, c (all 3, highest G first; math).",
        "The order is by G, the paper's figure (cosine distance).",
        BY_GAP,
        unread,
    ]
    assert result(members).answer() == said
    assert result(members[:1]).answer() == [
        "Only a (G 1.900) can be ranked here; a screen compares checkpoints and says nothing about a single "
        "one.",
        "No ratio of a: it was not computed; G is the only figure.",
    ]
    members = [
        replace(c, ratio=ratio_of(1.0 + i)) for i, c in enumerate(members)
    ]  # as with --rank-by gap
    disagree = "The order is by G, the paper's figure (cosine distance); by the ratio c is first."
    assert result(members).answer() == [said[0], disagree, BY_GAP]
    members[1] = replace(members[1], ratio=None, no_ratio="the norm of foo is not known")
    said = "No ratio of b: the norm of foo is not known; the order is by G alone."
    assert said in result(members).answer()


def test_from_scratch_only_where_a_familys_file_calls_all_of_them_bases():
    """Without a sign the smaller chance."""

    def kind(*called, **values):
        members = siblings(1.3, 1.2, 1.1, **values)
        pairs = zip(members, called, strict=True)
        (group,) = result([replace(c, target=replace(c.target, kind=k)) for c, k in pairs]).groups
        return group.kind

    assert kind("base", "base", "base") == FROM_SCRATCH
    assert (
        kind("", "", "")
        == kind("base", "base", "instruct")
        == kind("base", "base", "base", base="org/z")
    )
    assert kind("", "", "") == FINE_TUNES
    members = [
        replace(c, target=replace(c.target, kind="base"))
        for c in siblings(*APART, parameters=190_000)
    ]
    answer = result(members).answer()
    assert answer[0] == "Evaluate first: a, b, c, d, e and 1 more (highest ratio of 24; math)."
    assert answer[1].startswith("On our own models trained from scratch (models of about")
    assert MIXTURES in answer[1]


def test_an_own_slope_counts_for_groups_of_its_kind():
    own = Own(FINE_TUNES, 1.5, 1.0, 2.0, 0.35, "2026-11-24", 30, subject="gsm8k")
    tunes = replace(result(siblings(*APART)), slope=own)
    of = Chances(24, own)
    first = of.first_for()
    assert tunes.first_for() == first < result(siblings(*APART)).first_for()
    assert tunes.chance("a", "d") == of.between(1, 4)
    assert tunes.answer()[1] == (
        "According to your own results (slope k = 1.50, 95 % interval 1.00 to 2.00, from 30 evaluated "
        "checkpoints, screened for gsm8k): "
        f"ranks 1–{first} hold the best checkpoint with a chance of {of.holds_best[first - 1]:.0%}; "
        f"rank 1 is better than rank {first} with a chance of {of.between(1, first):.0%}."
    )
    # One place may do; of two, both.
    two = replace(tunes, checkpoints=tuple(siblings(1.3, 1.2)))
    sure = replace(two, slope=replace(own, k=3.0, high=3.0))
    assert sure.answer()[1].endswith(
        "screened for gsm8k): rank 1 holds the best checkpoint with a chance of 93%."
    )
    doubt = replace(two, slope=replace(own, k=0.5, low=0.5))
    assert doubt.answer()[1].endswith(
        "screened for gsm8k): rank 1 is better than rank 2 with a chance of 72%."
    )
    details = render(tunes.document(), "markdown")
    assert (
        "For fine-tunes k is 1.50, measured on 30 checkpoints of your own (2026-11-24;" in details
    )
    assert "by your own results" in details
    assert "our own models" not in details
    elsewhere = "Your own slope was measured on fine-tunes, so no chance here is computed from it."
    assert elsewhere not in tunes.answer()
    scratch = [
        replace(c, target=replace(c.target, kind="base"))
        for c in siblings(*APART, parameters=190_000)
    ]
    other = replace(result(scratch), slope=own)
    assert "On our own models trained from scratch" in other.answer()[1]
    assert elsewhere in other.answer()
    assert other.first_for() == result(scratch).first_for()
    details = render(other.document(), "markdown")
    assert "measured on 13 groups of our own models of about 0.2 million parameters" in details


def test_a_chance_is_of_two_candidates_of_one_group():
    members = [*siblings(*APART), *siblings(1.3, 1.2, scale="1B")]
    found = result(
        [replace(c, target=replace(c.target, labelled=f"{c.scale}-{c.label}")) for c in members]
    )
    of = Chances(24, SLOPES[FINE_TUNES])
    assert found.chance("7B-a", "7B-d") == of.between(1, 4) == 1 - found.chance("7B-d", "7B-a")
    assert [group.first_for() for group in found.groups] == [9, 2]
    for ask, said in (
        (lambda: found.chance("7B-a", "1B-a"), "two checkpoints of one group"),
        (lambda: found.chance("7B-a", "no"), "'no'"),
        (lambda: found.first_for(0.8), r"got 2; call first_for\(0.8\) on each"),
        (lambda: found.first_for(0.0), "above 0"),
    ):
        with pytest.raises(UsageError, match=said):
            ask()
    content = found.to_dict()["checkpoints"]
    assert [c["holds_best"] for c in content[:24]] == of.holds_best.tolist()
    assert [c["chance_to_next"] for c in content[21:24]] == [
        of.between(22, 23),
        of.between(23, 24),
        None,
    ]


def test_two_below_their_base_have_no_order_in_code():
    sides = [Against(-0.1, 0.01, "below")] * 2 + [Against(0.1, 0.01, "above")]
    members = [replace(c, against=a) for c, a in zip(siblings(1.3, 1.2, 1.1), sides, strict=True)]
    base = replace(screened("z", 4, ratio=ratio_of(1.0)), is_base=True)
    for domain, below, said in (("code", 3, True), ("code", 1, False), ("math", 3, False)):
        of = members if below == 3 else members[1:]
        text = replace(result([*of, base]), domain=domain).answer()
        assert (
            any(
                line.startswith("For code, the order among checkpoints below their base")
                for line in text
            )
            == said
        )


@pytest.mark.parametrize("values", [OURS, {}])
def test_rows_that_do_not_tell_a_base_apart_one_by_one_leave_the_order_first(values):
    level = Against(0.01, 0.02, "level")
    members = [replace(c, against=level) for c in siblings(*APART[:12], **values)]
    base = replace(screened("z", 4, ratio=ratio_of(1.0)), is_base=True)
    first, success, against = result([*members, base]).answer()
    assert first.startswith("Evaluate first: a, b, c, d, e and ")
    assert success.startswith(
        "On our own fine-tunes" if values else "How often such an order is right is not"
    )
    assert (
        against
        == "The ratio does not separate a, b, c, d, e and 7 others from the base z, each taken "
        "alone."
    )
    # A single one, and those that differ, are not spoken of so.
    members[1:] = [replace(c, against=Against(-0.1, 0.01, "below")) for c in members[1:]]
    answer = result([*members, base]).answer()
    assert answer[0] == first
    assert answer[2].startswith("Below the base z by the ratio: b, ")
    assert answer[3] == "The ratio does not separate a from the base z."


def test_several_groups_get_a_sentence_each_up_to_four():
    members = [screened(f"m{i}-{j}", j + 1, scale=f"{i}B") for i in range(6) for j in range(2)]
    said = result(members).answer()
    by_g = "The order is by G, the paper's figure (cosine distance)."
    assert (
        said[0]
        == f"fam · 0B: Evaluate first: m0-0, m0-1 (all 2, highest G first; math). {by_g} {BY_GAP}"
    )
    assert said[4] == "2 more groups below."


def test_failures_come_last_and_first_where_most_failed():
    failures = [failed(f"org/{i}") for i in range(3)]
    none = "none of the 3 checkpoints could be screened (3 RepoNotFound); the first: org/0: none"
    assert not_screened(failures) == none
    assert not_screened(failures[:1]) == "org/0: RepoNotFound: none"
    mixed = [
        *failures,
        failed("org/gated", "GatedRepo", "ask"),
        failed("org/too", "GatedRepo", "ask too"),
    ]
    firsts = "the first of each: org/0: none; org/gated: ask"
    assert not_screened(mixed).endswith(f"(3 RepoNotFound, 2 GatedRepo); {firsts}")
    rare = [*failures, *mixed[3:], failed("org/big", "TooLarge"), failed("org/odd", "BadHeader")]
    assert "1 TooLarge, 1 with another error" in result(ranking(9), rare).answer()[-1]
    for count, place in ((2, 0), (4, -1)):
        said = result(ranking(count), failures).answer()
        assert (
            said[place] == f"3 of {count + 3} checkpoints could not be screened (3 RepoNotFound)."
        )
        assert "could not" not in " ".join(said[1:] if place == 0 else said[:-1])


def test_a_training_is_called_by_its_model_and_its_members_by_their_steps():
    local = [screened(f"/x/run1/checkpoint-{i}", 1, commit=None) for i in (20, 3)]
    last = screened("/x/run1", 1, commit=None)
    (group,) = result([*local, last]).groups
    assert group.title == "run1"
    assert list(group.names.values()) == ["checkpoint-3", "checkpoint-20", "final model"]
    # Models beside the steps come after them, the run's own last; a base of another place stays out.
    beside = [
        screened(f"/x/run1/{name}", 1, commit=None)
        for name in ("merged", "checkpoint-3-merged", "epoch_1")
    ]
    base = replace(screened("/x/base", 1, commit=None), is_base=True)
    (group,) = result([last, *beside, base, *local]).groups
    assert [group.names[c] for c in group.steps] == ["checkpoint-3", "checkpoint-20"]
    named = [
        "checkpoint-3",
        "checkpoint-20",
        "epoch_1",
        "checkpoint-3-merged",
        "merged",
        "final model",
    ]
    assert [group.names[c] for c in group.trajectory] == named
    assert group.names[base] == base.label
    (group,) = result([screened("org/pythia", 1, revision=f"step{i}") for i in (20, 3)]).groups
    assert group.title == "pythia"
    # Two runs are no training; each member keeps as much of its path as tells it apart.
    mixed = [*local, screened("/x/run2/checkpoint-3", 1, commit=None)]
    (group,) = result(mixed).groups
    assert (group.trajectory, group.title) == ((), "fam · 7B")
    assert list(group.names.values()) == [c.name for c in mixed]


# --- a training -----------------------------------------------------------------------------------------


def training(levels, seed=0, noise=0.02):
    """Gaps of a model whose domain tokens share a direction the less, the higher the level."""
    draw = np.random.default_rng(seed)
    domain, reference = draw.normal(size=(12, 32)), draw.normal(size=(60, 32))
    noises = (
        [noise * draw.normal(size=rows.shape) for rows in (domain, reference)] for _ in levels
    )
    return [
        gap(domain + 1 - level + a, reference + b)
        for level, (a, b) in zip(levels, noises, strict=True)
    ]


@pytest.mark.parametrize(
    ("levels", "kind", "flat_since"),
    [
        ([0.0, 0.2, 0.4, 0.6, 0.8], "rises", False),
        ([0.0, 0.3, 0.6, 0.6, 0.6, 0.6], "rises", True),
        ([0.8, 0.6, 0.4, 0.2, 0.0], "falls", False),
        ([0.0, 0.3, 0.7, 0.4, 0.2], "peaks", False),
        ([0.7, 0.4, 0.0, 0.3, 0.5], "dips", False),
        ([0.3, 0.7, 0.0, 0.3], "peaks", False),
        ([0.4, 0.4], "flat", False),
        ([0.2, 0.6], "rises", False),
    ],
)
def test_a_planted_course_is_found(levels, kind, flat_since):
    sentence = course_sentence("G", training(levels), [f"step{i}" for i in range(len(levels))])
    assert ("flat since step2" in sentence) is flat_since
    words = {"rises": "rises from", "falls": "falls from", "flat": "does not change"}
    words |= {"peaks": ", then falls to", "dips": ", then rises to"}
    assert words[kind] in sentence
    for other in set(words) - {kind}:
        assert words[other] not in sentence or (kind, other) in {
            ("peaks", "rises"),
            ("dips", "falls"),
        }


def test_on_noise_no_course_is_claimed():
    courses = [
        course_sentence("G", training([0.5] * 6, seed, noise=0.1), list("abcdef"))
        for seed in range(60)
    ]
    claims = sum("does not change" not in sentence for sentence in courses)
    # 5 % of 60 is 3; 8 or more would happen once in a hundred times.
    assert claims < 8


def test_the_sentence_on_seeds_is_the_demos_own_figures():
    family = yaml.safe_load((data_folder("demo") / "family.yaml").read_text(encoding="utf-8"))
    seeds = defaultdict(list)
    for entry in family["checkpoints"] + family["replicates"]:
        seeds[entry["folder"]].append(entry["gap"]["cosine"])
    assert [len(values) for values in seeds.values()] == [3] * 11
    moves = [max(values) - min(values) for values in seeds.values()]
    steps = [b - a for a, b in pairwise(sorted(values[0] for values in seeds.values()))]
    text = (Path(lmeval_screener.result.__file__).parent / "screening.jinja").read_text("utf-8")
    assert (
        f"11 checkpoints, trained from 3 seeds, spans {min(moves):.3f} to {max(moves):.3f}" in text
    )
    assert f"differ by {min(steps):.3f} to {max(steps):.3f}" in text
