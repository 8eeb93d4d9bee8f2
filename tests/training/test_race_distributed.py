"""Two gloo ranks ask what one process asks: DDP, and FSDP2, whose model no rank holds whole.

As KIND, ``memory`` is FSDP2 whose ranks run out of memory with a batch of eight.

Under torchrun this file is one rank: torchrun … test_race_distributed.py KIND FOLDER TASKS.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_training import arguments, losses, model, raced, rows
from processes import torchrun
from tiny_decoders import TRAINERS_WARN
from transformers import Trainer

pytestmark = [TRAINERS_WARN, pytest.mark.slow]


def trained(kind: str, folder: Path, tasks: Path, *, with_race: bool = True) -> dict[str, Any]:
    """The losses and the race of a run, in this process or in all ranks of it."""
    import tiny_models

    from lmeval_dispersion import RaceCallback

    world = int(os.environ.get("WORLD_SIZE", "1"))
    built = model(dropout=0.0)
    if kind != "ddp" and world > 1:
        from transformers.distributed import DistributedConfig

        start = folder.parent / "start"
        built.save_pretrained(start)  # of the ranks the first one writes
        dist.barrier()
        config = DistributedConfig(fsdp_size=world)
        built = type(built).from_pretrained(start, distributed_config=config).train()
    trainer = Trainer(
        model=built,
        args=arguments(
            folder,
            per_device_train_batch_size=8 // world,
            optim="sgd",
            max_steps=8,
            save_only_model=True,
            learning_rate=0.1,
        ),
        train_dataset=rows(),
        processing_class=tiny_models.tokenizer(pad=True),
    )
    if with_race:
        options = {"batch_size": 8} if kind == "memory" else {}
        RaceCallback("words", questions=20, include_path=tasks, every=3, **options).attach(trainer)
    trainer.train()
    log = trainer.state.log_history
    kept = trainer.state.best_model_checkpoint
    return {"losses": losses(log), "raced": raced(log), "best": kept and Path(kept).name}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_ask_what_one_process_asks(kind: str, task: Path, tmp_path: Path) -> None:
    whole = trained(kind, tmp_path / "one" / "run", task)
    done = torchrun(2, __file__, kind, tmp_path / "two", task)
    assert done.returncode == 0, done.stderr[-3000:]
    plain, shared = (
        json.loads((tmp_path / "two" / f"{name}.json").read_text()) for name in ("plain", "raced")
    )
    assert shared["losses"] == plain["losses"]  # to the last bit
    assert shared["best"] in ("checkpoint-4", "checkpoint-8")
    assert [int(step) for step in shared["raced"]] == list(whole["raced"]) == [3, 4, 6, 8]
    # Sums over two ranks round in another way, which a training with few questions amplifies.
    for step, entry in whole["raced"].items():
        other = shared["raced"][str(step)]
        assert other.keys() == entry.keys()
        assert other["race/score"] == pytest.approx(entry["race/score"], abs=0.11)
        name = "geometry/dispersion"
        assert other[name] == pytest.approx(entry[name], abs=0.05)
    folders = {folder.name for folder in (tmp_path / "two" / "run" / "race-words").iterdir()}
    assert {f"checkpoint-{step}" for step in (3, 4, 6, 8)} <= folders


def test_ranks_that_run_out_of_memory_ask_again_together(task: Path, tmp_path: Path) -> None:
    """The ranks gather each layer's weights together: one that asks alone waits for the others."""
    done = torchrun(2, __file__, "memory", tmp_path, task)
    assert done.returncode == 0, done.stderr[-3000:]
    raced = json.loads((tmp_path / "raced.json").read_text())["raced"]
    assert [int(step) for step in raced] == [3, 4, 6, 8]


def run_out_of_memory() -> None:
    """Let every process run out of memory with a batch above four."""
    from lmeval_dispersion.racing.evaluation import Evaluation

    ask = Evaluation.ask

    def limited(self: Evaluation, lm: Any, places: list[int]) -> dict[str, Any]:
        if lm.batch_size > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ask(self, lm, places)

    Evaluation.ask = limited  # type: ignore[method-assign]


if __name__ == "__main__":
    from lmeval_dispersion.harness import install

    torch.set_num_threads(1)
    install.status = lambda: install.Status("enabled", Path("/none"), 0)
    import lm_eval.tasks.manager

    lm_eval.tasks.manager.__file__ = "/none/manager.py"
    kind, folder, tasks = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo")
    if kind == "memory":
        run_out_of_memory()
    for name, with_race in (("plain", False), ("raced", True)):
        run = folder / ("run" if with_race else "plain")
        run.mkdir(parents=True, exist_ok=True)
        result = trained(kind, run, tasks, with_race=with_race)
        if dist.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(result))
        dist.barrier()
    dist.destroy_process_group()
