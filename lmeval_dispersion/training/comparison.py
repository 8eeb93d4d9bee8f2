"""The runs of a comparison side by side."""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import Any

from lmeval_dispersion.training.settings import BASE, Settings


def compared(settings: Settings, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row an arm and domain, over its seeds.

    ``perplexity`` is the mean over seeds of the perplexity after training, ``sd`` their standard deviation
    (None for one seed); ``before`` that of the start. ``versus_base`` is the mean over shared seeds of
    log(perplexity / the base's with the same seed), in per cent, ``versus_base_sd`` its standard deviation
    over seeds. ``tokens_before``, ``tokens`` and ``texts`` are dispersions of the last layer, see
    :func:`~lmeval_dispersion.training.evaluation.evaluated`.
    """
    rows = []
    base = {r["seed"]: r for r in results if r["arm"] == BASE}
    for arm in settings.arms:
        runs = [r for r in results if r["arm"] == arm]
        if not runs:
            continue
        for domain, (source, _) in enumerate(settings.domains):
            after = [_figures(r, -1, domain) for r in runs]
            before = [_figures(r, 0, domain) for r in runs]
            ppl = [f["perplexity"] for f in after]
            shifts = [
                100 * math.log(f["perplexity"] / _figures(base[r["seed"]], -1, domain)["perplexity"])
                for r, f in zip(runs, after, strict=True)
                if arm != BASE and r["seed"] in base
            ]
            texts = [f["texts"][-1] for f in after if f["texts"][-1] is not None]
            rows.append(
                {
                    "arm": arm,
                    "domain": source,
                    "seeds": len(runs),
                    "before": fmean(f["perplexity"] for f in before),
                    "perplexity": fmean(ppl),
                    "sd": stdev(ppl) if len(ppl) > 1 else None,
                    "versus_base": fmean(shifts) if shifts else None,
                    "versus_base_sd": stdev(shifts) if len(shifts) > 1 else None,
                    "tokens_before": fmean(f["tokens"][-1] for f in before),
                    "tokens": fmean(f["tokens"][-1] for f in after),
                    "texts": fmean(texts) if texts else None,
                }
            )
    return rows


def as_table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    head = [
        "arm",
        "domain",
        "seeds",
        "perplexity before",
        "after (sd)",
        "against base, % (sd)",
        "token dispersion before",
        "after",
        "text dispersion",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * 2 + "---:|" * (len(head) - 2)]
    for row in rows:
        cells = [
            row["arm"],
            row["domain"],
            str(row["seeds"]),
            f"{row['before']:.2f}",
            f"{row['perplexity']:.2f}{_sd(row['sd'], '.2f')}",
            ""
            if row["versus_base"] is None
            else f"{row['versus_base']:+.2f}{_sd(row['versus_base_sd'], '.2f')}",
            f"{row['tokens_before']:.3f}",
            f"{row['tokens']:.3f}",
            "" if row["texts"] is None else f"{row['texts']:.3f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _figures(result: dict[str, Any], which: int, domain: int) -> dict[str, Any]:
    found: dict[str, Any] = result["evaluations"][which]["domains"][domain]
    return found


def _sd(value: float | None, form: str) -> str:
    return "" if value is None else f" ({value:{form}})"
