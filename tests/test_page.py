"""The self-contained page: its bytes, and what a real browser makes of it."""

import base64
import hashlib
import html.parser
import re

import altair as alt
import numpy as np
import pandas as pd
import pytest
from browser import Browser

from lmeval_dispersion.report.page import Column, Page

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028&\"'"


def rows() -> list[dict[str, object]]:
    return [
        {"repo": "a/ten", "gap": 10.0, "se": 0.5, "scale": "7B"},
        {"repo": "a/none", "gap": float("nan"), "se": None, "scale": "14B"},
        {"repo": "a/nine", "gap": 9.25, "se": None, "scale": "0.5B"},
        {"repo": "a/minus", "gap": -1.5, "se": 0.25, "scale": "1.5B"},
    ]


COLUMNS = [
    Column("repo", "Checkpoint"),
    Column("gap", "Gap", ".2f", error="se", hint="larger is `better`"),
    Column("scale", "Scale"),
]


def lines(points: int = 12) -> alt.Chart:
    data = pd.DataFrame({"step": np.arange(points), "gap": np.sqrt(np.arange(points)), "run": "a"})
    return (
        alt.Chart(data)
        .mark_line(point=True)
        .encode(x="step:Q", y="gap:Q", color="run:N", tooltip=["step", "gap"])
        .interactive()
    )


def sample() -> Page:
    page = Page("Sample & more", lead="First.\n\nSecond with `code`.")
    page.facts({"Read": "4.8 MB", "Requests": 31})
    page.section("Table").table(rows(), COLUMNS, caption="Checkpoints")
    page.section("Charts").note("Do not compare scales.", "warning")
    page.chart(lines(), caption="A line", description="It rises.")
    bars = alt.Chart(pd.DataFrame({"x": [1, 2], "y": ["a", "b"]})).mark_bar().encode(x="x:Q", y="y:N")
    rule = alt.Chart(pd.DataFrame({"x": [1.5]})).mark_rule().encode(x="x:Q")
    page.chart(bars + rule, caption="Layers", description="Two bars.")
    page.chart(alt.hconcat(bars, bars), caption="Side by side", description="Twice two bars.")
    page.section("Hostile", HOSTILE).table([{HOSTILE: HOSTILE, "b": 1}], caption=HOSTILE)
    page.chart(
        alt.Chart(pd.DataFrame({"x": [HOSTILE], "y": [1]})).mark_bar().encode(x="x:N", y="y:Q", tooltip="x"),
        caption=HOSTILE,
        description=HOSTILE,
    )
    holes = alt.Data(
        values=[{"x": 1.0, "y": float("nan")}, {"x": 2.0, "y": float("inf")}, {"x": 3.0, "y": 1.0}]
    )
    page.chart(alt.Chart(holes).mark_point().encode(x="x:Q", y="y:Q"), caption="Holes", description="Holes.")
    page.section("Code").code("screen-checkpoints --family qwen2.5 > out.json")
    return page


@pytest.fixture(scope="module")
def built() -> str:
    return sample().html()


@pytest.fixture(scope="module")
def browser(built, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(built, encoding="utf-8")
    with Browser() as tab:
        tab.size(1100, 900)
        tab.open(path)
        tab.wait("document.documentElement.dataset.charts === 'ready'")
        yield tab


# --- bytes ----------------------------------------------------------------------------------------------


def test_equal_input_gives_equal_bytes(built):
    # The charts are made anew, so Altair's own counters have moved on.
    assert sample().html() == built


class Elements(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._in_script = tag == "script" and dict(attrs).get("type") is None

    def handle_data(self, data):
        if self._in_script:
            self.scripts.append(data)
        self._in_script = False


def test_nothing_is_referred_to_outside(built):
    for tag, attributes in Elements(built).found:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form")
        for name in ("src", "href", "action", "data", "poster"):
            target = attributes.get(name) or ""
            assert target == "" or target.startswith("#") or target == "data:,"
        assert not [name for name in attributes if name.startswith("on")]


def test_policy_allows_exactly_the_scripts_that_are_there(built):
    elements = Elements(built)
    (policy,) = [
        one["content"]
        for tag, one in elements.found
        if tag == "meta" and "Policy" in str(one.get("http-equiv"))
    ]
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    there = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in elements.scripts}
    assert allowed == there
    assert len(there) == 2
    assert "unsafe-eval" not in policy
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy


def test_page_without_charts_carries_no_vega():
    page = Page("Small").section("Table").table(rows(), COLUMNS, caption="x")
    assert len(page.html()) < 20_000
    assert len(Elements(page.html()).scripts) == 1


def test_one_copy_of_vega_however_many_charts():
    one, many = Page("One"), Page("Many")
    one.chart(lines(), caption="c", description="d")
    for _ in range(20):
        many.chart(lines(), caption="c", description="d")
    assert len(many.html()) < len(one.html()) + 20 * 6_000
    assert 800_000 < len(one.html()) < 1_000_000


def test_cells():
    frame = pd.DataFrame(
        {
            "name": ["x"], "small": [0.000123456], "count": [1234], "flag": [True], "list": [["a/b", "c"]],
            "none": [None], "missing": pd.array([pd.NA], dtype="Int64"), "nan": [float("nan")],
            "np": [np.float32(0.5)],
        }
    )  # fmt: skip
    text = Page("t").table(frame, caption="c").html()
    cells = [re.sub("<[^>]+>", "", cell) for cell in re.findall(r"<t[hd] .*?</t[hd]>|<td>.*?</td>", text)]
    assert cells[-9:] == ["x", "0.0001235", "1234", "yes", "a/b, c", "", "", "undefined", "0.5"]


def test_empty_table_and_one_row_are_not_sortable():
    empty = Page("t").table([], [Column("a", "A")], caption="c").html()
    assert '<td colspan="1">none</td>' in empty
    assert "<button" not in empty + Page("t").table([{"a": 1}], caption="c").html()


def test_a_chart_with_remote_data_is_refused():
    chart = alt.Chart("https://example.org/data.json").mark_point().encode(x="a:Q")
    with pytest.raises(ValueError, match="data inside"):
        Page("t").chart(chart, caption="c", description="d")


def test_data_that_look_like_automatic_names_are_kept():
    data = pd.DataFrame({"run": ["view_77", "param_78"], "url": "x", "gap": [1.0, 2.0]})
    chart = alt.Chart(data).mark_bar().encode(x="gap", y="run", tooltip="url")
    text = Page("t").chart(chart, caption="c", description="d").html()
    assert "view_77" in text
    assert "param_78" in text


def test_more_than_five_thousand_points():
    assert "chart-1" in Page("t").chart(lines(6000), caption="c", description="d").html()


# --- in a browser ---------------------------------------------------------------------------------------


def test_charts_are_drawn_without_a_word_or_a_request(browser):
    assert (
        browser.value("[...document.querySelectorAll('.chart')].map(c => c.dataset.state)") == ["drawn"] * 5
    )
    assert browser.value("document.querySelectorAll('.chart svg .mark-line path').length") >= 1
    assert browser.console == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in browser.requests if url.startswith("file:")]) == 1


def test_nothing_hostile_becomes_an_element(browser):
    assert browser.value("document.querySelectorAll('main img, main script, figure script').length") == 0
    assert browser.value("document.querySelector('#section-3 + p').textContent").startswith(
        "</script><script>"
    )


def column(browser, index: int) -> list[str]:
    cells = (
        f"[...document.querySelectorAll('table')[0].tBodies[0].rows].map(r => r.cells[{index}].textContent)"
    )
    return browser.value(cells)


def test_heads_sort_by_keyboard_and_say_so(browser):
    assert column(browser, 0) == ["a/ten", "a/none", "a/nine", "a/minus"]
    head = "document.querySelectorAll('th > button')[1]"
    browser.value(f"{head}.focus()")
    browser.press("Enter", 13, "\r")
    assert column(browser, 1) == ["−1.50 ± 0.25", "9.25", "10.00 ± 0.50", "undefined"]
    assert browser.value(f"{head}.parentElement.getAttribute('aria-sort')") == "ascending"
    browser.press(" ", 32, " ")
    assert column(browser, 1) == ["10.00 ± 0.50", "9.25", "−1.50 ± 0.25", "undefined"]
    assert browser.value("document.getElementById('status').textContent") == "Sorted by Gap, descending"
    browser.value("document.querySelectorAll('th > button')[2].click()")
    assert column(browser, 2) == ["0.5B", "1.5B", "7B", "14B"]
    sorted_heads = "[...document.querySelectorAll('table')[0].querySelectorAll('th[aria-sort]')]"
    assert browser.value(f"{sorted_heads}.map(h => h.ariaSort)") == ["none", "none", "ascending"]


def test_accessible_names(browser):
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    named = {(node["role"]["value"], node.get("name", {}).get("value")) for node in tree if "role" in node}
    assert ("table", "Checkpoints") in named
    assert ("rowheader", "a/ten") in named
    assert ("image", "It rises.") in named
    assert ("columnheader", "Gap") in named
    assert ("complementary", "Warning") in named
    assert ("heading", "Sample & more") in named


def test_colours_follow_the_scheme_also_in_charts(browser):
    line = "getComputedStyle(document.querySelector('.mark-line path')).stroke"
    seen = {}
    for scheme in ("light", "dark"):
        browser.media(scheme)
        seen[scheme] = (browser.value("getComputedStyle(document.body).backgroundColor"), browser.value(line))
    browser.media("dark", "print")
    seen["print"] = (browser.value("getComputedStyle(document.body).backgroundColor"), browser.value(line))
    browser.media("light")
    assert seen["light"] == seen["print"] == ("rgb(255, 255, 255)", "rgb(43, 108, 176)")
    assert seen["dark"] == ("rgb(20, 23, 27)", "rgb(106, 169, 236)")


def test_phone_width_scrolls_tables_not_the_page(browser):
    browser.size(360, 740)
    browser.wait("document.querySelector('#chart-1 svg').getBoundingClientRect().width < 360")
    assert browser.value("document.documentElement.scrollWidth") == 360
    browser.size(1100, 900)
    browser.wait("document.querySelector('#chart-1 svg').getBoundingClientRect().width > 800")


def test_fifty_seven_slices(browser, tmp_path):
    page = Page("Slices")
    for number in range(57):
        page.section(f"Slice {number}").chart(lines(), caption=f"Slice {number}", description="It rises.")
    path = tmp_path / "slices.html"
    path.write_text(page.html(), encoding="utf-8")
    browser.open(path)
    browser.wait("document.documentElement.dataset.charts === 'ready'")
    assert browser.value("document.querySelectorAll('.chart[data-state=drawn] svg').length") == 57
    assert browser.value("document.querySelectorAll('nav a').length") == 57
    assert browser.console == []


def test_a_long_legend_is_wrapped(browser, tmp_path):
    names = [f"organisation/model-number-{number}" for number in range(8)]
    data = pd.DataFrame({"x": range(8), "y": range(8), "run": names})
    chart = alt.Chart(data).mark_point().encode(x="x", y="y", color="run")
    path = tmp_path / "legend.html"
    path.write_text(Page("t").chart(chart, caption="c", description="d").html(), encoding="utf-8")
    right = "document.querySelector('{}').getBoundingClientRect().right"
    for width, rows_of_entries in ((360, 8), (1100, 2)):
        browser.size(width, 900)
        browser.open(path)
        browser.wait("document.documentElement.dataset.charts === 'ready'")
        assert browser.value(right.format(".role-legend")) <= browser.value(right.format(".chart"))
        tops = "new Set([...document.querySelectorAll('.role-legend-label text')]"
        tops += ".map(t => Math.round(t.getBoundingClientRect().top))).size"
        assert browser.value(tops) >= rows_of_entries
