"""The documentation shows what the programs say, and CONTRIBUTING the house that is there."""

import ast
import pkgutil
import re
from itertools import pairwise
from pathlib import Path

import pytest
from lmeval_screener.shortlist import manifest

from lmeval_dispersion.installation import __version__

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_reference_holds_every_command_and_its_options():
    from reference_pages import every_help

    page = (ROOT / "docs/reference/commands.md").read_text()
    shown = dict(re.findall(r"^## ([^\n]+)\n\n```text\n(.*?)```", page, re.DOTALL | re.MULTILINE))
    # argparse's headings differ a little between versions of Python; the options do not.
    options = {title: re.findall(r"--[a-z-]+", text) for title, text in every_help()}
    assert {title: re.findall(r"--[a-z-]+", text) for title, text in shown.items()} == options


def test_the_example_of_dispersion_prints_what_the_page_shows(capsys):
    page = (ROOT / "docs/explanation/dispersion.md").read_text()
    (code, output), *_ = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr() == (output, "")


def test_what_run_sh_writes_is_what_the_pages_verify():
    (folder,) = re.findall(r'--output_path "\$list/(\w+)"', manifest._RUN)
    text = "".join(page.read_text("utf-8") for page in PAGES)
    named = set(re.findall(r"verify (list/?[\w/.]*\w)", text))
    assert named - {"list/manifest.json"} == {f"list/{folder}"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("install", "how-to/install"),
        ("gpu", "how-to/install"),
        ("vllm", "how-to/install"),
        ("offline", "how-to/install"),
        ("tool", "how-to/which-tool"),
        ("fine-tunes", "how-to/own-fine-tunes"),
        ("loras", "how-to/loras"),
        ("adapters", "how-to/loras"),
        ("which checkpoint best", "how-to/best-checkpoint"),
        ("best checkpoint", "how-to/which-step"),
        ("early stopping", "how-to/which-step"),
        ("rl", "how-to/which-step"),
        ("compare two runs", "how-to/compare-two-runs"),
        ("compare model", "how-to/compare-two-runs"),
        ("s3", "how-to/object-storage"),
        ("dpo", "reference/training"),
        ("resume interruption", "how-to/after-an-interruption"),
        ("error", "reference/errors"),
    ],
)
def test_words_that_people_type_are_in_the_title_of_their_page_and_measurements_come_last(
    words, page
):
    """The site's search weighs a title a thousand times and then multiplies by the page's boost."""
    boosts = {}
    for place in (ROOT / "docs").glob("**/*.md"):
        front, title = re.search(
            r"\A(?:---\n(.*?)---\n+)?# ([^\n]+)", place.read_text("utf-8"), re.S
        ).groups()
        boost = re.search(r"boost: ([\d.]+)", front or "")
        if all(word in title.lower() for word in words.split()):
            boosts[place.relative_to(ROOT / "docs").with_suffix("").as_posix()] = (
                float(boost[1]) if boost else 1
            )
    assert max(boosts, key=boosts.get) == page
    for name in ("README", "costs", "papers", "siblings"):
        assert "boost: 0.3" in (ROOT / "docs" / "results" / f"{name}.md").read_text("utf-8")


def test_imports_of_benchmarks_scripts_and_examples_are_there():
    names = set()
    for file in [
        *ROOT.glob("benchmarks/**/*.py"),
        *ROOT.glob("scripts/*.py"),
        *ROOT.glob("examples/**/*.py"),
    ]:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
    for name in sorted(name for name in names if name.startswith(("lmeval_", "benchmarks."))):
        pkgutil.resolve_name(name)


# --- the house ----------------------------------------------------------------------------------------


def layers():
    """Rooms by layer, from the top, as `pyproject.toml` gives them to import-linter."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    (block,) = re.findall(r'^type = "layers"\nlayers = \[\n(.*?)^\]', text, flags=re.M | re.S)
    lines = re.findall(r'"(.*)"', block)
    return [{room.strip(" ()") for room in line.split("|")} for line in lines]


def floors():
    """The three lists of CONTRIBUTING: a floor's rooms as paths, and the names inside one of them."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    (lists,) = re.findall(
        r"^The house has three floors\..*?\n\n(.*?)\nWhich room", text, re.M | re.S
    )
    floors = []
    for rows in re.split(r"^\*\*\w+\*\* ", lists, flags=re.M)[1:]:
        rooms = []
        inside = []
        for line in re.findall(r"^- (.*?)(?=\n- |\n\n|\Z)", rows, flags=re.M | re.S):
            names, _, words = line.partition(":")
            rooms += re.findall(r"`([^`]+)`", names)
            if names == "inside":
                inside += re.findall(r"`([^`]+)`", words)
        home = Path(rooms[0]).parent
        paths = [Path(rooms[0]), *(home / name for name in rooms[1:])]
        floors.append((paths, [paths[0] / name for name in inside]))
    return floors


def as_module(path):
    return path.as_posix().removeprefix("screener/").removesuffix(".py").replace("/", ".")


def test_the_floors_hold_every_room_of_the_contract_once():
    rooms = [as_module(path) for paths, _ in floors() for path in paths]
    assert sorted(rooms) == sorted(set().union(*layers()))


def test_no_room_of_a_floor_may_import_one_of_a_floor_above():
    depth = {room: number for number, layer in enumerate(layers()) for room in layer}
    depths = [[depth[as_module(path)] for path in paths] for paths, _ in floors()]
    assert len(depths) == 3
    for above, below in pairwise(depths):
        assert max(above) <= min(below)


def test_what_the_lists_name_is_there():
    for paths, inside in floors():
        assert not [path for path in [*paths, *inside] if not (ROOT / path).exists()]


def test_every_room_is_in_the_contract():
    there = {
        f"lmeval_dispersion.{path.stem}"
        for path in (ROOT / "lmeval_dispersion").iterdir()
        if (path.is_dir() and (path / "__init__.py").is_file()) or path.suffix == ".py"
    }
    known = set().union(*layers())
    assert there - {"lmeval_dispersion.__init__"} <= known


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/reference/glossary.md"])
def test_files_that_a_page_names_are_there(page):
    text = (ROOT / page).read_text("utf-8")
    named = re.findall(
        r"`((?:lmeval_dispersion|screener|tests|docs|scripts|benchmarks)/[\w./-]+)`", text
    )
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("file", ["action.yml", "packaging/hf-dispersion/pyproject.toml"])
def test_other_files_name_the_version_of_the_package(file):
    assert re.search(
        rf"(default: ==|version = \"){re.escape(__version__)}\b", (ROOT / file).read_text("utf-8")
    )
