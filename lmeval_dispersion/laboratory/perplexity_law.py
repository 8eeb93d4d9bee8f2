"""The perplexity law: do texts that a model finds easier lie further apart?

There are two passes. The first runs every segment once, for its perplexity, its token dispersion,
and the sums of which the dispersion of all texts is made. The perplexities determine the bins. The
second pass runs the segments of the chosen bins again, bin by bin, so that no states are kept.

A single token's perplexity spans many powers of ten, so its logarithm is used, in the choice of
bins and in r. Controls keep the model's bins and perplexities and change only the states.

Source: RD sections 2.2, A.1.2 (bins, algorithm 1), A.4 (held-out split), A.5 (Vendi score).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lmeval_dispersion import statistics
from lmeval_dispersion.arguments import takes
from lmeval_dispersion.errors import GeometryError, UsageError, count
from lmeval_dispersion.geometry import (
    Dispersion,
    Spectrum,
    dispersion_estimate,
    spectrum,
    vendi_score,
)
from lmeval_dispersion.laboratory import charts
from lmeval_dispersion.laboratory.arguments import FEWEST_BINS, Law
from lmeval_dispersion.laboratory.models import (
    CONTROLS,
    CausalModel,
    as_controls,
    in_float32,
    last_vectors,
    token_dispersions,
)
from lmeval_dispersion.laboratory.report import StudyResult, bounded, records, table, with_ends
from lmeval_dispersion.laboratory.segments import Segments, Unit, blocks
from lmeval_dispersion.laboratory.study import (
    Study,
    TableRow,
    as_models,
    studied,
)
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.report.declared import listed
from lmeval_dispersion.statistics import Array

SEQUENCE = "sequence"  # perplexity of the whole segment; "last@16" is that of the token after 16
MEASURES = ("dispersion", "token_dispersion", "vendi_score", *Spectrum._fields)

_GROUPS = 32  # groups of texts that the jackknife leaves out
_UNITS = 64  # most units of work in the first pass
_PANELS = 6  # most layers with a panel of bins
_STUDY = ["model", "data"]
_ABOUT = [*_STUDY, "split", "perplexity", "layer"]

_NAMES = {"model": Col("Model"), "data": Col("Data")}
_CORRELATIONS = {
    "split": Col("Text"),
    "perplexity": Col(
        "Perplexity of", hint="sequence: whole segments; last@16: the token after 16 tokens"
    ),
    "layer": Col("Layer"),
    "measure": Col("Measure"),
    "control": Col(
        "Control", hint="untrained: random weights; shuffled: each text's tokens in random order"
    ),
    **bounded(
        "pearson",
        "r",
        "+.2f",
        hint="correlation over bins; below 0: bins of lower perplexity are more dispersed",
    ),
    "line_r2": Col(
        "R² of the line",
        ".2f",
        short="R²",
        drop=3,
        hint="fit of the line through the bins of `data`; negative: worse than the bins' mean",
    ),
    "difference": Col("Model minus control", "+.2f"),
    "difference_low": Col("from", "+.2f"),
    "difference_high": Col("to", "+.2f"),
    "bins": Col("Bins", "d", drop=3),
    "reason": Col("Why undefined"),
}
_LAYERS = {
    "layer": _CORRELATIONS["layer"],
    **bounded("pearson", "r", "+.2f", ("all_low", "all_high")),
    **{control: Col(control.capitalize(), "+.2f") for control in CONTROLS},
    "reason": _CORRELATIONS["reason"],
}
_OVERALL = {
    "split": Col("Text"),
    "layer": Col("Layer"),
    "dispersion": Col(
        "Dispersion",
        ".4f",
        error="dispersion_se",
        hint="mean cosine distance: 0 if all states point the same way, 1 if orthogonal",
    ),
    "texts": Col("Texts", "d"),
    "token_dispersion": Col(
        "Token dispersion", ".4f", hint="dispersion of the tokens of one text, averaged over texts"
    ),
    "perplexity": Col("Perplexity", ".2f"),
}


@dataclass(frozen=True, repr=False)
class LawResult(StudyResult):
    """How dispersion rises or falls with perplexity, for one or several models and texts.

    Segments of text are sorted by perplexity and cut into bins; each bin has a mean perplexity and
    a dispersion. docs/reference/laboratory.md lists every column of the tables. The column
    ``split`` is ``data`` or, for the held-out text, ``held-out``. A kind of perplexity is that of
    whole segments (``sequence``) or of the single token after, say, 16 tokens (``last@16``). The
    measures are the dispersion, the mean dispersion of the tokens of one segment, the Vendi score,
    and those of `Spectrum`.

    Attributes:
        correlations: One row for each model, text, split, kind of perplexity, layer and measure:
            ``pearson``, the correlation r over the bins, with its 95 % interval.
        points: One row for each model, text, split, kind of perplexity, chosen bin and layer: the
            bin's mean perplexity, every measure of the model, and the dispersions of the controls.
        overall: One row for each model, text, split and layer: the dispersion of all segments, the
            mean dispersion of the tokens of one segment, and the perplexity.
        controls: Rows like those of ``correlations`` for each control, with ``difference``, the
            model's r minus the control's; None if no control was run.
        manifest: The settings; for each model its identity, the library versions, and how many
            texts and segments were read.
    """

    correlations: pd.DataFrame
    points: pd.DataFrame
    overall: pd.DataFrame
    controls: pd.DataFrame | None = None

    kind = "law"
    main = "correlations"
    template = "law.jinja"

    def tables(self) -> dict[str, Table]:
        """Return the tables of the report by name.

        - ``layers``: the correlation r of dispersion and the perplexity of whole segments, in at
          most 12 rows;
        - ``correlations``: all correlations of the models;
        - ``controls``: all correlations of the controls, if any was run;
        - ``overall``: dispersion and perplexity over all texts.
        """
        names = _NAMES if self._is_grid else {}
        full = {**names, **_CORRELATIONS}
        first = _of_segments(self.correlations)
        caption = "Correlation r of the controls, and the model's r minus the control's"
        controls = {}
        if self.controls is not None:
            controls["controls"] = table(self.controls, caption, full)
            others = _of_segments(self.controls)
            place = [*_STUDY, "layer"]
            wide = others.pivot(index=place, columns="control", values="pearson")
            first = first.merge(wide.reset_index(), on=place)
        caption = f"Correlation r of dispersion and the perplexity of whole segments, {self._level}"
        return {
            "layers": table(first, caption, {**names, **_LAYERS}, most=12),
            "correlations": table(
                self.correlations,
                "Correlation r of perplexity and each measure, with its 95 % interval",
                full,
            ),
            **controls,
            "overall": table(self.overall, "All texts", {**names, **_OVERALL}),
        }

    def charts(self) -> dict[str, Chart]:
        """Return the charts of the report by name.

        - ``grid``: dispersion against perplexity, one panel for each pair of a model and a text. It
          is the only chart if several models or texts were measured, and is left out otherwise.
        - ``layers``: the correlation r at each layer, if several layers were measured.
        - ``bins``: dispersion against perplexity at no more than six layers.
        """
        if self._is_grid:
            draw = partial(charts.law_grid, self.points, self._shown_rows())
            caption = (
                "Dispersion against the perplexity of whole segments, for every model and text"
            )
            texts = {row["data"] for row in self._shown_rows()}
            note = "Each dot is a bin, each panel a model."
            if len(texts) > 1:
                note = "Each dot is a bin, each row of panels a model, each column a text."
            return {"grid": Chart(draw, caption, note)}
        drawn = {}
        layers = list(dict.fromkeys(self.points["layer"]))
        if len(layers) > 1:
            drawn["layers"] = Chart(
                partial(charts.law_layers, self.correlations, self.controls),
                f"Correlation r of perplexity and dispersion at each layer, {self._level}",
                "Each panel is a kind of perplexity, each dot a layer.",
            )
        step = math.ceil(len(layers) / _PANELS)
        points = self.points[self.points["layer"].isin(layers[::step])]
        caption = "Dispersion against the mean perplexity of every chosen bin"
        drawn["bins"] = Chart(partial(charts.law_bins, points), caption, "Each dot is a bin.")
        return drawn

    def context(self) -> dict[str, Any]:
        """Return the values that the report's template needs.

        In addition to those of `StudyResult` these are:

        - ``kinds``: a mapping for each kind of perplexity; empty for several models or texts. Each
          of its ``claims`` names layers at which r is clearly negative or positive (``places``).
          If r is clearly further from 0 there than with every control, ``beyond`` lists all
          controls; otherwise ``like`` lists the controls for which this is not clear. ``row`` is
          the row of ``correlations`` at one layer (``last``, or the last that was measured), and
          ``controls`` the controls' r there. ``layers`` is the number of layers. ``after`` is the
          number of tokens before the single token, or ``sequence``;
        - ``grid``: sentences on several models or texts; empty for one model and one text;
        - ``tests``: number of correlations r whose 95 % intervals hold jointly;
        - ``rounded``: names of the models that ran in bfloat16.
        """
        rows = _of_dispersion(self.correlations)
        if self.controls is None:
            columns = ["layer", "control", "pearson", "apart_low", "apart_high"]
            controls = pd.DataFrame(columns=[*_STUDY, "perplexity", *columns])
        else:
            controls = _of_dispersion(self.controls)
        kinds: list[dict[str, Any]] = []
        grid: list[str] = []
        if self._is_grid:
            grid = grid_sentences(self._shown_rows(), records(controls), self._tests)
        else:
            for kind in dict.fromkeys(rows["perplexity"]):
                kinds.append(_verdict(kind, rows, controls))
        rounded = []
        for each in self.manifest["models"]:
            if each["dtype"] == "bfloat16" and each["model"] not in rounded:
                rounded.append(each["model"])
        return {
            **super().context(),
            "kinds": kinds,
            "grid": grid,
            "tests": self._tests,
            "rounded": rounded,
        }

    @property
    def _is_grid(self) -> bool:
        """Whether several models or texts were measured."""
        studies = self.points[_STUDY].drop_duplicates()
        return len(studies) > 1

    def _shown_rows(self) -> list[dict[str, Any]]:
        """For every model and text, the row on dispersion and whole segments at one layer."""
        rows = []
        for _, study in _of_segments(self.correlations).groupby(_STUDY, sort=False):
            shown = _shown_layer(study["layer"])
            at_layer = study[study["layer"] == shown]
            rows += records(at_layer)
        return rows

    @property
    def _tests(self) -> int:
        """The number of correlations that may be claimed, for which the answer's intervals hold together."""
        return int(self.correlations["all_low"].notna().sum())

    @property
    def _level(self) -> str:
        return _intervals(self._tests)


def _intervals(tests: int) -> str:
    """What the shown intervals are, for a number of correlations that may be claimed."""
    if tests > 1:
        return f"95 % intervals that hold jointly for all {tests} correlations"
    return "95 % interval"


def grid_sentences(
    rows: Sequence[Mapping[str, Any]], controls: Sequence[Mapping[str, Any]], tests: int
) -> list[str]:
    """Return sentences that sum up the correlations of several models and texts.

    They say for how many pairs of a model and a text r is clearly negative or positive, for which
    pairs r is unclear or undefined, and whether r is clearly more negative than with each control.

    Args:
        rows: For each model and text, the row of ``correlations`` on dispersion and the perplexity
            of whole segments, at one layer.
        controls: The rows of the table ``controls`` on dispersion; empty without controls.
        tests: Number of correlations for which the 95 % intervals hold jointly.
    """
    negative: list[Mapping[str, Any]] = []
    positive: list[Mapping[str, Any]] = []
    unclear: list[Mapping[str, Any]] = []
    undefined: list[Mapping[str, Any]] = []
    for row in rows:
        if row["reason"]:
            undefined.append(row)
        elif row["all_high"] < 0:
            negative.append(row)
        elif row["all_low"] > 0:
            positive.append(row)
        else:
            unclear.append(row)
    models = count(len({row["model"] for row in rows}), "model")
    texts = count(len({row["data"] for row in rows}), "text")
    parts = []
    for word, clear in (("negative", negative), ("positive", positive)):
        if not clear:
            continue
        values = [row["pearson"] for row in clear]
        ends = f"r {min(values):+.2f} to {max(values):+.2f}"
        pairs = "1 pair" if len(rows) == 1 else f"{len(rows)} pairs"
        parts.append(f"{word} in {len(clear)} of {pairs} of a model and a text ({ends})")
    if unclear:
        parts.append(f"not clearly different from 0 in {_named(unclear)}")
    if undefined:
        parts.append(f"undefined in {_named(undefined)} ({undefined[0]['reason']})")
    where = f"measured with {models} on {texts} ({_intervals(tests)})"
    sentences = [f"Whole segments: r of perplexity and dispersion is {', '.join(parts)}; {where}."]
    if positive and negative:
        sentences.append(f"r is positive in {_named(positive)}.")
    for control in dict.fromkeys(row["control"] for row in controls):
        alike = [row for row in negative if not _is_beyond(row, control, controls)]
        if alike:
            sentences.append(
                f"r is not clearly more negative than with the control {control} in "
                f"{_named(alike)}."
            )
        elif negative:
            sentences.append(
                f"Where r is negative, it is clearly more negative than with the control {control}."
            )
    return sentences


def _is_beyond(row: Mapping[str, Any], control: str, controls: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a study's r is clearly below that of a control."""
    same = [row["model"], row["data"], row["layer"], row["perplexity"], control]
    for other in controls:
        place = [other["model"], other["data"], other["layer"], other["perplexity"]]
        if [*place, other["control"]] == same:
            return bool(other["apart_high"] < 0)
    return False


def _named(rows: Sequence[Mapping[str, Any]]) -> str:
    return listed([f"{row['model']} on {row['data']}" for row in rows])


def _of_dispersion(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows on dispersion, which give the answer."""
    return frame.query("measure == 'dispersion' and split == 'data'")


def _of_segments(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows on dispersion and the perplexity of whole segments."""
    rows = _of_dispersion(frame)
    return rows[rows["perplexity"] == SEQUENCE]


def _shown_layer(layers: pd.Series[str]) -> str:
    """The layer that is shown: ``last``, or the latest that was measured."""
    names = layers.tolist()
    return "last" if "last" in names else names[-1]


def _verdict(kind: str, rows: pd.DataFrame, controls: pd.DataFrame) -> dict[str, Any]:
    """The claims about one perplexity, and r at the representative layer."""
    rows = rows[rows["perplexity"] == kind]
    controls = controls[controls["perplexity"] == kind]
    shown = _shown_layer(rows["layer"])
    (row,) = records(rows[rows["layer"] == shown])
    of_controls = {}
    for other in records(controls[controls["layer"] == shown]):
        of_controls[other["control"]] = other["pearson"]
    negative = _claims(rows, controls, -1)
    positive = _claims(rows, controls, 1)
    return {
        "after": kind.removeprefix("last@"),
        "claims": [*negative, *positive],
        "layers": len(rows),
        "row": row,
        "controls": of_controls,
    }


def _claims(rows: pd.DataFrame, controls: pd.DataFrame, sign: int) -> Iterator[dict[str, Any]]:
    """The layers where r clearly has this sign, and the controls that it is ``beyond`` or ``like`` there."""
    end = "high" if sign < 0 else "low"
    layers = rows["layer"].tolist()
    is_beyond = controls[f"apart_{end}"].astype(float) * sign > 0
    alike = controls[~is_beyond]
    is_clear = rows[f"all_{end}"] * sign > 0
    groups: dict[tuple[str, ...], list[str]] = {}
    for layer in rows["layer"][is_clear]:
        at_layer = alike["control"][alike["layer"] == layer]
        like = tuple(sorted(at_layer))
        groups.setdefault(like, []).append(layer)
    for like, where in sorted(groups.items()):
        beyond = [] if like else list(dict.fromkeys(controls["control"]))
        yield {
            "sign": sign,
            "places": places(where, layers),
            "beyond": beyond,
            "like": like,
        }


def places(chosen: Sequence[str], every: Sequence[str]) -> str:
    """Return a phrase that names some of the measured layers.

    Args:
        chosen: The layers to name.
        every: All layers that were measured, in their order.

    >>> places(["layer.1", "layer.2", "last"], ["layer.0", "layer.1", "layer.2", "layer.3", "last"])
    'at 3 of 5 layers (layer.1 to layer.2, last)'
    """
    if len(every) <= 2:
        return "at " + " and ".join(chosen)
    if len(chosen) == len(every):
        return f"at all {len(every)} layers"
    shown = []
    for (is_chosen, _), group in groupby(every, lambda layer: (layer in chosen, layer == "last")):
        if not is_chosen:
            continue
        run = list(group)
        ends = dict.fromkeys([run[0], run[-1]])
        shown.append(" to ".join(ends))
    return f"at {len(chosen)} of {len(every)} layers ({', '.join(shown)})"


@takes(Law)
def law(asked: Law) -> LawResult:
    """Correlate perplexity and dispersion over bins of segments, for every model, text and layer.

    The segments of a text are sorted by perplexity and cut into bins. The dispersion of a bin is
    the mean cosine distance over all pairs of its segments, each represented by the state of its
    last token. Models are loaded in float32, unless another dtype or a quantisation is asked for:
    rounding to bfloat16 moves segments from bin to bin.

    Raises:
        UsageError: A setting is too small or does not fit a model or a text, a model in float32
            does not fit into memory, or a text gives fewer than eight bins.
        NonFiniteStateError: A model produces NaN or infinity; the message names the layer and the
            text.
    """
    settings: dict[str, Any] = {
        "segments": asked.segments,
        "layers": asked.layers,
        "bins": asked.bins,
        "bin_size": asked.bin_size,
        "contexts": [int(c) for c in asked.contexts if 0 < c < asked.segment],
        "control": as_controls(asked.control),
    }
    further = {} if asked.held_out is None else {"held_out": asked.held_out}
    exact = [in_float32(model) for model in as_models(asked.models)]
    manifest, tables = studied("law", _measure, exact, asked.data, settings, asked, further=further)
    over_bins = correlations(tables["points"], settings["control"], asked.seed)
    return LawResult(manifest, **tables, **over_bins)


class _Split(NamedTuple):
    """The segments of one source with the results of the first pass."""

    name: str
    segments: Segments
    nll: Array  # (n, 1 + contexts): mean over the segment, then of the token after each context
    tokens: Array  # (n, layers): dispersion over the tokens of each segment
    totals: list[Dispersion]  # last-token vectors by layer; segment i is in group i mod _GROUPS


class _Bin(NamedTuple):
    """One chosen bin: a unit of the second pass."""

    perplexity: str
    column: int  # column of the perplexities
    length: int
    number: int
    members: NDArray[np.int64]


def _measure(study: Study) -> Iterator[TableRow]:
    settings = study.settings
    causal, layers = study.loaded(losses=True)
    splits = [_first_pass(study, causal, layers, source) for source in study.texts]
    models = {"": causal}
    for name in settings["control"]:
        models[name] = causal.control(name, settings["seed"])
    for split in splits:
        for row in _points(study, models, layers, split):
            yield "points", row
        for row in _overall(split, layers, settings["seed"]):
            yield "overall", row


def _first_pass(study: Study, causal: CausalModel, layers: list[str], source: str) -> _Split:
    """Every segment once: perplexities, token dispersions, sums over all texts."""
    settings = study.settings
    name = source.replace("_", "-")
    drawn = study.segments(name, causal, settings["segments"], source=source)
    n = len(drawn.tokens)
    size = settings["bin_size"]
    if n // size < FEWEST_BINS:
        advice = "pass more text, or use smaller bins or segments"
        if n == settings["segments"]:
            advice = "pass more segments (--segments), or use smaller bins"
        raise UsageError(
            f"expected at least {FEWEST_BINS * size} segments ({FEWEST_BINS} bins of {size}) to "
            f"determine the correlation r, got {count(n, 'segment')} ({settings['segment']} tokens "
            f"each) from {drawn.source}; {advice}"
        )
    do = partial(_first_unit, causal, layers, drawn, settings["contexts"])
    nll = []
    tokens = []
    sums = np.zeros(())
    counts = np.zeros(())
    # Each unit has whole rounds of the jackknife's groups, so that it begins with the first.
    rounds = math.ceil(n / (_UNITS * _GROUPS))
    for unit in study.kept(name, blocks(n, rounds * _GROUPS), do):
        nll.append(unit["nll"])
        tokens.append(unit["tokens"])
        sums = sums + unit["sums"]
        counts = counts + unit["counts"]
    totals = []
    for layer in sums:
        state = {"sums": layer, "counts": counts}
        totals.append(Dispersion.from_state(state))
    return _Split(name, drawn, np.concatenate(nll), np.concatenate(tokens), totals)


def _first_unit(
    causal: CausalModel,
    layers: list[str],
    drawn: Segments,
    contexts: Sequence[int],
    rows: NDArray[np.int64],
) -> Unit:
    """The segments ``rows`` once: log-probabilities, token dispersions, sums over the texts."""
    after = [context - 1 for context in contexts]  # column of the token after a context
    totals = [Dispersion(causal.width, _GROUPS) for _ in layers]
    spreads = []
    losses = []
    starts = range(causal.batch, len(rows), causal.batch)
    for batch in np.split(rows, starts):
        part = causal.run(drawn, batch, layers, _with_spread, losses=True)
        of_layers = []
        for layer, total in zip(layers, totals, strict=True):
            total.update(part[layer][:, :-1])
            of_layers.append(part[layer][:, -1])
        spreads.append(np.stack(of_layers, axis=1))
        nll = part["nll"]
        of_batch = [nll.mean(axis=1), nll[:, after]]
        losses.append(np.column_stack(of_batch))
    return {
        "nll": np.concatenate(losses),
        "tokens": np.concatenate(spreads),
        "sums": np.stack([total.sums for total in totals]),
        "counts": totals[0].counts,
    }


def _with_spread(states: Tensor) -> Array:
    """Last-token states, and the token dispersion as a last column; shape (b, d + 1)."""
    return np.column_stack([last_vectors(states), token_dispersions(states)])


def _bins(split: _Split, settings: Mapping[str, Any]) -> Iterator[_Bin]:
    """The chosen bins of a source, by the perplexity of segments and of single tokens."""
    kinds = [(SEQUENCE, settings["segment"])]
    for context in settings["contexts"]:
        kinds.append((f"last@{context}", context))
    for column, (kind, length) in enumerate(kinds):
        values = split.nll[:, column]
        if kind == SEQUENCE:
            values = np.exp(values)
        every = sorted_bins(values, settings["bin_size"])
        means = values[every].mean(axis=1)
        for number in uniform_bins(means, settings["bins"]):
            members = np.sort(every[number])
            yield _Bin(kind, column, length, int(number), members)


def _points(
    study: Study, models: Mapping[str, CausalModel], layers: list[str], split: _Split
) -> Iterator[dict[str, Any]]:
    """One row per chosen bin and layer: its perplexity, the model's measures and the controls' first two."""
    bins = list(_bins(split, study.settings))
    values: dict[str, list[Array]] = {}  # of each control, every bin's (layers, measures)
    for control, model in models.items():
        do = partial(_measured_bin, model, layers, split.segments, not control)
        units = study.kept(f"{split.name} bins {control}", bins, do)
        values[control] = [unit["values"] for unit in units]
    for place, chosen in enumerate(bins):
        losses = split.nll[chosen.members, chosen.column]
        perplexities = np.exp(losses)
        for k, layer in enumerate(layers):
            row = {
                "split": split.name,
                "perplexity": chosen.perplexity,
                "bin": chosen.number,
                "segments": len(losses),
                "layer": layer,
                "mean_perplexity": float(perplexities.mean()),
                "mean_nll": float(losses.mean()),
            }
            for control, of_bins in values.items():
                suffix = f".{control}" if control else ""
                names = (*MEASURES, "dispersion_se")
                for name, value in zip(names, of_bins[place][k].tolist(), strict=False):
                    row[f"{name}{suffix}"] = value
            yield row


def _measured_bin(
    causal: CausalModel, layers: list[str], drawn: Segments, all_measures: bool, chosen: _Bin
) -> Unit:
    """A bin's measures at every layer and the error, (layers, measures + 1); or only both dispersions."""
    reduce = _with_spread if chosen.perplexity == SEQUENCE else last_vectors
    states = causal.run(drawn, chosen.members, layers, reduce, length=chosen.length)
    rows = []
    for layer in layers:
        vectors = states[layer][:, : causal.width].astype(np.float32)
        spread = np.nan
        if reduce is _with_spread:
            spread = states[layer][:, causal.width :].mean()
        estimate = dispersion_estimate(vectors)
        # In the order of MEASURES, then the error.
        row = [estimate.mean, spread]
        if all_measures:
            row += [vendi_score(vectors), *spectrum(vectors), estimate.se]
        rows.append(row)
    return {"values": np.array(rows)}


def _overall(split: _Split, layers: list[str], seed: int) -> Iterator[dict[str, Any]]:
    """One row per layer: dispersion over all texts with jackknife error, token dispersion, perplexity."""
    perplexity = float(np.exp(split.nll[:, 0].mean()))
    for layer, total, spread in zip(layers, split.totals, split.tokens.T, strict=True):
        estimate = total.estimate()
        interval = statistics.mean_interval(spread, seed)
        yield {
            "split": split.name,
            "layer": layer,
            "texts": estimate.n,
            "dispersion": estimate.mean,
            "dispersion_se": estimate.se,
            **with_ends("token_dispersion", interval),
            "perplexity": perplexity,
        }


def sorted_bins(values: ArrayLike, size: int) -> NDArray[np.int64]:
    """Sort values and cut them into bins of equal size.

    Equal values keep their order. The highest n mod ``size`` values fill no bin and are left out.

    Args:
        values: Shape (n,).
        size: Number of values in a bin.

    Returns:
        Shape (n // size, size), int64: the indices of each bin's values, in ascending order of the
        values.

    >>> sorted_bins([3.0, 1.0, 2.0, 9.0, 5.0], 2).tolist()
    [[1, 2], [0, 4]]
    """
    numbers = np.asarray(values, dtype=np.float64)
    count = len(numbers) // size
    order = np.argsort(numbers, kind="stable")
    return np.asarray(order[: count * size].reshape(count, size), dtype=np.int64)


def uniform_bins(means: ArrayLike, k: int) -> NDArray[np.int64]:
    """Choose bins whose means cover the range of all means evenly.

    ``k`` targets are spaced evenly from the lowest mean to the highest. The bin nearest to each
    target is chosen, the lower one of two that are equally near. If this gives fewer than ``k``
    bins, the lowest of the remaining bins are added.

    Source: algorithm 1 in appendix A.1.2 of RD (the paper cited in
    :mod:`lmeval_dispersion.geometry`).

    Args:
        means: Shape (g,), the mean of each bin, ascending.
        k: Number of bins to choose.

    Returns:
        Shape (min(k, g),), int64: the numbers of the chosen bins, ascending.

    >>> uniform_bins([1.0, 1.1, 1.2, 5.0, 9.0], 3).tolist()
    [0, 3, 4]
    """
    values = np.asarray(means, dtype=np.float64)
    targets = np.linspace(values[0], values[-1], k)
    distances = np.abs(values[None, :] - targets[:, None])
    chosen = set(distances.argmin(axis=1).tolist())
    for place in range(len(values)):
        if len(chosen) >= k:
            break
        chosen.add(place)
    return np.array(sorted(chosen), dtype=np.int64)


class OverBins(NamedTuple):
    """A Pearson correlation over bins.

    Attributes:
        interval: r and its 95 % bounds; NaN where r is undefined.
        samples: Shape (resamples,), r in each bootstrap sample; empty where r is undefined.
        reason: Why r is undefined; otherwise empty.
    """

    interval: statistics.Interval
    samples: Array
    reason: str = ""  # why it is undefined

    def row(self) -> dict[str, Any]:
        """Return the entries of a table row: ``pearson``, ``low``, ``high`` and ``reason``."""
        return {
            "pearson": self.interval.value,
            "low": self.interval.low,
            "high": self.interval.high,
            "reason": self.reason,
        }

    def on_fishers_scale(self) -> Array:
        """Return Fisher's z of r, then of r in each bootstrap sample; shape (1 + resamples,)."""
        return statistics.fisher([self.interval.value, *self.samples])


def correlated(x: Array, y: Array, seed: int) -> OverBins:
    """Correlate perplexity with a measure over bins.

    Args:
        x: Shape (bins,), the mean perplexity of each bin, or its mean logarithm.
        y: Shape (bins,), the measure of each bin.
        seed: Seed of the bootstrap.

    Returns:
        Pearson's r with its interval. If r is undefined, for example because all values are equal,
        r and its bounds are NaN, ``samples`` is empty, and ``reason`` says why.
    """
    try:
        value = statistics.correlation(x, y)
        samples = statistics.resampled_correlations(x, y, seed=seed)
    except GeometryError as error:
        undefined = statistics.Interval(np.nan, np.nan, np.nan)
        return OverBins(undefined, np.array([]), str(error))
    bounds = statistics.correlation_bounds(value, samples, len(x))
    return OverBins(statistics.Interval(value, *bounds), samples)


def correlations(
    points: pd.DataFrame, controls: Sequence[str], seed: int
) -> dict[str, pd.DataFrame]:
    """Correlate the bins' mean perplexity with every measure (Pearson's r).

    There is one r for each model, text, split, kind of perplexity, layer and measure. The
    perplexity of a single token spans many powers of ten, so its mean logarithm is used instead.

    Args:
        points: The table ``points`` of a `LawResult`.
        controls: Names of the controls that were run.
        seed: Seed of the bootstrap over bins.

    Returns:
        These tables by name.

        - ``correlations``: r of the models. Where the measure is dispersion and the split ``data``,
            ``all_low`` and ``all_high`` are bounds that hold for all models, texts, layers and
            kinds of perplexity at once; elsewhere, and where r is undefined, they are NaN.
        - ``controls``, if any was run: r of the controls, and ``difference``, the model's r minus
            the control's, over the same bootstrap samples. ``apart_low`` and ``apart_high`` are
            bounds of this difference on Fisher's z scale that hold for all models, texts, layers,
            kinds of perplexity and controls at once; they are NaN where ``all_low`` is NaN or the
            control's r is undefined.
    """
    models: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for number, (_, study) in enumerate(points.groupby(_STUDY, sort=False)):
        of_model, of_controls = _study_correlations(study, controls, seed + number)
        models += of_model
        others += of_controls
    frame = _with_bounds(models, "all")
    # Never narrower than the row's own interval, whose Student's point few bins need.
    frame["all_low"] = np.minimum(np.tanh(frame["all_low"]), frame["low"])
    frame["all_high"] = np.maximum(np.tanh(frame["all_high"]), frame["high"])
    tables = {"correlations": frame}
    if controls:
        tables["controls"] = _with_bounds(others, "apart")
    return tables


def _study_correlations(
    points: pd.DataFrame, controls: Sequence[str], seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """One study's rows of both tables, each with its ``claim``: r and its samples, or None."""
    models: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    lines: dict[tuple[Any, ...], NDArray[Any]] = {}  # fitted on `data`, which comes first
    for key, bins in points.groupby(_ABOUT, sort=False):
        *_, split, perplexity, layer = key
        scale = "mean_perplexity" if perplexity == SEQUENCE else "mean_nll"
        x = bins[scale].to_numpy()
        for measure in MEASURES:
            if measure not in bins or bins[measure].isna().all():
                continue
            about = {**dict(zip(_ABOUT, key, strict=True)), "measure": measure}
            is_claimed = split == "data" and measure == "dispersion"
            y = bins[measure].to_numpy()
            mine = correlated(x, y, seed)
            line = (perplexity, layer, measure)
            if split == "data" and not mine.reason:
                lines[line] = np.polyfit(x, y, 1)
            row = {
                **about,
                "bins": len(bins),
                "line_r2": np.nan,
                **mine.row(),
                "claim": None,
            }
            if not mine.reason:
                row["line_r2"] = _line_r2(lines.get(line, np.array([np.nan])), x, y)
            if is_claimed and not mine.reason:
                row["claim"] = mine.on_fishers_scale()
            models.append(row)
            for control in controls:
                column = f"{measure}.{control}"
                if column not in bins or bins[column].isna().any():
                    continue
                other = correlated(x, bins[column].to_numpy(), seed)
                compared = _minus_control(mine, other)
                if not is_claimed:
                    compared.pop("claim", None)
                row = {
                    **about,
                    "control": control,
                    **other.row(),
                    **compared,
                }
                others.append(row)
    return models, others


def _line_r2(line: NDArray[Any], x: Array, y: Array) -> float:
    """R² of a fitted line on points; negative if it is worse than their mean."""
    residuals = y - np.polyval(line, x)
    deviations = y - y.mean()
    return 1 - float(np.square(residuals).sum() / np.square(deviations).sum())


def _minus_control(mine: OverBins, other: OverBins) -> dict[str, Any]:
    """Entries of a control's row: the model's r minus its own, and the claim; none if undefined."""
    if mine.reason or other.reason:
        return {}
    low, high = statistics.correlation_difference(
        other.interval,
        mine.interval,
        (other.samples, mine.samples),
    )
    difference = mine.interval.value - other.interval.value
    return {
        **with_ends("difference", (difference, low, high)),
        "claim": mine.on_fishers_scale() - other.on_fishers_scale(),
    }


def bounds_together(values: ArrayLike, samples: ArrayLike) -> tuple[Array, Array]:
    """Return bounds that hold for several estimates at once in 95 % of cases.

    Each bound lies q standard deviations of the samples away from its estimate. q is the 95 % point
    of the largest deviation in a sample, counted in standard deviations, but at least 1.96 (Efron
    and Tibshirani 1993; Mammen 1993).

    Args:
        values: Shape (m,), the estimates.
        samples: Shape (resamples, m), the estimates in each bootstrap sample.

    Returns:
        The lower bounds and the upper bounds, each of shape (m,).
    """
    centre = np.asarray(values, dtype=np.float64)
    drawn = np.asarray(samples, dtype=np.float64)
    sd = np.nanstd(drawn, axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        deviations = np.abs(drawn - centre) / sd
    finite = np.where(np.isfinite(deviations), deviations, 0.0)
    largest = finite.max(axis=1)
    # Never narrower than a normal estimate's bound.
    q = max(float(np.quantile(largest, statistics.LEVEL)), statistics.NORMAL_975)
    return centre - q * sd, centre + q * sd


def _with_bounds(rows: list[dict[str, Any]], name: str) -> pd.DataFrame:
    """The rows with ``NAME_low`` and ``NAME_high``, which hold for all claims together."""
    claims = []
    claimed = []
    for number, row in enumerate(rows):
        claim = row.pop("claim", None)
        if claim is not None:
            claims.append(claim)
            claimed.append(number)
    frame = pd.DataFrame.from_records(rows)
    frame[f"{name}_low"] = np.nan
    frame[f"{name}_high"] = np.nan
    if claims:
        values, *samples = np.stack(claims, axis=1)
        low, high = bounds_together(values, samples)
        frame.loc[claimed, f"{name}_low"] = low
        frame.loc[claimed, f"{name}_high"] = high
    return frame
