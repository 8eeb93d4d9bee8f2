"""What prompts brought back, in parts that outlive a killed process and that processes can share."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.harness.records import DocState

FOLDER = ".parts"

_PART = 1024  # prompts whose states are written together: what a killed run loses at most


@dataclass(frozen=True)
class Seen:
    """What one prompt brought back.

    Attributes:
        state: Its state.
        answer: The model's own answer, to check the logged one by; NaN where an engine gives none.
    """

    state: DocState
    answer: float | str


Prefill = Callable[[Sequence[Instance]], list[Seen]]


@dataclass(frozen=True)
class Share:
    """Which prompts this process runs, and whether it writes.

    Attributes:
        index: Number of this process, from 0.
        count: How many processes share the prompts.
        writes: Whether it writes what it has run; processes that hold one model between them run the same.
    """

    index: int = 0
    count: int = 1
    writes: bool = True


def share_of(shard: str | None, one_model: bool) -> Share:
    """The share that ``--shard I/N`` names, or else the launcher (``accelerate launch``, ``torchrun``).

    Args:
        shard: ``I/N`` with I from 1 to N; None: as the launcher's variables RANK and WORLD_SIZE say.
        one_model: Whether the launcher's processes hold one model between them (tensor parallel).

    Raises:
        UsageError: No such shard, or a shard of a model that processes share.

    >>> share_of("2/3", one_model=False)
    Share(index=1, count=3, writes=True)
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if shard is None:
        return Share(0, 1, rank == 0) if one_model else Share(rank, world)
    first, slash, last = shard.partition("/")
    if not (slash and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise UsageError(f"expected --shard I/N with I from 1 to N, such as 1/4, got {shard!r}")
    if world > 1:
        raise UsageError(f"{world} processes were launched, which share the prompts; leave --shard out")
    return Share(int(first) - 1, int(last))


def run_parts(
    instances: Sequence[Instance], folder: Path, key: str, prefill: Prefill, share: Share
) -> list[Seen] | None:
    """Run this process's share of the prompts that have not been run yet.

    Args:
        instances: Requests of one type, the same in every process.
        folder: Of the store.
        key: Changes with all that decides what comes back.
        prefill: Runs some requests.
        share: This process's.

    Returns:
        What all instances brought back, in their order; None where other processes still run some of them.
    """
    parts = folder / FOLDER
    parts.mkdir(exist_ok=True)
    size = max(1, min(_PART, math.ceil(len(instances) / share.count)))
    chunks = [instances[start : start + size] for start in range(0, len(instances), size)]
    files = [parts / _name(i, chunk, key) for i, chunk in enumerate(chunks)]
    # Decided before anything runs: processes that hold one model between them must run the same.
    missing = [i for i, file in enumerate(files) if i % share.count == share.index and not file.exists()]
    for i in missing:
        seen = prefill(chunks[i])
        if share.writes:
            _save(files[i], seen)
    if not share.writes or not all(file.exists() for file in files):
        return None
    return [seen for file, chunk in zip(files, chunks, strict=True) for seen in _load(file, chunk)]


def prompt_key(instance: Instance) -> str:
    """Equal for prompts that need one pass only."""
    return json.dumps([instance.args, instance.query], sort_keys=True, default=str)


def _name(number: int, chunk: Sequence[Instance], key: str) -> str:
    digest = hashlib.sha256(f"{key}{[prompt_key(instance) for instance in chunk]}".encode()).hexdigest()
    return f"{number:06d}-{digest[:16]}.npz"


def _save(file: Path, seen: Sequence[Seen]) -> None:
    temporary = file.with_suffix(f".{os.getpid()}.tmp.npz")
    arrays: dict[str, Any] = _arrays(seen)
    np.savez(temporary, **arrays)
    temporary.replace(file)


def _arrays(seen: Sequence[Seen]) -> dict[str, NDArray[Any]]:
    states = [one.state for one in seen]
    layers = next((list(state.vectors) for state in states if state.vectors), [])
    plainly = [one.answer for one in seen]
    return {
        "count": np.array([len(state.prompt_tokens) for state in states]),
        "prompt_tokens": np.array([n for state in states for n in state.prompt_tokens], dtype=np.int64),
        "truncated": np.array([cut for state in states for cut in state.truncated], dtype=bool),
        "perplexity": np.array([p for state in states for p in state.perplexity], dtype=np.float64),
        "prompt_hash": np.array([state.prompt_hash for state in states]),
        "answer": np.array(plainly, dtype=None if isinstance(plainly[0], str) else np.float64),
        **{
            f"vectors:{layer}": np.concatenate([s.vectors[layer] for s in states if s.vectors])
            for layer in layers
        },
    }


def _load(file: Path, chunk: Sequence[Instance]) -> Iterator[Seen]:
    with np.load(file) as arrays:
        held = {name: arrays[name] for name in arrays.files}
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
