"""A whole registry under faults and kills: `python benchmarks/registry_soak.py [--count 10000]`.

A server process holds generated tiny checkpoints of 30 families and 40 tokenizers (ten are the same
vocabulary, saved again), on a Hub where 2 % of all answers are faulty in one of nine ways, 1 % of the
repositories are gated, 1 % asked for by an old name, 1 % broken, and the quotas are scaled down. The real
command screens all of them into a registry. It is killed three times (`kill -9`) and then run
until nothing is left that may pass. Every row is compared with G over the full matrix, every failure with
what was planted, the ranks with the order of the true G. Exit status 1 and the problems where anything is
wrong, lost or there twice.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("", "tests/screener", "screener")]

from benchmarks.shared import ServerProcess, many_files, math_and_reference, parsed, without_hub  # noqa: E402

FAMILIES, SAVED_AGAIN = 30, 10
ROWS, WIDTH, KILLS = 1320, 8, 3
DTYPES = ("BF16", "F32", "F16")
#: Requests in a window of so many seconds.
QUOTAS = {"resolvers": (1500, 10.0), "api": (200, 10.0), "pages": (100, 10.0)}
PASSING = frozenset(
    {"Unreachable", "ServerError", "RateLimited", "BadResponse", "Timeout", "Interrupted"}
)


class Checkpoint:
    """One generated checkpoint: what it is, and what a screening of it must say."""

    def __init__(self, number: int) -> None:
        self.number, self.family = number, number % FAMILIES
        # The first families have two tokenizers: one vocabulary in two files.
        again = self.family < SAVED_AGAIN and number // FAMILIES % 2 == 1
        self.tokenizer = self.family + FAMILIES * again
        self.dtype = DTYPES[self.family % len(DTYPES)]
        kind = number % 100
        self.kind = {7: "gated", 17: "renamed", 27: "broken"}.get(kind, "")
        self.error = {"gated": "GatedRepo", "broken": "BadHeader"}.get(self.kind)
        # Those with a new name are in no list that is asked for.
        renamed = self.kind == "renamed"
        self.name = f"{'moved' if renamed else 'zoo'}/model-{number:05d}"
        self.asked = f"old/model-{number:05d}" if renamed else self.name

    def matrix(self, rows: int) -> Any:
        """Its output projection, float64."""
        common = np.random.default_rng(self.family).normal(size=(rows, WIDTH))
        draw = np.random.default_rng(10_000 + self.number)
        return common + 0.1 * draw.normal(size=(rows, WIDTH)) + draw.uniform(0, 1)


def tokenizers() -> list[bytes]:
    """Contents of tokenizer.json: the demo's vocabulary, its rows dealt out anew for every family."""
    from lmeval_dispersion.installation import data_folder

    content = (data_folder("demo") / "sums-00" / "tokenizer.json").read_bytes()
    first = json.loads(content)
    special, size = len(first["added_tokens"]), len(first["model"]["vocab"])
    domain, reference = math_and_reference(content)
    read = [*domain, *reference]
    others = [row for row in range(special, size) if row not in set(read)]
    contents = []
    for family in range(FAMILIES):
        # The rows that are read lie together, so that a checkpoint costs few requests.
        draw = np.random.default_rng(family)
        at = 10 * family
        before = [*draw.permutation(others)]
        order = [*range(special), *before[:at], *draw.permutation(read), *before[at:]]
        new = {int(old): row for row, old in enumerate(order)}
        vocabulary = {piece: new[row] for piece, row in first["model"]["vocab"].items()}
        contents.append(
            json.dumps(first | {"model": first["model"] | {"vocab": vocabulary}}).encode()
        )
    return contents + [
        json.dumps(json.loads(contents[family]), indent=1).encode() for family in range(SAVED_AGAIN)
    ]


def true_gap(matrix: Any, domain: list[int], reference: list[int]) -> float:
    """G over the full matrix, of all pairs: mean cosine distance in T, and between T and R."""
    units = matrix / np.sqrt((matrix * matrix).sum(axis=1))[:, None]
    distances = 1 - units[domain] @ units.T
    inside = distances[:, domain][np.tril_indices(len(domain), -1)]
    return float(inside.mean() + distances[:, reference].mean())


# --- the server's process -------------------------------------------------------------------------------


class Counts(Counter[str]):
    """Stands in a server's list of requests: a registry's would not fit in memory."""

    def append(self, request: Any) -> None:
        """Count one."""
        self[request.part] += 1


def write(model: Checkpoint, folder: Path, shared: list[Path]) -> Path:
    """A checkpoint's folder."""
    from checkpoints import write_safetensors

    place = folder / f"{model.number:05d}"
    place.mkdir()
    (place / "config.json").symlink_to(shared[-1])
    (place / "tokenizer.json").symlink_to(shared[model.tokenizer])
    if model.kind == "broken":
        (place / "model.safetensors").write_bytes(b"\xff" * 4096)
        return place
    write_safetensors(
        place / "model.safetensors", {"lm_head.weight": (model.dtype, model.matrix(ROWS))}
    )
    return place


def serve(count: int, share: float, folder: Path) -> None:
    """Serve until standard input ends; each line there is answered by what was asked for so far."""
    shared = []
    for number, content in enumerate(tokenizers()):
        shared.append(folder / f"tokenizer-{number}.json")
        shared[-1].write_bytes(content)
    shared.append(folder / "config.json")
    shared[-1].write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": False}))
    from hub_server import HubServer

    with HubServer(latency=0.005, quotas=QUOTAS) as server:
        counts, faults, draw = Counts(), Counter[str](), random.Random(1)
        server.requests = counts
        for model in map(Checkpoint, range(count)):
            place = write(model, folder, shared)
            server.add(model.name, place, gated=model.kind == "gated", parameters=10_560)
            if model.kind == "renamed":
                server.rename(model.asked, model.name)
        server.fault("*", mixture(share, draw, faults))
        print(server.endpoint, flush=True)
        for _ in sys.stdin:
            refused = sum(server.quotas.refusals.values())
            print(json.dumps({**counts, "faults": dict(faults), "over quota": refused}), flush=True)


def mixture(share: float, draw: random.Random, counts: Counter[str]) -> Any:
    """A change of a share of all answers, each in one of nine ways."""
    import hub_faults

    ranges = {
        "truncated": hub_faults.truncated(7),
        "wrong range": hub_faults.shifted(16),
        "gzip": hub_faults.zipped,
        "whole file": hub_faults.whole,
    }
    others = {
        "reset": hub_faults.closed(reset=True),
        "429": hub_faults.status(429),
        "503": hub_faults.status(503),
        "HTML": hub_faults.status(200),
        "expired": hub_faults.status(403, body=b"Request has expired"),
    }

    def change(reply: Any, request: Any) -> Any:
        if draw.random() >= share:
            return reply
        # Only a signed address expires; only a range can be wrong.
        delivery = (
            request.part == "cdn" and "Content-Range" in reply.headers and reply.place is not None
        )
        kinds = (
            {**ranges, **others}
            if delivery
            else {k: v for k, v in others.items() if k != "expired"}
        )
        kind = draw.choice(sorted(kinds))
        counts[kind] += 1
        return kinds[kind](reply, request)

    return change


# --- the runs -------------------------------------------------------------------------------------------


class Runs:
    """The command over all checkpoints, as often as it takes."""

    def __init__(self, endpoint: str, asked: list[str], folder: Path) -> None:
        self.registry, self.report = folder / "registry.db", folder / "out.json"
        self._names = folder / "names.txt"
        self._names.write_text("\n".join(asked))
        self._env = without_hub(
            HF_HOME=str(folder / "hf"), HF_ENDPOINT=endpoint, DISPERSION_TIMEOUT="600"
        )
        self._command = [sys.executable, "-m", "lmeval_screener", "-"]
        self._command += ["--registry", str(self.registry), "--output", str(self.report), "--quiet"]

    def start(self) -> int:
        """Start one; its process id."""
        names = (os.POSIX_SPAWN_OPEN, 0, str(self._names), os.O_RDONLY, 0)
        return os.posix_spawn(sys.executable, self._command, self._env, file_actions=[names])

    def rows(self, statement: str) -> list[Any]:
        """The registry's answer; nothing before it has tables."""
        try:
            with closing(sqlite3.connect(self.registry, timeout=60)) as connection:
                return connection.execute(statement).fetchall()
        except sqlite3.OperationalError:
            return []

    def kept(self) -> int:
        """Checkpoints in the registry, failed ones too."""
        return sum(count for (count,) in self.rows("SELECT count(*) FROM seen"))

    def killed(self, after: int, pause: float) -> int:
        """Kill a run a moment after it kept so many more checkpoints; how many are kept."""
        before, pid = self.kept(), self.start()
        while self.kept() < before + after:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                print(
                    self.report.read_text()[:1000] if self.report.exists() else "it wrote nothing"
                )
                raise SystemExit(
                    f"the command ended by itself (exit {code}) before {after} were kept"
                )
            time.sleep(0.05)
        time.sleep(pause)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        return self.kept()

    def finished(self) -> tuple[float, Any]:
        """Run to the end; seconds, and what it used."""
        pid, begun = self.start(), time.perf_counter()
        _, status, usage = os.wait4(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        print(f"  exit {code}, peak memory {usage.ru_maxrss / 1024:.0f} MB", flush=True)
        return time.perf_counter() - begun, usage


# --- what must come out ---------------------------------------------------------------------------------


def truth(count: int, folder: Path) -> Iterator[tuple[Checkpoint, float | None]]:
    """Every checkpoint with its G over the full matrix as it is stored; None where it has to fail."""
    from hub_client import full_matrix

    rows = [math_and_reference(content) for content in tokenizers()]
    for number in range(count):
        model = Checkpoint(number)
        if model.error is not None:
            yield model, None
            continue
        matrix = full_matrix(folder / f"{number:05d}" / "model.safetensors", "lm_head.weight")
        yield model, true_gap(matrix, *rows[model.tokenizer])


def problems(
    expected: Iterable[tuple[Checkpoint, float | None]],
    stored: list[tuple[str, float]],
    report: dict[str, Any],
) -> list[str]:
    """Faults of a registry and of the last run's report; empty where there are none.

    Args:
        expected: See `truth`.
        stored: Names and G of all results in the registry.
        report: The last run's JSON.
    """
    wrong = []
    results, gaps = Counter(name for name, _ in stored), dict(stored)
    lines = [*report["checkpoints"], *report["failed"]]
    listed = Counter(line["repo"] for line in lines)
    by_name = {line["repo"]: line for line in lines}
    true: dict[str, float] = {}
    for model, gap in expected:
        name = model.name if model.error is None else model.asked
        if listed[name] != 1:
            wrong.append(f"{name}: {listed[name]} lines")
            continue
        if gap is None:
            if results[model.name] or by_name[name].get("error") != model.error:
                wrong.append(f"{name}: expected {model.error}, got {by_name[name].get('error')}")
            continue
        if results[model.name] != 1:
            wrong.append(f"{name}: {results[model.name]} results in the registry")
        elif (
            max(abs(gaps[model.name] - gap), abs(by_name[name]["gap"]["cosine"]["mean"] - gap))
            > 1e-6
        ):
            wrong.append(f"{name}: G {gaps[model.name]:.9f}, in truth {gap:.9f}")
        true[name] = gap
    ranked: Counter[str] = Counter()
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in sorted(report["checkpoints"], key=lambda line: line["rank"]):
        groups.setdefault(f"{line['family']} {line['scale']}", []).append(line)
    for group, members in groups.items():
        names = [line["repo"] for line in members]
        ranked.update(names)
        order = [true.get(name, np.nan) for name in names]
        if any(not after <= before + 1e-6 for before, after in pairwise(order)):
            wrong.append(f"{group}: not in the order of the true G")
        families = {int(name.rpartition("-")[2]) % FAMILIES for name in names}
        if len(families) != 1:
            wrong.append(f"{group}: families {sorted(families)} in one group")
    if set(ranked) != set(true) or set(ranked.values()) - {1}:
        wrong.append(f"{len(ranked)} ranked, {len(true)} expected, {sum(ranked.values())} places")
    if len(listed) != sum(listed.values()) or len(results) != sum(results.values()):
        wrong.append("something is there twice")
    return wrong


def soak(count: int, share: float, folder: Path) -> list[str]:
    """All of it; what is wrong."""
    draw = random.Random(0)
    started = time.perf_counter()
    (folder / "zoo").mkdir()
    server = ServerProcess(__file__, count, share, folder / "zoo")
    try:
        renamed = [
            model.asked for model in map(Checkpoint, range(count)) if model.kind == "renamed"
        ]
        print(f"{count} checkpoints made in {time.perf_counter() - started:.0f} s", flush=True)
        runs = Runs(server.endpoint, ["zoo/*", *renamed], folder)
        for _ in range(KILLS):
            after = draw.randint(1, max(1, count // (KILLS + 2)))
            print(
                f"killed after {runs.killed(after, draw.random() * min(1, count / 1000))} kept",
                flush=True,
            )
        for attempt in range(5):
            seconds, usage = runs.finished()
            cpu = usage.ru_utime + usage.ru_stime
            print(f"run {attempt + 1} to the end: {seconds:.0f} s, {cpu:.0f} s of CPU")
            report = json.loads(runs.report.read_text())
            failed = Counter(line["error"] for line in report["failed"])
            print(
                f"  {report['totals']['checkpoints']} screened, failed: {dict(failed)}", flush=True
            )
            passing = [line for line in report["failed"] if line["error"] in PASSING]
            if not passing:
                break
            print(f"  for example {passing[0]['repo']}: {passing[0]['message']}", flush=True)
        counts = server.counts()
        asked_for = sum(
            v for k, v in counts.items() if k in ("resolve", "cdn", "api", "list", "raw")
        )
        print(f"server, in all: {counts}")
        print(f"{asked_for / count:.1f} requests a checkpoint, kills and repeats included")
        stored = runs.rows("SELECT repo, gap_cosine FROM results")
        sound = (
            [] if runs.rows("PRAGMA integrity_check") == [("ok",)] else ["the registry is damaged"]
        )
        return sound + problems(truth(count, folder / "zoo"), stored, report)
    finally:
        server.close()


def main() -> int:
    """Print what happened; 1 where anything is wrong."""
    args = parsed(
        __doc__,
        ("--count", {"type": int, "default": 10_000, "help": "checkpoints (default: 10000)"}),
        ("--faults", {"type": float, "default": 0.02, "help": "share of answers (default: 0.02)"}),
        hidden=("--serve", 3),
    )
    if args.serve:
        count, share, folder = args.serve
        serve(int(count), float(share), Path(folder))
        return 0
    many_files()
    with tempfile.TemporaryDirectory() as folder:
        wrong = soak(args.count, args.faults, Path(folder))
    for problem in wrong[:50]:
        print(f"WRONG {problem}")
    print(f"{len(wrong)} problems" if wrong else "every row right, nothing lost, nothing twice")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
