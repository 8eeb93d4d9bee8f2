"""Writing one task's store: its folder, documents, vectors and manifest."""

from __future__ import annotations

import atexit
import json
import logging
import os
import shlex
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.errors import without_secrets
from lmeval_dispersion.files import hashed
from lmeval_dispersion.harness.records import DocRecord, TaskMetrics
from lmeval_dispersion.harness.seams import RunningEvaluation
from lmeval_dispersion.model.capture import depth
from lmeval_dispersion.model.loading import (
    adapter_identity,
    cached_commit,
    settings_identity,
    weights_identity,
)
from lmeval_dispersion.model_args import arguments_in
from lmeval_dispersion.store import begin_store, write_store
from lmeval_dispersion.store.format import DOCUMENTS, MANIFEST
from lmeval_dispersion.store.identity import prompt_manifest

if TYPE_CHECKING:
    import pandas as pd

VARIABLE = "LMEVAL_DISPERSION_STORE"

# This process's stores that could not be written, and, for its last lines, written ones and warnings.
failures: list[Path] = []
written: list[Path] = []
remarks: dict[str, dict[str, str]] = {}  # shared sentence -> task -> its own sentence

log = logging.getLogger(__name__)
# lm-eval's tracker of an evaluation -> the date of its stores.
_stamps: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class TaskRun:
    """The run of a task, from its start until its store is written.

    Attributes:
        evaluation: What is known of lm-eval's evaluation.
        options: Arguments with which lm-eval builds the task's requests.
        folder: Folder of the store; None if this process writes no store.
    """

    evaluation: RunningEvaluation
    options: Mapping[str, Any]
    folder: Path | None


def begin(
    task: str,
    metadata: Mapping[str, Any],
    evaluation: RunningEvaluation,
    options: Mapping[str, Any],
) -> TaskRun:
    """Start the run of a task: create the folder of its store and mark it as unfinished.

    Only the first process of a distributed run creates a folder, and only if the metadata, the
    environment variable ``LMEVAL_DISPERSION_STORE`` or lm-eval's ``output_path`` says where.

    Args:
        task: Name of the task.
        metadata: The task's metadata, which may name the folder as ``dispersion_store``.
        evaluation: What is known of lm-eval's evaluation.
        options: Arguments with which lm-eval builds the task's requests.

    Raises:
        UsageError: The folder cannot be used; see :func:`store.begin_store`.
    """
    # torchrun on CPUs runs all processes as rank 0: each machine's first writes.
    folder = None
    if os.environ.get("LOCAL_RANK", "0") == "0" and getattr(evaluation.lm, "rank", 0) == 0:
        folder = _store_folder(task, metadata, evaluation)
    if folder is not None:
        if evaluation.use_cache:
            _say_unfinished(folder.parent)
        begin_store(folder)
    return TaskRun(evaluation, options, folder)


def finish(run: TaskRun, task: Any, metrics: TaskMetrics, correct_by: str | None) -> dict[str, Any]:
    """Write the store of a finished task, and return the task's summary for lm-eval's results.

    The entry ``store`` of the summary is the folder of the store. It is None if this process writes
    no store. It is also None if the store cannot be written; then the error is logged. Warnings are
    logged, too. Under the command ``lm_eval``, however, they are kept, and :func:`report_at_exit`
    prints them for all tasks together.

    Args:
        run: The task's run, from :func:`begin`.
        task: The lm-eval task.
        metrics: The task's metrics and vectors.
        correct_by: Name of the metric that says which answers are right; None if there is none.
    """
    name = task.task_name
    evaluation = run.evaluation
    options = run.options
    for shared, sentence in metrics.remarks():
        if evaluation.command_line:
            remarks.setdefault(shared, {})[name] = sentence
        else:
            log.warning("%s: %s", name, sentence)
    figures = {**metrics.summary(), "correct_by": correct_by}
    if run.folder is None:
        return {**figures, "store": None}
    try:
        prompts = prompt_manifest(
            vars(task.config),
            fewshot_seed=evaluation.fewshot_seed,
            chat_template=_chat_template(evaluation.lm, options),
            multiturn=bool(options.get("fewshot_as_multiturn")),
            system=options.get("system_instruction"),
        )
        arguments = json.loads(json.dumps(evaluation.model_args, default=str))
        manifest = manifest_of(
            evaluation.lm, arguments, prompts, {name: task.VERSION}, evaluation.limit
        )
        write(run.folder, metrics, evaluation.category(name), {**manifest, "figures": figures})
    except Exception as error:  # any error: hours of evaluation must not fail because of a store
        failures.append(run.folder)
        log.error(
            "%s: the store %s could not be written (%s); the metrics in lm-eval's results are "
            "complete, but an audit needs vectors: run the task again",
            name,
            run.folder,
            error,
        )
        return {**figures, "store": None}
    if evaluation.command_line:
        written.append(run.folder)
    else:
        log.info("%s: the vectors are in %s", name, run.folder)
    return {**figures, "store": str(run.folder)}


def write(
    folder: Path, metrics: TaskMetrics, category: str | None, manifest: Mapping[str, Any]
) -> None:
    """Write the store of one task.

    Args:
        folder: Folder of the store.
        metrics: The task's documents and vectors.
        category: Alias of the task's group, for reports; None if the task is in no group.
        manifest: The manifest, without the name of the reported layer.

    Raises:
        DispersionError: The store cannot be written; see :func:`store.write_store`.
    """
    write_store(
        folder,
        documents=_document_table(metrics.task, metrics.records, category),
        vectors=metrics.vectors,
        manifest={**manifest, "default_layer": metrics.layers[0]},
    )


@atexit.register
def report_at_exit() -> None:
    """Print on standard error all tasks' warnings, the folder of the vectors and the next command.

    The function is called when a process that ran the command ``lm_eval`` exits.
    """
    for shared, sentences in remarks.items():
        tasks = list(sentences)
        if len(tasks) == 1:
            print(f"warning: {tasks[0]}: {sentences[tasks[0]]}", file=sys.stderr)
        else:
            names = ", ".join([*tasks[:3], *(["…"] if len(tasks) > 3 else [])])
            print(f"warning: {len(tasks)} tasks ({names}): {shared}", file=sys.stderr)
    if written:
        folder = os.path.commonpath(written)
        kept = f"vectors of {len(written)} tasks" if len(written) > 1 else "vectors"
        print(f"{kept}: {folder}\nnext: dispersion audit {shlex.quote(folder)}", file=sys.stderr)


def _store_folder(
    task: str, metadata: Mapping[str, Any], evaluation: RunningEvaluation
) -> Path | None:
    """The folder for the store of ``task``, or None with a warning if none is set."""
    given = metadata.get("dispersion_store") or os.environ.get(VARIABLE)
    if given:
        return Path(str(given)).expanduser() / task
    output = evaluation.output_folder()
    if output is not None:
        stamp = _stamps.setdefault(evaluation.tracker, datetime.now().strftime("%Y-%m-%dT%H-%M-%S"))
        return output / f"dispersion_{stamp}" / task
    log.warning(
        "%s: the vectors of this run are not stored; to store them, set output_path, metadata "
        "dispersion_store=DIR, or the environment variable %s",
        task,
        VARIABLE,
    )
    return None


@cache
def _say_unfinished(root: Path) -> None:
    """Warn once, before a run with --use_cache, that it does not continue the killed run."""
    begun = [*root.glob(f"*/{DOCUMENTS}"), *root.parent.glob(f"dispersion_*/*/{DOCUMENTS}")]
    left = [path.parent for path in begun if not path.with_name(MANIFEST).exists()]
    if left:
        log.warning(
            "%s comes from a run that did not finish; use_cache does not make this run shorter, because "
            "the model has to run again to give vectors",
            left[0],
        )


def _document_table(task: str, records: Sequence[DocRecord], category: str | None) -> pd.DataFrame:
    import pandas as pd

    rows = []
    for record in records:
        for i, tokens in enumerate(record.state.prompt_tokens):
            row = {
                **record.columns,
                "doc_id": record.doc_id,
                "task": task,
                "subject": record.columns["subject"] or task,
                "category": category,
                "correct": record.correct,
                "query_perplexity": record.state.perplexity[i],
                "prompt_tokens": tokens,
                "truncated": record.state.truncated[i],
                "segment": i,
            }
            rows.append(row)
    frame = pd.DataFrame(rows)
    if frame["segment"].max() == 0:
        return frame.drop(columns="segment")
    # Segments are rows of their own, which ``doc_id`` numbers.
    return frame.assign(document=frame["doc_id"], doc_id=range(len(frame)))


def manifest_of(
    lm: Any, arguments: Any, prompts: Mapping[str, Any], tasks: Mapping[str, Any], limit: Any
) -> dict[str, Any]:
    """Return the manifest of a store, as plain values that JSON can represent.

    Args:
        lm: lm-eval's model.
        arguments: The ``--model_args``, as a dict or as text.
        prompts: The settings of the prompts, from :func:`store.identity.prompt_manifest`.
        tasks: Version of each task, by name.
        limit: lm-eval's ``--limit``; None for all documents.
    """
    config = getattr(getattr(lm, "model", None), "config", None)
    name = getattr(lm, "pretrained", None)
    revision = None
    if isinstance(name, str):
        revision = commit_of(name, lm, arguments)
    else:  # a model in memory
        name = getattr(config, "_name_or_path", "")
    return {
        "model": name,
        "revision": revision,
        "depth": None if config is None else depth(config),
        "versions": {package: version(package) for package in ("lm_eval", "transformers", "torch")},
        "model_args": _public(arguments),
        "tasks": dict(tasks),
        **prompts,
        "identity": {**model_identity(lm, arguments), **prompts["identity"]},
        "limit": limit,
    }


def _public(arguments: Any) -> Any:
    """The arguments without secrets of the addresses in them."""
    if isinstance(arguments, dict):
        return {key: _public(value) for key, value in arguments.items()}
    return without_secrets(arguments) if isinstance(arguments, str) else arguments


def model_identity(lm: Any, arguments: Any) -> dict[str, str]:
    """Return what identifies lm-eval's model, such as its commit or a hash of its weights.

    Keys are ``weights``, ``adapter``, ``tokenizer`` and other settings that change answers; those
    that do not apply are left out. See :mod:`lmeval_dispersion.model.loading`.
    """
    name = getattr(lm, "pretrained", None)
    adapter = getattr(lm, "peft", None)
    delta = getattr(lm, "delta", None)
    gguf = _argument(arguments, "gguf_file")
    tokenizer = _argument(arguments, "tokenizer")
    starts = getattr(lm, "add_bos_token", None)
    identity = dict[str, str | None]()
    if isinstance(name, str):
        identity["weights"] = weights_identity(name, commit_of(name, lm, arguments), gguf)
    identity["gguf"] = gguf
    if adapter:
        identity["adapter"] = adapter_identity(adapter) or str(adapter)
    if delta:
        identity["delta"] = weights_identity(delta) or str(delta)
    if tokenizer != name:
        identity["tokenizer"] = tokenizer
    if starts is not None:
        identity["add_bos_token"] = str(starts).lower()
    identity |= settings_identity(getattr(lm, "model", None))
    return {key: value for key, value in identity.items() if value is not None}


def _argument(arguments: Any, name: str) -> str | None:
    """One of ``--model_args``, which lm-eval holds as a dict or as the given text."""
    value = arguments_in(arguments).get(name)
    return None if value is None else str(value)


def commit_of(name: str, lm: Any, arguments: Any) -> str | None:
    """Return the commit of a model from the Hub, as transformers or the Hub's cache knows it.

    If neither knows the commit, the result is the revision that lm-eval asks for, ``main`` by
    default. It is None for a model in a folder.

    Args:
        name: Name of the repository, or path of a folder.
        lm: lm-eval's model.
        arguments: The ``--model_args``, as a dict or as text.
    """
    if os.path.isdir(name):
        return None
    config = getattr(getattr(lm, "model", None), "config", None)
    commit = getattr(config, "_commit_hash", None)
    revision = getattr(lm, "revision", None)
    return commit or cached_commit(name, revision, _argument(arguments, "gguf_file")) or revision


def _chat_template(lm: Any, options: Mapping[str, Any]) -> str | None:
    """The digest of the template that prompts are in, if any."""
    if not options.get("apply_chat_template"):
        return None
    try:
        template = lm.chat_template(True)
    except (AttributeError, ValueError):
        return None
    return hashed(template) if template else None
