"""Nights of one registry: `--since last` over folders, a loopback Hub and web servers that come and go."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import re
import shutil
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
from faulty_proxy import WebServer
from hub_faults import status
from lmeval_screener import News, screen
from lmeval_screener.chance import keep_slope
from lmeval_screener.registry import database
from nights import a_day_passes, mean_of, model, texts
from safetensors.torch import load_file, save_file

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.evidence import FINE_TUNES, SLOPES


def test_three_nights_each_checkpoint_is_announced_once(night, tmp_path, hub):
    place = tmp_path / "models"
    names = [model(place / name, name) for name in ("low", "mid")]
    hub.add("org/worst", mean_of(tmp_path / "hub" / "worst", "worst", "low"))
    gone, moving = model(place / "gone", "low"), model(place / "moving", "worst")
    everything = [f"{place}/*", "org/worst"]
    with ExitStack() as servers:
        web = servers.enter_context(WebServer(tmp_path / "web"))
        model(tmp_path / "web" / "far", "good")
        everything.append(f"{web.endpoint}/far")
        code, said, moves = night(*everything)
        assert (code, said) == (5, ["First of a new group: far (rank 1).", "6 new."])
        assert {row["standing"] for row in moves.values()} == {"first"}
        # Nothing moved: nothing is said.
        assert night(*everything) == (0, ["no changes."], {})

        # New, changed for the better, deleted, touched, uploaded again, renamed; a Hub that fails.
        model(place / "new", "best")
        mean_of(place / "mid", "good", "best")
        gone.rename(tmp_path / "gone")
        os.utime(names[0] / "config.json")
        model(tmp_path / "web" / "far", "good")
        moving.rename(place / "renamed")
        hub.fault("*", status(503), match="*worst*")
        broken = model(place / "broken", "low")
        for file in broken.glob("*.safetensors"):
            file.write_bytes(b"\xff" * 64)
        code, said, moves = night(*everything)
        assert code == 5
        assert said[0] == (
            "Worth evaluating, above the former best: new (rank 1) and mid (rank 2, changed)."
        )
        of = moves["org/worst"]["text"].removeprefix("ServerError, ranked by its figures of ")
        assert said[1:4] == [
            "Failed: broken (BadHeader).",
            f"Not readable now, ranked by older figures: org/worst ({of}, ServerError).",
            "Gone: gone.",
        ]
        assert said[4] == f"Renamed: renamed (before: {moving})."
        assert (
            said[-1]
            == "1 new, 1 changed, 1 renamed, 1 gone, 2 failed, 1 written again with the same figures."
        )
        assert {name: row["what"] for name, row in moves.items()} == {
            "new": "new",
            "renamed": "renamed",
            "mid": "changed",
            "gone": "gone",
            "broken": "failed",
            "org/worst": "failed",
        }
        assert moves["new"]["text"] == "above the former best, far"
        assert moves["mid"]["text"].startswith("above the former best, far; was ratio 0.8")
        assert (moves["renamed"]["standing"], moves["renamed"]["chance"]) == (None, None)

    # The server of the former best is down, the Hub is back; what was announced is not announced again.
    hub.faults.clear()
    model(place / "later", "mid")
    code, said, moves = night(*everything)
    assert code == 3  # far failed, and nothing is worth an evaluation
    assert said[0] == "No new or changed checkpoint is above the former best of its group."
    assert said[1].startswith("Not readable now, ranked by older figures: far (")
    assert said[2] == "1 new, 1 failed."
    assert said[3].startswith("Still failing: broken (BadHeader, since ")
    assert texts(moves)["later"] == ("new", "below the former best, new")
    ranks = {name: (row["rank"], row["note"]) for name, row in night.rows().items()}
    assert ranks["far"][0] == 3
    assert ranks["far"][1].endswith(": Unreachable")
    assert [ranks[name] for name in ("new", "mid", "gone")] == [
        (1, None),
        (2, None),
        (None, "gone"),
    ]
    # What is back as it was is no news for a scheduler, in a group that it would lead too.
    (tmp_path / "gone").rename(gone)
    best = (place / "new").rename(tmp_path / "best")
    assert "1 recovered, 1 gone." in night(*everything)[1]
    best.rename(place / "new")
    code, said, moves = night(*everything)
    assert (code, said[0]) == (0, "1 recovered.")
    assert [
        name in said[1] for name in ("broken (BadHeader, since ", "far (Unreachable, since ")
    ] == [
        True,
        True,
    ]
    assert texts(moves) == {"new": ("recovered", "with weights that were announced before")}


def test_runs_that_end_at_once_or_by_other_clocks_announce_each_checkpoint_once(
    night, tmp_path, monkeypatch
):
    """A clock that stands still or goes back: each run's end is after all that was stored before."""
    start, clock = (
        datetime.datetime(2026, 11, 23, 2, 15),
        itertools.chain([0] * 15, itertools.count(0, -1)),
    )
    ticks = (start + datetime.timedelta(seconds=second) for second in clock)
    monkeypatch.setattr(database, "_now", lambda: f"{next(ticks):%Y-%m-%d %H:%M:%S.%f}")
    place = tmp_path / "models"
    for name in ("low", "mid", "good", "best"):
        model(place / name, name)
        done = night.run(
            f"{place}/*", "--registry", night.store, "--since", "last", "--format", "json"
        )
        assert [row["checkpoint"] for row in json.loads(done.stdout)["rows"]] == [name]


def test_a_run_waits_for_the_answer_of_the_one_that_ended_before(night, tmp_path, monkeypatch):
    place, registry = model(tmp_path / "models" / "low", "low").parent, {"registry": night.store}
    answer, waits, ended = database.Session.announced, [0.5], threading.Event()

    def slowly(session):
        ended.set()
        time.sleep(waits.pop() if waits else 0)
        answer(session)

    monkeypatch.setattr(database.Session, "announced", slowly)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(screen, str(place), since="last", **registry)
        assert ended.wait(60)
        second = screen(str(place), since="last", **registry)
    assert [[move.checkpoint for move in run.news.moves] for run in (first.result(), second)] == [
        ["low"],
        [],
    ]
    # One that was killed before its answer is waited for no longer than an answer takes, and repeated.
    monkeypatch.setattr(database, "ANSWER", 0.3)
    model(place / "mid", "mid")
    monkeypatch.setattr(database.Session, "announced", dies)
    with pytest.raises(MemoryError):
        screen(str(place), since="last", **registry)
    monkeypatch.setattr(database.Session, "announced", answer)
    assert [
        move.checkpoint for move in screen(str(place), since="last", **registry).news.moves
    ] == ["mid"]


def dies(*_, **__):
    raise MemoryError


def test_a_killed_run_loses_and_repeats_nothing(night, tmp_path, monkeypatch):
    names = [model(tmp_path / name, name) for name in ("low", "mid", "good")]
    night(names[0])
    # Killed before its end, then between its end and its answer: what they read is announced by the next.
    for dies_at, read in (
        (f"{database.__name__}.Session.finish", names[:2]),
        ("lmeval_screener.cli._write", names),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(dies_at, dies)
            with pytest.raises(MemoryError):
                night(*read)
        a_day_passes(night.store)
    code, _, moves = night(*names)
    assert (code, set(moves)) == (5, {"mid", "good"})
    # A run without --since says nothing of what is new, so the next that is asked does.
    model(tmp_path / "best", "best")
    assert night.run(*names, tmp_path / "best", "--registry", night.store).returncode == 0
    a_day_passes(night.store)
    code, _, moves = night(*names)
    assert (code, set(moves)) == (5, {"best"})
    assert night(*names) == (0, ["no changes."], {})


def test_the_best_is_not_lost_for_one_night_without_its_server(night, tmp_path):
    """The best cannot be reached, and something worse comes."""
    with WebServer(tmp_path / "web") as web, ExitStack() as until_then:
        down = until_then.enter_context(WebServer(tmp_path / "web"))
        model(tmp_path / "web" / "a", "best")
        model(tmp_path / "web" / "b", "mid")
        addresses = [f"{down.endpoint}/a", f"{web.endpoint}/b"]
        night(*addresses)
        until_then.close()
        code, said, moves = night(*addresses, model(tmp_path / "good", "good"))
        assert code == 3
        assert said[0] == "No new or changed checkpoint is above the former best of its group."
        assert moves["good"]["text"] == "below the former best, a"
        assert (moves["good"]["rank"], moves["a"]["text"].split(",")[0]) == (2, "Unreachable")
        # In a screening of them, in the registry's ranking and in its history.
        done = night.run(*addresses, "--registry", night.store, "--format", "json")
        content = json.loads(done.stdout)
        assert done.returncode == 3
        assert [(c["label"], c["rank"]) for c in content["checkpoints"]] == [("a", 1), ("b", 2)]
        assert content["checkpoints"][0]["notes"][-1].startswith("figures as of 20")
        assert [f["label"] for f in content["failed"]] == ["a"]
        assert content["answer"][-1] == "1 of 2 checkpoints could not be screened (1 Unreachable)."
        shown = night.run(*addresses, "--registry", night.store).stdout
        assert "note a: figures as of 20" in shown
    assert "it failed then (Unreachable), and is still ranked by its figures of" in " ".join(
        night.ask("show", "a").stdout.split()
    )
    assert "1 failed when last seen: a (Unreachable)." in " ".join(
        night.ask("query").stdout.split()
    )
    every = (
        "SELECT repo, error, ratio IS NOT NULL AS known, measured < seen AS older FROM checkpoints"
    )
    rows = json.loads(night.ask("query", every, "--format", "json").stdout)["rows"]
    assert {"repo": addresses[0], "error": "Unreachable", "known": 1, "older": 1} in rows


def test_the_former_best_is_the_one_of_the_last_run(night, tmp_path):
    """A changed checkpoint rises above it; the best itself changes, or is deleted."""
    names = [
        model(tmp_path / n, of)
        for n, of in (("oldbest", "good"), ("other", "mid"), ("mid", "worst"))
    ]
    night(*names)
    model(tmp_path / "mid", "best")
    newone = mean_of(tmp_path / "newone", "good", "best")
    code, said, moves = night(*names, newone)
    newest = "newone (rank 2) and mid (rank 1, changed)"
    assert (code, said[0]) == (5, f"Worth evaluating, above the former best: {newest}.")
    assert moves["newone"]["text"] == "above the former best, oldbest"
    # Now mid is the best, and gets worse; something that is below what it was comes.
    model(tmp_path / "mid", "low")
    code, said, moves = night(*names, newone, mean_of(tmp_path / "third", "good", "mid"))
    assert (code, said[0]) == (
        0,
        "No new or changed checkpoint is above the former best of its group.",
    )
    assert moves["third"]["text"] == "below the former best, mid as it was"
    assert moves["mid"]["text"] == "below the former best, its former self; was ratio 1.297"
    # The best is deleted: what comes is above all that is left, and not above what was there.
    shutil.rmtree(newone)
    code, said, moves = night(
        *names, tmp_path / "third", mean_of(tmp_path / "fourth", "good", "good", "best")
    )
    assert code == 0
    assert moves["fourth"]["rank"] == 1
    assert "the former best, newone (gone)" in moves["fourth"]["text"]
    assert moves["fourth"]["standing"] != "above"


def test_the_chance_of_a_newcomer_follows_an_own_slope(tmp_path):
    names = [
        str(model(tmp_path / name, skill))
        for name, skill in zip("abc", ("worst", "mid", "best"), strict=True)
    ]
    own, chances = tmp_path / "slope.json", []
    keep_slope(own, replace(SLOPES[FINE_TUNES], k=0.25, low=-0.1), FINE_TUNES, "math")
    for slope in (None, own):
        store = tmp_path / f"{len(chances)}.db"
        screen(names[:2], registry=store, since="last")
        found = screen(names, registry=store, since="last", slope=slope)
        (move,) = (move for move in found.news.moves if move.checkpoint == "c")
        assert move.chance == found.chance("c", "b")
        chances.append(move.chance)
    assert chances[0] > chances[1] > 0.5


@pytest.mark.parametrize("since", ["last", "yesterday"])
def test_a_cron_job_says_each_thing_once(night, tmp_path, since):
    a, b = model(tmp_path / "a", "worst"), model(tmp_path / "b", "mid")
    assert set(night(a, b, since=since)[2]) == {"a", "b"}
    c = model(tmp_path / "c", "best")
    said = ["Worth evaluating, above the former best: c (rank 1).", "1 new."]
    assert night(a, b, c, since=since)[:2] == (5, said)
    # In the morning, after the night's run of today, `diff` says the same once more, and reads only.
    with closing(sqlite3.connect(night.store)) as connection, connection:
        tomorrow = "UPDATE runs SET started = datetime('now') WHERE started = (SELECT max(started) FROM runs)"
        connection.execute(tomorrow)
    assert "Worth evaluating, above the former best: c" in night.ask("diff", "yesterday").stdout
    again = json.loads(night.ask("diff", "last", "--format", "json").stdout)
    assert again["answer"][0] == said[0]
    assert again["answer"][-1].endswith(" UTC: 1 new.")
    assert again["worth"] == [str(c)]
    assert night(a, b, c, since="last") == (0, ["no changes."], {})
    # A night without changes hides none, and what nobody announced is not among them.
    night.run(model(tmp_path / "d", "best"), "--registry", night.store)
    once_more = json.loads(night.ask("diff", "last", "--format", "json").stdout)
    assert once_more["worth"] == again["worth"]


def test_a_base_is_never_worth_an_evaluation_nor_is_its_copy(night, tmp_path):
    a, b, base = (model(tmp_path / name, name) for name in ("worst", "mid", "best"))
    shutil.copytree(base, copy := tmp_path / "copy")
    code, said, moves = night(a, b, copy, more=["--base", base])
    copied = "Not news, judging by the rows that were read: copy is a copy of best."
    below = "Below the base best by the ratio: mid and worst."
    assert (code, said) == (
        5,
        ["First of a new group: mid (rank 1).", copied, below, "3 new, 1 copy."],
    )
    assert (moves["best"]["rank"], *texts(moves)["best"]) == (None, "new", "the base")
    later = model(tmp_path / "later", "best")
    assert night(a, model(tmp_path / "low", "low"), more=["--base", later])[0] == 0
    # Without being called so it is.
    assert screen(
        [str(a), str(b), str(base)], registry=tmp_path / "p.db", since="last"
    ).news.worth == (str(base),)


def test_python_has_the_news_of_the_command(night, tmp_path, hub):
    names = [str(model(tmp_path / name, name)) for name in ("worst", "mid", "best")]
    first = screen(names[:2], registry=tmp_path / "p.db", since="last")
    assert isinstance(first.news, News)
    night(*names[:2])
    told = screen(names, registry=tmp_path / "p.db", since="last").news
    assert told.worth == (names[2],)
    assert [(move.what, move.standing, move.is_worth) for move in told.moves] == [
        ("new", "above", True)
    ]
    _, said, moves = night(*names)
    assert (told.answer()[0], told.answer()[1].partition(": ")[2]) == tuple(said)
    assert told.to_dict()["rows"] == list(moves.values())
    heads = re.findall(
        r'<th scope="col"(?! class="[^"]*spare)[^>]*>(?:<button[^>]*>)?(\w+)', told.to_html()
    )
    assert heads == ["What", "Checkpoint", "How"]  # on a phone
    assert screen(names, registry=tmp_path / "p.db", since="last").news.moves == ()
    assert screen(names, registry=tmp_path / "p.db").news is None
    with pytest.raises(UsageError, match=r"since: .last. needs a registry"):
        screen(names, since="last")


def test_of_copies_the_registry_calls_the_earlier_the_original(night, tmp_path):
    known = model(tmp_path / "known", "low")
    night(known)
    night(shutil.copytree(known, tmp_path / "a-copy"), known)
    copies = {name: row["copy_of"] for name, row in night.rows().items()}
    assert copies == {"known": None, "a-copy": "known"}


def test_a_copy_of_a_known_one_is_no_reason_to_evaluate(night, tmp_path):
    """In another type, beside it or in its place; and a registry from before sketches claims nothing."""
    known = model(tmp_path / "known", "low")
    night(known)
    float16 = model(tmp_path / "float16", "low")
    for file in float16.glob("*.safetensors"):
        save_file({n: t.half() for n, t in load_file(file).items()}, file)
    code, said, moves = night(known, float16)
    copy = "Not news, judging by the rows that were read: float16 is a copy of known."
    assert (code, said) == (0, [copy, "1 copy."])
    assert texts(moves) == {"float16": ("copy", "a copy of known")}
    assert {name: (row["rank"], row["copy_of"]) for name, row in night.rows().items()} in (
        {"known": (1, None), "float16": (1, "known")},
        {"known": (1, "float16"), "float16": (1, None)},
    )
    shown = " ".join(night.ask("show", "known").stdout.split())
    assert "known is a copy of float16." in shown
    model(known, "best")  # other weights under the known name, and the old ones under a new one
    code, said, moves = night(known, float16, model(tmp_path / "moved", "low"))
    assert said[:2] == [
        "Worth evaluating, above the former best: known (rank 1, changed).",
        "Not news, judging by the rows that were read: moved is a copy of float16.",
    ]
    for top, names in (
        (1, {"known"}),
        (2, {"known", "float16", "moved"}),
    ):  # a copy takes no other's place
        assert night.rows("--top", str(top)).keys() == names
    with closing(sqlite3.connect(night.store)) as connection, connection:
        connection.execute("UPDATE results SET sketch = NULL")
    said = night(known, float16, model(tmp_path / "again", "low"))[1]
    assert said == ["No new or changed checkpoint is above the former best of its group.", "1 new."]
    assert "copy" not in night.ask("show", "again").stdout


def test_an_order_by_g_alone_is_said_of_new_ones_and_of_all(night, tmp_path):
    places = [model(tmp_path / name, name) for name in ("low", "best")]
    assert "ratio" not in " ".join(night(*places)[1]).lower()
    config = tmp_path / "best" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "unheard"}))
    because = "No ratio of best: the final normalisation layer of unheard is not known; the order is by G alone."
    assert because in night(*places)[1]
    assert because in " ".join(night.ask("query").stdout.split())
    assert because not in night(*places)[1]  # nothing is new
