"""The table of a registry's states, played night by night: each cause, its sentences, figures and status."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from contextlib import closing
from typing import NamedTuple

import numpy as np
import pytest
from hub_faults import status
from hub_server import HubServer
from lmeval_screener.errors import SCREENING_CODES
from lmeval_screener.registry.states import CAUSES, cause_of
from nights import model, texts

LISTED, NAMED = ("acme/*",), ("acme/best", "acme/mid")
OLDER = "Not readable now, ranked by older figures: acme/best (DATE, {})."
STILL = "Still failing: acme/best ({}, since DATE)."
GONE = "Gone: acme/best."
TOKEN, OTHER = HubServer.token, "hf_somebody_else"


def nothing(hub, tmp_path):
    """What happens lies in the token, or in nothing."""


def deleted(hub, tmp_path):
    del hub.repositories["acme/best"]


def hidden(hub, tmp_path):
    hub.repositories["acme/best"].private = True


def gated(hub, tmp_path):
    """With a new commit: that of a known one is not opened again."""
    hub.add("acme/best", tmp_path / "best", gated=True)


def renamed(hub, tmp_path):
    hub.rename("acme/best", "acme/top")


def emptied(hub, tmp_path):
    hub.add("acme/best", tmp_path / "empty")


def without_branch(hub, tmp_path):
    del hub.repositories["acme/best"].branches["v1"]


def broken(hub, tmp_path):
    place = shutil.copytree(tmp_path / "best", tmp_path / "broken")
    next(place.glob("*.safetensors")).write_bytes(b"\xff" * 64)
    hub.add("acme/best", place)


def failing(hub, tmp_path):
    hub.fault("*", status(503), match="*best*")


def forgotten(hub, tmp_path):
    """Deleted, and an earlier version recorded nothing but its figures."""
    deleted(hub, tmp_path)
    with closing(sqlite3.connect(tmp_path / "nightly.db")) as connection, connection:
        connection.execute("UPDATE seen SET private = NULL, token = NULL")


class Case(NamedTuple):
    """What happens after the first night, and what the second and the third say of acme/best.

    ``status`` is that of the second night; on the third it is 0, as nothing began, unless ``always``.
    """

    cause: str  # the beginning of the event in the table
    event: object
    second: str
    third: str = ""
    status: int = 0
    names: tuple[str, ...] = LISTED
    private: bool = False
    tokens: tuple[str, str] = ("", "")
    always: int = 0


UNKNOWN, OPEN = "it is not found, or is missing", "it cannot be opened"
PUBLIC, MINE = "it was public", "it was private, and the token"
TOP = "it is gone, but a new"
BOTH = "acme/best (DATE, BadToken) and acme/mid (DATE, BadToken)"
WITHOUT = Case(UNKNOWN, nothing, OLDER.format("RepoNotFound"), STILL.format("RepoNotFound"), 3)
WITHOUT = WITHOUT._replace(private=True, tokens=(TOKEN, ""))
GATED = Case(OPEN, gated, OLDER.format("GatedRepo"), STILL.format("GatedRepo"), 3)
DELETED = Case(PUBLIC, deleted, GONE)
RENAMED = Case(TOP, renamed, "Renamed: acme/top (before: acme/best).")
CASES = {
    "nothing": Case("it was read", nothing, ""),
    "no token, listed": WITHOUT,
    "no token, named": WITHOUT._replace(names=NAMED),
    "another token, listed": WITHOUT._replace(tokens=(TOKEN, OTHER)),
    "another token, named": WITHOUT._replace(names=NAMED, tokens=(TOKEN, OTHER)),
    "expired token": Case(
        OPEN,
        nothing,
        f"Not readable now, ranked by older figures: {BOTH}.",
        f"Still failing: {BOTH.replace('(DATE, BadToken', '(BadToken, since DATE')}.",
        3,
        NAMED,
        True,
        (TOKEN, HubServer.expired),
        always=3,
    ),
    "deleted, of an older registry": WITHOUT._replace(
        event=forgotten, private=False, tokens=("", "")
    ),
    "deleted, listed": DELETED,
    "deleted, named": DELETED._replace(names=NAMED),
    "made private, listed": DELETED._replace(event=hidden),
    "made private, named": DELETED._replace(event=hidden, names=NAMED),
    "deleted, private, listed": DELETED._replace(cause=MINE, private=True, tokens=(TOKEN, TOKEN)),
    "deleted, private, named": DELETED._replace(
        cause=MINE, names=NAMED, private=True, tokens=(TOKEN, TOKEN)
    ),
    "renamed, listed": RENAMED,
    "renamed, named": RENAMED._replace(names=NAMED),
    "weights removed": Case("the list of its author's", emptied, GONE),
    "branch removed": Case(
        "its branch", without_branch, "Gone: acme/best@v1.", names=("acme/best@v1", "acme/mid")
    ),
    "gated": GATED,
    "gated, named": GATED._replace(names=NAMED),
    "server": Case(
        OPEN, failing, OLDER.format("ServerError"), STILL.format("ServerError"), 3, NAMED
    ),
    "broken": Case(
        "it cannot be screened",
        broken,
        "Failed: acme/best (BadHeader).",
        STILL.format("BadHeader"),
        3,
    ),
}


def dated(sentences):
    return [re.sub(r"\d{4}-\d\d-\d\d", "DATE", sentence) for sentence in sentences]


@pytest.fixture
def acme(hub, tmp_path):
    """Serves acme/best and acme/mid, and acme/new on demand."""
    (tmp_path / "empty").mkdir()
    for name in ("best", "mid"):
        hub.add(f"acme/{name}", model(tmp_path / name, name))
    hub.add("acme/best", tmp_path / "best", branch="v1")
    return lambda name, of: hub.add(f"acme/{name}", model(tmp_path / name, of))


@pytest.mark.parametrize("name", CASES)
def test_a_cause_has_its_state_its_sentences_and_its_status(
    night, acme, hub, tmp_path, monkeypatch, name
):
    case = CASES[name]
    (cause,) = (c for c in CAUSES if c.event.startswith(case.cause))
    hub.repositories["acme/best"].private = case.private
    monkeypatch.setenv("HF_TOKEN", case.tokens[0])
    assert night(*case.names)[0] == 5
    monkeypatch.setenv("HF_TOKEN", case.tokens[1])
    case.event(hub, tmp_path)
    for wanted, code in ((case.second, case.status), (case.third, case.always)):
        got, said, moves = night(*case.names)
        said = [sentence for sentence in dated(said) if re.search("[A-Z]", sentence)]
        assert (said, got) == ([wanted] if wanted else [], code)
        rows = night.rows()
        label = next((label for label in rows if label.startswith(("acme/best", "acme/top"))), None)
        # The figures hold, or do not; what is gone is listed without a rank.
        if cause.state == "unknown":
            assert (rows[label]["rank"], rows[label]["note"][:6]) == (1, "as of ")
        elif cause.state == "gone":
            assert (rows[label]["rank"], rows[label]["note"]) == (None, "gone")
        else:
            assert label is None or (rows[label]["rank"], rows[label]["note"]) == (1, None)
        assert len(rows) == (1 if name == "broken" else 2)
    # The table says the same: its own words, and its status.
    assert cause.status == case.status
    assert not case.second or case.second.startswith(cause.first.partition("{")[0])
    assert not case.third or case.third.startswith(cause.later.partition("{")[0])
    # One that is worse is not worth an evaluation while the state of the best is unknown.
    acme("new", "good")
    code, said, moves = night(*case.names, *(["acme/new"] if case.names != LISTED else []))
    is_known = cause.state == "gone" or name == "broken"
    best = "acme/top" if "renamed" in name else "acme/best"
    if name != "expired token":
        assert texts(moves)["acme/new"] == (
            "new",
            f"{'above' if is_known else 'below'} the former best, {'acme/mid' if is_known else best}",
        )
    assert code == (5 if is_known else case.always)
    # What comes back as it was is no news but for what was gone.
    if case.event is nothing and case.tokens[0]:
        monkeypatch.setenv("HF_TOKEN", case.tokens[0])
        assert night(*case.names)[:2] in ((0, ["no changes."]), (0, ["1 new."]))


def test_every_cause_is_played_and_every_error_has_one():
    """Those of folders and of what was never read have tests of their own."""
    played = [c for c in CAUSES if any(c.event.startswith(case.cause) for case in CASES.values())]
    others = {c.event[:14] for c in CAUSES if c not in played}
    assert others == {"the same, for ", "a folder that "}
    for code in SCREENING_CODES:
        assert cause_of(code).event
        assert (
            sum(code in c.codes for c in CAUSES if c.event[:14] not in others and c.state != "gone")
            <= 1
        )


def test_a_list_that_cannot_be_had_changes_nothing(night, acme, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    night(*LISTED)
    monkeypatch.setenv("HF_TOKEN", HubServer.expired)
    done = night.run(*LISTED, "--registry", night.store, "--since", "last")
    assert (done.returncode, "does not accept the token" in done.stderr) == (1, True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert night(*LISTED) == (0, ["no changes."], {})


def test_what_was_never_read_is_new_and_not_recovered(night, acme, hub):
    acme("g", "good")
    hub.repositories["acme/g"].gated = True
    code, said, _ = night(*LISTED)
    assert (code, said[1:]) == (5, ["Failed: acme/g (GatedRepo).", "2 new, 1 failed."])
    for _ in range(2):
        code, said, moves = night(*LISTED)
        assert (code, dated(said), moves) == (
            0,
            ["no changes.", "Still failing: acme/g (GatedRepo, since DATE)."],
            {},
        )
    # The day is that of the first failure, whatever the reason is now.
    hub.fault("*", status(503), match="*acme/g*")
    (_, again, _), first = night(*NAMED, "acme/g"), said
    assert again[1].replace("ServerError", "GatedRepo") == re.sub(
        r"\d{4}-\d\d-\d\d", lambda day: str(np.datetime64(day[0]) - 1), first[1]
    )
    hub.faults.clear()
    hub.repositories["acme/g"].gated = False
    code, _, moves = night(*LISTED)
    assert texts(moves) == {"acme/g": ("new", "below the former best, acme/best")}
    # One that nobody asks for any more is not said to fail.
    acme("h", "low")
    hub.repositories["acme/h"].gated = True
    night(*LISTED)
    assert night(*NAMED)[:2] == (0, ["no changes."])


def test_folders_are_gone_where_the_folders_above_are_there(night, tmp_path):
    """Deleted, renamed, on a disk that is not mounted now; named by hand and by a glob."""
    disk = tmp_path / "disk"
    for name in ("best", "mid", "low"):
        model(disk / "models" / name, name)
    names = [disk / "models" / name for name in ("best", "mid")]
    other = model(tmp_path / "there" / "other", "worst")
    night(*names, disk / "models" / "l*", other)
    disk.rename(tmp_path / "away")
    for wanted, status_of in (
        ("Not readable now, ranked by older figures: ", 3),
        ("Still failing: ", 0),
    ):
        code, said, _ = night(*names, other)
        (sentence,) = (sentence for sentence in said if re.search("[A-Z]", sentence))
        assert (code, sentence[: len(wanted)]) == (status_of, wanted)
        assert ["best (" in sentence, "mid (" in sentence, "FolderNotFound" in sentence] == [
            True
        ] * 3
    assert night.rows()["best"]["rank"] == 1
    (tmp_path / "away").rename(disk)
    assert night(*names, other) == (0, ["no changes."], {})
    # A name that is no checkpoint's is said each time, and is not the registry's.
    for _ in range(2):
        code, said, _ = night(*names, other, tmp_path / "there" / "typo")
        assert (code, "Failed: " in said[0], "typo (FolderNotFound)" in said[0]) == (3, True, True)
    assert not any("typo" in label for label in night.rows())
    shutil.rmtree(names[0])
    names[1].rename(disk / "models" / "top")
    code, said, moves = night(*names, disk / "models" / "t*", other)
    before = f"top (before: {names[1]})"
    assert (code, sorted(said[:2])) == (0, ["Gone: best.", f"Renamed: {before}."])
    assert set(texts(moves).values()) == {
        ("gone", "the folder does not exist any more"),
        ("renamed", f"before: {names[1]}"),
    }
    code, said, _ = night(*names, disk / "models" / "t*", other)
    assert (code, said) == (0, ["no changes."])
    assert {label: row["note"] for label, row in night.rows().items()}["best"] == "gone"
    for name in (names[1], "top"):  # by its former path too
        (sentence,) = json.loads(night.ask("show", name, "--format", "json").stdout)["answer"]
        assert sentence.endswith(f" Renamed: {names[1]} → {disk / 'models' / 'top'}.")


def test_the_sides_of_a_base_are_news_and_so_is_its_change(night, acme, hub):
    acme("base", "mid")
    acme("up", "good")
    acme("down", "low")
    names = ["acme/base", "acme/up", "acme/down"]
    code, said, moves = night(*names, more=["--base", "acme/base"])
    sides = [
        "Above the base acme/base by the ratio: acme/up.",
        "Below the base acme/base by the ratio: acme/down.",
    ]
    assert (code, said[:3]) == (5, ["First of a new group: acme/up (rank 1).", *sides])
    assert texts(moves) == {
        "acme/up": ("new", "first of its group; above its base"),
        "acme/down": ("new", "in a new group; below its base"),
        "acme/base": ("new", "the base"),
    }
    assert night(*names, more=["--base", "acme/base"])[1] == ["no changes."]
    acme("other", "worst")
    _, said, _ = night(*names, "acme/other", more=["--base", "acme/base"])
    assert said[1] == "Below the base acme/base by the ratio: acme/other."
    acme("base", "best")
    _, said, moves = night(*names, "acme/other", more=["--base", "acme/base"])
    assert said[:2] == [
        "The base acme/base has changed: all other checkpoints of its group are compared with it "
        "again.",
        "Below the base acme/base by the ratio: acme/up, acme/down and acme/other.",
    ]
    assert set(moves) == {"acme/base"}


def test_two_tasks_in_one_registry_have_states_of_their_own(night, acme, hub):
    others = ["--reference", "reference:nouns,verbs"]
    night(*LISTED)
    assert night(*LISTED, more=others)[0] == 5
    hub.rename("acme/best", "acme/top")
    del hub.repositories["acme/mid"]
    for more in ([], others):
        assert sorted(night(*LISTED, more=more)[1][:2]) == [
            "Gone: acme/mid.",
            "Renamed: acme/top (before: acme/best).",
        ]
        assert night(*LISTED, more=more)[1] == ["no changes."]
