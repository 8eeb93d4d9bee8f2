"""Text sources: every kind of file gives the same texts, and nothing is dropped without being counted."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.model.texts import Texts

TEXTS = ["one two", "three\nfour", "fünf sechs"]


def test_every_kind_of_file_gives_the_same_texts(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n" + "\n \n\n".join(TEXTS) + "\n", encoding="utf-8")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet")
    for name in ("a.txt", "a.jsonl", "b.jsonl.gz", "a.parquet"):
        source = Texts(tmp_path / name)
        for _ in range(2):  # a second pass starts anew
            assert [(item.id, item.text) for item in source] == list(enumerate(TEXTS))
        assert source.report() is None
    assert [Texts(tmp_path / name).continuous for name in ("a.txt", "a.jsonl")] == [True, False]
    hub = Texts("org/name:small@test")
    assert (hub.name, hub.config, hub.split) == ("org/name", "small", "test")


def test_skipped_texts_are_counted_and_keep_the_others_ids(tmp_path):
    rows = [
        b'{"text": "good"}',
        b'{"text": "  "}',
        b"\xff\xfe",
        b"[1]",
        b'{"text": 3}',
        b'{"text": "last"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(rows))
    source = Texts(tmp_path / "a.jsonl")
    assert [(item.id, item.text) for item in source] == [(0, "good"), (5, "last")]
    assert source.skipped == {"empty": 1, "undecodable": 3}
    assert "skipped 4 of 6 texts (1 empty, 3 undecodable)" in source.report()
    (tmp_path / "a.txt").write_bytes(b"good\n\n\xff\xfe bad\n\nlast")
    assert [(item.id, item.text) for item in Texts(tmp_path / "a.txt")] == [
        (0, "good"),
        (2, "last"),
    ]
    pq.write_table(pa.table({"body": ["good", None, ""]}), tmp_path / "a.parquet")
    table = Texts(tmp_path / "a.parquet", column="body")
    assert [item.text for item in table] == ["good"]
    assert table.skipped == {"empty": 1, "undecodable": 1}


def test_a_reading_of_part_of_a_source_needs_only_that_part(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "first"}\n') + b"no gzip at all")
    assert next(iter(Texts(tmp_path / "a.jsonl.gz"))).text == "first"


def test_mistakes_are_told_with_the_next_step(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "a.jsonl").write_text('{"body": "x"}')
    (tmp_path / "b.parquet").write_text("x")
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "first"}\n')[:-9])
    (tmp_path / "plain.jsonl.gz").write_text('{"text": "x"}')
    for name, message in (
        ("note.txt", r"does not exist; did you mean notes\.txt"),
        ("a.csv", "expected a file of type .txt"),
        ("a.jsonl", "under 'text' in .*, whose fields are body; give the right column"),
        ("a.parquet", "under 'text' in .*, whose fields are body; give the right column"),
        ("b.parquet", "expected a parquet file"),
        (
            "cut.jsonl.gz",
            "cannot be read: Compressed file ended before .*; check the file",
        ),
        ("plain.jsonl.gz", "cannot be read: Not a gzipped file"),
        (".", "the folder"),
    ):
        with pytest.raises(UsageError, match=message):
            list(Texts(tmp_path / name))
