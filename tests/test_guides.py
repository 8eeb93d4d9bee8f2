"""README.md, tutorials and examples are followed: every console block runs and prints what it shows.

A `python` block with a title is saved under that name. `text` blocks need a Hub, a server or a cluster,
and are not run.
"""

import contextlib
import io
import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted((DOCS / "tutorials").glob("*.md")),
    DOCS / "how-to" / "notebook.md",
]
PAGES += [ROOT / "examples" / "README.md"]
BLOCK = re.compile(
    r'^```(console|python)(?: title="([\w.]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL
)
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
NOT_HERE = ("make ",)  # the Makefile's targets run this very suite


def run(command, monkeypatch):
    """Standard output and exit status of a command, run in this process."""
    from lmeval_screener.cli import main as screen

    from lmeval_dispersion.cli import main as dispersion

    name, *arguments = shlex.split(command, comments=True)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        if name == "python":
            monkeypatch.setattr("sys.argv", arguments)
            runpy.run_path(arguments[0], run_name="__main__")
            return out.getvalue(), 0
        status = {"screen-checkpoints": screen, "dispersion": dispersion}[name](arguments)
    return out.getvalue(), status or 0


def same(shown, printed, slack):
    """Equal lines, but for numbers, which may be off by `slack` units of the last place."""
    if NUMBER.sub("#", shown).split() != NUMBER.sub("#", printed).split():
        return False
    for a, b in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True):
        unit = 10.0 ** -len(a.partition(".")[2]) if "." in a else 0.0
        if abs(float(a) - float(b)) > slack * unit + 1e-9:
            return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("two_splits")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_a_guide_is_followed_to_its_end(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    if page.stem != "notebook":  # which is followed with the wheel alone
        (tmp_path / "lmeval_dispersion").symlink_to(ROOT / "lmeval_dispersion")
    if page.parent.name == "examples":
        monkeypatch.chdir("examples")
        # Its races ask a task of --include_path; each would first read lm-eval's own 10,000.
        monkeypatch.setattr("lm_eval.tasks.manager.__file__", "/none/manager.py")
    # A model that is trained here is not the same to the last place on every processor.
    slack = 2.5 if "train" not in page.stem and "loss" not in page.stem else 40.0
    ran, space = 0, {}  # one notebook a page
    for kind, name, body in BLOCK.findall(page.read_text("utf-8")):
        if kind == "python":
            if name:
                Path(name).write_text(body, "utf-8")
            else:
                exec(compile(body, str(page), "exec"), space)
            ran += 1
            continue
        lines = []
        for line in body.splitlines():
            if line.startswith("$ "):
                if line[2:].startswith(NOT_HERE):
                    continue
                printed, status = run(line[2:], monkeypatch)
                assert status == 0, line
                left = iter(printed.splitlines())
                lines, ran = printed.splitlines(), ran + 1
            elif line and line != "…":
                assert any(same(line, other, slack) for other in left), (
                    f"not printed: {line}\n" + "\n".join(lines)
                )
    assert ran >= (2 if "console" in page.read_text("utf-8") else 1)


def test_links_of_the_front_page_are_absolute_and_lead_somewhere():
    text = (ROOT / "README.md").read_text("utf-8")
    links = re.findall(r'\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"', text)
    assert links
    for link in (a or b for a, b in links):
        assert link.startswith("https://"), link
        inside = re.search(r"lmeval-dispersion/(?:blob/)?main/(.+)", link)
        page = re.search(r"github\.io/lmeval-dispersion/(.+?)/?$", link)
        path = inside[1] if inside else f"docs/{page[1]}.md" if page else ""
        if path != "docs/results/README.md":
            assert not path or (ROOT / path).exists(), link
