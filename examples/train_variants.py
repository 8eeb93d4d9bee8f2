"""Three other ways to train, to hold beside a dispersion loss: LoRA, noisy embeddings, active forgetting.

    python train_variants.py VARIANT MODEL TEXTS FOLDER

trains MODEL (Hub id or folder) on TEXTS (a text a line) for 100 steps with `angular_spread` and, by VARIANT,
`lora` adapters alone, `noise` on the input embeddings (NEFTune), or input embeddings that are drawn anew
every 25 steps (`forgetting`). It prints the log's entry and saves the model.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments

from lmeval_dispersion import DispersionConfig, DispersionTrainer


class ActiveForgetting(TrainerCallback):
    """Resets the input embeddings and their optimizer state every ``every`` steps, but not after the last.

    Where the output projection is tied to them it is reset too. New rows are normal with the model's
    ``initializer_range``, drawn from the seed and the step alone. Source: Chen et al. (2023), "Improving
    language plasticity via pretraining with active forgetting", a baseline of the dispersion-loss paper.
    """

    def __init__(self, every, seed=0):
        self.every, self.seed = every, seed

    def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
        """Reset, if it is time."""
        if state.global_step % self.every or state.global_step >= state.max_steps:
            return
        weight = model.get_input_embeddings().weight
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + state.global_step)
        with torch.no_grad():
            scale = getattr(model.config, "initializer_range", 0.02)
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
        inner = getattr(optimizer, "optimizer", optimizer)
        for value in inner.state.get(weight, {}).values():
            if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                value.zero_()


def main(variant, name, texts, folder, steps=100):
    """Train one variant."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    if variant == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    rows = [tokenizer(line).input_ids[:128] for line in Path(texts).read_text().splitlines() if line.strip()]
    trainer = DispersionTrainer(
        model=model,
        args=TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=8,
            neftune_noise_alpha=5 if variant == "noise" else None,
            save_strategy="no",
            report_to="none",
            logging_steps=steps,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows if len(row) > 1],
        callbacks=[ActiveForgetting(every=25)] if variant == "forgetting" else None,
        dispersion=DispersionConfig("angular_spread", weight=0.1, options={"max_tokens": 256}),
    )
    trainer.train()
    trainer.save_model()
    print({name: round(value, 4) for name, value in trainer.state.log_history[0].items()})


if __name__ == "__main__":
    main(*sys.argv[1:5])
