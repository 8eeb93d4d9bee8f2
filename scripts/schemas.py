"""Writes the JSON Schemas of results in ``docs/reference/schemas`` from the classes of the results.

    python scripts/schemas.py          writes those that changed
    python scripts/schemas.py --check  exit status 1 where one is not what its class says

A field's type is its schema; `NaN` is null, so that a float may always be null where the class allows None.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

FOLDER = Path(__file__).parents[1] / "docs" / "reference" / "schemas"
SITE = "https://lmeval-dispersion.github.io/lmeval-dispersion/reference/schemas/"
#: Result class -> what prints it, and where the documentation explains it.
RESULTS = {
    "lmeval_dispersion.training.comparison:Comparison": (
        "What `dispersion train --format json` prints: docs/reference/training.md."
    ),
    "lmeval_dispersion.watching.report:Watched": (
        "What `dispersion watch --format json` prints: docs/reference/watching.md."
    ),
    "lmeval_screener.shortlist.verdict:Verdict": (
        "What `dispersion verify --format json` prints: "
        "docs/reference/screening.md#from-short-list-to-verdict."
    ),
}
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}


def schema_of(kind: Any) -> dict[str, Any]:
    """The schema of one type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if dataclasses.is_dataclass(kind):
        return object_of(kind)
    if origin is Annotated:
        return schema_of(arguments[0])
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (UnionType, Union):
        parts = [schema_of(part) for part in arguments]
        plain = all(set(part) == {"type"} for part in parts)
        return {"type": [part["type"] for part in parts]} if plain else {"anyOf": parts}
    if origin in (tuple, list, Sequence):
        return {"type": "array", "items": schema_of(arguments[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": schema_of(arguments[1])}
    return {}


def object_of(layout: Any, **constants: Any) -> dict[str, Any]:
    """The schema of a dataclass; private fields are not written."""
    hints = get_type_hints(layout, include_extras=True)
    names = [field.name for field in dataclasses.fields(layout) if not field.name.startswith("_")]
    properties = constants | {name: schema_of(hints[name]) for name in names}
    return {
        "type": "object",
        "required": list(properties),
        "properties": properties,
        "additionalProperties": False,
    }


def main(arguments: list[str]) -> int:
    """Write the schemas, or check them."""
    stale = []
    for place, description in RESULTS.items():
        module, _, name = place.partition(":")
        result = getattr(importlib.import_module(module), name)
        title = result.schema
        file = FOLDER / f"{title.replace('/', '-')}.json"
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SITE + file.name}
        answer = {"type": "array", "items": {"type": "string"}}
        body = object_of(result, schema={"const": title}, answer=answer)
        schema = head | {"title": title, "description": description} | body
        text = json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
        if not file.exists() or file.read_text("utf-8") != text:
            stale.append(file.name)
            if "--check" not in arguments:
                file.write_text(text, "utf-8")
    if stale:
        print("stale:" if "--check" in arguments else "wrote:", ", ".join(stale), file=sys.stderr)
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
