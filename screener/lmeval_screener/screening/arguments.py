"""What a screening is asked: the declaration of the arguments.

Only the standard library is imported for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal

from lmeval_dispersion.arguments import Option
from lmeval_dispersion.options import Once
from lmeval_screener.orders import RankedBy


def _places(text: str) -> int:
    """The K of ``--shortlist``."""
    if text.lstrip("-").isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(
        f"expected a number of ranks, got {text!r}; put the checkpoints before this option"
    )


@dataclass(frozen=True, kw_only=True)
class Selecting:
    """Which checkpoints are screened, in addition to those that are named.

    Attributes:
        family: A whole family; FILE:NAME for your own.
        author: All models of an organisation or user.

            One name, or several; the models are listed on the Hub.
        tag: Models with this tag on the Hub.

            If several are given, models that have all of them.
        base_model: Fine-tunes of this model on the Hub.
        since: Only listed models that changed since then; with a registry, report the news since
            then.
            Default: all.

            A date, or ``yesterday``. With a registry, the news is in ``result.news``, and the
            value may also be a time in UTC, the name of a run, or ``last`` (the end of the last
            news). ``last`` and ``yesterday`` announce each checkpoint once.
        limit: Only the N models that changed last. Default: all.

            Counted among the models that are listed on the Hub.
        demo: Screen the bundled tiny models, without a network.
    """

    family: Annotated[str | None, Option("NAME")] = None
    author: Annotated[Sequence[str] | str, Option("NAME")] = ()
    tag: Annotated[Sequence[str] | str, Option("NAME")] = ()
    base_model: Annotated[Sequence[str] | str, Option("CHECKPOINT")] = ()
    since: Annotated[str | None, Option("DATE")] = None
    limit: Annotated[int | None, Option("N", least=1)] = None
    demo: bool = False


@dataclass(frozen=True, kw_only=True)
class ScreenInputs(RankedBy):
    """The tokens by which checkpoints are measured, and what else is known about checkpoints.

    Attributes:
        domain: Words of the domain: a bundled set, SET:GROUP,GROUP or a YAML file. Default: the
            task's, else math.
        tasks: Tasks of lm-eval, or a file with a task's answers; the ratio is over the answer
            tokens of the first task that has known ones. Default: those of the domain.
        reference: Everyday words to compare with.

            A bundled set, ``SET:GROUP,GROUP`` or a YAML file.
        tokenizer: Tokenizer for checkpoints without one.

            The name of a repository, a folder, an address, or a tokenizer file
            (``tokenizer.json`` or ``vocab.json``).
        results: Accuracies to compare the ranks with.

            lm-eval's results or samples, Inspect's logs, folders of them, or a CSV file with the
            columns repo,accuracy.
        slope: Your slope k, from verify --keep. Default: ours.

            A file with how strongly ranks predicted accuracy in your own results; chances then
            follow from these results.
        registry: Keep results here; read only new ones.

            An SQLite file, created if it is missing; only new or changed checkpoints are read.
    """

    domain: Annotated[str | None, Option("SET")] = None
    tasks: Annotated[str | None, Option("NAME,NAME", ("--task", "--tasks"), Once)] = None
    reference: Annotated[str, Option("SET")] = "reference"
    tokenizer: Annotated[str | None, Option("SOURCE")] = None
    results: Annotated[str | Path | None, Option("SOURCE", ("--accuracy", "--results"), Once)] = (
        None
    )
    slope: Annotated[str | Path | None, Option("FILE")] = None
    registry: Annotated[str | Path | None, Option("FILE")] = None


@dataclass(frozen=True)
class ScreenArguments(Selecting, ScreenInputs):
    """All arguments of a screening.

    Attributes:
        checkpoints: Repositories, folders, files or addresses, see below.

            One or several of ``REPO``, ``REPO@REVISION``, ``REPO@GLOB``, ``ORG/*``,
            folders, folders of training runs, weights files, or addresses such as
            ``s3://bucket/run/checkpoint-*``; ``demo`` for the bundled checkpoints.
        progress: Called as ``progress(done, all, label)`` whenever a checkpoint has been read or
            has failed. Default: a progress bar, in a notebook or on a terminal, for screenings that
            take more than a second.
    """

    checkpoints: Annotated[str | Iterable[str], Option("CHECKPOINT")] = ()
    _: KW_ONLY
    progress: Callable[[int, int, str], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Showing:
    """Arguments of the command only: what it prints instead of a report, or does with the report.

    Attributes:
        list: Print the bundled families, domains or tasks, and stop. Default: no.
        dry_run: Print the requests and bytes needed, and stop.
        shortlist: Show ranks 1 to K of each group; without K, as many as hold the best with a
            chance of 90 %. Default: all.
        audit_sample: Add N random checkpoints to the list.
        emit: Write the short list and its tasks for lm-eval here. Default: nothing.
        fail_if_below: Exit with 4 if any checkpoint is below this one.
    """

    list: Literal["families", "domains", "tasks"] | None = None
    dry_run: bool = False
    shortlist: Annotated[int | bool | None, Option("K", type=_places, least=1)] = None
    audit_sample: Annotated[int, Option("N", least=0)] = 0
    emit: Annotated[Path | None, Option("FOLDER")] = None
    fail_if_below: Annotated[str | None, Option("CHECKPOINT")] = None
