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
        f"expected a number, got {text!r}; checkpoints go before this option"
    )


@dataclass(frozen=True, kw_only=True)
class Selecting:
    """Which checkpoints are screened, besides those that are named.

    Attributes:
        family: A family; FILE:NAME for your own.
        author: All models of an organisation or user.

            One name, or several; listed on the Hub.
        tag: Models with this tag of the Hub.

            All listed models have each of the tags.
        base_model: Its fine-tunes, according to the Hub.
        since: Listed models changed since then; with a registry: news since then. Default: all.

            A date, or ``yesterday``. The news are ``result.news``: with a registry also since the
            ``last`` ones, since a time (UTC), or since a run of the registry. ``last`` and
            ``yesterday`` announce a checkpoint once.
        limit: Only the N listed models changed last. Default: all.
        demo: The bundled tiny models; needs no network.
    """

    family: Annotated[str | None, Option("NAME")] = None
    author: Annotated[Sequence[str] | str, Option("NAME")] = ()
    tag: Annotated[Sequence[str] | str, Option("NAME")] = ()
    base_model: Annotated[Sequence[str] | str, Option("CHECKPOINT")] = ()
    since: Annotated[str | None, Option("DATE")] = None
    limit: Annotated[int | None, Option("N")] = None
    demo: bool = False


@dataclass(frozen=True, kw_only=True)
class ScreenInputs(RankedBy):
    """By which tokens checkpoints are measured, and what else is known of them.

    Attributes:
        domain: Words of the domain: bundled, SET:GROUP,GROUP or a YAML file. Default: the task's,
            else math.
        tasks: Tasks of lm-eval, or a set's file; the ratio is over answers of the first that has
            known ones. Default: those of the domain.
        reference: Everyday words.

            Bundled, ``SET:GROUP,GROUP`` or a YAML file.
        tokenizer: Tokenizer for checkpoints without one.

            The name of a repository, a folder, an address, or a tokenizer file.
        results: Compare with results or CSV.

            lm-eval's results or samples, Inspect's logs, folders of them, or a CSV file of
            accuracies.
        slope: Your slope k, of verify --keep. Default: ours.

            Chances are then by your own results.
        registry: Keep results here, read only new ones.

            An SQLite file; only new or changed checkpoints are read.
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
        checkpoints: Names, folders, files, addresses: see below.

            One or several of ``REPO``, ``REPO@REVISION``, ``REPO@GLOB``, ``ORG/*``,
            folders, folders of training runs, weights files, or addresses such as
            ``s3://bucket/run/checkpoint-*``; ``demo`` for the bundled ones.
        progress: Called as ``progress(done, all, label)`` whenever a checkpoint ends. Default: a
            bar, in a notebook or on a terminal, where that takes more than a second.
    """

    checkpoints: Annotated[str | Iterable[str], Option("CHECKPOINT")] = ()
    _: KW_ONLY
    progress: Callable[[int, int, str], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Showing:
    """What the command alone takes: what it prints in place of a report, or does with it.

    Attributes:
        list: Print the bundled ones. Default: no.
        dry_run: Print the requests and bytes it would take, and stop.
        shortlist: Ranks 1 to K of each group; without K those that hold the best with 90 %.
            Default: all.
        audit_sample: Add N others at random.
        emit: Write the list and its tasks for lm-eval here. Default: nothing.
        fail_if_below: Status 4 if any lies below it.
    """

    list: Literal["families", "domains", "tasks"] | None = None
    dry_run: bool = False
    shortlist: Annotated[int | bool | None, Option("K", type=_places)] = None
    audit_sample: Annotated[int, Option("N")] = 0
    emit: Annotated[Path | None, Option("FOLDER")] = None
    fail_if_below: Annotated[str | None, Option("CHECKPOINT")] = None
