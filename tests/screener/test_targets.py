"""What a user may write for a checkpoint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmeval_screener.targets import Target, labelled, matching, parse_target, step_number


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


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["gg/a.gguf", "gg/b.gguf"], ["gg/a.gguf", "gg/b.gguf"]),
        (["gg/a.gguf:Q4_0"], ["a.gguf:Q4_0"]),  # a folder of that name
        (["models:/sums/2", "models:/sums/1"], ["sums/2", "sums/1"]),
        (["models:/sums@champion", "models:/other/7"], ["sums@champion", "other/7"]),
        (["runs/one", "runs/two", "org/name@v1"], ["one", "two", "org/name@v1"]),
        (["a/run/last", "b/run/last"], ["a/run/last", "b/run/last"]),
        (["s3://bucket/run/step-5", "s3://bucket/run/step-10"], ["step-5", "step-10"]),
        (["org/name", "org/name@v1", "org/name:Q8_0"], ["org/name", "org/name@v1", "org/name:Q8_0"]),
        (["https://host/a/m?signature=secret"], ["m"]),
    ],
)  # fmt: skip
def test_labels_tell_checkpoints_apart(tmp_path, monkeypatch, names, labels):
    monkeypatch.chdir(tmp_path)
    for name in names:
        if name.endswith(".gguf"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        elif ":" not in name and not name.startswith("org"):
            (tmp_path / name).mkdir(parents=True)
        elif name.endswith("Q4_0"):
            (tmp_path / name.partition(":")[0]).mkdir(parents=True)
    assert [target.label for target in labelled([parse_target(name) for name in names])] == labels


@given(
    st.lists(
        st.builds(
            Target,
            repo=st.sampled_from(["m", "x/m", "y/m", "m/a.gguf", "s3://m", "s3://x/m", "models:/m/1", "."]),
            revision=st.sampled_from([None, "v1"]),
            local=st.booleans(),
            file=st.sampled_from([None, "a.gguf", "Q8_0"]),
        ),
        unique=True,
    )
)
def test_no_two_checkpoints_of_a_report_share_a_label(targets):
    found = labelled(targets)
    assert found == targets
    assert len({target.label for target in found}) == len(targets)
