"""Zero-label checkpoint screening: rank checkpoints by the dispersion of their output rows.

``from lmeval_screener import screen`` is the Python API; the command is ``screen-checkpoints``.
Neither imports torch or transformers. Its modules are private.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmeval_screener.registry.news import News
    from lmeval_screener.result.result import Result
    from lmeval_screener.screened import Failed, Group, Screened
    from lmeval_screener.screening.run import screen

__all__ = ["Failed", "Group", "News", "Result", "Screened", "screen"]


def __dir__() -> list[str]:
    return __all__


_MODULES = {"screen": "screening.run", "Result": "result.result", "News": "registry.news"}


def __getattr__(name: str) -> Any:
    # Loaded on first use: `screen-checkpoints --help` and `import lmeval_screener` stay light.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(
        importlib.import_module(f"lmeval_screener.{_MODULES.get(name, 'screened')}"), name
    )
