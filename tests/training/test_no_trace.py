"""A race while it trains leaves no trace: losses are equal to the last bit with and without it."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from live_training import losses, model, raced, trainer
from tiny_decoders import TRAINERS_WARN
from transformers import TrainerCallback

from lmeval_dispersion import RaceCallback
from lmeval_dispersion.training.no_trace import without_trace

pytestmark = TRAINERS_WARN


class Generators(TrainerCallback):
    """The states of all generators after each save, and whether grads are there."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        numpy = np.random.get_state()
        drawn = [random.getstate(), numpy[1].tolist(), numpy[2], torch.get_rng_state().tolist()]
        self.states.append((state.global_step, drawn))


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "autocast": {"bf16": True},
    "noise": {"neftune_noise_alpha": 5.0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_weights_and_generators_are_equal_to_the_last_bit(
    kind: str, task: Path, tmp_path: Path
) -> None:
    ends = []
    for name in ("plain", "raced"):
        given = trainer(tmp_path / name, **KINDS[kind])
        generators = Generators()
        given.add_callback(generators)
        if name == "raced":
            given.add_callback(RaceCallback("words", questions=20, include_path=task, every=3))
        given.train()
        weights = torch.cat([p.detach().flatten() for p in given.model.parameters()])
        ends.append((losses(given.state.log_history), generators.states, weights))
        assert len(raced(given.state.log_history)) == (6 if name == "raced" else 0)
    (plain, drawn, weights), (with_race, drawn_with_race, weights_with_race) = ends
    assert len(plain) == 12
    assert len(set(plain.values())) > 6  # it trains
    assert with_race == plain
    assert drawn_with_race == drawn
    assert torch.equal(weights, weights_with_race)


def test_the_model_and_its_tokenizer_are_as_they_were(task: Path, tmp_path: Path) -> None:
    built = model()
    built.transformer.h[1].eval()  # a mode of its own
    built.config.use_cache = False
    built.lm_head.weight = torch.nn.Parameter(built.lm_head.weight.detach().clone())  # untied
    batch = torch.tensor([[5, 6, 7]])
    built(batch, labels=batch).loss.backward()
    grads = [p.grad.clone() for p in built.parameters()]
    tokenizer = tiny_models.tokenizer()
    assert tokenizer.pad_token is None
    before = copy.deepcopy((built.config.to_dict(), built.generation_config.to_dict()))
    modes = [module.training for module in built.modules()]
    hooks = [len(module._forward_hooks) for module in built.modules()]
    attributes = [sorted(vars(module)) for module in built.modules()]
    race = RaceCallback("words", include_path=task, run=tmp_path / "run", tokenizer=tokenizer)
    assert race.ask(built, 1)["race/score"] >= 0
    assert (built.config.to_dict(), built.generation_config.to_dict()) == before
    assert [module.training for module in built.modules()] == modes
    assert [len(module._forward_hooks) for module in built.modules()] == hooks
    assert [sorted(vars(module)) for module in built.modules()] == attributes
    assert all(map(torch.equal, [p.grad for p in built.parameters()], grads))
    assert all(p.requires_grad for p in built.parameters())
    assert built.lm_head.weight is not built.transformer.wte.weight
    assert tokenizer.pad_token is None
    assert tokenizer.padding_side == tiny_models.tokenizer().padding_side


def test_a_wrapped_model_is_asked_bare(task: Path, tmp_path: Path) -> None:
    """As DDP and ``torch.compile`` wrap it."""
    tokenizer = tiny_models.tokenizer()
    wrapped = model()
    for name in ("_orig_mod", "module"):
        outer = torch.nn.Module()
        outer.add_module(name, wrapped)
        wrapped = outer
    race = RaceCallback("words", include_path=task, run=tmp_path / "run", tokenizer=tokenizer)
    assert race.ask(wrapped, 1)["race/score"] >= 0


def test_all_is_restored_after_an_error() -> None:
    built = model()
    cached = built.config.use_cache
    random.seed(7)
    state = random.getstate()

    def fails() -> None:
        with without_trace(built):
            assert not built.training
            assert not torch.is_grad_enabled()
            random.random()
            torch.manual_seed(0)
            built.config.use_cache = not cached
            raise ZeroDivisionError

    drawn = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        fails()
    assert random.getstate() == state
    assert torch.equal(torch.get_rng_state(), drawn)
    assert built.training
    assert torch.is_grad_enabled()
    assert built.config.use_cache is cached


def test_answers_are_those_of_the_saved_checkpoints(task: Path, tmp_path: Path) -> None:
    """To the last digit in float32: log-probabilities, too."""
    from lmeval_dispersion import race

    given = trainer(tmp_path / "run")
    given.add_callback(RaceCallback("words", questions=20, include_path=task))
    given.train()
    scores = raced(given.state.log_history)
    saved = race(
        [str(tmp_path / "run" / f"checkpoint-{step}") for step in (4, 8, 12)],
        tasks="words",
        all=True,
        include_path=str(task),
        output_path=tmp_path / "again",
        device="cpu",
        quiet=True,
    )
    assert len(saved.checkpoints) == 3
    for step in (4, 8, 12):
        asked = answers(tmp_path / "run" / "race-words" / f"checkpoint-{step}")
        again = answers(tmp_path / "again" / f"checkpoint-{step}")
        shared = asked.keys() & again.keys()
        assert len(asked) == 20
        assert len(shared) >= 10
        assert {i: asked[i] for i in shared} == {i: again[i] for i in shared}
        right = [found["acc"] for found in asked.values()]
        assert scores[step]["race/score"] == np.mean(right)


def test_under_autocast_answers_are_near_those_of_the_saved_checkpoint(
    task: Path, tmp_path: Path
) -> None:
    """The live model answers in bfloat16, the saved one in float32."""
    from lmeval_dispersion import race

    run = tmp_path / "run"
    given = trainer(run, bf16=True)
    given.add_callback(RaceCallback("words", questions=20, include_path=task))
    given.train()
    race(
        [str(run / "checkpoint-12")],
        tasks="words",
        all=True,
        include_path=str(task),
        output_path=tmp_path / "again",
        device="cpu",
        quiet=True,
    )
    asked = answers(run / "race-words" / "checkpoint-12")
    again = answers(tmp_path / "again" / "checkpoint-12")
    differences = []
    for i in asked.keys() & again.keys():
        for (mine, _), (saved, _) in zip(
            logs(asked[i]["resps"]), logs(again[i]["resps"]), strict=True
        ):
            differences.append(abs(mine - saved) / max(1.0, abs(saved)))
    assert len(differences) >= 40
    assert 0 < max(differences) < 0.02


def logs(responses: Any) -> list[Any]:
    """(log-likelihood, is greedy) of each choice."""
    return [(float(answer[0][0]), answer[0][1]) for answer in responses]


def answers(folder: Path) -> dict[int, dict[str, Any]]:
    """What lm-eval logged of each document."""
    (file,) = folder.glob("samples_words_*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {line["doc_id"]: {key: line[key] for key in ("resps", "acc")} for line in lines}
