"""Repositories in the layouts of the real Hub, with a G that is planted in their rows, and published scores.

Layouts: those of benchmarks/validity/hub.yaml. DataDecide's configurations and tensors are hf_olmo's,
Pythia's are gpt_neox's; scores are parquet files with metrics as text, and JSON of lm-eval in a dataset or a
git repository.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from checkpoints import write_checkpoint

from lmeval_dispersion.paths import data_folder

TOKENIZER = data_folder("demo") / "sums-00" / "tokenizer.json"
VOCABULARY: dict[str, int] = json.loads(TOKENIZER.read_text("utf-8"))["model"]["vocab"]
DIGITS = [VOCABULARY[str(digit)] for digit in range(10)]
ROWS, WIDTH = len(VOCABULARY) + 24, 8
OLMO = {"model_type": "hf_olmo", "weight_tying": False, "vocab_size": ROWS - 4, "embedding_size": ROWS}
OLMO_NAMES = ("model.transformer.ff_out.weight", "model.transformer.wte.weight")
NEOX = {"model_type": "gpt_neox", "tie_word_embeddings": False, "vocab_size": ROWS}
NEOX_NAMES = ("embed_out.weight", "gpt_neox.embed_in.weight")


def rows_of(gap: float) -> np.ndarray:
    """Rows whose digits lie in one direction at a ``gap`` of 0, and each in its own at 1."""
    draw = np.random.default_rng(1)
    rows = draw.normal(size=(ROWS, WIDTH))
    rows[DIGITS] = gap * rows[DIGITS] + (1 - gap) * rows.mean(0) / np.linalg.norm(rows.mean(0))
    own = np.random.default_rng(int(gap * 1e6))
    return rows * own.uniform(0.8, 1.2) + 0.02 * own.normal(size=rows.shape)


def serve(hub: Any, folder: Path, name: str, branch: str, gap: float, *, layout: str = "olmo") -> None:
    """A checkpoint on a branch, and on the main one where the repository has none yet."""
    config, (head, embedding) = (OLMO, OLMO_NAMES) if layout == "olmo" else (NEOX, NEOX_NAMES)
    tensors = {head: ("F32", rows_of(gap)), embedding: ("F32", np.zeros((ROWS, WIDTH)))}
    place = folder / name.replace("/", "--") / branch
    write_checkpoint(place, tensors, config=config)
    (place / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    if name not in hub.repositories:
        hub.add(name, place)
    hub.add(name, place, branch=branch)


def datadecide_results(
    folder: Path, scores: Mapping[tuple[str, str, str, int], float], suite: Mapping[str, Any]
) -> Path:
    """DataDecide-eval-results: the macro average with JSON, the tasks with Python dictionaries, as text."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    macro, train = [], []
    for (recipe, size, seed, step), accuracy in scores.items():
        own = {
            "params": size,
            "data": suite["names"]["recipe"][recipe],
            "seed": suite["names"]["seed"][seed],
            "step": float(step),
        }
        own |= {"chinchilla": "5xC", "tokens": 1, "compute": 1.0}
        metrics = {"primary_metric": accuracy, "acc_raw": 0.1, "correct_prob_per_char": accuracy / 2}
        macro.append({**own, "task": "olmes_10_macro_avg", "metrics": json.dumps(metrics)})
        for task in suite["tasks"]:
            train.append({**own, "task": task, "metrics": str(metrics | {"no_answer": None})})
        train.append({**own, "task": "mmlu_virology", "metrics": str({"primary_metric": 0.5})})
    half = len(train) // 2
    for name, lines in (
        ("macro_avg-00000-of-00001", macro), ("train-00000-of-00002", train[:half]),
        ("train-00001-of-00002", train[half:]), ("scaling_law_fit-00000-of-00001", [{"other": 1}]),
    ):  # fmt: skip
        pq.write_table(pa.Table.from_pylist(lines), folder / "data" / f"{name}.parquet")
    return folder


def lm_eval_results(file: Path, accuracies: Mapping[str, float], *, model: str, revision: str) -> None:
    """Results of lm-eval as in 2023: metrics without their filter."""
    results = {
        task: {"acc": value, "acc_stderr": 0.01, "acc_norm": 0.0} for task, value in accuracies.items()
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"results": results, "config": {"model_args": f"pretrained={model},revision={revision}"}}
    file.write_text(json.dumps(content), "utf-8")


def git_repository(folder: Path) -> str:
    """Commit a folder; the address that git clones it from."""
    own = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["config", "uploadpack.allowFilter", "true"], ["add", "-A"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    subprocess.run(["git", *own, "commit", "-qm", "Results"], cwd=folder, check=True)
    return folder.as_uri()
