"""The laboratory's commands as a user runs them: killed, resumed, in two processes, compared, mistaken."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tiny_models
import torch
from threadpoolctl import threadpool_limits

from lmeval_dispersion import compare_studies
from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import UsageError

LAW = ("--segment", "24", "--bins", "6", "--bin-size", "10", "--layer", "all", "--contexts", "8")
WHOLE = ("law", "model", "--data", "text.jsonl", *LAW)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("laboratory")
    tiny_models.saved(folder / "model", tiny_models.llama())
    tuned = tiny_models.llama()
    with torch.no_grad():
        tuned.model.layers[2].mlp.down_proj.weight *= 1.5
    tiny_models.saved(folder / "tuned", tuned)
    rng = np.random.default_rng(0)
    rows = [" ".join(f"w{i}" for i in rng.zipf(1.3, 24) % 90) for _ in range(600)]
    tiny_models.text_file(folder / "text.jsonl", rows)
    tiny_models.text_file(folder / "few.jsonl", rows[:200])
    return folder


def words(arguments):
    """The words of a command, with `inspect` before the name of an analysis."""
    return [*([] if arguments[0] == "compare" else ["inspect"]), *map(str, arguments)]


def run_here(*arguments):
    """The command in this process: what it prints is the same, and torch is loaded already."""
    return main(words(arguments))


def environment():
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "HF_"))}
    return {**clean, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def tables(folder):
    return {path.stem: pd.read_parquet(path) for path in sorted(Path(folder).glob("*.parquet"))}


def same(a, b):
    expected, others = tables(a), tables(b)
    assert expected
    assert expected.keys() == others.keys()
    for name, frame in expected.items():
        pd.testing.assert_frame_equal(frame, others[name], check_exact=True)


@pytest.fixture(scope="module")
def whole(place):
    # In this process, with the one thread that the others have: their results are compared to the bit.
    with pytest.MonkeyPatch.context() as patch, threadpool_limits(1):
        patch.chdir(place)
        assert run_here(*WHOLE, "--study", "whole") == 0
    return place / "whole"


def resumes(place, whole, name):
    """All that a stopped study knows lies in its folder; it may go on in this process."""
    with pytest.raises(UsageError, match="is not complete; give its command again to resume it"):
        compare_studies(whole, place / name)
    with threadpool_limits(1):
        assert run_here(*WHOLE, "--study", name) == 0
    same(whole, place / name)


def test_an_interrupted_study_resumes_to_the_identical_result(place, whole, monkeypatch):
    """The quick form of the next."""
    monkeypatch.chdir(place)
    savez, saved = np.savez, []

    def interrupted(file, **arrays):
        savez(file, **arrays)
        saved.append(file)
        if len(saved) == 5:
            raise KeyboardInterrupt

    with threadpool_limits(1), monkeypatch.context() as patch:
        patch.setattr(np, "savez", interrupted)
        assert run_here(*WHOLE, "--study", "cut") == 130
    resumes(place, whole, "cut")


@pytest.mark.slow
def test_a_killed_study_resumes_to_the_identical_result(place, whole, monkeypatch):
    program = [sys.executable, "-m", "lmeval_dispersion", *words((*WHOLE, "--study", "killed"))]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(program, cwd=place, env=environment(), **quiet)
    record = place / "killed" / "work" / "data" / "3.npz"
    deadline = time.monotonic() + 120
    while not record.exists():
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (place / "killed" / "work" / "data" / "18.npz").exists()
    monkeypatch.chdir(place)
    resumes(place, whole, "killed")


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(place, whole):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    program = [*launcher, "-m", "lmeval_dispersion", *words((*WHOLE, "--study", "two", "-o", "two.json"))]
    done = subprocess.run(program, cwd=place, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    same(whole, place / "two")
    report = json.loads((place / "two.json").read_text())
    assert report["schema"] == "dispersion-lab-report/2"
    assert len(report["tables"]["correlations"]) == len(tables(whole)["correlations"])


@pytest.mark.parametrize("kind", ["law", "sublayers", "condensation", "clusters"])
def test_every_kind_of_study_can_be_compared(place, whole, kind, monkeypatch, capsys):
    monkeypatch.chdir(place)
    options = {
        "law": LAW,
        "sublayers": ("--segment", 24, "--sizes", "10,20"),
        "condensation": ("--segment", 24, "--segments", 50),
        "clusters": ("--ngram", 1, "--occurrences", 20, "--segment", 5, "--layer", "all"),
    }[kind]
    for model in ("model", "tuned"):
        where = ("--study", f"{kind}-{model}", "--format", "csv")
        assert run_here(kind, model, "--data", "few.jsonl", *options, *where) == 0
        assert len(pd.read_csv(io.StringIO(capsys.readouterr().out))) > 1
    assert run_here("compare", f"{kind}-model", f"{kind}-tuned", "-o", "compared.json") == 0
    report = json.loads((place / "compared.json").read_text())
    assert report["schema"] == "dispersion-lab-comparison/2"
    rows = pd.DataFrame(report["rows"])
    assert ((rows["low"] <= rows["difference"]) & (rows["difference"] <= rows["high"])).all()
    untouched = rows[rows["layer"].isin(["layer.0", "layer.1", "layer.2.attn"]) & rows["paired"]]
    assert len(untouched) > 0
    assert (untouched[["difference"]].abs().to_numpy() < 1e-6).sum() >= len(untouched) / 2
    last = rows[rows["layer"].isin(["last", "layer.2.ffn"]) & rows["paired"]]
    assert (last["difference"] != 0).any()
    assert run_here("compare", f"{kind}-model", "whole") == (2 if kind != "law" else 0)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("law", "model", "--data", "fex.jsonl"), 2, "fex.jsonl does not exist; did you mean few.jsonl?"),
        ((*WHOLE, "--bin-size", "201"), 1, "--bin-size or --segment"),
        (("compare", "few.jsonl", "whole"), 2, "the folder of a run or a study, got few.jsonl"),
        (("compare", "model", "whole"), 2, "expected runs or studies, not both, got run, study"),
        (("compare", "whole"), 2, "expected two runs or two studies, got 1"),
    ],
)
def test_mistakes_are_one_sentence(place, whole, arguments, code, message, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run_here(*arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith(f"dispersion {' '.join(words(arguments[:1]))}: ")
    assert message in last


def test_too_short_a_text_for_the_largest_draw_is_said_and_partly_done(place, monkeypatch, capsys):
    (place / "here").mkdir()
    monkeypatch.chdir(place / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    arguments = ("sublayers", "../model", "--data", "../few.jsonl", "--segment", "24", "--sizes", "10,5000")
    assert run_here(*arguments) == 3
    first = capsys.readouterr()
    assert "has 200 segments, too few for draws of 5000" in first.err
    assert "Dispersion of draws" in first.out
    assert run_here(*arguments) == 3
    assert capsys.readouterr().out == first.out
    assert list((place / "here").iterdir()) == []
    assert len(list((place / "cache" / "lmeval-dispersion" / "dispersion-runs").iterdir())) == 1
