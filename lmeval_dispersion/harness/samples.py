"""The samples of a finished lm-eval run as a dispersion run's prompts and records, without a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm_eval.utils import apply_template

from lmeval_dispersion.harness.records import DocRecord, Prompt
from lmeval_dispersion.store.identity import SUFFIX
from lmeval_dispersion.store.samples import JudgedTask, LoggedRun, Sample, judged_task, stock_name


@dataclass(frozen=True)
class LoggedDocument:
    """One document: its prompt and judged answer."""

    record: DocRecord  # whose state is still missing
    prompt: Prompt  # its first request
    logged_answer: float | str  # to it: log-probability or text


@dataclass(frozen=True)
class LoggedTask(JudgedTask):
    """The samples of one task, with what a dispersion run has of it."""

    name: str
    store_name: str  # the dispersion run's name of this task, for comparisons
    kind: str  # lm-eval's type of its requests
    documents: list[LoggedDocument]  # in the order of their index


def read_task(
    run: LoggedRun, task: str, judge: str | None = None, *, allow_holes: bool = False
) -> LoggedTask:
    """The samples of one task; checks and errors are those of :func:`judged_task`."""
    judged = judged_task(run, task, judge, allow_holes=allow_holes)
    template, notes = _template(judged.config.get("doc_to_text")), list(judged.notes)
    if template is None and judged.config.get("doc_to_text") is not None:
        notes.insert(
            0,
            "the prompts come from a function of the task: the query's part is unknown, and the perplexity "
            "is that of the whole prompt",
        )
    kind = str(judged.config["output_type"])
    return LoggedTask(
        **vars(judged) | {"notes": notes},
        name=task,
        store_name=stock_name(task) + SUFFIX,
        kind="loglikelihood" if kind == "multiple_choice" else kind,
        documents=[_document(task, i, s, judged.filter, template) for i, s in judged.samples.items()],
    )


def _document(
    task: str, doc_id: int, sample: Sample, filter_name: str, template: str | None
) -> LoggedDocument:
    query, doc = None, sample.doc
    if template is not None and isinstance(doc, Mapping):
        query = doc[template] if template in doc else apply_template(template, doc)
    prompt = Prompt(sample.arguments[0], query if isinstance(query, str) else None, task)
    columns = {**sample.columns, "text": prompt.query}
    record = DocRecord(prompt.dispersion_state, doc_id, sample.correct, filter_name, columns)
    return LoggedDocument(record, prompt, sample.answer)


def _template(text: Any) -> str | None:
    """The template of a task's query; None for a function, whose source is logged and is not run."""
    is_code = r"\s*(?:@|def |<|functools\.|\S+ = lambda|lambda )"
    return None if not isinstance(text, str) or re.match(is_code, text) else text
