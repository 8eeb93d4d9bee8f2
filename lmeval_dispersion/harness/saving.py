"""Saving the run of one task: where its store goes, what is in it, and when it is written."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import shlex
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.harness.metrics import TaskMetrics
from lmeval_dispersion.harness.prompts import PromptShape
from lmeval_dispersion.harness.records import DocRecord
from lmeval_dispersion.harness.seams import Surroundings
from lmeval_dispersion.model.capture import depth
from lmeval_dispersion.model.loading import (
    adapter_identity,
    cached_commit,
    settings_identity,
    weights_identity,
)
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
    folder = store_folder(task, metadata, around) if writes else None
    if folder is not None:
        begin_store(folder)
    return Run(around, options, folder)


def save(run: Run, task: Any, metrics: TaskMetrics, summary: Mapping[str, Any]) -> str | None:
    """Write a finished run's store, return its folder; a failure is logged and costs the run nothing else."""
    if run.folder is None:
        return None
    try:
        category = run.around.category(task.task_name)
        write(run.folder, metrics, category, {**_manifest(task, run), "figures": summary})
    except Exception as error:  # whatever it is: hours of evaluation must not end for want of a store
        failures.append(run.folder)
        log.error(
            "%s: the store %s could not be written: %s; the metrics stand", task.task_name, run.folder, error
        )
        return None
    if run.around.command_line:
        written.append(run.folder)
    else:
        log.info("%s: the vectors are in %s", task.task_name, run.folder)
    return str(run.folder)


def write(folder: Path, metrics: TaskMetrics, category: str | None, manifest: Mapping[str, Any]) -> None:
    """Write the store of one task, whatever ran it."""
    write_store(
        folder,
        documents=_document_table(metrics.task, metrics.records, category),
        vectors=metrics.vectors,
        manifest={**manifest, "default_layer": metrics.layers[0]},
    )


def remark(run: Run, metrics: TaskMetrics) -> None:
    """Pass a task's warnings on: at once, or under lm-eval's command at its end for all tasks together."""
    for shared, sentence in metrics.remarks():
        if run.around.command_line:
            remarks.setdefault(shared, {})[metrics.task] = sentence
        else:
            log.warning("%s: %s", metrics.task, sentence)


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


def _document_table(task: str, records: Sequence[DocRecord], category: str | None) -> pd.DataFrame:
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


def _manifest(task: Any, run: Run) -> dict[str, Any]:
    around, options, config, lm = run.around, run.options, task.config, run.around.lm
    template = _chat_template(lm) if options.get("apply_chat_template") else None
    shape = PromptShape(
        doc_to_text=config.doc_to_text,
        description=config.description if isinstance(config.description, str) else None,
        subject=config.dataset_name if isinstance(config.dataset_name, str) else None,
        delimiters=(config.target_delimiter, config.fewshot_delimiter),
        num_fewshot=config.num_fewshot,
        fewshot_seed=around.fewshot_seed,
        chat_template=template,
        multiturn=bool(options.get("fewshot_as_multiturn")),
        system=options.get("system_instruction"),
    )
    arguments = json.loads(json.dumps(around.model_args, default=str))
    return {
        **model_manifest(lm, arguments),
        "model_args": arguments,
        "tasks": {task.task_name: task.VERSION},
        **shape_manifest(shape, lm, arguments),
        "limit": around.limit,
    }


def model_manifest(lm: Any, arguments: Any) -> dict[str, Any]:
    """The manifest's keys that say which model ran, under which versions of the software."""
    name = getattr(lm, "pretrained", None)
    loaded = getattr(getattr(lm, "model", None), "config", None)
    return {
        "model": name if isinstance(name, str) else getattr(loaded, "_name_or_path", ""),
        "revision": _commit(name, lm, arguments) if isinstance(name, str) else None,
        "depth": None if loaded is None else depth(loaded),
        "versions": {
            "lm_eval": _version("lm_eval"),
            "transformers": _version("transformers"),
            "torch": _version("torch"),
        },
    }


def shape_manifest(shape: PromptShape, lm: Any, arguments: Any) -> dict[str, Any]:
    """The manifest's keys that say how the model was asked, and the identity of both."""
    return {
        "num_fewshot": shape.num_fewshot,
        "chat_template": shape.chat_template,
        "prompt_format": shape.format,
        "identity": {**model_identity(lm, arguments), **shape.identity},
    }


def model_identity(lm: Any, arguments: Any) -> dict[str, str]:
    """Identity of lm-eval's model by its content: see :mod:`lmeval_dispersion.model.loading`."""
    name, adapter, delta = (getattr(lm, key, None) for key in ("pretrained", "peft", "delta"))
    gguf = _argument(arguments, "gguf_file")
    tokenizer, starts = _argument(arguments, "tokenizer"), getattr(lm, "add_bos_token", None)
    identity: dict[str, str | None] = {
        "weights": weights_identity(name, _commit(name, lm, arguments), gguf)
        if isinstance(name, str)
        else None,
        "gguf": gguf,
        "adapter": adapter_identity(adapter) or str(adapter) if adapter else None,
        "delta": weights_identity(delta) or str(delta) if delta else None,
        "tokenizer": tokenizer if tokenizer != name else None,
        "add_bos_token": None if starts is None else str(starts).lower(),
        **settings_identity(getattr(lm, "model", None)),
    }
    return {key: value for key, value in identity.items() if value is not None}


def _argument(arguments: Any, name: str) -> str | None:
    """One of ``--model_args``, which lm-eval holds as a dict or as the text that was given."""
    if isinstance(arguments, str):
        pairs = (pair.partition("=") for pair in arguments.split(","))
        arguments = {key.strip(): value.strip() for key, _, value in pairs}
    value = arguments.get(name) if isinstance(arguments, Mapping) else None
    return None if value is None else str(value)


def _commit(name: str, lm: Any, arguments: Any) -> str | None:
    """The commit of a Hub model: as transformers noted it, or by the Hub's cache; else the revision."""
    if os.path.isdir(name):
        return None
    revision = getattr(lm, "revision", None)
    noted = getattr(getattr(getattr(lm, "model", None), "config", None), "_commit_hash", None)
    return noted or cached_commit(name, revision, _argument(arguments, "gguf_file")) or revision


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
