"""Arguments of an audit, a ranking, a calibration and a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from lmeval_dispersion.arguments import Option
from lmeval_dispersion.asking import Judge
from lmeval_dispersion.options import Once

if TYPE_CHECKING:
    from lmeval_dispersion.auditing.run import AuditRun


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """The layer whose hidden states are the vectors of a run's documents.

    Attributes:
        layer: Layer to take the vectors from. Default: the one that the store names.
    """

    layer: Annotated[str | None, Option("LAYER", action=Once)] = None


@dataclass(frozen=True)
class OneRun(Vectors, Judge):
    """The finished run to read, and the seed of random draws.

    Attributes:
        run: A finished run: the folder of its store, lm-eval samples (a folder, or a results or
            samples file), or Inspect logs (a folder or a file).

            In Python, also an `AuditRun`, or None with ``demo``. The stores of one run can be read
            together from the folder that holds them.
        demo: Use the bundled run: 600 sums, answered by a tiny model.
        seed: Seed of all random draws.
    """

    run: Annotated[AuditRun | str | Path | None, Option("RUN")] = None
    _: KW_ONLY
    demo: bool = False
    seed: Annotated[int, Option(least=0)] = 0


@dataclass(frozen=True)
class Auditing(OneRun):
    """Arguments of :func:`lmeval_dispersion.audit`.

    Attributes:
        slice: Column, or columns, to slice the documents by, in addition to those chosen
            automatically.
        metrics: "all" adds RankMe, effective rank, participation ratio and stable rank.
        details: Compute every part of the report, even if the answers allow no conclusion, for
            example because they are no better than guessing.
        short: Compute only what the summary needs, for the columns in ``slice``; if none are
            given, for the first of the columns that are chosen automatically.
    """

    _: KW_ONLY
    slice: Annotated[Sequence[str], Option("COLUMN")] = ()
    metrics: Literal["dispersion", "all"] = "dispersion"
    details: bool = False
    short: bool = False


@dataclass(frozen=True)
class RankArguments(OneRun):
    """Arguments of :func:`rank`, which orders the documents of a run.

    Attributes:
        worst: List the N documents whose vectors are closest to those of all other documents; these
            are probably hard for the model. Default: none.

            In Python, :func:`rank` lists 20 documents unless another number is given.
    """

    _: KW_ONLY
    worst: Annotated[int | None, Option("N", least=1)] = None


@dataclass(frozen=True, kw_only=True)
class SlicedDocuments:
    """Arguments that choose the documents of a calibration or an estimate, and their slices.

    Attributes:
        where: Use only documents that satisfy this condition, such as
            "subject in ('anatomy', 'virology')". Default: all.
        slice: Column to slice the documents by. Default: with --from, the calibrator's column; else
            subject, category or task, or clusters of vectors if these give too few slices.
    """

    where: Annotated[str | None, Option("EXPR")] = None
    slice: Annotated[str | None, Option("COLUMN", action=Once)] = None


@dataclass(frozen=True)
class Calibrating(SlicedDocuments, Vectors):
    """Arguments of :func:`lmeval_dispersion.calibrate`.

    Attributes:
        run: Folder of a finished run's store, or of several stores of one model.

            In Python, also an `AuditRun`.
        seed: Seed of all random draws.
    """

    run: Annotated[AuditRun | str | Path, Option("RUN")]
    _: KW_ONLY
    seed: Annotated[int, Option(least=0)] = 0


@dataclass(frozen=True)
class Comparing(Vectors, Judge):
    """Arguments of :func:`lmeval_dispersion.compare`.

    Attributes:
        runs: Two or more runs, the baseline first. Each is the folder of a store, lm-eval samples
            (a folder, or a results or samples file), or Inspect logs (a folder or a file).
        demo: Compare the bundled runs: 600 sums, answered by two tiny models.
        slice: Column to slice the documents by.
    """

    runs: Annotated[Sequence[str | Path], Option("RUN")] = ()
    _: KW_ONLY
    demo: bool = False
    slice: Annotated[str, Option("COLUMN", action=Once)] = "subject"
