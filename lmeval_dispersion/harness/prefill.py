"""Running logged prompts for their states on transformers, in parts that outlive a killed process."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from numpy.typing import NDArray

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.harness import requests
from lmeval_dispersion.harness.records import DocState
from lmeval_dispersion.harness.seams import plain, state_of

FOLDER = ".parts"

_PART = 1024  # prompts whose states are written together: what a killed run loses at most


@dataclass(frozen=True)
class Seen:
    """State and answer of one prompt."""

    state: DocState
    answer: float | str


Prefill = Callable[[Sequence[Instance]], list[Seen]]


def on_transformers(lm: Any) -> Prefill:
    """Runs requests on lm-eval's model: its tokens, cuts and batches."""

    def prefill(instances: Sequence[Instance]) -> list[Seen]:
        seen = []
        for answer in requests.prefilled(lm, instances):
            state = state_of(answer)
            if state is None:
                raise HarnessError("a prompt came back without its state; report this with your versions")
            value = plain(answer)
            seen.append(Seen(state, value[0] if isinstance(value, tuple) else value))
        return seen

    return prefill


def run_parts(
    instances: Sequence[Instance], folder: Path, key: str, prefill: Prefill, *, writes: bool = True
) -> list[Seen]:
    """Run the prompts that have not been run yet."""
    parts = folder / FOLDER
    parts.mkdir(parents=True, exist_ok=True)
    chunks = [instances[start : start + _PART] for start in range(0, len(instances), _PART)]
    files = [parts / _name(i, chunk, key) for i, chunk in enumerate(chunks)]
    # Decided before anything runs: processes that hold one model between them must run the same.
    held = [file.exists() for file in files]
    seen: list[Seen] = []
    for file, chunk, there in zip(files, chunks, held, strict=True):
        seen_now = list(_load(file, chunk)) if there else prefill(chunk)
        if writes and not there:
            _save(file, seen_now)
        seen += seen_now
    return seen


def prompt_key(instance: Instance) -> str:
    """Equal for prompts that need one pass only."""
    return json.dumps([instance.args, instance.query], sort_keys=True, default=str)


def _name(number: int, chunk: Sequence[Instance], key: str) -> str:
    digest = hashlib.sha256(f"{key}{[prompt_key(instance) for instance in chunk]}".encode()).hexdigest()
    return f"{number:06d}-{digest[:16]}.npz"


def _save(file: Path, seen: Sequence[Seen]) -> None:
    states = [prompt.state for prompt in seen]
    layers = next((list(state.vectors) for state in states if state.vectors), [])
    answers = [prompt.answer for prompt in seen]
    arrays: dict[str, Any] = {
        "count": np.array([len(state.prompt_tokens) for state in states]),
        "prompt_tokens": np.array([n for state in states for n in state.prompt_tokens], dtype=np.int64),
        "truncated": np.array([cut for state in states for cut in state.truncated], dtype=bool),
        "perplexity": np.array([p for state in states for p in state.perplexity], dtype=np.float64),
        "prompt_hash": np.array([state.prompt_hash for state in states]),
        "answer": np.array(answers, dtype=None if isinstance(answers[0], str) else np.float64),
    }
    for layer in layers:
        arrays[f"vectors:{layer}"] = np.concatenate([s.vectors[layer] for s in states if s.vectors])
    temporary = file.with_suffix(f".{os.getpid()}.tmp.npz")
    np.savez(temporary, **arrays)
    temporary.replace(file)


def _load(file: Path, chunk: Sequence[Instance]) -> Iterator[Seen]:
    with np.load(file) as arrays:
        held: dict[str, NDArray[Any]] = {name: arrays[name] for name in arrays.files}
    start = 0
    for i, instance in enumerate(chunk):
        stop = start + int(held["count"][i])
        rows = slice(start, stop)
        state = DocState(
            doc_id=instance.doc_id,
            vectors={
                name.removeprefix("vectors:"): values[rows]
                for name, values in held.items()
                if name.startswith("vectors:") and stop > start
            },
            prompt_tokens=held["prompt_tokens"][rows].tolist(),
            truncated=held["truncated"][rows].tolist(),
            perplexity=held["perplexity"][rows].tolist(),
            prompt_hash=str(held["prompt_hash"][i]),
            query=instance.query,
        )
        yield Seen(state, held["answer"][i].item())
        start = stop
