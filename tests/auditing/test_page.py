"""The audit as a document: its text on a terminal, and the charts of its page."""

import re

import pytest
from synthetic import subjects_store

from lmeval_dispersion.auditing.report import audit
from lmeval_dispersion.auditing.run import read_run
from lmeval_dispersion.report import render


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """57 subjects whose accuracies differ, and a text that tries to break out."""
    text = "</script><script>alert(1)</script><b>bold</b>"
    return read_run(
        subjects_store(
            tmp_path_factory.mktemp("s"), subjects=57, between=0.6, law=0.3, d=16, text=text
        )
    )


@pytest.fixture(scope="module")
def report(run):
    return audit(run, details=True)


def test_every_chart_is_drawn_and_described_and_no_text_breaks_out(report):
    page = report.to_html()
    charts = page.split('<div class="chart"')[1:]
    labels = [re.search('aria-label="([^"]*)"', chart)[1] for chart in charts]
    assert len(charts) == len(report.charts()) == 5
    assert min(chart.count("<path") for chart in charts) > 10
    assert charts[0].count("<path") >= 57
    assert all(len(label) > 40 for label in labels)
    assert "Spearman" in labels[0]
    assert "<b>bold" not in page


@pytest.mark.parametrize("width", [80, 120])
def test_the_default_answer_fits_one_look(report, width, run):
    short = audit(run, short=True)
    text = render(short.document(), "table", width=width)
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= width
    shown = [row["slice"] for row in report.tables()["slices-subject"].rows]
    for name in [*shown[:5], *shown[-5:]]:
        is_whole = name == "all documents"  # whose dispersion is not on the slices' axis
        assert any(line.startswith(f"{name} ") and ("●" in line) != is_whole for line in lines), (
            name
        )
    assert not any(line.startswith(f"{shown[20]} ") for line in lines)
    assert "11 of 58 rows" in text or "10 of 58 rows" in text
    assert (short.answer(), short.left_out) == (report.answer(), ["paper_protocol", "hard_tail"])
