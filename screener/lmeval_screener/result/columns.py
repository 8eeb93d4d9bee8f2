"""A screened checkpoint's columns: one list for JSON, its schema, CSV, *What was read*, and the docs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

from lmeval_dispersion.geometry import METRICS
from lmeval_dispersion.report import Col, Column
from lmeval_screener.figures import PARTS
from lmeval_screener.orders import Distance, RankBy
from lmeval_screener.screened import Against, Finite, Group, Screened

# Types with further constraints for their JSON Schema.
_Rank = Annotated[int, ("minimum", 1)]
_Shape = Annotated[list[Annotated[int, ("minimum", 0)]], ("minItems", 2), ("maxItems", 2)]
_Seconds = Annotated[Finite, ("minimum", 0)]
_Share = Annotated[_Seconds, ("maximum", 1)]


class CheckpointColumn(NamedTuple):
    """One value of a checkpoint, in all output formats.

    Attributes:
        path: Its key in JSON, ``tensor.dtype`` inside ``tensor``; None if JSON lacks it.
        kind: The type of its JSON.
        about: Its meaning, in Markdown.
        value: Its attribute of `Screened`, or a function of checkpoint and group; empty for ``path``.
        csv: Its column in CSV, None if CSV lacks it; empty for ``path`` with underscores.
        cell: Turns the value into its cell in CSV.
        only: Present only with a ``base`` or a short ``list``; empty for always.
        shown: Its column in *What was read*.
    """

    path: str | None
    kind: Any
    about: str = ""
    value: str | Callable[[Screened, Group], Any] = ""
    csv: str | None = ""
    cell: Callable[[Any], Any] = lambda value: value
    only: Literal["", "base", "list"] = ""
    shown: Column | None = None

    @property
    def name(self) -> str | None:
        """Its column in CSV; None if CSV lacks it."""
        return (self.path or "").replace(".", "_") if self.csv == "" else self.csv

    def of(self, c: Screened, group: Group) -> Any:
        """This column's value for a checkpoint in its group; None where it has none."""
        if callable(self.value):
            return self.value(c, group)
        value: Any = c
        for name in (self.value or self.path or "").split("."):
            if value is not None:
                value = value[name] if isinstance(value, Mapping) else getattr(value, name)
        return value


def _figures(metric: str) -> Iterator[CheckpointColumn]:
    """G in one metric, its parts and the control, each with its errors."""
    for part, about in zip(
        ("gap", *PARTS), ("G", "within(T)", "between(T, R)", "within(R)"), strict=True
    ):
        path, place = f"{part}.{metric}", f"gaps.{metric}.{part}".removesuffix(".gap")
        csv = path.replace(".", "_")
        kind = Finite if part == "gap" else float
        yield _C(f"{path}.mean", kind, about, f"{place}.mean", csv)
        yield _C(f"{path}.se", kind, "jackknife over tokens", f"{place}.se", f"{csv}_se")
        if part != "gap":
            yield _C(
                f"{path}.se_pairs",
                float,
                "the same over pairs, which is too small",
                f"{place}.se_pairs",
                None,
            )


def _dropped(c: Screened, group: Group) -> list[str]:
    return [word.strip() for word in (*c.resolution.dropped, *c.resolution.dropped_reference)]


def _to_next(c: Screened, group: Group) -> float | None:
    following = group.neighbours.get(c)
    return None if following is None else group.chance(c, following)


_C = CheckpointColumn
#: All columns, in the order of CSV and JSON.
COLUMNS = (
    _C("label", str, "unique name in the report, which options take too", shown=Col("Checkpoint")),
    _C("repo", str, "repository after renames, or the folder"),
    _C(
        "requested_revision",
        str | None,
        "the revision that you asked for; null for the default branch",
        "target.revision",
    ),
    _C(
        "revision",
        str | None,
        "the commit that was read; null for a folder",
        shown=Column("commit", "Commit", drop=3),
    ),
    _C("family", str, "family, or `tokenizer:<hash>` for checkpoints given by name"),
    _C("scale", str, "size class, such as 7B"),
    _C(
        "rank",
        _Rank | None,
        "place in the group; equal rows share one; null for the base, its rows, and those set aside",
        lambda c, group: c.rank if group.has_place(c) else None,
    ),
    _C("ranked_by", RankBy, "the figure that ranks its group: `gap` (G) or `ratio`"),
    _C("metric", Distance, "the distance of the G that ranks, or is shown"),
    _C(
        "holds_best",
        _Share | None,
        "[chance](#chances) that the best is here or above, as among our own models or by `--slope`; null "
        "where none is known",
        lambda c, group: group.holds_best(c),
    ),
    _C(
        "chance_to_next",
        _Share | None,
        "chance that it is more accurate than the next in rank; null for the last",
        _to_next,
    ),
    _C("copy_of", str | None, "label of its original, if it is a [copy](#copies); else null"),
    _C(
        "equal_rows_with",
        str | None,
        "label of another checkpoint with equal rows that it does not copy, or null",
    ),
    _C("group", str, "the group as reports name it", lambda _, group: group.title, None),
    _C("ratio.mean", float, "the ratio; null where there is none", csv="ratio"),
    _C("ratio.se", float, "jackknife over tokens"),
    _C(
        "ratio.rounding",
        float,
        "three standard deviations of the rounding by the stored type",
        csv=None,
    ),
    _C(
        "ratio.reason",
        str | None,
        "why there is no ratio",
        lambda c, _: c.no_ratio or None,
        "no_ratio",
    ),
    *(column for metric in METRICS for column in _figures(metric)),
    _C("is_base", bool, "whether it is the base", only="base"),
    _C(
        "against_base",
        Against | None,
        "`difference` of the ratio from the base's, its paired `se`, `side`; null for the base",
        lambda c, _: c.against and c.against._asdict(),
        only="base",
        cell=lambda against: against and against["difference"],
    ),
    _C(None, float, "its paired error", "against.se", "against_base_se", only="base"),
    _C(
        None,
        str,
        "`above`, `below`, `level` or `equal`",
        "against.side",
        "against_base_side",
        only="base",
    ),
    _C("accuracy", float, "the accuracy that you supplied, or null"),
    _C(
        "tensor.name",
        str,
        "the output projection",
        "tensor",
        "tensor",
        shown=Col("Rows of", drop=2),
    ),
    _C("tensor.file", str, "its file", "file", None),
    _C(
        "tensor.dtype",
        str,
        "its element type as stored",
        "dtype",
        "dtype",
        shown=Col("Type", drop=1),
    ),
    _C("tensor.shape", _Shape, "rows and columns", "shape", None),
    _C("tensor.tied", bool, "whether it is the input embedding", "tied", "tied"),
    _C("tokens.domain", int, "number of tokens of T", lambda c, _: len(c.resolution.domain)),
    _C("tokens.reference", int, "number of tokens of R", lambda c, _: len(c.resolution.reference)),
    _C(
        "tokens.dropped",
        list[str],
        "words that were dropped, as they are not a single token",
        _dropped,
        "dropped",
        " ".join,
    ),
    _C(
        "tokens.digit_scheme",
        str,
        "how the tokenizer splits numbers",
        "resolution.digit_scheme",
        "digit_scheme",
    ),
    _C(
        "bytes_read",
        int,
        "bytes that were transferred; 0 if all came from the cache",
        shown=Col("Read", "bytes"),
    ),
    _C("requests", int, "requests that it took", shown=Col("Requests", "d")),
    _C(
        "seconds",
        _Seconds,
        "from the first request to the last row",
        lambda c, _: round(c.seconds, 3),
    ),
    _C("notes", list[str], "remarks on its numbers", lambda c, _: list(c.notes), cell="; ".join),
    _C("chosen", Literal["rank", "audit", None], "why it is on the short list", only="list"),
    _C(
        "inclusion_probability",
        _Share,
        "the probability with which it was to be chosen",
        only="list",
    ),
)


def read_columns() -> list[Column]:
    """The columns of *What was read*."""
    return [
        replace(c.shown, key=c.shown.key or str(c.name)) for c in COLUMNS if c.shown is not None
    ]


def _there(c: Screened, group: Group) -> Iterator[CheckpointColumn]:
    there = {"": True, "base": group.base is not None, "list": c.inclusion_probability is not None}
    return (column for column in COLUMNS if there[column.only])


def entry(c: Screened, group: Group) -> dict[str, Any]:
    """A group's checkpoint as an entry of the JSON contract: nested dictionaries, by ``path``."""
    row: dict[str, Any] = {}
    for column in _there(c, group):
        if column.path is not None:
            *places, key = column.path.split(".")
            inner = row
            for place in places:
                inner = inner.setdefault(place, {})
            inner[key] = column.of(c, group)
    return row


def flat_row(c: Screened, group: Group) -> dict[str, Any]:
    """A group's checkpoint as a row of CSV: column -> cell."""
    there = [column for column in _there(c, group) if column.name]
    return {str(column.name): column.cell(column.of(c, group)) for column in there}
