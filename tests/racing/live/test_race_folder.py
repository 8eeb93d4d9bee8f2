"""A race's folder from elsewhere: what it names is not loaded because it names it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_race import DEMO, raced, standing, words

from lmeval_dispersion.cli import main
from lmeval_dispersion.harness import seams

pytestmark = pytest.mark.usefixtures("named_tasks_alone")
CODE = """open({marker!r}, "w").write("code ran")
from transformers import LlamaConfig, LlamaForCausalLM
class EvilConfig(LlamaConfig): model_type = "evilx"
class EvilModel(LlamaForCausalLM): config_class = EvilConfig
"""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that exists once a checkpoint's code has run."""
    return tmp_path / "marker"


@pytest.fixture
def evil(tmp_path: Path, marker: Path) -> Path:
    """A checkpoint with code of its own."""
    folder = Path(shutil.copytree(DEMO / "sums-20", tmp_path / "evil"))
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "evilx"
    config["auto_map"] = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(CODE.format(marker=str(marker)))
    return folder


@pytest.fixture(scope="module")
def finished(tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished race, to be copied."""
    return tmp_path_factory.mktemp("finished") / "out"


@pytest.fixture
def out(
    finished: Path, in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Path:
    """A copy of a finished race of two checkpoints."""
    if not finished.exists():
        raced(capsys, *words(tasks, finished, "sums-80", "sums-30"))
    return Path(shutil.copytree(finished, tmp_path / "out"))


def changed(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the folder's race.json."""
    content = json.loads((out / "race.json").read_text())
    change(content)
    (out / "race.json").write_text(json.dumps(content))


def test_an_added_checkpoint_is_left_out_and_its_code_does_not_run(
    out: Path, evil: Path, marker: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words(tasks, out, "sums-80", "sums-30")
    before = raced(capsys, *given)
    friend = ["friend", {"pretrained": str(evil), "trust_remote_code": "True"}, None, "named"]
    changed(out, lambda race: race["checkpoints"].append(friend))
    result = raced(capsys, *given)
    assert standing(result)[:2] == standing(before)
    assert standing(result)[2] == ("friend", 0, None, "not loaded")
    (note,) = [
        note
        for note in result["notes"]
        if note.startswith("friend was not loaded, because this command does not name it;")
    ]
    assert f"dispersion race … {evil} --tasks sums --output_path {out}" in note
    assert not marker.exists()
    # Named by the command, it is raced; its code runs only if the command says so too.
    named = words(tasks, out, "sums-80", "sums-30", evil)
    assert main(named) == 2
    assert "--model_args: expected trust_remote_code=True, which" in capsys.readouterr().err
    assert not marker.exists()


def test_with_trust_remote_code_the_folder_brings_no_other_code(
    in_world: Path,
    evil: Path,
    marker: Path,
    tasks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither a checkpoint, nor a tokenizer or base of a named one, nor the arguments of earlier answers."""
    out = tmp_path / "trusting"
    trust = ("--model_args", "trust_remote_code=True")
    given = words(tasks, out, "sums-80", "sums-30")
    before = raced(capsys, *given, *trust)
    place = str((DEMO / "sums-30").resolve())

    def change(race: dict[str, Any]) -> None:
        race["checkpoints"][1][1] = {"pretrained": str(evil), "peft": place, "tokenizer": str(evil)}
        race["checkpoints"].append(["friend", {"pretrained": str(evil)}, None, "named"])
        race["checkpoints"].append(
            ["friend (base)", {"pretrained": str(evil), "peft": ""}, None, "base"]
        )

    changed(out, change)
    for file in out.glob("sums-30/*"):
        file.unlink()
    result = raced(capsys, *given, *trust)
    assert standing(result)[:2] == standing(before)
    (results,) = out.glob("sums-80/results_*.json")
    content = json.loads(results.read_text())
    content["config"]["model_args"]["pretrained"] = str(evil)
    content["config"]["model_args"]["trust_remote_code"] = True
    content["race"]["questions"] = 0
    content["race"]["bytes"] = {}
    results.write_text(json.dumps(content))
    assert standing(raced(capsys, *given, *trust))[:2] == standing(before)
    assert not marker.exists()


def test_an_unnamed_checkpoint_with_answers_counts_and_is_asked_no_more(
    out: Path, tasks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a dropped one the rest is not asked by a command that names the best alone."""
    monkeypatch.setattr(seams, "loaded_lm", None)
    alone = [*words(tasks, out, "sums-80"), "--margin", "0.9"]
    result = raced(capsys, *alone)
    labels = {c["label"]: (c["status"], c["questions"]) for c in result["checkpoints"]}
    assert labels["sums-80"] == ("best", 40)
    assert labels["sums-30"][1] >= 10


@pytest.mark.parametrize("option", ["--error", "--top"])
def test_margins_are_kept_as_the_race_began(
    option: str, out: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of another error, or of more best ones, are not shown later as if they were its own."""
    before = [[50, 0.5]]
    changed(out, lambda race: race.update(margins=before))
    value = {"--error": "0.4", "--top": "2"}[option]
    raced(capsys, *words(tasks, out, "sums-80", "sums-30"), option, value)
    assert json.loads((out / "race.json").read_text())["margins"] == before
    again = raced(capsys, *words(tasks, out, "sums-80", "sums-30"))
    first = again["margins"][0]
    assert [[first["questions"], first["margin"]]] == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("date", value) for value in ("../x", "a/b", "..", "", ".x", "x" * 300, 7, None, "a\0b")),
        *(
            ("checkpoints", value)
            for value in (None, {}, [1], [["a"]], [["a", {}, None, "named", 1]])
        ),
        ("checkpoints", [["a", {"pretrained": 1}, None, "named"]]),
        ("checkpoints", [["a", {}, 0, "named"]]),
        ("checkpoints", [["a", {}, None, "mine"]]),
        ("checkpoints", [["a", {"pretrained": "x"}, None, "named"]] * 2),
        ("turns", [1]),
        ("turns", {"a": "b"}),
        ("drawn", [["../x", 1]]),
        ("drawn", [["sums", -1]]),
        ("identity", [["sums"]]),
        ("order", "mine"),
        ("times", "2"),
        ("error", 7),
        ("top", 0),
        ("margin", "wide"),
        ("notes", [1]),
    ],
)
def test_a_damaged_folder_is_one_sentence(
    key: str, value: Any, out: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(out, lambda race: race.update({key: value}))
    for given in (words(tasks, out, "sums-80", "sums-30"), ["race", "--replay", str(out)]):
        assert main(given) == 2
        said = capsys.readouterr().err
        assert f"race.json is damaged (`{key}" in said, said


def test_files_outside_the_folder_are_neither_cut_nor_removed_nor_written(
    out: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By names of tasks, by dates, and through links."""
    given = words(tasks, out, "sums-80", "sums-30")
    (results,) = out.glob("sums-30/results_*.json")
    content = json.loads(results.read_text())
    date = results.stem.removeprefix("results_")
    victim = tmp_path / f"victim_{date}.jsonl"
    victim.write_text("precious\n")
    for task in ("../../victim", "/etc/passwd", "none"):
        content["race"]["bytes"] = {task: 3}
        results.write_text(json.dumps(content))
        assert main(given) == 1
        assert "is not as the race left it" in capsys.readouterr().err
        assert victim.read_text() == "precious\n"
    shutil.copy(victim, tmp_path / "kept")
    samples = next(out.glob("sums-30/samples_*"))
    samples.unlink()
    os.symlink(victim, samples)
    assert main(given) == 1
    assert f"{samples.name} is a link" in capsys.readouterr().err
    assert victim.read_text() == "precious\n"


@pytest.mark.parametrize(
    "change",
    [
        {"block": [1]},
        {"block": {"probability": "high"}},
        {"block": {"tokens": ["a"]}},
        {"block": {"tokens": 3}},
        {"doc_id": 1e400},
        {"acc": 10**400},
        {"resps": 1},
        {"metrics": None},
    ],
)
def test_a_changed_answer_is_one_sentence(
    change: dict[str, Any], out: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (samples,) = out.glob("sums-30/samples_*")
    (results,) = out.glob("sums-30/results_*.json")
    lines = samples.read_text().splitlines()
    lines[3] = json.dumps(json.loads(lines[3]) | change)
    samples.write_text("".join(f"{line}\n" for line in lines))
    content = json.loads(results.read_text())
    content["race"]["bytes"] = {"sums": samples.stat().st_size}
    results.write_text(json.dumps(content))
    assert main(words(tasks, out, "sums-80", "sums-30")) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "InternalError" not in said
    assert "sums-30" in said or "samples of sums" in said, said
