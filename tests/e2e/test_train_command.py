"""``dispersion train`` as a user runs it: small runs, an interruption by SIGKILL, mistakes."""

import errno
import json
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from processes import environment, torchrun
from safetensors.torch import load_file
from threadpoolctl import threadpool_limits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, T5Config

from lmeval_dispersion.cli import main, parser_of
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.training.losses import LOSSES
from lmeval_dispersion.training.train import LOSS_NAMES, claimed_folder, given_settings

WORDS = "the of a to in and on river stone house light wind old new small"


def prose(lines, seed):
    draw = random.Random(seed)
    return "\n\n".join(" ".join(draw.choices(WORDS.split(), k=30)) + "." for _ in range(lines))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny GPT-2 with dropout and one without, their tokenizer, and two domains of text."""
    folder = tmp_path_factory.mktemp("base")
    text = prose(200, 0)
    code = [f"def f{i}(x):\n    return x + {i}" for i in range(400)]
    (folder / "prose.txt").write_text(text)
    (folder / "short.txt").write_text("the river")
    (folder / "code.jsonl").write_text("\n".join(json.dumps({"text": part}) for part in code))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=letters)
    bpe.train_from_iterator([text, *code], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>", pad_token="<end>")
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, n_positions=32, vocab_size=320, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    config.update({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
    config.save_pretrained(folder / "undropped")
    T5Config(d_model=16, num_layers=1, vocab_size=320).save_pretrained(folder / "reader")
    for name in ("model", "undropped", "reader"):
        tokenizer.save_pretrained(folder / name)
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


def started(base, out, **options):
    call = "import sys; from lmeval_dispersion.cli import main, parser_of; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", call, *arguments(base, out, **options)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def weights(out):
    return load_file(out / "angular_spread-seed0" / "model" / "model.safetensors")


def assert_same_weights(one, other):
    found, wanted = weights(one), weights(other)
    for key, value in wanted.items():
        assert torch.equal(value, found[key]), key


def result_of(out, arm="base"):
    return json.loads((out / f"{arm}-seed0" / "result.json").read_text())


def test_an_interrupted_run_goes_on_to_the_same_numbers(base, tmp_path, capsys, monkeypatch):
    """The quick form of the next: interrupted in this process, after a checkpoint."""

    @contextmanager
    def interrupted(**_):
        def update(done, total, label):
            if done == 8:
                raise KeyboardInterrupt

        yield update

    with threadpool_limits(1):
        with monkeypatch.context() as patch:
            patch.setattr("lmeval_dispersion.training.train.progress_bar", interrupted)
            assert main(arguments(base, tmp_path / "cut", max_tokens=6)) == 130
        assert (tmp_path / "cut" / "base-seed0" / "checkpoint-6").is_dir()
        capsys.readouterr()
        assert main(arguments(base, tmp_path / "cut", max_tokens=6)) == 0
        printed = capsys.readouterr().out
        assert main(arguments(base, tmp_path / "whole", max_tokens=6)) == 0
    assert printed == capsys.readouterr().out
    assert_same_weights(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_numbers(base, tmp_path, capsys):
    options = {"max_tokens": 6, "tokens": 16 * 4 * 60}
    killed = started(base, tmp_path / "killed", **options)
    run = tmp_path / "killed" / "base-seed0"
    deadline = time.monotonic() + 200
    while not list(run.glob("checkpoint-*/trainer_state.json")) and killed.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (run / "result.json").exists(), "the run was over before it could be killed"
    # What a kill in the middle of writing leaves behind.
    (run / "checkpoint-59").mkdir()
    (run / "checkpoint-59" / "trainer_state.json").write_text('{"global_st')
    # And one between the last step and the result.
    (run / "checkpoint-60").mkdir()
    (run / "checkpoint-60" / "trainer_state.json").write_text('{"global_step": 60}')
    # All that it knows lies in its folder, so it may go on in this process; with one thread, as before.
    with threadpool_limits(1):
        assert main(arguments(base, tmp_path / "killed", **options)) == 0
        printed = capsys.readouterr().out
        assert main(arguments(base, tmp_path / "whole", **options)) == 0
    assert printed == capsys.readouterr().out
    assert result_of(tmp_path / "killed") == result_of(tmp_path / "whole")
    assert_same_weights(tmp_path / "killed", tmp_path / "whole")
    assert not list((tmp_path / "killed").glob("*/checkpoint-*"))
    # A third call does nothing but print.
    assert main(arguments(base, tmp_path / "killed", **options)) == 0
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
        ({"seed": "-1"}, "--seed: expected at least 0"),
        ({"lr": "fast"}, "argument --lr: invalid number value: 'fast'"),
        ({"max_tokens": "1"}, "make a pair"),
        ({"loss": "cross_domain_push_away"}, "two --data"),
        ({"output": "report.xlsx"}, "suffix"),
        ({"output_dir": "BASE/prose.txt"}, "new or empty folder"),
        ({"output_dir": "BASE/prose.txt/in"}, "where folders and files can be made"),
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
    halves = arguments(base, tmp_path / "two", batch_size=2, model=base / "undropped", **pair)
    done = torchrun(2, "-m", "lmeval_dispersion", *halves)
    assert done.returncode == 0, done.stderr
    assert main(arguments(base, tmp_path / "one", batch_size=4, model=base / "undropped", **pair)) == 0
    capsys.readouterr()
    assert done.stdout.count("One seed shows") == 1  # one of the two reports
    for arm in ("base", "angular_spread"):
        two, one = result_of(tmp_path / "two", arm), result_of(tmp_path / "one", arm)
        assert two["steps"] == one["steps"] == 24
        for when in ("before", "after"):
            for key in ("perplexity", "tokens"):
                assert two[when][0][key] == pytest.approx(one[when][0][key], rel=1e-3)
    again = torchrun(2, "-m", "lmeval_dispersion", *halves)
    assert again.stdout == done.stdout  # nothing is done twice
    assert main(halves) == 2
    assert "processes 2 -> 1" in capsys.readouterr().err


def test_a_failed_start_blocks_nothing_and_a_full_disk_is_one_sentence(base, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    assert main(arguments(base, out, data=base / "short.txt")) == 2
    assert (out / "settings.json").is_file()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lmeval_dispersion.training.train.trained", full)
        assert main(arguments(base, out)) == 1
    assert "full disk" in capsys.readouterr().err
    # Nothing is trained yet: other settings are welcome, and other blocks are made for them.
    assert main(arguments(base, out, block=8, tokens=8 * 4 * 2)) == 0
    assert "base" in capsys.readouterr().out
    assert np.load(out / "blocks.npz")["train0"].shape[1] == 8
    assert main(arguments(base, out, block=16)) == 2
    assert "block 8 -> 16" in capsys.readouterr().err


def test_another_comparisons_folder_is_refused(base, tmp_path):
    assert set(LOSSES) == set(LOSS_NAMES)

    def claimed(out, **options):
        words = arguments(base, out, **options)[1:]
        return claimed_folder(given_settings(parser_of("train")[0].parse_args(words)))

    begun = claimed(tmp_path / "out") / "base-seed1"
    begun.mkdir()
    (begun / "trainer_state.json").write_text("{}")
    with pytest.raises(UsageError, match=r"lr 0\.005 -> 0\.1"):
        claimed(tmp_path / "out", lr=0.1)
    with pytest.raises(UsageError, match="empty folder"):
        claimed(tmp_path)
