"""The figure that ranks: a family's file says it, a user overrides it, and the answer names it."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser import Browser
from checkpoints import write_checkpoint
from json_schemas import faults
from lmeval_screener import screen
from lmeval_screener.cli import main
from lmeval_screener.orders import UNSAID, Order
from lmeval_screener.registry.commands import registry
from lmeval_screener.targets.families import demo_targets, load_families

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.report import render

TOKENIZER = (data_folder("demo") / "tokenizer.json").read_bytes()
RELEASED = "rank_by: gap\nmetric: euclidean\n"
#: Name -> the length of its words' rows, and of its digits'.
PLANTED = {"wide": (2.0, 1.1), "even": (1.0, 0.9), "narrow": (0.5, 0.4)}
ORDER = "The order is by G, the paper's figure (Euclidean distance)"


def plant(folder: Path, words: float, digits: float) -> str:
    """A checkpoint whose rows have these lengths; of all, digits and words keep their directions."""
    draw = np.random.default_rng(1)
    rows = words * draw.normal(size=(1280, 32))
    ids = [json.loads(TOKENIZER)["model"]["vocab"][str(digit)] for digit in range(10)]
    rows[ids] = digits * draw.normal(size=(10, 32))
    tensors = {
        "lm_head.weight": ("F32", rows.astype("f4")),
        "model.layers.0.self_attn.q_proj.weight": ("F32", np.ones((4, 4))),
        "model.norm.weight": ("F32", np.ones(32)),
    }
    return str(write_checkpoint(folder, tensors, tokenizer=TOKENIZER))


def family_of(folder: Path, heading: str = RELEASED, **planted: tuple[float, float]) -> str:
    """A family's file with planted checkpoints, as ``--family`` takes it."""
    lines = [
        f"      - {{repo: {plant(folder / name, *lengths)}, scale: 7B}}"
        for name, lengths in planted.items()
    ]
    file = folder / "families.yaml"
    file.write_text("\n".join([f"schema: 1\n{heading}families:\n  fam:\n    checkpoints:", *lines]))
    return f"{file}:fam"


def names(found):
    return [Path(c.repo).name for c in found.checkpoints]


def test_bundled_families_are_ranked_by_euclidean_g_and_the_demo_by_the_ratio():
    assert {family.order for family in load_families().values()} == {Order("gap", "euclidean")}
    assert {target.order for target in demo_targets()} == {UNSAID}
    found = screen(demo=True)
    assert {(c.ranked_by, c.metric) for c in found.checkpoints} == {("ratio", "cosine")}
    assert not [line for line in found.answer() if "paper's figure" in line]


def test_a_family_is_ranked_by_what_its_file_says_and_the_answer_names_it(tmp_path):
    """By Euclidean G the widest is first, by the ratio the one whose digits stand out from its words."""
    found = screen(family=family_of(tmp_path, **PLANTED))
    assert names(found) == ["wide", "even", "narrow"]
    assert (found.ranked_by, found.metric) == ("gap", "euclidean")
    gaps = [c.gaps["euclidean"].mean for c in found.checkpoints]
    assert [c.gap.mean for c in found.checkpoints] == gaps == sorted(gaps, reverse=True)
    assert max(found.checkpoints, key=lambda c: c.ratio.mean).label.endswith("even")
    assert f"{ORDER}; by the ratio even is first." in found.answer()
    assert "How often an order by G is right is not known." in found.answer()
    assert found.groups[0].chances is None
    content = json.loads(render(found.document(), "json"))
    assert faults(content) == []
    assert {(c["ranked_by"], c["metric"]) for c in content["checkpoints"]} == {("gap", "euclidean")}
    assert f"{gaps[0]:.3f}" in found.to_markdown()


def test_where_both_figures_name_the_same_first_one_is_named(tmp_path):
    found = screen(family=family_of(tmp_path, a=(1.0, 2.0), b=(1.0, 1.0)))
    assert names(found) == ["a", "b"]
    assert f"{ORDER}." in found.answer()
    assert screen(family=family_of(tmp_path, "", a=(1.0, 2.0), b=(1.0, 1.0))).answer() == (
        screen([str(tmp_path / "a"), str(tmp_path / "b")]).answer()
    )


@pytest.mark.parametrize(
    ("heading", "options", "first", "sentence"),
    [
        (
            RELEASED,
            {"rank_by": "ratio"},
            "even",
            r"by the ratio; by G, .* \(Euclidean distance\), wide is",
        ),
        (
            "",
            {"rank_by": "gap", "metric": "euclidean"},
            "wide",
            r"\(Euclidean distance\); by the ratio even",
        ),
    ],
)
def test_a_user_overrides_what_the_file_says(tmp_path, heading, options, first, sentence):
    found = screen(family=family_of(tmp_path, heading, **PLANTED), **options)
    assert names(found)[0] == first
    assert re.search(sentence, " ".join(found.answer()))


def test_names_without_a_family_keep_the_ratio(tmp_path):
    family_of(tmp_path, **PLANTED)
    found = screen([str(tmp_path / name) for name in PLANTED])
    assert found.ranked_by == "ratio"
    assert names(found)[0] == "even"


def test_rows_without_a_difference_get_no_order_by_g(tmp_path):
    """All random: as by the ratio, the guard refuses nineteen of twenty such groups."""
    draw = np.random.default_rng(4)
    refused = 0
    for number in range(8):
        folder = tmp_path / str(number)
        file = family_of(folder, a=(1.0, 1.0), b=(1.0, 1.0), c=(1.0, 1.0))
        for name in "abc":
            tensors = {
                "lm_head.weight": ("F32", draw.normal(size=(1280, 32)).astype("f4")),
                "model.norm.weight": ("F32", np.ones(32)),
            }
            write_checkpoint(folder / name, tensors, tokenizer=TOKENIZER)
        answer = screen(family=file).answer()
        refused += "no order" in answer[0]
        assert "Evaluate first" not in answer[0] or ORDER in answer[1]
    assert refused >= 6


def test_a_registry_keeps_the_figure_of_a_family_and_reads_no_other(tmp_path):
    path = tmp_path / "r.db"
    file = family_of(tmp_path, **PLANTED)
    screen(family=file, registry=path)
    rows = registry(path).rows()
    assert [Path(row["checkpoint"]).name for row in rows] == ["wide", "even", "narrow"]
    assert {(row["ranked_by"], row["metric"]) for row in rows} == {("gap", "euclidean")}
    by_ratio = registry(path, rank_by="ratio").rows()
    assert Path(by_ratio[0]["checkpoint"]).name == "even"
    screen([str(tmp_path / "wide")], registry=path)  # named alone it stays in its family
    assert {row["ranked_by"] for row in registry(path).rows()} == {"gap"}
    with closing(sqlite3.connect(path)) as stored, stored:
        stored.execute("UPDATE seen SET rank_by = 'luck', metric = x'ff'")
    assert {(row["ranked_by"], row["metric"]) for row in registry(path).rows()} == {
        ("ratio", "cosine")
    }


def test_the_command_takes_the_distance(tmp_path, capsys):
    file = family_of(tmp_path, "", **PLANTED)
    assert main(["--family", file, "--rank-by", "gap", "--metric", "euclidean"]) == 0
    assert ORDER in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UsageError, match=r"expected cosine or euclidean, got 'city'"):
        screen(family=file, metric="city")


# --- figure 9 -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rated(tmp_path_factory):
    """A planted family with accuracies."""
    found = screen(family=family_of(tmp_path_factory.mktemp("family"), **PLANTED))
    accuracies = dict(zip(PLANTED, (0.8, 0.5, 0.3), strict=True))
    members = []
    for c in found.checkpoints:
        target = replace(c.target, accuracy=accuracies[Path(c.repo).name])
        members.append(replace(c, target=target))
    return replace(found, checkpoints=tuple(members))


def test_the_parts_of_g_are_drawn_where_g_ranks_and_nowhere_else(rated, tmp_path):
    assert next(iter(rated.charts())) == "parts0"  # the picture of -o fig.svg
    chart = rated.charts()["parts0"]
    assert "D–NM: between(T, R)" in rated.to_html()
    bars, line = chart.specification()["layer"]
    drawn = {(row["checkpoint"], row["part"]): row["distance"] for row in bars["data"]["values"]}
    for c in rated.checkpoints:
        name = Path(c.repo).name
        assert drawn[name, "D–D"] == c.gaps["euclidean"].within_domain.mean
        assert drawn[name, "D–NM"] == c.gaps["euclidean"].between.mean
        assert drawn[name, "G"] == pytest.approx(drawn[name, "D–D"] + drawn[name, "D–NM"])
    assert [row["accuracy"] for row in line["data"]["values"]] == [0.8, 0.5, 0.3]
    unrated = [replace(c, target=replace(c.target, accuracy=None)) for c in rated.checkpoints]
    assert (
        len(replace(rated, checkpoints=tuple(unrated)).charts()["parts0"].specification()["layer"])
        == 1
    )
    assert "parts0" not in screen(demo=True).charts()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_draws_bars_and_a_line(rated, tmp_path, width, scheme):
    place = tmp_path / "page.html"
    place.write_text(rated.to_html(), encoding="utf-8")
    with Browser() as browser:
        browser.size(width, 800)
        browser.media(scheme)
        browser.open(place)
        shown = ".wide" if width > 800 else ".narrow"
        bars = f"document.querySelectorAll('{shown} [aria-roledescription=bar]').length"
        assert browser.value(bars) == 3 * len(PLANTED)
        said = (
            "[...document.querySelectorAll('[aria-roledescription=point]')].map(p => p.ariaLabel)"
        )
        assert sum("accuracy" in (label or "") for label in browser.value(said)) >= len(PLANTED)
        assert browser.value("document.documentElement.scrollWidth") == width
        assert browser.console == []
