"""Time and memory of a whole registry: `python benchmarks/registry.py [--sizes 100,1000] [--storage hub]`.

A server process speaks the Hub's protocol and answers after 40 ms over a line of 200 MB/s that all
connections share. Checkpoints have Qwen2.5-7B's true shapes, so that each takes about 105 ranged requests.
The real command screens them, with a registry, from an empty cache; then once more, when the registry has
all. Printed are seconds, CPU seconds a checkpoint (those of the server's process beside them), requests,
bytes and peak memory; then the time that latency alone takes (four dependent round trips, sixteen checkpoints
side by side) and that of the line.

`--quota N` lets the Hub's resolver answer N requests in 10 s, and prints which share of that was used in the
windows between the first and the last. `--storage folders` screens them on disk, with `--engine ray` on the
cluster that RAY_ADDRESS names or one of this machine's own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("", "tests/screener", "screener", "benchmarks")]

from benchmarks.server_process import ServerProcess  # noqa: E402

LATENCY, BANDWIDTH, SIDE_BY_SIDE, ROUND_TRIPS = 0.04, 200e6, 16, 4
BASES = 20


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


def screened(server: ServerProcess, names: list[str], folder: Path, label: str, engine: str) -> float:
    """Run the command once and print what it cost; returns its seconds."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_ENDPOINT": server.endpoint} if server.endpoint.startswith("http") else {}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "screener")])
    registry, lines = folder / "registry.db", folder / "lines.jsonl"
    command = ["-m", "lmeval_screener", *names, "--registry", str(registry), "--output", str(lines)]
    command += ["--timeout", "600", "--engine", engine]
    before, start = server.counts(), time.perf_counter()
    pid = os.posix_spawn(sys.executable, [sys.executable, *command], env)
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


def main() -> None:
    """Print a table for every size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="100,1000", help="numbers of checkpoints (default: 100,1000)")
    parser.add_argument("--engine", choices=("process", "ray"), default="process", help="of folders")
    parser.add_argument(
        "--storage", choices=("hub", "folders"), default="hub", help="where they lie (default: hub)"
    )
    parser.add_argument("--quota", type=int, default=0, help="of the Hub's resolver in 10 s (default: none)")
    hidden = ("N", "STORAGE", "QUOTA", "FOLDER")
    parser.add_argument("--serve", nargs=4, metavar=hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        count, storage, quota, folder = args.serve
        serve(int(count), storage, int(quota), Path(folder))
        return
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
                place = {"hub": "org/", "folders": f"{folder}/"}[args.storage]
                names = [f"{place}model-{number:05d}" for number in range(count)]
                sent = server.counts()["bytes"]
                seconds = screened(server, names, Path(folder), f"{count:,}, cold", args.engine)
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
                screened(server, names, Path(folder), f"{count:,}, known", args.engine)
                if args.storage != "hub":
                    continue
                latency = ROUND_TRIPS * LATENCY * -(-count // SIDE_BY_SIDE)
                print(
                    f"{'':<14} latency alone {latency:.1f} s, the line {line:.1f} s: "
                    f"{seconds / max(latency, line):.1f} x the larger",
                    flush=True,
                )
            finally:
                server.close()


if __name__ == "__main__":
    main()
