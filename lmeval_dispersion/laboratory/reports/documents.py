"""What an analysis found, or what differs between two studies, as a report that says how to read it.

The versioned JSON holds the manifest and every table, CSV the frame of ``to_frame()``; readers are shown the
tables that matter, charts, and what the numbers do not say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pandas as pd

from lmeval_dispersion.laboratory.reports.answers import (
    clusters_answer,
    comparison_answer,
    condensation_answer,
    law_answer,
    sublayers_answer,
)
from lmeval_dispersion.report import Chart, Column, Document, Facts, Section, Table, Text

REPORT_FORMAT = "dispersion-lab-report/1"
COMPARISON_FORMAT = "dispersion-lab-comparison/1"

_FLOAT = "%.9g"
_SHOWN_NGRAMS = 20
_PANELS = 6  # layers that have a panel each; more are rows of a heat map

_TITLES = {
    "law": "Perplexity law",
    "sublayers": "Choice of sub-layer",
    "condensation": "Condensation",
    "clusters": "Semantic clusters",
}

_QUESTIONS = {
    "law": "Do texts that the model finds easier lie further apart? A negative r says so.",
    "sublayers": "Which state of the block should key a kNN-LM: the one whose vectors lie further apart.",
    "condensation": "Do the tokens of a text point ever more the same way as they pass through the layers?",
    "clusters": "Contexts that go on with the same words: how far apart in a cluster, how far the clusters.",
}

_LIMITS = {
    "law": (
        "A correlation over bins of one model's texts, not a cause, and not a comparison of models.",
        "Intervals resample bins, which were chosen for their perplexity: they cover the states of these "
        "bins, not another corpus.",
        "Bins average away most of what varies from text to text, so r says little about a single text.",
        "Algorithm 1 spreads the bins over the range of perplexity, so rare hard texts weigh as much as "
        "common ones.",
        "Dispersion compares a model with itself or its siblings only; tokenizers must match.",
    ),
    "sublayers": (
        "Higher dispersion is a hint at the better key, not a proof; `--knn` measures.",
        "Draws come from one pool of segments, so their spread says how well a draw of that size is known, "
        "not what another corpus would give.",
        "A kNN-LM gains most on text that is like its datastore.",
    ),
    "condensation": (
        "Similarity of raw states: a direction that all tokens share raises it, and a norm that removes it "
        "lowers it, without the model knowing more or less.",
        "The first token is often an outlier.",
        "Compare models on the same text; depth is ranked, so rho says whether the mean moves, not by how "
        "much.",
    ),
    "clusters": (
        "Clusters are made of repeated phrases of this text: templates and headings, not meanings chosen by "
        "hand.",
        "Distances compare checkpoints of one tokenizer, and only those that moved from one start.",
    ),
    "comparison": (
        "Intervals are for the texts that were drawn.",
        "The bounds shown are for one row alone; with many rows about one in twenty leaves out 0 by chance. "
        "The answer counts those that leave it out with bounds for all rows together.",
        "Widths and tokenizers must match for dispersions to be comparable.",
    ),
}

# What readers are shown of a frame, in its order; other columns are in JSON and CSV only.
_COLUMNS = {
    column.key: column
    for column in (
        Column("model", "Model"),
        Column("split", "Text"),
        Column("layer", "Layer"),
        Column("measure", "Measure"),
        Column("segments", "Segments", "d"),
        Column("texts", "Texts", "d"),
        Column(
            "depth",
            "Depth",
            hint="0 is what enters the first block, the last one the final layer after its norm",
        ),
        Column(
            "pearson", "Pearson r", "+.3f", hint="over bins; -1: easier bins are more dispersed, 0: no line"
        ),
        Column("scale", "with", hint="plain perplexity of segments, log perplexity of single tokens"),
        Column("control", "Control", hint="random weights, or the tokens of each text in random order"),
        Column("difference_low", "from", "+.3f"),
        Column("difference_high", "to", "+.3f"),
        Column(
            "trend", "Spearman a text", "+.3f", hint="with depth, of each text's own similarity, averaged"
        ),
        Column("trend_low", "95 % from", "+.3f", hint="Student, over texts"),
        Column("trend_high", "to", "+.3f"),
        Column("spearman", "Spearman", "+.3f", hint="rank correlation"),
        Column("kendall", "Kendall", "+.3f", hint="rank correlation"),
        Column("pearson_plain", "r of plain perplexity", "+.3f", short="r plain", drop=5),
        Column("pearson_log", "r of log perplexity", "+.3f", short="r of log", drop=4),
        Column(
            "line_r2",
            "R² of the line",
            ".3f",
            hint="of the line fitted on data; negative: worse than the mean",
            short="R²",
            drop=1,
        ),
        Column("bins", "Bins", "d", drop=3),
        Column(
            "low",
            "95 % from",
            ".4g",
            hint="this row alone; of r: bootstrap on Fisher's scale",
        ),
        Column("high", "to", ".4g"),
        Column("reason", ""),
        Column(
            "dispersion",
            "Dispersion",
            ".4f",
            hint="mean cosine distance: 0 all parallel, 1 orthogonal on average",
        ),
        Column("dispersion_se", "± (jackknife)", ".4f"),
        Column(
            "token_dispersion",
            "Token dispersion",
            ".4f",
            hint="over the tokens of one text, averaged over texts",
        ),
        Column("perplexity", "Perplexity", ".2f"),
        Column("mean", "Mean", ".4f"),
        Column("sd", "SD over draws", ".4f"),
        Column("draws", "Draws", "d"),
        Column("second", "Second"),
        Column("difference", "Difference", "+.4g"),
        Column(
            "margin",
            "Margin (SD)",
            ".2f",
            hint="difference over the SD of one draw of new text; below 2 they are not told apart",
        ),
        Column("draws_won", "Draws won", "d"),
        Column("lowest_perplexity", "Lowest kNN-LM perplexity"),
        Column(
            "knn", "kNN-LM", hint="agrees or contradicts where the measured difference is told apart from 0"
        ),
        Column("keys", "Keys", "d"),
        Column("base_perplexity", "Model alone", ".3f"),
        Column("gain", "Gain (nats a token)", ".4f", hint="over the model alone"),
        Column("gain_low", "gain from", ".4f"),
        Column("gain_high", "gain to", ".4f"),
        Column("weight", "Weight of kNN", ".2f"),
        Column(
            "temperature", "Temperature", ".2g", hint="multiple of the median distance to the nearest key"
        ),
        Column("first", "First"),
        Column("last_mean", "Mean of the last depths", ".4f"),
        Column("clusters", "Clusters", "d"),
        Column("within", "Within", ".4f", hint="mean distance of members to their centroid"),
        Column("between", "Between", ".4f", hint="mean pair distance of centroids"),
        Column("between_se", "± (jackknife)", ".4f"),
        Column("ratio", "Between / within", ".2f"),
        Column("ratio_low", "95 % from", ".2f", hint="jackknife over clusters"),
        Column("ratio_high", "to", ".2f"),
        Column("ngram", "N-gram"),
        Column("occurrences", "Occurrences", "d"),
        Column("cluster", "Cluster", "d"),
        Column("figure", "Metric"),
        Column("paired", "Paired", hint="whether both studies saw the same tokens"),
    )
}
_OF_CONTROL = Column("difference", "Model minus control", "+.3f")
_OF_WHAT = Column(
    "perplexity", "Perplexity of", hint="sequence: the whole segment; last@c: the token after c tokens"
)


def result_document(result: Any) -> Document:
    """The report of what one of the four analyses found."""
    kind, manifest = result.kind, result.manifest
    models = manifest["models"]
    names = ", ".join(str(model["model"]) for model in models)
    answer, drawn, tables = _PARTS[kind](result)
    settings = {key: _plain(value) for key, value in manifest["settings"].items() if key != "models"}
    named = {key: ", ".join(value) for key, value in manifest["names"].items()}
    run = [named, *models, settings, {**manifest["versions"], "created": manifest["created"]}]
    return Document(
        title=f"{_TITLES[kind]}: {names}",
        answer=answer,
        sections=(
            Section("", [Text(_QUESTIONS[kind])]),
            Section("Charts", drawn),
            Section("Tables", tables),
            Section("What was run", [Facts(facts) for facts in run], details=True),
        ),
        limits=_LIMITS[kind],
        rows=_rows(result.to_frame()),
        fields=list(result.to_frame().columns),
        contract=lambda: _json(
            {
                "format": REPORT_FORMAT,
                "kind": kind,
                "answer": answer,
                "manifest": manifest,
                "tables": {
                    name: _records(value)
                    for name, value in vars(result).items()
                    if isinstance(value, pd.DataFrame)
                },
            }
        ),
        float_format=_FLOAT,
        libraries=("torch", "transformers", "numpy"),
        guide="docs/reference/laboratory.md",
    )


def comparison_document(differences: pd.DataFrame, first: str, second: str) -> Document:
    """The report of two studies, from the frame of :func:`~lmeval_dispersion.laboratory.comparison.compared`.

    Args:
        differences: One row a metric.
        first: Folder of the first study.
        second: Folder of the second.
    """
    numbers = ("first", "second", "difference", "low", "high", "paired")
    about = [name for name in differences.columns if name not in numbers]
    labels = [", ".join(str(v) for v in row if str(v)) for row in differences[about].itertuples(index=False)]
    answer = comparison_answer(differences, labels, first, second)
    chart = Chart(
        lambda: _charts().differences(differences.assign(row=labels)),
        "Difference of every metric; the dashed line is no difference",
        " ".join(answer),
    )
    return Document(
        title="Two studies compared",
        answer=answer,
        sections=(Section("Differences", [chart, _table(differences, "Both studies", perplexity=_OF_WHAT)]),),
        limits=_LIMITS["comparison"],
        rows=_rows(differences),
        fields=list(differences.columns),
        contract=lambda: _json(
            {
                "format": COMPARISON_FORMAT,
                "answer": answer,
                "first": first,
                "second": second,
                "rows": _records(differences),
            }
        ),
        float_format=_FLOAT,
        libraries=("torch", "transformers", "numpy"),
        guide="docs/reference/laboratory.md",
    )


_Parts = tuple[list[str], Sequence[Chart], Sequence[Table]]  # the answer, then what supports it


def _law(result: Any) -> _Parts:
    answer = law_answer(result)
    layers = result.correlations["layer"].nunique()
    drawn = []
    if layers > 1:
        caption = "r of perplexity and dispersion by layer, with 95 % intervals over bins"
        draw = partial(_drawn, "law_layers", result.correlations, result.controls)
        drawn.append(
            Chart(
                draw, caption, answer[0], "Bars are for one layer alone; the answer's hold for all together."
            )
        )
    if layers > _PANELS:
        caption = "Dispersion of every chosen bin by layer, in standard deviations of the layer's bins"
        draw = partial(_drawn, "law_heat", result.points)
        text = "Where the law holds, a row goes from high on the left to low on the right."
        drawn.append(Chart(draw, caption, answer[0], text))
    else:
        drawn.append(
            Chart(
                partial(_drawn, "law_scatter", result.points),
                "Mean perplexity and dispersion of every chosen bin",
                answer[0],
            )
        )
    tables = [
        _table(
            result.correlations, "Correlation of the bins' perplexity with each measure", perplexity=_OF_WHAT
        )
    ]
    if result.controls is not None:
        caption = "The same for controls, and the model's r minus theirs"
        tables.append(_table(result.controls, caption, perplexity=_OF_WHAT, difference=_OF_CONTROL))
    return answer, drawn, [*tables, _table(result.overall, "All texts")]


def _sublayers(result: Any) -> _Parts:
    answer = sublayers_answer(result)
    tables = [
        _table(result.recommendation, "The two of highest dispersion"),
        _table(result.summary, "Dispersion of draws"),
    ]
    if result.knn is not None:
        tables += [
            _table(result.knn, "kNN-LM from each key, on segments that neither built nor tuned it"),
            _table(result.knn_differences, "Difference of the keys, nats a token, first minus second"),
        ]
    return (
        answer,
        [Chart(partial(_drawn, "sublayer_draws", result.draws), "Dispersion of every draw", answer[0])],
        tables,
    )


def _condensation(result: Any) -> _Parts:
    answer = condensation_answer(result)
    drawn = [
        Chart(
            partial(_drawn, "condensation_lines", result.layers),
            "Mean cosine similarity by depth",
            f"One line a model. {answer[0]}",
        ),
        Chart(
            partial(_drawn, "condensation_heat", result.histogram),
            "How the similarities are distributed at every depth",
            f"Heat map. {answer[0]}",
        ),
    ]
    tables = [
        _table(result.summary, "Trend with depth"),
        _table(result.layers, "Mean cosine similarity of two tokens"),
    ]
    return answer, drawn, tables


def _clusters(result: Any) -> _Parts:
    answer = clusters_answer(result)
    ngrams = result.ngrams
    more = f"{len(ngrams) - _SHOWN_NGRAMS} more; json has them all" if len(ngrams) > _SHOWN_NGRAMS else ""
    tables = [
        _table(result.summary, "Distances"),
        _table(ngrams.head(_SHOWN_NGRAMS), "The n-grams", more),
    ]
    return (
        answer,
        [
            Chart(
                partial(_drawn, "cluster_lines", result.summary),
                "Distances within and between clusters",
                answer[0],
            )
        ],
        tables,
    )


_PARTS = {"law": _law, "sublayers": _sublayers, "condensation": _condensation, "clusters": _clusters}


def _drawn(name: str, *frames: Any) -> Any:
    return getattr(_charts(), name)(*frames)


def _table(frame: pd.DataFrame, caption: str, more: str = "", **other: Column) -> Table:
    """The columns of a frame that readers are shown, a reason only where there is one."""
    known = {**_COLUMNS, **other}
    empty = {
        name for name in ("reason", "perplexity", "control") if name in frame and (frame[name] == "").all()
    }
    columns = [known[name] for name in frame.columns if name in known and name not in empty]
    return Table(_rows(frame), columns, caption, more=more)


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as JSON holds them, undefined and infinite numbers as None."""
    return [{key: _json_value(value) for key, value in row.items()} for row in _rows(frame)]


def _json_value(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _charts() -> ModuleType:
    """The module that draws; it needs altair, which only pages do."""
    from lmeval_dispersion.laboratory.reports import charts

    return charts


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else value
