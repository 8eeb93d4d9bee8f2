"""Races on recorded answers: what a race would have named, and after how many questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError, require_extra
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.logs.judging import correctness
from lmeval_dispersion.output import progress_bar
from lmeval_dispersion.racing.arguments import How
from lmeval_dispersion.racing.contest import Contest, Scores, phases, run
from lmeval_dispersion.racing.folder import (
    changes_since_begun,
    contest_of,
    deleted_note,
    is_deleted,
    margins_of,
)
from lmeval_dispersion.racing.kept import (
    SETTINGS,
    WRONG_CONTENT,
    OlderResults,
    RaceResults,
    kept_race,
    not_as_left,
    race_results,
)
from lmeval_dispersion.racing.lineup import Entry, may_cut, questions_of
from lmeval_dispersion.racing.report import (
    Asked,
    MarginAt,
    Race,
    add_margin,
    asked_words,
    race_of,
    shown_words,
    unit_scores,
)
from lmeval_dispersion.racing.rule import SHARED, STEP, Array
from lmeval_dispersion.report import Col, Report, Table
from lmeval_dispersion.store import Store, read_store
from lmeval_dispersion.store.documents import Sample, by_filter, known_probabilities
from lmeval_dispersion.store.groups import (
    TaskGroup,
    groups_of,
    mean_score,
    question_weights,
    units_of,
)
from lmeval_dispersion.store.identity import SUFFIX
from lmeval_dispersion.store.joining import JoinedRun, check_judges, join
from lmeval_dispersion.store.samples import is_logged, read_logged
from lmeval_dispersion.store.sanity import (
    Fingerprints,
    Logged,
    failure,
    finite_score,
    pair_doubts,
)

if TYPE_CHECKING:
    import pandas as pd

ORDERS = 200
_NONE: Mapping[str, str] = {}


@dataclass(frozen=True)
class Replayed:
    """A checkpoint's row in a replay.

    Attributes:
        label: Name of the checkpoint.
        score: Mean score over all questions.
        named: Number of races in random orders that named it the best.
        asked: Mean share of the questions that it was asked in these races, from 0 to 1.
    """

    label: Annotated[str, Col("Checkpoint")]
    score: Annotated[float, Col("Score", ".3f")]
    named: Annotated[
        int, Col("Named best", "d", hint="number of races in random orders that named it the best")
    ]
    asked: Annotated[
        float, Col("Asked", ".0%", hint="share of the questions that it was asked, on average")
    ]


@dataclass(frozen=True, repr=False)
class Replay(Report):
    """A race on finished evaluations, and how races in random orders of the questions would end.

    Attributes:
        best: Label of the best checkpoint in the race with ``seed``. The fields from ``top`` to
            ``left_out`` describe the same race.
        top: Labels of the best checkpoints, the best first; at most as many as were wanted.
        tasks: Names of the tasks.
        error: Largest probability that a checkpoint better than the best by more than the margin
            was dropped.
        margin: The smallest difference in score that counts.
        margin_shown: No other checkpoint is better than the last in ``top`` by more than this
            difference in score; None if no margin can be shown.
        loaded: Number of checkpoints that raced: those that a screen lists, or all.
        of: Number of checkpoints with an evaluation.
        questions: Number of questions asked, summed over the checkpoints.
        questions_all: Number of questions of all checkpoints together: ``of`` times
            ``questions_each``.
        questions_each: Number of questions that all models answered.
        by: In which order the checkpoints raced: ``rows``, in the screen's order or as given, or
            ``block``, by their scores on shared questions.
        budget: Maximum number of questions, summed over the checkpoints; None for a race without a
            budget.
        left_out: Labels of the checkpoints that were left out after the shared questions.
        seed: Seed of the race, and of the random orders.
        orders: Number of races in random orders.
        same: Number of these races that named a checkpoint with the highest score.
        lost: Largest difference between the highest score and that of a checkpoint named by one of
            these races.
        share: Median, 5th and 95th percentile of the share of the questions that these races asked.
        shuffled: Whether the order of the checkpoints was random as well.
        checkpoints: The checkpoints, the highest score first.
        notes: Sentences on what was read, and on what was left out.
        failed: Model -> why it does not race.
    """

    template: ClassVar[str] = "replay.jinja"
    schema: ClassVar[str] = "dispersion-replay/1"
    libraries: ClassVar[Sequence[str]] = ("numpy",)
    guide: ClassVar[str] = "docs/reference/race.md"

    best: str
    top: Sequence[str]
    tasks: Sequence[str]
    error: float
    margin: float
    margin_shown: float | None
    loaded: int
    of: int
    questions: int
    questions_all: int
    questions_each: int
    by: str
    budget: int | None
    left_out: Sequence[str]
    seed: int
    orders: int
    same: int
    lost: float
    share: Sequence[float]
    shuffled: bool
    checkpoints: Sequence[Replayed]
    notes: Sequence[str]
    failed: Mapping[str, str]

    def tables(self) -> dict[str, Table]:
        """Return the table ``checkpoints``, the highest score first."""
        caption = f"{self.questions_each:,} questions, {self.orders} orders"
        return {"checkpoints": Table.of(self.checkpoints, caption)}

    def context(self) -> dict[str, Any]:
        """Return the sentences that the report's template shows."""
        loaded = "" if self.loaded < self.of else "; every checkpoint counts as loaded"
        return {
            "first": self._first(),
            "orders": self._orders(),
            "way": self._way(),
            "limits": loaded,
        }

    def _first(self) -> str:
        """The best, what is shown of the others, and what it took."""
        score = next(row.score for row in self.checkpoints if row.label == self.best)
        shown = "no other checkpoint was raced"
        if self.loaded > 1:
            is_part = bool(self.left_out)
            shown = shown_words(self.margin_shown, self.error, len(self.top), is_part=is_part)
        part = None if self.budget is None else self.loaded * self.questions_each
        asked = asked_words(self.questions, self.questions_all, part)
        return f"Best: {self.best}, {score:.3f}; {shown}; {asked}."

    def _orders(self) -> str:
        """How often random orders named the same best, and by how many questions."""
        first = self.checkpoints[0].label
        best = f"the same best, {first}," if self.same else f"a checkpoint other than {first}"
        median, low, high = (100 * share for share in self.share)
        loaded = ""
        if self.loaded < self.of:
            loaded = f" and {self.loaded} of {self.of} loaded"
        sentence = (
            f"On your own {self.of} checkpoints the race would have named {best} in "
            f"{self.same or self.orders} of {self.orders} random orders, with {median:.0f} % of the "
            f"questions asked (median; in nine of ten orders {low:.0f} to {high:.0f} %){loaded}."
        )
        if self.same < self.orders:
            sentence += f" Where it named another checkpoint, that one was worse by at most {self.lost:.3f}."
        return sentence

    def _way(self) -> str:
        """In which order the checkpoints were raced."""
        is_screened = self.loaded < self.of
        way = "The checkpoints were raced in the order given"
        if self.by == "block":
            way = "The checkpoints were raced in the order of their scores on the shared questions"
        elif self.shuffled:
            way = (
                "The results were named in alphabetical order, not in the order of a screen, so each "
                "race had a random order of the checkpoints"
            )
        elif is_screened:
            way = "The checkpoints were raced in the screen's order"
        if is_screened:
            way = f"{way}; checkpoints that the screen does not list count as not loaded"
        return f"{way}."


class Recorded(NamedTuple):
    """Finished evaluations of several models on the same questions.

    Attributes:
        answers: Model -> scores of its answers; all models have the questions in the same order.
        tasks: Names of the tasks.
        notes: Sentences on what was read, and on what was left out.
        failed: Model -> why it does not race.
        weights: Weight of each question, so that the weighted mean score is the mean over tasks;
            None if all are equal. Shape (N,).
    """

    answers: Mapping[str, Scores]
    tasks: Sequence[str]
    notes: Sequence[str] = ()
    failed: Mapping[str, str] = _NONE
    weights: Array | None = None

    def mean(self, label: str) -> float:
        """Return a model's mean score over all questions, weighted by ``weights``."""
        return float(np.average(self.answers[label].score, weights=self.weights))


def read_answers(places: Sequence[str], metric: str | None = None) -> Recorded:
    """Read finished evaluations, and keep the questions that all models answered.

    A model with an answer that is not finite (such as a log-probability of NaN) does not race; it
    is entered in ``failed``.

    Args:
        places: For each model, a folder or file with lm-eval's results, or a store; or the folder
            of one race.
        metric: ``[FILTER/]METRIC`` to judge by; None for the first known metric of each task.

    Raises:
        DispersionError: A result cannot be read, or has a score outside 0 to 1; or there are fewer
            than two models, or fewer than 50 questions that all models answered with the same
            prompts.
        MissingExtraError: The extra ``audit`` is not installed.
    """
    require_extra("audit", "finished evaluations")
    raced = _asked_everything(places[0]) if len(places) == 1 else None
    stores, failed = _stores(raced or places, metric)
    known = [store.documents.dropna(subset="correct") for store in stores]
    runs = list[JoinedRun]()
    for store, documents in zip(stores, known, strict=True):
        runs.append(JoinedRun(store.model, store.path, documents, store.parts))
    rows, joined = join(runs)
    questions = len(rows[0])
    most = max(map(len, known))
    if questions < 2 * SHARED:
        raise UsageError(
            f"expected at least {2 * SHARED} questions with a score in all results, got {questions} of "
            f"{most}; name results of the same tasks"
        )
    manifests = {store.model: store.manifest for store in stores}
    check_judges(manifests)
    shared = [documents.iloc[chosen] for documents, chosen in zip(known, rows, strict=True)]
    tasks = list(shared[0]["task"].unique())
    _check_direction(manifests, tasks)
    answers = dict[str, Scores]()
    for store, documents in zip(stores, shared, strict=True):
        values = documents.reindex(columns=["correct", "probability"]).to_numpy(float)
        scores = Scores(values[:, 0], values[:, 1])
        lowest = scores.score.min()
        highest = scores.score.max()
        if not 0 <= lowest <= highest <= 1:
            raise UsageError(
                f"expected scores from 0 to 1, got {lowest:g} to {highest:g} from {store.model}; name "
                "another metric (`--metric`)"
            )
        answers[store.model] = scores
    notes = _judged_by(manifests)
    for note in joined:
        if "models differ" not in note:
            notes.append(note)
    for store in stores:
        notes += store.manifest.get("notes", ())
    if raced:
        notes.append("Only checkpoints that the race asked all questions are replayed.")
    notes += _doubts(stores, shared)
    if questions < most:
        notes.append(
            f"{questions:,} of {most:,} questions are in all results; the others are left out."
        )
    groups = stores[0].manifest.get("groups") or {}
    weights = question_weights(shared[0]["task"].tolist(), groups)
    return Recorded(answers, tasks, list(dict.fromkeys(notes)), failed, weights)


def _stores(places: Sequence[str], metric: str | None) -> tuple[list[Store], dict[str, str]]:
    """The results of models whose answers are finite, and why another model fails, by name.

    Raises:
        UsageError: There are fewer than two of them, or one model has several.
    """
    stores = list[Store]()
    names = list[str]()
    failed = dict[str, str]()
    for place in places:
        store = read_logged(place, metric) if is_logged(place) else read_store(place)
        names.append(store.model)
        reason = _failure(store)
        if reason:
            failed[store.model] = reason
        else:
            stores.append(store)
    if len(names) < 2 or len(set(names)) < len(names):
        raise UsageError(
            "expected results of two or more models, one for each model, got those of "
            f"{', '.join(names)}; name one set of results for each model"
        )
    if len(stores) < 2:
        reasons = ", ".join(f"{name} ({reason})" for name, reason in failed.items())
        raise UsageError(
            f"expected two or more models with finite answers, got {len(stores)}; left out: "
            f"{reasons}"
        )
    return stores, failed


def _check_direction(manifests: Mapping[str, Mapping[str, Any]], tasks: Sequence[str]) -> None:
    """Raise UsageError if lower scores of a raced task are the better ones."""
    for name, manifest in manifests.items():
        plain = {task.removesuffix(SUFFIX) for task in tasks}
        lower = sorted(plain.intersection(manifest.get("lower_is_better", ())))
        if lower:
            raise UsageError(
                "expected a metric for which higher values are better, but lower values are "
                f"better for {', '.join(lower)} in the results of {name}; name another metric",
                argument="metric",
            )


def _failure(store: Store) -> str:
    """Why a store's answers to questions with a score fail its model; "" where all are finite."""
    documents = store.documents
    scores = documents["correct"].to_numpy(float)
    scored = ~np.isnan(scores)
    if not store.layers:  # a log; elsewhere a document without a score has no label
        tasks = documents["task"].tolist()
        scored |= ~finite_score(scores, tasks)
    log_probabilities = documents["logprobs"][scored].tolist()
    return failure(log_probabilities, scores[scored])


def _doubts(stores: Sequence[Store], shared: Sequence[pd.DataFrame]) -> list[str]:
    """Notes of the sanity pass: on each model, and on pairs by the ``shared`` documents, in one order."""
    notes = []
    runs = []
    for store, documents in zip(stores, shared, strict=True):
        known = store.documents.dropna(subset="correct")
        log = Logged.of(known, known["correct"].to_numpy(float))
        clauses = log.doubts() + log.remarks()
        notes += [f"{store.model}: {clause}." for clause in clauses]
        scores = documents["correct"].to_numpy(float)
        prints = Fingerprints.of(documents["logprobs"].tolist(), scores)
        runs.append((store.model, prints, store.documents))
    return [*notes, *pair_doubts(runs)]


def _judged_by(manifests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """By which metrics lm-eval's samples are raced, and filters that differ by more than chance."""
    metrics: dict[str, None] = {}
    sentences = []
    for name, manifest in manifests.items():
        for metric in (manifest.get("judges") or {}).values():
            if metric is not None:
                metrics[metric] = None
        sentences += [f"{name}, {sentence}" for sentence in manifest.get("filters", ())]
    if metrics:
        sentences.append(f"Raced by {', '.join(metrics)}.")
    return sentences


def judged(place: str, how: How) -> Race | None:
    """Return the result of a race, judged by the answers in its folder; no model is loaded.

    A checkpoint that would have to be asked more questions is undecided.

    Args:
        place: The folder.
        how: The error, the margin and the number of best checkpoints wanted.

    Returns:
        The race; None if the folder has no race, or one of an older version.

    Raises:
        UsageError: A file of the folder is damaged.
        HarnessError: A checkpoint's samples were changed.
        DispersionError: A checkpoint's samples cannot be read.
    """
    path = Path(place).expanduser()
    kept = kept_race(path, older=True) if (path / SETTINGS).is_file() else {}
    if "schema" not in kept:
        return None
    entries = kept["checkpoints"]
    contest = contest_of(kept, how)
    answers = _answers_in(path, contest, kept["drawn"])
    labels = _held(contest, entries, answers.known)
    if kept["turns"]:
        for label in contest.turns(labels, cut=may_cut(entries)):
            known = answers.known[label]
            contest.add(label, known.at(np.arange(contest.count(label), len(known.score))))
    notes = [
        *kept["notes"],
        *deleted_note(contest),
        *changes_since_begun(kept, contest),
        "Judged by the answers in the folder; no model was loaded.",
    ]
    race = race_of(
        contest,
        entries,
        Asked(answers.seconds, answers.failed),
        task=kept["tasks"],
        metric=", ".join(answers.metrics),
        notes=notes,
    )
    units = unit_scores(contest, partial(_by_unit, kept, answers.groups))
    return replace(race, margins=margins_of(kept, contest), units=units)


def _held(contest: Contest, entries: Sequence[Entry], known: Mapping[str, Scores]) -> list[str]:
    """Enter what was answered before the turns; returns the labels that may have a turn."""
    raced = [entry for entry in entries if entry.chosen]
    gone = {entry.label for entry in raced if is_deleted(entry)}
    if len(gone) == len(raced):
        # A folder that came alone, without any checkpoint, tells nothing of deleted ones.
        gone = set()
    labels = list[str]()
    for entry in entries:
        label = entry.label
        if label not in known:
            continue
        if label in gone:
            contest.hold(label, known[label])
            contest.delete(label)
            continue
        labels.append(label)
        shared = contest.sharing_of(label)
        if shared:
            contest.hold(label, known[label].first(shared))
    return labels


def _by_unit(
    kept: Mapping[str, Any], groups: Mapping[str, TaskGroup], scores: Array
) -> dict[str, tuple[int, float]]:
    """Unit -> number of its questions with a score in ``scores`` (N,), not NaN, and their mean."""
    names = [task for task, _ in kept["drawn"]]
    tasks = np.array(names)
    means = dict[str, tuple[int, float]]()
    for unit, members in units_of(kept.get("identity", names), groups).items():
        is_asked = np.isin(tasks, members) & ~np.isnan(scores)
        asked = np.flatnonzero(is_asked)
        if not len(asked):
            continue
        mean = float(scores[asked].mean())
        if kept.get("weights"):
            of_asked = [names[place] for place in asked]
            mean = mean_score(of_asked, scores[asked], groups)
        means[unit] = (len(asked), mean)
    return means


@dataclass
class _Kept:
    """What a race's folder has of its checkpoints.

    Attributes:
        known: Label -> answers, in the checkpoint's own order.
        seconds: Label -> time to load and ask it.
        failed: Label -> why it fails.
        metrics: The metrics that scored.
        groups: lm-eval's groups of tasks with one figure.
    """

    known: dict[str, Scores] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, None] = field(default_factory=dict)
    groups: Mapping[str, TaskGroup] = field(default_factory=dict)


def _answers_in(path: Path, contest: Contest, drawn: Sequence[tuple[str, int]]) -> _Kept:
    """Read a race's folder; a checkpoint with an answer that is not finite fails in the contest."""
    kept = _Kept()
    places = {(task, i): place for place, (task, i) in enumerate(drawn)}
    for file in sorted(path.glob("*/results_*.json")):
        content = race_results(file, RaceResults)
        race = content["race"]
        label = race["label"]
        scores = np.full(len(places), np.nan)
        probabilities = np.full(len(places), np.nan)
        log_probabilities = list[Sequence[float]]()
        values = list[float]()
        for task, (chosen, metric) in race["judges"].items():
            try:
                samples = _samples(file, task, chosen, content)
                for i, sample in samples.items():
                    _, score = correctness(sample.metrics, metric)
                    place = places[task, i]
                    scores[place] = score
                    probabilities[place] = sample.likely(score)
                    log_probabilities.append(sample.columns["logprobs"])
                    values.append(score)
            except (OSError, *WRONG_CONTENT) as error:
                step = "remove the folder, and race the checkpoint again"
                raise not_as_left(file.parent, error, step) from error
            kept.metrics[metric] = None
        reason = failure(log_probabilities, np.array(values))
        if reason:
            kept.failed[label] = reason
            contest.fail(label)
            continue
        order = contest.order(label)
        is_unknown = np.isnan(scores[order])
        asked = order[: np.append(is_unknown, True).argmax()]
        if len(asked):
            kept.known[label] = Scores(scores, probabilities).at(asked)
            kept.seconds[label] = race["seconds"]
            kept.groups = kept.groups or groups_of(content)
    return kept


def _samples(
    file: Path,
    task: str,
    chosen: str,
    content: RaceResults,
) -> dict[int, Sample]:
    """A task's samples of the filter ``chosen``, by document, next to the results ``file``."""
    name = file.name.replace("results_", f"samples_{task}_")
    logged = file.with_name(name).with_suffix(".jsonl")
    size = content["race"]["bytes"][task]
    lines = logged.read_bytes()[:size].decode()
    filters = by_filter(logged, content["configs"][task], lines)
    return known_probabilities(filters[chosen])


def _asked_everything(place: str) -> list[str] | None:
    """A race's checkpoint folders with all answers; None for another folder."""
    path = Path(place).expanduser()
    if not (path / SETTINGS).is_file():
        return None
    folders = dict[str, str]()  # of those with all answers
    files = sorted(path.glob("*/results_*.json"))
    for file in files:
        race = race_results(file, OlderResults)["race"]
        if race["questions"] == race["of"]:
            folders[race["label"]] = str(file.parent)
    whole = list[str]()
    for label, *_ in kept_race(path, older=True)["checkpoints"]:
        if label in folders:
            whole.append(folders[label])
    if len(whole) < 2:
        raise UsageError(
            f"expected a race in {place} in which two or more checkpoints were asked all "
            f"questions, got {len(whole)} of {len(files)}; run the race to its end, or name "
            "finished evaluations"
        )
    return whole


def replay(
    recorded: Recorded,
    *,
    orders: int = ORDERS,
    listed: Sequence[str] = (),
    shuffled: bool = False,
    seed: int = 0,
    quiet: bool = True,
    **settings: Any,
) -> Replay:
    """Race once on finished evaluations, then many times with the questions in random orders.

    Args:
        recorded: The evaluations.
        orders: Number of races in random orders of the questions.
        listed: Models on a screen's short list; only these race, in this order. Empty for all.
        shuffled: Whether the order of the models is random as well.
        seed: Seed of the race, and of the random orders.
        quiet: Whether to hide the progress.
        settings: Further arguments of :func:`raced`.

    Raises:
        UsageError: The budget is less than one question for each checkpoint.
    """
    answers = recorded.answers
    labels = list(listed or answers)

    def race(order: int) -> Contest:
        going = {label: answers[label] for label in labels}
        return raced(going, seed=order, weights=recorded.weights, **settings)

    first = race(seed)
    races = list[Contest]()
    rng = np.random.default_rng(seed)
    with progress_bar(hidden=quiet) as update:
        for i in range(orders):
            update(i, orders, "races")
            if shuffled:
                rng.shuffle(labels)
            races.append(race(int(rng.integers(2**32))))
    shown = first.shown(labels)
    everything = first.questions * len(answers)
    shares = [contest.asked / everything for contest in races]
    rows = _rows(recorded, races)
    best = rows[0].score
    return Replay(
        best=shown.labels[0],
        top=shown.labels,
        tasks=recorded.tasks,
        error=first.error,
        margin=first.margin,
        margin_shown=shown.margin,
        loaded=len(labels),
        of=len(answers),
        questions=first.asked,
        questions_all=everything,
        questions_each=first.questions,
        by="block" if first.sharing or first.shared else "rows",
        budget=settings.get("budget"),
        left_out=first.left_out,
        seed=seed,
        orders=orders,
        same=sum(row.named for row in rows if row.score == best),
        lost=max(best - row.score for row in rows if row.named),
        share=np.quantile(shares, (0.5, 0.05, 0.95)).tolist(),
        shuffled=shuffled,
        checkpoints=rows,
        notes=recorded.notes,
        failed=recorded.failed,
    )


def _rows(recorded: Recorded, races: Sequence[Contest]) -> list[Replayed]:
    """The checkpoints, the highest score first, then the most often named."""
    named = Counter(contest.named[0] for contest in races)
    rows = []
    for label, mine in recorded.answers.items():
        asked = [contest.count(label) for contest in races]
        share = float(np.mean(asked)) / len(mine.score)
        rows.append(Replayed(label, recorded.mean(label), named[label], share))
    return sorted(rows, key=lambda row: (-row.score, -row.named, row.label))


def raced(
    answers: Mapping[str, Scores],
    *,
    seed: int = 0,
    cut: bool = False,
    budget: int | None = None,
    goes_on: bool = False,
    kept: bool = False,
    watch: Callable[[Contest], object] = id,
    **settings: Any,
) -> Contest:
    """Run a race on recorded answers, one checkpoint after the other, and return its contest.

    Args:
        answers: Label -> scores of the answers; all checkpoints have the questions in one order.
        seed: Seed that draws the questions and their orders.
        cut: Whether most of a long list may be left out after the shared questions (see
            :meth:`Contest.turns`).
        budget: Maximum number of questions, summed over all checkpoints and asked in phases (see
            :func:`~lmeval_dispersion.racing.contest.phases`); None to race to the end.
        goes_on: Whether the race goes on to its end once the budget is spent.
        kept: Whether to plan the phases for checkpoints that all stay loaded.
        watch: Called with the contest each time that answers have come in.
        settings: Further arguments of :class:`Contest`; ``weights`` are in the order of the
            answers.

    Raises:
        UsageError: The budget is less than one question for each checkpoint.
    """
    labels = list(answers)
    count = len(answers[labels[0]].score)
    drawn = np.random.default_rng(seed).permutation(count)
    if settings.get("weights") is not None:
        settings["weights"] = settings["weights"][drawn]
    contest = Contest(count, seed=seed, **settings)

    def hold(label: str) -> None:
        shared = contest.order(label)[: contest.sharing_of(label)]
        contest.hold(label, answers[label].at(drawn[shared]))
        watch(contest)

    if budget is not None:
        others = [label for label in labels if label != contest.reference]
        has_reference = len(others) < len(labels)
        contest.split = len(others)
        planned = phases(
            len(others),
            count,
            budget,
            top=contest.top,
            kept=kept,
            reference=has_reference,
        )
        for phase in planned:
            for label in contest.share(phase, labels):
                hold(label)
        if not goes_on:
            return contest
    elif contest.sharing:
        for label in labels:
            hold(label)
    for label in contest.turns(labels, cut=cut):
        order = drawn[contest.order(label)]

        def ask(
            begin: int,
            end: int,
            label: str = label,
            order: NDArray[np.int64] = order,
        ) -> Scores:
            watch(contest)
            return answers[label].at(order[begin:end])

        # The first checkpoint to answer everything is not compared.
        run(contest, label, ask, STEP if contest.best else count)
        watch(contest)
    return contest


def demo(seed: int = 0, **settings: Any) -> Race:
    """Race the best-ranked third of the bundled models on recorded answers, in order of rank.

    No model is loaded. The other bundled models are listed in the result, and do not race.

    Args:
        seed: Seed that draws the questions and their orders.
        settings: Further arguments of :func:`raced`.
    """
    with np.load(data_folder("demo") / "answers.npz") as file:
        labels = file["label"].tolist()
        score = file["score"].astype(float)
        probability = file["probability"].astype(float)
    listed = max(3, len(labels) // 3)
    answers = dict[str, Scores]()
    entries = list[Entry]()
    for place, label in enumerate(labels):
        is_listed = place < listed
        entries.append(Entry(label, {}, place + 1, "rank" if is_listed else None))
        if is_listed:
            answers[label] = Scores(score[place], probability[place])
    race = _race_of_recorded(answers, entries, "sums", "acc", seed, settings)
    return replace(
        race, notes=["The answers were recorded before; no model was loaded.", *race.notes]
    )


def released(seed: int = 0, *, budget: int | str | None = None, **settings: Any) -> Race:
    """Race 43 released models on their recorded answers to GSM8K, after shared questions.

    No model is loaded.

    Args:
        seed: Seed that draws the questions and their orders.
        budget: Maximum number of questions, summed over the models: a number, or a share ``N%`` of
            all; None to race to the end.
        settings: Further arguments of :func:`raced`.

    Raises:
        UsageError: The budget is neither a number nor a share, or is less than one question for
            each model.
    """
    with np.load(data_folder("released") / "gsm8k.npz") as file:
        labels = file["names"].tolist()
        right = np.unpackbits(file["right"], axis=1, count=int(file["questions"]))
    unknown = np.full(right.shape[1], np.nan)
    answers = dict[str, Scores]()
    for label, row in zip(labels, right, strict=True):
        answers[label] = Scores(row.astype(float), unknown)
    settings["sharing"] = SHARED
    if budget is not None:
        settings["budget"] = questions_of(budget, right.size)
    entries = [Entry(label, {}, None, "block") for label in labels]
    race = _race_of_recorded(answers, entries, "gsm8k", "exact_match", seed, settings)
    note = (
        "The answers were recorded by ZeroEval (github.com/WildEval/ZeroEval, Apache-2.0); no model "
        "was loaded."
    )
    return replace(race, budget=settings.get("budget"), notes=[note, *race.notes])


def _race_of_recorded(
    answers: Mapping[str, Scores],
    entries: Sequence[Entry],
    task: str,
    metric: str,
    seed: int,
    settings: Mapping[str, Any],
) -> Race:
    """The race of a list on recorded ``answers``, with the margins shown on its way."""
    margins = list[MarginAt]()
    labels = list(answers)
    contest = raced(
        answers, seed=seed, watch=lambda now: add_margin(margins, now, labels), **settings
    )
    return replace(race_of(contest, entries, task=task, metric=metric), margins=margins)
