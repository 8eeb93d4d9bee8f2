"""Races of real models: lm-eval's own answers, kept block by block, and what interrupts them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import yaml
from filelock import FileLock
from harness_world import COMMAND, NEXT, check_same_store, environment, from_folder
from json_schemas import faults
from lm_eval.models.huggingface import HFLM

import lmeval_dispersion
from lmeval_dispersion.asking import Asking
from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import DispersionError, HarnessError
from lmeval_dispersion.harness import records, seams
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.racing.evaluation import Evaluation
from lmeval_dispersion.store import Store, read_store
from lmeval_dispersion.store.samples import is_logged, read_logged

pytestmark = pytest.mark.usefixtures("named_tasks_alone")
DEMO = data_folder("demo")
#: Of a race of two tasks, the second block's first file of samples; it is half written.
MID_BLOCK = 2


def are_samples(number: int) -> bool:
    """Whether an open file is one of samples, to which a block is appended."""
    return bool(fcntl.fcntl(number, fcntl.F_GETFL) & os.O_APPEND)


def words(
    tasks: Path, out: Path, *models: object, task: str = "sums", batch: int = 16
) -> list[str]:
    """A race of models, by the last parts of their folders, in that order."""
    places = [DEMO / model if isinstance(model, str) else model for model in models]
    given = ("--tasks", task, "--include_path", tasks, "--batch_size", batch, "--output_path", out)
    return [
        *map(
            str,
            (
                "race",
                *places,
                "--all",
                "--by",
                "rows",
                *given,
                "--device",
                "cpu",
                "--format",
                "json",
                "-q",
            ),
        )
    ]


def raced(capsys: pytest.CaptureFixture[str], *given: str, code: int = 0) -> dict[str, Any]:
    """What a race answers."""
    assert main([*given]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert faults(result) == []
    return result


def standing(result: dict[str, Any]) -> list[tuple[Any, ...]]:
    """All of a race but its time."""
    return [
        tuple(c[key] for key in ("label", "questions", "score", "status"))
        for c in result["checkpoints"]
    ]


def asked_of(task: str, folder: Path, **more: Any) -> Evaluation:
    """The questions of a task in a folder of tasks."""
    return Evaluation(Asking(tasks=task, include_path=str(folder), **more))


def samples(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The logged samples of one checkpoint, by task and document."""
    files = {file.name.split("_2")[0]: file for file in folder.glob("samples_*.jsonl")}
    lines = [
        (name, json.loads(line))
        for name, file in files.items()
        for line in file.read_text().splitlines()
    ]
    return {(name.removeprefix("samples_"), line["doc_id"]): line for name, line in lines}


def test_two_tasks_are_answered_as_by_lm_eval_and_read_as_its_results(
    in_world: Path,
    tasks: Path,
    task_manager: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Choices and generation, with two examples that lm-eval draws document by document."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    both = ("sums", "sums_written")
    given = words(tasks, tmp_path / "out", "sums-80", "sums-00", task=",".join(both), batch=1)
    result = raced(
        capsys, *given, "--num_fewshot", "2", "--model_args", "dtype=float32, max_length=512"
    )
    assert (result["best"], result["questions"], result["of"], result["loaded"]) == (
        "sums-80",
        90,
        2,
        2,
    )
    assert (result["task"], result["metric"]) == ("sums,sums_written", "acc, exact_match")
    lm = from_folder(DEMO / "sums-80")
    lm.batch_size_per_gpu = 1
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    plain = lm_eval.simple_evaluate(lm, tasks=[*both], num_fewshot=2, task_manager=manager)
    kept = samples(tmp_path / "out" / "sums-80")
    assert len(kept) == 80
    for (task, doc_id), line in kept.items():
        theirs = next(sample for sample in plain["samples"][task] if sample["doc_id"] == doc_id)
        assert line == json.loads(seams.logged_line(theirs))
    figures = json.loads(next((tmp_path / "out" / "sums-80").glob("results_*")).read_text())
    for task, metric in (("sums", "acc,none"), ("sums_written", "exact_match,none")):
        assert figures["results"][task][metric] == plain["results"][task][metric]
    score = np.mean(
        [plain["results"]["sums"]["acc,none"], plain["results"]["sums_written"]["exact_match,none"]]
    )
    assert result["checkpoints"][0]["score"] == pytest.approx(score, abs=1e-12)
    assert [
        len(read_logged(tmp_path / "out" / name).documents) for name in ("sums-80", "sums-00")
    ] == [
        80,
        10,
    ]
    assert main(["audit", str(tmp_path / "out" / "sums-00"), "-q"]) == 0


def interrupted_after(blocks: int, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C as soon as a checkpoint was asked so many blocks."""
    ask, asked = Evaluation.ask, list[str]()

    def interrupted(self: Any, lm: Any, places: Any) -> Any:
        if sum(label in name for name in asked) == blocks and label in lm.pretrained:
            raise KeyboardInterrupt
        asked.append(lm.pretrained)
        return ask(self, lm, places)

    monkeypatch.setattr(Evaluation, "ask", interrupted)


def test_other_weights_in_the_same_place_do_not_go_on_with_the_answers(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    done, mine = (shutil.copytree(DEMO / "sums-80", tmp_path / name) for name in ("done", "mine"))
    given = [*words(tasks, tmp_path / "out", done, mine), "--margin", "0"]
    with monkeypatch.context() as patch:
        interrupted_after(1, "mine", patch)
        raced(capsys, *given, code=130)
    for place in (done, mine):
        shutil.copytree(DEMO / "sums-00", place, dirs_exist_ok=True)
    result = raced(capsys, *given, code=3)
    assert standing(result)[0] == ("done", 40, 1.0, "best")  # finished: nothing is loaded
    assert result["checkpoints"][1]["message"] == (
        "the sizes or times of the weights files have changed since they gave the 10 answers in "
        f"{tmp_path / 'out' / 'mine'}; remove that folder, then run the same command to ask the "
        "checkpoint again"
    )
    shutil.rmtree(tmp_path / "out" / "mine")
    assert standing(raced(capsys, *given))[1][:2] == ("mine", 10)


def test_a_name_on_the_hub_goes_on_with_the_commit_that_was_loaded_first(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    repository = tmp_path / "hub" / "models--org--mine"
    for commit, model in (("a" * 40, "sums-80"), ("b" * 40, "sums-00")):
        shutil.copytree(DEMO / model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    main_branch = repository / "refs" / "main"
    main_branch.write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    given = [word.replace(str(DEMO), "org") for word in words(tasks, tmp_path / "out", "mine")]
    with monkeypatch.context() as patch:
        interrupted_after(1, "mine", patch)
        raced(capsys, *given, code=130)
    main_branch.write_text("b" * 40)
    assert raced(capsys, *given)["checkpoints"][0]["score"] == 1
    assert (
        json.loads(next(tmp_path.glob("out/*/results_*")).read_text())["config"]["model_sha"]
        == "a" * 40
    )


@pytest.fixture(scope="module")
def recorded(tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tasks, with a group of two of a user's own whose class is DispersionTask."""
    folder = Path(shutil.copytree(tasks, tmp_path_factory.mktemp("recorded") / "tasks"))
    for task in ("sums", "sums_written"):
        text = (
            f"include: {task}.yaml\ntask: my_{task}\n"
            "class: !function lmeval_dispersion.harness.DispersionTask\n"
        )
        (folder / f"my_{task}.yaml").write_text(text)
    (folder / "mine.yaml").write_text(
        "group: mine\ngroup_alias: Mine\ntask: [my_sums, my_sums_written]\n"
    )
    return folder


@pytest.fixture(scope="module")
def check_stores(
    recorded: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Path], None]:
    """A checkpoint's folder holds what lm-eval's run of the dispersion tasks keeps of the same documents."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    runs: dict[str, Store] = {}

    def expected(model: str, asked: dict[str, list[int]]) -> Store:
        lm = from_folder(DEMO / model)
        lm.batch_size_per_gpu = 1
        place = tmp_path_factory.mktemp(model)
        manager = TaskManager(
            include_path=str(recorded),
            include_defaults=False,
            metadata={"dispersion_store": str(place)},
        )
        lm_eval.simple_evaluate(lm, tasks=["mine"], samples=asked, task_manager=manager)
        return read_store(place)

    def check(folder: Path) -> None:
        asked: dict[str, list[int]] = {}
        for task, doc_id in sorted(samples(folder)):
            asked.setdefault(task, []).append(doc_id)
        if (key := f"{folder.name} {asked}") not in runs:
            runs[key] = expected(folder.name, asked)
        (stores,) = folder.glob("dispersion_*")
        check_same_store(read_store(stores), runs[key])
        assert not is_logged(folder)
        assert main(["audit", str(folder), "-q", "-o", str(folder.parent / "audit.json")]) == 0

    return check


@pytest.mark.parametrize("how", ["Ctrl-C", pytest.param("kill -9", marks=pytest.mark.slow)])
def test_dispersion_tasks_leave_the_stores_of_lm_eval(
    how: str, in_world: Path, recorded: Path, check_stores: Callable[[Path], None], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Of a checkpoint that was asked everything, and of one that was dropped; after an end in a block."""
    given = words(recorded, tmp_path / "out", "sums-80", "sums-00", task="mine", batch=1)
    given += ["--model_args", "dtype=float32"]
    if how == "kill -9":
        forks = request.getfixturevalue("forks")
        ended = forks.run(*given, at_append=MID_BLOCK)
        assert ended.code == -signal.SIGKILL, ended.err[-2000:]
        assert not [*tmp_path.glob("out/*/dispersion_*")]
    else:
        with monkeypatch.context() as patch:
            interrupted_after(1, "sums-80", patch)
            raced(capsys, *given, code=130)
        # As a kill leaves it while the states of a block are written.
        (tmp_path / "out" / "sums-80" / ".states" / ".000025.safetensors.7").write_bytes(b"half")
    result = raced(capsys, *given)
    assert [(c["label"], c["questions"]) for c in result["checkpoints"]] == [
        ("sums-80", 80),
        ("sums-00", 10),
    ]
    assert "warning" not in capsys.readouterr().err
    for name in ("sums-80", "sums-00"):
        check_stores(tmp_path / "out" / name)
    assert not (tmp_path / "out" / "sums-80" / ".states").exists()
    # The rule may let a dropped checkpoint go on, and its states are still there.
    store = next((tmp_path / "out").glob("sums-00/dispersion_*"))
    shutil.rmtree(store)
    results = next((tmp_path / "out").glob("sums-00/results_*"))
    results.write_text(results.read_text().replace('"stored": 10', '"stored": 0'))
    monkeypatch.setattr(seams, "loaded_lm", None)
    raced(capsys, *given)
    check_stores(tmp_path / "out" / "sums-00")


def test_a_checkpoint_that_fails_costs_no_other_its_race(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    broken = shutil.copytree(DEMO / "sums-00", tmp_path / "broken")
    (broken / "model.safetensors.index.json").write_text("{}")
    evaluated, memory = seams.evaluated, ["sums-80", "sums-30", "sums-30"]

    def full(lm: Any, *given: Any, **options: Any) -> Any:
        if memory and memory[0] in lm.pretrained:
            memory.pop(0)
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        sizes[Path(lm.pretrained).name] = lm.batch_size
        return evaluated(lm, *given, **options)

    sizes = dict[str, int]()
    monkeypatch.setattr(seams, "evaluated", full)
    result = raced(
        capsys, *words(tasks, tmp_path / "out", broken, "sums-80", "sums-30", "sums-00"), code=3
    )
    assert result["best"] == "sums-80"
    assert {c["label"]: c["message"] for c in result["checkpoints"] if c["status"] == "failed"}.keys() == {
        "broken", "sums-30"
    }  # fmt: skip
    assert next(c for c in result["checkpoints"] if c["label"] == "sums-30")["message"].startswith(
        "out of memory"
    )
    assert sizes == {"sums-80": 8, "sums-00": 16}
    assert main(words(tasks, tmp_path / "none", broken)) == 1
    assert "no checkpoint could be raced (1 failed); broken: " in capsys.readouterr().err


def test_auto_is_detected_once_a_checkpoint_and_a_halved_batch_stays(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Choices and generation; of four blocks the second one is out of memory."""
    detect, evaluated, detected, sizes = HFLM._detect_batch_size, seams.evaluated, [], list[int]()

    def counted(self: Any, requests: Any = None, pos: int = 0) -> int:
        print("Passed argument batch_size = auto")  # as lm-eval itself does
        detected.append((Path(self.pretrained).name, len(requests[pos][1])))
        return int(detect(self, requests, pos))

    def full(lm: Any, *given: Any, **options: Any) -> Any:
        if "sums-80" in lm.pretrained:
            sizes.append(lm.batch_size)
            if len(sizes) == 2:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        return evaluated(lm, *given, **options)

    monkeypatch.setattr(HFLM, "_detect_batch_size", counted)
    monkeypatch.setattr(seams, "evaluated", full)
    shutil.copy(tasks / "sums.yaml", tmp_path)
    written = yaml.safe_load((tasks / "sums_written.yaml").read_text())
    written["generation_kwargs"]["max_gen_toks"] = 40
    (tmp_path / "sums_written.yaml").write_text(yaml.safe_dump(written))
    given = words(tmp_path, tmp_path / "out", "sums-80", "sums-00", task="sums,sums_written")
    given[given.index("--batch_size") + 1] = "auto"
    result = raced(capsys, *given)  # all of its output is JSON
    assert (result["best"], result["questions"]) == ("sums-80", 105)  # of 25 at once
    longest = len(from_folder(DEMO / "sums-80").tok_encode("7+5=12. 13+13=")) + 40  # of an answer
    assert detected == [("sums-80", longest), ("sums-00", longest)]
    assert sizes == [64, 64, 32, 32, 32]


def test_standard_output_is_kept_for_data(tmp_path: Path) -> None:
    """Python's print, and what another process prints."""
    code = (
        "import os, sys\nfrom lmeval_dispersion.output import prints_to_stderr\n"
        "with prints_to_stderr():\n    print('a library')\n    os.system('echo its process')\nprint('data')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, {*done.stderr.splitlines()}) == ("data\n", {"a library", "its process"})


def test_a_full_disk_is_a_sentence_and_loses_no_block(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    given, blocks = words(tasks, tmp_path / "out", "sums-80"), []

    def sync(number: int) -> None:
        blocks.extend([number] * are_samples(number))
        if len(blocks) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        assert main(given) == 1
    assert (
        "No space left on device; check its disk and its permissions, then run the same command to go on"
        in capsys.readouterr().err
    )
    assert raced(capsys, *given)["questions"] == 40
    assert len(samples(tmp_path / "out" / "sums-80")) == 40


def test_answers_that_may_not_be_written_are_kept_and_not_told_to_be_removed(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    given = words(tasks, tmp_path / "out", "sums-80")
    expected = raced(capsys, *given)

    def refused(place: Path, size: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))

    with monkeypatch.context() as patch:
        patch.setattr(os, "truncate", refused)
        assert main(given) == 1
    error = capsys.readouterr().err
    assert "Permission denied; check its permissions" in error
    assert "remove" not in error
    assert standing(raced(capsys, *given)) == standing(expected)


@pytest.mark.parametrize("full", [True, False], ids=["full disk", "Ctrl-C"])
def test_a_block_that_breaks_off_as_it_is_written_is_asked_again(
    full: bool, in_world: Path, recorded: Path, check_stores: Callable[[Path], None], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The second one: its states on a full disk, or its second file of samples as Ctrl-C comes."""
    given, calls = words(recorded, tmp_path / "out", "sums-80", task="mine", batch=1), []
    given += ["--model_args", "dtype=float32"]
    sync, write = os.fsync, records.write_whole

    def interrupted(number: int) -> None:
        calls.extend([number] * are_samples(number))
        if len(calls) == 4:
            raise KeyboardInterrupt
        sync(number)

    def unwritten(file: Path, content: bytes) -> None:
        calls.append(file)
        if len(calls) == 2:
            raise DispersionError("could not write: no space left")
        write(file, content)

    with monkeypatch.context() as patch:
        patch.setattr(records, "write_whole", unwritten) if full else patch.setattr(
            os, "fsync", interrupted
        )
        assert main(given) == (1 if full else 130)
    assert ("could not write: no space left" in capsys.readouterr().err) is full
    assert raced(capsys, *given)["questions"] == 80
    lines = [
        file.read_text().splitlines() for file in (tmp_path / "out" / "sums-80").glob("samples_*")
    ]
    assert [len(found) for found in lines] == [40, 40]
    check_stores(tmp_path / "out" / "sums-80")


def test_a_checkpoint_has_no_states_of_one_that_failed_before(
    in_world: Path, recorded: Path, check_stores: Callable[[Path], None], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The first one fails after its tasks have their figures."""
    evaluated = seams.evaluated

    def broken(lm: Any, *given: Any, **options: Any) -> Any:
        results = evaluated(lm, *given, **options)
        if "sums-80" in lm.pretrained:
            raise ValueError("no figure")
        return results

    monkeypatch.setattr(seams, "evaluated", broken)
    given = words(recorded, tmp_path / "out", "sums-80", "sums-00", task="mine", batch=1)
    result = raced(capsys, *given, "--limit", "50", "--model_args", "dtype=float32", code=3)
    assert {c["label"]: c["status"] for c in result["checkpoints"]} == {
        "sums-00": "best",
        "sums-80": "failed",
    }
    check_stores(tmp_path / "out" / "sums-00")


def test_copies_are_not_told_apart(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = shutil.copytree(DEMO / "sums-80", tmp_path / "twin")
    result = raced(capsys, *words(tasks, tmp_path / "out", "sums-80", twin), "--margin", "0")
    assert [c["status"] for c in result["checkpoints"]] == ["best", "within"]


def test_a_folder_that_grew_names_the_best_of_one_race_of_all_and_loads_newcomers_alone(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    loaded, load = list[str](), seams.loaded_lm

    def noted(kind: str, given: Any, *more: Any, **options: Any) -> Any:
        loaded.append(Path(given["pretrained"]).name)
        return load(kind, given, *more, **options)

    monkeypatch.setattr(seams, "loaded_lm", noted)
    nights = (["sums-20", "sums-10"], ["sums-20", "sums-10", "sums-45"], ["sums-30"])
    for models, new in zip(nights, (["sums-20", "sums-10"], ["sums-45"], ["sums-30"]), strict=True):
        loaded.clear()
        grown = raced(capsys, *words(tasks, tmp_path / "out", *models))
        assert loaded == new
    (note,) = grown["notes"]
    assert note.startswith("Checkpoints joined this race after it had begun; ")
    assert (grown["of"], grown["loaded"]) == (4, 4)
    whole = raced(
        capsys, *words(tasks, tmp_path / "whole", "sums-20", "sums-10", "sums-45", "sums-30")
    )
    assert grown["best"] == whole["best"] == "sums-45"
    assert whole["notes"] == []
    # Another margin is judged by the answers that are there; who needs more is asked on, or undecided.
    monkeypatch.setattr(seams, "loaded_lm", None)
    wide = words(tasks, tmp_path / "out", "sums-30")
    found = raced(capsys, *wide, "--margin", "0.2")
    assert found["notes"] == [
        note,
    ]
    assert found["questions"] == grown["questions"]
    judged = raced(capsys, "race", "--replay", str(tmp_path / "out"), "--format", "json", "-q")
    assert standing(judged) == standing(grown)
    assert judged["notes"][-1] == "Judged by the answers in the folder; no model was loaded."
    results = next((tmp_path / "out").glob("sums-30/results_*"))
    samples_file = next((tmp_path / "out").glob("sums-30/samples_*"))
    content, lines = (
        json.loads(results.read_text()),
        samples_file.read_bytes().splitlines(keepends=True),
    )
    content["race"] |= {"questions": 5, "bytes": {"sums": sum(map(len, lines[:5]))}}
    results.write_text(json.dumps(content))
    judged = raced(capsys, "race", "--replay", str(tmp_path / "out"), "--format", "json", "-q")
    assert {c["label"]: c["status"] for c in judged["checkpoints"]}["sums-30"] == "undecided"
    first = json.loads(lines[0])
    first["filtered_resps"][0][0] = "nan"
    broken = json.dumps(first).encode() + b"\n"
    samples_file.write_bytes(b"".join([broken, *lines[1:]]))
    content["race"]["bytes"]["sums"] += len(broken) - len(lines[0])
    results.write_text(json.dumps(content))
    judged = raced(capsys, "race", "--replay", str(tmp_path / "out"), "--format", "json", "-q")
    failed = next(c for c in judged["checkpoints"] if c["label"] == "sums-30")
    assert failed["status"] == "failed"
    assert "the log-probabilities of 1 question are not finite" in failed["message"]


def test_a_budget_ends_a_race_with_what_is_known_and_the_same_command_goes_on(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words(tasks, tmp_path / "out", "sums-30", "sums-45", "sums-20")
    first = raced(capsys, *given, "--budget", "60")
    assert [(c["label"], c["status"]) for c in first["checkpoints"]] == [
        ("sums-30", "best"), ("sums-45", "undecided"), ("sums-20", "undecided"),
    ]  # fmt: skip
    assert first["questions"] == 60  # what is asked at once is ended
    late = raced(capsys, *given, "--hours", "0")
    assert standing(late) == standing(first)
    whole = raced(capsys, *words(tasks, tmp_path / "whole", "sums-30", "sums-45", "sums-20"))
    assert standing(raced(capsys, *given)) == standing(whole)
    assert main(["race", "--replay", str(tmp_path / "out"), "--metric", "acc"]) == 2
    assert "judged by the settings of that race; leave out --metric" in capsys.readouterr().err
    samples = json.loads((tmp_path / "out" / "samples.json").read_text())
    assert samples["sums"] == [
        *range(40)
    ]  # in order: lm-eval numbers an unsorted list wrongly (issue 4084)
    two = raced(capsys, *given, "--top", "2")
    assert two["top"] == ["sums-45", "sums-30"]


def test_a_dry_run_says_what_would_be_loaded_and_keeps_nothing(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(seams, "loaded_lm", None)
    given = words(tasks, tmp_path / "out", "sums-30", "sums-45", "sums-20")
    result = raced(capsys, *given, "--dry-run")
    assert (
        result["plan"]
        == "Dry run, nothing was loaded: the race would load 3 checkpoints and ask 60 to 120 questions."
    )
    assert result["answer"] == [result["plan"]]
    assert {c["status"] for c in result["checkpoints"]} == {"undecided"}
    screen = [
        "race",
        str(DEMO / "sums-*"),
        "--domain",
        "math",
        *given[given.index("--tasks") :],
        "--dry-run",
    ]
    about = (planned := raced(capsys, *screen))["plan"]
    (cheap,) = planned["notes"]
    assert cheap.startswith("Loading is cheap here")
    assert "--by block" in cheap
    size = re.search(r"load 5 checkpoints \(about (\S+) MB\)", about)
    assert size is not None
    weights = sum(file.stat().st_size for file in (DEMO / "sums-45").glob("*.safetensors"))
    assert float(size[1]) == pytest.approx(5 * weights / 1e6, rel=0.1)
    assert "by block" not in str(raced(capsys, *screen, "--by", "rows")["notes"])
    assert not (tmp_path / "out").exists()


def test_after_the_first_block_a_line_says_what_the_race_takes(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words(tasks, tmp_path / "out", "sums-45", "sums-30", "sums-20")
    given.remove("-q")
    expected = (
        r"The race will take up to about \d+ (s|min): 3 model loads and 60 to 120 questions\."
    )
    for forecasts in (1, 0):
        assert main([*given]) == 0
        lines = [line for line in capsys.readouterr().err.splitlines() if "loads" in line]
        assert len(lines) == forecasts
        assert all(re.fullmatch(expected, line) for line in lines)


def test_an_older_folder_is_replayed_by_those_that_were_asked_everything_and_not_continued(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    twin, out = shutil.copytree(DEMO / "sums-80", tmp_path / "a twin"), tmp_path / "out"
    both = [
        *words(tasks, out, "sums-80", "sums-00", twin, task="sums,sums_written"),
        "--margin",
        "0",
    ]
    raced(capsys, *both)
    content = json.loads((out / "race.json").read_text())
    del content["schema"]
    (out / "race.json").write_text(json.dumps(content))
    monkeypatch.setattr(seams, "loaded_lm", None)
    found = raced(capsys, "race", "--replay", str(out), "--format", "json", "-q")
    assert (found["loaded"], found["questions_each"], found["shuffled"]) == (2, 80, False)
    assert [Path(row["label"]).name for row in found["checkpoints"]] == ["sums-80", "a twin"]
    assert found["notes"][0] == "Raced by acc, exact_match."
    assert found["notes"][1] == "Only checkpoints that the race asked all questions are replayed."
    assert len(found["notes"]) == 3
    assert "equal to the last digit" in found["notes"][2]  # a twin
    assert main(both) == 2
    assert (
        f"expected a race by this version of lmeval-dispersion in {out}, got one by another version"
        in capsys.readouterr().err
    )
    shutil.rmtree(out / "a_twin")
    assert main(["race", "--replay", str(out)]) == 2
    assert (
        "were asked all questions, got 1 of 2; run the race to its end, or name finished"
        in capsys.readouterr().err
    )


def test_the_screen_comes_first_and_verify_judges_it(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"include_path": str(tasks), "device": "cpu", "batch_size": 16, "quiet": True}
    out = tmp_path / "out"
    found = lmeval_dispersion.race(
        [str(DEMO / "sums-*")],
        tasks="sums",
        domain="math",
        audit_sample=2,
        output_path=out,
        **options,
    )
    assert (found.best, found.of, len(found.audit_sample)) == ("sums-80", 9, 2)
    ranks = {c.label: c.rank for c in found.checkpoints}
    assert sorted(label for label, rank in ranks.items() if rank <= 3) == [
        "sums-30",
        "sums-45",
        "sums-80",
    ]
    assert {c.label for c in found.checkpoints if c.status == "not loaded"} <= {
        label for label, rank in ranks.items() if rank > 3
    }
    assert main(["verify", str(out), "--format", "json"]) == 0
    points = {p["label"]: p["accuracy"] for p in json.loads(capsys.readouterr().out)["points"]}
    assert points == {c.label: c.score for c in found.checkpoints if c.questions == 40}
    # The list of a folder, and that of a screening, are taken as they are.
    screened = lmeval_dispersion.screen([str(DEMO / "sums-*")], domain="math")
    short = screened.shown(screened.shortlist(1)).race(
        "sums", output_path=tmp_path / "short", **options
    )
    assert {c.label for c in short.checkpoints if c.questions} == {
        c.label for c in screened.shortlist(1).chosen
    }
    again = lmeval_dispersion.race(
        tmp_path.joinpath("short").as_posix(), output_path=out / "again", **options
    )
    assert [c.score for c in again.checkpoints] == [c.score for c in short.checkpoints]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--tasks", "none"], "lm-eval has no task 'none'"),
        (["--metric", "f1"], "expected a metric of sums, got 'f1'; name acc"),
        (
            ["--tasks", "lengths"],
            "--metric: lengths: expected a metric that scores each question from 0 to 1",
        ),
        (
            ["--tasks", "lengths", "--metric", "characters"],
            "expected scores from 0 to 1, got characters",
        ),
        (["--error", "1"], "--error: expected above 0 and below 1, got 1.0"),
        (["--margin", "1"], "--margin: expected from 0 to below 1, got 1.0"),
        (
            ["--base", "base"],
            "--base: needs a screen, but the checkpoints of a short list",
        ),
        (["--limit", "0"], "--limit: expected at least 1, got 0"),
        (["--seed", "-1"], "--seed: expected at least 0, got -1"),
        (["--output_path", "{tasks}/other"], "expected the folder of a race"),
        (
            ["--model", "nothing"],
            "--model: expected the name of a model that `lm_eval run --help` lists, such as hf, got 'nothing'",
        ),
        (
            ["--model_args", "dtype=float32, pretrained=a"],
            "got pretrained; name each checkpoint",
        ),
        (
            ["--metric", "characters", "--tasks", "lengths", "--model", "local-chat-completions"],
            "add apply_chat_template",
        ),
        (
            ["--tasks", "states", "--model", "local-completions"],
            "which LocalCompletionsAPI does not give",
        ),
        (
            ["--tasks", "sums_dispersion"],
            "lm-eval has no task 'sums_dispersion'; did you mean sums",
        ),
    ],
)
def test_what_cannot_be_raced_is_one_sentence(
    more: list[str], sentence: str, in_world: Path, tasks: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    lengths = yaml.safe_load((tasks / "sums_written.yaml").read_text()) | {"task": "lengths"}
    shown = {"metric": "characters", "aggregation": "mean", "higher_is_better": True}
    lengths |= {"metric_list": [shown], "process_results": "!function lengths.scored"}
    (tmp_path / "lengths.yaml").write_text(yaml.safe_dump(lengths).replace("'!function", "!function").replace(
        "scored'", "scored"))  # fmt: skip
    (tmp_path / "states.yaml").write_text(
        "include: sums.yaml\ntask: states\nclass: !function lmeval_dispersion.harness.DispersionTask\n"
    )
    (tmp_path / "lengths.py").write_text(
        "def scored(doc, results):\n    return {'characters': len(results[0]) + 2.0}"
    )
    for name in ("sums.yaml", "sums.jsonl"):
        shutil.copy(tasks / name, tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "race.json").write_text('{"laps": 3}')
    at = more.index("--tasks") if "--tasks" in more else len(more)
    given = words(tmp_path, tmp_path / "out", "sums-80", task=[*more[at + 1 : at + 2], "sums"][0])
    more = [word.format(tasks=tmp_path) for word in more[:at] + more[at + 2 :]]
    assert main([*given, *more]) in (1, 2)
    assert sentence in capsys.readouterr().err


def test_a_folder_of_another_race_is_refused(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*words(tasks, tmp_path / "out", "sums-80"), "--limit", "25"]
    raced(capsys, *given)
    for option, value, sentence in (
        ("--seed", "1", "has the answers of a race with another seed (0, now 1)"),
        ("--num_fewshot", "3", "with other prompts or examples of sums;"),
        (
            "--by",
            "block",
            f"expected rows, the order in which the race in {tmp_path / 'out'} began, got block",
        ),
        ("--limit", "30", "with another number of questions (25, now 30)"),
    ):
        assert main([*given, option, value]) == 2
        assert sentence in capsys.readouterr().err


class Server(BaseHTTPRequestHandler):
    """Completions and chats as OpenAI's: the model ``right`` knows sums, any other errs."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = asked["prompt"] if "prompt" in asked else asked["messages"][-1]["content"]
        first, second, said = re.search(r"(\d+)\+(\d+)=(\d*)[.]?$", text).groups()
        total, knows = f"{int(first) + int(second)}", asked["model"] == "lab/right:8b"
        choice = {"index": 0, "message": {"content": f"{total if knows else 0}."}}
        # A token a character, and one more that is not asked for.
        logs = [-float((said == total) != knows)] * (len(text) + 1)
        choice["logprobs"] = {"token_logprobs": logs, "top_logprobs": [{"a": 0.0}] * len(logs)}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [choice]}).encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.mark.parametrize(
    ("kind", "task"), [("completions", "sums"), ("chat-completions", "sums_written")]
)
def test_names_on_a_server_race(
    kind: str,
    task: str,
    in_world: Path,
    tasks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Names that no folder and no repository has."""
    chats = kind == "chat-completions"
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        place = f"base_url=http://127.0.0.1:{server.server_port}"
        more = "" if chats else f",tokenizer={DEMO / 'sums-80'},tokenized_requests=False"
        given = words(tasks, tmp_path / "out", "NAMES", task=task, batch=1)
        at = next(i for i, word in enumerate(given) if word.endswith("NAMES"))
        given[at : at + 1] = ["..", "lab/right:8b"]
        given += ["--model", f"local-{kind}", "--model_args", place + more]
        result = raced(capsys, *given, *(["--apply_chat_template"] if chats else []))
        server.shutdown()
    assert standing(result) == [("lab/right:8b", 40, 1.0, "best"), ("..", 40, 0.0, "behind")]
    assert not [*tmp_path.glob("results_*")]  # a folder of its own
    assert read_logged(tmp_path / "out" / "lab_right_8b").model == "lab/right:8b"


def test_two_races_do_not_share_a_folder(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    given = words(tasks, tmp_path / "out", "sums-80")
    with FileLock(tmp_path / "out" / ".lock"):
        assert main(given) == 2
    assert f"another race runs in {tmp_path / 'out'}; wait until it ends" in capsys.readouterr().err
    assert not (tmp_path / "out" / "race.json").exists()
    assert raced(capsys, *given)["best"] == "sums-80"


@pytest.fixture
def shots(tasks: Path, tmp_path: Path) -> Path:
    """A task of a user's own: two examples drawn from a file, scored by a function."""
    folder = tmp_path / "mine"
    folder.mkdir()
    lines = (tasks / "sums.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("train", lines[:10]), ("test", lines[10:])):
        (folder / f"{name}.jsonl").write_text("".join(part))
    (folder / "scoring.py").write_text(
        "import numpy as np\n\n\ndef scored(doc, results):\n"
        "    return {'acc': float(np.argmax([float(log) for log, _ in results]) == doc['label'])}"
    )
    config = yaml.safe_load((tasks / "sums.yaml").read_text())
    files = {name: str(folder / f"{name}.jsonl") for name in ("train", "test")}
    config |= {"dataset_kwargs": {"data_files": files}, "fewshot_split": "train", "num_fewshot": 2}
    text = yaml.safe_dump(config) + "process_results: !function scoring.scored\n"
    (folder / "sums.yaml").write_text(text)
    return folder


def test_after_ctrl_c_a_race_goes_on_with_the_same_task_alone(
    in_world: Path, shots: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    given = words(shots, tmp_path / "out", "sums-80", "sums-20")
    with monkeypatch.context() as patch:
        interrupted_after(0, "sums-20", patch)
        stopped = raced(capsys, *given, code=130)
    assert [c["status"] for c in stopped["checkpoints"]] == ["best", "undecided"]
    for name, before, after, changed in (
        ("train.jsonl", "7+5=12.", "7+5=13.", "prompts or examples"),
        ("test.jsonl", "7+5=12.", "7+5=13.", "prompts or examples and documents"),
        ("scoring.py", "argmax", "argmin", "scoring"),
        ("sums.yaml", "{{q}}", "{{q}} ", "prompts or examples"),
    ):
        text = (shots / name).read_text()
        assert before in text
        (shots / name).write_text(text.replace(before, after))
        assert main(given) == 2
        said = capsys.readouterr().err
        assert (
            f"out has the answers of a race with other {changed} of sums; name another folder"
            in said
        )
        assert len(said) < 300
        (shots / name).write_text(text)
    result = raced(capsys, *given)
    assert (result["best"], result["loaded"]) == ("sums-80", 2)


def test_a_fault_of_the_task_ends_the_race_after_two_checkpoints(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """lm-eval's f1 has no figure for four choices; that a checkpoint cannot be loaded is its own fault."""
    config = yaml.safe_load((tasks / "sums.yaml").read_text())
    config["metric_list"].append({"metric": "f1", "aggregation": "f1", "higher_is_better": True})
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump(config))
    broken = shutil.copytree(DEMO / "sums-00", tmp_path / "broken")
    (broken / "model.safetensors.index.json").write_text("{}")
    load, loaded = seams.loaded_lm, []

    def counted(*given: Any, **options: Any) -> Any:
        loaded.append(load(*given, **options))
        return loaded[-1]

    monkeypatch.setattr(seams, "loaded_lm", counted)
    given = words(tmp_path, tmp_path / "out", broken, "sums-80", "sums-45", "sums-30", "sums-20")
    assert main(given) == 1
    said = capsys.readouterr().err
    assert "average='binary'" in said
    assert "(sums-80 and sums-45 failed in the same way, so no other checkpoint was loaded;" in said
    assert len(loaded) == 2


def test_prompts_that_differ_under_one_chat_template_are_named(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of a template with the date do; here it has a token that the second tokenizer renamed."""
    models = [
        shutil.copytree(DEMO / "sums-80", tmp_path / name) for name in ("first", "alike", "other")
    ]
    for model, token in zip(models, ("</s>", "</s>", "<s>"), strict=True):
        config = model / "tokenizer_config.json"
        chat = "{{ eos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
        config.write_text(
            json.dumps(json.loads(config.read_text()) | {"chat_template": chat, "eos_token": token})
        )
    given = [*words(tasks, tmp_path / "out", *models, task="sums_written"), "--apply_chat_template"]
    given += ["--limit", "25"]
    for _ in range(2):  # of answers that are there, too
        assert raced(capsys, *given)["notes"] == [
            "other: for 25 questions, the chat template gave a different prompt than for earlier "
            "checkpoints, for example because it contains the date."
        ]
    evaluation = asked_of("sums_written", tasks, limit=25)  # without a template

    def score(label: str) -> None:
        text = next((tmp_path / "out" / label).glob("samples_*")).read_text()
        given = ({"sums_written": text}, {"sums_written": {"output_type": "generate_until"}})
        evaluation.scores(label, None, *given)

    score("alike")
    with pytest.raises(
        HarnessError, match=r"other got document .* of sums_written with a different prompt"
    ):
        score("other")


def changed(
    folder: Path, source: str, change: Callable[[str, Any], tuple[str, Any] | None]
) -> Path:
    """A copy of a bundled model, whose named tensors are changed or left out."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(DEMO / source, folder)
    index = folder / "model.safetensors.index.json"
    files = {}
    for file in folder.glob("*.safetensors"):
        pairs = [change(name, tensor) for name, tensor in load_file(file).items()]
        tensors = dict(pair for pair in pairs if pair)
        save_file(tensors, file, {"format": "pt"})
        files |= dict.fromkeys(tensors, file.name)
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def failures(result: dict[str, Any]) -> dict[str, str]:
    """The sentences of the checkpoints that failed."""
    return {c["label"]: c["message"] for c in result["checkpoints"] if c["status"] == "failed"}


def test_one_whose_weights_would_be_random_fails(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """https://github.com/pytorch/pytorch/issues/101107: saved from a compiled model, and half of a save."""
    compiled = changed(
        tmp_path / "compiled", "sums-80", lambda name, tensor: (f"_orig_mod.{name}", tensor)
    )
    half = changed(
        tmp_path / "half",
        "sums-80",
        lambda name, tensor: None if "layers.1." in name else (name, tensor),
    )
    result = raced(capsys, *words(tasks, tmp_path / "out", compiled, "sums-00", half), code=3)
    assert result["best"] == "sums-00"
    sentences = failures(result)
    assert sentences.keys() == {"compiled", "half"}
    assert "30 of its 30 tensors" in sentences["compiled"]
    assert "_orig_mod.model.embed_tokens.weight" in sentences["compiled"]
    assert "9 of its 30 tensors" in sentences["half"]
    assert "model.layers.1." in sentences["half"]


def first_is_right(tasks: Path, folder: Path, **more: Any) -> Path:
    """The folder, with the sums of choices of which the first is right, as truthfulqa_mc1's is."""
    rows = [json.loads(line) for line in (tasks / "sums.jsonl").read_text().splitlines()]
    for row in rows:
        right = row["choices"].pop(row["label"])
        row["choices"].insert(0, right)
    config = yaml.safe_load((tasks / "sums.yaml").read_text())
    file = folder / "first.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config |= {
        "task": "first",
        "doc_to_target": 0,
        "dataset_kwargs": {"data_files": {"test": str(file)}},
    }
    (folder / "first.yaml").write_text(yaml.safe_dump(config | more))
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_answers_that_are_no_numbers_never_win(
    value: float, in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of NaN alone the first is the largest, so that the damaged one would have 100 %."""
    folder = first_is_right(tasks, tmp_path)
    damaged = changed(tmp_path / "damaged", "sums-80", lambda name, tensor: (name, tensor * value))
    for _ in range(2):
        result = raced(
            capsys, *words(folder, tmp_path / "out", damaged, "sums-30", task="first"), code=3
        )
        assert result["best"] == "sums-30"
        sentence = failures(result)["damaged"]
        assert "the log-probabilities of 10 questions are not finite" in sentence
        assert "dtype=float32" in sentence


def test_kept_answers_that_are_no_numbers_fail_without_a_load(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As an earlier version kept them; -inf beside a number is an answer."""
    given = words(tasks, tmp_path / "out", "sums-80", "sums-45")
    before = raced(capsys, *given)
    for label, text in (("sums-80", "-Infinity"), ("sums-45", "NaN")):
        (file,) = (tmp_path / "out" / label).glob("samples_sums_*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        wrong = next(place for place in range(4) if place != int(lines[0]["target"]))
        for key in ("resps", "filtered_resps"):
            answer = lines[0][key][wrong]
            pair = answer[0] if key == "resps" else answer
            pair[0] = text
        content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        file.write_text(content)
        (results,) = (tmp_path / "out" / label).glob("results_*.json")
        kept = json.loads(results.read_text())
        kept["race"]["bytes"]["sums"] = len(content.encode())
        results.write_text(json.dumps(kept))
    monkeypatch.setattr(seams, "loaded_lm", None)
    result = raced(capsys, *given, code=3)
    assert result["best"] == before["best"] == "sums-80"
    assert "the log-probabilities of 1 question are" in failures(result)["sums-45"]


def test_who_is_right_by_a_rule_of_the_tasks_own_has_no_probability(
    in_world: Path, tasks: Path, tmp_path: Path
) -> None:
    """truthfulqa_mc2: the target is the first choice, and only its function knows the right ones."""
    (tmp_path / "rules.py").write_text(
        "import math\n"
        "def mass(doc, results):\n"
        "    shares = [math.exp(log) for log, _ in results]\n"
        "    return {'acc': sum(shares[1:]) / sum(shares)}\n"
        "def last(doc, results):\n"
        "    return {'acc': float(max(results) == results[-1])}\n"
    )
    lm = from_folder(DEMO / "sums-80")
    found = {}
    for rule in ("mass", "last", ""):
        text = f"process_results: !function rules.{rule}\n" if rule else ""
        first_is_right(tasks, tmp_path)
        with (tmp_path / "first.yaml").open("a") as file:
            file.write(text)
        evaluation = asked_of("first", tmp_path, limit=25)
        results = evaluation.ask(lm, range(25))
        scores = evaluation.scores("a", None, seams.logged_lines(results), results["configs"])
        found[rule] = scores
        assert evaluation.own_rules == ({"first"} if rule else set())
    np.testing.assert_array_equal(found["mass"].probability, found["mass"].score)
    assert np.isnan(found["last"].probability).all()
    np.testing.assert_allclose(found[""].probability, 1 - found["mass"].score, atol=1e-9)


@pytest.mark.parametrize(
    "questions",
    [["02", "03", "x"], ["x", "02", "03"], ["x", "12", "13"]],
    ids=["first", "later", "index"],
)
def test_a_question_of_digits_alone_is_a_sentence(
    questions: list[str], in_world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"q": question}) + "\n" for question in questions]
    (tmp_path / "digits.jsonl").write_text("".join(rows))
    mean = {"aggregation": "mean", "higher_is_better": True}
    config = {
        "task": "digits",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "digits.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": ["a", "b"],
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc", **mean}],
    }
    (tmp_path / "digits.yaml").write_text(yaml.safe_dump(config))
    assert main(words(tmp_path, tmp_path / "out", "sums-00", task="digits")) == 1
    sentence = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"doc_to_text gives '{next(q for q in questions if q != 'x')}'" in sentence
    assert "a word before" in sentence


@pytest.mark.parametrize(
    "metrics",
    [
        [{"metric": "bleu", "aggregation": "bleu", "higher_is_better": True}],
        [{"metric": "ter"}, {"metric": "chrf"}],
        [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": False}],
    ],
    ids=lambda metrics: metrics[0]["metric"],
)
def test_an_unusable_metric_is_refused_before_a_model_is_loaded(
    metrics: list[dict[str, Any]], in_world: Path, tasks: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = yaml.safe_load((tasks / "sums_written.yaml").read_text()) | {"metric_list": metrics}
    (tmp_path / "sums_written.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(seams, "loaded_lm", None)
    for more in ([], ["--metric", metrics[0]["metric"]]):
        assert (
            main([*words(tmp_path, tmp_path / "out", "sums-80", task="sums_written"), *more]) == 2
        )
        said = capsys.readouterr().err
        assert (
            "--metric: sums_written: expected a metric that scores each question from 0 to 1, where higher"
            in said
        )
        given = more[1:] or [metric["metric"] for metric in metrics]
        assert f"higher is better, got {', '.join(given)}; leave the task out" in said


def test_choices_that_a_task_shuffles_as_it_is_loaded_are_the_same_each_time(
    in_world: Path, tasks: Path, tmp_path: Path
) -> None:
    """As gpqa does; else a race that goes on, and each worker, would ask other questions."""
    for name in ("sums.yaml", "sums.jsonl"):
        shutil.copy(tasks / name, tmp_path)
    (tmp_path / "shuffled.py").write_text(
        "import random\n\n\ndef docs(split):\n"
        "    drawn = [random.random() for _ in split]\n    return split.add_column('drawn', drawn)"
    )
    content = (tmp_path / "sums.yaml").read_text()
    (tmp_path / "sums.yaml").write_text(content + "\nprocess_docs: !function shuffled.docs\n")
    again = [asked_of("sums", tmp_path).identity() for _ in range(2)]
    assert again[0] == again[1]


def test_a_tasks_template_is_compiled_once(in_world: Path, tasks: Path) -> None:
    """And gives what lm-eval's own gives, also where two templates differ in a space."""
    from jinja2 import Environment
    from lm_eval.utils import apply_template, env

    requests = asked_of("sums", tasks).identity()
    before = env.from_string.cache_info()
    assert asked_of("sums", tasks).identity() == requests
    assert env.from_string.cache_info().misses == before.misses
    for template in ("{{q}} ", "{{q}}"):
        assert apply_template(template, {"q": "7+5"}) == Environment().from_string(template).render(
            q="7+5"
        )


def test_a_race_screens_by_the_answers_of_its_own_task(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `dispersion tokens` counts them; lm-eval's prompts and the settings stay as they are without."""
    models = [str(DEMO / f"sums-{name}") for name in ("80", "45", "20", "00")]
    shared = ["--include_path", str(tasks)]
    backend = [
        "--device",
        "cpu",
        "--batch_size",
        "16",
        "--num_fewshot",
        "2",
        "--format",
        "json",
        "-q",
    ]
    out = [str(tmp_path / name) for name in ("own", "domain", "file")]
    own = raced(
        capsys, "race", *models, "--task", "sums", *shared, *backend, "--output_path", out[0]
    )
    note = next(note for note in own["notes"] if note.startswith("Screened by "))
    counted, tokens = note.removesuffix(".").split(": ")
    assert (
        counted
        == f"Screened by {len(tokens.split())} tokens from the answers of sums (40 documents)"
    )
    assert {*"0123456789"} <= {*tokens.split()}
    settings = [json.loads(Path(place, "race.json").read_text()) for place in out[:1]]
    given = ["race", *models, "--domain", "math", "--tasks", "sums", *shared, *backend]
    raced(capsys, *given, "--output_path", out[1])
    settings.append(json.loads(Path(out[1], "race.json").read_text()))
    assert settings[0]["identity"] == settings[1]["identity"]
    # The same by a file, which names the task.
    assert main(["tokens", "sums", *shared, "-o", str(tmp_path / "sums.yaml"), "-q"]) == 0
    capsys.readouterr()
    file = str(tmp_path / "sums.yaml")
    by_file = raced(
        capsys, "race", *models, "--task", file, *shared, *backend, "--output_path", out[2]
    )
    assert by_file["task"] == "sums"
    shown = [{c["label"]: c["rank"] for c in result["checkpoints"]} for result in (own, by_file)]
    assert shown[0] == shown[1]
    # What goes on is not counted again.
    again = raced(
        capsys, "race", *models, "--task", "sums", *shared, *backend, "--output_path", out[0]
    )
    assert (again["notes"], standing(again)) == (own["notes"], standing(own))
    assert main([*given, "--domain", file, "--output_path", str(tmp_path / "none")]) == 2
    assert (
        "sums.yaml holds answers of a task, not words: give it as the task"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (
            "one two {i} {i} three four five six seven eight nine ten",
            "100% of its answers are sentences",
        ),
        ("{i} yes", "too many different words"),
    ],
)
def test_own_answers_without_tokens_need_a_domain_or_all(
    answer: str,
    why: str,
    in_world: Path,
    tasks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    letters = "".join(chr(97 + i) for i in range(26))
    words = [a + b + c for a in letters for b in letters for c in "mnop"][:600]
    rows = [{"q": word, "answer": answer.replace("{i}", word)} for word in words]
    for row, word in zip(rows, words, strict=True):
        row["answer"] += "".join(
            f" {word[::-1]}{letter}" for letter in "abcdefg" if "one" in answer
        )
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = (tasks / "sums_written.yaml").read_text().replace(str(tasks), str(tmp_path))
    (tmp_path / "sums_written.yaml").write_text(content)
    given = [
        "race",
        str(DEMO / "sums-80"),
        "--tasks",
        "sums_written",
        "--include_path",
        str(tmp_path),
    ]
    assert main([*given, "--output_path", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "--domain: expected a token set to screen by" in error
    assert "(sums_written: " in error
    assert why in error
    assert "or race all checkpoints without a screen (`all`)" in error
    assert main(["race", str(DEMO / "sums-80")]) == 2
    assert "--tasks: expected the names of tasks" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not NEXT, reason="LM_EVAL_NEXT names no folder with lm-eval 0.5")
def test_the_next_lm_eval_races_alike(in_world: Path, recorded: Path, tmp_path: Path) -> None:
    results = []
    for name, path in (("now", ""), ("later", NEXT)):
        given = words(
            recorded, tmp_path / name, "sums-80", "sums-20", task="sums_written,mine", batch=1
        )
        command = [sys.executable, "-W", "ignore", "-c", COMMAND, *given, "--num_fewshot", "2"]
        done = subprocess.run(
            command, env=environment(path), cwd=in_world, capture_output=True, timeout=250
        )
        assert done.returncode == 0, done.stderr[-2000:]
        results.append(json.loads(done.stdout))
    assert standing(results[0]) == standing(results[1])
    now, later = (read_logged(tmp_path / name / "sums-80").documents for name in ("now", "later"))
    keys = ["task", "doc_id", "prompt_hash", "correct"]
    assert now[keys].equals(later[keys])
    for label in ("sums-80", "sums-20"):
        stores = [
            read_store(next(tmp_path.glob(f"{name}/{label}/dispersion_*")))
            for name in ("now", "later")
        ]
        check_same_store(*stores)
