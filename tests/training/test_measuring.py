"""Watched runs of Trainer, TRL and a plain loop: what is logged is what the screener says of checkpoints.

Under torchrun this file is one rank of a run whose head FSDP2 shards, in the folder that it is given.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from json_schemas import changed, faults
from lmeval_screener import screen
from processes import torchrun
from tiny_decoders import TRAINERS_WARN, trainer_arguments
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig

from lmeval_dispersion import DispersionCallback, watch
from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import dispersion, effective_rank
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.watching.report import (
    FILE,
    MEASURES,
    Watched,
    append_record,
    change,
    read_records,
)
from lmeval_dispersion.watching.watcher import TEXTS

pytestmark = TRAINERS_WARN
DEMO = data_folder("demo") / "sums-45"


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


def loaded(**options):
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, **options)


@pytest.fixture
def model():
    return loaded()


def texts(tokenizer, n=16):
    ids = tokenizer("12 + 30 = 42. 7 + 8 = 15. It was late, and they went home.").input_ids[:16]
    return [{"input_ids": list(ids), "labels": list(ids)} for _ in range(n)]


def arguments(folder, kind=TrainingArguments, **options):
    steps = {"max_steps": 6, "logging_steps": 2, "save_steps": 3, "per_device_train_batch_size": 4}
    return trainer_arguments(folder, kind, **{"learning_rate": 0.05} | steps | options)


def trained(trainer, **options):
    """The log of a watched training."""
    trainer.add_callback(DispersionCallback(trainer, domains=["math"]))
    trainer.train(**options)
    return trainer.state.log_history


def screened(checkpoint):
    return screen([str(checkpoint)]).groups[0].checkpoints[0].gaps["cosine"]


def check_logs(folder, log_history):
    """Values of the log, the JSONL and the screener on every saved checkpoint; returns them by step."""
    logged = {entry["step"]: entry for entry in log_history if "watch/gap_math" in entry}
    records = {record["step"]: record for record in read_records(folder)}
    assert set(logged) == set(records) == {2, 3, 4, 6}
    saved = sorted(folder.glob("checkpoint-*"))
    assert len(saved) == 2
    for checkpoint in saved:
        step = int(checkpoint.name.split("-")[1])
        assert records[step]["saved"]
        gap = screened(checkpoint)
        assert logged[step]["watch/gap_math"] == pytest.approx(gap.mean, abs=1e-6)
        assert logged[step]["watch/gap_math_se"] == pytest.approx(gap.se, abs=1e-6)
        within = records[step]["domains"]["math"]["within"]
        assert within == pytest.approx(gap.within_domain.mean, abs=1e-6)
    for step, entry in logged.items():
        for name in ("dispersion", "condensation", "effective_rank"):
            assert entry[f"watch/{name}"] == records[step][name]
    return logged


class Tracker(TrainerCallback):
    """The figures that a tracker such as TensorBoard gets."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **_):
        self.seen.append((state.global_step, set(logs)))


def test_a_trainer_is_watched(tmp_path, model, tokenizer):
    tracker = Tracker()
    data = {"train_dataset": texts(tokenizer), "eval_dataset": texts(tokenizer, 4)}
    given = {"processing_class": tokenizer, "callbacks": [tracker], **data}
    evaluated = arguments(tmp_path, eval_strategy="steps", eval_steps=4)
    logged = check_logs(tmp_path, trained(Trainer(model=model, args=evaluated, **given)))
    assert logged[2]["watch/gap_math"] != logged[6]["watch/gap_math"]
    assert [step for step, names in tracker.seen if "watch/gap_math" in names] == [2, 3, 4, 6]
    assert [step for step, names in tracker.seen if "loss" in names] == [2, 4, 6]  # the trainer's
    # A resumed run goes on in the same file: steps after the checkpoint are measured again.
    shutil.rmtree(tmp_path / "checkpoint-6")
    again = Trainer(model=loaded(), args=arguments(tmp_path), **given)
    trained(again, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [record["step"] for record in read_records(tmp_path)] == [2, 3, 4, 6]
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert len(lines) == 6
    assert [faults(line) for line in lines] == [[]] * 6
    for kind in ("renamed", "missing"):
        for line, where in changed(lines[0], kind):
            free = where in ("$.format", "$.domains.math")
            optional = kind == "missing" and where.lstrip("$.") in MEASURES
            assert free or optional or faults(line), f"{where} {kind}"


@pytest.mark.slow
def test_a_trl_trainer_is_watched_and_keeps_its_own_averages(tmp_path, model, tokenizer):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer.pad_token = (
        tokenizer.pad_token or tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments(tmp_path, SFTConfig, max_length=32, bf16=False),
        train_dataset=Dataset.from_list(
            [{"input_ids": row["input_ids"]} for row in texts(tokenizer)]
        ),
        processing_class=tokenizer,
    )
    log = trained(trainer)
    check_logs(tmp_path, log)
    losses = [entry for entry in log if "loss" in entry]
    assert [entry["step"] for entry in losses] == [2, 4, 6]
    assert all("mean_token_accuracy" in entry for entry in losses)


def test_a_loop_of_ones_own_is_watched(tmp_path, model, tokenizer):
    watcher = watch(model, tokenizer, domains=["math"], folder=tmp_path, every=2)
    batch = torch.tensor([row["input_ids"] for row in texts(tokenizer, 4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    model.model.layers[1].eval()  # a mode of its own, to be left as it is
    logs = {}
    for step in range(1, 6):
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 5:
            model.save_pretrained(tmp_path / "checkpoint")
            tokenizer.save_pretrained(tmp_path / "checkpoint")
        logs[step] = watcher.step(saved=step == 5)
    assert [step for step, entry in logs.items() if entry] == [2, 4, 5]
    assert logs[5]["watch/gap_math"] == pytest.approx(
        screened(tmp_path / "checkpoint").mean, abs=1e-6
    )
    assert model.training
    assert not model.model.layers[1].training
    # The fixed batch, text by text.
    model.eval()
    states = []
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False).input_ids[:32]
        with torch.no_grad():
            out = model(torch.tensor([ids]), output_hidden_states=True)
        states.append(out.hidden_states[-1][0].double().numpy())
    assert logs[5]["watch/dispersion"] == pytest.approx(
        dispersion([s[-1] for s in states]), abs=1e-6
    )
    similar = np.mean([1 - dispersion(s) for s in states])
    assert logs[5]["watch/condensation"] == pytest.approx(similar, abs=1e-6)
    assert logs[5]["watch/effective_rank"] == pytest.approx(
        effective_rank(np.concatenate(states)), rel=1e-5
    )
    records = read_records(tmp_path)
    assert change(records[-1], records[0], "math").mean == pytest.approx(
        logs[5]["watch/gap_math"] - logs[2]["watch/gap_math"]
    )


@pytest.fixture
def watched(tmp_path, model, tokenizer):
    """A folder with a rise of G, and one where nothing happens."""
    head = model.get_output_embeddings().weight
    digits = None
    for name, strength in (("rising", 0.6), ("still", 0.0)):
        watcher = watch(model, tokenizer, domains=["math"], folder=tmp_path / name)
        digits = watcher.resolutions["math"].domain_ids
        plain, rng = head.detach().clone(), torch.Generator().manual_seed(1)
        with torch.no_grad():
            for step in range(4):
                noise = torch.randn(plain[digits].shape, generator=rng) * plain.std()
                head[digits] = plain[digits] + step * strength * noise
                watcher.measure(10 * step, saved=step % 2 == 1)
            head.copy_(plain)
    return tmp_path


def test_the_page_says_what_moved(watched, capsys, tmp_path):
    def shown(name, *options):
        assert main(["watch", str(watched / name), *options]) == 0
        return capsys.readouterr().out

    assert "it rose since step 0" in " ".join(shown("rising").split())
    assert "is not shown" in shown("still", "--format", "markdown")
    report = json.loads(shown("rising", "--format", "json"))
    assert not faults(report)
    last, records = report["measurements"][-1], read_records(watched / "rising")
    moved = change(records[-1], records[0], "math")
    assert (last["change"], last["change_se"], last["change_p"]) == (moved.mean, moved.se, moved.p)
    assert len(shown("rising", "--format", "csv").splitlines()) == 5
    shown("rising", "-o", str(tmp_path / "page.html"), "-q")
    page = (tmp_path / "page.html").read_text()
    assert "G of math, change since step 0" in page
    assert "two paired standard errors over tokens, as in a screening" in page
    spec = Watched.of(watched / "rising").charts()["gap_math"].specification()
    points = [
        (point["step"], point["value"], point["high"] - point["value"])
        for point in spec["data"]["values"]
    ]
    assert points[0] == (0, 0.0, 0.0)
    assert points[-1] == (30, moved.mean, pytest.approx(2 * moved.se))


def test_what_cannot_be_watched_is_refused(watched, model, tokenizer, tmp_path, capsys):
    with pytest.raises(UsageError, match="list of token sets"):
        watch(model, tokenizer, domains="math")
    with pytest.raises(UsageError, match="tokenizer"):
        watch(model, None)
    with pytest.raises(UsageError, match="output projection"):
        watch(model.model, tokenizer)
    with pytest.raises(UsageError, match="at least 2 texts"):
        watch(model, tokenizer, texts=["one"])
    with pytest.raises(UsageError, match="watch\\(\\)"):
        DispersionCallback(model)
    assert main(["watch", str(tmp_path / "nothing")]) == 2
    assert "DispersionCallback" in capsys.readouterr().err
    path = watched / "still" / FILE
    path.write_text(
        path.read_text() + '{"format": "dispersion-w'
    )  # a process was killed while it wrote
    assert len(read_records(path.parent)) == 4
    append_record(path.parent, {**read_records(path.parent)[-1], "step": 50})
    assert [record["step"] for record in read_records(path.parent)][-1] == 50
    for line in ({"loss": 1}, {"format": "dispersion-watch/2"}):
        path.write_text(json.dumps(line) + "\n")
        with pytest.raises(UsageError, match="expected lines of dispersion-watch/2"):
            read_records(path)


def ranks_logs(folder):
    """Watched steps of transformers' Trainer, whose model transformers shards over the ranks."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    model = loaded(
        **({"distributed_config": DistributedConfig(fsdp_size=world)} if world > 1 else {})
    )
    assert isinstance(model.lm_head.weight, DTensor) == (world > 1)
    each = {"logging_steps": 1, "save_only_model": True, "per_device_train_batch_size": 4 // world}
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    trainer = Trainer(
        model=model,
        args=arguments(folder, max_steps=2, save_steps=2, optim="sgd", **each),
        train_dataset=texts(tokenizer, 4),
        processing_class=tokenizer,
    )
    return [entry for entry in trained(trainer) if "watch/gap_math" in entry]


@pytest.mark.slow
def test_two_processes_log_what_one_logs(tmp_path):
    whole = ranks_logs(tmp_path / "one")
    done = torchrun(2, __file__, tmp_path / "two")
    assert done.returncode == 0, done.stderr[-3000:]
    sharded = json.loads((tmp_path / "two" / "logs.json").read_text())
    assert len(whole) == len(sharded) == 2
    for entry, other in zip(whole, sharded, strict=True):
        names = [name for name in entry if name.startswith("watch/")]
        assert len(names) == 5
        for name in names:
            assert other[name] == pytest.approx(entry[name], rel=1e-6, abs=1e-6), name
    assert abs(whole[0]["watch/gap_math"] - whole[1]["watch/gap_math"]) > 1e-5  # it trained
    records = read_records(tmp_path / "two")
    assert [record["step"] for record in records] == [1, 2]  # one of the processes writes
    gap = screened(tmp_path / "two" / "checkpoint-2")
    assert sharded[1]["watch/gap_math"] == pytest.approx(gap.mean, abs=1e-6)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    logs = ranks_logs(Path(sys.argv[1]))
    if dist.get_rank() == 0:
        Path(sys.argv[1], "logs.json").write_text(json.dumps(logs))
    dist.barrier()
    dist.destroy_process_group()
