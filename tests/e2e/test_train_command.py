"""``dispersion train`` as a user runs it: small runs, an interruption by SIGKILL, mistakes."""

import errno
import json
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from processes import environment, torchrun
from safetensors import SafetensorError
from safetensors.torch import load_file
from threadpoolctl import threadpool_limits
from tiny_models import WORDS, model, saved, text_file
from transformers import GPT2Config, GPT2LMHeadModel, T5Config

from lmeval_dispersion.cli import main

MODEL = Path("angular_spread-seed0", "model", "model.safetensors")


def prose(words, seed):
    """Two hundred texts of some of the tokenizer's words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=30)) for _ in range(200)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny GPT-2 with dropout and one without, their tokenizer, and two domains of text."""
    folder = tmp_path_factory.mktemp("base")
    shape = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    saved(folder / "model", model(GPT2Config, GPT2LMHeadModel, **shape))
    saved(folder / "undropped", model(GPT2Config, GPT2LMHeadModel, **shape, **no_dropout))
    saved(folder / "reader", T5Config(d_model=16, num_layers=1, vocab_size=320))
    (folder / "prose.txt").write_text("\n\n".join(prose(WORDS[:15], 0)))
    text_file(folder / "code.jsonl", prose(WORDS[15:60], 1))
    (folder / "short.txt").write_text("w1 w2")
    return folder


def arguments(base, out, **options):
    values = {
        "model": base / "model",
        "data": base / "prose.txt",
        "output_dir": out,
        "block": 16,
        "batch_size": 4,
        "lr": 5e-3,
        "tokens": 16 * 4 * 12,
    } | options
    words = ["train"]
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        several = value if isinstance(value, list) else [value]
        words += [flag] if value is True else [f"{flag}={each}" for each in several]
    return words


def status(words):
    try:
        return main(words)
    except SystemExit as ended:  # argparse's
        return ended.code


def result_of(out, arm="base"):
    return json.loads((out / f"{arm}-seed0" / "result.json").read_text())


def interrupted(words, run, monkeypatch):
    """By Ctrl-C in this process, after a checkpoint."""

    @contextmanager
    def bar(**_):
        def update(done, total, label):
            if done == 8:
                raise KeyboardInterrupt

        yield update

    with monkeypatch.context() as patch:
        patch.setattr("lmeval_dispersion.training.train.progress_bar", bar)
        assert main(words) == 130


def killed(words, run, monkeypatch):
    """By SIGKILL, after a checkpoint."""
    process = subprocess.Popen([sys.executable, "-m", "lmeval_dispersion", *words], env=environment())
    while not list(run.glob("checkpoint-*/trainer_state.json")) and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("end", "steps"), [(interrupted, 12), pytest.param(killed, 60, marks=pytest.mark.slow)]
)
def test_a_run_that_ended_early_goes_on_to_the_same_numbers(end, steps, base, tmp_path, capsys, monkeypatch):
    run = tmp_path / "cut" / "base-seed0"
    cut, whole = (
        arguments(base, tmp_path / name, max_tokens=6, tokens=16 * 4 * steps) for name in ("cut", "whole")
    )
    with threadpool_limits(1):  # as many as a process of its own has
        end(cut, run, monkeypatch)
        assert list(run.glob("checkpoint-*"))
        assert not (run / "result.json").exists()
        # Files as a kill in the middle of writing leaves them, and one between the last step and the result.
        for step, state in ((steps - 1, '{"global_st'), (steps, f'{{"global_step": {steps}}}')):
            (run / f"checkpoint-{step}").mkdir()
            (run / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
        capsys.readouterr()
        assert main(cut) == 0
        printed = capsys.readouterr().out
        assert main(whole) == 0
    assert printed == capsys.readouterr().out
    assert result_of(tmp_path / "cut") == result_of(tmp_path / "whole")
    trained = [load_file(tmp_path / name / MODEL) for name in ("cut", "whole")]
    assert all(torch.equal(value, trained[0][key]) for key, value in trained[1].items())
    assert not list((tmp_path / "cut").glob("*/checkpoint-*"))
    # A third call does nothing but print.
    assert main(cut) == 0
    assert capsys.readouterr().out == printed


def test_base_and_losses_on_two_domains(base, tmp_path, capsys):
    losses = ["push_away", "cross_domain_push_away", "squeeze"]
    options = {
        "loss": losses,
        "data": [base / "prose.txt", base / "code.jsonl"],
        "from_scratch": True,
        "weight": 0.5,
        "max_tokens": 0,
        "seed": [0, 1],
        "tokens": 16 * 4 * 8,
        "format": "json",
    }
    assert main(arguments(base, tmp_path / "out", **options)) == 0
    printed = capsys.readouterr().out
    rows = json.loads(printed)["trained"]
    assert [(row["loss"], row["domain"]) for row in rows] == [
        (loss, domain) for loss in ("base", *losses) for domain in ("prose.txt", "code.jsonl")
    ]
    by_loss = {row["loss"]: row for row in rows if row["domain"] == "prose.txt"}
    assert all(row["before"] == by_loss["base"]["before"] for row in by_loss.values())  # one start a seed
    assert all(row["seeds"] == 2 and row["sd"] > 0 for row in rows)
    assert by_loss["squeeze"]["tokens"] < by_loss["base"]["tokens"] < by_loss["push_away"]["tokens"]
    assert by_loss["base"]["versus_base"] is None
    assert len({round(row["perplexity"], 6) for row in by_loss.values()}) == 4
    log = result_of(tmp_path / "out", "push_away")["log"]
    assert {"ce_loss", "dispersion_loss", "dispersion", "loss"} <= set(log[0])
    assert printed == (tmp_path / "out" / "comparison.json").read_text()
    markdown = (tmp_path / "out" / "comparison.md").read_text()
    assert "**Better than base: " in markdown or "**No loss is better than base.**" in markdown
    assert "--loss=push_away --loss=cross_domain_push_away" in markdown  # the command that made it


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss": "angular"}, "invalid choice: 'angular' (choose from"),
        ({"model": "/nowhere"}, "nowhere"),
        ({"model": "BASE/reader"}, "expected a causal language model"),
        ({"data": "/nowhere.txt"}, "does not exist"),
        ({"eval_data": "/nowhere.jsonl"}, "does not exist"),
        ({"eval_data": ["BASE/prose.txt", "BASE/prose.txt"]}, "--eval-data for each of 1 --data, got 2"),
        ({"tokens": "12"}, "at least one step of 64"),
        ({"layer": "middle"}, "early_half"),
        ({"layer": "layer.2"}, "from -2 to 1"),
        ({"block": "2000", "tokens": "8k"}, "at most 32"),
        ({"weight": "inf"}, "--weight: expected at least 0 and finite, got inf"),
        ({"tokens": "infM"}, "--tokens: expected at least 1 and finite, got infM"),
        ({"seed": "-1"}, "--seed: expected at least 0"),
        ({"seed": "4294967296"}, "below 4294967296"),  # what numpy takes
        ({"lr": "fast"}, "argument --lr: invalid number value: 'fast'"),
        ({"max_tokens": "1"}, "make a pair"),
        ({"loss": "cross_domain_push_away"}, "two --data"),
        ({"output": "report.xlsx"}, "suffix"),
        ({"output_dir": "BASE/prose.txt"}, "new or empty folder"),
        ({"output_dir": "BASE"}, "new or empty folder"),
        ({"output_dir": "BASE/prose.txt/in"}, "where folders and files can be created"),
    ],
)
def test_every_argument_is_checked_before_the_first_training(
    base, tmp_path, capsys, monkeypatch, options, said
):
    """One sentence; nothing is trained, and the folder of the models is not made."""
    monkeypatch.setattr("lmeval_dispersion.training.train.trained", None)

    def placed(value):
        if isinstance(value, list):
            return [*map(placed, value)]
        return value.replace("BASE", str(base)) if isinstance(value, str) else value

    given = {"output_dir": tmp_path / "out"} | {name: placed(value) for name, value in options.items()}
    assert status(arguments(base, given.pop("output_dir"), **given)) == 2
    printed, errors = capsys.readouterr()
    assert said in errors.replace("\n", " ")
    assert printed == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_processes_train_what_one_trains_with_batches_as_large(base, tmp_path, capsys):
    """Pairs inside sequences: the loss of two half batches is that of the whole one."""
    pair = {"from_scratch": True, "max_tokens": 0, "tokens": 16 * 4 * 24}
    command = arguments(base, tmp_path / "two", batch_size=2, model=base / "undropped", **pair)
    done = torchrun(2, "-m", "lmeval_dispersion", *command)
    assert done.returncode == 0, done.stderr
    assert main(arguments(base, tmp_path / "one", batch_size=4, model=base / "undropped", **pair)) == 0
    capsys.readouterr()
    assert done.stdout.count("One seed shows") == 1  # one of the two reports
    for arm in ("base", "angular_spread"):
        halves, whole = (result_of(tmp_path / name, arm) for name in ("two", "one"))
        assert halves["steps"] == whole["steps"] == 24
        for when in ("before", "after"):
            for key in ("perplexity", "tokens"):
                assert halves[when][0][key] == pytest.approx(whole[when][0][key], rel=1e-3)
    again = torchrun(2, "-m", "lmeval_dispersion", *command)
    assert again.stdout == done.stdout  # nothing is done twice
    assert main(command) == 2
    assert "processes 2 -> 1" in capsys.readouterr().err


def test_a_failed_start_blocks_nothing_and_a_full_disk_is_one_sentence(base, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "settings.json").write_text("{}")  # of another program
    assert main(arguments(base, out)) == 2
    assert "expected a new or empty folder" in capsys.readouterr().err
    (out / "settings.json").unlink()
    for texts, short in (
        ({"data": base / "short.txt"}, f"two blocks of 16 tokens in {base}/short.txt"),
        ({"eval_data": base / "short.txt"}, f"a block of 16 tokens in {base}/short.txt"),
        ({"data": "org/name:wiki@test"}, "a Hub data set with split 'test', got 'org/name:wiki@test'"),
    ):
        assert main(arguments(base, out, **texts)) == 2
        assert short in capsys.readouterr().err
    assert (out / "settings.json").is_file()

    for error in (  # of Python, of safetensors and of torch.save on a full tmpfs
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("lmeval_dispersion.training.train.trained", Mock(side_effect=error))
            assert main(arguments(base, out)) == 1
        assert "full disk" in capsys.readouterr().err
    # Nothing is trained yet: other settings are welcome, and other blocks are made for them.
    assert main(arguments(base, out, block=8, tokens=8 * 4 * 2)) == 0
    assert "base" in capsys.readouterr().out
    assert np.load(out / "blocks.npz")["train0"].shape[1] == 8
    for result in out.glob("*/result.json"):
        result.unlink()  # as if it had been interrupted
    assert main(arguments(base, out, block=16)) == 2
    assert "block 8 -> 16" in capsys.readouterr().err
