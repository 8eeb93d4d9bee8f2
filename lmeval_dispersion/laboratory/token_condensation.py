"""Condensation: do the tokens of a text grow more similar from layer to layer?

For each text and layer the mean cosine similarity over pairs of different tokens is measured, and
their histogram. Depth 0 is the input of the first block, depth k the output of block k, and the
last depth the final layer after its norm: the ``hidden_states`` of transformers, for decoders and
encoders alike. Similarity is 1 - dispersion over the tokens of one text. Models of several sizes
are compared text by text if they read the same tokens.

Source: LD section 2. The released code counts every token's similarity with itself, divides by
max(norm, 1e-3), averages the matrices of all texts and takes the histogram of that average.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmeval_dispersion import statistics
from lmeval_dispersion.arguments import takes
from lmeval_dispersion.errors import GeometryError, UsageError
from lmeval_dispersion.laboratory import charts
from lmeval_dispersion.laboratory.arguments import Condensation
from lmeval_dispersion.laboratory.models import (
    as_controls,
    read_either_way,
    token_dispersions,
    unit_tokens,
)
from lmeval_dispersion.laboratory.report import StudyResult, bounded, records, table, with_ends
from lmeval_dispersion.laboratory.study import (
    Study,
    TableRow,
    as_models,
    studied,
)
from lmeval_dispersion.model.loading import model_choice
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.report.declared import listed
from lmeval_dispersion.statistics import Array

BINS = 128

LAST = (1, 2, 3, 4, 5)  # numbers of last depths whose mean the paper gives, besides half of them

_SHOWN = 12  # depths in a table without details
_STEP = 1.1  # times the parameters: a model is larger
_TURN = 0.1  # share of a curve's range: a smaller reversal is not a turn

_CONTROL = Col(
    "Control", hint="untrained: random weights; shuffled: each text's tokens in random order"
)
_DEPTHS = {
    "model": Col("Model"),
    "control": _CONTROL,
    "depth": Col(
        "Depth",
        "d",
        hint="0 is the input of the first block; the last is after the final norm, if any",
    ),
    "fraction": Col("Layer fraction", ".2f", short="Fraction", drop=2),
    "layer": Col("Layer"),
    **bounded("mean", "Mean", ".4f"),
}
_LAST = {
    "model": Col("Model"),
    "control": _CONTROL,
    **{str(count): Col(f"Last {count}", ".3f") for count in LAST},
    "half": Col("Last half", ".3f"),
}
_PAIRS = {
    "model": Col("Model"),
    "other": Col("Against", hint="the next smaller model, or the teacher model"),
    **bounded("difference", "Difference", "+.4f", ("difference_low", "difference_high")),
    "texts": Col("Texts", "d", drop=3),
}
_HINT = "correlation of similarity and depth in each text, averaged over texts"
_TRENDS = {
    "model": Col("Model"),
    "control": _CONTROL,
    **bounded("trend", "Spearman", "+.2f", ("trend_low", "trend_high"), hint=_HINT),
}
_EVERY_TREND = {
    **_TRENDS,
    "curve": Col("Curve"),
    "last_mean": Col("Mean of the last depths", ".3f", short="Last mean", drop=2),
    "kendall": Col("Kendall of the means", "+.2f", short="Kendall", drop=4),
    "texts": Col("Texts", "d", drop=3),
    "reason": Col("Why undefined"),
}


@dataclass(frozen=True, repr=False)
class CondensationResult(StudyResult):
    """How similar the tokens of a text are at each depth, for one or several models.

    Depth 0 is the input of the first block, depth k the output of block k; the last depth is after
    the final norm, if there is one. docs/reference/laboratory.md lists every column of the tables.
    ``control`` is empty in the rows of the model itself.

    Attributes:
        summary: One row for each model and control: the correlation of similarity and depth
            (``trend``, the mean of the texts' Spearman correlations, and ``spearman`` and
            ``kendall`` of the mean similarities), ``last_mean``, the mean similarity over the last
            depths, and the number of ``parameters``.
        layers: One row for each model, control and depth: the ``mean`` cosine similarity over pairs
            of different tokens, with 95 % bounds.
        histogram: One row for each model, control, depth and bin of similarity: its ``density``,
            which integrates to 1 over [-1, 1].
        texts: One row for each model, control, depth and text: the ``mean`` similarity.
        last: One row for each model, control and number of last depths (1 to 5, ``half``): the
            ``mean`` similarity over them.
        sizes: One row for each family (models of different sizes that read the same tokens): the
            ``change`` of ``last_mean`` from the smallest to the largest, by a line fitted to the
            log of the size, with 95 % bounds over texts.
        pairs: One row for each comparison of a model with the next smaller one of its family, or
            with the teacher (``relation``: ``size`` or ``teacher``): the ``difference`` of
            ``last_mean``, with 95 % bounds over texts.
        manifest: The settings; for each model its identity, the library versions, and how many
            texts and segments were read.
    """

    summary: pd.DataFrame
    layers: pd.DataFrame
    histogram: pd.DataFrame
    texts: pd.DataFrame
    last: pd.DataFrame
    sizes: pd.DataFrame
    pairs: pd.DataFrame

    kind = "condensation"
    main = "layers"
    template = "condensation.jinja"

    def tables(self) -> dict[str, Table]:
        """Return the tables of the report by name.

        - ``layers``: the mean similarity at every depth;
        - ``last``: the mean similarity over the last depths;
        - ``pairs``: the differences between models, if any are compared;
        - ``some``: the similarity at no more than 12 depths, for one model without controls;
        - ``trends`` and ``every_trend``: the correlations of similarity and depth, for several
          models or with controls.
        """
        caption = "Mean cosine similarity of two tokens of a text"
        wide = self.last.pivot(index=["model", "control"], columns="last", values="mean")
        order = self.summary[["model", "control"]]
        last = order.merge(wide.reset_index())
        tables = {
            "layers": table(self.layers, caption, _DEPTHS),
            "last": table(last, "Mean similarity of tokens in the last layers", _LAST),
        }
        if len(self.pairs):
            about = (
                "Similarity of tokens in the last layers: the model minus the one that it is "
                "compared with, paired over texts"
            )
            tables["pairs"] = table(self.pairs, about, _PAIRS)
        if len(self.summary) == 1:
            columns = dict(_DEPTHS)
            del columns["model"]
            tables["some"] = table(self.layers, caption, columns, most=_SHOWN)
            return tables
        curves = {trend["model"]: trend["curve"] for trend in self._trends()}
        is_control = self.summary["control"] != ""
        curve = self.summary["model"].map(curves).mask(is_control, "")
        with_curve = self.summary.assign(curve=curve)
        caption = "Spearman correlation of similarity and depth"
        tables["trends"] = table(self.summary, caption, _TRENDS, most=_SHOWN)
        tables["every_trend"] = table(with_curve, f"{caption}, and the curve", _EVERY_TREND)
        return tables

    def charts(self) -> dict[str, Chart]:
        """Return two charts of the similarity by depth.

        - ``lines``: the mean similarity;
        - ``heat``: the distribution of the similarities of pairs of tokens.
        """
        lines = partial(charts.condensation_lines, self.layers)
        heat = partial(charts.condensation_heat, self.histogram)
        return {
            "lines": Chart(lines, "Mean cosine similarity by depth", "One line for each model."),
            "heat": Chart(
                heat,
                "How the similarities are distributed at every depth",
                "One heat map for each model.",
            ),
        }

    def context(self) -> dict[str, Any]:
        """Return the values that the report's template needs.

        In addition to those of `StudyResult` these are:

        - ``trends``: for each model, what `shape_of_curve` returns;
        - ``controls``: names of the controls that were run;
        - ``families``: sentences that compare models.
        """
        controls = [name for name in dict.fromkeys(self.summary["control"]) if name]
        last = int(self.summary["last"].max())
        pairs = records(self.pairs)
        of_sizes = [size_sentence(row, pairs, last) for row in records(self.sizes)]
        return {
            **super().context(),
            "trends": self._trends(),
            "controls": controls,
            "families": [*of_sizes, *teacher_sentences(pairs)],
        }

    def _trends(self) -> list[dict[str, Any]]:
        models = list(dict.fromkeys(self.texts["model"]))
        trends = []
        for name in models:
            of_model = self.texts[self.texts["model"] == name]
            trends.append(shape_of_curve(name, of_model, len(models)))
        return trends


def size_sentence(family: Mapping[str, Any], pairs: Sequence[Mapping[str, Any]], last: int) -> str:
    """Return a sentence that says whether the larger models of a family condense less or more.

    A model condenses less if the tokens of a text are less similar in its last layers.

    Args:
        family: A row of the table ``sizes``.
        pairs: The rows of the table ``pairs``. The sentence names the steps in size at which the
            similarity changes the other way.
        last: Number of last depths that are compared.
    """
    models = family["models"].split(", ")
    change = family["change"]
    layers = "layer" if last == 1 else f"{last} layers"
    what = f"the similarity of tokens in the last {layers}"
    of = f"Among {listed(models)}, on these texts"
    if family["change_low"] <= 0 <= family["change_high"]:
        ends = f"95 % interval {family['change_low']:+.3f} to {family['change_high']:+.3f}"
        return (
            f"{of}, larger models do not clearly condense less or more: {what} changes by "
            f"{change:+.3f} ({ends}) from the smallest to the largest."
        )
    steps = 0
    along = 0
    against = []
    for row in pairs:
        if row["relation"] != "size" or row["model"] not in models:
            continue
        steps += 1
        if _direction(row) == np.sign(change):
            along += 1
        elif _direction(row) == -np.sign(change):
            against.append(f"{row['model']} compared with {row['other']}")
    more = ""
    if against:
        more = f", except for {listed(against)}"
    elif along == steps > 1:
        more = ", at each step in size"
    word = "less" if change < 0 else "more"
    way = "falls" if change < 0 else "rises"
    low, high = sorted(abs(family[name]) for name in ("change_low", "change_high"))
    return (
        f"{of}, larger models condense {word}{more}: {what} {way} by {abs(change):.3f} "
        f"(95 % interval {low:.3f} to {high:.3f}) from the smallest to the largest."
    )


def teacher_sentences(pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each model that is compared with its teacher.

    A model condenses more than its teacher if the tokens of a text are more similar in the model's
    last layers than in the teacher's.

    Args:
        pairs: The rows of the table ``pairs`` of a `CondensationResult`.
    """
    verdicts = {1: "condenses more than", -1: "condenses less than"}
    sentences = []
    for row in pairs:
        if row["relation"] != "teacher":
            continue
        ends = f"95 % interval {row['difference_low']:+.3f} to {row['difference_high']:+.3f}"
        unclear = "condenses neither clearly more nor clearly less than"
        verdict = verdicts.get(_direction(row), unclear)
        about = f"{row['model']} {verdict} its teacher {row['other']}"
        sentences.append(
            f"{about}: the similarity of tokens in the last layers differs by "
            f"{row['difference']:+.3f} ({ends})."
        )
    return sentences


def _direction(pair: Mapping[str, Any]) -> int:
    """1 or -1 where the model's similarity is clearly above or below the other's; else 0."""
    if pair["difference_low"] > 0:
        return 1
    return -1 if pair["difference_high"] < 0 else 0


def shape_of_curve(model: str, texts: pd.DataFrame, claims: int) -> dict[str, Any]:
    """Return how the similarity of one model's tokens changes with depth.

    The curve is the mean similarity at each depth. The trend is the Spearman correlation of
    similarity and depth in each text, averaged over texts.

    Args:
        model: Name of the model.
        texts: The rows of the table ``texts`` of this model and its controls.
        claims: Number of models whose 95 % bounds are to hold at once (Bonferroni).

    Returns:
        A mapping with these entries.

        - ``model``: the name of the model;
        - ``verdict``: ``alike`` if the curve only rises, ``apart`` if it only falls, ``turns`` if
            it does both, ``none`` if no change is clear, ``undefined`` with fewer than two
            texts whose similarity varies with depth;
        - ``curve``: the curve in words; empty if no change is clear;
        - ``like``: with ``alike`` or ``apart``, names of the controls whose trend is not clearly
            weaker than that of the model;
        - ``beyond``: with ``alike`` or ``apart``, names of all controls, if the trend of each is
          clearly weaker;
        - ``key``: a text that is equal for models with the same verdict, ``like`` and ``beyond``;
        - ``controls``: the trend of each control, by name;
        - ``value``, ``low`` and ``high``: the trend of the model and its 95 % bounds.
    """
    similarities = {}
    for control, frame in texts.groupby("control", sort=False):
        wide = frame.pivot(index="text", columns="depth", values="mean")
        similarities[str(control)] = wide.to_numpy()
    trends = {control: text_trends(values) for control, values in similarities.items()}
    mine = trends.pop("")
    interval = _student(mine, claims)
    sign, ends = moves(similarities[""], claims)
    word = "none"
    like: list[str] = []
    if np.isfinite(mine).sum() < 2:
        word = "undefined"
    elif len(ends) > 2:
        word = "turns"
    elif sign:
        word = "alike" if sign > 0 else "apart"
        for control, values in trends.items():
            difference = _student(sign * (mine - values), claims * len(trends))
            if not difference.low > 0:
                like.append(control)
    beyond = []
    if word in ("alike", "apart") and not like:
        beyond = list(trends)
    return {
        "model": model,
        "verdict": word,
        "curve": _curve(sign, ends, similarities[""]) if sign else "",
        "like": like,
        "beyond": beyond,
        "key": " ".join([word, *like, "/", *beyond]),
        "controls": {control: _student(values).value for control, values in trends.items()},
        "value": interval.value,
        "low": interval.low,
        "high": interval.high,
    }


def moves(values: Array, claims: int = 1) -> tuple[int, list[int]]:
    """Find where the mean curve of similarity begins, turns and ends.

    A rise or fall is clear if it is at least a tenth of the curve's range, and if its 95 % bounds
    over texts (Student's) exclude 0. These bounds hold for all pairs of depths and all ``claims``
    curves at once.

    Args:
        values: Shape (texts, depths), the similarity of each text at each depth. Texts with NaN are
            left out.
        claims: Number of curves whose bounds are to hold at once.

    Returns:
        The first direction (1 for a rise, -1 for a fall), and the depths at which the curve begins,
        turns and ends. If no change is clear, or if the mean curve has an unclear reversal by a
        quarter of its range or more, the direction is 0 and the list is empty.
    """
    is_finite = np.isfinite(values).all(axis=1)
    values = values[is_finite]
    if not len(values):
        return 0, []
    mean = values.mean(axis=0)
    depths = values.shape[1]
    comparisons = claims * depths * (depths - 1) // 2

    def large(start: int, end: int, share: float = 0.25) -> int:
        change = float(mean[end] - mean[start])
        if abs(change) < share * np.ptp(mean):
            return 0
        return (change > 0) - (change < 0)

    def sure(start: int, end: int) -> int:
        changes = values[:, end] - values[:, start]
        interval = _student(changes, comparisons)
        if interval.low > 0 or interval.high < 0:
            return large(start, end, _TURN)
        return 0

    first, ends = _zigzag(mean, sure)
    _, large_ends = _zigzag(mean, large)
    if len(large_ends) > len(ends):
        return 0, []
    return first, ends


def _zigzag(curve: Array, way: Callable[[int, int], int]) -> tuple[int, list[int]]:
    """The first sign of ``way`` between points of a curve, and where it begins, turns and ends."""
    first = 0
    sign = 0
    top = 0
    bottom = 0
    turns: list[int] = []
    for place in range(1, len(curve)):
        top = max(top, place, key=curve.__getitem__)
        bottom = min(bottom, place, key=curve.__getitem__)
        step = (sign >= 0 and way(top, place)) or (sign <= 0 and way(bottom, place))
        if not step:
            continue
        if sign:
            turns.append(top if sign > 0 else bottom)
        else:
            first = step
        sign = step
        top = place
        bottom = place
    if not first:
        return 0, []
    return first, [0, *turns, len(curve) - 1]


def _curve(sign: int, ends: Sequence[int], values: Array) -> str:
    """A curve in words: ``rises from 0.24 to 0.39 at depth 1 of 3, then falls to 0.34``."""
    mean = np.nanmean(values, axis=0)
    words = []
    for number, depth in enumerate(ends[1:]):
        way = "rises" if sign * (-1) ** number > 0 else "falls"
        start = "" if number else f" from {mean[0]:.2f}"
        place = "" if depth == ends[-1] else f" at depth {depth} of {ends[-1]}"
        words.append(f"{way}{start} to {mean[depth]:.2f}{place}")
    return ", then ".join(words)


def _student(values: Array, claims: int = 1) -> statistics.Interval:
    """Mean of the finite values, with Student bounds that hold for ``claims`` such means (Bonferroni)."""
    finite = values[np.isfinite(values)]
    level = 1 - (1 - statistics.LEVEL) / claims
    low, high = statistics.student_interval(finite, level)
    mean = float(finite.mean()) if len(finite) else float("nan")
    return statistics.Interval(mean, low, high)


def text_trends(per_text: Array) -> Array:
    """Return the Spearman correlation of similarity and depth for each text.

    Texts are independent, so the mean of these correlations has a valid interval even if layers
    hardly differ; a bootstrap of the layer means' correlation would exclude 0 far too often.

    Args:
        per_text: Shape (n, depths), the similarity of each text at each depth.

    Returns:
        Shape (n,); NaN for a text whose similarity is the same at all depths.
    """
    depths = np.arange(per_text.shape[1])
    return statistics.rank_correlations(depths, per_text)


@takes(Condensation)
def condensation(asked: Condensation) -> CondensationResult:
    """Measure how similar the tokens of a text are, depth by depth, in one model or several.

    Decoders and encoders can be measured. Models of different sizes that read the same tokens, and
    each model and its teacher, are compared by their mean similarity over the last depths.

    Raises:
        UsageError: A setting does not fit a model or the text, or the teacher's tokenizer differs.
        NonFiniteStateError: A model produces NaN or infinity; the message names the layer and the
            text.
    """
    settings: dict[str, Any] = {
        "segments": asked.segments,
        "last": asked.last,
        "layers": "depths",
        "control": as_controls(asked.control),
    }
    chosen = as_models(asked.models)
    names = [str(model_choice(model)) for model in chosen]
    teacher = "" if asked.teacher is None else str(model_choice(asked.teacher))
    if asked.teacher is not None and teacher not in names:
        chosen.append(asked.teacher)
    manifest, tables = studied(
        "condensation",
        _measure,
        chosen,
        asked.data,
        settings,
        asked,
        read=read_either_way,
    )
    of_teacher = ""
    if teacher:
        place = manifest["names"]["models"].index(teacher)
        of_teacher = manifest["models"][place]["model"]
    tokens = {each["model"]: each["segments"]["data"]["sha256"] for each in manifest["models"]}
    compared = comparisons(tables["texts"], tables["summary"], tokens, of_teacher)
    return CondensationResult(manifest, **tables, **compared)


def comparisons(
    texts: pd.DataFrame, summary: pd.DataFrame, tokens: Mapping[str, str], teacher: str = ""
) -> dict[str, pd.DataFrame]:
    """Compare models by their mean similarity over the last depths.

    Only models that read the same tokens are compared, and two sizes only if the larger has clearly
    more parameters. The 95 % bounds of both tables hold jointly.

    Args:
        texts: The table ``texts`` of a `CondensationResult`.
        summary: The table ``summary`` of the same result.
        tokens: A digest of the tokens that each model read, by the model's name.
        teacher: Name of the teacher; empty if there is none.

    Returns:
        The tables ``sizes`` and ``pairs`` of a `CondensationResult`.

    Raises:
        UsageError: The teacher and another model did not read the same tokens.
    """
    own = records(summary[summary["control"] == ""])
    parameters = {row["model"]: row["parameters"] for row in own}
    plain = texts[texts["control"] == ""]
    means: dict[str, Array] = {}
    for row in own:
        of_model = plain[plain["model"] == row["model"]]
        wide = of_model.pivot(index="text", columns="depth", values="mean").to_numpy(dtype=float)
        means[row["model"]] = wide[:, -row["last"] :].mean(axis=1)
    groups: dict[str, list[str]] = {}
    for model in sorted(means, key=parameters.__getitem__):
        groups.setdefault(tokens[model], []).append(model)
    families = []
    wanted = []
    for names in groups.values():
        if parameters[names[-1]] < _STEP * parameters[names[0]]:
            continue
        families.append(names)
        for other, model in itertools.pairwise(names):
            if parameters[model] >= _STEP * parameters[other]:
                wanted.append((model, other, "size"))
    for model in means:
        if not teacher or model == teacher:
            continue
        if tokens[model] != tokens[teacher]:
            raise UsageError(
                f"expected a teacher that reads the same tokens as {model}, got {teacher}, whose "
                "tokenizer cuts the text differently; choose models that share a tokenizer",
                argument="teacher",
            )
        wanted.append((model, teacher, "teacher"))
    claims = len(families) + len(wanted)
    sizes = []
    for names in families:
        numbers = [float(parameters[name]) for name in names]
        changes = _fitted_changes(numbers, np.array([means[name] for name in names]))
        size = {
            "models": ", ".join(names),
            "texts": len(changes),
            **with_ends("change", _student(changes, claims)),
        }
        sizes.append(size)
    pairs = []
    for model, other, relation in wanted:
        differences = means[model] - means[other]
        pair = {
            "model": model,
            "other": other,
            "relation": relation,
            "texts": len(differences),
            **with_ends("difference", _student(differences, claims)),
        }
        pairs.append(pair)
    nothing = (float("nan"),) * 3
    of_sizes = ["models", "texts", *with_ends("change", nothing)]
    of_pairs = ["model", "other", "relation", "texts", *with_ends("difference", nothing)]
    return {
        "sizes": pd.DataFrame(sizes, columns=of_sizes),
        "pairs": pd.DataFrame(pairs, columns=of_pairs),
    }


def _fitted_changes(parameters: Sequence[float], means: Array) -> Array:
    """For each text the change from the smallest to the largest model, (models, texts) -> (texts,).

    It is that of a line fitted to the log of the models' sizes.
    """
    sizes = np.log(parameters)
    scale = (sizes - sizes.mean()) / np.ptp(sizes)
    return np.asarray(scale @ means / (scale @ scale))


def _measure(study: Study) -> Iterator[TableRow]:
    settings = study.settings
    causal, names = study.loaded(losses=False)
    drawn = study.segments("data", causal, settings["segments"])
    for control in ("", *settings["control"]):
        model = causal.control(control, settings["seed"])
        states = study.states(f"texts {control}", model, drawn, names, _mean_and_histogram)
        of_texts = np.stack([states[name] for name in names], axis=1)
        means = of_texts[..., 0]
        counts = of_texts[..., 1:].sum(axis=0)
        rows = rows_of(names, means, counts, settings["seed"], settings["last"])
        for name, row in rows:
            if name == "summary":
                row["parameters"] = study.facts["parameters"]
            yield name, {"control": control, **row}


def _mean_and_histogram(states: Tensor) -> Array:
    """For each text the mean similarity, then the histogram."""
    means = 1 - token_dispersions(states)
    histograms = [similarity_counts(text) for text in states]
    return np.column_stack([means, histograms])


def similarity_counts(states: Tensor) -> NDArray[np.int64]:
    """Count the cosine similarities of all pairs of different tokens in a histogram.

    Args:
        states: Shape (t, d), the states of one text. States that are zero are left out.

    Returns:
        Shape (BINS,), int64: the number of pairs in each of BINS equal bins over [-1, 1].
    """
    units, valid = unit_tokens(states[None])
    unit = units[0][valid[0]]
    similarity = (unit @ unit.T).clamp(-1, 1)
    similarity.fill_diagonal_(1.0)
    histogram = torch.histc(similarity, BINS, -1, 1)
    counts = histogram.cpu().numpy().astype(np.int64)
    counts[-1] -= len(unit)  # the diagonal
    return np.asarray(counts // 2)


def rows_of(
    names: list[str], means: Array, counts: NDArray[Any], seed: int = 0, last: int = 3
) -> Iterator[TableRow]:
    """Yield the rows of one model's tables, each with the name of its table.

    Args:
        names: Name of the layer at each depth.
        means: Shape (texts, depths), the mean similarity of each text at each depth.
        counts: Shape (depths, bins), the histogram of all texts at each depth.
        seed: Seed of the bootstrap.
        last: Number of last depths whose mean is ``last_mean``.
    """
    from scipy.stats import kendalltau

    depths = np.arange(len(names))
    bins = counts.shape[1]
    reason = ""
    layer_means = means.mean(axis=0)
    try:
        rho = statistics.correlation(depths, layer_means, "spearman")
        tau = float(kendalltau(depths, layer_means).statistic)
    except GeometryError as error:
        rho = float("nan")
        tau = float("nan")
        reason = str(error)
    of_last = means[:, -last:].mean(axis=1)
    summary = {
        "texts": len(means),
        "depths": len(names),
        **with_ends("trend", _student(text_trends(means))),
        "spearman": rho,
        "kendall": tau,
        **with_ends("last_mean", statistics.mean_interval(of_last, seed)),
        "last": min(last, len(names)),
        "reason": reason,
    }
    yield "summary", summary
    numbers = {str(number): number for number in LAST}
    numbers["half"] = max(1, (len(names) - 1) // 2)  # of the blocks
    for word, number in numbers.items():
        if number > len(names):
            continue
        of_last = means[:, -number:].mean(axis=1)
        interval = statistics.mean_interval(of_last, seed)
        yield "last", {"last": word, "depths": number, **_mean_row(interval)}
    edges = np.linspace(-1, 1, bins + 1)
    with np.errstate(invalid="ignore"):
        # NaN if a layer has no similarity.
        density = counts / counts.sum(axis=1, keepdims=True) * bins / 2
    for depth, name in enumerate(names):
        interval = statistics.mean_interval(means[:, depth], seed)
        layer = {
            "depth": depth,
            "fraction": depth / max(1, len(names) - 1),
            "layer": name,
            **_mean_row(interval),
        }
        yield "layers", layer
        for low, high, value in zip(edges, edges[1:], density[depth], strict=False):
            yield "histogram", {"depth": depth, "low": low, "high": high, "density": value}
    for text, values in enumerate(means):
        for depth, name in enumerate(names):
            yield "texts", {"depth": depth, "layer": name, "text": text, "mean": values[depth]}


def _mean_row(interval: statistics.Interval) -> dict[str, Any]:
    """A mean and its bounds as entries of a row."""
    return {"mean": interval.value, "low": interval.low, "high": interval.high}
