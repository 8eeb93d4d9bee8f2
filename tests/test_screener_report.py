"""The reports of a screening: terminals, the page in a real browser, markup in names."""

import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from browser import Browser
from command import captured
from json_schemas import faults
from lmeval_screener import screen
from lmeval_screener.chance import Own
from lmeval_screener.figures import difference, gaps, ratio
from lmeval_screener.result.answer import first_of
from lmeval_screener.weights.projection import FinalNorm
from screenings import failed, ranked, screened, siblings
from screenings import result as result_of

from lmeval_dispersion.evidence import FINE_TUNES
from lmeval_dispersion.report import render

NORM = FinalNorm("model.norm.weight", np.ones(32), "rms")
MARKUP = "org/</script><b>[bold]x"


def spread_out(repo, spread, *, seed=0, **options):
    """A checkpoint whose domain tokens share a direction the less, the larger ``spread`` is."""
    draw, noise = np.random.default_rng(3), np.random.default_rng(seed)
    domain, reference = draw.normal(size=(10, 32)), draw.normal(size=(60, 32))
    domain = spread * domain + 1 / spread + 0.02 * noise.normal(size=domain.shape)
    figures = {"gaps": gaps(domain, reference), "ratio": ratio(domain, reference, NORM, "BF16")}
    return screened(repo, **figures, **options)


@pytest.fixture(scope="module")
def result():
    members = [spread_out(f"org/m{i}", 1 + i, accuracy=20.0 * i, seed=i) for i in range(4)]
    members[1] = replace(members[1], warnings=("config.json says <tied> & a head is stored",))
    members += [
        spread_out("org/run", 1 + i, scale="1B", revision=f"step{i * 1000}") for i in range(5)
    ]
    members += [spread_out(MARKUP, 2.0, scale="3B")]
    failure = failed("org/gated", "GatedRepo", "org/gated is gated; accept | log in")
    return result_of(ranked(members), [failure])


@pytest.fixture(scope="module")
def one_group(result):
    return replace(result, checkpoints=tuple(c for c in result.checkpoints if c.scale == "7B"))


def shown(result, **options):
    return render(result.document(), "table", **options)


# --- terminals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 120])
def test_every_part_is_what_is_printed_today_and_fits_the_terminal(result, width):
    text = shown(result, width=width)
    assert text == captured(f"screen-fixed-{width}", text)
    for lines in (text, shown(result, width=width, details=True)):
        assert max(map(len, lines.splitlines())) <= width


@pytest.mark.parametrize(("rank_by", "figure"), [("ratio", "ratio"), ("gap", "G")])
def test_the_figure_that_ranks_is_drawn_and_first(rank_by, figure):
    found = screen(demo=True, rank_by=rank_by)
    drawn = found.charts()["ranking0"].specification()["data"]["values"]
    assert [value[figure] for value in drawn] == [c.figure.mean for c in found.checkpoints]
    columns = [c.heading for c in found.tables()["ranking0"].columns]
    assert columns[2:4] == (["Ratio", "G"] if figure == "ratio" else ["G", "Ratio"])
    assert "Holds the best" not in columns
    assert ("Holds the best" in shown(found, details=True, width=160)) == (figure == "ratio")
    assert "●─" in shown(found, width=80)
    marked = re.findall(r"▶ (\S+)", shown(found))
    assert marked == [
        c.label for c in found.checkpoints[: found.first_for() if figure == "ratio" else 3]
    ]
    head = next(line for line in shown(found).splitlines() if line.startswith("Rank"))
    assert head.split()[2] == columns[2]
    assert found.charts()["accuracy"].caption == f"Accuracy against {figure}"
    called = {"ratio": "The ratio", "G": "G"}[figure]
    assert f"{called} agrees with accuracy here" in shown(found)
    assert repr(found.best).startswith("<Screened> sums-80: ratio 1.297 ± ")


def test_the_chance_to_hold_the_best_is_a_line_between_two_rows_in_every_form(tmp_path):
    found = result_of(
        siblings(*(2 - i / 20 for i in range(24)), parameters=190_000, base="org/base")
    )
    words = f"{100 * found.groups[0].chances.holds_best[8]:.0f} % chance that the best is above"
    for width in (120, 80, 45):
        for colour in (False, True):
            lines = shown(found, width=width, colour=colour).splitlines()
            (place,) = [at for at, line in enumerate(lines) if words in line]
            assert lines[place].startswith(f"── {words} ──")
            assert len(lines[place]) == len(next(line for line in lines if line.startswith("────")))
            assert re.match(r" +9 +▶ i ", lines[place - 1])
            assert re.match(r" +10 +j ", lines[place + 1])
    assert f"-- {words} --" in shown(found, encoding="ascii")
    assert f"| — {words} — |" in found.to_markdown()
    # Between a long group's first and last rows there is a gap; the line stays where it belongs.
    long = result_of(
        siblings(*(3 * 0.97**i for i in range(60)), parameters=190_000, base="org/base")
    )
    own = replace(
        long, slope=Own(FINE_TUNES, 0.5, 0.4, 0.6, 0.35, "2026-11-24", 30, subject="gsm8k")
    )
    cut = own.first_for()
    lines = shown(own, width=80).splitlines()
    (place,) = [at for at, line in enumerate(lines) if "chance that the best is above" in line]
    assert cut > 15
    assert [lines[place + step].split()[0] for step in (-2, -1, 1, 2)] == [
        "…",
        f"{cut}",
        f"{cut + 1}",
        "…",
    ]
    page = tmp_path / "page.html"
    page.write_text(found.to_html(), encoding="utf-8")
    with Browser() as browser:
        browser.open(page)
        rows = "[...document.querySelector('table').tBodies[0].rows].map(row => row.className)"
        assert browser.value(rows)[8:11] == ["pick", "cut", ""]
        browser.value("document.querySelector('th > button').click()")
        assert "cut" not in browser.value(rows)  # it is a line of one order
        assert browser.console == []


def test_a_training_has_a_course_and_no_chance(result):
    steps = replace(result, checkpoints=tuple(c for c in result.checkpoints if c.scale == "1B"))
    (group,) = steps.groups
    assert (group.chances, group.kind, group.is_noise) == (None, "", False)
    assert steps.answer()[0].startswith("run: Ratio rises from ")
    values = steps.charts()["ranking0"].specification()["data"]["values"]
    for value, c, before in zip(values[1:], group.steps[1:], group.steps, strict=False):
        error = difference(c.ratio, before.ratio).se
        assert value["ratio"] == c.ratio.mean
        assert value["high"] - value["ratio"] == pytest.approx(2 * error)
    assert {"ranking0", "gap0"} == {*steps.charts()}


def test_figures_are_explained_once_and_the_names_of_the_answer_are_marked(result, one_group):
    text, group = shown(result, width=100), one_group.groups[0]
    for said in (
        "G: how far the model keeps math tokens",
        "Ratio: spread of math tokens divided by that of everyday words",
    ):
        assert text.count(said) == 1
    assert text.count("─ 2 standard errors of the difference from the step before") == 1
    assert "not an accuracy" in text
    other = shown(
        replace(one_group, domain="law", reference="plain", checkpoints=group.checkpoints[:2])
    )
    assert (
        "G: how far the model keeps law tokens from one another and from the words of plain"
        in other
    )
    marked = re.findall(r"▶ (\S+)", shown(one_group))
    assert marked == [group.names[c] for c in first_of(group)]
    assert one_group.answer()[0].startswith(f"Evaluate first: {', '.join(marked)} (")
    assert f"> {marked[0]}" in shown(one_group, encoding="ascii")
    # Neither where one is as good as another, nor along a training.
    level = siblings(1.0, 1.0, 1.0)
    steps = [c for c in result.checkpoints if c.scale == "1B"]
    for members in (level, steps, level[:1]):
        assert "▶" not in shown(replace(result, checkpoints=tuple(members)))


def test_equal_input_gives_equal_bytes_however_long_it_took(result):
    slower = tuple(replace(c, seconds=2 * c.seconds) for c in result.checkpoints)
    other = replace(result, checkpoints=slower, seconds=99.0)
    for form in ("html", "table"):
        assert render(other.document(), form, details=True) == render(
            result.document(), form, details=True
        )


def test_details_hold_errors_parts_and_what_was_read(result):
    short, whole = shown(result, width=160), shown(result, width=160, details=True)
    for text in (
        "±",
        "within(R), control",
        "lm_head.weight",
        "Permutations",
        "not the training seed",
    ):
        assert (text in short, text in whole) == (False, True)
    assert "--details" in short
    assert MARKUP in short
    assert MARKUP not in render(result.document(), "html")
    assert "accept \\| log in" in result.to_markdown()


def test_a_long_group_is_shortened_to_its_top_and_its_bottom():
    members = [screened(f"org/m{i}", i + 1, warnings=("the same note",)) for i in range(1500)]
    long = result_of(members, [failed(f"org/f{i}", "Unreachable", "not tried") for i in range(36)])
    text = shown(long, width=80)
    assert len(text.splitlines()) < 50
    rows = re.findall(r"^ *\d+  (?:▶ |  )?(org/m\d+)", text, re.MULTILINE)
    assert rows == [f"org/m{i}" for i in [*range(15), 1497, 1498, 1499]]
    assert "18 of 1500 rows; --format csv or -o page.html has all of them." in text
    assert text.count("the same note") == text.count("not tried") == 1
    assert "36 checkpoints: org/f0, org/f1, org/f2, …" in " ".join(text.split())
    assert len(render(long.document(), "csv").splitlines()) == 1501
    assert "rows; all of them" not in shown(replace(long, checkpoints=long.checkpoints[:40]))


# --- forms for programs ---------------------------------------------------------------------------------


def test_a_short_list_shows_what_is_chosen_and_answers_of_all(result):
    cut = result.shown(result.shortlist(2))
    chosen = [c for c in cut.checkpoints if c.chosen]
    assert cut.answer()[1:] == [
        *result.answer()[1:],
        f"Short list: {len(chosen)} of 10 in 3 groups.",
    ]
    assert "Evaluate first: org/m3, org/m2 (" in cut.answer()[0]
    assert re.findall(r"▶ (\S+)", shown(cut)) == ["org/m3", "org/m2"]
    content = json.loads(render(cut.document(), "json"))
    assert faults(content) == []
    assert sorted(c["label"] for c in content["checkpoints"]) == sorted(c.label for c in chosen)
    assert {"7B": 2, "3B": 1}.items() <= Counter(
        c.scale for c in chosen if c.chosen == "rank"
    ).items()
    assert {c["inclusion_probability"] for c in content["checkpoints"]} == {1.0}
    assert len(render(cut.document(), "csv").splitlines()) == 1 + len(chosen)


# --- pages ----------------------------------------------------------------------------------------------


def test_wrong_answers_have_another_mark_only_where_data_says_so(result):
    assert "control" not in json.dumps(result.charts()["accuracy"].specification(), allow_nan=False)
    members = [
        replace(c, target=replace(c.target, negative_control=not i))
        for i, c in enumerate(result.checkpoints)
    ]
    marked = replace(result, checkpoints=tuple(members))
    assert '"control: trained on wrong answers"' in json.dumps(
        marked.charts()["accuracy"].specification()
    )


def test_the_base_is_grey_as_controls_are(result):
    members = [replace(c, is_base=not i) for i, c in enumerate(result.checkpoints)]
    page = replace(result, checkpoints=tuple(members)).to_html()
    assert re.search(rf'<tr class="control">.*{members[0].label} \(base\)', page)


def test_the_page_draws_sorts_and_asks_for_nothing(result, tmp_path):
    place = tmp_path / "page.html"
    place.write_text(result.to_html(), encoding="utf-8")
    with Browser() as browser:
        browser.open(place)
        browser.value("document.querySelectorAll('details').forEach(part => { part.open = true })")
        drawn = "[...document.querySelectorAll('.chart')].filter(chart => chart.querySelector('svg')).length"
        in_tables = sum(
            not group.steps for group in result.groups
        )  # their figures are dots of a table
        assert browser.value(drawn) == len(result.charts()) - in_tables == 3
        ranked = "[...document.querySelectorAll('table')[0].querySelectorAll('tr:has(circle)')]"
        assert browser.value(f"{ranked}.map(row => row.className)") == ["pick", "pick", "pick", ""]
        places = f"{ranked}.map(row => parseFloat(row.querySelector('circle').getAttribute('cx')))"
        first, *others, last = browser.value(places)
        assert first > max(others) > min(others) > last
        names = "[...document.querySelector('table').tBodies[0].rows].map(r => r.cells[1].textContent.slice(2))"
        assert browser.value(names) == ["org/m3", "org/m2", "org/m1", "org/m0"]
        assert MARKUP in browser.value("document.body.textContent")
        assert browser.console == []
        assert [
            url for url in browser.requests if not url.startswith((place.as_uri(), "data:"))
        ] == []


def test_a_dot_says_the_digits_of_the_table_and_leads_to_its_row(one_group, tmp_path):
    place = tmp_path / "page.html"
    place.write_text(one_group.to_html(), encoding="utf-8")
    best = one_group.groups[0].checkpoints[0]
    with Browser() as browser:
        browser.open(place)
        marks = "[...document.querySelectorAll('.wide [aria-roledescription=point]')]"
        said = browser.value(f"{marks}.map(mark => mark.getAttribute('aria-label'))")
        assert (
            said[0]
            == f"{best.label}; fam · 7B; ratio {best.ratio.mean:.3f}; accuracy {best.accuracy:.3g}"
        )
        assert not [text for text in said if re.search(r"\.\d{5}|reach", text)]
        browser.value(f"{marks}[0].dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
        assert browser.value("document.querySelectorAll('tr.met').length") == 1
        row = browser.value("document.querySelector('tr.met').textContent")
        assert said[0].partition(";")[0] in row
        assert browser.value("document.querySelector('footer a').href").endswith(
            "/reference/screening/"
        )
        csv = "[...document.querySelectorAll('.save button')].find(b => b.textContent === 'Save as CSV')"
        browser.value(
            f"HTMLAnchorElement.prototype.click = function () {{ window.saved = this.href }}, {csv}.click()"
        )
        assert "%E2%96%B6" not in browser.value("window.saved")


@pytest.mark.parametrize(("size", "scheme"), [((1280, 800), "light"), ((390, 844), "dark")])
def test_the_first_screen_has_the_answer_and_the_picture(one_group, tmp_path, size, scheme):
    place = tmp_path / "page.html"
    place.write_text(one_group.to_html(), encoding="utf-8")
    with Browser() as browser:
        browser.size(*size)
        browser.media(scheme)
        browser.open(place)
        assert browser.value("document.querySelector('h1').textContent").startswith(
            "Evaluate first: "
        )
        dot = "document.querySelector('.pick svg.dots').getBoundingClientRect()"
        assert browser.value(f"{dot}.width") > 50
        assert browser.value(f"{dot}.bottom") <= size[1]
        assert browser.value(f"{dot}.right") <= size[0]
        assert browser.value("document.documentElement.scrollWidth") == size[0]
        assert browser.console == []
