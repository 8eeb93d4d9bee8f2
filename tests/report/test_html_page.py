"""The self-contained page: its bytes, and what a real browser makes of it."""

import base64
import hashlib
import html.parser
import re

import pytest
from browser import Browser

from lmeval_dispersion.report import (
    Chart,
    Code,
    Column,
    Document,
    Facts,
    Note,
    Part,
    Section,
    Table,
    Text,
    render,
)
from lmeval_dispersion.report.charts import WIDTHS, chart_spec, chart_svg

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}\u2028&\"'"


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


def chart(values: list[dict[str, object]], mark: object, **encoding: str) -> dict[str, object]:
    """A specification; ``x="gap:Q"`` is the field gap, a quantity."""
    kinds = {"Q": "quantitative", "N": "nominal"}
    channels = {
        channel: {"field": field[:-2], "type": kinds[field[-1]]} for channel, field in encoding.items()
    }
    return {"data": {"values": values}, "mark": mark, "encoding": channels}


def lines(points: int = 12) -> dict[str, object]:
    values = [{"step": step, "gap": step**0.5, "run": "a"} for step in range(points)]
    return chart(values, {"type": "line", "point": True}, x="step:Q", y="gap:Q", color="run:N")


def bars() -> dict[str, object]:
    return chart([{"x": 1, "y": "a"}, {"x": 2, "y": "b"}], "bar", x="x:Q", y="y:N")


def page(*parts: Part) -> str:
    return render(Document("t", sections=[Section("", parts)]), "html")


def sample() -> str:
    charts = [
        Note("Do not compare scales.", "warning"),
        Chart(lines(), "A line", "It rises.", meaning="More steps, more `gap`."),
        Chart({"layer": [bars(), chart([{"x": 1.5}], "rule", x="x:Q")]}, "Layers", "Two bars."),
        Chart({"hconcat": [bars(), bars()]}, "Side by side", "Twice two bars."),
    ]
    evil = chart([{"x": HOSTILE, "y": 1}], "bar", x="x:N", y="y:Q", tooltip="x:N")
    points = [{"x": 1.0, "y": float("nan")}, {"x": 2.0, "y": float("inf")}, {"x": 3.0, "y": 1.0}]
    hostile = [
        Text(HOSTILE),
        Table([{HOSTILE: HOSTILE, "b": 1}], [Column(HOSTILE, HOSTILE), Column("b", "b")], HOSTILE),
        Chart(evil, HOSTILE, HOSTILE),
        Chart(chart(points, "point", x="x:Q", y="y:Q"), "Holes", "Holes."),
        Facts({HOSTILE: HOSTILE}),
        Code(HOSTILE),
        Note(HOSTILE),
    ]
    document = Document(
        "Sample & more",
        answer=["First.", "Second with `code`."],
        sections=[
            Section("", [Facts({"Read": "4.8 MB", "Requests": 31})]),
            Section("Table", [Table(rows(), COLUMNS, "Checkpoints", more="Two more.")]),
            Section("Charts", charts),
            Section(HOSTILE, hostile, name="hostile"),
            Section("Cost", [Code("ls > out.json")], details=True),
        ],
        limits=["No accuracy follows."],
        command="screen-checkpoints --family qwen2.5 > out.json",
    )
    return render(document, "html")


@pytest.fixture(scope="module")
def built() -> str:
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
    metas = [attributes for tag, attributes in elements.found if tag == "meta"]
    (policy,) = [meta["content"] for meta in metas if "Policy" in str(meta.get("http-equiv"))]
    (script,) = elements.scripts
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert re.findall(r"script-src ([^;]+)", policy) == [f"'sha256-{allowed}'"]
    assert "default-src 'none'" in policy


def test_anchors_have_names_and_occur_once(built):
    names = [str(attributes["id"]) for _, attributes in Elements(built).found if "id" in attributes]
    assert len(names) == len(set(names))
    assert {"table", "checkpoints", "a-line", "side-by-side", "hostile", "cost", "limits"} <= set(names)
    links = re.findall(r'href="#([^"]+)"', built)
    assert links == ["table", "charts", "hostile", "cost", "limits"]


def test_a_chart_is_two_small_pictures():
    without, single = page(Table(rows(), COLUMNS, "x")), page(Chart(lines(), "c", "d"))
    assert len(without) < 24_000
    assert single.count("<svg ") == 2
    assert len(single) < 60_000


def test_tables_sort_where_there_are_rows_and_tell_a_hint_once():
    empty, single = page(Table([], [Column("a", "A")], "c")), page(Table([{"a": 1}], [Column("a", "A")], "c"))
    assert '<td colspan="1">none</td>' in empty
    several = page(Table(rows(), COLUMNS, "first"), Table(rows(), COLUMNS, "second"))
    button = '<button type="button">'
    assert [button in text for text in (empty, single, several)] == [False, False, True]
    assert several.count("larger is <code>better</code>") == 1
    row = {"name": "run-5", "gap": -1.5, "se": 0.1, "day": "2024-05-06"}
    text = page(Table([row], [Column(k, k, error="se" if k == "gap" else "") for k in row], "c"))
    assert all(value in text for value in ("−1.5 ± 0.1", "run-5", "2024-05-06"))


def test_a_chart_with_remote_data_is_refused_and_a_column_may_be_called_url():
    remote = {"data": {"url": "https://example.org/data.json"}, "mark": "point"}
    for spec in (remote, {"layer": [bars(), remote]}):
        with pytest.raises(ValueError, match="data inside"):
            page(Chart(spec, "c", "d"))
    values = [{"run": "view_77", "url": "x", "gap": 1.0}, {"run": "param_78", "url": "y", "gap": 2.0}]
    text = page(Chart(chart(values, "bar", x="gap:Q", y="run:N"), "c", "d"))
    assert "view_77" in text
    assert "param_78" in text


def test_a_narrow_picture_has_no_names_beside_its_points():
    labelled = {"layer": [bars(), bars() | {"mark": {"type": "text"}}]}
    assert len(chart_spec(Chart(labelled, "c", "d"), "wide")["layer"]) == 2
    assert [layer["mark"] for layer in chart_spec(Chart(labelled, "c", "d"), "narrow")["layer"]] == ["bar"]


# --- in a browser ---------------------------------------------------------------------------------------


def test_charts_are_drawn_without_a_word_a_request_or_a_hostile_element(browser):
    assert browser.value("document.querySelectorAll('.chart .wide svg').length") == 5
    assert browser.value("document.querySelectorAll('.chart svg .mark-line path').length") >= 1
    assert browser.console == []
    assert [url.partition(":")[0] for url in browser.requests if not url.startswith("data:")] == ["file"]
    assert browser.value("document.querySelectorAll('main img, main script, figure script').length") == 0
    assert browser.value("document.querySelector('#hostile + p').textContent") == HOSTILE


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


def test_names_are_accessible_and_an_anchor_opens_details(browser):
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    named = {(node["role"]["value"], node.get("name", {}).get("value")) for node in tree if "role" in node}
    assert named >= {
        ("table", "Checkpoints"),
        ("rowheader", "a/ten"),
        ("image", "It rises."),
        ("columnheader", "Gap"),
        ("note", "Warning"),
        ("heading", "Sample & more"),
        ("button", "Save as CSV"),
    }
    assert browser.value("document.getElementById('cost').open") is False
    browser.value("document.querySelector('nav a[href=\"#cost\"]').click()")
    browser.wait("document.getElementById('cost').open")


def test_a_table_and_a_chart_can_be_saved(browser):
    browser.value(
        "HTMLAnchorElement.prototype.click = function () { window.saved = [this.download, this.href]; }"
    )
    browser.value("document.querySelectorAll('th > button')[0].click()")
    browser.value("document.querySelector('.save button').click()")
    name, url = browser.value("window.saved")
    assert name == "checkpoints.csv"
    text = browser.value(f"decodeURIComponent({url!r}.split(',').slice(1).join(','))")
    assert text.splitlines() == [
        "Checkpoint,Gap,Gap ±,Scale",
        "a/minus,-1.5,0.25,1.5B",
        "a/nine,9.25,,0.5B",
        "a/none,,,14B",
        "a/ten,10,0.5,7B",
    ]
    browser.value("document.querySelector('#a-line .save button').click()")
    name, url = browser.value("window.saved")
    svg = browser.value(f"decodeURIComponent({url!r}.split(',').slice(1).join(','))")
    assert name == "a-line.svg"
    assert svg.startswith("<svg")
    assert "var(--" not in svg
    browser.value("document.querySelectorAll('#a-line .save button')[1].click()")
    browser.wait("window.saved[0] === 'a-line.png'")
    name, url = browser.value("window.saved")
    assert base64.b64decode(url.removeprefix("data:image/png;base64,"))[:4] == b"\x89PNG"
    assert browser.console == []


def test_colours_follow_the_scheme_also_in_charts(browser):
    line = "getComputedStyle(document.querySelector('.wide .mark-line path')).stroke"
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
    browser.wait("document.querySelector('#a-line .narrow svg').getBoundingClientRect().width > 300")
    assert browser.value("document.querySelector('#a-line .wide').offsetWidth") == 0
    assert browser.value("document.documentElement.scrollWidth") == 360
    browser.size(1100, 900)
    browser.wait("document.querySelector('#a-line .wide svg').getBoundingClientRect().width > 800")


def test_a_mark_says_on_hover_where_it_stands(browser):
    mark = "document.querySelector('#a-line .wide .mark-symbol path')"
    browser.value(f"{mark}.dispatchEvent(new PointerEvent('pointermove', {{bubbles: true}})) && 0")
    assert browser.value("document.querySelector('.tip').hidden") is False
    assert "gap: 0" in browser.value("document.querySelector('.tip').textContent")


def test_a_long_legend_is_wrapped():
    names = [f"organisation/model-number-{number}" for number in range(8)]
    values = [{"x": number, "y": number, "run": name} for number, name in enumerate(names)]
    drawn = Chart(chart(values, "point", x="x:Q", y="y:Q", color="run:N"), "c", "d")
    for width, pixels in WIDTHS.items():
        size = re.search(r'width="([\d.]+)"', chart_svg(drawn, "c", width))
        assert float(size[1]) <= pixels + 1
