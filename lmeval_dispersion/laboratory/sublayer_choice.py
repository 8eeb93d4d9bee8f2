"""Which sub-layer of a block should key a kNN-LM datastore: the one whose states lie further apart.

Draws of N segments, the same ones for every candidate, over several seeds: mean and standard deviation of the
dispersion of their last-token states. The candidates' difference is taken seed by seed, since a draw moves
both. ``knn=True`` checks the recommendation: it builds the datastore from each candidate and measures.

Source: RD section 3.3, table 1, B.3.

The kNN-LM (Khandelwal et al. 2020): keys are a candidate's states, values the next tokens. A query's
nearest ``NEIGHBOURS`` keys (exact, squared Euclidean distance) vote for their values with weight
softmax(-distance / T); the model's probability and theirs are mixed with a weight. Temperature and weight are
tuned per candidate on segments of their own, and the perplexity is that of other segments. States are kept on
disk while the study works; the index holds knn_tokens x width float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lmeval_dispersion.errors import MissingExtraError, UsageError
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.laboratory import charts
from lmeval_dispersion.laboratory.analysis import Analysis, DataLike, StudyResult, analyse, records, table
from lmeval_dispersion.laboratory.causal_model import CausalModel, last_vectors
from lmeval_dispersion.laboratory.claims import student_bounds
from lmeval_dispersion.laboratory.study import Folder, Unit, Units
from lmeval_dispersion.model.loading import ModelLike
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.statistics import mean_interval

SIZES = (10, 50, 100)
REPEATS = 10

MARGIN = 2.0  # of the lead, in standard deviations of one draw's

_POOL = 10  # segments to draw from, as a multiple of the largest draw


@dataclass(frozen=True, repr=False)
class SublayersResult(StudyResult):
    """Dispersion of candidate sub-layers.

    Attributes:
        summary: One row a candidate and size of draw: ``mean`` and ``sd`` over draws.
        recommendation: One row: the ``layer`` of highest mean in the largest draws, ``second``, and the
            ``margin``: mean difference over draws divided by the standard deviation of one draw's difference.
            Below ``MARGIN`` the draws do not tell them apart (``told_apart``). Where the kNN-LM was built,
            ``lowest_perplexity`` and ``knn``: whether it ``agrees``, ``contradicts``, or leaves the two
            ``not told apart``.
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

    kind = "sublayers"
    main = "summary"
    template = "sublayers.jinja"

    def tables(self) -> dict[str, Table]:
        """``draws``: mean and spread a candidate and size; ``recommendation``; with a kNN-LM its measures."""
        tables = {
            "draws": table(_Draws, self.summary, "Dispersion of draws, mean ± standard deviation"),
            "recommendation": table(_Recommended, self.recommendation, "Margin"),
        }
        if self.knn is not None and self.knn_differences is not None:
            caption = "On segments that neither built nor tuned it"
            tables["knn"] = table(_Measured, self.knn, caption)
            caption = "Difference of the keys in nats a token, first minus second"
            tables["differences"] = table(_Pair, self.knn_differences, caption)
        return tables

    def charts(self) -> dict[str, Chart]:
        """``draws``: every draw."""
        draw = partial(charts.sublayer_draws, self.draws)
        return {"draws": Chart(draw, "Dispersion of every draw", "A tick a draw, a row a candidate.")}

    def context(self) -> dict[str, Any]:
        """For the template: the recommended candidate, and what it costs against the others as a key."""
        best = records(self.recommendation)[0]
        against = [
            {"layer": pair["second"], **{key: pair[key] for key in ("difference", "low", "high")}}
            if pair["first"] == best["layer"]
            else {
                "layer": pair["first"],
                "difference": -pair["difference"],
                "low": -pair["high"],
                "high": -pair["low"],
            }
            for pair in ([] if self.knn_differences is None else records(self.knn_differences))
            if best["layer"] in (pair["first"], pair["second"])
        ]
        return {**super().context(), "best": best, "against": against}


@dataclass(frozen=True)
class _Draws:
    """Draws of one size of a candidate."""

    layer: Annotated[str, Col("Layer")]
    segments: Annotated[int, Col("Segments", "d")]
    mean: Annotated[float, Col("Dispersion", ".4f", error="sd", dots="both")]
    sd: float
    draws: Annotated[int, Col("Draws", "d", drop=1)]


@dataclass(frozen=True)
class _Recommended:
    """The two candidates of highest mean."""

    layer: Annotated[str, Col("Layer")]
    second: Annotated[str, Col("Second")]
    segments: Annotated[int, Col("Segments", "d")]
    difference: Annotated[float, Col("Difference", "+.4f")]
    margin: Annotated[
        float, Col("Margin (SD)", ".2f", hint="difference over the SD of one draw of new text; 2 recommends")
    ]
    draws_won: Annotated[int, Col("Draws won", "d")]
    draws: Annotated[int, Col("Draws", "d")]
    lowest_perplexity: Annotated[str, Col("Lowest kNN-LM perplexity")] = ""


@dataclass(frozen=True)
class _Measured:
    """A kNN-LM from one candidate's states."""

    layer: Annotated[str, Col("Layer")]
    base_perplexity: Annotated[float, Col("Model alone", ".3f")]
    perplexity: Annotated[float, Col("Perplexity", ".3f")]
    gain: Annotated[
        float, Col("Gain (nats a token)", ".4f", dots="both", reach="gain_low gain_high", short="Gain")
    ]
    gain_low: Annotated[float, Col("from", ".4f", drop=1)]
    gain_high: Annotated[float, Col("to", ".4f", drop=1)]
    keys: Annotated[int, Col("Keys", "d", drop=3)]
    weight: Annotated[float, Col("Weight of kNN", ".2f", drop=4)]
    temperature: Annotated[
        float, Col("Temperature", ".2g", drop=4, hint="multiple of the median distance to the nearest key")
    ]


@dataclass(frozen=True)
class _Pair:
    """Two candidates as keys."""

    first: Annotated[str, Col("First")]
    second: Annotated[str, Col("Second")]
    difference: Annotated[float, Col("Difference", "+.4f", dots="both", reach="low high")]
    low: Annotated[float, Col("95 % from", "+.4f", short="from")]
    high: Annotated[float, Col("to", "+.4f")]


def sublayers(
    model: ModelLike,
    data: DataLike,
    *,
    layers: str | Sequence[str] = "layer.-1.attn,layer.-1.ffn",
    segment: int = 512,
    sizes: Sequence[int] = SIZES,
    repeats: int = REPEATS,
    knn: bool = False,
    knn_tokens: int = 100_000,
    pack: bool = False,
    seed: int = 0,
    batch: int | None = None,
    folder: Folder = None,
    quiet: bool = True,
) -> SublayersResult:
    """Dispersion of the candidates' states, the recommended one, and the proof where it is asked for.

    Args:
        model: Hub id, folder, :class:`~lmeval_dispersion.model.loading.ModelChoice`, or a loaded model.
        data: A file or Hub data set, see :mod:`lmeval_dispersion.model.texts`.
        layers: The candidates; by default both sub-layers of the last block.
        segment: Tokens a segment.
        sizes: Segments a draw; those that the data cannot fill are left out, with a note.
        repeats: Draws a size, each with a seed of its own.
        knn: Build a kNN-LM from each candidate and report its interpolated perplexity (needs faiss).
        knn_tokens: Tokens of the datastore; a tenth as many more tune it, and as many test it.
        pack: Join the texts to one stream.
        seed: Of the draws.
        batch: Segments a forward pass; by memory if None.
        folder: Where the study is kept and can be resumed; a temporary place if None.
        quiet: Whether to say nothing on stderr.

    Raises:
        UsageError: What was asked for does not fit the model (the message lists its sub-layers) or the data.
        MissingExtraError: ``knn`` without faiss.
        NonFiniteStateError: The model produces NaN; names layer and text.
    """
    if knn:
        require_faiss()
    if not sizes or min(sizes) < 2 or repeats < 2:
        raise UsageError(
            f"expected draws of at least 2 segments and 2 repeats, got {list(sizes)} and {repeats}"
        )
    settings = {
        **{"layers": layers, "segment": segment, "sizes": sorted(set(sizes)), "repeats": repeats},
        **{"knn": knn, "knn_tokens": knn_tokens if knn else None, "pack": pack, "seed": seed},
    }
    return analyse(SublayersResult, _measure, [model], data, settings, batch, folder, quiet)


def _measure(analysis: Analysis) -> None:
    ((label, model),) = analysis.models.items()
    causal, settings = CausalModel(model), analysis.settings
    names = causal.layers(settings["layers"])
    if len(names) < 2:
        raise UsageError(
            f"expected at least two candidates to choose from, got {', '.join(names)}; pass --layer for each"
        )
    drawn = analysis.segments("pool", causal, count=_POOL * settings["sizes"][-1])
    pool = len(drawn.tokens)
    sizes = [size for size in settings["sizes"] if size <= pool]
    if not sizes:
        raise UsageError(
            f"expected at least {settings['sizes'][0]} segments of {settings['segment']} tokens, got {pool}; "
            "pass more text or shorter segments"
        )
    units = analysis.over("pool", causal, drawn, names, lambda states, _: last_vectors(states))
    draws = _draws({name: units.joined(name) for name in names}, sizes, settings)
    tables = {"draws": draws, "summary": _summary(draws), "recommendation": recommendation(draws, pool)}
    if settings["knn"]:
        tables |= knn_tables(analysis, causal, names)
        chosen = tables["recommendation"]
        tables["recommendation"] = chosen.assign(
            lowest_perplexity=tables["knn"].sort_values("perplexity", kind="stable")["layer"].iloc[0],
            knn=agreement(chosen["layer"].item(), tables["knn_differences"]),
        )
    left_out = [size for size in settings["sizes"] if size not in sizes]
    described = [{"model": label, **causal.summary()}]
    analysis.study.finish(tables, models=described, pool=pool, left_out_sizes=left_out)


def _draws(
    vectors: Mapping[str, NDArray[np.float32]], sizes: list[int], settings: Mapping[str, Any]
) -> pd.DataFrame:
    pool = len(next(iter(vectors.values())))
    records = []
    for size in sizes:
        for repeat in range(settings["repeats"]):
            # The same segments for every candidate, so that a difference is no difference of texts.
            rng = np.random.default_rng([settings["seed"], size, repeat])
            chosen = rng.choice(pool, size, replace=False)
            for name, rows in vectors.items():
                value = dispersion(rows[chosen])
                records.append({"layer": name, "segments": size, "draw": repeat, "dispersion": value})
    return pd.DataFrame.from_records(records)


def _summary(draws: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation over draws, as in the paper's table 1."""
    grouped = draws.groupby(["layer", "segments"], sort=False)["dispersion"]
    return grouped.agg(mean="mean", sd="std", draws="count").reset_index()


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
    record = {
        "layer": best,
        "second": second,
        "segments": size,
        "difference": float(difference.mean()),
        "difference_sd": spread,
        "margin": margin,
        "told_apart": margin >= MARGIN,
        "draws_won": int((difference > 0).sum()),
        "draws": len(difference),
    }
    return pd.DataFrame([record])


NEIGHBOURS = 1024
EVALUATED = 50  # at most so many segments to tune on, and as many to test on
WEIGHTS = np.linspace(0.0, 0.95, 20)
TEMPERATURES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # multiples of the median distance to the nearest key

Array = NDArray[np.float64]


def require_faiss() -> Any:
    """The faiss module."""
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError("--knn needs faiss; pip install 'lmeval-dispersion[knn]'") from error
    return faiss


def knn_tables(analysis: Analysis, causal: CausalModel, names: list[str]) -> dict[str, pd.DataFrame]:
    """The tables ``knn`` and ``knn_differences`` of :class:`SublayersResult`."""
    settings = analysis.settings
    store = max(2, settings["knn_tokens"] // settings["segment"])
    drawn = analysis.segments("knn", causal, count=store + 2 * _evaluated(store))
    n = len(drawn.tokens)
    if n < 10:
        raise UsageError(
            f"expected at least 10 segments for a kNN-LM, got {n}; pass more text or shorter segments"
        )
    states = analysis.over(
        "knn", causal, drawn, names, lambda x, _: x[:, :-1].float().cpu().numpy(), losses=True
    )
    targets = np.asarray(drawn.tokens[:, 1:], dtype=np.int64)
    losses, part = states.joined("nll"), _evaluated(n)
    tune, test = slice(0, part), slice(part, 2 * part)

    def one_candidate(which: int) -> Unit:
        evaluated, index = _evaluated_and_index(states, names[which], 2 * part)
        values = targets[2 * part :].ravel()
        tuned = _Votes(index, evaluated[tune], values, targets[tune])
        weight, temperature = tuned.best(np.exp(-losses[tune]))
        votes = _Votes(index, evaluated[test], values, targets[test], tuned.scale)
        mixed = votes.losses(np.exp(-losses[test]), weight, temperature)
        return {"row": np.array([weight, temperature, len(values), *mixed.mean(axis=1)])}

    # One candidate a unit: an index of its own each, one at a time in a process.
    rows = analysis.study.units("knn-search", len(names), one_candidate).stacked("row")
    return _tables(names, rows, losses[test].mean(axis=1), settings["seed"])


def _evaluated(segments: int) -> int:
    """Segments to tune on, and as many to test on."""
    return max(2, min(segments // 10, EVALUATED))


def _tables(names: list[str], rows: Array, base: Array, seed: int) -> dict[str, pd.DataFrame]:
    measured, pairs = [], []
    for name, (weight, temperature, keys, *mixed) in zip(names, rows, strict=True):
        gain = mean_interval(base - np.array(mixed), seed)
        measured.append(
            {
                "layer": name,
                "keys": int(keys),
                "segments": len(base),
                "base_perplexity": float(np.exp(base.mean())),
                "perplexity": float(np.exp(np.mean(mixed))),
                "gain": gain.value,
                "gain_low": gain.low,
                "gain_high": gain.high,
                "weight": weight,
                "temperature": temperature,
            }
        )
    for first, second in itertools.combinations(range(len(names)), 2):
        difference = rows[first, 3:] - rows[second, 3:]
        bounds = student_bounds(difference, len(names) * (len(names) - 1) // 2)
        pair = {"first": names[first], "second": names[second], "difference": float(difference.mean())}
        pairs.append({**pair, **bounds._asdict()})
    return {"knn": pd.DataFrame(measured), "knn_differences": pd.DataFrame(pairs)}


def agreement(recommended: str, differences: pd.DataFrame) -> str:
    """The verdict of the measured kNN-LMs on a recommended key.

    ``agrees``: better than every other; ``contradicts``: worse than one of them; ``not told apart`` where
    the bounds of the differences, which hold for all pairs together, leave it open.
    """
    against: list[tuple[float, float]] = [
        (row["low"], row["high"]) if row["first"] == recommended else (-row["high"], -row["low"])
        for row in differences.to_dict("records")
        if recommended in (row["first"], row["second"])
    ]
    if any(low > 0 for low, _ in against):
        return "contradicts"
    return "agrees" if all(high < 0 for _, high in against) else "not told apart"


def _evaluated_and_index(states: Units, name: str, first: int) -> tuple[NDArray[np.float32], Any]:
    """A candidate's states of the first segments, and an exact index of those of all others."""
    evaluated: list[NDArray[np.float32]] = []
    index = None
    for segment in itertools.chain.from_iterable(states.each(name)):
        if len(evaluated) < first:
            evaluated.append(segment)
            continue
        index = index or require_faiss().IndexFlatL2(segment.shape[-1])
        index.add(np.ascontiguousarray(segment, dtype=np.float32))
    return np.stack(evaluated), index


class _Votes:
    """Votes of the nearest keys for every query's next token.

    Distances are squared, in units of ``scale``: by default the median distance to the nearest key.
    """

    def __init__(
        self,
        index: Any,
        queries: NDArray[np.float32],
        values: NDArray[np.int64],
        targets: NDArray[np.int64],
        scale: float | None = None,
    ) -> None:
        neighbours = min(NEIGHBOURS, len(values))
        distances, right = [], []
        for segment, target in zip(queries, targets, strict=True):
            far, who = index.search(np.ascontiguousarray(segment, dtype=np.float32), neighbours)
            distances.append(far.astype(np.float64))
            right.append(values[who] == target[:, None])
        self.distances, self.right = np.stack(distances), np.stack(right)
        # Exact repeats of the text lie at distance 0; they must not set the unit to 0.
        self.scale = scale or float(np.median(self.distances[..., 0])) or float(self.distances.mean()) or 1.0

    def probability(self, temperature: float) -> Array:
        """Probability that the neighbours give to each target, shape (segments, t - 1)."""
        weights = -(self.distances - self.distances.min(axis=-1, keepdims=True)) / (self.scale * temperature)
        weights = np.exp(weights)
        return np.asarray((weights * self.right).sum(axis=-1) / weights.sum(axis=-1))

    def losses(self, model: Array, weight: float, temperature: float) -> Array:
        """NLL in nats of the mixture; ``model`` are the model's own probabilities."""
        return _mixed(model, self.probability(temperature), weight)

    def best(self, model: Array) -> tuple[float, float]:
        """Weight and temperature of the lowest mean NLL."""
        tried = []
        for temperature in TEMPERATURES:
            votes = self.probability(temperature)
            tried += [(float(_mixed(model, votes, w).mean()), float(w), temperature) for w in WEIGHTS]
        _, weight, temperature = min(tried)
        return weight, temperature


def _mixed(model: Array, votes: Array, weight: float) -> Array:
    return np.asarray(-np.log(np.maximum((1 - weight) * model + weight * votes, np.finfo(float).tiny)))
