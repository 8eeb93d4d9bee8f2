"""One runner for all analyses: a measure over models and texts, kept in a study that can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.laboratory.causal_model import CausalModel
from lmeval_dispersion.laboratory.controls import control_tokens
from lmeval_dispersion.laboratory.inputs import (
    DataLike,
    as_models,
    as_texts,
    data_settings,
    full_name,
    labels,
    model_settings,
)
from lmeval_dispersion.laboratory.segments import Segments, read_segments, write_segments
from lmeval_dispersion.laboratory.study import Folder, Study, Unit, Units, opened
from lmeval_dispersion.model.loading import ModelLike
from lmeval_dispersion.model.texts import Texts
from lmeval_dispersion.report import Report, Table, nullable
from lmeval_dispersion.report.declared import json_value


@dataclass(frozen=True, repr=False)
class StudyResult(Report):
    """A finished study as a report; its tables are the fields of the four results."""

    schema = "dispersion-lab-report/2"
    libraries = ("torch", "transformers", "numpy")
    guide = "docs/reference/laboratory.md"
    kind: ClassVar[str]
    main: ClassVar[str]  # the table that CSV and to_frame() hold
    manifest: dict[str, Any]

    @classmethod
    def of(cls: type[R], study: Study) -> R:
        """The result of a complete study."""
        tables = study.tables()
        found = {field.name: tables.get(field.name) for field in fields(cls) if field.name != "manifest"}
        return cls(manifest=study.manifest, **found)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the main table."""
        return records(getattr(self, self.main))

    def to_frame(self) -> pd.DataFrame:
        """The main table, tidy."""
        return nullable(getattr(self, self.main))

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract: the answer, the manifest and every table."""
        frames = {name: value for name, value in vars(self).items() if isinstance(value, pd.DataFrame)}
        content = {
            "manifest": self.manifest,
            "tables": {name: records(frame) for name, frame in frames.items()},
        }
        return {"schema": self.schema, "answer": self.answer(), "kind": self.kind, **json_value(content)}

    def context(self) -> dict[str, Any]:
        """For the template: the models' names, and what was run."""
        manifest = self.manifest
        named = {key: ", ".join(value) for key, value in manifest["names"].items()}
        settings = {
            key: json.dumps(value) if isinstance(value, (dict, list)) else value
            for key, value in manifest["settings"].items()
            if key != "models"
        }
        run = [named, *manifest["models"], settings, {**manifest["versions"], "created": manifest["created"]}]
        return {"models": [model["model"] for model in manifest["models"]], "run": run}


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as mappings."""
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def table(row: type[Any], frame: pd.DataFrame, caption: str, *, most: int = 0, **options: Any) -> Table:
    """A table of a dataclass's rows, from the columns of a frame that it names.

    Args:
        row: The dataclass; of fields that the frame lacks the default counts.
        frame: The frame.
        caption: The table's caption.
        most: Take so many rows of the frame, evenly spaced with both ends, and say so; 0: all.
        options: Of :meth:`Table.of`.
    """
    names = [field.name for field in fields(row) if field.name in frame]
    if 0 < most < len(frame):
        options["more"] = f"{most} of {len(frame)} rows; --details shows all."
        frame = frame.iloc[np.linspace(0, len(frame) - 1, most).round().astype(int)]
    rows = [row(**{name: each[name] for name in names}) for each in records(frame)]
    return Table.of(rows, caption, **options)


R = TypeVar("R", bound=StudyResult)


class Analysis:
    """An analysis at work.

    Attributes:
        study: Where it is kept.
        models: What it runs, with the name of each in reports.
        texts: Its sources by name: ``data``, perhaps ``held-out``.
        settings: Its protocol.
    """

    def __init__(
        self,
        study: Study,
        models: Sequence[ModelLike],
        texts: Mapping[str, Texts],
        settings: Mapping[str, Any],
        batch: int | None,
    ) -> None:
        self.study, self.texts, self.settings, self._batch = study, texts, settings, batch
        self.models = dict(zip(labels(models), models, strict=True))

    def batch_size(self, causal: CausalModel, length: int, layers: int) -> int:
        """Segments a forward pass: as asked for, else by memory; settled when the study starts."""
        return int(
            self.study.once(f"batch_size.{length}", lambda: self._batch or causal.batch_size(length, layers))
        )

    def segments(self, name: str, causal: CausalModel, *, count: int, texts: str = "data") -> Segments:
        """Segments of a source, drawn by the first process when the study starts, read afterwards."""
        length, source = self.settings["segment"], self.texts[texts]
        causal.check_segment(length)

        def draw() -> dict[str, Any]:
            options = {"length": length, "count": count, "seed": self.settings["seed"]}
            tokenizer, pack = causal.loaded.tokenizer, self.settings["pack"]
            return write_segments(self.study.work_folder, name, source, tokenizer, pack=pack, **options)

        fresh = f"segments.{name}" not in self.study.manifest
        written = self.study.once(f"segments.{name}", draw)
        drawn = read_segments(self.study.work_folder, name, written, source.source)
        if fresh and self.study.processes.first:
            self.study.say(drawn.counts.report(source.source))
        return drawn

    def over(
        self,
        name: str,
        causal: CausalModel,
        drawn: Segments,
        layers: Sequence[str],
        reduce: Callable[[Tensor, NDArray[np.int64]], NDArray[Any]],
        *,
        control: str = "",
        losses: bool = False,
    ) -> Units:
        """Run all segments, a batch a unit, each of which keeps an array a layer and ``nll`` for losses.

        Args:
            name: Of the pass.
            causal: The model.
            drawn: The segments.
            layers: Whose states are looked at.
            reduce: From states (b, t, d) and the segments' numbers (b,) to an array of b rows.
            control: As whose tokens the model sees the segments.
            losses: Also keep the NLL of every token after the first, (b, t - 1).

        Raises:
            NonFiniteStateError: The model produces NaN; names layer and text.
        """
        n, length = drawn.tokens.shape
        size = self.batch_size(causal, length, len(layers))

        def do(unit: int) -> Unit:
            rows = np.arange(unit * size, min((unit + 1) * size, n))
            origins = drawn.origins[rows]
            tokens = control_tokens(control, drawn.tokens[rows], rows, causal, self.settings["seed"])
            reduced, nll = causal.run(
                tokens,
                layers,
                lambda _layer, states, first: reduce(states, rows[first : first + len(states)]),
                batch=size,
                losses=losses,
            )
            arrays: Unit = {layer: np.concatenate(parts) for layer, parts in reduced.items()}
            if losses:
                arrays["nll"] = nll
            for layer, array in arrays.items():
                place = "the output" if layer == "nll" else layer
                causal.check_finite(array, place, origins, drawn.source)
            return arrays

        return self.study.units(name, -(-n // size), do)


Measure = Callable[[Analysis], None]


def analyse(
    result: type[R],
    measure: Measure,
    models: ModelLike | Sequence[ModelLike],
    data: DataLike,
    settings: Mapping[str, Any],
    batch: int | None,
    folder: Folder,
    quiet: bool,
    *,
    held_out: DataLike | None = None,
) -> R:
    """The result of the study that models, texts and settings name, measured where it is not complete.

    Args:
        result: What comes of it.
        measure: Does the work, and finishes the study with the result's tables.
        models: What is run.
        data: The source of texts.
        settings: The protocol, ``pack`` and ``seed`` included.
        batch: Segments a forward pass; by memory if None.
        folder: Where the study is kept; a temporary place if None.
        quiet: Whether to say nothing on stderr.
        held_out: A second source.

    Raises:
        UsageError: A model is named twice, a source does not exist, the folder holds another study, or
            ``batch`` is below 1.
    """
    if batch is not None and batch < 1:
        raise UsageError(f"expected a batch size of at least 1, got {batch}")
    every = as_models(models)
    texts = {"data": as_texts(data), **({} if held_out is None else {"held-out": as_texts(held_out)})}
    identity = {
        "models": [model_settings(model) for model in every],
        **{name.replace("-", "_"): data_settings(source) for name, source in texts.items()},
        **settings,
    }
    names = {
        "models": [full_name(model) for model in every],
        "texts": [source.source for source in texts.values()],
    }
    with opened(result.kind, identity, names, folder, quiet) as study:
        if not study.complete:
            measure(Analysis(study, every, texts, identity, batch))
        return result.of(study)
