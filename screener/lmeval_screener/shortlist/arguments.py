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
    """All arguments of a verdict on a short list.

    Attributes:
        manifest: manifest.json, or its folder.

            Of a short list, as ``--emit`` wrote it, or what was read from it.
        results: lm-eval's results or samples, Inspect's logs, or folders of them (PATH:TASK where
            they hold several tasks); a CSV file with the columns repo,accuracy. Default: those of
            MANIFEST, a race's folder.
    """

    manifest: Annotated[Manifest | str | Path, Option("MANIFEST")]
    results: Annotated[Sequence[str | Path], Option("RESULTS")] = ()
