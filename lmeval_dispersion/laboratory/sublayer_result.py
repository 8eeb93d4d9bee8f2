"""What a choice of sub-layers found: tables, the recommendation with its margin, plots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from lmeval_dispersion.laboratory.runs import Run


@dataclass(frozen=True)
class SublayersResult:
    """Dispersion of candidate sub-layers.

    Attributes:
        summary: One row a candidate and size of draw: ``mean`` and ``sd`` over draws.
        recommendation: One row: the ``layer`` of highest mean in the largest draws, ``second``, and the
            ``margin``: mean difference over draws divided by its standard deviation (below about 2 the draws
            do not tell them apart); ``agrees`` where the kNN-LM was built: whether the recommended one had
            the lowest perplexity.
        draws: One row a candidate, size and draw.
        knn: One row a candidate of the kNN-LM, or None where it was not asked for: ``base_perplexity`` of the
            model alone, ``perplexity`` interpolated, ``weight`` and ``temperature`` as tuned on other
            segments, ``gain`` in nats a token with bounds over segments.
        knn_differences: One row a pair of candidates, first minus second in nats a token, with bounds.
        manifest: Settings, counts and what was run.
    """

    summary: pd.DataFrame
    recommendation: pd.DataFrame
    draws: pd.DataFrame
    knn: pd.DataFrame | None
    knn_differences: pd.DataFrame | None
    manifest: dict[str, Any]

    kind = "sublayers"

    @classmethod
    def of(cls, run: Run) -> SublayersResult:
        """The result of a complete run."""
        tables = run.tables()
        knn, differences = tables.get("knn"), tables.get("knn_differences")
        chosen = tables["recommendation"]
        if knn is not None:
            best = knn["layer"].to_numpy()[int(knn["perplexity"].to_numpy().argmin())]
            chosen = chosen.assign(lowest_perplexity=best, agrees=chosen["layer"] == best)
        return cls(tables["summary"], chosen, tables["draws"], knn, differences, run.manifest)

    def to_frame(self) -> pd.DataFrame:
        """Mean and sd of every candidate and size, tidy."""
        return self.summary

    def plot(self) -> Any:
        """Every draw's dispersion, one column a size, one colour a candidate."""
        from lmeval_dispersion.laboratory.plots import sublayer_draws

        return sublayer_draws(self.draws)


def recommendation(draws: pd.DataFrame) -> pd.DataFrame:
    """The candidate of highest mean in the largest draws, with its margin over the second."""
    size = int(draws["segments"].max())
    wide = draws[draws["segments"] == size].pivot(index="draw", columns="layer", values="dispersion")
    best, second = wide.mean().sort_values(ascending=False, kind="stable").index[:2]
    difference = (wide[best] - wide[second]).to_numpy()
    spread = float(np.std(difference, ddof=1))
    record = {
        "layer": best,
        "second": second,
        "segments": size,
        "difference": float(difference.mean()),
        "difference_sd": spread,
        # Draws without any spread separate perfectly where they differ at all.
        "margin": float(difference.mean()) / spread if spread > 0 else float("nan"),
        "draws_won": int((difference > 0).sum()),
        "draws": len(difference),
    }
    return pd.DataFrame([record])
