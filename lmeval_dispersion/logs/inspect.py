"""Inspect's logs (``.eval`` and JSON) as lm-eval's results and documents; ``inspect_ai`` itself reads them.

A scorer is a filter, and its score of a sample a metric: reduced over the epochs as Inspect does, by default
their mean.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import HarnessError, first_line, require_extra

SUFFIX = ".eval"
_FIRST_KEYS = re.compile(rb'\s*\{\s*"version"\s*:\s*\d+\s*,\s*"status"\s*:\s*"')
_UNREAD = {"attachments", "events", "events_data", "store", "timelines"}  # most of a log's bytes
_LARGEST = 1 << 31  # bytes of a JSON log, or of one unpacked part of the other form
_MOST_PARTS = 20_000_000
_LETTERS = ("C", "I", "P", "N")  # right, wrong, partly right, no answer
_WORDS = ("yes", "true", "no", "false")
_AVERAGES = ("accuracy", "mean")  # Inspect's means of a score over the samples
_FINISHED = "success"
_RUNNING = "started"  # or was killed


@dataclass(frozen=True)
class Judgement:
    """The scores that one scorer gave to one sample.

    Attributes:
        sample: Inspect's id of the sample.
        number: Index of the sample in the data set.
        scorer: Name of the scorer.
        content: The sample as lm-eval logs a document: ``doc``, ``target``, ``arguments``,
            ``resps`` and ``filtered_resps``.
        metrics: Name -> score over the epochs, by default their mean. A score that the scorer did
            not give is left out.
    """

    sample: str
    number: int
    scorer: str
    content: dict[str, Any]
    metrics: dict[str, Any]


def is_inspect_log(file: Path, head: bytes) -> bool:
    """Whether a file is a log of Inspect, by its name or by its first bytes, ``head``."""
    return file.name.endswith(SUFFIX) or _FIRST_KEYS.match(head) is not None


def read_header(file: Path) -> dict[str, Any]:
    """Read the header of a log of Inspect, and return it in the form of lm-eval's results.

    The result has the model and its revision, the version of the task, the number of samples, the
    limit and the date, but no scores. Its entry ``inspect`` has the task, the status, the date as
    Inspect writes it, and a list of notes, which is empty unless samples ended in an error.

    Raises:
        MissingExtraError: inspect_ai is not installed.
        HarnessError: The log is too large, or inspect_ai cannot read it.
    """
    log = _read(file, header_only=True)
    spec = log.eval
    _, _, name = spec.model.partition("/")
    arguments = spec.model_args
    revision = str(arguments["revision"]) if arguments.get("revision") else None
    notes = []
    results = log.results
    if results is not None and results.completed_samples < results.total_samples:
        missing = results.total_samples - results.completed_samples
        verb = "is" if missing == 1 else "are"
        notes.append(
            f"{missing} of {results.total_samples} samples ended in an error and {verb} left out"
        )
    samples = spec.dataset.sample_ids
    return {
        "model_name": spec.model,
        "config": {
            "model_args": {
                "pretrained": str(arguments.get("model_path") or name),
                "revision": revision,
            },
            "model_sha": revision,
            "limit": spec.config.limit,
        },
        "versions": {spec.task: spec.task_version},
        "n-samples": {spec.task: {"effective": len(samples) if samples else None}},
        "date": _seconds(spec.created),
        "inspect": {
            "task": spec.task,
            "status": log.status,
            "created": spec.created,
            "notes": notes,
        },
    }


def finished(headers: Mapping[Path, dict[str, Any]]) -> dict[Path, dict[str, Any]]:
    """Return the headers of the finished evaluations, by file.

    An unfinished evaluation is left out if the same model finished the same task in another log.

    Args:
        headers: File -> header, from :func:`read_header`.

    Raises:
        HarnessError: An evaluation was cancelled, failed or is still running, and the same model
            finished the same task in no other log.
    """
    done = {}
    retried = set()
    for file, header in headers.items():
        if header["inspect"]["status"] == _FINISHED:
            done[file] = header
            retried.add((header["model_name"], header["inspect"]["task"]))
    for file, header in headers.items():
        about = header["inspect"]
        if file not in done and (header["model_name"], about["task"]) not in retried:
            wait = "wait until it ends, or " if about["status"] == _RUNNING else ""
            raise HarnessError(
                f"{file}: expected a finished evaluation, got the status {about['status']!r}; "
                f"{wait}run: inspect eval-retry {shlex.quote(str(file))}"
            )
    return done


def read_judgements(file: Path) -> Iterator[Judgement]:
    """Yield the scores of each sample by each scorer, in the order of the data set.

    Samples that ended in an error are left out.

    Raises:
        MissingExtraError: inspect_ai is not installed.
        HarnessError: The log cannot be read, is too large, or has no samples or no scores.
    """
    log = _read(file, header_only=False)
    samples = _by_id(log)
    if not samples:
        raise HarnessError(
            f"{file} has no samples; run the evaluation again without `--no-log-samples`"
        )
    scores = _scores(log, samples)
    if not scores:
        raise HarnessError(f"{file} has no scores; run: inspect score {shlex.quote(str(file))}")
    for number, (name, epochs) in enumerate(samples.items()):
        answered = [sample for sample in epochs if sample.scores]
        if not answered:
            continue  # it ended in an error
        for scorer, by_sample in scores.items():
            yield Judgement(
                sample=str(name),
                number=number,
                scorer=scorer,
                content=_content(answered, scorer),
                metrics=by_sample.get(name, {}),
            )


def _read(file: Path, *, header_only: bool) -> Any:
    """The log as ``inspect_ai`` reads it."""
    require_extra("inspect", "a log of Inspect")
    from inspect_ai.log import read_eval_log

    _check_size(file)
    try:
        return read_eval_log(str(file), header_only=header_only, exclude_fields=_UNREAD)
    except Exception as error:  # whatever its parsers raise
        raise HarnessError(
            f"{file} cannot be read by inspect_ai ({first_line(error)[:100]}); copy the file again, or "
            "install a newer inspect_ai"
        ) from None


def _check_size(file: Path) -> None:
    """Raise HarnessError for a log that would fill the memory."""
    sizes = [file.stat().st_size]
    if file.name.endswith(SUFFIX):
        try:
            with zipfile.ZipFile(file) as parts:
                sizes = [part.file_size for part in parts.infolist()]
        except (OSError, zipfile.BadZipFile) as error:
            raise HarnessError(
                f"{file} cannot be read ({error}); check its permissions, or copy it again"
            ) from None
    if len(sizes) > _MOST_PARTS:
        raise HarnessError(
            f"{file}: expected at most {_MOST_PARTS:,} files in the log, got {len(sizes):,}; "
            "evaluate fewer samples (`inspect eval --limit`)"
        )
    largest = max(sizes, default=0)
    if largest <= _LARGEST:
        return
    if file.name.endswith(SUFFIX):
        raise HarnessError(
            f"{file}: expected files of at most {_LARGEST:,} unpacked bytes in the log, got one of "
            f"{largest:,}; evaluate fewer samples (`inspect eval --limit`)"
        )
    raise HarnessError(
        f"{file}: expected at most {_LARGEST:,} bytes of JSON, got {largest:,}; run: "
        f"`inspect log convert {shlex.quote(str(file))} --to eval --output-dir converted`"
    )


def _seconds(created: str) -> float:
    """A time in seconds, to sort by; 0 for anything else."""
    from datetime import datetime

    try:
        return datetime.fromisoformat(created.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def _by_id(log: Any) -> dict[Any, list[Any]]:
    """Each sample's epochs, in the order of the data set."""
    samples: dict[Any, list[Any]] = {name: [] for name in log.eval.dataset.sample_ids or ()}
    for sample in log.samples or ():
        samples.setdefault(sample.id, []).append(sample)
    if not any(samples.values()):
        return {}
    for epochs in samples.values():
        epochs.sort(key=lambda sample: sample.epoch)
    return samples


# --- scores ------------------------------------------------------------------------------------------------


def _scores(log: Any, samples: Mapping[Any, list[Any]]) -> dict[str, dict[Any, dict[str, Any]]]:
    """Scorer -> sample -> metric -> score over the epochs.

    By the log's own reductions; the mean over the epochs in a log without them. Of several reducers, the
    second and later ones are named after the metric: ``accuracy:pass_at_3``.
    """
    scores: dict[str, dict[Any, dict[str, Any]]] = {}
    for scorer, reducer, values in _reductions(log, samples):
        suffix = f":{reducer}" if scorer in scores else ""
        by_sample = scores.setdefault(scorer, {})
        average = _average(log, scorer)
        for name, value in values.items():
            metrics = by_sample.setdefault(name, {})
            for metric, number in _metrics(value, average).items():
                metrics[f"{metric}{suffix}"] = number
    return scores


def _reductions(
    log: Any, samples: Mapping[Any, list[Any]]
) -> Iterable[tuple[str, str | None, dict[Any, Any]]]:
    """Scorer, reducer, and each sample's value."""
    reduced = []
    for each in log.reductions or ():
        values = {score.sample_id: score.value for score in each.samples}
        reduced.append((each.scorer, each.reducer, values))
    if reduced and not any(None in values for _, _, values in reduced):
        yield from reduced
        return
    from inspect_ai.scorer import mean_score

    mean = mean_score()
    scores: dict[str, dict[Any, list[Any]]] = {}
    for name, epochs in samples.items():
        for sample in epochs:
            for scorer, score in (sample.scores or {}).items():
                scores.setdefault(scorer, {}).setdefault(name, []).append(score)
    for scorer, by_sample in scores.items():
        values = {}
        for name, given in by_sample.items():
            if len(given) == 1 or any(_is_category(score.value) for score in given):
                values[name] = given[0].value
            else:
                values[name] = mean(given).value
        yield scorer, None, values


def _average(log: Any, scorer: str) -> str:
    """What the mean of a scorer's scores is called; ``score`` where Inspect takes no mean."""
    metrics = set()
    for score in log.results.scores if log.results else ():
        if score.scorer == scorer:
            metrics |= score.metrics.keys()
    for name in _AVERAGES:
        if name in metrics or not metrics:
            return name
    return "score"


def _metrics(value: Any, average: str) -> dict[str, Any]:
    """The scores in a value, by name: numbers, as Inspect counts ``C``, ``I``, ``P`` and ``N``; or lists."""
    from inspect_ai.scorer import value_to_float

    to_float = value_to_float()
    parts = value if isinstance(value, dict) else {average: value}
    metrics = {}
    for name, part in parts.items():
        if part is None or (isinstance(part, float) and math.isnan(part)):
            continue  # not scored
        is_number = isinstance(part, str | int | float) and not _is_category(part)
        metrics[name] = to_float(part) if is_number else part
    return metrics


def _is_category(value: Any) -> bool:
    """Whether a value is a text without a number: Inspect warns of it, and counts it as 0."""
    if not isinstance(value, str) or value in _LETTERS or value.lower() in _WORDS:
        return False
    try:
        return not math.isfinite(float(value))
    except ValueError:
        return True


# --- documents ---------------------------------------------------------------------------------------------


def _content(epochs: list[Any], scorer: str) -> dict[str, Any]:
    """A sample as lm-eval logs a document, with the answer of the first epoch."""
    first = epochs[0]
    prompts = sorted({_prompt(sample) for sample in epochs})
    completion = first.output.completion
    score = first.scores.get(scorer)
    answer = None if score is None else score.answer
    target = first.target
    if isinstance(target, list):
        target = target[0] if len(target) == 1 else json.dumps(target, ensure_ascii=False)
    return {
        "doc": _document(first),
        "target": target,
        "arguments": [["\n\n".join(prompts), {}]],
        "resps": [[completion]],
        "filtered_resps": [completion if answer is None else answer],
    }


def _document(sample: Any) -> dict[str, Any]:
    """What is asked, whatever the order of its choices."""
    document: dict[str, Any] = {"input": sample.input}
    if not isinstance(sample.input, str):
        document["input"] = [_shown(message) for message in sample.input]
    if sample.choices:
        document["choices"] = sorted(sample.choices)
    if isinstance(sample.id, str):  # a number may be the place in a shuffled data set
        document["id"] = sample.id
    if isinstance(sample.metadata.get("subject"), str):
        document["subject"] = sample.metadata["subject"]
    return document


def _prompt(sample: Any) -> str:
    """The messages before the first answer of the model."""
    answers: dict[str | None, int] = {}  # source -> the first answer's place
    for i, message in enumerate(sample.messages):
        if message.role == "assistant":
            answers.setdefault(message.source, i)
    end = answers.get("generate", answers.get(None, len(sample.messages)))
    messages = [_shown(message) for message in sample.messages[:end]]
    return json.dumps(messages or _document(sample)["input"], ensure_ascii=False)


def _shown(message: Any) -> list[Any]:
    """A message without its random name."""
    content = message.content
    if not isinstance(content, str):
        content = [part.model_dump(mode="json", exclude_none=True) for part in content]
    return [message.role, content]
