"""The audit as a document: its text, and its page in a real browser that asks nothing of the network."""

import numpy as np
import pytest
from browser import Browser
from synthetic import documents, planted_store, vectors

from lmeval_dispersion.audit.reports.document import audit_document
from lmeval_dispersion.audit.reports.report import audit_report
from lmeval_dispersion.audit.run import read_run
from lmeval_dispersion.report import render
from lmeval_dispersion.store import write_store


def report_html(report):
    return render(audit_document(report), "html")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
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
    return audit_report(read_run(folder))


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
    states = browser.value("[...document.querySelectorAll('.chart')].map(c => c.dataset.state)")
    assert states == ["drawn"] * 7
    marks = browser.value(
        "[...document.querySelectorAll('.chart')].map(c => c.querySelectorAll('svg path').length)"
    )
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
    rows = report["slices"]["subject"]["rows"]
    by_dispersion = [r["slice"] for r in sorted(rows, key=lambda r: r["dispersion"])]
    assert browser.value(names) == [*by_dispersion, "all documents"]
    browser.value(f"{table}.querySelectorAll('th > button')[3].focus()")
    browser.press("Enter", 13, "\r")
    accuracies = {row["slice"]: row["accuracy"] for row in [*rows, report["overall"]]}
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


def test_hovering_a_slice_names_it(browser):
    """The tooltip of a point says which subject it is."""
    place = browser.value(
        """(() => { const p = [...document.querySelectorAll('.chart')][0]
             .querySelector('.mark-symbol path'); p.scrollIntoView({block: 'center'});
             const b = p.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"""
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    browser.wait("document.querySelector('#vg-tooltip-element')?.textContent.includes('subject_')")


def test_a_report_with_gaps_still_makes_a_page(tmp_path):
    run = read_run(planted_store(tmp_path / "s", n=3, correct=np.nan, query_perplexity=np.nan))
    text = report_html(audit_report(run))
    assert text.count("Not available") == 4
    assert "none of these has a label" in text


def test_equal_reports_give_equal_bytes(report):
    assert report_html(report) == report_html(report)


def test_a_terminal_shows_the_least_dispersed_slices_and_says_how_many_more(report):
    short, whole = (
        audit_document(report, most_slices=most).tables()["slices-subject"] for most in (20, None)
    )
    assert [row["slice"] for row in short.rows] == [
        *[row["slice"] for row in whole.rows[:20]],
        "all documents",
    ]
    assert len(whole.rows) == 58
    assert short.more.startswith("37 more")
    assert whole.more == ""


def test_every_number_of_a_slice_is_in_the_text(report):
    text = render(audit_document(report), "table")
    assert text.splitlines()[0].startswith("The 5700 documents have a dispersion of")
    row = report["slices"]["subject"]["rows"][3]
    line = next(line for line in text.splitlines() if line.startswith(row["slice"]))
    for number in (
        f"{row['dispersion']:.4f} ± {row['dispersion_se']:.4f}",
        f"{row['accuracy']:.1%}",
        f"{row['query_perplexity']:.2f}",
        f"{row['confidence']:.3f}",
    ):
        assert number in line


def test_the_csv_holds_every_slice_of_every_slicing(report):
    lines = render(audit_document(report, most_slices=20), "csv").splitlines()
    assert len(lines) == 2 + sum(len(table["rows"]) for table in report["slices"].values())
