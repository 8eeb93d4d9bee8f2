"""TRL's SFT and DPO with LoRA adapters, raced while they train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
from live_training import arguments, raced, rows
from tiny_decoders import TRAINERS_WARN

from lmeval_dispersion import RaceCallback, race

pytestmark = [TRAINERS_WARN, pytest.mark.slow]
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")


def adapter() -> Any:
    return peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.1)


def base(folder: Path) -> Path:
    return tiny_models.saved(folder, tiny_models.llama(), pad=True)


def trained(kind: str, run: Path, start: Path, callbacks: list[Any]) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    given = {"max_length": 32, "bf16": False, "dataloader_pin_memory": False, "max_steps": 8}
    model = AutoModelForCausalLM.from_pretrained(start)
    common = {
        "model": model,
        "processing_class": tiny_models.tokenizer(pad=True),
        "peft_config": adapter(),
        "callbacks": callbacks,
    }
    if kind == "sft":
        data = Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows(32)])
        trainer = trl.SFTTrainer(
            args=arguments(run, trl.SFTConfig, **given), train_dataset=data, **common
        )
    else:
        pairs = {"prompt": "w1 w6", "chosen": " w11 w16", "rejected": " w3 w2"}
        data = Dataset.from_list([pairs] * 32)
        trainer = trl.DPOTrainer(
            args=arguments(run, trl.DPOConfig, **given), train_dataset=data, **common
        )
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_adapters_are_raced_while_they_train(kind: str, task: Path, tmp_path: Path) -> None:
    start = base(tmp_path / "base")
    run = tmp_path / "run"
    plain = trained(kind, tmp_path / "plain", start, [])
    given = trained(
        kind, run, start, [RaceCallback("words", questions=20, include_path=task, layers="all")]
    )
    wanted = [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in given.state.log_history if "loss" in entry] == wanted
    log = raced(given.state.log_history)
    assert list(log) == [4, 8]
    assert "geometry/dispersion/layer.0" in log[4]
    again = race(
        [str(run)],
        tasks="words",
        all=True,
        include_path=str(task),
        device="cpu",
        quiet=True,
        output_path=tmp_path / "again",
        limit=20,
    )
    scores = {row.label: row for row in again.checkpoints}
    for step, entry in log.items():
        row = scores[f"checkpoint-{step}"]
        assert row.questions == 20 or row.status in ("behind", "not better")
        if row.questions == 20:
            assert row.score == entry["race/score"]
