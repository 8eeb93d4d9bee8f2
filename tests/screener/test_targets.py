"""What a user may write for a checkpoint."""

from __future__ import annotations

import pytest
from lmeval_screener.targets.target import matching, parse_target, step_number


def test_repositories_revisions_and_globs():
    assert parse_target("Qwen/Qwen2.5-7B").label == "Qwen/Qwen2.5-7B"
    item = parse_target("org/name@refs/pr/1")
    assert (item.repo, item.revision, item.is_glob) == ("org/name", "refs/pr/1", False)
    assert parse_target("org/name@step*").is_glob
    assert parse_target("gpt2").repo == "gpt2"


def test_a_folder_wins_over_a_repository_of_that_name(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_target("org/name").local
    assert not parse_target("org/other").local
    assert parse_target(str(tmp_path)).local


@pytest.mark.parametrize("text", ["./nowhere", "a/b/c", "org/name@", "", "s3://"])
def test_what_is_neither_is_a_target_that_is_refused(text):
    item = parse_target(text)
    assert item.repo == text
    assert "expected" in item.refused[1]


def test_revisions_come_in_the_order_of_their_steps():
    names = ["step1000", "main", "step200", "step30000", "step200"]
    assert matching(names, "step*") == ["step200", "step1000", "step30000"]
    assert matching(names, "*") == ["main", "step200", "step1000", "step30000"]


def test_the_step_that_a_name_carries():
    assert step_number("stage1-step140000-tokens588B") == 140000
    assert step_number("iter_500") == 500
    assert step_number("main") is None
