"""A checkpoint's states in a registry (there, gone, unknown): each one's causes and consequences.

Everything follows from `CAUSES`: which figures the database keeps, the sentences of the news, the exit status
of a run, and the table of docs/reference/registry.md.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Literal, NamedTuple

from lmeval_screener.errors import GONE, NOT_OF_WEIGHTS, SCREENING_CODES, ScreeningError
from lmeval_screener.targets.names import path_of

#: Errors of a checkpoint that is missing where it was named: they do not show why.
_MISSING = frozenset({"RepoNotFound", "FolderNotFound"})
_UNKNOWN = _MISSING | NOT_OF_WEIGHTS.keys()
_STILL = "Still failing: {}."


class Cause(NamedTuple):
    """One cause of a checkpoint's state in a registry, and its consequences.

    Attributes:
        event: What happened, as docs/reference/registry.md says it.
        state: ``there``, ``gone``, or ``unknown``, in which the last figures still count.
        codes: Error codes that the registry holds in this case. A code belongs to the first cause
            that lists it.
        what: Kind of the change, as in `news.Move`: ``failed``, ``gone`` or ``renamed``; empty if
            nothing of this happened.
        first: Sentence of the first run that reports the cause, with ``{}`` in place of the
            checkpoints; empty if no sentence is needed.
        later: Sentence of every later run, with ``{}`` in the same way; empty if no sentence is
            needed.
        status: Exit status of the first run that reports the cause, 3 or 0.
    """

    event: str
    state: Literal["there", "gone", "unknown"]
    codes: frozenset[str] = frozenset()
    what: str = ""
    first: str = ""
    later: str = ""
    status: int = 0


_NEVER_READ = Cause(
    "the same, for a checkpoint that was never read",
    "unknown",
    _UNKNOWN,
    "failed",
    "Failed: {}.",
    _STILL,
    3,
)
_GONE = Cause(
    "a folder that was read before is not found in its storage or on disk, and the folder above, "
    "or the one above that, has other entries",
    "gone",
    frozenset({GONE}),
    "gone",
    "Gone: {}.",
)
CAUSES = (
    Cause("it was read, or is unchanged", "there", frozenset({""})),
    _NEVER_READ._replace(
        event="it cannot be screened as it is stored (`BadHeader`, `NoSafetensors` and others)",
        state="there",
        codes=frozenset(SCREENING_CODES) - _UNKNOWN - {GONE, "RevisionNotFound"},
    ),
    _NEVER_READ._replace(
        event="it cannot be opened or read now (`GatedRepo`, `Unreachable`, `BadToken` and others)",
        first="Not readable now, ranked by older figures: {}.",
        codes=frozenset(NOT_OF_WEIGHTS),
    ),
    _NEVER_READ._replace(
        event="it is not found, or is missing from the list of its author's repositories, and was "
        "not known to be public when last seen; or its folder is not found on disk, and the two "
        "folders above are missing or empty, as when a disk is not mounted",
        first="Not readable now, ranked by older figures: {}.",
        codes=_MISSING,
    ),
    _NEVER_READ,
    _GONE,
    _GONE._replace(event="it was public when last seen, and is not found now"),
    _GONE._replace(event="it was private, and the token that read it before does not find it now"),
    _GONE._replace(event="its branch or tag is gone", codes=frozenset({"RevisionNotFound"})),
    _GONE._replace(event="the list of its author's repositories shows that it has no weights now"),
    Cause(
        "it is gone, but a new repository has the same commit, or a new folder has the same files "
        "and modification times, so it was renamed",
        "there",
        what="renamed",
        first="Renamed: {}.",
    ),
)  # fmt: skip
_OF_CODE = {code: cause for cause in reversed(CAUSES) for code in cause.codes}
RENAMED = CAUSES[-1]
#: Codes that leave the last figures as they are, for SQL.
UNKNOWN = ", ".join(f"'{code}'" for code in sorted(_UNKNOWN))


def cause_of(code: str, *, was_read: bool = True) -> Cause:
    """Return the cause that belongs to an error code.

    Args:
        code: A key of `SCREENING_CODES`; empty for no error.
        was_read: Whether the registry has figures of the checkpoint. If not, an error that leaves
            its state unknown is an ordinary failure.
    """
    cause = _OF_CODE[code]
    return cause if was_read or cause.state != "unknown" else _NEVER_READ


def proven(
    error: ScreeningError, identity: str, last: sqlite3.Row | None, token: str
) -> ScreeningError:
    """Return a `GONE` error if the registry shows that a missing checkpoint used to be readable.

    Otherwise ``error`` is returned unchanged. The registry shows it if the checkpoint, when it was
    last seen, was public or gone already, or if it was read with the same token, at an address, or
    from a folder that was deleted (`folder_is_gone`). Checkpoints that were renamed or made
    private, or that the token may no longer read, count as gone, too.

    Args:
        error: The error from reading the checkpoint.
        identity: The checkpoint's repository, folder or address.
        last: The checkpoint's last row in the table ``seen``, with ``was_read``; None if it has no
            row.
        token: Short hash that identifies the Hub token that was used; empty for none.
    """
    if last is None or error.code not in _MISSING:
        return error
    why = ""
    if last["error"] == GONE:
        why = str(last["message"])
    elif last["private"] == 0:
        why = (
            "it was public when last seen, and is not found now: it was deleted, renamed or made "
            "private"
        )
    elif last["was_read"] and token and last["token"] == token:
        why = (
            "the token that read it before does not find it now: it was deleted or renamed, or "
            "the token lost its access"
        )
    elif last["was_read"] and (
        folder_is_gone(identity) or not identity.startswith(("hf://", "file://"))
    ):
        why = "the folder does not exist any more"
    return ScreeningError(GONE, why) if why else error


def folder_is_gone(identity: str) -> bool:
    """Whether the folder that an identity names was deleted.

    A missing folder counts as deleted if the folder above, or, where that is missing too, the
    folder above that one, has other entries: an empty folder may be the mount point of a disk that
    is not there. False for identities other than ``file://PATH``.
    """
    place = Path(path_of(identity.removeprefix("file://")))
    if not identity.startswith("file://") or place.exists():
        return False
    above = next(
        (folder for folder in (place.parent, place.parent.parent) if folder.is_dir()), None
    )
    return above is not None and any(above.iterdir())
