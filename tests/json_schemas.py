"""The published JSON Schemas, for tests that hold real outputs against them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

FOLDER = Path(__file__).parents[1] / "docs" / "reference" / "schemas"


@cache
def validator(contract: str) -> Draft202012Validator:
    """The validator of a contract such as ``screen-checkpoints/2``."""
    schema = json.loads((FOLDER / f"{contract.replace('/', '-')}.json").read_text("utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)


def faults(document: dict[str, Any]) -> list[str]:
    """What the schema that a document names finds wrong with it, with the places."""
    found = validator(document.get("schema") or document["format"]).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in found]
