"""Common failures of lm-eval, torch and the Hub as one sentence each."""

from __future__ import annotations

import difflib
import os
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lmeval_dispersion.errors import DispersionError
from lmeval_dispersion.harness import install
from lmeval_dispersion.report.declared import listed


@contextmanager
def sentences() -> Iterator[None]:
    """Raise common failures as a DispersionError of one sentence; others unchanged."""
    try:
        yield
    except DispersionError:
        raise
    except Exception as error:
        sentence = failure_sentence(error)
        if sentence is None or os.environ.get("DISPERSION_DEBUG"):
            raise
        raise DispersionError(sentence) from error


def failure_sentence(error: Exception) -> str | None:
    """One sentence for a common failure; None for a defect, which needs its traceback."""
    text = str(error).strip()
    first = _first_line(error)
    is_torch = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    if is_torch or isinstance(error, MemoryError) or "out of memory" in text.lower():
        return f"out of memory: {first}; lower batch_size, or try batch_size auto"
    if text.startswith("Tasks not found"):
        names = first.partition(": ")[2].split(",")
        return f"{first}; {near_tasks(names, install.task_names())}"
    if text.startswith("Duplicate task"):
        return f"{first}; name it once"
    if text.startswith("Attempted to load model"):
        return f"{first}; dispersion tasks need the model hf"
    if "apply_chat_template is set" in text:
        return "the model takes chats alone; add apply_chat_template"
    if "chat_template" in text or "chat template" in text:
        return (
            f"{first}; leave apply_chat_template out, or use a model whose tokenizer has a template"
        )
    digits = _digits_alone(error)
    if digits:
        field, shown = digits
        return (
            f"the task's {field} evaluates to {shown!r}: digits alone, which lm-eval takes for a number if "
            "a task has doc_to_choice; put a word before them, such as 'Question: '"
        )
    if isinstance(error, OSError):
        return f"{first}; check the name of the model or data set, and the network"
    return None


def near_tasks(names: Sequence[str], known: Sequence[str]) -> str:
    """What to do about tasks that do not exist: those of similar names, else the command that lists all."""
    near = list[str]()
    for name in names:
        near += difflib.get_close_matches(name.strip(), known)
    return (
        f"did you mean {', '.join(near[:3])}?" if near else "`dispersion run ls tasks` lists them"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _digits_alone(error: Exception) -> tuple[str, str] | None:
    """The field of a task's configuration, and its text of digits alone that lm-eval could not use; or None.

    lm-eval evaluates such a text as Python where the task has choices: 02 fails as a number, 2 as a text.
    """
    refused = re.fullmatch(r"Context is not a string! : (\d+)", str(error))
    if refused and isinstance(error, AssertionError):
        return "doc_to_text", refused[1]
    frames = traceback.extract_tb(error.__traceback__)
    names = [frame.name for frame in frames if "lm_eval" in Path(frame.filename).parts]
    if not isinstance(error, SyntaxError) or not names or not names[-1].startswith("doc_to_"):
        return None
    text = (error.text or "").strip()
    return (names[-1], text) if text.isdigit() else None


def as_their_base(labels: Sequence[str]) -> list[str]:
    """A note naming adapters that answer as their base; empty without any."""
    if not labels:
        return []
    if len(labels) == 1:
        return [f"{labels[0]} answers as its base: untrained, or its weights did not reach it."]
    names = listed(labels)
    return [f"{names} answer as their base: untrained, or their weights did not reach it."]


def checkpoint_failure(error: Exception) -> str:
    """The sentence on a checkpoint that failed; with ``DISPERSION_DEBUG`` the error is raised."""
    if os.environ.get("DISPERSION_DEBUG"):
        raise error
    sentence = str(error) if isinstance(error, DispersionError) else failure_sentence(error)
    return sentence or f"{type(error).__name__}: {error}"
