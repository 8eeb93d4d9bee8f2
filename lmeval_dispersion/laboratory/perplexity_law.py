"""The perplexity law: do texts that a model finds easier lie further apart?

Two passes. The first runs every segment once: its perplexity, its token dispersion, and sums for the
dispersion of all texts. Perplexities alone settle the bins, so the second pass runs only the segments of
the chosen bins again, bin by bin, and their states are forgotten with the bin. For n segments and K bins
of s segments it costs K s / n of the first pass (less for short contexts); the alternative, keeping every
segment's state of every layer until the bins are known, takes n x layers x width numbers on disk.

Source: RD sections 2.2, A.1.2 (bins, algorithm 1), A.4 (held-out split), A.5 (Vendi score).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import dispersion_estimate, vendi_score
from lmeval_dispersion.laboratory.diff_erank import TokenRanks, token_ranks
from lmeval_dispersion.laboratory.engine import Engine, last_vectors, token_dispersions
from lmeval_dispersion.laboratory.law_result import LawResult, correlations, left_out, overall
from lmeval_dispersion.laboratory.runs import Run
from lmeval_dispersion.laboratory.segments import Segments
from lmeval_dispersion.laboratory.statistics import effective_rank, perplexity, sorted_bins, uniform_bins
from lmeval_dispersion.laboratory.study import (
    DataLike,
    Folder,
    as_texts,
    batch_size,
    batches,
    check_finite,
    data_settings,
    model_settings,
    opened,
    segments_of,
    summary_of,
)
from lmeval_dispersion.laboratory.sums import add_vectors, empty_sums
from lmeval_dispersion.model.loading import ModelLike
from lmeval_dispersion.model.texts import Texts

CONTEXTS = (16, 64, 128, 256)
SEQUENCE = "sequence"  # perplexity of the whole segment; "last@16" is that of the token after 16

_BIN_VALUES = ("dispersion", "dispersion_se", "vendi_score", "effective_rank")


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
        pack: Join the texts of a source to one stream before cutting.
        seed: Of the draw, the bootstrap and the random weights.
        batch: Segments a forward pass; by memory if None.
        folder: Where the run is kept and can be resumed; a temporary place if None.
        quiet: Whether to say nothing on stderr.

    Raises:
        UsageError: What was asked for does not fit the model or the data.
        TooFewVectorsError: There are fewer segments than one bin.
        NonFiniteStateError: The model produces NaN; names layer and text.
    """
    texts, other = as_texts(data), None if held_out is None else as_texts(held_out)
    if bins < 3 or bin_size < 3:
        raise UsageError(f"expected at least 3 bins of at least 3 segments, got {bins} of {bin_size}")
    used = [int(c) for c in contexts if 0 < c < segment]
    settings = {
        "model": model_settings(model),
        "data": data_settings(texts),
        "held_out": data_settings(other),
        **{"segment": segment, "segments": segments, "layers": layers, "bins": bins, "bin_size": bin_size},
        **{"contexts": used, "diff_erank": diff_erank, "pack": pack, "seed": seed},
    }
    with opened("law", settings, folder, quiet) as run:
        if not run.complete:
            _Law(run, Engine(model), settings, batch).study({"data": texts, "held-out": other})
        return LawResult.of(run)


class _Law:
    """The study at work."""

    def __init__(self, run: Run, engine: Engine, settings: dict[str, Any], batch: int | None) -> None:
        self.run, self.engine, self.settings = run, engine, settings
        self.names = engine.layers(settings["layers"])
        self.index = {name: i for i, name in enumerate(self.names)}
        self.contexts: list[int] = settings["contexts"]
        self.length: int = settings["segment"]
        self.batch = batch_size(run, engine, batch, self.length, len(self.names))

    def study(self, sources: dict[str, Texts | None]) -> None:
        """Both passes, and the tables."""
        splits = [self.first_pass(name, texts) for name, texts in sources.items() if texts is not None]
        units = [unit for split in splits for unit in self.bins(split)]
        values = self.run.rows("bins", (len(units), len(self.names), len(_BIN_VALUES)))
        self.run.work("bins", len(units), lambda number: self.one_bin(units[number], values, number))
        ranks: dict[int, TokenRanks] = {}
        if self.settings["diff_erank"]:
            sequence = [number for number, unit in enumerate(units) if unit.perplexity == SEQUENCE]
            groups = [(units[number].split.segments.tokens, units[number].members) for number in sequence]
            found = token_ranks(self.run, self.engine, groups, self.batch, self.settings["seed"])
            ranks = dict(zip(sequence, found, strict=True))
        points = pd.DataFrame.from_records(list(self.points(units, values, ranks)))
        seed = self.settings["seed"]
        every = pd.concat([overall(s.name, self.names, s.nll[:, 0], s.tokens, s.sums, seed) for s in splits])
        self.run.finish(
            {
                "points": points,
                "correlations": correlations(points, seed),
                "overall": every,
                "jackknife": pd.concat([left_out(s.name, self.names, s.nll[:, 0], s.sums) for s in splits]),
            },
            model=summary_of(self.engine),
            counts={split.name: split.segments.counts.as_dict() for split in splits},
        )

    def first_pass(self, name: str, texts: Texts) -> _Split:
        """Every segment once: perplexities, token dispersions, sums over all texts."""
        settings = self.settings
        drawn = segments_of(
            self.run,
            name,
            texts,
            self.engine,
            length=self.length,
            count=settings["segments"],
            seed=settings["seed"],
            pack=settings["pack"],
        )
        n = len(drawn.tokens)
        sorted_bins(np.zeros(n), settings["bin_size"])  # too few segments are told before the work, not after
        nll = self.run.rows(f"{name}.nll", (n, 1 + len(self.contexts)))
        tokens = self.run.rows(f"{name}.tokens", (n, len(self.names)))
        sums = {"sums": empty_sums(len(self.names), self.engine.width)}
        after = [context - 1 for context in self.contexts]  # NLL column of the token after so many
        dtype = str(self.engine.loaded.model.dtype).removeprefix("torch.")

        def see(layer: str, first: int, states: Tensor) -> None:
            rows, place = slice(first, first + len(states)), self.index[layer]
            vectors = last_vectors(states)
            check_finite(vectors, layer, drawn.origins[rows], texts.source, dtype)
            tokens[rows, place] = token_dispersions(states)
            check_finite(tokens[rows, place], layer, drawn.origins[rows], texts.source, dtype)
            add_vectors(sums["sums"], place, first, vectors)

        def score(first: int, losses: Tensor) -> None:
            rows = slice(first, first + len(losses))
            found = losses.numpy()
            check_finite(found, "the output", drawn.origins[rows], texts.source, dtype)
            nll[rows, 0] = found.mean(axis=1)
            nll[rows, 1:] = found[:, after]

        def one_batch(number: int) -> None:
            start = number * self.batch
            self.engine.run(drawn.tokens[start : start + self.batch], self.names, see, score, start)

        total = self.run.work(f"{name}.pass", batches(n, self.batch), one_batch, sums)
        return _Split(name, texts.source, drawn, np.asarray(nll), np.asarray(tokens), total["sums"])

    def bins(self, split: _Split) -> Iterator[_Bin]:
        """The chosen bins of one split, by each of its perplexities."""
        kinds = [(SEQUENCE, self.length), *((f"last@{context}", context) for context in self.contexts)]
        for column, (kind, length) in enumerate(kinds):
            values = perplexity(split.nll[:, column])
            runs = sorted_bins(values, self.settings["bin_size"])
            for number in uniform_bins(values[runs].mean(axis=1), self.settings["bins"]):
                yield _Bin(split, kind, column, length, int(number), runs[number])

    def one_bin(self, unit: _Bin, values: NDArray[np.float64], number: int) -> None:
        """A bin's states, layer by layer, and what they say; then they are forgotten."""
        members = np.sort(unit.members)
        held: dict[str, list[NDArray[np.float32]]] = {name: [] for name in self.names}
        for start in range(0, len(members), self.batch):
            tokens = np.asarray(unit.split.segments.tokens[members[start : start + self.batch]])
            self.engine.run(
                tokens[:, : unit.length],
                self.names,
                lambda layer, _first, states: held[layer].append(last_vectors(states)),
            )
        for layer, parts in held.items():
            vectors = np.concatenate(parts)
            source = unit.split.source
            check_finite(vectors, layer, unit.split.segments.origins[members], source)
            estimate = dispersion_estimate(vectors)
            values[number, self.index[layer]] = (
                estimate.mean,
                estimate.se,
                vendi_score(vectors),
                effective_rank(vectors),
            )

    def points(
        self, units: list[_Bin], values: NDArray[np.float64], ranks: dict[int, TokenRanks]
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
                if layer == "last" and number in ranks:
                    record.update(ranks[number]._asdict())
                yield record
