"""Files of our own, damaged at random: read, or refused by one of our errors in bounded time and memory.

Seeds are fixed. A traceback that is not ours, an alarm after two seconds of CPU, and 300 MB more fail a test.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from lmeval_screener.chance import keep_slope, read_slope
from lmeval_screener.orders import BY_RATIO
from lmeval_screener.registry.database import last_seen, to_read
from lmeval_screener.registry.queries import query
from lmeval_screener.shortlist.manifest import SCHEMA, read_shortlist_manifest
from lmeval_screener.tokens.sets import load_token_set
from planted_registry import plant

from lmeval_dispersion.auditing.calibrating.calibrator import FORMAT, Calibrator
from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.evidence import FINE_TUNES, SLOPES
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.racing import replay
from lmeval_dispersion.racing.arguments import How
from lmeval_dispersion.store.reading import read_store

PATIENCE = 2
MEMORY = 300 * 2**20
#: Files of the slow turn.
MANY = int(os.environ.get("FUZZ_FILES", "50000"))
COUNTS = [300, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]
FEW = [60, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]
EDGES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2**31,
        2**63,
        2**70,
        10**400,
        0.5,
        -3.0,
        5.0,
        1e308,
        1e400,
        float("nan"),
    ),
    *(
        "",
        "x",
        "a" * 5000,
        "9" * 4400,
        "../../etc/passwd",
        "/etc/passwd",
        "..",
        "\0",
        "\ud800",
        "²",
        "true",
    ),
    *([], {}, [[]], [None], [[1, 2]], {"": {}}, {"a": [1]}, ["a", "a"]),
]


def placed(tree: Any) -> list[tuple[Any, Any]]:
    """Every container and key inside a tree of JSON."""
    if isinstance(tree, dict):
        keys: list[Any] = list(tree)
    else:
        keys = list(range(len(tree))) if isinstance(tree, list) else []
    found = [(tree, key) for key in keys]
    for key in keys:
        found += placed(tree[key])
    return found


def damaged(tree: Any, draw: random.Random) -> Any:
    """A copy with one to three values replaced, removed, moved or repeated."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.randint(1, 3)):
        places = placed(tree)
        if not places:
            break
        holder, key = draw.choice(places)
        kind = draw.random()
        if kind < 0.55:
            holder[key] = copy.deepcopy(draw.choice(EDGES))
        elif kind < 0.7:
            del holder[key]
        elif kind < 0.85:
            other, source = draw.choice(places)
            holder[key] = (
                copy.deepcopy(other[source]) if source in other or isinstance(other, list) else None
            )
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        else:
            holder[draw.choice(("", "x", "../x", "\ud800", "9" * 300))] = holder.pop(key)
    return tree


def damaged_text(content: bytes, draw: random.Random) -> bytes:
    """A text with a few bytes changed, a part repeated, or its end cut off."""
    text = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text) + 1)
        kind = draw.random()
        if kind < 0.4 and at < len(text):
            text[at] = draw.randrange(256)
        elif kind < 0.6:
            text[at:at] = draw.choice(WORDS)
        elif kind < 0.8:
            text[at : at + draw.randint(1, 20)] = b""
        else:
            text[at:at] = text[at : at + draw.randint(1, 60)]
    return bytes(text)


WORDS = [
    *(
        b"2026-13-45",
        b"!!timestamp x",
        b"!!int ''",
        b"!!bool x",
        b"!!float {}",
        b"!!python/name:os.system ",
    ),
    *(
        b"&a [*a]",
        b"*a",
        b"&a ",
        b"<<: ",
        b"? ",
        b"[" * 300,
        b"{" * 50,
        b"\xff",
        b"\x00",
        b"\t",
        b"1:1:1",
    ),
    *(
        b"0x" + b"f" * 5000,
        b"9" * 5000,
        b".nan",
        b"!!binary x",
        b"!!omap [1]",
        b"!!set {1, 1}",
        b"%YAML 9.9\n",
    ),
    *(b"---\n", b"|\n", b"'", b'"\\ud800"', b"~", b": :", b"1e999", b"2026-01-01T99:99:99Z"),
]


def check(read: Callable[[], object], seed: int, patience: float = PATIENCE) -> bool:
    """Read a damaged file; whether it was read. A finding fails the test."""

    def alarm(*_: Any) -> None:
        raise AssertionError(f"seed {seed}: more than {patience} seconds")

    before = signal.signal(signal.SIGPROF, alarm)
    signal.setitimer(signal.ITIMER_PROF, patience)
    try:
        read()
    except DispersionError:
        return False
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return True


def flood(count: int, one: Callable[[random.Random], Callable[[], object]]) -> None:
    """Damage and read ``count`` files; some are refused, and memory stays bounded."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answers = [check(one(random.Random(seed)), seed) for seed in range(count)]
    assert not all(answers)
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used) < MEMORY


@pytest.mark.parametrize("count", COUNTS)
def test_calibrators(count: int, tmp_path: Path) -> None:
    parts = [
        {
            "slice": f"s{i}",
            "documents": 10 + i,
            "accuracy": i / 10,
            "variance": 0.2,
            "dispersion": 0.5 + i / 20,
        }
        for i in range(9)
    ]
    whole = {
        **{"format": FORMAT, "model": "m", "revision": None, "layer": "last", "width": 8},
        **{
            "prompt_format": "p",
            "chat_template": None,
            "num_fewshot": 0,
            "tasks": {"t": 1},
            "by": "subject",
        },
        "labelled": {
            "documents": 126,
            "accuracy": 0.5,
            "doc_ids": {"t": "0-125"},
            "documents_sha256": "x",
        },
        **{"beats_trivial": True, "slices": parts, "seed": 0, "version": "1"},
    }
    file = tmp_path / "c.json"
    file.write_text(json.dumps(whole))
    assert Calibrator.read(file).pairs.trivial.max() <= 1

    def read() -> None:
        pairs = Calibrator.read(file).pairs
        assert 0 <= pairs.trivial.min() <= pairs.trivial.max() <= 1

    def one(draw: random.Random) -> Callable[[], object]:
        file.write_text(json.dumps(damaged(whole, draw)))
        return read

    flood(count, one)


@pytest.mark.parametrize("count", COUNTS)
def test_slopes(count: int, tmp_path: Path) -> None:
    file = tmp_path / "slope.json"
    keep_slope(file, SLOPES[FINE_TUNES], FINE_TUNES, "math")
    whole = json.loads(file.read_text())

    def one(draw: random.Random) -> Callable[[], object]:
        file.write_text(json.dumps(damaged(whole, draw)))
        return lambda: read_slope(file)

    flood(count, one)


@pytest.mark.parametrize("count", COUNTS)
def test_manifests_of_lists(count: int, tmp_path: Path) -> None:
    candidate = {
        **{
            "repo": "org/a",
            "requested_revision": "main",
            "revision": "0" * 40,
            "file": None,
            "family": "f",
        },
        **{
            "scale": "1B",
            "rank": 1,
            "chosen": "rank",
            "inclusion_probability": 1.0,
            "G": 1.5,
            "ratio": 1.1,
        },
        "equal_rows": False,
    }
    whole = {
        **{
            "schema": SCHEMA,
            "version": "1",
            "command": "",
            "domain": "math",
            "task": None,
            "base": None,
        },
        **{
            "tasks": ["gsm8k"],
            "k": 1,
            "audit_sample": 0,
            "seed": 0,
            "ranked_by": "ratio",
            "failed": [],
        },
        "groups": [{"family": "f", "scale": "1B", "kind": "fine-tunes"}],
        "candidates": [
            candidate | {"repo": f"org/{name}", "rank": rank} for rank, name in enumerate("abc", 1)
        ],
    }
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps(whole))
    assert len(read_shortlist_manifest(file).candidates) == 3

    def one(draw: random.Random) -> Callable[[], object]:
        file.write_text(json.dumps(damaged(whole, draw)))
        return lambda: read_shortlist_manifest(file)

    flood(count, one)


@pytest.mark.parametrize("count", COUNTS)
def test_token_sets(count: int, tmp_path: Path) -> None:
    text = (data_folder("token_sets") / "code.yaml").read_bytes()[:3000].rpartition(b"\n")[
        0
    ] + b"\n"
    small = (
        b"schema: 1\nname: x\nrole: domain\ndefault_groups: [g]\nmin_tokens: 2\n"
        b"groups: {g: {variant: space, items: [the, of, 'and']}}\nnotes: a note of 2026\n"
    )
    file = tmp_path / "set.yaml"
    file.write_bytes(small)
    assert load_token_set(str(file)).name == "x"

    def one(draw: random.Random) -> Callable[[], object]:
        file.write_bytes(damaged_text(draw.choice((small, small, text)), draw))
        return lambda: load_token_set(str(file))

    flood(count, one)


@pytest.mark.parametrize("count", COUNTS)
def test_manifests_of_stores(count: int, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    from synthetic import planted_store

    planted_store(tmp_path / "s", 50)
    folder = tmp_path / "s"
    file = folder / "manifest.json"
    whole = json.loads(file.read_text())
    assert len(read_store(folder).vectors()) == whole["n"]

    def read() -> None:
        store = read_store(folder)
        store.vectors()
        store.norms()

    def one(draw: random.Random) -> Callable[[], object]:
        file.write_text(json.dumps(damaged(whole, draw)))
        return read

    flood(count, one)


def finished_race(folder: Path) -> None:
    """A race's folder of two checkpoints and 60 questions, without models."""
    date = "2026-11-28T10-00-00"
    race = {
        **{
            "schema": "dispersion-race-folder/1",
            "date": date,
            "notes": ["a note"],
            "order": "rows",
        },
        **{
            "tasks": "sums",
            "questions": 60,
            "seed": 0,
            "metric": None,
            "model": "hf",
            "model_args": "",
        },
        **{"lm_eval": "0.4.13", "identity": {"sums": {"version": "1"}}, "times": 1, "error": 0.05},
        **{
            "margin": 0.01,
            "which": {"all": True},
            "seen": ["a", "b"],
            "turns": {"a": [], "b": ["a"]},
        },
        "drawn": [["sums", i] for i in range(60)],
        "checkpoints": [
            [label, {"pretrained": f"/x/{label}"}, None, "named"] for label in ("a", "b")
        ],
    }
    folder.mkdir()
    (folder / "race.json").write_text(json.dumps(race))
    draw = random.Random(0)
    for label, right in (("a", 0.9), ("b", 0.5)):
        lines = ""
        for i in range(60):
            score = float(draw.random() < right)
            doc = {"q": str(i)}
            text = json.dumps(doc, indent=2)
            sample = {
                **{"doc_id": i, "doc": doc, "target": "0", "filter": "none", "metrics": ["acc"]},
                **{"arguments": {"gen_args_0": {"arg_0": "q", "arg_1": "a"}}, "acc": score},
                "resps": [[["-1.0", "False"]], [["-2.0", "False"]]],
                "filtered_resps": [["-1.0", "False"], ["-2.0", "False"]],
                "doc_hash": hashlib.sha256(text.encode()).hexdigest(),
            }
            lines += json.dumps(sample) + "\n"
        (folder / label).mkdir()
        (folder / label / f"samples_sums_{date}.jsonl").write_text(lines)
        results = {
            "race": {
                **{"label": label, "questions": 60, "of": 60, "score": right, "seconds": 1.5},
                **{
                    "bytes": {"sums": len(lines)},
                    "judges": {"sums": ["none", "acc"]},
                    "weights": [],
                },
                **{"manifest": {}, "as_base": False},
            },
            "config": {"model_args": {"pretrained": f"/x/{label}"}},
            "configs": {"sums": {"task": "sums", "output_type": "multiple_choice"}},
            "chat_template_sha": None,
        }
        (folder / label / f"results_{date}.json").write_text(json.dumps(results))


@pytest.mark.parametrize("count", FEW)
@pytest.mark.parametrize("name", ["race.json", "a/results_2026-11-28T10-00-00.json"])
def test_race_folders(count: int, name: str, tmp_path: Path) -> None:
    """Judged anew; `tests/racing/live/test_race_folder.py` has what a race that goes on does."""
    whole_folder = tmp_path / "whole"
    finished_race(whole_folder)
    judged = replay.judged(str(whole_folder), How(error=0.05, margin=0.01))
    assert judged is not None
    assert judged.best == "a"
    folder = Path(shutil.copytree(whole_folder, tmp_path / "race"))
    whole = json.loads((folder / name).read_text())

    def one(draw: random.Random) -> Callable[[], object]:
        (folder / name).write_text(json.dumps(damaged(whole, draw)))
        return lambda: replay.judged(str(folder), How(error=0.05, margin=0.01))

    flood(count, one)


@pytest.mark.parametrize("count", FEW)
def test_rows_of_registries(count: int, tmp_path: Path) -> None:
    whole = tmp_path / "whole.db"
    plant(whole, 4)
    with closing(sqlite3.connect(whole)) as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(results)")]
        connection.execute("PRAGMA journal_mode = DELETE")
    place = tmp_path / "r.db"
    values = [
        *EDGES[:7],
        2**62,
        0.5,
        "",
        "x",
        "a" * 500,
        "9" * 500,
        "[1]",
        "{}",
        "[" * 5000,
        b"",
        b"x" * 7,
    ]

    def read() -> None:
        with to_read(place) as connection:
            query(connection, BY_RATIO, None, None)

    def one(draw: random.Random) -> Callable[[], object]:
        shutil.copy(whole, place)
        with closing(sqlite3.connect(place)) as connection, connection:
            keys = ("identity", "file", "state", "tokens", "method")
            column = draw.choice([name for name in columns if name not in keys])
            row = draw.randint(1, 4)
            value = draw.choice(
                [value for value in values if not isinstance(value, int) or abs(value) < 2**63]
            )
            if draw.random() < 0.15:
                connection.execute("UPDATE tokenizers SET resolution = ?", [value])
            else:
                connection.execute(f"UPDATE results SET {column} = ? WHERE rowid = ?", [value, row])
        return read

    flood(count, one)


def test_a_registry_is_read_whole(tmp_path: Path) -> None:
    plant(tmp_path / "r.db", 4)
    with to_read(tmp_path / "r.db") as connection:
        tokens = connection.execute("SELECT tokens FROM runs").fetchone()[0]
        assert len(last_seen(connection, tokens)) == 4


def test_the_alarm_and_the_types_of_errors_count() -> None:
    """What the fuzz takes as a finding is one."""
    assert not check(lambda: (_ for _ in ()).throw(UsageError("no")), 0)
    with pytest.raises(AssertionError, match="KeyError"):
        check(lambda: {}["x"], 0)
    with pytest.raises(AssertionError, match=r"more than 0\.1 seconds"):
        check(lambda: sum(number for number in iter(int, 1)), 0, patience=0.1)
