"""The documents that several runs share, matched by content, with comparable prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import MixedStoresError, UsageError
from lmeval_dispersion.store.identity import (
    SUFFIX,
    StorePart,
    model_notes,
    prompt_differences,
    shown_differences,
)

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = ["task", "doc_id", "doc_hash", "target", "prompt_hash"]


@dataclass(frozen=True)
class JoinedRun:
    """A run whose documents are to be joined with those of other runs.

    Attributes:
        model: Name of the model; messages refer to the run by this name.
        place: Folder or file of the run, for messages.
        documents: One row per document, with the columns of a store.
        parts: The folder and the manifest of each store of the run.
    """

    model: str
    place: Path
    documents: pd.DataFrame
    parts: Sequence[StorePart]

    @property
    def versions(self) -> dict[str, str]:
        """The versions of lm-eval's tasks, by name; a task of unknown version is left out."""
        versions = {}
        for _, manifest in self.parts:
            for task, version in (manifest.get("tasks") or {}).items():
                if version is not None:
                    versions[task.removesuffix(SUFFIX)] = str(version)
        return versions


class Joined(NamedTuple):
    """The documents that several runs share.

    Attributes:
        rows: For each run, the row numbers of the shared documents, which are in the same order for
            all runs. Shape (n,), int64.
        notes: Sentences on documents that were left out, and on versions and models that differ.
    """

    rows: list[NDArray[np.int64]]
    notes: list[str]


def join(runs: Sequence[JoinedRun]) -> Joined:
    """Return the documents that all runs answered with prompts comparable to the first run's.

    Documents are matched by their hash, or by their number if the hash repeats or is missing.
    Prompts are the same if their hashes are equal or, without hashes, if the runs have the same
    prompt settings. Documents stay, with a note, if prompts differ only because each model has its
    own chat template.

    Raises:
        MixedStoresError: No document has the same content and target, and comparable prompts, in
            all runs.
    """
    frames = _keyed(runs)
    shared = frames[0]
    notes = list(_version_notes(runs))
    for run, frame in zip(runs[1:], frames[1:], strict=True):
        before = shared
        shared = shared.merge(frame, on=["task", "key"], suffixes=("", "_other"))
        other = _other_documents(before, frame)
        if shared.empty and len(other):
            number = "1 such document" if len(other) == 1 else f"{len(other)} such documents"
            raise MixedStoresError(
                f"document {other[0][1]} of task {other[0][0]} differs between {run.place} and "
                f"{runs[0].place} ({number}); compare runs on one version of the data"
            )
        if len(other):
            number = "1 document is" if len(other) == 1 else f"{len(other)} documents are"
            notes.append(
                f"{number} left out: under the same number, {runs[0].model} and {run.model} have "
                "different content."
            )
        unlike = _unlike(shared, "target")
        if unlike.sum() == 1:
            notes.append(f"1 document is left out, as it has another target in {run.model}.")
        elif unlike.any():
            notes.append(
                f"{unlike.sum()} documents are left out, as they have another target in {run.model}."
            )
        shared = shared[~unlike]
        kept, more = _comparable(shared, runs[0], run)
        notes += more
        shared = shared[kept].drop(columns=list(shared.filter(like="_other").columns))
    if shared.empty:
        tasks = sorted(set().union(*(frame["task"] for frame in frames)))
        raise MixedStoresError(
            f"expected runs that share documents, but the runs of {', '.join(tasks)} share no "
            "document with the same target; compare runs of the same tasks and questions"
        )
    rows = [shared[f"row_{k}"].to_numpy(dtype=np.int64) for k in range(len(runs))]
    return Joined(rows, notes)


def check_judges(runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that all runs judge the answers to a task by the same metric.

    Args:
        runs: Name of a run -> its manifest. The manifest of a store with hidden states names no
            metric, and is not compared.

    Raises:
        UsageError: Two runs judge a task by different metrics.
    """
    first: dict[str, tuple[str, str]] = {}
    for name, manifest in runs.items():
        for task, judge in (manifest.get("judges") or {}).items():
            if judge is None:
                continue
            other, metric = first.setdefault(task, (name, judge))
            if metric.rpartition("/")[2] != judge.rpartition("/")[2]:
                raise UsageError(
                    f"expected one metric for {task}, got {metric} in {other} and {judge} in "
                    f"{name}; name a metric that both runs have",
                    argument="metric",
                )


def _keyed(runs: Sequence[JoinedRun]) -> list[pd.DataFrame]:
    """Each run's documents with the ``key`` that means the same document in all runs."""
    frames = []
    for k, run in enumerate(runs):
        rows = np.arange(len(run.documents))
        frame = run.documents[_COLUMNS].assign(**{f"row_{k}": rows})
        stock_tasks = frame["task"].str.removesuffix(SUFFIX)
        frames.append(frame.assign(task=stock_tasks))
    if _is_one_task(runs, frames):
        task = frames[0]["task"].iloc[0]
        frames = [frame.assign(task=task) for frame in frames]
    nameless = set()
    repeated = set()
    for frame in frames:
        nameless |= set(frame.loc[frame["doc_hash"].isna(), "task"])
        twice = frame[frame.duplicated(["task", "doc_hash"])]
        repeated |= set(zip(twice["task"], twice["doc_hash"], strict=True))
    keyed = []
    for frame in frames:
        keys = list(_keys(frame, nameless, repeated))
        keyed.append(frame.assign(key=keys))
    return keyed


def _keys(frame: pd.DataFrame, nameless: set[str], repeated: set[tuple[str, str]]) -> Iterator[str]:
    columns = zip(frame["task"], frame["doc_id"], frame["doc_hash"], strict=True)
    for task, doc_id, doc_hash in columns:
        if task in nameless:
            yield f"#{doc_id}"
        elif (task, doc_hash) in repeated:
            yield f"{doc_hash}#{doc_id}"
        else:
            yield doc_hash


def _is_one_task(runs: Sequence[JoinedRun], frames: Sequence[pd.DataFrame]) -> bool:
    """Whether the runs have one task each, whose name a file without results does not say for sure."""
    names = [set(frame["task"]) for frame in frames]
    if any(len(tasks) != 1 for tasks in names) or len(set.union(*names)) == 1:
        return False
    return any(not run.versions for run in runs)


def _other_documents(first: pd.DataFrame, other: pd.DataFrame) -> list[tuple[str, int]]:
    """Task and number of documents under whose number the first run has another document."""
    both = other.merge(first, on=["task", "doc_id"], suffixes=("", "_first"))
    known = set(zip(first["task"], first["key"], strict=True))
    hashed = both["doc_hash"].notna() & both["doc_hash_first"].notna()
    unlike = both["doc_hash"] != both["doc_hash_first"]
    different = both[hashed & unlike]
    others = []
    columns = zip(different["task"], different["doc_id"], different["key"], strict=True)
    for task, doc_id, key in columns:
        if (task, key) not in known or key.startswith("#"):
            others.append((task, int(doc_id)))
    return others


def _unlike(shared: pd.DataFrame, name: str) -> pd.Series[bool]:
    """Rows whose two values are known and differ."""
    first = shared[name]
    other = shared[f"{name}_other"]
    return first.notna() & other.notna() & (first != other)


def _comparable(
    shared: pd.DataFrame, first: JoinedRun, run: JoinedRun
) -> tuple[NDArray[np.bool_], list[str]]:
    """Which shared documents had comparable prompts, and sentences on the others."""
    has_first = shared["prompt_hash"].notna()
    has_other = shared["prompt_hash_other"].notna()
    known = (has_first & has_other).to_numpy()
    unlike = _unlike(shared, "prompt_hash").to_numpy()
    differences, template = prompt_differences(first.parts, run.parts)
    if differences:
        unlike = unlike | ~known
    notes = [f"{note}." for note in model_notes(first.parts, run.parts)]
    count = int(unlike.sum())
    everything = np.ones(len(shared), dtype=bool)
    if template and not differences and (count or not known.all()):
        notes.append(
            f"The runs differ in {shown_differences(template)}, which may explain part of the "
            "difference between their results."
        )
        return everything, notes
    if not count:
        return everything, notes
    why = ""
    if differences:
        why = f" (the runs differ in {shown_differences({**differences, **template})})"
    if count == len(shared):
        documents = "the only shared document" if count == 1 else f"all {count} shared documents"
        raise MixedStoresError(
            f"the runs used different prompts for {documents}{why}; compare runs with the same "
            "prompts"
        )
    left_out = "documents are left out, as they had"
    if count == 1:
        left_out = "documents is left out, as it had"
    notes.append(f"{count} of {len(shared)} {left_out} another prompt in {run.model}{why}.")
    return ~unlike, notes


def _version_notes(runs: Sequence[JoinedRun]) -> Iterator[str]:
    """Sentences on tasks whose versions differ."""
    first = runs[0].versions
    for run in runs[1:]:
        versions = run.versions
        for task in sorted(first.keys() & versions.keys()):
            if first[task] != versions[task]:
                names = f"{first[task]} in {runs[0].model}, {versions[task]} in {run.model}"
                yield f"The versions of {task} differ: {names}."
