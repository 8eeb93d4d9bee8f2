"""The forms for programs: the entries of ``screen-checkpoints/3`` and the rows of CSV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmeval_dispersion.geometry import METRICS
from lmeval_screener.figures import PARTS
from lmeval_screener.ranking import ALL_PAIRS
from lmeval_screener.screened import Group, Screened

_NAMES = ("label", "repo", "requested_revision", "revision", "family", "scale", "rank")
_COST = ("bytes_read", "requests", "seconds")


def entry(c: Screened, group: Group) -> dict[str, Any]:
    """One checkpoint of the JSON contract, a member of a group."""
    tokens = c.resolution
    row: dict[str, Any] = {name: getattr(c, name) for name in _NAMES} | {
        "tied_with": tied_with(c, group),
        "next": None if c.next is None else c.next._asdict(),
        "gap": {metric: {"mean": gap.mean, "se": gap.se} for metric, gap in c.gaps.items()},
        "ratio": {
            **{name: c.ratio and getattr(c.ratio, name) for name in ("mean", "se", "rounding")},
            "rank": group.ratio_ranks.get(c),
            "reason": c.no_ratio or None,
        },
        **{
            name: {
                metric: {figure: getattr(getattr(gap, name), figure) for figure in ("mean", "se", "se_pairs")}
                for metric, gap in c.gaps.items()
            }
            for name in PARTS
        },
        "tensor": {
            "name": c.tensor,
            **{name: getattr(c, name) for name in ("file", "dtype", "shape", "tied")},
        },
        "tokens": {
            "domain": len(tokens.domain),
            "reference": len(tokens.reference),
            "dropped": [word.strip() for word in (*tokens.dropped, *tokens.dropped_reference)],
            "digit_scheme": tokens.digit_scheme,
        },
        "accuracy": c.accuracy,
        "notes": list(c.notes),
        **{name: getattr(c, name) for name in _COST},
        "seconds": round(c.seconds, 3),
    }
    if c.inclusion_probability is not None:
        row |= {"chosen": c.chosen, "inclusion_probability": c.inclusion_probability}
    return row


def tied_with(c: Screened, group: Group) -> list[Any]:
    """The ranks without a clear order; of a group of more than `ALL_PAIRS` runs of ranks as first and last.

    Each by itself, those of ten thousand would take a gigabyte.
    """
    if len(group.checkpoints) <= ALL_PAIRS:
        return list(c.tied_with)
    return [first if first == last else [first, last] for first, last in c.ties.runs()]


def flat_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """An entry as a row of CSV: one value in each column."""
    ties = ["-".join(map(str, rank)) if isinstance(rank, list) else str(rank) for rank in row["tied_with"]]
    flat = {name: row[name] for name in _NAMES} | {"tied_with": " ".join(ties)}
    for metric in METRICS:
        for part in ("gap", *PARTS):
            figure = row[part][metric]
            flat |= {f"{part}_{metric}": figure["mean"], f"{part}_{metric}_se": figure["se"]}
    ratio, tensor, tokens = row["ratio"], row["tensor"], row["tokens"]
    return {
        **flat,
        "ratio": ratio["mean"],
        "ratio_se": ratio["se"],
        "no_ratio": ratio["reason"],
        "accuracy": row["accuracy"],
        "tensor": tensor["name"],
        "dtype": tensor["dtype"],
        "tied": tensor["tied"],
        "tokens_domain": tokens["domain"],
        "tokens_reference": tokens["reference"],
        "dropped": " ".join(tokens["dropped"]),
        "digit_scheme": tokens["digit_scheme"],
        **{name: row[name] for name in _COST},
        "notes": "; ".join(row["notes"]),
        **{name: row[name] for name in ("chosen", "inclusion_probability") if name in row},
    }
