"""What a callback measures of head and texts is what the screener says of the saves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from lmeval_screener import screen
from tiny_decoders import TRAINERS_WARN, trainer_arguments
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

from lmeval_dispersion import RaceCallback
from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import GeometryError, UsageError
from lmeval_dispersion.geometry import dispersion, effective_rank
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.training.measuring import TEXTS, Measuring

pytestmark = TRAINERS_WARN
DEMO = data_folder("demo") / "sums-45"


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture
def model():
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


def texts(tokenizer, n=16):
    ids = tokenizer("12 + 30 = 42. 7 + 8 = 15. It was late, and they went home.").input_ids[:16]
    return [{"input_ids": list(ids), "labels": list(ids)} for _ in range(n)]


def test_gaps_of_a_training_are_the_screeners_of_its_saves(tmp_path, model, tokenizer):
    steps = {"max_steps": 6, "logging_steps": 2, "save_steps": 3, "per_device_train_batch_size": 4}
    trainer = Trainer(
        model=model,
        args=trainer_arguments(tmp_path, learning_rate=0.05, **steps),
        train_dataset=texts(tokenizer),
        processing_class=tokenizer,
    )
    RaceCallback(domains=["math"], every=2).attach(trainer)
    trainer.train()
    history = trainer.state.log_history
    logged = {entry["step"]: entry for entry in history if "geometry/gap_math" in entry}
    assert list(logged) == [2, 3, 4, 6]
    assert [entry["step"] for entry in history if "loss" in entry] == [2, 4, 6]
    assert logged[2]["geometry/gap_math"] != logged[6]["geometry/gap_math"]
    for step in (3, 6):
        (group,) = screen([str(tmp_path / f"checkpoint-{step}")]).groups
        gap = group.checkpoints[0].gaps["cosine"]
        assert logged[step]["geometry/gap_math"] == pytest.approx(gap.mean, abs=1e-6)
        assert logged[step]["geometry/gap_math_se"] == pytest.approx(gap.se, abs=1e-6)


def test_the_spread_is_that_of_the_texts_one_by_one(model, tokenizer):
    figures = Measuring(tokenizer, layers=[0, "last"]).measure(model)
    assert len(figures) == 6
    for layer, name in ((1, "/layer.0"), (-1, "")):
        states = []
        for text in TEXTS:
            ids = tokenizer(text, add_special_tokens=False).input_ids[:32]
            with torch.no_grad():
                out = model(torch.tensor([ids]), output_hidden_states=True)
            states.append(out.hidden_states[layer][0].double().numpy())
        of_last_tokens = dispersion([state[-1] for state in states])
        similar = np.mean([1 - dispersion(state) for state in states])
        rank = effective_rank(np.concatenate(states))
        assert figures[f"geometry/dispersion{name}"] == pytest.approx(of_last_tokens, abs=1e-6)
        assert figures[f"geometry/condensation{name}"] == pytest.approx(similar, abs=1e-6)
        assert figures[f"geometry/effective_rank{name}"] == pytest.approx(rank, rel=1e-5)


def test_what_cannot_be_measured_is_refused(model, tokenizer):
    with pytest.raises(UsageError, match="list of domains"):
        Measuring(tokenizer, domains="math")
    with pytest.raises(UsageError, match="at least 2 texts"):
        Measuring(tokenizer, texts=["one"])
    with pytest.raises(UsageError, match="output projection"):
        Measuring(tokenizer, domains=["math"]).measure(model.model)
    with pytest.raises(UsageError, match="layer"):
        Measuring(tokenizer, layers=["layer.9"]).measure(model)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(GeometryError):
        Measuring(tokenizer, domains=["math"]).measure(model)


def test_the_old_command_names_the_callback(capsys, tmp_path):
    assert main(["watch", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert "RaceCallback" in shown
    assert shown.count("\n") == 1
    assert not Path(tmp_path, "race").exists()
