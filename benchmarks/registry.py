"""Time and memory of a registry: `python benchmarks/registry.py [--sizes N,N] [--known]`.

A server process speaks the Hub's protocol and answers after 40 ms over a line of 200 MB/s that all
connections share. Checkpoints have Qwen2.5-7B's true shapes, so that each takes about 105 ranged requests.
The real command screens them, with a registry, from an empty cache; then once more, when the registry has
all. Printed are seconds, CPU seconds a checkpoint (those of the server's process beside them), requests,
bytes and peak memory; then the time that latency alone takes (four dependent round trips, sixteen checkpoints
side by side) and that of the line. Requests by kind follow each run.

With ``--known`` nothing is read: the registry has one group of planted figures, and printed are the CPU
seconds of each question to it, and their ratio between the largest and the smallest size (default:
3000,10000).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("", "tests/screener", "screener")]

from benchmarks.shared import ServerProcess, many_files, math_and_reference, parsed, without_hub  # noqa: E402

LATENCY, BANDWIDTH, SIDE_BY_SIDE, ROUND_TRIPS = 0.04, 200e6, 16, 4
BASES = 20
TOKENIZER = ROOT / "tests" / "data" / "tokenizers" / "qwen2.5.json"
PARAMETERS = 7_615_616_512
#: Questions to a registry R whose checkpoints an organisation lists, answered without reading.
QUESTIONS = {
    "query": ("lmeval_dispersion", "registry", "query", "R"),
    "query, JSON": ("lmeval_dispersion", "registry", "query", "R", "--format", "json"),
    "diff, JSON": ("lmeval_dispersion", "registry", "diff", "R", "2000-01-01", "--format", "json"),
    "org/*, table": ("lmeval_screener", "org/*", "--registry", "R"),
    "org/*, JSON": ("lmeval_screener", "org/*", "--registry", "R", "--format", "json"),
    "org/*, page": ("lmeval_screener", "org/*", "--registry", "R", "--format", "html"),
    "--since, table": ("lmeval_screener", "org/*", "--registry", "R", "--since", "2000-01-01"),
    "--since, JSON": (
        *(
            "lmeval_screener",
            "org/*",
            "--registry",
            "R",
            "--since",
            "2000-01-01",
            "--format",
            "json",
        ),
    ),
}


def true_checkpoints(folder: Path, count: int) -> list[Path]:
    """Checkpoints of Qwen2.5-7B's shapes, of whose output rows those are there that are read."""
    import numpy as np
    from checkpoints import write_qwen_7b

    domain, reference = math_and_reference(TOKENIZER.read_bytes())
    draw, bases = np.random.default_rng(0), []
    for number in range(count):
        rows = {row: draw.normal(size=(1, 3584)) for row in [*domain, *reference]}
        bases.append(write_qwen_7b(folder / f"base-{number:02d}", rows=rows))
        shutil.copy(TOKENIZER, bases[-1] / "tokenizer.json")
    return bases


def serve(count: int, folder: Path) -> None:
    """Serve ``count`` checkpoints until standard input ends; each line there is answered by the counts."""
    from hub_server import HubServer

    bases = true_checkpoints(folder, BASES)
    with HubServer(latency=LATENCY, bandwidth=BANDWIDTH) as server:
        for number in range(count):
            place = folder / f"model-{number:05d}"
            place.mkdir()
            for path in bases[number % BASES].iterdir():
                (place / path.name).symlink_to(path)
            server.add(f"org/model-{number:05d}", place, parameters=PARAMETERS)
        print(server.endpoint, flush=True)
        for _ in sys.stdin:
            counts = {
                "requests": len(server.requests),
                "bytes": server.sent,
                "cpu": time.process_time(),
                "kinds": Counter(request.part for request in server.requests),
            }
            print(json.dumps(counts), flush=True)


def serve_known(count: int, folder: Path) -> None:
    """Serve the list of ``count`` checkpoints that a new registry has; until standard input ends."""
    from hub_server import HubServer
    from planted_registry import plant

    with HubServer() as server:
        plant(folder / "registry.db", count, server)
        print(server.endpoint, flush=True)
        sys.stdin.read()


def cpu_of(question: tuple[str, ...], folder: Path, endpoint: str) -> float:
    """CPU seconds of one question; stops where it is not answered."""
    words = [str(folder / "registry.db") if word == "R" else word for word in question]
    env = without_hub(HF_HOME=str(folder / "hf"), HF_ENDPOINT=endpoint, OPENBLAS_NUM_THREADS="1")
    output = (
        os.POSIX_SPAWN_OPEN,
        1,
        str(folder / "answer"),
        os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
        0o600,
    )
    quiet = (
        os.POSIX_SPAWN_OPEN,
        2,
        str(folder / "errors"),
        os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
        0o600,
    )
    command = [sys.executable, "-m", *words]
    pid = os.posix_spawn(sys.executable, command, env, file_actions=[output, quiet])
    _, status, usage = os.wait4(pid, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 5):
        raise SystemExit((folder / "errors").read_text()[-2000:])
    return usage.ru_utime + usage.ru_stime


def known(sizes: list[int]) -> None:
    """Print the CPU seconds of each question at each size, and their ratio."""
    seconds: dict[str, list[float]] = {name: [] for name in QUESTIONS}
    for count in sizes:
        with tempfile.TemporaryDirectory() as folder:
            server = ServerProcess(__file__, count, folder, "known")
            try:
                for name, question in QUESTIONS.items():
                    seconds[name].append(cpu_of(question, Path(folder), server.endpoint))
            finally:
                server.close()
    print("CPU seconds".ljust(16) + "".join(f"{count:>9,}" for count in sizes) + "ratio".rjust(8))
    for name, of in seconds.items():
        print(f"{name:<16}" + "".join(f"{value:9.1f}" for value in of) + f"{of[-1] / of[0]:8.1f}")


def screened(server: ServerProcess, count: int, folder: Path, label: str) -> tuple[float, float]:
    """Run the command once and print what it cost; returns its seconds, and those that its bytes take."""
    env = without_hub(
        HF_HOME=str(folder / "hf"), HF_ENDPOINT=server.endpoint, DISPERSION_TIMEOUT="600"
    )
    result = folder / "result.json"
    names = [f"org/model-{number:05d}" for number in range(count)]
    command = ["-m", "lmeval_screener", *names]
    command += ["--registry", str(folder / "registry.db"), "--output", str(result)]
    before, start = server.counts(), time.perf_counter()
    pid = os.posix_spawn(sys.executable, [sys.executable, *command], env)
    _, status, usage = os.wait4(pid, 0)
    seconds, after = time.perf_counter() - start, server.counts()
    done = len(json.loads(result.read_text())["checkpoints"])
    if os.waitstatus_to_exitcode(status) or done != count:
        print(f"    {label}: exit {os.waitstatus_to_exitcode(status)}, {done} of {count} screened")
    requests, sent, cpu = (after[name] - before[name] for name in ("requests", "bytes", "cpu"))
    print(
        f"{label:<14} {seconds:9.1f} {1000 * (usage.ru_utime + usage.ru_stime) / count:12.1f} "
        f"{1000 * cpu / count:10.1f} {requests:10,} {requests / count:8.1f} {sent / 1e6:9.1f} "
        f"{usage.ru_maxrss / 1024:8.0f}",
        flush=True,
    )
    kinds = {kind: number - before["kinds"].get(kind, 0) for kind, number in after["kinds"].items()}
    print(
        f"{'':<14} {', '.join(f'{number:,} {kind}' for kind, number in kinds.items() if number)}",
        flush=True,
    )
    return seconds, sent / BANDWIDTH


def main() -> None:
    """Print a table for every size."""
    args = parsed(
        __doc__,
        (
            "--sizes",
            {"help": "numbers of checkpoints (default: 100,1000; with --known 3000,10000)"},
        ),
        ("--known", {"action": "store_true", "help": "questions to a registry that has all"}),
        hidden=("--serve", "+"),
    )
    if args.serve:
        count, folder, *planted = args.serve
        (serve_known if planted else serve)(int(count), Path(folder))
        return
    many_files()
    if args.known:
        known([int(count) for count in (args.sizes or "3000,10000").split(",")])
        return
    heads = f"\n{'':<14} {'seconds':>9} {'CPU ms each':>12} {'server ms':>10} {'requests':>10} "
    print(f"{heads}{'each':>8} {'MB':>9} {'peak MB':>8}")
    for count in map(int, (args.sizes or "100,1000").split(",")):
        with tempfile.TemporaryDirectory() as folder:
            server = ServerProcess(__file__, count, folder)
            try:
                seconds, line = screened(server, count, Path(folder), f"{count:,}, cold")
                screened(server, count, Path(folder), f"{count:,}, known")
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
