"""The published JSON Schemas, for tests that hold real outputs against them."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

FOLDER = Path(__file__).parents[1] / "docs" / "reference" / "schemas"


@cache
def validator(contract: str) -> Draft202012Validator:
    """The validator of a contract such as ``screen-checkpoints/3``."""
    schema = json.loads((FOLDER / f"{contract.replace('/', '-')}.json").read_text("utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)


def faults(document: dict[str, Any]) -> list[str]:
    """What the schema that a document names finds wrong with it, with the places."""
    found = validator(document.get("schema") or document["format"]).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in found]


def changed(value: Any, change: str, at: str = "$") -> Iterator[tuple[Any, str]]:
    """Copies of a document, each with one key ``renamed`` or ``missing``, and where that is."""
    if isinstance(value, dict):
        for key, item in value.items():
            others = {other: value[other] for other in value if other != key}
            if change == "renamed":
                yield {**others, f"{key}_new": item}, f"{at}.{key}"
            elif change == "missing":
                yield others, f"{at}.{key}"
            for one, where in changed(item, change, f"{at}.{key}"):
                yield {**value, key: one}, where
    elif isinstance(value, list) and value:
        for one, where in changed(value[0], change, f"{at}[]"):
            yield [one, *value[1:]], where
