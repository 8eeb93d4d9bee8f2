"""What a store's manifest says of a run: which model, under which versions, and how it was asked."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lmeval_dispersion.harness.seams import Surroundings
from lmeval_dispersion.model.capture import depth
from lmeval_dispersion.model.loading import (
    adapter_identity,
    cached_commit,
    settings_identity,
    weights_identity,
)


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


def run_manifest(task: Any, around: Surroundings, options: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a task that lm-eval runs; ``options`` are those of ``build_all_requests``."""
    config, lm = task.config, around.lm
    shape = PromptShape(
        doc_to_text=config.doc_to_text,
        description=config.description if isinstance(config.description, str) else None,
        subject=config.dataset_name if isinstance(config.dataset_name, str) else None,
        delimiters=(config.target_delimiter, config.fewshot_delimiter),
        num_fewshot=config.num_fewshot,
        fewshot_seed=around.fewshot_seed,
        chat_template=_chat_template(lm) if options.get("apply_chat_template") else None,
        multiturn=bool(options.get("fewshot_as_multiturn")),
        system=options.get("system_instruction"),
    )
    arguments = json.loads(json.dumps(around.model_args, default=str))
    return manifest_of(lm, arguments, shape, {task.task_name: task.VERSION}, around.limit)


def manifest_of(
    lm: Any, arguments: Any, shape: PromptShape, tasks: Mapping[str, Any], limit: Any
) -> dict[str, Any]:
    """The keys of a manifest that are the same whatever ran the prompts.

    Args:
        lm: lm-eval's model.
        arguments: Its ``--model_args``, as a dict or as the text that was given.
        shape: What shaped the prompts.
        tasks: Task -> version.
        limit: ``--limit`` as given.
    """
    name = getattr(lm, "pretrained", None)
    loaded = getattr(getattr(lm, "model", None), "config", None)
    return {
        "model": name if isinstance(name, str) else getattr(loaded, "_name_or_path", ""),
        "revision": _commit(name, lm, arguments) if isinstance(name, str) else None,
        "depth": None if loaded is None else depth(loaded),
        "versions": {package: _version(package) for package in ("lm_eval", "transformers", "torch")},
        "model_args": arguments,
        "tasks": dict(tasks),
        "num_fewshot": shape.num_fewshot,
        "chat_template": shape.chat_template,
        "prompt_format": shape.format,
        "identity": {**model_identity(lm, arguments), **shape.identity},
        "limit": limit,
    }


def model_identity(lm: Any, arguments: Any) -> dict[str, str]:
    """Identity of lm-eval's model by its content: see :mod:`lmeval_dispersion.model.loading`."""
    name, adapter, delta = (getattr(lm, key, None) for key in ("pretrained", "peft", "delta"))
    gguf = _argument(arguments, "gguf_file")
    tokenizer, starts = _argument(arguments, "tokenizer"), getattr(lm, "add_bos_token", None)
    identity: dict[str, str | None] = {
        "weights": weights_identity(name, _commit(name, lm, arguments), gguf)
        if isinstance(name, str)
        else None,
        "gguf": gguf,
        "adapter": adapter_identity(adapter) or str(adapter) if adapter else None,
        "delta": weights_identity(delta) or str(delta) if delta else None,
        "tokenizer": tokenizer if tokenizer != name else None,
        "add_bos_token": None if starts is None else str(starts).lower(),
        **settings_identity(getattr(lm, "model", None)),
    }
    return {key: value for key, value in identity.items() if value is not None}


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


def _argument(arguments: Any, name: str) -> str | None:
    """One of ``--model_args``, which lm-eval holds as a dict or as the text that was given."""
    if isinstance(arguments, str):
        pairs = (pair.partition("=") for pair in arguments.split(","))
        arguments = {key.strip(): value.strip() for key, _, value in pairs}
    value = arguments.get(name) if isinstance(arguments, Mapping) else None
    return None if value is None else str(value)


def _commit(name: str, lm: Any, arguments: Any) -> str | None:
    """The commit of a Hub model: as transformers noted it, or by the Hub's cache; else the revision."""
    if os.path.isdir(name):
        return None
    revision = getattr(lm, "revision", None)
    noted = getattr(getattr(getattr(lm, "model", None), "config", None), "_commit_hash", None)
    return noted or cached_commit(name, revision, _argument(arguments, "gguf_file")) or revision


def _chat_template(lm: Any) -> str | None:
    try:
        template = lm.chat_template(True)
    except (AttributeError, ValueError):
        return None
    return _hash(template) if template else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
