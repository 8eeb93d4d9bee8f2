"""Real trackers, offline: what they keep of a watched run is what its JSONL says, step by step."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from lmeval_dispersion import DispersionCallback
from lmeval_dispersion.paths import data_folder
from lmeval_dispersion.watching.report import MEASURES, read_records

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pin_memory.*:UserWarning",
    "ignore:.*lr_scheduler.step.*:UserWarning",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:.*file.*store.*:UserWarning",
)
DEMO = data_folder("demo") / "sums-45"
STEPS = [2, 3, 4, 6]  # logs at every second, saves at every third


def watched(folder, tracker):
    """Train with a tracker; returns what it should have: name -> step -> value."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    ids = tokenizer("12 + 30 = 42. It was late.").input_ids[:12]
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32),
        args=TrainingArguments(
            output_dir=str(folder),
            run_name="watched",
            report_to=tracker,
            max_steps=6,
            per_device_train_batch_size=2,
            learning_rate=0.05,
            logging_steps=2,
            save_steps=3,
            save_only_model=True,
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": list(ids), "labels": list(ids)} for _ in range(12)],
        processing_class=tokenizer,
    )
    trainer.add_callback(DispersionCallback(trainer, domains=["math"]))
    trainer.train()
    expected: dict[str, dict[int, float]] = {}
    for record in read_records(folder):
        math = record["domains"]["math"]
        told = {"gap_math": math["gap"], "gap_math_se": math["se"]} | {m: record[m] for m in MEASURES}
        for name, value in told.items():
            expected.setdefault(f"watch/{name}", {})[record["step"]] = value
    assert all(list(steps) == STEPS for steps in expected.values())
    assert len({round(value, 9) for value in expected["watch/gap_math"].values()}) == len(STEPS)
    return expected


def test_tensorboard_has_what_the_jsonl_has(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    expected = watched(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    for name, steps in expected.items():
        found = {event.step: event.value for event in events.Scalars(f"train/{name}")}
        assert found == pytest.approx(steps, rel=1e-6)  # events hold float32
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4, 6]
