"""Documents by an expression or a file: the right ones, and no code of the user's."""

import numpy as np
import pytest
from synthetic import planted_store

from lmeval_dispersion.auditing.run import read_run
from lmeval_dispersion.auditing.selection import (
    document_ids,
    labels_of,
    rows_of_file,
    rows_of_ids,
    rows_where,
)
from lmeval_dispersion.errors import UsageError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(planted_store(tmp_path_factory.mktemp("run") / "s", n=300))


def test_expressions_choose_rows(run):
    subject, tokens = run.documents["subject"], run.documents["prompt_tokens"]
    for expression, expected in {
        "subject in ('subject 1', 'subject 4')": subject.isin(["subject 1", "subject 4"]),
        "prompt_tokens < 100 and not subject == 'subject 0'": (tokens < 100) & (subject != "subject 0"),
        "doc_id % 2 == 0 or doc_id >= 290": (np.arange(300) % 2 == 0) | (np.arange(300) >= 290),
        "20 <= doc_id < 30": (np.arange(300) >= 20) & (np.arange(300) < 30),
    }.items():
        assert rows_where(run, expression).tolist() == np.flatnonzero(expected).tolist()


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "invalid syntax"),
        ("subject ==", "invalid syntax"),
        ("subjct == 'a'", "there is no column 'subjct'; did you mean subject"),
        ("subject", "not true or false for every document"),
        ("doc_id + 1", "not true or false for every document"),
        ("subject < 3", "--where"),
        ("doc_id < 'a'", "--where"),
        ("doc_id < -1", "no document satisfies"),
        ("@run.score > 0", "invalid syntax"),
        ("__import__('os').getcwd() == ''", "not allowed"),
        ("subject.str.len() > 2", "not allowed"),
        ("subject[0] == 'a'", "subscript is not allowed"),
        ("(lambda: 1)", "lambda is not allowed"),
        ("doc_id ** 9999 > 1", "pow is not allowed"),
        ("doc_id == 1; doc_id == 2", "invalid syntax"),
        ("x := 3", "invalid syntax"),
    ],
)
def test_what_is_no_comparison_of_columns_is_one_sentence(run, expression, message):
    with pytest.raises(UsageError) as caught:
        rows_where(run, expression)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_list_documents(run, tmp_path):
    (tmp_path / "ids").write_text("3\n1\n\n299\n")
    assert rows_of_file(run, tmp_path / "ids").tolist() == [1, 3, 299]
    (tmp_path / "ids.csv").write_text("task,doc_id\nsynthetic,7\nsynthetic,2\n")
    assert rows_of_file(run, tmp_path / "ids.csv").tolist() == [2, 7]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "lists no document"),
        ("1\nseven\n", "one whole number a line"),
        ("1\n300\n301\n", "document 300 of task 'synthetic' and 1 more"),
        ("task,doc_id\nother,1\n", "document 1 of task 'other'"),
        (None, "expected --labelled to be a file"),
    ],
)
def test_a_wrong_file_is_one_sentence(run, tmp_path, content, message):
    if content is not None:
        (tmp_path / "ids").write_text(content)
    with pytest.raises(UsageError, match=message):
        rows_of_file(run, tmp_path / "ids")


def test_several_tasks_need_their_names(tmp_path):
    run = read_run(planted_store(tmp_path / "s", n=6, task=["a", "b"] * 3))
    (tmp_path / "ids").write_text("0\n1\n")
    with pytest.raises(UsageError, match="header task,doc_id"):
        rows_of_file(run, tmp_path / "ids")


def test_ids_are_written_as_ranges_and_read_again(run):
    rows = np.array([0, 1, 2, 5, 7, 8, 250])
    ids = document_ids(run, rows)
    assert ids == {"synthetic": "0-2,5,7-8,250"}
    assert rows_of_ids(run, ids).tolist() == rows.tolist()
    assert rows_of_ids(run, {"another": "0-9"}).tolist() == []


def test_only_chosen_documents_keep_their_labels(run):
    part = labels_of(run, np.arange(10, 20))
    assert part.labelled.tolist() == list(range(10, 20))
    assert len(run.labelled) == 300
