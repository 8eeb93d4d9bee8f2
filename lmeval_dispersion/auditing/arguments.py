"""What an audit, a calibration and a comparison are asked: the declaration of the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal

from lmeval_dispersion.arguments import Option
from lmeval_dispersion.asking import Judge
from lmeval_dispersion.auditing.run import AuditRun
from lmeval_dispersion.options import Once


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """Arguments that choose the vectors of a run.

    Attributes:
        layer: Layer to take the vectors from. Default: the one that its store names.
    """

    layer: Annotated[str | None, Option("LAYER", action=Once)] = None


@dataclass(frozen=True)
class OneRun(Vectors, Judge):
    """The finished run that is read, and the seed of random draws.

    Attributes:
        run: A finished run: the folder of its store, samples of lm-eval (a folder, or a file of
            results or samples), or logs of Inspect.

            Also a folder with the stores of one run, or a run that is read already.
        demo: Take the bundled run: 600 sums, answered by a tiny model.
        seed: Seed of all draws.
    """

    run: Annotated[AuditRun | str | Path | None, Option("RUN")] = None
    _: KW_ONLY
    demo: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Auditing(OneRun):
    """Arguments of :func:`lmeval_dispersion.audit`.

    Attributes:
        slice: Column of the documents by which they are also sliced; may be repeated.
        metrics: With all, also compute RankMe, effective rank, participation ratio and stable rank.
        details: Compute every part of the report.
        short: Compute only what the answer needs, for the first way to slice.
    """

    _: KW_ONLY
    slice: Annotated[Sequence[str], Option("COLUMN")] = ()
    metrics: Literal["dispersion", "all"] = "dispersion"
    details: bool = False
    short: bool = False


@dataclass(frozen=True)
class RankArguments(OneRun):
    """The arguments of a ranking of a run's documents.

    Attributes:
        worst: List the N documents that are closest to all others, which are probably hard.
            Default: none.
    """

    _: KW_ONLY
    worst: Annotated[int | None, Option("N")] = None


@dataclass(frozen=True, kw_only=True)
class SlicedDocuments:
    """Arguments that choose and slice the documents of a calibration or an estimate.

    Attributes:
        where: Take only documents that satisfy this condition, such as
            "subject in ('anatomy', 'virology')". Default: all.
        slice: Column of the documents by which they are sliced. Default: that of the calibrator;
            for a new one subject, category or task, or clusters if these give too few slices.
    """

    where: Annotated[str | None, Option("EXPR")] = None
    slice: Annotated[str | None, Option("COLUMN", action=Once)] = None


@dataclass(frozen=True)
class Calibrating(SlicedDocuments, Vectors):
    """Arguments of :func:`lmeval_dispersion.calibrate`.

    Attributes:
        run: Folder of a finished run's store, or of several stores of one model.
        seed: Seed of all draws.
    """

    run: Annotated[AuditRun | str | Path, Option("RUN")]
    _: KW_ONLY
    seed: int = 0


@dataclass(frozen=True)
class Comparing(Vectors, Judge):
    """Arguments of :func:`lmeval_dispersion.compare`.

    Attributes:
        runs: Two runs or more, each the folder of a store, samples of lm-eval (a folder, or a file
            of results or samples), or logs of Inspect (a folder or a file); the first is the
            baseline.
        demo: Compare the bundled runs: 600 sums, answered by two tiny models.
        slice: Column of the documents by which they are sliced.
    """

    runs: Annotated[Sequence[str | Path], Option("RUN")] = ()
    _: KW_ONLY
    demo: bool = False
    slice: Annotated[str, Option("COLUMN", action=Once)] = "subject"
