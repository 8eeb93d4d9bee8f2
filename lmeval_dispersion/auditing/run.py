"""One run as the audit reads it: its documents, their scores and confidence, and centred vectors.

A document's confidence is the probability of its chosen answer: the choices' log-probabilities as
probabilities that sum to one over the choices (the harness's ``acc`` view: no length
normalisation).

If the model nearly always gives one answer, or only guesses, right answers say nothing about a
document. :func:`answers_of` detects that; reports then say so first, and conclude nothing from
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import DispersionError, StoreError, UsageError, first_line
from lmeval_dispersion.geometry.centred import CentredVectors
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.statistics import wilson
from lmeval_dispersion.store import Store, read_store
from lmeval_dispersion.store.format import CORRECT_ABOVE
from lmeval_dispersion.store.samples import is_logged, read_logged
from lmeval_dispersion.store.sanity import (
    NOT_FINITE_ADVICE,
    CountedAsWrong,
    Flags,
    Logged,
    by_length,
    counted_as_wrong,
    finite_answer,
    finite_score,
)

if TYPE_CHECKING:
    import pandas as pd

    from lmeval_dispersion.report import Chart, Table

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

FEWEST = 20  # fewest right, and wrong, documents for a reliable interval

_REPEATED = 0.05  # share of repeated documents that makes intervals too short
_SAME = 0.01  # share of the dispersion: documents of one text that are nearer count as one

# Facts of a run that are in its store's manifest.
_OF_MANIFEST = (
    "model",
    "revision",
    "num_fewshot",
    "chat_template",
    "prompt_format",
    "limit",
    "created",
)
_EXAMPLE = "subject in ('anatomy', 'virology') and prompt_tokens < 300"


@dataclass(frozen=True)
class Missing:
    """The reason why a part of a report was not computed; it takes the place of the part.

    Attributes:
        missing: Why the part was not computed, as a clause without a full stop.
    """

    missing: str

    def tables(self) -> dict[str, Table]:
        """Return no tables: an empty dict."""
        return {}

    def charts(self) -> dict[str, Chart]:
        """Return no charts: an empty dict."""
        return {}


class RunFacts(TypedDict):
    """Facts about a run from the store's manifest and its vectors.

    Attributes:
        model: Name of the model.
        revision: Revision of the model; None if not recorded.
        num_fewshot: Number of examples in a prompt, as lm-eval recorded it.
        chat_template: The chat template, as lm-eval recorded it; None without one.
        prompt_format: How prompts were built; None if not recorded.
        limit: lm-eval's ``--limit``; None without one.
        created: Date and time when the store was written; for logs, of the evaluation.
        tasks: lm-eval's tasks -> their versions; None for a version that is not recorded.
        layer: Layer of the vectors; "" for samples and logs, which have no vectors.
        width: Length of a vector; 0 for samples and logs.
        documents: Number of documents, without those left out.
        without_direction: Number of documents left out because their vector is zero or not finite.
        labelled: Number of documents with a label, that is, a score.
    """

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
    """A finished run: its documents, and their vectors in the same order.

    A store's documents are left out if their vector is zero or not finite. lm-eval's samples and
    Inspect's logs have no vectors; :attr:`vectors` then raises UsageError.

    Attributes:
        store: The store, samples or logs that were read.
        layer: Layer of the vectors; "" without vectors.
        documents: One row per document, with index 0..n-1.
        score: The column ``correct``, shape (n,); NaN where a document has no label. In [0, 1],
            unless the run was read with ``any_range``.
        finite: Whether each document's answer is finite, shape (n,): its log-probabilities, and
            for samples and logs also its score.
        without_direction: Number of documents left out because their vector is zero or not finite.
        centred: The centred unit vectors; None without vectors.
        notes: Sentences on documents that were left out or are counted in a special way.
    """

    store: Store
    layer: str
    documents: pd.DataFrame
    score: Array
    finite: Flags
    without_direction: int
    centred: CentredVectors | None
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def vectors(self) -> CentredVectors:
        """The centred unit vectors, in the order of ``documents``.

        Raises:
            UsageError: The run was read from samples or logs, which have no vectors.
        """
        if self.centred is None:
            raise UsageError(f"{self.source} hold no vectors; {self.way_to_vectors}")
        return self.centred

    @property
    def source(self) -> str:
        """What a run without vectors holds: ``samples of lm-eval`` or ``logs of Inspect``."""
        return "logs of Inspect" if self.store.manifest.get("by_inspect") else "samples of lm-eval"

    @property
    def way_to_vectors(self) -> str:
        """Clause for the end of a sentence, with the command that computes vectors for the run."""
        if self.store.manifest.get("by_inspect"):
            return (
                "`dispersion embed MODEL FILE -o STORE` makes a store with vectors of the texts in "
                "FILE"
            )
        return (
            f"`dispersion embed {self.store.model} --from-samples {self.store.path} -o STORE` adds them "
            "(one forward pass a document, no new answers)"
        )

    @classmethod
    def of(cls, store: Store, layer: str | None = None, *, any_range: bool = False) -> AuditRun:
        """Return the run in a store, with the vectors of ``layer`` or of the store's default layer.

        Raises:
            StoreError: The store has no such layer, or no usable vector of it; or, unless
                ``any_range`` is True, a score is outside [0, 1].
        """
        documents = store.documents
        name = ""
        without = 0
        centred = None
        if store.layers:
            name = store.layer_name(layer)
            unit = store.vectors(name)
            usable = ~np.isnan(unit[:, 0])
            if not len(usable):
                raise StoreError(f"{store.path} holds no documents; run the task again")
            if not usable.any():
                raise StoreError(
                    f"none of the {len(usable)} documents in {store.path} has a usable vector of layer "
                    f"{name!r}, as all hidden states are zero or not finite; {NOT_FINITE_ADVICE}"
                )
            without = int((~usable).sum())
            if without:
                unit = unit[usable]
                documents = documents[usable].reset_index(drop=True)
            centred = CentredVectors(unit)
        score = documents["correct"].to_numpy(dtype=np.float64)
        score = np.where(np.isinf(score), np.nan, score)
        outside = int(((score < 0) | (score > 1)).sum())
        if outside and not any_range:
            step = "rescale all scores to [0, 1]"
            if not store.layers:
                step = "name another metric with `--metric`"
            raise StoreError(
                f"expected scores in [0, 1] in the column `correct` of {store.path}, got {outside} "
                f"{'score' if outside == 1 else 'scores'} outside; {step}"
            )
        finite = finite_answer(documents["logprobs"].tolist())
        if not store.layers:  # a log; elsewhere a document without a score has no label
            finite &= finite_score(score, documents["task"].tolist())
        run = cls(store, name, documents, score, finite, without, centred)
        run.notes.extend([*_notes(run), *store.manifest.get("notes", ())])
        return run

    def at(self, rows: Rows) -> AuditRun:
        """Return the run cut to the documents ``rows``; their vectors are centred anew."""
        return replace(
            self,
            documents=self.documents.iloc[rows].reset_index(drop=True),
            score=self.score[rows],
            finite=self.finite[rows],
            centred=None if self.centred is None else CentredVectors(self._unit[rows]),
        )

    @cached_property
    def confidence(self) -> Array:
        """Probability of each document's likeliest choice, shape (n,); see :func:`confidences`."""
        return confidences(self.documents["logprobs"].tolist())

    @cached_property
    def choices(self) -> Rows:
        """Number of answer choices of each document, shape (n,); 0 where there are none."""
        return self.documents["logprobs"].map(len).to_numpy(dtype=np.int64)

    @cached_property
    def answers(self) -> Answers:
        """The model's answers compared with guessing, and doubts about them."""
        return answers_of(self)

    @property
    def labelled(self) -> Rows:
        """Row numbers of the documents that have a label, that is, a score."""
        return np.flatnonzero(~np.isnan(self.score))

    @property
    def logged(self) -> Logged:
        """The recorded answers to labelled documents, for checks of their plausibility."""
        rows = self.labelled
        return Logged.of(self.documents.iloc[rows], self.score[rows])

    @property
    def judged(self) -> AuditRun:
        """This run without the labels of answers that are not finite, as calibrators need it."""
        if self.finite.all():
            return self
        return labels_of(self, np.flatnonzero(self.finite & ~np.isnan(self.score)))

    @property
    def lower_is_better(self) -> bool:
        """Whether lower scores are better, according to lm-eval's results."""
        return bool(self.store.manifest.get("lower_is_better"))

    def counted_as_wrong(self) -> CountedAsWrong | None:
        """Return the mean score as logged, and with documents that are not finite counted as wrong.

        These are documents whose log-probabilities or score are not finite. Returns None if there
        are none, or if no document has a score.
        """
        if self.finite.all() or np.isnan(self.score).all():
            return None
        return counted_as_wrong(self.score, self.finite, self.lower_is_better)

    @property
    def right(self) -> NDArray[np.bool_]:
        """Whether each document's score is above 0.5, shape (n,); False without a label."""
        return np.asarray(self.score > CORRECT_ABOVE)

    @property
    def probability(self) -> Array:
        """Probability of the right answer among the choices, shape (n,); NaN if unknown."""
        if "probability" not in self.documents:
            return np.full(len(self), np.nan)
        return self.documents["probability"].to_numpy(dtype=np.float64)

    @property
    def perplexity(self) -> Array:
        """Perplexity of the tokens of each query, shape (n,); NaN where it is not known."""
        return self.documents["query_perplexity"].to_numpy(dtype=np.float64)

    @property
    def length(self) -> Array:
        """Length of each prompt in tokens, shape (n,); NaN where it is not known."""
        tokens = self.documents["prompt_tokens"].to_numpy(dtype=np.float64)
        return np.where(tokens > 0, tokens, np.nan)

    @property
    def raw_vectors(self) -> NDArray[np.float32]:
        """The vectors at their own lengths, not centred, shape (n, d).

        Raises:
            UsageError: The run was read from samples or logs, which have no vectors.
        """
        unit = self._unit
        norms = self.store.norms(self.layer)
        norms = norms[np.isfinite(norms) & (norms > 0)]
        return np.asarray(unit * norms[:, None].astype(np.float32))

    @property
    def _unit(self) -> NDArray[np.float32]:
        """The unit vectors, not centred, shape (n, d)."""
        return self.vectors.rows + self.vectors.mean.astype(np.float32)

    def describe(self) -> dict[str, Any]:
        """Return the facts about the run that reports show, with the keys of :class:`RunFacts`."""
        manifest = self.store.manifest
        tasks = {task: None for task in sorted(self.documents["task"].unique())}
        return {
            **{key: manifest.get(key) for key in _OF_MANIFEST},
            "tasks": manifest.get("tasks") or tasks,
            "layer": self.layer,
            "width": 0 if self.centred is None else int(self.centred.rows.shape[1]),
            "documents": len(self),
            "without_direction": self.without_direction,
            "labelled": len(self.labelled),
        }


def read_run(
    run: AuditRun | str | Path | None,
    layer: str | None = None,
    metric: str | None = None,
    *,
    demo: bool = False,
    any_range: bool = False,
) -> AuditRun:
    """Read a run from its folder or file; an `AuditRun` is returned unchanged.

    Args:
        run: Folder of a store, or folder or file of lm-eval's samples or Inspect's logs; None with
            ``demo``.
        layer: Layer of the vectors; by default the one that the store names.
        metric: ``[TASK=][FILTER/]METRIC``, or several of these separated by commas, by which samples
            or logs are scored; None for the first known metric of each task.
        demo: Read the bundled run.
        any_range: Allow scores outside [0, 1] in samples and logs.

    Raises:
        StoreError: The store cannot be read, has no such layer or no usable vector, or scores are
            outside [0, 1].
        HarnessError: The samples or logs cannot be read.
        UsageError: A ``metric`` is given for a store, which has its own scores; or a run and
            ``demo`` are both given or both missing.
    """
    if demo:
        if run is not None:
            given = "the run" if isinstance(run, AuditRun) else run
            raise UsageError(
                f"expected either a RUN or `--demo` (demo=True), got both; leave out {given} or "
                "`--demo`"
            )
        run = data_folder("demo_runs") / "sums-30"
    if run is None:
        raise UsageError(
            "expected a RUN, the folder of a finished run, got none; name one, or use the bundled "
            "run with `--demo` (demo=True)"
        )
    if isinstance(run, AuditRun):
        return run
    if is_logged(run):
        return AuditRun.of(read_logged(run, metric), layer, any_range=any_range)
    if metric is not None:
        raise UsageError(
            f"a metric can be chosen only for samples and logs, but {run} is a store, which has "
            "its own scores; leave the metric out, or name the samples",
            argument="metric",
        )
    return AuditRun.of(read_store(run), layer)


def part_of(build: Callable[..., Any], run: AuditRun, **options: Any) -> Any:
    """Return ``build(run, **options)``, or a `Missing` with the message if this raises DispersionError."""
    try:
        return build(run, **options)
    except DispersionError as error:
        return Missing(str(error))


def check_labels(run: AuditRun, what: str) -> None:
    """Check that a run has both right and wrong answers.

    ``what`` is the beginning of the error's message, such as ``mixtures need``.

    Raises:
        UsageError: The run has no labels, or not both right and wrong answers.
    """
    rows = run.labelled
    right = int(run.right[rows].sum())
    if not len(rows):
        raise UsageError(
            f"{what} labelled documents, but none of the run's documents has a label (a score that "
            "says whether the answer is right); use a run of a task that scores each document, for "
            "example by acc or exact_match"
        )
    if right in (0, len(rows)):
        side = "correctly"
        other = "harder"
        if not right:
            side = "wrongly"
            other = "easier"
        finite = "" if run.finite.all() else " with finite log-probabilities"
        raise UsageError(
            f"{what} right and wrong answers, but every one of the {len(rows)} labelled "
            f"documents{finite} was answered {side}; use a run with more documents, or of "
            f"{other} tasks"
        )


def _notes(run: AuditRun) -> list[str]:
    notes = []
    n = len(run)
    if run.without_direction:
        notes.append(
            f"Left out because their vector is zero or not finite: {run.without_direction} of "
            f"{n + run.without_direction} documents."
        )
    truncated = int(run.documents["truncated"].sum())
    if truncated:
        notes.append(
            f"Prompts that were too long for the model and lost their beginning: {truncated}."
        )
    unlabelled = int((np.isnan(run.score) & run.finite).sum())
    if 0 < unlabelled < n:
        use = "which count in no accuracy"
        if run.centred is not None:
            use = "of which only the vectors are used"
        notes.append(f"Documents without a label, {use}: {unlabelled} of {n}.")
    between = int(((run.score > 0) & (run.score < 1)).sum())
    if between:
        notes.append(
            f"Documents with a score between 0 and 1: {between}; confidence, mixtures, ranking and "
            f"the paper's protocol count a score above {CORRECT_ABOVE} as right."
        )
    return notes


def confidences(logprobs: Sequence[Sequence[float]]) -> Array:
    """Return each document's largest choice probability, from its log-probabilities; shape (n,).

    NaN for a document with fewer than two choices, without a finite log-probability, or with one
    that is NaN or +inf.

    >>> confidences([[0.0, 0.0, -1e9, -1e9], []]).tolist()
    [0.5, nan]
    """
    values = np.full(len(logprobs), np.nan)
    for rows, choices in by_length(logprobs):
        if choices.shape[1] < 2:
            continue
        # -inf is a probability of 0 and fine; NaN and inf are not log-probabilities.
        usable = np.isfinite(choices).any(axis=1) & (choices < np.inf).all(axis=1)
        known = choices[usable]
        likeliest = known.max(axis=1, keepdims=True)
        values[rows[usable]] = 1 / np.exp(known - likeliest).sum(axis=1)
    return values


@dataclass(frozen=True)
class Answers:
    """A model's answers: its accuracy against guessing, its most frequent answer, and doubts.

    Attributes:
        with_choices: Number of labelled documents with two or more choices.
        accuracy: Share of these documents that were answered right, in [0, 1]; NaN if there are
            none.
        accuracy_low: Lower end of the 95 % Wilson interval of ``accuracy``.
        accuracy_high: Upper end of that interval.
        chance: Expected accuracy of guessing, in [0, 1]; NaN without choices.
        commonest: The most frequent answer: its text, or its place among the choices; None without
            answers.
        commonest_documents: Number of documents with the most frequent answer.
        answered_documents: Number of documents with any answer.
        commonest_share: ``commonest_documents / answered_documents``, in [0, 1].
        commonest_accuracy: The score of always giving the most frequent answer; NaN if the right
            answers are not known.
        repeated_documents: Number of documents with the prompt (or text) and vector of an earlier
            document.
        not_finite: Number of documents whose log-probabilities or score are not finite.
        accuracy_as_wrong: The mean score with the documents of ``not_finite`` counted as wrong; NaN
            if there are none, or no scores.
        cautions: Sentences on why the answers allow no conclusion, for example because they are no
            better than guessing; empty if they allow one.
        warnings: Sentences on doubts that do not rule out a conclusion: about the documents of
            ``not_finite``, and about single tasks.
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
    cautions: Sequence[str]
    warnings: Sequence[str]


def answers_of(run: AuditRun) -> Answers:
    """Compare a run's answers with guessing, and find reasons why they allow no conclusion."""
    known = run.labelled[run.choices[run.labelled] >= 2]
    accuracy = math.nan
    chance = math.nan
    if len(known):
        accuracy = float(run.right[known].mean())
        chance = float((1 / run.choices[known]).mean())
    low, high = wilson(accuracy, len(known))
    repeated = repeated_documents(run, np.arange(len(run)))
    logged = run.logged
    commonest = logged.commonest()
    counted = run.counted_as_wrong()
    doubts = [_sentence(doubt) for doubt in logged.doubts()]
    warnings = [_sentence(clause) for clause in logged.doubts_by_task()]
    if counted is not None:
        nothing_finite = counted.not_finite == counted.documents
        sentences = doubts if nothing_finite else warnings
        sentences.insert(0, _sentence(counted.sentence()))
    if low <= chance <= high:
        doubts.append(
            f"The accuracy of {100 * accuracy:.1f} % (95 % {100 * low:.1f} to {100 * high:.1f}) is "
            f"no better than guessing ({100 * chance:.1f} %): right answers may be luck."
        )
    return Answers(
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
        repeated_documents=repeated,
        not_finite=int((~run.finite).sum()),
        accuracy_as_wrong=math.nan if counted is None else counted.as_wrong,
        cautions=[*doubts, *repeats_caution(repeated, len(run))],
        warnings=warnings,
    )


def _sentence(clause: str) -> str:
    """A clause on a run's answers as a sentence on the audited one."""
    if clause.startswith("answers "):
        return f"The model {clause}: which of its answers are right depends almost only on the targets."
    return f"{clause[0].upper()}{clause[1:]}."


def repeated_documents(run: AuditRun, rows: Rows) -> int:
    """Return how many of the documents ``rows`` repeat an earlier one of them.

    The prompt (or, if no prompts are recorded, the text), the content and the target have to be the
    same; if the run has vectors, these have to be nearly the same.
    """
    return len(_repeats(run, rows, _keys(run)))


def first_occurrences(run: AuditRun) -> Rows:
    """Return the rows of the documents that do not repeat an earlier document of the same task."""
    keys = _keys(run)
    of_tasks = (run.documents["task"] + "\n" + keys).where(keys.notna())
    return np.setdiff1d(np.arange(len(run)), _repeats(run, np.arange(len(run)), of_tasks))


def _keys(run: AuditRun) -> pd.Series[str]:
    """What documents that repeat have in common: the prompt's hash or the text, the content, the target.

    Questions about several images share a text, and two answers may be right to one prompt in two
    documents.
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


def repeats_caution(repeated: int, documents: int) -> list[str]:
    """Return a list with the caution that intervals are too short, as documents repeat others.

    The list is empty if fewer than 5 % of the documents repeat another document.
    """
    if repeated < _REPEATED * documents:
        return []
    return [
        f"{repeated} of {documents} documents repeat another document: errors and intervals are "
        "too short, as they treat all documents as independent."
    ]


def rows_where(run: AuditRun, expression: str) -> Rows:
    """Return the rows of the documents that satisfy an expression of their columns.

    The expression is evaluated by :meth:`pandas.DataFrame.eval`.

    Raises:
        UsageError: The expression is invalid, or no document satisfies it.
    """
    try:
        chosen = np.asarray(run.documents.eval(expression.strip(), engine="python"), dtype=object)
        kinds = set(map(type, chosen.flat))
        if chosen.shape != (len(run.documents),) or not kinds <= {bool, np.bool_}:
            raise ValueError("its value is not true or false for every document")
    except Exception as error:
        # pandas raises whatever the values raise; a user's expression must not cause a traceback.
        reason = first_line(error)
        raise UsageError(
            f"{expression!r} cannot be evaluated: {reason}; write comparisons of columns "
            f"({', '.join(map(str, run.documents.columns))}), such as {_EXAMPLE!r}",
            argument="where",
        ) from None
    rows = np.flatnonzero(chosen.astype(bool))
    if not len(rows):
        raise UsageError(
            f"no document satisfies {expression!r}; check the values of the columns that it names",
            argument="where",
        )
    return rows


def labels_of(run: AuditRun, rows: Rows) -> AuditRun:
    """Return a copy of the run in which only the documents ``rows`` keep their labels."""
    score = np.full_like(run.score, np.nan)
    score[rows] = run.score[rows]
    return replace(run, score=score)
