"""The installed package: its version, its bundled data (in the wheel or the checkout), the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

__version__ = "1.0.0rc1"

_PACKAGE = Path(__file__).resolve().parent


def data_folder(name: str) -> Path:
    """Return a folder of data that is bundled with the package.

    ``name`` is ``token_sets``, ``task_configs``, ``demo``, ``demo_runs`` or ``released``. These are
    under ``lmeval_dispersion/data/``; in a checkout, the first two are at its top.

    Raises:
        FileNotFoundError: The folder is missing.
    """
    places = (_PACKAGE / "data" / name, _PACKAGE.parent / name)
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"the data folder {name!r} is missing from {places[0]} and {places[1]}; reinstall lmeval-dispersion"
    )


def cache_folder(name: str) -> Path:
    """Return the path ``lmeval-dispersion/NAME`` in the user's cache; the folder may not exist yet.

    The cache is ``$XDG_CACHE_HOME``, by default ``~/.cache``.
    """
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "lmeval-dispersion"
        / name
    )
