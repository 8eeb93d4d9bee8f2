"""Which layer should key a kNN-LM: the one whose states are the most dispersed.

Every candidate gets the same draws of segments, over several seeds. The mean and standard deviation
of the dispersion of their last tokens' states are reported. Candidates are compared seed by seed,
since a draw moves all of them alike.

With ``knn``, the perplexity of a kNN-LM keyed by each candidate checks the recommendation.

Source: RD section 3.3, table 1, B.3.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lmeval_dispersion.arguments import takes
from lmeval_dispersion.errors import UsageError, count
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.laboratory import charts
from lmeval_dispersion.laboratory.arguments import NEIGHBOURS, PARTS, Sublayers
from lmeval_dispersion.laboratory.knn import against, knn_rows, summary_of
from lmeval_dispersion.laboratory.models import last_vectors
from lmeval_dispersion.laboratory.report import StudyResult, bounded, records, table
from lmeval_dispersion.laboratory.study import Study, TableRow, studied
from lmeval_dispersion.model.texts import DataLike
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.report.declared import listed

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
        "Margin (SD)",
        ".2f",
        hint=(
            "difference divided by its standard deviation over draws; a recommendation needs at "
            "least 2"
        ),
    ),
    "draws_won": Col("Draws won", "d"),
    "draws": Col("Draws", "d"),
}
_KNN = {
    "layer": Col("Key"),
    "perplexity": Col("Perplexity", ".3f"),
    "without": Col("Without neighbours", ".3f", short="Without", drop=1),
    **bounded(
        "change", "Change, %", "+.2f", ("change_low", "change_high"), hint="paired over documents"
    ),
    "weight": Col(
        "Weight", ".2f", drop=2, hint="weight of the neighbours, chosen on the tuning part"
    ),
    "temperature": Col("Temperature", ".4g", drop=3, hint="as a multiple of the keys' variance"),
    "documents": Col(
        "Documents", "d", drop=4, hint="each segment of a running text counts as a document"
    ),
}
_AGAINST = {
    "layer": Col("Key"),
    "other": Col("Against"),
    **bounded("change", "Change of perplexity, %", "+.2f", ("change_low", "change_high")),
}


@dataclass(frozen=True, repr=False)
class SublayersResult(StudyResult):
    """The dispersion of several layers, and which one is recommended as the key of a kNN-LM.

    A kNN-LM is a nearest-neighbour language model, which searches by the states of the key layer.
    docs/reference/laboratory.md lists every column of the tables.

    Attributes:
        summary: One row for each candidate layer and size of draw: the ``mean`` and the standard
            deviation ``sd`` of the dispersion over the draws.
        recommendation: One row: the ``layer`` with the highest mean in the largest draws, the
            ``second`` highest, and ``margin``, their mean difference divided by the standard
            deviation of this difference over draws. ``told_apart`` is true if the margin is at
            least ``MARGIN`` (2); only then is the layer recommended.
        draws: One row for each candidate, size and draw: the dispersion of the drawn segments.
        knn: One row for each layer as the key of a kNN-LM: the perplexity, and the ``change`` that
            the neighbours make, in per cent; None without ``knn``.
        losses: One row for each key and document of the test part: the sums of negative
            log-probabilities in nats, ``without`` neighbours and with them (``nll``); None without
            ``knn``.
        manifest: The settings; the model's identity, the library versions, and how many texts and
            segments were read.
    """

    summary: pd.DataFrame
    recommendation: pd.DataFrame
    draws: pd.DataFrame
    knn: pd.DataFrame | None = None
    losses: pd.DataFrame | None = None

    kind = "sublayers"
    main = "summary"
    template = "sublayers.jinja"

    def tables(self) -> dict[str, Table]:
        """Return the tables of the report by name.

        - ``draws``: mean and standard deviation of each candidate's dispersion over the draws;
        - ``recommendation``: the two most dispersed candidates and their margin;
        - ``knn``: the perplexity of a kNN-LM with each key, if it was measured;
        - ``against``: the perplexity with the most dispersed key compared with that of each other
          key, if it was measured.
        """
        tables = {
            "draws": table(
                self.summary, "Mean dispersion of the draws ± standard deviation", _DRAWS
            ),
            "recommendation": table(self.recommendation, "Margin", _RECOMMENDED),
        }
        if self.knn is not None:
            caption = "Perplexity of a kNN-LM on the test part, for each key"
            tables["knn"] = table(self.knn, caption, _KNN)
            caption = "Perplexity with the most dispersed key, compared with each other key"
            tables["against"] = table(self._judged(), caption, _AGAINST)
        return tables

    def charts(self) -> dict[str, Chart]:
        """Return one chart, ``draws``: the dispersion of every draw."""
        draw = partial(charts.sublayer_draws, self.draws)
        return {
            "draws": Chart(
                draw, "Dispersion of every draw", "Each tick is a draw, each row a candidate."
            )
        }

    def context(self) -> dict[str, Any]:
        """Return the values that the report's template needs.

        In addition to those of `StudyResult` these are ``best``, the row of ``recommendation``, and
        ``judged``, sentences on the kNN-LM (empty without one).
        """
        best = records(self.recommendation)[0]
        judged: list[str] = []
        if self.knn is not None:
            judged = [
                knn_sentence(records(self.knn)),
                judgement(records(self._judged()), recommended=bool(best["told_apart"])),
            ]
        return {**super().context(), "best": best, "judged": judged}

    def _judged(self) -> pd.DataFrame:
        """The key of highest dispersion against every other by perplexity."""
        assert self.losses is not None
        return against(self.losses, self.recommendation["layer"].iloc[0])


def knn_sentence(keys: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence that says whether a kNN-LM lowers perplexity.

    The sentence is about the key with the lowest perplexity.

    Args:
        keys: The rows of the table ``knn`` of a `SublayersResult`.
    """
    best = min(keys, key=lambda row: row["perplexity"])
    interval = f"95 % interval {best['change_low']:+.2f} % to {best['change_high']:+.2f} %"
    over = f"over {count(best['documents'], best['unit'])}"
    moved = (
        f"from {best['without']:.2f} to {best['perplexity']:.2f} {over}, a change of "
        f"{best['change']:+.2f} % ({interval})"
    )
    if best["change_high"] < 0:
        return f"A kNN-LM keyed by {best['layer']} lowers perplexity {moved}."
    return (
        f"No key of a kNN-LM clearly lowers perplexity: with {best['layer']} perplexity changes "
        f"{moved}."
    )


def judgement(rows: Sequence[Mapping[str, Any]], *, recommended: bool) -> str:
    """Return a sentence that says whether the most dispersed key also has the lowest perplexity.

    Args:
        rows: One row for each other key, as `against` returns them.
        recommended: Whether the most dispersed key was recommended. The sentence then says whether
            the recommendation holds.
    """
    key = rows[0]["layer"]
    better = []
    alike = []
    worse = []
    for row in rows:
        if row["change_high"] < 0:
            better.append(row)
        elif row["change_low"] > 0:
            worse.append(row)
        else:
            alike.append(row["other"])
    what = f"{key}, the most dispersed key,"
    if worse:
        row = max(worse, key=lambda row: float(row["change"]))
        verdict = "Perplexity disagrees with dispersion"
        if recommended:
            verdict = "The recommendation does not hold here"
        return f"{verdict}: {what} gives {_moved(row)} than {row['other']}."
    if len(better) == len(rows):
        row = max(rows, key=lambda row: float(row["change"]))
        verdict = "Perplexity agrees with dispersion"
        if recommended:
            verdict = "The recommendation holds here"
        than = row["other"] if len(rows) == 1 else f"the next best key, {row['other']}"
        return f"{verdict}: {what} gives {_moved(row)} than {than}."
    verdict = "The perplexities do not decide"
    if recommended:
        verdict = "It is unclear whether the recommendation holds here"
    than = listed(alike)
    return (
        f"{verdict}: the perplexity of {what} is not clearly higher or lower than that of {than}."
    )


def _moved(row: Mapping[str, Any]) -> str:
    """A clear change of perplexity in words."""
    ends = sorted(abs(row[name]) for name in ("change_low", "change_high"))
    way = "lower" if row["change"] < 0 else "higher"
    interval = f"95 % interval {ends[0]:.2f} % to {ends[1]:.2f} %"
    return f"{abs(row['change']):.2f} % ({interval}) {way} perplexity"


@takes(Sublayers)
def sublayers(asked: Sublayers) -> SublayersResult:
    """Find the layer with the most dispersed states, for keys of a nearest-neighbour LM (kNN-LM).

    Every candidate gets the same draws of segments. With ``knn`` the perplexity of a kNN-LM is
    measured for each candidate and for ``last``, to check the recommendation. The kNN-LM needs
    three texts, for the datastore, for tuning and for the test; each is a share of ``data`` or a
    separate text.

    Raises:
        UsageError: The model lacks one of ``layers`` (the message lists the layers that it has), or
            a setting does not fit the model or the text.
        NonFiniteStateError: The model produces NaN or infinity; the message names the layer and the
            text.
    """
    sizes = asked.sizes
    if not sizes or min(sizes) < 2:
        raise UsageError(
            "expected sizes of at least 2 segments for the draws, got "
            f"{', '.join(map(str, sizes)) or 'none'}; pass sizes of 2 or more (--sizes)"
        )
    settings = {"layers": asked.layers, "sizes": sorted(set(sizes)), "knn": asked.knn}
    parts = {"datastore": asked.datastore, "tune": asked.tune, "test": asked.test}
    of_knn = [name for name in PARTS if parts[name] != PARTS[name]]
    if asked.neighbours != NEIGHBOURS:
        of_knn.append("neighbours")
    if of_knn and not asked.knn:
        names = listed(of_knn)
        raise UsageError(
            f"expected knn together with {names}, but it is off; add knn (--knn), or leave {names} "
            "out",
            argument="knn",
        )
    texts: dict[str, DataLike] = {}
    if asked.knn:
        _check_parts(parts)
        settings |= {"segments": asked.segments, "neighbours": asked.neighbours}
        for name, part in parts.items():
            settings[name] = part if isinstance(part, float) else None
            if not isinstance(part, float):
                texts[name] = part
    manifest, tables = studied(
        "sublayers", _measure, asked.model, asked.data, settings, asked, further=texts
    )
    if asked.knn:
        tables["knn"] = summary_of(tables["losses"], tables["knn"])
    return SublayersResult(manifest, **tables)


def _check_parts(parts: Mapping[str, float | DataLike]) -> None:
    """Raise UsageError for a share outside (0, 1], or for shares that add up to more than 1."""
    shares = {name: part for name, part in parts.items() if isinstance(part, float)}
    for name, share in shares.items():
        if not 0 < share <= 1:
            raise UsageError(
                f"expected a share above 0 and at most 1, or a text, got {share}", argument=name
            )
    total = sum(shares.values())
    if total > 1 + 1e-9:
        each = ", ".join(f"{name} {share:g}" for name, share in shares.items())
        raise UsageError(
            f"expected shares of the text that add up to at most 1, got {total:g} ({each}); lower "
            "one of them",
            argument=next(iter(shares)),
        )


def _measure(study: Study) -> Iterator[TableRow]:
    settings = study.settings
    causal, names = study.loaded(losses=settings["knn"])
    if len(names) < 2:
        raise UsageError(
            f"expected at least two candidate layers, got {', '.join(names)}; name more layers "
            "(--layer)"
        )
    drawn = study.segments("pool", causal, _POOL * settings["sizes"][-1])
    pool = len(drawn.tokens)
    sizes: list[int] = []
    left_out: list[int] = []
    for size in settings["sizes"]:
        (sizes if size <= pool else left_out).append(size)
    if not sizes:
        raise UsageError(
            f"expected at least {settings['sizes'][0]} segments of {settings['segment']} tokens, "
            f"got {pool}; pass more text or use shorter segments"
        )
    study.facts |= {"pool": pool, "left_out_sizes": left_out}
    vectors = study.states("pool", causal, drawn, names, last_vectors)
    draws = pd.DataFrame(_draws(vectors, sizes, settings["seed"]))
    grouped = draws.groupby(["layer", "segments"], sort=False)["dispersion"]
    summary = grouped.agg(mean="mean", sd="std", draws="count").reset_index()
    for row in records(draws):
        yield "draws", row
    for row in records(summary):
        yield "summary", row
    yield "recommendation", recommendation(draws, pool)
    if settings["knn"]:
        yield from knn_rows(study, causal, list(dict.fromkeys([*names, "last"])))


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
    """Return the row of the table ``recommendation``.

    The row names the two candidates with the highest mean dispersion in the largest draws, and the
    margin: their mean difference in standard deviations over the draws. Draws of s out of n
    segments overlap, and so vary less than draws of new text would. To correct for this, the
    standard deviation is divided by sqrt(1 - s / n).

    Args:
        draws: The table ``draws`` of a `SublayersResult`.
        pool: Number of segments that were drawn from.

    Returns:
        The row. Its ``margin`` is NaN if the largest draws take all segments, or if the difference
        is the same in every draw.
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
