"""Parts of a registry: several writers, groups that stay one, the Python call, buckets, file systems."""

from __future__ import annotations

import cProfile
import dataclasses
import gzip
import itertools
import json
import pstats
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from checkpoints import write_with_words
from faulty_proxy import FaultyProxy
from hub_server import HubServer
from huggingface_hub import constants
from lmeval_screener import screen
from lmeval_screener.cli import main as screen_checkpoints
from lmeval_screener.figures import numbers_of
from lmeval_screener.registry import database, queries
from lmeval_screener.registry.news import Move, News, _word
from lmeval_screener.registry.states import folder_is_gone
from lmeval_screener.screened import Reading
from planted_registry import plant
from screenings import ranking, result, siblings

from lmeval_dispersion import registry
from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.installation import data_folder


def make(place, seed=0):
    return write_with_words(place, seed, seed / 10)


def means(result):
    return {c.repo: c.gaps["cosine"].mean for c in result.checkpoints}


@pytest.fixture
def many(tmp_path):
    return [str(make(tmp_path / f"m{number:02d}", number)) for number in range(7)]


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Screens with the registry ``r.db`` and an empty cache; the means of G."""
    caches = itertools.count()

    def run(*names):
        monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / f"assets-{next(caches)}"))
        return means(screen(names, registry=tmp_path / "r.db"))

    return run


@pytest.fixture
def parts_asked(asked, served):
    """The same of the loopback Hub, with the kinds of requests that it took."""

    def run(*names):
        served.requests.clear()
        return asked(*names), {request.part for request in served.requests}

    return run


def test_the_python_call_reads_only_what_is_new(many, tmp_path):
    place = tmp_path / "r.db"
    screen(many[:5], registry=place)
    second = screen(many, registry=str(place))
    assert means(second) == pytest.approx(means(screen(many)), abs=1e-15)
    taken = {c.repo for c in second.checkpoints if c.seconds == 0}  # what was read takes time
    assert taken == set(many[:5])


def test_after_a_change_of_the_everyday_words_a_registry_shows_the_last_runs(tmp_path):
    """The same domain by other words: fewer results than before, and still those that are asked for."""
    place = tmp_path / "r.db"
    models = [str(data_folder("demo") / name) for name in ("sums-80", "sums-45", "sums-30")]
    old = screen(models, registry=place, reference="reference-v1")
    new = screen(models[:2], registry=place)
    assert all(c.seconds for c in new.checkpoints)  # read again
    for domain in (None, "math"):
        rows = registry(place, domain=domain).rows()
        assert [row["ratio"] for row in rows] == [c.figure.mean for c in new.checkpoints]
    again = screen(models, registry=place, reference="reference-v1")
    assert not any(c.seconds for c in again.checkpoints)
    assert means(again) == means(old)


def test_results_of_an_older_method_are_read_again(many, tmp_path, monkeypatch):
    names = many[:2]
    place = tmp_path / "r.db"

    def were_read():  # what was read takes time
        return [c.seconds > 0 for c in screen(names, registry=place).checkpoints]

    assert all(were_read())
    assert not any(were_read())
    monkeypatch.setattr(database, "METHOD", database.METHOD + 1)
    assert all(were_read())
    assert not any(were_read())


def test_writers_that_begin_at_once_lose_nothing(many, tmp_path):
    place = tmp_path / "r.db"
    code = (
        "import sys; from lmeval_screener import screen; screen(sys.argv[2:], registry=sys.argv[1])"
    )
    program = [sys.executable, "-c", code, place]
    writers = [
        subprocess.Popen([*program, *many[k : k + 3]], stderr=subprocess.PIPE) for k in (0, 2, 4)
    ]
    for writer in writers:
        _, err = writer.communicate()
        assert writer.returncode == 0, err
    with closing(sqlite3.connect(place)) as connection:
        assert connection.execute("SELECT count(*) FROM results").fetchone() == (7,)
        assert connection.execute("SELECT count(*), min(screened) FROM runs").fetchone() == (3, 3)


@pytest.mark.parametrize(("kind", "mode"), [("ext4", "wal"), ("nfs4", "delete")])
def test_a_file_that_machines_share_has_no_log_in_memory(many, tmp_path, monkeypatch, kind, mode):
    monkeypatch.setattr(database, "file_system", lambda path: kind)
    screen(many[:2], registry=tmp_path / "r.db")
    with closing(sqlite3.connect(tmp_path / "r.db")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == (mode,)
    assert len(screen(many, registry=tmp_path / "r.db").checkpoints) == 7


def test_a_file_that_cannot_be_locked_is_refused_by_name(many, tmp_path, monkeypatch):
    screen(many[:1], registry=tmp_path / "r.db")
    monkeypatch.setattr(database, "_WAIT", 0.0)
    monkeypatch.setattr(database, "file_system", lambda path: "lustre")
    with closing(sqlite3.connect(tmp_path / "r.db")) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        with pytest.raises(
            DispersionError, match=r"\(lustre\) cannot lock files: name a registry on"
        ):
            screen(many, registry=tmp_path / "r.db")


def test_the_type_of_the_file_system_is_that_of_the_nearest_mount(tmp_path):
    assert database.file_system(Path("/proc/self/mounts")) == "proc"
    assert database.file_system(tmp_path) not in ("", "proc")


def test_the_demo_and_its_folders_by_name_are_one_group(tmp_path, capsys):
    place = tmp_path / "r.db"
    folders = sorted(str(f) for f in data_folder("demo").glob("sums-*"))[:3]
    screen(demo=True, registry=place)
    screen(folders, registry=place)
    assert main(["registry", "query", str(place)]) == 0
    assert " in 1 group, by math" in capsys.readouterr().out
    # Folders that were never in a family stay in a group of their own.
    screen([str(make(tmp_path / "own", 3))], registry=place)
    assert main(["registry", "query", str(place)]) == 0
    assert " in 2 groups, by math" in capsys.readouterr().out


SCREEN = ["org/*", "--registry", "r.db"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (main, ["registry", "query", "r.db", "--format", "json"]),
        (main, ["registry", "diff", "r.db", "2000-01-01"]),
        (screen_checkpoints, [*SCREEN, "--format", "json"]),
        (screen_checkpoints, [*SCREEN, "--since", "2000-01-01", "--format", "json"]),
        (screen_checkpoints, [*SCREEN, "--format", "html"]),
    ],
)
def test_the_work_grows_as_the_rows_do(tmp_path, monkeypatch, capsys, command, words):
    """Counted in calls of functions: four times the rows take four times as many, not sixteen."""
    monkeypatch.chdir(tmp_path)
    calls = []
    for count in (5, 40, 160):  # the first for what is done once: imports, templates
        Path("r.db").unlink(missing_ok=True)
        with HubServer() as hub:
            plant(Path("r.db"), count, hub)
            monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
            profile = cProfile.Profile()
            assert profile.runcall(command, words) in (0, 5)
        calls.append(pstats.Stats(profile).total_calls)
    assert f"{count - 1:05d}"[1:] not in capsys.readouterr().err
    assert calls[2] < 4.1 * calls[1]


def test_a_long_list_is_cut_for_readers_alone(tmp_path, capsys):
    place, kinds = tmp_path / "r.db", ("table", "csv")
    plant(place, 60)
    shown = {}
    for kind in kinds:
        for words in (["query", str(place)], ["diff", str(place), "2000-01-01"]):
            main(["registry", *words, "--format", kind])
            shown[kind, words[0]] = capsys.readouterr().out
    assert "40 of 60 rows; --format csv" in shown["table", "query"]
    assert "40 of 60 rows" in shown["table", "diff"]
    assert {shown["csv", name].count("org/model") for name in ("query", "diff")} == {59, 118}
    # A kind with one row is not left out by one with many.
    assert queries.excerpt([*"a" * 60, "b"]) == (*range(20), 60)
    assert queries.excerpt(range(100)) == tuple(range(40))
    assert queries.excerpt("ab" * 20) == ()


def test_options_without_a_use_are_refused(tmp_path, capsys):
    place = str(tmp_path / "r.db")
    sums = str(data_folder("demo") / "sums-00")
    screen([sums], registry=place)
    unused = "does not use this"
    for command, words, message in (
        (main, ["registry", "diff", place, "yesterday", "--scale", "7B"], unused),
        (main, ["registry", "show", place, "sums-00", "--domain", "math"], unused),
        (main, ["registry", "query", place, "SELECT 1", "--top", "3"], unused),
        (main, ["registry", "diff", place], "expected a time after diff"),
        (
            screen_checkpoints,
            [sums, "--registry", place, "--since", "soon"],
            "--since: expected last",
        ),
        (
            screen_checkpoints,
            [sums, "--registry", place, "--since", "last", "--shortlist", "1"],
            "only news",
        ),
    ):
        assert command(words) == 2
        assert message in capsys.readouterr().err
    assert main(["registry", "query", place, "--top", "3"]) == 0


def test_without_an_action_a_registry_is_queried_and_its_columns_are_named(tmp_path, capsys):
    place = str(tmp_path / "r.db")
    sums = str(data_folder("demo") / "sums-00")
    screen([sums], registry=place)
    shown = []
    for words in ([place], ["query", place], [place, "--top", "5"], ["--top", "5", place]):
        assert main(["registry", *words]) == 0
        shown.append(capsys.readouterr().out)
    assert len(set(shown)) == 1
    assert main(["registry", place, "SELECT ratio FROM checkpoints", "--format", "csv"]) == 0
    assert capsys.readouterr().out.startswith("ratio\n")
    assert main(["registry", "qery", place]) == 2
    assert (
        "expected query, show or diff, got 'qery'; did you mean query?" in capsys.readouterr().err
    )
    assert main(["registry", place, "SELECT name FROM Checkpoints"]) == 2
    refused = capsys.readouterr().err
    assert "no such column: name; checkpoints has identity, " in refused
    assert ", ratio, " in refused
    # Without --since there is no announcement: the changes of the last run.
    assert registry(place, "diff", since="last").answer()[-1].endswith(" UTC: 1 new.")


def test_a_table_has_short_hashes_and_data_whole_ones(tmp_path):
    place = tmp_path / "r.db"
    screen([str(data_folder("demo") / "sums-00")], registry=place)
    history = registry(place, "show", "sums-00")
    (whole,) = [row["state"] for row in history.rows()]
    assert re.fullmatch("files:[0-9a-f]{32}", whole)
    assert whole[:18] in history.to_markdown()
    assert whole[:19] not in history.to_markdown()


def test_a_second_run_over_an_organisation_reads_nothing_new(hub, tmp_path, parts_asked):
    for number in range(3):
        changed = f"2026-03-0{number + 1}T00:00:00.000Z"
        hub.add(f"acme/m{number}", make(tmp_path / f"m{number}", number), changed=changed)
    first, _ = parts_asked("acme/*")
    assert parts_asked("acme/*") == (first, {"list"})


def test_a_renamed_repository_is_known_by_both_names(hub, tmp_path, parts_asked):
    commit = hub.add("acme/new", make(tmp_path / "m", 1))
    hub.rename("acme/old", "acme/new")
    first, _ = parts_asked("acme/old")
    assert set(first) == {"acme/new"}
    for name in ("acme/old", "acme/new", f"acme/old@{commit}", f"acme/new@{commit}"):
        again, parts = parts_asked(name)
        assert again == first
        # Only a branch has to be asked for: where it is now, and what the name stands for.
        assert not parts & {"cdn", "resolve"}
        assert bool(parts) == ("@" not in name)
    # Somebody else takes the old name: it is another repository, and the one of before keeps its own.
    del hub.renamed["acme/old"]
    hub.add("acme/old", make(tmp_path / "other", 2))
    both, _ = parts_asked("acme/old", "acme/new")
    assert both["acme/new"] == first["acme/new"] != both["acme/old"]
    again, parts = parts_asked("acme/old", "acme/new")
    assert again == both
    assert not parts & {"cdn", "resolve"}
    assert main(["registry", "show", str(tmp_path / "r.db"), "acme/old"]) == 0


def test_a_second_run_over_a_bucket_reads_no_object(s3_server, tmp_path, monkeypatch, asked):
    with FaultyProxy(s3_server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        for number in range(6):
            s3_server.put(make(tmp_path / f"m{number}", number), f"zoo/m{number}")
        address = f"s3://{s3_server.bucket}/zoo/*"
        first = asked(address)
        assert len(first) == 6
        assert proxy.ranges()
        proxy.requests.clear()
        assert asked(address) == first
        assert [request.path for request in proxy.ranges()] == []


def schema(place):
    with closing(sqlite3.connect(place)) as connection:
        layout = connection.execute("PRAGMA user_version").fetchone()
        tables = connection.execute(
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
        )
        return layout, {
            name: [column[1:3] for column in connection.execute(f"PRAGMA table_info({name})")]
            for (name,) in tables.fetchall()
        }


@pytest.mark.parametrize("first", ["a question", "a run"])
def test_a_registry_of_an_older_layout_is_brought_to_todays(many, tmp_path, capsys, first):
    old, new = tmp_path / "old.db", tmp_path / "new.db"
    stored = gzip.decompress(Path("tests/data/registry-1.db.gz").read_bytes())
    old.write_bytes(stored)
    if first == "a question":
        assert main(["registry", "query", str(old)]) == 0
        assert "org/b" in capsys.readouterr().out
        assert old.read_bytes() == stored  # who only reads changes nothing
    for place in (old, new):  # by the words that were the default then
        screen(many[:1], registry=place, reference="reference-v1")
    assert schema(old) == schema(new)
    assert main(["registry", "query", str(old), "--format", "csv"]) == 0
    assert {"org/a", "org/b", "m00"} == {
        line.split(",")[0] for line in capsys.readouterr().out.splitlines()[1:]
    }


def test_a_registry_of_a_newer_version_is_refused(many, tmp_path, capsys):
    place = tmp_path / "r.db"
    screen(many[:1], registry=place)
    with closing(sqlite3.connect(place)) as connection:
        connection.execute("PRAGMA user_version = 99")
    before = place.read_bytes()
    with pytest.raises(
        UsageError, match=r"newer version .* layout \d or older, got 99.* update this installation"
    ):
        screen(many[:1], registry=place)
    assert main(["registry", "query", str(place)]) == 2
    assert place.read_bytes() == before


@pytest.mark.parametrize("full", ["while it screens", "from the start"])
def test_a_full_disk_costs_no_report(many, tmp_path, monkeypatch, capsys, full):
    """A file that may have no more pages is full to SQLite; so is one without room for its journal."""
    place = tmp_path / "r.db"
    screen(many[5:], registry=place, since="last")
    prepare, limits = database._prepare, []

    def prepared(connection, path):
        if full == "from the start":
            raise sqlite3.OperationalError("disk I/O error")
        prepare(connection, path)
        limits.append(connection.execute("PRAGMA page_count").fetchone()[0] + 2)
        connection.execute(f"PRAGMA max_page_count = {limits[0]}")

    words = [*many, "--registry", str(place), "--since", "last"]
    with monkeypatch.context() as patch:
        patch.setattr(database, "_prepare", prepared)
        assert screen_checkpoints([*words[:-2], "--format", "json"]) == 0
        said = capsys.readouterr()
        assert len(json.loads(said.out)["checkpoints"]) == 7
        assert re.search(
            r"r\.db could not be written after 20\S+ \S+ UTC because its disk is full", said.err
        )
        with pytest.warns(UserWarning, match="could not be written after"):
            assert len(screen(many, registry=place, since="last").news.moves) == 5
        assert screen_checkpoints(words) == 5
        assert "5 new." in capsys.readouterr().out
    # With room again, what was not kept is announced: better twice than never.
    assert screen_checkpoints(words) == 5
    assert "5 new." in capsys.readouterr().out
    assert screen_checkpoints(words) == 0
    with closing(sqlite3.connect(place)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_small_mistakes_have_their_own_sentence(many, tmp_path, monkeypatch, capsys):
    place = str(tmp_path / "r.db")
    screen(many[:1], registry=place)
    for path in ("/dev/null", str(tmp_path)):
        with pytest.raises(
            UsageError, match=f"a file in an existing folder, got {path}; name a file"
        ):
            screen(many[:1], registry=path)
    with pytest.raises(UsageError, match=f"; create {tmp_path / 'none'} first$"):
        screen(many[:1], registry=tmp_path / "none" / "r.db")
    assert main(["registry", "query", place, "SELECT * FROM checkpoint"]) == 2
    assert "from checkpoints, results, seen, runs, tokenizers or names" in capsys.readouterr().err
    name = Path(many[0]).name
    assert main(["registry", "show", place, f"{name}x"]) == 2
    err = capsys.readouterr().err
    assert f"got {name}x; did you mean {name}?" in err
    assert "`dispersion registry query FILE` lists them" in err
    assert main(["registry", "query", place, "SELECT 1 a, 2 a, 3 a", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [{"a": 1, "a:1": 2, "a:2": 3}]
    assert main(["registry", "query", place, "-- no statement"]) == 0
    assert capsys.readouterr().out.startswith("0 rows.")
    monkeypatch.setattr(queries, "_LIMIT", 0.1)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
    assert main(["registry", "query", place, endless]) == 2
    assert "the statement took more than 0 seconds: narrow it" in capsys.readouterr().err


# --- against the former best ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "mine", "word"),
    [
        (siblings(1.3, 1.2, 1.1), 0, "above"),
        (siblings(1.3, 1.2, 1.1), 2, "below"),
        (siblings(1.3, 1.2005, 1.2), 2, "level"),  # by rounding
        (siblings(1.3, 1.2, 1.2), 2, "level"),  # one place
        (siblings(1.003, 1.002, 1.001, se=0.05), 0, "level"),  # noise of the tokens
        (ranking(3), 0, "above"),  # by G, whose order has no known chance
        (ranking(3), 2, "below"),
    ],
)
def test_where_a_checkpoint_lies_from_the_former_best(members, mine, word):
    (group,) = result(members).groups
    assert _word(group, members[mine], members[1]) == word


_ROWS = "output rows equal to those of"


def test_what_is_said_of_newcomers():
    above = Move("new", "a", "g", rank=1, chance=0.62, standing="above")
    level = Move("changed", "b", "g", rank=2, chance=None, standing="level")
    below = Move("new", "c", "g", rank=9, chance=0.03, standing="below")
    equal = Move("changed", "d", "g", standing="equal", text=f"{_ROWS} e; was ratio 1.200")
    said = {
        f"d has {_ROWS} e; to see which is better, ask both checkpoints of a pair the same questions "
        "with `dispersion race`.": equal,
        "Worth evaluating, above the former best: a (rank 1).": above,
        "Not distinguishable from the former best by output rows: b (rank 2, changed).": level,
        "No new or changed checkpoint is above the former best of its group.": below,
    }
    for sentence, move in said.items():
        found = News("", (move,), 0, {})
        assert found.answer()[0] == sentence
        assert not any(other in found.answer() for other in said if other != sentence)
        assert bool(found.worth) == (move is above)


def test_a_note_says_why_one_failed_and_nothing_of_what_is_gone():
    moves = (
        Move("gone", "a", text="deleted", error="Gone"),
        Move("failed", "b", error="Timeout", message="w"),
    )
    assert News("", moves, 0, {}).context()["reasons"] == {"Timeout": "w"}


def test_a_folder_of_a_disk_that_is_not_mounted_is_not_gone(tmp_path):
    """An empty folder above may be a mount point; next to others a missing folder was deleted."""
    mount = tmp_path / "disk"
    for place in (mount / "model", mount / "run" / "model"):
        shutil.rmtree(mount, ignore_errors=True)
        assert not folder_is_gone(f"file://{place}"), "no folder above it"
        mount.mkdir()
        assert not folder_is_gone(f"file://{place}"), "nothing in the folder above it"
        (mount / "other").mkdir()
        assert folder_is_gone(f"file://{place}")
        place.mkdir(parents=True)
        assert not folder_is_gone(f"file://{place}")


def test_every_column_of_what_was_read_is_declared(tmp_path):
    plant(tmp_path / "r.db", 1)
    _, tables = schema(tmp_path / "r.db")
    columns = [name for name, _ in tables["results"]]
    place = ["identity", "file", "state", "tokens", "method", "run", "stamp"]
    assert columns[: len(place)] == place
    assert sorted(columns[len(place) :]) == sorted(database._Result.__annotations__)


def test_a_stored_reading_comes_back_whole():
    """Each field with a value that is not its default, so that a field which is forgotten shows."""
    found = screen(demo=True).checkpoints[0]
    fields = {field.name for field in dataclasses.fields(Reading)}
    reading = Reading(**{name: getattr(found, name) for name in fields})
    texts = {"repo", "revision", "tensor", "file", "dtype", "no_ratio", "base"}
    changed = dataclasses.replace(
        reading,
        **{name: f"another {name}" for name in texts},
        warnings=("one", "two"),
        shape=(7, 9),
        tied=True,
        parameters=5,
        sketch=reading.sketch[::-1],
        body=b"12345678",
    )
    stored = database._result_of(changed)
    resolutions = {reading.tokenizer: reading.resolution}
    back = database._reading_of(stored, reading.target, resolutions)
    cost = {"bytes_read", "requests", "seconds"}  # none this time
    by_comparison = {"common"}  # depends on the other checkpoints of a screening
    figures = {"gaps", "ratio"}
    for name in fields - cost - by_comparison - figures:
        assert getattr(back, name) == getattr(changed, name), name
    kept = numbers_of(back.gaps, back.ratio)
    assert kept.tolist() == numbers_of(reading.gaps, reading.ratio).tolist()


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        *(("results", "numbers", value) for value in (b"", b"x" * 7, "text", None)),
        *(("results", "warnings", value) for value in ("[1]", "{", "[" * 9000, None)),
        *(("results", "v_rows", value) for value in (0, -1, "many", None)),
        *(("results", "dtype", value) for value in ("", "F" + "9" * 5000, None)),
        *(("results", "sketch", value) for value in (b"x", "text")),
        ("results", "body", b"x" * 13),
        ("results", "tied", 7),
        ("results", "repo", 7),
        *(("tokenizers", "resolution", value) for value in ("", "[]", "{}", '{"domain": 1}', None)),
    ],
)
def test_a_damaged_row_is_a_sentence(tmp_path, table, column, value):
    place = tmp_path / "r.db"
    plant(place, 2)
    with closing(sqlite3.connect(place)) as connection, connection:
        connection.execute(f"UPDATE {table} SET {column} = ?", [value])
    damage = pytest.raises(UsageError, match=r"is damaged \(.*\); begin a new registry")
    with damage, database.to_read(place) as known:
        queries.query(known, "ratio", None, None)
