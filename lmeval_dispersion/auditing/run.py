"""One run for the audit: documents with a direction, their labels, confidence and centred vectors.

A document's confidence is the probability of its chosen answer: the choices' log-probabilities as
probabilities that sum to one over the choices (the harness's ``acc`` view: no length normalisation).

If the model gives nearly always one answer, or only guesses, right answers say nothing: :func:`answers_of`
detects that, and reports say so first and conclude nothing from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import DispersionError, StoreError, UsageError
from lmeval_dispersion.geometry.centred import CentredVectors
from lmeval_dispersion.statistics import wilson
from lmeval_dispersion.store import Store, read_store
from lmeval_dispersion.store.format import CORRECT_ABOVE
from lmeval_dispersion.store.samples import is_logged, read_logged
from lmeval_dispersion.store.sanity import (
    CountedAsWrong,
    Flags,
    Logged,
    counted_as_wrong,
    finite_answer,
    finite_score,
)

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

FEWEST = 20  # fewest right, and wrong, documents for a reliable interval

_REPEATED = 0.05  # share of repeated documents that makes intervals too short
_SAME = 0.01  # share of the dispersion: documents of one text that are nearer count as one

_EXAMPLE = "subject in ('anatomy', 'virology') and prompt_tokens < 300"


@dataclass(frozen=True)
class Missing:
    """Why a section is missing from a report."""

    missing: str


class RunFacts(TypedDict):
    """Facts of the store's manifest and of its vectors (samples: no ``layer``, ``width`` 0)."""

    model: str
    revision: str | None
    num_fewshot: Any
    chat_template: Any
    prompt_format: str | None
    limit: float | None
    created: str
    tasks: dict[str, Any]
    layer: str
    width: int
    documents: int
    without_direction: int
    labelled: int


@dataclass(frozen=True)
class AuditRun:
    """The documents of a store that have a direction, row by row with their vectors.

    Samples of lm-eval, without vectors, are a run too; :attr:`vectors` then raises UsageError.

    Attributes:
        documents: One row per document, index 0..n-1; ``without_direction`` counts those left out.
        score: ``correct`` as stored, in [0, 1]; NaN where there is no label. Shape (n,).
        confidence: Largest probability of a choice, in [1/choices, 1]; NaN where there is none. Shape (n,).
        choices: Answer choices of each document, 0 where there are none. Shape (n,).
        chosen: Place of the likeliest choice from 0, -1 where there is none. Shape (n,).
        finite: Whether the document's log-probabilities are an answer, and a log has its score. Shape (n,).
    """

    store: Store
    layer: str
    documents: pd.DataFrame
    score: Array
    confidence: Array
    choices: Rows
    chosen: Rows
    finite: Flags
    without_direction: int
    centred: CentredVectors | None
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def vectors(self) -> CentredVectors:
        """The centred unit vectors, row by row.

        Raises:
            UsageError: The run is samples of lm-eval, without vectors.
        """
        if self.centred is None:
            raise UsageError(f"{self.source} hold no vectors; {self.way_to_vectors}")
        return self.centred

    @property
    def source(self) -> str:
        """What a run without vectors was read from, in words."""
        return "logs of Inspect" if self.store.manifest.get("by_inspect") else "samples of lm-eval"

    @property
    def way_to_vectors(self) -> str:
        """The command that adds vectors to samples, as the end of a sentence."""
        if self.store.manifest.get("by_inspect"):
            return "`dispersion embed MODEL FILE` makes a store of texts"
        return (
            f"`dispersion embed {self.store.model} --from-samples {self.store.path} -o STORE` adds them "
            "(one prefill, no answers)"
        )

    @classmethod
    def of(cls, store: Store, layer: str | None = None, *, any_range: bool = False) -> AuditRun:
        """Build it from a store and one layer's vectors (default: the store's); samples have none.

        Raises:
            StoreError: No such layer, no usable vector in it, or a score outside [0, 1] (unless
                ``any_range``).
        """
        name, documents, centred, without = "", store.documents, None, 0
        if store.layers:
            name = store.layer_name(layer)
            unit = store.vectors(name)
            usable = ~np.isnan(unit[:, 0])
            without = int(len(usable) - usable.sum())
            if not usable.any():
                raise StoreError(
                    f"none of the {len(usable)} documents in {store.path} has a usable vector of layer "
                    f"{name!r}; the run produced zero or non-finite states, run it again"
                    if len(usable)
                    else f"{store.path} holds no documents; run it again"
                )
            if without:
                unit, documents = unit[usable], documents[usable].reset_index(drop=True)
            centred = CentredVectors(unit)
        score = documents["correct"].to_numpy(dtype=np.float64)
        score = np.where(np.isinf(score), np.nan, score)
        outside = int(((score < 0) | (score > 1)).sum())
        if outside and not any_range:
            raise StoreError(
                f"expected scores in [0, 1] in the column `correct` of {store.path}, got {outside} outside; "
                "divide them by their maximum"
            )
        logprobs = documents["logprobs"].tolist()
        confidence, chosen = likeliest(logprobs)
        finite = finite_answer(logprobs)
        if not store.layers:  # a log; elsewhere a document without a score has no label
            finite &= finite_score(score, documents["task"].tolist())
        run = cls(
            store=store,
            layer=name,
            documents=documents,
            score=score,
            confidence=confidence,
            choices=np.array([len(values) for values in logprobs], dtype=np.int64),
            chosen=chosen,
            finite=finite,
            without_direction=without,
            centred=centred,
        )
        run.notes.extend([*_notes(run), *store.manifest.get("notes", ())])
        return run

    @property
    def labelled(self) -> Rows:
        """Rows with a label."""
        return np.flatnonzero(~np.isnan(self.score))

    @property
    def logged(self) -> Logged:
        """What the run logged of its answers to labelled documents, for the sanity pass."""
        rows = self.labelled
        documents = self.documents.iloc[rows]
        return Logged(
            tasks=documents["task"].tolist(),
            log_probabilities=documents["logprobs"].tolist(),
            predictions=documents["prediction"].tolist(),
            targets=documents["target"].tolist(),
            scores=self.score[rows],
        )

    @property
    def judged(self) -> AuditRun:
        """This run with the labels of finite answers only, for what is learnt from labels."""
        if self.finite.all():
            return self
        return labels_of(self, np.flatnonzero(self.finite & ~np.isnan(self.score)))

    @property
    def lower_is_better(self) -> bool:
        """Whether lower scores are the better ones, by lm-eval's results."""
        return bool(self.store.manifest.get("lower_is_better"))

    def counted_as_wrong(self) -> CountedAsWrong | None:
        """Both ways to count answers that are not finite; None without such answers, or without scores."""
        if self.finite.all() or np.isnan(self.score).all():
            return None
        return counted_as_wrong(self.score, self.finite, self.lower_is_better)

    @property
    def right(self) -> NDArray[np.bool_]:
        """Whether each document's score is above 0.5; False without a label. Shape (n,)."""
        return np.asarray(self.score > CORRECT_ABOVE)

    @property
    def probability(self) -> Array:
        """Probability of the right answer among the choices; NaN where not known. Shape (n,)."""
        if "probability" not in self.documents:
            return np.full(len(self), np.nan)
        return self.documents["probability"].to_numpy(dtype=np.float64)

    @property
    def perplexity(self) -> Array:
        """Perplexity of each query's own tokens; NaN where not known. Shape (n,)."""
        return self.documents["query_perplexity"].to_numpy(dtype=np.float64)

    @property
    def length(self) -> Array:
        """Prompt length in tokens; NaN where not known. Shape (n,)."""
        tokens = self.documents["prompt_tokens"].to_numpy(dtype=np.float64)
        return np.where(tokens > 0, tokens, np.nan)

    @property
    def raw_vectors(self) -> NDArray[np.float32]:
        """The vectors at their own lengths, shape (n, d), float32; raises as `vectors`."""
        unit = self.vectors.rows + self.vectors.mean.astype(np.float32)
        norms = self.store.norms(self.layer)
        norms = norms[np.isfinite(norms) & (norms > 0)]
        return np.asarray(unit * norms[:, None].astype(np.float32))

    def describe(self) -> dict[str, Any]:
        """The model, the texts and the settings, for reports: :class:`RunFacts`."""
        manifest = self.store.manifest
        keys = (
            "model",
            "revision",
            "num_fewshot",
            "chat_template",
            "prompt_format",
            "limit",
            "created",
        )
        tasks = {task: None for task in sorted(self.documents["task"].unique())}
        return {
            **{key: manifest.get(key) for key in keys},
            "tasks": manifest.get("tasks") or tasks,
            "layer": self.layer,
            "width": 0 if self.centred is None else int(self.centred.rows.shape[1]),
            "documents": len(self),
            "without_direction": self.without_direction,
            "labelled": len(self.labelled),
        }


def read_run(
    run: AuditRun | str | Path,
    layer: str | None = None,
    metric: str | None = None,
    *,
    any_range: bool = False,
) -> AuditRun:
    """The run in a folder or file, or an AuditRun as it is.

    ``metric`` is the ``[FILTER/]METRIC`` that scores lm-eval's samples; ``any_range`` allows scores outside
    [0, 1].

    Raises:
        StoreError, HarnessError: A bad store, or bad samples.
        UsageError: ``metric`` is named for a store, which has its scores.
    """
    if isinstance(run, AuditRun):
        return run
    if is_logged(run):
        return AuditRun.of(read_logged(run, metric), layer, any_range=any_range)
    if metric is not None:
        raise UsageError(
            f"{run} is a store, which keeps the scores of its run; name samples of lm-eval",
            argument="metric",
        )
    return AuditRun.of(read_store(run), layer)


def part_of(build: Callable[..., Any], run: AuditRun, **options: Any) -> Any:
    """``build(run, **options)``, or Missing with the reason if it raises DispersionError."""
    try:
        return build(run, **options)
    except DispersionError as error:
        return Missing(str(error))


def check_labels(run: AuditRun, what: str) -> None:
    """Raise UsageError unless there are right and wrong answers; ``what`` begins its sentence."""
    rows = run.labelled
    right = int(run.right[rows].sum())
    if not len(rows):
        raise UsageError(f"{what} labelled documents, and none of these has a label")
    if right in (0, len(rows)):
        side = "correctly" if right else "wrongly"
        which = f"all {len(rows)}"
        if not run.finite.all():
            which += " with finite log-probabilities"
        raise UsageError(f"{what} right and wrong answers, and {which} were answered {side}")


def _notes(run: AuditRun) -> list[str]:
    notes = []
    n = len(run)
    if run.without_direction:
        notes.append(
            f"{run.without_direction} of {n + run.without_direction} documents have a zero or non-finite "
            "vector and are left out."
        )
    if truncated := int(run.documents["truncated"].sum()):
        notes.append(f"{truncated} prompts were too long for the model and lost their beginning.")
    unlabelled = int((np.isnan(run.score) & run.finite).sum())
    if 0 < unlabelled < n:
        notes.append(f"{unlabelled} of {n} documents have no label and count for dispersion only.")
    between = int(((run.score > 0) & (run.score < 1)).sum())
    if between:
        notes.append(
            f"{between} documents have a score between 0 and 1; above {CORRECT_ABOVE} it counts as correct "
            "in mixtures, calibration and ranking."
        )
    return notes


def likeliest(logprobs: Sequence[Sequence[float]]) -> tuple[Array, Rows]:
    """Each document's largest choice probability and that choice's place from 0, by its log-probabilities.

    The place is -1 with fewer than two choices, or none of finite log-probability; the probability is
    then NaN, and also where one is NaN or infinity.

    >>> [values.tolist() for values in likeliest([[0.0, 0.0, -1e9, -1e9], []])]
    [[0.5, nan], [0, -1]]
    """
    confidence = np.full(len(logprobs), np.nan)
    places = np.full(len(logprobs), -1, dtype=np.int64)
    lengths = np.array([len(values) for values in logprobs], dtype=np.int64)
    for choices in np.unique(lengths[lengths >= 2]):
        rows = np.flatnonzero(lengths == choices)
        values = np.array([logprobs[int(row)] for row in rows], dtype=np.float64)
        known = np.isfinite(values).any(axis=1)
        rows, values = rows[known], values[known]
        places[rows] = np.nanargmax(values, axis=1)
        # -inf is a probability of 0 and fine; NaN and inf are not log-probabilities.
        usable = (values < np.inf).all(axis=1)
        rows, values = rows[usable], values[usable]
        confidence[rows] = 1 / np.exp(values - values.max(axis=1, keepdims=True)).sum(axis=1)
    return confidence, places


@dataclass(frozen=True)
class Answers:
    """The model's answers to documents with choices, compared with guessing (``chance``).

    Attributes:
        commonest: The most frequent answer, by its words or its place among the choices: documents, share,
            and the score of always giving it (NaN if targets are unknown). None without answers.
        repeated_documents: Documents with the prompt (or text) and vector of an earlier one.
        not_finite: Documents with log-probabilities or a score that are not finite.
        accuracy_as_wrong: The mean score with those counted as wrong; NaN without any.
        cautions: Sentences why right and wrong answers support no conclusion; empty where they may.
        warnings: Sentences on answers that are not finite, where others support a conclusion.
    """

    with_choices: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    chance: float
    commonest: str | None
    commonest_documents: int
    answered_documents: int
    commonest_share: float
    commonest_accuracy: float
    repeated_documents: int
    not_finite: int
    accuracy_as_wrong: float
    cautions: Sequence[str] = ()
    warnings: Sequence[str] = ()


def answers_of(run: AuditRun) -> Answers:
    """The model's answers, with cautions where they support no conclusion."""
    labelled = run.labelled
    choices = run.choices[labelled]
    known = labelled[choices >= 2]
    accuracy = float(run.right[known].mean()) if len(known) else float("nan")
    chance = float((1 / choices[choices >= 2]).mean()) if len(known) else float("nan")
    logged = run.logged
    commonest = logged.commonest()
    counted = run.counted_as_wrong()
    low, high = wilson(accuracy, len(known))
    answers = Answers(
        with_choices=len(known),
        accuracy=accuracy,
        accuracy_low=low,
        accuracy_high=high,
        chance=chance,
        commonest=commonest.answer,
        commonest_documents=commonest.documents,
        answered_documents=commonest.given,
        commonest_share=commonest.share,
        commonest_accuracy=commonest.accuracy,
        repeated_documents=repeated_documents(run, np.arange(len(run))),
        not_finite=int((~run.finite).sum()),
        accuracy_as_wrong=float("nan") if counted is None else counted.as_wrong,
    )
    doubts = [_sentence(doubt) for doubt in logged.doubts()]
    warnings = [_sentence(clause) for clause in logged.doubts_by_task()]
    if counted is not None:
        sentence = _sentence(counted.sentence())
        (doubts if counted.not_finite == counted.documents else warnings).insert(0, sentence)
    cautions = [*doubts, *_cautions(answers, len(run))]
    return replace(answers, cautions=cautions, warnings=warnings)


def _sentence(clause: str) -> str:
    """A clause on a run's answers as a sentence on the audited one."""
    if clause.startswith("answers "):
        return f"The model {clause}: right or wrong says nothing about a document here."
    return f"{clause[0].upper()}{clause[1:]}."


def repeated_documents(run: AuditRun, rows: Rows) -> int:
    """Number of the documents ``rows`` that repeat an earlier one's prompt (or text) and vector."""
    return len(_repeats(run, rows, _keys(run)))


def first_occurrences(run: AuditRun) -> Rows:
    """Rows of a run without those that repeat an earlier document of their task."""
    keys = _keys(run)
    of_tasks = (run.documents["task"] + "\n" + keys).where(keys.notna())
    return np.setdiff1d(np.arange(len(run)), _repeats(run, np.arange(len(run)), of_tasks))


def _keys(run: AuditRun) -> pd.Series[str]:
    """What documents that repeat have in common: the prompt's hash or the text, the content, the target.

    Questions about several images share a text, and two answers may be right to one prompt in two documents.
    """
    documents = run.documents
    prompts = documents["prompt_hash" if documents["prompt_hash"].notna().any() else "text"]
    keys = prompts.astype(str)
    for column in ("doc_hash", "target"):
        if column in documents:
            keys = keys + " " + documents[column].fillna("").astype(str)
    return keys.where(prompts.notna())


def _repeats(run: AuditRun, rows: Rows, keys: pd.Series[str]) -> Rows:
    """The documents among ``rows`` that repeat the key and the vector of an earlier one."""
    if run.centred is None:
        chosen = keys.iloc[rows]
        return rows[(chosen.notna() & chosen.duplicated()).to_numpy()]
    near = _SAME * max(float(run.vectors.squares.mean()), 1e-12)
    first: dict[str, int] = {}
    repeats = []
    for row in rows[(keys.notna() & keys.duplicated(keep=False)).to_numpy()[rows]].tolist():
        other = first.setdefault(str(keys.iat[row]), row)
        if other != row:
            difference = run.vectors.rows[row] - run.vectors.rows[other]
            if float(difference @ difference) / 2 < near:
                repeats.append(row)
    return np.array(repeats, dtype=np.int64)


def _cautions(answers: Answers, documents: int) -> Iterator[str]:
    low, high = answers.accuracy_low, answers.accuracy_high
    if low <= answers.chance <= high:
        yield (
            f"The accuracy of {100 * answers.accuracy:.1f} % (95 % {100 * low:.1f} to {100 * high:.1f}) is "
            f"no better than guessing ({100 * answers.chance:.1f} %): right answers may be luck."
        )
    yield from repeats_caution(answers.repeated_documents, documents)


def repeats_caution(repeated: int, documents: int) -> Iterator[str]:
    """A caution that intervals are too short, if 5 % or more of the documents repeat others."""
    if repeated >= _REPEATED * documents:
        yield (
            f"{repeated} of {documents} documents repeat another one: errors and intervals count them "
            "as independent and are too short."
        )


def rows_where(run: AuditRun, expression: str) -> Rows:
    """Rows that satisfy an expression, as :meth:`pandas.DataFrame.eval` reads it; UsageError if none does."""
    try:
        chosen = np.asarray(run.documents.eval(expression.strip(), engine="python"), dtype=object)
        if chosen.shape != (len(run.documents),) or not {type(v) for v in chosen} <= {
            bool,
            np.bool_,
        }:
            raise ValueError("its value is not true or false for every document")
    except Exception as error:
        # pandas raises whatever the values raise; a user's expression must not cause a traceback.
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"{expression!r}: {reason}; write comparisons, such as {_EXAMPLE!r}, of the columns "
            f"{', '.join(map(str, run.documents.columns))}",
            argument="where",
        ) from None
    rows = np.flatnonzero(chosen.astype(bool))
    if not len(rows):
        raise UsageError(
            f"no document satisfies {expression!r}; look at the values of its columns",
            argument="where",
        )
    return rows


def labels_of(run: AuditRun, rows: Rows) -> AuditRun:
    """A copy of the run with the labels of ``rows`` only."""
    score = np.full_like(run.score, np.nan)
    score[rows] = run.score[rows]
    return replace(run, score=score)
