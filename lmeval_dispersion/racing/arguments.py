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
    """The checkpoints that race, and their order.

    Attributes:
        family: All checkpoints of a family.
        domain: Token set of the screen. Default: the tasks' answers.
        base: Checkpoint that the others were trained from; it does not race.
        all: Race all, without a screen.
        by: What orders those that race. Default: rows; a block of shared questions where rows are
            equal, of --all and with a budget.
        audit_sample: Random others of each group that race as well.
    """

    family: Annotated[str | None, Option("NAME")] = None
    domain: Annotated[str | None, Option("SET")] = None
    base: Annotated[str | None, Option("CHECKPOINT", action=Once)] = None
    all: bool = False
    by: Literal["rows", "block"] | None = None
    audit_sample: Annotated[int, Option("N")] = 0


@dataclass(frozen=True, kw_only=True)
class How:
    """How long they race, and where.

    Attributes:
        error: Chance, at most, that the best of those raced is dropped.
        margin: Smallest difference in score that counts.
        top: How many of the best are wanted.
        budget: Questions of all together, or a part of them; the same command without it goes on to
            the proof. Default: all that a proof needs.
        hours: The longest to go on. Default: to the end.
        answers: With none the right answers are not used; the budget orders by agreement. Default:
            the task's own.
        engine: Side by side on the Ray cluster of RAY_ADDRESS, or of this machine. Default: one by
            one.
        gpus_per_checkpoint: Of the cluster's GPUs; a part of 1 too. Default: 1 where it has GPUs.
        dry_run: Screen, and say what would be loaded and asked.
    """

    error: Annotated[float, Option("X")] = ERROR
    margin: Annotated[float, Option("X")] = MARGIN
    top: Annotated[int, Option("K")] = 1
    budget: Annotated[int | str | None, Option("N|N%")] = None
    hours: Annotated[float | None, Option("X")] = None
    answers: Literal["none"] | None = None
    engine: Literal["ray"] | None = None
    gpus_per_checkpoint: Annotated[float | None, Option("X")] = None
    dry_run: bool = False


@dataclass(frozen=True)
class Racing(Asking, How, Which):
    """All arguments of a race.

    Attributes:
        checkpoints: As `dispersion screen` has them, or the folder of a short list (--emit).

            Or the result of :func:`screen`.
        demo: Race the bundled models by recorded answers instead; no model is loaded.
        quiet: Show no progress.
    """

    checkpoints: Annotated[str | Path | Iterable[str | Path] | Result, Option("CHECKPOINT")] = ()
    _: KW_ONLY
    demo: bool = False
    quiet: bool = False
