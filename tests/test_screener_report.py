"""The reports of a screening: the page in a real browser, narrow terminals, markup in names."""

from __future__ import annotations

import numpy as np
import pytest
from browser import Browser
from lmeval_screener.gap import gap
from lmeval_screener.page import page_html
from lmeval_screener.ranking import ranked
from lmeval_screener.report import markdown_text
from lmeval_screener.result import Failed, Result, Screened, TensorInfo, TokenInfo
from lmeval_screener.table import table_text


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


@pytest.fixture(scope="module")
def result():
    members = [screened(f"org/m{i}", "7B", 1 + i, accuracy=20.0 * i, seed=i) for i in range(4)]
    members += [screened("org/run", "1B", 1 + i, revision=f"step{i * 1000}") for i in range(5)]
    members += [screened("org/</script><b>[bold]x", "3B", 2.0)]
    failed = (Failed("org/gated", None, "GatedRepo", "org/gated is gated; accept | log in"),)
    return Result(
        "math", "reference", "cosine", tuple(ranked(members, "cosine")), failed, 1.5, 9_000_000, 900
    )


def test_the_page_draws_sorts_and_asks_for_nothing(result, tmp_path):
    place = tmp_path / "page.html"
    place.write_text(page_html(result, across_scales=True), encoding="utf-8")
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


@pytest.mark.parametrize("columns", ["60", "80", "129", "200"])
def test_tables_fit_the_terminal(result, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    text = table_text(result, across_scales=True, colour=True)
    import re

    lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert any("1.0" in line or "±" in line for line in lines)


def test_markup_in_names_is_text_everywhere(result):
    assert "org/</script><b>[bold]x" in table_text(result, across_scales=False, colour=False)
    assert "</script><b>[bold]x" not in page_html(result, across_scales=False)
    assert "accept \\| log in" in markdown_text(result, across_scales=False)


def test_a_trajectory_is_named_by_its_revisions_in_step_order(result):
    text = table_text(result, across_scales=False, colour=False)
    names = [line.split()[1] for line in text.splitlines() if " step" in line and "±" in line]
    assert names == ["step0", "step1000", "step2000", "step3000", "step4000"]


def test_separation_names_ranks_inside_the_group(result):
    text = markdown_text(result, across_scales=False)
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ") and "org/m" in line]
    assert [row[1].strip() for row in rows] == ["1", "2", "3", "4"]
    assert [row[5].strip() for row in rows] == ["60.0", "40.0", "20.0", "0.0"]
