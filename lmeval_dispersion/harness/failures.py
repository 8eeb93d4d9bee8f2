"""Common failures of lm-eval, torch and the Hub, as one sentence each."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lmeval_dispersion.errors import DispersionError, first_line
from lmeval_dispersion.harness import install
from lmeval_dispersion.layouts import similar_names
from lmeval_dispersion.report.declared import listed


@contextmanager
def sentences() -> Iterator[None]:
    """Inside this context, turn common failures of lm-eval, torch or the Hub into DispersionErrors.

    The message of such an error is one sentence; see :func:`failure_sentence`.

    Other errors are raised unchanged, and so is every error if the environment variable
    ``DISPERSION_DEBUG`` is set.
    """
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
    """Return one sentence on a common failure of lm-eval, torch or the Hub.

    Return None for any other error, which needs its traceback.
    """
    text = str(error).strip()
    first = first_line(error)
    is_torch = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    if is_torch or isinstance(error, MemoryError) or "out of memory" in text.lower():
        return f"out of memory: {first}; lower batch_size, or set batch_size to auto"
    if text.startswith("Tasks not found"):
        names = first.partition(": ")[2].split(",")
        return f"{first}{near_tasks(names, install.task_names())}"
    if text.startswith("Duplicate task"):
        return f"{first}; name each task once"
    if text.startswith("Attempted to load model"):
        return f"{first}; use the model hf, which dispersion tasks need"
    if "apply_chat_template is set" in text:
        return "the model accepts only chat messages; add apply_chat_template"
    if "chat_template" in text or "chat template" in text:
        return (
            f"{first}; leave apply_chat_template out, or use a model whose tokenizer has a template"
        )
    digits = _digits_alone(error)
    if digits:
        field, shown = digits
        return (
            f"the task's {field} gives {shown!r}, only digits, which lm-eval reads as a number if the "
            "task has doc_to_choice; put a word before the digits, such as 'Question: '"
        )
    if isinstance(error, OSError):
        return f"{first}; check the name of the model or data set, and the network"
    return None


def near_tasks(names: Sequence[str], known: Sequence[str]) -> str:
    """Return a hint on task names that do not exist, as the end of a message.

    The hint gives similar names out of ``known``, or else the command that lists all tasks.
    """
    near: list[str] = []
    for name in names:
        near += similar_names(name.strip(), known)
    if not near:
        return "; `dispersion run ls tasks` lists all tasks"
    three = list(dict.fromkeys(near))[:3]
    return f"; did you mean {', '.join(three)}?"


def _digits_alone(error: Exception) -> tuple[str, str] | None:
    """The field of a task's configuration, and its text of digits alone that lm-eval could not use; or None.

    lm-eval evaluates such a text as Python where the task has choices: 02 fails as a number, 2 as a
    text.
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
    """Return a list with one note: the adapters named in ``labels`` answer exactly as their base.

    The list is empty if ``labels`` is empty.
    """
    if not labels:
        return []
    if len(labels) == 1:
        return [
            f"{labels[0]} answers exactly as its base: the adapter is untrained, or its weights were "
            "not loaded; check its files."
        ]
    names = listed(labels)
    return [
        f"{names} answer exactly as their base: these adapters are untrained, or their weights were "
        "not loaded; check their files."
    ]


def checkpoint_failure(error: Exception) -> str:
    """Return a sentence on why a checkpoint failed; for an uncommon error, its type and message.

    If the environment variable ``DISPERSION_DEBUG`` is set, ``error`` is raised instead.
    """
    if os.environ.get("DISPERSION_DEBUG"):
        raise error
    sentence = str(error) if isinstance(error, DispersionError) else failure_sentence(error)
    return sentence or f"{type(error).__name__}: {error}"
