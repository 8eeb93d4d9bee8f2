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


def report_html(report):
    return render(report.document(), "html")


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
    file.write_text(report_html(report))
    return file


@pytest.fixture(scope="module")
def browser(page):
    with Browser() as opened:
        opened.open(page)
        yield opened


def test_every_chart_is_drawn_and_described(browser):
    drawn = "[...document.querySelectorAll('.chart')].map(c => c.querySelectorAll('.wide svg path').length)"
    marks = browser.value(drawn)
    assert len(marks) == 7
    assert min(marks) > 10
    assert marks[0] >= 57
    labels = browser.value("[...document.querySelectorAll('.chart')].map(c => c.getAttribute('aria-label'))")
    assert all(len(label) > 40 for label in labels)
    assert "Spearman" in labels[0]


def test_nothing_is_asked_of_the_network_and_nothing_complains(browser, page):
    assert [url for url in browser.requests if not url.startswith((page.as_uri(), "data:"))] == []
    assert browser.console == []


def test_the_table_of_slices_sorts_by_keyboard(browser, report):
    table = "document.querySelector('table')"
    names = f"[...{table}.tBodies[0].rows].map(r => r.cells[0].textContent)"
    rows = report.slices["subject"].rows
    by_dispersion = [r.slice for r in sorted(rows, key=lambda r: r.dispersion)]
    assert browser.value(names) == [*by_dispersion, "all documents"]
    browser.value(f"{table}.querySelectorAll('th > button')[3].focus()")
    browser.press("Enter", 13, "\r")
    accuracies = {row.slice: row.accuracy for row in [*rows, report.overall]}
    shown = [accuracies[name] for name in browser.value(names)]
    assert shown == sorted(shown)
    browser.press("Enter", 13, "\r")
    shown = [accuracies[name] for name in browser.value(names)]
    assert shown == sorted(shown, reverse=True)
    assert browser.value(f"{table}.querySelectorAll('th')[3].getAttribute('aria-sort')") == "descending"


def test_the_page_fits_a_phone_without_scrolling_sideways(browser):
    browser.size(390, 800)
    assert browser.value("document.documentElement.scrollWidth") <= 390
    browser.size(1200, 900)


def test_dark_mode_changes_the_paper_and_keeps_the_ink_readable(browser):
    def contrast():
        return browser.value(
            """(() => { const rgb = (c) => c.match(/[0-9.]+/g).slice(0, 3).map(v => { v /= 255;
              return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
              const light = (c) => { const [r, g, b] = rgb(c); return 0.2126*r + 0.7152*g + 0.0722*b; };
              const style = getComputedStyle(document.body);
              return [light(style.backgroundColor), light(style.color)]; })()"""
        )

    for scheme in ("light", "dark"):
        browser.media(scheme)
        paper, ink = contrast()
        assert (paper > ink) == (scheme == "light")
        assert (max(paper, ink) + 0.05) / (min(paper, ink) + 0.05) > 7
    browser.media("light")


def test_texts_of_documents_are_shown_and_not_run(browser):
    assert browser.value("document.body.textContent.includes('</script><script>alert(1)')")
    assert browser.value("document.querySelectorAll('td b').length") == 0


def test_a_report_with_gaps_still_makes_a_page(tmp_path):
    run = read_run(planted_store(tmp_path / "s", n=3, correct=np.nan, query_perplexity=np.nan))
    text = report_html(audit_report(run))
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


def test_every_number_of_a_slice_is_in_the_text(report):
    text = render(report.document(), "table", width=160, details=True)
    assert text.splitlines()[0].startswith("The 5700 documents have a dispersion of")
    row = report.slices["subject"].rows[3]
    line = next(line for line in text.splitlines() if line.startswith(row.slice))
    for number in (
        f"{row.dispersion:.4f} ± {row.dispersion_se:.4f}",
        f"{row.accuracy:.1%}",
        f"{row.query_perplexity:.2f}",
        f"{row.confidence:.3f}",
    ):
        assert number in line


def test_the_csv_holds_every_slice_of_every_slicing(report):
    lines = render(report.document(), "csv").splitlines()
    assert len(lines) == 2 + sum(len(table.rows) for table in report.slices.values())
