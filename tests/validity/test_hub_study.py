"""The study on the real Hub, against a loopback Hub that serves repositories and scores in its layouts."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from hub_server import HubServer
from planted_hub import datadecide_results, git_repository, lm_eval_results, serve

from benchmarks.validity import hub as study

SEEDS = ["default", "small-aux-2"]
RECIPES = ["dolma1_7", "c4", "falcon", "fineweb-edu", "dclm-baseline", "fineweb-pro"]
STEPS = {"4M": [1250, 5725], "20M": [14584]}
RESULTS = "datasets/allenai/DataDecide-eval-results"


def gap_of(recipe: str, seed: str, step: int) -> float:
    """The planted gap: by recipe first, a little by seed and step."""
    return 0.2 + 0.1 * RECIPES.index(recipe) + 0.02 * SEEDS.index(seed) + 0.03 * (step > 2000)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("hub-study")


@pytest.fixture(scope="module")
def configuration(place):
    """The committed configuration with fewer recipes and sizes."""
    content = yaml.safe_load(study.CONFIGURATION.read_text("utf-8"))
    names = content["datadecide"]["names"]
    names["recipe"] = {key: names["recipe"][key] for key in RECIPES}
    names["size"] = {size: size for size in STEPS}
    content["pythia"]["names"]["size"] = {"70m": "70m"}
    content["pythia"]["scores"]["git"] = (place / "pythia-git").as_uri()
    file = place / "hub.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False), "utf-8")
    return file


@pytest.fixture(scope="module")
def server(place, configuration):
    keys = [
        (recipe, size, seed, step)
        for recipe, size, seed in itertools.product(RECIPES, STEPS, SEEDS)
        for step in STEPS[size]
    ]
    with HubServer() as hub:
        for recipe, size, seed, step in keys:
            if (recipe, size) != ("c4", "20M"):
                name = f"allenai/DataDecide-{recipe}-{size}"
                serve(hub, place / "repos", name, f"step{step}-seed-{seed}", gap_of(recipe, seed, step))
        # A branch behind the planned end, which is not screened.
        serve(hub, place / "repos", "allenai/DataDecide-c4-4M", "step9000-seed-default", 0.9)
        for recipe, step in itertools.product(("", "-deduped"), (3000, 143000)):
            serve(hub, place / "repos", f"EleutherAI/pythia-70m{recipe}", f"step{step}", 0.5, layout="neox")
        suite = yaml.safe_load(configuration.read_text("utf-8"))["datadecide"]
        law = {key: 0.3 + 0.5 * gap_of(key[0], *key[2:]) for key in keys}
        hub.add(RESULTS, datadecide_results(place / "law", law, suite))
        math_tasks = yaml.safe_load(configuration.read_text("utf-8"))["pythia"]["tasks"]
        for recipe, step in itertools.product(("", "-deduped"), (3000, 143000)):
            folder = place / f"pythia-git/evals/pythia-v1/pythia-70m{recipe}/zero-shot"
            # The second file is of another step than its path says.
            for name, model, accuracy, revision in (
                (f"70m{recipe}", f"pythia-v1.1-70m{recipe}", 0.3, f"step{step}"),
                ("other", "pythia-v1.1-70m", 0.9, "step7"),
            ):
                lm_eval_results(folder / f"{name}_step{step}.json", dict.fromkeys(math_tasks, accuracy),
                                model=f"EleutherAI/{model}", revision=revision)  # fmt: skip
        git_repository(place / "pythia-git")
        yield hub


@pytest.fixture
def command(server, configuration, place):
    """The command as users run it; huggingface_hub reads its endpoint when it is imported."""
    place_of_hub = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(place / "hf"), "HF_HUB_DISABLE_XET": "1"}
    options = ["--configuration", str(configuration), "--work", str(place / "w")]

    def run(*words):
        line = [sys.executable, "-m", "benchmarks.validity.hub", *options, *words]
        environment = {**os.environ, **place_of_hub}
        return subprocess.run(line, env=environment, capture_output=True, text=True, check=False)

    return run


def test_a_planted_law_holds_and_all_that_is_missing_is_said(command, place):
    done = command("--only", "datadecide")
    text = done.stdout
    assert done.returncode == 3, done.stderr
    rows = [json.loads(line) for line in (place / "w" / "datadecide.jsonl").read_text("utf-8").splitlines()]
    assert len(rows) == 22
    assert {row["step"] for row in rows} == {5725, 14584}
    for row in rows:
        assert row["skill"] == pytest.approx(0.3 + 0.5 * gap_of(row["recipe"], row["seed"], row["step"]))
    assert "22 checkpoints were screened, 22 of them have a published score" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| G |")]
    assert line.endswith("| holds |")
    assert "1.00 (1.00 to 1.00)" in line
    assert "DataDecide-c4-20M: " in text


def test_scores_in_git_are_read_and_two_recipes_conclude_nothing(command, place):
    done = command("--only", "pythia")
    text = done.stdout
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (place / "w" / "pythia.jsonl").read_text("utf-8").splitlines()]
    assert [(row["step"], row["skill"]) for row in rows] == [(143000, pytest.approx(0.3))] * 2
    assert "not tested: 2 recipes" in text


def test_a_dry_run_says_its_cost_and_wrong_use_is_a_sentence(command):
    done = command("--only", "pythia", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "2 checkpoints" in done.stdout
    done = command("--only", "nosuch")
    assert done.returncode == 2
    assert "names of datadecide, pythia, polypythias, got nosuch" in done.stderr


def suite() -> study.Suite:
    return study.read_suites(study.CONFIGURATION)["datadecide"]


def rows(rng: np.random.Generator, *, law: float, recipes: int = 12) -> list[dict[str, object]]:
    """Checkpoints of two sizes and two seeds whose skill follows G by ``law``; ratio is G and noise."""
    planted = []
    for recipe, size, seed in itertools.product(range(recipes), "ab", "xy"):
        own = np.random.default_rng([recipe, int(rng.integers(1 << 30)) * (law == 0)]).normal()
        skill = 0.6 + 0.1 * (law * own + (1 - law) * rng.normal())
        figures = {"G": own, "ratio": own + 0.3 * rng.normal()}
        planted.append({"recipe": str(recipe), "size": size, "seed": seed, **figures, "skill": skill})
    return planted


def test_a_law_holds_for_both_figures():
    lines = {line["figure"]: line for line in study.judged(suite(), rows(np.random.default_rng(0), law=1.0))}
    assert [lines[figure]["verdict"] for figure in ("G", "both")] == ["holds", "holds"]
    assert lines["both"]["pairs"] < lines["G"]["pairs"] == lines["G"]["counted"]
    without = [row | {"ratio": None} for row in rows(np.random.default_rng(0), law=1.0)]
    lines = {line["figure"]: line for line in study.judged(suite(), without)}
    assert lines["G"]["verdict"] == "holds"
    assert lines["ratio"]["verdict"].startswith("not tested")


def test_noise_is_rarely_claimed_and_guessing_concludes_nothing():
    rng = np.random.default_rng(1)
    verdicts = [study.judged(suite(), rows(rng, law=0.0))[0]["verdict"] for _ in range(20)]
    assert sum(verdict.startswith("holds") for verdict in verdicts) <= 3
    guessed = [row | {"skill": 0.25} for row in rows(rng, law=1.0)]
    assert all(line["verdict"].startswith("not tested") for line in study.judged(suite(), guessed))


def test_a_configuration_with_a_wrong_key_is_refused(tmp_path: Path):
    content = yaml.safe_load(study.CONFIGURATION.read_text("utf-8"))
    content["pythia"]["chnace"] = content["pythia"].pop("chance")
    file = tmp_path / "hub.yaml"
    file.write_text(yaml.safe_dump(content), "utf-8")
    with pytest.raises(ValueError, match="chnace"):
        study.read_suites(file)
