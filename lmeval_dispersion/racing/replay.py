"""Races on recorded answers: what a race would have named, and after how many questions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError, require_extra
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.logs.judging import correctness
from lmeval_dispersion.output import progress_bar
from lmeval_dispersion.racing.contest import NOTHING, Contest, Phase, Scores, phases, run
from lmeval_dispersion.racing.folder import margins_of, said_of
from lmeval_dispersion.racing.kept import (
    SETTINGS,
    WRONG_CONTENT,
    OlderResults,
    RaceResults,
    kept_race,
    not_as_left,
    race_results,
)
from lmeval_dispersion.racing.lineup import Entry, Lineup
from lmeval_dispersion.racing.plan import may_cut
from lmeval_dispersion.racing.report import MarginAt, Race, add_margin, race_of
from lmeval_dispersion.racing.rule import SHARED, STEP, Array
from lmeval_dispersion.report import Col, Report, Table
from lmeval_dispersion.store import Store, read_store
from lmeval_dispersion.store.documents import by_filter, known_probabilities
from lmeval_dispersion.store.groups import question_weights
from lmeval_dispersion.store.identity import SUFFIX
from lmeval_dispersion.store.joining import JoinedRun, check_judges, join
from lmeval_dispersion.store.samples import is_logged, read_logged
from lmeval_dispersion.store.sanity import (
    Fingerprints,
    Logged,
    equal_answers,
    equal_answers_clause,
    failure,
    finite_score,
    renumbered,
    renumbered_clause,
)

if TYPE_CHECKING:
    import pandas as pd

ORDERS = 200
_NONE: Mapping[str, str] = {}


@dataclass(frozen=True)
class Replayed:
    """One checkpoint: its score on all questions, and the share that the races asked it."""

    label: Annotated[str, Col("Checkpoint")]
    score: Annotated[float, Col("Score", ".3f")]
    named: Annotated[int, Col("Named best", "d", hint="in how many of the orders")]
    asked: Annotated[
        float, Col("Asked", ".0%", hint="share of the questions, mean over the orders")
    ]


@dataclass(frozen=True, repr=False)
class Replay(Report):
    """A race on finished evaluations, and its distribution over random orders; highest score first."""

    template: ClassVar[str] = "replay.jinja"
    schema: ClassVar[str] = "dispersion-replay/1"
    libraries: ClassVar[Sequence[str]] = ("numpy",)
    guide: ClassVar[str] = "docs/reference/race.md"

    best: str  # that the race of ``seed`` names, as do the keys up to ``seed``
    top: Sequence[str]
    tasks: Sequence[str]
    error: float
    margin: float
    margin_shown: (
        float | None
    )  # no other is better by more; None where too few were asked everything
    loaded: int  # checkpoints that a screen lists, or all
    of: int
    questions: int  # questions asked, over all checkpoints
    questions_all: int
    questions_each: int  # that all models answered
    by: str  # rows: in the order of the list; block: by shared questions
    budget: int | None
    left_out: Sequence[str]  # labels that did not go on after the shared questions
    seed: int
    orders: int
    same: int  # orders in which the best was named, or another of its score
    lost: float  # largest loss of score, where another was named
    share: Sequence[float]  # asked share of all questions: median, 5th and 95th percentile
    shuffled: bool  # whether the checkpoints' order is random as well
    checkpoints: Sequence[Replayed]
    notes: Sequence[str]
    failed: Mapping[str, str]  # by name, why a checkpoint does not race

    def tables(self) -> dict[str, Table]:
        """``checkpoints``: the highest score first."""
        caption = f"{self.questions_each:,} questions, {self.orders} orders"
        return {"checkpoints": Table.of(self.checkpoints, caption)}

    def context(self) -> dict[str, Any]:
        """Template values: the best one's score, and the margin in words, never below what is shown."""
        margin = self.margin_shown or 0.0
        digits = math.ceil(round(1000 * margin, 6)) / 1000
        score = next(row.score for row in self.checkpoints if row.label == self.best)
        return {"amount": score, "margin": f"{digits:g}" if digits else ""}


class Recorded(NamedTuple):
    """Finished evaluations of several models.

    Attributes:
        answers: Model -> answers, in one order of the questions.
        tasks: Names of the tasks.
        notes: Sentences on what was read, and left out.
        failed: Model -> why it does not race.
        weights: Of the questions, so that the mean is that over tasks; None where all are equal. Shape (N,).
    """

    answers: Mapping[str, Scores]
    tasks: Sequence[str]
    notes: Sequence[str] = ()
    failed: Mapping[str, str] = _NONE
    weights: Array | None = None

    def mean(self, label: str) -> float:
        """A model's mean score over all questions."""
        return float(np.average(self.answers[label].score, weights=self.weights))


def read_answers(places: Sequence[str], metric: str | None = None) -> Recorded:
    """Read results or stores, one per model, for the questions that all of them answered.

    ``metric`` is ``[FILTER/]METRIC`` (default: each task's first known). A model with an answer that is not
    finite fails, and does not race.

    Raises:
        DispersionError: A result cannot be read, has no accuracy, or was prompted unlike the first.
    """
    require_extra("audit", "finished evaluations")
    raced = _asked_everything(places[0]) if len(places) == 1 else None
    places = raced or places
    stores = [
        read_logged(place, metric) if is_logged(place) else read_store(place) for place in places
    ]
    names = [store.model for store in stores]
    if len(names) < 2 or len(set(names)) < len(names):
        raise UsageError(
            f"expected results of two or more models, each once, got {', '.join(names)}"
        )
    failed = {store.model: why for store in stores if (why := _failure(store))}
    stores = [store for store in stores if store.model not in failed]
    if len(stores) < 2:
        reasons = "; ".join(f"{name}: {why}" for name, why in failed.items())
        raise UsageError(
            f"expected two or more models with finite answers, got {len(stores)}; {reasons}"
        )
    known = [store.documents.dropna(subset="correct") for store in stores]
    most = max(map(len, known))
    runs = [
        JoinedRun(store.model, store.path, documents, store.parts)
        for store, documents in zip(stores, known, strict=True)
    ]
    rows, joined = join(runs)
    count = len(rows[0])
    if count < 2 * SHARED:
        raise UsageError(
            f"expected {2 * SHARED} or more questions with a score in all results, got {count} of "
            f"{most}; name results of the same tasks"
        )
    manifests = {store.model: store.manifest for store in stores}
    check_judges(manifests)
    shared = [documents.iloc[chosen] for documents, chosen in zip(known, rows, strict=True)]
    answers = {}
    for store, documents in zip(stores, shared, strict=True):
        values = documents.reindex(columns=["correct", "probability"])
        answers[store.model] = Scores(*values.to_numpy(float).T)
    tasks = list(shared[0]["task"].unique())
    _check_direction(manifests, tasks)
    if not all(0 <= answer.score.min() <= answer.score.max() <= 1 for answer in answers.values()):
        raise UsageError("expected scores from 0 to 1, as accuracy has; name another by `--metric`")
    notes = [*_judged_by(manifests)]
    notes += [f"{note[0].upper()}{note[1:]}" for note in joined if "models differ" not in note]
    notes += [note for store in stores for note in store.manifest.get("notes", ())]
    if raced:
        notes.append("Of the race, the checkpoints that were asked everything.")
    notes += _doubts(stores, shared)
    if count < most:
        notes.append(
            f"{count:,} of {most:,} questions are in all results; the others are left out."
        )
    groups = stores[0].manifest.get("groups") or {}
    weights = question_weights(shared[0]["task"].tolist(), groups)
    return Recorded(answers, tasks, list(dict.fromkeys(notes)), failed, weights)


def _check_direction(manifests: Mapping[str, Mapping[str, Any]], tasks: Sequence[str]) -> None:
    """Raise UsageError if lower scores of a raced task are the better ones."""
    for name, manifest in manifests.items():
        lower = {task.removesuffix(SUFFIX) for task in tasks} & {
            *manifest.get("lower_is_better", ())
        }
        if lower:
            raise UsageError(
                f"expected scores of which higher ones are better, got {', '.join(sorted(lower))} in {name}, "
                "of which lower ones are; name another",
                argument="metric",
            )


def _failure(store: Store) -> str:
    """Why a store's answers to questions with a score fail its model; "" where all are finite."""
    documents = store.documents
    scores = documents["correct"].to_numpy(float)
    scored = ~np.isnan(scores)
    if not store.layers:  # a log; elsewhere a document without a score has no label
        scored |= ~finite_score(scores, documents["task"].tolist())
    return failure(documents["logprobs"][scored].tolist(), scores[scored])


def _doubts(stores: Sequence[Store], shared: Sequence[pd.DataFrame]) -> list[str]:
    """Notes of the sanity pass: on each model, and on pairs by the ``shared`` documents, in one order."""
    notes = []
    prints = dict[str, Fingerprints]()
    for store, documents in zip(stores, shared, strict=True):
        known = store.documents.dropna(subset="correct")
        log = Logged(
            tasks=known["task"].tolist(),
            log_probabilities=known["logprobs"].tolist(),
            predictions=known["prediction"].tolist(),
            targets=known["target"].tolist(),
            scores=known["correct"].to_numpy(float),
        )
        notes += [f"{store.model}: {clause}." for clause in [*log.doubts(), *log.remarks()]]
        scores = documents["correct"].to_numpy(float)
        prints[store.model] = Fingerprints.of(documents["logprobs"].tolist(), scores)
    for one, other in combinations(prints, 2):
        equal, telling = equal_answers(prints[one], prints[other])
        if equal:
            notes.append(f"{one} and {other}: {equal_answers_clause(equal, telling)}.")
    for store in stores[1:]:
        if moved := renumbered(_hashes(stores[0]), _hashes(store)):
            notes.append(f"{store.model}: {renumbered_clause(moved)}.")
    return notes


def _hashes(store: Store) -> dict[tuple[str, int], str]:
    columns = store.documents[["task", "doc_id", "doc_hash"]].dropna()
    return {(task, doc_id): text for task, doc_id, text in columns.itertuples(index=False)}


def _judged_by(manifests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """By which metrics lm-eval's samples are raced, and filters that differ by more than chance."""
    metrics: dict[str, None] = {}
    sentences = []
    for name, manifest in manifests.items():
        metrics |= dict.fromkeys(
            by for by in (manifest.get("judges") or {}).values() if by is not None
        )
        sentences += [f"{name}, {sentence}" for sentence in manifest.get("filters", ())]
    if metrics:
        sentences.append(f"Raced by {', '.join(metrics)}.")
    return sentences


def judged(place: str, *, error: float, margin: float, top: int = 1) -> Race | None:
    """Judge a race's folder anew from its answers; None for another folder, or an older version's.

    A checkpoint that would need more questions is undecided. UsageError for a broken ``race.json``.
    """
    path = Path(place).expanduser()
    kept = kept_race(path, older=True) if (path / SETTINGS).is_file() else {}
    if "schema" not in kept:
        return None
    entries = kept["checkpoints"]
    places = {(task, i): n for n, (task, i) in enumerate(map(tuple, kept["drawn"]))}
    contest = Contest(
        len(places),
        error,
        margin,
        kept["seed"],
        against=dict(kept["turns"]),
        top=top,
        step=kept.get("step", STEP),
        split=kept.get("split", 0),
        shared=dict(kept.get("shared", {})),
        may_stop=kept.get("may_stop", False),
        weights=np.array(kept["weights"]) if kept.get("weights") else None,
    )
    lineup = Lineup(entries, by=kept["order"])
    if lineup.by == "block":
        contest.sharing = min(SHARED, len(places))
        contest.reference = lineup.reference
    answers = _answers_in(path, contest, places)
    known = answers.known
    labels = [entry.label for entry in entries if entry.label in known]
    for label in labels:
        if contest.sharing_of(label):
            contest.hold(label, known[label].first(contest.sharing_of(label)))
    cut = may_cut(entries)
    for label in contest.turns(labels, cut=cut) if kept["turns"] else ():
        begin = len(contest.answered.get(label, NOTHING).score)
        contest.add(label, known[label].at(np.arange(begin, len(known[label].score))))
    notes = [
        *kept["notes"],
        *said_of(kept, contest),
        "Judged by the folder's answers; no model was loaded.",
    ]
    return race_of(
        contest, entries, task=kept["tasks"], metric=", ".join(answers.metrics),
        seconds=answers.seconds, failed=answers.failed, notes=notes,
        margins=margins_of(kept, contest),
    )  # fmt: skip


class _Kept(NamedTuple):
    """A race folder's answers in each checkpoint's order, its seconds, and why one fails, by label."""

    known: dict[str, Scores]
    seconds: dict[str, float]
    failed: dict[str, str]
    metrics: dict[str, None]


def _answers_in(path: Path, contest: Contest, places: Mapping[tuple[str, int], int]) -> _Kept:
    """Read a race's folder; a checkpoint with an answer that is not finite fails in the contest."""
    kept = _Kept({}, {}, {}, {})
    for file in sorted(path.glob("*/results_*.json")):
        content = race_results(file, RaceResults)
        race = content["race"]
        label = race["label"]
        scores = np.full((2, len(places)), np.nan)
        answers = list[tuple[Sequence[float], float]]()
        for task, (chosen, metric) in race["judges"].items():
            try:
                answers += _judged(scores, file, task, (chosen, metric), places, content)
            except (OSError, *WRONG_CONTENT) as error:
                step = "remove it, and race the checkpoint anew"
                raise not_as_left(file.parent, error, step) from error
            kept.metrics[metric] = None
        why = failure([logs for logs, _ in answers], np.array([score for _, score in answers]))
        if why:
            kept.failed[label] = why
            contest.fail(label)
            continue
        order = contest.order(label)
        asked = order[: np.append(~np.isnan(scores[0, order]), False).argmin()]
        if len(asked):
            kept.known[label] = Scores(*scores).at(asked)
            kept.seconds[label] = race["seconds"]
    return kept


def _judged(
    scores: Array,
    file: Path,
    task: str,
    judge: tuple[str, str],
    places: Mapping[tuple[str, int], int],
    content: RaceResults,
) -> list[tuple[Sequence[float], float]]:
    """Each answer's log-probabilities and score in a task's samples next to the results ``file``.

    Scores and probabilities are put into ``scores`` (2, N).
    """
    chosen, metric = judge
    text = (file.parent / file.name.replace("results_", f"samples_{task}_")).with_suffix(".jsonl")
    lines = text.read_bytes()[: content["race"]["bytes"][task]].decode()
    answers = list[tuple[Sequence[float], float]]()
    answered = by_filter(text, content["configs"][task], lines)[chosen]
    for i, sample in known_probabilities(answered).items():
        score = correctness(sample.metrics, metric)[1]
        answers.append((sample.columns["logprobs"], score))
        scores[:, places[task, i]] = score, sample.likely(score)
    return answers


def _asked_everything(place: str) -> list[str] | None:
    """A race's checkpoint folders with all answers; None for another folder."""
    path = Path(place).expanduser()
    if not (path / SETTINGS).is_file():
        return None
    kept, found = kept_race(path, older=True), {}
    for file in sorted(path.glob("*/results_*.json")):
        race = race_results(file, OlderResults)["race"]
        found[race["label"]] = str(file.parent) if race["questions"] == race["of"] else None
    whole = list(filter(None, (found.get(label) for label, *_ in kept["checkpoints"])))
    if len(whole) < 2:
        raise UsageError(
            f"expected a race with two or more checkpoints that were asked everything in {place}, got "
            f"{len(whole)} of {len(found)}; name finished evaluations"
        )
    return whole


def replay(
    recorded: Recorded, *, orders: int = ORDERS, listed: Sequence[str] = (), shuffled: bool = False,
    seed: int = 0, quiet: bool = True, **settings: Any,
) -> Replay:  # fmt: skip
    """Race on finished evaluations as the race of ``seed`` would, and over random orders.

    Checkpoints that a screen has ``listed`` race in its order, without the others; by default all race.
    ``settings`` are :func:`raced`'s.
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
        asked = [len(contest.answered.get(label, NOTHING).score) for contest in races]
        share = float(np.mean(asked)) / len(mine.score)
        rows.append(Replayed(label, recorded.mean(label), named[label], share))
    return sorted(rows, key=lambda row: (-row.score, -row.named, row.label))


def raced(
    answers: Mapping[str, Scores], *, seed: int = 0, cut: bool = False, budget: int | None = None,
    goes_on: bool = False, kept: bool = False, weights: Array | None = None,
    watch: Callable[[Contest], object] = id, **settings: Any,
) -> Contest:  # fmt: skip
    """A contest on recorded answers, one checkpoint after the other, as a race asks them.

    Args:
        answers: Label -> answers, in one order of the questions.
        seed: The race's seed, which draws the questions and their orders.
        cut: Whether a long list may be cut after shared questions.
        budget: The most questions, asked as shared ones of fewer and fewer; None for the race to its end.
        goes_on: Whether a race without a budget follows.
        kept: Whether all checkpoints stay loaded, as the phases of a budget ask.
        weights: The questions' weights in the mean. Shape (N,).
        watch: Is called whenever something was answered.
        settings: Those of :class:`Contest`.

    Raises:
        UsageError: The budget has no question for each checkpoint.
    """
    labels = list(answers)
    count = len(answers[labels[0]].score)
    drawn = np.random.default_rng(seed).permutation(count)
    if weights is not None:
        weights = weights[drawn]
    contest = Contest(count, seed=seed, weights=weights, **settings)

    def hold(label: str) -> None:
        shared = contest.order(label)[: contest.sharing_of(label)]
        contest.hold(label, answers[label].at(drawn[shared]))
        watch(contest)

    if budget is not None:
        for phase in _planned(contest, labels, budget, kept):
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
            begin: int, end: int, label: str = label, order: NDArray[np.int64] = order
        ) -> Scores:
            watch(contest)
            return answers[label].at(order[begin:end])

        # The first checkpoint to answer everything is not compared.
        run(contest, label, ask, STEP if contest.best else count)
        watch(contest)
    return contest


def _planned(contest: Contest, labels: Sequence[str], budget: int, kept: bool) -> list[Phase]:
    """The phases of a budget, for which the contest splits its error; UsageError for too small a one."""
    others = [label for label in labels if label != contest.reference]
    has_reference = len(others) < len(labels)
    found = phases(
        len(others),
        contest.questions,
        budget,
        top=contest.top,
        kept=kept,
        reference=has_reference,
    )
    if not found:
        raise UsageError(
            f"expected at least {len(labels)}, a question of each checkpoint, got {budget}",
            argument="budget",
        )
    contest.split = len(others)
    return found


def demo(seed: int = 0, **settings: Any) -> Race:
    """The race of the bundled models on recorded answers, in the screen's order; no model is loaded."""
    with np.load(data_folder("demo") / "answers.npz") as file:
        labels, score, probability = (
            file[key].tolist() for key in ("label", "score", "probability")
        )
    listed = max(3, len(labels) // 3)
    answers = {
        labels[i]: Scores(np.array(score[i], float), np.array(probability[i]))
        for i in range(listed)
    }
    margins = list[MarginAt]()
    contest = raced(
        answers, seed=seed, watch=lambda now: add_margin(margins, now, [*answers]), **settings
    )
    entries = [Entry(k, {}, i, "rank" if i <= listed else None) for i, k in enumerate(labels, 1)]
    notes = ["The answers were recorded before; no model was loaded now."]
    return race_of(contest, entries, task="sums", metric="acc", notes=notes, margins=margins)


def released(seed: int = 0, *, budget: Callable[[int], int] | None = None, **settings: Any) -> Race:
    """The race of 43 released models on their recorded answers to GSM8K, by shared questions.

    ``budget`` gives the most questions of all together, from the number that there are.
    """
    with np.load(data_folder("released") / "gsm8k.npz") as file:
        labels = file["names"].tolist()
        right = np.unpackbits(file["right"], axis=1, count=int(file["questions"]))
    unknown = np.full(right.shape[1], np.nan)
    answers = {
        label: Scores(row.astype(float), unknown) for label, row in zip(labels, right, strict=True)
    }
    if budget is not None:
        settings["budget"] = budget(right.size)
    margins = list[MarginAt]()
    contest = raced(
        answers,
        seed=seed,
        sharing=SHARED,
        watch=lambda now: add_margin(margins, now, labels),
        **settings,
    )
    entries = [Entry(label, {}, None, "block") for label in labels]
    notes = [
        "The answers were recorded by ZeroEval (github.com/WildEval/ZeroEval, Apache-2.0); no model "
        "was loaded now."
    ]
    return race_of(
        contest,
        entries,
        task="gsm8k",
        metric="exact_match",
        notes=notes,
        margins=margins,
        budget=settings.get("budget"),
    )
