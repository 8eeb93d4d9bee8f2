"""Which documents of a run are meant: by an expression on their columns, or by a file of their numbers."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lmeval_dispersion.auditing.run import Run
from lmeval_dispersion.errors import UsageError

Rows = NDArray[np.int64]

# What an expression may be made of: columns compared with plain values; no calls, no attributes, no `@`.
_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.Invert, ast.USub, ast.Compare,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.BinOp, ast.BitAnd, ast.BitOr,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Mod, ast.Name, ast.Load, ast.Constant, ast.List, ast.Tuple,
)  # fmt: skip
_EXAMPLE = "subject in ('anatomy', 'virology') and prompt_tokens < 300"


def rows_where(run: Run, expression: str) -> Rows:
    """Rows whose documents satisfy an expression, as :meth:`pandas.DataFrame.eval` reads it.

    Raises:
        UsageError: It is no comparison of columns with plain values, or nothing satisfies it.
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _wrong(expression, getattr(error, "msg", None) or str(error)) from None
    columns = [str(column) for column in run.documents.columns]
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise _wrong(expression, f"{type(node).__name__.lower()} is not allowed")
        if isinstance(node, ast.Name) and node.id not in columns:
            near = difflib.get_close_matches(node.id, columns, n=1)
            known = f"did you mean {near[0]}?" if near else f"there are {', '.join(columns)}"
            raise _wrong(expression, f"there is no column {node.id!r}; {known}")
    try:
        answers = run.documents.eval(expression.strip(), engine="python")
        chosen = np.asarray(answers, dtype=object)
        if chosen.shape != (len(run.documents),) or not {type(v) for v in chosen} <= {bool, np.bool_}:
            raise _wrong(expression, "its value is not true or false for every document")
    except UsageError:
        raise
    except Exception as error:
        # pandas raises whatever the values raise; an expression of a user is no reason for a traceback.
        raise _wrong(expression, str(error).splitlines()[0] if str(error) else type(error).__name__) from None
    rows = np.flatnonzero(chosen.astype(bool))
    if not len(rows):
        raise UsageError(f"no document satisfies --where {expression!r}; look at the values of its columns")
    return rows


def rows_of_file(run: Run, path: str | Path) -> Rows:
    """Rows of the documents that a file lists: one ``doc_id`` a line, or CSV with ``task,doc_id``.

    Raises:
        UsageError: No such file, ids that are not in the run, or ids that need a task.
    """
    file = Path(path)
    try:
        lines = file.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"expected --labelled to be a file of document ids, got {file}: {error}") from None
    cells = [[cell.strip() for cell in line.split(",")] for line in lines if line.strip()]
    header = cells.pop(0) if cells and "doc_id" in cells[0] else ["doc_id"]
    tasks = run.documents["task"].astype(str)
    if "task" not in header and tasks.nunique() > 1:
        raise UsageError(
            f"{file} lists ids without tasks, and the run has {tasks.nunique()} tasks; "
            "write CSV with the header task,doc_id"
        )
    only = tasks.iloc[0]
    try:
        wanted = {
            (row[header.index("task")] if "task" in header else only, int(row[header.index("doc_id")]))
            for row in cells
        }
    except (ValueError, IndexError):
        raise UsageError(f"expected one whole number a line, or CSV with task,doc_id, in {file}") from None
    have = list(zip(tasks, run.documents["doc_id"].astype(int), strict=True))
    if missing := sorted(wanted - set(have)):
        task, number = missing[0]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(f"{file} lists document {number} of task {task!r}{more}; the run does not have it")
    if not wanted:
        raise UsageError(f"{file} lists no document; write one doc_id a line")
    return np.array([row for row, key in enumerate(have) if key in wanted], dtype=np.int64)


def labels_of(run: Run, rows: Rows) -> Run:
    """The run, with no labels but those of ``rows``."""
    score = np.full_like(run.score, np.nan)
    score[rows] = run.score[rows]
    return replace(run, score=score)


def document_ids(run: Run, rows: Rows) -> dict[str, str]:
    """The documents of ``rows`` by task, their ids as ranges such as ``0-99,120``."""
    ids = pd.Series(run.documents["doc_id"].to_numpy()[rows])
    return {
        str(task): _ranges(sorted(set(numbers.astype(int).tolist())))
        for task, numbers in ids.groupby(run.documents["task"].astype(str).to_numpy()[rows])
    }


def rows_of_ids(run: Run, ids: Mapping[str, Any]) -> Rows:
    """Rows of the documents that :func:`document_ids` wrote down; those that are not there are left out."""
    numbers = run.documents["doc_id"].to_numpy()
    tasks = run.documents["task"].astype(str).to_numpy()
    chosen = np.zeros(len(numbers), dtype=bool)
    for task, ranges in ids.items():
        inside = np.zeros(len(numbers), dtype=bool)
        for part in str(ranges).split(","):
            first, _, last = part.partition("-")
            inside |= (numbers >= int(first)) & (numbers <= int(last or first))
        chosen |= inside & (tasks == task)
    return np.flatnonzero(chosen)


def _ranges(ids: list[int]) -> str:
    parts: list[list[int]] = []
    for number in ids:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _wrong(expression: str, reason: str) -> UsageError:
    return UsageError(f"--where {expression!r}: {reason}; write comparisons of columns, such as {_EXAMPLE!r}")
