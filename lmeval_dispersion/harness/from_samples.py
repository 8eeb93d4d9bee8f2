"""Stores from the samples of a finished run: stock lm-eval answered on any backend, one prefill adds vectors.

Prompts, answers, metrics and hashes are the samples' own. The vectors come from lm-eval's own model for
transformers through the request types of :mod:`lmeval_dispersion.harness.requests`, so that prompts are
tokenised, cut and batched as a dispersion run does it: rows and vectors are that run's.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.harness import requests, vllm
from lmeval_dispersion.harness.metrics import TaskMetrics
from lmeval_dispersion.harness.prefill import FOLDER, Prefill, Seen, on_transformers, prompt_key, run_parts
from lmeval_dispersion.harness.records import (
    DocRecord,
    DocState,
    check_judge,
    correctness,
    record_of,
    split_judge,
)
from lmeval_dispersion.harness.samples import LoggedDocument, LoggedRun, LoggedTask, find_run, read_task
from lmeval_dispersion.harness.saving import model_identity, model_manifest, shape_manifest, write
from lmeval_dispersion.model.capture import resolve, split_names
from lmeval_dispersion.store import begin_store, read_store
from lmeval_dispersion.store.format import MANIFEST, sha256

requests.install()

_DIFFERENT = 0.5  # median difference in nats of one answer (of one token, for whole texts): another model
_AGREEING = 0.5  # share of greedy generations that begin as ours

LoggedTasks = Sequence[LoggedTask]


@dataclass(frozen=True)
class _Run:
    """The settings that all tasks of one command share."""

    logged: LoggedRun
    lm: Any
    arguments: Mapping[str, Any]
    output: Path
    layers: list[str]
    judge: str | None
    notes: list[str]
    force: bool
    prefill: Prefill
    writes: bool
    engine: dict[str, Any]
    checked: dict[str, dict[int, Seen]]


def stores_from_samples(
    results: str | Path,
    arguments: Mapping[str, Any],
    output: str | Path,
    *,
    layers: str | Sequence[str] = (),
    tasks: Sequence[str] | None = None,
    judge: str | None = None,
    batch_size: int | str = 8,
    force: bool = False,
    backend: str = "hf",
    base_url: str | None = None,
) -> Path:
    """Fill a store for each task of a run's samples; returns the folder of them all.

    A task is a folder of its own under ``output``, called as the dispersion task is. A finished one of the
    same samples, model and layers is kept, so that a run that was killed goes on where it was.
    """
    run = find_run(results)
    chosen = list(run.samples) if tasks is None else [task.strip() for task in tasks]
    unknown = [task for task in chosen if task not in run.samples]
    if unknown:
        raise UsageError(f"{run.file} has no samples of {unknown[0]!r}; it has {', '.join(run.samples)}")
    one_model, rank = arguments.get("tp_plan") is not None, int(os.environ.get("RANK", "0"))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not one_model:
        raise UsageError(
            "several processes were launched and each would run all prompts; launch one, or let them hold "
            "the model between them with --model-args tp_plan=auto"
        )
    server = _server(backend, base_url, str(arguments["pretrained"]))
    wanted = [vllm.LAYER] if server and not layers else split_names(layers)
    if server and (others := [name for name in wanted if name != vllm.LAYER]):
        raise UsageError(
            f"vllm gives the layer {vllm.LAYER!r} alone, not {others[0]!r}; leave --layer out, or use "
            "--backend hf"
        )
    logged = [read_task(run, task, allow_holes=force) for task in chosen]
    for task in logged:
        metrics = next(iter(task.filters.values()))[0].metrics
        check_judge(task.name, judge, list(task.filters), metrics)
    lm = _model(run, arguments, batch_size)
    notes = _model_notes(run, lm, arguments)
    names = list(dict.fromkeys(site.name for site in resolve(lm.model, wanted)))
    engine: dict[str, Any] = {}
    checked: dict[str, dict[int, Seen]] = {}
    if server:
        engine, checked, more = _check_server(server, lm, logged, judge, force)
        notes += more
    whole = _Run(
        run,
        lm,
        arguments,
        Path(output).expanduser(),
        names,
        judge,
        notes,
        force,
        vllm.on_server(server, lm) if server else on_transformers(lm),
        rank == 0,
        engine,
        checked,
    )
    for task in logged:
        _store_task(whole, task)
    return Path(output)


def _server(backend: str, base_url: str | None, model: str) -> vllm.VllmServer | None:
    if backend == "hf":
        if base_url is not None:
            raise UsageError("--base-url is the address of a vLLM server; add --backend vllm")
        return None
    if backend != "vllm":
        raise UsageError(f"expected a backend of hf, vllm, got {backend!r}")
    if base_url is None:
        raise UsageError(
            f"expected --base-url beside --backend vllm; start a server with `{vllm.start_command(model)}`"
        )
    return vllm.VllmServer(base_url, model)


def _check_server(
    server: vllm.VllmServer, lm: Any, tasks: LoggedTasks, judge: str | None, force: bool
) -> tuple[dict[str, Any], dict[str, dict[int, Seen]], list[str]]:
    """Manifest entries, transformers' states of some documents of all tasks, and notes; refused if off."""
    pairs = [
        (task, i, document) for task in tasks for i, document in enumerate(task.filters[_filter(task, judge)])
    ]
    instances = [_instance(task, document, _kind(task), [vllm.LAYER]) for task, _, document in pairs]
    agreement, by_hf = vllm.check_server(server, lm, instances)
    checked: dict[str, dict[int, Seen]] = {}
    for place, seen in by_hf.items():
        task, i, _ = pairs[place]
        checked.setdefault(task.name, {})[i] = seen
    entries: dict[str, Any] = {"engine": "vllm", "engine_model": server.model()}
    notes = ["vllm gives no log-probabilities of prompts: query_perplexity is not known"]
    if agreement is not None:
        print(f"vllm: {agreement}", file=sys.stderr)
        if not agreement.holds:
            if not force:
                raise vllm.refusal(server, agreement)
            notes.append(f"vllm does not give the states of transformers: {agreement}")
        entries["engine_check"] = agreement.figures
    return entries, checked, notes


def _filter(task: LoggedTask, judge: str | None) -> str:
    return split_judge(judge)[0] or next(iter(task.filters))


def _kind(task: LoggedTask) -> str:
    return requests.REQUEST_TYPES.get(task.output_type, requests.REQUEST_TYPES["loglikelihood"])


def _store_task(run: _Run, task: LoggedTask) -> None:
    folder = run.output / task.store_name
    documents = task.filters[_filter(task, run.judge)]
    source = {
        "results": run.logged.file.name,
        "backend": run.logged.results.get("model_source"),
        "lm_eval": run.logged.results.get("lm_eval_version"),
        "sha256": sha256(run.logged.samples[task.name]),
        "judge": run.judge,
        "engine": run.engine.get("engine"),
    }
    shape = shape_manifest(task.shape, run.lm, dict(run.arguments))
    if _is_done(folder, source, shape["identity"], run.layers):
        print(f"{task.name}: {folder} is there already", file=sys.stderr)
        return
    if run.writes:
        begin_store(folder)
    instances = [_instance(task, document, _kind(task), run.layers) for document in documents]
    unique = {prompt_key(instance): instance for instance in instances}
    # Longest first: what does not fit fails at once, and batches hold prompts of like length.
    ordered = sorted(unique, key=lambda key: (-len(unique[key].args[0]), key))
    key = json.dumps([source, shape["identity"], run.layers], sort_keys=True)
    states = run_parts([unique[k] for k in ordered], folder, key, run.prefill, writes=run.writes)
    if not run.writes:
        return
    seen = dict(zip(ordered, states, strict=True))
    prompts = [seen[prompt_key(instance)] for instance in instances]
    # A server gives no answers: those of transformers to some of the documents stand for them.
    answered = run.checked.get(task.name, {}) if run.engine else dict(enumerate(prompts))
    agreement, remark = _agreement(task, [documents[i] for i in answered], list(answered.values()), run.force)
    records, by = [], None
    for document, prompt in zip(documents, prompts, strict=True):
        name, correct = correctness(document.metrics, split_judge(run.judge)[1])
        by = name or by
        records.append(_record(task, document, prompt.state, correct, _filter(task, run.judge)))
    metrics = TaskMetrics(task.store_name, records, run.layers)
    judged = f"{_filter(task, run.judge)}/{by}" if by is not None and len(task.filters) > 1 else by
    notes = [*task.notes, *run.notes, *remark]
    manifest = {
        **model_manifest(run.lm, dict(run.arguments)),
        "model_args": dict(run.arguments),
        "tasks": {task.store_name: task.version},
        **shape,
        "limit": (run.logged.results.get("config") or {}).get("limit"),
        "figures": {**metrics.summary(), "correct_by": judged},
        "samples": {**source, **run.engine, **agreement, "notes": notes},
    }
    write(folder, metrics, task.category, manifest)
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    print(
        f"{task.name}: {len(documents)} documents, {len(unique)} prompts run"
        + "".join(f"; {key.replace('_', ' ')} {value:.3g}" for key, value in agreement.items()),
        file=sys.stderr,
    )
    for note in [*notes, *(sentence for _, sentence in metrics.remarks())]:
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
    """Compare the results' model and tokenizer with those at hand: differences are refused or noted."""
    results, tokenizer, notes = run.results, lm.tokenizer, []
    tokenizer_known = False
    for kind in ("eos", "bos"):
        logged = results.get(f"tokenizer_{kind}_token")
        if not isinstance(logged, list) or len(logged) != 2 or logged[0] in (None, "None"):
            continue
        tokenizer_known = True
        token = [str(getattr(tokenizer, f"{kind}_token")), str(getattr(tokenizer, f"{kind}_token_id"))]
        if [str(value) for value in logged] != token:
            raise HarnessError(
                f"the samples are of another tokenizer: its {kind} token is {logged}, and "
                f"{arguments['pretrained']} has {token}; name the model that gave the answers"
            )
    if not tokenizer_known:
        notes.append("the results do not tell the tokenizer; it is taken to be the model's token")
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
    task: LoggedTask, documents: Sequence[LoggedDocument], answers: Sequence[Seen], force: bool
) -> tuple[dict[str, float], list[str]]:
    """How far the model's own answers are from the logged ones; another model's are refused."""
    pairs = [(d, s) for d, s in zip(documents, answers, strict=True) if s.state.prompt_tokens]
    if not pairs:
        return {}, []
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
