"""Writes the JSON Schemas of results in ``docs/reference/schemas`` from the classes of the results.

    python scripts/schemas.py          writes those that changed
    python scripts/schemas.py --check  exit status 1 where one is not what its class says

A field's type is its schema.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

FOLDER = Path(__file__).parents[1] / "docs" / "reference" / "schemas"
SITE = "https://lmeval-dispersion.github.io/lmeval-dispersion/reference/schemas/"
#: Result class -> the command whose `--format json` it is, and the page that explains it.
RESULTS = {
    "lmeval_dispersion.auditing.report:Audit": "`dispersion audit RUN`: docs/reference/audit.md",
    "lmeval_dispersion.auditing.ranking:Worst": "`dispersion audit RUN --worst N`: docs/reference/audit.md",
    "lmeval_dispersion.auditing.compare:Comparison": "`dispersion compare RUN RUN`: docs/reference/audit.md",
    "lmeval_dispersion.auditing.calibration:Calibration": "`dispersion calibrate`: docs/reference/audit.md",
    "lmeval_dispersion.auditing.prediction:Predictions": "`dispersion predict`: docs/reference/audit.md",
    "lmeval_dispersion.probing.probe:Probe": "`dispersion probe`: docs/reference/probe.md",
    "lmeval_dispersion.racing.report:Race": "`dispersion race`: docs/reference/race.md",
    "lmeval_dispersion.racing.replay:Replay": "`dispersion race --replay`: docs/reference/race.md",
    "lmeval_dispersion.training.comparison:TrainingComparison": (
        "`dispersion train`: docs/reference/training.md"
    ),
    "lmeval_dispersion.watching.report:Watched": "`dispersion watch`: docs/reference/watching.md",
    "lmeval_screener.shortlist.verdict:Verdict": "`dispersion verify`: docs/reference/screening.md",
}
#: A float that is not finite is null.
_PLAIN = {str: "string", int: "integer", float: ["number", "null"], bool: "boolean", NoneType: "null"}


def schema_of(kind: Any) -> dict[str, Any]:
    """The schema of one type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if dataclasses.is_dataclass(kind) or is_typeddict(kind):
        return object_of(kind)
    if origin is Annotated:
        return schema_of(arguments[0])
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (UnionType, Union):
        parts = [schema_of(part) for part in arguments]
        plain = all(set(part) == {"type"} for part in parts)
        kinds = [kind for part in parts for kind in _listed(part.get("type", []))]
        return {"type": list(dict.fromkeys(kinds))} if plain else {"anyOf": parts}
    if origin in (tuple, list, Sequence):
        return {"type": "array", "items": schema_of(arguments[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": schema_of(arguments[1])}
    return {}


def _listed(kinds: str | list[str]) -> list[str]:
    return [kinds] if isinstance(kinds, str) else kinds


def object_of(layout: Any, **constants: Any) -> dict[str, Any]:
    """The schema of a dataclass or a typed dictionary; private fields are not written."""
    hints = get_type_hints(layout, include_extras=True)
    fields = dataclasses.fields(layout) if dataclasses.is_dataclass(layout) else ()
    names = [field.name for field in fields] or list(hints)
    names = [name for name in names if not name.startswith("_")]
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
        schema = head | {"title": title, "description": f"JSON of {description}."} | body
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
