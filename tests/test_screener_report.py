"""The reports of a screening: the page in a real browser, narrow terminals, markup in names."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from browser import Browser
from lmeval_screener.gap import gap
from lmeval_screener.ranking import rank_gaps
from lmeval_screener.report import report
from lmeval_screener.result import Failed, Result, Screened, TensorInfo, TokenInfo

from lmeval_dispersion.report import Table, render


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
                not_separated_from=tuple(group[i].label for i in standing.not_separated_from),
                tied_with=standing.tied_with,
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
        # Parts for each of three groups, the trajectory's curve, accuracy against G.
        assert len(browser.value(states)) == 5
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
    gaps = [line for line in lines if line.startswith("org/m")]
    assert [line.split()[1:5:2] for line in gaps[:4]] == [[str(rank), "±"] for rank in (1, 2, 3, 4)]
    assert any("Commit" in line for line in lines) == (width > 80)


def test_markup_in_names_is_text_everywhere(result):
    name = "org/</script><b>[bold]x"
    assert name in render(report(result), "table")
    assert name not in render(report(result), "html")
    assert "accept \\| log in" in render(report(result), "markdown")


def test_a_trajectory_is_named_by_its_revisions_in_step_order(result):
    text = render(report(result), "table")
    names = [line.split()[0] for line in text.splitlines() if line.startswith("step")]
    assert names == ["step0", "step1000", "step2000", "step3000", "step4000"]


def test_ties_name_ranks_inside_the_group_and_only_where_there_are_some(result):
    text = render(report(result), "markdown")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| org/m")]
    assert [row[2].strip() for row in rows] == ["1", "2", "3", "4"]
    first = next(section for section in report(result).sections if section.heading.startswith("fam · 7B"))
    table = next(part for part in first.parts if isinstance(part, Table))
    tied = any(c.not_separated_from for c in result.groups[0].checkpoints)
    assert ("≈" in [column.heading for column in table.columns]) == tied
    assert [row["accuracy"] for row in table.rows] == [60.0, 40.0, 20.0, 0.0]


def test_csv_is_what_the_frame_writes(result):
    assert render(report(result), "csv") == result.to_frame().to_csv(index=False)
    nothing = replace(result, checkpoints=())
    assert render(report(nothing), "csv") == nothing.to_frame().to_csv(index=False)


def test_json_is_the_contract_with_the_agreement(result):
    content = json.loads(render(report(result), "json"))
    (line,) = [line for line in content.pop("agreement") if line["scope"] == "group"]
    assert (line["n"], line["spearman"]) == (4, 1.0)
    assert content == result.to_dict()


def test_the_command_ends_the_page_and_markdown(result):
    document = report(result, command="screen-checkpoints 'org/run@step*'")
    assert "screen-checkpoints 'org/run@step*'" in render(document, "markdown").splitlines()
    assert "screen-checkpoints &#39;org/run@step*&#39;" in render(document, "html")
