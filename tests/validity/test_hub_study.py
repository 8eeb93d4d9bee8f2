"""The study on the real Hub, against a loopback Hub that serves repositories and scores in its layouts."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import yaml
from hub_faults import status
from hub_server import HubServer
from planted_hub import datadecide_losses, datadecide_results, git_repository, lm_eval_results, serve

from benchmarks.validity import results
from benchmarks.validity.hub.__main__ import main
from benchmarks.validity.hub.configuration import read_study
from benchmarks.validity.hub.plan import checkpoints_of
from benchmarks.validity.hub.tables import above_chance, tables_of, verdicts_of
from benchmarks.validity.verdicts import FAILS, HOLDS, PART, UNTESTED

pytest.importorskip("duckdb", reason="the extra [registry] is not installed")

REAL = Path("benchmarks/validity/hub.yaml")
STEPS = {"4M": [1250, 2500, 5725], "20M": [14584]}
SEEDS = ["default", "small-aux-2"]
RECIPES = ["dolma1_7", "c4", "falcon", "fineweb-edu", "dclm-baseline"]
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-intermediate-checkpoints"
RESULTS, LOSSES = "datasets/allenai/DataDecide-eval-results", "datasets/allenai/DataDecide-ppl-results"


def reduced(folder: Path) -> Path:
    """The committed configuration with fewer recipes, sizes and resamples."""
    content = yaml.safe_load(REAL.read_text("utf-8"))
    suite = content["suites"]["datadecide"]
    suite["recipes"] = {key: suite["recipes"][key] for key in RECIPES}
    suite |= {"sizes": {size: size for size in STEPS}, "small": "4M", "domains": ["math"]}
    suite["pairs"] = [
        {"domain": "math", "skill": "mmlu-math"}, {"domain": "math", "skill": "olmes", "control": True},
    ]  # fmt: skip
    own = {
        "datadecide": suite,
        **{name: content["suites"][name] for name in ("pythia", "polypythias", "smollm2")},
    }
    own["pythia"] |= {"sizes": {"70m": "70m"}}
    own["pythia"]["scores"][0]["git"] = (folder / "pythia-git").as_uri()
    own["polypythias"] |= {"sizes": {"70m": "70m"}, "seeds": {"": "seed0", "-seed1": "seed1"}}
    own["smollm2"] |= {"sizes": {"135M": "135M"}}
    own["smollm2"]["scores"][0]["local"] = str(folder / "none")
    content["suites"] = own
    content["analysis"] |= {"resamples": 60, "fewest": 3}
    file = folder / "hub.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False), "utf-8")
    return file


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("hub-study")


@pytest.fixture(scope="module")
def configuration(place):
    return reduced(place)


@pytest.fixture(scope="module")
def gaps():
    """The planted G: by recipe first, a little by seed and step."""
    found = {}
    for (at, recipe), size, (number, seed) in itertools.product(enumerate(RECIPES), STEPS, enumerate(SEEDS)):
        for grown, step in enumerate(STEPS[size]):
            found[recipe, size, seed, step] = 0.2 + 0.1 * at + 0.02 * number + 0.03 * grown
    return found


@pytest.fixture(scope="module")
def hub(place, configuration, gaps):
    """DataDecide and SmolLM2, with a repository that is not there, a gated one and a step that is lost."""
    with HubServer() as server:
        for (recipe, size, seed, step), gap in gaps.items():
            if (recipe, size, seed, step) != ("c4", "4M", "default", 2500):
                serve(
                    server, place / "repos", f"allenai/DataDecide-{recipe}-{size}", f"step{step}-seed-{seed}",
                    gap,
                )  # fmt: skip
        for step in (120_000, 240_000):
            serve(
                server, place / "repos", SMOLLM2,
                f"step-{step}",
                0.4, layout="llama",
            )  # fmt: skip
        for name, step in itertools.product(("", "-deduped", "-seed1"), (3000, 13000)):
            serve(
                server, place / "repos", f"EleutherAI/pythia-70m{name}", f"step{step}", step / 20_000,
                layout="neox",
            )  # fmt: skip
        server.repositories[SMOLLM2].gated = True
        evaluated(server, place)
        suite = yaml.safe_load(configuration.read_text("utf-8"))["suites"]["datadecide"]
        law = {key: 0.3 + 0.5 * gap for key, gap in gaps.items()}
        server.add(RESULTS, datadecide_results(place / "law", law, suite))
        rng = np.random.default_rng(0)
        losses = datadecide_losses(place / "losses", {key: rng.uniform(2, 4) for key in gaps}, suite)
        server.add(LOSSES, losses)
        yield server


def evaluated(server, place):
    """Pythia's scores in a git repository, with names of another time; PolyPythias' in a dataset."""
    math = [f"hendrycksTest-{name}" for name in (
        "abstract_algebra", "college_mathematics", "elementary_mathematics", "high_school_mathematics",
        "high_school_statistics",
    )]  # fmt: skip
    for recipe, step in itertools.product(("", "-deduped"), (3000, 13000)):
        found = dict.fromkeys(math, 0.3) | {"lambada_openai": 0.4, "piqa": 0.5}
        file = place / f"pythia-git/evals/pythia-v1/pythia-70m{recipe}/zero-shot/70m{recipe}_step{step}.json"
        old = f"EleutherAI/pythia-v1.1-70m{recipe}"
        lm_eval_results(file, found, model=old, revision=f"step{step}", filtered=False)
    other = place / "pythia-git/evals/pythia-v0/pythia-70m/zero-shot/70m_step3000.json"
    lm_eval_results(other, {"lambada_openai": 0.9}, model="x", revision="step3000", filtered=False)
    git_repository(place / "pythia-git")
    for seed, step in itertools.product(("", "-seed1"), (3000, 13000, 14000)):
        model = f"EleutherAI/pythia-70m{seed}"
        folder = place / f"poly/pythia-70m{seed}/step{step}/EleutherAI__pythia-70m{seed}"
        lm_eval_results(
            folder / "results_2024-07-01T00-00-00.json", {"lambada_openai": step / 50_000}, model=model,
            revision=f"step{step}", filtered=True,
        )  # fmt: skip
        lm_eval_results(
            folder / "results_2024-08-15T00-00-00.json", {"lambada_openai": 0.99}, model=model,
            revision="step143000", filtered=True,
        )  # fmt: skip
    server.add("datasets/EleutherAI/polypythias-evals", place / "poly")


@pytest.fixture
def command(hub, place, configuration):
    """Run the real command; its exit code, its page and what it said."""

    def run(*words):
        env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        env |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(place / "hf"), "OMP_NUM_THREADS": "1"}
        env |= {"HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.validity.hub", "--configuration", str(configuration),
             "--work", str(place / "work"), *words],
            env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


def lines_of(place, suite):
    return results.read(place / "work" / "results" / f"hub-{suite}.jsonl")


def verdict(page, claim):
    """Of DataDecide, which comes first."""
    own = page.partition("\n## Pythia")[0].splitlines()
    (line,) = [line for line in own if line.startswith(f"| {claim} |")]
    return line.split(" | ")[-1].removesuffix(" |")


def test_a_planted_law_is_found_and_noise_claims_nothing(hub, place, configuration, gaps, command):
    code, plan, said = command("--dry-run", "--only", "datadecide", "--limit", "1")
    assert code == 0, said
    assert plan.startswith("6 checkpoints, about 18 resolver and 6 API requests, ")
    assert not lines_of(place, "datadecide")

    code, page, said = command()
    assert code == 3, said  # a step is lost and SmolLM2 has no scores
    assert verdict(page, "G(math) orders recipes by mmlu-math") == HOLDS
    assert verdict(page, "G(math) of small models orders the largest by mmlu-math") == HOLDS
    assert verdict(page, "G(math) adds to all rivals together, for mmlu-math") == HOLDS
    # The step orders a run as well as a G that grows with it, and a page that says so claims nothing more.
    assert verdict(page, "G(math) orders the checkpoints of one run by mmlu-math") == FAILS
    assert "1 checkpoints have a score and no branch: step 2500 default" in page
    assert f"| {SMOLLM2}@step-120000 | GatedRepo | " in page
    assert "nothing could be compared" in page
    lines = lines_of(place, "datadecide")
    read = {line["name"]: line for line in lines if "error" not in line}
    assert len(read) == len(gaps) - 1
    assert all(line["commit"] and line["machine"] and len(line["revision"]) == 40 for line in read.values())
    one = read["allenai/DataDecide-falcon-4M@step2500-seed-small-aux-2"]
    assert one["skills"]["mmlu-math"] == pytest.approx(0.3 + 0.5 * gaps["falcon", "4M", "small-aux-2", 2500])
    assert one["loss"] is not None
    last = [line for line in read.values() if line["step"] == 14584]
    last.sort(key=lambda line: line["figures"]["cosine_math"])
    assert [line["recipe"] for line in last][::2] == RECIPES

    pythia = {line["name"]: line for line in lines_of(place, "pythia") if "error" not in line}
    assert pythia["EleutherAI/pythia-70m-deduped@step3000"]["skills"] == pytest.approx(
        {"mmlu-math": 0.3, "lambada": 0.4}
    )
    poly = {line["name"]: line for line in lines_of(place, "polypythias")}
    assert poly["EleutherAI/pythia-70m-seed1@step13000"]["skills"] == pytest.approx({"lambada": 0.26})
    assert "EleutherAI/pythia-70m-seed1@step14000" not in poly
    assert "4 files are of another model" in poly["EleutherAI/polypythias-evals"]["message"]

    # The same G against noise, from the store: no weights are read again, and nothing is claimed.
    suite = yaml.safe_load(configuration.read_text("utf-8"))["suites"]["datadecide"]
    rng = np.random.default_rng(5)
    hub.add(RESULTS, datadecide_results(place / "noise", {key: rng.uniform(0.3, 0.9) for key in gaps}, suite))
    before = len(hub.requests)
    # At the same time repositories and a dataset go away: each is a line, and the rest goes on.
    for name in ("EleutherAI/pythia-70m-deduped", LOSSES):
        hub.repositories.pop(name)
    hub.fault("*", status(429, {"Retry-After": "2000"}), match="*pythia-70m/refs")
    code, page, said = command("--only", "datadecide,pythia")
    assert code == 3, said
    lost = {
        (line["name"], line["error"])
        for suite in ("datadecide", "pythia")
        for line in lines_of(place, suite)
        if "error" in line
    }
    assert {
        ("EleutherAI/pythia-70m-deduped", "RepoNotFound"),
        ("EleutherAI/pythia-70m", "RateLimited"),
        ("allenai/DataDecide-ppl-results/data/train-*.parquet", "NoScores"),
    } <= lost
    assert not [word for name, word in lost if f"| {name} | {word} | " not in page]
    asked = [request.path for request in hub.requests[before:]]
    assert not [path for path in asked if path.endswith(".safetensors")]
    assert "taken from" in said
    for claim in (
        "orders recipes by mmlu-math", "of small models orders the largest by mmlu-math",
        "orders the checkpoints of one run by mmlu-math", "orders by mmlu-math better than each rival alone",
        "tells which seed is better at mmlu-math", "adds to all rivals together, for mmlu-math",
    ):  # fmt: skip
        assert verdict(page, f"G(math) {claim}") in {FAILS, UNTESTED}, claim
    assert " lines 0 hold, 0 hold in part, " in page


def planted(suite, score, gap):
    """Lines of a suite, as if all had been read: ``gap`` and ``score`` of (recipe, size, seed, step)."""
    steps = {
        size: [s for s in range(0, 200_000, 250) if suite.step_wanted(size, s)][:8]
        for size in suite.parts["size"]
    }
    made = {"configuration": "", "commit": "", "machine": ""}
    rows = []
    for _, keys in suite.repositories():
        recipe, size = keys.get("recipe", "all"), keys["size"]
        for seed in [keys["seed"]] if "seed" in keys else list(suite.parts["seed"])[:3] or ["all"]:
            for step in steps[size]:
                key = (recipe, size, seed, step)
                same = crc32(str(key).encode()) % 997 / 997
                figures = {"within_R": same, "euclidean_within_R": same}
                for domain in suite.domains:
                    figures |= {f"cosine_{domain}": gap(*key), f"euclidean_{domain}": gap(*key)}
                skills = {name: score(*key) for name in suite.skills}
                rows.append({"name": str(key), "recipe": recipe, "size": size, "seed": seed, "step": step,
                             "figures": figures, "skills": skills, "loss": None, **made})  # fmt: skip
    return rows


def judged(study, name, score, gap):
    """Verdicts of a suite's first pair by claim, without its names."""
    suite = study.suites[name]
    if name == "datadecide":  # two sizes of nine are enough, and quicker
        suite = replace(suite, parts={**suite.parts, "size": {"150M": "150M", "1B": "1B"}})
    tables = tables_of(study, suite, planted(suite, score, gap), suite.pairs[0])
    return {line.claim.partition(") ")[2]: line for line in verdicts_of(tables, suite.pairs[0])}


@pytest.fixture(scope="module")
def study():
    found = read_study(REAL)
    found.content["analysis"]["resamples"] = 100
    return found


def test_the_committed_configuration_is_whole(study):
    datadecide = study.suites["datadecide"]
    assert len(datadecide.repositories()) == 25 * 9
    assert ("EleutherAI/pythia-12b-deduped", {"size": "12b", "recipe": "-deduped"}) in (
        study.suites["pythia"].repositories()
    )
    assert set(study.content["claims"]) == {"orders", "beats-rivals", "seeds", "sizes", "adds", "trajectory"}


def test_seeds_of_one_recipe_are_judged_by_size(study):
    def level(recipe, size, seed, step):
        return 0.4 + 0.02 * ["", *(f"-seed{n}" for n in range(1, 10))].index(seed)

    law = judged(study, "polypythias", level, level)
    assert law["tells which seed is better at arc"].verdict == HOLDS
    draw = np.random.default_rng(3)
    noise = judged(study, "polypythias", level, lambda *key: draw.normal())
    assert noise["tells which seed is better at arc"].verdict == FAILS

    def guessed(recipe, size, seed, step):
        return 0.26 if size == "14m" else level(recipe, size, seed, step)

    few = judged(study, "polypythias", guessed, level)
    assert few["tells which seed is better at arc"].verdict == UNTESTED


def test_scores_of_guessing_conclude_nothing(study):
    draw = np.random.default_rng(2)
    found = judged(study, "datadecide", lambda *key: 0.25 + 0.01 * draw.random(), lambda *key: draw.normal())
    assert {line.verdict for line in found.values()} == {UNTESTED}
    assert above_chance(study.suites["datadecide"].skills["mmlu-math"]) == pytest.approx(0.27655, abs=1e-4)
    assert above_chance(study.suites["datadecide"].skills["mmlu-math-probability"]) == -np.inf


def test_recipes_are_compared_where_seeds_are(study):
    """The default seed of some sizes has a last step that the others lack."""
    suite = study.suites["datadecide"]

    def level(*key):
        return 0.4 + crc32(key[0].encode()) % 97 / 1000

    rows = [row for row in planted(suite, level, level) if row["size"] == "1B"]
    last = max(row["step"] for row in rows)
    early = [row | {"step": last + 100} for row in rows if row["step"] == last and row["seed"] == "default"]
    late = [row | {"step": 2 * last} for row in early]
    for more, step, seeds in ((early, last, 3), (late, 2 * last, 1)):
        found = tables_of(study, suite, [*rows, *more], suite.pairs[0])
        assert found["what"] == f"1B: 25 recipes x {seeds} seeds, step {step}"


def test_a_trajectory_is_claimed_where_g_follows_more_than_the_step(study):
    """A score that rises and falls with G along the run, where the step cannot follow."""

    def bent(recipe, size, seed, step):
        return 0.3 + 0.3 * np.sin(step / 30_000)

    found = judged(study, "pythia", bent, bent)
    assert found["orders the checkpoints of one run by mmlu-math"].verdict == HOLDS
    draw = np.random.default_rng(1)
    found = judged(study, "pythia", bent, lambda *key: draw.normal())
    assert found["orders the checkpoints of one run by mmlu-math"].verdict == FAILS


def test_noise_is_claimed_no_oftener_than_intervals_allow(study):
    found = []
    for seed in range(3):
        draw = np.random.default_rng(seed)
        rows = (lambda *key, own=draw: own.uniform(0.3, 0.6)), (lambda *key, own=draw: own.normal())
        found += judged(study, "datadecide", *rows).values()
    assert len(found) == 18
    assert sum(line.verdict in {HOLDS, PART} for line in found) <= 2  # those of one draw come together
    assert not [line for line in found if line.verdict == HOLDS and "orders recipes" in line.claim]


def test_steps_are_chosen_by_the_configuration(study):
    suite = study.suites["datadecide"]
    names = [
        "main",
        *(f"step{n}-seed-default" for n in (0, 2500, 7500, 37500, 38157, 423865)),
        "step5-seed-other",
    ]
    found, missing = checkpoints_of(suite, limit=5, branches=lambda repository: names)
    own = [one.step for one in found if one.repository.endswith("-150M")]
    assert own == [0, 7500, 37500, 38157]  # behind the planned end there are branches of a few runs
    assert not missing
    found, missing = checkpoints_of(suite, limit=1, branches=lambda repository: ["main"])
    assert (found, missing[0].error) == ([], "RevisionNotFound")


def test_results_of_another_configuration_are_refused_and_wrong_use_is_said(tmp_path, capsys):
    words = ["--configuration", str(reduced(tmp_path)), "--work", str(tmp_path)]
    assert main([*words, "--only", "olmo"]) == 2
    assert "expected names of datadecide, pythia, polypythias, smollm2, got olmo" in capsys.readouterr().err
    assert main(["page", *words]) == 2
    assert "expected results of a suite, found none" in capsys.readouterr().err
    results.append(tmp_path / "results" / "hub-pythia.jsonl", {"name": "x", "configuration": "other"})
    assert main(["page", *words]) == 2
    assert "expected results of hub.yaml as it is now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"revision": "step.*"}, "revision: expected a group `step`"),
        ({"sizes": {}}, "repository: expected names for {size} under sizes, got none"),
        ({"pairs": [{"domain": "math", "skill": "chess"}]}, "expected a domain of math and a skill of"),
        ({"scores": [{"kind": "parquet", "git": "x"}]}, "scores: expected the keys of one of"),
        ({"skills": {"a": {}}}, "expected about, repository, revision, sizes, steps"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(tmp_path, change, sentence):
    content = yaml.safe_load(REAL.read_text("utf-8"))
    content["suites"] = {"pythia": content["suites"]["pythia"] | change}
    file = tmp_path / "hub.yaml"
    file.write_text(yaml.safe_dump(content), "utf-8")
    with pytest.raises(ValueError, match=re.escape(sentence)):
        read_study(file)
