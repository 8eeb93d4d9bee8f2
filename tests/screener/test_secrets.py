"""Passwords and signatures of addresses: for the request alone, and in nothing that is shown or kept."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from pathlib import Path

import pytest
from faulty_proxy import WebServer
from gguf_files import matrix, write
from lmeval_screener.checkpoints.account import Cache
from lmeval_screener.registry.database import identity_of, to_write
from lmeval_screener.targets.names import parse_target

from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import UsageError, without_secrets
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.options import command_line

SECRETS = ("me-SECRET", "word-SECRET", "signed-SECRET", "night-SECRET")
NOWHERE = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("http://me:word@host:8000/m?X-Amz-Signature=0f&b=1", "http://host:8000/m"),
        ("HTTPS://me:w@rd@host/m", "HTTPS://host/m"),
        ("https://token@host/m#access_token=1", "https://host/m"),
        ("sftp://me:word@host:22/runs/step?", "sftp://host:22/runs/step?"),
        ("s3://key:word@bucket/run/*", "s3://bucket/run/*"),
        ("az://box/m?sv=1&sig=2", "az://box/m"),
        (
            "abfss://box@account.dfs.core.windows.net/m",
            "abfss://box@account.dfs.core.windows.net/m",
        ),
        ("hf://org/name@v1", "hf://org/name@v1"),
        ("org/name@v1", "org/name@v1"),
        (
            "got 'http://me:w@h/m?s=1', http://h/n?s=2; what now?",
            "got 'http://h/m', http://h/n; what now?",
        ),
        ("--base=http://me:w@h/m?s=1", "--base=http://h/m"),
    ],
)
def test_an_address_without_its_secrets(text, public):
    assert without_secrets(text) == public
    assert str(UsageError(text)) == public


@pytest.mark.parametrize(
    "address",
    [
        "http://me:word@host/m?sig=0f",
        "sftp://me:word@host/runs",
        "s3://key:word@bucket/run",
        "ftp://a:b@c/d?e=f",
    ],
)
def test_a_target_keeps_its_secrets_apart(address):
    target = parse_target(address)
    assert target.address == address
    public = without_secrets(address)
    assert {target.repo, target.shown, target.name, target.place} == {public}
    assert identity_of(target, target.repo) == public
    assert "word" not in repr(target)
    assert parse_target(f"{address}x").at(f"{address}/y").repo == without_secrets(f"{address}/y")


def test_a_command_is_kept_without_secrets():
    words = [
        "screen-checkpoints",
        "http://me:w@h/m?s=1&t='2'&u=3",
        "--tokenizer=http://me:w@h/t?s=1",
        "a b",
    ]
    kept = "screen-checkpoints http://h/m --tokenizer=http://h/t 'a b'"
    assert command_line(words) == kept
    assert command_line(["x", "a\udcff"]) == "x 'a\\udcff'"


def test_nothing_that_a_night_leaves_holds_a_secret(in_process, tmp_path):
    shutil.copytree(data_folder("demo") / "sums-20", tmp_path / "served" / "m")
    nights = []
    with WebServer(tmp_path / "served") as web:
        host = web.endpoint.removeprefix("http://")

        def night(signature: str, place: str, *options: str) -> None:
            address = f"http://me-SECRET:word-SECRET@{host}/{place}?signature={signature}"
            done = in_process(address, "--registry", "r.db", *options, endpoint=NOWHERE)
            nights.append(done.stdout + done.stderr)

        night("signed-SECRET", "m", "-o", "page.html")
        night("night-SECRET", "m", "-o", "page.json")
        night("signed-SECRET", "m", "--shortlist", "1")
        night("signed-SECRET", "none")
        night(
            "signed-SECRET",
            "m",
            "--tokenizer",
            f"http://me-SECRET:word-SECRET@{host}/t?s=signed-SECRET",
        )
        night(
            "night-SECRET",
            "m",
            "--base",
            f"http://me-SECRET:word-SECRET@{host}/none?s=signed-SECRET",
        )
    assert "without the user name, password or query" in nights[2]
    left = [
        place for place in tmp_path.rglob("*") if place.is_file() and "served" not in place.parts
    ]
    assert {"page.html", "page.json", "r.db"} <= {place.name for place in left}
    for secret in SECRETS:
        assert not any(secret in night for night in nights)
        assert not [place for place in left if secret.encode() in place.read_bytes()]
    with sqlite3.connect(tmp_path / "r.db") as registry:
        read = registry.execute("SELECT DISTINCT identity FROM seen WHERE error IS NULL").fetchall()
        states = registry.execute("SELECT DISTINCT state FROM results").fetchall()
    registry.close()
    assert read == [(f"{web.endpoint}/m",)]
    assert len(states) == 1


def test_new_caches_and_registries_are_for_their_user_alone(tmp_path, monkeypatch):
    before = os.umask(0)
    try:
        Cache(tmp_path / "a" / "cache").write("rows", "key", b"content")
        with to_write(tmp_path / "r.db") as registry:
            registry.execute("SELECT 1")
            files = {
                place.name: stat.S_IMODE(place.stat().st_mode) for place in tmp_path.glob("r.db*")
            }
    finally:
        os.umask(before)
    assert set(files.values()) == {0o600}
    for place in [tmp_path / "a" / "cache", *(tmp_path / "a" / "cache").rglob("*")]:
        assert stat.S_IMODE(place.stat().st_mode) == (0o700 if place.is_dir() else 0o600), place


def bad_name(folder: Path) -> Path:
    place = folder / os.fsdecode(b"bad\xff\xfe")
    try:
        shutil.copytree(data_folder("demo") / "sums-80", place)
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    return place


def test_a_gguf_file_whose_name_is_not_utf_8_has_a_history(in_process, tmp_path):
    (file,) = write(tmp_path / "m.gguf", {"output.weight": ("F16", matrix())})
    place = tmp_path / os.fsdecode(b"a\xff.gguf")
    try:
        file.rename(place)
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    for end in ("html", "csv", "json"):
        done = in_process(place, "--registry", "r.db", "-o", f"x.{end}", endpoint=NOWHERE)
        assert done.returncode == 0, done.stderr
    for name in (place, f"{tmp_path.name}/{place.name}"):
        shown = in_process("registry", "show", "r.db", name, endpoint=NOWHERE, main=main)
        assert shown.returncode == 0, shown.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--registry", "r.db"],
        ["--registry", "r.db", "-o", "x.html"],
        ["-o", "x.csv"],
        ["--registry", "r.db", "--since", "yesterday"],
        ["--shortlist", "2", "--tasks", "gsm8k", "--emit", "list"],
    ],
)
def test_a_name_that_is_not_utf_8_costs_no_run(in_process, tmp_path, options):
    runs = tmp_path / "runs"
    shutil.copytree(data_folder("demo") / "sums-20", runs / "good")
    bad = bad_name(runs)
    for _ in range(2):
        done = in_process(runs, *options, endpoint=NOWHERE)
        assert done.returncode in (0, 5), done.stderr
        shutil.rmtree(tmp_path / "list", ignore_errors=True)
    if "--registry" in options:
        with sqlite3.connect(tmp_path / "r.db") as registry:
            assert registry.execute("SELECT count(*) FROM results").fetchone() == (2,)
        registry.close()
        shown = in_process("registry", "show", "r.db", bad, endpoint=NOWHERE, main=main)
        assert shown.returncode == 0, shown.stderr
        shutil.rmtree(bad)
        done = in_process(runs, *options, endpoint=NOWHERE)
        assert done.returncode in (0, 3, 5), done.stderr
