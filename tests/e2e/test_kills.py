"""Killed at random moments, on a full disk, without rights: nothing is lost, and the next run ends well.

Moments are drawn with a fixed seed: before a change of files, or after some CPU.
"""

from __future__ import annotations

import json
import random
import re
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny_models
import yaml
from forks import OF_A_RACE, Ended, Forks
from processes import environment

from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.store import read_store

pytestmark = pytest.mark.slow
DEMO = data_folder("demo")

MODULES = (
    *OF_A_RACE,
    "peft",
    "lmeval_dispersion.harness.embedding.samples",
    "lmeval_dispersion.laboratory.study",
    "lmeval_screener.cli",
    "lmeval_screener.screening.run",
)
KILLED = {-signal.SIGKILL, -signal.SIGPROF}
DISPERSION_CLASS = "!function lmeval_dispersion.harness.DispersionTask"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task of 60 sums, also as a dispersion task; a tiny model and texts."""
    folder = tmp_path_factory.mktemp("kills")
    draw = random.Random(0)
    rows = []
    for _ in range(60):
        a = draw.randrange(13, 40)
        b = draw.randrange(13, 40)
        label = draw.randrange(4)
        choices = [f"{a + b + step}." for step in draw.sample([1, 2, 10], 3)]
        choices.insert(label, f"{a + b}.")
        rows.append({"q": f"7+5=12. {a}+{b}=", "choices": choices, "label": label})
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "sums.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "tasks").mkdir()
    (folder / "tasks" / "sums.yaml").write_text(yaml.safe_dump(task))
    (folder / "tasks" / "mine.yaml").write_text(
        f"include: sums.yaml\ntask: mine\nclass: {DISPERSION_CLASS}\n"
    )
    tiny_models.saved(folder / "model", tiny_models.llama())
    numbers = np.random.default_rng(0)
    texts = [" ".join(f"w{i}" for i in numbers.zipf(1.3, 24) % 90) for _ in range(600)]
    tiny_models.text_file(folder / "texts.jsonl", texts)
    return folder


@pytest.fixture(scope="module")
def forks(place: Path) -> Iterator[Forks]:
    """Forks of a process with everything imported."""
    caches = {
        "HF_DATASETS_CACHE": str(place / "cache"),
        "HF_DATASETS_OFFLINE": "1",
        "XDG_CACHE_HOME": str(place / "xdg"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    with Forks(*MODULES, cwd=place, env=environment() | caches) as made:
        yield made


def race(place: Path, out: Path, task: str) -> list[object]:
    """A race of two models, asked all 60 questions."""
    return [
        *("race", DEMO / "sums-80", DEMO / "sums-30", "--all", "--by", "rows", "--tasks", task),
        *("--include_path", place / "tasks", "--batch_size", 16, "--model_args", "dtype=float32"),
        *("--device", "cpu", "--format", "json", "--output_path", out, "-q"),
    ]


def embed(place: Path, logged: Path, out: Path) -> list[object]:
    """A store of the samples that a race logged."""
    return [
        *("embed", DEMO / "sums-80", "--from-samples", logged, "-o", out, "--device", "cpu"),
        *("--model_args", "dtype=float32,batch_size=1", "-q"),
    ]


def law(place: Path, out: Path) -> list[object]:
    """A perplexity law of the tiny model."""
    return [
        *("inspect", "law", place / "model", "--data", place / "texts.jsonl", "--study", out),
        *("--segment", 24, "--bins", 8, "--bin-size", 10, "--contexts", 8, "--device", "cpu"),
        *("--format", "json", "-q"),
    ]


def answer(ended: Ended) -> Any:
    """The answer of a command that ended well."""
    assert ended.code == 0, ended.err[-3000:]
    return json.loads(ended.out)


def standing(result: dict[str, Any]) -> Any:
    """All of a race but its time."""
    keys = ("label", "questions", "score", "status")
    return [[checkpoint[key] for key in keys] for checkpoint in result["checkpoints"]]


def samples(folder: Path) -> dict[str, list[Any]]:
    """Every checkpoint's logged samples, in the order of documents."""
    result = {}
    for file in folder.glob("*/samples_*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        result[file.parent.name] = sorted(lines, key=lambda line: line["doc_id"])
    return result


def check_same_store(folder: Path, other: Path) -> None:
    """Equal documents and vectors."""
    store = read_store(folder)
    expected = read_store(other)
    first, second = (
        s.documents.sort_values("doc_id", ignore_index=True) for s in (store, expected)
    )
    pd.testing.assert_frame_equal(first, second, rtol=1e-6)
    np.testing.assert_allclose(store.vectors(), expected.vectors(), atol=1e-3)


def check_race(out: Path, whole: Path, task: str) -> None:
    """Equal samples, and for a dispersion task equal stores; nothing of the work is left."""
    assert samples(out) == samples(whole)
    hidden = [
        {str(file.relative_to(folder)) for file in folder.rglob(".*")} for folder in (out, whole)
    ]
    assert hidden[0] == hidden[1]
    if task == "mine":
        for name in ("sums-80", "sums-30"):
            check_same_store(
                *(next(folder.glob(f"{name}/dispersion_*")) for folder in (out, whole))
            )


def killed(
    forks: Forks, words: list[object], whole: Ended, kills: int, seed: int, rounds: int
) -> list[Ended]:
    """``kills`` kills of a command, each within its own share of the work of ``rounds`` runs."""
    draw = random.Random(seed)
    ended = []
    for _ in range(kills):
        share = draw.random() * rounds / kills
        if draw.random() < 0.6:
            ended.append(forks.run(*words, at_change=int(whole.changes * share)))
        else:
            ended.append(forks.run(*words, at_cpu=max(whole.cpu * share, 0.01)))
    assert {end.code for end in ended} <= {*KILLED, 0}, [end.err[-2000:] for end in ended]
    assert sum(end.code in KILLED for end in ended) >= kills // 2
    return ended


@pytest.fixture(scope="module")
def races(forks: Forks, place: Path) -> Callable[[str], tuple[Path, Ended]]:
    """An uninterrupted race of a task: its folder and its end."""
    ended: dict[str, Ended] = {}

    def made(task: str) -> tuple[Path, Ended]:
        out = place / f"whole-{task}"
        if task not in ended:
            ended[task] = forks.run(*race(place, out, task))
        return out, ended[task]

    return made


@pytest.mark.parametrize(("task", "seed"), [("sums", 1), ("sums", 2), ("mine", 3), ("mine", 4)])
def test_a_race_killed_five_times_ends_as_an_uninterrupted_one(
    task: str,
    seed: int,
    forks: Forks,
    place: Path,
    races: Callable[[str], tuple[Path, Ended]],
    tmp_path: Path,
) -> None:
    whole, first = races(task)
    words = race(place, tmp_path / "out", task)
    killed(forks, words, first, 5, seed, 2)
    assert standing(answer(forks.run(*words))) == standing(answer(first))
    check_race(tmp_path / "out", whole, task)


def test_a_store_of_samples_killed_five_times_ends_as_an_uninterrupted_one(
    forks: Forks, place: Path, races: Callable[[str], tuple[Path, Ended]], tmp_path: Path
) -> None:
    whole, _ = races("sums")
    first = forks.run(*embed(place, whole / "sums-80", tmp_path / "whole"))
    assert first.code == 0, first.err[-3000:]
    words = embed(place, whole / "sums-80", tmp_path / "out")
    killed(forks, words, first, 5, 5, 2)
    last = forks.run(*words)
    assert last.code == 0, last.err[-3000:]
    check_same_store(tmp_path / "out", tmp_path / "whole")
    assert not [*(tmp_path / "out").rglob(".parts")]


def test_a_law_killed_five_times_ends_as_an_uninterrupted_one(
    forks: Forks, place: Path, tmp_path: Path
) -> None:
    first = forks.run(*law(place, tmp_path / "whole"))
    expected = answer(first)
    words = law(place, tmp_path / "out")
    killed(forks, words, first, 5, 6, 2)
    assert answer(forks.run(*words))["answer"] == expected["answer"]
    (whole,) = (tmp_path / "whole").glob("law-*")
    (study,) = (tmp_path / "out").glob("law-*")  # one file: its units are gone
    assert study.name == whole.name
    _, rows = json.loads(study.read_text("utf-8"))
    assert rows == json.loads(whole.read_text("utf-8"))[1]


def check_sentence(ended: Ended, start: str) -> None:
    """It failed with one sentence: the cause, the place and a next step."""
    assert ended.code in (1, 2), ended
    assert "Traceback" not in ended.err
    last = [line for line in ended.err.replace("\r", "\n").splitlines() if line.strip()][-1]
    assert last.startswith(start), ended.err[-2000:]
    assert re.search("too large|denied|disk I/O error|permissions|No space", last), last
    assert re.search(r"[;:] (name|free|choose|check|give)\b", last), last


@pytest.mark.parametrize("task", ["sums", "mine"])
def test_a_race_on_a_full_disk_and_in_a_folder_without_rights_goes_on(
    task: str,
    forks: Forks,
    place: Path,
    races: Callable[[str], tuple[Path, Ended]],
    tmp_path: Path,
) -> None:
    whole, first = races(task)
    out = tmp_path / "out"
    words = race(place, out, task)
    (logged,) = whole.glob("sums-80/samples_*.jsonl")
    # The last has room for the first block of 25 questions, and not for all 60.
    for most in (300, 2_500, 9_000, 20_000, logged.stat().st_size * 7 // 10):
        check_sentence(forks.run(*words, most_bytes=most), "dispersion race: ")
    kept = {file: file.read_bytes() for file in out.glob("*/samples_*.jsonl")}
    assert kept
    fixed = [tmp_path, *(path for path in out.rglob("*") if path.name != ".lock"), out]
    for path in fixed:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        check_sentence(
            forks.run(*race(place, tmp_path / "new", task), is_bound=True), "dispersion race: "
        )
        check_sentence(forks.run(*words, is_bound=True), "dispersion race: ")
    finally:
        for path in fixed:
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert {file: file.read_bytes() for file in kept} == kept
    assert standing(answer(forks.run(*words))) == standing(answer(first))
    check_race(out, whole, task)


def test_a_store_of_samples_on_a_full_disk_goes_on(
    forks: Forks, place: Path, races: Callable[[str], tuple[Path, Ended]], tmp_path: Path
) -> None:
    whole, _ = races("sums")
    logged = whole / "sums-80"
    assert forks.run(*embed(place, logged, tmp_path / "whole")).code == 0
    words = embed(place, logged, tmp_path / "out")
    for most in (300, 2_500, 9_000):
        check_sentence(forks.run(*words, most_bytes=most), "dispersion embed: ")
    tmp_path.chmod(0o555)
    try:
        ended = forks.run(*embed(place, logged, tmp_path / "new"), is_bound=True)
    finally:
        tmp_path.chmod(0o755)
    check_sentence(ended, "dispersion embed: ")
    assert forks.run(*words).code == 0
    check_same_store(tmp_path / "out", tmp_path / "whole")


def test_a_law_on_a_full_disk_goes_on(forks: Forks, place: Path, tmp_path: Path) -> None:
    expected = answer(forks.run(*law(place, tmp_path / "whole")))["answer"]
    words = law(place, tmp_path / "out")
    for most in (300, 3_000, 9_000):
        check_sentence(forks.run(*words, most_bytes=most), "dispersion inspect: ")
    tmp_path.chmod(0o555)
    try:
        ended = forks.run(*law(place, tmp_path / "new"), is_bound=True)
    finally:
        tmp_path.chmod(0o755)
    check_sentence(ended, "dispersion inspect: ")
    assert answer(forks.run(*words))["answer"] == expected


@pytest.mark.parametrize("option", ["--registry", "-o"])
def test_a_screening_on_a_full_disk_keeps_what_was_written(
    option: str, forks: Forks, tmp_path: Path
) -> None:
    """A registry and a page: an earlier one stays as it was, and the next run writes it whole."""

    def screen(*words: object, **how: Any) -> Ended:
        return forks.run(*words, option, place, main="lmeval_screener.cli", **how)

    place = tmp_path / ("r.db" if option == "--registry" else "page.html")
    models = [DEMO / "sums-00", DEMO / "sums-80"]
    for most in (300, 4_000):
        check_sentence(screen(*models, most_bytes=most), "screen-checkpoints: ")
    assert option == "--registry" or not place.exists()
    assert screen(*models).code == 0
    before = place.read_bytes()
    more = [*models, DEMO / "sums-30"]
    screen(*more, most_bytes=4_000)
    if option == "-o":
        assert place.read_bytes() == before
    place.chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        check_sentence(screen(*more, is_bound=True), "screen-checkpoints: ")
    finally:
        tmp_path.chmod(0o755)
        place.chmod(0o644)
    last = screen(*more)
    assert last.code == 0
    if option == "--registry":
        assert "of 3 checkpoints" in last.err
        with closing(sqlite3.connect(place)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert connection.execute("SELECT count(*) FROM results").fetchall() == [(3,)]
    else:
        assert "sums-30" in place.read_text("utf-8")
    assert not [file for file in tmp_path.iterdir() if file != place]
