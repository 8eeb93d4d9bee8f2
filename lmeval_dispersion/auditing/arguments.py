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
        layer: Layer of the vectors. Default: the run's.
    """

    layer: Annotated[str | None, Option("LAYER", action=Once)] = None


@dataclass(frozen=True)
class OneRun(Vectors, Judge):
    """The finished run that is read, and the seed of random draws.

    Attributes:
        run: Folder of the store, or a folder that holds the stores of one run.
        demo: Take a bundled run: 600 sums, by a tiny model.
        seed: Seed of all draws.
    """

    run: AuditRun | str | Path | None = None
    _: KW_ONLY
    demo: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Auditing(OneRun):
    """Arguments of :func:`lmeval_dispersion.audit`.

    Attributes:
        slice: Also slice by this column of the documents; may be repeated.
        metrics: With all also RankMe, effective rank, participation ratio and stable rank.
        details: Compute every part.
        short: Compute only the answer's part, in the first slicing.
    """

    _: KW_ONLY
    slice: Annotated[Sequence[str], Option("COLUMN")] = ()
    metrics: Literal["dispersion", "all"] = "dispersion"
    details: bool = False
    short: bool = False


@dataclass(frozen=True)
class Ordering(OneRun):
    """All arguments of an order of the documents.

    Attributes:
        worst: List the N documents nearest to all others, probably hard ones. Default: none.
    """

    _: KW_ONLY
    worst: Annotated[int | None, Option("N")] = None


@dataclass(frozen=True, kw_only=True)
class SlicedDocuments:
    """Arguments that choose and slice the documents of a calibration or an estimate.

    Attributes:
        where: Take only documents that satisfy this, such as "subject in ('anatomy', 'virology')".
            Default: all.
        slice: Column of the documents that makes the slices. Default: the calibrator's; of a new
            one subject, else category or task, and cluster where these are too few.
    """

    where: Annotated[str | None, Option("EXPR")] = None
    slice: Annotated[str | None, Option("COLUMN", action=Once)] = None


@dataclass(frozen=True)
class Calibrating(SlicedDocuments, Vectors):
    """Arguments of :func:`lmeval_dispersion.calibrate`.

    Attributes:
        run: Folder of the store, or a folder that holds the stores of one run.
        seed: Seed of all draws.
    """

    run: AuditRun | str | Path
    _: KW_ONLY
    seed: int = 0


@dataclass(frozen=True)
class Comparing(Vectors, Judge):
    """Arguments of :func:`lmeval_dispersion.compare`.

    Attributes:
        runs: Two runs or more, each the folder of a store, lm-eval's samples (a folder, or a file
            of results or samples), or logs of Inspect (a folder or a file); the first is the
            baseline.
        demo: Compare the bundled runs: 600 sums, by two tiny models.
        slice: Column of the documents that makes the slices.
    """

    runs: Sequence[str | Path] = ()
    _: KW_ONLY
    demo: bool = False
    slice: Annotated[str, Option("COLUMN", action=Once)] = "subject"
