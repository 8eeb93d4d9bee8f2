"""What a race takes in Python and as a command: the declaration of the arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from lmeval_dispersion.arguments import Option
from lmeval_dispersion.asking import ERROR, MARGIN, Asking
from lmeval_dispersion.options import Once

if TYPE_CHECKING:
    from lmeval_screener import Result


@dataclass(frozen=True, kw_only=True)
class Which:
    """Which checkpoints race, and in which order.

    Attributes:
        family: Race the checkpoints of this family.
        domain: Token set by which checkpoints are screened. Default: the tasks' answers.
        base: Checkpoint that the others were trained from; it does not race.
        all: Race every checkpoint, without screening first.
        by: Order of the race: "rows" takes the screen's ranking by the rows of the output
            projection, "block" the scores of all checkpoints on the same few questions. Default:
            rows; block if the screen finds equal rows, with --all, or with a budget.
        audit_sample: Number of checkpoints in each group that race although they are not on the
            screen's short list, drawn at random.
    """

    family: Annotated[str | None, Option("NAME")] = None
    domain: Annotated[str | None, Option("SET")] = None
    base: Annotated[str | None, Option("CHECKPOINT", action=Once)] = None
    all: bool = False
    by: Literal["rows", "block"] | None = None
    audit_sample: Annotated[int, Option("N", least=0)] = 0


@dataclass(frozen=True, kw_only=True)
class How:
    """When a race ends, and where it runs.

    Attributes:
        error: Largest acceptable probability that the best checkpoint is dropped for one that is
            worse by more than the margin.
        margin: Smallest difference in score that counts.
        top: Number of best checkpoints to find.
        budget: Number of questions for all checkpoints together, or a share of all their questions,
            such as 10%; the same command without a budget goes on until the best is proven.
            Default: as many as a proof needs.
        hours: Hours after which the race stops. Default: no limit.
        answers: "none" ignores the right answers, and orders checkpoints by how well their answers
            agree with the mean answer of all; this needs a budget. Default: the task's right
            answers are used.
        engine: "ray" asks checkpoints at the same time, on the Ray cluster at RAY_ADDRESS or on one
            started on this machine. Default: one after the other.
        gpus_per_checkpoint: Number of the Ray cluster's GPUs for each checkpoint, which may be a
            fraction. Default: 1 if the cluster has GPUs.
        dry_run: Only screen, and print what would be loaded and asked.
    """

    error: Annotated[float, Option("X")] = ERROR
    margin: Annotated[float, Option("X")] = MARGIN
    top: Annotated[int, Option("K", least=1)] = 1
    budget: Annotated[int | str | None, Option("N|N%")] = None
    hours: Annotated[float | None, Option("X")] = None
    answers: Literal["none"] | None = None
    engine: Literal["ray"] | None = None
    gpus_per_checkpoint: Annotated[float | None, Option("X")] = None
    dry_run: bool = False


@dataclass(frozen=True)
class Racing(Asking, How, Which):
    """The arguments of a race.

    Attributes:
        checkpoints: Checkpoints as for `dispersion screen`, or the folder of a short list that
            --emit wrote.

            In Python, also the result of :func:`screen`.
        demo: Race the bundled models by their recorded answers; no model is loaded.
        quiet: Show no progress.
    """

    checkpoints: Annotated[str | Path | Iterable[str | Path] | Result, Option("CHECKPOINT")] = ()
    _: KW_ONLY
    demo: bool = False
    quiet: bool = False
