"""What a race takes in Python and as a command: the declaration of the arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lmeval_dispersion.arguments import Option
from lmeval_dispersion.asking import Asking, How, Which

if TYPE_CHECKING:
    from lmeval_screener import Result


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
