"""The cost of one screening beside the other ways to read the same rows, on one loopback registry.

Every contender runs in a fresh process against the same server, which answers after 40 ms (opening a
connection costs as much again) over a line of 200 MB/s that all connections share. Checkpoints have
Qwen2.5-7B's true shapes (a sparse shard of 152064 x 3584 BF16 rows). Seconds are those of the work, without
the interpreter's start and imports, which are in the column "process"; requests and bytes are counted by
the server; memory is the process's peak.

    python benchmarks/screener.py                # all contenders: some minutes, 4 GB of disk
    python benchmarks/screener.py --quick        # ours only
    python benchmarks/screener.py --repeat 5
"""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("", "tests/screener", "screener")]

from benchmarks.registry import BANDWIDTH, LATENCY, PARAMETERS, TOKENIZER, true_checkpoints  # noqa: E402
from benchmarks.shared import in_a_child, math_and_reference, parsed, without_hub  # noqa: E402

FAMILY = [f"org/model-{number:02d}" for number in range(12)]
SHARD = "model-00004-of-00004.safetensors"
TENSOR = "lm_head.weight"
BYTES = 7168  # of a row


def rows_read() -> list[int]:
    domain, reference = math_and_reference(TOKENIZER.read_bytes())
    return [*domain, *reference]


# --- contenders: each reads the rows of one checkpoint (ours also of a family) ------------------------------


def ours(repos: list[str]) -> None:
    from lmeval_screener import screen

    result = screen(repos)
    if result.failed:
        raise SystemExit(str(result.failed))


def download(repos: list[str]) -> None:
    from huggingface_hub import hf_hub_download
    from safetensors import safe_open

    for repo in repos:
        path = hf_hub_download(repo, SHARD)
        with safe_open(path, framework="pt") as file:
            matrix = file.get_slice(TENSOR)
            for row in rows_read():
                matrix[row : row + 1]


def filesystem(repos: list[str]) -> None:
    from huggingface_hub import HfFileSystem

    for repo in repos:
        with HfFileSystem().open(f"{repo}/{SHARD}", "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            begin = 8 + length + json.loads(file.read(length))[TENSOR]["data_offsets"][0]
            for row in rows_read():
                file.seek(begin + row * BYTES)
                file.read(BYTES)


def metadata(repos: list[str]) -> None:
    import httpx
    from huggingface_hub import get_safetensors_metadata, hf_hub_url

    for repo in repos:
        files = get_safetensors_metadata(repo).files_metadata
        url = hf_hub_url(repo, SHARD)
        with httpx.Client(follow_redirects=True) as client:
            length = int.from_bytes(
                client.get(url, headers={"Range": "bytes=0-7"}).content, "little"
            )
            begin = 8 + length + files[SHARD].tensors[TENSOR].data_offsets[0]
            for row in rows_read():
                at = begin + row * BYTES
                client.get(
                    url, headers={"Range": f"bytes={at}-{at + BYTES - 1}"}
                ).raise_for_status()


CONTENDERS = {
    "ours": ours,
    "hf_hub_download + safe_open": download,
    "HfFileSystem, seek a row": filesystem,
    "get_safetensors_metadata, GET a row": metadata,
}


def child(name: str, repos: list[str]) -> None:
    """Run one contender and print what it cost."""
    import huggingface_hub.utils

    huggingface_hub.utils.disable_progress_bars()
    if name == "ours":
        # Imports are not the work, also those that wait for the first checkpoint on a server.
        import lmeval_screener.checkpoints.hub
        import lmeval_screener.result.answer
        import lmeval_screener.screening.run  # noqa: F401
    elif "safe_open" in name:
        import safetensors.torch  # noqa: F401
    start = time.perf_counter()
    CONTENDERS[name](repos)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "peak": peak}))


def measured(server: Any, home: Path, name: str, repos: list[str]) -> dict[str, float]:
    """One run of a contender in a fresh process."""
    requests, sent, start = len(server.requests), server.sent, time.perf_counter()
    variables = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(home), "OPENBLAS_NUM_THREADS": "1"}
    figures = in_a_child(
        sys.executable, __file__, "--child", name, *repos, **without_hub(**variables)
    )
    figures["process"] = time.perf_counter() - start
    return figures | {"requests": len(server.requests) - requests, "MB": (server.sent - sent) / 1e6}


def line(label: str, runs: list[dict[str, float]], base: float | None) -> float:
    """Print the median of some runs; returns the seconds."""
    median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    seconds = [run["seconds"] for run in runs]
    spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
    ratio = "" if base is None else f"{median['seconds'] / base:8.1f}x"
    print(
        f"{label:<40} {median['seconds']:8.3f} {spread:>13} {median['process']:8.2f} "
        f"{median['requests']:9.0f} {median['MB']:10.3f} {median['peak']:9.0f} {ratio}",
        flush=True,
    )
    return median["seconds"]


def seconds_to_rank(count: int) -> float:
    """Processor seconds to rank siblings that were read, with the guard, the chances and the answer."""
    from lmeval_screener.ranking import ranked
    from lmeval_screener.result.answer import group_sentences
    from screenings import ratio_of, result, screened

    members = [screened(f"m{i}", ratio=ratio_of(1 + i / 1e5, seed=i)) for i in range(count)]
    start = time.process_time()
    found = result(ranked(members))
    (group,) = found.groups
    group_sentences(group, "math")
    assert len([group.holds_best(c) for c in group.checkpoints]) == count
    return time.process_time() - start


def processor_seconds(*words: object, **variables: str) -> float:
    """Processor seconds of Python with these arguments, its start included."""
    # With bytecode, as an installed package has it.
    environment = without_hub(OPENBLAS_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="", **variables)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *map(str, words)], env=environment, stdout=subprocess.DEVNULL, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def print_starts(server: Any, folder: Path, count: int) -> None:
    """Processor seconds of the demo and of a cold 7B by the command, in starts of numpy, in turns."""
    ratios: dict[str, list[float]] = {"--demo": [], FAMILY[0]: []}
    for number in range(count):
        start = processor_seconds("-c", "import numpy")
        for words, runs in ratios.items():
            home = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(folder / f"start-{number}")}
            runs.append(processor_seconds("-m", "lmeval_screener", words, **home) / start)
    for words, runs in ratios.items():
        low, middle, high = statistics.quantiles(runs, n=4)
        print(f"screen-checkpoints {words}: {middle:.2f} ({low:.2f}-{high:.2f}) of `import numpy`")


def main() -> None:
    args = parsed(
        __doc__,
        ("--quick", {"action": "store_true", "help": "ours only"}),
        ("--repeat", {"type": int, "default": 3}),
        ("--child", {"help": "a contender, in this process"}),
        ("repos", {"nargs": "*", "help": "for --child"}),
    )
    if args.child:
        child(args.child, args.repos)
        return

    from hub_server import HubServer

    with (
        tempfile.TemporaryDirectory() as name,
        HubServer(latency=LATENCY, bandwidth=BANDWIDTH) as server,
    ):
        folder = Path(name)
        for repo, place in zip(FAMILY, true_checkpoints(folder, len(FAMILY)), strict=True):
            server.add(repo, place, parameters=PARAMETERS)
        print_starts(server, folder, 7 * args.repeat)
        needed = len(rows_read()) * BYTES / 1e6
        print(f"{needed:.3f} MB of rows of {BYTES} bytes; median of {args.repeat} runs, min-max\n")
        heads = f"{'':<40} {'seconds':>8} {'spread':>13} {'process':>8} {'requests':>9} {'MB':>10} "
        print(f"{heads}{'peak MB':>9}   ratio")
        colds, warms, families = [], [], []
        for number in range(args.repeat):
            home = folder / f"home-{number}"
            colds.append(measured(server, home, "ours", FAMILY[:1]))
            warms.append(measured(server, home, "ours", FAMILY[:1]))
            families.append(measured(server, folder / f"family-{number}", "ours", FAMILY))
        base = line("ours, one 7B, cold", colds, None)
        line("ours, one 7B, warm", warms, base)
        line("ours, family of 12, cold", families, base)
        for name in list(CONTENDERS)[1:] if not args.quick else []:
            runs = []
            # The whole shard travels: once is enough to see it.
            for number in range(1 if "download" in name else args.repeat):
                home = folder / f"other-{number}"
                runs.append(measured(server, home, name, FAMILY[:1]))
                shutil.rmtree(home, ignore_errors=True)
            line(name, runs, base)
    # Last: a child's peak of memory is at least its parent's when it started.
    print(f"10,000 siblings rank in {seconds_to_rank(10_000):.1f} s of processor time")


if __name__ == "__main__":
    main()
