"""The audit as a document: its text, and its page in a real browser that asks nothing of the network."""

from functools import partial

import numpy as np
import pytest
from browser import Browser
from synthetic import documents, planted_store, vectors

from lmeval_dispersion.auditing.report import audit
from lmeval_dispersion.auditing.run import read_run
from lmeval_dispersion.report import render
from lmeval_dispersion.store import write_store

audit_report = partial(audit, details=True)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """57 subjects whose accuracies differ, and a text that tries to break out."""
    rng = np.random.default_rng(0)
    n = 5700
    subject = rng.integers(57, size=n)
    right = rng.random(n) < 0.25 + 0.6 * subject / 57
    texts = ["</script><script>alert(1)</script><b>bold</b>"] * n
    frame = documents(right, rng=rng, confidence=1.0).assign(
        subject=[f"subject_{i:02}" for i in subject], text=texts
    )
    folder = tmp_path_factory.mktemp("s")
    x = vectors(np.where(right, 1.3, 1.0), rng=rng, d=16)
    write_store(folder, documents=frame, vectors={"last": x}, manifest={"model": "org/model"})
    return folder


@pytest.fixture(scope="module")
def report(store):
    return audit_report(read_run(store))


@pytest.fixture(scope="module")
def page(report, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(render(report.document(), "html"))
    return file


@pytest.fixture(scope="module")
def browser(page):
    with Browser() as opened:
        opened.open(page)
        yield opened


def test_every_chart_is_drawn_and_described(browser):
    drawn = "[...document.querySelectorAll('.chart')].map(c => c.querySelectorAll('.wide svg path').length)"
    marks = browser.value(drawn)
    assert len(marks) == 4
    assert min(marks) > 10
    assert marks[0] >= 57
    labels = browser.value("[...document.querySelectorAll('.chart')].map(c => c.getAttribute('aria-label'))")
    assert all(len(label) > 40 for label in labels)
    assert "Spearman" in labels[0]


def test_nothing_is_asked_of_the_network_and_nothing_complains(browser, page):
    assert [url for url in browser.requests if not url.startswith((page.as_uri(), "data:"))] == []
    assert browser.console == []


def test_a_report_with_gaps_still_makes_a_page(tmp_path):
    run = read_run(planted_store(tmp_path / "s", n=3, correct=np.nan, query_perplexity=np.nan))
    text = render(audit_report(run).document(), "html")
    assert text.count("Not available") == 4
    assert "none of these has a label" in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_default_answer_fits_one_look(report, width, store):
    short = audit(read_run(store), short=True)
    text = render(short.document(), "table", width=width)
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= width
    shown = [row["slice"] for row in report.tables()["slices-subject"].rows]
    for name in [*shown[:5], *shown[-5:]]:
        assert any(line.startswith(f"{name} ") and "●" in line for line in lines), name
    assert not any(line.startswith(f"{shown[20]} ") for line in lines)
    assert "11 of 58 rows" in text or "10 of 58 rows" in text
    assert short.answer() == report.answer()
