"""Saving the run of one task: where its store goes, what is in it, and when it is written."""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.harness.manifest import run_manifest
from lmeval_dispersion.harness.records import DocRecord, TaskMetrics
from lmeval_dispersion.harness.seams import Surroundings
from lmeval_dispersion.store import begin_store, write_store

if TYPE_CHECKING:
    import pandas as pd

VARIABLE = "LMEVAL_DISPERSION_STORE"

failures: list[Path] = []  # stores of this process that could not be written
written: list[Path] = []  # stores of this process, told at its end
remarks: dict[str, dict[str, str]] = {}  # shared words -> task -> its own, likewise

log = logging.getLogger(__name__)
_stamps: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Run:
    """One task's run, from its start to its store."""

    around: Surroundings
    options: Mapping[str, Any]
    folder: Path | None  # None: this process writes no store


def begin(task: str, metadata: Mapping[str, Any], around: Surroundings, options: Mapping[str, Any]) -> Run:
    """Start a run: its store's folder is marked as one whose run has not finished."""
    # torchrun on CPUs runs all processes as rank 0: the first of its machine writes.
    writes = os.environ.get("LOCAL_RANK", "0") == "0" and getattr(around.lm, "rank", 0) == 0
    folder = _store_folder(task, metadata, around) if writes else None
    if folder is not None:
        begin_store(folder)
    return Run(around, options, folder)


def finish(run: Run, task: Any, metrics: TaskMetrics, correct_by: str | None) -> dict[str, Any]:
    """Pass the task's warnings on and write its store; returns the summary for lm-eval's results.

    Under lm-eval's command both are told at its end, for all tasks together. A store that cannot be written
    is logged and costs the run nothing else.
    """
    name, at_the_end = task.task_name, run.around.command_line
    for shared, sentence in metrics.remarks():
        if at_the_end:
            remarks.setdefault(shared, {})[name] = sentence
        else:
            log.warning("%s: %s", name, sentence)
    summary: dict[str, Any] = {**metrics.summary(), "correct_by": correct_by, "store": None}
    if run.folder is None:
        return summary
    try:
        figures = {key: value for key, value in summary.items() if key != "store"}
        manifest = {**run_manifest(task, run.around, run.options), "figures": figures}
        write(run.folder, metrics, run.around.category(name), manifest)
    except Exception as error:  # whatever it is: hours of evaluation must not end for want of a store
        failures.append(run.folder)
        log.error("%s: the store %s could not be written: %s; the metrics stand", name, run.folder, error)
        return summary
    if at_the_end:
        written.append(run.folder)
    else:
        log.info("%s: the vectors are in %s", name, run.folder)
    return {**summary, "store": str(run.folder)}


def write(folder: Path, metrics: TaskMetrics, category: str | None, manifest: Mapping[str, Any]) -> None:
    """Write the store of one task, whatever ran it."""
    write_store(
        folder,
        documents=_document_table(metrics.task, metrics.records, category),
        vectors=metrics.vectors,
        manifest={**manifest, "default_layer": metrics.layers[0]},
    )


@atexit.register
def tell() -> None:
    """Say on stderr what lm-eval's command left to warn of, where the vectors are, and what is next."""
    for shared, of_task in remarks.items():
        tasks = list(of_task)
        if len(tasks) == 1:
            print(f"warning: {tasks[0]}: {of_task[tasks[0]]}", file=sys.stderr)
        else:
            named = ", ".join(tasks[:3]) + (", …" if len(tasks) > 3 else "")
            print(f"warning: {len(tasks)} tasks ({named}): {shared}", file=sys.stderr)
    if written:
        folder = Path(os.path.commonpath(written))
        kept = f"vectors of {len(written)} tasks" if len(written) > 1 else "vectors"
        print(f"{kept}: {folder}\nnext: dispersion audit {shlex.quote(str(folder))}", file=sys.stderr)


def _store_folder(task: str, metadata: Mapping[str, Any], around: Surroundings) -> Path | None:
    """The folder for the store of ``task``, or None with a warning where nothing says where.

    ``--metadata dispersion_store=DIR``, else the environment's ``LMEVAL_DISPERSION_STORE``, else a folder of
    this run beside lm-eval's results under ``--output_path``.
    """
    given = metadata.get("dispersion_store") or os.environ.get(VARIABLE)
    if given:
        return Path(str(given)).expanduser() / task
    output = around.output_folder()
    if output is not None:
        stamp = _stamps.setdefault(around.tracker, datetime.now().strftime("%Y-%m-%dT%H-%M-%S"))
        return output / f"dispersion_{stamp}" / task
    log.warning(
        "%s: the vectors of this run are not kept; give --output_path, --metadata dispersion_store=DIR or %s",
        task,
        VARIABLE,
    )
    return None


def _document_table(task: str, records: Sequence[DocRecord], category: str | None) -> pd.DataFrame:
    import pandas as pd

    rows = [
        {
            "doc_id": record.doc_id,
            "task": task,
            "subject": record.subject or task,
            "category": category,
            "doc_hash": record.doc_hash,
            "prompt_hash": record.prompt_hash,
            "correct": record.correct,
            "prediction": record.prediction,
            "target": record.target,
            "logprobs": record.logprobs,
            "query_perplexity": record.state.perplexity[i],
            "prompt_tokens": tokens,
            "truncated": record.state.truncated[i],
            "text": record.query,
            "segment": i,
        }
        for record in records
        for i, tokens in enumerate(record.state.prompt_tokens)
    ]
    frame = pd.DataFrame(rows)
    if frame["segment"].max() == 0:
        return frame.drop(columns="segment")
    # A document has several rows: number the rows, keep the document beside.
    return frame.assign(document=frame["doc_id"], doc_id=range(len(frame)))
