"""The study on the real Hub, against a loopback Hub that serves repositories and scores in its layouts.

Layouts: those of hub.yaml. DataDecide's configurations and tensors are hf_olmo's, Pythia's are gpt_neox's;
scores are parquet files with metrics as text, and JSON of lm-eval in a git repository.
"""

import itertools
import json
import subprocess
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from checkpoints import write_checkpoint
from hub_server import HubServer

from benchmarks.validity import hub as study
from lmeval_dispersion.installation import data_folder

TOKENIZER = data_folder("demo") / "sums-00" / "tokenizer.json"
VOCABULARY = json.loads(TOKENIZER.read_text("utf-8"))["model"]["vocab"]
DIGITS = [VOCABULARY[str(digit)] for digit in range(10)]
ROWS, WIDTH = len(VOCABULARY) + 24, 8
OLMO = {
    "model_type": "hf_olmo",
    "weight_tying": False,
    "vocab_size": ROWS - 4,
    "embedding_size": ROWS,
}
OLMO_NAMES = ("model.transformer.ff_out.weight", "model.transformer.wte.weight")
NEOX = {"model_type": "gpt_neox", "tie_word_embeddings": False, "vocab_size": ROWS}
NEOX_NAMES = ("embed_out.weight", "gpt_neox.embed_in.weight")

SEEDS = ["default", "small-aux-2"]
RECIPES = ["dolma1_7", "c4", "falcon", "fineweb-edu", "dclm-baseline", "fineweb-pro"]
STEPS = {"4M": [1250, 5725], "20M": [14584]}
SCORED = [
    (recipe, size, seed, step)
    for recipe, size, seed in itertools.product(RECIPES, STEPS, SEEDS)
    for step in STEPS[size]
]
PYTHIAS = list(itertools.product(("", "-deduped"), (3000, 143000)))


def gap_of(recipe, seed, step):
    """The planted gap: by recipe first, a little by seed and step."""
    return 0.2 + 0.1 * RECIPES.index(recipe) + 0.02 * SEEDS.index(seed) + 0.03 * (step > 2000)


def skill_of(recipe, seed, step):
    return 0.3 + 0.5 * gap_of(recipe, seed, step)


def rows_of(gap):
    """Rows whose digits lie in one direction at a ``gap`` of 0, and each in its own at 1."""
    rows = np.random.default_rng(1).normal(size=(ROWS, WIDTH))
    rows[DIGITS] = gap * rows[DIGITS] + (1 - gap) * rows.mean(0) / np.linalg.norm(rows.mean(0))
    noise = np.random.default_rng(int(gap * 1e6))
    return rows * noise.uniform(0.8, 1.2) + 0.02 * noise.normal(size=rows.shape)


def serve(hub, folder, name, branch, gap, config=OLMO, names=OLMO_NAMES):
    """A checkpoint on a branch, and on the main one where the repository has none yet."""
    place = folder / name.replace("/", "--") / branch
    tensors = dict(
        zip(names, (("F32", rows_of(gap)), ("F32", np.zeros((ROWS, WIDTH)))), strict=True)
    )
    write_checkpoint(place, tensors, config=config)
    (place / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    if name not in hub.repositories:
        hub.add(name, place)
    hub.add(name, place, branch=branch)


def write_parquet_scores(folder, suite):
    """DataDecide-eval-results: a row a task, with metrics as JSON or as a Python dictionary."""
    lines = []
    for recipe, size, seed, step in SCORED:
        names = {"data": suite["names"]["recipe"][recipe], "seed": suite["names"]["seed"][seed]}
        line = {"params": size, "step": float(step), "chinchilla": "5xC"} | names
        accuracy = skill_of(recipe, seed, step)
        metrics = {
            "primary_metric": accuracy,
            "correct_prob_per_char": accuracy / 2,
            "no_answer": None,
        }
        for task, written in zip(suite["tasks"], itertools.cycle([json.dumps, str])):
            lines.append({**line, "task": task, "metrics": written(metrics)})
        lines.append({**line, "task": "mmlu_virology", "metrics": str({"primary_metric": 0.5})})
    (folder / "data").mkdir(parents=True)
    half = len(lines) // 2
    for name, part in (
        ("train-0", lines[:half]),
        ("train-1", lines[half:]),
        ("law_fit-0", [{"other": 1}]),
    ):
        pq.write_table(pa.Table.from_pylist(part), folder / "data" / f"{name}.parquet")
    return folder


def write_git_scores(folder, tasks):
    """Results of lm-eval as in 2023, metrics without their filter; every second file is of another step."""
    for (recipe, step), wrong in itertools.product(PYTHIAS, (False, True)):
        name = "other" if wrong else f"70m{recipe}"
        file = folder / f"evals/pythia-v1/pythia-70m{recipe}/zero-shot/{name}_step{step}.json"
        model = f"pretrained=EleutherAI/pythia-v1.1-70m{recipe},revision=step{7 if wrong else step}"
        results = {"acc": 0.9 if wrong else 0.3, "acc_stderr": 0.01, "acc_norm": 0.0}
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {"results": dict.fromkeys(tasks, results), "config": {"model_args": model}}
        file.write_text(json.dumps(content), "utf-8")
    who = [
        "-c",
        "user.name=Test",
        "-c",
        "user.email=test@example.org",
        "-c",
        "commit.gpgsign=false",
    ]
    for words in (
        ["init", "-q"],
        ["config", "uploadpack.allowFilter", "true"],
        ["add", "-A"],
        [*who, "commit", "-qm", "Results"],
    ):
        subprocess.run(["git", *words], cwd=folder, check=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the committed configuration, with fewer recipes and sizes."""
    folder = tmp_path_factory.mktemp("hub-study")
    content = yaml.safe_load(study.CONFIGURATION.read_text("utf-8"))
    names = content["datadecide"]["names"]
    names["recipe"] = {key: names["recipe"][key] for key in RECIPES}
    names["size"] = {size: size for size in STEPS}
    content["pythia"]["names"]["size"] = {"70m": "70m"}
    content["pythia"]["scores"]["git"] = (folder / "pythia-git").as_uri()
    (folder / "hub.yaml").write_text(yaml.safe_dump(content, sort_keys=False), "utf-8")
    return folder


@pytest.fixture(scope="module")
def server(place):
    suites = yaml.safe_load((place / "hub.yaml").read_text("utf-8"))
    with HubServer() as hub:
        for recipe, size, seed, step in SCORED:
            if (recipe, size) != ("c4", "20M"):
                name = f"allenai/DataDecide-{recipe}-{size}"
                serve(
                    hub,
                    place / "repos",
                    name,
                    f"step{step}-seed-{seed}",
                    gap_of(recipe, seed, step),
                )
        # A branch behind the planned end, which is not screened.
        serve(hub, place / "repos", "allenai/DataDecide-c4-4M", "step9000-seed-default", 0.9)
        for recipe, step in PYTHIAS:
            name = f"EleutherAI/pythia-70m{recipe}"
            serve(hub, place / "repos", name, f"step{step}", 0.5, NEOX, NEOX_NAMES)
        scores = write_parquet_scores(place / "scores", suites["datadecide"])
        hub.add("datasets/allenai/DataDecide-eval-results", scores)
        write_git_scores(place / "pythia-git", suites["pythia"]["tasks"])
        yield hub


@pytest.fixture
def command(server, place, in_process, monkeypatch):
    """The study's command; the screener that it starts is a process, with the same Hub."""
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    monkeypatch.setenv("HF_HOME", str(place / "hf"))
    options = ["--configuration", place / "hub.yaml", "--work", place / "w"]
    return partial(in_process, *options, endpoint=server.endpoint, main=study.main)


def rows_written(place, suite):
    return [
        json.loads(line)
        for line in (place / "w" / f"{suite}.jsonl").read_text("utf-8").splitlines()
    ]


def test_a_planted_law_holds_and_all_that_is_missing_is_said(command, place):
    done = command("--only", "datadecide")
    assert done.returncode == 3, done.stderr
    rows = rows_written(place, "datadecide")
    assert len(rows) == 22
    assert {row["step"] for row in rows} == {5725, 14584}
    for row in rows:
        assert row["skill"] == pytest.approx(skill_of(row["recipe"], row["seed"], row["step"]))
    assert "22 checkpoints were screened, 22 of them have a published score" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("| G |")]
    assert line.endswith("| holds |")
    assert "1.00 (1.00 to 1.00)" in line
    assert "DataDecide-c4-20M: " in done.stdout


def test_scores_in_git_are_read_and_two_recipes_conclude_nothing(command, place):
    done = command("--only", "pythia")
    assert done.returncode == 0, done.stderr
    rows = rows_written(place, "pythia")
    assert [(row["step"], row["skill"]) for row in rows] == [(143000, pytest.approx(0.3))] * 2
    assert "not tested: 2 recipes" in done.stdout


def test_a_dry_run_says_its_cost_and_wrong_use_is_a_sentence(command, tmp_path):
    done = command("--only", "pythia", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "2 checkpoints" in done.stdout
    done = command("--only", "nosuch")
    assert done.returncode == 2
    assert "names of datadecide, pythia, polypythias, got nosuch" in done.stderr
    misspelt = tmp_path / "hub.yaml"
    misspelt.write_text(
        study.CONFIGURATION.read_text("utf-8").replace("chance:", "chnace:"), "utf-8"
    )
    done = command("--configuration", misspelt)
    assert done.returncode == 2
    assert "chnace" in done.stderr


def planted(rng, *, law, recipes=12):
    """Checkpoints of two sizes and two seeds whose skill follows G by ``law``; ratio is G and noise."""
    rows = []
    for recipe, size, seed in itertools.product(range(recipes), "ab", "xy"):
        gap = np.random.default_rng([recipe, int(rng.integers(1 << 30)) * (law == 0)]).normal()
        skill = 0.6 + 0.1 * (law * gap + (1 - law) * rng.normal())
        figures = {"G": gap, "ratio": gap + 0.3 * rng.normal()}
        rows.append({"recipe": str(recipe), "size": size, "seed": seed, **figures, "skill": skill})
    return rows


def judged(rows):
    lines = study.judged(study.read_suites(study.CONFIGURATION)["datadecide"], rows)
    return {line["figure"]: line for line in lines}


def test_a_law_holds_for_both_figures_and_noise_and_guessing_conclude_nothing():
    rows = planted(np.random.default_rng(0), law=1.0)
    lines = judged(rows)
    assert [lines[figure]["verdict"] for figure in ("G", "both")] == ["holds", "holds"]
    assert lines["both"]["pairs"] < lines["G"]["pairs"] == lines["G"]["counted"]
    lines = judged([row | {"ratio": None} for row in rows])
    assert lines["G"]["verdict"] == "holds"
    assert lines["ratio"]["verdict"].startswith("not tested")
    lines = judged([row | {"skill": 0.25} for row in rows])
    assert all(line["verdict"].startswith("not tested") for line in lines.values())
    rng = np.random.default_rng(1)
    verdicts = [judged(planted(rng, law=0.0))["G"]["verdict"] for _ in range(20)]
    assert sum(verdict.startswith("holds") for verdict in verdicts) <= 3
