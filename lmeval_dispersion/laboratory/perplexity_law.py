"""The perplexity law: do texts that a model finds easier lie further apart?

Two passes. The first runs every segment once: its perplexity, its token dispersion, and sums for the
dispersion of all texts. Perplexities alone settle the bins, so the second pass runs only the segments of
the chosen bins again, bin by bin, and their states are forgotten with the bin. For n segments and K bins
of s segments it costs K s / n of the first pass (less for short contexts); the alternative, keeping every
segment's state of every layer until the bins are known, takes n x layers x width numbers on disk.

The perplexity of a single token runs over many powers of ten, so its logarithm stands for it: in the choice
of bins and in r. Controls (:mod:`lmeval_dispersion.laboratory.causal_model`) keep the model's bins and
perplexities and change the states alone, so that both are compared on the same segments in the same bins.

Source: RD sections 2.2, A.1.2 (bins, algorithm 1), A.4 (held-out split), A.5 (Vendi score).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from lmeval_dispersion.errors import GeometryError, TooFewVectorsError, UsageError
from lmeval_dispersion.geometry import (
    Dispersion,
    Spectrum,
    dispersion,
    dispersion_estimate,
    spectrum,
    vendi_score,
)
from lmeval_dispersion.laboratory import charts
from lmeval_dispersion.laboratory.analysis import Analysis, DataLike, StudyResult, analyse, table
from lmeval_dispersion.laboratory.causal_model import (
    CausalModel,
    as_controls,
    control_model,
    control_tokens,
    last_vectors,
    perplexity,
    token_dispersions,
)
from lmeval_dispersion.laboratory.claims import bounds_together, places
from lmeval_dispersion.laboratory.segments import Segments
from lmeval_dispersion.laboratory.study import Folder, Unit
from lmeval_dispersion.model.loading import ModelLike
from lmeval_dispersion.report import Chart, Col, Table
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

_GROUPS = 32  # of the jackknife over texts
_UNITS = 64  # of the first pass, at most
_BIN_VALUES = ("dispersion", "dispersion_se", "vendi_score", *Spectrum._fields)
_SHOWN = 12  # layers of a default answer
_PANELS = 6  # layers that have a panel each; more are rows of a heat map
MEASURES = ("dispersion", "token_dispersion", "vendi_score", *Spectrum._fields)


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
        manifest: Settings, counts and what was run.
    """

    correlations: pd.DataFrame
    points: pd.DataFrame
    overall: pd.DataFrame
    controls: pd.DataFrame | None

    kind = "law"
    main = "correlations"
    template = "law.jinja"

    def tables(self) -> dict[str, Table]:
        """``layers``: r of whole segments; ``correlations``, ``controls`` and ``overall`` in full."""
        first = self._of_dispersion(self.correlations).query(f"perplexity == '{SEQUENCE}'")
        hidden = [
            "split",
            "perplexity",
            "measure",
            "scale",
            "bins",
            "spearman",
            "pearson_plain",
            "pearson_log",
        ]
        hidden += ["line_r2"]
        if self.controls is not None:
            others = self._of_dispersion(self.controls)
            wide = others.pivot(index=["perplexity", "layer"], columns="control", values="pearson")
            first = first.merge(wide.reset_index(), on=["perplexity", "layer"])
        caption = "r of the perplexity of whole segments and dispersion"
        tables = {
            "layers": table(_Row, first, caption, most=_SHOWN, hide=hidden),
            "correlations": table(_Row, self.correlations, "r of perplexity with each measure"),
            "overall": table(_Overall, self.overall, "All texts"),
        }
        if self.controls is not None:
            caption = "The same for controls, and the model's r minus theirs"
            tables["controls"] = table(_Row, self.controls, caption)
        return tables

    def charts(self) -> dict[str, Chart]:
        """``layers``: r by layer; ``bins``: perplexity and dispersion of every bin."""
        drawn: dict[str, Chart] = {}
        layers = self.correlations["layer"].nunique()
        if layers > 1:
            drawn["layers"] = Chart(
                partial(charts.law_layers, self.correlations, self.controls),
                "r of perplexity and dispersion by layer, with 95 % intervals over bins",
                "One panel a perplexity; a dot a layer.",
                "Bars are for one layer alone; the answer's hold for all together.",
            )
        if layers > _PANELS:
            drawn["bins"] = Chart(
                partial(charts.law_heat, self.points),
                "Dispersion of every chosen bin by layer, in standard deviations of the layer's bins",
                "A heat map: bins from easy to hard, a row a layer.",
                "Where the law holds, a row goes from high on the left to low on the right.",
            )
        else:
            caption = "Mean perplexity and dispersion of every chosen bin"
            drawn["bins"] = Chart(partial(charts.law_bins, self.points), caption, "One dot a bin.")
        return drawn

    def context(self) -> dict[str, Any]:
        """For the template: of each perplexity where r is clear of 0 and of its controls."""
        rows, controls = self._of_dispersion(self.correlations), None
        if self.controls is not None:
            controls = self._of_dispersion(self.controls)
        kinds = [_verdict(kind, rows, controls) for kind in dict.fromkeys(rows["perplexity"])]
        return {**super().context(), "kinds": kinds}

    @staticmethod
    def _of_dispersion(frame: pd.DataFrame) -> pd.DataFrame:
        return frame.query("measure == 'dispersion' and split == 'data'")


@dataclass(frozen=True)
class _Row:
    """A correlation, of the model or of a control."""

    split: Annotated[str, Col("Text")] = ""
    perplexity: Annotated[
        str, Col("Perplexity of", hint="sequence: whole segments; last@c: the token after c")
    ] = ""
    layer: Annotated[str, Col("Layer")] = ""
    measure: Annotated[str, Col("Measure")] = ""
    control: Annotated[
        str, Col("Control", hint="random weights, or the tokens of each text in random order")
    ] = ""
    pearson: Annotated[
        float | None,
        Col(
            "r",
            "+.2f",
            dots="both",
            reach="low high",
            hint="over bins; -1: easier bins are more dispersed, 0: no line",
        ),
    ] = None
    low: Annotated[float | None, Col("95 % from", "+.2f", short="from", drop=1)] = None
    high: Annotated[float | None, Col("to", "+.2f", drop=1)] = None
    untrained: Annotated[float | None, Col("Untrained", "+.2f")] = None
    shuffled: Annotated[float | None, Col("Shuffled", "+.2f")] = None
    difference: Annotated[float | None, Col("Model minus control", "+.2f")] = None
    difference_low: Annotated[float | None, Col("from", "+.2f")] = None
    difference_high: Annotated[float | None, Col("to", "+.2f")] = None
    scale: Annotated[
        str, Col("with", hint="plain perplexity of segments, log perplexity of single tokens")
    ] = ""
    spearman: Annotated[float | None, Col("Spearman", "+.2f", drop=2)] = None
    pearson_plain: Annotated[float | None, Col("r of plain perplexity", "+.2f", short="r plain", drop=5)] = (
        None
    )
    pearson_log: Annotated[float | None, Col("r of log perplexity", "+.2f", short="r of log", drop=4)] = None
    line_r2: Annotated[
        float | None,
        Col(
            "R² of the line", ".2f", short="R²", drop=3, hint="fitted on data; negative: worse than the mean"
        ),
    ] = None
    bins: Annotated[int | None, Col("Bins", "d", drop=3)] = None
    reason: Annotated[str, Col("Why undefined")] = ""


@dataclass(frozen=True)
class _Overall:
    """All texts of a source at one layer."""

    split: Annotated[str, Col("Text")]
    layer: Annotated[str, Col("Layer")]
    dispersion: Annotated[
        float,
        Col(
            "Dispersion", ".4f", error="dispersion_se", hint="mean cosine distance: 0 parallel, 1 orthogonal"
        ),
    ]
    texts: Annotated[int | None, Col("Texts", "d")] = None
    dispersion_se: float | None = None
    token_dispersion: Annotated[
        float | None, Col("Token dispersion", ".4f", hint="over the tokens of one text")
    ] = None
    perplexity: Annotated[float | None, Col("Perplexity", ".2f")] = None


class _Claim(NamedTuple):
    """Layers at which r has a sign for sure, and the controls that it is beyond or like there."""

    sign: int
    places: str
    beyond: list[str]
    like: list[str]


class _Verdict(NamedTuple):
    """The claims about one perplexity, and r at the layer that stands for all."""

    after: str
    claims: list[_Claim]
    layers: int
    row: dict[str, Any]
    controls: dict[str, float]


def _verdict(kind: str, every: pd.DataFrame, controls: pd.DataFrame | None) -> _Verdict:
    rows = every[every["perplexity"] == kind].set_index("layer")
    layers = list(rows.index)
    shown = "last" if "last" in layers else layers[-1]
    beside = None if controls is None else controls[controls["perplexity"] == kind]
    values: dict[str, float] = {}
    if beside is not None:
        there = beside[beside["layer"] == shown]
        values = dict(zip(there["control"].tolist(), there["pearson"].tolist(), strict=True))
    claims = [claim for sign in (-1, 1) for claim in _claims(layers, rows, beside, sign)]
    row = {"layer": shown, **{str(key): value for key, value in rows.loc[shown].items()}}
    return _Verdict(kind.removeprefix("last@"), claims, len(layers), row, values)


def _claims(
    layers: list[str], rows: pd.DataFrame, controls: pd.DataFrame | None, sign: int
) -> Iterator[_Claim]:
    """Where r has this sign for sure, and from which controls it does not clearly differ there."""
    bound = rows["all_high" if sign < 0 else "all_low"] * sign
    sure = [layer for layer in layers if bound[layer] > 0]
    if controls is None:
        if sure:
            yield _Claim(sign, places(sure, layers), [], [])
        return
    apart = controls["apart_high" if sign < 0 else "apart_low"] * sign > 0
    alike: dict[str, tuple[str, ...]] = {
        layer: tuple(sorted(controls["control"][(controls["layer"] == layer) & ~apart])) for layer in sure
    }
    for like in sorted(set(alike.values())):
        where = [layer for layer in sure if alike[layer] == like]
        beyond = [] if like else list(dict.fromkeys(controls["control"]))
        yield _Claim(sign, places(where, layers), beyond, list(like))


class _Split(NamedTuple):
    """The segments of one source with what the first pass found."""

    name: str
    segments: Segments
    nll: NDArray[np.float64]  # (n, 1 + contexts): mean over the segment, then of the token after each context
    tokens: NDArray[np.float64]  # (n, layers): dispersion over the tokens of each segment
    sums: NDArray[
        np.float64
    ]  # (layers, _GROUPS, width): of last-token unit vectors; segment i is in group i mod
    counts: NDArray[np.int64]  # (_GROUPS,)


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
    control: str | Sequence[str] | None = None,
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
        control: ``untrained``, ``shuffled`` or both, run beside the model on the same bins.
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
    if min(bins, bin_size) < FEWEST_BINS:
        raise UsageError(
            f"expected --bins and --bin-size of at least {FEWEST_BINS}, got {bins} and {bin_size}"
        )
    settings = {
        **{"segment": segment, "segments": segments, "layers": layers, "bins": bins, "bin_size": bin_size},
        **{"contexts": [int(c) for c in contexts if 0 < c < segment], "control": as_controls(control)},
        **{"pack": pack, "seed": seed},
    }
    return analyse(LawResult, _measure, [model], data, settings, batch, folder, quiet, held_out=held_out)


def _measure(analysis: Analysis) -> None:
    ((label, model),) = analysis.models.items()
    law = _Law(analysis, CausalModel(model))
    splits = [law.first_pass(name) for name in analysis.texts]
    units = [unit for split in splits for unit in law.bins(split)]
    values = analysis.study.units("bins", len(units), lambda number: law.one_bin(units[number])).stacked(
        "values"
    )
    controls = {name: law.control_pass(name, units) for name in analysis.settings["control"]}
    points = pd.DataFrame.from_records(list(law.points(units, values, controls)))
    seed = analysis.settings["seed"]
    tables = {
        "points": points,
        "correlations": correlations(points, seed),
        "overall": pd.concat([law.overall(split) for split in splits]),
        "jackknife": pd.concat([law.left_out(split) for split in splits]),
    }
    if controls:
        tables["controls"] = control_correlations(points, list(controls), seed)
    analysis.study.finish(tables, models=[{"model": label, **law.causal.summary()}])


class _Law:
    """The study at work."""

    def __init__(self, analysis: Analysis, causal: CausalModel) -> None:
        self.analysis, self.causal, self.settings = analysis, causal, analysis.settings
        self.names = causal.layers(self.settings["layers"])
        self.contexts: list[int] = self.settings["contexts"]
        self.batch = analysis.batch_size(causal, self.settings["segment"], len(self.names))

    def check_bins(self, drawn: Segments) -> None:
        """Refuse a source with too few bins before the model runs."""
        n, size = len(drawn.tokens), self.settings["bin_size"]
        if n // size < FEWEST_BINS:
            more = "a larger --segments" if drawn.counts.segments > n else "more text"
            raise TooFewVectorsError(
                f"expected at least {FEWEST_BINS} bins of {size} segments, got {n} segments of "
                f"{self.settings['segment']} tokens from {drawn.source}; "
                f"pass {more}, or a smaller --bin-size or --segment"
            )

    def first_pass(self, name: str) -> _Split:
        """Every segment once: perplexities, token dispersions, sums over all texts."""
        drawn = self.analysis.segments(name, self.causal, count=self.settings["segments"], texts=name)
        self.check_bins(drawn)
        n = len(drawn.tokens)
        # Whole rounds of the jackknife's groups a unit, so that each begins with the first group.
        size = -(-n // (_UNITS * _GROUPS)) * _GROUPS
        after = [context - 1 for context in self.contexts]  # NLL column of the token after so many

        def do(unit: int) -> Unit:
            end = min((unit + 1) * size, n)
            totals = [Dispersion(self.causal.width, _GROUPS) for _ in self.names]
            spreads, losses = [], []
            for first in range(unit * size, end, self.batch):
                rows = slice(first, min(first + self.batch, end))
                reduced, nll = self.causal.run(
                    drawn.tokens[rows],
                    self.names,
                    lambda _layer, states, _first: (last_vectors(states), token_dispersions(states)),
                    batch=self.batch,
                    losses=True,
                )
                spread = np.empty((len(nll), len(self.names)))
                for place, layer in enumerate(self.names):
                    vectors, spread[:, place] = map(np.concatenate, zip(*reduced[layer], strict=True))
                    for values in (vectors, spread[:, place]):
                        self.causal.check_finite(values, layer, drawn.origins[rows], drawn.source)
                    totals[place].update(vectors)
                self.causal.check_finite(nll, "the output", drawn.origins[rows], drawn.source)
                spreads.append(spread)
                losses.append(np.column_stack([nll.mean(axis=1), nll[:, after]]))
            return {
                "nll": np.concatenate(losses),
                "tokens": np.concatenate(spreads),
                "sums": np.stack([total.sums for total in totals]),
                "counts": totals[0].counts,
            }

        units = self.analysis.study.units(name, -(-n // size), do)
        sums = sum(units.each("sums"), start=np.zeros(()))
        return _Split(
            name,
            drawn,
            units.joined("nll"),
            units.joined("tokens"),
            sums,
            units.stacked("counts").sum(axis=0),
        )

    def bins(self, split: _Split) -> Iterator[_Bin]:
        """The chosen bins of a source, by the perplexity of segments and of single tokens."""
        kinds = [(SEQUENCE, self.settings["segment"]), *((f"last@{c}", c) for c in self.contexts)]
        for column, (kind, length) in enumerate(kinds):
            values = split.nll[:, column]
            if kind == SEQUENCE:
                values = perplexity(values)
            every = sorted_bins(values, self.settings["bin_size"])
            for number in uniform_bins(values[every].mean(axis=1), self.settings["bins"]):
                yield _Bin(split, kind, column, length, int(number), every[number])

    def one_bin(self, unit: _Bin) -> Unit:
        """The measures of a bin's states, (layers, values); the states are forgotten."""
        rows = []
        for vectors, _ in self.states(unit, self.causal):
            estimate = dispersion_estimate(vectors)
            rows.append((estimate.mean, estimate.se, vendi_score(vectors), *spectrum(vectors)))
        return {"values": np.array(rows)}

    def control_pass(self, control: str, units: list[_Bin]) -> Array:
        """The bins again as a control sees them: dispersions of texts and tokens, (bins, layers, 2)."""
        causal = control_model(control, self.causal, self.settings["seed"])

        def do(number: int) -> Unit:
            states = self.states(units[number], causal, control)
            return {"values": np.array([(dispersion(vectors), spread.mean()) for vectors, spread in states])}

        return self.analysis.study.units(f"control-{control}", len(units), do).stacked("values")

    def states(
        self, unit: _Bin, causal: CausalModel, control: str = ""
    ) -> list[tuple[NDArray[np.float32], NDArray[np.float64]]]:
        """Last-token states and token dispersions of a bin's members at every layer."""
        members, drawn = np.sort(unit.members), unit.split.segments
        tokens = np.asarray(drawn.tokens[members])[:, : unit.length]
        tokens = control_tokens(control, tokens, members, self.causal, self.settings["seed"])
        reduced, _ = causal.run(
            tokens,
            self.names,
            lambda _layer, states, _first: (
                last_vectors(states),
                token_dispersions(states) if control else np.empty(0),
            ),
            batch=self.batch,
        )
        layers = []
        for layer in self.names:
            vectors, spread = map(np.concatenate, zip(*reduced[layer], strict=True))
            causal.check_finite(vectors, layer, drawn.origins[members], drawn.source)
            layers.append((vectors, spread))
        return layers

    def points(
        self, units: list[_Bin], values: Array, controls: dict[str, Array]
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
                    **dict(zip(_BIN_VALUES, map(float, values[number, place]), strict=True)),
                }
                if unit.perplexity == SEQUENCE:
                    record["token_dispersion"] = float(unit.split.tokens[unit.members, place].mean())
                for control, dispersions in controls.items():
                    record[f"dispersion.{control}"] = float(dispersions[number, place, 0])
                    if unit.perplexity == SEQUENCE:
                        record[f"token_dispersion.{control}"] = float(dispersions[number, place, 1])
                yield record

    def overall(self, split: _Split) -> pd.DataFrame:
        """One row a layer: dispersion over all texts with jackknife error, token dispersion, perplexity."""
        records = []
        for place, layer in enumerate(self.names):
            estimate = Dispersion.from_state({"sums": split.sums[place], "counts": split.counts}).estimate()
            token = mean_interval(split.tokens[:, place], self.settings["seed"])
            records.append(
                {
                    "split": split.name,
                    "layer": layer,
                    "texts": estimate.n,
                    "dispersion": estimate.mean,
                    "dispersion_se": estimate.se,
                    "token_dispersion": token.value,
                    "token_dispersion_low": token.low,
                    "token_dispersion_high": token.high,
                    "perplexity": float(perplexity(split.nll[:, 0].mean())),
                }
            )
        return pd.DataFrame.from_records(records)

    def left_out(self, split: _Split) -> pd.DataFrame:
        """Dispersion and mean NLL without each jackknife group of texts; what comparisons pair on."""
        groups, nll = np.arange(len(split.nll)) % _GROUPS, split.nll[:, 0]
        records = []
        for place, layer in enumerate(self.names):
            for group in np.unique(groups).tolist():
                others = np.arange(_GROUPS) != group
                state = {"sums": split.sums[place] * others[:, None], "counts": split.counts * others}
                rest = {
                    "dispersion": Dispersion.from_state(state).mean(),
                    "nll": float(nll[groups != group].mean()),
                }
                records.append({"split": split.name, "layer": layer, "group": group, **rest})
        return pd.DataFrame.from_records(records)


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


def correlations(points: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Correlation of the bins' mean perplexity with every measure, per split, perplexity and layer."""
    records: list[dict[str, Any]] = []
    samples: dict[int, Array] = {}  # Fisher's z of resamples, by the row that claims are made from
    for (kind, layer), both in points.groupby(["perplexity", "layer"], sort=False):
        fitted: dict[str, tuple[float, float]] = {}
        for split, bins in both.groupby("split", sort=False):
            for measure in (m for m in MEASURES if m in bins and bins[m].notna().any()):
                x, y = leading(bins), bins[measure].to_numpy()
                row = _one(bins, y, seed)
                if split == "data" and not row["reason"]:
                    slope, intercept = np.polyfit(x, y, 1)
                    fitted[measure] = (float(slope), float(intercept))
                    if measure == "dispersion":
                        samples[len(records)] = fisher(resampled_correlations(x, y, seed=seed))
                if measure in fitted and np.ptp(y) > 0:
                    slope, intercept = fitted[measure]
                    left = np.square(y - (slope * x + intercept)).sum()
                    row["line_r2"] = float(1 - left / np.square(y - y.mean()).sum())
                about = {"split": split, "perplexity": kind, "layer": layer, "measure": measure}
                scale = "plain" if kind == SEQUENCE else "log"
                records.append({**about, "bins": len(x), "scale": scale, **row})
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
                row = {"control": control, "pearson": other, "low": both[1].low, "high": both[1].high}
                apart = {"difference": mine - other, "difference_low": less, "difference_high": more}
                records.append({**about, **row, **apart, "reason": ""})
    frame = pd.DataFrame.from_records(records).assign(apart_low=np.nan, apart_high=np.nan)
    if samples:
        rows = list(samples)
        values = [value for value, _ in samples.values()]
        bounds = bounds_together(values, np.stack([drawn for _, drawn in samples.values()], axis=1))
        frame.loc[rows, "apart_low"], frame.loc[rows, "apart_high"] = bounds
    return frame


def leading(bins: pd.DataFrame) -> Array:
    """The side of r that is no measure: mean perplexity of segments, mean log perplexity of single tokens."""
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
