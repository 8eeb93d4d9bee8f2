"""What a user may write for a checkpoint."""

from __future__ import annotations

import pytest
from lmeval_screener.targets import matching, step_number, target

from lmeval_dispersion.errors import UsageError


def test_repositories_revisions_and_globs():
    assert target("Qwen/Qwen2.5-7B").label == "Qwen/Qwen2.5-7B"
    item = target("org/name@refs/pr/1")
    assert (item.repo, item.revision, item.is_glob) == ("org/name", "refs/pr/1", False)
    assert target("org/name@step*").is_glob
    assert target("gpt2").repo == "gpt2"


def test_a_folder_wins_over_a_repository_of_that_name(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert target("org/name").local
    assert not target("org/other").local
    assert target(str(tmp_path)).local


@pytest.mark.parametrize(
    "text", ["./nowhere", "/nowhere", "a/b/c", "org/name@", "", "org/../x", "https://x/y"]
)
def test_what_is_neither_is_refused_with_the_forms_that_are(text):
    with pytest.raises(UsageError, match="expected"):
        target(text)


def test_revisions_come_in_the_order_of_their_steps():
    names = ["step1000", "main", "step200", "step30000", "step200"]
    assert matching(names, "step*") == ["step200", "step1000", "step30000"]
    assert matching(names, "*") == ["main", "step200", "step1000", "step30000"]


def test_the_step_that_a_name_carries():
    assert step_number("stage1-step140000-tokens588B") == 140000
    assert step_number("iter_500") == 500
    assert step_number("main") is None
