"""Every example of docs/reference/training.md runs, and so does examples/midtrain.py."""

import dataclasses
import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_decoders import tiny_gpt2, tokens, word_tokenizer

from lmeval_dispersion import DispersionTrainer
from lmeval_dispersion.installation import data_folder

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "midtrain.py")
MIDTRAIN = runpy.run_path(EXAMPLE)
PAGE = ROOT / "docs" / "reference" / "training.md"
EXAMPLES = re.findall(
    r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def one_rank(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def cases():
    """Every example; those that compile, wrap a process group or need TRL are long."""
    for number, code in enumerate(EXAMPLES):
        long = re.search(r"torch\.compile|DistributedDataParallel|fully_shard|from trl ", code)
        yield pytest.param(code, id=str(number), marks=[pytest.mark.slow] if long else [])


@pytest.mark.parametrize("code", [*cases()])
def test_example_runs(code, request, tmp_path, monkeypatch):
    from datasets import Dataset
    from transformers import TrainingArguments

    from lmeval_dispersion import DispersionRegularizer

    for library in ("peft", "trl"):
        if f"from {library} " in code:
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    if "DistributedDataParallel" in code or "fully_shard" in code:
        request.getfixturevalue("one_rank")
    # The examples leave the place to the library; a test machine may have no compiler and wants no logger.
    code = code.replace("torch.compile(model)", "torch.compile(model, backend='aot_eager')")
    code = code.replace(
        '("out", ', '("out", use_cpu=True, report_to="none", disable_tqdm=True, bf16=False, '
    )
    ids = tokens(4, 12)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    model = tiny_gpt2()
    rows = [{"input_ids": row.tolist()} for row in tokens(8, 12)]
    space = {
        "torch": torch,
        "model": model,
        "batch": batch,
        "batches": [batch, batch],
        "data": Dataset.from_list(
            rows if "SFT" in code else [row | {"labels": row["input_ids"]} for row in rows]
        ),
        "tokenizer": word_tokenizer(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "DispersionRegularizer": DispersionRegularizer,
        "TrainingArguments": TrainingArguments,
    }
    exec(compile(code, str(PAGE), "exec"), space)
    if "trainer" in space or "optimizer.step" in code:
        pairs = zip(model.parameters(), tiny_gpt2().parameters(), strict=True)
        assert any(not torch.equal(trained, fresh) for trained, fresh in pairs)
    elif "backward" in code:
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    else:
        assert space["loss"] < 0 < space["dispersion"]


DEMO = str(data_folder("demo") / "sums-20")


@pytest.fixture
def sums(tmp_path):
    """A text of sums, and one of words."""
    files = tmp_path / "a.txt", tmp_path / "b.txt"
    files[0].write_text("\n\n".join(f"{i} + {i + 1} = {2 * i + 1}." for i in range(150)))
    files[1].write_text("\n\n".join(f"The {i}th day is day {i}." for i in range(150)))
    return [str(file) for file in files]


def losses_of(result, name="eval_test0_loss"):
    """The figure before training and after it."""
    return result["before"][name], result["after"]["4"][name]


def test_midtrain_compares_with_base_and_goes_on(sums, tmp_path, capsys):
    out = tmp_path / "out"
    words = [DEMO, sums[0], str(out), "--recipe=tiny", "--seed=0", "--seed=1"]
    words += ["--arm=push_away", "--arm=noise", "--arm=forgetting"]
    MIDTRAIN["main"](words)
    printed = capsys.readouterr().out
    base, *others = printed.splitlines()
    assert re.fullmatch(r"base on a.txt: perplexity \d+\.\d\d, dispersion 0\.\d{3}", base)
    results = {file.parent.name: json.loads(file.read_text()) for file in out.glob("*/result.json")}
    assert len({losses_of(result)[0] for result in results.values()}) == 1
    for line, name in zip(others, ("push_away-0.1-{}", "noise-{}", "forgetting-{}"), strict=True):
        matched = re.fullmatch(
            r"(\w+) on a.txt: perplexity (\S+), dispersion \S+(, weight 0.1)?, "
            r"(\S+) % \(\S+ to \S+\) against base",
            line,
        )
        runs = [losses_of(results[name.format(seed)])[1] for seed in (0, 1)]
        bases = [losses_of(results[f"base-{seed}"])[1] for seed in (0, 1)]
        assert float(matched[2]) == pytest.approx(math.exp(sum(runs) / 2), abs=0.006)
        change = 100 * (math.exp(sum(runs) / 2 - sum(bases) / 2) - 1)
        assert float(matched[4]) == pytest.approx(change, abs=0.006)
        assert runs[0] != bases[0]
    # What is finished is not trained again; what is not goes on from its last whole checkpoint.
    trained = (out / "base-1" / "model" / "model.safetensors").stat().st_mtime_ns
    (out / "forgetting-1" / "result.json").unlink()
    (out / "forgetting-1" / "checkpoint-3").mkdir()
    MIDTRAIN["main"](words)
    assert capsys.readouterr().out == printed
    assert (out / "base-1" / "model" / "model.safetensors").stat().st_mtime_ns == trained
    with pytest.raises(SystemExit, match="models of other settings"):
        MIDTRAIN["main"]([*words, "--lr=0.1"])


def test_from_scratch_the_weight_is_chosen_on_validation_text(sums, tmp_path, capsys):
    out = tmp_path / "out"
    words = [DEMO, sums[0], str(out), "--also", sums[1], "--scratch", "--recipe=tiny"]
    words += ["--set", "intermediate_size=24", "--arm=cross_domain_push_away", "--evaluations=2"]
    words += ["--weight=0.01", "--weight=30"]
    for name in ("validation", "test"):
        for number, file in enumerate(sums):
            held_out = tmp_path / f"{name}{number}.txt"
            held_out.write_text(Path(file).read_text()[len(name) :])
            words += [f"--{name}", str(held_out)]
    MIDTRAIN["main"](words)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 + 2  # two evaluations, two arms, two texts; two weights
    assert lines[0].startswith("base on a.txt after 2 steps: perplexity ")
    assert lines[7].startswith("cross_domain_push_away on b.txt after 4 steps: perplexity ")
    validation = {}
    for weight in ("0.01", "30"):
        file = out / f"cross_domain_push_away-{weight}-0" / "result.json"
        after = json.loads(file.read_text())["after"]["4"]
        validation[weight] = [after[f"eval_validation{i}_loss"] for i in (0, 1)]
    best = min(validation, key=lambda weight: sum(validation[weight]))
    assert f", weight {best}, " in lines[7]
    for line, (weight, losses) in zip(lines[8:], validation.items(), strict=True):
        perplexity = math.exp(sum(losses) / 2)
        expected = f"cross_domain_push_away, weight {weight}: perplexity {perplexity:.2f}"
        lowest = ", the lowest" if weight == best else ""
        assert line == f"{expected} on validation text{lowest}"
    config = json.loads((out / "base-0" / "model" / "config.json").read_text())
    assert config["intermediate_size"] == 24
    before = json.loads((out / "base-0" / "result.json").read_text())["before"]
    vocabulary = config["vocab_size"]
    assert before["eval_test0_loss"] == pytest.approx(math.log(vocabulary), rel=0.05)


def test_temperatures_are_scanned_with_the_weights_and_reach_the_loss(sums, tmp_path, capsys):
    out = tmp_path / "out"
    words = [DEMO, sums[0], str(out), "--recipe=tiny", "--arm=angular_spread", "--arm=push_away"]
    MIDTRAIN["main"]([*words, "--weight=1", "--tau=1", "--tau=0.05"])
    base, spread, push, *scan = capsys.readouterr().out.splitlines()
    folders = {"1": "angular_spread-1-0", "0.05": "angular_spread-1-tau0.05-0"}
    losses = {}
    for tau, folder in folders.items():
        after = json.loads((out / folder / "result.json").read_text())["after"]["4"]
        losses[tau] = after["eval_validation0_loss"]
    assert losses["1"] != losses["0.05"]
    best = min(losses, key=losses.get)
    assert f", weight 1, tau {best}, " in spread
    assert "tau" not in base + push
    assert len(scan) == 2
    for line, tau in zip(scan, folders, strict=True):
        assert line.startswith(f"angular_spread, weight 1, tau {tau}: perplexity ")
        assert line.endswith("the lowest") == (tau == best)
    # A later call adds to the folder, and its base is there already.
    trained = (out / "base-0" / "model" / "model.safetensors").stat().st_mtime_ns
    MIDTRAIN["main"]([*words[:-1], "--weight=1", "--tau=0.5"])
    assert (out / "angular_spread-1-tau0.5-0" / "result.json").is_file()
    assert (out / "base-0" / "model" / "model.safetensors").stat().st_mtime_ns == trained
    with pytest.raises(SystemExit):
        MIDTRAIN["main"]([DEMO, sums[0], str(out), "--recipe=tiny", "--arm=noise", "--tau=0.5"])
    assert "expected an --arm with a temperature" in capsys.readouterr().err


def test_p_values_are_of_paired_differences_over_benchmarks():
    from scipy.stats import t

    means = {
        "start": np.array([0.3, 0.4, 0.5, 0.2]),
        "base": np.array([0.31, 0.43, 0.5, 0.22]),
        "noise": np.array([0.32, 0.42, 0.56, 0.24]),
        "l2_repel": np.array([0.35, 0.41, 0.57, 0.29]),
        "angular_spread": np.array([0.34, 0.44, 0.58, 0.26]),
    }
    shifts = means["angular_spread"] - means["base"]
    value = shifts.mean() / (shifts.std(ddof=1) / 2)
    expected = 2 * t.sf(abs(value), 3)
    words = MIDTRAIN["p_values"](means["angular_spread"], means)
    assert f", p {expected:.2g} against base" in words
    assert words.count("against") == 3  # no loss, and not itself
    same = {"base": means["base"], "l2_repel": means["base"]}
    assert MIDTRAIN["p_values"](means["base"], same) == ""


def test_a_large_change_is_its_per_cent_and_not_its_logarithm():
    shift = math.log(5588.74 / 77.01)
    assert MIDTRAIN["change"](np.array([shift]), 1) == "+7157.16 %"
    shifts = np.log([1.1, 1.2, 1.3])
    text = MIDTRAIN["change"](shifts, 1)
    half = 4.302653 * shifts.std(ddof=1) / math.sqrt(3)
    ends = [100 * (math.exp(shifts.mean() + side * half) - 1) for side in (-1, 1)]
    assert (
        text == f"{100 * (math.exp(shifts.mean()) - 1):+.2f} % ({ends[0]:+.2f} to {ends[1]:+.2f})"
    )


def test_forgetting_has_its_own_schedule(tmp_path):
    """Twelve steps, forgotten after every fifth: two rises and falls of the embeddings' rate."""
    from transformers import get_scheduler

    recipe = dataclasses.replace(
        MIDTRAIN["RECIPES"]["tiny"],
        tokens=12 * 4 * 2 * 16,
        forget_every=5,
        embedding_lr=0.5,
        embedding_warmup=0.25,
    )
    assert recipe.steps == 12
    model = tiny_gpt2()
    trainer = DispersionTrainer(
        model=model, args=MIDTRAIN["arguments_of"](tmp_path, "forgetting", recipe, 0)
    )
    MIDTRAIN["forgets"](trainer, recipe, 0)
    *body, own = trainer.optimizer.param_groups
    assert [id(weight) for weight in own["params"]] == [id(model.transformer.wte.weight)]
    assert sum(len(group["params"]) for group in body) == len([*model.parameters()]) - 1
    plain = torch.optim.SGD([torch.zeros(1)], lr=recipe.lr)
    cosine = get_scheduler("cosine", plain, 2, 12)
    for step in range(12):
        place = ((step + 1) / 6) % 1  # cycles of 12 // (12 // 5) steps
        rate = place / 0.25 if place < 0.25 else (1 - place) / 0.75
        assert own["lr"] == pytest.approx(0.5 * rate, abs=1e-12), step
        assert body[0]["lr"] == pytest.approx(cosine.get_last_lr()[0]), step
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        plain.step()
        cosine.step()


def test_the_published_recipe_is_the_papers():
    recipe = MIDTRAIN["RECIPES"]["published"]
    assert recipe.block * recipe.batch_size * recipe.accumulate == 131_072
    assert recipe.steps == 1526
    args = MIDTRAIN["arguments_of"]("out", "base", recipe, 0)
    assert (args.learning_rate, args.weight_decay) == (5e-5, 0.1)
    assert (args.adam_beta1, args.adam_beta2) == (0.9, 0.95)
    assert (args.lr_scheduler_type, args.warmup_steps) == ("cosine", 305)
    setting = MIDTRAIN["Setting"]
    spread = MIDTRAIN["loss_of"](setting("angular_spread", 0.1), recipe, 0)
    assert (spread.layers, spread.weight) == ("all", 0.1)
    assert spread.options == {"max_tokens": 256, "released": 0.1}
    repel = MIDTRAIN["loss_of"](setting("l2_repel", 0.1, tau=0.5), recipe, 0)
    assert repel.options == {"max_tokens": 256, "released": True, "tau": 0.5}


@pytest.mark.slow
def test_a_killed_midtraining_ends_as_an_uninterrupted_one(tmp_path):
    """Stopped after its second step, with a checkpoint at the first and second of four."""
    (tmp_path / "a.txt").write_text(
        "\n\n".join(f"{i} + {i + 1} = {2 * i + 1}." for i in range(150))
    )

    def run(out, code=""):
        words = [str(data_folder("demo") / "sums-20"), str(tmp_path / "a.txt"), str(tmp_path / out)]
        words += ["--arm=push_away", "--recipe=tiny"]
        program = f"import runpy; {code}runpy.run_path({EXAMPLE!r})['main']({words!r})"
        return subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
        )

    killed = "import os, transformers; old = transformers.Trainer._save_checkpoint; "
    killed += "transformers.Trainer._save_checkpoint = lambda self, *a, **k: "
    killed += "(old(self, *a, **k), self.state.global_step == 2 and os._exit(9)); "
    assert run("out", killed).returncode == 9
    whole, again = run("whole"), run("out")
    assert whole.returncode == again.returncode == 0
    assert again.stdout == whole.stdout
