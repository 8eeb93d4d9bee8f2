"""A screening in Python."""

from __future__ import annotations

import sys

import pytest
from lmeval_screener import screen
from tokenizers import Tokenizer

from lmeval_dispersion.errors import MissingExtraError
from lmeval_dispersion.paths import data_folder

BEST = str(data_folder("demo") / "sums-80")


@pytest.fixture(scope="module")
def result():
    return screen(BEST)


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
    assert entry["family"] == result.best.family
    tokenizer = Tokenizer.from_file(f"{BEST}/tokenizer.json")
    for side, variants in (("domain", ["bare"]), ("reference", ["space"])):
        assert entry[side]["variants"] == variants
        assert len(entry[side]["pieces"]) == result.to_dict()["checkpoints"][0]["tokens"][side]
        assert all(tokenizer.token_to_id(piece) == row for piece, row in entry[side]["pieces"].items())
    table = result.document().tables()["tokens"]
    assert [row["variant"] for row in table.rows] == ["bare", "space"]
    assert all(f"{digit}:" in table.rows[0]["tokens"] for digit in "0123456789")


def test_the_readmes_three_words_and_one_name_in_place_of_a_list(result, tmp_path):
    assert result.best.repo == BEST
    demo = screen(demo=True)
    assert demo.best.label == "sums-80"
    assert [c.label for c in demo.shortlist(3).chosen] == ["sums-80", "sums-45", "sums-30"]
    measured = tmp_path / "measured.csv"
    measured.write_text("\n".join(["repo,accuracy", *(f"{c.repo},{c.accuracy}" for c in demo.checkpoints)]))
    assert demo.verify(measured).answer()[0].startswith("The screen works on these 11 results")
