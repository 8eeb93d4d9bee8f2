"""The audit as a document: its text, and its page in a real browser that asks nothing of the network."""

import pytest
from browser import Browser
from synthetic import subjects_store

from lmeval_dispersion.auditing.report import audit
from lmeval_dispersion.auditing.run import read_run
from lmeval_dispersion.report import render


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """57 subjects whose accuracies differ, and a text that tries to break out."""
    text = "</script><script>alert(1)</script><b>bold</b>"
    return read_run(
        subjects_store(tmp_path_factory.mktemp("s"), subjects=57, between=0.6, law=0.3, d=16, text=text)
    )


@pytest.fixture(scope="module")
def report(run):
    return audit(run, details=True)


@pytest.fixture(scope="module")
def page(report, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(render(report.document(), "html"))
    return file


def test_every_chart_is_drawn_and_described_and_nothing_is_asked_of_the_network(page):
    with Browser() as browser:
        browser.open(page)
        charts = "[...document.querySelectorAll('.chart')]"
        marks = browser.value(f"{charts}.map(c => c.querySelectorAll('.wide svg path').length)")
        labels = browser.value(f"{charts}.map(c => c.getAttribute('aria-label'))")
        asked = [url for url in browser.requests if not url.startswith((page.as_uri(), "data:"))]
        assert (asked, browser.console) == ([], [])
    assert len(marks) == 5
    assert min(marks) > 10
    assert marks[0] >= 57
    assert all(len(label) > 40 for label in labels)
    assert "Spearman" in labels[0]


@pytest.mark.parametrize("width", [80, 120])
def test_the_default_answer_fits_one_look(report, width, run):
    short = audit(run, short=True)
    text = render(short.document(), "table", width=width)
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= width
    shown = [row["slice"] for row in report.tables()["slices-subject"].rows]
    for name in [*shown[:5], *shown[-5:]]:
        assert any(line.startswith(f"{name} ") and "●" in line for line in lines), name
    assert not any(line.startswith(f"{shown[20]} ") for line in lines)
    assert "11 of 58 rows" in text or "10 of 58 rows" in text
    assert (short.answer(), short.left_out) == (report.answer(), ["paper_protocol", "hard_tail"])
