"""The self-contained page: its bytes, and what a real browser makes of it."""

import base64
import hashlib
import re

import pytest
from browser import Browser

from lmeval_dispersion.report import (
    Chart,
    Column,
    Document,
    Facts,
    Note,
    Section,
    Table,
    Text,
    render,
)
from lmeval_dispersion.report.charts import WIDTHS, chart_spec, chart_svg
from lmeval_dispersion.report.forms import file_bytes
from lmeval_dispersion.report.html_page import html_fragment

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}\u2028&\"'"
ROWS = [
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


def chart(values, mark, **encoding):
    """A specification; ``x="gap:Q"`` is the field gap, a quantity."""
    kinds = {"Q": "quantitative", "N": "nominal"}
    channels = {
        channel: {"field": field[:-2], "type": kinds[field[-1]]}
        for channel, field in encoding.items()
    }
    return {"data": {"values": values}, "mark": mark, "encoding": channels}


STEPS = [{"step": step, "gap": step**0.5, "run": "a"} for step in range(12)]
LINE = chart(STEPS, {"type": "line", "point": True}, x="step:Q", y="gap:Q", color="run:N")
BARS = chart([{"x": 1, "y": "a"}, {"x": 2, "y": "b"}], "bar", x="x:Q", y="y:N")


def page(*parts):
    return render(Document("t", sections=[Section("", parts)]), "html")


def sample():
    charts = [
        Note("Do not compare scales.", "warning"),
        Chart(LINE, "A line", "It rises.", meaning="More steps, more `gap`."),
        Chart({"layer": [BARS, chart([{"x": 1.5}], "rule", x="x:Q")]}, "Layers", "Two bars."),
        Chart({"hconcat": [BARS, BARS]}, "Side by side", "Twice two bars."),
    ]
    evil = chart([{"x": HOSTILE, "y": 1}], "bar", x="x:N", y="y:Q", tooltip="x:N")
    points = [{"x": 1.0, "y": float("nan")}, {"x": 2.0, "y": float("inf")}, {"x": 3.0, "y": 1.0}]
    hostile = [
        Text(HOSTILE),
        Table([{HOSTILE: HOSTILE, "b": 1}], [Column(HOSTILE, HOSTILE), Column("b", "b")], HOSTILE),
        Chart(evil, HOSTILE, HOSTILE),
        Chart(chart(points, "point", x="x:Q", y="y:Q"), "Holes", "Holes."),
        Facts({HOSTILE: HOSTILE}),
        Note(HOSTILE),
    ]
    document = Document(
        "Sample & more",
        answer=["First.", "Second with `code`."],
        sections=[
            Section("", [Facts({"Read": "4.8 MB", "Requests": 31})]),
            Section("Table", [Table(ROWS, COLUMNS, "Checkpoints", more="Two more.")]),
            Section("Charts", charts),
            Section(HOSTILE, hostile, name="hostile"),
            Section("Cost", [Text("31 requests.")], details=True),
        ],
        limits=["No accuracy follows."],
        command=HOSTILE,
        guide="docs/reference/reports.md",
    )
    return render(document, "html")


@pytest.fixture(scope="module")
def built():
    return sample()


@pytest.fixture(scope="module")
def browser(built, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(built, encoding="utf-8")
    with Browser() as tab:
        tab.size(1100, 900)
        tab.open(path)
        yield tab


# --- bytes ----------------------------------------------------------------------------------------------


def test_equal_input_gives_equal_bytes(built):
    assert sample() == built


def test_a_chart_is_two_small_pictures():
    without, single = page(Table(ROWS, COLUMNS, "x")), page(Chart(LINE, "c", "d"))
    assert len(without) < 24_000
    assert single.count("<svg ") == 2
    assert len(single) < 60_000


def test_tables_sort_where_there_are_rows_and_tell_a_hint_once():
    empty, single = (
        page(Table([], [Column("a", "A")], "c")),
        page(Table([{"a": 1}], [Column("a", "A")], "c")),
    )
    assert '<td colspan="1">none</td>' in empty
    several = page(Table(ROWS, COLUMNS, "first"), Table(ROWS, COLUMNS, "second"))
    button = '<button type="button">'
    assert [button in text for text in (empty, single, several)] == [False, False, True]
    assert several.count("larger is <code>better</code>") == 1
    row = {"name": "run-5", "gap": -1.5, "se": 0.1, "day": "2024-05-06"}
    text = page(Table([row], [Column(k, k, error="se" if k == "gap" else "") for k in row], "c"))
    assert all(value in text for value in ("−1.5 ± 0.1", "run-5", "2024-05-06"))


def test_values_are_dots_on_the_axis_of_their_column_and_rows_are_marked():
    rows = [
        {"name": "best", "gain": 3.0, "low": 2.0, "high": 4.0},
        {"name": "worst", "gain": -1.0, "low": -1.0, "high": None},
        {"name": "none", "gain": None, "low": None, "high": None},
        {"name": "all", "gain": 90.0, "low": 80.0, "high": 99.0, "aside": True},
    ]
    columns = [
        Column("name", "Name"),
        Column("gain", "Gain", "+.1f", dots="both", reach="low high"),
    ]
    table = Table(rows, columns, "c", marks={0: "pick", 3: "control"})
    text = page(table)
    assert re.findall(r'<tr(?: class="(\w+)")?>', text) == ["", "pick", "", "", "control"]
    assert 'data-low="-1.0" data-high="+4.0"' in text
    drawn = re.findall(r"<svg class=.dots.[^>]*>(.*?)</svg>", text)
    numbers = [[float(value) for value in re.findall(r'"([\d.]+)%"', cell)] for cell in drawn]
    # Zero, the whisker and the dot, in per cent of 4 to 96; 90 is beyond the axis and has none.
    zero = 4 + 92 / 5
    assert numbers[0] == pytest.approx(
        [zero, zero, 100, 4 + 3 * 18.4, 96, 50, 50, 4 + 4 * 18.4, 50], abs=0.1
    )
    assert numbers[1][-2:] == [4, 50]
    assert numbers[2:] == [[], []]
    assert "<svg" not in html_fragment(Document("t", sections=[Section("", [table])]))


def test_the_answer_is_the_heading_and_the_footer_has_the_day():
    text = render(
        Document("Kind", answer=["3.5B: First. More.", "Second."], made="2026-02-03"), "html"
    )
    assert (
        '<p class="kind">Kind</p><h1>3.5B: First.</h1><div class="lead"><p>More.</p><p>Second.</p></div>'
        in text
    )
    assert "<h1>Kind</h1>" in render(Document("Kind"), "html")
    assert "<dt>Made on</dt><dd>2026-02-03</dd>" in text


def test_a_saved_picture_has_its_whole_caption():
    caption = " ".join(["the caption of a picture"] * 12)
    chart = Chart(LINE, caption, "d")
    svg = file_bytes(Document("t", sections=[Section("", [chart])], figure=chart), "svg").decode(
        "utf-8"
    )
    lines = re.findall(r">([^<>]*(?:caption|picture)[^<>]*)<", svg)
    assert len(lines) > 1
    assert " ".join(lines) == caption


def test_a_narrow_picture_has_no_names_beside_its_points():
    labelled = {"layer": [BARS, BARS | {"mark": {"type": "text"}}]}
    assert len(chart_spec(Chart(labelled, "c", "d"), "wide")["layer"]) == 2
    assert [
        layer["mark"] for layer in chart_spec(Chart(labelled, "c", "d"), "narrow")["layer"]
    ] == ["bar"]
    lines = {"layer": [BARS | {"mark": "line"}, BARS | {"mark": "text"}]}
    assert len(chart_spec(Chart(lines, "c", "d"), "narrow")["layer"]) == 2  # a line keeps its name


def test_a_long_legend_is_wrapped():
    values = [{"x": at, "y": at, "run": f"organisation/model-number-{at}"} for at in range(8)]
    drawn = Chart(chart(values, "point", x="x:Q", y="y:Q", color="run:N"), "c", "d")
    for width, pixels in WIDTHS.items():
        size = re.search(r'width="([\d.]+)"', chart_svg(drawn, "c", width))
        assert float(size[1]) <= pixels + 1


def test_narrow_pages_hide_columns_by_their_drop_and_an_interval_as_a_whole():
    columns = [
        Column("key", "Subject"),
        Column("n", "A long heading", ".9f", drop=2),
        Column("low", "Bound", ".9f", drop=1),
        Column("high", "Bound", ".9f", drop=1),
        Column("gap", "Bound", ".9f"),
    ]
    text = page(
        Table(
            [{"key": "abstract_algebra", "n": 1.0, "low": 0.1, "high": 0.2, "gap": 0.5}],
            columns,
            "x",
        )
    )
    heads = re.findall(r'<th scope="col"( class="[^"]*")?', text)
    assert heads == [' class="short"', *(' class="number spare"',) * 3, ' class="number"']
    wide = page(
        Table(
            [{str(k): 0.123456789 for k in range(9)}],
            [Column(str(k), "Heading", ".9f", drop=k) for k in range(9)],
            "x",
        )
    )
    assert re.findall(r'<th scope="col" class="([^"]*)"', wide)[-1] == "number extra spare"


def test_hover_has_the_tables_digits():
    given = chart([{"step": 12345, "gap": 1.111476176}], "point", x="step:Q", y="gap:Q")
    assert 'aria-label="step: 12345; gap: 1.1115"' in page(Chart(given, "c", "d"))


# --- in a browser ---------------------------------------------------------------------------------------


def test_charts_are_drawn_and_nothing_is_asked_for_or_said(browser):
    assert browser.value("document.querySelectorAll('.chart .wide svg').length") == 5
    assert browser.value("document.querySelectorAll('.chart svg .mark-line path').length") >= 1
    assert browser.console == []
    assert [url.partition(":")[0] for url in browser.requests if not url.startswith("data:")] == [
        "file"
    ]
    assert browser.value("document.querySelector('#hostile + p').textContent") == HOSTILE
    elements = (
        "document.querySelectorAll('img, iframe, object, embed, base, form, main script').length"
    )
    assert browser.value(elements) == 0
    attributes = (
        "[...document.querySelectorAll('*')].flatMap(e => [...e.attributes]).filter(a => %s)"
    )
    guide = "a.ownerElement.closest('footer') && a.value.endsWith('/reference/reports/')"  # on a click only
    leads_away = (
        "/^(src|href|action|data|poster)$/.test(a.localName) && !/^(#|data:,$|$)/.test(a.value)"
    )
    leads_away += f" && !({guide})"
    assert browser.value(attributes % leads_away + ".length") == 0
    assert browser.value(attributes % "a.name.startsWith('on')" + ".length") == 0


def test_the_policy_allows_exactly_the_script_that_is_there(browser):
    policy = browser.value("document.querySelector('meta[http-equiv*=Policy]').content")
    (script,) = browser.value("[...document.scripts].filter(s => !s.type).map(s => s.textContent)")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert re.findall(r"script-src ([^;]+)", policy) == [f"'sha256-{allowed}'"]
    assert "default-src 'none'" in policy


def test_anchors_occur_once_and_one_opens_its_details(browser):
    names = browser.value("[...document.querySelectorAll('[id]')].map(element => element.id)")
    assert len(names) == len(set(names))
    assert {"table", "checkpoints", "a-line", "side-by-side", "hostile", "cost", "limits"} <= set(
        names
    )
    links = browser.value(
        "[...document.querySelectorAll('nav a')].map(a => a.getAttribute('href'))"
    )
    assert links == ["#table", "#charts", "#hostile", "#cost", "#limits"]
    assert browser.value("document.getElementById('cost').open") is False
    browser.value("document.querySelector('nav a[href=\"#cost\"]').click()")
    browser.wait("document.getElementById('cost').open")


def column(browser, index):
    rows = "[...document.querySelectorAll('table')[0].tBodies[0].rows]"
    return browser.value(f"{rows}.map(row => row.cells[{index}].textContent)")


def test_heads_sort_by_keyboard_and_say_so(browser):
    assert column(browser, 0) == ["a/ten", "a/none", "a/nine", "a/minus"]
    head = "document.querySelectorAll('th > button')[1]"
    browser.value(f"{head}.focus()")
    browser.press("Enter", 13, "\r")
    assert column(browser, 1) == ["−1.50 ± 0.25", "9.25", "10.00 ± 0.50", "undefined"]
    assert browser.value(f"{head}.parentElement.getAttribute('aria-sort')") == "ascending"
    browser.press(" ", 32, " ")
    assert column(browser, 1) == ["10.00 ± 0.50", "9.25", "−1.50 ± 0.25", "undefined"]
    assert (
        browser.value("document.getElementById('status').textContent")
        == "Sorted by Gap, descending"
    )
    browser.value("document.querySelectorAll('th > button')[2].click()")
    assert column(browser, 2) == ["0.5B", "1.5B", "7B", "14B"]
    sorted_heads = "[...document.querySelectorAll('table')[0].querySelectorAll('th[aria-sort]')]"
    assert browser.value(f"{sorted_heads}.map(h => h.ariaSort)") == ["none", "none", "ascending"]


def test_names_are_accessible_and_the_guide_is_named(browser):
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    named = {
        (node["role"]["value"], node.get("name", {}).get("value"))
        for node in tree
        if "role" in node
    }
    assert named >= {
        ("table", "Checkpoints"),
        ("rowheader", "a/ten"),
        ("image", "It rises."),
        ("columnheader", "Gap"),
        ("note", "Warning"),
        ("heading", "First."),
        ("button", "Save as CSV"),
    }
    assert browser.value("document.querySelector('footer a').href").endswith("/reference/reports/")


def saved(browser, button):
    """Name and content of the file that a button saves."""
    browser.value(
        "HTMLAnchorElement.prototype.click = function () { window.saved = [this.download, this.href] }"
    )
    browser.value("window.saved = null")
    browser.value(f"{button}.click()")
    browser.wait("window.saved")
    name, url = browser.value("window.saved")
    if url.startswith("data:image/png;base64,"):
        return name, base64.b64decode(url.partition(",")[2])
    return name, browser.value(f"decodeURIComponent({url!r}.split(',').slice(1).join(','))")


def test_a_table_and_a_chart_can_be_saved(browser):
    browser.value("document.querySelectorAll('th > button')[0].click()")
    name, text = saved(browser, "document.querySelector('.save button')")
    assert name == "checkpoints.csv"
    assert text.splitlines() == [
        "Checkpoint,Gap,Gap ±,Scale",
        "a/minus,-1.5,0.25,1.5B",
        "a/nine,9.25,,0.5B",
        "a/none,,,14B",
        "a/ten,10,0.5,7B",
    ]
    name, svg = saved(browser, "document.querySelector('#a-line .save button')")
    assert name == "a-line.svg"
    assert svg.startswith("<svg")
    assert "var(--" not in svg
    name, png = saved(browser, "document.querySelectorAll('#a-line .save button')[1]")
    assert name == "a-line.png"
    assert png[:4] == b"\x89PNG"
    assert browser.console == []


def test_colours_follow_the_scheme_also_in_charts(browser):
    ground = "getComputedStyle(document.body).backgroundColor"
    line = "getComputedStyle(document.querySelector('.wide .mark-line path')).stroke"
    light, dark = (
        ["rgb(255, 255, 255)", "rgb(43, 108, 176)"],
        ["rgb(20, 23, 27)", "rgb(106, 169, 236)"],
    )
    for scheme, kind, colours in (
        ("dark", "screen", dark),
        ("dark", "print", light),
        ("light", "screen", light),
    ):
        browser.media(scheme, kind)
        assert browser.value(f"[{ground}, {line}]") == colours


def test_phone_width_scrolls_tables_not_the_page(browser):
    browser.size(360, 740)
    browser.wait(
        "document.querySelector('#a-line .narrow svg').getBoundingClientRect().width > 300"
    )
    assert browser.value("document.querySelector('#a-line .wide').offsetWidth") == 0
    assert browser.value("document.documentElement.scrollWidth") == 360
    browser.size(1100, 900)
    browser.wait("document.querySelector('#a-line .wide svg').getBoundingClientRect().width > 800")


def test_a_long_table_can_be_searched_and_a_short_one_needs_no_field(built, tmp_path):
    assert 'type="search"' not in built.replace("[type", "")
    long = [{"repo": f"Org/m{i}", "gap": i} for i in range(30)]
    (tmp_path / "page.html").write_text(
        page(Table(long, COLUMNS[:2], "Long"), Table(ROWS, COLUMNS, "Short"))
    )
    with Browser() as tab:
        tab.open(tmp_path / "page.html")
        field = "document.querySelectorAll('input[type=search]')"
        assert tab.value(f"[{field}.length, {field}[0].placeholder]") == [1, "Search 30 rows"]
        tab.value(f"{field}[0].value = 'org/M2'; {field}[0].dispatchEvent(new Event('input')) && 0")
        shown = (
            "[...document.querySelectorAll('tbody tr')].filter(row => row.checkVisibility()).length"
        )
        assert tab.value(shown) == 11 + len(ROWS)
        assert tab.value("document.getElementById('status').textContent") == "11 of 30 rows"
        assert len(saved(tab, "document.querySelector('.save button')")[1].splitlines()) == 12
        assert tab.console == []


def test_a_mark_says_on_hover_where_it_stands(browser):
    mark = "document.querySelector('#a-line .wide .mark-symbol path')"
    browser.value(f"{mark}.dispatchEvent(new PointerEvent('pointermove', {{bubbles: true}})) && 0")
    assert browser.value("document.querySelector('.tip').hidden") is False
    assert "gap: 0" in browser.value("document.querySelector('.tip').textContent")
