"""The reports of a screening: the page in a real browser, narrow terminals, markup in names."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser import Browser
from lmeval_screener import screen
from lmeval_screener.ranking.gap import difference, gap
from lmeval_screener.ranking.ties import rank_gaps, runs
from lmeval_screener.reports.document import report
from lmeval_screener.result import Failed, Result, Screened, TensorInfo, TokenInfo
from lmeval_screener.shortlist.choice import shortlist

from lmeval_dispersion.report import Chart, render


def screened(repo, scale, spread, *, revision=None, accuracy=None, seed=0):
    draw, noise = np.random.default_rng(3), np.random.default_rng(seed)
    domain, reference = draw.normal(size=(10, 32)), draw.normal(size=(60, 32))
    domain = domain + 1 / spread + 0.02 * noise.normal(size=domain.shape)
    return Screened(
        repo=repo,
        requested_revision=revision,
        revision="a" * 40,
        family="fam",
        scale=scale,
        gaps={metric: gap(domain, reference, metric) for metric in ("cosine", "euclidean")},
        tensor=TensorInfo("lm_head.weight", "model.safetensors", "BF16", (1000, 32), False),
        tokens=TokenInfo(10, 60, (" nonlocal",), (" lunch",), "single digits"),
        bytes_read=802_344,
        requests=105,
        seconds=0.31,
        notes=("config.json says <tied> & a head is stored",) if seed == 1 else (),
        accuracy=accuracy,
    )


def ranked(members):
    """The members of each scale, best first."""
    found = []
    for scale in dict.fromkeys(member.scale for member in members):
        group = [member for member in members if member.scale == scale]
        places = rank_gaps([member.gaps["cosine"] for member in group])
        best_first = sorted(zip(group, places, strict=True), key=lambda pair: pair[1][0])
        found += [
            replace(
                member,
                rank=standing.rank,
                ties=standing.ties,
                next=standing.next,
            )
            for member, standing in best_first
        ]
    return tuple(found)


@pytest.fixture(scope="module")
def result():
    members = [screened(f"org/m{i}", "7B", 1 + i, accuracy=20.0 * i, seed=i) for i in range(4)]
    members += [screened("org/run", "1B", 1 + i, revision=f"step{i * 1000}") for i in range(5)]
    members += [screened("org/</script><b>[bold]x", "3B", 2.0)]
    failed = (Failed("org/gated", None, "GatedRepo", "org/gated is gated; accept | log in"),)
    return Result("math", "reference", "cosine", ranked(members), failed, 1.5, 9_000_000, 900)


def test_the_page_draws_sorts_and_asks_for_nothing(result, tmp_path):
    place = tmp_path / "page.html"
    place.write_text(render(report(result), "html"), encoding="utf-8")
    with Browser() as browser:
        browser.open(place)
        states = "[...document.querySelectorAll('.chart')].map(c => c.dataset.state)"
        browser.wait(f"{states}.every(state => state === 'drawn')")
        # G and its parts for each of three groups, accuracy against G.
        assert len(browser.value(states)) == 7
        assert browser.value("document.querySelectorAll('.chart svg path').length") > 30
        names = "[...document.querySelector('table').tBodies[0].rows].map(r => r.cells[0].textContent.trim())"
        assert browser.value(names) == ["org/m3", "org/m2", "org/m1", "org/m0"]
        head = "[...document.querySelectorAll('table')][0].querySelectorAll('th button')[0]"
        browser.value(f"{head}.click()")
        assert browser.value(names) == ["org/m0", "org/m1", "org/m2", "org/m3"]
        assert "org/</script><b>[bold]x" in browser.value("document.body.textContent")
        assert browser.console == []
        assert [url for url in browser.requests if not url.startswith((place.as_uri(), "data:"))] == []


@pytest.mark.parametrize("width", [60, 80, 129, 200])
def test_tables_fit_the_terminal(result, width):
    text = render(report(result), "table", width=width, colour=True)
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    assert max(map(len, lines)) <= width
    gaps = [line.split() for line in lines if line.startswith("org/m")][:4]
    assert [row[1] for row in gaps] == ["1", "2", "3", "4"]
    assert all(re.fullmatch(r"\d\.\d{3,}", row[2]) for row in gaps)
    assert [row[4] for row in gaps[:3]] == ["±"] * 3


def test_markup_in_names_is_text_everywhere(result):
    name = "org/</script><b>[bold]x"
    assert name in render(report(result), "table")
    assert name not in render(report(result), "html")
    assert "accept \\| log in" in render(report(result), "markdown")


def test_a_trajectory_is_named_by_its_revisions_in_step_order(result):
    text = render(report(result), "table")
    names = [line.split()[0] for line in text.splitlines() if line.startswith("step")]
    assert names == ["step0", "step1000", "step2000", "step3000", "step4000"] * 2  # the ranking, the parts


def test_the_column_beside_g_is_the_paired_difference_to_the_next_rank(result):
    (first, *_) = report(result).tables().values()
    assert [column.key for column in first.columns][:4] == ["label", "rank", "G", "delta"]
    members = result.groups[0].checkpoints
    for row, a, b in zip(first.rows, members, members[1:], strict=False):
        found = difference(a.gaps["cosine"], b.gaps["cosine"])
        assert (row["delta"], row["delta_se"]) == (found.mean, found.se)
    assert first.rows[-1]["delta"] is None
    assert [row["accuracy"] for row in first.rows] == [60.0, 40.0, 20.0, 0.0]


def test_a_training_has_the_change_from_the_step_before(result):
    table = next(table for name, table in report(result).tables().items() if name == "ranking-fam-1B")
    assert table.columns[3].heading == "Δ from previous"
    assert table.rows[0]["delta"] is None
    for before, row in zip(table.rows, table.rows[1:], strict=False):
        assert row["delta"] == pytest.approx(row["G"] - before["G"])


def test_a_column_of_ties_and_its_legend_are_there_only_with_ties(result):
    text = render(report(result), "table")
    assert "Tied with" not in text
    twins = [screened(f"org/m{i}", "7B", 2.0, seed=0) for i in range(3)]
    text = render(report(Result("math", "reference", "cosine", ranked(twins), (), 1, 1, 1)), "table")
    assert text.startswith("No checkpoint stands apart: org/m0, org/m1 and org/m2 are tied; evaluate any.")
    assert "Tied with: ranks" in text


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # pandas 2.0 and 2.1 with numpy 1.24
def test_csv_is_what_the_frame_writes(result):
    assert render(report(result), "csv") == result.to_frame().to_csv(index=False)
    nothing = replace(result, checkpoints=())
    assert render(report(nothing), "csv") == nothing.to_frame().to_csv(index=False)


def test_json_is_the_contract_with_the_agreement(result):
    content = json.loads(render(report(result), "json"))
    (line,) = [line for line in content.pop("agreement") if line["scope"] == "group"]
    assert (line["n"], line["spearman"]) == (4, 1.0)
    assert content.pop("answer") == list(report(result).answer)
    assert content == result.to_dict()


def test_the_command_ends_the_page_and_markdown(result):
    document = report(result, command="screen-checkpoints 'org/run@step*'")
    assert "screen-checkpoints 'org/run@step*'" in render(document, "markdown").splitlines()
    assert "screen-checkpoints &#39;org/run@step*&#39;" in render(document, "html")


# --- terminals ------------------------------------------------------------------------------------------

CAPTURES = Path(__file__).parent / "data" / "terminal"


def captured(name):
    """The reports that are kept as captures: the demo, and a fixed result with everything in it."""
    if name == "demo":
        return report(replace(screen(demo=True), seconds=0.1))
    members = [screened(f"org/model-{i}", "7B", 1 + i // 2, accuracy=20.0 * i, seed=i) for i in range(5)]
    members += [
        screened("org/run", "1B", 1 + min(i, 3), revision=f"step{i * 1000}", seed=i) for i in range(6)
    ]
    failed = tuple(Failed(f"org/gone-{i}", None, "RepoNotFound", f"org/gone-{i} is gone") for i in range(3))
    return report(Result("math", "reference", "cosine", ranked(members), failed, 1.5, 9_000_000, 900))


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", ["demo", "fixed"])
def test_terminal_captures_are_what_is_printed_today(name, width):
    text = render(captured(name), "table", width=width)
    place = CAPTURES / f"screen-{name}-{width}.txt"
    if os.environ.get("WRITE_CAPTURES"):
        place.parent.mkdir(exist_ok=True)
        place.write_text(text, encoding="utf-8")
    assert text == place.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= width


def test_colour_is_all_that_a_terminal_without_colour_lacks(result):
    coloured = render(report(result), "table", width=80, colour=True)
    lines = re.sub(r"\x1b\[[\d;]*m", "", coloured).splitlines()
    plain = render(report(result), "table", width=80).splitlines()
    assert [line.rstrip() for line in lines] == plain


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_every_character_fits_an_old_pipe(result, encoding):
    render(report(result), "table", width=80, encoding=encoding).encode(encoding)


def test_a_long_group_is_shortened_to_its_top_the_ties_at_the_cut_and_its_bottom():
    one = screened("org/m", "7B", 1.0)
    members = [
        replace(
            one,
            repo=f"org/m{i}",
            rank=i + 1,
            ties=runs(j for j in range(14, 20) if j != i + 1) if 13 <= i < 19 else (),
            notes=("the same note",),
        )
        for i in range(1500)
    ]
    failed = tuple(Failed(f"org/f{i}", None, "Unreachable", "not tried") for i in range(36))
    document = report(Result("math", "reference", "cosine", tuple(members), failed, 1, 1, 1))
    text = render(document, "table", width=80)
    assert len(text.splitlines()) < 100
    rows = [line.split()[0] for line in text.splitlines() if line.startswith("org/m")]
    assert rows == [*(f"org/m{i}" for i in [*range(19), 1497, 1498, 1499])] * 2
    assert "22 of 1500 rows; all of them: --format csv, or -o page.html." in text
    assert "14–18" in text
    assert text.count("the same note") == text.count("not tried") == 1
    assert "36 checkpoints: org/f0, org/f1, org/f2, …" in text
    assert len(render(document, "csv").splitlines()) == 1501


def test_forty_rows_are_shown_whole():
    one = screened("org/m", "7B", 1.0)
    members = [replace(one, repo=f"org/m{i}", rank=i + 1) for i in range(40)]
    text = render(report(Result("math", "reference", "cosine", tuple(members), (), 1, 1, 1)), "table")
    assert "rows; all of them" not in text
    assert "org/m25" in text


# --- what belongs to what -------------------------------------------------------------------------------


def test_the_error_on_seeds_is_said_of_rankings_and_not_of_a_training(result):
    text = " ".join(render(report(result), "markdown").split())
    assert text.count("not the training seed") == 1  # the 7B; the 3B has one member, the 1B is a training
    only = replace(result, checkpoints=tuple(c for c in result.checkpoints if c.scale == "1B"))
    assert "not the training seed" not in render(report(only), "markdown")


def test_a_short_list_shows_what_is_chosen_and_answers_of_all(result):
    whole, cut = report(result), report(result, chosen=shortlist(result, 2))
    assert cut.answer == [*whole.answer, "Short list: 5 of 10 in 3 groups."]
    content = json.loads(render(cut, "json"))
    assert [(c["scale"], c["rank"], c["chosen"]) for c in content["checkpoints"]] == [
        *(("7B", 1, "rank"), ("7B", 2, "rank")), *(("1B", 1, "rank"), ("1B", 2, "rank")), ("3B", 1, "rank"),
    ]  # fmt: skip
    assert {c["inclusion_probability"] for c in content["checkpoints"]} == {1.0}
    assert "2 of 4: the 2 best, the 2nd separated from all behind it." in render(cut, "markdown")
    (first, *_) = cut.tables().values()
    assert [row["delta"] for row in first.rows] == [
        row["delta"] for row in next(iter(whole.tables().values())).rows[:2]
    ]
    assert len(render(cut, "csv").splitlines()) == 6


def test_two_models_in_a_chart_carry_their_shortest_distinct_names():
    members = [screened(name, "7B", 1 + i, seed=i) for i, name in enumerate(["org/a", "org/b", "ours/b"])]
    document = report(Result("math", "reference", "cosine", ranked(members), (), 1, 1, 1))
    charts = [part for section in document.sections for part in section.parts if isinstance(part, Chart)]
    specs = " ".join(json.dumps(chart.draw().to_dict()) for chart in charts)
    names = set(re.findall(r'"checkpoint": "([^"]+)"', specs))
    assert names == {"org/a", "org/b", "ours/b"}


def accuracy_chart(members):
    document = report(Result("math", "reference", "cosine", ranked(members), (), 1, 1, 1))
    section = next(section for section in document.sections if section.name == "agreement")
    return next(part for part in section.parts if isinstance(part, Chart)).draw().to_dict()


def named(chart):
    """The names that a page shows, and those that a phone shows."""
    found = {"width >= 460": set(), "width < 460": set()}
    for layer in chart["layer"]:
        if layer["mark"]["type"] == "text":
            condition = layer["mark"]["opacity"]["expr"].partition(" ?")[0]
            found[condition] |= {value["name"] for value in layer["data"]["values"]}
    return list(found.values())


def test_up_to_fifteen_points_are_named_and_of_more_the_outliers():
    members = [screened(f"org/m{i}", "7B", 1 + i / 9, accuracy=float(i), seed=i) for i in range(15)]
    assert named(accuracy_chart(members))[0] == {f"m{i}" for i in range(15)}
    members = [screened(f"org/m{i}", "7B", 1 + i / 4, accuracy=float(i), seed=0) for i in range(40)]
    members[39] = replace(members[39], accuracy=-1.0)
    shown = named(accuracy_chart(members))[0]
    assert "m39" in shown
    assert len(shown) == 15


def test_controls_have_another_mark_only_where_data_says_so():
    members = [screened(f"org/m{i}", "7B", 1 + i, accuracy=float(i), seed=i) for i in range(3)]
    assert "control" not in json.dumps(accuracy_chart(members))
    members[0] = replace(members[0], negative_control=True)
    assert '"control"' in json.dumps(accuracy_chart(members))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_the_first_screen_has_the_answer_and_the_picture(result, tmp_path, size, scheme):
    place = tmp_path / "page.html"
    only = replace(result, checkpoints=tuple(c for c in result.checkpoints if c.scale == "7B"))
    place.write_text(render(report(only), "html"), encoding="utf-8")
    with Browser() as browser:
        browser.size(*size)
        browser.media(scheme)
        browser.open(place)
        assert browser.value("document.querySelector('.lead p').textContent").startswith("Best: ")
        assert browser.value("document.querySelector('.chart svg').getBoundingClientRect().bottom") <= size[1]
        assert browser.value("document.documentElement.scrollWidth") == size[0]
        wide = (
            "Math.max(...[...document.querySelectorAll('table')].map(t => t.getBoundingClientRect().width))"
        )
        assert browser.value(wide) <= 1000
        assert browser.console == []
