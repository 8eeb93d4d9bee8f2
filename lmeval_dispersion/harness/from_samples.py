"""Stores from the samples of a finished run: stock lm-eval answered on any backend, one prefill adds vectors.

Prompts, answers, metrics and hashes are the samples' own. The vectors come from lm-eval's own model for
transformers through the request types of :mod:`lmeval_dispersion.harness.requests`, so that prompts are
tokenised, cut and batched as a dispersion run does it: rows and vectors are that run's.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from numpy.typing import NDArray

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.harness import requests
from lmeval_dispersion.harness.compat import plain, state_of
from lmeval_dispersion.harness.metrics import TaskMetrics
from lmeval_dispersion.harness.records import (
    DocRecord,
    DocState,
    check_judge,
    correctness,
    record_of,
    split_judge,
)
from lmeval_dispersion.harness.samples import LoggedDocument, LoggedRun, LoggedTask, find_run, read_task
from lmeval_dispersion.harness.saving import document_table, model_identity, model_manifest, shape_manifest
from lmeval_dispersion.model.capture import resolve, split_names
from lmeval_dispersion.store import begin_store, read_store, write_store
from lmeval_dispersion.store.format import MANIFEST, sha256

requests.install()

_PART = 1024  # prompts whose states are written together: what a killed run loses at most
_PARTS = ".parts"
_DIFFERENT = 0.5  # median difference in nats of one answer (of one token, for whole texts): another model
_AGREEING = 0.5  # share of greedy generations that begin as ours


@dataclass(frozen=True)
class _Seen:
    """What one prompt brought back: its state, and the model's own answer to check the logged one by."""

    state: DocState
    answer: float | str


def stores_from_samples(
    results: str | Path,
    arguments: Mapping[str, Any],
    output: str | Path,
    *,
    layers: str | Sequence[str] = "last",
    tasks: Sequence[str] | None = None,
    judge: str | None = None,
    batch_size: int | str = 8,
    force: bool = False,
) -> Path:
    """Fill a store for each task of a run's samples; returns the folder of them all.

    A task is a folder of its own under ``output``, called as the dispersion task is. A finished one of the
    same samples, model and layers is kept, so that a run that was killed goes on where it was.

    Args:
        results: Folder or results file of a run of lm-eval with ``--log_samples``.
        arguments: Of lm-eval's model for transformers, with ``pretrained``: the model that gave the answers.
        output: Folder of the stores.
        layers: Names as :mod:`lmeval_dispersion.model.capture` takes them; the first is the default.
        tasks: Only these; default: all that have samples.
        judge: ``METRIC`` or ``FILTER/METRIC`` that tells correct answers.
        batch_size: Prompts at a time, or ``auto``.
        force: Go on where documents are missing or the model's answers are not the logged ones.

    Raises:
        HarnessError: The samples are not whole, or those of another model or tokenizer.
        UsageError: No such task or layer, or another store in the folder.
    """
    run = find_run(results)
    chosen = list(run.samples) if tasks is None else [task.strip() for task in tasks]
    unknown = [task for task in chosen if task not in run.samples]
    if unknown:
        raise UsageError(f"{run.file} has no samples of {unknown[0]!r}; it has {', '.join(run.samples)}")
    logged = [read_task(run, task, allow_holes=force) for task in chosen]
    for task in logged:
        metrics = next(iter(task.filters.values()))[0].metrics
        check_judge(task.name, judge, list(task.filters), metrics)
    lm = _model(run, arguments, batch_size)
    notes = _model_notes(run, lm, arguments)
    names = list(dict.fromkeys(site.name for site in resolve(lm.model, split_names(layers))))
    for task in logged:
        _store_task(run, task, lm, arguments, Path(output), names, judge, notes, force)
    return Path(output)


def _store_task(
    run: LoggedRun,
    task: LoggedTask,
    lm: Any,
    arguments: Mapping[str, Any],
    output: Path,
    layers: list[str],
    judge: str | None,
    notes: list[str],
    force: bool,
) -> None:
    folder = output.expanduser() / task.store_name
    chosen = split_judge(judge)[0] or next(iter(task.filters))
    documents = task.filters[chosen]
    source = {
        "results": run.file.name,
        "backend": run.results.get("model_source"),
        "lm_eval": run.results.get("lm_eval_version"),
        "sha256": sha256(run.samples[task.name]),
        "judge": judge,
    }
    shape = shape_manifest(task.shape, lm, dict(arguments))
    if _is_done(folder, source, shape["identity"], layers):
        print(f"{task.name}: {folder} is there already", file=sys.stderr)
        return
    begin_store(folder)
    kind = requests.REQUEST_TYPES.get(task.output_type, requests.REQUEST_TYPES["loglikelihood"])
    instances = [_instance(task, document, kind, layers) for document in documents]
    unique = {_key(instance): instance for instance in instances}
    # Longest first: what does not fit fails at once, and batches hold prompts of like length.
    ordered = sorted(unique, key=lambda key: (-len(unique[key].args[0]), key))
    key = json.dumps([source, shape["identity"], layers], sort_keys=True)
    seen = dict(zip(ordered, _run(lm, [unique[k] for k in ordered], folder, key), strict=True))
    found = [seen[_key(instance)] for instance in instances]
    agreement, remark = _agreement(task, documents, found, force)
    records, by = [], None
    for document, one in zip(documents, found, strict=True):
        name, correct = correctness(document.metrics, split_judge(judge)[1])
        by = name or by
        records.append(_record(task, document, one.state, correct, chosen))
    metrics = TaskMetrics(task.store_name, records, layers)
    metrics.warn()
    judged = f"{chosen}/{by}" if by is not None and len(task.filters) > 1 else by
    told = [*task.notes, *notes, *remark]
    write_store(
        folder,
        documents=document_table(task.store_name, metrics.records, task.category),
        vectors=metrics.vectors,
        manifest={
            **model_manifest(lm, dict(arguments)),
            "model_args": dict(arguments),
            "tasks": {task.store_name: task.version},
            "default_layer": metrics.layers[0],
            **shape,
            "limit": (run.results.get("config") or {}).get("limit"),
            "figures": {**metrics.summary(), "correct_by": judged},
            "samples": {**source, **agreement, "notes": told},
        },
    )
    shutil.rmtree(folder / _PARTS, ignore_errors=True)
    print(
        f"{task.name}: {len(documents)} documents, {len(unique)} prompts run"
        + "".join(f"; {key.replace('_', ' ')} {value:.3g}" for key, value in agreement.items()),
        file=sys.stderr,
    )
    for note in told:
        print(f"{task.name}: note: {note}", file=sys.stderr)


def _is_done(
    folder: Path, source: Mapping[str, Any], identity: Mapping[str, str], layers: Sequence[str]
) -> bool:
    """Whether a finished store of the same samples, model and layers is there; another one is refused."""
    if not (folder / MANIFEST).exists():
        return False
    manifest = read_store(folder).manifest
    there = manifest.get("samples") or {}
    same = all(there.get(key) == value for key, value in source.items())
    if same and manifest.get("identity") == identity and set(manifest["layers"]) == set(layers):
        return True
    raise UsageError(
        f"{folder} holds a finished store of other samples, another model or other layers; remove it or "
        "choose another place"
    )


def _model(run: LoggedRun, arguments: Mapping[str, Any], batch_size: int | str) -> Any:
    from lm_eval.models.huggingface import HFLM

    size = int(batch_size) if str(batch_size).isdigit() else str(batch_size)
    options: dict[str, Any] = {"batch_size": size, **arguments}
    if "device" not in options:
        import torch

        options["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    length = run.results.get("max_length")
    if isinstance(length, int) and length > 0:
        options.setdefault("max_length", length)  # prompts are cut where the backend cut them
    # Values of a command line come as text.
    texts = {k: int(v) for k, v in options.items() if isinstance(v, str) and v.isdigit()}
    words = {"true": True, "false": False}
    flags = {k: words[v.lower()] for k, v in options.items() if isinstance(v, str) and v.lower() in words}
    try:
        lm = HFLM(**{**options, **texts, **flags})
    except (OSError, ValueError) as error:
        raise HarnessError(f"{arguments['pretrained']} cannot be loaded: {error}") from error
    requests.check_model(lm, "a store from samples")
    return lm


def _model_notes(run: LoggedRun, lm: Any, arguments: Mapping[str, Any]) -> list[str]:
    """What the results tell of model and tokenizer, against the model at hand: refused or noted."""
    results, tokenizer, notes = run.results, lm.tokenizer, []
    told = False
    for kind in ("eos", "bos"):
        logged = results.get(f"tokenizer_{kind}_token")
        if not isinstance(logged, list) or len(logged) != 2 or logged[0] in (None, "None"):
            continue
        told = True
        own = [str(getattr(tokenizer, f"{kind}_token")), str(getattr(tokenizer, f"{kind}_token_id"))]
        if [str(value) for value in logged] != own:
            raise HarnessError(
                f"the samples are of another tokenizer: its {kind} token is {logged}, and "
                f"{arguments['pretrained']} has {own}; name the model that gave the answers"
            )
    if not told:
        notes.append("the results do not tell the tokenizer; it is taken to be the model's own")
    if not isinstance(results.get("max_length"), int):
        notes.append(
            f"the results do not tell the backend's context length; prompts are cut at {lm.max_length} tokens"
        )
    config = results.get("config") or {}
    commit = config.get("model_sha")
    identity = model_identity(lm, dict(arguments))
    if commit and "@" in identity.get("weights", "") and not identity["weights"].endswith(str(commit)):
        raise HarnessError(
            f"the samples are of commit {commit}, and the model is {identity['weights']}; pass --revision"
        )
    dtype = str(config.get("model_dtype") or "").removeprefix("torch.")
    if dtype and dtype != identity.get("dtype"):
        notes.append(f"the answers were given in {dtype}, and the vectors are of {identity.get('dtype')}")
    named = results.get("model_name")
    if named and str(named) != str(arguments["pretrained"]):
        notes.append(f"the samples are of {named!r}, and the vectors of {arguments['pretrained']!r}")
    return notes


def _instance(task: LoggedTask, document: LoggedDocument, kind: str, layers: list[str]) -> Instance:
    instance = Instance(
        request_type=kind,
        doc={},
        arguments=document.arguments[0],
        idx=0,
        metadata=(task.name, document.doc_id, 1),
    )
    instance.query = document.query
    instance.dispersion_layers = tuple(layers)
    return instance


def _key(instance: Instance) -> str:
    """Equal for prompts that need one pass only."""
    return json.dumps([instance.args, instance.query], sort_keys=True, default=str)


def _run(lm: Any, instances: Sequence[Instance], folder: Path, key: str) -> Iterator[_Seen]:
    """States of all instances in their order, in parts that outlive a process that is killed."""
    parts = folder / _PARTS
    parts.mkdir(exist_ok=True)
    for start in range(0, len(instances), _PART):
        part = instances[start : start + _PART]
        digest = hashlib.sha256(f"{key}{[_key(i) for i in part]}".encode()).hexdigest()
        file = parts / f"{start:08d}-{digest[:16]}.npz"
        if not file.exists():
            answers = requests.prefilled(lm, part)
            seen = [_Seen(_state(answer), plain(answer)) for answer in answers]
            temporary = file.with_suffix(".tmp.npz")
            arrays: dict[str, Any] = _arrays(seen)
            np.savez(temporary, **arrays)
            temporary.replace(file)
        yield from _from_arrays(file, part)


def _state(answer: Any) -> DocState:
    state = state_of(answer)
    if state is None:
        raise HarnessError("a prompt came back without its state; report this with your versions")
    return state


def _arrays(seen: Sequence[_Seen]) -> dict[str, NDArray[Any]]:
    states = [one.state for one in seen]
    layers = next((list(state.vectors) for state in states if state.vectors), [])
    plainly = [one.answer[0] if isinstance(one.answer, tuple) else one.answer for one in seen]
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


def _from_arrays(file: Path, part: Sequence[Instance]) -> Iterator[_Seen]:
    with np.load(file) as arrays:
        held = {name: arrays[name] for name in arrays.files}
    start = 0
    for i, instance in enumerate(part):
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
        yield _Seen(state, held["answer"][i].item())
        start = stop


def _record(
    task: LoggedTask, document: LoggedDocument, state: DocState, correct: float, filter_name: str
) -> DocRecord:
    rolling = task.output_type == "loglikelihood_rolling"
    record = record_of(
        document.doc,
        replace(
            state,
            doc_id=document.doc_id,
            vectors=dict(state.vectors),
            continuations=document.continuations,
            prompt_hash=document.prompt_hash,
        ),
        document.answers,
        doc_id=document.doc_id,
        correct=correct,
        target=None if rolling else document.target,
        choices=task.output_type == "multiple_choice" and not document.several_contexts,
        alias=task.alias,
        filter_name=filter_name,
    )
    return replace(record, doc_hash=document.doc_hash)


def _agreement(
    task: LoggedTask, documents: Sequence[LoggedDocument], found: Sequence[_Seen], force: bool
) -> tuple[dict[str, float], list[str]]:
    """How far the model's own answers are from the logged ones; another model's are refused.

    Returns:
        Figures for the manifest, and what must be said of them.
    """
    pairs = [(d, s) for d, s in zip(documents, found, strict=True) if s.state.prompt_tokens]
    if task.output_type == "generate_until":
        greedy = [(d, s) for d, s in pairs if not _samples(d)]
        if not greedy:
            return {}, ["answers were drawn at random: that this model gave them is not checked"]
        same = [str(d.first).lstrip().startswith(str(s.answer).strip()) for d, s in greedy]
        share = float(np.mean(same))
        far, figures = share < _AGREEING, {"first_token_agreement": share}
        what = f"{share:.0%} of the answers begin as the model's own"
    else:
        rolling = task.output_type == "loglikelihood_rolling"
        tokens = [sum(s.state.prompt_tokens) if rolling else 1 for _, s in pairs]
        gaps = [abs(float(s.answer) - float(d.first)) / n for (d, s), n in zip(pairs, tokens, strict=True)]
        median, largest = float(np.median(gaps)), float(np.max(gaps))
        far = median > _DIFFERENT
        figures = {"logprob_difference_median": median, "logprob_difference_max": largest}
        what = f"log-probabilities differ from the logged ones by {median:.2f} nats at the median"
    if far and not force:
        raise HarnessError(
            f"{task.name}: {what}: the samples are of another model, tokenizer or prompt template; name the "
            "model that gave the answers, or pass --force"
        )
    return figures, [f"{what}: another model, tokenizer or precision"] if far else []


def _samples(document: LoggedDocument) -> bool:
    """Whether a generation was drawn at random."""
    settings = document.arguments[0][1] if len(document.arguments[0]) > 1 else {}
    return bool(isinstance(settings, dict) and settings.get("do_sample"))
