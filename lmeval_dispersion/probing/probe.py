"""``dispersion probe``: rank checkpoints by their answers to a few questions of a task."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
from lmeval_screener.figures import FigureDifference, rank_places
from lmeval_screener.tokens.answers import first_known, tasks_in

from lmeval_dispersion.errors import DispersionError, UsageError, require_extra
from lmeval_dispersion.evidence import worth
from lmeval_dispersion.files import hashed
from lmeval_dispersion.harness.failures import as_their_base
from lmeval_dispersion.options import add_examples, add_output
from lmeval_dispersion.output import Output, prints_to_stderr
from lmeval_dispersion.racing.commands import add_evaluation, arguments_of
from lmeval_dispersion.racing.contest import Contest, Scores
from lmeval_dispersion.racing.folder import RaceFolder
from lmeval_dispersion.racing.lineup import all_named
from lmeval_dispersion.racing.rule import SHARED, Array
from lmeval_dispersion.report import Col, Report, Table
from lmeval_dispersion.report.declared import count, listed, spans
from lmeval_dispersion.statistics import holm
from lmeval_dispersion.store.identity import SUFFIX

if TYPE_CHECKING:
    from lmeval_dispersion.racing.evaluation import Evaluation

Figure = Literal["probability", "agreement", "squares"]
QUESTIONS = SHARED
_RUNS = 4  # runs of ranks that a sentence names
_FIRST = 3  # checkpoints to evaluate first: a usual budget
_MOST = 5  # most that are named, with those tied with the last
SEVERAL = 3  # fewest checkpoints whose mean answer is informative
FEWEST = 5  # fewest questions: below, no paired test can be significant


class Answered(NamedTuple):
    """A model's answers to n questions; NaN where unknown.

    Attributes:
        score: Score by lm-eval's metric; NaN without labels. Shape (n,).
        probability: Probability of the right answer. Shape (n,).
        tokens: Per question, probabilities of the answer tokens; empty where they are missing.
        missing: Why they are missing, one clause.
    """

    score: Array
    probability: Array
    tokens: tuple[Array, ...] = ()
    missing: str = ""

    @property
    def squares(self) -> Array:
        """Sum over the answer tokens of their squared probabilities. Shape (n,)."""
        known = [float(np.square(each).sum()) for each in self.tokens]
        return np.array(known) if known else np.full(len(self.score), np.nan)


@dataclass(frozen=True)
class Probed:
    """One checkpoint's rank, with means over the questions and standard errors; NaN where unknown."""

    rank: Annotated[int, Col("Rank", "d", short="#")]
    label: Annotated[str, Col("Checkpoint")]
    probability: Annotated[
        float | None,
        Col(
            "Right answer", ".3f", error="probability_se", dots="both", hint="its mean probability"
        ),
    ]
    probability_se: float | None
    squares: Annotated[
        float | None,
        Col(
            "Squares",
            ".3f",
            error="squares_se",
            hint="of the answer tokens' probabilities; no label",
            drop=2,
        ),
    ]
    squares_se: float | None
    agreement: Annotated[
        float | None,
        Col(
            "Agreement",
            ".3f",
            error="agreement_se",
            hint="with the mean answer of all; no label",
            drop=2,
        ),
    ]
    agreement_se: float | None
    accuracy: Annotated[float | None, Col("Accuracy", ".0%", short="Acc.", drop=3)]
    tied_with: tuple[int, ...]  # ranks without a clear order with this one
    ties_shown: Annotated[str, Col("Ties", hint="ranks without a clear order", drop=1)]


@dataclass(frozen=True)
class NotProbed:
    """One checkpoint that could not be loaded or run, and the reason."""

    label: Annotated[str, Col("Checkpoint")]
    message: Annotated[str, Col("Why")]


@dataclass(frozen=True, repr=False)
class Probe(Report):
    """Checkpoints ranked by one figure over the same questions.

    Attributes:
        questions: Number of questions used, out of ``of`` in the task.
        rank_by: The figure that ranks.
        checkpoints: Best first.
        notes: Remarks on the numbers.
    """

    template: ClassVar[str] = "probe.jinja"
    schema: ClassVar[str] = "dispersion-probe/1"
    libraries: ClassVar[Sequence[str]] = ("lm-eval", "torch", "transformers")
    guide: ClassVar[str] = "docs/reference/probe.md"
    each: ClassVar[str] = "checkpoints"

    task: str
    questions: int
    of: int
    seed: int
    rank_by: Figure
    checkpoints: Sequence[Probed]
    failed: Sequence[NotProbed]
    notes: Sequence[str]

    def tables(self) -> Mapping[str, Table]:
        """``ranking``: the checkpoints, best first; ``failed``: those that could not be asked."""
        caption = f"{self.questions} of {self.of:,} questions of {self.task}"
        return {
            "ranking": Table.of(self.checkpoints, caption),
            "failed": Table.of(self.failed, "Not probed"),
        }

    def context(self) -> Mapping[str, Any]:
        """Template values: the answer's sentences, the figure's worth, the number of checkpoints."""
        figure = {
            "probability": "probability of the right answer",
            "squares": "squares, without answers",
        }
        figure["agreement"] = "agreement with the mean answer of all, without answers"
        why = f"highest {figure[self.rank_by]}, over {self.questions} questions of {self.task}"
        alone = f"Only {self.checkpoints[0].label} was probed; a probe orders siblings, never one alone."
        sentences = order(self.checkpoints, why) if len(self.checkpoints) > 1 else [alone]
        total = len(self.checkpoints) + len(self.failed)
        return {
            "sentences": sentences,
            "worth": "" if self.rank_by == "agreement" else worth(self.rank_by, self.questions),
            "total": total,
        }


def order(members: Sequence[Probed], why: str) -> list[str]:
    """Sentences: which of ``members``, best first, to evaluate first, and which ranks are clear."""
    best = _first_of(members)
    if not best:
        everyone = (
            listed([c.label for c in members]) if len(members) <= _MOST else f"all {len(members)}"
        )
        return [
            f"No checkpoint stands apart: {everyone} have no clear order; ask more questions, or race them."
        ]
    first = f"Evaluate first: {', '.join(best)} ({why})."
    if not members[0].tied_with:
        first = f"Best: {members[0].label} ({why}), clearly ahead of {members[1].label}."
    if not (runs := overlaps(members)):
        return [first, f"The order of all {len(members)} is clear."]
    shared = listed([spans(range(begin, end + 1)) for begin, end in runs[:_RUNS]])
    more = f" and {count(len(runs) - _RUNS, 'more run')}" if len(runs) > _RUNS else ""
    others = {c.rank for c in members} - {
        rank for begin, end in runs for rank in range(begin, end + 1)
    }
    rest = "; the order of the others is clear" if others else ""
    return [first, f"Ranks {shared}{more} overlap{rest}."]


def overlaps(members: Sequence[Probed]) -> list[tuple[int, int]]:
    """First and last rank of each run of ranks connected by ties, best first."""
    runs: list[tuple[int, int]] = []
    for c in members:
        last = max(c.tied_with, default=0)
        if runs and c.rank <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(runs[-1][1], last)
        elif last >= c.rank:
            runs.append((c.rank, last))
    return runs


def _first_of(members: Sequence[Probed]) -> list[str]:
    """The checkpoints for a budget of three evaluations, in words if they are some of many tied.

    Empty with one checkpoint, or without any clear order.
    """
    ranks = {c.rank for c in members}
    if all(ranks - {c.rank} <= set(c.tied_with) for c in members):
        return []
    budget = _FIRST if len(members) > _FIRST else 1
    last = members[budget - 1]
    behind = [c for c in members[budget:] if c.rank in last.tied_with]
    if budget + len(behind) <= _MOST:
        return [c.label for c in (*members[:budget], *behind)]
    # Checkpoints tied across the cut are equally good.
    sure = [c for c in members[: budget - 1] if c.rank not in last.tied_with]
    unsure = sorted({c.rank for c in (*members[:budget], *behind) if c not in sure})
    return [*(c.label for c in sure), f"any {budget - len(sure)} of ranks {spans(unsure)}"]


def ranked(
    answered: Mapping[str, Answered], rank_by: Figure | None = None
) -> tuple[Figure, list[Probed]]:
    """Rank checkpoints by answers to the same questions; returns the figure that ranks, and rows by rank.

    Two are in a clear order if the mean paired difference over questions (Student) differs from 0,
    corrected for all pairs (Holm).

    Raises:
        UsageError: The figure is unknown for some checkpoint.
    """
    answers, figures = list(answered.values()), get_args(Figure)
    agreed = agreement([a.tokens for a in answers])
    found = [
        {"probability": a.probability, "squares": a.squares, "agreement": g}
        for a, g in zip(answers, agreed, strict=True)
    ]
    known = [figure for figure in figures if all(_mean(f[figure])[0] is not None for f in found)]
    if not known or rank_by not in (None, *known):
        why = next((a.missing for a in answers if a.missing), "")
        why = why if rank_by == "squares" else f"the task has no labels that a probe can use; {why}"
        raise UsageError(f"expected questions that give {rank_by or 'one of the figures'}: {why}")
    figure: Figure = rank_by or known[0]
    values = [f[figure] for f in found]

    places = rank_places([float(value.mean()) for value in values])
    pairs = {(i, j): _mean(values[i] - values[j]) for i, j in combinations(range(len(values)), 2)}
    freedom = len(values[0]) - 1
    clear = holm(
        {
            pair: FigureDifference(mean or 0.0, error or 0.0, freedom).p
            for pair, (mean, error) in pairs.items()
        }
    )
    ties = [
        sorted({places[j] for j in range(len(places)) if i != j and not {(i, j), (j, i)} & clear})
        for i in range(len(places))
    ]
    rows = []
    for (name, a), f, rank, tied in zip(answered.items(), found, places, ties, strict=True):
        means = (
            *_mean(f["probability"]),
            *_mean(f["squares"]),
            *_mean(f["agreement"]),
            _mean(a.score)[0],
        )
        rows.append(
            Probed(
                rank,
                name,
                *means,
                tuple(tied),
                spans(tied) if len(tied) > 6 else " ".join(map(str, tied)),
            )
        )
    return figure, sorted(rows, key=lambda row: (row.rank, row.label))


def agreement(answers: Sequence[Sequence[Array]]) -> list[Array]:
    """Each checkpoint's agreement with the mean answer, per question: sum over tokens of p times mean p.

    ``answers`` holds each checkpoint's probabilities of the answer tokens by question. One NaN
    each with fewer than three checkpoints, or unlike tokens.
    """
    alike = len({tuple(map(len, each)) for each in answers}) == 1 and len(answers[0]) > 0
    if len(answers) < SEVERAL or not alike:
        return [np.full(1, np.nan) for _ in answers]
    means = [np.mean([p / p.sum() for p in each], axis=0) for each in zip(*answers, strict=True)]
    return [np.array([p @ mean for p, mean in zip(each, means, strict=True)]) for each in answers]


def _mean(values: Array) -> tuple[float | None, float | None]:
    """The mean of all questions with its standard error; None if a question has no number."""
    if np.isnan(values).any():
        return None, None
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def probe(
    checkpoints: str | Path | Sequence[str | Path],
    tasks: str,
    *,
    questions: int = QUESTIONS,
    rank_by: Figure | None = None,
    answers: str | None = None,
    output_path: str | Path | None = None,
    quiet: bool = False,
    seed: int = 0,
    limit: int | None = None,
    metric: str | None = None,
    model: str = "hf",
    model_args: str = "",
    batch_size: int | str | None = None,
    device: str | None = None,
    num_fewshot: int | None = None,
    include_path: str | None = None,
    apply_chat_template: bool | str = False,
    confirm_run_unsafe_code: bool = False,
) -> Probe:
    """Ask checkpoints the first block of a race, and rank them by their answers.

    Args:
        checkpoints: Names of the Hub, folders, or folders of checkpoints.
        tasks: lm-eval's ``NAME,NAME``, tasks and groups, or a file of answers, which names its tasks.
        questions: Number of questions for each.
        rank_by: ``probability``, ``agreement`` or ``squares``. Default: the first that the task gives.
        answers: Task or file with a set of answer tokens. Default: that of the first task that has one.
        output_path: Folder that keeps the answers, a race's. Default: ``race-TASKS``.
        quiet: Whether to show no progress.
        seed: As :func:`race` takes it; so are all below.
        limit: The most questions of a checkpoint in a later race.
        metric: ``METRIC`` or ``FILTER/METRIC``.
        model: lm-eval's backend; so are all below lm-eval's.
        model_args: More arguments of the backend, ``K=V,K=V``.
        batch_size: Number or ``auto``.
        device: Such as ``cuda:0``.
        num_fewshot: Examples before a question.
        include_path: Folder with more tasks.
        apply_chat_template: Whether to use the model's chat template, or the name of one.
        confirm_run_unsafe_code: Whether tasks may run the code that models write.

    Raises:
        UsageError: An argument cannot be used as given, or the task gives no figure.
        DispersionError: No checkpoint could be asked, or a block could not be written.
        MissingExtraError: torch or lm-eval is not installed.
    """
    require_extra("models", "a probe")
    from lmeval_dispersion.racing.block import complete

    if questions < FEWEST:
        raise UsageError(f"expected at least {FEWEST}, got {questions}", argument="questions")
    _, known, refused = first_known(answers or tasks)
    if answers and not known:
        raise refused[0]
    tokens = known or UsageError(
        f"{str(refused[0]).partition(';')[0]}; name a set of `dispersion tokens` as answers"
    )
    name = ",".join(task.removesuffix(SUFFIX) for task in tasks_in(tasks))
    folder = RaceFolder.opened(
        name, output_path, seed=seed, limit=limit, metric=metric, model=model, model_args=model_args,
        batch_size=batch_size, device=device, num_fewshot=num_fewshot, include_path=include_path,
        apply_chat_template=apply_chat_template, confirm_run_unsafe_code=confirm_run_unsafe_code,
    )  # fmt: skip
    folder.more = partial(complete, answers=tokens)
    given = hashed(repr(known.answers)) if known else ""
    if folder.kept.get("answers", given) != given:
        raise UsageError(
            f"{folder.path} has answers by another set of answer tokens; name another folder",
            argument="answers",
        )
    places = [checkpoints] if isinstance(checkpoints, str | Path) else checkpoints
    named = all_named([*map(str, places)], api=folder.api, chosen="block")
    folder.name([entry.arguments for entry in named.entries])
    evaluation = folder.evaluation
    contest = Contest(len(evaluation.questions), seed=evaluation.seed)
    contest.sharing = min(questions, contest.questions)
    with folder.alone():
        folder.keep(folder.lineup.joined(named) if folder.kept else named, answers=given)
        asked = {entry.place for entry in named.entries}
        probed = [entry for entry in folder.lineup.entries if entry.place in asked]
        folder.run(contest, quiet=quiet, probed=probed)
    failed = [NotProbed(*pair) for pair in folder.failed.items()]
    if not contest.answered:
        first = f"{failed[0].label}: {failed[0].message}"
        several = f"none of the {len(failed)} checkpoints could be probed; the first: "
        raise DispersionError(first if len(failed) == 1 else several + first)
    found = {label: _answered(evaluation, label, mine) for label, mine in contest.answered.items()}
    figure, rows = ranked(found, rank_by)
    notes = sorted({f"No squares: {mine.missing}." for mine in found.values() if mine.missing})
    notes += [*as_their_base(folder.as_base), *evaluation.notes()]
    there, seed = evaluation.available, evaluation.seed
    return Probe(name, contest.sharing, there, seed, figure, rows, failed, notes)


def _answered(evaluation: Evaluation, label: str, mine: Scores) -> Answered:
    """A checkpoint's answers to the first questions."""
    questions = evaluation.questions[: len(mine.score)]
    blocks = [evaluation.blocks[label].get(question, {}) for question in questions]
    pairs = zip(blocks, mine.probability, strict=True)
    probability = np.array([block.get("probability", known) for block, known in pairs])
    configs = [evaluation.tasks[task].config for task, _ in questions]
    by_tests = [bool(getattr(config, "unsafe_code", False)) for config in configs]
    by_own_rules = [task in evaluation.own_rules for task, _ in questions]
    tested = np.logical_or(by_tests, by_own_rules)
    score = np.where(np.isfinite(probability) | tested, mine.score, np.nan)  # else without a label
    if all("tokens" in block for block in blocks):
        return Answered(score, probability, tuple(np.array(block["tokens"]) for block in blocks))
    before = "a race asked some of these questions without their answer tokens; name another folder"
    return Answered(score, probability, (), next((b["why"] for b in blocks if "why" in b), before))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoints", nargs="+", metavar="CHECKPOINT", help="as `dispersion screen` has it")
    many = f"drawn at random, the same for all (default: {QUESTIONS})"
    add("--questions", type=int, default=QUESTIONS, metavar="N", help=many)
    by = "the figure that ranks (default: probability where the task has labels)"
    add("--rank-by", choices=get_args(Figure), help=by)
    tokens = "set of answer tokens for squares, a file (default: the task's own)"
    add("--answers", metavar="SET", help=tokens)
    add_evaluation(parser, "tasks and groups, or a set's file (needed)", required=True)
    add_output(parser)
    add_examples(
        parser,
        "EleutherAI/pythia-70m@step1000 EleutherAI/pythia-70m --task arc_easy",
        "'runs/*' --task my_task --include_path tasks --num_fewshot 3 -o probe.html",
        "'runs/*' --task mmlu_anatomy --model vllm --model_args dtype=bfloat16 --questions 50",
    )


def _run(args: argparse.Namespace) -> int:
    output = Output.of(args)
    with prints_to_stderr():
        result = probe(**arguments_of(args))
    output.write(result.document())
    return 3 if result.failed else 0


COMMANDS = {"probe": (_add_arguments, _run)}
