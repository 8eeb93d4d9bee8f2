"""One logged document: its prompt and answer as lm-eval had them, and its columns in a store."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import HarnessError, count, first_line
from lmeval_dispersion.files import hashed
from lmeval_dispersion.logs.files import Line, number_of, read_lines, writable
from lmeval_dispersion.store.format import scalar_fields

_NEEDED = ("doc", "target", "arguments", "resps", "filtered_resps")
_MOST_SUBSETS = 12  # choices of which every subset is tried
_MASS_ERROR = 1e-9  # of a sum of probabilities
# What reading a line raises where a value has another form than lm-eval logs.
_MISFITS = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Sample:
    """A document under one filter: its prompt, its answer and its score.

    Attributes:
        place: File of the document, and its line or its number in the file. Messages begin with it.
        doc_id: Index of the document in its task.
        doc: The document itself.
        arguments: The arguments of each request that lm-eval made for the document.
        columns: The document's columns in a store, from :func:`document_columns`.
        answer: The answer to the first request: a log-probability, or a generated text.
        metrics: Name -> value of each metric, as lm-eval logged it.
        correct: Value of the metric that scores the document; NaN if unknown.
        block: Probabilities that a race added to the sample; empty otherwise.
        digest: Hash of the line; lines with equal content have equal hashes.
        hit: Whether the likeliest choice is the target; None if unknown.
    """

    place: str
    doc_id: int
    doc: Any
    arguments: list[tuple[Any, ...]]
    columns: dict[str, Any]
    answer: float | str
    metrics: dict[str, Any]
    correct: float = math.nan
    block: Mapping[str, Any] = field(default_factory=dict)
    digest: int = 0
    hit: bool | None = None

    def score(self, metric: str | None) -> float:
        """Return the document's value of a metric; NaN if none was logged or ``metric`` is None.

        Raises:
            HarnessError: The value is not a number.
        """
        value = None if metric is None else self.metrics.get(metric)
        try:
            return number_of(value)
        except TypeError:
            kind = type(value).__name__
            raise HarnessError(
                f"{self.place}: expected a number for the metric {metric}, got a value of type "
                f"{kind}; run lm-eval again"
            ) from None

    def likely(self, score: float) -> float:
        """Return the probability of the right answer; NaN if it is unknown.

        For a generated answer, the mean of this probability and ``score`` is returned: few right
        answers repeat the target word for word, so the probability alone says little.
        """
        known = float(self.block.get("probability", self.columns["probability"]))
        return (known + score) / 2 if isinstance(self.answer, str) else known


Filters = dict[str, dict[int, Sample]]  # filter -> document index -> sample


def by_filter(file: Path, config: Mapping[str, Any], text: str | None = None) -> Filters:
    """Return the samples in a file: filter -> index of the document -> sample.

    Args:
        file: The file; messages begin with its path.
        config: lm-eval's configuration of the task.
        text: Content of the file; None to read the file.

    Raises:
        HarnessError: The file cannot be read, a line is broken, or a document is listed twice with
            different content.
    """
    return read_samples(file, config, (), text)[0]


def read_samples(
    file: Path, config: Mapping[str, Any], names: Sequence[str], text: str | None = None
) -> tuple[Filters, int]:
    """Return the samples in a file as :func:`by_filter` does, and the number of repeated lines.

    Args:
        file: The file; messages begin with its path.
        config: lm-eval's configuration of the task.
        names: Names of the task's filters, from the results. lm-eval before 0.4.7 wrote no filter
            into a line: it wrote one line for each filter, in this order.
        text: Content of the file; None to read the file.

    Raises:
        HarnessError: The file cannot be read, a line is broken, a document is listed twice with
            different content or lacks a line for one of ``names``, or only some lines have a
            filter.
    """
    filters: Filters = {}
    unnamed: dict[int, list[Sample]] = {}
    repeated = 0
    for line in read_lines(file, text):
        sample = _sample(line, config)
        if line.filter is None:
            unnamed.setdefault(sample.doc_id, []).append(sample)
        else:
            repeated += _keep(sample, filters.setdefault(line.filter, {}))
    if unnamed and filters:
        place = next(iter(unnamed.values()))[0].place
        raise HarnessError(f"{place} has no 'filter', which other lines have; run lm-eval again")
    if unnamed:
        names = names or _filters_in_turn(unnamed.values())
    for samples in unnamed.values():
        if len(samples) % len(names):
            last = samples[-1]
            lines = count(len(samples), "line")
            raise HarnessError(
                f"{last.place}: document {last.doc_id} has {lines}, but the task has "
                f"{len(names)} filters ({', '.join(names)}); run lm-eval again"
            )
        for i, sample in enumerate(samples):
            if sample.columns["doc_hash"] != samples[0].columns["doc_hash"]:
                raise _other_content(sample)
            repeated += _keep(sample, filters.setdefault(names[i % len(names)], {}))
    return filters, repeated


def _keep(sample: Sample, documents: dict[int, Sample]) -> bool:
    """Add a sample to its filter's; True for an equal one, which is there already."""
    first = documents.setdefault(sample.doc_id, sample)
    if first.digest != sample.digest:
        raise _other_content(sample)
    return first is not sample


def _other_content(sample: Sample) -> HarnessError:
    return HarnessError(
        f"{sample.place} has another record of document {sample.doc_id} than an earlier line, as "
        "if two runs had written to the file; run lm-eval again"
    )


def _filters_in_turn(documents: Iterable[Sequence[Sample]]) -> list[str]:
    """Names for filters without names: one, unless all documents have as many lines that differ."""
    counts = set()
    differ = False
    for samples in documents:
        counts.add(len(samples))
        differ = differ or any(sample.digest != samples[0].digest for sample in samples)
    if len(counts) > 1 or not differ:
        return ["none"]
    return [f"filter {i + 1}" for i in range(counts.pop())]


# --- one line ----------------------------------------------------------------------------------------------


def _sample(line: Line, config: Mapping[str, Any]) -> Sample:
    for key in _NEEDED:
        if key not in line.content:
            raise HarnessError(
                f"{line.place} has no {key!r}, which lm-eval 0.4.0 and later log; evaluate again with such "
                "a version"
            )
    try:
        return _converted(line, config)
    except _MISFITS as error:
        reason = first_line(error)[:100]
        raise HarnessError(
            f"{line.place} does not fit what lm-eval logs ({reason}); run lm-eval again"
        ) from None


def _converted(line: Line, config: Mapping[str, Any]) -> Sample:
    """The sample of a line; raises one of ``_MISFITS`` where a value has another form."""
    logged = line.content
    arguments = _request_arguments(logged["arguments"])
    if not arguments or not arguments[0] or not isinstance(arguments[0][0], str):
        raise HarnessError(
            f"{line.place}: expected the prompt of document {line.doc_id} as text, got none; run "
            "lm-eval again with log_samples"
        )
    kind = str(config.get("output_type") or kind_of_task(arguments))
    alias = config.get("task_alias")
    options = options_of(arguments, kind)
    target = _target(logged["target"], kind)
    answers = []
    for answer in _filtered(logged["filtered_resps"], config):
        _, in_form = _answer(answer, kind)
        answers.append(in_form)
    columns = document_columns(
        logged["doc"],
        arguments[0][0],
        answers,
        target=target,
        options=options,
        alias=alias if isinstance(alias, str) else None,
    )
    for name in ("doc_hash", "prompt_hash"):
        if logged.get(name) not in (None, columns[name]):
            raise HarnessError(
                f"{line.place}: document {line.doc_id} was changed after the run (its {name} differs); run "
                "lm-eval again with log_samples"
            )
    for name in ("subject", "target", "prediction"):
        if columns[name] is not None:
            columns[name] = writable(columns[name])
    return Sample(
        place=line.place,
        doc_id=line.doc_id,
        doc=logged["doc"],
        arguments=arguments,
        columns=columns,
        answer=_answer(logged["resps"][0][0], kind)[0],
        metrics=line.metrics,
        block=logged.get("block") or {},
        digest=line.digest,
        hit=_hit(columns["logprobs"], options, target, line.metrics, config),
    )


def _request_arguments(logged: Any) -> list[tuple[Any, ...]]:
    """``{"gen_args_0": {"arg_0": …, "arg_1": …}, …}`` as tuples, in order; before 0.4.3 lists.

    The messages for a server are logged as a list that holds their JSON.
    """
    if isinstance(logged, dict):
        requests = []
        for i in range(len(logged)):
            named = logged[f"gen_args_{i}"]
            arguments = [named[f"arg_{j}"] for j in range(len(named))]
            requests.append(arguments)
    elif isinstance(logged, list) and all(isinstance(arguments, list) for arguments in logged):
        requests = logged
    else:
        raise TypeError("expected `arguments` to hold the arguments of each request")
    unpacked = []
    for first, *rest in requests:
        messages = first if isinstance(first, list) else [first]
        unpacked.append((*messages, *rest))
    return unpacked


def _filtered(logged: Any, config: Mapping[str, Any]) -> list[Any]:
    """The filtered answer to each request; 0.5 keeps a list of the repeats of each."""
    if not isinstance(logged, list) or not logged:
        raise TypeError("expected `filtered_resps` to be a list of answers")
    # 0.5's configurations have this key; log-probabilities without a configuration show it themselves.
    is_later = "multiple_targets" in config
    first = logged[0]
    if not config and isinstance(first, list) and first and isinstance(first[0], list):
        is_later = True
    if not is_later:
        return logged
    return [repeats[0] for repeats in logged]


def kind_of_task(arguments: Sequence[tuple[Any, ...]]) -> str:
    """Return lm-eval's output type of a task, judging by the ``arguments`` of one document."""
    if len(arguments[0]) == 1:
        return "loglikelihood_rolling"
    if isinstance(arguments[0][1], dict):
        return "generate_until"
    return "multiple_choice" if len(arguments) > 1 else "loglikelihood"


def _answer(logged: Any, kind: str) -> tuple[float | str, Any]:
    """A logged answer as number or text, and in lm-eval's form: numbers are logged as text."""
    if kind == "generate_until":
        text = writable(str(logged))
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
    is_text = isinstance(logged, str) and logged.isascii()
    if kind == "multiple_choice" and is_text and logged.isdigit():
        return int(logged)
    return logged


# --- columns -----------------------------------------------------------------------------------------------


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
    """Return a document's columns in a store: name of the column -> value.

    Args:
        doc: The document.
        prompt: The prompt of the document's first request.
        answers: The filtered answer to each request.
        target: The right answer: a text, an index into ``options``, or a list of these; None if
            unknown.
        options: Texts of the choices; empty if the document has none.
        alias: The task's alias, which becomes the subject if the document has no ``subject``; None
            without one.
        encode: Converts a value of the document that JSON cannot hold; None if there are no such
            values.
    """
    logprobs = []
    for answer in answers:
        if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], float):
            logprobs.append(answer[0])
    if not logprobs:
        logprobs = [answer for answer in answers if isinstance(answer, float)]
    prediction = None
    right: list[int] = []
    if options:
        texts = [text.strip() for text in options]
        right = right_of(options, target)
        if logprobs:
            prediction = texts[int(np.argmax(logprobs[: len(texts)]))]
        if isinstance(target, int) and 0 <= target < len(texts):
            target = texts[target]
    elif isinstance(answers[0], str):
        prediction = answers[0]
    subject = alias
    if isinstance(doc, Mapping) and isinstance(doc.get("subject"), str):
        subject = doc["subject"]
    # As lm-eval itself hashes a document.
    text = json.dumps(doc, indent=2, default=encode, ensure_ascii=False)
    return {
        **scalar_fields(doc),
        "subject": subject,
        "doc_hash": hashed(text),
        "prompt_hash": hashed(prompt),
        "prediction": prediction,
        "target": None if target is None else str(target),
        "logprobs": logprobs,
        "probability": right_probability(logprobs[: len(options)], right),
    }


def options_of(arguments: Sequence[tuple[Any, ...]], output_type: str) -> list[str]:
    """Return the texts of a document's choices.

    The list is empty if the task has no choices, or if each choice has its own context (as in
    Winogrande).

    Args:
        arguments: The arguments of each of the document's requests: context and continuation.
        output_type: lm-eval's output type of the task.
    """
    contexts = {context for context, *_ in arguments if context}
    if output_type != "multiple_choice" or len(contexts) > 1:
        return []
    options = []
    for context, continuation, *_ in arguments:
        # Mutual information asks each choice without a context, too.
        if context or not contexts:
            options.append(continuation)
    return options


def right_of(options: Sequence[str], target: Any) -> list[int]:
    """Return the indices of the choices that are right.

    ``target`` names them: by an index, by a list of indices, or by the text of a choice.
    """
    texts = [text.strip() for text in options]
    indices = target if isinstance(target, list) else [target]
    if isinstance(target, int) and 0 <= target < len(texts):
        target = texts[target]
    return [i for i, text in enumerate(texts) if i in indices or text == target]


def right_probability(logprobs: Sequence[float], right: Sequence[int]) -> float:
    """Return the probability of the right choices.

    The probabilities of all choices are scaled to sum to one (softmax of ``logprobs``). The result
    is NaN if no choice is right, or if the log-probabilities are not an answer: one of them is NaN
    or +inf, or none is finite.

    Args:
        logprobs: Log-probability of each choice.
        right: Indices of the right choices.

    >>> right_probability([-1.0, -1.0, -1.0, -1.0], [2])
    0.25
    """
    shares = _shares(logprobs)
    if shares is None or not right:
        return math.nan
    return float(shares[list(right)].sum() / shares.sum())


def _shares(logprobs: Sequence[float]) -> NDArray[np.float64] | None:
    """The choices' probabilities, on a scale where the highest is 1; None if they are not an answer."""
    logs = np.asarray(logprobs, dtype=np.float64)
    if not np.isfinite(logs).any() or not (logs < np.inf).all():
        return None
    return np.asarray(np.exp(logs - logs.max()))


# --- which answers are right -------------------------------------------------------------------------------


def known_probabilities(samples: Mapping[int, Sample]) -> dict[int, Sample]:
    """Return a task's samples, with the right answer's probability only where it is certain.

    Samples do not show a task's own scoring, so their targets may not be the right answers. Targets
    are trusted if, in every document with finite log-probabilities, lm-eval's accuracy is 1 exactly
    when the likeliest choice is a target. If lm-eval's accuracy is itself the probability of some
    choices, as in truthfulqa_mc2, this accuracy is used as the probability. In all other cases the
    probability is NaN.

    Args:
        samples: Index of a document -> its sample.
    """
    finite = {i: sample for i, sample in samples.items() if _is_finite(sample)}
    is_hit_known = any(sample.hit is not None for sample in finite.values())
    if is_hit_known and all(map(_hit_as_scored, finite.values())):
        return dict(samples)
    masses = _are_masses(list(finite.values()))
    known = dict(samples)
    for i, sample in samples.items():
        probability = math.nan
        if masses and i in finite:
            probability = float(sample.metrics["acc"])
        is_nan_before = math.isnan(sample.columns["probability"])
        if not math.isnan(probability) or not is_nan_before:
            columns = {**sample.columns, "probability": probability}
            known[i] = replace(sample, columns=columns)
    return known


def _is_finite(sample: Sample) -> bool:
    """Whether the log-probabilities of a sample's choices are an answer."""
    return _shares(sample.columns["logprobs"]) is not None


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
        if not isinstance(space, str):
            space = " "
        lengths = [len(option.removeprefix(space)) for option in options]
        values = values / np.maximum(lengths, 1)
    return int(np.argmax(values)) in right


def _hit_as_scored(sample: Sample) -> bool:
    """Whether lm-eval's accuracy is that the likeliest choice is the target."""
    score = sample.metrics.get("acc", sample.metrics.get("acc_norm"))
    if score is None or score != score:
        return True  # no score contradicts nothing
    return sample.hit is not None and isinstance(score, int | float) and score == float(sample.hit)


def _are_masses(samples: Sequence[Sample]) -> bool:
    """Whether lm-eval's accuracy is a probability in all samples: most lie between 0 and 1."""
    between = 0
    for sample in samples:
        score = sample.metrics.get("acc")
        between += isinstance(score, float) and 0 < score < 1
    if 2 * between <= len(samples):
        return False
    return all(map(_is_mass, samples))


def _is_mass(sample: Sample) -> bool:
    """Whether lm-eval's accuracy is the probability of some of the choices."""
    score = sample.metrics.get("acc")
    shares = _shares(sample.columns["logprobs"])
    if not isinstance(score, float) or shares is None or len(shares) < 2:
        return False
    shares /= shares.sum()
    sums = np.cumsum(shares)
    if len(shares) <= _MOST_SUBSETS:
        sums = np.zeros(1)
        for share in shares:
            sums = np.concatenate([sums, sums + share])
    is_near = np.abs(sums - score) < _MASS_ERROR
    return bool(is_near.any())
