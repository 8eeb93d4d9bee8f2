"""The samples of a finished lm-eval run (``--log_samples``) on any backend: read, checked and scored.

No model, torch or lm-eval is needed. :func:`read_logged` gives them as a store without vectors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from lmeval_dispersion.errors import HarnessError, require_extra
from lmeval_dispersion.files import hashed
from lmeval_dispersion.judging import (
    JUDGES,
    MISFITS,
    NamedMetrics,
    chosen_metric,
    has_judge,
    hash_of,
    lacking,
    misfit,
    request_arguments,
    score_of,
    sorted_by_filter,
    unscored,
)
from lmeval_dispersion.logs import (
    Line,
    LoggedRun,
    config_of,
    filter_names,
    find_run,
    is_log,
    read_lines,
    section,
    writable,
)
from lmeval_dispersion.statistics import mcnemar_p
from lmeval_dispersion.store.format import scalar_fields
from lmeval_dispersion.store.groups import TaskGroup, groups_of
from lmeval_dispersion.store.identity import SUFFIX, prompt_manifest
from lmeval_dispersion.store.reading import Store, places_of

_NEEDED = ("doc", "target", "arguments", "resps", "filtered_resps")
_SHOWN = 5  # most documents or tasks in a message
_MOST_SUBSETS = 12  # choices of which every subset is tried
_MASS_ERROR = 1e-9  # of a sum of probabilities
_FILTERS_DIFFER = 0.01  # p below which two filters of one task differ by more than chance


@dataclass(frozen=True)
class Sample:
    """One document under one filter: prompt, answer and score."""

    doc: Any
    arguments: list[tuple[Any, ...]]  # its requests' arguments
    columns: dict[str, Any]  # from :func:`document_columns`
    answer: float | str  # to the first request: log-probability or text
    metrics: dict[str, Any]  # lm-eval's own
    correct: float = math.nan  # value of the scoring metric
    block: Mapping[str, Any] = field(
        default_factory=dict
    )  # a first block's probabilities, in a race
    line: int = 0  # in its file
    hit: bool | None = None  # whether the likeliest choice is the target; None if unknown

    @property
    def doc_hash(self) -> str:
        """The hash of the document."""
        return str(self.columns["doc_hash"])

    def likely(self, score: float) -> float:
        """Probability of the right answer; for generated text its mean with ``score``. NaN if unknown.

        No model writes the exact target of a worked answer, so the score orders these.
        """
        known = float(self.block.get("probability", self.columns["probability"]))
        return (known + score) / 2 if isinstance(self.answer, str) else known


@dataclass(frozen=True)
class JudgedTask:
    """One task's samples under the filter that scores them."""

    config: Mapping[str, Any]
    samples: dict[int, Sample]  # by index, in order
    filter: str
    correct_by: (
        str | None
    )  # the metric that decides correct answers; of several filters, with the filter
    prompts: dict[str, Any]  # from :func:`~lmeval_dispersion.store.identity.prompt_manifest`
    category: str | None  # alias of the group that holds it
    version: Any
    notes: list[str]  # sentences on facts that the file lacks
    filters: list[
        str
    ]  # sentences on filters that differ by more than chance from the one that scores
    as_named: bool  # whether it has the metric that was named


def judged_task(
    run: LoggedRun,
    task: str,
    judge: str | None = None,
    *,
    allow_holes: bool = False,
    lenient: bool = False,
) -> JudgedTask:
    """One task's samples, checked against the run's results and for consistency.

    ``judge`` is ``[TASK=][FILTER/]METRIC``, several with commas (None: the first known). HarnessError if the
    task lacks it (``lenient``: the first known then, unless it names the task), or is damaged or, unless
    ``allow_holes``, incomplete.
    """
    results = run.results_of(task)
    file = run.samples[task]
    config = config_of(results, task)
    filters, repeated = _read(file, config, names=filter_names(results, task))
    count = section(section(results, "n-samples"), task).get("effective")
    notes = _holes(file, filters, count if isinstance(count, int) else None, allow_holes)
    notes += section(results, "inspect").get("notes", [])
    if repeated:
        notes.append(
            f"{repeated} documents were logged twice alike, as padded ranks do, and count once"
        )
    named = NamedMetrics.of(judge)
    names = names_of(run, task)
    judge = named.judge(*names)
    as_named = judge is not None and has_judge(filters, judge)
    is_needed = as_named or not lenient or named.has_own(*names)
    chosen, metric = chosen_metric(task, filters, judge if is_needed else None)
    samples: dict[int, Sample] = {}
    for doc_id, sample in sorted(known_probabilities(filters[chosen]).items()):
        samples[doc_id] = replace(sample, correct=score_of(file, sample, metric))
    correct_by = f"{chosen}/{metric}" if metric is not None and len(filters) > 1 else metric
    if metric is None:
        notes.append(unscored(filters[chosen]))
    return JudgedTask(
        config=config or {"output_type": _kind_of(next(iter(samples.values())).arguments)},
        samples=samples,
        filter=chosen,
        correct_by=correct_by,
        prompts=prompt_manifest(
            config,
            fewshot_seed=section(results, "config").get("fewshot_seed"),
            chat_template=results.get("chat_template_sha"),
            multiturn=bool(results.get("fewshot_as_multiturn")),
            system=results.get("system_instruction"),
        ),
        category=_category(results, task),
        version=section(results, "versions").get(task),
        notes=notes,
        filters=[]
        if judge or metric is None
        else _filters_apart(task, file, filters, chosen, metric),
        as_named=as_named,
    )


def stock_name(task: str) -> str:
    """The stock task's name, without the group that 0.5 puts before it.

    >>> stock_name("mmlu_stem::mmlu_anatomy"), stock_name("arc_easy_dispersion")
    ('mmlu_anatomy', 'arc_easy')
    """
    return task.rpartition("::")[2].removesuffix(SUFFIX)


def names_of(run: LoggedRun, task: str) -> list[str]:
    """The names of a run's task for ``--metric``: its own, the stock task's, and of the groups around it."""
    holders = defaultdict[str, list[str]](list)
    for group, members in section(run.results_of(task), "group_subtasks").items():
        for member in members if isinstance(members, list) else ():
            if isinstance(member, str):
                holders[member].append(group)
    names = dict.fromkeys([task, stock_name(task)])
    above = [task]
    seen = {task}
    while above:
        for group in holders[above.pop(0)]:
            if group not in seen:
                seen.add(group)
                above.append(group)
                names |= {group: None, group.removesuffix(SUFFIX): None}
    return list(names)


def check_named(run: LoggedRun, tasks: Iterable[str], judge: str | None) -> None:
    """Raise UsageError for a metric in ``judge`` of a task or group that is none of the run's ``tasks``."""
    named = NamedMetrics.of(judge)
    if named.own:
        names = chain.from_iterable(names_of(run, task) for task in tasks)
        named.check(list(dict.fromkeys(names)))


def is_logged(place: str | Path) -> bool:
    """Whether a path holds results or samples of lm-eval rather than a store."""
    path = Path(place).expanduser()
    if path.is_dir() and places_of(path):
        return False
    return is_log(path)


def read_logged(place: str | Path, judge: str | None = None) -> Store:
    """A run's samples as a store without layers, with the stock tasks' names.

    ``judge`` is ``[TASK=][FILTER/]METRIC``, several with commas; a task without it is scored by the first
    known.

    Raises:
        UsageError: ``judge`` names a task or group that the run has not.
        HarnessError: No samples, those of several runs, or a file that is cut off or was changed; no task
            has the named metric.
    """
    require_extra("audit", "a run's samples")
    import pandas as pd

    run = find_run(place)
    named = NamedMetrics.of(judge)
    check_named(run, run.samples, judge)
    tasks = {}
    for name in sorted(run.samples):
        tasks[name] = judged_task(run, name, judge, allow_holes=True, lenient=len(run.samples) > 1)
    by_default = [task for name, task in tasks.items() if not named.has_own(*names_of(run, name))]
    if named.default and by_default and not any(task.as_named for task in by_default):
        raise HarnessError(f"no task of {run.file} has {named.default!r} to judge answers by")
    rows: list[dict[str, Any]] = []
    parts: list[tuple[Path, dict[str, Any]]] = []
    notes: list[str] = []
    for name, task in tasks.items():
        stock = stock_name(name)
        for doc_id, sample in task.samples.items():
            rows.append(_row(stock, doc_id, sample, task.category))
        notes += [f"{name}: {note}." for note in task.notes]
        if task.correct_by is not None and task.correct_by not in JUDGES[:2]:
            notes.append(f"{name}: answers are judged by {task.correct_by}.")
        parts.append(
            (run.file, {**_about(run, name), **task.prompts, "tasks": {stock: task.version}})
        )
    manifests = [manifest for _, manifest in parts]
    shared = {
        key: value for key, value in manifests[0].items() if all(m[key] == value for m in manifests)
    }
    manifest = {
        **shared,
        "tasks": {task: version for m in manifests for task, version in m["tasks"].items()},
        "layers": [],
        "width": {},
        "default_layer": "",
        "notes": notes,
        "filters": [sentence for task in tasks.values() for sentence in task.filters],
        "judges": {stock_name(name): task.correct_by for name, task in tasks.items()},
        "lower_is_better": _lower_is_better(run, tasks),
        "groups": _groups(run),
    }
    return Store(run.file, manifest, pd.DataFrame(rows), parts)


def _about(run: LoggedRun, task: str) -> dict[str, Any]:
    config = section(run.results_of(task), "config")
    return {
        "model": run.model,
        "revision": config.get("model_sha"),
        "limit": config.get("limit"),
        "created": run.date,
        "by_inspect": run.by_inspect,
    }


def _lower_is_better(run: LoggedRun, tasks: Mapping[str, JudgedTask]) -> list[str]:
    """The stock tasks of which lower scores are the better ones, by the results."""
    names = []
    for name, task in tasks.items():
        better = section(section(run.results_of(name), "higher_is_better"), name)
        if task.correct_by is not None and better.get(task.correct_by.rpartition("/")[2]) is False:
            names.append(stock_name(name))
    return names


def _groups(run: LoggedRun) -> dict[str, TaskGroup]:
    """lm-eval's groups in all of the run's results, the latest first."""
    groups = groups_of(run.results, stock_name)
    for results in {id(results): results for results in run.apart.values()}.values():
        groups = {**groups_of(results, stock_name), **groups}
    return groups


def _row(task: str, doc_id: int, sample: Sample, category: str | None) -> dict[str, Any]:
    """A document as a row of a store."""
    return {
        **sample.columns,
        "doc_id": doc_id,
        "task": task,
        "subject": sample.columns["subject"] or task,
        "category": category,
        "correct": sample.correct,
        "query_perplexity": math.nan,
        "prompt_tokens": 0,
        "truncated": False,
        "text": None,
    }


# --- one line of a file ------------------------------------------------------------------------------------


def by_filter(
    file: Path, config: Mapping[str, Any], text: str | None = None
) -> dict[str, dict[int, Sample]]:
    """A file, or its ``text``: filter -> document index -> sample; HarnessError for a broken one."""
    return _read(file, config, text)[0]


def _read(
    file: Path, config: Mapping[str, Any], text: str | None = None, names: Sequence[str] = ()
) -> tuple[dict[str, dict[int, Sample]], int]:
    """:func:`by_filter`, and how many documents were logged twice alike."""
    return sorted_by_filter(
        file, ((line, _sample(line, config)) for line in read_lines(file, text)), names
    )


def _sample(line: Line, config: Mapping[str, Any]) -> Sample:
    missing = [key for key in _NEEDED if key not in line.content]
    if missing:
        raise lacking(line, missing[0])
    try:
        return _converted(line, config)
    except MISFITS as error:
        raise misfit(line, error) from None


def _converted(line: Line, config: Mapping[str, Any]) -> Sample:
    """The sample of a line; raises one of ``MISFITS`` where a value has another form."""
    logged = line.content
    arguments = request_arguments(logged["arguments"])
    if not arguments or not arguments[0] or not isinstance(arguments[0][0], str):
        raise HarnessError(
            f"{line.place}: document {line.doc_id} has no prompt as text; log it with log_samples"
        )
    kind = str(config.get("output_type") or _kind_of(arguments))
    alias = config.get("task_alias")
    options = options_of(arguments, kind)
    target = _target(logged["target"], kind)
    columns = document_columns(
        logged["doc"],
        arguments[0][0],
        [_answer(answer, kind)[1] for answer in _filtered(logged["filtered_resps"], config)],
        target=target,
        options=options,
        alias=alias if isinstance(alias, str) else None,
    )
    for name in ("doc_hash", "prompt_hash"):
        if logged.get(name) not in (None, columns[name]):
            raise HarnessError(
                f"{line.place}: document {line.doc_id} is not the one that was run (its {name} differs): the "
                "file was changed; run it again"
            )
    for name in ("subject", "target", "prediction"):
        columns[name] = None if columns[name] is None else writable(columns[name])
    answer = _answer(logged["resps"][0][0], kind)[0]
    block = logged.get("block") or {}
    return Sample(
        doc=logged["doc"],
        arguments=arguments,
        columns=columns,
        answer=answer,
        metrics=line.metrics,
        block=block,
        line=line.number,
        hit=_hit(columns["logprobs"], options, target, line.metrics, config),
    )


def _hit(
    logprobs: Sequence[float],
    options: Sequence[str],
    target: Any,
    metrics: Mapping[str, Any],
    config: Mapping[str, Any],
) -> bool | None:
    """Whether the likeliest choice is a target, by length where lm-eval scores that; None if unknown."""
    right = right_of(options, target)
    if not right or len(logprobs) < len(options):
        return None
    values = np.array(logprobs[: len(options)])
    if "acc" not in metrics and "acc_norm" in metrics:
        space = config.get("target_delimiter", " ")
        lengths = [
            len(option.removeprefix(space if isinstance(space, str) else " ")) for option in options
        ]
        values = values / np.maximum(lengths, 1)
    return int(np.argmax(values)) in right


def _filtered(logged: Any, config: Mapping[str, Any]) -> list[Any]:
    """The filtered answer to each request; 0.5 keeps a list of the repeats of each."""
    if not isinstance(logged, list) or not logged:
        raise TypeError("expected `filtered_resps` to be a list of answers")
    # 0.5's configurations have this key; log-probabilities without a configuration show it themselves.
    later = "multiple_targets" in config
    if not config and isinstance(logged[0], list) and logged[0] and isinstance(logged[0][0], list):
        later = True
    return [repeats[0] if later else repeats for repeats in logged]


def _kind_of(arguments: Sequence[tuple[Any, ...]]) -> str:
    """lm-eval's type of the task, by a document's requests."""
    if len(arguments[0]) == 1:
        return "loglikelihood_rolling"
    if isinstance(arguments[0][1], dict):
        return "generate_until"
    return "multiple_choice" if len(arguments) > 1 else "loglikelihood"


def document_columns(
    doc: Any,
    prompt: str,
    answers: Sequence[Any],
    *,
    target: Any,
    options: Sequence[str],
    alias: str | None,
    encode: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """A store's columns for one document, from its requests and answers.

    ``answers`` are the filtered answers to all requests. ``options`` are the choices' texts, empty without
    choices; ``target`` is a text or an index into them. ``encode`` makes JSON of values that are not plain.
    """
    pairs = [a for a in answers if isinstance(a, tuple) and len(a) == 2 and isinstance(a[0], float)]
    logprobs = [float(a[0]) for a in pairs] or [float(a) for a in answers if isinstance(a, float)]
    prediction = None
    right: list[int] = []
    if options:
        texts = [text.strip() for text in options]
        right = right_of(options, target)
        prediction = texts[int(np.argmax(logprobs[: len(texts)]))] if logprobs else None
        if isinstance(target, int) and 0 <= target < len(texts):
            target = texts[target]
    elif isinstance(answers[0], str):
        prediction = answers[0]
    subject = doc.get("subject") if isinstance(doc, Mapping) else None
    return {
        **scalar_fields(doc),
        "subject": subject if isinstance(subject, str) else alias,
        "doc_hash": hash_of(doc, encode),
        "prompt_hash": hashed(prompt),
        "prediction": prediction,
        "target": None if target is None else str(target),
        "logprobs": logprobs,
        "probability": right_probability(logprobs[: len(options)], right),
    }


def right_of(options: Sequence[str], target: Any) -> list[int]:
    """Indices of the choices that are the target: its index, a list of these, or its text."""
    texts = [text.strip() for text in options]
    targets = target if isinstance(target, list) else [target]
    if isinstance(target, int) and 0 <= target < len(texts):
        target = texts[target]
    return [i for i, text in enumerate(texts) if i in targets or text == target]


def known_probabilities(samples: Mapping[int, Sample]) -> dict[int, Sample]:
    """A task's samples, with a probability of the right answer only where they show which answers are right.

    A task may have its own scoring, which samples do not show. So the probability of the targets stays where
    lm-eval's accuracy is, in every document with finite log-probabilities, whether the likeliest choice is a
    target. Where that accuracy is itself a probability of some choices (truthfulqa_mc2), it takes its place.
    """
    finite = [sample for sample in samples.values() if _finite(sample)]
    if any(sample.hit is not None for sample in finite) and all(map(_hit_as_scored, finite)):
        return dict(samples)
    masses = _are_masses(finite)
    found = dict(samples)
    for doc_id, sample in samples.items():
        probability = math.nan
        if masses and _finite(sample):
            probability = float(sample.metrics["acc"])
        if not math.isnan(probability) or not math.isnan(sample.columns["probability"]):
            found[doc_id] = replace(sample, columns={**sample.columns, "probability": probability})
    return found


def _finite(sample: Sample) -> bool:
    """Whether the log-probabilities of a sample's choices are an answer."""
    values = np.array(sample.columns["logprobs"], dtype=np.float64)
    return bool(np.isfinite(values).any() and (values < np.inf).all())


def _hit_as_scored(sample: Sample) -> bool:
    """Whether lm-eval's accuracy is that the likeliest choice is the target."""
    score = sample.metrics.get("acc", sample.metrics.get("acc_norm"))
    if score is None or score != score:
        return True  # no score contradicts nothing
    return sample.hit is not None and isinstance(score, int | float) and score == float(sample.hit)


def _are_masses(samples: Sequence[Sample]) -> bool:
    """Whether lm-eval's accuracy is a probability in all samples: most lie between 0 and 1."""
    scores = [sample.metrics.get("acc") for sample in samples]
    between = sum(isinstance(score, float) and 0 < score < 1 for score in scores)
    return 2 * between > len(samples) and all(map(_is_mass, samples))


def _is_mass(sample: Sample) -> bool:
    """Whether lm-eval's accuracy is the probability of some of the choices."""
    score = sample.metrics.get("acc")
    values = np.array(sample.columns["logprobs"], dtype=np.float64)
    if not isinstance(score, float) or len(values) < 2:
        return False
    shares = np.exp(values - values.max())
    shares /= shares.sum()
    sums = np.cumsum(shares)
    if len(shares) <= _MOST_SUBSETS:
        sums = np.zeros(1)
        for share in shares:
            sums = np.concatenate([sums, sums + share])
    return bool((np.abs(sums - score) < _MASS_ERROR).any())


def right_probability(logprobs: Sequence[float], right: Sequence[int]) -> float:
    """Probability that the choices give to the right ones, by index; NaN if unknown.

    The choices' probabilities are scaled to sum to one (softmax).

    >>> right_probability([-1.0, -1.0, -1.0, -1.0], [2])
    0.25
    """
    logs = np.asarray(logprobs, dtype=np.float64)
    if not right or not np.isfinite(logs).any() or not (logs < np.inf).all():
        return math.nan
    shares = np.exp(logs - logs.max())
    return float(shares[list(right)].sum() / shares.sum())


def options_of(arguments: Sequence[tuple[Any, ...]], output_type: str) -> list[str]:
    """A document's choices, from its requests; empty if its contexts differ (Winogrande)."""
    contexts = {context for context, *_ in arguments if context}
    if output_type != "multiple_choice" or len(contexts) > 1:
        return []
    # Mutual information asks each choice without a context, too.
    return [continuation for context, continuation, *_ in arguments if context or not contexts]


def _answer(logged: Any, kind: str) -> tuple[float | str, Any]:
    """A logged answer as number or text, and in lm-eval's form: numbers are logged as text."""
    if kind == "generate_until":
        text = writable(logged if isinstance(logged, str) else str(logged))
        return text, text if isinstance(logged, str) else logged
    if isinstance(logged, list):
        value = float(logged[0])
        greedy = len(logged) > 1 and str(logged[1]) == "True"
        return value, (value, greedy)
    return float(logged), float(logged)


def _target(logged: Any, kind: str) -> Any:
    """The task's target, which lm-eval logs as text; a rolling task's is the whole text."""
    if kind == "loglikelihood_rolling" or logged in (None, "None"):
        return None
    if (
        kind == "multiple_choice"
        and isinstance(logged, str)
        and logged.isascii()
        and logged.isdigit()
    ):
        return int(logged)
    return logged


def _filters_apart(
    task: str, file: Path, filters: Mapping[str, Mapping[int, Sample]], chosen: str, metric: str
) -> list[str]:
    """A sentence for each filter whose right answers differ from the chosen one's by more than chance."""
    sentences = []
    for name, documents in filters.items():
        shared = sorted(documents.keys() & filters[chosen].keys())
        if name == chosen or not any(metric in documents[i].metrics for i in shared):
            continue
        first = np.array([score_of(file, filters[chosen][i], metric) for i in shared])
        other = np.array([score_of(file, documents[i], metric) for i in shared])
        if not np.isin([first, other], (0.0, 1.0)).all():
            continue
        gained = int((other > first).sum())
        lost = int((other < first).sum())
        if mcnemar_p(gained, lost) < _FILTERS_DIFFER:
            sentences.append(
                f"{task}: {chosen} {100 * first.mean():.0f} %, {name} {100 * other.mean():.0f} %; "
                f"`--metric {name}/{metric}` judges by the other."
            )
    return sentences


# --- missing documents -------------------------------------------------------------------------------------


def _holes(
    file: Path, filters: Mapping[str, Mapping[int, Any]], count: int | None, allowed: bool
) -> list[str]:
    """A note on missing documents, or HarnessError if that is not allowed."""
    present = set().union(*filters.values())
    expected = len(present) if count is None else int(count)
    absent = {i for documents in filters.values() for i in present - set(documents)}
    uneven = bool(absent)
    if len(present) < expected:
        absent |= set(range(expected)) - present
    if not absent:
        return []
    named = ", ".join(map(str, sorted(absent)[:_SHOWN])) + (", …" if len(absent) > _SHOWN else "")
    if uneven or not allowed:
        raise HarnessError(
            f"{file} lacks {len(absent)} of {max(expected, len(present))} documents ({named}); run it "
            "again, or force it where they were left out on purpose (samples)"
        )
    return [f"{len(absent)} of {expected} documents are not in the samples ({named})"]


def _category(results: Mapping[str, Any], task: str) -> str | None:
    """Alias of the group that directly holds the task, without the dashes of lm-eval's table."""
    for group, children in section(results, "group_subtasks").items():
        if isinstance(children, list) and task in children:
            alias = section(section(results, "results"), group).get("alias") or group
            return str(alias).lstrip(" -")
    return None
