"""Fine-tunes a LoRA by TRL's SFT, and races its saves while it trains.

python race_sft.py MODEL RUN
"""

import argparse
import random

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from lmeval_dispersion import RaceCallback


def texts(count: int) -> Dataset:
    """Texts of right sums."""
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        pairs = [(draw.randrange(50), draw.randrange(50)) for _ in range(9)]
        rows.append({"text": " ".join(f"{a}+{b}={a + b}." for a, b in pairs)})
    return Dataset.from_list(rows)


def main() -> None:
    """Train 30 steps with a save at every tenth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("run")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or tokenizer.unk_token
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model),
        args=SFTConfig(
            args.run,
            max_steps=30,
            save_steps=10,
            logging_steps=10,
            learning_rate=3e-3,
            per_device_train_batch_size=4,
            max_length=64,
            report_to="none",
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=texts(120),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    callback = RaceCallback("sums", questions=100, include_path="tasks", batch_size=16)
    callback.attach(trainer)
    trainer.train()
    for entry in trainer.state.log_history:
        if "race/score" in entry:
            print(
                f"step {entry['step']}: {entry['race/score']:.2f}, best so far step "
                f"{entry['race/best_step']}, margin {entry['race/margin']:.2f}"
            )
    print(f"best: {trainer.state.best_model_checkpoint}")


if __name__ == "__main__":
    main()
