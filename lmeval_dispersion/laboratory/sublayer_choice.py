"""Which sub-layer of a block should key a kNN-LM datastore: the one whose states lie further apart.

Every candidate gets the same draws of N segments, over several seeds: mean and standard deviation of the
dispersion of their last-token states. The candidates' difference is taken seed by seed, since a draw moves
both.

Source: RD section 3.3, table 1, B.3.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.laboratory import charts
from lmeval_dispersion.laboratory.causal_model import last_vectors
from lmeval_dispersion.laboratory.report import StudyResult, records, table
from lmeval_dispersion.laboratory.study import DataLike, Study, StudyOptions, TableRow, studied
from lmeval_dispersion.model.loading import ModelLike
from lmeval_dispersion.report import Chart, Col, Table

if TYPE_CHECKING:
    from typing_extensions import Unpack

SIZES = (10, 50, 100)
REPEATS = 10
MARGIN = 2.0  # least lead, in its standard deviations over draws

_POOL = 10  # segments to draw from, as a multiple of the largest draw

_DRAWS = {
    "layer": Col("Layer"),
    "segments": Col("Segments", "d"),
    "mean": Col("Dispersion", ".4f", error="sd", dots="both"),
    "draws": Col("Draws", "d", drop=1),
}
_RECOMMENDED = {
    "layer": Col("Layer"),
    "second": Col("Second"),
    "segments": Col("Segments", "d"),
    "difference": Col("Difference", "+.4f"),
    "margin": Col(
        "Margin (SD)", ".2f", hint="difference over the SD of one draw of new text; 2 recommends"
    ),
    "draws_won": Col("Draws won", "d"),
    "draws": Col("Draws", "d"),
}


@dataclass(frozen=True, repr=False)
class SublayersResult(StudyResult):
    """Dispersion of candidate sub-layers; docs/reference/laboratory.md has the columns.

    Attributes:
        summary: One row per candidate and size of draw: ``mean`` and ``sd`` over draws.
        recommendation: One row: the ``layer`` of highest mean in the largest draws, ``second``, and the
            ``margin``; ``told_apart`` is false below ``MARGIN``.
        draws: One row per candidate, size and draw.
        manifest: Settings, counts and the run's models.
    """

    summary: pd.DataFrame
    recommendation: pd.DataFrame
    draws: pd.DataFrame

    kind = "sublayers"
    main = "summary"
    template = "sublayers.jinja"

    def tables(self) -> dict[str, Table]:
        """``draws``: mean and spread per candidate and size; ``recommendation``."""
        return {
            "draws": table(self.summary, "Dispersion of draws, mean ± standard deviation", _DRAWS),
            "recommendation": table(self.recommendation, "Margin", _RECOMMENDED),
        }

    def charts(self) -> dict[str, Chart]:
        """``draws``: every draw's dispersion."""
        draw = partial(charts.sublayer_draws, self.draws)
        return {
            "draws": Chart(draw, "Dispersion of every draw", "A tick a draw, a row a candidate.")
        }

    def context(self) -> dict[str, Any]:
        """Template values: also ``best``, the row of ``recommendation`` as a dict."""
        return {**super().context(), "best": records(self.recommendation)[0]}


def sublayers(
    model: ModelLike,
    data: DataLike,
    *,
    layers: str | Sequence[str] = "layer.-1.attn,layer.-1.ffn",
    segment: int = 512,
    sizes: Sequence[int] = SIZES,
    **run: Unpack[StudyOptions],
) -> SublayersResult:
    """Dispersion of the candidates' states, and the recommended one.

    ``layers`` are the candidates, by default both sub-layers of the last block. Draws have ``sizes`` segments
    of ``segment`` tokens of a file or Hub data set; those that it cannot fill are left out. More:
    :class:`~lmeval_dispersion.laboratory.study.StudyOptions`.

    Raises:
        UsageError: A setting does not fit the model (the message lists its sub-layers) or the data.
        NonFiniteStateError: The model produces NaN; names layer and text.
    """
    if not sizes or min(sizes) < 2:
        raise UsageError(
            f"expected draws of at least 2 segments, got {', '.join(map(str, sizes)) or 'none'}"
        )
    settings = {"layers": layers, "segment": segment, "sizes": sorted(set(sizes))}
    manifest, tables = studied("sublayers", _measure, model, data, settings, run)
    return SublayersResult(manifest, **tables)


def _measure(study: Study) -> Iterator[TableRow]:
    settings = study.settings
    causal, names = study.loaded(losses=False)
    if len(names) < 2:
        raise UsageError(
            f"expected at least two candidates to choose from, got {', '.join(names)}; name them as layers"
        )
    drawn = study.segments("pool", causal, _POOL * settings["sizes"][-1])
    pool = len(drawn.tokens)
    sizes = [size for size in settings["sizes"] if size <= pool]
    if not sizes:
        raise UsageError(
            f"expected at least {settings['sizes'][0]} segments of {settings['segment']} tokens, got {pool}; "
            "pass more text or shorter segments"
        )
    left_out = [size for size in settings["sizes"] if size not in sizes]
    study.facts |= {"pool": pool, "left_out_sizes": left_out}
    vectors = study.states("pool", causal, drawn, names, last_vectors)
    draws = pd.DataFrame(_draws(vectors, sizes, settings["seed"]))
    grouped = draws.groupby(["layer", "segments"], sort=False)["dispersion"]
    summary = grouped.agg(mean="mean", sd="std", draws="count").reset_index()
    yield from (("draws", row) for row in records(draws))
    yield from (("summary", row) for row in records(summary))
    yield "recommendation", recommendation(draws, pool)


def _draws(
    vectors: Mapping[str, NDArray[np.float32]], sizes: list[int], seed: int
) -> Iterator[dict[str, Any]]:
    """One row per candidate, size and draw."""
    pool = len(next(iter(vectors.values())))
    for size, repeat in itertools.product(sizes, range(REPEATS)):
        # The same segments for every candidate, so that texts cause no difference.
        chosen = np.random.default_rng([seed, size, repeat]).choice(pool, size, replace=False)
        for name, states in vectors.items():
            apart = dispersion(states[chosen])
            yield {"layer": name, "segments": size, "draw": repeat, "dispersion": apart}


def recommendation(draws: pd.DataFrame, pool: int) -> dict[str, Any]:
    """The candidate of highest mean in the largest draws, with its margin over the second.

    Draws of s of a pool's n segments share some, so they vary less than draws of new text would; their
    standard deviation is divided by sqrt(1 - s / n) for that. A draw of the whole pool has no margin.
    """
    size = int(draws["segments"].max())
    wide = draws[draws["segments"] == size].pivot(
        index="draw", columns="layer", values="dispersion"
    )
    best, second = wide.mean().sort_values(ascending=False, kind="stable").index[:2]
    difference = (wide[best] - wide[second]).to_numpy()
    new = 1 - size / pool
    spread = float(np.std(difference, ddof=1)) / np.sqrt(new) if new > 0 else float("nan")
    margin = float(difference.mean()) / spread if spread > 0 else float("nan")
    row = {
        "layer": best,
        "second": second,
        "segments": size,
        "difference": float(difference.mean()),
    }
    row |= {"difference_sd": spread, "margin": margin, "told_apart": margin >= MARGIN}
    row |= {"draws_won": int((difference > 0).sum()), "draws": len(difference)}
    return row
