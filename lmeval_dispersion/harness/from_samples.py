"""Stores from the samples of a finished lm-eval run, on any backend; one prefill adds vectors.

Prompts, answers, metrics and hashes are the samples' own. lm-eval's transformers model makes the vectors as
in a dispersion run: rows and vectors equal that run's. Finished parts survive a killed process.
"""

from __future__ import annotations

import hashlib
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

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.files import sha256
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
_DIFFERENT = (
    0.5  # median difference in nats of one answer (of one token, for whole texts): another model
)
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
    """Fill a store for each task of a run's samples; returns their common folder.

    Each task gets a folder under ``output``, named like the dispersion task. A finished store of the same
    samples, model and layers is kept, so that a killed run continues.

    Raises:
        HarnessError: The samples are damaged, or the model cannot be loaded or is not theirs.
        UsageError: No such task or layer, several processes, or a finished store of another run is there.
    """
    run = find_run(results)
    if run.by_inspect:
        raise UsageError(
            f"{run.file} is a log of Inspect, which keeps messages and not the prompts that a model reads; "
            "name samples of lm-eval"
        )
    chosen = list(run.samples) if tasks is None else [task.strip() for task in tasks]
    unknown = [task for task in chosen if task not in run.samples]
    if unknown:
        raise UsageError(
            f"{run.file} has no samples of {unknown[0]!r}; it has {', '.join(run.samples)}"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "several processes were launched and each would run all prompts; launch one"
        )
    check_named(run, chosen, judge)
    judged = {task: judged_task(run, task, judge, allow_holes=force) for task in chosen}
    lm = _model(run, arguments)
    job = _Job(
        run=run,
        lm=lm,
        arguments=dict(arguments),
        output=Path(output).expanduser(),
        layers=tuple(dict.fromkeys(site.name for site in resolve(lm.model, split_names(layers)))),
        judge=judge,
        force=force,
        notes=_model_notes(run, lm, arguments),
    )
    for name, task in judged.items():
        _store_task(job, name, task)
    return job.output


class _Document(NamedTuple):
    """One document: its first prompt, its judgement, whose state is still missing, and the logged answer."""

    prompt: Prompt
    record: DocRecord
    logged: float | str


def _documents(name: str, task: JudgedTask) -> tuple[list[_Document], list[str]]:
    """A task's documents in the order of their index, and notes on them."""
    text, documents, notes = task.config.get("doc_to_text"), [], list(task.notes)
    # A function's source is logged, and is not run.
    is_code = r"\s*(?:@|def |<|functools\.|\S+ = lambda|lambda )"
    template = None if not isinstance(text, str) or re.match(is_code, text) else text
    if template is None and text is not None:
        notes.insert(
            0,
            "the prompts come from a function of the task: the query's part is unknown, and the perplexity "
            "is that of the whole prompt",
        )
    for doc_id, sample in task.samples.items():
        query, doc = None, sample.doc
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
        raise HarnessError(f"{arguments['pretrained']} cannot be loaded: {error}") from error
    recording.check_model(lm, "a store from samples")
    return lm


def _model_notes(run: LoggedRun, lm: Any, arguments: Mapping[str, Any]) -> list[str]:
    """Compare the results' model and tokenizer with those at hand: refuse or note differences."""
    results, tokenizer, notes = run.results, lm.tokenizer, []
    tokenizer_known = False
    for kind in ("eos", "bos"):
        logged = results.get(f"tokenizer_{kind}_token")
        if not isinstance(logged, list) or len(logged) != 2 or logged[0] in (None, "None"):
            continue
        tokenizer_known = True
        token = [
            str(getattr(tokenizer, f"{kind}_token")),
            str(getattr(tokenizer, f"{kind}_token_id")),
        ]
        if [str(value) for value in logged] != token:
            raise HarnessError(
                f"the samples come from another tokenizer: its {kind} token is {logged}, and "
                f"{arguments['pretrained']} has {token}; name the model that gave the answers"
            )
    if not tokenizer_known:
        notes.append("the results do not name the tokenizer; the model's is assumed token")
    if not isinstance(results.get("max_length"), int):
        notes.append(
            f"the results lack the backend's context length; prompts are cut at {lm.max_length} tokens"
        )
    config = section(results, "config")
    commit = config.get("model_sha")
    identity = model_identity(lm, dict(arguments))
    if (
        commit
        and "@" in identity.get("weights", "")
        and not identity["weights"].endswith(str(commit))
    ):
        raise HarnessError(
            f"the samples come from commit {commit}, but the model is {identity['weights']}; "
            f"pass revision={commit}",
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
            f"the samples come from {named!r}, and the vectors from {arguments['pretrained']!r}"
        )
    return notes


def _store_task(job: _Job, name: str, task: JudgedTask) -> None:
    """Fill one task's store, unless it exists."""
    store_name, kind = stock_name(name) + SUFFIX, str(task.config["output_type"])
    kind = "loglikelihood" if kind == "multiple_choice" else kind
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
    prompts = [document.prompt for document in documents]
    for prompt in prompts:
        prompt.dispersion_layers = job.layers
    unique = {prompt.key: prompt for prompt in prompts}
    run_key = json.dumps([source, manifest["identity"], job.layers], sort_keys=True)
    _run_parts(job, kind, unique, run_key, folder / PARTS)
    for prompt in prompts:
        answered = unique[prompt.key]
        prompt.dispersion_state = answered.dispersion_state
        prompt.answer = prompt.answer if answered.answer is None else answered.answer
    agreement, far = _agreement(name, kind, documents, job.force)
    for document in documents:
        document.record.state = document.prompt.dispersion_state
    records = [document.record for document in documents]
    metrics = TaskMetrics(store_name, records)
    notes += [*job.notes, *far]
    manifest["figures"] = {**metrics.summary(), "correct_by": task.correct_by}
    manifest["samples"] = {**source, **agreement, "notes": notes}
    write(folder, metrics, task.category, manifest)
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    print(
        f"{name}: {len(records)} documents, {len(unique)} prompts run"
        + "".join(f"; {key.replace('_', ' ')} {value:.3g}" for key, value in agreement.items()),
        file=sys.stderr,
    )
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
        shutil.rmtree(
            folder / PARTS, ignore_errors=True
        )  # of a run that was killed at its very end
        return True
    raise UsageError(
        f"{folder} holds a finished store of other samples, another model or other layers; remove it or "
        "choose another place"
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
        digest = hashlib.sha256("".join([run_key, *keys]).encode()).hexdigest()
        file = parts / f"{digest[:24]}.states.safetensors"
        if file.exists():
            for prompt, (state, answer) in zip(chunk, load_states(file), strict=True):
                prompt.dispersion_state, prompt.answer = state, answer
        else:
            recording.prefill(job.lm, kind, chunk)
            save_states(file, [(prompt.dispersion_state, prompt.answer) for prompt in chunk])


def _agreement(
    name: str, kind: str, documents: Sequence[_Document], force: bool
) -> tuple[dict[str, float], list[str]]:
    """Compare the model's own answers with the logged ones; refuse another model's."""
    pairs = [(d, d.prompt.answer) for d in documents if d.prompt.answer is not None]
    if not pairs:
        return {}, []
    if kind == "generate_until":
        greedy = [
            (d.logged, answer) for d, answer in pairs if not d.prompt.args[1].get("do_sample")
        ]
        if not greedy:
            return {}, [
                "answers were drawn at random, so it was not checked that this model gave them"
            ]
        same = [str(logged).lstrip().startswith(str(answer).strip()) for logged, answer in greedy]
        share = float(np.mean(same))
        far, figures = share < _AGREEING, {"first_token_agreement": share}
        difference = f"{share:.0%} of the answers begin like the model's own"
    else:
        tokens = [sum(d.prompt.dispersion_state.prompt_tokens) for d, _ in pairs]
        rolling = kind == "loglikelihood_rolling"  # compared by token; an empty text has none
        gaps = [
            abs(float(answer) - float(d.logged)) / (n if rolling else 1)
            for (d, answer), n in zip(pairs, tokens, strict=True)
            if n
        ]
        if not gaps:
            return {}, []
        median, largest = float(np.median(gaps)), float(np.max(gaps))
        far = median > _DIFFERENT
        figures = {"logprob_difference_median": median, "logprob_difference_max": largest}
        difference = (
            f"log-probabilities differ from the logged ones by {median:.2f} nats at the median"
        )
    if far and not force:
        raise HarnessError(
            f"{name}: {difference}: the samples come from another model, tokenizer or prompt template; "
            "name the model that gave the answers, or force it"
        )
    return figures, [f"{difference}: another model, tokenizer or precision"] if far else []
