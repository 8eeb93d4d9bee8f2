"""The store of one task's run: where it goes, and its rows from the documents' records."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import weakref
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.harness.compat import Surroundings
from lmeval_dispersion.harness.states import DocRecord, Vectors
from lmeval_dispersion.store import write_store
from lmeval_dispersion.store.files import DOCUMENTS, MANIFEST

if TYPE_CHECKING:
    import pandas as pd

VARIABLE = "LMEVAL_DISPERSION_STORE"

failures: list[Path] = []  # stores of this process that could not be written

log = logging.getLogger(__name__)
_stamps: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


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


def begin(folder: Path) -> None:
    """Mark ``folder`` as a store whose run has not finished, so that a run that is killed leaves no gap.

    Raises:
        UsageError: A finished store is there already, or the folder cannot be written.
    """
    if (folder / MANIFEST).exists():
        raise UsageError(
            f"{folder} holds a finished store already; remove it or choose another place for this run"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DOCUMENTS).touch()
    except OSError as error:
        raise UsageError(
            f"the store {folder} cannot be written: {error.strerror}; choose another place"
        ) from error


def is_writer() -> bool:
    """Whether this process writes files: the first of its machine (torchrun on CPUs runs all as rank 0)."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def write(
    folder: Path,
    task: str,
    records: Sequence[DocRecord],
    vectors: Mapping[str, Vectors],
    manifest: Mapping[str, Any],
    category: str | None,
) -> Path | None:
    """Write the store; a failure is logged in one sentence and costs the run nothing else.

    Args:
        folder: Where, see :func:`store_folder`.
        task: Name of the task.
        records: Documents in the order of the vectors' rows; a record of m segments has m rows.
        vectors: Layer -> raw states, shape (n, d).
        manifest: What is known of the run.
        category: Group slice, or None.
    """
    try:
        documents = _documents(task, records, category)
        return write_store(folder, documents=documents, vectors=vectors, manifest=manifest)
    except Exception as error:  # whatever it is: hours of evaluation must not end for want of a store
        failures.append(folder)
        log.error("%s: the store %s could not be written: %s; the figures stand", task, folder, error)
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


def manifest(
    task: Any, layers: Sequence[str], around: Surroundings, options: Mapping[str, Any]
) -> dict[str, Any]:
    """What a store says about its run.

    Args:
        task: The task, for its configuration and version.
        layers: Captured layers, the default one first.
        around: What lm-eval knows.
        options: Keyword arguments of ``build_all_requests``.
    """
    lm = getattr(around.lm, "lm", around.lm)
    config = task.config
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


def json_number(value: float) -> float | None:
    """A number for strict JSON: NaN becomes null."""
    return None if math.isnan(value) else float(value)


def _commit(name: str, revision: Any) -> str | None:
    """The commit of a Hub model, by the place of its files in the cache; else the revision as given."""
    if os.path.isdir(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, "config.json", revision=revision)
    found = Path(path).parent.name if isinstance(path, str) else ""
    return found if len(found) == 40 else revision


def _template(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__qualname__", type(value).__name__)


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
