"""Every small variant of docs/results/papers.md runs, a test for each section."""

import json
import re
import shutil
from pathlib import Path

import pytest
from lmeval_screener.shortlist.accuracies import read_accuracies
from lmeval_screener.targets.families import load_family
from test_guides import run

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "papers.md"
SECTIONS = re.findall(
    r"^## (.+?)\n.*?^```console\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
)
LIGHT = ("RD: hard examples without labels", "RD: choosing a model")


def blocks(language):
    """The page's blocks in a language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)


def sections():
    """Those that load or train a model are slow."""
    for title, commands in SECTIONS:
        marks = [] if title in LIGHT else [pytest.mark.slow]
        yield pytest.param(commands, id=title, marks=marks)


def test_every_section_has_a_small_variant():
    titles = re.findall(r"^## (.+)$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert [title for title, _ in SECTIONS] == titles


def test_the_accuracies_and_the_family_of_the_page_are_read(tmp_path):
    printed = json.loads((ROOT / "benchmarks" / "paper_gap_tables.json").read_text("utf-8"))
    sources = [("table9", "qwen2.5"), ("table11", "llama2")]
    for (name, family), text in zip(sources, blocks("csv"), strict=True):
        (tmp_path / "accuracies.csv").write_text(text, "utf-8")
        accuracies = read_accuracies(str(tmp_path / "accuracies.csv"))
        rated = [
            target.accuracy
            for target in accuracies.of(load_family(family).checkpoints)
            if target.accuracy is not None
        ]
        assert sorted(rated) == sorted(row["accuracy"] for row in printed[name]["rows"])
    (text,) = blocks("yaml")
    (tmp_path / "olmo7b.yaml").write_text(text, "utf-8")
    own = load_family("olmo2-7b", tmp_path / "olmo7b.yaml")
    bundled = load_family("olmo2-steps")
    assert {each.label for each in own.checkpoints} < {each.label for each in bundled.checkpoints}
    assert own.order.rank_by == "gap"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("commands", [*sections()])
def test_the_small_variants_run(commands, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "lmeval_dispersion").symlink_to(ROOT / "lmeval_dispersion")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    texts = [file.read_text("utf-8") for file in sorted((ROOT / "docs").glob("*/*.md"))]
    (tmp_path / "texts.txt").write_text("\n\n".join(texts), "utf-8")
    code = [file.read_text("utf-8") for file in sorted(ROOT.glob("lmeval_dispersion/*.py"))]
    (tmp_path / "code.txt").write_text("\n\n".join(code), "utf-8")
    if "inspect condensation encoder" in commands:
        (encoder,) = blocks("python")
        exec(compile(encoder, str(PAGE), "exec"), {})
    for line in commands.splitlines():
        printed, status = run(line.removeprefix("$ "), monkeypatch)
        assert status == 0, line
        assert printed.strip(), line
