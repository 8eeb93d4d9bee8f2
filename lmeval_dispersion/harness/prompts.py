"""The shape of a task's prompts, as strings that are the same in every process."""

from __future__ import annotations

import hashlib
import inspect
import json
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class PromptShape:
    """The settings that shaped the prompts of one task."""

    doc_to_text: Any
    description: str | None
    subject: str | None
    delimiters: tuple[str | None, str | None]
    num_fewshot: int | None
    fewshot_seed: int | None
    chat_template: str | None
    multiturn: bool
    system: str | None

    @property
    def format(self) -> str:
        """One hash of it all, as the manifest's ``prompt_format``."""
        shape = {
            "doc_to_text": source_text(self.doc_to_text),
            "num_fewshot": self.num_fewshot,
            "delimiters": list(self.delimiters),
            "chat_template": self.chat_template,
            "multiturn": self.multiturn if self.chat_template else None,
            "system": self.system,
        }
        return _hash(json.dumps(shape, sort_keys=True))

    @property
    def identity(self) -> dict[str, str]:
        """The keys of a manifest's ``identity`` that prompts have; what does not apply is left out."""
        # "... questions about anatomy": the subjects of one benchmark have one template.
        description = self.description or ""
        if self.subject:
            description = description.replace(self.subject.replace("_", " "), "SUBJECT")
        template = [source_text(self.doc_to_text), description, list(self.delimiters)]
        keys = {
            "prompt_template": _hash(json.dumps(template)),
            "num_fewshot": str(self.num_fewshot or 0),
        }
        if self.num_fewshot and self.fewshot_seed is not None:
            keys["fewshot_seed"] = str(self.fewshot_seed)
        if self.system:
            keys["system_prompt"] = _hash(self.system)
        if self.chat_template:
            keys["chat_template"] = self.chat_template
            keys["multiturn"] = str(self.multiturn).lower()
        return keys


def source_text(value: Any) -> str:
    """A template as it is; a function as its source, as lm-eval writes it to results, or its name.

    >>> source_text(partial(max, 3))
    'builtins.max(3)'
    """
    if isinstance(value, partial):
        words = [*map(repr, value.args), *(f"{key}={word!r}" for key, word in sorted(value.keywords.items()))]
        return f"{source_text(value.func)}({', '.join(words)})"
    if not callable(value):
        return str(value)
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        kind = value if hasattr(value, "__qualname__") else type(value)
        return f"{kind.__module__}.{kind.__qualname__}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
