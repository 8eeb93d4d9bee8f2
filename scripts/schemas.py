"""Writes the JSON Schemas in ``docs/reference/schemas`` from result classes and checkpoints' columns.

    python scripts/schemas.py          writes those that changed
    python scripts/schemas.py --check  exit status 1 where one is not what its class says

A field's type is its schema. Documents without a class are laid out below as their JSON is.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from lmeval_screener.chance import SCHEMA as SLOPE
from lmeval_screener.orders import RankBy
from lmeval_screener.ranking import Agreement
from lmeval_screener.result.columns import COLUMNS, CheckpointColumn
from lmeval_screener.result.gate import Distance

from lmeval_dispersion.auditing.calibrating.calibrator import FORMAT, Calibrator
from lmeval_dispersion.geometry import Metric

FOLDER = Path(__file__).parents[1] / "docs" / "reference" / "schemas"
SITE = "https://lmeval-dispersion.github.io/lmeval-dispersion/reference/schemas/"
#: Result class -> the command whose `--format json` it is, and the page that explains it.
RESULTS = {
    "lmeval_dispersion.auditing.report:Audit": "`dispersion audit RUN`: docs/reference/audit.md",
    "lmeval_dispersion.auditing.ranking:Worst": "`dispersion audit RUN --worst N`: docs/reference/audit.md",
    "lmeval_dispersion.auditing.compare:Comparison": "`dispersion compare RUN RUN`: docs/reference/audit.md",
    "lmeval_dispersion.auditing.calibrating.calibration:Calibration": (
        "`dispersion calibrate`: docs/reference/audit.md"
    ),
    "lmeval_dispersion.auditing.calibrating.prediction:Predictions": (
        "`dispersion predict`: docs/reference/audit.md"
    ),
    "lmeval_dispersion.racing.report:Race": "`dispersion race`: docs/reference/race.md",
    "lmeval_dispersion.racing.replay:Replay": "`dispersion race --replay`: docs/reference/race.md",
    "lmeval_dispersion.watching.report:Watched": "`dispersion watch`: docs/reference/watching.md",
    "lmeval_screener.shortlist.verdict:Verdict": "`dispersion verify`: docs/reference/screening.md",
}
#: A float that is not finite is null.
_PLAIN = {
    str: "string",
    int: "integer",
    float: ["number", "null"],
    bool: "boolean",
    NoneType: "null",
}


Count = Annotated[int, ("minimum", 3)]
Share = Annotated[float, ("type", "number"), ("minimum", 0), ("maximum", 1)]
Number = Annotated[float, ("type", "number")]
FAILED = {"repo": str, "revision": str | None, "error": str, "message": str}
GROUP = {"family": str, "scale": str}
CHOICE = {
    "k": int,
    "audit_sample": int,
    "seed": int,
    "groups": [
        GROUP
        | dict.fromkeys(("k", "candidates", "listed", "audited"), int)
        | {"kind": str | None, "sentence": str}
    ],
}
OWN = {
    "kind": str,
    **dict.fromkeys(("k", "low", "high"), Number),
    "evaluated": int,
    "subject": str,
    "measured": str,
}
PIECES = {"variants": list[Literal["bare", "space"]], "pieces": dict[str, int]}


def nested(columns: Sequence[CheckpointColumn]) -> dict[str, Any]:
    """The layout of columns as JSON nests them."""
    layout: dict[str, Any] = {}
    for column in columns:
        if column.path is not None:
            *places, key = column.path.split(".")
            inner = layout
            for place in places:
                inner = inner.setdefault(place, {})
            inner[key + "?" * bool(column.only)] = column.kind
    return layout


#: Contract -> what it is, and the layout of its JSON: an optional key ends in ``?``, a tuple says *or*.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "screen-checkpoints/3": (
        "What `screen-checkpoints --format json` prints: docs/reference/screening.md#json.",
        {
            "domain": str,
            "task": str | None,
            "answers": ({"name": str, "tokens": dict[str, Count]}, None),
            "reference": str,
            "metric": Metric,
            "ranked_by": RankBy,
            "base": str | None,
            "slope": (OWN, None),
            "se_covers": Literal["choice of tokens"],
            "checkpoints": [nested(COLUMNS)],
            "tokens": [{"family": str, "domain": PIECES, "reference": PIECES, "answers?": PIECES}],
            "failed": [{"label": str} | FAILED],
            "of_base": [{"label": str} | FAILED],
            "totals": {"checkpoints": int, "bytes_read": int, "requests": int, "seconds": Number},
            "answer": list[str],
            "agreement?": [Agreement],
            "shortlist?": CHOICE,
            "gate?": {
                "reference": str,
                "passed": bool,
                "below": list[str],
                "compared": int,
                "not_compared": int,
                "failed": str | None,
                "figure": Literal["", "ratio", "G"],
                "distances": [Distance],
            },
        },
    ),
    "screen-checkpoints-shortlist/2": (
        "`manifest.json` of `screen-checkpoints --shortlist K --emit FOLDER`: "
        "docs/reference/screening.md#from-short-list-to-verdict.",
        {
            "version": str,
            "command": str,
            "domain": str,
            "task": str | None,
            "reference": str,
            "metric": Metric,
            "ranked_by": RankBy,
            "base": str | None,
            "tasks": list[str],
            **CHOICE,
            "candidates": [
                {
                    "repo": str,
                    "requested_revision": str | None,
                    "revision": str | None,
                    "file": str | None,
                    "tokenizer?": str | None,
                    **GROUP,
                    "rank": int,
                    "chosen": Literal["rank", "audit", None],
                    "inclusion_probability": Share,
                    "G": Number,
                    "ratio": float,
                    "equal_rows?": bool,
                }
            ],
            "failed": [FAILED],
        },
    ),
    SLOPE: (
        "File of `dispersion verify --keep FILE`: docs/reference/screening.md#your-own-slope.",
        OWN,
    ),
}


def schema_of(kind: Any) -> dict[str, Any]:
    """The schema of one type."""
    if isinstance(kind, dict):
        return _object(kind)
    if isinstance(kind, list):
        return {"type": "array", "items": schema_of(kind[0])}
    if isinstance(kind, tuple):
        return {"anyOf": [schema_of(part or NoneType) for part in kind]}
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if dataclasses.is_dataclass(kind) or is_typeddict(kind) or hasattr(kind, "_fields"):
        return object_of(kind)
    if origin is Annotated:
        more = [word for word in kind.__metadata__ if isinstance(word, tuple)]
        limits = [word for word in kind.__metadata__ if isinstance(word, int | float)]
        more += zip(("minimum", "maximum"), limits, strict=False)  # of a file that is read again
        more += [("type", "number")] if limits and arguments[0] is float else []
        return schema_of(arguments[0]) | dict(more)
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
    return _object({name: hints[name] for name in names}, constants)


def _object(
    layout: Mapping[str, Any], constants: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    properties = {name.rstrip("?"): schema_of(kind) for name, kind in layout.items()}
    properties = dict(constants or {}) | properties
    return {
        "type": "object",
        "required": [name for name in properties if f"{name}?" not in layout],
        "properties": properties,
        "additionalProperties": False,
    }


def contracts() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Title, description and schema of every contract."""
    for place, description in RESULTS.items():
        module, _, name = place.partition(":")
        result = getattr(importlib.import_module(module), name)
        answer = {"type": "array", "items": {"type": "string"}}
        body = object_of(result, schema={"const": result.schema}, answer=answer)
        yield result.schema, f"JSON of {description}.", body
    description = "File of `dispersion calibrate RUN -o FILE`: docs/reference/audit.md#calibrators."
    yield FORMAT, description, object_of(Calibrator, format={"const": FORMAT})
    for title, (description, layout) in LAYOUTS.items():
        yield title, description, _object(layout, {"schema": {"const": title}})


def main(arguments: list[str]) -> int:
    """Write the schemas, or check them."""
    stale = []
    for title, description, body in contracts():
        file = FOLDER / f"{title.replace('/', '-')}.json"
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SITE + file.name}
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
