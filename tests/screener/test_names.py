"""What a user writes for a checkpoint: parse_name, or explained without costing the others their run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmeval_screener import screen
from lmeval_screener.errors import ScreeningError
from lmeval_screener.targets import parse_name, parse_target

from lmeval_dispersion.paths import data_folder


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("org/name", "org/name", None),
        ("org/name/", "org/name", None),
        ("gpt2@main", "gpt2", "main"),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
        ("https://huggingface.co/org/name", "org/name", None),
        ("https://huggingface.co/org/name/", "org/name", None),
        ("https://hf.co/gpt2", "gpt2", None),
        ("https://huggingface.co/gpt2/tree/main", "gpt2", "main"),
        ("https://huggingface.co/org/name/tree/step%2F7", "org/name", "step/7"),
        ("https://huggingface.co/org/name/tree/refs%2Fpr%2F3", "org/name", "refs/pr/3"),
        ("https://huggingface.co/org/name/tree/refs/pr/3", "org/name", "refs/pr/3"),
        ("https://huggingface.co/org/name/commit/0123abc?x=1#top", "org/name", "0123abc"),
        ("hf://org/name", "org/name", None),
        ("hf://models/org/name@v1/", "org/name", "v1"),
    ],
)
def test_names_and_addresses_of_the_hub(text, repo, revision):
    assert parse_name(text) == (repo, revision, False, None)


def test_an_address_of_the_endpoint_in_use(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.example:8443")
    assert parse_name("https://hub.example:8443/org/name/tree/v2") == ("org/name", "v2", False, None)


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("", "BadName", "expected ORGANISATION/NAME"),
        ("a/b/c", "BadName", "expected"),
        ("org/..", "BadName", "expected"),
        ("org/na..me", "BadName", "expected"),
        ("org/name@", "BadName", "no revision behind the @"),
        ("https://huggingface.co/", "BadName", "expected"),
        ("https://huggingface.co/datasets/org/name", "BadName", "of datasets, not of a model"),
        ("https://huggingface.co/org/name/blob/main/config.json", "BadName", "checkpoint: org/name@main"),
        ("https://huggingface.co/org/name/tree/main/sub", "BadName", "org/name@main is its top"),
        ("https://huggingface.co/org/name/discussions", "BadName", "no page of a revision"),
        ("https://huggingface.co/collections/org/best-1", "BadName", "write --collection org/best-1"),
        ("https://huggingface.co/models?search=x", "BadName", "write 'ORG/*'"),
        ("https://huggingface.co/org/models", "BadName", "write 'ORG/*'"),
        ("https://[", "BadName", "expected"),
        ("hf://datasets/org/name", "BadName", "of datasets"),
        ("hf://org/name/config.json", "BadName", "give org/name"),
        ("s3://", "BadName", "a place behind it"),
        ("://bucket", "BadName", "a scheme before"),
        ("https:///x/model.safetensors", "BadName", "host is missing"),
        ("hf://buckets/alone", "BadName", "hf://buckets/NAMESPACE/NAME"),
        ("models:/", "BadName", "models:/NAME/VERSION"),
        ("models:/a/1/2", "BadName", "models:/NAME@ALIAS"),
        ("./nowhere", "FolderNotFound", "no such folder"),
        ("/nowhere/at/all", "FolderNotFound", "no such folder"),
        ("~nobody-of-this-name/x", "FolderNotFound", "no such folder"),
        ("C:\\models\\x", "FolderNotFound", "no such folder"),
        ("..\\x", "FolderNotFound", "no such folder"),
        ("org/\0", "BadName", "expected"),
    ],
)
def test_what_is_neither_is_explained(text, code, says):
    with pytest.raises(ScreeningError) as raised:
        parse_name(text)
    assert raised.value.code == code
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "address",
    [
        "s3://bucket/run/checkpoint-*",
        "gs://bucket",
        "abfss://box@account.dfs.core.windows.net/a b/m",
        "https://example.com/org/name",
        "https://example.com:8443",
        "https://example.com/m/model.safetensors?X-Amz-Signature=0f",
        "hf://buckets/org/name/run/checkpoint-5",
        "models:/name",
        "models:/name/3",
        "models:/name/*",
        "models:/name@champion",
        "sftp://host/run",
    ],
)
def test_addresses_of_storages_are_taken_as_they_are(address):
    assert parse_name(address) == (address, None, False, None)
    assert parse_target(address).scheme == address.partition(":")[0]
    assert not parse_target(address).on_hub


def test_other_ways_to_write_a_place(tmp_path):
    assert parse_name("s3://bucket/m/:Q4_K_M") == ("s3://bucket/m", None, False, "Q4_K_M")
    assert parse_name("https://huggingface.co/buckets/o/b/tree/run%201/x").repo == "hf://buckets/o/b/run 1/x"
    assert parse_name(f"file://{tmp_path}") == (str(tmp_path), None, True, None)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_of_weights_is_a_checkpoint(tmp_path, file):
    (tmp_path / file).write_bytes(b"x")
    assert parse_name(str(tmp_path / file)) == (str(tmp_path / file), None, True, None)


@pytest.mark.parametrize(
    ("file", "code", "says"),
    [("tokenizer.json", "FolderNotFound", "give the folder")],
)
def test_a_file_in_place_of_its_folder(tmp_path, file, code, says):
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(ScreeningError, match=says) as raised:
        parse_name(str(tmp_path / file))
    assert raised.value.code == code
    assert str(tmp_path) in str(raised.value)


def test_a_name_of_any_length_is_asked_for():
    assert parse_name("x" * 5000 + "/").repo == "x" * 5000


def test_a_folder_wins_and_may_have_any_name(tmp_path, monkeypatch):
    for name in ("org/name", "a b", "x@y", "C:\\models"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("org/name", "a b", "x@y", "C:\\models", "org/name/"):
        assert parse_name(name).local


@given(st.text(max_size=40))
def test_any_text_is_understood_or_explained(text):
    code = None
    try:
        assert parse_name(text).repo
    except ScreeningError as error:
        code = error.code
    assert code in (None, "BadName", "FolderNotFound")


def test_one_that_is_refused_fails_alone(tmp_path):
    good = str(data_folder("demo") / "sums-10")
    result = screen(["./nowhere", good, "https://[", "a/b/c"])
    assert [c.repo for c in result.checkpoints] == [good]
    assert [(f.repo, f.error) for f in result.failed] == [
        ("./nowhere", "FolderNotFound"),
        ("https://[", "BadName"),
        ("a/b/c", "BadName"),
    ]
