"""Saving the run of one task: where its store goes, what is in it, and when it is written."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.harness.compat import Surroundings
from lmeval_dispersion.harness.metrics import TaskMetrics
from lmeval_dispersion.harness.records import DocRecord
from lmeval_dispersion.store import begin_store, write_store

if TYPE_CHECKING:
    import pandas as pd

VARIABLE = "LMEVAL_DISPERSION_STORE"

failures: list[Path] = []  # stores of this process that could not be written

log = logging.getLogger(__name__)
_stamps: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Run:
    """One task's run, from its start to its store.

    Attributes:
        around: What lm-eval knows of the evaluation.
        options: Keyword arguments of ``build_all_requests``.
        folder: Where this process writes the store; None: it writes none.
    """

    around: Surroundings
    options: Mapping[str, Any]
    folder: Path | None


def begin(task: str, metadata: Mapping[str, Any], around: Surroundings, options: Mapping[str, Any]) -> Run:
    """Start a run: its store's folder is marked as one whose run has not finished.

    Raises:
        UsageError: A finished store is there already, or the folder cannot be written.
    """
    # torchrun on CPUs runs all processes as rank 0: the first of its machine writes.
    writes = os.environ.get("LOCAL_RANK", "0") == "0" and getattr(around.lm, "rank", 0) == 0
    folder = store_folder(task, metadata, around) if writes else None
    if folder is not None:
        begin_store(folder)
    return Run(around, options, folder)


def save(run: Run, task: Any, metrics: TaskMetrics, summary: Mapping[str, Any]) -> str | None:
    """Write the store of a finished run; a failure is logged in one sentence and costs the run nothing else.

    Args:
        run: As it began.
        task: lm-eval's task, for its name, configuration and version.
        metrics: The task's metrics, with its records and vectors.
        summary: Its metrics by layer, for the manifest.

    Returns:
        The store's folder; None where none was wanted or it could not be written.
    """
    if run.folder is None:
        return None
    try:
        write_store(
            run.folder,
            documents=_documents(task.task_name, metrics.records, run.around.category(task.task_name)),
            vectors=metrics.vectors,
            manifest={**_manifest(task, metrics.layers, run), "figures": summary},
        )
    except Exception as error:  # whatever it is: hours of evaluation must not end for want of a store
        failures.append(run.folder)
        log.error(
            "%s: the store %s could not be written: %s; the metrics stand", task.task_name, run.folder, error
        )
        return None
    return str(run.folder)


def store_folder(task: str, metadata: Mapping[str, Any], around: Surroundings) -> Path | None:
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


def _documents(task: str, records: Sequence[DocRecord], category: str | None) -> pd.DataFrame:
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for record in records:
        state = record.state
        for i, tokens in enumerate(state.prompt_tokens):
            rows.append(
                {
                    "doc_id": record.doc_id,
                    "task": task,
                    "subject": record.subject or task,
                    "category": category,
                    "doc_hash": record.doc_hash,
                    "prompt_hash": state.prompt_hash,
                    "correct": record.correct,
                    "prediction": record.prediction,
                    "target": record.target,
                    "logprobs": record.logprobs,
                    "query_perplexity": state.perplexity[i],
                    "prompt_tokens": tokens,
                    "truncated": state.truncated[i],
                    "text": state.query,
                    "segment": i,
                }
            )
    frame = pd.DataFrame(rows)
    if frame["segment"].max() == 0:
        return frame.drop(columns="segment")
    # A document has several rows: number the rows, keep the document beside.
    return frame.assign(document=frame["doc_id"], doc_id=range(len(frame)))


def _manifest(task: Any, layers: Sequence[str], run: Run) -> dict[str, Any]:
    around, options, config, lm = run.around, run.options, task.config, run.around.lm
    name = getattr(lm, "pretrained", None)
    template = _chat_template(lm) if options.get("apply_chat_template") else None
    shape = {
        "doc_to_text": config.doc_to_text
        if isinstance(config.doc_to_text, str)
        else repr(config.doc_to_text),
        "num_fewshot": config.num_fewshot,
        "delimiters": [config.target_delimiter, config.fewshot_delimiter],
        "chat_template": template,
        "multiturn": bool(options.get("fewshot_as_multiturn")) if template else None,
        "system": options.get("system_instruction"),
    }
    loaded = getattr(getattr(lm, "model", None), "config", None)
    return {
        "model": name if isinstance(name, str) else getattr(loaded, "_name_or_path", ""),
        "revision": _commit(name, getattr(lm, "revision", None)) if isinstance(name, str) else None,
        "model_args": json.loads(json.dumps(around.model_args, default=str)),
        "tasks": {task.task_name: task.VERSION},
        "default_layer": layers[0],
        "num_fewshot": config.num_fewshot,
        "chat_template": template,
        "prompt_format": hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest(),
        "limit": around.limit,
        "versions": {
            "lm_eval": _version("lm_eval"),
            "transformers": _version("transformers"),
            "torch": _version("torch"),
        },
    }


def _commit(name: str, revision: Any) -> str | None:
    """The commit of a Hub model, by the place of its files in the cache; else the revision as given."""
    if os.path.isdir(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, "config.json", revision=revision)
    found = Path(path).parent.name if isinstance(path, str) else ""
    return found if len(found) == 40 else revision


def _chat_template(lm: Any) -> str | None:
    try:
        template = lm.chat_template(True)
    except (AttributeError, ValueError):
        return None
    return hashlib.sha256(template.encode()).hexdigest() if template else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
