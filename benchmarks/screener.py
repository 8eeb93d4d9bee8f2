"""What one screening costs beside the other ways to read the same rows, on one loopback registry.

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

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "screener")]
TOKENIZER = ROOT / "tests" / "data" / "tokenizers" / "qwen2.5.json"
FAMILY = [f"org/model-{number:02d}" for number in range(12)]
SHARD = "model-00004-of-00004.safetensors"
TENSOR = "lm_head.weight"


def token_ids() -> list[int]:
    from lmeval_screener.tokens import load_token_set, resolve
    from lmeval_screener.tokens.vocabulary import Vocabulary

    vocabulary = Vocabulary.from_file("tokenizer.json", TOKENIZER.read_bytes())
    found = resolve(load_token_set("math", "domain"), load_token_set("reference", "reference"), vocabulary)
    return [*found.domain_ids, *found.reference_ids]


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
            for row in token_ids():
                matrix[row : row + 1]


def filesystem(repos: list[str]) -> None:
    from huggingface_hub import HfFileSystem

    for repo in repos:
        with HfFileSystem().open(f"{repo}/{SHARD}", "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            begin = 8 + length + json.loads(file.read(length))[TENSOR]["data_offsets"][0]
            for row in token_ids():
                file.seek(begin + row * 7168)
                file.read(7168)


def metadata(repos: list[str]) -> None:
    import httpx
    from huggingface_hub import get_safetensors_metadata, hf_hub_url

    for repo in repos:
        files = get_safetensors_metadata(repo).files_metadata
        url = hf_hub_url(repo, SHARD)
        with httpx.Client(follow_redirects=True) as client:
            length = int.from_bytes(client.get(url, headers={"Range": "bytes=0-7"}).content, "little")
            begin = 8 + length + files[SHARD].tensors[TENSOR].data_offsets[0]
            for row in token_ids():
                at = begin + row * 7168
                client.get(url, headers={"Range": f"bytes={at}-{at + 7167}"}).raise_for_status()


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
        import lmeval_screener.answer
        import lmeval_screener.checkpoints.hub
        import lmeval_screener.checkpoints.source
        import lmeval_screener.screening  # noqa: F401
    elif "safe_open" in name:
        import safetensors.torch  # noqa: F401
    start = time.perf_counter()
    CONTENDERS[name](repos)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "peak_mb": peak}))


def measured(server: object, home: Path, name: str, repos: list[str]) -> dict[str, float]:
    """One run of a contender in a fresh process."""
    from hub_server import HubServer

    assert isinstance(server, HubServer)
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    env["OPENBLAS_NUM_THREADS"] = "1"  # as the command sets it
    requests, sent, start = len(server.requests), server.sent, time.perf_counter()
    command = [sys.executable, __file__, "--child", name, *repos]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    whole = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    figures = json.loads(done.stdout.splitlines()[-1])
    return {
        **figures,
        "whole": whole,
        "requests": len(server.requests) - requests,
        "megabytes": (server.sent - sent) / 1e6,
    }


def line(label: str, runs: list[dict[str, float]], base: float | None) -> float:
    """Print the median of some runs; returns the seconds."""
    median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    seconds = [run["seconds"] for run in runs]
    spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
    ratio = "" if base is None else f"{median['seconds'] / base:8.1f}x"
    print(
        f"{label:<40} {median['seconds']:8.3f} {spread:>13} {median['whole']:8.2f} {median['requests']:9.0f} "
        f"{median['megabytes']:10.3f} {median['peak_mb']:9.0f} {ratio}",
        flush=True,
    )
    return median["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="ours only")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.04, help="seconds of a round trip")
    parser.add_argument("--bandwidth", type=float, default=200e6, help="bytes a second")
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("repos", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.repos)
        return

    import numpy as np
    from checkpoints import write_qwen_7b
    from hub_server import HubServer

    draw = np.random.default_rng(0)
    ids = token_ids()
    line_speed = {"latency": args.latency, "bandwidth": args.bandwidth}
    with tempfile.TemporaryDirectory() as folder, HubServer(**line_speed) as server:
        for name in FAMILY:
            rows = {row: draw.normal(size=(1, 3584)) for row in ids}
            place = write_qwen_7b(Path(folder) / name, rows=rows)
            shutil.copy(TOKENIZER, place / "tokenizer.json")
            server.add(name, place, parameters=7_615_616_512)
        needed = len(ids) * 7168
        print(
            f"{len(ids)} rows of 7,168 bytes: {needed / 1e6:.3f} MB; median of {args.repeat} runs, min-max\n"
        )
        print(
            f"{'':<40} {'seconds':>8} {'spread':>13} {'process':>8} {'requests':>9} {'MB':>10} "
            f"{'peak MB':>9}   ratio"
        )
        colds, warms, families = [], [], []
        for number in range(args.repeat):
            home = Path(folder) / f"home-{number}"
            colds.append(measured(server, home, "ours", FAMILY[:1]))
            warms.append(measured(server, home, "ours", FAMILY[:1]))
            families.append(measured(server, Path(folder) / f"family-{number}", "ours", FAMILY))
        base = line("ours, one 7B, cold", colds, None)
        line("ours, one 7B, warm", warms, base)
        line("ours, family of 12, cold", families, base)
        for name in list(CONTENDERS)[1:] if not args.quick else []:
            runs = []
            # The whole shard travels: once is enough to see it.
            for number in range(1 if "download" in name else args.repeat):
                home = Path(folder) / f"other-{name[:4]}-{number}"
                runs.append(measured(server, home, name, FAMILY[:1]))
                shutil.rmtree(home, ignore_errors=True)
            line(name, runs, base)


if __name__ == "__main__":
    main()
