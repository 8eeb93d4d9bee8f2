"""Trainer and SFTTrainer: the gradient of the mean over micro-batches, separate logs, own evaluation."""

import copy

import pytest
import torch
from tiny_decoders import (
    TRAINERS_WARN,
    tiny_gpt2,
    tiny_llama,
    tokens,
    trainer_arguments,
    word_tokenizer,
)
from transformers import TrainerCallback, TrainingArguments

from lmeval_dispersion.training import losses
from lmeval_dispersion.training.trainer import (
    DispersionConfig,
    DispersionTrainer,
    DispersionTrainerMixin,
)

pytestmark = TRAINERS_WARN
RATE = 0.5


def dataset(n=8, domains=False):
    # The first token has no prediction; unless it is masked, transformers counts it all the same.
    rows = [
        {"input_ids": row, "labels": torch.cat([torch.tensor([-100]), row[1:]])}
        for row in tokens(n, 10)
    ]
    return [row | {"domains": i % 2} for i, row in enumerate(rows)] if domains else rows


def arguments(folder, kind=TrainingArguments, **options):
    steps = {
        "max_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 8,
    }
    descent = {"learning_rate": RATE, "optim": "sgd", "max_grad_norm": 0.0}
    return trainer_arguments(folder, kind, **steps | descent | options)


def trainer_of(folder, config, *, n=8, domains=False, callbacks=None, **options):
    """A trainer of a tiny GPT-2 on ``n`` sequences; with ``model_init``, of what that makes."""
    model = {key: options.pop(key) for key in ("model", "model_init") if key in options}
    return DispersionTrainer(
        **(model or {"model": tiny_gpt2()}),
        args=arguments(folder, **options),
        train_dataset=dataset(domains=domains),
        eval_dataset=dataset(n, domains=domains),
        dispersion=config,
        callbacks=callbacks,
    )


def one_step_by_hand(model, weight, layers):
    model = copy.deepcopy(model)
    batch = torch.stack([row["input_ids"] for row in dataset()])
    out = model(batch, labels=batch, output_hidden_states=True)
    aux = torch.stack([losses.angular_spread(out.hidden_states[k + 1]) for k in layers]).mean()
    (out.loss + weight * aux).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= RATE * parameter.grad
    return model, float(out.loss.detach()), float(aux.detach())


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
@pytest.mark.parametrize("accepts", [True, False])
def test_one_step_does_not_depend_on_accumulation(tmp_path, steps, accepts):
    model = tiny_gpt2()
    wanted, ce, aux = one_step_by_hand(model, 0.5, [0, 1, 2])
    config = DispersionConfig("angular_spread", layers="all", weight=0.5)
    sizes = {"per_device_train_batch_size": 8 // steps, "gradient_accumulation_steps": steps}
    trainer = trainer_of(tmp_path, config, model=model, **sizes)
    # Both branches of the parent: loss summed over the whole batch, or averaged over micro-batches.
    trainer.model_accepts_loss_kwargs = accepts
    trainer.train()
    for (name, parameter), value in zip(model.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(
            parameter, value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    logs = trainer.state.log_history[0]
    assert logs["ce_loss"] == pytest.approx(ce, abs=1e-5)
    assert logs["dispersion_loss"] == pytest.approx(aux, abs=1e-5)
    assert logs["loss"] == pytest.approx(ce + 0.5 * aux, abs=1e-4)
    assert 0 < logs["dispersion"] < 1.5


@pytest.mark.parametrize("batch", [3, 8])
def test_evaluation_logs_the_dispersion_of_every_chosen_layer(tmp_path, batch):
    config = DispersionConfig("angular_spread", layers="all", weight=0.5)
    steps = {
        "max_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": batch,
    }
    trainer = trainer_of(tmp_path, config, n=7, **steps)
    trainer.train()
    metrics = [entry for entry in trainer.state.log_history if "eval_loss" in entry][-1]
    with torch.no_grad():
        states = trainer.model(tokens(7, 10), output_hidden_states=True).hidden_states
    for layer, k in (("layer.0", 1), ("layer.1", 2), ("last", 3)):
        wanted = -float(losses.push_away(states[k]))
        assert metrics[f"eval_dispersion/{layer}"] == pytest.approx(wanted, abs=1e-6)
    assert metrics["eval_dispersion"] == metrics["eval_dispersion/last"]
    predicted = trainer.predict(dataset(7), metric_key_prefix="test").metrics
    assert predicted["test_dispersion"] == pytest.approx(metrics["eval_dispersion"], abs=1e-6)


@pytest.mark.parametrize("by_init", [False, True])
def test_no_hook_stays_after_training_and_evaluation_measures_all_the_same(tmp_path, by_init):
    made = {"model_init": lambda: tiny_gpt2()} if by_init else {}
    trainer = trainer_of(tmp_path, DispersionConfig("angular_spread", layers="all"), **made)
    for _ in range(2):
        trainer.train()
        assert trainer.state.log_history[0]["dispersion_loss"] < 0
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())
        assert 0 < trainer.evaluate(dataset())["eval_dispersion"] < 1.5
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())
    trainer.train_dataset = None
    with pytest.raises(ValueError, match="train_dataset"):
        trainer.train()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())


def test_a_weight_of_0_only_measures(tmp_path):
    weights = []
    for config in (None, DispersionConfig(weight=0.0)):
        trainer = trainer_of(tmp_path, config, max_steps=2)
        trainer.train()
        assert ("eval_dispersion/last" in trainer.evaluate()) == (config is not None)
        weights.append(torch.cat([p.flatten() for p in trainer.model.parameters()]).detach())
    assert torch.equal(*weights)


def test_means_over_logged_steps_and_a_weight_that_changes(tmp_path):
    class Rising(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            trainer.regularizer.weight = 0.5 * (state.global_step + 1) / 4

    steps = {"max_steps": 4, "logging_steps": 2, "learning_rate": 0.0}
    trainer = trainer_of(tmp_path, DispersionConfig(weight=0.5), callbacks=[Rising()], **steps)
    trainer.train()
    first, second = trainer.state.log_history[:2]
    # With a learning rate of 0 and the whole data set in each batch only the weight moves.
    assert first["ce_loss"] == pytest.approx(second["ce_loss"], abs=1e-6)
    assert first["dispersion_loss"] == pytest.approx(second["dispersion_loss"], abs=1e-6)
    for logs, weight in ((first, 0.5 * (0.25 + 0.5) / 2), (second, 0.5 * (0.75 + 1.0) / 2)):
        assert logs["loss"] == pytest.approx(
            logs["ce_loss"] + weight * logs["dispersion_loss"], abs=2e-4
        )


def test_domains_come_from_a_column(tmp_path):
    trainer = trainer_of(
        tmp_path, DispersionConfig("cross_domain_push_away", weight=0.5), domains=True
    )
    trainer.train()
    assert -2 <= trainer.state.log_history[0]["dispersion_loss"] < 0
    trainer.evaluate()


@pytest.mark.slow
def test_sft_trainer_with_lora_and_packing(tmp_path):
    pytest.importorskip("peft")
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from peft import LoraConfig

    class SpreadSFT(DispersionTrainerMixin, trl.SFTTrainer):
        pass

    data = Dataset.from_list(
        [{"input_ids": row.tolist()[: 4 + i]} for i, row in enumerate(tokens(6, 10))]
    )
    common = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "bf16": False,
        "max_length": 16,
        "dataloader_pin_memory": False,
    }
    for options in ({}, {"packing": True, "padding_free": False, "packing_strategy": "wrapped"}):
        trainer = SpreadSFT(
            model=tiny_llama(),
            args=arguments(tmp_path, trl.SFTConfig, **common, **options),
            train_dataset=data,
            processing_class=word_tokenizer(),
            peft_config=LoraConfig(target_modules=["q_proj"], r=2),
            dispersion=DispersionConfig("angular_spread", layers="all", weight=0.5),
        )
        trainer.train()
        logs = trainer.state.log_history[0]
        assert logs["loss"] == pytest.approx(
            logs["ce_loss"] + 0.5 * logs["dispersion_loss"], abs=1e-3
        )
        assert "mean_token_accuracy" in logs  # the parent's own metrics are still there
