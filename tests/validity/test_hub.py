"""The study on the real Hub, against a loopback Hub that serves repositories and scores in its layouts."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from hub_faults import status
from hub_server import HubServer
from planted_hub import datadecide_losses, datadecide_results, serve

from benchmarks.validity import results
from benchmarks.validity.verdicts import FAILS, HOLDS, UNTESTED

pytest.importorskip("duckdb", reason="the extra [registry] is not installed")

REAL = Path("benchmarks/validity/hub.yaml")
STEPS = {"4M": [1250, 2500, 5725], "20M": [14584]}
SEEDS = ["default", "small-aux-2"]
RECIPES = ["dolma1_7", "c4", "falcon", "fineweb-edu", "dclm-baseline"]
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
    smollm2 = content["suites"]["smollm2"]
    smollm2 |= {"sizes": {"135M": "135M"}, "scores": [{"kind": "lm-eval", "local": str(folder / "none")}]}
    content["suites"] = {"datadecide": suite, "smollm2": smollm2}
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
                server, place / "repos", "HuggingFaceTB/SmolLM2-135M-intermediate-checkpoints",
                f"step-{step}",
                0.4, layout="llama",
            )  # fmt: skip
        suite = yaml.safe_load(configuration.read_text("utf-8"))["suites"]["datadecide"]
        law = {key: 0.3 + 0.5 * gap for key, gap in gaps.items()}
        server.add(RESULTS, datadecide_results(place / "law", law, suite))
        rng = np.random.default_rng(0)
        losses = datadecide_losses(place / "losses", {key: rng.uniform(2, 4) for key in gaps}, suite)
        server.add(LOSSES, losses)
        yield server


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
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {claim} |")]
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

    # The same G against noise, from the store: no weights are read again, and nothing is claimed.
    suite = yaml.safe_load(configuration.read_text("utf-8"))["suites"]["datadecide"]
    rng = np.random.default_rng(5)
    hub.add(RESULTS, datadecide_results(place / "noise", {key: rng.uniform(0.3, 0.9) for key in gaps}, suite))
    before = len(hub.requests)
    code, page, said = command("--only", "datadecide")
    asked = [request.path for request in hub.requests[before:]]
    assert not [path for path in asked if path.endswith(".safetensors")]
    assert "taken from" in said
    for claim in (
        "orders recipes by mmlu-math", "of small models orders the largest by mmlu-math",
        "orders the checkpoints of one run by mmlu-math", "orders by mmlu-math better than each rival alone",
        "tells which seed is better at mmlu-math", "adds to all rivals together, for mmlu-math",
    ):  # fmt: skip
        assert verdict(page, f"G(math) {claim}") in {FAILS, UNTESTED}, claim
    assert "Of 7 lines 0 hold, 0 hold in part" in page


def test_what_cannot_be_had_is_a_line_and_the_rest_goes_on(hub, place, command):
    gone = "allenai/DataDecide-dolma1_7-4M"
    kept = hub.repositories.pop(gone)
    hub.repositories["allenai/DataDecide-c4-4M"].gated = True
    hub.fault("*", status(429, {"Retry-After": "2000"}), match="*DataDecide-falcon-4M/refs")
    tables = hub.repositories.pop(LOSSES)
    try:
        code, page, said = command("--only", "datadecide")
    finally:
        hub.repositories |= {gone: kept, LOSSES: tables}
        hub.repositories["allenai/DataDecide-c4-4M"].gated = False
        hub.faults.clear()
    assert code == 3, said
    lost = {(line["name"], line["error"]) for line in lines_of(place, "datadecide") if "error" in line}
    assert (gone, "RepoNotFound") in lost
    assert ("allenai/DataDecide-falcon-4M", "RateLimited") in lost
    assert ("allenai/DataDecide-ppl-results", "NoScores") in lost
    for name, word in lost:
        assert f"| {name} | {word} | " in page
    read = [line for line in lines_of(place, "datadecide") if line.get("figures")]
    assert {line["recipe"] for line in read if line["size"] == "20M"} == set(RECIPES)


def test_results_of_another_configuration_are_refused_and_wrong_use_is_said(place, configuration, command):
    code, _, said = command("--only", "pythia")
    assert (code, "expected names of datadecide, smollm2, got pythia" in said) == (2, True)
    whole = configuration.read_text("utf-8")
    configuration.write_text(whole + "# changed\n", "utf-8")
    code, _, said = command("page")
    configuration.write_text(whole, "utf-8")
    assert (code, "expected results of hub.yaml as it is now" in said) == (2, True)
