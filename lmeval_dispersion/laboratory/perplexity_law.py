"""The perplexity law: do texts that a model finds easier lie further apart?

Two passes. The first runs every segment once: its perplexity, its token dispersion, and sums for the
dispersion of all texts. Perplexities alone settle the bins, so the second pass runs only the segments of
the chosen bins again, bin by bin, and their states are forgotten with the bin. For n segments and K bins
of s segments it costs K s / n of the first pass (less for short contexts); the alternative, keeping every
segment's state of every layer until the bins are known, takes n x layers x width numbers on disk
(``keep`` does that for the states of last tokens).

The perplexity of a single token runs over many powers of ten, so its logarithm stands for it: in the choice
of bins and in r. Controls (:mod:`lmeval_dispersion.laboratory.controls`) keep the model's bins and
perplexities and change the states alone, so that both are compared on the same segments in the same bins.

Source: RD sections 2.2, A.1.2 (bins, algorithm 1), A.4 (held-out split), A.5 (Vendi score).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lmeval_dispersion.errors import GeometryError, TooFewVectorsError, UsageError
from lmeval_dispersion.geometry import (
    Spectrum,
    dispersion,
    dispersion_estimate,
    effective_rank,
    spectrum,
    vendi_score,
)
from lmeval_dispersion.laboratory.causal_model import (
    CausalModel,
    batch_size,
    batches,
    check_finite,
    last_vectors,
    perplexity,
    token_dispersions,
)
from lmeval_dispersion.laboratory.controls import as_controls, control_model, control_tokens
from lmeval_dispersion.laboratory.inputs import DataLike, as_texts, data_settings, input_names, model_settings
from lmeval_dispersion.laboratory.measures.claims import bounds_together
from lmeval_dispersion.laboratory.measures.integer_sums import GROUPS, add_vectors, dispersion_of, empty_sums
from lmeval_dispersion.laboratory.measures.token_ranks import TokenRanks, token_ranks
from lmeval_dispersion.laboratory.reports.results import StudyResult
from lmeval_dispersion.laboratory.segments import Segments, segments_of
from lmeval_dispersion.laboratory.study import Folder, Study, opened
from lmeval_dispersion.model.loading import ModelLike
from lmeval_dispersion.model.texts import Texts
from lmeval_dispersion.report import nullable
from lmeval_dispersion.statistics import (
    Array,
    Interval,
    bootstrap_correlation,
    correlation,
    correlation_bounds,
    correlation_difference,
    fisher,
    mean_interval,
    resampled_correlations,
)

CONTEXTS = (16, 64, 128, 256)
FEWEST_BINS = 3  # two points have no correlation
SEQUENCE = "sequence"  # perplexity of the whole segment; "last@16" is that of the token after 16

KEEP = ("segments", "vectors")

_BIN_VALUES = ("dispersion", "dispersion_se", "vendi_score", "effective_rank")
_RIVALS = tuple(name for name in Spectrum._fields if name not in _BIN_VALUES)  # with metrics="all"


MEASURES = (
    "dispersion",
    "vendi_score",
    "effective_rank",
    "token_dispersion",
    "token_effective_rank",
    "diff_erank",
    *_RIVALS,
)


@dataclass(frozen=True, repr=False)
class LawResult(StudyResult):
    """The perplexity law of one model on one or two sources.

    Attributes:
        correlations: One row a split, perplexity, layer and measure: ``pearson`` with ``low`` and ``high``
            (95 % over bins), ``spearman``, ``bins``. ``pearson`` is with the ``scale`` that leads:
            ``plain`` perplexity of segments, ``log`` of single tokens; ``pearson_plain`` and
            ``pearson_log`` give both. ``all_low`` and ``all_high`` are bounds of r of dispersion on ``data``
            that hold for all layers and perplexities together. ``line_r2``: how much of the variance
            over this split's bins the line fitted on the bins of ``data`` explains (in-sample on ``data``,
            and negative where it is worse than the mean); ``reason`` where a number is undefined (NaN).
        points: One row a chosen bin and layer: its mean perplexity and every measure; of controls as
            ``dispersion.CONTROL`` and ``token_dispersion.CONTROL``.
        overall: One row a split and layer: dispersion over all texts, token dispersion, perplexity.
        controls: One row a split, perplexity, layer, measure and control: the control's ``pearson`` with
            bounds, the model's minus it as ``difference`` with bounds (both resampled over the same bins),
            and ``apart_low``, ``apart_high``: bounds of that difference on Fisher's scale that hold for all
            of them together (dispersion on ``data``). None where no control ran.
        segments: What was kept of every segment, or None: where it comes from, losses in nats, token
            dispersion, the number of its bin by each perplexity (missing for those that fill none).
        manifest: Settings, counts and what was run.
    """

    correlations: pd.DataFrame
    points: pd.DataFrame
    overall: pd.DataFrame
    controls: pd.DataFrame | None
    segments: pd.DataFrame | None
    manifest: dict[str, Any]

    kind = "law"

    @classmethod
    def of(cls, study: Study) -> LawResult:
        """The result of a complete study."""
        tables = study.tables()
        found = (tables["correlations"], tables["points"], tables["overall"])
        return cls(*found, tables.get("controls"), tables.get("segments"), study.manifest)

    def to_frame(self) -> pd.DataFrame:
        """The correlations, tidy."""
        return nullable(self.correlations)

    def plot(self) -> Any:
        """Mean perplexity against dispersion, one point a bin, one panel a perplexity and layer."""
        from lmeval_dispersion.laboratory.reports.charts import law_scatter

        return law_scatter(self.points)


class _Split(NamedTuple):
    """The segments of one source with what the first pass found."""

    name: str
    source: str
    segments: Segments
    nll: NDArray[np.float64]  # (n, 1 + contexts): mean over the segment, then of the token after each context
    tokens: NDArray[np.float64]  # (n, layers): dispersion over the tokens of each segment
    sums: NDArray[np.int64]


class _Bin(NamedTuple):
    """One chosen bin: a unit of the second pass."""

    split: _Split
    perplexity: str
    column: int
    length: int
    number: int
    members: NDArray[np.int64]


def law(
    model: ModelLike,
    data: DataLike,
    *,
    segment: int = 512,
    segments: int = 100_000,
    layers: str | Sequence[str] = "last",
    bins: int = 50,
    bin_size: int = 100,
    contexts: Sequence[int] = CONTEXTS,
    held_out: DataLike | None = None,
    diff_erank: bool = False,
    metrics: str = "dispersion",
    control: str | Sequence[str] | None = None,
    keep: str | Sequence[str] | None = None,
    pack: bool = False,
    seed: int = 0,
    batch: int | None = None,
    folder: Folder = None,
    quiet: bool = True,
) -> LawResult:
    """Perplexity against dispersion over the texts of ``data``, per layer.

    Args:
        model: Hub id, folder, :class:`~lmeval_dispersion.model.loading.ModelChoice`, or a loaded model.
        data: A file or Hub data set, see :mod:`lmeval_dispersion.model.texts`.
        segment: Tokens a segment.
        segments: Segments to draw; all of them where the data has fewer.
        layers: ``last``, ``all``, or names.
        bins: Bins chosen by algorithm 1 (K).
        bin_size: Segments a bin.
        contexts: Context lengths of the last-token variant; those not below ``segment`` are left out.
        held_out: A second source, binned by itself; the line fitted on ``data`` is tested on it.
        diff_erank: Also run the model at random weights, for Diff-eRank.
        metrics: ``all``: also the other figures of ``lmeval_dispersion.geometry.Spectrum`` of every bin.
        control: ``untrained``, ``shuffled`` or both, run beside the model on the same bins.
        keep: ``segments`` (a table of every segment), ``vectors`` (the states of their last tokens, as
            safetensors of shape (n, width) in the study's ``vectors/``), or both.
        pack: Join the texts of a source to one stream before cutting.
        seed: Of the draw, the bootstrap and the random weights.
        batch: Segments a forward pass; by memory if None.
        folder: Where the study is kept and can be resumed; a temporary place if None.
        quiet: Whether to say nothing on stderr.

    Raises:
        UsageError: What was asked for does not fit the model or the data.
        TooFewVectorsError: A source has segments for fewer than three bins.
        NonFiniteStateError: The model produces NaN; names layer and text.
    """
    texts, other = as_texts(data), None if held_out is None else as_texts(held_out)
    if bins < FEWEST_BINS or bin_size < 3:
        raise UsageError(
            f"expected at least {FEWEST_BINS} bins of at least 3 segments, got {bins} of {bin_size}"
        )
    used = [int(c) for c in contexts if 0 < c < segment]
    kept = _kept(keep, folder)
    if metrics not in ("dispersion", "all"):
        raise UsageError(f"expected the metrics dispersion or all, got {metrics!r}")
    settings = {
        "model": model_settings(model),
        "data": data_settings(texts),
        "held_out": data_settings(other),
        **{"segment": segment, "segments": segments, "layers": layers, "bins": bins, "bin_size": bin_size},
        **{"contexts": used, "diff_erank": diff_erank, "control": as_controls(control), "keep": kept},
        **{"pack": pack, "seed": seed},
        # Left out by default: studies from before it go on.
        **({"metrics": metrics} if metrics == "all" else {}),
    }
    names = input_names([model], texts, other)
    with opened("law", settings, names, folder, quiet) as study:
        if not study.complete:
            _Law(study, CausalModel(model), settings, batch).both_passes({"data": texts, "held-out": other})
        return LawResult.of(study)


def _kept(keep: str | Sequence[str] | None, folder: Folder) -> list[str]:
    names = sorted({keep} if isinstance(keep, str) else set(keep or ()))
    if unknown := [name for name in names if name not in KEEP]:
        raise UsageError(f"expected to keep {' or '.join(KEEP)}, got {unknown[0]!r}")
    if "vectors" in names and folder is None:
        raise UsageError("expected a folder to keep vectors in, got none; pass folder")
    return names


class _Law:
    """The study at work."""

    def __init__(
        self, study: Study, causal: CausalModel, settings: dict[str, Any], batch: int | None
    ) -> None:
        self.study, self.causal, self.settings = study, causal, settings
        self.names = causal.layers(settings["layers"])
        self.index = {name: i for i, name in enumerate(self.names)}
        self.contexts: list[int] = settings["contexts"]
        self.length: int = settings["segment"]
        self.values = (*_BIN_VALUES, *(_RIVALS if settings.get("metrics") == "all" else ()))
        self.batch = batch_size(study, causal, batch, self.length, len(self.names))

    def both_passes(self, sources: dict[str, Texts | None]) -> None:
        """Both passes, and the tables."""
        splits = [self.first_pass(name, texts) for name, texts in sources.items() if texts is not None]
        units = [unit for split in splits for unit in self.bins(split)]
        values = self.study.rows("bins", (len(units), len(self.names), len(self.values)))
        self.study.work("bins", len(units), lambda number: self.one_bin(units[number], values, number))
        ranks: dict[int, TokenRanks] = {}
        if self.settings["diff_erank"]:
            sequence = [number for number, unit in enumerate(units) if unit.perplexity == SEQUENCE]
            bins = [(units[number].split.segments.tokens, units[number].members) for number in sequence]
            found = token_ranks(self.study, self.causal, bins, self.batch, self.settings["seed"])
            ranks = dict(zip(sequence, found, strict=True))
        others = {name: self.control_pass(name, units) for name in self.settings["control"]}
        points = pd.DataFrame.from_records(list(self.points(units, values, ranks, others)))
        seed = self.settings["seed"]
        every = pd.concat([overall(s.name, self.names, s.nll[:, 0], s.tokens, s.sums, seed) for s in splits])
        tables = {
            "points": points,
            "correlations": correlations(points, seed),
            "overall": every,
            "jackknife": pd.concat([left_out(s.name, self.names, s.nll[:, 0], s.sums) for s in splits]),
        }
        if others:
            tables["controls"] = control_correlations(points, list(others), seed)
        if "segments" in self.settings["keep"]:
            tables["segments"] = pd.concat([self.segment_rows(split) for split in splits])
        if "vectors" in self.settings["keep"]:
            self.write_vectors(splits)
        self.study.finish(
            tables,
            model=self.causal.summary(),
            counts={split.name: split.segments.counts.as_dict() for split in splits},
        )

    def check_bins(self, drawn: Segments, texts: Texts) -> None:
        """Refuse a source with too few bins before the model runs."""
        n, size = len(drawn.tokens), self.settings["bin_size"]
        if n // size < FEWEST_BINS:
            more = "a larger --segments" if drawn.counts.segments > n else "more text"
            raise TooFewVectorsError(
                f"expected at least {FEWEST_BINS} bins of {size} segments, got {n} segments of {self.length} "
                f"tokens from {texts.source}; pass {more}, or a smaller --bin-size or --segment"
            )

    def first_pass(self, name: str, texts: Texts) -> _Split:
        """Every segment once: perplexities, token dispersions, sums over all texts."""
        settings = self.settings
        drawn = segments_of(
            self.study,
            name,
            texts,
            self.causal,
            length=self.length,
            count=settings["segments"],
            seed=settings["seed"],
            pack=settings["pack"],
        )
        n = len(drawn.tokens)
        self.check_bins(drawn, texts)
        nll = self.study.rows(f"{name}.nll", (n, 1 + len(self.contexts)))
        tokens = self.study.rows(f"{name}.tokens", (n, len(self.names)))
        sums = {"sums": empty_sums(len(self.names), self.causal.width)}
        kept = {}
        if "vectors" in settings["keep"]:
            shape = (n, self.causal.width)
            kept = {layer: self.study.rows(f"{name}.{layer}", shape, np.float32) for layer in self.names}
        after = [context - 1 for context in self.contexts]  # NLL column of the token after so many
        dtype = str(self.causal.loaded.model.dtype).removeprefix("torch.")

        def see(layer: str, first: int, states: Tensor) -> Callable[[], None]:
            rows, place = slice(first, first + len(states)), self.index[layer]
            vectors = last_vectors(states)
            check_finite(vectors, layer, drawn.origins[rows], texts.source, dtype)
            tokens[rows, place] = token_dispersions(states)
            check_finite(tokens[rows, place], layer, drawn.origins[rows], texts.source, dtype)
            if kept:
                kept[layer][rows] = vectors
            return partial(add_vectors, sums["sums"], place, first, vectors)

        def score(first: int, losses: Tensor) -> None:
            rows = slice(first, first + len(losses))
            found = losses.numpy()
            check_finite(found, "the output", drawn.origins[rows], texts.source, dtype)
            nll[rows, 0] = found.mean(axis=1)
            nll[rows, 1:] = found[:, after]

        def one_batch(number: int) -> None:
            start = number * self.batch
            self.causal.forward(drawn.tokens[start : start + self.batch], self.names, see, score, start)

        total = self.study.work(f"{name}.pass", batches(n, self.batch), one_batch, sums)
        return _Split(name, texts.source, drawn, np.asarray(nll), np.asarray(tokens), total["sums"])

    def bins(self, split: _Split) -> Iterator[_Bin]:
        """The chosen bins of one split, by each of its perplexities."""
        kinds = [(SEQUENCE, self.length), *((f"last@{context}", context) for context in self.contexts)]
        for column, (kind, length) in enumerate(kinds):
            values = perplexity(split.nll[:, column]) if kind == SEQUENCE else split.nll[:, column]
            every = sorted_bins(values, self.settings["bin_size"])
            for number in uniform_bins(values[every].mean(axis=1), self.settings["bins"]):
                yield _Bin(split, kind, column, length, int(number), every[number])

    def one_bin(self, unit: _Bin, values: NDArray[np.float64], number: int) -> None:
        """A bin's states, layer by layer, and what they say; then they are forgotten."""
        for layer, vectors in self.states(unit, self.causal).items():
            estimate = dispersion_estimate(vectors)
            found = (estimate.mean, estimate.se, vendi_score(vectors), effective_rank(vectors))
            rivals = spectrum(vectors)._asdict() if len(self.values) > len(found) else {}
            more = (rivals[name] for name in self.values[len(found) :])
            values[number, self.index[layer]] = (*found, *more)

    def control_pass(self, control: str, units: list[_Bin]) -> NDArray[np.float64]:
        """The bins again as a control sees them: dispersions of texts and tokens, (bins, layers, 2)."""
        seed = self.settings["seed"]
        causal = control_model(control, self.causal, seed)
        found = self.study.rows(f"control.{control}", (len(units), len(self.names), 2))

        def one_bin(number: int) -> None:
            spread: dict[str, list[float]] = {name: [] for name in self.names}
            for layer, vectors in self.states(units[number], causal, control, spread).items():
                found[number, self.index[layer]] = dispersion(vectors), np.mean(spread[layer])

        self.study.work(f"control-{control}", len(units), one_bin)
        return np.asarray(found)

    def states(
        self, unit: _Bin, causal: CausalModel, control: str = "", spread: dict[str, list[float]] | None = None
    ) -> dict[str, NDArray[np.float32]]:
        """Last-token states of a bin's members at every layer; token dispersions go to ``spread``."""
        members = np.sort(unit.members)
        held: dict[str, list[NDArray[np.float32]]] = {name: [] for name in self.names}

        def see(layer: str, _first: int, states: Tensor) -> Callable[[], None]:
            vectors = last_vectors(states)
            spreads = None if spread is None else token_dispersions(states)

            def add() -> None:
                held[layer].append(vectors)
                if spread is not None and spreads is not None:
                    spread[layer].extend(spreads.tolist())

            return add

        for start in range(0, len(members), self.batch):
            some = members[start : start + self.batch]
            tokens = np.asarray(unit.split.segments.tokens[some])[:, : unit.length]
            tokens = control_tokens(control, tokens, some, self.causal, self.settings["seed"])
            causal.forward(tokens, self.names, see)
        found = {layer: np.concatenate(parts) for layer, parts in held.items()}
        for layer, vectors in found.items():
            check_finite(vectors, layer, unit.split.segments.origins[members], unit.split.source)
        return found

    def segment_rows(self, split: _Split) -> pd.DataFrame:
        """What is kept of every segment."""
        n = len(split.nll)
        columns: dict[str, Any] = {
            "split": split.name,
            "segment": np.arange(n),
            "text": split.segments.origins[:, 0],
            "start": split.segments.origins[:, 1],
        }
        kinds = [SEQUENCE, *(f"last@{context}" for context in self.contexts)]
        for column, kind in enumerate(kinds):
            columns[f"nll.{kind}"] = split.nll[:, column]
            number = np.full(n, -1)
            for place, members in enumerate(sorted_bins(split.nll[:, column], self.settings["bin_size"])):
                number[members] = place
            columns[f"bin.{kind}"] = pd.Series(number, dtype="Int64").mask(number < 0)
        for place, layer in enumerate(self.names):
            columns[f"token_dispersion.{layer}"] = split.tokens[:, place]
        return pd.DataFrame(columns)

    def write_vectors(self, splits: list[_Split]) -> None:
        """The kept states, one file a split and layer, so that memory holds one at a time."""
        from safetensors.numpy import save_file

        folder = self.study.folder / "vectors"
        if self.study.processes.first:
            folder.mkdir(exist_ok=True)
            for split in splits:
                for layer in self.names:
                    rows = self.study.rows_read(f"{split.name}.{layer}")
                    path = folder / f"{split.name}.{layer}.safetensors"
                    save_file({"vectors": np.asarray(rows)}, path.with_suffix(".part"))
                    path.with_suffix(".part").replace(path)

    def points(
        self,
        units: list[_Bin],
        values: NDArray[np.float64],
        ranks: dict[int, TokenRanks],
        others: dict[str, NDArray[np.float64]],
    ) -> Iterator[dict[str, Any]]:
        """One record a bin and layer."""
        for number, unit in enumerate(units):
            losses = unit.split.nll[unit.members, unit.column]
            for place, layer in enumerate(self.names):
                record: dict[str, Any] = {
                    "split": unit.split.name,
                    "perplexity": unit.perplexity,
                    "layer": layer,
                    "bin": unit.number,
                    "segments": len(unit.members),
                    "mean_perplexity": float(perplexity(losses).mean()),
                    "mean_nll": float(losses.mean()),
                    **dict(zip(self.values, map(float, values[number, place]), strict=True)),
                }
                if unit.perplexity == SEQUENCE:
                    record["token_dispersion"] = float(unit.split.tokens[unit.members, place].mean())
                for control, found in others.items():
                    record[f"dispersion.{control}"] = float(found[number, place, 0])
                    if unit.perplexity == SEQUENCE:
                        record[f"token_dispersion.{control}"] = float(found[number, place, 1])
                if layer == "last" and number in ranks:
                    record.update(ranks[number]._asdict())
                yield record


def sorted_bins(values: ArrayLike, size: int) -> NDArray[np.int64]:
    """Indices of ``values`` (n,), ascending, cut into bins of ``size``; shape (n // size, size).

    The n mod size highest values fill no bin and are left out. Equal values keep their order.

    >>> sorted_bins([3.0, 1.0, 2.0, 9.0, 5.0], 2).tolist()
    [[1, 2], [0, 4]]
    """
    numbers = np.asarray(values, dtype=np.float64)
    count = len(numbers) // size
    order = np.argsort(numbers, kind="stable")
    return np.asarray(order[: count * size].reshape(count, size), dtype=np.int64)


def uniform_bins(means: ArrayLike, k: int) -> NDArray[np.int64]:
    """Which ``k`` of the bins with ascending ``means`` (g,) cover their range evenly; ascending indices.

    Algorithm 1 of the paper: k targets evenly spaced from the lowest mean to the highest, the bin nearest
    to each (the lower one of two equally near), then the first bins of the sorted list not yet taken until
    there are k. All of them where k >= g.

    Source: RD A.1.2, algorithm 1.

    >>> uniform_bins([1.0, 1.1, 1.2, 5.0, 9.0], 3).tolist()
    [0, 3, 4]
    """
    values = np.asarray(means, dtype=np.float64)
    if k < 1:
        raise GeometryError(f"expected at least 1 bin, got {k}")
    if k >= len(values):
        return np.arange(len(values))
    targets = np.linspace(values[0], values[-1], k)
    chosen = set(np.abs(values[None, :] - targets[:, None]).argmin(axis=1).tolist())
    for extra in range(len(values)):
        if len(chosen) == k:
            break
        chosen.add(extra)
    return np.array(sorted(chosen), dtype=np.int64)


def overall(
    split: str,
    layers: list[str],
    nll: NDArray[np.float64],
    tokens: NDArray[np.float64],
    sums: NDArray[np.int64],
    seed: int,
) -> pd.DataFrame:
    """One row a layer: dispersion over all texts with its jackknife error, token dispersion, perplexity."""
    records = []
    for place, layer in enumerate(layers):
        estimate = dispersion_of(sums[place]).estimate()
        token = mean_interval(tokens[:, place], seed)
        records.append(
            {
                "split": split,
                "layer": layer,
                "texts": estimate.n,
                "dispersion": estimate.mean,
                "dispersion_se": estimate.se,
                "token_dispersion": token.value,
                "token_dispersion_low": token.low,
                "token_dispersion_high": token.high,
                "perplexity": float(perplexity(nll.mean())),
            }
        )
    return pd.DataFrame.from_records(records)


def left_out(
    split: str, layers: list[str], nll: NDArray[np.float64], sums: NDArray[np.int64]
) -> pd.DataFrame:
    """Dispersion and mean NLL without each jackknife group of texts; what comparisons pair on."""
    groups = np.arange(len(nll)) % GROUPS
    frames = []
    for place, layer in enumerate(layers):
        total = sums[place].sum(axis=0)
        for group in np.unique(groups):
            rest = np.zeros_like(sums[place])
            rest[0] = total - sums[place][group]
            key = {"split": split, "layer": layer, "group": int(group)}
            values = {"dispersion": dispersion_of(rest).mean(), "nll": float(nll[groups != group].mean())}
            frames.append({**key, **values})
    return pd.DataFrame.from_records(frames)


def correlations(points: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Correlation of the bins' mean perplexity with every measure, per split, perplexity and layer."""
    records: list[dict[str, Any]] = []
    samples: dict[int, Array] = {}  # Fisher's z of resamples, by the row that claims are made from
    for (kind, layer), both in points.groupby(["perplexity", "layer"], sort=False):
        fitted: dict[str, tuple[float, float]] = {}
        for split, bins in both.groupby("split", sort=False):
            for measure in (m for m in MEASURES if m in bins and bins[m].notna().any()):
                x, y = leading(bins), bins[measure].to_numpy()
                found = _one(bins, y, seed)
                if split == "data" and not found["reason"]:
                    slope, intercept = np.polyfit(x, y, 1)
                    fitted[measure] = (float(slope), float(intercept))
                    if measure == "dispersion":
                        samples[len(records)] = fisher(resampled_correlations(x, y, seed=seed))
                if measure in fitted and np.ptp(y) > 0:
                    slope, intercept = fitted[measure]
                    left = np.square(y - (slope * x + intercept)).sum()
                    found["line_r2"] = float(1 - left / np.square(y - y.mean()).sum())
                about = {"split": split, "perplexity": kind, "layer": layer, "measure": measure}
                scale = "plain" if kind == SEQUENCE else "log"
                records.append({**about, "bins": len(x), "scale": scale, **found})
    frame = pd.DataFrame.from_records(records).assign(all_low=np.nan, all_high=np.nan)
    if samples:
        rows = list(samples)
        bounds = bounds_together(
            fisher(frame["pearson"].to_numpy()[rows]), np.stack(list(samples.values()), 1)
        )
        frame.loc[rows, "all_low"], frame.loc[rows, "all_high"] = (np.tanh(bound) for bound in bounds)
    return frame


def control_correlations(points: pd.DataFrame, names: Sequence[str], seed: int) -> pd.DataFrame:
    """Correlation of every control, and the model's minus it over the same resamples of bins."""
    records: list[dict[str, Any]] = []
    samples: dict[int, tuple[float, Array]] = {}
    for (kind, layer, split), bins in points.groupby(["perplexity", "layer", "split"], sort=False):
        x = leading(bins)
        for measure in ("dispersion", "token_dispersion"):
            for control in names:
                column = f"{measure}.{control}"
                if column not in bins or bins[column].isna().any():
                    continue
                about = {"split": split, "perplexity": kind, "layer": layer, "measure": measure}
                pair = bins[measure].to_numpy(), bins[column].to_numpy()
                try:
                    mine, other = (correlation(x, y) for y in pair)
                except GeometryError as error:
                    records.append({**about, "control": control, "pearson": np.nan, "reason": str(error)})
                    continue
                drawn = [resampled_correlations(x, y, seed=seed) for y in pair]
                if split == "data" and measure == "dispersion":
                    z = fisher(mine) - fisher(other)
                    samples[len(records)] = (float(z), fisher(drawn[0]) - fisher(drawn[1]))
                both = [
                    Interval(r, *correlation_bounds(r, each, len(x)))
                    for r, each in zip((mine, other), drawn, strict=True)
                ]
                less, more = correlation_difference(both[1], both[0], (drawn[1], drawn[0]), paired=True)
                found = {"control": control, "pearson": other, "low": both[1].low, "high": both[1].high}
                apart = {"difference": mine - other, "difference_low": less, "difference_high": more}
                records.append({**about, **found, **apart, "reason": ""})
    frame = pd.DataFrame.from_records(records).assign(apart_low=np.nan, apart_high=np.nan)
    if samples:
        rows = list(samples)
        values = [value for value, _ in samples.values()]
        bounds = bounds_together(values, np.stack([drawn for _, drawn in samples.values()], axis=1))
        frame.loc[rows, "apart_low"], frame.loc[rows, "apart_high"] = bounds
    return frame


def leading(bins: pd.DataFrame) -> Array:
    """What r is taken with: mean perplexity of segments, mean log perplexity of single tokens."""
    plain = bins["perplexity"].iloc[0] == SEQUENCE
    return np.asarray(bins["mean_perplexity" if plain else "mean_nll"].to_numpy(), dtype=np.float64)


def _one(bins: pd.DataFrame, y: Array, seed: int) -> dict[str, Any]:
    nan = float("nan")
    names = ("pearson", "low", "high", "spearman", "pearson_plain", "pearson_log", "line_r2")
    x = leading(bins)
    try:
        interval = bootstrap_correlation(x, y, seed=seed)
        others = (
            correlation(x, y, "spearman"),
            *(correlation(bins[column].to_numpy(), y) for column in ("mean_perplexity", "mean_nll")),
        )
    except GeometryError as error:
        return {**dict.fromkeys(names, nan), "reason": str(error)}
    return {**dict(zip(names, (*interval, *others, nan), strict=True)), "reason": ""}
