"""Shared options, and where a report goes: refused before the work, written whole, printed anywhere."""

import argparse
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from lmeval_dispersion.errors import MissingExtraError, UsageError
from lmeval_dispersion.model_args import key_values
from lmeval_dispersion.options import add_output
from lmeval_dispersion.output import Output, progress_bar
from lmeval_dispersion.report import FORMATS, Chart, Column, Document, Section, Table, Text

DOCUMENT = Document(
    "Ränge ± ≈", sections=[Section("s", [Table([{"a": "≈ 1"}], [Column("a", "A")], "c")])]
)


def output(*words):
    parser = argparse.ArgumentParser()
    add_output(parser)
    return Output.of(parser.parse_args(words))


class Stream(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


def test_the_suffix_chooses_and_the_option_wins(tmp_path):
    forms = {
        "x.txt": "table",
        "x.md": "markdown",
        "x.csv": "csv",
        "x.json": "json",
        "x.HTM": "html",
    }
    for name, form in forms.items():
        place = tmp_path / name
        assert output("-o", str(place)).files == {place: form}
        assert output("--output", str(place), "--format", "json").files == {place: "json"}
    assert (output().format, output().files) == ("table", {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "x.xlsx",
            r"\.txt, \.md, .*\.htm, \.svg, .*, got .*x\.xlsx; rename it, or name the format with `--format`",
        ),
        ("x", "suffix"),
        ("nowhere/x.md", "existing folder"),
        ("", "folder"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, name, message):
    with pytest.raises(UsageError, match=message):
        output("-o", str(tmp_path / name))


@pytest.mark.parametrize("name", ["x.html", "x.svg"])
def test_a_missing_library_is_a_sentence_before_the_work(name, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "vl_convert" else name
    )
    with pytest.raises(MissingExtraError, match=r"vl_convert.*lmeval-dispersion\[html\]"):
        output("-o", str(tmp_path / "first.md"), "-o", str(tmp_path / name))


@pytest.mark.parametrize("quiet", [[], ["-q"]])
def test_the_answer_is_printed_whatever_files_are_written(quiet, tmp_path, capsys):
    places = [tmp_path / "x.md", tmp_path / "x.json"]
    document = replace(DOCUMENT, answer=("Failed: a below b.", "Evaluate c."))
    output("-o", str(places[0]), "-o", str(places[1]), *quiet).write(document)
    shown = capsys.readouterr()
    assert shown.out == ("" if quiet else "Failed: a below b.\nEvaluate c.\n")
    assert shown.err == ("" if quiet else "".join(f"wrote {place}\n" for place in places))
    assert "**Failed: a below b.**" in places[0].read_text("utf-8")
    assert json.loads(places[1].read_text("utf-8"))["answer"] == list(document.answer)


def test_the_answer_stays_out_of_the_stream_that_is_the_file(tmp_path):
    place = tmp_path / "x.json"
    with place.open("wb") as stream:
        done = subprocess.run(
            [sys.executable, "-m", "lmeval_screener", "--demo", "-o", str(place)],
            stdout=stream,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr.split(":")[0]) == (0, "Evaluate first")
    assert json.loads(place.read_text("utf-8"))["schema"].startswith("screen-checkpoints/")


def test_a_picture_is_of_the_first_chart_in_the_colours_of_paper(tmp_path, capsys):
    pytest.importorskip("vl_convert")
    points = {"data": {"values": [{"a": 1}]}, "mark": "point", "encoding": {"x": {"field": "a"}}}
    charts = [Chart(points | {"title": title}, title, title) for title in ("First", "Second")]
    sections = [Section("", [Text("No chart.")]), Section("s", charts)]
    document = Document("Two", sections=sections, figure=charts[0])
    places = {end: tmp_path / f"x.{end}" for end in ("svg", "png", "pdf")}
    for place in places.values():
        output("-o", str(place)).write(document)
    svg = places["svg"].read_text("utf-8")
    assert "First" in svg
    assert "Second" not in svg
    assert "var(" not in svg
    assert places["png"].read_bytes().startswith(b"\x89PNG")
    assert places["pdf"].read_bytes().startswith(b"%PDF")
    output("-o", str(tmp_path / "figure.svg")).write(replace(document, figure=charts[1]))
    assert "Second" in (tmp_path / "figure.svg").read_text("utf-8")
    # Without a chart, the other files and the answer are there before it is refused.
    capsys.readouterr()
    files = ["-o", str(places["svg"]), "-o", str(tmp_path / "x.md")]
    with pytest.raises(UsageError, match=r"a report with a chart, but 'Ränge"):
        output(*files).write(replace(DOCUMENT, answer=("An answer.",)))
    assert capsys.readouterr() == ("An answer.\n", f"wrote {tmp_path / 'x.md'}\n")


def test_a_file_is_written_whole_and_named(tmp_path, capsys):
    place = tmp_path / ("漢" * 83 + ".json")  # as long as a name may be
    place.write_text("old")
    place.chmod(0o640)
    output("-o", str(place)).write(DOCUMENT)
    assert json.loads(place.read_text("utf-8"))["title"] == "Ränge ± ≈"
    assert place.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [place]
    assert capsys.readouterr() == ("", f"wrote {place}\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_standard_output_is_a_sentence():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lmeval_screener", "--demo"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.stderr.endswith("No space left on device; redirect it to another file\n")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize("words", ["--help", "-V", "screen --help", "screen --demo"])
def test_a_reader_that_goes_away_is_no_error(words):
    """As with `| head`: the pipe is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-u", "-m", "lmeval_dispersion", *words.split()]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
@pytest.mark.parametrize("form", FORMATS)
def test_any_pipe_is_survived(monkeypatch, encoding, form):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    output("--format", form).write(DOCUMENT)
    sys.stdout.flush()
    if form in ("csv", "json", "html") or encoding == "utf-8":
        assert "≈" in raw.getvalue().decode(
            "utf-8"
        )  # for programs: UTF-8 whatever the terminal has
    else:
        assert "~ 1" in raw.getvalue().decode(encoding)


def test_the_terminal_gives_width_and_colour_and_no_color_only_takes_colour(monkeypatch):
    monkeypatch.setenv("COLUMNS", "44")
    monkeypatch.delenv("NO_COLOR", raising=False)
    texts = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stdout", Stream())
        Output("table").write(Document("Word " * 40))
        texts.append(sys.stdout.getvalue())
        monkeypatch.setenv("NO_COLOR", "1")
    assert ["\x1b[" in text for text in texts] == [True, False]
    assert 30 < max(map(len, texts[1].splitlines())) <= 44


@pytest.mark.parametrize(("columns", "widest"), [("44", 44), ("", 100), ("wide", 100)])
def test_a_pipe_is_as_wide_as_columns_says(monkeypatch, columns, widest):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    Output("table").write(Document("Word " * 60, short=True))
    assert widest - 5 < max(map(len, sys.stdout.getvalue().splitlines())) <= widest


@pytest.mark.parametrize("where", ["terminal", "notebook", "pipe"])
def test_a_bar_comes_after_a_second_and_only_where_somebody_looks(where, monkeypatch):
    stream = Stream() if where == "terminal" else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    if where == "notebook":
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
    for patience, shown in ((60.0, False), (1e-9, where != "pipe")):
        monkeypatch.setattr("lmeval_dispersion.output._PATIENCE", patience)
        with progress_bar() as update:
            time.sleep(0.11)  # a bar is not drawn more often
            update(1, 3, "sums-80")
        assert ("1/3" in stream.getvalue()) == shown


def test_model_args_are_read_in_one_way():
    """Numbers and flags as lm-eval reads them; a branch or a folder may be called 1000."""
    pytest.importorskip("lm_eval")
    from lmeval_dispersion.harness.seams import backend_arguments

    text = "pretrained=2024, revision=1000,peft=7 ,batch_size=4,trust_remote_code=true,share=0.5"
    expected = {"pretrained": "2024", "revision": "1000", "peft": "7"}
    expected |= {"batch_size": 4, "trust_remote_code": True, "share": 0.5}
    assert backend_arguments(text) == backend_arguments(key_values(text)) == expected
    for wrong in ("revision", "a=1,a=2"):
        with pytest.raises(UsageError):
            backend_arguments(wrong)
    assert key_values("a=1,a,b=x=y", check=False) == {"a": "", "b": "x=y"}
