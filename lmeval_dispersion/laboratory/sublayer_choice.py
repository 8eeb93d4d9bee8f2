"""Which sub-layer of a block should key a kNN-LM datastore: the one whose states lie further apart.

Draws of N segments, the same ones for every candidate, over several seeds: mean and standard deviation of the
dispersion of their last-token states. The candidates' difference is taken seed by seed, since a draw moves
both. ``knn`` checks the recommendation: it builds the datastore from each candidate and measures.

Source: RD section 3.3, table 1, B.3.

The kNN-LM (Khandelwal et al. 2020): keys are a candidate's states, values the next tokens. A query's
nearest ``NEIGHBOURS`` keys (exact, squared Euclidean distance) vote for their values with weight
softmax(-distance / T); the model's probability and theirs are mixed with a weight. Temperature and weight are
tuned per candidate on segments of their own, and the perplexity is that of other segments.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from lmeval_dispersion.errors import UsageError, require_extra
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.laboratory import frames
from lmeval_dispersion.laboratory.analysis import Analysis, DataLike, StudyOptions, StudyResult, analyse
from lmeval_dispersion.laboratory.causal_model import CausalModel, last_vectors
from lmeval_dispersion.laboratory.frames import bounded, records, table, with_ends
from lmeval_dispersion.laboratory.study import Unit
from lmeval_dispersion.model.loading import ModelLike
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.statistics import LEVEL, Array, mean_interval, student_interval

if TYPE_CHECKING:
    from typing_extensions import Unpack

SIZES = (10, 50, 100)
REPEATS = 10
MARGIN = 2.0  # of the lead, in standard deviations of one draw's
KNN_TOKENS = 100_000
NEIGHBOURS = 1024
EVALUATED = 50  # at most so many segments to tune on, and as many to test on
WEIGHTS = np.linspace(0.0, 0.95, 20)
TEMPERATURES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # multiples of the median distance to the nearest key

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
    "margin": Col("Margin (SD)", ".2f", hint="difference over the SD of one draw of new text; 2 recommends"),
    "draws_won": Col("Draws won", "d"),
    "draws": Col("Draws", "d"),
    "lowest_perplexity": Col("Lowest kNN-LM perplexity"),
}
_MEASURED = {
    "layer": Col("Layer"),
    "base_perplexity": Col("Model alone", ".3f"),
    "perplexity": Col("Perplexity", ".3f"),
    **bounded("gain", "Gain (nats a token)", ".4f", ("gain_low", "gain_high"), short="Gain"),
    "keys": Col("Keys", "d", drop=3),
    "weight": Col("Weight of kNN", ".2f", drop=4),
    "temperature": Col(
        "Temperature", ".2g", drop=4, hint="multiple of the median distance to the nearest key"
    ),
}
_PAIRS = {"first": Col("First"), "second": Col("Second"), **bounded("difference", "Difference", "+.4f")}


@dataclass(frozen=True, repr=False)
class SublayersResult(StudyResult):
    """Dispersion of candidate sub-layers; docs/reference/laboratory.md has the columns.

    Attributes:
        summary: One row a candidate and size of draw: ``mean`` and ``sd`` over draws.
        recommendation: One row: the ``layer`` of highest mean in the largest draws, ``second``, and the
            ``margin``; below ``MARGIN`` they are not ``told_apart``.
        draws: One row a candidate, size and draw.
        knn: One row a candidate of the kNN-LM; None where it was not asked for, as is the next.
        knn_differences: One row a pair of candidates, first minus second in nats a token, with bounds.
        manifest: Settings, counts and what was run.
    """

    summary: pd.DataFrame
    recommendation: pd.DataFrame
    draws: pd.DataFrame
    knn: pd.DataFrame | None
    knn_differences: pd.DataFrame | None

    kind = "sublayers"
    main = "summary"
    template = "sublayers.jinja"

    def tables(self) -> dict[str, Table]:
        """``draws``: mean and spread a candidate and size; ``recommendation``; with a kNN-LM its measures."""
        tables = {
            "draws": table(self.summary, "Dispersion of draws, mean ± standard deviation", _DRAWS),
            "recommendation": table(self.recommendation, "Margin", _RECOMMENDED),
        }
        if self.knn is not None and self.knn_differences is not None:
            tables["knn"] = table(self.knn, "On segments that neither built nor tuned it", _MEASURED)
            caption = "Difference of the keys in nats a token, first minus second"
            tables["differences"] = table(self.knn_differences, caption, _PAIRS)
        return tables

    def charts(self) -> dict[str, Chart]:
        """``draws``: every draw."""
        draw = partial(frames.sublayer_draws, self.draws)
        return {"draws": Chart(draw, "Dispersion of every draw", "A tick a draw, a row a candidate.")}

    def context(self) -> dict[str, Any]:
        """For the template: the recommended candidate, and what it costs against the others as a key."""
        best = records(self.recommendation)[0]
        against = [] if self.knn_differences is None else _against(best["layer"], self.knn_differences)
        return {**super().context(), "best": best, "against": against}


def _against(layer: str, differences: pd.DataFrame) -> list[dict[str, Any]]:
    """The cost of a key against each other ``layer``: ``difference``, ``low``, ``high``."""
    rows = []
    for pair in records(differences):
        ends = pair["difference"], pair["low"], pair["high"]
        if pair["second"] == layer:
            ends = -pair["difference"], -pair["high"], -pair["low"]
        if layer in (pair["first"], pair["second"]):
            other = pair["second"] if pair["first"] == layer else pair["first"]
            rows.append({"layer": other, **dict(zip(("difference", "low", "high"), ends, strict=True))})
    return rows


def sublayers(
    model: ModelLike,
    data: DataLike,
    *,
    layers: str | Sequence[str] = "layer.-1.attn,layer.-1.ffn",
    segment: int = 512,
    sizes: Sequence[int] = SIZES,
    knn: bool | int = False,
    **run: Unpack[StudyOptions],
) -> SublayersResult:
    """Dispersion of the candidates' states, the recommended one, and the proof where it is asked for.

    ``layers`` are the candidates, by default both sub-layers of the last block. Draws have ``sizes`` segments
    of ``segment`` tokens of a file or Hub data set; those that it cannot fill are left out. ``knn`` builds a
    kNN-LM from each candidate, of so many tokens (100,000 for True; a tenth as many more tune it, and as many
    test it). More: :class:`~lmeval_dispersion.laboratory.analysis.StudyOptions`.

    Raises:
        UsageError: What was asked for does not fit the model (the message lists its sub-layers) or the data.
        MissingExtraError: ``knn`` without faiss.
        NonFiniteStateError: The model produces NaN; names layer and text.
    """
    if not sizes or min(sizes) < 2:
        raise UsageError(f"expected draws of at least 2 segments, got {list(sizes)}")
    if knn:
        require_extra("knn", "--knn")
    tokens = KNN_TOKENS if knn is True else int(knn)
    settings = {"layers": layers, "segment": segment, "sizes": sorted(set(sizes)), "knn": tokens}
    return analyse(SublayersResult, _measure, model, data, settings, run)


def _measure(analysis: Analysis) -> None:
    settings = analysis.settings
    ((_, causal, names),) = analysis.models(losses=bool(settings["knn"]))
    if len(names) < 2:
        raise UsageError(
            f"expected at least two candidates to choose from, got {', '.join(names)}; pass --layer for each"
        )
    drawn = analysis.segments("pool", causal, _POOL * settings["sizes"][-1])
    pool = len(drawn.tokens)
    sizes = [size for size in settings["sizes"] if size <= pool]
    if not sizes:
        raise UsageError(
            f"expected at least {settings['sizes'][0]} segments of {settings['segment']} tokens, got {pool}; "
            "pass more text or shorter segments"
        )
    units = analysis.over("pool", causal, drawn, names, last_vectors)
    draws = _draws({name: units.joined(name) for name in names}, sizes, settings["seed"])
    grouped = draws.groupby(["layer", "segments"], sort=False)["dispersion"]
    tables = {
        "draws": draws,
        "summary": grouped.agg(mean="mean", sd="std", draws="count").reset_index(),
        "recommendation": recommendation(draws, pool),
    }
    if settings["knn"]:
        tables |= _knn_tables(analysis, causal, names)
        chosen = tables["recommendation"]
        tables["recommendation"] = chosen.assign(
            lowest_perplexity=tables["knn"].sort_values("perplexity", kind="stable")["layer"].iloc[0],
            knn=agreement(chosen["layer"].item(), tables["knn_differences"]),
        )
    left_out = [size for size in settings["sizes"] if size not in sizes]
    analysis.finish(tables, pool=pool, left_out_sizes=left_out)


def _draws(vectors: Mapping[str, NDArray[np.float32]], sizes: list[int], seed: int) -> pd.DataFrame:
    pool = len(next(iter(vectors.values())))
    rows = []
    for size, repeat in itertools.product(sizes, range(REPEATS)):
        # The same segments for every candidate, so that a difference is no difference of texts.
        chosen = np.random.default_rng([seed, size, repeat]).choice(pool, size, replace=False)
        rows += [(name, size, repeat, dispersion(states[chosen])) for name, states in vectors.items()]
    return pd.DataFrame(rows, columns=["layer", "segments", "draw", "dispersion"])


def recommendation(draws: pd.DataFrame, pool: int) -> pd.DataFrame:
    """The candidate of highest mean in the largest draws, with its margin over the second.

    Draws of s of a pool's n segments share some, so they vary less than draws of new text would; their
    standard deviation is divided by sqrt(1 - s / n) for that. A draw of the whole pool has no margin.
    """
    size = int(draws["segments"].max())
    wide = draws[draws["segments"] == size].pivot(index="draw", columns="layer", values="dispersion")
    best, second = wide.mean().sort_values(ascending=False, kind="stable").index[:2]
    difference = (wide[best] - wide[second]).to_numpy()
    new = 1 - size / pool
    spread = float(np.std(difference, ddof=1)) / np.sqrt(new) if new > 0 else float("nan")
    margin = float(difference.mean()) / spread if spread > 0 else float("nan")
    row = {"layer": best, "second": second, "segments": size, "difference": float(difference.mean())}
    row |= {"difference_sd": spread, "margin": margin, "told_apart": margin >= MARGIN}
    row |= {"draws_won": int((difference > 0).sum()), "draws": len(difference)}
    return pd.DataFrame([row])


def _knn_tables(analysis: Analysis, causal: CausalModel, names: list[str]) -> dict[str, pd.DataFrame]:
    """The tables ``knn`` and ``knn_differences`` of :class:`SublayersResult`."""
    store = max(2, analysis.settings["knn"] // analysis.settings["segment"])
    wanted = store + 2 * _evaluated(store)
    drawn = analysis.segments("knn", causal, wanted)
    n = len(drawn.tokens)
    if n < 10:
        more = "a larger --knn" if n == wanted else "more text"
        raise UsageError(
            f"expected at least 10 segments for a kNN-LM, got {n}; pass {more} or shorter segments"
        )
    units = analysis.over("knn", causal, drawn, names, _before_the_last, losses=True)
    losses, targets, part = units.joined("nll"), drawn.tokens[:, 1:], _evaluated(n)
    tune, test, build = slice(0, part), slice(part, 2 * part), slice(2 * part, n)

    def searched(candidate: int) -> Unit:
        import faiss

        states = units.joined(names[candidate])
        keys = faiss.IndexFlatL2(states.shape[-1])
        keys.add(states[build].reshape(-1, states.shape[-1]))
        votes = Votes(keys, targets[build].ravel(), states[: 2 * part], targets[: 2 * part], part)
        weight, temperature = votes.best(np.exp(-losses[tune]), tune)
        mixed = _mixed(np.exp(-losses[test]), votes.probability(temperature, test), weight)
        return {"nll": mixed.mean(axis=1), "tuned": np.array([weight, temperature])}

    # One candidate a unit, one at a time in a process.
    search = analysis.study.units("knn-search", len(names), searched)
    mixed, base, measured = search.stacked("nll"), losses[test].mean(axis=1), []
    for name, nll, (weight, temperature) in zip(names, mixed, search.each("tuned"), strict=True):
        row = {"layer": name, "keys": targets[build].size, "segments": part}
        row |= {"base_perplexity": float(np.exp(base.mean())), "perplexity": float(np.exp(nll.mean()))}
        row |= with_ends("gain", mean_interval(base - nll, analysis.settings["seed"]))
        measured.append({**row, "weight": weight, "temperature": temperature})
    return {"knn": pd.DataFrame(measured), "knn_differences": _differences(names, mixed)}


def _before_the_last(states: Tensor) -> NDArray[np.float32]:
    return np.asarray(states[:, :-1].float().cpu().numpy())


def _evaluated(segments: int) -> int:
    """Segments to tune on, and as many to test on."""
    return max(2, min(segments // 10, EVALUATED))


def _differences(names: list[str], nll: Array) -> pd.DataFrame:
    """NLL (candidates, segments) of every pair of keys, the first minus the second."""
    pairs = list(itertools.combinations(zip(names, nll, strict=True), 2))
    rows = []
    for (first, of_first), (second, of_second) in pairs:
        difference = of_first - of_second
        # Bonferroni: the bounds hold for all pairs together.
        bounds = student_interval(difference, 1 - (1 - LEVEL) / len(pairs))
        rows.append((first, second, float(difference.mean()), *bounds))
    return pd.DataFrame(rows, columns=["first", "second", "difference", "low", "high"])


def agreement(recommended: str, differences: pd.DataFrame) -> str:
    """The verdict of the measured kNN-LMs on a recommended key.

    ``agrees``: better than every other; ``contradicts``: worse than one of them; ``undecided`` where
    the bounds of the differences, which hold for all pairs together, leave it open.
    """
    against = _against(recommended, differences)
    if any(other["low"] > 0 for other in against):
        return "contradicts"
    return "agrees" if all(other["high"] < 0 for other in against) else "undecided"


class Votes:
    """Votes of the nearest of an index of keys with their values (n,) for queries' (s, t, d) next tokens.

    Distances are squared, in units of the median one to the nearest key of the first ``scaled`` segments.
    """

    def __init__(
        self, keys: Any, values: NDArray[Any], queries: NDArray[Any], targets: NDArray[Any], scaled: int
    ) -> None:
        nearest = [keys.search(segment, min(NEIGHBOURS, len(values))) for segment in queries]
        distances = np.stack([far for far, _ in nearest]).astype(np.float64)
        self.right = np.stack([values[who] for _, who in nearest]) == targets[..., None]
        # Exact repeats of the text lie at distance 0; they must not set the unit to 0.
        first = distances[:scaled]
        self.distances = distances / (float(np.median(first[..., 0])) or float(first.mean()) or 1.0)

    def probability(self, temperature: float, rows: slice) -> Array:
        """Probability that the neighbours give to each target, shape (segments, t)."""
        distances = self.distances[rows]
        weights = np.exp(-(distances - distances.min(axis=-1, keepdims=True)) / temperature)
        return np.asarray((weights * self.right[rows]).sum(axis=-1) / weights.sum(axis=-1))

    def best(self, model: Array, rows: slice) -> tuple[float, float]:
        """Weight and temperature of the lowest mean NLL; ``model`` are the model's own probabilities."""
        tried = []
        for temperature in TEMPERATURES:
            votes = self.probability(temperature, rows)
            tried += [(float(_mixed(model, votes, w).mean()), float(w), temperature) for w in WEIGHTS]
        _, weight, temperature = min(tried)
        return weight, temperature


def _mixed(model: Array, votes: Array, weight: float) -> Array:
    """NLL in nats of the mixture of two probabilities."""
    return np.asarray(-np.log(np.maximum((1 - weight) * model + weight * votes, np.finfo(float).tiny)))
