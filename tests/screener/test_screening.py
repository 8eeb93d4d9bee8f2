"""A screening in Python and by its command: order, tokens and chances in every form, the gate, progress."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import shutil
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest
from lmeval_screener.chance import Chances
from lmeval_screener.cli import _progress, main
from lmeval_screener.result.gate import Gate
from lmeval_screener.screening.arguments import ScreenArguments
from lmeval_screener.screening.run import Screening, floor_among, screen
from lmeval_screener.screening.selection import Selected
from lmeval_screener.targets.families import demo_targets
from lmeval_screener.targets.names import parse_target
from screenings import GAPS, failed, ranking, result, screened, siblings
from tokenizers import Tokenizer

from lmeval_dispersion.cli import main as dispersion
from lmeval_dispersion.errors import DispersionError, MissingExtraError, UsageError
from lmeval_dispersion.evidence import FINE_TUNES, SLOPES
from lmeval_dispersion.installation import data_folder

DEMO = data_folder("demo")


@pytest.fixture(scope="module")
def demo():
    return screen(demo=True)


def test_the_readmes_three_words(demo, monkeypatch, tmp_path):
    assert demo.best.label == "sums-80"
    assert [c.label for c in demo.shortlist(3).chosen] == ["sums-80", "sums-45", "sums-30"]
    measured = tmp_path / "measured.csv"
    measured.write_text(
        "\n".join(["repo,accuracy", *(f"{c.repo},{c.accuracy}" for c in demo.checkpoints)])
    )
    assert demo.verify(measured).answer()[0].startswith("The screen works on these 11 results")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lmeval-dispersion\[audit\]'"):
        demo.to_frame()


def test_a_notebook_whose_event_loop_runs_screens_folders():
    async def cell():
        return screen(str(DEMO / "sums-80"))

    assert asyncio.run(cell()).best.label == "sums-80"


@pytest.fixture
def interruptible():
    """Python's own handler of Ctrl-C, which a shell's background jobs lack."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.usefixtures("interruptible")
def test_a_signal_ends_folders_that_are_read_in_turn(keep):
    """The checkpoint that is being read ends; the others are named."""
    run = Screening(ScreenArguments(), keep_on_interrupt=keep)
    run.on_done = lambda outcome, done, count: (
        signal.raise_signal(signal.SIGINT) if done == 3 else None
    )
    if not keep:
        with pytest.raises(KeyboardInterrupt):
            run.result(Selected(demo_targets()))
        return
    found = run.result(Selected(demo_targets()))
    assert (len(found.checkpoints), {line.error for line in found.failed}) == (3, {"Interrupted"})
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_base_on_the_hub_is_read_for_folders(served):
    served.add("org/base", DEMO / "sums-20")
    found = screen([str(DEMO / "sums-80"), str(DEMO / "sums-45")], base="org/base")
    assert found.base == "org/base"
    assert not found.failed


def test_failed_checkpoints_come_in_the_order_in_which_they_were_asked_for(tmp_path):
    names = [str(tmp_path / name) for name in "cab"]
    for name in names[:2]:
        (tmp_path / name).mkdir()
    result = screen([*names, str(DEMO / "sums-80")])
    assert [(line.repo, line.error) for line in result.failed] == [
        (name, "FolderNotFound") for name in names
    ]
    assert screen(result.best.repo).best.repo == result.best.repo  # one name in place of a list
    assert "FolderNotFound" in screen(names[0])._repr_html_()  # nothing was screened


def test_the_tokens_of_a_tokenizer_are_listed_once_with_their_variants(demo):
    (entry,) = demo.to_dict()["tokens"]
    assert entry["family"] == demo.best.family
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for side, variant in (("domain", "bare"), ("reference", "space")):
        assert entry[side]["variants"] == [variant]
        assert len(entry[side]["pieces"]) == demo.to_dict()["checkpoints"][0]["tokens"][side]
        assert all(
            tokenizer.token_to_id(piece) == row for piece, row in entry[side]["pieces"].items()
        )
    table = demo.document().tables()["tokens"]
    assert [row["variant"] for row in table.rows] == ["bare", "space"]
    assert all(f"{digit}:" in table.rows[0]["tokens"] for digit in "0123456789")


def test_every_form_has_the_same_chances(demo, capsys, tmp_path):
    (group,) = demo.groups
    chances = {c.label: group.holds_best(c) for c in demo.checkpoints}
    assert list(chances.values()) == Chances(11, SLOPES[FINE_TUNES]).holds_best.tolist()
    entries = demo.to_dict()["checkpoints"]
    assert {c["label"]: c["holds_best"] for c in entries} == chances
    assert entries[0]["chance_to_next"] == demo.chance("sums-80", "sums-45") > 0.5
    rows = demo.document().tables()["ranking-demo-370K"].rows
    assert {row["label"]: row["holds_best"] for row in rows} == chances
    store = str(tmp_path / "s.db")
    assert main(["--demo", "--registry", store, "--format", "csv", "-q"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["label"]: float(row["holds_best"]) for row in rows} == chances
    assert dispersion(["registry", "query", store, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["checkpoint"]: row["holds_best"] for row in rows} == chances


def test_the_best_of_nothing_says_what_failed_and_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DEMO / "sums-80", tmp_path / "myruns" / "a")
    nothing = screen("./myrunz")
    with pytest.raises(
        IndexError, match=r"no best checkpoint: \./myrunz: FolderNotFound: .*did you mean"
    ):
        _ = nothing.best
    with pytest.raises(DispersionError, match=r"none of the 2 checkpoints .* FolderNotFound"):
        _ = screen(["./myrunz", "./other"]).best
    assert repr(nothing.failed[0]).startswith("<Failed> ./myrunz: FolderNotFound: ")
    with pytest.raises(DispersionError, match="only the base a was screened"):
        _ = screen("./myruns/a", base="./myruns/a").best


# --- the gate -------------------------------------------------------------------------------------------


def gate_of(result, reference):
    return replace(result, gate=Gate.of(result.groups, result.failed, reference))


def test_what_lies_below_by_the_paired_difference_or_with_hardly_a_chance_fails():
    # By the ratio: c and d differ from a by many errors, b by less than one.
    of_four = result(siblings(1.300, 1.299, 1.1, 0.9))
    first = gate_of(of_four, "a")
    assert (first.gate.below, first.gate.compared, first.exit_code) == (("c", "d"), 3, 4)
    c, d = first.gate.distances[1:]
    assert (c.label, c.difference) == ("c", pytest.approx(1.1 - 1.3))
    assert d.chance == first.chance("d", "a")
    assert first.answer()[0].startswith("Failed: c (ratio lower by 0.200")
    assert first.answer()[0].endswith(") lie below a (3 compared).")
    assert gate_of(of_four, "b").gate.below == ("c", "d")
    last = gate_of(of_four, "d")
    assert (last.gate.passed, last.exit_code) == (True, 0)
    assert last.answer()[0].startswith(
        "Passed: none of the 3 checkpoints lies below d; the lowest is c (ratio higher by 0.200"
    )
    # By rank alone: the errors are too large for any pair, though not for the whole spread.
    wide = result(siblings(*(1.5 - i / 40 for i in range(24)), se=0.06))
    below = gate_of(wide, "a").gate.below
    assert set(below) == {c.label for c in wide.checkpoints[1:] if wide.chance(c.label, "a") <= 0.1}
    assert 0 < len(below) < 20
    assert gate_of(wide, "a").answer()[0].count(" with an estimated chance of ") == 3
    # Of two neither gets there.
    assert gate_of(result(siblings(1.3, 1.2, se=0.3)), "a").gate.passed
    many = gate_of(result(siblings(*(2 - i / 9 for i in range(10)))), "a")
    assert many.answer()[0].endswith(" and 6 more lie below a (9 compared).")
    assert many.answer()[0].count("(ratio lower by ") == 3


def test_a_gate_by_g_is_its_paired_difference():
    assert gate_of(result(ranking(3)), "b").gate.below == ("c",)
    spread = [
        replace(c, gaps={"cosine": replace(GAPS["cosine"], mean=c.rank / 1e9)}) for c in ranking(3)
    ]
    noise = [np.array([1.0, -1.0, 0.0]), np.array([0.0, 0.0, 0.0]), np.array([-1.0, 1.0, 0.0])]
    spread = [
        replace(c, gaps={"cosine": replace(c.gaps["cosine"], left_out_domain=of)})
        for c, of in zip(spread, noise, strict=True)
    ]
    assert gate_of(result(spread), "a").gate.passed


def test_what_cannot_be_compared_does_not_pass():
    lonely = result(
        [*ranking(1), screened("org/x", 1, scale="1B")], [failed("org/y", "Timeout", "")]
    )
    alone = gate_of(lonely, "a")
    assert (alone.gate.compared, alone.gate.not_compared, alone.gate.passed) == (0, 2, False)
    assert alone.exit_code == 1
    unjudged = gate_of(lonely, "org/y")
    assert unjudged.answer()[0] == "The gate cannot be judged: org/y was not screened (Timeout)."
    assert unjudged.exit_code == 1


def test_a_reference_that_is_screened_anyway_is_screened_once():
    targets = [parse_target(f"{DEMO}/sums-10"), parse_target("org/a@v1")]
    assert floor_among(targets, "org/a@v1") == targets[1]
    assert floor_among(targets, "org/a") not in targets
    assert floor_among(targets, f"{DEMO}/../demo/sums-10") == targets[0]
    assert floor_among(targets, "sums-10") == targets[0]
    with pytest.raises(UsageError, match="names several"):
        floor_among(targets, "org/a@step*")


@pytest.mark.parametrize(
    ("reference", "below"), [("sums-80", ["sums-45", "sums-00"]), ("sums-00", [])]
)
@pytest.mark.parametrize("demo", [True, False])
def test_the_command_ends_with_the_gates_status_and_takes_the_tables_names(
    capsys, reference, below, demo
):
    names = ["sums-80", "sums-45", "sums-00"]
    words = ["--demo"] if demo else [str(DEMO / name) for name in names]
    assert main([*words, "--fail-if-below", reference, "--format", "json"]) == (4 if below else 0)
    document = json.loads(capsys.readouterr().out)
    assert document["answer"][0].startswith("Failed: " if below else "Passed: ")
    gate = document["gate"]
    assert (gate["reference"], document["failed"]) == (reference, [])
    assert (gate["passed"], gate["compared"]) == (not below, 10 if demo else 2)
    assert [name for name in gate["below"] if name.rpartition("/")[2] in names] == below
    assert main([*words, "--fail-if-below", reference, "--format", "csv"]) == (4 if below else 0)
    assert capsys.readouterr().err.startswith("screen-checkpoints: Failed: ") == bool(below)


def test_a_gate_that_was_not_named_has_its_accuracy_too(tmp_path):
    names = [str(DEMO / name) for name in ("sums-45", "sums-80")]
    place = tmp_path / "accuracy.csv"
    place.write_text(f"repo,accuracy\n{names[0]},0.25\n{names[1]},0.75\n")
    output = tmp_path / "out.json"
    words = [
        names[0],
        "--fail-if-below",
        names[1],
        "--accuracy",
        str(place),
        "-q",
        "-o",
        str(output),
    ]
    assert main(words) == 4
    entries = json.loads(output.read_text())["checkpoints"]
    assert {entry["label"]: entry["accuracy"] for entry in entries} == {
        "sums-80": 0.75,
        "sums-45": 0.25,
    }


def test_accuracies_say_where_they_are_from(demo, tmp_path):
    assert demo.accuracy == "measured when the demo was trained"
    place = tmp_path / "accuracy.csv"
    place.write_text(f"repo,accuracy\n{DEMO / 'sums-80'},0.75\n")
    assert screen(str(DEMO / "sums-80"), results=place).accuracy == str(place)


def test_lines_of_progress_come_every_half_minute_and_name_failures(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("lmeval_dispersion.output.time.monotonic", lambda: now[0])
    with _progress(quiet=False) as ended:
        for done in range(1, 1001):
            now[0] += 60 if done == 1000 else 0.125
            ended(
                failed("org/x", "GatedRepo") if done % 100 == 0 else screened("org/y"), done, 1000
            )
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "org/y (failed: 2 GatedRepo); 24%, at this pace 2 min left"
    assert len(said) == 4  # not of the last
