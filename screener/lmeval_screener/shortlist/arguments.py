"""What ``dispersion verify`` is asked: the declaration of the arguments.

Only the standard library is imported for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lmeval_dispersion.arguments import Option
from lmeval_dispersion.asking import Judge

if TYPE_CHECKING:
    from lmeval_screener.shortlist.manifest import Manifest


@dataclass(frozen=True)
class Verifying(Judge):
    """All arguments of ``verify``, which judges a screen by the results for a short list.

    Attributes:
        manifest: manifest.json of a short list, or its folder.

            As ``screen-checkpoints --emit FOLDER`` wrote them.
        results: Results or samples of lm-eval, logs of Inspect, or folders of them (PATH:TASK if
            they hold several tasks); or a CSV file with the columns repo,accuracy. Default: the
            results in the folder of MANIFEST.
    """

    manifest: Annotated[Manifest | str | Path, Option("MANIFEST")]
    results: Annotated[Sequence[str | Path], Option("RESULTS")] = ()
