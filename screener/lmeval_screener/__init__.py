"""Zero-label checkpoint screening: rank checkpoints by the dispersion gap of their output rows.

``from lmeval_screener import screen`` is the whole of it in Python; the command is ``screen-checkpoints``.
Neither imports torch or transformers. Its modules are private.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmeval_screener.result import Result
    from lmeval_screener.screened import Failed, Group, Screened
    from lmeval_screener.screening import screen

__all__ = ["Failed", "Group", "Result", "Screened", "screen"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: `screen-checkpoints --help` and `import lmeval_screener` stay light.
    if name == "screen":
        from lmeval_screener.screening import screen

        return screen
    if name == "Result":
        from lmeval_screener.result import Result

        return Result
    if name in __all__:
        from lmeval_screener import screened

        return getattr(screened, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
