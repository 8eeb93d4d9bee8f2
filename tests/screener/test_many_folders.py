"""A bucket with many folders: its server is asked for no more than it can answer, however long that takes."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from lmeval_screener.checkpoints import stores
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.limits import Budget
from lmeval_screener.checkpoints.source import Sources
from lmeval_screener.cli import main
from lmeval_screener.screening import screen
from lmeval_screener.targets import parse_target

from lmeval_dispersion.cli import main as dispersion
from lmeval_dispersion.paths import data_folder

FOLDERS = 1000
PAGE = 400  # names in one answer
MOST = 200  # requests that it works on at a time; more are told to slow down, as S3 tells them


class Listings(ThreadingHTTPServer):
    """Lists a bucket ``box`` of so many folders; each answer takes its time."""

    request_queue_size = 4096
    daemon_threads = True

    def __init__(self, latency: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.latency, self.flying, self.most = latency, 0, 0
        self.answered: list[str] = []
        self.guard = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Listings

    def do_GET(self) -> None:
        asked = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        server, prefix, after = self.server, asked.get("prefix", ""), asked.get("continuation-token", "")
        with server.guard:
            server.flying += 1
            server.most = max(server.most, server.flying)
            full = server.flying > MOST
        time.sleep(server.latency)
        with server.guard:  # before the answer: whoever has it may ask the next at once
            server.flying -= 1
        if full:
            self.answer(503, "<Error><Code>SlowDown</Code></Error>")
            return
        server.answered.append(prefix)
        self.answer(200, listing(prefix, int(after or 0)))

    def answer(self, status: int, body: str) -> None:
        content = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def listing(prefix: str, begin: int) -> str:
    """ListObjectsV2's answer for the bucket's ``zoo`` or one folder of it."""
    if prefix == "zoo/":
        end = min(begin + PAGE, FOLDERS)
        parts = [
            f"<CommonPrefixes><Prefix>zoo/m{number:04d}/</Prefix></CommonPrefixes>"
            for number in range(begin, end)
        ]
        more = f"<NextContinuationToken>{end}</NextContinuationToken>" if end < FOLDERS else ""
    else:
        day, more = "<LastModified>2026-01-01T00:00:00.000Z</LastModified>", ""
        parts = [
            f"<Contents><Key>{prefix}{name}</Key>{day}<Size>9</Size>"
            f"<ETag>&quot;{number:032x}&quot;</ETag></Contents>"
            for number, name in enumerate(("config.json", "model.safetensors"))
        ]
    truncated = "true" if more else "false"
    return (
        f"<ListBucketResult><Name>box</Name><Prefix>{prefix}</Prefix><KeyCount>{len(parts)}</KeyCount>"
        f"<IsTruncated>{truncated}</IsTruncated>{more}{''.join(parts)}</ListBucketResult>"
    )


@pytest.fixture
def bucket(monkeypatch):
    """Starts a server; the settings of AWS's own tools toward it."""
    servers = []

    def start(latency: float) -> Listings:
        server = Listings(latency)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        return server

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def expanded(address: str, seconds: float, cache) -> list[str]:
    """What an address stands for, where a checkpoint may take so many seconds."""

    async def work() -> list[str]:
        async with Hub(cache=cache, offline=False, endpoint="http://127.0.0.1:9") as hub:
            budget = Budget(seconds)
            found = await budget.bounded(Sources(hub).expand(parse_target(address), budget))
            return [target.repo for target in found]

    return asyncio.run(work())


NAMES = [f"s3://box/zoo/m{number:04d}" for number in range(FOLDERS)]


def test_a_thousand_folders_are_never_asked_for_at_once(bucket, tmp_path):
    server = bucket(0.02)
    assert expanded("s3://box/zoo/*", 60, tmp_path) == NAMES
    assert server.most <= stores.LISTINGS < MOST
    folders = [prefix for prefix in server.answered if prefix != "zoo/"]
    assert len(folders) == len(set(folders)) == FOLDERS
    assert len(server.answered) - FOLDERS == -(-FOLDERS // PAGE)


def test_the_time_of_a_checkpoint_is_that_of_one_listing_not_of_all(bucket, tmp_path, monkeypatch):
    # Five at a time take 200 rounds of 10 ms: 2 s in all, and each of them a hundredth of 1 s.
    monkeypatch.setattr(stores, "LISTINGS", 5)
    server = bucket(0.01)
    assert expanded("s3://box/zoo/*", 1, tmp_path) == NAMES
    assert server.most <= 5


def test_a_glob_that_stands_for_nothing_has_its_line_with_the_reason(bucket, tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    bucket(0.0)
    assert main(["s3://box/zoo/none-*", "--format", "json"]) == 1
    assert "nothing matches s3://box/zoo/none-*; check the address" in "".join(capsys.readouterr())


def test_control_characters_in_names_reach_no_terminal(tmp_path, capsys, monkeypatch):
    """Of folders that are screened, of those that fail, and in every form."""
    demo = data_folder("demo")
    for name, step in (("a\x1b[31mb", "sums-10"), ("c\x1b]0;title\x07d", "sums-80")):
        shutil.copytree(demo / step, tmp_path / name)
    names = ["a\\x1b[31mb", "c\\x1b]0;title\\x07d"]
    assert sorted(c.label for c in screen([str(p) for p in tmp_path.iterdir()]).checkpoints) == names
    (tmp_path / "e\x1b[31mbad").mkdir()
    (tmp_path / "e\x1b[31mbad" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    for form in ("table", "csv", "json", "markdown"):
        main(["./*", "--domain", "math", "--format", form])
        out = "".join(capsys.readouterr())
        assert "\\x1b[31m" in out
        assert "\x1b[31m" not in out
        assert "\x07" not in out
    assert main(["--from", "none\x1b[31m"]) == dispersion(["audit", "./none\x1b[31m"]) == 2
    for line in capsys.readouterr().err.splitlines():
        assert "none\\x1b[31m" in line
        assert "\x1b" not in line
