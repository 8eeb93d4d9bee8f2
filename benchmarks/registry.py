"""What a whole registry costs: `python benchmarks/registry.py [--sizes 100,1000] [--storage hub]`.

A server process speaks the Hub's protocol and answers after 40 ms over a line of 200 MB/s that all
connections share. Checkpoints have Qwen2.5-7B's true shapes, so that each takes about 105 ranged requests.
The real command screens them in one process, with a registry, from an empty cache; then once more, when the
registry has all. Printed are seconds, CPU seconds a checkpoint (those of the server's process beside them),
requests, bytes and peak memory; then the time that latency alone takes (four dependent round trips, sixteen
checkpoints side by side), that of the line, and a plain loop over `huggingface_hub` that reads the same rows
one after another (timed on three checkpoints, and multiplied).

`--quota N` lets the Hub's resolver answer N requests in 10 s, and prints which share of that was used in the
windows between the first and the last.

`--storage s3` puts them into a bucket that a server of our own serves, as much of S3's protocol as is needed
after the same 40 ms; `--storage folders` screens them on disk; neither has a plain loop beside it.

`--ray` compares one process with a Ray cluster of two nodes of one core instead, over folders with links to
the demo's files, or (`--true-shapes`) to one of those checkpoints, in turns: seconds of the command, CPU
seconds of it and of the whole cluster. The cluster is there before; a command starts its actors.

At the end 1,500 and 5,000 checkpoints of one group are ranked: seconds and comparisons.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import email.utils
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("", "tests/screener", "screener", "benchmarks")]

from benchmarks.server_process import ServerProcess  # noqa: E402

LATENCY, BANDWIDTH, SIDE_BY_SIDE, ROUND_TRIPS = 0.04, 200e6, 16, 4
BASES = 20
SHARD = "model-00004-of-00004.safetensors"


def true_checkpoints(folder: Path, count: int) -> list[Path]:
    """Checkpoints of Qwen2.5-7B's shapes, of whose output rows those are there that are read."""
    import numpy as np
    from checkpoints import write_qwen_7b

    from screener import TOKENIZER, token_ids

    draw, ids = np.random.default_rng(0), token_ids()
    bases = []
    for number in range(count):
        rows = {row: draw.normal(size=(1, 3584)) for row in ids}
        base = write_qwen_7b(folder / f"base-{number}", rows=rows)
        shutil.copy(TOKENIZER, base / "tokenizer.json")
        bases.append(base)
    return bases


WINDOW = 10.0  # seconds of a quota


def serve(count: int, storage: str, quota: int, folder: Path) -> None:
    """Serve ``count`` checkpoints until standard input ends; each line there is answered by the counts."""
    from hub_server import HubServer

    bases = true_checkpoints(folder, BASES)

    def told(counts: Any) -> None:
        for _ in sys.stdin:
            print(json.dumps({**counts(), "cpu": time.process_time()}), flush=True)

    if storage == "s3":
        asyncio.run(serve_bucket({f"model-{n:05d}": bases[n % BASES] for n in range(count)}, told))
        return
    for number in range(count):
        place = folder / f"model-{number:05d}"
        place.mkdir()
        for path in bases[number % BASES].iterdir():
            (place / path.name).symlink_to(path)
    if storage == "folders":
        print("no address", flush=True)
        told(lambda: {"requests": 0, "bytes": 0})
        return
    quotas = {"resolvers": (quota, WINDOW), "pages": (10_000, 300.0), "api": (10_000, 300.0)} if quota else {}
    with HubServer(latency=LATENCY, bandwidth=BANDWIDTH, quotas=quotas) as server:
        for number in range(count):
            place = folder / f"model-{number:05d}"
            server.add(f"org/model-{number:05d}", place, parameters=7_615_616_512)
        print(server.endpoint, flush=True)
        told(
            lambda: {
                "requests": len(server.requests),
                "bytes": server.sent,
                "windows": server.quotas.ended["resolvers"],
                "refusals": server.quotas.refusals["resolvers"],
            }
        )


class BucketServer(asyncio.Protocol):
    """A connection to a bucket of folders: a page of a listing, or a range of an object, after `LATENCY`."""

    folders: dict[str, Path]
    requests = sent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._received = transport, b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head, self._received = self._received[:end].decode(), self._received[end + 4 :]
            fields, body = self._reply(
                head.split(" ", 2)[1], re.search(r"(?i)\nrange: bytes=(\d+)-(\d+)", head)
            )
            BucketServer.requests += 1
            BucketServer.sent += len(body)
            date = email.utils.formatdate(0, usegmt=True)
            reply = f"HTTP/1.1 {fields}Last-Modified: {date}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            asyncio.get_running_loop().call_later(LATENCY, self._transport.write, reply + body)

    def _reply(self, target: str, span: re.Match[str] | None) -> tuple[str, bytes]:
        url = urlsplit(target)
        if "list-type=2" in url.query:
            name = parse_qs(url.query)["prefix"][0].rstrip("/")
            objects = "".join(
                f"<Contents><Key>{name}/{path.name}</Key><Size>{path.stat().st_size}</Size><ETag>"
                f"{self._etag(name, path)}</ETag>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                for path in self.folders[name].iterdir()
            )
            return "200 OK\r\n", f"<ListBucketResult>{objects}</ListBucketResult>".encode()
        _, _, name, file = unquote(url.path).split("/")
        path = self.folders[name] / file
        size = path.stat().st_size
        begin, end = (int(span[1]), min(int(span[2]) + 1, size)) if span else (0, size)
        with path.open("rb") as opened:
            body = os.pread(opened.fileno(), end - begin, begin)
        status = f"206 Partial Content\r\nContent-Range: bytes {begin}-{end - 1}/{size}\r\n"
        return f"{status}ETag: {self._etag(name, path)}\r\n", body

    @staticmethod
    def _etag(name: str, path: Path) -> str:
        """The same for a tokenizer that lies beside many checkpoints, and for no two files of weights."""
        content = path.name if path.suffix == ".json" else f"{name}/{path.name}"
        return f'"{hashlib.md5(content.encode()).hexdigest()}"'


async def serve_bucket(folders: dict[str, Path], told: Any) -> None:
    """Serve folders as those of the bucket ``box``."""
    BucketServer.folders = folders
    server = await asyncio.get_running_loop().create_server(BucketServer, "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.to_thread(told, lambda: {"requests": BucketServer.requests, "bytes": BucketServer.sent})


def environment(server: ServerProcess, home: Path) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "screener")])
    env |= {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    if not server.endpoint.startswith("http"):
        del env["HF_ENDPOINT"]
    env |= {"AWS_ENDPOINT_URL": server.endpoint, "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
    env |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    return env | {"PYTHONPATH": path}


def screened(server: ServerProcess, names: list[str], folder: Path, label: str) -> float:
    """Run the command once and print what it cost; returns its seconds."""
    registry, lines = folder / "registry.duckdb", folder / "lines.jsonl"
    command = ["-m", "lmeval_screener", *names, "--registry", str(registry), "--output", str(lines)]
    command += ["--timeout", "600"]
    before, start = server.counts(), time.perf_counter()
    pid = os.posix_spawn(sys.executable, [sys.executable, *command], environment(server, folder / "hf"))
    _, status, usage = os.wait4(pid, 0)
    seconds, after = time.perf_counter() - start, server.counts()
    summary = json.loads(lines.read_text().splitlines()[-1])["summary"]
    count = summary["totals"]["checkpoints"]
    if os.waitstatus_to_exitcode(status) or count != len(names):
        print(f"    {label}: exit {os.waitstatus_to_exitcode(status)}, {count} of {len(names)} screened")
    requests, sent = after["requests"] - before["requests"], after["bytes"] - before["bytes"]
    print(
        f"{label:<14} {seconds:9.1f} {1000 * (usage.ru_utime + usage.ru_stime) / len(names):12.1f} "
        f"{1000 * (after['cpu'] - before['cpu']) / len(names):10.1f} "
        f"{requests:10,} {requests / len(names):8.1f} {sent / 1e6:9.1f} {usage.ru_maxrss / 1024:8.0f}",
        flush=True,
    )
    return seconds


def plain(server: ServerProcess, folder: Path) -> float:
    """Seconds a checkpoint of a plain loop over `huggingface_hub`, from three of them."""
    home = folder / "plain"
    command = [sys.executable, str(ROOT / "benchmarks" / "screener.py"), "--child"]
    names = [f"org/model-{number:05d}" for number in range(3)]
    done = subprocess.run(
        [*command, "get_safetensors_metadata, GET a row", *names],
        env=environment(server, home), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"]) / 3


def ranking() -> None:
    """Seconds and comparisons of one group."""
    import numpy as np
    from lmeval_screener.ranking.ties import compared
    from separation import siblings

    some = siblings(np.random.default_rng(0), 100, 0.02, "cosine")
    for count in (1500, 5000):
        gaps = (some * 50)[:count]
        start = time.process_time()
        made = compared(gaps).comparisons
        print(
            f"ranking one group of {count:,}: {time.process_time() - start:.2f} s CPU, {made:,} comparisons"
        )


def cpu_of_descendants() -> dict[int, float]:
    """CPU seconds of every process below this one."""
    parents, spent = {}, {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = place.read_text().rpartition(")")[2].split()
            parents[int(place.parent.name)] = int(words[1])
            spent[int(place.parent.name)] = sum(map(int, words[11:13])) / os.sysconf("SC_CLK_TCK")
    found: dict[int, float] = {}
    below = {os.getpid()}
    while below := {pid for pid, parent in parents.items() if parent in below}:
        found |= {pid: spent[pid] for pid in below}
    return found


def cost(command: list[str], env: dict[str, str]) -> tuple[float, float]:
    """Seconds of a command, and CPU seconds of it and of all else below this process meanwhile."""
    before, start = cpu_of_descendants(), time.perf_counter()
    running, seen = subprocess.Popen(command, env=env), {}
    while running.poll() is None:
        # Asked while they live: Ray's actors leave their time to nobody.
        seen |= cpu_of_descendants()
        time.sleep(0.1)
    seconds = time.perf_counter() - start
    if running.returncode:
        raise SystemExit(f"exit {running.returncode}")
    return seconds, sum(spent - before.get(pid, 0.0) for pid, spent in seen.items())


def clusters(sizes: list[int], rounds: int, true_shapes: bool) -> None:
    """Seconds of the command over folders, in one process and on a Ray cluster of two nodes of one core."""
    from ray.cluster_utils import Cluster

    from lmeval_dispersion.paths import data_folder

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "screener")])
    # Ray's workers are nice to others (15): on a machine that others use that would be what is measured.
    os.environ |= {"RAY_worker_niceness": "0"}
    memory = 100 * 2**20
    head = {"num_cpus": 1, "object_store_memory": memory, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1, object_store_memory=memory)
    cluster.wait_for_nodes()
    print(f"{'':<24} {'seconds':>9} {'CPU s':>8} {'load':>6}", flush=True)
    try:
        for count in sizes:
            with tempfile.TemporaryDirectory() as folder:
                names, base = Path(folder) / "names.txt", data_folder("demo") / "sums-00"
                if true_shapes:
                    (base,) = true_checkpoints(Path(folder), 1)
                places = [Path(folder) / f"model-{number:05d}" for number in range(count)]
                for place in places:
                    place.mkdir()
                    for path in base.iterdir():
                        (place / path.name).symlink_to(path)
                names.write_text("\n".join(map(str, places)))
                command = [sys.executable, "-m", "lmeval_screener", "--from", str(names), "--quiet"]
                command += ["--output", str(Path(folder) / "out.jsonl"), "--timeout", "600"]
                env = os.environ | {"RAY_ADDRESS": cluster.address, "OMP_NUM_THREADS": "1"}
                env["HF_HOME"] = str(Path(folder) / "hf")
                for engine in ("process", "ray") * rounds:
                    seconds, spent = cost([*command, "--engine", engine], env)
                    lines = (Path(folder) / "out.jsonl").read_text().splitlines()
                    screened = json.loads(lines[-1])["summary"]["totals"]["checkpoints"]
                    if screened != count:
                        raise SystemExit(f"{screened} of {count} screened")
                    label, load = f"{count:,} folders, {engine}", os.getloadavg()[0]
                    print(f"{label:<24} {seconds:9.1f} {spent:8.1f} {load:6.1f}", flush=True)
    finally:
        cluster.shutdown()


def main() -> None:
    """Print a table for every size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="100,1000", help="numbers of checkpoints (default: 100,1000)")
    parser.add_argument("--ray", action="store_true", help="folders only: one process and a Ray cluster")
    parser.add_argument(
        "--storage", choices=("hub", "s3", "folders"), default="hub", help="where they lie (default: hub)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of each with --ray (default: 1)")
    parser.add_argument("--true-shapes", action="store_true", help="with --ray: of a model of 7B")
    parser.add_argument("--quota", type=int, default=0, help="of the Hub's resolver in 10 s (default: none)")
    hidden = ("N", "STORAGE", "QUOTA", "FOLDER")
    parser.add_argument("--serve", nargs=4, metavar=hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        count, storage, quota, folder = args.serve
        serve(int(count), storage, int(quota), Path(folder))
        return
    if args.ray:
        clusters(list(map(int, args.sizes.split(","))), args.rounds, args.true_shapes)
        return
    ranking()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print(
        f"{'':<14} {'seconds':>9} {'CPU ms each':>12} {'server ms':>10} {'requests':>10} "
        f"{'each':>8} {'MB':>9} {'peak MB':>8}"
    )
    for count in map(int, args.sizes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            server = ServerProcess(__file__, count, args.storage, args.quota, Path(folder))
            try:
                place = {"hub": "org/", "s3": "s3://box/", "folders": f"{folder}/"}[args.storage]
                names = [f"{place}model-{number:05d}" for number in range(count)]
                sent = server.counts()["bytes"]
                seconds = screened(server, names, Path(folder), f"{count:,}, cold")
                line = (server.counts()["bytes"] - sent) / BANDWIDTH
                if args.quota:
                    counts = server.counts()
                    full = [min(used, args.quota) for used in counts["windows"][1:]]
                    print(
                        f"{'':<14} of the quota {sum(full) / max(1, len(full)) / args.quota:.1%} was used in "
                        f"{len(full)} windows; {counts['refusals']} requests were refused",
                        flush=True,
                    )
                    continue
                screened(server, names, Path(folder), f"{count:,}, known")
                if args.storage != "hub":
                    continue
                latency = ROUND_TRIPS * LATENCY * -(-count // SIDE_BY_SIDE)
                loop = plain(server, Path(folder)) * count
                print(
                    f"{'':<14} latency alone {latency:.1f} s, the line {line:.1f} s: "
                    f"{seconds / max(latency, line):.1f} x the larger; plain loop {loop:.0f} s: "
                    f"{loop / seconds:.1f} x ours",
                    flush=True,
                )
            finally:
                server.close()


if __name__ == "__main__":
    main()
