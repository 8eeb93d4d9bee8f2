"""Arguments of an estimate of accuracies by a calibrator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lmeval_dispersion.arguments import Option
from lmeval_dispersion.auditing.arguments import SlicedDocuments

if TYPE_CHECKING:
    from lmeval_dispersion.auditing.calibrating.calibration import Calibration
    from lmeval_dispersion.auditing.calibrating.calibrator import Calibrator
    from lmeval_dispersion.auditing.run import AuditRun


@dataclass(frozen=True)
class Predicting(SlicedDocuments):
    """Arguments of :func:`lmeval_dispersion.auditing.calibrating.prediction.predict`.

    Attributes:
        calibrator: Calibrator file, as `dispersion calibrate RUN -o FILE` writes it; accuracies are
            then estimated without labels.

            In Python, also the result of :func:`lmeval_dispersion.calibrate` or its ``calibrator``.
        run: Folder of a finished run's store, or of several stores of one model.

            In Python, also an `AuditRun`.
    """

    calibrator: Annotated[Calibration | Calibrator | str | Path, Option("FILE", ("--from",))]
    run: AuditRun | str | Path
