"""``dispersion probe``: rank checkpoints by their answers to a few questions of a task."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

import numpy as np
from lmeval_screener.figures import FigureDifference, rank_places
from lmeval_screener.loading import with_base
from lmeval_screener.targets.labels import labelled
from lmeval_screener.targets.names import Target, parse_targets

from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.evidence import worth
from lmeval_dispersion.harness.failures import as_their_base, checkpoint_failure
from lmeval_dispersion.options import add_examples, add_lm_eval, add_metric, add_output, add_seed, add_tasks
from lmeval_dispersion.output import Output, prints_to_stderr, progress_bar
from lmeval_dispersion.probing.ties import order
from lmeval_dispersion.report import Col, Report, Table
from lmeval_dispersion.report.declared import spans
from lmeval_dispersion.statistics import holm

if TYPE_CHECKING:
    from lmeval_dispersion.probing.questions import Answered, Array, Questions

Figure = Literal["probability", "agreement", "squares"]
SEVERAL = 3  # fewest checkpoints whose mean answer says something
FEWEST = 5  # fewest questions: below, no paired test can be significant


@dataclass(frozen=True)
class Probed:
    """One checkpoint's answers: means over the questions with standard errors; NaN where unknown."""

    rank: Annotated[int, Col("Rank", "d", short="#")]
    label: Annotated[str, Col("Checkpoint")]
    probability: Annotated[
        float | None,
        Col("Right answer", ".3f", error="probability_se", dots="both", hint="its mean probability"),
    ]
    probability_se: float | None
    squares: Annotated[
        float | None,
        Col(
            "Squares", ".3f", error="squares_se", hint="of the answer tokens' probabilities; no label", drop=2
        ),
    ]
    squares_se: float | None
    agreement: Annotated[
        float | None,
        Col("Agreement", ".3f", error="agreement_se", hint="with the mean answer of all; no label", drop=2),
    ]
    agreement_se: float | None
    accuracy: Annotated[float | None, Col("Accuracy", ".0%", short="Acc.", drop=3)]
    tied_with: tuple[int, ...]  # ranks
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
        questions: Number of questions used, of ``of`` in the task.
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
        """The checkpoints, and those that failed."""
        caption = f"{self.questions} of {self.of:,} questions of {self.task}"
        return {"ranking": Table.of(self.checkpoints, caption), "failed": Table.of(self.failed, "Not probed")}

    def context(self) -> Mapping[str, Any]:
        """The sentences."""
        figure = {"probability": "probability of the right answer", "squares": "squares, without answers"}
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


def probed(answered: Mapping[str, Answered], rank_by: Figure | None = None) -> tuple[Figure, list[Probed]]:
    """Rank checkpoints by their answers to the same questions.

    Two have a clear order if the paired difference over questions (Student) differs clearly from 0,
    corrected for all pairs (Holm).

    Raises:
        UsageError: The figure is unknown for some checkpoint.
    """
    answers, figures = list(answered.values()), get_args(Figure)
    agreed = agreement([a.answers for a in answers])
    found = [
        {"probability": a.probability, "squares": a.squares, "agreement": g}
        for a, g in zip(answers, agreed, strict=True)
    ]
    known = [figure for figure in figures if all(_mean(f[figure])[0] is not None for f in found)]
    if not known or rank_by not in (None, *known):
        why = next((a.no_squares for a in answers if a.no_squares), "")
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
        means = (*_mean(f["probability"]), *_mean(f["squares"]), *_mean(f["agreement"]), _mean(a.score)[0])
        rows.append(
            Probed(
                rank, name, *means, tuple(tied), spans(tied) if len(tied) > 6 else " ".join(map(str, tied))
            )
        )
    return figure, sorted(rows, key=lambda row: (row.rank, row.label))


def agreement(answers: Sequence[Sequence[Array]]) -> list[Array]:
    """Sum of each checkpoint's probabilities times those of the mean answer, (questions,); NaN if not known.

    ``answers`` has of each checkpoint the probabilities of the answer tokens, question by question.
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
    targets: Sequence[Target],
    questions: Questions,
    *,
    model: str = "hf",
    model_args: str = "",
    rank_by: Figure | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Probe:
    """Load each checkpoint in turn, run all questions, and rank them.

    ``model`` is lm-eval's backend, ``model_args`` and ``settings`` (``batch_size``, ``device``) are its own.

    Raises:
        UsageError: No such backend, one without log-likelihoods, or no figure of the task's.
        DispersionError: No checkpoint could be run.
    """
    from lmeval_dispersion.harness.adapters import answers_as_base
    from lmeval_dispersion.harness.seams import backend_arguments
    from lmeval_dispersion.probing.questions import check_decoder

    evaluation = questions.evaluation
    models = evaluation.models
    answered: dict[str, Answered] = {}
    failed: list[NotProbed] = []
    as_base: list[str] = []
    with progress_bar(hidden=quiet) as update:
        for place, target in enumerate(labelled(targets)):
            update(place, len(targets), target.label)
            try:
                if target.refused:
                    raise DispersionError(target.refused[1])
                arguments = target.arguments() | backend_arguments(model_args)
                lm = models.loaded(model, with_base(arguments), check_decoder, **settings)
                answered[target.label] = questions.ask(lm, target.label)
                if answers_as_base(lm, evaluation.requests_of(0)[1][0].args[0]):
                    as_base.append(target.label)
            except UsageError:
                raise
            except Exception as error:
                failed.append(NotProbed(target.label, checkpoint_failure(error)))
    models.release()
    if not answered:
        first = f"{failed[0].label}: {failed[0].message}"
        several = f"none of the {len(failed)} checkpoints could be probed; the first: "
        raise DispersionError(first if len(failed) == 1 else several + first)
    figure, rows = probed(answered, rank_by)
    notes = sorted({f"No squares: {a.no_squares}." for a in answered.values() if a.no_squares})
    notes += [*as_their_base(as_base), *evaluation.notes()]
    asked, of, seed = len(questions), evaluation.available, evaluation.seed
    return Probe(questions.name, asked, of, seed, figure, rows, failed, notes)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoints", nargs="+", metavar="MODEL", help="Hub id, id@revision, folder, or a glob of folders"
    )
    add_tasks(parser, "lm-eval's tasks and groups, or a set's file (needed)", required=True)
    parser.add_argument(
        "--questions",
        type=int,
        default=25,
        metavar="N",
        help="drawn at random, the same for all (default: 25)",
    )
    parser.add_argument(
        "--rank-by",
        choices=get_args(Figure),
        help="the figure that ranks (default: probability where the task has labels)",
    )
    parser.add_argument(
        "--answers", metavar="SET", help="set of answer tokens for squares, a file (default: the task's own)"
    )
    add_metric(parser)
    add_seed(parser)
    add_lm_eval(parser)
    add_output(parser)
    add_examples(
        parser,
        "EleutherAI/pythia-70m@step1000 EleutherAI/pythia-70m --task arc_easy",
        "'runs/*' --task my_task --include_path tasks --num_fewshot 3 -o probe.html",
        "'runs/*' --task mmlu_anatomy --model vllm --model_args dtype=bfloat16 --questions 50",
    )


def _run(args: argparse.Namespace) -> int:
    from lmeval_dispersion.probing.questions import Questions

    output = Output.of(args)
    targets = parse_targets(args.checkpoints)
    if args.questions < FEWEST:
        raise UsageError(f"expected at least {FEWEST}, got {args.questions}", argument="questions")
    questions = Questions(
        args.tasks,
        args.questions,
        metric=args.metric,
        seed=args.seed,
        num_fewshot=args.num_fewshot,
        include_path=args.include_path,
        apply_chat_template=args.apply_chat_template,
        confirm_run_unsafe_code=args.confirm_run_unsafe_code,
        answers=args.answers,
    )
    if len(questions) < args.questions:
        output.say(f"{questions.name} has {len(questions)} questions; all are asked")
    with prints_to_stderr():
        result = probe(
            targets,
            questions,
            model=args.model,
            model_args=args.model_args,
            rank_by=args.rank_by,
            quiet=args.quiet,
            batch_size=args.batch_size,
            device=args.device,
        )
    output.write(result.document())
    return 3 if result.failed else 0


COMMANDS = {"probe": (_add_arguments, _run)}
