"""Gauge controls in a registry: kept to the last digit, over the rows that they were read over, or read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from checkpoints import write_checkpoint
from hub_server import HubServer
from lmeval_screener import screen, screening
from lmeval_screener.errors import ScreeningError
from lmeval_screener.ranking.controls import Control, Controls
from lmeval_screener.reading import Reader
from lmeval_screener.registry.options import kept_in
from lmeval_screener.targets.target import parse_target
from lmeval_screener.tokens.sets import load_token_set
from test_controls import LLAMA, SETS, TOKENIZER, R, T, V

duckdb = pytest.importorskip("duckdb", reason="the extra [registry] is not installed")

WIDE = 2048  # so that the bytes allow fewer rows than 256


def make(place, seed=0, *, d=16, dtype="F32", rows=V, norm=True):
    draw = np.random.default_rng(seed)
    tensors = {"lm_head.weight": (dtype, draw.normal(size=(rows, d)) + seed / 10)}
    if norm:
        tensors["model.norm.weight"] = (dtype, draw.uniform(0.5, 2, size=d))
    write_checkpoint(place, tensors, config=LLAMA)
    (place / "tokenizer.json").write_bytes(TOKENIZER)
    return str(place)


def plain(found):
    """Controls as what can be compared exactly."""
    if not isinstance(found, Controls):
        return found
    parts = [
        (one.mean, one.se, one.left_out_domain.tolist(), one.left_out_reference.tolist())
        if isinstance(one, Control)
        else one
        for one in (found.centred, found.final_norm)
    ]
    rest = found.sample, found.tensor, found.row_norm, found.effective_rank, found.random_tokens
    return [*parts, *rest]


def of(result):
    assert not result.failed, result.failed
    return {c.repo: plain(c.controls) for c in result.checkpoints}


def document(result):
    """The document without what reading costs."""
    whole = {**result.to_dict()}
    whole["checkpoints"] = [
        {k: v for k, v in one.items() if k not in ("bytes_read", "requests", "seconds")}
        for one in whole["checkpoints"]
    ]
    del whole["totals"]
    return whole


def kept(place, columns="repo, r.run, c.run"):
    with duckdb.connect(str(place), read_only=True) as connection:
        return connection.execute(
            f"SELECT {columns} FROM controls c JOIN results r USING (identity, file, state, tokens, method)"
        ).fetchall()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    from huggingface_hub import constants

    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        caches = iter(range(100))

        def asked(*names, **settings):
            """Screens with an empty cache; what was asked of the Hub beside."""
            monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / f"assets-{next(caches)}"))
            server.requests.clear()
            return screen(names, **settings), list(server.requests)

        server.asked = asked
        yield server


def test_a_second_run_has_the_same_controls_and_reads_nothing(hub, tmp_path):
    few = max(*T, *R) + 1
    assert few < V
    hub.add("acme/m0", make_path(tmp_path, 0))
    hub.add("acme/no-norm", make_path(tmp_path, 3, norm=False))
    hub.add("acme/few-rows", make_path(tmp_path, 4, rows=few))
    settings = {"registry": tmp_path / "r.duckdb", "controls": True}
    first, _ = hub.asked("acme/*", **settings)
    second, requests = hub.asked("acme/*", **settings)
    assert {request.part for request in requests} == {"list"}
    assert document(second) == document(first)
    assert of(second) == of(first)
    # Reasons that lie in the commit are kept too, each at its place.
    assert "no final norm of a known name" in of(second)["acme/no-norm"][1]
    assert "a sample of rows cannot be taken" in of(second)["acme/few-rows"]
    assert of(second)["acme/m0"][2] == 256
    # A reason is asked for again by another version, which may know more; figures are not.
    with duckdb.connect(str(tmp_path / "r.duckdb")) as connection:
        connection.execute("UPDATE controls SET version = '0.0'")
    third, requests = hub.asked("acme/*", **settings)
    assert of(third) == of(first)
    told = "".join(request.path for request in requests)
    assert "no-norm" in told
    assert "few-rows" in told
    assert "acme/m0" not in told
    again, requests = hub.asked("acme/*", refresh=True, **settings)
    assert len(requests) > 10
    assert of(again) == of(first)


def make_path(tmp_path, number, **settings):
    place = tmp_path / f"m{number}"
    make(place, number, **settings)
    return place


def test_controls_asked_for_later_are_read_alone_and_figures_stay(hub, tmp_path):
    for number in range(2):
        hub.add(f"acme/m{number}", make_path(tmp_path, number))
    place = tmp_path / "r.duckdb"
    without, _ = hub.asked("acme/*", registry=place)
    assert all(c.controls is None for c in without.checkpoints)
    later, requests = hub.asked("acme/*", registry=place, controls=True)
    # The tokenizer is known, on whatever machine the registry is read: only its hash is asked for.
    asked = {request.method for request in requests if request.path.endswith("tokenizer.json")}
    assert asked == {"HEAD"}
    fresh, _ = hub.asked("acme/*", controls=True)
    assert of(later) == of(fresh)
    figures = {c.repo: (c.gaps["cosine"].mean, c.revision) for c in without.checkpoints}
    assert {c.repo: (c.gaps["cosine"].mean, c.revision) for c in later.checkpoints} == figures
    assert all(c.bytes_read > 0 for c in later.checkpoints)
    _, requests = hub.asked("acme/*", registry=place, controls=True)
    assert {request.part for request in requests} == {"list"}
    assert len(kept(place)) == 2
    assert all(figures_of != controls_of for _, figures_of, controls_of in kept(place))
    with duckdb.connect(str(place), read_only=True) as connection:
        rows = connection.execute(
            "SELECT repo, centred, final_norm, row_norm, effective_rank, z FROM checkpoints"
        ).fetchall()
    shown = {c.repo: c.controls for c in fresh.checkpoints}
    assert len(rows) == 2
    for repo, centred, ratio, norm, rank, z in rows:
        one = shown[repo]
        assert (centred, ratio) == (one.centred.mean, one.final_norm.mean)
        assert (norm, rank, z) == (one.row_norm, one.effective_rank, one.random_tokens.z)


def test_another_size_of_the_sample_is_another_control(tmp_path):
    a, b = (make(tmp_path / name, seed, d=WIDE, dtype="BF16") for seed, name in enumerate("ab"))
    c = make(tmp_path / "c", 2, d=WIDE)  # rows of twice the bytes: half the sample for all
    settings = {"registry": tmp_path / "r.duckdb", "controls": True}
    narrow = of(screen([a, b], **settings))
    wide = of(screen([a, c], **settings))
    assert (narrow[a][2], wide[a][2]) == (183, 91)
    assert wide == of(screen([a, c], controls=True))
    assert wide[a][0] != narrow[a][0]
    # Both stay: neither run reads anything again.
    for names, controls in (([a, b], narrow), ([a, c], wide)):
        again = screen(names, **settings)
        assert of(again) == controls
        assert {one.bytes_read for one in again.checkpoints} == {0}
    assert len(kept(tmp_path / "r.duckdb")) == 4


def test_a_registry_of_before_goes_on(tmp_path):
    from lmeval_screener.registry import schema

    folders, place = [make(tmp_path / f"m{n}", n) for n in range(2)], tmp_path / "r.duckdb"
    first = screen(folders, registry=place)
    # The view of before: without the last columns and without the join that they come from.
    head, _, rest = schema._VIEW.partition(",\n       c.centred")
    _, _, rest = rest.partition("FROM (SELECT * FROM seen")
    begin, end = rest.index("LEFT JOIN (SELECT * FROM controls"), rest.index("LEFT JOIN runs")
    view = f"{head} FROM (SELECT * FROM seen{rest[:begin]}{rest[end:]}"
    assert "controls" not in view
    with duckdb.connect(str(place)) as connection:
        connection.execute(view)
        connection.execute("DROP TABLE controls")
        assert "centred" not in [row[0] for row in connection.execute("DESCRIBE checkpoints").fetchall()]
    second = screen(folders, registry=place, controls=True)
    assert of(second) == of(screen(folders, controls=True))
    gaps = {c.repo: c.gaps["cosine"].mean for c in first.checkpoints}
    assert {c.repo: c.gaps["cosine"].mean for c in second.checkpoints} == gaps
    assert len(kept(place)) == 2
    with duckdb.connect(str(place)) as connection:
        assert connection.execute("SELECT count(centred) FROM checkpoints").fetchone() == (2,)
        assert connection.execute("SELECT name FROM layout").fetchall() == [("screen-registry/1",)]


def test_passing_failures_and_those_of_a_folder_that_is_written_meanwhile_are_not_kept(tmp_path, monkeypatch):
    passing, written, fine = (
        make(tmp_path / name, n) for n, name in enumerate(("passing", "written", "fine"))
    )
    place, names, read = tmp_path / "r.duckdb", [passing, written, fine], screening.read_controls

    async def disturbed(reading, rows):
        if reading.target.repo == passing:
            raise ScreeningError("Unreachable", "no connection")
        if reading.target.repo == written:
            os.utime(tmp_path / "written" / "model.safetensors", (1, 1))
        return await read(reading, rows)

    monkeypatch.setattr(screening, "read_controls", disturbed)
    first = of(screen(names, registry=place, controls=True))
    assert first[passing] == "no connection"
    assert [row[0] for row in kept(place)] == [fine]
    monkeypatch.undo()
    assert of(screen(names, registry=place, controls=True)) == of(screen(names, controls=True))
    assert {row[0] for row in kept(place)} == set(names)


def test_an_interrupt_keeps_the_controls_that_are_there(tmp_path, monkeypatch):
    names, place = [make(tmp_path / f"m{n}", n) for n in range(4)], tmp_path / "r.duckdb"
    read, calls = screening.read_controls, []

    async def interrupted(reading, rows):
        calls.append(reading.target.repo)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return await read(reading, rows)

    monkeypatch.setattr(Reader, "side_by_side", 1)
    monkeypatch.setattr(screening, "read_controls", interrupted)
    domain, reference = SETS[0], load_token_set("reference", "reference")
    with kept_in(place, domain, reference, metric="cosine", refresh=False, command="") as session:
        result = screening.screen_targets(
            [parse_target(name) for name in names], domain=domain, reference=reference, controls=True,
            session=session, keep_on_interrupt=True,
        )  # fmt: skip
    found = of(result)
    assert len(found) == 4
    stopped = [name for name, one in found.items() if isinstance(one, str)]
    assert 1 <= len(stopped) <= 2
    assert all("run the same command again" in found[name] for name in stopped)
    assert {row[0] for row in kept(place)} == set(names) - set(stopped)
    monkeypatch.undo()
    assert of(screen(names, registry=place, controls=True)) == of(screen(names, controls=True))


KILLED = """
import os, signal, sys
from lmeval_screener import screen, screening
from lmeval_screener.registry.database import Session
keep, count = Session.keep_controls, 0
def killed(*arguments):
    global count
    keep(*arguments)
    count += 1
    if count == 2:
        os.kill(os.getpid(), signal.SIGKILL)
Session.keep_controls = killed
screen(sys.argv[2:], registry=sys.argv[1], controls=True)
"""


def test_what_a_killed_run_had_read_is_there(tmp_path):
    names, place = [make(tmp_path / f"m{n}", n) for n in range(4)], tmp_path / "r.duckdb"
    done = subprocess.run([sys.executable, "-c", KILLED, str(place), *names], timeout=60)
    assert done.returncode == -signal.SIGKILL
    result = screen(names, registry=place, controls=True)
    assert of(result) == of(screen(names, controls=True))
    rows = kept(place)
    assert len(rows) == 4
    (killed,) = {figures for _, figures, _ in rows}
    assert sum(controls == killed for _, _, controls in rows) == 2


def test_prune_forgets_controls_of_superseded_commits(tmp_path, capsys):
    from lmeval_dispersion.cli import main

    name, place = make(tmp_path / "m", 0), tmp_path / "r.duckdb"
    first = of(screen([name], registry=place, controls=True))
    make(tmp_path / "m", 1)
    os.utime(tmp_path / "m" / "model.safetensors", (2, 2))
    second = of(screen([name], registry=place, controls=True))
    assert second[name] != first[name]
    assert len(kept(place)) == 2
    assert main(["registry", "prune", str(place)]) == 0
    capsys.readouterr()
    ((content,),) = kept(place, "c.content")
    assert json.loads(content)["centred"]["mean"] == second[name][0][0]


def test_what_nobody_foresaw_in_one_checkpoints_controls_costs_no_other(tmp_path, monkeypatch):
    names = [make(tmp_path / f"c{seed}", seed) for seed in range(3)]
    real = screening.read_controls

    async def read(reading, rows):
        if reading.snapshot.repo == names[1]:
            raise RuntimeError("a row of tin")
        return await real(reading, rows)

    monkeypatch.setattr(screening, "read_controls", read)
    monkeypatch.delenv("DISPERSION_DEBUG", raising=False)
    found = of(screen(names, controls=True))
    assert "RuntimeError: a row of tin; please report it" in found.pop(names[1])
    assert len(found) == 2
    assert not any(isinstance(one, str) for one in found.values())


def test_controls_are_counted_anew_while_they_are_read(tmp_path):
    names, place, told = [make(tmp_path / f"c{seed}", seed) for seed in range(3)], tmp_path / "r.duckdb", []
    screen(names[:1], controls=True, registry=place)
    screen(names, controls=True, registry=place, progress=lambda *words: told.append(words))
    rows, controls = told[:4], told[4:]
    assert [words[:2] for words in rows] == [(done, 3) for done in range(4)]
    # Those of the first are in the registry.
    assert [words[:2] for words in controls] == [(done, 2) for done in range(3)]
    assert [controls[0][2], *sorted(words[2] for words in controls[1:])] == [
        "controls", *(f"controls of {name}" for name in names[1:])
    ]  # fmt: skip
