"""One of two gloo ranks of a watched run whose model is sharded by FSDP2.

Run as ``torchrun --nproc-per-node 2 sharded_worker.py FOLDER``. With one process it is the run to compare.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from lmeval_dispersion import DispersionCallback
from lmeval_dispersion.paths import data_folder

DEMO = data_folder("demo") / "sums-45"
ROWS = 4


def batch(tokenizer):
    ids = tokenizer("12 + 30 = 42. 7 + 8 = 15. It was late, and they went home.").input_ids[:16]
    return [{"input_ids": list(ids), "labels": list(ids)} for _ in range(ROWS)]


def loaded(**options):
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, **options)


def trained(folder, tokenizer, world):
    """transformers' Trainer, on a model that transformers shards where there are two processes."""
    model = loaded(**({"distributed_config": DistributedConfig(fsdp_size=world)} if world > 1 else {}))
    assert isinstance(model.lm_head.weight, DTensor) == (world > 1)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=2,
            per_device_train_batch_size=ROWS // world,
            optim="sgd",
            learning_rate=0.05,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_steps=2,
            save_only_model=True,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=batch(tokenizer),
        processing_class=tokenizer,
    )
    trainer.add_callback(DispersionCallback(trainer, domains=["math"]))
    trainer.train()
    return [entry for entry in trainer.state.log_history if "watch/gap_math" in entry]


def main(folder):
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    logs = trained(folder / "run", tokenizer, world)
    if rank == 0:
        (folder / "logs.json").write_text(json.dumps(logs))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
