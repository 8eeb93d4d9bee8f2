"""What a screening yields, in Python."""

from __future__ import annotations

import sys

import pytest
from lmeval_screener import screen
from lmeval_screener.result import Result
from tokenizers import Tokenizer

from lmeval_dispersion.errors import MissingExtraError
from lmeval_dispersion.paths import data_folder


@pytest.fixture(scope="module")
def result() -> Result:
    folders = [str(data_folder("demo") / name) for name in ("sums-10", "sums-80")]
    return screen([*folders, "./"])


def test_without_pandas_a_sentence_says_what_to_install(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lmeval-dispersion\[audit\]'"):
        result.to_frame()


def test_failed_checkpoints_come_in_the_order_in_which_they_were_asked_for(tmp_path):
    names = [str(tmp_path / name) for name in "cab"]
    for name in names:
        (tmp_path / name).mkdir()
    failed = screen(names).failed
    assert [line.repo for line in failed] == names
    assert {line.error for line in failed} == {"FolderNotFound"}


def test_the_tokens_of_a_tokenizer_are_listed_once_with_their_variants(result):
    (entry,) = result.to_dict()["tokens"]
    assert entry["family"] == result.checkpoints[0].family
    tokenizer = Tokenizer.from_file(str(data_folder("demo") / "sums-10" / "tokenizer.json"))
    for side, variants in (("domain", ["bare"]), ("reference", ["space"])):
        assert entry[side]["variants"] == variants
        assert len(entry[side]["pieces"]) == result.to_dict()["checkpoints"][0]["tokens"][side]
        assert all(tokenizer.token_to_id(piece) == row for piece, row in entry[side]["pieces"].items())
    table = result.document().tables()["tokens"]
    assert [row["variant"] for row in table.rows] == ["bare", "space"]
    assert all(f"{digit}:" in table.rows[0]["tokens"] for digit in "0123456789")


def test_what_the_readme_needs_in_three_words(result, tmp_path):
    found = screen(demo=True)
    assert found.best.label == "sums-80"
    assert [c.label for c in found.shortlist(3).chosen] == ["sums-80", "sums-45", "sums-30"]
    measured = tmp_path / "measured.csv"
    lines = [f"{c.repo},{c.accuracy}" for c in found.checkpoints]
    measured.write_text("\n".join(["repo,accuracy", *lines]))
    verdict = found.verify(measured)
    assert verdict.answer()[0].startswith("The screen works ")
    assert verdict.overall.results == 11


def test_one_name_is_as_good_as_a_list():
    place = str(data_folder("demo") / "sums-80")
    assert screen(place).best.repo == screen([place]).best.repo == place
