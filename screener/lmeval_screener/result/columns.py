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
    """One value of a checkpoint, as all output formats have it.

    Attributes:
        path: Key in JSON, with dots for nesting (``tensor.dtype``); None if JSON lacks the value.
        kind: Type of the value in JSON.
        about: Meaning of the value, in Markdown.
        value: Attribute of `Screened`, with dots for nesting, or a function of checkpoint and group
            that returns the value; if empty, the attribute named in ``path``.
        csv: Name of the column in CSV; None if CSV omits the value; if empty, ``path`` with
            underscores in place of dots.
        cell: Function from the value to its cell in CSV.
        only: ``base`` if the value exists only in a group with a base, ``list`` if it exists only
            with a short list; empty if it always exists.
        shown: Column of the table *What was read*; None if that table omits the value.
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
        """Name of the column in CSV; None if CSV lacks the value."""
        return (self.path or "").replace(".", "_") if self.csv == "" else self.csv

    def of(self, c: Screened, group: Group) -> Any:
        """Return the value for a checkpoint of a group; None if the checkpoint has none."""
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
        yield _C(
            f"{path}.se",
            kind,
            "standard error, by a jackknife over tokens",
            f"{place}.se",
            f"{csv}_se",
        )
        if part != "gap":
            yield _C(
                f"{path}.se_pairs",
                float,
                "standard error over pairs of tokens, too small because pairs share tokens",
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
    _C(
        "label", str, "unique name in the report, which options accept too", shown=Col("Checkpoint")
    ),
    _C("repo", str, "present name of the repository, or path of the folder"),
    _C(
        "requested_revision",
        str | None,
        "the revision that you asked for; null for the default branch",
        "target.revision",
    ),
    _C(
        "revision",
        str | None,
        "the commit that was read; null outside the Hub",
        shown=Column("commit", "Commit", drop=3),
    ),
    _C("family", str, "family, or `tokenizer:<hash>` for checkpoints given by name"),
    _C("scale", str, "size class, such as 7B"),
    _C(
        "rank",
        _Rank | None,
        "rank in the group, shared by checkpoints with equal rows; null for the base, for checkpoints "
        "with the base's rows, and for checkpoints without the figure that ranks the group",
        lambda c, group: c.rank if group.has_place(c) else None,
    ),
    _C("ranked_by", RankBy, "the figure that ranks the group: `gap` (G) or `ratio`"),
    _C("metric", Distance, "the distance in which G is measured, `cosine` or `euclidean`"),
    _C(
        "holds_best",
        _Share | None,
        "[chance](#chances) that the best checkpoint is at this rank or above, as measured on our own "
        "models or by `--slope`; null if unknown",
        lambda c, group: group.holds_best(c),
    ),
    _C(
        "chance_to_next",
        _Share | None,
        "chance that this checkpoint is more accurate than the next in rank; null at the last "
        "rank, or if unknown",
        _to_next,
    ),
    _C("copy_of", str | None, "label of the original if this is a [copy](#copies), else null"),
    _C(
        "equal_rows_with",
        str | None,
        "label of another checkpoint with equal rows, of which this one is not a copy; else null",
    ),
    _C("group", str, "name of the group in reports", lambda _, group: group.title, None),
    _C("ratio.mean", float, "the ratio; null if there is none", csv="ratio"),
    _C("ratio.se", float, "standard error, by a jackknife over tokens"),
    _C(
        "ratio.rounding",
        float,
        "three standard deviations of the ratio's rounding error, as the stored element type implies",
        csv=None,
    ),
    _C(
        "ratio.reason",
        str | None,
        "why there is no ratio; null if there is one",
        lambda c, _: c.no_ratio or None,
        "no_ratio",
    ),
    *(column for metric in METRICS for column in _figures(metric)),
    _C("is_base", bool, "whether it is the base", only="base"),
    _C(
        "against_base",
        Against | None,
        "`difference`: the ratio minus the base's ratio; `se`: the paired standard error; `side`: "
        "`above`, `below`, `level` or `equal`; null for the base, and if the checkpoint or the "
        "base has no ratio",
        lambda c, _: c.against and c.against._asdict(),
        only="base",
        cell=lambda against: against and against["difference"],
    ),
    _C(
        None,
        float,
        "paired standard error of the difference from the base",
        "against.se",
        "against_base_se",
        only="base",
    ),
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
    _C("tensor.file", str, "the file with that tensor", "file", None),
    _C(
        "tensor.dtype",
        str,
        "the tensor's element type as stored",
        "dtype",
        "dtype",
        shown=Col("Type", drop=1),
    ),
    _C("tensor.shape", _Shape, "rows and columns", "shape", None),
    _C(
        "tensor.tied",
        bool,
        "whether the output projection is the tied input embedding",
        "tied",
        "tied",
    ),
    _C("tokens.domain", int, "number of domain tokens (T)", lambda c, _: len(c.resolution.domain)),
    _C(
        "tokens.reference",
        int,
        "number of tokens of everyday words (R)",
        lambda c, _: len(c.resolution.reference),
    ),
    _C(
        "tokens.dropped",
        list[str],
        "words that were left out because they are not single tokens",
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
        "bytes read over the network; 0 if all came from the disk, the cache or a registry",
        shown=Col("Read", "bytes"),
    ),
    _C("requests", int, "number of requests", shown=Col("Requests", "d")),
    _C(
        "seconds",
        _Seconds,
        "time from the first request to the last row",
        lambda c, _: round(c.seconds, 3),
    ),
    _C(
        "notes",
        list[str],
        "remarks on the checkpoint's numbers",
        lambda c, _: list(c.notes),
        cell="; ".join,
    ),
    _C(
        "chosen",
        Literal["rank", "audit", None],
        "why the checkpoint is on the short list: by `rank`, or in the `audit` sample",
        only="list",
    ),
    _C(
        "inclusion_probability",
        _Share,
        "probability with which the checkpoint was chosen",
        only="list",
    ),
)


def read_columns() -> list[Column]:
    """Return the columns of the table *What was read*."""
    columns = []
    for column in COLUMNS:
        if column.shown is not None:
            key = column.shown.key or str(column.name)
            columns.append(replace(column.shown, key=key))
    return columns


def _there(c: Screened, group: Group) -> Iterator[CheckpointColumn]:
    there = {"": True, "base": group.base is not None, "list": c.inclusion_probability is not None}
    return (column for column in COLUMNS if there[column.only])


def entry(c: Screened, group: Group) -> dict[str, Any]:
    """Return the entry of a checkpoint in the JSON output, as nested dictionaries."""
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
    """Return the row of a checkpoint in the CSV output, as a mapping from column to cell."""
    row: dict[str, Any] = {}
    for column in _there(c, group):
        if column.name:
            row[column.name] = column.cell(column.of(c, group))
    return row
