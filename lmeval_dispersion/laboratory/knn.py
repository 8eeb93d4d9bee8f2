"""A real kNN-LM from each candidate key, to check a recommendation instead of believing it.

Keys are a candidate's states, values the tokens that come next. A query's nearest ``NEIGHBOURS`` keys (exact,
squared Euclidean distance) vote for their values with weight softmax(-distance / T); the model's
probability and theirs are mixed with a weight. Temperature and weight are tuned per candidate on
segments of their own, and the perplexity is that of other segments. No segment is in two parts.

States and probabilities are kept on disk while the study works; the index holds knn_tokens x width float32.

Source: Khandelwal et al. (2020), with the candidates of RD section 3.3.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lmeval_dispersion.errors import MissingExtraError, UsageError
from lmeval_dispersion.laboratory.analysis import Analysis
from lmeval_dispersion.laboratory.causal_model import CausalModel
from lmeval_dispersion.laboratory.claims import student_bounds
from lmeval_dispersion.laboratory.study import Unit, Units
from lmeval_dispersion.statistics import mean_interval

NEIGHBOURS = 1024
EVALUATED = 50  # at most so many segments to tune on, and as many to test on
WEIGHTS = np.linspace(0.0, 0.95, 20)
TEMPERATURES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # multiples of the median distance to the nearest key

Array = NDArray[np.float64]


def require_faiss() -> Any:
    """The faiss module.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError("--knn needs faiss; pip install 'lmeval-dispersion[knn]'") from error
    return faiss


def knn_tables(analysis: Analysis, causal: CausalModel, names: list[str]) -> dict[str, pd.DataFrame]:
    """The tables ``knn`` and ``knn_differences`` of :class:`SublayersResult`.

    Raises:
        UsageError: There are too few segments for three parts.
    """
    settings = analysis.settings
    store = max(2, settings["knn_tokens"] // settings["segment"])
    drawn = analysis.segments("knn", causal, count=store + 2 * _evaluated(store))
    n = len(drawn.tokens)
    if n < 10:
        raise UsageError(
            f"expected at least 10 segments for a kNN-LM, got {n}; pass more text or shorter segments"
        )
    states = analysis.over(
        "knn", causal, drawn, names, lambda found, _: found[:, :-1].float().cpu().numpy(), losses=True
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
    found, pairs = [], []
    for name, (weight, temperature, keys, *mixed) in zip(names, rows, strict=True):
        gain = mean_interval(base - np.array(mixed), seed)
        found.append(
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
    return {"knn": pd.DataFrame(found), "knn_differences": pd.DataFrame(pairs)}


def agreement(recommended: str, differences: pd.DataFrame) -> str:
    """What the measured kNN-LMs say about a recommended key.

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
    """What the nearest keys say about every query's next token.

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
