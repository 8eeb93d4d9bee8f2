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
    """Errors of a document by the schema that it names, with their places."""
    errors = validator(document.get("schema") or document["format"]).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in errors]


def changed(value: Any, change: str, at: str = "$") -> Iterator[tuple[Any, str]]:
    """Copies of a document, each with one key ``renamed`` or ``missing``, and where that is."""
    if isinstance(value, dict):
        for key, item in value.items():
            others = {other: value[other] for other in value if other != key}
            if change == "renamed":
                yield {**others, f"{key}_new": item}, f"{at}.{key}"
            elif change == "missing":
                yield others, f"{at}.{key}"
            for inner, where in changed(item, change, f"{at}.{key}"):
                yield {**value, key: inner}, where
    elif isinstance(value, list) and value:
        for inner, where in changed(value[0], change, f"{at}[]"):
            yield [inner, *value[1:]], where
