"""Stores from the samples of a finished lm-eval run, on any backend: each prompt is run once.

Prompts, answers, metrics and hashes are those in the samples. lm-eval's transformers model makes the
vectors as in a dispersion run: rows and vectors equal those of that run. Finished parts survive if
the process is killed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lm_eval.utils import apply_template

from lmeval_dispersion.errors import HarnessError, UsageError, count, first_line
from lmeval_dispersion.files import hashed, sha256
from lmeval_dispersion.harness import recording
from lmeval_dispersion.harness.records import (
    DocRecord,
    Prompt,
    TaskMetrics,
    load_states,
    save_states,
)
from lmeval_dispersion.harness.saving import manifest_of, model_identity, write
from lmeval_dispersion.harness.seams import backend_arguments
from lmeval_dispersion.logs.results import model_of, section
from lmeval_dispersion.logs.runs import LoggedRun, find_run
from lmeval_dispersion.model.capture import resolve, split_names
from lmeval_dispersion.model.load_report import warned_loads
from lmeval_dispersion.store import begin_store, read_store
from lmeval_dispersion.store.format import MANIFEST, PARTS
from lmeval_dispersion.store.identity import SUFFIX
from lmeval_dispersion.store.samples import JudgedTask, check_named, judged_task, stock_name

_PART = 1024  # prompts whose states are written together; a killed run loses at most these
# Median difference in nats of one answer (of one token, for whole texts): another model.
_DIFFERENT = 0.5
# How the source of a function begins, in a configuration.
_CODE = re.compile(r"\s*(?:@|def |<|functools\.|\S+ = lambda|lambda )")
_AGREEING = 0.5  # share of greedy generations that begin like ours


@dataclass(frozen=True)
class _Job:
    """Settings shared by all tasks of one command."""

    run: LoggedRun
    lm: Any
    arguments: Mapping[str, Any]
    output: Path
    layers: tuple[str, ...]
    judge: str | None
    force: bool
    notes: list[str]


def stores_from_samples(
    results: str | Path,
    arguments: Mapping[str, Any],
    output: str | Path,
    *,
    layers: str | Sequence[str] = (),
    tasks: Sequence[str] | None = None,
    judge: str | None = None,
    force: bool = False,
) -> Path:
    """Run a model on the prompts in a run's samples, and store its hidden states, task by task.

    Each store is a folder in ``output`` named after the dispersion task, such as
    ``gsm8k_dispersion``. A finished store of the same samples, model and layers is kept, and so are
    finished parts of an unfinished store: calling the function again continues a run that was
    killed.

    Args:
        results: Results of lm-eval with ``--log_samples``, a file or folder.
        arguments: The ``--model_args`` of lm-eval's hf model, parsed.
        output: Folder for the stores.
        layers: Names of the layers whose states are stored; empty for ``last``.
        tasks: Names of the tasks; None for all that have samples.
        judge: ``METRIC`` or ``FILTER/METRIC`` that says which answers are right, after ``TASK=``
            for one task alone; None for the task's own metric.
        force: Whether to continue if documents are missing, or if the model's answers differ from
            the logged ones.

    Returns:
        The folder ``output``.

    Raises:
        HarnessError: The samples are damaged, the model cannot be loaded, or its tokenizer, commit
            or answers differ from the logged ones.
        UsageError: A task or layer does not exist, the results are a log of Inspect, several
            processes were launched, or ``output`` has a finished store of other samples, another
            model or other layers.
    """
    run = find_run(results)
    if run.by_inspect:
        raise UsageError(
            f"{run.file} is a log of Inspect, which lacks the prompts that the model reads; give results of "
            "lm-eval with log_samples"
        )
    chosen = list(run.samples) if tasks is None else [task.strip() for task in tasks]
    for task in chosen:
        if task not in run.samples:
            raise UsageError(
                f"{run.file} has no samples of {task!r}; choose from {', '.join(run.samples)}"
            )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "expected a single process, got several, each of which would run all prompts; launch one "
            "process"
        )
    check_named(run, chosen, judge)
    judged = {task: judged_task(run, task, judge, allow_holes=force) for task in chosen}
    lm = _model(run, arguments)
    sites = resolve(lm.model, split_names(layers))
    job = _Job(
        run=run,
        lm=lm,
        arguments=dict(arguments),
        output=Path(output).expanduser(),
        layers=tuple(dict.fromkeys(site.name for site in sites)),
        judge=judge,
        force=force,
        notes=_model_notes(run, lm, arguments),
    )
    for name, task_samples in judged.items():
        _store_task(job, name, task_samples)
    return job.output


class _Document(NamedTuple):
    """One document: its first prompt, its judgement, whose state is still missing, and the logged answer."""

    prompt: Prompt
    record: DocRecord
    logged: float | str


def _documents(name: str, task: JudgedTask) -> tuple[list[_Document], list[str]]:
    """A task's documents in the order of their index, and notes on them."""
    template = task.config.get("doc_to_text")
    notes = list(task.notes)
    # A function's source is logged, and is not run.
    if not isinstance(template, str) or _CODE.match(template):
        if template is not None:
            notes.insert(
                0,
                "the task makes its prompts with a function, so it is unknown which part is the question; the "
                "perplexity is that of the whole prompt",
            )
        template = None
    documents = []
    for doc_id, sample in task.samples.items():
        query = None
        doc = sample.doc
        if template is not None and isinstance(doc, Mapping):
            query = doc[template] if template in doc else apply_template(template, doc)
        prompt = Prompt(sample.arguments[0], query if isinstance(query, str) else None, name)
        columns = {**sample.columns, "text": prompt.query}
        record = DocRecord(prompt.dispersion_state, doc_id, sample.correct, task.filter, columns)
        documents.append(_Document(prompt, record, sample.answer))
    return documents, notes


def _model(run: LoggedRun, arguments: Mapping[str, Any]) -> Any:
    import torch
    from lm_eval.models.huggingface import HFLM

    length = run.results.get("max_length")
    options: dict[str, Any] = {
        "batch_size": 8,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }
    if isinstance(length, int) and length > 0:
        options["max_length"] = length  # prompts are cut where the backend cut them
    options |= backend_arguments(arguments)
    try:
        with warned_loads(adapter="peft" in arguments):
            lm = HFLM(**options)
    except (OSError, TypeError, ValueError) as error:
        raise HarnessError(
            f"{arguments['pretrained']} cannot be loaded: {first_line(error)}; check its name and "
            "model_args"
        ) from error
    recording.check_model(lm, "a store from samples")
    return lm


def _model_notes(run: LoggedRun, lm: Any, arguments: Mapping[str, Any]) -> list[str]:
    """Compare the results' model and tokenizer with those at hand: refuse or note differences."""
    results = run.results
    notes = []
    tokenizer_known = False
    for kind in ("eos", "bos"):
        logged = results.get(f"tokenizer_{kind}_token")
        if not isinstance(logged, list) or len(logged) != 2 or logged[0] in (None, "None"):
            continue
        tokenizer_known = True
        token = str(getattr(lm.tokenizer, f"{kind}_token"))
        number = str(getattr(lm.tokenizer, f"{kind}_token_id"))
        if [str(value) for value in logged] != [token, number]:
            raise HarnessError(
                f"the samples come from another tokenizer: expected the {kind} token {logged}, got "
                f"{[token, number]} of {arguments['pretrained']}; give the model that made the samples"
            )
    if not tokenizer_known:
        notes.append("the results do not name their tokenizer; the model's own is assumed")
    if not isinstance(results.get("max_length"), int):
        notes.append(
            "the results do not give the backend's context length; prompts are cut at "
            f"{lm.max_length} tokens"
        )
    config = section(results, "config")
    commit = str(config.get("model_sha") or "")
    identity = model_identity(lm, dict(arguments))
    weights = identity.get("weights", "")
    if "@" in weights and not weights.endswith(commit):
        raise HarnessError(
            f"the samples come from commit {commit} of the model, but {weights} was loaded; set "
            f"revision={commit}",
            argument="model_args",
        )
    dtype = str(config.get("model_dtype") or "").removeprefix("torch.")
    if dtype and dtype != identity.get("dtype"):
        notes.append(
            f"the answers were computed in {dtype}, and the vectors in {identity.get('dtype')}"
        )
    named = model_of(results)
    if named and str(named) != str(arguments["pretrained"]):
        notes.append(
            f"the samples come from {named!r}, and the vectors from {arguments['pretrained']!r}: make "
            "sure that these are the same model"
        )
    return notes


def _store_task(job: _Job, name: str, task: JudgedTask) -> None:
    """Fill one task's store, unless it exists."""
    store_name = stock_name(name) + SUFFIX
    kind = str(task.config["output_type"]).replace("multiple_choice", "loglikelihood")
    folder = job.output / store_name
    source = {
        "results": job.run.file.name,
        "backend": job.run.results.get("model_source"),
        "lm_eval": job.run.results.get("lm_eval_version"),
        "sha256": sha256(job.run.samples[name]),
        "judge": job.judge,
    }
    limit = section(job.run.results_of(name), "config").get("limit")
    manifest = manifest_of(job.lm, job.arguments, task.prompts, {store_name: task.version}, limit)
    if _is_done(folder, source, manifest["identity"], job.layers):
        print(f"{name}: {folder} exists already", file=sys.stderr)
        return
    begin_store(folder)
    documents, notes = _documents(name, task)
    unique = dict[str, Prompt]()
    for document in documents:
        document.prompt.dispersion_layers = job.layers
        unique[document.prompt.key] = document.prompt
    run_key = json.dumps([source, manifest["identity"], job.layers], sort_keys=True)
    _run_parts(job, kind, unique, run_key, folder / PARTS)
    records = []
    for document in documents:
        answered = unique[document.prompt.key]
        if answered.answer is not None:
            document.prompt.answer = answered.answer
        document.prompt.dispersion_state = answered.dispersion_state
        document.record.state = answered.dispersion_state
        records.append(document.record)
    agreement, far = _agreement(name, kind, documents, job.force)
    metrics = TaskMetrics(store_name, records)
    notes += [*job.notes, *far]
    manifest["figures"] = {**metrics.summary(), "correct_by": task.correct_by}
    manifest["samples"] = {**source, **agreement, "notes": notes}
    write(folder, metrics, task.category, manifest)
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    line = f"{name}: {count(len(records), 'document')}, {count(len(unique), 'prompt')} run"
    for key, value in agreement.items():
        line += f"; {key.replace('_', ' ')} {value:.3g}"
    print(line, file=sys.stderr)
    for note in [*notes, *(sentence for _, sentence in metrics.remarks())]:
        print(f"{name}: note: {note}", file=sys.stderr)


def _is_done(
    folder: Path, source: Mapping[str, Any], identity: Mapping[str, str], layers: Sequence[str]
) -> bool:
    """Whether a finished store of the same samples, model and layers exists; another store is refused."""
    if not (folder / MANIFEST).exists():
        return False
    manifest = read_store(folder).manifest
    stored = manifest.get("samples") or {}
    same = all(stored.get(key) == value for key, value in source.items())
    if same and manifest.get("identity") == identity and set(manifest["layers"]) == set(layers):
        # Of a run that was killed at its very end.
        shutil.rmtree(folder / PARTS, ignore_errors=True)
        return True
    raise UsageError(
        f"{folder} is a finished store of other samples, another model or other layers; remove it, or "
        "choose another output folder"
    )


def _run_parts(
    job: _Job, kind: str, unique: Mapping[str, Prompt], run_key: str, parts: Path
) -> None:
    """Run prompts, by their keys, in parts; reads the parts of a killed run."""
    parts.mkdir(parents=True, exist_ok=True)
    # Longest first: prompts that do not fit fail at once, and batches hold prompts of similar length.
    ordered = sorted(unique, key=lambda key: (-len(unique[key].args[0]), key))
    for start in range(0, len(ordered), _PART):
        keys = ordered[start : start + _PART]
        chunk = [unique[key] for key in keys]
        digest = hashed("".join([run_key, *keys]))
        file = parts / f"{digest[:24]}.states.safetensors"
        if file.exists():
            for prompt, (state, answer) in zip(chunk, load_states(file), strict=True):
                prompt.dispersion_state = state
                prompt.answer = answer
        else:
            recording.prefill(job.lm, kind, chunk)
            save_states(file, [(prompt.dispersion_state, prompt.answer) for prompt in chunk])


def _agreement(
    name: str, kind: str, documents: Sequence[_Document], force: bool
) -> tuple[dict[str, float], list[str]]:
    """Compare the model's own answers with the logged ones; refuse another model's."""
    answered = [document for document in documents if document.prompt.answer is not None]
    if kind == "generate_until":
        greedy = [each for each in answered if not each.prompt.args[1].get("do_sample")]
        if answered and not greedy:
            return {}, [
                "the answers were sampled at random, so it was not checked that this model gave them"
            ]
        same = [
            str(each.logged).lstrip().startswith(str(each.prompt.answer).strip()) for each in greedy
        ]
        if not same:
            return {}, []
        share = float(np.mean(same))
        is_far = share < _AGREEING
        figures = {"first_token_agreement": share}
        difference = f"only {share:.0%} of the logged answers begin like the model's own"
    else:
        gaps = list[float]()
        for document in answered:
            gap = abs(float(document.prompt.answer or 0) - float(document.logged))
            tokens = sum(document.prompt.dispersion_state.prompt_tokens)
            if tokens:  # an empty text has none
                gaps.append(gap / tokens if kind == "loglikelihood_rolling" else gap)
        if not gaps:
            return {}, []
        median = float(np.median(gaps))
        is_far = median > _DIFFERENT
        figures = {
            "logprob_difference_median": median,
            "logprob_difference_max": float(np.max(gaps)),
        }
        difference = f"log-probabilities differ from the logged ones by {median:.2f} nats (median)"
    if not is_far:
        return figures, []
    if not force:
        raise HarnessError(
            f"{name}: {difference}, so the samples seem to come from another model, tokenizer, prompt "
            "template or precision; give the model that made the samples, or set force (`--force`) "
            "to continue"
        )
    return figures, [
        f"{difference}, perhaps because of another model, tokenizer, prompt template or precision"
    ]
